/* Memory of steps under way: how much there is, in which order steps take it, and what happens when it changes while steps have
 * some; and that more steps than have room give the same sums as one after the other. */
#include "../lengths.h"
#include "exchange/reducer.h"
#include "ranks.h"
#include "transport/comm_private.h"
#include "transport/work.h"
#include "whole.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

enum { MB = 1 << 20 };

static void destroy_comm(tagc_comm *comm) {
    assert_null(comm->works);
    tagc_comm_destroy(comm);
}

static tagc_work *open_works(tagc_comm *comm, const uint64_t *tags, const size_t *n_bytes, int n) {
    tagc_work *works = calloc((size_t)n, sizeof *works);
    for (int i = 0; i < n; i++) {
        assert_int_equal(tagc_work_open(comm, &tagc_host_arrays.heap, TAGC_WORK_REDUCE, tags[i], &works[i]),
                         TAGC_OK);
        assert_int_equal(tagc_work_set(comm, &works[i], n_bytes[i]), TAGC_OK);
    }
    return works;
}

static void close_works(tagc_comm *comm, tagc_work *works, int n) {
    for (int i = 0; i < n; i++) tagc_work_close(comm, &works[i]);
    free(works);
}

/* The group that needs most, and a limited amount for others. */
TEST(test_as_much_as_the_largest_unit) {
    tagc_comm *comm = comm_alone(NULL);
    static const uint64_t tags[] = {1, 1, 2, 2, TAGC_NO_TAG, TAGC_NO_TAG};
    static const size_t sizes[] = {40 * MB, 30 * MB, 50 * MB, 1 * MB, 3 * MB, 3 * MB};
    tagc_work *works = open_works(comm, tags, sizes, 6);
    assert_int_equal(tagc_works_bytes(comm, NULL), 70 * MB + TAGC_MORE_WORK_BYTES);
    assert_int_equal(tagc_work_set(comm, &works[0], MB), TAGC_OK); /* 51 of tag 2, and 32: little less */
    assert_int_equal(tagc_works_bytes(comm, NULL), 70 * MB + TAGC_MORE_WORK_BYTES);
    assert_int_equal(tagc_work_set(comm, &works[2], MB), TAGC_OK); /* 31, 2, 3 and 3 */
    assert_int_equal(tagc_works_bytes(comm, NULL), 39 * MB);
    assert_int_equal(tagc_works_bytes(comm, &tagc_host_arrays.heap), 39 * MB);
    close_works(comm, works, 6);
    assert_int_equal(tagc_works_bytes(comm, NULL), 0);
    destroy_comm(comm);
}

/* Ranks of a host share its memory: where the model adds up within hosts, and where the comm's options say so. */
TEST(test_no_more_than_the_largest_unit) {
    static const int kinds[] = {TAGC_WORK_HOST_SUM, TAGC_WORK_PLACE, TAGC_WORK_SPREAD};
    for (int i = 0; i < 3; i++)
        assert_int_equal(tagc_work_capacity(kinds[i], 32 * MB, 7 * MB, 90 * MB), 7 * MB);
    assert_int_equal(tagc_work_capacity(TAGC_WORK_GATHER, 32 * MB, 7 * MB, 90 * MB), 39 * MB);
    static const uint64_t tags[] = {1, 2, 3, 4}, more[] = {0, 5 * MB, 1 << 30};
    static const size_t sizes[] = {3 * MB, 9 * MB, 9 * MB, 9 * MB}, wanted[] = {9 * MB, 14 * MB, 30 * MB};
    for (int i = 0; i < 3; i++) {
        tagc_comm_options options;
        tagc_comm_options_init(&options);
        options.more_work_bytes = more[i];
        tagc_comm *comm = comm_alone(&options);
        tagc_work *works = open_works(comm, tags, sizes, 4);
        assert_int_equal(tagc_works_bytes(comm, NULL), wanted[i]);
        close_works(comm, works, 4);
        destroy_comm(comm);
    }
}

