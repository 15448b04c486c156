/* tagc bench --only exchanges: each exchange alone and blocking, for the share of the link that it fills. The size is that of the
 * model's largest unit, or less on a slow link. Plain transfers and MPI's own collectives take turns with the exchanges, so that a
 * busy machine slows all alike. */
#include "bench/bench.h"
#include "bench/wire.h"

#include "core/clock.h"
#include "core/measure.h"
#include "core/memory.h"
#include "core/status.h"
#include "exchange/options.h"
#include "launch/human.h"
#include "launch/over_ranks.h"
#include "plan/plan.h"
#include "tagc/paper.h"

enum { FEW_TURNS = 3, MANY_TURNS = 5, MOST_TIMES = 200, LEAST_ELEMS = 1 << 14, MOST_ELEMS = 1 << 28 };

static const double turn_s = 0.25; /* longest time of a dense fp32 reduce-scatter */
static const double least_s =
    0.05; /* shortest of a case in a turn: the burst of a shaped link is over by then */
static const double quick_s = 1; /* if the first turn takes less, there are more turns */

typedef enum kind { LINK, REDUCER, GATHERER, MPI } kind;

static const struct {
    const char *name;
    kind kind;
    int exchange, format, output; /* of a gatherer: tagc_gather_kind as format; of MPI: tagc_mpi_collective */
    double ratio, sparsity;       /* 0: the default; for direct that is every element */
    int n_passes; /* of plain MPI: times that n_elems / W values travel to or from each rank */
} cases[] = {
#define SENT_IN(format_) .kind = REDUCER, .exchange = TAGC_EXCHANGE_DIRECT, .format = TAGC_FORMAT_##format_
#define DIRECT SENT_IN(INT2)
    {"link, all to all", .kind = LINK, .n_passes = 1},
    {"reduce-scatter fp32", SENT_IN(FP32)},
    {"reduce-scatter bf16", SENT_IN(BF16)},
    {"gather fp32", .kind = GATHERER, .format = TAGC_FORMAT_FP32},
    {"gather bf16", .kind = GATHERER, .format = TAGC_FORMAT_BF16},
    {"gather delta4", .kind = GATHERER, .format = TAGC_GATHER_DELTA4},
    {"all-reduce fp32", SENT_IN(FP32), .output = TAGC_OUTPUT_UNIT},
    {"sketch 10x", .kind = REDUCER, .exchange = TAGC_EXCHANGE_SKETCH, .ratio = 10},
    {"packed", .kind = REDUCER, .exchange = TAGC_EXCHANGE_PACKED},
    {"direct 95 % int2", DIRECT, .sparsity = 0.95},
    {"direct int2", DIRECT},
    {"all-reduce direct 95 % int2", DIRECT, .sparsity = 0.95, .output = TAGC_OUTPUT_UNIT},
    {"MPI_Reduce_scatter fp32", .kind = MPI, .format = TAGC_MPI_REDUCE_SCATTER, .n_passes = 1},
    {"MPI_Allgather fp32", .kind = MPI, .format = TAGC_MPI_ALL_GATHER, .n_passes = 1},
    {"MPI_Allreduce fp32", .kind = MPI, .format = TAGC_MPI_ALL_REDUCE, .n_passes = 2},
};
enum { N_CASES = sizeof cases / sizeof cases[0] };

typedef struct exchange_bench {
    tagc_bench *bench;
    uint64_t n_elems, shard;
    float *gradient, *full, *replica; /* (n_elems) each; `replica` only for deltas */
    tagc_wire wire;
    tagc_reducer *reducers[N_CASES];
    tagc_gatherer *gatherers[N_CASES];
    int n_turns, n_times[N_CASES];       /* in a turn */
    double seconds[N_CASES][MANY_TURNS]; /* of the slowest rank */
    double n_bytes[N_CASES];             /* sent per rank, mean over ranks */
} exchange_bench;

