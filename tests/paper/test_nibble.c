/* Nibbles against one char per element. */
#define RANDOM_SEED 9
#include "../codec/sets.h"
#include "paper/nibble.h"

TEST(nibbles_count_up_to_15_ranks) {
    for (int s = 0; s < N_SIZES; s++) {
        size_t n = sizes[s];
        uint8_t *sum = calloc(tagc_nibble_bytes(n) + 1, 1), *one = dirty_bytes(tagc_nibble_bytes(n));
        uint8_t *bits = dirty_bytes(tagc_bitmap_bytes(n));
        unsigned *counts = calloc(n + 1, sizeof *counts);
        char *any = calloc(n + 1, 1);
        for (int rank = 0; rank < 15; rank++) {
            set sent = set_make(n, rank < 5 ? 0.05 : rank < 8 ? 0.01 : 0.002);
            if (n > 8 && !sent.is_set[n - 1]) { /* one element that all 15 keep: the largest count */
                sent.indices = realloc(sent.indices, (sent.n_set + 1) * sizeof(uint32_t));
                sent.indices[sent.n_set++] = (uint32_t)(n - 1);
            }
            tagc_nibble_make(one, n, sent.indices, sent.n_set);
            tagc_nibble_add(sum, one, n);
            for (size_t k = 0; k < sent.n_set; k++) counts[sent.indices[k]]++, any[sent.indices[k]] = 1;
            set_free(&sent);
        }
        for (size_t i = 0; i < n; i++) assert_int_equal(sum[i / 2] >> (4 * (i % 2)) & 15, counts[i]);
        if (n > 8) assert_int_equal(counts[n - 1], 15);
        tagc_nibble_to_bitmap(sum, n, bits);
        assert_bits(bits, n, any);
        free(sum), free(one), free(bits), free(counts), free(any);
    }
}

TEST(every_count_becomes_its_bit) {
    uint8_t nibbles[128], bits[32];
    for (int i = 0; i < 128; i++) nibbles[i] = (uint8_t)(2 * i % 16 + (2 * i + 1) % 16 * 16);
    tagc_nibble_to_bitmap(nibbles, 256, bits);
    for (size_t i = 0; i < 256; i++) assert_int_equal(bit_of(bits, i), i % 16 != 0);
}
