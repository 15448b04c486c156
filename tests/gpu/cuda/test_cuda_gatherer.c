/* Gathers of deltas with kernels beside gathers on the processor: the same replicas, bit for bit, with all ranks or some of them on a
 * device, whole at first and after failures, with values that are not finite, with checksums, in one level and in two. And kernels that
 * a thread launches before it has called anything else of CUDA. */
#include "../../lengths.h"
#include "sides.h"
#include "tagc/blocks.h"

#include <math.h>

enum { N_GATHERS = 7, GATHER_NOT_FINITE = 3, GATHER_OF_FAILURE = 5 };

typedef struct trial {
    tagc_gatherer_options options;
    unsigned on_device; /* a bit for each rank */
    int seed;
    const char *failing; /* a call of the runtime, or NULL */
    pthread_barrier_t barrier;
} trial;

/* A master that moves a little from gather to gather. */
static void fill_shard(const trial *t, const rank_run *run, int gather, float *shard, size_t n) {
    for (size_t i = 0; i < n; i++) {
        shard[i] = random_gradient((uint64_t)t->seed, run->rank, i) * 100;
        for (int g = 1; g <= gather; g++)
            shard[i] += random_gradient((uint64_t)(t->seed * 100 + g), run->rank, i);
    }
    if (gather == GATHER_NOT_FINITE && run->rank == t->seed % run->world_size) shard[n / 2] = NAN;
}

static int is_nan(uint16_t half) {
    return (half & 0x7fffu) > 0x7f80u;
}

static int same_values(const uint16_t *a, const uint16_t *b, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (a[i] != b[i] && !(is_nan(a[i]) && is_nan(b[i]))) return 0;
    return 1;
}

static void rank_gathers(rank_run *run) {
    trial *t = run->shared;
    side own = {0};
    tagc_gatherer *plain;
    if (t->on_device >> run->rank & 1 && !open_device(run, &own, run->rank)) return;
    size_t n = (size_t)t->options.n_elems, n_shard = n / (size_t)run->world_size;
    float *shard = malloc(n_shard * sizeof(float));
    uint16_t *expected = malloc((n + 1) * sizeof *expected);
    uint16_t *found = malloc((n + 1) * sizeof *found);
    size_t n_floats = (n + 1) / 2; /* that a replica takes */
    own.gradient = take(&own, n_shard);
    own.output = take(&own, n_floats);
    if (!CHECK(run, tagc_gatherer_create(run->comm, &t->options, &plain) == TAGC_OK)) return;
    tagc_status status = own.kernels
                             ? tagc_gatherer_create_on(own.kernels, run->comm, &t->options, &own.gatherer)
                             : tagc_gatherer_create(run->comm, &t->options, &own.gatherer);
    if (!CHECK(run, status == TAGC_OK)) return;
    for (int g = 0; g < N_GATHERS && !run->failure[0]; g++) {
        fill_shard(t, run, g, shard, n_shard);
        CHECK(run, begin_gatherer(plain, shard, expected) == TAGC_OK && tagc_gatherer_end(plain) == TAGC_OK);
        CHECK(run, write_to(&own, own.gradient, shard, n_shard));
        int fails = g == GATHER_OF_FAILURE && t->failing;
        pthread_barrier_wait(&t->barrier);
        if (fails && run->rank == 0) fake_fail(t->failing, 1, 700);
        pthread_barrier_wait(&t->barrier);
        status = begin_gatherer(own.gatherer, own.gradient, own.output);
        if (status == TAGC_OK) status = tagc_gatherer_end(own.gatherer);
        CHECK(run, status == (fails ? TAGC_ERR_DEVICE : TAGC_OK)); /* on all ranks */
        if (fails) { /* the next one is whole, and so must the other be */
            CHECK(run, tagc_gatherer_reset(plain) == TAGC_OK);
            continue;
        }
        CHECK(run, read_from(&own, (float *)(void *)found, own.output, n_floats));
        CHECK(run, same_values(found, expected, n));
    }
    give(&own, own.gradient, n_shard);
    give(&own, own.output, n_floats);
    tagc_gatherer_destroy(own.gatherer);
    tagc_gatherer_destroy(plain);
    free(shard), free(expected), free(found);
    close_side(run, &own);
}

static void run_trial(trial *t, int world_size, void (*body)(rank_run *)) {
    fake_reset((uint64_t)t->seed, FAKE_MAX_DEVICES, t->seed % 2 ? FAKE_EAGER : FAKE_LATE, 1);
    harness_maker_configure((uint64_t)t->seed, 1 + (unsigned)t->seed % 4);
    pthread_barrier_init(&t->barrier, NULL, (unsigned)world_size);
    run_ranks(world_size, body, t);
    pthread_barrier_destroy(&t->barrier);
    check_fake();
}

