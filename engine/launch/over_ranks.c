/* One all-gather of doubles. Every rank then reduces them in rank order, so that all get the same bits. */
#include "launch/over_ranks.h"

#include "core/status.h"
#include <stdlib.h>

static tagc_status over_ranks(tagc_comm *comm, double *values, int n, int mean) {
    int world_size = tagc_comm_world_size(comm);
    size_t n_bytes = (size_t)n * sizeof *values;
    double *all = calloc((size_t)world_size, n_bytes);
    if (!all) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for figures of %d ranks", world_size);
    tagc_status status = tagc_comm_all_gather(comm, values, n_bytes, all, (size_t)world_size * n_bytes);
    for (int i = 0; status == TAGC_OK && i < n; i++) {
        double most = all[i], sum = 0;
        for (int rank = 0; rank < world_size; rank++) {
            double value = all[rank * n + i];
            sum += value;
            if (value > most) most = value;
        }
        values[i] = mean ? sum / world_size : most;
    }
    free(all);
    return status;
}

tagc_status tagc_max_over_ranks(tagc_comm *comm, double *values, int n) {
    return over_ranks(comm, values, n, 0);
}

tagc_status tagc_mean_over_ranks(tagc_comm *comm, double *values, int n) {
    return over_ranks(comm, values, n, 1);
}

tagc_status tagc_alone_open(tagc_alone *out) {
    *out = (tagc_alone){0};
    TAGC_TRY(tagc_local_group_create(1, &out->group));
    return tagc_comm_create_local(out->group, 0, NULL, &out->comm);
}

void tagc_alone_close(tagc_alone *alone) {
    tagc_comm_destroy(alone->comm);
    tagc_local_group_destroy(alone->group);
}
