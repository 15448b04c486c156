/* See fake_modules.h. Functions as cuda.h has them. */
#include "fake_modules.h"

#include <elf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
enum { EM_OF_CUDA = 190, COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76, MOST_PTX_BYTES = 1 << 26 };

API fake_modules *fake_modules_state(void) {
    static fake_modules state;
    return &state;
}

static const void *image_of(const void *module) {
    const void *image;
    memcpy(&image, module, sizeof image);
    return image;
}

API int cuCtxGetDevice(int *device) {
    *device = fake_modules_state()->device;
    return 0;
}

API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    const fake_modules *s = fake_modules_state();
    *value = attribute == COMPUTE_MAJOR   ? s->major[device]
             : attribute == COMPUTE_MINOR ? s->minor[device]
                                          : -1;
    return 0;
}

/* The architecture is in one of two bytes of e_flags, as the format has it. */
static int architecture_of(const void *image) {
    Elf64_Ehdr header;
    memcpy(&header, image, sizeof header);
    if (memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) {
        const char *target = memmem(image, strnlen(image, MOST_PTX_BYTES), ".target sm_", 11);
        return target ? -atoi(target + 11) : 0;
    }
    if (header.e_machine != EM_OF_CUDA) return 0;
    return (int)(header.e_ident[EI_ABIVERSION] < 8 ? header.e_flags & 0xff : header.e_flags >> 8 & 0xff);
}

API int cuModuleLoadData(void **module, const void *image) {
    fake_modules *s = fake_modules_state();
    int at = s->device, is = s->major[at] * 10 + s->minor[at], architecture = architecture_of(image);
    int fits =
        architecture > 0 ? architecture / 10 == s->major[at] && architecture <= is : -architecture <= is;
    if (architecture == 0 || !fits) return FAKE_NO_BINARY;
    s->architecture[at] = architecture;
    s->n_modules[at]++;
    *module = malloc(sizeof image);
    memcpy(*module, &image, sizeof image);
    return 0;
}

static int has_symbol(const char *image, const char *name) {
    Elf64_Ehdr header;
    Elf64_Shdr section, names;
    memcpy(&header, image, sizeof header);
    for (unsigned i = 0; i < header.e_shnum; i++) {
        memcpy(&section, image + header.e_shoff + i * sizeof section, sizeof section);
        if (section.sh_type != SHT_SYMTAB) continue;
        memcpy(&names, image + header.e_shoff + section.sh_link * sizeof names, sizeof names);
        for (size_t at = 0; at < section.sh_size; at += sizeof(Elf64_Sym)) {
            Elf64_Sym symbol;
            memcpy(&symbol, image + section.sh_offset + at, sizeof symbol);
            if (strcmp(image + names.sh_offset + symbol.st_name, name) == 0 &&
                ELF64_ST_TYPE(symbol.st_info) == STT_FUNC)
                return 1;
        }
    }
    return 0;
}

API int cuModuleGetFunction(void **function, void *module, const char *name) {
    const char *image = image_of(module);
    char entry[300];
    snprintf(entry, sizeof entry, ".entry %s(", name);
    int has = memcmp(image, ELFMAG, SELFMAG) == 0 ? has_symbol(image, name) : strstr(image, entry) != NULL;
    *function = has ? strdup(name) : NULL;
    return has ? 0 : FAKE_NO_KERNEL;
}

API int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute; /* each has another one */
    return function ? 0 : FAKE_NO_KERNEL;
}

/* How many arguments a kernel has is not known here: those that the test asks for have eight bytes each. */
API int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream,
                       void **arguments, void **extra) {
    fake_modules *s = fake_modules_state();
    int code = s->fails_with;
    s->fails_with = 0;
    if (code) return code;
    if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || shared_bytes || extra) return 1;
    fake_launch *one = &s->launches[s->n_launches++ % FAKE_LAUNCHES];
    *one = (fake_launch){.grid = grid_x, .block = block_x, .stream = stream};
    snprintf(one->name, sizeof one->name, "%s", (const char *)function);
    if (strstr(one->name, "spoil_array"))
        for (int i = 0; i < 3; i++) memcpy(&one->words[i], arguments[i], sizeof one->words[i]);
    else
        memcpy(one->words, arguments[0], sizeof one->words);
    return 0;
}

