/* Fragment codes: what goes in comes out of body and residual together, a decoder written here from the documented layout
 * sees the same values, and no bytes make a decoder do harm. */
#define RANDOM_SEED 7
#include "../bits.h"
#include "../repeats.h"
#include "../test.h"
#include "codec/code.h"
#include "codec/select.h"
#include "core/memory.h"
#include "random.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef TAGC_SANITIZED
enum { N_SMALL = 4, N_BIG = 3, N_THREADED = 6, HUGE_EVERY = 60, N_STORED = 100, N_STORED_HUGE = 1 };
#else
enum { N_SMALL = 16, N_BIG = 5, N_THREADED = 24, HUGE_EVERY = 10, N_STORED = 1000, N_STORED_HUGE = 8 };
#endif

/* Exactly so many bytes, unaligned when offset is odd: ASan sees a step over either end. */
static void *bytes_of(size_t n_bytes) {
    void *memory = malloc(n_bytes ? n_bytes : 1);
    assert_non_null(memory);
    return memory;
}

static void *aligned_bytes(size_t n_bytes) {
    void *memory = NULL;
    assert_int_equal(tagc_memory_create(n_bytes ? n_bytes : 1, "scratch", &memory), TAGC_OK);
    memset(memory, 0xa5, n_bytes);
    return memory;
}

/* ---- inputs ---- */

enum { HEAVY, TIES, ZEROS, FEW, DENORMALS, HUGE_ONES, CLUMPED, N_FILLS };

static void fill(int kind, float *x, size_t n) {
    size_t begin = n ? random_below(n) : 0;
    for (size_t i = 0; i < n; i++) {
        switch (kind) {
        case HEAVY:
            x[i] = random_normal() * expf(random_normal());
            break;
        case TIES:
            x[i] = (float)((int)random_below(5) - 2);
            break;
        case ZEROS:
            x[i] = random_below(2) ? 0.0f : -0.0f;
            break;
        case FEW:
            x[i] = random_below(40) ? 0.0f : random_normal();
            break;
        case DENORMALS:
            x[i] = float_of((uint32_t)random_below(1u << (1 + random_below(24))) | (uint32_t)random_below(2)
                                                                                       << 31);
            break;
        case HUGE_ONES:
            x[i] = (random_below(2) ? 1.0f : -1.0f) * (random_below(4) ? FLT_MAX / 2 : random_normal());
            break;
        default:
            x[i] = random_normal() * (i >= begin && i < begin + 30 ? 1000.0f : 1.0f);
        }
    }
}

/* ---- a decoder from the documented layout, one bit at a time ---- */

typedef struct bit_reader {
    const uint8_t *bytes;
    size_t at; /* bit */
} bit_reader;

static uint32_t read_bits(bit_reader *r, int n_bits) {
    uint32_t value = 0;
    for (int i = 0; i < n_bits; i++, r->at++) value |= (uint32_t)(r->bytes[r->at / 8] >> r->at % 8 & 1) << i;
    return value;
}

static uint32_t naive_load(const uint8_t *bytes, int n_bytes) {
    uint32_t value = 0;
    for (int i = 0; i < n_bytes; i++) value |= (uint32_t)bytes[i] << 8 * i;
    return value;
}

