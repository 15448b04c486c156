/* A comm of some ranks of another: who is in it, what messages call its ranks, and that it ends with the whole. */
#include "../ranks.h"
#include "core/status.h"
#include "tagc/transport.h"
#include "transport/comm.h"

enum { N_RANKS = 6 };

/* Hosts of two ranks, and places of three; of the latter again hosts of one. */
static void split(rank_run *run) {
    tagc_comm *comm = run->comm;
    int rank = tagc_comm_rank(comm), ranks_of[N_RANKS];
    tagc_comm *within, *between, *alone;
    CHECK(run, tagc_comm_split(comm, rank / 2, &within) == TAGC_OK);
    CHECK(run, tagc_comm_split(comm, rank % 2, &between) == TAGC_OK);
    CHECK(run, tagc_comm_split(between, rank, &alone) == TAGC_OK);
    CHECK(run, tagc_comm_world_size(within) == 2 && tagc_comm_rank(within) == rank % 2);
    CHECK(run, tagc_comm_world_size(between) == 3 && tagc_comm_rank(between) == rank / 2);
    CHECK(run, tagc_comm_world_size(alone) == 1);
    for (int h = 0; h < 3; h++) CHECK(run, tagc_comm_name(between, h) == 10 + 2 * h + rank % 2);
    CHECK(run, tagc_comm_name(alone, 0) == 10 + rank);
    CHECK(run, tagc_comm_all_gather(between, &rank, sizeof rank, ranks_of, 3 * sizeof *ranks_of) == TAGC_OK);
    for (int h = 0; h < 3; h++) CHECK(run, ranks_of[h] == 2 * h + rank % 2);
    CHECK(run, tagc_comm_all_gather(within, &rank, sizeof rank, ranks_of, 2 * sizeof *ranks_of) == TAGC_OK);
    for (int l = 0; l < 2; l++) CHECK(run, ranks_of[l] == rank / 2 * 2 + l);
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK);
    tagc_comm_destroy(alone);
    tagc_comm_destroy(within);
    tagc_comm_destroy(between);
    CHECK(run, tagc_comm_barrier(comm) == TAGC_OK); /* the whole goes on */
}

TEST(ranks_of_a_color_are_together) {
    run_ranks(N_RANKS, split, NULL);
}

/* Rank 1 gives up the whole; who waits in a part with it learns of that, long before the time-out. */
static void give_up(rank_run *run) {
    tagc_comm *comm = run->comm;
    int rank = tagc_comm_rank(comm);
    tagc_comm *part;
    CHECK(run, tagc_comm_split(comm, rank / 3, &part) == TAGC_OK);
    (void)tagc_comm_barrier(comm); /* all have their parts; of some ranks it may fail, since rank 1 goes on */
    if (rank == 1) {
        tagc_comm_abort(comm, "no more coal");
    } else if (rank < 3) {
        CHECK(run, tagc_comm_barrier(part) == TAGC_ERR_TRANSPORT);
        CHECK(run, strstr(tagc_last_error(), "no more coal") != NULL);
        CHECK(run, tagc_comm_failed_rank(part) == 11);
    } else {
        CHECK(run, tagc_comm_barrier(part) == TAGC_OK);
    }
    tagc_comm_destroy(part);
}

TEST(a_part_ends_with_the_whole) {
    run_ranks(N_RANKS, give_up, NULL);
}

static tagc_status exchange(void *context, const tagc_transfer *transfer) {
    (void)context, (void)transfer;
    return TAGC_OK;
}

TEST(other_transports_refuse) {
    const tagc_callback_ops ops = {.abi = TAGC_TRANSPORT_ABI, .exchange = exchange};
    tagc_comm *comm, *part;
    assert_int_equal(tagc_comm_create_callback(&ops, NULL, 0, 1, NULL, &comm), TAGC_OK);
    assert_int_equal(tagc_comm_split(comm, 0, &part), TAGC_ERR_UNSUPPORTED);
    assert_null(part);
    assert_non_null(strstr(tagc_last_error(), "cannot be split"));
    tagc_comm_destroy(comm);
}
