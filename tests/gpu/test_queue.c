/* The queue on a runtime that runs work as late, and in as random an order, as its streams allow: the same
 * bits as without a device, and every planted mistake is found. */
#include "../lengths.h"
#include "rig.h"

#include "tagc/tagc.h"

/* Late: all steps are enqueued before the first exchange, and before each one everything else is done that can be; else all goes at
 * random times. The device is not number 0. Returns whether anything went wrong. */
static int run(saboteur plan, uint64_t seed, int n_buffers, int is_late, int is_pipelined) {
    fake_reset(seed, 2, is_late ? FAKE_LATE : FAKE_EAGER, 1);
    device_rig rig = {.saboteur = plan, .is_late = is_late, .is_pipelined = is_pipelined};
    assert_int_equal(rig_make(&rig, 0, 1, seed, n_buffers), TAGC_OK);
    assert_int_equal(fake_n_streams(-5), 2); /* its launches do not wait behind the model's */
    assert_int_equal(fake_n_streams(0), 1);  /* the caller's */
    uint64_t n_allocs = fake_n_allocs();
    if (!is_late) rig_start(&rig);
    for (int s = 0; s < RIG_STEPS; s++)
        for (int u = 0; u < RIG_UNITS; u++) assert_int_equal(rig_enqueue(&rig, s, u), TAGC_OK);
    if (is_late) rig_start(&rig);
    tagc_status status = rig_wait_for_last(&rig);
    assert_int_equal(rig_synchronize(&rig), 0);
    int found = rig.is_stuck || status != TAGC_OK;
    rig_join(&rig);
    for (int s = 0; s < RIG_STEPS; s++)
        for (int u = 0; u < RIG_UNITS; u++)
            for (int i = 0; i < rig.n_elems[u]; i++)
                found |= rig.results[s][u][i] != 2 * rig_value(&rig, s, u, i);
    assert_int_equal(fake_n_allocs(), n_allocs); /* nothing in a step */
    int n_mistakes = fake_n_mistakes();
    rig_end(&rig);
    if (plan.kind == SABOTAGE_NONE) {
        if (fake_n_mistakes()) print_error("%s\n", fake_mistake(0));
        assert_int_equal(fake_n_mistakes(), 0);
        assert_int_equal(fake_n_live(), 1); /* the caller's stream */
    }
    return found || n_mistakes;
}

TEST(test_clean) {
    for (uint64_t seed = 1; seed <= 12; seed++)
        for (int is_late = 0; is_late < 2; is_late++)
            assert_false(
                run((saboteur){.kind = SABOTAGE_NONE}, seed, 1 + (int)(seed % 4), is_late, seed / 4 % 2));
}

TEST(test_planted) {
    static const struct {
        const char *what;
        saboteur plan;
        int is_pipelined, is_eager;
    } planted[] = {
        {"the copy to the host does not wait for the gradient", {.kind = DROP_WAIT, .n = 0}, 0, 0},
        {"a buffer is used again before its last exchange is over", {.kind = DROP_WAIT, .n = 1}, 1, 0},
        {"the input is handed over before it is copied", {.kind = WRITE_ELSEWHERE}, 0, 1},
        {"the result is copied back before it is there", {.kind = DROP_FLAG}, 0, 0},
        {"the caller does not wait for the result", {.kind = DROP_WAIT, .n = 3}, 0, 0},
        {"the gradient's event is recorded on another stream", {.kind = RECORD_ELSEWHERE, .n = 0}, 0, 0},
        {"the result's event is recorded on another stream", {.kind = RECORD_ELSEWHERE, .n = 2}, 0, 0},
        {"the host reads the device's memory", {.kind = READ_DEVICE}, 0, 0},
    };
    enum { N_SEEDS = 6 };
    for (size_t p = 0; p < sizeof planted / sizeof *planted; p++) {
        int n_found = 0;
        for (uint64_t seed = 1; seed <= N_SEEDS; seed++)
            n_found += run(planted[p].plan, seed, 2, !planted[p].is_eager, planted[p].is_pipelined);
        print_message("found in %d of %d seeds: %s\n", n_found, N_SEEDS, planted[p].what);
        assert_true(n_found >= N_SEEDS / 2);
    }
}