static size_t naive_values(const tagc_code_options *o, const uint8_t *bytes, size_t n, float *out) {
    static const int widths[] = {32, 16, 8, 4, 2, 1};
    int width = widths[o->values];
    size_t block = (size_t)o->block, n_scales = o->values >= TAGC_FORMAT_INT8 ? (n + block - 1) / block : 0;
    bit_reader r = {bytes + 2 * n_scales, 0};
    for (size_t i = 0; i < n; i++) {
        uint32_t code = read_bits(&r, width);
        float scale = n_scales ? float_of(naive_load(bytes + 2 * (i / block), 2) << 16) : 0;
        switch (o->values) {
        case TAGC_FORMAT_FP32:
            out[i] = float_of(code);
            break;
        case TAGC_FORMAT_BF16:
            out[i] = float_of(code << 16);
            break;
        case TAGC_FORMAT_INT8:
        case TAGC_FORMAT_INT4:
            out[i] = scale * (float)(code >> (width - 1) ? (int)code - (1 << width) : (int)code);
            break;
        case TAGC_FORMAT_INT2:
            out[i] = (code & 2 ? -1.0f : 1.0f) * (scale * (!(code & 1) ? 1.0f : o->sparse ? 2.0f : 4.0f));
            break;
        default:
            out[i] = code ? -scale : scale;
        }
    }
    return 2 * n_scales + (r.at + 7) / 8;
}

/* out (n) dense; returns the length of the body. */
static size_t naive_decode(const tagc_code_options *o, const uint8_t *body, float *out) {
    if (!o->sparse) return naive_values(o, body, o->n, out);
    size_t n_items = naive_load(body, 4), chunk = 2048, item = 0;
    int bits = body[4];
    while (chunk < 32768 && chunk * o->k < 1280 * o->n) chunk *= 2;
    size_t n_chunks = (o->n + chunk - 1) / chunk, at = 8 + 4 * n_chunks;
    uint32_t *positions = bytes_of(4 * n_items);
    float *values = bytes_of(4 * n_items);
    for (size_t c = 0; c < n_chunks; c++) {
        size_t n_here = naive_load(body + 8 + 4 * c, 2), n_codes = naive_load(body + 10 + 4 * c, 2);
        size_t n_elems = o->n - c * chunk < chunk ? o->n - c * chunk : chunk, position = 0, first = item;
        bit_reader r = {body + at, 0};
        if (bits == 0)
            for (; position < n_elems; position++) {
                if (read_bits(&r, 1)) positions[item++] = (uint32_t)(c * chunk + position);
            }
        else
            for (size_t j = 0; j < n_codes; j++) {
                uint32_t code = read_bits(&r, bits);
                position += code;
                if (code < (1u << bits) - 1) positions[item++] = (uint32_t)(c * chunk + position++);
            }
        assert_int_equal(item - first, n_here);
        at += (r.at + 7) / 8;
    }
    assert_int_equal(item, n_items);
    at += naive_values(o, body + at, n_items, values);
    for (size_t i = 0; i < o->n; i++) out[i] = 0;
    for (size_t i = 0; i < n_items; i++) out[positions[i]] = 0.0f + values[i];
    free(positions), free(values);
    return at;
}

/* ---- one fragment ---- */

typedef struct fragment {
    tagc_code_options options;
    const tagc_code *code;
    float *gradient, *residual_in, *residual_out, *decoded; /* (n) */
    uint8_t *body;                                          /* exactly n_bytes */
    tagc_encoded encoded;
} fragment;

static fragment encode(const tagc_code_options *options, int kind, int with_residual, tagc_pool *pool) {
    size_t n = options->n, most;
    fragment f = {.options = *options, .code = tagc_code_of(options)};
    float **arrays[] = {&f.gradient, &f.residual_in, &f.residual_out, &f.decoded};
    for (size_t i = 0; i < 4; i++) *arrays[i] = bytes_of(n * sizeof(float));
    fill(kind, f.gradient, n);
    fill(kind == HUGE_ONES ? ZEROS : kind, f.residual_in, n);
    with_residual |= options->sparse;
    most = f.code->max_bytes(options);
    uint8_t *body = bytes_of(most);
    void *scratch = aligned_bytes(f.code->scratch_bytes(options, tagc_pool_n_threads(pool)));
    f.code->encode(options, f.gradient, with_residual ? f.residual_in : NULL,
                   with_residual ? f.residual_out : NULL, 0, body, scratch, pool, &f.encoded);
    assert_false(f.encoded.nonfinite);
    assert_in_range(f.encoded.n_bytes, 0, most);
    assert_in_range(f.encoded.n_index_bytes, 0, f.encoded.n_bytes);
    f.body = memcpy(bytes_of(f.encoded.n_bytes), body, f.encoded.n_bytes);
    assert_int_equal(f.code->validate(options, f.body, f.encoded.n_bytes), TAGC_OK);
    tagc_body one = {f.body, f.encoded.n_bytes, 0};
    f.code->decode(options, &one, 1, 0, 1, f.decoded, scratch, pool);
    free(body);
    tagc_memory_destroy(scratch);
    return f;
}

