/* A tagc_model whose gradients and sums are in a device's memory: what lib/unit asks of a device (unit/unit.h).
 *
 *   caller   begin: where pieces lie -> lists of runs, once | work into streams (job.c, ahead_unit.c) ................ end
 *   thread                                                             tagc_unit_exchange: parts begin, add, end |
 *
 * With kernels, a unit has a tagc_unit, which says what lies where in the streams. It is made for one way in which pieces lie, and for the
 * parts of now; another one is made where either changes. Without, pieces are copied to pinned memory and lib/unit exchanges them there as
 * it does host arrays. An exchange that cannot be enqueued has a ticket all the same, of a unit that is bare: it tells the others. */
#include "codec/elements.h"
#include "core/memory.h"
#include "core/status.h"
#include "gpu/ahead_unit.h"
#include "gpu/store.h"
#include "schedule/constants.h"
#include "unit/unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SQUARES_BYTES = 2 * TAGC_N_SQUARES * sizeof(double) }; /* of a residual and a gradient */
enum { MOST_SQUARES = 16 };                                   /* that find_zeros looks at together */

/* Bytes between the device and a buffer of the queue. */
typedef struct piece_copy {
    char *there;
    size_t at, n_bytes; /* at: in the buffer */
    uint32_t piece;
} piece_copy;

struct tagc_model_place {
    tagc_queue *queue;
    tagc_model_unit *unit;
    tagc_store *store; /* of its reducers with kernels, or NULL */
    tagc_unit *bare;   /* without kernels */
    tagc_unit *ahead;  /* with kernels, for the pieces that are known; or NULL */
    uint64_t ticket;   /* of the last exchange */
    uint64_t step;     /* and its number */
    const ticket *now; /* the queue's thread: what it exchanges */
    double *squares;   /* (n_members) of parts */
    /* Gradients, then sums, of the last exchange: as the caller had them. */
    tagc_piece *pieces; /* (capacity) */
    size_t n_gradients, n_sums, capacity;
    /* Without kernels: the same in a buffer of the queue, and what is copied. */
    tagc_piece *here;   /* (capacity) */
    size_t *at;         /* (capacity) */
    piece_copy *copies; /* (capacity): in, then out */
    size_t n_in, n_out;
};

static tagc_model_place *place_of(const tagc_model_unit *unit) {
    return unit->there;
}

static uint32_t number_of(const tagc_model_unit *unit) {
    return (uint32_t)(unit - unit->model->units);
}

/* ---- life ---- */

static int has_kernels(const void *queue) {
    return ((const tagc_queue *)queue)->kernels != NULL;
}

static tagc_status open_unit(void *queue, tagc_model_unit *unit) {
    void *memory;
    size_t squares_at = tagc_aligned(sizeof(tagc_model_place));
    TAGC_TRY(
        tagc_memory_create(squares_at + unit->n_members * sizeof(double), "a unit on a device", &memory));
    tagc_model_place *m = unit->there = memory;
    *m = (tagc_model_place){.queue = queue, .unit = unit};
    m->squares = (double *)(void *)((char *)memory + squares_at);
    if (!has_kernels(queue)) return TAGC_OK;
    TAGC_TRY(tagc_kernels_enter(m->queue->kernels)); /* for what follows: a step allocates nothing */
    size_t n_bytes = (unit->model->options.rests ? MOST_SQUARES : 1) * (size_t)SQUARES_BYTES;
    tagc_status status = tagc_kernels_reserve(m->queue->kernels, n_bytes, n_bytes);
    tagc_kernels_leave(m->queue->kernels);
    return status == TAGC_OK ? tagc_store_create(queue, &m->store) : status;
}

static void let_go(tagc_model_unit *unit) {
    tagc_model_place *m = place_of(unit);
    if (!m) return;
    tagc_unit_destroy(m->ahead);
    m->ahead = NULL;
}

static void close_unit(tagc_model_unit *unit) {
    tagc_model_place *m = place_of(unit);
    if (!m) return;
    tagc_unit_destroy(m->ahead);
    tagc_unit_destroy(m->bare);
    tagc_store_destroy(m->store);
    tagc_memory_destroy(m->pieces);
    tagc_memory_destroy(m);
    unit->there = NULL;
}

/* Options of what has kernels: of the parts, or of each of their tensors as a part of its own, which needs most: so there is room, too, for
 * the units of models that have the same tensors after this one. Returns how many. */
