/* Kernels of the codec, executed by the harness, against the codec of the processor: the same bytes, residuals, sums and
 * verdicts, bit for bit, for rows of both codes together in one batch. */
#define RANDOM_SEED 31
#include "../../codec/random.h"
#ifdef TAGC_CUDA_HARNESS
#include "harness.h"
#else /* the same on a device: scripts/gpu.sh */
#include <cuda_runtime.h>
#endif
extern "C" {
#include "codec/bf16.h"
#include "codec/delta.h"
#include "codec/elements.h"
#include "codec/residual.h"
#include "codec/select.h"
#include "core/clock.h"
#include "core/memory.h"
#include "exchange/blocks.h"
#include "gpu/maker.h"
const tagc_maker *tagc_cuda_maker(void);
}

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#ifndef TAGC_CUDA_HARNESS /* a device is fast: rows large enough to be sampled, and many */
enum { N_SMALL = 300, N_LARGE = 60, N_MISLED = 20, N_HUGE = 3, LARGE = 400000 };
#elif defined(HARNESS_THREAD_SANITIZER)
enum { N_SMALL = 120, N_LARGE = 6, N_MISLED = 5, N_HUGE = 0, LARGE = 40000 };
#elif defined(HARNESS_ADDRESS_SANITIZER)
enum { N_SMALL = 600, N_LARGE = 20, N_MISLED = 20, N_HUGE = 0, LARGE = 40000 };
#elif TAGC_CUDA_THREADS > 64
enum { N_SMALL = 60, N_LARGE = 6, N_MISLED = 5, N_HUGE = 0, LARGE = 40000 };
#else
enum { N_SMALL = 600, N_LARGE = 30, N_MISLED = 40, N_HUGE = 3, LARGE = 40000 };
#endif

extern "C" const char *__tsan_default_options();
extern "C" const char *__tsan_default_options() {
    return "halt_on_error=1:atexit_sleep_ms=0";
}

static const char *now = "?"; /* what is tested */
static int trial_now;

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s, trial %d: %s (last error: %s)\n", __FILE__, __LINE__, now,           \
                    trial_now, #condition, tagc_last_error());                                               \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

/* Memory that both makers reach. */
#ifdef TAGC_CUDA_HARNESS
static void *take_memory(size_t n_bytes) {
    void *bytes = nullptr;
    return posix_memalign(&bytes, TAGC_ALIGNMENT, n_bytes ? n_bytes : 1) ? nullptr : bytes;
}
static void give_memory(void *bytes) {
    free(bytes);
}
static int has_run() {
    return 1;
}
static void configure(uint64_t seed, unsigned n_resident) {
    harness::configure(seed, n_resident);
}
#else
static void *take_memory(size_t n_bytes) {
    void *bytes = nullptr;
    return cudaMallocManaged(&bytes, n_bytes ? n_bytes : 1) == cudaSuccess ? bytes : nullptr;
}
static void give_memory(void *bytes) {
    (void)cudaFree(bytes);
}
static int has_run() {
    return cudaDeviceSynchronize() == cudaSuccess;
}
static void configure(uint64_t, unsigned) {
}
#endif

/* Exactly n of them in an allocation of its own, `offset` of them into it. */
template <typename T> struct array {
    T *memory = nullptr;
    size_t n = 0, offset = 0;
    array() = default;
    array(const array &) = delete;
    ~array() {
        give_memory(memory);
    }
    void make(size_t count, size_t shift) {
        give_memory(memory);
        n = count;
        offset = shift;
        memory = static_cast<T *>(take_memory((n + offset) * sizeof(T)));
        CHECK(memory);
        memset(static_cast<void *>(memory), 0xee, (n + offset) * sizeof(T));
    }
    T *at() const {
        return memory + offset;
    }
    void copy(const array &from) {
        make(from.n, from.offset);
        memcpy(at(), from.at(), n * sizeof(T));
    }
    /* Bit for bit; but a NaN is a NaN. */
    int equals(const array &other) const {
        if (n != other.n) return 0;
        for (size_t i = 0; i < n; i++) {
            const T a = at()[i], b = other.at()[i];
            if (memcmp(&a, &b, sizeof a) != 0 && (a == a || b == b)) return 0;
        }
        return 1;
    }
};

/* ---- inputs ---- */

enum { HEAVY, TIES, ZEROS, FEW, DENORMALS, HUGE_ONES, CLUMPED, OUTLIERS, ALIKE, N_FILLS };

static float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static float drawn(int kind, size_t i, size_t begin) {
    const float sign = random_below(2) ? 1.0f : -1.0f;
    switch (kind) {
    case HEAVY:
        return random_normal() * expf(random_normal());
    case TIES:
        return (float)((int)random_below(5) - 2);
    case ZEROS:
        return 0.0f * sign;
    case FEW:
        return random_below(40) ? 0.0f : random_normal();
    case DENORMALS:
        return float_of_bits((uint32_t)random_below(1u << (1 + random_below(24)))) * sign;
    case HUGE_ONES:
        return sign * (random_below(4) ? FLT_MAX / 2 : random_normal());
    case CLUMPED:
        return random_normal() * (i >= begin && i < begin + 900 ? 1000.0f : 1.0f);
    case OUTLIERS:
        return random_normal() * (random_below(200) ? 1e-12f : 1e15f);
    default:
        return sign * 0.25f;
    }
}

static void fill(int kind, const array<float> &x) {
    const size_t begin = x.n ? random_below(x.n) : 0;
    for (size_t i = 0; i < x.n; i++) x.at()[i] = drawn(kind, i, begin);
}

