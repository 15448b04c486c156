/* The residual as state, in every format: saved and loaded as bytes, scaled, and put in place. */
#include "../lengths.h"
#include "exchange/reducer.h"
#include "good_options.h"
#include "oracle.h"

#include <math.h>

enum { SHARD = 1000, N_DAMAGES = 200, HEADER = 64, N_FORMATS = 3 };
static const int formats[N_FORMATS] = {TAGC_FORMAT_FP32, TAGC_FORMAT_INT8, TAGC_FORMAT_INT4};
#define EMPTY_BITS 0x80000000u /* of an element of an empty residual */

/* Two reducers of the same unit, and what the first one saved after a step. */
typedef struct two {
    rank_run *run;
    size_t n;
    tagc_reducer_options options;
    tagc_reducer *one, *other;
    float *gradient, *output, *again; /* (n) */
    uint64_t n_bytes;
    char *saved, *copy; /* (n_bytes) */
} two;

/* As tagc_format says: of W rows of a shard. */
static uint64_t stored_bytes(int format, size_t n_rows, size_t shard) {
    size_t blocks = format == TAGC_FORMAT_INT8 ? (shard + 127) / 128 : (shard + 31) / 32;
    size_t codes = format == TAGC_FORMAT_INT8 ? shard : (shard + 1) / 2;
    size_t integers = (blocks + 63) / 64 * 64 + (codes + 63) / 64 * 64;
    return n_rows * (format == TAGC_FORMAT_FP32 ? shard * 4 : integers);
}

static int make(rank_run *run, two *t) {
    *t = (two){.run = run, .n = SHARD * (size_t)run->world_size, .options = good_options(run->world_size)};
    t->options.exchange = TAGC_EXCHANGE_DIRECT;
    t->options.residual = *(const int *)run->shared;
    t->options.tag = 7; /* one unit, twice */
    t->options.n_elems = t->n;
    t->gradient = malloc(t->n * sizeof(float));
    t->output = malloc(t->n * sizeof(float));
    t->again = malloc(t->n * sizeof(float));
    for (size_t i = 0; i < t->n; i++) t->gradient[i] = random_gradient(2, run->rank, i);
    return CHECK(run, tagc_reducer_create(run->comm, &t->options, &t->one) == TAGC_OK) &&
           CHECK(run, tagc_reducer_create(run->comm, &t->options, &t->other) == TAGC_OK);
}

static void free_all(two *t) {
    tagc_reducer_destroy(t->one);
    tagc_reducer_destroy(t->other);
    free(t->gradient), free(t->output), free(t->again), free(t->saved), free(t->copy);
}

static int have_same_residual(const two *t) {
    float *one = copy_of_residual(t->one, NULL), *other = copy_of_residual(t->other, NULL);
    int is_same = memcmp(one, other, t->n * sizeof *one) == 0;
    free(one), free(other);
    return is_same;
}

static int is_empty(const two *t) {
    float *residual = copy_of_residual(t->other, NULL);
    int n_empty = 0;
    for (size_t i = 0; i < t->n; i++) n_empty += bits_of(residual[i]) == EMPTY_BITS;
    free(residual);
    return n_empty == (int)t->n;
}

static int load(two *t, const char *bytes) {
    return CHECK(t->run, tagc_reducer_state_load(t->other, bytes, t->n_bytes) == TAGC_OK);
}

static void save_and_load(two *t) {
    rank_run *run = t->run;
    CHECK(run, run_reducer(t->one, t->gradient, t->output, NULL) == TAGC_OK);
    t->n_bytes = tagc_reducer_state_bytes(t->one);
    CHECK(run, t->n_bytes == HEADER + stored_bytes(t->options.residual, (size_t)run->world_size, SHARD));
    t->saved = malloc(t->n_bytes);
    t->copy = malloc(t->n_bytes);
    CHECK(run, tagc_reducer_state_save(t->one, t->saved, t->n_bytes) == TAGC_OK);
    CHECK(run, tagc_reducer_state_save(t->one, t->saved, t->n_bytes - 1) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_state_save(t->one, NULL, t->n_bytes) == TAGC_ERR_ARGUMENT);
    load(t, t->saved);
    CHECK(run, have_same_residual(t));
    CHECK(run, tagc_reducer_steps(t->one) == 1 && tagc_reducer_steps(t->other) == 1);
}

