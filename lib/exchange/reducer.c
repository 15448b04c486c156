/* Creates and destroys reducers, and runs each step as one task. A reducer allocates all its memory when it is made.
 *
 * Its memory is the state of its exchange, the residual, a share in spares (transport/comm.h), a share in the memory of steps under
 * way (transport/work.h), and one arena,
 *
 *   | messages | agreement | what the exchange asked for, see the comment at the top of its file |
 *
 * The residual and its spare are blocks of their own, because they are swapped. */
#include "exchange/reducer.h"
#include "core/clock.h"
#include "core/cpu.h"
#include "core/sized.h"
#include "exchange/options.h"
#include "exchange/refusal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const tagc_reducer_stats no_stats;
static const tagc_sized stats_struct = {"tagc_reducer_stats", sizeof(tagc_reducer_stats),
                                        offsetof(tagc_reducer_stats, nonfinite) +
                                            sizeof(int), /* the last field of the first release */
                                        &no_stats};

void tagc_reducer_stats_init_sized(tagc_reducer_stats *stats, size_t struct_bytes) {
    tagc_sized_init(&stats_struct, stats, struct_bytes);
}

void tagc_reducer_place(tagc_reducer *r, tagc_arena *arena) {
    r->exchange->place(r, arena);
    tagc_agreement_place(r, arena);
}

/* 1: a feed gives and takes chunks, so there are no arrays. */
static int is_by_chunk(const tagc_reducer *r) {
    return r->exchange->takes_chunks && r->options.output == TAGC_OUTPUT_SHARD;
}

/* direct works row by row. Where it sends no sums back, the last row is encoded before the first sum is written. On its path for whole
 * values, sums that are sent back take the place of the gradient, chunk by chunk, once that has been sent. */
static void place_fed_arrays(tagc_reducer *r, tagc_arena *work) {
    size_t n = (size_t)r->options.n_elems, n_output = (size_t)tagc_output_elems(&r->options, r->world_size);
    int is_by_row = r->exchange->runner != NULL, is_shard = r->options.output == TAGC_OUTPUT_SHARD;
    if (is_by_chunk(r)) return;
    void *gradient = is_by_row ? NULL : tagc_arena_take(work, n, tagc_reducer_gradient_bytes(r));
    int is_in_place = r->exchange->overlap == TAGC_OVERLAP_ROWS && r->options.gradient == TAGC_FORMAT_FP32;
    float *output = is_by_row || is_in_place ? NULL : tagc_arena_take(work, n_output, sizeof *output);
    void *row = is_by_row ? tagc_arena_take(work, r->shard, sizeof(float)) : NULL;
    float *own_sums = is_by_row && !is_shard ? tagc_arena_take(work, r->shard, sizeof *own_sums) : row;
    if (!work->base) return;
    if (is_in_place) output = (float *)gradient + (is_shard ? (size_t)r->rank * r->shard : 0);
    r->now.gradient = gradient;
    r->now.row = row;
    r->now.own_sums = own_sums;
    r->now.output = is_by_row && is_shard ? own_sums : output;
}

void tagc_reducer_place_work(tagc_reducer *r, tagc_arena *work) {
    if (r->feed) place_fed_arrays(r, work);
    r->exchange->place_work(r, work);
}

/* ---- a unit that is no multiple of W: its arrays are a feed, so that nothing beyond them is touched ---- */

/* Values of the unit from number `first` on, of n. */
static size_t given_of(const tagc_reducer *r, size_t first, size_t n) {
    size_t n_left = first < r->n_given ? (size_t)r->n_given - first : 0;
    return n_left < n ? n_left : n;
}

static tagc_status start_padded(void *context, const void **lent) {
    (void)context, (void)lent;
    return TAGC_OK;
}

static void fill_padded(void *context, size_t row, size_t first, size_t n, void *values) {
    const tagc_reducer *r = context;
    size_t width = tagc_reducer_gradient_bytes(r), at = row * r->shard + first, n_given = given_of(r, at, n);
    if (n_given) memcpy(values, (const char *)r->now.given_gradient + at * width, n_given * width);
    memset((char *)values + n_given * width, 0, (n - n_given) * width);
}

