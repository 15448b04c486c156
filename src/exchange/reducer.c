/* Life of a reducer: made once with all its memory, then one job per step.
 *
 * The arena of an indexed reducer (sketch, packed), in bytes per element of the unit at W = 2, θ = 98.75 %
 * and index or:
 *
 *   | messages | index_send 1/8 | index_recv 1/8 | value_send 0.1 | value_recv 0.1 | kept 0.1 |
 *   | list, bits, plan, scratch: of one shard | counts per rank | agreement |
 *
 * of a dense one: | messages | chunks under way | agreement |, and of a direct one:
 *
 *   | messages | scratch | headers | bodies going out | bodies coming in, one per rank or host | rows of the host |
 *
 * The residual and the spare it takes turns with are blocks of their own, because they change places. */
#include "exchange/reducer.h"
#include "core/clock.h"
#include "core/cpu.h"
#include "exchange/options.h"

#include <string.h>

void tagc_reducer_stats_init(tagc_reducer_stats *stats) {
    if (stats) *stats = (tagc_reducer_stats){.struct_bytes = sizeof *stats};
}

uint64_t tagc_residual_elems(const tagc_reducer_options *options, int world_size) {
    if (options->exchange == TAGC_EXCHANGE_DIRECT) return tagc_direct_residual(options, world_size);
    return options->exchange == TAGC_EXCHANGE_DENSE ? 0 : options->n_elems;
}

uint64_t tagc_output_elems(const tagc_reducer_options *options, int world_size) {
    if (options->exchange == TAGC_EXCHANGE_DIRECT) return tagc_direct_output(options, world_size);
    return options->all_reduce ? options->n_elems : options->n_elems / (uint64_t)world_size;
}

void tagc_reducer_place(tagc_reducer *r, tagc_arena *arena) {
    if (r->options.exchange == TAGC_EXCHANGE_DENSE)
        tagc_dense_place(r, arena);
    else if (r->options.exchange == TAGC_EXCHANGE_DIRECT)
        tagc_direct_place(r, arena);
    else
        tagc_indexed_place(r, arena);
    r->agree_send = tagc_arena_take(arena, 1, TAGC_WIRE_HEADER_BYTES);
    r->agree_recv = tagc_arena_take(arena, (size_t)r->world_size, TAGC_WIRE_HEADER_BYTES);
}

static tagc_status lay_out(tagc_reducer *r) {
    tagc_arena arena = {0};
    tagc_reducer_place(r, &arena);
    if (arena.overflow)
        return tagc_fail(TAGC_ERR_MEMORY,
                         "n_elems is %llu: the reducer's buffers do not fit into the address space",
                         (unsigned long long)r->options.n_elems);
    TAGC_TRY(tagc_memory_create(arena.n_bytes, "reducer buffers", &r->arena));
    arena = (tagc_arena){.base = r->arena};
    tagc_reducer_place(r, &arena);
    return TAGC_OK;
}

static tagc_status make_residual(tagc_reducer *r) {
    void *memory;
    uint64_t n = tagc_residual_elems(&r->options, r->world_size);
    if (n == 0) return TAGC_OK;
    if (n > SIZE_MAX / sizeof(float))
        return tagc_fail(TAGC_ERR_MEMORY, "n_elems is %llu: the residual does not fit into the address space",
                         (unsigned long long)r->options.n_elems);
    TAGC_TRY(tagc_memory_create((size_t)n * sizeof(float), "residual", &memory));
    tagc_status status = tagc_comm_spare_acquire(r->comm, n, &r->spare);
    if (status != TAGC_OK) {
        tagc_memory_destroy(memory);
        return status;
    }
    r->residual = memory;
    r->n_residual = n;
    for (uint64_t i = 0; i < n; i++) r->residual[i] = TAGC_ZERO_RESIDUAL;
    return TAGC_OK;
}

