/* Reducers with kernels beside reducers on the processor: the same outputs, residuals, statistics and bytes on the wire, bit for
 * bit, with all ranks or some of them on a device, over several steps, and after steps that fail. Kernels are executed by the
 * harness, in the order that the fake runtime's streams allow, on memory that the host cannot touch. */
#include "codec/bf16.h"
#include "exchange/direct/direct.h"
#include "sides.h"

#include <math.h>

enum { N_STEPS = 5, STEP_NOT_FINITE = 2, STEP_OF_FAILURE = 3, STEP_HUGE = 4 };

typedef struct trial {
    tagc_reducer_options options;
    unsigned on_device;  /* a bit for each rank */
    int seed, dropped;   /* the n-th wait of each rank is left out; -1: none */
    const char *failing; /* a call of the runtime, or NULL */
    int nth;
    pthread_barrier_t barrier;
    int n_found;
} trial;

static tagc_status create(rank_run *run, side *own, const tagc_reducer_options *options, tagc_reducer **out) {
    return own->kernels ? tagc_reducer_create_on(own->kernels, run->comm, options, out)
                        : tagc_reducer_create(run->comm, options, out);
}

/* What is the same of both: not times. */
static int same_stats(const tagc_reducer_stats *a, const tagc_reducer_stats *b) {
    return !memcmp(a->n_bytes_sent, b->n_bytes_sent, sizeof a->n_bytes_sent) &&
           !memcmp(a->n_bytes_received, b->n_bytes_received, sizeof a->n_bytes_received) &&
           a->n_sent == b->n_sent && a->n_union == b->n_union && a->nonfinite == b->nonfinite &&
           a->sparsity == b->sparsity;
}

static int same_residual(tagc_reducer *a, tagc_reducer *b, float *values_a, float *values_b) {
    uint64_t n = tagc_reducer_residual_elems(a), m = tagc_reducer_residual_elems(b);
    return n == m && (n == 0 || (tagc_reducer_get_residual(a, values_a, n) == TAGC_OK &&
                                 tagc_reducer_get_residual(b, values_b, n) == TAGC_OK &&
                                 !memcmp(values_a, values_b, n * sizeof *values_a)));
}

/* In place. */
static void narrow(float *values, size_t n) {
    uint16_t *halves = malloc(n * sizeof *halves);
    tagc_bf16_narrow(values, halves, n);
    memcpy(values, halves, n * sizeof *halves);
    free(halves);
}

static void fill_gradient(const trial *t, const rank_run *run, int step, float *values) {
    for (uint64_t i = 0; i < t->options.n_elems; i++)
        values[i] = random_gradient((uint64_t)(t->seed * 100 + step), run->rank, i);
    for (uint64_t i = 5; step == STEP_HUGE && t->seed % 3 == 0 && i < t->options.n_elems;
         i += t->options.n_elems / (uint64_t)run->world_size)
        values[i] = 3e38f; /* finite, and what the owners add up to is not */
    if (step == STEP_NOT_FINITE && run->rank == t->seed % run->world_size)
        values[(uint64_t)t->seed * 7919 % t->options.n_elems] = t->seed % 2 ? NAN : INFINITY;
    if (t->options.gradient == TAGC_FORMAT_BF16) narrow(values, (size_t)t->options.n_elems);
}

/* ---- the same steps twice ---- */

typedef struct both {
    tagc_reducer *plain;
    float *gradient, *expected, *output, *residuals[2];
    size_t n_output;
} both;

/* A step of both; the statuses must be the same. */
static void run_step(rank_run *run, trial *t, side *own, both *b, int step) {
    tagc_reducer_stats expected, found;
    size_t n = (size_t)t->options.n_elems;
    tagc_reducer_stats_init(&expected);
    tagc_reducer_stats_init(&found);
    fill_gradient(t, run, step, b->gradient);
    CHECK(run, tagc_reducer_run(b->plain, b->gradient, b->expected, &expected) == TAGC_OK);
    CHECK(run, write_to(own, own->gradient, b->gradient, n));
    CHECK(run, tagc_reducer_run(own->reducer, own->gradient, own->output, &found) == TAGC_OK);
    CHECK(run, read_from(own, b->output, own->output, b->n_output));
    CHECK(run, !memcmp(b->output, b->expected, b->n_output * sizeof *b->output));
    CHECK(run, same_stats(&expected, &found));
    if (step != STEP_HUGE) CHECK(run, found.nonfinite == (step == STEP_NOT_FINITE));
    CHECK(run, same_residual(b->plain, own->reducer, b->residuals[0], b->residuals[1]));
    CHECK(run, read_from(own, b->output, own->gradient, n) &&
                   !memcmp(b->output, b->gradient, n * sizeof *b->output));
}

