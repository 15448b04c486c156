/* The trace opens: valid JSON of the Chrome kind, spans that do not overlap within a thread, transfers
 * that overlap compute; and the figures of a step add up. */
#include "toy.h"

#include "fsdp/trace.h"
#include <jansson.h>
#include <unistd.h>

/* The linker makes these of all calls of tagc_time_s: each rank's thread may have a clock of its own. */
static _Thread_local double clock_ahead_s;
double __real_tagc_time_s(void);
double __wrap_tagc_time_s(void);
double __wrap_tagc_time_s(void) {
    return __real_tagc_time_s() + clock_ahead_s;
}

typedef struct run {
    toy_model model;
    tagc_fsdp_options options;
    tagc_trace *traces[2];
    char path[200];
    tagc_fsdp_stats stats[2];
    tagc_status status[2];
    double loss[2]; /* asked for, or the compiler leaves the forward pass out */
} run;

static void train(tagc_comm *comm, void *arg) {
    run *r = arg;
    int rank = tagc_comm_rank(comm);
    tagc_trace *trace = r->traces[rank];
    tagc_fsdp *f;
    tagc_trace_pause(trace, 1);
    CHECK_OK(tagc_fsdp_create(comm, r->model.tensors, r->model.n_tensors, &r->options, trace, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    toy_step(&r->model, comm, f, 1, 0, 0.01, NULL); /* also learns what backward reads */
    tagc_trace_pause(trace, 0);
    for (uint64_t step = 1; step < 4; step++)
        r->loss[rank] = toy_step(&r->model, comm, f, 1, step, 0.01, &r->stats[rank]);
    const char *names[32];
    int n_units = tagc_fsdp_n_units(f);
    for (int i = 0; i < n_units; i++) names[i] = tagc_fsdp_unit_name(f, i);
    r->status[rank] = tagc_trace_write(trace, comm, names, n_units, r->path);
    tagc_fsdp_destroy(f);
}

typedef struct span {
    double start, end;
    int rank, thread;
    const char *name;
    uint64_t n_bytes;
} span;

enum { FIRST_LANE = 2 }; /* behind compute and codec */

/* Threads of a rank come in this order and are all named. */
static void check_thread(json_t *event, int *n_threads) {
    int rank = (int)json_integer_value(json_object_get(event, "pid"));
    int thread = (int)json_integer_value(json_object_get(event, "tid"));
    const char *name = json_string_value(json_object_get(json_object_get(event, "args"), "name"));
    char expected[32];
    snprintf(expected, sizeof expected, thread == FIRST_LANE ? "comm" : "comm %d", thread - FIRST_LANE + 1);
    assert_true(rank >= 0 && rank < 2);
    assert_int_equal(thread, n_threads[rank]++);
    assert_string_equal(name, thread == 0 ? "compute" : thread == 1 ? "codec" : expected);
}

/* n_threads: (2), by rank */
static size_t read_spans(json_t *root, span *spans, size_t capacity, int *n_threads) {
    size_t n = 0, i;
    json_t *event, *events = json_object_get(root, "traceEvents");
    assert_true(json_is_array(events));
    int n_processes = 0, n_sorted[2] = {0};
    n_threads[0] = n_threads[1] = 0;
    json_array_foreach(events, i, event) {
        const char *phase = json_string_value(json_object_get(event, "ph"));
        const char *name = json_string_value(json_object_get(event, "name"));
        assert_non_null(phase);
        assert_non_null(name);
        n_processes += strcmp(name, "process_name") == 0;
        if (strcmp(name, "thread_name") == 0) check_thread(event, n_threads);
        if (strcmp(name, "thread_sort_index") == 0) {
            json_t *index = json_object_get(json_object_get(event, "args"), "sort_index");
            assert_int_equal(json_integer_value(index), json_integer_value(json_object_get(event, "tid")));
            n_sorted[json_integer_value(json_object_get(event, "pid"))]++;
        }
        if (strcmp(phase, "X") != 0) continue;
        double start = json_number_value(json_object_get(event, "ts"));
        double duration = json_number_value(json_object_get(event, "dur"));
        assert_true(start >= 0 && duration >= 0 && start < 60e6);
        json_t *n_bytes = json_object_get(json_object_get(event, "args"), "n_bytes");
        assert_true(json_is_integer(n_bytes));
        assert_true(n < capacity);
        spans[n++] = (span){.start = start,
                            .end = start + duration,
                            .rank = (int)json_integer_value(json_object_get(event, "pid")),
                            .thread = (int)json_integer_value(json_object_get(event, "tid")),
                            .name = name,
                            .n_bytes = (uint64_t)json_integer_value(n_bytes)};
        assert_true(spans[n - 1].thread < n_threads[spans[n - 1].rank]);
    }
    assert_int_equal(n_processes, 2);
    for (int rank = 0; rank < 2; rank++) {
        assert_true(n_threads[rank] > FIRST_LANE);
        assert_int_equal(n_sorted[rank], n_threads[rank]);
    }
    return n;
}

/* Exact, without a tolerance: viewers do not forgive a nanosecond. */
static void check_no_overlap(const span *spans, size_t n) {
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < i; j++) {
            const span *a = &spans[i], *b = &spans[j];
            if (a->rank == b->rank && a->thread == b->thread)
                assert_true(a->end <= b->start || b->end <= a->start);
        }
}

static int has(const span *spans, size_t n, int rank, const char *name) {
    for (size_t i = 0; i < n; i++)
        if (spans[i].rank == rank && strcmp(spans[i].name, name) == 0) return 1;
    return 0;
}

static void make_run(run *r, int sharding) {
    memset(r, 0, sizeof *r);
    toy_gpt(&r->model, 3, 48, 0);
    r->model.compute_us = 1000;
    snprintf(r->model.tensors[2].name, TAGC_TENSOR_NAME_BYTES, "%s", "h.0.\"quoted\\");
    tagc_fsdp_options_init(&r->options);
    r->options.reducer.exchange = TAGC_EXCHANGE_PACKED;
    r->options.sharding = sharding;
    r->options.reducer.sparsity = 0.9;
    snprintf(r->path, sizeof r->path, "/tmp/tagc-trace-%d.json", (int)getpid());
}

TEST(trace_opens) {
    run r;
    make_run(&r, TAGC_SHARD_FULL);
    for (int i = 0; i < 2; i++) CHECK_OK(tagc_trace_create(100000, &r.traces[i]));
    toy_run_traced(2, train, &r, r.traces);
    assert_true(r.status[0] == TAGC_OK && r.status[1] == TAGC_OK && r.loss[0] > 0);
    json_error_t error;
    json_t *root = json_load_file(r.path, JSON_REJECT_DUPLICATES, &error);
    if (root == NULL) print_error("line %d: %s\n", error.line, error.text);
    assert_non_null(root);
    enum { CAPACITY = 100000 };
    span *spans = calloc(CAPACITY, sizeof *spans);
    int n_threads[2];
    size_t n = read_spans(root, spans, CAPACITY, n_threads);
    check_no_overlap(spans, n);
    for (int rank = 0; rank < 2; rank++) {
        assert_true(has(spans, n, rank, "forward h.1") && has(spans, n, rank, "backward h.1"));
        assert_true(has(spans, n, rank, "optimizer") && has(spans, n, rank, "gather h.1"));
        assert_true(has(spans, n, rank, "forward ln_f+lm_head"));
        int n_overlaps = 0;
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < n; j++) {
                const span *a = &spans[i], *b = &spans[j];
                if (a->rank != rank || b->rank != rank || i == j || a->thread != 0) continue;
                int meets = a->start + 0.01 < b->end && b->start + 0.01 < a->end;
                int busy = strncmp(a->name, "forward", 7) == 0 || strncmp(a->name, "backward", 8) == 0;
                n_overlaps += b->thread >= FIRST_LANE && meets && busy;
            }
        assert_true(n_overlaps > 0);
    }
    json_decref(root);
    free(spans);
    unlink(r.path);
    for (int i = 0; i < 2; i++) tagc_trace_destroy(r.traces[i]);
}

