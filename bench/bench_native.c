/* How much two ranks send each other by the native transport, both ways at the same time, and what that costs their processors; beside
 * it plain sockets of the kernel with as many threads, which are the limit. Over loopback, each rank a process. bench/native_limit.sh puts
 * iperf3 beside both.
 *
 *   bench_native [--threads N[,N...]] [--sockets N] [--megabytes N] [--repeats N] [--local INTERFACE]
 *
 * threads: of each rank (1,2,4). sockets: between them (4). megabytes: of a transfer (64). local: an interface or address of this host
 * (127.0.0.1). Each row: Gbit/s of one direction, the median, and the processor's seconds of a rank for each GB that it sends and
 * receives. */
#include "measure.h"
#include "tagc/native.h"
#include "transport/comm.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_THREADS = 8, MAX_REPEATS = 200, N_RANKS = 2, PIECE = 256 << 10 };

typedef struct setting {
    int n_threads[MAX_THREADS], n_rows, n_sockets, n_repeats;
    size_t n_bytes;
    const char *local;
} setting;

/* In memory that both processes have. */
typedef struct shared {
    pthread_barrier_t met;
    unsigned char addresses[N_RANKS][TAGC_NATIVE_ADDRESS_BYTES];
    int port;
    double cpu_s[N_RANKS], samples_s[MAX_REPEATS];
} shared;

_Noreturn static void fail(const char *what) {
    fprintf(stderr, "bench_native: %s: %s\n", what, tagc_last_error());
    exit(1);
}

static double cpu_s(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

/* ---- tagc ---- */

static tagc_comm *open_comm(const setting *set, shared *s, int rank, int n_threads) {
    static const unsigned char keys[N_RANKS * 2 * TAGC_NATIVE_KEY_BYTES];
    tagc_native_options options;
    tagc_native *native;
    tagc_comm *comm;
    tagc_native_options_init(&options);
    options.local = set->local;
    options.n_sockets = set->n_sockets;
    options.n_threads = (uint64_t)n_threads;
    if (tagc_native_open(&options, rank, N_RANKS, &native) != TAGC_OK) fail("a port");
    tagc_native_address(native, s->addresses[rank]);
    pthread_barrier_wait(&s->met);
    if (tagc_native_connect(native, s->addresses, keys, 30) != TAGC_OK) fail("connecting");
    if (tagc_comm_create_native(native, NULL, &comm) != TAGC_OK) fail("a comm");
    return comm;
}

static void by_tagc(const setting *set, shared *s, int rank, int n_threads) {
    char *send = take(set->n_bytes, 1, "bytes"), *recv = take(set->n_bytes, 1, "bytes");
    tagc_comm *comm = open_comm(set, s, rank, n_threads);
    double before = 0;
    for (int i = -2; i < set->n_repeats; i++) {
        tagc_part part = {!rank, set->n_bytes, 0};
        tagc_ticket ticket = {.transfer = {.n_sends = 1,
                                           .n_receives = 1,
                                           .sends = &part,
                                           .receives = &part,
                                           .send = send,
                                           .recv = recv},
                              .leg = TAGC_LEG_VALUES};
        pthread_barrier_wait(&s->met);
        if (i == 0) before = cpu_s();
        double begin = tagc_clock_s();
        tagc_comm_post(comm, TAGC_LANE_REDUCE, &ticket);
        if (tagc_comm_wait(comm, &ticket) != TAGC_OK) fail("a transfer");
        if (rank == 0 && i >= 0) s->samples_s[i] = tagc_clock_s() - begin;
    }
    s->cpu_s[rank] = cpu_s() - before;
    pthread_barrier_wait(&s->met);
    tagc_comm_destroy(comm);
}

/* ---- sockets alone ---- */

typedef struct pump {
    int fd, is_send, n_repeats;
    char *bytes;
    size_t n_bytes;
} pump;

static void *pump_main(void *arg) {
    pump *p = arg;
    for (int i = 0; i < p->n_repeats; i++)
        for (size_t at = 0, n; at < p->n_bytes; at += n) {
            size_t most = p->n_bytes - at < PIECE ? p->n_bytes - at : PIECE;
            ssize_t moved = p->is_send ? send(p->fd, p->bytes + at, most, MSG_NOSIGNAL)
                                       : recv(p->fd, p->bytes + at, most, 0);
            if (moved <= 0) exit(1);
            n = (size_t)moved;
        }
    return NULL;
}

static int dial_or_accept(shared *s, int rank, int listener) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = (in_port_t)s->port};
    int on = 1, fd;
    inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
    if (rank == 0) {
        fd = accept(listener, NULL, NULL);
    } else {
        fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&to, sizeof to) != 0) exit(1);
    }
    if (fd < 0) exit(1);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

