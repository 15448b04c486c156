/* Units with kernels: their gradients stay on the device, and all of an exchange's work there is enqueued by the hook.
 *
 *   out    pack | each part: ahead.h, or without kernels its gradient to pinned memory | samples and squares there | (flag `in`)
 *   add    each part with kernels: wait for flag `add` | ahead.h | flag `added`
 *   back   (wait for flag `out`) | each part: ahead.h, or its sums to the device | NaN if the exchange failed | unpack
 *
 * job.c puts the flags in brackets, and events. Flags `add` and `added` count the parts of all exchanges. So each part goes on by itself,
 * as on the host, also where the transport has no lanes.
 *
 * The rest of room 0 is the unit's: | samples | squares (n_parts, 2, TAGC_N_SQUARES) |. Squares of gradients are sums
 * that the schedule wants where a window of it is full, about each 20th exchange; other exchanges leave them out. Room 1 + p is
 * that of part p: what ahead.h says, or a rest | gradient | sums | in pinned memory; on the device, packed gradients and sums follow.
 * Rests lie one after the other, so that what a unit needs hardly depends on its parts. */
#include "gpu/ahead_unit.h"
#include "codec/elements.h"
#include "core/memory.h"
#include "exchange/device_memory.h"
#include "schedule/private.h"

#include <stdio.h>
#include <string.h>

/* All that an exchange puts behind its first flag must fit into a launch queue, since its messages begin when all is enqueued. CUDA's
 * has 1,024 places. */
enum { LAUNCH_PLACES = 1024 };
#define SQUARES_BYTES (2 * TAGC_N_SQUARES * sizeof(double)) /* of a part */

int tagc_unit_has_kernels(const tagc_unit *unit) {
    return unit && unit->n_adds;
}

uint32_t tagc_unit_n_adds(const tagc_unit *unit) {
    return unit ? unit->n_adds : 0;
}

/* ---- making ---- */

static size_t in_pages(size_t n_bytes) {
    return (n_bytes + TAGC_ROOM_BYTES - 1) / TAGC_ROOM_BYTES * TAGC_ROOM_BYTES;
}

static size_t floats_bytes(uint64_t n) {
    return tagc_aligned((size_t)n * sizeof(float));
}

/* In room 0. */
static size_t squares_at(const tagc_unit *unit) {
    return floats_bytes(unit->n_samples);
}

static double *squares_in(const tagc_unit *unit, gpu_side side, uint32_t p) {
    return (double *)(void *)(side.rest + squares_at(unit) + p * SQUARES_BYTES);
}

/* tagc_element of what a reducer reads. */
static int reads(const tagc_reducer *r) {
    return r->options.gradient == TAGC_FORMAT_BF16 ? TAGC_ELEMENT_BF16 : TAGC_ELEMENT_FP32;
}

static size_t gradient_bytes(const unit_part *one) {
    return (size_t)one->n_gradient * tagc_element_bytes(reads(one->reducer));
}

/* Divides a part's room: where in the rest packed gradients and sums are. Adds it to what the unit needs. In an array that is input and
 * output no reducer can work. */
static void place(const tagc_unit *unit, unit_part *one, rooms_needs *needs) {
    size_t there = one->ahead ? one->ahead->n_bytes : 0, here = there;
    if (!one->ahead) here = tagc_aligned(gradient_bytes(one)) + floats_bytes(one->n_output);
    if (one->at_gradient != TAGC_NOWHERE) {
        one->at_gradient = there;
        there += tagc_aligned(gradient_bytes(one));
    }
    if (one->at_output != TAGC_NOWHERE || unit->may_overlap || unit->factor != 1.0f) {
        one->at_output = there;
        there += floats_bytes(one->n_output);
    }
    one->at_here = needs->here_bytes;
    one->at_there = needs->there_bytes;
    needs->here_bytes += in_pages(here);
    needs->there_bytes += in_pages(there);
    if (one->ahead && in_pages(one->ahead->head_bytes) > needs->head_bytes)
        needs->head_bytes = in_pages(one->ahead->head_bytes);
}

static size_t n_listed(const unit_options *of, size_t n_samples) {
    size_t n = n_samples;
    for (uint32_t p = 0; p < of->n_parts; p++) n += of->parts[p].n_packs + of->parts[p].n_unpacks;
    return n;
}

