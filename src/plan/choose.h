/* Chooses the exchange of each flat of an engine for a machine and link: the mildest that is about as fast as the fastest,
 * and dense if compression gains nothing. Also chooses the size of buckets. */
#ifndef TAGC_PLAN_CHOOSE_H
#define TAGC_PLAN_CHOOSE_H

#include "plan/plan.h"

/* A setting of the whole engine: the exchange of its compressed and of its mild flats. */
typedef struct tagc_candidate {
    char name[48];
    tagc_reducer_options compressed, mild;
} tagc_candidate;

typedef struct tagc_choice {
    int candidate;       /* 0: no other is worth it */
    int n_flats, n_kept; /* flats that could be compressed, and those that the choice compresses */
    double dense_s, fastest_s, chosen_s; /* forecasts of an iteration */
    int fastest;
} tagc_choice;

/* candidates (n), mildest first; the first is dense. tolerance: a milder one may be so much slower than the fastest; 0.02
 * means 2 %. flats (n_flats of the layout): receives the choice for each. Does not read setup->flat_reducers. */
tagc_status tagc_plan_choose(const tagc_setup *setup, const tagc_costs *costs, const tagc_plan_link *link,
                             const tagc_candidate *candidates, int n, double tolerance,
                             tagc_reducer_options *flats, tagc_choice *out);

typedef struct tagc_bucket_choice {
    uint64_t bucket_elems;      /* 0: none is worth it */
    int n_units;                /* units of the model with it */
    double without_s, chosen_s; /* forecasts of an iteration */
} tagc_bucket_choice;

/* The smallest bucket_elems, of 0 and the powers of two, whose forecast is at most `tolerance` (0.02 means 2 %) slower than
 * that of the fastest. Does not read the setup's bucket_elems and flat_reducers. */
tagc_status tagc_plan_choose_bucket(const tagc_setup *setup, const tagc_costs *costs,
                                    const tagc_plan_link *link, double tolerance, tagc_bucket_choice *out);

#endif