/* A call of the runtime fails on one of the ranks: all hear of it, and nothing has changed. */
static void run_failure(rank_run *run, trial *t, side *own, both *b) {
    fill_gradient(t, run, STEP_OF_FAILURE, b->gradient);
    CHECK(run, write_to(own, own->gradient, b->gradient, (size_t)t->options.n_elems));
    pthread_barrier_wait(&t->barrier);
    if (run->rank == 0) fake_fail(t->failing, t->nth, 700);
    pthread_barrier_wait(&t->barrier);
    tagc_status status = tagc_reducer_run(own->reducer, own->gradient, own->output, NULL);
    CHECK(run, status == TAGC_ERR_DEVICE);
    CHECK(run, same_residual(b->plain, own->reducer, b->residuals[0], b->residuals[1]));
    /* That step counts, and the other reducer has not had it. */
    CHECK(run, tagc_reducer_set_steps(own->reducer, tagc_reducer_steps(b->plain)) == TAGC_OK);
}

/* State goes in and out by way of the host. */
static void change_state(rank_run *run, side *own, both *b) {
    uint64_t n_bytes = tagc_reducer_state_bytes(own->reducer), n = tagc_reducer_residual_elems(own->reducer);
    char *one = malloc(n_bytes), *other = malloc(n_bytes);
    tagc_reducer *reducers[] = {b->plain, own->reducer};
    CHECK(run, tagc_reducer_state_save(b->plain, one, n_bytes) == TAGC_OK);
    CHECK(run, tagc_reducer_state_save(own->reducer, other, n_bytes) == TAGC_OK);
    CHECK(run, !memcmp(one, other, n_bytes));
    if (n) {
        for (int i = 0; i < 2; i++) {
            CHECK(run, tagc_reducer_get_residual(reducers[i], b->residuals[i], n) == TAGC_OK);
            for (uint64_t k = 0; k < n; k += 3) b->residuals[i][k] = (float)(k % 17) * 1e-3f;
            CHECK(run, tagc_reducer_set_residual(reducers[i], b->residuals[i], n) == TAGC_OK);
            CHECK(run, tagc_reducer_scale_residual(reducers[i], 0.5) == TAGC_OK);
            CHECK(run, tagc_reducer_scale_residual(reducers[i], 1e60) == TAGC_ERR_ARGUMENT);
        }
        CHECK(run, same_residual(b->plain, own->reducer, b->residuals[0], b->residuals[1]));
        CHECK(run, tagc_reducer_state_load(own->reducer, other, n_bytes) == TAGC_OK);
        CHECK(run, tagc_reducer_state_load(b->plain, one, n_bytes) == TAGC_OK);
    }
    free(one), free(other);
}

static void make_both(rank_run *run, trial *t, side *own, both *b) {
    size_t n = (size_t)t->options.n_elems;
    CHECK(run, tagc_reducer_create(run->comm, &t->options, &b->plain) == TAGC_OK);
    CHECK(run, create(run, own, &t->options, &own->reducer) == TAGC_OK);
    b->n_output = t->options.output == TAGC_OUTPUT_SHARD ? n / (size_t)run->world_size : n;
    b->gradient = malloc(n * sizeof(float));
    b->expected = malloc(n * sizeof(float));
    b->output = malloc(n * sizeof(float));
    for (int i = 0; i < 2; i++) b->residuals[i] = malloc(n * sizeof(float));
    CHECK(run, same_residual(b->plain, own->reducer, b->residuals[0], b->residuals[1]));
    own->gradient = take(own, n);
    own->output = take(own, b->n_output);
}

