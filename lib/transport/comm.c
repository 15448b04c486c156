/* A comm and its comm thread, which makes all calls of the transport.
 *
 * Transports may not progress by themselves, and most must not be called from two threads. So one thread starts and
 * polls all transfers, and the others wait on condition variables. */
#include "core/clock.h"
#include "core/memory.h"
#include "core/sized.h"
#include "core/thread.h"
#include "transport/comm_private.h"
#include "transport/work.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { TICKET_POSTED = 1, TICKET_DONE = 2 };

/* How long the comm thread keeps polling after the last movement. If movements follow each other fast (shared memory),
 * bytes move only while it polls, and an early rest costs speed. On a slow link the socket buffers keep it busy during a
 * rest, and polling only takes time from threads that compute. */
static const double patience_fast_s = 200e-6, patience_slow_s = 20e-6;
static const double slow_s = 200e-6, longest_gap_s = 1e-3;

/* Time of the last movement, and a running mean of the gaps between movements. */
typedef struct tagc_pace {
    double moved_s, gap_s;
} tagc_pace;

/* ---- comm thread ---- */

/* The text is what stands before the reason, the reason, and what stands behind it. told: the reason for other ranks. */
static void comm_break(tagc_comm *comm, const char *before, const tagc_failure *failure, const char *behind,
                       const char *told) {
    size_t n_around = strlen(before) + strlen(behind);
    const char *reason = failure->reason;
    pthread_mutex_lock(&comm->lock);
    if (comm->broken == TAGC_OK) { /* the first reason stays, because later failures follow from it */
        comm->broken = failure->status;
        comm->failed_rank = failure->rank;
        snprintf(comm->reason, sizeof comm->reason, "%s", told);
        snprintf(comm->error, sizeof comm->error, "%s%.*s%s", before,
                 (int)(sizeof comm->error - 1 - n_around), reason, behind);
        pthread_cond_signal(&comm->wake);
    }
    pthread_mutex_unlock(&comm->lock);
}

/* What concerns one rank alone is where it began, if nobody is to blame. */
static int is_own(tagc_status status) {
    return status != TAGC_ERR_TRANSPORT && status != TAGC_ERR_TIMEOUT && status != TAGC_ERR_MISMATCH &&
           status != TAGC_ERR_CORRUPT;
}

/* Ranks that begin units in different orders may meet here, where lengths differ: so each says which one it exchanges. */
static void comm_break_by(tagc_comm *comm, tagc_ticket *ticket, tagc_status status) {
    char reason[TAGC_ERROR_TEXT_BYTES], told[sizeof reason],
        what[TAGC_UNIT_TEXT_BYTES + 64] = "", leg[32], behind[sizeof what + sizeof leg + 16];
    tagc_failure failure = {.status = status, .rank = tagc_last_rank(), .reason = reason};
    if (failure.rank < 0 && is_own(status)) failure.rank = comm->rank;
    snprintf(reason, sizeof reason, "%s", tagc_last_error());
    if (!reason[0])
        snprintf(reason, sizeof reason, "transport %s: %s", comm->ops->name, tagc_status_name(status));
    if (ticket->of) {
        char name[TAGC_UNIT_TEXT_BYTES];
        tagc_identity_text(ticket->of, name);
        snprintf(what, sizeof what, " exchanges %s of %llu elements", name,
                 (unsigned long long)ticket->of->n_elems);
    }
    if (ticket->leg == TAGC_LEG_CONTROL)
        snprintf(leg, sizeof leg, " (while ranks agreed)");
    else
        snprintf(leg, sizeof leg, " (leg %s)", tagc_leg_name((int)ticket->leg));
    snprintf(behind, sizeof behind, "%s%s%s", ticket->of ? "; this rank" : "", what, leg);
    ticket->status = status;
    snprintf(told, sizeof told, "%s", reason);
    if (ticket->of && status == TAGC_ERR_MISMATCH)
        snprintf(told, sizeof told, "%.*s; rank %d%s", (int)(sizeof told - sizeof what - 32), reason,
                 tagc_comm_name(comm, comm->rank), what);
    comm_break(comm, "", &failure, behind, told);
}

