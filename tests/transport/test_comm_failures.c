/* What a comm does when something goes wrong: every rank ends in time, with the status and text that tell
 * why, and no thread touches a buffer that was given back. */
#include "../ranks.h"
#include "transport/comm.h"

#include "core/clock.h"

#include <math.h>
#include <unistd.h>

static int has(const char *part) {
    return strstr(tagc_last_error(), part) != NULL;
}

static void run_group(int world_size, double timeout_s, void (*body)(rank_run *run), void *shared) {
    tagc_comm_options options;
    tagc_comm_options_init(&options);
    options.timeout_s = timeout_s;
    run_ranks_with(world_size, body, shared, &options, NULL);
}

/* ---- a rank that never answers ---- */

static void silent_body(rank_run *run) {
    pthread_barrier_t *all = run->shared; /* before and after */
    tagc_comm *comm = run->comm;
    pthread_barrier_wait(all); /* so that nobody waits for a rank that is merely late */
    double start_s = tagc_clock_s();
    if (run->rank != 2) {
        CHECK(run, tagc_comm_failed_rank(comm) == -1);
        CHECK(run, tagc_comm_barrier(comm) == TAGC_ERR_TIMEOUT); /* found here, or told by the other */
        CHECK(run, has("no answer from rank 2 within 0.3 s (while ranks agreed)"));
        CHECK(run, tagc_comm_failed_rank(comm) == 2);
        CHECK(run, tagc_clock_s() - start_s >= 0.3 || has("gave up"));
        tagc_fail(TAGC_ERR_IO, "something else");
        CHECK(run, tagc_comm_barrier(comm) == TAGC_ERR_TIMEOUT); /* for good, with the first reason */
        CHECK(run, has("no answer from rank 2 within 0.3 s"));
    }
    CHECK(run, tagc_clock_s() - start_s <
                   60); /* half the 120 s that hold where none are set, on a machine however busy */
    pthread_barrier_wait(all);
}

TEST(test_timeout) {
    pthread_barrier_t all;
    pthread_barrier_init(&all, NULL, 3);
    run_group(3, 0.3, silent_body, &all);
    pthread_barrier_destroy(&all);
}

/* ---- a rank that gives up, or leaves ---- */

static void abort_body(rank_run *run) {
    tagc_comm *comm = run->comm;
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK || has("rank 1 gave up: the disk is full"));
    if (run->rank == 1) {
        usleep(20000);
        tagc_comm_abort(comm, "the disk is full");
        CHECK(run, tagc_comm_barrier(comm) == TAGC_ERR_TRANSPORT &&
                       has("this rank (1) gave up: the disk is full"));
    } else {
        CHECK(run, tagc_comm_barrier(comm) == TAGC_ERR_TRANSPORT && has("rank 1 gave up: the disk is full"));
        CHECK(run, tagc_comm_barrier(comm) == TAGC_ERR_TRANSPORT && has("rank 1 gave up: the disk is full"));
    }
    CHECK(run, tagc_comm_failed_rank(comm) == 1);
}

static void leave_body(rank_run *run) {
    tagc_comm *comm = run->comm;
    /* A rank that has gone on already may have found out before a slow one was through. */
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK || has("rank 1 left"));
    if (run->rank != 1) CHECK(run, tagc_comm_barrier(comm) == TAGC_ERR_TRANSPORT && has("rank 1 left"));
}

TEST(test_abort_and_leave) {
    for (int i = 0; i < 5; i++) {
        run_group(4, 20, abort_body, NULL);
        run_group(4, 20, leave_body, NULL);
    }
}

/* Large exchanges, and one rank gives up in the middle of them. Buffers are freed as soon as wait returns:
 * the address sanitizer sees who still reads them. */
