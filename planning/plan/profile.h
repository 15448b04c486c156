/* Measured iterations, from the results of tagc bench and of the lab, and costs fitted to them. */
#ifndef TAGC_PLAN_PROFILE_H
#define TAGC_PLAN_PROFILE_H

#include "plan/plan.h"
#include <jansson.h>

enum { TAGC_POINT_NAME_BYTES = 96, TAGC_POINT_PLACE_BYTES = 192 };

/* One arm on one link. */
typedef struct tagc_point {
    char arm[TAGC_POINT_NAME_BYTES];
    char place[TAGC_POINT_PLACE_BYTES]; /* file, world size and link, for messages */
    tagc_setup setup;
    tagc_plan_link link;
    double union_density;                   /* of the compressed flats; < 0: no index is sent */
    double total_s, compute_s, optimizer_s; /* medians of an iteration */
    double byte_s;                          /* of memory; 0: not measured */
    double cores;                           /* of a machine */
    int is_held_out;                        /* 1: not fitted */
} tagc_point;

typedef struct tagc_points {
    tagc_point *points;
    int n_points;
    tagc_codec_cost codec[TAGC_MAX_CODEC_COSTS];
    int n_codec;
    tagc_gather_cost gather[TAGC_N_GATHER_KINDS];
    char model[TAGC_POINT_NAME_BYTES]; /* of the first file */
    char blas
        [TAGC_POINT_NAME_BYTES]; /* of the first file: what computed its products; "": the file does not say */
} tagc_points;

/* The engine's options from a result's "options" of an arm. */
typedef tagc_status (*tagc_read_engine)(const json_t *options, tagc_fsdp_options *out);

/* Adds the arms of a bench result, or of the benches of a lab result: of all cases, or of case NUMBER if path is
 * "FILE:NUMBER" (from 0). TAGC_ERR_IO; TAGC_ERR_CORRUPT names the file and what is missing. */
tagc_status tagc_points_read(tagc_points *points, const char *path, tagc_read_engine read_engine);
/* The same for "PATH[,PATH]...". TAGC_ERR_ARGUMENT for an empty path. */
tagc_status tagc_points_read_list(tagc_points *points, const char *list, tagc_read_engine read_engine);
void tagc_points_destroy(tagc_points *points);

/* 1 if a point of that sparsity shows the overlap of the selections of ranks: sets *density, of the union of n_ranks. A
 * measurement with another number of ranks is extrapolated: each rank after the first adds the same fraction of an
 * independent selection. */
int tagc_points_union(const tagc_points *points, double sparsity, int n_ranks, double *density);

/* 1 if a point of that sparsity shows what direct keeps, which is less if gradients are zero. */
int tagc_points_sent(const tagc_points *points, double sparsity, double *density);

/* Costs with which the simulated iterations fit the measured ones, over all points that are not held out. *rms is the root
 * mean square of log(simulated / measured). TAGC_ERR_ARGUMENT if there is nothing to fit. */
tagc_status tagc_costs_fit(const tagc_points *points, tagc_costs *out, double *rms);

#endif
