/* Schedules for tests, and windows that are handed over as sums. */
#ifndef TAGC_TESTS_SCHEDULE_MADE_H
#define TAGC_TESTS_SCHEDULE_MADE_H

#include "../test.h"
#include "tagc/schedule.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK(call)                                                                                             \
    do {                                                                                                     \
        if ((call) != TAGC_OK) fail_msg("%s: %s", #call, tagc_last_error());                                 \
    } while (0)

#define assert_near(value, expected, error)                                                                  \
    do {                                                                                                     \
        double value_ = (value), expected_ = (expected);                                                     \
        if (!(fabs(value_ - expected_) <= (error)))                                                          \
            fail_msg("%s is %.17g, must be %.17g", #value, value_, expected_);                               \
    } while (0)

enum { MOST_MADE = 16, NOISE_GROUP = 7 };
static const double NOISE = 1.0;

/* kinds: a letter for each parameter, "c" compressed, "m" mild; their names are p0, p1, ... */
static inline tagc_schedule *made(const char *kinds, const tagc_schedule_options *options) {
    tagc_schedule_parameter parameters[MOST_MADE];
    char names[MOST_MADE][24];
    size_t n = strlen(kinds);
    assert_true(n <= MOST_MADE);
    for (size_t i = 0; i < n; i++) {
        snprintf(names[i], sizeof names[i], "p%zu", i);
        parameters[i] = (tagc_schedule_parameter){names[i], 1000,
                                                  kinds[i] == 'm' ? TAGC_CLASS_MILD : TAGC_CLASS_COMPRESSED};
    }
    tagc_schedule_options o;
    tagc_schedule_options_init(&o);
    tagc_schedule *s;
    OK(tagc_schedule_create(options ? options : &o, parameters, n, &s));
    return s;
}

static inline void set_all(tagc_schedule *s, size_t n, tagc_moment moment) {
    for (size_t i = 0; i < n; i++) OK(tagc_schedule_set_moment(s, i, moment));
}

static inline tagc_schedule_sums sums(double coherence, double growth) {
    return (tagc_schedule_sums){.signal = 100 * coherence,
                                .weight = 100,
                                .square = 50,
                                .n_square = 100,
                                .residual = growth * growth,
                                .gradient = 1};
}

/* One window of n parameters with these coherences, and the step that ends it. */
static inline int window(tagc_schedule *s, const double *coherences, size_t n) {
    int changed;
    for (uint32_t i = 0; i < n; i++) {
        tagc_schedule_sums found = sums(coherences[i], 2);
        OK(tagc_schedule_see(s, &i, 1, &found, NOISE_GROUP));
    }
    OK(tagc_schedule_step(s, &changed, NULL));
    return changed;
}

static inline tagc_schedule_plan plan_of(const tagc_schedule *s, uint32_t parameter) {
    tagc_schedule_plan plan;
    OK(tagc_schedule_get_plan(s, &parameter, NULL, 1, &plan));
    return plan;
}

static inline void assert_same_plan(const tagc_schedule_plan *a, const tagc_schedule_plan *b) {
    assert_int_equal(a->level, b->level);
    assert_int_equal(a->format, b->format);
    assert_int_equal(a->block, b->block);
    assert_near(a->sparsity, b->sparsity, 0);
    assert_near(a->moment, b->moment, 0);
    assert_int_equal(a->n_selected, b->n_selected);
}

static inline int level_of(const tagc_schedule *s, uint32_t parameter) {
    return plan_of(s, parameter).level;
}

#endif
