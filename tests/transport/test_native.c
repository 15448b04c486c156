/* The native transport moves what the pattern says, whatever the order in which ranks start; and its failures name the rank
 * and the reason on all ranks. */
#include "native_ranks.h"

#include "core/clock.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- random transfers ---- */

static void storm_body(rank_run *run) {
    native_group *group = run->shared;
    const uint64_t *max_bytes = group->extra;
    tagc_comm *comm = native_comm(run, group);
    if (!comm) return;
    for (uint64_t seed = 1; seed <= 3; seed++)
        CHECK(run, pattern_storm(comm, seed, 5, seed == 1 ? 2000 : *max_bytes) == 0);
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK);
    tagc_comm_destroy(comm);
}

/* Messages of up to max_bytes: above 1 MiB a sender waits for its receiver, above 256 kB a message is cut. */
TEST(test_random_transfers) {
    static const struct {
        int world_size, n_sockets;
        uint64_t max_bytes;
    } cases[] = {{1, 1, 1000}, {2, 1, 5u << 20}, {3, 4, 5u << 20}, {5, 2, 3u << 20}, {16, 1, 60000}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        native_group *group = native_group_make(cases[i].world_size, cases[i].n_sockets);
        uint64_t max_bytes = cases[i].max_bytes;
        group->extra = &max_bytes;
        run_threads(cases[i].world_size, storm_body, group);
        native_group_free(group);
    }
}

static void counting_body(rank_run *run) {
    native_group *group = run->shared;
    int *n_threads = group->extra, n = 0;
    tagc_comm *comm = native_comm(run, group);
    if (!comm) return;
    pthread_barrier_wait(&group->met);
    if (run->rank == 0) {
        DIR *tasks = opendir("/proc/self/task");
        while (tasks && readdir(tasks)) n++;
        if (tasks) closedir(tasks);
        *n_threads = n;
    }
    pthread_barrier_wait(&group->met);
    CHECK(run, pattern_storm(comm, 7, 3, 3u << 20) == 0);
    tagc_comm_destroy(comm);
}

/* Each rank has as many as it asks for, and no more than connections with a peer. By default loopback, whose rate nobody knows, has none. */
TEST(test_threads) {
    static const struct {
        int asked, n_sockets, n_more;
    } cases[] = {{1, 4, 0}, {3, 4, 2}, {4, 2, 1}, {0, 4, 0}};
    int n_alone = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int n_threads = 0;
        native_group *group = native_group_make(2, cases[i].n_sockets);
        group->n_threads = cases[i].asked;
        group->extra = &n_threads;
        run_threads(2, counting_body, group);
        native_group_free(group);
        if (i == 0) n_alone = n_threads;
        assert_int_equal(n_threads - n_alone, 2 * cases[i].n_more);
    }
    tagc_native *native;
    tagc_native_options options;
    tagc_native_options_init(&options);
    options.n_threads = 9;
    assert_int_equal(tagc_native_open(&options, 0, 2, &native), TAGC_ERR_ARGUMENT);
    assert_true(has("n_threads is 9, must be in [0, 8]"));
}

TEST(test_ipv6) {
    tagc_native *native;
    tagc_native_options options;
    tagc_native_options_init(&options);
    options.local = "::1";
    if (tagc_native_open(&options, 0, 1, &native) != TAGC_OK) { /* a host without IPv6 */
        print_message("no ::1 here: %s\n", tagc_last_error());
        skip();
    }
    tagc_native_destroy(native);
    native_group *group = native_group_make(3, 2);
    uint64_t max_bytes = 100000;
    group->local = "::1";
    group->extra = &max_bytes;
    run_threads(3, storm_body, group);
    native_group_free(group);
}

/* Rank 0 starts a large transfer first. Rank 1 starts it only when it has a small one of another lane, which rank 0 has
 * started later, so that its bytes stand behind the large one's. */