static void random_formats(tagc_code_options *o) {
    static const int residuals[] = {TAGC_FORMAT_FP32, TAGC_FORMAT_INT8, TAGC_FORMAT_INT4};
    o->residual = residuals[random_below(3)];
    o->gradient = (int)random_below(TAGC_FORMAT_BF16 + 1);
}

static tagc_code_options random_options(size_t most) {
    static const int blocks[] = {16, 32, 128, 512, 4096};
    tagc_code_options o = {};
    o.n = random_below(30) ? random_below(most) : random_below(3);
    o.k = o.n;
    o.values = (int)random_below(5);
    o.block = blocks[random_below(random_below(4) ? 3 : 5)];
    o.sparse = random_below(3) != 0;
    if (o.sparse && random_below(12)) o.k = random_below(random_below(4) ? o.n / 10 + 1 : o.n + 1);
    random_formats(&o);
    int has_zero = o.values != TAGC_FORMAT_INT2; /* int2 is not rounded at random */
    o.is_stochastic = !o.sparse && has_zero && random_below(4) == 0;
    return o;
}

/* ---- one maker and another ---- */

static char *aligned(char *bytes) {
    return bytes + (TAGC_ALIGNMENT - (uintptr_t)bytes % TAGC_ALIGNMENT) % TAGC_ALIGNMENT;
}

static std::vector<tagc_batch_result> run_batch(const tagc_batch_maker *maker, tagc_batch_kind kind,
                                                const std::vector<tagc_batch_row> &rows) {
    array<char> work;
    array<tagc_batch_result> results;
    tagc_batch *batch;
    results.make(rows.size(), 0);
    work.make(maker->work_bytes(kind, rows.data(), rows.size(), 1) + TAGC_ALIGNMENT, 0);
    CHECK(maker->create(kind, rows.data(), rows.size(), results.at(), aligned(work.at()), nullptr, nullptr,
                        &batch) == TAGC_OK);
    CHECK(maker->run(batch) == TAGC_OK && has_run());
    maker->destroy(batch);
    return std::vector<tagc_batch_result>(results.at(), results.at() + rows.size());
}

/* The arrays of one row, once for each maker: gradient and residuals as they are stored. */
struct fragment {
    array<uint8_t> gradient, residual, next, body;
    array<float> sums;
    uint32_t seed = 0;
    int in_place = 0, has_residual = 1;
};

static void copy(fragment *to, const fragment *from) {
    to->gradient.copy(from->gradient);
    to->residual.copy(from->residual);
    to->next.copy(from->next);
    to->sums.copy(from->sums);
    to->body.copy(from->body);
    to->seed = from->seed;
    to->in_place = from->in_place;
    to->has_residual = from->has_residual;
}

static size_t random_offset() {
    return random_below(2) ? 0 : random_below(16);
}

static size_t size_of(int format) {
    return format == TAGC_FORMAT_BF16 ? sizeof(uint16_t) : sizeof(float);
}

/* Integers lie at multiples of TAGC_ALIGNMENT. */
static void make_stored(int format, size_t n, size_t offset, array<uint8_t> *row) {
    row->make(tagc_residual_bytes(format, n), format == TAGC_FORMAT_FP32 ? offset * sizeof(float) : 0);
}

static void put_gradient(const tagc_code_options *o, const array<float> &values, fragment *f) {
    void *to = f->gradient.at();
    if (o->gradient == TAGC_FORMAT_BF16)
        tagc_bf16_narrow(values.at(), static_cast<uint16_t *>(to), o->n);
    else if (o->n)
        memcpy(to, values.at(), o->n * sizeof(float));
}

static void put_residual(const tagc_code_options *o, const array<float> &values, fragment *f) {
    tagc_residual_write(o->residual, o->n, values.at(), 0, o->n, 7, f->residual.at());
}

static void make_fragment(const tagc_code_options *o, int kind, fragment *f) {
    const size_t offset = random_offset();
    auto place = [offset] { return random_below(2) ? offset : random_offset(); };
    array<float> values;
    values.make(o->n, 0);
    f->gradient.make(o->n * size_of(o->gradient), place() * size_of(o->gradient));
    make_stored(o->residual, o->n, place(), &f->residual);
    make_stored(o->residual, o->n, place(), &f->next);
    f->sums.make(o->n, place());
    fill(kind, values);
    put_gradient(o, values, f);
    fill(kind == HUGE_ONES || kind == ALIKE ? (int)ZEROS : kind, values);
    put_residual(o, values, f);
    f->body.make(tagc_code_of(o)->max_bytes(o), random_below(8));
    f->seed = (uint32_t)random_u64();
    f->in_place = o->residual == TAGC_FORMAT_FP32 && o->gradient == TAGC_FORMAT_FP32 && random_below(2);
    f->has_residual = o->sparse || (!o->is_stochastic && random_below(4));
}

static tagc_batch_row encode_row(const tagc_code_options *o, const fragment *f) {
    tagc_batch_row row = {};
    row.options = *o;
    row.gradient = f->gradient.at();
    row.residual_in = f->has_residual ? f->residual.at() : nullptr;
    row.residual_out = f->has_residual ? (f->in_place ? f->residual.at() : f->next.at()) : nullptr;
    row.seed = f->seed;
    row.body = f->body.at();
    return row;
}