static void finish(tagc_comm *comm, tagc_ticket *ticket, tagc_status status) {
    if (status == TAGC_OK)
        tagc_comm_trace(comm, "comm", tagc_leg_name((int)ticket->leg), ticket->start_s, tagc_clock_s(),
                        ticket->n_bytes_sent, ticket->tag);
    pthread_mutex_lock(&comm->lock);
    if (status == TAGC_OK) {
        comm->n_bytes_sent[ticket->leg] += ticket->n_bytes_sent - ticket->part_sent;
        comm->n_bytes_received[ticket->leg] += ticket->n_bytes_received - ticket->part_received;
        comm->n_bytes_sent[ticket->part_leg] += ticket->part_sent;
        comm->n_bytes_received[ticket->part_leg] += ticket->part_received;
        for (uint32_t i = 0; i < ticket->transfer.n_sends; i++)
            comm->sent_to[ticket->transfer.sends[i].peer] += ticket->transfer.sends[i].n_bytes;
    }
    ticket->status = status;
    ticket->state = TICKET_DONE; /* the poster may free the memory from here on */
    comm->n_done++;
    /* Wakes no other thread: if all cores of a host are busy, each useless wake-up costs a thread switch. */
    for (int i = 0; i < TAGC_N_WORKERS; i++)
        if (comm->workers[i].awaits_tickets) pthread_cond_signal(&comm->workers[i].work);
    if (comm->n_waiters > 0) pthread_cond_broadcast(&comm->done);
    pthread_mutex_unlock(&comm->lock);
}

static tagc_status start_ticket(tagc_comm *comm, tagc_ticket *ticket) {
    const tagc_transfer *transfer = &ticket->transfer;
    TAGC_TRY(tagc_transfer_check(transfer, comm->rank, comm->world_size));
    ticket->n_bytes_sent = tagc_parts_bytes(transfer->sends, transfer->n_sends);
    ticket->n_bytes_received = tagc_parts_bytes(transfer->receives, transfer->n_receives);
    return comm->ops->start(comm->context, transfer, &ticket->request);
}

/* Starts the tickets that were posted, in that order, up to the first failure. Returns 1 if there was any. */
static int start_posted(tagc_comm *comm, tagc_ticket **waiting, tagc_ticket **active) {
    int n_started = 0;
    while (*active) active = &(*active)->next;
    while (*waiting) {
        tagc_ticket *ticket = *waiting;
        *waiting = ticket->next;
        ticket->next = NULL;
        *active = ticket;
        active = &ticket->next;
        n_started++;
        ticket->start_s = tagc_clock_s();
        tagc_status status = start_ticket(comm, ticket);
        if (status == TAGC_OK) continue;
        comm_break_by(comm, ticket, status);
        break;
    }
    return n_started > 0;
}

/* Whether a transfer has waited too long, and the text for that. On a slow link, transfers queue behind others that move,
 * so the silence counts from the last byte of any transfer. */
static int is_late(const tagc_comm *comm, const tagc_ticket *ticket, double now_s, double moved_s,
                   int waiting_for) {
    double timeout_s = comm->options.timeout_s, total_s = comm->options.total_timeout_s;
    double silent_since_s = moved_s > ticket->start_s ? moved_s : ticket->start_s;
    int is_silent = now_s - silent_since_s > timeout_s;
    if (!is_silent && !(total_s > 0 && now_s - ticket->start_s > total_s)) return 0;
    char peer[32] = "";
    if (waiting_for >= 0)
        snprintf(peer, sizeof peer, is_silent ? " from rank %d" : ", waiting for rank %d",
                 tagc_comm_name(comm, waiting_for));
    if (is_silent)
        tagc_fail(TAGC_ERR_TIMEOUT, "no answer%s within %g s", peer, timeout_s);
    else
        tagc_fail(TAGC_ERR_TIMEOUT, "not complete within %g s%s", total_s, peer);
    tagc_blame(TAGC_ERR_TIMEOUT, waiting_for);
    return 1;
}

/* Polls every started ticket once and finishes the complete ones. Returns 1 if anything moved or broke. Sets *moved_s
 * to the time of the last movement. */
static int poll_active(tagc_comm *comm, tagc_ticket **active, double *moved_s) {
    int moved = 0;
    for (tagc_ticket **link = active; *link;) {
        tagc_ticket *ticket = *link;
        tagc_progress progress = {.waiting_for = -1};
        tagc_status status = comm->ops->test(comm->context, ticket->request, &progress);
        if (status != TAGC_OK) {
            comm_break_by(comm, ticket, status);
            return 1;
        }
        double now_s = tagc_clock_s();
        moved |= progress.moved | progress.done;
        if (moved) *moved_s = now_s;
        if (progress.done) {
            *link = ticket->next;
            finish(comm, ticket, TAGC_OK);
            continue;
        }
        if (is_late(comm, ticket, now_s, *moved_s, progress.waiting_for)) {
            comm_break_by(comm, ticket, TAGC_ERR_TIMEOUT);
            return 1;
        }
        link = &ticket->next;
    }
    return moved;
}

