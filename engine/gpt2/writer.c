/* Reads config.json. Writes it and weights, each completely or not at all (disk/new_file.h). */
#include "gpt2/safetensors.h"

#include "disk/new_file.h"
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- weights ---- */

struct tagc_gpt2_writer {
    tagc_new_file file;
    uint64_t n_left; /* values still to come */
};

static json_t *header_of(const tagc_gpt2_config *config) {
    uint64_t place = 0;
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    for (int i = 0; i < tagc_gpt2_n_tensors(config); i++) {
        tagc_tensor_info info;
        char name[TAGC_TENSOR_NAME_BYTES + 16];
        tagc_gpt2_tensor(config, i, &info);
        /* In these files the head belongs to the language model, and the rest to the transformer inside it. */
        snprintf(name, sizeof name, "%s%s", info.kind == TAGC_TENSOR_HEAD ? "" : "transformer.", info.name);
        json_t *shape = json_pack("[I]", (json_int_t)info.n_rows);
        if (info.decay) json_array_append_new(shape, json_integer((json_int_t)info.n_cols));
        uint64_t end = place + info.n_elems * sizeof(float);
        json_object_set_new(header, name,
                            json_pack("{s:s, s:o, s:[I,I]}", "dtype", "F32", "shape", shape, "data_offsets",
                                      (json_int_t)place, (json_int_t)end));
        place = end;
    }
    return header;
}

static tagc_status write_header(tagc_new_file *file, const tagc_gpt2_config *config) {
    json_t *header = header_of(config);
    char *text = header ? json_dumps(header, JSON_COMPACT) : NULL;
    json_decref(header);
    if (!text) return tagc_fail(TAGC_ERR_MEMORY, "%s: no memory for its header", file->path);
    uint64_t n_chars = strlen(text), n_padded = (n_chars + 7) / 8 * 8; /* values start at a multiple of 8 */
    fwrite(&n_padded, sizeof n_padded, 1, file->stream);
    fwrite(text, 1, n_chars, file->stream);
    fwrite("        ", 1, n_padded - n_chars,
           file->stream); /* a failure shows in the first append or the commit */
    free(text);
    return TAGC_OK;
}

tagc_status tagc_gpt2_writer_create(const char *path, const tagc_gpt2_config *config,
                                    tagc_gpt2_writer **out) {
    *out = NULL;
    TAGC_TRY(tagc_gpt2_config_check(config));
    tagc_gpt2_writer *writer = calloc(1, sizeof *writer);
    if (!writer) return tagc_fail(TAGC_ERR_MEMORY, "%s: no memory to write it", path);
    writer->n_left = tagc_gpt2_n_params(config);
    tagc_status status = tagc_new_file_open(path, &writer->file);
    if (status == TAGC_OK) status = write_header(&writer->file, config);
    if (status == TAGC_OK)
        *out = writer;
    else
        tagc_gpt2_writer_destroy(writer);
    return status;
}

tagc_status tagc_gpt2_writer_append(tagc_gpt2_writer *writer, const float *values, size_t n) {
    if (n > writer->n_left)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s: %zu values are appended, allowed is at most %llu",
                         writer->file.path, n, (unsigned long long)writer->n_left);
    writer->n_left -= n;
    if (fwrite(values, sizeof *values, n, writer->file.stream) == n) return TAGC_OK;
    return tagc_fail(TAGC_ERR_IO, "cannot write %s: %s", writer->file.path, strerror(errno));
}

tagc_status tagc_gpt2_writer_commit(tagc_gpt2_writer *writer) {
    if (!writer->file.stream) return tagc_fail(TAGC_ERR_STATE, "%s: was committed before", writer->file.path);
    if (writer->n_left > 0)
        return tagc_fail(TAGC_ERR_STATE, "%s: %llu values are missing", writer->file.path,
                         (unsigned long long)writer->n_left);
    return tagc_new_file_commit(&writer->file);
}

void tagc_gpt2_writer_destroy(tagc_gpt2_writer *writer) {
    if (!writer) return;
    tagc_new_file_close(&writer->file);
    free(writer);
}

/* ---- config.json ---- */

