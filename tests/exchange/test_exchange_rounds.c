/* Latencies that a step takes one after the other, counted; steps under way together, of which one fails; and hostile bytes
 * in messages that bring a header and a body. */
#include "../lengths.h"
#include "../repeats.h"
#include "ranks.h"
#include "rounds.h"
#include "whole.h"

#include <math.h>

enum { N_MOST_UNITS = 16, LANE_HEADERS = 0 };

typedef struct unit {
    tagc_reducer *reducer;
    float *gradient, *output;
    tagc_status status;
    char text[TAGC_ERROR_TEXT_BYTES];
} unit;

static unit make_unit(rounds *net, const tagc_reducer_options *options, uint64_t seed) {
    unit u = {0};
    size_t n = (size_t)options->n_elems;
    u.gradient = malloc(n * sizeof *u.gradient);
    u.output = calloc(n, sizeof *u.output);
    for (size_t i = 0; i < n; i++) u.gradient[i] = random_gradient(seed, 0, i);
    assert_int_equal(tagc_reducer_create(net->comm, options, &u.reducer), TAGC_OK);
    return u;
}

static void destroy_unit(unit *u) {
    tagc_reducer_destroy(u->reducer);
    free(u->gradient);
    free(u->output);
}

/* Steps begun together; returns the rounds they took. */
static int run_units(rounds *net, unit *units, int n_units) {
    __atomic_store_n(&net->is_held, 1, __ATOMIC_RELEASE);
    int before = net->round;
    for (int u = 0; u < n_units; u++)
        assert_int_equal(begin_reducer(units[u].reducer, units[u].gradient, units[u].output), TAGC_OK);
    __atomic_store_n(&net->is_held, 0, __ATOMIC_RELEASE);
    for (int u = 0; u < n_units; u++) {
        units[u].status = tagc_reducer_end(units[u].reducer, NULL);
        snprintf(units[u].text, sizeof units[u].text, "%s", units[u].status ? tagc_last_error() : "");
    }
    return net->round - before;
}

static tagc_reducer_options options_of(int exchange, int world_size, uint64_t shard) {
    tagc_reducer_options o;
    tagc_reducer_options_init(&o);
    set_exchange(&o, exchange);
    if (exchange == TAGC_EXCHANGE_DIRECT) o.sparsity = 0.95;
    o.n_elems = shard * (uint64_t)world_size;
    return o;
}

/* ---- how many ---- */

static void count(const tagc_reducer_options *options, int world_size, int n_units, int due) {
    rounds net;
    unit units[N_MOST_UNITS];
    rounds_create(&net, world_size);
    for (int u = 0; u < n_units; u++) units[u] = make_unit(&net, options, (uint64_t)u);
    for (int step = 0; step < 2; step++) {
        int n = run_units(&net, units, n_units);
        for (int u = 0; u < n_units; u++)
            if (units[u].status != TAGC_OK) fail_msg("unit %d: %s", u, units[u].text);
        if (n != due)
            fail_msg("exchange %d, output %d, W %d, %d units of %llu: %d rounds, not %d", options->exchange,
                     options->output, world_size, n_units, (unsigned long long)options->n_elems, n, due);
    }
    for (int u = 0; u < n_units; u++) destroy_unit(&units[u]);
    tagc_comm_destroy(net.comm);
}

/* Whatever the number of ranks. */
TEST(test_rounds_of_a_step) {
    static const int worlds[] = {2, 3, 8, 64, 200};
    for (int w = 0; w < REPEATS(5, 5, 3); w++) {
        int W = worlds[w];
        tagc_reducer_options o = options_of(WHOLE, W, 512);
        count(&o, W, 1, 2);
        o.output = TAGC_OUTPUT_UNIT;
        count(&o, W, 1, 2); /* the agreement goes beside the sums */
        o = options_of(TAGC_EXCHANGE_PACKED, W, 512);
        o.sparsity = 0.9;
        count(&o, W, 1, 4);
        o.output = TAGC_OUTPUT_UNIT;
        count(&o, W, 1, 5);
        o = options_of(TAGC_EXCHANGE_SKETCH, W, 512);
        count(&o, W, 1, 5);
        o = options_of(TAGC_EXCHANGE_DIRECT, W, 512);
        count(&o, W, 1, 2);
        o.sparsity = 0;
        o.output = TAGC_OUTPUT_UNIT;
        count(&o, W, 1, 3);
        o = options_of(TAGC_EXCHANGE_DIRECT, W,
                       W > 8 ? 20000 : 600000); /* too large for one message of all */
        count(&o, W, 1, 3);
    }
}

