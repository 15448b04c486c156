/* Checkpoints of local steps, and failures: what is resumed goes on as if it had never stopped, and nothing is lost. */
#include "folder.h"
#include "sites.h"

#include <stdatomic.h>

/* ---- checkpoints ---- */

static void check_resumed(const char *dir, int sharding, int n_local, int world_size, int save_at,
                          const int shape[3]) {
    run whole, resumed;
    open_run(&whole, sharding, n_local, 0);
    open_run(&resumed, sharding, n_local, 0);
    whole.options.outer_momentum = resumed.options.outer_momentum = 0.8;
    whole.options.local_decay = resumed.options.local_decay = 0.9;
    whole.options.local_steps = resumed.options.local_steps = shape[0];
    whole.options.local_fragments = resumed.options.local_fragments = shape[1];
    whole.options.local_delay = resumed.options.local_delay = shape[2];
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
    assert_int_equal(remove_folder(dir), 0); /* its content: the next run makes it anew */
}

/* After a round, in the middle of one, and with fragments under way. */
static void a_resumed_run_goes_on_bit_for_bit(void **state) {
    static const int shapes[][3] = {{EVERY, 1, 0}, {4, 2, 2}, {5, 3, 4}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int save_at = EVERY; save_at < EVERY + shapes[i][0]; save_at++) {
            check_resumed(*state, TAGC_SHARD_NONE, 1, 2, save_at, shapes[i]);
            if (save_at == EVERY + 1) check_resumed(*state, TAGC_SHARD_HYBRID, 2, 4, save_at, shapes[i]);
        }
}

/* What has nothing that an older program does not know gets its version. */
static int version_of(const char *dir, int step) {
    char path[TAGC_PATH_BYTES];
    tagc_manifest *m;
    snprintf(path, sizeof path, "%s/step-%08d", dir, step);
    assert_int_equal(tagc_manifest_read(path, &m), TAGC_OK);
    int version = m->version;
    tagc_manifest_destroy(m);
    return version;
}

static void save_once(const char *dir, int n_fragments, int delay, int save_at) {
    run r;
    open_run(&r, TAGC_SHARD_NONE, 1, 0);
    r.options.local_fragments = n_fragments;
    r.options.local_delay = delay;
    r.dir = dir;
    r.save_at = save_at;
    toy_run(2, train, &r);
    close_run(&r);
}

static void versions_are_the_lowest_that_do(void **state) {
    save_once(*state, 1, 0, EVERY + 1);
    assert_int_equal(version_of(*state, EVERY + 1), 4);
    save_once(*state, 1, 1, EVERY + 1); /* nothing is under way any more */
    assert_int_equal(version_of(*state, EVERY + 1), 4);
    save_once(*state, 1, 2, EVERY + 1);
    assert_int_equal(version_of(*state, EVERY + 1), 6);
    save_once(*state, 2, 0, EVERY + 1);
    assert_int_equal(version_of(*state, EVERY + 1), 6);
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
    save_once(*state, 1, 0, EVERY + 1);
    refusal same = {.dir = *state};
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
    case_ = same;
    case_.options.local_fragments = 2;
    case_.status = TAGC_ERR_MISMATCH;
    case_.text = "exchange other tensors or fragments";
    toy_run(2, try_to_load, &case_);
    case_.options.local_fragments = 1;
    save_once(*state, 1, 2, EVERY + 1); /* under way for one step */
    toy_run(2, try_to_load, &case_);
    case_.options.local_delay = 1;
    toy_run(2, try_to_load, &case_);
    case_.options.local_delay = 2;
    case_.status = TAGC_OK;
    case_.text = NULL;
    toy_run(2, try_to_load, &case_);
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

/* With a delay the others hear of it at the end of the round. What its reducers did until then is undone. */
static void spoil_under_way(tagc_comm *comm, void *arg) {
    const tagc_fsdp_options *options = arg;
    int rank = tagc_comm_rank(comm), world_size = tagc_comm_world_size(comm);
    size_t n = toy_n_params(&model);
    double *before = calloc(2 * n, sizeof *before), *after = before + n;
    tagc_fsdp_stats stats;
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, model.tensors, model.n_tensors, options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    for (int step = 0; step < EVERY + 1; step++) step_of(f, step, rank, world_size, &stats);
    CHECK(stats.n_rounds == 1);
    step_of(f, EVERY + 1, rank, world_size, NULL);
    add_residuals(f, before);
    float *spoilt = &f->tables.flats[0].master[3], kept = *spoilt;
    if (rank == 1) *spoilt = INFINITY;
    step_of(f, EVERY + 2, rank, world_size, NULL); /* a round begins */
    *spoilt = rank == 1 ? kept : *spoilt;
    CHECK(tagc_fsdp_synchronize(f, NULL) == TAGC_ERR_STATE);
    CHECK(strstr(tagc_last_error(), "not finite") != NULL);
    add_residuals(f, after);
    CHECK(memcmp(before, after, n * sizeof *before) == 0);
    CHECK_OK(tagc_fsdp_synchronize(f, &stats)); /* repaired, it goes on */
    CHECK(stats.n_rounds == 2);
    step_of(f, EVERY + 3, rank, world_size, NULL);
    step_of(f, EVERY + 4, rank, world_size, NULL);
    step_of(f, EVERY + 5, rank, world_size, NULL); /* a round begins */
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));   /* and is dropped */
    memset(after, 0, n * sizeof *after);
    add_residuals(f, after);
    for (size_t i = 0; i < n; i++) CHECK(after[i] == 0);
    CHECK_OK(tagc_fsdp_synchronize(f, &stats));
    CHECK(stats.n_rounds == 2 && !stats.is_round);
    free(before);
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
    toy_run(3, spoil, &options);
    options.local_delay = 1;
    toy_run(3, spoil_under_way, &options);
}

int main(void) {
    toy_gpt(&model, 2, 5, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_resumed_run_goes_on_bit_for_bit, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(versions_are_the_lowest_that_do, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(other_sites_and_parts_are_refused, make_dir, remove_dir),
        cmocka_unit_test(failures_are_those_of_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
