/* Batches of the processor are its codes, row by row. */
#define RANDOM_SEED 41
#include "../test.h"
#include "codec/batch.h"
#include "core/memory.h"
#include "random.h"

#include <stdlib.h>
#include <string.h>

enum { N_ROWS = 3, N = 500 };

TEST(test_rows) {
    static float gradient[N_ROWS][N], residual[N_ROWS][N], next[N_ROWS][N], other[N], sums[N], expected[N];
    uint8_t *bodies[N_ROWS], *alone;
    tagc_batch_row rows[N_ROWS] = {0};
    tagc_batch_result results[N_ROWS];
    tagc_batch *batch;
    void *work, *scratch;
    for (int i = 0; i < N_ROWS; i++) {
        rows[i].options =
            (tagc_code_options){.n = N - (size_t)i, .k = 50, .sparse = i != 1, .values = 2 + i, .block = 128};
        for (size_t j = 0; j < N; j++) gradient[i][j] = random_normal(), residual[i][j] = random_normal();
        bodies[i] = malloc(tagc_code_of(&rows[i].options)->max_bytes(&rows[i].options));
        assert_non_null(bodies[i]);
        rows[i].gradient = gradient[i];
        rows[i].residual_in = residual[i];
        rows[i].residual_out = next[i];
        rows[i].body = bodies[i];
    }
    assert_int_equal(
        tagc_memory_create(tagc_batch_cpu.work_bytes(TAGC_BATCH_ENCODE, rows, N_ROWS, 1), "work", &work),
        TAGC_OK);
    assert_int_equal(
        tagc_batch_cpu.create(TAGC_BATCH_ENCODE, rows, N_ROWS, results, work, NULL, NULL, &batch), TAGC_OK);
    assert_int_equal(tagc_batch_cpu.run(batch), TAGC_OK);
    tagc_batch_cpu.destroy(batch);
    for (int i = 0; i < N_ROWS; i++) {
        const tagc_code_options *o = &rows[i].options;
        const tagc_code *code = tagc_code_of(o);
        tagc_encoded encoded;
        assert_int_equal(tagc_memory_create(code->scratch_bytes(o, 1), "scratch", &scratch), TAGC_OK);
        alone = malloc(code->max_bytes(o));
        code->encode(o, gradient[i], residual[i], other, 0, alone, scratch, NULL, &encoded);
        assert_int_equal(encoded.n_bytes, results[i].encoded.n_bytes);
        assert_int_equal(encoded.n_sent, results[i].encoded.n_sent);
        assert_memory_equal(alone, bodies[i], encoded.n_bytes);
        assert_memory_equal(other, next[i], o->n * sizeof(float));

        tagc_body body = {alone, encoded.n_bytes, 0};
        tagc_batch_row row = {.options = *o, .bodies = &body, .n_bodies = 1, .scale = 0.5f, .sums = sums};
        tagc_batch_result result;
        assert_int_equal(
            tagc_batch_cpu.create(TAGC_BATCH_DECODE, &row, 1, &result, scratch, NULL, NULL, &batch), TAGC_OK);
        assert_int_equal(tagc_batch_cpu.run(batch), TAGC_OK);
        tagc_batch_cpu.destroy(batch);
        assert_int_equal(code->decode(o, &body, 1, 0, 0.5f, expected, scratch, NULL), result.nonfinite);
        assert_memory_equal(sums, expected, o->n * sizeof(float));

        tagc_memory_destroy(scratch);
        free(alone), free(bodies[i]);
    }
    tagc_memory_destroy(work);
}
