/* Which exchange each flat of an engine should have on a given machine and link: the mildest that is about as fast as
 * any, and nothing where compressing gains nothing. And how large the buckets of its units should be. */
#ifndef TAGC_PLAN_CHOOSE_H
#define TAGC_PLAN_CHOOSE_H

#include "plan/plan.h"

/* From here on a setting is a whole engine: what its compressed and its mild flats would do. */
typedef struct tagc_candidate {
    char name[48];
    tagc_reducer_options compressed, mild;
} tagc_candidate;

typedef struct tagc_choice {
    int candidate;       /* 0: none of the others is worth it */
    int n_flats, n_kept; /* flats that could be compressed, and those that the choice compresses */
    double dense_s, fastest_s, chosen_s; /* forecasts of an iteration */
    int fastest;
} tagc_choice;

/* candidates (n), mildest first; the first is dense. `tolerance`: a milder one may be so much slower than the fastest,
 * 0.02 for 2 %. flats (n_flats of the layout): what each should do. setup->flat_reducers is not read. */
tagc_status tagc_plan_choose(const tagc_setup *setup, const tagc_costs *costs, const tagc_plan_link *link,
                             const tagc_candidate *candidates, int n, double tolerance,
                             tagc_reducer_options *flats, tagc_choice *out);

typedef struct tagc_bucket_choice {
    uint64_t bucket_elems;      /* 0: none is worth it */
    int n_units;                /* that it makes of the model */
    double without_s, chosen_s; /* forecasts of an iteration */
} tagc_bucket_choice;

/* The smallest bucket_elems, of 0 and the powers of two, whose forecast is at most `tolerance` (0.02 for 2 %) slower than
 * that of the fastest. The setup's own bucket_elems and flat_reducers are not read. */
tagc_status tagc_plan_choose_bucket(const tagc_setup *setup, const tagc_costs *costs,
                                    const tagc_plan_link *link, double tolerance, tagc_bucket_choice *out);

#endif
