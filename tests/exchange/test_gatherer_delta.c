/* Gathers in low-bit blocks: int8, and deltas on bf16 replicas. Every rank knows all masters and follows them with a
 * naive coder of its own: what it is given must be the same to the bit, at any number of ranks, step after step. Then what
 * goes wrong: replicas that drift, masters that are not finite, damaged and made-up messages. */
#include "../lengths.h"
#include "gathers.h"

/* ---- what goes well ---- */

/* Another gatherer goes on where this one was, as after a checkpoint. */
static void change_gatherer(rank_run *run, view *v, const tagc_gatherer_options *options) {
    int is_delta = options->delta;
    tagc_gatherer *next;
    uint64_t n_gathers = 99;
    const void *replica = tagc_gatherer_replica(v->gatherer, &n_gathers);
    CHECK(run, replica == (is_delta ? v->full : NULL) && n_gathers == (is_delta ? 4 : 0));
    CHECK(run, tagc_gatherer_create(v->comm, options, &next) == TAGC_OK);
    CHECK(run, tagc_gatherer_replica(next, NULL) == NULL);
    CHECK(run, tagc_gatherer_set_replica(next, v->full, v->n, 0) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_gatherer_set_replica(next, v->full, v->n, 4) == (is_delta ? TAGC_OK : TAGC_ERR_ARGUMENT));
    CHECK(run, tagc_gatherer_replica(next, &n_gathers) == replica);
    tagc_gatherer_destroy(v->gatherer);
    v->gatherer = next;
}

/* Whole, deltas, a reset, deltas, a new gatherer, deltas: bits and bytes, the planned ones too. */
static void follow_body(rank_run *run) {
    view v;
    if (!open_view(run, &v)) return;
    tagc_gatherer_options options = v.t->options;
    options.n_elems = v.n;
    tagc_volume planned;
    CHECK(run, tagc_gatherer_volume(&options, run->world_size, &planned) == TAGC_OK);
    size_t n_blocks = (v.t->shard + BLOCK - 1) / BLOCK;
    for (int step = 0; step < v.t->n_steps; step++) {
        int is_delta = v.t->kind != TAGC_GATHER_INT8, whole = is_delta && (step == 0 || step == 3);
        uint64_t before = sent_bytes(&v);
        move_masters(&v, step);
        if (step == 3) {
            CHECK(run, tagc_gatherer_reset(v.gatherer) == TAGC_OK);
            for (size_t i = 0; i < v.n; i++) set_full(&v, i, (float)run->rank); /* whatever it was */
        }
        if (step == 4) change_gatherer(run, &v, &options);
        CHECK(run, gather(&v, step) == TAGC_OK);
        expect(&v, whole);
        CHECK(run, is_as_expected(&v));
        uint64_t body = n_blocks * (2 + 32 * (uint64_t)bits_of_kind(v.t->kind));
        uint64_t bytes = (is_delta ? 64 : 16) + (whole ? 2 * v.t->shard : body);
        bytes *= (uint64_t)run->world_size - 1;
        CHECK(run, sent_bytes(&v) - before == bytes);
        if (!whole) CHECK(run, planned.n_bytes[TAGC_LEG_GATHER] == (double)bytes);
    }
    close_view(&v);
}

TEST(all_worlds_follow) {
    for (int wire = TAGC_GATHER_INT8; wire <= TAGC_GATHER_DELTA2; wire++)
        for (int world_size = 1; world_size <= 16; world_size += world_size < 5 ? 1 : 3) {
            trial t = make_trial(wire, wire % 2 || world_size > 4);
            t.shard = world_size == 2 ? 1 : world_size == 3 ? 256 : 700;
            run_trial(&t, world_size, follow_body);
            if (wire == TAGC_GATHER_INT8) continue;
            t.options.full_format = TAGC_FORMAT_BF16;
            run_trial(&t, world_size, follow_body);
        }
}

