/* Messages of tagc/blocks.h: a header as all messages have (wire.h), then values as the code `blocks` lays them out
 * (codec/values.h). Values pass through in pieces that stay in the cache. */
#include "exchange/blocks.h"
#include "codec/bf16.h"
#include "core/sized.h"
#include "core/status.h"
#include "exchange/wire.h"

enum { PIECE = TAGC_VALUES_MAX_BLOCK }; /* whole blocks of any size */

static const tagc_blocks_options default_options = {
    .format = TAGC_FORMAT_INT8, .block = 64, .element = TAGC_FORMAT_FP32};
static const tagc_sized options_struct = {"tagc_blocks_options", sizeof(tagc_blocks_options),
                                          offsetof(tagc_blocks_options, seed) +
                                              sizeof(uint64_t), /* the last field of the first release */
                                          &default_options};

void tagc_blocks_options_init_sized(tagc_blocks_options *options, size_t struct_bytes) {
    tagc_sized_init(&options_struct, options, struct_bytes);
}

static tagc_status check_options(const tagc_blocks_options *o) {
    if (o->format < TAGC_FORMAT_INT8 || o->format > TAGC_FORMAT_INT2)
        return tagc_fail(TAGC_ERR_ARGUMENT, "options.format is %d, must be %d (INT8), %d (INT4) or %d (INT2)",
                         o->format, TAGC_FORMAT_INT8, TAGC_FORMAT_INT4, TAGC_FORMAT_INT2);
    if (o->block < 16 || o->block > TAGC_VALUES_MAX_BLOCK || (o->block & (o->block - 1)))
        return tagc_fail(TAGC_ERR_ARGUMENT, "options.block is %d, must be a power of two in [16, %d]",
                         o->block, TAGC_VALUES_MAX_BLOCK);
    if (o->element != TAGC_FORMAT_FP32 && o->element != TAGC_FORMAT_BF16)
        return tagc_fail(TAGC_ERR_ARGUMENT, "options.element is %d, must be %d (FP32) or %d (BF16)",
                         o->element, TAGC_FORMAT_FP32, TAGC_FORMAT_BF16);
    if (o->rounding != TAGC_ROUNDING_NEAREST && o->rounding != TAGC_ROUNDING_STOCHASTIC)
        return tagc_fail(TAGC_ERR_ARGUMENT, "options.rounding is %d, must be %d (NEAREST) or %d (STOCHASTIC)",
                         o->rounding, TAGC_ROUNDING_NEAREST, TAGC_ROUNDING_STOCHASTIC);
    if (o->rounding == TAGC_ROUNDING_STOCHASTIC && o->format == TAGC_FORMAT_INT2)
        return tagc_fail(
            TAGC_ERR_UNSUPPORTED,
            "options.rounding is STOCHASTIC, which is for INT8 and INT4; options.format is INT2");
    return TAGC_OK;
}

tagc_status tagc_blocks_read(const tagc_blocks_options *from, uint64_t n_elems, tagc_blocks_options *options,
                             tagc_value_format *format) {
    if (!from) return tagc_fail(TAGC_ERR_ARGUMENT, "options is NULL");
    TAGC_TRY(tagc_sized_read(&options_struct, from, options));
    TAGC_TRY(check_options(options));
    if (n_elems > TAGC_BLOCKS_MAX_ELEMS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_elems is %llu, must be in [0, %llu]",
                         (unsigned long long)n_elems, (unsigned long long)TAGC_BLOCKS_MAX_ELEMS);
    *format = tagc_values_format(options->format, options->block, 0);
    format->marks_nonfinite = 1;
    format->is_stochastic = options->rounding == TAGC_ROUNDING_STOCHASTIC;
    format->seed = tagc_residual_seed(options->seed, 0, 0, 0);
    return TAGC_OK;
}

static uint64_t message_bytes(const tagc_value_format *format, uint64_t n_elems) {
    return TAGC_WIRE_HEADER_BYTES + tagc_values_bytes(format, (size_t)n_elems);
}

tagc_status tagc_blocks_check_length(tagc_status status, const tagc_value_format *format, uint64_t n_elems,
                                     uint64_t n_bytes) {
    uint64_t expected = message_bytes(format, n_elems);
    if (n_bytes == expected) return TAGC_OK;
    return tagc_fail(status, "n_bytes is %llu, a message of %llu values has %llu",
                     (unsigned long long)n_bytes, (unsigned long long)n_elems, (unsigned long long)expected);
}

static tagc_status check_arrays(const void *values, const void *message, uint64_t n_elems) {
    if (!values && n_elems > 0) return tagc_fail(TAGC_ERR_ARGUMENT, "values is NULL");
    if (!message) return tagc_fail(TAGC_ERR_ARGUMENT, "message is NULL");
    return TAGC_OK;
}

