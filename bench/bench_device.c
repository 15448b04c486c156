/* Models with kernels against models of the processor, on a machine with a GPU: first that outputs and residuals are the
 * same, bit for bit, then what a step takes. Ranks are threads that share the device and exchange through memory, so
 * that what is left is
 * codec and copies. Where there is no device or no libtagc-cuda.so it says so, and ends with 0, or where --required is
 * given with 77.
 *
 *   bench_device [--elems N[,N...]] [--ranks W] [--steps N] [--threads T] [--library FILE] [--json FILE] [--required]
 *
 * elems: of each unit (default: a block, the embedding and all of GPT-2 with 162 M parameters). threads: of the
 * processor's codec
 * (default: 4). library: the CUDA runtime (default: the system's). "copies": of gradient and shard through pinned
 * memory, which the processor's codec
 * needs beside it and kernels do not. */
#include "core/clock.h"
#include "gpu_side.h"
#include "measure.h"

enum { MAX_RANKS = 8, MAX_UNITS = 8, MAX_STEPS = 100, NOT_HERE = 77 };

typedef struct setting {
    uint64_t n_elems[MAX_UNITS];
    int n_units, world_size, n_steps, n_threads, required;
    const char *library, *json;
} setting;

/* Of one unit and output, what all ranks share. */
typedef struct job {
    const setting *set;
    uint64_t n_elems;
    int output;
    tagc_local_group *group;
    pthread_barrier_t barrier;
    double host_s[MAX_STEPS], device_s[MAX_STEPS], copies_s[MAX_STEPS]; /* rank 0's, between barriers */
    uint64_t n_device_bytes, n_sent;
    int n_different;
} job;

typedef struct rank_arg {
    job *job;
    int rank;
} rank_arg;

/* Heavy-tailed, another one in each step and on each rank. */
static void fill(float *values, uint64_t n, uint64_t seed) {
    uint64_t x = seed * 0x9e3779b97f4a7c15u + 1;
    for (uint64_t i = 0; i < n; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        double u = (double)(x >> 11) / 9007199254740992.0 - 0.5;
        values[i] = (float)(u * u * u * 1e-2);
    }
}

/* ---- a rank ---- */

typedef struct side {
    gpu_side gpu;
    gpu_unit unit, host;
    float *gradient, *output, *expected; /* host memory */
    float *there, *output_there;         /* of the device */
    void *pinned;
    size_t n, n_output;
} side;

static void open_side(const job *j, int rank, tagc_comm *comm, side *s) {
    int n_threads = j->set->n_threads;
    gpu_side_open(&s->gpu, j->set->library);
    gpu_unit_open(NULL, comm, j->n_elems, j->output, n_threads, &s->host);
    gpu_unit_open(s->gpu.queue, comm, j->n_elems, j->output, n_threads, &s->unit);
    s->n = (size_t)j->n_elems;
    s->n_output = (size_t)s->host.n_output;
    s->gradient = take(s->n, sizeof(float), "values");
    s->output = take(s->n, sizeof(float), "values");
    s->expected = take(s->n, sizeof(float), "values");
    s->there = gpu_array(&s->gpu, s->n * sizeof(float));
    s->output_there = gpu_array(&s->gpu, s->n_output * sizeof(float));
    if (rank == 0)
        expect(tagc_device_check(
                   s->gpu.device,
                   s->gpu.device->runtime.HostAlloc(&s->pinned, s->n * sizeof(float), TAGC_PINNED_PORTABLE),
                   "allocating pinned memory"),
               "pinned memory");
}

static void close_side(side *s) {
    gpu_array_free(&s->gpu, s->there, s->n * sizeof(float));
    gpu_array_free(&s->gpu, s->output_there, s->n_output * sizeof(float));
    if (s->pinned) s->gpu.device->runtime.FreeHost(s->pinned);
    tagc_model_destroy(s->host.model);
    gpu_side_stop(&s->gpu);
    tagc_model_destroy(s->unit.model);
    gpu_side_close(&s->gpu);
    tagc_memory_destroy(s->gradient);
    tagc_memory_destroy(s->output);
    tagc_memory_destroy(s->expected);
}

