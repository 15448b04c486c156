/* A tagc_model on a device against one on host arrays, in the same runs: sums, residuals, statistics, plans and saved states have the same
 * bits, whoever has kernels, a queue without them, or no device. Failures are the same on all ranks. Ranks are threads, with a device of
 * the fake runtime each; kernels run in the harness. */
#include "../../exchange/ranks.h"
#include "../../exchange/rounds.h"
#include "../../repeats.h"
#include "../../unit/world.h"
#include "../fake_runtime.h"
#include "codec/elements.h"
#include "gpu/ahead_unit.h"
#include "gpu/store.h"
#include "harness_maker.h"
#include "schedule/private.h"

enum {
    N_TENSORS = 9,
    N_UNITS = 3,
    MOST_STEPS = 48,
    MOST_PIECES = 64,
    UNIT_BYTES = 1 << 14,
    STATE_BYTES = 1 << 17
};

/* What a rank has on its side. */
typedef enum side { NO_DEVICE, NO_KERNELS, KERNELS } side;

typedef enum incident {
    NOTHING,
    SAYS_FAILED,
    BAD_PIECE,
    OTHER_ORDER,
    OTHER_WORD,
    NOT_FINITE,
    OVERFLOWS
} incident;

/* A planted mistake in calls of the runtime. */
typedef enum sabotage { NO_SABOTAGE, DROP_WAIT, DROP_FLAG, RECORD_ELSEWHERE } sabotage;

typedef struct trial {
    uint64_t seed;
    int n_hosts, n_places, n_steps;
    int output, op, gradient, sum, residual, cut, gentle, result_format, dense_only;
    int summed;    /* the caller adds up within hosts */
    int rests;     /* some tensors have no gradient in a step */
    side sides[4]; /* of rank r: r modulo 4 */
    int in_place;  /* sums lie in the gradients */
    int moves;     /* pieces lie otherwise in each step */
    int waits;     /* tagc_waits */
    incident event;
    int event_at;        /* the step; -1: none */
    int loads_at;        /* before this step the state is saved, forgotten and loaded; -1: never */
    const char *failing; /* a call of the runtime that fails on rank 0 in unit 1 of event_at; NULL: none */
    int nth;
    const char *manners, *refused;
    int is_late;  /* the queue's thread begins when all is enqueued */
    int prepares; /* the model knows from the beginning where pieces will lie */
    int is_plain; /* the run to compare with */
    sabotage sabotage;
    int sabotaged; /* which call of each exchange */
    pthread_barrier_t barrier;
} trial;

/* What came of a run, on one rank. */
typedef struct outcome {
    tagc_status begun[MOST_STEPS][N_UNITS];
    char texts[MOST_STEPS][N_UNITS][TAGC_ERROR_TEXT_BYTES];
    char sums[MOST_STEPS][N_UNITS][UNIT_BYTES];
    size_t n_sums[N_UNITS]; /* bytes */
    uint64_t sent[MOST_STEPS][N_UNITS][4];
    tagc_schedule_plan plans[MOST_STEPS][N_TENSORS];
    float *residual[N_TENSORS];
    size_t n_state;
    char state[STATE_BYTES];
    double squares[N_UNITS * N_TENSORS * 2]; /* of gradient and residual, where a window became full last */
    uint32_t most_parts;                     /* of unit 2, which has one class */
} outcome;

typedef struct shapes {
    tagc_tensor tensors[N_TENSORS];
    uint64_t dims[N_TENSORS][2], n_elems[N_TENSORS];
    char names[N_TENSORS][32];
} shapes;

static outcome *outcomes[2][MOST_RANKS];

/* ---- between a queue and the runtime: only the thread that begins calls it ---- */

static tagc_runtime real;
static _Thread_local int begins;
static _Thread_local const trial *of_thread;
static _Thread_local int n_waits, n_flags, n_records; /* of this exchange so far */
static _Thread_local void *last_stream;
static _Atomic int n_foreign;

static void note(void) {
    if (!begins) n_foreign++;
}

static int between_copy(void *to, const void *from, size_t n_bytes, int kind, void *stream) {
    note();
    return real.MemcpyAsync(to, from, n_bytes, kind, stream);
}

static int between_device(int *ordinal) {
    note();
    return real.GetDevice(ordinal);
}

static int between_capturing(void *stream, int *status) { /* the first call of an exchange */
    n_waits = n_flags = n_records = 0;
    return real.StreamIsCapturing(stream, status);
}

static int is_it(sabotage kind, int *n) {
    note();
    return of_thread && of_thread->sabotage == kind && (*n)++ == of_thread->sabotaged;
}

static int between_wait(void *stream, void *awaited, unsigned flags) {
    return is_it(DROP_WAIT, &n_waits) ? 0 : real.StreamWaitEvent(stream, awaited, flags);
}

static int between_flag(void *stream, uint64_t address, uint32_t value, unsigned flags) {
    return is_it(DROP_FLAG, &n_flags) ? 0 : real.StreamWaitValue32(stream, address, value, flags);
}

static int between_record(void *event, void *stream) {
    void *other = last_stream;
    last_stream = stream;
    return real.EventRecord(event, is_it(RECORD_ELSEWHERE, &n_records) && other ? other : stream);
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
} areas[1 << 14];
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

typedef struct unit_arrays {
    char *gradients, *sums; /* blocks; the device's, or the host's */
    size_t n_bytes;
    tagc_piece given[MOST_PIECES], wanted[MOST_PIECES];
    size_t n_given, n_wanted;
} unit_arrays;

typedef struct one_rank one_rank;

typedef struct kernel {
    one_rank *own;
    uint32_t unit;
    int step;
} kernel;

struct one_rank {
    member *m;
    trial *t;
    outcome *out;
    side side;
    shapes s;
    tagc_device *device;
    tagc_kernels *kernels;
    tagc_queue *queue;
    tagc_model *model;
    void *stream;
    pthread_t thread;
    unit_arrays units[N_UNITS];
    kernel work[MOST_STEPS][N_UNITS];
};

static void make_shapes(const trial *t, shapes *s) {
    for (uint32_t i = 0; i < N_TENSORS; i++) {
        uint64_t x = number_of(t->seed, i, 1, 0);
        size_t n_dims = i == 0 ? 0 : 1 + x % 2;
        s->dims[i][0] = 1 + (x >> 8) % (n_dims == 1 ? 90 : 14);
        s->dims[i][1] = 1 + (x >> 16) % 12;
        s->n_elems[i] = n_dims == 0 ? 1 : n_dims == 1 ? s->dims[i][0] : s->dims[i][0] * s->dims[i][1];
        snprintf(s->names[i], sizeof s->names[i], "block.%u.tensor.%u", i % N_UNITS, i);
        int kind = i % N_UNITS == 2 ? (t->dense_only ? TAGC_CLASS_DENSE : TAGC_CLASS_COMPRESSED)
                                    : (int)((x >> 24) % 3);
        s->tensors[i] = (tagc_tensor){s->names[i], s->dims[i], n_dims, i % N_UNITS, kind};
    }
}

