/* The batches of a direct exchange, and how the processor runs them: one row at a time, so that a fragment is on the wire while the
 * next one is encoded. Bodies are written to and read from the rows of messages. */
#include "exchange/direct/direct.h"

static const tagc_batch_kind kinds[TAGC_N_BATCHES] = {[TAGC_ENCODE] = TAGC_BATCH_ENCODE,
                                                      [TAGC_ADD] = TAGC_BATCH_DECODE,
                                                      [TAGC_ENCODE_SUMS] = TAGC_BATCH_ENCODE,
                                                      [TAGC_DECODE_SUMS] = TAGC_BATCH_DECODE};

/* ---- rows; arrays are NULL where no step is under way ---- */

static float *at(const float *values, size_t n) {
    return values ? (float *)(size_t)values + n : NULL;
}

/* Row `row` of the residual, or of its successor. */
static void *residual_at(const tagc_reducer *r, const void *rows, size_t row) {
    return rows ? (char *)(size_t)rows + row * r->row_bytes : NULL;
}

static const void *gradient_at(const tagc_reducer *r, size_t row) {
    const char *gradient = r->now.gradient;
    return gradient ? gradient + row * r->shard * tagc_reducer_gradient_bytes(r) : NULL;
}

static float *sums_of(const tagc_reducer *r) {
    return r->now.output || r->now.own_sums ? tagc_direct_sums(r) : NULL;
}

/* What this rank has for an owner. */
static const void *values_for(const tagc_reducer *r, int owner) {
    if (r->now.row && !r->now.gradient) return r->now.row; /* tagc_direct_fill_row */
    return gradient_at(r, (size_t)owner);
}

static tagc_batch_row encode_row(const tagc_reducer *r, int owner, uint8_t *body) {
    size_t row = (size_t)owner;
    return (tagc_batch_row){.options = tagc_direct_of(r)->fragment,
                            .gradient = values_for(r, owner),
                            .residual_in = residual_at(r, r->residual, row),
                            .residual_out = residual_at(r, r->now.residual, row),
                            .seed = tagc_reducer_seed(r, row),
                            .body = body};
}

tagc_body tagc_own_body(const tagc_reducer *r) {
    return (tagc_body){.bytes = values_for(r, r->rank), .is_plain = 1};
}

static tagc_batch_row add_row(const tagc_reducer *r, const tagc_body *bodies, int n_bodies, int adds) {
    return (tagc_batch_row){.options = tagc_direct_of(r)->fragment,
                            .adds = adds,
                            .sums = sums_of(r),
                            .scale = tagc_direct_has_results(r) ? 1 : r->scale, /* else when they come back */
                            .bodies = bodies,
                            .n_bodies = n_bodies};
}

static tagc_batch_row encode_sums_row(const tagc_reducer *r, uint8_t *body) {
    tagc_batch_row row = encode_row(r, r->rank, body);
    row.options = tagc_direct_of(r)->sums;
    row.gradient = sums_of(r);
    return row;
}

static tagc_batch_row decode_sums_row(const tagc_reducer *r, size_t row, const tagc_body *body) {
    return (tagc_batch_row){.options = tagc_direct_of(r)->sums,
                            .sums = r->now.row ? r->now.row : at(r->now.output, row * r->shard),
                            .scale = r->scale,
                            .bodies = body,
                            .n_bodies = body->bytes != NULL};
}

/* ---- life ---- */

static int is_needed(const tagc_reducer *r, int which) {
    int is_of_sums = which == TAGC_ENCODE_SUMS || which == TAGC_DECODE_SUMS;
    return !is_of_sums || tagc_direct_has_results(r);
}

static size_t n_rows(const tagc_reducer *r, int which) {
    size_t n = r->runner->is_ahead ? (size_t)r->world_size : 1;
    if (which == TAGC_ADD || which == TAGC_ENCODE_SUMS) return 1;
    int leaves_own_out = which == TAGC_ENCODE && r->runner->is_ahead;
    return leaves_own_out && tagc_direct_has_results(r) ? n - 1 : n;
}

/* As large as a row can be. */
static tagc_batch_row largest(const tagc_reducer *r, int which) {
    const tagc_direct *d = tagc_direct_of(r);
    int is_of_fragments = which == TAGC_ENCODE || which == TAGC_ADD;
    return (tagc_batch_row){.options = is_of_fragments ? d->fragment : d->sums,
                            .bodies = d->batches.bodies,
                            .n_bodies = which == TAGC_ADD ? r->world_size : 1};
}

/* Fills the list of rows; returns their number. */
static size_t shape(tagc_reducer *r, int which) {
    size_t n = is_needed(r, which) ? n_rows(r, which) : 0;
    for (size_t i = 0; i < n; i++) tagc_direct_of(r)->batches.rows[i] = largest(r, which);
    return n;
}

void tagc_batches_place(tagc_reducer *r, tagc_arena *arena) {
    tagc_batches *b = &tagc_direct_of(r)->batches;
    size_t n_ranks = (size_t)r->world_size;
    *b = (tagc_batches){0}; /* that of a layout before belongs to it */
    b->rows = tagc_arena_take(arena, n_ranks, sizeof *b->rows);
    b->bodies = tagc_arena_take(arena, n_ranks, sizeof *b->bodies);
    if (r->arrays->is_here) b->results = tagc_arena_take(arena, n_ranks, sizeof *b->results);
}

