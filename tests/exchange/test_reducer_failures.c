/* Damaged messages and dying ranks: the same failure on all ranks, residuals as before, and never a hang. */
#include "../lengths.h"
#include "codec/bitmap.h"
#include "exchange/wire.h"
#include "network.h"
#include "whole.h"

#include <time.h>

/* Calls of one step over this transport, which has no lanes: indices, unions, agreement, values, and for the sketch a
 * second agreement. Before them: the create's gather and the first step. */
static int first_call_of_second_step(int exchange) {
    return 1 + 4 + (exchange == TAGC_EXCHANGE_SKETCH);
}

static void assert_same_failure(const trial *t, int world_size, tagc_status status, const char *what) {
    for (int r = 0; r < world_size; r++)
        if (t->statuses[r] != status)
            fail_msg("%s: rank %d has %s (%s)", what, r, tagc_status_name(t->statuses[r]), t->texts[r]);
}

TEST(test_damaged_index) {
    for (int variant = 0; variant < 48; variant++) {
        int world_size = 2 + variant % 3, exchange = 1 + variant / 3 % 2, index = variant / 6 % 3;
        trial t = make_trial(world_size, exchange, index);
        int is_union = variant / 3 % 2;
        t.net.to = variant % world_size;
        t.net.call = first_call_of_second_step(exchange) + is_union;
        t.net.from = (t.net.to + world_size - 1) % world_size;
        t.net.damage = flip_bit;
        t.net.where = variant % 2 ? mix((uint64_t)variant) : mix((uint64_t)variant) % 512; /* body, header */
        run_trial(&t, world_size);
        assert_int_equal(t.net.n_damaged, 1);
        assert_same_failure(&t, world_size, TAGC_ERR_CORRUPT, is_union ? "union" : "index");
    }
}

/* Plain values carry no check; the sketch notices that its cells do not come out empty. All ranks agree
 * anyway. */
TEST(test_damaged_values) {
    for (int variant = 0; variant < 12; variant++) {
        int world_size = 2 + variant % 3, exchange = 1 + variant / 3 % 2;
        trial t = make_trial(world_size, exchange, TAGC_INDEX_OR);
        t.net.to = variant % world_size;
        t.net.call = first_call_of_second_step(exchange) + 3;
        t.net.from = (t.net.to + world_size - 1) % world_size;
        t.net.damage = flip_bit;
        t.net.where = mix((uint64_t)variant);
        run_trial(&t, world_size);
        assert_int_equal(t.net.n_damaged, 1);
        assert_same_failure(&t, world_size, exchange == TAGC_EXCHANGE_SKETCH ? TAGC_ERR_CORRUPT : TAGC_OK,
                            "values");
    }
}

/* Without an agreement there is nothing left to agree with: the rank that sees it says why, the others do not
 * hang. */
TEST(test_damaged_agreement) {
    trial t = make_trial(2, TAGC_EXCHANGE_PACKED, TAGC_INDEX_OR);
    t.net.to = 0;
    t.net.from = 1;
    t.net.call = first_call_of_second_step(TAGC_EXCHANGE_PACKED) + 2;
    t.net.damage = flip_bit;
    t.net.where = 77;
    run_trial(&t, 2);
    assert_int_equal(t.net.n_damaged, 1);
    assert_int_equal(t.statuses[0], TAGC_ERR_CORRUPT);
    assert_int_equal(t.is_broken[0], 1);
    assert_non_null(strstr(t.texts[0], "agreement from rank 11 arrived damaged: "));
    assert_int_equal(t.statuses[1], TAGC_ERR_TRANSPORT);
}

/* More leftovers than there are elements: so many positions would follow. */
static void too_many_leftovers(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    (void)where;
    tagc_wire_header header;
    if (tagc_wire_read(bytes, n_bytes, &header) != TAGC_OK || header.kind != TAGC_WIRE_AGREE) return;
    header.n_items = UINT32_MAX;
    tagc_wire_write(&header, bytes);
}