/* Before and after the sum within a host: whole numbers in 64ths, which add up exactly in bf16 and fp16. */
static float gradient_of(const trial *t, int rank, uint32_t tensor, uint64_t i, int step) {
    uint64_t x = number_of(t->seed, (uint64_t)rank * 64 + tensor, i, (uint64_t)step);
    float value = (float)((int)(x % 65) - 32) / 64;
    return (x >> 32) % 7 ? value / 8 : value;
}

static float given_gradient(const one_rank *own, uint32_t tensor, uint64_t i, int step) {
    const trial *t = own->t;
    const member *m = own->m;
    int is_odd = step == t->event_at && tensor % N_UNITS == 1;
    if (is_odd && t->event == NOT_FINITE && m->rank == 0 && i == 0) return INFINITY;
    if (is_odd && t->event == OVERFLOWS && i % 3 == 0) return 3e38f;
    if (t->rests && (tensor / N_UNITS + (uint32_t)(step + m->rank)) % 3 == 0) return 0;
    if (!t->summed) return gradient_of(t, m->rank, tensor, i, step);
    float sum = 0;
    for (int place = 0; place < m->w->n_places; place++)
        sum += gradient_of(t, m->host * m->w->n_places + place, tensor, i, step);
    return sum;
}

/* Cuts elements of a tensor into one or two pieces, at random places of a block; returns where the block ends. */
static size_t cut(tagc_piece *pieces, size_t *n, uint32_t tensor, uint64_t first, uint64_t n_elems,
                  size_t width, size_t at, uint64_t seed) {
    uint64_t x = number_of(seed, tensor, first, 3), n_left = n_elems > 1 ? x % n_elems : 0;
    size_t gap = (x >> 20) % 3;
    if (n_left > 0) { /* backwards in memory */
        pieces[*n] = (tagc_piece){tensor, first, n_left, (void *)(at + (n_elems - n_left + gap) * width)};
        ++*n;
    }
    pieces[*n] = (tagc_piece){tensor, first + n_left, n_elems - n_left, (void *)at};
    ++*n;
    return at + (n_elems + gap + (x >> 24) % 2) * width;
}

/* values: places in a block. */
static void place_pieces(one_rank *own, uint32_t unit, int step) {
    const trial *t = own->t;
    const member *m = own->m;
    unit_arrays *u = &own->units[unit];
    size_t width = tagc_element_bytes(t->gradient), at = 0;
    uint64_t seed = t->seed + (t->moves ? (uint64_t)step : 0), first, n;
    u->n_given = u->n_wanted = 0;
    for (uint32_t i = unit; i < N_TENSORS; i += N_UNITS)
        for (int host = 0; host < (t->summed && t->output == TAGC_OUTPUT_SHARD ? m->w->n_hosts : 1); host++) {
            first = 0, n = own->s.n_elems[i];
            if (t->summed)
                EXPECT(own->m, tagc_model_owned(own->model, host * m->w->n_places + m->place, i, &first,
                                                &n) == TAGC_OK);
            if (n > 0) at = cut(u->given, &u->n_given, i, first, n, width, at, seed);
        }
    width = tagc_element_bytes(t->sum), at = 0;
    for (uint32_t i = unit; i < N_TENSORS; i += N_UNITS) {
        EXPECT(own->m, tagc_model_owned(own->model, m->rank, i, &first, &n) == TAGC_OK);
        if (!t->in_place && n > 0) at = cut(u->wanted, &u->n_wanted, i, first, n, width, at, seed + 5);
        for (size_t p = 0; t->in_place && p < u->n_given; p++) {
            const tagc_piece *g = &u->given[p];
            uint64_t begin = g->first > first ? g->first : first, end = g->first + g->n_elems;
            if (end > first + n) end = first + n;
            if (g->tensor == i && begin < end)
                u->wanted[u->n_wanted++] =
                    (tagc_piece){i, begin, end - begin, (char *)g->values + (begin - g->first) * width};
        }
    }
    if (u->n_given > MOST_PIECES || u->n_wanted > MOST_PIECES) abort();
    for (size_t p = 0; p < u->n_given; p++) u->given[p].values = u->gradients + (size_t)u->given[p].values;
    for (size_t p = 0; p < u->n_wanted; p++)
        u->wanted[p].values = (t->in_place ? u->gradients : u->sums) + (size_t)u->wanted[p].values;
}

static char *view(const one_rank *own, char *block) {
    return own->side == NO_DEVICE ? block : fake_view(block);
}

static void write_gradients(void *arg) {
    const kernel *one = arg;
    const unit_arrays *u = &one->own->units[one->unit];
    char *block = view(one->own, u->gradients), *sums = view(one->own, u->sums);
    memset(block, 0x7f, u->n_bytes);
    memset(sums, 0x5a, u->n_bytes);
    for (size_t p = 0; p < u->n_given; p++)
        for (uint64_t i = 0; i < u->given[p].n_elems; i++) {
            float value = given_gradient(one->own, u->given[p].tensor, u->given[p].first + i, one->step);
            tagc_elements_write(&value, block + ((char *)u->given[p].values - u->gradients),
                                one->own->t->gradient, i, 1);
        }
}

/* The sums in the order of tensors; and what is between pieces is as it was. */
static void read_sums(void *arg) {
    const kernel *one = arg;
    one_rank *own = one->own;
    const trial *t = own->t;
    const unit_arrays *u = &own->units[one->unit];
    char *from = t->in_place ? u->gradients : u->sums, *block = view(own, from),
         *to = own->out->sums[one->step][one->unit];
    size_t width = tagc_element_bytes(t->sum), n = 0;
    char *covered = calloc(u->n_bytes, 1);
    for (size_t p = 0; p < u->n_wanted; p++) {
        size_t at = (size_t)((char *)u->wanted[p].values - from), n_bytes = u->wanted[p].n_elems * width;
        memcpy(to + n, block + at, n_bytes);
        memset(covered + at, 1, n_bytes);
        n += n_bytes;
    }
    own->out->n_sums[one->unit] = n;
    for (size_t i = 0; !t->in_place && i < u->n_bytes; i++) EXPECT(own->m, covered[i] || block[i] == 0x5a);
    free(covered);
}

static void *exchange_main(void *arg) {
    if (tagc_queue_run(arg) != TAGC_OK) abort();
    return NULL;
}

static char *take_block(const one_rank *own) {
    return own->side == NO_DEVICE ? malloc(UNIT_BYTES) : fake_alloc(UNIT_BYTES);
}

