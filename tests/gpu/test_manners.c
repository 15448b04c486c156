/* Flags, and the fake runtime's bad manners; and what two protocols make of them: host functions that sleep, which tagc had, hang under
 * each, and flags in pinned memory under none. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "fake_runtime.h"
#include "gpu/runtime.h"

static tagc_runtime runtime;
static int (*write_flag)(void *stream, uint64_t address, uint32_t value, unsigned flags);
static int (*wait_for_flag)(void *stream, uint64_t address, uint32_t value, unsigned flags);
enum { MAPPED = 2, AT_LEAST = 0, EQUAL = 1 };

static void find(const char *symbol, void *into) {
    void *found;
    int status;
    assert_int_equal(cudaGetDriverEntryPointByVersion(symbol, &found, 11070, 0, &status), 0);
    assert_int_equal(status != 0, found == NULL);
    memcpy(into, &found, sizeof found);
}

static void begin(uint64_t seed, fake_pace pace, const char *manners) {
    char where[TAGC_WHERE_TEXT_BYTES];
    fake_reset(seed, 2, pace, 1);
    fake_behave(manners);
    assert_int_equal(tagc_runtime_bind(FAKE_CUDART, &runtime, where), TAGC_OK);
    find("cuStreamWriteValue32", &write_flag);
    find("cuStreamWaitValue32", &wait_for_flag);
    assert_true(write_flag && wait_for_flag);
}

static void end(const char *expected) {
    if (fake_n_mistakes() != (expected != NULL))
        print_error("%d mistakes: %s\n", fake_n_mistakes(), fake_mistake(0));
    assert_int_equal(fake_n_mistakes(), expected != NULL);
    if (expected) assert_string_equal(fake_mistake(0), expected);
    tagc_runtime_unbind(&runtime);
}

static void pause_us(long us) {
    nanosleep(&(struct timespec){0, us * 1000}, NULL);
}

/* Mapped pinned memory, and where the device sees it. */
static uint32_t *flags_of(int n, uint64_t *address) {
    void *memory, *seen;
    assert_int_equal(runtime.HostAlloc(&memory, (size_t)n * 4, TAGC_PINNED_PORTABLE | MAPPED), 0);
    assert_int_equal(cudaHostGetDevicePointer(&seen, memory, 0), 0);
    memset(memory, 0, (size_t)n * 4);
    *address = (uint64_t)(uintptr_t)seen;
    return memory;
}

static uint32_t look(const uint32_t *flag) {
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}

static void set(uint32_t *flag, uint32_t value) {
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

/* ---- flags ---- */

static uint32_t *watched, noted;
static int n_only[2];

static void note_flag(void *arg) {
    (void)arg;
    noted = look(watched);
}

static void note_both(void *arg) {
    (void)arg;
    for (int i = 0; i < 2; i++) n_only[i] += look(watched + i) && !look(watched + 1 - i);
}

/* A flag is seen late: work of its stream may come before it, and another stream's flag. */
static void test_late(void **state) {
    (void)state;
    int n_late = 0;
    memset(n_only, 0, sizeof n_only);
    for (uint64_t seed = 1; seed <= 100; seed++) {
        begin(seed, FAKE_LATE, seed % 2 ? "" : "late-flags");
        uint64_t at;
        uint32_t *flags = watched = flags_of(2, &at);
        void *a, *b, *c;
        fake_stream(&a);
        fake_stream(&b);
        fake_stream(&c);
        write_flag(a, at, 1, 0);
        fake_launch(a, note_flag, NULL);
        write_flag(a, at, 2, 0);
        write_flag(b, at + 4, 1, 0);
        for (int i = 0; i < 12; i++) fake_launch(c, note_both, NULL);
        assert_int_equal(look(flags), 0);
        assert_int_equal(runtime.StreamSynchronize(a), 0);
        assert_int_equal(look(flags), 2); /* in order, and all: the stream is over */
        runtime.StreamSynchronize(b);
        assert_int_equal(look(flags + 1), 1);
        runtime.StreamSynchronize(c);
        n_late += noted == 0;
        end(NULL);
    }
    assert_in_range(n_late, 10, 95);
    print_message("seen: late with %d of 100 seeds, one flag without the other %d and %d times\n", n_late,
                  n_only[0], n_only[1]);
    assert_true(n_only[0] > 2 && n_only[1] > 2);
}

static void write_ones(void *arg) {
    memset(fake_view(arg), 1, 64);
}

/* Who sees a flag sees the copies before it. */
static void test_copy_first(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 12; seed++) {
        begin(seed, FAKE_EAGER, seed % 2 ? "" : "all");
        uint64_t at;
        uint32_t *flag = flags_of(1, &at);
        void *stream, *pinned;
        char *array = fake_alloc(64);
        fake_stream(&stream);
        runtime.HostAlloc(&pinned, 64, 0);
        fake_launch(stream, write_ones, array);
        runtime.MemcpyAsync(pinned, array, 64, TAGC_COPY_TO_HOST, stream);
        write_flag(stream, at, 7, 0);
        while (look(flag) != 7) pause_us(20);
        for (int i = 0; i < 64; i++) assert_int_equal(((char *)pinned)[i], 1);
        end(NULL);
    }
}

