/* See ahead.h. */
#include "gpu/ahead.h"
#include "core/memory.h"
#include "exchange/options.h"

#include <string.h>

static tagc_direct *direct_of(const tagc_ahead *a) {
    return tagc_direct_of(a->reducer);
}

static int n_ranks(const tagc_ahead *a) {
    return a->reducer->world_size;
}

static int own_rank(const tagc_ahead *a) {
    return a->reducer->rank;
}

static int returns_sums(const tagc_ahead *a) {
    return tagc_direct_has_results(a->reducer);
}

/* Fragments that leave or stay here: with sums, the own one is added as it is. */
static int n_fragments(const tagc_ahead *a) {
    return n_ranks(a) - returns_sums(a);
}

/* ---- a room ---- */

static tagc_orders *orders_in(gpu_side side) {
    return (tagc_orders *)(void *)side.head;
}

static uint64_t *lengths_in(gpu_side side) {
    return (uint64_t *)(void *)(side.head + ORDERS_BYTES);
}

static tagc_batch_result *results_in(const tagc_ahead *a, gpu_side side) {
    return (tagc_batch_result *)(void *)(side.head + a->at_results);
}

/* Of adding, and of encoding the sums. */
static tagc_batch_result *sums_in(const tagc_ahead *a, gpu_side side) {
    return (tagc_batch_result *)(void *)(side.head + a->at_sums);
}

static uint8_t *body_in(const tagc_ahead *a, gpu_side side, int rank) {
    return (uint8_t *)side.rest + (size_t)rank * a->stride;
}

static void lay_out(tagc_ahead *a) {
    size_t n = (size_t)n_ranks(a);
    a->stride = tagc_aligned(direct_of(a)->capacity);
    a->at_results = ORDERS_BYTES + tagc_aligned(n * sizeof(uint64_t));
    a->at_sums = a->at_results + tagc_aligned(n * sizeof(tagc_batch_result));
    a->head_bytes = a->at_sums + tagc_aligned(2 * sizeof(tagc_batch_result));
    a->n_bytes = n * a->stride;
}

/* ---- life ---- */

void tagc_ahead_destroy(tagc_ahead *a) {
    if (!a) return;
    for (int which = 0; which < TAGC_N_BATCHES; which++) a->reducer->arrays->maker->destroy(a->made[which]);
    tagc_memory_destroy(a);
}

tagc_status tagc_ahead_create(tagc_queue *queue, tagc_reducer *r, tagc_ahead **out) {
    const tagc_direct *d = tagc_direct_of(r);
    size_t n = (size_t)r->world_size, rows_at = tagc_aligned(sizeof(tagc_ahead)),
           bodies_at = rows_at + tagc_aligned(n * sizeof(tagc_batch_row));
    void *memory;
    *out = NULL;
    TAGC_TRY(tagc_memory_create(bodies_at + n * sizeof(tagc_body), "a reducer that is ahead", &memory));
    tagc_ahead *a = memory;
    *a = (tagc_ahead){
        .reducer = r, .queue = queue, .fragment = d->fragment, .sums = d->sums, .store = tagc_store_of(r)};
    if (r->residual) a->n_stored = (size_t)tagc_reducer_stored_bytes(r);
    if (r->residual) a->at_residual = tagc_store_place(a->store, r);
    a->rows = (tagc_batch_row *)(void *)((char *)memory + rows_at);
    a->bodies = (tagc_body *)(void *)((char *)memory + bodies_at);
    lay_out(a);
    *out = a;
    return TAGC_OK;
}

static int same(const tagc_code_options *a, const tagc_code_options *b) {
    return a->n == b->n && a->k == b->k && a->sparse == b->sparse && a->values == b->values &&
           a->block == b->block && a->residual == b->residual && a->gradient == b->gradient;
}

tagc_status tagc_ahead_check(const tagc_ahead *a) {
    const tagc_direct *d = direct_of(a);
    if (same(&a->fragment, &d->fragment) && same(&a->sums, &d->sums)) return TAGC_OK;
    return tagc_fail(TAGC_ERR_STATE, "a reducer of this unit was changed: make the unit anew");
}

