/* Numbers with a unit. */
#include "options/quantity.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

typedef struct unit {
    const char *name;
    double factor;
} unit;

/* A number and one of the units: `least` to 1e15 of the unit with factor 1. */
static int read_number(const char *text, size_t n, const unit *units, double least, double *out) {
    char word[32], *end;
    if (n == 0 || n >= sizeof word || !strchr("0123456789.", text[0])) return 0;
    snprintf(word, sizeof word, "%.*s", (int)n, text);
    double value = strtod(word, &end);
    /* strtod takes hexadecimal numbers, too. */
    if (strspn(word, "+-.0123456789eE") < (size_t)(end - word)) return 0;
    for (; units->name; units++)
        if (strcasecmp(end, units->name) == 0) {
            *out = value * units->factor;
            return *out >= least && *out <= 1e15;
        }
    return 0;
}

static const unit rate_units[] = {{"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}, {"tbit", 1e12}, {NULL, 0}};
static const unit time_units[] = {{"us", 1e-6}, {"ms", 1e-3}, {"s", 1}, {NULL, 0}};

static const unit size_units[] = {{"", 1},    {"k", 1e3},  {"m", 1e6}, {"b", 1e9},
                                  {"g", 1e9}, {"t", 1e12}, {NULL, 0}};

int tagc_quantity_rate(const char *text, size_t n, double *bits_per_s) {
    return read_number(text, n, rate_units, 1, bits_per_s);
}

int tagc_quantity_time(const char *text, size_t n, double *seconds) {
    return read_number(text, n, time_units, 0, seconds);
}

int tagc_quantity_size(const char *text, size_t n, double *size) {
    return read_number(text, n, size_units, 1e-300, size);
}
