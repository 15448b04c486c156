/* Headers of token files, read from and written to memory, so that tests and fuzzers need no file.
 *
 * Ours, little-endian; python/tagc/commands/data.py writes it, too:
 *
 *   byte 0       8       12      16      20      24       32         40
 *        +-------+-------+-------+-------+-------+--------+----------+
 *        | magic |   2   | token | vocab |   0   |   n    | XXH3 of  |
 *        |       |       | bytes | size  |       | tokens | payload  |
 *        +-------+-------+-------+-------+-------+--------+----------+
 *   byte 40                   104             108     120            128
 *        +--------------------+---------------+-------+---------------+
 *        | tokenizer,         | end of text,  |   0   | XXH3 of       |
 *        | padded with zeros  | 2^32-1: none  |       | bytes 0..119  |
 *        +--------------------+---------------+-------+---------------+
 *   128: n_tokens tokens of 1, 2 or 4 bytes each, and nothing after them
 *
 * XXH3 of 64 bits without a seed is tagc_checksum(). Version 1 has XXH64 in its place, and is read. */
#ifndef TAGC_DATA_TOKEN_FILE_H
#define TAGC_DATA_TOKEN_FILE_H

#include "data/data.h"

enum { TAGC_TOKEN_HEADER_BYTES = 128, TAGC_LLMC_HEADER_BYTES = 1024 };

/* What the n_bytes of a file called `name` hold. */
tagc_status tagc_token_file_parse(const void *data, uint64_t n_bytes, const char *name,
                                  tagc_tokens_info *out);

/* payload (n_tokens of token_bytes): what will follow the header. */
void tagc_token_file_header(const tagc_tokens_info *info, const uint8_t *payload,
                            uint8_t header[TAGC_TOKEN_HEADER_BYTES]);

#endif
