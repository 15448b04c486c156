/* Token files of all three formats: read as written by hand, and refused when cut, damaged or lying. */
#include "scratch.h"

#include "core/status.h"
#include "core/xxh3.h"
#include "data/data.h"
#include "data/token_file.h"
#include "data/xxh64.h"

static void put_u32(uint8_t *p, uint32_t value) {
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(value >> (8 * i));
}

static void put_u64(uint8_t *p, uint64_t value) {
    put_u32(p, (uint32_t)value);
    put_u32(p + 4, (uint32_t)(value >> 32));
}

static uint64_t checksum(uint32_t version, const void *bytes, size_t n_bytes) {
    return version == 1 ? tagc_xxh64(bytes, n_bytes, 0) : tagc_xxh3(bytes, n_bytes, 0);
}

/* Field by field from the picture in token_file.h, not by the function that writes it. */
static size_t make_version(uint32_t version, uint8_t *file, uint32_t width, uint32_t vocab_size,
                           const uint32_t *tokens, size_t n) {
    memset(file, 0, 128);
    memcpy(file, "tagctok\n", 8);
    put_u32(file + 8, version);
    put_u32(file + 12, width);
    put_u32(file + 16, vocab_size);
    put_u64(file + 24, n);
    strcpy((char *)file + 40, "by hand");
    put_u32(file + 104, vocab_size - 1);
    for (size_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < width; k++) file[128 + i * width + k] = (uint8_t)(tokens[i] >> (8 * k));
    put_u64(file + 32, checksum(version, file + 128, n * width));
    put_u64(file + 120, checksum(version, file, 120));
    return 128 + n * width;
}

static size_t make_ours(uint8_t *file, uint32_t width, uint32_t vocab_size, const uint32_t *tokens,
                        size_t n) {
    return make_version(2, file, width, vocab_size, tokens, n);
}

TEST(reads_ours_in_each_width) {
    static const struct { uint32_t width, vocab_size; } kinds[] = {{1, 256}, {2, 50257}, {4, 128256}};
    const char *path = scratch_path(*state, "ours.tokens");
    for (size_t k = 0; k < 3; k++) {
        uint32_t tokens[300];
        uint8_t file[128 + sizeof tokens], header[TAGC_TOKEN_HEADER_BYTES];
        uint64_t seed = 5 + k;
        for (size_t i = 0; i < 300; i++) tokens[i] = (uint32_t)(scratch_random(&seed) % kinds[k].vocab_size);
        size_t n_bytes = make_ours(file, kinds[k].width, kinds[k].vocab_size, tokens, 300);
        scratch_write(path, file, n_bytes);

        tagc_tokens *opened;
        tagc_tokens_info info;
        assert_ok(tagc_data_open(path, TAGC_DATA_TRAIN, &opened));
        tagc_tokens_get_info(opened, &info);
        assert_int_equal(info.format, TAGC_TOKENS_TAGC);
        assert_int_equal(info.token_bytes, kinds[k].width);
        assert_int_equal(info.vocab_size, kinds[k].vocab_size);
        assert_int_equal(info.end_of_text, kinds[k].vocab_size - 1);
        assert_string_equal(info.tokenizer, "by hand");
        assert_string_equal(tagc_tokens_path(opened), path);
        assert_int_equal(tagc_tokens_n(opened), 300);
        int all[300];
        assert_ok(tagc_tokens_read(opened, 0, 300, kinds[k].vocab_size, all));
        for (size_t i = 0; i < 300; i++) assert_int_equal(all[i], tokens[i]);
        tagc_tokens_close(opened);

        tagc_token_file_header(&info, file + 128, header);
        assert_memory_equal(header, file, sizeof header);
    }
}