static void fragment_free(fragment *f) {
    free(f->gradient), free(f->residual_in), free(f->residual_out), free(f->decoded), free(f->body);
}

static void check_naive(const fragment *f) {
    float *expected = bytes_of(f->options.n * sizeof(float));
    assert_int_equal(naive_decode(&f->options, f->body, expected), f->encoded.n_bytes);
    for (size_t i = 0; i < f->options.n; i++)
        assert_int_equal(bits_of(f->decoded[i]), bits_of(0.0f + expected[i]));
    free(expected);
}

static void check_conserved(const fragment *f) {
    int is_exact = f->options.values == TAGC_FORMAT_FP32;
    for (size_t i = 0; i < f->options.n; i++) {
        float acc = f->gradient[i] + f->residual_in[i], sum = f->decoded[i] + f->residual_out[i];
        assert_true(isfinite(f->residual_out[i]));
        assert_false(bits_of(f->residual_out[i]) == 0); /* its zero is -0.0 */
        if (is_exact)
            assert_true(acc == sum);
        else
            assert_true(fabsf(acc - sum) <= 1e-6f * fmaxf(fabsf(acc), fabsf(f->decoded[i])));
    }
}

static void each_shape(void (*check)(const tagc_code_options *options)) {
    static const size_t large[] = {2048, 2049, 4097, 70000, 300001};
    static const int blocks[] = {16, 128, 4096};
    static const double densities[] = {0, 0.001, 0.0125, 0.1, 0.5, 1};
    for (int values = TAGC_FORMAT_FP32; values <= TAGC_FORMAT_INT2; values++)
        for (size_t i = 0; i < N_SMALL + N_BIG; i++) {
            size_t n = i < N_SMALL ? 16 + random_below(185) : large[i - N_SMALL];
            tagc_code_options o = {.n = n, .k = n, .values = values, .block = blocks[i % 3]};
            check(&o);
            o.sparse = 1;
            for (size_t d = 0; d < 6; d++) {
                o.k = tagc_select_count(n, 1 - densities[d]);
                check(&o);
            }
            o.k = n - 1;
            check(&o);
            o.k = 1;
            check(&o);
        }
}

static void round_trip(const tagc_code_options *options) {
    for (int kind = 0; kind < N_FILLS; kind++) {
        if (options->n > 100000 && kind != HEAVY) continue;
        for (int with_residual = options->sparse; with_residual < 2; with_residual++) {
            fragment f = encode(options, kind, with_residual, NULL);
            check_naive(&f);
            if (with_residual) check_conserved(&f);
            fragment_free(&f);
        }
    }
}

TEST(test_round_trip) {
    HAS_ONE_THREAD();
    each_shape(round_trip);
}

/* ---- threads, many bodies, sums ---- */

static tagc_code_options random_options(size_t most) {
    static const int blocks[] = {16, 128, 512};
    size_t n = 16 + random_below(most);
    tagc_code_options o = {
        .n = n, .k = n, .values = (int)random_below(TAGC_FORMAT_INT2 + 1), .block = blocks[random_below(3)]};
    o.sparse = (int)random_below(2);
    if (o.sparse) o.k = random_below(random_below(4) ? n / 4 + 1 : n + 1);
    return o;
}

