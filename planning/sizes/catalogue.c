/* The shapes of models that have a name, and of a GPT of which only the size is known; strategies. */
#include "sizes/catalogue.h"

#include "exchange/options.h"
#include "plan/plan.h"
#include "tagc/schedule.h"

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

/* A power of two, 8 or more, of at most 128 values each: the degrees of tensor parallelism that people use divide it. */
static int heads_of(double width) {
    int n_head = 8;
    while (width / n_head > 128) n_head *= 2;
    return n_head;
}

/* The nearest width whose heads have a multiple of 8 values, or of 4 in small models. */
static int usual_width(double wide) {
    int n_head = heads_of(wide), step = n_head * (n_head == 8 ? 4 : 8);
    return (int)fmax(64, step * rint(wide / step));
}

/* Least squares: first as many parameters as asked for, then about 110 values of width for each layer, as GPT-3 and Llama
 * have from 7 B on. Layers are a multiple of 8, so that 2, 4 and 8 stages divide them. */
void tagc_plan_shape(double n_params, int *n_layer, int *n_embd) {
    double least = INFINITY;
    *n_layer = 8;
    *n_embd = 64;
    for (int n = 8; n <= 256; n += 8) {
        /* 12 c^2 of a layer; the embedding and the head are c wide, too */
        double vocab = TAGC_MESH_VOCAB;
        double wide = (sqrt(vocab * vocab + 12 * n * n_params) - vocab) / (12 * n);
        double width = usual_width(wide);
        double size = 12 * n * width * width + 2 * vocab * width;
        double off = pow(log(size / n_params), 2) + 0.002 * pow(log(width / n / 110), 2);
        if (off >= least) continue;
        least = off;
        *n_layer = n;
        *n_embd = (int)width;
    }
}

tagc_mesh_model tagc_mesh_gpt(double n_params, int n_positions) {
    int n_layer, width;
    tagc_plan_shape(n_params, &n_layer, &width);
    int n_head = heads_of(width);
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

/* ---- strategies ---- */

#define PLAIN TAGC_GATHER_BF16, -1
enum { TIMED = TAGC_TIMED_ALONE | TAGC_TIMED_HOSTS, EVERYWHERE = TIMED | TAGC_ON_MESH };

const tagc_strategy tagc_strategies[TAGC_N_STRATEGIES] = {
    {"FSDP2 in bf16", EVERYWHERE, TAGC_SHARD_FULL, PLAIN},
    {"FSDP2 in bf16, reshard_after_forward=False", TAGC_TIMED_ALONE | TAGC_ON_MESH, TAGC_SHARD_GRAD, PLAIN},
    {"FSDP2 in bf16, sharded within a host", TAGC_TIMED_HOSTS | TAGC_ON_MESH, TAGC_SHARD_HYBRID, PLAIN},
    {"DDP in bf16", TAGC_ON_MESH, TAGC_SHARD_NONE, PLAIN},
    {"tagc, 4 bits, parameters=\"delta4\"", EVERYWHERE, TAGC_SHARD_FULL, TAGC_GATHER_DELTA4,
     TAGC_LEVEL_EVERY},
    {"tagc, 95 % zero, parameters=\"delta4\"", EVERYWHERE, TAGC_SHARD_FULL, TAGC_GATHER_DELTA4,
     TAGC_LEVEL_LAST},
    {"tagc, sharded within a host, 4 bits", TAGC_TIMED_HOSTS | TAGC_ON_MESH, TAGC_SHARD_HYBRID,
     TAGC_GATHER_BF16, TAGC_LEVEL_EVERY},
    {"tagc, sharded within a host, 95 % zero", TAGC_TIMED_HOSTS, TAGC_SHARD_HYBRID, TAGC_GATHER_BF16,
     TAGC_LEVEL_LAST},
    {"tagc, DDP, 4 bits", TAGC_ON_MESH, TAGC_SHARD_NONE, TAGC_GATHER_BF16, TAGC_LEVEL_EVERY},
};

int tagc_strategy_compresses(const tagc_strategy *strategy) {
    return strategy->level >= 0;
}

tagc_schedule_plan tagc_strategy_plan(const tagc_strategy *strategy) {
    tagc_schedule_plan plan = {.format = TAGC_FORMAT_BF16};
    if (tagc_strategy_compresses(strategy)) /* cannot fail: there is such a level */
        (void)tagc_schedule_plan_of_level(NULL, TAGC_CLASS_COMPRESSED, strategy->level, &plan);
    return plan;
}
