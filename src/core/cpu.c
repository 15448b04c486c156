/* The processor's levels, found at the first question. Threads that ask first at the same time find the same. */
#include "core/cpu.h"
#include "core/status.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[] = {[TAGC_CPU_SCALAR] = "scalar",
                                    [TAGC_CPU_NEON] = "neon",
                                    [TAGC_CPU_AVX2] = "avx2",
                                    [TAGC_CPU_AVX512] = "avx512"};
enum { N_LEVELS = sizeof names / sizeof *names, UNKNOWN = -1 };

static int processor_has(tagc_cpu level) {
    switch (level) {
    case TAGC_CPU_SCALAR:
        return 1;
#if defined(__aarch64__)
    case TAGC_CPU_NEON:
        return 1;
#endif
#if defined(__x86_64__)
    case TAGC_CPU_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
               __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    case TAGC_CPU_AVX512:
        return processor_has(TAGC_CPU_AVX2) && __builtin_cpu_supports("avx512f") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
#endif
    default:
        return 0;
    }
}

static tagc_cpu best_of_processor(void) {
    int level = N_LEVELS - 1;
    while (!processor_has((tagc_cpu)level)) level--;
    return (tagc_cpu)level;
}

/* What TAGC_CPU asks for: a level, the best of the processor where it is unset or empty, UNKNOWN where it is no name. */
static int asked_for(void) {
    const char *name = getenv("TAGC_CPU");
    if (!name || !*name) return best_of_processor();
    for (int level = 0; level < N_LEVELS; level++)
        if (strcmp(name, names[level]) == 0) return level;
    return UNKNOWN;
}

tagc_cpu tagc_cpu_best(void) {
    static atomic_int found = UNKNOWN;
    int level = atomic_load_explicit(&found, memory_order_relaxed);
    if (level == UNKNOWN) {
        level = asked_for();
        if (level == UNKNOWN || !processor_has((tagc_cpu)level)) level = best_of_processor();
        atomic_store_explicit(&found, level, memory_order_relaxed);
    }
    return (tagc_cpu)level;
}

int tagc_cpu_has(tagc_cpu level) {
    return level <= tagc_cpu_best() && processor_has(level);
}

int tagc_cpu_has_vbmi2(void) {
#if defined(__x86_64__)
    return tagc_cpu_has(TAGC_CPU_AVX512) && __builtin_cpu_supports("avx512vbmi2");
#else
    return 0;
#endif
}

tagc_status tagc_cpu_check(void) {
    int level = asked_for();
    if (level != UNKNOWN && processor_has((tagc_cpu)level)) return TAGC_OK;
    char had[64] = ""; /* the names of all levels fit */
    for (int i = 0; i < N_LEVELS; i++) {
        if (!processor_has((tagc_cpu)i)) continue;
        if (*had) strcat(had, ", ");
        strcat(had, names[i]);
    }
    return level == UNKNOWN
               ? tagc_fail(TAGC_ERR_ARGUMENT, "TAGC_CPU is \"%.32s\", must be one of: %s", getenv("TAGC_CPU"),
                           had)
               : tagc_fail(TAGC_ERR_UNSUPPORTED, "TAGC_CPU is %s, which this processor lacks; it has: %s",
                           names[level], had);
}

const char *tagc_cpu_name(tagc_cpu level) {
    return names[level];
}