static int n_ran;

static void count(void *arg) {
    (void)arg;
    __atomic_fetch_add(&n_ran, 1, __ATOMIC_SEQ_CST);
}

static int ran_of(void *stream, uint64_t at, uint32_t *flag, uint32_t now, uint32_t value, unsigned how) {
    n_ran = 0;
    set(flag, now);
    assert_int_equal(wait_for_flag(stream, at, value, how), 0);
    fake_launch(stream, count, NULL);
    fake_settle(NULL, NULL);
    int ran = n_ran;
    set(flag, value);
    assert_int_equal(runtime.StreamSynchronize(stream), 0); /* which polls */
    assert_int_equal(n_ran, 1);
    return ran;
}

static void test_waited_for(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        begin(seed, seed % 2 ? FAKE_LATE : FAKE_EAGER, seed > 2 ? "late-flags" : "");
        uint64_t at;
        uint32_t *flag = flags_of(1, &at);
        void *stream;
        fake_stream(&stream);
        assert_int_equal(ran_of(stream, at, flag, 4, 5, AT_LEAST), 0);
        assert_int_equal(ran_of(stream, at, flag, 5, 5, AT_LEAST), 1);
        assert_int_equal(ran_of(stream, at, flag, 6, 5, AT_LEAST), 1);
        assert_int_equal(ran_of(stream, at, flag, 1, UINT32_MAX, AT_LEAST), 1); /* numbers wrap around */
        assert_int_equal(ran_of(stream, at, flag, UINT32_MAX, 1, AT_LEAST), 0);
        assert_int_equal(ran_of(stream, at, flag, 6, 5, EQUAL), 0);
        assert_int_equal(ran_of(stream, at, flag, 5, 5, EQUAL), 1);
        end(NULL);
    }
}

static void test_flag_mistakes(void **state) {
    (void)state;
    uint64_t at;
    void *stream, *unmapped, *seen;
    uint32_t *flag;

    begin(1, FAKE_LATE, "");
    fake_stream(&stream);
    flag = flags_of(1, &at);
    assert_true((uint64_t)(uintptr_t)flag != at);
    assert_int_not_equal(wait_for_flag(stream, (uint64_t)(uintptr_t)flag, 1, 0), 0);
    end("a flag at the host's address: cudaHostGetDevicePointer has the device's");

    begin(1, FAKE_LATE, "");
    fake_stream(&stream);
    flags_of(1, &at);
    assert_int_not_equal(write_flag(stream, at + 2, 1, 0), 0);
    end("a flag at an address that is no multiple of 4");

    begin(1, FAKE_LATE, "");
    fake_stream(&stream);
    assert_int_not_equal(write_flag(stream, (uint64_t)(uintptr_t)&at, 1, 0), 0);
    end("a flag outside of the device's and the pinned memory");

    begin(1, FAKE_LATE, "");
    fake_stream(&stream);
    flag = flags_of(1, &at);
    wait_for_flag(stream, at, 0, 0);
    runtime.FreeHost(flag);
    end("freed while a copy or a flag is to come");

    begin(1, FAKE_LATE, "");
    fake_stream(&stream);
    flags_of(1, &at);
    runtime.HostAlloc(&unmapped, 4, TAGC_PINNED_PORTABLE);
    assert_int_not_equal(cudaHostGetDevicePointer(&seen, unmapped, 0), 0);
    assert_int_not_equal(write_flag(stream, at, 1, 1), 0); /* no memory barrier: not in version 2 */
    assert_int_not_equal(wait_for_flag(stream, at, 1, 2), 0);
    end(NULL);
}

