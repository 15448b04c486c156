/* The loader: every window once per epoch, the same global batches for any number of ranks, exact resuming.
 */
#include "scratch.h"

#include "data/data.h"
#include "data/permutation.h"

/* A raw16 file whose token i is i: then a window shows where it was read. */
static tagc_tokens *counting_tokens(void *folder, size_t n) {
    tagc_tokens *tokens;
    uint8_t *file = malloc(2 * n);
    const char *path = scratch_path(folder, "count.bin");
    for (size_t i = 0; i < n; i++) {
        file[2 * i] = (uint8_t)i;
        file[2 * i + 1] = (uint8_t)(i >> 8);
    }
    scratch_write(path, file, 2 * n);
    free(file);
    assert_ok(tagc_data_open(path, TAGC_DATA_TRAIN, &tokens));
    return tokens;
}

static tagc_loader *make(const tagc_tokens *tokens, int n_batch, int n_tokens, int rank, int world_size,
                         uint64_t seed) {
    tagc_loader *loader;
    tagc_loader_options options;
    tagc_loader_options_init(&options);
    options.n_batch = n_batch;
    options.n_tokens = n_tokens;
    options.rank = rank;
    options.world_size = world_size;
    options.seed = seed;
    options.vocab_size = 65536;
    assert_ok(tagc_loader_create(tokens, &options, &loader));
    return loader;
}

TEST(permutations_are_one_to_one) {
    for (uint64_t n = 1; n <= 300; n++) {
        for (uint64_t key = 0; key < 4; key++) {
            uint8_t seen[300] = {0};
            tagc_permutation permutation = tagc_permutation_make(n, tagc_mix64(key));
            for (uint64_t i = 0; i < n; i++) {
                uint64_t to = tagc_permutation_at(&permutation, i);
                assert_true(to < n);
                assert_false(seen[to]);
                seen[to] = 1;
            }
        }
    }
    tagc_permutation huge = tagc_permutation_make(UINT64_C(1) << 62, 1);
    assert_true(tagc_permutation_at(&huge, (UINT64_C(1) << 62) - 1) < UINT64_C(1) << 62);
}

/* All places are equally likely for item 0, and neighbours do not stay neighbours. */
TEST(permutations_look_random) {
    enum { N = 10, N_KEYS = 20000 };
    int count[N][N] = {{0}};
    for (uint64_t key = 0; key < N_KEYS; key++) {
        tagc_permutation permutation = tagc_permutation_make(N, tagc_mix64(key));
        for (uint64_t i = 0; i < N; i++) count[i][tagc_permutation_at(&permutation, i)]++;
    }
    for (int i = 0; i < N; i++)
        for (int to = 0; to < N; to++) assert_in_range(count[i][to], N_KEYS / N - 250, N_KEYS / N + 250);

    tagc_permutation permutation = tagc_permutation_make(100000, 3);
    int n_next = 0;
    for (uint64_t i = 0; i + 1 < 100000; i++)
        n_next += tagc_permutation_at(&permutation, i) + 1 == tagc_permutation_at(&permutation, i + 1);
    assert_in_range(n_next, 0, 8);
}