static void open_device(one_rank *own) {
    const trial *t = own->t;
    char where[TAGC_WHERE_TEXT_BYTES];
    tagc_runtime table;
    if (tagc_runtime_bind(FAKE_CUDART, &table, where) != TAGC_OK) abort();
    table.MemcpyAsync = between_copy;
    table.GetDevice = between_device;
    table.StreamWaitEvent = between_wait;
    table.StreamIsCapturing = between_capturing;
    table.EventRecord = between_record;
    table.PointerGetAttributes = between_pointer;
    int ordinal = own->m->rank % FAKE_MAX_DEVICES;
    if (tagc_device_create(&table, where, ordinal, &own->device) != TAGC_OK) abort();
    real.SetDevice(ordinal);
    if (t->refused) own->device->patience_ms = 100; /* of a probe that must run out of it */
    if (own->side == KERNELS && t->refused) {
        EXPECT(own->m,
               tagc_kernels_create(own->device, &noting_maker, &own->kernels) == TAGC_ERR_UNSUPPORTED);
        EXPECT(own->m, strstr(tagc_last_error(), t->refused) != NULL);
    } else if (own->side == KERNELS &&
               tagc_kernels_create(own->device, &noting_maker, &own->kernels) != TAGC_OK) {
        abort();
    }
    if (tagc_queue_create(own->device, own->kernels, 2, &own->queue) != TAGC_OK) abort();
    own->device->runtime.StreamWaitValue32 = between_flag;
    EXPECT(own->m, own->device->calls_wait == (t->refused != NULL));
    if (fake_stream(&own->stream)) abort();
    if (!t->is_late && pthread_create(&own->thread, NULL, exchange_main, own->queue)) abort();
}

/* Two exchanges are encoded, as many as the queue has buffers, before anybody looks at the first one. */
static void start_late(one_rank *own) {
    enum { LONGEST_S = 30 };
    if (!own->queue || !own->t->is_late) return;
    uint32_t n_wanted = own->t->sabotage ? 3 : 2; /* what is planted lets the third one come */
    double end_s = tagc_time_s() + LONGEST_S;
    for (unsigned n = 0; atomic_load(&own->queue->flags->in) < n_wanted && tagc_time_s() < end_s; n++)
        tagc_queue_pause(n);
    EXPECT(own->m, atomic_load(&own->queue->flags->in) == 2 && atomic_load(&own->queue->flags->out) == 0);
    if (pthread_create(&own->thread, NULL, exchange_main, own->queue)) abort();
}

/* Of the residuals of all units on the device; and of all else, there and pinned. */
static uint64_t residual_bytes(const one_rank *own) {
    uint64_t n = 0;
    for (uint32_t unit = 0; unit < N_UNITS; unit++) {
        const tagc_model_unit *u = &own->model->units[unit];
        const tagc_store *store = NULL;
        for (uint32_t p = 0; p < u->n_parts && !store; p++) store = tagc_store_of(u->parts[p].reducer);
        n += store ? store->n_bytes : 0;
    }
    return n;
}

static uint64_t all_bytes(const one_rank *own) {
    return own->queue ? tagc_kernels_bytes(own->kernels) + tagc_queue_pinned_bytes(own->queue) : 0;
}

static void open_rank(one_rank *own) {
    const trial *t = own->t;
    tagc_model_options o;
    tagc_schedule_options so;
    tagc_schedule_options_init(&so);
    so.gentle = t->gentle;
    so.sparsity = 0.8;
    so.mild_sparsity = 0.4;
    tagc_model_options_init(&o);
    o.schedule.options = &so;
    o.schedule.moment = TAGC_MOMENT_NONE;
    o.layout.output = t->output;
    o.op = t->op;
    o.formats.gradient = t->gradient;
    o.formats.sum = t->sum;
    o.formats.residual = t->residual;
    o.layout.cut = t->cut;
    o.hosts.summed = t->summed;
    o.rests = t->rests;
    o.formats.result = t->result_format;
    make_shapes(t, &own->s);
    if (own->side != NO_DEVICE) open_device(own);
    member *m = own->m;
    tagc_status status =
        own->queue ? tagc_model_create_on(own->queue, m->within, m->between, own->s.tensors, N_TENSORS, &o,
                                          &own->model)
                   : tagc_model_create(m->within, m->between, own->s.tensors, N_TENSORS, &o, &own->model);
    EXPECT(m, status == TAGC_OK);
    if (!own->model) return;
    if (t->seed % 4 == 1) EXPECT(m, tagc_model_set_factor(own->model, 0, 0.3) == TAGC_OK);
    tagc_model_set_run(own->model, 42);
    for (uint32_t unit = 0; unit < N_UNITS; unit++) {
        unit_arrays *u = &own->units[unit];
        u->n_bytes = UNIT_BYTES;
        u->gradients = take_block(own);
        u->sums = take_block(own);
        place_pieces(own, unit, 0);
        if (own->queue && t->prepares)
            EXPECT(m, tagc_model_prepare_on(own->model, unit, u->given, u->n_given, u->wanted, u->n_wanted) ==
                          TAGC_OK);
    }
}

static void close_rank(one_rank *own) {
    tagc_model_destroy(own->model);
    if (own->queue) {
        tagc_queue_close(own->queue);
        pthread_join(own->thread, NULL);
        tagc_queue_destroy(own->queue);
        real.StreamSynchronize(own->stream);
    }
    for (uint32_t unit = 0; unit < N_UNITS; unit++)
        for (int i = 0; i < 2; i++) {
            char *block = i ? own->units[unit].sums : own->units[unit].gradients;
            if (!block) continue;
            if (own->side == NO_DEVICE)
                free(block);
            else
                fake_free(block);
        }
    if (own->kernels) tagc_kernels_close(own->kernels);
    if (own->device) tagc_device_close(own->device);
}

/* ---- steps ---- */

static tagc_status begin_unit(one_rank *own, uint32_t unit, int step) {
    const trial *t = own->t;
    unit_arrays *u = &own->units[unit];
    int is_event =
        step == t->event_at && unit == 1 && own->m->rank == 1 % (own->m->w->n_hosts * own->m->w->n_places);
    if (is_event && t->event == SAYS_FAILED)
        return tagc_model_begin_failed(own->model, unit, TAGC_ERR_IO, "no gradient today");
    tagc_piece given[MOST_PIECES]; /* with a device the list need not stay */
    memcpy(given, u->given, sizeof given);
    if (is_event && t->event == BAD_PIECE) given[0].n_elems = 1 << 20;
    if (t->event == OTHER_WORD)
        EXPECT(own->m, tagc_model_set_word(own->model, unit, 5 + (uint64_t)is_event) == TAGC_OK);
    if (!own->queue)
        return tagc_model_begin(own->model, unit, t->event == BAD_PIECE && is_event ? given : u->given,
                                u->n_given, u->wanted, u->n_wanted);
    return tagc_model_begin_on(own->model, unit, given, u->n_given, u->wanted, u->n_wanted, own->stream,
                               t->waits);
}

/* As where its device fails: the other run says so by itself. */
static int is_dead(const one_rank *own, uint32_t unit, int step) {
    const trial *t = own->t;
    return t->failing && own->m->rank == 0 && (step > t->event_at || (step == t->event_at && unit >= 1));
}

