/* Parameters from their owners to all ranks.
 *
 * With lanes the caller posts the transfer itself, beside whatever reducers are doing; without, it is a job
 * among theirs, so that all ranks post in one order. */
#include "core/memory.h"
#include "exchange/bf16.h"
#include "exchange/options.h"
#include "transport/comm.h"

struct tagc_gatherer {
    tagc_comm *comm;
    tagc_gatherer_options options;
    int rank, world_size;
    size_t shard;
    int begun;
    int posted;       /* by the caller, on the gather lane; otherwise by a job */
    const float *own; /* (shard) */
    float *full;      /* (W, shard) */
    tagc_ticket ticket;
    tagc_job job;
    /* One arena: | arrays of the ticket | halves |, behind this struct's own block. */
    void *arena;
    uint64_t *n_bytes, *send_offset, *recv_offset; /* (W,) */
    uint16_t *halves;                              /* (W, shard) bf16 wire */
};

static void place(tagc_gatherer *g, tagc_arena *arena) {
    size_t n_ranks = (size_t)g->world_size,
           n_halves = g->options.wire == TAGC_WIRE_BF16 ? n_ranks * g->shard : 0;
    g->n_bytes = tagc_arena_take(arena, n_ranks, sizeof *g->n_bytes);
    g->send_offset = tagc_arena_take(arena, n_ranks, sizeof *g->send_offset);
    g->recv_offset = tagc_arena_take(arena, n_ranks, sizeof *g->recv_offset);
    g->halves = tagc_arena_take(arena, n_halves, sizeof *g->halves);
}

static tagc_status make(tagc_comm *comm, const tagc_gatherer_options *options, tagc_gatherer **out) {
    tagc_gatherer_options checked;
    void *memory;
    *out = NULL;
    TAGC_TRY(tagc_gatherer_options_check(options, tagc_comm_world_size(comm), &checked));
    TAGC_TRY(tagc_memory_create(sizeof(tagc_gatherer), "gatherer", &memory));
    tagc_gatherer *g = *out = memory;
    g->comm = comm;
    g->options = checked;
    g->rank = tagc_comm_rank(comm);
    g->world_size = tagc_comm_world_size(comm);
    g->shard = (size_t)(checked.n_elems / (uint64_t)g->world_size);
    tagc_arena arena = {0};
    place(g, &arena);
    if (arena.overflow)
        return tagc_fail(TAGC_ERR_MEMORY,
                         "n_elems is %llu: the gatherer's buffer does not fit into the address space",
                         (unsigned long long)checked.n_elems);
    TAGC_TRY(tagc_memory_create(arena.n_bytes, "gatherer buffer", &g->arena));
    arena = (tagc_arena){.base = g->arena};
    place(g, &arena);
    size_t width = checked.wire == TAGC_WIRE_BF16 ? sizeof *g->halves : sizeof *g->full;
    for (int d = 0; d < g->world_size; d++) {
        g->n_bytes[d] = g->shard * width;
        g->recv_offset[d] = (uint64_t)d * g->n_bytes[d]; /* send_offset stays zero: everybody gets the same */
    }
    return TAGC_OK;
}

tagc_status tagc_gatherer_create(tagc_comm *comm, const tagc_gatherer_options *options, tagc_gatherer **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!comm) return tagc_fail(TAGC_ERR_ARGUMENT, "comm is NULL");
    tagc_gatherer *g;
    tagc_status status = make(comm, options, &g);
    status = tagc_gatherer_options_agree(comm, status, status == TAGC_OK ? &g->options : NULL);
    if (status != TAGC_OK) {
        tagc_gatherer_destroy(g);
        return status;
    }
    *out = g;
    return TAGC_OK;
}

static void post(tagc_gatherer *g) {
    int is_bf16 = g->options.wire == TAGC_WIRE_BF16;
    uint16_t *own_halves = g->halves + (is_bf16 ? (size_t)g->rank * g->shard : 0);
    if (is_bf16) tagc_bf16_narrow(g->own, own_halves, g->shard);
    g->ticket = (tagc_ticket){
        .transfer = {.send = is_bf16 ? (const void *)own_halves : (const void *)g->own,
                     .send_bytes = g->n_bytes,
                     .send_offset = g->send_offset,
                     .recv = is_bf16 ? (void *)g->halves : (void *)g->full,
                     .recv_bytes = g->n_bytes,
                     .recv_offset = g->recv_offset},
        .leg = TAGC_LEG_GATHER,
        .tag = g->options.tag,
    };
    tagc_comm_post(g->comm, TAGC_LANE_GATHER, &g->ticket);
}

static tagc_status finish(tagc_gatherer *g) {
    TAGC_TRY(tagc_comm_wait(g->comm, &g->ticket));
    if (g->options.wire == TAGC_WIRE_BF16)
        tagc_bf16_widen(g->halves, g->full, (size_t)g->world_size * g->shard);
    return TAGC_OK;
}

static tagc_status post_and_finish(void *arg) {
    post(arg);
    return finish(arg);
}

tagc_status tagc_gatherer_begin(tagc_gatherer *g, const float *shard, float *full) {
    if (!g) return tagc_fail(TAGC_ERR_ARGUMENT, "gatherer is NULL");
    if (!shard) return tagc_fail(TAGC_ERR_ARGUMENT, "shard is NULL");
    if (!full) return tagc_fail(TAGC_ERR_ARGUMENT, "full is NULL");
    if (g->begun) return tagc_fail(TAGC_ERR_STATE, "begin after begin: a gather is under way, end it first");
    g->own = shard;
    g->full = full;
    g->begun = 1;
    g->posted = tagc_comm_has_lanes(g->comm);
    if (g->posted) {
        post(g);
        return TAGC_OK;
    }
    g->job.run = post_and_finish;
    g->job.arg = g;
    tagc_comm_submit(g->comm, &g->job);
    return TAGC_OK;
}

tagc_status tagc_gatherer_end(tagc_gatherer *g) {
    if (!g) return tagc_fail(TAGC_ERR_ARGUMENT, "gatherer is NULL");
    if (!g->begun) return tagc_fail(TAGC_ERR_STATE, "end without begin: no gather is under way");
    g->begun = 0;
    return g->posted ? finish(g) : tagc_comm_join(g->comm, &g->job);
}

void tagc_gatherer_destroy(tagc_gatherer *g) {
    if (!g) return;
    if (g->begun) (void)tagc_gatherer_end(g);
    tagc_memory_destroy(g->arena);
    tagc_memory_destroy(g);
}