/* ---- manners ---- */

static void test_contexts(void **state) {
    (void)state;
    void *stream;
    int ordinal;
    begin(1, FAKE_LATE, "");
    fake_reset(1, 2, FAKE_LATE, 1);
    runtime.GetDevice(&ordinal);
    runtime.GetDeviceCount(&ordinal);
    assert_int_equal(fake_contexts(), 0);
    runtime.SetDevice(1);
    assert_int_equal(fake_contexts(), 1 << 1);
    fake_stream(&stream);
    assert_int_equal(fake_contexts(), 1 << 1);
    int (*state_of)(int, unsigned *, int *), is_active = 1;
    unsigned flags;
    find("cuDevicePrimaryCtxGetState", &state_of);
    assert_int_equal(state_of(0, &flags, &is_active), 0);
    assert_int_equal(is_active, 0);
    runtime.SetDevice(0);
    assert_int_equal(fake_contexts(), 3);
    assert_int_equal(state_of(0, &flags, &is_active), 0);
    assert_int_equal(is_active, 1);
    end(NULL);

    begin(1, FAKE_LATE, "");
    fake_set_driver_old();
    find("cuStreamWaitValue32", &state_of);
    assert_null(state_of);
    end(NULL);
}

typedef struct blocked {
    void *stream;
    uint64_t at;
    uint32_t *flag;
    pthread_t thread;
} blocked;

static void *call_free(void *arg) {
    fake_free(arg);
    return NULL;
}

static void *call_launch(void *arg) {
    fake_launch(arg, count, NULL);
    return NULL;
}

/* A stream that a flag holds up, and a thread in a call that waits for it. */
static void block(blocked *out, void *(*call)(void *), int n_ahead) {
    fake_stream(&out->stream);
    out->flag = flags_of(1, &out->at);
    void *memory = fake_alloc(64);
    wait_for_flag(out->stream, out->at, 1, 0);
    for (int i = 0; i < n_ahead; i++) fake_launch(out->stream, count, NULL);
    assert_int_equal(pthread_create(&out->thread, NULL, call, call == call_free ? memory : out->stream), 0);
    for (int i = 0; i < 20000 && !fake_n_waiting(); i++) pause_us(500);
    assert_int_equal(fake_n_waiting(), 1);
}

/* It waits until the flag comes, and keeps others out: who calls meanwhile gives up, and the report says why. */
static void test_kept_out(void **state) {
    (void)state;
    static const struct {
        const char *manners, *waits;
        void *(*call)(void *);
        int n_ahead;
    } all[] = {{"blocking-alloc", "cudaFree waits until the device is idle", call_free, 0},
               {"lazy-loading", "cudaLaunchKernel waits until the device is idle", call_launch, 0},
               {"depth=3", "cudaLaunchKernel waits for room in a full launch queue", call_launch, 2}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        blocked one;
        begin(1, FAKE_EAGER, all[i].manners);
        n_ran = 0;
        block(&one, all[i].call, all[i].n_ahead);
        set(one.flag, 1);
        pthread_join(one.thread, NULL);
        assert_int_equal(runtime.StreamSynchronize(one.stream), 0);
        assert_int_equal(n_ran, all[i].n_ahead + (all[i].call == call_launch));
        end(NULL);

        begin(1, FAKE_EAGER, all[i].manners);
        block(&one, all[i].call, all[i].n_ahead);
        fake_limit(20);
        assert_int_not_equal(runtime.StreamQuery(one.stream), 0);
        fake_limit(60000);
        assert_string_equal(fake_mistake(0),
                            "cudaStreamQuery waited for ever for a call that keeps it out of the driver");
        assert_non_null(strstr(fake_report(), all[i].waits));
        assert_non_null(strstr(fake_report(), "waits for a flag to be at least 1; it is 0"));
        set(one.flag, 1);
        pthread_join(one.thread, NULL);
        runtime.StreamSynchronize(one.stream);
        tagc_runtime_unbind(&runtime);
    }
}

