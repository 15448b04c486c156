/* The clock advances from event to event. All speeds are constant between two events. */
#include "plan/clock.h"

#include <math.h>
#include <stddef.h>

enum { IDLE = 0, MOVING = 1, TAIL = 2, DONE = 3, WAITING = 4 };

static const double little_s = 1e-12, little_bytes = 1e-6;
typedef struct speeds {
    double remote, local; /* bytes per second of one transfer */
} speeds;

void tagc_clock_init(tagc_clock *clock, const tagc_sim_machine *machine) {
    *clock = (tagc_clock){.machine = *machine};
    clock->jobs_end = &clock->jobs;
}

/* ---- transfers ---- */

void tagc_clock_post(tagc_clock *clock, tagc_sim_transfer *t) {
    t->remote_left = t->remote_bytes;
    t->local_left = t->local_bytes;
    t->state = t->remote_left + t->local_left > 0 ? MOVING : DONE; /* a single rank sends nothing */
    if (t->then) t->then->state = WAITING;
    if (t->state == DONE) {
        if (t->then) tagc_clock_post(clock, t->then);
        return;
    }
    t->next = clock->active;
    clock->active = t;
}

/* What rounding leaves is nothing: the time that it would take is too short to move a clock. */
static double after(double left, double bytes_per_s, double s) {
    double rest = isfinite(bytes_per_s) ? left - bytes_per_s * s : 0;
    return rest > little_bytes ? rest : 0;
}

static void advance_transfers(tagc_clock *clock, const speeds *v, double s) {
    for (tagc_sim_transfer *t = clock->active; t; t = t->next) {
        if (t->state == TAIL) {
            t->tail_s -= s;
            continue;
        }
        t->remote_left = after(t->remote_left, v->remote, s);
        t->local_left = after(t->local_left, v->local, s);
    }
}

/* Advances the state of transfers that have sent their last byte, and of those that have arrived. */
static void settle_transfers(tagc_clock *clock) {
    const tagc_sim_machine *m = &clock->machine;
    for (tagc_sim_transfer **link = &clock->active; *link;) {
        tagc_sim_transfer *t = *link;
        if (t->state == MOVING && t->remote_left <= little_bytes && t->local_left <= little_bytes) {
            t->state = TAIL;
            t->tail_s = t->remote_bytes > 0 ? m->latency_s : 0;
        }
        if (t->state == TAIL && t->tail_s <= little_s) {
            t->state = DONE;
            *link = t->next;
            if (t->then) tagc_clock_post(clock, t->then); /* inserts at the front */
            continue;
        }
        link = &t->next;
    }
}

/* ---- the worker ---- */

/* Finds, from the last op to the first, the lanes on which an op and all after it may post. Later jobs only know the lowest
 * such lane, so all higher lanes count as well. */
static void find_lanes(tagc_sim_job *job) {
    unsigned action = 0, later = 0;
    for (int i = job->n_ops - 1; i >= 0; i--) {
        tagc_sim_op *op = &job->ops[i];
        if (op->kind == TAGC_SIM_POST) {
            action |= 1u << op->lane;
            later |= ~0u << op->lane;
        }
        op->action_lanes = action; /* for a wait: those of the action after it */
        op->later_lanes = later;
        if (op->kind == TAGC_SIM_WAIT) action = 0;
    }
}

static void enter_op(tagc_sim_job *job, int at) {
    job->at = at;
    job->left_s = at < job->n_ops && job->ops[at].kind == TAGC_SIM_WORK ? job->ops[at].work_s : 0;
}

void tagc_clock_submit(tagc_clock *clock, tagc_sim_job *job) {
    job->state = MOVING;
    job->next = NULL;
    find_lanes(job);
    enter_op(job, 0);
    *clock->jobs_end = job;
    clock->jobs_end = &job->next;
}

static int is_waiting(const tagc_sim_job *job) {
    const tagc_sim_op *op = job->at < job->n_ops ? &job->ops[job->at] : NULL;
    return op && op->kind == TAGC_SIM_WAIT && job->transfers[op->transfer].state != DONE;
}

