/* Inputs of the corpus builder that are not plain UTF-8: a byte order mark is left out, and what is of another kind is refused with
 * a way out. */
#include "scratch.h"

#include "core/status.h"
#include "data/data.h"

typedef struct built {
    tagc_status status;
    tagc_data_report report;
    char message[512];
    char train[4096]; /* the texts, documents ended by '|' */
} built;

static void read_tokens(const char *path, char *text, size_t capacity) {
    tagc_tokens *tokens;
    *text = '\0';
    if (tagc_data_open(path, TAGC_DATA_TRAIN, &tokens) != TAGC_OK) return;
    uint64_t n = tagc_tokens_n(tokens);
    assert_true(n < capacity);
    for (uint64_t i = 0; i < n; i++) {
        uint32_t token = scratch_token(tokens, i);
        text[i] = token ? (char)token : '|';
    }
    text[n] = '\0';
    tagc_tokens_close(tokens);
}

/* Builds from one file of that name. */
static built build(const char *root, const char *name, const void *bytes, size_t n_bytes, int lossy) {
    static int n_builds;
    built b = {0};
    char in[600], out[600], path[700];
    snprintf(in, sizeof in, "%s/%s", root, name);
    snprintf(out, sizeof out, "%s/out-%d", root, n_builds++);
    scratch_write(in, bytes, n_bytes);
    const char *inputs[] = {in};
    tagc_data_options options;
    tagc_data_options_init(&options);
    options.inputs = inputs;
    options.n_inputs = 1;
    options.out_dir = out;
    options.val_share = 0;
    options.lossy = lossy;
    b.status = tagc_data_build(&options, &b.report);
    if (b.status != TAGC_OK) snprintf(b.message, sizeof b.message, "%s", tagc_last_error());
    snprintf(path, sizeof path, "%s/train.bin", out);
    read_tokens(path, b.train, sizeof b.train);
    return b;
}

static built build_text(const char *root, const char *name, const char *text) {
    return build(root, name, text, strlen(text), 0);
}

/* ---- kinds ---- */