TEST(full_traces_count_what_they_drop) {
    run r;
    make_run(&r, TAGC_SHARD_GRAD);
    for (int i = 0; i < 2; i++) CHECK_OK(tagc_trace_create(7, &r.traces[i]));
    toy_run_traced(2, train, &r, r.traces);
    json_t *root = json_load_file(r.path, 0, NULL);
    json_t *events = json_object_get(root, "traceEvents");
    json_t *last = json_array_get(events, json_array_size(events) - 1);
    assert_true(json_integer_value(json_object_get(json_object_get(last, "args"), "n_dropped")) > 0);
    size_t n_spans = 0, index;
    json_t *event;
    json_array_foreach(events, index, event) n_spans +=
        strcmp(json_string_value(json_object_get(event, "ph")), "X") == 0;
    assert_int_equal(n_spans, 2 * 7);
    json_decref(root);
    unlink(r.path);
    for (int i = 0; i < 2; i++) tagc_trace_destroy(r.traces[i]);
}

/* ---- lanes ---- */

enum { N_TRANSFERS = 300, MAX_LANES = 64 };

typedef struct lanes {
    tagc_trace *traces[2];
    tagc_event events[2][N_TRANSFERS];
    double ahead_s[2]; /* of the ranks' clocks */
    char path[200];
} lanes;