static void take_padded(void *context, size_t row, size_t first, size_t n, const float *sums) {
    const tagc_reducer *r = context;
    int is_shard = r->options.output == TAGC_OUTPUT_SHARD;
    size_t n_given = given_of(r, (is_shard ? (size_t)r->rank : row) * r->shard + first, n);
    float *to = r->now.given_output;
    for (size_t i = 0; i < n_given; i++) to[row * r->shard + first + i] = sums ? sums[i] : NAN;
}

static void end_padded(void *context, tagc_status status) {
    (void)context, (void)status;
}

void tagc_reducer_size(tagc_reducer *r, uint64_t n_given) {
    r->shard = (size_t)(r->options.n_elems / (uint64_t)r->world_size);
    r->n_given = n_given;
    if (n_given == r->options.n_elems) return;
    r->padding = (tagc_feed){
        .context = r, .start = start_padded, .fill = fill_padded, .take = take_padded, .end = end_padded};
    r->feed = &r->padding;
}

static void count_residual(const tagc_reducer *r, int sign) {
    tagc_comm_count(r->comm, r->arrays->is_here ? TAGC_HELD_RESIDUAL : TAGC_HELD_RESIDUAL_THERE,
                    sign * (int64_t)tagc_reducer_stored_bytes(r));
}

static void destroy_state(tagc_reducer *r) {
    if (r->state && r->runner) r->runner->end(r);
    tagc_memory_destroy(r->state);
    tagc_memory_destroy(r->arena);
    tagc_comm_count(r->comm, TAGC_HELD_BUFFERS, -(int64_t)r->buffer_bytes);
    r->buffer_bytes = 0;
    r->state = r->arena = NULL;
}

static tagc_status lay_out(tagc_reducer *r) {
    void *before = r->state, *memory = NULL;
    tagc_arena arena = {0}, work = {0};
    r->arena = NULL;
    r->buffer_bytes = 0;
    TAGC_TRY(tagc_memory_create(r->exchange->state_bytes, "reducer", &r->state));
    if (before) memcpy(r->state, before, r->exchange->state_bytes);
    tagc_reducer_place(r, &arena);
    tagc_reducer_place_work(r, &work);
    tagc_status status =
        arena.overflow || work.overflow
            ? tagc_fail(TAGC_ERR_MEMORY,
                        "n_elems is %llu: the reducer's buffers do not fit into the address space",
                        (unsigned long long)r->options.n_elems)
            : tagc_memory_create(arena.n_bytes, "reducer buffers", &memory);
    r->arena = memory;
    if (status != TAGC_OK) return status;
    r->buffer_bytes = r->exchange->state_bytes + arena.n_bytes;
    tagc_comm_count(r->comm, TAGC_HELD_BUFFERS, (int64_t)r->buffer_bytes);
    arena = (tagc_arena){.base = memory};
    tagc_reducer_place(r, &arena);
    if (r->runner) TAGC_TRY(r->runner->make(r));
    return tagc_work_set(r->comm, &r->work, work.n_bytes);
}

void tagc_reducer_destroy_residual(tagc_reducer *r) {
    const tagc_heap *heap = &r->arrays->heap;
    if (r->spares) tagc_comm_spares_release(r->comm, r->spares);
    count_residual(r, -1);
    heap->destroy(heap->context, r->residual, (size_t)tagc_reducer_stored_bytes(r));
    r->spares = NULL;
    r->residual = NULL;
    r->n_residual = 0;
}

int tagc_stored_format(const tagc_reducer_options *options) {
    if (options->residual >= 0) return options->residual;
    if (tagc_is_without_residual(options)) return TAGC_FORMAT_FP32; /* of nothing */
    return options->exchange == TAGC_EXCHANGE_DIRECT ? TAGC_FORMAT_INT8 : TAGC_FORMAT_FP32;
}

