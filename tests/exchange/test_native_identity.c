/* Ranks that begin units in different orders over the native transport (orders.h). */
#include "../transport/native_ranks.h"
#include "orders.h"

static void body(rank_run *run) {
    native_group *group = run->shared;
    order_check c = {.odd = 1, .comm = native_comm(run, group)};
    if (!c.comm) return;
    order_of_all(&c, 0, 1);
    if (c.failure[0]) snprintf(run->failure, sizeof run->failure, "%.250s", c.failure);
    tagc_comm_destroy(c.comm);
}

TEST(test_orders) {
    for (int W = 2; W <= 4; W++) {
        native_group *group = native_group_make(W, 1);
        run_threads(W, body, group);
        native_group_free(group);
    }
}
