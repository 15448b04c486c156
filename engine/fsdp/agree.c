/* A rank that leaves alone after a failure would let the others wait in their next collective. So all ranks exchange
 * their status at agreed places, and all return the same failure. */
#include "fsdp/internal.h"

#include <stdlib.h>
#include <string.h>

typedef struct verdict {
    int status;
    char text[TAGC_ERROR_TEXT_BYTES];
} verdict;

tagc_status tagc_agree(tagc_comm *comm, tagc_status status) {
    int world_size = tagc_comm_world_size(comm);
    if (world_size == 1 || status == TAGC_ERR_TRANSPORT || status == TAGC_ERR_TIMEOUT)
        return status; /* no other rank, or none can be reached */
    verdict mine = {.status = (int)status};
    if (status != TAGC_OK) strncpy(mine.text, tagc_last_error(), sizeof mine.text - 1);
    verdict *all = calloc((size_t)world_size, sizeof *all);
    if (all == NULL) {
        tagc_comm_abort(comm, "no memory to agree on a failure");
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for %d verdicts", world_size);
    }
    tagc_status agreed =
        tagc_comm_all_gather(comm, &mine, sizeof mine, all, (size_t)world_size * sizeof *all);
    for (int rank = 0; agreed == TAGC_OK && rank < world_size; rank++) {
        if (all[rank].status == TAGC_OK) continue;
        all[rank].text[TAGC_ERROR_TEXT_BYTES - 1] = 0;
        agreed = tagc_fail(tagc_status_told(all[rank].status), "rank %d: %s", rank, all[rank].text);
    }
    free(all);
    return agreed;
}