/* Two further steps: the second depends on how the first was rounded. */
static void step_alike(two *t) {
    rank_run *run = t->run;
    for (int step = 0; step < 2; step++) {
        CHECK(run, run_reducer(t->one, t->gradient, t->output, NULL) == TAGC_OK);
        CHECK(run, run_reducer(t->other, t->gradient, t->again, NULL) == TAGC_OK);
        CHECK(run, memcmp(t->output, t->again, SHARD * sizeof(float)) == 0);
        CHECK(run, have_same_residual(t));
    }
}

/* Bits of the header byte by byte, then anywhere; and any shorter length. */
static void refuse_damage(two *t) {
    rank_run *run = t->run;
    for (uint64_t i = 0; i < N_DAMAGES; i++) {
        memcpy(t->copy, t->saved, t->n_bytes);
        t->copy[i < HEADER ? i : mix(i) % t->n_bytes] ^= (char)(1 << i % 8);
        CHECK(run, tagc_reducer_state_load(t->other, t->copy, t->n_bytes) == TAGC_ERR_CORRUPT);
        CHECK(run, tagc_reducer_state_load(t->other, t->saved, mix(i) % t->n_bytes) == TAGC_ERR_CORRUPT);
    }
    CHECK(run, tagc_reducer_state_load(t->other, NULL, t->n_bytes) == TAGC_ERR_ARGUMENT);
    CHECK(run, have_same_residual(t));
}

/* By values and the number of steps, as a checkpoint of another layout would. */
static void go_on_by_values(two *t) {
    rank_run *run = t->run;
    CHECK(run, tagc_reducer_scale_residual(t->other, 0) == TAGC_OK);
    CHECK(run, tagc_reducer_get_residual(t->one, t->again, t->n) == TAGC_OK);
    CHECK(run, tagc_reducer_set_residual(t->other, t->again, t->n) == TAGC_OK);
    CHECK(run, tagc_reducer_set_steps(t->other, tagc_reducer_steps(t->one)) == TAGC_OK);
    step_alike(t);
}

/* How far a value of each format may be from what was loaded: the largest of its block, in a row of a shard, by this. */
static const float codes[] = {[TAGC_FORMAT_FP32] = INFINITY, [TAGC_FORMAT_INT8] = 63, [TAGC_FORMAT_INT4] = 3};
static const size_t blocks[] = {[TAGC_FORMAT_FP32] = 1, [TAGC_FORMAT_INT8] = 128, [TAGC_FORMAT_INT4] = 32};

static float largest_near(const float *values, size_t shard, size_t i, size_t block) {
    float largest = 0;
    size_t first = i % shard / block * block, end = first + block < shard ? first + block : shard;
    for (size_t k = first; k < end; k++) largest = fmaxf(largest, fabsf(values[i / shard * shard + k]));
    return largest;
}