/* Copies of the whole gradient to the host and of the output back, only by rank 0. */
static double time_copies(side *s) {
    double begin = tagc_clock_s();
    tagc_kernels *kernels = s->gpu.kernels;
    expect(tagc_kernels_enter(kernels), "device");
    expect(tagc_kernels_copy(kernels, s->pinned, s->there, s->n * sizeof(float), TAGC_COPY_TO_HOST), "copy");
    expect(tagc_kernels_copy(kernels, s->output_there, s->pinned, s->n_output * sizeof(float),
                             TAGC_COPY_TO_DEVICE),
           "copy");
    expect(tagc_kernels_wait(kernels), "copy");
    tagc_kernels_leave(kernels);
    return tagc_clock_s() - begin;
}

static double time_host(job *j, const side *s) {
    pthread_barrier_wait(&j->barrier);
    double begin = tagc_clock_s();
    gpu_unit_begin(&s->host, s->gradient, s->expected, NULL, 0);
    expect(tagc_model_end(s->host.model, 0, NULL), "step");
    pthread_barrier_wait(&j->barrier); /* the slowest rank's */
    return tagc_clock_s() - begin;
}

static double time_device(job *j, const side *s, tagc_model_stats *stats) {
    pthread_barrier_wait(&j->barrier);
    double begin = tagc_clock_s();
    const gpu_side *gpu = &s->gpu;
    gpu_unit_begin(&s->unit, s->there, s->output_there, gpu->stream, TAGC_WAITS_FOR_RESULT);
    expect(tagc_device_check(gpu->device, gpu->device->runtime.StreamSynchronize(gpu->stream), "waiting"),
           "step");
    expect(tagc_model_end(s->unit.model, 0, stats), "step");
    pthread_barrier_wait(&j->barrier);
    return tagc_clock_s() - begin;
}

static void get_residual(const gpu_unit *u, float *values) {
    const tagc_piece piece = {0, 0, u->n_elems, values};
    expect(tagc_model_get_residual(u->model, 0, &piece, 1), "residual");
}

static int n_different(const side *s) {
    expect(tagc_kernels_read(s->gpu.kernels, s->output, s->output_there, s->n_output * sizeof(float)),
           "output");
    int different = memcmp(s->output, s->expected, s->n_output * sizeof(float)) != 0;
    get_residual(&s->host, s->expected);
    get_residual(&s->unit, s->output);
    return different + (memcmp(s->output, s->expected, s->n * sizeof(float)) != 0);
}

static void *rank_main(void *arg) {
    const rank_arg *own = arg;
    job *j = own->job;
    tagc_comm *comm;
    side s = {0};
    tagc_model_stats stats;
    tagc_model_stats_init(&stats);
    expect(tagc_comm_create_local(j->group, own->rank, NULL, &comm), "comm");
    open_side(j, own->rank, comm, &s);
    for (int step = 0; step < j->set->n_steps; step++) {
        fill(s.gradient, s.n, (uint64_t)(step * MAX_RANKS + own->rank + 1));
        expect(tagc_kernels_write(s.gpu.kernels, s.there, s.gradient, s.n * sizeof(float)), "gradient");
        double host_s = time_host(j, &s);
        double device_s = time_device(j, &s, &stats);
        __atomic_fetch_add(&j->n_different, n_different(&s), __ATOMIC_SEQ_CST);
        pthread_barrier_wait(&j->barrier);
        if (own->rank == 0) {
            j->host_s[step] = host_s;
            j->device_s[step] = device_s;
            j->copies_s[step] = time_copies(&s);
        }
    }
    if (own->rank == 0) {
        j->n_device_bytes = tagc_kernels_bytes(s.gpu.kernels) - (s.n + s.n_output) * sizeof(float);
        j->n_sent = stats.n_bytes_sent;
    }
    close_side(&s);
    tagc_comm_destroy(comm);
    return NULL;
}

/* ---- units ---- */

static void run_job(job *j) {
    pthread_t threads[MAX_RANKS];
    rank_arg args[MAX_RANKS];
    expect(tagc_local_group_create(j->set->world_size, &j->group), "ranks");
    pthread_barrier_init(&j->barrier, NULL, (unsigned)j->set->world_size);
    for (int r = 0; r < j->set->world_size; r++) {
        args[r] = (rank_arg){j, r};
        if (pthread_create(&threads[r], NULL, rank_main, &args[r])) fail("threads");
    }
    for (int r = 0; r < j->set->world_size; r++) pthread_join(threads[r], NULL);
    pthread_barrier_destroy(&j->barrier);
    tagc_local_group_destroy(j->group);
}