static void storm_abort_body(rank_run *run) {
    enum { N = 6, PART = 1 << 16, MAX_W = 8 };
    tagc_comm *comm = run->comm;
    tagc_part parts[MAX_W];
    uint32_t n_parts = 0;
    for (int r = 0; r < run->world_size; r++)
        if (r != run->rank) parts[n_parts++] = (tagc_part){r, PART, (uint64_t)r * PART};
    tagc_ticket tickets[N];
    unsigned char *buffers[N];
    for (int i = 0; i < N; i++) {
        buffers[i] = calloc(2 * MAX_W, PART);
        tickets[i] = (tagc_ticket){.transfer = {.n_sends = n_parts,
                                                .n_receives = n_parts,
                                                .sends = parts,
                                                .receives = parts,
                                                .send = buffers[i],
                                                .recv = buffers[i] + MAX_W * PART},
                                   .leg = TAGC_LEG_VALUES};
        tagc_comm_post(comm, (tagc_lane)(i % 3), &tickets[i]);
        if (run->rank == 3 && i == N / 2) tagc_comm_abort(comm, "enough");
    }
    for (int i = 0; i < N; i++) {
        tagc_status status = tagc_comm_wait(comm, &tickets[i]);
        CHECK(run, status == TAGC_OK || (status == TAGC_ERR_TRANSPORT && has("gave up: ")));
        free(buffers[i]);
    }
    CHECK(run, tagc_comm_barrier(comm) == TAGC_ERR_TRANSPORT && has("gave up: "));
}

TEST(test_buffers_come_back) {
    for (int i = 0; i < 12; i++) run_group(i % 3 == 0 ? 5 : i % 3 == 1 ? 6 : 8, 20, storm_abort_body, NULL);
}

/* ---- sizes that do not agree ---- */

typedef struct sizes_shared {
    uint64_t n_sent, n_expected; /* from rank 0 to rank 1 */
} sizes_shared;

static void sizes_body(rank_run *run) {
    sizes_shared *shared = run->shared;
    tagc_comm *comm = run->comm;
    unsigned char send[64] = {0}, recv[128];
    tagc_part sends[2], receives[2];
    for (int i = 0; i < 2; i++) {
        int peer = i < run->rank ? i : i + 1;
        sends[i] = (tagc_part){peer, run->rank == 0 && peer == 1 ? shared->n_sent : 4, 0};
        receives[i] =
            (tagc_part){peer, run->rank == 1 && peer == 0 ? shared->n_expected : 4, (uint64_t)peer * 32};
    }
    tagc_ticket ticket = {
        .transfer =
            {.n_sends = 2, .n_receives = 2, .sends = sends, .receives = receives, .send = send, .recv = recv},
        .leg = TAGC_LEG_INDEX};
    tagc_comm_post(comm, TAGC_LANE_REDUCE, &ticket);
    tagc_status status = tagc_comm_wait(comm, &ticket);
    char text[96];
    snprintf(text, sizeof text, "rank 0 sends %d bytes to rank 1, which expects %d", (int)shared->n_sent,
             (int)shared->n_expected);
    /* Who has nothing to send or to expect may be through before the other one looks. */
    int concerned = (run->rank == 0 && shared->n_sent) || (run->rank == 1 && shared->n_expected);
    if (concerned) CHECK(run, status == TAGC_ERR_MISMATCH && has(text));
    CHECK(run, status == TAGC_OK || has(text));
    CHECK(run, tagc_comm_barrier(comm) == TAGC_ERR_MISMATCH && has(text)); /* on rank 2, too */
    CHECK(run, tagc_comm_failed_rank(comm) == 0);
}

TEST(test_sizes) {
    static const uint64_t pairs[][2] = {{8, 16}, {16, 8}, {0, 16}, {16, 0}};
    for (int i = 0; i < 40; i++) {
        sizes_shared shared = {.n_sent = pairs[i % 4][0], .n_expected = pairs[i % 4][1]};
        run_group(3, 20, sizes_body, &shared);
    }
}

/* ---- transfers against the rules ---- */

typedef struct bad_transfer {
    tagc_transfer transfer;
    const char *text;
} bad_transfer;

