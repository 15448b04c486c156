/* Headers as bytes: the worked example of docs/reference/wire-format.md, round trips, and damage that must be refused.
 */
#include <stdio.h>
#include <string.h>

#include "../test.h"
#include "codec/bitmap.h"
#include "codec/code.h"
#include "codec/select.h"
#include "core/xxh3.h"
#include "exchange/wire.h"
#include "tagc/paper.h"

/* The index message of the document: rank 1 of two tells rank 0 that it keeps elements 3, 8 and 20 of 24. */
static const uint8_t example[TAGC_WIRE_HEADER_BYTES + 8] = {
    0x54, 0x41, 0x47, 0x43, 0x02, 0x01, 0x00, 0x00, /* magic, version, kind, coding, flags */
    0x01, 0x00, 0x00, 0x00, 0x03, 0x00, 0x00, 0x00, /* rank, k */
    0x18, 0x00, 0x00, 0x00, 0x07, 0x3c, 0x5a, 0xe1, /* n_elems, unit */
    0x03, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, /* n_items, attempt */
    0x00, 0x00, 0x20, 0x40, 0x00, 0x00, 0x00, 0x00, /* max_abs 2.5, status */
    0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, /* body_bytes */
    0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, /* step */
    0x26, 0x3d, 0x9b, 0x99, 0x45, 0xe4, 0xc1, 0x37, /* checksum */
    0x08, 0x01, 0x10, 0x00, 0x00, 0x00, 0x00, 0x00, /* body: bits 3, 8, 20 */
};

static tagc_wire_header example_header(void) {
    return (tagc_wire_header){.kind = TAGC_WIRE_INDEX,
                              .coding = TAGC_INDEX_OR,
                              .rank = 1,
                              .k = 3,
                              .n_elems = 24,
                              .unit = 0xe15a3c07u,
                              .n_items = 3,
                              .max_abs = 2.5f,
                              .body_bytes = 8,
                              .step = 1};
}

static void make_example(uint64_t storage[9]) {
    uint8_t *message = (uint8_t *)storage;
    tagc_wire_header header = example_header();
    tagc_bitmap_make(message + TAGC_WIRE_HEADER_BYTES, 24, (const uint32_t[]){3, 8, 20}, 3);
    tagc_wire_write(&header, message);
}

TEST(test_worked_example) {
    uint64_t message[9];
    make_example(message);
    assert_memory_equal(message, example, sizeof example);
}

/* The document's second half: what the owner answers. */
TEST(test_worked_union) {
    static const uint8_t union_bits[] = {0x08, 0x03, 0x10, 0, 0, 0, 0, 0};
    uint64_t own = 0, arrived = 0;
    tagc_bitmap_make((uint8_t *)&own, 24, (const uint32_t[]){3, 9, 20}, 3);
    tagc_bitmap_make((uint8_t *)&arrived, 24, (const uint32_t[]){3, 8, 20}, 3);
    tagc_bitmap_or((uint8_t *)&own, (const uint8_t *)&arrived, 24);
    assert_memory_equal(&own, union_bits, sizeof union_bits);
    assert_int_equal(tagc_bitmap_count((const uint8_t *)&own, 24), 4);
    assert_int_equal(tagc_select_count(24, 0.875), 3);
}

/* The document's fragment: rank 1 tells rank 0 of six elements of 64, in int4. */
static const uint8_t fragment_header[TAGC_WIRE_HEADER_BYTES] = {
    0x54, 0x41, 0x47, 0x43, 0x02, 0x06, 0x03, 0x00, /* magic, version, kind, coding, flags */
    0x01, 0x00, 0x00, 0x00, 0x06, 0x00, 0x00, 0x00, /* rank, k */
    0x40, 0x00, 0x00, 0x00, 0x07, 0x3c, 0x5a, 0xe1, /* n_elems, unit */
    0x06, 0x00, 0x00, 0x00, 0xba, 0xe6, 0x12, 0xe1, /* n_items, body_sum */
    0x88, 0x1c, 0x52, 0xf2, 0x10, 0x00, 0x00, 0x00, /* body_sum, index_bytes */
    0x15, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, /* body_bytes */
    0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, /* step */
    0xc6, 0x98, 0xb2, 0x72, 0x96, 0x9d, 0xb6, 0x15, /* checksum */
};
static const uint8_t fragment_body[21] = {
    0x06, 0x00, 0x00, 0x00, 0x04, 0x00, 0x00, 0x00, /* n_items, gaps of 4 bits */
    0x06, 0x00, 0x08, 0x00,                         /* the only chunk: 6 items, 8 codes */
    0x43, 0x43, 0xf3, 0x8f,                         /* 3 4 3 4 3 15 15 8 */
    0xb7, 0x3e,                                     /* scale 0.357421875 */
    0x7b, 0xe1, 0x63,                               /* -5 7 1 -2 3 6 */
};