tagc_status tagc_blocks_bytes(const tagc_blocks_options *options, uint64_t n_elems, uint64_t *n_bytes) {
    tagc_blocks_options read = {0};
    tagc_value_format format;
    if (!n_bytes) return tagc_fail(TAGC_ERR_ARGUMENT, "n_bytes is NULL");
    TAGC_TRY(tagc_blocks_read(options, n_elems, &read, &format));
    *n_bytes = message_bytes(&format, n_elems);
    return TAGC_OK;
}

tagc_status tagc_blocks_encode(const tagc_blocks_options *options, const void *values, uint64_t n_elems,
                               void *message, uint64_t n_bytes) {
    tagc_blocks_options read = {0};
    tagc_value_format format;
    float room[PIECE];
    TAGC_TRY(tagc_blocks_read(options, n_elems, &read, &format));
    TAGC_TRY(check_arrays(values, message, n_elems));
    TAGC_TRY(tagc_blocks_check_length(TAGC_ERR_ARGUMENT, &format, n_elems, n_bytes));
    uint8_t *body = (uint8_t *)message + TAGC_WIRE_HEADER_BYTES;
    for (size_t at = 0, n_all = (size_t)n_elems; at < n_all; at += PIECE) {
        size_t n = n_all - at < PIECE ? n_all - at : PIECE;
        const float *piece = room;
        if (read.element == TAGC_FORMAT_BF16)
            tagc_bf16_widen((const uint16_t *)values + at, room, n);
        else
            piece = (const float *)values + at;
        tagc_values_encode(&format, piece, NULL, NULL, at, n, n_all, body);
    }
    tagc_wire_header header = {.kind = TAGC_WIRE_BLOCKS,
                               .coding = read.format,
                               .k = (uint32_t)read.block,
                               .n_elems = n_elems,
                               .body_bytes = n_bytes - TAGC_WIRE_HEADER_BYTES};
    tagc_wire_write(&header, message);
    return TAGC_OK;
}

/* Is it a sound message of what this end expects? The checksum has been compared, so what differs is what the sender wrote. */
static tagc_status check_header(const tagc_wire_header *header, const tagc_blocks_options *o,
                                uint64_t n_elems) {
    if (header->kind != TAGC_WIRE_BLOCKS)
        return tagc_fail(TAGC_ERR_CORRUPT, "message kind is %d, expected %d (blocks)", header->kind,
                         TAGC_WIRE_BLOCKS);
    if (header->n_elems != n_elems)
        return tagc_fail(TAGC_ERR_MISMATCH, "the message has %llu values, expected %llu",
                         (unsigned long long)header->n_elems, (unsigned long long)n_elems);
    if (header->coding != o->format)
        return tagc_fail(TAGC_ERR_MISMATCH, "the message is of format %d, expected %d", header->coding,
                         o->format);
    if (header->k != (uint32_t)o->block)
        return tagc_fail(TAGC_ERR_MISMATCH, "the message has blocks of %u values, expected %d", header->k,
                         o->block);
    return TAGC_OK;
}

tagc_status tagc_blocks_decode(const tagc_blocks_options *options, const void *message, uint64_t n_bytes,
                               void *values, uint64_t n_elems) {
    tagc_blocks_options read = {0};
    tagc_value_format format;
    tagc_wire_header header;
    float room[PIECE];
    TAGC_TRY(tagc_blocks_read(options, n_elems, &read, &format));
    TAGC_TRY(check_arrays(values, message, n_elems));
    TAGC_TRY(tagc_wire_read(message, n_bytes, &header));
    TAGC_TRY(check_header(&header, &read, n_elems));
    TAGC_TRY(tagc_blocks_check_length(TAGC_ERR_CORRUPT, &format, n_elems, n_bytes));
    const uint8_t *body = (const uint8_t *)message + TAGC_WIRE_HEADER_BYTES;
    if (!tagc_values_valid(&format, body, (size_t)n_elems))
        return tagc_fail(TAGC_ERR_CORRUPT,
                         "a scale of the message, or a bit behind its last value, is damaged");
    for (size_t at = 0, n_all = (size_t)n_elems; at < n_all; at += PIECE) {
        size_t n = n_all - at < PIECE ? n_all - at : PIECE;
        float *piece = read.element == TAGC_FORMAT_BF16 ? room : (float *)values + at;
        tagc_values_decode(&format, body, at, n, n_all, piece);
        if (piece == room) tagc_bf16_narrow(room, (uint16_t *)values + at, n);
    }
    return TAGC_OK;
}