static void begin(one_rank *own, uint32_t unit, int step) {
    trial *t = own->t;
    kernel *work = &own->work[step][unit];
    int fails = t->failing && !t->is_plain && step == t->event_at && unit == 1, rank = own->m->rank;
    *work = (kernel){own, unit, step};
    if (t->moves) place_pieces(own, unit, step);
    if (own->queue)
        fake_launch(own->stream, write_gradients, work);
    else
        write_gradients(work);
    if (fails) pthread_barrier_wait(&t->barrier); /* no other rank calls the runtime meanwhile */
    if (fails && rank) pthread_barrier_wait(&t->barrier);
    if (fails && rank == 0) fake_fail(t->failing, t->nth, 700);
    own->out->begun[step][unit] = t->is_plain && is_dead(own, unit, step)
                                      ? tagc_model_begin_failed(own->model, unit, TAGC_ERR_DEVICE, "cuda")
                                      : begin_unit(own, unit, step);
    if (fails && rank == 0) pthread_barrier_wait(&t->barrier);
    if (own->queue)
        fake_launch(t->waits == TAGC_WAITS_FOR_RESULT ? own->stream : tagc_queue_stream(own->queue),
                    read_sums, work);
}

static void end(one_rank *own, uint32_t unit, int step) {
    outcome *out = own->out;
    tagc_model_stats stats;
    tagc_model_stats_init(&stats);
    tagc_status *status = &out->begun[step][unit];
    if (*status == TAGC_OK) *status = tagc_model_end(own->model, unit, &stats);
    if (*status != TAGC_OK) {
        snprintf(out->texts[step][unit], TAGC_ERROR_TEXT_BYTES, "%s", tagc_last_error());
        return;
    }
    uint64_t sent[4] = {stats.n_bytes_sent, stats.n_bytes_received, stats.n_sent, stats.nonfinite};
    memcpy(out->sent[step][unit], sent, sizeof sent);
    if (!own->queue) read_sums(&own->work[step][unit]);
    uint32_t n = tagc_model_n_parts(own->model, unit);
    for (uint32_t p = 0; p < n; p++) {
        tagc_model_part *part = &own->model->units[unit].parts[p];
        double *squares = &out->squares[(unit * N_TENSORS + p) * 2];
        if (part->n_full == 0) continue;
        squares[0] = part->square;
        EXPECT(own->m,
               (part->is_there ? own->model->device->residual_square(part, &squares[1])
                               : tagc_reducer_residual_square(part->reducer, &squares[1])) == TAGC_OK);
    }
    if (unit == 2 && n > out->most_parts) out->most_parts = n;
}

static void load_again(one_rank *own) {
    outcome *out = own->out;
    const void *file = out->state;
    EXPECT(own->m, tagc_model_save(own->model, out->state, STATE_BYTES, &out->n_state) == TAGC_OK);
    EXPECT(own->m, tagc_model_forget(own->model) == TAGC_OK);
    EXPECT(own->m, tagc_model_load(own->model, &file, &out->n_state, 1) == TAGC_OK);
}

/* As if the schedule had decided it: tensors of unit 2 go on one by one, and back. */
static void change_levels(one_rank *own, int step) {
    enum { EACH = 5 };
    if (step % EACH || step == 0) return;
    for (uint32_t i = 2, k = 0; i < N_TENSORS; i += N_UNITS, k++) {
        tagc_scheduled *p = &own->model->schedule->parameters[own->model->tensors[i].parameter];
        int is_further = (step / EACH + (int)k) % 3;
        p->now = p->next =
            is_further ? (is_further == 1 ? TAGC_LEVEL_LARGEST : TAGC_LEVEL_LAST) : TAGC_LEVEL_EVERY;
        p->share = p->next_share = is_further ? 0.25 : 1;
    }
    EXPECT(own->m, tagc_model_take_up(own->model) == TAGC_OK);
}

static void run_step(one_rank *own, int step) {
    trial *t = own->t;
    int is_other = t->event == OTHER_ORDER && step == t->event_at && own->m->rank == 1;
    if (t->gentle) change_levels(own, step);
    if (step == t->loads_at) load_again(own);
    if (own->queue && (t->moves || t->waits != TAGC_WAITS_FOR_RESULT)) { /* else steps are pipelined, too */
        real.StreamSynchronize(own->stream);
        real.StreamSynchronize(tagc_queue_stream(own->queue));
    }
    for (uint32_t k = 0; k < N_UNITS; k++) begin(own, is_other && k > 0 ? N_UNITS - k : k, step);
    start_late(own);
    for (uint32_t unit = 0; unit < N_UNITS; unit++) {
        int done = 0;
        if (own->out->begun[step][unit] == TAGC_OK)
            EXPECT(own->m, tagc_model_test(own->model, unit, &done) == TAGC_OK);
        end(own, unit, step);
    }
    if (t->event == OTHER_ORDER && step == t->event_at)
        return; /* the comm is broken for good, or a unit is */
    if (!t->failing) EXPECT(own->m, tagc_model_step(own->model, 1.0) == TAGC_OK);
    for (uint32_t i = 0; i < N_TENSORS; i++)
        EXPECT(own->m, tagc_model_plan(own->model, i, &own->out->plans[step][i]) == TAGC_OK);
}

/* All ask with one word; then one of them with another. */
static void ask(one_rank *own) {
    member *m = own->m;
    int is_alone = m->w->n_hosts == 1;
    EXPECT(m, tagc_model_ask(own->model, 1, 7) == TAGC_OK);
    tagc_status status = tagc_model_ask(own->model, 1, 7 + (uint64_t)(m->host == 1));
    EXPECT(m, status == (is_alone ? TAGC_OK : TAGC_ERR_MISMATCH));
    if (!own->t->summed) return;
    EXPECT(m, tagc_model_ask(own->model, 1, 7 + (uint64_t)m->place) == TAGC_ERR_MISMATCH);
}

static void keep_residuals(one_rank *own) {
    outcome *out = own->out;
    for (uint32_t unit = 0; unit < N_UNITS; unit++) {
        tagc_piece pieces[N_TENSORS];
        size_t n = 0;
        for (uint32_t i = unit; i < N_TENSORS; i += N_UNITS) {
            out->residual[i] = calloc(own->s.n_elems[i], sizeof(float));
            pieces[n++] = (tagc_piece){i, 0, own->s.n_elems[i], out->residual[i]};
        }
        EXPECT(own->m, tagc_model_get_residual(own->model, unit, pieces, n) == TAGC_OK);
    }
    EXPECT(own->m, tagc_model_save(own->model, out->state, STATE_BYTES, &out->n_state) == TAGC_OK);
}

static void body(member *m) {
    trial *t = m->w->shared;
    one_rank *own = calloc(1, sizeof *own);
    *own = (one_rank){.m = m, .t = t, .out = outcomes[t->is_plain][m->rank]};
    own->side = t->is_plain ? NO_DEVICE : t->sides[m->rank % 4];
    begins = 1;
    of_thread = t;
    open_rank(own);
    uint64_t n_residual = own->model ? residual_bytes(own) : 0, n_bytes = own->model ? all_bytes(own) : 0;
    for (int step = 0; own->model && step < t->n_steps && !m->failure[0]; step++) {
        run_step(own, step);
        if (step == 0 && !t->prepares) n_bytes = all_bytes(own);
        if (!t->moves && (t->prepares || !t->gentle))
            EXPECT(m, all_bytes(own) == n_bytes); /* no step takes memory */
    }
    if (own->model)
        EXPECT(m, residual_bytes(own) == n_residual); /* nor do parts that split and join, for these */
    if (own->queue &&
        (real.StreamSynchronize(own->stream) || real.StreamSynchronize(tagc_queue_stream(own->queue))))
        EXPECT(m, t->failing != NULL);
    if (own->model && !t->failing && t->event != OTHER_ORDER) {
        ask(own);
        keep_residuals(own);
    }
    close_rank(own);
    free(own);
}