TEST(test_threads) {
    for (int trial = 0; trial < N_THREADED; trial++) {
        tagc_pool *pool = NULL;
        tagc_code_options o = random_options(200000);
        uint64_t seed = random_state;
        assert_int_equal(tagc_pool_create(2 + trial % 4, &pool), TAGC_OK);
        fragment alone = encode(&o, HEAVY, 1, NULL);
        random_state = seed;
        fragment together = encode(&o, HEAVY, 1, pool);
        assert_int_equal(alone.encoded.n_bytes, together.encoded.n_bytes);
        assert_memory_equal(alone.body, together.body, alone.encoded.n_bytes);
        assert_memory_equal(alone.residual_out, together.residual_out, o.n * sizeof(float));
        assert_memory_equal(alone.decoded, together.decoded, o.n * sizeof(float));
        fragment_free(&alone), fragment_free(&together);
        tagc_pool_destroy(pool);
    }
}

/* Many bodies at once are one after the other, and both are the plain sum in order; past the size where sums are written
 * around the cache, too. */
static void check_many(const tagc_code_options *o, int n_bodies) {
    fragment *fragments = bytes_of((size_t)n_bodies * sizeof *fragments);
    tagc_body *bodies = bytes_of((size_t)n_bodies * sizeof *bodies);
    const tagc_code *code = tagc_code_of(o);
    void *scratch = aligned_bytes(code->scratch_bytes(o, 1));
    float *together = bytes_of(4 * o->n), *in_turn = bytes_of(4 * o->n), *plain = bytes_of(4 * o->n);
    for (size_t i = 0; i < o->n; i++) together[i] = NAN, in_turn[i] = plain[i] = 0;
    for (int b = 0; b < n_bodies; b++) {
        fragments[b] = encode(o, HEAVY, 0, NULL);
        bodies[b] = (tagc_body){fragments[b].body, fragments[b].encoded.n_bytes, 0};
        code->decode(o, &bodies[b], 1, 1, 0.37f, in_turn, scratch, NULL);
        for (size_t i = 0; i < o->n; i++) plain[i] += 0.37f * fragments[b].decoded[i];
    }
    assert_int_equal(code->decode(o, bodies, n_bodies, 0, 0.37f, together, scratch, NULL), 0);
    for (size_t i = 0; i < o->n; i++) {
        assert_int_equal(bits_of(together[i]), bits_of(in_turn[i]));
        assert_true(together[i] == plain[i]);
    }
    for (int b = 0; b < n_bodies; b++) fragment_free(&fragments[b]);
    tagc_memory_destroy(scratch);
    free(fragments), free(bodies), free(together), free(in_turn), free(plain);
}

TEST(test_many) {
    HAS_ONE_THREAD();
    for (int trial = 0; trial < 30; trial++) {
        tagc_code_options o = random_options(trial % 5 ? 500 : 20000);
        check_many(&o, trial == 0 ? 0 : trial == 1 ? 70 : 1 + trial % 4);
    }
    static const size_t sent[] = {
        0, 50, 5}; /* all; one in so many: of a chunk few, then more than the decoder lists */
    for (size_t i = 0; i < 3; i++) {
        tagc_code_options o = {
            .n = (1 << 21) + 77, .sparse = sent[i] > 0, .values = TAGC_FORMAT_INT4, .block = 128};
        o.k = sent[i] > 0 ? o.n / sent[i] : o.n;
        check_many(&o, 2);
    }
}

/* A plain body, in fp32 or bf16, among encoded ones: sums are those of all of them in order, from zeros or from what is there. Checks
 * all that one set of options can do wrong. */
