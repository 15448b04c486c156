/* Gathers parameters from their owners to all ranks.
 *
 * A gather is a task of two halves: encode and post; then, when all rows are here, decode. With lanes, the tasks run on the comm's
 * second worker, beside the reducers' tasks, and the next gather is encoded while this one is on the wire. Without lanes they
 * run among the reducers' tasks, so that all ranks post in one order. */
#include "exchange/gatherer/gatherer.h"
#include "codec/delta.h"
#include "core/cpu.h"
#include "exchange/options.h"
#include "exchange/refusal.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

static int bits_of(int format) {
    switch (format) {
    case TAGC_FORMAT_INT8:
        return 8;
    case TAGC_FORMAT_INT4:
        return 4;
    case TAGC_FORMAT_INT2:
        return 2;
    default:
        return 0;
    }
}

/* ---- deliveries ---- */

void tagc_delivery_place(const tagc_gatherer *g, tagc_arena *arena, tagc_delivery *d) {
    size_t n = (size_t)g->world_size;
    *d = (tagc_delivery){.extents = tagc_arena_take(arena, n, sizeof *d->extents),
                         .sends = tagc_arena_take(arena, n - 1, sizeof *d->sends),
                         .receives = tagc_arena_take(arena, n - 1, sizeof *d->receives)};
}

void tagc_delivery_post(const tagc_gatherer *g, tagc_delivery *d, tagc_lane lane, const void *own,
                        void *rows) {
    uint32_t n_peers = 0;
    for (int peer = 0; peer < g->world_size; peer++) {
        if (peer == g->rank) continue;
        d->sends[n_peers] = (tagc_part){.peer = peer, .n_bytes = d->extents[g->rank].n_bytes};
        d->receives[n_peers++] =
            (tagc_part){.peer = peer, .n_bytes = d->extents[peer].n_bytes, .offset = d->extents[peer].offset};
    }
    d->ticket = (tagc_ticket){.transfer = {.n_sends = n_peers,
                                           .n_receives = n_peers,
                                           .sends = d->sends,
                                           .receives = d->receives,
                                           .send = own,
                                           .recv = rows},
                              .leg = TAGC_LEG_GATHER,
                              .tag = g->options.tag,
                              .of = &g->identity};
    tagc_comm_post(g->comm, lane, &d->ticket);
    d->is_posted = 1;
}

int tagc_delivery_is_done(const tagc_gatherer *g, const tagc_delivery *d) {
    return tagc_comm_is_done(g->comm, &d->ticket);
}

tagc_status tagc_delivery_wait(const tagc_gatherer *g, tagc_delivery *d) {
    if (!d->is_posted) return TAGC_OK;
    d->is_posted = 0;
    return tagc_comm_wait(g->comm, &d->ticket);
}

/* ---- words: the identity of rows that have no header ----
 *
 * Each rank tells all the others in which gather of which unit it is. The words travel at the same time as the rows, just before
 * them on the same lane, so that they take no time of their own. On a transport without lanes they are a transfer more. All ranks
 * get all words, and so the same error. */

static void place_words(tagc_gatherer *g, tagc_arena *arena) {
    g->words.all = tagc_arena_take(arena, (size_t)g->world_size, sizeof *g->words.all);
    tagc_delivery_place(g, arena, &g->words.delivery);
}

static void post_words(tagc_gatherer *g) {
    tagc_gather_words *w = &g->words;
    w->own = (tagc_gather_word){.unit = g->identity.unit, .status = (uint32_t)g->failure, .step = g->n_begun};
    for (int r = 0; r < g->world_size; r++)
        w->delivery.extents[r] =
            (tagc_extent){.offset = (uint64_t)r * sizeof *w->all, .n_bytes = sizeof *w->all};
    tagc_delivery_post(g, &w->delivery, TAGC_LANE_GATHER, &w->own, w->all);
}

