/* Messages of tagc/blocks.h against a naive coder: the same bytes and values at every level of the processor; what is damaged,
 * forged or meant for other options is refused by name and changes nothing. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../repeats.h"
#include "../test.h"
#include "blocks_oracle.h"
#include "core/measure.h"
#include "core/xxh3.h"
#include "exchange/wire.h"
#include "tagc/blocks.h"

enum { HEADER = 64, MAX_N = 9000, GUARD = 0x5a };

/* ---- the oracle ---- */

/* The two bits of a value in int2, whose levels are 1 and 4 times the scale. */
static int two_bits_of(float scale, float x) {
    return (signbit(x) ? 2 : 0) | (fabsf(x) > scale * 2.5f);
}

static void put(uint8_t *codes, int bits, size_t i, int code) {
    for (int b = 0; b < bits; b++)
        if (code >> b & 1)
            codes[(i * (size_t)bits + (size_t)b) / 8] |= (uint8_t)(1u << (i * (size_t)bits + (size_t)b) % 8);
}

static int bits_per(int format) {
    return format == TAGC_FORMAT_INT8 ? 8 : format == TAGC_FORMAT_INT4 ? 4 : 2;
}

static size_t oracle_bytes(const tagc_blocks_options *o, size_t n) {
    size_t block = (size_t)o->block, bits = (size_t)bits_per(o->format);
    return HEADER + 2 * ((n + block - 1) / block) + (n * bits + 7) / 8;
}

/* Writes the body that `x` must have, and the values that must arrive. int2 chooses its scales by a sum whose order the oracle does
 * not know: it takes them from `message`, and test_int2 looks at how good they are. */
static void oracle(const tagc_blocks_options *o, const float *x, size_t n, const uint8_t *message,
                   uint8_t *body, float *arrives) {
    size_t block = (size_t)o->block, n_blocks = (n + block - 1) / block;
    int bits = bits_per(o->format);
    uint32_t seed = oracle_seed(o->seed, 0, 0, 0);
    memset(body, 0, oracle_bytes(o, n) - HEADER);
    for (size_t b = 0; b < n_blocks; b++) {
        size_t end = (b + 1) * block < n ? (b + 1) * block : n;
        int is_finite = 1, is_random = o->rounding == TAGC_ROUNDING_STOCHASTIC;
        for (size_t i = b * block; i < end; i++) is_finite &= isfinite(x[i]) != 0;
        uint16_t half = oracle_scale(o->format, is_random, x + b * block, end - b * block);
        if (bits == 2) memcpy(&half, message + HEADER + 2 * b, 2);
        if (!is_finite) half = 0x7fc0;
        memcpy(body + 2 * b, &half, 2);
        for (size_t i = b * block; i < end; i++) {
            arrives[i] = is_finite ? 0 : oracle_wide(0x7fc0);
            if (!is_finite || half == 0) continue;
            float scale = oracle_wide(half);
            uint32_t threshold = oracle_threshold(seed, (uint32_t)i);
            int code = bits == 2 ? two_bits_of(scale, x[i])
                                 : oracle_integer(o->format, is_random ? &threshold : NULL, scale, x[i]);
            put(body + 2 * n_blocks, bits, i, code);
            arrives[i] = bits == 2 ? (code & 2 ? -1 : 1) * scale * (code & 1 ? 4 : 1) : (float)code * scale;
        }
    }
}

/* ---- random cases ---- */

static uint64_t random_state;

static size_t below(size_t limit) {
    return (size_t)(tagc_next_random(&random_state) % limit);
}

static void fill(float *x, size_t n) {
    int kind = (int)below(6);
    for (size_t i = 0; i < n; i++) {
        uint32_t any = (uint32_t)tagc_next_random(&random_state);
        x[i] = tagc_normal_of(tagc_next_random(&random_state));
        if (kind == 1) x[i] *= expf(3 * tagc_normal_of(tagc_next_random(&random_state)));
        if (kind == 2) x[i] = float_of((any & 0x80000000u) | any % 0x7f800000u); /* any finite */
        if (kind == 3)
            x[i] = float_of((any & 0x80000000u) | (0x7f7fffffu - any % (1u << 20))); /* the largest */
        if (kind == 4) x[i] = float_of((any & 0x80000000u) | any % (1u << 24));      /* denormals */
        if (kind == 5) x[i] = i % 7 ? 0.0f : -0.0f;
        if (below(3000) == 0) x[i] = below(2) ? INFINITY : NAN;
    }
}