static tagc_status largest_unit(const tagc_bench *bench, uint64_t *out) {
    tagc_fsdp_options options;
    tagc_layout *layout;
    tagc_fsdp_options_init(&options);
    options.wrap = bench->plan->options.train.wrap;
    options.policy = TAGC_POLICY_NONE;
    TAGC_TRY(tagc_model_layout(&bench->plan->model, &options, bench->rank->world_size, &layout));
    *out = 0;
    for (int i = 0; i < layout->n_flats; i++)
        if (layout->flats[i].n_padded > *out) *out = layout->flats[i].n_padded;
    tagc_layout_destroy(layout);
    return TAGC_OK;
}

static int is_wanted(const exchange_bench *e, int i) {
    return e->bench->is_mpi || cases[i].kind != MPI;
}

/* Gives the same on all ranks, because the measured rate is the same. */
static void choose_size(exchange_bench *e, uint64_t most_elems) {
    int world_size = e->bench->rank->world_size;
    uint64_t most = most_elems < MOST_ELEMS ? most_elems : MOST_ELEMS;
    double bytes_per_elem = 4.0 * (world_size - 1) / world_size;
    double in_time = e->bench->all_to_all_bytes_per_s * turn_s / bytes_per_elem;
    if (in_time < LEAST_ELEMS) in_time = LEAST_ELEMS;
    e->n_elems = tagc_padded_elems(in_time < (double)most ? (uint64_t)in_time : most, world_size);
    e->shard = e->n_elems / (uint64_t)world_size;
}

static tagc_status open_case(exchange_bench *e, int i) {
    if (cases[i].kind == GATHERER) {
        tagc_gatherer_options options;
        tagc_gatherer_options_init(&options);
        options.n_elems = e->n_elems;
        tagc_gatherer_options_choose(&options, cases[i].format);
        return tagc_gatherer_create(e->bench->rank->comm, &options, &e->gatherers[i]);
    }
    if (cases[i].kind != REDUCER) return TAGC_OK;
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = e->n_elems;
    options.exchange = cases[i].exchange;
    options.format = cases[i].format;
    tagc_paper_options paper;
    tagc_paper_options_init(&paper);
    paper.ratio = cases[i].ratio;
    if (paper.ratio > 0) options.paper = &paper;
    if (cases[i].exchange == TAGC_EXCHANGE_DIRECT) options.sparsity = cases[i].sparsity;
    options.output = cases[i].output;
    options.n_threads = (int)e->bench->plan->options.train.codec_threads;
    return tagc_reducer_create(e->bench->rank->comm, &options, &e->reducers[i]);
}

static tagc_status open_all(exchange_bench *e) {
    float **const arrays[] = {&e->gradient, &e->full, &e->replica};
    const tagc_bench *bench = e->bench;
    /* Three arrays, messages of the link, residuals and their spare, buffers of the reducers. */
    TAGC_TRY(
        tagc_check_memory("measuring the exchanges", 12 * e->n_elems * sizeof(float), bench->hosts.n_here));
    for (int i = 0; i < 3; i++) {
        void *memory;
        TAGC_TRY(tagc_memory_create(e->n_elems * sizeof(float), "measuring the exchanges", &memory));
        *arrays[i] = memory;
    }
    uint64_t seed = (uint64_t)bench->rank->rank + 1;
    tagc_fill_gradient(e->gradient, e->n_elems, &seed);
    TAGC_TRY(tagc_wire_create(bench->rank->comm, bench->is_mpi, bench->plan->options.train.timeout,
                              e->shard * sizeof(float), &e->wire));
    for (int i = 0; i < N_CASES; i++) TAGC_TRY(open_case(e, i));
    return TAGC_OK;
}

static void close_all(exchange_bench *e) {
    for (int i = 0; i < N_CASES; i++) {
        tagc_reducer_destroy(e->reducers[i]);
        tagc_gatherer_destroy(e->gatherers[i]);
    }
    tagc_wire_destroy(&e->wire);
    tagc_memory_destroy(e->gradient);
    tagc_memory_destroy(e->full);
    tagc_memory_destroy(e->replica);
}

