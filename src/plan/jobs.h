/* The work of a reducer on its worker, as a job of the clock. */
#ifndef TAGC_PLAN_JOBS_H
#define TAGC_PLAN_JOBS_H

#include "plan/clock.h"
#include "plan/deployment.h"

/* Seconds of work of one step over a whole unit. */
typedef struct tagc_phase_work {
    double phase_s[TAGC_N_PHASES];
    double send_within_s, add_within_s; /* two levels: before that, among the ranks of a host */
} tagc_phase_work;

/* TAGC_ERR_UNSUPPORTED if the costs lack the reduction's exchange. costs NULL: everything is free. */
tagc_status tagc_reduction_work(const tagc_reduction *reduction, const tagc_costs *costs,
                                tagc_phase_work *out);

tagc_status tagc_job_create(const tagc_reduction *reduction, const tagc_phase_work *work, tagc_sim_job *out);
void tagc_job_destroy(tagc_sim_job *job);

#endif
