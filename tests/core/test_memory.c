/* The arena must measure and place alike, keep its pieces apart, and turn a size overflow into a failed
 * allocation. */
#include "../test.h"
#include "core/memory.h"

#include <string.h>

TEST(measures_and_places_alike) {
    const size_t n_items[] = {1, 0, 17, 64, 1000, 3};
    const size_t item_bytes[] = {1, 8, 4, 1, 12, 8};
    tagc_arena measure = {0};
    for (int i = 0; i < 6; i++) assert_null(tagc_arena_take(&measure, n_items[i], item_bytes[i]));
    assert_false(measure.overflow);
    assert_int_equal(measure.n_bytes % TAGC_ALIGNMENT, 0);

    void *memory;
    assert_int_equal(tagc_memory_create(measure.n_bytes, "test", &memory), TAGC_OK);
    tagc_arena arena = {.base = memory};
    char *end_of_last = memory;
    for (int i = 0; i < 6; i++) {
        char *piece = tagc_arena_take(&arena, n_items[i], item_bytes[i]);
        assert_true(piece >= end_of_last);
        assert_int_equal((uintptr_t)piece % TAGC_ALIGNMENT, 0);
        end_of_last = piece + n_items[i] * item_bytes[i];
        memset(piece, 1, n_items[i] * item_bytes[i]);
    }
    assert_int_equal(arena.n_bytes, measure.n_bytes);
    tagc_memory_destroy(memory);
}

TEST(overflow_cannot_be_allocated) {
    const size_t n_items[] = {SIZE_MAX, SIZE_MAX / 8, SIZE_MAX / 2};
    const size_t item_bytes[] = {1, 9, 3};
    for (int i = 0; i < 3; i++) {
        tagc_arena arena = {0};
        tagc_arena_take(&arena, 100, 4);
        tagc_arena_take(&arena, n_items[i], item_bytes[i]);
        tagc_arena_take(&arena, 100, 4); /* must not wrap back to a small sum */
        assert_true(arena.overflow);
        void *memory = &arena;
        assert_int_equal(tagc_memory_create(arena.n_bytes, "giant", &memory), TAGC_ERR_MEMORY);
        assert_null(memory);
        assert_non_null(strstr(tagc_last_error(), "giant"));
    }
}

TEST(memory_is_zero_and_aligned) {
    const size_t n_bytes[] = {0,  1,    63,
                              64, 4097, (size_t)5 << 20}; /* the last one takes the huge page path */
    for (int i = 0; i < 6; i++) {
        char *memory;
        assert_int_equal(tagc_memory_create(n_bytes[i], "test", (void **)&memory), TAGC_OK);
        assert_non_null(memory);
        assert_int_equal((uintptr_t)memory % TAGC_ALIGNMENT, 0);
        for (size_t j = 0; j < n_bytes[i]; j++) {
            if (memory[j]) fail_msg("byte %zu of %zu is not zero", j, n_bytes[i]);
        }
        memset(memory, 1, n_bytes[i]); /* so that a recycled block would show */
        tagc_memory_destroy(memory);
    }
    tagc_memory_destroy(NULL);
}