/* Two hundred deltas: the replica stays as near as one delta brings it, at the end as at the beginning. */
static void long_body(rank_run *run) {
    view v;
    if (!open_view(run, &v)) return;
    double early = 0, late = 0, steps = 0;
    for (int step = 0; step < v.t->n_steps; step++) {
        float before[MAX_SHARD], scale_share = bits_of_kind(v.t->kind) == 8 ? 1.0f / 128 : 0.625f;
        const float *own = v.masters + (size_t)run->rank * v.t->shard;
        const float *row = v.expected + (size_t)run->rank * v.t->shard;
        memcpy(before, row, v.t->shard * sizeof *before);
        move_masters(&v, step);
        CHECK(run, gather(&v, step) == TAGC_OK);
        expect(&v, step == 0);
        CHECK(run, is_as_expected(&v)); /* so `row` is what came */
        double error = 0;
        for (size_t at = 0; at < v.t->shard && step > 0; at += BLOCK) {
            size_t end = at + BLOCK < v.t->shard ? at + BLOCK : v.t->shard;
            float most = 0;
            for (size_t i = at; i < end; i++) most = fmaxf(most, fabsf(own[i] - before[i]));
            for (size_t i = at; i < end; i++) {
                CHECK(run, fabsf(own[i] - row[i]) <= most * scale_share * 1.01f + fabsf(row[i]) / 128);
                error += pow((double)(own[i] - row[i]), 2);
                steps += pow((double)step_of(step, run->rank, i), 2) / v.t->n_steps;
            }
        }
        if (step >= 100) *(step < 150 ? &early : &late) += error / 50;
    }
    CHECK(run, late < 1.25 * early && early < 1.25 * late);
    CHECK(run, late < steps);
    close_view(&v);
}

TEST(nothing_accumulates) {
    for (int wire = TAGC_GATHER_DELTA8; wire <= TAGC_GATHER_DELTA2; wire++) {
        trial t = make_trial(wire, wire % 2);
        t.options.full_format = wire == TAGC_GATHER_DELTA8 ? TAGC_FORMAT_FP32 : TAGC_FORMAT_BF16;
        t.n_steps = 200;
        run_trial(&t, 2, long_body);
    }
}

/* ---- what goes wrong ---- */

/* A bit flips in one rank's replica: told by all ranks at the next comparison, mended by the gather after it. */
static void flipped_body(rank_run *run) {
    view v;
    if (!open_view(run, &v)) return;
    int culprit = run->world_size - 1, row = run->world_size > 2 ? 1 : 0;
    for (int step = 0; step < 10; step++) { /* gathers 1, 2, ...; compared in 3, 6 and 9 */
        if (step == 3 && run->rank == culprit) {
            size_t at = (size_t)row * v.t->shard + 5;
            set_full(&v, at, full_at(&v, at) == 1 ? 2 : 1);
        }
        move_masters(&v, step);
        tagc_status status = keep_status(run, gather(&v, step));
        if (step != 5) {
            CHECK(run, status == TAGC_OK);
            expect(&v, step == 0 || step == 6);
            if (step < 3 || step > 5 || run->rank != culprit) CHECK(run, is_as_expected(&v));
            continue;
        }
        expect(&v, 0);
        char expected[64];
        snprintf(expected, sizeof expected, "row %d is", row);
        CHECK(run, status == TAGC_ERR_CORRUPT && strstr(run->text, expected));
        snprintf(expected, sizeof expected, "on rank %d", 10 + culprit);
        CHECK(run, strstr(run->text, expected));
    }
    close_view(&v);
}

TEST(a_flipped_bit_is_found) {
    for (int world_size = 2; world_size <= 5; world_size++) {
        trial t = make_trial(TAGC_GATHER_DELTA4, world_size % 2);
        t.options.full_format = world_size < 4 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
        t.options.check_every = 3;
        run_trial(&t, world_size, flipped_body);
    }
}

