/* Links with latency, for kernels without netem. A wire joins two TAP devices, each in a network namespace of its own:
 * every frame that leaves one device enters the other, d after this program read it. Order is kept. The rate is not this
 * program's business: a shaper on the device (tbf) sets it.
 *
 *   tagc-lab-latency --one-way-us 10000 --queue-bytes 20000000 ns1:eth0=ns2:eth0 [...]
 *
 * makes the devices in the namespaces /run/netns/ns1 and so on, prints "ready", and forwards until SIGTERM or SIGINT.
 * Then it prints what it did as one line of JSON. When it ends, the devices go with it. Devices hand over large TCP
 * segments uncut (TSO, with a virtio header before each frame), which is what lets two cores carry 1 Gbit/s.
 *
 * Frames are lost only when a queue is full: of --queue-bytes per direction, or of the device (txqueuelen), which counts
 * them as dropped. The first are counted here as "dropped_frames". */
#include "delay_line.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_WIRES = 64,
    MAX_FRAME = 68 << 10, /* 64 KiB of a large segment, Ethernet's and virtio's headers */
    TURN_FRAMES = 32,     /* read from one device before the next one's turn */
    NAME_BYTES = 64,
    LATE_NS = 200000
};

typedef struct counters {
    uint64_t n_frames, n_bytes;    /* forwarded */
    uint64_t n_dropped;            /* the queue was full */
    uint64_t n_refused;            /* the device did not take them: it is down */
    uint64_t n_late, most_late_ns; /* sent more than LATE_NS after they were due */
    size_t n_most_queued;          /* bytes, of the fullest queue */
} counters;

typedef struct direction {
    int from, to; /* devices */
    delay_line line;
} direction;

static volatile sig_atomic_t is_ended;

static void end(int number) {
    (void)number;
    is_ended = 1;
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- words ---- */

static int refuse(const char *name, const char *value, const char *allowed) {
    fprintf(stderr, "tagc-lab-latency: %s is \"%.80s\", allowed: %s\n", name, value, allowed);
    return -1;
}

static int read_number(const char *name, const char *text, long long least, long long most, long long *out) {
    char *end_of, allowed[96];
    errno = 0;
    *out = strtoll(text, &end_of, 10);
    if (text[0] >= '0' && text[0] <= '9' && !*end_of && !errno && *out >= least && *out <= most) return 0;
    snprintf(allowed, sizeof allowed, "a whole number from %lld to %lld", least, most);
    return refuse(name, text, allowed);
}

typedef struct device_name {
    char space[NAME_BYTES], device[IFNAMSIZ];
} device_name;

static int is_name(const char *text, size_t n, size_t most) {
    if (n == 0 || n >= most || text[0] == '.') return 0;
    for (size_t i = 0; i < n; i++)
        if (text[i] == '/' || text[i] == ':' || text[i] == '=' || text[i] <= ' ') return 0;
    return 1;
}

/* NAMESPACE:DEVICE=NAMESPACE:DEVICE */
static int read_wire(const char *text, device_name ends[2]) {
    static const char allowed[] = "NAMESPACE:DEVICE=NAMESPACE:DEVICE, devices of at most 15 letters";
    const char *part = text;
    for (int i = 0; i < 2; i++) {
        const char *stop = i == 0 ? strchr(part, '=') : part + strlen(part);
        const char *colon = strchr(part, ':');
        if (!stop || !colon || colon > stop) return refuse("a wire", text, allowed);
        size_t n_space = (size_t)(colon - part), n_device = (size_t)(stop - colon - 1);
        if (!is_name(part, n_space, NAME_BYTES) || !is_name(colon + 1, n_device, IFNAMSIZ))
            return refuse("a wire", text, allowed);
        snprintf(ends[i].space, NAME_BYTES, "%.*s", (int)n_space, part);
        snprintf(ends[i].device, IFNAMSIZ, "%.*s", (int)n_device, colon + 1);
        part = stop + 1;
    }
    return 0;
}

/* ---- devices ---- */

static int fail(const device_name *name, const char *what) {
    fprintf(stderr, "tagc-lab-latency: %s:%s: %s: %s\n", name->space, name->device, what, strerror(errno));
    return -1;
}

/* A TAP in that namespace, in which this thread then is; the descriptor, or -1. */
static int open_device(const device_name *name) {
    char path[NAME_BYTES + 16];
    snprintf(path, sizeof path, "/run/netns/%s", name->space);
    int space = open(path, O_RDONLY | O_CLOEXEC);
    if (space < 0) return fail(name, "there is no such network namespace");
    int failed = setns(space, CLONE_NEWNET);
    close(space);
    if (failed) return fail(name, "the namespace cannot be entered, which takes CAP_SYS_ADMIN");
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (device < 0) return fail(name, "/dev/net/tun");
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    memcpy(request.ifr_name, name->device, IFNAMSIZ);
    const char *failing = NULL;
    if (ioctl(device, TUNSETIFF, &request) != 0)
        failing = "no TAP device can be made, which takes CAP_NET_ADMIN";
    else if (ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN) != 0)
        failing = "the TAP device takes no large segments";
    if (!failing) return device;
    (void)fail(name, failing);
    close(device);
    return -1;
}