/* Units share their latencies. A sketch alone keeps the last round to itself, until it knows of leftovers. */
TEST(test_rounds_of_many_units) {
    for (int n_units = 1; n_units <= 16; n_units += 5) {
        tagc_reducer_options o = options_of(WHOLE, 8, 512);
        count(&o, 8, n_units, 2);
        o = options_of(TAGC_EXCHANGE_DIRECT, 8, 512);
        count(&o, 8, n_units, 2);
        o = options_of(TAGC_EXCHANGE_PACKED, 8, 512);
        count(&o, 8, n_units, 4);
        o = options_of(TAGC_EXCHANGE_SKETCH, 8, 512);
        count(&o, 8, n_units, 4 + n_units);
        o = options_of(WHOLE, 8, 512);
        o.output = TAGC_OUTPUT_UNIT;
        count(&o, 8, n_units, 2);
        o = options_of(TAGC_EXCHANGE_DIRECT, 8, 512);
        o.output = TAGC_OUTPUT_UNIT;
        o.sparsity = 0.9;
        count(&o, 8, n_units, 3);
        o = options_of(TAGC_EXCHANGE_DIRECT, 2, 600000); /* bodies and sums in two messages each */
        o.output = TAGC_OUTPUT_UNIT;
        o.sparsity = 0.9;
        if (n_units <= 6) count(&o, 2, n_units, 5);
    }
}

/* A body that does not fit behind its header takes one more, once; after a change of sparsity nearly all do. */
TEST(test_rounds_after_a_change) {
    rounds net;
    rounds_create(&net, 8);
    tagc_reducer_options o = options_of(TAGC_EXCHANGE_DIRECT, 8, 512);
    unit u = make_unit(&net, &o, 1);
    static const double sparsities[] = {0.95, 0.5, 0.5, 0.95, 0.95};
    static const int due[] = {2, 3, 2, 2, 2};
    for (int i = 0; i < 5; i++) {
        assert_int_equal(tagc_reducer_set_sparsity(u.reducer, sparsities[i]), TAGC_OK);
        assert_int_equal(run_units(&net, &u, 1), due[i]);
        assert_int_equal(u.status, TAGC_OK);
    }
    destroy_unit(&u);
    tagc_comm_destroy(net.comm);
}

/* Positions that stand together in some places and far apart in others make bodies longer than independent ones would. Ranks
 * learn that from one step, and the next ones take no more rounds than others. */
TEST(test_rounds_of_long_bodies) {
    for (int output = 0; output < 2; output++) {
        rounds net;
        rounds_create(&net, 8);
        tagc_reducer_options o = options_of(TAGC_EXCHANGE_DIRECT, 8, 4096);
        o.output = output;
        if (output) o.result.sparsity = 0.92; /* so few that their positions make them long */
        unit u = make_unit(&net, &o, 1);
        for (size_t i = 0; i < o.n_elems; i++)
            u.gradient[i] = (i % 512 < 32 || i % 64 == 0 ? 1000.0f : 1.0f) * random_gradient(1, 0, i);
        for (int step = 0; step < 4; step++) {
            assert_int_equal(run_units(&net, &u, 1), (output ? 3 : 2) + (step == 0) * (1 + output));
            assert_int_equal(u.status, TAGC_OK);
        }
        destroy_unit(&u);
        tagc_comm_destroy(net.comm);
    }
}

/* ---- what is damaged ---- */

/* The residual and the output of one step more, of several units of which one is damaged. */
typedef struct outcome {
    float *residuals[N_MOST_UNITS], *outputs[N_MOST_UNITS];
    unit units[N_MOST_UNITS];
} outcome;

static void damaged_step(rounds *net, outcome *out, const tagc_reducer_options *options, int n_units,
                         rounds_damage damage) {
    for (int u = 0; u < n_units; u++) out->units[u] = make_unit(net, &options[u], (uint64_t)u);
    run_units(net, out->units, n_units);
    for (int lane = 0; lane < TAGC_N_LANES; lane++) net->n_transfers[lane] = 0;
    net->damage = damage;
    run_units(net, out->units, n_units);
    net->damage = NULL;
    for (int u = 0; u < n_units; u++) {
        out->residuals[u] = copy_of_residual(out->units[u].reducer, NULL);
        out->outputs[u] = malloc(options[u].n_elems * sizeof(float));
        memcpy(out->outputs[u], out->units[u].output, options[u].n_elems * sizeof(float));
    }
}

static void destroy_outcome(outcome *o, int n_units) {
    for (int u = 0; u < n_units; u++) {
        destroy_unit(&o->units[u]);
        free(o->residuals[u]);
        free(o->outputs[u]);
    }
}

static int is_due(const rounds *net, int lane, int n) {
    return lane == net->lane && n == net->turn;
}

/* One bit of what comes from rank 2. */
static void flip(rounds *net, int lane, int n, int from, uint8_t *bytes, uint64_t n_bytes) {
    if (!is_due(net, lane, n) || from != 2) return;
    net->at = net->where / 8 % n_bytes;
    bytes[net->at] ^= (uint8_t)(1 << net->where % 8);
    net->n_damaged++;
}

static tagc_wire_header lie_of(uint8_t *bytes) {
    tagc_wire_header header;
    assert_int_equal(tagc_wire_read(bytes, TAGC_WIRE_HEADER_BYTES, &header), TAGC_OK);
    return header;
}