static void check_plain(tagc_code_options *o, int n_bodies, int place, int adds) {
    const tagc_code *code = tagc_code_of(o);
    fragment f = encode(o, HEAVY, 1, NULL);
    tagc_body bodies[40];
    float *plain = bytes_of(4 * o->n), *before = bytes_of(4 * o->n), *sums = bytes_of(4 * o->n);
    uint16_t *halves = bytes_of(2 * o->n);
    void *scratch = aligned_bytes(code->scratch_bytes(o, 1));
    for (int b = 0; b < n_bodies; b++) bodies[b] = (tagc_body){f.body, f.encoded.n_bytes, 0};
    fill(HEAVY, plain, o->n);
    fill(HEAVY, before, o->n); /* whatever was there */
    for (size_t i = 0; i < o->n; i++) halves[i] = (uint16_t)(bits_of(plain[i]) >> 16);
    for (int is_half = 0; is_half < 2; is_half++) {
        o->gradient = is_half ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
        bodies[place] = (tagc_body){.bytes = is_half ? (uint8_t *)halves : (uint8_t *)plain, .is_plain = 1};
        memcpy(sums, before, 4 * o->n);
        assert_int_equal(code->decode(o, bodies, n_bodies, adds, 0.5f, sums, scratch, NULL), 0);
        for (size_t i = 0; i < o->n; i++) {
            float expected = adds ? before[i] : 0,
                  value = is_half ? float_of((uint32_t)halves[i] << 16) : plain[i];
            for (int b = 0; b < n_bodies; b++) expected += 0.5f * (b == place ? value : f.decoded[i]);
            assert_true(sums[i] == expected);
        }
    }
    tagc_memory_destroy(scratch);
    fragment_free(&f);
    free(plain), free(before), free(sums), free(halves);
}

TEST(test_plain) {
    HAS_ONE_THREAD();
    for (int trial = 0; trial < 60; trial++) {
        tagc_code_options o = random_options(trial % 10 ? 500 : 50000);
        if (trial < 2) o.n = o.k = (1 << 21) + 77; /* beyond the cache */
        if (trial < 2 && o.sparse) o.k = o.n / 20;
        int n_bodies = trial < 2   ? 2
                       : trial % 4 ? 1 + trial % 39
                                   : 34; /* more than are decoded side by side */
        int place = trial % 8 == 0 ? 32 + trial / 8 % 2 : (int)random_below((size_t)n_bodies);
        check_plain(&o, n_bodies, place < n_bodies ? place : 1, trial % 3 == 0);
    }
}

/* ---- what must be told, and what must be refused ---- */

TEST(test_nonfinite) {
    HAS_ONE_THREAD();
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int trial = 0; trial < 300; trial++) {
        tagc_code_options o = random_options(3000);
        const tagc_code *code = tagc_code_of(&o);
        void *scratch = aligned_bytes(code->scratch_bytes(&o, 1));
        float *gradient = bytes_of(4 * o.n), *residual = bytes_of(4 * o.n), *next = bytes_of(4 * o.n);
        uint8_t *body = bytes_of(code->max_bytes(&o));
        tagc_encoded encoded;
        fill(HEAVY, gradient, o.n);
        fill(ZEROS, residual, o.n);
        size_t at = random_below(o.n);
        if (trial % 4 == 3)
            gradient[at] = FLT_MAX, residual[at] = FLT_MAX;
        else
            gradient[at] = bad[trial % 3];
        int with_residual = o.sparse || trial % 4 == 3 || random_below(2);
        code->encode(&o, gradient, with_residual ? residual : NULL, with_residual ? next : NULL, 0, body,
                     scratch, NULL, &encoded);
        assert_true(encoded.nonfinite);
        assert_int_equal(encoded.n_bytes, 0);
        tagc_memory_destroy(scratch);
        free(gradient), free(residual), free(next), free(body);
    }
}

