/* Gathers in two levels: the same bits and the same errors as in one, each row across to a host once. */
#include "../lengths.h"
#include "gathers.h"
#include "transport/comm.h"

#include <time.h>

static const int worlds[][2] = {{4, 2}, {6, 2}, {6, 3}, {8, 2}, {8, 4}, {4, 4}, {4, 1}, {1, 1}};
#ifdef TAGC_SANITIZED
enum { N_WORLDS = sizeof worlds / sizeof worlds[0], STRIDE = 3, N_ROUNDS = 3 };
#else
enum { N_WORLDS = sizeof worlds / sizeof worlds[0], STRIDE = 1, N_ROUNDS = 12 };
#endif

static trial make_two(int wire, int has_lanes, int per_host) {
    trial t = make_trial(wire, has_lanes);
    t.options.ranks_per_host = per_host;
    return t;
}

static uint64_t message_bytes(const view *v, int whole, int checked) {
    uint64_t shard = v->t->shard, n_blocks = (shard + BLOCK - 1) / BLOCK;
    int wire = v->t->kind;
    if (wire == TAGC_GATHER_FP32) return 4 * shard;
    if (wire == TAGC_GATHER_BF16) return 2 * shard;
    uint64_t body = n_blocks * (2 + 32 * (uint64_t)bits_of_kind(wire));
    if (wire == TAGC_GATHER_INT8) return body;
    return 64 + (whole ? 2 * shard : body + (checked ? 8 * (uint64_t)v->n_rows : 0));
}

/* In which gather the sender is, to each other rank: of rows without a header. */
static uint64_t word_bytes(const view *v) {
    return v->t->kind == TAGC_GATHER_FP32 || v->t->kind == TAGC_GATHER_BF16 || v->t->kind == TAGC_GATHER_INT8
               ? 16
               : 0;
}

/* What the comm has sent to ranks of other hosts. */
static uint64_t sent_across(const view *v) {
    uint64_t sent[MAX_RANKS], sum = 0;
    int per_host = v->t->options.ranks_per_host;
    tagc_comm_sent_to(v->comm, sent);
    for (int r = 0; r < v->run->world_size; r++) sum += r / per_host != v->run->rank / per_host ? sent[r] : 0;
    return sum;
}

/* Whole, deltas with and without checksums, a reset: bits, bytes, bytes between hosts, and all of them planned. */
static void follow_body(rank_run *run) {
    view v;
    if (!open_view(run, &v)) return;
    tagc_gatherer_options options = v.t->options;
    options.n_elems = v.n;
    int per_host = options.ranks_per_host, n_hosts = run->world_size / per_host;
    tagc_volume planned;
    CHECK(run, tagc_gatherer_volume(&options, run->world_size, &planned) == TAGC_OK);
    for (int step = 0; step < v.t->n_steps; step++) {
        int is_delta = v.t->kind >= TAGC_GATHER_DELTA8, whole = is_delta && (step == 0 || step == 4);
        int checked = is_delta && !whole && step % 2 == 1;
        uint64_t before = sent_bytes(&v), across_before = v.t->n_across[run->rank];
        uint64_t sent_before = sent_across(&v);
        move_masters(&v, step);
        if (step == 4) {
            CHECK(run, tagc_gatherer_reset(v.gatherer) == TAGC_OK);
            for (size_t i = 0; i < v.n; i++) set_full(&v, i, (float)run->rank); /* whatever it was */
        }
        CHECK(run, gather(&v, step) == TAGC_OK);
        expect(&v, whole);
        CHECK(run, is_as_expected(&v));
        uint64_t n_bytes = message_bytes(&v, whole, checked), n_across = (uint64_t)n_hosts - 1;
        uint64_t n_due = (n_bytes + word_bytes(&v)) * (uint64_t)(run->world_size - 1);
        uint64_t n_due_across = n_across * (n_bytes + (uint64_t)per_host * word_bytes(&v));
        CHECK(run, sent_bytes(&v) - before == n_due);
        CHECK(run, sent_across(&v) - sent_before == n_due_across);
        if (!v.t->has_lanes) CHECK(run, v.t->n_across[run->rank] - across_before == n_due_across);
        if (whole || checked) continue;
        double sent = planned.n_bytes[TAGC_LEG_GATHER], within = planned.n_within_bytes[TAGC_LEG_GATHER];
        CHECK(run, sent == (double)n_due);
        CHECK(run, sent - within == (double)n_due_across);
    }
    close_view(&v);
}