/* The posters get their buffers back only after the transport has released them. */
static void fail_all(tagc_comm *comm, tagc_ticket *active, tagc_ticket *waiting) {
    const tagc_failure failure = {comm->broken, comm->failed_rank, comm->reason};
    if (active) comm->ops->cancel(comm->context, &failure);
    for (tagc_ticket *next; active; active = next) {
        next = active->next;
        finish(comm, active, comm->broken);
    }
    for (tagc_ticket *next; waiting; waiting = next) {
        next = waiting->next;
        finish(comm, waiting, comm->broken);
    }
}

/* Called with the lock, after a poll that moved nothing. Others compute on the same cores, so the pause grows with the
 * time since the last movement, to a few per cent of it. A post ends the pause early. */
static void rest(tagc_comm *comm, double still_s) {
    double pause_s = still_s / 16;
    if (pause_s < 50e-6) pause_s = 50e-6;
    if (pause_s > 500e-6) pause_s = 500e-6;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)(pause_s * 1e9);
    if (until.tv_nsec >= 1000000000L) {
        until.tv_nsec -= 1000000000L;
        until.tv_sec++;
    }
    pthread_cond_timedwait(&comm->wake, &comm->lock, &until);
}

/* Returns the time since anything moved. */
static double keep_pace(tagc_pace *pace, double now_s, int started, int moved) {
    double still_s = now_s - pace->moved_s;
    if (!moved && !started) return still_s;
    /* Right after a start, the gap is the time in which no thread posted anything. */
    if (!started) pace->gap_s += ((still_s < longest_gap_s ? still_s : longest_gap_s) - pace->gap_s) / 8;
    pace->moved_s = now_s;
    return 0;
}

/* With the lock. */
static void take_posted(tagc_comm *comm, tagc_ticket **waiting) {
    while (*waiting) waiting = &(*waiting)->next;
    *waiting = comm->posted;
    comm->posted = NULL;
    comm->posted_end = &comm->posted;
}

static void *comm_main(void *arg) {
    tagc_comm *comm = arg;
    tagc_ticket *waiting = NULL, *active = NULL; /* none waits for a ticket that is not started */
    tagc_pace pace = {0};
    double moved_s = 0; /* bytes, of any transfer */
    pthread_mutex_lock(&comm->lock);
    for (;;) {
        while (!comm->posted && !waiting && !active && !comm->has_last_ticket)
            pthread_cond_wait(&comm->wake, &comm->lock);
        if (!comm->posted && !waiting && !active) break;
        take_posted(comm, &waiting);
        int broken = comm->broken != TAGC_OK, started = 0;
        pthread_mutex_unlock(&comm->lock);

        if (broken) {
            fail_all(comm, active, waiting);
            active = waiting = NULL;
        } else {
            started = start_posted(comm, &waiting, &active);
        }
        pthread_mutex_lock(&comm->lock);
        if (!active || comm->broken != TAGC_OK) continue;
        pthread_mutex_unlock(&comm->lock);
        int moved = poll_active(comm, &active, &moved_s);
        double now_s = tagc_clock_s(), still_s = keep_pace(&pace, now_s, started, moved);
        int is_still = still_s > (pace.gap_s < slow_s ? patience_fast_s : patience_slow_s);
        if (still_s > 0 && !is_still) sched_yield();
        pthread_mutex_lock(&comm->lock);
        if (is_still && active && !comm->posted && comm->broken == TAGC_OK) rest(comm, still_s);
    }
    pthread_mutex_unlock(&comm->lock);
    return NULL;
}

/* ---- tickets ---- */

void tagc_comm_post(tagc_comm *comm, tagc_lane lane, tagc_ticket *ticket) {
    ticket->transfer.lane = tagc_comm_has_lanes(comm) ? (uint32_t)lane : 0;
    ticket->n_bytes_sent = ticket->n_bytes_received = 0;
    ticket->status = TAGC_OK;
    ticket->request = NULL;
    ticket->next = NULL;
    pthread_mutex_lock(&comm->lock);
    ticket->state = TICKET_POSTED;
    comm->n_posted++;
    *comm->posted_end = ticket;
    comm->posted_end = &ticket->next;
    pthread_cond_signal(&comm->wake);
    pthread_mutex_unlock(&comm->lock);
}

