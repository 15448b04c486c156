/* Units with kernels, which a thread exchanges by flags: the bits of the same reducers on the processor, whoever has kernels; steps
 * that fail; and each planted mistake is found. Ranks are threads, with a device of the fake runtime each; kernels run in the harness. */
#include "../../exchange/ranks.h"
#include "../../exchange/rounds.h"
#include "../../lengths.h"
#include "../../repeats.h"
#include "../fake_runtime.h"
#include "codec/elements.h"
#include "exchange/direct/direct.h"
#include "gpu/unit_private.h"
#include "harness_maker.h"

#include <math.h>

enum {
    WINDOW = 20 /* exchanges, of the schedule */,
    MAX_STEPS = 24,
    N_UNITS = 3,
    ROW = 112,
    MOST = 4 * ROW,
    N_SAMPLES = 5,
    N_PARTS = 3
};

/* A row of unit 0 is 64 values of part 0, 24 of part 1, 16 of part 2, and 8 that no part has. The others have one part, which is the
 * whole row. */
static const int widths[N_PARTS] = {64, 24, 16};

typedef enum sabotage { NOTHING, DROP_WAIT, DROP_FLAG, RECORD_ELSEWHERE } sabotage;

typedef struct trial {
    int seed, n_steps, element, all_reduce, is_pipelined, waits_each;
    unsigned on_device; /* a bit for each rank */
    float factor;
    int other_at;        /* the step in which rank 1 says something else; -1: none */
    int odd_at;          /* the step in which a gradient is not finite, or sums are not; -1: none */
    const char *failing; /* a call of the runtime that fails in the second step of rank 0; NULL: none */
    int nth;
    const char *manners;
    const char *refused; /* words of why there are no kernels; NULL: there are */
    sabotage sabotage;
    int n; /* which call of an exchange */
    int n_found;
    pthread_barrier_t barrier;
} trial;

/* ---- between a queue and the runtime ---- */

/* Of the thread that enqueues: every other one that calls CUDA is a mistake. */
static _Thread_local const trial *enqueues;
static _Thread_local int n_waits, n_flags, n_records;
static _Thread_local void *last_stream;
static tagc_runtime real;
static _Atomic int n_foreign;

static int between_capturing(void *stream, int *status) { /* the first call of an exchange */
    n_waits = n_flags = n_records = 0;
    return real.StreamIsCapturing(stream, status);
}

static void note(void) {
    if (!enqueues) n_foreign++;
}

static int is_it(sabotage kind, int *n) {
    note();
    return enqueues && enqueues->sabotage == kind && (*n)++ == enqueues->n;
}

static int between_wait(void *stream, void *event, unsigned flags) {
    return is_it(DROP_WAIT, &n_waits) ? 0 : real.StreamWaitEvent(stream, event, flags);
}

static int between_flag(void *stream, uint64_t address, uint32_t value, unsigned flags) {
    return is_it(DROP_FLAG, &n_flags) ? 0 : real.StreamWaitValue32(stream, address, value, flags);
}

static int between_record(void *event, void *stream) {
    void *other = last_stream;
    last_stream = stream;
    return real.EventRecord(event, is_it(RECORD_ELSEWHERE, &n_records) && other ? other : stream);
}

static int between_copy(void *to, const void *from, size_t n_bytes, int kind, void *stream) {
    note();
    return real.MemcpyAsync(to, from, n_bytes, kind, stream);
}

static int between_device(int *ordinal) {
    note();
    return real.GetDevice(ordinal);
}

static int between_pointer(void *attributes, const void *pointer) {
    note();
    return real.PointerGetAttributes(attributes, pointer);
}

/* Batches whose memory overlaps work in one stream: streams have no order between their works. */
static tagc_batch_maker noting_batches;
static tagc_maker noting_maker;
static pthread_mutex_t areas_lock = PTHREAD_MUTEX_INITIALIZER;
static struct area {
    const char *begin, *end;
    const void *stream;
} areas[4096];
static int n_areas, n_shared;

static tagc_status create_and_note(tagc_batch_kind kind, const tagc_batch_row *rows, size_t n_rows,
                                   tagc_batch_result *results, void *work, tagc_pool *pool, void *stream,
                                   tagc_batch **out) {
    const tagc_batch_maker *batches = harness_maker()->batches;
    struct area new = {work, (const char *)work + batches->work_bytes(kind, rows, n_rows, 1), stream};
    pthread_mutex_lock(&areas_lock);
    for (int i = 0; i < n_areas; i++)
        n_shared += areas[i].begin < new.end &&new.begin < areas[i].end &&areas[i].stream != stream;
    if (n_areas == (int)(sizeof areas / sizeof *areas)) abort();
    areas[n_areas++] = new;
    pthread_mutex_unlock(&areas_lock);
    return batches->create(kind, rows, n_rows, results, work, pool, stream, out);
}

static void make_noting(void) {
    noting_maker = *harness_maker();
    noting_batches = *noting_maker.batches;
    noting_batches.create = create_and_note;
    noting_maker.batches = &noting_batches;
    n_areas = n_shared = 0;
}

/* ---- a rank ---- */