static void free_both(trial *t, side *own, both *b) {
    give(own, own->gradient, (size_t)t->options.n_elems);
    give(own, own->output, b->n_output);
    tagc_reducer_destroy(own->reducer);
    tagc_reducer_destroy(b->plain);
    free(b->gradient), free(b->expected), free(b->output);
    for (int i = 0; i < 2; i++) free(b->residuals[i]);
}

static void rank_steps(rank_run *run) {
    trial *t = run->shared;
    side own = {0};
    both b;
    if (t->on_device >> run->rank & 1 && !open_device(run, &own, run->rank)) return;
    make_both(run, t, &own, &b);
    for (int step = 0; step < N_STEPS && !run->failure[0]; step++) {
        if (step == STEP_OF_FAILURE && t->failing) run_failure(run, t, &own, &b);
        run_step(run, t, &own, &b, step);
        if (step == 1) change_state(run, &own, &b);
        if (step == STEP_OF_FAILURE && t->options.sparsity > 0 && !t->options.output) {
            CHECK(run, tagc_reducer_set_sparsity(b.plain, 0.8) == TAGC_OK);
            CHECK(run, tagc_reducer_set_sparsity(own.reducer, 0.8) == TAGC_OK);
        }
    }
    free_both(t, &own, &b);
    close_side(run, &own);
}

/* ---- tests ---- */

static void run_trial(trial *t, int world_size, void (*body)(rank_run *), fake_pace pace) {
    rank_run runs[MAX_RANKS];
    fake_reset((uint64_t)t->seed, FAKE_MAX_DEVICES, pace, 1);
    harness_maker_configure((uint64_t)t->seed, 1 + (unsigned)t->seed % 5);
    pthread_barrier_init(&t->barrier, NULL, (unsigned)world_size);
    run_ranks(world_size, body, t, NULL, runs);
    pthread_barrier_destroy(&t->barrier);
    check_fake();
}

static trial make_trial(int seed, int world_size, size_t shard) {
    trial t = {.seed = seed, .dropped = -1};
    tagc_reducer_options_init(&t.options);
    t.options.exchange = TAGC_EXCHANGE_DIRECT;
    t.options.n_elems = (uint64_t)world_size * shard;
    t.options.format = seed % 5;
    t.options.sparsity = seed % 4 == 3 ? 0 : seed % 4 == 2 ? 0.8 : 0.95;
    t.options.residual = residual_of(seed);
    t.options.gradient = seed / 2 % 2 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
    t.options.op = seed % 3 ? TAGC_OP_AVG : TAGC_OP_SUM;
    t.options.output = seed % 5 < 3 ? TAGC_OUTPUT_SHARD : TAGC_OUTPUT_UNIT;
    return t;
}

#if defined(HARNESS_THREAD_SANITIZER)
enum { N_TRIALS = 6, N_DROPPED = 0, COUNTED_SHARD = 4000 };
#elif defined(HARNESS_ADDRESS_SANITIZER)
enum { N_TRIALS = 12, N_DROPPED = 0, COUNTED_SHARD = 4000 };
#else
enum { N_TRIALS = 32, N_DROPPED = 4, COUNTED_SHARD = 40000 };
#endif

static void test_equals_the_processor(void **state) {
    static const char *const calls[] = {NULL, "MemcpyAsync", "StreamSynchronize", "LaunchKernel"};
    (void)state;
    for (int i = 0; i < N_TRIALS; i++) {
        int world_size = 1 + i % 8;
        trial t = make_trial(i, world_size, i % 7 == 6 ? 9000 : 100 + (size_t)i * 37);
        if (i % 8 == 3) { /* every value is sent */
            t.options.residual = TAGC_RESIDUAL_NONE;
            t.options.format = i % 3 ? TAGC_FORMAT_INT4 : TAGC_FORMAT_INT8;
        }
        t.on_device = i % 3 == 0 ? ~0u : (0x9du >> i % 5) | 1u << i % world_size;
        t.failing = calls[i % 4];
        t.nth = 1 + i / 4 % 2;
        run_trial(&t, world_size, rank_steps, i % 2 ? FAKE_EAGER : FAKE_LATE);
    }
}

