/* The outer loop of local steps: what is exchanged, and the outer step. */
#include "fsdp/local_steps.h"

#include "exchange/options.h"
#include "fsdp/internal.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

int tagc_local_site_ranks(const tagc_fsdp_options *options) {
    return options->sharding == TAGC_SHARD_HYBRID ? options->ranks_per_host : 1;
}

tagc_fsdp_options tagc_local_inner(const tagc_fsdp_options *options) {
    tagc_fsdp_options o = *options;
    if (o.sharding == TAGC_SHARD_HYBRID) o.sharding = TAGC_SHARD_FULL;
    o.ranks_per_host = 1;
    o.two_level = o.gentle = o.sparsity_warmup = o.local_steps = 0;
    o.policy = TAGC_POLICY_NONE;
    tagc_reducer_options_init(&o.reducer);
    o.reducer.exchange = o.mild.exchange = TAGC_EXCHANGE_DENSE;
    o.reducer.n_threads = options->reducer.n_threads;
    o.beta1_compressed = o.beta1;
    return o;
}

/* ---- parts ---- */

static tagc_reducer_options options_of_part(const tagc_local_steps *l, const tagc_local_part *part, int tag) {
    const tagc_fsdp_options *o = &l->options;
    tagc_reducer_options r;
    tagc_reducer_options_init(&r);
    r.exchange = TAGC_EXCHANGE_DENSE;
    r.format = o->dense_format;
    if (part->class_ == TAGC_CLASS_COMPRESSED) r = o->reducer;
    if (part->class_ == TAGC_CLASS_MILD) r = o->mild;
    tagc_reducer_options_prune(&r);
    tagc_reducer_options_resolve(&r);
    r.n_elems = part->n_padded;
    r.tag = (uint64_t)tag;
    r.op = TAGC_OP_AVG;
    r.output = TAGC_OUTPUT_UNIT;
    r.ranks_per_host = 1;
    r.n_threads = o->reducer.n_threads;
    return r;
}

/* Makes the next part from this rank's share of the tensors of a class: of one unit, or of all units if unit is -1. All
 * ranks of a site have the same parts, some of which may hold only padding. */
static void add_part(const tagc_fsdp *f, tagc_local_steps *l, int class_, int unit, int *n_members) {
    tagc_local_part *part = &l->parts[l->n_parts];
    *part = (tagc_local_part){.class_ = class_, .first_member = *n_members, .at = l->n_elems};
    for (int i = 0; i < f->tables.n_tensors; i++) {
        const tagc_place *p = &f->tables.places[i];
        if ((unit >= 0 && p->unit != unit) ||
            (int)tagc_fsdp_class(&l->options, &f->tables.tensors[i]) != class_)
            continue;
        l->members[(*n_members)++] = i;
        part->n_elems += p->n;
    }
    part->n_members = *n_members - part->first_member;
    if (part->n_members == 0) return;
    part->n_padded = tagc_padded_elems(part->n_elems > 0 ? part->n_elems : 1, l->n_sites);
    part->options = options_of_part(l, part, unit);
    l->n_elems += part->n_padded;
    l->n_parts++;
}

static void place(tagc_local_steps *l, tagc_arena *arena) {
    l->anchor = tagc_arena_take(arena, l->n_elems, sizeof(float));
    l->delta = tagc_arena_take(arena, l->n_elems, sizeof(float));
    l->mean = tagc_arena_take(arena, l->n_elems, sizeof(float));
    l->velocity = l->options.outer_momentum > 0 ? tagc_arena_take(arena, l->n_elems, sizeof(float)) : NULL;
}

tagc_status tagc_local_lay_out(tagc_fsdp *f, const tagc_fsdp_options *options, int n_sites) {
    tagc_local_steps *l = f->local = calloc(1, sizeof *l);
    size_t n = (size_t)f->tables.n_tensors;
    if (l != NULL) {
        *l = (tagc_local_steps){.options = *options, .n_sites = n_sites};
        l->parts = calloc(n + 1, sizeof *l->parts); /* one spare, to try a part */
        l->members = calloc(n, sizeof *l->members);
    }
    if (l == NULL || l->parts == NULL || l->members == NULL)
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for local steps of %zu tensors", n);
    int n_members = 0;
    for (int unit = 0; unit < f->tables.n_units; unit++) {
        add_part(f, l, TAGC_CLASS_COMPRESSED, unit, &n_members);
        add_part(f, l, TAGC_CLASS_MILD, unit, &n_members);
    }
    add_part(f, l, TAGC_CLASS_DENSE, -1, &n_members);
    uint64_t n_bytes = l->n_elems * sizeof(float);
    f->memory.gradients += 2 * n_bytes;
    f->memory.optimizer += (l->options.outer_momentum > 0 ? 2 : 1) * n_bytes;
    return TAGC_OK;
}

