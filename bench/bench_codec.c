/* What compressing a gradient costs beside the floor of its memory traffic: reading the gradient and the
 * residual and writing the residual once, in place or into another array. First selection alone, over the
 * whole gradient; then the computing of one rank of two in a whole step, phase by phase, with packed values
 * and with the sketch as the coder. Selection is measured with a residual in int8, too, into another array, of a gradient in fp32 and
 * one in bf16. The floors of these are 6 and 4 bytes per element, that of fp32 is 12.
 *
 * Everything takes turns in one process, so that a busy machine slows all alike: a ratio is the median over
 * the turns of time / floor of the same turn. The two ranks' gradients are independent, so that their union
 * is the largest that can be. */
#include "codec/bf16.h"
#include "codec/bitmap.h"
#include "codec/elements.h"
#include "codec/residual.h"
#include "codec/select.h"
#include "measure.h"
#include "paper/pack.h"
#include "paper/peel.h"
#include "paper/sketch.h"

#include <errno.h>
#include <getopt.h>

enum { W = 2, OWN = 0, PEER = 1, MIN_N = 1024, MAX_REPEATS = 1000, N_STEPS_BEFORE = 4 };

typedef struct options {
    size_t n; /* 0: the two default shapes */
    int n_threads, n_repeats;
    const char *json_path;
} options;

/* In the order of the work. */
typedef enum quantity {
    FLOOR_IN_PLACE,
    FLOOR_APART,
    SELECT_IN_PLACE,
    SELECT_APART,
    FLOOR_INT8,
    SELECT_INT8,
    FLOOR_HALVES,
    SELECT_HALVES,
    STEP_SELECT,
    STEP_MAKE,
    STEP_OR,
    PACKED_LIST,
    PACKED_PACK,
    PACKED_ADD,
    PACKED_UNPACK,
    PACKED_TOTAL,
    SKETCH_LIST,
    SKETCH_PLAN,
    SKETCH_ENCODE,
    SKETCH_ADD,
    SKETCH_PEEL,
    SKETCH_UNPACK,
    SKETCH_TOTAL,
    N_QUANTITIES
} quantity;

static const struct {
    const char *key, *text;
} names[N_QUANTITIES] = {
    [FLOOR_IN_PLACE] = {"floor_in_place", "floor, in place"},
    [FLOOR_APART] = {"floor_apart", "floor, into another array"},
    [SELECT_IN_PLACE] = {"select_in_place", "selection, in place"},
    [SELECT_APART] = {"select_apart", "selection, into another array"},
    [FLOOR_INT8] = {"floor_int8", "floor, residual in int8"},
    [SELECT_INT8] = {"select_int8", "selection, residual in int8"},
    [FLOOR_HALVES] = {"floor_int8_bf16", "floor, gradient in bf16, too"},
    [SELECT_HALVES] = {"select_int8_bf16", "selection, gradient in bf16, too"},
    [STEP_SELECT] = {"step_select", "  select, both shards"},
    [STEP_MAKE] = {"step_make", "  index: make, both shards"},
    [STEP_OR] = {"step_or", "  index: or and count, own"},
    [PACKED_LIST] = {"packed_list", "  packed: list, both"},
    [PACKED_PACK] = {"packed_pack", "  packed: pack and fill, both"},
    [PACKED_ADD] = {"packed_add", "  packed: add, own"},
    [PACKED_UNPACK] = {"packed_unpack", "  packed: unpack, own"},
    [PACKED_TOTAL] = {"packed_total", "packed, whole step"},
    [SKETCH_LIST] = {"sketch_list", "  sketch: list, own, twice"},
    [SKETCH_PLAN] = {"sketch_plan", "  sketch: plan, own"},
    [SKETCH_ENCODE] = {"sketch_encode", "  sketch: encode, both"},
    [SKETCH_ADD] = {"sketch_add", "  sketch: add, own"},
    [SKETCH_PEEL] = {"sketch_peel", "  sketch: peel and check, own"},
    [SKETCH_UNPACK] = {"sketch_unpack", "  sketch: unpack, own"},
    [SKETCH_TOTAL] = {"sketch_total", "sketch, whole step"},
};

