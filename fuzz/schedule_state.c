/* Loading a schedule's state: what is refused changes nothing, what is taken gives plans that are possible. */
#include "tagc/schedule.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { N = 3, MOST = 1 << 15 };

static void require(int holds) {
    if (!holds) abort();
}

static size_t save(const tagc_schedule *s, uint8_t *bytes) {
    size_t n;
    require(tagc_schedule_save(s, 1, bytes, MOST, &n) == TAGC_OK);
    return n;
}

static void check_plans(const tagc_schedule *s) {
    for (uint32_t i = 0; i < N; i++) {
        tagc_schedule_plan plan;
        require(tagc_schedule_get_plan(s, &i, NULL, 1, &plan) == TAGC_OK);
        require(plan.level >= TAGC_LEVEL_FRESH && plan.level <= TAGC_LEVEL_LAST);
        require(plan.sparsity >= 0 && plan.sparsity <= 1 && plan.moment >= 0 && plan.moment <= 1);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    static tagc_schedule *s;
    static uint8_t before[MOST], after[MOST];
    if (!s) {
        const tagc_schedule_parameter parameters[N] = {
            {"a", 100, TAGC_CLASS_COMPRESSED}, {"b", 7, TAGC_CLASS_MILD}, {"c", 9, TAGC_CLASS_COMPRESSED}};
        tagc_schedule_options options;
        tagc_schedule_options_init(&options);
        require(tagc_schedule_create(&options, parameters, N, &s) == TAGC_OK);
        for (size_t i = 0; i < N; i++) require(tagc_schedule_set_moment(s, i, (tagc_moment)i) == TAGC_OK);
    }
    size_t n = save(s, before);
    if (tagc_schedule_load(s, data, n_bytes, 1, NULL, NULL) != TAGC_OK) {
        require(save(s, after) == n && memcmp(before, after, n) == 0);
        return 0;
    }
    check_plans(s);
    for (uint32_t i = 0; i < N; i++) {
        const tagc_schedule_sums sums = {.signal = 10, .weight = 10, .square = 1, .n_square = 1};
        require(tagc_schedule_see(s, &i, 1, &sums, i) == TAGC_OK);
    }
    require(tagc_schedule_step(s, NULL, NULL) == TAGC_OK);
    check_plans(s);
    return 0;
}
