/* Attention over tiles of queries. A tile sees all keys up to its last query, so its scores are a small (TILE, n_keys)
 * matrix that stays in cache. The (T, T) matrix of a head is never made, in forward or in backward.
 *
 *   S = Q K^T / sqrt(head size)    P = exp(S - lse)              O = P V
 *   dV += P^T dO                   dS = P (dO V^T - sum dO O)    dQ = dS K,  dK += dS^T Q      (each / sqrt)
 */
#include "gpt2/attention.h"

#include <cblas.h>
#include <math.h>
#include <string.h>

/* One head of one sequence: rows are n_embd or 3 * n_embd floats apart. */
typedef struct head {
    const float *q, *k, *v; /* (T, size) at stride 3 * n_embd */
    size_t place;           /* of the head in a (B, T, n_embd) array */
    size_t lse;             /* and in (B, n_head, T) */
    int size;
    float scale;
} head;

static head head_at(const tagc_attention *shape, const float *qkv, int batch, int index) {
    size_t n_embd = (size_t)shape->n_embd, n_tokens = (size_t)shape->n_tokens;
    int size = shape->n_embd / shape->n_head;
    size_t column = (size_t)index * (size_t)size;
    head h = {.size = size, .scale = 1.0f / sqrtf((float)size)};
    h.q = qkv + (size_t)batch * n_tokens * 3 * n_embd + column;
    h.k = h.q + n_embd;
    h.v = h.k + n_embd;
    h.place = (size_t)batch * n_tokens * n_embd + column;
    h.lse = ((size_t)batch * (size_t)shape->n_head + (size_t)index) * n_tokens;
    return h;
}

static int tile_rows(const tagc_attention *shape, int first) {
    int left = shape->n_tokens - first;
    return left < TAGC_ATTENTION_TILE ? left : TAGC_ATTENTION_TILE;
}

static void tile_forward(const tagc_attention *shape, const head *h, int first, float *out, float *lse) {
    int n_rows = tile_rows(shape, first), n_keys = first + n_rows;
    int stride = 3 * shape->n_embd, n_embd = shape->n_embd;
    float *scores = shape->scores;
    out += h->place + (size_t)first * (size_t)n_embd;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n_rows, n_keys, h->size, h->scale,
                h->q + (size_t)first * (size_t)stride, stride, h->k, stride, 0, scores, n_keys);
    float sums[TAGC_ATTENTION_TILE];
    for (int i = 0; i < n_rows; i++) {
        float *row = scores + (size_t)i * (size_t)n_keys, max;
        size_t n_seen = (size_t)(first + i + 1);
        sums[i] = shape->kernels->exp_row(row, n_seen, &max);
        memset(row + n_seen, 0, ((size_t)n_keys - n_seen) * sizeof *row);
        lse[h->lse + (size_t)(first + i)] = max + logf(sums[i]);
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n_rows, h->size, n_keys, 1, scores, n_keys, h->v,
                stride, 0, out, n_embd);
    for (int i = 0; i < n_rows; i++)
        shape->kernels->scale(1.0f / sums[i], out + (size_t)i * (size_t)n_embd, (size_t)h->size);
}

void tagc_attention_forward(const tagc_attention *shape, const float *qkv, float *out, float *lse) {
    for (int batch = 0; batch < shape->n_batch; batch++) {
        for (int index = 0; index < shape->n_head; index++) {
            head h = head_at(shape, qkv, batch, index);
            for (int first = 0; first < shape->n_tokens; first += TAGC_ATTENTION_TILE)
                tile_forward(shape, &h, first, out, lse);
        }
    }
}

/* `keep` is 0 for the first tile of a head that reaches a key, 1 after: dK and dV then hold earlier tiles'
 * parts. */
static void tile_backward(const tagc_attention *shape, const head *h, int first, float keep, const float *out,
                          const float *lse, const float *dout, float *dq) {
    int n_rows = tile_rows(shape, first), n_keys = first + n_rows;
    int n_embd = shape->n_embd, stride = 3 * n_embd;
    float *p = shape->scores, *ds = shape->dscores, *dk = dq + n_embd, *dv = dk + n_embd;
    const float *q = h->q + (size_t)first * (size_t)stride;
    out += h->place + (size_t)first * (size_t)n_embd;
    dout += h->place + (size_t)first * (size_t)n_embd;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n_rows, n_keys, h->size, h->scale, q, stride, h->k,
                stride, 0, p, n_keys);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n_rows, n_keys, h->size, 1, dout, n_embd, h->v,
                stride, 0, ds, n_keys);
    for (int i = 0; i < n_rows; i++) {
        size_t at = (size_t)i * (size_t)n_keys, n_seen = (size_t)(first + i + 1),
               place = (size_t)i * (size_t)n_embd;
        float delta = shape->kernels->dot(dout + place, out + place, (size_t)h->size);
        shape->kernels->softmax_backward(lse[h->lse + (size_t)(first + i)], delta, h->scale, p + at, ds + at,
                                         n_seen);
        memset(p + at + n_seen, 0, ((size_t)n_keys - n_seen) * sizeof *p);
        memset(ds + at + n_seen, 0, ((size_t)n_keys - n_seen) * sizeof *ds);
    }
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, n_keys, h->size, n_rows, 1, p, n_keys, dout, n_embd,
                keep, dv, stride);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, n_keys, h->size, n_rows, 1, ds, n_keys, q, stride,
                keep, dk, stride);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n_rows, h->size, n_keys, 1, ds, n_keys, h->k,
                stride, 0, dq + (size_t)first * (size_t)stride, stride);
}

void tagc_attention_backward(const tagc_attention *shape, const float *qkv, const float *out,
                             const float *lse, const float *dout, float *dqkv) {
    int last = (shape->n_tokens - 1) / TAGC_ATTENTION_TILE * TAGC_ATTENTION_TILE;
    for (int batch = 0; batch < shape->n_batch; batch++) {
        for (int index = 0; index < shape->n_head; index++) {
            head h = head_at(shape, qkv, batch, index);
            /* The last tile reaches every key, so it sets all of dK and dV and the others add. */
            for (int first = last; first >= 0; first -= TAGC_ATTENTION_TILE)
                tile_backward(shape, &h, first, first != last, out, lse, dout, dqkv + (h.q - qkv));
        }
    }
}
