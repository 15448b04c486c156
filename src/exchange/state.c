/* The residual as state: looked at, scaled, saved and loaded. */
#include "exchange/reducer.h"

#include <math.h>
#include <string.h>

const float *tagc_reducer_residual(const tagc_reducer *r, uint64_t *n_elems) {
    const float *residual = r ? r->residual : NULL;
    if (n_elems) *n_elems = residual ? r->n_residual : 0;
    return residual;
}

static tagc_status check_idle(const tagc_reducer *r, const char *what) {
    if (!r) return tagc_fail(TAGC_ERR_ARGUMENT, "reducer is NULL");
    if (r->now.begun) return tagc_fail(TAGC_ERR_STATE, "%s between begin and end: end the step first", what);
    return TAGC_OK;
}

tagc_status tagc_reducer_scale_residual(tagc_reducer *r, double factor) {
    TAGC_TRY(check_idle(r, "scale_residual"));
    if (!(factor >= 0) || isinf(factor))
        return tagc_fail(TAGC_ERR_ARGUMENT, "factor is %g, must be finite and not negative", factor);
    uint64_t n = r->n_residual;
    float largest = 0;
    for (uint64_t i = 0; i < n; i++) largest = fmaxf(largest, fabsf(r->residual[i]));
    if (!isfinite((float)(largest * factor)))
        return tagc_fail(TAGC_ERR_ARGUMENT, "factor is %g, must be at most %g to keep the residual finite",
                         factor, 3.4028234e38 / largest);
    for (uint64_t i = 0; i < n; i++) {
        float scaled = (float)(r->residual[i] * factor);
        r->residual[i] = scaled == 0 ? TAGC_ZERO_RESIDUAL : scaled;
    }
    return TAGC_OK;
}

tagc_status tagc_reducer_set_residual(tagc_reducer *r, const float *values, uint64_t n_elems) {
    TAGC_TRY(check_idle(r, "set_residual"));
    uint64_t n;
    if (tagc_reducer_residual(r, &n) == NULL || n != n_elems)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_elems is %llu, must be %llu", (unsigned long long)n_elems,
                         (unsigned long long)n);
    if (!values) return tagc_fail(TAGC_ERR_ARGUMENT, "values is NULL");
    for (uint64_t i = 0; i < n; i++)
        if (!isfinite(values[i]))
            return tagc_fail(TAGC_ERR_ARGUMENT, "values[%llu] is not finite", (unsigned long long)i);
    memcpy(r->residual, values, n * sizeof *values);
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
    if (header.body_bytes) memcpy((char *)buffer + TAGC_WIRE_HEADER_BYTES, r->residual, header.body_bytes);
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
    if (n) memcpy(r->residual, (const char *)buffer + TAGC_WIRE_HEADER_BYTES, n * sizeof(float));
    return TAGC_OK;
}
