/* A test says its name once: TEST(name) { ... } adds it to its program's tests, which run in the order of their file. */
#ifndef TAGC_TESTS_TEST_H
#define TAGC_TESTS_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* With what comes before it and after it. `state` is what the former leaves there. */
#define TEST_BETWEEN(set_up, tear_down, name)                                                                \
    static void name(void **state);                                                                          \
    __attribute__((constructor)) static void add_##name(void) {                                              \
        test_add((struct CMUnitTest)cmocka_unit_test_setup_teardown(name, set_up, tear_down));               \
    }                                                                                                        \
    static void name(__attribute__((unused)) void **state)
#define TEST(name) TEST_BETWEEN(NULL, NULL, name)

void test_add(struct CMUnitTest test);

/* Runs all tests, between what comes before the first and after the last one (NULL: nothing). Returns how many failed. The main() of
 * programs that have none (test_main.c) does that, with the names that its argument, a pattern, allows. */
int test_run(CMFixtureFunction set_up, CMFixtureFunction tear_down);

#endif
