/* Reads and writes headers. */
#include "exchange/wire.h"

#include "codec/residual.h"
#include "core/status.h"
#include "core/xxh3.h"

#include <math.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bodies travel as they lie in memory, and the format is little-endian"
#endif

static const char magic[4] = {'T', 'A', 'G', 'C'};

enum { /* byte offsets of the fields */
       AT_MAGIC = 0,
       AT_VERSION = 4,
       AT_KIND = 5,
       AT_CODING = 6,
       AT_FLAGS = 7,
       AT_OUTPUT = 7, /* state */
       AT_RANK = 8,
       AT_K = 12,
       AT_N_ELEMS = 16,
       AT_UNIT = 20, /* but for what is saved, whose n_elems has 8 bytes */
       AT_N_ITEMS = 24,
       AT_ATTEMPT = 28,
       AT_BODY_SUM = 28, /* fragment, lossless */
       AT_LONGEST = 28,  /* agreement, (2) */
       AT_TAG = 28,      /* state */
       AT_MAX_ABS = 32,
       AT_STATUS = 36,
       AT_INDEX_BYTES = 36, /* fragment */
       AT_WORLD_SIZE = 36,  /* state */
       AT_BODY_BYTES = 40,
       AT_WORD = 40, /* agreement */
       AT_STEP = 48,
       AT_CHECKSUM = 56
};

/* The body is not, or not whole, behind the header, and has a checksum of its own. */
static int is_apart(int kind) {
    return kind == TAGC_WIRE_FRAGMENT || kind == TAGC_WIRE_LOSSLESS;
}

/* Bytes that outlive a step: they are of no unit, and their version has not changed since. */
static int is_saved(int kind) {
    return kind == TAGC_WIRE_STATE || kind == TAGC_WIRE_BLOCKS || kind == TAGC_WIRE_CHANGES;
}

static int version_of(int kind) {
    if (kind == TAGC_WIRE_STATE) return TAGC_WIRE_STATE_VERSION;
    if (kind == TAGC_WIRE_CHANGES) return TAGC_WIRE_CHANGES_VERSION;
    return is_saved(kind) ? TAGC_WIRE_SAVED_VERSION : TAGC_WIRE_VERSION;
}

static uint64_t checksum(const uint8_t *bytes, const void *body, uint64_t body_bytes) {
    return tagc_xxh3(body, body_bytes, tagc_xxh3(bytes, AT_CHECKSUM, 0));
}

uint64_t tagc_wire_sum(const void *body, uint64_t n_bytes) {
    return tagc_xxh3(body, n_bytes, 0);
}

uint64_t tagc_checksum(const void *bytes, uint64_t n_bytes) {
    return tagc_xxh3(bytes, (size_t)n_bytes, 0);
}

void tagc_wire_write_of(const tagc_wire_header *header, const void *body, void *message) {
    uint8_t *bytes = message;
    memcpy(bytes + AT_MAGIC, magic, sizeof magic);
    bytes[AT_VERSION] = (uint8_t)version_of(header->kind);
    bytes[AT_KIND] = (uint8_t)header->kind;
    bytes[AT_CODING] = (uint8_t)header->coding;
    bytes[AT_FLAGS] = (uint8_t)header->flags;
    memcpy(bytes + AT_RANK, &header->rank, 4);
    memcpy(bytes + AT_K, &header->k, 4);
    memcpy(bytes + AT_N_ELEMS, &header->n_elems, 8);
    if (!is_saved(header->kind)) memcpy(bytes + AT_UNIT, &header->unit, 4);
    memcpy(bytes + AT_N_ITEMS, &header->n_items, 4);
    if (is_apart(header->kind)) {
        memcpy(bytes + AT_BODY_SUM, &header->body_sum, 8);
    } else {
        memcpy(bytes + AT_ATTEMPT, &header->attempt, 4);
        memcpy(bytes + AT_MAX_ABS, &header->max_abs, 4);
    }
    if (header->kind == TAGC_WIRE_FRAGMENT)
        memcpy(bytes + AT_INDEX_BYTES, &header->index_bytes, 4);
    else
        memcpy(bytes + AT_STATUS, &header->status, 4);
    if (header->kind == TAGC_WIRE_AGREE) memcpy(bytes + AT_LONGEST, header->longest, sizeof header->longest);
    if (header->kind == TAGC_WIRE_STATE) {
        bytes[AT_OUTPUT] = (uint8_t)header->output;
        memcpy(bytes + AT_TAG, &header->tag, 8);
        memcpy(bytes + AT_WORLD_SIZE, &header->world_size, 4);
    }
    memcpy(bytes + AT_BODY_BYTES, header->kind == TAGC_WIRE_AGREE ? &header->word : &header->body_bytes, 8);
    memcpy(bytes + AT_STEP, &header->step, 8);
    uint64_t sum = checksum(bytes, body, is_apart(header->kind) ? 0 : header->body_bytes);
    memcpy(bytes + AT_CHECKSUM, &sum, 8);
}

