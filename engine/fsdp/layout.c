/* The layout: the wrap assigns tensors to units, the policy assigns them to one flat per unit and class, and the order of
 * units assigns buffers. It is a pure function of table, options, rank and world size. */
#include "fsdp/layout.h"

#include "exchange/volume.h"
#include "fsdp/internal.h"
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int is_large_matrix(const tagc_tensor_info *t) {
    return t->n_cols > 1 && t->n_elems > TAGC_LARGE_MATRIX_ELEMS;
}

static int matches(const char *patterns, const char *name) {
    while (*patterns != 0) {
        size_t n = strcspn(patterns, ",");
        char pattern[256];
        if (n > 0 && n < sizeof pattern) {
            memcpy(pattern, patterns, n);
            pattern[n] = 0;
            if (fnmatch(pattern, name, 0) == 0) return 1;
        }
        patterns += n + (patterns[n] == ',');
    }
    return 0;
}

static int is_compressed(const tagc_fsdp_options *options, const tagc_tensor_info *t) {
    switch (options->policy) {
    case TAGC_POLICY_NON_ATTENTION_LINEAR:
        return t->kind == TAGC_TENSOR_MLP || t->kind == TAGC_TENSOR_EMBEDDING ||
               t->kind == TAGC_TENSOR_HEAD || t->kind == TAGC_TENSOR_ATTENTION_PROJECTION;
    case TAGC_POLICY_PAPER:
        return is_large_matrix(t);
    case TAGC_POLICY_ALL:
        return 1;
    case TAGC_POLICY_NAMES:
        return matches(options->names, t->name);
    default:
        return 0;
    }
}

tagc_class tagc_fsdp_class(const tagc_fsdp_options *options, const tagc_tensor_info *t) {
    if (is_compressed(options, t)) return TAGC_CLASS_COMPRESSED;
    return t->n_cols > 1 && options->mild.exchange == TAGC_EXCHANGE_DIRECT ? TAGC_CLASS_MILD
                                                                           : TAGC_CLASS_DENSE;
}

static tagc_status check_tensor(const tagc_tensor_info *t, int i) {
    if (memchr(t->name, 0, sizeof t->name) == NULL || t->name[0] == 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "tensor %d has no name or one of more than %d bytes", i,
                         TAGC_TENSOR_NAME_BYTES - 1);
    if (t->n_rows == 0 || t->n_cols == 0 || t->n_elems / t->n_rows != t->n_cols ||
        t->n_elems % t->n_rows != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "tensor %s has %zu elements in %zu x %zu", t->name, t->n_elems,
                         t->n_rows, t->n_cols);
    if (t->layer < 0) return tagc_fail(TAGC_ERR_ARGUMENT, "tensor %s has layer %d", t->name, t->layer);
    return TAGC_OK;
}

static void place_tables(tagc_fsdp *f, tagc_arena *arena) {
    size_t n = (size_t)f->tables.n_tensors;
    f->tables.tensors = tagc_arena_take(arena, n, sizeof *f->tables.tensors);
    f->tables.places = tagc_arena_take(arena, n, sizeof *f->tables.places);
    f->tables.members = tagc_arena_take(arena, n, sizeof *f->tables.members);
    f->tables.units = tagc_arena_take(arena, n, sizeof *f->tables.units);
    f->tables.backward_order = tagc_arena_take(arena, n, sizeof *f->tables.backward_order);
    f->tables.flats = tagc_arena_take(arena, n + 1, sizeof *f->tables.flats); /* one spare, to try a tensor */
    f->tables.buffers = tagc_arena_take(arena, n, sizeof *f->tables.buffers);
    f->tables.gradient_buffers = tagc_arena_take(arena, n, sizeof *f->tables.gradient_buffers);
    f->norms = tagc_arena_take(arena, (size_t)f->world_size, sizeof *f->norms);
}

