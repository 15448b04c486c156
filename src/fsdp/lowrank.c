/* A low-rank part beside a sparse one (after PowerSGD): what a fragment's sum has in few directions costs little to send
 * and is what a selection by magnitude finds last. Slow and plain: to see what it is worth.
 *
 * A fragment of what is to be sent, A = gradient + residual (rows, cols), is the same shape on all ranks. Q (cols, r) is
 * the last step's answer, the same on all ranks.
 *
 *   P = sum over ranks of A Q      orthonormal columns          exchanged
 *   N = A^T P                      of this rank; their sum      exchanged, is the next Q
 *
 * P N^T leaves the gradient before the selection sees it, and the owner adds P (sum of N)^T: what neither part sent is in
 * the residual. Both exchanges give all ranks everything, which is what the next step needs. */
#include "fsdp/internal.h"
#include "fsdp/recipe.h"
#include "transport/comm.h"
#include <math.h>
#include <string.h>

struct tagc_low_rank {
    size_t rank, n_rows, n_cols, shard;
    size_t n_p, n_q; /* floats of all fragments: W * rows * r, W * cols * r */
    float *q;        /* (W, cols, r) */
    float *p, *all;  /* (W, rows, r); what the ranks sent, whichever (W, larger) */
    float *n, *sum;  /* (W, cols, r) of this rank, of all */
    int is_sent;     /* of the step under way */
};

static float noise(uint64_t key) {
    key *= 0x9e3779b97f4a7c15u;
    key ^= key >> 29;
    key *= 0xbf58476d1ce4e5b9u;
    return (float)((double)(key >> 40) / (1 << 23) - 1);
}

tagc_status tagc_low_rank_create(int world_size, int rank, uint64_t shard, tagc_low_rank **out,
                                 uint64_t *n_bytes) {
    size_t n_cols = 1, world = (size_t)world_size;
    while (n_cols * n_cols < shard) n_cols *= 2; /* near a square, where both factors cost least */
    size_t n_rows = (shard + n_cols - 1) / n_cols, r = (size_t)rank;
    size_t n_p = world * n_rows * r, n_q = world * n_cols * r, n_large = n_p > n_q ? n_p : n_q;
    size_t n_floats = 3 * n_q + n_p + world * n_large;
    void *memory;
    TAGC_TRY(tagc_memory_create(sizeof(tagc_low_rank) + n_floats * sizeof(float), "low-rank parts", &memory));
    tagc_low_rank *l = *out = memory;
    float *at = (float *)(l + 1);
    *l = (tagc_low_rank){r, n_rows, n_cols, shard, n_p, n_q, at, at + n_q, NULL, NULL, NULL, 0};
    l->n = l->p + n_p;
    l->sum = l->n + n_q;
    l->all = l->sum + n_q;
    for (size_t i = 0; i < n_q; i++) l->q[i] = noise(i);
    *n_bytes = n_floats * sizeof(float);
    return TAGC_OK;
}

void tagc_low_rank_destroy(tagc_low_rank *low_rank) {
    tagc_memory_destroy(low_rank);
}

/* Sum over ranks in rank order of everybody's (n): the same bits everywhere. */
static tagc_status sum_over_ranks(tagc_fsdp *f, tagc_low_rank *l, const float *own, size_t n, float *sum) {
    TAGC_TRY(tagc_comm_all_gather_as(f->comm, TAGC_LEG_VALUES, own, n * sizeof *own, l->all));
    memcpy(sum, l->all, n * sizeof *sum);
    for (int rank = 1; rank < f->world_size; rank++)
        for (size_t i = 0; i < n; i++) sum[i] += l->all[(size_t)rank * n + i];
    return TAGC_OK;
}

