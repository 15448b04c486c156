/* Who may connect to the native transport: only ranks that prove that they have their key. What else comes to the port is refused and
 * counted, and no rank is lost by it. And which port it is: interfaces, families, mistakes of the caller. */
#include "native_ranks.h"
#include "transport/native/native.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { N_FLOOD = 400 };

/* ---- an attacker ---- */

/* Whether the port closes the connection after these bytes, and says nothing. */
static int is_refused(const unsigned char *address, const unsigned char *bytes, size_t n_bytes) {
    int fd = native_dial(address);
    if (fd < 0) return 0;
    unsigned char answer;
    int is_sent = send(fd, bytes, n_bytes, MSG_NOSIGNAL) == (ssize_t)n_bytes;
    ssize_t n = recv(fd, &answer, 1, 0); /* 0 or a reset */
    close(fd);
    return is_sent && n <= 0;
}

typedef struct attack {
    native_group *group;
    int n_refused_wrongly, n_open, idle[N_FLOOD];
} attack;

/* What a stranger says after the call of rank 1 and the challenge. */
typedef enum untruth {
    OF_RANK_0, /* a reflection: as rank 0 would prove itself to rank 1 */
    OF_RANK_2,
    TO_RANK_2,
    ONE_BIT,
    OLDER,   /* right, in another talk */
    HALF,    /* and hangs up */
    NOTHING, /* and hangs up */
    N_LIES
} untruth;

static int is_lie_refused(const unsigned char *address, untruth lie, const unsigned char *older) {
    enum { N = 2 * CALL_BYTES };
    unsigned char talk[TALK_BYTES], more;
    int fd = native_dial(address);
    write_call(talk, 1, 1, 0, 0, 1);
    if (!send_all(fd, talk, CALL_BYTES) || !receive_all(fd, talk + CALL_BYTES, CALL_BYTES)) return 0;
    write_proof(talk, N,
                lie == OF_RANK_0   ? 0
                : lie == OF_RANK_2 ? 2
                                   : 1,
                lie == OF_RANK_0   ? 1
                : lie == TO_RANK_2 ? 2
                                   : 0);
    if (lie == ONE_BIT) talk[N + 31] ^= 1;
    if (lie == OLDER) memcpy(talk + N, older + N, PROOF_BYTES);
    size_t n_sent = lie == HALF ? PROOF_BYTES / 2 : lie == NOTHING ? 0 : PROOF_BYTES;
    if (n_sent && !send_all(fd, talk + N, n_sent)) return 0;
    if (n_sent < PROOF_BYTES) shutdown(fd, SHUT_WR);
    ssize_t n = recv(fd, &more, 1, 0); /* 0 or a reset, and never a proof */
    close(fd);
    return n <= 0;
}

/* While rank 0 waits for rank 1. */
static void *attack_rank_0(void *arg) {
    attack *a = arg;
    const unsigned char *address = a->group->addresses[0];
    unsigned char call[CALL_BYTES], older[TALK_BYTES], noise[4096];
    for (size_t i = 0; i < sizeof noise; i++) noise[i] = (unsigned char)pattern_hash(1, i, 2, 3);
    static const int wrong[][4] = {
        /* kind, from, to, index */
        {1, 0, 0, 0}, /* rank 0 itself */
        {1, 9, 0, 0}, /* no rank */
        {1, 1, 1, 0}, /* to another rank */
        {1, 1, 0, 9}, /* a socket that there is not */
        {2, 1, 0, 0}, /* a challenge that nobody asked for */
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        write_call(call, wrong[i][0], wrong[i][1], wrong[i][2], wrong[i][3], 1);
        a->n_refused_wrongly += !is_refused(address, call, sizeof call);
    }
    write_call(call, 1, 1, 0, 0, 1);
    call[4] = 1; /* another version */
    a->n_refused_wrongly += !is_refused(address, call, sizeof call);
    call[4] = 2;
    call[7] = 1; /* TLS */
    a->n_refused_wrongly += !is_refused(address, call, sizeof call);
    a->n_refused_wrongly += !is_refused(address, noise, sizeof noise);
    write_call(older, 1, 1, 0, 0, 1); /* of an onlooker, some other time */
    write_call(older + CALL_BYTES, 2, 0, 1, 0, 77);
    write_proof(older, 2 * CALL_BYTES, 1, 0);
    for (int i = 0; i < N_LIES; i++) a->n_refused_wrongly += !is_lie_refused(address, (untruth)i, older);
    for (int i = 0; i < N_FLOOD;
         i++) { /* of these, every other one says nothing after the challenge, the others one byte */
        a->idle[i] = native_dial(address);
        write_call(call, 1, 1, 0, 0, 1);
        a->n_open += send_all(a->idle[i], call, i % 2 ? CALL_BYTES : 1);
    }
    return NULL;
}