typedef struct unit_of_test {
    tagc_unit *unit;
    tagc_store *store;
    tagc_reducer *reducers[N_PARTS], *plain[N_PARTS];
    tagc_unit_part parts[N_PARTS];
    tagc_run packs[N_PARTS][4], unpacks[N_PARTS][4];
    int n_parts, element;
    char *source, *target; /* on the device; all-reduce: the same array */
    size_t n_bytes_in, n_bytes_out;
    uint64_t n_input, n_output, n_gradients, n_outputs;
    char *results, *wanted;
    tagc_unit_step steps[MAX_STEPS];
    tagc_reducer_stats stats[MAX_STEPS][N_PARTS], plain_stats[N_PARTS];
    float *gradients, *outputs;
    double squares[MAX_STEPS][2 * N_PARTS], plain_squares[2 * N_PARTS];
    uint32_t full[1];
    tagc_schedule_sums sums[1];
} unit_of_test;

typedef struct kernel {
    const struct one_rank *own;
    unit_of_test *unit;
    int number, step;
} kernel;

typedef struct one_rank {
    rank_run *run;
    trial *trial;
    tagc_device *device;
    tagc_kernels *kernels;
    tagc_queue *queue;
    unit_of_test units[N_UNITS];
    kernel work[MAX_STEPS][N_UNITS];
    tagc_schedule *schedule;
    void *stream, *step_over;
    pthread_t thread;
    uint64_t last;
} one_rank;

static void write_gradient(const one_rank *own, int number, int step, int element, char *to) {
    const trial *t = own->trial;
    int n = own->run->world_size * ROW, rank = own->run->rank;
    for (int i = 0; i < n; i++) {
        uint64_t x = (uint64_t)((((t->seed * MAX_STEPS + step) * N_UNITS + number) * 8 + rank) * MOST + i);
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        float value = (float)((double)(x >> 40) / 16777216.0 - 0.5);
        if (step == t->odd_at && number == 0 && t->seed % 2 && i == 7 && rank == 0) value = INFINITY;
        if (step == t->odd_at && number == 1 && t->seed % 2 == 0 && i % ROW == 3) value = 3e38f;
        tagc_elements_write(&value, to, element, (uint64_t)i, 1);
    }
}

static void write_there(void *arg) {
    const kernel *one = arg;
    write_gradient(one->own, one->number, one->step, one->unit->element, fake_view(one->unit->source));
}

static void read_there(void *arg) {
    const kernel *one = arg;
    unit_of_test *u = one->unit;
    char *from = fake_view(u->target);
    memcpy(u->results + (size_t)one->step * u->n_bytes_out, from, u->n_bytes_out);
    memset(from, 0x11, u->n_bytes_out);
    memset(fake_view(u->source), 0x22, u->n_bytes_in);
}

static int format_of(const trial *t, int number, int p) {
    static const int formats[] = {TAGC_FORMAT_INT4, TAGC_FORMAT_INT8, TAGC_FORMAT_FP32, TAGC_FORMAT_INT2};
    return formats[(t->seed + number + p) % 4];
}

static void make_reducer(one_rank *own, int number, int p, int is_plain, tagc_reducer **out) {
    const trial *t = own->trial;
    int is_dense = number == 0 && p == 2;
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = (uint64_t)((number == 0 ? widths[p] : ROW) * own->run->world_size);
    options.output = t->all_reduce ? TAGC_OUTPUT_UNIT : TAGC_OUTPUT_SHARD;
    options.op = number == 2 ? TAGC_OP_AVG : TAGC_OP_SUM;
    if (is_dense) {
        options.sparsity = 0;
        options.format = TAGC_FORMAT_FP32;
    } else {
        options.sparsity = p == 1 ? 0 : 0.75;
        options.format = format_of(t, number, p);
        options.residual = t->seed % 2 ? TAGC_FORMAT_INT8 : TAGC_FORMAT_FP32;
    }
    CHECK(own->run, (own->kernels && !is_plain && !is_dense
                         ? tagc_reducer_create_in(own->units[number].store, own->run->comm, &options, out)
                         : tagc_reducer_create(own->run->comm, &options, out)) == TAGC_OK);
}

