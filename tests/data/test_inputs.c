/* Inputs of the corpus builder that are not plain UTF-8: JSON lines become documents, a byte order mark is left out, and what
 * is of another kind is refused with a way out. */
#include "scratch.h"

#include "core/status.h"
#include "data/data.h"
#include "data/jsonl.h"

typedef struct built {
    tagc_status status;
    tagc_data_report report;
    char message[512];
    char train[4096], val[4096]; /* the texts, documents ended by '|' */
} built;

static void read_tokens(const char *path, char *text, size_t capacity) {
    tagc_tokens *tokens;
    *text = '\0';
    if (tagc_tokens_open(path, TAGC_TOKENS_TAGC, &tokens) != TAGC_OK) return;
    uint64_t n = tagc_tokens_n(tokens);
    assert_true(n < capacity);
    for (uint64_t i = 0; i < n; i++) {
        uint32_t token = tagc_tokens_at(tokens, i);
        text[i] = token ? (char)token : '|';
    }
    text[n] = '\0';
    tagc_tokens_close(tokens);
}

/* Builds from one file of that name. field: "text" is the default. JSON gives a quarter to validation. */
static built build(const char *root, const char *name, const void *bytes, size_t n_bytes, const char *field,
                   int lossy) {
    static int n_builds;
    built b = {0};
    char in[600], out[600], path[700];
    snprintf(in, sizeof in, "%s/%s", root, name);
    snprintf(out, sizeof out, "%s/out-%d", root, n_builds++);
    scratch_write(in, bytes, n_bytes);
    const char *inputs[] = {in};
    tagc_data_options options;
    tagc_data_options_init(&options);
    assert_string_equal(options.text_field, "text");
    options.inputs = inputs;
    options.n_inputs = 1;
    options.out_dir = out;
    options.val_share = strstr(name, "json") ? 0.25 : 0;
    options.lossy = lossy;
    options.text_field = field;
    b.status = tagc_data_build(&options, &b.report);
    if (b.status != TAGC_OK) snprintf(b.message, sizeof b.message, "%s", tagc_last_error());
    snprintf(path, sizeof path, "%s/train.bin", out);
    read_tokens(path, b.train, sizeof b.train);
    snprintf(path, sizeof path, "%s/val.bin", out);
    read_tokens(path, b.val, sizeof b.val);
    return b;
}

static built build_text(const char *root, const char *name, const char *text, const char *field) {
    return build(root, name, text, strlen(text), field, 0);
}

/* ---- JSON lines ---- */

/* Blank lines, \r\n, a mark at the start, escapes, fields in any order, null and empty texts, no newline at the end. */
static const char lines[] = "\xef\xbb\xbf{\"text\": \"one\", \"id\": 1}\r\n"
                            "\n"
                            "{\"id\": 2, \"text\": \"t\\u00fc\\n{\\\"o\\\"\"}\n"
                            " \t\r\n"
                            "{\"text\": null}\n{\"text\": \"\"}\n"
                            "{\"text\": \"three\", \"more\": {\"text\": \"no\"}}\n"
                            "{\"text\": \"four\"}\n"
                            "{\"text\": \"five\"}";

static void lines_become_documents(void **state) {
    static const char *const names[] = {"a.jsonl", "a.ndjson", "a.json"};
    for (size_t i = 0; i < 3; i++) {
        built b = build_text(*state, names[i], lines, "text");
        assert_ok(b.status);
        /* whole documents go to validation while it has less than a quarter: the second is the first that does */
        assert_string_equal(b.train, "one|three|four|five|");
        assert_string_equal(b.val, "t\xc3\xbc\n{\"o\"|");
        assert_int_equal(b.report.n_files, 1);
        assert_int_equal(b.report.n_documents, 5);
        assert_int_equal(b.report.n_empty, 2);
        assert_string_equal(b.report.json_like, "");
    }
}

static void another_field(void **state) {
    built b =
        build_text(*state, "b.jsonl", "{\"text\": \"a\", \"body\": \"b\"}\n{\"body\": \"c\"}\n", "body");
    assert_ok(b.status);
    assert_string_equal(b.train, "b|");
    assert_string_equal(b.val, "c|");
}

