/* Units: what the queue exchanges by itself gives the bits of the same reducers on the host, for each type of element and any runs;
 * failures and differences are told in the agreement. Ranks are threads, with one device each. */
#include "../lengths.h"
#include "rig.h"

#include "codec/elements.h"

#include <math.h>

enum { RANKS = 2, ROW = 96, N_INPUT = RANKS * ROW, N_STEPS = 21, N_SAMPLES = 5, FIRST_DEVICE = 1 };

/* A row is 64 values of part 0, 24 of part 1, and 8 that no part has. */
enum { ROW_0 = 64, ROW_1 = 24, N_PARTS = 2 };

typedef struct one_rank {
    struct world *world;
    int rank, n_different;
    tagc_status statuses[N_STEPS];
    int are_agreed[N_STEPS];
    char whys[N_STEPS][512];
    int n_windows; /* full ones */
    double squares[2 * 2];
} one_rank;

typedef struct world {
    tagc_local_group *group;
    int element, all_reduce;
    float factor;
    int fails_at; /* the step in which rank 1 says something else; -1: none */
    one_rank ranks[RANKS];
} world;

static uint16_t half_bits(float value) {
    uint16_t bits;
    tagc_elements_write(&value, &bits, TAGC_ELEMENT_FP16, 0, 1);
    return bits;
}

/* All 65,536 of them widen and narrow to themselves, and what is between two goes to the nearer, or the even one. */
static void test_fp16(void **state) {
    (void)state;
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        uint16_t half = (uint16_t)bits;
        float wide;
        tagc_elements_read(&half, TAGC_ELEMENT_FP16, 0, 1, &wide);
        if ((bits & 0x7fff) > 0x7c00) {
            assert_true(isnan(wide));
            assert_true((half_bits(wide) & 0x7fff) > 0x7c00);
            continue;
        }
        assert_int_equal(half_bits(wide), bits);
        uint16_t next = (uint16_t)(bits + 1);
        float above;
        tagc_elements_read(&next, TAGC_ELEMENT_FP16, 0, 1, &above);
        if ((bits & 0x7fff) >= 0x7bff) continue; /* Inf comes next */
        float middle = (wide + above) / 2;
        assert_int_equal(half_bits(middle), bits & 1 ? next : bits);
        assert_int_equal(half_bits(nextafterf(middle, above)), next);
        assert_int_equal(half_bits(nextafterf(middle, wide)), bits);
    }
    assert_int_equal(half_bits(65519.996f), 0x7bff);
    assert_int_equal(half_bits(65520.0f), 0x7c00);
    assert_int_equal(half_bits(-1e30f), 0xfc00);
    uint16_t one = 0x3c00, two = 0x4000;
    float wide;
    tagc_elements_read(&one, TAGC_ELEMENT_FP16, 0, 1, &wide);
    assert_true(wide == 1.0f);
    tagc_elements_read(&two, TAGC_ELEMENT_FP16, 0, 1, &wide);
    assert_true(wide == 2.0f);
}

/* reads_bf16: whether part 0 reads its gradient in bf16. */
static void make(tagc_comm *comm, int all_reduce, int reads_bf16, tagc_reducer **out) {
    static const int rows[N_PARTS] = {ROW_0, ROW_1};
    for (int p = 0; p < N_PARTS; p++) {
        tagc_reducer_options options;
        tagc_reducer_options_init(&options);
        options.n_elems = (uint64_t)rows[p] * RANKS;
        options.output = all_reduce ? TAGC_OUTPUT_UNIT : TAGC_OUTPUT_SHARD;
        options.op = TAGC_OP_SUM;
        options.sparsity = p == 0 ? 0.75 : 0;
        options.exchange = TAGC_EXCHANGE_DIRECT;
        options.gradient = p == 0 && reads_bf16 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
        if (tagc_reducer_create(comm, &options, &out[p]) != TAGC_OK) abort();
    }
}

