/* Local steps against plain engines, one for each site, whose parameters the test itself exchanges in plain loops. */
#include "toy.h"

#include <stdatomic.h>

#include "fsdp/checkpoint.h"
#include "fsdp/checkpoint_files.h"
#include "fsdp/internal.h"
#include "transport/group.h"

enum { EVERY = 3, STEPS = 8, MOST_SITES = 4 };

static toy_model model;

static void options_of(tagc_fsdp_options *o, int sharding, int n_local, int is_dense) {
    tagc_fsdp_options_init(o);
    o->sharding = sharding;
    o->ranks_per_host = n_local;
    o->local_steps = EVERY;
    o->reducer.exchange = is_dense ? TAGC_EXCHANGE_DENSE : TAGC_EXCHANGE_DIRECT;
    if (!is_dense) o->reducer.sparsity = 0.9;
}

/* One step of this rank's share of a batch that is cut into `n_ranks`; loss of the share. */
static double step_of(tagc_fsdp *f, int step, int rank, int n_ranks, tagc_fsdp_stats *stats) {
    int n = model.n_samples / n_ranks;
    uint64_t first = (uint64_t)(step * model.n_samples + rank * n);
    double loss = toy_forward(&model, f, 1, first, n);
    toy_backward(&model, f, first, n);
    CHECK_OK(tagc_fsdp_step(f, 0.01, stats));
    return loss;
}

/* ---- the oracle: plain engines of one rank each, and plain loops ---- */

typedef struct oracle {
    int n_sites;
    double lr, momentum;
    float *parameters; /* (n_params), after the last round */
    float *start;      /* (n_params) what a fill reads */
    double losses[STEPS][MOST_SITES];
} oracle;

static tagc_status fill_from(void *context, int tensor, size_t first, size_t n, float *values) {
    const float *from = context;
    for (int t = 0; t < tensor; t++) from += model.tensors[t].n_elems;
    memcpy(values, from + first, n * sizeof *values);
    return TAGC_OK;
}

static void exchange_plainly(const oracle *o, float *anchor, float *velocity, float *const *now) {
    for (size_t i = 0; i < toy_n_params(&model); i++) {
        float mean = 0;
        for (int s = 0; s < o->n_sites; s++) mean += anchor[i] - now[s][i];
        mean /= (float)o->n_sites; /* a power of two: exact */
        float step = mean;
        if (o->momentum > 0) {
            velocity[i] = (float)o->momentum * velocity[i] + mean;
            step = mean + (float)o->momentum * velocity[i];
        }
        anchor[i] = anchor[i] - (float)o->lr * step;
    }
}

static void run_oracle(tagc_comm *comm, void *arg) {
    oracle *o = arg;
    size_t n = toy_n_params(&model);
    float *anchor = calloc(n, sizeof *anchor), *velocity = calloc(n, sizeof *velocity), *now[MOST_SITES];
    tagc_fsdp *sites[MOST_SITES];
    tagc_fsdp_options options;
    options_of(&options, TAGC_SHARD_NONE, 1, 1);
    options.local_steps = 0;
    options.policy = TAGC_POLICY_NONE;
    for (int s = 0; s < o->n_sites; s++) {
        CHECK_OK(tagc_fsdp_create(comm, model.tensors, model.n_tensors, &options, NULL, &sites[s]));
        CHECK_OK(tagc_fsdp_fill(sites[s], toy_fill, NULL));
        now[s] = calloc(n, sizeof *now[s]);
    }
    toy_read(&model, sites[0], anchor);
    for (int step = 0; step < STEPS; step++) {
        for (int s = 0; s < o->n_sites; s++)
            o->losses[step][s] = step_of(sites[s], step, s, o->n_sites, NULL);
        if ((step + 1) % EVERY != 0 && step + 1 < STEPS) continue; /* a run ends with a round */
        for (int s = 0; s < o->n_sites; s++) toy_read(&model, sites[s], now[s]);
        exchange_plainly(o, anchor, velocity, now);
        for (int s = 0; s < o->n_sites; s++) CHECK_OK(tagc_fsdp_fill(sites[s], fill_from, anchor));
    }
    memcpy(o->parameters, anchor, n * sizeof *anchor);
    for (int s = 0; s < o->n_sites; s++) {
        tagc_fsdp_destroy(sites[s]);
        free(now[s]);
    }
    free(anchor);
    free(velocity);
}

