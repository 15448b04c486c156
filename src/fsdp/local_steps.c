/* The outer loop of local steps: what is exchanged when, and the outer step. */
#include "fsdp/local_steps.h"

#include "fsdp/internal.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* ---- between masters and the arrays ---- */

typedef enum destination { TO_ANCHOR, TO_DELTA, TO_MASTER, ADD_TO_MASTER } destination;

static void move_part(const tagc_fsdp *f, const tagc_local_part *part, destination to) {
    const tagc_local_steps *l = f->local;
    uint64_t at = part->at;
    for (int k = part->first_member; k < part->first_member + part->n_members; k++) {
        const tagc_place *p = &f->tables.places[l->members[k]];
        float *master = f->tables.flats[p->flat].master + p->at;
        if (to == TO_ANCHOR) memcpy(l->anchor + at, master, p->n * sizeof *master);
        if (to == TO_MASTER) memcpy(master, l->anchor + at, p->n * sizeof *master);
        for (uint64_t i = 0; to == TO_DELTA && i < p->n; i++)
            l->delta[at + i] = l->anchor[at + i] - master[i];
        for (uint64_t i = 0; to == ADD_TO_MASTER && i < p->n; i++) master[i] += l->mean[at + i];
        at += p->n;
    }
}

static void move(const tagc_fsdp *f, const tagc_local_fragment *g, destination to) {
    for (int i = 0; i < g->n_parts; i++) move_part(f, &f->local->parts[g->first_part + i], to);
}

/* All sites must begin with the same parameters: a pseudo-gradient is a difference to the anchor. */
static tagc_status compare_anchors(tagc_fsdp *f) {
    tagc_local_steps *l = f->local;
    uint64_t own = XXH3_64bits(l->anchor, l->n_elems * sizeof *l->anchor);
    uint64_t *all = calloc((size_t)l->n_sites, sizeof *all); /* once, before the first step */
    tagc_status status = TAGC_OK;
    if (all == NULL) status = tagc_fail(TAGC_ERR_MEMORY, "no memory for %d checksums", l->n_sites);
    status = tagc_agree(f->all, status);
    if (status == TAGC_OK) status = tagc_comm_all_gather(l->between, &own, sizeof own, all);
    for (int site = 1; status == TAGC_OK && site < l->n_sites; site++)
        if (all[site] != all[0])
            status = tagc_fail(TAGC_ERR_MISMATCH, "site %d begins with other parameters than site 0", site);
    free(all);
    return tagc_agree(f->all, status);
}

/* ---- the beginning of a round ---- */

static void note_failure(tagc_local_fragment *g, tagc_status status) {
    if (status == TAGC_OK || g->failure != TAGC_OK) return;
    g->failure = status;
    snprintf(g->failure_text, sizeof g->failure_text, "%s", tagc_last_error());
}

/* Its steps count as not exchanged. With a delay, also restores the residuals. */
static void drop(tagc_local_steps *l, tagc_local_fragment *g) {
    for (int i = g->first_part; i < g->first_part + g->n_parts; i++) {
        const tagc_local_part *part = &l->parts[i];
        if (l->before != NULL && g->is_launched && part->n_residual > 0)
            (void)tagc_reducer_set_residual(part->reducer, l->before + part->at, part->n_residual);
    }
    g->n_steps += g->n_away;
    g->n_away = 0;
    g->is_launched = 0;
}

static tagc_status check_delta(const tagc_local_steps *l, const tagc_local_fragment *g) {
    for (uint64_t i = g->at; i < g->at + g->n_elems; i++)
        if (!isfinite(l->delta[i]))
            return tagc_fail(TAGC_ERR_STATE, "the parameters of site %d are not finite after %llu steps",
                             l->site, (unsigned long long)g->n_away);
    return TAGC_OK;
}

/* Without a delay, ranks agree before anything is sent. With one, nothing waits here: the others hear of a failure at the end
 * of the round, and residuals become what they were before. */
static tagc_status launch(tagc_fsdp *f, tagc_local_fragment *g) {
    tagc_local_steps *l = f->local;
    tagc_status status = check_delta(l, g);
    g->failure = TAGC_OK;
    g->n_begun = 0;
    if (l->before == NULL) {
        double start_s = tagc_time_s();
        status = tagc_agree(f->all, status);
        tagc_account_blocked(&f->account, start_s, &f->account.stats.wait_reduce_s, -1, f->order.pass);
        if (status != TAGC_OK) drop(l, g);
        TAGC_TRY(status);
    }
    note_failure(g, status);
    for (int i = 0; l->before != NULL && i < g->n_parts; i++) {
        const tagc_local_part *part = &l->parts[g->first_part + i];
        uint64_t n_residual = 0;
        const float *residual = tagc_reducer_residual(part->reducer, &n_residual);
        if (n_residual > 0) memcpy(l->before + part->at, residual, n_residual * sizeof *residual);
    }
    g->is_launched = 1;
    for (status = TAGC_OK; status == TAGC_OK && g->n_begun < g->n_parts; g->n_begun += status == TAGC_OK) {
        const tagc_local_part *part = &l->parts[g->first_part + g->n_begun];
        status = tagc_reducer_begin(part->reducer, l->delta + part->at, l->mean + part->at);
        note_failure(g, status);
    }
    return TAGC_OK;
}

