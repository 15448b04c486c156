/* What the files of docs/results-format.md share: numbers by leg and by phase, spreads, and writing a file whole or
 * not at all. */
#ifndef TAGC_FILES_RESULT_FILE_H
#define TAGC_FILES_RESULT_FILE_H

#include "tagc/tagc.h"
#include <jansson.h>

/* JSON has no NaN and no infinity: they become null. */
json_t *tagc_json_real(double value);
json_t *tagc_json_leg_bytes(const uint64_t values[TAGC_N_LEGS]);
json_t *tagc_json_leg_reals(const double values[TAGC_N_LEGS]);
json_t *tagc_json_phases(const double values[TAGC_N_PHASES]);

typedef struct tagc_result_spread {
    double median, min, max;
    int n;
} tagc_result_spread;

/* Of values (n), which keep their order; NaN throughout when n is 0 or a value is NaN. */
tagc_result_spread tagc_result_spread_of(const double *values, int n);
json_t *tagc_json_spread(const tagc_result_spread *spread);

/* Can `path` be written? Asked before the work whose result goes there. */
tagc_status tagc_result_check(const char *path);
/* Beside its place first, then renamed. TAGC_ERR_IO names the file. */
tagc_status tagc_result_write(const json_t *result, const char *path);

#endif
