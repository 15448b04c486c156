/* Spare residuals, shared by reducers of one size. */
#include "core/memory.h"
#include "transport/comm_private.h"

int tagc_comm_n_spares(uint64_t more_bytes, uint64_t n_bytes, int n_users) {
    uint64_t n = more_bytes / (n_bytes ? n_bytes : 1);
    n = n < TAGC_MOST_SPARES ? n + 1 : TAGC_MOST_SPARES;
    return n < (uint64_t)n_users ? (int)n : n_users;
}

/* With the lock. */
static int lacks_some(const tagc_comm *comm, const tagc_spares *spares) {
    return spares->n_made <
           tagc_comm_n_spares(comm->options.more_work_bytes, spares->n_bytes, spares->n_users);
}

/* With the lock. */
static tagc_spares *find(tagc_comm *comm, uint64_t n_bytes, const tagc_heap *heap) {
    tagc_spares *spares = comm->spares;
    while (spares && (spares->n_bytes != n_bytes || spares->heap != heap)) spares = spares->next;
    return spares;
}

/* Allocates without the lock, which the comm thread needs. The new user is counted first, so that the spares it found
 * stay. Others may have made some meanwhile. */
tagc_status tagc_comm_spares_acquire(tagc_comm *comm, uint64_t n_bytes, const tagc_heap *heap,
                                     tagc_spares **out) {
    *out = NULL;
    pthread_mutex_lock(&comm->lock);
    tagc_spares *spares = find(comm, n_bytes, heap);
    if (spares) spares->n_users++;
    int wants_more = !spares || lacks_some(comm, spares);
    pthread_mutex_unlock(&comm->lock);
    void *memory = NULL, *values = NULL;
    if (!spares) TAGC_TRY(tagc_memory_create(sizeof *spares, "spare residual", &memory));
    tagc_status status =
        wants_more ? heap->create(heap->context, (size_t)n_bytes, "spare residual", &values) : TAGC_OK;
    if (status != TAGC_OK) {
        tagc_comm_spares_release(comm, spares);
        tagc_memory_destroy(memory);
        return status;
    }
    pthread_mutex_lock(&comm->lock);
    if (!spares && (spares = find(comm, n_bytes, heap)))
        spares->n_users++; /* another thread made them meanwhile */
    if (!spares) {
        spares = memory;
        memory = NULL;
        *spares = (tagc_spares){.n_bytes = n_bytes, .heap = heap, .n_users = 1, .next = comm->spares};
        comm->spares = spares;
    }
    if (values && lacks_some(comm, spares)) {
        spares->n_made++;
        spares->free[spares->n_free++] = values;
        values = NULL;
    }
    pthread_mutex_unlock(&comm->lock);
    heap->destroy(heap->context, values, (size_t)n_bytes);
    tagc_memory_destroy(memory);
    *out = spares;
    return TAGC_OK;
}

/* The releasing reducer has no step in progress, so if there is one spare too many, one is free. */
void tagc_comm_spares_release(tagc_comm *comm, tagc_spares *spares) {
    if (!spares) return;
    void *values = NULL;
    uint64_t n_bytes = spares->n_bytes;
    const tagc_heap *heap = spares->heap;
    pthread_mutex_lock(&comm->lock);
    int n_users = --spares->n_users;
    if (spares->n_made > n_users) {
        spares->n_made--;
        values = spares->free[--spares->n_free];
    }
    if (n_users == 0) {
        tagc_spares **link = &comm->spares;
        while (*link != spares) link = &(*link)->next;
        *link = spares->next;
    }
    pthread_mutex_unlock(&comm->lock);
    heap->destroy(heap->context, values, (size_t)n_bytes);
    if (n_users == 0) tagc_memory_destroy(spares);
}

void *tagc_comm_spare_take(tagc_comm *comm, tagc_spares *spares) {
    pthread_mutex_lock(&comm->lock);
    void *values = spares->n_free ? spares->free[--spares->n_free] : NULL;
    pthread_mutex_unlock(&comm->lock);
    return values;
}

void tagc_comm_spare_give(tagc_comm *comm, tagc_spares *spares, void *spare) {
    pthread_mutex_lock(&comm->lock);
    spares->free[spares->n_free++] = spare;
    pthread_mutex_unlock(&comm->lock);
}
