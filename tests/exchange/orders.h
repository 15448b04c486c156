/* One rank begins two units in another order than the others: both fail on all ranks, with both names, and what comes after
 * that is as if it had not happened. The body is for ranks on any transport. */
#ifndef TAGC_TESTS_EXCHANGE_ORDERS_H
#define TAGC_TESTS_EXCHANGE_ORDERS_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../lengths.h"
#include "exchange/gatherer/gatherer.h"
#include "exchange/options.h"
#include "exchange/reducer.h"
#include "whole.h"

enum { ORDER_TEXT_BYTES = 512, ORDER_STEPS = 4, ORDER_SWAPPED = 1 };

/* What goes wrong on this rank: the first failure. */
typedef struct order_check {
    tagc_comm *comm;
    int odd;       /* the rank that begins B first */
    int has_names; /* else they are called by their numbers */
    char failure[ORDER_TEXT_BYTES];
} order_check;

#define ORDER_EXPECT(check, condition)                                                                       \
    do {                                                                                                     \
        if (!(condition) && !(check)->failure[0])                                                            \
            snprintf((check)->failure, ORDER_TEXT_BYTES, "line %d: %s (last error: %.200s)", __LINE__,       \
                     #condition, tagc_last_error());                                                         \
    } while (0)

static inline float order_value(int step, int rank, uint64_t i) {
    uint64_t x = (uint64_t)step * 1000003 + (uint64_t)rank * 7919 + i * 2654435761u + 1;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    double value = (double)(x >> 40) / 16777216.0 - 0.5;
    return (float)(value * value * value);
}

/* "rank 1 exchanges "b", this rank "a"", where a is what this rank begins first. */
static inline void order_expect_text(order_check *c, const char *here, const char *there) {
    char due[ORDER_TEXT_BYTES];
    int rank = tagc_comm_rank(c->comm), other = rank == c->odd ? (c->odd == 0) : c->odd;
    snprintf(due, sizeof due,
             "rank %d exchanges \"%s\", this rank \"%s\": begin units in the same order on all ranks",
             tagc_comm_name(c->comm, other), there, here);
    ORDER_EXPECT(c, strcmp(tagc_last_error(), due) == 0);
}

/* Two objects, of which u is the first that this rank begins, fail; the message of each names both. */
static inline void order_expect_failures(order_check *c, tagc_status (*end)(void *), void *const units[2],
                                         const char *const names[2]) {
    int first = tagc_comm_rank(c->comm) == c->odd;
    for (int i = 0; i < 2; i++) {
        int u = i ? 1 - first : first;
        ORDER_EXPECT(c, end(units[u]) == TAGC_ERR_MISMATCH);
        order_expect_text(c, names[u], names[1 - u]);
    }
}

static inline void order_name(order_check *c, const tagc_identity *identity, int u, char *name) {
    if (c->has_names)
        snprintf(name, TAGC_UNIT_NAME_BYTES, "blocks.%d (compressed)", 3 + u);
    else
        snprintf(name, TAGC_UNIT_NAME_BYTES, "%s %u, tag %d", identity->noun, identity->serial, u);
}

/* ---- reducers ---- */

static inline tagc_status order_end_reducer(void *reducer) {
    return tagc_reducer_end(reducer, NULL);
}

/* Reducers 0 and 1 fail in one step; 2 and 3 do without that step, and have the same sums and residuals in all others. */
static inline void order_of_reducers(order_check *c, const tagc_reducer_options *options) {
    size_t n = (size_t)options->n_elems;
    float *gradient[4], *output[4], *residual[2] = {calloc(n, sizeof(float)), calloc(n, sizeof(float))};
    tagc_reducer *r[4] = {NULL};
    char names[2][TAGC_UNIT_NAME_BYTES];
    int rank = tagc_comm_rank(c->comm);
    for (int u = 0; u < 4; u++) {
        tagc_reducer_options o = *options;
        o.tag = (uint64_t)u;
        ORDER_EXPECT(c, tagc_reducer_create(c->comm, &o, &r[u]) == TAGC_OK);
        gradient[u] = calloc(n, sizeof(float));
        output[u] = calloc(n, sizeof(float));
    }
    for (int u = 0; u < 2 && !c->failure[0]; u++) {
        order_name(c, &r[u]->identity, u, names[u]);
        if (c->has_names) tagc_reducer_set_name(r[u], names[u]);
    }
    uint64_t n_residual = r[3] ? tagc_reducer_residual_elems(r[0]) : 0;
    for (int step = 0; step < ORDER_STEPS && !c->failure[0]; step++) {
        int is_swapped = step == ORDER_SWAPPED, first = is_swapped && rank == c->odd;
        for (int u = 0; u < 4; u++) /* of the same positions and lengths, so that fronts stay equal */
            for (size_t i = 0; i < n; i++) gradient[u][i] = order_value(step, rank, i) * (float)(1 + u % 2);
        if (is_swapped && n_residual) (void)tagc_reducer_get_residual(r[0], residual[0], n_residual);
        for (int i = 0; i < 2; i++) {
            int u = i ? 1 - first : first;
            ORDER_EXPECT(c, begin_reducer(r[u], gradient[u], output[u]) == TAGC_OK);
        }
        if (is_swapped) {
            void *const units[2] = {r[0], r[1]};
            order_expect_failures(c, order_end_reducer, units, (const char *const[2]){names[0], names[1]});
            if (n_residual)
                ORDER_EXPECT(c, tagc_reducer_get_residual(r[0], residual[1], n_residual) == TAGC_OK);
            ORDER_EXPECT(c, memcmp(residual[0], residual[1], n_residual * sizeof(float)) == 0);
            for (int u = 2; u < 4; u++)
                ORDER_EXPECT(c, tagc_reducer_set_steps(r[u], tagc_reducer_steps(r[0])) == TAGC_OK);
            continue;
        }
        for (int u = 0; u < 2; u++) ORDER_EXPECT(c, tagc_reducer_end(r[u], NULL) == TAGC_OK);
        for (int u = 2; u < 4; u++)
            ORDER_EXPECT(c, run_reducer(r[u], gradient[u], output[u], NULL) == TAGC_OK);
        for (int u = 0; u < 2; u++) ORDER_EXPECT(c, memcmp(output[u], output[2 + u], n * sizeof(float)) == 0);
    }
    for (int u = 0; u < 4; u++) {
        tagc_reducer_destroy(r[u]);
        free(gradient[u]);
        free(output[u]);
    }
    free(residual[0]);
    free(residual[1]);
}

/* ---- gathers ---- */

static inline tagc_status order_end_gatherer(void *gatherer) {
    return tagc_gatherer_end(gatherer);
}

static inline void order_of_gathers(order_check *c, const tagc_gatherer_options *options) {
    int rank = tagc_comm_rank(c->comm), world_size = tagc_comm_world_size(c->comm);
    size_t n = (size_t)options->n_elems, shard = n / (size_t)world_size;
    float *own[4], *full[4];
    tagc_gatherer *g[4] = {NULL};
    char names[2][TAGC_UNIT_NAME_BYTES];
    for (int u = 0; u < 4; u++) {
        tagc_gatherer_options o = *options;
        o.tag = (uint64_t)u;
        ORDER_EXPECT(c, tagc_gatherer_create(c->comm, &o, &g[u]) == TAGC_OK);
        own[u] = calloc(shard, sizeof(float));
        full[u] = calloc(n, sizeof(float));
    }
    for (int u = 0; u < 2 && !c->failure[0]; u++) {
        order_name(c, &g[u]->identity, u, names[u]);
        if (c->has_names) tagc_identity_set_name(c->comm, &g[u]->identity, names[u]);
    }
    for (int step = 0; step < ORDER_STEPS && !c->failure[0]; step++) {
        int is_swapped = step == ORDER_SWAPPED, first = is_swapped && rank == c->odd;
        for (int u = 0; u < 4; u++)
            for (size_t i = 0; i < shard; i++)
                own[u][i] = (order_value(0, rank, i) + order_value(step, rank, i) / 64) * (float)(1 + u % 2);
        for (int i = 0; i < 2; i++) {
            int u = i ? 1 - first : first;
            ORDER_EXPECT(c, begin_gatherer(g[u], own[u], full[u]) == TAGC_OK);
        }
        if (is_swapped) {
            void *const units[2] = {g[0], g[1]};
            order_expect_failures(c, order_end_gatherer, units, (const char *const[2]){names[0], names[1]});
            for (int u = 2; u < 4; u++)
                ORDER_EXPECT(c, tagc_gatherer_reset(g[u]) == TAGC_OK); /* as 0 and 1 are */
            continue;
        }
        for (int u = 0; u < 2; u++) ORDER_EXPECT(c, tagc_gatherer_end(g[u]) == TAGC_OK);
        for (int u = 2; u < 4; u++) {
            ORDER_EXPECT(c, begin_gatherer(g[u], own[u], full[u]) == TAGC_OK);
            ORDER_EXPECT(c, tagc_gatherer_end(g[u]) == TAGC_OK);
        }
        for (int u = 0; u < 2; u++) ORDER_EXPECT(c, memcmp(full[u], full[2 + u], n * sizeof(float)) == 0);
        for (size_t i = 0; i < shard && options->format == TAGC_FORMAT_FP32; i++)
            ORDER_EXPECT(c, full[1][(size_t)rank * shard + i] == own[1][i]);
    }
    for (int u = 0; u < 4; u++) {
        tagc_gatherer_destroy(g[u]);
        free(own[u]);
        free(full[u]);
    }
}

/* ---- all of them ---- */

/* Sizes, so that small units send fronts with their headers, and large ones headers alone. */
static inline void order_of_all(order_check *c, int has_paper, int is_short) {
    int world_size = tagc_comm_world_size(c->comm);
    uint64_t small = 512 * (uint64_t)world_size,
             large = (1u << 20) / (uint64_t)world_size * (uint64_t)world_size + (uint64_t)world_size;
    static const struct {
        int exchange, format, output, residual, is_large;
        double sparsity;
    } steps[] = {{WHOLE, -1, TAGC_OUTPUT_SHARD, -1, 0, -1},
                 {WHOLE, TAGC_FORMAT_BF16, TAGC_OUTPUT_UNIT, -1, 0, -1},
                 {TAGC_EXCHANGE_DIRECT, -1, TAGC_OUTPUT_SHARD, -1, 0, 0.9},
                 {TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT4, TAGC_OUTPUT_UNIT, -1, 0, 0.9},
                 {TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_FP32, TAGC_OUTPUT_UNIT, -1, 0, 0},
                 {TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT8, TAGC_OUTPUT_SHARD, TAGC_RESIDUAL_NONE, 0, 0},
                 {TAGC_EXCHANGE_DIRECT, -1, TAGC_OUTPUT_SHARD, -1, 1, 0.98},
                 {TAGC_EXCHANGE_PACKED, -1, TAGC_OUTPUT_SHARD, -1, 0, 0.9},
                 {TAGC_EXCHANGE_SKETCH, -1, TAGC_OUTPUT_UNIT, -1, 0, 0.95}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps && !c->failure[0]; i++) {
        int is_paper = steps[i].exchange == TAGC_EXCHANGE_PACKED || steps[i].exchange == TAGC_EXCHANGE_SKETCH;
        if ((is_paper && !has_paper) || (is_short && steps[i].is_large)) continue;
        tagc_reducer_options o;
        tagc_reducer_options_init(&o);
        o.n_elems = steps[i].is_large ? large : small;
        o.format = steps[i].format;
        o.output = steps[i].output;
        o.residual = steps[i].residual;
        o.sparsity = steps[i].sparsity;
        set_exchange(&o, steps[i].exchange);
        c->has_names = i % 2 == 1;
        order_of_reducers(c, &o);
        if (c->failure[0])
            snprintf(c->failure + strlen(c->failure), ORDER_TEXT_BYTES - strlen(c->failure), " [step %zu]",
                     i);
    }
    for (int kind = 0; kind < TAGC_N_GATHER_KINDS && !c->failure[0]; kind++) {
        tagc_gatherer_options o;
        tagc_gatherer_options_init(&o);
        tagc_gatherer_options_choose(&o, kind);
        o.n_elems = 2048 * (uint64_t)world_size;
        o.check_every = o.delta ? 3 : 0;
        c->has_names = kind % 2;
        order_of_gathers(c, &o);
        if (c->failure[0])
            snprintf(c->failure + strlen(c->failure), ORDER_TEXT_BYTES - strlen(c->failure), " [gather %s]",
                     tagc_gather_choices[kind].name);
    }
}

#endif