TEST(test_lying_agreement) {
    trial t = make_trial(2, TAGC_EXCHANGE_SKETCH, TAGC_INDEX_OR);
    t.net.from = 1;
    t.net.call = 2 * first_call_of_second_step(TAGC_EXCHANGE_SKETCH) - 2; /* the step's last */
    t.net.damage = too_many_leftovers;
    run_trial(&t, 2);
    assert_int_equal(t.net.n_damaged, 1);
    assert_int_equal(t.statuses[0], TAGC_ERR_CORRUPT);
    assert_int_equal(t.is_broken[0], 1);
    assert_non_null(strstr(t.texts[0], "4294967295 leftovers of"));
}

/* One rank's index, union or agreement names another unit than the one that it is in. */
static void other_unit(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    (void)where;
    tagc_wire_header header;
    if (tagc_wire_read(bytes, n_bytes, &header) != TAGC_OK) return;
    header.unit++;
    tagc_wire_write(&header, bytes);
}

TEST(test_hostile_unit) {
    for (int variant = 0; variant < 9; variant++) {
        int world_size = 2 + variant % 3, message = variant / 3; /* index, union, agreement */
        trial t = make_trial(world_size, TAGC_EXCHANGE_PACKED, TAGC_INDEX_OR);
        t.net.to = variant % world_size;
        t.net.from = (t.net.to + 1) % world_size;
        t.net.call = first_call_of_second_step(TAGC_EXCHANGE_PACKED) + message;
        t.net.damage = other_unit;
        run_trial(&t, world_size);
        assert_int_equal(t.net.n_damaged, 1);
        assert_int_equal(t.statuses[t.net.to], TAGC_ERR_MISMATCH);
        if (message < 2) assert_same_failure(&t, world_size, TAGC_ERR_MISMATCH, "another unit");
        if (message < 2) continue;
        assert_non_null(strstr(t.texts[t.net.to],
                               "exchanges a unit that this rank does not have, this rank \"reducer 1\""));
    }
}

/* A liar: one kept element moved, header and checksum to match. Only the sketch's emptiness can tell. */
static void move_element(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    tagc_wire_header header;
    uint8_t *bits = bytes + TAGC_WIRE_HEADER_BYTES;
    if (tagc_wire_read(bytes, n_bytes, &header) != TAGC_OK) return;
    uint64_t at = where % 2048, to = where % 2048;
    while (!(bits[at / 8] >> at % 8 & 1)) at = (at + 1) % 2048;
    while (bits[to / 8] >> to % 8 & 1) to = (to + 1) % 2048;
    bits[at / 8] ^= (uint8_t)(1 << at % 8);
    bits[to / 8] ^= (uint8_t)(1 << to % 8);
    tagc_wire_write(&header, bytes);
}

TEST(test_wrong_index) {
    for (int variant = 0; variant < 10; variant++) {
        trial t = make_trial(2, TAGC_EXCHANGE_SKETCH, TAGC_INDEX_OR);
        t.net.to = variant % 2;
        t.net.from = 1 - t.net.to;
        t.net.call = first_call_of_second_step(TAGC_EXCHANGE_SKETCH);
        t.net.damage = move_element;
        t.net.where = mix((uint64_t)variant);
        run_trial(&t, 2);
        assert_int_equal(t.net.n_damaged, 1);
        /* harmless where the other rank keeps the element, too */
        assert_true(t.statuses[0] == t.statuses[1]);
        assert_true(t.statuses[0] == TAGC_ERR_CORRUPT || t.statuses[0] == TAGC_OK);
        if (variant == 0) assert_int_equal(t.statuses[0], TAGC_ERR_CORRUPT);
    }
}

/* An index with more elements than the sparsity allows would overrun the union's buffers. */
static void set_all(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    (void)where;
    tagc_wire_header header;
    if (tagc_wire_read(bytes, n_bytes, &header) != TAGC_OK) return;
    memset(bytes + TAGC_WIRE_HEADER_BYTES, 0xff, n_bytes - TAGC_WIRE_HEADER_BYTES);
    header.n_items = 2048;
    tagc_wire_write(&header, bytes);
}