static uint32_t list_options(const tagc_model_part *parts, uint32_t n_parts, int is_apart,
                             tagc_reducer_options *options) {
    uint32_t n = 0;
    for (uint32_t p = 0; p < n_parts; p++) {
        const tagc_model *model = parts[p].model;
        if (!parts[p].is_there) continue;
        tagc_part_options(&parts[p], &options[n++]);
        if (!is_apart || tagc_model_is_flat(model)) continue;
        uint64_t n_rows = options[n - 1].n_elems / parts[p].width;
        tagc_reducer_options of_part = options[--n];
        for (uint32_t i = 0; i < parts[p].n_members; i++, n++) {
            options[n] = of_part;
            uint64_t room = tagc_member_room(model, &model->tensors[parts[p].members[i]]);
            options[n].n_elems = tagc_padded_elems(room * n_rows, model->n_hosts);
        }
    }
    return n;
}

/* As many bytes as the unit's parts can come to take. Without memory for this, the store grows part by part. */
static void expect(tagc_model_unit *unit, const tagc_model_part *parts, uint32_t n_parts) {
    tagc_store *store = place_of(unit)->store;
    void *memory;
    if (tagc_memory_create(unit->n_members * sizeof(tagc_reducer_options), "options of parts", &memory) !=
        TAGC_OK)
        return;
    for (int is_apart = 0; is_apart < 2; is_apart++) {
        uint32_t n = list_options(parts, n_parts, is_apart, memory);
        (void)tagc_store_expect(store, unit->model->between, memory, n);
    }
    tagc_memory_destroy(memory);
}

static tagc_status make_reducer(tagc_model_part *part, const tagc_reducer_options *options) {
    return tagc_reducer_create_in(place_of(part->unit)->store, part->model->between, options, &part->reducer);
}

static tagc_status residual_square(tagc_model_part *part, double *square) {
    tagc_kernels *k = place_of(part->unit)->queue->kernels;
    const tagc_reducer *r = part->reducer;
    *square = 0;
    if (!r->residual) return TAGC_OK;
    const tagc_squared of = {.residual = r->residual,
                             .format = r->residual_format,
                             .n_rows = (uint32_t)(r->n_residual / r->shard),
                             .n = r->shard,
                             .row_bytes = r->row_bytes};
    TAGC_TRY(tagc_kernels_enter(k));
    tagc_status status = tagc_kernels_reserve(k, SQUARES_BYTES, SQUARES_BYTES);
    if (status == TAGC_OK)
        status = tagc_kernels_check(k, k->maker->runs->squares(&of, (double *)k->work, k->stream));
    if (status == TAGC_OK)
        status = tagc_kernels_copy(k, k->pinned, k->work, SQUARES_BYTES, TAGC_COPY_TO_HOST);
    if (status == TAGC_OK) status = tagc_kernels_wait(k);
    if (status == TAGC_OK) *square = tagc_squares_sum((const double *)(const void *)k->pinned);
    tagc_kernels_leave(k);
    return status;
}

/* Puts the squares of a piece there. */
static tagc_status put_squares(const tagc_model *model, tagc_kernels *k, const tagc_piece *piece, int at) {
    const tagc_squared of = {.gradient = piece->values,
                             .n_gradient = piece->n_elems,
                             .gradient_element = model->options.formats.gradient};
    return tagc_kernels_check(
        k, k->maker->runs->squares(&of, (double *)k->work + (size_t)at * 2 * TAGC_N_SQUARES, k->stream));
}

/* In double, the square of no float is zero but that of zero. */
static tagc_status look_at(tagc_model *model, tagc_kernels *k, const tagc_piece *pieces, int n) {
    tagc_status status = TAGC_OK;
    for (int i = 0; i < n && status == TAGC_OK; i++) status = put_squares(model, k, &pieces[i], i);
    if (status == TAGC_OK)
        status = tagc_kernels_copy(k, k->pinned, k->work, (size_t)n * SQUARES_BYTES, TAGC_COPY_TO_HOST);
    TAGC_TRY(status == TAGC_OK ? tagc_kernels_wait(k) : status);
    const double *squares = (const double *)(const void *)k->pinned;
    for (int i = 0; i < n; i++, squares += (size_t)2 * TAGC_N_SQUARES)
        if (!(tagc_squares_sum(squares + TAGC_N_SQUARES) == 0)) model->tensors[pieces[i].tensor].is_zero = 0;
    return TAGC_OK;
}