static run_list list(const tagc_run *runs, uint64_t n_runs, tagc_listed_run *here,
                     const tagc_listed_run *there) {
    uint64_t n = 0;
    for (uint64_t i = 0; i < n_runs; i++) {
        here[i] = (tagc_listed_run){runs[i].from, runs[i].to, n};
        n += runs[i].length;
    }
    return (run_list){there, (uint32_t)n_runs, n};
}

/* All lists, in the store. */
static tagc_status make_lists(tagc_unit *unit, const unit_options *of) {
    tagc_kernels *k = unit->queue->kernels;
    tagc_listed_run *here, *there;
    void *memory;
    size_t n = n_listed(of, unit->n_samples), at = 0, n_bytes = (n ? n : 1) * sizeof *here;
    TAGC_TRY(tagc_store_reserve_lists(unit->store, n_bytes));
    there = unit->store->lists;
    TAGC_TRY(tagc_memory_create(n_bytes, "lists of runs", &memory));
    here = memory;
    for (uint32_t p = 0; p < of->n_parts; p++) {
        const unit_part_options *from = &of->parts[p];
        unit->parts[p].packs = list(from->packs, from->n_packs, here + at, there + at);
        at += from->n_packs;
        unit->parts[p].unpacks = list(from->unpacks, from->n_unpacks, here + at, there + at);
        at += from->n_unpacks;
    }
    uint32_t n_covered = 0;
    for (size_t i = 0; i < unit->n_samples; i++)
        if (of->places[i] != TAGC_UNCOVERED)
            here[at + n_covered] = (tagc_listed_run){of->places[i], i, n_covered}, n_covered++;
    unit->sampled = (run_list){there + at, n_covered, n_covered};
    tagc_status status = tagc_kernels_write(k, there, here, n_bytes);
    tagc_memory_destroy(memory);
    return status;
}

static tagc_status make_part(tagc_unit *unit, uint32_t p, size_t work_bytes[N_WORKS]) {
    unit_part *one = &unit->parts[p];
    tagc_reducer *r = one->reducer;
    if (r->arrays->is_here) return TAGC_OK;
    unit->store = tagc_store_of(r);
    unit->n_adds++;
    TAGC_TRY(tagc_ahead_create(unit->queue, r, &one->ahead));
    tagc_ahead_add_work(one->ahead, work_bytes);
    return TAGC_OK;
}

/* The most pieces of work that an exchange puts into streams behind its first flag. */
static size_t n_places(const tagc_unit *unit) {
    enum { EVENTS_AND_FLAGS = 6, ORDERS = 1, SPOIL = 1, COPY = 1, UNPACK = 1 };
    size_t n = EVENTS_AND_FLAGS + ORDERS;
    for (uint32_t p = 0; p < unit->n_parts; p++) {
        const tagc_ahead *ahead = unit->parts[p].ahead;
        n += (ahead ? tagc_ahead_n_places(ahead) : COPY) + SPOIL + UNPACK;
    }
    return n;
}

static tagc_status check_places(const tagc_unit *unit, const char *what) {
    size_t n = n_places(unit);
    if (n <= LAUNCH_PLACES) return TAGC_OK;
    return tagc_fail(
        TAGC_ERR_UNSUPPORTED,
        "%s: %u parts over %d ranks take %zu places in a launch queue of the device, which has %d: use "
        "smaller units, or the host's codec",
        what, unit->n_parts, unit->parts[0].reducer->world_size, n, LAUNCH_PLACES);
}

/* A unit of probes exchanges nothing. */
static int is_probe(const tagc_unit *unit) {
    for (uint32_t p = 0; p < unit->n_parts; p++)
        if (unit->parts[p].reducer->arrays == &unit->store->of_probes) return 1;
    return 0;
}

static int is_whole(const tagc_run *runs, uint64_t n_runs, uint64_t n, uint64_t n_other) {
    return n_runs == 1 && runs[0].from == 0 && runs[0].to == 0 && runs[0].length == n && n == n_other;
}

static void take_part(unit_part *one, const unit_options *of, const unit_part_options *from) {
    int reads_input = reads(from->reducer) == of->gradient &&
                      is_whole(from->packs, from->n_packs, from->n_gradient, of->n_input),
        writes_output = of->sum == TAGC_ELEMENT_FP32 &&
                        is_whole(from->unpacks, from->n_unpacks, from->n_output, of->n_output);
    *one = (unit_part){.reducer = from->reducer,
                       .n_gradient = from->n_gradient,
                       .n_output = from->n_output,
                       .at_gradient = reads_input ? TAGC_NOWHERE : 0,
                       .at_output = writes_output ? TAGC_NOWHERE : 0};
}