/* ---- local steps ---- */

typedef struct run {
    tagc_fsdp_options options;
    const char *dir;   /* NULL: no checkpoint */
    int from, save_at; /* steps */
    float *results[TOY_MAX_RANKS];
    double losses[STEPS][TOY_MAX_RANKS];
    tagc_fsdp_stats stats[STEPS][TOY_MAX_RANKS];
} run;

static void train(tagc_comm *comm, void *arg) {
    run *r = arg;
    int rank = tagc_comm_rank(comm), world_size = tagc_comm_world_size(comm);
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, model.tensors, model.n_tensors, &r->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    if (r->from > 0) {
        char path[TAGC_PATH_BYTES], *extra;
        uint64_t step;
        CHECK_OK(tagc_checkpoint_find(comm, r->dir, path, sizeof path));
        CHECK_OK(tagc_checkpoint_load(f, comm, path, &step, &extra));
        CHECK(step == (uint64_t)r->from && strcmp(extra, "more") == 0);
        free(extra);
    }
    for (int step = r->from; step < STEPS; step++) {
        tagc_fsdp_stats *stats = &r->stats[step][rank];
        int is_due = tagc_fsdp_round_is_due(f);
        r->losses[step][rank] = step_of(f, step, rank, world_size, stats);
        CHECK(!stats->skipped && stats->is_round == is_due);
        if (step + 1 == r->save_at)
            CHECK_OK(tagc_checkpoint_save(f, comm, r->dir, (uint64_t)r->save_at, "more"));
    }
    CHECK_OK(tagc_fsdp_synchronize(f, &r->stats[STEPS - 1][rank]));
    CHECK_OK(tagc_fsdp_synchronize(f, NULL)); /* nothing is left to exchange */
    if (r->options.local_steps == EVERY)
        CHECK(r->stats[STEPS - 1][rank].n_rounds == (STEPS + EVERY - 1) / EVERY);
    toy_read(&model, f, r->results[rank]);
    tagc_fsdp_destroy(f);
}

static void open_run(run *r, int sharding, int n_local, int is_dense) {
    *r = (run){0};
    options_of(&r->options, sharding, n_local, is_dense);
    for (int i = 0; i < TOY_MAX_RANKS; i++) r->results[i] = calloc(toy_n_params(&model), sizeof(float));
}

static void close_run(run *r) {
    for (int i = 0; i < TOY_MAX_RANKS; i++) free(r->results[i]);
}

static double largest_difference(const float *a, const float *b) {
    double most = 0;
    for (size_t i = 0; i < toy_n_params(&model); i++) most = fmax(most, fabs((double)(a[i] - b[i])));
    return most;
}

static void check_alike(const run *r, int world_size) {
    for (int rank = 1; rank < world_size; rank++)
        assert_memory_equal(r->results[rank], r->results[0], toy_n_params(&model) * sizeof(float));
}

