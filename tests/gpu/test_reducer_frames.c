/* Steps by frames have the outputs, residuals and counts of those whose messages libtagc sends, bit for bit. Also built
 * with kernels: frames_ranks.h says how. */
#include "frames_ranks.h"

enum { N_STEPS = 5 };
#if defined(HARNESS_THREAD_SANITIZER)
enum { N_TRIALS = 4 };
#elif defined(HARNESS_ADDRESS_SANITIZER)
enum { N_TRIALS = 10 };
#elif defined(WITH_KERNELS)
enum { N_TRIALS = 24 };
#else
enum { N_TRIALS = REPEATS(40, 40, 14) };
#endif

/* ---- the same steps twice ---- */

static void change_sparsity(both *b) {
    if (b->t->options.sparsity == 0) return;
    CHECK(b->run, tagc_reducer_set_sparsity(b->plain, 0.97) == TAGC_OK);
    CHECK(b->run, tagc_reducer_set_sparsity(b->reducer, 0.97) == TAGC_OK);
    CHECK(b->run, tagc_frames_bytes(b->reducer, 0) <= b->frame_bytes);
    b->frame_bytes = (size_t)tagc_frames_bytes(b->reducer, 0);
    b->sum_bytes = (size_t)tagc_frames_bytes(b->reducer, 1);
}

static void rank_steps(rank_run *run) {
    trial *t = run->shared;
    both b;
    make(run, t, &b);
    size_t frame_bytes = b.frame_bytes, sum_bytes = b.sum_bytes;
    for (int step = 0; step < N_STEPS && !run->failure[0]; step++) {
        run_both(&b, step);
        if (step == 2)
            CHECK(run,
                  tagc_reducer_scale_residual(b.plain, 0.5) == tagc_reducer_scale_residual(b.reducer, 0.5));
        if (step == 3) change_sparsity(&b);
    }
    b.frame_bytes = frame_bytes, b.sum_bytes = sum_bytes;
    free_all(&b);
}

static void test_equals_reducers(void **state) {
    (void)state;
    for (int i = 0; i < N_TRIALS; i++) {
        int world_size = 1 + i % 8;
        trial t = make_trial(i, world_size, i % 7 == 6 ? 9000 : 100 + (size_t)i * 37);
        if (i % 8 == 3) { /* every value is sent */
            t.options.residual = TAGC_RESIDUAL_NONE;
            t.options.format = i % 3 ? TAGC_FORMAT_INT4 : TAGC_FORMAT_INT8;
        }
        run_trial(&t, world_size, rank_steps);
    }
}

/* ---- what is refused ---- */

static void rank_is_refused(rank_run *run) {
    trial *t = run->shared;
    tagc_reducer *reducer;
    float values[64] = {0}, output[64];
    tagc_reducer_options options = t->options;
    options.exchange = TAGC_EXCHANGE_PACKED;
    options.format = -1;
    CHECK(run, tagc_frames_create(NULL, run->comm, &options, &reducer) == TAGC_ERR_UNSUPPORTED);
    CHECK(run, strstr(tagc_last_error(), "exchange is packed, but frames support only direct"));
    options = t->options;
    options.ranks_per_host = 2;
    CHECK(run, tagc_frames_create(NULL, run->comm, &options, &reducer) == TAGC_ERR_UNSUPPORTED);
    CHECK(run, strstr(tagc_last_error(), "ranks_per_host is 2, must be 1 with frames"));
    options = t->options;
    if (run->rank == 1) options.sparsity = 0.5;
    CHECK(run, tagc_frames_create(NULL, run->comm, &options, &reducer) == TAGC_ERR_MISMATCH);
    CHECK(run, tagc_reducer_create(run->comm, &t->options, &reducer) == TAGC_OK);
    CHECK(run, tagc_frames_bytes(reducer, 0) == 0 && tagc_frames_settle(reducer) == TAGC_ERR_STATE);
    tagc_reducer_destroy(reducer);
    CHECK(run, tagc_frames_create(NULL, run->comm, &t->options, &reducer) == TAGC_OK);
    CHECK(run, tagc_reducer_begin(reducer, values, output) == TAGC_ERR_STATE);
    CHECK(run, tagc_frames_add(reducer, values, NULL) == TAGC_ERR_STATE);
    tagc_frames_verdict verdict;
    CHECK(run,
          tagc_frames_encode(reducer, values, output, (char *)values + 4, &verdict) == TAGC_ERR_ARGUMENT);
    CHECK(run, strstr(tagc_last_error(), "must be at a multiple of 64 bytes"));
    CHECK(run, tagc_reducer_set_sparsity(reducer, 0.5) == TAGC_OK); /* no step is under way */
    tagc_reducer_destroy(reducer);
}

static void test_refusals(void **state) {
    (void)state;
    trial t = make_trial(1, 2, 32);
    run_trial(&t, 2, rank_is_refused);
}

/* Any single bit of a header or a body changes a checksum. */
static void test_checksums(void **state) {
    (void)state;
    uint8_t bytes[203];
    for (unsigned i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)(i * 37);
    uint64_t sum = tagc_frame_sum(bytes, sizeof bytes);
    for (unsigned bit = 0; bit < 8 * sizeof bytes; bit++) {
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        assert_true(tagc_frame_sum(bytes, sizeof bytes) != sum);
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    for (unsigned n = 0; n < sizeof bytes; n++) assert_true(tagc_frame_sum(bytes, n) != sum);
    for (unsigned i = 8; i + 8 <= sizeof bytes; i += 8) { /* words that change places */
        uint8_t other[sizeof bytes];
        memcpy(other, bytes, sizeof bytes);
        memcpy(other, bytes + i, 8), memcpy(other + i, bytes, 8);
        assert_true(tagc_frame_sum(other, sizeof other) != sum);
    }
    assert_true(sum == tagc_frame_sum(bytes, sizeof bytes));
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_checksums),
                                       cmocka_unit_test(test_equals_reducers),
                                       cmocka_unit_test(test_refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
