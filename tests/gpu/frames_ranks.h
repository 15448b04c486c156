/* Steps by frames beside those that libtagc sends, on every rank of a test, which passes on the frames as a
 * caller does. A step may be harmed on the way.
 *
 * For tests that are built twice: with all ranks on the processor, and in tests/gpu/cuda with all ranks or some of
 * them on a device of the fake runtime, whose kernels the harness executes. */
#ifndef TAGC_TESTS_EXCHANGE_FRAMES_RANKS_H
#define TAGC_TESTS_EXCHANGE_FRAMES_RANKS_H

#ifdef WITH_KERNELS
#include "cuda/sides.h"
#define take_bytes(own, n) frames_take(own, n)
static inline void *frames_take(side *own, size_t n) {
    return own->kernels ? (void *)take(own, (n + 3) / 4) : aligned_alloc(64, (n + 63) / 64 * 64);
}
static inline void give_bytes(side *own, void *memory, size_t n) {
    give(own, memory, (n + 3) / 4);
}
static inline int write_bytes(side *own, void *to, const void *from, size_t n) {
    if (own->kernels) return tagc_kernels_write(own->kernels, to, from, n) == TAGC_OK;
    memcpy(to, from, n);
    return 1;
}
static inline int read_bytes(side *own, void *to, const void *from, size_t n) {
    if (own->kernels) return tagc_kernels_read(own->kernels, to, from, n) == TAGC_OK;
    memcpy(to, from, n);
    return 1;
}
#else
#include "host_side.h"
#endif

#include "../repeats.h"
#include "codec/bf16.h"
#include "exchange/direct/direct.h"
#include "gpu/frame.h"
#include "tagc/frames.h"

#include <math.h>

enum { STEP_NOT_FINITE = 2, STEP_HUGE = 4, TEXT_BYTES = 400 };

/* What is done to a frame between two ranks, or to a rank. */
typedef enum harm {
    HARM_NONE,
    HARM_BIT,      /* one bit of header or body; the caller says which */
    HARM_ZEROS,    /* nothing came */
    HARM_OLD,      /* the frame of the step before */
    HARM_SWAPPED,  /* another rank's */
    HARM_LENGTH,   /* a length beyond the frame, with right checksums: made up */
    HARM_VALUES,   /* a body that is none, with right checksums */
    HARM_SPARSITY, /* a rank that keeps another share */
    HARM_DEVICE,   /* a call of the runtime fails; with kernels */
    N_HARMS
} harm;

typedef struct trial {
    tagc_reducer_options options;
    unsigned on_device;
    int seed;
    harm harm;
    int in_sums; /* the frame is one with sums */
    uint64_t bit;
    tagc_status statuses[MAX_RANKS];
    char texts[MAX_RANKS][TEXT_BYTES];
} trial;

typedef struct both {
    rank_run *run;
    trial *t;
    side own;
    tagc_reducer *plain, *reducer;
#ifdef WITH_KERNELS
    tagc_queue *queue; /* NULL: the reducer is in no store */
    tagc_store *store;
#endif
    size_t n, n_output, frame_bytes, sum_bytes;
    float *gradient, *expected, *output, *residuals[2]; /* on the host */
    float *there, *result;                              /* where the reducer's arrays are */
    char *send, *received, *sums, *received_sums;
    tagc_frames_verdict *verdict;
    char *here, *everyone, *old; /* (W, frame), (W, W, frame), (W, frame) on the host */
} both;

static inline void fill_gradient(const both *b, int step) {
    const trial *t = b->t;
    for (uint64_t i = 0; i < b->n; i++)
        b->gradient[i] = random_gradient((uint64_t)(t->seed * 100 + step), b->run->rank, i);
    for (uint64_t i = 5; step == STEP_HUGE && t->seed % 3 == 0 && i < b->n;
         i += b->n / (uint64_t)b->run->world_size)
        b->gradient[i] = 3e38f;
    if (step == STEP_NOT_FINITE && b->run->rank == t->seed % b->run->world_size)
        b->gradient[(uint64_t)t->seed * 7919 % b->n] = t->seed % 2 ? NAN : INFINITY;
    if (t->options.gradient != TAGC_FORMAT_BF16) return;
    tagc_bf16_narrow(b->gradient, (uint16_t *)b->output, b->n);
    memcpy(b->gradient, b->output, b->n * sizeof(uint16_t));
}

static inline int same_residual(both *b) {
    uint64_t n = tagc_reducer_residual_elems(b->plain), m = tagc_reducer_residual_elems(b->reducer);
    return n == m && (n == 0 || (tagc_reducer_get_residual(b->plain, b->residuals[0], n) == TAGC_OK &&
                                 tagc_reducer_get_residual(b->reducer, b->residuals[1], n) == TAGC_OK &&
                                 !memcmp(b->residuals[0], b->residuals[1], n * sizeof(float))));
}

