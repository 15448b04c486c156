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
#include "gpu/pieces.h"
#include "gpu/store.h"
#include "schedule/constants.h"

#include <stdio.h>
#include <string.h>

enum { SQUARES_BYTES = 2 * TAGC_N_SQUARES * sizeof(double) }; /* of a residual and a gradient */
enum { MOST_SQUARES = 16 };                                   /* that find_zeros looks at together */

static tagc_model_place *place_of(const tagc_model_unit *unit) {
    return unit->there;
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

/* ---- memory ---- */

/* Of the unit's pieces, which become the known ones. */
static tagc_status make_for_pieces(tagc_model_place *m) {
    let_go(m->unit);
    TAGC_TRY(tagc_pieces_remember(m));
    return tagc_pieces_make_unit(m, &m->ahead);
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
    if (status == TAGC_OK) status = tagc_pieces_make_unit(m, &unit);
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
    TAGC_TRY(tagc_unit_check_pieces(unit->model, tagc_unit_number(unit), m->pieces, m->n_gradients,
                                    "gradients", 0));
    TAGC_TRY(tagc_unit_check_pieces(unit->model, tagc_unit_number(unit), m->pieces + m->n_gradients,
                                    m->n_sums, "sums", 1));
    unit->gradients = m->pieces;
    unit->n_gradients = m->n_gradients;
    unit->sums = m->pieces + m->n_gradients;
    unit->n_sums = m->n_sums;
    tagc_status status = tagc_pieces_make_unit(m, &m->ahead);
    unit->gradients = unit->sums = NULL;
    return status;
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
        a = tagc_arrays_of(m, unit->gradients, unit->n_gradients, unit->sums, unit->n_sums);
        if (!unit->is_there)
            status = tagc_pieces_make_copies(m);
        else if (!m->ahead || m->ahead->factor != unit->factor || !tagc_pieces_are_known(m, &a))
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
    if (one->status == TAGC_OK && !is_ahead) tagc_pieces_take_from_buffer(m, one);
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
    if (status == TAGC_OK) status = unit->is_there ? make_for_pieces(m) : tagc_pieces_remember(m);
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
