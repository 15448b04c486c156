#include "harness_maker.h"
#include "harness.h"
extern "C" {
#include "../fake_runtime.h"
#include "core/status.h"
#include "tagc/device.h"
const tagc_maker *tagc_cuda_maker(void);
}

#include <functional>
#include <memory>
#include <vector>

/* A stream comes to it later, when the caller's lists may be others. */
struct rows_of_run {
    std::vector<tagc_batch_row> rows;
    std::vector<std::vector<tagc_body>> bodies;
    tagc_batch_result *results = nullptr;

    void take(tagc_batch_kind kind, const tagc_batch_row *from, size_t n, tagc_batch_result *to) {
        results = to;
        rows.assign(from, from + n);
        bodies.resize(n);
        for (size_t i = 0; i < n; i++) {
            size_t n_bodies = kind == TAGC_BATCH_DECODE ? (size_t)from[i].n_bodies : 0;
            bodies[i].assign(from[i].bodies, from[i].bodies + n_bodies);
        }
    }
    template <typename T> static void see(T *&pointer) {
        if (pointer) pointer = static_cast<T *>(fake_view((void *)(size_t)pointer));
    }
    /* As kernels see it. */
    void see_all() {
        see(results);
        for (size_t i = 0; i < rows.size(); i++) {
            tagc_batch_row &row = rows[i];
            see(row.gradient), see(row.residual_in), see(row.residual_out), see(row.sums), see(row.body),
                see(row.lengths), see(row.stop);
            for (tagc_body &body : bodies[i]) see(body.bytes);
            row.bodies = bodies[i].data();
        }
    }
};

struct tagc_batch {
    tagc_batch_kind kind;
    void *work, *stream;
    rows_of_run made, now;
};

namespace {

uint64_t seed = 1;
unsigned n_resident = 2;

struct launch {
    tagc_batch_kind kind;
    void *work;
    rows_of_run made, now;
};

/* Its tables come to the device with it: the copies of _create and _point are in the stream's order, too. */
void run_launch(void *arg) {
    std::unique_ptr<launch> one(static_cast<launch *>(arg));
    const tagc_batch_maker *real = tagc_cuda_maker()->batches;
    tagc_batch *batch;
    one->made.see_all(), one->now.see_all();
    harness::configure(seed++, n_resident);
    if (real->create(one->kind, one->made.rows.data(), one->made.rows.size(), one->made.results,
                     fake_view(one->work), nullptr, nullptr, &batch) ||
        real->point(batch, one->now.rows.data(), one->now.results) || real->run(batch))
        harness::stop("a batch: %s", real->last_error());
    real->destroy(batch);
}

/* ---- deltas ---- */

struct deltas_of_run {
    std::vector<tagc_delta_row> rows;
    int *results = nullptr;
    void take(const tagc_delta_row *from, size_t n, int *to) {
        rows.assign(from, from + n);
        results = to;
    }
    void see_all() {
        rows_of_run::see(results);
        for (tagc_delta_row &row : rows)
            rows_of_run::see(row.values), rows_of_run::see(row.base), rows_of_run::see(row.out),
                rows_of_run::see(row.body);
    }
};

struct delta_launch {
    tagc_delta_kind kind;
    void *work;
    deltas_of_run made, now;
};

void run_deltas(void *arg) {
    std::unique_ptr<delta_launch> one(static_cast<delta_launch *>(arg));
    const tagc_delta_maker *real = tagc_cuda_maker()->deltas;
    tagc_delta_batch *batch;
    one->made.see_all(), one->now.see_all();
    harness::configure(seed++, n_resident);
    if (real->create(one->kind, one->made.rows.data(), one->made.rows.size(), one->made.results,
                     fake_view(one->work), nullptr, &batch) ||
        real->point(batch, one->now.rows.data(), one->now.results) || real->run(batch))
        harness::stop("a batch of deltas: %s", tagc_cuda_maker()->batches->last_error());
    real->destroy(batch);
}

tagc_status create(tagc_batch_kind kind, const tagc_batch_row *rows, size_t n_rows,
                   tagc_batch_result *results, void *work, tagc_pool *, void *stream, tagc_batch **out) {
    tagc_batch *b = *out = new tagc_batch{kind, work, stream, {}, {}};
    b->made.take(kind, rows, n_rows, results);
    b->now.take(kind, rows, n_rows, results);
    return TAGC_OK;
}

tagc_status point(tagc_batch *b, const tagc_batch_row *rows, tagc_batch_result *results) {
    b->now.take(b->kind, rows, b->made.rows.size(), results);
    return TAGC_OK;
}

tagc_status run(tagc_batch *b) {
    launch *one = new launch{b->kind, b->work, b->made, b->now};
    int code = fake_launch_by_driver(b->stream, run_launch, one);
    if (!code) return TAGC_OK;
    delete one;
    return tagc_fail(TAGC_ERR_DEVICE, "a launch: an illegal memory access");
}

void destroy(tagc_batch *b) {
    delete b;
}

} // namespace

struct tagc_delta_batch {
    tagc_delta_kind kind;
    void *work, *stream;
    deltas_of_run made, now;
};

