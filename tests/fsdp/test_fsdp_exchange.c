/* Nothing is lost: what ranks held back before, plus this step's gradient, is what owners receive plus what ranks hold back after,
 * element by element, with an oracle for the gradient. */
#include "unsent.h"

enum { N_STEPS = 3 };

typedef struct setup {
    int exchange, format;
    double sparsity;
} setup;

typedef struct run {
    toy_model model;
    tagc_fsdp_options options;
    const setup *setups;
    int n_setups;
    int poison_step; /* -1: none */
    double tolerance;
    pthread_barrier_t barrier;
    pthread_mutex_t lock;
    double *pending, *before, *received; /* (n_params) sums over ranks */
    double held;                         /* largest of pending after any step */
} run;

static int is_first(const tagc_comm *comm) {
    return tagc_comm_rank(comm) == 0;
}

/* What is still to come from all ranks, in r->pending. */
static void sum_pending(run *r, tagc_comm *comm, const tagc_fsdp *f) {
    size_t n = toy_n_params(&r->model), at = 0;
    if (is_first(comm)) memset(r->pending, 0, n * sizeof *r->pending);
    pthread_barrier_wait(&r->barrier);
    pthread_mutex_lock(&r->lock);
    for (int t = 0; t < r->model.n_tensors; at += r->model.tensors[t].n_elems, t++)
        add_unsent(f, t, 1, r->pending + at);
    pthread_mutex_unlock(&r->lock);
    pthread_barrier_wait(&r->barrier);
}

/* Adds what owners got, times W: the sum over ranks. */
static void sum_received(run *r, tagc_comm *comm, const tagc_fsdp *f) {
    int world_size = tagc_comm_world_size(comm);
    if (f->rank >= f->n_owners) return; /* a replica */
    pthread_mutex_lock(&r->lock);
    double *out = r->received;
    for (int t = 0; t < r->model.n_tensors; out += r->model.tensors[t].n_elems, t++) {
        const tagc_place *p = &f->tables.places[t];
        for (size_t i = 0; i < p->n; i++)
            out[p->first + i] += (double)f->tables.flats[p->flat].gradient[p->at + i] * world_size;
    }
    pthread_mutex_unlock(&r->lock);
}

/* Sum over ranks and micro-steps of the gradients of one element. */
static double gradient_of(const run *r, int tensor, size_t i, float p, uint64_t step, int world_size) {
    int n_micro = r->options.n_micro_steps, n = r->model.n_samples / (world_size * n_micro);
    double sum = 0;
    for (int s = 0; s < r->model.n_samples; s++)
        sum += (double)p - (double)toy_target(tensor, i, step * (uint64_t)r->model.n_samples + (uint64_t)s);
    return (double)toy_stiffness(tensor) * sum / n;
}

static void compare(run *r, const float *params, uint64_t step, int world_size) {
    size_t at = 0;
    double worst = 0;
    for (int t = 0; t < r->model.n_tensors; t++)
        for (size_t i = 0; i < r->model.tensors[t].n_elems; i++, at++) {
            double in = r->before[at] + gradient_of(r, t, i, params[at], step, world_size);
            worst = fmax(worst, fabs(in - r->received[at] - r->pending[at]));
            r->held = fmax(r->held, fabs(r->pending[at]));
        }
    if (!(worst <= r->tolerance))
        print_error("W %d sharding %d two_level %d micro %d each %d setup %d: off by %g\n", world_size,
                    r->options.sharding, r->options.two_level, r->options.n_micro_steps,
                    r->options.exchange_each_micro_step, (int)step, worst);
    CHECK(worst <= r->tolerance);
}

