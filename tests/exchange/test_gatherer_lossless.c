/* Lossless gathers: the same bits as gathers of bf16, whatever the values; bytes; bodies that
 * are longer than their fronts; and what goes wrong. */
#include "../lengths.h"
#include "codec/bf16.h"
#include "codec/exponents.h"
#include "gathers.h"

enum { PIECE = 16384, SEGMENT = 4 * PIECE, N_STEPS = 5 };

static trial make_lossless(size_t shard, int has_lanes, int is_narrow) {
    trial t = make_trial(TAGC_GATHER_LOSSLESS, has_lanes);
    t.shard = shard;
    t.options.full_format = is_narrow ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
    return t;
}

/* In step 2 any bits, which take more than the fronts have; in the others values of about one size, and some that are
 * special. */
static float value_of(int step, int rank, size_t i) {
    static const uint32_t special[] = {0x80000000, 0x7f800000, 0xff800000, 0x7f812345,
                                       0xffffffff, 0x00000001, 0x807fffff, 0x7f7fffff};
    uint64_t draw = mix(i * 31 + (uint64_t)rank * 7919 + (uint64_t)step);
    if (step == 2) return float_of((uint32_t)draw);
    if (draw % 500 == 0) return float_of(special[draw / 500 % 8]);
    return random_gradient((uint64_t)step, rank, i);
}

/* What the codec makes of a row (shard), with header and table of each segment; *fronts: of the next gather. */
static uint64_t row_bytes(const float *row, size_t shard, uint64_t *fronts) {
    uint16_t *halves = calloc(PIECE, sizeof *halves);
    uint8_t *body = malloc(tagc_exponents_max_bytes(PIECE));
    size_t segment = (shard + PIECE - 1) / PIECE;
    segment = PIECE * ((segment + 7) / 8 < 4 ? 4 : (segment + 7) / 8);
    uint64_t n_all = 0;
    *fronts = 0;
    for (size_t first = 0; first < shard; first += segment) {
        size_t end = first + segment < shard ? first + segment : shard,
               n_pieces = (end - first + PIECE - 1) / PIECE;
        uint64_t n_bytes = 4 * n_pieces, most = n_bytes + tagc_exponents_max_bytes(end - first);
        for (size_t at = first; at < end; at += PIECE) {
            size_t n = end - at < PIECE ? end - at : PIECE;
            tagc_bf16_narrow(row + at, halves, n);
            n_bytes += tagc_exponents_encode(halves, n, body);
        }
        uint64_t front = n_bytes + n_bytes / 256 + 64;
        n_all += 64 + n_bytes;
        *fronts += 64 + (front < most ? front : most);
    }
    free(halves);
    free(body);
    return n_all;
}

/* Beside a gatherer of bf16, with the same values. In step 4 they are those of step 3 again. */
static void beside_body(rank_run *run) {
    view v;
    if (!open_view(run, &v)) return;
    tagc_gatherer_options options = v.t->options;
    tagc_gatherer *plain;
    size_t shard = v.t->shard, n_full = v.n * (options.full_format == TAGC_FORMAT_BF16 ? 2 : 4);
    options.n_elems = v.n;
    options.lossless = 0;
    if (!CHECK(run, tagc_gatherer_create(v.comm, &options, &plain) == TAGC_OK)) return;
    void *expected = calloc(1, n_full);
    float *own = v.masters + (size_t)run->rank * shard;
    for (int step = 0; step < N_STEPS; step++) {
        int of = step < 4 ? step : 3;
        uint64_t fronts, before = sent_bytes(&v);
        for (size_t i = 0; i < shard; i++) own[i] = value_of(of, run->rank, i);
        v.t->now[run->rank] = step;
        CHECK(run, begin_gatherer(v.gatherer, own, v.full) == TAGC_OK);
        CHECK(run, tagc_gatherer_end(v.gatherer) == TAGC_OK);
        uint64_t sent = sent_bytes(&v) - before, n_bytes = row_bytes(own, shard, &fronts),
                 n_sends = (uint64_t)run->world_size - 1;
        CHECK(run, begin_gatherer(plain, own, expected) == TAGC_OK);
        CHECK(run, tagc_gatherer_end(plain) == TAGC_OK);
        CHECK(run, memcmp(v.full, expected, n_full) == 0);
        if (step == 2) /* rests; a short last segment may be shorter than its front */
            CHECK(run, sent >= n_sends * n_bytes && sent <= n_sends * (n_bytes + 200));
        if (step == 4) CHECK(run, sent == n_sends * fronts);
    }
    tagc_gatherer_destroy(plain);
    free(expected);
    close_view(&v);
}

