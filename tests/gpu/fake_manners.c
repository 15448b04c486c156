/* The fake runtime's bad manners, each of which a driver may have, and how calls wait. A call that waits long on a device that
 * cannot go on by itself gives up, says who waits for whom, and is a mistake: a test of a protocol that hangs ends, and shows why. */
#include "fake_private.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- who waits for whom ---- */

static int connection_of(const stream *one) {
    return fake.manners.n_connections ? one->number % fake.manners.n_connections : one->number;
}

/* The first work that the connection has not begun. A host function under way keeps it busy, a copy does not. */
static const op *next_of(const stream *one) {
    const op *work = one->first;
    return work && work->has_started ? work->next : work;
}

/* The stream whose work is ahead of this one's in the same connection. NULL: none. */
static const stream *ahead_of(const stream *one) {
    if (!fake.manners.n_connections || !one->first || one->first->has_started) return NULL;
    for (int i = 0; i <= fake.n_streams; i++) {
        const stream *other = i < fake.n_streams ? &fake.streams[i] : &fake.devices[one->device].standard;
        if (other == one || other->device != one->device || connection_of(other) != connection_of(one))
            continue;
        const op *work = next_of(other);
        if (work && work->order < one->first->order) return other;
    }
    return NULL;
}

int is_its_turn(const stream *one) {
    return !ahead_of(one);
}

int fake_n_held_up(void) {
    int n = 0;
    pthread_mutex_lock(&fake.lock);
    for (int i = 0; i < fake.n_streams; i++) {
        const stream *ahead = fake.streams[i].is_live ? ahead_of(&fake.streams[i]) : NULL;
        while (ahead && ahead_of(ahead)) ahead = ahead_of(ahead);
        n += ahead && ahead->first->kind == WAIT_FLAG;
    }
    pthread_mutex_unlock(&fake.lock);
    return n;
}

static void say(const char *text) {
    size_t n = strlen(fake.report);
    snprintf(fake.report + n, sizeof fake.report - n, "%s\n", text);
}

static void say_of(const stream *one) {
    char text[200];
    const op *work = one->first;
    const stream *ahead = ahead_of(one);
    int n = snprintf(text, sizeof text, "  device %d, stream %d: ", one->device, one->number);
    char *to = text + n;
    size_t room = sizeof text - (size_t)n;
    if (ahead)
        snprintf(to, room, "behind stream %d in connection %d", ahead->number, connection_of(one));
    else if (!work)
        snprintf(to, room, "a flag that it wrote is not seen yet");
    else if (work->kind == WAIT_FLAG)
        snprintf(to, room, "waits for a flag to be %s%u; it is %u", work->is_equal ? "" : "at least ",
                 work->value, *(const uint32_t *)(const void *)work->to);
    else if (work->kind == WAIT)
        snprintf(to, room, "waits for an event of another stream");
    else if (work->kind == HOST_FUNCTION)
        snprintf(to, room, one->is_busy ? "in a host function" : "before a host function");
    else
        snprintf(to, room, "could go on");
    say(text);
}

static void report(void) {
    char text[200];
    if (fake.report[0]) return; /* the first is what is to be mended */
    say("A call waits for ever:");
    for (int i = 0; i < MAX_WAITS; i++) {
        const waiting *one = &fake.waits[i];
        if (!one->function) continue;
        snprintf(text, sizeof text, "  device %d: cuda%s waits %s", one->device, one->function, one->what);
        say(text);
    }
    for (int d = 0; d < fake.n_devices; d++)
        if (!is_over(&fake.devices[d].standard)) say_of(&fake.devices[d].standard);
    for (int i = 0; i < fake.n_streams; i++)
        if (!is_over(&fake.streams[i])) say_of(&fake.streams[i]);
    fputs(fake.report, stderr);
}

/* ---- waiting ---- */

static struct timespec limit(void) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_nsec += fake.limit_ms % 1000 * 1000000L;
    end.tv_sec += fake.limit_ms / 1000 + end.tv_nsec / 1000000000;
    end.tv_nsec %= 1000000000;
    return end;
}

static waiting *note_wait(device *on, const char *function, const char *what) {
    for (int i = 0; i < MAX_WAITS; i++)
        if (!fake.waits[i].function) {
            fake.waits[i] = (waiting){function, what, on->number};
            return &fake.waits[i];
        }
    abort();
}

int wait_until(device *on, const char *function, const char *what, int holds, int (*is_true)(const void *of),
               const void *of) {
    if (is_true(of) || on->broken) return on->broken;
    waiting *noted = note_wait(on, function, what);
    struct timespec end = limit();
    int code = OK;
    if (holds) {
        on->is_held = 1;
        on->holder = pthread_self();
    }
    on->n_demands++;
    pthread_cond_broadcast(&fake.changed);
    while (!is_true(of) && !on->broken && code == OK) {
        if (pthread_cond_timedwait(&fake.changed, &fake.lock, &end) != ETIMEDOUT || is_true(of)) continue;
        if (is_moving(on))
            end = limit(); /* a busy machine, and no dead end */
        else
            code = GAVE_UP;
    }
    if (code) {
        char text[MISTAKE_BYTES];
        report();
        snprintf(text, sizeof text, "cuda%s waited for ever %s", function, what);
        mistake(text);
    }
    on->n_demands--;
    if (holds) on->is_held = 0;
    noted->function = NULL;
    pthread_cond_broadcast(&fake.changed);
    return code ? code : on->broken;
}