static void sites_do_what_plain_engines_and_loops_do(void **state) {
    (void)state;
    static const double rates[][2] = {{1, 0}, {0.7, 0.9}, {0.5, 0}};
    for (int n_sites = 2; n_sites <= MOST_SITES; n_sites += 2)
        for (int i = 0; i < 3; i++) {
            oracle o = {.n_sites = n_sites, .lr = rates[i][0], .momentum = rates[i][1]};
            o.parameters = calloc(toy_n_params(&model), sizeof(float));
            toy_run(1, run_oracle, &o);
            run r;
            open_run(&r, TAGC_SHARD_NONE, 1, 1);
            r.options.outer_lr = o.lr;
            r.options.outer_momentum = o.momentum;
            toy_run(n_sites, train, &r);
            check_alike(&r, n_sites);
            assert_memory_equal(r.results[0], o.parameters, toy_n_params(&model) * sizeof(float));
            for (int step = 0; step < STEPS; step++)
                for (int s = 0; s < n_sites; s++) assert_true(r.losses[step][s] == o.losses[step][s]);
            close_run(&r);
            if (n_sites == 2) { /* the same sites, sharded over two ranks each: another order of sums */
                open_run(&r, TAGC_SHARD_HYBRID, 2, 1);
                r.options.outer_lr = o.lr;
                r.options.outer_momentum = o.momentum;
                toy_run(4, train, &r);
                check_alike(&r, 4);
                assert_true(largest_difference(r.results[0], o.parameters) < 2e-5);
                close_run(&r);
            }
            free(o.parameters);
        }
}

/* With no other site, a round puts the parameters back that it took, but for rounding: anchor - (anchor - now). */
static void one_site_trains_as_without_rounds(void **state) {
    (void)state;
    run local, plain;
    open_run(&local, TAGC_SHARD_NONE, 1, 1);
    open_run(&plain, TAGC_SHARD_NONE, 1, 1);
    plain.options.local_steps = 1000;
    toy_run(1, train, &local);
    toy_run(1, train, &plain);
    assert_true(largest_difference(local.results[0], plain.results[0]) < 1e-6);
    close_run(&local);
    close_run(&plain);
}

/* Between rounds nothing leaves a site, and a round's bits are counted by class. */
static void bytes_are_those_of_rounds(void **state) {
    (void)state;
    run r;
    open_run(&r, TAGC_SHARD_NONE, 1, 0);
    toy_run(3, train, &r);
    check_alike(&r, 3);
    for (int step = 0; step < STEPS; step++) {
        const tagc_fsdp_stats *s = &r.stats[step][1];
        uint64_t n_bytes = 0;
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) n_bytes += s->n_bytes_sent[leg];
        /* the first step compares what the sites begin with */
        if (step != 0 && !s->is_round) assert_int_equal(n_bytes, 0);
        if (step == 0) assert_true(n_bytes < 4096 && n_bytes == s->n_bytes_sent[TAGC_LEG_CONTROL]);
        if (s->is_round) assert_true(s->n_class_bytes_sent[TAGC_CLASS_COMPRESSED] > 0);
        if (s->is_round) assert_true(n_bytes > s->n_class_bytes_sent[TAGC_CLASS_COMPRESSED]);
        if (s->is_round) assert_true(s->n_kept > 0 && s->n_kept < s->n_compressed / 4);
        if (!s->is_round) assert_int_equal(s->n_kept, 0);
    }
    close_run(&r);
}

/* ---- conservation ---- */

typedef struct ledger {
    tagc_fsdp_options options;
    double *deltas, *residuals; /* (n_params), sums over sites */
    float *first, *last;        /* anchors, (n_params) */
    pthread_mutex_t lock;
} ledger;

/* Per tensor, where parts of one rank hold all of it. */
static void add_residuals(const tagc_fsdp *f, double *sums) {
    for (int i = 0; i < f->local->n_parts; i++) {
        const tagc_local_part *part = &f->local->parts[i];
        uint64_t n, at = 0;
        const float *residual = tagc_reducer_residual(part->reducer, &n);
        for (int k = 0; n > 0 && k < part->n_members; k++) {
            int tensor = f->local->members[part->first_member + k];
            size_t to = 0;
            for (int t = 0; t < tensor; t++) to += model.tensors[t].n_elems;
            for (size_t j = 0; j < model.tensors[tensor].n_elems; j++) sums[to + j] += (double)residual[at++];
        }
        for (; at < n; at++) CHECK(residual[at] == 0); /* padding */
    }
}