static void write_gradient(const one_rank *own, int step, char *to) {
    for (int i = 0; i < N_INPUT; i++) {
        uint32_t x = (uint32_t)(((step * RANKS + own->rank) * N_INPUT + i) * 2654435761u);
        float value = (float)((double)(x >> 8) / 16777216.0 - 0.5);
        tagc_elements_write(&value, to, own->world->element, (uint64_t)i, 1);
    }
}

typedef struct kernel {
    const one_rank *own;
    char *array, *result;
    int step;
    size_t n_bytes;
} kernel;

static void write_there(void *arg) {
    const kernel *one = arg;
    write_gradient(one->own, one->step, fake_view(one->array));
}

static void read_there(void *arg) {
    const kernel *one = arg;
    memcpy(one->result, fake_view(one->array), one->n_bytes);
}

/* The same by hand, on the host. */
static void expect(const one_rank *own, int step, tagc_reducer **plain, const tagc_unit_part *parts, char *to,
                   size_t n_output) {
    char input[N_INPUT * sizeof(float)];
    int element = own->world->element;
    write_gradient(own, step, input);
    memset(to, 0, n_output * tagc_element_bytes(element));
    for (int p = 0; p < N_PARTS; p++) {
        float gradient[N_INPUT] = {0}, output[N_INPUT];
        for (uint64_t r = 0; r < parts[p].n_packs; r++)
            for (uint64_t i = 0; i < parts[p].packs[r].length; i++)
                tagc_elements_read(input, element, parts[p].packs[r].from + i, 1,
                                   &gradient[parts[p].packs[r].to + i]);
        if (run_reducer(plain[p], gradient, output, NULL) != TAGC_OK) abort();
        for (uint64_t r = 0; r < parts[p].n_unpacks; r++)
            for (uint64_t i = 0; i < parts[p].unpacks[r].length; i++) {
                float value = output[parts[p].unpacks[r].from + i] * own->world->factor;
                tagc_elements_write(&value, to, element, parts[p].unpacks[r].to + i, 1);
            }
    }
}

static void *exchange_main(void *arg) {
    uint64_t number, tag;
    const void *input;
    void *output;
    tagc_queue_next(arg, &number, &tag, &input, &output);
    if (number) abort(); /* there are only units */
    return NULL;
}

