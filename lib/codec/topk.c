/* Code `topk`: the k largest of gradient + residual. A body has their positions (gaps.h), then their values (values.h) in
 * the same order. */
#include "codec/code.h"
#include "codec/gaps.h"
#include "codec/select.h"
#include "codec/select_kernels.h"
#include "codec/values.h"
#include "core/memory.h"

#include <string.h>

enum {
    INF_BITS = 0x7f800000,
    BATCH = 32,   /* bodies decoded side by side */
    PIECE = 1024, /* values that one thread takes at a time */
    AHEAD = 128,  /* errors whose lines are on their way */
    WORTH_THREADS = 1 << 15,
    BEYOND_CACHE = 1 << 21 /* elements of which lines are long gone */
};

typedef struct topk {
    tagc_value_format format;
    tagc_gaps gaps;
    uint32_t *indices;      /* (k) */
    float *values, *errors; /* (k) */
    void *scratch;          /* of selection, then of gaps */
    void *gaps_scratch; /* the same, or its own where the selection is not over until its errors are known */
} topk;

static size_t max_of(size_t a, size_t b) {
    return a > b ? a : b;
}

/* Everything in fp32. */
static int is_plain(const tagc_code_options *o) {
    return o->residual == TAGC_FORMAT_FP32 && o->gradient == TAGC_FORMAT_FP32;
}

static void lay_out(const tagc_code_options *o, int n_threads, tagc_arena *arena, topk *t) {
    *t = (topk){.format = tagc_values_format(o->values, o->block, 1)};
    tagc_gaps_init(&t->gaps, o->n, o->k);
    t->indices = tagc_arena_take(arena, o->k, sizeof *t->indices);
    t->values = tagc_arena_take(arena, o->k, sizeof *t->values);
    t->errors = tagc_arena_take(arena, o->k, sizeof *t->errors);
    size_t n_select = tagc_select_scratch_bytes(o->n, o->k, n_threads),
           n_gaps = tagc_gaps_scratch_bytes(&t->gaps);
    t->scratch = tagc_arena_take(arena, max_of(n_select, n_gaps), 1);
    t->gaps_scratch = is_plain(o) ? t->scratch : tagc_arena_take(arena, n_gaps, 1);
}

static size_t topk_max_bytes(const tagc_code_options *options) {
    topk t;
    tagc_arena arena = {0};
    lay_out(options, 1, &arena, &t);
    return tagc_gaps_max_bytes(&t.gaps) + tagc_values_bytes(&t.format, options->k);
}

/* ---- encode ---- */

typedef struct value_job {
    topk *t;
    size_t n_sent;
    uint8_t *bytes;
    float *residual; /* (n) gets the errors, or NULL */
    int keep_errors; /* in t */
} value_job;

/* Prefetches the lines of the residual, which are far apart and have left the cache. The outer cache can fetch many
 * at once; the inner one has less room for misses. n_known indices are known, of which n are written. */
static void put_errors(const uint32_t *indices, const float *errors, size_t n, size_t n_known,
                       float *residual) {
    for (size_t i = 0; i < n; i++) {
        __builtin_prefetch(residual + indices[i + AHEAD < n_known ? i + AHEAD : i], 0, 1);
        residual[indices[i]] = errors[i];
    }
}

/* Whole blocks; errors are written while they are in the cache. */
static void value_work(void *arg, int index, int n_threads) {
    const value_job *j = arg;
    const topk *t = j->t;
    size_t step = t->format.block < PIECE ? PIECE : (size_t)t->format.block;
    for (size_t at = (size_t)index * step; at < j->n_sent; at += (size_t)n_threads * step) {
        size_t n = j->n_sent - at < step ? j->n_sent - at : step;
        float *values = t->values + at, *errors = j->keep_errors ? t->errors + at : NULL;
        tagc_values_encode(&t->format, values, NULL, errors, at, n, j->n_sent, j->bytes);
        if (j->residual)
            put_errors(t->indices + at, errors, n, n_threads == 1 ? j->n_sent - at : n, j->residual);
    }
}

/* indices and values of n_sent are there. */
static void write_body(topk *t, size_t n_sent, float *residual, int keep_errors, uint8_t *body,
                       tagc_pool *pool, tagc_encoded *out) {
    out->n_sent = n_sent;
    out->n_index_bytes = tagc_gaps_encode(&t->gaps, t->indices, n_sent, body, t->gaps_scratch, pool);
    out->n_bytes = out->n_index_bytes + tagc_values_bytes(&t->format, n_sent);
    value_job job = {t, n_sent, body + out->n_index_bytes, residual, residual || keep_errors};
    tagc_pool_run(n_sent < WORTH_THREADS ? NULL : pool, value_work, &job);
}