static void make_unit(one_rank *own, int number) {
    static const uint32_t numbers[1] = {0}, counts[1] = {N_SAMPLES};
    static const uint64_t places[N_SAMPLES] = {0, 1, 70, 90, 108};
    unit_of_test *u = &own->units[number];
    const trial *t = own->trial;
    int n_ranks = own->run->world_size, n_rows_out = t->all_reduce ? n_ranks : 1, at = 0;
    if (own->kernels && tagc_store_create(own->queue, &u->store) != TAGC_OK) abort();
    u->n_parts = number == 0 ? N_PARTS : 1;
    u->element = number == 0 ? t->element : TAGC_ELEMENT_FP32;
    for (int p = 0; p < u->n_parts; p++) {
        uint64_t n = (uint64_t)(number == 0 ? widths[p] : ROW), n_runs = number == 0 ? (uint64_t)n_ranks : 1,
                 n_out = number == 0 ? (uint64_t)n_rows_out : 1;
        make_reducer(own, number, p, 0, &u->reducers[p]);
        make_reducer(own, number, p, 1, &u->plain[p]);
        for (int r = 0; r < n_ranks; r++) {
            u->packs[p][r] = (tagc_run){(uint64_t)(r * ROW + at), (uint64_t)r * n, n};
            u->unpacks[p][r] = (tagc_run){(uint64_t)r * n, (uint64_t)(r * ROW + at), n};
        }
        if (number) {
            u->packs[p][0].length = n * (uint64_t)n_ranks;
            u->unpacks[p][0].length = n * (uint64_t)n_rows_out;
        }
        u->parts[p] = (tagc_unit_part){u->reducers[p],
                                       n * (uint64_t)n_ranks,
                                       n * (uint64_t)n_rows_out,
                                       u->packs[p],
                                       n_runs,
                                       u->unpacks[p],
                                       n_out};
        at += (int)n;
    }
    tagc_unit_options options = {.struct_bytes = sizeof options,
                                 .what = "gradients of a",
                                 .element = u->element,
                                 .has_gaps = number == 0,
                                 .factor = number == 1 ? 1 : t->factor,
                                 .n_parts = (uint32_t)u->n_parts,
                                 .parts = u->parts,
                                 .n_input = (uint64_t)(n_ranks * ROW),
                                 .n_output = (uint64_t)(n_rows_out * ROW),
                                 .n_comms = 1,
                                 .comms = {own->run->comm},
                                 .n_sampled = number == 0,
                                 .schedule = own->schedule,
                                 .numbers = numbers,
                                 .counts = counts,
                                 .places = places};
    CHECK(own->run, tagc_unit_create(own->queue, &options, &u->unit) == TAGC_OK);
    if (!u->unit) abort();
    tagc_unit_work(u->unit, &u->n_gradients, &u->n_outputs);
    u->gradients = malloc((size_t)u->n_gradients * sizeof(float) + 1);
    u->outputs = malloc((size_t)u->n_outputs * sizeof(float) + 1);
    u->n_input = options.n_input;
    u->n_output = options.n_output;
    u->n_bytes_in = options.n_input * tagc_element_bytes(u->element);
    u->n_bytes_out = options.n_output * tagc_element_bytes(u->element);
    u->source = fake_alloc(u->n_bytes_in);
    u->target = t->all_reduce ? u->source : fake_alloc(u->n_bytes_out);
    u->results = calloc((size_t)t->n_steps, u->n_bytes_out);
    u->wanted = malloc(u->n_bytes_out);
}

/* ---- the same by hand, on the processor ---- */

static void expect(one_rank *own, int number, int step) {
    unit_of_test *u = &own->units[number];
    char *input = malloc(u->n_bytes_in);
    write_gradient(own, number, step, u->element, input);
    memset(u->wanted, 0, u->n_bytes_out);
    for (int p = 0; p < u->n_parts; p++) {
        const tagc_unit_part *part = &u->parts[p];
        float gradient[MOST] = {0}, output[MOST];
        for (uint64_t r = 0; r < part->n_packs; r++)
            tagc_elements_read(input, u->element, part->packs[r].from, part->packs[r].length,
                               gradient + part->packs[r].to);
        tagc_reducer_stats_init(&u->plain_stats[p]);
        if (tagc_reducer_residual_square(u->plain[p], &u->plain_squares[2 * p]) != TAGC_OK) abort();
        u->plain_squares[2 * p + 1] = tagc_elements_square(gradient, TAGC_ELEMENT_FP32, 0, part->n_gradient);
        if (run_reducer(u->plain[p], gradient, output, &u->plain_stats[p]) != TAGC_OK) abort();
        float factor = number == 1 ? 1 : own->trial->factor;
        for (uint64_t i = 0; i < part->n_output; i++) output[i] *= factor;
        for (uint64_t r = 0; r < part->n_unpacks; r++)
            tagc_elements_write(output + part->unpacks[r].from, u->wanted, u->element, part->unpacks[r].to,
                                part->unpacks[r].length);
    }
    free(input);
}

static int same(int element, const char *a, const char *b, size_t n_bytes) {
    for (uint64_t i = 0; i < n_bytes / tagc_element_bytes(element); i++) {
        float x, y;
        tagc_elements_read(a, element, i, 1, &x);
        tagc_elements_read(b, element, i, 1, &y);
        if (memcmp(&x, &y, sizeof x) != 0 && !(isnan(x) && isnan(y))) return 0;
    }
    return 1;
}

static int same_residual(tagc_reducer *a, tagc_reducer *b) {
    float x[MOST], y[MOST];
    uint64_t n = tagc_reducer_residual_elems(a);
    return n == tagc_reducer_residual_elems(b) &&
           (!n || (tagc_reducer_get_residual(a, x, n) == TAGC_OK &&
                   tagc_reducer_get_residual(b, y, n) == TAGC_OK && !memcmp(x, y, n * sizeof *x)));
}

/* is_whole: the reducer on the processor sends values as they are, without headers, where no rank has kernels. */
static int same_stats(const tagc_reducer_stats *a, const tagc_reducer_stats *b, int is_whole) {
    if (is_whole) return a->n_sent == b->n_sent && a->nonfinite == b->nonfinite;
    return !memcmp(a->n_bytes_sent, b->n_bytes_sent, sizeof a->n_bytes_sent) &&
           !memcmp(a->n_bytes_received, b->n_bytes_received, sizeof a->n_bytes_received) &&
           a->n_sent == b->n_sent && a->nonfinite == b->nonfinite;
}

/* ---- steps ---- */

static void *exchange_main(void *arg) {
    uint64_t number, tag;
    const void *input;
    void *output;
    tagc_queue_next(arg, &number, &tag, &input, &output);
    if (number) abort(); /* there are only units */
    return NULL;
}