API int cuGetErrorString(int code, const char **text) {
    *text = code == FAKE_NO_BINARY   ? "no kernel image is available for execution on the device"
            : code == FAKE_NO_KERNEL ? "named symbol not found"
                                     : "a failure of the fake driver";
    return 0;
}

/* ---- beside modules: of the host's memory, where everything has run when a call returns ---- */

#define CALLED(...) snprintf(fake_modules_state()->called, sizeof fake_modules_state()->called, __VA_ARGS__)

API int cuInit(unsigned flags) {
    return flags != 0;
}

API int cuDriverGetVersion(int *version) {
    *version = 12080;
    return 0;
}

API int cuDeviceGetCount(int *n) {
    CALLED("cuDeviceGetCount");
    *n = FAKE_DEVICES;
    return 0;
}

API int cuDeviceGetName(char *name, int n_bytes, int device) {
    snprintf(name, (size_t)n_bytes, "no device %d", device);
    return 0;
}

API int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &fake_modules_state()->major[device];
    return 0;
}

API int cuCtxSetCurrent(void *context) {
    fake_modules_state()->has_context = context != NULL;
    return 0;
}

API int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return 0;
}

API int cuCtxSynchronize(void) {
    CALLED("cuCtxSynchronize");
    return 0;
}

API int cuMemAlloc_v2(uint64_t *memory, size_t n_bytes) {
    CALLED("cuMemAlloc_v2 %zu", n_bytes);
    *memory = (uintptr_t)malloc(n_bytes);
    return 0;
}

API int cuMemAllocManaged(uint64_t *memory, size_t n_bytes, unsigned flags) {
    CALLED("cuMemAllocManaged %zu %u", n_bytes, flags);
    *memory = (uintptr_t)malloc(n_bytes);
    return 0;
}

API int cuMemFree_v2(uint64_t memory) {
    CALLED("cuMemFree_v2");
    free((void *)(uintptr_t)memory);
    return 0;
}

API int cuMemcpy(uint64_t to, uint64_t from, size_t n_bytes) {
    CALLED("cuMemcpy %zu", n_bytes);
    memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, n_bytes);
    return 0;
}

API int cuMemcpyAsync(uint64_t to, uint64_t from, size_t n_bytes, void *stream) {
    (void)stream;
    CALLED("cuMemcpyAsync %zu", n_bytes);
    memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, n_bytes);
    return 0;
}

API int cuMemsetD8Async(uint64_t memory, unsigned char byte, size_t n_bytes, void *stream) {
    (void)stream;
    memset((void *)(uintptr_t)memory, byte, n_bytes);
    return 0;
}

API int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    CALLED("cuStreamCreateWithPriority %u %d", flags, priority);
    *stream = malloc(1);
    return 0;
}

API int cuStreamDestroy_v2(void *stream) {
    CALLED("cuStreamDestroy_v2");
    free(stream);
    return 0;
}

API int cuStreamSynchronize(void *stream) {
    CALLED("cuStreamSynchronize");
    return stream == NULL;
}

API int cuEventCreate(void **event, unsigned flags) {
    CALLED("cuEventCreate %u", flags);
    *event = calloc(1, sizeof(int));
    return 0;
}

API int cuEventRecord(void *event, void *stream) {
    CALLED("cuEventRecord");
    *(int *)event = ++fake_modules_state()->n_records;
    return stream == NULL;
}

API int cuEventQuery(void *event) {
    CALLED("cuEventQuery");
    return *(int *)event == 0;
}

API int cuEventSynchronize(void *event) {
    CALLED("cuEventSynchronize");
    return *(int *)event == 0;
}

API int cuEventElapsedTime(float *ms, void *begin, void *end) {
    *ms = (float)(*(int *)end - *(int *)begin);
    return 0;
}

API int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n_blocks, void *function, int n_threads,
                                                             size_t shared_bytes, unsigned flags) {
    CALLED("cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags %d %zu %u", n_threads, shared_bytes, flags);
    *n_blocks = 4;
    return function ? 0 : FAKE_NO_KERNEL;
}
