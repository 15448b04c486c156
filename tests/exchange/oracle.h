/* A whole step by brute force, one thread, all ranks in view: what a reducer must reproduce bit for bit. */
#ifndef TAGC_TESTS_EXCHANGE_ORACLE_H
#define TAGC_TESTS_EXCHANGE_ORACLE_H

#include "../bits.h"
#include "codec/select.h"
#include "paper/sketch.h"
#include "tagc/tagc.h"
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct oracle_item {
    uint32_t size, position; /* |acc| as bits */
} oracle_item;

static inline int oracle_order(const void *a, const void *b) {
    const oracle_item *x = a, *y = b;
    if (x->size != y->size) return x->size < y->size ? 1 : -1;
    return x->position < y->position ? -1 : 1;
}

/* Sets selected (n) to 1 at the k largest, at zeros only when k == n. */
static inline void oracle_select(const float *acc, size_t n, size_t k, uint8_t *selected) {
    if (k == n) {
        memset(selected, 1, n);
        return;
    }
    oracle_item *items = malloc((n + 1) * sizeof *items);
    for (size_t i = 0; i < n; i++) items[i] = (oracle_item){bits_of(acc[i]) & 0x7fffffffu, (uint32_t)i};
    qsort(items, n, sizeof *items, oracle_order);
    memset(selected, 0, n);
    for (size_t j = 0; j < k; j++)
        if (items[j].size != 0) selected[items[j].position] = 1;
    free(items);
}

static inline float zero_as_residual(float value) {
    return value == 0 ? TAGC_ZERO_RESIDUAL : value;
}

/* gradients, residuals (W, n_elems): the residuals become those after the step. output (n_elems): the shards
 * of all owners in rank order. is_fixed rounds as fixed-point cells do. */
static inline void oracle_step(const tagc_reducer_options *options, int world_size, int fill, int is_fixed,
                               const float *gradients, float *residuals, float *output) {
    size_t n = (size_t)options->n_elems, shard = n / (size_t)world_size, W = (size_t)world_size;
    size_t k = tagc_select_count(shard, options->sparsity);
    float scale = options->op == TAGC_OP_AVG ? 1.0f / (float)world_size : 1.0f, max_abs = 0;
    float *acc = malloc(W * n * sizeof *acc);
    uint8_t *selected = malloc(W * n + 1);
    for (size_t r = 0; r < W; r++)
        for (size_t i = 0; i < n; i++) acc[r * n + i] = gradients[r * n + i] + residuals[r * n + i];
    for (size_t r = 0; r < W; r++)
        for (size_t d = 0; d < W; d++) {
            oracle_select(acc + r * n + d * shard, shard, k, selected + r * n + d * shard);
            for (size_t i = d * shard; i < (d + 1) * shard; i++)
                if (selected[r * n + i]) max_abs = fmaxf(max_abs, fabsf(acc[r * n + i]));
        }
    int exponent = tagc_sketch_scale_exponent(max_abs, world_size);
    for (size_t i = 0; i < n; i++) {
        int in_union = 0;
        for (size_t r = 0; r < W; r++) in_union |= selected[r * n + i];
        float sum = 0;
        int64_t fixed_sum = 0;
        int divides_first = options->exchange == TAGC_EXCHANGE_DIRECT &&
                            options->output == TAGC_OUTPUT_SHARD && (W & (W - 1)) != 0;
        for (size_t r = 0; r < W; r++) {
            float a = acc[r * n + i], sent = in_union && (fill || selected[r * n + i]) ? a : -0.0f;
            int is_sent = in_union && (fill || selected[r * n + i]);
            float left = is_sent ? -0.0f : a;
            if (is_fixed) {
                int64_t fixed = (int64_t)rint(ldexp(sent, exponent));
                fixed_sum += fixed;
                if (is_sent) left = (float)(sent - ldexp((double)fixed, -exponent));
            }
            float part = divides_first ? sent * scale : sent;
            sum = r > 0 ? sum + part : options->exchange == TAGC_EXCHANGE_DIRECT ? part + 0.0f : part;
            residuals[r * n + i] = zero_as_residual(left);
        }
        if (is_fixed) sum = (float)ldexp((double)(float)fixed_sum, -exponent);
        output[i] = in_union ? (scale == 1.0f || divides_first ? sum : sum * scale) : 0.0f;
    }
    free(selected);
    free(acc);
}

#endif