static void keep_ledger(tagc_comm *comm, void *arg) {
    ledger *l = arg;
    int rank = tagc_comm_rank(comm), world_size = tagc_comm_world_size(comm);
    size_t n = toy_n_params(&model);
    float *anchor = calloc(n, sizeof *anchor), *now = calloc(n, sizeof *now);
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, model.tensors, model.n_tensors, &l->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    toy_read(&model, f, anchor);
    if (rank == 0) memcpy(l->first, anchor, n * sizeof *anchor);
    for (int step = 0; step < STEPS; step++) {
        step_of(f, step, rank, world_size, NULL);
        if (step % 2 == 0) continue;
        toy_read(&model, f, now);
        pthread_mutex_lock(&l->lock);
        for (size_t i = 0; i < n; i++) l->deltas[i] += (double)(anchor[i] - now[i]);
        pthread_mutex_unlock(&l->lock);
        CHECK_OK(tagc_fsdp_synchronize(f, NULL));
        toy_read(&model, f, anchor);
    }
    pthread_mutex_lock(&l->lock);
    add_residuals(f, l->residuals);
    pthread_mutex_unlock(&l->lock);
    if (rank == 0) memcpy(l->last, anchor, n * sizeof *anchor);
    tagc_fsdp_destroy(f);
    free(anchor);
    free(now);
}

/* Pseudo-gradients = what sites sent, by which the anchor moved, + residuals; not where residuals decay. */
static void nothing_of_a_pseudo_gradient_is_lost(void **state) {
    (void)state;
    size_t n = toy_n_params(&model);
    for (int variant = 0; variant < 3; variant++) {
        int world_size = 2 + variant % 2;
        ledger l = {.deltas = calloc(2 * n, sizeof(double)), .first = calloc(2 * n, sizeof(float))};
        l.residuals = l.deltas + n;
        l.last = l.first + n;
        options_of(&l.options, TAGC_SHARD_NONE, 1, 0);
        l.options.local_steps = 1000; /* rounds are asked for */
        l.options.local_decay = variant == 2 ? 0.95 : 1;
        pthread_mutex_init(&l.lock, NULL);
        toy_run(world_size, keep_ledger, &l);
        double worst = 0, most = 0, held = 0;
        for (size_t i = 0; i < n; i++) {
            double sent = world_size * (double)(l.first[i] - l.last[i]);
            worst = fmax(worst, fabs(l.deltas[i] - sent - l.residuals[i]));
            most = fmax(most, fabs(l.deltas[i]));
            held = fmax(held, fabs(l.residuals[i]));
        }
        assert_true(held > 0.1 * most);
        assert_true(variant == 2 ? worst > 1e-3 * most : worst < 2e-6);
        pthread_mutex_destroy(&l.lock);
        free(l.deltas);
        free(l.first);
    }
}

/* ---- checkpoints ---- */

static void check_resumed(int sharding, int n_local, int world_size, int save_at) {
    char dir[] = "/tmp/tagc-local-XXXXXX", command[64];
    assert_non_null(mkdtemp(dir));
    run whole, resumed;
    open_run(&whole, sharding, n_local, 0);
    open_run(&resumed, sharding, n_local, 0);
    whole.options.outer_momentum = resumed.options.outer_momentum = 0.8;
    whole.options.local_decay = resumed.options.local_decay = 0.9;
    whole.dir = resumed.dir = dir;
    whole.save_at = resumed.from = save_at;
    toy_run(world_size, train, &whole);
    toy_run(world_size, train, &resumed);
    check_alike(&resumed, world_size);
    assert_memory_equal(whole.results[0], resumed.results[0], toy_n_params(&model) * sizeof(float));
    for (int step = save_at; step < STEPS; step++)
        for (int rank = 0; rank < world_size; rank++)
            assert_true(whole.losses[step][rank] == resumed.losses[step][rank]);
    close_run(&whole);
    close_run(&resumed);
    snprintf(command, sizeof command, "rm -r %s", dir);
    assert_int_equal(system(command), 0);
}

