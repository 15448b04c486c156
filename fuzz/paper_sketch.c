/* What the owner of a shard does with bytes from other ranks: an index and cells, whatever they hold, must be
 * planned and peeled within bounds. Input: 2 bytes cells asked for, 1 seed, 1 for n % 64; then half bitmap,
 * half cells. */
#include "codec/bitmap.h"
#include "paper/pack.h"
#include "paper/peel.h"
#include "paper/sketch.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void require(int holds) {
    if (!holds) abort();
}

static void *exactly(size_t n_bytes) {
    void *memory = calloc(n_bytes + 1, 1);
    require(memory != NULL);
    return memory;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    if (n_bytes < 4 + 16) return 0;
    size_t n_bitmap = (n_bytes - 4) / 16 * 8, n = 8 * n_bitmap - data[3] % 64;
    uint8_t *bits = exactly(n_bitmap);
    memcpy(bits, data + 4, n_bitmap);
    if (!tagc_bitmap_valid(bits, n)) { /* as the caller must refuse it */
        free(bits);
        return 0;
    }
    size_t n_items = tagc_bitmap_count(bits, n);
    uint32_t *indices = exactly(n_items * 4);
    require(tagc_bitmap_indices(bits, n, indices) == n_items);
    require(n_items == 0 || indices[n_items - 1] < n);

    tagc_sketch sketch;
    tagc_peeling peeling;
    tagc_sketch_init(&sketch, n, data[0] + 256u * data[1], data[2]);
    void *memory = exactly(tagc_peeling_bytes(n_items)),
         *scratch = exactly(tagc_peeling_scratch_bytes(&sketch, n_items));
    tagc_peeling_place(&peeling, memory, n_items);
    tagc_peeling_make(&peeling, &sketch, indices, n_items, scratch);
    require(peeling.n_peeled <= n_items && peeling.n_rounds <= TAGC_PEELING_MAX_ROUNDS);

    float *cells = exactly(sketch.n_cells * 4), *values = exactly(n_items * 4), *out = exactly(n * 4);
    int32_t *fixed = exactly(sketch.n_cells * 4), *integers = exactly(n_items * 4);
    size_t n_given = n_bitmap < sketch.n_cells * 4 ? n_bitmap : sketch.n_cells * 4;
    memcpy(cells, data + 4 + n_bitmap, n_given);
    memcpy(fixed, data + 4 + n_bitmap, n_given);
    tagc_peeling_replay(TAGC_CELLS_FP32, &peeling, &sketch, indices, cells, values);
    tagc_peeling_estimate(TAGC_CELLS_FP32, &peeling, &sketch, indices, cells, values);
    tagc_peeling_replay(TAGC_CELLS_FIXED, &peeling, &sketch, indices, fixed, integers);
    tagc_peeling_estimate(TAGC_CELLS_FIXED, &peeling, &sketch, indices, fixed, integers);
    int is_dirty = tagc_peeling_dirty(TAGC_CELLS_FIXED, &peeling, &sketch, fixed, 0);
    require(!(is_dirty && peeling.n_peeled < n_items));
    tagc_unpack(indices, n_items, values, 0.5f, out, n);
    free(bits), free(indices), free(memory), free(scratch);
    free(cells), free(values), free(out), free(fixed), free(integers);
    return 0;
}
