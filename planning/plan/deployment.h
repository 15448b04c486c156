/* Inside of the module: everything about a setup that does not need the simulation. For each flat of the engine, its
 * reducer and gatherer, their ranks and bytes.
 *
 * Every sharding combines a reducer and a gatherer per flat:
 *
 *   none     an all-reduce over all ranks
 *   grad     a reduce-scatter over all ranks; a gather once per step
 *   full     a reduce-scatter over all ranks; gathers for forward and again for backward
 *   hybrid   one reduction: a reduce-scatter within a host and an all-reduce of the shard across hosts; gathers as full,
 *            within a host */
#ifndef TAGC_PLAN_DEPLOYMENT_H
#define TAGC_PLAN_DEPLOYMENT_H

#include "exchange/volume.h"
#include "fsdp/gather_order.h"
#include "fsdp/layout.h"
#include "plan/clock.h"
#include "plan/plan.h"

typedef struct tagc_reduction {
    tagc_reducer_options options; /* of what is sent between hosts */
    int n_ranks;                  /* that exchange this: W, or in two levels those of a place */
    int n_adding;                 /* two levels: ranks of a host that add up first; else 1 */
    /* Bytes of one rank and step, mean over ranks: between hosts, and of what the ranks of a host send each other. */
    tagc_volume volume, within;
    double remote_share,
        within_share; /* of these, what leaves the host: groups of n_adding ranks may not be the real hosts */
    double sent_density;
} tagc_reduction;

/* Of one rank. Level 0 is sent at once; in two levels, level 1 goes within the host when level 0 has arrived. */
enum { TAGC_N_GATHER_LEVELS = 2 };
typedef struct tagc_gather_plan {
    double n_bytes[TAGC_N_GATHER_LEVELS];
    double remote_bytes[TAGC_N_GATHER_LEVELS]; /* of these, to other hosts */
} tagc_gather_plan;

typedef struct tagc_flat_plan {
    tagc_reduction reduction;
    tagc_gather_plan gather; /* zeros if there is none */
    uint64_t n_owned;        /* masters of this rank */
} tagc_flat_plan;

typedef struct tagc_deployment {
    const tagc_setup *setup;
    tagc_layout *layout;
    tagc_flat_plan *flats;        /* (layout->n_flats) */
    tagc_order_observer observer; /* sees simulated steps; for tests */
} tagc_deployment;

/* Bytes of a leg, and those that leave the host. */
double tagc_reduction_bytes(const tagc_reduction *reduction, int leg);
double tagc_reduction_remote(const tagc_reduction *reduction, int leg);
/* The share of the elements of a unit that are decoded; only for direct. */
double tagc_reduction_decoded(const tagc_reduction *reduction);

/* On failure nothing stays allocated. `setup` must outlive `out`. */
tagc_status tagc_deployment_create(const tagc_setup *setup, tagc_deployment *out);
void tagc_deployment_destroy(tagc_deployment *deployment);

/* ---- simulate.c ---- */

/* Simulates one optimizer step. costs NULL: everything is free, to count bytes. */
tagc_status tagc_deployment_run(const tagc_deployment *deployment, const tagc_costs *costs,
                                const tagc_plan_link *link, tagc_forecast *forecast);

#endif
