/* See fake_modules.h. Functions as cuda.h has them. */
#include "fake_modules.h"

#include <elf.h>
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
    (void)attribute;
    *value = 0;
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