/* What was saved in one format is loaded into another: what both can hold as it is, the rest to a code of the latter. */
static void load_into_others(two *t) {
    rank_run *run = t->run;
    CHECK(run, tagc_reducer_state_save(t->one, t->saved, t->n_bytes) == TAGC_OK);
    residual_to(t->one, t->output);
    for (int f = 0; f < N_FORMATS; f++) {
        int format = formats[f];
        tagc_reducer_options options = t->options;
        tagc_reducer *other;
        double error = 0, size = 0;
        options.residual = format;
        if (!CHECK(run, tagc_reducer_create(run->comm, &options, &other) == TAGC_OK)) return;
        CHECK(run, tagc_reducer_state_load(other, t->saved, t->n_bytes) == TAGC_OK);
        CHECK(run, residual_to(other, t->again) == t->n);
        for (size_t i = 0; i < t->n; i++) {
            float lost = t->again[i] - t->output[i];
            CHECK(run, fabsf(lost) <= largest_near(t->output, SHARD, i, blocks[format]) / codes[format]);
            error += (double)lost;
            size += fabs((double)lost);
        }
        CHECK(run, fabs(error) <= size / 5); /* in both directions */
        if (format < t->options.residual) CHECK(run, size == 0 || t->options.residual == TAGC_FORMAT_INT4);
        CHECK(run, tagc_reducer_steps(other) == tagc_reducer_steps(t->one));
        tagc_reducer_destroy(other);
    }
}

static void refuse_another_size(two *t) {
    tagc_reducer_options options = t->options;
    tagc_reducer *larger;
    options.n_elems *= 2;
    if (!CHECK(t->run, tagc_reducer_create(t->run->comm, &options, &larger) == TAGC_OK)) return;
    CHECK(t->run, tagc_reducer_state_load(larger, t->saved, t->n_bytes) == TAGC_ERR_MISMATCH);
    tagc_reducer_destroy(larger);
}

static void save_body(rank_run *run) {
    two t;
    if (make(run, &t)) {
        save_and_load(&t);
        refuse_damage(&t);
        step_alike(&t);
        go_on_by_values(&t);
        load_into_others(&t);
        refuse_another_size(&t);
    }
    free_all(&t);
}

static void in_every_format(void (*body)(rank_run *run)) {
    for (int f = 0; f < N_FORMATS; f++) {
        int format = formats[f];
        run_ranks(2, body, &format);
    }
}

TEST(test_save) {
    in_every_format(save_body);
}

/* t->again: the residual before. */
static void scale(two *t) {
    rank_run *run = t->run;
    residual_to(t->other, t->again);
    CHECK(run, tagc_reducer_scale_residual(t->other, 0.5) == TAGC_OK);
    residual_to(t->other, t->output);
    for (size_t i = 0; i < t->n; i++) CHECK(run, bits_of(t->output[i]) == bits_of(t->again[i] * 0.5f));
    double before, after;
    CHECK(run, tagc_reducer_residual_square(t->one, &before) == TAGC_OK);
    CHECK(run, tagc_reducer_residual_square(t->other, &after) == TAGC_OK);
    CHECK(run, before > 0 && fabs(after * 4 - before) <= 1e-12 * before);
    CHECK(run, tagc_reducer_scale_residual(t->other, -1) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_scale_residual(t->other, NAN) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_scale_residual(t->other, INFINITY) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_scale_residual(t->other, 1e300) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_scale_residual(t->other, 0) == TAGC_OK);
    CHECK(run, is_empty(t));
}

static void put_in_place(two *t) {
    rank_run *run = t->run;
    CHECK(run, tagc_reducer_set_residual(t->other, t->again, t->n - 1) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_set_residual(t->other, NULL, t->n) == TAGC_ERR_ARGUMENT);
    float before = t->again[5];
    t->again[5] = NAN;
    CHECK(run, tagc_reducer_set_residual(t->other, t->again, t->n) == TAGC_ERR_ARGUMENT);
    CHECK(run, is_empty(t));
    t->again[5] = before;
    CHECK(run, tagc_reducer_set_residual(t->other, t->again, t->n) == TAGC_OK);
    residual_to(t->other, t->output);
    CHECK(run, memcmp(t->again, t->output, t->n * sizeof(float)) == 0);
}

static void change_body(rank_run *run) {
    two t;
    if (make(run, &t)) {
        save_and_load(&t);
        scale(&t);
        put_in_place(&t);
    }
    free_all(&t);
}

TEST(test_change) {
    in_every_format(change_body);
}

/* ---- another world, rank, output or unit ---- */

