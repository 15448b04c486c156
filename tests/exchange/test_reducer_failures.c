/* Damaged messages and dying ranks: the same failure on all ranks, residuals as before, and never a hang. */
#include "codec/bitmap.h"
#include "exchange/wire.h"
#include "oracle.h"
#include "ranks.h"
#include "tagc/transport.h"

#include <errno.h>
#include <time.h>

/* ---- a network of the test's own, which damages what it is told to ---- */

typedef void (*damage_fn)(uint8_t *bytes, uint64_t n_bytes, uint64_t where);

typedef struct network {
    pthread_mutex_t lock;
    pthread_cond_t turn;
    int world_size, n_here, is_down;
    uint64_t round;
    const tagc_transfer *transfers[MAX_RANKS];
    /* what to damage: the n-th call of rank `to`, in what `from` sends */
    int call, from, to;
    uint64_t where;
    damage_fn damage;
    int n_damaged;
} network;

typedef struct endpoint {
    network *net;
    int rank, n_calls;
} endpoint;

static tagc_status meet(network *net) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 5;
    pthread_mutex_lock(&net->lock);
    uint64_t round = net->round;
    if (++net->n_here == net->world_size) {
        net->n_here = 0;
        net->round++;
        pthread_cond_broadcast(&net->turn);
    }
    while (round == net->round && !net->is_down)
        if (pthread_cond_timedwait(&net->turn, &net->lock, &end) == ETIMEDOUT) net->is_down = 1;
    tagc_status status =
        round != net->round ? TAGC_OK : tagc_report(TAGC_ERR_TRANSPORT, "the network is down");
    pthread_mutex_unlock(&net->lock);
    return status;
}

static tagc_status network_exchange(void *context, const tagc_transfer *transfer) {
    endpoint *end = context;
    network *net = end->net;
    net->transfers[end->rank] = transfer;
    tagc_status status = meet(net);
    if (status != TAGC_OK) return status;
    for (int s = 0; s < net->world_size; s++) {
        const tagc_transfer *peer = net->transfers[s];
        uint64_t n_bytes = transfer->recv_bytes[s];
        if (peer->send_bytes[end->rank] != n_bytes) return tagc_report(TAGC_ERR_TRANSPORT, "lengths differ");
        uint8_t *to = (uint8_t *)transfer->recv + transfer->recv_offset[s];
        const uint8_t *from = (const uint8_t *)peer->send + peer->send_offset[end->rank];
        if (n_bytes && to != from) memcpy(to, from, n_bytes);
        if (net->damage && n_bytes && end->n_calls == net->call && s == net->from && end->rank == net->to) {
            net->damage(to, n_bytes, net->where);
            net->n_damaged++;
        }
    }
    end->n_calls++;
    return meet(net);
}

/* ---- one damaged step between two good ones ---- */

typedef struct trial {
    tagc_reducer_options options;
    network net;
    tagc_status statuses[MAX_RANKS];
    char texts[MAX_RANKS][512];
} trial;

typedef struct trial_rank {
    trial *t;
    int rank;
    char failure[512];
} trial_rank;

#define EXPECT(who, condition)                                                                               \
    do {                                                                                                     \
        if (!(condition) && !(who)->failure[0])                                                              \
            snprintf((who)->failure, sizeof(who)->failure, "line %d: %s (%.150s)", __LINE__, #condition,     \
                     tagc_last_error());                                                                     \
    } while (0)