/* Of one exchange, in an engine of its own. */
static void keep_accounts_of(run *r, tagc_comm *comm, const setup *s) {
    size_t n = toy_n_params(&r->model);
    int world_size = tagc_comm_world_size(comm);
    float *params = malloc(n * sizeof *params);
    tagc_fsdp_options options = r->options;
    tagc_fsdp *f;
    options.reducer.exchange = s->exchange;
    options.reducer.format = s->format;
    options.reducer.sparsity = s->sparsity;
    CHECK_OK(tagc_fsdp_create(comm, r->model.tensors, r->model.n_tensors, &options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    for (int k = 0; k < N_STEPS; k++) {
        sum_pending(r, comm, f);
        if (is_first(comm)) memcpy(r->before, r->pending, n * sizeof *r->before);
        toy_read(&r->model, f, params);
        if (is_first(comm)) memset(r->received, 0, n * sizeof *r->received);
        pthread_barrier_wait(&r->barrier);
        toy_model model = r->model;
        if (k == r->poison_step && is_first(comm)) model.poison = 1;
        tagc_fsdp_stats stats;
        toy_step(&model, comm, f, r->options.n_micro_steps, (uint64_t)k, 0.003, &stats);
        CHECK(stats.skipped == (k == r->poison_step));
        if (!stats.skipped) sum_received(r, comm, f);
        sum_pending(r, comm, f);
        if (is_first(comm) && !stats.skipped) compare(r, params, (uint64_t)k, world_size);
        if (is_first(comm) && stats.skipped) /* the token embedding's flat is as before */
            for (size_t i = 0; i < r->model.tensors[0].n_elems; i++)
                CHECK(fabs(r->before[i] - r->pending[i]) <= 1e-6);
        tagc_fsdp_memory memory;
        tagc_fsdp_memory_used(f, &memory);
        uint64_t n_residuals = 0;
        for (int i = 0; i < f->tables.n_flats; i++)
            n_residuals += tagc_reducer_state_bytes(reducer_of(f, i)) - 64;
        CHECK(memory.residuals == n_residuals);
        pthread_barrier_wait(&r->barrier);
    }
    free(params);
    tagc_fsdp_destroy(f);
}

static void keep_accounts(tagc_comm *comm, void *arg) {
    run *r = arg;
    for (int k = 0; k < r->n_setups; k++) keep_accounts_of(r, comm, &r->setups[k]);
}

static void run_one(run *r, int world_size) {
    size_t n = toy_n_params(&r->model);
    r->pending = calloc(3 * n, sizeof *r->pending);
    r->before = r->pending + n;
    r->received = r->before + n;
    pthread_mutex_init(&r->lock, NULL);
    pthread_barrier_init(&r->barrier, NULL, (unsigned)world_size);
    toy_run(world_size, keep_accounts, r);
    assert_true(r->held > 0.01);
    pthread_barrier_destroy(&r->barrier);
    pthread_mutex_destroy(&r->lock);
    free(r->pending);
}

static void run_init(run *r, const setup *setups, int n_setups) {
    *r = (run){.setups = setups, .n_setups = n_setups, .poison_step = -1, .tolerance = 4e-5};
    toy_gpt(&r->model, 1, 9, 0);
    tagc_fsdp_options_init(&r->options);
    r->options.reducer.exchange = TAGC_EXCHANGE_PACKED;
    r->options.mild.exchange = TAGC_NO_MILD;
    r->options.clip_norm = 0;
    r->options.reducer.sparsity = 0.9;
    r->options.reducer.block = 16;
    r->options.reducer.residual = r->options.mild.residual = TAGC_FORMAT_FP32; /* what is compared is exact */
}

#define DENSE DIRECT(FP32, 0)
#define PACKED                                                                                               \
    { TAGC_EXCHANGE_PACKED, 0, 0.9 }
#define SKETCH                                                                                               \
    { TAGC_EXCHANGE_SKETCH, 0, 0.95 }
#define DIRECT(format, sparsity)                                                                             \
    { TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_##format, sparsity }

static void nothing_is_lost(void **state) {
    (void)state;
    static const setup setups[] = {
        PACKED,          SKETCH,           DENSE, DIRECT(FP32, 0.95), DIRECT(INT4, 0.9), DIRECT(INT8, 0),
        DIRECT(INT2, 0), DIRECT(BF16, 0.8)};
#ifdef TAGC_SANITIZED /* more ranks meet no other code and no other races */
    static const int worlds[] = {1, 3};
#else
    static const int worlds[] = {1, 2, 3, 4, 8};
#endif
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
        for (int variant = 0; variant < 9; variant++) {
            run r;
            run_init(&r, setups, sizeof setups / sizeof *setups);
            r.options.sharding = variant % 3;
            r.options.n_micro_steps = variant < 3 ? 1 : worlds[w] == 8 ? 3 : 2;
            r.options.exchange_each_micro_step = variant >= 6;
            run_one(&r, worlds[w]);
        }
}

/* Ranks of a host hold one residual together. Between fp32 values nothing is rounded, else rows within a host are. */
static void hosts_lose_nothing(void **state) {
    (void)state;
    static const setup exact[] = {DIRECT(FP32, 0.9), DIRECT(FP32, 0), DENSE, PACKED};
    static const setup hosts_only[] = {DIRECT(FP32, 0.9), DENSE};
    static const setup rounded[] = {DIRECT(INT4, 0.9), DIRECT(INT8, 0), DIRECT(INT2, 0.5)};
#ifdef TAGC_SANITIZED
    static const int worlds[][2] = {{2, 2}, {4, 2}, {6, 3}};
#else
    static const int worlds[][2] = {{2, 2}, {4, 2}, {4, 4}, {6, 2}, {6, 3}, {8, 4}, {4, 1}};
#endif
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
        for (int variant = 0; variant < 8; variant++) {
            run r;
            int sharding = variant % 4;
            if (variant >= 4)
                run_init(&r, rounded, sizeof rounded / sizeof *rounded);
            else if (sharding == TAGC_SHARD_HYBRID)
                run_init(&r, hosts_only, sizeof hosts_only / sizeof *hosts_only);
            else
                run_init(&r, exact, sizeof exact / sizeof *exact);
            if (variant >= 4) r.tolerance = 0.1;          /* 2^-9 of sums below 50 */
            if (worlds[w][0] == worlds[w][1]) r.held = 1; /* one host alone encodes nothing */
            r.options.sharding = sharding;
            r.options.two_level = 1;
            r.options.ranks_per_host = worlds[w][1];
            if (sharding == TAGC_SHARD_HYBRID) r.options.reducer.exchange = TAGC_EXCHANGE_DIRECT;
            run_one(&r, worlds[w][0]);
        }
}

/* What waits, waits on when a gradient was no number. */
static void a_skipped_step_keeps_what_waits(void **state) {
    (void)state;
    static const setup setups[] = {PACKED, DIRECT(INT4, 0.9)};
    for (int sharding = 0; sharding < 3; sharding++) {
        run r;
        run_init(&r, setups, sizeof setups / sizeof *setups);
        r.options.sharding = sharding;
        run_one(&r, 2);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_lost),
        cmocka_unit_test(hosts_lose_nothing),
        cmocka_unit_test(a_skipped_step_keeps_what_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
