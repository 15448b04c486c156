/* A comm of some ranks of another, as those of a host or of a place are. */
#include "core/memory.h"
#include "transport/comm_private.h"

void tagc_comm_set_split(tagc_comm *comm, tagc_split_fn split) {
    comm->split = split;
}

/* colors, members (W,); members: the first n are those of the group. */
static void find_group(const tagc_comm *comm, int color, const int32_t *colors, int32_t *members,
                       tagc_split_group *group) {
    *group = (tagc_split_group){.color = color};
    for (int rank = 0; rank < comm->world_size; rank++) {
        if (colors[rank] != color) continue;
        if (rank == comm->rank) group->index = group->n;
        if (group->n == 0) group->leader = rank;
        members[group->n++] = comm->names[rank];
    }
}

static void join_whole(tagc_comm *part, tagc_comm *whole) {
    pthread_mutex_lock(&whole->lock);
    part->whole = whole;
    part->next_part = whole->parts;
    whole->parts = part;
    pthread_mutex_unlock(&whole->lock);
}

void tagc_comm_leave_whole(tagc_comm *comm) {
    tagc_comm *whole = comm->whole;
    if (!whole) return;
    pthread_mutex_lock(&whole->lock);
    tagc_comm **at = &whole->parts;
    while (*at != comm) at = &(*at)->next_part;
    *at = comm->next_part;
    pthread_mutex_unlock(&whole->lock);
    comm->whole = NULL;
}

tagc_status tagc_comm_split(tagc_comm *comm, int color, tagc_comm **out) {
    int32_t own = color;
    size_t n = (size_t)comm->world_size;
    void *memory;
    *out = NULL;
    if (!comm->split)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "a comm over %s cannot be split into hosts", comm->ops->name);
    tagc_status status = tagc_memory_create(2 * n * sizeof own, "colors of ranks", &memory);
    if (status != TAGC_OK) {
        tagc_comm_abort(comm, "no memory for the colors of ranks");
        return status;
    }
    int32_t *colors = memory, *members = colors + n;
    status = tagc_comm_all_gather(comm, &own, sizeof own, colors, n * sizeof *colors);
    if (status == TAGC_OK) {
        tagc_split_group group;
        tagc_comm_options options = comm->options;
        find_group(comm, color, colors, members, &group);
        options.names = members;
        status = comm->split(comm, &group, &options, out);
    }
    if (status == TAGC_OK) join_whole(*out, comm);
    tagc_memory_destroy(memory);
    return status;
}
