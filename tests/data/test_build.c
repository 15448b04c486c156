/* The corpus builder: what goes in comes out, the same every time; whatever is wrong with the input or the
 * disk is named with file and byte, and leaves nothing half-made behind. */
#include "scratch.h"

#include "core/status.h"
#include "data/data.h"
#include <errno.h>
#include <iconv.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <zlib.h>

static tagc_data_options options_for(const char *const *inputs, size_t n_inputs, const char *out_dir) {
    tagc_data_options options;
    tagc_data_options_init(&options);
    options.inputs = inputs;
    options.n_inputs = n_inputs;
    options.out_dir = out_dir;
    return options;
}

static size_t compress_gzip(const char *text, size_t n_bytes, uint8_t *out, size_t capacity) {
    z_stream z = {0};
    assert_int_equal(deflateInit2(&z, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY), Z_OK);
    z.next_in = (Bytef *)(uintptr_t)text; /* zlib only reads it */
    z.avail_in = (uInt)n_bytes;
    z.next_out = out;
    z.avail_out = (uInt)capacity;
    assert_int_equal(deflate(&z, Z_FINISH), Z_STREAM_END);
    size_t n = z.total_out;
    deflateEnd(&z);
    return n;
}

/* The text of a token file, documents ended by '|' (which the texts here do not have). */
static char *text_of(const char *path) {
    tagc_tokens *tokens;
    tagc_tokens_info info;
    assert_ok(tagc_data_open(path, TAGC_DATA_TRAIN, &tokens));
    tagc_tokens_get_info(tokens, &info);
    assert_int_equal(info.vocab_size, 256);
    assert_int_equal(info.token_bytes, 1);
    assert_int_equal(info.end_of_text, 0);
    assert_string_equal(info.tokenizer, "bytes");
    uint64_t n = tagc_tokens_n(tokens);
    char *text = malloc(n + 1);
    for (uint64_t i = 0; i < n; i++) {
        uint32_t token = scratch_token(tokens, i);
        text[i] = token ? (char)token : '|';
    }
    text[n] = '\0';
    tagc_tokens_close(tokens);
    return text;
}

static void expect_text(const char *path, const char *expected) {
    char *text = text_of(path);
    assert_string_equal(text, expected);
    free(text);
}

TEST(reads_folders_files_and_gzip_in_order) {
    const char *root = *state;
    char in[600], out[600], path[700];
    snprintf(in, sizeof in, "%s/order", root);
    snprintf(out, sizeof out, "%s/made/by/build", root);
    mkdir(in, 0777);
    snprintf(path, sizeof path, "%s/m", in);
    mkdir(path, 0777);
    /* Byte order: B < a < m/... < z. Hidden files, links to folders and links to nothing are passed over. */
    static const struct {
        const char *name, *text;
    } files[] = {{"z", "last"},  {"a", "gr\xc3\xbc\xc3\x9f"}, {"B", "first"}, {"m/2", "two"},
                 {"m/1", "one"}, {".hidden", "no"},           {"m/empty", ""}};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "%s/%s", in, files[i].name);
        scratch_write(path, files[i].text, strlen(files[i].text));
    }
    snprintf(path, sizeof path, "%s/loop", in);
    assert_int_equal(symlink(in, path), 0);
    snprintf(path, sizeof path, "%s/nothing", in);
    assert_int_equal(symlink("/nowhere/at/all", path), 0);
    /* Two gzip members in a row are one text. */
    uint8_t packed[256];
    size_t n = compress_gzip("com", 3, packed, sizeof packed);
    n += compress_gzip("pressed", 7, packed + n, sizeof packed - n);
    const char *gz = scratch_path(*state, "x.gz");
    scratch_write(gz, packed, n);

    const char *inputs[] = {gz, in};
    tagc_data_options options = options_for(inputs, 2, out);
    options.val_share = 0;
    tagc_data_report report;
    assert_ok(tagc_data_build(&options, &report));
    snprintf(path, sizeof path, "%s/train.bin", out);
    expect_text(path, "compressed|first|gr\xc3\xbc\xc3\x9f|one|two|last|");
    assert_int_equal(scratch_n_entries(out), 1);
    assert_int_equal(report.n_files, 7);
    assert_int_equal(report.n_total_files, 7);
    assert_int_equal(report.n_empty, 1);
    assert_int_equal(report.n_text_bytes, 31);
    assert_int_equal(report.n_train_tokens, 37);
    assert_int_equal(report.n_val_tokens, 0);
    assert_int_equal(report.skipped[TAGC_SKIP_HIDDEN].n, 1);
    assert_int_equal(report.skipped[TAGC_SKIP_FOLDER].n, 1);
    assert_int_equal(report.skipped[TAGC_SKIP_BROKEN].n, 1);
    assert_int_equal(report.skipped[TAGC_SKIP_SPECIAL].n, 0);
}