/* For many shapes: over an epoch the starts are offset + a permutation of the multiples of T, and all fit. */
TEST(an_epoch_is_every_window_once) {
    enum { T = 7 };
    uint64_t first_starts[2][3];
    for (size_t n = T + 1; n < 100; n++) {
        tagc_tokens *tokens = counting_tokens(*state, n);
        tagc_loader *loader = make(tokens, 1, T, 0, 1, n);
        uint64_t n_windows = tagc_loader_n_windows(loader);
        assert_in_range(n_windows, 1, (n - 1) / T);
        assert_true(n_windows + 1 >= (n - 1) / T);
        for (int epoch = 0; epoch < 3; epoch++) {
            uint8_t seen[100] = {0};
            uint64_t smallest = UINT64_MAX;
            for (uint64_t i = 0; i < n_windows; i++) {
                int in[T], out[T];
                assert_ok(tagc_loader_next(loader, in, out));
                for (int t = 0; t < T; t++) {
                    assert_int_equal(in[t], in[0] + t);
                    assert_int_equal(out[t], in[t] + 1);
                }
                assert_false(seen[in[0]]);
                seen[in[0]] = 1;
                if ((uint64_t)in[0] < smallest) smallest = (uint64_t)in[0];
                if (n == 99 && i < 2) first_starts[i][epoch] = (uint64_t)in[0];
            }
            assert_in_range(smallest, 0, T - 1);
            for (uint64_t i = 0; i < n_windows; i++) assert_true(seen[smallest + i * T]);
        }
        tagc_loader_destroy(loader);
        tagc_tokens_close(tokens);
    }
    /* Epochs differ. */
    assert_true(first_starts[0][0] != first_starts[0][1] || first_starts[1][0] != first_starts[1][1]);
    assert_true(first_starts[0][1] != first_starts[0][2] || first_starts[1][1] != first_starts[1][2]);
}

TEST(offsets_reach_every_token) {
    enum { T = 8 };
    tagc_tokens *tokens = counting_tokens(*state, 100);
    tagc_loader *loader = make(tokens, 1, T, 0, 1, 1);
    int seen[T] = {0}, in[T], out[T];
    for (uint64_t epoch = 0; epoch < 200; epoch++) {
        assert_ok(tagc_loader_seek(loader, epoch * tagc_loader_n_windows(loader)));
        assert_ok(tagc_loader_next(loader, in, out));
        seen[in[0] % T]++;
    }
    for (int i = 0; i < T; i++) assert_true(seen[i] > 5);
    tagc_loader_destroy(loader);
    tagc_tokens_close(tokens);
}

TEST(ranks_share_one_global_batch) {
    enum { T = 5, GLOBAL = 12, N_STEPS = 30 };
    tagc_tokens *tokens = counting_tokens(*state, 333);
    int expected_in[GLOBAL * T], expected_out[GLOBAL * T], in[GLOBAL * T], out[GLOBAL * T];
    for (int world_size = 1; world_size <= 4; world_size++) {
        tagc_loader *whole = make(tokens, GLOBAL, T, 0, 1, 42);
        tagc_loader *ranks[4];
        for (int r = 0; r < world_size; r++)
            ranks[r] = make(tokens, GLOBAL / world_size, T, r, world_size, 42);
        for (int step = 0; step < N_STEPS; step++) { /* runs over several epochs: 65 windows each */
            assert_ok(tagc_loader_next(whole, expected_in, expected_out));
            for (int r = 0; r < world_size; r++) {
                int at = r * (GLOBAL / world_size) * T;
                assert_ok(tagc_loader_next(ranks[r], in + at, out + at));
                assert_int_equal(tagc_loader_position(ranks[r]), tagc_loader_position(whole));
            }
            assert_memory_equal(in, expected_in, sizeof in);
            assert_memory_equal(out, expected_out, sizeof out);
        }
        tagc_loader_destroy(whole);
        for (int r = 0; r < world_size; r++) tagc_loader_destroy(ranks[r]);
    }
    tagc_tokens_close(tokens);
}