static tagc_status find_zeros(tagc_model_unit *unit, void *stream) {
    tagc_model *model = unit->model;
    const tagc_queue *queue = place_of(unit)->queue;
    tagc_kernels *k = queue->kernels;
    for (uint32_t i = 0; i < unit->n_members; i++) model->tensors[unit->members[i]].is_zero = 1;
    TAGC_TRY(tagc_kernels_enter(k));
    tagc_status status = tagc_device_check(queue->device, runtime_of(queue)->StreamSynchronize(stream),
                                           "waiting for the gradients");
    for (size_t at = 0, n; at < unit->n_gradients && status == TAGC_OK; at += n) {
        n = unit->n_gradients - at < MOST_SQUARES ? unit->n_gradients - at : MOST_SQUARES;
        status = look_at(model, k, unit->gradients + at, (int)n);
    }
    tagc_kernels_leave(k);
    return status;
}

/* ---- where pieces lie ---- */

/* As a run of its array and a part's: see unit_part_options. */
typedef struct run_maker {
    tagc_run *runs; /* NULL: counts */
    size_t n;
    const char *base;
    size_t width; /* of an element */
    int is_sums, is_odd;
} run_maker;

static void add_run(void *context, char *values, uint64_t at, uint64_t n) {
    run_maker *m = context;
    uint64_t distance = (uint64_t)(values - m->base);
    m->is_odd |= distance % m->width != 0;
    if (m->runs)
        m->runs[m->n] =
            m->is_sums ? (tagc_run){at, distance / m->width, n} : (tagc_run){distance / m->width, at, n};
    m->n++;
}

static int by_to(const void *a, const void *b) {
    uint64_t x = ((const tagc_run *)a)->to, y = ((const tagc_run *)b)->to;
    return (x > y) - (x < y);
}

/* In the order of what they write, those that are side by side in both arrays as one. */
static size_t join(tagc_run *runs, size_t n) {
    size_t n_joined = 0;
    qsort(runs, n, sizeof *runs, by_to);
    for (size_t i = 0; i < n; i++) {
        tagc_run *last = n_joined > 0 ? &runs[n_joined - 1] : NULL;
        if (last && last->from + last->length == runs[i].from && last->to + last->length == runs[i].to)
            last->length += runs[i].length;
        else
            runs[n_joined++] = runs[i];
    }
    return n_joined;
}

/* The first byte of an array with all pieces, and the bytes of it. */
static char *extent(const tagc_piece *pieces, size_t n, size_t width, size_t *n_bytes) {
    char *first = NULL, *last = NULL;
    for (size_t i = 0; i < n; i++) {
        char *begin = pieces[i].values, *end = begin + pieces[i].n_elems * width;
        if (pieces[i].n_elems == 0) continue;
        if (!first || begin < first) first = begin;
        if (!last || end > last) last = end;
    }
    *n_bytes = (size_t)(last - first);
    return first;
}

typedef struct arrays {
    char *input, *output;
    size_t in_bytes, out_bytes;
} arrays;

static arrays arrays_of(const tagc_model_place *m, const tagc_piece *gradients, size_t n_gradients,
                        const tagc_piece *sums, size_t n_sums) {
    const tagc_model_options *o = &m->unit->model->options;
    arrays a;
    a.input = extent(gradients, n_gradients, tagc_element_bytes(o->formats.gradient), &a.in_bytes);
    a.output = extent(sums, n_sums, tagc_element_bytes(o->formats.sum), &a.out_bytes);
    return a;
}

static int overlaps(const arrays *a) {
    uintptr_t input = (uintptr_t)a->input, output = (uintptr_t)a->output;
    return input < output + a->out_bytes && output < input + a->in_bytes;
}

static int lie_alike(const tagc_piece *a, const tagc_piece *b, size_t n, const char *a_base,
                     const char *b_base) {
    for (size_t i = 0; i < n; i++)
        if (a[i].tensor != b[i].tensor || a[i].first != b[i].first || a[i].n_elems != b[i].n_elems ||
            (a[i].n_elems > 0 && (char *)a[i].values - a_base != (char *)b[i].values - b_base))
            return 0;
    return 1;
}

/* Whether those of the unit lie as the known ones do. */
static int is_known(const tagc_model_place *m, const arrays *a) {
    const tagc_model_unit *u = m->unit;
    const tagc_piece *sums = m->pieces + m->n_gradients;
    if (!m->pieces || u->n_gradients != m->n_gradients || u->n_sums != m->n_sums) return 0;
    arrays known = arrays_of(m, m->pieces, m->n_gradients, sums, m->n_sums);
    return overlaps(&known) == overlaps(a) &&
           lie_alike(m->pieces, u->gradients, m->n_gradients, known.input, a->input) &&
           lie_alike(sums, u->sums, m->n_sums, known.output, a->output);
}