static void a_resumed_run_goes_on_bit_for_bit(void **state) {
    (void)state;
    for (int save_at = EVERY; save_at < 2 * EVERY; save_at++) { /* after a round, and in the middle of one */
        check_resumed(TAGC_SHARD_NONE, 1, 2, save_at);
        check_resumed(TAGC_SHARD_HYBRID, 2, 4, save_at);
    }
}

typedef struct refusal {
    tagc_fsdp_options options;
    const char *dir, *text; /* of the failure; NULL: it loads */
    tagc_status status;
    int forks;
} refusal;

static void try_to_load(tagc_comm *comm, void *arg) {
    const refusal *r = arg;
    char path[TAGC_PATH_BYTES], *extra = NULL;
    uint64_t step;
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, model.tensors, model.n_tensors, &r->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    CHECK_OK(tagc_checkpoint_find(comm, r->dir, path, sizeof path));
    tagc_status status = r->forks ? tagc_checkpoint_fork(f, comm, path, &step, &extra)
                                  : tagc_checkpoint_load(f, comm, path, &step, &extra);
    CHECK(status == r->status);
    if (r->text != NULL) CHECK(strstr(tagc_last_error(), r->text) != NULL);
    free(extra);
    step_of(f, 0, tagc_comm_rank(comm), tagc_comm_world_size(comm), NULL); /* usable either way */
    CHECK_OK(tagc_fsdp_synchronize(f, NULL));
    tagc_fsdp_destroy(f);
}

static void other_sites_and_parts_are_refused(void **state) {
    (void)state;
    char dir[] = "/tmp/tagc-local-XXXXXX", command[64];
    assert_non_null(mkdtemp(dir));
    run r;
    open_run(&r, TAGC_SHARD_NONE, 1, 0);
    r.dir = dir;
    r.save_at = EVERY + 1;
    toy_run(2, train, &r);
    close_run(&r);
    refusal same = {.dir = dir};
    options_of(&same.options, TAGC_SHARD_NONE, 1, 0);
    refusal case_ = same;
    toy_run(2, try_to_load, &case_);
    case_.status = TAGC_ERR_MISMATCH;
    case_.text = "saved by 2 sites of 1 ranks, here are 1 of 1";
    toy_run(1, try_to_load, &case_);
    case_.text = "saved by 2 sites of 1 ranks, here are 2 of 2";
    options_of(&case_.options, TAGC_SHARD_HYBRID, 2, 0);
    toy_run(4, try_to_load, &case_);
    case_ = same;
    case_.status = TAGC_ERR_MISMATCH;
    case_.text = "exchange other tensors";
    case_.options.outer_momentum = 0.9;
    toy_run(2, try_to_load, &case_);
    case_.options.outer_momentum = 0;
    case_.options.reducer.exchange = TAGC_EXCHANGE_DENSE;
    toy_run(2, try_to_load, &case_);
    case_ = same; /* a fork takes the parameters of site 0 alone, with any number of sites */
    case_.forks = 1;
    toy_run(3, try_to_load, &case_);
    case_.options.local_steps = 0;
    toy_run(2, try_to_load, &case_);
    snprintf(command, sizeof command, "rm -r %s", dir);
    assert_int_equal(system(command), 0);
}

/* ---- failures ---- */

static tagc_status fill_otherwise(void *context, int tensor, size_t first, size_t n, float *values) {
    TAGC_TRY(toy_fill(NULL, tensor, first, n, values));
    if (tensor == 2) values[0] += *(const float *)context;
    return TAGC_OK;
}

static void begin_otherwise(tagc_comm *comm, void *arg) {
    const tagc_fsdp_options *options = arg;
    float change = tagc_comm_rank(comm) == 2 ? 1e-6f : 0;
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, model.tensors, model.n_tensors, options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, fill_otherwise, &change));
    CHECK(tagc_fsdp_forward_begin(f, 1) == TAGC_ERR_MISMATCH);
    CHECK(strstr(tagc_last_error(), "site 2 begins with other parameters") != NULL);
    tagc_fsdp_destroy(f);
}