/* ---- launches ---- */

/* Bodies of all ranks but this one, as long as they can be. */
static tagc_status copy_bodies(const tagc_ahead *a, const gpu_room *room, tagc_copy kind, void *stream) {
    int is_out = kind == TAGC_COPY_TO_HOST, own = own_rank(a);
    gpu_side to = is_out ? room->here : room->there, from = is_out ? room->there : room->here;
    size_t n_after = (size_t)(n_ranks(a) - own - 1) * a->stride;
    TAGC_TRY(tagc_queue_copy(a->queue, body_in(a, to, 0), body_in(a, from, 0), (size_t)own * a->stride, kind,
                             stream));
    return tagc_queue_copy(a->queue, body_in(a, to, own + 1), body_in(a, from, own + 1), n_after, kind,
                           stream);
}

static const int work_of[] = {[TAGC_ENCODE] = OUT_WORK,
                              [TAGC_ADD] = ADD_WORK,
                              [TAGC_ENCODE_SUMS] = ADD_WORK,
                              [TAGC_DECODE_SUMS] = BACK_WORK};

void tagc_ahead_add_work(const tagc_ahead *a, size_t n_bytes[N_WORKS]) {
    for (int which = TAGC_ENCODE; which <= TAGC_DECODE_SUMS; which++) {
        size_t *most = &n_bytes[work_of[which]];
        *most = larger_of(*most, tagc_batches_work_bytes(a->reducer, which));
    }
}

/* Runs a batch with the rows that are filled. */
static tagc_status run(tagc_ahead *a, int which, tagc_batch_result *results, void *stream) {
    const tagc_batch_maker *maker = a->reducer->arrays->maker;
    const tagc_work_area *area = &a->queue->works[work_of[which]];
    if (!a->made[which] || a->n_moves[which] != area->n_moves) {
        maker->destroy(a->made[which]);
        a->made[which] = NULL;
        TAGC_TRY(tagc_batches_make_one(a->reducer, which, area->memory, stream, &a->made[which]));
        a->n_moves[which] = area->n_moves;
    }
    if (!a->made[which]) return TAGC_OK; /* it would have no rows */
    TAGC_TRY(tagc_batches_check(a->reducer, maker->point(a->made[which], a->rows, results)));
    return tagc_batches_check(a->reducer, maker->run(a->made[which]));
}

size_t tagc_ahead_n_places(const tagc_ahead *a) {
    enum { FLAGS = 2, RECEIVED = 3, RESULTS = 1, ORDERS = 1, SETTLE = 1, BODY = 1, SUMS = 2 };
    size_t n = FLAGS + RECEIVED + tagc_batches_n_launches(a->reducer, TAGC_ADD) + RESULTS + ORDERS + SETTLE;
    if (!returns_sums(a)) return n;
    return n + tagc_batches_n_launches(a->reducer, TAGC_ENCODE_SUMS) + BODY + SUMS +
           tagc_batches_n_launches(a->reducer, TAGC_DECODE_SUMS);
}

static void *residual_at(const tagc_ahead *a, void *residual, int rank) {
    return residual ? (char *)residual + (size_t)rank * a->reducer->row_bytes : NULL;
}

static void *spare_of(const tagc_ahead *a, int b) {
    return a->n_stored ? a->store->turns->spares[b] + a->at_residual : NULL;
}

static tagc_batch_row row_to_encode(const tagc_ahead *a, int b, int rank, const void *values,
                                    const tagc_code_options *options, uint8_t *body) {
    const tagc_reducer *r = a->reducer;
    return (tagc_batch_row){.options = *options,
                            .gradient = values,
                            .residual_in = residual_at(a, r->residual, rank),
                            .residual_out = residual_at(a, spare_of(a, b), rank),
                            .seed = tagc_residual_seed(r->options.rounding_seed, a->steps[b].number,
                                                       (uint32_t)r->rank, (uint32_t)rank),
                            .body = body};
}

static const char *gradient_of(const tagc_ahead *a, int b, int rank) {
    const tagc_reducer *r = a->reducer;
    return (const char *)a->steps[b].gradient + (size_t)rank * r->shard * tagc_reducer_gradient_bytes(r);
}

