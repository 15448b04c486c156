/* Shapes of the family: presets, the table of tensors, and initial values that any rank can make for any part
 * of a tensor without making the rest. */
#include "core/status.h"
#include "gpt2/gpt2.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TENSORS_PER_BLOCK = 12 };

static const struct {
    const char *name;
    tagc_gpt2_config config;
} presets[] = {
    {"gpt2-162m", {12, 12, 768, 1024, 50304, 0}},
    {"gpt2-124m", {12, 12, 768, 1024, 50257, 1}},
    {"gpt2", {12, 12, 768, 1024, 50257, 1}},
    {"gpt2-medium", {24, 16, 1024, 1024, 50257, 1}},
    {"gpt2-large", {36, 20, 1280, 1024, 50257, 1}},
    {"gpt2-xl", {48, 25, 1600, 1024, 50257, 1}},
    {"demo", {4, 4, 128, 128, 256, 0}},
    {"tiny", {2, 2, 32, 32, 256, 0}},
};

tagc_status tagc_gpt2_preset(const char *name, tagc_gpt2_config *out) {
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        if (strcmp(name, presets[i].name) != 0) continue;
        *out = presets[i].config;
        return TAGC_OK;
    }
    char known[256] = "";
    for (size_t i = 0, n = 0; i < sizeof presets / sizeof presets[0]; i++)
        n += (size_t)snprintf(known + n, sizeof known - n, "%s%s", i ? ", " : "", presets[i].name);
    return tagc_fail(TAGC_ERR_ARGUMENT, "model \"%.64s\" is not one of %s", name, known);
}

static tagc_status check_range(const char *field, int value, int max) {
    if (value >= 1 && value <= max) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "%s is %d, allowed is 1 to %d", field, value, max);
}

tagc_status tagc_gpt2_config_check(const tagc_gpt2_config *config) {
    TAGC_TRY(check_range("n_layer", config->n_layer, 1000));
    TAGC_TRY(check_range("n_embd", config->n_embd, 65536));
    TAGC_TRY(check_range("n_head", config->n_head, config->n_embd));
    TAGC_TRY(check_range("block_size", config->block_size, 1 << 20));
    TAGC_TRY(check_range("vocab_size", config->vocab_size, 1 << 24));
    if (config->n_embd % config->n_head != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_head is %d, which does not divide n_embd %d", config->n_head,
                         config->n_embd);
    if (config->tied != 0 && config->tied != 1)
        return tagc_fail(TAGC_ERR_ARGUMENT, "tied is %d, allowed is 0 or 1", config->tied);
    return TAGC_OK;
}

int tagc_gpt2_n_tensors(const tagc_gpt2_config *config) {
    return 2 + TENSORS_PER_BLOCK * config->n_layer + 2 + !config->tied;
}

/* Shapes in units of n_embd; n_cols 0 means a vector. */
static const struct {
    const char *name;
    int n_rows, n_cols;
    tagc_tensor_kind kind;
} block_tensors[TENSORS_PER_BLOCK] = {
    {"ln_1.weight", 1, 0, TAGC_TENSOR_NORM},
    {"ln_1.bias", 1, 0, TAGC_TENSOR_NORM},
    {"attn.c_attn.weight", 1, 3, TAGC_TENSOR_ATTENTION},
    {"attn.c_attn.bias", 3, 0, TAGC_TENSOR_BIAS},
    {"attn.c_proj.weight", 1, 1, TAGC_TENSOR_ATTENTION_PROJECTION},
    {"attn.c_proj.bias", 1, 0, TAGC_TENSOR_BIAS},
    {"ln_2.weight", 1, 0, TAGC_TENSOR_NORM},
    {"ln_2.bias", 1, 0, TAGC_TENSOR_NORM},
    {"mlp.c_fc.weight", 1, 4, TAGC_TENSOR_MLP},
    {"mlp.c_fc.bias", 4, 0, TAGC_TENSOR_BIAS},
    {"mlp.c_proj.weight", 4, 1, TAGC_TENSOR_MLP},
    {"mlp.c_proj.bias", 1, 0, TAGC_TENSOR_BIAS},
};

static void fill(tagc_tensor_info *out, const char *name, size_t n_rows, size_t n_cols, tagc_tensor_kind kind,
                 int layer) {
    snprintf(out->name, sizeof out->name, "%s", name);
    out->n_rows = n_rows;
    out->n_cols = n_cols;
    out->n_elems = n_rows * n_cols;
    out->kind = kind;
    out->layer = out->last_layer = layer;
    out->decay = kind != TAGC_TENSOR_NORM && kind != TAGC_TENSOR_BIAS;
}