/* What is in the device's memory. */
static tagc_status make_there(tagc_unit *unit, const unit_options *of) {
    uint32_t n = unit->n_parts;
    rooms_needs needs = {.n_rooms = n + 1, .head_bytes = in_pages(ORDERS_BYTES)};
    for (uint32_t p = 0; p < n; p++) TAGC_TRY(make_part(unit, p, needs.work_bytes));
    if (!is_probe(unit)) TAGC_TRY(check_places(unit, of->what));
    TAGC_TRY(make_lists(unit, of));
    needs.here_bytes = needs.there_bytes = in_pages(squares_at(unit) + n * SQUARES_BYTES);
    for (uint32_t p = 0; p < n; p++) place(unit, &unit->parts[p], &needs);
    return tagc_rooms_reserve(unit->queue, &needs);
}

tagc_status tagc_unit_make(tagc_queue *queue, tagc_model_place *model, const unit_options *of,
                           tagc_unit **out) {
    void *memory;
    size_t parts_at = tagc_aligned(sizeof(tagc_unit)),
           numbers_at = parts_at + tagc_aligned(of->n_parts * sizeof(unit_part));
    *out = NULL;
    TAGC_TRY(tagc_memory_create(numbers_at + (of->n_sampled + 1) * sizeof(uint32_t), "a unit", &memory));
    tagc_unit *unit = memory;
    *unit = (tagc_unit){.queue = queue,
                        .model = model,
                        .gradient = of->gradient,
                        .sum = of->sum,
                        .may_overlap = of->may_overlap,
                        .factor = of->factor,
                        .parts = (unit_part *)(void *)((char *)memory + parts_at),
                        .n_parts = of->n_parts,
                        .schedule = of->schedule,
                        .numbers = (uint32_t *)(void *)((char *)memory + numbers_at),
                        .n_sampled = of->n_sampled};
    for (uint32_t i = 0; i < of->n_sampled; i++) {
        unit->numbers[i] = of->numbers[i];
        unit->n_samples += of->counts[i];
    }
    for (uint32_t p = 0; p < of->n_parts; p++) take_part(&unit->parts[p], of, &of->parts[p]);
    tagc_status status = make_there(unit, of);
    if (status == TAGC_OK) status = tagc_job_create(queue, 0, 1, 1, &unit->job); /* arrays stay there */
    if (status == TAGC_OK) {
        *out = unit;
        return TAGC_OK;
    }
    char text[TAGC_ERROR_TEXT_BYTES];
    snprintf(text, sizeof text, "%s", tagc_last_error());
    tagc_unit_destroy(unit);
    return tagc_fail(status, "%s", text);
}

tagc_status tagc_unit_make_bare(tagc_queue *queue, tagc_model_place *model, size_t n_bytes_in,
                                size_t n_bytes_out, tagc_unit **out) {
    void *memory;
    *out = NULL;
    TAGC_TRY(tagc_memory_create(sizeof(tagc_unit), "a unit", &memory));
    tagc_unit *unit = memory;
    *unit = (tagc_unit){.queue = queue, .model = model};
    tagc_status status =
        tagc_job_create(queue, 0, larger_of(n_bytes_in, 1), larger_of(n_bytes_out, 1), &unit->job);
    if (status == TAGC_OK)
        *out = unit;
    else
        tagc_memory_destroy(unit);
    return status;
}

void tagc_unit_destroy(tagc_unit *unit) {
    if (!unit) return;
    for (uint32_t p = 0; p < unit->n_parts; p++) tagc_ahead_destroy(unit->parts[p].ahead);
    tagc_job_destroy(unit->job);
    tagc_memory_destroy(unit);
}

/* ---- the thread of the hooks ---- */

gpu_room tagc_unit_own_room(const ticket *one) {
    return tagc_room_of(one, 0, 0, 0);
}

gpu_room tagc_unit_room_of(const ticket *one, uint32_t p) {
    const unit_part *part = &one->unit->parts[p];
    return tagc_room_of(one, 1 + p, part->at_here, part->at_there);
}

void tagc_unit_refuse(const ticket *one) {
    gpu_room room = tagc_unit_own_room(one);
    tagc_orders_refuse(&room);
    for (uint32_t p = 0; p < one->unit->n_parts; p++) {
        room = tagc_unit_room_of(one, p);
        tagc_orders_refuse(&room);
    }
}

