/* The MPI transport under mpiexec, against the same oracle as the local one. Every rank runs every test; rank
 * 0 alone prints, the exit code of all counts. */
#include "../test.h"
#include "../transport/pattern.h"

#include "transport/mpi_internal.h"

#include <stdio.h>
#include <unistd.h>

static int has(const char *part) {
    return strstr(tagc_last_error(), part) != NULL;
}

TEST(test_storm) {
    tagc_comm *comm;
    assert_int_equal(tagc_comm_create_mpi(MPI_COMM_WORLD, NULL, &comm), TAGC_OK);
    for (uint64_t i = 0; i < 3; i++) assert_int_equal(pattern_storm(comm, i, 5, 300000), 0);
    assert_int_equal(pattern_storm(comm, 9, 20, 40), 0);
    tagc_comm_destroy(comm);
}

/* Pieces of 1, 7 and 1000 bytes: many per message, odd tails, and messages just below, at and above one
 * piece. */
TEST(test_split) {
    static const uint64_t splits[] = {1, 7, 1000}, longest[] = {300, 2000, 200000};
    for (int i = 0; i < 3; i++) {
        tagc_comm *comm;
        assert_int_equal(tagc_comm_create_mpi_split(MPI_COMM_WORLD, NULL, splits[i], &comm), TAGC_OK);
        assert_int_equal(pattern_storm(comm, 100 + (uint64_t)i, 4, longest[i]), 0);
        tagc_comm_destroy(comm);
    }
    for (uint64_t n = 63; n <= 129; n++) {
        if (n == 66) n = 126;
        tagc_comm *comm;
        unsigned char mine[129], all[4096];
        assert_int_equal(tagc_comm_create_mpi_split(MPI_COMM_WORLD, NULL, 64, &comm), TAGC_OK);
        int W = tagc_comm_world_size(comm), rank = tagc_comm_rank(comm);
        memset(mine, rank + 1, n);
        assert_int_equal(tagc_comm_all_gather(comm, mine, n, all, (size_t)W * n), TAGC_OK);
        for (size_t j = 0; j < (size_t)W * n; j++) assert_int_equal(all[j], j / n + 1);
        tagc_comm_destroy(comm);
    }
}

TEST(test_gather) {
    tagc_comm *comm;
    uint64_t all[64], sent[TAGC_N_LEGS], received[TAGC_N_LEGS];
    assert_int_equal(tagc_comm_create_mpi(MPI_COMM_WORLD, NULL, &comm), TAGC_OK);
    int W = tagc_comm_world_size(comm), rank = tagc_comm_rank(comm);
    for (int i = 0; i < 50; i++) {
        all[rank] = (uint64_t)(i * 100 + rank);
        assert_int_equal(tagc_comm_all_gather(comm, &all[rank], sizeof *all, all, (size_t)W * sizeof *all),
                         TAGC_OK);
        for (int r = 0; r < W; r++) assert_int_equal(all[r], i * 100 + r);
    }
    assert_int_equal(tagc_comm_barrier(comm), TAGC_OK);
    tagc_comm_bytes(comm, sent, received, TAGC_N_LEGS);
    assert_int_equal(sent[TAGC_LEG_CONTROL], (W - 1) * (50 * 8 + 1));
    assert_int_equal(received[TAGC_LEG_CONTROL], (W - 1) * (50 * 8 + 1));
    assert_int_equal(sent[TAGC_LEG_VALUES], 0);
    tagc_comm_destroy(comm);
}

/* Two comms at once keep their messages apart (their calls do not overlap: the level is
 * MPI_THREAD_SERIALIZED). */
TEST(test_two_comms) {
    tagc_comm *a, *b;
    assert_int_equal(tagc_comm_create_mpi(MPI_COMM_WORLD, NULL, &a), TAGC_OK);
    assert_int_equal(tagc_comm_create_mpi(MPI_COMM_SELF, NULL, &b), TAGC_OK);
    assert_int_equal(tagc_comm_world_size(b), 1);
    assert_int_equal(pattern_storm(a, 5, 3, 1000), 0);
    assert_int_equal(pattern_storm(b, 6, 3, 1000), 0);
    tagc_comm_destroy(b);
    tagc_comm_destroy(a);
}

/* From rank 0 to its neighbour: too little, then too much. The receiver tells all others, in their next transfer; no rank uses that
 * comm again. */
