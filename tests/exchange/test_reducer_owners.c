/* Shards of different sizes: against plain loops over all ranks, the same bits on every rank; planned and counted bytes against
 * the formula of docs/sites.md; and what is refused. */
#include "../repeats.h"
#include "direct_oracle.h"
#include "oracle.h"
#include "ranks.h"

#include "exchange/volume.h"

enum { N_STEPS = 3 };

typedef struct owners_case {
    tagc_reducer_options options;
    int world_size;
    uint64_t owner_elems[MAX_RANKS];
    float *gradients; /* (steps, W, n) */
    float *outputs;   /* (steps, W, n) */
    float *residuals; /* (steps, W, n), or unused */
    tagc_reducer_stats stats[N_STEPS][MAX_RANKS];
} owners_case;

static size_t at(const owners_case *c, size_t step, size_t rank) {
    return (step * (size_t)c->world_size + rank) * (size_t)c->options.n_elems;
}

/* Sizes from the weights, each at least 1. n is a multiple of world_size. */
static owners_case make_case(int world_size, size_t n, const double *weights, uint64_t seed) {
    owners_case c = {.world_size = world_size};
    size_t W = (size_t)world_size, left = n - W;
    double sum = 0;
    for (size_t q = 0; q < W; q++) sum += weights[q];
    for (size_t q = 0; q < W; q++) {
        size_t more = q + 1 == W ? left : (size_t)((double)(n - W) * weights[q] / sum);
        c.owner_elems[q] = 1 + more;
        left -= more;
    }
    tagc_reducer_options_init(&c.options);
    c.options.n_elems = n;
    c.options.output = TAGC_OUTPUT_UNIT;
    c.gradients = malloc(N_STEPS * W * n * sizeof(float));
    c.outputs = malloc(N_STEPS * W * n * sizeof(float));
    c.residuals = malloc(N_STEPS * W * n * sizeof(float));
    assert_true(c.gradients && c.outputs && c.residuals);
    for (size_t step = 0; step < N_STEPS; step++)
        for (size_t r = 0; r < W; r++)
            for (size_t i = 0; i < n; i++)
                c.gradients[at(&c, step, r) + i] = i % 89 == 5 ? 0 : random_gradient(seed + step, (int)r, i);
    return c;
}

static void destroy_case(owners_case *c) {
    free(c->gradients);
    free(c->outputs);
    free(c->residuals);
}

static void run_steps(rank_run *run) {
    owners_case *c = run->shared;
    tagc_reducer *reducer;
    tagc_reducer_options options = c->options;
    uint64_t owner_elems[MAX_RANKS], n_residual;
    memcpy(owner_elems, c->owner_elems, sizeof owner_elems);
    options.owner_elems = owner_elems;
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) return;
    memset(owner_elems, 0xff, sizeof owner_elems); /* _create has copied them */
    for (size_t step = 0; step < N_STEPS; step++) {
        size_t row = at(c, step, (size_t)run->rank);
        tagc_reducer_stats *stats = &c->stats[step][run->rank];
        tagc_reducer_stats_init(stats);
        CHECK(run, tagc_reducer_run(reducer, c->gradients + row, c->outputs + row, stats) == TAGC_OK);
        const float *residual = tagc_reducer_residual(reducer, &n_residual);
        if (residual && CHECK(run, n_residual == options.n_elems))
            memcpy(c->residuals + row, residual, n_residual * sizeof *residual);
    }
    tagc_reducer_destroy(reducer);
}

/* One step of all ranks. residuals (W, n) become those after it. */
static void direct_oracle(const owners_case *c, size_t step, float *residuals, float *sums,
                          uint64_t *n_kept) {
    size_t W = (size_t)c->world_size, n = (size_t)c->options.n_elems, begin = 0;
    for (size_t q = 0; q < W; begin += c->owner_elems[q++]) {
        direct_model m = direct_model_of(&c->options, c->world_size);
        m.shard = (size_t)c->owner_elems[q];
        float *contributions = malloc(W * m.shard * sizeof *contributions);
        for (size_t r = 0; r < W; r++)
            direct_code_fragment(&m, c->gradients + at(c, step, r) + begin,
                                 m.carries ? residuals + r * n + begin : NULL, contributions + r * m.shard,
                                 &n_kept[r]);
        direct_owner(&m, contributions, m.carries ? residuals + q * n + begin : NULL, sums + begin);
        free(contributions);
    }
}

