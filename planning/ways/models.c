/* The shapes of models that have a name, and of a GPT of which only the size is known. */
#include "ways/models.h"

#include <math.h>
#include <strings.h>

/* layers, width, heads, heads of keys, feed-forward, vocabulary, positions, gated, bias, experts, experts of a token */
const tagc_mesh_named tagc_mesh_models[] = {
    {"gpt-3-175b", {96, 12288, 96, 96, 49152, 50257, 2048, 0, 1, 1, 1}},
    {"llama-3-8b", {32, 4096, 32, 8, 14336, 128256, 0, 1, 0, 1, 1}},
    {"llama-3-70b", {80, 8192, 64, 8, 28672, 128256, 0, 1, 0, 1, 1}},
    {"llama-3-405b", {126, 16384, 128, 8, 53248, 128256, 0, 1, 0, 1, 1}},
    {"mixtral-8x7b", {32, 4096, 32, 8, 14336, 32000, 0, 1, 0, 8, 2}},
    {"mixtral-8x22b", {56, 6144, 48, 8, 16384, 32768, 0, 1, 0, 8, 2}},
    {0},
};

const tagc_mesh_named *tagc_mesh_find(const char *name) {
    for (const tagc_mesh_named *at = tagc_mesh_models; at->name; at++)
        if (strcasecmp(at->name, name) == 0) return at;
    return NULL;
}

void tagc_plan_shape(double n_params, int *n_layer, int *n_embd) {
    double least = INFINITY;
    *n_layer = 1;
    *n_embd = 64;
    for (int n = 1; n <= 256; n++) {
        /* 12 c^2 of a layer; the embedding and the head are c wide, too */
        double vocab = TAGC_MESH_VOCAB;
        double wide = (sqrt(vocab * vocab + 12 * n * n_params) - vocab) / (12 * n);
        double width = fmax(64, rint(wide / 64) * 64);
        double size = 12 * n * width * width + 2 * vocab * width;
        double off = fabs(log(size / n_params)) + 0.1 * fabs(log(width / n / 110));
        if (off >= least) continue;
        least = off;
        *n_layer = n;
        *n_embd = (int)width;
    }
}

tagc_mesh_model tagc_mesh_gpt(double n_params, int n_positions) {
    int n_layer, width;
    tagc_plan_shape(n_params, &n_layer, &width);
    int n_head = width / (width % 128 == 0 ? 128 : 64);
    return (tagc_mesh_model){.n_layer = n_layer,
                             .n_embd = width,
                             .n_head = n_head,
                             .n_kv_head = n_head,
                             .n_ffn = 4 * width,
                             .n_vocab = TAGC_MESH_VOCAB,
                             .n_positions = n_positions,
                             .has_bias = 1,
                             .n_experts = 1,
                             .n_active = 1};
}
