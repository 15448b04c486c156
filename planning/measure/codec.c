/* Times memory alone (the floor), and selecting, indexing, encoding and decoding.
 *
 * The floor is the least work of error feedback: read a gradient and a residual, write the residual. The codec is timed
 * in reducers of all ranks at once; waiting for the wire is a phase of its own. Codes of parameters need no other rank: a
 * shard is encoded and a unit decoded in memory. Gradients are normal * exp(normal), whose tail is as heavy as in training,
 * and new at every step. Each turn times the floor, too, so that ratios compare measurements close in time. */
#include "measure/codec.h"

#include "codec/bf16.h"
#include "codec/delta.h"
#include "codec/exponents.h"
#include "core/clock.h"
#include "core/measure.h"
#include "core/memory.h"
#include "core/status.h"
#include "exchange/options.h"
#include "exchange/reducer.h"
#include "files/result_file.h"
#include "launch/hosts.h"
#include "launch/over_ranks.h"
#include <string.h>

enum { N_TURNS = 3, FLOOR_LEAST = 1 << 22, FLOOR_MOST = 1 << 25 };

static const double long_s = 1.5; /* a step that takes longer is timed once */

/* ---- the floor ---- */

void tagc_floor_close(tagc_floor *f) {
    tagc_memory_destroy(f->gradient);
    tagc_memory_destroy(f->residual);
    tagc_pool_destroy(f->pool);
}

tagc_status tagc_floor_open(tagc_comm *comm, uint64_t n_params, int n_threads, tagc_floor *f) {
    void *memory;
    uint64_t n = n_params / 4;
    f->comm = comm;
    f->n = n < FLOOR_LEAST ? FLOOR_LEAST : n > FLOOR_MOST ? FLOOR_MOST : (size_t)n; /* larger than caches */
    TAGC_TRY(tagc_memory_create(f->n * sizeof(float), "gradient", &memory));
    f->gradient = memory;
    TAGC_TRY(tagc_memory_create(f->n * sizeof(float), "residual", &memory));
    f->residual = memory;
    TAGC_TRY(tagc_pool_create(n_threads, &f->pool));
    tagc_time_floor(f->pool, f->gradient, f->residual, f->residual, f->n);
    return TAGC_OK;
}

/* Seconds per element, mean over ranks, which all run at once. */
static tagc_status floor_time(tagc_floor *f, double *s_per_elem) {
    TAGC_TRY(tagc_comm_barrier(f->comm));
    *s_per_elem = tagc_time_floor(f->pool, f->gradient, f->residual, f->residual, f->n) / (double)f->n;
    return tagc_mean_over_ranks(f->comm, s_per_elem, 1);
}

tagc_status tagc_floor_measure(tagc_floor *f, double *s_per_elem) {
    double times[2 * N_TURNS + 1];
    for (int i = 0; i < 2 * N_TURNS + 1; i++) TAGC_TRY(floor_time(f, &times[i]));
    *s_per_elem = tagc_result_spread_of(times, 2 * N_TURNS + 1).median;
    return TAGC_OK;
}

/* ---- one reducer ---- */

tagc_status tagc_time_reducer(tagc_comm *comm, tagc_reducer *reducer, const float *gradient, float *output,
                              tagc_reducer_times *out) {
    tagc_reducer_stats stats;
    tagc_reducer_stats_init(&stats);
    TAGC_TRY(tagc_comm_barrier(comm));
    TAGC_TRY(tagc_reducer_run(reducer, gradient, reducer->n_given, output, tagc_reducer_given_output(reducer),
                              &stats));
    memcpy(out->phase_s, stats.time_s, sizeof out->phase_s);
    out->wall_s = stats.total_s;
    out->n_union = stats.n_union;
    out->n_returned = stats.n_returned;
    out->n_sent = (double)stats.n_sent;
    TAGC_TRY(tagc_mean_over_ranks(comm, &out->n_sent, 1));
    TAGC_TRY(tagc_mean_over_ranks(comm, out->phase_s, TAGC_N_PHASES));
    return tagc_max_over_ranks(comm, &out->wall_s, 1);
}