namespace {

tagc_status delta_create(tagc_delta_kind kind, const tagc_delta_row *rows, size_t n_rows, int *results,
                         void *work, void *stream, tagc_delta_batch **out) {
    tagc_delta_batch *b = *out = new tagc_delta_batch{kind, work, stream, {}, {}};
    b->made.take(rows, n_rows, results);
    b->now.take(rows, n_rows, results);
    return TAGC_OK;
}

tagc_status delta_point(tagc_delta_batch *b, const tagc_delta_row *rows, int *results) {
    b->now.take(rows, b->made.rows.size(), results);
    return TAGC_OK;
}

tagc_status delta_run(tagc_delta_batch *b) {
    delta_launch *one = new delta_launch{b->kind, b->work, b->made, b->now};
    int code = fake_launch_by_driver(b->stream, run_deltas, one);
    if (!code) return TAGC_OK;
    delete one;
    return tagc_fail(TAGC_ERR_DEVICE, "a launch: an illegal memory access");
}

void delta_destroy(tagc_delta_batch *b) {
    delete b;
}

} // namespace

/* ---- runs and messages ---- */

namespace {

/* One call of the real maker, with pointers as kernels see them, when the stream comes to it. */
void run_later(void *arg) {
    std::unique_ptr<std::function<tagc_status()>> one(static_cast<std::function<tagc_status()> *>(arg));
    harness::configure(seed++, n_resident);
    if ((*one)()) harness::stop("a kernel: %s", tagc_cuda_maker()->batches->last_error());
}

template <typename F> tagc_status launch_later(void *stream, F call) {
    auto *one = new std::function<tagc_status()>(call);
    int code = fake_launch_by_driver(stream, run_later, one);
    if (!code) return TAGC_OK;
    delete one;
    return tagc_fail(TAGC_ERR_DEVICE, "a launch: an illegal memory access");
}

template <typename T> T *seen(T *pointer) {
    rows_of_run::see(pointer);
    return pointer;
}

tagc_status runs_copy(const tagc_listed_run *runs, uint32_t n_runs, uint64_t n, const void *from,
                      int from_element, void *to, int to_element, float factor, void *stream) {
    return launch_later(stream, [=] {
        return tagc_cuda_maker()->runs->copy(seen(runs), n_runs, n, seen(from), from_element, seen(to),
                                             to_element, factor, nullptr);
    });
}

tagc_status runs_settle(const int *is_void, const void *before, void *residual, size_t n_residual,
                        float *output, size_t n_output, void *stream) {
    return launch_later(stream, [=] {
        return tagc_cuda_maker()->runs->settle(seen(is_void), seen(before), seen(residual), n_residual,
                                               seen(output), n_output, nullptr);
    });
}

tagc_status runs_spoil(const int *is_void, void *array, size_t n_bytes, void *stream) {
    return launch_later(
        stream, [=] { return tagc_cuda_maker()->runs->spoil(seen(is_void), seen(array), n_bytes, nullptr); });
}

tagc_status runs_squares(const tagc_squared *of, double *squares, void *stream) {
    const tagc_squared given = *of;
    return launch_later(stream, [=] {
        tagc_squared there = given;
        there.residual = seen(given.residual);
        there.gradient = seen(given.gradient);
        return tagc_cuda_maker()->runs->squares(&there, seen(squares), nullptr);
    });
}

const tagc_runs_maker harness_runs = {runs_copy, runs_settle, runs_spoil, runs_squares};

tagc_status messages_encode(const tagc_message_form *form, const void *values, uint8_t *message,
                            tagc_blocks_state *state, void *stream) {
    return launch_later(stream, [=, f = *form] {
        return tagc_cuda_maker()->messages->encode(&f, seen(values), seen(message), seen(state), nullptr);
    });
}

tagc_status messages_decode(const tagc_message_form *form, const uint8_t *message, void *values,
                            uint64_t number, tagc_blocks_state *state, void *stream) {
    return launch_later(stream, [=, f = *form] {
        return tagc_cuda_maker()->messages->decode(&f, seen(message), seen(values), number, seen(state),
                                                   nullptr);
    });
}

const tagc_messages_maker harness_messages = {messages_encode, messages_decode};

} // namespace

static tagc_status prepare() {
    for (auto kernel : {run_launch, run_deltas, run_later})
        if (fake_load_by_driver(kernel)) return tagc_fail(TAGC_ERR_DEVICE, "loading a kernel");
    return tagc_cuda_maker()->prepare();
}

void harness_maker_configure(uint64_t first, unsigned n) {
    seed = first;
    n_resident = n;
}

const tagc_maker *harness_maker(void) {
    static const tagc_batch_maker batches = {
        tagc_cuda_maker()->batches->work_bytes, create,  point,          run,
        tagc_cuda_maker()->batches->n_launches, destroy, tagc_last_error};
    static const tagc_delta_maker deltas = {tagc_cuda_maker()->deltas->work_bytes, delta_create, delta_point,
                                            delta_run, delta_destroy};
    static const tagc_maker maker = {TAGC_MAKER_ABI, prepare,       &batches,
                                     &deltas,        &harness_runs, &harness_messages};
    return &maker;
}

#ifdef HARNESS_LIBRARY
#undef tagc_cuda_maker
extern "C" TAGC_API const tagc_maker *tagc_cuda_maker(void);
const tagc_maker *tagc_cuda_maker(void) {
    return harness_maker();
}
#endif
