/* What a program of C or Python puts on a device beside what it measures: the library libtagc-load.so, of gpu_load.cu, or on the fake
 * runtime of tests/gpu/fake_load.c. Each call returns CUDA's code. */
#ifndef TAGC_BENCH_GPU_LOAD_H
#define TAGC_BENCH_GPU_LOAD_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* So many blocks run until the number at flag_there, an address of the device (0: none), is at least `value`, or for most_ns. */
int tagc_load_spin(void *stream, unsigned n_blocks, uint64_t flag_there, uint32_t value, uint64_t most_ns);

/* A kernel that does nothing. `which` is in [0, TAGC_LOAD_FIRSTS): each is another one, so that each has a first launch. */
enum { TAGC_LOAD_FIRSTS = 4 };
int tagc_load_nothing(void *stream, int which);

#ifdef __cplusplus
}
#endif

#endif
