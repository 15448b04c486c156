/* A TAGC_CPU that cannot be followed is an error of the first create, not another level without a word. */
#include "ranks.h"

static void expect_refusals(rank_run *run) {
    const tagc_status expected = *(const tagc_status *)run->shared;
    tagc_reducer_options reducer_options;
    tagc_reducer_options_init(&reducer_options);
    reducer_options.n_elems = 64 * (uint64_t)run->world_size;
    tagc_reducer *reducer = NULL;
    CHECK(run, tagc_reducer_create(run->comm, &reducer_options, &reducer) == expected);
    CHECK(run, !reducer == (expected != TAGC_OK));
    if (expected != TAGC_OK) CHECK(run, strstr(tagc_last_error(), "TAGC_CPU") != NULL);
    tagc_reducer_destroy(reducer);

    tagc_gatherer_options gatherer_options;
    tagc_gatherer_options_init(&gatherer_options);
    gatherer_options.n_elems = 64 * (uint64_t)run->world_size;
    tagc_gatherer *gatherer = NULL;
    CHECK(run, tagc_gatherer_create(run->comm, &gatherer_options, &gatherer) == expected);
    CHECK(run, !gatherer == (expected != TAGC_OK));
    if (expected != TAGC_OK) CHECK(run, strstr(tagc_last_error(), "TAGC_CPU") != NULL);
    tagc_gatherer_destroy(gatherer);
}

TEST(create_refuses_an_unknown_level) {
    tagc_status expected = TAGC_ERR_ARGUMENT;
    assert_int_equal(setenv("TAGC_CPU", "sse9", 1), 0);
    run_ranks(2, expect_refusals, &expected);
#if defined(__aarch64__)
    assert_int_equal(setenv("TAGC_CPU", "avx2", 1), 0);
#else
    assert_int_equal(setenv("TAGC_CPU", "neon", 1), 0);
#endif
    expected = TAGC_ERR_UNSUPPORTED;
    run_ranks(2, expect_refusals, &expected);
    assert_int_equal(setenv("TAGC_CPU", "scalar", 1), 0);
    expected = TAGC_OK;
    run_ranks(2, expect_refusals, &expected);
}
