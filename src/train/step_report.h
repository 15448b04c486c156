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
    double kept_factor, residual_norm; /* of the guard, at the end of the step; 0 and 0 without one */
} tagc_step_report;

/* Bits per parameter before the factor (W-1)/W, over all legs in [first, last]; 0 for one rank. */
double tagc_step_report_bits(const tagc_step_report *report, int first_leg, int last_leg);

/* Share of the exchange (codec and comm work) during which compute went on: [0, 1]. */
double tagc_step_report_overlap(const tagc_step_report *report);

#endif