static tagc_status copy_runs(const ticket *one, const run_list *runs, const void *from, int from_element,
                             void *to, int to_element, float factor, void *stream) {
    const tagc_kernels *k = one->queue->kernels;
    return tagc_kernels_check(k, k->maker->runs->copy(runs->runs, runs->n_runs, runs->n, from, from_element,
                                                      to, to_element, factor, stream));
}

static tagc_status clear(const ticket *one, void *array, size_t n_bytes, void *stream) {
    const tagc_runtime *runtime = runtime_of(one->queue);
    return tagc_device_check(one->queue->device, runtime->MemsetAsync(array, 0, n_bytes, stream),
                             "writing to memory of the device");
}

static void *gradient_of(const unit_part *one, const gpu_room *room, const void *input) {
    return one->at_gradient == TAGC_NOWHERE ? (void *)(size_t)input : room->there.rest + one->at_gradient;
}

static float *sums_of(const unit_part *one, const gpu_room *room, void *output) {
    return one->at_output == TAGC_NOWHERE ? output : (float *)(void *)(room->there.rest + one->at_output);
}

/* Of a part without kernels, in pinned memory. */
void *tagc_unit_gradient_here(const gpu_room *room) {
    return room->here.rest;
}

float *tagc_unit_sums_here(const unit_part *one, const gpu_room *room) {
    return (float *)(void *)(room->here.rest + tagc_aligned(gradient_bytes(one)));
}

static tagc_status put_squares(const ticket *one, uint32_t p, const void *gradient) {
    const unit_part *part = &one->unit->parts[p];
    const tagc_kernels *k = one->queue->kernels;
    const tagc_squared of = {
        .gradient_element = reads(part->reducer), .gradient = gradient, .n_gradient = part->n_gradient};
    double *squares = squares_in(one->unit, tagc_unit_own_room(one).there, p);
    return tagc_kernels_check(k, k->maker->runs->squares(&of, squares, one->queue->out));
}

static tagc_status put_part_out(const ticket *one, uint32_t p, const void *input, void *output) {
    const tagc_queue *queue = one->queue;
    const tagc_unit *unit = one->unit;
    const unit_part *part = &unit->parts[p];
    const gpu_room room = tagc_unit_room_of(one, p);
    void *gradient = gradient_of(part, &room, input);
    size_t n_bytes = gradient_bytes(part);
    if (part->at_gradient != TAGC_NOWHERE) {
        if (part->packs.n < part->n_gradient) TAGC_TRY(clear(one, gradient, n_bytes, queue->out));
        TAGC_TRY(copy_runs(one, &part->packs, input, unit->gradient, gradient, reads(part->reducer), 1,
                           queue->out));
    }
    if (unit->has_squares[one->buffer]) TAGC_TRY(put_squares(one, p, gradient));
    if (!part->ahead)
        return tagc_queue_copy(queue, tagc_unit_gradient_here(&room), gradient, n_bytes, TAGC_COPY_TO_HOST,
                               queue->out);
    return tagc_ahead_put_out(part->ahead, one->buffer, &room, one->step, gradient,
                              sums_of(part, &room, output));
}

tagc_status tagc_unit_put_out(const ticket *one, const void *input, void *output) {
    tagc_unit *unit = one->unit;
    const gpu_room room = tagc_unit_own_room(one);
    char *samples = room.there.rest;
    for (uint32_t p = 0; p < unit->n_parts; p++)
        if (unit->parts[p].ahead) TAGC_TRY(tagc_ahead_check(unit->parts[p].ahead));
    if (unit->sampled.n < unit->n_samples)
        TAGC_TRY(clear(one, samples, unit->n_samples * sizeof(float), one->queue->out));
    TAGC_TRY(copy_runs(one, &unit->sampled, input, unit->gradient, samples, TAGC_ELEMENT_FP32, 1,
                       one->queue->out));
    int has_squares = unit->has_squares[one->buffer] =
        unit->n_sampled && tagc_schedule_is_due(unit->schedule, unit->numbers, unit->n_sampled);
    for (uint32_t p = 0; p < unit->n_parts; p++) TAGC_TRY(put_part_out(one, p, input, output));
    size_t n_bytes =
        has_squares ? squares_at(unit) + unit->n_parts * SQUARES_BYTES : unit->n_samples * sizeof(float);
    return tagc_queue_copy(one->queue, room.here.rest, samples, n_bytes, TAGC_COPY_TO_HOST, one->queue->out);
}