static tagc_blocks_options any_options(void) {
    tagc_blocks_options o;
    tagc_blocks_options_init(&o);
    o.format = TAGC_FORMAT_INT8 + (int)below(3);
    o.block = 16 << below(9);
    o.element = below(2) ? TAGC_FORMAT_FP32 : TAGC_FORMAT_BF16;
    o.rounding = o.format != TAGC_FORMAT_INT2 && below(2);
    o.seed = tagc_next_random(&random_state);
    return o;
}

static int same(const float *a, const float *b, size_t n) { /* NaN equals NaN, and -0 equals 0 */
    for (size_t i = 0; i < n; i++)
        if (!(a[i] == b[i] || (isnan(a[i]) && isnan(b[i])))) return 0;
    return 1;
}

static void *room(size_t n_bytes) { /* exact, for the address sanitizer */
    void *memory = malloc(n_bytes ? n_bytes : 1);
    assert_non_null(memory);
    memset(memory, GUARD, n_bytes ? n_bytes : 1);
    return memory;
}

TEST(test_oracle) {
    const int n_trials = REPEATS(600, 120, 120);
    random_state = 7;
    for (int trial = 0; trial < n_trials; trial++) {
        tagc_blocks_options o = any_options();
        size_t n = trial == 0 ? 0 : 1 + below(trial % 4 ? 300 : MAX_N), n_bytes = oracle_bytes(&o, n);
        float *x = room(4 * n), *arrives = room(4 * n), *decoded = room(4 * n);
        uint16_t *halves = room(2 * n), *halves_back = room(2 * n);
        uint8_t *message = room(n_bytes + 1), *body = room(n_bytes), *unaligned = message + 1;
        uint64_t told = 0;
        fill(x, n);
        for (size_t i = 0; i < n; i++) {
            halves[i] = (uint16_t)(bits_of(x[i]) >> 16);
            if (isnan(x[i])) halves[i] |= 0x40;
            if (o.element == TAGC_FORMAT_BF16) x[i] = oracle_wide(halves[i]);
        }
        const void *given = o.element == TAGC_FORMAT_BF16 ? (const void *)halves : x;
        void *back = o.element == TAGC_FORMAT_BF16 ? (void *)halves_back : decoded;
        assert_int_equal(tagc_blocks_bytes(&o, n, &told), TAGC_OK);
        assert_int_equal(told, n_bytes);
        assert_int_equal(tagc_blocks_encode(&o, given, n, unaligned, n_bytes), TAGC_OK);
        assert_int_equal(message[0], GUARD);
        oracle(&o, x, n, unaligned, body, arrives);
        assert_memory_equal(unaligned + HEADER, body, n_bytes - HEADER);
        uint8_t expected[HEADER] = {'T', 'A', 'G', 'C', 1, 8, (uint8_t)o.format};
        uint32_t block = (uint32_t)o.block;
        uint64_t numbers[2] = {n, n_bytes - HEADER}, sum;
        memcpy(expected + 12, &block, 4);
        memcpy(expected + 16, &numbers[0], 8);
        memcpy(expected + 40, &numbers[1], 8);
        sum = tagc_xxh3(body, n_bytes - HEADER, tagc_xxh3(expected, 56, 0));
        memcpy(expected + 56, &sum, 8);
        assert_memory_equal(unaligned, expected, HEADER);
        o.rounding = TAGC_ROUNDING_NEAREST; /* the receiver need not know how the sender rounds */
        o.seed = 0;
        assert_int_equal(tagc_blocks_decode(&o, unaligned, n_bytes, back, n), TAGC_OK);
        for (size_t i = 0; i < n && o.element == TAGC_FORMAT_BF16; i++) {
            decoded[i] = oracle_wide(halves_back[i]);
            if (!isnan(arrives[i])) /* the nearest bf16, which may be Inf at the end of the range */
                arrives[i] = copysignf(oracle_wide(oracle_half(fabsf(arrives[i]), 0)), arrives[i]);
        }
        assert_true(same(decoded, arrives, n));
        free(x), free(arrives), free(decoded), free(halves), free(halves_back), free(message), free(body);
    }
}

/* ---- what rounding is worth ---- */