/* Everything of one case: n elements at one sparsity, seen by rank OWN. */
typedef struct bench {
    const options *options;
    tagc_pool *pool;
    double sparsity, ratio;
    size_t n, shard, k, k_shard;
    float *gradient, *residual, *next, *floor_residual; /* (n) */
    uint16_t *halves;                                   /* (n) the gradient */
    uint8_t *stored, *next_stored;                      /* rows of n in int8 */
    uint32_t *indices;                                  /* (max(k, W * k_shard)): row d at d * k_shard */
    float *values;                                      /* the same */
    void *select_scratch;
    size_t n_sent[W];
    float max_abs;
    uint8_t *bits[W], *peer_bits[W], *unions[W]; /* (bitmap of a shard) */
    uint32_t *peer_indices[W], *list;            /* (k_shard); (max_union) */
    float *peer_values[W];                       /* (k_shard) */
    size_t n_peer_sent[W], n_union[W], max_union;
    float *packed[W], *peer_packed, *sums; /* (max_union) */
    float *output;                         /* (shard) */
    tagc_sketch sketch;
    tagc_peeling peeling;
    float *cells[W], *peer_cells; /* (n_cells) */
    void *peeling_memory, *peeling_scratch;
    int n_two_passes;
    double *times[N_QUANTITIES]; /* (n_repeats) seconds */
} bench;

/* ---- the two ranks' data ---- */

/* Elements [at, at + n) of the gradient and of `residual`, into `next`; what is kept goes to `out`. */
static tagc_selection select_range(bench *b, const float *residual, float *next, size_t at, size_t n,
                                   size_t k, size_t out) {
    tagc_selection result;
    tagc_select(b->gradient + at, residual + at, next + at, n, k, b->indices + out, b->values + out,
                b->select_scratch, b->pool, &result);
    b->n_two_passes += result.n_passes == 2;
    return result;
}

static void select_shard(bench *b, int d) {
    tagc_selection result = select_range(b, b->residual, b->next, (size_t)d * b->shard, b->shard, b->k_shard,
                                         (size_t)d * b->k_shard);
    b->n_sent[d] = result.n_sent;
    if (d == OWN) b->max_abs = result.max_abs;
}

static void make_index(bench *b, int d) {
    tagc_bitmap_make(b->bits[d], b->shard, b->indices + (size_t)d * b->k_shard, b->n_sent[d]);
}

/* Leaves a gradient with the residual of a running training, and what is selected of them. */
static void run_steps(bench *b, uint64_t seed) {
    memset(b->residual, 0, b->n * sizeof *b->residual);
    for (int step = 0; step <= N_STEPS_BEFORE; step++) {
        tagc_fill_gradient(b->gradient, b->n, &seed);
        for (int d = 0; d < W; d++) select_shard(b, d);
        if (step < N_STEPS_BEFORE) memcpy(b->residual, b->next, W * b->shard * sizeof *b->residual);
    }
    for (int d = 0; d < W; d++) make_index(b, d);
    tagc_bf16_narrow(b->gradient, b->halves, b->n);
    tagc_residual_write(TAGC_FORMAT_INT8, b->n, b->residual, 0, b->n, 1, b->stored);
}

static void remember_peer(bench *b) {
    for (int d = 0; d < W; d++) {
        b->n_peer_sent[d] = b->n_sent[d];
        memcpy(b->peer_indices[d], b->indices + (size_t)d * b->k_shard, b->n_sent[d] * sizeof(uint32_t));
        memcpy(b->peer_values[d], b->values + (size_t)d * b->k_shard, b->n_sent[d] * sizeof(float));
        memcpy(b->peer_bits[d], b->bits[d], tagc_bitmap_bytes(b->shard));
    }
}