#define BYTES(text) text, sizeof(text) - 1
static const struct {
    const char *name, *bytes;
    size_t n_bytes;
    const char *message;
} kinds[] = {
    {"a.txt", BYTES("\xff\xfeh\0i\0\n\0"),
     "a.txt is UTF-16 text, and tagc data reads UTF-8: iconv -f UTF-16 -t UTF-8"},
    {"a.txt", BYTES("\xfe\xff\0h\0i\0\n"), "iconv -f UTF-16 -t UTF-8"},
    {"a.txt", BYTES("h\0e\0l\0l\0o\0 \0y\0o\0u\0\n\0"),
     "is UTF-16 text, and tagc data reads UTF-8: iconv -f UTF-16LE"},
    {"a.txt", BYTES("\0h\0e\0l\0l\0o\0 \0y\0o\0u\0\n"), "iconv -f UTF-16BE"},
    {"a.txt", BYTES("\xff\xfe\0\0h\0\0\0i\0\0\0"),
     "is UTF-32 text, and tagc data reads UTF-8: iconv -f UTF-32 "},
    {"a.txt", BYTES("\0\0\xfe\xff\0\0\0h\0\0\0i"), "iconv -f UTF-32 "},
    {"a.txt", BYTES("h\0\0\0i\0\0\0 \0\0\0y\0\0\0"), "iconv -f UTF-32LE"},
    {"a.txt", BYTES("\0\0\0h\0\0\0i\0\0\0 \0\0\0y"), "iconv -f UTF-32BE"},
    {"a.jsonl", BYTES("\xff\xfe{\0}\0\n\0"), "a.jsonl is UTF-16 text"},
    {"a.zst", BYTES("\x28\xb5\x2f\xfd\x04\x00\x59\x00\x00hello"),
     "is zstd data, and tagc data reads plain text and gzip: zstd -d"},
    {"a.xz", BYTES("\xfd\x37zXZ\0\0\4"), "is xz data"},
    {"a.bz2", BYTES("BZh91AY&SY\x01\x02\xff\xff\xff\xff"), "is bzip2 data"},
    {"a.lz4", BYTES("\x04\x22\x4d\x18\x64\x40\xa7\xff\xff\xff\xff"), "is lz4 data"},
    {"a.zip", BYTES("PK\3\4\x14\0\0\0\0\0"), "is a zip archive"},
    {"a.7z", BYTES("7z\xbc\xaf\x27\x1c\0\4"), "is a 7z archive"},
    {"a.parquet", BYTES("PAR1\x15\x04\x15\0\0\xff\xff\xff\xff"),
     "is a Parquet file, and tagc data reads plain text: in Python, pandas.read_parquet"},
    {"a.arrow", BYTES("ARROW1\0\0\xff\xff\xff\xff"), "read_feather"},
    {"a.arrow", BYTES("\xff\xff\xff\xff\x10\0\0\0"), "is an Arrow stream"},
    {"a.h5", BYTES("\x89HDF\r\n\x1a\n"), "is an HDF5 file"},
    {"a.npy", BYTES("\x93NUMPY\1\0"), "is a NumPy array"},
    {"a.pt", BYTES("\x80\x02}q\x01."), "is a pickle of Python"},
    {"a.jsonl", BYTES("{\"text\": \"one\"}\n"),
     "a.jsonl is JSON lines, and tagc data reads plain text: python -m tagc data takes"},
    {"b.ndjson.gz", BYTES("{\"text\": \"one\"}\n"), "b.ndjson.gz is JSON lines"},
    {"a.pdf", BYTES("%PDF-1.7\n%\xe2\xe3\xcf\xd3\n"), "is a PDF document"},
    {"latin.txt", BYTES("gr\xfc\xdf"),
     "latin.txt: byte 2 is 0xfc, which is not UTF-8 there (iconv converts other"},
    {"zero.txt", BYTES("a\0b"), "zero.txt: byte 1 is 0x00, which is no text"},
};

TEST(other_kinds_are_refused_with_a_way_out) {
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        built b = build(*state, kinds[i].name, kinds[i].bytes, kinds[i].n_bytes, 0);
        if (b.status != TAGC_ERR_UNSUPPORTED && b.status != TAGC_ERR_CORRUPT) fail_msg("%zu is taken", i);
        if (!strstr(b.message, kinds[i].message))
            fail_msg("%zu: \"%s\" lacks \"%s\"", i, b.message, kinds[i].message);
        b = build(*state, kinds[i].name, kinds[i].bytes, kinds[i].n_bytes, 1);
        assert_ok(b.status); /* lossy keeps every byte */
        assert_int_equal(b.report.n_text_bytes, kinds[i].n_bytes);
    }
}

/* Letters that files of other kinds begin with are text where all is text; zeros here and there make no UTF-16. */
TEST(texts_are_not_refused) {
    static const char *const texts[] = {"PAR1 is how a Parquet file begins",
                                        "GGUF is a format",
                                        "%PDF-1.7 is not here",
                                        "BZh91AY&SY starts it",
                                        "ARROW1, ARROW2",
                                        "\xef\xbb\xbf"
                                        "a mark"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        built b = build_text(*state, "ok.txt", texts[i]);
        assert_ok(b.status);
        size_t n_mark = texts[i][0] == '\xef' ? 3 : 0;
        assert_int_equal(b.report.n_text_bytes, strlen(texts[i]) - n_mark);
        assert_memory_equal(b.train, texts[i] + n_mark, 3);
    }
}

TEST(a_mark_inside_stays) {
    built b = build_text(*state, "mark.txt", "\xef\xbb\xbf\xef\xbb\xbfone \xef\xbb\xbftwo\r\n");
    assert_ok(b.status);
    assert_int_equal(b.report.n_text_bytes, 3 + 4 + 3 + 5);
    assert_memory_equal(b.train, "\xef\xbb\xbfone", 6);
}

int main(void) {
    return test_run(scratch_make, scratch_remove);
}
