/* Memory of exchanges with kernels: rooms, work memory of batches, and residuals for the next steps. All of it is made when a unit
 * is, and belongs to the queue: units share it, since the exchange that has a buffer has everything of that number. */
#include "core/memory.h"
#include "core/status.h"
#include "gpu/queue_private.h"

#include <stdlib.h>
#include <string.h>

static const tagc_heap *heap_of(const tagc_queue *queue) {
    return &queue->kernels->arrays.heap;
}

static void free_there(const tagc_queue *queue, void *memory, size_t n_bytes) {
    heap_of(queue)->destroy(heap_of(queue)->context, memory, n_bytes);
}

/* The device's memory comes in the order of the kernels' stream; other streams use it, too. */
static tagc_status create_there(const tagc_queue *queue, size_t n_bytes, const char *what, void **out) {
    tagc_kernels *k = queue->kernels;
    TAGC_TRY(heap_of(queue)->create(k, n_bytes, what, out));
    tagc_status status = tagc_kernels_enter(k);
    if (status != TAGC_OK) return status;
    status = tagc_kernels_wait(k);
    tagc_kernels_leave(k);
    return status;
}

/* ---- rooms ---- */

/* A list that is longer, in every buffer. */
static tagc_status lengthen(tagc_queue *queue, uint32_t n) {
    for (int b = 0; b < queue->n_buffers; b++) {
        void *longer;
        TAGC_TRY(tagc_memory_create(n * sizeof(gpu_room), "rooms", &longer));
        if (queue->n_rooms) memcpy(longer, queue->buffers[b].rooms, queue->n_rooms * sizeof(gpu_room));
        tagc_memory_destroy(queue->buffers[b].rooms);
        queue->buffers[b].rooms = longer;
    }
    queue->n_rooms = n;
    return TAGC_OK;
}

static tagc_status grow_room(const tagc_queue *queue, gpu_room *room, const gpu_room *needs) {
    const tagc_runtime *runtime = runtime_of(queue);
    if (needs->here_bytes > room->here_bytes) {
        void *old = room->here, *larger = NULL;
        TAGC_TRY(tagc_device_check(queue->device,
                                   runtime->HostAlloc(&larger, needs->here_bytes, TAGC_PINNED_PORTABLE),
                                   "allocating pinned memory"));
        memset(larger, 0, ORDERS_BYTES);
        room->here = larger;
        room->here_bytes = needs->here_bytes;
        if (old) TAGC_TRY(tagc_device_check(queue->device, runtime->FreeHost(old), "freeing pinned memory"));
    }
    if (needs->there_bytes > room->there_bytes) {
        void *larger;
        free_there(queue, room->there, room->there_bytes);
        room->there = NULL;
        room->there_bytes = 0;
        TAGC_TRY(create_there(queue, needs->there_bytes, "an exchange's work memory", &larger));
        room->there = larger;
        room->there_bytes = needs->there_bytes;
    }
    return TAGC_OK;
}

static tagc_status grow_work(const tagc_queue *queue, tagc_work_area *area, size_t n_bytes) {
    void *larger;
    if (n_bytes <= area->n_bytes) return TAGC_OK;
    free_there(queue, area->memory, area->n_bytes);
    *area = (tagc_work_area){.n_moves = area->n_moves + 1};
    TAGC_TRY(create_there(queue, n_bytes, "batches' work memory", &larger));
    area->memory = larger;
    area->n_bytes = n_bytes;
    return TAGC_OK;
}

static int are_there(const tagc_queue *queue, const gpu_room *needs, uint32_t n, size_t work_bytes) {
    if (n > queue->n_rooms || work_bytes > queue->works[0].n_bytes) return 0;
    for (uint32_t i = 0; i < n; i++)
        if (needs[i].here_bytes > queue->buffers[0].rooms[i].here_bytes ||
            needs[i].there_bytes > queue->buffers[0].rooms[i].there_bytes)
            return 0;
    return 1;
}