static void take_arrays(bench *b) {
    size_t n_listed = b->k > W * b->k_shard ? b->k : W * b->k_shard, n_bitmap = tagc_bitmap_bytes(b->shard);
    int n_threads = b->options->n_threads;
    size_t scratch = tagc_select_scratch_bytes(b->n, b->k, n_threads),
           shard_scratch = tagc_select_scratch_bytes(b->shard, b->k_shard, n_threads);
    b->gradient = take(b->n, sizeof(float), "gradient");
    b->residual = take(b->n, sizeof(float), "residual");
    b->next = take(b->n, sizeof(float), "next residual");
    b->floor_residual = take(b->n, sizeof(float), "residual of the floor");
    b->halves = take(b->n, sizeof(uint16_t), "gradient in bf16");
    b->stored = take(tagc_residual_bytes(TAGC_FORMAT_INT8, b->n), 1, "residual in int8");
    b->next_stored = take(tagc_residual_bytes(TAGC_FORMAT_INT8, b->n), 1, "next residual in int8");
    b->indices = take(n_listed, sizeof(uint32_t), "indices");
    b->values = take(n_listed, sizeof(float), "values");
    b->select_scratch = take(scratch > shard_scratch ? scratch : shard_scratch, 1, "scratch");
    b->max_union = W * b->k_shard < b->shard ? W * b->k_shard : b->shard;
    tagc_sketch_init(&b->sketch, b->shard, (size_t)ceil((double)b->shard / b->ratio), 1);
    for (int d = 0; d < W; d++) {
        b->bits[d] = take(n_bitmap, 1, "index");
        b->peer_bits[d] = take(n_bitmap, 1, "the peer's index");
        b->unions[d] = take(n_bitmap, 1, "union");
        b->peer_indices[d] = take(b->k_shard, sizeof(uint32_t), "the peer's indices");
        b->peer_values[d] = take(b->k_shard, sizeof(float), "the peer's values");
        b->packed[d] = take(b->max_union, sizeof(float), "packed values");
        b->cells[d] = take(b->sketch.n_cells, sizeof(float), "cells");
    }
    b->list = take(b->max_union, sizeof(uint32_t), "list");
    b->peer_packed = take(b->max_union, sizeof(float), "the peer's packed values");
    b->peer_cells = take(b->sketch.n_cells, sizeof(float), "the peer's cells");
    b->sums = take(b->max_union, sizeof(float), "sums");
    b->output = take(b->shard, sizeof(float), "output");
    b->peeling_memory = take(tagc_peeling_bytes(b->max_union), 1, "peeling");
    b->peeling_scratch = take(tagc_peeling_scratch_bytes(&b->sketch, b->max_union), 1, "scratch of planning");
    for (int q = 0; q < N_QUANTITIES; q++)
        b->times[q] = take((size_t)b->options->n_repeats, sizeof(double), "times");
}

static void bench_destroy(bench *b) {
    void *single[] = {b->gradient, b->residual,       b->next,           b->floor_residual,  b->indices,
                      b->values,   b->select_scratch, b->list,           b->peer_packed,     b->peer_cells,
                      b->sums,     b->output,         b->peeling_memory, b->peeling_scratch, b->halves,
                      b->stored,   b->next_stored};
    for (size_t i = 0; i < sizeof single / sizeof *single; i++) tagc_memory_destroy(single[i]);
    for (int d = 0; d < W; d++) {
        void *each[] = {b->bits[d],        b->peer_bits[d], b->unions[d], b->peer_indices[d],
                        b->peer_values[d], b->packed[d],    b->cells[d]};
        for (size_t i = 0; i < sizeof each / sizeof *each; i++) tagc_memory_destroy(each[i]);
    }
    for (int q = 0; q < N_QUANTITIES; q++) tagc_memory_destroy(b->times[q]);
    tagc_pool_destroy(b->pool);
}

static void bench_make(bench *b, const options *o, size_t n, double sparsity, double ratio) {
    *b = (bench){.options = o, .n = n, .shard = n / W, .sparsity = sparsity, .ratio = ratio};
    b->k = tagc_select_count(n, sparsity);
    b->k_shard = tagc_select_count(b->shard, sparsity);
    take_arrays(b);
    if (tagc_pool_create(o->n_threads, &b->pool) != TAGC_OK) {
        fprintf(stderr, "bench_codec: %s\n", tagc_last_error());
        exit(1);
    }
    run_steps(b, 2);
    remember_peer(b);
    run_steps(b, 1);
    for (int d = 0; d < W; d++) {
        memcpy(b->unions[d], b->bits[d], tagc_bitmap_bytes(b->shard));
        tagc_bitmap_or(b->unions[d], b->peer_bits[d], b->shard);
        b->n_union[d] = tagc_bitmap_count(b->unions[d], b->shard);
    }
    tagc_bitmap_indices(b->unions[OWN], b->shard, b->list);
    tagc_pack(b->list, b->n_union[OWN], b->peer_indices[OWN], b->peer_values[OWN], b->n_peer_sent[OWN], NULL,
              b->peer_packed);
    tagc_sketch_encode(TAGC_CELLS_FP32, &b->sketch, b->peer_indices[OWN], b->peer_values[OWN],
                       b->n_peer_sent[OWN], b->peer_cells);
    b->n_two_passes = 0;
}

