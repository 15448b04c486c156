/* What the kernels ask of memory, per value, against a budget: who makes a sweep more, or loses what lies side by side, fails here. */
#define RANDOM_SEED 7
#include "../../codec/random.h"
#include "counts.h"
#include "harness.h"
extern "C" {
#include "codec/bf16.h"
#include "codec/residual.h"
#include "codec/values.h"
#include "core/memory.h"
#include "gpu/maker.h"
const tagc_maker *tagc_cuda_maker(void);
}

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace {

constexpr size_t N = 1 << 17, N_BODIES = 4;

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                  \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

/* Bytes per value of the row; conflicts: passes over shared memory beyond the least, per value. */
struct budget {
    const char *kernel;
    double moved, asked, conflicts;
};

int n_failed;

void hold(const char *what, const std::vector<counts::kernel> &found, const std::vector<budget> &budgets,
          double whole) {
    double moved = 0;
    printf("%s: per value, and the budget\n  %-14s %8s %18s %18s %10s %18s\n", what, "", "launches",
           "bytes moved", "bytes asked for", "of needed", "bank conflicts");
    for (const counts::kernel &one : found) {
        const double n = (double)N, m = (double)one.moved / n, a = (double)one.asked / n;
        const double c = (double)(one.passes - one.least) / n;
        const budget *of = nullptr;
        for (const budget &b : budgets)
            if (one.name == b.kernel) of = &b;
        const bool is_over = !of || m > of->moved || a > of->asked || c > of->conflicts;
        printf("  %-14s %8d %8.3f %9.3f %8.3f %9.3f %9.2f %8.4f %9.4f%s\n", one.name.c_str(),
               (int)one.n_launches, m, of ? of->moved : 0, a, of ? of->asked : 0,
               (double)one.asked / (double)one.needed, c, of ? of->conflicts : 0,
               !of       ? "  no budget"
               : is_over ? "  OVER"
                         : "");
        n_failed += is_over;
        moved += m;
    }
    printf("  %-14s %8s %8.3f %9.3f%s\n", "all", "", moved, whole, moved > whole ? "  OVER" : "");
    n_failed += moved > whole;
}

char *aligned(std::vector<char> &bytes) {
    return bytes.data() + (TAGC_ALIGNMENT - (uintptr_t)bytes.data() % TAGC_ALIGNMENT) % TAGC_ALIGNMENT;
}

/* As the gradients of a tensor are. */
struct row_memory {
    std::vector<char> gradient, residual, next, sums;
    std::vector<uint8_t> body;
    explicit row_memory(const tagc_code_options *o)
        : gradient(N * 4 + TAGC_ALIGNMENT), residual(gradient.size()), next(gradient.size()),
          sums(gradient.size()), body(tagc_code_of(o)->max_bytes(o)) {
        std::vector<float> g(N), r(N);
        for (size_t i = 0; i < N; i++) {
            const float scale = i % 4096 < 900 ? 1.0f : 0.3f;
            g[i] = random_normal() * scale;
            r[i] = random_normal() * scale;
        }
        if (o->gradient == TAGC_FORMAT_BF16)
            tagc_bf16_narrow(g.data(), reinterpret_cast<uint16_t *>(aligned(gradient)), N);
        else
            memcpy(aligned(gradient), g.data(), N * sizeof(float));
        tagc_residual_write(o->residual, N, r.data(), 0, N, 1, aligned(residual));
    }
};

std::vector<counts::kernel> counted(tagc_batch_kind kind, tagc_batch_row *row, tagc_batch_result *result) {
    const tagc_batch_maker *maker = tagc_cuda_maker()->batches;
    std::vector<char> work(maker->work_bytes(kind, row, 1, 1) + TAGC_ALIGNMENT);
    tagc_batch *batch;
    CHECK(maker->create(kind, row, 1, result, aligned(work), nullptr, nullptr, &batch) == TAGC_OK);
    harness::configure(1, 2);
    counts::begin();
    CHECK(maker->run(batch) == TAGC_OK);
    maker->destroy(batch);
    return counts::end();
}

/* A message of an array in bf16. */
void hold_message(const char *name, int values, const std::vector<budget> &encode, double whole_encode,
                  const std::vector<budget> &decode, double whole_decode) {
    tagc_message_form form = {};
    const tagc_value_format format = tagc_values_format(values, 64, 0);
    form.n = N;
    form.values = values;
    form.block = 64;
    form.element = TAGC_ELEMENT_BF16;
    form.is_stochastic = values == TAGC_FORMAT_INT4;
    form.largest_scale = format.largest_scale;
    std::vector<float> wide(N);
    for (float &x : wide) x = random_normal();
    std::vector<char> array(N * 2 + TAGC_ALIGNMENT), message(N * 2 + TAGC_ALIGNMENT);
    tagc_bf16_narrow(wide.data(), reinterpret_cast<uint16_t *>(aligned(array)), N);
    uint8_t *bytes = reinterpret_cast<uint8_t *>(aligned(message));
    tagc_blocks_state state = {};
    const tagc_messages_maker *maker = tagc_cuda_maker()->messages;
    char what[100];
    harness::configure(1, 2);
    counts::begin();
    CHECK(maker->encode(&form, aligned(array), bytes, &state, nullptr) == TAGC_OK);
    snprintf(what, sizeof what, "message in %s, encode", name);
    hold(what, counts::end(), encode, whole_encode);
    counts::begin();
    CHECK(maker->decode(&form, bytes, aligned(array), 1, &state, nullptr) == TAGC_OK);
    snprintf(what, sizeof what, "message in %s, decode", name);
    hold(what, counts::end(), decode, whole_decode);
    CHECK(state.status == TAGC_OK);
}

/* Other arrays for a batch: one launch for eight rows, whose arguments have them, and no more. */
void hold_point(const tagc_code_options *o, size_t n_rows, uint64_t n_launches) {
    const tagc_batch_maker *maker = tagc_cuda_maker()->batches;
    std::vector<tagc_batch_row> rows(n_rows);
    std::vector<tagc_batch_result> results(n_rows);
    for (tagc_batch_row &row : rows) row.options = *o;
    std::vector<char> work(maker->work_bytes(TAGC_BATCH_ENCODE, rows.data(), n_rows, 1) + TAGC_ALIGNMENT);
    tagc_batch *batch;
    CHECK(maker->create(TAGC_BATCH_ENCODE, rows.data(), n_rows, results.data(), aligned(work), nullptr,
                        nullptr, &batch) == TAGC_OK);
    counts::begin();
    CHECK(maker->point(batch, rows.data(), results.data()) == TAGC_OK);
    const std::vector<counts::kernel> found = counts::end();
    maker->destroy(batch);
    CHECK(found.size() == 1 && found[0].name == "unpack_parcel");
    printf("arrays of %zu rows: %d launches, %d allowed\n", n_rows, (int)found[0].n_launches,
           (int)n_launches);
    n_failed += found[0].n_launches > n_launches;
}

struct budgets {
    std::vector<budget> encode, decode;
    double whole_encode, whole_decode;
};

void hold_code(const char *name, const tagc_code_options *o, const budgets &allowed) {
    char what[100];
    row_memory memory(o);
    tagc_batch_row row = {};
    tagc_batch_result result = {};
    row.options = *o;
    row.gradient = aligned(memory.gradient);
    row.residual_in = aligned(memory.residual);
    row.residual_out = aligned(o->residual == TAGC_FORMAT_FP32 ? memory.residual : memory.next);
    row.seed = 5;
    row.body = memory.body.data();
    snprintf(what, sizeof what, "%s, encode", name);
    hold(what, counted(TAGC_BATCH_ENCODE, &row, &result), allowed.encode, allowed.whole_encode);
    const size_t n_bytes = result.encoded.n_bytes;
    CHECK(!result.encoded.nonfinite && n_bytes > 0 && n_bytes <= memory.body.size());

    tagc_body body = {};
    body.bytes = memory.body.data();
    body.n_bytes = n_bytes;
    row = {};
    row.options = *o;
    row.bodies = &body;
    row.n_bodies = 1;
    const std::vector<tagc_body> bodies(N_BODIES, body);
    row.bodies = bodies.data();
    row.n_bodies = (int)N_BODIES;
    row.sums = reinterpret_cast<float *>(aligned(memory.sums));
    row.scale = 0.25f;
    snprintf(what, sizeof what, "%s, decode %d bodies", name, (int)N_BODIES);
    hold(what, counted(TAGC_BATCH_DECODE, &row, &result), allowed.decode, allowed.whole_decode);
    CHECK(!result.nonfinite);
}

} // namespace