/* Everything that one rank does alone; *out may be half-made on failure. */
static tagc_status make(tagc_comm *comm, const tagc_reducer_options *options, tagc_reducer **out) {
    tagc_reducer_options checked;
    void *memory;
    *out = NULL;
    TAGC_TRY(tagc_cpu_check());
    TAGC_TRY(tagc_reducer_options_check(options, tagc_comm_world_size(comm), &checked));
    TAGC_TRY(tagc_memory_create(sizeof(tagc_reducer), "reducer", &memory));
    tagc_reducer *r = *out = memory;
    r->comm = comm;
    r->options = checked;
    r->rank = tagc_comm_rank(comm);
    r->world_size = tagc_comm_world_size(comm);
    r->shard = (size_t)(checked.n_elems / (uint64_t)r->world_size);
    r->scale = checked.op == TAGC_OP_AVG ? 1.0f / (float)r->world_size : 1.0f;
    TAGC_TRY(make_residual(r));
    if (checked.n_threads > 1 && checked.exchange != TAGC_EXCHANGE_DENSE)
        TAGC_TRY(tagc_pool_create(checked.n_threads, &r->pool));
    return lay_out(r);
}

tagc_status tagc_reducer_create(tagc_comm *comm, const tagc_reducer_options *options, tagc_reducer **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!comm) return tagc_fail(TAGC_ERR_ARGUMENT, "comm is NULL");
    tagc_reducer *r;
    tagc_status status = make(comm, options, &r);
    status = tagc_reducer_options_agree(comm, status, status == TAGC_OK ? &r->options : NULL);
    if (status != TAGC_OK) {
        tagc_reducer_destroy(r);
        return status;
    }
    *out = r;
    return TAGC_OK;
}

void tagc_reducer_destroy(tagc_reducer *r) {
    if (!r) return;
    if (r->begun) (void)tagc_comm_join(r->comm, &r->job);
    if (r->spare) tagc_comm_spare_release(r->comm, r->spare);
    tagc_pool_destroy(r->pool);
    tagc_memory_destroy(r->residual);
    tagc_memory_destroy(r->arena);
    tagc_memory_destroy(r);
}

/* ---- a step ---- */

static void start_step(void *arg) {
    tagc_reducer *r = arg;
    r->start_s = tagc_clock_s();
    tagc_reducer_stats_init(&r->stats);
    r->failure = TAGC_OK;
    if (r->options.exchange == TAGC_EXCHANGE_DENSE) tagc_dense_start(r);
    if (r->options.exchange == TAGC_EXCHANGE_DIRECT) tagc_direct_start(r);
}

/* After a failure nothing of the step may be under way when its memory goes back to the caller. */
static tagc_status settle(tagc_reducer *r, tagc_status status) {
    if (status == TAGC_OK) return TAGC_OK;
    char text[TAGC_ERROR_TEXT_BYTES];
    memcpy(text, tagc_last_error(), sizeof text);
    tagc_messages_drain(r); /* their failures are this one's echoes */
    if (r->spare) r->spare->in_use = 0;
    return tagc_fail(status, "%s", text);
}

static tagc_status run_step(void *arg) {
    tagc_reducer *r = arg;
    int exchange = r->options.exchange;
    if (r->spare) r->spare->in_use = 1;
    return settle(r, exchange == TAGC_EXCHANGE_DENSE    ? tagc_dense_step(r)
                     : exchange == TAGC_EXCHANGE_DIRECT ? tagc_direct_step(r)
                                                        : tagc_indexed_step(r));
}

static tagc_status finish_step(void *arg) {
    tagc_reducer *r = arg;
    if (r->options.exchange == TAGC_EXCHANGE_DENSE) TAGC_TRY(settle(r, tagc_agree_end(r)));
    if (r->options.exchange == TAGC_EXCHANGE_DIRECT) TAGC_TRY(settle(r, tagc_direct_finish(r)));
    if (r->spare) r->spare->in_use = 0;
    if (r->residual && !r->stats.nonfinite) {
        float *before = r->residual;
        r->residual = r->spare->values;
        r->spare->values = before;
    }
    uint64_t n_selected_from = r->options.n_elems / (uint64_t)r->options.ranks_per_host;
    r->stats.sparsity = 1.0 - (double)r->stats.n_kept / (double)n_selected_from;
    r->stats.total_s = tagc_clock_s() - r->start_s;
    return TAGC_OK;
}