static void besieged_body(rank_run *run) {
    native_group *group = run->shared;
    attack *a = group->extra;
    tagc_native *native = native_open(run, group);
    pthread_barrier_wait(&group->opened);
    if (!native) return;
    pthread_t attacker;
    if (run->rank == 1) { /* rank 0 goes on to connect */
        pthread_create(&attacker, NULL, attack_rank_0, a);
        pthread_join(attacker, NULL);
    }
    unsigned char keys[2 * NATIVE_TEST_RANKS * TAGC_NATIVE_KEY_BYTES];
    native_keys(run->rank, group->world_size, keys);
    CHECK(run, tagc_native_connect(native, group->addresses, keys, 60) == TAGC_OK);
    CHECK(run, tagc_native_refused(native) == (run->rank == 0 ? 8 + N_LIES + N_FLOOD : 0));
    tagc_comm *comm;
    CHECK(run, tagc_comm_create_native(native, NULL, &comm) == TAGC_OK);
    CHECK(run, native_dial(group->addresses[run->rank]) < 0); /* the port is closed */
    CHECK(run, pattern_storm(comm, 7, 3, 100000) == 0);
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK);
    tagc_comm_destroy(comm);
}

TEST(test_strangers) {
    native_group *group = native_group_make(2, 2);
    attack a = {.group = group};
    group->extra = &a;
    run_threads(2, besieged_body, group);
    assert_int_equal(a.n_refused_wrongly, 0);
    assert_int_equal(a.n_open, N_FLOOD);
    for (int i = 0; i < N_FLOOD; i++) close(a.idle[i]);
    native_group_free(group);
}

/* What has opened a connection opens no other: an onlooker cannot say it again. This test is rank 1. */
static void *connect_rank_0(void *arg) {
    rank_run *run = arg;
    native_group *group = run->shared;
    unsigned char keys[2 * NATIVE_TEST_RANKS * TAGC_NATIVE_KEY_BYTES];
    native_keys(0, 2, keys);
    CHECK(run, tagc_native_connect(group->extra, group->addresses, keys, 60) == TAGC_OK);
    return NULL;
}

TEST(test_repeated_key) {
    native_group *group = native_group_make(2, 2);
    rank_run run = {.rank = 0, .world_size = 2, .shared = group};
    tagc_native *native = group->extra = native_open(&run, group);
    assert_non_null(native);
    memcpy(group->addresses[1], group->addresses[0], TAGC_NATIVE_ADDRESS_BYTES);
    pthread_t rank_0;
    pthread_create(&rank_0, NULL, connect_rank_0, &run);
    unsigned char talk[TALK_BYTES], challenge[CALL_BYTES], more;
    int first = call_as(1, 0, 0, group->addresses[0], talk), onlooker = native_dial(group->addresses[0]);
    int is_challenged = send_all(onlooker, talk, CALL_BYTES) && receive_all(onlooker, challenge, CALL_BYTES);
    int is_new = memcmp(challenge + 16, talk + CALL_BYTES + 16, CALL_BYTES - 16) != 0;
    int is_said = send_all(onlooker, talk + 2 * CALL_BYTES, PROOF_BYTES);
    int is_repeat_refused = recv(onlooker, &more, 1, 0) <= 0;
    int is_first_open = recv(first, &more, 1, MSG_DONTWAIT) < 0;
    int second = call_as(1, 0, 1, group->addresses[0], talk);
    pthread_join(rank_0, NULL);
    assert_string_equal(run.failure, "");
    assert_true(first >= 0 && second >= 0);
    assert_true(is_challenged && is_new && is_said && is_repeat_refused && is_first_open);
    assert_int_equal(tagc_native_refused(native), 1);
    close(onlooker);
    close(first);
    close(second);
    tagc_native_destroy(native);
    native_group_free(group);
}

