/* Brings rows, or a part of each, from their owners to all ranks. */
#include "exchange/gatherer/gatherer.h"

void tagc_delivery_place(const tagc_gatherer *g, tagc_arena *arena, tagc_delivery *d) {
    size_t n = (size_t)g->world_size;
    *d = (tagc_delivery){.extents = tagc_arena_take(arena, n, sizeof *d->extents),
                         .sends = tagc_arena_take(arena, n - 1, sizeof *d->sends),
                         .receives = tagc_arena_take(arena, n - 1, sizeof *d->receives)};
}

void tagc_delivery_post(const tagc_gatherer *g, tagc_delivery *d, tagc_lane lane, const void *own,
                        void *rows) {
    uint32_t n_peers = 0;
    for (int peer = 0; peer < g->world_size; peer++) {
        if (peer == g->rank) continue;
        d->sends[n_peers] = (tagc_part){.peer = peer, .n_bytes = d->extents[g->rank].n_bytes};
        d->receives[n_peers++] =
            (tagc_part){.peer = peer, .n_bytes = d->extents[peer].n_bytes, .offset = d->extents[peer].offset};
    }
    d->ticket = (tagc_ticket){.transfer = {.n_sends = n_peers,
                                           .n_receives = n_peers,
                                           .sends = d->sends,
                                           .receives = d->receives,
                                           .send = own,
                                           .recv = rows},
                              .leg = TAGC_LEG_GATHER,
                              .tag = g->options.tag,
                              .of = &g->identity};
    tagc_comm_post(g->comm, lane, &d->ticket);
    d->is_posted = 1;
}

int tagc_delivery_is_done(const tagc_gatherer *g, const tagc_delivery *d) {
    return tagc_comm_is_done(g->comm, &d->ticket);
}

tagc_status tagc_delivery_wait(const tagc_gatherer *g, tagc_delivery *d) {
    if (!d->is_posted) return TAGC_OK;
    d->is_posted = 0;
    return tagc_comm_wait(g->comm, &d->ticket);
}
