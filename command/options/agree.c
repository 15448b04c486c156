/* Every rank's options, gathered and compared by every rank alike. */
#include "options/options.h"

#include <stdlib.h>
#include <string.h>

/* Its beginning, and a checksum of all of it. */
typedef struct value_text {
    char begin[120];
    uint64_t sum;
} value_text;

static void describe(const tagc_command *command, const void *values, int i, value_text *out) {
    const tagc_option *option = &command->options[i];
    tagc_options_get(command, values, i, out->begin, sizeof out->begin);
    if (option->type != TAGC_OPTION_TEXT) return;
    const char *held = *(const char *const *)((const char *)values + option->offset);
    if (held) out->sum = tagc_checksum(held, strlen(held));
}

tagc_status tagc_agree_options(tagc_comm *comm, const tagc_command *command, const void *values) {
    size_t n = (size_t)command->n_options, world_size = (size_t)tagc_comm_world_size(comm);
    value_text *values_here = calloc(n, sizeof *values_here), *all = calloc(n * world_size, sizeof *all);
    if (!values_here || !all) {
        free(values_here);
        free(all);
        return tagc_fail(TAGC_ERR_MEMORY, "out of memory for the options of %zu ranks", world_size);
    }
    for (size_t i = 0; i < n; i++)
        if (command->options[i].role != TAGC_ROLE_PLACE && command->options[i].role != TAGC_ROLE_LOCAL)
            describe(command, values, (int)i, &values_here[i]);
    tagc_status status =
        tagc_comm_all_gather(comm, values_here, n * sizeof *values_here, all, n * world_size * sizeof *all);
    for (size_t rank = 1; status == TAGC_OK && rank < world_size; rank++)
        for (size_t i = 0; status == TAGC_OK && i < n; i++)
            if (all[rank * n + i].sum != all[i].sum ||
                memcmp(all[rank * n + i].begin, all[i].begin, sizeof all[i].begin) != 0)
                status = tagc_fail(TAGC_ERR_MISMATCH,
                                   "--%s is \"%.100s\" on rank 0 and \"%.100s\" on rank %zu;"
                                   " all ranks need the same",
                                   command->options[i].name, all[i].begin, all[rank * n + i].begin, rank);
    free(values_here);
    free(all);
    return status;
}
