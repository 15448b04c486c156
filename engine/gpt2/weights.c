/* GPT-2 checkpoints in Hugging Face's layout: a safetensors file as the tensors of a config. Matrices of linear layers are
 * (in, out) there and here, so nothing is transposed. */
#include "gpt2/shards.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct tagc_gpt2_weights {
    tagc_shards *file;
    int *entries; /* (n_tensors) */
};

enum { NAME_BYTES = 256 };

/* A stored name as Hugging Face's GPT-2 has it, without its prefix "transformer.". Wrappers of a module put a part of the name
 * in front of the names inside it. */
static void plain_name(const char *stored, char name[NAME_BYTES]) {
    static const char *const wrappers[] = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"};
    size_t n = 0;
    for (const char *at = stored; *at;) {
        size_t n_part = strcspn(at, ".");
        int is_wrapper = n == 0 && ((n_part == 6 && memcmp(at, "module", 6) == 0) ||
                                    (n_part == 11 && memcmp(at, "transformer", 11) == 0));
        for (size_t i = 0; i < sizeof wrappers / sizeof wrappers[0]; i++)
            is_wrapper |= strlen(wrappers[i]) == n_part && memcmp(at, wrappers[i], n_part) == 0;
        size_t n_step = n_part + (at[n_part] == '.');
        if (!is_wrapper && n + n_step < NAME_BYTES) {
            memcpy(name + n, at, n_step);
            n += n_step;
        }
        at += n_step;
    }
    name[n] = '\0';
}

/* *entry -1: none. TAGC_ERR_MISMATCH: two. */
static tagc_status find(const tagc_shards *file, const char *name, int *entry) {
    char plain[NAME_BYTES];
    tagc_safetensors_entry at, before;
    *entry = -1;
    for (int i = 0; i < tagc_shards_n_entries(file); i++) {
        tagc_shards_entry_at(file, i, &at);
        plain_name(at.name, plain);
        if (strcmp(plain, name) != 0) continue;
        if (*entry >= 0) {
            tagc_shards_entry_at(file, *entry, &before);
            return tagc_fail(TAGC_ERR_MISMATCH, "tensors \"%.80s\" and \"%.80s\" are both %s", before.name,
                             at.name, name);
        }
        *entry = i;
    }
    return TAGC_OK;
}

static void print_shape(const tagc_safetensors_entry *entry, char *text, size_t n_bytes) {
    size_t used = (size_t)snprintf(text, n_bytes, "(");
    for (int i = 0; i < entry->n_dims && used < n_bytes; i++)
        used += (size_t)snprintf(text + used, n_bytes - used, "%s%llu", i ? ", " : "",
                                 (unsigned long long)entry->dims[i]);
    if (used < n_bytes) snprintf(text + used, n_bytes - used, ")");
}

static tagc_status check_entry(const tagc_safetensors_entry *entry, const tagc_tensor_info *info) {
    int n_dims = info->n_cols == 1 && !info->decay ? 1 : 2;
    if (entry->n_dims != n_dims || entry->dims[0] != info->n_rows ||
        (n_dims == 2 && entry->dims[1] != info->n_cols)) {
        char have[200], need[80];
        tagc_safetensors_entry wanted = {.n_dims = n_dims, .dims = {info->n_rows, info->n_cols}};
        print_shape(entry, have, sizeof have);
        print_shape(&wanted, need, sizeof need);
        int is_transposed = n_dims == 2 && entry->n_dims == 2 && entry->dims[0] == info->n_cols &&
                            entry->dims[1] == info->n_rows;
        return tagc_fail(
            TAGC_ERR_MISMATCH, "tensor \"%s\" has shape %s, this model needs %s%s", entry->name, have, need,
            is_transposed ? ": it is transposed, since GPT-2 of Hugging Face stores (in, out), and "
                            "nn.Linear (out, in)"
                          : "");
    }
    static const char *const read[] = {"F64", "F32", "F16", "BF16"};
    for (size_t i = 0; i < sizeof read / sizeof read[0]; i++)
        if (strcmp(entry->dtype, read[i]) == 0) return TAGC_OK;
    return tagc_fail(TAGC_ERR_UNSUPPORTED, "tensor \"%s\" is %s, F64, F32, F16 and BF16 can be read",
                     entry->name, entry->dtype);
}

static int ends_with(const char *text, const char *end) {
    size_t n_text = strlen(text), n_end = strlen(end);
    return n_text >= n_end && strcmp(text + n_text - n_end, end) == 0;
}

/* A tensor that the config does not have must not be ignored, since the file may be a deeper model. Mask buffers of old files
 * are not weights. */
