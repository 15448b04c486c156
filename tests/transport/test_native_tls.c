/* The native transport with TLS: what arrives is what was sent, whoever is on the way reads nothing and changes nothing, and without TLS on
 * all ranks there is no connection. */
#include "native_ranks.h"

#include "transport/native/tls.h"

#include <poll.h>

static native_tls_context *context; /* NULL: this build has no TLS */

/* ---- one connection, in memory ---- */

static void carry(native_tls *from, native_tls *to, size_t spoiled) {
    size_t n;
    unsigned char *bytes = (unsigned char *)(uintptr_t)tagc_native_tls_sealed(from, &n);
    if (spoiled && n) bytes[n - spoiled] ^= 1;
    assert_true(tagc_native_tls_put(to, bytes, n));
}

/* Returns whether both ends are done. */
static int shake_hands(native_tls *caller, native_tls *called) {
    int a = 0, b = 0;
    for (int i = 0; i < 5 && a >= 0 && b >= 0 && !(a == 1 && b == 1); i++) {
        if (a == 0) a = tagc_native_tls_shake(caller);
        carry(caller, called, 0);
        if (b == 0) b = tagc_native_tls_shake(called);
        carry(called, caller, 0);
    }
    return a == 1 && b == 1;
}

static void make_pair(native_tls *pair[2], int differ) {
    unsigned char key[2][TAGC_TLS_KEY_BYTES] = {{1, 2, 3}, {1, 2, 3}};
    if (differ) key[1][31] ^= 1;
    for (int i = 0; i < 2; i++) {
        pair[i] = tagc_native_tls_begin(context, i == 0, key[i]);
        assert_non_null(pair[i]);
    }
}

static void end_pair(native_tls *pair[2]) {
    for (int i = 0; i < 2; i++) tagc_native_tls_end(pair[i]);
}

static void send_over(native_tls *from, native_tls *to, size_t n_bytes) {
    unsigned char *sent = calloc(n_bytes, 1), *received = calloc(n_bytes, 1);
    size_t n = 0;
    for (size_t i = 0; i < n_bytes; i++) sent[i] = (unsigned char)pattern_hash(5, i, n_bytes, 0);
    assert_true(tagc_native_tls_write(from, sent, n_bytes));
    carry(from, to, 0);
    for (int got; n < n_bytes && (got = tagc_native_tls_read(to, received + n, n_bytes - n)) > 0;)
        n += (size_t)got;
    assert_int_equal(n, n_bytes);
    assert_memory_equal(sent, received, n_bytes);
    assert_false(tagc_native_tls_has_more(to));
    free(sent);
    free(received);
}

TEST(test_a_pair) {
    static const size_t sizes[] = {1, 32, 1 << 14, (1 << 14) + 1, 1 << 18};
    native_tls *pair[2];
    unsigned char byte;
    if (!context) skip();
    make_pair(pair, 0);
    assert_true(shake_hands(pair[0], pair[1]));
    for (size_t i = 0; i < 5; i++)
        for (int from = 0; from < 2; from++) send_over(pair[from], pair[1 - from], sizes[i]);
    for (int i = 0; i < 3; i++) { /* keys change after so many records */
        pair[0]->n_records = TAGC_TLS_RECORDS_OF_A_KEY;
        send_over(pair[0], pair[1], 100000);
        assert_true(pair[0]->n_records < 10);
        send_over(pair[1], pair[0], 1000);
    }
    assert_true(tagc_native_tls_write(pair[0], "x", 1));
    carry(pair[0], pair[1], 1);
    assert_int_equal(tagc_native_tls_read(pair[1], &byte, 1), -1);
    end_pair(pair);
    make_pair(pair, 1);
    assert_false(shake_hands(pair[0], pair[1]));
    end_pair(pair);
    tagc_native_tls_end(NULL);
}

/* ---- ranks ---- */

static void storm_body(rank_run *run) {
    native_group *group = run->shared;
    tagc_comm *comm = native_comm(run, group);
    if (!comm) return;
    for (uint64_t seed = 1; seed <= 2; seed++)
        CHECK(run, pattern_storm(comm, seed, 5, seed == 1 ? 2000 : 3u << 20) == 0);
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK);
    tagc_comm_destroy(comm);
}

