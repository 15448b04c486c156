/* tagc export: a checkpoint as model.safetensors and config.json. */
#include "cli/commands.h"
#include "cli/trained.h"
#include "core/status.h"
#include "gpt2/safetensors.h"
#include <stdlib.h>

typedef struct export_options {
    const char *from, *out;
    int force;
} export_options;

static const tagc_option rows[] = {
    {"What", "from", TAGC_OPTION_TEXT, 0, offsetof(export_options, from), 0, 0, NULL, NULL, "PATH",
     "a run's folder (its newest checkpoint) or one checkpoint"},
    {NULL, "out", TAGC_OPTION_TEXT, 0, offsetof(export_options, out), 0, 0, NULL, NULL, "DIR",
     "folder for model.safetensors and config.json"},
    {NULL, "force", TAGC_OPTION_FLAG, 0, offsetof(export_options, force), 0, 0, NULL, "no", NULL,
     "overwrite the model.safetensors and config.json that --out has already"},
};

static const tagc_command command = {
    .name = "export",
    .summary = "write a checkpoint as a folder that Hugging Face's GPT-2 opens",
    .usage = "--from PATH --out DIR",
    .examples =
        "  tagc export --from runs/first --out first-hf\n"
        "  python3 -c 'from transformers import GPT2LMHeadModel as M; M.from_pretrained(\"first-hf\")'\n",
    .options = rows,
    .n_options = sizeof rows / sizeof rows[0],
    .needs = "from out"};

static tagc_status append_tensors(tagc_trained *trained, tagc_gpt2_writer *writer) {
    for (int tensor = 0; tensor < tagc_gpt2_n_tensors(&trained->model); tensor++) {
        tagc_tensor_info info;
        tagc_gpt2_tensor(&trained->model, tensor, &info);
        float *values = malloc(info.n_elems * sizeof *values);
        if (!values) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %s", info.name);
        tagc_status status = tagc_fsdp_read_tensor(trained->fsdp, tensor, values);
        if (status == TAGC_OK) status = tagc_gpt2_writer_append(writer, values, info.n_elems);
        free(values);
        TAGC_TRY(status);
    }
    return tagc_gpt2_writer_commit(writer);
}

static tagc_status write_model(tagc_trained *trained, const char *dir) {
    char path[TAGC_PATH_BYTES];
    tagc_gpt2_writer *writer = NULL;
    TAGC_TRY(tagc_path_make_dirs(dir));
    TAGC_TRY(tagc_path_join(dir, "model.safetensors", path));
    TAGC_TRY(tagc_gpt2_writer_create(path, &trained->model, &writer));
    tagc_status status = append_tensors(trained, writer);
    tagc_gpt2_writer_destroy(writer);
    TAGC_TRY(status);
    printf("%s: %llu parameters, from %s\n", path, (unsigned long long)tagc_fsdp_n_params(trained->fsdp),
           trained->path);
    TAGC_TRY(tagc_path_join(dir, "config.json", path));
    return tagc_gpt2_config_write(path, &trained->model);
}

static tagc_status export_rank(tagc_rank *rank, void *context) {
    const export_options *options = context;
    tagc_trained trained = {0};
    tagc_status status = tagc_trained_open(rank, options->from, NULL, &trained);
    if (status == TAGC_OK) status = write_model(&trained, options->out);
    tagc_rank_finish(rank, status);
    tagc_trained_close(&trained);
    return status;
}

static int run(tagc_parsed *parsed) {
    const export_options *options = parsed->values;
    tagc_trained trained;
    tagc_status status = tagc_trained_find(options->from, &trained);
    if (status == TAGC_OK && !options->force)
        status = tagc_command_keep(options->out, "model.safetensors", "config.json");
    if (status != TAGC_OK) return tagc_command_end(status);
    tagc_launch launch = {.n_ranks = 1, .transport = TAGC_LAUNCH_LOCAL, .timeout_s = 120};
    return tagc_ranks_run(&launch, export_rank, parsed->values);
}

const tagc_entry tagc_entry_export = {&command, sizeof(export_options), run, NULL};