/* ---- several reducers of one tagc_kernels ---- */

/* The second one makes the memory grow that batches of the first work in; then both are under way at once. */
static void rank_two(rank_run *run) {
    trial *t = run->shared, larger = *t;
    side own = {0}, other;
    both b, c;
    if (t->on_device >> run->rank & 1 && !open_device(run, &own, run->rank)) return;
    make_both(run, t, &own, &b);
    run_step(run, t, &own, &b, 0);
    larger.options.n_elems *= 9;
    other = own;
    make_both(run, &larger, &other, &c);
    fill_gradient(t, run, 1, b.gradient);
    fill_gradient(&larger, run, 1, c.gradient);
    CHECK(run, tagc_reducer_run(b.plain, b.gradient, b.expected, NULL) == TAGC_OK);
    CHECK(run, tagc_reducer_run(c.plain, c.gradient, c.expected, NULL) == TAGC_OK);
    CHECK(run, write_to(&own, own.gradient, b.gradient, (size_t)t->options.n_elems));
    CHECK(run, write_to(&own, other.gradient, c.gradient, (size_t)larger.options.n_elems));
    CHECK(run, tagc_reducer_begin(own.reducer, own.gradient, own.output) == TAGC_OK);
    CHECK(run, tagc_reducer_begin(other.reducer, other.gradient, other.output) == TAGC_OK);
    CHECK(run, tagc_reducer_end(own.reducer, NULL) == TAGC_OK);
    CHECK(run, tagc_reducer_end(other.reducer, NULL) == TAGC_OK);
    CHECK(run, read_from(&own, b.output, own.output, b.n_output));
    CHECK(run, !memcmp(b.output, b.expected, b.n_output * sizeof *b.output));
    CHECK(run, read_from(&own, c.output, other.output, c.n_output));
    CHECK(run, !memcmp(c.output, c.expected, c.n_output * sizeof *c.output));
    CHECK(run, same_residual(c.plain, other.reducer, c.residuals[0], c.residuals[1]));
    free_both(&larger, &other, &c);
    free_both(t, &own, &b);
    close_side(run, &own);
}

/* Nothing but bodies, and a few bytes that say how long they are, comes to the host or back. */
static void rank_counts(rank_run *run) {
    trial *t = run->shared;
    side own = {0};
    both b;
    if (run->rank == 0 && !open_device(run, &own, 0)) return;
    make_both(run, t, &own, &b);
    fill_gradient(t, run, 0, b.gradient);
    CHECK(run, write_to(&own, own.gradient, b.gradient, (size_t)t->options.n_elems));
    CHECK(run,
          read_from(&own, b.expected, own.gradient, (size_t)t->options.n_elems)); /* more than one piece */
    CHECK(run, !memcmp(b.expected, b.gradient, (size_t)t->options.n_elems * sizeof(float)));
    tagc_reducer_stats stats;
    tagc_reducer_stats_init(&stats);
    uint64_t before = fake_n_copied(), n_live = tagc_kernels_bytes(own.kernels);
    CHECK(run, tagc_reducer_run(own.reducer, own.gradient, own.output, &stats) == TAGC_OK);
    if (own.kernels) {
        uint64_t bodies = 0, n_results = t->options.output ? 4 : 2;
        for (int leg = 0; leg < TAGC_N_LEGS; leg++)
            if (leg != TAGC_LEG_CONTROL) bodies += stats.n_bytes_sent[leg] + stats.n_bytes_received[leg];
        uint64_t most = bodies + n_results * (uint64_t)run->world_size * sizeof(tagc_batch_result);
        CHECK(run, fake_n_copied() - before <= most);
        CHECK(run, fake_n_copied() - before > bodies / 4); /* fronts of messages have room to spare */
        CHECK(run, fake_n_copied() - before < t->options.n_elems * sizeof(float) / 10);
        CHECK(run, tagc_kernels_bytes(own.kernels) == n_live); /* a step takes no memory */
        size_t row_bytes = tagc_residual_bytes(TAGC_FORMAT_INT8, (size_t)t->options.n_elems / 2);
        tagc_memory held;
        tagc_memory_init(&held);
        CHECK(run, tagc_comm_memory(run->comm, &held) == TAGC_OK);
        CHECK(run, held.device_residual_bytes == 2 * row_bytes && held.device_spare_bytes == 2 * row_bytes);
        CHECK(run, n_live >= (t->options.n_elems + b.n_output) * sizeof(float) + 4 * row_bytes);
    }
    free_both(t, &own, &b);
    close_side(run, &own);
}

