/* The rows of a plan: what one setup holds and sends, and how long a step takes on each link.
 *
 *   costs.c       costs, fitted to a profile or given; densities of a profile
 *   rows.c        one row
 *   card.c        what passes a host's network card
 *   verdict.c     whether compression pays
 *   checks.c      forecasts beside measured iterations
 *   rows_json.c   rows as JSON */
#ifndef TAGC_PLAN_ROWS_H
#define TAGC_PLAN_ROWS_H

#include "plan/plan.h"
#include "plan/profile.h"

enum { TAGC_PLAN_MAX_LIST = 16 };

/* What all rows share. */
typedef struct tagc_plan_inputs {
    char model_name[64];
    const char *profile_name; /* NULL: no profile */
    tagc_points profile;      /* no points: no profile */
    tagc_costs costs;
    int has_costs;
    double fit_rms; /* of the fit to the profile */
    tagc_plan_link links[TAGC_PLAN_MAX_LIST];
    double line_bits_per_s[TAGC_PLAN_MAX_LIST]; /* 0: the rate of the payload was given, or measured */
    int n_links;
    int has_host_rate;
    /* Of the union of what ranks keep; 0: as in the profile, else as if they chose independently. */
    double union_density;
} tagc_plan_inputs;

/* Bytes that all ranks of a host send to other hosts in an optimizer step, and as many that they get, in ways other than the
 * row's own; NaN where hosts have one rank, for hybrid sharding, and where a way does not exist. */
typedef struct tagc_plan_card {
    double ring;       /* a ring of all ranks, as NCCL's; of what is not compressed */
    double one_level;  /* each rank exchanges with all others by itself */
    double two_levels; /* the ranks of a host add first, and share what they gather */
} tagc_plan_card;

/* One arm in one placement. The caller sets the fields up to `setup`, but not the densities of the setup. */
typedef struct tagc_plan_row {
    const char *arm; /* its name */
    tagc_setup setup;
    const char *union_source; /* NULL: nothing indexed */
    int is_union_guessed;     /* from the number of senders */
    tagc_plan_volume volume;
    tagc_plan_card card;
    tagc_plan_memory memory;
    tagc_forecast forecasts[TAGC_PLAN_MAX_LIST]; /* (n_links) iteration_s 0: none */
    char note[256];                              /* why there is none, or "" */
} tagc_plan_row;

/* Fits the costs to the profile's arms that are in the list `arms`; NULL: to all. TAGC_ERR_ARGUMENT if there are none. */
tagc_status tagc_plan_fit_costs(tagc_plan_inputs *inputs, const char *arms);
/* Costs without a profile. compute_s: forward and backward pass of `setup`; codec_ns: all phases of any exchange, per
 * element, 0: unknown; optimizer_ns: the update, per element. */
void tagc_plan_take_costs(tagc_plan_inputs *inputs, const tagc_setup *setup, double compute_s,
                          double codec_ns, double optimizer_ns);
/* The smallest and the largest world size and link rate that the costs were fitted to: beyond them a forecast is an
 * extrapolation. All 0 without a profile. */
void tagc_points_seen(const tagc_points *points, int world_sizes[2], double bytes_per_s[2]);
/* Ranks of the largest world that the costs were fitted to; 0 without a profile. */
int tagc_plan_largest_seen(const tagc_plan_inputs *inputs);

/* Each link with each latency, the first link first. links (n_links): only bytes_per_s and line_bits_per_s are set. The
 * profile says how much longer large messages take. TAGC_ERR_ARGUMENT if these are more than TAGC_PLAN_MAX_LIST. */
tagc_status tagc_plan_cross_links(tagc_plan_inputs *inputs, const double *latencies_s, int n_latencies,
                                  double host_bytes_per_s);

/* Counts and forecasts the row's setup. Without a forecast the row has a note. TAGC_ERR_ARGUMENT and TAGC_ERR_UNSUPPORTED
 * name what the setup cannot be. */
tagc_status tagc_plan_make_row(const tagc_plan_inputs *inputs, tagc_plan_row *row);
/* Counts row->card. */
void tagc_plan_count_card(tagc_plan_row *row);
/* Bytes of a rank and optimizer step as bits per parameter, before the factor (W-1)/W. */
double tagc_plan_bits(const tagc_plan_row *row, double n_bytes, uint64_t n_params);
double tagc_plan_sum(const double legs[TAGC_N_LEGS]);

/* The fastest row over a link without compression, the fastest with it, and what their forecasts say. */
typedef struct tagc_plan_answer {
    const tagc_plan_row *plain, *packed;
    double speedup;
    tagc_verdict verdict;
} tagc_plan_answer;

/* Returns 0 if rows of either kind lack a time. */
int tagc_plan_judge(const tagc_plan_row *rows, int n, int link, tagc_plan_answer *out);

typedef struct tagc_plan_checked {
    double simulated_s, error; /* error: simulated / measured - 1 */
    int is_fitted;             /* 1: the costs were fitted to this point */
} tagc_plan_checked;

typedef struct tagc_plan_accuracy {
    int n_held_out; /* points that the costs were not fitted to */
    double most_error, mean_error;
    int n_places, n_right; /* places with several arms, and those in which the simulation names the fastest */
    double most_slower;    /* by how much the named arm was slower elsewhere; 0.1 means 10 % */
} tagc_plan_accuracy;

/* checked (n_points). */
tagc_status tagc_plan_check(const tagc_plan_inputs *inputs, const tagc_points *points,
                            tagc_plan_checked *checked, tagc_plan_accuracy *accuracy);

/* rows (n): of one world size. link: -1 when there is none. Takes `origin`. */
json_t *tagc_plan_json(const tagc_plan_inputs *inputs, const tagc_plan_row *rows, int n, int link,
                       json_t *origin);
json_t *tagc_plan_checks_json(const tagc_points *points, const tagc_plan_checked *checked);

#endif
