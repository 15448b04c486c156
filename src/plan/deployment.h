/* Inside of the module: a setup worked out as far as no time is needed. Per flat of the engine, who reduces what with
 * whom, and how large it is.
 *
 * Every placement is made of the two things that there are, a reducer and a gatherer of each flat:
 *
 *   none            an all-reduce over all ranks
 *   zero1, zero2    a reduce-scatter over all ranks; a gather once per step
 *   zero3           a reduce-scatter over all ranks; gathers for forward and again for backward
 *   hybrid          a reduce-scatter within a host and an all-reduce of the shard across hosts in one; gathers as zero3,
 *                   within a host */
#ifndef TAGC_PLAN_DEPLOYMENT_H
#define TAGC_PLAN_DEPLOYMENT_H

#include "exchange/volume.h"
#include "fsdp/gather_order.h"
#include "fsdp/layout.h"
#include "plan/plan.h"

typedef struct tagc_reduction {
    tagc_reducer_options options;
    int n_ranks;
    double remote_share; /* of bytes that leave the host; of those between hosts where it has two levels */
    double within_share; /* two levels: of bytes between the ranks of ranks_per_host */
    tagc_volume volume;  /* of one rank and step, mean over ranks */
    double union_density, kept_density;
    double load;     /* of a sketch: items of the union per cell; else 0 */
    double unpeeled; /* share of the union that it cannot give back */
} tagc_reduction;

/* Of one rank: what leaves at once, and in two levels what is relayed within the host when that has come. */
enum { TAGC_N_GATHER_LEVELS = 2 };
typedef struct tagc_gather_plan {
    double n_bytes[TAGC_N_GATHER_LEVELS];
    double remote_bytes[TAGC_N_GATHER_LEVELS];  /* of these, to other hosts */
    double message_bytes[TAGC_N_GATHER_LEVELS]; /* of these, to one other rank */
} tagc_gather_plan;

typedef struct tagc_flat_plan {
    tagc_reduction reduction;
    tagc_gather_plan gather; /* zeros when there is none */
    uint64_t n_owned;        /* masters of this rank */
} tagc_flat_plan;

typedef struct tagc_deployment {
    const tagc_setup *setup;
    tagc_fsdp_options engine; /* with the sharding of the placement */
    tagc_layout *layout;
    tagc_flat_plan *flats;        /* (layout->n_flats) */
    tagc_order_observer observer; /* of simulated steps; for tests */
} tagc_deployment;

/* Bytes of a leg that leave the host. */
double tagc_reduction_remote(const tagc_reduction *reduction, int leg);
/* Of the elements of a unit, those that are decoded: direct only. */
double tagc_reduction_decoded(const tagc_reduction *reduction);

/* On failure nothing is left behind. `setup` must outlive it. */
tagc_status tagc_deployment_create(const tagc_setup *setup, tagc_deployment *out);
void tagc_deployment_destroy(tagc_deployment *deployment);

void tagc_deployment_memory(const tagc_deployment *deployment, tagc_plan_memory *out);

/* ---- simulate.c ---- */

/* One optimizer step; costs NULL: everything is free, for counting bytes. remote: as forecast->n_bytes, of these to
 * other hosts. */
tagc_status tagc_deployment_run(const tagc_deployment *deployment, const tagc_costs *costs,
                                const tagc_plan_link *link, tagc_forecast *forecast,
                                double remote[TAGC_N_LEGS]);

#endif