static tagc_status run_case(exchange_bench *e, int i) {
    switch (cases[i].kind) {
    case REDUCER:
        return tagc_reducer_run(e->reducers[i], e->gradient, e->n_elems, e->full,
                                cases[i].output == TAGC_OUTPUT_UNIT ? e->n_elems : e->shard, NULL);
    case GATHERER:
        TAGC_TRY(tagc_gatherer_begin(e->gatherers[i], e->gradient, e->shard,
                                     cases[i].format < TAGC_GATHER_DELTA8 ? e->full : e->replica,
                                     e->n_elems));
        return tagc_gatherer_end(e->gatherers[i]);
    case MPI:
        return tagc_plain_mpi_collective(cases[i].format, e->gradient, e->full,
                                         cases[i].format == TAGC_MPI_ALL_REDUCE ? e->n_elems : e->shard);
    case LINK:
        break;
    }
    return TAGC_OK;
}

static double sent(const tagc_comm *comm) {
    uint64_t n_bytes[TAGC_N_LEGS];
    double sum = 0;
    tagc_comm_bytes(comm, n_bytes, NULL, TAGC_N_LEGS);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) sum += (double)n_bytes[leg];
    return sum;
}

static tagc_status time_case(exchange_bench *e, int i, int turn) {
    tagc_comm *comm = e->bench->rank->comm;
    double n_bytes = cases[i].n_passes * (double)e->shard * 4 * (e->bench->rank->world_size - 1), seconds;
    if (cases[i].kind == LINK) {
        TAGC_TRY(tagc_wire_all(&e->wire, e->shard * sizeof(float), e->n_times[i], &seconds));
    } else {
        TAGC_TRY(tagc_comm_barrier(comm));
        double start_s = tagc_clock_s(), before = sent(comm);
        for (int time = 0; time < e->n_times[i]; time++) TAGC_TRY(run_case(e, i));
        seconds = tagc_clock_s() - start_s;
        if (cases[i].n_passes == 0) n_bytes = (sent(comm) - before) / e->n_times[i];
        TAGC_TRY(tagc_max_over_ranks(comm, &seconds, 1));
    }
    TAGC_TRY(tagc_mean_over_ranks(comm, &n_bytes, 1));
    e->seconds[i][turn] = seconds / e->n_times[i];
    e->n_bytes[i] = n_bytes;
    return TAGC_OK;
}

/* Runs each once to warm up and once to choose how often it runs in a turn, then in turns. */
static tagc_status time_all(exchange_bench *e) {
    double first_s = 0;
    for (int turn = -2; turn < e->n_turns || turn <= 0; turn++) {
        for (int i = 0; i < N_CASES; i++) {
            if (!is_wanted(e, i)) continue;
            if (turn < 0) e->n_times[i] = 1;
            TAGC_TRY(time_case(e, i, turn < 0 ? 0 : turn));
            double times = least_s / (e->seconds[i][0] + 1e-9);
            if (turn == -1) e->n_times[i] = times < 1 ? 1 : times > MOST_TIMES ? MOST_TIMES : (int)times;
            if (turn == 0) first_s += e->seconds[i][0] * e->n_times[i];
        }
        if (turn == 0) e->n_turns = first_s < quick_s ? MANY_TURNS : FEW_TURNS;
    }
    return TAGC_OK;
}

/* ---- results ---- */

static tagc_result_spread spread_of(const exchange_bench *e, int i) {
    return tagc_result_spread_of(e->seconds[i], e->n_turns);
}

/* Bytes per second. */
static double rate_of(const exchange_bench *e, int i) {
    return e->n_bytes[i] / spread_of(e, i).median;
}

