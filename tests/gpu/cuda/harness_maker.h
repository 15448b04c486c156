/* The kernels as a maker of batches (gpu/maker.h) for the fake runtime (tests/gpu/fake_runtime.h): the harness executes
 * them when the stream comes to them, and they see the fake device's memory. */
#ifndef TAGC_TESTS_CUDA_HARNESS_MAKER_H
#define TAGC_TESTS_CUDA_HARNESS_MAKER_H

#ifdef __cplusplus
extern "C" {
#endif
#include "gpu/maker.h"

const tagc_maker *harness_maker(void);
/* Of the runs from here on: as harness::configure. */
void harness_maker_configure(uint64_t seed, unsigned n_resident);

#ifdef __cplusplus
}
#endif

#endif
