/* Messages of tagc/changes.h: a header as all messages have (wire.h), then what codec/changes.h describes. */
#include "tagc/changes.h"

#include "codec/changes.h"
#include "core/memory.h"
#include "core/status.h"
#include "exchange/wire.h"

#define MAX_ELEMS (UINT64_C(0x100000000) - 64)
/* Usually fewer than 1 / FEW of the elements change. If not, room for a quarter is taken, then for all. */
#define FEW 16

static tagc_status check_size(int element_bytes, uint64_t n_elems) {
    if (element_bytes != 1 && element_bytes != 2 && element_bytes != 4)
        return tagc_fail(TAGC_ERR_ARGUMENT, "element_bytes is %d, must be 1, 2 or 4", element_bytes);
    if (n_elems > MAX_ELEMS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_elems is %llu, must be in [0, %llu]",
                         (unsigned long long)n_elems, (unsigned long long)MAX_ELEMS);
    return TAGC_OK;
}

static uint64_t max_bytes_of(int element_bytes, uint64_t n_elems) {
    return TAGC_WIRE_HEADER_BYTES + tagc_changes_body_max_bytes((size_t)element_bytes, (size_t)n_elems);
}

tagc_status tagc_changes_max_bytes(int element_bytes, uint64_t n_elems, uint64_t *n_bytes) {
    if (!n_bytes) return tagc_fail(TAGC_ERR_ARGUMENT, "n_bytes is NULL");
    TAGC_TRY(check_size(element_bytes, n_elems));
    *n_bytes = max_bytes_of(element_bytes, n_elems);
    return TAGC_OK;
}

static tagc_status check_room(int element_bytes, const void *after, uint64_t n_elems, const void *message,
                              uint64_t max_bytes, const uint64_t *n_bytes) {
    TAGC_TRY(check_size(element_bytes, n_elems));
    uint64_t needed = max_bytes_of(element_bytes, n_elems);
    if (!after && n_elems > 0) return tagc_fail(TAGC_ERR_ARGUMENT, "after is NULL");
    if (!message) return tagc_fail(TAGC_ERR_ARGUMENT, "message is NULL");
    if (!n_bytes) return tagc_fail(TAGC_ERR_ARGUMENT, "n_bytes is NULL");
    if (max_bytes < needed)
        return tagc_fail(TAGC_ERR_ARGUMENT, "max_bytes is %llu, a message of %llu elements may need %llu",
                         (unsigned long long)max_bytes, (unsigned long long)n_elems,
                         (unsigned long long)needed);
    return TAGC_OK;
}

/* *n_body becomes SIZE_MAX if a segment has more than most_items changes. */
static tagc_status encode_body(int element_bytes, const void *before, const void *after, uint64_t n_elems,
                               int by_magnitude, size_t most_items, uint8_t *body, size_t *n_body,
                               uint64_t *n_changes) {
    void *scratch;
    tagc_changes_kernels kernels = tagc_changes_best();
    size_t n_scratch = before ? tagc_changes_scratch_bytes((size_t)n_elems, most_items) : 0;
    TAGC_TRY(tagc_heap_create(NULL, n_scratch, "what encoding needs", &scratch));
    *n_body = tagc_changes_body_encode(&kernels, (size_t)element_bytes, before, after, (size_t)n_elems,
                                       by_magnitude, body, scratch, most_items, n_changes);
    tagc_heap_destroy(NULL, scratch, n_scratch);
    return TAGC_OK;
}

tagc_status tagc_changes_encode(int element_bytes, const void *before, const void *after, uint64_t n_elems,
                                int by_magnitude, void *message, uint64_t max_bytes, uint64_t *n_bytes,
                                uint64_t *n_changes) {
    uint64_t n_changed;
    size_t n_body = SIZE_MAX, most = n_elems < TAGC_CHANGES_SEGMENT ? (size_t)n_elems : TAGC_CHANGES_SEGMENT;
    TAGC_TRY(check_room(element_bytes, after, n_elems, message, max_bytes, n_bytes));
    uint8_t *body = (uint8_t *)message + TAGC_WIRE_HEADER_BYTES;
    for (size_t few = FEW; n_body == SIZE_MAX; few /= 4)
        TAGC_TRY(encode_body(element_bytes, before, after, n_elems, by_magnitude, most / few, body, &n_body,
                             &n_changed));
    tagc_wire_header header = {.kind = TAGC_WIRE_CHANGES,
                               .coding = before != NULL,
                               .k = (uint32_t)element_bytes,
                               .n_elems = n_elems,
                               .body_bytes = n_body};
    tagc_wire_write(&header, message);
    *n_bytes = TAGC_WIRE_HEADER_BYTES + n_body;
    if (n_changes) *n_changes = n_changed;
    return TAGC_OK;
}