TEST(few_documents_give_their_tails) {
    const char *out = *state, *a = scratch_path(*state, "tail_a"), *b = scratch_path(*state, "tail_b");
    scratch_write(a, "0123456789", 10);
    scratch_write(b, "abcdefghijklmnopqrst", 20);
    const char *inputs[] = {a, b};
    tagc_data_options options = options_for(inputs, 2, out);
    options.val_share = 0.2;
    assert_ok(tagc_data_build(&options, NULL));
    expect_text(scratch_path(*state, "train.bin"), "01234567|abcdefghijklmnop|");
    expect_text(scratch_path(*state, "val.bin"), "89|qrst|");
}

TEST(many_documents_are_given_whole) {
    enum { N = 200 };
    char in[600], path[700];
    uint64_t seed = 17;
    snprintf(in, sizeof in, "%s/many", (char *)*state);
    mkdir(in, 0777);
    size_t n_all = 0;
    for (int i = 0; i < N; i++) {
        char text[1000];
        size_t n = 10 + scratch_random(&seed) % 900;
        memset(text, 'a' + i % 26, n);
        snprintf(path, sizeof path, "%s/%03d", in, i);
        scratch_write(path, text, n);
        n_all += n + 1;
    }
    const char *inputs[] = {in};
    tagc_data_options options = options_for(inputs, 1, *state);
    tagc_data_report report;
    assert_ok(tagc_data_build(&options, &report));
    assert_int_equal(report.n_train_tokens + report.n_val_tokens, n_all);
    assert_in_range(report.n_val_tokens, n_all / 10 - 910,
                    n_all / 10 + 910); /* off by one document at most */

    /* Each document is in one of the files, whole: neighbours in a file never share a letter across an end.
     */
    int n_documents = 0;
    for (int f = 0; f < 2; f++) {
        char *text = text_of(scratch_path(*state, f ? "val.bin" : "train.bin"));
        if (f == 0) assert_int_equal(text[0], 'a'); /* nothing is behind its share at first */
        for (char *p = text; *p; n_documents++) {
            char *end = strchr(p, '|');
            assert_non_null(end);
            for (char *q = p; q < end; q++) assert_int_equal(*q, *p);
            p = end + 1;
        }
        free(text);
    }
    assert_int_equal(n_documents, N);

    size_t n_first, n_second;
    uint8_t *first = scratch_read(scratch_path(*state, "val.bin"), &n_first);
    assert_ok(tagc_data_build(&options, NULL));
    uint8_t *second = scratch_read(scratch_path(*state, "val.bin"), &n_second);
    assert_int_equal(n_first, n_second);
    assert_memory_equal(first, second, n_first);
    free(first);
    free(second);
}

/* Larger than the builder's chunk, so that the cuts between chunks are seen to change nothing. */
TEST(chunks_do_not_show) {
    size_t n = (5u << 20) / 2;
    char *text = malloc(n);
    for (size_t i = 0; i < n; i++) text[i] = "\xe6\x9c\xa8\xc3\x9f \xf0\x9f\x8e\x89xy\n"[i % 13];
    n -= n % 13;
    const char *path = scratch_path(*state, "large.txt");
    scratch_write(path, text, n);
    remove(scratch_path(*state, "val.bin")); /* of the test before */
    tagc_data_options options = options_for(&path, 1, *state);
    options.val_share = 0;
    tagc_data_report report;
    assert_ok(tagc_data_build(&options, &report));
    assert_int_equal(report.n_text_bytes, n);
    assert_int_equal(report.n_train_tokens, n + 1);
    char *made = text_of(scratch_path(*state, "train.bin"));
    assert_memory_equal(made, text, n);
    assert_string_equal(made + n, "|");
    free(made);
    free(text);
}

/* ---- what a folder has beside files ---- */

static void expect_skipped(const tagc_data_report *report, tagc_data_skip why, uint64_t n,
                           const char *names) {
    assert_int_equal(report->skipped[why].n, n);
    if (!strstr(report->skipped[why].names, names))
        fail_msg("\"%s\" lacks \"%s\"", report->skipped[why].names, names);
}