static void all_hosts_follow(void **state) {
    (void)state;
    for (int wire = TAGC_GATHER_FP32; wire <= TAGC_GATHER_DELTA2; wire++)
        for (int w = 0; w < N_WORLDS; w++)
            for (int has_lanes = 0; has_lanes < 2; has_lanes++) {
                if ((wire + w + has_lanes) % STRIDE != 0 || wire == TAGC_GATHER_LOSSLESS) continue;
                trial t = make_two(wire, has_lanes, worlds[w][1]);
                t.shard = w == 2 ? 1 : w == 3 ? 256 : 700;
                t.options.check_every = t.options.delta ? 2 : 0;
                run_trial(&t, worlds[w][0], follow_body);
            }
}

/* ---- beside a gather in one level ---- */

/* The shard may lie in full where it is no delta. A sick master, and a replica that drifts. */
static void beside_body(rank_run *run) {
    view v;
    if (!open_view(run, &v)) return;
    tagc_gatherer_options options = v.t->options;
    int is_delta = v.t->kind >= TAGC_GATHER_DELTA8, sick = run->world_size - 1, culprit = 0;
    options.n_elems = v.n;
    options.ranks_per_host = 1;
    tagc_gatherer *one_level;
    if (!CHECK(run, tagc_gatherer_create(v.comm, &options, &one_level) == TAGC_OK)) return;
    int is_narrow = options.full_format == TAGC_FORMAT_BF16;
    view other = v; /* of the same trial, with a replica of its own */
    other.full = calloc(v.n, is_narrow ? sizeof(uint16_t) : sizeof(float));
    float *own = v.masters + (size_t)v.row * v.t->shard;
    for (int step = 0; step < 12; step++) {
        char text[512] = "";
        move_masters(&v, step);
        float healthy = own[0];
        if (run->rank == sick && (step == 3 || step == 4)) own[0] = step == 3 ? NAN : -INFINITY;
        if (run->rank == culprit && step == 8) {
            float last = full_at(&v, v.n - 1), spoiled = last == 0 ? 1 : -last;
            set_full(&v, v.n - 1, spoiled);
            set_full(&other, v.n - 1, spoiled);
        }
        int is_apart = is_delta || is_narrow;
        float *from = is_apart ? own : (float *)v.full + (size_t)v.row * v.t->shard;
        if (!is_apart) memcpy(from, own, v.t->shard * sizeof *from);
        CHECK(run, begin_gatherer(v.gatherer, from, v.full) == TAGC_OK);
        CHECK(run, begin_gatherer(one_level, own, other.full) == TAGC_OK);
        tagc_status expected = tagc_gatherer_end(one_level);
        if (expected != TAGC_OK) snprintf(text, sizeof text, "%s", tagc_last_error());
        tagc_status status = tagc_gatherer_end(v.gatherer);
        CHECK(run, status == expected && (status == TAGC_OK || strcmp(text, tagc_last_error()) == 0));
        /* every third gather is compared, and what differs is told by all */
        CHECK(run, (status == TAGC_ERR_CORRUPT) == (is_delta && step == 8));
        if (run->rank != culprit || step != 8)
            CHECK(run, memcmp(other.full, v.full, v.n * (is_narrow ? sizeof(uint16_t) : sizeof(float))) == 0);
        own[0] = healthy;
    }
    tagc_gatherer_destroy(one_level);
    free(other.full);
    close_view(&v);
}

static void both_levels_are_alike(void **state) {
    (void)state;
    for (int wire = TAGC_GATHER_FP32; wire <= TAGC_GATHER_DELTA2; wire++)
        for (int w = 0; w < 5; w++) {
            if ((wire + w) % STRIDE != 0) continue;
            trial t = make_two(wire, (wire + w) % 2, worlds[w][1]);
            t.options.check_every = t.options.delta ? 3 : 0;
            run_trial(&t, worlds[w][0], beside_body);
            if (!t.options.delta && wire != TAGC_GATHER_BF16) continue;
            t.options.full_format = TAGC_FORMAT_BF16;
            run_trial(&t, worlds[w][0], beside_body);
        }
}

/* ---- many at once ---- */

enum { N_UNITS = 4, UNIT_SHARD = 3000 };

static void dawdle(uint64_t seed) {
    uint64_t draw = mix(seed) % 8;
    if (draw < 4) nanosleep(&(struct timespec){.tv_nsec = (long)draw * 200000}, NULL);
}