static double lost_share(int format, int rounding) {
    enum { N = 1 << 15 };
    static float x[N], back[N];
    static uint8_t message[2 * N];
    double lost = 0, energy = 0;
    uint64_t n_bytes;
    tagc_blocks_options o;
    tagc_blocks_options_init(&o);
    o.format = format;
    o.rounding = rounding;
    random_state = 3;
    for (size_t i = 0; i < N; i++) x[i] = tagc_normal_of(tagc_next_random(&random_state));
    assert_int_equal(tagc_blocks_bytes(&o, N, &n_bytes), TAGC_OK);
    assert_int_equal(tagc_blocks_encode(&o, x, N, message, n_bytes), TAGC_OK);
    assert_int_equal(tagc_blocks_decode(&o, message, n_bytes, back, N), TAGC_OK);
    for (size_t i = 0; i < N; i++)
        energy += (double)x[i] * x[i], lost += ((double)x[i] - back[i]) * ((double)x[i] - back[i]);
    return lost / energy;
}

/* Uniform steps of s lose s^2 / 12 to the nearest, twice that stochastically; s is the largest of 64 over 127 or 7. Four levels
 * lose 0.12 of a Gaussian at best. */
TEST(test_error) {
    assert_true(lost_share(TAGC_FORMAT_INT8, TAGC_ROUNDING_NEAREST) < 4e-5);
    assert_true(lost_share(TAGC_FORMAT_INT4, TAGC_ROUNDING_NEAREST) < 0.0125);
    assert_true(lost_share(TAGC_FORMAT_INT2, TAGC_ROUNDING_NEAREST) < 0.14);
    double nearest = lost_share(TAGC_FORMAT_INT4, TAGC_ROUNDING_NEAREST),
           stochastic = lost_share(TAGC_FORMAT_INT4, TAGC_ROUNDING_STOCHASTIC);
    assert_true(stochastic > 1.7 * nearest && stochastic < 2.2 * nearest);
}

/* The mean over seeds is the value itself, also of the largest of a block; to the nearest it is not. */
TEST(test_no_bias) {
    enum { N = 64, SEEDS = 4000 };
    float x[N], back[N];
    double means[N] = {0}, worst = 0, worst_nearest = 0;
    uint8_t message[HEADER + 2 + N / 2];
    tagc_blocks_options o;
    tagc_blocks_options_init(&o);
    o.format = TAGC_FORMAT_INT4;
    for (size_t i = 0; i < N; i++) x[i] = 0.1f * (float)i - 3;
    for (int seed = 0; seed < SEEDS; seed++) {
        o.rounding = TAGC_ROUNDING_STOCHASTIC;
        o.seed = (uint64_t)seed;
        assert_int_equal(tagc_blocks_encode(&o, x, N, message, sizeof message), TAGC_OK);
        assert_int_equal(tagc_blocks_decode(&o, message, sizeof message, back, N), TAGC_OK);
        for (size_t i = 0; i < N; i++) means[i] += (double)back[i] / SEEDS;
    }
    o.rounding = TAGC_ROUNDING_NEAREST;
    assert_int_equal(tagc_blocks_encode(&o, x, N, message, sizeof message), TAGC_OK);
    assert_int_equal(tagc_blocks_decode(&o, message, sizeof message, back, N), TAGC_OK);
    for (size_t i = 0; i < N; i++) {
        worst = fmax(worst, fabs(means[i] - (double)x[i]));
        worst_nearest = fmax(worst_nearest, fabs((double)back[i] - (double)x[i]));
    }
    assert_true(worst < 0.02); /* a step is 0.47: five standard errors */
    assert_true(worst_nearest > 0.2);
}

/* ---- what is refused ---- */

static void refused(tagc_status status, tagc_status expected, const char *text) {
    if (status != expected || !strstr(tagc_last_error(), text))
        print_message("status %d, \"%s\", expected %d, \"%s\"\n", (int)status, tagc_last_error(),
                      (int)expected, text);
    assert_int_equal(status, expected);
    assert_non_null(strstr(tagc_last_error(), text));
}

