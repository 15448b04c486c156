/* The worker of a comm: the codec stream beside the caller, and the spare residuals that its jobs take turns
 * with. */
#include "core/memory.h"
#include "transport/comm_private.h"

#include <stdio.h>

enum { JOB_SUBMITTED = 1, JOB_DONE = 2 };

static void start(tagc_job *job) {
    if (job->start && !job->started) job->start(job->arg);
    job->started = 1;
}

/* Of the worker itself: nobody else takes jobs away, so the one in front stays where it is. */
static tagc_job *first_waiting(tagc_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    tagc_job *job = comm->jobs;
    pthread_mutex_unlock(&comm->lock);
    return job;
}

static tagc_status run(tagc_comm *comm, tagc_job *job) {
    start(job);
    TAGC_TRY(job->run(job->arg));
    if (!job->finish) return TAGC_OK;
    tagc_job *next = first_waiting(comm);
    if (next) start(next);
    return job->finish(job->arg);
}

void *tagc_comm_worker_main(void *arg) {
    tagc_comm *comm = arg;
    pthread_mutex_lock(&comm->lock);
    for (;;) {
        while (!comm->jobs && !comm->stopping) pthread_cond_wait(&comm->work, &comm->lock);
        tagc_job *job = comm->jobs;
        if (!job) break;
        comm->jobs = job->next;
        if (!comm->jobs) comm->jobs_end = &comm->jobs;
        pthread_mutex_unlock(&comm->lock);

        tagc_status status = run(comm, job);
        if (status != TAGC_OK) snprintf(job->error, sizeof job->error, "%s", tagc_last_error());

        pthread_mutex_lock(&comm->lock);
        job->status = status;
        job->state = JOB_DONE;
        pthread_cond_broadcast(&comm->done);
    }
    pthread_mutex_unlock(&comm->lock);
    return NULL;
}

void tagc_comm_submit(tagc_comm *comm, tagc_job *job) {
    job->status = TAGC_OK;
    job->error[0] = 0;
    job->started = 0;
    job->next = NULL;
    pthread_mutex_lock(&comm->lock);
    job->state = JOB_SUBMITTED;
    *comm->jobs_end = job;
    comm->jobs_end = &job->next;
    pthread_cond_signal(&comm->work);
    pthread_mutex_unlock(&comm->lock);
}

tagc_status tagc_comm_join(tagc_comm *comm, tagc_job *job) {
    pthread_mutex_lock(&comm->lock);
    while (job->state != JOB_DONE) pthread_cond_wait(&comm->done, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
    return job->status == TAGC_OK ? TAGC_OK : tagc_fail(job->status, "%s", job->error);
}

/* ---- spares ---- */

static tagc_status spare_create(uint64_t n_elems, tagc_spare **out) {
    if (n_elems > SIZE_MAX / sizeof(float))
        return tagc_fail(TAGC_ERR_MEMORY, "a spare residual of %llu elements does not fit into memory",
                         (unsigned long long)n_elems);
    void *memory, *values;
    TAGC_TRY(tagc_memory_create(sizeof(tagc_spare), "spare residual", &memory));
    tagc_status status = tagc_memory_create((size_t)n_elems * sizeof(float), "spare residual", &values);
    if (status != TAGC_OK) {
        tagc_memory_destroy(memory);
        return status;
    }
    *out = memory;
    **out = (tagc_spare){.n_elems = n_elems, .values = values};
    return TAGC_OK;
}

tagc_status tagc_comm_spare_acquire(tagc_comm *comm, uint64_t n_elems, tagc_spare **out) {
    tagc_status status = TAGC_OK;
    pthread_mutex_lock(&comm->lock);
    tagc_spare *spare = comm->spares;
    while (spare && spare->n_elems != n_elems) spare = spare->next;
    if (!spare) {
        status = spare_create(n_elems, &spare);
        if (status == TAGC_OK) {
            spare->next = comm->spares;
            comm->spares = spare;
        }
    }
    if (status == TAGC_OK) spare->n_users++;
    pthread_mutex_unlock(&comm->lock);
    *out = status == TAGC_OK ? spare : NULL;
    return status;
}

void tagc_comm_spare_release(tagc_comm *comm, tagc_spare *spare) {
    if (!spare) return;
    pthread_mutex_lock(&comm->lock);
    int last = --spare->n_users == 0;
    if (last) {
        tagc_spare **link = &comm->spares;
        while (*link != spare) link = &(*link)->next;
        *link = spare->next;
    }
    pthread_mutex_unlock(&comm->lock);
    if (!last) return;
    tagc_memory_destroy(spare->values);
    tagc_memory_destroy(spare);
}
