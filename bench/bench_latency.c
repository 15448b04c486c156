/* What a step costs where messages take long: the time of one step over a network that delivers each message d after it
 * was sent, whatever its length, in units of d. One rank is real and the others echo it, see tests/delaying.h, so that one
 * core does for any number of ranks; encoding and decoding of this rank count, those of the others do not. The last table
 * is without latency: what a step of LOAD_RANKS ranks costs the processor.
 *
 *   bench_latency [--latency-ms D] [--shard N] [--repeats N] [--units N] [--most-ranks W] */
#include "../tests/delaying.h"
#include "measure.h"
#include "tagc/model.h"
#include "transport/comm.h"

enum { N_MOST_UNITS = 64, N_MOST_REPEATS = 101, LOAD_RANKS = 1024, LOAD_SHARD = 4096, LOAD_REPEATS = 21 };

typedef struct setting {
    double latency_s;
    uint64_t shard;
    int n_repeats, n_units, most_ranks;
} setting;

typedef struct row {
    const char *name;
    int exchange, is_whole, has_lanes, is_model; /* is_whole: every value in fp32 */
} row;

static const row rows[] = {
    {"whole", TAGC_EXCHANGE_DIRECT, .is_whole = 1, .has_lanes = 1},
#if TAGC_HAS_PAPER
    {"packed", TAGC_EXCHANGE_PACKED, .has_lanes = 1},
#endif
    {"direct", TAGC_EXCHANGE_DIRECT, .has_lanes = 1},
    {"model", TAGC_EXCHANGE_DIRECT, .has_lanes = 1, .is_model = 1},
    {"direct, callback", TAGC_EXCHANGE_DIRECT, .has_lanes = 0},
    {"whole, callback", TAGC_EXCHANGE_DIRECT, .is_whole = 1},
};
enum { N_ROWS = sizeof rows / sizeof *rows };

_Noreturn static void fail(const char *what) {
    fprintf(stderr, "bench_latency: %s: %s\n", what, tagc_last_error());
    exit(1);
}

static void expect(tagc_status status, const char *what) {
    if (status != TAGC_OK) fail(what);
}

typedef struct step_cost {
    spread time_s, select_s;        /* select_s: of the first unit */
    double n_transfers, n_messages; /* of this rank, of one step */
} step_cost;

/* n_units of one step: a reducer for each, or one model of as many units of a matrix. */
typedef struct step_units {
    int n;
    uint64_t n_elems, shard;
    tagc_reducer *reducers[N_MOST_UNITS];
    tagc_model *model; /* NULL: reducers */
    float *gradients[N_MOST_UNITS], *outputs[N_MOST_UNITS];
} step_units;

static void open_reducers(step_units *units, const row *kind, tagc_comm *comm) {
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = units->n_elems;
    options.exchange = kind->exchange;
    if (kind->is_whole) options.sparsity = 0;
    if (kind->is_whole) options.format = TAGC_FORMAT_FP32;
    for (int u = 0; u < units->n; u++)
        expect(tagc_reducer_create(comm, &options, &units->reducers[u]), "reducer");
}

/* With the defaults: every value in 8 bits in the first steps. */
static void open_model(step_units *units, int W, tagc_comm *comm) {
    char names[N_MOST_UNITS][32];
    const uint64_t shape[] = {(uint64_t)W, units->shard};
    tagc_tensor tensors[N_MOST_UNITS];
    for (int u = 0; u < units->n; u++) {
        snprintf(names[u], sizeof names[u], "%d.weight", u);
        tensors[u] = (tagc_tensor){.name = names[u],
                                   .shape = shape,
                                   .n_dims = 2,
                                   .unit = (uint32_t)u,
                                   .kind = TAGC_CLASS_COMPRESSED};
    }
    expect(tagc_model_create(NULL, comm, tensors, (size_t)units->n, NULL, &units->model), "model");
}