static void test_bodies_alone_are_copied(void **state) {
    (void)state;
    for (int output = TAGC_OUTPUT_SHARD; output <= TAGC_OUTPUT_UNIT; output++) {
        trial t = make_trial(4, 2, COUNTED_SHARD);
        t.options.format = TAGC_FORMAT_INT2;
        t.options.residual = TAGC_FORMAT_INT8;
        t.options.gradient = TAGC_FORMAT_FP32;
        t.options.output = output;
        run_trial(&t, 2, rank_counts, FAKE_EAGER);
    }
}

static void test_share_memory(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        trial t = make_trial(i, 1 + i, 300);
        t.on_device = ~0u;
        run_trial(&t, 1 + i, rank_two, FAKE_EAGER);
    }
}

/* ---- what is refused, and a rank that leaves ---- */

static pthread_barrier_t step_is_over; /* on all ranks: one that is still in it would hear of the abort */

static void rank_leaves(rank_run *run) {
    trial *t = run->shared;
    side own = {0};
    both b;
    if (!open_device(run, &own, run->rank)) return;
    make_both(run, t, &own, &b);
    run_step(run, t, &own, &b, 0);
    fill_gradient(t, run, 1, b.gradient);
    CHECK(run, write_to(&own, own.gradient, b.gradient, (size_t)t->options.n_elems));
    pthread_barrier_wait(&step_is_over);
    if (run->rank == 0)
        tagc_comm_abort(run->comm, "rank 0 has had enough");
    else
        CHECK(run, tagc_reducer_run(own.reducer, own.gradient, own.output, NULL) == TAGC_ERR_TRANSPORT);
    CHECK(run, same_residual(b.plain, own.reducer, b.residuals[0], b.residuals[1]));
    free_both(t, &own, &b);
    close_side(run, &own);
}

static void rank_is_refused(rank_run *run) {
    trial *t = run->shared;
    side own = {0};
    tagc_reducer *reducer;
    float here[64] = {0};
    if (run->rank == 0 && !open_device(run, &own, 0)) return;
    tagc_reducer_options options = t->options;
    options.exchange = TAGC_EXCHANGE_DENSE;
    options.format = options.residual = -1;
    options.sparsity = -1;
    CHECK(run, create(run, &own, &options, &reducer) == TAGC_ERR_UNSUPPORTED); /* rank 1, too */
    CHECK(run, strstr(tagc_last_error(), "exchange is dense, but kernels support only direct"));
    options = t->options;
    options.ranks_per_host = 2;
    CHECK(run, create(run, &own, &options, &reducer) == TAGC_ERR_UNSUPPORTED);
    CHECK(run, strstr(tagc_last_error(), "ranks_per_host is 2, must be 1 with kernels"));
    CHECK(run, create(run, &own, &t->options, &reducer) == TAGC_OK);
    if (own.kernels) {
        float *there = take(&own, 64);
        CHECK(run, tagc_reducer_begin(reducer, here, there) == TAGC_ERR_ARGUMENT);
        CHECK(run, strstr(tagc_last_error(), "gradient is not in the device's memory"));
        CHECK(run, tagc_reducer_begin(reducer, there, here) == TAGC_ERR_ARGUMENT);
        CHECK(run, strstr(tagc_last_error(), "output is not in the device's memory"));
        give(&own, there, 64);
    }
    tagc_reducer_destroy(reducer);
    close_side(run, &own);
}