tagc_status tagc_reducer_make_residual(tagc_reducer *r) {
    void *memory;
    uint64_t n = r->exchange->residual_elems(&r->options), n_bytes;
    if (n == 0) return TAGC_OK;
    r->row_bytes = tagc_residual_bytes(r->residual_format, r->shard);
    if (__builtin_mul_overflow(n / r->shard, (uint64_t)r->row_bytes, &n_bytes) || n_bytes > SIZE_MAX)
        return tagc_fail(TAGC_ERR_MEMORY, "n_elems is %llu: the residual does not fit into the address space",
                         (unsigned long long)r->options.n_elems);
    const tagc_heap *heap = &r->arrays->heap;
    TAGC_TRY(heap->create(heap->context, (size_t)n_bytes, "residual", &memory));
    tagc_status status = r->runner && r->runner->is_ahead
                             ? TAGC_OK
                             : tagc_comm_spares_acquire(r->comm, n_bytes, heap, &r->spares);
    r->residual = memory;
    r->n_residual = n;
    count_residual(r, 1);
    if (status == TAGC_OK)
        status = r->arrays->fill(heap->context, memory, tagc_residual_zeros(r->residual_format), n_bytes);
    if (status != TAGC_OK) tagc_reducer_destroy_residual(r);
    return status;
}

static void choose_path(tagc_reducer *r) {
    const tagc_exchange_table *path = tagc_exchange_path(&r->options, r->may_be_whole && !r->residual);
    if (path == r->exchange) return;
    r->exchange = path;
    r->runner = path->runner;
    r->state = NULL;
}

/* TAGC_ERR_UNSUPPORTED unless this runner can stand in for that of the exchange. */
static tagc_status check_runner(const tagc_reducer *r, const tagc_runner *runner) {
    if (!r->exchange->runner)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "exchange is %s, but %s support only direct",
                         tagc_exchange_names[r->options.exchange], runner->name);
    if (r->n_given != r->options.n_elems)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "n_elems is %llu, must be a multiple of the world size %d with %s",
                         (unsigned long long)r->n_given, r->world_size, runner->name);
    return TAGC_OK;
}

/* The part of _create that does not communicate. On failure *out may be half-made. */
static tagc_status make(const tagc_arrays *arrays, const tagc_runner *runner, const tagc_feed *feed,
                        tagc_comm *comm, const tagc_reducer_options *options, tagc_reducer **out) {
    tagc_reducer_options checked;
    _Alignas(8) char own[TAGC_OWN_MAX_BYTES];
    void *memory;
    *out = NULL;
    TAGC_TRY(tagc_cpu_check());
    TAGC_TRY(tagc_reducer_options_check(options, tagc_comm_world_size(comm), &checked, own));
    TAGC_TRY(tagc_memory_create(sizeof(tagc_reducer), "reducer", &memory));
    tagc_reducer *r = *out = memory;
    r->comm = comm;
    tagc_comm_hold(comm);
    r->arrays = arrays;
    r->feed = feed;
    r->options = checked;
    memcpy(r->own_options, own, sizeof own);
    r->exchange = tagc_exchange_of(checked.exchange);
    r->runner = r->exchange->runner;
    r->rank = tagc_comm_rank(comm);
    r->world_size = tagc_comm_world_size(comm);
    tagc_reducer_size(r, options->n_elems);
    r->residual_format = tagc_stored_format(&checked);
    r->scale = checked.op == TAGC_OP_AVG ? 1.0f / (float)r->world_size : 1.0f;
    if (runner) {
        TAGC_TRY(check_runner(r, runner));
        r->runner = runner;
    }
    TAGC_TRY(tagc_reducer_make_residual(r));
    r->may_be_whole = !runner;
    choose_path(r);
    int kind = feed ? feed->work : TAGC_WORK_REDUCE;
    TAGC_TRY(tagc_work_open(comm, &tagc_host_arrays.heap, kind, checked.tag, &r->work));
    if (checked.n_threads > 1) TAGC_TRY(tagc_pool_create(checked.n_threads, &r->pool));
    TAGC_TRY(lay_out(r));
    tagc_reducer_note_residual(r);
    return TAGC_OK;
}