/* ---- collectives ---- */

static inline void seal_again(char *frame, size_t stride) {
    tagc_frame_header *header = (tagc_frame_header *)(void *)frame;
    if (header->body_bytes <=
        stride - TAGC_FRAME_HEADER_BYTES) /* a sum of what is not there would fit nothing */
        header->body_sum = tagc_frame_sum((const uint8_t *)(header + 1), header->body_bytes);
    header->sum = tagc_frame_header_sum(header);
}

/* What rank 0 gets from the last one. */
static inline void do_harm(both *b, char *frames, size_t stride) {
    trial *t = b->t;
    char *frame = frames + (size_t)(b->run->world_size - 1) * stride;
    tagc_frame_header *header = (tagc_frame_header *)(void *)frame;
    uint64_t n_bits = 8 * (TAGC_FRAME_HEADER_BYTES + header->body_bytes);
    if (t->harm == HARM_BIT) frame[t->bit % n_bits / 8] ^= (char)(1 << t->bit % 8);
    if (t->harm == HARM_ZEROS) memset(frame, 0, stride);
    if (t->harm == HARM_OLD) memcpy(frame, b->old + (size_t)(b->run->world_size - 1) * stride, stride);
    if (t->harm == HARM_SWAPPED) memcpy(frame, frames, stride);
    if (t->harm == HARM_LENGTH) header->body_bytes = stride + t->bit % 1000;
    if (t->harm == HARM_VALUES) memset(header + 1, 0xff, header->body_bytes);
    if (t->harm == HARM_LENGTH || t->harm == HARM_VALUES) seal_again(frame, stride);
}

/* Every rank's `from` (n_frames, stride) to all; frame q of mine is what rank q meant for me. */
static inline void pass_on(both *b, char *to, const char *from, size_t stride, int n_frames, int may_harm) {
    int w = b->run->world_size, mine = n_frames == 1 ? 0 : b->run->rank;
    char *frames = b->here;
    CHECK(b->run, read_bytes(&b->own, frames, from, (size_t)n_frames * stride));
    CHECK(b->run,
          tagc_comm_all_gather(b->run->comm, frames, (size_t)n_frames * stride, b->everyone) == TAGC_OK);
    for (int q = 0; q < w; q++)
        memcpy(frames + (size_t)q * stride,
               b->everyone + ((size_t)q * (size_t)n_frames + (size_t)mine) * stride, stride);
    if (may_harm && b->run->rank == 0) do_harm(b, frames, stride);
    if (!may_harm && b->t->in_sums == (n_frames == 1)) memcpy(b->old, frames, (size_t)w * stride);
    CHECK(b->run, write_bytes(&b->own, to, frames, (size_t)w * stride));
}

/* The maximum over ranks of the first two words, in place; and a copy for the host. */
static inline void agree(both *b, tagc_frames_verdict *host) {
    tagc_frames_verdict all[MAX_RANKS];
    CHECK(b->run, read_bytes(&b->own, host, b->verdict, sizeof *host));
    CHECK(b->run, tagc_comm_all_gather(b->run->comm, host, sizeof *host, all) == TAGC_OK);
    for (int q = 0; q < b->run->world_size; q++) {
        if (all[q].failure > host->failure) host->failure = all[q].failure;
        if (all[q].nonfinite > host->nonfinite) host->nonfinite = all[q].nonfinite;
    }
    CHECK(b->run, write_bytes(&b->own, b->verdict, host, sizeof *host));
}

/* Peers wait for the sums of a rank that failed, so it sends zeros. */
static inline void send_zeros(both *b) {
    memset(b->here, 0, b->sum_bytes);
    CHECK(b->run, write_bytes(&b->own, b->sums, b->here, b->sum_bytes));
}

static inline tagc_status add_and_decode(both *b, int is_harmed, tagc_status status) {
    int has_sums = b->sum_bytes > 0;
    if (status == TAGC_OK) status = tagc_frames_add(b->reducer, b->received, has_sums ? b->sums : NULL);
    if (!has_sums) return status;
    if (status != TAGC_OK) send_zeros(b);
    pass_on(b, b->received_sums, b->sums, b->sum_bytes, 1, is_harmed && b->t->in_sums);
    return status == TAGC_OK ? tagc_frames_decode(b->reducer, b->received_sums) : status;
}

