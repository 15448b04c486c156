/* The residual as state: read, scaled, saved and loaded. Rows are as codec/residual.h says. */
#include "exchange/options.h"
#include "exchange/reducer.h"

#include <math.h>
#include <string.h>

enum {
    PIECE_ELEMS = 4096, /* a multiple of TAGC_RESIDUAL_BLOCK */
    MOST_ALIKE = 65535  /* tags that nobody should have: those of units without one */
};

uint64_t tagc_reducer_residual_elems(const tagc_reducer *r) {
    return r ? r->n_residual : 0;
}

uint64_t tagc_reducer_steps(const tagc_reducer *r) {
    return r ? r->n_steps : 0;
}

tagc_status tagc_reducer_set_steps(tagc_reducer *r, uint64_t n_steps) {
    TAGC_TRY(tagc_reducer_check_idle(r, "set_steps"));
    r->n_steps = n_steps;
    return TAGC_OK;
}

/* ---- the rows, where the processor can work on them ---- */

/* *rows: the residual, or a copy where it is elsewhere, which _close writes back and frees. */
static tagc_status open_rows(const tagc_reducer *r, void **rows) {
    *rows = r->residual;
    if (r->arrays->is_here || !r->residual) return TAGC_OK;
    TAGC_TRY(tagc_memory_create((size_t)tagc_reducer_stored_bytes(r), "a copy of the residual", rows));
    tagc_status status =
        r->arrays->read(r->arrays->heap.context, *rows, r->residual, (size_t)tagc_reducer_stored_bytes(r));
    if (status != TAGC_OK) tagc_memory_destroy(*rows);
    return status;
}

static tagc_status close_rows(const tagc_reducer *r, void *rows, int is_changed, tagc_status status) {
    if (rows == r->residual) return status;
    if (is_changed && status == TAGC_OK)
        status = r->arrays->write(r->arrays->heap.context, r->residual, rows,
                                  (size_t)tagc_reducer_stored_bytes(r));
    tagc_memory_destroy(rows);
    return status;
}

/* Values [at, at + *n) of all rows, at most PIECE_ELEMS, of one row. */
typedef struct piece {
    uint64_t row;
    size_t first, n; /* in the row */
} piece;

static piece piece_at(const tagc_reducer *r, uint64_t at) {
    size_t first = (size_t)(at % r->shard), left = r->shard - first;
    return (piece){at / r->shard, first, left < PIECE_ELEMS ? left : PIECE_ELEMS};
}

static void read_piece(const tagc_reducer *r, const void *rows, piece p, float *values) {
    tagc_residual_read(r->residual_format, r->shard, (const char *)rows + p.row * r->row_bytes, p.first, p.n,
                       values);
}

static void write_piece(const tagc_reducer *r, void *rows, piece p, const float *values) {
    tagc_residual_write(r->residual_format, r->shard, values, p.first, p.n,
                        tagc_reducer_seed(r, (size_t)p.row), (char *)rows + p.row * r->row_bytes);
}

/* ---- values ---- */

tagc_status tagc_reducer_residual_square(const tagc_reducer *r, double *square) {
    float values[PIECE_ELEMS];
    void *rows;
    if (!square) return tagc_fail(TAGC_ERR_ARGUMENT, "square is NULL");
    *square = 0;
    TAGC_TRY(tagc_reducer_check_idle(r, "residual_square"));
    TAGC_TRY(open_rows(r, &rows));
    piece p;
    for (uint64_t at = 0; at < r->n_residual; at += p.n) {
        p = piece_at(r, at);
        read_piece(r, rows, p, values);
        for (size_t i = 0; i < p.n; i++) *square += (double)values[i] * (double)values[i];
    }
    return close_rows(r, rows, 0, TAGC_OK);
}

static tagc_status check_factor(const tagc_reducer *r, const void *rows, double factor) {
    float largest = 0, values[PIECE_ELEMS];
    piece p;
    for (uint64_t at = 0; at < r->n_residual; at += p.n) {
        p = piece_at(r, at);
        read_piece(r, rows, p, values);
        for (size_t i = 0; i < p.n; i++) largest = fmaxf(largest, fabsf(values[i]));
    }
    if (!isfinite((float)(largest * factor)))
        return tagc_fail(TAGC_ERR_ARGUMENT, "factor is %g, must be at most %g to keep the residual finite",
                         factor, 3.4028234e38 / largest);
    return TAGC_OK;
}

static void scale(const tagc_reducer *r, void *rows, double factor) {
    float values[PIECE_ELEMS];
    piece p;
    for (uint64_t at = 0; at < r->n_residual; at += p.n) {
        p = piece_at(r, at);
        read_piece(r, rows, p, values);
        for (size_t i = 0; i < p.n; i++) {
            float scaled = (float)(values[i] * factor);
            values[i] = scaled == 0 ? TAGC_ZERO_RESIDUAL : scaled;
        }
        write_piece(r, rows, p, values);
    }
}