/* Called twice, see tagc_arena. */
static void place_lists(tagc_model_place *m, tagc_arena *arena, size_t n) {
    m->pieces = tagc_arena_take(arena, n, sizeof *m->pieces);
    m->here = tagc_arena_take(arena, n, sizeof *m->here);
    m->at = tagc_arena_take(arena, n, sizeof *m->at);
    m->copies = tagc_arena_take(arena, n, sizeof *m->copies);
}

static tagc_status remember(tagc_model_place *m) {
    const tagc_model_unit *u = m->unit;
    size_t n = u->n_gradients + u->n_sums;
    if (n > m->capacity || !m->pieces) {
        tagc_arena arena = {0};
        tagc_model_place sizes = {0};
        void *memory;
        place_lists(&sizes, &arena, n + 1);
        TAGC_TRY(tagc_memory_create(arena.n_bytes, "lists of pieces", &memory));
        tagc_memory_destroy(m->pieces);
        arena = (tagc_arena){.base = memory};
        place_lists(m, &arena, n + 1);
        m->capacity = n;
    }
    m->n_gradients = u->n_gradients;
    m->n_sums = u->n_sums;
    if (u->n_gradients > 0) memcpy(m->pieces, u->gradients, u->n_gradients * sizeof *m->pieces);
    if (u->n_sums > 0) memcpy(m->pieces + u->n_gradients, u->sums, u->n_sums * sizeof *m->pieces);
    return TAGC_OK;
}

/* ---- with kernels: a tagc_unit for the known pieces ---- */

/* The lists that tagc_unit_make copies. */
typedef struct unit_lists {
    unit_part_options *parts;
    tagc_run *runs;
    uint32_t *numbers, *counts;
    uint64_t *places;
} unit_lists;

static void place_unit_lists(const tagc_model_unit *u, size_t n_runs, size_t n_samples, unit_lists *l,
                             tagc_arena *arena) {
    l->parts = tagc_arena_take(arena, u->n_parts, sizeof *l->parts);
    l->runs = tagc_arena_take(arena, n_runs + 1, sizeof *l->runs);
    l->numbers = tagc_arena_take(arena, u->n_members, sizeof *l->numbers);
    l->counts = tagc_arena_take(arena, u->n_members, sizeof *l->counts);
    l->places = tagc_arena_take(arena, n_samples + 1, sizeof *l->places);
}

/* All that parts sample, in the order in which lib/unit takes it. l NULL: counts. Returns how many there are. */
static size_t list_samples(const tagc_model_unit *u, const char *base, unit_lists *l, uint32_t *n_sampled) {
    const tagc_model *model = u->model;
    size_t n = 0, width = tagc_element_bytes(model->options.formats.gradient);
    *n_sampled = 0;
    for (uint32_t p = 0; p < u->n_parts; p++) {
        const tagc_model_part *part = &u->parts[p];
        for (uint32_t i = 0; part->is_there && part->is_followed && i < part->n_members; i++, ++*n_sampled) {
            const tagc_member *t = &model->tensors[part->members[i]];
            size_t n_before = n;
            for (uint64_t k = 0; k < t->n_samples; k++) {
                uint64_t element = tagc_part_sampled(part, t, k);
                if (element == UINT64_MAX) continue;
                const char *at = tagc_member_at(model, u, t, element);
                if (l) l->places[n] = at ? (uint64_t)(at - base) / width : TAGC_UNCOVERED;
                n++;
            }
            if (!l) continue;
            l->numbers[*n_sampled] = t->parameter;
            l->counts[*n_sampled] = (uint32_t)(n - n_before);
        }
    }
    return n;
}

/* Runs of all parts. l NULL: counts. Returns how many there are, and whether an element is not at a multiple of its size. */
static size_t list_runs(const tagc_model_unit *u, const arrays *a, unit_lists *l, int *is_odd) {
    const tagc_model_options *o = &u->model->options;
    size_t n = 0;
    *is_odd = 0;
    for (uint32_t p = 0; p < u->n_parts; p++)
        for (int is_sums = 0; is_sums < 2; is_sums++) {
            run_maker maker = {.runs = l ? l->runs + n : NULL,
                               .base = is_sums ? a->output : a->input,
                               .width = tagc_element_bytes(is_sums ? o->formats.sum : o->formats.gradient),
                               .is_sums = is_sums};
            tagc_part_runs(&u->parts[p], is_sums, add_run, &maker);
            *is_odd |= maker.is_odd;
            if (l && is_sums) {
                l->parts[p].unpacks = maker.runs;
                l->parts[p].n_unpacks = join(maker.runs, maker.n);
            } else if (l) {
                const tagc_reducer *r = u->parts[p].reducer;
                l->parts[p] = (unit_part_options){.reducer = u->parts[p].reducer,
                                                  .n_gradient = r->n_given,
                                                  .n_output = tagc_reducer_given_output(r),
                                                  .packs = maker.runs,
                                                  .n_packs = join(maker.runs, maker.n)};
            }
            n += maker.n;
        }
    return n;
}

