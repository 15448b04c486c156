/* The tests of a program. */
#include "test.h"

#include <stdlib.h>

enum { MOST_TESTS = 64 };

static struct CMUnitTest tests[MOST_TESTS];
static size_t n_tests;

void test_add(struct CMUnitTest test) {
    if (n_tests == MOST_TESTS) abort();
    tests[n_tests++] = test;
}

/* cmocka passes over what has no name. */
int test_run(CMFixtureFunction set_up, CMFixtureFunction tear_down) {
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