static void write_lanes(tagc_comm *comm, void *arg) {
    lanes *l = arg;
    int rank = tagc_comm_rank(comm);
    clock_ahead_s = l->ahead_s[rank];
    for (int i = 0; i < N_TRANSFERS; i++) tagc_trace_add(l->traces[rank], &l->events[rank][i]);
    CHECK_OK(tagc_trace_write(l->traces[rank], comm, NULL, 0, l->path));
}

/* In no order at all. Times on a grid finer than the file's, so that many touch; some are empty. */
static void make_transfers(tagc_event *events, uint64_t *state, double base_s, int longest) {
    for (int i = 0; i < N_TRANSFERS; i++) {
        uint64_t draw = *state = *state * 6364136223846793005u + 1442695040888963407u;
        double start_s = base_s + (double)(draw >> 33 & 1023) * 50e-9;
        double length_s = (double)((draw >> 43) % (unsigned)longest) * 50e-9;
        events[i] = (tagc_event){"comm", "values", start_s, start_s + length_s, draw >> 50, UINT64_MAX};
    }
}

/* As many as are under way at the start of one of them. An empty one needs a lane, but does not hold it. */
static int count_together(const tagc_event *events) {
    int most = 0;
    for (int i = 0; i < N_TRANSFERS; i++) {
        int n = 0;
        for (int j = 0; j < N_TRANSFERS; j++)
            n += events[j].start_s <= events[i].start_s && events[j].end_s > events[i].start_s;
        most = n > most ? n : most;
    }
    return most;
}

static void check_lanes(lanes *l, int longest, uint64_t *state) {
    double base_s = tagc_time_s() - 1;
    snprintf(l->path, sizeof l->path, "/tmp/tagc-lanes-%d.json", (int)getpid());
    for (int i = 0; i < 2; i++) {
        CHECK_OK(tagc_trace_create(N_TRANSFERS, &l->traces[i]));
        make_transfers(l->events[i], state, base_s + l->ahead_s[i], i == 0 ? longest : 2);
    }
    toy_run_traced(2, write_lanes, l, NULL);
    json_t *root = json_load_file(l->path, 0, NULL);
    json_t *events = json_object_get(root, "traceEvents");
    json_t *last = json_array_get(events, json_array_size(events) - 1);
    json_int_t n_dropped = json_integer_value(json_object_get(json_object_get(last, "args"), "n_dropped"));
    static span spans[2 * N_TRANSFERS];
    int n_threads[2];
    size_t n = read_spans(root, spans, 2 * N_TRANSFERS, n_threads);
    check_no_overlap(spans, n);
    assert_int_equal(n + (size_t)n_dropped, 2 * N_TRANSFERS);
    uint64_t n_bytes[2] = {0}, expected[2] = {0};
    for (size_t i = 0; i < n; i++) n_bytes[spans[i].rank] += spans[i].n_bytes;
    for (int rank = 0; rank < 2; rank++) {
        int together = count_together(l->events[rank]), n_lanes = n_threads[rank] - FIRST_LANE;
        for (int i = 0; i < N_TRANSFERS; i++) expected[rank] += l->events[rank][i].n_bytes;
        if (together < MAX_LANES) { /* an empty one may want one more */
            assert_int_equal(n_bytes[rank], expected[rank]);
            assert_true(n_lanes >= together && n_lanes <= together + 1);
        } else
            assert_int_equal(n_lanes, MAX_LANES);
        if (together > MAX_LANES) assert_true(n_dropped > 0 && n_bytes[rank] < expected[rank]);
    }
    json_decref(root);
    unlink(l->path);
    for (int i = 0; i < 2; i++) tagc_trace_destroy(l->traces[i]);
}