static tagc_status make_ahead(tagc_model_place *m, tagc_unit **out) {
    tagc_model_unit *u = m->unit;
    const tagc_model *model = u->model;
    const tagc_model_options *o = &model->options;
    char label[TAGC_LABEL_BYTES];
    arrays a = arrays_of(m, u->gradients, u->n_gradients, u->sums, u->n_sums);
    unit_lists l;
    tagc_arena arena = {0};
    void *memory;
    uint32_t n_sampled;
    int is_odd;
    size_t n_runs = list_runs(u, &a, NULL, &is_odd), n_samples = list_samples(u, a.input, NULL, &n_sampled);
    if (is_odd)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "gradients or sums lie at a distance that is no multiple of an element's size");
    place_unit_lists(u, n_runs, n_samples, &l, &arena);
    TAGC_TRY(tagc_memory_create(arena.n_bytes, "lists of a unit", &memory));
    arena = (tagc_arena){.base = memory};
    place_unit_lists(u, n_runs, n_samples, &l, &arena);
    list_runs(u, &a, &l, &is_odd);
    list_samples(u, a.input, &l, &n_sampled);
    tagc_unit_label(model, number_of(u), u->members[0], label);
    unit_options options = {.what = label,
                            .gradient = o->formats.gradient,
                            .sum = o->formats.sum,
                            .may_overlap = overlaps(&a),
                            .factor = u->factor,
                            .n_parts = u->n_parts,
                            .parts = l.parts,
                            .n_input = a.in_bytes / tagc_element_bytes(o->formats.gradient),
                            .n_output = a.out_bytes / tagc_element_bytes(o->formats.sum),
                            .n_sampled = n_sampled,
                            .schedule = model->schedule,
                            .numbers = l.numbers,
                            .counts = l.counts,
                            .places = l.places};
    tagc_status status = tagc_unit_make(m->queue, m, &options, out);
    tagc_memory_destroy(memory);
    return status;
}

/* Of the unit's pieces, which become the known ones. */
static tagc_status make_for_pieces(tagc_model_place *m) {
    let_go(m->unit);
    TAGC_TRY(remember(m));
    return make_ahead(m, &m->ahead);
}

/* A unit's own parts. */
typedef struct own_parts {
    const tagc_model_part *parts;
    uint32_t n;
} own_parts;

/* Of a part that is the same at all levels. */
static tagc_reducer *reducer_of(const own_parts *own, const tagc_model_part *part) {
    uint32_t p = 0;
    while (p + 1 < own->n && own->parts[p].members[0] != part->members[0]) p++;
    return own->parts[p].reducer;
}

/* Makes probes of reducers, and a unit of them, which leave their memory with the queue and the store. Parts without kernels have the
 * reducers of the unit's own. */
static tagc_status take_memory_for_parts(void *context, tagc_model_unit *u) {
    const own_parts *own = context;
    tagc_model_place *m = place_of(u);
    tagc_unit *unit = NULL;
    tagc_status status = TAGC_OK;
    for (uint32_t p = 0; p < u->n_parts && status == TAGC_OK; p++) {
        tagc_reducer_options options;
        if (!u->parts[p].is_there) {
            u->parts[p].reducer = reducer_of(own, &u->parts[p]);
            continue;
        }
        tagc_part_options(&u->parts[p], &options);
        status = tagc_reducer_probe_in(m->store, u->model->between, &options, &u->parts[p].reducer);
    }
    if (status == TAGC_OK) status = make_ahead(m, &unit);
    tagc_unit_destroy(unit);
    for (uint32_t p = 0; p < u->n_parts; p++)
        if (u->parts[p].is_there) tagc_reducer_destroy(u->parts[p].reducer);
    return status;
}

/* Whatever the schedule does, later exchanges allocate nothing. Batches need most where all tensors are at one level, and bodies where each
 * is at another; work memory is largest at one share or another, since a small one is searched for in another way. */