static void test_failures(void **state) {
    (void)state;
    trial t = make_trial(4, 3, 500);
    pthread_barrier_init(&step_is_over, NULL, 3);
    run_trial(&t, 3, rank_leaves, FAKE_EAGER);
    pthread_barrier_destroy(&step_is_over);
    t = make_trial(5, 2, 32); /* 64 values */
    t.options.output = TAGC_OUTPUT_SHARD;
    run_trial(&t, 2, rank_is_refused, FAKE_EAGER);
}

/* ---- a wait that is left out ---- */

/* Of a reduce-scatter: results and bodies of fragments, sums. Of an all-reduce besides: results and body of sums, all decoded. There
 * the wait for the first sums could go: who encodes them looks at the same values again. */
enum { N_WAITS_SHARD = 3, N_WAITS_UNIT = 6, NEEDLESS_WAIT = 2 };

typedef struct look {
    float *from, *to;
    size_t n_bytes;
} look;

static void look_at(void *arg) {
    look *one = arg;
    memcpy(one->to, fake_view(one->from), one->n_bytes);
}

/* As whoever uses the output: in another stream. */
static void look_from_elsewhere(side *own, both *b) {
    void *stream;
    look one = {own->output, b->output, b->n_output * sizeof(float)};
    fake_stream(&stream);
    fake_launch(stream, look_at, &one);
    real_wait(stream);
    own->device->runtime.StreamDestroy(stream);
}

static void rank_drops(rank_run *run) {
    trial *t = run->shared;
    side own = {0};
    both b;
    if (run->rank == 0 && !open_device(run, &own, 0)) return;
    make_both(run, t, &own, &b);
    for (int step = 0; step < 2; step++) {
        fill_gradient(t, run, step, b.gradient);
        CHECK(run, tagc_reducer_run(b.plain, b.gradient, b.expected, NULL) == TAGC_OK);
        CHECK(run, write_to(&own, own.gradient, b.gradient, (size_t)t->options.n_elems));
        own.n_waits = 0;
        own.dropped = step ? t->dropped : -1;
        tagc_status status = tagc_reducer_run(own.reducer, own.gradient, own.output, NULL);
        own.dropped = -1;
        if (own.kernels) {
            look_from_elsewhere(&own, &b);
            CHECK(run,
                  own.n_waits == (t->options.output ? N_WAITS_UNIT : N_WAITS_SHARD) || status != TAGC_OK);
        }
        int is_same =
            status == TAGC_OK && (!own.kernels || !memcmp(b.output, b.expected, b.n_output * sizeof(float)));
        if (!is_same) __atomic_fetch_add(&t->n_found, 1, __ATOMIC_SEQ_CST);
        CHECK(run, step || is_same);
    }
    free_both(t, &own, &b);
    close_side(run, &own);
}

static void test_dropped_waits_are_found(void **state) {
    (void)state;
    for (int i = -2; i < (N_DROPPED ? N_WAITS_SHARD + N_WAITS_UNIT : 0); i++) {
        int n_found = 0, output = i >= N_WAITS_SHARD || i == -2 ? TAGC_OUTPUT_UNIT : TAGC_OUTPUT_SHARD;
        int n = i < 0 ? -1 : i % N_WAITS_SHARD + (i >= 2 * N_WAITS_SHARD) * N_WAITS_SHARD;
        if (output && n == NEEDLESS_WAIT) continue;
        for (int seed = 1; seed <= N_DROPPED && !n_found; seed++) {
            rank_run runs[MAX_RANKS];
            trial t = make_trial(seed, 2, 700);
            t.options.output = output;
            t.options.sparsity = 0.9;
            t.options.format = TAGC_FORMAT_INT4;
            t.dropped = n;
            fake_reset((uint64_t)seed, 1, FAKE_LATE, 1);
            run_ranks(2, rank_drops, &t, NULL, runs);
            n_found = t.n_found + fake_n_mistakes();
        }
        if ((n_found > 0) != (n >= 0)) fail_msg("wait %d of a step left out: found %d times", n, n_found);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equals_the_processor), cmocka_unit_test(test_share_memory),
        cmocka_unit_test(test_bodies_alone_are_copied), cmocka_unit_test(test_failures),
        cmocka_unit_test(test_dropped_waits_are_found)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