/* Where the sums of the own row go. */
static float *own_sums(const tagc_ahead *a, int b) {
    return a->steps[b].output + (returns_sums(a) ? (size_t)own_rank(a) * a->reducer->shard : 0);
}

tagc_status tagc_ahead_put_out(tagc_ahead *a, int b, const gpu_room *room, uint64_t number,
                               const void *gradient, float *output) {
    void *stream = a->queue->out;
    int n = n_fragments(a);
    a->steps[b].number = number;
    a->steps[b].gradient = gradient;
    a->steps[b].output = output;
    for (int t = 0; t < n; t++) {
        int rank = tagc_partner_to(a->reducer, t);
        a->rows[t] =
            row_to_encode(a, b, rank, gradient_of(a, b, rank), &a->fragment, body_in(a, room->there, rank));
    }
    TAGC_TRY(run(a, TAGC_ENCODE, results_in(a, room->there), stream));
    TAGC_TRY(tagc_queue_copy(a->queue, results_in(a, room->here), results_in(a, room->there),
                             (size_t)n * sizeof(tagc_batch_result), TAGC_COPY_TO_HOST, stream));
    return copy_bodies(a, room, TAGC_COPY_TO_HOST, stream);
}

/* Received bodies, their lengths and the orders. */
static tagc_status copy_received(const tagc_ahead *a, const gpu_room *room, int has_bodies, void *stream) {
    TAGC_TRY(tagc_queue_copy(a->queue, room->there.head, room->here.head, a->at_results, TAGC_COPY_TO_DEVICE,
                             stream));
    return has_bodies ? copy_bodies(a, room, TAGC_COPY_TO_DEVICE, stream) : TAGC_OK;
}

tagc_status tagc_ahead_put_add(tagc_ahead *a, int b, const gpu_room *room) {
    void *stream = a->queue->add;
    int own = own_rank(a), n_results = 1 + returns_sums(a);
    tagc_batch_result *results = sums_in(a, room->there);
    TAGC_TRY(copy_received(a, room, 1, stream));
    for (int rank = 0; rank < n_ranks(a); rank++)
        a->bodies[rank] = (tagc_body){.bytes = body_in(a, room->there, rank)};
    if (returns_sums(a))
        a->bodies[own] = (tagc_body){.bytes = (const uint8_t *)gradient_of(a, b, own), .is_plain = 1};
    a->rows[0] = (tagc_batch_row){.options = a->fragment,
                                  .sums = own_sums(a, b),
                                  .scale = returns_sums(a) ? 1 : a->reducer->scale,
                                  .bodies = a->bodies,
                                  .n_bodies = n_ranks(a),
                                  .lengths = lengths_in(room->there),
                                  .stop = &orders_in(room->there)->stop[0]};
    TAGC_TRY(run(a, TAGC_ADD, results, stream));
    if (returns_sums(a)) {
        uint8_t *body = body_in(a, room->there, own);
        a->rows[0] = row_to_encode(a, b, own, own_sums(a, b), &a->sums, body);
        TAGC_TRY(run(a, TAGC_ENCODE_SUMS, results + 1, stream));
        TAGC_TRY(tagc_queue_copy(a->queue, body_in(a, room->here, own), body, a->stride, TAGC_COPY_TO_HOST,
                                 stream));
    }
    return tagc_queue_copy(a->queue, sums_in(a, room->here), results, (size_t)n_results * sizeof *results,
                           TAGC_COPY_TO_HOST, stream);
}

static tagc_status decode(tagc_ahead *a, int b, const gpu_room *room, void *stream) {
    for (int rank = 0; rank < n_ranks(a); rank++) {
        a->bodies[rank] = (tagc_body){.bytes = body_in(a, room->there, rank)};
        a->rows[rank] = (tagc_batch_row){.options = a->sums,
                                         .sums = a->steps[b].output + (size_t)rank * a->reducer->shard,
                                         .scale = a->reducer->scale,
                                         .bodies = &a->bodies[rank],
                                         .n_bodies = 1,
                                         .lengths = lengths_in(room->there) + rank,
                                         .stop = &orders_in(room->there)->stop[1]};
    }
    return run(a, TAGC_DECODE_SUMS, results_in(a, room->there), stream);
}

