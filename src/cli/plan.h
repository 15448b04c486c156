/* tagc plan: memory, bytes and simulated time of deployments that need not exist.
 *
 *   plan.c        options and what they mean
 *   plan_rows.c   one world size: rows, one per arm and placement; tables and JSON
 *   plan_check.c  costs: fitted to measured iterations, shown, and held against others */
#ifndef TAGC_CLI_PLAN_H
#define TAGC_CLI_PLAN_H

#include "bench/arms.h"
#include "plan/choose.h"
#include "plan/plan.h"
#include "plan/profile.h"

enum { TAGC_PLAN_MAX_LIST = 16 };

typedef struct tagc_plan_options {
    tagc_train_options train; /* first: rows shared with tagc train have the offsets of its struct */
    const char *config_json, *arms, *world_size, *link_rate, *latency, *host_rate, *placement;
    const char *profile, *check, *fit_arms, *json;
    int64_t hosts, ranks_per_host; /* 0: not given */
    double bytes_per_s, union_density, compute_s, codec_ns, optimizer_ns;
} tagc_plan_options;

/* What was asked for, read and checked. */
typedef struct tagc_plan_request {
    tagc_plan_options options;
    int argc;
    char **argv;
    tagc_gpt2_config model;
    char model_name[64];
    int n_tokens;
    tagc_arm *arms;
    int n_arms;
    int worlds[TAGC_PLAN_MAX_LIST], placements[TAGC_PLAN_MAX_LIST];
    double latencies_s[TAGC_PLAN_MAX_LIST];
    int n_latencies;
    tagc_plan_link links[TAGC_PLAN_MAX_LIST];   /* each rate with each latency */
    double line_bits_per_s[TAGC_PLAN_MAX_LIST]; /* 0: the rate of the payload was given, or measured */
    int n_worlds, n_placements, n_links;        /* no placements: each arm's own */
    tagc_points profile, check;
    tagc_costs costs;
    int has_costs;
    double fit_rms;
} tagc_plan_request;

/* One arm in one placement. */
typedef struct tagc_plan_row {
    const tagc_arm *arm;
    tagc_setup setup;
    const char *union_source;                       /* NULL: nothing indexed */
    tagc_bucket_choice buckets[TAGC_PLAN_MAX_LIST]; /* (n_links) of an arm with bucket-elems=auto */
    tagc_plan_volume volume;                        /* with the first link's buckets */
    tagc_plan_memory memory;
    tagc_forecast forecasts[TAGC_PLAN_MAX_LIST]; /* (n_links) iteration_s 0: none */
    char note[256];                              /* why there is none, or "" */
} tagc_plan_row;

/* "FILE[,FILE]..." into points; engine options are read as tagc train's. */
tagc_status tagc_plan_read_points(const char *list, tagc_points *out);
/* From --profile, or from what was given by hand. */
tagc_status tagc_plan_find_costs(tagc_plan_request *request);
void tagc_plan_print_costs(const tagc_plan_request *request);
/* Simulates every point of --check and prints it beside what was measured. *out: list, or NULL without --check. */
tagc_status tagc_plan_check(const tagc_plan_request *request, json_t **out);
/* Ranks of the largest world that the costs were fitted to; 0 without a profile. */
int tagc_plan_largest_seen(const tagc_plan_request *request);
json_t *tagc_plan_costs_json(const tagc_plan_request *request);

/* Prints the plan of world size number `world`, and appends one object per link to `results`. */
tagc_status tagc_plan_world(const tagc_plan_request *request, int world, json_t *results);

#endif
