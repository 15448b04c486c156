/* A model's options, and what follows from them alone: what a class sends, and the options of the reducers that exchange a part. The
 * model makes its reducers by this; engine and planner lay out by it what a model would have. */
#ifndef TAGC_UNIT_OPTIONS_H
#define TAGC_UNIT_OPTIONS_H

#include "core/status.h"
#include "tagc/model.h"

/* Reads what a caller gave, which may be NULL, and checks it. n_places: ranks of a host. */
tagc_status tagc_model_options_read(const tagc_model_options *from, int n_places, tagc_model_options *out);

static inline int tagc_is_paper(int exchange) {
    return exchange == TAGC_EXCHANGE_SKETCH || exchange == TAGC_EXCHANGE_PACKED;
}

/* What tensors of a class send in the end. dense: the format of the class DENSE. */
tagc_schedule_plan tagc_class_plan(const tagc_schedule_options *schedule, int dense, tagc_class kind);
/* 1: they come there level by level. exchange: of the class COMPRESSED. */
int tagc_class_has_levels(const tagc_schedule_options *schedule, int exchange, tagc_class kind);

/* What reducers exchange together, as far as their options depend on it. */
typedef struct tagc_exchanged {
    tagc_class kind;
    int is_followed; /* the plan is that of a level */
    tagc_schedule_plan plan;
    uint64_t n_elems; /* of this rank, between hosts */
    uint64_t tag;
    int n_hosts, n_places; /* n_places: ranks of a host, which add up before; 1: none do */
} tagc_exchanged;

/* 1: what reads the caller's gradients takes bf16; else fp32. */
int tagc_reads_bf16(const tagc_model_options *options, tagc_class kind);
/* Of the reducer over hosts, but for its seed, and of that which adds up within one. */
void tagc_options_between(const tagc_model_options *options, const tagc_exchanged *what,
                          tagc_reducer_options *between);
void tagc_options_within(const tagc_model_options *options, const tagc_exchanged *what,
                         tagc_reducer_options *within);

#endif