TEST(what_is_left_out_is_told) {
    char in[600], out[600], names[8][700];
    snprintf(in, sizeof in, "%s/odd", (char *)*state);
    snprintf(out, sizeof out, "%s/odd-out", (char *)*state);
    mkdir(in, 0777);
    static const char *const all[] = {"a", "pipe", "socket", "ring", "gone", "up", ".git", "null"};
    for (int i = 0; i < 8; i++) snprintf(names[i], sizeof names[i], "%s/%s", in, all[i]);
    const char *input = in;
    tagc_data_options options = options_for(&input, 1, out);
    options.val_share = 0;
    tagc_data_report report;

    assert_int_equal(mkfifo(names[1], 0666), 0);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%.100s", names[2]);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    close(fd);
    assert_int_equal(symlink("ring", names[3]), 0);
    assert_int_equal(symlink("/nowhere", names[4]), 0);
    assert_int_equal(symlink("..", names[5]), 0);
    mkdir(names[6], 0777);
    assert_int_equal(symlink("/dev/null", names[7]), 0);
    /* Of a folder with nothing else the reason is in the failure. */
    assert_fails(tagc_data_build(&options, &report), TAGC_ERR_ARGUMENT, "no file in it; skipped 1: hidden (");

    scratch_write(names[0], "text", 4);
    assert_ok(tagc_data_build(&options, &report));
    assert_int_equal(report.n_files, 1);
    expect_skipped(&report, TAGC_SKIP_HIDDEN, 1, "odd/.git");
    expect_skipped(&report, TAGC_SKIP_BROKEN, 2, "odd/gone, ");
    expect_skipped(&report, TAGC_SKIP_BROKEN, 2, "odd/ring");
    expect_skipped(&report, TAGC_SKIP_FOLDER, 1, "odd/up");
    expect_skipped(&report, TAGC_SKIP_SPECIAL, 3, "odd/null, ");
    expect_skipped(&report, TAGC_SKIP_SPECIAL, 3, "odd/socket");
    expect_skipped(&report, TAGC_SKIP_UNREADABLE, 0, "");
    expect_skipped(&report, TAGC_SKIP_TWICE, 0, "");
    expect_text(scratch_path(out, "train.bin"), "text|");
    /* Named, each of them is a failure: the user meant something. */
    input = names[4];
    assert_fails(tagc_data_build(&options, &report), TAGC_ERR_IO, "gone: cannot stat");

    /* Names are kept short, and no control character of theirs reaches a terminal. */
    char path[2000], name[220];
    input = in;
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    name[0] = '.';
    for (int i = 0; i < 4; i++) {
        name[1] = (char)('0' + i);
        snprintf(path, sizeof path, "%s/%s", in, i == 0 ? ".\x1b[31m" : name);
        scratch_write(path, "", 0);
    }
    assert_ok(tagc_data_build(&options, &report));
    expect_skipped(&report, TAGC_SKIP_HIDDEN, 5, ".?[31m, ");
    expect_skipped(&report, TAGC_SKIP_HIDDEN, 5, "nnn, ...");
}

TEST(a_file_counts_once) {
    char in[600], out[600], paths[5][700];
    snprintf(in, sizeof in, "%s/twice", (char *)*state);
    snprintf(out, sizeof out, "%s/twice-out", (char *)*state);
    mkdir(in, 0777);
    static const char *const names[] = {"a", "b-hard", "c-soft", "d", "e-same-text"};
    for (int i = 0; i < 5; i++) snprintf(paths[i], sizeof paths[i], "%s/%s", in, names[i]);
    scratch_write(paths[0], "one", 3);
    scratch_write(paths[3], "two", 3);
    scratch_write(paths[4], "one", 3); /* equal, but another file */
    assert_int_equal(link(paths[0], paths[1]), 0);
    assert_int_equal(symlink("d", paths[2]), 0);
    const char *inputs[] = {paths[3], in, paths[0], in};
    tagc_data_options options = options_for(inputs, 4, out);
    options.val_share = 0;
    tagc_data_report report;
    assert_ok(tagc_data_build(&options, &report));
    expect_text(scratch_path(out, "train.bin"), "two|one|one|");
    assert_int_equal(report.n_files, 3);
    /* b, c and d below the folder, a, and all five again */
    expect_skipped(&report, TAGC_SKIP_TWICE, 9, "b-hard, ");
    expect_skipped(&report, TAGC_SKIP_TWICE, 9, "c-soft, ");
}