/* A line may be longer than what is read at once, and than a chunk of the builder. */
static void long_lines(void **state) {
    size_t n = 3u << 20;
    char *line = malloc(2 * n), *end = line;
    end += sprintf(end, "{\"text\": \"");
    for (size_t i = 0; i < n; i++) *end++ = (char)('a' + i % 26);
    end += sprintf(end, "\"}\n{\"text\": \"short\"}\n");
    char in[600], out[600], path[700];
    snprintf(in, sizeof in, "%s/long.jsonl", (const char *)*state);
    snprintf(out, sizeof out, "%s/long", (const char *)*state);
    scratch_write(in, line, (size_t)(end - line));
    const char *inputs[] = {in};
    tagc_data_options options;
    tagc_data_options_init(&options);
    options.inputs = inputs;
    options.n_inputs = 1;
    options.out_dir = out;
    options.val_share = 0;
    tagc_data_report report;
    assert_ok(tagc_data_build(&options, &report));
    assert_int_equal(report.n_documents, 2);
    assert_int_equal(report.n_text_bytes, n + 5);
    snprintf(path, sizeof path, "%s/train.bin", out);
    tagc_tokens *tokens;
    assert_ok(tagc_tokens_open(path, TAGC_TOKENS_TAGC, &tokens));
    assert_int_equal(tagc_tokens_n(tokens), n + 1 + 5 + 1);
    for (size_t i = 0; i < n; i++) assert_int_equal(tagc_tokens_at(tokens, i), 'a' + i % 26);
    assert_int_equal(tagc_tokens_at(tokens, n), 0);
    assert_int_equal(tagc_tokens_at(tokens, n + 1), 's');
    tagc_tokens_close(tokens);
    free(line);
}

static void plain_where_asked_or_named_otherwise(void **state) {
    static const char text[] = "{\"text\": \"one\"}\n{\"text\": \"two\"}\n";
    built b = build_text(*state, "c.jsonl", text, NULL);
    assert_ok(b.status);
    assert_int_equal(b.report.n_text_bytes, sizeof text - 1);
    assert_int_equal(b.report.n_documents, 1);
    assert_string_equal(b.report.json_like, ""); /* it was asked for */
    b = build_text(*state, "c.txt", text, "text");
    assert_ok(b.status);
    assert_int_equal(b.report.n_text_bytes, sizeof text - 1);
    assert_non_null(strstr(b.report.json_like, "c.txt"));
    /* JSON that is not lines, as in a folder of sources */
    b = build_text(*state, "package.json", "{\n  \"text\": \"no\"\n}\n", "text");
    assert_ok(b.status);
    assert_int_equal(b.report.n_text_bytes, 19);
    assert_string_equal(b.report.json_like, "");
}

