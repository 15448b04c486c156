/* Any bytes as a safetensors file and as a config.json: either an error, or tensors that can be read to their
 * ends. */
#include "gpt2/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void read_all(tagc_safetensors *file) {
    for (int i = 0; i < tagc_safetensors_n_entries(file); i++) {
        tagc_safetensors_entry entry;
        float values[64];
        tagc_safetensors_entry_at(file, i, &entry);
        if (tagc_safetensors_find(file, entry.name) != i) abort();
        uint64_t n = entry.n_elems < 64 ? entry.n_elems : 64;
        tagc_status status = tagc_safetensors_read(file, i, entry.n_elems - n, n, values);
        if (status != TAGC_OK && status != TAGC_ERR_UNSUPPORTED) abort();
        if (tagc_safetensors_read(file, i, entry.n_elems, 1, values) == TAGC_OK) abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    char path[64];
    tagc_safetensors *file;
    tagc_gpt2_weights *weights;
    tagc_gpt2_config config = {1, 1, 1, 1, 1, 1};
    int fd = memfd_create("input", 0);
    if (fd < 0 || write(fd, data, n_bytes) != (ssize_t)n_bytes) abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (tagc_safetensors_open(path, &file) == TAGC_OK) {
        read_all(file);
        tagc_safetensors_close(file);
    }
    if (tagc_gpt2_weights_open(path, &config, &weights) == TAGC_OK) tagc_gpt2_weights_close(weights);
    if (tagc_gpt2_config_read(path, &config) == TAGC_OK && tagc_gpt2_config_check(&config) != TAGC_OK)
        abort();
    close(fd);
    return 0;
}
