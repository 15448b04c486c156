/* Every rank's options as text, gathered and compared by every rank alike. */
#include "options/options.h"

#include <stdlib.h>
#include <string.h>

enum { VALUE_BYTES = 512 };

typedef char value_text[VALUE_BYTES];

tagc_status tagc_agree_options(tagc_comm *comm, const tagc_command *command, const void *values) {
    size_t n = (size_t)command->n_options, world_size = (size_t)tagc_comm_world_size(comm);
    value_text *mine = calloc(n, sizeof *mine), *all = calloc(n * world_size, sizeof *all);
    if (!mine || !all) {
        free(mine);
        free(all);
        return tagc_fail(TAGC_ERR_MEMORY, "out of memory for the options of %zu ranks", world_size);
    }
    for (size_t i = 0; i < n; i++)
        if (command->options[i].role != TAGC_ROLE_PLACE && command->options[i].role != TAGC_ROLE_LOCAL)
            tagc_options_get(command, values, (int)i, mine[i], sizeof mine[i]);
    tagc_status status = tagc_comm_all_gather(comm, mine, n * sizeof *mine, all);
    for (size_t rank = 1; status == TAGC_OK && rank < world_size; rank++)
        for (size_t i = 0; status == TAGC_OK && i < n; i++)
            if (memcmp(all[rank * n + i], all[i], VALUE_BYTES) != 0)
                status = tagc_fail(TAGC_ERR_MISMATCH,
                                   "--%s is \"%.100s\" on rank 0 and \"%.100s\" on rank %zu;"
                                   " all ranks need the same",
                                   command->options[i].name, all[i], all[rank * n + i], rank);
    free(mine);
    free(all);
    return status;
}