/* Units are numbered by their first tensor, which is the order in which a forward pass meets them. */
static void assign_units(tagc_fsdp *f) {
    for (int i = 0; i < f->tables.n_tensors; i++) {
        const tagc_tensor_info *t = &f->tables.tensors[i];
        int alone = f->options.wrap == TAGC_WRAP_MATRIX && is_large_matrix(t), unit = f->tables.n_units;
        for (int j = 0; j < i && !alone && unit == f->tables.n_units; j++) {
            int together = f->options.wrap == TAGC_WRAP_BLOCK ? f->tables.tensors[j].layer == t->layer
                                                              : !is_large_matrix(&f->tables.tensors[j]);
            if (together) unit = f->tables.places[j].unit;
        }
        f->tables.n_units += unit == f->tables.n_units;
        f->tables.places[i].unit = unit;
        f->tables.units[unit].n_tensors++;
        f->tables.units[unit].n_elems += t->n_elems;
    }
}

/* "h.3" for a block (the common start of all names, up to a dot), else the first words of the names, joined by +. */
static void name_unit(tagc_fsdp *f, int unit) {
    char *name = f->tables.units[unit].name;
    size_t common = 0;
    const char *first = NULL;
    int n = 0;
    for (int i = 0; i < f->tables.n_tensors; i++) {
        if (f->tables.places[i].unit != unit) continue;
        const char *other = f->tables.tensors[i].name;
        if (n++ == 0) {
            first = other;
            common = strlen(first);
            continue;
        }
        size_t same = 0;
        while (same < common && first[same] == other[same]) same++;
        while (same > 0 && first[same] != '.') same--;
        common = same;
    }
    if (f->options.wrap == TAGC_WRAP_MATRIX && n > 1) {
        snprintf(name, TAGC_TENSOR_NAME_BYTES, "root");
    } else if (common > 0) {
        snprintf(name, TAGC_TENSOR_NAME_BYTES, "%.*s", (int)common, first);
    } else {
        const char *last = "";
        for (int i = 0; i < f->tables.n_tensors; i++) {
            const char *word = f->tables.tensors[i].name;
            size_t n_word = strcspn(word, ".");
            if (f->tables.places[i].unit != unit ||
                (strncmp(word, last, n_word) == 0 && strcspn(last, ".") == n_word))
                continue;
            size_t used = strlen(name);
            snprintf(name + used, TAGC_TENSOR_NAME_BYTES - used, "%s%.*s", used > 0 ? "+" : "", (int)n_word,
                     word);
            last = word;
        }
    }
}

/* Backward does not read an embedding, so a bucket would gather it there for nothing. A tensor that head and embedding
 * share stays gathered for the whole pass. Both keep a unit of their own. */
static int stays_alone(const tagc_fsdp *f, int unit) {
    for (int i = 0; i < f->tables.n_tensors; i++) {
        const tagc_tensor_info *t = &f->tables.tensors[i];
        if (f->tables.places[i].unit != unit) continue;
        if (t->kind == TAGC_TENSOR_EMBEDDING || t->last_layer != t->layer) return 1;
    }
    return 0;
}

/* Moves all tensors of unit `from` into `to`, the unit before it. */
static void join(tagc_fsdp *f, int to, int from) {
    tagc_layout_unit *u = &f->tables.units[to];
    char first[TAGC_TENSOR_NAME_BYTES], last[TAGC_TENSOR_NAME_BYTES];
    snprintf(first, sizeof first, "%s", u->name);
    snprintf(last, sizeof last, "%s", f->tables.units[from].name);
    first[strcspn(first, "-")] = 0;
    snprintf(u->name, sizeof u->name, "%.22s-%.22s", first, last);
    u->n_tensors += f->tables.units[from].n_tensors;
    u->n_elems += f->tables.units[from].n_elems;
    for (int i = 0; i < f->tables.n_tensors; i++)
        if (f->tables.places[i].unit == from) f->tables.places[i].unit = to;
}

/* Buckets: a unit of fewer than bucket_elems values is joined with the next, if both are units of one layer. If the last
 * bucket stays too small, it is joined with the one before. */
static void join_neighbours(tagc_fsdp *f) {
    uint64_t least = f->options.bucket_elems;
    int n_units = 0, can_join = 0; /* the unit before */
    for (int unit = 0; unit < f->tables.n_units; unit++) {
        int joins = !stays_alone(f, unit);
        uint64_t n_left = 0; /* values from here to the end of this run of units that may join */
        for (int next = unit; next < f->tables.n_units && !stays_alone(f, next) && n_left < least; next++)
            n_left += f->tables.units[next].n_elems;
        if (joins && can_join && (f->tables.units[n_units - 1].n_elems < least || n_left < least)) {
            join(f, n_units - 1, unit);
            continue;
        }
        can_join = joins;
        f->tables.units[n_units] = f->tables.units[unit];
        for (int i = 0; n_units != unit && i < f->tables.n_tensors; i++)
            if (f->tables.places[i].unit == unit) f->tables.places[i].unit = n_units;
        n_units++;
    }
    f->tables.n_units = n_units;
}

