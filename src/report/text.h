/* A text that grows, and the ways in which values become words: escaped for HTML, cleaned for terminals, numbers with
 * a unit that fits. Growth may fail; that is remembered and told once, when the text is written. */
#ifndef TAGC_REPORT_TEXT_H
#define TAGC_REPORT_TEXT_H

#include "tagc/tagc.h"
#include <stddef.h>

typedef struct tagc_text {
    char *data; /* ends in 0 once anything was added */
    size_t n_bytes, capacity;
    int failed;
} tagc_text;

void tagc_text_destroy(tagc_text *text);
void tagc_text_add(tagc_text *text, const char *words);
void tagc_text_add_bytes(tagc_text *text, const char *bytes, size_t n_bytes);
void tagc_text_printf(tagc_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* For HTML and SVG, inside elements and attributes: what is markup becomes text, what is not UTF-8 or a control
 * character becomes U+FFFD. */
void tagc_text_escaped(tagc_text *text, const char *words);
/* For terminals: control characters and what is not UTF-8 become "?". */
void tagc_text_plain(tagc_text *text, const char *words);

/* Bytes of the character at `words` (not at its end), 1 to 4; *is_valid: 0 for control characters and what is not
 * UTF-8 (then 1 byte). */
size_t tagc_text_character(const char *words, int *is_valid);
/* Characters, as a terminal shows them. */
size_t tagc_text_length(const char *words);

/* The whole text as a file, or no file: written under another name and renamed. */
tagc_status tagc_text_write(const tagc_text *text, const char *path);

enum { TAGC_NUMBER_BYTES = 32 };

/* "12.3 ms", "1.2 GB", "1.95 Gbit/s", "0.0123"; "-" for what is not finite. Each returns `out` (TAGC_NUMBER_BYTES). */
char *tagc_number_time(double seconds, char *out);
char *tagc_number_bytes(double n_bytes, char *out);
char *tagc_number_rate(double bits_per_s, char *out);
char *tagc_number_count(double n, char *out);                 /* 162 M */
char *tagc_number_fixed(double value, int digits, char *out); /* in %g where it would be too long */
char *tagc_number_percent(double share, char *out);           /* 0.123: "12.3 %" */
char *tagc_number_change(double share, char *out);            /* 0.123: "+12.3 %" */

#endif
