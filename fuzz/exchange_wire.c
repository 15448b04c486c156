/* What a rank does with an index, union or leftover message or the header of a fragment, whatever it holds. Each input is read as it is,
 * and once more with a checksum made to match, so that the checks behind the checksum are reached, too. */
#include "codec/bitmap.h"
#include "core/status.h"
#include "exchange/wire.h"
#include "paper/index_body.h"
#include "tagc/paper.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void require(int holds) {
    if (!holds) abort();
}

static void *exactly(size_t n_bytes) {
    void *memory = calloc(n_bytes ? n_bytes : 1, 1);
    require(memory != NULL);
    return memory;
}

static void check_header(const tagc_wire_header *header, size_t n_bytes) {
    require(header->kind >= TAGC_WIRE_INDEX && header->kind <= TAGC_WIRE_LAST);
    int is_fragment = header->kind == TAGC_WIRE_FRAGMENT;
    require(header->coding >= 0 &&
            header->coding <= (is_fragment || header->kind == TAGC_WIRE_BLOCKS ? (int)TAGC_FORMAT_INT2
                               : header->kind == TAGC_WIRE_CHANGES             ? 1
                               : header->kind == TAGC_WIRE_LOSSLESS            ? 0
                               : header->kind == TAGC_WIRE_STATE               ? (int)TAGC_FORMAT_INT4
                                                                               : (int)TAGC_INDEX_SUM1));
    require(isfinite(header->max_abs) && header->max_abs >= 0);
    require(header->status <= TAGC_LAST_STATUS);
    require(header->index_bytes <= header->body_bytes);
    if (is_fragment) {
        require(n_bytes == TAGC_WIRE_HEADER_BYTES && !(header->flags && header->body_bytes));
        return;
    }
    if (header->kind == TAGC_WIRE_LOSSLESS) {
        require(n_bytes == TAGC_WIRE_HEADER_BYTES);
        return;
    }
    require(header->body_bytes == n_bytes - TAGC_WIRE_HEADER_BYTES);
}

/* The body as the index of as many elements as it has room for, less some at the end. */
static void check_body(const tagc_wire_header *header, const uint8_t *message, size_t n_bytes) {
    size_t n_body = (n_bytes - TAGC_WIRE_HEADER_BYTES) / 8 * 8;
    size_t n = header->coding == TAGC_INDEX_SUM4 ? 2 * n_body : 8 * n_body;
    size_t n_short = (size_t)(header->n_elems % 16);
    n = n > n_short ? n - n_short : n;
    if (n == 0 || tagc_index_body_bytes(header->coding, n) != n_body) return;
    uint8_t *body = exactly(n_body), *scratch = exactly(tagc_bitmap_bytes(n));
    memcpy(body, message + TAGC_WIRE_HEADER_BYTES, n_body);
    if (tagc_index_check(header->coding, body, n, header->n_items, scratch) == TAGC_OK) {
        const uint8_t *bits = tagc_index_bits(header->coding, body, n, scratch);
        uint32_t *positions = exactly(header->n_items * sizeof *positions);
        require(tagc_bitmap_indices(bits, n, positions) == header->n_items);
        require(tagc_index_check_positions(positions, header->n_items, bits, n) == TAGC_OK);
        free(positions);
    }
    size_t n_positions = n_body / sizeof(uint32_t);
    (void)tagc_index_check_positions((const uint32_t *)(const void *)body, n_positions,
                                     tagc_index_bits(header->coding, body, n, scratch), n);
    free(body);
    free(scratch);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    tagc_wire_header header = {0};
    if (tagc_wire_read(data, n_bytes, &header) == TAGC_OK) {
        check_header(&header, n_bytes);
        if (header.kind != TAGC_WIRE_FRAGMENT) check_body(&header, data, n_bytes);
    }
    if (n_bytes < TAGC_WIRE_HEADER_BYTES) return 0;
    uint8_t *message = exactly(n_bytes);
    memcpy(message, data, n_bytes);
    header = (tagc_wire_header){.kind = data[5],
                                .coding = data[6],
                                .flags = data[7] & 1,
                                .rank = data[8],
                                .k = data[12],
                                .n_elems = data[16],
                                .status = data[36] % 16,
                                .body_bytes = n_bytes - TAGC_WIRE_HEADER_BYTES};
    memcpy(&header.n_items, data + 24, sizeof header.n_items);
    memcpy(&header.max_abs, data + 32, sizeof header.max_abs);
    memcpy(&header.body_sum, data + 28, sizeof header.body_sum);
    memcpy(&header.index_bytes, data + 36, sizeof header.index_bytes);
    if (header.kind == TAGC_WIRE_FRAGMENT) memcpy(&header.body_bytes, data + 40, sizeof header.body_bytes);
    tagc_wire_write(&header, message);
    tagc_wire_header back;
    if (tagc_wire_read(message, n_bytes, &back) == TAGC_OK) {
        check_header(&back, n_bytes);
        require(tagc_wire_expect(&back, &header) == TAGC_OK);
        if (back.kind != TAGC_WIRE_FRAGMENT) check_body(&back, message, n_bytes);
    }
    free(message);
    return 0;
}