tagc_status tagc_comm_wait(tagc_comm *comm, tagc_ticket *ticket) {
    pthread_mutex_lock(&comm->lock);
    comm->n_waiters++;
    while (ticket->state != TICKET_DONE) pthread_cond_wait(&comm->done, &comm->lock);
    comm->n_waiters--;
    pthread_mutex_unlock(&comm->lock);
    return ticket->status == TAGC_OK ? TAGC_OK : tagc_fail(ticket->status, "%s", comm->error);
}

int tagc_comm_is_done(tagc_comm *comm, const tagc_ticket *ticket) {
    pthread_mutex_lock(&comm->lock);
    int is_done = ticket->state == TICKET_DONE;
    pthread_mutex_unlock(&comm->lock);
    return is_done;
}

/* ---- life ---- */

static const tagc_comm_options default_options = {.timeout_s = 120, .more_work_bytes = TAGC_MORE_WORK_BYTES};
static const tagc_sized options_struct = {
    "tagc_comm_options", sizeof(tagc_comm_options),
    offsetof(tagc_comm_options, names) + sizeof(const int32_t *), /* the last field of the first release */
    &default_options};

void tagc_comm_options_init_sized(tagc_comm_options *options, size_t struct_bytes) {
    tagc_sized_init(&options_struct, options, struct_bytes);
}

/* NULL: the defaults. */
tagc_status tagc_comm_read_options(const tagc_comm_options *from, tagc_comm_options *options) {
    tagc_comm_options_init(options);
    if (from) TAGC_TRY(tagc_sized_read(&options_struct, from, options));
    if (!(options->timeout_s > 0 && options->timeout_s <= 1e6))
        return tagc_fail(TAGC_ERR_ARGUMENT, "options.timeout_s is %g, must be in (0, 1e6]",
                         options->timeout_s);
    if (!(options->total_timeout_s >= 0 && options->total_timeout_s <= 1e6))
        return tagc_fail(TAGC_ERR_ARGUMENT, "options.total_timeout_s is %g, must be in [0, 1e6]",
                         options->total_timeout_s);
    return TAGC_OK;
}

static tagc_status check_ops(const tagc_transport_ops *ops) {
    if (!ops) return tagc_fail(TAGC_ERR_ARGUMENT, "ops is NULL");
    TAGC_TRY(tagc_transport_check_abi(ops->abi));
    if (ops->capabilities & ~TAGC_TRANSPORT_LANES)
        return tagc_fail(TAGC_ERR_ARGUMENT, "ops.capabilities is 0x%x, known are 0x%x", ops->capabilities,
                         TAGC_TRANSPORT_LANES);
    const char *missing = !ops->name      ? "name"
                          : !ops->start   ? "start"
                          : !ops->test    ? "test"
                          : !ops->cancel  ? "cancel"
                          : !ops->abort   ? "abort"
                          : !ops->destroy ? "destroy"
                                          : NULL;
    if (missing) return tagc_fail(TAGC_ERR_ARGUMENT, "ops.%s is NULL, every member is required", missing);
    return TAGC_OK;
}

static tagc_status start_threads(tagc_comm *comm) {
    TAGC_TRY(tagc_thread_start(&comm->comm_thread, "the comm thread", comm_main, comm));
    comm->is_started = 1;
    for (int i = 0; i < TAGC_N_WORKERS; i++) {
        tagc_worker *worker = &comm->workers[i];
        TAGC_TRY(tagc_thread_start(&worker->thread, "a worker thread", tagc_comm_worker_main, worker));
        worker->is_started = 1;
    }
    return TAGC_OK;
}

static void init_locks(tagc_comm *comm) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&comm->lock, NULL);
    pthread_cond_init(&comm->wake, &monotonic);
    pthread_cond_init(&comm->done, NULL);
    pthread_cond_init(&comm->ended, NULL);
    for (int i = 0; i < TAGC_N_WORKERS; i++) pthread_cond_init(&comm->workers[i].work, NULL);
    pthread_condattr_destroy(&monotonic);
}

/* The tasks end first: they may still post tickets and wait for them. */
static void stop_threads(tagc_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    comm->stopping = 1;
    for (int i = 0; i < TAGC_N_WORKERS; i++) pthread_cond_signal(&comm->workers[i].work);
    pthread_mutex_unlock(&comm->lock);
    for (int i = 0; i < TAGC_N_WORKERS; i++)
        if (comm->workers[i].is_started) pthread_join(comm->workers[i].thread, NULL);
    pthread_mutex_lock(&comm->lock);
    comm->has_last_ticket = 1;
    pthread_cond_signal(&comm->wake);
    pthread_mutex_unlock(&comm->lock);
    if (comm->is_started) pthread_join(comm->comm_thread, NULL);
}

