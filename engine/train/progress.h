/* What a person sees while a run goes on: one line rewritten in place on a terminal, a line now and then
 * elsewhere. */
#ifndef TAGC_TRAIN_PROGRESS_H
#define TAGC_TRAIN_PROGRESS_H

#include "train/step_report.h"

typedef struct tagc_progress {
    int quiet, is_terminal;
    uint64_t n_steps;
    double shown_s; /* when the line was last written */
    /* since then: */
    uint64_t n_reports, n_tokens;
    double wall_s, compute_s, gather_s, reduce_s, optimizer_s, bits;
} tagc_progress;

void tagc_progress_init(tagc_progress *progress, int quiet, uint64_t n_steps);
void tagc_progress_step(tagc_progress *progress, const tagc_step_report *report);
/* A line that stays. */
void tagc_progress_say(tagc_progress *progress, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
