/* A store: residuals keep their values while others come, go and make them move, and the device allocates nothing that was expected.
 * The other rank sends what it gets. */
#include "../../lengths.h"
#include "../../test.h"
#include "../fake_runtime.h"
#include "gpu/ahead.h"
#include "harness_maker.h"
#include "tagc/device.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 2, MOST = 4096 };

static tagc_status echo(void *context, const tagc_transfer *t) {
    (void)context;
    for (uint32_t i = 0; i < t->n_receives; i++)
        if (t->receives[i].n_bytes)
            memcpy((char *)t->recv + t->receives[i].offset, (const char *)t->send + t->sends[i].offset,
                   t->receives[i].n_bytes);
    return TAGC_OK;
}

typedef struct world {
    tagc_device *device;
    tagc_kernels *kernels;
    tagc_queue *queue;
    tagc_store *store;
    tagc_comm *comm;
} world;

static void open_world(world *w) {
    static const tagc_callback_ops ops = {.abi = TAGC_TRANSPORT_ABI, .exchange = echo};
    fake_reset(3, FAKE_MAX_DEVICES, FAKE_EAGER, 1);
    harness_maker_configure(3, 1);
    assert_int_equal(tagc_device_open("cuda", FAKE_CUDART, 1, &w->device), TAGC_OK);
    assert_int_equal(tagc_kernels_create(w->device, harness_maker(), &w->kernels), TAGC_OK);
    assert_int_equal(tagc_queue_create(w->device, w->kernels, 2, &w->queue), TAGC_OK);
    assert_int_equal(tagc_store_create(w->queue, &w->store), TAGC_OK);
    assert_int_equal(tagc_comm_create_callback(&ops, NULL, 0, RANKS, NULL, &w->comm), TAGC_OK);
}

/* With no reducer left. */
static void close_world(world *w) {
    tagc_store_destroy(w->store);
    tagc_queue_destroy(w->queue);
    tagc_comm_destroy(w->comm);
    tagc_kernels_close(w->kernels);
    tagc_device_close(w->device);
    assert_int_equal(fake_n_mistakes(), 0);
    assert_int_equal(fake_n_device_blocks(), 0);
}

static tagc_reducer_options options_of(uint64_t n_elems) {
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = n_elems;
    options.exchange = TAGC_EXCHANGE_DIRECT;
    options.sparsity = 0.75;
    options.residual = TAGC_FORMAT_FP32;
    return options;
}

static void set(tagc_reducer *r, float first) {
    float values[MOST];
    uint64_t n = tagc_reducer_residual_elems(r);
    for (uint64_t i = 0; i < n; i++) values[i] = first + (float)i;
    assert_int_equal(tagc_reducer_set_residual(r, values, n), TAGC_OK);
}

static tagc_reducer *make(const world *w, uint64_t n_elems, float first) {
    tagc_reducer_options options = options_of(n_elems);
    tagc_reducer *r;
    assert_int_equal(tagc_reducer_create_in(w->store, w->comm, &options, &r), TAGC_OK);
    set(r, first);
    return r;
}

static void check(tagc_reducer *r, float first) {
    float values[MOST];
    uint64_t n = tagc_reducer_residual_elems(r);
    assert_int_equal(tagc_reducer_get_residual(r, values, n), TAGC_OK);
    for (uint64_t i = 0; i < n; i++) assert_true(values[i] == first + (float)i);
}

/* | a | b | c | -> |   | b |   | -> | b | d |, for which b moves; and then a larger region. */
TEST(test_moves) {
    world w = {0};
    tagc_reducer_options expected[] = {options_of(512), options_of(256), options_of(512)};
    open_world(&w);
    assert_int_equal(tagc_store_expect(w.store, w.comm, expected, 3), TAGC_OK);
    tagc_reducer *a = make(&w, 512, 1000), *b = make(&w, 256, 5000), *c = make(&w, 512, 9000);
    uint64_t n_allocs = fake_n_allocs();
    check(a, 1000), check(b, 5000), check(c, 9000);
    tagc_reducer_destroy(a);
    tagc_reducer_destroy(c);
    tagc_reducer *d = make(&w, 1024, 20000);
    assert_int_equal(fake_n_allocs(), n_allocs);
    check(b, 5000), check(d, 20000);
    tagc_reducer *e = make(&w, 2048, 30000);
    assert_true(fake_n_allocs() > n_allocs);
    check(b, 5000), check(d, 20000), check(e, 30000);
    tagc_reducer_destroy(b), tagc_reducer_destroy(d), tagc_reducer_destroy(e);
    close_world(&w);
}