/* Columns of (rows, r), one after the other; what has no length becomes zero. */
static void orthonormalize(float *p, size_t n_rows, size_t r) {
    for (size_t k = 0; k < r; k++) {
        double length = 0, before = 0;
        for (size_t i = 0; i < n_rows; i++) before += (double)p[i * r + k] * (double)p[i * r + k];
        for (size_t j = 0; j < k; j++) {
            double dot = 0;
            for (size_t i = 0; i < n_rows; i++) dot += (double)p[i * r + j] * (double)p[i * r + k];
            for (size_t i = 0; i < n_rows; i++) p[i * r + k] -= (float)(dot * (double)p[i * r + j]);
        }
        for (size_t i = 0; i < n_rows; i++) length += (double)p[i * r + k] * (double)p[i * r + k];
        double scale = length > 1e-10 * before && length > 1e-60 ? 1 / sqrt(length) : 0;
        for (size_t i = 0; i < n_rows; i++) p[i * r + k] = (float)((double)p[i * r + k] * scale);
    }
}

static int is_finite(const float *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!isfinite(x[i])) return 0;
    return 1;
}

/* Row i, column j of fragment d is element i * cols + j of it. */
static void multiply(const tagc_low_rank *l, const float *gradient, const float *residual, int d) {
    size_t r = l->rank, first = (size_t)d * l->shard;
    float *p = l->p + (size_t)d * l->n_rows * r;
    const float *q = l->q + (size_t)d * l->n_cols * r;
    memset(p, 0, l->n_rows * r * sizeof *p);
    for (size_t e = 0; e < l->shard; e++) {
        float a = gradient[first + e] + residual[first + e];
        for (size_t k = 0; k < r; k++) p[e / l->n_cols * r + k] += a * q[e % l->n_cols * r + k];
    }
}

static void multiply_back(const tagc_low_rank *l, const float *gradient, const float *residual, int d) {
    size_t r = l->rank, first = (size_t)d * l->shard;
    const float *p = l->p + (size_t)d * l->n_rows * r;
    float *n = l->n + (size_t)d * l->n_cols * r;
    memset(n, 0, l->n_cols * r * sizeof *n);
    for (size_t e = 0; e < l->shard; e++) {
        float a = gradient[first + e] + residual[first + e];
        for (size_t k = 0; k < r; k++) n[e % l->n_cols * r + k] += a * p[e / l->n_cols * r + k];
    }
}

/* values += factor * P N^T of fragment d. */
static void add_product(const tagc_low_rank *l, const float *n, int d, float factor, float *values) {
    size_t r = l->rank;
    const float *p = l->p + (size_t)d * l->n_rows * r;
    n += (size_t)d * l->n_cols * r;
    for (size_t e = 0; e < l->shard; e++) {
        float sum = 0;
        for (size_t k = 0; k < r; k++) sum += p[e / l->n_cols * r + k] * n[e % l->n_cols * r + k];
        values[e] += factor * sum;
    }
}

tagc_status tagc_low_rank_take(tagc_fsdp *f, tagc_low_rank *l, const float *residual, float *gradient) {
    for (int d = 0; d < f->world_size; d++) multiply(l, gradient, residual, d);
    TAGC_TRY(sum_over_ranks(f, l, l->p, l->n_p, l->p));
    l->is_sent = is_finite(l->p, l->n_p);
    if (!l->is_sent) return TAGC_OK; /* on all ranks: the selection will find out */
    for (int d = 0; d < f->world_size; d++) {
        orthonormalize(l->p + (size_t)d * l->n_rows * l->rank, l->n_rows, l->rank);
        multiply_back(l, gradient, residual, d);
    }
    TAGC_TRY(sum_over_ranks(f, l, l->n, l->n_q, l->sum));
    for (int d = 0; d < f->world_size; d++) add_product(l, l->n, d, -1, gradient + (size_t)d * l->shard);
    for (size_t i = 0; i < l->n_q; i++) l->q[i] = l->sum[i] != 0 ? l->sum[i] : 1e-12f * noise(i);
    return TAGC_OK;
}

void tagc_low_rank_give(const tagc_fsdp *f, tagc_low_rank *l, float *output) {
    if (l->is_sent) add_product(l, l->sum, f->rank, 1.0f / (float)f->world_size, output);
}