static void dense_oracle(const owners_case *c, size_t step, float *sums) {
    direct_model m = direct_model_of(&c->options, c->world_size);
    for (size_t i = 0; i < c->options.n_elems; i++) {
        sums[i] = 0;
        for (size_t r = 0; r < (size_t)c->world_size; r++)
            sums[i] += direct_narrowed(&m, c->gradients[at(c, step, r) + i]);
        sums[i] = direct_narrowed(&m, sums[i] * m.scale);
    }
}

static void assert_bits(const float *a, const float *b, size_t n, const owners_case *c, const char *what,
                        size_t rank) {
    for (size_t i = 0; i < n; i++)
        if (bits_of(a[i]) != bits_of(b[i]))
            fail_msg("exchange %d, W %d, n %zu, format %d, sparsity %g: %s of rank %zu, element %zu: %.9g, "
                     "expected "
                     "%.9g",
                     c->options.exchange, c->world_size, n, c->options.format, c->options.sparsity, what,
                     rank, i, (double)a[i], (double)b[i]);
}

static void assert_as_oracle(owners_case *c) {
    size_t W = (size_t)c->world_size, n = (size_t)c->options.n_elems;
    int is_direct = c->options.exchange == TAGC_EXCHANGE_DIRECT;
    int carries = is_direct && direct_model_of(&c->options, c->world_size).carries;
    float *residuals = malloc(W * n * sizeof *residuals), *sums = malloc(n * sizeof *sums);
    rank_run runs[MAX_RANKS];
    for (size_t i = 0; i < W * n; i++) residuals[i] = TAGC_ZERO_RESIDUAL;
    run_ranks(c->world_size, run_steps, c, NULL, runs);
    for (size_t step = 0; step < N_STEPS; step++) {
        uint64_t n_kept[MAX_RANKS] = {0};
        if (is_direct)
            direct_oracle(c, step, residuals, sums, n_kept);
        else
            dense_oracle(c, step, sums);
        for (size_t r = 0; r < W; r++) {
            assert_bits(c->outputs + at(c, step, r), sums, n, c, "output", r);
            if (carries) assert_bits(c->residuals + at(c, step, r), residuals + r * n, n, c, "residual", r);
            if (is_direct) assert_int_equal(c->stats[step][r].n_kept, n_kept[r]);
        }
    }
    free(residuals);
    free(sums);
}

/* The most unequal, a slow rank with next to nothing, and any. */
static const double weights[][MAX_RANKS] = {
    {1, 0, 0, 0, 0, 0, 0, 0}, {0, 1, 1, 1, 1, 1, 1, 1}, {5, 1, 3, 2, 7, 1, 4, 2}};

static void direct_equals_the_oracle(void **state) {
    (void)state;
    static const int worlds[] = {2, 3, 4, 8};
    static const double sparsities[] = {0, 0.95, 0.5};
    enum {
        N_WORLDS = REPEATS(4, 3, 3),
        EACH = REPEATS(1, 1, 2)
    }; /* many threads take their time under sanitizers */
    for (int w = 0; w < N_WORLDS; w++)
        for (int format = TAGC_FORMAT_FP32; format <= TAGC_FORMAT_SIGN; format++)
            for (int i = (w + format) % EACH; i < 3; i += EACH) {
                size_t n = (size_t[]){1000, 333, 7}[(w + format) % 3] * (size_t)worlds[w];
                owners_case c =
                    make_case(worlds[w], n, weights[(w + format + i) % 3], (uint64_t)(w * 100 + format));
                c.options.format = format;
                c.options.sparsity = sparsities[i];
                c.options.op = (w + i) % 2;
                c.options.n_threads = 1 + (format + i) % 3;
                assert_as_oracle(&c);
                destroy_case(&c);
            }
}

/* So large that a reducer sends the fragments of a step in several messages. */
static void several_batches_equal_the_oracle(void **state) {
    (void)state;
    owners_case c = make_case(4, 4 * 270000, weights[2], 77);
    c.options.format = TAGC_FORMAT_INT4;
    c.options.sparsity = 0.9;
    assert_as_oracle(&c);
    destroy_case(&c);
}