/* Two values that are finite and whose sum is not: told however the second one comes. */
static void check_overflow(const tagc_code_options *o, tagc_pool *pool) {
    const tagc_code *code = tagc_code_of(o);
    void *scratch = aligned_bytes(code->scratch_bytes(o, tagc_pool_n_threads(pool)));
    float *gradient = bytes_of(4 * o->n), *residual = bytes_of(4 * o->n), *sums = bytes_of(4 * o->n);
    uint8_t *body = bytes_of(code->max_bytes(o));
    tagc_encoded encoded;
    size_t at = random_below(o->n);
    fill(ZEROS, gradient, o->n);
    fill(ZEROS, residual, o->n);
    gradient[at] = -3e38f;
    code->encode(o, gradient, residual, residual, 0, body, scratch, pool, &encoded);
    tagc_body twice[] = {{body, encoded.n_bytes, 0}, {body, encoded.n_bytes, 0}};
    assert_int_equal(code->decode(o, twice, 1, 0, 1, sums, scratch, pool), 0);
    int told = code->decode(o, twice, 1, 1, 1, sums, scratch, pool);
    assert_int_equal(told, isinf(sums[at]) != 0);
    told = code->decode(o, twice, 2, 0, 1, sums, scratch, pool);
    assert_int_equal(told, isinf(sums[at]) != 0);
    if (o->values <= TAGC_FORMAT_INT8) assert_true(isinf(sums[at])); /* others may have rounded it down */
    assert_int_equal(code->decode(o, twice, 2, 0, 0.5f, sums, scratch, pool), 0);
    gradient[at] = FLT_MAX; /* which no format may round up to infinity */
    fill(ZEROS, residual, o->n);
    code->encode(o, gradient, residual, residual, 0, body, scratch, pool, &encoded);
    assert_int_equal(encoded.nonfinite, 0);
    twice[0].n_bytes = encoded.n_bytes;
    assert_int_equal(code->decode(o, twice, 1, 0, 1, sums, scratch, pool), 0);
    assert_true(isfinite(sums[at]));
    tagc_memory_destroy(scratch);
    free(gradient), free(residual), free(sums), free(body);
}

TEST(test_overflow) {
    tagc_pool *pool;
    assert_int_equal(tagc_pool_create(3, &pool), TAGC_OK);
    for (int variant = REPEATS(0, 0, 4); variant < 8 * (TAGC_FORMAT_INT2 + 1); variant += REPEATS(1, 1, 9)) {
        tagc_code_options o = {.n = variant & 2 ? (1 << 21) + 77 : 300,
                               .sparse = variant & 1,
                               .values = variant / 8,
                               .block = 128};
        o.k = o.sparse ? o.n / 50 : o.n;
        check_overflow(&o, variant & 4 ? pool : NULL);
    }
    tagc_pool_destroy(pool);
}

TEST(test_damaged) {
    HAS_ONE_THREAD();
    int n_passed = 0, n_refused = 0;
    for (int trial = 0; trial < 400; trial++) {
        tagc_code_options o = random_options(trial % 20 ? 300 : 70000);
        fragment f = encode(&o, HEAVY, 0, NULL);
        void *scratch = aligned_bytes(f.code->scratch_bytes(&o, 1));
        if (f.encoded.n_bytes > 0)
            for (int i = 0; i < 5; i++) {
                size_t n_bytes = random_below(f.encoded.n_bytes);
                uint8_t *shorter = memcpy(bytes_of(n_bytes), f.body, n_bytes);
                assert_int_equal(f.code->validate(&o, shorter, n_bytes), TAGC_ERR_CORRUPT);
                free(shorter);
            }
        uint8_t *longer = bytes_of(f.encoded.n_bytes + 1);
        memcpy(longer, f.body, f.encoded.n_bytes);
        longer[f.encoded.n_bytes] = 0;
        assert_int_equal(f.code->validate(&o, longer, f.encoded.n_bytes + 1), TAGC_ERR_CORRUPT);
        free(longer);
        for (int i = 0; i < 20 && f.encoded.n_bytes > 0; i++) {
            size_t at = random_below(f.encoded.n_bytes);
            f.body[at] ^= (uint8_t)(1u << random_below(8));
            if (f.code->validate(&o, f.body, f.encoded.n_bytes) == TAGC_OK) {
                tagc_body one = {f.body, f.encoded.n_bytes, 0};
                f.code->decode(&o, &one, 1, 0, 1, f.decoded, scratch, NULL);
                for (size_t j = 0; j < o.n; j++) assert_true(isfinite(f.decoded[j]));
                n_passed++;
            } else {
                n_refused++;
            }
        }
        tagc_memory_destroy(scratch);
        fragment_free(&f);
    }
    assert_true(n_passed > 0 && n_refused > 0);
}

