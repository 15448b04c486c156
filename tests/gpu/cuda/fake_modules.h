/* A CUDA driver of no device, that takes modules apart: it loads what libtagc-cuda.so gives it only if that is code for its device, finds a kernel only
 * if the code has it, and notes launches. A library with the name of CUDA's, so that who asks for that gets this one. */
#ifndef TAGC_TESTS_FAKE_MODULES_H
#define TAGC_TESTS_FAKE_MODULES_H

#include <stddef.h>

enum { FAKE_DEVICES = 16, FAKE_LAUNCHES = 64, FAKE_NO_BINARY = 209, FAKE_NO_KERNEL = 500 };

typedef struct fake_launch {
    char name[200]; /* of the kernel */
    unsigned grid, block;
    void *stream, *arguments[8]; /* the first ones, as they lie on the caller's stack */
    unsigned long long words[8]; /* what is there */
} fake_launch;

typedef struct fake_modules {
    int device;                                   /* the current one */
    int major[FAKE_DEVICES], minor[FAKE_DEVICES]; /* what devices are */
    int architecture[FAKE_DEVICES]; /* of the last module there: 75 for sm_75; minus that of PTX */
    int n_modules[FAKE_DEVICES];
    fake_launch launches[FAKE_LAUNCHES];
    int n_launches;
    int fails_with; /* what the next launch returns */
    /* Of calls beside modules: the last one with its numbers; and whether a context was made current. */
    char called[100];
    int has_context, n_records;
} fake_modules;

#ifdef __cplusplus
extern "C"
#endif
    /* The driver's own. */
    fake_modules *
    fake_modules_state(void);

#endif