TEST(test_options) {
    tagc_blocks_options o;
    uint64_t n_bytes;
    float values[4] = {0};
    uint8_t message[HEADER + 2 + 4];
    for (int c = 0; c < 9; c++) {
        tagc_blocks_options_init(&o);
        assert_true(o.format == TAGC_FORMAT_INT8 && o.block == 64 && o.element == TAGC_FORMAT_FP32);
        const char *texts[] = {
            "options.format is 1, must be 2 (INT8), 3 (INT4) or 4 (INT2)",
            "options.format is 5",
            "options.block is 8, must be a power of two in [16, 4096]",
            "options.block is 8192",
            "options.block is 48",
            "options.element is 2, must be 0 (FP32) or 1 (BF16)",
            "options.rounding is 2, must be 0 (NEAREST) or 1 (STOCHASTIC)",
            "options.rounding is STOCHASTIC, which is for INT8 and INT4; options.format is INT2",
            "struct_bytes of tagc_blocks_options is 5"};
        if (c < 2) o.format = c == 0 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_INT2 + 1;
        if (c == 2) o.block = 8;
        if (c == 3) o.block = 8192;
        if (c == 4) o.block = 48;
        if (c == 5) o.element = TAGC_FORMAT_INT8;
        if (c == 6) o.rounding = 2;
        if (c == 7) o.rounding = TAGC_ROUNDING_STOCHASTIC, o.format = TAGC_FORMAT_INT2;
        if (c == 8) o.struct_bytes = 5;
        tagc_status expected = c == 7 ? TAGC_ERR_UNSUPPORTED : TAGC_ERR_ARGUMENT;
        refused(tagc_blocks_bytes(&o, 4, &n_bytes), expected, texts[c]);
        refused(tagc_blocks_encode(&o, values, 4, message, sizeof message), expected, texts[c]);
        refused(tagc_blocks_decode(&o, message, sizeof message, values, 4), expected, texts[c]);
    }
    tagc_blocks_options_init(&o);
    refused(tagc_blocks_bytes(NULL, 4, &n_bytes), TAGC_ERR_ARGUMENT, "options is NULL");
    refused(tagc_blocks_bytes(&o, 4, NULL), TAGC_ERR_ARGUMENT, "n_bytes is NULL");
    refused(tagc_blocks_bytes(&o, UINT64_C(1) << 32, &n_bytes), TAGC_ERR_ARGUMENT,
            "n_elems is 4294967296, must be in [0, 4294967232]");
    assert_int_equal(tagc_blocks_bytes(&o, (UINT64_C(1) << 32) - 64, &n_bytes), TAGC_OK);
    assert_int_equal(n_bytes, 64 + ((UINT64_C(1) << 32) - 64) / 64 * 66);
    refused(tagc_blocks_encode(&o, NULL, 4, message, sizeof message), TAGC_ERR_ARGUMENT, "values is NULL");
    refused(tagc_blocks_encode(&o, values, 4, NULL, sizeof message), TAGC_ERR_ARGUMENT, "message is NULL");
    refused(tagc_blocks_encode(&o, values, 4, message, sizeof message - 1), TAGC_ERR_ARGUMENT,
            "n_bytes is 69, a message of 4 values has 70");
}

enum { N = 101, N_BYTES = HEADER + 2 * 7 + 51 }; /* of 4 bits in blocks of 16 */

static tagc_blocks_options small_options(void) {
    tagc_blocks_options o;
    tagc_blocks_options_init(&o);
    o.format = TAGC_FORMAT_INT4;
    o.block = 16;
    return o;
}

static void make_small(uint8_t *message) {
    float x[N];
    tagc_blocks_options o = small_options();
    for (size_t i = 0; i < N; i++) x[i] = (float)i - 50;
    assert_int_equal(tagc_blocks_encode(&o, x, N, message, N_BYTES), TAGC_OK);
}

static void decode_refused(const tagc_blocks_options *o, const uint8_t *message, uint64_t n_bytes,
                           uint64_t n_elems, tagc_status expected, const char *text) {
    float *values = room(4 * n_elems), *before = room(4 * n_elems);
    refused(tagc_blocks_decode(o, message, n_bytes, values, n_elems), expected, text);
    assert_memory_equal(values, before, 4 * n_elems);
    free(values), free(before);
}