TEST(resumes_where_it_was) {
    enum { T = 6, B = 4 };
    tagc_tokens *tokens = counting_tokens(*state, 500);
    tagc_loader *first = make(tokens, B, T, 1, 2, 9), *second = make(tokens, B, T, 1, 2, 9);
    tagc_loader *smaller = make(tokens, B / 2, T, 2, 4, 9);
    int a[B * T], b[B * T], targets[B * T];
    for (int step = 0; step < 100; step++) {
        uint64_t position = tagc_loader_position(first);
        assert_int_equal(position, step * B * 2);
        assert_ok(tagc_loader_next(first, a, targets));
        assert_ok(tagc_loader_seek(second, UINT64_C(1) << 40)); /* somewhere else in between */
        assert_ok(tagc_loader_next(second, b, targets));
        assert_ok(tagc_loader_seek(second, position));
        assert_ok(tagc_loader_next(second, b, targets));
        assert_memory_equal(a, b, sizeof a);
        assert_ok(tagc_loader_seek(smaller, position));
        assert_ok(tagc_loader_next(smaller, b, targets));
        assert_memory_equal(a, b, sizeof a / 2);
    }
    assert_fails(tagc_loader_seek(first, (UINT64_C(1) << 62) + 1), TAGC_ERR_ARGUMENT, "position is");
    tagc_loader_destroy(first);
    tagc_loader_destroy(second);
    tagc_loader_destroy(smaller);
    tagc_tokens_close(tokens);
}

TEST(evaluation_reads_in_order) {
    enum { T = 4 };
    tagc_tokens *tokens = counting_tokens(*state, 41);
    tagc_loader *ranks[2];
    int in[2 * T], out[2 * T];
    tagc_loader_options options;
    tagc_loader_options_init(&options);
    options.n_batch = 2;
    options.n_tokens = T;
    options.world_size = 2;
    options.vocab_size = 41;
    options.shuffle = 0;
    for (options.rank = 0; options.rank < 2; options.rank++)
        assert_ok(tagc_loader_create(tokens, &options, &ranks[options.rank]));
    assert_int_equal(tagc_loader_n_windows(ranks[0]), 10);
    for (int batch = 0; batch < 5; batch++) {
        for (int r = 0; r < 2; r++) {
            assert_ok(tagc_loader_next(ranks[r], in, out));
            for (int b = 0; b < 2; b++) {
                assert_int_equal(in[b * T], ((batch * 4 + r * 2 + b) % 10) * T);
                assert_int_equal(out[b * T + T - 1], in[b * T] + T);
            }
        }
    }
    for (int r = 0; r < 2; r++) tagc_loader_destroy(ranks[r]);
    tagc_tokens_close(tokens);
}

TEST(refuses_bad_options) {
    tagc_tokens *tokens = counting_tokens(*state, 20);
    tagc_loader *loader = (tagc_loader *)1;
    tagc_loader_options good, bad;
    tagc_loader_options_init(&good);
    good.n_batch = 2;
    good.n_tokens = 19;
    good.vocab_size = 20;
#define refuse(field, value, part)                                                                           \
    bad = good;                                                                                              \
    bad.field = value;                                                                                       \
    assert_fails(tagc_loader_create(tokens, &bad, &loader), TAGC_ERR_ARGUMENT, part);                        \
    assert_null(loader)
    refuse(n_batch, 0, "n_batch is 0");
    refuse(n_batch, 65537, "n_batch is 65537");
    refuse(n_tokens, 0, "n_tokens is 0");
    refuse(n_tokens, 20, "need at least 21");
    refuse(world_size, 0, "world_size is 0");
    refuse(rank, 1, "rank is 1");
    refuse(rank, -1, "rank is -1");
    refuse(vocab_size, 0, "vocab_size is 0");
    refuse(shuffle, 2, "shuffle is 2");
#undef refuse
    /* A token outside the vocabulary is found when it is read, and the position stays. */
    int in[38], out[38];
    good.vocab_size = 19;
    assert_ok(tagc_loader_create(tokens, &good, &loader));
    assert_int_equal(tagc_loader_n_windows(loader), 1);
    assert_fails(tagc_loader_next(loader, in, out), TAGC_ERR_CORRUPT, "count.bin: token 19 at byte 38");
    assert_int_equal(tagc_loader_position(loader), 0);
    tagc_loader_destroy(loader);
    tagc_loader_destroy(NULL);
    tagc_tokens_close(tokens);
}

int main(void) {
    return test_run(scratch_make, scratch_remove);
}