/* Waits; TAGC_ERR_MISMATCH if a rank is in another gather. */
static tagc_status read_words(tagc_gatherer *g) {
    TAGC_TRY(tagc_delivery_wait(g, &g->words.delivery));
    for (int r = 0; r < g->world_size; r++) {
        const tagc_gather_word *word = &g->words.all[r];
        if (r == g->rank) continue;
        TAGC_TRY(tagc_identity_check(g->comm, &g->identity, r, word->unit));
        if (word->step == g->n_begun) {
            TAGC_TRY(tagc_gatherer_told((tagc_status)word->status, tagc_comm_name(g->comm, r)));
            continue;
        }
        char text[TAGC_UNIT_TEXT_BYTES];
        tagc_identity_text(&g->identity, text);
        return tagc_fail(TAGC_ERR_MISMATCH, "rank %d is in gather %llu of %s, this rank in gather %llu",
                         tagc_comm_name(g->comm, r), (unsigned long long)word->step, text,
                         (unsigned long long)g->n_begun);
    }
    return TAGC_OK;
}

/* status: of the rows. Where units have different sizes, the rows break the comm, and the words say why. */
static tagc_status check_words(tagc_gatherer *g, tagc_status status) {
    char text[TAGC_ERROR_TEXT_BYTES];
    snprintf(text, sizeof text, "%s", status == TAGC_OK ? "" : tagc_last_error());
    tagc_status of_words = read_words(g);
    if (status == TAGC_OK || of_words == TAGC_ERR_MISMATCH) return of_words;
    return tagc_fail(status, "%s", text);
}

/* ---- life ---- */

static void place(tagc_gatherer *g, tagc_arena *arena) {
    tagc_delivery_place(g, arena, &g->delivery);
    if (tagc_gatherer_has_words(g)) place_words(g, arena);
    g->decoded = tagc_arena_take(arena, (size_t)g->world_size, sizeof *g->decoded);
    if (g->is_lossless) tagc_gatherer_lossless_place(g, arena);
}

static void place_work(tagc_gatherer *g, tagc_arena *work) {
    g->rows = tagc_arena_take(work, (size_t)g->world_size, g->row_bytes);
}

tagc_status tagc_gatherer_lay_out(tagc_gatherer *g, const tagc_gatherer_options *options, int world_size,
                                  int rank, tagc_arena *arena, tagc_arena *work) {
    TAGC_TRY(tagc_gatherer_options_check(options, world_size, &g->options));
    g->rank = rank;
    g->world_size = world_size;
    g->bits = bits_of(g->options.format);
    g->is_delta = g->options.delta;
    g->is_whole_next = g->is_delta;
    g->width = g->options.full_format == TAGC_FORMAT_BF16 ? sizeof(uint16_t) : sizeof(float);
    g->is_lossless = (int)g->options.lossless;
    g->is_plain = !g->is_delta && !g->is_lossless && g->options.format == (int)g->options.full_format;
    g->is_stochastic = g->options.rounding == TAGC_ROUNDING_STOCHASTIC;
    g->values = tagc_values_format(TAGC_FORMAT_INT8, TAGC_DELTA_BLOCK, 0);
    g->values.marks_nonfinite = g->values.is_stochastic = 1;
    g->shard = (size_t)(g->options.n_elems / (uint64_t)g->world_size);
    g->stride = g->shard;
    size_t n_bytes = g->is_delta ? tagc_gatherer_delta_bytes(g->bits, g->shard, g->world_size)
                     : g->is_plain || g->is_lossless ? 0
                                                     : tagc_gatherer_message_bytes(g);
    g->row_bytes = tagc_aligned(n_bytes);
    if (g->is_lossless) tagc_gatherer_lossless_lay_out(g);
    place(g, arena);
    place_work(g, work);
    if (!arena->overflow && !work->overflow) return TAGC_OK;
    return tagc_fail(TAGC_ERR_MEMORY,
                     "n_elems is %llu: the gatherer's buffer does not fit into the address space",
                     (unsigned long long)g->options.n_elems);
}