static void release(tagc_comm *comm) {
    for (tagc_spares *next, *spares = comm->spares; spares; spares = next) {
        next = spares->next;
        for (int i = 0; i < spares->n_free; i++) tagc_memory_destroy(spares->free[i]);
        tagc_memory_destroy(spares);
    }
    for (int i = 0; i < TAGC_N_WORKERS; i++) pthread_cond_destroy(&comm->workers[i].work);
    pthread_cond_destroy(&comm->ended);
    pthread_cond_destroy(&comm->done);
    pthread_cond_destroy(&comm->wake);
    pthread_mutex_destroy(&comm->lock);
    tagc_memory_destroy(comm);
}

/* One arena for the object and its control arrays. */
static tagc_comm *lay_out(tagc_arena *arena, size_t n_ranks) {
    tagc_comm *comm = tagc_arena_take(arena, 1, sizeof *comm);
    tagc_part *sends = tagc_arena_take(arena, n_ranks - 1, sizeof *sends);
    tagc_part *receives = tagc_arena_take(arena, n_ranks - 1, sizeof *receives);
    unsigned char *scratch = tagc_arena_take(arena, n_ranks, 1);
    int32_t *names = tagc_arena_take(arena, n_ranks, sizeof *names);
    uint64_t *sent_to = tagc_arena_take(arena, n_ranks, sizeof *sent_to);
    if (!comm) return NULL;
    comm->sent_to = sent_to;
    comm->names = names;
    comm->control_sends = sends;
    comm->control_receives = receives;
    comm->control_scratch = scratch;
    return comm;
}

/* Another for each comm, as far as clocks can tell. That of rank 0 is everyone's. */
static uint32_t draw_world(const tagc_comm *comm) {
    uint64_t mixed =
        (uint64_t)(tagc_clock_s() * 1e9) ^ (uint64_t)comm->process << 40 ^ (uint64_t)(uintptr_t)comm;
    mixed = (mixed ^ mixed >> 31) * 0x94d049bb133111ebu;
    return (uint32_t)(mixed >> 32);
}

tagc_status tagc_comm_create(const tagc_transport_ops *ops, void *context, int rank, int world_size,
                             const tagc_comm_options *options, tagc_comm **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    tagc_comm_options checked;
    TAGC_TRY(check_ops(ops));
    TAGC_TRY(tagc_comm_read_options(options, &checked));
    if (world_size < 1 || world_size > 65536)
        return tagc_fail(TAGC_ERR_ARGUMENT, "world_size is %d, must be in [1, 65536]", world_size);
    if (rank < 0 || rank >= world_size)
        return tagc_fail(TAGC_ERR_ARGUMENT, "rank is %d, must be in [0, %d)", rank, world_size);

    tagc_arena arena = {0};
    lay_out(&arena, (size_t)world_size);
    void *memory;
    TAGC_TRY(tagc_memory_create(arena.n_bytes, "comm", &memory));
    arena = (tagc_arena){.base = memory};
    tagc_comm *comm = lay_out(&arena, (size_t)world_size);
    comm->ops = ops;
    comm->context = context;
    comm->process = getpid();
    comm->world = draw_world(comm);
    comm->rank = rank;
    comm->world_size = world_size;
    comm->options = checked;
    comm->options.names = NULL; /* the caller's */
    for (int r = 0; r < world_size; r++) comm->names[r] = checked.names ? checked.names[r] : r;
    comm->posted_end = &comm->posted;
    for (int i = 0; i < TAGC_N_WORKERS; i++) {
        comm->workers[i].comm = comm;
        comm->workers[i].tasks_end = &comm->workers[i].tasks;
    }
    init_locks(comm);
    tagc_status status = start_threads(comm);
    if (status != TAGC_OK) {
        stop_threads(comm);
        release(comm);
        return status;
    }
    *out = comm;
    return TAGC_OK;
}

