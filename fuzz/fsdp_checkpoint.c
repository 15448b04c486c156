/* Manifests and rank files from anywhere: whatever the bytes, the parser refuses or gives tables that are
 * safe to compute offsets with. Input: a manifest, or "R", the rank as a byte, and a rank file for a fixed
 * manifest. */
#include "core/status.h"
#include "fsdp/checkpoint_format.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t n_bytes);

static const char fixed[] =
    "{\"checksum\":\"\",\"content\":{\"format\":\"tagc checkpoint\",\"version\":2,\"step\":3,\"n_updates\":3,"
    "\"world_size\":2,\"sharded\":true,\"gentle\":true,\"owners\":2,"
    "\"tensors\":[{\"name\":\"a\",\"n_rows\":3,\"n_cols\":5,\"flat\":0,\"offset\":0}],"
    "\"flats\":[{\"n_elems\":15,\"n_padded\":32,\"residual\":true,\"moment1\":true}],"
    "\"files\":[{\"n_bytes\":384,\"n_model\":128,\"xxh3_64\":\"0123456789abcdef\",\"gathered\":{\"sent\":0,"
    "\"received\":0}},"
    "{\"n_bytes\":384,\"n_model\":128,\"xxh3_64\":\"0123456789abcdef\",\"gathered\":{\"sent\":0,\"received\":"
    "0}}],"
    "\"extra\":\"\"}}";

static void require(int condition) {
    if (!condition) abort();
}

/* What a rank holds of a flat lies in it. */
static void check_parts(const tagc_manifest *m, int rank, const tagc_manifest_flat *f, int flat) {
    uint64_t first, n_owned;
    tagc_manifest_owned(m, flat, rank, &first, &n_owned);
    require(first <= f->n_padded && n_owned <= f->n_padded - first);
}

static void check_tables(const tagc_manifest *m) {
    for (int i = 0; i < m->n_tensors; i++) {
        const tagc_manifest_tensor *t = &m->tensors[i];
        require(t->flat >= 0 && t->flat < m->n_flats && strlen(t->name) < sizeof t->name);
        require(t->n_elems == t->n_rows * t->n_cols && t->offset + t->n_elems <= m->flats[t->flat].n_elems);
    }
    for (int rank = 0; rank < m->world_size; rank++) {
        uint64_t end = tagc_rank_file_offset(m, rank, m->n_flats, TAGC_SECTION_MASTER), last = 0;
        require(tagc_rank_file_bytes(m, rank) == m->files[rank].n_bytes && end <= m->files[rank].n_bytes);
        for (int flat = 0; flat < m->n_flats && flat < 100; flat++)
            for (int section = 0; section < TAGC_N_SECTIONS; section++) {
                uint64_t at = tagc_rank_file_offset(m, rank, flat, (tagc_section)section);
                require(at >= last && at >= TAGC_RANK_HEADER_BYTES && at <= end);
                last = at;
            }
    }
    for (int rank = 0; rank < m->world_size && rank < 100; rank++)
        for (int flat = 0; flat < m->n_flats && flat < 100; flat++)
            check_parts(m, rank, &m->flats[flat], flat);
    char *text;
    require(tagc_manifest_print(m, &text) == TAGC_OK); /* what was read can be written, and read again */
    tagc_manifest *again;
    require(tagc_manifest_parse(text, strlen(text), 1, &again) == TAGC_OK);
    require(again->n_tensors == m->n_tensors && again->step == m->step &&
            strcmp(again->extra, m->extra) == 0);
    tagc_manifest_destroy(again);
    free(text);
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t n_bytes) {
    tagc_manifest *m;
    if (n_bytes >= 2 && data[0] == 'R') {
        require(tagc_manifest_parse(fixed, sizeof fixed - 1, 0, &m) == TAGC_OK);
        int rank = data[1] % 2;
        unsigned char header[TAGC_RANK_HEADER_BYTES];
        tagc_rank_file_header(m, rank, header);
        int fits = n_bytes - 2 == 384 && memcmp(data + 2, header, sizeof header) == 0;
        if (n_bytes - 2 >= sizeof header) {
            uint64_t other = m->files[rank].checksum + 1;
            require((tagc_rank_file_check(m, rank, data + 2, n_bytes - 2, NULL) == TAGC_OK) == fits);
            require(tagc_rank_file_check(m, rank, data + 2, n_bytes - 2, &other) == TAGC_ERR_CORRUPT);
        }
        tagc_manifest_destroy(m);
        return 0;
    }
    if (tagc_manifest_parse((const char *)data, n_bytes, 0, &m) != TAGC_OK) return 0;
    check_tables(m);
    tagc_manifest_destroy(m);
    return 0;
}