/* With one connection, work behind a wait waits, too, although its stream has nothing to wait for. */
static void test_connections(void **state) {
    (void)state;
    for (int n = 1; n <= 2; n++) {
        begin(1, FAKE_LATE, n == 1 ? "connections=1" : "connections=2");
        uint64_t at;
        uint32_t *flag = flags_of(1, &at);
        void *a, *b;
        fake_stream(&a);
        fake_stream(&b);
        n_ran = 0;
        fake_launch(b, count, NULL);
        wait_for_flag(a, at, 1, 0);
        fake_launch(b, count, NULL);
        fake_settle(NULL, NULL);
        assert_int_equal(n_ran, n);
        set(flag, 1);
        runtime.StreamSynchronize(b);
        assert_int_equal(n_ran, 2);
        end(NULL);
    }
}

/* ---- two protocols ---- */

enum { N_EXCHANGES = 2, MANY = 40, HOLD_MS = 100 };

/* What else happens between two hooks, or in the thread that exchanges. */
typedef enum danger {
    NONE,
    HOOK_FREES,
    HOOK_LAUNCHES_NEW,
    HOOK_LAUNCHES_MANY,
    THREAD_ALLOCATES,
    THREAD_LAUNCHES
} danger;

typedef struct rank {
    int is_old;
    danger danger;
    void *caller, *out, *back, *own; /* streams; the last one of the thread */
    void *came, *copied, *done;      /* events */
    float *array, *spare;            /* of the device */
    float *in[N_EXCHANGES], *result[N_EXCHANGES];
    uint32_t *flags; /* in, out */
    uint64_t at;
    pthread_mutex_t interpreter, lock;
    pthread_cond_t changed;
    int n_hooks, n_came, n_exchanged;
    float seen[N_EXCHANGES];
} rank;
static rank *here;

static void write_array(void *arg) {
    *(float *)fake_view(here->array) = 1.0f + (float)(intptr_t)arg;
}

static void note_array(void *arg) {
    here->seen[(intptr_t)arg] = *(float *)fake_view(here->array);
}

static void anything(void *arg) {
    (void)arg;
}

static void kernel_of_thread(void *arg) {
    (void)arg;
}

static void input_came(void *arg) {
    pthread_mutex_lock(&here->lock);
    here->n_came = (int)(intptr_t)arg;
    pthread_cond_broadcast(&here->changed);
    pthread_mutex_unlock(&here->lock);
}

static void sleep_until_exchanged(void *arg) {
    pthread_mutex_lock(&here->lock);
    while (here->n_exchanged < (int)(intptr_t)arg) pthread_cond_wait(&here->changed, &here->lock);
    pthread_mutex_unlock(&here->lock);
}