tagc_status tagc_reducer_scale_residual(tagc_reducer *r, double factor) {
    void *rows;
    TAGC_TRY(tagc_reducer_check_idle(r, "scale_residual"));
    if (!(factor >= 0) || isinf(factor))
        return tagc_fail(TAGC_ERR_ARGUMENT, "factor is %g, must be finite and not negative", factor);
    TAGC_TRY(open_rows(r, &rows));
    tagc_status status = check_factor(r, rows, factor);
    if (status == TAGC_OK) scale(r, rows, factor);
    return close_rows(r, rows, 1, status);
}

static tagc_status check_count(const tagc_reducer *r, const float *values, uint64_t n_elems) {
    uint64_t n = r->n_residual;
    if (n == 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_elems is %llu, but this reducer keeps no residual",
                         (unsigned long long)n_elems);
    if (n != n_elems)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_elems is %llu, must be %llu", (unsigned long long)n_elems,
                         (unsigned long long)n);
    if (!values) return tagc_fail(TAGC_ERR_ARGUMENT, "values is NULL");
    return TAGC_OK;
}

tagc_status tagc_reducer_read_residual(const tagc_reducer *r, float *values) {
    void *rows;
    TAGC_TRY(open_rows(r, &rows));
    piece p;
    for (uint64_t at = 0; at < r->n_residual; at += p.n) {
        p = piece_at(r, at);
        read_piece(r, rows, p, values + at);
    }
    return close_rows(r, rows, 0, TAGC_OK);
}

tagc_status tagc_reducer_write_residual(tagc_reducer *r, const float *values) {
    void *rows;
    TAGC_TRY(open_rows(r, &rows));
    piece p;
    for (uint64_t at = 0; at < r->n_residual; at += p.n) {
        p = piece_at(r, at);
        write_piece(r, rows, p, values + at);
    }
    return close_rows(r, rows, 1, TAGC_OK);
}

tagc_status tagc_reducer_get_residual(const tagc_reducer *r, float *values, uint64_t n_elems) {
    TAGC_TRY(tagc_reducer_check_idle(r, "get_residual"));
    TAGC_TRY(check_count(r, values, n_elems));
    return tagc_reducer_read_residual(r, values);
}

tagc_status tagc_reducer_set_residual(tagc_reducer *r, const float *values, uint64_t n_elems) {
    TAGC_TRY(tagc_reducer_check_idle(r, "set_residual"));
    TAGC_TRY(check_count(r, values, n_elems));
    for (uint64_t i = 0; i < n_elems; i++)
        if (!isfinite(values[i]))
            return tagc_fail(TAGC_ERR_ARGUMENT, "values[%llu] is not finite", (unsigned long long)i);
    return tagc_reducer_write_residual(r, values);
}

/* ---- bytes ---- */

uint64_t tagc_reducer_state_bytes(const tagc_reducer *r) {
    return r ? TAGC_WIRE_HEADER_BYTES + tagc_reducer_stored_bytes(r) : 0;
}

/* Without a tag, what else tells the unit from others of its size. */
static uint64_t saved_tag(const tagc_reducer *r) {
    return r->options.tag == UINT64_MAX ? UINT64_MAX - r->identity.alike : r->options.tag;
}

static tagc_wire_header saved_header(const tagc_reducer *r) {
    return (tagc_wire_header){.kind = TAGC_WIRE_STATE,
                              .coding = r->n_residual ? r->residual_format : TAGC_FORMAT_FP32,
                              .output = r->options.output,
                              .rank = (uint32_t)r->rank,
                              .world_size = (uint32_t)r->world_size,
                              .tag = saved_tag(r),
                              .k = (uint32_t)r->shard,
                              .n_elems = r->n_given,
                              .n_items = (uint32_t)tagc_reducer_n_rows(r),
                              .body_bytes = tagc_reducer_stored_bytes(r),
                              .step = r->n_steps};
}

void tagc_reducer_state_view(const tagc_reducer *r, void *header, const void **body, uint64_t *n_body) {
    tagc_wire_header saved = saved_header(r);
    *body = r->residual;
    *n_body = saved.body_bytes;
    tagc_wire_write_of(&saved, r->residual, header);
}

tagc_status tagc_reducer_state_save(const tagc_reducer *r, void *buffer, uint64_t n_bytes) {
    TAGC_TRY(tagc_reducer_check_idle(r, "state_save"));
    if (!buffer) return tagc_fail(TAGC_ERR_ARGUMENT, "buffer is NULL");
    if (n_bytes != tagc_reducer_state_bytes(r))
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_bytes is %llu, must be %llu", (unsigned long long)n_bytes,
                         (unsigned long long)tagc_reducer_state_bytes(r));
    tagc_wire_header header = saved_header(r);
    if (header.body_bytes)
        TAGC_TRY(r->arrays->read(r->arrays->heap.context, (char *)buffer + TAGC_WIRE_HEADER_BYTES,
                                 r->residual, (size_t)header.body_bytes));
    tagc_wire_write(&header, buffer);
    return TAGC_OK;
}