/* Where one rank cannot send whole values as they are, none does. */
static tagc_status settle_path(tagc_reducer *r) {
    tagc_reducer before = *r;
    choose_path(r);
    if (r->exchange == before.exchange) return TAGC_OK;
    destroy_state(&before);
    return lay_out(r);
}

tagc_status tagc_reducer_make(const tagc_arrays *arrays, const tagc_runner *runner, const tagc_feed *feed,
                              tagc_comm *comm, const tagc_reducer_options *options, tagc_reducer **out) {
    tagc_reducer *r;
    tagc_reducer_options agreed;
    *out = NULL;
    tagc_status status = make(arrays, runner, feed, comm, options, &r);
    if (r) agreed = r->options;
    if (r) agreed.n_elems = r->n_given;
    status = tagc_reducer_options_agree(comm, status, r ? &agreed : NULL, r ? r->own_options : NULL,
                                        r ? &r->identity : NULL, r ? &r->may_be_whole : NULL);
    if (status == TAGC_OK) status = settle_path(r);
    if (status != TAGC_OK) {
        tagc_reducer_destroy(r);
        return status;
    }
    *out = r;
    return TAGC_OK;
}

tagc_status tagc_reducer_make_alone(const tagc_arrays *arrays, const tagc_runner *runner, tagc_comm *comm,
                                    const tagc_reducer_options *options, tagc_reducer **out) {
    tagc_status status = make(arrays, runner, NULL, comm, options, out);
    if (status == TAGC_OK) return TAGC_OK;
    tagc_reducer_destroy(*out);
    *out = NULL;
    return status;
}

tagc_status tagc_reducer_create(tagc_comm *comm, const tagc_reducer_options *options, tagc_reducer **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!comm) return tagc_fail(TAGC_ERR_ARGUMENT, "comm is NULL");
    TAGC_TRY(tagc_comm_check_open(comm));
    return tagc_reducer_make(&tagc_host_arrays, NULL, NULL, comm, options, out);
}

void tagc_reducer_destroy(tagc_reducer *r) {
    if (!r || tagc_comm_is_fork(r->comm)) return;
    if (r->now.begun) (void)tagc_comm_join(r->comm, &r->now.task);
    tagc_reducer_destroy_residual(r);
    tagc_pool_destroy(r->pool);
    destroy_state(r);
    tagc_work_close(r->comm, &r->work);
    tagc_identity_close(r->comm, &r->identity);
    tagc_comm_let_go(r->comm);
    tagc_memory_destroy(r);
}

void tagc_reducer_set_name(tagc_reducer *r, const char *name) {
    tagc_identity_set_name(r->comm, &r->identity, name);
}

/* ---- other options, between two steps: the residual stays where it is, buffers and work memory are laid out anew ---- */

tagc_status tagc_reducer_check_idle(const tagc_reducer *r, const char *what) {
    if (!r) return tagc_fail(TAGC_ERR_ARGUMENT, "reducer is NULL");
    if (r->now.begun) return tagc_fail(TAGC_ERR_STATE, "%s between begin and end: end the step first", what);
    return TAGC_OK;
}

/* options: with defaults resolved. */
static tagc_status take_up(tagc_reducer *r, const tagc_reducer_options *options) {
    tagc_reducer fresh = *r;
    fresh.options = *options;
    if (!r->residual)
        TAGC_TRY(tagc_reducer_make_residual(&fresh)); /* where all was sent, something now stays */
    choose_path(&fresh);
    tagc_status status = lay_out(&fresh);
    if (status != TAGC_OK) {
        destroy_state(&fresh);
        if (!r->residual) tagc_reducer_destroy_residual(&fresh);
        return status;
    }
    destroy_state(r);
    *r = fresh;
    tagc_reducer_note_residual(r);
    return TAGC_OK;
}

