/* What this build has of lib/paper and lib/gpu, and what asking for the rest says. No other file outside of the two knows which are
 * there. CMake sets TAGC_HAS_PAPER and TAGC_HAS_GPU, from TAGC_PAPER and TAGC_GPU. */
#include "core/status.h"
#include "exchange/registry.h"
#include "tagc/device.h"
#include "tagc/frames.h"
#include "tagc/paper.h"

#include <string.h>

#if TAGC_HAS_PAPER
extern const tagc_exchange_table tagc_exchange_sketch, tagc_exchange_packed;
#endif

const tagc_exchange_table *const tagc_fenced_exchanges[] = {
#if TAGC_HAS_PAPER
    &tagc_exchange_sketch, &tagc_exchange_packed,
#endif
    NULL};

#if !TAGC_HAS_PAPER
/* So that a caller of sketch or packed links, and hears from tagc_reducer_create what is missing. */
void tagc_paper_options_init_sized(tagc_paper_options *options, size_t struct_bytes) {
    memset(options, 0, struct_bytes);
    options->struct_bytes = struct_bytes;
}
#endif

#if !TAGC_HAS_GPU
/* Whoever wants a device or frames begins with one of these. */
#define NO_GPU "this libtagc was built without devices and frames: cmake -DTAGC_GPU=AUTO builds one with them"

tagc_status tagc_device_open(const char *maker, const char *library, int ordinal, tagc_device **out) {
    (void)maker, (void)library, (void)ordinal;
    if (out) *out = NULL;
    return tagc_fail(TAGC_ERR_UNSUPPORTED, NO_GPU);
}

tagc_status tagc_frames_create(tagc_kernels *kernels, tagc_comm *comm, const tagc_reducer_options *options,
                               tagc_reducer **out) {
    (void)kernels, (void)comm, (void)options;
    if (out) *out = NULL;
    return tagc_fail(TAGC_ERR_UNSUPPORTED, NO_GPU);
}
#endif