static json_t *exchanges_json(const exchange_bench *e) {
    json_t *list = json_array();
    for (int i = 1; i < N_CASES; i++) {
        tagc_result_spread total_s = spread_of(e, i);
        if (!is_wanted(e, i)) continue;
        json_array_append_new(
            list,
            json_pack("{s:s, s:I, s:I, s:o, s:o, s:o}", "name", cases[i].name, "n_elems",
                      (json_int_t)e->n_elems, "n_bytes_sent", (json_int_t)(e->n_bytes[i] + 0.5), "total_s",
                      tagc_json_spread(&total_s), "bytes_per_s", tagc_json_real(rate_of(e, i)), "share",
                      tagc_json_real(rate_of(e, i) / e->bench->all_to_all_bytes_per_s)));
    }
    return list;
}

static void say_table(const exchange_bench *e) {
    char n_elems[16], n_bytes[16], seconds[24], rate[24];
    double ours_s = 0;
    tagc_bench_say(e->bench, "\nExchanges by themselves, %s values\n  %-28s %9s %10s %14s %7s\n",
                   tagc_human((double)e->n_elems, n_elems), "", "sent", "time", "rate", "of link");
    for (int i = 0; i < N_CASES; i++) {
        if (!is_wanted(e, i)) continue;
        double median_s = spread_of(e, i).median;
        tagc_bench_say(e->bench, "  %-28s %9s %10s %14s %7.2f\n", cases[i].name,
                       tagc_human_bytes(e->n_bytes[i], n_bytes), tagc_human_time(median_s, seconds),
                       tagc_human_rate(rate_of(e, i), rate),
                       rate_of(e, i) / e->bench->all_to_all_bytes_per_s);
        if (cases[i].kind == REDUCER && ours_s == 0) ours_s = median_s;
    }
    for (int i = 0; i < N_CASES; i++)
        if (is_wanted(e, i) && cases[i].kind == MPI && cases[i].format == TAGC_MPI_REDUCE_SCATTER)
            tagc_bench_say(e->bench,
                           "  tagc's point-to-point reduce-scatter took %.2f times as long as MPI's own\n",
                           ours_s / spread_of(e, i).median);
}

/* The link is measured twice: by messages that grow until they can be timed, and here by messages as large as the exchanges'. */
static void say_which_rate(const tagc_bench *bench, double before_bytes_per_s, double now_bytes_per_s) {
    const double alike = 1.25;
    char before[24], now[24];
    double ratio = now_bytes_per_s / before_bytes_per_s;
    if (ratio < alike && ratio > 1 / alike) return;
    tagc_bench_say(
        bench,
        "  note: plain messages of this size go at %s, and those of the link's own measurement went at %s;"
        " below, %s counts%s\n",
        tagc_human_rate(now_bytes_per_s, now), tagc_human_rate(before_bytes_per_s, before), now,
        bench->hosts.n_hosts == 1
            ? ". All ranks are on one host: both are rates of its memory, not of a network"
            : "");
}

/* Shares refer to the link in these turns, not to an earlier measurement. */
static tagc_status measure(exchange_bench *e) {
    tagc_bench *bench = e->bench;
    uint64_t most_elems;
    TAGC_TRY(largest_unit(bench, &most_elems));
    choose_size(e, most_elems);
    TAGC_TRY(open_all(e));
    TAGC_TRY(time_all(e));
    double before = bench->all_to_all_bytes_per_s, now = bench->all_to_all_bytes_per_s = rate_of(e, 0);
    if (bench->result)
        json_object_set_new(json_object_get(bench->result, "link"), "all_to_all_bytes_per_s",
                            tagc_json_real(now));
    say_table(e);
    say_which_rate(bench, before, now);
    tagc_bench_put(bench, "exchanges", exchanges_json(e));
    return TAGC_OK;
}

tagc_status tagc_bench_exchanges(tagc_bench *bench) {
    exchange_bench e = {.bench = bench};
    if (bench->all_to_all_bytes_per_s <= 0) TAGC_TRY(tagc_bench_link(bench));
    tagc_status status = measure(&e);
    tagc_rank_finish(bench->rank, status);
    close_all(&e);
    return status;
}
