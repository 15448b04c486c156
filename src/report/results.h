/* What a report is made from: everything that was read, brought to one form. docs/results-format.md describes the
 * files. Unknown numbers are NaN, unknown spreads have n = 0. */
#ifndef TAGC_REPORT_RESULTS_H
#define TAGC_REPORT_RESULTS_H

#include "report/runlog.h"
#include "report/trace_file.h"
#include <jansson.h>
#include <stdint.h>

enum {
    TAGC_PART_COMPUTE,
    TAGC_PART_GATHER, /* exposed: compute waits for parameters */
    TAGC_PART_REDUCE, /* exposed: compute waits for gradients */
    TAGC_PART_OPTIMIZER,
    TAGC_PART_OTHER,
    TAGC_N_PARTS
};
enum { TAGC_N_MEMORIES = 5 }; /* parameters, gradients, optimizer, residuals, buffers */
extern const char *const tagc_memory_names[TAGC_N_MEMORIES];
extern const char *const tagc_leg_names[TAGC_N_LEGS];

typedef struct tagc_spread {
    double middle, min, max; /* middle: median of times, mean of losses */
    int n;
} tagc_spread;

/* One way to train, as measured in one place or predicted. */
typedef struct tagc_result {
    char *name;
    int color; /* the same for one name on a whole page */
    int n_runs;
    tagc_spread total_s, exposed_s,
        speedup; /* of an optimizer step; speedup: over the first arm of the set */
    double part_s[TAGC_N_PARTS];
    double bits[TAGC_N_LEGS]; /* per parameter, rank and optimizer step, before the factor (W-1)/W */
    double memory[TAGC_N_MEMORIES];
    tagc_spread loss, gap; /* validation, at the last common step; gap: to the first arm, as a share */
    double n_params, n_compressed;
    json_t *options; /* may be NULL */
} tagc_result;

typedef enum tagc_set_kind { TAGC_SET_RUNS, TAGC_SET_BENCH, TAGC_SET_PLAN } tagc_set_kind;

/* Arms that may be held against each other; the first is the one that the others are held against. */
typedef struct tagc_set {
    tagc_set_kind kind;
    char *title;
    tagc_result *results; /* (n_results) */
    int n_results;
    const json_t *bench; /* TAGC_SET_BENCH: the result itself */
    double world_size, n_hosts, bits_per_s;
    int place; /* TAGC_SET_RUNS: as in the runs */
} tagc_set;

/* A row of a plan: simulated. */
typedef struct tagc_plan_point {
    const char *name, *placement, *model; /* name: the arm, with its placement where there are several */
    int color;
    double world_size, bits_per_s, iteration_s, exposed_s;
} tagc_plan_point;

/* A prediction beside what was measured. */
typedef struct tagc_plan_check {
    const char *arm, *place;
    double world_size, bits_per_s, measured_s, simulated_s, error;
    int is_held_out;
} tagc_plan_check;

typedef struct tagc_lab_case {
    const char *experiment, *rate;
    char *title;
    int set; /* its bench among the sets, or -1 */
    const json_t *settings;
    double tcp_one_way[2], tcp_both_ways[2]; /* bit/s: least and most of the hosts */
    double sent_bytes, received_bytes, overhead, n_hosts, n_ranks, mtu; /* bytes: of all interfaces */
} tagc_lab_case;

/* A group of runs that differ in their seeds only. */
typedef struct tagc_group {
    char *name, *key;
    int color, n_runs, place;
    int first; /* the group that it is held against: the first of the same place */
    int *runs; /* (n_runs) */
} tagc_group;

typedef struct tagc_source {
    char *path;
    const char *what;     /* "run", "bench", ... */
    json_t *root;         /* NULL for runs and traces */
    const json_t *origin; /* may be NULL */
} tagc_source;

typedef struct tagc_seen_file {
    uint64_t device, number;
} tagc_seen_file;

typedef struct tagc_report {
    tagc_source *sources;
    tagc_runlog *runs;
    tagc_group *groups;
    tagc_set *sets;
    tagc_trace_file *traces;
    tagc_plan_point *plan;
    tagc_plan_check *checks;
    tagc_lab_case *cases;
    char **notes;         /* what a reader of the report must know about its inputs */
    char **names;         /* of arms, by colour */
    void **texts;         /* owned */
    tagc_seen_file *seen; /* that were added */
    int n_seen, n_sources, n_runs, n_groups, n_sets, n_traces, n_plan, n_checks, n_cases, n_notes, n_names,
        n_texts;
} tagc_report;

/* Adds what is at `path`: a run's folder, metrics, a trace or a result, told apart by what they hold.
 * TAGC_ERR_IO, or TAGC_ERR_CORRUPT naming the file, the place and what is missing. A folder that is no run's is noted
 * and left out; what is named once more, as in `runs/first runs/` and a star, counts once. */
tagc_status tagc_report_add(tagc_report *report, const char *path);

/* After the last _add: groups runs, and puts arms side by side. */
tagc_status tagc_report_finish(tagc_report *report);

void tagc_report_destroy(tagc_report *report); /* accepts a zeroed one */

/* ---- for the readers ---- */
/* Room for one more of `item_bytes`, zeroed, at the end of *array (n); NULL and a failure when out of memory. */
void *tagc_report_grow(void *array, int *n, size_t item_bytes);
char *tagc_report_text(tagc_report *report, const char *format, ...) __attribute__((format(printf, 2, 3)));
tagc_status tagc_report_note(tagc_report *report, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
int tagc_report_color(tagc_report *report, const char *name);
tagc_result *tagc_set_add(tagc_report *report, tagc_set *set, const char *name);

/* root is kept by the report. */
tagc_status tagc_report_add_bench(tagc_report *report, const json_t *bench, const char *file,
                                  const char *place);
/* What bench, plan and lab share. Legs that are not named did not travel. */
struct tagc_json_place;
tagc_set *tagc_report_new_set(tagc_report *report);
tagc_status tagc_result_read_legs(const json_t *parent, const char *name, const struct tagc_json_place *at,
                                  double legs[TAGC_N_LEGS]);
void tagc_result_read_memory(const json_t *object, double memory[TAGC_N_MEMORIES]);
tagc_status tagc_result_read_spread(const json_t *parent, const char *name, const struct tagc_json_place *at,
                                    tagc_spread *out);
tagc_status tagc_report_add_plan(tagc_report *report, const json_t *plan, const char *file);
tagc_status tagc_report_add_lab(tagc_report *report, const json_t *lab, const char *file);
tagc_status tagc_report_add_trace(tagc_report *report, const char *path, const char *label);
tagc_status tagc_report_make_runs(tagc_report *report);

/* Validation loss of `group` over that of `first` less 1, at `step`: of runs with the same seed where there are such,
 * else against the mean of `first`. Of a group to itself: how far its runs are from their mean. */
tagc_spread tagc_group_gap(const tagc_report *report, const tagc_group *group, const tagc_group *first,
                           double step);

tagc_spread tagc_spread_of(double *values, int n, int is_mean); /* sorts; leaves out what is not finite */

#endif