static tagc_status begin_round(tagc_fsdp *f, tagc_local_fragment *g) {
    g->n_away = g->n_steps;
    g->n_steps = 0;
    move(f, g, TO_DELTA);
    return launch(f, g);
}

/* ---- the end of a round ---- */

static void add_stats(tagc_fsdp *f, const tagc_local_part *part, const tagc_reducer_stats *s) {
    tagc_fsdp_stats *sum = &f->account.stats;
    for (int phase = 0; phase < TAGC_N_PHASES; phase++) sum->phase_s[phase] += s->time_s[phase];
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        sum->n_bytes_sent[leg] += s->n_bytes_sent[leg];
        sum->n_bytes_received[leg] += s->n_bytes_received[leg];
        sum->n_class_bytes_sent[part->class_] += s->n_bytes_sent[leg];
    }
    if (part->class_ == TAGC_CLASS_MILD) {
        sum->n_mild += part->n_elems;
        sum->n_mild_kept += s->n_kept;
    }
    if (part->class_ != TAGC_CLASS_COMPRESSED) return;
    sum->n_compressed += part->n_elems;
    sum->n_kept += s->n_kept;
    sum->n_union += s->n_union;
}

/* Waits for every reducer that began, also after a failure, because peers wait for this rank. */
static tagc_status end_exchange(tagc_fsdp *f, tagc_local_fragment *g) {
    int is_finite = 1;
    for (int i = 0; i < g->n_begun; i++) {
        const tagc_local_part *part = &f->local->parts[g->first_part + i];
        tagc_reducer_stats stats;
        tagc_reducer_stats_init(&stats);
        tagc_status status = tagc_reducer_end(part->reducer, &stats);
        note_failure(g, status);
        if (status != TAGC_OK) continue;
        add_stats(f, part, &stats);
        is_finite &= !stats.nonfinite;
    }
    g->n_begun = 0;
    if (!is_finite)
        note_failure(g,
                     tagc_fail(TAGC_ERR_STATE, "a pseudo-gradient of %llu steps is not finite, or overflows",
                               (unsigned long long)g->n_away));
    return tagc_agree(f->all, g->failure == TAGC_OK ? TAGC_OK : tagc_fail(g->failure, "%s", g->failure_text));
}

/* Every site computes the same anchor from the same bits. If a site has trained meanwhile, `mean` becomes what its masters
 * change by. */
static void outer_step(tagc_local_steps *l, const tagc_local_fragment *g) {
    float lr = (float)l->options.outer_lr, momentum = (float)l->options.outer_momentum;
    for (uint64_t i = g->at; i < g->at + g->n_elems; i++) {
        float step = l->mean[i], old = l->anchor[i];
        if (l->velocity != NULL) {
            l->velocity[i] = l->velocity[i] * momentum + step;
            step += l->velocity[i] * momentum;
        }
        l->anchor[i] = old - step * lr;
        if (g->n_steps > 0) l->mean[i] = (l->anchor[i] - old) + l->delta[i];
    }
}

/* Adds the bytes by which ranks agreed since the step began or since the last count; add_stats adds all others. */
static void count_bytes(tagc_fsdp *f) {
    tagc_local_steps *l = f->local;
    tagc_fsdp_stats *s = &f->account.stats;
    uint64_t sent[TAGC_N_LEGS], received[TAGC_N_LEGS];
    tagc_comm_bytes(f->all, sent, received, TAGC_N_LEGS);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        s->n_bytes_sent[leg] += sent[leg] - l->sent_before[leg];
        s->n_bytes_received[leg] += received[leg] - l->received_before[leg];
        s->bits_per_param[leg] = (double)s->n_bytes_sent[leg] * 8 / (double)tagc_fsdp_n_params(f);
    }
    memcpy(l->sent_before, sent, sizeof sent);
    memcpy(l->received_before, received, sizeof received);
}

static tagc_status end_round(tagc_fsdp *f, tagc_local_fragment *g) {
    tagc_local_steps *l = f->local;
    double start_s = tagc_time_s();
    tagc_status status = end_exchange(f, g);
    tagc_account_blocked(&f->account, start_s, &f->account.stats.wait_reduce_s, -1, f->order.pass);
    if (status != TAGC_OK) drop(l, g);
    TAGC_TRY(status);
    start_s = tagc_time_s();
    outer_step(l, g);
    move(f, g, g->n_steps > 0 ? ADD_TO_MASTER : TO_MASTER);
    g->n_away = 0;
    g->is_launched = 0;
    for (int i = 0; l->options.local_decay < 1 && i < g->n_parts; i++)
        TAGC_TRY(tagc_reducer_scale_residual(l->parts[g->first_part + i].reducer, l->options.local_decay));
    tagc_account_event(&f->account, "outer step", start_s, tagc_time_s(), UINT64_MAX);
    f->account.stats.n_rounds = ++l->n_rounds;
    f->account.stats.is_round = 1;
    count_bytes(f);
    return TAGC_OK;
}