static char some_bytes[64];
static const tagc_part one_to_3[] = {{3, 4, 0}}, twice[] = {{1, 4, 0}, {1, 4, 8}},
                       falling[] = {{2, 4, 0}, {1, 4, 8}}, own[] = {{0, 4, 0}}, negative[] = {{-1, 4, 0}},
                       too_many[] = {{1, 4, 0}, {2, 4, 4}, {3, 4, 8}}, both[] = {{1, 4, 0}, {2, 4, 8}},
                       late_own[] = {{0, 0, 0}, {1, 4, 0}}, good[] = {{1, 0, 0}, {2, 0, 0}};
#define SENDS(parts) .n_sends = sizeof(parts) / sizeof *(parts), .sends = (parts), .send = some_bytes
#define RECEIVES(parts) .n_receives = sizeof(parts) / sizeof *(parts), .receives = (parts), .recv = some_bytes

/* Each breaks the comm of rank 0 of 3 before the transport has seen it. */
static const bad_transfer bad_transfers[] = {
    {{SENDS(one_to_3)}, "transfer.sends[0].peer is 3, must be in [0, 3)"},
    {{RECEIVES(one_to_3)}, "transfer.receives[0].peer is 3, must be in [0, 3)"},
    {{SENDS(negative)}, "transfer.sends[0].peer is -1, must be in [0, 3)"},
    {{SENDS(twice)}, "transfer.sends[1].peer is 1 after 1: peers must ascend"},
    {{SENDS(good), RECEIVES(twice)}, "transfer.receives[1].peer is 1 after 1: peers must ascend"},
    {{SENDS(falling)}, "transfer.sends[1].peer is 1 after 2: peers must ascend"},
    {{SENDS(own)}, "transfer.sends[0].peer is 0, this rank itself"},
    {{RECEIVES(late_own)}, "transfer.receives[0].peer is 0, this rank itself"},
    {{SENDS(too_many)}, "transfer.n_sends is 3, must be at most 2"},
    {{SENDS(both), RECEIVES(both), .round_bytes = 3},
     "transfer.sends[0] has 4 bytes, transfer.round_bytes is 3"},
    {{.n_receives = UINT32_MAX, .receives = good}, "transfer.n_receives is 4294967295, must be at most 2"},
    {{.n_sends = 1}, "transfer.sends is NULL and transfer.n_sends is 1"},
    {{.n_sends = 2, .sends = falling}, "transfer.sends[0] has 4 bytes, and their buffer is NULL"},
};

TEST(test_bad_transfers) {
    for (size_t i = 0; i < sizeof bad_transfers / sizeof *bad_transfers; i++) {
        tagc_local_group *group;
        tagc_comm *comm;
        assert_int_equal(tagc_local_group_create(3, &group), TAGC_OK);
        assert_int_equal(tagc_comm_create_local(group, 0, NULL, &comm), TAGC_OK);
        tagc_ticket fine = {.transfer = {SENDS(good), RECEIVES(good)}, .leg = TAGC_LEG_VALUES};
        tagc_comm_post(comm, TAGC_LANE_REDUCE, &fine);
        assert_int_equal(tagc_comm_wait(comm, &fine), TAGC_OK);
        tagc_ticket bad = {.transfer = bad_transfers[i].transfer, .leg = TAGC_LEG_VALUES};
        tagc_comm_post(comm, TAGC_LANE_REDUCE, &bad);
        assert_int_equal(tagc_comm_wait(comm, &bad), TAGC_ERR_ARGUMENT);
        if (!has(bad_transfers[i].text)) fail_msg("%s, not %s", tagc_last_error(), bad_transfers[i].text);
        assert_int_equal(tagc_comm_barrier(comm), TAGC_ERR_ARGUMENT); /* peers cannot know what was meant */
        assert_int_equal(tagc_comm_failed_rank(comm), 0);
        uint64_t sent[TAGC_N_LEGS];
        tagc_comm_bytes(comm, sent, NULL, TAGC_N_LEGS);
        assert_int_equal(sent[TAGC_LEG_VALUES], 0);
        tagc_comm_destroy(comm);
        tagc_local_group_destroy(group);
    }
}

