/* Brings rows, or a part of each, from their owners to all ranks.
 *
 * In two levels, a row crosses to another host once. The rank of the same local index receives it and relays it unchanged to the
 * other ranks of its host. The comm starts the relays when the rows are here:
 *
 *   ticket     own row -> (h', l) of the other hosts, and (h, l') of the own one
 *   relays     row (h', l) -> (h, l'), one transfer for each h' */
#include "exchange/gatherer/gatherer.h"

void tagc_delivery_place(const tagc_gatherer *g, tagc_arena *arena, tagc_delivery *d) {
    size_t n_rows = (size_t)g->n_rows, n_relays = (size_t)g->n_relays;
    size_t n_relayed = n_relays * (size_t)(g->per_host - 1);
    *d = (tagc_delivery){.extents = tagc_arena_take(arena, n_rows, sizeof *d->extents),
                         .sends = tagc_arena_take(arena, n_rows - 1, sizeof *d->sends),
                         .receives = tagc_arena_take(arena, n_rows - 1, sizeof *d->receives),
                         .relays = tagc_arena_take(arena, n_relays, sizeof *d->relays),
                         .relay_sends = tagc_arena_take(arena, n_relayed, sizeof *d->relay_sends),
                         .relay_receives = tagc_arena_take(arena, n_relayed, sizeof *d->relay_receives)};
}

static tagc_part part_of(const tagc_delivery *d, int peer, int row) {
    return (tagc_part){.peer = peer, .n_bytes = d->extents[row].n_bytes, .offset = d->extents[row].offset};
}

/* Whether this rank and the owner of `row` exchange rows without a relay: on the same host, or with the same local index. */
static int needs_no_relay(const tagc_gatherer *g, int row) {
    return row / g->per_host == g->row / g->per_host || row % g->per_host == g->row % g->per_host;
}

/* Relays row (h', l), received by this rank, to (h, l'), and receives row (h', l') from there, straight into its place. */
static void post_relays(const tagc_gatherer *g, tagc_delivery *d, void *rows) {
    int host = g->row / g->per_host, local = g->row % g->per_host;
    for (int i = 0; i < g->n_relays; i++) {
        int first = (i < host ? i : i + 1) * g->per_host; /* row (h', 0) */
        tagc_part *sends = d->relay_sends + (ptrdiff_t)i * (g->per_host - 1),
                  *receives = d->relay_receives + (ptrdiff_t)i * (g->per_host - 1);
        uint32_t n_peers = 0;
        for (int l = 0; l < g->per_host; l++) {
            int peer = g->first_rank + host * g->per_host + l;
            if (l == local) continue;
            sends[n_peers] = part_of(d, peer, first + local);
            receives[n_peers++] = part_of(d, peer, first + l);
        }
        d->relays[i] = (tagc_ticket){.transfer = {.n_sends = n_peers,
                                                  .n_receives = n_peers,
                                                  .sends = sends,
                                                  .receives = receives,
                                                  .send = rows,
                                                  .recv = rows},
                                     .leg = TAGC_LEG_GATHER,
                                     .tag = g->options.tag,
                                     .of = &g->identity,
                                     .after = &d->ticket};
        tagc_comm_post(g->comm, TAGC_LANE_RELAY, &d->relays[i]);
    }
}

void tagc_delivery_post(const tagc_gatherer *g, tagc_delivery *d, tagc_lane lane, const void *own,
                        void *rows) {
    uint32_t n_peers = 0;
    for (int r = 0; r < g->n_rows; r++) {
        if (r == g->row || !needs_no_relay(g, r)) continue;
        int peer = g->first_rank + r;
        d->sends[n_peers] = (tagc_part){.peer = peer, .n_bytes = d->extents[g->row].n_bytes};
        d->receives[n_peers++] = part_of(d, peer, r);
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
    post_relays(g, d, rows);
    d->is_posted = 1;
}

int tagc_delivery_is_done(const tagc_gatherer *g, const tagc_delivery *d) {
    for (int i = 0; i < g->n_relays; i++)
        if (!tagc_comm_is_done(g->comm, &d->relays[i])) return 0;
    return tagc_comm_is_done(g->comm, &d->ticket);
}

/* Waits for all tickets even if one fails, because the comm uses their memory until then. */
tagc_status tagc_delivery_wait(const tagc_gatherer *g, tagc_delivery *d) {
    if (!d->is_posted) return TAGC_OK;
    tagc_status status = tagc_comm_wait(g->comm, &d->ticket);
    for (int i = 0; i < g->n_relays; i++) {
        tagc_status of_relay = tagc_comm_wait(g->comm, &d->relays[i]);
        status = status == TAGC_OK ? of_relay : status;
    }
    d->is_posted = 0;
    return status;
}
