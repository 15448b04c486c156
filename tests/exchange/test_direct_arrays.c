/* The arrays of a direct reducer belong to its batches: while no batch runs, gradient, output, residual and spare lie in protected
 * pages. So what another device needs is all in one maker of batches (codec/batch.h). */
#include "../lengths.h"
#include "exchange/direct/direct.h"
#include "exchange/options.h"
#include "ranks.h"

#include <sys/mman.h>
#include <unistd.h>

enum { N_STEPS = 3, N_ARRAYS = 4 };

/* ---- memory that opens while a batch runs ---- */

typedef struct arrays {
    tagc_reducer *reducer;
    float *of[N_ARRAYS];
    size_t n_bytes; /* of each, whole pages */
    int n_opened;
} arrays;

static float *pages(size_t n_bytes) {
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static void protect(const arrays *a, int how) {
    for (int i = 0; i < N_ARRAYS; i++)
        if (mprotect(a->of[i], a->n_bytes, how) != 0) abort();
}

static arrays all[MAX_RANKS];

static int is_of(const tagc_reducer *r, const tagc_batch *batch) {
    for (int i = 0; i < TAGC_N_BATCHES; i++)
        if (tagc_direct_of(r)->batches.made[i] == batch) return 1;
    return 0;
}

static arrays *arrays_of(const tagc_batch *batch) {
    for (int r = 0; r < MAX_RANKS; r++) {
        const tagc_reducer *reducer = __atomic_load_n(&all[r].reducer, __ATOMIC_ACQUIRE);
        if (reducer && is_of(reducer, batch)) return &all[r];
    }
    abort();
}

static tagc_status point(tagc_batch *batch, const tagc_batch_row *rows, tagc_batch_result *results) {
    return tagc_batch_cpu.point(batch, rows, results);
}

static size_t work_bytes(tagc_batch_kind kind, const tagc_batch_row *rows, size_t n_rows, int n_threads) {
    return tagc_batch_cpu.work_bytes(kind, rows, n_rows, n_threads);
}

static tagc_status run_open(tagc_batch *batch) {
    arrays *a = arrays_of(batch);
    a->n_opened++;
    protect(a, PROT_READ | PROT_WRITE);
    tagc_status status = tagc_batch_cpu.run(batch);
    protect(a, PROT_NONE);
    return status;
}

static const tagc_batch_maker maker = {.work_bytes = work_bytes, .point = point, .run = run_open};

static tagc_status check(void *context, const void *array, const char *what) {
    (void)context, (void)array, (void)what;
    return TAGC_OK;
}

static const tagc_arrays guarded = {
    .maker = &maker, .is_here = 1, .check = check}; /* all that a step needs */

/* ---- the same steps with and without ---- */

static void put(tagc_reducer *r, const tagc_arrays *in, void *residual, void *spare) {
    r->arrays = in;
    if (!r->residual) return;
    r->residual = residual;
    r->spares->free[r->spares->n_free - 1] = spare; /* the next to be taken */
}

static void body(rank_run *run) {
    const tagc_reducer_options *options = run->shared;
    arrays *a = &all[run->rank];
    size_t page = (size_t)sysconf(_SC_PAGESIZE), n = (size_t)options->n_elems;
    tagc_reducer *plain, *reducer;
    a->n_opened = 0;
    a->n_bytes = (n * sizeof(float) + page - 1) / page * page;
    for (int i = 0; i < N_ARRAYS; i++)
        if (!CHECK(run, a->of[i] = pages(a->n_bytes))) return;
    float *gradient = a->of[0], *output = a->of[1], *expected = calloc(n, sizeof *expected),
          *copy = malloc(n * sizeof *copy);
    if (!CHECK(run, tagc_reducer_create(run->comm, options, &plain) == TAGC_OK)) return;
    if (!CHECK(run, tagc_reducer_create(run->comm, options, &reducer) == TAGC_OK)) return;
    size_t n_output = (size_t)tagc_output_elems(&reducer->options, run->world_size);
    for (int step = 0; step < N_STEPS; step++) {
        for (size_t i = 0; i < n; i++) copy[i] = random_gradient((uint64_t)step, run->rank, i);
        memcpy(gradient, copy, n * sizeof *copy);
        CHECK(run, run_reducer(plain, copy, expected, NULL) == TAGC_OK);

        size_t n_stored = (size_t)tagc_reducer_stored_bytes(reducer);
        void *residual = reducer->residual,
             *spare = reducer->spares ? reducer->spares->free[reducer->spares->n_free - 1] : NULL;
        if (residual) memcpy(a->of[2], residual, n_stored);
        put(reducer, &guarded, a->of[2], a->of[3]);
        __atomic_store_n(&a->reducer, reducer, __ATOMIC_RELEASE);
        protect(a, PROT_NONE);
        CHECK(run, run_reducer(reducer, gradient, output, NULL) == TAGC_OK);
        protect(a, PROT_READ | PROT_WRITE);
        __atomic_store_n(&a->reducer, NULL, __ATOMIC_RELEASE);
        if (residual) memcpy(residual, reducer->residual, n_stored);
        put(reducer, &tagc_host_arrays, residual, spare);

        CHECK(run, memcmp(output, expected, n_output * sizeof *output) == 0);
        if (residual) CHECK(run, memcmp(residual, plain->residual, n_stored) == 0);
    }
    int n_sums = options->output ? run->world_size : 0; /* the own ones encoded, all others' decoded */
    CHECK(run, a->n_opened >= N_STEPS * (run->world_size + 1 + n_sums));
    tagc_reducer_destroy(reducer);
    tagc_reducer_destroy(plain);
    for (int i = 0; i < N_ARRAYS; i++) munmap(a->of[i], a->n_bytes);
    free(expected), free(copy);
}

TEST(test_batches_alone_touch_the_arrays) {
    for (int variant = 0; variant < 24; variant++) {
        int world_size = 1 + variant % 4;
        tagc_reducer_options options;
        tagc_reducer_options_init(&options);
        options.exchange = TAGC_EXCHANGE_DIRECT;
        options.n_elems = (uint64_t)world_size * (variant % 3 ? 700 : 40000);
        options.sparsity = variant % 5 == 4 ? 0 : 0.9;
        options.format = variant % 5;
        options.output = variant / 2 % 2;
        options.n_threads = 1 + variant % 2;
        options.residual = residual_of(variant);
        run_ranks(world_size, body, &options);
    }
}