TEST(reads_nanogpt) {
    const uint8_t file[] = {0x00, 0x00, 0x50, 0xc4, 0xff, 0xff, 0x01, 0x02};
    const char *path = scratch_path(*state, "train.bin"), *other = scratch_path(*state, "train.data");
    scratch_write(path, file, sizeof file);
    scratch_write(other, file, sizeof file);
    tagc_tokens *tokens;
    tagc_tokens_info info;
    assert_ok(tagc_data_open(path, TAGC_DATA_TRAIN, &tokens));
    tagc_tokens_get_info(tokens, &info);
    assert_int_equal(info.format, TAGC_TOKENS_RAW16);
    assert_int_equal(info.vocab_size, 0);
    assert_int_equal(info.end_of_text, -1);
    assert_int_equal(tagc_tokens_n(tokens), 4);
    assert_int_equal(scratch_token(tokens, 1), 50256);
    assert_int_equal(scratch_token(tokens, 2), 65535);
    assert_int_equal(scratch_token(tokens, 3), 0x0201);

    /* The text names file, token and byte. */
    int out[4];
    assert_ok(tagc_tokens_read(tokens, 0, 2, 50257, out));
    assert_fails(tagc_tokens_read(tokens, 1, 3, 50257, out), TAGC_ERR_CORRUPT, "token 65535 at byte 4");
    assert_fails(tagc_tokens_read(tokens, 1, 3, 50257, out), TAGC_ERR_CORRUPT, path);
    assert_fails(tagc_tokens_read(tokens, 1, 4, 65536, out), TAGC_ERR_ARGUMENT, "it has 4");
    assert_fails(tagc_tokens_read(tokens, UINT64_MAX, 2, 65536, out), TAGC_ERR_ARGUMENT, "it has 4");
    assert_fails(tagc_tokens_read(tokens, 0, 1, 0, out), TAGC_ERR_ARGUMENT, "vocab_size is 0");
    tagc_tokens_close(tokens);

    /* Not without the name's word for it. */
    assert_fails(tagc_data_open(other, TAGC_DATA_TRAIN, &tokens), TAGC_ERR_CORRUPT, "no token file");
    assert_null(tokens);

    scratch_write(path, file, 7);
    assert_fails(tagc_data_open(path, TAGC_DATA_TRAIN, &tokens), TAGC_ERR_CORRUPT, "7 bytes");
}

TEST(reads_llmc) {
    static const struct {
        uint32_t magic, version, vocab_size;
        int width;
    } kinds[] = {{20240520, 1, 50257, 2}, {20240801, 7, 128256, 4}};
    const char *path = scratch_path(*state, "shard.bin");
    tagc_tokens *tokens;
    for (size_t k = 0; k < 2; k++) {
        uint8_t file[1024 + 12 * 4] = {0};
        size_t n_bytes = 1024 + 12 * (size_t)kinds[k].width;
        put_u32(file, kinds[k].magic);
        put_u32(file + 4, kinds[k].version);
        put_u32(file + 8, 12);
        for (int i = 0; i < 12; i++) file[1024 + i * kinds[k].width] = (uint8_t)(200 + i);
        scratch_write(path, file, n_bytes);
        tagc_tokens_info info;
        assert_ok(tagc_data_open(path, TAGC_DATA_TRAIN, &tokens));
        tagc_tokens_get_info(tokens, &info);
        assert_int_equal(info.format, TAGC_TOKENS_LLMC);
        assert_int_equal(info.n_tokens, 12);
        assert_int_equal(info.vocab_size, kinds[k].vocab_size);
        assert_int_equal(scratch_token(tokens, 11), 211);
        tagc_tokens_close(tokens);

        scratch_write(path, file, n_bytes - 1);
        assert_fails(tagc_data_open(path, TAGC_DATA_TRAIN, &tokens), TAGC_ERR_CORRUPT, "n_tokens is 12");
        scratch_write(path, file, 1000);
        assert_fails(tagc_data_open(path, TAGC_DATA_TRAIN, &tokens), TAGC_ERR_CORRUPT, "header alone");
        put_u32(file + 8, 0xffffffff);
        scratch_write(path, file, n_bytes);
        assert_fails(tagc_data_open(path, TAGC_DATA_TRAIN, &tokens), TAGC_ERR_CORRUPT, "n_tokens");
        put_u32(file + 8, 0);
        scratch_write(path, file, 1024);
        assert_fails(tagc_data_open(path, TAGC_DATA_TRAIN, &tokens), TAGC_ERR_CORRUPT, "n_tokens is 0");
        put_u32(file + 4, 3);
        scratch_write(path, file, n_bytes);
        assert_fails(tagc_data_open(path, TAGC_DATA_TRAIN, &tokens), TAGC_ERR_UNSUPPORTED, "version is 3");
    }
}