static tagc_status grow(tagc_queue *queue, const gpu_room *needs, uint32_t n, size_t work_bytes) {
    const tagc_runtime *runtime = runtime_of(queue);
    void *streams[] = {queue->out, queue->add, queue->back};
    for (int i = 0; i < 3; i++)
        TAGC_TRY(tagc_device_check(queue->device, runtime->StreamSynchronize(streams[i]),
                                   "waiting for exchanges"));
    if (n > queue->n_rooms) TAGC_TRY(lengthen(queue, n));
    for (int b = 0; b < queue->n_buffers; b++)
        for (uint32_t i = 0; i < n; i++) TAGC_TRY(grow_room(queue, &queue->buffers[b].rooms[i], &needs[i]));
    for (int i = 0; i < 2; i++) TAGC_TRY(grow_work(queue, &queue->works[i], work_bytes));
    return TAGC_OK;
}

tagc_status tagc_rooms_reserve(tagc_queue *queue, const gpu_room *needs, uint32_t n, size_t work_bytes) {
    int before = 0;
    pthread_mutex_lock(&queue->launch);
    tagc_status status = TAGC_OK;
    if (!are_there(queue, needs, n, work_bytes)) {
        status = tagc_queue_wait_for_all(queue);
        if (status == TAGC_OK) status = tagc_device_enter(queue->device, &before);
        if (status == TAGC_OK) {
            status = grow(queue, needs, n, work_bytes);
            tagc_device_leave(queue->device, before);
        }
    }
    pthread_mutex_unlock(&queue->launch);
    return status;
}

/* With the queue's lock. */
void tagc_rooms_stop(tagc_queue *queue) {
    for (int b = 0; b < queue->n_buffers; b++)
        for (uint32_t i = 0; i < queue->n_rooms; i++) {
            tagc_orders *orders = (tagc_orders *)(void *)queue->buffers[b].rooms[i].here;
            if (!orders) continue;
            orders->stop[0] = orders->stop[1] = 1;
            orders->verdict.failure = TAGC_ERR_STATE;
        }
}

void tagc_rooms_destroy(tagc_queue *queue) {
    const tagc_runtime *runtime = runtime_of(queue);
    for (int b = 0; b < queue->n_buffers; b++) {
        for (uint32_t i = 0; i < queue->n_rooms; i++) {
            gpu_room *room = &queue->buffers[b].rooms[i];
            if (room->here) runtime->FreeHost(room->here);
            free_there(queue, room->there, room->there_bytes);
        }
        tagc_memory_destroy(queue->buffers[b].rooms);
        queue->buffers[b].rooms = NULL;
    }
    queue->n_rooms = 0;
    for (int i = 0; i < 2; i++) free_there(queue, queue->works[i].memory, queue->works[i].n_bytes);
}

/* ---- residuals ---- */

static void release(tagc_queue *queue, tagc_turns *turns) {
    if (--turns->n_users > 0) return;
    tagc_turns **link = &queue->turns;
    while (*link != turns) link = &(*link)->next;
    *link = turns->next;
    for (int b = 0; b < queue->n_buffers; b++) free_there(queue, turns->spares[b], turns->n_bytes);
    tagc_memory_destroy(turns);
}

static tagc_status acquire(tagc_queue *queue, size_t n_bytes, uint32_t nth, tagc_turns **out) {
    tagc_turns *turns = queue->turns;
    while (turns && (turns->n_bytes != n_bytes || turns->nth != nth)) turns = turns->next;
    if (!turns) {
        void *memory;
        TAGC_TRY(tagc_memory_create(sizeof *turns, "residuals of exchanges under way", &memory));
        turns = memory;
        *turns = (tagc_turns){.n_bytes = n_bytes, .nth = nth, .next = queue->turns};
        queue->turns = turns;
    }
    turns->n_users++;
    for (int b = 0; b < queue->n_buffers; b++) {
        if (turns->spares[b]) continue;
        tagc_status status = create_there(queue, n_bytes, "a spare residual", &turns->spares[b]);
        if (status == TAGC_OK) continue;
        release(queue, turns);
        return status;
    }
    *out = turns;
    return TAGC_OK;
}

tagc_status tagc_turns_acquire(tagc_queue *queue, size_t n_bytes, uint32_t nth, tagc_turns **out) {
    *out = NULL;
    pthread_mutex_lock(&queue->launch);
    tagc_status status = acquire(queue, n_bytes, nth, out);
    pthread_mutex_unlock(&queue->launch);
    return status;
}

void tagc_turns_release(tagc_queue *queue, tagc_turns *turns) {
    if (!turns) return;
    pthread_mutex_lock(&queue->launch);
    release(queue, turns);
    pthread_mutex_unlock(&queue->launch);
}
