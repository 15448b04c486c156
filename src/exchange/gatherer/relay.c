/* Two levels: what came from another host goes on to the ranks of the own one. */
#include "exchange/gatherer/gatherer.h"

/* Rows (h', l) as they came to (h, l'), and (h', l') from there, straight to where they belong. */
void tagc_gatherer_post_relays(tagc_gatherer *g, uint64_t n_bytes, uint64_t stride, uint8_t *rows) {
    int host = g->row / g->per_host, local = g->row % g->per_host;
    for (int l = 0; g->n_relays > 0 && l < g->per_host; l++) {
        int peer = g->first_rank + host * g->per_host + l;
        g->relay_bytes[peer] = l == local ? 0 : n_bytes;
        g->relay_offset[peer] = (uint64_t)l * stride;
    }
    for (int i = 0; i < g->n_relays; i++) {
        uint8_t *of_host = rows + (uint64_t)((i < host ? i : i + 1) * g->per_host) * stride;
        g->relays[i] = (tagc_ticket){
            .transfer = {.send = of_host + (uint64_t)local * stride,
                         .send_bytes = g->relay_bytes,
                         .send_offset = g->send_offset,
                         .recv = of_host,
                         .recv_bytes = g->relay_bytes,
                         .recv_offset = g->relay_offset},
            .leg = TAGC_LEG_GATHER,
            .tag = g->options.tag,
            .after = &g->ticket,
        };
        tagc_comm_post(g->comm, TAGC_LANE_RELAY, &g->relays[i]);
    }
}