/* Draws a new gradient first. */
static tagc_status time_step(tagc_codec_bench *c, tagc_reducer *reducer, uint64_t n_elems,
                             tagc_reducer_times *out) {
    tagc_fill_gradient(c->gradient, n_elems, &c->seed);
    return tagc_time_reducer(c->rank->comm, reducer, c->gradient, c->output, out);
}

static tagc_status time_reducer(tagc_codec_bench *c, tagc_reducer *reducer, tagc_codec_time *result) {
    double phases[TAGC_N_PHASES][N_TURNS], ratios[TAGC_N_PHASES + 1][N_TURNS];
    tagc_reducer_times step;
    TAGC_TRY(time_step(c, reducer, result->n_elems, &step)); /* the residual is empty here */
    int n_turns = step.wall_s > long_s ? 1 : N_TURNS;
    for (int turn = 0; turn < n_turns; turn++) {
        double floor_s, total = 0;
        TAGC_TRY(floor_time(&c->floor, &floor_s));
        TAGC_TRY(time_step(c, reducer, result->n_elems, &step));
        for (int phase = 0; phase < TAGC_N_PHASES; phase++) {
            phases[phase][turn] = step.phase_s[phase];
            ratios[phase][turn] = step.phase_s[phase] / (floor_s * (double)result->n_elems);
            if (phase != TAGC_PHASE_WAIT) total += ratios[phase][turn];
        }
        ratios[TAGC_N_PHASES][turn] = total;
    }
    for (int phase = 0; phase < TAGC_N_PHASES; phase++) {
        result->phase_s[phase] = tagc_result_spread_of(phases[phase], n_turns).median;
        result->to_floor[phase] = tagc_result_spread_of(ratios[phase], n_turns).median;
    }
    result->total_to_floor = tagc_result_spread_of(ratios[TAGC_N_PHASES], n_turns).median;
    result->n_union = step.n_union;
    result->n_returned = step.n_returned;
    result->n_sent = step.n_sent;
    return TAGC_OK;
}

tagc_status tagc_measure_reducer(tagc_codec_bench *c, const tagc_reducer_options *options,
                                 tagc_codec_time *out) {
    tagc_reducer_options untagged = *options;
    tagc_reducer *reducer = NULL;
    *out = (tagc_codec_time){.n_elems = options->n_elems};
    untagged.tag = UINT64_MAX;
    TAGC_TRY(tagc_reducer_create(c->rank->comm, &untagged, &reducer));
    tagc_status status = time_reducer(c, reducer, out);
    tagc_rank_finish(c->rank, status);
    tagc_reducer_destroy(reducer);
    return status;
}

/* ---- codes of parameters ---- */

enum { CHUNK = TAGC_EXPONENTS_CHUNK };

static size_t lossless_bytes(size_t n) {
    return (n + CHUNK - 1) / CHUNK * (tagc_exponents_max_bytes(CHUNK) + sizeof(uint32_t));
}

/* Chunks, each behind its length, as the gatherer has them. */
static void encode_lossless(const float *values, uint8_t *body, size_t n) {
    uint16_t halves[CHUNK];
    for (size_t at = 0; at < n; at += CHUNK) {
        size_t n_now = n - at < CHUNK ? n - at : CHUNK;
        tagc_bf16_narrow(values + at, halves, n_now);
        uint32_t n_bytes = (uint32_t)tagc_exponents_encode(halves, n_now, body + sizeof n_bytes);
        memcpy(body, &n_bytes, sizeof n_bytes);
        body += sizeof n_bytes + n_bytes;
    }
}

static void decode_lossless(const uint8_t *body, float *values, size_t n) {
    uint16_t halves[CHUNK];
    for (size_t at = 0; at < n; at += CHUNK) {
        size_t n_now = n - at < CHUNK ? n - at : CHUNK;
        uint32_t n_bytes;
        memcpy(&n_bytes, body, sizeof n_bytes);
        (void)tagc_exponents_decode(body + sizeof n_bytes, n_bytes, halves, n_now); /* made here */
        tagc_bf16_widen(halves, values + at, n_now);
        body += sizeof n_bytes + n_bytes;
    }
}

