/* Messages of tagc/blocks.h that arrive, whatever they hold: taken or refused, and nothing beside the values is touched. Each input is
 * decoded as it is, and once more with a header and a checksum to match, so that the checks behind those are reached, too. */
#include "exchange/wire.h"
#include "tagc/blocks.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void require(int holds) {
    if (!holds) abort();
}

static void decode(const tagc_blocks_options *options, const uint8_t *message, size_t n_bytes, size_t n) {
    size_t width = options->element == TAGC_FORMAT_BF16 ? 2 : 4;
    uint8_t *copy = malloc(n_bytes ? n_bytes : 1), *values = malloc(n * width); /* exact, for a sanitizer */
    require(copy && values);
    memcpy(copy, message, n_bytes);
    memset(values, 0xa5, n * width);
    if (tagc_blocks_decode(options, copy, n_bytes, values, n) == TAGC_OK) {
        for (size_t i = 0; i < n && width == 4; i++) require(!isinf(((float *)(void *)values)[i]));
    } else {
        for (size_t i = 0; i < n * width; i++) require(values[i] == 0xa5);
    }
    free(copy);
    free(values);
}

/* The first bytes say what is expected, the others are the message. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    if (n_bytes < 4) return 0;
    tagc_blocks_options options;
    tagc_blocks_options_init(&options);
    options.format = TAGC_FORMAT_INT8 + data[0] % 3;
    options.block = 16 << data[1] % 9;
    options.element = data[0] >= 128 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
    size_t n = 1 + (data[2] | (size_t)data[3] << 8) % 3000;
    uint64_t n_message;
    require(tagc_blocks_bytes(&options, n, &n_message) == TAGC_OK);
    decode(&options, data + 4, n_bytes - 4, n);

    uint8_t *message = calloc((size_t)n_message, 1);
    require(message != NULL);
    memcpy(message, data + 4, n_bytes - 4 < n_message ? n_bytes - 4 : (size_t)n_message);
    tagc_wire_header header = {.kind = TAGC_WIRE_BLOCKS,
                               .coding = options.format,
                               .k = (uint32_t)options.block,
                               .n_elems = n,
                               .body_bytes = n_message - TAGC_WIRE_HEADER_BYTES};
    tagc_wire_write(&header, message);
    decode(&options, message, (size_t)n_message, n);
    free(message);
    return 0;
}
