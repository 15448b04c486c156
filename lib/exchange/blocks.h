/* What messages of tagc/blocks.h have in common on the processor and on a device. */
#ifndef TAGC_EXCHANGE_BLOCKS_H
#define TAGC_EXCHANGE_BLOCKS_H

#include "codec/values.h"
#include "tagc/blocks.h"

#define TAGC_BLOCKS_MAX_ELEMS (UINT64_C(0x100000000) - 64) /* of one message */

/* Reads and checks the caller's options into *options, which is not `from`, and gives the format that they and n_elems ask for. */
tagc_status tagc_blocks_read(const tagc_blocks_options *from, uint64_t n_elems, tagc_blocks_options *options,
                             tagc_value_format *format);

/* `status` unless n_bytes is the length of a message of n_elems values. */
tagc_status tagc_blocks_check_length(tagc_status status, const tagc_value_format *format, uint64_t n_elems,
                                     uint64_t n_bytes);

#endif
