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

enum { TAGC_OWN_MAX_FIELDS = 6, TAGC_OWN_MAX_BYTES = 64 };

#endif
