/* Members of a JSON object that must be there. An error names the file, the place in it, the member and its type. */
#ifndef TAGC_REPORT_JSON_READ_H
#define TAGC_REPORT_JSON_READ_H

#include "tagc/tagc.h"
#include <jansson.h>

/* A place in a file, as "bench.json: arms[2]". */
typedef struct tagc_json_place {
    char text[256];
} tagc_json_place;

tagc_json_place tagc_json_at(const tagc_json_place *above, const char *name,
                             int index); /* index -1: no list */

tagc_status tagc_json_object(const json_t *parent, const char *name, const tagc_json_place *at,
                             const json_t **out);
tagc_status tagc_json_list(const json_t *parent, const char *name, const tagc_json_place *at,
                           const json_t **out);
tagc_status tagc_json_text(const json_t *parent, const char *name, const tagc_json_place *at,
                           const char **out);
/* null is NaN: a number that could not be had. */
tagc_status tagc_json_number(const json_t *parent, const char *name, const tagc_json_place *at, double *out);
/* NaN when it is not there. */
double tagc_json_number_or_nan(const json_t *parent, const char *name);

#endif
