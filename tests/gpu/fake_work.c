/* Work of the fake runtime: a thread per device runs it step by step, in an order that the seed chooses, and other threads call its
 * host functions. */
#include "fake_private.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { POLL_NS = 100000 }; /* between two looks at flags that the host may write */

/* ---- running; all with the lock ---- */

uint64_t draw(device *on) {
    on->random ^= on->random << 13;
    on->random ^= on->random >> 7;
    on->random ^= on->random << 17;
    return on->random;
}

static void pop(stream *from) {
    op *done = from->first;
    from->first = done->next;
    from->n_ops--;
    if (!from->first) from->last = &from->first;
    free(done);
}

/* A copy begins (1) or ends (-1): meanwhile the host must not touch the pages that it reads or writes. */
static void touch(const op *copy, int n) {
    const char *host = copy->copy_kind == TO_HOST ? copy->to : copy->from;
    block *pinned = block_of(host);
    if (!pinned || !pinned->n_copies || copy->n_bytes == 0) return;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), at = (size_t)(host - pinned->user);
    for (size_t i = at / page; i <= (at + copy->n_bytes - 1) / page && i * page < pinned->n_mapped; i++) {
        pinned->n_copies[i] += n;
        if (!pinned->is_freed)
            mprotect(pinned->user + i * page, page, pinned->n_copies[i] ? PROT_NONE : PROT_READ | PROT_WRITE);
    }
}

static void start_copy(op *work) {
    work->has_started = 1;
    touch(work, 1);
    if (work->copy_kind == TO_HOST) {
        char *to = seen(work->to, work->n_bytes, 1);
        if (to) memset(to, 0xa5, work->n_bytes); /* who reads now reads this */
    }
}

static void end_copy(op *work) {
    char *to = seen(work->to, work->n_bytes, work->copy_kind == TO_HOST);
    char *from = seen(work->from, work->n_bytes, work->copy_kind == TO_DEVICE);
    touch(work, -1);
    if (to && from) memcpy(to, from, work->n_bytes);
}

static int is_seen(const op *wait) {
    uint32_t now = __atomic_load_n((const uint32_t *)(const void *)wait->to, __ATOMIC_ACQUIRE);
    return wait->is_equal ? now == wait->value : (int32_t)(now - wait->value) >= 0;
}

static int can_run(const device *on, const stream *one) {
    const op *work = one->first;
    if (!work || one->is_busy || !is_its_turn(one)) return 0;
    if (work->kind == WAIT) return work->event->is_done[work->record];
    if (work->kind == WAIT_FLAG) return is_seen(work);
    if (work->kind == RECORD) return !one->written; /* who sees the event sees the flags before it */
    if (work->kind == HOST_FUNCTION) return !fake.one_host_thread || on->n_running == 0;
    return 1;
}

static int streams_that_can(device *on, stream **found) {
    int n = 0;
    if (can_run(on, &on->standard)) found[n++] = &on->standard;
    for (int i = 0; i < fake.n_streams; i++)
        if (fake.streams[i].device == on->number && can_run(on, &fake.streams[i]))
            found[n++] = &fake.streams[i];
    return n;
}

int is_over(const stream *one) {
    return !one->first && !one->written;
}

static int is_polling(const stream *one) {
    return one->first && one->first->kind == WAIT_FLAG;
}

/* Of that device's streams, number i. NULL: of another device. */
static stream *stream_number(device *on, int i) {
    if (i == fake.n_streams) return &on->standard;
    return fake.streams[i].device == on->number ? &fake.streams[i] : NULL;
}

int is_idle(const device *on) {
    for (int i = 0; i <= fake.n_streams; i++) {
        const stream *one = stream_number(&fake.devices[on->number], i);
        if (one && !is_over(one)) return 0;
    }
    return 1;
}

/* ---- flags ---- */

/* Another stream's flags, and this stream's other work, may get ahead of it. */
static void post(stream *by, uint32_t *at, uint32_t value) {
    posted **last = &by->written, *one = malloc(sizeof *one);
    *one = (posted){NULL, at, value};
    while (*last) last = &(*last)->next;
    *last = one;
}

static void show(stream *by) {
    posted *one = by->written;
    __atomic_store_n(one->at, one->value, __ATOMIC_RELEASE);
    by->written = one->next;
    free(one);
}

static int streams_that_wrote(device *on, stream **found) {
    int n = 0;
    for (int i = 0; i <= fake.n_streams; i++) {
        stream *one = stream_number(on, i);
        if (one && one->written) found[n++] = one;
    }
    return n;
}

/* Returns whether anything can happen on the device without the host. */
int is_moving(device *on) {
    stream *found[MAX_STREAMS + 1];
    return !on->broken && (streams_that_can(on, found) || streams_that_wrote(on, found));
}

/* Returns whether the host can let it go on without a call. */
static int is_waiting_for_a_flag(device *on) {
    for (int i = 0; i <= fake.n_streams; i++) {
        const stream *one = stream_number(on, i);
        if (one && is_polling(one)) return 1;
    }
    return 0;
}

static void wait_for_change(int polls) {
    if (!polls) {
        pthread_cond_wait(&fake.changed, &fake.lock);
        return;
    }
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_nsec += POLL_NS;
    end.tv_sec += end.tv_nsec / 1000000000;
    end.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&fake.changed, &fake.lock, &end);
}

/* ---- steps ---- */

typedef struct call {
    device *on;
    stream *of;
    op *work;
} call;

