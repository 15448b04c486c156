/* The parameter leg in the engine: every wire, with lanes and without; gathers that begin in the update and end in the
 * next pass, whatever comes in between; and bytes that are counted in one step each. */
#include "../meeting.h"
#include "toy.h"

#include "exchange/volume.h"
#include "fsdp/internal.h"

enum { N_STEPS = 7, N_RANKS = 3, POISONED = 3, LAYERS = 2 };

/* ---- runs ---- */

/* Wires whose bytes do not depend on the values. */
static const int fixed[] = {TAGC_GATHER_FP32,   TAGC_GATHER_BF16,   TAGC_GATHER_INT8,
                            TAGC_GATHER_DELTA8, TAGC_GATHER_DELTA4, TAGC_GATHER_DELTA2};

typedef struct run {
    toy_model model;
    tagc_fsdp_options options;
    int has_lanes;
    int disturbed; /* by evaluations, readers and saving, between steps */
    int poisoned;  /* step POISONED has a NaN, and is skipped */
    meeting meeting;
    float *values[N_RANKS]; /* (n_params) at the end */
    double seen[N_RANKS];   /* loss of an evaluation at the end */
    uint64_t gathered[N_RANKS][N_STEPS];
    uint64_t steady[N_RANKS], total[N_RANKS];
} run;

static uint64_t planned(const tagc_fsdp *f) {
    double n_bytes = 0;
    for (int i = 0; i < f->tables.n_flats; i++) {
        tagc_layout_flat about = {0};
        tagc_volume volume;
        tagc_fsdp_describe_exchange(f, &f->tables.flats[i], &about);
        CHECK(about.has_gatherer);
        CHECK_OK(tagc_gatherer_volume(&about.gatherer, f->world_size, &volume));
        n_bytes += volume.n_bytes[TAGC_LEG_GATHER];
    }
    return (uint64_t)n_bytes;
}

static void disturb(const run *r, tagc_fsdp *f, float *values, int step) {
    if (step % 3 != 0) toy_forward(&r->model, f, 0, 0, 1);
    if (step % 2) toy_read(&r->model, f, values);
    if (step % 3 == 2) toy_forward(&r->model, f, 0, 0, 1);
}

static void train_on(tagc_comm *comm, run *r) {
    int rank = tagc_comm_rank(comm);
    toy_model model = r->model;
    uint64_t before[TAGC_N_LEGS], after[TAGC_N_LEGS];
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, model.tensors, model.n_tensors, &r->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    tagc_comm_bytes(comm, before, NULL, TAGC_N_LEGS);
    r->steady[rank] = planned(f);
    for (int step = 0; step < N_STEPS; step++) {
        tagc_fsdp_stats stats;
        model.poison = r->poisoned && step == POISONED ? 1 + rank : 0;
        if (r->disturbed) disturb(r, f, r->values[rank], step);
        toy_step(&model, comm, f, 1, (uint64_t)step, 0.01, &stats);
        CHECK(stats.skipped == (model.poison != 0));
        CHECK(stats.wait_gather_s >= 0 && stats.wait_gather_s <= stats.total_s);
        r->gathered[rank][step] = stats.n_bytes_sent[TAGC_LEG_GATHER];
        if (r->options.gather != TAGC_GATHER_LOSSLESS) /* whose bytes depend on the values */
            CHECK(stats.n_bytes_received[TAGC_LEG_GATHER] == stats.n_bytes_sent[TAGC_LEG_GATHER]);
    }
    tagc_comm_bytes(comm, after, NULL, TAGC_N_LEGS);
    toy_read(&r->model, f, r->values[rank]);
    r->seen[rank] = toy_forward(&r->model, f, 0, 0, 1);
    tagc_comm_bytes(comm, after, NULL, TAGC_N_LEGS);
    r->total[rank] = after[TAGC_LEG_GATHER] - before[TAGC_LEG_GATHER];
    /* gathers of the last step may be under way when the engine goes, or when all starts over */
    toy_step(&r->model, comm, f, 1, N_STEPS, 0.01, NULL);
    if (rank >= 0 && r->disturbed) CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    tagc_fsdp_destroy(f);
}