/* The old thread runs the exchange in Python. */
static void *exchange_main(void *arg) {
    rank *one = arg;
    for (int k = 1;; k++) {
        pthread_mutex_lock(&one->lock);
        while (k <= one->n_hooks && one->is_old && one->n_came < k)
            pthread_cond_wait(&one->changed, &one->lock);
        int is_over = k > one->n_hooks;
        pthread_mutex_unlock(&one->lock);
        if (is_over) return NULL;
        while (!one->is_old && look(&one->flags[0]) < (uint32_t)k) pause_us(50);
        if (one->is_old) pthread_mutex_lock(&one->interpreter);
        void *memory;
        if (one->danger == THREAD_ALLOCATES && !runtime.HostAlloc(&memory, 64, 0)) runtime.FreeHost(memory);
        if (one->danger == THREAD_LAUNCHES && !fake_launch(one->own, kernel_of_thread, NULL))
            runtime.StreamSynchronize(one->own);
        one->result[k - 1][0] = 2 * one->in[k - 1][0];
        if (one->is_old) pthread_mutex_unlock(&one->interpreter);
        pthread_mutex_lock(&one->lock);
        one->n_exchanged = k;
        set(&one->flags[1], (uint32_t)k);
        pthread_cond_broadcast(&one->changed);
        pthread_mutex_unlock(&one->lock);
    }
}

static void enqueue(rank *one, int k) {
    void *number = (void *)(intptr_t)k;
    fake_launch(one->caller, write_array, number);
    runtime.EventRecord(one->came, one->caller);
    runtime.StreamWaitEvent(one->out, one->came, 0);
    runtime.MemcpyAsync(one->in[k - 1], one->array, 4, TAGC_COPY_TO_HOST, one->out);
    if (one->is_old)
        cudaLaunchHostFunc(one->out, input_came, number);
    else
        write_flag(one->out, one->at, (uint32_t)k, 0);
    runtime.EventRecord(one->copied, one->out);
    runtime.StreamWaitEvent(one->back, one->copied, 0);
    if (one->is_old)
        cudaLaunchHostFunc(one->back, sleep_until_exchanged, number);
    else
        wait_for_flag(one->back, one->at + 4, (uint32_t)k, AT_LEAST);
    runtime.MemcpyAsync(one->array, one->result[k - 1], 4, TAGC_COPY_TO_DEVICE, one->back);
    runtime.EventRecord(one->done, one->back);
    runtime.StreamWaitEvent(one->caller, one->done, 0);
    fake_launch(one->caller, note_array, (void *)(intptr_t)(k - 1));
}

static void make_rank(rank *one) {
    void **streams[] = {&one->caller, &one->out, &one->back, &one->own};
    void **events[] = {&one->came, &one->copied, &one->done};
    for (int i = 0; i < 4; i++) assert_int_equal(fake_stream(streams[i]), 0);
    for (int i = 0; i < 3; i++) runtime.EventCreateWithFlags(events[i], TAGC_EVENT_WITHOUT_TIMING);
    one->flags = flags_of(2, &one->at);
    one->array = fake_alloc(4);
    one->spare = fake_alloc(4);
    for (int k = 0; k < N_EXCHANGES; k++) {
        runtime.HostAlloc((void **)&one->in[k], 4, 0);
        runtime.HostAlloc((void **)&one->result[k], 4, 0);
    }
    fake_launch(one->caller, write_array, NULL); /* loads it */
    fake_launch(one->caller, note_array, NULL);
    assert_int_equal(runtime.StreamSynchronize(one->caller), 0);
    pthread_mutex_init(&one->interpreter, NULL);
    pthread_mutex_init(&one->lock, NULL);
    pthread_cond_init(&one->changed, NULL);
}

static void be_dangerous(const rank *one, int k) {
    if (one->danger == HOOK_FREES && k == 1) fake_free(one->spare);
    if (one->danger == HOOK_LAUNCHES_NEW && k == 1) fake_launch(one->caller, anything, NULL);
    for (int i = 0; i < MANY && one->danger == HOOK_LAUNCHES_MANY && !fake_n_mistakes(); i++)
        fake_launch(one->caller, note_array, (void *)(intptr_t)(k - 1));
}