/* ---- one turn ---- */

/* Adds the time since *now_s to a quantity, and starts again. */
static void lap(bench *b, quantity q, int turn, double *now_s) {
    double end_s = tagc_clock_s();
    b->times[q][turn] += end_s - *now_s;
    *now_s = end_s;
}

static void time_selection(bench *b, int turn) {
    b->times[FLOOR_APART][turn] = tagc_time_floor(b->pool, b->gradient, b->floor_residual, b->next, b->n);
    double now_s = tagc_clock_s();
    select_range(b, b->residual, b->next, 0, b->n, b->k, 0);
    lap(b, SELECT_APART, turn, &now_s);
    memcpy(b->next, b->residual, b->n * sizeof *b->next); /* the same work in place, and each turn */
    b->times[FLOOR_IN_PLACE][turn] =
        tagc_time_floor(b->pool, b->gradient, b->floor_residual, b->floor_residual, b->n);
    now_s = tagc_clock_s();
    select_range(b, b->next, b->next, 0, b->n, b->k, 0);
    lap(b, SELECT_IN_PLACE, turn, &now_s);
}

static void select_stored(bench *b, const void *gradient, int format) {
    tagc_addends addends = {b->n, format, TAGC_FORMAT_INT8, gradient, b->stored};
    tagc_selection result;
    tagc_select_addends(&addends, b->next_stored, 1, b->k, b->indices, b->values, b->select_scratch, b->pool,
                        &result);
    tagc_select_settle(NULL, b->select_scratch);
    b->n_two_passes += result.n_passes == 2;
}

static void time_stored(bench *b, int turn) {
    b->times[FLOOR_INT8][turn] =
        tagc_time_byte_floor(b->pool, b->gradient, 4, b->stored, b->next_stored, b->n);
    double now_s = tagc_clock_s();
    select_stored(b, b->gradient, TAGC_FORMAT_FP32);
    lap(b, SELECT_INT8, turn, &now_s);
    b->times[FLOOR_HALVES][turn] =
        tagc_time_byte_floor(b->pool, b->halves, 2, b->stored, b->next_stored, b->n);
    now_s = tagc_clock_s();
    select_stored(b, b->halves, TAGC_FORMAT_BF16);
    lap(b, SELECT_HALVES, turn, &now_s);
}

static void list_union(bench *b, int d, quantity q, int turn, double *now_s) {
    tagc_bitmap_indices(b->unions[d], b->shard, b->list);
    lap(b, q, turn, now_s);
}

static void time_packed(bench *b, int turn) {
    double now_s = tagc_clock_s();
    for (int d = W - 1; d >= 0; d--) {
        list_union(b, d, PACKED_LIST, turn, &now_s);
        tagc_pack(b->list, b->n_union[d], b->indices + (size_t)d * b->k_shard,
                  b->values + (size_t)d * b->k_shard, b->n_sent[d], b->next + (size_t)d * b->shard,
                  b->packed[d]);
        lap(b, PACKED_PACK, turn, &now_s);
    }
    memcpy(b->sums, b->packed[OWN], b->n_union[OWN] * sizeof *b->sums);
    tagc_sum_add(b->sums, b->peer_packed, b->n_union[OWN]);
    lap(b, PACKED_ADD, turn, &now_s);
    tagc_unpack(b->list, b->n_union[OWN], b->sums, 1.0f / W, b->output, b->shard);
    lap(b, PACKED_UNPACK, turn, &now_s);
}