/* Returns how long the first unit selected, in a reducer. */
static double run_step(const step_units *units) {
    tagc_reducer_stats stats;
    tagc_reducer_stats_init(&stats);
    for (uint32_t u = 0; u < (uint32_t)units->n; u++) {
        const tagc_piece gradient = {u, 0, units->n_elems, units->gradients[u]};
        const tagc_piece sum = {u, 0, units->shard, units->outputs[u]};
        expect(units->model ? tagc_model_begin(units->model, u, &gradient, 1, &sum, 1)
                            : tagc_reducer_begin(units->reducers[u], units->gradients[u], units->n_elems,
                                                 units->outputs[u], units->shard),
               "begin");
    }
    for (uint32_t u = 0; u < (uint32_t)units->n; u++)
        expect(units->model ? tagc_model_end(units->model, u, NULL)
                            : tagc_reducer_end(units->reducers[u], u == 0 ? &stats : NULL),
               "end");
    return stats.time_s[TAGC_PHASE_SELECT];
}

/* n_units, begun together, from the first begin to the last end. */
static step_cost time_steps(const setting *s, const row *kind, int W, int n_units) {
    delaying_network *network = delaying_create(&(delaying_options){
        .world_size = W, .latency_s = s->latency_s, .has_lanes = kind->has_lanes, .is_echo = 1});
    tagc_comm *comm;
    step_units units = {.n = n_units, .n_elems = s->shard * (uint64_t)W, .shard = s->shard};
    double times[N_MOST_REPEATS], selecting[N_MOST_REPEATS];
    uint64_t random = 1;
    expect(delaying_comm(network, 0, NULL, &comm), "comm");
    for (int u = 0; u < n_units; u++) {
        units.gradients[u] = take(units.n_elems, sizeof(float), "gradient");
        units.outputs[u] = take(s->shard, sizeof(float), "output");
        tagc_fill_gradient(units.gradients[u], units.n_elems, &random);
    }
    if (kind->is_model)
        open_model(&units, W, comm);
    else
        open_reducers(&units, kind, comm);
    int n_transfers = 0;
    uint64_t n_messages = 0;
    for (int i = -1; i < s->n_repeats; i++) { /* the first touches memory */
        if (i == 0) n_transfers = network->ranks[0].n_transfers;
        if (i == 0) n_messages = network->ranks[0].n_messages;
        double start_s = tagc_clock_s(), select_s = run_step(&units);
        if (i < 0) continue;
        times[i] = tagc_clock_s() - start_s;
        selecting[i] = select_s;
    }
    step_cost cost = {.time_s = spread_of(times, s->n_repeats),
                      .select_s = spread_of(selecting, s->n_repeats),
                      .n_transfers = (double)(network->ranks[0].n_transfers - n_transfers) / s->n_repeats,
                      .n_messages = (double)(network->ranks[0].n_messages - n_messages) / s->n_repeats};
    tagc_model_destroy(units.model);
    for (int u = 0; u < n_units; u++) {
        tagc_reducer_destroy(units.reducers[u]);
        tagc_memory_destroy(units.gradients[u]);
        tagc_memory_destroy(units.outputs[u]);
    }
    tagc_comm_destroy(comm);
    delaying_destroy(network);
    return cost;
}

static void print_row(const setting *s, const row *kind, int W, int n_units) {
    step_cost cost = time_steps(s, kind, W, n_units);
    printf("%5d %5d %8llu  %-17s %9.1f ms (%.1f to %.1f) %8.1f d %10.0f transfers %8.0f messages\n", W,
           n_units, (unsigned long long)s->shard, kind->name, 1e3 * cost.time_s.median,
           1e3 * cost.time_s.quarter, 1e3 * cost.time_s.three_quarters, cost.time_s.median / s->latency_s,
           cost.n_transfers, cost.n_messages);
    fflush(stdout);
}

