/* The corpus builder: what goes in comes out, the same every time; whatever is wrong with the input or the
 * disk is named with file and byte, and leaves nothing half-made behind. */
#include "scratch.h"

#include "core/status.h"
#include "data/data.h"
#include <signal.h>
#include <sys/resource.h>
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
static char *text_of(const char *path, const tagc_tokenizer *tokenizer) {
    tagc_tokens *tokens;
    assert_ok(tagc_tokens_open(path, TAGC_TOKENS_TAGC, &tokens));
    uint64_t n = tagc_tokens_n(tokens);
    char *text = malloc(n * 64 + 1), *p = text;
    for (uint64_t i = 0; i < n; i++) {
        int token = (int)tagc_tokens_at(tokens, i);
        size_t n_piece;
        const char *piece = tagc_tokenizer_piece(tokenizer, token, &n_piece);
        if (token == tagc_tokenizer_end_of_text(tokenizer))
            *p++ = '|';
        else
            memcpy(p, piece, n_piece);
        p += n_piece;
    }
    *p = '\0';
    tagc_tokens_close(tokens);
    return text;
}

static void expect_text(const char *path, const tagc_tokenizer *tokenizer, const char *expected) {
    char *text = text_of(path, tokenizer);
    assert_string_equal(text, expected);
    free(text);
}

static tagc_tokenizer *bytes_tokenizer(void) {
    tagc_tokenizer *tokenizer;
    assert_ok(tagc_tokenizer_create_bytes(&tokenizer));
    return tokenizer;
}

static void reads_folders_files_and_gzip_in_order(void **state) {
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
    tagc_tokenizer *tokenizer = bytes_tokenizer();
    snprintf(path, sizeof path, "%s/train.bin", out);
    expect_text(path, tokenizer, "compressed|first|gr\xc3\xbc\xc3\x9f|one|two|last|");
    assert_int_equal(scratch_n_entries(out), 1);
    assert_int_equal(report.n_files, 7);
    assert_int_equal(report.n_total_files, 7);
    assert_int_equal(report.n_empty, 1);
    assert_int_equal(report.n_text_bytes, 31);
    assert_int_equal(report.n_train_tokens, 37);
    assert_int_equal(report.n_val_tokens, 0);
    tagc_tokenizer_destroy(tokenizer);
}

static void few_documents_give_their_tails(void **state) {
    const char *out = *state, *a = scratch_path(*state, "tail_a"), *b = scratch_path(*state, "tail_b");
    scratch_write(a, "0123456789", 10);
    scratch_write(b, "abcdefghijklmnopqrst", 20);
    const char *inputs[] = {a, b};
    tagc_data_options options = options_for(inputs, 2, out);
    options.val_share = 0.2;
    assert_ok(tagc_data_build(&options, NULL));
    tagc_tokenizer *tokenizer = bytes_tokenizer();
    expect_text(scratch_path(*state, "train.bin"), tokenizer, "01234567|abcdefghijklmnop|");
    expect_text(scratch_path(*state, "val.bin"), tokenizer, "89|qrst|");
    tagc_tokenizer_destroy(tokenizer);
}