TEST(test_worked_fragment) {
    float gradient[64], residual[64], left[64], sums[64];
    uint8_t body[4096] = {0}, message[TAGC_WIRE_HEADER_BYTES];
    static _Alignas(64) uint8_t scratch[1 << 20];
    for (int i = 0; i < 64; i++) {
        gradient[i] = 0.125f * (float)(i % 3 - 1);
        residual[i] = TAGC_ZERO_RESIDUAL;
    }
    static const int at[] = {3, 8, 12, 17, 21, 60};
    static const float values[] = {-1.75f, 2.5f, 0.5f, -0.75f, 1.25f, 2};
    static const float decoded[] = {-1.787109375f, 2.501953125f, 0.357421875f,
                                    -0.71484375f,  1.072265625f, 2.14453125f};
    for (int j = 0; j < 6; j++) gradient[at[j]] = values[j];
    tagc_code_options o = {.n = 64, .k = 6, .sparse = 1, .values = TAGC_FORMAT_INT4, .block = 128};
    const tagc_code *code = tagc_code_of(&o);
    assert_true(code->max_bytes(&o) <= sizeof body && code->scratch_bytes(&o, 1) <= sizeof scratch);
    assert_int_equal(tagc_select_count(64, 0.90625), 6);
    tagc_encoded encoded;
    code->encode(&o, gradient, residual, left, 0, body, scratch, NULL, &encoded);
    assert_int_equal(encoded.n_bytes, sizeof fragment_body);
    assert_memory_equal(body, fragment_body, sizeof fragment_body);
    tagc_wire_header header = {.kind = TAGC_WIRE_FRAGMENT,
                               .coding = TAGC_FORMAT_INT4,
                               .rank = 1,
                               .k = 6,
                               .n_elems = 64,
                               .unit = 0xe15a3c07u,
                               .n_items = (uint32_t)encoded.n_sent,
                               .body_sum = tagc_wire_sum(body, encoded.n_bytes),
                               .index_bytes = (uint32_t)encoded.n_index_bytes,
                               .body_bytes = encoded.n_bytes,
                               .step = 1};
    tagc_wire_write(&header, message);
    assert_memory_equal(message, fragment_header, sizeof fragment_header);
    tagc_body one = {fragment_body, sizeof fragment_body, 0};
    code->decode(&o, &one, 1, 0, 1, sums, scratch, NULL);
    for (int j = 0; j < 6; j++) {
        assert_true(sums[at[j]] == decoded[j] && left[at[j]] == values[j] - decoded[j]);
        sums[at[j]] = 0;
    }
    for (int i = 0; i < 64; i++) assert_true(sums[i] == 0);
}