void tagc_wire_write(const tagc_wire_header *header, void *message) {
    tagc_wire_write_of(header, (const char *)message + TAGC_WIRE_HEADER_BYTES, message);
}

static void read_fields(const uint8_t *bytes, tagc_wire_header *header) {
    *header = (tagc_wire_header){.kind = bytes[AT_KIND], .coding = bytes[AT_CODING]};
    int is_state = header->kind == TAGC_WIRE_STATE;
    if (is_state)
        header->output = bytes[AT_OUTPUT];
    else
        header->flags = bytes[AT_FLAGS];
    memcpy(&header->rank, bytes + AT_RANK, 4);
    memcpy(&header->k, bytes + AT_K, 4);
    memcpy(&header->n_elems, bytes + AT_N_ELEMS, is_saved(header->kind) ? 8 : 4);
    if (!is_saved(header->kind)) memcpy(&header->unit, bytes + AT_UNIT, 4);
    memcpy(&header->n_items, bytes + AT_N_ITEMS, 4);
    if (is_apart(header->kind)) {
        memcpy(&header->body_sum, bytes + AT_BODY_SUM, 8);
    } else if (header->kind == TAGC_WIRE_AGREE) {
        memcpy(header->longest, bytes + AT_LONGEST, sizeof header->longest);
    } else if (is_state) {
        memcpy(&header->tag, bytes + AT_TAG, 8);
        memcpy(&header->world_size, bytes + AT_WORLD_SIZE, 4);
    } else {
        memcpy(&header->attempt, bytes + AT_ATTEMPT, 4);
        memcpy(&header->max_abs, bytes + AT_MAX_ABS, 4);
    }
    if (header->kind == TAGC_WIRE_FRAGMENT)
        memcpy(&header->index_bytes, bytes + AT_INDEX_BYTES, 4);
    else if (!is_state)
        memcpy(&header->status, bytes + AT_STATUS, 4);
    memcpy(header->kind == TAGC_WIRE_AGREE ? &header->word : &header->body_bytes, bytes + AT_BODY_BYTES, 8);
    memcpy(&header->step, bytes + AT_STEP, 8);
}

/* After the checksum: the sender wrote what is wrong now. */
static tagc_status check_fields(const tagc_wire_header *header) {
    int is_fragment = header->kind == TAGC_WIRE_FRAGMENT;
    int is_state = header->kind == TAGC_WIRE_STATE, is_blocks = header->kind == TAGC_WIRE_BLOCKS;
    int is_changes = header->kind == TAGC_WIRE_CHANGES, is_lossless = header->kind == TAGC_WIRE_LOSSLESS;
    int max_coding = is_fragment || is_blocks ? TAGC_FORMAT_INT2
                     : is_state               ? TAGC_FORMAT_INT4
                     : is_changes             ? 1
                     : is_lossless            ? 0
                                              : TAGC_WIRE_MAX_INDEX;
    if (header->kind < TAGC_WIRE_INDEX || header->kind > TAGC_WIRE_LAST)
        return tagc_fail(TAGC_ERR_CORRUPT, "message kind is %d, must be in [1, %d]", header->kind,
                         TAGC_WIRE_LAST);
    if (header->coding > max_coding)
        return tagc_fail(TAGC_ERR_CORRUPT, "%s coding is %d, must be in [0, %d]",
                         is_fragment || is_blocks ? "value"
                         : is_state               ? "residual"
                         : is_changes             ? "changes"
                         : is_lossless            ? "lossless"
                                                  : "index",
                         header->coding, max_coding);
    if (is_state && !tagc_residual_is_format(header->coding))
        return tagc_fail(TAGC_ERR_CORRUPT, "residual coding is %d, no residual is stored in bf16",
                         header->coding);
    uint32_t known = TAGC_WIRE_FLAG_NONFINITE | (is_fragment ? TAGC_WIRE_FLAG_FAILED : 0);
    if (header->flags & ~known)
        return tagc_fail(TAGC_ERR_CORRUPT, "flags are %u, known are %u", header->flags, known);
    if (!isfinite(header->max_abs) || header->max_abs < 0)
        return tagc_fail(TAGC_ERR_CORRUPT, "max_abs is %g, must be finite and not negative",
                         (double)header->max_abs);
    if (header->status > TAGC_LAST_STATUS)
        return tagc_fail(TAGC_ERR_CORRUPT, "status is %u, must be in [0, %d]", header->status,
                         TAGC_LAST_STATUS);
    if (header->index_bytes > header->body_bytes)
        return tagc_fail(TAGC_ERR_CORRUPT, "%u of %llu bytes are positions", header->index_bytes,
                         (unsigned long long)header->body_bytes);
    if (is_fragment && header->flags && header->body_bytes)
        return tagc_fail(TAGC_ERR_CORRUPT, "%llu bytes follow of what does not count",
                         (unsigned long long)header->body_bytes);
    return TAGC_OK;
}

