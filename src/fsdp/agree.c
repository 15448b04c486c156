/* One failure for all: a rank that fails alone would leave the others waiting in their next collective. So
 * every rank tells how it fared at agreed places, and all leave together with one text. */
#include "fsdp/internal.h"
#include <stdlib.h>
#include <string.h>

typedef struct tagc_verdict {
    int status;
    char text[TAGC_ERROR_TEXT_BYTES];
} tagc_verdict;

tagc_status tagc_agree(tagc_comm *comm, tagc_status status) {
    int world_size = tagc_comm_world_size(comm);
    if (world_size == 1) return status;
    int statuses[1024]; /* the largest world */
    int own = (int)status;
    tagc_verdict mine = {.status = (int)status};
    if (status != TAGC_OK) strncpy(mine.text, tagc_last_error(), sizeof mine.text - 1);
    if (status == TAGC_ERR_TRANSPORT) return status; /* nobody can be told any more */
    TAGC_TRY(tagc_comm_all_gather(comm, &own, sizeof own, statuses));
    int failed = 0;
    while (failed < world_size && statuses[failed] == TAGC_OK) failed++;
    if (failed == world_size) return TAGC_OK;

    tagc_verdict *all = calloc((size_t)world_size, sizeof *all);
    if (all == NULL) tagc_comm_abort(comm, "out of memory while telling of a failure");
    if (all == NULL) return tagc_fail(TAGC_ERR_MEMORY, "no memory for %d verdicts", world_size);
    tagc_status sent = tagc_comm_all_gather(comm, &mine, sizeof mine, all);
    if (sent == TAGC_OK) {
        all[failed].text[TAGC_ERROR_TEXT_BYTES - 1] = 0;
        sent = tagc_fail((tagc_status)all[failed].status, "rank %d: %s", failed, all[failed].text);
    }
    free(all);
    return sent;
}
