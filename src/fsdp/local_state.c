/* The state of local steps in a checkpoint: anchor, outer velocity and residuals, after the flats in a rank's file. */
#include "fsdp/local_steps.h"

#include "fsdp/internal.h"
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

static const float *residual_of(const tagc_local_part *part, uint64_t *n) {
    *n = 0;
    return tagc_reducer_residual(part->reducer, n);
}

uint64_t tagc_local_n_saved(const tagc_local_steps *l) {
    uint64_t n = (l->velocity != NULL ? 2 : 1) * l->n_elems;
    for (int i = 0; i < l->n_parts; i++) {
        uint64_t n_residual;
        residual_of(&l->parts[i], &n_residual);
        n += n_residual;
    }
    return n;
}

/* Equal on all ranks. The size of a rank's parts is not in it: world size and n_saved determine that. */
static uint64_t layout_of(const tagc_local_steps *l) {
    uint64_t hash = l->velocity != NULL;
    for (int i = 0; i < l->n_parts; i++) {
        uint64_t n_residual;
        residual_of(&l->parts[i], &n_residual);
        uint64_t numbers[] = {(uint64_t)l->parts[i].class_, n_residual > 0};
        hash = XXH3_64bits_withSeed(numbers, sizeof numbers, hash);
        hash = XXH3_64bits_withSeed(l->members + l->parts[i].first_member,
                                    (size_t)l->parts[i].n_members * sizeof *l->members, hash);
    }
    return hash;
}

void tagc_local_describe(const tagc_local_steps *l, tagc_manifest_local *out) {
    *out = (tagc_manifest_local){.n_sites = l->n_sites,
                                 .site = l->site,
                                 .n_steps = l->n_steps,
                                 .n_rounds = l->n_rounds,
                                 .has_anchor = l->has_anchor,
                                 .layout = layout_of(l)};
}

tagc_status tagc_local_write(const tagc_local_steps *l,
                             tagc_status (*write)(void *context, const float *values, uint64_t n),
                             void *context) {
    TAGC_TRY(write(context, l->anchor, l->n_elems));
    if (l->velocity != NULL) TAGC_TRY(write(context, l->velocity, l->n_elems));
    for (int i = 0; i < l->n_parts; i++) {
        uint64_t n;
        const float *residual = residual_of(&l->parts[i], &n);
        if (n > 0) TAGC_TRY(write(context, residual, n));
    }
    return TAGC_OK;
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
    if (m->files[f->rank].n_local != tagc_local_n_saved(l) || saved->layout != layout_of(l))
        return tagc_fail(
            TAGC_ERR_MISMATCH,
            "its local steps exchange other tensors or use another exchange: resume with the options "
            "that it was saved with, or fork the run");
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
        uint64_t n;
        residual_of(&l->parts[i], &n);
        if (n > 0) TAGC_TRY(tagc_reducer_set_residual(l->parts[i].reducer, values, n));
        values += n;
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
