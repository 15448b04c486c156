/* Growing text, escaping, numbers, and files that are whole or not there. */
#include "report/text.h"

#include "core/status.h"
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };

void tagc_text_destroy(tagc_text *text) {
    free(text->data);
    *text = (tagc_text){0};
}

static int make_room(tagc_text *text, size_t n_bytes) {
    if (text->failed) return 0;
    if (text->capacity - text->n_bytes > n_bytes) return 1;
    size_t capacity = 2 * (text->n_bytes + n_bytes) + 256;
    char *data = capacity > n_bytes ? realloc(text->data, capacity) : NULL;
    text->failed = !data;
    if (!data) return 0;
    text->data = data;
    text->capacity = capacity;
    return 1;
}

void tagc_text_add_bytes(tagc_text *text, const char *bytes, size_t n_bytes) {
    if (!make_room(text, n_bytes)) return;
    memcpy(text->data + text->n_bytes, bytes, n_bytes);
    text->n_bytes += n_bytes;
    text->data[text->n_bytes] = 0;
}

void tagc_text_add(tagc_text *text, const char *words) {
    tagc_text_add_bytes(text, words, strlen(words));
}

void tagc_text_printf(tagc_text *text, const char *format, ...) {
    char few[512];
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(few, sizeof few, format, arguments);
    va_end(arguments);
    if (n < 0) {
        text->failed = 1;
    } else if ((size_t)n < sizeof few) {
        tagc_text_add_bytes(text, few, (size_t)n);
    } else if (make_room(text, (size_t)n)) {
        va_start(arguments, format);
        vsnprintf(text->data + text->n_bytes, (size_t)n + 1, format, arguments);
        va_end(arguments);
        text->n_bytes += (size_t)n;
    }
}

/* Length of a well-formed UTF-8 character, 0 for anything else. */
static size_t utf8_length(const unsigned char *c, uint32_t *code) {
    size_t n = c[0] < 0x80 ? 1 : c[0] >= 0xc2 && c[0] < 0xe0 ? 2 : (c[0] & 0xf0) == 0xe0 ? 3 : 4;
    if (n == 4 && (c[0] < 0xf0 || c[0] > 0xf4)) return 0;
    *code = n == 1 ? c[0] : c[0] & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((c[i] & 0xc0) != 0x80) return 0; /* the closing 0 ends here, too */
        *code = *code << 6 | (c[i] & 0x3f);
    }
    int is_overlong = (n == 3 && *code < 0x800) || (n == 4 && *code < 0x10000);
    return is_overlong || (*code >= 0xd800 && *code < 0xe000) || *code > 0x10ffff ? 0 : n;
}

size_t tagc_text_character(const char *words, int *is_valid) {
    uint32_t code = 0;
    size_t n = utf8_length((const unsigned char *)words, &code);
    /* Besides the control characters: those that turn the direction of writing, and two that XML forbids. */
    int is_control = code < 0x20 || (code >= 0x7f && code < 0xa0) || (code >= 0x202a && code <= 0x202e) ||
                     (code >= 0x2066 && code <= 0x2069) || (code & 0xfffe) == 0xfffe;
    *is_valid = n > 0 && !is_control;
    return n > 0 ? n : 1;
}

size_t tagc_text_length(const char *words) {
    size_t n = 0;
    int is_valid;
    for (; *words; n++) words += tagc_text_character(words, &is_valid);
    return n;
}

void tagc_text_escaped(tagc_text *text, const char *words) {
    while (*words) {
        int is_valid;
        size_t n = tagc_text_character(words, &is_valid);
        const char *instead = !is_valid        ? "\xef\xbf\xbd"
                              : *words == '<'  ? "&lt;"
                              : *words == '>'  ? "&gt;"
                              : *words == '&'  ? "&amp;"
                              : *words == '"'  ? "&quot;"
                              : *words == '\'' ? "&#39;"
                                               : NULL;
        if (instead)
            tagc_text_add(text, instead);
        else
            tagc_text_add_bytes(text, words, n);
        words += n;
    }
}

void tagc_text_plain(tagc_text *text, const char *words) {
    while (*words) {
        int is_valid;
        size_t n = tagc_text_character(words, &is_valid);
        tagc_text_add_bytes(text, is_valid ? words : "?", is_valid ? n : 1);
        words += n;
    }
}

static tagc_status cannot_write(const char *path, int error) {
    return tagc_fail(TAGC_ERR_IO, "cannot write %s: %s", path, strerror(error));
}