tagc_status tagc_reducer_change(tagc_reducer *r, const tagc_reducer_options *options) {
    tagc_reducer_options checked;
    _Alignas(8) char own[TAGC_OWN_MAX_BYTES];
    TAGC_TRY(tagc_reducer_check_idle(r, "change"));
    if (r->options.exchange != TAGC_EXCHANGE_DIRECT)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "exchange is %s, but only a reducer of direct can change",
                         tagc_exchange_names[r->options.exchange]);
    TAGC_TRY(tagc_reducer_options_check(options, r->world_size, &checked, own));
    tagc_reducer_options now = r->options, wanted = checked;
    now.n_elems = r->n_given;
    wanted.n_elems = options->n_elems;
    TAGC_TRY(tagc_reducer_options_check_change(&now, &wanted));
    int is_same = checked.format == r->options.format && checked.sparsity == r->options.sparsity &&
                  checked.block == r->options.block && checked.result.format == r->options.result.format &&
                  checked.result.sparsity == r->options.result.sparsity;
    return is_same ? TAGC_OK : take_up(r, &checked);
}

tagc_status tagc_reducer_set_sparsity(tagc_reducer *r, double sparsity) {
    TAGC_TRY(tagc_reducer_check_idle(r, "set_sparsity"));
    if (!(sparsity >= 0 && sparsity <= 1))
        return tagc_fail(TAGC_ERR_ARGUMENT, "sparsity is %.10g, must be in [0, 1]", sparsity);
    if (sparsity == r->options.sparsity) return TAGC_OK;
    tagc_reducer_options options = r->options;
    options.sparsity = sparsity;
    TAGC_TRY(tagc_reducer_options_check_once(&options));
    return take_up(r, &options);
}

/* ---- a step ---- */

static size_t n_rows_of_output(const tagc_reducer *r) {
    return (size_t)(tagc_output_elems(&r->options, r->world_size) / r->shard);
}

static void start_fed(tagc_reducer *r) {
    const tagc_feed *feed = r->feed;
    const void *lent = NULL;
    double start_s = tagc_clock_s();
    tagc_note_failure(r, feed->start(feed->context, &lent));
    char *whole = (char *)(uintptr_t)r->now.gradient;
    for (size_t row = 0; whole && r->now.failure == TAGC_OK && row < (size_t)r->world_size; row++)
        feed->fill(feed->context, row, 0, r->shard, whole + row * r->shard * tagc_reducer_gradient_bytes(r));
    if (lent) r->now.gradient = lent;
    tagc_phase_end(r, TAGC_PHASE_SELECT, start_s);
}

/* Chunks were taken when they were added up, and rows of sums that are sent back when they were decoded. */
static void end_fed(tagc_reducer *r) {
    const tagc_feed *feed = r->feed;
    int is_void = r->now.stats.nonfinite;
    int was_taken = is_by_chunk(r) || (r->now.row && r->options.output != TAGC_OUTPUT_SHARD);
    for (size_t row = 0; row < n_rows_of_output(r) && (is_void || !was_taken); row++)
        feed->take(feed->context, row, 0, r->shard, is_void ? NULL : r->now.output + row * r->shard);
    feed->end(feed->context, TAGC_OK);
}

static void start(tagc_reducer *r) {
    tagc_arena work = {.base = r->work.memory};
    tagc_reducer_place_work(r, &work);
    r->now.start_s = tagc_clock_s();
    tagc_reducer_stats_init(&r->now.stats);
    r->now.failure = r->now.refused; /* with its text */
    r->now.longest[0] = r->now.longest[1] = 0;
    if (r->feed) start_fed(r);
}

/* Swaps in the new residual of the step under way, or discards it. */
static void settle_residual(tagc_reducer *r, int is_taken) {
    void *other = r->now.residual;
    if (!other) return;
    if (is_taken) {
        other = r->residual;
        r->residual = r->now.residual;
    }
    r->now.residual = NULL;
    tagc_comm_spare_give(r->comm, r->spares, other);
}

tagc_status tagc_reducer_check_stats(const tagc_reducer_stats *stats) {
    return stats ? tagc_sized_check(&stats_struct, stats) : TAGC_OK;
}