static void describe_unit(tagc_fsdp *f, int unit) {
    tagc_layout_unit *u = &f->tables.units[unit];
    int first = -1, last = -1; /* layers */
    for (int i = 0; i < f->tables.n_tensors; i++) {
        const tagc_tensor_info *t = &f->tables.tensors[i];
        if (f->tables.places[i].unit != unit) continue;
        int is_shared = t->last_layer != t->layer;
        u->n_uses += 1 + is_shared;
        first = first < 0 || t->layer < first ? t->layer : first;
        last = t->last_layer > last ? t->last_layer : last;
        u->spans |= is_shared;
    }
    /* From its first to its last layer, a bucket is the only unit in use. */
    if (f->options.wrap != TAGC_WRAP_BLOCK) u->spans = first != last;
    u->position[TAGC_PASS_FORWARD] = unit;
}

/* A backward pass reaches a unit first at its last use. A tensor shared with the head is used after all others of that
 * layer. */
static uint64_t backward_key(const tagc_fsdp *f, int unit) {
    uint64_t key = 0, n = (uint64_t)f->tables.n_tensors;
    for (int i = 0; i < f->tables.n_tensors; i++) {
        if (f->tables.places[i].unit != unit) continue;
        const tagc_tensor_info *t = &f->tables.tensors[i];
        uint64_t k = (uint64_t)t->last_layer * 2 * n + (t->last_layer != t->layer ? n : 0) + (uint64_t)i;
        key = k > key ? k : key;
    }
    return key;
}

static void order_backward(tagc_fsdp *f) {
    for (int unit = 0; unit < f->tables.n_units; unit++) {
        uint64_t key = f->tables.units[unit].backward_key = backward_key(f, unit);
        int at = unit;
        for (; at > 0 && f->tables.units[f->tables.backward_order[at - 1]].backward_key < key; at--)
            f->tables.backward_order[at] = f->tables.backward_order[at - 1];
        f->tables.backward_order[at] = unit;
    }
    for (int at = 0; at < f->tables.n_units; at++)
        f->tables.units[f->tables.backward_order[at]].position[TAGC_PASS_BACKWARD] = at;
}

void tagc_fsdp_owned(const tagc_fsdp *f, uint64_t n_padded, int rank, uint64_t *first, uint64_t *n_owned) {
    *n_owned = n_padded / (uint64_t)f->n_owners;
    *first = (uint64_t)(rank % f->n_owners) * *n_owned;
}

uint64_t tagc_fsdp_own_part(uint64_t n_padded, int world_size, int n_owners, int rank) {
    uint64_t host = (uint64_t)(rank / n_owners), row = (uint64_t)(rank % n_owners);
    return row * (n_padded / (uint64_t)n_owners) + host * (n_padded / (uint64_t)world_size);
}

static void make_flats(tagc_fsdp *f) {
    int n_members = 0;
    for (int unit = 0; unit < f->tables.n_units; unit++) {
        tagc_layout_unit *u = &f->tables.units[unit];
        u->first_flat = f->tables.n_flats;
        for (int class_ = 0; class_ < TAGC_N_CLASSES; class_++) {
            tagc_flat *flat = &f->tables.flats[f->tables.n_flats];
            flat->unit = unit;
            flat->class_ = class_;
            flat->first_member = n_members;
            flat->unit_offset = u->n_padded;
            for (int i = 0; i < f->tables.n_tensors; i++) {
                if (f->tables.places[i].unit != unit ||
                    (int)tagc_fsdp_class(&f->options, &f->tables.tensors[i]) != class_)
                    continue;
                f->tables.places[i].flat = f->tables.n_flats;
                f->tables.places[i].offset = flat->n_elems;
                flat->n_elems += f->tables.tensors[i].n_elems;
                f->tables.members[n_members++] = i;
            }
            flat->n_members = n_members - flat->first_member;
            if (flat->n_members == 0) continue;
            flat->n_padded = tagc_padded_elems(flat->n_elems, f->world_size);
            tagc_fsdp_owned(f, flat->n_padded, f->rank, &flat->first_owned, &flat->n_owned);
            u->n_padded += flat->n_padded;
            u->n_flats++;
            f->tables.n_flats++;
        }
    }
}