/* The residual holds acc after selection; errors are written over what is sent. */
static void encode_in_fp32(topk *t, const tagc_addends *addends, size_t k, float *residual_out, uint8_t *body,
                           tagc_pool *pool, tagc_encoded *out) {
    int is_exact = t->format.values == TAGC_FORMAT_FP32; /* then zeros are left instead of acc */
    tagc_selection selection;
    (is_exact ? tagc_select : tagc_select_leaving)(addends->gradient, addends->residual, residual_out,
                                                   addends->n, k, t->indices, t->values, t->scratch, pool,
                                                   &selection);
    out->nonfinite = selection.nonfinite;
    if (!selection.nonfinite)
        write_body(t, selection.n_sent, is_exact ? NULL : residual_out, 0, body, pool, out);
}

static void topk_encode(const tagc_code_options *options, const void *gradient, const void *residual_in,
                        void *residual_out, uint32_t seed, uint8_t *body, void *scratch, tagc_pool *pool,
                        tagc_encoded *out) {
    topk t;
    tagc_arena arena = {.base = scratch};
    tagc_selection selection;
    tagc_addends addends = {options->n, options->gradient, options->residual, gradient, residual_in};
    lay_out(options, tagc_pool_n_threads(pool), &arena, &t);
    *out = (tagc_encoded){0};
    if (is_plain(options)) {
        encode_in_fp32(&t, &addends, options->k, residual_out, body, pool, out);
        return;
    }
    tagc_select_addends(&addends, residual_out, seed, options->k, t.indices, t.values, t.scratch, pool,
                        &selection);
    out->nonfinite = selection.nonfinite;
    if (selection.nonfinite) return;
    int is_exact = options->values == TAGC_FORMAT_FP32;
    write_body(&t, selection.n_sent, NULL, !is_exact, body, pool, out);
    if (options->n) tagc_select_settle(is_exact ? NULL : t.errors, t.scratch);
}

/* ---- decode ---- */

static tagc_status topk_validate(const tagc_code_options *options, const uint8_t *body, size_t n_bytes) {
    tagc_value_format format = tagc_values_format(options->values, options->block, 1);
    tagc_gaps gaps;
    size_t n_items;
    tagc_gaps_init(&gaps, options->n, options->k);
    size_t n_index_bytes = tagc_gaps_validate(&gaps, body, n_bytes, &n_items);
    if (n_index_bytes == 0)
        return tagc_fail(TAGC_ERR_CORRUPT,
                         "positions of a fragment are damaged (body of %zu bytes, %zu of %zu sent)", n_bytes,
                         options->k, options->n);
    size_t expected = n_index_bytes + tagc_values_bytes(&format, n_items);
    if (n_bytes != expected)
        return tagc_fail(TAGC_ERR_CORRUPT, "body of a fragment has %zu bytes, its %zu values need %zu",
                         n_bytes, n_items, expected);
    if (!tagc_values_valid(&format, body + n_index_bytes, n_items))
        return tagc_fail(TAGC_ERR_CORRUPT, "values of a fragment are damaged (%zu of them)", n_items);
    return TAGC_OK;
}

/* What each thread needs to decode a chunk. */
typedef struct chunk_room {
    uint32_t *positions; /* (chunk and slack) */
    float *values;       /* (chunk and what comes before in its vector) */
    float *sums;         /* (chunk) */
} chunk_room;

typedef struct decode_job {
    const tagc_code_options *options;
    tagc_value_format format;
    tagc_gaps gaps;
    chunk_room *rooms; /* (n_threads) */
    int n_bodies;
    const tagc_body *bodies;
    size_t n_items[BATCH], n_index_bytes[BATCH];
    float scale;
    int adds, has_plain;
    float *sums; /* (n) */
    int nonfinite;
} decode_job;

static void place_decode(const tagc_code_options *o, int n_threads, tagc_arena *arena, decode_job *job) {
    job->options = o;
    job->format = tagc_values_format(o->values, o->block, 1);
    tagc_gaps_init(&job->gaps, o->n, o->k);
    size_t chunk = job->gaps.chunk;
    job->rooms = tagc_arena_take(arena, (size_t)n_threads, sizeof *job->rooms);
    for (int i = 0; i < n_threads; i++) {
        chunk_room room = {.positions = tagc_arena_take(arena, chunk + TAGC_GAPS_SLACK, sizeof(uint32_t)),
                           .values = tagc_arena_take(arena, chunk + TAGC_CODE_LANES, sizeof(float)),
                           .sums = tagc_arena_take(arena, chunk, sizeof(float))};
        if (job->rooms) job->rooms[i] = room;
    }
}

/* Adds the cursor's chunk of one body to sums (chunk); positions: the room that _next needs. Returns its items. *top: the
 * bits of the largest resulting magnitude. */
static size_t add_chunk(const decode_job *job, const chunk_room *room, int body, tagc_gaps_cursor *cursor,
                        uint32_t *positions, float *sums, uint32_t *top) {
    const uint8_t *bytes = job->bodies[body].bytes;
    size_t first = cursor->item / TAGC_CODE_LANES * TAGC_CODE_LANES, n_before = cursor->item - first;
    size_t n = tagc_gaps_next(&job->gaps, bytes, cursor, positions);
    tagc_values_decode(&job->format, bytes + job->n_index_bytes[body], first, n_before + n,
                       job->n_items[body], room->values);
    const float *values = room->values + n_before;
    uint32_t largest = *top;
    for (size_t i = 0; i < n; i++) {
        float sum = sums[positions[i]] + job->scale * values[i];
        uint32_t bits = tagc_abs_bits(sum);
        sums[positions[i]] = sum;
        if (bits > largest) largest = bits;
    }
    *top = largest;
    return n;
}

