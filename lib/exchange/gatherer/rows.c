/* Encodes and decodes the rows of a gather, piece by piece on the threads of the pool. Bytes and values do not depend on the
 * number of threads. */
#include "codec/bf16.h"
#include "codec/delta.h"
#include "exchange/gatherer/gatherer.h"

#include <math.h>
#include <string.h>

enum { PIECE_BLOCKS = 64, PIECE_ELEMS = PIECE_BLOCKS * TAGC_DELTA_BLOCK }; /* 64 KiB of fp32 */

typedef struct rows_job {
    const tagc_gatherer *g;
    const tagc_row *rows; /* (n_rows) */
    int n_rows;
    void (*piece)(const tagc_gatherer *g, const tagc_row *row, size_t at, size_t n);
} rows_job;

static void work(void *arg, int index, int n_threads) {
    const rows_job *job = arg;
    size_t shard = job->g->shard, n_pieces = (shard + PIECE_ELEMS - 1) / PIECE_ELEMS;
    for (size_t i = (size_t)index; i < n_pieces * (size_t)job->n_rows; i += (size_t)n_threads) {
        size_t at = i % n_pieces * PIECE_ELEMS;
        job->piece(job->g, &job->rows[i / n_pieces], at, shard - at < PIECE_ELEMS ? shard - at : PIECE_ELEMS);
    }
}

/* Each thread sets its own flag in its own piece. The flags are read after all threads have ended. */
static void encode_piece(const tagc_gatherer *g, const tagc_row *row, size_t at, size_t n) {
    int nonfinite;
    if (!g->bits || (g->is_delta && g->is_whole)) {
        uint16_t *halves = (uint16_t *)(void *)row->body + at, largest = 0;
        tagc_bf16_narrow(g->own + at, halves, n);
        for (size_t i = 0; i < n; i++) {
            uint16_t magnitude = halves[i] & 0x7fffu;
            largest = magnitude > largest ? magnitude : largest;
        }
        nonfinite = largest >= 0x7f80u;
    } else {
        const float *base = g->is_delta ? g->full + (size_t)g->row * g->shard : NULL;
        nonfinite = tagc_delta_encode_part(g->bits, g->own, base, g->shard, at, n, row->body);
    }
    if (nonfinite) atomic_store_explicit(row->nonfinite, 1, memory_order_relaxed);
}

static void decode_piece(const tagc_gatherer *g, const tagc_row *row, size_t at, size_t n) {
    if (row->is_void)
        for (size_t i = 0; i < n; i++) row->values[at + i] = NAN;
    else if (!g->bits || (g->is_delta && g->is_whole))
        tagc_bf16_widen((const uint16_t *)(const void *)row->body + at, row->values + at, n);
    else if (g->is_delta)
        tagc_delta_apply_part(g->bits, row->body, row->values, g->shard, at, n);
    else
        tagc_delta_decode_part(g->bits, row->body, row->values, g->shard, at, n);
}

int tagc_gatherer_encode_row(tagc_gatherer *g, uint8_t *body) {
    if (g->beside) return g->beside->encode_row(g, body);
    atomic_int nonfinite = 0;
    tagc_row row = {.body = body, .nonfinite = &nonfinite};
    rows_job job = {g, &row, 1, encode_piece};
    tagc_pool_run(g->pool, work, &job);
    return atomic_load(&nonfinite);
}

void tagc_gatherer_decode_rows(tagc_gatherer *g, int n_rows) {
    if (g->beside) {
        g->beside->decode_rows(g, n_rows);
        return;
    }
    rows_job job = {g, g->decoded, n_rows, decode_piece};
    tagc_pool_run(g->pool, work, &job);
}
