/* DIR/metrics.jsonl: one JSON object per line, flushed per line, so that a run can be followed and survives
 * its end.
 *
 *   {"type": "run", ...}   model, options, world size, blas; one per start or resume
 *   {"type": "step", "step": 1, "loss": ..., ...}   "levels": units at each level of the schedule; absent if none follows it
 *   {"type": "eval", "step": 100, "val_loss": ..., "n_tokens": over so many} */
#ifndef TAGC_TRAIN_METRICS_H
#define TAGC_TRAIN_METRICS_H

#include "disk/paths.h"
#include "train/step_report.h"
#include <jansson.h>

typedef struct tagc_metrics tagc_metrics;

/* Makes DIR and appends to what is there. Refuses a DIR that another process writes to now; it stays refused
 * to others until _close. */
tagc_status tagc_metrics_open(const char *dir, tagc_metrics **out);
/* Fails if a run has the folder open for writing, as _open does. Not for a process that has it open itself. */
tagc_status tagc_metrics_check_free(const char *dir);
/* Drops the lines past `step` (-1: all), and those that are no records. Where one of these is not the last line, which a killed run
 * may leave torn, the file as it was is first copied to metrics.jsonl.damaged; with -1 any file but an empty one to
 * metrics.jsonl.before. Where that is taken, .2 follows, and so on. aside gets the path, else "". */
tagc_status tagc_metrics_rewind(tagc_metrics *metrics, int64_t step, char aside[TAGC_PATH_BYTES]);
tagc_status tagc_metrics_run(tagc_metrics *metrics, json_t *run); /* takes the reference over */
tagc_status tagc_metrics_step(tagc_metrics *metrics, const tagc_step_report *report);
tagc_status tagc_metrics_eval(tagc_metrics *metrics, uint64_t step, double val_loss, uint64_t n_tokens);
void tagc_metrics_close(tagc_metrics *metrics); /* accepts NULL */

#endif