/* A change makes the residual of `late`, and nothing else is called before it has to move: from a region to a larger one, and within
 * it after `first` has gone. */
TEST(test_moves_what_a_change_made) {
    world w = {0};
    tagc_reducer_options options = options_of(512), exact = options_of(256);
    tagc_reducer *first, *late, *next, *last;
    open_world(&w);
    assert_int_equal(tagc_reducer_create_in(w.store, w.comm, &options, &first), TAGC_OK);
    exact.sparsity = 0;
    exact.format = TAGC_FORMAT_FP32;
    assert_int_equal(tagc_reducer_create_in(w.store, w.comm, &exact, &late), TAGC_OK);
    assert_int_equal(tagc_reducer_residual_elems(late), 0);
    assert_int_equal(tagc_reducer_set_sparsity(late, 0.75), TAGC_OK);
    assert_int_equal(tagc_reducer_residual_elems(late), 256);
    set(first, 1000), set(late, 5000);
    assert_int_equal(tagc_reducer_create_in(w.store, w.comm, &options, &next), TAGC_OK);
    set(next, 9000);
    check(first, 1000), check(late, 5000), check(next, 9000);
    tagc_reducer_destroy(first);
    tagc_reducer_destroy(next);
    options.n_elems = 1024;
    assert_int_equal(tagc_reducer_create_in(w.store, w.comm, &options, &last), TAGC_OK);
    set(last, 20000);
    check(late, 5000), check(last, 20000);
    tagc_reducer_destroy(late), tagc_reducer_destroy(last);
    close_world(&w);
}

/* Whatever is in a store takes spares of the same two regions: one for each exchange under way. */
TEST(test_shares_spares) {
    world w = {0};
    tagc_store *other;
    open_world(&w);
    assert_int_equal(tagc_store_create(w.queue, &other), TAGC_OK);
    tagc_reducer *first = make(&w, 1024, 1);
    uint64_t n_bytes = tagc_kernels_bytes(w.kernels);
    tagc_reducer_options options = options_of(1024);
    tagc_reducer *second;
    assert_int_equal(tagc_reducer_create_in(other, w.comm, &options, &second), TAGC_OK);
    assert_int_equal(tagc_kernels_bytes(w.kernels) - n_bytes, 1024 * sizeof(float));
    tagc_reducer_destroy(second), tagc_reducer_destroy(first);
    tagc_store_destroy(other);
    close_world(&w);
}