static int is_free(const void *of) {
    const device *on = of;
    return !on->is_held || pthread_equal(on->holder, pthread_self());
}

int enter(const char *function) {
    pthread_mutex_lock(&fake.lock);
    device *on = &fake.devices[current_device];
    if (in_host_function) mistake("a call of the runtime from a host function");
    for (int i = 0; i < MAX_FAILURES; i++) {
        failure *one = &fake.failures[i];
        if (!strcmp(one->function, function) && --one->n == 0) {
            one->function[0] = 0;
            return one->code;
        }
    }
    if (strcmp(function, "GetDeviceCount") != 0 && strcmp(function, "GetDriverEntryPointByVersion") != 0)
        fake.contexts |= 1u << current_device, current_context = on;
    return wait_until(on, function, "for a call that keeps it out of the driver", 0, is_free, on);
}

int leave(int code) {
    pthread_cond_broadcast(&fake.changed);
    pthread_mutex_unlock(&fake.lock);
    return code;
}

static int is_device_idle(const void *of) {
    return is_idle(of);
}

int wait_for_idle(const char *function, int if_so) {
    if (!if_so) return OK;
    fake.n_waited += !is_idle(here());
    return wait_until(here(), function, "until the device is idle", 1, is_device_idle, here());
}

int load(void (*kernel)(void *)) {
    if (!fake.manners.lazy_loading) return OK;
    for (int i = 0; i < fake.n_kernels; i++)
        if (fake.kernels[i] == kernel) return OK;
    if (fake.n_kernels < MAX_KERNELS) fake.kernels[fake.n_kernels++] = kernel;
    return wait_for_idle("LaunchKernel", 1);
}

static int has_room(const void *of) {
    const stream *in = of;
    int n = fake.devices[in->device].standard.n_ops;
    if (!fake.manners.depth) return 1;
    if (connection_of(&fake.devices[in->device].standard) != connection_of(in)) n = 0;
    for (int i = 0; i < fake.n_streams; i++)
        if (fake.streams[i].device == in->device && connection_of(&fake.streams[i]) == connection_of(in))
            n += fake.streams[i].n_ops;
    return n < fake.manners.depth;
}

int wait_for_room(const stream *in, const char *function) {
    return wait_until(&fake.devices[in->device], function, "for room in a full launch queue", 1, has_room,
                      in);
}

/* ---- which manners ---- */

static void refuse(const char *words) {
    fprintf(stderr,
            "fake runtime: manners are \"%s\", must be of blocking-alloc, lazy-loading, late-flags, "
            "launch-blocking, copy-blocking, connections=1 to 32, "
            "depth=1 or more, all; with commas between them\n",
            words);
    abort();
}

static manners parse(const char *words) {
    manners out = {0};
    while (*words) {
        size_t n = strcspn(words, ",");
        int number = 0, end = 0;
        if (n == strlen("all") && !strncmp(words, "all", n))
            out = (manners){
                .blocking_alloc = 1, .lazy_loading = 1, .late_flags = 1, .n_connections = 1, .depth = 8};
        else if (n == strlen("blocking-alloc") && !strncmp(words, "blocking-alloc", n))
            out.blocking_alloc = 1;
        else if (n == strlen("lazy-loading") && !strncmp(words, "lazy-loading", n))
            out.lazy_loading = 1;
        else if (n == strlen("late-flags") && !strncmp(words, "late-flags", n))
            out.late_flags = 1;
        else if (n == strlen("launch-blocking") && !strncmp(words, "launch-blocking", n))
            out.launch_blocking = 1;
        else if (n == strlen("copy-blocking") && !strncmp(words, "copy-blocking", n))
            out.copy_blocking = 1;
        else if (sscanf(words, "connections=%d%n", &number, &end) == 1 && (size_t)end == n && number >= 1 &&
                 number <= 32)
            out.n_connections = number;
        else if (sscanf(words, "depth=%d%n", &number, &end) == 1 && (size_t)end == n && number >= 1)
            out.depth = number;
        else
            refuse(words);
        words += n + (words[n] == ',');
    }
    return out;
}

void fake_behave(const char *words) {
    manners parsed = parse(words);
    pthread_mutex_lock(&fake.lock);
    fake.manners = parsed;
    pthread_mutex_unlock(&fake.lock);
}

void fake_limit(int ms) {
    pthread_mutex_lock(&fake.lock);
    fake.limit_ms = ms;
    pthread_mutex_unlock(&fake.lock);
}

int fake_n_waiting(void) {
    int n = 0;
    pthread_mutex_lock(&fake.lock);
    for (int i = 0; i < MAX_WAITS; i++) n += fake.waits[i].function != NULL;
    pthread_mutex_unlock(&fake.lock);
    return n;
}

int fake_n_waited(void) {
    return fake.n_waited;
}

const char *fake_report(void) {
    return fake.report;
}

void behave_as_told(void) {
    const char *words = getenv("FAKE_MANNERS"), *blocking = getenv("CUDA_LAUNCH_BLOCKING"),
               *connections = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    fake.manners = parse(words ? words : "");
    if (connections && !fake.manners.n_connections) {
        char text[40];
        snprintf(text, sizeof text, "connections=%s", connections);
        fake.manners.n_connections = parse(text).n_connections;
    }
    if (blocking && *blocking == '1') fake.manners.launch_blocking = 1;
    fake.limit_ms = LIMIT_MS;
    fake.report[0] = 0;
    fake.n_kernels = fake.n_waited = 0;
    memset(fake.waits, 0, sizeof fake.waits);
}