TEST(test_find_part) {
    tagc_part parts[9];
    for (int n = 0; n <= 9; n++) {
        for (int i = 0; i < n; i++) parts[i] = (tagc_part){3 * i + 1, 0, 0};
        for (int peer = -1; peer < 30; peer++) {
            int i = (peer - 1) / 3, is_there = peer > 0 && (peer - 1) % 3 == 0 && i < n;
            assert_ptr_equal(tagc_find_part(parts, (uint32_t)n, peer), is_there ? &parts[i] : NULL);
        }
    }
}

/* ---- a transport that fails ---- */

typedef struct flaky {
    int fail_start_at, fail_test_at, silent; /* the how-manieth call, from 1; 0 never */
    int n_starts, n_tests, n_cancels, n_aborts, n_destroys;
    tagc_failure told;
    char reason[64];
} flaky;

static tagc_status flaky_start(void *context, const tagc_transfer *transfer, void **request) {
    flaky *self = context;
    (void)transfer;
    *request = self;
    return ++self->n_starts == self->fail_start_at ? TAGC_ERR_IO : TAGC_OK;
}

static tagc_status flaky_test(void *context, void *request, tagc_progress *progress) {
    flaky *self = context;
    (void)request;
    progress->done = !self->silent;
    return ++self->n_tests == self->fail_test_at ? tagc_report_rank(TAGC_ERR_CORRUPT, 0, "bent cable")
                                                 : TAGC_OK;
}

static void flaky_cancel(void *context, const tagc_failure *failure) {
    flaky *self = context;
    self->n_cancels++;
    self->told = *failure;
    snprintf(self->reason, sizeof self->reason, "%s", failure->reason);
}

static void flaky_abort(void *context, const tagc_failure *failure) {
    flaky *self = context;
    (void)failure;
    self->n_aborts++;
}

static void flaky_destroy(void *context) {
    ((flaky *)context)->n_destroys++;
}

static const tagc_transport_ops flaky_ops = {
    .abi = TAGC_TRANSPORT_ABI,
    .capabilities = TAGC_TRANSPORT_LANES,
    .name = "flaky",
    .start = flaky_start,
    .test = flaky_test,
    .cancel = flaky_cancel,
    .abort = flaky_abort,
    .destroy = flaky_destroy,
};

TEST(test_failing_transport) {
    tagc_comm *comm;
    flaky at_start = {.fail_start_at = 2};
    assert_int_equal(tagc_comm_create(&flaky_ops, &at_start, 0, 2, NULL, &comm), TAGC_OK);
    assert_int_equal(tagc_comm_barrier(comm), TAGC_OK);
    assert_int_equal(tagc_comm_barrier(comm), TAGC_ERR_IO);
    assert_true(has("transport flaky: input or output failure (while ranks agreed)"));
    assert_int_equal(tagc_comm_barrier(comm), TAGC_ERR_IO);
    assert_int_equal(at_start.n_starts, 2);
    uint64_t sent[TAGC_N_LEGS];
    tagc_comm_bytes(comm, sent, NULL, TAGC_N_LEGS);
    assert_int_equal(sent[TAGC_LEG_CONTROL], 1); /* what failed is not counted */
    tagc_comm_destroy(comm);
    assert_int_equal(at_start.n_cancels, 1);
    assert_int_equal(at_start.n_destroys, 1);

    flaky at_test = {.fail_test_at = 1};
    assert_int_equal(tagc_comm_create(&flaky_ops, &at_test, 1, 2, NULL, &comm), TAGC_OK);
    assert_int_equal(tagc_comm_barrier(comm), TAGC_ERR_CORRUPT);
    assert_string_equal(tagc_last_error(), "bent cable (while ranks agreed)");
    assert_string_equal(at_test.reason, "bent cable"); /* for other ranks */
    assert_int_equal(at_test.told.status, TAGC_ERR_CORRUPT);
    assert_int_equal(at_test.told.rank, 0);
    assert_int_equal(tagc_comm_failed_rank(comm), 0);
    assert_int_equal(tagc_comm_barrier(comm), TAGC_ERR_CORRUPT);
    assert_string_equal(tagc_last_error(), "bent cable (while ranks agreed)");
    tagc_comm_destroy(comm);

    flaky silent = {.silent = 1};
    tagc_comm_options options;
    tagc_comm_options_init(&options);
    options.timeout_s = 0.05;
    assert_int_equal(tagc_comm_create(&flaky_ops, &silent, 1, 2, &options, &comm), TAGC_OK);
    assert_int_equal(tagc_comm_barrier(comm), TAGC_ERR_TIMEOUT);
    assert_int_equal(tagc_comm_failed_rank(comm), -1);
    assert_string_equal(tagc_last_error(),
                        "no answer within 0.05 s (while ranks agreed)"); /* it did not say for whom */
    tagc_comm_abort(comm, NULL);
    tagc_comm_destroy(comm);
    assert_int_equal(silent.n_aborts, 1);
    assert_int_equal(silent.n_cancels, 1);
}

