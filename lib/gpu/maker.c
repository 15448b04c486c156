/* Finds libtagc-cuda.so. */
#include "gpu/maker.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CUDA_LIBRARY "libtagc-cuda.so"

/* In the folder of the file that this function is in. */
static void *open_beside(const char *name) {
    Dl_info here;
    char path[4096];
    const char *slash;
    if (!dladdr((void *)(size_t)tagc_maker_load, &here) || !here.dli_fname) return NULL;
    slash = strrchr(here.dli_fname, '/');
    if (!slash) return NULL;
    int n = snprintf(path, sizeof path, "%.*s/%s", (int)(slash - here.dli_fname), here.dli_fname, name);
    return n > 0 && (size_t)n < sizeof path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
}

tagc_status tagc_maker_load(const tagc_maker **out) {
    const char *asked = getenv("TAGC_CUDA_LIBRARY");
    *out = NULL;
    if (asked && !*asked) asked = NULL;
    void *library = asked ? NULL : open_beside(CUDA_LIBRARY);
    if (!library) library = dlopen(asked ? asked : CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "kernels for CUDA are missing: %s (TAGC_CUDA_LIBRARY may name the file)", dlerror());
    const tagc_maker *(*make)(void) = NULL;
    *(void **)&make = dlsym(library, "tagc_cuda_maker");
    const tagc_maker *maker = make ? make() : NULL;
    if (!maker || maker->abi != TAGC_MAKER_ABI) {
        unsigned abi = maker ? maker->abi : 0;
        dlclose(library);
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "%s has kernels of version %u, this libtagc needs version %u",
                         asked ? asked : CUDA_LIBRARY, abi, TAGC_MAKER_ABI);
    }
    *out = maker; /* the library stays open as long as the process lives */
    return TAGC_OK;
}
