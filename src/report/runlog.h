/* A run's metrics.jsonl read back: what compare and reports work on. */
#ifndef TAGC_REPORT_RUNLOG_H
#define TAGC_REPORT_RUNLOG_H

#include "tagc/tagc.h"
#include <jansson.h>

enum { TAGC_MAX_LINKS = 4 };

typedef struct tagc_runlog_step {
    double step, loss, wall_s, total_s, compute_s, wait_gather_s, wait_reduce_s, optimizer_s, comm_s, overlap;
    double between_s;         /* wall_s less total_s: reading data, agreeing with the other ranks */
    double bits[TAGC_N_LEGS]; /* before the factor (W-1)/W */
    double sparsity, n_unpeeled, n_lost;
} tagc_runlog_step;

typedef struct tagc_runlog {
    char label[96];
    int world_size, n_steps, n_evals;
    double n_params, n_compressed;
    double seed;                     /* NaN when not known */
    int is_torn;                     /* the last line was not whole and was passed over */
    json_t *about;                   /* the first entry of type "run"; may be NULL */
    tagc_runlog_step *steps;         /* (n_steps) */
    double *eval_steps, *val_losses; /* (n_evals) */
    /* Of the lab's runs, whose steps are not known: */
    int place;                /* 1 and up: the case; 0: a folder */
    double bits[TAGC_N_LEGS]; /* mean over steps */
    double total_s[3];        /* of a step: median, least, most; of n_total steps */
    double link_bits_per_s[TAGC_MAX_LINKS], link_step_s[TAGC_MAX_LINKS]; /* simulated, n_links of them */
    int n_links;
    int n_total;
} tagc_runlog;

/* dir: a run's folder, or its metrics.jsonl. TAGC_ERR_IO, or TAGC_ERR_CORRUPT with the line. A torn last line is
 * passed over. */
tagc_status tagc_runlog_read(const char *dir, tagc_runlog *out);
void tagc_runlog_destroy(tagc_runlog *log);
tagc_status tagc_runlog_add_eval(tagc_runlog *log, double step, double val_loss);

/* Median and mean of the field at `offset` over the steps but the first two, which warm caches up. */
double tagc_runlog_median(const tagc_runlog *log, size_t offset);
double tagc_runlog_mean(const tagc_runlog *log, size_t offset);
/* The first step that does not warm up. */
int tagc_runlog_first(const tagc_runlog *log);

#endif