TEST(unreadable_names_are_told) {
    char in[600], out[600];
    snprintf(in, sizeof in, "%s/shut", (char *)*state);
    snprintf(out, sizeof out, "%s/shut-out", (char *)*state);
    mkdir(in, 0777);
    scratch_write(scratch_path(in, "a"), "open", 4);
    scratch_write(scratch_path(in, "closed"), "no", 2);
    chmod(scratch_path(in, "closed"), 0);
    mkdir(scratch_path(in, "folder"), 0);
    mkdir(out, 0777);
    chmod(out, 0777);
    chmod(*state, 0755);
    uid_t user = geteuid();
    if (user == 0) assert_int_equal(seteuid(65534), 0); /* root may read all */
    const char *input = in;
    tagc_data_options options = options_for(&input, 1, out);
    options.val_share = 0;
    tagc_data_report report;
    tagc_status status = tagc_data_build(&options, &report);
    char closed[700], message[512];
    snprintf(closed, sizeof closed, "%s/closed", in);
    input = closed;
    tagc_status named = tagc_data_build(&options, NULL);
    snprintf(message, sizeof message, "%s", tagc_last_error());
    if (user == 0) assert_int_equal(seteuid(0), 0);
    assert_ok(status);
    expect_text(scratch_path(out, "train.bin"), "open|");
    expect_skipped(&report, TAGC_SKIP_UNREADABLE, 2, "shut/closed, ");
    expect_skipped(&report, TAGC_SKIP_UNREADABLE, 2, "shut/folder");
    assert_int_equal(named, TAGC_ERR_IO);
    assert_non_null(strstr(message, "closed: cannot open"));
    chmod(scratch_path(in, "folder"), 0777);
}

/* Characters as glibc decodes them, on bytes that are nearly UTF-8; the byte 0 counts, too. */
TEST(invalid_bytes_are_those_of_iconv) {
    enum { N = 1 << 16 };
    static const uint8_t leads[] = {0x41, 0x80, 0xbf, 0xc1, 0xc2, 0xdf, 0xe0, 0xed, 0xef,
                                    0xf0, 0xf4, 0xf5, 0x9f, 0xa0, 0x8f, 0x90, 0xff, 0x00};
    char *text = malloc(N);
    uint64_t seed = 41;
    for (size_t i = 0; i < N; i++) text[i] = (char)leads[scratch_random(&seed) % sizeof leads];
    iconv_t converter = iconv_open("UTF-32LE", "UTF-8");
    assert_true(converter != (iconv_t)-1);
    uint64_t n_invalid = 0;
    char *p = text;
    for (size_t n_left = N; n_left > 0;) {
        char code[4], *q = code;
        size_t n_code = sizeof code;
        size_t done = iconv(converter, &p, &n_left, &q, &n_code);
        if (n_code == 0) n_invalid += memcmp(code, "\0\0\0", 4) == 0; /* a character was converted */
        if (done != (size_t)-1 || errno == E2BIG) continue;
        iconv(converter, NULL, NULL, NULL, NULL);
        n_invalid++;
        p++;
        n_left--;
    }
    iconv_close(converter);
    const char *path = scratch_path(*state, "hostile.txt");
    scratch_write(path, text, N);
    tagc_data_options options = options_for(&path, 1, *state);
    options.lossy = 1;
    tagc_data_report report;
    assert_ok(tagc_data_build(&options, &report));
    assert_int_equal(report.n_invalid_bytes, n_invalid);
    assert_in_range(n_invalid, N / 2, N - 1);
    free(text);
}

/* ---- failures; each must leave the files of an earlier build as they were, and nothing beside them ---- */

typedef struct earlier {
    char out[600];
    uint8_t *train, *val;
    size_t n_train, n_val;
} earlier;

static earlier build_earlier(void *folder) {
    earlier e;
    snprintf(e.out, sizeof e.out, "%s/kept", (char *)folder);
    const char *path = scratch_path(folder, "good.txt");
    scratch_write(path, "good old text, not to be lost", 29);
    tagc_data_options options = options_for(&path, 1, e.out);
    assert_ok(tagc_data_build(&options, NULL));
    e.train = scratch_read(scratch_path(e.out, "train.bin"), &e.n_train);
    e.val = scratch_read(scratch_path(e.out, "val.bin"), &e.n_val);
    return e;
}

