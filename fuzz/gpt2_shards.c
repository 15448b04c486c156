/* Any bytes as an index of safetensors files, beside two sound ones: either an error, or tensors that can be read to their
 * ends, from no file of another folder. */
#include "gpt2/shards.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static char folder[] = "/tmp/tagc-fuzz-XXXXXX", index_path[80];

static void put(const char *path, const void *bytes, size_t n_bytes) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, bytes, n_bytes) != (ssize_t)n_bytes) abort();
    close(fd);
}

/* A file of one tensor with two values. */
static void put_shard(const char *folder_name, const char *name, const char *tensor) {
    char path[120], bytes[256] = {0};
    int n = snprintf(bytes + 8, sizeof bytes - 8,
                     "{\"%s\":{\"dtype\":\"F64\",\"shape\":[2],\"data_offsets\":[0,16]}}", tensor);
    bytes[0] = (char)n;
    snprintf(path, sizeof path, "%s/%s", folder_name, name);
    put(path, bytes, (size_t)n + 8 + 16);
}

static void clean(void) {
    static const char *const names[] = {"a.safetensors", "b.safetensors", "model.safetensors.index.json", ""};
    char path[120];
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        (void)remove(path);
    }
}

static void prepare(void) {
    if (*index_path) return;
    if (!mkdtemp(folder)) abort();
    put_shard(folder, "a.safetensors", "x");
    put_shard(folder, "b.safetensors", "y");
    snprintf(index_path, sizeof index_path, "%s/model.safetensors.index.json", folder);
    atexit(clean);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    tagc_shards *shards;
    prepare();
    put(index_path, data, n_bytes);
    if (tagc_shards_open(index_path, &shards) != TAGC_OK) {
        if (shards) abort();
        return 0;
    }
    if (tagc_shards_n_files(shards) > 2) abort();
    for (int i = 0; i < tagc_shards_n_entries(shards); i++) {
        tagc_safetensors_entry entry;
        float values[2];
        tagc_shards_entry_at(shards, i, &entry);
        if (strcmp(entry.name, "x") != 0 && strcmp(entry.name, "y") != 0) abort();
        if (tagc_shards_read(shards, i, 0, 2, values) != TAGC_OK || values[0] != 0) abort();
        if (tagc_shards_read(shards, i, 1, 2, values) == TAGC_OK) abort();
    }
    tagc_shards_close(shards);
    return 0;
}
