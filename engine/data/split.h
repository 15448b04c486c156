/* GPT-2's first step: cuts a text into words, across which byte pair encoding never merges. Hand-written instead of a regular
 * expression, because the pattern
 *
 *   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 *
 * needs one character of lookahead and no more. */
#ifndef TAGC_DATA_SPLIT_H
#define TAGC_DATA_SPLIT_H

#include <stddef.h>
#include <stdint.h>

/* Bytes of the word at text[0], at least 1; n_bytes >= 1 go to the end of the text. */
size_t tagc_split_word(const uint8_t *text, size_t n_bytes);

/* The most bytes, from the start, that can be encoded alone without a change to the tokens of the whole: up to the last white
 * space that follows something else. If there is none, all complete characters: a text with a megabyte between two blanks is
 * cut between characters. At least 1. */
size_t tagc_split_safe(const uint8_t *text, size_t n_bytes);

#endif
