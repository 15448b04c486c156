/* A step of the direct exchange by plain loops, all ranks in view: who adds what to whom, in which order, and what
 * stays. How a fragment is coded, and a residual stored, is the codec's business and has tests of its own; here a residual
 * is fp32 values, which pass through a stored row after each change. */
#ifndef TAGC_TESTS_EXCHANGE_DIRECT_ORACLE_H
#define TAGC_TESTS_EXCHANGE_DIRECT_ORACLE_H

#include "codec/bf16.h"
#include "codec/code.h"
#include "codec/select.h"
#include "exchange/options.h"
#include "tagc/tagc.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct direct_model {
    tagc_reducer_options options; /* defaults resolved */
    size_t n_ranks, n_hosts, per_host, n, shard;
    int coded, has_residual;
    int stored; /* tagc_format of the residual */
    float scale;
} direct_model;

static inline tagc_code_options direct_code(const direct_model *m, int of_sums) {
    double sparsity = m->options.sparsity, result = m->options.result_sparsity;
    int format = m->options.format, result_format = m->options.result_format;
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
    direct_model m = {.options = *o, .n_ranks = (size_t)world_size, .per_host = (size_t)o->ranks_per_host};
    tagc_reducer_options_resolve(&m.options);
    if (m.options.block == 0) m.options.block = 128;
    m.n_hosts = m.n_ranks / m.per_host;
    m.n = (size_t)o->n_elems;
    m.shard = m.n / m.n_ranks;
    m.coded = m.n_hosts > 1 || m.per_host == 1;
    tagc_code_options fragment = direct_code(&m, 0), sums = direct_code(&m, 1);
    m.has_residual = m.coded && (m.options.sparsity > 0 || fragment.values > TAGC_FORMAT_BF16 ||
                                 (m.options.output && (sums.sparse || sums.values > TAGC_FORMAT_BF16)));
    m.stored = o->residual == -1 ? TAGC_FORMAT_INT8 : o->residual;
    m.scale = o->op == TAGC_OP_AVG ? 1.0f / (float)world_size : 1.0f;
    return m;
}

/* Return how many values a rank's residual and its output have. */
static inline size_t direct_residual(const direct_model *m) {
    return m->has_residual ? m->n / m->per_host : 0;
}
static inline size_t direct_output(const direct_model *m) {
    int all = m->options.output;
    return all == 1 ? m->n : all == 2 ? m->n / m->per_host : m->shard;
}

/* Returns the first element of the unit that the rank `local` of `host` owns. */
static inline size_t direct_begin(const direct_model *m, size_t host, size_t local) {
    size_t row = m->options.output == 2 ? local * m->n_hosts + host : host * m->per_host + local;
    return row * m->shard;
}

static inline float direct_narrowed(const direct_model *m, float x) {
    uint16_t half;
    if (m->options.format == TAGC_FORMAT_FP32) return x;
    tagc_bf16_narrow(&x, &half, 1);
    tagc_bf16_widen(&half, &x, 1);
    return x;
}

/* Writes what the rank (host, local) has for an owner's elements: the sum over its host. */
static inline void direct_host_sum(const direct_model *m, const float *gradients, size_t host, size_t local,
                                   size_t begin, float *sum) {
    for (size_t i = 0; i < m->shard; i++)
        for (size_t l = 0; l < m->per_host; l++) {
            float part = gradients[(host * m->per_host + l) * m->n + begin + i];
            if (l != local) part = direct_narrowed(m, part);
            sum[i] = l == 0 ? part : sum[i] + part;
        }
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

/* Writes the owned sums, from contributions (hosts, shard), of which the owner's is not encoded if the sums are sent back.
 * residual: of the owner's own row. */
static inline void direct_owner(const direct_model *m, const float *contributions, float *residual,
                                float *sums, uint64_t *n_sent) {
    int is_back = m->options.output != 0;
    for (size_t i = 0; i < m->shard; i++) {
        sums[i] = 0;
        for (size_t h = 0; h < m->n_hosts; h++)
            sums[i] += (is_back ? 1 : m->scale) * contributions[h * m->shard + i];
    }
    if (is_back) direct_code_row(m, 1, sums, residual, m->scale, sums, n_sent);
}

/* Writes the owned sums where there is one host, whose exchange is dense. */
static inline void direct_dense_owner(const direct_model *m, const float *gradients, size_t local,
                                      size_t begin, float *sums) {
    direct_host_sum(m, gradients, 0, local, begin, sums);
    for (size_t i = 0; i < m->shard; i++) {
        if (m->scale != 1) sums[i] *= m->scale;
        if (m->options.output == 1) sums[i] = direct_narrowed(m, sums[i]);
    }
}

/* step: the number of it, from 1. gradients (W, n); residuals (W, n): of each rank the first direct_residual values, which
 * become those after the step; owned (n): the sums of all owners at their place in the unit; n_sent (W,) is added to. */
static inline void direct_step(const direct_model *m, uint64_t step, const float *gradients, float *residuals,
                               float *owned, uint64_t *n_sent) {
    size_t shard = m->shard;
    float *sum = malloc(shard * sizeof *sum), *contributions = malloc(m->n_hosts * shard * sizeof *sum);
    for (size_t local = 0; local < m->per_host; local++) {
        for (size_t to = 0; to < m->n_hosts; to++) {
            size_t begin = direct_begin(m, to, local);
            for (size_t h = 0; m->coded && h < m->n_hosts; h++) {
                size_t rank = h * m->per_host + local;
                float *residual = m->has_residual ? residuals + rank * m->n + to * shard : NULL;
                direct_host_sum(m, gradients, h, local, begin, sum);
                if (m->options.output != 0 && h == to) {
                    memcpy(contributions + h * shard, sum, shard * sizeof *sum);
                    continue;
                }
                direct_code_row(m, 0, sum, residual, 1, contributions + h * shard, &n_sent[rank]);
                if (residual) direct_store(m, step, rank, to, residual);
            }
            size_t owner = to * m->per_host + local;
            float *residual = m->has_residual ? residuals + owner * m->n + to * shard : NULL;
            if (m->coded) direct_owner(m, contributions, residual, owned + begin, &n_sent[owner]);
            if (m->coded && residual && m->options.output) direct_store(m, step, owner, to, residual);
            if (!m->coded) direct_dense_owner(m, gradients, local, begin, owned + begin);
        }
    }
    free(sum);
    free(contributions);
}

/* Writes the output (direct_output) of one rank, from all owners' sums. */
static inline void direct_expected(const direct_model *m, size_t rank, const float *owned, float *output) {
    size_t host = rank / m->per_host, local = rank % m->per_host, n = direct_output(m);
    size_t begin = m->options.output == 0   ? direct_begin(m, host, local)
                   : m->options.output == 1 ? 0
                                            : local * m->n_hosts * m->shard;
    memcpy(output, owned + begin, n * sizeof *output);
}

#endif