/* Rows as long as this reducer's. */
typedef struct saved_rows {
    const char *bytes;
    int format;
    size_t row_bytes;
} saved_rows;

static tagc_status expect(const char *what, uint64_t saved, uint64_t here) {
    if (saved == here) return TAGC_OK;
    return tagc_fail(TAGC_ERR_MISMATCH, "saved residual: %s is %llu, this reducer's is %llu", what,
                     (unsigned long long)saved, (unsigned long long)here);
}

static tagc_status check_saved(const tagc_reducer *r, const tagc_wire_header *header, saved_rows *s) {
    TAGC_TRY(expect("n_elems", header->n_elems, r->n_given));
    uint64_t number = UINT64_MAX - header->tag; /* of a unit without a tag */
    if (header->tag != saved_tag(r) && r->options.tag == UINT64_MAX && number <= MOST_ALIKE)
        return tagc_fail(
            TAGC_ERR_MISMATCH,
            "saved residual: of the units of %llu elements without a tag it is number %llu, this is number "
            "%u: give each unit a tag",
            (unsigned long long)r->n_given, (unsigned long long)number, r->identity.alike);
    TAGC_TRY(expect("tag", header->tag, saved_tag(r)));
    TAGC_TRY(expect("output", (uint64_t)header->output, (uint64_t)r->options.output));
    TAGC_TRY(expect("world size", header->world_size, (uint64_t)r->world_size));
    if (header->rank != (uint32_t)r->rank)
        return tagc_fail(
            TAGC_ERR_MISMATCH,
            "saved residual: rank %u saved it, this is rank %d: each rank loads what it has saved",
            header->rank, r->rank);
    s->format = header->coding;
    s->row_bytes = tagc_residual_bytes(s->format, r->shard);
    uint64_t n_rows = tagc_reducer_n_rows(r);
    TAGC_TRY(expect("number of rows", header->n_items, n_rows)); /* 0 without a residual */
    if (header->k != r->shard || header->body_bytes != n_rows * s->row_bytes)
        return tagc_fail(TAGC_ERR_CORRUPT, "saved residual: %llu bytes are not %llu rows of %zu values in %s",
                         (unsigned long long)header->body_bytes, (unsigned long long)n_rows, r->shard,
                         tagc_format_names[s->format]);
    for (uint64_t row = 0; row < n_rows; row++) {
        tagc_status status = tagc_residual_check(s->format, r->shard, s->bytes + row * s->row_bytes);
        if (status != TAGC_OK)
            return tagc_fail_in(status, "saved residual: row %llu", (unsigned long long)row);
    }
    return TAGC_OK;
}

/* Rows of another format, value by value. */
static void convert(const tagc_reducer *r, const saved_rows *s, void *rows) {
    float values[PIECE_ELEMS];
    piece p;
    for (uint64_t at = 0; at < r->n_residual; at += p.n) {
        p = piece_at(r, at);
        tagc_residual_read(s->format, r->shard, s->bytes + p.row * s->row_bytes, p.first, p.n, values);
        write_piece(r, rows, p, values);
    }
}

tagc_status tagc_reducer_state_load(tagc_reducer *r, const void *buffer, uint64_t n_bytes) {
    TAGC_TRY(tagc_reducer_check_idle(r, "state_load"));
    if (!buffer) return tagc_fail(TAGC_ERR_ARGUMENT, "buffer is NULL");
    tagc_wire_header header;
    tagc_status status = tagc_wire_read(buffer, n_bytes, &header);
    if (status == TAGC_OK && header.kind != TAGC_WIRE_STATE)
        status =
            tagc_fail(TAGC_ERR_CORRUPT, "message kind is %d, a state's is %d", header.kind, TAGC_WIRE_STATE);
    if (status != TAGC_OK) return tagc_fail_in(status, "saved residual");
    saved_rows saved = {.bytes = (const char *)buffer + TAGC_WIRE_HEADER_BYTES};
    void *rows;
    TAGC_TRY(check_saved(r, &header, &saved));
    TAGC_TRY(open_rows(r, &rows));
    uint64_t before = r->n_steps;
    r->n_steps = header.step;
    if (saved.format == r->residual_format && r->n_residual)
        memcpy(rows, saved.bytes, (size_t)tagc_reducer_stored_bytes(r));
    else
        convert(r, &saved, rows);
    status = close_rows(r, rows, 1, TAGC_OK);
    if (status != TAGC_OK) r->n_steps = before;
    return status;
}