TEST(test_sizes) {
    for (int longer = 0; longer < 2; longer++) {
        tagc_comm *comm;
        assert_int_equal(tagc_comm_create_mpi(MPI_COMM_WORLD, NULL, &comm), TAGC_OK);
        int W = tagc_comm_world_size(comm), rank = tagc_comm_rank(comm);
        unsigned char buffer[64] = {0};
        tagc_part sent = {1, longer ? 24 : 8, 0}, received = {0, 16, 0};
        tagc_ticket ticket = {.transfer = {.n_sends = rank == 0 && W > 1,
                                           .n_receives = rank == 1,
                                           .sends = &sent,
                                           .receives = &received,
                                           .send = buffer,
                                           .recv = buffer},
                              .leg = TAGC_LEG_VALUES};
        tagc_comm_post(comm, TAGC_LANE_REDUCE, &ticket);
        tagc_status status = tagc_comm_wait(comm, &ticket);
        if (rank == 1) {
            assert_int_equal(status, TAGC_ERR_MISMATCH);
            assert_true(has(longer ? "rank 0 sends more than the 16 bytes that rank 1 expects"
                                   : "rank 0 sends 8 bytes to rank 1, which expects 16"));
        } else {
            assert_int_equal(status, TAGC_OK);
        }
        if (W > 1) {
            assert_int_equal(tagc_comm_barrier(comm), TAGC_ERR_MISMATCH);
            assert_true(has("rank 0 sends"));
            assert_true(rank == 1 || has("rank 1 gave up: "));
            assert_int_equal(tagc_comm_failed_rank(comm), 0);
        }
        if (W == 1) tagc_comm_destroy(comm); /* others stay as they are: their destroy would be collective */
    }
}

TEST(test_arguments) {
    tagc_comm *comm = (tagc_comm *)&comm;
    assert_int_equal(tagc_comm_create_mpi(MPI_COMM_NULL, NULL, &comm), TAGC_ERR_ARGUMENT);
    assert_true(has("mpi_comm is MPI_COMM_NULL"));
    assert_null(comm);
    assert_int_equal(tagc_comm_create_mpi(MPI_COMM_WORLD, NULL, NULL), TAGC_ERR_ARGUMENT);
    assert_int_equal(tagc_comm_create_mpi_split(MPI_COMM_WORLD, NULL, 0, &comm), TAGC_ERR_ARGUMENT);
    assert_true(has("split_bytes"));
    tagc_comm_options options;
    tagc_comm_options_init(&options);
    options.timeout_s = 0;
    assert_int_equal(tagc_comm_create_mpi(MPI_COMM_WORLD, &options, &comm), TAGC_ERR_ARGUMENT);
    assert_true(has("options.timeout_s is 0"));
    assert_null(comm);
}

/* What only the last rank gets wrong: no other is left with a comm of which that rank is missing. */
TEST(test_one_rank_fails) {
    enum { MOST_RANKS = 64 };
    int rank, W;
    int32_t names[MOST_RANKS];
    char part[96];
    tagc_comm_options options;
    tagc_comm *comm;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &W);
    for (int r = 0; r < MOST_RANKS; r++) names[r] = 10 + r;
    tagc_comm_options_init(&options);
    options.names = names;
    if (rank == W - 1) options.timeout_s = -1;
    snprintf(part, sizeof part, "rank %d failed to create its comm: invalid argument", 10 + W - 1);
    assert_int_equal(tagc_comm_create_mpi(MPI_COMM_WORLD, &options, &comm), TAGC_ERR_ARGUMENT);
    assert_null(comm);
    assert_true(has(rank == W - 1 ? "options.timeout_s is -1" : part));
}

/* The last rank never answers. Meanwhile it makes no MPI call, and the others must not hang. */
TEST(test_timeout) {
    tagc_comm_options options;
    tagc_comm_options_init(&options);
    options.timeout_s = 0.3;
    tagc_comm *comm;
    assert_int_equal(tagc_comm_create_mpi(MPI_COMM_WORLD, &options, &comm), TAGC_OK);
    int W = tagc_comm_world_size(comm), rank = tagc_comm_rank(comm);
    char part[96];
    snprintf(part, sizeof part, "no answer from rank %d within 0.3 s (while ranks agreed)", W - 1);
    double start_s = tagc_time_s();
    if (rank < W - 1) {
        assert_int_equal(tagc_comm_barrier(comm), TAGC_ERR_TIMEOUT);
        assert_true(has(part));
        assert_int_equal(tagc_comm_failed_rank(comm), W - 1);
        /* It is not the default time-out, 120 s, that ends the wait. A busy machine may take seconds. */
        assert_true(tagc_time_s() - start_s < 60);
        tagc_comm_destroy(comm);
    } else {
        usleep(900000);
        if (W == 1) tagc_comm_destroy(comm);
    }
}

int main(int argc, char **argv) {
    tagc_comm *early;
    if (tagc_comm_create_mpi(MPI_COMM_WORLD, NULL, &early) != TAGC_ERR_STATE || !has("MPI_Init_thread")) {
        fprintf(stderr, "MPI that is not initialised was not refused\n");
        return 1;
    }
    static const char name[] = "OMPI_MCA_btl_tcp_flags";
    setenv(name, "mine", 1);
    tagc_mpi_prepare();
    int kept = strcmp(getenv(name), "mine") == 0;
    unsetenv(name);
    tagc_mpi_prepare();
    if (!kept || !getenv(name)) {
        fprintf(stderr, "tagc_mpi_prepare changed what the user had set, or set nothing\n");
        return 1;
    }
    int level, rank;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank != 0 && !freopen("/dev/null", "w", stdout)) return 1;
    int n_failed = test_run(NULL, NULL);
    if (n_failed)
        MPI_Abort(MPI_COMM_WORLD, 1); /* the others may be waiting for a rank whose test ended early */
    MPI_Finalize();
    return 0;
}
