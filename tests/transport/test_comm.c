/* A comm over threads as ranks and over a caller's blocking function: what arrives, in which order, and what
 * is counted. Failures are in test_comm_failures.c. */
#include "../ranks.h"
#include "../take_from.h"
#include "pattern.h"
#include "transport/comm.h"
#include "transport/work.h"

#ifdef TAGC_SANITIZED
enum { LONG_MESSAGE = 20000, N_STORMS = 1 };
#else
enum { LONG_MESSAGE = 200000, N_STORMS = 3 };
#endif

/* ---- local: random exchanges ---- */

static void storm_body(rank_run *run) {
    tagc_comm *comm = run->comm;
    CHECK(run, tagc_comm_rank(comm) == run->rank && tagc_comm_world_size(comm) == run->world_size);
    for (int i = 0; i < N_STORMS; i++)
        CHECK(run, pattern_storm(comm, (uint64_t)(i + run->world_size), 4, LONG_MESSAGE) == 0);
    CHECK(run, pattern_storm(comm, 77, 8, 40) == 0);
}

TEST(test_local_storm) {
    static const int sizes[] = {1, 2, 3, 4, 7, 16};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) run_ranks(sizes[i], storm_body, NULL);
}

/* ---- all-gather and barrier ---- */

static void gather_body(rank_run *run) {
    tagc_comm *comm = run->comm;
    uint64_t W = (uint64_t)run->world_size, sent[TAGC_N_LEGS], received[TAGC_N_LEGS];
    uint32_t *all = malloc(W * sizeof *all), mine = 1000u + (uint32_t)run->rank;
    CHECK(run, tagc_comm_all_gather(comm, &mine, sizeof mine, all, W * sizeof *all) == TAGC_OK);
    for (uint32_t r = 0; r < W; r++) CHECK(run, all[r] == 1000 + r);
    memset(all, 0, W * sizeof *all);
    all[run->rank] = 7 * mine; /* in place */
    CHECK(run, tagc_comm_all_gather(comm, &all[run->rank], sizeof mine, all, W * sizeof *all) == TAGC_OK);
    for (uint32_t r = 0; r < W; r++) CHECK(run, all[r] == 7 * (1000 + r));
    CHECK(run, tagc_comm_all_gather(comm, NULL, 0, NULL, 0) == TAGC_OK);
    tagc_comm_bytes(comm, sent, received, TAGC_N_LEGS);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        uint64_t expected = leg == TAGC_LEG_CONTROL ? 2 * sizeof mine * (W - 1) : 0;
        CHECK(run, sent[leg] == expected && received[leg] == expected);
    }
    free(all);
}

TEST(test_all_gather) {
    for (int W = 1; W <= 5; W += 2) run_ranks(W, gather_body, NULL);
}

typedef struct barrier_shared {
    int n_arrived;
    pthread_mutex_t lock;
} barrier_shared;

static void barrier_body(rank_run *run) {
    barrier_shared *shared = run->shared;
    for (int round = 1; round <= 20; round++) {
        pthread_mutex_lock(&shared->lock);
        shared->n_arrived++;
        pthread_mutex_unlock(&shared->lock);
        CHECK(run, tagc_comm_barrier(run->comm) == TAGC_OK);
        pthread_mutex_lock(&shared->lock);
        CHECK(run, shared->n_arrived >= round * run->world_size);
        pthread_mutex_unlock(&shared->lock);
    }
}

TEST(test_barrier) {
    barrier_shared shared = {.lock = PTHREAD_MUTEX_INITIALIZER};
    run_ranks(4, barrier_body, &shared);
}

/* ---- tasks and spares ---- */

typedef struct order_task {
    tagc_task task;
    int index, *log, *n_logged;
} order_task;

static tagc_status log_task(void *arg) {
    order_task *self = arg;
    self->log[(*self->n_logged)++] = self->index;
    if (self->index % 10 == 3) return tagc_fail(TAGC_ERR_IO, "task %d went wrong", self->index);
    return TAGC_OK;
}

