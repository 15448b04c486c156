/* Shared by all files of docs/reference/results-format.md: numbers by leg and by phase, spreads, the origin, and writing a file
 * completely or not at all. */
#ifndef TAGC_FILES_RESULT_FILE_H
#define TAGC_FILES_RESULT_FILE_H

#include "tagc/tagc.h"
#include <jansson.h>
#include <stdio.h>

/* JSON has no NaN and no infinity: they become null. */
json_t *tagc_json_real(double value);
json_t *tagc_json_leg_bytes(const uint64_t values[TAGC_N_LEGS]);
json_t *tagc_json_leg_reals(const double values[TAGC_N_LEGS]);
json_t *tagc_json_phases(const double values[TAGC_N_PHASES]);

typedef struct tagc_result_spread {
    double median, min, max;
    int n;
} tagc_result_spread;

/* Median, least and largest of values (n), which keep their order; all NaN if n is 0 or a value is NaN. */
tagc_result_spread tagc_result_spread_of(const double *values, int n);
/* The same of first[0], first[stride], first[2 * stride] and so on, n values. */
tagc_result_spread tagc_result_spread_every(const double *first, size_t stride, int n);
json_t *tagc_json_spread(const tagc_result_spread *spread);

/* Writes the file completely or not at all (disk/new_file.h). */
tagc_status tagc_result_write(const json_t *result, const char *path);

/* ---- the origin of a result: version and commit of this build, the command line, the machine ---- */

/* The command line is "tagc <command> <argv>...". hosts: an array of names, of which it takes ownership; NULL: this host
 * alone. Returns NULL if out of memory. */
json_t *tagc_origin(const char *command, int argc, char *const *argv, json_t *hosts);

/* What computes products: its "name", "kernel" and "n_threads". */
json_t *tagc_origin_blas(void);

/* The commit of this build; NULL: it was not made from a git tree. */
const char *tagc_origin_commit(void);

/* This host's name, never empty. */
void tagc_origin_host(char *name, int n_bytes);

#endif
