/* Checkpoints: round trips, the layouts found in the wild, and files that lie. */
#include "plain_params.h"

#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gpt2/safetensors.h"

static char folder[] = "/tmp/tagc-safetensors-XXXXXX";

/* The same buffer each time: a path lives until the next. */
static const char *path_of(const char *name) {
    static char path[200];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static int set_up(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    char command[300];
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    return system(command);
}

/* Header text, padding to `n_header` when that is larger, then n_data bytes counting up. */
static const char *write_raw(const char *header, uint64_t n_header, size_t n_data) {
    const char *path = path_of("raw.safetensors");
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    size_t n_text = strlen(header);
    fwrite(&n_header, 8, 1, file);
    fwrite(header, 1, n_text, file);
    for (size_t i = n_text; i < n_header && i < n_text + 64; i++) fputc(' ', file);
    for (size_t i = 0; i < n_data; i++) fputc((int)i, file);
    fclose(file);
    return path;
}

static void write_checkpoint(const plain_params *plain, const char *path) {
    tagc_gpt2_writer *writer;
    assert_int_equal(tagc_gpt2_writer_create(path, &plain->config, &writer), TAGC_OK);
    for (int i = 0; i < plain->n_tensors; i++) {
        size_t n = plain->info[i].n_elems, half = n / 2;
        assert_int_equal(tagc_gpt2_writer_append(writer, plain->values[i], half), TAGC_OK);
        assert_int_equal(tagc_gpt2_writer_append(writer, plain->values[i] + half, n - half), TAGC_OK);
    }
    assert_int_equal(tagc_gpt2_writer_commit(writer), TAGC_OK);
    assert_int_equal(tagc_gpt2_writer_commit(writer), TAGC_ERR_STATE);
    tagc_gpt2_writer_destroy(writer);
}

static void assert_checkpoint(const plain_params *plain, const char *path) {
    tagc_gpt2_weights *weights;
    if (tagc_gpt2_weights_open(path, &plain->config, &weights) != TAGC_OK) fail_msg("%s", tagc_last_error());
    for (int i = 0; i < plain->n_tensors; i++) {
        size_t n = plain->info[i].n_elems;
        float *values = malloc(n * sizeof *values);
        assert_int_equal(tagc_gpt2_weights_read(weights, i, n / 3, n - n / 3, values + n / 3), TAGC_OK);
        assert_int_equal(tagc_gpt2_weights_read(weights, i, 0, n / 3, values), TAGC_OK);
        assert_memory_equal(values, plain->values[i], n * sizeof *values);
        assert_int_equal(tagc_gpt2_weights_read(weights, i, n, 1, values), TAGC_ERR_ARGUMENT);
        assert_int_equal(tagc_gpt2_weights_read(weights, i, 1, n, values), TAGC_ERR_ARGUMENT);
        free(values);
    }
    tagc_gpt2_weights_close(weights);
}

static void assert_not_opened(const char *path, const tagc_gpt2_config *config, const char *text) {
    tagc_gpt2_weights *weights;
    assert_int_equal(tagc_gpt2_weights_open(path, config, &weights), TAGC_ERR_MISMATCH);
    assert_null(weights);
    if (!strstr(tagc_last_error(), text)) fail_msg("\"%s\" is not in \"%s\"", text, tagc_last_error());
}

TEST(test_round_trip) {
    for (int tied = 0; tied < 2; tied++) {
        tagc_gpt2_config config = {2, 2, 6, 10, 13, tied}, other = config;
        plain_params *plain = plain_create(&config, 5);
        const char *path = path_of("model.safetensors");
        write_checkpoint(plain, path);
        assert_checkpoint(plain, path);
        assert_int_equal(access(path_of("model.safetensors.partial"), F_OK), -1);
        path = path_of("model.safetensors");

        other.n_layer = 3;
        assert_not_opened(path, &other, "model.safetensors: there is no tensor \"h.2.ln_1.weight\"");
        other.n_layer = 1;
        assert_not_opened(path, &other, "has no place in this model");
        other = config;
        other.vocab_size = 14;
        assert_not_opened(path, &other, "has shape (13, 6), this model needs (14, 6)");
        other = config;
        other.tied = 1;
        if (!tied) assert_not_opened(path, &other, "lm_head.weight differs from wte.weight");
        other.tied = 0;
        if (tied) { /* the head is then the embedding */
            tagc_gpt2_weights *weights;
            float head[13 * 6];
            assert_int_equal(tagc_gpt2_weights_open(path, &other, &weights), TAGC_OK);
            int last = tagc_gpt2_n_tensors(&other) - 1;
            assert_int_equal(tagc_gpt2_weights_read(weights, last, 0, 13 * 6, head), TAGC_OK);
            assert_memory_equal(head, plain->values[0], sizeof head);
            tagc_gpt2_weights_close(weights);
        }
        plain_destroy(plain);
    }
}

/* As OpenAI's files are: no prefix, mask buffers in between; and a tied head written out. */
TEST(test_other_layouts) {
    for (int variant = 0; variant < 3; variant++) {
        tagc_gpt2_config config = {1, 2, 6, 10, 13, 1};
        plain_params *plain = plain_create(&config, 5);
        char header[8192];
        size_t used = 1, place = 0;
        header[0] = '{';
        FILE *data = tmpfile();
        assert_non_null(data);
        for (int i = 0; i < plain->n_tensors + 2; i++) {
            float mask[100] = {0};
            int is_mask = i == plain->n_tensors, is_head = i == plain->n_tensors + 1;
            const tagc_tensor_info *info = &plain->info[i < plain->n_tensors ? i : 0];
            const char *name = is_mask ? "h.0.attn.bias" : is_head ? "lm_head.weight" : info->name;
            const float *values = is_mask ? mask : is_head ? plain->values[0] : plain->values[i];
            size_t n_bytes = (is_mask ? 100 : info->n_elems) * sizeof(float);
            char shape[40];
            if (is_mask)
                snprintf(shape, sizeof shape, "1,1,10,10");
            else if (info->decay)
                snprintf(shape, sizeof shape, "%zu,%zu", info->n_rows, info->n_cols);
            else
                snprintf(shape, sizeof shape, "%zu", info->n_rows);
            if (is_head && variant == 0) continue;
            if (is_head && variant == 2) values = plain->grads[0]; /* zeros */
            used += (size_t)snprintf(header + used, sizeof header - used,
                                     "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
                                     i ? "," : "", name, shape, place, place + n_bytes);
            place += n_bytes;
            fwrite(values, 1, n_bytes, data);
        }
        header[used++] = '}';
        header[used] = 0;
        const char *path = write_raw(header, used, 0);
        FILE *file = fopen(path, "ab");
        rewind(data);
        for (int c; (c = fgetc(data)) != EOF;) fputc(c, file);
        fclose(file);
        fclose(data);
        if (variant < 2)
            assert_checkpoint(plain, path);
        else
            assert_not_opened(path, &config, "lm_head.weight differs from wte.weight");
        plain_destroy(plain);
    }
}

static float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* All 65536 half and bfloat16 numbers. */
TEST(test_short_floats) {
    for (int is_half = 0; is_half < 2; is_half++) {
        char header[200];
        snprintf(header, sizeof header,
                 "{\"x\":{\"dtype\":\"%s\",\"shape\":[256,256],\"data_offsets\":[0,131072]}}",
                 is_half ? "F16" : "BF16");
        const char *path = write_raw(header, strlen(header), 0);
        FILE *file = fopen(path, "ab");
        for (uint32_t i = 0; i < 65536; i++) fwrite(&(uint16_t){(uint16_t)i}, 2, 1, file);
        fclose(file);
        tagc_safetensors *reader;
        static float values[65536];
        assert_int_equal(tagc_safetensors_open(path, &reader), TAGC_OK);
        assert_int_equal(tagc_safetensors_read(reader, 0, 0, 65536, values), TAGC_OK);
        for (uint32_t i = 0; i < 65536; i++) {
            int exponent = (i >> 10) & 31, fraction = (int)(i & 1023);
            double half = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
            if (exponent == 31) half = fraction ? (double)NAN : (double)INFINITY;
            if (i & 0x8000) half = -half;
            float expected = is_half ? (float)half : bits_to_float(i << 16);
            if (isnan(expected))
                assert_true(isnan(values[i]));
            else
                assert_memory_equal(&values[i], &expected, sizeof expected);
        }
        float few[3];
        assert_int_equal(tagc_safetensors_read(reader, 0, 65533, 3, few), TAGC_OK);
        assert_memory_equal(few, values + 65533, sizeof few);
        tagc_safetensors_close(reader);
    }
}

#define X(dtype, shape, offsets)                                                                             \
    "\"x\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

TEST(test_lying_files) {
    const struct {
        const char *header;
        size_t n_data;
        const char *text; /* NULL: a good file */
    } files[] = {
        {"{" X("F32", "[2]", "[0,8]") "}   ", 8, NULL},
        {"{\"__metadata__\":{\"a\":\"b\"}," X("F32", "[]", "[0,4]") "}", 4, NULL},
        {"{" X("F32", "[0,7]", "[0,0]") "}", 0, NULL},
        {"{}", 0, NULL},
        {"{" X("F32", "[2]", "[0,8]") "}", 7, "data_offsets are 0 to 8, allowed is 0 to 7"},
        {"{" X("F32", "[2]", "[0,8]") "}", 9, "its tensors end at"},
        {"{" X("F32", "[2]", "[1,9]") "}", 9, "starts at byte"},
        {"{" X("F32", "[3]", "[0,8]") "}", 8,
         "tensor \"x\": has 8 bytes, its shape and dtype make another number"},
        {"{" X("F32", "[2]", "[8,0]") "}", 8, "data_offsets are 8 to 0"},
        {"{" X("F32", "[2]", "[-8,0]") "}", 8, "data_offsets are -8 to 0"},
        {"{" X("F32", "[2]", "[0]") "}", 8, "not a pair"},
        {"{" X("F32", "[2]", "[0,8.0]") "}", 8, "not a pair"},
        {"{" X("F32", "[-2]", "[0,8]") "}", 8, "dimension 0"},
        {"{" X("F32", "[4294967296,4294967296]", "[0,8]") "}", 8, "more than 2^64"},
        {"{" X("F32", "[4611686018427387906]", "[0,8]") "}", 8, "make another number"}, /* 4 times it is 8 */
        {"{" X("F32", "[99999999999999999999]", "[0,8]") "}", 8, "not a JSON object"},
        {"{" X("F32", "[1,1,1,1,1,1,1,1,2]", "[0,8]") "}", 8, "has 9 dimensions"},
        {"{" X("F32", "2", "[0,8]") "}", 8, "has no shape"},
        {"{" X("Q4", "[2]", "[0,8]") "}", 8, "dtype \"Q4\" is not known"},
        {"{\"x\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "has no dtype"},
        {"{\"x\":7}", 8, "has no dtype"},
        {"{" X("F32", "[2]", "[0,8]") "," X("F32", "[2]", "[0,8]") "}", 8, "not a JSON object: duplicate"},
        {"{" X("F32", "[2]", "[0,8]") ",\"y\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}", 12,
         "starts at byte"},
        {"[]", 0, "another kind of value"},
        {"{", 0, "not a JSON object"},
        {"", 0, "not a JSON object"},
    };
    tagc_safetensors *file;
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        const char *path = write_raw(files[i].header, strlen(files[i].header), files[i].n_data);
        tagc_status status = tagc_safetensors_open(path, &file);
        if (!files[i].text) {
            if (status != TAGC_OK) fail_msg("%s: %s", files[i].header, tagc_last_error());
            tagc_safetensors_close(file);
            continue;
        }
        assert_int_equal(status, TAGC_ERR_CORRUPT);
        assert_null(file);
        if (!strstr(tagc_last_error(), files[i].text) || !strstr(tagc_last_error(), "raw.safetensors: "))
            fail_msg("%s: \"%s\" is not in \"%s\"", files[i].header, files[i].text, tagc_last_error());
    }
    const uint64_t lengths[] = {3, 100000001, UINT64_MAX, UINT64_MAX - 7};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        write_raw("{}", lengths[i], 0);
        assert_int_equal(truncate(path_of("raw.safetensors"), 10), 0);
        assert_int_equal(tagc_safetensors_open(path_of("raw.safetensors"), &file), TAGC_ERR_CORRUPT);
    }
    assert_int_equal(truncate(path_of("raw.safetensors"), 7), 0);
    assert_int_equal(tagc_safetensors_open(path_of("raw.safetensors"), &file), TAGC_ERR_CORRUPT);
    assert_int_equal(tagc_safetensors_open(path_of("missing"), &file), TAGC_ERR_IO);
    assert_int_equal(tagc_safetensors_open(folder, &file), TAGC_ERR_IO);
    assert_int_equal(mkfifo(path_of("pipe"), 0600), 0); /* to which nobody writes */
    alarm(60);
    assert_int_equal(tagc_safetensors_open(path_of("pipe"), &file), TAGC_ERR_IO);
    alarm(0);
    assert_null(file);
}

