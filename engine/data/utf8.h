/* Characters of a text: decoding, and what GPT-2's pattern asks about them. */
#ifndef TAGC_DATA_UTF8_H
#define TAGC_DATA_UTF8_H

#include <stddef.h>
#include <stdint.h>

enum tagc_char_class { TAGC_CHAR_OTHER, TAGC_CHAR_LETTER, TAGC_CHAR_NUMBER, TAGC_CHAR_SPACE };

#define TAGC_CODE_INVALID 0xffffffffu

/* Decodes the character at text[0]; n_bytes >= 1. Returns its length, 1 to 4; 0 when the text ends within a
 * so far valid character; -1 when the bytes are not UTF-8 (overlong, surrogate, above U+10FFFF, stray). */
int tagc_utf8_decode(const uint8_t *text, size_t n_bytes, uint32_t *code);

/* The same for texts taken as they come: what is not UTF-8 is a one-byte character TAGC_CODE_INVALID. */
size_t tagc_utf8_decode_any(const uint8_t *text, size_t n_bytes, uint32_t *code);

/* How many bytes from the start are complete, valid characters. */
size_t tagc_utf8_valid_prefix(const uint8_t *text, size_t n_bytes);

enum tagc_char_class tagc_char_class(uint32_t code);

#endif
