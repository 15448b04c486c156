/* One row per field of a struct of options: its range and default, and whether all ranks must agree on it. */
#ifndef TAGC_EXCHANGE_FIELDS_H
#define TAGC_EXCHANGE_FIELDS_H

#include "core/sized.h"
#include "core/status.h"

typedef enum tagc_field_type { TAGC_FIELD_INT, TAGC_FIELD_U64, TAGC_FIELD_DOUBLE } tagc_field_type;

typedef struct tagc_field {
    const char *name;
    size_t offset;
    tagc_field_type type;
    /* 1: all ranks must have the same value. */
    int shared;
    /* Bits 1 << tagc_exchange: with these the field means something. With others it must keep its default. */
    int exchanges;
    double min, max, initial;
    /* Of an enum: what its values 0, 1, ... are called in messages, NULL if a value is not taken; -1 is the default, -2 none.
     * Else NULL. */
    const char *const *names;
} tagc_field;

#define TAGC_FIELD_MAX_U64 18446744073709551615.0

/* The options that an exchange has beside tagc_reducer_options, whose field `paper` points to them. */
typedef struct tagc_own_options {
    const tagc_sized *type;
    const tagc_field *fields;
    int n_fields; /* at most TAGC_OWN_MAX_FIELDS */
    /* What no range of a field can say. */
    tagc_status (*check)(const void *own, int world_size);
    /* Replaces defaults that depend on other fields. */
    void (*resolve)(const tagc_reducer_options *options, void *own);
} tagc_own_options;

/* The value of a field as 8 bytes that are equal if the values are, and these as a number. */
uint64_t tagc_field_raw(const tagc_field *field, const void *options);
double tagc_field_number(const tagc_field *field, uint64_t raw);

/* The value as a message shows it: a name where it has one. */
enum { TAGC_FIELD_TEXT_BYTES = 32 };
void tagc_field_text(const tagc_field *field, uint64_t raw, char text[TAGC_FIELD_TEXT_BYTES]);

/* TAGC_ERR_ARGUMENT, with the name, the value and what is allowed, for the first field that is out of its range. */
tagc_status tagc_fields_check(const tagc_field *fields, int n_fields, const void *options);

enum { TAGC_OWN_MAX_FIELDS = 6, TAGC_OWN_MAX_BYTES = 64 };

#endif
