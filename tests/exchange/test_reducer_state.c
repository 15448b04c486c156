/* The residual as state: saved and loaded as bytes, scaled, and put in place. */
#include "good_options.h"
#include "oracle.h"

#include <math.h>

enum { SHARD = 1000, N_DAMAGES = 200, HEADER = 64 };
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

static int make(rank_run *run, two *t) {
    *t = (two){.run = run, .n = SHARD * (size_t)run->world_size, .options = good_options(run->world_size)};
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
    CHECK(run, tagc_reducer_run(t->one, t->gradient, t->output, NULL) == TAGC_OK);
    t->n_bytes = tagc_reducer_state_bytes(t->one);
    CHECK(run, t->n_bytes == HEADER + t->n * 4);
    t->saved = malloc(t->n_bytes);
    t->copy = malloc(t->n_bytes);
    CHECK(run, tagc_reducer_state_save(t->one, t->saved, t->n_bytes) == TAGC_OK);
    CHECK(run, tagc_reducer_state_save(t->one, t->saved, t->n_bytes - 1) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_state_save(t->one, NULL, t->n_bytes) == TAGC_ERR_ARGUMENT);
    load(t, t->saved);
    CHECK(run, have_same_residual(t));
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

static void go_on_alike(two *t) {
    rank_run *run = t->run;
    CHECK(run, tagc_reducer_run(t->one, t->gradient, t->output, NULL) == TAGC_OK);
    CHECK(run, tagc_reducer_run(t->other, t->gradient, t->again, NULL) == TAGC_OK);
    CHECK(run, memcmp(t->output, t->again, SHARD * sizeof(float)) == 0);
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
        go_on_alike(&t);
        refuse_another_size(&t);
    }
    free_all(&t);
}

static void test_save(void **state) {
    (void)state;
    rank_run runs[MAX_RANKS];
    run_ranks(2, save_body, NULL, NULL, runs);
}

/* t->again: the residual before. */
static void scale(two *t) {
    rank_run *run = t->run;
    residual_to(t->other, t->again);
    CHECK(run, tagc_reducer_scale_residual(t->other, 0.5) == TAGC_OK);
    residual_to(t->other, t->output);
    for (size_t i = 0; i < t->n; i++) CHECK(run, bits_of(t->output[i]) == bits_of(t->again[i] * 0.5f));
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

static void test_change(void **state) {
    (void)state;
    rank_run runs[MAX_RANKS];
    run_ranks(2, change_body, NULL, NULL, runs);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_save), cmocka_unit_test(test_change)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
