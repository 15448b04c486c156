/* What the owner of a shard does with fragments from other ranks: bytes that validate must decode within bounds, to
 * finite values, alike on every instruction set that this processor has. Input: 1 byte code (bit 0: topk,
 * bit 2: the bytes are laid over a real body instead; bits 3 and 4: of a gradient and a stored residual of these bytes), 1 format, 1 block, 2 n, 2 k, then the body. */
#include "codec/code.h"
#include "codec/gaps.h"
#include "codec/select.h"
#include "codec/values.h"
#include "core/memory.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { HEAD = 7 };

static void require(int holds) {
    if (!holds) abort();
}

static void *exactly(size_t n_bytes) {
    void *memory = malloc(n_bytes ? n_bytes : 1);
    require(memory != NULL);
    return memory;
}

static void *scratch_for(const tagc_code *code, const tagc_code_options *o) {
    void *scratch;
    require(tagc_memory_create(code->scratch_bytes(o, 1) + 1, "scratch", &scratch) == TAGC_OK);
    return scratch;
}

/* A body of some gradient, with the input's bytes added to it. A residual in int8 or int4 is made of them, too: any bytes. */
static size_t real_body(const tagc_code_options *o, void *scratch, const uint8_t *data, size_t n_data,
                        uint8_t **body) {
    const tagc_code *code = tagc_code_of(o);
    size_t n_row = tagc_residual_bytes(o->residual, o->n);
    float *gradient = exactly(4 * o->n);
    uint8_t *residual = exactly(n_row), *next = exactly(n_row);
    tagc_encoded encoded;
    uint32_t state = 1;
    for (size_t i = 0; i < o->n; i++) {
        state = state * 1664525u + 1013904223u;
        gradient[i] = (float)(int32_t)state * 0x1p-31f;
        gradient[i] *= gradient[i] * gradient[i];
    }
    const uint32_t zeros = tagc_residual_zeros(o->residual);
    for (size_t i = 0; i < n_row; i++)
        residual[i] = o->residual != TAGC_FORMAT_FP32 && n_data ? data[i % n_data]
                                                                : ((const uint8_t *)&zeros)[i % sizeof zeros];
    int is_sound = tagc_residual_check(o->residual, o->n, residual) == TAGC_OK;
    *body = exactly(code->max_bytes(o));
    code->encode(o, gradient, residual, next, 7, *body, scratch, NULL, &encoded);
    require(encoded.nonfinite ? !is_sound : encoded.n_bytes <= code->max_bytes(o));
    if (!encoded.nonfinite) {
        require(code->validate(o, *body, encoded.n_bytes) == TAGC_OK);
        require(tagc_residual_check(o->residual, o->n, next) == TAGC_OK);
    }
    for (size_t i = 0; i < n_data && i < encoded.n_bytes; i++) (*body)[i] = (uint8_t)((*body)[i] + data[i]);
    free(gradient), free(residual), free(next);
    return encoded.n_bytes;
}

/* Positions by each table are those of the plain one. */
static void compare_tables(const tagc_code_options *o, const uint8_t *body, size_t n_bytes) {
    const tagc_code_kernels *available[TAGC_CODE_MAX_KERNELS];
    size_t n_available = tagc_code_available(available), n_items, n_other, n_code;
    tagc_gaps gaps;
    tagc_gaps_init(&gaps, o->n, o->k);
    gaps.kernels = &tagc_code_scalar;
    n_code = tagc_gaps_validate(&gaps, body, n_bytes, &n_items);
    uint32_t *expected = exactly(4 * (gaps.chunk + TAGC_GAPS_SLACK)),
             *found = exactly(4 * (gaps.chunk + TAGC_GAPS_SLACK));
    for (size_t i = 0; i < n_available; i++) {
        tagc_gaps_cursor a, b;
        gaps.kernels = available[i];
        require(tagc_gaps_validate(&gaps, body, n_bytes, &n_other) == n_code);
        if (!n_code) continue;
        require(n_other == n_items);
        tagc_gaps_seek(&gaps, body, 0, &a);
        tagc_gaps_seek(&gaps, body, 0, &b);
        while (a.chunk < gaps.n_chunks) {
            gaps.kernels = &tagc_code_scalar;
            size_t n = tagc_gaps_next(&gaps, body, &a, expected);
            gaps.kernels = available[i];
            require(tagc_gaps_next(&gaps, body, &b, found) == n);
            require(memcmp(expected, found, 4 * n) == 0);
        }
    }
    free(expected), free(found);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    if (n_bytes < HEAD) return 0;
    size_t n = 1 + (data[3] | (size_t)data[4] << 8);
    tagc_code_options o = {.n = n,
                           .k = (data[5] | (size_t)data[6] << 8) % (n + 1),
                           .sparse = data[0] & 1,
                           .values = data[1] % 5,
                           .block = 16 << data[2] % 9,
                           .residual = data[0] & 8    ? TAGC_FORMAT_INT8
                                       : data[0] & 16 ? TAGC_FORMAT_INT4
                                                      : 0};
    const tagc_code *code = tagc_code_of(&o);
    void *scratch = scratch_for(code, &o);
    uint8_t *body;
    size_t n_body = n_bytes - HEAD;
    if (data[0] & 4) {
        n_body = real_body(&o, scratch, data + HEAD, n_bytes - HEAD, &body);
    } else {
        body = exactly(n_body);
        memcpy(body, data + HEAD, n_body);
    }
    if (o.sparse) compare_tables(&o, body, n_body);
    if (code->validate(&o, body, n_body) == TAGC_OK) {
        float *sums = exactly(4 * n);
        tagc_body bodies[2] = {{body, n_body, 0}, {body, n_body, 0}};
        code->decode(&o, bodies, 2, 0, 0.25f, sums, scratch, NULL);
        for (size_t i = 0; i < n; i++) require(isfinite(sums[i]));
        free(sums);
    }
    tagc_memory_destroy(scratch);
    free(body);
    return 0;
}
