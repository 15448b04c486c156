/* Reading of members, with errors that say where. */
#include "report/json_read.h"

#include "core/status.h"
#include <math.h>
#include <stdio.h>

tagc_json_place tagc_json_at(const tagc_json_place *above, const char *name, int index) {
    tagc_json_place at;
    if (index < 0)
        snprintf(at.text, sizeof at.text, "%.200s %.40s", above->text, name);
    else
        snprintf(at.text, sizeof at.text, "%.200s %.40s[%d]", above->text, name, index);
    return at;
}

static tagc_status lacks(const json_t *value, const char *name, const tagc_json_place *at, const char *what) {
    return tagc_fail(TAGC_ERR_CORRUPT, value ? "%s: \"%s\" is no %s" : "%s lacks \"%s\", a%s%s", at->text,
                     name,
                     value          ? what
                     : *what == 'o' ? "n "
                                    : " ",
                     what);
}

tagc_status tagc_json_object(const json_t *parent, const char *name, const tagc_json_place *at,
                             const json_t **out) {
    *out = json_object_get(parent, name);
    return json_is_object(*out) ? TAGC_OK : lacks(*out, name, at, "object");
}

tagc_status tagc_json_list(const json_t *parent, const char *name, const tagc_json_place *at,
                           const json_t **out) {
    *out = json_object_get(parent, name);
    return json_is_array(*out) ? TAGC_OK : lacks(*out, name, at, "list");
}

tagc_status tagc_json_text(const json_t *parent, const char *name, const tagc_json_place *at,
                           const char **out) {
    const json_t *value = json_object_get(parent, name);
    *out = json_string_value(value);
    return *out ? TAGC_OK : lacks(value, name, at, "text");
}

tagc_status tagc_json_number(const json_t *parent, const char *name, const tagc_json_place *at, double *out) {
    const json_t *value = json_object_get(parent, name);
    *out = (double)NAN;
    if (!json_is_number(value) && !json_is_null(value)) return lacks(value, name, at, "number");
    if (json_is_number(value)) *out = json_number_value(value);
    return TAGC_OK;
}

double tagc_json_number_or_nan(const json_t *parent, const char *name) {
    const json_t *value = json_object_get(parent, name);
    return json_is_number(value) ? json_number_value(value) : (double)NAN;
}