/* A caller's step: it goes on where a call fails. */
static inline tagc_status step_by_frames(both *b, int is_harmed, tagc_reducer_stats *stats) {
    trial *t = b->t;
    tagc_frames_verdict host;
    int fails = is_harmed && t->harm == HARM_DEVICE && b->run->rank == 0;
    tagc_status status = tagc_frames_encode(b->reducer, b->there, b->result, b->send, b->verdict);
    pass_on(b, b->received, b->send, b->frame_bytes, b->run->world_size, is_harmed && !t->in_sums);
#ifdef WITH_KERNELS
    if (fails) fake_fail("LaunchKernel", 1 + t->seed % 3, 700);
#endif
    status = add_and_decode(b, is_harmed, status);
    if (fails) CHECK(b->run, status == TAGC_ERR_DEVICE);
    if (status != TAGC_OK) {
        host = (tagc_frames_verdict){.failure = tagc_frames_failure(b->reducer, status)};
        CHECK(b->run, write_bytes(&b->own, b->verdict, &host, sizeof host));
    }
    agree(b, &host);
    CHECK(b->run, tagc_frames_settle(b->reducer) == TAGC_OK);
    CHECK(b->run, tagc_frames_settle(b->reducer) == TAGC_ERR_STATE || status != TAGC_OK);
    return tagc_frames_end(b->reducer, &host, stats);
}

/* ---- life ---- */

static inline void allocate(both *b) {
    size_t w = (size_t)b->run->world_size;
    size_t stride = b->frame_bytes > b->sum_bytes ? b->frame_bytes : b->sum_bytes;
    b->gradient = malloc(b->n * sizeof(float));
    b->expected = malloc(b->n * sizeof(float));
    b->output = malloc(b->n * sizeof(float));
    for (int i = 0; i < 2; i++) b->residuals[i] = malloc(b->n * sizeof(float));
    b->there = take_bytes(&b->own, b->n * sizeof(float));
    b->result = take_bytes(&b->own, b->n_output * sizeof(float));
    b->send = take_bytes(&b->own, w * b->frame_bytes);
    b->received = take_bytes(&b->own, w * b->frame_bytes);
    b->sums = take_bytes(&b->own, b->sum_bytes + 64);
    b->received_sums = take_bytes(&b->own, w * b->sum_bytes + 64);
    b->verdict = take_bytes(&b->own, 64);
    b->here = aligned_alloc(64, w * stride);
    b->everyone = malloc(w * w * stride);
    b->old = malloc(w * stride);
}

#ifdef WITH_KERNELS
/* A probe of the reducer takes the memory for it, but for the residual. */
static inline void make_store(both *b) {
    tagc_reducer *probe;
    CHECK(b->run, tagc_queue_create_on(b->own.kernels, 2, &b->queue) == TAGC_OK);
    CHECK(b->run, tagc_store_create(b->queue, &b->store) == TAGC_OK);
    CHECK(b->run, tagc_store_expect(b->store, b->run->comm, &b->t->options, 1) == TAGC_OK);
    CHECK(b->run, tagc_frames_probe_in(b->store, b->run->comm, &b->t->options, &probe) == TAGC_OK);
    tagc_reducer_destroy(probe);
}
#endif

static inline void make(rank_run *run, trial *t, both *b) {
    size_t w = (size_t)run->world_size;
    *b = (both){.run = run, .t = t, .n = (size_t)t->options.n_elems};
#ifdef WITH_KERNELS
    if (t->on_device >> run->rank & 1 && !open_device(run, &b->own, run->rank)) return;
#endif
    CHECK(run, tagc_reducer_create(run->comm, &t->options, &b->plain) == TAGC_OK);
#ifdef WITH_KERNELS
    if (b->own.kernels && t->seed % 2) make_store(b);
    CHECK(run,
          (b->store ? tagc_frames_create_in(b->store, run->comm, &t->options, &b->reducer)
                    : tagc_frames_create(b->own.kernels, run->comm, &t->options, &b->reducer)) == TAGC_OK);
#else
    CHECK(run, tagc_frames_create(NULL, run->comm, &t->options, &b->reducer) == TAGC_OK);
#endif
    b->n_output = t->options.output == TAGC_OUTPUT_SHARD ? b->n / w : b->n;
    b->frame_bytes = (size_t)tagc_frames_bytes(b->reducer, 0);
    b->sum_bytes = (size_t)tagc_frames_bytes(b->reducer, 1);
    CHECK(run, b->frame_bytes > 0 && b->frame_bytes % 64 == 0);
    CHECK(run, (b->sum_bytes > 0) == (t->options.output == TAGC_OUTPUT_UNIT));
    allocate(b);
}