/* Closes it so that the other end is told of a reset. */
static void reset(int fd) {
    const struct linger none = {.l_onoff = 1};
    (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
    close(fd);
}

static void *connect_rank(void *arg) {
    rank_run *run = arg;
    native_group *group = run->shared;
    unsigned char keys[2 * NATIVE_TEST_RANKS * TAGC_NATIVE_KEY_BYTES];
    native_keys(run->rank, 3, keys);
    CHECK(run, tagc_native_connect(group->extra, group->addresses, keys, 60) == TAGC_OK);
    return NULL;
}

/* Rank 1 gets an answer and is cut off while rank 0 still waits for rank 2. It calls again. */
TEST(test_cut_off_after_the_answer) {
    native_group *group = native_group_make(3, 1);
    rank_run run = {.rank = 0, .world_size = 3, .shared = group};
    tagc_native *native = group->extra = native_open(&run, group);
    assert_non_null(native);
    for (int r = 1; r < 3; r++) memcpy(group->addresses[r], group->addresses[0], TAGC_NATIVE_ADDRESS_BYTES);
    pthread_t rank_0;
    pthread_create(&rank_0, NULL, connect_rank, &run);
    unsigned char talk[TALK_BYTES];
    int first = call_as(1, 0, 0, group->addresses[0], talk);
    if (first >= 0) reset(first);
    usleep(50000);
    int again = call_as(1, 0, 0, group->addresses[0], talk);
    int ended = call_as(2, 0, 0, group->addresses[0], talk);
    pthread_join(rank_0, NULL);
    assert_string_equal(run.failure, "");
    assert_true(first >= 0 && again >= 0 && ended >= 0);
    assert_int_equal(tagc_native_refused(native), 0);
    close(again);
    close(ended);
    tagc_native_destroy(native);
    native_group_free(group);
}

/* Answers a call to rank `self`, with the proof of rank key_from for rank key_to. */
static int is_answered_as(int fd, int self, int caller, int key_from, int key_to) {
    unsigned char talk[TALK_BYTES];
    enum { PROOF_AT = 2 * CALL_BYTES, LAST_AT = PROOF_AT + PROOF_BYTES };
    if (!receive_all(fd, talk, CALL_BYTES)) return 0;
    write_call(talk + CALL_BYTES, 2, self, caller, talk[6], 2);
    if (!send_all(fd, talk + CALL_BYTES, CALL_BYTES) || !receive_all(fd, talk + PROOF_AT, PROOF_BYTES) ||
        !is_proof(talk, PROOF_AT, caller, self))
        return 0;
    write_proof(talk, LAST_AT, key_from, key_to);
    return send_all(fd, talk + LAST_AT, PROOF_BYTES);
}

/* Rank 0 answers and is then cut off while rank 1 still waits for rank 2. Rank 1 calls it again. */
TEST(test_caller_cut_off_after_the_answer) {
    native_group *group = native_group_make(3, 1);
    rank_run run = {.rank = 1, .world_size = 3, .shared = group};
    tagc_native *native = group->extra = native_open(&run, group);
    assert_non_null(native);
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n_bytes = sizeof own;
    int listener = socket(AF_INET, SOCK_STREAM, 0), fds[2];
    const struct timeval limit = {.tv_sec = 30};
    (void)setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit); /* of accept, too */
    assert_int_equal(bind(listener, (struct sockaddr *)&own, sizeof own), 0);
    assert_int_equal(listen(listener, 10), 0);
    getsockname(listener, (struct sockaddr *)&own, &n_bytes);
    for (int r = 0; r < 3; r += 2)
        memcpy(group->addresses[r], group->addresses[1], TAGC_NATIVE_ADDRESS_BYTES);
    memcpy(group->addresses[0] + 8, &own.sin_port, 2);
    pthread_t rank_1;
    pthread_create(&rank_1, NULL, connect_rank, &run);
    int n_called = 0;
    for (int i = 0; i < 2; i++) {
        fds[i] = accept(listener, NULL, NULL);
        n_called += fds[i] >= 0 && is_answered_as(fds[i], 0, 1, 0, 1);
        if (i == 0) reset(fds[i]);
    }
    usleep(50000);
    unsigned char talk[TALK_BYTES];
    int last = call_as(2, 1, 0, group->addresses[1], talk);
    pthread_join(rank_1, NULL);
    assert_string_equal(run.failure, "");
    assert_int_equal(n_called, 2);
    assert_true(last >= 0);
    close(fds[1]);
    close(last);
    close(listener);
    tagc_native_destroy(native);
    native_group_free(group);
}