void tagc_reducer_write_stats(const tagc_reducer *r, tagc_reducer_stats *stats) {
    if (stats) tagc_sized_write(&stats_struct, &r->now.stats, stats);
}

static void finish(tagc_reducer *r) {
    tagc_reducer_stats *stats = &r->now.stats;
    settle_residual(r, !stats->nonfinite);
    if (r->exchange->end) r->exchange->end(r, 1);
    if (r->feed) end_fed(r);
    tagc_work_give(r->comm, &r->work);
    stats->sparsity = 1.0 - (double)stats->n_sent / (double)r->options.n_elems;
    stats->total_s = tagc_clock_s() - r->now.start_s;
}

/* After a failure, waits until no message of the step is in progress, because the caller gets its memory back. */
static tagc_status fail(tagc_reducer *r, tagc_status status) {
    char text[TAGC_ERROR_TEXT_BYTES];
    memcpy(text, tagc_last_error(), sizeof text);
    tagc_messages_drain(r); /* their failures are this one's echoes */
    settle_residual(r, 0);
    if (r->exchange->end) r->exchange->end(r, 0);
    if (r->feed) r->feed->end(r->feed->context, status);
    tagc_work_give(r->comm, &r->work);
    return tagc_fail(status, "%s", text);
}

/* The memory of steps goes by their order, so a step that has its own may wait for a spare: only an older one has that. */
static int has_memory(tagc_reducer *r) {
    tagc_step *step = &r->now;
    if (!tagc_work_take(r->comm, &r->work)) return 0;
    if (r->feed && r->feed->is_ready && !r->feed->is_ready(r->feed->context)) return 0;
    if (!r->spares || step->is_ahead) return 1;
    if (!step->residual) step->residual = tagc_comm_spare_take(r->comm, r->spares);
    return step->residual != NULL;
}

/* The first action waits for memory, the others for messages, and one of a step that is ahead until it is let go. */
static int is_ready(void *arg) {
    tagc_reducer *r = arg;
    tagc_step *step = &r->now;
    if (!step->next) return has_memory(r);
    if (atomic_load(&step->hold) == TAGC_HELD) return 0;
    for (int m = 0; m < step->n_awaited; m++)
        if (!tagc_message_done(r, &step->awaited[m])) return 0;
    return 1;
}

static tagc_status run_action(void *arg) {
    tagc_reducer *r = arg;
    tagc_step *step = &r->now;
    tagc_action_fn action = step->next ? step->next : r->exchange->start;
    if (!step->next)
        start(r);
    else if (step->task.idle_s > 0)
        tagc_phase_end(r, TAGC_PHASE_WAIT, tagc_clock_s() - step->task.idle_s);
    step->next = NULL;
    for (int m = 0; m < step->n_awaited; m++) {
        tagc_status status = tagc_message_wait(r, &step->awaited[m]);
        if (status != TAGC_OK) return fail(r, status);
    }
    step->n_awaited = 0;
    tagc_status status = action(r);
    if (status != TAGC_OK) return fail(r, status);
    step->task.more = step->next != NULL;
    if (!step->next) finish(r);
    return TAGC_OK;
}

static int overlap(const void *a, uint64_t n_bytes_a, const void *b, uint64_t n_bytes_b) {
    uintptr_t begin_a = (uintptr_t)a, begin_b = (uintptr_t)b;
    return begin_a < begin_b + n_bytes_b && begin_b < begin_a + n_bytes_a;
}

/* Whether a step has read what the output takes the place of before it writes there. Sums that are sent back need a row beside
 * the own one. */
static int may_overlap(const tagc_reducer *r, const void *gradient, const float *output) {
    const tagc_reducer_options *o = &r->options;
    tagc_overlap allowed = r->arrays->is_here ? r->exchange->overlap : TAGC_OVERLAP_NONE;
    int is_fp32 = o->gradient == TAGC_FORMAT_FP32, is_shard = o->output == TAGC_OUTPUT_SHARD;
    if (allowed == TAGC_OVERLAP_NONE) return 0;
    if (is_shard && allowed == TAGC_OVERLAP_ANYWHERE) return 1;
    if (is_shard) return is_fp32 && (output - (const float *)gradient) % (ptrdiff_t)r->shard == 0;
    return o->output == TAGC_OUTPUT_UNIT && gradient == output && is_fp32 && r->world_size > 1;
}