/* ---- real exchanges between ranks ---- */

enum { N_RANKS = 3 };

typedef struct ranks_world {
    tagc_local_group *group;
    uint64_t seed;
    int one_host_thread, is_late;
    pthread_barrier_t all;
    device_rig rigs[N_RANKS];
    tagc_reducer *staged[N_RANKS][RIG_UNITS], *plain[N_RANKS][RIG_UNITS];
    int n_different;
} ranks_world;

typedef struct rank_arg {
    ranks_world *world;
    int rank;
} rank_arg;

static tagc_status reduce(device_rig *rig, int unit, const float *input, float *output) {
    tagc_reducer **reducers = rig->context;
    return run_reducer(reducers[unit], input, output, NULL);
}

static void make_reducers(tagc_comm *comm, tagc_reducer **out) {
    for (int u = 0; u < RIG_UNITS; u++) {
        tagc_reducer_options options;
        tagc_reducer_options_init(&options);
        options.n_elems = (uint64_t)(64 << u) * N_RANKS;
        options.output = TAGC_OUTPUT_UNIT;
        options.sparsity = 0.8;
        if (tagc_reducer_create(comm, &options, &out[u]) != TAGC_OK) abort();
    }
}

/* What the staged exchange must come to: the same reducers' work on arrays of the host. */
static int n_different(ranks_world *world, const device_rig *rig, tagc_reducer **plain) {
    static const float zero[RIG_MAX_ELEMS * N_RANKS];
    int n = 0;
    (void)world;
    for (int s = 0; s < RIG_STEPS; s++)
        for (int u = 0; u < RIG_UNITS; u++) {
            float *gradient = malloc(sizeof zero), *output = malloc(sizeof zero);
            for (int i = 0; i < rig->n_elems[u]; i++) gradient[i] = rig_value(rig, s, u, i);
            if (run_reducer(plain[u], gradient, output, NULL) != TAGC_OK) abort();
            n += memcmp(output, rig->results[s][u], (size_t)rig->n_elems[u] * sizeof(float)) != 0;
            free(gradient);
            free(output);
        }
    return n;
}

static void *rank_main(void *arg) {
    ranks_world *world = ((rank_arg *)arg)->world;
    int rank = ((rank_arg *)arg)->rank;
    device_rig *rig = &world->rigs[rank];
    tagc_comm *comm;
    if (tagc_comm_create_local(world->group, rank, NULL, &comm) != TAGC_OK) abort();
    make_reducers(comm, world->staged[rank]);
    rig->exchange = reduce;
    rig->context = world->staged[rank];
    rig->is_late = world->is_late;
    rig->is_pipelined = world->seed > 3;
    if (rig_make(rig, rank, rank, world->seed, 1 + (rank + (int)world->seed) % 3) != TAGC_OK) abort();
    for (int u = 0; u < RIG_UNITS; u++) { /* the unit of a reducer is N_RANKS rows */
        tagc_job_destroy(rig->jobs[u]);
        fake_free(rig->gradients[u]);
        fake_free(rig->outputs[u]);
        rig->n_elems[u] *= N_RANKS;
        size_t n_bytes = (size_t)rig->n_elems[u] * sizeof(float);
        rig->gradients[u] = fake_alloc(n_bytes);
        rig->outputs[u] = fake_alloc(n_bytes);
        for (int s = 0; s < RIG_STEPS; s++) {
            free(rig->results[s][u]);
            rig->results[s][u] = calloc(1, n_bytes);
        }
        if (tagc_job_create(rig->queue, (uint64_t)u, n_bytes, n_bytes, &rig->jobs[u]) != TAGC_OK) abort();
    }
    if (!rig->is_late) rig_start(rig);
    for (int s = 0; s < RIG_STEPS; s++)
        for (int u = 0; u < RIG_UNITS; u++)
            if (rig_enqueue(rig, s, u) != TAGC_OK) abort();
    if (rig->is_late) rig_start(rig);
    if (rig_wait_for_last(rig) != TAGC_OK) abort();
    if (rig_synchronize(rig)) abort();
    rig_join(rig);
    make_reducers(comm, world->plain[rank]);
    int n = n_different(world, rig, world->plain[rank]);
    __atomic_fetch_add(&world->n_different, n, __ATOMIC_SEQ_CST);
    for (int u = 0; u < RIG_UNITS; u++) {
        tagc_reducer_destroy(world->plain[rank][u]);
        tagc_reducer_destroy(world->staged[rank][u]);
    }
    tagc_comm_destroy(comm);
    rig_end(rig);
    return NULL;
}

