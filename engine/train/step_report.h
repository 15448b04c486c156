/* The results of one step, as the progress line and metrics.jsonl show them. */
#ifndef TAGC_TRAIN_STEP_REPORT_H
#define TAGC_TRAIN_STEP_REPORT_H

#include "fsdp/fsdp.h"
#include "launch/busy.h"

typedef struct tagc_step_report {
    uint64_t step; /* of this run, 1 is the first */
    double loss;   /* mean over ranks and micro-steps */
    double lr;
    uint64_t n_tokens; /* of this step, over all ranks */
    double wall_s;
    int world_size;
    tagc_fsdp_stats stats;
    tagc_busy_times busy;
} tagc_step_report;

#endif
