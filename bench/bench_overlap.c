/* What a GPU does while messages travel: the latency of one exchange with kernels, by stage; and a backward pass of several units whose
 * messages come late, against its computing alone and its exchanges alone. The share of the shorter of the two that the other hides is
 * what flags are for. Ranks are threads that share the device; spinning kernels stand for a model's. Where there is no device or no
 * libtagc-cuda.so it says so, and ends with 77.
 *
 *   bench_overlap [--library FILE] [--load FILE] [--elems N] [--units U] [--ranks W] [--steps N] [--compute-ms N] [--delays-ms N[,N...]]
 *                 [--least-hidden PERCENT]
 *
 * load: the library of gpu_load.h, without which only latencies are measured. elems: of a unit (12,582,912). units: of a pass (8).
 * compute-ms: of a unit (16). delays-ms: how late each message arrives (0,5,20,50). least-hidden: ends with 1 where less is hidden at a
 * delay that is not 0. */
#include "../tests/delaying.h"
#include "gpu_load.h"
#include "gpu_side.h"
#include "measure.h"

#include <dlfcn.h>

enum { MAX_RANKS = 4, MAX_UNITS = 32, MAX_STEPS = 100, MAX_DELAYS = 8, SPIN_BLOCKS = 32, NOT_HERE = 77 };

typedef struct setting {
    uint64_t n_elems;
    int n_units, world_size, n_steps, n_delays, delays_ms[MAX_DELAYS], compute_ms, least_hidden;
    const char *library;
    int (*spin)(void *, unsigned, uint64_t, uint32_t, uint64_t);
} setting;

typedef enum pass { COMPUTES = 1, EXCHANGES = 2 } pass;

/* A delaying_rank that notes when it sends first, and when it has had the last answer. */
typedef struct marked_rank {
    delaying_rank *rank;
    _Atomic double first_s, last_s;
} marked_rank;

static tagc_status marked_start(void *context, const tagc_transfer *transfer, void **handle) {
    marked_rank *m = context;
    if (m->first_s == 0) m->first_s = tagc_clock_s();
    return delaying_start(m->rank, transfer, handle);
}

static tagc_status marked_test(void *context, void *handle, tagc_progress *progress) {
    marked_rank *m = context;
    tagc_status status = delaying_test(m->rank, handle, progress);
    if (progress->done) m->last_s = tagc_clock_s();
    return status;
}

static void marked_give_up(void *context, const tagc_failure *failure) {
    delaying_give_up(((marked_rank *)context)->rank, failure);
}

static const tagc_transport_ops marked_ops = {
    .abi = TAGC_TRANSPORT_ABI,
    .capabilities = TAGC_TRANSPORT_LANES,
    .name = "delaying",
    .start = marked_start,
    .test = marked_test,
    .cancel = marked_give_up,
    .abort = marked_give_up,
    .destroy = delaying_leave,
};

/* What all ranks share. */
typedef struct job {
    const setting *set;
    delaying_network *network;
    pthread_barrier_t barrier;
} job;

typedef struct rank_state {
    job *job;
    int rank;
    marked_rank marked;
    gpu_side gpu;
    gpu_unit units[MAX_UNITS];
    void *input, *output;
} rank_state;

static void open_rank(rank_state *s, tagc_comm *comm) {
    const setting *set = s->job->set;
    gpu_side_open(&s->gpu, set->library);
    for (int u = 0; u < set->n_units; u++)
        gpu_unit_open(s->gpu.queue, comm, set->n_elems, TAGC_OUTPUT_SHARD, 1, &s->units[u]);
    float *values = take(set->n_elems, sizeof *values, "values");
    for (uint64_t i = 0, x = (uint64_t)s->rank + 1; i < set->n_elems; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        float v = (float)(int32_t)(x >> 32) * 0x1p-31f;
        values[i] = v * v * v;
    }
    s->input = gpu_array(&s->gpu, set->n_elems * sizeof(float));
    s->output = gpu_array(&s->gpu, s->units[0].n_output * sizeof(float));
    expect(tagc_kernels_write(s->gpu.kernels, s->input, values, set->n_elems * sizeof(float)), "gradient");
    tagc_memory_destroy(values);
}

static void close_rank(rank_state *s) {
    gpu_array_free(&s->gpu, s->input, s->job->set->n_elems * sizeof(float));
    gpu_array_free(&s->gpu, s->output, s->units[0].n_output * sizeof(float));
    gpu_side_stop(&s->gpu);
    for (int u = 0; u < s->job->set->n_units; u++) tagc_model_destroy(s->units[u].model);
    gpu_side_close(&s->gpu);
}

