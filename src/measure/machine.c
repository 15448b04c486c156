/* Measures with public parts of the library: a collective for the link, and reducers of a single rank for codecs. */
#include "measure/machine.h"

#include "core/clock.h"
#include "core/measure.h"
#include "core/memory.h"
#include "core/status.h"
#include "exchange/options.h"
#include "fsdp/layout.h"
#include "launch/over_ranks.h"
#include "measure/codec.h"
#include "measure/hosts.h"
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

enum { CODEC_ELEMS = 1 << 20, CODEC_TURNS = 3, FIRST_ELEMS = 1 << 12, MOST_ELEMS = 1 << 23, LINK_TURNS = 3 };

static const double long_enough_s = 0.05;

/* ---- codec and memory ---- */

typedef struct codec_buffers {
    float *gradient, *output, *next; /* (CODEC_ELEMS) */
} codec_buffers;

static tagc_status time_codec(tagc_comm *alone, const codec_buffers *b, const tagc_reducer_options *options,
                              tagc_codec_cost *cost) {
    tagc_reducer_options o = *options;
    tagc_reducer *reducer;
    o.n_elems = CODEC_ELEMS;
    o.output = TAGC_OUTPUT_SHARD;
    o.ranks_per_host = 1;
    TAGC_TRY(tagc_reducer_create(alone, &o, &reducer));
    *cost = (tagc_codec_cost){.exchange = o.exchange,
                              .sparsity = o.sparsity,
                              .format = o.format,
                              .union_density = 1 - o.sparsity,
                              .weight = CODEC_ELEMS};
    tagc_status status = TAGC_OK;
    for (int turn = 0; status == TAGC_OK && turn < CODEC_TURNS; turn++) {
        tagc_reducer_times times = {0};
        status = tagc_time_reducer(alone, reducer, b->gradient, b->output, &times);
        for (int phase = 0; phase < TAGC_PHASE_WAIT; phase++) {
            double elem_s = times.phase_s[phase] / CODEC_ELEMS;
            if (turn == 0 || elem_s < cost->elem_s[phase]) cost->elem_s[phase] = elem_s;
        }
    }
    tagc_reducer_destroy(reducer);
    return status;
}

/* Skips dense candidates, and exchanges already measured for another one. */
static tagc_status measure_one(tagc_comm *alone, const codec_buffers *b, const tagc_fsdp_options *engine,
                               const tagc_reducer_options *options, tagc_machine *machine) {
    tagc_reducer_options o = *options;
    tagc_layout_own_fields(engine, CODEC_ELEMS, 0, &o); /* between hosts dense is replaced by direct */
    if (o.exchange == TAGC_EXCHANGE_DENSE) return TAGC_OK;
    for (int i = 0; i < machine->n_codec; i++) {
        const tagc_codec_cost *c = &machine->codec[i];
        if (c->exchange == o.exchange && c->sparsity == o.sparsity && c->format == o.format) return TAGC_OK;
    }
    return time_codec(alone, b, &o, &machine->codec[machine->n_codec++]);
}

static tagc_status measure_codecs(tagc_comm *alone, const codec_buffers *b, const tagc_fsdp_options *engine,
                                  const tagc_candidate *candidates, int n, tagc_machine *machine) {
    uint64_t random = 1;
    tagc_fill_gradient(b->gradient, CODEC_ELEMS, &random);
    machine->n_codec = 0;
    for (int i = 0; i < n; i++) {
        TAGC_TRY(measure_one(alone, b, engine, &candidates[i].compressed, machine));
        TAGC_TRY(measure_one(alone, b, engine, &candidates[i].mild, machine));
    }
    double least_s = (double)INFINITY;
    for (int turn = 0; turn < CODEC_TURNS; turn++)
        least_s = fmin(least_s, tagc_time_floor(NULL, b->gradient, b->output, b->next, CODEC_ELEMS));
    machine->byte_s = least_s / (12.0 * CODEC_ELEMS);
    return TAGC_OK;
}

tagc_status tagc_machine_measure_codec(const tagc_fsdp_options *engine, const tagc_candidate *candidates,
                                       int n, tagc_machine *machine) {
    tagc_alone alone;
    void *memory;
    TAGC_TRY(tagc_memory_create((size_t)3 * CODEC_ELEMS * sizeof(float), "a codec's measurement", &memory));
    float *values = memory;
    codec_buffers b = {values, values + CODEC_ELEMS, values + 2 * (size_t)CODEC_ELEMS};
    tagc_status status = tagc_alone_open(&alone);
    if (status == TAGC_OK) status = measure_codecs(alone.comm, &b, engine, candidates, n, machine);
    tagc_alone_close(&alone);
    tagc_memory_destroy(memory);
    return status;
}

/* ---- hosts and link ---- */

