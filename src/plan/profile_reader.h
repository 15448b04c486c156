/* Inside of profile.c: a result while it is read. */
#ifndef TAGC_PLAN_PROFILE_READER_H
#define TAGC_PLAN_PROFILE_READER_H

#include "plan/profile.h"

#include <jansson.h>

typedef struct tagc_profile_reader {
    tagc_points *points;
    const char *file;
    tagc_read_engine read_engine;
    int is_lab;           /* its hosts are namespaces of one machine */
    const json_t *shaped; /* the link of the lab's case; NULL: none, or no lab */
    long number;          /* of the lab's case */
} tagc_profile_reader;

/* ---- numbers; TAGC_ERR_CORRUPT names file, `where` and `name` ---- */

/* The failure for a member that is missing or not `what`. */
tagc_status tagc_profile_missing(const tagc_profile_reader *r, const char *where, const char *name,
                                 const char *what);
tagc_status tagc_profile_number(const tagc_profile_reader *r, const json_t *object, const char *where,
                                const char *name, double *out);
tagc_status tagc_profile_int(const tagc_profile_reader *r, const json_t *object, const char *where,
                             const char *name, int min, int max, int *out);
/* A number above 0. */
tagc_status tagc_profile_above(const tagc_profile_reader *r, const json_t *object, const char *where,
                               const char *name, double *out);
/* The median over iterations of the number of that name; object: the member that holds it, or NULL. */
tagc_status tagc_profile_median(const tagc_profile_reader *r, const json_t *iterations, const char *object,
                                const char *name, double *out);

/* ---- profile_codec.c ---- */

/* Adds an entry of "codec". */
tagc_status tagc_profile_codec(const tagc_profile_reader *r, const tagc_point *common, const json_t *entry);
/* For a bench that measured neither codec nor memory alone: reads the phases in the iterations of an arm. */
tagc_status tagc_profile_phases(const tagc_profile_reader *r, const json_t *arm, double n_compressed,
                                tagc_point *point);

#endif