static void behind_body(rank_run *run) {
    enum { LARGE = 4 << 20, SMALL = 100 };
    native_group *group = run->shared;
    tagc_comm *comm = native_comm(run, group);
    if (!comm) return;
    unsigned char *large = calloc(LARGE, 1), small[SMALL] = {0};
    for (int i = 0; i < LARGE && run->rank == 0; i++) large[i] = (unsigned char)(i * 7 + (i >> 9));
    tagc_part parts[2] = {{.peer = 1 - run->rank, .n_bytes = LARGE},
                          {.peer = 1 - run->rank, .n_bytes = SMALL}};
    tagc_ticket tickets[2] = {{.leg = TAGC_LEG_VALUES}, {.leg = TAGC_LEG_VALUES}};
    for (int i = 0; i < 2; i++) {
        tagc_transfer *t = &tickets[i].transfer;
        if (run->rank == 0)
            *t = (tagc_transfer){.n_sends = 1, .sends = &parts[i], .send = i ? small : large};
        else
            *t = (tagc_transfer){.n_receives = 1, .receives = &parts[i], .recv = i ? small : large};
    }
    if (run->rank == 0) small[SMALL - 1] = 77;
    if (run->rank == 0) tagc_comm_post(comm, TAGC_LANE_GATHER, &tickets[0]);
    tagc_comm_post(comm, TAGC_LANE_REDUCE, &tickets[1]);
    CHECK(run, tagc_comm_wait(comm, &tickets[1]) == TAGC_OK);
    CHECK(run, small[SMALL - 1] == 77);
    if (run->rank == 1) tagc_comm_post(comm, TAGC_LANE_GATHER, &tickets[0]);
    CHECK(run, tagc_comm_wait(comm, &tickets[0]) == TAGC_OK);
    int n_wrong = 0;
    for (int i = 0; i < LARGE; i++) n_wrong += large[i] != (unsigned char)(i * 7 + (i >> 9));
    CHECK(run, n_wrong == 0);
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK);
    tagc_comm_destroy(comm);
    free(large);
}

TEST(test_lanes_do_not_block) {
    native_group *group = native_group_make(2, 1);
    run_threads(2, behind_body, group);
    native_group_free(group);
}

/* ---- ranks that fail ---- */

static void abort_body(rank_run *run) {
    native_group *group = run->shared;
    tagc_comm *comm = native_comm(run, group);
    if (!comm) return;
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK);
    pthread_barrier_wait(&group->met);
    if (run->rank == 1) {
        tagc_comm_abort(comm, "the disk is full");
        CHECK(run, tagc_comm_barrier(comm) == TAGC_ERR_TRANSPORT &&
                       has("this rank (11) gave up: the disk is full"));
    } else {
        CHECK(run, tagc_comm_barrier(comm) == TAGC_ERR_TRANSPORT && has("rank 11 gave up: the disk is full"));
        CHECK(run, tagc_comm_barrier(comm) == TAGC_ERR_TRANSPORT && has("rank 11 gave up: the disk is full"));
    }
    tagc_comm_destroy(comm);
}

static void leave_body(rank_run *run) {
    native_group *group = run->shared;
    tagc_comm *comm = native_comm(run, group);
    if (!comm) return;
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK);
    pthread_barrier_wait(&group->met);
    if (run->rank != 1) /* one that was told by another is right, too */
        CHECK(run, tagc_comm_barrier(comm) == TAGC_ERR_TRANSPORT && has("rank 11 left"));
    tagc_comm_destroy(comm);
}

static void silent_body(rank_run *run) {
    native_group *group = run->shared;
    tagc_comm *comm = native_comm(run, group);
    if (!comm) return;
    double start_s = tagc_clock_s();
    if (run->rank != 2) {
        CHECK(run, tagc_comm_barrier(comm) == TAGC_ERR_TIMEOUT); /* found here, or told by the other */
        CHECK(run, has("no answer from rank 12 within 0.3 s (while ranks agreed)"));
        CHECK(run, tagc_comm_failed_rank(comm) == 12);
        CHECK(run, tagc_clock_s() - start_s >= 0.3 || has("gave up"));
    }
    pthread_barrier_wait(&group->met);
    tagc_comm_destroy(comm);
}

static void run_failing(void (*body)(rank_run *), int world_size, double timeout_s) {
    native_group *group = native_group_make(world_size, 2);
    group->timeout_s = timeout_s;
    for (int r = 0; r < NATIVE_TEST_RANKS; r++) group->names[r] = 10 + r;
    run_threads(world_size, body, group);
    native_group_free(group);
}

TEST(test_abort_leave_silence) {
    run_failing(abort_body, 4, 60);
    run_failing(leave_body, 4, 60);
    run_failing(silent_body, 3, 0.3);
}

/* Sizes that do not agree, from rank 10 to rank 11: both hear of it, in the next transfer if the part was sent already. Above 1 MiB
 * it may be the sender who sees it. */
