/* Sums of what queues, rooms and stores (lib/gpu) lay out, and of the work memory of kernels. */
#include "exchange/device_memory.h"

#include "exchange/options.h"
#include "exchange/volume.h"
#include <math.h>

enum { MAX_SIZES = 64 }; /* of units; spares of more are counted for each unit */

/* Candidates with their places, what is selected with its places, a bitmap, and a few bytes per chunk and span. */
static double selection_bytes(double n, double sparsity, double n_sampled) {
    double k = n * (1 - sparsity);
    return 6 * tagc_sample_room(n, k, n_sampled) + 8 * k + n / 8 + n / 32;
}

/* ---- a unit ---- */

typedef struct unit_needs {
    double residual;
    double here, there;  /* of a buffer, pinned and on the GPU */
    double encode, add;  /* work memory */
    double packed, sums; /* of a buffer on the GPU, where its parts do not lie in the gradient as they are */
    double plain;        /* gradient and sums, as the caller has them */
    int n_parts, n_coded;
} unit_needs;

static double in_pages(double n_bytes) {
    return ceil(n_bytes / TAGC_ROOM_BYTES) * TAGC_ROOM_BYTES;
}

static tagc_status add_part(const tagc_reducer_options *part, int world_size, int n_bytes, uint32_t n_sampled,
                            unit_needs *to) {
    tagc_exchange_memory memory;
    TAGC_TRY(tagc_reducer_memory(part, world_size, TAGC_FED_NOT, &memory));
    int returns = part->output == TAGC_OUTPUT_UNIT,
        is_direct = part->exchange == TAGC_EXCHANGE_DIRECT && !tagc_reducer_options_are_whole(part);
    double n = (double)part->n_elems, n_output = returns ? n : n / world_size;
    double n_rows = world_size - returns;
    to->n_parts++;
    to->residual += (double)memory.residual;
    to->here += in_pages(is_direct ? (double)memory.bodies : 4 * n + 4 * n_output);
    to->there += is_direct ? in_pages((double)memory.bodies) : 0;
    to->packed += in_pages((is_direct ? n_bytes : 4) * n);
    to->sums += in_pages(4 * n_output);
    to->plain += n_bytes * (n + n_output);
    to->n_coded += is_direct;
    if (!is_direct || part->sparsity == 0) return TAGC_OK;
    double row = selection_bytes(n / world_size, part->sparsity, n_sampled);
    to->encode = fmax(to->encode, n_rows * row);
    if (returns)
        to->add = fmax(to->add, selection_bytes(n / world_size, tagc_result_sparsity(part), n_sampled));
    return TAGC_OK;
}

/* ---- a model ---- */

typedef struct model_needs {
    double spares, here, there, copied, encode, add;
    int most_parts;
} model_needs;

/* has_sums: they do not fit where the caller wants them, of another type or in the gradient itself. */
static void add_unit(const unit_needs *unit, int has_sums, model_needs *to) {
    int is_whole = unit->n_parts == 1;
    if (unit->n_coded == 0) { /* it is copied to the host and back */
        to->copied = fmax(to->copied, unit->plain);
        return;
    }
    double there = unit->there + (is_whole ? 0 : unit->packed) + (is_whole && !has_sums ? 0 : unit->sums);
    to->here = fmax(to->here, unit->here);
    to->there = fmax(to->there, there);
    to->encode = fmax(to->encode, unit->encode);
    to->add = fmax(to->add, unit->add);
    if (unit->n_parts > to->most_parts) to->most_parts = unit->n_parts;
}

tagc_status tagc_device_memory_of(const tagc_reducer_options *parts, const uint32_t *units, size_t n,
                                  int world_size, int n_bytes, uint32_t n_sampled, int n_buffers,
                                  tagc_device_memory *out) {
    model_needs all = {0};
    double sizes[MAX_SIZES];
    size_t n_sizes = 0;
    *out = (tagc_device_memory){0};
    for (size_t i = 0; i < n;) {
        unit_needs unit = {0};
        size_t first = i, k = 0;
        for (; i < n && units[i] == units[first]; i++)
            TAGC_TRY(add_part(&parts[i], world_size, n_bytes, n_sampled, &unit));
        add_unit(&unit, n_bytes < 4 || parts[first].output == TAGC_OUTPUT_UNIT, &all);
        out->residual += (uint64_t)unit.residual;
        while (k < n_sizes && sizes[k] != unit.residual) k++; /* units of one size share their spares */
        if (k < n_sizes || unit.residual == 0) continue;
        all.spares += unit.residual;
        if (n_sizes < MAX_SIZES) sizes[n_sizes++] = unit.residual;
    }
    double heads = (all.most_parts + 2) * (double)TAGC_ROOM_BYTES;
    out->buffers = (uint64_t)(n_buffers * (all.spares + heads + all.there) + all.encode + all.add);
    out->pinned = (uint64_t)(TAGC_LEAST_PINNED_BYTES + n_buffers * (heads + all.here + all.copied));
    return TAGC_OK;
}