/* Every single bit, and every length. */
TEST(test_damage) {
    uint8_t message[N_BYTES];
    tagc_blocks_options o = small_options();
    make_small(message);
    for (size_t bit = 0; bit < 8 * N_BYTES; bit++) {
        message[bit / 8] ^= (uint8_t)(1u << bit % 8);
        decode_refused(&o, message, N_BYTES, N, TAGC_ERR_CORRUPT, "");
        message[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    for (uint64_t n_bytes = 0; n_bytes < N_BYTES; n_bytes++)
        decode_refused(&o, message, n_bytes, N, TAGC_ERR_CORRUPT, "");
    message[N_BYTES - 1] ^= 1;
    decode_refused(&o, message, N_BYTES, N, TAGC_ERR_CORRUPT, "the checksum is wrong");
}

/* Sound messages that another end expects. */
TEST(test_mismatch) {
    uint8_t message[N_BYTES];
    make_small(message);
    tagc_blocks_options o = small_options();
    decode_refused(&o, message, N_BYTES, N - 1, TAGC_ERR_MISMATCH,
                   "the message has 101 values, expected 100");
    o.format = TAGC_FORMAT_INT8;
    decode_refused(&o, message, N_BYTES, N, TAGC_ERR_MISMATCH, "the message is of format 3, expected 2");
    o = small_options();
    o.block = 32;
    decode_refused(&o, message, N_BYTES, N, TAGC_ERR_MISMATCH,
                   "the message has blocks of 16 values, expected 32");
}

/* With a checksum to match, what decodes to Inf or lies past the end is refused all the same. */
TEST(test_forged) {
    tagc_blocks_options o = small_options();
    tagc_wire_header header;
    static const char *texts[] = {"a scale of the message",
                                  "a scale of the message",
                                  "a scale of the message",
                                  "a scale of the message",
                                  "message kind is 6",
                                  "n_bytes is 128, a message of 101 values has 129",
                                  "value coding is 5, must be in [0, 4]"};
    for (int c = 0; c < 7; c++) {
        uint8_t message[N_BYTES];
        make_small(message);
        uint64_t n_bytes = N_BYTES;
        assert_int_equal(tagc_wire_read(message, N_BYTES, &header), TAGC_OK);
        uint16_t scale = c == 0 ? 0x7f80 : c == 1 ? 0x8000 | 0x3f80 : 0x0001; /* Inf, negative, not normal */
        if (c < 3) memcpy(message + HEADER + 4, &scale, 2);
        if (c == 3) message[N_BYTES - 1] |= 0xf0; /* behind the last value */
        if (c == 4) header.kind = TAGC_WIRE_FRAGMENT, header.body_bytes = 0, n_bytes = HEADER;
        if (c == 5) header.body_bytes--, n_bytes--;
        if (c == 6) header.coding = TAGC_FORMAT_INT2 + 1;
        tagc_wire_write(&header, message);
        decode_refused(&o, message, n_bytes, N, TAGC_ERR_CORRUPT, texts[c]);
    }
}

/* The example of docs/reference/wire-format.md. */
TEST(test_documented) {
    static const float x[20] = {1, -0.5f, 0.3f, 7, [18] = -2, [19] = 0.9f};
    static const uint8_t expected[HEADER + 4 + 10] = {
        'T',         'A',  'G',  'C',  1,    8,    3,           0, /* version, kind, coding, flags */
        0,           0,    0,    0,    16,   0,    0,           0, /* rank, k: values per scale */
        20,          0,    0,    0,    0,    0,    0,           0, /* n_elems */
        0,           0,    0,    0,    0,    0,    0,           0,
        0,           0,    0,    0,    0,    0,    0,           0, /* no meaning here */
        14,          0,    0,    0,    0,    0,    0,           0, /* body_bytes */
        0,           0,    0,    0,    0,    0,    0,           0, /* step */
        [64] = 0x80, 0x3f, 0x92, 0x3e, 0x01, 0x70, [76] = 0x00, 0x39,
    };
    static const float back[20] = {1, 0, 0, 7, [18] = -7 * 0.28515625f, [19] = 3 * 0.28515625f};
    tagc_blocks_options o = small_options();
    uint8_t message[sizeof expected];
    float values[20];
    assert_int_equal(tagc_blocks_encode(&o, x, 20, message, sizeof message), TAGC_OK);
    assert_memory_equal(message, expected, 56);
    assert_memory_equal(message + HEADER, expected + HEADER, sizeof expected - HEADER);
    assert_int_equal(tagc_blocks_decode(&o, message, sizeof message, values, 20), TAGC_OK);
    assert_memory_equal(values, back, sizeof back);
}
