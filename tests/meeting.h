/* The smallest network: a blocking one, for tagc_comm_create_callback. All ranks meet, then each copies what is for it.
 * It has no lanes. */
#ifndef TAGC_TESTS_MEETING_H
#define TAGC_TESTS_MEETING_H

#include "take_from.h"

#include <pthread.h>

#define MEETING_MAX_RANKS 16

typedef struct meeting {
    pthread_barrier_t barrier; /* of all ranks; init and destroy are the test's */
    const tagc_transfer *transfers[MEETING_MAX_RANKS];
} meeting;

typedef struct seat {
    meeting *meeting;
    int rank, world_size;
} seat;

static inline tagc_status exchange_all(void *context, const tagc_transfer *transfer) {
    seat *self = context;
    meeting *m = self->meeting;
    m->transfers[self->rank] = transfer;
    pthread_barrier_wait(&m->barrier);
    int is_same = 1;
    for (int s = 0; s < self->world_size; s++)
        if (s != self->rank) is_same &= take_from(m->transfers[s], transfer, s, self->rank, NULL);
    pthread_barrier_wait(&m->barrier);
    return is_same ? TAGC_OK : tagc_report(TAGC_ERR_CORRUPT, "ranks are in different transfers");
}

static const tagc_callback_ops meeting_ops = {.abi = TAGC_TRANSPORT_ABI, .exchange = exchange_all};

#endif