uint64_t tagc_reducer_given_output(const tagc_reducer *r) {
    uint64_t n = tagc_output_elems(&r->options, r->world_size);
    size_t first = r->options.output == TAGC_OUTPUT_SHARD ? (size_t)r->rank * r->shard : 0;
    return r->n_given == r->options.n_elems ? n : given_of(r, first, (size_t)n);
}

tagc_status tagc_reducer_check_lengths(const tagc_reducer *r, uint64_t n_gradient, uint64_t n_output) {
    if (n_gradient != r->n_given)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_gradient is %llu, must be %llu: the n_elems of the reducer",
                         (unsigned long long)n_gradient, (unsigned long long)r->n_given);
    if (n_output != tagc_reducer_given_output(r))
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_output is %llu, must be %llu: %s of %llu values",
                         (unsigned long long)n_output, (unsigned long long)tagc_reducer_given_output(r),
                         r->options.output == TAGC_OUTPUT_SHARD ? "this rank's shard" : "the whole unit",
                         (unsigned long long)r->n_given);
    return TAGC_OK;
}

static tagc_status check_arrays(const tagc_reducer *r, const void *gradient, uint64_t n_gradient,
                                const float *output, uint64_t n_output) {
    if (!gradient) return tagc_fail(TAGC_ERR_ARGUMENT, "gradient is NULL");
    if (!output && n_output > 0) return tagc_fail(TAGC_ERR_ARGUMENT, "output is NULL");
    TAGC_TRY(tagc_reducer_check_lengths(r, n_gradient, n_output));
    if (overlap(gradient, n_gradient * tagc_reducer_gradient_bytes(r), output, n_output * sizeof *output) &&
        !may_overlap(r, gradient, output))
        return tagc_fail(TAGC_ERR_ARGUMENT, "output overlaps gradient, must lie apart");
    TAGC_TRY(r->arrays->check(r->arrays->heap.context, gradient, "gradient"));
    return n_output > 0 ? r->arrays->check(r->arrays->heap.context, output, "output") : TAGC_OK;
}

static tagc_status begin(tagc_reducer *r, const void *gradient, float *output, int is_ahead) {
    TAGC_TRY(tagc_comm_check_open(r->comm));
    r->now.is_ahead = is_ahead;
    atomic_store(&r->now.hold, TAGC_NOT_HELD);
    r->now.gradient = gradient;
    r->now.output = output;
    r->now.given_gradient = gradient;
    r->now.given_output = output;
    if (r->feed) r->now.gradient = r->now.output = NULL;
    r->now.row = r->now.own_sums = NULL;
    r->now.number++;
    r->n_steps++;
    r->now.begun = 1;
    r->now.task = (tagc_task){.run = run_action, .is_ready = is_ready, .arg = r};
    tagc_then(r, NULL, NULL, 0, 0, -1); /* the exchange's start decides where it posts */
    tagc_work_line_up(r->comm, &r->work);
    tagc_comm_submit(r->comm, &r->now.task);
    return TAGC_OK;
}

static tagc_status check_begins(const tagc_reducer *r) {
    if (!r) return tagc_fail(TAGC_ERR_ARGUMENT, "reducer is NULL");
    if (r->runner && r->runner->is_ahead)
        return tagc_fail(TAGC_ERR_STATE, "this reducer's steps are those of its model (tagc_model_begin_on)");
    if (r->now.begun)
        return tagc_fail(TAGC_ERR_STATE, "begin after begin: a step is under way, end it first");
    return tagc_comm_check_open(r->comm);
}