static tagc_status take_memory(tagc_model_place *m) {
    static const double least_share = 0.05;
    tagc_model_unit *u = m->unit;
    own_parts own = {u->parts, u->n_parts};
    int has_levels = 0;
    for (uint32_t p = 0; p < u->n_parts; p++) has_levels |= u->parts[p].is_followed;
    int first = u->model->schedule_options.fresh ? TAGC_LEVEL_FRESH : TAGC_LEVEL_FRESH + 1;
    for (int level = first; has_levels && level <= TAGC_LEVEL_LAST; level++)
        for (double share = TAGC_MOST_SHARE; share > least_share; share /= TAGC_MOST_SHARE)
            for (int is_apart = 0; is_apart < 2; is_apart++)
                TAGC_TRY(tagc_unit_try_parts(u, level, share, is_apart, take_memory_for_parts, &own));
    return TAGC_OK;
}

/* Makes what a unit needs that does not depend on pieces, and the rest for those that are known. */
static tagc_status take_up(tagc_model_unit *unit) {
    tagc_model_place *m = place_of(unit);
    const tagc_model_options *o = &unit->model->options;
    size_t n_in = (size_t)tagc_unit_elems(unit, 0) * tagc_element_bytes(o->formats.gradient),
           n_out = (size_t)tagc_unit_elems(unit, 1) * tagc_element_bytes(o->formats.sum);
    if (unit->is_there) n_in = n_out = 1;
    if (!m->bare) TAGC_TRY(tagc_unit_make_bare(m->queue, m, n_in, n_out, &m->bare));
    if (!unit->is_there || m->ahead || !m->pieces) return TAGC_OK;
    TAGC_TRY(tagc_unit_check_pieces(unit->model, number_of(unit), m->pieces, m->n_gradients, "gradients", 0));
    TAGC_TRY(tagc_unit_check_pieces(unit->model, number_of(unit), m->pieces + m->n_gradients, m->n_sums,
                                    "sums", 1));
    unit->gradients = m->pieces;
    unit->n_gradients = m->n_gradients;
    unit->sums = m->pieces + m->n_gradients;
    unit->n_sums = m->n_sums;
    tagc_status status = make_ahead(m, &m->ahead);
    unit->gradients = unit->sums = NULL;
    return status;
}

/* ---- without kernels: copies ---- */

static int by_address(const void *a, const void *b) {
    const char *x = ((const piece_copy *)a)->there, *y = ((const piece_copy *)b)->there;
    return (x > y) - (x < y);
}

/* Places pieces in a buffer, in the order of their addresses, and joins those that are side by side. Returns the number of copies. */
static size_t place_pieces(const tagc_piece *pieces, size_t n, size_t width, piece_copy *copies, size_t *at) {
    size_t n_copies = 0, n_bytes = 0;
    for (size_t i = 0; i < n; i++)
        copies[i] = (piece_copy){pieces[i].values, 0, (size_t)pieces[i].n_elems * width, (uint32_t)i};
    qsort(copies, n, sizeof *copies, by_address);
    for (size_t i = 0; i < n; i++) {
        piece_copy *last = n_copies > 0 ? &copies[n_copies - 1] : NULL, one = copies[i];
        at[one.piece] = one.at = n_bytes;
        n_bytes += one.n_bytes;
        if (last && last->there + last->n_bytes == one.there)
            last->n_bytes += one.n_bytes;
        else
            copies[n_copies++] = one;
    }
    return n_copies;
}

static tagc_status make_copies(tagc_model_place *m) {
    const tagc_model_unit *u = m->unit;
    const tagc_model_options *o = &u->model->options;
    TAGC_TRY(remember(m));
    m->n_in =
        place_pieces(m->pieces, m->n_gradients, tagc_element_bytes(o->formats.gradient), m->copies, m->at);
    m->n_out = place_pieces(m->pieces + m->n_gradients, m->n_sums, tagc_element_bytes(o->formats.sum),
                            m->copies + m->n_gradients, m->at + m->n_gradients);
    return TAGC_OK;
}

tagc_status tagc_model_copy_in(const ticket *one) {
    const tagc_model_place *m = one->unit->model;
    const tagc_queue *queue = one->queue;
    for (size_t i = 0; i < m->n_in; i++)
        TAGC_TRY(tagc_queue_copy(queue, (char *)queue->buffers[one->buffer].in + m->copies[i].at,
                                 m->copies[i].there, m->copies[i].n_bytes, TAGC_COPY_TO_HOST, queue->out));
    return TAGC_OK;
}

tagc_status tagc_model_copy_out(const ticket *one) {
    const tagc_model_place *m = one->unit->model;
    const tagc_queue *queue = one->queue;
    const piece_copy *copies = m->copies + m->n_gradients;
    for (size_t i = 0; i < m->n_out; i++)
        TAGC_TRY(tagc_queue_copy(queue, copies[i].there,
                                 (char *)queue->buffers[one->buffer].out + copies[i].at, copies[i].n_bytes,
                                 TAGC_COPY_TO_DEVICE, queue->back));
    return TAGC_OK;
}

