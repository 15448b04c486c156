/* Messages of tagc/changes.h that arrive, whatever they hold: taken or refused, and then nothing is touched. Each input is decoded as it
 * is, and once more with a header and a checksum to match, so that the checks behind those are reached, too. */
#include "exchange/wire.h"
#include "tagc/changes.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void require(int holds) {
    if (!holds) abort();
}

static void decode(int width, const uint8_t *message, size_t n_bytes, size_t n) {
    uint8_t *copy = malloc(n_bytes ? n_bytes : 1),
            *values = malloc(n * (size_t)width); /* exact, for a sanitizer */
    tagc_changes_form form;
    require(copy && values);
    memcpy(copy, message, n_bytes);
    memset(values, 0xa5, n * (size_t)width);
    tagc_status checked = tagc_changes_check(width, copy, n_bytes, n, &form);
    tagc_status applied = tagc_changes_apply(width, copy, n_bytes, values, n);
    require(applied == checked ||
            (checked == TAGC_OK && applied == TAGC_ERR_MISMATCH)); /* of another array */
    for (size_t i = 0; i < n * (size_t)width && checked != TAGC_OK; i++) require(values[i] == 0xa5);
    free(copy);
    free(values);
}

/* The first bytes say what is expected, the others are the message. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    if (n_bytes < 4) return 0;
    int width = 1 << data[0] % 3;
    size_t n = 1 + (data[1] | (size_t)data[2] << 8) % 9000;
    decode(width, data + 4, n_bytes - 4, n);

    size_t n_body = n_bytes - 4 > TAGC_WIRE_HEADER_BYTES ? n_bytes - 4 - TAGC_WIRE_HEADER_BYTES : 0;
    uint8_t *message = calloc(TAGC_WIRE_HEADER_BYTES + n_body, 1);
    require(message != NULL);
    if (n_body > 0) memcpy(message + TAGC_WIRE_HEADER_BYTES, data + 4 + TAGC_WIRE_HEADER_BYTES, n_body);
    tagc_wire_header header = {.kind = TAGC_WIRE_CHANGES,
                               .coding = data[3] % 4 != 0,
                               .k = (uint32_t)width,
                               .n_elems = n,
                               .body_bytes = n_body};
    tagc_wire_write(&header, message);
    decode(width, message, TAGC_WIRE_HEADER_BYTES + n_body, n);
    free(message);
    return 0;
}