static tagc_status make(const tagc_arrays *arrays, const tagc_gather_runner *runner, tagc_comm *comm,
                        const tagc_gatherer_options *options, tagc_gatherer **out) {
    void *memory;
    *out = NULL;
    TAGC_TRY(tagc_cpu_check());
    TAGC_TRY(tagc_memory_create(sizeof(tagc_gatherer), "gatherer", &memory));
    tagc_gatherer *g = *out = memory;
    g->comm = comm;
    tagc_comm_hold(comm);
    tagc_arena arena = {0}, work = {0};
    TAGC_TRY(
        tagc_gatherer_lay_out(g, options, tagc_comm_world_size(comm), tagc_comm_rank(comm), &arena, &work));
    TAGC_TRY(tagc_memory_create(arena.n_bytes, "gatherer buffer", &g->arena));
    g->arena_bytes = arena.n_bytes;
    tagc_comm_count(comm, TAGC_HELD_BUFFERS, (int64_t)g->arena_bytes);
    arena = (tagc_arena){.base = g->arena};
    place(g, &arena);
    if (g->is_lossless) tagc_gatherer_lossless_init(g);
    g->arrays = arrays;
    g->runner = runner;
    TAGC_TRY(runner->make(g));
    TAGC_TRY(tagc_work_open(comm, &tagc_host_arrays.heap, TAGC_WORK_GATHER, g->options.tag, &g->work));
    TAGC_TRY(tagc_work_set(comm, &g->work, work.n_bytes));
    return g->options.n_threads > 1 ? tagc_pool_create((int)g->options.n_threads, &g->pool) : TAGC_OK;
}

tagc_status tagc_gatherer_make(const tagc_arrays *arrays, const tagc_gather_runner *runner, tagc_comm *comm,
                               const tagc_gatherer_options *options, tagc_gatherer **out) {
    tagc_gatherer *g;
    tagc_status status = make(arrays, runner, comm, options, &g);
    status = tagc_gatherer_options_agree(comm, status, status == TAGC_OK ? &g->options : NULL,
                                         g ? &g->identity : NULL);
    if (status != TAGC_OK) {
        tagc_gatherer_destroy(g);
        return status;
    }
    *out = g;
    return TAGC_OK;
}

tagc_status tagc_gatherer_create(tagc_comm *comm, const tagc_gatherer_options *options, tagc_gatherer **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!comm) return tagc_fail(TAGC_ERR_ARGUMENT, "comm is NULL");
    TAGC_TRY(tagc_comm_check_open(comm));
    return tagc_gatherer_make(&tagc_host_arrays, &tagc_host_gathers, comm, options, out);
}

tagc_status tagc_gatherer_create_apart(tagc_comm *comm, const tagc_gatherer_options *options, size_t stride,
                                       tagc_gatherer **out) {
    TAGC_TRY(tagc_gatherer_create(comm, options, out));
    (*out)->stride = stride;
    return TAGC_OK;
}

void tagc_gatherer_follow(tagc_gatherer *g, tagc_gatherer *first) {
    g->first = first;
    first->followers = g->comm;
}

/* The own row as it travels. */
static const void *encode(tagc_gatherer *g) {
    if (g->options.format == TAGC_FORMAT_FP32) return g->own;
    uint8_t *row = g->is_plain ? tagc_gatherer_full(g, g->rank) : tagc_gatherer_row(g, g->rank);
    if (g->is_delta)
        tagc_gatherer_delta_encode(g);
    else
        (void)g->runner->encode_row(g, row); /* NaN and Inf travel */
    return row;
}

/* Writes the own row to `full` as the others will have it, while it is on the wire. */
static void put_own(tagc_gatherer *g) {
    void *to = tagc_gatherer_full(g, g->rank);
    if (g->options.format == TAGC_FORMAT_FP32 && to != g->own) memcpy(to, g->own, g->shard * sizeof *g->own);
    if (g->is_plain) return;
    g->decoded[0] = g->is_delta ? tagc_gatherer_delta_row(g, g->rank, g->is_void)
                                : (tagc_row){.body = tagc_gatherer_row(g, g->rank), .values = to};
    g->runner->decode_rows(g, 1);
}