/* ---- time-outs: silence, not queueing ---- */

/* Its first transfer moves at every poll and ends after `long_s`; the others do nothing until then, and the last one never
 * does anything. */
typedef struct trickle {
    double long_s, begun_s;
    int n_starts, is_over, places[3];
} trickle;

static tagc_status trickle_start(void *context, const tagc_transfer *transfer, void **request) {
    trickle *self = context;
    (void)transfer;
    if (self->n_starts == 0) self->begun_s = tagc_clock_s();
    *request = &self->places[self->n_starts++];
    return TAGC_OK;
}

static tagc_status trickle_test(void *context, void *request, tagc_progress *progress) {
    trickle *self = context;
    ptrdiff_t which = (int *)request - self->places;
    if (which == 0) self->is_over = progress->done = tagc_clock_s() - self->begun_s > self->long_s;
    if (which == 0) progress->moved = 1;
    if (which == 1) progress->done = self->is_over;
    progress->waiting_for = 1;
    return TAGC_OK;
}

static void trickle_nothing(void *context, const tagc_failure *failure) {
    (void)context, (void)failure;
}

static void trickle_destroy(void *context) {
    (void)context;
}

static const tagc_transport_ops trickle_ops = {
    .abi = TAGC_TRANSPORT_ABI,
    .capabilities = TAGC_TRANSPORT_LANES,
    .name = "trickle",
    .start = trickle_start,
    .test = trickle_test,
    .cancel = trickle_nothing,
    .abort = trickle_nothing,
    .destroy = trickle_destroy,
};

TEST(test_silence_and_total) {
    tagc_comm *comm;
    tagc_comm_options options;
    tagc_comm_options_init(&options);
    options.timeout_s = 0.1;
    trickle queueing = {.long_s = 0.4};
    tagc_ticket tickets[3] = {0};
    assert_int_equal(tagc_comm_create(&trickle_ops, &queueing, 0, 2, &options, &comm), TAGC_OK);
    for (int i = 0; i < 3; i++) tagc_comm_post(comm, TAGC_LANE_GATHER, &tickets[i]);
    assert_int_equal(tagc_comm_wait(comm, &tickets[1]), TAGC_OK); /* four time-outs after it began */
    assert_int_equal(tagc_comm_wait(comm, &tickets[2]), TAGC_ERR_TIMEOUT);
    assert_true(has("no answer from rank 1 within 0.1 s (leg index)"));
    assert_true(tagc_clock_s() - queueing.begun_s >= 0.5);
    tagc_comm_destroy(comm);

    options.total_timeout_s = 0.2;
    trickle endless = {.long_s = 1e9};
    assert_int_equal(tagc_comm_create(&trickle_ops, &endless, 0, 2, &options, &comm), TAGC_OK);
    tagc_comm_post(comm, TAGC_LANE_GATHER, &tickets[0]);
    assert_int_equal(tagc_comm_wait(comm, &tickets[0]), TAGC_ERR_TIMEOUT);
    assert_int_equal(tagc_comm_failed_rank(comm), 1);
    assert_true(has("not complete within 0.2 s, waiting for rank 1 (leg index)"));
    tagc_comm_destroy(comm);
}