TEST(test_tasks) {
    enum { N = 100 };
    tagc_comm *comm = comm_alone(NULL);
    static order_task tasks[N];
    int log[N + 1], n_logged = 0;
    for (int i = 0; i < N; i++) {
        tasks[i] = (order_task){
            .task = {.run = log_task, .arg = &tasks[i]}, .index = i, .log = log, .n_logged = &n_logged};
        tagc_comm_submit(comm, &tasks[i].task);
    }
    for (int i = N - 1; i >= 0; i--) {
        tagc_status status = tagc_comm_join(comm, &tasks[i].task);
        assert_int_equal(status, i % 10 == 3 ? TAGC_ERR_IO : TAGC_OK);
        if (status == TAGC_OK) continue;
        char text[64];
        snprintf(text, sizeof text, "task %d went wrong", i);
        assert_string_equal(tagc_last_error(), text);
    }
    assert_int_equal(n_logged, N);
    for (int i = 0; i < N; i++) assert_int_equal(log[i], i);

    tagc_comm_submit(comm, &tasks[5].task); /* a task can be used again, and destroy waits for it */
    tagc_comm_destroy(comm);
    assert_int_equal(n_logged - 1, N);
}

/* A task of actions that writes down what it does; each action waits for a word of the test's. */
typedef struct action_task {
    tagc_task task;
    const char *actions;   /* a letter per action */
    const uint32_t *lanes; /* (actions) what each may post on; after the last of them 0 */
    int n_run, fails_at;   /* -1: never */
    int *may_go;           /* so many actions of this task, or fewer, are ready */
    char *log;             /* shared by all */
} action_task;

static void announce(action_task *self) {
    size_t n = strlen(self->actions);
    self->task.next_lanes = self->lanes[self->n_run];
    self->task.later_lanes = 0;
    for (size_t i = (size_t)self->n_run; i < n; i++) self->task.later_lanes |= self->lanes[i];
}

static int is_action_ready(void *arg) {
    action_task *self = arg;
    return __atomic_load_n(self->may_go, __ATOMIC_ACQUIRE) > self->n_run;
}

static tagc_status run_action(void *arg) {
    action_task *self = arg;
    size_t n = strlen(self->log);
    self->log[n] = self->actions[self->n_run];
    self->log[n + 1] = 0;
    if (self->n_run++ == self->fails_at) return tagc_fail(TAGC_ERR_IO, "action %c went wrong", self->log[n]);
    self->task.more = self->actions[self->n_run] != 0;
    if (self->task.more) announce(self);
    return TAGC_OK;
}

static action_task with_actions(const char *actions, const uint32_t *lanes, int fails_at, int *may_go,
                                char *log) {
    action_task made = {.task = {.run = run_action, .is_ready = is_action_ready},
                        .actions = actions,
                        .lanes = lanes,
                        .fails_at = fails_at,
                        .may_go = may_go,
                        .log = log};
    announce(&made);
    return made;
}

/* The worker looks again when something is submitted. */
static void nudge(tagc_comm *comm) {
    action_task dummy = with_actions(".", (uint32_t[]){0, 0}, -1, (int[]){1}, (char[8]){""});
    dummy.task.arg = &dummy;
    tagc_comm_submit(comm, &dummy.task);
    assert_int_equal(tagc_comm_join(comm, &dummy.task), TAGC_OK);
}

/* Three actions of a task post on lanes 0, 4 and 7. A younger one goes on as far as the older has left the lanes, whatever is
 * ready; where the older fails, all lanes are free. */