static void time_sketch(bench *b, int turn) {
    double now_s = tagc_clock_s();
    list_union(b, OWN, SKETCH_LIST, turn, &now_s);
    tagc_peeling_place(&b->peeling, b->peeling_memory, b->n_union[OWN]);
    tagc_peeling_make(&b->peeling, &b->sketch, b->list, b->n_union[OWN], b->peeling_scratch);
    lap(b, SKETCH_PLAN, turn, &now_s);
    for (int d = W - 1; d >= 0; d--) {
        if (d == OWN) list_union(b, d, SKETCH_LIST, turn, &now_s);
        memset(b->cells[d], 0, b->sketch.n_cells * sizeof(float));
        tagc_sketch_encode(TAGC_CELLS_FP32, &b->sketch, b->indices + (size_t)d * b->k_shard,
                           b->values + (size_t)d * b->k_shard, b->n_sent[d], b->cells[d]);
        lap(b, SKETCH_ENCODE, turn, &now_s);
    }
    tagc_sum_add(b->cells[OWN], b->peer_cells, b->sketch.n_cells);
    lap(b, SKETCH_ADD, turn, &now_s);
    tagc_peeling_replay(TAGC_CELLS_FP32, &b->peeling, &b->sketch, b->list, b->cells[OWN], b->sums);
    if (tagc_peeling_dirty(TAGC_CELLS_FP32, &b->peeling, &b->sketch, b->cells[OWN], 0.01f * W * b->max_abs)) {
        fprintf(stderr, "bench_codec: the sketch did not give back what went in\n");
        exit(1);
    }
    lap(b, SKETCH_PEEL, turn, &now_s);
    tagc_unpack(b->list, b->n_union[OWN], b->sums, 1.0f / W, b->output, b->shard);
    lap(b, SKETCH_UNPACK, turn, &now_s);
}

/* One rank's step as the reducer computes it: the other rank's shard first, the own one last. */
static void time_step(bench *b, int turn) {
    double now_s = tagc_clock_s();
    for (int d = W - 1; d >= 0; d--) {
        select_shard(b, d);
        lap(b, STEP_SELECT, turn, &now_s);
        make_index(b, d);
        lap(b, STEP_MAKE, turn, &now_s);
    }
    tagc_bitmap_or(b->bits[OWN], b->peer_bits[OWN], b->shard);
    tagc_bitmap_count(b->bits[OWN], b->shard);
    lap(b, STEP_OR, turn, &now_s);
    time_packed(b, turn);
    time_sketch(b, turn);
    double front_s = 0;
    for (int q = STEP_SELECT; q <= STEP_OR; q++) front_s += b->times[q][turn];
    b->times[PACKED_TOTAL][turn] = b->times[SKETCH_TOTAL][turn] = front_s;
    for (int q = PACKED_LIST; q < PACKED_TOTAL; q++) b->times[PACKED_TOTAL][turn] += b->times[q][turn];
    for (int q = SKETCH_LIST; q < SKETCH_TOTAL; q++) b->times[SKETCH_TOTAL][turn] += b->times[q][turn];
}

/* ---- results ---- */

typedef struct result {
    size_t n;
    double sparsity, ratio, load, union_part;
    int n_two_passes, n_rounds;
    size_t n_unpeeled;
    spread time_s[N_QUANTITIES], to_in_place[N_QUANTITIES], to_apart[N_QUANTITIES];
} result;

/* Quartiles of the ratio of a quantity to a floor, turn by turn; of a stored residual to its own floor. */
static spread spread_of_ratio(const bench *b, int q, int floor, double *ratios) {
    int n = b->options->n_repeats;
    if (q == SELECT_INT8 || q == SELECT_HALVES) floor = q - 1;
    for (int i = 0; i < n; i++) ratios[i] = b->times[q][i] / b->times[floor][i];
    return spread_of(ratios, n);
}

static result result_of(const bench *b) {
    result r = {.n = b->n,
                .sparsity = b->sparsity,
                .ratio = b->ratio,
                .load = (double)b->n_union[OWN] / (double)b->sketch.n_cells,
                .union_part = (double)b->n_union[OWN] / (double)b->shard,
                .n_two_passes = b->n_two_passes,
                .n_rounds = b->peeling.n_rounds,
                .n_unpeeled = b->n_union[OWN] - b->peeling.n_peeled};
    double ratios[MAX_REPEATS];
    for (int q = 0; q < N_QUANTITIES; q++) {
        r.to_in_place[q] = spread_of_ratio(b, q, FLOOR_IN_PLACE, ratios);
        r.to_apart[q] = spread_of_ratio(b, q, FLOOR_APART, ratios);
        memcpy(ratios, b->times[q], (size_t)b->options->n_repeats * sizeof *ratios);
        r.time_s[q] = spread_of(ratios, b->options->n_repeats);
    }
    return r;
}

