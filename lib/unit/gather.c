/* See gather.h. */
#include "unit/gather.h"

#include "core/memory.h"
#include "exchange/gatherer/gatherer.h"
#include "unit/unit.h"

#include <stdio.h>

struct tagc_flat_gatherer {
    tagc_gatherer *first; /* of the only level, or between hosts */
    uint64_t n_elems, shard;
    int n_hosts, n_places, place; /* 0 hosts: one level */
    int is_begun;
    tagc_gatherer *within[]; /* (n_hosts), one for the rows of each host */
};

static tagc_status make_levels(tagc_flat_gatherer *g, tagc_comm *within, tagc_comm *between,
                               const tagc_gatherer_options *options) {
    tagc_gatherer_options outer, inner;
    tagc_flat_gather_split(options, g->n_hosts, g->n_places, &outer, &inner);
    size_t host_elems = (size_t)inner.n_elems;
    TAGC_TRY(tagc_levels_agree(within, between,
                               tagc_gatherer_create_apart(between, &outer, host_elems, &g->first)));
    tagc_status status = TAGC_OK;
    for (int host = 0; host < g->n_hosts && status == TAGC_OK; host++) {
        status = tagc_gatherer_create(within, &inner, &g->within[host]);
        if (status == TAGC_OK) tagc_gatherer_follow(g->within[host], g->first);
    }
    return tagc_levels_agree(within, between, status);
}

tagc_status tagc_flat_gatherer_create(tagc_comm *within, tagc_comm *between,
                                      const tagc_gatherer_options *options, tagc_flat_gatherer **out) {
    int has_levels = within && between, n_hosts = has_levels ? tagc_comm_world_size(between) : 0;
    void *memory;
    *out = NULL;
    tagc_status status = tagc_memory_create(
        sizeof(tagc_flat_gatherer) + (size_t)n_hosts * sizeof(tagc_gatherer *), "a flat's gatherer", &memory);
    status = tagc_levels_agree(between ? within : NULL, between ? between : within, status);
    if (status != TAGC_OK) {
        tagc_memory_destroy(memory);
        return status;
    }
    tagc_flat_gatherer *g = memory;
    int n_places = has_levels ? tagc_comm_world_size(within) : 1,
        n_owners = has_levels ? n_hosts * n_places : tagc_comm_world_size(between ? between : within);
    g->n_elems = options->n_elems;
    g->shard = options->n_elems / (uint64_t)n_owners;
    g->n_hosts = n_hosts;
    g->n_places = n_places;
    g->place = has_levels ? tagc_comm_rank(within) : 0;
    status = has_levels ? make_levels(g, within, between, options)
                        : tagc_gatherer_create(between ? between : within, options, &g->first);
    if (status != TAGC_OK) {
        tagc_flat_gatherer_destroy(g);
        return status;
    }
    *out = g;
    return TAGC_OK;
}

/* Of `full`, what the first gather writes. */
static float *own_rows(const tagc_flat_gatherer *g, float *full) {
    return full + (uint64_t)g->place * g->shard;
}

static uint64_t own_elems(const tagc_flat_gatherer *g) {
    return g->n_elems - (uint64_t)(g->n_places - 1) * g->shard;
}

tagc_status tagc_flat_gatherer_begin(tagc_flat_gatherer *g, const float *shard, float *full) {
    uint64_t host_elems = g->shard * (uint64_t)g->n_places;
    TAGC_TRY(tagc_gatherer_begin(g->first, shard, g->shard, own_rows(g, full), own_elems(g)));
    for (int host = 0; host < g->n_hosts; host++) {
        float *rows = full + (uint64_t)host * host_elems;
        TAGC_TRY(tagc_gatherer_begin(g->within[host], own_rows(g, rows), g->shard, rows, host_elems));
    }
    g->is_begun = 1;
    return TAGC_OK;
}

/* Waits for all of them, and returns the first failure. */
tagc_status tagc_flat_gatherer_end(tagc_flat_gatherer *g) {
    tagc_status status = tagc_gatherer_end(g->first);
    char text[TAGC_ERROR_TEXT_BYTES] = "";
    g->is_begun = 0;
    for (int host = 0; host < g->n_hosts; host++) {
        if (status != TAGC_OK) snprintf(text, sizeof text, "%s", tagc_last_error());
        tagc_status inner = tagc_gatherer_end(g->within[host]);
        if (status != TAGC_OK)
            (void)tagc_fail(status, "%s", text);
        else
            status = inner;
    }
    return status;
}

tagc_status tagc_flat_gatherer_reset(tagc_flat_gatherer *g) {
    return tagc_gatherer_reset(g->first);
}

uint64_t tagc_flat_gatherer_replica(const tagc_flat_gatherer *g) {
    uint64_t n_gathers;
    (void)tagc_gatherer_replica(g->first, &n_gathers);
    return n_gathers;
}

tagc_status tagc_flat_gatherer_set_replica(tagc_flat_gatherer *g, float *full, uint64_t n_gathers) {
    return tagc_gatherer_set_replica(g->first, own_rows(g, full), own_elems(g), n_gathers);
}

void tagc_flat_gatherer_destroy(tagc_flat_gatherer *g) {
    if (!g) return;
    if (g->is_begun) (void)tagc_flat_gatherer_end(g);
    for (int host = 0; host < g->n_hosts; host++) tagc_gatherer_destroy(g->within[host]);
    tagc_gatherer_destroy(g->first);
    tagc_memory_destroy(g);
}