tagc_status tagc_wire_read(const void *message, uint64_t n_bytes, tagc_wire_header *header) {
    const uint8_t *bytes = message;
    if (n_bytes < TAGC_WIRE_HEADER_BYTES)
        return tagc_fail(TAGC_ERR_CORRUPT, "%llu bytes are too few for a header of %d",
                         (unsigned long long)n_bytes, TAGC_WIRE_HEADER_BYTES);
    if (memcmp(bytes + AT_MAGIC, magic, sizeof magic) != 0)
        return tagc_fail(TAGC_ERR_CORRUPT, "magic is %02x %02x %02x %02x, not \"TAGC\"", bytes[0], bytes[1],
                         bytes[2], bytes[3]);
    read_fields(bytes, header);
    int is_old = header->kind == TAGC_WIRE_CHANGES && bytes[AT_VERSION] == TAGC_WIRE_CHANGES_OLDEST;
    if (bytes[AT_VERSION] != version_of(header->kind) && !is_old)
        return tagc_fail(TAGC_ERR_CORRUPT, "version is %d, this library reads %d", bytes[AT_VERSION],
                         version_of(header->kind));
    uint64_t n_behind = is_apart(header->kind) ? 0 : header->body_bytes;
    if (n_behind != n_bytes - TAGC_WIRE_HEADER_BYTES)
        return tagc_fail(TAGC_ERR_CORRUPT, "the header says %llu bytes follow, there are %llu",
                         (unsigned long long)n_behind,
                         (unsigned long long)(n_bytes - TAGC_WIRE_HEADER_BYTES));
    uint64_t sum;
    memcpy(&sum, bytes + AT_CHECKSUM, 8);
    if (sum != checksum(bytes, bytes + TAGC_WIRE_HEADER_BYTES, n_behind))
        return tagc_fail(TAGC_ERR_CORRUPT, "the checksum is wrong");
    return check_fields(header);
}

static tagc_status expect(const char *field, uint64_t value, uint64_t expected) {
    if (value == expected) return TAGC_OK;
    return tagc_fail(TAGC_ERR_CORRUPT, "%s is %llu, expected %llu", field, (unsigned long long)value,
                     (unsigned long long)expected);
}

tagc_status tagc_wire_expect(const tagc_wire_header *header, const tagc_wire_header *expected) {
    TAGC_TRY(expect("message kind", (uint64_t)header->kind, (uint64_t)expected->kind));
    TAGC_TRY(expect("coding", (uint64_t)header->coding, (uint64_t)expected->coding));
    TAGC_TRY(expect("rank", header->rank, expected->rank));
    TAGC_TRY(expect("n_elems", header->n_elems, expected->n_elems));
    TAGC_TRY(expect("step", header->step, expected->step));
    if (header->k != expected->k)
        return tagc_fail(TAGC_ERR_MISMATCH,
                         "sparsity: %u of a shard's %llu elements are sent from there, %u from here",
                         header->k, (unsigned long long)header->n_elems, expected->k);
    return TAGC_OK;
}

tagc_status tagc_wire_expect_of(tagc_comm *comm, const tagc_identity *own, int from,
                                const tagc_wire_header *header, const tagc_wire_header *expected) {
    if (header->kind == expected->kind) TAGC_TRY(tagc_identity_check(comm, own, from, header->unit));
    return tagc_wire_expect(header, expected);
}
