/* Curves in a terminal: marks lie where the values are, no run hides another, and no value breaks the picture. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cli/curves.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { COLUMNS = 72, ROWS = 18, FRAME = 12, MOST_BYTES = 8192 };

static char text[MOST_BYTES];
static char *lines[64];
static int n_lines;

static void print(const tagc_curve *curves, int n) {
    memset(text, 0, sizeof text);
    FILE *out = fmemopen(text, sizeof text - 1, "w");
    assert_non_null(out);
    tagc_curves_print(curves, n, "loss", "step", out);
    assert_int_equal(fclose(out), 0);
    n_lines = 0;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) lines[n_lines++] = line;
}

/* The mark at a row and column of the grid. */
static char mark(int row, int column) {
    const char *line = lines[1 + row];
    return strlen(line) > (size_t)(FRAME + column) ? line[FRAME + column] : ' ';
}

static void test_a_line(void **state) {
    (void)state;
    double x[] = {0, 71}, y[] = {17, 0};
    tagc_curve curve = {"down", x, y, 2, 1};
    print(&curve, 1);
    assert_int_equal(n_lines, 1 + ROWS + 3);
    assert_string_equal(lines[0], "loss");
    int n = 0;
    for (int row = 0; row < ROWS; row++)
        for (int column = 0; column < COLUMNS; column++) {
            int is_marked = mark(row, column) == 'o';
            /* The value at column c is 17 (1 - c / 71), but what is before the first tenth may be above the top. */
            double top = strtod(lines[1], NULL), value = 17 * (1 - column / 71.0);
            int expected = value <= top && (int)lround((top - value) / top * (ROWS - 1)) == row;
            assert_int_equal(is_marked, expected);
            n += is_marked;
        }
    assert_true(n >= COLUMNS * 8 / 10);
    assert_non_null(strstr(lines[1 + ROWS + 1], "71  step"));
    assert_non_null(strstr(lines[1 + ROWS + 2], "o down"));
}

static void test_no_run_hides_another(void **state) {
    (void)state;
    double x[] = {0, 50, 100}, y[] = {3, 2, 1}, low[] = {1, 1, 1};
    tagc_curve curves[] = {{"a", x, y, 3, 1}, {"b", x, y, 3, 1}, {"c", x, low, 3, 1}};
    print(curves, 3);
    int n[128] = {0};
    for (int row = 0; row < ROWS; row++)
        for (int column = 0; column < COLUMNS; column++) n[(int)mark(row, column)]++;
    assert_true(n['o'] >= 25 && n['x'] >= 25 && abs(n['o'] - n['x']) <= 4);
    for (int column = 0; column < COLUMNS - 8; column++) assert_int_equal(mark(ROWS - 1, column), '+');
}

static void test_odd_values(void **state) {
    (void)state;
    const double hostile[] = {(double)NAN, INFINITY, -INFINITY, 1e308, -1e308, 5e-324,
                              0,           7,        -3,        1e299, -1e299};
    enum { N_HOSTILE = sizeof hostile / sizeof hostile[0] };
    srand(5);
    for (int round = 0; round < 500; round++) {
        double x[8], y[8];
        tagc_curve curves[TAGC_CURVES_MOST];
        for (int i = 0; i < 8; i++) {
            x[i] = hostile[rand() % N_HOSTILE];
            y[i] = hostile[rand() % N_HOSTILE];
        }
        int n = 1 + rand() % TAGC_CURVES_MOST;
        for (int c = 0; c < n; c++) curves[c] = (tagc_curve){"a\033[31m\n", x, y, rand() % 9, 1};
        print(curves, n);
        assert_true(n_lines == 0 || n_lines == 1 + ROWS + 3);
        for (int i = 0; i < n_lines; i++) {
            assert_null(strchr(lines[i], '\033'));
            assert_true(strlen(lines[i]) < FRAME + COLUMNS + 40);
        }
    }
    print(&(tagc_curve){"none", NULL, NULL, 0, 1}, 1);
    assert_int_equal(n_lines, 0);
    double one[] = {4};
    print(&(tagc_curve){"one", one, one, 1, 1}, 1); /* neither axis has a length */
    assert_int_equal(n_lines, 1 + ROWS + 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_line),
        cmocka_unit_test(test_no_run_hides_another),
        cmocka_unit_test(test_odd_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