static void check_encoded(const tagc_encoded *a, const tagc_encoded *b, const fragment *fa,
                          const fragment *fb) {
    CHECK(a->nonfinite == b->nonfinite);
    CHECK(a->n_sent == b->n_sent);
    CHECK(a->n_index_bytes == b->n_index_bytes);
    CHECK(a->n_bytes == b->n_bytes);
    CHECK(memcmp(fa->body.at(), fb->body.at(), a->n_bytes) == 0);
}

struct batch_case {
    std::vector<tagc_code_options> options;
    std::vector<fragment> cpu, cuda;
    explicit batch_case(size_t n) : options(n), cpu(n), cuda(n) {
    }
};

static void spoil(const array<float> &x) {
    static const float bad[] = {NAN, INFINITY, -INFINITY, FLT_MAX};
    if (x.n) x.at()[random_below(x.n)] = bad[random_below(4)];
}

/* One value of n becomes infinite, not a number, or about the largest that there is. */
static void spoil_stored(int format, size_t n, const array<uint8_t> &row) {
    static const uint32_t bad[] = {0x7fc00000u, 0x7f800000u, 0xff800000u, 0x7f7f0000u};
    const uint32_t bits = bad[random_below(4)];
    const size_t at = n ? random_below(n) : 0;
    if (n && format == TAGC_FORMAT_FP32) memcpy(row.at() + 4 * at, &bits, 4);
    if (n && format == TAGC_FORMAT_BF16) memcpy(row.at() + 2 * at, (const char *)&bits + 2, 2);
    if (n && format > TAGC_FORMAT_BF16) /* the exponent of a block: its codes of two and more overflow */
        row.at()[at / (format == TAGC_FORMAT_INT8 ? 128 : 32)] = 254;
}

static void make_case(batch_case *c, size_t most, int kind) {
    for (size_t i = 0; i < c->options.size(); i++) {
        const tagc_code_options *o = &c->options[i];
        c->options[i] = random_options(most);
        make_fragment(o, kind < 0 ? (int)random_below(N_FILLS) : kind, &c->cpu[i]);
        if (random_below(12) == 0) spoil_stored(o->gradient, o->n, c->cpu[i].gradient);
        if (random_below(12) == 0) spoil_stored(o->residual, o->n, c->cpu[i].residual);
        copy(&c->cuda[i], &c->cpu[i]);
    }
}

static std::vector<tagc_batch_row> rows_of(const batch_case *c, const std::vector<fragment> &fragments) {
    std::vector<tagc_batch_row> rows;
    for (size_t i = 0; i < c->options.size(); i++) rows.push_back(encode_row(&c->options[i], &fragments[i]));
    return rows;
}

/* ---- encode ---- */

static void check_encode(batch_case *c, std::vector<tagc_batch_result> *results) {
    now = "encode";
    *results = run_batch(&tagc_batch_cpu, TAGC_BATCH_ENCODE, rows_of(c, c->cpu));
    auto own = run_batch(tagc_cuda_maker()->batches, TAGC_BATCH_ENCODE, rows_of(c, c->cuda));
    for (size_t i = 0; i < c->options.size(); i++) {
        check_encoded(&(*results)[i].encoded, &own[i].encoded, &c->cpu[i], &c->cuda[i]);
        CHECK(c->cpu[i].gradient.equals(c->cuda[i].gradient));
        if (own[i].encoded.nonfinite) continue;
        CHECK(c->cpu[i].residual.equals(c->cuda[i].residual));
        CHECK(c->cpu[i].next.equals(c->cuda[i].next));
    }
}

/* ---- decode ---- */

/* Another body of the same shape. */
static size_t encode_another(const tagc_code_options *o, array<uint8_t> *body) {
    fragment f;
    make_fragment(o, random_below(2) ? (int)HEAVY : (int)FEW, &f);
    auto results = run_batch(&tagc_batch_cpu, TAGC_BATCH_ENCODE, {encode_row(o, &f)});
    const size_t n = results[0].encoded.n_bytes;
    body->make(n, random_below(8));
    memcpy(body->at(), f.body.at(), n);
    return n;
}

static void insert_plain(std::vector<tagc_body> *bodies, size_t place, const array<uint8_t> &values) {
    bodies->insert(bodies->begin() + (std::ptrdiff_t)place, {values.at(), 0, 1});
}