void tagc_gpt2_tensor(const tagc_gpt2_config *config, int tensor, tagc_tensor_info *out) {
    size_t n_embd = (size_t)config->n_embd, n_vocab = (size_t)config->vocab_size;
    int head = config->n_layer + 1;
    switch (tensor) {
    case 0:
        fill(out, "wte.weight", n_vocab, n_embd, TAGC_TENSOR_EMBEDDING, 0);
        if (config->tied) out->last_layer = head;
        return;
    case 1:
        fill(out, "wpe.weight", (size_t)config->block_size, n_embd, TAGC_TENSOR_POSITION, 0);
        return;
    default:
        break;
    }
    int block = (tensor - 2) / TENSORS_PER_BLOCK, place = (tensor - 2) % TENSORS_PER_BLOCK;
    if (block < config->n_layer) {
        char name[TAGC_TENSOR_NAME_BYTES];
        snprintf(name, sizeof name, "h.%d.%s", block, block_tensors[place].name);
        size_t n_rows = (size_t)block_tensors[place].n_rows * n_embd;
        size_t n_cols = block_tensors[place].n_cols ? (size_t)block_tensors[place].n_cols * n_embd : 1;
        fill(out, name, n_rows, n_cols, block_tensors[place].kind, block + 1);
    } else if (place == 0) {
        fill(out, "ln_f.weight", n_embd, 1, TAGC_TENSOR_NORM, head);
    } else if (place == 1) {
        fill(out, "ln_f.bias", n_embd, 1, TAGC_TENSOR_NORM, head);
    } else {
        fill(out, "lm_head.weight", n_vocab, n_embd, TAGC_TENSOR_HEAD, head);
    }
}

tagc_status tagc_gpt2_tensors(const tagc_gpt2_config *config, tagc_tensor_info **out) {
    int n_tensors = tagc_gpt2_n_tensors(config);
    *out = calloc((size_t)n_tensors, sizeof **out);
    if (!*out) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for a table of %d tensors", n_tensors);
    for (int i = 0; i < n_tensors; i++) tagc_gpt2_tensor(config, i, &(*out)[i]);
    return TAGC_OK;
}

uint64_t tagc_gpt2_n_params(const tagc_gpt2_config *config) {
    uint64_t n_params = 0;
    for (int i = 0; i < tagc_gpt2_n_tensors(config); i++) {
        tagc_tensor_info info;
        tagc_gpt2_tensor(config, i, &info);
        n_params += info.n_elems;
    }
    return n_params;
}

/* A bijection of 64 bits in which every input bit reaches every output bit (the finaliser of splitmix64). */
static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Two independent standard normals (Box-Muller) of pair number `pair`. */
static void normal_pair(uint64_t key, uint64_t pair, float out[2]) {
    uint64_t bits = mix(key + (pair + 1) * 0x9e3779b97f4a7c15u);
    float uniform = ((float)(bits >> 40) + 0.5f) * 0x1p-24f; /* in (0, 1] */
    float angle = (float)(bits & 0xffffff) * (0x1p-24f * 6.28318531f);
    float radius = sqrtf(-2.0f * logf(uniform));
    out[0] = radius * cosf(angle);
    out[1] = radius * sinf(angle);
}

void tagc_gpt2_init_tensor(const tagc_gpt2_config *config, int tensor, uint64_t seed, size_t first, size_t n,
                           float *values) {
    tagc_tensor_info info;
    tagc_gpt2_tensor(config, tensor, &info);
    size_t n_chars = strlen(info.name);
    if (!info.decay) {
        float constant = info.kind == TAGC_TENSOR_NORM && strcmp(info.name + n_chars - 6, "weight") == 0;
        for (size_t i = 0; i < n; i++) values[i] = constant;
        return;
    }
    float deviation = 0.02f;
    if (strstr(info.name, "c_proj")) deviation /= sqrtf(2.0f * (float)config->n_layer);
    uint64_t key = mix(seed + mix((uint64_t)tensor + 1));
    for (size_t i = first; i < first + n;) {
        float pair[2];
        normal_pair(key, i / 2, pair);
        if (i % 2 == 0) values[i++ - first] = deviation * pair[0];
        if (i < first + n) values[i++ - first] = deviation * pair[1];
    }
}
