/* How long a gather holds its caller, in begin and in end, when the caller computes in between for as long as the gather
 * needs, and how long it takes altogether: two ranks as threads of one process. bench_gather [elements [threads]] */
#include "measure.h"
#include "tagc/tagc.h"

#include <pthread.h>

enum { N_RANKS = 2, N_DEFAULT = 32 << 20, N_REPEATS = 7 };

typedef struct kind {
    const char *name;
    int format, delta;
} kind;

static const kind kinds[] = {{"fp32", TAGC_FORMAT_FP32, 0},   {"bf16", TAGC_FORMAT_BF16, 0},
                             {"int8", TAGC_FORMAT_INT8, 0},   {"delta8", TAGC_FORMAT_INT8, 1},
                             {"delta4", TAGC_FORMAT_INT4, 1}, {"delta2", TAGC_FORMAT_INT2, 1}};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

typedef struct bench {
    tagc_local_group *group;
    uint64_t n;
    int n_threads;
    double begin_s[N_KINDS][N_REPEATS], end_s[N_KINDS][N_REPEATS], whole_s[N_KINDS][N_REPEATS]; /* rank 0's */
} bench;

typedef struct rank {
    bench *b;
    int number;
} rank;

static void expect(tagc_status status) {
    if (status == TAGC_OK) return;
    fprintf(stderr, "bench_gather: %s\n", tagc_last_error());
    exit(1);
}

static void pause_for(double seconds) {
    struct timespec pause = {.tv_sec = (time_t)seconds,
                             .tv_nsec = (long)(1e9 * (seconds - (double)(time_t)seconds))};
    nanosleep(&pause, NULL);
}

/* The first run, with a wait at once, says how long a gather takes. */
static void run_kind(const rank *self, tagc_comm *comm, int k, float *own, float *full) {
    bench *b = self->b;
    tagc_gatherer_options options;
    tagc_gatherer_options_init(&options);
    options.n_elems = b->n;
    options.format = kinds[k].format;
    options.delta = kinds[k].delta;
    options.n_threads = (uint64_t)b->n_threads;
    tagc_gatherer *gatherer;
    expect(tagc_gatherer_create(comm, &options, &gatherer));
    double longest_s = 0;
    for (int i = -2; i < N_REPEATS; i++) {
        expect(tagc_comm_barrier(comm));
        double start_s = tagc_clock_s();
        expect(tagc_gatherer_begin(gatherer, own, b->n / N_RANKS, full, b->n));
        double begun_s = tagc_clock_s();
        if (i >= 0) pause_for(2 * longest_s);
        double asked_s = tagc_clock_s();
        expect(tagc_gatherer_end(gatherer));
        double ended_s = tagc_clock_s();
        if (i < 0) longest_s = ended_s - start_s;
        if (i < 0 || self->number) continue;
        b->begin_s[k][i] = begun_s - start_s;
        b->end_s[k][i] = ended_s - asked_s;
        b->whole_s[k][i] = longest_s;
    }
    tagc_gatherer_destroy(gatherer);
}

static void *rank_main(void *arg) {
    const rank *self = arg;
    tagc_comm *comm;
    uint64_t random = (uint64_t)self->number + 1, shard = self->b->n / N_RANKS;
    float *own = take(shard, sizeof(float), "shard"), *full = take(self->b->n, sizeof(float), "full");
    tagc_fill_gradient(own, shard, &random);
    expect(tagc_comm_create_local(self->b->group, self->number, NULL, &comm));
    for (int k = 0; k < N_KINDS; k++) run_kind(self, comm, k, own, full);
    tagc_comm_destroy(comm);
    tagc_memory_destroy(own);
    tagc_memory_destroy(full);
    return NULL;
}

int main(int argc, char **argv) {
    static bench b;
    b.n = argc > 1 ? number("elements", argv[1], N_RANKS, 1u << 30) / N_RANKS * N_RANKS : N_DEFAULT;
    b.n_threads = argc > 2 ? (int)number("threads", argv[2], 1, 256) : 1;
    expect(tagc_local_group_create(N_RANKS, &b.group));
    rank ranks[N_RANKS];
    pthread_t threads[N_RANKS];
    for (int r = 0; r < N_RANKS; r++) {
        ranks[r] = (rank){&b, r};
        if (pthread_create(&threads[r], NULL, rank_main, &ranks[r]) != 0) return 1;
    }
    for (int r = 0; r < N_RANKS; r++) pthread_join(threads[r], NULL);
    printf("%llu elements over %d ranks, %d threads each; medians of %d, ms\n", (unsigned long long)b.n,
           N_RANKS, b.n_threads, N_REPEATS);
    printf("%8s %12s %12s %16s\n", "format", "begin holds", "end holds", "begin and end");
    for (int k = 0; k < N_KINDS; k++)
        printf("%8s %12.1f %12.1f %16.1f\n", kinds[k].name, 1e3 * spread_of(b.begin_s[k], N_REPEATS).median,
               1e3 * spread_of(b.end_s[k], N_REPEATS).median,
               1e3 * spread_of(b.whole_s[k], N_REPEATS).median);
    tagc_local_group_destroy(b.group);
    return 0;
}