/* Each of n_threads connections has a thread for each direction. */
static void by_sockets(const setting *set, shared *s, int rank, int n_threads) {
    pump pumps[2 * MAX_THREADS];
    pthread_t threads[2 * MAX_THREADS];
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t n_bytes = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    inet_pton(AF_INET, "127.0.0.1", &at.sin_addr);
    if (rank == 0 && (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, MAX_THREADS) ||
                      getsockname(listener, (struct sockaddr *)&at, &n_bytes)))
        exit(1);
    if (rank == 0) s->port = at.sin_port;
    pthread_barrier_wait(&s->met);
    for (int t = 0; t < 2 * n_threads; t += 2) {
        int fd = dial_or_accept(s, rank, listener);
        for (int d = 0; d < 2; d++)
            pumps[t + d] = (pump){.fd = fd,
                                  .is_send = d,
                                  .n_repeats = set->n_repeats,
                                  .n_bytes = set->n_bytes / (size_t)n_threads,
                                  .bytes = take(set->n_bytes / (size_t)n_threads, 1, "bytes")};
    }
    pthread_barrier_wait(&s->met);
    double before = cpu_s(), begin = tagc_clock_s();
    for (int t = 0; t < 2 * n_threads; t++)
        if (pthread_create(&threads[t], NULL, pump_main, &pumps[t])) exit(1);
    for (int t = 0; t < 2 * n_threads; t++) pthread_join(threads[t], NULL);
    if (rank == 0) s->samples_s[0] = (tagc_clock_s() - begin) / set->n_repeats;
    s->cpu_s[rank] = cpu_s() - before;
    for (int t = 0; t < 2 * n_threads; t += 2) close(pumps[t].fd);
    close(listener);
}

/* ---- rows ---- */

static void measure(const setting *set, shared *s, const char *name, int n_threads, int n_samples,
                    void (*run)(const setting *, shared *, int, int)) {
    fflush(stdout);
    for (int rank = 0; rank < N_RANKS; rank++)
        if (fork() == 0) {
            run(set, s, rank, n_threads);
            _exit(0);
        }
    for (int rank = 0, status; rank < N_RANKS; rank++)
        if (wait(&status) < 0 || status) exit(1);
    spread found = spread_of(s->samples_s, n_samples);
    double gigabytes = 1e-9 * (double)set->n_bytes;
    printf("%-14s %7d %12.1f %20.2f\n", name, n_threads, 8 * gigabytes / found.median,
           (s->cpu_s[0] + s->cpu_s[1]) / 2 / (gigabytes * set->n_repeats));
}

static void read_threads(setting *set, char *text) {
    set->n_rows = 0;
    for (char *one = strtok(text, ","); one && set->n_rows < MAX_THREADS; one = strtok(NULL, ","))
        set->n_threads[set->n_rows++] = (int)number("--threads", one, 1, MAX_THREADS);
}

int main(int argc, char **argv) {
    setting set = {.n_threads = {1, 2, 4},
                   .n_rows = 3,
                   .n_sockets = 4,
                   .n_repeats = 20,
                   .n_bytes = 64 << 20,
                   .local = "127.0.0.1"};
    for (int i = 1; i < argc; i += 2) {
        char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (value && !strcmp(name, "--threads"))
            read_threads(&set, value);
        else if (value && !strcmp(name, "--sockets"))
            set.n_sockets = (int)number(name, value, 1, 16);
        else if (value && !strcmp(name, "--megabytes"))
            set.n_bytes = number(name, value, 1, 1024) << 20;
        else if (value && !strcmp(name, "--repeats"))
            set.n_repeats = (int)number(name, value, 1, MAX_REPEATS);
        else if (value && !strcmp(name, "--local"))
            set.local = value;
        else
            refuse(name, value ? value : "without a value", "an option of the opening of bench_native.c");
    }
    shared *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (s == MAP_FAILED) return 1;
    pthread_barrierattr_t of_processes;
    pthread_barrierattr_init(&of_processes);
    pthread_barrierattr_setpshared(&of_processes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&s->met, &of_processes, N_RANKS);
    printf("two ranks over %s, %zu MB each way at the same time, %d connections, %ld cores\n", set.local,
           set.n_bytes >> 20, set.n_sockets, sysconf(_SC_NPROCESSORS_ONLN));
    printf("%-14s %7s %12s %20s\n", "", "threads", "Gbit/s", "CPU seconds per GB");
    for (int i = 0; i < set.n_rows; i++) {
        measure(&set, s, "sockets alone", set.n_threads[i], 1, by_sockets);
        measure(&set, s, "tagc", set.n_threads[i], set.n_repeats, by_tagc);
    }
    return 0;
}
