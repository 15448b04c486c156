/* What the tests of this module share: a folder to write in, and failures compared by status and text. */
#ifndef TAGC_TESTS_DATA_SCRATCH_H
#define TAGC_TESTS_DATA_SCRATCH_H

#include "../test.h"
#include "data/data.h"
#include "tagc/tagc.h"
#include <dirent.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define assert_ok(call)                                                                                      \
    do {                                                                                                     \
        tagc_status status_ = (call);                                                                        \
        if (status_ != TAGC_OK) fail_msg("%s: %s", tagc_status_name(status_), tagc_last_error());            \
    } while (0)

/* Fails the test unless the call failed with this status and a text that has `part` in it. */
#define assert_fails(call, expected, part)                                                                   \
    do {                                                                                                     \
        assert_int_equal(call, expected);                                                                    \
        if (!strstr(tagc_last_error(), part)) fail_msg("\"%s\" is not in: %s", part, tagc_last_error());     \
    } while (0)

static inline int scratch_make(void **state) {
    char *folder = strdup("/tmp/tagc-data-XXXXXX");
    *state = folder;
    return folder && mkdtemp(folder) ? 0 : -1;
}

static inline int scratch_remove_one(const char *path, const struct stat *about, int kind,
                                     struct FTW *place) {
    (void)about, (void)kind, (void)place;
    return remove(path);
}

static inline void scratch_remove_tree(const char *path) {
    nftw(path, scratch_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static inline int scratch_remove(void **state) {
    scratch_remove_tree(*state);
    free(*state);
    return 0;
}

/* Returns folder/name in one of eight buffers that take turns. */
static inline const char *scratch_path(const void *folder, const char *name) {
    static char paths[8][2048];
    static int turn;
    turn = (turn + 1) % 8;
    int n = snprintf(paths[turn], sizeof paths[turn], "%s/%s", (const char *)folder, name);
    assert_in_range(n, 1, sizeof paths[turn] - 1);
    return paths[turn];
}

static inline void scratch_write(const char *path, const void *bytes, size_t n_bytes) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n_bytes, file), n_bytes);
    assert_int_equal(fclose(file), 0);
}

static inline uint8_t *scratch_read(const char *path, size_t *n_bytes) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    *n_bytes = (size_t)ftell(file);
    rewind(file);
    uint8_t *bytes = malloc(*n_bytes + 1);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, *n_bytes, file), *n_bytes);
    fclose(file);
    return bytes;
}

static inline int scratch_n_entries(const char *folder) {
    int n = 0;
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir));) n += entry->d_name[0] != '.';
    closedir(dir);
    return n;
}

/* Token `index`, whatever it is. */
static inline uint32_t scratch_token(const tagc_tokens *tokens, uint64_t index) {
    int token;
    assert_ok(tagc_tokens_read(tokens, index, 1, INT32_MAX, &token));
    return (uint32_t)token;
}

static inline uint64_t scratch_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

#endif