/* A reducer of one rank in a world of which nobody else is there. */
typedef struct world {
    int world_size, format;
    tagc_local_group *group;
    tagc_comm *comm;
    tagc_reducer *reducer;
    size_t n, shard;
} world;

static void make_world(world *w, uint64_t n_elems, int world_size, int format) {
    tagc_reducer_options options;
    *w = (world){.world_size = world_size, .format = format};
    assert_int_equal(tagc_local_group_create(world_size, &w->group), TAGC_OK);
    assert_int_equal(tagc_comm_create_local(w->group, 0, NULL, &w->comm), TAGC_OK);
    tagc_reducer_options_init(&options);
    options.n_elems = n_elems;
    options.residual = format;
    assert_int_equal(tagc_reducer_make_alone(&tagc_host_arrays, NULL, w->comm, &options, &w->reducer),
                     TAGC_OK);
    w->n = (size_t)tagc_reducer_residual_elems(w->reducer);
    w->shard = (size_t)(n_elems / (uint64_t)world_size);
    assert_int_equal(w->n, n_elems);
}

static void destroy_world(world *w) {
    tagc_reducer_destroy(w->reducer);
    tagc_comm_destroy(w->comm);
    tagc_local_group_destroy(w->group);
}

/* Small integers are the same in every format, however rows and blocks cut them. */
static float put_by(int rank, size_t i, int is_integer) {
    return is_integer ? (float)(int)(mix((uint64_t)rank << 32 | i) % 15) - 7 : random_gradient(3, rank, i);
}

/* had: what was saved after `step` steps. All of it is there afterwards, or nothing has changed. */
static void load_into(const world *to, const world *from, const void *saved, uint64_t n_bytes,
                      const float *had, int is_integer, uint64_t step) {
    int fits = to->world_size == from->world_size;
    float *values = malloc(to->n * sizeof *values);
    assert_int_equal(tagc_reducer_scale_residual(to->reducer, 0), TAGC_OK);
    assert_int_equal(tagc_reducer_set_steps(to->reducer, 77), TAGC_OK);
    tagc_status status = tagc_reducer_state_load(to->reducer, saved, n_bytes);
    residual_to(to->reducer, values);
    size_t n_wrong = 0;
    for (size_t i = 0; i < to->n; i++) {
        float off = fabsf(values[i] - (fits ? had[i] : 0));
        int may_round = fits && !is_integer && off > 0;
        n_wrong += may_round ? off > largest_near(had, to->shard, i, blocks[to->format]) / codes[to->format]
                             : off != 0;
    }
    if (n_wrong || status != (fits ? TAGC_OK : TAGC_ERR_MISMATCH))
        fail_msg("%zu values in format %d of %d ranks, loaded into %d, of %d: status %d, %zu wrong", from->n,
                 from->format, from->world_size, to->format, to->world_size, (int)status, n_wrong);
    assert_int_equal(tagc_reducer_steps(to->reducer), fits ? step : 77);
    free(values);
}

static void load_all(const world *from, const world *worlds, int n_worlds, int n_ranks, int is_integer) {
    uint64_t n_bytes = tagc_reducer_state_bytes(from->reducer);
    float *had = malloc(from->n * sizeof *had);
    char *saved = malloc(n_bytes);
    for (int rank = 0; rank < n_ranks && rank < from->world_size; rank++) {
        for (size_t i = 0; i < from->n; i++) had[i] = put_by(rank, i, is_integer);
        assert_int_equal(tagc_reducer_set_residual(from->reducer, had, from->n), TAGC_OK);
        assert_int_equal(tagc_reducer_set_steps(from->reducer, (uint64_t)rank), TAGC_OK);
        assert_int_equal(tagc_reducer_state_save(from->reducer, saved, n_bytes), TAGC_OK);
        if (!is_integer) residual_to(from->reducer, had);
        for (int w = 0; w < n_worlds; w++)
            load_into(&worlds[w], from, saved, n_bytes, had, is_integer, (uint64_t)rank);
    }
    free(had), free(saved);
}

