/* What sites exchange: fragments of the model, their parts with a reducer each, and the arrays. */
#include "exchange/options.h"
#include "fsdp/internal.h"
#include <stdlib.h>

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
    o.beta2_compressed = o.beta2;
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

/* Tensors [first, end). */
typedef struct range {
    int first, end;
} range;

/* Makes the next part from this rank's share of the tensors of a class in a range: of one unit, or of all units if unit is
 * -1. All ranks of a site have the same parts, some of which may hold only padding. */
static void add_part(const tagc_fsdp *f, tagc_local_steps *l, range tensors, int class_, int unit,
                     int *n_members) {
    tagc_local_part *part = &l->parts[l->n_parts];
    *part = (tagc_local_part){.class_ = class_, .first_member = *n_members, .at = l->n_elems};
    for (int i = tensors.first; i < tensors.end; i++) {
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

/* A tensor belongs to the fragment that its middle lies in, if the model is cut into equal lengths; but none is empty. */
static range next_range(const tagc_fsdp *f, int fragment, int n_fragments, int first, uint64_t *n_done) {
    uint64_t n_all = 0, n = (uint64_t)n_fragments, i = (uint64_t)fragment;
    int end = first, most = f->tables.n_tensors - (n_fragments - fragment - 1);
    for (int k = 0; k < f->tables.n_tensors; k++) n_all += f->tables.tensors[k].n_elems;
    for (; end < most; end++) {
        uint64_t n_elems = f->tables.tensors[end].n_elems;
        if (end > first && i + 1 < n && (2 * *n_done + n_elems) * n > 2 * (i + 1) * n_all) break;
        *n_done += n_elems;
    }
    return (range){first, end};
}

static void add_fragments(tagc_fsdp *f, tagc_local_steps *l) {
    uint64_t n_done = 0, every = (uint64_t)l->options.local_steps;
    range tensors = {0, 0};
    int n_members = 0;
    for (int i = 0; i < l->n_fragments; i++) {
        tagc_local_fragment *fragment = &l->fragments[i];
        *fragment =
            (tagc_local_fragment){.first_part = l->n_parts,
                                  .at = l->n_elems,
                                  .due = ((uint64_t)i + 1) * every / (uint64_t)l->n_fragments % every};
        tensors = next_range(f, i, l->n_fragments, tensors.end, &n_done);
        for (int unit = 0; unit < f->tables.n_units; unit++) {
            add_part(f, l, tensors, TAGC_CLASS_COMPRESSED, unit, &n_members);
            add_part(f, l, tensors, TAGC_CLASS_MILD, unit, &n_members);
        }
        add_part(f, l, tensors, TAGC_CLASS_DENSE, -1, &n_members);
        fragment->n_parts = l->n_parts - fragment->first_part;
        fragment->n_elems = l->n_elems - fragment->at;
    }
}

static void place(tagc_local_steps *l, tagc_arena *arena) {
    l->anchor = tagc_arena_take(arena, l->n_elems, sizeof(float));
    l->delta = tagc_arena_take(arena, l->n_elems, sizeof(float));
    l->mean = tagc_arena_take(arena, l->n_elems, sizeof(float));
    l->velocity = l->options.outer_momentum > 0 ? tagc_arena_take(arena, l->n_elems, sizeof(float)) : NULL;
    l->before = l->options.local_delay > 0 ? tagc_arena_take(arena, l->n_elems, sizeof(float)) : NULL;
}

tagc_status tagc_local_lay_out(tagc_fsdp *f, const tagc_fsdp_options *options, int n_sites) {
    tagc_local_steps *l = f->local = calloc(1, sizeof *l);
    size_t n = (size_t)f->tables.n_tensors;
    if (l != NULL) {
        *l = (tagc_local_steps){
            .options = *options, .n_sites = n_sites, .n_fragments = options->local_fragments};
        if (l->n_fragments > f->tables.n_tensors)
            return tagc_fail(TAGC_ERR_ARGUMENT,
                             "local_fragments is %d, allowed is 1 to %zu, the tensors of this model",
                             l->n_fragments, n);
        l->fragments = calloc((size_t)l->n_fragments, sizeof *l->fragments);
        l->parts = calloc(n + 1, sizeof *l->parts); /* one spare, to try a part */
        l->members = calloc(n, sizeof *l->members);
    }
    if (l == NULL || l->fragments == NULL || l->parts == NULL || l->members == NULL)
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for local steps of %zu tensors", n);
    add_fragments(f, l);
    uint64_t n_bytes = l->n_elems * sizeof(float);
    f->memory.gradients += 2 * n_bytes;
    f->memory.optimizer += (l->options.outer_momentum > 0 ? 2 : 1) * n_bytes;
    f->memory.residuals += l->options.local_delay > 0 ? n_bytes : 0;
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
        TAGC_TRY(tagc_reducer_create(l->between, &l->parts[i].options, &l->parts[i].reducer));
        tagc_reducer_residual(l->parts[i].reducer, &l->parts[i].n_residual);
        f->memory.residuals += l->parts[i].n_residual * sizeof(float);
    }
    return TAGC_OK;
}

void tagc_local_destroy(tagc_fsdp *f) {
    tagc_local_steps *l = f->local;
    if (l == NULL) return;
    for (int i = 0; i < l->n_parts; i++)
        tagc_reducer_destroy(l->parts[i].reducer); /* waits for rounds under way */
    tagc_comm_destroy(l->between);
    tagc_memory_destroy(l->memory);
    free(l->fragments);
    free(l->parts);
    free(l->members);
    free(l);
    f->local = NULL;
}
