/* Tickets that start after another is complete, on a transport that completes only what it is told to: nothing overtakes
 * within a lane, other lanes go on, and nothing is left behind when the comm breaks. */
#include "ranks.h"

#include "tagc/transport.h"

#include <stdatomic.h>

/* A transfer's name is the letter that it would send. */
typedef struct gate {
    atomic_uint open; /* bit i: letter 'a' + i may complete */
    int n_started;
    char started[16]; /* of the comm thread, until it is idle */
} gate;

static tagc_status gate_start(void *context, const tagc_transfer *transfer, void **request) {
    gate *self = context;
    self->started[self->n_started++] = *(const char *)transfer->send;
    *request = (char *)transfer->send;
    return TAGC_OK;
}

static tagc_status gate_test(void *context, void *request, tagc_progress *progress) {
    gate *self = context;
    progress->done = (atomic_load(&self->open) >> (*(const char *)request - 'a') & 1) != 0;
    return TAGC_OK;
}

static void gate_give_up(void *context, const tagc_failure *failure) {
    (void)context, (void)failure;
}

static void gate_destroy(void *context) {
    (void)context;
}

#define GATE_OPS(lanes)                                                                                      \
    {                                                                                                        \
        .abi = TAGC_TRANSPORT_ABI, .capabilities = (lanes), .name = "gate", .start = gate_start,             \
        .test = gate_test, .cancel = gate_give_up, .abort = gate_give_up, .destroy = gate_destroy            \
    }
static const tagc_transport_ops with_lanes = GATE_OPS(TAGC_TRANSPORT_LANES), without = GATE_OPS(0);

static char letters[] = "abcdef";

static void post(tagc_comm *comm, tagc_ticket *tickets, char name, tagc_lane lane, char after) {
    tagc_ticket *ticket = &tickets[name - 'a'];
    *ticket = (tagc_ticket){.transfer = {.send = &letters[name - 'a'], .recv = letters},
                            .after = after ? &tickets[after - 'a'] : NULL};
    tagc_comm_post(comm, lane, ticket);
}

/* Lets it complete and waits for that. */
static void complete(gate *g, tagc_comm *comm, tagc_ticket *tickets, char name) {
    atomic_fetch_or(&g->open, 1u << (name - 'a'));
    assert_int_equal(tagc_comm_wait(comm, &tickets[name - 'a']), TAGC_OK);
}

static void nothing_overtakes_in_a_lane(void **state) {
    (void)state;
    gate g = {0};
    tagc_ticket tickets[6];
    tagc_comm *comm;
    assert_int_equal(tagc_comm_create(&with_lanes, &g, 0, 1, NULL, &comm), TAGC_OK);
    post(comm, tickets, 'a', TAGC_LANE_GATHER, 0);
    post(comm, tickets, 'b', TAGC_LANE_RELAY, 'a');
    post(comm, tickets, 'c', TAGC_LANE_GATHER, 0);
    post(comm, tickets, 'd', TAGC_LANE_RELAY, 'c');
    complete(&g, comm, tickets, 'c');
    post(comm, tickets, 'e', TAGC_LANE_CONTROL, 0);
    complete(&g, comm, tickets, 'e'); /* by now all that may have been started has */
    assert_string_equal(g.started, "ace");
    assert_false(tagc_comm_is_done(comm, &tickets[1]) || tagc_comm_is_done(comm, &tickets[3]));
    complete(&g, comm, tickets, 'a');
    complete(&g, comm, tickets, 'd'); /* started while b is under way */
    assert_false(tagc_comm_is_done(comm, &tickets[1]));
    complete(&g, comm, tickets, 'b');
    post(comm, tickets, 'f', TAGC_LANE_RELAY, 'a'); /* after what is long complete */
    complete(&g, comm, tickets, 'f');
    assert_string_equal(g.started, "acebdf");
    tagc_comm_destroy(comm);
}

/* One lane for all: what is posted behind a ticket that waits, waits. */
static void one_lane_keeps_its_order(void **state) {
    (void)state;
    gate g = {0};
    tagc_ticket tickets[6];
    tagc_comm *comm;
    assert_int_equal(tagc_comm_create(&without, &g, 0, 1, NULL, &comm), TAGC_OK);
    post(comm, tickets, 'a', TAGC_LANE_GATHER, 0);
    post(comm, tickets, 'b', TAGC_LANE_RELAY, 'a');
    post(comm, tickets, 'c', TAGC_LANE_RELAY, 'a');
    post(comm, tickets, 'd', TAGC_LANE_GATHER, 0);
    for (char name = 'a'; name <= 'd'; name++) complete(&g, comm, tickets, name);
    assert_string_equal(g.started, "abcd");
    tagc_comm_destroy(comm);
}

static void a_break_ends_those_who_wait(void **state) {
    (void)state;
    gate g = {0};
    tagc_ticket tickets[6];
    tagc_comm *comm;
    assert_int_equal(tagc_comm_create(&with_lanes, &g, 0, 1, NULL, &comm), TAGC_OK);
    post(comm, tickets, 'a', TAGC_LANE_GATHER, 0);
    post(comm, tickets, 'b', TAGC_LANE_RELAY, 'a');
    post(comm, tickets, 'c', TAGC_LANE_RELAY, 0);
    tagc_comm_abort(comm, "enough");
    for (int i = 0; i < 3; i++) assert_int_equal(tagc_comm_wait(comm, &tickets[i]), TAGC_ERR_TRANSPORT);
    post(comm, tickets, 'd', TAGC_LANE_RELAY, 'a');
    assert_int_equal(tagc_comm_wait(comm, &tickets[3]), TAGC_ERR_TRANSPORT);
    tagc_comm_destroy(comm);
    assert_true(g.n_started <= 1); /* a, or not even that */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_overtakes_in_a_lane),
        cmocka_unit_test(one_lane_keeps_its_order),
        cmocka_unit_test(a_break_ends_those_who_wait),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
