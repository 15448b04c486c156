/* A comm of some ranks of another: who is in it, what messages call its ranks, and that it ends with the whole. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "../check.h"
#include "core/status.h"
#include "tagc/transport.h"
#include "transport/comm.h"

enum { N_RANKS = 6 };

typedef struct ranks {
    void (*run)(tagc_comm *comm);
    tagc_local_group *group;
} ranks;

typedef struct one_rank {
    ranks *all;
    int rank;
} one_rank;

static void *rank_main(void *arg) {
    one_rank *own = arg;
    tagc_comm_options options;
    tagc_comm *comm;
    tagc_comm_options_init(&options);
    options.timeout_s = 60;
    CHECK(tagc_comm_create_local(own->all->group, own->rank, &options, &comm) == TAGC_OK);
    own->all->run(comm);
    tagc_comm_destroy(comm);
    return NULL;
}

static void run_ranks(void (*run)(tagc_comm *comm)) {
    ranks all = {.run = run};
    one_rank each[N_RANKS];
    pthread_t threads[N_RANKS];
    assert_int_equal(tagc_local_group_create(N_RANKS, &all.group), TAGC_OK);
    for (int r = 0; r < N_RANKS; r++) {
        each[r] = (one_rank){&all, r};
        assert_int_equal(pthread_create(&threads[r], NULL, rank_main, &each[r]), 0);
    }
    for (int r = 0; r < N_RANKS; r++) pthread_join(threads[r], NULL);
    tagc_local_group_destroy(all.group);
}

/* Hosts of two ranks, and places of three; of the latter again hosts of one. */
static void split(tagc_comm *comm) {
    int rank = tagc_comm_rank(comm), ranks_of[N_RANKS];
    tagc_comm *within, *between, *alone;
    CHECK(tagc_comm_split(comm, rank / 2, &within) == TAGC_OK);
    CHECK(tagc_comm_split(comm, rank % 2, &between) == TAGC_OK);
    CHECK(tagc_comm_split(between, rank, &alone) == TAGC_OK);
    CHECK(tagc_comm_world_size(within) == 2 && tagc_comm_rank(within) == rank % 2);
    CHECK(tagc_comm_world_size(between) == 3 && tagc_comm_rank(between) == rank / 2);
    CHECK(tagc_comm_world_size(alone) == 1);
    for (int h = 0; h < 3; h++) CHECK(tagc_comm_name(between, h) == 2 * h + rank % 2);
    CHECK(tagc_comm_name(alone, 0) == rank);
    CHECK(tagc_comm_all_gather(between, &rank, sizeof rank, ranks_of, 3 * sizeof *ranks_of) == TAGC_OK);
    for (int h = 0; h < 3; h++) CHECK(ranks_of[h] == 2 * h + rank % 2);
    CHECK(tagc_comm_all_gather(within, &rank, sizeof rank, ranks_of, 2 * sizeof *ranks_of) == TAGC_OK);
    for (int l = 0; l < 2; l++) CHECK(ranks_of[l] == rank / 2 * 2 + l);
    CHECK(tagc_comm_barrier(comm) == TAGC_OK);
    tagc_comm_destroy(alone);
    tagc_comm_destroy(within);
    tagc_comm_destroy(between);
    CHECK(tagc_comm_barrier(comm) == TAGC_OK); /* the whole goes on */
}

static void ranks_of_a_color_are_together(void **state) {
    (void)state;
    run_ranks(split);
}

/* Rank 1 gives up the whole; who waits in a part with it learns of that, long before the time-out. */
static void give_up(tagc_comm *comm) {
    int rank = tagc_comm_rank(comm);
    tagc_comm *part;
    CHECK(tagc_comm_split(comm, rank / 3, &part) == TAGC_OK);
    (void)tagc_comm_barrier(comm); /* all have their parts; of some ranks it may fail, since rank 1 goes on */
    if (rank == 1) {
        tagc_comm_abort(comm, "no more coal");
    } else if (rank < 3) {
        CHECK(tagc_comm_barrier(part) == TAGC_ERR_TRANSPORT);
        CHECK(strstr(tagc_last_error(), "no more coal") != NULL);
        CHECK(tagc_comm_failed_rank(part) == 1);
    } else {
        CHECK(tagc_comm_barrier(part) == TAGC_OK);
    }
    tagc_comm_destroy(part);
}

static void a_part_ends_with_the_whole(void **state) {
    (void)state;
    run_ranks(give_up);
}

static tagc_status exchange(void *context, const tagc_transfer *transfer) {
    (void)context, (void)transfer;
    return TAGC_OK;
}

static void other_transports_refuse(void **state) {
    (void)state;
    const tagc_callback_ops ops = {.abi = TAGC_TRANSPORT_ABI, .exchange = exchange};
    tagc_comm *comm, *part;
    assert_int_equal(tagc_comm_create_callback(&ops, NULL, 0, 1, NULL, &comm), TAGC_OK);
    assert_int_equal(tagc_comm_split(comm, 0, &part), TAGC_ERR_UNSUPPORTED);
    assert_null(part);
    assert_non_null(strstr(tagc_last_error(), "cannot be split"));
    tagc_comm_destroy(comm);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_of_a_color_are_together),
        cmocka_unit_test(a_part_ends_with_the_whole),
        cmocka_unit_test(other_transports_refuse),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