/* ---- a callback that fails on one rank ---- */

typedef struct cable {
    pthread_barrier_t barrier;
    int cut, n_calls[2]; /* `cut` is set between barriers */
} cable;

typedef struct cable_end {
    cable *cable;
    int rank;
} cable_end;

static tagc_status cable_exchange(void *context, const tagc_transfer *transfer) {
    cable_end *self = context;
    (void)transfer;
    int cut = self->rank == 1 && ++self->cable->n_calls[1] == 3;
    if (cut) self->cable->cut = 1;
    pthread_barrier_wait(&self->cable->barrier);
    int seen = self->cable->cut;
    pthread_barrier_wait(&self->cable->barrier);
    if (cut) return tagc_report(TAGC_ERR_IO, "the cable was cut");
    return seen ? TAGC_ERR_TRANSPORT : TAGC_OK;
}

static const tagc_callback_ops cable_ops = {.abi = TAGC_TRANSPORT_ABI, .exchange = cable_exchange};

static void cable_body(rank_run *run) {
    cable_end self = {run->shared, run->rank};
    tagc_comm *comm;
    CHECK(run, tagc_comm_create_callback(&cable_ops, &self, run->rank, 2, NULL, &comm) == TAGC_OK);
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK);
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK);
    tagc_status status = tagc_comm_barrier(comm);
    if (run->rank == 1)
        CHECK(run, status == TAGC_ERR_IO && has("the cable was cut"));
    else
        CHECK(run, status == TAGC_ERR_TRANSPORT &&
                       has("transport callback: transport failure (while ranks agreed)"));
    CHECK(run, tagc_comm_barrier(comm) == status); /* without a call, or it would never return */
    tagc_comm_destroy(comm);
}

TEST(test_failing_callback) {
    cable shared = {.cut = 0};
    pthread_barrier_init(&shared.barrier, NULL, 2);
    run_threads(2, cable_body, &shared);
    pthread_barrier_destroy(&shared.barrier);
}

/* ---- arguments ---- */

static tagc_status no_exchange(void *context, const tagc_transfer *transfer) {
    (void)context, (void)transfer;
    return TAGC_OK;
}

static const tagc_callback_ops no_ops = {.abi = TAGC_TRANSPORT_ABI, .exchange = no_exchange};

static void refuse(tagc_status got, tagc_status expected, tagc_comm **out, const char *part) {
    if (got != expected || *out || !has(part))
        print_error("wanted \"%s\", got %s: %s\n", part, tagc_status_name(got), tagc_last_error());
    assert_int_equal(got, expected);
    assert_null(*out);
    assert_true(has(part));
}

