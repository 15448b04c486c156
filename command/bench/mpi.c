/* Plain MPI without tagc: point to point, and MPI's own collectives. */
#include "bench/wire.h"

#include "core/clock.h"
#include "core/status.h"

#if TAGC_HAVE_MPI
#include <limits.h>
#include <mpi.h>
#include <sched.h>
#include <stdlib.h>

enum { TAG = 77, PIECE_BYTES = 1 << 20 };

/* MPI_Waitall would never return if a rank is gone. */
static tagc_status wait_all(MPI_Request *requests, int n, double timeout_s) {
    double start_s = tagc_clock_s();
    int done = 0;
    for (;;) {
        MPI_Testall(n, requests, &done, MPI_STATUSES_IGNORE);
        if (done) return TAGC_OK;
        if (tagc_clock_s() - start_s > timeout_s)
            return tagc_fail(TAGC_ERR_TIMEOUT, "no answer within %g s to plain MPI messages", timeout_s);
        sched_yield();
    }
}

static uint64_t n_pieces(const uint64_t *n_bytes, int world_size) {
    uint64_t n = 0;
    for (int rank = 0; rank < world_size; rank++) n += (n_bytes[rank] + PIECE_BYTES - 1) / PIECE_BYTES;
    return n;
}

static int piece_at(uint64_t n_bytes, uint64_t at) {
    return (int)(n_bytes - at < PIECE_BYTES ? n_bytes - at : PIECE_BYTES);
}

/* In pieces, all posted at once: over Open MPI's TCP, one large message each way uses one direction after the other. */
tagc_status tagc_plain_mpi_exchange(const tagc_wire *wire) {
    int world_size = tagc_comm_world_size(wire->comm), rank = tagc_comm_rank(wire->comm), n = 0;
    size_t most = n_pieces(wire->n_send, world_size) + n_pieces(wire->n_recv, world_size);
    MPI_Request *requests = malloc((most + 1) * sizeof *requests); /* NOLINT: handles */
    if (!requests) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %zu messages", most);
    for (int step = 1; step < world_size; step++) {
        int from = (rank - step + world_size) % world_size;
        char *into = wire->recv + (size_t)from * wire->n_max;
        for (uint64_t at = 0; at < wire->n_recv[from]; at += PIECE_BYTES)
            MPI_Irecv(into + at, piece_at(wire->n_recv[from], at), MPI_BYTE, from, TAG, MPI_COMM_WORLD,
                      &requests[n++]);
    }
    for (int step = 1; step < world_size; step++) {
        int to = (rank + step) % world_size;
        for (uint64_t at = 0; at < wire->n_send[to]; at += PIECE_BYTES)
            MPI_Isend(wire->send + at, piece_at(wire->n_send[to], at), MPI_BYTE, to, TAG, MPI_COMM_WORLD,
                      &requests[n++]);
    }
    tagc_status status = wait_all(requests, n, wire->timeout_s);
    free(requests);
    return status;
}

/* counts (W): scratch. */
static int run(tagc_mpi_collective kind, const float *send, float *recv, int n, int *counts, int world_size) {
    if (kind == TAGC_MPI_ALL_REDUCE) return MPI_Allreduce(send, recv, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    if (kind == TAGC_MPI_ALL_GATHER)
        return MPI_Allgather(send, n, MPI_FLOAT, recv, n, MPI_FLOAT, MPI_COMM_WORLD);
    for (int i = 0; i < world_size; i++) counts[i] = n;
    return MPI_Reduce_scatter(send, recv, counts, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

tagc_status tagc_plain_mpi_collective(tagc_mpi_collective kind, const float *send, float *recv, uint64_t n) {
    int world_size;
    if (n > INT_MAX)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%llu values are more than MPI counts", (unsigned long long)n);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    int *counts = malloc((size_t)world_size * sizeof *counts);
    if (!counts) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for counts of %d ranks", world_size);
    int code = run(kind, send, recv, (int)n, counts, world_size);
    free(counts);
    return code == MPI_SUCCESS ? TAGC_OK
                               : tagc_fail(TAGC_ERR_TRANSPORT, "an MPI collective failed (%d)", code);
}

#else
static tagc_status absent(void) {
    return tagc_fail(TAGC_ERR_UNSUPPORTED, "this tagc was built without MPI");
}

tagc_status tagc_plain_mpi_exchange(const tagc_wire *wire) {
    (void)wire;
    return absent();
}

tagc_status tagc_plain_mpi_collective(tagc_mpi_collective kind, const float *send, float *recv, uint64_t n) {
    (void)kind, (void)send, (void)recv, (void)n;
    return absent();
}
#endif
