/* The text of the last failure, one per thread. */
#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[TAGC_ERROR_TEXT_BYTES];

tagc_status tagc_fail(tagc_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

tagc_status tagc_fail_in(tagc_status status, const char *format, ...) {
    char text[2 * TAGC_ERROR_TEXT_BYTES]; /* prefix and present text always fit */
    va_list args;
    va_start(args, format);
    int n_chars = vsnprintf(text, TAGC_ERROR_TEXT_BYTES - 2, format, args);
    va_end(args);
    size_t n = n_chars < 0 ? 0 : strlen(text);
    snprintf(text + n, sizeof text - n, ": %s", last_error);
    text[sizeof last_error - 1] = 0; /* cut at the end of the details, not at their start */
    memcpy(last_error, text, sizeof last_error);
    return status;
}

const char *tagc_last_error(void) {
    return last_error;
}

const char *tagc_status_name(tagc_status status) {
    switch (status) {
    case TAGC_OK:
        return "ok";
    case TAGC_ERR_ARGUMENT:
        return "invalid argument";
    case TAGC_ERR_STATE:
        return "call out of order";
    case TAGC_ERR_MEMORY:
        return "out of memory";
    case TAGC_ERR_MISMATCH:
        return "ranks disagree";
    case TAGC_ERR_TRANSPORT:
        return "transport failure";
    case TAGC_ERR_CORRUPT:
        return "corrupt data";
    case TAGC_ERR_UNSUPPORTED:
        return "not supported";
    case TAGC_ERR_DEVICE:
        return "device failure";
    }
    return status == TAGC_ERR_IO            ? "input or output failure"
           : status == TAGC_ERR_INTERRUPTED ? "interrupted"
                                            : "unknown status";
}
