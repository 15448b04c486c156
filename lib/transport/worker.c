/* The workers of a comm: one runs the codec for reducers, another for gathers. */
#include "core/clock.h"
#include "transport/comm_private.h"

#include <stdio.h>

enum { JOB_SUBMITTED = 1, JOB_DONE = 2 };

/* With the lock. */
static void take_submitted(tagc_worker *worker, tagc_job **active) {
    while (*active) active = &(*active)->next;
    *active = worker->jobs;
    worker->jobs = NULL;
    worker->jobs_end = &worker->jobs;
}

static uint32_t lane_set(const tagc_comm *comm, uint32_t lanes) {
    return tagc_comm_has_lanes(comm) ? lanes : lanes != 0;
}

/* The link to the oldest job that can go on, or NULL if none can. */
static tagc_job **find_ready(tagc_comm *comm, tagc_job **active) {
    uint32_t taken = 0; /* by older jobs */
    for (; *active; active = &(*active)->next) {
        tagc_job *job = *active;
        if (!(lane_set(comm, job->next_lanes) & taken) && (!job->is_ready || job->is_ready(job->arg)))
            return active;
        taken |= lane_set(comm, job->later_lanes);
    }
    return NULL;
}

static void run(tagc_comm *comm, tagc_job **link, double idle_s) {
    tagc_job *job = *link;
    job->more = 0;
    job->idle_s = idle_s;
    tagc_status status = job->run(job->arg);
    if (status == TAGC_OK && job->more) return;
    if (status != TAGC_OK) snprintf(job->error, sizeof job->error, "%s", tagc_last_error());
    pthread_mutex_lock(&comm->lock);
    *link = job->next;
    job->status = status;
    job->state = JOB_DONE; /* the submitter may free the memory from here on */
    pthread_cond_broadcast(&comm->ended);
    pthread_mutex_unlock(&comm->lock);
}

void *tagc_comm_worker_main(void *arg) {
    tagc_worker *worker = arg;
    tagc_comm *comm = worker->comm;
    tagc_job *active = NULL; /* in order of submission */
    double idle_s = 0;
    pthread_mutex_lock(&comm->lock);
    for (;;) {
        while (!worker->jobs && !active && !comm->stopping) {
            worker->is_idle = 1;
            pthread_cond_wait(&worker->work, &comm->lock);
        }
        if (!worker->jobs && !active) break;
        worker->is_idle = 0;
        worker->n_done_seen = comm->n_done;
        take_submitted(worker, &active);
        pthread_mutex_unlock(&comm->lock);

        tagc_job **ready = find_ready(comm, &active);
        if (ready) run(comm, ready, idle_s);
        idle_s = ready ? 0 : idle_s;

        pthread_mutex_lock(&comm->lock);
        if (ready) continue;
        double start_s = tagc_clock_s();
        worker->is_idle = worker->awaits_tickets = 1;
        while (!worker->jobs && comm->n_done == worker->n_done_seen)
            pthread_cond_wait(&worker->work, &comm->lock);
        worker->awaits_tickets = 0;
        idle_s += tagc_clock_s() - start_s;
    }
    pthread_mutex_unlock(&comm->lock);
    return NULL;
}

static void submit(tagc_worker *worker, tagc_job *job) {
    tagc_comm *comm = worker->comm;
    if (!job->is_ready) job->next_lanes = job->later_lanes = TAGC_ALL_LANES;
    job->status = TAGC_OK;
    job->error[0] = 0;
    job->next = NULL;
    pthread_mutex_lock(&comm->lock);
    job->state = JOB_SUBMITTED;
    *worker->jobs_end = job;
    worker->jobs_end = &job->next;
    pthread_cond_signal(&worker->work);
    pthread_mutex_unlock(&comm->lock);
}

int tagc_comm_has_ended(tagc_comm *comm, const tagc_job *job) {
    pthread_mutex_lock(&comm->lock);
    int has_ended = job->state == JOB_DONE;
    pthread_mutex_unlock(&comm->lock);
    return has_ended;
}

void tagc_comm_submit(tagc_comm *comm, tagc_job *job) {
    submit(&comm->workers[TAGC_WORKER_REDUCE], job);
}

void tagc_comm_submit_gather(tagc_comm *comm, tagc_job *job) {
    submit(&comm->workers[tagc_comm_has_lanes(comm) ? TAGC_WORKER_GATHER : TAGC_WORKER_REDUCE], job);
}

tagc_status tagc_comm_join(tagc_comm *comm, tagc_job *job) {
    pthread_mutex_lock(&comm->lock);
    while (job->state != JOB_DONE) pthread_cond_wait(&comm->ended, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
    return job->status == TAGC_OK ? TAGC_OK : tagc_fail(job->status, "%s", job->error);
}
