/* The smallest useful program: every rank has a gradient, and after one compressed exchange each rank holds
 * the average of its own shard. Build and run: see README.md beside this file. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <tagc/mpi.h>

enum { N_ELEMS = 1 << 20, N_STEPS = 5 };

static void must(tagc_status status) {
    if (status == TAGC_OK) return;
    fprintf(stderr, "%s: %s\n", tagc_status_name(status), tagc_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int argc, char **argv) {
    int level;
    tagc_mpi_prepare();
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    if (level < MPI_THREAD_MULTIPLE) MPI_Abort(MPI_COMM_WORLD, 1); /* tagc's thread calls MPI, too */

    tagc_comm *comm;
    must(tagc_comm_create_mpi(MPI_COMM_WORLD, NULL, &comm));
    int rank = tagc_comm_rank(comm), world_size = tagc_comm_world_size(comm);

    tagc_reducer_options options;
    tagc_reducer_options_init(&options); /* every value in 8 bits; what that rounds off goes with the next */
    options.n_elems = tagc_padded_elems(N_ELEMS, world_size);
    tagc_reducer *reducer;
    must(tagc_reducer_create(comm, &options, &reducer));

    size_t n = (size_t)options.n_elems, shard = n / (size_t)world_size;
    float *gradient = calloc(n, sizeof *gradient), *mean = calloc(shard, sizeof *mean);
    if (!gradient || !mean) MPI_Abort(MPI_COMM_WORLD, 1);
    srand((unsigned)rank + 1);
    for (int step = 0; step < N_STEPS; step++) {
        for (size_t i = 0; i < N_ELEMS; i++) gradient[i] = (float)rand() / (float)RAND_MAX - 0.5f;
        tagc_reducer_stats stats;
        tagc_reducer_stats_init(&stats);
        must(tagc_reducer_begin(reducer, gradient, n, mean, shard));
        /* ... compute something else here ... */
        must(tagc_reducer_end(reducer, &stats));
        double n_bytes = 0;
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) n_bytes += (double)stats.n_bytes_sent[leg];
        if (rank == 0)
            printf("step %d: %d ranks, %.3f bits per element instead of %.1f\n", step, world_size,
                   8 * n_bytes / (double)n, 32.0 * (world_size - 1) / world_size);
    }

    free(gradient);
    free(mean);
    tagc_reducer_destroy(reducer);
    tagc_comm_destroy(comm);
    MPI_Finalize();
    return 0;
}
