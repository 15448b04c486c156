/* Codes: how `direct` encodes a fragment. There is one table of functions per code.
 *
 *   topk    the k largest of gradient + residual: positions as gaps, values in one of the formats
 *   blocks  every element, in order, without positions
 *
 * Formats of values (tagc_format): fp32, bf16, and integers of 8, 4 and 2 bits with one scale per `block` values.
 * The residual takes the losses of rounding and selection. All processor levels and thread counts give the same bytes and
 * the same sums. docs/reference/wire-format.md describes the bodies. */
#ifndef TAGC_CODEC_CODE_H
#define TAGC_CODEC_CODE_H

#include "codec/residual.h"
#include "core/pool.h"
#include "core/status.h"
#include "tagc/tagc.h"

typedef struct tagc_code_options {
    size_t n;          /* elements of the fragment, < 2^32 */
    size_t k;          /* topk: sent at most, <= n */
    int sparse;        /* 1: topk, 0: blocks */
    int values;        /* tagc_format */
    int block;         /* values per scale, a power of two in [16, 4096]; integer formats */
    int is_stochastic; /* 1: blocks without a residual, whose int8 and int4 are rounded at random (values.h) */
    /* How the residual is stored (residual.h), and the gradient (FP32 or BF16): tagc_format, FP32 if left out. */
    int residual, gradient;
} tagc_code_options;

typedef struct tagc_encoded {
    size_t n_bytes;       /* of the body, at most max_bytes */
    size_t n_index_bytes; /* topk: the length of the positions at the start of the body; values follow */
    size_t n_sent;        /* topk: k or fewer; blocks: n */
    int nonfinite; /* some gradient + residual is NaN or Inf: body and residual are undefined, n_bytes is 0 */
} tagc_encoded;

typedef struct tagc_body {
    const uint8_t *bytes;
    size_t n_bytes;
    int is_plain; /* 1: decode alone takes it: bytes are values (n) in options->gradient, at a multiple of their size */
} tagc_body;

typedef struct tagc_code {
    /* The largest possible body, and the scratch of the other functions (TAGC_ALIGNMENT-aligned). */
    size_t (*max_bytes)(const tagc_code_options *options);
    size_t (*scratch_bytes)(const tagc_code_options *options, int n_threads);
    /* gradient (n) in options->gradient, residual_in and residual_out rows in options->residual, where an fp32 may lie
     * at any multiple of its size, a bf16 too. residual_out = gradient + residual_in - decoded body, in fp32, then as it
     * is stored, rounded with `seed` (tagc_residual_seed). If gradient and residual are fp32, residual_out may be residual_in
     * itself; else the two do not overlap. For blocks both may be NULL: then there is no residual, and `seed` is that of
     * is_stochastic. */
    void (*encode)(const tagc_code_options *options, const void *gradient, const void *residual_in,
                   void *residual_out, uint32_t seed, uint8_t *body, void *scratch, tagc_pool *pool,
                   tagc_encoded *out);
    /* Accepts any bytes. TAGC_ERR_CORRUPT if decode would leave the body or the sums, or make a non-finite value. */
    tagc_status (*validate)(const tagc_code_options *options, const uint8_t *body, size_t n_bytes);
    /* sums (n) = zeros, or if `adds` is 1 what is there, + scale * every value of bodies[0] + scale * every value of
     * bodies[1] and so on, added in this order. Decoding many bodies at once gives the same bits as one after the other, with
     * less memory traffic. All bodies but plain ones must be validated; n_bodies may be 0. Returns 1 if a sum that an encoded
     * body changed is not finite: finite values can overflow when added. */
    int (*decode)(const tagc_code_options *options, const tagc_body *bodies, int n_bodies, int adds,
                  float scale, float *sums, void *scratch, tagc_pool *pool);
} tagc_code;

extern const tagc_code tagc_code_topk, tagc_code_blocks;

static inline const tagc_code *tagc_code_of(const tagc_code_options *options) {
    return options->sparse ? &tagc_code_topk : &tagc_code_blocks;
}

#endif
