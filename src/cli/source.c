/* Opening of trained models. */
#include "cli/source.h"

#include "cli/engine.h"
#include "cli/train_options.h"
#include "core/status.h"
#include "fsdp/checkpoint.h"
#include "gpt2/safetensors.h"
#include <dirent.h>
#include <stdlib.h>
#include <string.h>

static int has_steps(const char *dir) {
    DIR *folder = opendir(dir);
    int found = 0;
    for (struct dirent *entry; folder && !found && (entry = readdir(folder));)
        found = strncmp(entry->d_name, "step-", 5) == 0;
    if (folder) closedir(folder);
    return found;
}

tagc_status tagc_source_find(const char *from, tagc_source *out) {
    *out = (tagc_source){0};
    if (!tagc_path_exists(from)) return tagc_fail(TAGC_ERR_IO, "%s does not exist", from);
    if (!tagc_path_is_dir(from)) {
        snprintf(out->path, sizeof out->path, "%s", from);
        return TAGC_OK;
    }
    TAGC_TRY(tagc_path_join(from, "model.safetensors", out->path));
    if (tagc_path_exists(out->path)) return TAGC_OK;
    TAGC_TRY(tagc_path_join(from, "manifest.json", out->path));
    out->is_checkpoint = tagc_path_exists(out->path) || has_steps(from);
    snprintf(out->path, sizeof out->path, "%s", from);
    if (!out->is_checkpoint)
        return tagc_fail(TAGC_ERR_IO, "%s holds neither a checkpoint nor model.safetensors", from);
    return TAGC_OK;
}

tagc_status tagc_source_shape(const char *weights, const char *preset, tagc_gpt2_config *out) {
    char dir[TAGC_PATH_BYTES], path[TAGC_PATH_BYTES];
    if (preset) return tagc_gpt2_preset(preset, out);
    snprintf(dir, sizeof dir, "%s", weights);
    char *slash = strrchr(dir, '/');
    if (slash)
        *slash = '\0';
    else
        snprintf(dir, sizeof dir, ".");
    TAGC_TRY(tagc_path_join(*dir ? dir : "/", "config.json", path));
    if (!tagc_path_exists(path))
        return tagc_fail(TAGC_ERR_IO,
                         "%s has no config.json beside it that tells its shape; name one with --model",
                         weights);
    return tagc_gpt2_config_read(path, out);
}

static tagc_status open_checkpoint(tagc_rank *rank, const char *from, tagc_source *source) {
    char *extra = NULL;
    int world_size;
    tagc_train_options options;
    tagc_fsdp_options engine;
    tagc_progress silent = {.quiet = 1};
    TAGC_TRY(tagc_checkpoint_find(rank->comm, from, source->path, sizeof source->path));
    TAGC_TRY(tagc_checkpoint_info(source->path, &source->step, &world_size, &extra));
    tagc_status status = tagc_saved_read(extra, &source->saved);
    free(extra);
    if (status != TAGC_OK) return tagc_fail_in(status, "%s", source->path);
    /* The engine must be laid out as it was when the checkpoint was written. */
    TAGC_TRY(tagc_options_parse(&tagc_train_command, 0, NULL, &options, &source->parsed));
    TAGC_TRY(tagc_saved_merge(&source->saved, &source->parsed, &options, &silent));
    source->model = source->saved.model;
    tagc_train_fsdp(&options, &engine);
    TAGC_TRY(tagc_engine_create(rank, &source->model, &engine, &source->fsdp));
    TAGC_TRY(tagc_checkpoint_load(source->fsdp, rank->comm, source->path, &source->step, &extra));
    free(extra);
    return TAGC_OK;
}

tagc_status tagc_source_open(tagc_rank *rank, const char *from, const char *preset, tagc_source *source) {
    TAGC_TRY(tagc_source_find(from, source));
    if (source->is_checkpoint) return open_checkpoint(rank, from, source);
    tagc_fsdp_options engine;
    tagc_fsdp_options_init(&engine);
    engine.policy = TAGC_POLICY_NONE;
    TAGC_TRY(tagc_source_shape(source->path, preset, &source->model));
    TAGC_TRY(tagc_engine_create(rank, &source->model, &engine, &source->fsdp));
    return tagc_engine_init_file(source->fsdp, &source->model, source->path);
}

void tagc_source_close(tagc_source *source) {
    tagc_fsdp_destroy(source->fsdp);
    tagc_options_destroy(&source->parsed);
    tagc_saved_destroy(&source->saved);
}

tagc_status tagc_source_tokenizer(const char *vocab, const char *merges, const char *wanted,
                                  tagc_tokenizer **out) {
    *out = NULL;
    if (!vocab != !merges)
        return tagc_fail(TAGC_ERR_ARGUMENT, "--vocab and --merges go together: both are needed");
    TAGC_TRY(vocab ? tagc_tokenizer_create_bpe(vocab, merges, out) : tagc_tokenizer_create_bytes(out));
    const char *name = tagc_tokenizer_name(*out);
    if (!*wanted || strcmp(name, wanted) == 0) return TAGC_OK;
    tagc_status status =
        vocab
            ? tagc_fail(TAGC_ERR_MISMATCH,
                        "the model was trained with tokenizer %s, --vocab and --merges make %s", wanted, name)
            : tagc_fail(TAGC_ERR_MISMATCH,
                        "the model was trained with tokenizer %s: give its files with --vocab and"
                        " --merges",
                        wanted);
    tagc_tokenizer_destroy(*out);
    *out = NULL;
    return status;
}
