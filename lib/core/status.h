/* Failures: functions return a status, and record a text for people.
 *
 * The text is per thread, so that two ranks in one process do not overwrite each other's. A thread that works for
 * another (the comm thread, a worker) copies its text into the task, and the task's owner restores it when it collects
 * the task. */
#ifndef TAGC_CORE_STATUS_H
#define TAGC_CORE_STATUS_H

#include "tagc/tagc.h"

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "tagc must not be compiled with -ffast-math: ranks would round differently, and NaN would go unseen"
#endif

#define TAGC_ERROR_TEXT_BYTES 512

/* Statuses of the trainer and its files. No function of libtagc returns them, so they are not in tagc_status. */
#define TAGC_ERR_IO ((tagc_status)8)          /* a file cannot be read or written */
#define TAGC_ERR_INTERRUPTED ((tagc_status)9) /* the user asked to stop */
#define TAGC_LAST_STATUS 11

/* Records the text of a failure for this thread and returns `status`, for use in `return tagc_fail(...)`. The text
 * names the argument, its value and what is allowed. It has no trailing newline or period. Control characters become "\x1b". */
tagc_status tagc_fail(tagc_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Puts "<prefix>: " before the recorded text, for callers that know the file or the rank. Returns `status`. */
tagc_status tagc_fail_in(tagc_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A status that another rank has sent as a number: TAGC_ERR_CORRUPT where it is none. */
tagc_status tagc_status_told(int64_t number);

/* TAGC_ERR_ARGUMENT unless a program may give this status as its own failure. */
tagc_status tagc_status_check_own(tagc_status status);

/* Notes that the failure just recorded began at that rank, a number in the comm, and returns `status`; and reads what was noted. -1:
 * of no rank in particular, as after each _fail. */
tagc_status tagc_blame(tagc_status status, int rank);
int tagc_last_rank(void);

/* Returns from the function if `expression` failed. The only macro here that hides control flow. */
#define TAGC_TRY(expression)                                                                                 \
    do {                                                                                                     \
        tagc_status tagc_try_status_ = (expression);                                                         \
        if (tagc_try_status_ != TAGC_OK) return tagc_try_status_;                                            \
    } while (0)

#endif
