/* A result file appears complete or not at all, because a script may read it as soon as it exists. */
#include "files/result_file.h"

#include "core/status.h"
#include "files/paths.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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

static tagc_status cannot_write(const char *path, int error) {
    return tagc_fail(TAGC_ERR_IO, "cannot write %s: %s", path, strerror(error));
}

/* The path to write to first. A pipe, a device or a link is written directly, because a rename would replace it by a file. */
static tagc_status find_partial(const char *path, char partial[TAGC_PATH_BYTES], int *is_plain) {
    struct stat about;
    int is_dir = stat(path, &about) == 0 && S_ISDIR(about.st_mode), exists = lstat(path, &about) == 0;
    *is_plain = !exists || S_ISREG(about.st_mode);
    if (is_dir) return cannot_write(path, EISDIR);
    if (snprintf(partial, TAGC_PATH_BYTES, *is_plain ? "%s.partial" : "%s", path) < TAGC_PATH_BYTES)
        return TAGC_OK;
    return cannot_write(path, ENAMETOOLONG);
}

tagc_status tagc_result_check(const char *path) {
    char partial[TAGC_PATH_BYTES];
    int is_plain;
    TAGC_TRY(find_partial(path, partial, &is_plain));
    if (!is_plain) return access(path, W_OK) == 0 ? TAGC_OK : cannot_write(path, errno);
    FILE *file = fopen(partial, "w");
    if (!file) return cannot_write(path, errno);
    fclose(file);
    unlink(partial);
    return TAGC_OK;
}

tagc_status tagc_result_write_by(int (*write)(FILE *file, const void *what), const void *what,
                                 const char *path) {
    char partial[TAGC_PATH_BYTES];
    int is_plain;
    TAGC_TRY(find_partial(path, partial, &is_plain));
    FILE *file = fopen(partial, "w");
    if (!file) return cannot_write(path, errno);
    errno = 0;
    int failed = write(file, what) != 0;
    failed |= fflush(file) != 0 || ferror(file) != 0 || (is_plain && fsync(fileno(file)) != 0);
    int error = errno ? errno : EIO;
    failed |= fclose(file) != 0;
    if (!failed && (!is_plain || rename(partial, path) == 0)) return TAGC_OK;
    if (!failed) error = errno;
    if (is_plain) unlink(partial);
    return cannot_write(path, error);
}

static int write_json(FILE *file, const void *result) {
    return json_dumpf(result, file, JSON_INDENT(1) | JSON_REAL_PRECISION(17)) != 0 ||
           fputc('\n', file) == EOF;
}

tagc_status tagc_result_write(const json_t *result, const char *path) {
    if (!result) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %s", path);
    return tagc_result_write_by(write_json, result, path);
}