static tagc_status check_nothing_left(const tagc_shards *file, const int *entries, int n_tensors) {
    for (int i = 0; i < tagc_shards_n_entries(file); i++) {
        tagc_safetensors_entry entry;
        char name[NAME_BYTES];
        tagc_shards_entry_at(file, i, &entry);
        plain_name(entry.name, name);
        int used = ends_with(name, ".attn.bias") || ends_with(name, ".attn.masked_bias") ||
                   strcmp(name, "lm_head.weight") == 0;
        for (int j = 0; j < n_tensors && !used; j++) used = entries[j] == i;
        if (!used)
            return tagc_fail(TAGC_ERR_MISMATCH, "tensor \"%.80s\" has no place in this model", entry.name);
    }
    return TAGC_OK;
}

/* A tied model's file may contain the head, but it must equal the embedding. */
static tagc_status check_tied_head(tagc_shards *file, int wte) {
    int head;
    tagc_safetensors_entry a, b;
    float x[2048], y[2048];
    TAGC_TRY(find(file, "lm_head.weight", &head));
    if (head < 0) return TAGC_OK;
    tagc_shards_entry_at(file, wte, &a);
    tagc_shards_entry_at(file, head, &b);
    int same = a.n_elems == b.n_elems;
    for (uint64_t i = 0; same && i < a.n_elems; i += 2048) {
        uint64_t n = a.n_elems - i < 2048 ? a.n_elems - i : 2048;
        TAGC_TRY(tagc_shards_read(file, wte, i, n, x));
        TAGC_TRY(tagc_shards_read(file, head, i, n, y));
        same = memcmp(x, y, n * sizeof x[0]) == 0;
    }
    if (same) return TAGC_OK;
    return tagc_fail(TAGC_ERR_MISMATCH, "lm_head.weight differs from wte.weight, but this model is tied");
}

/* With a tensor that is there, by which people know what model it is. */
static tagc_status no_tensor(const tagc_shards *file, const char *name) {
    tagc_safetensors_entry first = {.name = ""};
    int n = tagc_shards_n_entries(file);
    if (n == 0) return tagc_fail(TAGC_ERR_MISMATCH, "there is no tensor at all");
    tagc_shards_entry_at(file, 0, &first);
    return tagc_fail(TAGC_ERR_MISMATCH, "there is no tensor \"%s\"; the first of %d is \"%.80s\"", name, n,
                     first.name);
}

static tagc_status match(tagc_gpt2_weights *weights, const tagc_gpt2_config *config) {
    int n_tensors = tagc_gpt2_n_tensors(config);
    for (int i = 0; i < n_tensors; i++) {
        tagc_tensor_info info;
        tagc_safetensors_entry entry;
        tagc_gpt2_tensor(config, i, &info);
        TAGC_TRY(find(weights->file, info.name, &weights->entries[i]));
        if (weights->entries[i] < 0 && info.kind == TAGC_TENSOR_HEAD)
            weights->entries[i] = weights->entries[0];
        if (weights->entries[i] < 0) return no_tensor(weights->file, info.name);
        tagc_shards_entry_at(weights->file, weights->entries[i], &entry);
        TAGC_TRY(check_entry(&entry, &info));
    }
    TAGC_TRY(check_nothing_left(weights->file, weights->entries, n_tensors));
    return config->tied ? check_tied_head(weights->file, weights->entries[0]) : TAGC_OK;
}

tagc_status tagc_gpt2_weights_open(const char *from, const tagc_gpt2_config *config,
                                   tagc_gpt2_weights **out) {
    char path[TAGC_PATH_BYTES];
    *out = NULL;
    TAGC_TRY(tagc_weights_find(from, path));
    TAGC_TRY(tagc_gpt2_config_check(config));
    tagc_gpt2_weights *weights = calloc(1, sizeof *weights);
    int *entries = calloc((size_t)tagc_gpt2_n_tensors(config), sizeof *entries);
    if (!weights || !entries) {
        free(weights);
        free(entries);
        return tagc_fail(TAGC_ERR_MEMORY, "%s: no memory to open it", path);
    }
    weights->entries = entries;
    tagc_status status = tagc_shards_open(path, &weights->file);
    if (status == TAGC_OK && (status = match(weights, config)) != TAGC_OK) tagc_fail_in(status, "%s", path);
    if (status == TAGC_OK)
        *out = weights;
    else
        tagc_gpt2_weights_close(weights);
    return status;
}

void tagc_gpt2_weights_close(tagc_gpt2_weights *weights) {
    if (!weights) return;
    tagc_shards_close(weights->file);
    free(weights->entries);
    free(weights);
}

tagc_status tagc_gpt2_weights_read(tagc_gpt2_weights *weights, int tensor, size_t first, size_t n,
                                   float *out) {
    return tagc_shards_read(weights->file, weights->entries[tensor], first, n, out);
}