TEST(test_task_actions) {
    static const uint32_t lanes[] = {1u << 0, 1u << 4, 1u << 7, 0};
    static const struct {
        int fails_at;
        const char *logs[4]; /* after so many actions of the older are ready, and all of the younger */
    } cases[] = {{-1, {"", "aA", "aAbB", "aAbBcC"}}, {1, {"", "aA", "aAbBC", "aAbBC"}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tagc_comm *comm = comm_alone(NULL);
        char log[32] = "";
        int older = 0, younger = 3;
        action_task first = with_actions("abc", lanes, cases[i].fails_at, &older, log),
                    second = with_actions("ABC", lanes, -1, &younger, log);
        first.task.arg = &first;
        second.task.arg = &second;
        tagc_comm_submit(comm, &first.task);
        tagc_comm_submit(comm, &second.task);
        for (int n = 0; n <= 3; n++) {
            __atomic_store_n(&older, n, __ATOMIC_RELEASE);
            nudge(comm);
            nudge(comm); /* what the first made possible has happened by the end of the second */
            assert_string_equal(log, cases[i].logs[n]);
        }
        assert_int_equal(tagc_comm_join(comm, &second.task), TAGC_OK);
        assert_int_equal(tagc_comm_join(comm, &first.task), i ? TAGC_ERR_IO : TAGC_OK);
        if (i) assert_string_equal(tagc_last_error(), "action b went wrong");
        tagc_comm_destroy(comm);
    }
}

static const tagc_heap heap = TAGC_HOST_HEAP;

TEST(test_spares) {
    tagc_comm *comm = comm_alone(NULL);
    tagc_spares *a, *b, *c;
    uint64_t small = 100 * sizeof(float), large = 4 * (uint64_t)TAGC_MORE_WORK_BYTES;
    assert_int_equal(tagc_comm_spares_acquire(comm, small, &heap, &a), TAGC_OK);
    assert_int_equal(tagc_comm_spares_acquire(comm, large, &heap, &b), TAGC_OK);
    assert_int_equal(tagc_comm_spares_acquire(comm, small, &heap, &c), TAGC_OK);
    assert_ptr_equal(a, c);
    assert_ptr_not_equal(a, b);
    assert_int_equal(a->n_users, 2);
    float *first = tagc_comm_spare_take(comm, a), *second = tagc_comm_spare_take(comm, a);
    assert_true(first && second && first != second); /* one each, where they are small */
    assert_null(tagc_comm_spare_take(comm, a));
    for (int i = 0; i < 100; i++) first[i] = second[i] = 1;
    tagc_comm_spare_give(comm, a, second);
    assert_ptr_equal(tagc_comm_spare_take(comm, a), second);
    tagc_comm_spare_give(comm, a, first);
    tagc_comm_spares_release(comm, a);
    assert_int_equal(c->n_users, 1);
    assert_true(second[99] == 1); /* still there for its other user */
    assert_null(tagc_comm_spare_take(comm, c));
    tagc_comm_spare_give(comm, c, second);
    tagc_comm_spares_release(comm, c);
    assert_int_equal(tagc_comm_spares_acquire(comm, small, &heap, &a), TAGC_OK);
    assert_int_equal(a->n_users, 1);
    tagc_comm_spares_release(comm, a);
    tagc_comm_spares_release(comm, NULL);
    assert_int_equal(tagc_comm_spares_acquire(comm, large, &heap, &c), TAGC_OK);
    assert_int_equal(c->n_made, 1); /* one for both: they take turns */
    assert_int_equal(tagc_comm_n_spares(TAGC_MORE_WORK_BYTES, 4000, 100), TAGC_MOST_SPARES);
    assert_int_equal(tagc_comm_n_spares(8000, 4000, 100), 3);
    assert_int_equal(tagc_comm_n_spares(0, 4000, 100), 1); /* one unit at a time */
    assert_int_equal(tagc_comm_spares_acquire(comm, UINT64_MAX / 2 + 1, &heap, &a), TAGC_ERR_MEMORY);
    assert_null(a);
    tagc_comm_destroy(comm); /* frees b, which was not released */
}

/* ---- trace ---- */

typedef struct trace_log {
    tagc_local_group *group;
    pthread_mutex_t lock;
    int n_events, n_wrong;
    uint64_t n_bytes;
    double last_end_s;
} trace_log;

static void log_event(void *context, const tagc_event *event) {
    trace_log *log = context;
    pthread_mutex_lock(&log->lock);
    log->n_events++;
    log->n_bytes += event->n_bytes;
    log->n_wrong += strcmp(event->stream, "comm") != 0 || strcmp(event->name, "control") != 0 ||
                    event->tag != UINT64_MAX || event->end_s < event->start_s ||
                    event->end_s < log->last_end_s;
    log->last_end_s = event->end_s;
    pthread_mutex_unlock(&log->lock);
}

static void trace_body(rank_run *run) {
    trace_log *log = run->shared;
    tagc_comm_options options;
    tagc_comm_options_init(&options);
    if (run->rank == 0) {
        options.trace = log_event;
        options.trace_context = log;
    }
    tagc_comm *comm;
    CHECK(run, tagc_comm_create_local(log->group, run->rank, &options, &comm) == TAGC_OK);
    char all[24], mine[12] = "whatever";
    for (int i = 0; i < 30; i++)
        CHECK(run, tagc_comm_all_gather(comm, mine, sizeof mine, all,
                                        (size_t)run->world_size * sizeof mine) == TAGC_OK);
    tagc_comm_destroy(comm);
}

TEST(test_trace) {
    trace_log log = {.lock = PTHREAD_MUTEX_INITIALIZER};
    double before_s = tagc_time_s();
    assert_int_equal(tagc_local_group_create(2, &log.group), TAGC_OK);
    run_threads(2, trace_body, &log);
    tagc_local_group_destroy(log.group);
    assert_int_equal(log.n_events, 30);
    assert_int_equal(log.n_wrong, 0);
    assert_int_equal(log.n_bytes, 30 * 12);
    assert_true(log.last_end_s > before_s && log.last_end_s <= tagc_time_s());
}

/* ---- callback: a shared table, a barrier and memcpy ---- */

typedef struct table {
    pthread_barrier_t barrier;
    const tagc_transfer *transfers[8]; /* (W,) */
    int n_inside[8];                   /* (W,) callers in the function: never two */
} table;

typedef struct table_rank {
    table *table;
    int rank, world_size;
} table_rank;

static tagc_status table_exchange(void *context, const tagc_transfer *mine) {
    table_rank *self = context;
    table *t = self->table;
    int me = self->rank, alone = t->n_inside[me]++ == 0, lane_0 = mine->lane == 0;
    t->transfers[me] = mine;
    pthread_barrier_wait(&t->barrier);
    for (int s = 0; s < self->world_size; s++) {
        if (s != me && !take_from(t->transfers[s], mine, s, me, NULL))
            return tagc_report(TAGC_ERR_CORRUPT, "table: sizes");
    }
    pthread_barrier_wait(&t->barrier);
    t->n_inside[me]--;
    return alone && lane_0 ? TAGC_OK : tagc_report(TAGC_ERR_STATE, "table: two callers or a lane");
}

static const tagc_callback_ops table_ops = {.abi = TAGC_TRANSPORT_ABI, .exchange = table_exchange};

typedef struct storm_job {
    tagc_task task;
    tagc_comm *comm;
    uint64_t seed;
    int n_bad;
} storm_job;

static tagc_status run_storm_job(void *arg) {
    storm_job *self = arg;
    int here = 1, all[8] = {0};
    self->n_bad = pattern_storm(self->comm, self->seed, 4, 3000);
    /* A gather from within a task must not wait for the worker it runs on. */
    TAGC_TRY(tagc_comm_all_gather(self->comm, &here, sizeof here, all,
                                  (size_t)tagc_comm_world_size(self->comm) * sizeof *all));
    for (int r = 0; r < tagc_comm_world_size(self->comm); r++) self->n_bad += all[r] != 1;
    return TAGC_OK;
}

static void callback_body(rank_run *run) {
    table_rank self = {run->shared, run->rank, run->world_size};
    tagc_comm *comm;
    CHECK(run,
          tagc_comm_create_callback(&table_ops, &self, run->rank, run->world_size, NULL, &comm) == TAGC_OK);
    storm_job first = {.task = {.run = run_storm_job, .arg = &first}, .comm = comm, .seed = 1};
    storm_job second = {.task = {.run = run_storm_job, .arg = &second}, .comm = comm, .seed = 2};
    tagc_comm_submit(comm, &first.task);
    int mine = 50 + run->rank, all[8];
    CHECK(run, tagc_comm_all_gather(comm, &mine, sizeof mine, all, (size_t)run->world_size * sizeof *all) ==
                   TAGC_OK); /* goes between the two */
    for (int r = 0; r < run->world_size; r++) CHECK(run, all[r] == 50 + r);
    tagc_comm_submit(comm, &second.task);
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK);
    CHECK(run, tagc_comm_join(comm, &first.task) == TAGC_OK && first.n_bad == 0);
    CHECK(run, tagc_comm_join(comm, &second.task) == TAGC_OK && second.n_bad == 0);
    tagc_comm_destroy(comm);
}