/* A parameter that is not finite is found before anything is exchanged: residuals and anchors are as they were. */
static void spoil(tagc_comm *comm, void *arg) {
    const tagc_fsdp_options *options = arg;
    int rank = tagc_comm_rank(comm), world_size = tagc_comm_world_size(comm);
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, model.tensors, model.n_tensors, options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    for (int step = 0; step < EVERY; step++) step_of(f, step, rank, world_size, NULL);
    double *before = calloc(toy_n_params(&model), sizeof *before), *after = calloc(toy_n_params(&model), 8);
    add_residuals(f, before);
    step_of(f, EVERY, rank, world_size, NULL);
    float *spoilt = &f->tables.flats[0].master[3], kept = *spoilt;
    if (rank == 1) *spoilt = INFINITY;
    CHECK(tagc_fsdp_synchronize(f, NULL) == TAGC_ERR_STATE);
    CHECK(strstr(tagc_last_error(), "the parameters of site 1 are not finite after 1 steps") != NULL);
    add_residuals(f, after);
    CHECK(memcmp(before, after, toy_n_params(&model) * sizeof *before) == 0);
    *spoilt = kept;
    tagc_fsdp_stats stats;
    CHECK_OK(tagc_fsdp_synchronize(f, &stats)); /* repaired, it goes on */
    CHECK(stats.n_rounds == 2);
    step_of(f, EVERY + 1, rank, world_size, NULL);
    CHECK_OK(tagc_fsdp_fill(f, toy_fill,
                            NULL)); /* other parameters: nothing of the round that had begun is left */
    CHECK_OK(tagc_fsdp_synchronize(f, &stats));
    CHECK(stats.n_rounds == 2 && !stats.is_round);
    memset(after, 0, toy_n_params(&model) * sizeof *after);
    add_residuals(f, after);
    for (size_t i = 0; i < toy_n_params(&model); i++) CHECK(after[i] == 0);
    free(before);
    free(after);
    tagc_fsdp_destroy(f);
}

static atomic_int n_apart; /* ranks that have begun a round by themselves */

/* The last rank gives up in the middle of a round; the others learn of it at the next one. */
static void leave(tagc_comm *comm, void *arg) {
    const tagc_fsdp_options *options = arg;
    int rank = tagc_comm_rank(comm), world_size = tagc_comm_world_size(comm);
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, model.tensors, model.n_tensors, options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    step_of(f, 0, rank, world_size, NULL);
    atomic_fetch_add(&n_apart, 1);
    while (rank == world_size - 1 && atomic_load(&n_apart) < world_size) usleep(1000);
    tagc_status status = TAGC_OK;
    int step = 1;
    if (rank == world_size - 1) tagc_comm_abort(comm, "the roof is on fire");
    for (; rank < world_size - 1 && status == TAGC_OK && step < STEPS; step++) {
        int n = model.n_samples / world_size;
        toy_forward(&model, f, 1, 0, n);
        toy_backward(&model, f, 0, n);
        status = tagc_fsdp_step(f, 0.01, NULL);
    }
    if (rank < world_size - 1) {
        CHECK(status == TAGC_ERR_TRANSPORT && step == EVERY);
        CHECK(strstr(tagc_last_error(), "the roof is on fire") != NULL);
    }
    tagc_fsdp_destroy(f);
}

static void failures_are_those_of_all(void **state) {
    (void)state;
    tagc_fsdp_options options;
    options_of(&options, TAGC_SHARD_NONE, 1, 0);
    toy_run(4, begin_otherwise, &options);
    toy_run(3, leave, &options);
    options.local_steps = EVERY;
    toy_run(3, spoil, &options);
}