TEST(test_ranks) {
    for (uint64_t seed = 1; seed <= 6; seed++) {
        ranks_world *world = calloc(1, sizeof *world);
        world->seed = seed;
        world->one_host_thread = seed % 3 != 0;
        world->is_late = seed % 2 != 0;
        fake_reset(seed, N_RANKS, world->is_late ? FAKE_LATE : FAKE_EAGER, world->one_host_thread);
        assert_int_equal(tagc_local_group_create(N_RANKS, &world->group), TAGC_OK);
        pthread_t threads[N_RANKS];
        rank_arg args[N_RANKS];
        for (int r = 0; r < N_RANKS; r++) {
            args[r] = (rank_arg){world, r};
            assert_int_equal(pthread_create(&threads[r], NULL, rank_main, &args[r]), 0);
        }
        for (int r = 0; r < N_RANKS; r++) pthread_join(threads[r], NULL);
        tagc_local_group_destroy(world->group);
        assert_int_equal(world->n_different, 0);
        if (fake_n_mistakes()) print_error("%s\n", fake_mistake(0));
        assert_int_equal(fake_n_mistakes(), 0);
        free(world);
    }
}

/* A driver that holds its locks while it waits for the device, one hardware queue, a queue that is full: the thread that enqueues
 * is in such calls, and every exchange goes on. */
TEST(test_manners) {
    static const char *const words[] = {"blocking-alloc", "lazy-loading", "late-flags",
                                        "connections=1",  "depth=4",      "all"};
    for (size_t w = 0; w < sizeof words / sizeof *words; w++) {
        fake_reset(w + 1, 1, FAKE_EAGER, 1);
        fake_behave(words[w]);
        device_rig rig = {.is_pipelined = (int)(w % 2)};
        assert_int_equal(rig_make(&rig, 0, 0, w + 1, 2), TAGC_OK);
        rig_start(&rig);
        for (int s = 0; s < RIG_STEPS; s++)
            for (int u = 0; u < RIG_UNITS; u++) {
                void *more = fake_alloc(256);
                assert_int_equal(rig_enqueue(&rig, s, u), TAGC_OK);
                fake_free(more);
            }
        assert_int_equal(rig_wait_for_last(&rig), TAGC_OK);
        assert_int_equal(rig_synchronize(&rig), 0);
        rig_join(&rig);
        for (int s = 0; s < RIG_STEPS; s++)
            for (int u = 0; u < RIG_UNITS; u++)
                for (int i = 0; i < rig.n_elems[u]; i++)
                    assert_true(rig.results[s][u][i] == 2 * rig_value(&rig, s, u, i));
        rig_end(&rig);
        if (fake_n_mistakes()) print_error("%s: %s\n%s\n", words[w], fake_mistake(0), fake_report());
        assert_int_equal(fake_n_mistakes(), 0);
    }
}

static void do_nothing(void *arg) {
    (void)arg;
}

/* While the network is waited for, work of torch's other streams stands still only where they share a hardware queue with a stream that
 * waits: FSDP2's four (gathers, copies, reduce-scatters, all-reduces) and NCCL's, beside compute, which is the caller's, and the queue's two.
 * compress() prints a word where there is one connection. */