static void post(tagc_gatherer *g) {
    if (tagc_gatherer_has_words(g)) post_words(g);
    const void *send = encode(g);
    uint64_t stride = g->is_plain ? g->stride * g->width : g->row_bytes;
    uint64_t n_bytes = tagc_gatherer_message_bytes(g);
    uint8_t *rows = g->is_plain ? g->full : g->rows;
    for (int r = 0; r < g->world_size; r++)
        g->delivery.extents[r] = (tagc_extent){.offset = (uint64_t)r * stride, .n_bytes = n_bytes};
    tagc_delivery_post(g, &g->delivery, TAGC_LANE_GATHER, send, rows);
    put_own(g);
}

static tagc_status finish(tagc_gatherer *g) {
    tagc_status status = tagc_delivery_wait(g, &g->delivery);
    if (tagc_gatherer_has_words(g)) TAGC_TRY(check_words(g, status));
    TAGC_TRY(status);
    if (g->is_delta) return tagc_gatherer_delta_decode(g);
    if (g->is_plain) return TAGC_OK;
    int n = 0;
    for (int r = 0; r < g->world_size; r++)
        if (r != g->rank)
            g->decoded[n++] = (tagc_row){.body = tagc_gatherer_row(g, r), .values = tagc_gatherer_full(g, r)};
    g->runner->decode_rows(g, n);
    return TAGC_OK;
}

static int is_ready(void *arg) {
    tagc_gatherer *g = arg;
    if (!g->is_posted)
        return (!g->first || atomic_load(&g->first->is_over)) && tagc_work_take(g->comm, &g->work);
    if (g->is_lossless) return tagc_gatherer_lossless_is_ready(g);
    if (tagc_gatherer_has_words(g) && !tagc_delivery_is_done(g, &g->words.delivery)) return 0;
    return tagc_delivery_is_done(g, &g->delivery);
}

static tagc_status run_lossless(tagc_gatherer *g) {
    if (!g->is_posted) {
        tagc_arena work = {.base = g->work.memory};
        place_work(g, &work);
    }
    tagc_status status = tagc_gatherer_lossless_run(g);
    if (status != TAGC_OK || !g->task.more) tagc_work_give(g->comm, &g->work);
    return status;
}

static tagc_status run_half(tagc_gatherer *g) {
    if (g->is_lossless) return run_lossless(g);
    if (g->is_posted) {
        tagc_status status = finish(g);
        tagc_work_give(g->comm, &g->work);
        return status;
    }
    tagc_arena work = {.base = g->work.memory};
    place_work(g, &work);
    if (g->first) g->failure = g->first->ended; /* its text is that gather's */
    post(g);
    g->is_posted = g->task.more = 1;
    g->task.next_lanes = g->task.later_lanes = 0;
    return TAGC_OK;
}

static tagc_status run(void *arg) {
    tagc_gatherer *g = arg;
    tagc_status status = run_half(g);
    if (!g->followers || (status == TAGC_OK && g->task.more)) return status;
    g->ended = status;
    atomic_store(&g->is_over, 1);
    tagc_comm_look_again(g->followers);
    return status;
}

/* A delta is the master minus the result of the last gather. */
static tagc_status check_full(const tagc_gatherer *g, const float *shard, const void *full) {
    uintptr_t from = (uintptr_t)shard, begin = (uintptr_t)full;
    uintptr_t end = begin + tagc_gatherer_full_elems(g) * g->width;
    int overlap = from < end && begin < from + g->shard * sizeof *shard;
    if (overlap && g->is_delta)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "shard lies in full, but a gather of deltas (delta is 1) needs the master"
                         " apart from the replica");
    if (overlap && g->width != sizeof *shard)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "shard lies in full, which full_format bf16 does not allow: shard is fp32");
    if (g->is_delta && !g->is_whole_next && full != g->full)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "full is not the array of the last gather, whose values a delta changes: call"
                         " tagc_gatherer_reset first");
    return TAGC_OK;
}

