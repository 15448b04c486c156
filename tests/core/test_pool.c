/* The pool must call every index once per loop and let the caller see all that was written, over many short
 * loops. */
#include "../test.h"
#include "core/pool.h"

#include <string.h>

#ifdef TAGC_SANITIZED
enum { N_LOOPS = 200 };
#else
enum { N_LOOPS = 3000 };
#endif

typedef struct ledger {
    int n_threads_seen;
    uint64_t
        calls[256]; /* per index; plain on purpose, so that the thread sanitizer checks the pool's ordering */
} ledger;

static void note_call(void *arg, int index, int n_threads) {
    ledger *l = arg;
    if (index == 0) l->n_threads_seen = n_threads;
    l->calls[index]++;
}

TEST(every_index_once_per_loop) {
    for (int n_threads = 1; n_threads <= 8; n_threads++) {
        tagc_pool *pool;
        assert_int_equal(tagc_pool_create(n_threads, &pool), TAGC_OK);
        assert_int_equal(tagc_pool_n_threads(pool), n_threads);
        ledger l = {0};
        for (uint64_t loop = 1; loop <= N_LOOPS; loop++) {
            tagc_pool_run(pool, note_call, &l);
            assert_int_equal(l.n_threads_seen, n_threads);
            for (int i = 0; i < n_threads; i++) assert_int_equal(l.calls[i], loop);
        }
        assert_int_equal(l.calls[n_threads], 0);
        tagc_pool_destroy(pool);
    }
}

typedef struct sum {
    const uint64_t *items; /* (n) */
    size_t n;
    uint64_t partial[256];
} sum;

static void add_share(void *arg, int index, int n_threads) {
    sum *s = arg;
    s->partial[index] = 0;
    for (size_t i = (size_t)index; i < s->n; i += (size_t)n_threads) s->partial[index] += s->items[i];
}

TEST(different_work_in_turn) {
    enum { N = 1000 };
    uint64_t items[N];
    for (uint64_t i = 0; i < N; i++) items[i] = i * i;
    tagc_pool *pool;
    assert_int_equal(tagc_pool_create(4, &pool), TAGC_OK);
    for (size_t loop = 0; loop < N_LOOPS; loop++) {
        size_t n = loop % N;
        sum s = {.items = items, .n = n};
        tagc_pool_run(pool, add_share, &s);
        uint64_t expected = n ? (n - 1) * n * (2 * n - 1) / 6 : 0;
        assert_int_equal(s.partial[0] + s.partial[1] + s.partial[2] + s.partial[3], expected);
        ledger l = {0};
        tagc_pool_run(pool, note_call, &l);
        assert_int_equal(l.calls[3], 1);
    }
    tagc_pool_destroy(pool);
}

TEST(pool_without_threads) {
    ledger l = {0};
    tagc_pool_run(NULL, note_call, &l);
    assert_int_equal(tagc_pool_n_threads(NULL), 1);
    assert_int_equal(l.n_threads_seen, 1);
    assert_int_equal(l.calls[0], 1);
    tagc_pool_destroy(NULL);
}

TEST(bad_counts_are_named) {
    const int bad[] = {-1, 0, 257};
    for (int i = 0; i < 3; i++) {
        tagc_pool *pool = (tagc_pool *)&pool; /* not NULL, so that the test sees it being cleared */
        assert_int_equal(tagc_pool_create(bad[i], &pool), TAGC_ERR_ARGUMENT);
        assert_null(pool);
        assert_non_null(strstr(tagc_last_error(), "n_threads"));
        assert_non_null(strstr(tagc_last_error(), "1 to 256"));
    }
    tagc_pool *pool;
    assert_int_equal(tagc_pool_create(256, &pool), TAGC_OK);
    tagc_pool_destroy(pool); /* without ever running */
}
