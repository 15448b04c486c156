/* How much of a link the exchanges fill without a model around them: the traffic of sharded training in its
 * order (gathers of a forward pass; gathers and reductions of a backward pass side by side), nothing computed
 * in between. Bytes that left per second and direction, slowest rank. mpiexec -n W bench_link
 *
 *   bench_link [UNITS [ELEMS_PER_UNIT [REPEATS]]] */
#include "tagc/mpi.h"
#include "tagc/tagc.h"
#include "transport/comm.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_UNITS = 256, MAX_W = 64, MAX_REPEATS = 64, IN_FLIGHT = 2 };

typedef struct link_bench {
    tagc_comm *comm;
    int rank, world_size, n_units;
    uint64_t n_elems, shard;
    uint64_t n_bytes_mpi; /* sent by MPI's own collectives */
    float *parameters, *full, *gradient,
        *output;                            /* (shard), (IN_FLIGHT, W, shard) twice, (IN_FLIGHT, shard) */
    tagc_gatherer *gatherers[2][MAX_UNITS]; /* fp32, bf16 */
    tagc_reducer *reducers[2][MAX_UNITS];
} link_bench;

static void must(tagc_status status) {
    if (status == TAGC_OK) return;
    fprintf(stderr, "bench_link: %s\n", tagc_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static float *take(uint64_t n) {
    float *values = malloc(n * sizeof *values);
    if (!values) MPI_Abort(MPI_COMM_WORLD, 1);
    for (uint64_t i = 0; i < n; i++) values[i] = (float)(i % 1024);
    return values;
}

static float *slot(const link_bench *b, float *slots, int unit, uint64_t n) {
    (void)b;
    return slots + (uint64_t)(unit % IN_FLIGHT) * n;
}

/* ---- patterns ---- */

/* MPI's own collectives, for comparison; tagc's comm thread sleeps meanwhile, as MPI_THREAD_SERIALIZED asks for. Their
 * bytes are what the operation needs at least. */
static void mpi_reduce_scatter(link_bench *b, int wire) {
    (void)wire;
    for (int unit = 0; unit < b->n_units; unit++)
        MPI_Reduce_scatter_block(b->gradient, b->output, (int)b->shard, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    b->n_bytes_mpi += (uint64_t)b->n_units * (b->n_elems - b->shard) * sizeof(float);
}

static void mpi_all_gather(link_bench *b, int wire) {
    (void)wire;
    for (int unit = 0; unit < b->n_units; unit++)
        MPI_Allgather(b->parameters, (int)b->shard, MPI_FLOAT, b->full, (int)b->shard, MPI_FLOAT,
                      MPI_COMM_WORLD);
    b->n_bytes_mpi += (uint64_t)b->n_units * (b->n_elems - b->shard) * sizeof(float);
}

/* Transfers one after the other, each of a unit's bytes from every rank to every other. */
static void transfers(link_bench *b, int wire) {
    tagc_part parts[MAX_W];
    uint32_t n_parts = 0;
    uint64_t n_bytes = b->shard * (wire == TAGC_FORMAT_BF16 ? 2 : 4);
    for (int r = 0; r < b->world_size; r++)
        if (r != tagc_comm_rank(b->comm)) parts[n_parts++] = (tagc_part){r, n_bytes, (uint64_t)r * n_bytes};
    for (int unit = 0; unit < b->n_units; unit++) {
        tagc_ticket ticket = {.transfer = {.n_sends = n_parts,
                                           .n_receives = n_parts,
                                           .sends = parts,
                                           .receives = parts,
                                           .send = b->gradient,
                                           .recv = b->full},
                              .leg = TAGC_LEG_VALUES};
        tagc_comm_post(b->comm, TAGC_LANE_REDUCE, &ticket);
        must(tagc_comm_wait(b->comm, &ticket));
    }
}

static void gather_begin(link_bench *b, int wire, int unit) {
    if (unit < b->n_units)
        must(tagc_gatherer_begin(b->gatherers[wire][unit], b->parameters, b->shard,
                                 slot(b, b->full, unit, b->n_elems), b->n_elems));
}

/* A forward pass: the next unit's gather is under way while one is waited for. */
static void forward(link_bench *b, int wire) {
    gather_begin(b, wire, 0);
    for (int unit = 0; unit < b->n_units; unit++) {
        gather_begin(b, wire, unit + 1);
        must(tagc_gatherer_end(b->gatherers[wire][unit]));
    }
}

static void reduce_begin(link_bench *b, int wire, int unit) {
    must(tagc_reducer_begin(b->reducers[wire][unit], slot(b, b->gradient, unit, b->n_elems), b->n_elems,
                            slot(b, b->output, unit, b->shard), b->shard));
}

/* Reductions alone, as in a backward pass that keeps its parameters. */
static void reduce(link_bench *b, int wire) {
    for (int unit = 0; unit < b->n_units; unit++) {
        if (unit >= IN_FLIGHT) must(tagc_reducer_end(b->reducers[wire][unit - IN_FLIGHT], NULL));
        reduce_begin(b, wire, unit);
    }
    for (int unit = b->n_units > IN_FLIGHT ? b->n_units - IN_FLIGHT : 0; unit < b->n_units; unit++)
        must(tagc_reducer_end(b->reducers[wire][unit], NULL));
}

static void backward(link_bench *b, int wire) {
    gather_begin(b, wire, 0);
    for (int unit = 0; unit < b->n_units; unit++) {
        gather_begin(b, wire, unit + 1);
        must(tagc_gatherer_end(b->gatherers[wire][unit]));
        if (unit >= IN_FLIGHT) must(tagc_reducer_end(b->reducers[wire][unit - IN_FLIGHT], NULL));
        reduce_begin(b, wire, unit);
    }
    for (int unit = b->n_units > IN_FLIGHT ? b->n_units - IN_FLIGHT : 0; unit < b->n_units; unit++)
        must(tagc_reducer_end(b->reducers[wire][unit], NULL));
}

static const struct {
    const char *name;
    void (*run)(link_bench *, int wire);
    int wire;
} patterns[] = {
    {"transfers, one at a time", transfers, TAGC_FORMAT_FP32},
    {"forward fp32", forward, TAGC_FORMAT_FP32},
    {"reduce fp32", reduce, TAGC_FORMAT_FP32},
    {"backward fp32", backward, TAGC_FORMAT_FP32},
    {"forward bf16", forward, TAGC_FORMAT_BF16},
    {"reduce bf16", reduce, TAGC_FORMAT_BF16},
    {"backward bf16", backward, TAGC_FORMAT_BF16},
    {"MPI_Allgather", mpi_all_gather, TAGC_FORMAT_FP32},
    {"MPI_Reduce_scatter_block", mpi_reduce_scatter, TAGC_FORMAT_FP32},
};
enum { N_PATTERNS = sizeof patterns / sizeof patterns[0] };

/* ---- measuring ---- */

static uint64_t sent(const link_bench *b) {
    uint64_t n_bytes[TAGC_N_LEGS], sum = b->n_bytes_mpi;
    tagc_comm_bytes(b->comm, n_bytes, NULL, TAGC_N_LEGS);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) sum += n_bytes[leg];
    return sum;
}

static double cpu_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Of the slowest rank. *cpus: how many processors this rank kept busy. */
static double bytes_per_s(link_bench *b, int pattern, double *cpus) {
    double all[MAX_W];
    must(tagc_comm_barrier(b->comm));
    uint64_t before = sent(b);
    double start_s = tagc_time_s(), start_cpu_s = cpu_s();
    patterns[pattern].run(b, patterns[pattern].wire);
    double total_s = tagc_time_s() - start_s;
    *cpus = (cpu_s() - start_cpu_s) / total_s;
    double rate = (double)(sent(b) - before) / total_s, least;
    must(tagc_comm_all_gather(b->comm, &rate, sizeof rate, all,
                              (size_t)tagc_comm_world_size(b->comm) * sizeof *all));
    least = all[0];
    for (int r = 1; r < b->world_size; r++) least = all[r] < least ? all[r] : least;
    return least;
}

static int by_value(const void *x, const void *y) {
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

static void make(link_bench *b) {
    tagc_gatherer_options gather;
    tagc_reducer_options reducer;
    tagc_gatherer_options_init(&gather);
    tagc_reducer_options_init(&reducer);
    gather.n_elems = reducer.n_elems = b->n_elems;
    reducer.sparsity = 0;
    for (int wire = 0; wire < 2; wire++)
        for (int unit = 0; unit < b->n_units; unit++) {
            gather.format = reducer.format = wire;
            must(tagc_gatherer_create(b->comm, &gather, &b->gatherers[wire][unit]));
            must(tagc_reducer_create(b->comm, &reducer, &b->reducers[wire][unit]));
        }
    b->parameters = take(b->shard);
    b->output = take(IN_FLIGHT * b->shard);
    b->full = take(IN_FLIGHT * b->n_elems);
    b->gradient = take(IN_FLIGHT * b->n_elems);
}

static void destroy(link_bench *b) {
    for (int wire = 0; wire < 2; wire++)
        for (int unit = 0; unit < b->n_units; unit++) {
            tagc_gatherer_destroy(b->gatherers[wire][unit]);
            tagc_reducer_destroy(b->reducers[wire][unit]);
        }
    free(b->parameters);
    free(b->output);
    free(b->full);
    free(b->gradient);
    tagc_comm_destroy(b->comm);
}

int main(int argc, char **argv) {
    int level;
    tagc_mpi_prepare();
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    link_bench b = {.n_units = argc > 1 ? atoi(argv[1]) : 24};
    uint64_t wanted = argc > 2 ? strtoull(argv[2], NULL, 10) : 2359296;
    int n_repeats = argc > 3 ? atoi(argv[3]) : 3;
    must(tagc_comm_create_mpi(MPI_COMM_WORLD, NULL, &b.comm));
    b.rank = tagc_comm_rank(b.comm);
    b.world_size = tagc_comm_world_size(b.comm);
    if (wanted > INT_MAX || b.n_units < 1 || b.n_units > MAX_UNITS || wanted < 1 || n_repeats < 1 ||
        n_repeats > MAX_REPEATS || b.world_size > MAX_W) {
        fprintf(stderr,
                "bench_link: 1 to %d units of at most 2^31 - 1 elements, 1 to %d repeats, at most %d ranks\n",
                MAX_UNITS, MAX_REPEATS, MAX_W);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    b.n_elems = tagc_padded_elems(wanted, b.world_size);
    b.shard = b.n_elems / (uint64_t)b.world_size;
    make(&b);
    static double rates[N_PATTERNS][MAX_REPEATS], cpus[N_PATTERNS][MAX_REPEATS];
    for (int repeat = 0; repeat < n_repeats; repeat++)
        for (int pattern = 0; pattern < N_PATTERNS; pattern++)
            rates[pattern][repeat] = bytes_per_s(&b, pattern, &cpus[pattern][repeat]);
    if (b.rank == 0)
        printf("%-26s %10s %10s %10s  Mbit/s sent per rank, %5s\n", "", "median", "min", "max", "cpus");
    for (int pattern = 0; b.rank == 0 && pattern < N_PATTERNS; pattern++) {
        double *values = rates[pattern];
        qsort(values, (size_t)n_repeats, sizeof *values, by_value);
        qsort(cpus[pattern], (size_t)n_repeats, sizeof *cpus[pattern], by_value);
        printf("%-26s %10.1f %10.1f %10.1f  %27.2f\n", patterns[pattern].name, 8e-6 * values[n_repeats / 2],
               8e-6 * values[0], 8e-6 * values[n_repeats - 1], cpus[pattern][n_repeats / 2]);
    }
    destroy(&b);
    MPI_Finalize();
    return 0;
}