static void find_owned(tagc_fsdp *f) {
    for (int i = 0; i < f->tables.n_tensors; i++) {
        tagc_place *p = &f->tables.places[i];
        const tagc_flat *flat = &f->tables.flats[p->flat];
        uint64_t begin = p->offset, end = p->offset + f->tables.tensors[i].n_elems;
        uint64_t owned_end = flat->first_owned + flat->n_owned;
        begin = begin < flat->first_owned ? flat->first_owned : begin;
        end = end > owned_end ? owned_end : end;
        if (begin >= end) continue; /* this rank owns nothing of it */
        p->first = begin - p->offset;
        p->at = begin - flat->first_owned;
        p->n = end - begin;
    }
}

/* Units of one layer share buffers [0, n_shared) in turn. Every other unit has a buffer of its own. */
static int assign_buffers(tagc_fsdp *f, tagc_buffer *buffers, int n_shared, int gradients) {
    int n_buffers = 0, n_transient = 0;
    for (int unit = 0; unit < f->tables.n_units; unit++)
        n_transient += n_shared > 0 && !f->tables.units[unit].spans;
    n_shared = n_shared < n_transient ? n_shared : n_transient;
    n_buffers = n_shared;
    n_transient = 0;
    for (int unit = 0; unit < f->tables.n_units; unit++) {
        tagc_layout_unit *u = &f->tables.units[unit];
        int buffer = n_shared > 0 && !u->spans ? n_transient++ % n_shared : n_buffers++;
        *(gradients ? &u->gradient_buffer : &u->buffer) = buffer;
        if (buffers[buffer].n_elems < u->n_padded) buffers[buffer].n_elems = u->n_padded;
    }
    return n_buffers;
}

tagc_status tagc_fsdp_layout(tagc_fsdp *f, const tagc_tensor_info *tensors, int n_tensors) {
    if (tensors == NULL || n_tensors < 1 || n_tensors > 1000000)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_tensors is %d, allowed is 1 to 1000000", n_tensors);
    const tagc_fsdp_options *o = &f->options;
    if (f->world_size % o->ranks_per_host != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "ranks_per_host is %d, allowed is a divisor of the world size %d",
                         o->ranks_per_host, f->world_size);
    f->n_owners = o->sharding == TAGC_SHARD_NONE     ? 1
                  : o->sharding == TAGC_SHARD_HYBRID ? o->ranks_per_host
                                                     : f->world_size;
    f->tables.n_tensors = n_tensors;
    tagc_arena arena = {0};
    place_tables(f, &arena);
    TAGC_TRY(tagc_memory_create(arena.n_bytes, "tables of the engine", &f->tables_memory));
    arena = (tagc_arena){.base = f->tables_memory};
    place_tables(f, &arena);
    for (int i = 0; i < n_tensors; i++) {
        TAGC_TRY(check_tensor(&tensors[i], i));
        f->tables.tensors[i] = tensors[i];
        if (f->tables.tensors[i].last_layer < f->tables.tensors[i].layer)
            f->tables.tensors[i].last_layer = f->tables.tensors[i].layer;
    }
    assign_units(f);
    for (int unit = 0; unit < f->tables.n_units; unit++) name_unit(f, unit);
    if (o->bucket_elems > 0) join_neighbours(f);
    for (int unit = 0; unit < f->tables.n_units; unit++) describe_unit(f, unit);
    order_backward(f);
    make_flats(f);
    find_owned(f);
    int accumulates = o->n_micro_steps > 1 && !o->exchange_each_micro_step;
    if (o->sharding != TAGC_SHARD_NONE)
        f->tables.n_buffers =
            assign_buffers(f, f->tables.buffers, tagc_order_releases(o) ? o->prefetch + 1 : 0, 0);
    f->tables.n_gradient_buffers =
        assign_buffers(f, f->tables.gradient_buffers, accumulates ? 0 : o->grads_in_flight, 1);
    return TAGC_OK;
}

