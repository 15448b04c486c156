/* tagc info: what a thing on disk, or a preset, holds. */
#include "cli/commands.h"
#include "cli/trained.h"
#include "core/status.h"
#include "gpt2/shards.h"
#include "launch/human.h"
#include "launch/over_ranks.h"
#include "launch/ranks.h"
#include "train/progress.h"
#include <stdlib.h>
#include <string.h>

typedef struct info_options {
    int tensors;
} info_options;

static const tagc_option rows[] = {
    {"What", "tensors", TAGC_OPTION_FLAG, 0, offsetof(info_options, tensors), 0, 0, NULL, "no", NULL,
     "list every tensor"},
};

static const tagc_command command = {
    .name = "info",
    .summary = "what a token file, checkpoint, weights file or preset holds",
    .usage = "FILE|DIR|PRESET... [--tensors]",
    .examples = "  tagc info gpt2-162m\n"
                "  tagc info data/books/train.bin runs/first model.safetensors --tensors\n",
    .options = rows,
    .n_options = sizeof rows / sizeof rows[0],
    .positionals = "nothing is named; name a file, a folder or a preset",
};

static void print_tensor(const tagc_tensor_info *tensor) {
    if (tensor->n_cols > 1)
        printf("  %-28s %9zu x %-9zu %12zu\n", tensor->name, tensor->n_rows, tensor->n_cols, tensor->n_elems);
    else
        printf("  %-28s %9zu   %-9s %12zu\n", tensor->name, tensor->n_rows, "", tensor->n_elems);
}

static void print_model(const tagc_gpt2_config *config, int with_tensors) {
    static const char *const names[] = {"none", "non-attention-linear", "paper", "all"};
    char params[16], bytes[16], part[16], rest[16];
    uint64_t n_params = tagc_gpt2_n_params(config);
    tagc_fsdp_options engine;
    tagc_fsdp_options_init(&engine);
    engine.mild.exchange = TAGC_EXCHANGE_DIRECT;
    printf("  %d layers, %d heads, width %d, %d positions, vocabulary %d, head %s\n", config->n_layer,
           config->n_head, config->n_embd, config->block_size, config->vocab_size,
           config->tied ? "tied to the embedding" : "of its own");
    printf("  %s parameters (%llu), %s in fp32, %d tensors\n", tagc_human((double)n_params, params),
           (unsigned long long)n_params, tagc_human_bytes(4.0 * (double)n_params, bytes),
           tagc_gpt2_n_tensors(config));
    for (int policy = TAGC_POLICY_NON_ATTENTION_LINEAR; policy <= TAGC_POLICY_ALL; policy++) {
        uint64_t n[TAGC_N_CLASSES] = {0};
        engine.policy = policy;
        for (int i = 0; i < tagc_gpt2_n_tensors(config); i++) {
            tagc_tensor_info tensor;
            tagc_gpt2_tensor(config, i, &tensor);
            n[tagc_fsdp_class(&engine, &tensor)] += tensor.n_elems;
        }
        double compressed = (double)n[TAGC_CLASS_COMPRESSED], mild = (double)n[TAGC_CLASS_MILD];
        printf("  --compress %-20s  %6s parameters, %5.1f %%; matrices left to --mild %6s, %4.1f %%\n",
               names[policy], tagc_human(compressed, part), 100 * compressed / (double)n_params,
               tagc_human(mild, rest), 100 * mild / (double)n_params);
    }
    for (int i = 0; with_tensors && i < tagc_gpt2_n_tensors(config); i++) {
        tagc_tensor_info tensor;
        tagc_gpt2_tensor(config, i, &tensor);
        print_tensor(&tensor);
    }
}

static tagc_status info_tokens(const char *data, tagc_data_part part) {
    tagc_tokens *tokens = NULL;
    tagc_tokens_info info;
    char count[16];
    TAGC_TRY(tagc_data_open(data, part, &tokens));
    tagc_tokens_get_info(tokens, &info);
    if (tagc_tokens_n_shards(tokens) > 1)
        printf("%s: %zu shards for %s\n", data, tagc_tokens_n_shards(tokens),
               part == TAGC_DATA_TRAIN ? "training" : "validation");
    printf("%s: tokens (%s format, %d byte%s each)\n", tagc_tokens_path(tokens),
           tagc_tokens_format_name(info.format), info.token_bytes, info.token_bytes > 1 ? "s" : "");
    printf("  %s tokens (%llu)", tagc_human((double)info.n_tokens, count), (unsigned long long)info.n_tokens);
    if (info.vocab_size) printf(", vocabulary %u", info.vocab_size);
    if (info.end_of_text >= 0) printf(", %lld ends a text", (long long)info.end_of_text);
    if (*info.tokenizer) printf(", tokenizer %s", info.tokenizer);
    printf("\n");
    tagc_tokens_close(tokens);
    return TAGC_OK;
}