static void sizes_body(rank_run *run) {
    native_group *group = run->shared;
    const uint64_t *sizes = group->extra;
    tagc_comm *comm = native_comm(run, group);
    if (!comm) return;
    char text[96];
    unsigned char *buffer = calloc(sizes[run->rank] + 1, 1);
    tagc_part part = {.peer = 1 - run->rank, .n_bytes = sizes[run->rank]};
    tagc_ticket ticket = {.transfer = {.n_sends = run->rank == 0 && sizes[0] > 0,
                                       .n_receives = run->rank == 1,
                                       .sends = &part,
                                       .receives = &part,
                                       .send = buffer,
                                       .recv = buffer},
                          .leg = TAGC_LEG_VALUES};
    tagc_comm_post(comm, TAGC_LANE_REDUCE, &ticket);
    tagc_status status = tagc_comm_wait(comm, &ticket);
    if (status == TAGC_OK) status = tagc_comm_barrier(comm);
    CHECK(run, status == TAGC_ERR_MISMATCH);
    CHECK(run, tagc_comm_failed_rank(comm) == 10);
    snprintf(text, sizeof text, "rank 10 sends %d bytes to rank 11, which expects %d", (int)sizes[0],
             (int)sizes[1]);
    int is_said = has(text);
    snprintf(text, sizeof text, "rank 10 sent less than the %d bytes that rank 11 expects", (int)sizes[1]);
    CHECK(run, is_said || (sizes[0] < sizes[1] && has(text)));
    tagc_comm_destroy(comm);
    free(buffer);
}

TEST(test_sizes) {
    static uint64_t sizes[][2] = {{8, 16},      {3 << 20, 2 << 20}, {2 << 20, 3 << 20},
                                  {0, 2 << 20}, {8, 2 << 20},       {2 << 20, 8}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        native_group *group = native_group_make(2, 1);
        for (int r = 0; r < 2; r++) group->names[r] = 10 + r;
        group->extra = sizes[i];
        run_threads(2, sizes_body, group);
        native_group_free(group);
    }
}

/* Large transfers, and `lose` amid them on rank 2. Buffers are freed as soon as wait returns: the address sanitizer sees who
 * still uses them. */
static void storm(rank_run *run, tagc_comm *comm, void (*lose)(tagc_comm *comm)) {
    enum { N = 6, PART = 3 << 20 };
    int W = run->world_size;
    tagc_part parts[NATIVE_TEST_RANKS];
    uint32_t n_parts = 0;
    for (int r = 0; r < W; r++)
        if (r != run->rank) parts[n_parts++] = (tagc_part){r, PART, (uint64_t)r * PART};
    tagc_ticket tickets[N];
    unsigned char *buffers[N];
    for (int i = 0; i < N; i++) {
        buffers[i] = malloc((size_t)(2 * W) * PART);
        memset(buffers[i], i, (size_t)W * PART);
        tickets[i] = (tagc_ticket){.transfer = {.n_sends = n_parts,
                                                .n_receives = n_parts,
                                                .sends = parts,
                                                .receives = parts,
                                                .send = buffers[i],
                                                .recv = buffers[i] + (size_t)W * PART},
                                   .leg = TAGC_LEG_VALUES};
        tagc_comm_post(comm, (tagc_lane)(i % 3), &tickets[i]);
        if (run->rank == 2 && i == N / 2) lose(comm);
    }
    int n_failed = 0;
    for (int i = 0; i < N; i++) {
        n_failed += tagc_comm_wait(comm, &tickets[i]) != TAGC_OK;
        free(buffers[i]);
    }
    CHECK(run, n_failed > 0);
}

static void abort_amid(tagc_comm *comm) {
    tagc_comm_abort(comm, "enough");
}

/* Also ranks to which half a frame had left, and those that hear of it from another. */
static void storm_abort_body(rank_run *run) {
    tagc_comm *comm = native_comm(run, run->shared);
    if (!comm) return;
    storm(run, comm, abort_amid);
    CHECK(run, has(run->rank == 2 ? "this rank (12) gave up: enough" : "rank 12 gave up: enough"));
    tagc_comm_destroy(comm);
}

TEST(test_abort_amid_transfers) {
    run_failing(storm_abort_body, 4, 60);
}

/* ---- a process that is killed ---- */

static void kill_itself(tagc_comm *comm) {
    (void)comm;
    raise(SIGKILL);
}

/* As a data loader's worker does, which outlives the rank. */
static pid_t fork_sleeper(void) {
    pid_t child = fork();
    if (child != 0) return child;
    alarm(120);
    for (;;) pause();
}

/* A rank that is idle, and one amid transfers. */
static void killed_body(rank_run *run) {
    native_group *group = run->shared;
    tagc_comm *comm = native_comm(run, group);
    if (!comm) return;
    run->world_size = group->world_size;
    if (run->rank == 2) group->fork = fork_sleeper();
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK);
    double start_s = tagc_clock_s();
    if (group->extra)
        storm(run, comm, kill_itself);
    else if (run->rank == 2)
        kill_itself(comm);
    else
        CHECK(run, tagc_comm_barrier(comm) == TAGC_ERR_TRANSPORT);
    CHECK(run, has("rank 12 ended or cannot be reached any more"));
    CHECK(run, run->rank == 2 || tagc_comm_failed_rank(comm) == 12);
    CHECK(run, tagc_clock_s() - start_s < group->timeout_s / 2);
    tagc_comm_destroy(comm);
}