static void check_untouched(earlier *e) {
    for (int f = 0; f < 2; f++) {
        size_t n;
        uint8_t *now = scratch_read(scratch_path(e->out, f ? "val.bin" : "train.bin"), &n);
        assert_int_equal(n, f ? e->n_val : e->n_train);
        assert_memory_equal(now, f ? e->val : e->train, n);
        free(now);
    }
    assert_int_equal(scratch_n_entries(e->out), 2);
    free(e->train);
    free(e->val);
}

static void build_fails(const earlier *e, const char *input, tagc_status status, const char *part) {
    tagc_data_options options = options_for(&input, 1, e->out);
    assert_fails(tagc_data_build(&options, NULL), status, part);
}

TEST(invalid_text_is_named_with_its_byte) {
    static const struct {
        const char *text;
        size_t n_bytes;
        const char *part;
    } cases[] = {{"abc\xff", 4, "byte 3 is 0xff"},
                 {"\x80", 1, "byte 0 is 0x80"},
                 {"ab\xc3", 3, "byte 2 is 0xc3"},
                 {"a\xed\xa0\x80", 4, "byte 1 is 0xed"},
                 {"\xc0\xaf", 2, "byte 0 is 0xc0"},
                 {"\xf4\x90\x80\x80", 4, "byte 0 is 0xf4"},
                 {"\xe6\x9c\xa8 \xe6\x9c ", 7, "byte 4 is 0xe6"},
                 {"zero\0", 5, "byte 4 is 0x00"}};
    earlier e = build_earlier(*state);
    const char *path = scratch_path(*state, "bad.txt");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        scratch_write(path, cases[i].text, cases[i].n_bytes);
        build_fails(&e, path, TAGC_ERR_CORRUPT, cases[i].part);
        build_fails(&e, path, TAGC_ERR_CORRUPT, path);
    }
    /* Beyond the first chunk, whose end cuts a character in two. */
    enum { N_FAR = 3 << 20 };
    char *far = malloc(N_FAR), part[64];
    for (size_t k = 0; k < N_FAR; k += 3) memcpy(far + k, "\xe6\x9c\xa8", 3);
    far[N_FAR - 9] = '\xff';
    scratch_write(path, far, N_FAR);
    snprintf(part, sizeof part, "byte %d is 0xff", N_FAR - 9);
    build_fails(&e, path, TAGC_ERR_CORRUPT, part);
    free(far);
    check_untouched(&e);
}

TEST(lossy_keeps_bytes_as_they_are) {
    const char *path = scratch_path(*state, "lossy.txt");
    scratch_write(path, "a\xff\xc3(\xe6\x9c\xa8\xe6\x9c", 9);
    remove(scratch_path(*state, "val.bin")); /* of the test before */
    tagc_data_options options = options_for(&path, 1, *state);
    options.val_share = 0;
    options.lossy = 1;
    tagc_data_report report;
    assert_ok(tagc_data_build(&options, &report));
    assert_int_equal(report.n_invalid_bytes, 4);
    expect_text(scratch_path(*state, "train.bin"), "a\xff\xc3(\xe6\x9c\xa8\xe6\x9c|");
}

TEST(damaged_gzip_is_named_with_its_byte) {
    earlier e = build_earlier(*state);
    const char *path = scratch_path(*state, "bad.gz");
    enum { N_TEXT = 200000 };
    char *text = malloc(N_TEXT);
    uint8_t *packed = malloc(N_TEXT);
    uint64_t seed = 5;
    for (size_t i = 0; i < N_TEXT; i++) text[i] = (char)('a' + scratch_random(&seed) % 26);
    size_t n = compress_gzip(text, N_TEXT, packed, N_TEXT);
    static const size_t cuts[] = {2, 5, 10, 11, 1000, 65536, 65537};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        char part[64];
        scratch_write(path, packed, cuts[i]);
        snprintf(part, sizeof part, "bad.gz: cut short: the gzip data does not end at byte %zu", cuts[i]);
        build_fails(&e, path, TAGC_ERR_CORRUPT, part);
    }
    for (size_t n_missing = 1; n_missing <= 9; n_missing++) { /* within the trailer too */
        scratch_write(path, packed, n - n_missing);
        build_fails(&e, path, TAGC_ERR_CORRUPT, "cut short");
    }
    packed[n - 6] ^= 1; /* the checksum */
    scratch_write(path, packed, n);
    build_fails(&e, path, TAGC_ERR_CORRUPT, "bad.gz: damaged gzip data at byte");
    packed[n - 6] ^= 1;
    packed[n] = 'x'; /* something after the end */
    scratch_write(path, packed, n + 1);
    build_fails(&e, path, TAGC_ERR_CORRUPT, "bad.gz: ");
    /* And text that is wrong inside good gzip. */
    text[100] = '\xff';
    n = compress_gzip(text, N_TEXT, packed, N_TEXT);
    scratch_write(path, packed, n);
    build_fails(&e, path, TAGC_ERR_CORRUPT, "byte 100 of the decompressed text is 0xff");
    free(text);
    free(packed);
    check_untouched(&e);
}

