/* Values of options, as one row of a table describes them. */
#include "exchange/fields.h"

#include <stdio.h>
#include <string.h>

uint64_t tagc_field_raw(const tagc_field *f, const void *options) {
    const char *at = (const char *)options + f->offset;
    int as_int;
    uint64_t raw;
    if (f->type != TAGC_FIELD_INT) {
        memcpy(&raw, at, sizeof raw);
        return raw;
    }
    memcpy(&as_int, at, sizeof as_int);
    return (uint64_t)(int64_t)as_int;
}

double tagc_field_number(const tagc_field *f, uint64_t raw) {
    double value;
    if (f->type == TAGC_FIELD_INT) return (double)(int64_t)raw;
    if (f->type == TAGC_FIELD_U64) return (double)raw;
    memcpy(&value, &raw, sizeof value);
    return value;
}

void tagc_field_text(const tagc_field *f, uint64_t raw, char text[TAGC_FIELD_TEXT_BYTES]) {
    double value = tagc_field_number(f, raw);
    if (f->names && value == -1 && f->min < 0)
        snprintf(text, TAGC_FIELD_TEXT_BYTES, "the default");
    else if (f->names && value == -2 && f->min == -2)
        snprintf(text, TAGC_FIELD_TEXT_BYTES, "none");
    else if (f->names && value >= 0 && value <= f->max && f->names[(int)value])
        snprintf(text, TAGC_FIELD_TEXT_BYTES, "%s", f->names[(int)value]);
    else if (f->type == TAGC_FIELD_DOUBLE)
        snprintf(text, TAGC_FIELD_TEXT_BYTES, "%.10g", value);
    else if (f->type == TAGC_FIELD_INT)
        snprintf(text, TAGC_FIELD_TEXT_BYTES, "%lld", (long long)raw);
    else
        snprintf(text, TAGC_FIELD_TEXT_BYTES, "%llu", (unsigned long long)raw);
}

/* "in [0, 7]", or all names with their numbers: "dense (0), sketch (1) or direct (2)". */
static void allowed_text(const tagc_field *f, char *text, size_t n_bytes) {
    if (!f->names) {
        snprintf(text, n_bytes, "in [%.10g, %.15g]", f->min, f->max);
        return;
    }
    size_t n = 0;
    for (int value = (int)f->min; value <= f->max && n < n_bytes; value++) {
        const char *before = value == f->min ? "" : value == f->max ? " or " : ", ";
        if (value >= 0 && !f->names[value]) continue;
        if (value == -1)
            n += (size_t)snprintf(text + n, n_bytes - n, "%s-1 (the default)", before);
        else
            n += (size_t)snprintf(text + n, n_bytes - n, "%s%s (%d)", before,
                                  value < 0 ? "none" : f->names[value], value);
    }
}

/* Whether a value within the range is one: a name may be missing. */
static int is_known(const tagc_field *f, double value) {
    return !f->names || value < 0 || f->names[(int)value] != NULL;
}

tagc_status tagc_fields_check(const tagc_field *fields, int n_fields, const void *options) {
    for (int f = 0; f < n_fields; f++) {
        uint64_t raw = tagc_field_raw(&fields[f], options);
        double value = tagc_field_number(&fields[f], raw);
        if (value >= fields[f].min && value <= fields[f].max && is_known(&fields[f], value)) continue;
        char text[TAGC_FIELD_TEXT_BYTES], allowed[160];
        tagc_field_text(&fields[f], raw, text);
        allowed_text(&fields[f], allowed, sizeof allowed);
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s is %s, must be %s", fields[f].name, text, allowed);
    }
    return TAGC_OK;
}
