/* The metrics.jsonl of a run in memory, and several as one CSV, for tagc compare. */
#ifndef TAGC_FILES_RUNLOG_H
#define TAGC_FILES_RUNLOG_H

#include "files/result_file.h"
#include <jansson.h>

typedef struct tagc_runlog_step {
    double step, loss, lr, grad_norm, skipped, n_tokens, wall_s, total_s, compute_s, wait_gather_s,
        wait_reduce_s, optimizer_s, comm_s, overlap;
    double between_s;              /* wall_s minus total_s: reading data, agreeing with the other ranks */
    double bits[TAGC_N_LEGS];      /* before the factor (W-1)/W */
    double bits_sent[TAGC_N_LEGS]; /* as in the file: with it */
} tagc_runlog_step;

/* Unknown numbers are NaN. */
typedef struct tagc_runlog {
    const char *dir; /* as given to tagc_runlog_read, which does not copy it */
    char label[96];
    int world_size, n_steps, n_evals;
    double n_params, n_compressed;
    json_t *about;                   /* the first entry of type "run"; may be NULL */
    tagc_runlog_step *steps;         /* (n_steps) */
    double *eval_steps, *val_losses; /* (n_evals) */
    double n_val_tokens;             /* of the last of them */
} tagc_runlog;

/* dir: a run's folder, or its metrics.jsonl. TAGC_ERR_IO; TAGC_ERR_CORRUPT names the line. Ignores an incomplete last
 * line. */
tagc_status tagc_runlog_read(const char *dir, tagc_runlog *out);
void tagc_runlog_destroy(tagc_runlog *log);

/* runs (n): a header, then one row per run and step. An evaluation is in the row of its step. Columns are those of
 * metrics.jsonl; unknown numbers are empty. docs/reference/results-format.md lists them. */
tagc_status tagc_runlog_write_csv(const tagc_runlog *runs, int n, const char *path);

/* Median and mean of the field at `offset` over all steps but the first two, which warm up caches. */
double tagc_runlog_median(const tagc_runlog *log, size_t offset);
/* The median, and the least and largest of the middle 80 % of these steps, in which tagc-report compares runs, too. */
tagc_result_spread tagc_runlog_middle(const tagc_runlog *log, size_t offset);
double tagc_runlog_mean(const tagc_runlog *log, size_t offset);

#endif
