/* Ranks that begin units in different orders over MPI (tests/exchange/orders.h). */

#include "../exchange/orders.h"
#include "../test.h"
#include "tagc/mpi.h"

static tagc_comm *comm;

TEST(test_orders) {
    int world_size = tagc_comm_world_size(comm);
    for (int odd = 0; odd < world_size && world_size > 1; odd += 3) {
        order_check c = {.comm = comm, .odd = odd};
        order_of_all(&c, 1, 1);
        if (c.failure[0]) fail_msg("rank %d of %d: %s", tagc_comm_rank(comm), world_size, c.failure);
    }
}

int main(int argc, char **argv) {
    int threads;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &threads);
    if (threads < MPI_THREAD_MULTIPLE || tagc_comm_create_mpi(MPI_COMM_WORLD, NULL, &comm) != TAGC_OK)
        return 1;
    int n_failed = test_run(NULL, NULL);
    if (n_failed) MPI_Abort(MPI_COMM_WORLD, 1); /* the others may wait */
    tagc_comm_destroy(comm);
    MPI_Finalize();
    return n_failed;
}
