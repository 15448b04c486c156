/* Encodes and decodes the rows of a gather, piece by piece on the threads of the pool. Bytes and values do not depend on the
 * number of threads. */
#include "codec/bf16.h"
#include "codec/delta.h"
#include "core/xxh3.h"
#include "exchange/gatherer/gatherer.h"

#include <math.h>
#include <string.h>

enum { PIECE_BLOCKS = 64, PIECE_ELEMS = PIECE_BLOCKS * TAGC_DELTA_BLOCK }; /* 64 KiB of fp32 */

typedef struct rows_work {
    const tagc_gatherer *g;
    const tagc_row *rows; /* (n_rows) */
    int n_rows;
    void (*piece)(const tagc_gatherer *g, const tagc_row *row, size_t at, size_t n);
} rows_work;

static void work(void *arg, int index, int n_threads) {
    const rows_work *w = arg;
    size_t shard = w->g->shard, n_pieces = (shard + PIECE_ELEMS - 1) / PIECE_ELEMS;
    for (size_t i = (size_t)index; i < n_pieces * (size_t)w->n_rows; i += (size_t)n_threads) {
        size_t at = i % n_pieces * PIECE_ELEMS;
        w->piece(w->g, &w->rows[i / n_pieces], at, shard - at < PIECE_ELEMS ? shard - at : PIECE_ELEMS);
    }
}

/* Each thread sets its own flag in its own piece. The flags are read after all threads have ended. */
static void encode_piece(const tagc_gatherer *g, const tagc_row *row, size_t at, size_t n) {
    int nonfinite = 0; /* of whole parameters they travel */
    if (g->is_stochastic) {
        tagc_values_encode(&g->values, g->own + at, NULL, NULL, at, n, g->shard, row->body);
    } else if (!g->bits || (g->is_delta && g->is_whole)) {
        uint16_t *halves = (uint16_t *)(void *)row->body + at, largest = 0;
        tagc_bf16_narrow(g->own + at, halves, n);
        for (size_t i = 0; i < n; i++) {
            uint16_t magnitude = halves[i] & 0x7fffu;
            largest = magnitude > largest ? magnitude : largest;
        }
        nonfinite = largest >= 0x7f80u;
    } else {
        const void *base = g->is_delta ? tagc_gatherer_full(g, g->rank) : NULL;
        nonfinite = tagc_delta_encode_part(g->bits, g->own, base, g->width, g->shard, at, n, row->body);
    }
    if (nonfinite) atomic_store_explicit(row->nonfinite, 1, memory_order_relaxed);
}

static void decode_piece(const tagc_gatherer *g, const tagc_row *row, size_t at, size_t n) {
    uint16_t *halves = g->width == sizeof *halves ? (uint16_t *)row->values + at : NULL;
    float *wides = halves ? NULL : (float *)row->values + at;
    if (row->is_void)
        for (size_t i = 0; i < n; i++)
            if (halves)
                halves[i] = TAGC_BF16_NAN;
            else
                wides[i] = NAN;
    else if (halves && g->is_whole)
        memcpy(halves, (const uint16_t *)(const void *)row->body + at, n * sizeof *halves);
    else if (!g->bits || (g->is_delta && g->is_whole))
        tagc_bf16_widen((const uint16_t *)(const void *)row->body + at, wides, n);
    else if (g->is_stochastic)
        tagc_values_decode(&g->values, row->body, at, n, g->shard, wides);
    else if (g->is_delta)
        tagc_delta_apply_part(g->bits, row->body, row->values, g->width, g->shard, at, n);
    else
        tagc_delta_decode_part(g->bits, row->body, row->values, g->shard, at, n);
}

static int encode_row(tagc_gatherer *g, uint8_t *body) {
    atomic_int nonfinite = 0;
    tagc_row row = {.body = body, .nonfinite = &nonfinite};
    rows_work rows = {g, &row, 1, encode_piece};
    tagc_pool_run(g->pool, work, &rows);
    return atomic_load(&nonfinite);
}

static void decode_rows(tagc_gatherer *g, int n_rows) {
    rows_work rows = {g, g->decoded, n_rows, decode_piece};
    tagc_pool_run(g->pool, work, &rows);
}

static uint64_t checksum(tagc_gatherer *g, int row) {
    return tagc_xxh3(tagc_gatherer_full(g, row), g->shard * g->width, 0);
}

static tagc_status make(tagc_gatherer *g) {
    (void)g;
    return TAGC_OK;
}

static void end(tagc_gatherer *g) {
    (void)g;
}

const tagc_gather_runner tagc_host_gathers = {
    .make = make, .end = end, .encode_row = encode_row, .decode_rows = decode_rows, .checksum = checksum};
