/* Checks for the threads of ranks. */
#ifndef TAGC_TESTS_CHECK_H
#define TAGC_TESTS_CHECK_H

#include "tagc/tagc.h"
#include <stdio.h>
#include <stdlib.h>

/* Says where a check in a rank's thread failed, and ends the process: cmocka's jump belongs to the main thread. */
#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #condition,                  \
                    tagc_last_error());                                                                      \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)
#define CHECK_OK(call) CHECK((call) == TAGC_OK)

#endif