static void many_documents_are_given_whole(void **state) {
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
    tagc_tokenizer *tokenizer = bytes_tokenizer();
    int n_documents = 0;
    for (int f = 0; f < 2; f++) {
        char *text = text_of(scratch_path(*state, f ? "val.bin" : "train.bin"), tokenizer);
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
    tagc_tokenizer_destroy(tokenizer);
}

/* Larger than the builder's chunk, so that the cuts between chunks are seen to change nothing. */
static void chunks_do_not_show(void **state) {
    static const char *const words[] = {"the",
                                        "river's",
                                        "we'll",
                                        "tree",
                                        "walk",
                                        "1234",
                                        "wasn't",
                                        ("Stra\xc3\x9f"
                                         "e"),
                                        "\xe6\x9c\xa8",
                                        "\n\n",
                                        "  ",
                                        "!?",
                                        "\xf0\x9f\x8e\x89"};
    size_t capacity = (5u << 20) / 2, n = 0, n_tokens;
    char *text = malloc(capacity);
    uint64_t seed = 23;
    while (n + 16 < capacity) {
        const char *word = words[scratch_random(&seed) % 13];
        memcpy(text + n, word, strlen(word));
        n += strlen(word);
        if (scratch_random(&seed) % 3) text[n++] = ' ';
    }
    tagc_tokenizer *bpe, *bytes = bytes_tokenizer();
    assert_ok(tagc_tokenizer_create_bpe(TAGC_TEST_DATA "/tiny_vocab.json", TAGC_TEST_DATA "/tiny_merges.txt",
                                        &bpe));
    int *expected = malloc(n * sizeof *expected);
    const char *path = scratch_path(*state, "large.txt");
    scratch_write(path, text, n);
    tagc_tokenizer *tokenizers[] = {bpe, bytes};
    remove(scratch_path(*state, "val.bin")); /* of the test before */
    for (int k = 0; k < 2; k++) {
        tagc_data_options options = options_for(&path, 1, *state);
        options.tokenizer = tokenizers[k];
        options.val_share = 0;
        tagc_data_report report;
        assert_ok(tagc_data_build(&options, &report));
        assert_ok(tagc_tokenizer_encode(tokenizers[k], text, n, expected, &n_tokens));
        assert_int_equal(report.n_text_bytes, n);
        assert_int_equal(report.n_train_tokens, n_tokens + 1);
        tagc_tokens *tokens;
        tagc_tokens_info info;
        assert_ok(tagc_tokens_open(scratch_path(*state, "train.bin"), TAGC_TOKENS_AUTO, &tokens));
        tagc_tokens_get_info(tokens, &info);
        assert_string_equal(info.tokenizer, tagc_tokenizer_name(tokenizers[k]));
        assert_int_equal(info.vocab_size, tagc_tokenizer_vocab_size(tokenizers[k]));
        assert_int_equal(info.end_of_text, tagc_tokenizer_end_of_text(tokenizers[k]));
        for (size_t i = 0; i < n_tokens; i++)
            if (tagc_tokens_at(tokens, i) != (uint32_t)expected[i]) fail_msg("token %zu differs", i);
        assert_int_equal(tagc_tokens_at(tokens, n_tokens), info.end_of_text);
        tagc_tokens_close(tokens);
    }
    free(text);
    free(expected);
    tagc_tokenizer_destroy(bpe);
    tagc_tokenizer_destroy(bytes);
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

static void invalid_text_is_named_with_its_byte(void **state) {
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

static void lossy_keeps_bytes_as_they_are(void **state) {
    const char *path = scratch_path(*state, "lossy.txt");
    scratch_write(path, "a\xff\xc3(\xe6\x9c\xa8\xe6\x9c", 9);
    remove(scratch_path(*state, "val.bin")); /* of the test before */
    tagc_data_options options = options_for(&path, 1, *state);
    options.val_share = 0;
    options.lossy = 1;
    tagc_data_report report;
    assert_ok(tagc_data_build(&options, &report));
    assert_int_equal(report.n_invalid_bytes, 4);
    tagc_tokenizer *tokenizer = bytes_tokenizer();
    expect_text(scratch_path(*state, "train.bin"), tokenizer, "a\xff\xc3(\xe6\x9c\xa8\xe6\x9c|");
    tagc_tokenizer_destroy(tokenizer);
}

static void damaged_gzip_is_named_with_its_byte(void **state) {
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

static void nothing_to_read(void **state) {
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
    const char *closed = scratch_path(folder, "closed");
    scratch_write(closed, "abc", 3);
    chmod(closed, 0);
    if (access(closed, R_OK) != 0)
        build_fails(&e, folder, TAGC_ERR_IO, "closed: cannot open"); /* not as root */
    /* A link that leads back to itself can be listed and not be opened, whoever asks. */
    assert_int_equal(symlink("ring", scratch_path(folder, "ring")), 0);
    build_fails(&e, folder, TAGC_ERR_IO, "ring: cannot stat");
    check_untouched(&e);
}

static void bad_options_are_named(void **state) {
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
static void a_full_disk_is_told(void **state) {
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

static void the_caller_can_stop_it(void **state) {
    earlier e = build_earlier(*state);
    const char *path = scratch_path(*state, "good.txt");
    const char *inputs[] = {path, path, path};
    int n_calls = 0;
    tagc_data_options options = options_for(inputs, 3, e.out);
    options.progress = stop_at_second_file;
    options.progress_context = &n_calls;
    assert_fails(tagc_data_build(&options, NULL), TAGC_ERR_INTERRUPTED, "stopped while reading");
    assert_in_range(n_calls, 2, 4);
    check_untouched(&e);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_folders_files_and_gzip_in_order),
        cmocka_unit_test(few_documents_give_their_tails),
        cmocka_unit_test(many_documents_are_given_whole),
        cmocka_unit_test(chunks_do_not_show),
        cmocka_unit_test(invalid_text_is_named_with_its_byte),
        cmocka_unit_test(lossy_keeps_bytes_as_they_are),
        cmocka_unit_test(damaged_gzip_is_named_with_its_byte),
        cmocka_unit_test(nothing_to_read),
        cmocka_unit_test(bad_options_are_named),
        cmocka_unit_test(a_full_disk_is_told),
        cmocka_unit_test(the_caller_can_stop_it),
    };
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