static void wrong_lines_are_named(void **state) {
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"{\"text\": \"a\"}\n\n{\"content\": \"b\", \"id\": 7}\n",
         "w.jsonl line 3: no field \"text\"; it has \"content\", \"id\". --text-field NAME takes another"},
        {"{}\n", "w.jsonl line 1: no field \"text\"; it has no field."},
        {"{\"text\": 3}\n", "w.jsonl line 1: field \"text\" is a number, must be a string"},
        {"{\"text\": [\"a\"]}\n", "field \"text\" is an array, must be a string"},
        {"{\"text\": {}}\n", "field \"text\" is an object, must be a string"},
        {"{\"text\": true}\n", "field \"text\" is true or false, must be a string"},
        {"{\"text\": \"a\"}\n[1, 2]\n", "w.jsonl line 2: must be a JSON object with a field \"text\""},
        {"{\"text\": \"a\"}\nplain\n", "w.jsonl line 2: not a JSON object"},
        {"{\"text\": \"a\"} {\"text\": \"b\"}\n", "w.jsonl line 1: not a JSON object"},
        {"{\"text\": \"a\"\n}\n", "w.jsonl line 1: not a JSON object"},
        {"{\"text\": \"\xff\"}\n", "w.jsonl line 1: not a JSON object"},
        {"{\"text\": \"a\"}\n{\"text\": \"b\\u0000c\"}\n", "w.jsonl line 2: the text's byte 1 is 0x00"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        built b = build_text(*state, "w.jsonl", cases[i].text, "text");
        assert_int_equal(b.status, TAGC_ERR_CORRUPT);
        if (!strstr(b.message, cases[i].message))
            fail_msg("\"%s\" lacks \"%s\"", b.message, cases[i].message);
        assert_string_equal(b.train, ""); /* no token file was written */
    }
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
     "is a Parquet file, and tagc data reads plain text and JSON lines"},
    {"a.arrow", BYTES("ARROW1\0\0\xff\xff\xff\xff"), "read_feather"},
    {"a.arrow", BYTES("\xff\xff\xff\xff\x10\0\0\0"), "is an Arrow stream"},
    {"a.h5", BYTES("\x89HDF\r\n\x1a\n"), "is an HDF5 file"},
    {"a.npy", BYTES("\x93NUMPY\1\0"), "is a NumPy array"},
    {"a.pt", BYTES("\x80\x02}q\x01."), "is a pickle of Python"},
    {"a.pdf", BYTES("%PDF-1.7\n%\xe2\xe3\xcf\xd3\n"), "is a PDF document"},
    {"latin.txt", BYTES("gr\xfc\xdf"),
     "latin.txt: byte 2 is 0xfc, which is not UTF-8 there (iconv converts other"},
    {"zero.txt", BYTES("a\0b"), "zero.txt: byte 1 is 0x00, which is no text"},
};

static void other_kinds_are_refused_with_a_way_out(void **state) {
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        built b = build(*state, kinds[i].name, kinds[i].bytes, kinds[i].n_bytes, "text", 0);
        if (b.status != TAGC_ERR_UNSUPPORTED && b.status != TAGC_ERR_CORRUPT) fail_msg("%zu is taken", i);
        if (!strstr(b.message, kinds[i].message))
            fail_msg("%zu: \"%s\" lacks \"%s\"", i, b.message, kinds[i].message);
        if (strcmp(kinds[i].name, "a.jsonl") == 0) continue;
        b = build(*state, kinds[i].name, kinds[i].bytes, kinds[i].n_bytes, "text", 1);
        assert_ok(b.status); /* lossy keeps every byte */
        assert_int_equal(b.report.n_text_bytes, kinds[i].n_bytes);
    }
}

/* Letters that files of other kinds begin with are text where all is text; zeros here and there make no UTF-16. */
static void texts_are_not_refused(void **state) {
    static const char *const texts[] = {"PAR1 is how a Parquet file begins",
                                        "GGUF is a format",
                                        "%PDF-1.7 is not here",
                                        "BZh91AY&SY starts it",
                                        "ARROW1, ARROW2",
                                        "\xef\xbb\xbf"
                                        "a mark"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        built b = build_text(*state, "ok.txt", texts[i], "text");
        assert_ok(b.status);
        size_t n_mark = texts[i][0] == '\xef' ? 3 : 0;
        assert_int_equal(b.report.n_text_bytes, strlen(texts[i]) - n_mark);
        assert_memory_equal(b.train, texts[i] + n_mark, 3);
    }
}

static void a_mark_inside_stays(void **state) {
    built b = build_text(*state, "mark.txt", "\xef\xbb\xbf\xef\xbb\xbfone \xef\xbb\xbftwo\r\n", "text");
    assert_ok(b.status);
    assert_int_equal(b.report.n_text_bytes, 3 + 4 + 3 + 5);
    assert_memory_equal(b.train, "\xef\xbb\xbfone", 6);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lines_become_documents),
        cmocka_unit_test(another_field),
        cmocka_unit_test(long_lines),
        cmocka_unit_test(plain_where_asked_or_named_otherwise),
        cmocka_unit_test(wrong_lines_are_named),
        cmocka_unit_test(other_kinds_are_refused_with_a_way_out),
        cmocka_unit_test(texts_are_not_refused),
        cmocka_unit_test(a_mark_inside_stays),
    };
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