TEST(test_killed_process) {
    int is_storm = 1;
    for (int i = 0; i < 2; i++) {
        native_group *group = native_group_make(3, 2);
        for (int r = 0; r < 3; r++) group->names[r] = 10 + r;
        group->extra = i ? &is_storm : NULL;
        pid_t child = fork();
        if (child == 0) {
            rank_run run = {.rank = 2, .world_size = 3, .shared = group};
            killed_body(&run);
            _exit(1);
        }
        run_threads(2, killed_body, group);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        assert_int_equal(kill(group->fork, SIGKILL), 0); /* it lived until now */
        native_group_free(group);
    }
}

/* Ranks 1 and 2, when rank 0 waits for both: rank 1 ends, as it does where a launcher ends it, and then rank 2 says why. */
static void *end_and_say(void *arg) {
    native_group *group = arg;
    unsigned char bytes[TALK_BYTES];
    const char reason[] = "the \x1b[2Jdisk\n\xc2\x9b is full";
    int fds[3];
    for (int r = 1; r < 3; r++) {
        fds[r] = call_as(r, 0, 0, group->addresses[0], bytes);
        if (fds[r] < 0) abort();
    }
    for (int r = 1; r < 3; r++)
        if (recv(fds[r], bytes, 33, MSG_WAITALL) != 33) abort(); /* of the barrier */
    shutdown(fds[1], SHUT_WR);
    if (recv(fds[1], bytes, 1, 0) != 0) abort(); /* rank 0 has seen it */
    unsigned char frame[32] = {3, [4] = sizeof reason - 1, [8] = 12, [16] = TAGC_ERR_MISMATCH, [24] = 1 + 1};
    if (send(fds[2], frame, sizeof frame, MSG_NOSIGNAL | MSG_MORE) != sizeof frame ||
        send(fds[2], reason, sizeof reason - 1, MSG_NOSIGNAL) != sizeof reason - 1)
        abort();
    while (recv(fds[2], bytes, sizeof bytes, 0) > 0) {
    }
    close(fds[1]);
    close(fds[2]);
    return NULL;
}

TEST(test_the_first_is_named) {
    native_group *group = native_group_make(3, 1);
    for (int r = 0; r < 3; r++) group->names[r] = 10 + r;
    rank_run run = {.rank = 0, .world_size = 3, .shared = group};
    tagc_native *native = native_open(&run, group);
    assert_non_null(native);
    for (int r = 1; r < 3; r++) memcpy(group->addresses[r], group->addresses[0], TAGC_NATIVE_ADDRESS_BYTES);
    pthread_t others;
    pthread_create(&others, NULL, end_and_say, group);
    tagc_comm *comm = native_join(&run, group, native);
    assert_string_equal(run.failure, "");
    assert_int_equal(tagc_comm_barrier(comm),
                     TAGC_ERR_MISMATCH); /* as rank 12 said, and of whom it said it */
    assert_string_equal(tagc_last_error(),
                        "rank 12 gave up: the \\x1b[2Jdisk\\x0a\\x9b is full (while ranks agreed)");
    assert_int_equal(tagc_comm_failed_rank(comm), 11);
    tagc_comm_destroy(comm);
    pthread_join(others, NULL);
    native_group_free(group);
}

/* Forks while ranks connect: what has then been accepted is hung up on and called again. */
static void *fork_often(void *arg) {
    atomic_int *is_over = arg;
    while (!atomic_load(is_over)) {
        pid_t child = fork();
        if (child == 0) _exit(0);
        waitpid(child, NULL, 0);
    }
    return NULL;
}

static void connecting_body(rank_run *run) {
    native_group *group = run->shared;
    tagc_comm *comm = native_comm(run, group);
    if (!comm) return;
    CHECK(run, pattern_storm(comm, 5, 2, 1000) == 0);
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK);
    tagc_comm_destroy(comm);
}

/* A fork that ends, as a data loader's worker does, takes nothing of its parent's connections with it. */
static void forking_body(rank_run *run) {
    native_group *group = run->shared;
    tagc_comm *comm = native_comm(run, group);
    if (!comm) return;
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK);
    pid_t child = fork();
    if (child == 0) _exit(0);
    waitpid(child, NULL, 0);
    CHECK(run, pattern_storm(comm, 5, 2, 100000) == 0);
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK);
    tagc_comm_destroy(comm);
}

TEST(test_forks) {
    native_group *group = native_group_make(2, 1);
    run_threads(2, forking_body, group);
    native_group_free(group);
    pthread_t forks;
    atomic_int is_over = 0;
    group = native_group_make(6, 4);
    pthread_create(&forks, NULL, fork_often, &is_over);
    run_threads(6, connecting_body, group);
    atomic_store(&is_over, 1);
    pthread_join(forks, NULL);
    native_group_free(group);
}
