/* A folder of a test's own, removed after it whether or not it passed. */
#ifndef TAGC_TEST_FOLDER_H
#define TAGC_TEST_FOLDER_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline int remove_folder(const char *path) {
    char command[1200];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    return system(command);
}

/* Setup and teardown of cmocka: *state is the folder's path. */
static inline int make_dir(void **state) {
    char name[] = "/tmp/tagc-fsdp-XXXXXX";
    if (mkdtemp(name) == NULL) return -1;
    *state = strdup(name);
    return 0;
}

static inline int remove_dir(void **state) {
    int failed = remove_folder(*state);
    free(*state);
    return failed;
}

#endif