/* Is it a sound message of what this end expects? The checksum has been compared, so what differs is what the sender wrote. */
static tagc_status check_header(const tagc_wire_header *header, int element_bytes, uint64_t n_elems) {
    if (header->kind != TAGC_WIRE_CHANGES)
        return tagc_fail(TAGC_ERR_CORRUPT, "message kind is %d, expected %d (changes)", header->kind,
                         TAGC_WIRE_CHANGES);
    if (header->k != (uint32_t)element_bytes)
        return tagc_fail(TAGC_ERR_MISMATCH, "the message has elements of %u bytes, expected %d", header->k,
                         element_bytes);
    if (header->n_elems != n_elems)
        return tagc_fail(TAGC_ERR_MISMATCH, "the message has %llu elements, expected %llu",
                         (unsigned long long)header->n_elems, (unsigned long long)n_elems);
    return TAGC_OK;
}

/* *most_items: in a segment. */
static tagc_status check_message(int element_bytes, const void *message, uint64_t n_bytes, uint64_t n_elems,
                                 size_t *most_items, tagc_changes_form *form) {
    tagc_wire_header header;
    TAGC_TRY(check_size(element_bytes, n_elems));
    if (!message) return tagc_fail(TAGC_ERR_ARGUMENT, "message is NULL");
    TAGC_TRY(tagc_wire_read(message, n_bytes, &header));
    TAGC_TRY(check_header(&header, element_bytes, n_elems));
    const uint8_t *body = (const uint8_t *)message + TAGC_WIRE_HEADER_BYTES;
    if (!tagc_changes_body_valid((size_t)element_bytes, body, (size_t)header.body_bytes, (size_t)n_elems,
                                 most_items, form) ||
        (header.coding == 0 && *form != TAGC_CHANGES_WHOLE))
        return tagc_fail(TAGC_ERR_CORRUPT, "the message's positions or values are damaged");
    /* changes of every element are no whole array: the sender had one before */
    if (header.coding != 0 && *form == TAGC_CHANGES_WHOLE) *form = TAGC_CHANGES_BY_PLACE;
    return TAGC_OK;
}

tagc_status tagc_changes_check(int element_bytes, const void *message, uint64_t n_bytes, uint64_t n_elems,
                               tagc_changes_form *form) {
    size_t most_items;
    tagc_changes_form found;
    TAGC_TRY(check_message(element_bytes, message, n_bytes, n_elems, &most_items, &found));
    if (form) *form = found;
    return TAGC_OK;
}

tagc_status tagc_changes_apply(int element_bytes, const void *message, uint64_t n_bytes, void *values,
                               uint64_t n_elems) {
    void *scratch;
    size_t most_items;
    tagc_changes_form form;
    if (!values && n_elems > 0) return tagc_fail(TAGC_ERR_ARGUMENT, "values is NULL");
    TAGC_TRY(check_message(element_bytes, message, n_bytes, n_elems, &most_items, &form));
    tagc_changes_kernels kernels = tagc_changes_best();
    size_t n_scratch = tagc_changes_scratch_bytes(0, most_items);
    TAGC_TRY(tagc_heap_create(NULL, n_scratch, "what decoding needs", &scratch));
    int is_done = tagc_changes_body_decode(&kernels, (size_t)element_bytes,
                                           (const uint8_t *)message + TAGC_WIRE_HEADER_BYTES, values,
                                           (size_t)n_elems, scratch, most_items);
    tagc_heap_destroy(NULL, scratch, n_scratch);
    if (!is_done)
        return tagc_fail(TAGC_ERR_MISMATCH,
                         "the array is not what the sender had before: it is undefined now");
    return TAGC_OK;
}