/* Each row adds its own body, others, and perhaps a plain one, in any order. */
static void check_decode(const batch_case *c, const std::vector<tagc_batch_result> &results) {
    now = "decode";
    const size_t n_rows = c->options.size();
    std::vector<tagc_batch_row> cpu, cuda;
    std::vector<std::vector<tagc_body>> bodies(n_rows), b_bodies(n_rows);
    std::vector<array<uint8_t>> exact(n_rows), others(3 * n_rows); /* of the length of the body */
    std::vector<fragment> a(n_rows), b(n_rows);                    /* the gradient is the plain body */
    for (size_t i = 0; i < n_rows; i++) {
        const tagc_encoded *e = &results[i].encoded;
        const size_t n_times = e->nonfinite ? 0 : random_below(4);
        exact[i].make(e->n_bytes, random_below(8));
        memcpy(exact[i].at(), c->cpu[i].body.at(), e->n_bytes);
        for (size_t t = 0; t < n_times; t++) {
            array<uint8_t> *other = &others[3 * i + t];
            const size_t n_bytes = t % 2 ? encode_another(&c->options[i], other) : e->n_bytes;
            bodies[i].push_back({t % 2 ? other->at() : exact[i].at(), n_bytes, 0});
        }
        a[i].sums.make(c->options[i].n, random_offset());
        tagc_batch_row row = {};
        row.options = c->options[i];
        row.adds = (int)random_below(2);
        row.scale = random_below(2) ? 1.0f : 0.37f;
        array<float> plain;
        plain.make(c->options[i].n, 0);
        a[i].gradient.make(plain.n * size_of(c->options[i].gradient),
                           random_offset() * size_of(c->options[i].gradient));
        fill(random_below(6) ? (int)HEAVY : (int)HUGE_ONES, a[i].sums);
        fill(random_below(6) ? (int)HEAVY : (int)HUGE_ONES, plain);
        put_gradient(&c->options[i], plain, &a[i]);
        b[i].sums.copy(a[i].sums);
        b[i].gradient.copy(a[i].gradient);
        b_bodies[i] = bodies[i];
        if (random_below(2)) {
            const size_t place = random_below(n_times + 1);
            insert_plain(&bodies[i], place, a[i].gradient);
            insert_plain(&b_bodies[i], place, b[i].gradient);
        }
        row.n_bodies = (int)bodies[i].size();
        row.sums = a[i].sums.at();
        row.bodies = bodies[i].data();
        cpu.push_back(row);
        row.sums = b[i].sums.at();
        row.bodies = b_bodies[i].data();
        cuda.push_back(row);
    }
    auto expected = run_batch(&tagc_batch_cpu, TAGC_BATCH_DECODE, cpu);
    auto own = run_batch(tagc_cuda_maker()->batches, TAGC_BATCH_DECODE, cuda);
    for (size_t i = 0; i < n_rows; i++) {
        CHECK(expected[i].nonfinite == own[i].nonfinite);
        CHECK(a[i].sums.equals(b[i].sums));
    }
}

/* ---- all ---- */

static void begin(int test, int trial) {
    random_begin((uint64_t)test, (uint64_t)trial);
    trial_now = trial;
    configure(random_u64(), 1 + (unsigned)trial % 5);
}

static void test_rows(int test, int trial, size_t n_rows, size_t most) {
    begin(test, trial);
    batch_case c(1 + random_below(n_rows));
    std::vector<tagc_batch_result> results;
    make_case(&c, most, trial < N_FILLS ? trial : -1);
    check_encode(&c, &results);
    check_decode(&c, results);
}

static void test_small(int trial) {
    test_rows(1, trial, 4, 700);
}

static void test_large(int trial) {
    test_rows(2, trial, 2, LARGE);
}

/* ---- samples that mislead ---- */

static void check_one(tagc_code_options o, const array<float> &gradient) {
    batch_case c(1);
    std::vector<tagc_batch_result> results;
    c.options[0] = o;
    make_fragment(&o, ZEROS, &c.cpu[0]);
    put_gradient(&o, gradient, &c.cpu[0]);
    copy(&c.cuda[0], &c.cpu[0]);
    check_encode(&c, &results);
}

/* Lines that sample_rows looks at, (n / 16): the rows here are made to mislead it. */
static std::vector<char> sampled_lines(size_t n) {
    const uint32_t n_windows = TAGC_CUDA_LINES, stride = (uint32_t)(n / 16 / n_windows);
    std::vector<char> is_sampled(n / 16 + 1);
    for (uint32_t w = 0; w < n_windows; w++) {
        uint32_t x = w;
        x = (x ^ x >> 16) * 0x85ebca6bu;
        x = (x ^ x >> 13) * 0xc2b2ae35u;
        x ^= x >> 16;
        is_sampled[w * stride + (uint32_t)((uint64_t)x * stride >> 32)] = 1;
    }
    return is_sampled;
}

static void test_misled(int trial) {
    begin(5, trial);
    now = "a sample that misleads";
    const size_t least = (size_t)4 * 16 * TAGC_CUDA_LINES;
    tagc_code_options o = {};
    o.n = least + random_below(3 * least);
    o.sparse = 1;
    o.values = (int)random_below(5);
    o.block = 128;
    random_formats(&o);
    array<float> x;
    x.make(o.n, 0);
    const std::vector<char> is_sampled = sampled_lines(o.n);
    size_t n_large = 0;
    const int pattern = trial % 5;
    for (size_t i = 0; i < o.n; i++) {
        const int sampled = is_sampled[i / 16];
        const float sign = random_below(2) ? 1.0f : -1.0f;
        int is_large = pattern < 3    ? !sampled && random_below(2)
                       : pattern == 3 ? sampled
                                      : random_below(3) == 0;
        n_large += (size_t)is_large;
        x.at()[i] = sign * (is_large ? 1 + (float)random_uniform() * 0.03f : pattern == 4 ? 0.0f : 0.25f);
    }
    o.k = pattern == 0   ? n_large     /* all that are kept for certain, and no more */
          : pattern == 1 ? n_large - 3 /* too many for certain */
          : pattern == 2 ? n_large + 3 /* ties */
          : pattern == 3
              ? n_large + o.n / 4    /* too few candidates */
              : n_large - o.n / 100; /* the bounds are far apart, the k-th largest is just below the upper */
    check_one(o, x);
}

/* Positions of which the sampled chunks say little: others are full. So many chunks that a block takes them in turns. */
static void test_many_chunks(int trial) {
    begin(6, trial);
    now = "many chunks";
    tagc_code_options o = {};
    const size_t chunk = trial == 2 ? 2048 : 16384;
    o.n = chunk * 66 + 77;
    o.k = trial == 2 ? o.n * 2 / 3 : o.n * 8 / 100;
    o.sparse = 1;
    o.values = TAGC_FORMAT_INT2;
    o.block = 128;
    o.residual = TAGC_FORMAT_INT8;
    array<float> x;
    x.make(o.n, 0);
    for (size_t i = 0; i < o.n; i++)
        x.at()[i] = trial == 2                    ? (float)((int)random_below(4) - 1)
                    : trial == 1 || i / chunk % 2 ? (float)((int)random_below(6) - 2)
                    : random_below(4000) == 0     ? 5.0f
                                                  : 0.0f;
    check_one(o, x);
}

