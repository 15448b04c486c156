/* Headers of token files, read from and written to memory, so that tests and fuzzers need no file.
 *
 * Ours, little-endian:
 *
 *   byte 0       8       12      16      20      24       32         40
 *        +-------+-------+-------+-------+-------+--------+----------+
 *        | magic |   1   | token | vocab |   0   |   n    | XXH64 of |
 *        |       |       | bytes | size  |       | tokens | payload  |
 *        +-------+-------+-------+-------+-------+--------+----------+
 *   byte 40                   104             108     120            128
 *        +--------------------+---------------+-------+---------------+
 *        | tokenizer,         | end of text,  |   0   | XXH64 of      |
 *        | padded with zeros  | 2^32-1: none  |       | bytes 0..119  |
 *        +--------------------+---------------+-------+---------------+
 *   128: n_tokens tokens of 1, 2 or 4 bytes each, and nothing after them */
#ifndef TAGC_DATA_TOKEN_FORMAT_H
#define TAGC_DATA_TOKEN_FORMAT_H

#include "data/data.h"

enum { TAGC_TOKEN_HEADER_BYTES = 128, TAGC_LLMC_HEADER_BYTES = 1024 };

/* What the `n_bytes` of a whole file called `name` hold. `n_at_hand` of them are at `data`: at least the
 * header's, or all. With all at hand the payload's checksum is compared as well. */
tagc_status tagc_token_format_parse(const void *data, uint64_t n_at_hand, uint64_t n_bytes,
                                    tagc_tokens_format format, const char *name, tagc_tokens_info *out);

/* The bytes that one token of a vocabulary needs: 1, 2 or 4. */
int tagc_token_format_width(uint32_t vocab_size);

void tagc_token_format_write(const tagc_tokens_info *info, uint64_t payload_checksum,
                             uint8_t header[TAGC_TOKEN_HEADER_BYTES]);

#endif