TEST(test_ops_arguments) {
    flaky self = {0};
    tagc_comm *comm;
    tagc_transport_ops ops;
#define TRY_OPS(member, value, part)                                                                         \
    ops = flaky_ops;                                                                                         \
    ops.member = value;                                                                                      \
    comm = (tagc_comm *)&self;                                                                               \
    refuse(tagc_comm_create(&ops, &self, 0, 2, NULL, &comm), TAGC_ERR_ARGUMENT, &comm, part)
    TRY_OPS(abi, 0, "ops.abi is 0, must be 1");
    TRY_OPS(abi, 7, "ops.abi is 7, must be 1");
    TRY_OPS(capabilities, 6, "ops.capabilities is 0x6");
    TRY_OPS(name, NULL, "ops.name is NULL");
    TRY_OPS(start, NULL, "ops.start is NULL");
    TRY_OPS(test, NULL, "ops.test is NULL");
    TRY_OPS(cancel, NULL, "ops.cancel is NULL");
    TRY_OPS(abort, NULL, "ops.abort is NULL");
    TRY_OPS(destroy, NULL, "ops.destroy is NULL");
    refuse(tagc_comm_create(NULL, &self, 0, 2, NULL, &comm), TAGC_ERR_ARGUMENT, &comm, "ops is NULL");
    assert_int_equal(tagc_comm_create(&flaky_ops, &self, 0, 2, NULL, NULL), TAGC_ERR_ARGUMENT);
    assert_int_equal(self.n_destroys, 0); /* what was refused is still the caller's */

    static const int ranks[][2] = {{-1, 2}, {2, 2}, {0, 0}, {0, -3}, {0, 65537}};
    static const char *const parts[] = {"rank is -1, must be in [0, 2)", "rank is 2, must be in [0, 2)",
                                        "world_size is 0", "world_size is -3", "world_size is 65537"};
    for (int i = 0; i < 5; i++) {
        refuse(tagc_comm_create(&flaky_ops, &self, ranks[i][0], ranks[i][1], NULL, &comm), TAGC_ERR_ARGUMENT,
               &comm, parts[i]);
        refuse(tagc_comm_create_callback(&no_ops, NULL, ranks[i][0], ranks[i][1], NULL, &comm),
               TAGC_ERR_ARGUMENT, &comm, parts[i]);
    }
    refuse(tagc_comm_create_callback(NULL, NULL, 0, 1, NULL, &comm), TAGC_ERR_ARGUMENT, &comm, "ops is NULL");
    static const tagc_callback_ops other = {.abi = TAGC_TRANSPORT_ABI + 1, .exchange = no_exchange},
                                   empty = {.abi = TAGC_TRANSPORT_ABI};
    refuse(tagc_comm_create_callback(&other, NULL, 0, 1, NULL, &comm), TAGC_ERR_ARGUMENT, &comm,
           "ops.abi is 2, must be 1");
    refuse(tagc_comm_create_callback(&empty, NULL, 0, 1, NULL, &comm), TAGC_ERR_ARGUMENT, &comm,
           "ops.exchange is NULL");
}

TEST(test_option_arguments) {
    tagc_comm *comm;
    tagc_local_group *group;
    assert_int_equal(tagc_local_group_create(2, &group), TAGC_OK);
    tagc_comm_options options;
    static const double timeouts[] = {0, -1, 1.1e6, (double)INFINITY, (double)NAN};
    for (int i = 0; i < 5; i++) {
        tagc_comm_options_init(&options);
        options.timeout_s = timeouts[i];
        refuse(tagc_comm_create_local(group, 0, &options, &comm), TAGC_ERR_ARGUMENT, &comm,
               "options.timeout_s is ");
    }
    static const double totals[] = {-1, 1.1e6, (double)INFINITY, (double)NAN};
    for (int i = 0; i < 4; i++) {
        tagc_comm_options_init(&options);
        options.total_timeout_s = totals[i];
        refuse(tagc_comm_create_local(group, 0, &options, &comm), TAGC_ERR_ARGUMENT, &comm,
               "options.total_timeout_s is ");
    }
    tagc_comm_options_init(&options);
    options.struct_bytes = 24; /* less than any version had */
    refuse(tagc_comm_create_local(group, 0, &options, &comm), TAGC_ERR_ARGUMENT, &comm,
           "struct_bytes of tagc_comm_options is 24, must be in [48, 4096]");
    refuse(tagc_comm_create_local(group, -1, NULL, &comm), TAGC_ERR_ARGUMENT, &comm,
           "rank is -1, must be in [0, 2)");
    refuse(tagc_comm_create_local(group, 2, NULL, &comm), TAGC_ERR_ARGUMENT, &comm,
           "rank is 2, must be in [0, 2)");
    refuse(tagc_comm_create_local(NULL, 0, NULL, &comm), TAGC_ERR_ARGUMENT, &comm, "group is NULL");

    /* A refused rank can try again; a rank that has a comm cannot have two. */
    tagc_comm *second;
    assert_int_equal(tagc_comm_create_local(group, 0, NULL, &comm), TAGC_OK);
    refuse(tagc_comm_create_local(group, 0, NULL, &second), TAGC_ERR_STATE, &second,
           "rank 0 of this group already");
    int value = 0;
    int gathered[2];
    assert_int_equal(tagc_comm_all_gather(NULL, &value, 4, gathered, 8), TAGC_ERR_ARGUMENT);
    assert_int_equal(tagc_comm_all_gather(comm, NULL, 4, gathered, 8), TAGC_ERR_ARGUMENT);
    assert_int_equal(tagc_comm_all_gather(comm, &value, 4, NULL, 8), TAGC_ERR_ARGUMENT);
    assert_int_equal(tagc_comm_all_gather(comm, &value, SIZE_MAX / 2, gathered, 8), TAGC_ERR_ARGUMENT);
    assert_non_null(strstr(tagc_last_error(), "n_bytes is "));
    static const size_t wrong[] = {0, 4, 7, 9, 12};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(tagc_comm_all_gather(comm, &value, 4, gathered, wrong[i]), TAGC_ERR_ARGUMENT);
        assert_non_null(strstr(tagc_last_error(), "must be 8: n_bytes of each of 2 ranks"));
    }
    assert_int_equal(tagc_comm_barrier(NULL), TAGC_ERR_ARGUMENT);
    tagc_comm_destroy(comm);
    tagc_local_group_destroy(group);

    static const int sizes[] = {0, -1, 1025};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(tagc_local_group_create(sizes[i], &group), TAGC_ERR_ARGUMENT);
        assert_null(group);
        assert_true(has("world_size is "));
    }
}