void tagc_comm_abort(tagc_comm *comm, const char *reason) {
    if (!comm || tagc_comm_is_fork(comm)) return;
    if (!reason) reason = "no reason given";
    const tagc_failure failure = {TAGC_ERR_TRANSPORT, comm->rank, reason};
    char before[64];
    snprintf(before, sizeof before, "this rank (%d) gave up: ", tagc_comm_name(comm, comm->rank));
    comm_break(comm, before, &failure, "", reason);
    comm->ops->abort(comm->context, &failure);
    pthread_mutex_lock(&comm->lock);
    for (tagc_comm *part = comm->parts; part; part = part->next_part) tagc_comm_abort(part, reason);
    pthread_mutex_unlock(&comm->lock);
}

tagc_status tagc_comm_give_up(tagc_comm *comm, tagc_status status, int rank) {
    char reason[TAGC_ERROR_TEXT_BYTES];
    snprintf(reason, sizeof reason, "%s", tagc_last_error());
    const tagc_failure failure = {status, rank, reason};
    comm_break(comm, "", &failure, "", reason);
    comm->ops->abort(comm->context, &failure);
    return tagc_fail(status, "%s", reason);
}

int tagc_comm_name(const tagc_comm *comm, int rank) {
    return rank >= 0 && rank < comm->world_size ? comm->names[rank]
                                                : rank; /* a damaged message may have any number */
}

void tagc_comm_hold(tagc_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    comm->n_users++;
    pthread_mutex_unlock(&comm->lock);
}

void tagc_comm_let_go(tagc_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    int is_last = --comm->n_users == 0 && comm->is_closed;
    pthread_mutex_unlock(&comm->lock);
    if (is_last) release(comm);
}

int tagc_comm_is_fork(const tagc_comm *comm) {
    return comm->process != getpid();
}

tagc_status tagc_comm_check_open(tagc_comm *comm) {
    if (tagc_comm_is_fork(comm))
        return tagc_fail(TAGC_ERR_STATE, "a comm of process %d has no threads in a fork", (int)comm->process);
    pthread_mutex_lock(&comm->lock);
    int is_closed = comm->is_closed;
    pthread_mutex_unlock(&comm->lock);
    return is_closed ? tagc_fail(TAGC_ERR_STATE, "begin after tagc_comm_destroy: the comm is gone") : TAGC_OK;
}

/* The transport ends here in any case, because the caller may free what it uses. */
void tagc_comm_destroy(tagc_comm *comm) {
    if (!comm || tagc_comm_is_fork(comm)) return;
    tagc_comm_leave_whole(comm);
    stop_threads(comm);
    comm->ops->destroy(comm->context);
    pthread_mutex_lock(&comm->lock);
    comm->is_closed = 1;
    int is_last = comm->n_users == 0;
    pthread_mutex_unlock(&comm->lock);
    if (is_last) release(comm);
}

/* ---- what the objects of a comm hold in memory ---- */

static const tagc_memory nothing;
static const tagc_sized memory_struct = {"tagc_memory", sizeof(tagc_memory),
                                         offsetof(tagc_memory, device_spare_bytes) +
                                             sizeof(uint64_t), /* the last field of the first release */
                                         &nothing};

void tagc_memory_init_sized(tagc_memory *memory, size_t struct_bytes) {
    tagc_sized_init(&memory_struct, memory, struct_bytes);
}

void tagc_comm_count(tagc_comm *comm, tagc_held what, int64_t n_bytes) {
    pthread_mutex_lock(&comm->lock);
    comm->n_held_bytes[what] += (uint64_t)n_bytes;
    pthread_mutex_unlock(&comm->lock);
}

tagc_status tagc_comm_memory(tagc_comm *comm, tagc_memory *memory) {
    tagc_memory found = {0};
    if (!comm) return tagc_fail(TAGC_ERR_ARGUMENT, "comm is NULL");
    if (!memory) return tagc_fail(TAGC_ERR_ARGUMENT, "memory is NULL");
    TAGC_TRY(tagc_sized_check(&memory_struct, memory));
    found.work_bytes = tagc_works_bytes(comm, NULL);
    pthread_mutex_lock(&comm->lock);
    found.residual_bytes = comm->n_held_bytes[TAGC_HELD_RESIDUAL];
    found.device_residual_bytes = comm->n_held_bytes[TAGC_HELD_RESIDUAL_THERE];
    found.buffer_bytes = comm->n_held_bytes[TAGC_HELD_BUFFERS];
    for (const tagc_spares *spares = comm->spares; spares; spares = spares->next)
        *(spares->heap->context ? &found.device_spare_bytes : &found.spare_bytes) +=
            (uint64_t)spares->n_made * spares->n_bytes;
    pthread_mutex_unlock(&comm->lock);
    tagc_sized_write(&memory_struct, &found, memory);
    return TAGC_OK;
}
