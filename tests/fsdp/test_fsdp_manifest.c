/* Manifests and headers of rank files with contents that no program writes, but right checksums. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../test.h"
#include "fsdp/checkpoint_format.h"
#include "tagc/tagc.h"

enum { N_CONTRADICTIONS = 14, N_LAYOUTS = 12 };

static void set_sizes(tagc_manifest *m) {
    for (int rank = 0; rank < m->world_size; rank++) m->files[rank].n_bytes = tagc_rank_file_bytes(m, rank);
}

/* Four ranks, and two flats, of which the first has a residual. */
static tagc_manifest *make(void) {
    tagc_manifest *m;
    assert_int_equal(tagc_manifest_create(4, 3, 2, &m), TAGC_OK);
    m->step = 77;
    m->n_updates = 76;
    m->sharded = m->is_followed = 1;
    for (int rank = 0; rank < 4; rank++) m->files[rank].n_model = 104 + 8 * (uint64_t)rank;
    m->flats[0] = (tagc_manifest_flat){.n_elems = 10, .n_padded = 12, .has_residual = 1, .has_moment1 = 1};
    m->flats[1] = (tagc_manifest_flat){.n_elems = 7, .n_padded = 8, .has_moment1 = 1};
    m->tensors[0] = (tagc_manifest_tensor){.name = "a", .n_rows = 2, .n_cols = 3};
    m->tensors[1] = (tagc_manifest_tensor){.name = "b", .n_rows = 4, .n_cols = 1, .offset = 6};
    m->tensors[2] = (tagc_manifest_tensor){.name = "c", .n_rows = 7, .n_cols = 1, .flat = 1};
    set_sizes(m);
    return m;
}

/* One change each; returns 0 behind the last. The size of the files fits, but in the first and in the last case. */
static int contradict(tagc_manifest *m, int change) {
    int has_sizes = change == 0 || change == 13;
    if (change == 0) m->files[3].n_bytes += 4;
    if (change == 1) m->n_owners = 3;
    if (change == 2) m->n_owners = 0;
    if (change == 3) m->flats[0].n_padded = 13;
    if (change == 4) m->flats[0].n_elems = 13;
    if (change == 5) m->tensors[1].offset = 7;
    if (change == 6) m->tensors[0].n_rows = 0;
    if (change == 7)
        m->tensors[0].n_rows = 77158673929, m->tensors[0].n_cols = 239075442; /* 2^64 + 2 elements */
    if (change == 8) m->tensors[2].flat = 2;
    if (change == 9) m->tensors[0].name[0] = 0;
    if (change == 10) m->step = (uint64_t)1 << 63;
    if (change == 11) m->flats[1].n_gathers = UINT64_MAX;
    if (change == 12) m->files[2].n_model = (uint64_t)1 << 62;
    if (change == 13) m->files[3].n_model += 8;
    if (change >= N_CONTRADICTIONS) return 0;
    if (!has_sizes && m->n_owners > 0) set_sizes(m);
    return 1;
}

static tagc_status read_back(const tagc_manifest *m) {
    char *text;
    tagc_manifest *back;
    assert_int_equal(tagc_manifest_print(m, &text), TAGC_OK);
    tagc_status status = tagc_manifest_parse(text, strlen(text), 1, &back);
    assert_true((status == TAGC_OK) == (back != NULL));
    tagc_manifest_destroy(back);
    free(text);
    return status;
}

TEST(contradictions_are_refused_with_a_right_checksum) {
    tagc_manifest *m = make();
    assert_int_equal(read_back(m), TAGC_OK);
    tagc_manifest_destroy(m);
    for (int change = 0, goes_on = 1; goes_on; change++) {
        m = make();
        goes_on = contradict(m, change);
        assert_int_equal(read_back(m), goes_on ? TAGC_ERR_CORRUPT : TAGC_OK);
        tagc_manifest_destroy(m);
    }
}

/* Reads a manifest in which `from` became `to` (no longer than it), or which lacks it. Returns the status. */
static tagc_status read_changed(const char *from, const char *to) {
    char *text;
    tagc_manifest *m = make(), *back;
    assert_int_equal(tagc_manifest_print(m, &text), TAGC_OK);
    tagc_manifest_destroy(m);
    char *at = strstr(text, from);
    assert_non_null(at);
    memset(at, ' ', strlen(from));
    memcpy(at, to, strlen(to));
    tagc_status status = tagc_manifest_parse(text, strlen(text), 0, &back);
    assert_null(back);
    free(text);
    return status;
}