/* Reading two arrays of as many values as the unit has, and writing one. */
static double floor_ms(size_t n) {
    float *gradient = take(n, sizeof(float), "gradient"), *residual = take(n, sizeof(float), "residual");
    double times[LOAD_REPEATS];
    for (int i = 0; i < LOAD_REPEATS; i++) times[i] = tagc_time_floor(NULL, gradient, residual, residual, n);
    tagc_memory_destroy(gradient);
    tagc_memory_destroy(residual);
    return 1e3 * spread_of(times, LOAD_REPEATS).median;
}

static void print_load(void) {
    const setting s = {.shard = LOAD_SHARD, .n_repeats = LOAD_REPEATS};
    const double n_elems = (double)LOAD_RANKS * LOAD_SHARD;
    printf("no latency, %d values per shard; medians of %d steps (quartiles); memory floor %.1f ms\n",
           LOAD_SHARD, LOAD_REPEATS, floor_ms(LOAD_RANKS * LOAD_SHARD));
    for (int i = 0; i < N_ROWS; i++) {
        if (rows[i].exchange != TAGC_EXCHANGE_DIRECT) continue;
        if (!rows[i].has_lanes || rows[i].is_model) continue;
        step_cost cost = time_steps(&s, &rows[i], LOAD_RANKS, 1);
        printf("%5d %5d  %-17s %9.1f ms (%.1f to %.1f), %.1f of it select and encode: %.2f ns per value\n",
               LOAD_RANKS, 1, rows[i].name, 1e3 * cost.time_s.median, 1e3 * cost.time_s.quarter,
               1e3 * cost.time_s.three_quarters, 1e3 * cost.select_s.median,
               1e9 * cost.select_s.median / n_elems);
    }
}

static setting read_options(int argc, char **argv) {
    setting s = {.latency_s = 10e-3, .shard = 4096, .n_repeats = 5, .n_units = 16, .most_ranks = 256};
    for (int i = 1; i < argc; i++) {
        if (i + 1 == argc) refuse(argv[i], "the last word", "followed by a number");
        const char *name = argv[i], *text = argv[++i];
        if (strcmp(name, "--latency-ms") == 0)
            s.latency_s = 1e-3 * (double)number(name, text, 1, 1000);
        else if (strcmp(name, "--shard") == 0)
            s.shard = number(name, text, 1, 1 << 24);
        else if (strcmp(name, "--repeats") == 0)
            s.n_repeats = (int)number(name, text, 1, N_MOST_REPEATS);
        else if (strcmp(name, "--units") == 0)
            s.n_units = (int)number(name, text, 1, N_MOST_UNITS);
        else if (strcmp(name, "--most-ranks") == 0)
            s.most_ranks = (int)number(name, text, 8, 1024);
        else
            refuse("option", name, "--latency-ms, --shard, --repeats, --units or --most-ranks");
    }
    return s;
}

int main(int argc, char **argv) {
    static const int world_sizes[] = {8, 64, 256, 1024};
    setting s = read_options(argc, argv);
    printf("kernels: %s\n", level_in_use());
    printf("d = %g ms one way, %llu values per shard; medians of %d steps (quartiles)\n", 1e3 * s.latency_s,
           (unsigned long long)s.shard, s.n_repeats);
    printf("%5s %5s %8s  %-17s\n", "W", "units", "shard", "exchange");
    for (size_t w = 0; w < sizeof world_sizes / sizeof *world_sizes; w++)
        for (int i = 0; i < N_ROWS && world_sizes[w] <= s.most_ranks; i++)
            if (rows[i].has_lanes || world_sizes[w] <= 64) print_row(&s, &rows[i], world_sizes[w], 1);
    for (int i = 0; i < N_ROWS && s.most_ranks >= 64; i++) print_row(&s, &rows[i], 64, s.n_units);
    setting bucket = s; /* the values of all these units in one */
    bucket.shard *= (uint64_t)s.n_units;
    for (int i = 0; i < N_ROWS && s.most_ranks >= 64 && s.n_units > 1; i++)
        print_row(&bucket, &rows[i], 64, 1);
    print_load();
    return 0;
}