static void take_part(void *context, tagc_status status, const char *text, const void *zeros, void *room) {
    tagc_reducer *r = context;
    r->now.refused = status;
    snprintf(r->now.failure_text, sizeof r->now.failure_text, "%s", text);
    (void)begin(r, zeros, room, 0);
    (void)tagc_comm_join(r->comm, &r->now.task);
    r->now.begun = 0;
    r->now.refused = TAGC_OK;
}

/* The last failure is this rank's own. Returns it when the step is over. */
static tagc_status refuse(tagc_reducer *r, tagc_status status) {
    return tagc_refuse(&(tagc_refusal){.comm = r->comm,
                                       .arrays = r->arrays,
                                       .n_read = (size_t)r->options.n_elems * tagc_reducer_gradient_bytes(r),
                                       .n_written = n_rows_of_output(r) * r->shard * sizeof(float),
                                       .status = status,
                                       .take_part = take_part,
                                       .context = r});
}

tagc_status tagc_reducer_begin(tagc_reducer *r, const void *gradient, uint64_t n_gradient, float *output,
                               uint64_t n_output) {
    TAGC_TRY(check_begins(r));
    tagc_status status = check_arrays(r, gradient, n_gradient, output, n_output);
    return status == TAGC_OK ? begin(r, gradient, output, 0) : refuse(r, status);
}

tagc_status tagc_reducer_fail(tagc_reducer *r, tagc_status status, const char *reason) {
    TAGC_TRY(check_begins(r));
    TAGC_TRY(tagc_status_check_own(status));
    return refuse(r, tagc_fail(status, "%s", reason ? reason : "no reason given"));
}

tagc_status tagc_reducer_begin_fed(tagc_reducer *r) {
    return begin(r, NULL, NULL, 0);
}

tagc_status tagc_reducer_begin_ahead(tagc_reducer *r, const void *gradient, float *output,
                                     tagc_status failure, const char *text) {
    if (r->now.begun) return tagc_fail(TAGC_ERR_STATE, "a step of this reducer is under way, end it first");
    r->now.refused = failure;
    if (failure != TAGC_OK) snprintf(r->now.failure_text, sizeof r->now.failure_text, "%s", text);
    return begin(r, gradient, output, 1);
}

void tagc_reducer_let_go(tagc_reducer *r) {
    atomic_store(&r->now.hold, TAGC_LET_GO);
    tagc_comm_look_again(r->comm);
}

tagc_status tagc_reducer_end(tagc_reducer *r, tagc_reducer_stats *stats) {
    if (!r) return tagc_fail(TAGC_ERR_ARGUMENT, "reducer is NULL");
    if (!r->now.begun) return tagc_fail(TAGC_ERR_STATE, "end without begin: no step is under way");
    if (stats) TAGC_TRY(tagc_sized_check(&stats_struct, stats)); /* while the step can still be ended */
    tagc_status status = tagc_comm_join(r->comm, &r->now.task);
    r->now.begun = 0;
    if (status == TAGC_OK && stats) tagc_sized_write(&stats_struct, &r->now.stats, stats);
    return status;
}

tagc_status tagc_reducer_test(tagc_reducer *r, int *done) {
    if (!done) return tagc_fail(TAGC_ERR_ARGUMENT, "done is NULL");
    *done = 0;
    if (!r) return tagc_fail(TAGC_ERR_ARGUMENT, "reducer is NULL");
    if (!r->now.begun) return tagc_fail(TAGC_ERR_STATE, "test without begin: no step is under way");
    *done = tagc_comm_has_ended(r->comm, &r->now.task);
    return TAGC_OK;
}

tagc_status tagc_reducer_run(tagc_reducer *r, const void *gradient, uint64_t n_gradient, float *output,
                             uint64_t n_output, tagc_reducer_stats *stats) {
    TAGC_TRY(check_begins(r));
    tagc_status status = tagc_reducer_check_stats(stats);
    if (status != TAGC_OK) return refuse(r, status);
    TAGC_TRY(tagc_reducer_begin(r, gradient, n_gradient, output, n_output));
    return tagc_reducer_end(r, stats);
}
