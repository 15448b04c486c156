/* Positions: no more than a tenth above their entropy, alike on every instruction set and thread count, and any bytes
 * read within bounds. */
#define RANDOM_SEED 11
#include "../repeats.h"
#include "../test.h"
#include "codec/gaps.h"
#include "core/memory.h"
#include "random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef TAGC_SANITIZED
enum { N_TRIALS = 100 };
#else
enum { N_TRIALS = 400 };
#endif
enum { N_LARGE = 1000000 };

static void *bytes_of(size_t n_bytes) { /* exactly, so that ASan sees a step over */
    void *memory = malloc(n_bytes ? n_bytes : 1);
    assert_non_null(memory);
    return memory;
}

typedef struct support {
    size_t n, n_items;
    uint32_t *items; /* exactly (n_items) */
} support;

static support support_of(size_t n, const uint8_t *is_in) {
    support s = {.n = n};
    for (size_t i = 0; i < n; i++) s.n_items += is_in[i];
    s.items = bytes_of(4 * s.n_items);
    for (size_t i = 0, j = 0; i < n; i++)
        if (is_in[i]) s.items[j++] = (uint32_t)i;
    return s;
}

static support random_support(size_t n, double density) {
    uint8_t *is_in = bytes_of(n);
    for (size_t i = 0; i < n; i++) is_in[i] = random_uniform() < density;
    support s = support_of(n, is_in);
    free(is_in);
    return s;
}

/* Dense runs with nothing between them. */
static support clumped_support(size_t n) {
    uint8_t *is_in = bytes_of(n);
    int inside = 0;
    for (size_t i = 0, left = 0; i < n; i++, left--) {
        if (left == 0) inside = !inside, left = 1 + random_below(inside ? 300 : 20000);
        is_in[i] = inside && random_below(3) > 0;
    }
    support s = support_of(n, is_in);
    free(is_in);
    return s;
}

typedef struct encoded {
    uint8_t *bytes; /* exactly (n_bytes) */
    size_t n_bytes;
} encoded;

static encoded encode(const tagc_gaps *gaps, const support *s, tagc_pool *pool) {
    void *scratch = NULL;
    size_t most = tagc_gaps_max_bytes(gaps);
    uint8_t *bytes = bytes_of(most);
    assert_int_equal(tagc_memory_create(tagc_gaps_scratch_bytes(gaps) + 1, "scratch", &scratch), TAGC_OK);
    encoded e = {.n_bytes = tagc_gaps_encode(gaps, s->items, s->n_items, bytes, scratch, pool)};
    assert_in_range(e.n_bytes, 8, most);
    e.bytes = memcpy(bytes_of(e.n_bytes), bytes, e.n_bytes);
    tagc_memory_destroy(scratch);
    free(bytes);
    return e;
}

/* All positions of a valid code; returns how many. */
static size_t decode(const tagc_gaps *gaps, const uint8_t *bytes, uint32_t *items) {
    tagc_gaps_cursor cursor, other;
    size_t n = 0;
    tagc_gaps_seek(gaps, bytes, 0, &cursor);
    while (cursor.chunk < gaps->n_chunks) {
        size_t chunk = cursor.chunk;
        uint32_t *here = bytes_of(4 * (tagc_gaps_chunk_elems(gaps, chunk) + TAGC_GAPS_SLACK));
        size_t n_here = tagc_gaps_next(gaps, bytes, &cursor, here);
        for (size_t i = 0; i < n_here; i++) items[n++] = (uint32_t)(chunk * gaps->chunk) + here[i];
        free(here);
        tagc_gaps_seek(gaps, bytes, chunk + 1, &other);
        assert_memory_equal(&other, &cursor, sizeof other);
        assert_int_equal(cursor.item, n);
    }
    assert_int_equal(cursor.offset, tagc_gaps_bytes(gaps, bytes));
    return n;
}