/* ---- callbacks that tell each other the whole failure ---- */

typedef struct grapevine {
    pthread_mutex_t lock;
    pthread_cond_t told;
    tagc_failure failure;
    char reason[256];
} grapevine;

typedef struct listener {
    grapevine *all;
    int rank;
} listener;

/* Rank 0 gets damage from rank 2, the others hear of it. */
static tagc_status listen(void *context, const tagc_transfer *transfer) {
    listener *self = context;
    grapevine *all = self->all;
    (void)transfer;
    if (self->rank == 0) return tagc_report_rank(TAGC_ERR_CORRUPT, 2, "rank 2 sent nonsense");
    pthread_mutex_lock(&all->lock);
    while (all->failure.status == TAGC_OK) pthread_cond_wait(&all->told, &all->lock);
    pthread_mutex_unlock(&all->lock);
    return tagc_report_rank(all->failure.status, all->failure.rank, all->reason);
}

static void tell(void *context, const tagc_failure *failure) {
    listener *self = context;
    grapevine *all = self->all;
    pthread_mutex_lock(&all->lock);
    if (all->failure.status == TAGC_OK) {
        all->failure = *failure;
        snprintf(all->reason, sizeof all->reason, "%s", failure->reason);
    }
    pthread_cond_broadcast(&all->told);
    pthread_mutex_unlock(&all->lock);
}

static void told_body(rank_run *run) {
    static const tagc_callback_ops ops = {.abi = TAGC_TRANSPORT_ABI, .exchange = listen, .abort = tell};
    listener self = {run->shared, run->rank};
    tagc_comm *comm;
    CHECK(run, tagc_comm_create_callback(&ops, &self, run->rank, run->world_size, NULL, &comm) == TAGC_OK);
    CHECK(run, tagc_comm_barrier(comm) == TAGC_ERR_CORRUPT);
    CHECK(run, strstr(tagc_last_error(), "rank 2 sent nonsense"));
    CHECK(run, tagc_comm_failed_rank(comm) == 2);
    tagc_comm_destroy(comm);
}

TEST(test_callbacks_that_tell) {
    grapevine all = {.failure.status = TAGC_OK};
    pthread_mutex_init(&all.lock, NULL);
    pthread_cond_init(&all.told, NULL);
    run_threads(4, told_body, &all);
    pthread_cond_destroy(&all.told);
    pthread_mutex_destroy(&all.lock);
}