/* Arrays and bodies where they happen to lie, and the residual in place, give the same bytes. */
TEST(test_unaligned) {
    HAS_ONE_THREAD();
    for (int trial = 0; trial < 60; trial++) {
        tagc_code_options o = random_options(trial % HUGE_EVERY ? 3000 : 2500000);
        const tagc_code *code = tagc_code_of(&o);
        fragment f = encode(&o, HEAVY, 1, NULL);
        size_t offset = 1 + random_below(15), most = code->max_bytes(&o);
        float *arrays = bytes_of(4 * (3 * o.n + offset)), *gradient = arrays + offset,
              *residual = gradient + o.n, *sums = residual + o.n;
        uint8_t *body = bytes_of(most + 1);
        void *scratch = aligned_bytes(code->scratch_bytes(&o, 1));
        tagc_encoded encoded;
        memcpy(gradient, f.gradient, 4 * o.n);
        memcpy(residual, f.residual_in, 4 * o.n);
        code->encode(&o, gradient, residual, residual, 0, body + 1, scratch, NULL, &encoded);
        assert_int_equal(encoded.n_bytes, f.encoded.n_bytes);
        assert_memory_equal(body + 1, f.body, encoded.n_bytes);
        assert_memory_equal(residual, f.residual_out, 4 * o.n);
        assert_memory_equal(gradient, f.gradient, 4 * o.n);
        tagc_body one = {body + 1, encoded.n_bytes, 0};
        code->decode(&o, &one, 1, 0, 1, sums, scratch, NULL);
        assert_memory_equal(sums, f.decoded, 4 * o.n);
        tagc_memory_destroy(scratch);
        free(arrays), free(body);
        fragment_free(&f);
    }
}

/* Where there is no residual, blocks are those of a residual of zeros. */
TEST(test_alone) {
    HAS_ONE_THREAD();
    for (int trial = 0; trial < 200; trial++) {
        tagc_code_options o = random_options(3000);
        uint64_t seed = random_state;
        o.sparse = 0;
        fragment alone = encode(&o, trial % N_FILLS, 0, NULL);
        const tagc_code *code = alone.code;
        void *scratch = aligned_bytes(code->scratch_bytes(&o, 1));
        uint8_t *body = bytes_of(code->max_bytes(&o));
        tagc_encoded encoded;
        for (size_t i = 0; i < o.n; i++) alone.residual_in[i] = TAGC_ZERO_RESIDUAL;
        code->encode(&o, alone.gradient, alone.residual_in, alone.residual_out, 0, body, scratch, NULL,
                     &encoded);
        assert_int_equal(encoded.n_bytes, alone.encoded.n_bytes);
        assert_memory_equal(body, alone.body, encoded.n_bytes);
        random_state = seed + 1;
        tagc_memory_destroy(scratch);
        free(body);
        fragment_free(&alone);
    }
}

/* ---- stored residuals and gradients in bf16 ---- */