static void synchronize(const rank_state *s) {
    expect(
        tagc_device_check(s->gpu.device, s->gpu.device->runtime.StreamSynchronize(s->gpu.stream), "waiting"),
        "a step");
}

static void begin(const rank_state *s, int u, int waits) {
    gpu_unit_begin(&s->units[u], s->input, s->output, s->gpu.stream, waits);
}

static void end(const rank_state *s, int u) {
    expect(tagc_model_end(s->units[u].model, 0, NULL), "an exchange");
}

/* ---- latency by stage ---- */

enum { N_STAGES = 6 };
static const char *const stages[N_STAGES] = {"the call",
                                             "encode, bodies to the host, flag",
                                             "messages",
                                             "until the queue says that it is over",
                                             "bodies to the device, decode, settle",
                                             "all"};

/* In ms, of one exchange. */
static void time_stages(rank_state *s, double ms[N_STAGES]) {
    s->marked.first_s = 0;
    pthread_barrier_wait(&s->job->barrier);
    double start = tagc_clock_s();
    begin(s, 0, TAGC_WAITS_FOR_RESULT);
    double called = tagc_clock_s();
    end(s, 0);
    double over = tagc_clock_s();
    synchronize(s);
    double all = tagc_clock_s(), first = s->marked.first_s, last = s->marked.last_s;
    const double found[N_STAGES] = {called - start, first - called, last - first,
                                    over - last,    all - over,     all - start};
    for (int i = 0; i < N_STAGES; i++) ms[i] = 1e3 * found[i];
    pthread_barrier_wait(&s->job->barrier);
}

static void show_stages(rank_state *s) {
    static double samples[N_STAGES][MAX_STEPS]; /* of rank 0 */
    int n = s->job->set->n_steps;
    for (int i = -2; i < n; i++) {
        double ms[N_STAGES];
        time_stages(s, ms);
        for (int k = 0; k < N_STAGES && s->rank == 0 && i >= 0; k++) samples[k][i] = ms[k];
    }
    if (s->rank != 0) return;
    printf("one exchange of %llu values among %d ranks, ms (median, and the quarters)\n",
           (unsigned long long)s->job->set->n_elems, s->job->set->world_size);
    for (int k = 0; k < N_STAGES; k++) {
        spread found = spread_of(samples[k], n);
        printf("  %-40s %9.3f (%.3f to %.3f)\n", stages[k], found.median, found.quarter,
               found.three_quarters);
    }
}

/* ---- overlap ---- */

/* Seconds of a pass, all ranks together. */
static double time_pass(rank_state *s, pass what) {
    const setting *set = s->job->set;
    pthread_barrier_wait(&s->job->barrier);
    double start = tagc_clock_s();
    for (int u = 0; u < set->n_units; u++) {
        if (what & COMPUTES)
            expect(tagc_device_check(
                       s->gpu.device,
                       set->spin(s->gpu.stream, SPIN_BLOCKS, 0, 0, (uint64_t)set->compute_ms * 1000000),
                       "a launch"),
                   "computing");
        int is_last = u + 1 == set->n_units;
        if (what & EXCHANGES) begin(s, u, is_last ? TAGC_WAITS_FOR_RESULT : TAGC_WAITS_FOR_INPUT);
    }
    for (int u = 0; u < set->n_units && (what & EXCHANGES); u++) end(s, u);
    synchronize(s);
    pthread_barrier_wait(&s->job->barrier);
    return tagc_clock_s() - start;
}

static double median_of(rank_state *s, pass what) {
    double samples[MAX_STEPS];
    int n = s->job->set->n_steps;
    for (int i = -1; i < n; i++) {
        double seconds = time_pass(s, what);
        if (i >= 0) samples[i] = seconds;
    }
    return spread_of(samples, n).median;
}

/* Returns 1 where too little is hidden. */
static int show_overlap(rank_state *s, int delay_ms) {
    const setting *set = s->job->set;
    double computes = median_of(s, COMPUTES), exchanges = median_of(s, EXCHANGES),
           both = median_of(s, COMPUTES | EXCHANGES);
    double shorter = computes < exchanges ? computes : exchanges;
    double hidden = 100 * (computes + exchanges - both) / shorter;
    if (s->rank != 0) return 0;
    printf(
        "messages %d ms late, %d units: computing %.1f ms, exchanges %.1f ms, both %.1f ms: %.0f %% of the "
        "shorter one is hidden\n",
        delay_ms, set->n_units, 1e3 * computes, 1e3 * exchanges, 1e3 * both, hidden);
    return delay_ms > 0 && set->least_hidden && hidden < set->least_hidden;
}