/* The header of a fragment stands alone, and its fields have places of their own. */
TEST(test_fragment_headers) {
    tagc_wire_header header, back, worked;
    uint8_t message[TAGC_WIRE_HEADER_BYTES + 8];
    assert_int_equal(tagc_wire_read(fragment_header, sizeof fragment_header, &worked), TAGC_OK);
    assert_true(worked.n_items == 6 && worked.index_bytes == 16 && worked.body_bytes == 21 &&
                worked.body_sum == tagc_wire_sum(fragment_body, sizeof fragment_body));
    assert_true(worked.attempt == 0 && worked.max_abs == 0 && worked.status == 0);
    assert_int_equal(tagc_wire_read(fragment_header, sizeof fragment_header - 1, &back), TAGC_ERR_CORRUPT);
    memcpy(message, fragment_header, sizeof fragment_header);
    assert_int_equal(tagc_wire_read(message, sizeof message, &back), TAGC_ERR_CORRUPT);
    for (size_t bit = 0; bit < sizeof fragment_header * 8; bit++) {
        message[bit / 8] ^= (uint8_t)(1 << bit % 8);
        assert_int_equal(tagc_wire_read(message, sizeof fragment_header, &back), TAGC_ERR_CORRUPT);
        message[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    for (int c = 0; c < 5; c++) {
        header = worked;
        if (c == 0) header.coding = TAGC_FORMAT_INT2 + 1;
        if (c == 1) header.index_bytes = 22;
        if (c == 2) header.flags = TAGC_WIRE_FLAG_NONFINITE;
        if (c == 3) header.flags = 2;
        if (c == 4) header.flags = TAGC_WIRE_FLAG_NONFINITE, header.body_bytes = header.index_bytes = 0;
        tagc_wire_write(&header, message);
        assert_int_equal(tagc_wire_read(message, sizeof fragment_header, &back),
                         c == 4 ? TAGC_OK : TAGC_ERR_CORRUPT);
    }
}

TEST(test_round_trip) {
    tagc_wire_header header = {.kind = TAGC_WIRE_UNION,
                               .coding = TAGC_INDEX_SUM4,
                               .flags = 1,
                               .rank = 0x01020304,
                               .k = 0xfffffff0u,
                               .n_elems = 0xffffffc0u,
                               .unit = 0x05060708u,
                               .n_items = 77,
                               .attempt = 31,
                               .max_abs = 1e-40f,
                               .status = 6,
                               .body_bytes = 13,
                               .step = UINT64_MAX};
    uint8_t message[TAGC_WIRE_HEADER_BYTES + 13] = {0};
    tagc_wire_header back;
    tagc_wire_write(&header, message);
    assert_int_equal(tagc_wire_read(message, sizeof message, &back), TAGC_OK);
    assert_true(back.kind == header.kind && back.coding == header.coding && back.flags == header.flags);
    assert_true(back.rank == header.rank && back.k == header.k && back.n_elems == header.n_elems);
    assert_true(back.unit == header.unit);
    assert_true(back.n_items == header.n_items && back.attempt == header.attempt &&
                back.max_abs == header.max_abs);
    assert_true(back.status == header.status && back.body_bytes == header.body_bytes &&
                back.step == header.step);
}

TEST(test_damage) {
    uint64_t storage[9];
    uint8_t *message = (uint8_t *)storage;
    tagc_wire_header header;
    make_example(storage);
    for (size_t bit = 0; bit < sizeof example * 8; bit++) {
        message[bit / 8] ^= (uint8_t)(1 << bit % 8);
        assert_int_equal(tagc_wire_read(message, sizeof example, &header), TAGC_ERR_CORRUPT);
        message[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    for (uint64_t n_bytes = 0; n_bytes < sizeof example; n_bytes++)
        assert_int_equal(tagc_wire_read(message, n_bytes, &header), TAGC_ERR_CORRUPT);
    assert_int_equal(tagc_wire_read(message, sizeof example, &header), TAGC_OK);
}

/* With a checksum to match, ranges still hold. */
TEST(test_hostile_fields) {
    static const float bad_sizes[] = {-1.0f, __builtin_nanf(""), __builtin_inff()};
    uint64_t storage[9] = {0};
    for (int c = 0; c < 8; c++) {
        tagc_wire_header header = example_header(), back;
        if (c == 0) header.kind = 0;
        if (c == 1) header.kind = TAGC_WIRE_LAST + 1;
        if (c == 2) header.coding = 3;
        if (c == 3) header.flags = 2;
        if (c == 4) header.status = 12;
        if (c >= 5) header.max_abs = bad_sizes[c - 5];
        tagc_wire_write(&header, storage);
        assert_int_equal(tagc_wire_read(storage, sizeof example, &back), TAGC_ERR_CORRUPT);
    }
    tagc_wire_header expected = example_header();
    for (int c = 0; c < 7; c++) {
        tagc_wire_header header = example_header();
        if (c == 0) header.kind = TAGC_WIRE_UNION;
        if (c == 1) header.coding = TAGC_INDEX_SUM1;
        if (c == 2) header.rank = 0;
        if (c == 3) header.n_elems = 25;
        if (c == 4) header.step = 2;
        if (c == 5) header.k = 4;
        static const char *texts[] = {
            "message kind is 2, expected 1", "coding is 2, expected 0",
            "rank is 0, expected 1",         "n_elems is 25, expected 24",
            "step is 2, expected 1",         "4 of a shard's 24 elements are sent from there, 3 from here"};
        tagc_status status = c == 6 ? TAGC_OK : c == 5 ? TAGC_ERR_MISMATCH : TAGC_ERR_CORRUPT;
        assert_int_equal(tagc_wire_expect(&header, &expected), status);
        if (c < 6) assert_non_null(strstr(tagc_last_error(), texts[c]));
    }
}

/* Each has a right checksum. */
TEST(test_other_versions_are_refused_by_number) {
    uint64_t storage[9];
    uint8_t *message = (uint8_t *)storage;
    for (int kind = TAGC_WIRE_INDEX; kind <= TAGC_WIRE_LAST; kind++)
        for (int version = 0; version < 256; version++) {
            tagc_wire_header header = example_header(), back;
            header.kind = kind;
            int is_apart = kind == TAGC_WIRE_FRAGMENT || kind == TAGC_WIRE_LOSSLESS;
            header.body_bytes = is_apart || kind == TAGC_WIRE_AGREE ? 0 : header.body_bytes;
            if (is_apart || kind == TAGC_WIRE_AGREE) header.max_abs = 0;
            if (kind == TAGC_WIRE_LOSSLESS) header.coding = 0;
            if (kind == TAGC_WIRE_STATE) header.coding = TAGC_FORMAT_INT8;
            memset(storage, 0, sizeof storage);
            tagc_wire_write(&header, message);
            message[4] = (uint8_t)version;
            uint64_t sum = tagc_xxh3(message + 64, header.body_bytes, tagc_xxh3(message, 56, 0));
            memcpy(message + 56, &sum, 8);
            tagc_status status = tagc_wire_read(message, 64 + header.body_bytes, &back);
            int due = kind == TAGC_WIRE_BLOCKS ? 1 : kind == TAGC_WIRE_CHANGES ? 3 : 2;
            int is_read = version == due || (kind == TAGC_WIRE_CHANGES && version == 2);
            assert_int_equal(status, is_read ? TAGC_OK : TAGC_ERR_CORRUPT);
            char said[64];
            snprintf(said, sizeof said, "version is %d, this library reads %d", version, due);
            if (!is_read) assert_string_equal(tagc_last_error(), said);
        }
}
