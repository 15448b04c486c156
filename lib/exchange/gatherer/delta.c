/* Deltas: the difference between the owner's master and the replica, in low-bit blocks, sent to all holders of the replica.
 *
 * All ranks know in advance what a gather sends (whole parameters or a delta, with checksums or without). It follows from
 * their options, the number of gathers, and the headers of the last one. So they agree on lengths without a message.
 *
 * No rank waits for an answer. A rank that receives a damaged message fails at once and says so in its next message. That
 * gather fails on all ranks, and the one after it sends whole parameters. */
#include "codec/delta.h"
#include "exchange/gatherer/gatherer.h"
#include "exchange/wire.h"

#include <string.h>

enum { CODING_WHOLE = 0, CODING_DELTA = 1 };

static size_t checksum_bytes(int world_size) {
    return (size_t)world_size * sizeof(uint64_t);
}

size_t tagc_gatherer_delta_bytes(int bits, size_t shard, int world_size) {
    size_t whole = shard * sizeof(uint16_t),
           delta = tagc_delta_bytes(bits, shard) + checksum_bytes(world_size);
    return TAGC_WIRE_HEADER_BYTES + (whole > delta ? whole : delta);
}

static size_t body_bytes(const tagc_gatherer *g) {
    if (g->is_whole) return g->shard * sizeof(uint16_t);
    return tagc_delta_bytes(g->bits, g->shard) + (g->is_checked ? checksum_bytes(g->world_size) : 0);
}

size_t tagc_gatherer_message_bytes(const tagc_gatherer *g) {
    if (g->is_delta) return TAGC_WIRE_HEADER_BYTES + body_bytes(g);
    if (g->is_stochastic) return tagc_values_bytes(&g->values, g->shard);
    if (g->is_lossless) return tagc_gatherer_lossless_bytes(g);
    return g->bits                                 ? tagc_delta_bytes(g->bits, g->shard)
           : g->options.format == TAGC_FORMAT_BF16 ? g->shard * sizeof(uint16_t)
                                                   : g->shard * sizeof(float);
}

void tagc_gatherer_delta_begin(tagc_gatherer *g) {
    uint64_t every = g->options.check_every;
    g->device_failure = TAGC_OK;
    g->is_whole = g->is_whole_next;
    g->is_whole_next = 0;
    g->is_checked = every > 0 && g->n_begun % every == 0 && !g->is_whole;
}

/* ---- the own message ---- */

static void put_checksums(tagc_gatherer *g, uint8_t *to) {
    for (int r = 0; r < g->world_size; r++, to += sizeof(uint64_t)) {
        uint64_t sum = g->runner->checksum(g, r);
        memcpy(to, &sum, sizeof sum);
    }
}

void tagc_gatherer_delta_encode(tagc_gatherer *g) {
    uint8_t *message = tagc_gatherer_row(g, g->rank), *body = message + TAGC_WIRE_HEADER_BYTES;
    if (g->is_checked) {
        put_checksums(g, body);
        body += checksum_bytes(g->world_size);
    }
    g->is_void = g->runner->encode_row(g, body) || g->device_failure != TAGC_OK;
    if (g->failure == TAGC_OK) g->failure = g->device_failure; /* this message reports it */
    tagc_wire_header header = {
        .kind = TAGC_WIRE_PARAMETERS,
        .coding = g->is_whole ? CODING_WHOLE : CODING_DELTA,
        .flags = g->is_void ? TAGC_WIRE_FLAG_NONFINITE : 0,
        .rank = (uint32_t)g->rank,
        .n_elems = g->shard,
        .unit = g->identity.unit,
        .n_items = g->is_checked ? (uint32_t)g->world_size : 0,
        .status = (uint32_t)g->failure,
        .body_bytes = body_bytes(g),
        .step = g->n_begun,
    };
    tagc_wire_write(&header, message);
}

/* ---- everyone's ---- */

static uint8_t *body_of(const tagc_gatherer *g, int row) {
    return tagc_gatherer_row(g, row) + TAGC_WIRE_HEADER_BYTES +
           (g->is_checked ? checksum_bytes(g->world_size) : 0);
}

static int name_of(const tagc_gatherer *g, int row) {
    return tagc_comm_name(g->comm, row);
}

static int is_of_other_unit(const tagc_gatherer *g, tagc_status status, const tagc_wire_header *header) {
    return status == TAGC_ERR_MISMATCH && header->unit != g->identity.unit;
}