/* ---- deltas ---- */

/* The processor's way: one array after the other. */
static std::vector<int> run_deltas_here(tagc_delta_kind kind, const std::vector<tagc_delta_row> &rows) {
    std::vector<int> results(rows.size(), 0);
    for (size_t i = 0; i < rows.size(); i++) {
        const tagc_delta_row *row = &rows[i];
        if (kind == TAGC_DELTA_ENCODE)
            results[i] = tagc_delta_encode_part(row->bits, row->values, row->base, sizeof *row->base, row->n,
                                                0, row->n, row->body);
        else
            tagc_delta_apply_part(row->bits, row->body, row->out, sizeof *row->out, row->n, 0, row->n);
    }
    return results;
}

static std::vector<int> run_deltas(tagc_delta_kind kind, const std::vector<tagc_delta_row> &rows) {
    const tagc_delta_maker *maker = tagc_cuda_maker()->deltas;
    array<char> work;
    array<int> results;
    tagc_delta_batch *batch;
    results.make(rows.size(), 0);
    work.make(maker->work_bytes(rows.data(), rows.size()) + TAGC_ALIGNMENT, 0);
    CHECK(maker->create(kind, rows.data(), rows.size(), results.at(), aligned(work.at()), nullptr, &batch) ==
          TAGC_OK);
    CHECK(maker->run(batch) == TAGC_OK && has_run());
    maker->destroy(batch);
    return std::vector<int>(results.at(), results.at() + rows.size());
}

/* All the same but codes of blocks whose scale is NaN, which say nothing. */
static int deltas_equal(const tagc_delta_row *row, const array<uint8_t> &a, const array<uint8_t> &b) {
    const size_t n_blocks = (row->n + TAGC_DELTA_BLOCK - 1) / TAGC_DELTA_BLOCK,
                 n_codes = (size_t)row->bits * 32;
    if (memcmp(a.at(), b.at(), 2 * n_blocks) != 0) return 0;
    for (size_t i = 0; i < n_blocks; i++) {
        const size_t at = 2 * n_blocks + i * n_codes;
        const int says_nothing = a.at()[2 * i] == 0xc0 && a.at()[2 * i + 1] == 0x7f;
        if (!says_nothing && memcmp(a.at() + at, b.at() + at, n_codes) != 0) return 0;
    }
    return 1;
}

/* Bit for bit; but a NaN is a NaN. */
static int halves_equal(const array<uint16_t> &a, const array<uint16_t> &b) {
    array<float> wide[2];
    const array<uint16_t> *const halves[] = {&a, &b};
    for (int i = 0; i < 2; i++) {
        wide[i].make(halves[i]->n, 0);
        tagc_bf16_widen(halves[i]->at(), wide[i].at(), halves[i]->n);
    }
    return wide[0].equals(wide[1]);
}

static void test_deltas(int trial) {
    static const int widths[] = {8, 4, 2};
    begin(7, trial);
    now = "deltas";
    const size_t n_rows = 1 + random_below(4);
    std::vector<tagc_delta_row> cpu(n_rows), cuda(n_rows);
    std::vector<array<float>> values(n_rows), wide(n_rows);
    std::vector<array<uint16_t>> base(n_rows), out(n_rows), own_out(n_rows);
    std::vector<array<uint8_t>> body(n_rows), own_body(n_rows), sound(n_rows);
    for (size_t i = 0; i < n_rows; i++) {
        tagc_delta_row row = {};
        row.bits = widths[random_below(3)];
        row.n = random_below(10) ? random_below(2000) : 0;
        values[i].make(row.n, random_offset());
        base[i].make(row.n, random_offset());
        out[i].make(row.n, random_offset());
        const int kind = (int)random_below(N_FILLS);
        fill(kind, values[i]);
        wide[i].make(row.n, 0);
        fill(random_below(2) ? kind : (int)ZEROS, wide[i]);
        tagc_bf16_narrow(wide[i].at(), base[i].at(), row.n);
        fill(random_below(2) ? (int)HEAVY : (int)HUGE_ONES, wide[i]);
        tagc_bf16_narrow(wide[i].at(), out[i].at(), row.n);
        if (random_below(6) == 0) spoil(values[i]);
        own_out[i].copy(out[i]);
        body[i].make(tagc_delta_bytes(row.bits, row.n), random_below(8));
        own_body[i].copy(body[i]);
        row.values = values[i].at();
        row.base = random_below(3) ? base[i].at() : nullptr;
        row.out = out[i].at();
        row.body = body[i].at();
        cpu[i] = row;
        row.out = own_out[i].at();
        row.body = own_body[i].at();
        cuda[i] = row;
    }
    CHECK(run_deltas_here(TAGC_DELTA_ENCODE, cpu) == run_deltas(TAGC_DELTA_ENCODE, cuda));
    for (size_t i = 0; i < n_rows; i++) {
        CHECK(deltas_equal(&cpu[i], body[i], own_body[i]));
        sound[i].copy(body[i]);
        if (body[i].n && random_below(3) == 0) /* an infinite scale, or any bit */
            memcpy(body[i].at(), random_below(2) ? "\x80\x7f" : "\x80\xff", 2);
        else if (body[i].n && random_below(3) == 0)
            body[i].at()[random_below(body[i].n)] ^= (uint8_t)(1u << random_below(8));
        memcpy(own_body[i].at(), body[i].at(), body[i].n);
    }
    for (size_t i = 0; i < n_rows; i++) { /* what is refused is not applied */
        if (tagc_delta_validate(cpu[i].bits, body[i].at(), cpu[i].n) == TAGC_OK) continue;
        for (size_t block = 0; block * TAGC_DELTA_BLOCK < cpu[i].n; block++)
            sound[i].at()[2 * block + 1] &= 0xbf; /* finite, where values were not */
        memcpy(body[i].at(), sound[i].at(), sound[i].n);
        memcpy(own_body[i].at(), sound[i].at(), sound[i].n);
    }
    run_deltas_here(TAGC_DELTA_APPLY, cpu);
    run_deltas(TAGC_DELTA_APPLY, cuda);
    for (size_t i = 0; i < n_rows; i++) CHECK(halves_equal(out[i], own_out[i]));
}