TEST(the_same_bits_as_bf16) {
    static const struct {
        int world_size;
        size_t shard;
    } cases[] = {{1, 700}, {2, SEGMENT + 5}, {3, 1}, {2, 33 * PIECE - 9}, {4, 5000}};
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++)
        for (int variant = 0; variant < 3; variant++) {
            if (cases[c].shard > 8 * PIECE && variant != (int)c % 3) continue;
            trial t = make_lossless(cases[c].shard, variant != 0, variant == 2);
            run_trial(&t, cases[c].world_size, beside_body);
        }
}

/* The shard lies in `full`. */
static void in_place_body(rank_run *run) {
    view v;
    if (!open_view(run, &v)) return;
    float *full = v.full;
    for (int step = 0; step < 3; step++) {
        for (size_t i = 0; i < v.t->shard; i++)
            full[(size_t)run->rank * v.t->shard + i] = value_of(step, run->rank, i);
        CHECK(run, begin_gatherer(v.gatherer, full + (size_t)run->rank * v.t->shard, full) == TAGC_OK);
        CHECK(run, tagc_gatherer_end(v.gatherer) == TAGC_OK);
        for (size_t i = 0; i < v.n; i++) {
            float value = value_of(step, (int)(i / v.t->shard), i % v.t->shard), back;
            uint16_t half;
            tagc_bf16_narrow(&value, &half, 1);
            tagc_bf16_widen(&half, &back, 1);
            if (!CHECK(run, bits_of(full[i]) == bits_of(back))) break;
        }
    }
    close_view(&v);
}

TEST(rows_in_place) {
    for (int has_lanes = 0; has_lanes < 2; has_lanes++) {
        trial t = make_lossless(SEGMENT + 5, has_lanes, 0);
        run_trial(&t, 2, in_place_body);
    }
}

/* Several at once, whose bodies grow beyond their fronts in the same round: fronts of the next, rests of the one before. */
static void many_body(rank_run *run) {
    enum { N_UNITS = 4, SHARD = 3000, N_ROUNDS = 6 };
    trial *t = run->shared;
    size_t n = SHARD * (size_t)run->world_size;
    tagc_gatherer *gatherers[N_UNITS];
    float *own = calloc(N_UNITS * SHARD, sizeof *own), *full = calloc(N_UNITS * n, sizeof *full);
    for (int u = 0; u < N_UNITS; u++) {
        tagc_gatherer_options options = t->options;
        options.n_elems = n;
        options.lossless = u != 2;
        CHECK(run, tagc_gatherer_create(run->comm, &options, &gatherers[u]) == TAGC_OK);
        if (run->failure[0]) return;
    }
    for (int round = 0; round < N_ROUNDS; round++) {
        for (int u = 0; u < N_UNITS; u++) {
            int step = (round + u + run->rank) % 3; /* ranks differ in which are long */
            for (size_t i = 0; i < SHARD; i++) own[(size_t)u * SHARD + i] = value_of(step, run->rank, i);
            CHECK(run, begin_gatherer(gatherers[u], own + u * SHARD, full + (size_t)u * n) == TAGC_OK);
        }
        for (int u = N_UNITS - 1; u >= 0; u--) CHECK(run, tagc_gatherer_end(gatherers[u]) == TAGC_OK);
        for (size_t k = 0; k < N_UNITS * n; k++) {
            int u = (int)(k / n), r = (int)(k % n / SHARD);
            float value = value_of((round + u + r) % 3, r, k % SHARD), back;
            uint16_t half;
            tagc_bf16_narrow(&value, &half, 1);
            tagc_bf16_widen(&half, &back, 1);
            if (!CHECK(run, bits_of(full[k]) == bits_of(back))) break;
        }
    }
    for (int u = 0; u < N_UNITS; u++) tagc_gatherer_destroy(gatherers[u]);
    free(own);
    free(full);
}

TEST(many_are_under_way) {
    trial t = make_lossless(3000, 1, 0);
    run_trial(&t, 4, many_body);
}

/* ---- what goes wrong ---- */

static void flip_in_body(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    uint64_t n_header = n_bytes > 64 ? 64 : 0; /* a rest has none */
    bytes[n_header + where % 200] ^= 1;
}