/* A step that needs little does not overtake one that waits for much. */
TEST(test_steps_take_their_memory_in_order) {
    tagc_comm *comm = comm_alone(NULL);
    static const uint64_t tags[] = {1, 2, 3, 4};
    static const size_t sizes[] = {60 * MB, 60 * MB, 20 * MB, 20 * MB};
    tagc_work *works = open_works(comm, tags, sizes, 4);
    assert_int_equal(tagc_works_bytes(comm, NULL), 92 * MB);
    for (int i = 0; i < 4; i++) tagc_work_line_up(comm, &works[i]);
    assert_false(tagc_work_take(comm, &works[2]));
    assert_true(tagc_work_take(comm, &works[0]));
    assert_true(tagc_work_take(comm, &works[0])); /* it has its memory */
    assert_false(tagc_work_take(comm, &works[1]));
    assert_false(tagc_work_take(comm, &works[2]));
    tagc_work_give(comm, &works[0]);
    assert_true(tagc_work_take(comm, &works[1]));
    assert_false(tagc_work_take(comm, &works[3]));
    assert_true(tagc_work_take(comm, &works[2]));
    assert_false(tagc_work_take(comm, &works[3])); /* 12 MB are left */
    tagc_work_give(comm, &works[1]);
    tagc_work_line_up(comm, &works[0]);
    assert_true(tagc_work_take(comm, &works[3])); /* in the gap in front of the third one's */
    assert_false(tagc_work_take(comm, &works[0]));
    assert_true(works[3].memory + works[3].n_bytes <= works[2].memory);
    memset(works[2].memory, 2, works[2].n_bytes);
    memset(works[3].memory, 3, works[3].n_bytes);
    assert_int_equal(works[2].memory[0], 2);
    tagc_work_give(comm, &works[2]);
    tagc_work_give(comm, &works[2]);
    tagc_work_give(comm, &works[3]);
    assert_true(tagc_work_take(comm, &works[0]));
    tagc_work_give(comm, &works[0]);
    close_works(comm, works, 4);
    destroy_comm(comm);
}

/* ---- a thread that waits ---- */

typedef struct waiting {
    tagc_comm *comm;
    tagc_work *work;
    double cpu_s; /* that the wait took */
    atomic_int has_memory;
} waiting;

static double cpu_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void *wait_for_memory(void *arg) {
    waiting *w = arg;
    double before = cpu_seconds();
    tagc_work_wait(w->comm, w->work);
    w->cpu_s = cpu_seconds() - before;
    atomic_store(&w->has_memory, 1);
    return NULL;
}

/* Waits until so many other threads wait, and computes: on a busy machine, too, they would get as much of a processor if they computed. */
static void let_wait(tagc_comm *comm, const tagc_works *works, int n_waiting) {
    for (int n = -1; n < n_waiting;) {
        pthread_mutex_lock(&comm->lock);
        n = works->n_waiting;
        pthread_mutex_unlock(&comm->lock);
        sched_yield();
    }
    for (double end_s = cpu_seconds() + 0.15; cpu_seconds() < end_s;) continue;
}

/* In their order, each when the one before it has given its memory back, and at no cost of a processor. */
TEST(test_threads_wait_in_order) {
    tagc_comm *comm = comm_alone(NULL);
    static const uint64_t tags[] = {1, 2, 3};
    static const size_t sizes[] = {60 * MB, 60 * MB, 60 * MB};
    tagc_work *works = open_works(comm, tags, sizes, 3);
    waiting all[3] = {{0}};
    pthread_t threads[3];
    tagc_work_line_up(comm, &works[0]);
    tagc_work_wait(comm, &works[0]);
    for (int i = 1; i < 3; i++) {
        all[i] = (waiting){.comm = comm, .work = &works[i]};
        tagc_work_line_up(comm, &works[i]);
        assert_int_equal(pthread_create(&threads[i], NULL, wait_for_memory, &all[i]), 0);
    }
    let_wait(comm, works[0].works, 2);
    assert_false(atomic_load(&all[1].has_memory) || atomic_load(&all[2].has_memory));
    tagc_work_give(comm, &works[0]);
    pthread_join(threads[1], NULL);
    let_wait(comm, works[0].works, 1);
    assert_false(atomic_load(&all[2].has_memory));
    tagc_work_give(comm, &works[1]);
    pthread_join(threads[2], NULL);
    tagc_work_give(comm, &works[2]);
    for (int i = 1; i < 3; i++) assert_true(all[i].cpu_s < 0.02);
    close_works(comm, works, 3);
    destroy_comm(comm);
}