/* Gathers in one and in two levels and a reducer, begun in one order and ended in any, at no rank's pace. */
static void many_body(rank_run *run) {
    trial *t = run->shared;
    seat place = {t, run->rank, run->world_size};
    size_t n_ranks = (size_t)run->world_size, n = n_ranks * UNIT_SHARD;
    tagc_comm *comm = run->comm;
    tagc_gatherer *gatherers[N_UNITS];
    tagc_reducer *reducer;
    tagc_reducer_options reduce;
    float *full = calloc(N_UNITS * n, sizeof *full), *own = calloc(N_UNITS * UNIT_SHARD, sizeof *own);
    float *gradient = calloc(n, sizeof *gradient), output[UNIT_SHARD];
    if (!t->has_lanes)
        CHECK(run, tagc_comm_create_callback(&trial_ops, &place, run->rank, run->world_size, named_ranks(),
                                             &comm) == TAGC_OK);
    for (int u = 0; u < N_UNITS; u++) {
        tagc_gatherer_options options = t->options;
        options.n_elems = n;
        options.format = u % 2 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
        if (u == 0) options.ranks_per_host = 1;
        CHECK(run, tagc_gatherer_create(comm, &options, &gatherers[u]) == TAGC_OK);
    }
    tagc_reducer_options_init(&reduce);
    reduce.n_elems = n;
    CHECK(run, tagc_reducer_create(comm, &reduce, &reducer) == TAGC_OK);
    for (int round = 0; round < N_ROUNDS; round++) {
        CHECK(run, begin_reducer(reducer, gradient, output) == TAGC_OK);
        for (int u = 0; u < N_UNITS; u++) {
            for (size_t i = 0; i < UNIT_SHARD; i++)
                own[u * UNIT_SHARD + (int)i] =
                    (float)((round * N_UNITS + u) % 7 + run->rank) + (float)(i % 16);
            dawdle((uint64_t)((round * N_UNITS + u) * run->world_size + run->rank));
            CHECK(run, begin_gatherer(gatherers[u], own + u * UNIT_SHARD, full + (size_t)u * n) == TAGC_OK);
        }
        for (int i = 0; i < N_UNITS; i++) {
            int u = (i * 3 + run->rank + round) % N_UNITS;
            CHECK(run, tagc_gatherer_end(gatherers[u]) == TAGC_OK);
            for (size_t k = 0; k < n; k++) {
                size_t r = k / UNIT_SHARD;
                float expected = (float)((round * N_UNITS + u) % 7 + (int)r) + (float)(k % UNIT_SHARD % 16);
                if (!CHECK(run, full[(size_t)u * n + k] == expected)) break;
            }
        }
        CHECK(run, tagc_reducer_end(reducer, NULL) == TAGC_OK);
    }
    for (int u = 0; u < N_UNITS; u++) { /* what is under way is waited for */
        CHECK(run, begin_gatherer(gatherers[u], own, full + (size_t)u * n) == TAGC_OK);
        tagc_gatherer_destroy(gatherers[u]);
    }
    tagc_reducer_destroy(reducer);
    if (!t->has_lanes) tagc_comm_destroy(comm);
    free(full);
    free(own);
    free(gradient);
}

static void many_are_under_way(void **state) {
    (void)state;
    for (int w = 0; w < 5; w++)
        for (int has_lanes = 0; has_lanes < 2; has_lanes++) {
            trial t = make_two(TAGC_GATHER_FP32, has_lanes, worlds[w][1]);
            run_trial(&t, worlds[w][0], many_body);
        }
}

/* ---- what goes wrong ---- */

static void flip_bit(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    bytes[where / 8 % n_bytes] ^= (uint8_t)(1 << where % 8);
}

/* A message from another host is damaged for all to whom it is relayed, one within a host for its receiver alone. They
 * fail at once, all fail in the next gather, the one after it is whole and well. */
static void hostile_body(rank_run *run) {
    view v;
    if (!open_view(run, &v)) return;
    trial *t = v.t;
    int per_host = t->options.ranks_per_host, to_host = t->to / per_host,
        is_across = t->from / per_host != to_host;
    int owner =
        t->which == 0 ? t->from : t->from % per_host + (to_host == 0 ? per_host : 0); /* relayed to `to` */
    int is_hit = run->rank == t->to || (is_across && run->rank / per_host == to_host);
    int first_hit = is_across ? to_host * per_host : t->to;
    for (int step = 0; step < t->step + 5; step++) {
        char expected[64];
        move_masters(&v, step);
        tagc_status status = keep_status(run, gather(&v, step));
        if (step == t->step) {
            CHECK(run, status == (is_hit ? TAGC_ERR_CORRUPT : TAGC_OK));
            snprintf(expected, sizeof expected, "parameters from rank %d: ", 10 + owner);
            if (is_hit) CHECK(run, strstr(run->text, expected));
        } else if (step == t->step + 1) {
            snprintf(expected, sizeof expected, "rank %d got damaged parameters", 10 + first_hit);
            CHECK(run, status == TAGC_ERR_CORRUPT && strstr(run->text, expected));
        } else {
            CHECK(run, status == TAGC_OK);
        }
        expect(&v, step == 0 || step == t->step + 2);
        if (step < t->step || step > t->step + 1) CHECK(run, is_as_expected(&v));
    }
    close_view(&v);
}