/* ---- both runs ---- */

static int same(int element, const char *a, const char *b) {
    for (uint64_t i = 0; i < UNIT_BYTES / tagc_element_bytes(element); i++) {
        float x, y;
        tagc_elements_read(a, element, i, 1, &x);
        tagc_elements_read(b, element, i, 1, &y);
        if (memcmp(&x, &y, sizeof x) != 0 && !(isnan(x) && isnan(y))) return 0;
    }
    return 1;
}

/* After a failure all sums are NaN on ranks with a device, but where a rank said so itself or its pieces were wrong. */
static void check_void(const trial *t, int rank, int unit, const char *sums, size_t n_bytes) {
    int is_own = unit == 1 && (t->event == SAYS_FAILED || t->event == BAD_PIECE) &&
                 rank == 1 % (t->n_hosts * t->n_places);
    float value;
    if (is_own || t->sides[rank % 4] == NO_DEVICE) return;
    for (uint64_t i = 0; i < n_bytes / tagc_element_bytes(t->sum); i++) {
        tagc_elements_read(sums, t->sum, i, 1, &value);
        assert_true(isnan(value));
    }
}

static void compare(const trial *t, int rank, const outcome *there, const outcome *here) {
    for (int step = 0; step < t->n_steps; step++) {
        for (int unit = 0; unit < N_UNITS; unit++) {
            tagc_status a = there->begun[step][unit], b = here->begun[step][unit];
            if (t->event == OTHER_ORDER &&
                step == t->event_at) { /* of how many the others learn depends on time */
                if (unit == 0) continue;
                check_void(t, rank, unit, there->sums[step][unit], there->n_sums[unit]);
                assert_true(a == TAGC_ERR_MISMATCH && b == TAGC_ERR_MISMATCH);
                continue;
            }
            if (a != b)
                fail_msg("seed %d, step %d, unit %d, rank %d: status %d (%s), not %d (%s)", (int)t->seed,
                         step, unit, rank, a, there->texts[step][unit], b, here->texts[step][unit]);
            if (a != TAGC_OK) {
                check_void(t, rank, unit, there->sums[step][unit], there->n_sums[unit]);
                continue;
            }
            if (!same(t->sum, there->sums[step][unit], here->sums[step][unit]))
                fail_msg("seed %d, step %d, unit %d, rank %d: other sums", (int)t->seed, step, unit, rank);
            if (memcmp(there->sent[step][unit], here->sent[step][unit], sizeof here->sent[step][unit]) != 0)
                fail_msg("seed %d, step %d, unit %d, rank %d: other statistics", (int)t->seed, step, unit,
                         rank);
        }
        for (int i = 0; i < N_TENSORS; i++) {
            const tagc_schedule_plan *a = &there->plans[step][i], *b = &here->plans[step][i];
            assert_true(a->level == b->level && a->format == b->format && a->block == b->block);
            assert_true(fabs(a->sparsity - b->sparsity) < 1e-9);
        }
    }
    int n_squares = 0;
    for (int i = 0; i < N_UNITS * N_TENSORS * 2; i++) { /* sums in another order */
        double a = there->squares[i], b = here->squares[i];
        assert_true(fabs(a - b) <= 1e-12 * b);
        n_squares += b > 0;
    }
    assert_true(!t->gentle || n_squares >= 4);
    if (t->failing || t->event == OTHER_ORDER) return;
    assert_int_equal(there->n_state, here->n_state);
}

/* With residuals, in the order of names; values of the last step. */
static void compare_residuals(const trial *t, const outcome *there, const outcome *here) {
    shapes s;
    make_shapes(t, &s);
    for (int i = 0; i < N_TENSORS; i++) {
        if (there->residual[i] && here->residual[i])
            assert_memory_equal(there->residual[i], here->residual[i], s.n_elems[i] * sizeof(float));
        free(there->residual[i]);
        free(here->residual[i]);
    }
}

static uint32_t run(trial *t) {
    char where[TAGC_WHERE_TEXT_BYTES];
    int n_ranks = t->n_hosts * t->n_places;
    uint32_t most_parts = 0;
    for (int i = 0; i < 2; i++)
        for (int r = 0; r < n_ranks; r++) outcomes[i][r] = calloc(1, sizeof(outcome));
    t->is_plain = 1;
    run_world(t->n_hosts, t->n_places, body, t);
    t->is_plain = 0;
    fake_reset(t->seed + 1, FAKE_MAX_DEVICES, FAKE_EAGER, 1);
    fake_behave(t->manners ? t->manners : "");
    harness_maker_configure(t->seed + 1, 1 + (unsigned)t->seed % 5);
    n_foreign = 0;
    make_noting();
    assert_int_equal(tagc_runtime_bind(FAKE_CUDART, &real, where), TAGC_OK);
    assert_int_equal(tagc_runtime_bind_driver(&real), TAGC_OK);
    pthread_barrier_init(&t->barrier, NULL, (unsigned)n_ranks);
    run_world(t->n_hosts, t->n_places, body, t);
    pthread_barrier_destroy(&t->barrier);
    tagc_runtime_unbind(&real);
    if (fake_n_mistakes()) print_error("seed %d: %s\n%s\n", (int)t->seed, fake_mistake(0), fake_report());
    assert_int_equal(fake_n_mistakes(), 0);
    assert_int_equal(n_foreign, 0);
    assert_int_equal(n_shared, 0);
    assert_int_equal(fake_n_device_blocks(), 0);
    for (int r = 0; r < n_ranks; r++) {
        compare(t, r, outcomes[0][r], outcomes[1][r]);
        compare_residuals(t, outcomes[0][r], outcomes[1][r]);
        most_parts = outcomes[0][r]->most_parts > most_parts ? outcomes[0][r]->most_parts : most_parts;
    }
    for (int i = 0; i < 2; i++)
        for (int r = 0; r < n_ranks; r++) free(outcomes[i][r]);
    return most_parts;
}

/* ---- tests ---- */

