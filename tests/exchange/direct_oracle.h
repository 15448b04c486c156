/* A step of the direct exchange by plain loops, all ranks in view: who adds what to whom, in which order, and what
 * stays. How a fragment is coded, and a residual stored, is the codec's business and has tests of its own; here a residual
 * is fp32 values, which pass through a stored row after each change. */
#ifndef TAGC_TESTS_EXCHANGE_DIRECT_ORACLE_H
#define TAGC_TESTS_EXCHANGE_DIRECT_ORACLE_H

#include "codec/code.h"
#include "codec/select.h"
#include "exchange/options.h"
#include "tagc/tagc.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct direct_model {
    tagc_reducer_options options; /* defaults resolved */
    size_t n_ranks, n, shard;
    int has_residual;
    int stored; /* tagc_format of the residual */
    float scale;
} direct_model;

static inline tagc_code_options direct_code(const direct_model *m, int of_sums) {
    double sparsity = m->options.sparsity, result = m->options.result.sparsity;
    int format = m->options.format, result_format = m->options.result.format;
    size_t k = tagc_select_count(m->shard, sparsity);
    int sparse = k < m->shard; /* sums, too */
    if (of_sums) {
        if (result == -1) result = 2.4 * (1 - sparsity) < 1 ? 1 - 2.4 * (1 - sparsity) : 0;
        if (result_format == -1)
            result_format = sparsity > 0 && format > TAGC_FORMAT_INT4 ? TAGC_FORMAT_INT4 : format;
        format = result_format;
        k = tagc_select_count(m->shard, result);
        sparse |= k < m->shard;
    }
    return (tagc_code_options){
        .n = m->shard, .k = k, .sparse = sparse, .values = format, .block = m->options.block};
}

static inline direct_model direct_model_of(const tagc_reducer_options *o, int world_size) {
    direct_model m = {.options = *o, .n_ranks = (size_t)world_size};
    tagc_reducer_options_resolve(&m.options);
    if (m.options.block == 0) m.options.block = 128;
    m.n = (size_t)o->n_elems;
    m.shard = m.n / m.n_ranks;
    tagc_code_options fragment = direct_code(&m, 0), sums = direct_code(&m, 1);
    m.has_residual = m.options.sparsity > 0 || fragment.values > TAGC_FORMAT_BF16 ||
                     (m.options.output && (sums.sparse || sums.values > TAGC_FORMAT_BF16));
    m.stored = o->residual == -1 ? TAGC_FORMAT_INT8 : o->residual;
    m.scale = o->op == TAGC_OP_AVG ? 1.0f / (float)world_size : 1.0f;
    return m;
}

/* Return how many values a rank's residual and its output have. */
static inline size_t direct_residual(const direct_model *m) {
    return m->has_residual ? m->n : 0;
}
static inline size_t direct_output(const direct_model *m) {
    return m->options.output ? m->n : m->shard;
}

/* What is left of a residual (shard) that is stored as row `row` of `rank`. */
static inline void direct_store(const direct_model *m, uint64_t step, size_t rank, size_t row,
                                float *residual) {
    void *stored = calloc(1, tagc_residual_bytes(m->stored, m->shard));
    tagc_residual_write(m->stored, m->shard, residual, 0, m->shard,
                        tagc_residual_seed(m->options.rounding_seed, step, (uint32_t)rank, (uint32_t)row),
                        stored);
    tagc_residual_read(m->stored, m->shard, stored, 0, m->shard, residual);
    free(stored);
}

/* Writes scale times what a receiver gets of `from` + residual to values (shard), which may be `from`, and updates the residual
 * (NULL: there is none). Returns 0 if something is not finite. */
static inline int direct_code_row(const direct_model *m, int of_sums, const float *from, float *residual,
                                  float scale, float *values, uint64_t *n_sent) {
    tagc_code_options o = direct_code(m, of_sums);
    const tagc_code *code = tagc_code_of(&o);
    uint8_t *body = malloc(code->max_bytes(&o) + 1);
    void *scratch = aligned_alloc(64, (code->scratch_bytes(&o, 1) + 127) / 64 * 64);
    float *after = malloc(m->shard * sizeof *after);
    tagc_encoded encoded;
    code->encode(&o, from, residual, residual ? after : NULL, 0, body, scratch, NULL, &encoded);
    tagc_body one = {body, encoded.n_bytes, 0};
    if (!encoded.nonfinite) code->decode(&o, &one, 1, 0, scale, values, scratch, NULL);
    if (residual && !encoded.nonfinite) memcpy(residual, after, m->shard * sizeof *after);
    *n_sent += encoded.n_sent;
    free(body);
    free(scratch);
    free(after);
    return !encoded.nonfinite;
}

/* Writes the owned sums, from contributions (W, shard), of which the owner's is not encoded if the sums are sent back.
 * residual: of the owner's own row. */
static inline void direct_owner(const direct_model *m, const float *contributions, float *residual,
                                float *sums, uint64_t *n_sent) {
    int is_back = m->options.output != 0;
    for (size_t i = 0; i < m->shard; i++) {
        sums[i] = 0;
        for (size_t r = 0; r < m->n_ranks; r++)
            sums[i] += (is_back ? 1 : m->scale) * contributions[r * m->shard + i];
    }
    if (is_back) direct_code_row(m, 1, sums, residual, m->scale, sums, n_sent);
}

/* step: the number of it, from 1. gradients (W, n); residuals (W, n): of each rank the first direct_residual values, which
 * become those after the step; owned (n): the sums of all owners at their place in the unit; n_sent (W,) is added to. */
static inline void direct_step(const direct_model *m, uint64_t step, const float *gradients, float *residuals,
                               float *owned, uint64_t *n_sent) {
    size_t shard = m->shard;
    float *contributions = malloc(m->n_ranks * shard * sizeof *contributions);
    for (size_t to = 0; to < m->n_ranks; to++) {
        for (size_t rank = 0; rank < m->n_ranks; rank++) {
            const float *row = gradients + rank * m->n + to * shard;
            float *residual = m->has_residual ? residuals + rank * m->n + to * shard : NULL;
            if (m->options.output != 0 && rank == to) {
                memcpy(contributions + rank * shard, row, shard * sizeof *row);
                continue;
            }
            direct_code_row(m, 0, row, residual, 1, contributions + rank * shard, &n_sent[rank]);
            if (residual) direct_store(m, step, rank, to, residual);
        }
        float *residual = m->has_residual ? residuals + to * m->n + to * shard : NULL;
        direct_owner(m, contributions, residual, owned + to * shard, &n_sent[to]);
        if (residual && m->options.output) direct_store(m, step, to, to, residual);
    }
    free(contributions);
}

/* Writes the output (direct_output) of one rank, from all owners' sums. */
static inline void direct_expected(const direct_model *m, size_t rank, const float *owned, float *output) {
    size_t begin = m->options.output ? 0 : rank * m->shard;
    memcpy(output, owned + begin, direct_output(m) * sizeof *output);
}

#endif