static int overlap(const float *a, uint64_t n_a, const float *b, uint64_t n_b) {
    uintptr_t begin_a = (uintptr_t)a, begin_b = (uintptr_t)b;
    return begin_a < begin_b + n_b * sizeof *b && begin_b < begin_a + n_a * sizeof *a;
}

tagc_status tagc_reducer_begin(tagc_reducer *r, const float *gradient, float *output) {
    if (!r) return tagc_fail(TAGC_ERR_ARGUMENT, "reducer is NULL");
    if (!gradient) return tagc_fail(TAGC_ERR_ARGUMENT, "gradient is NULL");
    if (!output) return tagc_fail(TAGC_ERR_ARGUMENT, "output is NULL");
    if (r->begun) return tagc_fail(TAGC_ERR_STATE, "begin after begin: a step is under way, end it first");
    if (overlap(gradient, r->options.n_elems, output, tagc_output_elems(&r->options, r->world_size)))
        return tagc_fail(TAGC_ERR_ARGUMENT, "output overlaps gradient, must lie apart");
    r->gradient = gradient;
    r->output = output;
    r->step++;
    r->begun = 1;
    r->job.start = start_step;
    r->job.run = run_step;
    r->job.finish = finish_step;
    r->job.arg = r;
    tagc_comm_submit(r->comm, &r->job);
    return TAGC_OK;
}

tagc_status tagc_reducer_end(tagc_reducer *r, tagc_reducer_stats *stats) {
    if (!r) return tagc_fail(TAGC_ERR_ARGUMENT, "reducer is NULL");
    if (!r->begun) return tagc_fail(TAGC_ERR_STATE, "end without begin: no step is under way");
    tagc_status status = tagc_comm_join(r->comm, &r->job);
    r->begun = 0;
    if (status == TAGC_OK && stats) {
        if (stats->struct_bytes != sizeof *stats)
            return tagc_fail(TAGC_ERR_ARGUMENT,
                             "stats->struct_bytes is %zu, must be %zu (the step itself went well)",
                             stats->struct_bytes, sizeof *stats);
        *stats = r->stats;
    }
    return status;
}

tagc_status tagc_reducer_run(tagc_reducer *r, const float *gradient, float *output,
                             tagc_reducer_stats *stats) {
    TAGC_TRY(tagc_reducer_begin(r, gradient, output));
    return tagc_reducer_end(r, stats);
}

tagc_status tagc_reducer_set_sparsity(tagc_reducer *r, double sparsity) {
    if (!r) return tagc_fail(TAGC_ERR_ARGUMENT, "reducer is NULL");
    if (r->begun) return tagc_fail(TAGC_ERR_STATE, "set_sparsity between begin and end: end the step first");
    if (!(sparsity >= 0 && sparsity <= 1))
        return tagc_fail(TAGC_ERR_ARGUMENT, "sparsity is %.10g, must be in [0, 1]", sparsity);
    if (sparsity > 0 && r->options.rotate)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "sparsity is %.10g and rotate is 1, which needs sparsity 0",
                         sparsity);
    if (sparsity == r->options.sparsity) return TAGC_OK;
    tagc_reducer fresh = *r;
    fresh.options.sparsity = sparsity;
    if (r->options.exchange != TAGC_EXCHANGE_DENSE) TAGC_TRY(lay_out(&fresh));
    if (!r->residual) { /* direct: where all was sent, something now stays */
        tagc_status status = make_residual(&fresh);
        if (status != TAGC_OK) {
            tagc_memory_destroy(fresh.arena);
            return status;
        }
    }
    if (fresh.arena != r->arena) tagc_memory_destroy(r->arena);
    *r = fresh;
    return TAGC_OK;
}