/* How long a flat has a first moment. */
typedef enum { MOMENT_NEVER, MOMENT_FADES, MOMENT_ALWAYS } moment_span;

static moment_span span_of_moment(const tagc_fsdp *f, const tagc_flat *flat) {
    const tagc_fsdp_options *o = &f->options;
    double least = flat->class_ == TAGC_CLASS_COMPRESSED ? o->beta1_compressed : o->beta1;
    if (least > 0) return MOMENT_ALWAYS;
    return tagc_fsdp_has_levels(f, flat) && o->beta1 > 0 ? MOMENT_FADES : MOMENT_NEVER;
}

static void place_values(tagc_fsdp *f, tagc_arena *arena) {
    const tagc_fsdp_options *o = &f->options;
    int each = o->exchange_each_micro_step && o->n_micro_steps > 1;
    size_t before = arena->n_bytes;
    for (int i = 0; i < f->tables.n_buffers; i++)
        f->tables.buffers[i].values = tagc_arena_take(arena, f->tables.buffers[i].n_elems, sizeof(float));
    for (int i = 0; i < f->tables.n_flats; i++)
        f->tables.flats[i].master = tagc_arena_take(arena, f->tables.flats[i].n_owned, sizeof(float));
    f->memory.parameters = arena->n_bytes - before;
    before = arena->n_bytes;
    for (int i = 0; i < f->tables.n_gradient_buffers; i++)
        f->tables.gradient_buffers[i].values =
            tagc_arena_take(arena, f->tables.gradient_buffers[i].n_elems, sizeof(float));
    for (int i = 0; i < f->tables.n_flats; i++) {
        f->tables.flats[i].gradient = tagc_arena_take(arena, f->tables.flats[i].n_owned, sizeof(float));
        f->tables.flats[i].received =
            each ? tagc_arena_take(arena, f->tables.flats[i].n_owned, sizeof(float)) : NULL;
    }
    f->memory.gradients = arena->n_bytes - before;
    before = arena->n_bytes;
    size_t n_fading = 0;
    for (int i = 0; i < f->tables.n_flats; i++) {
        tagc_flat *flat = &f->tables.flats[i];
        moment_span span = span_of_moment(f, flat);
        flat->moment1 = span == MOMENT_ALWAYS ? tagc_arena_take(arena, flat->n_owned, sizeof(float)) : NULL;
        flat->moment2 = tagc_arena_take(arena, flat->n_owned, sizeof(float));
        if (span == MOMENT_FADES) n_fading += flat->n_owned * sizeof(float);
    }
    f->memory.optimizer = arena->n_bytes - before + n_fading;
}

/* The bytes that _place would allocate at once; sets f->memory. */
static tagc_status measure(tagc_fsdp *f, size_t *n_bytes) {
    tagc_arena arena = {0};
    place_values(f, &arena);
    if (arena.overflow) return tagc_fail(TAGC_ERR_MEMORY, "the model does not fit into the address space");
    *n_bytes = arena.n_bytes;
    return TAGC_OK;
}

tagc_status tagc_fsdp_place(tagc_fsdp *f) {
    size_t n_bytes = 0;
    TAGC_TRY(measure(f, &n_bytes));
    TAGC_TRY(tagc_memory_create(n_bytes, "parameters, gradients and moments", &f->values_memory));
    tagc_arena arena = {.base = f->values_memory};
    place_values(f, &arena);
    for (int i = 0; i < f->tables.n_flats; i++) {
        tagc_flat *flat = &f->tables.flats[i];
        const tagc_layout_unit *u = &f->tables.units[flat->unit];
        if (span_of_moment(f, flat) == MOMENT_FADES) {
            TAGC_TRY(
                tagc_memory_create(flat->n_owned * sizeof(float), "a first moment", &flat->fading_moment1));
            flat->moment1 = flat->fading_moment1;
        }
        flat->full =
            f->tables.n_buffers == 0 ? flat->master : f->tables.buffers[u->buffer].values + flat->unit_offset;
        flat->full_gradient = f->tables.gradient_buffers[u->gradient_buffer].values + flat->unit_offset;
    }
    return TAGC_OK;
}

