/* Packing against looking each position up, and unpacking against writing each one out. */
#define RANDOM_SEED 2
#include "../bits.h"
#include "../codec/random.h"
#include "../test.h"
#include "codec/elements.h"
#include "codec/select.h"
#include "paper/pack.h"

#include <stdlib.h>
#include <string.h>

static float next_value(void) {
    return (float)(2 * random_uniform() - 1);
}

/* A union over n elements, one rank's part of it, and a residual as selection leaves it: nothing where it
 * sent. */
typedef struct fixture {
    size_t n, n_union, n_sent;
    uint32_t *positions, *sent; /* exactly (n_union), (n_sent), so that ASan sees a step over */
    float *values, *residual;   /* (n_sent), (n) */
} fixture;

static fixture fixture_make(size_t n, double density, double share) {
    fixture f = {.n = n, .residual = malloc(n * sizeof(float) + 1)};
    uint32_t *positions = malloc(n * 4 + 1), *sent = malloc(n * 4 + 1);
    for (size_t i = 0; i < n; i++) {
        f.residual[i] = next_value();
        if (random_uniform() >= density) continue;
        positions[f.n_union++] = (uint32_t)i;
        if (random_uniform() >= share) continue;
        sent[f.n_sent++] = (uint32_t)i;
        f.residual[i] = TAGC_ZERO_RESIDUAL;
    }
    f.positions = memcpy(malloc(f.n_union * 4 + 1), positions, f.n_union * 4);
    f.sent = memcpy(malloc(f.n_sent * 4 + 1), sent, f.n_sent * 4);
    f.values = malloc(f.n_sent * sizeof(float) + 1);
    for (size_t k = 0; k < f.n_sent; k++) f.values[k] = next_value();
    free(positions), free(sent);
    return f;
}

static void fixture_free(fixture *f) {
    free(f->positions), free(f->sent), free(f->values), free(f->residual);
}

typedef void pack_fn(const uint32_t *union_indices, size_t n_union, const uint32_t *indices,
                     const float *values, size_t n_sent, float *residual, float *packed);

static void check_pack(const fixture *f, pack_fn *pack, int fill) {
    float *residual = memcpy(malloc(f->n * 4 + 1), f->residual, f->n * 4);
    float *packed = malloc(f->n_union * 4 + 1), *kept_at = malloc(f->n * 4 + 1);
    char *is_kept = calloc(f->n + 1, 1), *in_union = calloc(f->n + 1, 1);
    for (size_t k = 0; k < f->n_sent; k++) is_kept[f->sent[k]] = 1, kept_at[f->sent[k]] = f->values[k];
    pack(f->positions, f->n_union, f->sent, f->values, f->n_sent, fill ? residual : NULL, packed);
    for (size_t j = 0; j < f->n_union; j++) {
        uint32_t i = f->positions[j];
        in_union[i] = 1;
        float expected = is_kept[i] ? kept_at[i] : fill ? f->residual[i] : -0.0f;
        assert_int_equal(bits_of(packed[j]), bits_of(expected));
    }
    for (size_t i = 0; i < f->n; i++) {
        float expected = fill && in_union[i] ? TAGC_ZERO_RESIDUAL : f->residual[i];
        assert_int_equal(bits_of(residual[i]), bits_of(expected));
    }
    free(residual), free(packed), free(kept_at), free(is_kept), free(in_union);
}

static const size_t sizes[] = {0, 1, 15, 16, 17, 31, 32, 33, 100, 1000, 4095, 4096, 4097, 20011};
static const double shares[] = {0, 0.02, 0.5, 0.97, 1};

TEST(packs_in_union_order) {
    const double densities[] = {0, 0.025, 0.3, 1};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int d = 0; d < 4; d++)
            for (int h = 0; h < 5; h++)
                for (int fill = 0; fill < 2; fill++) {
                    fixture f = fixture_make(sizes[s], densities[d], shares[h]);
                    check_pack(&f, tagc_pack, fill);
                    check_pack(&f, tagc_pack_reference, fill);
                    fixture_free(&f);
                }
}

/* Kept positions in runs and at the ends, where blocks of 16 take all or nothing. */
TEST(packs_runs) {
    for (int trial = 0; trial < 200; trial++) {
        fixture f = fixture_make(700, 1, 1);
        size_t n_sent = 0;
        int on = trial % 2;
        for (size_t i = 0; i < f.n; i++) {
            if (random_u64() % 20 == 0) on = !on;
            f.residual[i] = on ? TAGC_ZERO_RESIDUAL : next_value();
            if (on) f.values[n_sent] = next_value(), f.sent[n_sent++] = (uint32_t)i;
        }
        f.n_sent = n_sent;
        check_pack(&f, tagc_pack, 1);
        check_pack(&f, tagc_pack, 0);
        fixture_free(&f);
    }
}

TEST(unpacks_and_clears_the_rest) {
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int d = 0; d < 5; d++)
            for (int scaled = 0; scaled < 2; scaled++) {
                fixture f = fixture_make(sizes[s], shares[d], 1);
                float scale = scaled ? 1.0f / 3 : 1, *out = malloc(f.n * 4 + 1);
                memset(out, 0xff, f.n * 4);
                if (f.n_sent) f.values[0] = -0.0f;
                tagc_unpack(f.positions, f.n_union, f.values, scale, out, f.n);
                for (size_t i = 0, j = 0; i < f.n; i++) {
                    float expected = 0;
                    if (j < f.n_union && f.positions[j] == i) expected = f.values[j++] * scale;
                    assert_int_equal(bits_of(out[i]), bits_of(expected));
                }
                free(out);
                fixture_free(&f);
            }
}

TEST(adds_in_the_order_given) {
    for (size_t n = 0; n < 70; n++) {
        float into[70] = {0}, from[70] = {0}, expected[70];
        for (size_t i = 0; i < n; i++) {
            into[i] = next_value(), from[i] = next_value() * 1e-3f;
            expected[i] = into[i] + from[i];
        }
        tagc_sum_add(into, from, n);
        for (size_t i = 0; i < n; i++) assert_int_equal(bits_of(into[i]), bits_of(expected[i]));
    }
    float nothing = -0.0f, minus_zero = -0.0f; /* a rank that has nothing there changes nothing */
    tagc_sum_add(&nothing, &minus_zero, 1);
    assert_int_equal(bits_of(nothing), bits_of(-0.0f));
}