static trial make_trial(uint64_t seed) {
    static const int residuals[] = {TAGC_FORMAT_INT8, TAGC_FORMAT_FP32, TAGC_FORMAT_INT4},
                     hosts[] = {2, 1, 4, 3};
    int is_narrow = seed % 3 == 1;
    return (trial){.seed = seed,
                   .n_hosts = hosts[seed % 4],
                   .n_places = 1,
                   .n_steps = 3,
                   .output = seed / 2 % 2 ? TAGC_OUTPUT_UNIT : TAGC_OUTPUT_SHARD,
                   .op = seed % 5 ? TAGC_OP_AVG : TAGC_OP_SUM,
                   .gradient = is_narrow       ? TAGC_ELEMENT_BF16
                               : seed % 7 == 3 ? TAGC_ELEMENT_FP16
                                               : TAGC_ELEMENT_FP32,
                   .sum = is_narrow       ? TAGC_ELEMENT_BF16
                          : seed % 7 == 3 ? TAGC_ELEMENT_FP16
                                          : TAGC_ELEMENT_FP32,
                   .residual = residuals[seed % 3],
                   .cut = seed % 4 == 3 ? TAGC_CUT_FLAT : TAGC_CUT_ROWS,
                   .result_format = seed / 2 % 2 && seed % 4 == 2 ? TAGC_FORMAT_INT8 : -1,
                   .dense_only = seed % 2 == 0,
                   .sides = {KERNELS, KERNELS, KERNELS, KERNELS},
                   .in_place = seed / 3 % 2,
                   .prepares = seed % 2,
                   .waits = seed % 3 ? TAGC_WAITS_FOR_RESULT : TAGC_WAITS_FOR_NOTHING,
                   .event_at = -1,
                   .loads_at = -1,
                   .manners = ""};
}

TEST(test_bits) {
    static const char *const manners[] = {"", "all,depth=128", "late-flags,connections=2", "",
                                          "blocking-alloc,lazy-loading"};
    for (uint64_t seed = 0; seed < REPEATS(16, 6, 3); seed++) {
        trial t = make_trial(seed);
        t.manners = manners[seed % 5];
        if (seed % 4 == 2) t.sides[1] = NO_KERNELS, t.sides[2] = NO_DEVICE; /* four ranks */
        if (seed % 8 == 4) t.sides[0] = NO_KERNELS;
        t.moves = seed % 6 == 5;
        run(&t);
    }
}

TEST(test_overlap) {
    for (uint64_t seed = 16; seed < 20; seed++) {
        trial t = make_trial(seed);
        t.n_hosts = 2;
        t.n_steps = 1;
        t.dense_only = 0;
        t.waits = TAGC_WAITS_FOR_NOTHING;
        t.in_place = 0;
        t.is_late = t.prepares = 1; /* else a begin would wait for those before it */
        if (seed == 19) t.sides[0] = t.sides[1] = NO_KERNELS;
        run(&t);
    }
}

/* Where the caller adds up within hosts; and where the model does, on a queue without kernels. */
TEST(test_two_levels) {
    for (uint64_t seed = 20; seed < REPEATS(26, 23, 21); seed++) {
        trial t = make_trial(seed);
        t.n_hosts = t.n_places = 2;
        t.summed = seed % 3 != 2;
        t.in_place = t.in_place && t.summed;
        t.output = seed % 2 ? TAGC_OUTPUT_HOST_SHARD : TAGC_OUTPUT_SHARD;
        t.result_format = -1;
        if (!t.summed)
            for (int r = 0; r < 4; r++) t.sides[r] = r == 1 ? NO_DEVICE : NO_KERNELS;
        run(&t);
    }
}

/* What is not sent of a tensor without a gradient stays; the device finds out which ones these are. */
TEST(test_rests) {
    for (uint64_t seed = 80; seed < REPEATS(86, 83, 82); seed++) {
        trial t = make_trial(seed);
        t.n_hosts = 2;
        t.n_places = 1 + (int)seed % 2;
        t.summed = t.n_places > 1;
        t.output = t.summed ? TAGC_OUTPUT_HOST_SHARD : TAGC_OUTPUT_UNIT;
        t.result_format = -1;
        t.cut = TAGC_CUT_ROWS;
        t.rests = 1;
        t.dense_only = 0;
        t.n_steps = 6;
        if (seed % 3 == 0) t.sides[1] = NO_KERNELS, t.sides[2] = NO_DEVICE;
        run(&t);
    }
}

/* Levels change, parts split and join, and the state is saved and loaded meanwhile. */
TEST(test_schedule) {
    uint32_t most_parts = 0;
    if (REPEATS(0, 0, 1)) skip();
    for (uint64_t seed = 30; seed < REPEATS(34, 32, 32); seed++) {
        trial t = make_trial(seed);
        t.n_hosts = 2;
        t.gentle = 1;
        t.dense_only = 0;
        t.cut = TAGC_CUT_ROWS;
        t.residual = seed % 2 ? TAGC_FORMAT_FP32 : TAGC_FORMAT_INT8;
        t.n_steps = 24; /* a window has 20 */
        t.loads_at = 12;
        t.sides[1] = seed % 2 ? NO_DEVICE : KERNELS;
        t.manners = "late-flags";
        uint32_t n = run(&t);
        most_parts = n > most_parts ? n : most_parts;
    }
    assert_int_equal(most_parts, 3);
}

TEST(test_events) {
    for (int i = SAYS_FAILED; i <= OVERFLOWS; i++)
        for (uint64_t seed = 40; seed < 43; seed++) {
            trial t = make_trial(seed + 2 * (uint64_t)i);
            t.n_hosts = 2 + (int)seed % 2;
            if (seed == 42) { /* ranks of another place learn of it, too */
                t.n_places = 2;
                t.summed = 1;
                t.output = i % 2 ? TAGC_OUTPUT_HOST_SHARD : TAGC_OUTPUT_SHARD;
                t.result_format = -1;
            }
            t.event = (incident)i;
            t.event_at = 1;
            if (i == OTHER_ORDER) t.n_steps = 2;
            if (seed % 2) t.sides[i % 2] = NO_KERNELS;
            run(&t);
        }
}

TEST(test_failing_calls) {
    static const struct {
        const char *call;
        int nth;
    } calls[] = {{"MemcpyAsync", 1},       {"LaunchKernel", 2}, {"StreamWaitValue32", 1},
                 {"MemcpyAsync", 3},       {"LaunchKernel", 4}, {"StreamWriteValue32", 2},
                 {"StreamWaitValue32", 2}, {"EventRecord", 1}};
    for (size_t c = 0; c < sizeof calls / sizeof *calls; c += REPEATS(1, 1, 3)) {
        trial t = make_trial(60 + c);
        t.n_hosts = 2;
        t.failing = calls[c].call;
        t.nth = calls[c].nth;
        t.event_at = 1;
        t.n_steps = 2;
        t.waits = TAGC_WAITS_FOR_RESULT;
        t.dense_only = 0;
        run(&t);
    }
}