static void no_body(rounds *net, int lane, int n, int from, uint8_t *bytes, uint64_t n_bytes) {
    (void)n_bytes;
    if (!is_due(net, lane, n) || from != 2) return;
    tagc_wire_header header = lie_of(bytes);
    header.body_bytes = header.index_bytes = header.n_items = 0;
    header.body_sum = tagc_wire_sum(NULL, 0);
    tagc_wire_write(&header, bytes);
    net->n_damaged++;
}

static void other_k(rounds *net, int lane, int n, int from, uint8_t *bytes, uint64_t n_bytes) {
    (void)n_bytes;
    if (!is_due(net, lane, n) || from != 2) return;
    tagc_wire_header header = lie_of(bytes);
    header.k++;
    tagc_wire_write(&header, bytes);
    net->n_damaged++;
}

/* Units of every exchange; the damaged one is a direct one in the middle. */
static int mixed(tagc_reducer_options *options) {
    static const int exchanges[] = {TAGC_EXCHANGE_DIRECT, TAGC_EXCHANGE_PACKED, WHOLE,
                                    TAGC_EXCHANGE_DIRECT, TAGC_EXCHANGE_SKETCH, TAGC_EXCHANGE_DIRECT};
    for (int u = 0; u < 6; u++) {
        options[u] = options_of(exchanges[u], 4, 512);
        if (u == 1) options[u].sparsity = 0.9;
    }
    return 6;
}

/* The others end as if nothing had been, the damaged one as before its step, and all can go on. */
static void check_one_failed(rounds_damage damage, uint64_t where, tagc_status due, const char *text) {
    tagc_reducer_options options[N_MOST_UNITS];
    int n = mixed(options), damaged = 3;
    rounds net, sound;
    outcome with, without;
    rounds_create(&net, 4);
    rounds_create(&sound, 4);
    damaged_step(&sound, &without, options, n, NULL);
    net.lane = LANE_HEADERS;
    net.turn = 3; /* of direct 0, unions of packed, whole values, direct 3 */
    net.where = where;
    damaged_step(&net, &with, options, n, damage);
    assert_true(net.n_damaged > 0);
    for (int u = 0; u < n; u++) {
        uint64_t n_residual = tagc_reducer_residual_elems(with.units[u].reducer);
        if (u != damaged) {
            assert_int_equal(with.units[u].status, TAGC_OK);
            assert_memory_equal(with.residuals[u], without.residuals[u], n_residual * sizeof(float));
            assert_memory_equal(with.outputs[u], without.outputs[u], 512 * sizeof(float));
            continue;
        }
        assert_int_equal(with.units[u].status, due);
        if (!strstr(with.units[u].text, text)) fail_msg("\"%s\" is not in \"%s\"", text, with.units[u].text);
    }
    run_units(&net, with.units, n);
    for (int u = 0; u < n; u++) assert_int_equal(with.units[u].status, TAGC_OK);
    /* The damaged unit's third step is its second: the same output from the same residual. */
    assert_memory_equal(with.units[damaged].output, without.outputs[damaged], 512 * sizeof(float));
    destroy_outcome(&with, n);
    destroy_outcome(&without, n);
    tagc_comm_destroy(net.comm);
    tagc_comm_destroy(sound.comm);
}

TEST(test_one_of_many_fails) {
    check_one_failed(no_body, 0, TAGC_ERR_CORRUPT, "header of the fragment from rank 12: no body");
    check_one_failed(other_k, 0, TAGC_ERR_MISMATCH, "fragment from rank 12: sparsity: ");
    check_one_failed(flip, 8 * (TAGC_WIRE_HEADER_BYTES + 20), TAGC_ERR_CORRUPT,
                     "fragment from rank 12: the checksum");
}

/* Every bit of a message that brings header and body: of the header, the comm is broken; of the body, the step fails; of
 * what fills up the message, nothing happens. Nothing ever hangs or changes a residual without TAGC_OK. */
TEST(test_every_bit) {
    HAS_ONE_THREAD();
    int n_by_status[TAGC_ERR_INTERRUPTED + 1] = {0};
    size_t n_bits = 8 * (TAGC_WIRE_HEADER_BYTES + 64); /* and a few of the header again */
    for (size_t bit = 0; bit < n_bits; bit += 3) {
        rounds net;
        outcome o;
        tagc_reducer_options options = options_of(TAGC_EXCHANGE_DIRECT, 3, 256);
        rounds_create(&net, 3);
        net.lane = LANE_HEADERS;
        net.where = bit;
        damaged_step(&net, &o, &options, 1, flip);
        assert_int_equal(net.n_damaged, 1);
        tagc_status status = o.units[0].status;
        int is_broken = tagc_comm_failed_rank(net.comm) >= 0;
        n_by_status[status] += !is_broken;
        assert_int_equal(is_broken, net.at < TAGC_WIRE_HEADER_BYTES);
        if (is_broken)
            assert_int_equal(status, TAGC_ERR_CORRUPT);
        else
            assert_true(status == TAGC_ERR_CORRUPT || status == TAGC_OK);
        destroy_outcome(&o, 1);
        tagc_comm_destroy(net.comm);
    }
    assert_true(n_by_status[TAGC_ERR_CORRUPT] > 20 && n_by_status[TAGC_OK] > 5);
}
