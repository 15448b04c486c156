/* Checks of transfers before they reach a transport. */
#include "transport/comm_private.h"

enum { N_LANES = 8 };

const tagc_part *tagc_find_part(const tagc_part *parts, uint32_t n_parts, int peer) {
    uint32_t low = 0, high = n_parts;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (parts[middle].peer < peer)
            low = middle + 1;
        else
            high = middle;
    }
    return low < n_parts && parts[low].peer == peer ? &parts[low] : NULL;
}

tagc_status tagc_transport_check_abi(uint32_t abi) {
    if (abi == TAGC_TRANSPORT_ABI) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT,
                     "ops.abi is %u, must be %u (TAGC_TRANSPORT_ABI): build the transport with this library's"
                     " tagc/transport.h",
                     abi, TAGC_TRANSPORT_ABI);
}

static tagc_status check_parts(const char *name, const tagc_part *parts, uint32_t n_parts, const void *buffer,
                               uint64_t most_bytes, int rank, int world_size) {
    if (n_parts >= (uint32_t)world_size)
        return tagc_fail(TAGC_ERR_ARGUMENT, "transfer.n_%s is %u, must be at most %d, one less than ranks",
                         name, n_parts, world_size - 1);
    if (n_parts && !parts)
        return tagc_fail(TAGC_ERR_ARGUMENT, "transfer.%s is NULL and transfer.n_%s is %u", name, name,
                         n_parts);
    for (uint32_t i = 0; i < n_parts; i++) {
        int peer = parts[i].peer;
        if (peer < 0 || peer >= world_size)
            return tagc_fail(TAGC_ERR_ARGUMENT, "transfer.%s[%u].peer is %d, must be in [0, %d)", name, i,
                             peer, world_size);
        if (peer == rank)
            return tagc_fail(TAGC_ERR_ARGUMENT, "transfer.%s[%u].peer is %d, this rank itself", name, i,
                             peer);
        if (i > 0 && peer <= parts[i - 1].peer)
            return tagc_fail(TAGC_ERR_ARGUMENT, "transfer.%s[%u].peer is %d after %d: peers must ascend",
                             name, i, peer, parts[i - 1].peer);
        if (parts[i].n_bytes && !buffer)
            return tagc_fail(TAGC_ERR_ARGUMENT, "transfer.%s[%u] has %llu bytes, and their buffer is NULL",
                             name, i, (unsigned long long)parts[i].n_bytes);
        if (most_bytes && parts[i].n_bytes > most_bytes)
            return tagc_fail(TAGC_ERR_ARGUMENT,
                             "transfer.%s[%u] has %llu bytes, transfer.round_bytes is %llu", name, i,
                             (unsigned long long)parts[i].n_bytes, (unsigned long long)most_bytes);
    }
    return TAGC_OK;
}

tagc_status tagc_transfer_check(const tagc_transfer *t, int rank, int world_size) {
    if (t->lane >= N_LANES)
        return tagc_fail(TAGC_ERR_ARGUMENT, "transfer.lane is %u, must be below %d", t->lane, N_LANES);
    TAGC_TRY(check_parts("sends", t->sends, t->n_sends, t->send, t->round_bytes, rank, world_size));
    return check_parts("receives", t->receives, t->n_receives, t->recv, t->round_bytes, rank, world_size);
}

uint64_t tagc_parts_bytes(const tagc_part *parts, uint32_t n_parts) {
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < n_parts; i++) n_bytes += parts[i].n_bytes;
    return n_bytes;
}
