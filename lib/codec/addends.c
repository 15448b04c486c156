/* Pieces of acc, and what is written of it and into it. */
#include "codec/addends.h"
#include "codec/bf16.h"
#include "codec/code_kernels.h"
#include "codec/residual.h"

#include <string.h>

enum {
    PIECE = 2048,  /* elements that are in the innermost cache together */
    RUN = 1 << 14, /* elements that a thread takes at a time */
};

void tagc_addends_parts(const tagc_addends *s, size_t first, size_t n, float *gradient_room,
                        float *residual_room, const float **gradient, const float **residual) {
    *gradient = gradient_room;
    *residual = s->residual ? residual_room : NULL;
    if (s->gradient_format == TAGC_FORMAT_BF16)
        tagc_bf16_widen((const uint16_t *)s->gradient + first, gradient_room, n);
    else
        *gradient = (const float *)s->gradient + first;
    if (!s->residual) return;
    if (s->residual_format == TAGC_FORMAT_FP32)
        *residual = (const float *)s->residual + first;
    else
        tagc_residual_read_ahead(s->residual_format, s->n, s->residual, first, n,
                                 (const char *)s->gradient + (first + n) * 4, residual_room);
}

void tagc_addends_prefetch(const tagc_addends *s, size_t at) {
    static const size_t bits[] = {
        [TAGC_FORMAT_FP32] = 32, [TAGC_FORMAT_BF16] = 16, [TAGC_FORMAT_INT8] = 8, [TAGC_FORMAT_INT4] = 4};
    size_t n_exponents = tagc_residual_exponent_bytes(s->residual_format, s->n);
    __builtin_prefetch((const char *)s->gradient + at * bits[s->gradient_format] / 8);
    if (s->residual)
        __builtin_prefetch((const char *)s->residual + n_exponents + at * bits[s->residual_format] / 8);
}

void tagc_addends_read(const tagc_addends *s, size_t first, size_t n, float *acc) {
    float gradient_room[PIECE], residual_room[PIECE];
    const float *gradient, *residual;
    for (size_t at = 0; at < n; at += PIECE) {
        size_t n_here = n - at < PIECE ? n - at : PIECE;
        tagc_addends_parts(s, first + at, n_here, gradient_room, residual_room, &gradient, &residual);
        if (residual)
            tagc_code_best()->accumulate(gradient, residual, acc + at, n_here);
        else
            memcpy(acc + at, gradient, n_here * sizeof *acc);
    }
}

/* ---- the new residual ---- */

typedef struct settling {
    const tagc_addends *addends;
    const uint32_t *indices; /* (n_sent) */
    const float *errors;     /* (n_sent), or NULL */
    size_t n_sent;
    uint32_t seed;
    void *residual_out;
} settling;

size_t tagc_first_from(const uint32_t *indices, size_t n, size_t at) {
    size_t low = 0;
    while (low < n) {
        size_t middle = low + (n - low) / 2;
        if (indices[middle] < at)
            low = middle + 1;
        else
            n = middle;
    }
    return low;
}

static void settle_work(void *arg, int index, int n_threads) {
    const settling *s = arg;
    const tagc_addends *addends = s->addends;
    float acc[PIECE];
    for (size_t run = (size_t)index * RUN; run < addends->n; run += (size_t)n_threads * RUN) {
        size_t end = addends->n - run < RUN ? addends->n : run + RUN,
               j = tagc_first_from(s->indices, s->n_sent, run);
        for (size_t at = run; at < end; at += PIECE) {
            size_t n_here = end - at < PIECE ? end - at : PIECE;
            tagc_addends_read(addends, at, n_here, acc);
            for (; j < s->n_sent && s->indices[j] < at + n_here; j++)
                acc[s->indices[j] - at] = s->errors ? s->errors[j] : -0.0f;
            tagc_residual_write(addends->residual_format, addends->n, acc, at, n_here, s->seed,
                                s->residual_out);
        }
    }
}

void tagc_addends_settle(const tagc_addends *addends, const uint32_t *indices, const float *errors,
                         size_t n_sent, uint32_t seed, void *residual_out, tagc_pool *pool) {
    settling s = {addends, indices, errors, n_sent, seed, residual_out};
    tagc_pool_run(addends->n > RUN ? pool : NULL, settle_work, &s);
}

const float *tagc_plain_values(int gradient_format, const uint8_t *bytes, size_t first, size_t n,
                               float *room) {
    const void *values = bytes;
    if (gradient_format != TAGC_FORMAT_BF16) return (const float *)values + first;
    tagc_bf16_widen((const uint16_t *)values + first, room, n);
    return room;
}