/* Runs hooks that hold the interpreter's lock, until a call gives up. Returns results that are wrong or missing. */
static int n_wrong(int is_old, danger what, const char *manners, uint64_t seed, int limit_ms) {
    begin(seed, FAKE_EAGER, manners);
    rank one = {.is_old = is_old, .danger = what, .n_hooks = N_EXCHANGES};
    here = &one;
    make_rank(&one);
    fake_limit(limit_ms);
    pthread_t thread;
    pthread_mutex_lock(&one.interpreter);
    assert_int_equal(pthread_create(&thread, NULL, exchange_main, &one), 0);
    for (int k = 1; k <= one.n_hooks; k++) {
        enqueue(&one, k);
        be_dangerous(&one, k);
        pthread_mutex_lock(&one.lock);
        if (fake_n_mistakes() && what < THREAD_ALLOCATES) one.n_hooks = k;
        pthread_cond_broadcast(&one.changed);
        pthread_mutex_unlock(&one.lock);
    }
    pthread_mutex_unlock(&one.interpreter);
    pthread_join(thread, NULL);
    fake_limit(60000);
    runtime.StreamSynchronize(one.caller);
    runtime.StreamSynchronize(one.own);
    int n = 0;
    for (int k = 0; k < N_EXCHANGES; k++) n += one.seen[k] != 2 * (2.0f + (float)k);
    return n;
}

static void test_old(void **state) {
    (void)state;
    static const struct {
        danger danger;
        const char *manners, *call, *holder; /* of the report */
    } hangs[] = {
        {HOOK_FREES, "blocking-alloc", "cudaFree waits until the device is idle", "in a host function"},
        {HOOK_LAUNCHES_NEW, "lazy-loading", "cudaLaunchKernel waits until the device is idle",
         "in a host function"},
        {HOOK_LAUNCHES_MANY, "depth=8", "waits for room in a full launch queue", "in a host function"},
        {THREAD_ALLOCATES, "blocking-alloc", "cudaHostAlloc waits until the device is idle",
         "in a host function"},
        {THREAD_LAUNCHES, "lazy-loading", "cudaLaunchKernel waits until the device is idle",
         "in a host function"},
        {THREAD_LAUNCHES, "connections=1",
         "cudaStreamSynchronize waits until a stream has nothing left to do", "behind stream"},
    };
    for (size_t i = 0; i < sizeof hangs / sizeof *hangs; i++) {
        assert_int_equal(n_wrong(1, hangs[i].danger, "", i + 1, 60000), 0); /* with good manners it works */
        end(NULL);
        n_wrong(1, hangs[i].danger, hangs[i].manners, i + 1, HOLD_MS);
        assert_true(fake_n_mistakes() > 0); /* else it works, too */
        if (!strstr(fake_report(), hangs[i].call) || !strstr(fake_report(), hangs[i].holder))
            print_error("must name \"%s\" and \"%s\":\n%s", hangs[i].call, hangs[i].holder, fake_report());
        assert_non_null(strstr(fake_report(), hangs[i].call));
        assert_non_null(strstr(fake_report(), hangs[i].holder));
        tagc_runtime_unbind(&runtime);
    }
}

static void test_new(void **state) {
    (void)state;
    static const char *const manners[] = {"",           "blocking-alloc", "lazy-loading",  "depth=8",
                                          "late-flags", "connections=1",  "connections=2", "all"};
    static const danger dangers[] = {NONE, HOOK_FREES, HOOK_LAUNCHES_NEW, HOOK_LAUNCHES_MANY};
    for (size_t m = 0; m < sizeof manners / sizeof *manners; m++)
        for (size_t d = 0; d < sizeof dangers / sizeof *dangers; d++) {
            assert_int_equal(n_wrong(0, dangers[d], manners[m], m * 8 + d + 1, 60000), 0);
            end(NULL);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_late),        cmocka_unit_test(test_copy_first),
        cmocka_unit_test(test_waited_for),  cmocka_unit_test(test_flag_mistakes),
        cmocka_unit_test(test_contexts),    cmocka_unit_test(test_kept_out),
        cmocka_unit_test(test_connections), cmocka_unit_test(test_old),
        cmocka_unit_test(test_new),
    };
    int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    fake_reset(1, 1, FAKE_LATE, 1);
    return n_failed;
}