/* NaN or Inf in one master: its row is NaN on every rank, the next gather is whole; when the master is well, so are they. */
static void nonfinite_body(rank_run *run) {
    view v;
    if (!open_view(run, &v)) return;
    int sick = run->world_size - 1;
    size_t shard = v.t->shard, at = (size_t)sick * shard + 300;
    for (int step = 0; step < 7; step++) {
        move_masters(&v, step);
        float healthy = v.masters[at];
        if (step == 2 || step == 3) v.masters[at] = step == 2 ? NAN : INFINITY;
        CHECK(run, gather(&v, step) == TAGC_OK);
        expect(&v, step == 0 || step == 3 || step == 4);
        for (int r = 0; r < run->world_size; r++) {
            size_t first = (size_t)r * shard;
            if (r != sick || step < 2 || step > 3) CHECK(run, row_is_as_expected(&v, r));
            if (r == sick && step == 2)
                for (size_t i = first; i < first + shard; i++) CHECK(run, isnan(full_at(&v, i)));
            if (r == sick && step == 3)
                CHECK(run, isinf(full_at(&v, first + 300)) && isfinite(full_at(&v, first)));
        }
        v.masters[at] = healthy;
    }
    close_view(&v);
}

TEST(a_sick_master_is_seen_and_heals) {
    for (int variant = 0; variant < 6; variant++) {
        int world_size = 1 + variant % 3;
        trial t = make_trial(TAGC_GATHER_DELTA4 + world_size % 2, world_size % 2);
        t.options.full_format = variant < 3 ? TAGC_FORMAT_FP32 : TAGC_FORMAT_BF16;
        run_trial(&t, world_size, nonfinite_body);
    }
}

static void flip_bit(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    bytes[where / 8 % n_bytes] ^= (uint8_t)(1 << where % 8);
}

/* Well-formed, with a scale that no encoder writes. */
static void poison_scale(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    tagc_wire_header header;
    uint16_t scale = where % 2 ? 0x7f80 : 0xffc1;
    if (tagc_wire_read(bytes, n_bytes, &header) != TAGC_OK) return;
    memcpy(bytes + TAGC_WIRE_HEADER_BYTES + 8 * header.n_items + 2, &scale, sizeof scale);
    tagc_wire_write(&header, bytes);
}

static void pretend(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    tagc_wire_header header;
    if (tagc_wire_read(bytes, n_bytes, &header) != TAGC_OK) return;
    if (where % 5 == 0) header.rank ^= 1;
    if (where % 5 == 1) header.coding ^= 1;
    if (where % 5 == 2) header.step++;
    if (where % 5 == 3) header.n_items += 3;
    if (where % 5 == 4) header.n_elems++;
    tagc_wire_write(&header, bytes);
}

/* Who gets it fails at once, all fail in the next gather, the one after it is whole and well. */
static void hostile_body(rank_run *run) {
    view v;
    if (!open_view(run, &v)) return;
    trial *t = v.t;
    for (int step = 0; step < t->step + 5; step++) {
        move_masters(&v, step);
        tagc_status status = keep_status(run, gather(&v, step));
        if (step == t->step) {
            CHECK(run, status == (run->rank == t->to ? TAGC_ERR_CORRUPT : TAGC_OK));
            char expected[64];
            snprintf(expected, sizeof expected, "parameters from rank %d: ", 10 + t->from);
            if (run->rank == t->to) CHECK(run, strstr(run->text, expected));
        } else if (step == t->step + 1) {
            char expected[64];
            snprintf(expected, sizeof expected, "rank %d got damaged parameters", 10 + t->to);
            CHECK(run, status == TAGC_ERR_CORRUPT && strstr(run->text, expected));
        } else {
            CHECK(run, status == TAGC_OK);
        }
        if (step <= t->step + 1)
            expect(&v, step == 0);
        else
            expect(&v, step == t->step + 2);
        if (step < t->step || step > t->step + 1) CHECK(run, is_as_expected(&v));
    }
    close_view(&v);
}