/* Returns how many connections of this process end after so long a silence of the other end. */
static int count_with_limit(unsigned limit_ms) {
    int n = 0;
    for (int fd = 0; fd < 1024; fd++) {
        unsigned found_ms = 0;
        socklen_t n_bytes = sizeof found_ms;
        n += getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &found_ms, &n_bytes) == 0 && found_ms == limit_ms;
    }
    return n;
}

static void timed_body(rank_run *run) {
    native_group *group = run->shared;
    tagc_comm *comm = native_comm(run, group);
    pthread_barrier_wait(&group->met);
    if (run->rank == 0)
        CHECK(run, count_with_limit(34567) == 4); /* two connections, both of whose ends are here */
    pthread_barrier_wait(&group->met);
    tagc_comm_destroy(comm);
}

TEST(test_host_without_power) {
    native_group *group = native_group_make(2, 2);
    group->timeout_s = 34.567;
    run_threads(2, timed_body, group);
    native_group_free(group);
}

/* Impostors at the address of rank 0, who do not have its key. */
typedef enum impostor {
    REFLECTS, /* what it has just heard, as its own */
    PROVES_AS_CALLER,
    SAYS_HALF, /* and hangs up */
    REPEATS,   /* a proof that was right in the talk before */
    IS_SILENT,
    N_IMPOSTORS
} impostor;

typedef struct pretender {
    int listener;
    impostor kind;
    int n_calls, fd;
} pretender;

static void pretend_once(pretender *p, unsigned char *older) {
    enum { PROOF_AT = 2 * CALL_BYTES, LAST_AT = PROOF_AT + PROOF_BYTES };
    unsigned char talk[TALK_BYTES] = {0};
    int fd = p->fd;
    if (p->kind == IS_SILENT || !receive_all(fd, talk, CALL_BYTES)) return;
    if (p->kind == REFLECTS) {
        (void)send_all(fd, talk, CALL_BYTES);
        return;
    }
    write_call(talk + CALL_BYTES, 2, 0, 1, talk[6], 2);
    if (!send_all(fd, talk + CALL_BYTES, CALL_BYTES) || !receive_all(fd, talk + PROOF_AT, PROOF_BYTES))
        return;
    if (p->kind == PROVES_AS_CALLER) write_proof(talk, LAST_AT, 1, 0);
    if (p->kind == SAYS_HALF) write_proof(talk, LAST_AT, 0, 1);
    if (p->kind == REPEATS) memcpy(talk + LAST_AT, older + LAST_AT, PROOF_BYTES);
    (void)send_all(fd, talk + LAST_AT, p->kind == SAYS_HALF ? PROOF_BYTES / 2 : PROOF_BYTES);
    memcpy(older, talk, LAST_AT); /* an onlooker has the right end of it from rank 0 */
    write_proof(older, LAST_AT, 0, 1);
}