/* ---- forwarding ---- */

/* Sends what is due. */
static void send_due(direction *d, counters *c) {
    for (const delay_frame *frame; (frame = delay_line_front(&d->line)) != NULL; delay_line_pop(&d->line)) {
        uint64_t now = now_ns();
        if (frame->due_ns > now) return;
        uint64_t late = now - frame->due_ns;
        c->n_late += late > LATE_NS;
        if (late > c->most_late_ns) c->most_late_ns = late;
        ssize_t n = write(d->to, frame->bytes, (size_t)frame->n_bytes);
        c->n_refused += n < 0;
        c->n_frames += n >= 0;
        c->n_bytes += n >= 0 ? (uint64_t)n : 0;
    }
}

/* Takes in what has come. 1 when there may be more. */
static int take_in(direction *d, uint64_t delay_ns, counters *c) {
    static unsigned char nowhere[MAX_FRAME];
    for (int i = 0; i < TURN_FRAMES; i++) {
        void *space = delay_line_reserve(&d->line, MAX_FRAME);
        ssize_t n = read(d->from, space ? space : nowhere, MAX_FRAME);
        if (n <= 0) return 0;
        if (space)
            delay_line_commit(&d->line, (size_t)n, now_ns() + delay_ns);
        else
            c->n_dropped++;
    }
    return 1;
}

/* Until a signal. `signals` are let through only while it sleeps. */
static void forward(direction *directions, int n, uint64_t delay_ns, const sigset_t *signals, counters *c) {
    struct pollfd waits[2 * MAX_WIRES];
    for (int i = 0; i < n; i++) waits[i] = (struct pollfd){.fd = directions[i].from, .events = POLLIN};
    while (!is_ended) {
        int has_more = 0;
        uint64_t next_ns = UINT64_MAX;
        for (int i = 0; i < n; i++) {
            send_due(&directions[i], c);
            has_more |= take_in(&directions[i], delay_ns, c);
        }
        for (int i = 0; i < n; i++) {
            const delay_frame *frame = delay_line_front(&directions[i].line);
            if (frame && frame->due_ns < next_ns) next_ns = frame->due_ns;
        }
        uint64_t now = now_ns(), wait_ns = has_more || next_ns <= now ? 0 : next_ns - now;
        struct timespec wait = {.tv_sec = (time_t)(wait_ns / 1000000000u),
                                .tv_nsec = (long)(wait_ns % 1000000000u)};
        (void)ppoll(waits, (nfds_t)n, next_ns == UINT64_MAX && !has_more ? NULL : &wait, signals);
    }
    for (int i = 0; i < n; i++)
        if (directions[i].line.n_most_used > c->n_most_queued)
            c->n_most_queued = directions[i].line.n_most_used;
}