static void *trial_main(void *arg) {
    trial_rank *self = arg;
    trial *t = self->t;
    endpoint end = {.net = &t->net, .rank = self->rank};
    size_t n = (size_t)t->options.n_elems;
    float *gradient = malloc(n * sizeof *gradient), *output = malloc(n * sizeof *output),
          *before = malloc(n * sizeof *before);
    tagc_comm *comm;
    tagc_reducer *reducer = NULL;
    EXPECT(self, tagc_comm_create_callback(network_exchange, &end, self->rank, t->net.world_size, NULL,
                                           &comm) == TAGC_OK);
    EXPECT(self, tagc_reducer_create(comm, &t->options, &reducer) == TAGC_OK);
    for (size_t i = 0; i < n; i++) gradient[i] = random_gradient(1, self->rank, i);
    EXPECT(self, tagc_reducer_run(reducer, gradient, output, NULL) == TAGC_OK);
    const float *residual = tagc_reducer_residual(reducer, NULL);
    if (residual) memcpy(before, residual, n * sizeof *before);
    tagc_status status = tagc_reducer_run(reducer, gradient, output, NULL);
    t->statuses[self->rank] = status;
    if (status != TAGC_OK) snprintf(t->texts[self->rank], sizeof t->texts[0], "%s", tagc_last_error());
    residual = tagc_reducer_residual(reducer, NULL);
    if (status != TAGC_OK && residual) EXPECT(self, memcmp(before, residual, n * sizeof *before) == 0);
    if (status == TAGC_ERR_CORRUPT) {
        tagc_status next = tagc_reducer_run(reducer, gradient, output, NULL);
        EXPECT(self, next == TAGC_OK || next == TAGC_ERR_TRANSPORT);
    }
    tagc_reducer_destroy(reducer);
    tagc_comm_destroy(comm);
    free(gradient);
    free(output);
    free(before);
    return NULL;
}

static void run_trial(trial *t, int world_size) {
    pthread_t threads[MAX_RANKS];
    trial_rank ranks[MAX_RANKS];
    t->net.world_size = world_size;
    pthread_mutex_init(&t->net.lock, NULL);
    pthread_cond_init(&t->net.turn, NULL);
    for (int r = 0; r < world_size; r++) {
        ranks[r] = (trial_rank){.t = t, .rank = r};
        assert_int_equal(pthread_create(&threads[r], NULL, trial_main, &ranks[r]), 0);
    }
    for (int r = 0; r < world_size; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < world_size; r++)
        if (ranks[r].failure[0]) fail_msg("rank %d: %s", r, ranks[r].failure);
    pthread_mutex_destroy(&t->net.lock);
    pthread_cond_destroy(&t->net.turn);
}

static trial make_trial(int world_size, int exchange, int index) {
    trial t = {0};
    tagc_reducer_options_init(&t.options);
    t.options.n_elems = 2048 * (uint64_t)world_size;
    t.options.exchange = exchange;
    t.options.index = index;
    t.options.cells = TAGC_CELLS_FIXED;
    t.options.sparsity = 0.95;
    return t;
}

static void flip_bit(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    bytes[where / 8 % n_bytes] ^= (uint8_t)(1 << where % 8);
}

/* Calls of one step over this transport, all counted from the step's first: indices (W - 1), unions,
 * agreement, values (W - 1), and for the sketch a second agreement. Before them: the create's gather and the
 * first step. */
static int first_call_of_second_step(int world_size, int exchange) {
    int n_step = 2 * (world_size - 1) + 2 + (exchange == TAGC_EXCHANGE_SKETCH);
    return 1 + n_step;
}

static void assert_same_failure(const trial *t, int world_size, tagc_status status, const char *what) {
    for (int r = 0; r < world_size; r++)
        if (t->statuses[r] != status)
            fail_msg("%s: rank %d has %s (%s)", what, r, tagc_status_name(t->statuses[r]), t->texts[r]);
}