/* State goes in and out by way of the host: what one reducer saves, the other loads, and each scales it as the other does. */
TEST(test_state) {
    world w = {0};
    open_world(&w);
    static const int formats[] = {TAGC_FORMAT_FP32, TAGC_FORMAT_INT8, TAGC_FORMAT_INT4};
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        int format = formats[f];
        tagc_reducer_options options = options_of(1024);
        float values[MOST], others[MOST];
        tagc_reducer *there, *plain;
        options.residual = format;
        options.tag = 1;
        assert_int_equal(tagc_reducer_create_in(w.store, w.comm, &options, &there), TAGC_OK);
        assert_int_equal(tagc_reducer_create(w.comm, &options, &plain), TAGC_OK);
        uint64_t n_bytes = tagc_reducer_state_bytes(there), n = tagc_reducer_residual_elems(there);
        char *one = malloc(n_bytes), *other = malloc(n_bytes);
        for (uint64_t i = 0; i < n; i++) values[i] = (float)(i % 17) * 1e-3f;
        assert_int_equal(tagc_reducer_set_residual(there, values, n), TAGC_OK);
        assert_int_equal(tagc_reducer_set_residual(plain, values, n), TAGC_OK);
        assert_int_equal(tagc_reducer_scale_residual(there, 0.5), TAGC_OK);
        assert_int_equal(tagc_reducer_scale_residual(plain, 0.5), TAGC_OK);
        assert_int_equal(tagc_reducer_scale_residual(there, 1e60), TAGC_ERR_ARGUMENT);
        assert_int_equal(tagc_reducer_state_save(there, one, n_bytes), TAGC_OK);
        assert_int_equal(tagc_reducer_state_save(plain, other, n_bytes), TAGC_OK);
        assert_memory_equal(one, other, n_bytes);
        set(there, 3);
        assert_int_equal(tagc_reducer_state_load(there, other, n_bytes), TAGC_OK);
        assert_int_equal(tagc_reducer_get_residual(there, values, n), TAGC_OK);
        assert_int_equal(tagc_reducer_get_residual(plain, others, n), TAGC_OK);
        assert_memory_equal(values, others, n * sizeof *values);
        free(one), free(other);
        tagc_reducer_destroy(plain), tagc_reducer_destroy(there);
    }
    close_world(&w);
}

/* Steps are those of a model; a probe takes no memory. */
TEST(test_refuses) {
    world w = {0};
    float values[1024], sums[512];
    open_world(&w);
    tagc_reducer_options options = options_of(1024);
    tagc_reducer *r = make(&w, 1024, 1), *probe;
    assert_int_equal(begin_reducer(r, values, sums), TAGC_ERR_STATE);
    assert_string_equal(tagc_last_error(),
                        "this reducer's steps are those of its model (tagc_model_begin_on)");
    uint64_t n_allocs = fake_n_allocs();
    assert_int_equal(tagc_reducer_probe_in(w.store, w.comm, &options, &probe), TAGC_OK);
    assert_int_equal(fake_n_allocs(), n_allocs);
    check(r, 1);
    tagc_reducer_destroy(probe), tagc_reducer_destroy(r);
    close_world(&w);
}

/* ---- any thread may close the queue ---- */

enum { NOT_YET, CLOSE, CLOSED };
static atomic_int
    phase; /* relaxed, so that it puts nothing in an order that a thread sanitizer would take for the queue's */
static int (*real_free)(void *memory);

static int free_and_wait(void *memory) {
    int code = real_free(memory);
    if (atomic_load_explicit(&phase, memory_order_relaxed) != NOT_YET) return code;
    atomic_store_explicit(&phase, CLOSE, memory_order_relaxed);
    while (atomic_load_explicit(&phase, memory_order_relaxed) != CLOSED) sched_yield();
    return code;
}

static void *close_main(void *queue) {
    while (atomic_load_explicit(&phase, memory_order_relaxed) != CLOSE) sched_yield();
    tagc_queue_close(queue);
    atomic_store_explicit(&phase, CLOSED, memory_order_relaxed);
    return NULL;
}

/* Between two buffers whose rooms grow: closing writes orders to the new rooms of one, and the old ones of the other. */
TEST(test_closes_while_rooms_grow) {
    world w = {0};
    rooms_needs needs = {.n_rooms = 2, .head_bytes = 128};
    pthread_t thread;
    open_world(&w);
    assert_int_equal(tagc_rooms_reserve(w.queue, &needs), TAGC_OK);
    atomic_store(&phase, NOT_YET);
    real_free = w.device->runtime.FreeHost;
    w.device->runtime.FreeHost = free_and_wait;
    assert_int_equal(pthread_create(&thread, NULL, close_main, w.queue), 0);
    needs.n_rooms = 64;
    assert_int_equal(tagc_rooms_reserve(w.queue, &needs), TAGC_OK);
    pthread_join(thread, NULL);
    needs.n_rooms = 128;
    assert_int_equal(tagc_rooms_reserve(w.queue, &needs), TAGC_ERR_STATE);
    close_world(&w);
}
