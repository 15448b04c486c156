/* Files of a test: written into a folder of its own, read through the door that users take. */
#ifndef TAGC_TEST_REPORT_SCRATCH_H
#define TAGC_TEST_REPORT_SCRATCH_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "core/status.h"
#include "report/page.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char scratch[64];

static inline int make_scratch(void **state) {
    (void)state;
    strcpy(scratch, "/tmp/tagc-test-report-XXXXXX");
    return mkdtemp(scratch) ? 0 : -1;
}

static inline int drop_scratch(void **state) {
    char command[128];
    (void)state;
    snprintf(command, sizeof command, "rm -rf '%s'", scratch);
    return system(command);
}

/* The path of `name` in the scratch folder; overwritten by the next but three. */
static inline char *in_scratch(const char *name) {
    static char paths[4][512];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", scratch, name);
    return path;
}

static inline char *write_file(const char *name, const char *words) {
    char *path = in_scratch(name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(words, file) >= 0);
    assert_int_equal(fclose(file), 0);
    return path;
}

/* A run's folder; returns its open metrics.jsonl. */
static inline FILE *open_run(const char *name) {
    char path[600];
    assert_int_equal(mkdir(in_scratch(name), 0700), 0);
    snprintf(path, sizeof path, "%s/%s/metrics.jsonl", scratch, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    return file;
}

#define ADD(report, path)                                                                                    \
    do {                                                                                                     \
        if (tagc_report_add(report, path) != TAGC_OK) fail_msg("%s", tagc_last_error());                     \
    } while (0)

/* Refused, with all of these in the message. */
static inline void check_refused(const char *path, const char *first, const char *second) {
    tagc_report report = {0};
    assert_int_not_equal(tagc_report_add(&report, path), TAGC_OK);
    if (!strstr(tagc_last_error(), first) || !strstr(tagc_last_error(), second))
        fail_msg("\"%s\" lacks \"%s\" or \"%s\"", tagc_last_error(), first, second);
    tagc_report_destroy(&report);
}

#endif