static void test_damaged_index(void **state) {
    (void)state;
    for (int variant = 0; variant < 48; variant++) {
        int world_size = 2 + variant % 3, exchange = 1 + variant / 3 % 2, index = variant / 6 % 3;
        trial t = make_trial(world_size, exchange, index);
        int is_union = variant / 3 % 2;
        t.net.to = variant % world_size;
        t.net.call = first_call_of_second_step(world_size, exchange) + (is_union ? world_size - 1 : 0);
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
static void test_damaged_values(void **state) {
    (void)state;
    for (int variant = 0; variant < 12; variant++) {
        int world_size = 2 + variant % 3, exchange = 1 + variant / 3 % 2;
        trial t = make_trial(world_size, exchange, TAGC_INDEX_OR);
        t.net.to = variant % world_size;
        t.net.call = first_call_of_second_step(world_size, exchange) + world_size + 1;
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
static void test_damaged_agreement(void **state) {
    (void)state;
    trial t = make_trial(2, TAGC_EXCHANGE_PACKED, TAGC_INDEX_OR);
    t.net.to = 0;
    t.net.from = 1;
    t.net.call = first_call_of_second_step(2, TAGC_EXCHANGE_PACKED) + 2;
    t.net.damage = flip_bit;
    t.net.where = 77;
    run_trial(&t, 2);
    assert_int_equal(t.net.n_damaged, 1);
    assert_int_equal(t.statuses[0], TAGC_ERR_TRANSPORT);
    assert_non_null(strstr(t.texts[0], "agreement from rank 1 arrived damaged: "));
    assert_int_equal(t.statuses[1], TAGC_ERR_TRANSPORT);
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

static void test_wrong_index(void **state) {
    (void)state;
    for (int variant = 0; variant < 10; variant++) {
        trial t = make_trial(2, TAGC_EXCHANGE_SKETCH, TAGC_INDEX_OR);
        t.net.to = variant % 2;
        t.net.from = 1 - t.net.to;
        t.net.call = first_call_of_second_step(2, TAGC_EXCHANGE_SKETCH);
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

static void test_oversized_index(void **state) {
    (void)state;
    for (int variant = 0; variant < 6; variant++) {
        trial t = make_trial(2, 1 + variant % 2, variant / 2);
        t.net.from = 1;
        t.net.call = first_call_of_second_step(2, t.options.exchange);
        t.net.damage = set_all;
        run_trial(&t, 2);
        assert_same_failure(&t, 2, TAGC_ERR_CORRUPT, "oversized index");
    }
}

/* ---- a rank that gives up ---- */

static void give_up_body(rank_run *run) {
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = 30000 * (uint64_t)run->world_size;
    options.exchange = *(int *)run->shared;
    size_t n = (size_t)options.n_elems;
    float *gradient = calloc(n, sizeof *gradient), *output = calloc(n, sizeof *output);
    for (size_t i = 0; i < n; i++) gradient[i] = random_gradient(1, run->rank, i);
    tagc_reducer *reducer;
    if (CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) {
        CHECK(run, tagc_reducer_run(reducer, gradient, output, NULL) == TAGC_OK);
        if (run->rank == 1) {
            nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL);
            tagc_comm_abort(run->comm, "enough");
        }
        keep_status(run, tagc_reducer_run(reducer, gradient, output, NULL));
        tagc_reducer_destroy(reducer);
    }
    free(gradient);
    free(output);
}

static void test_rank_gives_up(void **state) {
    (void)state;
    for (int exchange = TAGC_EXCHANGE_DENSE; exchange <= TAGC_EXCHANGE_PACKED; exchange++) {
        rank_run runs[MAX_RANKS];
        double start_s = tagc_time_s();
        run_ranks(3, give_up_body, &exchange, NULL, runs);
        assert_true(tagc_time_s() - start_s < 20);
        for (int r = 0; r < 3; r++) assert_int_equal(runs[r].status, TAGC_ERR_TRANSPORT);
        assert_non_null(strstr(runs[0].text, "enough"));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_damaged_index),     cmocka_unit_test(test_damaged_values),
        cmocka_unit_test(test_damaged_agreement), cmocka_unit_test(test_wrong_index),
        cmocka_unit_test(test_oversized_index),   cmocka_unit_test(test_rank_gives_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