tagc_status tagc_ahead_put_back(tagc_ahead *a, int b, const gpu_room *room) {
    const tagc_reducer *r = a->reducer;
    const tagc_runs_maker *runs = a->queue->kernels->maker->runs;
    void *stream = a->queue->back;
    size_t n_output = (size_t)tagc_output_elems(&r->options, r->world_size);
    TAGC_TRY(copy_received(a, room, returns_sums(a), stream));
    if (returns_sums(a)) TAGC_TRY(decode(a, b, room, stream));
    return tagc_batches_check(r, runs->settle(&orders_in(room->there)->is_void, r->residual, spare_of(a, b),
                                              a->n_stored, a->steps[b].output, n_output, stream));
}

void tagc_ahead_turn(tagc_ahead *a) {
    if (a->n_stored) a->reducer->residual = a->store->region + a->at_residual;
}

/* ---- the thread that exchanges ---- */

void tagc_orders_refuse(const gpu_room *room) {
    *orders_in(room->here) = (tagc_orders){.stop = {1, 1}, .is_void = 1};
}

/* The arrays are the launches' matter. */
tagc_status tagc_ahead_begin(tagc_ahead *a, uint64_t number, const gpu_room *room) {
    tagc_orders_refuse(room); /* until something else is known */
    a->room = *room;
    a->has_bodies = 0;
    direct_of(a)->ahead = a;
    TAGC_TRY(tagc_reducer_set_steps(a->reducer, number - 1));
    return tagc_reducer_begin_ahead(a->reducer, room->there.head, NULL, TAGC_OK, "");
}

tagc_status tagc_ahead_refuse(tagc_reducer *r, uint64_t number, tagc_status failure, const char *text) {
    tagc_direct_of(r)->ahead = NULL;
    TAGC_TRY(tagc_reducer_set_steps(r, number - 1));
    return tagc_reducer_begin_ahead(r, NULL, NULL, failure, text);
}

/* Until it has all bodies, or has ended. Returns whether it waits for sums. */
static int wait_until_held(tagc_reducer *r) {
    for (unsigned n_looks = 0; atomic_load(&r->now.hold) != TAGC_HELD; n_looks++) {
        if (tagc_comm_has_ended(r->comm, &r->now.task)) return 0;
        tagc_queue_pause(n_looks);
    }
    return 1;
}

void tagc_ahead_pass(tagc_reducer *r) {
    if (wait_until_held(r)) tagc_reducer_let_go(r);
}

void tagc_ahead_add(tagc_ahead *a, uint64_t number) {
    tagc_reducer *r = a->reducer;
    if (!wait_until_held(r)) {
        tagc_queue_add(a->queue, number);
        return;
    }
    if (a->has_bodies) tagc_queue_allow(a->queue, &orders_in(a->room.here)->stop[0]);
    tagc_queue_add(a->queue, number);
    tagc_status status = tagc_queue_wait_for_sums(a->queue, number);
    tagc_note_failure(r, status);
    if (status == TAGC_OK) r->now.stats.nonfinite |= sums_in(a, a->room.here)->nonfinite;
    tagc_reducer_let_go(r);
}

tagc_status tagc_ahead_end(tagc_ahead *a, tagc_reducer_stats *stats) {
    tagc_status status = tagc_reducer_end(a->reducer, stats);
    direct_of(a)->ahead = NULL;
    if (status == TAGC_OK && !a->reducer->now.stats.nonfinite) /* else orders stay negative */
        tagc_queue_settle(a->queue, orders_in(a->room.here));
    return status;
}

/* ---- the worker ---- */

tagc_ahead *tagc_ahead_of(const tagc_reducer *r) {
    return tagc_direct_of(r)->ahead;
}

