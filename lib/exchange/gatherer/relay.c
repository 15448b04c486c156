/* Two levels: relays rows from other hosts to the ranks of this host. */
#include "exchange/gatherer/gatherer.h"

/* Relays row (h', l), received by this rank, to (h, l'), and receives row (h', l') from there, straight into its place. */
void tagc_gatherer_post_relays(tagc_gatherer *g, uint64_t n_bytes, uint64_t stride, uint8_t *rows) {
    int host = g->row / g->per_host, local = g->row % g->per_host;
    uint32_t n_peers = 0;
    for (int l = 0; g->n_relays > 0 && l < g->per_host; l++) {
        int peer = g->first_rank + host * g->per_host + l;
        if (l == local) continue;
        g->relay_sends[n_peers] = (tagc_part){.peer = peer, .n_bytes = n_bytes};
        g->relay_receives[n_peers++] =
            (tagc_part){.peer = peer, .n_bytes = n_bytes, .offset = (uint64_t)l * stride};
    }
    for (int i = 0; i < g->n_relays; i++) {
        uint8_t *of_host = rows + (uint64_t)((i < host ? i : i + 1) * g->per_host) * stride;
        g->relays[i] = (tagc_ticket){
            .transfer = {.n_sends = n_peers,
                         .n_receives = n_peers,
                         .sends = g->relay_sends,
                         .receives = g->relay_receives,
                         .send = of_host + (uint64_t)local * stride,
                         .recv = of_host},
            .leg = TAGC_LEG_GATHER,
            .tag = g->options.tag,
            .after = &g->ticket,
        };
        tagc_comm_post(g->comm, TAGC_LANE_RELAY, &g->relays[i]);
    }
}