/* ---- messages of arrays ---- */

struct message_case {
    tagc_blocks_options options;
    tagc_message_form form;
    tagc_value_format format;
    uint64_t n_bytes;
};

static message_case make_message(size_t n) {
    static const int formats[] = {TAGC_FORMAT_INT8, TAGC_FORMAT_INT4, TAGC_FORMAT_INT2};
    message_case c = {};
    tagc_blocks_options_init(&c.options);
    c.options.format = formats[random_below(3)];
    c.options.block = 16 << random_below(9);
    c.options.element = random_below(2) ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
    c.options.rounding = c.options.format != TAGC_FORMAT_INT2 && random_below(2);
    c.options.seed = (uint64_t)random_below(1 << 20) << 40 | random_below(1 << 20);
    tagc_blocks_options read;
    CHECK(tagc_blocks_read(&c.options, n, &read, &c.format) == TAGC_OK);
    CHECK(tagc_blocks_bytes(&c.options, n, &c.n_bytes) == TAGC_OK);
    c.form.n = n;
    c.form.values = c.format.values;
    c.form.block = c.format.block;
    c.form.element = c.options.element == TAGC_FORMAT_BF16 ? TAGC_ELEMENT_BF16 : TAGC_ELEMENT_FP32;
    c.form.is_stochastic = c.format.is_stochastic;
    c.form.seed = c.format.seed;
    c.form.largest_scale = c.format.largest_scale;
    return c;
}

/* What a device decodes, against the processor's of the same body: bit for bit, but a NaN is a NaN. */
static void check_decoded(const message_case *c, const void *found, const void *expected) {
    for (size_t i = 0; i < c->form.n; i++) {
        const float a = tagc_element_read(found, c->form.element, i),
                    b = tagc_element_read(expected, c->form.element, i);
        CHECK(tagc_bits_of(a) == tagc_bits_of(b) || (a != a && b != b));
    }
}

static int n_messages_refused, n_messages_other;