/* Where launches or copies wait until they have run, kernels are refused, and the processor gives the same bits. */
TEST(test_calls_that_wait) {
    static const struct {
        const char *manners, *variable, *refused;
    } all[] = {{"launch-blocking", "0", "a debugger, a profiler or a sanitizer"},
               {"copy-blocking", "", "a debugger, a profiler or a sanitizer"},
               {"launch-blocking,copy-blocking,blocking-alloc", "", "a debugger"},
               {"", "1", "CUDA_LAUNCH_BLOCKING is set in the environment"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        trial t = make_trial(70 + i);
        t.n_hosts = 2;
        t.manners = all[i].manners;
        t.refused = all[i].refused;
        setenv("CUDA_LAUNCH_BLOCKING", all[i].variable, 1);
        run(&t);
        unsetenv("CUDA_LAUNCH_BLOCKING");
    }
}

/* What a device cannot do is said when the model is made, by name. */
static void expect_refused(one_rank *own, const tagc_model_options *o, const char *words) {
    member *m = own->m;
    tagc_model *model = (tagc_model *)1;
    tagc_status status =
        tagc_model_create_on(own->queue, m->within, m->between, own->s.tensors, N_TENSORS, o, &model);
    EXPECT(m, status == TAGC_ERR_UNSUPPORTED && !model);
    EXPECT(m, strstr(tagc_last_error(), words) != NULL);
}

static void refusals_body(member *m) {
    trial t = make_trial(1);
    one_rank *own = calloc(1, sizeof *own);
    tagc_model_options o;
    tagc_model *here;
    *own = (one_rank){.m = m, .t = &t, .side = KERNELS};
    begins = 1;
    make_shapes(&t, &own->s);
    open_device(own);
    tagc_model_options_init(&o);
    expect_refused(own, &o, "kernels do not add up within a host");
    o.hosts.summed = 1;
    o.layout.output = TAGC_OUTPUT_UNIT;
    expect_refused(own, &o, "summed with output UNIT");
    o.layout.output = TAGC_OUTPUT_SHARD;
    o.layout.cut = TAGC_CUT_FLAT_ARRAYS;
    expect_refused(own, &o, "FLAT_ARRAYS");
    o.layout.cut = TAGC_CUT_ROWS;
    EXPECT(m, tagc_model_create_on(own->queue, m->within, m->between, own->s.tensors, N_TENSORS, &o,
                                   &own->model) == TAGC_OK);
    EXPECT(m, tagc_model_create(m->within, m->between, own->s.tensors, N_TENSORS, &o, &here) == TAGC_OK);
    EXPECT(m, tagc_model_begin(own->model, 0, NULL, 0, NULL, 0) == TAGC_ERR_STATE);
    EXPECT(m, strstr(tagc_last_error(), "tagc_model_begin_on") != NULL);
    EXPECT(m, tagc_model_begin_on(here, 0, NULL, 0, NULL, 0, own->stream, 0) == TAGC_ERR_STATE);
    EXPECT(m, tagc_model_prepare_on(here, 0, NULL, 0, NULL, 0) == TAGC_ERR_STATE);
    EXPECT(m, tagc_model_begin_on(own->model, 0, NULL, 0, NULL, 0, own->stream, 0) == TAGC_OK); /* zeros */
    EXPECT(m, tagc_model_begin_on(own->model, 0, NULL, 0, NULL, 0, own->stream, 0) == TAGC_ERR_STATE);
    EXPECT(m, tagc_model_end(own->model, 0, NULL) == TAGC_OK);
    float value = 0;
    uint64_t first, n, n_own;
    for (uint32_t i = 0; i < N_TENSORS; i += N_UNITS) { /* another place has that gradient */
        EXPECT(m, tagc_model_owned(own->model, m->place, i, &first, &n_own) == TAGC_OK);
        EXPECT(m, tagc_model_owned(own->model, 1 - m->place, i, &first, &n) == TAGC_OK);
        tagc_piece piece = {i, first, 1, &value};
        if (n == 0 || n_own == 0) continue; /* both begin */
        EXPECT(m, tagc_model_begin_on(own->model, 0, &piece, 1, NULL, 0, own->stream, 0) == TAGC_OK);
        EXPECT(m, tagc_model_end(own->model, 0, NULL) == TAGC_ERR_ARGUMENT);
        EXPECT(m, strstr(tagc_last_error(), "are not all of place") != NULL);
    }
    tagc_model_destroy(here);
    close_rank(own);
    free(own);
}

TEST(test_refusals) {
    char where[TAGC_WHERE_TEXT_BYTES];
    fake_reset(9, FAKE_MAX_DEVICES, FAKE_EAGER, 1);
    harness_maker_configure(9, 1);
    make_noting();
    assert_int_equal(tagc_runtime_bind(FAKE_CUDART, &real, where), TAGC_OK);
    assert_int_equal(tagc_runtime_bind_driver(&real), TAGC_OK);
    run_world(1, 2, refusals_body, NULL);
    tagc_runtime_unbind(&real);
    if (fake_n_mistakes()) print_error("%s\n", fake_mistake(0));
    assert_int_equal(fake_n_mistakes(), 0);
    assert_int_equal(fake_n_device_blocks(), 0);
}

/* A queue without kernels finds out by itself that calls wait. */
TEST(test_queue_finds_out) {
    tagc_device *device;
    tagc_queue *queue = NULL;
    char where[TAGC_WHERE_TEXT_BYTES];
    tagc_runtime table;
    fake_reset(1, 1, FAKE_EAGER, 1);
    fake_behave("copy-blocking");
    assert_int_equal(tagc_runtime_bind(FAKE_CUDART, &table, where), TAGC_OK);
    assert_int_equal(tagc_device_create(&table, where, 0, &device), TAGC_OK);
    device->patience_ms = 100;
    assert_int_equal(tagc_queue_create(device, NULL, 2, &queue), TAGC_OK);
    assert_int_equal(device->calls_wait, 1);
    tagc_queue_destroy(queue);
    tagc_device_close(device);
    assert_int_equal(fake_n_mistakes(), 0);
    assert_int_equal(fake_n_live(), 0);
    assert_int_equal(fake_n_device_blocks(), 0);
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

enum { RANKS_MANY = 512, N_MANY = RANKS_MANY * 16, PARTS_MANY = 24 };

typedef struct many {
    tagc_comm *comm;
    tagc_device *device;
    tagc_kernels *kernels;
    tagc_queue *queue;
    void *stream;
    float *values, *sums, *there; /* (N_MANY) */
} many;

static void write_many(void *arg) {
    const many *m = arg;
    memcpy(fake_view(m->there), m->values, N_MANY * sizeof(float));
}

static void read_many(void *arg) {
    const many *m = arg;
    memcpy(m->values, fake_view(m->there), N_MANY * sizeof(float));
}

/* Of tensors that are parts of their own. queue: NULL: host arrays. */
static void make_many(const many *m, tagc_queue *queue, uint32_t n_parts, tagc_model **out) {
    static const uint64_t shape = N_MANY;
    static const char *const names[PARTS_MANY] = {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l",
                                                  "m", "n", "o", "p", "q", "r", "s", "t", "u", "v", "w", "x"};
    tagc_tensor tensors[PARTS_MANY];
    uint32_t apart[PARTS_MANY];
    tagc_schedule_options so;
    tagc_model_options o;
    for (uint32_t i = 0; i < n_parts; i++) {
        tensors[i] = (tagc_tensor){names[i], &shape, 1, 0, TAGC_CLASS_COMPRESSED};
        apart[i] = i;
    }
    tagc_schedule_options_init(&so);
    so.gentle = 0;
    so.sparsity = 0.75;
    tagc_model_options_init(&o);
    o.schedule.options = &so;
    o.layout.output = TAGC_OUTPUT_UNIT;
    o.layout.apart = apart;
    o.name = "gradients of a";
    assert_int_equal(queue ? tagc_model_create_on(queue, NULL, m->comm, tensors, n_parts, &o, out)
                           : tagc_model_create(NULL, m->comm, tensors, n_parts, &o, out),
                     TAGC_OK);
}

static void exchange_many(many *m) {
    tagc_model *there, *here;
    pthread_t thread;
    const tagc_piece given = {0, 0, N_MANY, m->values}, wanted = {0, 0, N_MANY, m->sums},
                     in_place = {0, 0, N_MANY, m->there};
    make_many(m, NULL, 1, &here);
    make_many(m, m->queue, 1, &there);
    for (int i = 0; i < N_MANY; i++) m->values[i] = (float)((i * 37) % 101 - 50);
    fake_launch(m->stream, write_many, m);
    assert_int_equal(tagc_model_begin_on(there, 0, &in_place, 1, &in_place, 1, m->stream, 1), TAGC_OK);
    assert_int_equal(pthread_create(&thread, NULL, exchange_main, m->queue), 0);
    assert_int_equal(tagc_model_end(there, 0, NULL), TAGC_OK);
    assert_int_equal(real.StreamSynchronize(m->stream), 0); /* `values` are read */
    assert_int_equal(tagc_model_begin(here, 0, &given, 1, &wanted, 1), TAGC_OK);
    assert_int_equal(tagc_model_end(here, 0, NULL), TAGC_OK);
    fake_launch(m->stream, read_many, m);
    assert_int_equal(real.StreamSynchronize(m->stream), 0);
    assert_memory_equal(m->sums, m->values, N_MANY * sizeof *m->sums);
    tagc_queue_close(m->queue);
    pthread_join(thread, NULL);
    tagc_model_destroy(here);
    tagc_model_destroy(there);
}

/* 512 ranks: tables of launches take many places in a launch queue. One part is exchanged as on the processor; a unit of more
 * parts than there are places for is refused. */
TEST(test_many_ranks) {
    static const tagc_callback_ops ops = {.abi = TAGC_TRANSPORT_ABI, .exchange = echo};
    char where[TAGC_WHERE_TEXT_BYTES], text[200];
    tagc_piece pieces[PARTS_MANY];
    tagc_model *large;
    many m = {.values = malloc(N_MANY * sizeof(float)), .sums = malloc(N_MANY * sizeof(float))};
    fake_reset(5, FAKE_MAX_DEVICES, FAKE_EAGER, 1);
    harness_maker_configure(5, 1);
    assert_int_equal(tagc_runtime_bind(FAKE_CUDART, &real, where), TAGC_OK);
    assert_int_equal(tagc_runtime_bind_driver(&real), TAGC_OK);
    assert_int_equal(tagc_device_open("cuda", FAKE_CUDART, 0, &m.device), TAGC_OK);
    assert_int_equal(tagc_kernels_create(m.device, harness_maker(), &m.kernels), TAGC_OK);
    assert_int_equal(tagc_queue_create(m.device, m.kernels, 2, &m.queue), TAGC_OK);
    assert_int_equal(tagc_comm_create_callback(&ops, NULL, 0, RANKS_MANY, NULL, &m.comm), TAGC_OK);
    assert_int_equal(fake_stream(&m.stream), 0);
    m.there = fake_alloc(N_MANY * sizeof(float));
    make_many(&m, m.queue, PARTS_MANY, &large);
    for (uint32_t i = 0; i < PARTS_MANY; i++) pieces[i] = (tagc_piece){i, 0, N_MANY, m.there + N_MANY * i};
    assert_int_equal(tagc_model_prepare_on(large, 0, pieces, PARTS_MANY, pieces, PARTS_MANY),
                     TAGC_ERR_UNSUPPORTED);
    snprintf(text, sizeof text, "gradients of a: %d parts over %d ranks take ", PARTS_MANY, RANKS_MANY);
    assert_non_null(strstr(tagc_last_error(), text));
    assert_non_null(strstr(tagc_last_error(), "places in a launch queue of the device, which has 1024: "));
    tagc_model_destroy(large);
    exchange_many(&m);
    tagc_queue_destroy(m.queue);
    tagc_comm_destroy(m.comm);
    fake_free(m.there);
    tagc_kernels_close(m.kernels);
    tagc_device_close(m.device);
    tagc_runtime_unbind(&real);
    assert_int_equal(fake_n_mistakes(), 0);
    free(m.values), free(m.sums);
}

/* ---- planted mistakes ---- */

static const struct {
    const char *what;
    sabotage kind;
    int call, is_late;
} planted[] = {
    {"nothing", NO_SABOTAGE, 0, 0},
    {"a gradient is encoded before it is there", DROP_WAIT, 0, 0},
    {"a room is used again before its last exchange is over", DROP_WAIT, 1, 1},
    {"the caller does not wait for the result", DROP_WAIT, 4, 0},
    {"bodies are added before they are there", DROP_FLAG, 0, 0},
    {"bodies of the second part are added before they are there, or the step is settled before the verdict",
     DROP_FLAG, 1, 0},
    {"the step of two parts is settled before the verdict", DROP_FLAG, 2, 0},
    {"the gradient's event is recorded on another stream", RECORD_ELSEWHERE, 0, 0},
    {"the result's event is recorded on another stream", RECORD_ELSEWHERE, 3, 0},
};

static const char *program;

/* In processes of their own, because kernels that read other bodies than they should may end one. */
TEST(test_planted) {
    enum { FIRST_SEED = 90, N_SEEDS = 2 };
    char command[600];
    if (REPEATS(0, 1, 1)) skip(); /* a sanitizer does not make this test see more or less */
    for (size_t p = 0; p < sizeof planted / sizeof *planted; p++) {
        int n_found = 0;
        for (int seed = FIRST_SEED; seed < FIRST_SEED + N_SEEDS; seed++) {
            snprintf(command, sizeof command, "timeout 60 '%s' %zu %d >/dev/null 2>&1", program, p, seed);
            n_found += system(command) != 0;
        }
        if (planted[p].kind == NO_SABOTAGE) {
            assert_int_equal(n_found, 0);
            continue;
        }
        print_message("found in %d of %d seeds: %s\n", n_found, N_SEEDS, planted[p].what);
        assert_true(n_found > 0);
    }
}

static int run_planted(int p, int seed) {
    trial t = make_trial((uint64_t)seed);
    t.n_hosts = 2;
    t.n_steps = planted[p].is_late ? 1 : 4;
    t.cut = TAGC_CUT_ROWS;
    t.dense_only = 0;
    t.waits = planted[p].is_late ? TAGC_WAITS_FOR_NOTHING : TAGC_WAITS_FOR_RESULT;
    t.in_place = 0;
    if (planted[p].is_late) t.is_late = t.prepares = 1;
    t.sabotage = planted[p].kind;
    t.sabotaged = planted[p].call;
    run(&t);
    return 0;
}

/* <program> [pattern of tests], or <program> <planted mistake> <seed> */
int main(int argc, char **argv) {
    program = argv[0];
    if (argc == 3) return run_planted(atoi(argv[1]), atoi(argv[2]));
    if (argc == 2) cmocka_set_test_filter(argv[1]);
    return test_run(NULL, NULL);
}