/* A length from the device decides how much is copied. */
static tagc_status check_length(const tagc_ahead *a, const tagc_encoded *encoded) {
    if (encoded->n_bytes <= a->stride && encoded->n_index_bytes <= encoded->n_bytes) return TAGC_OK;
    return tagc_fail(TAGC_ERR_DEVICE,
                     "kernels made a body of %zu bytes, %zu of them positions: there is room for %zu",
                     encoded->n_bytes, encoded->n_index_bytes, a->stride);
}

static void take_body(tagc_reducer *r, int t, tagc_encoded *out) {
    const tagc_ahead *a = tagc_ahead_of(r);
    int rank = tagc_partner_to(a->reducer, t);
    const tagc_encoded *encoded = &results_in(a, a->room.here)[t].encoded;
    tagc_status status = check_length(a, encoded);
    tagc_note_failure(r, status);
    if (status != TAGC_OK) return;
    *out = *encoded;
    if (rank != own_rank(a)) /* the own one stays where it is */
        memcpy(tagc_direct_row_out(r, t) + TAGC_WIRE_HEADER_BYTES, body_in(a, a->room.here, rank),
               encoded->n_bytes);
}

/* Bodies that have arrived and are sound, but the own one. Returns 1 if none is missing. */
static int give(tagc_ahead *a, size_t own_bytes) {
    const tagc_direct *d = direct_of(a);
    const tagc_reducer *r = a->reducer;
    uint64_t *lengths = lengths_in(a->room.here);
    if (r->now.failure != TAGC_OK || r->now.stats.nonfinite) return 0;
    for (int rank = 0; rank < n_ranks(a); rank++) {
        const tagc_body *body = &d->bodies[rank];
        if (!body->bytes) return 0;
        lengths[rank] = rank == own_rank(a) ? own_bytes : body->n_bytes;
        if (rank != own_rank(a)) memcpy(body_in(a, a->room.here, rank), body->bytes, body->n_bytes);
    }
    return 1;
}

static void give_bodies(tagc_reducer *r, int first, int end) {
    (void)first, (void)end; /* all of them */
    tagc_ahead *a = tagc_ahead_of(r);
    if (!a) return;
    int is_plain = returns_sums(a);
    a->has_bodies = give(a, is_plain ? 0 : results_in(a, a->room.here)[n_ranks(a) - 1].encoded.n_bytes);
}

static void take_sums(tagc_reducer *r, uint8_t *body, tagc_encoded *out) {
    const tagc_ahead *a = tagc_ahead_of(r);
    const tagc_encoded *encoded = &sums_in(a, a->room.here)[1].encoded;
    tagc_status status = check_length(a, encoded);
    tagc_note_failure(r, status);
    if (status != TAGC_OK) return;
    *out = *encoded;
    memcpy(body, body_in(a, a->room.here, own_rank(a)), encoded->n_bytes);
}

static void give_sums(tagc_reducer *r) {
    tagc_ahead *a = tagc_ahead_of(r);
    if (!a) return;
    give(a, sums_in(a, a->room.here)[1].encoded.n_bytes); /* if one is missing, the step does not count */
}

/* Bodies are in the rooms of the unit's queue. */
static tagc_status make_nothing(tagc_reducer *r) {
    (void)r;
    return TAGC_OK;
}

static void end_nothing(tagc_reducer *r) {
    (void)r;
}

static const tagc_runner runner = {.name = "kernels",
                                   .is_ahead = 1,
                                   .make = make_nothing,
                                   .end = end_nothing,
                                   .note_residual = tagc_store_note,
                                   .encode = take_body,
                                   .add = give_bodies,
                                   .encode_sums = take_sums,
                                   .decode_sums = give_sums};

tagc_status tagc_reducer_create_in(tagc_store *store, tagc_comm *comm, const tagc_reducer_options *options,
                                   tagc_reducer **out) {
    return tagc_reducer_make(&store->arrays, &runner, NULL, comm, options, out);
}

tagc_status tagc_reducer_probe_in(tagc_store *store, tagc_comm *comm, const tagc_reducer_options *options,
                                  tagc_reducer **out) {
    return tagc_reducer_make_alone(&store->of_probes, &runner, comm, options, out);
}