/* A chunk whose old sums are not needed: made in room->sums and written around the cache. room->sums is zero before and
 * after. If few elements were changed, only these are zeroed again. */
static void write_chunk(const decode_job *job, const chunk_room *room, tagc_gaps_cursor *cursors, float *to,
                        size_t n, uint32_t *top) {
    size_t n_touched = 0, n_listed = n / 16;
    for (int b = 0; b < job->n_bodies; b++) {
        uint32_t *positions = room->positions + (n_touched < n_listed ? n_touched : 0);
        size_t n_most = tagc_gaps_next_items(job->bodies[b].bytes, &cursors[b]);
        if (n_touched + n_most > n_listed) positions = room->positions, n_touched = n_listed;
        size_t n_here = add_chunk(job, room, b, &cursors[b], positions, room->sums, top);
        if (n_touched < n_listed) n_touched += n_here;
    }
    job->gaps.kernels->copy_around(to, room->sums, n);
    if (n_touched == n_listed)
        memset(room->sums, 0, n * sizeof *room->sums);
    else
        for (size_t i = 0; i < n_touched; i++) room->sums[room->positions[i]] = 0;
}

static void add_plain(const decode_job *job, const chunk_room *room, int body, size_t c, size_t n) {
    size_t first = c * job->gaps.chunk;
    const float *values =
        tagc_plain_values(job->options->gradient, job->bodies[body].bytes, first, n, room->values);
    job->format.kernels->add(job->sums + first, values, job->scale, n);
}

static void decode_work(void *arg, int index, int n_threads) {
    decode_job *job = arg;
    const tagc_gaps *gaps = &job->gaps;
    const chunk_room *room = &job->rooms[index];
    tagc_gaps_cursor cursors[BATCH];
    size_t end = gaps->n_chunks * ((size_t)index + 1) / (size_t)n_threads;
    size_t begin = gaps->n_chunks * (size_t)index / (size_t)n_threads;
    int around = !job->adds && !job->has_plain && job->options->n >= BEYOND_CACHE;
    uint32_t top = 0;
    for (int b = 0; b < job->n_bodies; b++)
        if (!job->bodies[b].is_plain) tagc_gaps_seek(gaps, job->bodies[b].bytes, begin, &cursors[b]);
    if (around) memset(room->sums, 0, gaps->chunk * sizeof *room->sums);
    for (size_t c = begin; c < end; c++) {
        float *sums = job->sums + c * gaps->chunk;
        size_t n = tagc_gaps_chunk_elems(gaps, c);
        if (around) {
            write_chunk(job, room, cursors, sums, n, &top);
            continue;
        }
        if (!job->adds) memset(sums, 0, n * sizeof *sums);
        for (int b = 0; b < job->n_bodies; b++)
            if (job->bodies[b].is_plain)
                add_plain(job, room, b, c, n);
            else
                add_chunk(job, room, b, &cursors[b], room->positions, sums, &top);
    }
    if (top >= INF_BITS) __atomic_store_n(&job->nonfinite, 1, __ATOMIC_RELAXED);
}

static int topk_decode(const tagc_code_options *options, const tagc_body *bodies, int n_bodies, int adds,
                       float scale, float *sums, void *scratch, tagc_pool *pool) {
    decode_job job = {.scale = scale, .sums = sums};
    tagc_arena arena = {.base = scratch};
    place_decode(options, tagc_pool_n_threads(pool), &arena, &job);
    for (int done = 0; done < n_bodies || (done == 0 && !adds); done += BATCH) {
        job.bodies = bodies + done;
        job.n_bodies = n_bodies - done < BATCH ? n_bodies - done : BATCH;
        job.adds = adds || done > 0;
        job.has_plain = 0;
        for (int b = 0; b < job.n_bodies; b++) {
            job.has_plain |= job.bodies[b].is_plain;
            if (job.bodies[b].is_plain) continue;
            job.n_items[b] = tagc_gaps_items(job.bodies[b].bytes);
            job.n_index_bytes[b] = tagc_gaps_bytes(&job.gaps, job.bodies[b].bytes);
        }
        tagc_pool_run(pool, decode_work, &job);
    }
    return job.nonfinite;
}

static size_t topk_scratch_bytes(const tagc_code_options *options, int n_threads) {
    topk t;
    decode_job job;
    tagc_arena encoding = {0}, decoding = {0};
    lay_out(options, n_threads, &encoding, &t);
    job.rooms = NULL;
    place_decode(options, n_threads, &decoding, &job);
    return max_of(encoding.n_bytes, decoding.n_bytes);
}

const tagc_code tagc_code_topk = {
    .max_bytes = topk_max_bytes,
    .scratch_bytes = topk_scratch_bytes,
    .encode = topk_encode,
    .validate = topk_validate,
    .decode = topk_decode,
};