static void test_messages(int trial) {
    begin(8, trial);
    now = "messages";
    const size_t n = random_below(10) ? random_below(trial % 8 ? 1500 : 20000) : 0;
    const message_case c = make_message(n);
    const tagc_messages_maker *maker = tagc_cuda_maker()->messages;
    array<float> wide, decoded, expected;
    array<uint16_t> halves;
    array<uint64_t> here, there; /* 8-aligned */
    array<tagc_blocks_state> state;
    state.make(1, 0);
    *state.at() = {};
    wide.make(n, c.form.element == TAGC_ELEMENT_FP32 ? random_offset() : 0);
    fill((int)random_below(N_FILLS), wide);
    if (random_below(4) == 0) spoil(wide);
    halves.make(n, random_offset());
    tagc_bf16_narrow(wide.at(), halves.at(), n);
    const void *values = wide.at();
    if (c.form.element == TAGC_ELEMENT_BF16) values = halves.at();
    here.make(c.n_bytes / 8 + 1, 0);
    there.make(c.n_bytes / 8 + 1, 0);
    uint8_t *one = reinterpret_cast<uint8_t *>(here.at()), *other = reinterpret_cast<uint8_t *>(there.at());
    CHECK(tagc_blocks_encode(&c.options, values, n, one, c.n_bytes) == TAGC_OK);
    CHECK(maker->encode(&c.form, values, other, state.at(), nullptr) == TAGC_OK && has_run());
    CHECK(memcmp(one + TAGC_MESSAGE_HEADER_BYTES, other + TAGC_MESSAGE_HEADER_BYTES,
                 c.n_bytes - TAGC_MESSAGE_HEADER_BYTES) == 0);
    decoded.make(n + 1, 0);
    expected.make(n + 1, 0);
    CHECK(tagc_blocks_decode(&c.options, one, c.n_bytes, expected.at(), n) == TAGC_OK);
    CHECK(maker->decode(&c.form, other, decoded.at(), 7, state.at(), nullptr) == TAGC_OK && has_run());
    CHECK(state.at()->status == TAGC_OK);
    check_decoded(&c, decoded.at(), expected.at());
    /* Damage anywhere, or a message of something else: everything is NaN, and the state names the first one. */
    message_case harmed = c;
    const int kind = (int)random_below(4);
    if (kind == 0) {
        other[random_below(c.n_bytes)] ^= (uint8_t)(1u << random_below(8));
    } else if (kind == 1) { /* with a checksum that fits: a scale that nobody writes */
        if (!n) return;
        const uint64_t body_bytes = c.n_bytes - TAGC_MESSAGE_HEADER_BYTES;
        tagc_message_header *header = reinterpret_cast<tagc_message_header *>(other);
        memcpy(other + TAGC_MESSAGE_HEADER_BYTES + 2 * random_below((n + c.form.block - 1) / c.form.block),
               random_below(2) ? "\x80\x7f" : "\x01\x00", 2);
        header->body_sum = tagc_message_sum(other + TAGC_MESSAGE_HEADER_BYTES, body_bytes);
        header->sum = tagc_message_header_sum(header);
    } else if (kind == 2) {
        harmed.form.block = c.form.block == 16 ? 32 : c.form.block / 2;
    } else {
        tagc_message_header *header = reinterpret_cast<tagc_message_header *>(other);
        header->n_elems++;
        header->sum = tagc_message_header_sum(header);
    }
    if (kind == 2) { /* the receiver's length is another one, too: it reads what it has room for */
        array<uint64_t> longer;
        longer.make(c.n_bytes / 4 + n / 4 + 16, 0);
        memset(longer.at(), 0, longer.n * 8);
        memcpy(longer.at(), other, c.n_bytes);
        CHECK(maker->decode(&harmed.form, reinterpret_cast<uint8_t *>(longer.at()), decoded.at(), 9,
                            state.at(), nullptr) == TAGC_OK);
    } else {
        CHECK(maker->decode(&c.form, other, decoded.at(), 9, state.at(), nullptr) == TAGC_OK);
    }
    CHECK(has_run());
    CHECK(state.at()->status == (kind < 2 ? TAGC_ERR_CORRUPT : TAGC_ERR_MISMATCH) && state.at()->number == 9);
    for (size_t i = 0; i < n; i++) {
        const float x = tagc_element_read(decoded.at(), c.form.element, i);
        CHECK(x != x);
    }
    n_messages_refused += kind < 2;
    n_messages_other += kind >= 2;
    /* The next message is sound, and the state still names the first that was not. */
    CHECK(maker->encode(&c.form, values, other, state.at(), nullptr) == TAGC_OK && has_run());
    CHECK(maker->decode(&c.form, other, decoded.at(), 10, state.at(), nullptr) == TAGC_OK && has_run());
    CHECK(state.at()->number == 9);
    check_decoded(&c, decoded.at(), expected.at());
}

/* Launches do not depend on the rows, and one batch serves many steps with other arrays. */
static void test_again(void) {
    now = "again";
    begin(4, 0);
    const tagc_batch_maker *maker = tagc_cuda_maker()->batches;
    batch_case c(3);
    array<char> work;
    tagc_batch *batch = nullptr;
    array<tagc_batch_result> results;
    results.make(3, 0);
    make_case(&c, 3000, HEAVY);
    for (int step = 0; step < 3; step++) {
        for (size_t i = 0; i < 3; i++) {
            make_fragment(&c.options[i], (int)random_below(4), &c.cpu[i]);
            copy(&c.cuda[i], &c.cpu[i]);
        }
        auto rows = rows_of(&c, c.cuda);
        auto expected = run_batch(&tagc_batch_cpu, TAGC_BATCH_ENCODE, rows_of(&c, c.cpu));
        if (!batch) {
            work.make(maker->work_bytes(TAGC_BATCH_ENCODE, rows.data(), 3, 1) + TAGC_ALIGNMENT, 0);
            CHECK(maker->create(TAGC_BATCH_ENCODE, rows.data(), 3, results.at(), aligned(work.at()), nullptr,
                                nullptr, &batch) == TAGC_OK);
        } else {
            CHECK(maker->point(batch, rows.data(), results.at()) == TAGC_OK);
        }
        CHECK(maker->run(batch) == TAGC_OK && has_run());
        for (size_t i = 0; i < 3; i++)
            check_encoded(&expected[i].encoded, &results.at()[i].encoded, &c.cpu[i], &c.cuda[i]);
    }
    maker->destroy(batch);
}

#ifdef TAGC_CUDA_HARNESS
/* What _n_launches says, for few rows and for so many that their tables take several launches. */
static void test_launches(void) {
    now = "launches";
    const tagc_batch_maker *maker = tagc_cuda_maker()->batches;
    for (size_t n_rows : {(size_t)1, (size_t)40, (size_t)150}) {
        begin(5 + (int)n_rows, 0);
        batch_case c(n_rows);
        array<char> work;
        array<tagc_batch_result> results;
        tagc_batch *batch;
        results.make(n_rows, 0);
        for (size_t i = 0; i < n_rows; i++) {
            c.options[i] = random_options(60);
            make_fragment(&c.options[i], HEAVY, &c.cuda[i]);
        }
        auto rows = rows_of(&c, c.cuda);
        auto own = run_batch(maker, TAGC_BATCH_ENCODE, rows);
        std::vector<tagc_body> list(n_rows);
        for (size_t i = 0; i < n_rows; i++) {
            list[i].bytes = rows[i].body;
            list[i].n_bytes = own[i].encoded.n_bytes;
            rows[i].bodies = &list[i];
            rows[i].n_bodies = 1;
            rows[i].sums = c.cuda[i].sums.at();
            rows[i].scale = 1;
        }
        for (tagc_batch_kind kind : {TAGC_BATCH_ENCODE, TAGC_BATCH_DECODE}) {
            const unsigned long long before = harness::count_launches();
            work.make(maker->work_bytes(kind, rows.data(), n_rows, 1) + TAGC_ALIGNMENT, 0);
            CHECK(maker->create(kind, rows.data(), n_rows, results.at(), aligned(work.at()), nullptr, nullptr,
                                &batch) == TAGC_OK);
            CHECK(maker->point(batch, rows.data(), results.at()) == TAGC_OK);
            CHECK(maker->run(batch) == TAGC_OK && has_run());
            CHECK(harness::count_launches() - before == maker->n_launches(kind, rows.data(), n_rows));
            maker->destroy(batch);
        }
    }
}