tagc_status tagc_gpt2_config_write(const char *path, const tagc_gpt2_config *config) {
    TAGC_TRY(tagc_gpt2_config_check(config));
    json_t *json = json_pack(
        "{s:[s], s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:b, s:s, s:f, s:f, s:f, s:f, s:f, s:s}", "architectures",
        "GPT2LMHeadModel", "model_type", "gpt2", "n_layer", config->n_layer, "n_head", config->n_head,
        "n_embd", config->n_embd, "n_positions", config->block_size, "n_ctx", config->block_size,
        "vocab_size", config->vocab_size, "tie_word_embeddings", config->tied, "activation_function",
        "gelu_new", "layer_norm_epsilon", 1e-5, "initializer_range", 0.02, "attn_pdrop", 0.0, "embd_pdrop",
        0.0, "resid_pdrop", 0.0, "torch_dtype", "float32");
    /* Readers assume GPT-2's end of text, 50256, which a smaller vocabulary does not have. */
    if (json && config->vocab_size <= 50256) {
        json_object_set_new(json, "bos_token_id", json_null());
        json_object_set_new(json, "eos_token_id", json_null());
    }
    if (!json) return tagc_fail(TAGC_ERR_MEMORY, "%s: no memory to write it", path);
    tagc_new_file file;
    tagc_status status = tagc_new_file_open(path, &file);
    if (status == TAGC_OK && json_dumpf(json, file.stream, JSON_INDENT(2) | JSON_REAL_PRECISION(6)) != 0)
        status = tagc_fail(TAGC_ERR_IO, "cannot write %s", path);
    if (status == TAGC_OK) status = tagc_new_file_commit(&file);
    tagc_new_file_close(&file);
    json_decref(json);
    return status;
}

static tagc_status read_int(const json_t *json, const char *field, int *out) {
    const json_t *value = json_object_get(json, field);
    if (!json_is_integer(value))
        return tagc_fail(TAGC_ERR_CORRUPT, "%s is missing or not a whole number", field);
    json_int_t number = json_integer_value(value);
    if (number < 1 || number > 1 << 30)
        return tagc_fail(TAGC_ERR_CORRUPT, "%s is %lld, which no model has", field, (long long)number);
    *out = (int)number;
    return TAGC_OK;
}

/* Variants of GPT-2 that this model does not support. An absent field has GPT-2's value. */
static tagc_status check_arithmetic(const json_t *json, int n_embd) {
    const json_t *gelu = json_object_get(json, "activation_function");
    const json_t *epsilon = json_object_get(json, "layer_norm_epsilon"),
                 *inner = json_object_get(json, "n_inner");
    if (gelu) {
        const char *name = json_is_string(gelu) ? json_string_value(gelu) : "";
        if (strcmp(name, "gelu_new") != 0 && strcmp(name, "gelu_pytorch_tanh") != 0)
            return tagc_fail(TAGC_ERR_UNSUPPORTED, "activation_function is \"%.40s\", allowed is gelu_new",
                             name);
    }
    if (epsilon && !(fabs(json_number_value(epsilon) - 1e-5) < 1e-9))
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "layer_norm_epsilon is %g, allowed is 1e-5",
                         json_number_value(epsilon));
    if (inner && !json_is_null(inner) && json_integer_value(inner) != 4 * (json_int_t)n_embd)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "n_inner is not 4 n_embd");
    if (json_is_false(json_object_get(json, "scale_attn_weights")) ||
        json_is_true(json_object_get(json, "scale_attn_by_inverse_layer_idx")))
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "only the usual scale of attention is supported");
    return TAGC_OK;
}

/* First, because other models have other fields. */
static tagc_status check_type(const json_t *json) {
    const json_t *type = json_object_get(json, "model_type");
    if (!json_is_object(json)) return tagc_fail(TAGC_ERR_CORRUPT, "must be a JSON object");
    if (!type || (json_is_string(type) && strcmp(json_string_value(type), "gpt2") == 0)) return TAGC_OK;
    return tagc_fail(TAGC_ERR_UNSUPPORTED,
                     "model_type is \"%.40s\", allowed is \"gpt2\": the command computes no other models "
                     "(tagc.torch exchanges gradients of any)",
                     json_is_string(type) ? json_string_value(type) : "?");
}

static tagc_status parse_config(const json_t *json, tagc_gpt2_config *config) {
    *config = (tagc_gpt2_config){0};
    TAGC_TRY(check_type(json));
    TAGC_TRY(read_int(json, "n_layer", &config->n_layer));
    TAGC_TRY(read_int(json, "n_head", &config->n_head));
    TAGC_TRY(read_int(json, "n_embd", &config->n_embd));
    TAGC_TRY(read_int(json, "n_positions", &config->block_size));
    TAGC_TRY(read_int(json, "vocab_size", &config->vocab_size));
    config->tied = !json_is_false(json_object_get(json, "tie_word_embeddings"));
    TAGC_TRY(check_arithmetic(json, config->n_embd));
    return tagc_gpt2_config_check(config);
}

tagc_status tagc_gpt2_config_read(const char *path, tagc_gpt2_config *out) {
    json_error_t error;
    FILE *stream = fopen(path, "rbe");
    if (!stream) return tagc_fail(TAGC_ERR_IO, "%s: %s", path, strerror(errno));
    json_t *json = json_loadf(stream, JSON_REJECT_DUPLICATES, &error);
    fclose(stream);
    if (!json) return tagc_fail(TAGC_ERR_CORRUPT, "%s: line %d: %.160s", path, error.line, error.text);
    tagc_gpt2_config config;
    tagc_status status = parse_config(json, &config);
    json_decref(json);
    if (status != TAGC_OK) return tagc_fail_in(status, "%s", path);
    *out = config;
    return TAGC_OK;
}
