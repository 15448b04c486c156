/* The identity of a gather whose rows have no header: each rank tells all the others in which gather of which unit it is.
 *
 * The words travel at the same time as the rows, just before them on the same lane, so that they take no time of their own. On a
 * transport without lanes they are a transfer more. All ranks get all words, and so the same error. */
#include "exchange/gatherer/gatherer.h"

void tagc_gather_words_place(tagc_gatherer *g, tagc_arena *arena) {
    tagc_gather_words *w = &g->words;
    size_t n = (size_t)g->world_size;
    w->all = tagc_arena_take(arena, n, sizeof *w->all);
    w->sends = tagc_arena_take(arena, n - 1, sizeof *w->sends);
    w->receives = tagc_arena_take(arena, n - 1, sizeof *w->receives);
}

void tagc_gather_words_post(tagc_gatherer *g) {
    tagc_gather_words *w = &g->words;
    uint32_t n_peers = 0;
    w->own = (tagc_gather_word){.unit = g->identity.unit, .status = (uint32_t)g->failure, .step = g->n_begun};
    for (int r = 0; r < g->world_size; r++) {
        if (r == g->rank) continue;
        w->sends[n_peers] = (tagc_part){.peer = r, .n_bytes = sizeof w->own};
        w->receives[n_peers++] =
            (tagc_part){.peer = r, .n_bytes = sizeof w->own, .offset = (uint64_t)r * sizeof *w->all};
    }
    w->ticket = (tagc_ticket){.transfer = {.n_sends = n_peers,
                                           .n_receives = n_peers,
                                           .sends = w->sends,
                                           .receives = w->receives,
                                           .send = &w->own,
                                           .recv = w->all},
                              .leg = TAGC_LEG_GATHER,
                              .tag = g->options.tag,
                              .of = &g->identity};
    tagc_comm_post(g->comm, TAGC_LANE_GATHER, &w->ticket);
}

int tagc_gather_words_are_here(const tagc_gatherer *g) {
    return tagc_comm_is_done(g->comm, &g->words.ticket);
}

tagc_status tagc_gather_words_check(tagc_gatherer *g) {
    TAGC_TRY(tagc_comm_wait(g->comm, &g->words.ticket));
    for (int r = 0; r < g->world_size; r++) {
        const tagc_gather_word *word = &g->words.all[r];
        if (r == g->rank) continue;
        TAGC_TRY(tagc_identity_check(g->comm, &g->identity, r, word->unit));
        if (word->step == g->n_begun) {
            TAGC_TRY(tagc_gatherer_told((tagc_status)word->status, tagc_comm_name(g->comm, r)));
            continue;
        }
        char text[TAGC_UNIT_TEXT_BYTES];
        tagc_identity_text(&g->identity, text);
        return tagc_fail(TAGC_ERR_MISMATCH, "rank %d is in gather %llu of %s, this rank in gather %llu",
                         tagc_comm_name(g->comm, r), (unsigned long long)word->step, text,
                         (unsigned long long)g->n_begun);
    }
    return TAGC_OK;
}