/* Every pair of worlds of these sizes that can share n_elems, in every two formats. Shards of one length take
 * as many bytes as longer ones: rows are filled up. */
TEST(test_another_world) {
    static const struct {
        uint64_t n_elems;
        int first, last; /* world sizes */
        int n_ranks;     /* that save */
    } cases[] = {{64, 1, 64, 2}, {128, 1, 64, 2}, {720, 1, 24, 1}, {2992, 1, 44, 1}, {241920, 63, 64, 1}};
    enum { MAX_WORLDS = 1024 };
    static world worlds[MAX_WORLDS];
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        int n = 0;
        for (int size = cases[c].first; size <= cases[c].last; size++)
            for (int f = 0; f < N_FORMATS && cases[c].n_elems % (uint64_t)size == 0; f++)
                make_world(&worlds[n++], cases[c].n_elems, size, formats[f]);
        assert_true(n > 4);
        for (int w = 0; w < n; w++)
            for (int is_integer = 0; is_integer < 2; is_integer++)
                load_all(&worlds[w], worlds, n, cases[c].n_ranks, is_integer);
        for (int w = 0; w < n; w++) destroy_world(&worlds[w]);
    }
}

static tagc_reducer *make_one(tagc_local_group *group, int rank, uint64_t n_elems, uint64_t tag, int output,
                              tagc_comm **comm) {
    tagc_reducer_options options;
    tagc_reducer *reducer;
    assert_int_equal(tagc_comm_create_local(group, rank, NULL, comm), TAGC_OK);
    tagc_reducer_options_init(&options);
    options.n_elems = n_elems;
    options.tag = tag;
    options.output = output;
    assert_int_equal(tagc_reducer_make_alone(&tagc_host_arrays, NULL, *comm, &options, &reducer), TAGC_OK);
    return reducer;
}

/* What rank 1 of 3 saves of unit 7, and who may load it. */
TEST(test_whose) {
    static const struct {
        int rank;
        uint64_t n_elems, tag;
        int output;
        const char *text; /* NULL: it fits */
    } others[] = {{1, 96, 7, TAGC_OUTPUT_SHARD, NULL},
                  {0, 96, 7, TAGC_OUTPUT_SHARD, "rank 1 saved it, this is rank 0: each rank loads"},
                  {2, 96, 7, TAGC_OUTPUT_SHARD, "rank 1 saved it, this is rank 2"},
                  {1, 96, 8, TAGC_OUTPUT_SHARD, "tag is 7, this reducer's is 8"},
                  {1, 96, UINT64_MAX, TAGC_OUTPUT_SHARD, "tag is 7, this reducer's is 18446744073709551615"},
                  {1, 96, 7, TAGC_OUTPUT_UNIT, "output is 0, this reducer's is 1"},
                  {1, 95, 7, TAGC_OUTPUT_SHARD, "n_elems is 96, this reducer's is 95"},
                  {1, 192, 7, TAGC_OUTPUT_SHARD, "n_elems is 96, this reducer's is 192"}};
    tagc_local_group *group;
    tagc_comm *comm, *comm_of_other;
    assert_int_equal(tagc_local_group_create(3, &group), TAGC_OK);
    tagc_reducer *saver = make_one(group, 1, 96, 7, TAGC_OUTPUT_SHARD, &comm);
    float values[192], found[192];
    for (int i = 0; i < 96; i++) values[i] = put_by(1, (size_t)i, 1);
    assert_int_equal(tagc_reducer_set_residual(saver, values, 96), TAGC_OK);
    uint64_t n_bytes = tagc_reducer_state_bytes(saver);
    char *saved = malloc(n_bytes);
    assert_int_equal(tagc_reducer_state_save(saver, saved, n_bytes), TAGC_OK);
    tagc_reducer_destroy(saver);
    tagc_comm_destroy(comm);
    tagc_local_group_destroy(group);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        assert_int_equal(tagc_local_group_create(3, &group), TAGC_OK);
        tagc_reducer *other = make_one(group, others[i].rank, others[i].n_elems, others[i].tag,
                                       others[i].output, &comm_of_other);
        tagc_status status = tagc_reducer_state_load(other, saved, n_bytes);
        if (status != (others[i].text ? TAGC_ERR_MISMATCH : TAGC_OK)) fail_msg("case %zu: %d", i, status);
        if (others[i].text && !strstr(tagc_last_error(), others[i].text))
            fail_msg("case %zu: %s", i, tagc_last_error());
        size_t n = residual_to(other, found);
        for (size_t k = 0; k < n; k++)
            if (found[k] != (others[i].text ? 0 : values[k])) fail_msg("case %zu: value %zu", i, k);
        tagc_reducer_destroy(other);
        tagc_comm_destroy(comm_of_other);
        tagc_local_group_destroy(group);
    }
    free(saved);
}

