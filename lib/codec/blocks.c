/* Code `blocks`: every element in order, without positions. A body has only values (values.h), so its length is known.
 * The residual is computed piece by piece while gradient, residual and body are in the cache. */
#include "codec/addends.h"
#include "codec/code.h"
#include "codec/values.h"

#include <string.h>

enum { RUN = TAGC_VALUES_MAX_BLOCK, INF_BITS = 0x7f800000 }; /* elements at a time: whole blocks */
enum { PIECE = 256 };                                        /* elements per piece, or one block */
enum { BEYOND_CACHE = 1 << 21 };                             /* elements of which lines are long gone */

typedef struct job {
    tagc_value_format format;
    size_t n, n_runs;
    tagc_addends addends; /* encode */
    void *residual_out;   /* or NULL */
    int adds;
    float *sums;
    int residual, gradient; /* formats of residual_out, and of plain bodies */
    uint32_t seed;
    float scale;
    uint8_t *body;
    const tagc_body *bodies;
    int n_bodies;
    int nonfinite; /* set by any thread */
} job;

static job job_of(const tagc_code_options *o) {
    job j = {.format = tagc_values_format(o->values, o->block, 0),
             .n = o->n,
             .n_runs = (o->n + RUN - 1) / RUN,
             .residual = o->residual,
             .gradient = o->gradient};
    j.format.is_stochastic = o->is_stochastic;
    return j;
}

static size_t run_elems(const job *j, size_t run) {
    return j->n - run * RUN < RUN ? j->n - run * RUN : RUN;
}

static size_t blocks_scratch_bytes(const tagc_code_options *options, int n_threads) {
    (void)options, (void)n_threads;
    return 0;
}

static size_t blocks_max_bytes(const tagc_code_options *options) {
    job j = job_of(options);
    return tagc_values_bytes(&j.format, j.n);
}

/* Finishes one piece before the next, so that its gradient, residual and sum stay in the innermost cache. The reads are
 * regular enough for the processor to prefetch. */
static void encode_piece(job *j, size_t at, size_t n) {
    const tagc_code_kernels *k = j->format.kernels;
    const float *gradient, *residual;
    float gradient_room[RUN], sums[RUN], errors[RUN];
    uint32_t largest;
    tagc_addends_parts(&j->addends, at, n, gradient_room, sums, &gradient, &residual);
    largest = residual ? k->accumulate(gradient, residual, sums, n) : k->largest(gradient, n);
    if (largest >= INF_BITS) {
        __atomic_store_n(&j->nonfinite, 1, __ATOMIC_RELAXED);
        return;
    }
    int is_stored = j->residual_out && j->residual != TAGC_FORMAT_FP32;
    float *to = is_stored ? errors : j->residual_out ? (float *)j->residual_out + at : NULL;
    tagc_values_encode(&j->format, residual ? sums : gradient, NULL, to, at, n, j->n, j->body);
    if (is_stored) tagc_residual_write(j->residual, j->n, errors, at, n, j->seed, j->residual_out);
}

static void encode_work(void *arg, int index, int n_threads) {
    job *j = arg;
    size_t piece = j->format.block < PIECE ? PIECE : (size_t)j->format.block;
    for (size_t run = (size_t)index; run < j->n_runs; run += (size_t)n_threads)
        for (size_t i = 0, n = run_elems(j, run); i < n; i += piece)
            encode_piece(j, run * RUN + i, n - i < piece ? n - i : piece);
}

static void finish(const job *j, tagc_encoded *out) {
    *out = (tagc_encoded){.nonfinite = j->nonfinite};
    if (j->nonfinite) return;
    out->n_sent = j->n;
    out->n_bytes = tagc_values_bytes(&j->format, j->n);
}

static void blocks_encode(const tagc_code_options *options, const void *gradient, const void *residual_in,
                          void *residual_out, uint32_t seed, uint8_t *body, void *scratch, tagc_pool *pool,
                          tagc_encoded *out) {
    job j = job_of(options);
    (void)scratch;
    j.addends = (tagc_addends){options->n, options->gradient, options->residual, gradient, residual_in};
    j.residual_out = residual_out;
    j.seed = j.format.seed = seed;
    j.body = body;
    tagc_pool_run(pool, encode_work, &j);
    finish(&j, out);
}

static tagc_status blocks_validate(const tagc_code_options *options, const uint8_t *body, size_t n_bytes) {
    job j = job_of(options);
    size_t expected = tagc_values_bytes(&j.format, j.n);
    if (n_bytes != expected)
        return tagc_fail(TAGC_ERR_CORRUPT, "body of a fragment has %zu bytes, its %zu values need %zu",
                         n_bytes, j.n, expected);
    if (!tagc_values_valid(&j.format, body, j.n))
        return tagc_fail(TAGC_ERR_CORRUPT, "values of a fragment are damaged (%zu of them)", j.n);
    return TAGC_OK;
}

static void decode_work(void *arg, int index, int n_threads) {
    job *j = arg;
    const tagc_code_kernels *k = j->format.kernels;
    float values[RUN], room[RUN];
    int around = !j->adds && j->n >= BEYOND_CACHE;
    for (size_t run = (size_t)index; run < j->n_runs; run += (size_t)n_threads) {
        size_t at = run * RUN, n = run_elems(j, run);
        float *sums = around ? room : j->sums + at;
        if (!j->adds) memset(sums, 0, n * sizeof *sums);
        for (int b = 0; b < j->n_bodies; b++) {
            const tagc_body *body = &j->bodies[b];
            const float *added = values;
            if (body->is_plain)
                added = tagc_plain_values(j->gradient, body->bytes, at, n, values);
            else
                tagc_values_decode(&j->format, body->bytes, at, n, j->n, values);
            k->add(sums, added, j->scale, n);
        }
        if (k->largest(sums, n) >= INF_BITS) __atomic_store_n(&j->nonfinite, 1, __ATOMIC_RELAXED);
        if (around) k->copy_around(j->sums + at, room, n);
    }
}

static int blocks_decode(const tagc_code_options *options, const tagc_body *bodies, int n_bodies, int adds,
                         float scale, float *sums, void *scratch, tagc_pool *pool) {
    job j = job_of(options);
    (void)scratch;
    j.bodies = bodies;
    j.n_bodies = n_bodies;
    j.adds = adds;
    j.scale = scale;
    j.sums = sums;
    tagc_pool_run(pool, decode_work, &j);
    return j.nonfinite;
}

const tagc_code tagc_code_blocks = {
    .max_bytes = blocks_max_bytes,
    .scratch_bytes = blocks_scratch_bytes,
    .encode = blocks_encode,
    .validate = blocks_validate,
    .decode = blocks_decode,
};