TEST(test_equals_the_processor) {
    static const int formats[] = {TAGC_FORMAT_INT8, TAGC_FORMAT_INT4, TAGC_FORMAT_INT2};
    static const int ranks[] = {1, 2, 3, 4, 6, 8};
    for (int i = 0; i < 12; i++) {
        int world_size = ranks[i % 6];
        trial t = {.seed = i, .failing = i % 3 == 1 ? "MemcpyAsync" : i % 3 == 2 ? "LaunchKernel" : NULL};
        tagc_gatherer_options_init(&t.options);
        t.options.delta = 1;
        t.options.full_format = TAGC_FORMAT_BF16;
        t.options.format = formats[i % 3];
        t.options.n_elems = (uint64_t)world_size * (uint64_t)(300 + 411 * i);
        t.options.check_every = i % 2 ? 2 : 0;
        t.on_device = i % 3 == 0 ? ~0u : 0x5bu >> i % 5 | 1u << i % world_size;
        run_trial(&t, world_size, rank_gathers);
    }
}

static void rank_is_refused(rank_run *run) {
    trial *t = run->shared;
    side own = {0};
    tagc_gatherer *gatherer;
    if (run->rank == 0 && !open_device(run, &own, 0)) return;
    tagc_status status = own.kernels ? tagc_gatherer_create_on(own.kernels, run->comm, &t->options, &gatherer)
                                     : tagc_gatherer_create(run->comm, &t->options, &gatherer);
    const char *text = t->options.delta ? "full_format is fp32, and kernels have replicas in bf16 alone"
                                        : "delta is 0, and kernels have gathers of deltas alone";
    CHECK(run, status == TAGC_ERR_UNSUPPORTED && strstr(tagc_last_error(), text));
    close_side(run, &own);
}

TEST(test_other_gathers_are_refused) {
    trial t = {.seed = 3};
    tagc_gatherer_options_init(&t.options);
    t.options.n_elems = 64;
    run_trial(&t, 2, rank_is_refused);
    t.options.delta = 1;
    t.options.format = TAGC_FORMAT_INT4;
    run_trial(&t, 2, rank_is_refused);
}

/* ---- threads without a context ---- */

typedef struct first_call {
    const side *own;
    void *stream, *values, *message, *state;
    uint64_t n_elems, n_bytes;
    tagc_blocks_options options;
    tagc_status status;
} first_call;

static void *encode_first(void *arg) {
    first_call *c = arg;
    c->status = tagc_blocks_encode_on(c->own->kernels, &c->options, c->values, c->n_elems, c->message,
                                      c->n_bytes, c->state, c->stream);
    return NULL;
}

static void rank_launches_first(rank_run *run) {
    enum { N = 1000 };
    side own = {0};
    first_call c = {.own = &own, .n_elems = N};
    float zeros[N] = {0};
    tagc_blocks_state state;
    pthread_t thread;
    if (!open_device(run, &own, run->rank)) return;
    tagc_blocks_options_init(&c.options);
    CHECK(run, tagc_blocks_bytes(&c.options, N, &c.n_bytes) == TAGC_OK);
    float *values = take(&own, N), *message = take(&own, N),
          *there = take(&own, sizeof state / sizeof(float));
    c.values = values, c.message = message, c.state = there;
    c.stream = own.kernels->stream;
    CHECK(run, write_to(&own, values, zeros, N) && write_to(&own, there, zeros, sizeof state / 4));
    CHECK(run, pthread_create(&thread, NULL, encode_first, &c) == 0);
    pthread_join(thread, NULL);
    CHECK(run, c.status == TAGC_OK);
    CHECK(run, read_from(&own, (float *)(void *)&state, there, sizeof state / 4) && state.status == TAGC_OK);
    give(&own, values, N), give(&own, message, N), give(&own, there, sizeof state / sizeof(float));
    close_side(run, &own);
}

/* Of device 0 nobody says that it is to be the current one; and CUDA 11 makes no context where one says it. */
TEST(test_launches_are_a_threads_first_call) {
    static const int versions[] = {11080, 13000};
    for (int i = 0; i < 2; i++) {
        fake_reset(7, 2, FAKE_EAGER, 1);
        fake_set_version(versions[i]);
        run_ranks(2, rank_launches_first, NULL);
        check_fake();
    }
    fake_set_version(13000);
}