static void *call_host_function(void *arg) {
    call *one = arg;
    in_host_function = 1;
    current_device = one->on->number;
    one->work->function(one->work->arg);
    pthread_mutex_lock(&fake.lock);
    one->of->is_busy = 0;
    pop(one->of);
    one->on->n_running--;
    pthread_cond_broadcast(&fake.changed);
    pthread_mutex_unlock(&fake.lock);
    free(one);
    return NULL;
}

/* A thread for each call; with one_host_thread there is never more than one of a device. */
static void start_host_function(device *on, stream *of) {
    call *one = malloc(sizeof *one);
    pthread_t thread;
    *one = (call){on, of, of->first};
    of->is_busy = 1;
    on->n_running++;
    if (pthread_create(&thread, NULL, call_host_function, one)) abort();
    pthread_detach(thread);
}

static void step(device *on, stream *of) {
    op *work = of->first;
    switch (work->kind) {
    case HOST_FUNCTION:
        start_host_function(on, of);
        return;
    case COPY:
        if (!work->has_started) {
            start_copy(work);
            return;
        }
        end_copy(work);
        break;
    case KERNEL:
        in_kernel = 1;
        work->function(work->arg);
        in_kernel = 0;
        break;
    case FREE:
        unmap(work->to, 0);
        break;
    case FILL: {
        char *to = seen(work->to, work->n_bytes, 0);
        if (to) memset(to, work->byte, work->n_bytes);
        break;
    }
    case RECORD:
        work->event->is_done[work->record] = 1;
        break;
    case WRITE_FLAG:
        post(of, (uint32_t *)(void *)work->to, work->value);
        break;
    case WAIT_FLAG: /* it may have another value again: the device looks now and then */
        if (work->n_polls-- > 0 || !is_seen(work)) return;
        break;
    }
    pop(of);
}

static void *worker_main(void *arg) {
    device *on = arg;
    stream *can[MAX_STREAMS + 1], *wrote[MAX_STREAMS + 1];
    current_device = on->number;
    pthread_mutex_lock(&fake.lock);
    while (!on->stopping) {
        int runs = !on->broken && (fake.pace == FAKE_EAGER || on->n_demands);
        int n = runs ? streams_that_can(on, can) : 0, n_wrote = runs ? streams_that_wrote(on, wrote) : 0;
        if (n + n_wrote == 0) {
            wait_for_change(runs && is_waiting_for_a_flag(on));
            continue;
        }
        uint64_t choice = draw(on);
        if (fake.pace == FAKE_EAGER && choice >> 60 < 4) { /* now and then others get ahead */
            pthread_mutex_unlock(&fake.lock);
            nanosleep(&(struct timespec){0, (long)(choice >> 20 & 0xffff)}, NULL);
            pthread_mutex_lock(&fake.lock);
            continue;
        }
        int is_late = fake.manners.late_flags && n && choice >> 32 & 7; /* flags come when little else can */
        choice %= (uint64_t)(is_late ? n : n + n_wrote);
        if (choice < (uint64_t)n)
            step(on, can[choice]);
        else
            show(wrote[choice - (uint64_t)n]);
        pthread_cond_broadcast(&fake.changed);
    }
    pthread_mutex_unlock(&fake.lock);
    return NULL;
}

device *here(void) {
    device *on = &fake.devices[current_device];
    if (!on->has_worker) {
        on->has_worker = 1;
        if (!on->random) on->random = 0x9e3779b97f4a7c15u; /* without a reset */
        if (pthread_create(&on->worker, NULL, worker_main, on)) abort();
    }
    return on;
}

/* ---- control ---- */

void fake_settle(int (*n_sleeping)(void *context), void *context) {
    pthread_mutex_lock(&fake.lock);
    device *on = here();
    on->n_demands++;
    pthread_cond_broadcast(&fake.changed);
    for (;;) {
        while (is_moving(on)) wait_for_change(is_waiting_for_a_flag(on));
        int n_running = on->n_running;
        pthread_mutex_unlock(&fake.lock);
        int n = n_sleeping ? n_sleeping(context) : 0; /* takes the lock of those who sleep */
        if (n != n_running) nanosleep(&(struct timespec){0, 100000}, NULL);
        pthread_mutex_lock(&fake.lock);
        if (on->broken || (n == n_running && n_running == on->n_running && !is_moving(on))) break;
    }
    on->n_demands--;
    pthread_mutex_unlock(&fake.lock);
}

int fake_is_idle(int number, int *n_host_functions) {
    pthread_mutex_lock(&fake.lock);
    device *on = &fake.devices[number];
    *n_host_functions = on->n_running;
    int is = !is_moving(on);
    pthread_mutex_unlock(&fake.lock);
    return is;
}

/* All work but a host function under way. With the lock. */
void drop(stream *one) {
    while (one->written) {
        posted *flag = one->written;
        one->written = flag->next;
        free(flag);
    }
    op *busy = one->is_busy ? one->first : NULL;
    if (busy) one->first = busy->next;
    while (one->first) {
        op *work = one->first;
        if (work->kind == COPY && work->has_started) touch(work, -1);
        pop(one);
    }
    if (busy) {
        busy->next = NULL;
        one->first = busy;
        one->n_ops = 1;
        one->last = &busy->next;
    }
}

void stop(device *on) {
    if (!on->has_worker) return;
    pthread_mutex_lock(&fake.lock);
    while (on->n_running) pthread_cond_wait(&fake.changed, &fake.lock);
    on->stopping = 1;
    pthread_cond_broadcast(&fake.changed);
    pthread_mutex_unlock(&fake.lock);
    pthread_join(on->worker, NULL);
}