/* Chunks have 262144 elements, so that shards of more end in different chunks. */
static void dense_equals_the_oracle(void **state) {
    (void)state;
    for (int variant = 0; variant < 8; variant++) {
        int world_size = variant % 2 ? 4 : 3;
        size_t n = (size_t)world_size * (variant < REPEATS(2, 2, 1) ? 300000 : 500);
        owners_case c = make_case(world_size, n, weights[variant % 3], (uint64_t)variant);
        c.options.exchange = TAGC_EXCHANGE_DENSE;
        c.options.format = variant / 2 % 2 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
        c.options.op = TAGC_OP_SUM;
        c.options.n_threads = 1 + variant % 3;
        assert_as_oracle(&c);
        destroy_case(&c);
    }
}

/* What went in has come out or is in a residual. */
static void nothing_is_lost(void **state) {
    (void)state;
    owners_case c = make_case(4, 4000, weights[1], 5);
    size_t n = (size_t)c.options.n_elems;
    rank_run runs[MAX_RANKS];
    run_ranks(4, run_steps, &c, NULL, runs);
    double worst = 0, largest = 0;
    for (size_t i = 0; i < n; i++) {
        double in = 0, out = 0;
        for (size_t step = 0; step < N_STEPS; step++) {
            for (size_t r = 0; r < 4; r++) in += (double)c.gradients[at(&c, step, r) + i];
            out += 4 * (double)c.outputs[at(&c, step, 0) + i];
        }
        for (size_t r = 0; r < 4; r++) out += (double)c.residuals[at(&c, N_STEPS - 1, r) + i];
        worst = fmax(worst, fabs(in - out));
        largest = fmax(largest, fabs(in));
    }
    if (!(worst <= 1e-6 * largest)) fail_msg("%g is missing, of up to %g", worst, largest);
    destroy_case(&c);
}

/* ---- bytes ---- */

/* What `rank` sends, besides headers, with a bits per element to an owner and as many back. */
static double formula(const owners_case *c, size_t rank, double bits) {
    double own = (double)c->owner_elems[rank], n = (double)c->options.n_elems, n_others = c->world_size - 1;
    return ((n - own) + n_others * own) * bits / 8;
}

static void check_bytes(owners_case *c, double bits) {
    rank_run runs[MAX_RANKS];
    run_ranks(c->world_size, run_steps, c, NULL, runs);
    tagc_reducer_options options = c->options;
    options.owner_elems = c->owner_elems;
    for (int r = 0; r < c->world_size; r++) {
        tagc_volume planned;
        tagc_volume_data data = {.kept_density = 1, .union_density = 1};
        const uint64_t *sent = c->stats[N_STEPS - 1][r].n_bytes_sent;
        assert_int_equal(tagc_reducer_volume(&options, c->world_size, r, &data, &planned), TAGC_OK);
        for (int leg = 0; leg < TAGC_N_LEGS; leg++)
            if (planned.n_bytes[leg] != (double)sent[leg])
                fail_msg("exchange %d, rank %d: %s planned %g, sent %llu", options.exchange, r,
                         tagc_leg_name(leg), planned.n_bytes[leg], (unsigned long long)sent[leg]);
        double values = (double)(sent[TAGC_LEG_VALUES] + sent[TAGC_LEG_RESULT]),
               expected = formula(c, (size_t)r, bits);
        /* Each body ends in a whole byte and has the scale of a block that is not full. */
        if (fabs(values - expected) > 4.0 * 2 * c->world_size)
            fail_msg("exchange %d, format %d, rank %d: %g bytes, by the formula %g", options.exchange,
                     options.format, r, values, expected);
        assert_true(sent[TAGC_LEG_CONTROL] <= (uint64_t)(3 * 64 * (c->world_size - 1)));
    }
}

static void bytes_follow_the_formula(void **state) {
    (void)state;
    for (int variant = 0; variant < 2 * 3 * 3; variant++) {
        int world_size = variant % 2 ? 4 : 2;
        owners_case c = make_case(world_size, (size_t)world_size * 9000, weights[variant / 2 % 3], 3);
        c.options.sparsity = 0;
        c.options.format = TAGC_FORMAT_INT4;
        c.options.block = 32;
        double bits = 4.5;
        if (variant / 6 == 1) {
            c.options.format = TAGC_FORMAT_BF16;
            c.options.block = 0;
            bits = 16;
        } else if (variant / 6 == 2) {
            c.options.exchange = TAGC_EXCHANGE_DENSE;
            c.options.format = TAGC_FORMAT_FP32;
            c.options.block = 0;
            bits = 32;
        }
        check_bytes(&c, bits);
        destroy_case(&c);
    }
}

