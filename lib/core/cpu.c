/* The processor's levels, detected on first use. Threads that race to be first find the same. */
#include "core/cpu.h"
#include "core/status.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

static const char *const names[] = {[TAGC_CPU_SCALAR] = "scalar",
                                    [TAGC_CPU_NEON] = "neon",
                                    [TAGC_CPU_AVX2] = "avx2",
                                    [TAGC_CPU_AVX512] = "avx512"};
enum { N_LEVELS = sizeof names / sizeof *names, UNKNOWN = -1 };

#if defined(__x86_64__)
enum { HAS_AVX2 = 1, HAS_AVX512 = 2, HAS_VBMI2 = 4, IS_ASKED = 8 };

/* Uses cpuid and xgetbv (which registers the system saves), because __builtin_cpu_supports of zig's run-time library always
 * answers no. */
static unsigned ask_processor(void) {
    unsigned a, b, c, d, saved, high, found = IS_ASKED;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_POPCNT) || !(c & bit_FMA))
        return found;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    const unsigned ymm = 0x06, zmm = 0xe6, avx2 = bit_AVX2 | bit_BMI | bit_BMI2,
                   avx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (saved & ymm) != ymm || (b & avx2) != avx2) return found;
    found |= HAS_AVX2;
    if ((saved & zmm) == zmm && (b & avx512) == avx512)
        found |= HAS_AVX512 | (c & bit_AVX512VBMI2 ? HAS_VBMI2 : 0);
    return found;
}

static unsigned processor(void) { /* cpuid is slow on a virtual machine */
    static atomic_uint found = 0;
    unsigned now = atomic_load_explicit(&found, memory_order_relaxed);
    if (!now) atomic_store_explicit(&found, now = ask_processor(), memory_order_relaxed);
    return now;
}
#endif

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
        return !!(processor() & HAS_AVX2);
    case TAGC_CPU_AVX512:
        return !!(processor() & HAS_AVX512);
#endif
    default:
        return 0;
    }
}

tagc_cpu tagc_cpu_of_processor(void) {
    int level = N_LEVELS - 1;
    while (!processor_has((tagc_cpu)level)) level--;
    return (tagc_cpu)level;
}

/* The level in TAGC_CPU: the processor's best if it is unset or empty, UNKNOWN if it names no level. */
static int asked_for(void) {
    const char *name = getenv("TAGC_CPU");
    if (!name || !*name) return tagc_cpu_of_processor();
    for (int level = 0; level < N_LEVELS; level++)
        if (strcmp(name, names[level]) == 0) return level;
    return UNKNOWN;
}

tagc_cpu tagc_cpu_best(void) {
    static atomic_int found = UNKNOWN;
    int level = atomic_load_explicit(&found, memory_order_relaxed);
    if (level == UNKNOWN) {
        level = asked_for();
        if (level == UNKNOWN || !processor_has((tagc_cpu)level)) level = tagc_cpu_of_processor();
        atomic_store_explicit(&found, level, memory_order_relaxed);
    }
    return (tagc_cpu)level;
}

int tagc_cpu_has(tagc_cpu level) {
    return level <= tagc_cpu_best() && processor_has(level);
}

int tagc_cpu_has_vbmi2(void) {
#if defined(__x86_64__)
    return tagc_cpu_has(TAGC_CPU_AVX512) && (processor() & HAS_VBMI2);
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