TEST(test_held_up) {
    enum { N_OTHERS = 5 };
    static const struct {
        const char *words;
        int least, most;
    } cases[] = {{"connections=1", N_OTHERS, N_OTHERS},
                 {"connections=4", 1, 2},
                 {"connections=8", 0, 0},
                 {"connections=32", 0, 0},
                 {"", 0, 0}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        fake_reset(c + 1, 1, FAKE_LATE, 1);
        fake_behave(cases[c].words);
        device_rig rig = {.is_pipelined = 1};
        void *others[N_OTHERS];
        assert_int_equal(rig_make(&rig, 0, 0, c + 1, 2), TAGC_OK);
        for (int i = 0; i < N_OTHERS; i++) assert_int_equal(fake_stream(&others[i]), 0);
        assert_int_equal(rig_enqueue(&rig, 0, 0), TAGC_OK);
        for (int i = 0; i < N_OTHERS; i++) assert_int_equal(fake_launch(others[i], do_nothing, NULL), 0);
        fake_settle(NULL, NULL);
        int n = fake_n_held_up();
        print_message("%s: %d of %d\n", cases[c].words, n, N_OTHERS);
        assert_in_range(n, cases[c].least, cases[c].most);
        rig_start(&rig);
        assert_int_equal(rig_wait_for_last(&rig), TAGC_OK);
        assert_int_equal(rig_synchronize(&rig), 0);
        for (int i = 0; i < N_OTHERS; i++)
            assert_int_equal(rig.saboteur.real.StreamSynchronize(others[i]), 0);
        assert_int_equal(fake_n_held_up(), 0);
        rig_join(&rig);
        rig_end(&rig);
        assert_int_equal(fake_n_mistakes(), 0);
    }
}

/* Nothing of an exchange goes into a graph, and the queue lives on. */
TEST(test_capture) {
    fake_reset(3, 1, FAKE_EAGER, 1);
    device_rig rig = {.is_late = 0};
    assert_int_equal(rig_make(&rig, 0, 0, 3, 2), TAGC_OK);
    rig_start(&rig);
    assert_int_equal(rig_enqueue(&rig, 0, 1), TAGC_OK);
    assert_int_equal(rig_synchronize(&rig), 0);
    fake_capture(rig.caller);
    assert_int_equal(rig_put(&rig, 0, rig.gradients[0], rig.outputs[0], 1), TAGC_ERR_UNSUPPORTED);
    assert_non_null(strstr(tagc_last_error(), "captured into a graph (cudaStreamIsCapturing says so)"));
    fake_capture(NULL);
    assert_int_equal(rig_wait_for_last(&rig), TAGC_ERR_UNSUPPORTED); /* its peers are told */
    assert_int_equal(rig_enqueue(&rig, 0, 2), TAGC_OK);
    assert_int_equal(rig_wait_for_last(&rig), TAGC_OK);
    assert_int_equal(rig_synchronize(&rig), 0);
    for (int i = 0; i < rig.n_elems[2]; i++)
        assert_true(rig.results[0][2][i] == 2 * rig_value(&rig, 0, 2, i));
    rig_join(&rig);
    rig_end(&rig);
    assert_int_equal(fake_n_mistakes(), 0);
}

/* More exchanges ahead than there are records of, and memory that grows on the way. */
TEST(test_many) {
    fake_reset(5, 1, FAKE_EAGER, 1);
    device_rig rig = {.is_late = 0};
    assert_int_equal(rig_make(&rig, 0, 0, 5, 2), TAGC_OK);
    rig_start(&rig);
    for (int i = 0; i < 1500; i++) assert_int_equal(rig_enqueue(&rig, i % RIG_STEPS, i % RIG_UNITS), TAGC_OK);
    tagc_job *larger;
    uint64_t n_allocs = fake_n_allocs();
    assert_int_equal(tagc_job_create(rig.queue, 0, 1 << 16, 1 << 17, &larger), TAGC_OK);
    assert_int_equal(fake_n_allocs(), n_allocs + 4);
    for (int u = 0; u < RIG_UNITS; u++) assert_int_equal(rig_enqueue(&rig, 0, u), TAGC_OK);
    assert_int_equal(rig_wait_for_last(&rig), TAGC_OK);
    assert_int_equal(rig_synchronize(&rig), 0);
    for (int u = 0; u < RIG_UNITS; u++)
        for (int i = 0; i < rig.n_elems[u]; i++)
            assert_true(rig.results[0][u][i] == 2 * rig_value(&rig, 0, u, i));
    tagc_job_destroy(larger);
    rig_join(&rig);
    rig_end(&rig);
    assert_int_equal(fake_n_mistakes(), 0);
}