static void expect_refusal(const tagc_fsdp_options *options, const char *text) {
    tagc_layout *layout;
    assert_true(tagc_layout_create(model.tensors, model.n_tensors, options, 2, &layout) != TAGC_OK);
    assert_non_null(strstr(tagc_last_error(), text));
}

static void options_are_checked(void **state) {
    (void)state;
    tagc_fsdp_options good, o;
    options_of(&good, TAGC_SHARD_NONE, 1, 0);
    o = good;
    o.sharding = TAGC_SHARD_GRAD;
    expect_refusal(&o, "sharding is 1 with local_steps 3");
    o = good;
    o.reducer.exchange = TAGC_EXCHANGE_PACKED;
    expect_refusal(&o, "exchange is 2 with local_steps 3");
    o = good;
    o.local_steps = -1;
    expect_refusal(&o, "local_steps is -1");
    o = good;
    o.outer_momentum = 1;
    expect_refusal(&o, "outer_momentum is 1, allowed is [0, 1)");
    o = good;
    o.outer_lr = 0;
    expect_refusal(&o, "outer_lr is 0, allowed is (0, 10]");
    o = good;
    o.local_decay = 1.1;
    expect_refusal(&o, "local_decay is 1.1, allowed is [0, 1]");
}

/* A group's transfers are the parent's: any ranks at any distance, counted once. */
static void gather_in_groups(tagc_comm *comm, void *arg) {
    (void)arg;
    int rank = tagc_comm_rank(comm);
    tagc_comm *near, *far, *none;
    CHECK_OK(tagc_comm_create_group(comm, TAGC_GROUP_NEAR, rank / 2 * 2, 1, 2, &near));
    CHECK_OK(tagc_comm_create_group(comm, TAGC_GROUP_FAR, rank % 2, 2, 3, &far));
    CHECK(tagc_comm_create_group(comm, TAGC_GROUP_FAR, (rank + 1) % 6, 1, 1, &none) == TAGC_ERR_ARGUMENT &&
          none == NULL);
    CHECK(tagc_comm_create_group(comm, TAGC_GROUP_FAR, rank % 2, 2, 4, &none) == TAGC_ERR_ARGUMENT &&
          none == NULL);
    int pair[2], three[3];
    for (int round = 0; round < 20; round++) {
        int mine = 100 * round + rank;
        CHECK_OK(tagc_comm_all_gather(near, &mine, sizeof mine, pair));
        CHECK_OK(tagc_comm_all_gather(far, &mine, sizeof mine, three));
        for (int i = 0; i < 2; i++) CHECK(pair[i] == 100 * round + rank / 2 * 2 + i);
        for (int i = 0; i < 3; i++) CHECK(three[i] == 100 * round + rank % 2 + 2 * i);
    }
    uint64_t sent[TAGC_N_LEGS];
    tagc_comm_bytes(far, sent, NULL, TAGC_N_LEGS);
    CHECK(sent[TAGC_LEG_CONTROL] == 20 * 2 * sizeof(int));
    tagc_comm_bytes(comm, sent, NULL, TAGC_N_LEGS);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) CHECK(sent[leg] == 0);
    tagc_comm_destroy(near);
    tagc_comm_destroy(far);
}

static void groups_carry_what_they_are_given(void **state) {
    (void)state;
    toy_run(6, gather_in_groups, NULL);
}

int main(void) {
    toy_gpt(&model, 2, 5, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_carry_what_they_are_given),
        cmocka_unit_test(sites_do_what_plain_engines_and_loops_do),
        cmocka_unit_test(one_site_trains_as_without_rounds),
        cmocka_unit_test(bytes_are_those_of_rounds),
        cmocka_unit_test(nothing_of_a_pseudo_gradient_is_lost),
        cmocka_unit_test(a_resumed_run_goes_on_bit_for_bit),
        cmocka_unit_test(other_sites_and_parts_are_refused),
        cmocka_unit_test(failures_are_those_of_all),
        cmocka_unit_test(options_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