static void train(tagc_comm *comm, void *arg) {
    run *r = arg;
    if (r->has_lanes) {
        train_on(comm, r);
        return;
    }
    seat self = {&r->meeting, tagc_comm_rank(comm), N_RANKS};
    tagc_comm *other;
    CHECK_OK(tagc_comm_create_callback(&meeting_ops, &self, self.rank, N_RANKS, NULL, &other));
    train_on(other, r);
    tagc_comm_destroy(other);
}

static void run_one(run *r) {
    pthread_barrier_init(&r->meeting.barrier, NULL, N_RANKS);
    toy_run(N_RANKS, train, r);
    pthread_barrier_destroy(&r->meeting.barrier);
    for (int rank = 1; rank < N_RANKS; rank++) {
        assert_memory_equal(r->values[0], r->values[rank], toy_n_params(&r->model) * sizeof(float));
        assert_true(r->seen[0] == r->seen[rank]);
    }
}

static void make_run(run *r, int sharding, int wire) {
    memset(r, 0, sizeof *r);
    toy_gpt(&r->model, LAYERS, 12, 1);
    tagc_fsdp_options_init(&r->options);
    r->options.sharding = sharding;
    r->options.policy = TAGC_POLICY_NONE;
    r->options.gather = wire;
    r->options.gather_check_every = 2;
    r->has_lanes = 1;
    for (int rank = 0; rank < N_RANKS; rank++)
        r->values[rank] = calloc(toy_n_params(&r->model), sizeof(float));
}

static void free_run(run *r) {
    for (int rank = 0; rank < N_RANKS; rank++) free(r->values[rank]);
}

/* Root of the mean square of the difference. */
static double distance(const run *a, const run *b) {
    size_t n = toy_n_params(&a->model);
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += pow((double)(a->values[0][i] - b->values[0][i]), 2);
    return sqrt(sum / (double)n);
}

/* Parameters move by 0.01 a step; what a wire rounds away shows in the gradients, and through them here. */
TEST(all_wires_train_alike) {
    static const double most[] = {0, 5e-4, 5e-4, 1e-3, 5e-4, 5e-4, 6e-4};
    for (int sharding = TAGC_SHARD_FULL; sharding <= TAGC_SHARD_GRAD; sharding++) {
        run plain;
        make_run(&plain, sharding, TAGC_GATHER_FP32);
        run_one(&plain);
        for (int wire = TAGC_GATHER_FP32; wire <= TAGC_GATHER_DELTA2; wire++) {
            if (wire >= TAGC_GATHER_DELTA8 && sharding != TAGC_SHARD_GRAD) continue;
            run r, without;
            make_run(&r, sharding, wire);
            run_one(&r);
            if (distance(&r, &plain) > most[wire]) print_error("wire %d: %g\n", wire, distance(&r, &plain));
            assert_true(distance(&r, &plain) <= most[wire]);
            assert_true(fabs(r.seen[0] - plain.seen[0]) <= 20 * most[wire] * plain.seen[0]);
            if (wire > TAGC_GATHER_FP32) assert_true(distance(&r, &plain) > 0);
            make_run(&without, sharding, wire);
            without.has_lanes = 0;
            run_one(&without);
            assert_true(distance(&r, &without) == 0 && r.seen[0] == without.seen[0]);
            free_run(&r);
            free_run(&without);
        }
        free_run(&plain);
    }
}

/* Evaluations, readers, prefetch and the time at which a gather ends change no bit and no byte of a step. */
TEST(what_comes_between_changes_nothing) {
    for (int variant = 0; variant < 12; variant++) {
        run calm, r;
        make_run(&calm, TAGC_SHARD_GRAD, fixed[variant % 6]);
        run_one(&calm);
        make_run(&r, TAGC_SHARD_GRAD, fixed[variant % 6]);
        r.disturbed = 1;
        r.has_lanes = variant / 6;
        r.options.prefetch = variant % 3;
        run_one(&r);
        assert_true(distance(&calm, &r) == 0 && calm.seen[0] == r.seen[0]);
        assert_memory_equal(calm.gathered, r.gathered, sizeof r.gathered);
        free_run(&calm);
        free_run(&r);
    }
}

