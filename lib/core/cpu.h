/* The vector instructions that kernels may use. No other file asks the processor.
 *
 * Each kernel exists at several levels. In libtagc all levels give the same bits, and the processor's best level is
 * used. For tests and measurements, the environment variable TAGC_CPU=scalar|neon|avx2|avx512 limits this process to a
 * level. Empty means unset. It is read once. */
#ifndef TAGC_CORE_CPU_H
#define TAGC_CORE_CPU_H

#include "tagc/tagc.h"

typedef enum tagc_cpu {
    TAGC_CPU_SCALAR, /* what the compiler may always use: SSE2 on x86-64, NEON on aarch64 */
    TAGC_CPU_NEON,   /* kernels written for NEON; every aarch64 processor has it */
    TAGC_CPU_AVX2,   /* and BMI1, BMI2, FMA, POPCNT: x86-64-v3 */
    TAGC_CPU_AVX512  /* F, BW, DQ and VL: x86-64-v4 */
} tagc_cpu;

/* The level in use. If TAGC_CPU is invalid, the processor's best. */
tagc_cpu tagc_cpu_best(void);

/* The processor's best level, whatever TAGC_CPU says. */
tagc_cpu tagc_cpu_of_processor(void);

/* 1 if kernels of this level may run: the processor has it, and TAGC_CPU allows it. */
int tagc_cpu_has(tagc_cpu level);

/* The same for AVX512_VBMI2, which the first processors with AVX-512 lack. */
int tagc_cpu_has_vbmi2(void);

/* TAGC_ERR_ARGUMENT if TAGC_CPU names no level, TAGC_ERR_UNSUPPORTED if this processor lacks it. The tagc command and all
 * functions that create reducers and gatherers call it. */
tagc_status tagc_cpu_check(void);

const char *tagc_cpu_name(tagc_cpu level); /* as in TAGC_CPU */

#endif