/* ---- ranks ---- */

typedef struct rank_arg {
    job *job;
    int rank, delay, is_wrong;
} rank_arg;

static void *rank_main(void *arg) {
    rank_arg *own = arg;
    const setting *set = own->job->set;
    static rank_state states[MAX_RANKS];
    rank_state *s = &states[own->rank];
    *s = (rank_state){.job = own->job, .rank = own->rank};
    s->marked.rank = &own->job->network->ranks[own->rank];
    tagc_comm *comm;
    int before;
    expect(tagc_comm_create(&marked_ops, &s->marked, own->rank, set->world_size, NULL, &comm), "comm");
    open_rank(s, comm);
    expect(tagc_device_enter(s->gpu.device, &before),
           "device"); /* the load's calls are for the current one */
    if (own->delay == 0) show_stages(s);
    if (set->spin) own->is_wrong = show_overlap(s, set->delays_ms[own->delay]);
    tagc_device_leave(s->gpu.device, before);
    close_rank(s);
    tagc_comm_destroy(comm);
    return NULL;
}

static int run(const setting *set, int delay) {
    job j = {.set = set};
    pthread_t threads[MAX_RANKS];
    rank_arg args[MAX_RANKS];
    j.network = delaying_create(&(delaying_options){
        .world_size = set->world_size, .latency_s = 1e-3 * set->delays_ms[delay], .has_lanes = 1});
    pthread_barrier_init(&j.barrier, NULL, (unsigned)set->world_size);
    for (int r = 0; r < set->world_size; r++) {
        args[r] = (rank_arg){&j, r, delay, 0};
        if (pthread_create(&threads[r], NULL, rank_main, &args[r])) fail("threads");
    }
    for (int r = 0; r < set->world_size; r++) pthread_join(threads[r], NULL);
    pthread_barrier_destroy(&j.barrier);
    delaying_destroy(j.network);
    return args[0].is_wrong;
}

static void read_delays(setting *set, char *text) {
    set->n_delays = 0;
    for (char *one = strtok(text, ","); one && set->n_delays < MAX_DELAYS; one = strtok(NULL, ","))
        set->delays_ms[set->n_delays++] = (int)number("--delays-ms", one, 0, 1000);
}

static void open_load(setting *set, const char *file) {
    void *opened = dlopen(file, RTLD_NOW), *found = opened ? dlsym(opened, "tagc_load_spin") : NULL;
    if (!found) refuse("--load", file, "a library of bench/gpu_load.h");
    memcpy(&set->spin, &found, sizeof found);
}

static setting parse(int argc, char **argv) {
    setting set = {.n_elems = 12 << 20,
                   .n_units = 8,
                   .world_size = 2,
                   .n_steps = 7,
                   .compute_ms = 16,
                   .n_delays = 4,
                   .delays_ms = {0, 5, 20, 50}};
    for (int i = 1; i < argc; i += 2) {
        const char *name = argv[i];
        char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (value && !strcmp(name, "--library"))
            set.library = value;
        else if (value && !strcmp(name, "--load"))
            open_load(&set, value);
        else if (value && !strcmp(name, "--elems"))
            set.n_elems = number(name, value, 1, 1000000000);
        else if (value && !strcmp(name, "--units"))
            set.n_units = (int)number(name, value, 1, MAX_UNITS);
        else if (value && !strcmp(name, "--ranks"))
            set.world_size = (int)number(name, value, 2, MAX_RANKS);
        else if (value && !strcmp(name, "--steps"))
            set.n_steps = (int)number(name, value, 1, MAX_STEPS);
        else if (value && !strcmp(name, "--compute-ms"))
            set.compute_ms = (int)number(name, value, 1, 1000);
        else if (value && !strcmp(name, "--delays-ms"))
            read_delays(&set, value);
        else if (value && !strcmp(name, "--least-hidden"))
            set.least_hidden = (int)number(name, value, 1, 100);
        else
            refuse(name, value ? value : "without a value", "an option of the opening of bench_overlap.c");
    }
    set.n_elems = tagc_padded_elems(set.n_elems, set.world_size);
    return set;
}

int main(int argc, char **argv) {
    setting set = parse(argc, argv);
    /* Ranks share a device here: streams of one, which wait for flags, must not hold up those of another, which set them. */
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!gpu_is_here("bench_overlap", set.library)) return NOT_HERE;
    int n_wrong = 0;
    for (int d = 0; d < set.n_delays; d++) n_wrong += run(&set, d);
    return n_wrong != 0;
}