static inline void free_all(both *b) {
    size_t w = (size_t)b->run->world_size;
    give_bytes(&b->own, b->there, b->n * sizeof(float));
    give_bytes(&b->own, b->result, b->n_output * sizeof(float));
    give_bytes(&b->own, b->send, w * b->frame_bytes);
    give_bytes(&b->own, b->received, w * b->frame_bytes);
    give_bytes(&b->own, b->sums, b->sum_bytes + 64);
    give_bytes(&b->own, b->received_sums, w * b->sum_bytes + 64);
    give_bytes(&b->own, b->verdict, 64);
    tagc_reducer_destroy(b->reducer);
    tagc_reducer_destroy(b->plain);
    free(b->gradient), free(b->expected), free(b->output), free(b->here), free(b->everyone), free(b->old);
    for (int i = 0; i < 2; i++) free(b->residuals[i]);
#ifdef WITH_KERNELS
    tagc_store_destroy(b->store);
    tagc_queue_destroy(b->queue);
    close_side(b->run, &b->own);
#endif
}

/* ---- the same step twice ---- */

static inline void check_outputs(both *b, int step, const tagc_reducer_stats *expected,
                                 const tagc_reducer_stats *found) {
    rank_run *run = b->run;
    CHECK(run, read_bytes(&b->own, b->output, b->result, b->n_output * sizeof(float)));
    CHECK(run, found->nonfinite == expected->nonfinite);
    if (found->nonfinite)
        for (size_t i = 0; i < b->n_output; i++) CHECK(run, isnan(b->output[i]) && isnan(b->expected[i]));
    else
        CHECK(run, !memcmp(b->output, b->expected, b->n_output * sizeof(float)) &&
                       found->n_sent == expected->n_sent && found->n_union == expected->n_union &&
                       found->n_returned == expected->n_returned && found->sparsity == expected->sparsity);
    if (step != STEP_HUGE) CHECK(run, found->nonfinite == (step == STEP_NOT_FINITE));
    CHECK(run, same_residual(b));
}

static inline void check_bytes(both *b, const tagc_reducer_stats *found) {
    rank_run *run = b->run;
    uint64_t n_peers = (uint64_t)run->world_size - 1;
    CHECK(run, found->n_bytes_sent[TAGC_LEG_VALUES] == n_peers * b->frame_bytes);
    CHECK(run, found->n_bytes_received[TAGC_LEG_RESULT] == n_peers * b->sum_bytes);
    CHECK(run, found->n_bytes_sent[TAGC_LEG_CONTROL] == n_peers * 16);
    CHECK(run, found->n_bytes_sent[TAGC_LEG_INDEX] == 0);
}

static inline void put_gradient(both *b, int step) {
    fill_gradient(b, step);
    CHECK(b->run, write_bytes(&b->own, b->there, b->gradient, b->n * sizeof(float)));
}

static inline void run_both(both *b, int step) {
    rank_run *run = b->run;
    tagc_reducer_stats expected, found;
    tagc_reducer_stats_init(&expected);
    tagc_reducer_stats_init(&found);
    put_gradient(b, step);
    CHECK(run, tagc_reducer_run(b->plain, b->gradient, b->expected, &expected) == TAGC_OK);
    CHECK(run, step_by_frames(b, 0, &found) == TAGC_OK);
    check_outputs(b, step, &expected, &found);
    check_bytes(b, &found);
    CHECK(run, read_bytes(&b->own, b->output, b->there, b->n * sizeof(float)) &&
                   !memcmp(b->output, b->gradient, b->n * sizeof(float)));
}

/* ---- trials ---- */

static inline void run_trial(trial *t, int world_size, void (*body)(rank_run *)) {
    rank_run runs[MAX_RANKS];
#ifdef WITH_KERNELS
    fake_reset((uint64_t)t->seed, FAKE_MAX_DEVICES, t->seed % 2 ? FAKE_EAGER : FAKE_LATE, 1);
    harness_maker_configure((uint64_t)t->seed, 1 + (unsigned)t->seed % 5);
#endif
    run_ranks(world_size, body, t, NULL, runs);
#ifdef WITH_KERNELS
    check_fake();
#endif
}

static inline trial make_trial(int seed, int world_size, size_t shard) {
    trial t = {.seed = seed};
    tagc_reducer_options_init(&t.options);
    t.options.exchange = TAGC_EXCHANGE_DIRECT;
    t.options.n_elems = (uint64_t)world_size * shard;
    t.options.format = seed % 5;
    t.options.sparsity = seed % 4 == 3 ? 0 : seed % 4 == 2 ? 0.8 : 0.95;
    t.options.residual = residual_of(seed);
    t.options.gradient = seed / 2 % 2 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
    t.options.op = seed % 3 ? TAGC_OP_AVG : TAGC_OP_SUM;
    t.options.output = seed % 5 < 3 ? TAGC_OUTPUT_SHARD : TAGC_OUTPUT_UNIT;
    t.on_device = seed % 3 == 0 ? ~0u : (0x9du >> seed % 5) | 1u << seed % world_size;
    return t;
}

#endif
