/* libtagc-load.so of the fake runtime (bench/gpu_load.h): kernels that take their time, one at a time, as all of that runtime do. */
#include "fake_runtime.h"
#include "gpu_load.h"

#include <time.h>

enum { INVALID = 1, MOST_NS = 2000000 }; /* the fake's only thread runs nothing else meanwhile */

static void nothing_0(void *arg) {
    (void)arg;
}
static void nothing_1(void *arg) {
    (void)arg;
}
static void nothing_2(void *arg) {
    (void)arg;
}
static void nothing_3(void *arg) {
    (void)arg;
}

static void pass_time(void *ns) {
    struct timespec t = {0, (long)(uintptr_t)ns};
    nanosleep(&t, NULL);
}

FAKE_API int tagc_load_spin(void *stream, unsigned n_blocks, uint64_t flag_there, uint32_t value,
                            uint64_t most_ns) {
    (void)n_blocks, (void)flag_there, (void)value;
    return fake_launch(stream, pass_time, (void *)(uintptr_t)(most_ns < MOST_NS ? most_ns : MOST_NS));
}

FAKE_API int tagc_load_nothing(void *stream, int which) {
    static void (*const all[])(void *) = {nothing_0, nothing_1, nothing_2, nothing_3};
    if (which < 0 || which >= TAGC_LOAD_FIRSTS) return INVALID;
    return fake_launch(stream, all[which], NULL);
}
