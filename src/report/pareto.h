/* Loss against bits: which arms nothing else beats in both. */
#ifndef TAGC_REPORT_PARETO_H
#define TAGC_REPORT_PARETO_H

#include "report/results.h"

enum { TAGC_MAX_PARETO = 128 };

typedef struct tagc_pareto_point {
    const tagc_set *set;
    const tagc_result *result;
    double bits;     /* per parameter, rank and step */
    tagc_spread gap; /* in percent, against the first of its set */
    int is_first, is_paper, is_front;
} tagc_pareto_point;

/* Arms of all sets of runs that have a gap and bits, and the first of each; returns how many. is_all: bits of all legs,
 * else of gradients alone. floor: gaps below it count as it. points (TAGC_MAX_PARETO). */
int tagc_pareto_find(const tagc_report *report, int is_all, double floor, tagc_pareto_point *points);

#endif
