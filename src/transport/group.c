/* A transport whose transfers are tickets of another comm. */
#include "transport/group.h"

#include "transport/comm_private.h"
#include <stdlib.h>

typedef struct group_request {
    tagc_ticket ticket;
    int is_used;
    struct group_request *next;
    tagc_part parts[]; /* (2 * (n - 1)): sends, then receives, with the parent's ranks */
} group_request;

typedef struct group {
    tagc_comm *parent;
    int kind, first, stride, n;
    group_request *requests; /* made on first need, then reused; only the group's comm thread uses them */
} group;

/* Ranks of a group ascend like those of the parent, so parts keep their order. */
static void translate(const group *g, const tagc_part *from, uint32_t n, tagc_part *to) {
    for (uint32_t i = 0; i < n; i++) {
        to[i] = from[i];
        to[i].peer = g->first + from[i].peer * g->stride;
    }
}

static group_request *take(group *g) {
    group_request *r = g->requests;
    while (r && r->is_used) r = r->next;
    if (!r) {
        r = calloc(1, sizeof *r + 2 * (size_t)g->n * sizeof r->parts[0]);
        if (!r) return NULL;
        r->next = g->requests;
        g->requests = r;
    }
    r->is_used = 1;
    return r;
}

static tagc_status start(void *context, const tagc_transfer *transfer, void **request) {
    group *g = context;
    group_request *r = take(g);
    if (!r) return tagc_fail(TAGC_ERR_MEMORY, "no memory for a transfer of %d ranks", g->n);
    tagc_part *receives = r->parts + g->n;
    translate(g, transfer->sends, transfer->n_sends, r->parts);
    translate(g, transfer->receives, transfer->n_receives, receives);
    r->ticket =
        (tagc_ticket){.transfer = *transfer, .leg = TAGC_LEG_VALUES, .tag = UINT64_MAX, .is_of_group = 1};
    r->ticket.transfer.sends = r->parts;
    r->ticket.transfer.receives = receives;
    r->ticket.transfer.round_bytes = 0; /* not between all ranks of the parent */
    *request = r;
    tagc_comm_post(g->parent, (tagc_lane)((int)transfer->lane + g->kind * TAGC_N_LANES), &r->ticket);
    return TAGC_OK;
}

static tagc_status test(void *context, void *request, tagc_progress *progress) {
    group *g = context;
    group_request *r = request;
    if (!tagc_comm_is_done(g->parent, &r->ticket)) return TAGC_OK;
    r->is_used = 0;
    progress->done = 1;
    return tagc_comm_wait(g->parent, &r->ticket);
}

static void give_up(void *context, const char *reason) {
    tagc_comm_abort(((group *)context)->parent, reason);
}

/* The abort breaks the parent. Buffers are free when the parent has finished their tickets. */
static void cancel(void *context, const char *reason) {
    group *g = context;
    tagc_comm_abort(g->parent, reason);
    for (group_request *r = g->requests; r; r = r->next) {
        if (r->is_used) (void)tagc_comm_wait(g->parent, &r->ticket);
        r->is_used = 0;
    }
}

static void destroy(void *context) {
    group *g = context;
    for (group_request *next, *r = g->requests; r; r = next) {
        next = r->next;
        free(r);
    }
    free(g);
}

static const tagc_transport_ops group_ops = {.abi = TAGC_TRANSPORT_ABI,
                                             .capabilities = TAGC_TRANSPORT_LANES,
                                             .name = "group",
                                             .start = start,
                                             .test = test,
                                             .cancel = cancel,
                                             .abort = give_up,
                                             .destroy = destroy};

tagc_status tagc_comm_create_group(tagc_comm *parent, tagc_group_kind kind, int first, int stride, int n,
                                   tagc_comm **out) {
    *out = NULL;
    int at = stride > 0 ? (parent->rank - first) / stride : 0;
    if (first < 0 || stride < 1 || n < 1 || first + (n - 1) * stride >= parent->world_size || at >= n ||
        first + at * stride != parent->rank)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "a group of %d ranks from %d, every %d, of %d ranks does not contain rank %d", n,
                         first, stride, parent->world_size, parent->rank);
    if (!(parent->ops->capabilities & TAGC_TRANSPORT_GROUPS))
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "the transport %s has no lanes for groups of ranks",
                         parent->ops->name);
    group *g = calloc(1, sizeof *g);
    if (!g) return tagc_fail(TAGC_ERR_MEMORY, "no memory for a group of %d ranks", n);
    *g = (group){.parent = parent, .kind = (int)kind, .first = first, .stride = stride, .n = n};
    tagc_comm_options options;
    tagc_comm_options_init(&options);
    options.timeout_s = 1e6; /* the parent has a time-out, and knows which rank is silent */
    options.trace = parent->options.trace;
    options.trace_context = parent->options.trace_context;
    tagc_status status = tagc_comm_create(&group_ops, g, at, n, &options, out);
    if (status != TAGC_OK) free(g);
    return status;
}
