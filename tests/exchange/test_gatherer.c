/* Gathers, alone and beside reducers, on transports with lanes and without; traces and the order of bytes. */
#include "../lengths.h"
#include "codec/bf16.h"
#include "oracle.h"
#include "ranks.h"
#include "whole.h"

typedef struct trial {
    tagc_gatherer_options options;
    int in_place;
} trial;

/* Value i of an array of full_format. */
static float full_at(const trial *t, const void *full, size_t i) {
    if (t->options.full_format == TAGC_FORMAT_FP32) return ((const float *)full)[i];
    return bf16_wide(((const uint16_t *)full)[i]);
}

static void gather_body(rank_run *run) {
    trial *t = run->shared;
    size_t n = (size_t)t->options.n_elems, shard = n / (size_t)run->world_size;
    float *full = calloc(n, sizeof *full), *apart = calloc(shard, sizeof *apart);
    float *own = t->in_place ? full + (size_t)run->rank * shard : apart;
    tagc_gatherer *gatherer;
    if (!CHECK(run, tagc_gatherer_create(run->comm, &t->options, &gatherer) == TAGC_OK)) return;
    CHECK(run, tagc_gatherer_end(gatherer) == TAGC_ERR_STATE);
    CHECK(run, begin_gatherer(gatherer, NULL, full) == TAGC_ERR_ARGUMENT);
    CHECK(run, begin_gatherer(gatherer, own, NULL) == TAGC_ERR_ARGUMENT);
    for (int step = 0; step < 3; step++) {
        for (size_t i = 0; i < shard; i++) own[i] = random_gradient((uint64_t)step, run->rank, i);
        CHECK(run, begin_gatherer(gatherer, own, full) == TAGC_OK);
        CHECK(run, begin_gatherer(gatherer, own, full) == TAGC_ERR_STATE);
        CHECK(run, tagc_gatherer_end(gatherer) == TAGC_OK);
        for (size_t i = 0; i < n; i++) {
            float value = random_gradient((uint64_t)step, (int)(i / shard), i % shard);
            if (t->options.format == TAGC_FORMAT_BF16) value = bf16_nearest(value);
            CHECK(run, bits_of(full_at(t, full, i)) == bits_of(value));
        }
    }
    uint64_t sent[TAGC_N_LEGS], received[TAGC_N_LEGS];
    tagc_comm_bytes(run->comm, sent, received, TAGC_N_LEGS);
    uint64_t row_bytes = shard * (t->options.format == TAGC_FORMAT_BF16 ? 2 : 4), word_bytes = 16;
    uint64_t expected = 5 * (uint64_t)(run->world_size - 1) * (row_bytes + word_bytes); /* with two refused */
    CHECK(run, sent[TAGC_LEG_GATHER] == expected && received[TAGC_LEG_GATHER] == expected);
    CHECK(run, begin_gatherer(gatherer, own, full) == TAGC_OK);
    tagc_gatherer_destroy(gatherer); /* waits */
    free(full);
    free(apart);
}

TEST(test_gather) {
    for (int world_size = 1; world_size <= 5; world_size++)
        for (int variant = 0; variant < 5; variant++) {
            trial t = {.in_place = variant % 2};
            tagc_gatherer_options_init(&t.options);
            t.options.n_elems = 1013 * (uint64_t)world_size;
            t.options.format = variant < 4 ? variant / 2 : TAGC_FORMAT_BF16;
            t.options.full_format = variant < 4 ? TAGC_FORMAT_FP32 : TAGC_FORMAT_BF16;
            run_ranks(world_size, gather_body, &t);
        }
}

/* The fp32 shard does not fit into a row of bf16 values, and lies apart. */
static void apart_body(rank_run *run) {
    trial *t = run->shared;
    float both[64] = {0};
    tagc_gatherer *gatherer;
    if (!CHECK(run, tagc_gatherer_create(run->comm, &t->options, &gatherer) == TAGC_OK)) return;
    CHECK(run, begin_gatherer(gatherer, both + 15, both) == TAGC_ERR_ARGUMENT);
    CHECK(run, strstr(tagc_last_error(), "shard lies in full, which full_format bf16 does not allow"));
    CHECK(run, begin_gatherer(gatherer, both + 16, both) == TAGC_OK);
    CHECK(run, tagc_gatherer_end(gatherer) == TAGC_OK);
    tagc_gatherer_destroy(gatherer);
}

TEST(test_apart) {
    trial t = {0};
    tagc_gatherer_options_init(&t.options);
    t.options.n_elems = 32;
    t.options.format = TAGC_FORMAT_BF16;
    t.options.full_format = TAGC_FORMAT_BF16;
    run_ranks(2, apart_body, &t);
}