/* The unit's pieces are those in the buffer. */
static void take_from_buffer(const tagc_model_place *m, const ticket *one) {
    const buffer *from = &one->queue->buffers[one->buffer];
    tagc_model_unit *u = m->unit;
    for (size_t i = 0; i < m->n_gradients + m->n_sums; i++) {
        m->here[i] = m->pieces[i];
        m->here[i].values = (char *)(i < m->n_gradients ? from->in : from->out) + m->at[i];
    }
    u->gradients = m->here;
    u->sums = m->here + m->n_gradients;
}

/* ---- the caller's thread ---- */

/* NaN where an exchange that is in no stream would have written, in the order of what waits for that. Its device has failed, so nobody asks
 * whether this fails, too. */
static void spoil(const tagc_model_place *m, const tagc_piece *sums, size_t n, void *stream, int waits) {
    const tagc_queue *queue = m->queue;
    const tagc_device *on = queue->device;
    void *came = queue->buffers[m->ticket % (uint64_t)queue->n_buffers].came;
    size_t width = tagc_element_bytes(m->unit->model->options.formats.sum);
    int before;
    if (n == 0 || tagc_device_enter(on, &before) != TAGC_OK) return;
    if (waits != TAGC_WAITS_FOR_RESULT) {
        (void)on->runtime.EventRecord(came, stream);
        (void)on->runtime.StreamWaitEvent(queue->back, came, 0);
        stream = queue->back;
    }
    for (size_t i = 0; i < n; i++)
        if (sums[i].n_elems > 0)
            (void)on->runtime.MemsetAsync(sums[i].values, 0xff, (size_t)sums[i].n_elems * width, stream);
    tagc_device_leave(on, before);
}

static void begin(tagc_model_unit *unit, void *stream, int waits) {
    tagc_model_place *m = place_of(unit);
    tagc_status status = unit->status;
    const tagc_piece *sums = status == TAGC_OK ? unit->sums : NULL;
    size_t n_sums = sums ? unit->n_sums : 0;
    arrays a = {0};
    if (status != TAGC_OK) {
        (void)tagc_fail(status, "%s", unit->text);
    } else {
        a = arrays_of(m, unit->gradients, unit->n_gradients, unit->sums, unit->n_sums);
        if (!unit->is_there)
            status = make_copies(m);
        else if (!m->ahead || m->ahead->factor != unit->factor || !is_known(m, &a))
            status = make_for_pieces(m);
    }
    unit->ended = TAGC_ERR_STATE;
    snprintf(unit->ended_text, sizeof unit->ended_text, "the queue was closed before this exchange");
    unit->gradients = unit->sums = NULL; /* the caller's lists */
    m->step = unit->n_exchanges;
    if (status != TAGC_OK) {
        tagc_job_put_failed(m->bare->job, m->bare, m->step, status, &m->ticket);
    } else {
        tagc_unit *own = unit->is_there ? m->ahead : m->bare;
        status = tagc_job_put(own->job, own, m->step, a.input, a.output, stream, waits, &m->ticket);
    }
    if (status != TAGC_OK) spoil(m, sums, n_sums, stream, waits);
}

static int is_over(tagc_model_unit *unit) {
    const tagc_model_place *m = place_of(unit);
    return tagc_queue_has_finished(m->queue, m->ticket);
}

static void wait(tagc_model_unit *unit) {
    const tagc_model_place *m = place_of(unit);
    tagc_queue_wait_for_ticket(m->queue, m->ticket);
}

/* ---- the queue's thread ---- */

/* What the device has brought of a unit with kernels. */
static void take_from_rooms(tagc_model_place *m, const ticket *one) {
    tagc_model_unit *u = m->unit;
    const gpu_room own = tagc_unit_own_room(one);
    tagc_unit_refuse(one);
    u->samples = (const float *)(const void *)own.here.rest;
    u->squares = one->unit->has_squares[one->buffer] ? m->squares : NULL;
    for (uint32_t p = 0; p < u->n_parts; p++) {
        const gpu_room room = tagc_unit_room_of(one, p);
        if (u->squares) m->squares[p] = tagc_unit_square_here(one, p);
        if (u->parts[p].is_there) continue;
        u->parts[p].gradient = tagc_unit_gradient_here(&room);
        u->parts[p].sums = tagc_unit_sums_here(&one->unit->parts[p], &room);
    }
}