tagc_status tagc_local_connect(tagc_fsdp *f) {
    tagc_local_steps *l = f->local;
    tagc_arena arena = {0};
    place(l, &arena);
    TAGC_TRY(tagc_agree(f->all, tagc_memory_create(arena.n_bytes, "the anchor of local steps", &l->memory)));
    arena = (tagc_arena){.base = l->memory};
    place(l, &arena);
    for (int i = 0; i < l->n_parts; i++) {
        uint64_t n_residual = 0;
        TAGC_TRY(tagc_reducer_create(l->between, &l->parts[i].options, &l->parts[i].reducer));
        tagc_reducer_residual(l->parts[i].reducer, &n_residual);
        f->memory.residuals += n_residual * sizeof(float);
    }
    return TAGC_OK;
}

void tagc_local_destroy(tagc_fsdp *f) {
    tagc_local_steps *l = f->local;
    if (l == NULL) return;
    for (int i = 0; i < l->n_parts; i++) tagc_reducer_destroy(l->parts[i].reducer);
    tagc_comm_destroy(l->between);
    tagc_memory_destroy(l->memory);
    free(l->parts);
    free(l->members);
    free(l);
    f->local = NULL;
}

/* ---- between masters and the arrays ---- */

typedef enum destination { TO_ANCHOR, TO_DELTA, TO_MASTER } destination;

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
        at += p->n;
    }
}

static void move(const tagc_fsdp *f, destination to) {
    for (int i = 0; i < f->local->n_parts; i++) move_part(f, &f->local->parts[i], to);
}

void tagc_local_reset(tagc_fsdp *f) {
    tagc_local_steps *l = f->local;
    l->n_steps = l->n_rounds = 0;
    l->has_anchor = 0;
    if (l->velocity != NULL) memset(l->velocity, 0, l->n_elems * sizeof *l->velocity);
    for (int i = 0; i < l->n_parts; i++) tagc_reducer_scale_residual(l->parts[i].reducer, 0);
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

static void bytes_of(const tagc_fsdp *f, uint64_t *sent, uint64_t *received) {
    uint64_t more_sent[TAGC_N_LEGS], more_received[TAGC_N_LEGS];
    tagc_comm_bytes(f->all, sent, received, TAGC_N_LEGS);
    tagc_comm_bytes(f->local->between, more_sent, more_received, TAGC_N_LEGS);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        sent[leg] += more_sent[leg];
        received[leg] += more_received[leg];
    }
}

tagc_status tagc_local_begin_step(tagc_fsdp *f) {
    tagc_local_steps *l = f->local;
    bytes_of(f, l->sent_before, l->received_before);
    if (l->has_anchor) return TAGC_OK;
    move(f, TO_ANCHOR);
    TAGC_TRY(compare_anchors(f));
    l->has_anchor = 1;
    return TAGC_OK;
}

/* ---- a round ---- */

static tagc_status check_delta(const tagc_local_steps *l) {
    for (uint64_t i = 0; i < l->n_elems; i++)
        if (!isfinite(l->delta[i]))
            return tagc_fail(TAGC_ERR_STATE, "the parameters of site %d are not finite after %llu steps",
                             l->site, (unsigned long long)l->n_steps);
    return TAGC_OK;
}

static void add_stats(tagc_fsdp *f, const tagc_local_part *part, const tagc_reducer_stats *s) {
    tagc_fsdp_stats *sum = &f->account.stats;
    for (int phase = 0; phase < TAGC_N_PHASES; phase++) sum->phase_s[phase] += s->time_s[phase];
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) sum->n_class_bytes_sent[part->class_] += s->n_bytes_sent[leg];
    if (part->class_ == TAGC_CLASS_MILD) {
        sum->n_mild += part->n_elems;
        sum->n_mild_kept += s->n_kept;
    }
    if (part->class_ != TAGC_CLASS_COMPRESSED) return;
    sum->n_compressed += part->n_elems;
    sum->n_kept += s->n_kept;
    sum->n_union += s->n_union;
}