static void damage_is_told_to_all(void **state) {
    (void)state;
    for (int variant = 0; variant < 48; variant += STRIDE) {
        int w = variant % 5, per_host = worlds[w][1];
        trial t = make_two(TAGC_GATHER_DELTA8 + variant % 3, 0, per_host);
        int kind = variant / 5 % 3; /* across, within, relayed */
        t.options.check_every = variant % 4 == 3 ? 2 : 0;
        t.step = variant % 2 == 0 ? 0 : 3; /* in a whole one, or in a delta */
        t.to = variant % worlds[w][0];
        int within = t.to / per_host * per_host + (t.to + 1) % per_host;
        t.from = kind == 0 ? (t.to + per_host) % worlds[w][0] : within;
        t.which = kind == 2;
        t.damage = flip_bit;
        t.where = mix((uint64_t)variant);
        run_trial(&t, worlds[w][0], hostile_body);
        assert_int_equal(t.n_damaged, 1);
    }
}

/* One rank gives up where the others have begun: relays that wait for what never comes end as well. */
static void abandoned_body(rank_run *run) {
    view v;
    if (!open_view(run, &v)) return;
    CHECK(run, gather(&v, 0) == TAGC_OK);
    pthread_barrier_wait(&v.t->barrier); /* all ranks have left the first gather */
    if (run->rank == v.t->from) {
        dawdle((uint64_t)v.t->from);
        tagc_comm_abort(v.comm, "enough");
    } else {
        tagc_status status = begin_gatherer(v.gatherer, v.masters + (size_t)v.row * v.t->shard, v.full);
        if (status == TAGC_OK) status = tagc_gatherer_end(v.gatherer);
        CHECK(run, status == TAGC_ERR_TRANSPORT && strstr(tagc_last_error(), "gave up: enough"));
    }
    close_view(&v);
}

static void an_abort_ends_every_wait(void **state) {
    (void)state;
    for (int wire = TAGC_GATHER_FP32; wire <= TAGC_GATHER_DELTA2; wire += 2)
        for (int w = 0; w < 5; w++)
            for (int culprit = 0; culprit < worlds[w][0]; culprit += STRIDE + 2) {
                trial t = make_two(wire, 1, worlds[w][1]);
                t.from = culprit;
                run_trial(&t, worlds[w][0], abandoned_body);
            }
}

static void refused_body(rank_run *run) {
    static const struct {
        int within_host, ranks_per_host;
        uint64_t n_elems;
        const char *text;
    } cases[] = {{2, 2, 8, "within_host is 2, must be in [0, 1]"},
                 {-1, 2, 8, "within_host is -1"},
                 {0, 0, 8, "ranks_per_host is 0, must be in [1, 65536]"},
                 {0, 3, 8, "ranks_per_host is 3, must divide the world size 4"},
                 {0, 2, 6, "n_elems is 6, must be a multiple of 4, the number of ranks"},
                 {1, 2, 7, "n_elems is 7, must be a multiple of 2, the number of ranks of a host"}};
    tagc_gatherer_options options;
    tagc_gatherer *none;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tagc_gatherer_options_init(&options);
        CHECK(run, options.within_host == 0 && options.ranks_per_host == 1);
        options.within_host = cases[i].within_host;
        options.ranks_per_host = cases[i].ranks_per_host;
        options.n_elems = cases[i].n_elems;
        CHECK(run, tagc_gatherer_create(run->comm, &options, &none) == TAGC_ERR_ARGUMENT && none == NULL);
        CHECK(run, strstr(tagc_last_error(), cases[i].text));
    }
    tagc_gatherer_options_init(&options);
    options.n_elems = 8;
    options.ranks_per_host = 2;
    options.within_host = run->rank != 3;
    CHECK(run, tagc_gatherer_create(run->comm, &options, &none) == TAGC_ERR_MISMATCH);
    CHECK(run, strstr(tagc_last_error(), "within_host: rank 13 has 0, rank 10 has 1"));
}

static void misuse_is_refused(void **state) {
    (void)state;
    rank_run runs[MAX_RANKS];
    run_ranks(4, refused_body, NULL, NULL, runs);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_hosts_follow),   cmocka_unit_test(both_levels_are_alike),
        cmocka_unit_test(many_are_under_way), cmocka_unit_test(damage_is_told_to_all),
        cmocka_unit_test(misuse_is_refused),  cmocka_unit_test(an_abort_ends_every_wait),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