TEST(test_other_types_are_listed_only) {
    const char *header = "{" X("I64", "[2,1]", "[0,16]") "}";
    tagc_safetensors *file;
    tagc_safetensors_entry entry;
    float values[2];
    assert_int_equal(tagc_safetensors_open(write_raw(header, strlen(header), 16), &file), TAGC_OK);
    assert_int_equal(tagc_safetensors_n_entries(file), 1);
    assert_int_equal(tagc_safetensors_find(file, "x"), 0);
    assert_int_equal(tagc_safetensors_find(file, "y"), -1);
    tagc_safetensors_entry_at(file, 0, &entry);
    assert_string_equal(entry.dtype, "I64");
    assert_int_equal(entry.n_dims, 2);
    assert_int_equal(entry.dims[0], 2);
    assert_int_equal(tagc_safetensors_read(file, 0, 0, 2, values), TAGC_ERR_UNSUPPORTED);
    assert_int_equal(tagc_safetensors_read(file, 1, 0, 2, values), TAGC_ERR_ARGUMENT);
    tagc_safetensors_close(file);
}

static uint64_t size_of(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 ? (uint64_t)info.st_size : 0;
}

/* What was there stays there, until all of the new is. */
TEST(test_half_written) {
    tagc_gpt2_config config = {1, 2, 32, 10, 300, 0};
    plain_params *plain = plain_create(&config, 5);
    const char *path = path_of("half.safetensors");
    tagc_gpt2_writer *writer;
    write_checkpoint(plain, path);
    uint64_t n_bytes = size_of(path);

    assert_int_equal(tagc_gpt2_writer_create(path, &config, &writer), TAGC_OK);
    assert_int_equal(tagc_gpt2_writer_append(writer, plain->values[0], 100), TAGC_OK);
    assert_int_equal(tagc_gpt2_writer_append(writer, plain->values[0], (size_t)tagc_gpt2_n_params(&config)),
                     TAGC_ERR_ARGUMENT);
    assert_int_equal(tagc_gpt2_writer_commit(writer), TAGC_ERR_STATE);
    tagc_gpt2_writer_destroy(writer);
    assert_checkpoint(plain, path);

    /* A limit on the size of files stands in for a full disk. */
    struct rlimit limit, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    small = limit;
    small.rlim_cur = n_bytes / 2;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    tagc_status status = tagc_gpt2_writer_create(path, &config, &writer);
    for (int i = 0; status == TAGC_OK && i < plain->n_tensors; i++)
        status = tagc_gpt2_writer_append(writer, plain->values[i], plain->info[i].n_elems);
    if (status == TAGC_OK) status = tagc_gpt2_writer_commit(writer);
    tagc_gpt2_writer_destroy(writer);
    setrlimit(RLIMIT_FSIZE, &limit);
    assert_int_equal(status, TAGC_ERR_IO);
    assert_non_null(strstr(tagc_last_error(), "half.safetensors: "));
    assert_checkpoint(plain, path);
    assert_int_equal(access(path_of("half.safetensors.partial"), F_OK), -1);

    assert_int_equal(tagc_gpt2_writer_create(path_of("no/such/folder"), &config, &writer), TAGC_ERR_IO);
    assert_null(writer);
    plain_destroy(plain);
}