TEST(test_callback) {
    for (int W = 1; W <= 4; W++) {
        table t = {.n_inside = {0}};
        pthread_barrier_init(&t.barrier, NULL, (unsigned)W);
        run_threads(W, callback_body, &t);
        pthread_barrier_destroy(&t.barrier);
    }
}

/* ---- small things ---- */

TEST(test_names) {
    assert_string_equal(tagc_leg_name(TAGC_LEG_INDEX), "index");
    assert_string_equal(tagc_leg_name(TAGC_LEG_CONTROL), "control");
    assert_string_equal(tagc_leg_name(-1), "?");
    assert_string_equal(tagc_leg_name(TAGC_N_LEGS), "?");
    static const char *const names[] = {[TAGC_OK] = "ok",
                                        [TAGC_ERR_ARGUMENT] = "invalid argument",
                                        [TAGC_ERR_STATE] = "call out of order",
                                        [TAGC_ERR_MEMORY] = "out of memory",
                                        [TAGC_ERR_MISMATCH] = "ranks disagree",
                                        [TAGC_ERR_TRANSPORT] = "transport failure",
                                        [TAGC_ERR_TIMEOUT] = "no answer in time",
                                        [TAGC_ERR_CORRUPT] = "corrupt data",
                                        [TAGC_ERR_UNSUPPORTED] = "not supported",
                                        [TAGC_ERR_DEVICE] = "device failure"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i]) assert_string_equal(tagc_status_name((tagc_status)i), names[i]);
    assert_string_equal(tagc_status_name(TAGC_ERR_IO), "input or output failure");
    assert_string_equal(tagc_status_name(TAGC_ERR_INTERRUPTED), "interrupted");
    assert_string_equal(tagc_status_name((tagc_status)9999), "unknown status");
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", TAGC_VERSION_MAJOR, TAGC_VERSION_MINOR, TAGC_VERSION_PATCH);
    assert_string_equal(tagc_version(), version);
    int part[3] = {0};
    assert_int_equal(sscanf(tagc_version(), "%d.%d.%d", &part[0], &part[1], &part[2]), 3);
    assert_int_equal(tagc_version_number(), part[0] * 10000 + part[1] * 100 + part[2]);
#if TAGC_VERSION_NUMBER < 200 || TAGC_VERSION_NUMBER >= 1000000 /* the preprocessor can compare it */
    fail();
#endif
    tagc_comm_destroy(NULL);
    tagc_local_group_destroy(NULL);
    tagc_comm_abort(NULL, "no comm");
}