tagc_status tagc_unit_put_add(const ticket *one) {
    const tagc_queue *queue = one->queue;
    const tagc_runtime *runtime = runtime_of(queue);
    uint64_t number = one->first_add;
    for (uint32_t p = 0; p < one->unit->n_parts; p++) {
        tagc_ahead *ahead = one->unit->parts[p].ahead;
        if (!ahead) continue;
        int code =
            runtime->StreamWaitValue32(queue->add, queue->add_there, (uint32_t)number, TAGC_WAIT_AT_LEAST);
        TAGC_TRY(tagc_device_check(queue->device, code, "waiting for bodies"));
        const gpu_room room = tagc_unit_room_of(one, p);
        TAGC_TRY(tagc_ahead_put_add(ahead, one->buffer, &room));
        code = runtime->StreamWriteValue32(queue->add, queue->added_there, (uint32_t)number, 0);
        TAGC_TRY(tagc_device_check(queue->device, code, "handing sums over"));
        number++;
    }
    return TAGC_OK;
}

static tagc_status put_part_back(const ticket *one, uint32_t p, void *output) {
    const tagc_queue *queue = one->queue;
    const unit_part *part = &one->unit->parts[p];
    const gpu_room room = tagc_unit_room_of(one, p);
    if (part->ahead) return tagc_ahead_put_back(part->ahead, one->buffer, &room);
    return tagc_queue_copy(queue, sums_of(part, &room, output), tagc_unit_sums_here(part, &room),
                           (size_t)part->n_output * sizeof(float), TAGC_COPY_TO_DEVICE, queue->back);
}

/* NaN if the exchange failed. */
static tagc_status spoil(const ticket *one, void *array, size_t n_bytes) {
    const tagc_queue *queue = one->queue;
    const tagc_orders *orders = (const tagc_orders *)(const void *)tagc_unit_own_room(one).there.head;
    return tagc_kernels_check(
        queue->kernels, queue->kernels->maker->runs->spoil(&orders->is_void, array, n_bytes, queue->back));
}

/* The new residuals are those of the next exchange. */
static void turn(const ticket *one) {
    if (one->unit->store->turns) tagc_store_turn(one->unit->store, one->buffer);
    for (uint32_t p = 0; p < one->unit->n_parts; p++)
        if (one->unit->parts[p].ahead) tagc_ahead_turn(one->unit->parts[p].ahead);
}

tagc_status tagc_unit_put_back(const ticket *one, void *output) {
    const tagc_queue *queue = one->queue;
    const tagc_unit *unit = one->unit;
    const gpu_room own = tagc_unit_own_room(one);
    TAGC_TRY(tagc_queue_copy(queue, own.there.head, own.here.head, sizeof(tagc_orders), TAGC_COPY_TO_DEVICE,
                             queue->back));
    for (uint32_t p = 0; p < unit->n_parts; p++) TAGC_TRY(put_part_back(one, p, output));
    turn(one);
    for (uint32_t p = 0; p < unit->n_parts; p++) {
        const unit_part *part = &unit->parts[p];
        const gpu_room room = tagc_unit_room_of(one, p);
        float *sums = sums_of(part, &room, output);
        TAGC_TRY(spoil(one, sums, (size_t)part->n_output * sizeof *sums));
        if (part->at_output == TAGC_NOWHERE) continue;
        TAGC_TRY(copy_runs(one, &part->unpacks, sums, TAGC_ELEMENT_FP32, output, unit->sum, unit->factor,
                           queue->back));
    }
    return TAGC_OK;
}

/* If the device is not dead, earlier exchanges end as if nothing had happened. Of this one it must not read bodies that never come, so
 * its orders are negative. When `out` is through, the exchange that had its rooms before is, too. */
int tagc_unit_withdraw(const ticket *one) {
    const tagc_runtime *runtime = runtime_of(one->queue);
    int code = runtime->StreamSynchronize(one->queue->out);
    pthread_mutex_lock(&one->queue->lock); /* the last exchange in these rooms was finished with it */
    if (!code && one->is_in_streams) tagc_unit_refuse(one);
    pthread_mutex_unlock(&one->queue->lock);
    return !code;
}

/* ---- the thread that exchanges ---- */

double tagc_squares_sum(const double *values) {
    double sum = 0;
    for (int i = 0; i < TAGC_N_SQUARES; i++) sum += values[i];
    return sum;
}

double tagc_unit_square_here(const ticket *one, uint32_t p) {
    return tagc_squares_sum(squares_in(one->unit, tagc_unit_own_room(one).here, p) + TAGC_N_SQUARES);
}