/* Launches of a run of two rows. */
static unsigned long long launches_of(tagc_batch_kind kind, const std::vector<tagc_batch_row> &rows) {
    const tagc_batch_maker *maker = tagc_cuda_maker()->batches;
    array<char> work;
    array<tagc_batch_result> results;
    tagc_batch *batch;
    results.make(rows.size(), 0);
    work.make(maker->work_bytes(kind, rows.data(), rows.size(), 1) + TAGC_ALIGNMENT, 0);
    CHECK(maker->create(kind, rows.data(), rows.size(), results.at(), aligned(work.at()), nullptr, nullptr,
                        &batch) == TAGC_OK);
    const unsigned long long before = harness::count_launches();
    CHECK(maker->run(batch) == TAGC_OK && has_run());
    maker->destroy(batch);
    return harness::count_launches() - before;
}

/* Each launch may have to wait behind one of the model's kernels: at most eight to encode, and two to decode, whatever is to be encoded, in
 * rows that are sampled and in rows that are not. */
static void test_few_launches(void) {
    now = "few launches";
    begin(6, 0);
    for (int residual : {TAGC_FORMAT_FP32, TAGC_FORMAT_INT8, TAGC_FORMAT_INT4})
        for (int gradient : {TAGC_FORMAT_FP32, TAGC_FORMAT_BF16})
            for (int values = TAGC_FORMAT_FP32; values <= TAGC_FORMAT_INT2; values++)
                for (size_t n : {(size_t)1, (size_t)300, (size_t)4 * 16 * TAGC_CUDA_LINES + 5})
                    for (size_t k : {(size_t)0, n / 100, n / 20, n / 2, n})
                        for (int sparse = k < n; sparse < 2; sparse++) {
                            if (n > 300 && N_LARGE < 10) continue; /* where kernels are slow */
                            batch_case c(2);
                            for (int i = 0; i < 2; i++) {
                                tagc_code_options *o = &c.options[i];
                                *o = {};
                                o->n = n, o->k = k, o->sparse = sparse, o->block = 128;
                                o->values = values, o->residual = residual, o->gradient = gradient;
                                make_fragment(o, i ? TIES : HEAVY, &c.cuda[i]);
                            }
                            auto rows = rows_of(&c, c.cuda);
                            CHECK(launches_of(TAGC_BATCH_ENCODE, rows) <= 8);
                            for (int i = 0; i < 2; i++) rows[i].sums = c.cuda[i].sums.at();
                            CHECK(launches_of(TAGC_BATCH_DECODE, rows) <= 2); /* of no bodies */
                        }
}
#endif

/* Each kind's first trials come before any kind's later ones. part: an Nth of all. most_s: none begins later; 0: at any time. */
static void run_trials(int part, double most_s) {
    static const struct {
        const char *name;
        int n;
        void (*run)(int trial);
    } kinds[] = {{"small rows", N_SMALL, test_small},
                 {"large rows", N_LARGE, test_large},
                 {"samples that mislead", N_MISLED, test_misled},
                 {"many chunks", N_HUGE, test_many_chunks},
                 {"deltas", N_SMALL, test_deltas},
                 {"messages", N_SMALL, test_messages}};
    const double start = tagc_clock_s();
    double said = start;
    int n_run = 0, n_left = 0;
    for (int trial = 0; trial < (int)N_SMALL; trial++)
        for (const auto &kind : kinds) {
            const double now_s = tagc_clock_s();
            if (trial * part >= kind.n) continue;
            if (most_s > 0 && now_s > start + most_s) {
                n_left++;
                continue;
            }
            if (now_s > said + 2) {
                printf("at %.0f s: %s, trial %d\n", now_s - start, kind.name, trial);
                fflush(stdout);
                said = now_s;
            }
            kind.run(trial);
            n_run++;
        }
    printf("%d trials in %.1f s%s\n", n_run, tagc_clock_s() - start,
           n_left ? "; for more there was no time" : "");
    now = "messages";
    CHECK(n_left || (n_messages_refused > 0 && n_messages_other > 0));
}

/* test_cuda_codec [N [SECONDS]]: an Nth of the trials, for tools that slow a device down, and none that begins later. */
int main(int argc, char **argv) {
    const int part = argc > 1 && atoi(argv[1]) > 0 ? atoi(argv[1]) : 1;
    const double most_s = argc > 2 ? atof(argv[2]) : 0;
#ifndef TAGC_CUDA_HARNESS
    int n_devices;
    const cudaError_t code = cudaGetDeviceCount(&n_devices);
    if (code != cudaSuccess) { /* as where the driver is older than the toolkit */
        fprintf(stderr, "test_cuda_codec: no device: %s\n", cudaGetErrorString(code));
        return 1;
    }
#endif
    run_trials(part, most_s);
    test_again();
#ifdef TAGC_CUDA_HARNESS
    test_launches();
    test_few_launches();
#endif
    return 0;
}
