/* The workers of a comm: one runs the codec for reducers, another for gathers. */
#include "core/clock.h"
#include "transport/comm_private.h"

#include <stdio.h>

enum { TASK_SUBMITTED = 1, TASK_DONE = 2 };

/* With the lock. */
static void take_submitted(tagc_worker *worker, tagc_task **active) {
    while (*active) active = &(*active)->next;
    *active = worker->tasks;
    worker->tasks = NULL;
    worker->tasks_end = &worker->tasks;
}

static uint32_t lane_set(const tagc_comm *comm, uint32_t lanes) {
    return tagc_comm_has_lanes(comm) ? lanes : lanes != 0;
}

/* The link to the oldest task that can go on, or NULL if none can. */
static tagc_task **find_ready(tagc_comm *comm, tagc_task **active) {
    uint32_t taken = 0; /* by older tasks */
    for (; *active; active = &(*active)->next) {
        tagc_task *task = *active;
        if (!(lane_set(comm, task->next_lanes) & taken) && (!task->is_ready || task->is_ready(task->arg)))
            return active;
        taken |= lane_set(comm, task->later_lanes);
    }
    return NULL;
}

static void run(tagc_comm *comm, tagc_task **link, double idle_s) {
    tagc_task *task = *link;
    task->more = 0;
    task->idle_s = idle_s;
    tagc_status status = task->run(task->arg);
    if (status == TAGC_OK && task->more) return;
    if (status != TAGC_OK) snprintf(task->error, sizeof task->error, "%s", tagc_last_error());
    pthread_mutex_lock(&comm->lock);
    *link = task->next;
    task->status = status;
    task->state = TASK_DONE; /* the submitter may free the memory from here on */
    pthread_cond_broadcast(&comm->ended);
    pthread_mutex_unlock(&comm->lock);
}

void *tagc_comm_worker_main(void *arg) {
    tagc_worker *worker = arg;
    tagc_comm *comm = worker->comm;
    tagc_task *active = NULL; /* in order of submission */
    double idle_s = 0;
    pthread_mutex_lock(&comm->lock);
    for (;;) {
        while (!worker->tasks && !active && !comm->stopping) {
            worker->is_idle = 1;
            pthread_cond_wait(&worker->work, &comm->lock);
        }
        if (!worker->tasks && !active) break;
        worker->is_idle = 0;
        worker->n_done_seen = comm->n_done;
        worker->looks_again = 0;
        take_submitted(worker, &active);
        pthread_mutex_unlock(&comm->lock);

        tagc_task **ready = find_ready(comm, &active);
        if (ready) run(comm, ready, idle_s);
        idle_s = ready ? 0 : idle_s;

        pthread_mutex_lock(&comm->lock);
        if (ready) continue;
        double start_s = tagc_clock_s();
        worker->is_idle = worker->awaits_tickets = 1;
        while (!worker->tasks && !worker->looks_again && comm->n_done == worker->n_done_seen)
            pthread_cond_wait(&worker->work, &comm->lock);
        worker->awaits_tickets = 0;
        idle_s += tagc_clock_s() - start_s;
    }
    pthread_mutex_unlock(&comm->lock);
    return NULL;
}

static void submit(tagc_worker *worker, tagc_task *task) {
    tagc_comm *comm = worker->comm;
    if (!task->is_ready) task->next_lanes = task->later_lanes = TAGC_ALL_LANES;
    task->status = TAGC_OK;
    task->error[0] = 0;
    task->next = NULL;
    pthread_mutex_lock(&comm->lock);
    task->state = TASK_SUBMITTED;
    *worker->tasks_end = task;
    worker->tasks_end = &task->next;
    pthread_cond_signal(&worker->work);
    pthread_mutex_unlock(&comm->lock);
}

int tagc_comm_has_ended(tagc_comm *comm, const tagc_task *task) {
    if (tagc_comm_is_fork(comm)) return 1;
    pthread_mutex_lock(&comm->lock);
    int has_ended = task->state == TASK_DONE;
    pthread_mutex_unlock(&comm->lock);
    return has_ended;
}

void tagc_comm_look_again(tagc_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    for (int i = 0; i < TAGC_N_WORKERS; i++) {
        comm->workers[i].looks_again = 1;
        pthread_cond_signal(&comm->workers[i].work);
    }
    pthread_mutex_unlock(&comm->lock);
}

void tagc_comm_submit(tagc_comm *comm, tagc_task *task) {
    submit(&comm->workers[TAGC_WORKER_REDUCE], task);
}

void tagc_comm_submit_gather(tagc_comm *comm, tagc_task *task) {
    submit(&comm->workers[tagc_comm_has_lanes(comm) ? TAGC_WORKER_GATHER : TAGC_WORKER_REDUCE], task);
}

tagc_status tagc_comm_join(tagc_comm *comm, tagc_task *task) {
    if (tagc_comm_is_fork(comm)) return tagc_comm_check_open(comm);
    pthread_mutex_lock(&comm->lock);
    while (task->state != TASK_DONE) pthread_cond_wait(&comm->ended, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
    return task->status == TAGC_OK ? TAGC_OK : tagc_fail(task->status, "%s", task->error);
}