void tagc_fsdp_drop_moment(tagc_fsdp *f, tagc_flat *flat) {
    if (flat->fading_moment1 == NULL) return;
    tagc_memory_destroy(flat->fading_moment1);
    flat->fading_moment1 = NULL;
    flat->moment1 = NULL;
    f->memory.optimizer -= flat->n_owned * sizeof(float);
}

/* ---- the layout of an engine, without the engine ---- */

static tagc_status copy(const tagc_fsdp *f, tagc_layout *out) {
    size_t n_tensors = (size_t)f->tables.n_tensors, n_units = (size_t)f->tables.n_units,
           n_flats = (size_t)f->tables.n_flats;
    *out = (tagc_layout){.world_size = f->world_size,
                         .n_tensors = f->tables.n_tensors,
                         .n_units = f->tables.n_units,
                         .n_flats = f->tables.n_flats,
                         .n_buffers = f->tables.n_buffers,
                         .n_gradient_buffers = f->tables.n_gradient_buffers,
                         .n_params = tagc_fsdp_n_params(f),
                         .n_compressed = tagc_fsdp_n_compressed(f),
                         .n_mild = tagc_fsdp_n_mild(f),
                         .memory = f->memory};
    out->unit_of_tensor = calloc(n_tensors, sizeof *out->unit_of_tensor);
    out->backward_order = calloc(n_units, sizeof *out->backward_order);
    out->units = calloc(n_units, sizeof *out->units);
    out->flats = calloc(n_flats, sizeof *out->flats);
    if (!out->unit_of_tensor || !out->backward_order || !out->units || !out->flats)
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for a layout of %d tensors", f->tables.n_tensors);
    for (int i = 0; i < f->tables.n_tensors; i++) out->unit_of_tensor[i] = f->tables.places[i].unit;
    memcpy(out->backward_order, f->tables.backward_order, n_units * sizeof *out->backward_order);
    memcpy(out->units, f->tables.units, n_units * sizeof *out->units);
    out->paper = f->options.paper;
    for (int i = 0; i < f->tables.n_flats; i++) {
        tagc_layout_flat *to = &out->flats[i];
        TAGC_TRY(tagc_fsdp_flat_info(f, i, to));
        if (to->reducer.paper) to->reducer.paper = &out->paper;
        tagc_exchange_memory memory;
        TAGC_TRY(tagc_reducer_memory(&to->reducer, f->world_size / to->n_adding, TAGC_FED_NOT, &memory));
        out->memory.residuals += memory.residual;
        out->n_owned += f->tables.flats[i].n_owned;
    }
    return TAGC_OK;
}

tagc_status tagc_layout_create(const tagc_tensor_info *tensors, int n_tensors,
                               const tagc_fsdp_options *options, int world_size, tagc_layout **out) {
    *out = NULL;
    if (world_size < 1 || world_size > 65536)
        return tagc_fail(TAGC_ERR_ARGUMENT, "world_size is %d, allowed is 1 to 65536", world_size);
    TAGC_TRY(tagc_fsdp_options_check(options));
    tagc_fsdp *f = calloc(1, sizeof *f);
    tagc_layout *layout = calloc(1, sizeof *layout);
    size_t n_bytes = 0;
    tagc_status status = TAGC_OK;
    if (!f || !layout) status = tagc_fail(TAGC_ERR_MEMORY, "no memory for a layout");
    if (status == TAGC_OK) {
        f->world_size = world_size;
        f->options = *options;
        tagc_fsdp_options_resolve(&f->options);
        status = tagc_fsdp_layout(f, tensors, n_tensors);
    }
    if (status == TAGC_OK) status = measure(f, &n_bytes);
    if (status == TAGC_OK) status = copy(f, layout);
    if (f) tagc_memory_destroy(f->tables_memory);
    free(f);
    if (status != TAGC_OK) {
        tagc_layout_destroy(layout);
        return status;
    }
    *out = layout;
    return TAGC_OK;
}

void tagc_layout_destroy(tagc_layout *layout) {
    if (!layout) return;
    free(layout->unit_of_tensor);
    free(layout->backward_order);
    free(layout->units);
    free(layout->flats);
    free(layout);
}