/* ---- the program ---- */

typedef struct request {
    long long one_way_us, queue_bytes;
    device_name ends[2 * MAX_WIRES];
    int n_wires;
} request;

static int read_request(int argc, char **argv, request *r) {
    static const struct option options[] = {
        {"one-way-us", required_argument, NULL, 'l'}, {"queue-bytes", required_argument, NULL, 'q'}, {0}};
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == 'l' && read_number("--one-way-us", optarg, 1, 10000000, &r->one_way_us) != 0) return -1;
        if (option == 'q' && read_number("--queue-bytes", optarg, 1, 4294967296, &r->queue_bytes) != 0)
            return -1;
        if (option == '?') return -1;
    }
    r->n_wires = argc - optind;
    if (r->one_way_us == 0 || r->queue_bytes == 0 || r->n_wires < 1 || r->n_wires > MAX_WIRES) {
        fprintf(
            stderr,
            "usage: tagc-lab-latency --one-way-us N --queue-bytes N NAMESPACE:DEVICE=NAMESPACE:DEVICE...\n"
            "1 to %d wires; lab/README.md says what for\n",
            MAX_WIRES);
        return -1;
    }
    for (int i = 0; i < r->n_wires; i++)
        if (read_wire(argv[optind + i], &r->ends[2 * i]) != 0) return -1;
    return 0;
}

static int open_wires(const request *r, direction *directions) {
    for (int i = 0; i < 2 * r->n_wires; i++) {
        int device = open_device(&r->ends[i]);
        if (device < 0) return -1;
        directions[i].from = directions[i ^ 1].to = device;
        if (delay_line_create(&directions[i].line, (size_t)r->queue_bytes, MAX_FRAME) == 0) continue;
        fprintf(stderr, "tagc-lab-latency: no memory for --queue-bytes %lld\n", r->queue_bytes);
        return -1;
    }
    return 0;
}

/* Runs before everything else on the processor, so that a frame leaves when it is due. Without the right to it,
 * frames are late when the machine is busy, and the report shows that. */
static int go_first(void) {
    struct sched_param first = {.sched_priority = 1};
    (void)prctl(PR_SET_TIMERSLACK, 1UL);
    if (sched_setscheduler(0, SCHED_FIFO, &first) == 0) return 1;
    return setpriority(PRIO_PROCESS, 0, -20) == 0;
}

int main(int argc, char **argv) {
    static direction directions[2 * MAX_WIRES];
    request r = {0};
    counters c = {0};
    sigset_t held, before;
    struct sigaction action = {.sa_handler = end};
    if (read_request(argc, argv, &r) != 0) return 2;
    sigemptyset(&held);
    sigaddset(&held, SIGTERM);
    sigaddset(&held, SIGINT);
    sigprocmask(SIG_BLOCK, &held, &before);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    (void)prctl(PR_SET_PDEATHSIG, SIGTERM); /* a lab that is killed takes its links along */
    if (open_wires(&r, directions) != 0) return 1;
    int is_first = go_first();
    puts("ready");
    fflush(stdout);
    forward(directions, 2 * r.n_wires, 1000u * (uint64_t)r.one_way_us, &before, &c);
    printf("{\"frames\": %llu, \"bytes\": %llu, \"dropped_frames\": %llu, \"refused_frames\": %llu, "
           "\"late_frames\": %llu, \"most_late_us\": %.1f, \"most_queued_bytes\": %zu, \"goes_first\": %s}\n",
           (unsigned long long)c.n_frames, (unsigned long long)c.n_bytes, (unsigned long long)c.n_dropped,
           (unsigned long long)c.n_refused, (unsigned long long)c.n_late, 1e-3 * (double)c.most_late_ns,
           c.n_most_queued, is_first ? "true" : "false");
    for (int i = 0; i < 2 * r.n_wires; i++) delay_line_destroy(&directions[i].line);
    return 0;
}