/* What the code does is what it does in fp32, between reading and writing what is stored. */
static void check_stored(const tagc_code_options *options, int kind, tagc_pool *pool) {
    tagc_code_options plain = *options;
    plain.residual = plain.gradient = TAGC_FORMAT_FP32;
    const tagc_code *code = tagc_code_of(options);
    size_t n = options->n, most = code->max_bytes(options), n_row = tagc_residual_bytes(options->residual, n);
    float *gradient = bytes_of(4 * n), *residual = bytes_of(4 * n), *left = bytes_of(4 * n);
    uint16_t *halves = bytes_of(2 * n);
    uint8_t *row = bytes_of(n_row), *next = bytes_of(n_row), *expected = bytes_of(n_row);
    uint8_t *body = bytes_of(most), *other = bytes_of(most);
    void *scratch = aligned_bytes(code->scratch_bytes(options, tagc_pool_n_threads(pool)));
    void *plain_scratch = aligned_bytes(code->scratch_bytes(&plain, 1));
    tagc_encoded encoded, plain_encoded;
    int with_residual = options->sparse || random_below(4);
    uint32_t seed = (uint32_t)random_below(1u << 30);
    fill(kind, gradient, n);
    fill(kind == HUGE_ONES ? ZEROS : kind, residual, n);
    for (size_t i = 0; i < n; i++) {
        halves[i] = (uint16_t)(bits_of(gradient[i]) >> 16);
        if (options->gradient == TAGC_FORMAT_BF16) gradient[i] = float_of((uint32_t)halves[i] << 16);
    }
    tagc_residual_write(options->residual, n, residual, 0, n, seed + 9, row);
    tagc_residual_read(options->residual, n, row, 0, n, residual);
    memset(next, 0x5a, n_row), memset(expected, 0x5a, n_row);

    code->encode(&plain, gradient, with_residual ? residual : NULL, with_residual ? left : NULL, 0, other,
                 plain_scratch, NULL, &plain_encoded);
    code->encode(options, options->gradient == TAGC_FORMAT_BF16 ? (void *)halves : gradient,
                 with_residual ? row : NULL, with_residual ? next : NULL, seed, body, scratch, pool,
                 &encoded);
    assert_false(plain_encoded.nonfinite);
    assert_memory_equal(&encoded, &plain_encoded, sizeof encoded);
    assert_memory_equal(body, other, encoded.n_bytes);
    if (with_residual) {
        tagc_residual_write(options->residual, n, left, 0, n, seed, expected);
        assert_memory_equal(next, expected, n_row);
    }

    free(gradient), free(residual), free(left), free(halves), free(row), free(next), free(expected);
    free(body), free(other);
    tagc_memory_destroy(scratch), tagc_memory_destroy(plain_scratch);
}

TEST(test_stored) {
    static const int formats[] = {TAGC_FORMAT_INT8, TAGC_FORMAT_INT8, TAGC_FORMAT_INT4, TAGC_FORMAT_FP32};
    tagc_pool *pool;
    assert_int_equal(tagc_pool_create(3, &pool), TAGC_OK);
    for (int trial = 0; trial < N_STORED; trial++) {
        tagc_code_options o = random_options(trial % 10 == 0 ? 150000 : trial % 3 == 0 ? 5000 : 700);
        o.residual = formats[random_below(4)];
        o.gradient = random_below(3) ? TAGC_FORMAT_FP32 : TAGC_FORMAT_BF16;
        check_stored(&o, (int)random_below(N_FILLS), trial % 4 ? NULL : pool);
    }
    for (int trial = 0; trial < N_STORED_HUGE; trial++) { /* beyond the cache */
        tagc_code_options o = random_options(3);
        o.n = (size_t)(1 << 21) + random_below(300000);
        o.k = o.sparse ? tagc_select_count(o.n, trial % 2 ? 0.95 : 0.8) : o.n;
        o.residual = formats[random_below(4)];
        o.gradient = random_below(3) ? TAGC_FORMAT_FP32 : TAGC_FORMAT_BF16;
        check_stored(&o, trial % 3 ? HEAVY : CLUMPED, trial % 4 ? NULL : pool);
    }
    tagc_pool_destroy(pool);
}