static void enqueue(one_rank *own, int step) {
    trial *t = own->trial;
    void *back = tagc_queue_stream(own->queue);
    if (t->is_pipelined) { /* what the last step gave is noted, and can be written again */
        real.EventRecord(own->step_over, back);
        real.StreamWaitEvent(own->stream, own->step_over, 0);
    }
    for (int number = 0; number < N_UNITS; number++) {
        unit_of_test *u = &own->units[number];
        kernel *work = &own->work[step][number];
        int is_odd = step == t->other_at && own->run->rank == 1 && number == 1;
        *work = (kernel){own, u, number, step};
        for (int p = 0; p < N_PARTS; p++) tagc_reducer_stats_init(&u->stats[step][p]);
        u->steps[step] = (tagc_unit_step){.words = {1 << 8, is_odd ? 8 : 7},
                                          .text = is_odd ? "elements 8" : "elements 7",
                                          .number = number == 2 ? 0 : (uint64_t)step + 1,
                                          .gradients = u->gradients,
                                          .outputs = u->outputs,
                                          .n_gradients = u->n_gradients,
                                          .n_outputs = u->n_outputs,
                                          .status = TAGC_ERR_STATE,
                                          .stats = u->stats[step],
                                          .full = u->full,
                                          .sums = u->sums,
                                          .squares = u->squares[step]};
        fake_launch(own->stream, write_there, work);
        int fails = t->failing && step == 1 && number == 1; /* no other rank calls the runtime meanwhile */
        if (fails) pthread_barrier_wait(&t->barrier);
        if (fails && own->run->rank) pthread_barrier_wait(&t->barrier);
        if (fails && own->run->rank == 0) fake_fail(t->failing, t->nth, 700);
        tagc_unit_enqueue(u->unit, &u->steps[step], u->source, u->n_input, u->target, u->n_output,
                          own->stream, !t->is_pipelined, &own->last);
        if (fails && own->run->rank == 0) pthread_barrier_wait(&t->barrier);
        fake_launch(t->is_pipelined ? back : own->stream, read_there, work);
    }
}

static int is_right(one_rank *own, int step) {
    const trial *t = own->trial;
    int ok = 1;
    for (int number = 0; number < N_UNITS; number++) {
        unit_of_test *u = &own->units[number];
        int has_failed = t->other_at >= 0 && (step > t->other_at || (step == t->other_at && number >= 1));
        int number_of_failure = has_failed && step == t->other_at && number == 1;
        if (has_failed)
            memset(u->wanted, 0xff, u->n_bytes_out);
        else
            expect(own, number, step);
        ok &= same(u->element, u->wanted, u->results + (size_t)step * u->n_bytes_out, u->n_bytes_out);
        ok &= (u->steps[step].status == TAGC_OK) == !has_failed;
        ok &= !number_of_failure ||
              !strcmp(u->steps[step].why, "gradients of a: ranks do not agree: rank 10 has elements 7; rank "
                                          "11 has elements 8");
        for (int p = 0; p < u->n_parts && !has_failed; p++)
            ok &= same_stats(&u->stats[step][p], &u->plain_stats[p],
                             number == 0 && p == 1 && format_of(t, number, p) == TAGC_FORMAT_FP32);
        if (has_failed) continue;
        ok &= u->steps[step].n_full == (number == 0 && step % WINDOW == WINDOW - 1);
        for (int i = 0; i < 2 * u->n_parts && u->steps[step].n_full; i++) /* sums in another order */
            ok &= fabs(u->squares[step][i] - u->plain_squares[i]) <= 1e-12 * u->plain_squares[i];
    }
    return ok;
}

static void open_rank(one_rank *own) {
    char where[TAGC_WHERE_TEXT_BYTES];
    tagc_runtime table;
    if (tagc_runtime_bind(FAKE_CUDART, &table, where) != TAGC_OK) abort();
    table.StreamIsCapturing = between_capturing;
    table.StreamWaitEvent = between_wait;
    table.EventRecord = between_record;
    table.MemcpyAsync = between_copy;
    table.GetDevice = between_device;
    table.PointerGetAttributes = between_pointer;
    int is_there = own->trial->on_device >> own->run->rank & 1;
    if (tagc_device_create(&table, where, own->run->rank, &own->device) != TAGC_OK) abort();
    real.SetDevice(own->run->rank);
    if (is_there && own->trial->refused) {
        own->device->patience_ms = 100; /* of a probe that must run out of it */
        CHECK(own->run,
              tagc_kernels_create(own->device, &noting_maker, &own->kernels) == TAGC_ERR_UNSUPPORTED);
        CHECK(own->run, strstr(tagc_last_error(), own->trial->refused) != NULL);
        is_there = 0;
    }
    if (is_there && tagc_kernels_create(own->device, &noting_maker, &own->kernels) != TAGC_OK) abort();
    if ((is_there ? tagc_queue_create_on(own->kernels, 2, &own->queue)
                  : tagc_queue_create(own->device, 2, &own->queue)) != TAGC_OK)
        abort();
    own->device->runtime.StreamWaitValue32 = between_flag;
    CHECK(own->run, own->device->calls_wait == (own->trial->refused != NULL));
    if (fake_stream(&own->stream) || real.EventCreateWithFlags(&own->step_over, TAGC_EVENT_WITHOUT_TIMING))
        abort();
    tagc_schedule_options options;
    tagc_schedule_options_init(&options);
    tagc_schedule_parameter parameter = {.name = "a", .n_elems = MOST};
    if (tagc_schedule_create(&options, &parameter, 1, &own->schedule) != TAGC_OK) abort();
    for (int number = 0; number < N_UNITS; number++) make_unit(own, number);
    CHECK(own->run, fake_n_streams(-5) >= (is_there ? 3 : 2)); /* other ranks make some, too */
}