TEST(refuses_every_cut_and_every_flipped_bit) {
    uint32_t values[40];
    uint8_t file[128 + 80], broken[sizeof file];
    for (uint32_t i = 0; i < 40; i++) values[i] = i * 7;
    size_t n_bytes = make_ours(file, 2, 300, values, 40);
    tagc_tokens_info info;
    assert_ok(tagc_token_file_parse(file, n_bytes, "x", &info));
    for (size_t n = 0; n < n_bytes; n++)
        assert_int_not_equal(tagc_token_file_parse(file, n, "x", &info), TAGC_OK);
    for (size_t bit = 0; bit < 8 * n_bytes; bit++) {
        memcpy(broken, file, n_bytes);
        broken[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        tagc_status status = tagc_token_file_parse(broken, n_bytes, "x", &info);
        if (status == TAGC_OK) fail_msg("bit %zu of byte %zu went unnoticed", bit % 8, bit / 8);
    }
}

/* Files that tagc up to 0.2 made have XXH64 as checksum, and only they. */
TEST(reads_the_first_version) {
    uint32_t values[40];
    uint8_t file[128 + 80];
    for (uint32_t i = 0; i < 40; i++) values[i] = i * 7;
    size_t n_bytes = make_version(1, file, 2, 300, values, 40);
    tagc_tokens_info info;
    assert_ok(tagc_token_file_parse(file, n_bytes, "x", &info));
    assert_int_equal(info.n_tokens, 40);
    for (size_t at = 0; at < n_bytes; at++) {
        file[at] ^= 1;
        assert_int_not_equal(tagc_token_file_parse(file, n_bytes, "x", &info), TAGC_OK);
        file[at] ^= 1;
    }
    put_u64(file + 120, tagc_xxh3(file, 120, 0));
    assert_fails(tagc_token_file_parse(file, n_bytes, "x", &info), TAGC_ERR_CORRUPT, "header's checksum");
}

/* Checksums right, fields wrong: what another program could write. */
TEST(refuses_lying_fields) {
    static const struct {
        size_t at;
        uint32_t value;
        const char *part;
    } lies[] = {{8, 3, "version is 3"},
                {12, 0, "token_bytes is 0"},
                {12, 3, "token_bytes is 3"},
                {12, 0x80000000, "token_bytes"},
                {16, 0, "vocab_size is 0"},
                {16, 0x80000000, "vocab_size"},
                {24, 0, "n_tokens is 0"},
                {24, 41, "n_tokens is 41"},
                {28, 1, "n_tokens"},
                {40, 0xe962, "tokenizer has a byte 0xe9"},
                {40, 0x1b, "tokenizer has a byte 0x1b"},
                {28, 0x80000000, "n_tokens"},
                {104, 300, "end_of_text is 300"}};
    uint32_t values[40] = {0};
    uint8_t file[128 + 80];
    tagc_tokens_info info;
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        size_t n_bytes = make_ours(file, 2, 300, values, 40);
        put_u32(file + lies[i].at, lies[i].value);
        put_u64(file + 120, checksum(2, file, 120));
        assert_int_not_equal(tagc_token_file_parse(file, n_bytes, "x", &info), TAGC_OK);
        if (!strstr(tagc_last_error(), lies[i].part)) fail_msg("%s: %s", lies[i].part, tagc_last_error());
    }
    size_t n_bytes = make_ours(file, 2, 300, values, 40);
    memset(file + 40, 'x', 64);
    put_u64(file + 120, checksum(2, file, 120));
    assert_fails(tagc_token_file_parse(file, n_bytes, "x", &info), TAGC_ERR_CORRUPT, "tokenizer is longer");
}

TEST(refuses_what_is_no_file) {
    tagc_tokens *tokens = (tagc_tokens *)1;
    assert_fails(tagc_data_open(scratch_path(*state, "none.bin"), TAGC_DATA_TRAIN, &tokens), TAGC_ERR_IO,
                 "none.bin does not exist");
    assert_null(tokens);
    const char *path = scratch_path(*state, "pipe.bin");
    assert_int_equal(mkfifo(path, 0600), 0); /* to which nobody writes */
    alarm(60);
    assert_fails(tagc_data_open(path, TAGC_DATA_TRAIN, &tokens), TAGC_ERR_IO, "not a file");
    alarm(0);
    path = scratch_path(*state, "empty.bin");
    scratch_write(path, "", 0);
    assert_fails(tagc_data_open(path, TAGC_DATA_TRAIN, &tokens), TAGC_ERR_CORRUPT, "empty");
    path = scratch_path(*state, "notes.txt");
    scratch_write(path, "just words\n", 11);
    assert_fails(tagc_data_open(path, TAGC_DATA_TRAIN, &tokens), TAGC_ERR_CORRUPT, "tagc data");
    tagc_tokens_close(NULL);
    assert_string_equal(tagc_tokens_format_name(TAGC_TOKENS_LLMC), "llmc");
    assert_string_equal(tagc_tokens_format_name(7), "?");
}

