/* The arrays of a direct reducer belong to its codes: while no code is at work, gradient, output, residual and spare lie in
 * protected pages. What another device would need (lib/gpu/README.md) is then in one table. */
#include "exchange/direct/direct.h"
#include "ranks.h"

#include <sys/mman.h>
#include <unistd.h>

enum { N_STEPS = 3, N_ARRAYS = 4 };

/* ---- memory that opens while a code runs ---- */

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

/* Codes get their options out of the reducer. */
static arrays all[MAX_RANKS];

static int is_of(const tagc_direct *d, const tagc_code_options *options) {
    return options == &d->fragment || options == &d->sums;
}

static arrays *open_arrays(const tagc_code_options *options) {
    for (int r = 0; r < MAX_RANKS; r++) {
        const tagc_reducer *reducer = __atomic_load_n(&all[r].reducer, __ATOMIC_ACQUIRE);
        if (!reducer || !is_of(tagc_direct_of(reducer), options)) continue;
        all[r].n_opened++;
        protect(&all[r], PROT_READ | PROT_WRITE);
        return &all[r];
    }
    abort();
}

static void close_arrays(const arrays *a) {
    protect(a, PROT_NONE);
}

static size_t max_bytes(const tagc_code_options *o) {
    return tagc_code_of(o)->max_bytes(o);
}

static size_t scratch_bytes(const tagc_code_options *o, int n_threads) {
    return tagc_code_of(o)->scratch_bytes(o, n_threads);
}

static tagc_status validate(const tagc_code_options *o, const uint8_t *body, size_t n_bytes) {
    return tagc_code_of(o)->validate(o, body, n_bytes);
}

static void encode(const tagc_code_options *o, const float *gradient, const float *residual_in,
                   float *residual_out, uint8_t *body, void *scratch, tagc_pool *pool, tagc_encoded *out) {
    arrays *a = open_arrays(o);
    tagc_code_of(o)->encode(o, gradient, residual_in, residual_out, body, scratch, pool, out);
    close_arrays(a);
}

static void encode_sums(const tagc_code_options *o, float *sums, float *error, float unscale, uint8_t *body,
                        void *scratch, tagc_pool *pool, tagc_encoded *out) {
    arrays *a = open_arrays(o);
    tagc_code_of(o)->encode_sums(o, sums, error, unscale, body, scratch, pool, out);
    close_arrays(a);
}

static int decode(const tagc_code_options *o, const tagc_body *bodies, int n_bodies, int add, float scale,
                  float *sums, void *scratch, tagc_pool *pool) {
    arrays *a = open_arrays(o);
    int nonfinite = tagc_code_of(o)->decode(o, bodies, n_bodies, add, scale, sums, scratch, pool);
    close_arrays(a);
    return nonfinite;
}

static const tagc_code guarded = {.max_bytes = max_bytes,
                                  .scratch_bytes = scratch_bytes,
                                  .encode = encode,
                                  .encode_sums = encode_sums,
                                  .validate = validate,
                                  .decode = decode};

/* ---- the same steps with and without ---- */

static void put(tagc_reducer *r, const tagc_code *fragment_code, const tagc_code *sums_code, float *residual,
                float *spare) {
    tagc_direct_of(r)->fragment_code = fragment_code;
    tagc_direct_of(r)->sums_code = sums_code;
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
    size_t n_output = (size_t)reducer->exchange->output_elems(options, run->world_size);
    for (int step = 0; step < N_STEPS; step++) {
        for (size_t i = 0; i < n; i++) copy[i] = random_gradient((uint64_t)step, run->rank, i);
        memcpy(gradient, copy, n * sizeof *copy);
        CHECK(run, tagc_reducer_run(plain, copy, expected, NULL) == TAGC_OK);

        float *residual = reducer->residual,
              *spare = reducer->spares ? reducer->spares->free[reducer->spares->n_free - 1] : NULL;
        const tagc_code *codes[] = {tagc_direct_of(reducer)->fragment_code,
                                    tagc_direct_of(reducer)->sums_code};
        if (residual) memcpy(a->of[2], residual, n * sizeof *residual);
        put(reducer, &guarded, &guarded, a->of[2], a->of[3]);
        __atomic_store_n(&a->reducer, reducer, __ATOMIC_RELEASE);
        protect(a, PROT_NONE);
        CHECK(run, tagc_reducer_run(reducer, gradient, output, NULL) == TAGC_OK);
        protect(a, PROT_READ | PROT_WRITE);
        __atomic_store_n(&a->reducer, NULL, __ATOMIC_RELEASE);
        if (residual) memcpy(residual, reducer->residual, n * sizeof *residual);
        put(reducer, codes[0], codes[1], residual, spare);

        CHECK(run, memcmp(output, expected, n_output * sizeof *output) == 0);
        if (residual) CHECK(run, memcmp(residual, plain->residual, n * sizeof *residual) == 0);
    }
    int n_sums = options->output ? run->world_size : 0; /* the own ones encoded, all others' decoded */
    CHECK(run, a->n_opened >= N_STEPS * (run->world_size + 1 + n_sums));
    tagc_reducer_destroy(reducer);
    tagc_reducer_destroy(plain);
    for (int i = 0; i < N_ARRAYS; i++) munmap(a->of[i], a->n_bytes);
    free(expected), free(copy);
}

static void test_codes_alone_touch_the_arrays(void **state) {
    (void)state;
    for (int variant = 0; variant < 24; variant++) {
        int world_size = 1 + variant % 4;
        tagc_reducer_options options;
        rank_run runs[MAX_RANKS];
        tagc_reducer_options_init(&options);
        options.exchange = TAGC_EXCHANGE_DIRECT;
        options.n_elems = (uint64_t)world_size * (variant % 3 ? 700 : 40000);
        options.sparsity = variant % 5 == 4 ? 0 : 0.9;
        options.format = variant % 6;
        options.output = variant / 2 % 2;
        options.n_threads = 1 + variant % 2;
        run_ranks(world_size, body, &options, NULL, runs);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_codes_alone_touch_the_arrays)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