/* The first step, in which memory is touched for the first time, is left out where there are others. */
static double median(double *values, int n) {
    int skip = n > 1;
    qsort(values + skip, (size_t)(n - skip), sizeof *values, by_value);
    return values[skip + (n - skip) / 2];
}

static int print_job(job *j, FILE *json, int is_first) {
    int n = j->set->n_steps;
    double host = median(j->host_s, n), device = median(j->device_s, n), copies = median(j->copies_s, n);
    const char *output = j->output == TAGC_OUTPUT_UNIT ? "all-reduce" : "reduce-scatter";
    printf("%12llu %-15s %10.3f %10.3f %10.3f %9.2f %12.1f  %s\n", (unsigned long long)j->n_elems, output,
           1e3 * host, 1e3 * copies, 1e3 * device, (host + copies) / device, (double)j->n_device_bytes / 1e6,
           j->n_different ? "DIFFERENT" : "same bits");
    fflush(stdout);
    if (json)
        fprintf(json,
                "%s\n {\"n_elems\": %llu, \"output\": \"%s\", \"host_s\": %.6g, \"copies_s\": %.6g, "
                "\"device_s\": %.6g, "
                "\"device_bytes\": %llu, \"bytes_sent\": %llu, \"n_different\": %d}",
                is_first ? "" : ",", (unsigned long long)j->n_elems, output, host, copies, device,
                (unsigned long long)j->n_device_bytes, (unsigned long long)j->n_sent, j->n_different);
    return j->n_different > 0;
}

/* ---- arguments ---- */

static void read_elems(setting *set, char *text) {
    set->n_units = 0;
    for (char *one = strtok(text, ","); one && set->n_units < MAX_UNITS; one = strtok(NULL, ","))
        set->n_elems[set->n_units++] = number("--elems", one, 1, 2000000000);
}

static setting parse(int argc, char **argv) {
    setting set = {.n_elems = {7087872, 38633472, 162 << 20},
                   .n_units = 3,
                   .world_size = 2,
                   .n_steps = 6,
                   .n_threads = 4};
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        if (!strcmp(name, "--required")) {
            set.required = 1;
            continue;
        }
        char *value = i + 1 < argc ? argv[++i] : NULL;
        if (value && !strcmp(name, "--elems"))
            read_elems(&set, value);
        else if (value && !strcmp(name, "--ranks"))
            set.world_size = (int)number(name, value, 1, MAX_RANKS);
        else if (value && !strcmp(name, "--steps"))
            set.n_steps = (int)number(name, value, 1, MAX_STEPS);
        else if (value && !strcmp(name, "--threads"))
            set.n_threads = (int)number(name, value, 1, 256);
        else if (value && !strcmp(name, "--library"))
            set.library = value;
        else if (value && !strcmp(name, "--json"))
            set.json = value;
        else {
            fprintf(stderr,
                    "bench_device: %s is not known or lacks its value: see the opening of bench_device.c\n",
                    name);
            exit(2);
        }
    }
    return set;
}

int main(int argc, char **argv) {
    setting set = parse(argc, argv);
    /* All ranks share a device here. Streams of one, which wait for flags, must not hold up those of another, which set them. */
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    if (!gpu_is_here("bench_device", set.library)) return set.required ? NOT_HERE : 0;
    FILE *json = set.json ? fopen(set.json, "w") : NULL;
    if (set.json && !json) {
        perror(set.json);
        return 1;
    }
    int n_wrong = 0, is_first = 1;
    printf("direct, 95 %% zero, 2 bits; %d ranks on one device, medians of %d steps in ms; codec of the "
           "processor: %d threads a rank\n",
           set.world_size, set.n_steps, set.n_threads);
    printf("%12s %-15s %10s %10s %10s %9s %12s\n", "elements", "output", "processor", "copies", "kernels",
           "ratio", "device MB");
    if (json)
        fprintf(json, "{\"world_size\": %d, \"n_threads\": %d, \"units\": [", set.world_size, set.n_threads);
    for (int u = 0; u < set.n_units; u++)
        for (int output = TAGC_OUTPUT_SHARD; output <= TAGC_OUTPUT_UNIT; output++, is_first = 0) {
            static job j;
            j = (job){
                .set = &set, .n_elems = tagc_padded_elems(set.n_elems[u], set.world_size), .output = output};
            run_job(&j);
            n_wrong += print_job(&j, json, is_first);
        }
    if (json) {
        fprintf(json, "]}\n");
        fclose(json);
    }
    return n_wrong != 0;
}