TEST(test_random_transfers) {
    if (!context) skip();
    static const int cases[][2] = {{2, 1}, {3, 4}, {5, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        native_group *group = native_group_make(cases[i][0], cases[i][1]);
        group->tls = 1;
        run_threads(cases[i][0], storm_body, group);
        native_group_free(group);
    }
}

static void abort_body(rank_run *run) {
    native_group *group = run->shared;
    tagc_comm *comm = native_comm(run, group);
    if (!comm) return;
    if (run->rank == 1)
        tagc_comm_abort(comm, "the disk is full");
    else
        CHECK(run, tagc_comm_barrier(comm) == TAGC_ERR_TRANSPORT && has("rank 1 gave up: the disk is full"));
    pthread_barrier_wait(&group->met);
    tagc_comm_destroy(comm);
}

TEST(test_abort) {
    if (!context) skip();
    native_group *group = native_group_make(3, 2);
    group->tls = 1;
    run_threads(3, abort_body, group);
    native_group_free(group);
}

static void one_without_body(rank_run *run) {
    native_group *group = run->shared;
    native_group own = *group;
    unsigned char keys[2 * NATIVE_TEST_RANKS * TAGC_NATIVE_KEY_BYTES];
    own.tls = run->rank == 0;
    tagc_native *native = native_open(run, &own);
    memcpy(group->addresses[run->rank], own.addresses[run->rank], TAGC_NATIVE_ADDRESS_BYTES);
    pthread_barrier_wait(&group->opened);
    native_keys(run->rank, 2, keys);
    CHECK(run, tagc_native_connect(native, group->addresses, keys, 60) == TAGC_ERR_MISMATCH);
    int is_said = has(run->rank == 0 ? "options.tls is 0 on rank 1 and 1 on this rank"
                                     : "options.tls is 1 on rank 0 and 0 on this rank");
    CHECK(run, is_said);
    tagc_native_destroy(native);
}

TEST(test_one_without) {
    if (!context) skip();
    native_group *group = native_group_make(2, 1);
    run_threads(2, one_without_body, group);
    native_group_free(group);
}

/* ---- somebody on the way from rank 1 to rank 0 ---- */

enum { PAYLOAD = 300000, MOST_SEEN = 4 << 20 };

typedef struct onlooker {
    int listener;
    struct sockaddr_in rank_0;
    size_t n_seen, spoil_at; /* 0: nothing is changed */
    unsigned char *seen;
} onlooker;

/* Returns 0 at the end. */
static int relay(onlooker *o, int from, int to) {
    unsigned char bytes[65536];
    ssize_t n = recv(from, bytes, sizeof bytes, 0);
    if (n <= 0) {
        shutdown(to, SHUT_WR);
        return 0;
    }
    for (ssize_t i = 0; i < n && o->n_seen < MOST_SEEN; i++) {
        o->seen[o->n_seen++] = bytes[i];
        if (o->n_seen == o->spoil_at) bytes[i] ^= 1;
    }
    return send_all(to, bytes, (size_t)n);
}

static void *look_on(void *arg) {
    onlooker *o = arg;
    int fds[2] = {accept(o->listener, NULL, NULL), socket(AF_INET, SOCK_STREAM, 0)};
    if (connect(fds[1], (struct sockaddr *)&o->rank_0, sizeof o->rank_0) != 0) abort();
    struct pollfd ends[2] = {{.fd = fds[0], .events = POLLIN}, {.fd = fds[1], .events = POLLIN}};
    while (ends[0].fd >= 0 ||
           ends[1].fd >= 0) { /* an end that is over is left out, and the other one goes on */
        (void)poll(ends, 2, -1);
        for (int i = 0; i < 2; i++)
            if (ends[i].fd >= 0 && ends[i].revents && !relay(o, fds[i], fds[1 - i])) ends[i].fd = -1;
    }
    for (int i = 0; i < 2; i++) close(fds[i]);
    return NULL;
}

static void fill_payload(unsigned char *bytes) {
    for (size_t i = 0; i < PAYLOAD; i++) bytes[i] = (unsigned char)pattern_hash(8, i, 1, 1);
}

static void watched_body(rank_run *run) {
    native_group *group = run->shared;
    onlooker *o = group->extra;
    unsigned char addresses[NATIVE_TEST_RANKS][TAGC_NATIVE_ADDRESS_BYTES],
        keys[2 * NATIVE_TEST_RANKS * TAGC_NATIVE_KEY_BYTES], *bytes = malloc(PAYLOAD),
                                                             *all = malloc(2 * PAYLOAD);
    tagc_native *native = native_open(run, group);
    pthread_t thread;
    pthread_barrier_wait(&group->opened);
    memcpy(addresses, group->addresses, sizeof addresses);
    if (run->rank == 1) {
        struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t n_bytes = sizeof own;
        o->rank_0 = own;
        memcpy(&o->rank_0.sin_port, addresses[0] + 8, 2);
        o->listener = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(run,
              bind(o->listener, (struct sockaddr *)&own, sizeof own) == 0 && listen(o->listener, 1) == 0);
        getsockname(o->listener, (struct sockaddr *)&own, &n_bytes);
        memcpy(addresses[0] + 8, &own.sin_port, 2);
        pthread_create(&thread, NULL, look_on, o);
    }
    native_keys(run->rank, 2, keys);
    CHECK(run, tagc_native_connect(native, addresses, keys, 60) == TAGC_OK);
    tagc_comm *comm = NULL;
    CHECK(run, tagc_comm_create_native(native, NULL, &comm) == TAGC_OK);
    fill_payload(bytes);
    tagc_status status = tagc_comm_all_gather(comm, bytes, PAYLOAD, all, 2 * (size_t)PAYLOAD);
    if (o->spoil_at && status == TAGC_OK) status = tagc_comm_barrier(comm); /* its own half had arrived */
    if (!o->spoil_at)
        CHECK(run, status == TAGC_OK && memcmp(all + (size_t)(1 - run->rank) * PAYLOAD, bytes, PAYLOAD) == 0);
    else
        CHECK(run, status == TAGC_ERR_CORRUPT && has(" sent was changed on the way"));
    pthread_barrier_wait(&group->met);
    tagc_comm_destroy(comm);
    if (run->rank == 1) {
        pthread_join(thread, NULL);
        close(o->listener);
    }
    free(bytes);
    free(all);
}

/* Whether 16 bytes of the payload in a row were seen. */
static int has_seen(const onlooker *o) {
    unsigned char *bytes = malloc(PAYLOAD);
    int is_seen = 0;
    fill_payload(bytes);
    for (size_t at = 0; at + 16 <= PAYLOAD && !is_seen; at += 1009)
        is_seen = memmem(o->seen, o->n_seen, bytes + at, 16) != NULL;
    free(bytes);
    return is_seen;
}

static onlooker watch(int tls, size_t spoil_at) {
    onlooker o = {.seen = malloc(MOST_SEEN), .spoil_at = spoil_at};
    native_group *group = native_group_make(2, 1);
    group->tls = tls;
    group->extra = &o;
    run_threads(2, watched_body, group);
    native_group_free(group);
    return o;
}

TEST(test_an_onlooker) {
    for (int tls = 0; tls < (context ? 2 : 1); tls++) {
        onlooker o = watch(tls, 0);
        assert_true(o.n_seen > 2 * PAYLOAD);
        assert_int_equal(has_seen(&o), !tls); /* or the test would see nothing */
        unsigned char key[TAGC_NATIVE_KEY_BYTES];
        for (int from = 0; from < 2; from++) {
            native_key(from, 1 - from, key);
            assert_null(memmem(o.seen, o.n_seen, key, 8)); /* keys never travel */
        }
        free(o.seen);
    }
}

TEST(test_who_changes_a_byte) {
    if (!context) skip();
    onlooker o = watch(1, PAYLOAD);
    free(o.seen);
}

/* A build without it says how to get it. */
TEST(test_without) {
    tagc_native_options options;
    tagc_native *native;
    tagc_native_options_init(&options);
    options.local = "127.0.0.1";
    options.tls = 2;
    assert_int_equal(tagc_native_open(&options, 0, 2, &native), TAGC_ERR_ARGUMENT);
    assert_true(has("options.tls is 2, must be 0 or 1"));
    options.tls = 1;
    tagc_status status = tagc_native_open(&options, 0, 2, &native);
    assert_int_equal(status, context ? TAGC_OK : TAGC_ERR_UNSUPPORTED);
    if (!context) {
        assert_null(native);
        assert_true(has("built without TLS: install libssl-dev") && has("-DTAGC_TLS=ON"));
    }
    tagc_native_destroy(native);
}

int main(void) {
    (void)tagc_native_tls_open(&context);
    int n_failed = test_run(NULL, NULL);
    tagc_native_tls_close(context);
    return n_failed;
}