/* Every byte is some step's: the first step's are the whole parameters, the others' what was planned; a step that was
 * skipped leaves nothing to gather. */
TEST(bytes_belong_to_steps) {
    for (int variant = 0; variant < 12; variant++) {
        run r;
        int wire = fixed[variant % 6], is_delta = wire >= TAGC_GATHER_DELTA8;
        make_run(&r, TAGC_SHARD_GRAD, wire);
        r.poisoned = 1;
        r.has_lanes = variant / 6;
        r.options.gather_check_every = 0;
        run_one(&r);
        uint64_t sum = 0;
        for (int step = 0; step < N_STEPS; step++) {
            uint64_t n_bytes = r.gathered[1][step];
            sum += n_bytes;
            if (step == 0 && is_delta)
                assert_true(n_bytes > 3 * (toy_n_params(&r.model) / N_RANKS));
            else
                assert_int_equal(n_bytes, step == POISONED + 1 ? 0 : r.steady[1]);
        }
        assert_int_equal(r.total[1], sum + r.steady[1]); /* no later step counts the last update's gathers */
        free_run(&r);
    }
}

TEST(only_some_shardings_take_deltas) {
    tagc_fsdp_options options;
    for (int wire = TAGC_GATHER_FP32; wire <= TAGC_GATHER_DELTA2; wire++)
        for (int sharding = TAGC_SHARD_FULL; sharding <= TAGC_SHARD_NONE; sharding++) {
            tagc_fsdp_options_init(&options);
            options.sharding = sharding;
            options.gather = wire;
            int allowed = wire < TAGC_GATHER_DELTA8 || sharding == TAGC_SHARD_GRAD;
            assert_int_equal(tagc_fsdp_options_check(&options), allowed ? TAGC_OK : TAGC_ERR_ARGUMENT);
            if (!allowed)
                assert_non_null(strstr(tagc_last_error(), "which needs sharding grad, but sharding is "));
        }
}

/* ---- an order of use that nobody could foresee ---- */

static void use_backwards(tagc_comm *comm, void *arg) {
    toy_model m;
    toy_gpt(&m, 4, 4, 0);
    tagc_fsdp_options options;
    tagc_fsdp_options_init(&options);
    options.prefetch = *(int *)arg;
    tagc_fsdp *f;
    const float *p, *held;
    CHECK_OK(tagc_fsdp_create(comm, m.tensors, m.n_tensors, &options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    /* Units that were gathered ahead make way, and what is read is right. */
    CHECK_OK(tagc_fsdp_forward_begin(f, 0));
    for (int t = m.n_tensors - 1; t >= 0; t--) {
        CHECK_OK(tagc_fsdp_use(f, t, &p));
        for (size_t i = 0; i < m.tensors[t].n_elems; i++) CHECK(p[i] == toy_initial(t, i));
        tagc_fsdp_done(f, t);
    }
    /* One in use does not, and stays as it is. */
    CHECK_OK(tagc_fsdp_forward_begin(f, 0));
    CHECK_OK(tagc_fsdp_use(f, 0, &held));
    tagc_status status = TAGC_OK;
    for (int t = 1; t < m.n_tensors && status == TAGC_OK; t++) {
        status = tagc_fsdp_use(f, t, &p);
        if (status == TAGC_OK) tagc_fsdp_done(f, t);
    }
    CHECK(status == TAGC_ERR_STATE);
    char text[64];
    snprintf(text, sizeof text, "prefetch %d is too small", options.prefetch);
    CHECK(strstr(tagc_last_error(), text) != NULL);
    for (size_t i = 0; i < m.tensors[0].n_elems; i++) CHECK(held[i] == toy_initial(0, i));
    tagc_fsdp_destroy(f);
}

TEST(units_gathered_ahead_make_way) {
    for (int prefetch = 0; prefetch < 4; prefetch++) {
        toy_run(2, use_backwards, &prefetch);
        toy_run(3, use_backwards, &prefetch);
    }
}
