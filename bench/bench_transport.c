/* What the comm thread costs on top of MPI: an exchange of equal parts through tagc beside plain
 * MPI_Alltoall, interleaved in one run. mpiexec -n W bench_transport */
#include "tagc/mpi.h"
#include "transport/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_W = 64, N_REPEATS = 15 };

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values) {
    qsort(values, N_REPEATS, sizeof *values, by_value);
    return values[N_REPEATS / 2];
}

static double time_tagc(tagc_comm *comm, const char *send, char *recv, uint64_t part) {
    tagc_part parts[MAX_W];
    uint32_t n_parts = 0;
    for (int r = 0; r < tagc_comm_world_size(comm); r++)
        if (r != tagc_comm_rank(comm)) parts[n_parts++] = (tagc_part){r, part, (uint64_t)r * part};
    tagc_ticket ticket = {.transfer = {.n_sends = n_parts,
                                       .n_receives = n_parts,
                                       .sends = parts,
                                       .receives = parts,
                                       .send = send,
                                       .recv = recv},
                          .leg = TAGC_LEG_VALUES};
    double start_s = tagc_time_s();
    tagc_comm_post(comm, TAGC_LANE_REDUCE, &ticket);
    if (tagc_comm_wait(comm, &ticket) != TAGC_OK) {
        fprintf(stderr, "bench_transport: %s\n", tagc_last_error());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return tagc_time_s() - start_s;
}

static double time_mpi(const char *send, char *recv, uint64_t part) {
    double start_s = tagc_time_s();
    MPI_Alltoall(send, (int)part, MPI_BYTE, recv, (int)part, MPI_BYTE, MPI_COMM_WORLD);
    return tagc_time_s() - start_s;
}

/* MPI is called from here only while tagc's comm thread sleeps, as MPI_THREAD_SERIALIZED asks for. */
int main(int argc, char **argv) {
    int level, rank, W;
    tagc_mpi_prepare();
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &W);
    tagc_comm *comm;
    if (W > MAX_W || tagc_comm_create_mpi(MPI_COMM_WORLD, NULL, &comm) != TAGC_OK) {
        fprintf(stderr, "bench_transport: %s\n", W > MAX_W ? "at most 64 ranks" : tagc_last_error());
        MPI_Abort(MPI_COMM_WORLD, 1);
        return 1;
    }
    if (rank == 0)
        printf("%12s %12s %12s %10s %10s %7s\n", "bytes/peer", "tagc_us", "mpi_us", "tagc_GB/s", "mpi_GB/s",
               "ratio");
    for (uint64_t part = 64; part <= (uint64_t)64 << 20; part *= 16) {
        char *send = malloc((size_t)W * part), *recv = malloc((size_t)W * part);
        if (!send || !recv) MPI_Abort(MPI_COMM_WORLD, 1);
        memset(send, 1, (size_t)W * part);
        memset(recv, 0, (size_t)W * part);
        double ours[N_REPEATS], theirs[N_REPEATS];
        for (int i = -2; i < N_REPEATS; i++) {
            MPI_Barrier(MPI_COMM_WORLD);
            double a_s = time_tagc(comm, send, recv, part);
            MPI_Barrier(MPI_COMM_WORLD);
            double b_s = time_mpi(send, recv, part);
            if (i < 0) continue;
            ours[i] = a_s;
            theirs[i] = b_s;
        }
        double a_s = median(ours), b_s = median(theirs), n_gigabytes = 1e-9 * (double)part * (W - 1);
        if (rank == 0)
            printf("%12llu %12.1f %12.1f %10.3f %10.3f %7.2f\n", (unsigned long long)part, 1e6 * a_s,
                   1e6 * b_s, n_gigabytes / a_s, n_gigabytes / b_s, a_s / b_s);
        free(send);
        free(recv);
    }
    tagc_comm_destroy(comm);
    MPI_Finalize();
    return 0;
}