TEST(transfers_get_lanes) {
    static lanes l;
    uint64_t random = 1;
    for (int longest = 2; longest < 1000; longest *= 2) check_lanes(&l, longest, &random);
}

/* As long as all transfers lie within the first minute, the writer has told the clocks apart. Half of these clocks are
 * below zero. */
TEST(clocks_may_differ) {
    static lanes l;
    uint64_t random = 2;
    for (int rank = 0; rank < 2; rank++)
        for (int sign = -1; sign <= 1; sign += 2) {
            l.ahead_s[rank] = sign > 0 ? 1000 : -1000 - floor(tagc_time_s());
            check_lanes(&l, 16, &random);
            l.ahead_s[rank] = 0;
        }
}

TEST(unwritable_is_said_by_all) {
    run r;
    make_run(&r, TAGC_SHARD_NONE);
    snprintf(r.path, sizeof r.path, "/nowhere/trace.json");
    for (int i = 0; i < 2; i++) CHECK_OK(tagc_trace_create(7, &r.traces[i]));
    toy_run_traced(2, train, &r, r.traces);
    assert_true(r.status[0] == TAGC_ERR_IO && r.status[1] == TAGC_ERR_IO);
    for (int i = 0; i < 2; i++) tagc_trace_destroy(r.traces[i]);
    tagc_trace *none;
    assert_int_equal(tagc_trace_create(0, &none), TAGC_ERR_ARGUMENT);
    tagc_trace_destroy(NULL);
}

/* Dense, two ranks: the wire is known to the byte. */
TEST(figures_add_up) {
    for (int variant = 0; variant < 4; variant++) {
        run r;
        int sharding = variant % 3;
        make_run(&r, sharding);
        /* nothing large: one root unit, kept from forward to backward */
        if (variant == 3) r.options.wrap = TAGC_WRAP_MATRIX;
        r.options.policy = TAGC_POLICY_NONE;
        for (int i = 0; i < 2; i++) CHECK_OK(tagc_trace_create(7, &r.traces[i]));
        toy_run_traced(2, train, &r, r.traces);
        unlink(r.path);
        double n_bits = 32.0 / 2; /* (W - 1) / W */
        for (int rank = 0; rank < 2; rank++) {
            const tagc_fsdp_stats *s = &r.stats[rank];
            double gathers = variant == 3                  ? 1
                             : sharding == TAGC_SHARD_FULL ? 2
                             : sharding == TAGC_SHARD_GRAD ? 1
                                                           : 0;
            assert_true(fabs(s->bits_per_param[TAGC_LEG_VALUES] - n_bits) < 0.02 * n_bits);
            assert_true(fabs(s->bits_per_param[TAGC_LEG_GATHER] - gathers * n_bits) <=
                        0.02 * gathers * n_bits);
            assert_true((s->n_bytes_sent[TAGC_LEG_RESULT] > 0) == (sharding == TAGC_SHARD_NONE));
            double sum = s->compute_s + s->wait_gather_s + s->wait_reduce_s + s->optimizer_s;
            assert_true(fabs(sum - s->total_s) < 1e-9 && s->compute_s > 0 && s->optimizer_s > 0);
            assert_true(s->n_compressed == 0 && s->n_sent == 0);
        }
        for (int i = 0; i < 2; i++) tagc_trace_destroy(r.traces[i]);
    }
}

TEST(compressed_figures) {
    run r;
    make_run(&r, TAGC_SHARD_FULL);
    r.options.policy = TAGC_POLICY_ALL;
    for (int i = 0; i < 2; i++) CHECK_OK(tagc_trace_create(7, &r.traces[i]));
    toy_run_traced(2, train, &r, r.traces);
    unlink(r.path);
    const tagc_fsdp_stats *s = &r.stats[1];
    assert_int_equal(s->n_compressed, toy_n_params(&r.model));
    assert_true(s->n_sent > 0 && (double)s->n_sent <= 0.1 * 1.01 * (double)s->n_compressed);
    assert_true(s->n_union >= s->n_sent && s->n_union <= 2 * s->n_sent + 64);
    assert_true(s->bits_per_param[TAGC_LEG_INDEX] > 0.9 && s->bits_per_param[TAGC_LEG_VALUES] < 32 * 0.2);
    for (int i = 0; i < 2; i++) tagc_trace_destroy(r.traces[i]);
}