tagc_status tagc_text_write(const tagc_text *text, const char *path) {
    char partial[PATH_BYTES];
    struct stat about;
    if (text->failed) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %s", path);
    if (snprintf(partial, sizeof partial, "%s.partial", path) >= PATH_BYTES)
        return cannot_write(path, ENAMETOOLONG);
    int is_dir = stat(path, &about) == 0 && S_ISDIR(about.st_mode), exists = lstat(path, &about) == 0;
    if (is_dir) return cannot_write(path, EISDIR);
    /* A pipe, a device or a link is written to as it is. */
    int is_plain = !exists || S_ISREG(about.st_mode);
    FILE *file = fopen(is_plain ? partial : path, "w");
    if (!file) return cannot_write(path, errno);
    int failed = text->n_bytes > 0 && fwrite(text->data, 1, text->n_bytes, file) != text->n_bytes;
    failed |= fflush(file) != 0;
    int error = errno;
    if (fclose(file) != 0 && !failed) {
        failed = 1;
        error = errno;
    }
    if (!failed && (!is_plain || rename(partial, path) == 0)) return TAGC_OK;
    if (!failed) error = errno;
    if (is_plain) unlink(partial);
    return cannot_write(path, error);
}

/* ---- numbers ---- */

static char *none(char *out) {
    strcpy(out, "-");
    return out;
}

/* Three digits, at most `digits` of them behind the point. */
static int digits_of(double value) {
    double size = fabs(value);
    return size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
}

static char *scaled(double value, const char *const *units, const double *scales, int n, char *out) {
    if (!isfinite(value)) return none(out);
    int i = 0;
    while (i + 1 < n && fabs(value) >= 0.9995 * scales[i + 1]) i++;
    double shown = value / scales[i];
    if (fabs(shown) >= 1e5)
        snprintf(out, TAGC_NUMBER_BYTES, "%.3g%s", shown, units[i]);
    else
        snprintf(out, TAGC_NUMBER_BYTES, "%.*f%s", digits_of(shown), shown, units[i]);
    return out;
}

#define SCALED(value, units, scales, out)                                                                    \
    scaled(value, units, scales, (int)(sizeof(units) / sizeof(units)[0]), out)

char *tagc_number_time(double seconds, char *out) {
    static const char *const units[] = {" ns", " µs", " ms", " s"};
    static const double scales[] = {1e-9, 1e-6, 1e-3, 1};
    if (seconds == 0) return strcpy(out, "0 s");
    return SCALED(seconds, units, scales, out);
}

char *tagc_number_bytes(double n_bytes, char *out) {
    static const char *const units[] = {" B", " kB", " MB", " GB", " TB"};
    static const double scales[] = {1, 1e3, 1e6, 1e9, 1e12};
    if (n_bytes == 0) return strcpy(out, "0 B");
    return SCALED(n_bytes, units, scales, out);
}

char *tagc_number_rate(double bits_per_s, char *out) {
    static const char *const units[] = {" bit/s", " kbit/s", " Mbit/s", " Gbit/s", " Tbit/s"};
    static const double scales[] = {1, 1e3, 1e6, 1e9, 1e12};
    return SCALED(bits_per_s, units, scales, out);
}

char *tagc_number_count(double n, char *out) {
    static const char *const units[] = {"", " k", " M", " G", " T"};
    static const double scales[] = {1, 1e3, 1e6, 1e9, 1e12};
    if (isfinite(n) && fabs(n) < 1e4 && n == floor(n)) {
        snprintf(out, TAGC_NUMBER_BYTES, "%.0f", n);
        return out;
    }
    return SCALED(n, units, scales, out);
}

char *tagc_number_fixed(double value, int digits, char *out) {
    if (!isfinite(value)) return none(out);
    snprintf(out, TAGC_NUMBER_BYTES, fabs(value) < 1e7 ? "%.*f" : "%.*g", digits, value);
    return out;
}

char *tagc_number_percent(double share, char *out) {
    double percent = 100 * share;
    if (!isfinite(percent)) return none(out);
    snprintf(out, TAGC_NUMBER_BYTES, fabs(percent) < 1e6 ? "%.1f %%" : "%.3g %%", percent);
    return out;
}

char *tagc_number_change(double share, char *out) {
    double percent = 100 * share;
    if (!isfinite(percent)) return none(out);
    const char *format = fabs(percent) >= 1e6 ? "%+.3g %%" : fabs(percent) >= 9.995 ? "%+.1f %%" : "%+.2f %%";
    snprintf(out, TAGC_NUMBER_BYTES, format, percent);
    return out;
}