tagc_status tagc_machine_find_hosts(tagc_comm *comm, tagc_machine *machine) {
    tagc_hosts hosts;
    tagc_status status = tagc_hosts_find(comm, &hosts);
    machine->n_hosts = hosts.n_hosts;
    machine->n_here = hosts.n_here;
    machine->cores = (double)sysconf(_SC_NPROCESSORS_ONLN);
    tagc_hosts_destroy(&hosts);
    if (status == TAGC_OK && tagc_comm_world_size(comm) % machine->n_hosts != 0)
        machine->n_hosts = 1; /* hosts of different sizes: assume that all ranks share one link */
    return status;
}

/* Seconds of the slowest rank for a gather of n elements from each. A gatherer would not do: the next step would count its
 * bytes. */
static tagc_status time_gather(tagc_comm *comm, uint64_t n, float *shard, float *full, double *seconds) {
    TAGC_TRY(tagc_comm_barrier(comm));
    double start_s = tagc_clock_s();
    TAGC_TRY(tagc_comm_all_gather(comm, shard, n * sizeof *shard, full));
    *seconds = tagc_clock_s() - start_s;
    return tagc_max_over_ranks(comm, seconds, 1);
}

/* The shortest of several turns. */
static tagc_status time_least(tagc_comm *comm, uint64_t n, float *shard, float *full, int n_turns,
                              double *least_s) {
    *least_s = (double)INFINITY;
    for (int turn = 0; turn < n_turns; turn++) {
        double seconds;
        TAGC_TRY(time_gather(comm, n, shard, full, &seconds));
        *least_s = fmin(*least_s, seconds);
    }
    return TAGC_OK;
}

/* Times pairs of barriers, which take two ways even if ranks enter the first one apart. A single barrier is shorter for the
 * last rank to enter. */
static tagc_status measure_latency(tagc_comm *comm, double *latency_s) {
    enum { TURNS = 20 };
    double least_s = (double)INFINITY;
    for (int turn = 0; turn < TURNS; turn++) {
        double start_s = tagc_clock_s();
        TAGC_TRY(tagc_comm_barrier(comm));
        TAGC_TRY(tagc_comm_barrier(comm));
        least_s = fmin(least_s, (tagc_clock_s() - start_s) / 2);
    }
    *latency_s = least_s;
    return tagc_max_over_ranks(comm, latency_s, 1);
}

/* The rate follows from the difference in time between a gather and one of a quarter of its size. The rest of the time of
 * a large gather is latency. */
static tagc_status measure_rate(tagc_comm *comm, float *shard, float *full, uint64_t most, double latency_s,
                                double *bytes_per_s, double *large_latency_s) {
    double before_s, seconds;
    uint64_t n = FIRST_ELEMS < most ? FIRST_ELEMS : most;
    TAGC_TRY(time_gather(comm, n, shard, full, &seconds)); /* opens the connections */
    TAGC_TRY(time_least(comm, n / 4, shard, full, LINK_TURNS, &before_s));
    for (;;) {
        TAGC_TRY(time_least(comm, n, shard, full, 2, &seconds));
        if (seconds - before_s >= fmax(long_enough_s, 2 * latency_s) || 4 * n > most) break;
        before_s = seconds;
        n *= 4;
    }
    TAGC_TRY(time_least(comm, n, shard, full, LINK_TURNS, &seconds));
    TAGC_TRY(time_least(comm, n / 4, shard, full, LINK_TURNS, &before_s));
    double more_s = seconds > before_s ? seconds - before_s : seconds * 3 / 4;
    *bytes_per_s = 4 * (double)(n - n / 4) / more_s;
    double large_s = seconds - 4 * (double)n / *bytes_per_s; /* a small difference of large numbers */
    *large_latency_s = fmin(fmax(large_s, latency_s), TAGC_LARGE_MESSAGE_WAYS * latency_s);
    return TAGC_OK;
}

tagc_status tagc_machine_measure_link(tagc_comm *comm, tagc_machine *machine) {
    uint64_t world_size = (uint64_t)tagc_comm_world_size(comm), most = MOST_ELEMS / world_size;
    void *memory;
    machine->link = (tagc_plan_link){.bytes_per_s = (double)INFINITY};
    if (world_size == 1) return TAGC_OK; /* hosts were not searched for either */
    int n_hosts = machine->n_hosts, n_here = (int)world_size / n_hosts;
    tagc_status status = tagc_memory_create((size_t)((world_size + 1) * most) * sizeof(float),
                                            "a link's measurement", &memory);
    TAGC_TRY(tagc_abort_unless_ok(comm, status));
    float *shard = memory, *full = shard + most;
    for (uint64_t i = 0; i < most; i++) shard[i] = 0;
    double bytes_per_s = 0;
    status = measure_latency(comm, &machine->link.latency_s);
    if (status == TAGC_OK)
        status = measure_rate(comm, shard, full, most, machine->link.latency_s, &bytes_per_s,
                              &machine->link.large_latency_s);
    tagc_memory_destroy(memory);
    if (status != TAGC_OK) return status;
    double n_others = (double)world_size - 1, n_remote = (double)world_size - n_here;
    machine->link.bytes_per_s = bytes_per_s * (n_hosts > 1 ? n_here * n_remote : n_others);
    if (n_hosts == 1) machine->link.host_bytes_per_s = bytes_per_s * n_others;
    return TAGC_OK;
}
