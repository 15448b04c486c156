/* Counts what kernels ask of memory, as a device would: sectors of 32 bytes of its memory, and passes over the 32 banks of shared memory.
 *
 * Kernels are compiled with -fsanitize=thread, which has them call a function before each access; the functions are those of counts.cpp,
 * and no sanitizer is linked. Accesses of a warp's lanes belong together if they come from the same instruction, and each lane comes to
 * it for the same time. Registers are not counted (what lies on a thread's stack), nor caches: `moved` is what must come from memory and go
 * there at least once, `asked` what the caches are asked for. */
#ifndef TAGC_TESTS_CUDA_COUNTS_H
#define TAGC_TESTS_CUDA_COUNTS_H

#include <stdint.h>
#include <string>
#include <vector>

namespace counts {

struct kernel {
    std::string name;
    uint64_t n_launches = 0;
    uint64_t moved = 0; /* bytes of the sectors that a launch reads, and of those that it writes, each once */
    uint64_t asked = 0, needed = 0; /* bytes of sectors that warps ask for; if lanes lay side by side */
    uint64_t passes = 0, least = 0; /* over shared memory; without conflicts of banks */
};

/* Counts from here on; forgets what was counted. */
void begin();
/* Returns what was counted, in the order of the first launches, and counts no more. */
std::vector<kernel> end();

} // namespace counts

#endif