static void *rank_main(void *arg) {
    one_rank *own = arg;
    world *all = own->world;
    tagc_comm *comm;
    const int32_t names[RANKS] = {10, 11};
    tagc_comm_options comm_options;
    tagc_comm_options_init(&comm_options);
    comm_options.names = names;
    if (tagc_comm_create_local(all->group, own->rank, &comm_options, &comm) != TAGC_OK) abort();
    tagc_reducer *reducers[N_PARTS], *plain[N_PARTS];
    make(comm, all->all_reduce, all->element == TAGC_ELEMENT_BF16, reducers);
    make(comm, all->all_reduce, 0, plain);

    /* runs */
    int n_rows_out = all->all_reduce ? RANKS : 1;
    tagc_run packs[N_PARTS][RANKS], unpacks[N_PARTS][RANKS];
    static const int rows[N_PARTS] = {ROW_0, ROW_1}, at[N_PARTS] = {0, ROW_0};
    tagc_unit_part parts[N_PARTS];
    for (int p = 0; p < N_PARTS; p++) {
        uint64_t n = (uint64_t)rows[p];
        for (int r = 0; r < RANKS; r++)
            packs[p][r] = (tagc_run){(uint64_t)(r * ROW + at[p]), (uint64_t)r * n, n};
        for (int r = 0; r < n_rows_out; r++)
            unpacks[p][r] = (tagc_run){(uint64_t)r * n, (uint64_t)(r * ROW + at[p]), n};
        parts[p] = (tagc_unit_part){reducers[p], n * RANKS,  n * (uint64_t)n_rows_out, packs[p],
                                    RANKS,       unpacks[p], (uint64_t)n_rows_out};
    }

    tagc_schedule_options schedule_options;
    tagc_schedule_options_init(&schedule_options);
    schedule_options.gentle = 1;
    tagc_schedule_parameter parameter = {.name = "a", .n_elems = N_INPUT};
    tagc_schedule *schedule;
    if (tagc_schedule_create(&schedule_options, &parameter, 1, &schedule) != TAGC_OK) abort();

    tagc_device *device;
    tagc_queue *queue;
    if (tagc_device_open("cuda", FAKE_CUDART, FIRST_DEVICE + own->rank, &device) != TAGC_OK) abort();
    if (tagc_queue_create(device, 2, &queue) != TAGC_OK) abort();
    const uint32_t numbers[1] = {0}, counts[1] = {N_SAMPLES};
    const uint64_t places[N_SAMPLES] = {0, 1, 70, 100, 190};
    tagc_unit_options options = {
        .struct_bytes = sizeof options,
        .what = "gradients of a",
        .element = all->element,
        .has_gaps = 1,
        .factor = all->factor,
        .n_parts = N_PARTS,
        .parts = parts,
        .n_input = N_INPUT,
        .n_output = (uint64_t)(n_rows_out * ROW),
        .n_comms = 1,
        .comms = {comm},
        .n_sampled = 1,
        .schedule = schedule,
        .numbers = numbers,
        .counts = counts,
        .places = places,
    };
    tagc_unit *unit;
    if (all->element == TAGC_ELEMENT_BF16) { /* which part 0 could not read of another unit */
        options.element = TAGC_ELEMENT_FP16;
        if (tagc_unit_create(queue, &options, &unit) != TAGC_ERR_ARGUMENT) abort();
        if (!strstr(tagc_last_error(), "the reducer of part 0 reads bf16")) abort();
        options.element = TAGC_ELEMENT_BF16;
    }
    parts[1].n_output--;
    if (tagc_unit_create(queue, &options, &unit) != TAGC_ERR_ARGUMENT) abort();
    if (!strstr(tagc_last_error(), "part 1: n_output is ")) abort();
    parts[1].n_output++;
    if (tagc_unit_create(queue, &options, &unit) != TAGC_OK) abort();
    uint64_t n_gradients, n_outputs;
    tagc_unit_work(unit, &n_gradients, &n_outputs);

    const tagc_runtime *runtime = &device->runtime;
    int before;
    if (tagc_device_enter(device, &before) != TAGC_OK) abort();
    size_t n_bytes = options.n_output * tagc_element_bytes(all->element);
    char *source = fake_alloc(N_INPUT * sizeof(float)), *target = fake_alloc(n_bytes);
    char *results = calloc(N_STEPS, n_bytes), *wanted = calloc(1, n_bytes);
    void *stream;
    if (fake_stream(&stream)) abort();
    tagc_unit_step steps[N_STEPS];
    kernel before_it[N_STEPS], after_it[N_STEPS];
    float *gradients = malloc(n_gradients * sizeof(float)), *outputs = malloc(n_outputs * sizeof(float));
    tagc_reducer_stats stats[N_PARTS];
    uint32_t full[1];
    tagc_schedule_sums sums[1];
    double squares[2 * N_PARTS] = {0};
    pthread_t thread;
    if (pthread_create(&thread, NULL, exchange_main, queue)) abort();
    uint64_t last;
    int is_over;
    for (int p = 0; p < N_PARTS; p++) tagc_reducer_stats_init(&stats[p]);
    for (int s = 0; s < N_STEPS; s++) {
        int is_odd = s == all->fails_at && own->rank == 1;
        steps[s] = (tagc_unit_step){
            .words = {1 << 8, is_odd ? 8 : 7},
            .text = is_odd ? "elements 8" : "elements 7",
            .number = (uint64_t)s + 1,
            .gradients = gradients,
            .outputs = outputs,
            .n_gradients = n_gradients,
            .n_outputs = n_outputs,
            .status = TAGC_ERR_STATE,
            .stats = stats,
            .full = full,
            .sums = sums,
            .squares = squares,
        };
        before_it[s] = (kernel){own, source, NULL, s, 0};
        after_it[s] = (kernel){own, target, results + (size_t)s * n_bytes, s, n_bytes};
        fake_launch(stream, write_there, &before_it[s]);
        if (tagc_unit_enqueue(unit, &steps[s], source, N_INPUT, target, options.n_output, stream, 1, &last) !=
            TAGC_OK)
            abort();
        fake_launch(stream, read_there, &after_it[s]);
    }
    tagc_queue_wait(queue, last, 0, &is_over);
    if (runtime->StreamSynchronize(stream)) abort();
    int is_failed = 0;
    for (int s = 0; s < N_STEPS; s++) {
        own->statuses[s] = steps[s].status;
        own->are_agreed[s] = steps[s].is_agreed;
        snprintf(own->whys[s], sizeof own->whys[s], "%s", steps[s].why);
        is_failed |= s == all->fails_at;
        if (is_failed)
            memset(wanted, 0xff, n_bytes);
        else
            expect(own, s, plain, parts, wanted, options.n_output);
        own->n_windows += (int)steps[s].n_full;
        own->n_different += memcmp(wanted, results + (size_t)s * n_bytes, n_bytes) != 0;
    }
    memcpy(own->squares, squares, sizeof squares);
    tagc_queue_close(queue);
    pthread_join(thread, NULL);
    tagc_unit_destroy(unit);
    tagc_queue_destroy(queue);
    fake_free(source);
    fake_free(target);
    tagc_device_close(device);
    for (int p = 0; p < N_PARTS; p++) {
        tagc_reducer_destroy(reducers[p]);
        tagc_reducer_destroy(plain[p]);
    }
    tagc_schedule_destroy(schedule);
    tagc_comm_destroy(comm);
    free(results);
    free(wanted);
    free(gradients);
    free(outputs);
    return NULL;
}

