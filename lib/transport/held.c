/* What the objects of a comm hold in memory. */
#include "core/sized.h"
#include "transport/comm_private.h"
#include "transport/work.h"

static const tagc_memory nothing;
static const tagc_sized memory_struct = {"tagc_memory", sizeof(tagc_memory),
                                         offsetof(tagc_memory, device_spare_bytes) +
                                             sizeof(uint64_t), /* the last field of version 0.2 */
                                         &nothing};

void tagc_memory_init_sized(tagc_memory *memory, size_t struct_bytes) {
    tagc_sized_init(&memory_struct, memory, struct_bytes);
}

void tagc_comm_count(tagc_comm *comm, tagc_held what, int64_t n_bytes) {
    pthread_mutex_lock(&comm->lock);
    comm->n_held_bytes[what] += (uint64_t)n_bytes;
    pthread_mutex_unlock(&comm->lock);
}

tagc_status tagc_comm_memory(tagc_comm *comm, tagc_memory *memory) {
    tagc_memory found = {0};
    if (!comm) return tagc_fail(TAGC_ERR_ARGUMENT, "comm is NULL");
    if (!memory) return tagc_fail(TAGC_ERR_ARGUMENT, "memory is NULL");
    TAGC_TRY(tagc_sized_check(&memory_struct, memory));
    found.work_bytes = tagc_works_bytes(comm, NULL);
    pthread_mutex_lock(&comm->lock);
    found.residual_bytes = comm->n_held_bytes[TAGC_HELD_RESIDUAL];
    found.device_residual_bytes = comm->n_held_bytes[TAGC_HELD_RESIDUAL_THERE];
    found.buffer_bytes = comm->n_held_bytes[TAGC_HELD_BUFFERS];
    for (const tagc_spares *spares = comm->spares; spares; spares = spares->next)
        *(spares->heap->context ? &found.device_spare_bytes : &found.spare_bytes) +=
            (uint64_t)spares->n_made * spares->n_bytes;
    pthread_mutex_unlock(&comm->lock);
    tagc_sized_write(&memory_struct, &found, memory);
    return TAGC_OK;
}
