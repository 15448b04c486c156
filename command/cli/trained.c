/* Opening of trained models. */
#include "cli/trained.h"

#include "core/status.h"
#include "fsdp/checkpoint.h"
#include "gpt2/shards.h"
#include "launch/hosts.h"
#include "options/saved_options.h"
#include "options/train_options.h"
#include "plan/plan.h"
#include "train/engine.h"
#include <dirent.h>
#include <stdlib.h>
#include <string.h>

static int has_steps(const char *dir) {
    DIR *folder = opendir(dir);
    int has_checkpoint = 0;
    for (struct dirent *entry; folder && !has_checkpoint && (entry = readdir(folder));)
        has_checkpoint = strncmp(entry->d_name, "step-", 5) == 0;
    if (folder) closedir(folder);
    return has_checkpoint;
}

tagc_status tagc_trained_find(const char *from, tagc_trained *out) {
    *out = (tagc_trained){0};
    if (!tagc_path_exists(from)) return tagc_fail(TAGC_ERR_IO, "%s does not exist", from);
    if (!tagc_path_is_dir(from)) {
        snprintf(out->path, sizeof out->path, "%s", from);
        return TAGC_OK;
    }
    TAGC_TRY(tagc_path_join(from, "manifest.json", out->path));
    out->is_checkpoint = tagc_path_exists(out->path) || has_steps(from);
    if (!out->is_checkpoint) return tagc_weights_find(from, out->path);
    TAGC_TRY(tagc_path_join(from, "model.safetensors", out->path));
    if (tagc_path_exists(out->path)) /* one may be older, and no file says which */
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "%s holds checkpoints and model.safetensors: name the file, or a step-* folder",
                         from);
    snprintf(out->path, sizeof out->path, "%s", from);
    return TAGC_OK;
}

tagc_status tagc_trained_shape(const char *weights, const char *preset, tagc_gpt2_config *out) {
    char path[TAGC_PATH_BYTES];
    if (preset) return tagc_gpt2_preset(preset, out);
    TAGC_TRY(tagc_path_beside(weights, "config.json", path));
    if (!tagc_path_exists(path)) { /* a file of another kind is named as such */
        tagc_shards *file;
        TAGC_TRY(tagc_shards_open(weights, &file));
        tagc_shards_close(file);
    }
    if (!tagc_path_exists(path))
        return tagc_fail(TAGC_ERR_IO, "%s has no config.json beside it with its shape; name one with --model",
                         weights);
    return tagc_gpt2_config_read(path, out);
}

/* Makes the engine, if this host has the memory for it. */
static tagc_status create_engine(tagc_rank *rank, const tagc_fsdp_options *engine, tagc_trained *trained) {
    int n_here;
    tagc_setup setup = {.model = trained->model,
                        .world_size = rank->world_size,
                        .n_hosts = 1,
                        .engine = *engine,
                        .union_density = -1};
    TAGC_TRY(tagc_ranks_here(rank, &n_here));
    TAGC_TRY(tagc_plan_check_memory(trained->path, &setup, n_here));
    return tagc_engine_create(rank, &trained->model, engine, &trained->fsdp);
}

static tagc_status open_checkpoint(tagc_rank *rank, const char *from, tagc_trained *trained) {
    char *extra = NULL;
    tagc_train_options options;
    tagc_fsdp_options engine;
    tagc_progress silent = {.quiet = 1};
    TAGC_TRY(tagc_saved_open(rank->comm, from, trained->path, &trained->saved));
    TAGC_TRY(tagc_options_parse(&tagc_train_command, 0, NULL, &options, &trained->parsed));
    TAGC_TRY(tagc_saved_merge(&trained->saved, &trained->parsed, &options, &silent));
    trained->model = trained->saved.model;
    /* The owners' values, whole, as tagc export writes them: training's ranks compute with what --gather makes of them. Of
     * gradients there are none, and these ranks are on other hosts. */
    tagc_train_fsdp(&options, &engine);
    tagc_fsdp_options plain;
    tagc_fsdp_options_init(&plain);
    plain.policy = TAGC_POLICY_NONE;
    plain.sharding = engine.sharding == TAGC_SHARD_HYBRID ? TAGC_SHARD_FULL : engine.sharding;
    plain.wrap = engine.wrap;
    plain.prefetch = engine.prefetch;
    TAGC_TRY(create_engine(rank, &plain, trained));
    TAGC_TRY(tagc_checkpoint_fork(trained->fsdp, rank->comm, trained->path, &trained->saved.step, &extra));
    free(extra);
    return TAGC_OK;
}

tagc_status tagc_trained_open(tagc_rank *rank, const char *from, const char *preset, tagc_trained *trained) {
    TAGC_TRY(tagc_trained_find(from, trained));
    if (trained->is_checkpoint) return open_checkpoint(rank, from, trained);
    tagc_fsdp_options engine;
    tagc_fsdp_options_init(&engine);
    engine.policy = TAGC_POLICY_NONE;
    TAGC_TRY(tagc_trained_shape(trained->path, preset, &trained->model));
    TAGC_TRY(create_engine(rank, &engine, trained));
    return tagc_engine_init_file(trained->fsdp, &trained->model, trained->path);
}

void tagc_trained_close(tagc_trained *trained) {
    tagc_fsdp_destroy(trained->fsdp);
    tagc_options_destroy(&trained->parsed);
    tagc_saved_destroy(&trained->saved);
}

int tagc_trained_has_bytes(const tagc_trained *trained) {
    const char *tokenizer = trained->saved.tokenizer;
    if (!*tokenizer) return trained->model.vocab_size <= TAGC_BYTES_VOCAB_SIZE;
    return strcmp(tokenizer, TAGC_BYTES_TOKENIZER) == 0;
}