TEST(one_format_and_one_version_are_read) {
    static const char *const versions[] = {"0", "1", "6", "9"};
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
        char to[40], said[80];
        snprintf(to, sizeof to, "\"version\": %s", versions[i]);
        snprintf(said, sizeof said, "checkpoint of version %s, this program reads version 2", versions[i]);
        assert_int_equal(read_changed("\"version\": 2", to), TAGC_ERR_UNSUPPORTED);
        assert_string_equal(tagc_last_error(), said);
    }
    assert_int_equal(read_changed("\"format\": \"tagc checkpoint\"", "\"format\": \"a checkpoint\""),
                     TAGC_ERR_CORRUPT);
    assert_non_null(strstr(tagc_last_error(), "its format is not \"tagc checkpoint\""));
    static const char *const needed[] = {"\"version\": 2,",          "\"format\": \"tagc checkpoint\",",
                                         "\"owners\": 4,",           "\"gentle\": true,",
                                         ",\n    \"moment1\": true", "\"sent\": 0,"};
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        assert_int_equal(read_changed(needed[i], ""), TAGC_ERR_CORRUPT);
}

/* ---- headers ---- */

/* One change of the layout or the step each. Returns 0 behind the last. */
static int change_layout(tagc_manifest *m, int change) {
    tagc_manifest_tensor *t = m->tensors;
    if (change == 0) m->step++;
    if (change == 1) m->sharded = 0;
    if (change == 2) m->n_owners = 2;
    if (change == 3) m->flats[0].n_elems++;
    if (change == 4) m->flats[0].n_padded = 8, m->flats[1].n_padded = 12;
    if (change == 5) m->flats[0].has_residual = 0;
    if (change == 6) m->flats[0].has_moment1 = 0;
    if (change == 7) m->flats[0].n_gathers = 1;
    if (change == 8) t[0].name[0] = 'd';
    if (change == 9) t[0].n_rows = 3, t[0].n_cols = 2;
    if (change == 10) t[0].offset = 4, t[1].offset = 0;
    if (change == 11) t[2].flat = 0;
    return change < N_LAYOUTS;
}

TEST(a_header_belongs_to_one_layout_rank_and_step) {
    unsigned char headers[N_LAYOUTS + 1][TAGC_RANK_HEADER_BYTES], bytes[TAGC_RANK_HEADER_BYTES];
    for (int change = 0; change <= N_LAYOUTS; change++) {
        tagc_manifest *m = make();
        assert_int_equal(change_layout(m, change), change < N_LAYOUTS);
        m->files[1].n_bytes = TAGC_RANK_HEADER_BYTES; /* the header alone */
        tagc_rank_file_header(m, 1, headers[change]);
        assert_int_equal(tagc_rank_file_check(m, 1, headers[change], TAGC_RANK_HEADER_BYTES, NULL), TAGC_OK);
        for (int other = 0; other < change; other++) {
            assert_int_equal(tagc_rank_file_check(m, 1, headers[other], TAGC_RANK_HEADER_BYTES, NULL),
                             TAGC_ERR_CORRUPT);
        }
        for (size_t i = 0; i < sizeof bytes; i++) {
            memcpy(bytes, headers[change], sizeof bytes);
            bytes[i] ^= 1;
            assert_int_equal(tagc_rank_file_check(m, 1, bytes, sizeof bytes, NULL), TAGC_ERR_CORRUPT);
        }
        assert_int_equal(tagc_rank_file_check(m, 1, headers[change], TAGC_RANK_HEADER_BYTES - 1, NULL),
                         TAGC_ERR_CORRUPT);
        uint64_t sums[] = {m->files[1].checksum, m->files[1].checksum + 1};
        for (int i = 0; i < 2; i++)
            assert_int_equal(tagc_rank_file_check(m, 1, headers[change], TAGC_RANK_HEADER_BYTES, &sums[i]),
                             i == 0 ? TAGC_OK : TAGC_ERR_CORRUPT);
        tagc_manifest_destroy(m);
    }
}

/* Files of version 2 have these hashes: whoever changes one needs another version. */
TEST(the_hash_of_a_layout_stays) {
    static const uint64_t hashes[N_LAYOUTS + 1] = {
        0x081d2890511468d2, 0x412992c8fef61690, 0xcb4a27d0cbfec7cb, 0xa652184915c3ee8d, 0xe71a95e5243bcf34,
        0xfdc9b7f501ca1971, 0x8898a126ee8f582e, 0xe5dc3a946e60e78e, 0x946864764877cd1f, 0x3534442d502c5f87,
        0x21e3062165b54fc3, 0xc26fabf82bae9e62, 0x081d2890511468d2};
    for (int change = 0; change <= N_LAYOUTS; change++) {
        tagc_manifest *m = make();
        change_layout(m, change);
        unsigned char header[TAGC_RANK_HEADER_BYTES];
        tagc_rank_file_header(m, 3, header);
        uint64_t hash = 0;
        for (int i = 0; i < 8; i++) hash |= (uint64_t)header[32 + i] << 8 * i;
        assert_true(hash == hashes[change]);
        tagc_manifest_destroy(m);
    }
}