static void *pretend(void *arg) {
    pretender *p = arg;
    unsigned char older[TALK_BYTES] = {0};
    while ((p->fd = accept(p->listener, NULL, NULL)) >= 0) {
        pretend_once(p, older);
        p->n_calls++;
        char rest;
        if (p->kind == IS_SILENT || p->kind == REPEATS)
            while (recv(p->fd, &rest, 1, 0) > 0) {
            } /* rank 1 hangs up */
        close(p->fd);
    }
    return NULL;
}

static void pretend_as(impostor kind, const char *expected) {
    native_group *group = native_group_make(2, 1);
    rank_run run = {.rank = 1, .world_size = 2};
    tagc_native *native = native_open(&run, group);
    assert_non_null(native);
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n_bytes = sizeof own;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&own, sizeof own), 0);
    assert_int_equal(listen(listener, 10), 0);
    getsockname(listener, (struct sockaddr *)&own, &n_bytes);
    memcpy(group->addresses[0], group->addresses[1], TAGC_NATIVE_ADDRESS_BYTES);
    memcpy(group->addresses[0] + 8, &own.sin_port, 2);
    pthread_t thread;
    pretender p = {.listener = listener, .kind = kind};
    pthread_create(&thread, NULL, pretend, &p);
    unsigned char keys[2 * NATIVE_TEST_RANKS * TAGC_NATIVE_KEY_BYTES];
    native_keys(1, 2, keys);
    tagc_status status = tagc_native_connect(native, group->addresses, keys, 1.5);
    assert_int_equal(status, kind == IS_SILENT ? TAGC_ERR_TIMEOUT : TAGC_ERR_TRANSPORT);
    if (!has("no connection to rank 0 within 1.5 s: ") || !has(expected))
        fail_msg("%d: %s", (int)kind, tagc_last_error());
    shutdown(listener, SHUT_RDWR);
    pthread_join(thread, NULL);
    close(listener);
    tagc_native_destroy(native);
    native_group_free(group);
}

TEST(test_impostors) {
    for (int kind = 0; kind < N_IMPOSTORS; kind++)
        pretend_as((impostor)kind, kind == IS_SILENT
                                       ? "it, or another program at its address, does not answer"
                                   : kind == SAYS_HALF ? "closed the connection: keys may differ"
                                                       : "what answers at its address does not have its key");
}

/* ---- mistakes ---- */

static void expect(tagc_status found, tagc_status status, const char *text) {
    if (found != status || !has(text)) fail_msg("%s: \"%s\"", tagc_status_name(found), tagc_last_error());
}

static tagc_status open_as(const char *local, int family, int n_sockets, int rank, int world_size,
                           tagc_native **out) {
    tagc_native_options options;
    tagc_native_options_init(&options);
    options.local = local;
    options.family = family;
    options.n_sockets = n_sockets;
    return tagc_native_open(&options, rank, world_size, out);
}

TEST(test_where_it_listens) {
    tagc_native *native;
    expect(open_as("eth99,nonsense", 0, 1, 0, 2, &native), TAGC_ERR_ARGUMENT,
           "no interface eth99,nonsense with an address is up on this host; there are: ");
    assert_true(has("lo (127.0.0.1)"));
    assert_null(native);
    expect(open_as("eth99", 4, 1, 0, 2, &native), TAGC_ERR_ARGUMENT, "with an address of IPv4");
    expect(open_as("192.0.2.1", 0, 1, 0, 2, &native), TAGC_ERR_ARGUMENT,
           "no port can be opened at 192.0.2.1");
    expect(open_as("127.0.0.1", 6, 1, 0, 2, &native), TAGC_ERR_ARGUMENT, "an address of IPv4");
    static const char *const of_nobody[] = {"0.0.0.0", "::", "fe80::1"};
    for (int i = 0; i < 3; i++) {
        expect(open_as(of_nobody[i], 0, 1, 0, 2, &native), TAGC_ERR_ARGUMENT,
               "which other hosts cannot call");
        assert_true(has(of_nobody[i]));
    }
    expect(open_as(NULL, 5, 1, 0, 2, &native), TAGC_ERR_ARGUMENT, "options.family is 5");
    expect(open_as(NULL, 0, 17, 0, 2, &native), TAGC_ERR_ARGUMENT, "options.n_sockets is 17");
    expect(open_as(NULL, 0, 1, 2, 2, &native), TAGC_ERR_ARGUMENT, "rank is 2");
    expect(open_as(NULL, 0, 1, 0, 0, &native), TAGC_ERR_ARGUMENT, "world_size is 0");
    unsigned char address[TAGC_NATIVE_ADDRESS_BYTES];
    assert_int_equal(open_as("eth99,lo", 4, 1, 0, 2, &native), TAGC_OK);
    assert_int_equal(tagc_native_address(native, address), TAGC_OK);
    assert_memory_equal(address + 16, "\x7f\0\0\x01", 4);
    tagc_native_destroy(native);
    assert_int_equal(open_as(NULL, 0, 1, 0, 2, &native), TAGC_OK);
    tagc_native_destroy(native);
}