static void close_rank(one_rank *own) {
    for (int number = 0; number < N_UNITS; number++) {
        unit_of_test *u = &own->units[number];
        tagc_unit_destroy(u->unit);
        for (int p = 0; p < u->n_parts; p++) tagc_reducer_destroy(u->plain[p]);
        for (int p = 0; p < u->n_parts; p++) tagc_reducer_destroy(u->reducers[p]);
        tagc_store_destroy(u->store);
    }
    tagc_queue_destroy(own->queue);
    for (int number = 0; number < N_UNITS; number++) {
        unit_of_test *u = &own->units[number];
        fake_free(u->source);
        if (u->target != u->source) fake_free(u->target);
        free(u->results), free(u->wanted), free(u->gradients), free(u->outputs);
    }
    real.StreamSynchronize(own->stream);
    if (own->kernels) tagc_kernels_close(own->kernels);
    real.EventDestroy(own->step_over);
    tagc_schedule_destroy(own->schedule);
    tagc_device_close(own->device);
}

static void finish(one_rank *own, tagc_status wanted) {
    int is_over;
    tagc_status status = tagc_queue_wait(own->queue, own->last, 0, &is_over);
    if (own->trial->sabotage == NOTHING) CHECK(own->run, status == wanted && is_over);
    if (real.StreamSynchronize(own->stream) || real.StreamSynchronize(tagc_queue_stream(own->queue)))
        CHECK(own->run, !"a stream failed");
}

static void rank_body(rank_run *run) {
    one_rank *own = calloc(1, sizeof *own);
    trial *t = run->shared;
    int ok = 1;
    enqueues = t;
    own->run = run;
    own->trial = t;
    open_rank(own);
    if (pthread_create(&own->thread, NULL, exchange_main, own->queue)) abort();
    uint64_t n_bytes = own->kernels ? tagc_kernels_bytes(own->kernels) : 0,
             n_pinned = tagc_queue_pinned_bytes(own->queue);
    for (int step = 0; step < t->n_steps; step++) {
        enqueue(own, step);
        if (t->waits_each) finish(own, TAGC_OK);
    }
    finish(own, t->failing ? TAGC_ERR_DEVICE : t->other_at >= 0 ? TAGC_ERR_MISMATCH : TAGC_OK);
    for (int step = 0; step < (t->failing ? 1 : t->n_steps); step++) ok &= is_right(own, step);
    if (t->failing) { /* the units of the second step before the one that fails */
        expect(own, 0, 1);
        for (int number = 1; number < N_UNITS; number++)
            CHECK(run, own->units[number].steps[1].status == TAGC_ERR_DEVICE);
    }
    for (int number = 0; number < N_UNITS; number++)
        for (int p = 0; p < own->units[number].n_parts; p++)
            ok &= same_residual(own->units[number].plain[p], own->units[number].reducers[p]);
    if (own->kernels) /* a step takes no memory */
        CHECK(run, tagc_kernels_bytes(own->kernels) == n_bytes);
    CHECK(run, tagc_queue_pinned_bytes(own->queue) == n_pinned);
    tagc_queue_close(own->queue);
    pthread_join(own->thread, NULL);
    close_rank(own);
    free(own);
    if (t->sabotage == NOTHING)
        CHECK(run, ok);
    else if (!ok)
        __atomic_fetch_add(&t->n_found, 1, __ATOMIC_SEQ_CST);
}

/* ---- tests ---- */

static trial make_trial(int seed) {
    return (trial){.seed = seed,
                   .n_steps = 4,
                   .element = seed % 3,
                   .all_reduce = seed / 2 % 2,
                   .is_pipelined = seed / 4 % 2,
                   .on_device = ~0u,
                   .factor = seed % 2 ? 0.3f : 1.0f,
                   .other_at = -1,
                   .odd_at = -1,
                   .manners = ""};
}

static int run(trial *t, int n_ranks) {
    char where[TAGC_WHERE_TEXT_BYTES];
    fake_reset((uint64_t)t->seed + 1, FAKE_MAX_DEVICES, FAKE_EAGER, 1);
    fake_behave(t->manners);
    harness_maker_configure((uint64_t)t->seed + 1, 1 + (unsigned)t->seed % 5);
    n_foreign = 0;
    make_noting();
    assert_int_equal(tagc_runtime_bind(FAKE_CUDART, &real, where), TAGC_OK);
    assert_int_equal(tagc_runtime_bind_driver(&real), TAGC_OK);
    pthread_barrier_init(&t->barrier, NULL, (unsigned)n_ranks);
    run_ranks(n_ranks, rank_body, t);
    pthread_barrier_destroy(&t->barrier);
    tagc_runtime_unbind(&real);
    int n_mistakes = fake_n_mistakes();
    if (t->sabotage != NOTHING) return n_mistakes || t->n_found;
    if (n_mistakes) print_error("seed %d: %s\n%s\n", t->seed, fake_mistake(0), fake_report());
    assert_int_equal(n_mistakes, 0);
    assert_int_equal(n_foreign, 0); /* no other thread calls CUDA */
    assert_int_equal(n_shared, 0);
    assert_int_equal(fake_n_device_blocks(), 0);
    return 0;
}