/* Shards read as the file that they were cut from, through windows across their borders, for any number of ranks. */
TEST(shards_are_one_file) {
    enum { N = 1000, N_SHARDS = 4, T = 7 };
    static const size_t ends[N_SHARDS] = {400, 401, 403, N};
    static const char *const names[N_SHARDS] = {"shards/a_train_1.bin", "shards/a_train_2.bin",
                                                "shards/b_train_0.bin", "shards/c_train.bin"};
    uint8_t bytes[2 * N];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)((i * 2654435761u >> 7) & (i % 2 ? 0x3f : 0xff));
    char path[1024], pattern[1100], folder[1024];
    snprintf(folder, sizeof folder, "%s", scratch_path(*state, "shards"));
    assert_int_equal(mkdir(folder, 0777), 0);
    snprintf(path, sizeof path, "%s", scratch_path(*state, "whole.bin"));
    scratch_write(path, bytes, sizeof bytes);
    for (size_t i = 0, at = 0; i < N_SHARDS; at = ends[i++])
        scratch_write(scratch_path(*state, names[i]), bytes + 2 * at, 2 * (ends[i] - at));
    scratch_write(scratch_path(*state, "shards/a_val_0.bin"), bytes, 20);
    snprintf(pattern, sizeof pattern, "%s/*train*.bin", folder);

    tagc_tokens *whole, *shards[2], *val;
    assert_ok(tagc_data_open(path, TAGC_DATA_TRAIN, &whole));
    assert_ok(tagc_data_open(folder, TAGC_DATA_TRAIN, &shards[0]));
    assert_ok(tagc_data_open(pattern, TAGC_DATA_TRAIN, &shards[1]));
    assert_ok(tagc_data_open(folder, TAGC_DATA_VAL, &val));
    assert_int_equal(tagc_tokens_n(val), 10);
    assert_true(tagc_data_has(folder, TAGC_DATA_VAL) && tagc_data_has(pattern, TAGC_DATA_TRAIN));
    for (int k = 0; k < 2; k++) {
        assert_int_equal(tagc_tokens_n(shards[k]), N);
        assert_int_equal(tagc_tokens_n_shards(shards[k]), N_SHARDS);
        for (uint64_t i = 0; i < N; i++)
            assert_int_equal(scratch_token(shards[k], i), scratch_token(whole, i));
        for (int world = 1; world <= 3; world++)
            for (int rank = 0; rank < world; rank++) {
                tagc_loader *a, *b;
                tagc_loader_options options;
                tagc_loader_options_init(&options);
                options.n_batch = 2;
                options.n_tokens = T;
                options.rank = rank;
                options.world_size = world;
                options.vocab_size = 65536;
                assert_ok(tagc_loader_create(whole, &options, &a));
                assert_ok(tagc_loader_create(shards[k], &options, &b));
                for (int i = 0; i < 300; i++) {
                    int inputs[2][2 * T], targets[2][2 * T];
                    assert_ok(tagc_loader_next(a, inputs[0], targets[0]));
                    assert_ok(tagc_loader_next(b, inputs[1], targets[1]));
                    assert_memory_equal(inputs[0], inputs[1], sizeof inputs[0]);
                    assert_memory_equal(targets[0], targets[1], sizeof targets[0]);
                }
                tagc_loader_destroy(a);
                tagc_loader_destroy(b);
            }
    }
    assert_true(tagc_tokens_fingerprint(shards[0]) == tagc_tokens_fingerprint(shards[1]));
    uint64_t hash = tagc_tokens_fingerprint(shards[0]);
    tagc_tokens_close(shards[1]);
    tagc_tokens_close(shards[0]);

    /* One token of the last shard is another one: another text. One above the vocabulary: its shard is named. */
    bytes[2 * (N - 1) + 1] = 0xf0;
    scratch_write(scratch_path(*state, names[3]), bytes + 2 * ends[2], 2 * (N - ends[2]));
    int out[10];
    assert_ok(tagc_data_open(folder, TAGC_DATA_TRAIN, &shards[0]));
    assert_true(tagc_tokens_fingerprint(shards[0]) != hash);
    assert_fails(tagc_tokens_read(shards[0], N - 10, 10, 0x4000, out), TAGC_ERR_CORRUPT,
                 "c_train.bin: token 6");
    tagc_tokens_close(shards[0]);
    tagc_tokens_close(whole);
    tagc_tokens_close(val);

    /* A shard of another format, and a damaged one, by their names. */
    scratch_write(scratch_path(*state, names[1]), "odd", 3);
    assert_fails(tagc_data_open(folder, TAGC_DATA_TRAIN, &shards[0]), TAGC_ERR_CORRUPT,
                 "a_train_2.bin: 3 bytes");
    uint32_t header[256] = {20240520, 1, 2};
    uint8_t llmc[sizeof header + 4] = {0};
    memcpy(llmc, header, sizeof header);
    scratch_write(scratch_path(*state, names[1]), llmc, sizeof llmc);
    assert_fails(tagc_data_open(folder, TAGC_DATA_TRAIN, &shards[0]), TAGC_ERR_MISMATCH,
                 "a_train_2.bin: llmc format");
    snprintf(pattern, sizeof pattern, "%s/none*.bin", folder);
    assert_fails(tagc_data_open(pattern, TAGC_DATA_TRAIN, &shards[0]), TAGC_ERR_IO, "no file matches");
}

int main(void) {
    return test_run(scratch_make, scratch_remove);
}