/* Equal sizes are no other exchange: the same messages as without the option. */
static void equal_sizes_are_the_default(void **state) {
    (void)state;
    static const double equal[MAX_RANKS] = {1, 1, 1, 1};
    owners_case c = make_case(4, 4000, equal, 9);
    for (int q = 0; q < 4; q++) c.owner_elems[q] = 1000;
    tagc_volume planned, without;
    tagc_volume_data data = {.kept_density = 0.05, .union_density = 0.2};
    tagc_reducer_options options = c.options;
    options.owner_elems = c.owner_elems;
    assert_int_equal(tagc_reducer_volume(&options, 4, 0, &data, &planned), TAGC_OK);
    options.owner_elems = NULL;
    assert_int_equal(tagc_reducer_volume(&options, 4, 0, &data, &without), TAGC_OK);
    assert_true(planned.eager_bytes > 0 && planned.eager_bytes == without.eager_bytes);
    assert_memory_equal(planned.n_bytes, without.n_bytes, sizeof planned.n_bytes);
    assert_memory_equal(planned.n_transfers, without.n_transfers, sizeof planned.n_transfers);
    assert_as_oracle(&c);
    destroy_case(&c);
}

/* ---- refused ---- */

typedef struct refusal {
    tagc_reducer_options options;
    uint64_t owner_elems[MAX_RANKS];
    int other_at; /* a rank that has the sizes of ranks 0 and 1 exchanged; -1: none */
    tagc_status status;
    const char *text;
} refusal;

static void create(rank_run *run) {
    refusal *c = run->shared;
    uint64_t mine[MAX_RANKS];
    tagc_reducer_options options = c->options;
    tagc_reducer *reducer;
    memcpy(mine, c->owner_elems, sizeof mine);
    if (run->rank == c->other_at) {
        mine[0] = c->owner_elems[1];
        mine[1] = c->owner_elems[0];
    }
    options.owner_elems = mine;
    keep_status(run, tagc_reducer_create(run->comm, &options, &reducer));
    tagc_reducer_destroy(reducer);
}

static void refused(void **state) {
    (void)state;
    refusal cases[] = {
        {.owner_elems = {10, 20, 30, 41}, .text = "owner_elems[3] is 41"},
        {.owner_elems = {10, 20, 30, 39}, .text = "owner_elems[3] is 39"},
        {.owner_elems = {0, 20, 30, 50}, .text = "owner_elems[0] is 0"},
        {.owner_elems = {40, 60, 30, 1}, .text = "owner_elems[1] is 60"},
        {.owner_elems = {UINT64_MAX, 20, 30, 51}, .text = "owner_elems[0] is 18446744073709551615"},
        {.owner_elems = {10, 20, 30, 40}, .text = "output", .status = TAGC_ERR_UNSUPPORTED},
        {.owner_elems = {10, 20, 30, 40}, .text = "ranks_per_host", .status = TAGC_ERR_UNSUPPORTED},
        {.owner_elems = {10, 20, 30, 40}, .text = "(sketch)", .status = TAGC_ERR_UNSUPPORTED},
        {.owner_elems = {10, 20, 30, 40}, .text = "rank 2 has other values", .status = TAGC_ERR_MISMATCH},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        refusal *c = &cases[i];
        rank_run runs[MAX_RANKS];
        tagc_reducer_options_init(&c->options);
        c->options.n_elems = 100;
        c->options.output = i == 5 ? TAGC_OUTPUT_SHARD : TAGC_OUTPUT_UNIT;
        c->options.ranks_per_host = i == 6 ? 2 : 1;
        if (i == 7) c->options.exchange = TAGC_EXCHANGE_SKETCH;
        c->other_at = i == 8 ? 2 : -1;
        run_ranks(4, create, c, NULL, runs);
        for (int r = 0; r < 4; r++) {
            assert_int_equal(runs[r].status, c->status ? c->status : TAGC_ERR_ARGUMENT);
            if (!strstr(runs[r].text, c->text)) fail_msg("case %zu: \"%s\"", i, runs[r].text);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(direct_equals_the_oracle),
        cmocka_unit_test(several_batches_equal_the_oracle),
        cmocka_unit_test(dense_equals_the_oracle),
        cmocka_unit_test(nothing_is_lost),
        cmocka_unit_test(bytes_follow_the_formula),
        cmocka_unit_test(equal_sizes_are_the_default),
        cmocka_unit_test(refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