/* Of IPv6 as of IPv4, all of an address is what others call. */
TEST(test_addresses) {
    static const unsigned char hosts[][16] = {
        {10, 1, 2, 3}, {0x20, 0x01, 0x0d, 0xb8, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
    for (int i = 0; i < 2; i++) {
        tagc_native *native = calloc(1, sizeof *native);
        struct sockaddr_in *four = (struct sockaddr_in *)&native->address, *found_four;
        struct sockaddr_in6 *six = (struct sockaddr_in6 *)&native->address, *found_six;
        struct sockaddr_storage found;
        unsigned char address[TAGC_NATIVE_ADDRESS_BYTES];
        int32_t name = 0;
        native->names = &name;
        native->world_size = native->n_sockets = 1;
        if (i == 0) {
            four->sin_family = AF_INET;
            four->sin_port = htons(4321);
            memcpy(&four->sin_addr, hosts[i], 4);
        } else {
            six->sin6_family = AF_INET6;
            six->sin6_port = htons(4321);
            memcpy(&six->sin6_addr, hosts[i], 16);
        }
        assert_int_equal(tagc_native_address(native, address), TAGC_OK);
        assert_int_equal(tagc_native_read_address(native, 0, address, &found), TAGC_OK);
        found_four = (struct sockaddr_in *)&found;
        found_six = (struct sockaddr_in6 *)&found;
        assert_int_equal(found.ss_family, i == 0 ? AF_INET : AF_INET6);
        assert_int_equal(i == 0 ? found_four->sin_port : found_six->sin6_port, htons(4321));
        assert_memory_equal(i == 0 ? (void *)&found_four->sin_addr : (void *)&found_six->sin6_addr, hosts[i],
                            i == 0 ? 4 : 16);
        free(native);
    }
}

/* In a process of its own, which cannot raise its hard limit again. Returns the line of the first failure, or 0. */
static int open_with_few_files(void) {
    struct rlimit few = {.rlim_cur = 64, .rlim_max = 100}, after;
    tagc_native *native, *other;
    unsigned char addresses[2][TAGC_NATIVE_ADDRESS_BYTES], keys[4 * TAGC_NATIVE_KEY_BYTES];
    native_keys(0, 2, keys);
    if (open_as("127.0.0.1", 0, 1, 0, 2, &native) != TAGC_OK) return __LINE__;
    for (int r = 0; r < 2; r++) (void)tagc_native_address(native, addresses[r]);
    if (setrlimit(RLIMIT_NOFILE, &few) != 0) return __LINE__;
    if (open_as("127.0.0.1", 0, 1, 0, 9, &other) != TAGC_OK) return __LINE__;
    tagc_native_destroy(other);
    getrlimit(RLIMIT_NOFILE, &after);
    if (after.rlim_cur != 64) return __LINE__; /* it has enough */
    if (open_as("127.0.0.1", 0, 16, 0, 5, &other) != TAGC_OK) return __LINE__;
    tagc_native_destroy(other);
    getrlimit(RLIMIT_NOFILE, &after);
    if (after.rlim_cur <= 72 || after.rlim_cur > 100 || after.rlim_max != 100) return __LINE__;
    if (open_as("127.0.0.1", 0, 16, 0, 7, &other) != TAGC_ERR_MEMORY) return __LINE__;
    if (!has("16 connections with each of 6 other ranks take 104 files, and this process may open "))
        return __LINE__;
    while (dup(STDOUT_FILENO) >= 0) {
    }
    if (tagc_native_connect(native, addresses, keys, 0.1) != TAGC_ERR_MEMORY) return __LINE__;
    if (!has("no connection to rank 1 within 0.1 s: this rank has too many files open")) return __LINE__;
    return 0;
}

/* A rank raises its soft limit as far as its connections need it. One that may open no more files hangs up on others, and says so
 * itself. */
TEST(test_open_files) {
    int status;
    pid_t child = fork();
    if (child == 0) _exit(open_with_few_files() & 255);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

TEST(test_misuse) {
    tagc_native *native, *other;
    tagc_comm *comm;
    unsigned char addresses[2][TAGC_NATIVE_ADDRESS_BYTES], keys[4 * TAGC_NATIVE_KEY_BYTES];
    native_keys(1, 2, keys);
    assert_int_equal(open_as("127.0.0.1", 0, 1, 1, 2, &native), TAGC_OK);
    expect(tagc_comm_create_native(native, NULL, &comm), TAGC_ERR_STATE,
           "tagc_native_connect has to succeed");
    assert_null(comm);
    expect(tagc_native_connect(native, NULL, keys, 1), TAGC_ERR_ARGUMENT, "addresses is NULL");
    expect(tagc_native_connect(native, addresses, NULL, 1), TAGC_ERR_ARGUMENT, "keys is NULL");
    expect(tagc_native_connect(native, addresses, keys, 0), TAGC_ERR_ARGUMENT, "timeout_s is 0");
    assert_int_equal(tagc_native_address(native, addresses[1]), TAGC_OK);
    memset(addresses[0], 0, sizeof addresses[0]);
    expect(tagc_native_connect(native, addresses, keys, 1), TAGC_ERR_ARGUMENT, "the address of rank 0");
    memcpy(addresses[0], addresses[1], sizeof addresses[0]);
    addresses[0][4] = 9;
    expect(tagc_native_connect(native, addresses, keys, 1), TAGC_ERR_MISMATCH, "rank 0 speaks version 9");
    addresses[0][4] = 2;
    addresses[0][5] = 6;
    expect(tagc_native_connect(native, addresses, keys, 1), TAGC_ERR_MISMATCH,
           "rank 0 listens on an address of IPv6");
    assert_int_equal(open_as("127.0.0.1", 0, 2, 0, 2, &other), TAGC_OK);
    assert_int_equal(tagc_native_address(other, addresses[0]), TAGC_OK);
    expect(tagc_native_connect(native, addresses, keys, 1), TAGC_ERR_MISMATCH,
           "options.n_sockets is 2 on rank 0");
    addresses[0][6] = 1;
    tagc_native_destroy(other); /* nobody listens there any more */
    expect(tagc_native_connect(native, addresses, keys, 0.1), TAGC_ERR_TRANSPORT,
           "no connection to rank 0 within 0.1 s: connection refused");
    expect(tagc_native_connect(native, addresses, keys, 1), TAGC_ERR_STATE, "its port is closed");
    tagc_native_destroy(native);
    tagc_native_destroy(NULL);

    tagc_comm *second;
    assert_int_equal(open_as("127.0.0.1", 0, 1, 0, 1, &native), TAGC_OK);
    assert_int_equal(tagc_native_address(native, addresses[0]), TAGC_OK);
    assert_int_equal(tagc_native_connect(native, addresses, keys, 60), TAGC_OK);
    assert_int_equal(tagc_comm_create_native(native, NULL, &comm), TAGC_OK);
    expect(tagc_comm_create_native(native, NULL, &second), TAGC_ERR_STATE, "already has a comm");
    assert_null(second); /* or both would free the connections */
    tagc_comm_destroy(comm);
}