/* Every table: the same bytes, which give back the support. */
static void check_support(const support *s, size_t k) {
    const tagc_code_kernels *available[TAGC_CODE_MAX_KERNELS];
    size_t n_available = tagc_code_available(available), n_items;
    uint32_t *items = bytes_of(4 * s->n);
    tagc_gaps gaps;
    tagc_gaps_init(&gaps, s->n, k);
    gaps.kernels = &tagc_code_scalar;
    encoded expected = encode(&gaps, s, NULL);
    for (size_t i = 0; i < n_available; i++) {
        gaps.kernels = available[i];
        encoded e = encode(&gaps, s, NULL);
        assert_int_equal(e.n_bytes, expected.n_bytes);
        assert_memory_equal(e.bytes, expected.bytes, e.n_bytes);
        assert_int_equal(tagc_gaps_validate(&gaps, e.bytes, e.n_bytes, &n_items), e.n_bytes);
        assert_int_equal(n_items, s->n_items);
        assert_int_equal(tagc_gaps_items(e.bytes), s->n_items);
        assert_int_equal(decode(&gaps, e.bytes, items), s->n_items);
        if (s->n_items) assert_memory_equal(items, s->items, 4 * s->n_items);
        free(e.bytes);
    }
    free(expected.bytes), free(items);
}

TEST(test_every_table) {
    HAS_ONE_THREAD();
    for (int trial = 0; trial < N_TRIALS; trial++) {
        size_t n = 1 + random_below(trial % 20 ? 5000 : 200000);
        support s = trial % 3 ? random_support(n, pow(random_uniform(), 3)) : clumped_support(n);
        check_support(&s, trial % 2 ? s.n_items : s.n_items + random_below(n - s.n_items + 1));
        free(s.items);
    }
}

/* All supports of one and two items, and of all but one and two, and none and all. */
TEST(test_small) {
    HAS_ONE_THREAD();
    for (size_t n = 1; n <= 200; n += n < 40 ? 1 : 7) {
        uint8_t *is_in = bytes_of(n);
        for (int all_but = 0; all_but < 2; all_but++)
            for (size_t a = 0; a < n; a++) {
                size_t b = random_below(n);
                memset(is_in, all_but, n);
                support none = support_of(n, is_in);
                is_in[a] = !all_but;
                support one = support_of(n, is_in);
                is_in[b] = !all_but;
                support two = support_of(n, is_in);
                check_support(&none, none.n_items);
                check_support(&one, one.n_items);
                check_support(&two, n);
                free(none.items), free(one.items), free(two.items);
            }
        free(is_in);
    }
}

/* What the room of a body must hold: everything at the end, and runs that no one size of gaps suits. */
TEST(test_worst) {
    HAS_ONE_THREAD();
    size_t n = 300000;
    uint8_t *is_in = bytes_of(n);
    for (int trial = 0; trial < 40; trial++) {
        memset(is_in, 0, n);
        size_t k = random_below(n / 3), run = trial % 4 == 0 ? k : 1 + random_below(50);
        for (size_t left = k, at = trial % 4 == 0 ? n - k : 0; left > 0 && at + run <= n;
             at += run + (n - k) / (k / run + 1), left -= left < run ? left : run)
            memset(is_in + at, 1, left < run ? left : run);
        support s = support_of(n, is_in);
        check_support(&s, s.n_items);
        free(s.items);
    }
    free(is_in);
}

TEST(test_entropy) {
    static const double densities[] = {0.0125, 0.025, 0.05, 0.1, 0.2};
    HAS_ONE_THREAD();
    for (size_t i = 0; i < 5; i++) {
        support s = random_support(N_LARGE, densities[i]);
        double p = (double)s.n_items / N_LARGE, entropy = -(p * log2(p) + (1 - p) * log2(1 - p)) / p;
        tagc_gaps gaps;
        tagc_gaps_init(&gaps, s.n, s.n_items);
        encoded e = encode(&gaps, &s, NULL);
        double bits = 8.0 * (double)e.n_bytes / (double)s.n_items;
        print_message("density %.2f %%: %.3f bits per position, %.1f %% above entropy\n", 100 * p, bits,
                      100 * (bits / entropy - 1));
        assert_true(bits <= 1.1 * entropy);
        free(e.bytes), free(s.items);
    }
}