static tagc_status check_length(const char *name, uint64_t n, uint64_t must, const char *what) {
    if (n == must) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "%s is %llu, must be %llu: %s", name, (unsigned long long)n,
                     (unsigned long long)must, what);
}

static tagc_status check_n_full(const tagc_gatherer *g, uint64_t n_full) {
    return check_length("n_full", n_full, tagc_gatherer_full_elems(g), "the n_elems of the gatherer");
}

static tagc_status check_arrays(const tagc_gatherer *g, const float *shard, uint64_t n_shard,
                                const void *full, uint64_t n_full) {
    if (!shard) return tagc_fail(TAGC_ERR_ARGUMENT, "shard is NULL");
    if (!full) return tagc_fail(TAGC_ERR_ARGUMENT, "full is NULL");
    TAGC_TRY(
        check_length("n_shard", n_shard, g->shard, "n_elems divided by the number of ranks that gather"));
    TAGC_TRY(check_n_full(g, n_full));
    TAGC_TRY(check_full(g, shard, full));
    TAGC_TRY(g->arrays->check(g->arrays->heap.context, shard, "shard"));
    return g->arrays->check(g->arrays->heap.context, full, "full");
}

static tagc_status check_begins(const tagc_gatherer *g) {
    if (!g) return tagc_fail(TAGC_ERR_ARGUMENT, "gatherer is NULL");
    if (g->begun) return tagc_fail(TAGC_ERR_STATE, "begin after begin: a gather is under way, end it first");
    return tagc_comm_check_open(g->comm);
}

static tagc_status begin(tagc_gatherer *g, const float *shard, void *full) {
    g->own = shard;
    g->full = full;
    g->begun = 1;
    g->n_begun++;
    g->values.seed =
        tagc_residual_seed(g->options.rounding_seed, g->n_begun, (uint32_t)g->rank, (uint32_t)g->rank);
    if (g->is_delta) tagc_gatherer_delta_begin(g);
    g->is_posted = 0;
    atomic_store(&g->is_over, 0);
    uint32_t lanes = 1u << TAGC_LANE_GATHER | 1u << TAGC_LANE_RESTS;
    g->task = (tagc_task){.run = run,
                          .is_ready = is_ready,
                          .arg = g,
                          .next_lanes = g->is_lossless ? 1u << TAGC_LANE_GATHER : lanes,
                          .later_lanes = lanes};
    tagc_work_line_up(g->comm, &g->work);
    tagc_comm_submit_gather(g->comm, &g->task);
    return TAGC_OK;
}

static void take_part(void *context, tagc_status status, const char *text, const void *zeros, void *room) {
    tagc_gatherer *g = context;
    (void)text;
    g->failure = status;
    (void)begin(g, zeros, room);
    (void)tagc_gatherer_end(g);
    g->failure = TAGC_OK;
    g->full = NULL;
    g->is_whole_next = g->is_delta;
}

/* The last failure is this rank's own. Returns it when the gather is over. The next one is whole. */
static tagc_status refuse(tagc_gatherer *g, tagc_status status) {
    return tagc_refuse(&(tagc_refusal){.comm = g->comm,
                                       .arrays = g->arrays,
                                       .n_read = g->shard * sizeof *g->own,
                                       .n_written = (size_t)tagc_gatherer_full_elems(g) * g->width,
                                       .status = status,
                                       .take_part = take_part,
                                       .context = g});
}

tagc_status tagc_gatherer_begin(tagc_gatherer *g, const float *shard, uint64_t n_shard, void *full,
                                uint64_t n_full) {
    TAGC_TRY(check_begins(g));
    tagc_status status = check_arrays(g, shard, n_shard, full, n_full);
    return status == TAGC_OK ? begin(g, shard, full) : refuse(g, status);
}

tagc_status tagc_gatherer_fail(tagc_gatherer *g, tagc_status status, const char *reason) {
    TAGC_TRY(check_begins(g));
    TAGC_TRY(tagc_status_check_own(status));
    return refuse(g, tagc_fail(status, "%s", reason ? reason : "no reason given"));
}