TEST(test_oversized_index) {
    for (int variant = 0; variant < 6; variant++) {
        trial t = make_trial(2, 1 + variant % 2, variant / 2);
        t.net.from = 1;
        t.net.call = first_call_of_second_step(t.options.exchange);
        t.net.damage = set_all;
        run_trial(&t, 2);
        assert_same_failure(&t, 2, TAGC_ERR_CORRUPT, "oversized index");
    }
}

/* Positions of leftovers say where the others read and write: outside the shard, outside the union, twice, or damaged on
 * the way. */
static void other_position(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    tagc_wire_header header;
    uint32_t positions[2048];
    if (tagc_wire_read(bytes, n_bytes, &header) != TAGC_OK || header.kind != TAGC_WIRE_LEFTOVER) return;
    memcpy(positions, bytes + TAGC_WIRE_HEADER_BYTES, header.body_bytes);
    if (where == 0) positions[header.n_items - 1] = UINT32_MAX;
    if (where == 1) positions[header.n_items - 1] = 2048;
    if (where == 2) positions[1] = positions[0];
    if (where == 3) positions[0] = positions[0] ? positions[0] - 1 : 1; /* few elements have a neighbour */
    memcpy(bytes + TAGC_WIRE_HEADER_BYTES, positions, header.body_bytes);
    tagc_wire_write(&header, bytes);
}

TEST(test_leftovers) {
    for (int variant = 0; variant < 20; variant++) {
        int world_size = 2 + variant % 2, is_packed = variant / 2 % 2, lie = variant / 4;
        trial t = make_trial(world_size, TAGC_EXCHANGE_SKETCH, TAGC_INDEX_OR);
        t.paper.ratio = 20; /* hopeless */
        t.paper.unpeeled = is_packed ? TAGC_UNPEELED_PACKED : TAGC_UNPEELED_RESIDUAL;
        /* behind it: positions, values if at all, agreement */
        int n_plain = first_call_of_second_step(TAGC_EXCHANGE_SKETCH) - 1;
        t.net.call = 1 + n_plain + 2 + is_packed + n_plain;
        t.net.to = variant % world_size;
        t.net.from = (t.net.to + 1) % world_size;
        t.net.damage = lie < 4 ? other_position : flip_bit;
        t.net.where = lie < 4 ? (uint64_t)lie : mix((uint64_t)variant);
        run_trial(&t, world_size);
        assert_int_equal(t.net.n_damaged, 1);
        assert_same_failure(&t, world_size, TAGC_ERR_CORRUPT, "leftovers");
        char expected[32];
        snprintf(expected, sizeof expected, "leftovers from rank %d", 10 + t.net.from);
        assert_non_null(strstr(t.texts[t.net.to], expected));
    }
}

/* ---- a rank that gives up ---- */

static void give_up_body(rank_run *run) {
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = 30000 * (uint64_t)run->world_size;
    set_exchange(&options, *(int *)run->shared);
    size_t n = (size_t)options.n_elems;
    float *gradient = calloc(n, sizeof *gradient), *output = calloc(n, sizeof *output);
    for (size_t i = 0; i < n; i++) gradient[i] = random_gradient(1, run->rank, i);
    tagc_reducer *reducer;
    if (CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) {
        CHECK(run, run_reducer(reducer, gradient, output, NULL) == TAGC_OK);
        if (run->rank == 1) {
            nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL);
            tagc_comm_abort(run->comm, "enough");
        }
        keep_status(run, run_reducer(reducer, gradient, output, NULL));
        tagc_reducer_destroy(reducer);
    }
    free(gradient);
    free(output);
}

TEST(test_rank_gives_up) {
    for (int exchange = WHOLE; exchange <= TAGC_EXCHANGE_DIRECT; exchange++) {
        rank_run runs[MAX_RANKS];
        double start_s = tagc_time_s();
        run_ranks_with(3, give_up_body, &exchange, NULL, runs);
        /* The abort ends the wait, not the time-out of 120 s. A busy machine may take seconds. */
        assert_true(tagc_time_s() - start_s < 60);
        for (int r = 0; r < 3; r++) assert_int_equal(runs[r].status, TAGC_ERR_TRANSPORT);
        assert_non_null(strstr(runs[0].text, "enough"));
    }
}