TEST(test_threads) {
    for (int n_threads = 2; n_threads <= 5; n_threads++) {
        tagc_pool *pool = NULL;
        assert_int_equal(tagc_pool_create(n_threads, &pool), TAGC_OK);
        for (int trial = 0; trial < 3; trial++) {
            support s = trial ? random_support(700000, 0.2 * trial) : clumped_support(700000);
            tagc_gaps gaps;
            tagc_gaps_init(&gaps, s.n, s.n_items);
            encoded alone = encode(&gaps, &s, NULL), together = encode(&gaps, &s, pool);
            assert_int_equal(alone.n_bytes, together.n_bytes);
            assert_memory_equal(alone.bytes, together.bytes, alone.n_bytes);
            free(alone.bytes), free(together.bytes), free(s.items);
        }
        tagc_pool_destroy(pool);
    }
}

/* All tables judge alike, and what they pass they read alike: ascending, inside, as many as it says. */
static int judge(const tagc_gaps *gaps, const uint8_t *bytes, size_t n_bytes) {
    const tagc_code_kernels *available[TAGC_CODE_MAX_KERNELS];
    size_t n_available = tagc_code_available(available), n_items, n_items_here;
    tagc_gaps g = *gaps;
    g.kernels = &tagc_code_scalar;
    uint8_t *exact = memcpy(bytes_of(n_bytes), bytes, n_bytes);
    size_t n_code = tagc_gaps_validate(&g, exact, n_bytes, &n_items);
    uint32_t *items = bytes_of(4 * gaps->n), *items_here = bytes_of(4 * gaps->n);
    if (n_code) {
        assert_in_range(n_code, 8, n_bytes);
        assert_int_equal(decode(&g, exact, items), n_items);
        for (size_t i = 0; i < n_items; i++)
            assert_true(items[i] < g.n && (i == 0 || items[i - 1] < items[i]));
    }
    for (size_t i = 0; i < n_available; i++) {
        g.kernels = available[i];
        assert_int_equal(tagc_gaps_validate(&g, exact, n_bytes, &n_items_here), n_code);
        if (!n_code) continue;
        assert_int_equal(n_items_here, n_items);
        assert_int_equal(decode(&g, exact, items_here), n_items);
        if (n_items) assert_memory_equal(items, items_here, 4 * n_items);
    }
    free(exact), free(items), free(items_here);
    return n_code > 0;
}

TEST(test_hostile) {
    HAS_ONE_THREAD();
    int n_passed = 0, n_refused = 0;
    for (int trial = 0; trial < N_TRIALS; trial++) {
        size_t n = 1 + random_below(trial % 10 ? 3000 : 70000);
        support s = random_support(n, pow(random_uniform(), 2));
        tagc_gaps gaps;
        tagc_gaps_init(&gaps, n, s.n_items);
        encoded e = encode(&gaps, &s, NULL);
        for (int round = 0; round < 20; round++) {
            uint8_t *bytes = memcpy(bytes_of(e.n_bytes), e.bytes, e.n_bytes);
            for (size_t flips = 1 + random_below(3); flips > 0; flips--) {
                size_t at = random_below(random_below(2) ? e.n_bytes : 8 + 4 * gaps.n_chunks);
                bytes[at] ^= (uint8_t)(1u << random_below(8));
            }
            if (judge(&gaps, bytes, e.n_bytes))
                n_passed++;
            else
                n_refused++;
            free(bytes);
        }
        for (int round = 0; round < 10; round++) assert_false(judge(&gaps, e.bytes, random_below(e.n_bytes)));
        free(e.bytes), free(s.items);
    }
    assert_true(n_passed > 0 && n_refused > 0);
}

/* The table of a chunk against its bits: each must be refused. */
TEST(test_refused) {
    HAS_ONE_THREAD();
    support s = random_support(5000, 0.05);
    tagc_gaps gaps;
    tagc_gaps_init(&gaps, s.n, s.n_items);
    encoded e = encode(&gaps, &s, NULL);
    static const struct {
        size_t at;
        int add;
    } damages[] = {{0, 1}, {0, -1}, {3, 1},  {4, 16}, {4, -4}, {5, 1},
                   {7, 1}, {8, 1},  {8, -1}, {10, 1}, {10, -1}};
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        e.bytes[damages[i].at] = (uint8_t)(e.bytes[damages[i].at] + damages[i].add);
        assert_false(judge(&gaps, e.bytes, e.n_bytes));
        e.bytes[damages[i].at] = (uint8_t)(e.bytes[damages[i].at] - damages[i].add);
    }
    assert_true(judge(&gaps, e.bytes, e.n_bytes));
    free(e.bytes), free(s.items);
}
