/* tagc plan: memory, bytes and simulated time of deployments that need not exist.
 *
 *   plan.c        options and what they mean
 *   plan_rows.c   one world size: a row per arm and placement, and its tables
 *   plan_check.c  tables of the costs and of how far predictions are from measurements
 *   plan_cluster.c  a plan of a model and a cluster by size, in place of the above
 *
 * planning/plan/ computes what they print. */
#ifndef TAGC_CLI_PLAN_H
#define TAGC_CLI_PLAN_H

#include "bench/arms.h"
#include "plan/rows.h"

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
    const tagc_parsed *parsed;
    tagc_gpt2_config model;
    int n_tokens;
    tagc_arm *arms;
    int n_arms;
    int worlds[TAGC_PLAN_MAX_LIST], placements[TAGC_PLAN_MAX_LIST];
    double latencies_s[TAGC_PLAN_MAX_LIST];
    int n_latencies;
    int n_worlds, n_placements; /* no placements: each arm's own */
    tagc_points check;
    tagc_plan_inputs inputs; /* its links: each rate with each latency */
} tagc_plan_request;

/* From --profile, or from what was given by hand. */
tagc_status tagc_plan_find_costs(tagc_plan_request *request);
void tagc_plan_print_costs(const tagc_plan_request *request);
/* Simulates every point of --check and prints it beside what was measured. *out: list, or NULL without --check. */
tagc_status tagc_plan_hold_checks(const tagc_plan_request *request, json_t **out);

/* Prints the plan of world size number `world`, and appends one object per link to `results`. */
tagc_status tagc_plan_world(const tagc_plan_request *request, int world, json_t *results);

/* Sets *entry to that of a plan by size if an option is only of that, or --model has such a model. own: the command of this plan.
 * TAGC_ERR_ARGUMENT if others are only of this plan. */
struct tagc_entry;
tagc_status tagc_plan_choose(const tagc_command *own, int argc, char **argv, const struct tagc_entry **entry);

#endif
