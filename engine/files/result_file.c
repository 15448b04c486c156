/* Result files. A script may read one as soon as it exists, so it appears complete. */
#include "files/result_file.h"

#include "core/status.h"
#include "disk/new_file.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

json_t *tagc_json_real(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}

json_t *tagc_json_leg_bytes(const uint64_t values[TAGC_N_LEGS]) {
    json_t *object = json_object();
    for (int leg = 0; leg < TAGC_N_LEGS; leg++)
        json_object_set_new(object, tagc_leg_name(leg), json_integer((json_int_t)values[leg]));
    return object;
}

json_t *tagc_json_leg_reals(const double values[TAGC_N_LEGS]) {
    json_t *object = json_object();
    for (int leg = 0; leg < TAGC_N_LEGS; leg++)
        json_object_set_new(object, tagc_leg_name(leg), tagc_json_real(values[leg]));
    return object;
}

json_t *tagc_json_phases(const double values[TAGC_N_PHASES]) {
    json_t *object = json_object();
    for (int phase = 0; phase < TAGC_N_PHASES; phase++)
        json_object_set_new(object, tagc_phase_name(phase), tagc_json_real(values[phase]));
    return object;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

tagc_result_spread tagc_result_spread_every(const double *first, size_t stride, int n) {
    tagc_result_spread spread = {.median = (double)NAN, .min = (double)NAN, .max = (double)NAN, .n = n};
    double *sorted = n > 0 ? malloc((size_t)n * sizeof *sorted) : NULL;
    if (!sorted) return spread;
    int has_nan = 0;
    for (int i = 0; i < n; i++) {
        sorted[i] = first[(size_t)i * stride];
        has_nan |= isnan(sorted[i]) != 0;
    }
    qsort(sorted, (size_t)n, sizeof *sorted, by_value);
    if (!has_nan) {
        spread.median = n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
        spread.min = sorted[0];
        spread.max = sorted[n - 1];
    }
    free(sorted);
    return spread;
}

tagc_result_spread tagc_result_spread_of(const double *values, int n) {
    return tagc_result_spread_every(values, 1, n);
}

json_t *tagc_json_spread(const tagc_result_spread *spread) {
    return json_pack("{s:o, s:o, s:o, s:i}", "median", tagc_json_real(spread->median), "min",
                     tagc_json_real(spread->min), "max", tagc_json_real(spread->max), "n", spread->n);
}

tagc_status tagc_result_write(const json_t *result, const char *path) {
    tagc_new_file file;
    if (!result) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %s", path);
    TAGC_TRY(tagc_new_file_open(path, &file));
    int failed = json_dumpf(result, file.stream, JSON_INDENT(1) | JSON_REAL_PRECISION(17)) != 0;
    fputc('\n', file.stream);
    tagc_status status = tagc_new_file_commit(&file);
    if (status == TAGC_OK && failed) status = tagc_fail(TAGC_ERR_MEMORY, "out of memory for %s", path);
    tagc_new_file_close(&file);
    return status;
}