static void test_bits(void **state) {
    static const char *const manners[] = {"", "all,depth=128", "late-flags,connections=2", "",
                                          "blocking-alloc,lazy-loading"};
    (void)state;
    for (int seed = 0; seed < REPEATS(12, 5, 3); seed++) {
        trial t = make_trial(seed);
        int n_ranks = 1 + seed % 4;
        t.on_device = seed % 3 == 2 ? 5u : ~0u; /* some ranks have no kernels */
        t.manners = manners[seed % 5];
        t.odd_at = seed % 4 ? 2 : -1;
        run(&t, n_ranks);
    }
}

/* Where launches or copies wait until they have run, kernels are refused, and the processor gives the same bits. */
static void test_calls_that_wait(void **state) {
    static const struct {
        const char *manners, *variable, *refused;
    } all[] = {{"launch-blocking", "0", "a debugger, a profiler or a sanitizer"},
               {"copy-blocking", "", "a debugger, a profiler or a sanitizer"},
               {"launch-blocking,copy-blocking,blocking-alloc", "", "a debugger"},
               {"", "1", "CUDA_LAUNCH_BLOCKING is set in the environment"}};
    (void)state;
    for (int i = 0; i < (int)(sizeof all / sizeof *all); i++) {
        trial t = make_trial(60 + i); /* with and without a stream that waits */
        t.manners = all[i].manners;
        t.refused = all[i].refused;
        t.odd_at = 2;
        t.is_pipelined = i % 2;
        t.n_steps = 3;
        setenv("CUDA_LAUNCH_BLOCKING", all[i].variable, 1);
        run(&t, 2);
        unsetenv("CUDA_LAUNCH_BLOCKING");
    }
}

/* A queue without kernels finds out by itself. */
static void rank_without(rank_run *run) {
    tagc_device *device;
    tagc_queue *queue = NULL;
    char where[TAGC_WHERE_TEXT_BYTES];
    tagc_runtime table;
    (void)run;
    if (tagc_runtime_bind(FAKE_CUDART, &table, where) != TAGC_OK) abort();
    if (tagc_device_create(&table, where, 0, &device) != TAGC_OK) abort();
    device->patience_ms = 100;
    CHECK(run, tagc_queue_create(device, 2, &queue) == TAGC_OK && device->calls_wait == 1);
    tagc_queue_destroy(queue);
    tagc_device_close(device);
}

static void test_queue_finds_out(void **state) {
    (void)state;
    fake_reset(1, 1, FAKE_EAGER, 1);
    fake_behave("copy-blocking");
    run_ranks(1, rank_without, NULL);
    assert_int_equal(fake_n_mistakes(), 0);
    assert_int_equal(fake_n_live(), 0);
    assert_int_equal(fake_n_device_blocks(), 0);
}

/* Windows of the schedule, and the squares for them: with and without kernels, several steps ahead or one after the other. The hook
 * enqueues all of them while the device's flags are late. */
static void test_windows(void **state) {
    (void)state;
    if (REPEATS(0, 0, 1)) skip(); /* long runs of what test_bits does, which cost minutes there */
    for (int seed = REPEATS(0, 2, 0); seed < 4; seed++) {
        trial t = make_trial(seed);
        t.n_steps = WINDOW + 2;
        t.waits_each = seed / 2;
        t.on_device = seed == 3 ? 1u : ~0u;
        t.manners = "late-flags";
        run(&t, 2);
    }
}

static void test_differences(void **state) {
    (void)state;
    for (int seed = 30; seed < REPEATS(36, 33, 32); seed++) {
        trial t = make_trial(seed);
        t.other_at = 2;
        t.on_device = seed % 2 ? 1u : ~0u;
        run(&t, 2 + seed % 2);
    }
}

static void test_failing_calls(void **state) {
    static const struct {
        const char *call;
        int nth;
    } calls[] = {{"MemcpyAsync", 1},       {"LaunchKernel", 2}, {"StreamWaitValue32", 1},
                 {"MemcpyAsync", 3},       {"LaunchKernel", 4}, {"StreamWriteValue32", 2},
                 {"StreamWaitValue32", 2}, {"EventRecord", 1}};
    (void)state;
    for (size_t c = 0; c < sizeof calls / sizeof *calls; c += REPEATS(1, 1, 3)) {
        trial t = make_trial(40 + (int)c);
        t.failing = calls[c].call;
        t.nth = calls[c].nth;
        t.n_steps = 2;
        t.is_pipelined = 0;
        run(&t, 2);
    }
}

/* Without a thread that exchanges, the second unit is encoded all the same. */
static void rank_overlaps(rank_run *run) {
    one_rank *own = calloc(1, sizeof *own);
    enqueues = own->trial = run->shared;
    own->run = run;
    open_rank(own);
    enqueue(own, 0);
    for (unsigned n = 0; atomic_load(&own->queue->flags->in) != 2; n++) tagc_queue_pause(n);
    CHECK(run, atomic_load(&own->queue->flags->out) == 0);
    if (pthread_create(&own->thread, NULL, exchange_main, own->queue)) abort();
    finish(own, TAGC_OK);
    CHECK(run, is_right(own, 0));
    tagc_queue_close(own->queue);
    pthread_join(own->thread, NULL);
    close_rank(own);
    free(own);
}