static void run(world *all, uint64_t seed, const char *manners) {
    fake_reset(seed, FIRST_DEVICE + RANKS, FAKE_EAGER, 1);
    fake_behave(manners);
    assert_int_equal(tagc_local_group_create(RANKS, &all->group), TAGC_OK);
    pthread_t threads[RANKS];
    for (int r = 0; r < RANKS; r++) {
        all->ranks[r] = (one_rank){.world = all, .rank = r};
        assert_int_equal(pthread_create(&threads[r], NULL, rank_main, &all->ranks[r]), 0);
    }
    for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
    tagc_local_group_destroy(all->group);
    if (fake_n_mistakes()) print_error("%s\n%s\n", fake_mistake(0), fake_report());
    assert_int_equal(fake_n_mistakes(), 0);
    assert_int_equal(fake_contexts() & 1, 0); /* nobody's device */
    for (int r = 0; r < RANKS; r++) assert_int_equal(all->ranks[r].n_different, 0);
}

/* The schedule's window was full once, in the 20th exchange. */
static void check_window(const one_rank *own) {
    char input[N_INPUT * sizeof(float)];
    double expected = 0;
    assert_int_equal(own->n_windows, 1);
    write_gradient(own, 19, input);
    for (int r = 0; r < RANKS; r++)
        for (int i = 0; i < ROW_0; i++) {
            float value;
            tagc_elements_read(input, own->world->element, (uint64_t)(r * ROW + i), 1, &value);
            expected += (double)value * (double)value;
        }
    assert_true(fabs(own->squares[1] - expected) < 1e-9 * expected);
    assert_true(own->squares[0] > 0); /* what part 0 has not sent */
}

static void test_bits(void **state) {
    (void)state;
    static const char *const manners[] = {"", "all"};
    uint64_t seed = 0;
    for (int element = TAGC_ELEMENT_FP32; element <= TAGC_ELEMENT_FP16; element++)
        for (int all_reduce = 0; all_reduce < 2; all_reduce++)
            for (int m = 0; m < 2; m++) {
                world all = {.element = element,
                             .all_reduce = all_reduce,
                             .factor = all_reduce ? 0.3f : 1.0f,
                             .fails_at = -1};
                run(&all, ++seed, manners[m]);
                for (int r = 0; r < RANKS; r++) {
                    for (int s = 0; s < N_STEPS; s++) {
                        assert_int_equal(all.ranks[r].statuses[s], TAGC_OK);
                        assert_true(all.ranks[r].are_agreed[s]);
                    }
                    check_window(&all.ranks[r]);
                }
            }
}

