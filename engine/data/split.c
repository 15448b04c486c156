/* See split.h. */
#include "data/split.h"

#include "data/utf8.h"
#include <string.h>

static size_t contraction(const uint8_t *text, size_t n_bytes) {
    if (n_bytes < 2 || text[0] != '\'') return 0;
    if (text[1] == 's' || text[1] == 't' || text[1] == 'm' || text[1] == 'd') return 2;
    if (n_bytes < 3) return 0;
    return memcmp(text + 1, "re", 2) == 0 || memcmp(text + 1, "ve", 2) == 0 || memcmp(text + 1, "ll", 2) == 0
               ? 3
               : 0;
}

/* Bytes of the run of `class` that starts at text[0], and of its last character. */
static size_t run_of(const uint8_t *text, size_t n_bytes, enum tagc_char_class class, size_t *n_last) {
    size_t i = 0;
    *n_last = 0;
    while (i < n_bytes) {
        uint32_t code;
        size_t length = tagc_utf8_decode_any(text + i, n_bytes - i, &code);
        if (tagc_char_class(code) != class) break;
        *n_last = length;
        i += length;
    }
    return i;
}

size_t tagc_split_word(const uint8_t *text, size_t n_bytes) {
    size_t n_short = contraction(text, n_bytes), n_last;
    if (n_short > 0) return n_short;

    size_t n_blank = text[0] == ' ' && n_bytes > 1;
    uint32_t code;
    tagc_utf8_decode_any(text + n_blank, n_bytes - n_blank, &code);
    enum tagc_char_class class = tagc_char_class(code);
    if (class != TAGC_CHAR_SPACE) return n_blank + run_of(text + n_blank, n_bytes - n_blank, class, &n_last);

    /* White space of more than one character leaves its last one to the word that follows. */
    size_t n_run = run_of(text, n_bytes, TAGC_CHAR_SPACE, &n_last);
    return n_run == n_bytes || n_run == n_last ? n_run : n_run - n_last;
}

/* Whether a character other than white space ends before text[i]; i >= 1. */
static int ends_word(const uint8_t *text, size_t i) {
    size_t start = i - 1;
    while (start > 0 && i - start < 4 && (text[start] & 0xc0) == 0x80) start--;
    uint32_t code;
    size_t length = tagc_utf8_decode_any(text + start, i - start, &code);
    return length != i - start || tagc_char_class(code) != TAGC_CHAR_SPACE;
}

size_t tagc_split_safe(const uint8_t *text, size_t n_bytes) {
    for (size_t i = n_bytes; --i > 0;)
        if ((text[i] == ' ' || text[i] == '\n') && ends_word(text, i)) return i;
    size_t n_complete = n_bytes;
    for (size_t back = 1; back <= 3 && back < n_bytes; back++) {
        uint32_t code;
        if (tagc_utf8_decode(text + n_bytes - back, back, &code) == 0) n_complete = n_bytes - back;
    }
    return n_complete;
}
