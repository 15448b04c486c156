/* Fields of a reducer's options by name. */
#ifndef TAGC_TESTS_EXCHANGE_REDUCER_FIELDS_H
#define TAGC_TESTS_EXCHANGE_REDUCER_FIELDS_H

#include "tagc/paper.h"

#include <stddef.h>
#include <string.h>

typedef struct option_field {
    const char *name;
    int is_paper, is_double;
    size_t offset;
    double low, high; /* just outside of its range */
} option_field;

#define INT_FIELD(name, low, high)                                                                           \
    { #name, 0, 0, offsetof(tagc_reducer_options, name), low, high }
#define PAPER_FIELD(name, low, high)                                                                         \
    { #name, 1, 0, offsetof(tagc_paper_options, name), low, high }
static const option_field option_fields[] = {
    INT_FIELD(exchange, -1, 4),
    INT_FIELD(format, -2, 6),
    {"sparsity", 0, 1, offsetof(tagc_reducer_options, sparsity), -1e-9, 1.0000001},
    INT_FIELD(op, -1, 2),
    INT_FIELD(output, -1, 3),
    {"result.sparsity", 0, 1, offsetof(tagc_reducer_options, result.sparsity), -1e-9, 1.0000001},
    INT_FIELD(result.format, -2, 6),
    INT_FIELD(block, -1, 4097),
    INT_FIELD(n_threads, 0, 257),
    INT_FIELD(residual, -3, 4),
    INT_FIELD(gradient, -1, 2),
    PAPER_FIELD(index, -1, 3),
    PAPER_FIELD(fill_union, -2, 2),
    {"ratio", 1, 1, offsetof(tagc_paper_options, ratio), -1, 1000.1},
    PAPER_FIELD(cells, -1, 2),
    PAPER_FIELD(unpeeled, -1, 3),
};

/* Options of a rank, with room for those of the paper beside them. */
typedef struct both {
    tagc_reducer_options options;
    tagc_paper_options paper;
} both;

static inline void *field_of(both *b, const option_field *f) {
    return (f->is_paper ? (char *)&b->paper : (char *)&b->options) + f->offset;
}

static inline void set_number(both *b, const option_field *field, double value, int as_int) {
    memcpy(field_of(b, field), field->is_double ? (void *)&value : (void *)&as_int,
           field->is_double ? sizeof value : sizeof as_int);
}

/* Sets a field by its name. *is_paper: it is one of tagc_paper_options. */
static inline void set_field(both *b, const char *name, double value, int *is_paper) {
    *is_paper = 1;
    if (!strcmp(name, "paper")) return;
    if (!strcmp(name, "seed")) {
        b->paper.seed = (uint64_t)value;
        return;
    }
    size_t f = 0;
    while (strcmp(option_fields[f].name, name) != 0) f++;
    *is_paper = option_fields[f].is_paper;
    set_number(b, &option_fields[f], value, (int)value);
}

#endif