/* ---- gathers that overlap reducers ---- */

typedef struct trace_log {
    pthread_mutex_t lock;
    int n_events, n_bad, n_gather, n_codec;
} trace_log;

static void log_event(void *context, const tagc_event *event) {
    trace_log *log = context;
    pthread_mutex_lock(&log->lock);
    log->n_events++;
    log->n_bad += !(event->end_s >= event->start_s) || !event->name || !event->stream;
    log->n_gather += !strcmp(event->stream, "comm") && !strcmp(event->name, "gather") && event->tag == 8;
    log->n_codec += !strcmp(event->stream, "codec") && event->tag == 7;
    pthread_mutex_unlock(&log->lock);
}

static void overlap_body(rank_run *run) {
    enum { N = 60000, STEPS = 5 };
    tagc_reducer_options reduce;
    tagc_reducer_options_init(&reduce);
    reduce.exchange = TAGC_EXCHANGE_PACKED;
    reduce.n_elems = N * (uint64_t)run->world_size;
    reduce.tag = 7;
    tagc_gatherer_options gather;
    tagc_gatherer_options_init(&gather);
    gather.n_elems = reduce.n_elems;
    gather.tag = 8;
    gather.format = TAGC_FORMAT_BF16;
    size_t n = (size_t)reduce.n_elems;
    float *gradient = calloc(2 * n, sizeof *gradient), *output = calloc(2 * N, sizeof *output);
    float *full = calloc(n, sizeof *full);
    tagc_reducer *reducers[2];
    tagc_gatherer *gatherer;
    for (int i = 0; i < 2; i++) CHECK(run, tagc_reducer_create(run->comm, &reduce, &reducers[i]) == TAGC_OK);
    CHECK(run, tagc_gatherer_create(run->comm, &gather, &gatherer) == TAGC_OK);
    for (size_t i = 0; i < 2 * n; i++) gradient[i] = random_gradient(3, run->rank, i);
    for (int step = 0; step < STEPS; step++) {
        for (size_t i = 0; i < 2; i++)
            CHECK(run, begin_reducer(reducers[i], gradient + i * n, output + i * N) == TAGC_OK);
        CHECK(run, begin_gatherer(gatherer, gradient, full) == TAGC_OK);
        CHECK(run, tagc_gatherer_end(gatherer) == TAGC_OK);
        for (size_t i = 0; i < n; i++)
            CHECK(run, full[i] == bf16_nearest(random_gradient(3, (int)(i / N), i % N)));
        for (size_t i = 2; i-- > 0;) CHECK(run, tagc_reducer_end(reducers[i], NULL) == TAGC_OK);
    }
    for (int i = 0; i < 2; i++) tagc_reducer_destroy(reducers[i]);
    tagc_gatherer_destroy(gatherer);
    free(gradient);
    free(output);
    free(full);
}

TEST(test_overlap) {
    trace_log log = {.lock = PTHREAD_MUTEX_INITIALIZER};
    tagc_comm_options options;
    tagc_comm_options_init(&options);
    options.trace = log_event;
    options.trace_context = &log;
    run_ranks_with(3, overlap_body, NULL, &options, NULL);
    assert_int_equal(log.n_bad, 0);
    assert_int_equal(log.n_gather, 3 * 5 * 2); /* words and rows */
    assert_true(log.n_codec >= 3 * 5 * 2 * 4);
}

/* A sum that only its rounding for the way back takes to infinity. */
static void rounded_up_body(rank_run *run) {
    float gradient[2] = {run->rank == 0 ? 0x1.fep127f : 0x1p119f, 1}, output[2];
    tagc_reducer *reducer;
    tagc_reducer_stats stats;
    tagc_reducer_stats_init(&stats);
    if (!CHECK(run, tagc_reducer_create(run->comm, run->shared, &reducer) == TAGC_OK)) return;
    CHECK(run, run_reducer(reducer, gradient, output, &stats) == TAGC_OK);
    CHECK(run, isnan(output[0]) && isnan(output[1]));
    CHECK(run, stats.nonfinite == 1);
    tagc_reducer_destroy(reducer);
}

TEST(test_bf16_overflow) {
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.format = TAGC_FORMAT_BF16;
    set_exchange(&options, WHOLE);
    options.output = 1;
    options.op = TAGC_OP_SUM;
    options.n_elems = 2;
    run_ranks(2, rounded_up_body, &options);
}