void tagc_batches_place_work(tagc_reducer *r, tagc_arena *arena) {
    tagc_batches *b = &tagc_direct_of(r)->batches;
    size_t work_bytes = 0;
    if (!r->arrays->is_here) return;
    /* The processor works row after row, so one row of each batch tells how much memory it needs. */
    for (int which = 0; which < TAGC_N_BATCHES; which++) {
        tagc_batch_row row = largest(r, which);
        size_t n = is_needed(r, which)
                       ? r->arrays->maker->work_bytes(kinds[which], &row, 1, r->options.n_threads)
                       : 0;
        if (n > work_bytes) work_bytes = n;
    }
    b->work = tagc_arena_take(arena, work_bytes, 1);
}

size_t tagc_batches_work_bytes(tagc_reducer *r, int which) {
    size_t n = shape(r, which);
    if (!n) return 0;
    return r->arrays->maker->work_bytes(kinds[which], tagc_direct_of(r)->batches.rows, n,
                                        r->options.n_threads);
}

size_t tagc_batches_n_launches(tagc_reducer *r, int which) {
    size_t n = shape(r, which);
    return n ? r->arrays->maker->n_launches(kinds[which], tagc_direct_of(r)->batches.rows, n) : 0;
}

tagc_status tagc_batches_make_one(tagc_reducer *r, int which, void *work, void *stream, tagc_batch **out) {
    const tagc_batches *b = &tagc_direct_of(r)->batches;
    size_t n = shape(r, which);
    *out = NULL;
    if (n == 0) return TAGC_OK;
    return tagc_batches_check(
        r, r->arrays->maker->create(kinds[which], b->rows, n, b->results, work, r->pool, stream, out));
}

static tagc_status make(tagc_reducer *r) {
    tagc_batches *b = &tagc_direct_of(r)->batches;
    for (int which = 0; which < TAGC_N_BATCHES; which++)
        TAGC_TRY(tagc_batches_make_one(r, which, b->work, NULL, &b->made[which]));
    return TAGC_OK;
}

static void end(tagc_reducer *r) {
    tagc_batches *b = &tagc_direct_of(r)->batches;
    for (int which = 0; which < TAGC_N_BATCHES; which++) {
        r->arrays->maker->destroy(b->made[which]);
        b->made[which] = NULL;
    }
}

static tagc_status run(tagc_reducer *r, int which) {
    const tagc_batches *b = &tagc_direct_of(r)->batches;
    if (!b->made[which]) return TAGC_OK; /* it would have no rows */
    b->rows[0].work = b->work;           /* there is one row; the memory is this step's */
    TAGC_TRY(tagc_batches_check(r, r->arrays->maker->point(b->made[which], b->rows, b->results)));
    return tagc_batches_check(r, r->arrays->maker->run(b->made[which]));
}

tagc_status tagc_batches_check(const tagc_reducer *r, tagc_status status) {
    return status == TAGC_OK ? TAGC_OK : tagc_fail(status, "%s", r->arrays->maker->last_error());
}

/* ---- the processor ---- */

/* Runs a batch of one row. */
static const tagc_batch_result *run_row(tagc_reducer *r, int which, tagc_batch_row row) {
    tagc_batches *b = &tagc_direct_of(r)->batches;
    b->rows[0] = row;
    tagc_note_failure(r, run(r, which));
    return &b->results[0];
}

static void encode(tagc_reducer *r, int t, tagc_encoded *out) {
    int owner = tagc_partner_to(r, t);
    uint8_t *body = (uint8_t *)tagc_direct_row_out(r, t) + TAGC_WIRE_HEADER_BYTES;
    tagc_direct_fill_row(r, owner);
    *out = run_row(r, TAGC_ENCODE, encode_row(r, owner, body))->encoded;
}

static void add(tagc_reducer *r, int first, int end) {
    const tagc_direct *d = tagc_direct_of(r);
    int n = 0;
    for (int from = first; from < end; from++)
        if (d->bodies[from].bytes) d->batches.bodies[n++] = d->bodies[from];
    r->now.stats.nonfinite |= run_row(r, TAGC_ADD, add_row(r, d->batches.bodies, n, first > 0))->nonfinite;
}

static void encode_sums(tagc_reducer *r, uint8_t *body, tagc_encoded *out) {
    *out = run_row(r, TAGC_ENCODE_SUMS, encode_sums_row(r, body))->encoded;
}

static void decode_sums(tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    for (size_t row = 0; row < (size_t)r->world_size; row++) {
        run_row(r, TAGC_DECODE_SUMS, decode_sums_row(r, row, &d->bodies[row]));
        if (r->now.row) r->feed->take(r->feed->context, row, 0, r->shard, r->now.row);
    }
}

const tagc_runner tagc_direct_on_host = {.name = "the processor",
                                         .make = make,
                                         .end = end,
                                         .encode = encode,
                                         .add = add,
                                         .encode_sums = encode_sums,
                                         .decode_sums = decode_sums};