static tagc_status read_message(const tagc_gatherer *g, int row, tagc_wire_header *header) {
    tagc_wire_header expected = {
        .kind = TAGC_WIRE_PARAMETERS,
        .coding = g->is_whole ? CODING_WHOLE : CODING_DELTA,
        .rank = (uint32_t)row,
        .n_elems = g->shard,
        .step = g->n_begun,
    };
    tagc_status status = tagc_wire_read(tagc_gatherer_row(g, row), tagc_gatherer_message_bytes(g), header);
    if (status == TAGC_OK) status = tagc_wire_expect_of(g->comm, &g->identity, row, header, &expected);
    if (is_of_other_unit(g, status, header)) return status;
    if (status == TAGC_OK && header->n_items != (g->is_checked ? (uint32_t)g->world_size : 0))
        status = tagc_fail(TAGC_ERR_CORRUPT, "%u checksums, expected %d", header->n_items,
                           g->is_checked ? g->world_size : 0);
    if (status == TAGC_OK && !g->is_whole && !(header->flags & TAGC_WIRE_FLAG_NONFINITE))
        status = tagc_delta_validate(g->bits, body_of(g, row), g->shard);
    return status == TAGC_OK ? status : tagc_fail_in(status, "parameters from rank %d", name_of(g, row));
}

static uint64_t checksum_of(const tagc_gatherer *g, int sender, int row) {
    uint64_t sum;
    memcpy(&sum, tagc_gatherer_row(g, sender) + TAGC_WIRE_HEADER_BYTES + (size_t)row * sizeof sum,
           sizeof sum);
    return sum;
}

/* All ranks hold the same table of checksums, so all report the same. */
static tagc_status compare_checksums(const tagc_gatherer *g) {
    for (int row = 0; row < g->world_size; row++)
        for (int sender = 0; sender < g->world_size; sender++)
            if (checksum_of(g, sender, row) != checksum_of(g, row, row))
                return tagc_fail(
                    TAGC_ERR_CORRUPT,
                    "replicas differ: row %d is %016llx on its owner, rank %d, and %016llx on rank %d", row,
                    (unsigned long long)checksum_of(g, row, row), name_of(g, row),
                    (unsigned long long)checksum_of(g, sender, row), name_of(g, sender));
    return TAGC_OK;
}

/* If is_void, every reader of the row sees NaN; the next gather repairs it. */
tagc_row tagc_gatherer_delta_row(const tagc_gatherer *g, int row, int is_void) {
    return (tagc_row){
        .body = body_of(g, row), .values = tagc_gatherer_full(g, row), .is_void = is_void && !g->is_whole};
}

tagc_status tagc_gatherer_delta_decode(tagc_gatherer *g) {
    tagc_status told = TAGC_OK, encode_failure = g->device_failure;
    int damaged = -1, of_other_unit = -1, teller = 0, n_sound = 0;
    for (int row = 0; row < g->world_size; row++) {
        tagc_wire_header header = {.flags = g->is_void ? TAGC_WIRE_FLAG_NONFINITE : 0,
                                   .status = (uint32_t)g->failure};
        tagc_status status = row == g->rank ? TAGC_OK : read_message(g, row, &header);
        if (is_of_other_unit(g, status, &header) && of_other_unit < 0) of_other_unit = row;
        if (status != TAGC_OK) {
            damaged = damaged < 0 ? row : damaged;
            continue;
        }
        int is_void = (header.flags & TAGC_WIRE_FLAG_NONFINITE) != 0;
        g->is_whole_next |= is_void || header.status != TAGC_OK;
        if (header.status != TAGC_OK && told == TAGC_OK) {
            told = (tagc_status)header.status;
            teller = name_of(g, row);
        }
        if (row != g->rank) g->decoded[n_sound++] = tagc_gatherer_delta_row(g, row, is_void);
    }
    g->runner->decode_rows(g, n_sound);
    g->failure = TAGC_OK;
    if (g->device_failure != TAGC_OK) {
        if (encode_failure == TAGC_OK)
            g->failure = g->device_failure; /* the others learn of it in the next gather */
        return tagc_fail(g->device_failure, "%s", g->device_text);
    }
    tagc_wire_header header;
    if (of_other_unit >= 0) { /* as all ranks see, so that none has to tell */
        g->is_whole_next = 1;
        return read_message(g, of_other_unit, &header); /* once more, for its text */
    }
    if (damaged >= 0) return g->failure = read_message(g, damaged, &header); /* once more, for its text */
    TAGC_TRY(tagc_gatherer_told(told, teller));
    if (!g->is_checked) return TAGC_OK;
    tagc_status status = compare_checksums(g);
    g->is_whole_next |= status != TAGC_OK;
    return status;
}