/* Without tags, units of one size are told apart by the order in which they were made. */
enum { N_ALIKE = 3, N_ALIKE_ELEMS = 64 };

static void make_alike(tagc_comm *comm, tagc_reducer **reducer) {
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = N_ALIKE_ELEMS;
    assert_int_equal(tagc_reducer_create(comm, &options, reducer), TAGC_OK);
}

static tagc_comm *open_alike(tagc_reducer **reducers) {
    tagc_comm *comm = comm_alone(NULL);
    tagc_reducer_options options;
    tagc_reducer *other;
    for (int i = 0; i < N_ALIKE; i++) {
        make_alike(comm, &reducers[i]);
        tagc_reducer_options_init(&options); /* of another size, and one with a tag: they do not count */
        options.n_elems = i % 2 ? N_ALIKE_ELEMS : 2 * N_ALIKE_ELEMS;
        options.tag = i % 2 ? 5 : UINT64_MAX;
        assert_int_equal(tagc_reducer_create(comm, &options, &other), TAGC_OK);
        tagc_reducer_destroy(other);
    }
    return comm;
}

static void close_alike(tagc_comm *comm, tagc_reducer **reducers) {
    for (int i = 0; i < N_ALIKE; i++) tagc_reducer_destroy(reducers[i]);
    tagc_comm_destroy(comm);
}

TEST(test_without_tags) {
    tagc_reducer *reducers[N_ALIKE];
    char saved[N_ALIKE][1024];
    float values[N_ALIKE_ELEMS];
    tagc_comm *comm = open_alike(reducers);
    uint64_t n_bytes = tagc_reducer_state_bytes(reducers[0]);
    assert_true(n_bytes <= sizeof saved[0]);
    for (int i = 0; i < N_ALIKE; i++) {
        for (int k = 0; k < N_ALIKE_ELEMS; k++) values[k] = (float)(i + 1);
        assert_int_equal(tagc_reducer_set_residual(reducers[i], values, N_ALIKE_ELEMS), TAGC_OK);
        assert_int_equal(tagc_reducer_state_save(reducers[i], saved[i], n_bytes), TAGC_OK);
    }
    tagc_reducer_destroy(reducers[1]); /* what takes its place is the unit that it was */
    make_alike(comm, &reducers[1]);
    for (int is_new = 0; is_new < 2; is_new++) {
        for (int from = 0; from < N_ALIKE; from++)
            for (int to = 0; to < N_ALIKE; to++) {
                tagc_status status = tagc_reducer_state_load(reducers[to], saved[from], n_bytes);
                assert_int_equal(status, from == to ? TAGC_OK : TAGC_ERR_MISMATCH);
                if (from != to) assert_non_null(strstr(tagc_last_error(), "give each unit a tag"));
                if (from != to) continue;
                residual_to(reducers[to], values);
                assert_true(values[0] == (float)(to + 1));
            }
        close_alike(comm, reducers);
        if (!is_new) comm = open_alike(reducers);
    }
}
