/* What this build has of lib/paper, lib/gpu and lib/transport/native, and what asking for the rest says. No other file outside of
 * them knows which are there. CMake sets TAGC_HAS_PAPER, TAGC_HAS_GPU, TAGC_HAS_NATIVE and TAGC_HAS_TLS, from TAGC_PAPER, TAGC_GPU,
 * TAGC_NATIVE and TAGC_TLS. */
#include "core/status.h"
#include "exchange/registry.h"
#include "tagc/device.h"
#include "tagc/native.h"
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

const char *const tagc_fenced_parts[] = {
#if TAGC_HAS_PAPER
    "paper",
#endif
#if TAGC_HAS_GPU
    "gpu",
#endif
#if TAGC_HAS_NATIVE
    "native",
#endif
#if TAGC_HAS_TLS
    "tls",
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
/* Whoever wants a device begins with this. */
#define NO_GPU "this libtagc was built without devices: cmake -DTAGC_GPU=AUTO builds one with them"

tagc_status tagc_device_open(const char *maker, const char *library, int ordinal, tagc_device **out) {
    (void)maker, (void)library, (void)ordinal;
    if (out) *out = NULL;
    return tagc_fail(TAGC_ERR_UNSUPPORTED, NO_GPU);
}
#endif

#if !TAGC_HAS_NATIVE
/* Whoever wants it begins with _open. */
#define NO_NATIVE                                                                                            \
    "this libtagc was built without the native transport: install libuv1-dev (Debian, Ubuntu), libuv-devel " \
    "(Fedora) or libuv (conda), and build it again (cmake: -DTAGC_NATIVE=ON)"

void tagc_native_options_init_sized(tagc_native_options *options, size_t struct_bytes) {
    memset(options, 0, struct_bytes);
    options->struct_bytes = struct_bytes;
}

tagc_status tagc_native_open(const tagc_native_options *options, int rank, int world_size,
                             tagc_native **out) {
    (void)options, (void)rank, (void)world_size;
    if (out) *out = NULL;
    return tagc_fail(TAGC_ERR_UNSUPPORTED, NO_NATIVE);
}

tagc_status tagc_native_address(const tagc_native *native, void *address) {
    (void)native, (void)address;
    return tagc_fail(TAGC_ERR_UNSUPPORTED, NO_NATIVE);
}

tagc_status tagc_native_connect(tagc_native *native, const void *addresses, const void *keys,
                                double timeout_s) {
    (void)native, (void)addresses, (void)keys, (void)timeout_s;
    return tagc_fail(TAGC_ERR_UNSUPPORTED, NO_NATIVE);
}

uint64_t tagc_native_refused(const tagc_native *native) {
    (void)native;
    return 0;
}

tagc_status tagc_comm_create_native(tagc_native *native, const tagc_comm_options *options, tagc_comm **out) {
    (void)native, (void)options;
    if (out) *out = NULL;
    return tagc_fail(TAGC_ERR_UNSUPPORTED, NO_NATIVE);
}

void tagc_native_destroy(tagc_native *native) {
    (void)native;
}
#endif
