/* What the codes of the direct exchange cost beside the memory floor and on top of selection, and how many bits they take
 * beside the entropy of the positions. One rank of two: it encodes the fragments of both shards, and decodes two
 * contributions to its own one, clearing the sums included.
 *
 * Floor, selection and code take turns in one process: a ratio is the median over the turns of time / floor of the same
 * turn. The floor reads gradient and residual and writes the residual in place: 12 bytes per element. */
#include "codec/code.h"
#include "codec/select.h"
#include "measure.h"

#include <getopt.h>
#include <time.h>

enum { W = 2, MIN_N = 1024, MAX_REPEATS = 1000 };

typedef struct options {
    size_t n;
    int n_threads, n_repeats, cpu;
} options;

typedef struct bench {
    options o;
    tagc_pool *pool;
    size_t shard;
    float *gradient, *residual, *next, *sums; /* (n), (n), (n), (shard) */
} bench;

typedef enum quantity { FLOOR, CLEAR, SELECT, ENCODE, VALIDATE, DECODE, N_QUANTITIES } quantity;

static const char *const value_names[] = {"fp32", "bf16", "int8", "int4", "int2"};

static double now_s(const bench *b) {
    struct timespec now;
    if (!b->o.cpu) return tagc_clock_s();
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- one setting ---- */

typedef struct setting {
    tagc_code_options options;
    const tagc_code *code;
    uint8_t *bodies[W];
    void *scratch, *select_scratch;
    uint32_t *indices;
    float *values;
    tagc_encoded encoded[W];
} setting;

static setting setting_of(const bench *b, double sparsity, int values) {
    size_t k = tagc_select_count(b->shard, sparsity);
    setting s = {.options = {.n = b->shard, .k = k, .sparse = sparsity > 0, .values = values, .block = 128}};
    s.code = tagc_code_of(&s.options);
    for (int d = 0; d < W; d++) s.bodies[d] = take(s.code->max_bytes(&s.options), 1, "body");
    s.scratch = take(s.code->scratch_bytes(&s.options, b->o.n_threads) + 1, 1, "scratch");
    s.select_scratch = take(tagc_select_scratch_bytes(b->shard, k, b->o.n_threads) + 1, 1, "scratch");
    s.indices = take(k, sizeof *s.indices, "indices");
    s.values = take(k, sizeof *s.values, "values");
    return s;
}

static void setting_free(setting *s) {
    for (int d = 0; d < W; d++) tagc_memory_destroy(s->bodies[d]);
    tagc_memory_destroy(s->scratch), tagc_memory_destroy(s->select_scratch);
    tagc_memory_destroy(s->indices), tagc_memory_destroy(s->values);
}

static void select_both(const bench *b, const setting *s) {
    tagc_selection selection;
    for (size_t at = 0; at < W * b->shard; at += b->shard)
        tagc_select(b->gradient + at, b->residual + at, b->next + at, b->shard, s->options.k, s->indices,
                    s->values, s->select_scratch, b->pool, &selection);
}

static void encode_both(const bench *b, setting *s) {
    for (int d = 0; d < W; d++) {
        size_t at = (size_t)d * b->shard;
        s->code->encode(&s->options, b->gradient + at, b->residual + at, b->next + at, 0, s->bodies[d],
                        s->scratch, b->pool, &s->encoded[d]);
    }
}

static void validate_both(const setting *s) {
    for (int d = 0; d < W; d++)
        if (s->code->validate(&s->options, s->bodies[d], s->encoded[d].n_bytes) != TAGC_OK) {
            fprintf(stderr, "bench_codes: %s\n", tagc_last_error());
            exit(1);
        }
}

static void decode_both(const bench *b, const setting *s) {
    tagc_body bodies[W];
    for (int d = 0; d < W; d++) bodies[d] = (tagc_body){s->bodies[d], s->encoded[d].n_bytes, 0};
    s->code->decode(&s->options, bodies, W, 0, 1.0f / W, b->sums, s->scratch, b->pool);
}

static void time_turn(const bench *b, setting *s, double times[N_QUANTITIES]) {
    double start_s[N_QUANTITIES + 1];
    start_s[FLOOR] = now_s(b);
    tagc_time_floor(b->pool, b->gradient, b->sums, b->sums, b->shard);
    tagc_time_floor(b->pool, b->gradient + b->shard, b->sums, b->sums, b->shard);
    start_s[CLEAR] = now_s(b);
    s->code->decode(&s->options, NULL, 0, 0, 1, b->sums, s->scratch, b->pool);
    start_s[SELECT] = now_s(b);
    if (s->options.sparse) select_both(b, s);
    start_s[ENCODE] = now_s(b);
    encode_both(b, s);
    start_s[VALIDATE] = now_s(b);
    validate_both(s);
    start_s[DECODE] = now_s(b);
    decode_both(b, s);
    start_s[N_QUANTITIES] = now_s(b);
    for (int q = 0; q < N_QUANTITIES; q++) times[q] = start_s[q + 1] - start_s[q];
}

static void run(const bench *b, double sparsity, int values) {
    static double times[MAX_REPEATS][N_QUANTITIES], ratios[N_QUANTITIES + 1][MAX_REPEATS];
    setting s = setting_of(b, sparsity, values);
    time_turn(b, &s, times[0]); /* warm up */
    for (int i = 0; i < b->o.n_repeats; i++) {
        time_turn(b, &s, times[i]);
        for (int q = 0; q < N_QUANTITIES; q++) ratios[q][i] = times[i][q] / times[i][FLOOR];
        ratios[ENCODE][i] -= ratios[SELECT][i];
        ratios[N_QUANTITIES][i] = ratios[ENCODE][i] + ratios[DECODE][i];
        ratios[FLOOR][i] = times[i][FLOOR];
    }
    double medians[N_QUANTITIES + 1], n_sent = (double)s.encoded[0].n_sent;
    spread all = {0};
    for (int q = 0; q <= N_QUANTITIES; q++) {
        spread here = spread_of(ratios[q], b->o.n_repeats);
        medians[q] = here.median;
        all = here;
    }
    printf("%6.2f %% %-5s %8.2f %7.3f %7.3f %7.3f %7.3f %7.3f %7.3f (%.3f - %.3f)", 100 * sparsity,
           value_names[values], 1e3 * medians[FLOOR], medians[CLEAR], medians[SELECT], medians[ENCODE],
           medians[VALIDATE], medians[DECODE], medians[N_QUANTITIES], all.quarter, all.three_quarters);
    printf(" %8.3f", 8.0 * (double)s.encoded[0].n_bytes / (double)b->shard);
    if (s.options.sparse) {
        double p = n_sent / (double)b->shard, entropy = -(p * log2(p) + (1 - p) * log2(1 - p)) / p;
        double bits = 8.0 * (double)s.encoded[0].n_index_bytes / n_sent;
        printf(" %8.3f %8.3f %+6.1f %%", bits, entropy, 100 * (bits / entropy - 1));
    }
    printf("\n");
    fflush(stdout);
    setting_free(&s);
}

/* ---- options ---- */

static void print_help(void) {
    printf("Usage: bench_codes [options]\n"
           "Time of the direct exchange's codes on one rank of two, as ratios to the memory floor: reading\n"
           "gradient and residual and writing the residual, measured in the same turns.\n\n"
           "  --n N         elements of the gradient, %d to 2^32 - 1 (default 38633472)\n"
           "  --threads N   1 to 256 (default 1)\n"
           "  --repeats N   turns, 1 to %d (default 15)\n"
           "  --cpu         processor time of the one thread instead of time: for a machine with other work\n"
           "  --help        this text\n"
           "TAGC_CPU=scalar, neon, avx2 or avx512 in the environment chooses the kernels.\n",
           MIN_N, MAX_REPEATS);
}

static options read_options(int argc, char **argv) {
    static const struct option known[] = {
        {"n", required_argument, NULL, 'n'},       {"threads", required_argument, NULL, 't'},
        {"repeats", required_argument, NULL, 'r'}, {"cpu", no_argument, NULL, 'c'},
        {"help", no_argument, NULL, 'h'},          {NULL, 0, NULL, 0}};
    options o = {.n = 38633472, .n_threads = 1, .n_repeats = 15};
    for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        if (c == 'n') o.n = number("--n", optarg, MIN_N, UINT32_MAX);
        if (c == 't') o.n_threads = (int)number("--threads", optarg, 1, 256);
        if (c == 'r') o.n_repeats = (int)number("--repeats", optarg, 1, MAX_REPEATS);
        if (c == 'c') o.cpu = 1;
        if (c == 'h') print_help();
        if (c == 'h' || c == '?') exit(c == 'h' ? 0 : 2);
    }
    if (optind < argc) refuse("an argument", argv[optind], "an option: see --help");
    if (o.cpu && o.n_threads > 1) refuse("--threads", "more than 1", "1 with --cpu");
    return o;
}

