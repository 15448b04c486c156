/* See file_kind.h. */
#include "disk/file_kind.h"

#include <stdio.h>
#include <string.h>

static const struct {
    size_t at;
    const char *magic;
    size_t n_magic;
    tagc_file_kind kind;
} magics[] = {
#define MAGIC(at, magic) at, magic, sizeof(magic) - 1
    /* UTF-32 before UTF-16: its mark begins with that of UTF-16. */
    {MAGIC(0, "\xff\xfe\0\0"), {TAGC_FILE_ENCODED, "UTF-32 text", "UTF-32"}},
    {MAGIC(0, "\0\0\xfe\xff"), {TAGC_FILE_ENCODED, "UTF-32 text", "UTF-32"}},
    {MAGIC(0, "\xff\xfe"), {TAGC_FILE_ENCODED, "UTF-16 text", "UTF-16"}},
    {MAGIC(0, "\xfe\xff"), {TAGC_FILE_ENCODED, "UTF-16 text", "UTF-16"}},
    {MAGIC(0, "\x28\xb5\x2f\xfd"), {TAGC_FILE_PACKED, "zstd data", "zstd -d"}},
    {MAGIC(0, "\xfd\x37zXZ\0"), {TAGC_FILE_PACKED, "xz data", "xz -dk"}},
    {MAGIC(4, "1AY&SY"), {TAGC_FILE_PACKED, "bzip2 data", "bzip2 -dk"}},
    {MAGIC(0, "\x04\x22\x4d\x18"), {TAGC_FILE_PACKED, "lz4 data", "lz4 -d"}},
    {MAGIC(0, "7z\xbc\xaf\x27\x1c"), {TAGC_FILE_PACKED, "a 7z archive", "7z x"}},
    {MAGIC(0, "PK\x03\x04"), {TAGC_FILE_PACKED, "a zip archive", "unzip"}},
    {MAGIC(257, "ustar"), {TAGC_FILE_PACKED, "a tar archive", "tar -xf"}},
    {MAGIC(0, "PAR1"), {TAGC_FILE_TABLE, "a Parquet file", "read_parquet"}},
    {MAGIC(0, "ARROW1"), {TAGC_FILE_TABLE, "an Arrow file", "read_feather"}},
    {MAGIC(0, "\xff\xff\xff\xff"), {TAGC_FILE_TABLE, "an Arrow stream", "read_feather"}},
    {MAGIC(0, "\x89HDF"), {TAGC_FILE_TABLE, "an HDF5 file", "read_hdf"}},
    {MAGIC(0, "SQLite format 3"), {TAGC_FILE_TABLE, "an SQLite database", "read_sql"}},
    {MAGIC(0, "\x93NUMPY"), {TAGC_FILE_DOCUMENT, "a NumPy array", NULL}},
    {MAGIC(0, "\x80\x02"), {TAGC_FILE_PICKLE, "a pickle of Python", NULL}},
    {MAGIC(0, "\x80\x04\x95"), {TAGC_FILE_PICKLE, "a pickle of Python", NULL}},
    {MAGIC(0, "\x80\x05\x95"), {TAGC_FILE_PICKLE, "a pickle of Python", NULL}},
    {MAGIC(0, "GGUF"), {TAGC_FILE_DOCUMENT, "a GGUF model", NULL}},
    {MAGIC(0, "%PDF-"), {TAGC_FILE_DOCUMENT, "a PDF document", NULL}},
    {MAGIC(0, "\x7f"
              "ELF"),
     {TAGC_FILE_DOCUMENT, "a program", NULL}},
#undef MAGIC
};

/* Text of western languages without a mark: most characters have their zero bytes at the same places. */
static const tagc_file_kind *by_zeros(const uint8_t *bytes, size_t n_bytes) {
    static const tagc_file_kind kinds[] = {{TAGC_FILE_ENCODED, "UTF-16 text", "UTF-16LE"},
                                           {TAGC_FILE_ENCODED, "UTF-16 text", "UTF-16BE"},
                                           {TAGC_FILE_ENCODED, "UTF-32 text", "UTF-32LE"},
                                           {TAGC_FILE_ENCODED, "UTF-32 text", "UTF-32BE"}};
    size_t n_zeros[4] = {0}, n_groups = n_bytes / 4;
    for (size_t i = 0; i < 4 * n_groups; i++) n_zeros[i % 4] += bytes[i] == 0;
    if (n_groups < 2) return NULL;
    size_t most = n_groups * 3 / 4;
    int is_zero[4]; /* mostly; a text has other bytes at other places */
    for (int i = 0; i < 4; i++) {
        is_zero[i] = n_zeros[i] > most;
        if (!is_zero[i] && n_zeros[i] > n_groups / 4) return NULL;
    }
    if (!is_zero[0] && is_zero[1] && is_zero[2] && is_zero[3]) return &kinds[2];
    if (is_zero[0] && is_zero[1] && is_zero[2] && !is_zero[3]) return &kinds[3];
    if (!is_zero[0] && is_zero[1] && !is_zero[2] && is_zero[3]) return &kinds[0];
    if (is_zero[0] && !is_zero[1] && is_zero[2] && !is_zero[3]) return &kinds[1];
    return NULL;
}

const tagc_file_kind *tagc_file_kind_of(const uint8_t *bytes, size_t n_bytes) {
    for (size_t i = 0; i < sizeof magics / sizeof magics[0]; i++)
        if (n_bytes >= magics[i].at + magics[i].n_magic &&
            memcmp(bytes + magics[i].at, magics[i].magic, magics[i].n_magic) == 0)
            return &magics[i].kind;
    return by_zeros(bytes, n_bytes < TAGC_FILE_KIND_BYTES ? n_bytes : TAGC_FILE_KIND_BYTES);
}

const tagc_file_kind *tagc_file_kind_at(const char *path) {
    uint8_t bytes[TAGC_FILE_KIND_BYTES];
    FILE *file = fopen(path, "rbe");
    if (!file) return NULL;
    size_t n = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    return tagc_file_kind_of(bytes, n);
}
