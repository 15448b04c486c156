/* The ring of frames against a plain list of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "delay_line.h"

enum { MOST_FRAMES = 4096, LONGEST = 700 };

typedef struct expected {
    uint64_t due_ns;
    size_t n_bytes;
    unsigned char first;
} expected;

static uint32_t draw(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

static void fill(unsigned char *bytes, size_t n, unsigned char first) {
    for (size_t i = 0; i < n; i++) bytes[i] = (unsigned char)(first + i * 7);
}

static void check_front(const delay_line *line, const expected *e) {
    const delay_frame *frame = delay_line_front(line);
    assert_non_null(frame);
    assert_true(frame->due_ns == e->due_ns);
    assert_true(frame->n_bytes == e->n_bytes);
    for (size_t i = 0; i < e->n_bytes; i++)
        assert_int_equal(frame->bytes[i], (unsigned char)(e->first + i * 7));
}

/* Puts a frame in, as the program does: reserve for the longest, commit what there was. 0 when the line is full. */
static int put(delay_line *line, const expected *e) {
    void *space = delay_line_reserve(line, LONGEST);
    if (!space) return 0;
    memset(space, 0xee, LONGEST); /* all of it is ours: what it would overwrite shows */
    fill(space, e->n_bytes, e->first);
    delay_line_commit(line, e->n_bytes, e->due_ns);
    return 1;
}

/* Frames of random sizes go in and out in random turns, for every small size of the ring. */
static void random_turns(void **state) {
    static expected list[MOST_FRAMES];
    (void)state;
    for (size_t room = 1; room < 6000; room += 1 + room / 7) {
        uint64_t random = room;
        size_t n_in = 0, n_out = 0, n_full = 0;
        delay_line line;
        assert_int_equal(delay_line_create(&line, room, LONGEST), 0);
        while (n_out < MOST_FRAMES) {
            size_t turns = draw(&random) % 12;
            for (; turns > 0 && n_in < MOST_FRAMES; turns--) {
                size_t kind = draw(&random) % 4, most = kind == 0 ? LONGEST : kind == 1 ? 16 : 90;
                list[n_in] =
                    (expected){1000 + n_in, draw(&random) % (most + 1), (unsigned char)draw(&random)};
                if (draw(&random) % 5 == 0) (void)delay_line_reserve(&line, LONGEST); /* nothing came */
                if (!put(&line, &list[n_in])) {
                    n_full++;
                    assert_true(n_in > n_out); /* an empty line always has room */
                    break;
                }
                n_in++;
            }
            for (turns = draw(&random) % 12; turns > 0 && n_out < n_in; turns--) {
                check_front(&line, &list[n_out++]);
                delay_line_pop(&line);
            }
            assert_true(line.n_frames == n_in - n_out);
        }
        assert_null(delay_line_front(&line));
        assert_true(room > 4000 || n_full > 0); /* small rings were full at times */
        assert_true(line.n_most_used <= line.capacity);
        delay_line_destroy(&line);
    }
}

/* As many bytes as were asked for fit, in frames of any one size, from any place in the ring. */
static void holds_what_it_says(void **state) {
    (void)state;
    for (size_t n_bytes = 8; n_bytes <= LONGEST; n_bytes += 37)
        for (size_t before = 0; before < 40; before++) {
            delay_line line;
            expected e = {.n_bytes = n_bytes};
            size_t n_frames = 20000 / (sizeof(delay_frame) + (n_bytes + 7) / 8 * 8);
            assert_int_equal(delay_line_create(&line, 20000, LONGEST), 0);
            assert_int_equal(put(&line, &e), 1);
            for (size_t i = 0; i < before; i++) {
                assert_int_equal(put(&line, &e), 1);
                delay_line_pop(&line);
            }
            for (size_t i = 1; i < n_frames; i++) assert_int_equal(put(&line, &e), 1);
            delay_line_destroy(&line);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_turns), cmocka_unit_test(holds_what_it_says)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