/* One rank comes with something else: both say who, and the exchanges after it only report that. */
static void test_differences(void **state) {
    (void)state;
    world all = {.element = TAGC_ELEMENT_BF16, .factor = 1.0f, .fails_at = 3};
    run(&all, 77, "");
    for (int r = 0; r < RANKS; r++)
        for (int s = 0; s < N_STEPS; s++) {
            const one_rank *own = &all.ranks[r];
            assert_int_equal(own->statuses[s], s < 3 ? TAGC_OK : TAGC_ERR_MISMATCH);
            assert_int_equal(own->are_agreed[s], s < 3);
            if (s == 3)
                assert_string_equal(own->whys[s],
                                    "gradients of a: ranks do not agree: rank 10 has elements 7; "
                                    "rank 11 has elements 8");
        }
}

/* Runs and samples that are, or add up to, more than there is; the largest numbers, too, whose sums are small. */
static void test_runs(void **state) {
    (void)state;
    enum { N = 64 };
    const tagc_run whole = {0, 0, N},
                   bad[] = {{1, 0, N},          {0, 1, N},          {0, 0, N + 1},
                            {N + 1, 0, 0},      {0, N + 1, 0},      {1, 1, UINT64_MAX},
                            {UINT64_MAX, 0, 1}, {0, UINT64_MAX, 1}, {UINT64_MAX, UINT64_MAX, N}};
    const uint32_t numbers[] = {0}, counts[] = {2};
    uint64_t places[] = {0, N};
    tagc_local_group *group;
    tagc_comm *comm;
    tagc_device *device;
    tagc_queue *queue;
    tagc_reducer *reducer;
    tagc_reducer_options reducer_options;
    fake_reset(5, 1, FAKE_EAGER, 1);
    assert_int_equal(tagc_local_group_create(1, &group), TAGC_OK);
    assert_int_equal(tagc_comm_create_local(group, 0, NULL, &comm), TAGC_OK);
    tagc_reducer_options_init(&reducer_options);
    reducer_options.n_elems = N;
    assert_int_equal(tagc_reducer_create(comm, &reducer_options, &reducer), TAGC_OK);
    assert_int_equal(tagc_device_open("cuda", FAKE_CUDART, 0, &device), TAGC_OK);
    assert_int_equal(tagc_queue_create(device, 2, &queue), TAGC_OK);
    for (size_t i = 0; i <= 2 * sizeof bad / sizeof *bad; i++) {
        tagc_unit_part part = {reducer, N, N, &whole, 1, &whole, 1};
        tagc_unit_options options = {.struct_bytes = sizeof options,
                                     .what = "a",
                                     .factor = 1,
                                     .n_parts = 1,
                                     .parts = &part,
                                     .n_input = N,
                                     .n_output = N,
                                     .n_comms = 1,
                                     .comms = {comm}};
        tagc_unit *unit = (tagc_unit *)1;
        if (i == 2 * sizeof bad / sizeof *bad) {
            options.n_sampled = 1;
            options.numbers = numbers, options.counts = counts, options.places = places;
        } else if (i % 2) {
            part.packs = &bad[i / 2];
        } else {
            part.unpacks = &bad[i / 2];
        }
        assert_int_equal(tagc_unit_create(queue, &options, &unit), TAGC_ERR_ARGUMENT);
        assert_non_null(strstr(tagc_last_error(), " out of "));
        assert_null(unit);
    }
    tagc_queue_destroy(queue);
    tagc_device_close(device);
    tagc_reducer_destroy(reducer);
    tagc_comm_destroy(comm);
    tagc_local_group_destroy(group);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_runs),
        cmocka_unit_test(test_fp16),
        cmocka_unit_test(test_bits),
        cmocka_unit_test(test_differences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