static void test_overlap(void **state) {
    (void)state;
    for (int all_reduce = 0; all_reduce < 2; all_reduce++) {
        char where[TAGC_WHERE_TEXT_BYTES];
        trial t = make_trial(all_reduce);
        t.all_reduce = all_reduce;
        t.is_pipelined = t.n_steps = 1;
        fake_reset(7, FAKE_MAX_DEVICES, FAKE_EAGER, 1);
        assert_int_equal(tagc_runtime_bind(FAKE_CUDART, &real, where), TAGC_OK);
        assert_int_equal(tagc_runtime_bind_driver(&real), TAGC_OK);
        run_ranks(2, rank_overlaps, &t);
        tagc_runtime_unbind(&real);
        assert_int_equal(fake_n_mistakes(), 0);
    }
}

/* ---- many ranks: this one is real, and the others send what they get ---- */

static tagc_status echo(void *context, const tagc_transfer *t) {
    (void)context;
    for (uint32_t i = 0; i < t->n_receives; i++) {
        const tagc_part *in = &t->receives[i], *out = &t->sends[i];
        char *to = (char *)t->recv + in->offset;
        if (in->n_bytes) memcpy(to, (const char *)t->send + out->offset, in->n_bytes);
        rounds_rename((uint8_t *)to, in->n_bytes, in->peer);
    }
    return TAGC_OK;
}

typedef struct many {
    tagc_comm *comm;
    tagc_device *device;
    tagc_kernels *kernels;
    tagc_queue *queue;
    tagc_store *store;
    void *stream;
    float *values, *there; /* (N_MANY) */
} many;

enum { RANKS_MANY = 512, SHARD_MANY = 16, N_MANY = RANKS_MANY * SHARD_MANY, PARTS_MANY = 24 };

static void write_many(void *arg) {
    const many *m = arg;
    memcpy(fake_view(m->there), m->values, N_MANY * sizeof(float));
}

static void read_many(void *arg) {
    const many *m = arg;
    memcpy(m->values, fake_view(m->there), N_MANY * sizeof(float));
}

static void make_many(const many *m, int has_kernels, tagc_reducer **out) {
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = N_MANY;
    options.output = TAGC_OUTPUT_UNIT;
    options.op = TAGC_OP_AVG;
    options.exchange = TAGC_EXCHANGE_DIRECT;
    options.sparsity = 0.75;
    options.residual = TAGC_FORMAT_INT8;
    assert_int_equal(has_kernels ? tagc_reducer_create_in(m->store, m->comm, &options, out)
                                 : tagc_reducer_create(m->comm, &options, out),
                     TAGC_OK);
}

static tagc_status unit_of_many(const many *m, uint32_t n_parts, tagc_reducer *const *reducers,
                                tagc_unit **unit) {
    static const tagc_run whole = {0, 0, N_MANY};
    tagc_unit_part parts[PARTS_MANY];
    for (uint32_t p = 0; p < n_parts; p++)
        parts[p] = (tagc_unit_part){reducers[p], N_MANY, N_MANY, &whole, 1, &whole, 1};
    tagc_unit_options options = {.struct_bytes = sizeof options,
                                 .what = "gradients of a",
                                 .element = TAGC_ELEMENT_FP32,
                                 .factor = 1,
                                 .n_parts = n_parts,
                                 .parts = parts,
                                 .n_input = N_MANY,
                                 .n_output = N_MANY,
                                 .n_comms = 1,
                                 .comms = {m->comm}};
    return tagc_unit_create(m->queue, &options, unit);
}

static void exchange_many(many *m, tagc_reducer *plain, tagc_unit *unit) {
    float *output = malloc(N_MANY * sizeof *output);
    tagc_reducer_stats stats;
    tagc_unit_step step = {.words = {1 << 8}, .text = "", .number = 1, .stats = &stats};
    uint64_t number;
    int is_over;
    pthread_t thread;
    tagc_reducer_stats_init(&stats);
    for (int i = 0; i < N_MANY; i++) m->values[i] = (float)((i * 37) % 101 - 50);
    fake_launch(m->stream, write_many, m);
    assert_int_equal(
        tagc_unit_enqueue(unit, &step, m->there, N_MANY, m->there, N_MANY, m->stream, 1, &number), TAGC_OK);
    assert_int_equal(pthread_create(&thread, NULL, exchange_main, m->queue), 0);
    assert_int_equal(tagc_queue_wait(m->queue, number, 0, &is_over), TAGC_OK);
    assert_int_equal(real.StreamSynchronize(m->stream), 0); /* `values` are read */
    assert_int_equal(run_reducer(plain, m->values, output, NULL), TAGC_OK);
    fake_launch(m->stream, read_many, m);
    assert_int_equal(real.StreamSynchronize(m->stream), 0);
    assert_memory_equal(output, m->values, N_MANY * sizeof *output);
    tagc_queue_close(m->queue);
    pthread_join(thread, NULL);
    free(output);
}

/* 512 ranks: tables of launches take many places in a launch queue. One part is exchanged as on the processor; a unit of more
 * parts than there are places for is refused. */