/* The oldest that can go on, or NULL. */
static tagc_sim_job *find_ready(const tagc_clock *clock) {
    unsigned taken = 0; /* by older jobs */
    for (tagc_sim_job *job = clock->jobs; job; job = job->next) {
        const tagc_sim_op *op = job->at < job->n_ops ? &job->ops[job->at] : NULL;
        if (!is_waiting(job) && !(op && (op->action_lanes & taken))) return job;
        if (op) taken |= op->later_lanes;
    }
    return NULL;
}

static void retire(tagc_clock *clock, tagc_sim_job *job) {
    tagc_sim_job **link = &clock->jobs;
    while (*link != job) link = &(*link)->next;
    *link = job->next;
    if (!*link) clock->jobs_end = link;
    job->state = DONE;
}

/* Runs all ops of the worker that take no time. */
static void settle_worker(tagc_clock *clock) {
    for (;;) {
        tagc_sim_job *job = clock->running;
        if (!job) {
            job = clock->running = find_ready(clock);
            if (!job) return;
            if (job->at < job->n_ops && job->ops[job->at].kind == TAGC_SIM_WAIT) enter_op(job, job->at + 1);
        }
        for (; job->at < job->n_ops; enter_op(job, job->at + 1)) {
            const tagc_sim_op *op = &job->ops[job->at];
            if (op->kind == TAGC_SIM_WORK && job->left_s > little_s) return;
            if (op->kind == TAGC_SIM_WAIT) break;
            if (op->kind == TAGC_SIM_POST) tagc_clock_post(clock, &job->transfers[op->transfer]);
        }
        clock->running = NULL;
        if (job->at == job->n_ops) retire(clock, job);
    }
}

static int worker_works(const tagc_clock *clock) {
    return clock->running != NULL; /* posts take no time, and waits end an action */
}

/* ---- time ---- */

static speeds speeds_now(const tagc_clock *clock) {
    const tagc_sim_machine *m = &clock->machine;
    int n_remote = 0, n_local = 0;
    for (const tagc_sim_transfer *t = clock->active; t; t = t->next) {
        n_remote += t->state == MOVING && t->remote_left > little_bytes;
        n_local += t->state == MOVING && t->local_left > little_bytes;
    }
    return (speeds){.remote = n_remote ? m->remote_bytes_per_s / n_remote : 0,
                    .local = n_local ? m->local_bytes_per_s / n_local : 0};
}

static double sooner(double dt, double left, double speed) {
    return left > 0 && speed > 0 && left / speed < dt ? left / speed
                                                      : dt; /* at speed 0 it does not end before dt */
}

/* One event. caller_left_s: the caller's work, NULL while it waits. */
static void step(tagc_clock *clock, double *caller_left_s) {
    speeds v = speeds_now(clock);
    double dt = INFINITY;
    if (caller_left_s) dt = sooner(dt, *caller_left_s, 1);
    if (worker_works(clock)) dt = sooner(dt, clock->running->left_s, 1);
    for (const tagc_sim_transfer *t = clock->active; t; t = t->next) {
        if (t->state == TAIL) {
            dt = sooner(dt, t->tail_s, 1);
            continue;
        }
        dt = sooner(dt, t->remote_left, v.remote);
        dt = sooner(dt, t->local_left, v.local);
    }
    if (!isfinite(dt)) dt = 0; /* no event is left; the settling below detects that */
    clock->now_s += dt;
    if (clock->active) clock->comm_s += dt;
    if (worker_works(clock)) {
        clock->codec_s += dt;
        clock->running->left_s -= dt;
    }
    if (caller_left_s) *caller_left_s -= dt;
    advance_transfers(clock, &v, dt);
    settle_transfers(clock);
    settle_worker(clock);
}

void tagc_clock_work(tagc_clock *clock, double work_s) {
    settle_worker(clock);
    while (work_s > little_s) step(clock, &work_s);
}

void tagc_clock_wait(tagc_clock *clock, const tagc_sim_transfer *transfer) {
    settle_worker(clock);
    while (transfer->state != DONE && transfer->state != IDLE) step(clock, NULL);
}

void tagc_clock_join(tagc_clock *clock, const tagc_sim_job *job) {
    settle_worker(clock);
    while (job->state != DONE && job->state != IDLE) step(clock, NULL);
}
