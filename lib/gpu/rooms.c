/* Memory of exchanges with kernels, in every buffer of a queue, and work memory of batches. It is made when a unit is, and belongs
 * to the queue: units share it, since the exchange that has a buffer has everything of that number. */
#include "core/memory.h"
#include "core/status.h"
#include "gpu/queue_private.h"

#include <string.h>

void tagc_there_destroy(const tagc_queue *queue, void *memory, size_t n_bytes) {
    const tagc_heap *heap = &queue->kernels->arrays.heap;
    heap->destroy(heap->context, memory, n_bytes);
}

tagc_status tagc_there_create(const tagc_queue *queue, size_t n_bytes, const char *what, void **out) {
    tagc_kernels *k = queue->kernels;
    TAGC_TRY(k->arrays.heap.create(k, n_bytes, what, out));
    tagc_status status = tagc_kernels_enter(k);
    if (status != TAGC_OK) return status;
    status = tagc_kernels_wait(k);
    tagc_kernels_leave(k);
    return status;
}

/* ---- growing; the old memory stays until the new one is there ---- */

static tagc_status grow_here(tagc_queue *queue, char **memory, size_t n_bytes) {
    const tagc_runtime *runtime = runtime_of(queue);
    void *larger = NULL, *old = *memory;
    TAGC_TRY(tagc_device_check(queue->device, runtime->HostAlloc(&larger, n_bytes, TAGC_PINNED_PORTABLE),
                               "allocating pinned memory"));
    memset(larger, 0, n_bytes);
    pthread_mutex_lock(&queue->lock); /* tagc_rooms_stop writes to what is there */
    *memory = larger;
    pthread_mutex_unlock(&queue->lock);
    return old ? tagc_device_check(queue->device, runtime->FreeHost(old), "freeing pinned memory") : TAGC_OK;
}

static tagc_status grow_there(const tagc_queue *queue, char **memory, size_t old_bytes, size_t n_bytes) {
    void *larger;
    TAGC_TRY(tagc_there_create(queue, n_bytes, "an exchange's work memory", &larger));
    tagc_there_destroy(queue, *memory, old_bytes);
    *memory = larger;
    return TAGC_OK;
}

static tagc_status grow_heads(tagc_queue *queue, const rooms_needs *to) {
    rooms_needs *has = &queue->rooms;
    for (int b = 0; b < queue->n_buffers; b++) {
        buffer *one = &queue->buffers[b];
        TAGC_TRY(grow_here(queue, &one->here.head, to->n_rooms * to->head_bytes));
        TAGC_TRY(grow_there(queue, &one->there.head, has->n_rooms * has->head_bytes,
                            to->n_rooms * to->head_bytes));
    }
    pthread_mutex_lock(&queue->lock); /* tagc_rooms_stop reads them */
    has->n_rooms = to->n_rooms;
    has->head_bytes = to->head_bytes;
    pthread_mutex_unlock(&queue->lock);
    return TAGC_OK;
}

static tagc_status grow(tagc_queue *queue, const rooms_needs *to) {
    const tagc_runtime *runtime = runtime_of(queue);
    void *streams[] = {queue->out, queue->add, queue->back};
    rooms_needs *has = &queue->rooms;
    for (int i = 0; i < 3; i++)
        TAGC_TRY(tagc_device_check(queue->device, runtime->StreamSynchronize(streams[i]),
                                   "waiting for exchanges"));
    if (to->n_rooms > has->n_rooms || to->head_bytes > has->head_bytes) TAGC_TRY(grow_heads(queue, to));
    for (int b = 0; b < queue->n_buffers; b++) {
        buffer *one = &queue->buffers[b];
        if (to->here_bytes > has->here_bytes) TAGC_TRY(grow_here(queue, &one->here.rest, to->here_bytes));
        if (to->there_bytes > has->there_bytes)
            TAGC_TRY(grow_there(queue, &one->there.rest, has->there_bytes, to->there_bytes));
    }
    has->here_bytes = to->here_bytes;
    has->there_bytes = to->there_bytes;
    for (int i = 0; i < N_WORKS; i++) {
        if (to->work_bytes[i] == has->work_bytes[i]) continue;
        TAGC_TRY(grow_there(queue, &queue->works[i].memory, has->work_bytes[i], to->work_bytes[i]));
        has->work_bytes[i] = to->work_bytes[i];
        queue->works[i].n_moves++;
    }
    return TAGC_OK;
}

tagc_status tagc_rooms_reserve(tagc_queue *queue, const rooms_needs *needs) {
    const rooms_needs *has = &queue->rooms;
    int before = 0;
    pthread_mutex_lock(&queue->launch);
    rooms_needs to = {.n_rooms = needs->n_rooms > has->n_rooms ? needs->n_rooms : has->n_rooms,
                      .head_bytes = larger_of(needs->head_bytes, has->head_bytes),
                      .here_bytes = larger_of(needs->here_bytes, has->here_bytes),
                      .there_bytes = larger_of(needs->there_bytes, has->there_bytes)};
    for (int i = 0; i < N_WORKS; i++) to.work_bytes[i] = larger_of(needs->work_bytes[i], has->work_bytes[i]);
    tagc_status status = TAGC_OK;
    if (memcmp(&to, has, sizeof to) != 0) {
        status = tagc_queue_wait_for_all(queue);
        if (status == TAGC_OK) status = tagc_device_enter(queue->device, &before);
        if (status == TAGC_OK) {
            status = grow(queue, &to);
            tagc_device_leave(queue->device, before);
        }
    }
    pthread_mutex_unlock(&queue->launch);
    return status;
}

gpu_room tagc_room_of(const ticket *one, uint32_t i, size_t at_here, size_t at_there) {
    const buffer *of = &one->queue->buffers[one->buffer];
    size_t at_head = i * one->queue->rooms.head_bytes;
    return (gpu_room){.here = {of->here.head + at_head, of->here.rest + at_here},
                      .there = {of->there.head + at_head, of->there.rest + at_there}};
}

/* With the queue's lock. What has finished may still be on its way to the device, which reads its orders. */
void tagc_rooms_stop(tagc_queue *queue) {
    unsigned is_unfinished = 0; /* a bit for each buffer */
    for (uint64_t n = queue->n_finished + 1; n <= queue->n_enqueued; n++)
        is_unfinished |= 1u << ticket_of(queue, n)->buffer;
    for (int b = 0; b < queue->n_buffers; b++)
        for (uint32_t i = 0; (is_unfinished >> b & 1) && i < queue->rooms.n_rooms; i++) {
            char *head = queue->buffers[b].here.head + i * queue->rooms.head_bytes;
            *(tagc_orders *)(void *)head = (tagc_orders){.stop = {1, 1}, .is_void = 1};
        }
}

void tagc_rooms_destroy(tagc_queue *queue) {
    const tagc_runtime *runtime = runtime_of(queue);
    const rooms_needs *has = &queue->rooms;
    for (int b = 0; b < queue->n_buffers; b++) {
        buffer *one = &queue->buffers[b];
        if (one->here.head) runtime->FreeHost(one->here.head);
        if (one->here.rest) runtime->FreeHost(one->here.rest);
        tagc_there_destroy(queue, one->there.head, has->n_rooms * has->head_bytes);
        tagc_there_destroy(queue, one->there.rest, has->there_bytes);
        one->here = one->there = (gpu_side){NULL, NULL};
    }
    for (int i = 0; i < N_WORKS; i++) tagc_there_destroy(queue, queue->works[i].memory, has->work_bytes[i]);
}