TEST(test_bf16) {
    for (uint32_t i = 0; i < 200000; i++) {
        uint32_t bits = (uint32_t)mix(i);
        if (i < 65536) bits = i << 16;
        float value, back;
        uint16_t half;
        memcpy(&value, &bits, 4);
        tagc_bf16_narrow(&value, &half, 1);
        tagc_bf16_widen(&half, &back, 1);
        if (isnan(value))
            assert_true(isnan(back));
        else if (isinf(value))
            assert_true(back == value);
        else
            assert_int_equal(bits_of(back), bits_of(bf16_nearest(value)));
        if (i < 65536 && !isnan(value)) assert_int_equal(half, i);
    }
}

/* ---- what goes together ---- */

static void together_body(rank_run *run) {
    static const int whole[] = {1, 1, 1, 0, 0}, deltas[] = {0, 0, 1, 1, 1}; /* by tagc_format */
    for (int format = TAGC_FORMAT_FP32; format <= TAGC_FORMAT_INT2; format++)
        for (int variant = 0; variant < 8; variant++) {
            int delta = variant % 2, is_format = delta ? deltas[format] : whole[format];
            int is_narrow = variant / 4, is_fit = !is_narrow || delta || format == TAGC_FORMAT_BF16;
            tagc_gatherer_options options;
            tagc_gatherer_options_init(&options);
            options.n_elems = 64;
            options.format = format;
            options.delta = delta;
            options.check_every = variant / 2 % 2 ? 5 : 0;
            options.full_format = is_narrow ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
            int is_taken = is_format && is_fit && (delta || options.check_every == 0);
            tagc_gatherer *gatherer = NULL;
            tagc_status status = tagc_gatherer_create(run->comm, &options, &gatherer);
            CHECK(run, status == (is_taken ? TAGC_OK : TAGC_ERR_UNSUPPORTED));
            CHECK(run, (gatherer != NULL) == is_taken);
            if (!is_taken)
                CHECK(run, strstr(tagc_last_error(), !is_format ? "format is "
                                                     : !is_fit  ? "full_format is bf16, but format is "
                                                                : "check_every is 5"));
            tagc_gatherer_destroy(gatherer);
        }
    tagc_gatherer_options options;
    tagc_gatherer *gatherer;
    tagc_gatherer_options_init(&options);
    options.n_elems = 64;
    options.format = TAGC_FORMAT_INT2 + 1;
    CHECK(run, tagc_gatherer_create(run->comm, &options, &gatherer) == TAGC_ERR_ARGUMENT);
    CHECK(run, strstr(tagc_last_error(), "format is 5, must be"));
    options.format = TAGC_FORMAT_FP32;
    options.full_format = TAGC_FORMAT_INT8;
    CHECK(run, tagc_gatherer_create(run->comm, &options, &gatherer) == TAGC_ERR_ARGUMENT);
    CHECK(run, strstr(tagc_last_error(), "full_format is 2, must be fp32 (0) or bf16 (1)"));
    options.delta = 1;
    options.format = TAGC_FORMAT_INT4;
    options.full_format = run->rank ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
    CHECK(run, tagc_gatherer_create(run->comm, &options, &gatherer) == TAGC_ERR_MISMATCH);
    CHECK(run, strstr(tagc_last_error(), "full_format: rank 11 has bf16, rank 10 has fp32"));
    options.lossless = 1;
    CHECK(run, tagc_gatherer_create(run->comm, &options, &gatherer) == TAGC_ERR_UNSUPPORTED);
    CHECK(run, strstr(tagc_last_error(), "lossless is 1, but delta is 1: it codes whole parameters in bf16"));
    options.delta = 0;
    CHECK(run, tagc_gatherer_create(run->comm, &options, &gatherer) == TAGC_ERR_UNSUPPORTED);
    CHECK(run, strstr(tagc_last_error(), "lossless is 1, but format is int4"));
    options.format = TAGC_FORMAT_BF16;
    options.full_format = TAGC_FORMAT_FP32;
    options.lossless = 2;
    CHECK(run, tagc_gatherer_create(run->comm, &options, &gatherer) == TAGC_ERR_ARGUMENT);
    CHECK(run, strstr(tagc_last_error(), "lossless is 2, must be in [0, 1]"));
    options.lossless = (uint64_t)run->rank;
    CHECK(run, tagc_gatherer_create(run->comm, &options, &gatherer) == TAGC_ERR_MISMATCH);
    CHECK(run, strstr(tagc_last_error(), "lossless: rank 11 has 1, rank 10 has 0"));
}

TEST(test_together) {
    run_ranks(2, together_body, NULL);
}