static void test_many_ranks(void **state) {
    static const tagc_callback_ops ops = {.abi = TAGC_TRANSPORT_ABI, .exchange = echo};
    char where[TAGC_WHERE_TEXT_BYTES], wanted[200];
    tagc_reducer *reducers[PARTS_MANY], *plain;
    tagc_unit *unit, *refused;
    many m = {.values = malloc(N_MANY * sizeof(float))};
    (void)state;
    fake_reset(5, FAKE_MAX_DEVICES, FAKE_EAGER, 1);
    harness_maker_configure(5, 1);
    assert_int_equal(tagc_runtime_bind(FAKE_CUDART, &real, where), TAGC_OK);
    assert_int_equal(tagc_runtime_bind_driver(&real), TAGC_OK);
    assert_int_equal(tagc_device_open("cuda", FAKE_CUDART, 0, &m.device), TAGC_OK);
    assert_int_equal(tagc_kernels_create(m.device, harness_maker(), &m.kernels), TAGC_OK);
    assert_int_equal(tagc_queue_create_on(m.kernels, 2, &m.queue), TAGC_OK);
    assert_int_equal(tagc_store_create(m.queue, &m.store), TAGC_OK);
    assert_int_equal(tagc_comm_create_callback(&ops, NULL, 0, RANKS_MANY, NULL, &m.comm), TAGC_OK);
    assert_int_equal(fake_stream(&m.stream), 0);
    m.there = fake_alloc(N_MANY * sizeof(float));
    make_many(&m, 0, &plain);
    for (int p = 0; p < PARTS_MANY; p++) make_many(&m, 1, &reducers[p]);
    assert_int_equal(unit_of_many(&m, PARTS_MANY, reducers, &refused), TAGC_ERR_UNSUPPORTED);
    snprintf(wanted, sizeof wanted, "gradients of a: %d parts over %d ranks take ", PARTS_MANY, RANKS_MANY);
    assert_non_null(strstr(tagc_last_error(), wanted));
    assert_non_null(strstr(tagc_last_error(), "places in a launch queue of the device, which has 1024: "));
    assert_int_equal(unit_of_many(&m, 1, reducers, &unit), TAGC_OK);
    print_message("a part over %d ranks: %zu places\n", RANKS_MANY, tagc_unit_n_places(unit));
    exchange_many(&m, plain, unit);
    tagc_unit_destroy(unit);
    for (int p = 0; p < PARTS_MANY; p++) tagc_reducer_destroy(reducers[p]);
    tagc_store_destroy(m.store);
    tagc_queue_destroy(m.queue);
    tagc_reducer_destroy(plain);
    tagc_comm_destroy(m.comm);
    fake_free(m.there);
    tagc_kernels_close(m.kernels);
    tagc_device_close(m.device);
    tagc_runtime_unbind(&real);
    assert_int_equal(fake_n_mistakes(), 0);
    free(m.values);
}

static const struct {
    const char *what;
    sabotage kind;
    int n, is_pipelined;
} planted[] = {
    {"nothing", NOTHING, 0, 0},
    {"a gradient is encoded before it is there", DROP_WAIT, 0, 0},
    {"a room is used again before its last exchange is over", DROP_WAIT, 1, 1},
    {"the caller does not wait for the result", DROP_WAIT, 4, 0},
    {"bodies are added before they are there", DROP_FLAG, 0, 0},
    {"bodies of the second part are added before they are there", DROP_FLAG, 1, 0},
    {"the step is settled before the verdict", DROP_FLAG, 2, 0},
    {"the gradient's event is recorded on another stream", RECORD_ELSEWHERE, 0, 0},
    {"the result's event is recorded on another stream", RECORD_ELSEWHERE, 3, 0},
};

static const char *program;

/* In processes of their own, because kernels that read other bodies than they should may end one. */
static void test_planted(void **state) {
    enum { N_SEEDS = 2 };
    char command[600];
    (void)state;
    if (REPEATS(0, 1, 1)) skip(); /* a sanitizer does not make this test see more or less */
    for (size_t p = 0; p < sizeof planted / sizeof *planted; p++) {
        int n_found = 0;
        for (int seed = 50; seed < 50 + N_SEEDS; seed++) {
            snprintf(command, sizeof command, "timeout 60 '%s' %zu %d >/dev/null 2>&1", program, p, seed);
            n_found += system(command) != 0;
        }
        if (planted[p].kind == NOTHING) {
            assert_int_equal(n_found, 0);
            continue;
        }
        print_message("found in %d of %d seeds: %s\n", n_found, N_SEEDS, planted[p].what);
        assert_true(n_found > 0);
    }
}

static int run_planted(int p, int seed) {
    trial t = make_trial(seed);
    t.sabotage = planted[p].kind;
    t.n = planted[p].n;
    t.is_pipelined = planted[p].is_pipelined;
    return run(&t, 2);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits),
        cmocka_unit_test(test_calls_that_wait),
        cmocka_unit_test(test_queue_finds_out),
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_differences),
        cmocka_unit_test(test_failing_calls),
        cmocka_unit_test(test_overlap),
        cmocka_unit_test(test_many_ranks),
        cmocka_unit_test(test_planted),
    };
    program = argv[0];
    if (argc == 3) return run_planted(atoi(argv[1]), atoi(argv[2]));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