static tagc_status info_weights(const char *path, int with_tensors) {
    tagc_shards *file = NULL;
    tagc_gpt2_config config;
    TAGC_TRY(tagc_shards_open(path, &file));
    int n = tagc_shards_n_entries(file), n_files = tagc_shards_n_files(file);
    char files[32] = "";
    if (n_files > 1) snprintf(files, sizeof files, " in %d files", n_files);
    printf("%s: safetensors, %d tensors%s\n", path, n, files);
    if (tagc_trained_shape(path, NULL, &config) == TAGC_OK) print_model(&config, 0);
    for (int i = 0; with_tensors && i < n; i++) {
        tagc_safetensors_entry entry;
        tagc_shards_entry_at(file, i, &entry);
        printf("  %-40s %-5s", entry.name, entry.dtype);
        for (int dim = 0; dim < entry.n_dims; dim++) printf(" %llu", (unsigned long long)entry.dims[dim]);
        printf("\n");
    }
    tagc_shards_close(file);
    return TAGC_OK;
}

static tagc_status info_checkpoint(const char *from, int with_tensors) {
    char path[TAGC_PATH_BYTES], tokens[16];
    tagc_alone alone;
    tagc_saved saved;
    tagc_status status = tagc_alone_open(&alone);
    if (status == TAGC_OK) status = tagc_saved_open(alone.comm, from, path, &saved);
    tagc_alone_close(&alone);
    TAGC_TRY(status);
    printf("%s: checkpoint after step %llu, written by %d rank%s\n", path, (unsigned long long)saved.step,
           saved.world_size, saved.world_size > 1 ? "s" : "");
    printf("  %s tokens seen", tagc_human((double)saved.n_tokens, tokens));
    if (saved.best_val_loss < 1e300) printf(", best validation loss %.4f", saved.best_val_loss);
    if (*saved.tokenizer) printf(", tokenizer %s", saved.tokenizer);
    printf("\n  options:");
    const char *name;
    json_t *value;
    json_object_foreach(saved.options, name, value) if (*json_string_value(value))
        printf(" --%s %s", name, json_string_value(value));
    printf("\n");
    print_model(&saved.model, with_tensors);
    tagc_saved_destroy(&saved);
    return TAGC_OK;
}

static int is_weights(const char *path) {
    static const char *const endings[] = {".safetensors", ".safetensors.index.json"};
    size_t n = strlen(path);
    for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++)
        if (n > strlen(endings[i]) && strcmp(path + n - strlen(endings[i]), endings[i]) == 0) return 1;
    return 0;
}

static int describe(const char *what, int with_tensors) {
    tagc_gpt2_config config;
    tagc_trained trained;
    if (!tagc_path_exists(what)) {
        if (tagc_gpt2_preset(what, &config) != TAGC_OK) {
            return tagc_command_end(
                tagc_fail_in(TAGC_ERR_ARGUMENT, "%s is neither a file nor a preset", what));
        }
        printf("%s: preset\n", what);
        print_model(&config, with_tensors);
        return TAGC_EXIT_OK;
    }
    tagc_status status;
    if (tagc_path_is_dir(what)) {
        if (tagc_data_has(what, TAGC_DATA_TRAIN)) {
            status = info_tokens(what, TAGC_DATA_TRAIN);
            if (status == TAGC_OK && tagc_data_has(what, TAGC_DATA_VAL))
                status = info_tokens(what, TAGC_DATA_VAL);
            return tagc_command_end(status);
        }
        status = tagc_trained_find(what, &trained);
        if (status == TAGC_OK)
            status = trained.is_checkpoint ? info_checkpoint(what, with_tensors)
                                           : info_weights(trained.path, with_tensors);
    } else {
        status = is_weights(what) ? info_weights(what, with_tensors) : info_tokens(what, TAGC_DATA_TRAIN);
    }
    return tagc_command_end(status);
}

static int run(tagc_parsed *parsed) {
    const info_options *options = parsed->values;
    int code = TAGC_EXIT_OK;
    for (int i = 0; code == TAGC_EXIT_OK && i < parsed->n_words; i++)
        code = describe(parsed->words[i], options->tensors);
    return code;
}

const tagc_entry tagc_entry_info = {&command, sizeof(info_options), run, NULL};
