/* The state of local steps in a checkpoint: anchor, outer velocity, residuals and pseudo-gradients under way, after the flats
 * in a rank's file. A round under way begins once more when it is loaded, with the residuals that it began with, and comes to
 * the same. */
#include "fsdp/local_steps.h"

#include "fsdp/internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* Of a manifest without fragments, nothing was under way. */
static uint64_t n_away(const tagc_manifest_local *state, int fragment) {
    return fragment < state->n_fragments ? state->fragments[fragment].n_away : 0;
}

uint64_t tagc_local_n_saved(const tagc_local_steps *l, const tagc_manifest_local *state) {
    uint64_t n = (l->velocity != NULL ? 2 : 1) * l->n_elems;
    for (int i = 0; i < l->n_parts; i++) n += l->parts[i].n_residual;
    for (int i = 0; i < l->n_fragments; i++) n += n_away(state, i) > 0 ? l->fragments[i].n_elems : 0;
    return n;
}

/* Equal on all ranks. The size of a rank's parts is not in it: world size and n_saved determine that. */
static uint64_t layout_of(const tagc_local_steps *l) {
    uint64_t hash = l->velocity != NULL;
    for (int i = 0; i < l->n_parts; i++) {
        uint64_t numbers[] = {(uint64_t)l->parts[i].class_, l->parts[i].n_residual > 0};
        hash = XXH3_64bits_withSeed(numbers, sizeof numbers, hash);
        hash = XXH3_64bits_withSeed(l->members + l->parts[i].first_member,
                                    (size_t)l->parts[i].n_members * sizeof *l->members, hash);
    }
    return hash;
}

tagc_status tagc_local_describe(const tagc_local_steps *l, tagc_manifest_local *out) {
    int has_fragments = l->n_fragments > 1;
    for (int i = 0; i < l->n_fragments; i++) /* a fragment whose round failed has steps of its own */
        has_fragments |= l->fragments[i].n_away > 0 || l->fragments[i].n_steps != l->n_steps;
    *out = (tagc_manifest_local){.n_sites = l->n_sites,
                                 .site = l->site,
                                 .n_steps = l->n_steps,
                                 .n_rounds = l->n_rounds,
                                 .has_anchor = l->has_anchor,
                                 .layout = layout_of(l)};
    if (!has_fragments) return TAGC_OK; /* older programs read that */
    out->fragments = calloc((size_t)l->n_fragments, sizeof *out->fragments);
    if (out->fragments == NULL)
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for %d fragments", l->n_fragments);
    out->n_fragments = l->n_fragments;
    for (int i = 0; i < l->n_fragments; i++)
        out->fragments[i] = (tagc_manifest_fragment){l->fragments[i].n_steps, l->fragments[i].n_away};
    return TAGC_OK;
}

tagc_status tagc_local_write(const tagc_local_steps *l,
                             tagc_status (*write)(void *context, const float *values, uint64_t n),
                             void *context) {
    TAGC_TRY(write(context, l->anchor, l->n_elems));
    if (l->velocity != NULL) TAGC_TRY(write(context, l->velocity, l->n_elems));
    for (int i = 0; i < l->n_fragments; i++) {
        const tagc_local_fragment *g = &l->fragments[i];
        for (int k = g->first_part; k < g->first_part + g->n_parts; k++) {
            const tagc_local_part *part = &l->parts[k];
            uint64_t n;
            if (part->n_residual == 0) continue;
            const float *residual =
                g->is_launched ? l->before + part->at : tagc_reducer_residual(part->reducer, &n);
            TAGC_TRY(write(context, residual, part->n_residual));
        }
    }
    for (int i = 0; i < l->n_fragments; i++)
        if (l->fragments[i].n_away > 0)
            TAGC_TRY(write(context, l->delta + l->fragments[i].at, l->fragments[i].n_elems));
    return TAGC_OK;
}

/* Whether these options can go on with the rounds that were under way. */
static int fits(const tagc_local_steps *l, const tagc_manifest_local *saved) {
    uint64_t every = (uint64_t)l->options.local_steps, delay = (uint64_t)l->options.local_delay;
    for (int i = 0; i < saved->n_fragments; i++) {
        const tagc_manifest_fragment *g = &saved->fragments[i];
        if (i >= l->n_fragments ||
            (g->n_away > 0 &&
             (g->n_steps >= delay || (l->fragments[i].due + g->n_steps) % every != saved->n_steps)))
            return 0;
    }
    return saved->n_fragments == 0 || saved->n_fragments == l->n_fragments;
}

tagc_status tagc_local_check_saved(const tagc_fsdp *f, const tagc_manifest *m) {
    const tagc_local_steps *l = f->local;
    const tagc_manifest_local *saved = &m->local;
    if (saved->n_sites == 0)
        return tagc_fail(TAGC_ERR_MISMATCH,
                         "it was saved without local steps; fork the run to begin them with its parameters");
    if (saved->n_sites != l->n_sites || m->world_size != f->world_size)
        return tagc_fail(TAGC_ERR_MISMATCH,
                         "it was saved by %d sites of %d ranks, here are %d of %d. A residual belongs to its "
                         "site: resume with "
                         "the same numbers, or fork the run, which drops residuals",
                         saved->n_sites, m->world_size, l->n_sites, f->world_size);
    if (saved->site != l->site)
        return tagc_fail(TAGC_ERR_MISMATCH, "site %d saved it, this is site %d", saved->site, l->site);
    if (m->files[f->rank].n_local != tagc_local_n_saved(l, saved) || saved->layout != layout_of(l) ||
        !fits(l, saved))
        return tagc_fail(
            TAGC_ERR_MISMATCH,
            "its local steps exchange other tensors or fragments, or use another exchange or delay: resume "
            "with the options that it was saved with, or fork the run");
    return TAGC_OK;
}

tagc_status tagc_local_load(tagc_fsdp *f, const tagc_manifest_local *saved, const float *values) {
    tagc_local_steps *l = f->local;
    memcpy(l->anchor, values, l->n_elems * sizeof *values);
    values += l->n_elems;
    if (l->velocity != NULL) {
        memcpy(l->velocity, values, l->n_elems * sizeof *values);
        values += l->n_elems;
    }
    for (int i = 0; i < l->n_parts; i++) {
        uint64_t n = l->parts[i].n_residual;
        if (n > 0) TAGC_TRY(tagc_reducer_set_residual(l->parts[i].reducer, values, n));
        values += n;
    }
    for (int i = 0; i < l->n_fragments; i++) {
        tagc_local_fragment *g = &l->fragments[i];
        g->n_steps = saved->n_fragments > 0 ? saved->fragments[i].n_steps : saved->n_steps;
        g->n_away = n_away(saved, i);
        if (g->n_away == 0) continue;
        memcpy(l->delta + g->at, values, g->n_elems * sizeof *values);
        values += g->n_elems;
    }
    l->n_steps = saved->n_steps;
    l->n_rounds = saved->n_rounds;
    l->has_anchor = saved->has_anchor;
    return TAGC_OK;
}

tagc_status tagc_fsdp_folder(const tagc_fsdp *f, const char *dir, char *folder, size_t n_bytes) {
    int site = f->local != NULL ? f->local->site : 0;
    int n =
        site == 0 ? snprintf(folder, n_bytes, "%s", dir) : snprintf(folder, n_bytes, "%s/site-%d", dir, site);
    if (n >= 0 && (size_t)n < n_bytes) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "a path of %d bytes, allowed is up to %zu", n, n_bytes - 1);
}
