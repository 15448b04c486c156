/* What exchanges take with their codec on the GPU: memory of the GPU, and pinned memory. Queues, rooms and stores (lib/gpu) lay
 * it out, and sizes of work memory are those of lib/gpu/cuda; here are their sums. */
#include "ways/room.h"

#include "core/memory.h"
#include "core/status.h"
#include "exchange/options.h"
#include "exchange/volume.h"
#include <math.h>

enum {
    N_BUFFERS = 2, /* exchanges under way */
    N_HERE = 3,    /* and with the codec on the host */
    PAGE_BYTES = 4096,
    LINE_VALUES = 16,   /* of the sample by which kernels predict what is selected */
    MAX_SIZES = 64,     /* of units; spares of more are counted for each unit */
    OWN_BYTES = 1 << 18 /* pinned, of the kernels */
};

/* ---- work memory of a selection ---- */

static double margin(double expected) {
    return 4 * sqrt(LINE_VALUES * (expected + 4 * LINE_VALUES));
}

/* Candidates that have room, of n values of which k are selected. n_sampled: values of the sample. */
static double candidates(double n, double k, double n_sampled) {
    double expected = k * n_sampled / n, reach = expected + margin(expected);
    return n < 4 * n_sampled ? 0 : fmin(n, (reach + margin(reach)) * n / n_sampled);
}

/* Candidates with their places, what is selected with its places, a bitmap, and a few bytes per chunk and span. */
static double selection_bytes(double n, double sparsity, double n_sampled) {
    double k = n * (1 - sparsity);
    return 6 * candidates(n, k, n_sampled) + 8 * k + n / 8 + n / 32;
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
    return ceil(n_bytes / PAGE_BYTES) * PAGE_BYTES;
}

static tagc_status add_part(const tagc_reducer_options *part, int world_size, int n_bytes, uint32_t n_sampled,
                            unit_needs *to) {
    tagc_exchange_memory memory;
    TAGC_TRY(tagc_reducer_memory(part, world_size, 0, &memory));
    int returns = part->output == TAGC_OUTPUT_UNIT, is_direct = part->exchange == TAGC_EXCHANGE_DIRECT;
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

tagc_status tagc_plan_there(const tagc_reducer_options *parts, const uint32_t *units, size_t n,
                            int world_size, int n_bytes, uint32_t n_sampled, tagc_room_there *out) {
    model_needs all = {0};
    double sizes[MAX_SIZES];
    size_t n_sizes = 0;
    *out = (tagc_room_there){0};
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
    double heads = (all.most_parts + 2) * (double)PAGE_BYTES;
    out->buffers = (uint64_t)(N_BUFFERS * (all.spares + heads + all.there) + all.encode + all.add);
    out->pinned = (uint64_t)(OWN_BYTES + N_BUFFERS * (heads + all.here + all.copied));
    return TAGC_OK;
}

uint64_t tagc_plan_pinned(const tagc_reducer_options *parts, const uint32_t *units, size_t n, int world_size,
                          int n_bytes) {
    double in = 0, out = 0;
    for (size_t i = 0; i < n;) {
        double values = 0, is_all_reduce = parts[i].output == TAGC_OUTPUT_UNIT;
        uint32_t unit = units[i];
        for (; i < n && units[i] == unit; i++) values += (double)parts[i].n_elems;
        in = fmax(in, n_bytes * values);
        out = fmax(out, n_bytes * values / (is_all_reduce ? 1 : world_size));
    }
    return (uint64_t)(N_HERE * (in + out));
}
