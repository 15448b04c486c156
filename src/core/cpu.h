/* Which vector instructions kernels may use: the one place that asks the processor.
 *
 * Kernels come in levels, all of which give the same bits in libtagc. The best level that the processor has is used.
 * The environment variable TAGC_CPU=scalar|neon|avx2|avx512 makes this process act as on a processor that has nothing
 * better, for tests and figures; empty is the same as unset. It is read once. */
#ifndef TAGC_CORE_CPU_H
#define TAGC_CORE_CPU_H

#include "tagc/tagc.h"

typedef enum tagc_cpu {
    TAGC_CPU_SCALAR, /* what the compiler takes for granted: SSE2 on x86-64, NEON on aarch64 */
    TAGC_CPU_NEON,   /* kernels written for it; every aarch64 processor has it */
    TAGC_CPU_AVX2,   /* and BMI1, BMI2, POPCNT: x86-64-v3 */
    TAGC_CPU_AVX512  /* F, BW, DQ and VL: x86-64-v4 */
} tagc_cpu;

/* The level in use. Where TAGC_CPU cannot be followed: the best of the processor. */
tagc_cpu tagc_cpu_best(void);

/* 1 when kernels of this level may run: the processor has it, and TAGC_CPU does not ask for less. */
int tagc_cpu_has(tagc_cpu level);

/* The same of AVX512_VBMI2, which the first processors with AVX-512 lack. */
int tagc_cpu_has_vbmi2(void);

/* TAGC_OK, or: TAGC_ERR_ARGUMENT where TAGC_CPU names no level, TAGC_ERR_UNSUPPORTED where this processor lacks it. What
 * makes reducers and gatherers, and the tagc command, asks. */
tagc_status tagc_cpu_check(void);

const char *tagc_cpu_name(tagc_cpu level); /* as in TAGC_CPU */

#endif
