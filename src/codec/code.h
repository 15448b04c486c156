/* Codes of a fragment: what `direct` sends instead of an index and its values. One table per code, so that exchange,
 * bench and a later device see a few functions and no details.
 *
 *   topk    the k largest of gradient + residual: positions as gaps, values in one of the formats
 *   blocks  every element, in order: no positions
 *
 * Formats of values (tagc_format): fp32, bf16, and integers of 8, 4, 2 and 1 bits with one scale per `block` values.
 * What rounding and selection lose goes to the residual. All paths (scalar, AVX2, AVX-512, any thread count) give the
 * same bytes and the same sums. docs/wire-format.md draws the bodies. */
#ifndef TAGC_CODEC_CODE_H
#define TAGC_CODEC_CODE_H

#include "core/pool.h"
#include "core/status.h"
#include "tagc/tagc.h"

typedef struct tagc_code_options {
    size_t n;   /* elements of the fragment, < 2^32 */
    size_t k;   /* topk: kept at most, <= n */
    int sparse; /* 1: topk, 0: blocks */
    int values; /* tagc_format */
    int block;  /* values per scale, a power of two in [16, 4096]; integer formats */
    int rotate; /* 1: blocks only: a Hadamard transform of each block before its scale is taken */
} tagc_code_options;

typedef struct tagc_encoded {
    size_t n_bytes; /* of the body, at most max_bytes */
    size_t
        n_index_bytes; /* of these, the first so many say where values belong (topk); the rest are values */
    size_t n_kept;     /* topk: k or fewer; blocks: n */
    int nonfinite; /* some gradient + residual is NaN or Inf: body and residual are garbage, n_bytes is 0 */
} tagc_encoded;

typedef struct tagc_body {
    const uint8_t *bytes;
    size_t n_bytes;
} tagc_body;

typedef struct tagc_code {
    /* Worst case of a body, and scratch of the other functions (TAGC_ALIGNMENT-aligned). */
    size_t (*max_bytes)(const tagc_code_options *options);
    size_t (*scratch_bytes)(const tagc_code_options *options, int n_threads);
    /* gradient, residual_in, residual_out (n) as in tagc_select: residual_out = gradient + residual_in - decoded
     * body, exactly where the body is exact. Of blocks both residuals may be NULL: nothing is carried over. */
    void (*encode)(const tagc_code_options *options, const float *gradient, const float *residual_in,
                   float *residual_out, uint8_t *body, void *scratch, tagc_pool *pool, tagc_encoded *out);
    /* Encodes sums (n): topk every non-zero of them (at most k are there), blocks all. sums become what a receiver
     * decodes; what that loses is multiplied by `unscale` and added to error (n), which may be NULL. nonfinite: of the
     * sums, or of what became of error. */
    void (*encode_sums)(const tagc_code_options *options, float *sums, float *error, float unscale,
                        uint8_t *body, void *scratch, tagc_pool *pool, tagc_encoded *out);
    /* TAGC_ERR_CORRUPT unless decode can take these bytes without leaving body or sums and without making a
     * non-finite value. Any bytes are allowed. */
    tagc_status (*validate)(const tagc_code_options *options, const uint8_t *body, size_t n_bytes);
    /* sums (n) = scale * every value of bodies[0] + scale * every value of bodies[1] and so on, added in this order,
     * with `add` to what sums hold, else to zero. Many at once cost fewer trips to memory than one after the other,
     * and give the same bits. All are validated; n_bodies may be 0. Returns 1 where a sum that was added to is not
     * finite: finite values can add up to more. */
    int (*decode)(const tagc_code_options *options, const tagc_body *bodies, int n_bodies, int add,
                  float scale, float *sums, void *scratch, tagc_pool *pool);
} tagc_code;

extern const tagc_code tagc_code_topk, tagc_code_blocks;

/* The table for these options; never NULL for options in range. */
const tagc_code *tagc_code_of(const tagc_code_options *options);

#endif