static void write_text(const char *path, const char *text) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

TEST(test_config_file) {
    const char *path = path_of("config.json");
    for (int tied = 0; tied < 2; tied++) {
        tagc_gpt2_config config = {12, 4, 64, 100, 321, tied}, back = {0};
        assert_int_equal(tagc_gpt2_config_write(path, &config), TAGC_OK);
        assert_int_equal(tagc_gpt2_config_read(path, &back), TAGC_OK);
        assert_memory_equal(&config, &back, sizeof config);
    }
    const char *shape = "\"n_layer\":2,\"n_head\":2,\"n_embd\":8,\"n_positions\":16,\"vocab_size\":50";
    const struct {
        const char *more;
        tagc_status status;
    } files[] = {
        {"", TAGC_OK}, /* tied when it does not say */
        {",\"n_inner\":null,\"activation_function\":\"gelu_new\",\"layer_norm_epsilon\":1e-05", TAGC_OK},
        {",\"n_inner\":32", TAGC_OK},
        {",\"n_inner\":33", TAGC_ERR_UNSUPPORTED},
        {",\"activation_function\":\"relu\"", TAGC_ERR_UNSUPPORTED},
        {",\"layer_norm_epsilon\":1e-6", TAGC_ERR_UNSUPPORTED},
        {",\"model_type\":\"llama\"", TAGC_ERR_UNSUPPORTED},
        {",\"model_type\":[]", TAGC_ERR_UNSUPPORTED},
        {",\"scale_attn_weights\":false", TAGC_ERR_UNSUPPORTED},
        {",\"scale_attn_by_inverse_layer_idx\":true", TAGC_ERR_UNSUPPORTED},
        {",\"n_head\":3", TAGC_ERR_CORRUPT}, /* twice the same key */
        {",", TAGC_ERR_CORRUPT},
    };
    tagc_gpt2_config config = {0}, untouched = {0};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char text[400];
        snprintf(text, sizeof text, "{%s%s}", shape, files[i].more);
        write_text(path, text);
        memset(&config, 0, sizeof config);
        if (tagc_gpt2_config_read(path, &config) != files[i].status)
            fail_msg("%s: %s", text, tagc_last_error());
        if (files[i].status == TAGC_OK)
            assert_int_equal(config.tied, 1);
        else
            assert_memory_equal(&config, &untouched, sizeof config);
    }
    write_text(path, "{\"n_layer\":2}");
    assert_int_equal(tagc_gpt2_config_read(path, &config), TAGC_ERR_CORRUPT);
    assert_non_null(strstr(tagc_last_error(), "config.json: n_head is missing"));
    assert_int_equal(tagc_gpt2_config_read(path_of("none.json"), &config), TAGC_ERR_IO);
}

int main(void) {
    return test_run(set_up, tear_down);
}
