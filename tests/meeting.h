/* The smallest network: a blocking one, for tagc_comm_create_callback. All ranks meet, then each copies what is for it.
 * It has no lanes. */
#ifndef TAGC_TESTS_MEETING_H
#define TAGC_TESTS_MEETING_H

#include "tagc/transport.h"

#include <pthread.h>
#include <string.h>

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
    int same = 1;
    for (int s = 0; s < self->world_size; s++) {
        const tagc_transfer *peer = m->transfers[s];
        uint64_t n_bytes = transfer->recv_bytes[s];
        same &= peer->send_bytes[self->rank] == n_bytes;
        char *to = (char *)transfer->recv + transfer->recv_offset[s];
        const char *from = (const char *)peer->send + peer->send_offset[self->rank];
        /* To itself at the same place is no copy: others may be reading there. */
        if (n_bytes && same && to != from) memmove(to, from, n_bytes);
    }
    pthread_barrier_wait(&m->barrier);
    return same ? TAGC_OK : tagc_report(TAGC_ERR_CORRUPT, "ranks are in different transfers");
}

#endif