/* A step keeps its memory when an object that is made meanwhile needs more, and when all others are gone. */
TEST(test_memory_under_way_stays) {
    tagc_comm *comm = comm_alone(NULL);
    static const uint64_t tags[] = {1, 2};
    static const size_t sizes[] = {40 * MB, 50 * MB}; /* so large that the system gets it back at once */
    tagc_work *first = open_works(comm, tags, sizes, 1);
    tagc_work_line_up(comm, first);
    assert_true(tagc_work_take(comm, first));
    memset(first->memory, 7, first->n_bytes);
    tagc_work *second = open_works(comm, tags + 1, sizes + 1, 1);
    assert_int_equal(tagc_works_bytes(comm, NULL), 50 * MB + TAGC_MORE_WORK_BYTES);
    tagc_work_line_up(comm, second);
    assert_true(tagc_work_take(comm, second)); /* from the new memory, all of which is free */
    memset(second->memory, 8, second->n_bytes);
    for (size_t i = 0; i < first->n_bytes; i += 4096) assert_int_equal(first->memory[i], 7);
    tagc_work_give(comm, first);
    tagc_work_give(comm, second);
    close_works(comm, second, 1);
    assert_int_equal(tagc_works_bytes(comm, NULL), 40 * MB);
    close_works(comm, first, 1);
    destroy_comm(comm);
}

TEST(test_no_memory) {
    tagc_comm *comm = comm_alone(NULL);
    static const uint64_t tags[] = {1};
    static const size_t sizes[] = {MB};
    tagc_work *works = open_works(comm, tags, sizes, 1);
    assert_int_equal(tagc_work_set(comm, works, SIZE_MAX / 2 + 1), TAGC_ERR_MEMORY);
    assert_int_equal(works->n_bytes, MB);
    assert_int_equal(tagc_works_bytes(comm, NULL), MB);
    close_works(comm, works, 1);
    destroy_comm(comm);
}

/* ---- steps of reducers ---- */

/* Each of these takes 6.3 MB where three ranks are, so that six of them are under way at once, and not nine. */
enum { N_UNITS = 9, SHARD = 524288, N_RANKS = 3 };

static void fill(float *gradient, size_t n, int rank, int unit) {
    for (size_t i = 0; i < n; i++) gradient[i] = (float)((i * 7 + (size_t)rank * 3 + (size_t)unit) % 1001);
}

static void more_steps_than_have_room(rank_run *run) {
    size_t n = SHARD * N_RANKS;
    tagc_reducer *reducers[N_UNITS];
    float *gradients[N_UNITS], *outputs[N_UNITS];
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    set_exchange(&options, WHOLE);
    options.op = TAGC_OP_SUM;
    options.n_elems = n;
    for (int u = 0; u < N_UNITS; u++) {
        if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducers[u]) == TAGC_OK)) return;
        gradients[u] = malloc(n * sizeof(float));
        outputs[u] = malloc(SHARD * sizeof(float));
        fill(gradients[u], n, run->rank, u);
    }
    uint64_t of_one = reducers[0]->work.n_bytes;
    CHECK(run, tagc_works_bytes(run->comm, NULL) == of_one + TAGC_MORE_WORK_BYTES);
    CHECK(run, (N_UNITS - 1) * of_one > of_one + TAGC_MORE_WORK_BYTES);
    for (int step = 0; step < 2; step++) {
        for (int u = 0; u < N_UNITS; u++)
            CHECK(run, begin_reducer(reducers[u], gradients[u], outputs[u]) == TAGC_OK);
        for (int u = N_UNITS - 1; u >= 0; u--) CHECK(run, tagc_reducer_end(reducers[u], NULL) == TAGC_OK);
        for (int u = 0; u < N_UNITS; u++) {
            int n_wrong = 0;
            for (size_t i = 0; i < SHARD; i++) {
                float sum = 0;
                for (int q = 0; q < N_RANKS; q++)
                    sum += (float)(((i + (size_t)run->rank * SHARD) * 7 + (size_t)q * 3 + (size_t)u) % 1001);
                n_wrong += sum != outputs[u][i];
            }
            CHECK(run, n_wrong == 0);
        }
    }
    for (int u = 0; u < N_UNITS; u++) {
        tagc_reducer_destroy(reducers[u]);
        free(gradients[u]);
        free(outputs[u]);
    }
    CHECK(run, tagc_works_bytes(run->comm, NULL) == 0);
}

TEST(test_more_steps_than_have_room) {
    run_ranks(N_RANKS, more_steps_than_have_room, NULL);
}