/* The engine's replica is fp32: it computes with it. */
static double time_gather(int kind, const float *values, float *replica, uint8_t *body, size_t n,
                          int decodes) {
    static const int bits_of[TAGC_N_GATHER_KINDS] = {
        [TAGC_GATHER_INT8] = 8, [TAGC_GATHER_DELTA8] = 8, [TAGC_GATHER_DELTA4] = 4, [TAGC_GATHER_DELTA2] = 2};
    int is_delta = kind >= TAGC_GATHER_DELTA8, bits = bits_of[kind];
    double start_s = tagc_clock_s();
    if (kind == TAGC_GATHER_LOSSLESS && decodes)
        decode_lossless(body, replica, n);
    else if (kind == TAGC_GATHER_LOSSLESS)
        encode_lossless(values, body, n);
    else if (!decodes)
        (void)tagc_delta_encode_part(bits, values, is_delta ? replica : NULL, sizeof *replica, n, 0, n, body);
    else if (is_delta)
        tagc_delta_apply_part(bits, body, replica, sizeof *replica, n, 0, n);
    else
        tagc_delta_decode(bits, body, replica, n);
    return tagc_clock_s() - start_s;
}

/* The time is the mean over ranks, which all run at once. */
tagc_status tagc_measure_gather(tagc_codec_bench *c, int kind, uint64_t n_elems, tagc_codec_time *out) {
    double times[2][N_TURNS], ratios[2][N_TURNS], total[N_TURNS];
    size_t n_unit = (size_t)n_elems, n_shard = n_unit / (size_t)c->rank->world_size;
    *out = (tagc_codec_time){.n_elems = n_elems, .n_sent = (double)n_elems};
    static const int phases[] = {TAGC_PHASE_ENCODE, TAGC_PHASE_DECODE};
    tagc_fill_gradient(c->gradient, n_elems, &c->seed);
    memset(c->output, 0, n_unit * sizeof *c->output);
    for (int turn = -1; turn < N_TURNS; turn++) {
        double floor_s, spent_s[2];
        TAGC_TRY(floor_time(&c->floor, &floor_s));
        (void)time_gather(kind, c->gradient, c->output, c->body, n_unit, 0); /* makes the bodies to decode */
        TAGC_TRY(tagc_comm_barrier(c->rank->comm));
        spent_s[1] = time_gather(kind, NULL, c->output, c->body, n_unit, 1);
        spent_s[0] = time_gather(kind, c->gradient, c->output, c->body, n_shard, 0);
        TAGC_TRY(tagc_mean_over_ranks(c->rank->comm, spent_s, 2));
        if (turn < 0) continue;
        total[turn] = 0;
        for (int k = 0; k < 2; k++) {
            times[k][turn] = spent_s[k];
            ratios[k][turn] = spent_s[k] / (floor_s * (double)n_unit);
            total[turn] += ratios[k][turn];
        }
    }
    for (int k = 0; k < 2; k++) {
        out->phase_s[phases[k]] = tagc_result_spread_of(times[k], N_TURNS).median;
        out->to_floor[phases[k]] = tagc_result_spread_of(ratios[k], N_TURNS).median;
    }
    out->total_to_floor = tagc_result_spread_of(total, N_TURNS).median;
    return TAGC_OK;
}

/* ---- life ---- */

tagc_status tagc_codec_bench_open(tagc_rank *rank, const tagc_codec_setup *setup, tagc_codec_bench *c) {
    void *memory = NULL;
    *c = (tagc_codec_bench){.rank = rank, .seed = (uint64_t)rank->rank + 1};
    TAGC_TRY(tagc_check_memory("measuring the codec", 6 * setup->n_most * sizeof(float), setup->n_here));
    TAGC_TRY(tagc_memory_create(setup->n_most * sizeof(float), "gradient", &memory));
    c->gradient = memory;
    TAGC_TRY(tagc_memory_create(setup->n_most * sizeof(float), "output", &memory));
    c->output = memory;
    if (setup->n_most_gathered > 0) {
        size_t n_bytes = lossless_bytes(setup->n_most_gathered); /* the longest of all */
        TAGC_TRY(tagc_memory_create(n_bytes, "a body", &memory));
        c->body = memory;
    }
    return tagc_floor_open(rank->comm, setup->n_params, setup->n_threads, &c->floor);
}

void tagc_codec_bench_close(tagc_codec_bench *c) {
    tagc_floor_close(&c->floor);
    tagc_memory_destroy(c->gradient);
    tagc_memory_destroy(c->output);
    tagc_memory_destroy(c->body);
}