/* ---- steps ---- */

void tagc_local_reset(tagc_fsdp *f) {
    tagc_local_steps *l = f->local;
    for (int i = 0; i < l->n_fragments; i++) {
        tagc_local_fragment *g = &l->fragments[i];
        for (int k = 0; k < g->n_begun; k++)
            (void)tagc_reducer_end(l->parts[g->first_part + k].reducer, NULL);
        g->n_steps = g->n_away = 0;
        g->n_begun = g->is_launched = 0;
    }
    l->n_steps = l->n_rounds = 0;
    l->has_anchor = 0;
    if (l->velocity != NULL) memset(l->velocity, 0, l->n_elems * sizeof *l->velocity);
    for (int i = 0; i < l->n_parts; i++) tagc_reducer_scale_residual(l->parts[i].reducer, 0);
}

tagc_status tagc_local_begin_step(tagc_fsdp *f) {
    tagc_local_steps *l = f->local;
    tagc_comm_bytes(f->all, l->sent_before, l->received_before, TAGC_N_LEGS);
    for (int i = 0; i < l->n_fragments; i++) {
        if (!l->has_anchor) move(f, &l->fragments[i], TO_ANCHOR);
        if (l->fragments[i].n_away > 0 && !l->fragments[i].is_launched)
            TAGC_TRY(launch(f, &l->fragments[i])); /* it was loaded */
    }
    if (!l->has_anchor) TAGC_TRY(compare_anchors(f));
    l->has_anchor = 1;
    return TAGC_OK;
}

/* Ends the rounds that have been under way for long enough. */
static tagc_status end_rounds(tagc_fsdp *f, int delay) {
    for (int i = 0; i < f->local->n_fragments; i++) {
        tagc_local_fragment *g = &f->local->fragments[i];
        if (g->n_away > 0 && g->n_steps >= (uint64_t)delay) TAGC_TRY(end_round(f, g));
    }
    return TAGC_OK;
}

tagc_status tagc_local_end_step(tagc_fsdp *f) {
    tagc_local_steps *l = f->local;
    f->account.stats.n_rounds = l->n_rounds;
    l->n_steps = (l->n_steps + 1) % (uint64_t)l->options.local_steps;
    for (int i = 0; i < l->n_fragments; i++) l->fragments[i].n_steps++;
    TAGC_TRY(end_rounds(f, l->options.local_delay));
    for (int i = 0; i < l->n_fragments; i++)
        if (l->fragments[i].due == l->n_steps) TAGC_TRY(begin_round(f, &l->fragments[i]));
    return end_rounds(f, l->options.local_delay);
}

static tagc_status synchronize(tagc_fsdp *f) {
    tagc_local_steps *l = f->local;
    TAGC_TRY(end_rounds(f, 0));
    for (int i = 0; i < l->n_fragments; i++) {
        if (l->fragments[i].n_steps == 0) continue;
        TAGC_TRY(begin_round(f, &l->fragments[i]));
        TAGC_TRY(end_round(f, &l->fragments[i]));
    }
    l->n_steps = 0;
    return TAGC_OK;
}

tagc_status tagc_fsdp_synchronize(tagc_fsdp *f, tagc_fsdp_stats *stats) {
    if (f->deferred != TAGC_OK) return tagc_fail(f->deferred, "%s", f->deferred_text);
    if (f->order.micro_step != 0)
        return tagc_fail(TAGC_ERR_STATE, "a round between a backward pass and its step");
    if (f->local != NULL) {
        double start_s = tagc_time_s(), waited_s = f->account.stats.wait_reduce_s;
        TAGC_TRY(synchronize(f));
        double took_s = tagc_time_s() - start_s;
        f->account.stats.total_s += took_s;
        f->account.stats.optimizer_s += took_s - (f->account.stats.wait_reduce_s - waited_s);
    }
    if (stats != NULL) *stats = f->account.stats;
    return TAGC_OK;
}

int tagc_fsdp_round_is_due(const tagc_fsdp *f) {
    const tagc_local_steps *l = f->local;
    if (l == NULL) return 1;
    uint64_t delay = (uint64_t)l->options.local_delay,
             n_steps = (l->n_steps + 1) % (uint64_t)l->options.local_steps;
    for (int i = 0; i < l->n_fragments; i++) {
        const tagc_local_fragment *g = &l->fragments[i];
        if (g->n_away > 0 ? g->n_steps + 1 >= delay : delay == 0 && g->due == n_steps) return 1;
    }
    return 0;
}

tagc_comm *tagc_fsdp_comm(const tagc_fsdp *f) {
    return f->comm;
}
