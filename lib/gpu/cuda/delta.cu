/* Batches of deltas: two launches for any number of rows. */
#include "gpu/cuda/delta.cuh"
#include "gpu/cuda/host.cuh"

#include <new>
#include <stdlib.h>

using namespace tagc_cuda;

struct tagc_delta_batch {
    tagc_delta_kind kind;
    cudaStream_t stream;
    size_t n_rows;
    table<delta_row> rows;
    table<uint32_t> row_of_block;
    char *image, *work;
    size_t image_bytes;
};

/* Returns the bytes of the device that the tables take. */
static size_t lay_out(tagc_delta_batch *b, const tagc_delta_row *rows) {
    tagc_arena arena = {};
    size_t n_blocks = 0;
    for (size_t i = 0; i < b->n_rows; i++) n_blocks += parts_of(rows[i].n, (size_t)WARPS * TAGC_DELTA_BLOCK);
    arena.base = b->work;
    take_table(b->image, &arena, &b->rows, b->n_rows);
    take_table(b->image, &arena, &b->row_of_block, n_blocks);
    return b->image_bytes = arena.n_bytes;
}

tagc_status tagc_cuda::cuda_delta_prepare(void) {
    TAGC_TRY(load_kernel(clear_deltas));
    return load_kernel(run_deltas);
}

static size_t delta_work_bytes(const tagc_delta_row *rows, size_t n_rows) {
    tagc_delta_batch b = {};
    b.n_rows = n_rows;
    return lay_out(&b, rows);
}

static tagc_status delta_point(tagc_delta_batch *b, const tagc_delta_row *rows, int *results) {
    uint32_t first = 0;
    for (size_t i = 0; i < b->n_rows; i++) {
        delta_row *row = &b->rows.host[i];
        row->arrays = rows[i];
        row->result = &results[i];
        row->first_block = first;
        row->n_blocks = parts_of(rows[i].n, (size_t)WARPS * TAGC_DELTA_BLOCK);
        for (uint32_t k = 0; k < row->n_blocks; k++) b->row_of_block.host[first++] = (uint32_t)i;
    }
    return copy_to_device(b->work, b->image, b->image_bytes, b->stream);
}

static void delta_destroy(tagc_delta_batch *b) {
    if (!b) return;
    free(b->image);
    delete b;
}

static tagc_status delta_create(tagc_delta_kind kind, const tagc_delta_row *rows, size_t n_rows, int *results,
                                void *work, void *stream, tagc_delta_batch **out) {
    *out = nullptr;
    tagc_delta_batch *b = new (std::nothrow) tagc_delta_batch();
    if (!b) return tagc_fail(TAGC_ERR_MEMORY, "no memory for a batch of %zu deltas", n_rows);
    b->kind = kind;
    b->n_rows = n_rows;
    b->stream = static_cast<cudaStream_t>(stream);
    b->work = static_cast<char *>(work);
    const size_t n_bytes = lay_out(b, rows);
    b->image = static_cast<char *>(calloc(n_bytes ? n_bytes : 1, 1));
    if (!b->image) {
        delete b;
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for the tables of a batch of deltas: %zu bytes",
                         n_bytes);
    }
    lay_out(b, rows);
    tagc_status status = delta_point(b, rows, results);
    if (status == TAGC_OK)
        *out = b;
    else
        delta_destroy(b);
    return status;
}

static tagc_status delta_run(tagc_delta_batch *b) {
    const work_of<delta_row> work = {b->rows.device, b->row_of_block.device};
    const delta_row *rows = b->rows.device;
    const unsigned n_rows = (unsigned)b->n_rows;
    const int kind = b->kind;
    TAGC_LAUNCH(clear_deltas, no_shared, parts_of(n_rows, THREADS) * (n_rows > 0), b->stream, rows, n_rows);
    TAGC_LAUNCH(run_deltas, no_shared, b->row_of_block.n, b->stream, work, kind);
    return check_launches();
}

const tagc_delta_maker tagc_cuda::cuda_deltas = {delta_work_bytes, delta_create, delta_point, delta_run,
                                                 delta_destroy};