int main() {
    tagc_code_options sparse = {}, dense = {};
    sparse.n = dense.n = N;
    sparse.k = N / 20;
    dense.k = N;
    sparse.values = TAGC_FORMAT_INT2;
    dense.values = TAGC_FORMAT_INT4;
    sparse.block = dense.block = 128;
    sparse.sparse = 1;
    /* This row has few chunks, which are cut into shares: more blocks, of which each asks for the fields of its row and its bodies. */
    const std::vector<budget> decode = {{"index_bodies", 0.14, 6.7, 0.005}, {"add_topk", 5.05, 30, 0.01}};
    /* The sweep takes 12 bytes per value: gradient, residual, and the new residual. Beyond it, a whole encode may move 5. */
    hold_code("fp32, 95 % zero in 2 bits", &sparse,
              {{{"sample_rows", 0.62, 0.95, 0.04},
                {"stream_rows", 12.7, 27, 0.005},
                {"refine_rows", 0.95, 4.3, 0.005},
                {"count_rows", 0.4, 1.9, 0.005},
                {"gather_rows", 1.1, 9.3, 0.03},
                {"emit_rows", 1.5, 4.2, 0.015}},
               decode,
               17,
               5.1});
    hold_code("fp32, all in 4 bits", &dense,
              {{{"clear_blocks", 0.01, 0.02, 0}, {"encode_blocks", 12.7, 32.6, 0.05}},
               {{"index_bodies", 0.01, 0.1, 0.005}, {"add_blocks", 4.6, 39.9, 0.005}},
               12.8,
               4.65});
    /* A gradient in bf16 and a residual of 8 bits: 4 bytes, and a 64th for exponents. */
    sparse.residual = dense.residual = TAGC_FORMAT_INT8;
    sparse.gradient = dense.gradient = TAGC_FORMAT_BF16;
    hold_code("int8 and bf16, 95 % zero in 2 bits", &sparse,
              {{{"sample_rows", 0.37, 0.75, 0.04},
                {"stream_rows", 4.7, 31, 0.005},
                {"refine_rows", 0.95, 4.3, 0.005},
                {"count_rows", 0.4, 1.9, 0.005},
                {"gather_rows", 1.3, 10, 0.03},
                {"emit_rows", 1.41, 4.9, 0.015}},
               decode,
               9,
               5.1});
    hold_code("int8 and bf16, all in 4 bits", &dense,
              {{{"clear_blocks", 0.01, 0.02, 0}, {"encode_blocks", 4.65, 37, 0.05}},
               {{"index_bodies", 0.01, 0.1, 0.005}, {"add_blocks", 4.6, 39.9, 0.005}},
               4.7,
               4.65});
    hold_message("8 bits", TAGC_FORMAT_INT8,
                 {{"encode_message", 3.1, 23.5, 0.005}, {"sum_message", 1.1, 1.6, 0.005}}, 4.2,
                 {{"sum_message", 1.1, 1.6, 0.005}, {"decode_message", 3.1, 4.7, 0.005}}, 4.2);
    hold_message("4 bits", TAGC_FORMAT_INT4,
                 {{"encode_message", 2.6, 32.5, 0.005}, {"sum_message", 0.6, 0.85, 0.005}}, 3.2,
                 {{"sum_message", 0.6, 0.85, 0.005}, {"decode_message", 2.6, 4.7, 0.005}}, 3.2);
    hold_point(&sparse, 8, 1);
    hold_point(&sparse, 64, 5);
    hold_point(&dense, 16, 1);
    return n_failed != 0;
}