tagc_status tagc_gatherer_told(tagc_status told, int name) {
    if (told == TAGC_OK) return TAGC_OK;
    if (tagc_status_check_own(told) != TAGC_OK)
        return tagc_fail(TAGC_ERR_CORRUPT, "rank %d says that it has status %d", name, (int)told);
    if (told == TAGC_ERR_CORRUPT)
        return tagc_fail(told, "rank %d got damaged parameters in the gather before this one", name);
    if (told == TAGC_ERR_DEVICE)
        return tagc_fail(told, "rank %d: its device failed in this gather or the one before it", name);
    return tagc_fail(told, "rank %d failed in this gather: %s", name, tagc_status_name(told));
}

tagc_status tagc_gatherer_end(tagc_gatherer *g) {
    if (!g) return tagc_fail(TAGC_ERR_ARGUMENT, "gatherer is NULL");
    if (!g->begun) return tagc_fail(TAGC_ERR_STATE, "end without begin: no gather is under way");
    g->begun = 0;
    return tagc_comm_join(g->comm, &g->task);
}

tagc_status tagc_gatherer_test(tagc_gatherer *g, int *done) {
    if (!done) return tagc_fail(TAGC_ERR_ARGUMENT, "done is NULL");
    *done = 0;
    if (!g) return tagc_fail(TAGC_ERR_ARGUMENT, "gatherer is NULL");
    if (!g->begun) return tagc_fail(TAGC_ERR_STATE, "test without begin: no gather is under way");
    *done = tagc_comm_has_ended(g->comm, &g->task);
    return TAGC_OK;
}

tagc_status tagc_gatherer_reset(tagc_gatherer *g) {
    if (!g) return tagc_fail(TAGC_ERR_ARGUMENT, "gatherer is NULL");
    if (g->begun) return tagc_fail(TAGC_ERR_STATE, "reset after begin: a gather is under way, end it first");
    g->is_whole_next = g->is_delta;
    return TAGC_OK;
}

const void *tagc_gatherer_replica(const tagc_gatherer *g, uint64_t *n_gathers) {
    int has_replica = g && g->is_delta && !g->begun && !g->is_whole_next;
    if (n_gathers) *n_gathers = has_replica ? g->n_begun : 0;
    return has_replica ? g->full : NULL;
}

tagc_status tagc_gatherer_set_replica(tagc_gatherer *g, void *full, uint64_t n_full, uint64_t n_gathers) {
    if (!g) return tagc_fail(TAGC_ERR_ARGUMENT, "gatherer is NULL");
    if (!full) return tagc_fail(TAGC_ERR_ARGUMENT, "full is NULL");
    if (!g->is_delta)
        return tagc_fail(TAGC_ERR_ARGUMENT, "a replica for gathers that are whole (delta is 0)");
    TAGC_TRY(check_n_full(g, n_full));
    if (n_gathers == 0) return tagc_fail(TAGC_ERR_ARGUMENT, "n_gathers is 0, allowed is 1 or more");
    if (g->begun)
        return tagc_fail(TAGC_ERR_STATE, "set_replica after begin: a gather is under way, end it first");
    g->full = full;
    g->n_begun = n_gathers;
    g->is_whole_next = 0;
    return TAGC_OK;
}

void tagc_gatherer_destroy(tagc_gatherer *g) {
    if (!g || tagc_comm_is_fork(g->comm)) return;
    if (g->begun) (void)tagc_gatherer_end(g);
    if (g->runner) g->runner->end(g);
    tagc_pool_destroy(g->pool);
    tagc_work_close(g->comm, &g->work);
    tagc_comm_count(g->comm, TAGC_HELD_BUFFERS, -(int64_t)g->arena_bytes);
    tagc_identity_close(g->comm, &g->identity);
    tagc_comm_let_go(g->comm);
    tagc_memory_destroy(g->arena);
    tagc_memory_destroy(g);
}