/* With a right checksum: ends of pieces, and a code. */
static void make_up(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    tagc_wire_header header;
    uint32_t end;
    uint8_t *body = bytes + TAGC_WIRE_HEADER_BYTES;
    if (n_bytes < 128 || tagc_wire_read(bytes, TAGC_WIRE_HEADER_BYTES, &header) != TAGC_OK) return;
    memcpy(&end, body, sizeof end);
    const uint32_t ends[] = {end - 1, end + 1, UINT32_MAX, 0,
                             end,     end,     INT32_MAX}; /* the last: a piece begins there */
    end = ends[where];
    memcpy(body, &end, sizeof end);
    if (where == 4) body[4] = 5; /* a width */
    if (where == 5) body[6]++;   /* escapes */
    header.body_sum = tagc_wire_sum(body, header.body_bytes);
    tagc_wire_write(&header, bytes);
}

/* Who gets a damaged body fails at once, all fail in the next gather, the one after it is well. */
static void damaged_body(rank_run *run) {
    view v;
    if (!open_view(run, &v)) return;
    trial *t = v.t;
    for (int step = 0; step < t->step + 4; step++) {
        char expected[64];
        for (size_t i = 0; i < v.n; i++)
            v.masters[i] =
                step == t->step && t->which ? float_of((uint32_t)mix(i)) : 1 + (float)(i % 100) + (float)step;
        if (step == t->step && t->which) /* no NaN */
            for (size_t i = 0; i < v.n; i++) v.masters[i] = isnan(v.masters[i]) ? 0 : v.masters[i];
        tagc_status status = keep_status(run, gather(&v, step));
        expect(&v, 1);
        if (step == t->step) {
            CHECK(run, status == (run->rank == t->to ? TAGC_ERR_CORRUPT : TAGC_OK));
            snprintf(expected, sizeof expected, "parameters from rank %d: %s", 10 + t->from,
                     t->damage == make_up ? "codes are damaged" : "the checksum is wrong");
            CHECK(run, run->rank != t->to || strcmp(run->text, expected) == 0);
        } else if (step == t->step + 1) {
            snprintf(expected, sizeof expected, "rank %d got damaged parameters in the gather", 10 + t->to);
            CHECK(run, status == TAGC_ERR_CORRUPT && strstr(run->text, expected));
        } else {
            CHECK(run, status == TAGC_OK && is_as_expected(&v));
        }
    }
    close_view(&v);
}

TEST(damage_is_told_to_all) {
    for (int variant = 0; variant < 11; variant++) {
        int world_size = 2 + variant % 2;
        trial t = make_lossless(variant == 6 ? PIECE + 100 : 2000, 0, variant % 3 == 0);
        t.step = variant % 3;
        t.to = variant % world_size;
        t.from = (t.to + 1) % world_size;
        t.damage = variant < 7 ? make_up : flip_in_body;
        t.where = variant < 7 ? (uint64_t)variant : mix((uint64_t)variant);
        t.which = variant >= 9; /* the rest */
        run_trial(&t, world_size, damaged_body);
        assert_int_equal(t.n_damaged, 1);
    }
}

/* Only its sender knows what a damaged header announces. */
static void spoil_header(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    tagc_wire_header header;
    if (where == 0) bytes[n_bytes > 64 ? 40 : 0] ^= 1;
    if (where == 0 || tagc_wire_read(bytes, TAGC_WIRE_HEADER_BYTES, &header) != TAGC_OK) return;
    if (where == 1) header.body_bytes = 3;
    if (where == 2) header.body_bytes = UINT64_C(1) << 40;
    if (where == 3) header.n_items++;
    if (where == 4) header.step++;
    if (where == 5) header.kind = TAGC_WIRE_FRAGMENT;
    tagc_wire_write(&header, bytes);
}

static void spoilt_body(rank_run *run) {
    view v;
    if (!open_view(run, &v)) return;
    for (size_t i = 0; i < v.n; i++) v.masters[i] = (float)i;
    CHECK(run, gather(&v, 0) == TAGC_OK);
    tagc_status status = gather(&v, 1);
    CHECK(run, status == (run->rank == v.t->to ? TAGC_ERR_CORRUPT : TAGC_OK));
    if (run->rank == v.t->to) {
        CHECK(run, strstr(tagc_last_error(), "header of parameters from rank 11: "));
        CHECK(run, begin_gatherer(v.gatherer, v.masters, v.full) != TAGC_OK ||
                       tagc_gatherer_end(v.gatherer) != TAGC_OK);
    }
    close_view(&v);
}

TEST(a_damaged_header_ends_it) {
    for (uint64_t where = 0; where < 6; where++) {
        trial t = make_lossless(2000, 0, 0);
        t.step = 1;
        t.from = 1;
        t.damage = spoil_header;
        t.where = where;
        run_trial(&t, 2, spoilt_body);
        assert_int_equal(t.n_damaged, 1);
    }
}
