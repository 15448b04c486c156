/* The text of the last failure, one per thread. */
#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[TAGC_ERROR_TEXT_BYTES];

static _Thread_local int last_rank = -1;

/* How many bytes a control character starts with `at` takes, in ASCII or as UTF-8 of U+0080 to U+009F; 0: none is there. */
static int control_bytes(const unsigned char *at) {
    if (at[0] < 0x20 || at[0] == 0x7f) return 1;
    return at[0] == 0xc2 && at[1] >= 0x80 && at[1] <= 0x9f ? 2 : 0;
}

/* Part of a text may come from another rank. It must not move the cursor of a terminal, nor begin a line of a log. */
static void keep_text(const char *text) {
    size_t n = 0;
    for (const unsigned char *at = (const unsigned char *)text; *at;) {
        char shown[8] = {(char)*at};
        int n_bytes = control_bytes(at), n_shown = 1;
        if (n_bytes) n_shown = snprintf(shown, sizeof shown, "\\x%02x", at[n_bytes - 1]);
        if (n + (size_t)n_shown >= sizeof last_error) break;
        memcpy(last_error + n, shown, (size_t)n_shown);
        n += (size_t)n_shown;
        at += n_bytes ? n_bytes : 1;
    }
    last_error[n] = 0;
}

tagc_status tagc_fail(tagc_status status, const char *format, ...) {
    char text[TAGC_ERROR_TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    keep_text(text);
    last_rank = -1;
    return status;
}

tagc_status tagc_status_told(int64_t number) {
    return number >= TAGC_OK && number <= TAGC_LAST_STATUS ? (tagc_status)number : TAGC_ERR_CORRUPT;
}

tagc_status tagc_status_check_own(tagc_status status) {
    if ((int)status > TAGC_OK && (int)status <= TAGC_LAST_STATUS) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "status is %d, must be that of a failure", (int)status);
}

tagc_status tagc_blame(tagc_status status, int rank) {
    last_rank = rank;
    return status;
}

int tagc_last_rank(void) {
    return last_rank;
}

tagc_status tagc_fail_in(tagc_status status, const char *format, ...) {
    char text[2 * TAGC_ERROR_TEXT_BYTES]; /* prefix and present text always fit */
    va_list args;
    va_start(args, format);
    int n_chars = vsnprintf(text, TAGC_ERROR_TEXT_BYTES - 2, format, args);
    va_end(args);
    size_t n = n_chars < 0 ? 0 : strlen(text);
    snprintf(text + n, sizeof text - n, ": %s", last_error);
    keep_text(text); /* cuts at the end of the details, not at their start */
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
    case TAGC_ERR_TIMEOUT:
        return "no answer in time";
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