int main(int argc, char **argv) {
    static const double sparsities[] = {0.9875, 0.975, 0.95, 0.9, 0.8};
    bench b = {.o = read_options(argc, argv)};
    uint64_t seed = 1;
    b.shard = b.o.n / W / 16 * 16;
    b.gradient = take(b.o.n, sizeof(float), "gradient");
    b.residual = take(b.o.n, sizeof(float), "residual");
    b.next = take(b.o.n, sizeof(float), "next residual");
    b.sums = take(b.shard, sizeof(float), "sums");
    tagc_fill_gradient(b.gradient, b.o.n, &seed);
    tagc_fill_gradient(b.residual, b.o.n, &seed);
    if (tagc_pool_create(b.o.n_threads, &b.pool) != TAGC_OK) {
        fprintf(stderr, "bench_codes: %s\n", tagc_last_error());
        return 1;
    }
    printf("bench_codes: %s, n = %zu, %d thread%s, %d turns%s; ratios to the floor; encoding on top of "
           "selection\n",
           level_in_use(), W * b.shard, b.o.n_threads, b.o.n_threads == 1 ? "" : "s", b.o.n_repeats,
           b.o.cpu ? ", processor time" : "");
    printf("  theta  values floor/ms   clear  select  encode   check  decode  encode + decode           "
           "bits/el  bits/pos  entropy\n");
    for (size_t i = 0; i < sizeof sparsities / sizeof *sparsities; i++) {
        run(&b, sparsities[i], TAGC_FORMAT_FP32);
        run(&b, sparsities[i], TAGC_FORMAT_INT4);
        run(&b, sparsities[i], TAGC_FORMAT_INT2);
    }
    for (int values = TAGC_FORMAT_FP32; values <= TAGC_FORMAT_INT2; values++) run(&b, 0, values);
    tagc_pool_destroy(b.pool);
    return 0;
}
