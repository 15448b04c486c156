/* The residual as state: read, scaled, saved and loaded. */
#include "exchange/reducer.h"

#include <math.h>
#include <string.h>

enum { PIECE_ELEMS = 16384 };

uint64_t tagc_reducer_residual_elems(const tagc_reducer *r) {
    return r ? r->n_residual : 0;
}

static tagc_status read_residual(const tagc_reducer *r, void *to, uint64_t n) {
    return r->arrays->read(r->arrays->heap.context, to, r->residual, (size_t)n * sizeof(float));
}

static tagc_status write_residual(tagc_reducer *r, const void *from, uint64_t n) {
    return r->arrays->write(r->arrays->heap.context, r->residual, from, (size_t)n * sizeof(float));
}

static tagc_status check_idle(const tagc_reducer *r, const char *what) {
    if (!r) return tagc_fail(TAGC_ERR_ARGUMENT, "reducer is NULL");
    if (r->now.begun) return tagc_fail(TAGC_ERR_STATE, "%s between begin and end: end the step first", what);
    return TAGC_OK;
}

static tagc_status check_factor(const float *values, uint64_t n, double factor) {
    float largest = 0;
    for (uint64_t i = 0; i < n; i++) largest = fmaxf(largest, fabsf(values[i]));
    if (!isfinite((float)(largest * factor)))
        return tagc_fail(TAGC_ERR_ARGUMENT, "factor is %g, must be at most %g to keep the residual finite",
                         factor, 3.4028234e38 / largest);
    return TAGC_OK;
}

static void scale(float *values, uint64_t n, double factor) {
    for (uint64_t i = 0; i < n; i++) {
        float scaled = (float)(values[i] * factor);
        values[i] = scaled == 0 ? TAGC_ZERO_RESIDUAL : scaled;
    }
}

/* Through the host, because a loss scale changes seldom. */
static tagc_status scale_there(tagc_reducer *r, double factor) {
    void *values;
    uint64_t n = r->n_residual;
    TAGC_TRY(tagc_memory_create((size_t)n * sizeof(float), "a copy of the residual", &values));
    tagc_status status = read_residual(r, values, n);
    if (status == TAGC_OK) status = check_factor(values, n, factor);
    if (status == TAGC_OK) {
        scale(values, n, factor);
        status = write_residual(r, values, n);
    }
    tagc_memory_destroy(values);
    return status;
}

tagc_status tagc_reducer_scale_residual(tagc_reducer *r, double factor) {
    TAGC_TRY(check_idle(r, "scale_residual"));
    if (!(factor >= 0) || isinf(factor))
        return tagc_fail(TAGC_ERR_ARGUMENT, "factor is %g, must be finite and not negative", factor);
    if (!r->arrays->is_here) return scale_there(r, factor);
    TAGC_TRY(check_factor(r->residual, r->n_residual, factor));
    scale(r->residual, r->n_residual, factor);
    return TAGC_OK;
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

tagc_status tagc_reducer_get_residual(const tagc_reducer *r, float *values, uint64_t n_elems) {
    TAGC_TRY(check_idle(r, "get_residual"));
    TAGC_TRY(check_count(r, values, n_elems));
    return read_residual(r, values, n_elems);
}

tagc_status tagc_reducer_set_residual(tagc_reducer *r, const float *values, uint64_t n_elems) {
    TAGC_TRY(check_idle(r, "set_residual"));
    TAGC_TRY(check_count(r, values, n_elems));
    for (uint64_t i = 0; i < n_elems; i++)
        if (!isfinite(values[i]))
            return tagc_fail(TAGC_ERR_ARGUMENT, "values[%llu] is not finite", (unsigned long long)i);
    return write_residual(r, values, n_elems);
}

tagc_status tagc_reducer_residual_square(const tagc_reducer *r, double *square) {
    if (!square) return tagc_fail(TAGC_ERR_ARGUMENT, "square is NULL");
    *square = 0;
    TAGC_TRY(check_idle(r, "residual_square"));
    float values[PIECE_ELEMS];
    for (uint64_t at = 0, n; at < r->n_residual; at += n) {
        n = r->n_residual - at < PIECE_ELEMS ? r->n_residual - at : PIECE_ELEMS;
        TAGC_TRY(r->arrays->read(r->arrays->heap.context, values, r->residual + at, n * sizeof *values));
        for (uint64_t i = 0; i < n; i++) *square += (double)values[i] * (double)values[i];
    }
    return TAGC_OK;
}

uint64_t tagc_reducer_state_bytes(const tagc_reducer *r) {
    if (!r) return 0;
    return TAGC_WIRE_HEADER_BYTES + r->n_residual * sizeof(float);
}

static tagc_status check_buffer(const tagc_reducer *r, const void *buffer, uint64_t n_bytes) {
    if (!buffer) return tagc_fail(TAGC_ERR_ARGUMENT, "buffer is NULL");
    if (n_bytes == tagc_reducer_state_bytes(r)) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "n_bytes is %llu, must be %llu", (unsigned long long)n_bytes,
                     (unsigned long long)tagc_reducer_state_bytes(r));
}

tagc_status tagc_reducer_state_save(const tagc_reducer *r, void *buffer, uint64_t n_bytes) {
    TAGC_TRY(check_idle(r, "state_save"));
    TAGC_TRY(check_buffer(r, buffer, n_bytes));
    tagc_wire_header header = {.kind = TAGC_WIRE_STATE,
                               .n_elems = r->options.n_elems,
                               .body_bytes = n_bytes - TAGC_WIRE_HEADER_BYTES};
    if (header.body_bytes) TAGC_TRY(read_residual(r, (char *)buffer + TAGC_WIRE_HEADER_BYTES, r->n_residual));
    tagc_wire_write(&header, buffer);
    return TAGC_OK;
}

static float state_value(const void *buffer, uint64_t i) {
    float value;
    memcpy(&value, (const char *)buffer + TAGC_WIRE_HEADER_BYTES + i * sizeof value, sizeof value);
    return value;
}

tagc_status tagc_reducer_state_load(tagc_reducer *r, const void *buffer, uint64_t n_bytes) {
    TAGC_TRY(check_idle(r, "state_load"));
    if (!buffer) return tagc_fail(TAGC_ERR_ARGUMENT, "buffer is NULL");
    tagc_wire_header header;
    tagc_status status = tagc_wire_read(buffer, n_bytes, &header);
    if (status == TAGC_OK && header.kind != TAGC_WIRE_STATE)
        status =
            tagc_fail(TAGC_ERR_CORRUPT, "message kind is %d, a state's is %d", header.kind, TAGC_WIRE_STATE);
    if (status != TAGC_OK) return tagc_fail_in(status, "saved residual");
    if (header.n_elems != r->options.n_elems || n_bytes != tagc_reducer_state_bytes(r))
        return tagc_fail(
            TAGC_ERR_MISMATCH,
            "saved residual: %llu bytes of a unit of %llu elements, this reducer has %llu of %llu",
            (unsigned long long)n_bytes, (unsigned long long)header.n_elems,
            (unsigned long long)tagc_reducer_state_bytes(r), (unsigned long long)r->options.n_elems);
    uint64_t n = r->n_residual;
    for (uint64_t i = 0; i < n; i++)
        if (!isfinite(state_value(buffer, i)))
            return tagc_fail(TAGC_ERR_CORRUPT, "saved residual: element %llu is not finite",
                             (unsigned long long)i);
    return n ? write_residual(r, (const char *)buffer + TAGC_WIRE_HEADER_BYTES, n) : TAGC_OK;
}