static double floor_speed(const result *r, quantity floor) { /* GB/s */
    double n_bytes = floor == FLOOR_INT8 ? 6 : floor == FLOOR_HALVES ? 4 : 12;
    return 1e-9 * n_bytes * (double)r->n / r->time_s[floor].median;
}

static void print_result(const result *r) {
    printf(
        "\nn = %zu, theta = %.2f %%, W = %d: union %.2f %%; sketch %gx: load %.3f, %d rounds, %zu unpeeled\n",
        r->n, 100 * r->sparsity, W, 100 * r->union_part, r->ratio, r->load, r->n_rounds, r->n_unpeeled);
    printf("  %-32s %9s %8s   %-25s %s\n", "", "ms", "ns/elem", "/ floor in place  (quartiles)",
           "/ floor apart");
    for (int q = 0; q < N_QUANTITIES; q++) {
        printf("  %-32s %9.3f %8.4f   %7.3f  (%.3f - %.3f) %12.3f", names[q].text, 1e3 * r->time_s[q].median,
               1e9 * r->time_s[q].median / (double)r->n, r->to_in_place[q].median, r->to_in_place[q].quarter,
               r->to_in_place[q].three_quarters, r->to_apart[q].median);
        if (q == SELECT_INT8 || q == SELECT_HALVES) printf("   (both: to the floor above)");
        if (q <= FLOOR_APART || q == FLOOR_INT8 || q == FLOOR_HALVES)
            printf("   %.1f GB/s", floor_speed(r, (quantity)q));
        printf("\n");
        if (q == SELECT_HALVES) printf("  one rank's step:\n");
    }
    if (r->n_two_passes) printf("  %d selections needed a second pass\n", r->n_two_passes);
}

static void print_summary(const result *results, size_t n_results) {
    printf("\nRatio to the floor in place (in brackets: to the floor of the same writing)\n");
    printf("%10s %8s | %10s | %9s %17s | %6s %6s | %8s %8s\n", "n", "theta", "floor GB/s", "selection",
           "into another", "int8*", "bf16*", "packed", "sketch");
    for (size_t i = 0; i < n_results; i++) {
        const result *r = &results[i];
        printf("%10zu %6.2f %% | %10.1f | %9.3f %8.3f [%6.3f] | %6.3f %6.3f | %8.3f %8.3f\n", r->n,
               100 * r->sparsity, floor_speed(r, FLOOR_IN_PLACE), r->to_in_place[SELECT_IN_PLACE].median,
               r->to_in_place[SELECT_APART].median, r->to_apart[SELECT_APART].median,
               r->to_in_place[SELECT_INT8].median, r->to_in_place[SELECT_HALVES].median,
               r->to_in_place[PACKED_TOTAL].median, r->to_in_place[SKETCH_TOTAL].median);
    }
    printf("* selection with a residual in int8, to a floor of 6 bytes; and of a gradient in bf16, to 4 "
           "bytes\n");
}

static int write_json(FILE *file, const options *o, const result *results, size_t n_results) {
    fprintf(file, "[");
    for (size_t i = 0; i < n_results; i++) {
        const result *r = &results[i];
        fprintf(file,
                "%s\n{\"n\": %zu, \"sparsity\": %.10g, \"world_size\": %d, \"ratio\": %g, \"threads\": %d, "
                "\"repeats\": %d, \"kernels\": \"%s\", \"union\": %.6g, \"load\": %.6g, \"rounds\": %d, "
                "\"unpeeled\": %zu, \"two_passes\": %d",
                i ? "," : "", r->n, r->sparsity, W, r->ratio, o->n_threads, o->n_repeats, level_in_use(),
                r->union_part, r->load, r->n_rounds, r->n_unpeeled, r->n_two_passes);
        for (int q = 0; q < N_QUANTITIES; q++)
            fprintf(file,
                    ",\n \"%s\": {\"s\": %.6g, \"to_floor_in_place\": [%.4f, %.4f, %.4f], "
                    "\"to_floor_apart\": [%.4f, %.4f, %.4f]}",
                    names[q].key, r->time_s[q].median, r->to_in_place[q].quarter, r->to_in_place[q].median,
                    r->to_in_place[q].three_quarters, r->to_apart[q].quarter, r->to_apart[q].median,
                    r->to_apart[q].three_quarters);
        fprintf(file, "}");
    }
    fprintf(file, "\n]\n");
    int failed = ferror(file);
    return fclose(file) || failed ? -1 : 0;
}

