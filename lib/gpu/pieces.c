/* Where pieces lie, as lists: runs between their arrays and those of parts, for a unit with kernels; without kernels, copies between them and a
 * buffer of the queue. */
#include "gpu/pieces.h"
#include "codec/elements.h"
#include "core/memory.h"
#include "core/status.h"

#include <stdlib.h>
#include <string.h>

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

arrays tagc_arrays_of(const tagc_model_place *m, const tagc_piece *gradients, size_t n_gradients,
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
int tagc_pieces_are_known(const tagc_model_place *m, const arrays *a) {
    const tagc_model_unit *u = m->unit;
    const tagc_piece *sums = m->pieces + m->n_gradients;
    if (!m->pieces || u->n_gradients != m->n_gradients || u->n_sums != m->n_sums) return 0;
    arrays known = tagc_arrays_of(m, m->pieces, m->n_gradients, sums, m->n_sums);
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

tagc_status tagc_pieces_remember(tagc_model_place *m) {
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

tagc_status tagc_pieces_make_unit(tagc_model_place *m, tagc_unit **out) {
    tagc_model_unit *u = m->unit;
    const tagc_model *model = u->model;
    const tagc_model_options *o = &model->options;
    char label[TAGC_LABEL_BYTES];
    arrays a = tagc_arrays_of(m, u->gradients, u->n_gradients, u->sums, u->n_sums);
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
    tagc_unit_label(model, tagc_unit_number(u), u->members[0], label);
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

tagc_status tagc_pieces_make_copies(tagc_model_place *m) {
    const tagc_model_unit *u = m->unit;
    const tagc_model_options *o = &u->model->options;
    TAGC_TRY(tagc_pieces_remember(m));
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
void tagc_pieces_take_from_buffer(const tagc_model_place *m, const ticket *one) {
    const buffer *from = &one->queue->buffers[one->buffer];
    tagc_model_unit *u = m->unit;
    for (size_t i = 0; i < m->n_gradients + m->n_sums; i++) {
        m->here[i] = m->pieces[i];
        m->here[i].values = (char *)(i < m->n_gradients ? from->in : from->out) + m->at[i];
    }
    u->gradients = m->here;
    u->sums = m->here + m->n_gradients;
}