/* Waits for every exchange that began, also after a failure, because peers wait for this rank. */
static tagc_status exchange(tagc_fsdp *f) {
    tagc_local_steps *l = f->local;
    tagc_status status = TAGC_OK;
    int n_begun = 0, is_finite = 1;
    for (; status == TAGC_OK && n_begun < l->n_parts; n_begun += status == TAGC_OK) {
        const tagc_local_part *part = &l->parts[n_begun];
        status = tagc_reducer_begin(part->reducer, l->delta + part->at, l->mean + part->at);
    }
    for (int i = 0; i < n_begun; i++) {
        tagc_reducer_stats stats;
        tagc_reducer_stats_init(&stats);
        tagc_status ended = tagc_reducer_end(l->parts[i].reducer, &stats);
        if (ended != TAGC_OK && status == TAGC_OK) status = ended;
        if (ended == TAGC_OK) add_stats(f, &l->parts[i], &stats);
        is_finite &= ended != TAGC_OK || !stats.nonfinite;
    }
    if (status == TAGC_OK && !is_finite)
        status = tagc_fail(TAGC_ERR_STATE, "a pseudo-gradient overflows after %llu steps",
                           (unsigned long long)l->n_steps);
    return tagc_agree(f->all, status);
}

/* Every site computes the same result from the same bits. */
static void outer_step(tagc_local_steps *l) {
    float lr = (float)l->options.outer_lr, momentum = (float)l->options.outer_momentum;
    for (uint64_t i = 0; i < l->n_elems; i++) {
        float step = l->mean[i];
        if (l->velocity != NULL) {
            l->velocity[i] = l->velocity[i] * momentum + step;
            step += l->velocity[i] * momentum;
        }
        l->anchor[i] -= step * lr;
    }
}

/* Counts the bytes since the step began or since the last count. */
static void count_bytes(tagc_fsdp *f) {
    tagc_local_steps *l = f->local;
    tagc_fsdp_stats *s = &f->account.stats;
    uint64_t sent[TAGC_N_LEGS], received[TAGC_N_LEGS];
    bytes_of(f, sent, received);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        s->n_bytes_sent[leg] += sent[leg] - l->sent_before[leg];
        s->n_bytes_received[leg] += received[leg] - l->received_before[leg];
        s->bits_per_param[leg] = (double)s->n_bytes_sent[leg] * 8 / (double)tagc_fsdp_n_params(f);
    }
    memcpy(l->sent_before, sent, sizeof sent);
    memcpy(l->received_before, received, sizeof received);
}

static tagc_status run_round(tagc_fsdp *f) {
    tagc_local_steps *l = f->local;
    double start_s = tagc_time_s();
    move(f, TO_DELTA);
    tagc_status status = tagc_agree(f->all, check_delta(l));
    if (status == TAGC_OK) status = exchange(f);
    tagc_account_blocked(&f->account, start_s, &f->account.stats.wait_reduce_s, -1, f->order.pass);
    TAGC_TRY(status);
    start_s = tagc_time_s();
    outer_step(l);
    move(f, TO_MASTER);
    for (int i = 0; l->options.local_decay < 1 && i < l->n_parts; i++)
        TAGC_TRY(tagc_reducer_scale_residual(l->parts[i].reducer, l->options.local_decay));
    tagc_account_event(&f->account, "outer step", start_s, tagc_time_s(), UINT64_MAX);
    l->n_steps = 0;
    f->account.stats.n_rounds = ++l->n_rounds;
    f->account.stats.is_round = 1;
    count_bytes(f);
    return TAGC_OK;
}

tagc_status tagc_local_end_step(tagc_fsdp *f) {
    tagc_local_steps *l = f->local;
    f->account.stats.n_rounds = l->n_rounds;
    return ++l->n_steps >= (uint64_t)l->options.local_steps ? run_round(f) : TAGC_OK;
}

tagc_status tagc_fsdp_synchronize(tagc_fsdp *f, tagc_fsdp_stats *stats) {
    if (f->deferred != TAGC_OK) return tagc_fail(f->deferred, "%s", f->deferred_text);
    if (f->order.micro_step != 0)
        return tagc_fail(TAGC_ERR_STATE, "a round between a backward pass and its step");
    if (f->local != NULL && f->local->n_steps > 0) {
        double start_s = tagc_time_s(), waited_s = f->account.stats.wait_reduce_s;
        TAGC_TRY(run_round(f));
        double took_s = tagc_time_s() - start_s;
        f->account.stats.total_s += took_s;
        f->account.stats.optimizer_s += took_s - (f->account.stats.wait_reduce_s - waited_s);
    }
    if (stats != NULL) *stats = f->account.stats;
    return TAGC_OK;
}

int tagc_fsdp_round_is_due(const tagc_fsdp *f) {
    return f->local == NULL || f->local->n_steps + 1 >= (uint64_t)f->local->options.local_steps;
}

tagc_comm *tagc_fsdp_comm(const tagc_fsdp *f) {
    return f->comm;
}