static result run_case(const options *o, size_t n, double sparsity, double ratio) {
    bench b;
    bench_make(&b, o, n, sparsity, ratio);
    for (int i = -1; i < o->n_repeats; i++) { /* -1: warm up */
        int turn = i < 0 ? 0 : i;
        for (int q = 0; q < N_QUANTITIES; q++) b.times[q][turn] = 0;
        time_selection(&b, turn);
        time_stored(&b, turn);
        time_step(&b, turn);
    }
    result r = result_of(&b);
    bench_destroy(&b);
    return r;
}

/* ---- options ---- */

static void print_help(void) {
    printf("Usage: bench_codec [options]\n"
           "Time of selection and of all computing of one rank in a step, as ratios to the memory floor:\n"
           "reading gradient and residual and writing the residual, measured in the same turns.\n\n"
           "  --n N           elements of the gradient, %d to 2^32 - 1 (default: 38633472, then 2359296)\n"
           "  --threads N     of selection and of the floor, 1 to 256 (default 1; the rest uses one)\n"
           "  --repeats N     turns, 1 to %d (default 15)\n"
           "  --json FILE     writes the results there too: seconds (median), ratios (quartiles)\n"
           "  --help          this text\n"
           "TAGC_CPU=scalar, neon, avx2 or avx512 in the environment chooses the kernels.\n",
           MIN_N, MAX_REPEATS);
}

static options read_options(int argc, char **argv) {
    static const struct option known[] = {
        {"n", required_argument, NULL, 'n'},       {"threads", required_argument, NULL, 't'},
        {"repeats", required_argument, NULL, 'r'}, {"json", required_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},          {NULL, 0, NULL, 0}};
    options o = {.n_threads = 1, .n_repeats = 15};
    for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        if (c == 'n') o.n = number("--n", optarg, MIN_N, UINT32_MAX);
        if (c == 't') o.n_threads = (int)number("--threads", optarg, 1, 256);
        if (c == 'r') o.n_repeats = (int)number("--repeats", optarg, 1, MAX_REPEATS);
        if (c == 'j') o.json_path = optarg;
        if (c == 'h') print_help();
        if (c == 'h' || c == '?') exit(c == 'h' ? 0 : 2);
    }
    if (optind < argc) refuse("an argument", argv[optind], "an option: see --help");
    return o;
}

static int cannot_write(const char *path) {
    fprintf(stderr, "bench_codec: cannot write %s: %s\n", path, strerror(errno));
    return 1;
}

int main(int argc, char **argv) {
    static const struct {
        double sparsity, ratio; /* of the sketch: the paper's, and 4 at 95 % */
    } cases[] = {{0.9875, 10}, {0.95, 4}, {0.9, 4}, {0.8, 2}};
    enum { N_CASES = sizeof cases / sizeof *cases };
    options o = read_options(argc, argv);
    size_t shapes[] = {o.n ? o.n : 38633472, 2359296}, n_results = 0; /* 50304 x 768 and 768 x 3072 */
    result results[2 * N_CASES];
    FILE *json = o.json_path ? fopen(o.json_path, "w") : NULL;
    if (o.json_path && !json) return cannot_write(o.json_path);
    printf("bench_codec: %d thread%s, %s, %d turns; sketch cells and sums in fp32\n", o.n_threads,
           o.n_threads == 1 ? "" : "s", level_in_use(), o.n_repeats);
    for (int i = 0; i < (o.n ? 1 : 2); i++)
        for (int j = 0; j < N_CASES; j++) {
            results[n_results] = run_case(&o, shapes[i], cases[j].sparsity, cases[j].ratio);
            print_result(&results[n_results++]);
            fflush(stdout);
        }
    print_summary(results, n_results);
    if (json && write_json(json, &o, results, n_results)) return cannot_write(o.json_path);
    return 0;
}