tagc_status tagc_model_run(const ticket *one) {
    tagc_model_place *m = one->unit->model;
    tagc_model_unit *u = m->unit;
    int is_ahead = tagc_unit_has_kernels(one->unit);
    m->now = one;
    if (one->status == TAGC_OK && is_ahead) take_from_rooms(m, one);
    if (one->status == TAGC_OK && !is_ahead) take_from_buffer(m, one);
    tagc_status status = tagc_unit_exchange(u, one->status, one->text);
    if (is_ahead) {
        const gpu_room own = tagc_unit_own_room(one);
        if (status == TAGC_OK) tagc_queue_settle(one->queue, (tagc_orders *)(void *)own.here.head);
        tagc_queue_add(one->queue, one->first_add + one->unit->n_adds - 1);
        for (uint32_t p = 0; p < u->n_parts; p++) u->parts[p].gradient = u->parts[p].sums = NULL;
    }
    m->now = NULL;
    return status;
}

static tagc_status begin_part(tagc_model_part *part, tagc_status failure) {
    const tagc_model_place *m = place_of(part->unit);
    uint32_t p = (uint32_t)(part - part->unit->parts);
    if (failure != TAGC_OK) return tagc_ahead_refuse(part->reducer, m->step, failure, part->unit->text);
    const gpu_room room = tagc_unit_room_of(m->now, p);
    return tagc_ahead_begin(m->ahead->parts[p].ahead, m->step, &room);
}

static void add(tagc_model_unit *unit) {
    uint64_t number = place_of(unit)->now->first_add;
    for (uint32_t p = 0; p < unit->n_parts; p++) {
        tagc_reducer *r = unit->parts[p].reducer;
        if (!unit->parts[p].is_there) continue;
        if (r->now.begun && tagc_ahead_of(r)) tagc_ahead_add(tagc_ahead_of(r), number);
        if (r->now.begun && !tagc_ahead_of(r)) tagc_ahead_pass(r);
        number++;
    }
}

static tagc_status end_part(tagc_model_part *part, tagc_reducer_stats *stats) {
    tagc_ahead *ahead = tagc_ahead_of(part->reducer);
    return ahead ? tagc_ahead_end(ahead, stats) : tagc_reducer_end(part->reducer, stats);
}

static const tagc_model_device device = {.has_kernels = has_kernels,
                                         .open = open_unit,
                                         .close = close_unit,
                                         .expect = expect,
                                         .make_reducer = make_reducer,
                                         .let_go = let_go,
                                         .take_up = take_up,
                                         .residual_square = residual_square,
                                         .find_zeros = find_zeros,
                                         .begin = begin,
                                         .is_over = is_over,
                                         .wait = wait,
                                         .begin_part = begin_part,
                                         .add = add,
                                         .end_part = end_part};

/* ---- what callers see ---- */

tagc_status tagc_model_prepare_on(tagc_model *model, uint32_t number, const tagc_piece *gradients,
                                  size_t n_gradients, const tagc_piece *sums, size_t n_sums) {
    TAGC_TRY(tagc_unit_check(model, number, "prepare_on", 0));
    if (!model->device) return tagc_fail(TAGC_ERR_STATE, "prepare_on: the model's arrays are in host memory");
    TAGC_TRY(tagc_unit_check_pieces(model, number, gradients, n_gradients, "gradients", 0));
    TAGC_TRY(tagc_unit_check_pieces(model, number, sums, n_sums, "sums", 1));
    tagc_model_unit *unit = &model->units[number];
    tagc_model_place *m = place_of(unit);
    unit->gradients = tagc_pieces_of(gradients);
    unit->n_gradients = n_gradients;
    unit->sums = tagc_pieces_of(sums);
    unit->n_sums = n_sums;
    tagc_status status = unit->is_there ? take_memory(m) : TAGC_OK;
    if (status == TAGC_OK) status = unit->is_there ? make_for_pieces(m) : remember(m);
    unit->gradients = unit->sums = NULL;
    return status;
}

tagc_status tagc_model_create_on(tagc_queue *queue, tagc_comm *within, tagc_comm *between,
                                 const tagc_tensor *tensors, size_t n_tensors,
                                 const tagc_model_options *options, tagc_model **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!queue) return tagc_fail(TAGC_ERR_ARGUMENT, "queue is NULL");
    return tagc_model_make(&device, queue, within, between, tensors, n_tensors, options, out);
}

tagc_status tagc_model_begin_on(tagc_model *model, uint32_t unit, const tagc_piece *gradients,
                                size_t n_gradients, const tagc_piece *sums, size_t n_sums, void *stream,
                                int waits) {
    return tagc_model_begin_there(model, unit, gradients, n_gradients, sums, n_sums, stream, waits);
}
