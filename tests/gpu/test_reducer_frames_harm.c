/* Whatever is wrong with a frame on one rank is the same error on all ranks, and changes nothing. Also built
 * with kernels: frames_ranks.h says how. */
#include "frames_ranks.h"

#if defined(HARNESS_THREAD_SANITIZER)
enum { N_HARMED = 9 };
#elif defined(HARNESS_ADDRESS_SANITIZER)
enum { N_HARMED = 18 };
#elif defined(WITH_KERNELS)
enum { N_HARMED = 36 };
#else
enum { N_HARMED = REPEATS(108, 108, 36) };
#endif

/* A step that is harmed, between two that are not. */
static void rank_is_harmed(rank_run *run) {
    trial *t = run->shared;
    both b;
    int is_odd = t->harm == HARM_SPARSITY && run->rank == run->world_size - 1;
    make(run, t, &b);
    run_both(&b, 0);
    put_gradient(&b, 1);
    if (is_odd) CHECK(run, tagc_reducer_set_sparsity(b.reducer, t->options.sparsity + 1e-4) == TAGC_OK);
    CHECK(run, tagc_frames_bytes(b.reducer, 0) == b.frame_bytes); /* or there were no telling */
    tagc_status status = step_by_frames(&b, 1, NULL);
    t->statuses[run->rank] = status;
    snprintf(t->texts[run->rank], TEXT_BYTES, "%s", tagc_last_error());
    CHECK(run, status != TAGC_OK);
    CHECK(run, read_bytes(&b.own, b.output, b.result, b.n_output * sizeof(float)));
    for (size_t i = 0; i < b.n_output; i++)
        CHECK(run, isnan(b.output[i]) || (t->harm == HARM_DEVICE && run->rank == 0));
    if (is_odd) CHECK(run, tagc_reducer_set_sparsity(b.reducer, t->options.sparsity) == TAGC_OK);
    CHECK(run, same_residual(&b));
    CHECK(run, tagc_reducer_set_steps(b.plain, tagc_reducer_steps(b.reducer)) == TAGC_OK);
    run_both(&b, 1);
    free_all(&b);
}

/* The ranks' errors are one, but for that of a rank that failed by itself. */
static void check_errors(const trial *t, int world_size) {
    for (int q = 1; q < world_size; q++) {
        if (t->statuses[q] != t->statuses[0])
            fail_msg("harm %d: status %d on rank 0, %d on rank %d", t->harm, t->statuses[0], t->statuses[q],
                     q);
        if (t->harm != HARM_DEVICE && strcmp(t->texts[q], t->texts[0]) != 0)
            fail_msg("harm %d: \"%s\" on rank 0, \"%s\" on rank %d", t->harm, t->texts[0], t->texts[q], q);
    }
    tagc_status wanted = t->harm == HARM_SPARSITY ? TAGC_ERR_MISMATCH
                         : t->harm == HARM_DEVICE ? TAGC_ERR_DEVICE
                                                  : TAGC_ERR_CORRUPT;
    if (t->statuses[0] != wanted)
        fail_msg("harm %d: status %d, \"%s\"", t->harm, t->statuses[0], t->texts[0]);
    char who[80];
    snprintf(who, sizeof who, "the frame from rank %d that rank 10 got", 9 + world_size);
    if (wanted == TAGC_ERR_CORRUPT && !strstr(t->texts[1], who))
        fail_msg("harm %d: \"%s\"", t->harm, t->texts[1]);
    if (wanted == TAGC_ERR_DEVICE && !strstr(t->texts[1], "rank 10 failed in this step"))
        fail_msg("\"%s\"", t->texts[1]);
}

/* What cannot be told from a right frame is replaced by another harm. */
static harm harm_of(const trial *t, int i) {
    harm wanted = (harm)(1 + i % (N_HARMS - 1));
    int is_dense = t->options.sparsity == 0;
    if (wanted == HARM_SPARSITY && (is_dense || i % 9 != 7)) return HARM_BIT;
    /* Every pattern of bits is a value of these. */
    if (wanted == HARM_VALUES && is_dense && t->options.format >= TAGC_FORMAT_INT8) return HARM_ZEROS;
#ifndef WITH_KERNELS
    if (wanted == HARM_DEVICE) return HARM_BIT;
#endif
    return wanted;
}

static trial harmed_trial(int i, int world_size) {
    trial t = make_trial(i % 24, world_size, 300 + (size_t)i);
    t.seed = i;
    t.harm = harm_of(&t, i);
    t.in_sums = t.options.output == TAGC_OUTPUT_UNIT && i % 2;
    t.bit = (uint64_t)i * 2654435761u;
    if (t.harm == HARM_SPARSITY) t.options.n_elems = (uint64_t)world_size * 20000, t.options.sparsity = 0.95;
#ifdef WITH_KERNELS
    t.on_device |= 1;
    if (t.harm == HARM_DEVICE)
        t.on_device = 1; /* the runtime's failures are the process's: no other rank may meet it */
#endif
    return t;
}

static void test_harm_is_told_to_all(void **state) {
    (void)state;
    for (int i = 0; i < N_HARMED; i++) {
        int world_size = 2 + i % 3;
        trial t = harmed_trial(i, world_size);
        run_trial(&t, world_size, rank_is_harmed);
        check_errors(&t, world_size);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_harm_is_told_to_all)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