TEST(nothing_to_read) {
    earlier e = build_earlier(*state);
    char folder[600];
    snprintf(folder, sizeof folder, "%s/bare", (char *)*state);
    mkdir(folder, 0777);
    build_fails(&e, folder, TAGC_ERR_ARGUMENT, "no file in it");
    scratch_write(scratch_path(folder, "empty"), "", 0);
    build_fails(&e, folder, TAGC_ERR_ARGUMENT, "1 file and no text in it");
    scratch_write(scratch_path(folder, "empty"), "abc", 3);
    build_fails(&e, folder, TAGC_ERR_ARGUMENT, "nothing is left for val.bin");
    build_fails(&e, scratch_path(*state, "absent"), TAGC_ERR_IO, "absent: cannot stat");
    check_untouched(&e);
}

TEST(bad_options_are_named) {
    const char *path = scratch_path(*state, "good.txt");
    tagc_data_options options = options_for(&path, 0, *state);
    assert_fails(tagc_data_build(&options, NULL), TAGC_ERR_ARGUMENT, "n_inputs is 0");
    options = options_for(&path, 1, NULL);
    assert_fails(tagc_data_build(&options, NULL), TAGC_ERR_ARGUMENT, "out_dir is missing");
    static const double shares[] = {-0.1, 0.51, 0.0 / 0.0};
    for (int i = 0; i < 3; i++) {
        options = options_for(&path, 1, *state);
        options.val_share = shares[i];
        assert_fails(tagc_data_build(&options, NULL), TAGC_ERR_ARGUMENT, "val_share is");
    }
    scratch_write(path, "text enough for both", 20);
    options = options_for(&path, 1, path);
    assert_fails(tagc_data_build(&options, NULL), TAGC_ERR_IO, "good.txt");
    options = options_for(&path, 1, "/proc/no/such/place");
    assert_fails(tagc_data_build(&options, NULL), TAGC_ERR_IO, "cannot make folder");
}

/* RLIMIT_FSIZE makes writes fail as a full disk does, with another word. */
TEST(a_full_disk_is_told) {
    earlier e = build_earlier(*state);
    const char *path = scratch_path(*state, "big.txt");
    size_t n = 1 << 20;
    char *text = malloc(n);
    memset(text, 'a', n);
    scratch_write(path, text, n);
    free(text);
    struct rlimit before, small;
    getrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, SIG_IGN);
    static const rlim_t limits[] = {100, 100000, 900000};
    for (int i = 0; i < 3; i++) {
        small = before;
        small.rlim_cur = limits[i];
        setrlimit(RLIMIT_FSIZE, &small);
        tagc_data_options options = options_for(&path, 1, e.out);
        tagc_status status = tagc_data_build(&options, NULL);
        setrlimit(RLIMIT_FSIZE, &before);
        assert_int_equal(status, TAGC_ERR_IO);
        assert_non_null(strstr(tagc_last_error(), "cannot write"));
    }
    check_untouched(&e);
}

static int stop_at_second_file(void *context, const tagc_data_report *so_far) {
    (*(int *)context)++;
    return so_far->n_files >= 1;
}

TEST(the_caller_can_stop_it) {
    earlier e = build_earlier(*state);
    const char *inputs[] = {scratch_path(*state, "good.txt"), scratch_path(*state, "next.txt")};
    scratch_write(inputs[1], "more", 4);
    int n_calls = 0;
    tagc_data_options options = options_for(inputs, 2, e.out);
    options.progress = stop_at_second_file;
    options.progress_context = &n_calls;
    assert_fails(tagc_data_build(&options, NULL), TAGC_ERR_INTERRUPTED, "stopped while reading");
    assert_in_range(n_calls, 2, 4);
    check_untouched(&e);
}

int main(void) {
    return test_run(scratch_make, scratch_remove);
}