TEST(damage_is_told_to_all) {
    for (int variant = 0; variant < 60; variant++) {
        int world_size = 2 + variant % 3;
        trial t = make_trial(TAGC_GATHER_DELTA8 + variant % 3, 0);
        t.options.check_every = variant % 4 == 3 ? 2 : 0;
        t.options.full_format = variant / 2 % 2 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
        t.step = variant % 10 == 0 ? 0 : 3; /* in a whole one, or in a delta */
        t.to = variant % world_size;
        t.from = (t.to + 1) % world_size;
        t.damage = variant % 3 == 0 ? flip_bit : variant % 3 == 1 && t.step ? poison_scale : pretend;
        t.where = t.damage == flip_bit ? mix((uint64_t)variant) : (uint64_t)variant / 3;
        run_trial(&t, world_size, hostile_body);
        assert_int_equal(t.n_damaged, 1);
    }
}

/* The damaged message was the one that made the next gather whole: who got it cannot know, lengths differ, and that is the
 * end of the comm, for all. */
static void hidden_body(rank_run *run) {
    view v;
    if (!open_view(run, &v)) return;
    trial *t = v.t;
    for (int step = 0; step < 5; step++) {
        move_masters(&v, step);
        if (step == t->step && run->rank == t->from) v.masters[(size_t)run->rank * t->shard] = NAN;
        tagc_status status = gather(&v, step);
        if (step < t->step) CHECK(run, status == TAGC_OK);
        if (step == t->step) CHECK(run, status == (run->rank == t->to ? TAGC_ERR_CORRUPT : TAGC_OK));
        if (step > t->step) CHECK(run, status != TAGC_OK);
    }
    close_view(&v);
}

TEST(damage_that_hides_a_whole_gather_ends_it) {
    for (int world_size = 2; world_size <= 4; world_size++) {
        trial t = make_trial(TAGC_GATHER_DELTA4, 0);
        t.step = 2;
        t.to = 1;
        t.damage = flip_bit;
        run_trial(&t, world_size, hidden_body);
        assert_int_equal(t.n_damaged, 1);
    }
}

static void refused_body(rank_run *run) {
    view v;
    if (!open_view(run, &v)) return;
    size_t shard = v.t->shard;
    const float *own = v.masters + (size_t)run->rank * shard;
    CHECK(run, tagc_gatherer_reset(NULL) == TAGC_ERR_ARGUMENT);
    const float *last = (const float *)v.full + v.n - (v.t->options.full_format ? v.n / 2 : 0) - 1;
    CHECK(run, begin_gatherer(v.gatherer, last, v.full) == TAGC_ERR_ARGUMENT);
    CHECK(run, strstr(tagc_last_error(), "shard lies in full"));
    CHECK(run, gather(&v, 0) == TAGC_OK);
    CHECK(run, begin_gatherer(v.gatherer, own, v.expected) == TAGC_ERR_ARGUMENT);
    CHECK(run, strstr(tagc_last_error(), "tagc_gatherer_reset"));
    CHECK(run, begin_gatherer(v.gatherer, own, v.full) == TAGC_OK);
    CHECK(run, tagc_gatherer_reset(v.gatherer) == TAGC_ERR_STATE);
    CHECK(run, tagc_gatherer_set_replica(v.gatherer, v.full, v.n, 1) == TAGC_ERR_STATE);
    CHECK(run, tagc_gatherer_replica(v.gatherer, NULL) == NULL);
    CHECK(run, tagc_gatherer_end(v.gatherer) == TAGC_OK);
    CHECK(run, tagc_gatherer_reset(v.gatherer) == TAGC_OK);
    CHECK(run, begin_gatherer(v.gatherer, own, v.expected) == TAGC_OK);
    CHECK(run, tagc_gatherer_end(v.gatherer) == TAGC_OK);
    tagc_gatherer_options bad = v.t->options;
    tagc_gatherer *none;
    bad.n_elems = v.n + 1;
    CHECK(run, tagc_gatherer_create(v.comm, &bad, &none) == TAGC_ERR_ARGUMENT);
    CHECK(run, strstr(tagc_last_error(), "must be a multiple of 4, the number of ranks"));
    close_view(&v);
}

TEST(misuse_is_refused) {
    trial t = make_trial(TAGC_GATHER_DELTA4, 1);
    run_trial(&t, 4, refused_body);
    t.options.full_format = TAGC_FORMAT_BF16;
    run_trial(&t, 4, refused_body);
}
