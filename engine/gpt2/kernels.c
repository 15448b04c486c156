/* One set of loops, compiled for several instruction sets and chosen at run time, so that a release build runs on every
 * processor. */
#include "gpt2/kernels.h"
#include "core/cpu.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#define LANES 16
#define KERNELS_NAME "avx512"
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define NAME(x) x##_avx512
#include "gpt2/kernels_body.h"
#undef LANES
#undef KERNELS_NAME
#undef TARGET
#undef NAME

#define LANES 8
#define KERNELS_NAME "avx2"
#define TARGET __attribute__((target("avx2")))
#define NAME(x) x##_avx2
#include "gpt2/kernels_body.h"
#undef LANES
#undef KERNELS_NAME
#undef TARGET
#undef NAME
#endif

#define LANES 4
#define KERNELS_NAME "plain"
#define TARGET
#define NAME(x) x##_plain
#include "gpt2/kernels_body.h"

const tagc_kernels *const *tagc_kernels_all(void) {
    static const tagc_kernels *const tables[] = {
#if defined(__x86_64__)
        &kernels_avx512,
        &kernels_avx2,
#endif
        &kernels_plain,
        NULL
    };
#if defined(__x86_64__)
    return tables + (tagc_cpu_has(TAGC_CPU_AVX512) ? 0 : tagc_cpu_has(TAGC_CPU_AVX2) ? 1 : 2);
#else
    return tables;
#endif
}

const tagc_kernels *tagc_kernels_best(void) {
    return tagc_kernels_all()[0];
}
