/* After MPI_Finalize nothing here calls MPI, which would end the process: each call returns a status with a text. */
#include "../lengths.h"
#include "tagc/mpi.h"
#include "tagc/tagc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 64, MOST = 4 * N };

static int is_ended_well(const char *call, tagc_status status) {
    int is_well = status == TAGC_ERR_STATE && strstr(tagc_last_error(), "MPI has been finalised");
    if (!is_well) fprintf(stderr, "%s: %s: %s\n", call, tagc_status_name(status), tagc_last_error());
    return is_well;
}

static tagc_comm *make_comm(void) {
    tagc_comm *comm = NULL;
    if (tagc_comm_create_mpi(MPI_COMM_WORLD, NULL, &comm) != TAGC_OK || tagc_comm_barrier(comm) != TAGC_OK) {
        fprintf(stderr, "no comm: %s\n", tagc_last_error());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return comm;
}

int main(int argc, char **argv) {
    static float gradient[MOST], output[MOST], shard[N], full[MOST];
    int level, W, is_well = 1;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_size(MPI_COMM_WORLD, &W);
    if (W > 4) MPI_Abort(MPI_COMM_WORLD, 1);
    tagc_comm *comms[4];
    for (int i = 0; i < 4; i++) comms[i] = make_comm(); /* a comm that has failed is broken */
    tagc_reducer *reducer = NULL;
    tagc_gatherer *gatherer = NULL;
    tagc_reducer_options o;
    tagc_gatherer_options g;
    tagc_reducer_options_init(&o);
    tagc_gatherer_options_init(&g);
    o.n_elems = g.n_elems = (uint64_t)(W * N);
    is_well &= tagc_reducer_create(comms[1], &o, &reducer) == TAGC_OK;
    is_well &= run_reducer(reducer, gradient, output, NULL) == TAGC_OK;
    is_well &= tagc_gatherer_create(comms[2], &g, &gatherer) == TAGC_OK;
    if (!is_well) MPI_Abort(MPI_COMM_WORLD, 1);

    MPI_Finalize(); /* comms should have been destroyed before */

    if (W > 1) { /* one rank alone sends nothing */
        is_well &= is_ended_well("barrier", tagc_comm_barrier(comms[0]));
        is_well &= is_ended_well("reducer", run_reducer(reducer, gradient, output, NULL));
        tagc_status status = begin_gatherer(gatherer, shard, full);
        is_well &= is_ended_well("gatherer", status == TAGC_OK ? tagc_gatherer_end(gatherer) : status);
    }
    tagc_comm *late = comms[0];
    is_well &= is_ended_well("create", tagc_comm_create_mpi(MPI_COMM_WORLD, NULL, &late)) && !late;
    tagc_comm_abort(comms[3], "");
    tagc_reducer_destroy(reducer);
    tagc_gatherer_destroy(gatherer);
    for (int i = 0; i < 4; i++) tagc_comm_destroy(comms[i]);
    return !is_well;
}
