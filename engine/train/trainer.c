/* Opening, saving and closing of a run. Order matters: cheap things that can be wrong come first, so that a
 * mistyped path does not cost the making of a model. */
#include "train/trainer.h"

#include "core/status.h"
#include "disk/new_file.h"
#include "files/result_file.h"
#include "fsdp/checkpoint.h"
#include "launch/hosts.h"
#include "launch/over_ranks.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Parses the steps and opens the file, so that an impossible timeline fails before the first step. */
static tagc_status open_trace(tagc_trainer *t) {
    uint64_t n_steps = (uint64_t)t->options.steps;
    t->trace_first = t->step + 3 < n_steps ? t->step + 3 : n_steps;
    t->trace_last = t->step + 5;
    if (t->options.trace_steps)
        TAGC_TRY(tagc_train_trace_steps(t->options.trace_steps, &t->trace_first, &t->trace_last));
    if (!t->options.trace || t->step >= n_steps) return TAGC_OK;
    if (t->trace_first > n_steps || t->trace_last <= t->step)
        return tagc_fail(TAGC_ERR_ARGUMENT, "--trace-steps is \"%s\", but this run does steps %llu to %llu",
                         t->options.trace_steps, (unsigned long long)t->step + 1,
                         (unsigned long long)n_steps);
    return t->rank->rank == 0 ? tagc_new_file_check(t->options.trace) : TAGC_OK;
}

/* Ranks may read copies at different places, but not different data: they would not even agree on when to
 * validate. */
static tagc_status agree_on_data(tagc_trainer *t) {
    typedef struct amounts {
        uint64_t n_train, n_val, hash, val_hash;
    } amounts;
    int world_size = tagc_comm_world_size(t->rank->comm);
    amounts mine = {tagc_tokens_n(t->train_tokens), t->val_tokens ? tagc_tokens_n(t->val_tokens) : 0,
                    tagc_tokens_fingerprint(t->train_tokens),
                    t->val_tokens ? tagc_tokens_fingerprint(t->val_tokens) : 0};
    amounts *all = calloc((size_t)world_size, sizeof *all);
    if (!all) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for the data of %d ranks", world_size);
    tagc_status status =
        tagc_comm_all_gather(t->rank->comm, &mine, sizeof mine, all, (size_t)world_size * sizeof *all);
    for (int rank = 1; status == TAGC_OK && rank < world_size; rank++)
        if (memcmp(&all[rank], &all[0], sizeof mine) != 0)
            status =
                tagc_fail(TAGC_ERR_MISMATCH,
                          "the data of rank 0 are %llu tokens and %llu for validation, of rank %d %llu and"
                          " %llu; all ranks need the same tokens, not only as many",
                          (unsigned long long)all[0].n_train, (unsigned long long)all[0].n_val, rank,
                          (unsigned long long)all[rank].n_train, (unsigned long long)all[rank].n_val);
    t->rank->is_failure_common = status == TAGC_ERR_MISMATCH;
    free(all);
    return status;
}

/* A resumed run goes on in the middle of its text: another one is what somebody asked for, or a mistake. */
static tagc_status check_data(tagc_trainer *t, int is_given) {
    uint64_t n_tokens = tagc_tokens_n(t->train_tokens), hash = tagc_tokens_fingerprint(t->train_tokens);
    uint64_t n_before = t->saved.data_n_tokens, hash_before = t->saved.data_hash;
    t->saved.data_n_tokens = n_tokens;
    t->saved.data_hash = hash;
    if (!t->options.resume || (n_before == n_tokens && hash_before == hash)) return TAGC_OK;
    if (!is_given)
        return tagc_fail(
            TAGC_ERR_MISMATCH,
            "%s is not the text that the run has trained on: %llu tokens with hash %016llx, it was %llu with"
            " %016llx; to go on with it, give --data",
            tagc_tokens_path(t->train_tokens), (unsigned long long)n_tokens, (unsigned long long)hash,
            (unsigned long long)n_before, (unsigned long long)hash_before);
    tagc_progress_say(&t->progress, "note: %s is another text than the run has trained on",
                      tagc_tokens_path(t->train_tokens));
    return TAGC_OK;
}

static tagc_status open_data(tagc_trainer *t, int is_given) {
    if (!t->options.data)
        return tagc_fail(TAGC_ERR_ARGUMENT, "--data DIR is needed; tagc data makes one from text files");
    TAGC_TRY(tagc_data_open(t->options.data, TAGC_DATA_TRAIN, &t->train_tokens));
    TAGC_TRY(check_data(t, is_given));
    const char *val = t->options.val_data;
    if (!val && tagc_path_is_dir(t->options.data) && tagc_data_has(t->options.data, TAGC_DATA_VAL))
        val = t->options.data;
    if (!val && t->options.eval_every > 0)
        tagc_progress_say(&t->progress,
                          "note: no validation loss: %s has no val.bin, and --val-data is not given",
                          t->options.data);
    if (val && t->options.eval_every > 0) TAGC_TRY(tagc_data_open(val, TAGC_DATA_VAL, &t->val_tokens));
    return agree_on_data(t);
}

/* The preset's shape; a vocabulary that was not asked for grows to the data's. */
static tagc_status choose_model(tagc_trainer *t) {
    tagc_gpt2_config config;
    tagc_tokens_info info;
    TAGC_TRY(tagc_train_model(&t->options, &config));
    tagc_tokens_get_info(t->train_tokens, &info);
    TAGC_TRY(tagc_engine_check_tokens(t->saved.tokenizer, t->train_tokens));
    if (*info.tokenizer) snprintf(t->saved.tokenizer, sizeof t->saved.tokenizer, "%s", info.tokenizer);
    if (t->val_tokens) TAGC_TRY(tagc_engine_check_tokens(t->saved.tokenizer, t->val_tokens));
    if (!t->options.vocab_size && !t->options.init_from && info.vocab_size > (uint32_t)config.vocab_size)
        config.vocab_size = (int)info.vocab_size;
    if (info.vocab_size > (uint32_t)config.vocab_size)
        return tagc_fail(
            TAGC_ERR_ARGUMENT, "%s has tokens up to %u, the model knows %d: raise --vocab-size to %u",
            tagc_tokens_path(t->train_tokens), info.vocab_size - 1, config.vocab_size, info.vocab_size);
    if ((t->options.resume || t->options.fork) && memcmp(&config, &t->saved.model, sizeof config) != 0)
        return tagc_fail(
            TAGC_ERR_MISMATCH,
            "the checkpoint's model has %d layers, width %d and vocabulary %d; these options and data ask"
            " for %d, %d and %d",
            t->saved.model.n_layer, t->saved.model.n_embd, t->saved.model.vocab_size, config.n_layer,
            config.n_embd, config.vocab_size);
    t->saved.model = t->training.model = config;
    return TAGC_OK;
}

static tagc_status open_loaders(tagc_trainer *t) {
    const tagc_gpt2_config *model = &t->saved.model;
    int n_batch = (int)t->options.batch_size;
    t->training.n_tokens = t->options.seq_len ? (int)t->options.seq_len : model->block_size;
    TAGC_TRY(tagc_engine_loader(t->rank, model, t->train_tokens, n_batch, t->training.n_tokens,
                                &t->options.seed, &t->loader));
    if (!t->val_tokens) return TAGC_OK;
    tagc_status status = tagc_evaluation_open(t->rank, model, t->val_tokens, n_batch, t->training.n_tokens,
                                              (uint64_t)t->options.eval_batches, &t->evaluation);
    if (status != TAGC_ERR_ARGUMENT || t->evaluation.loader) return status;
    char text[TAGC_ERROR_TEXT_BYTES];
    snprintf(text, sizeof text, "%s", tagc_last_error());
    return tagc_fail(status, "%s; --eval-every never trains without a validation loss", text);
}

static tagc_status check_folder(const tagc_trainer *t, const tagc_beginning *from) {
    return tagc_run_folder_check(t->options.out, t->options.resume ? from->checkpoint : NULL, t->step,
                                 from->is_unsaved);
}

static tagc_status open_out(tagc_trainer *t, const tagc_beginning *from) {
    if (!t->options.out) return TAGC_OK;
    if (t->rank->rank == 0) {
        TAGC_TRY(tagc_metrics_open(t->options.out, &t->metrics));
        TAGC_TRY(check_folder(t, from));
    }
    return tagc_run_folder_agree(t->rank->comm, t->options.out);
}

/* ---- opening ---- */

static tagc_status open_weights(tagc_trainer *t, const char *checkpoint) {
    tagc_fsdp_options options;
    tagc_train_fsdp(&t->options, &options);
    options.fresh = !t->options.resume && !t->options.fork && !t->options.init_from;
    TAGC_TRY(tagc_training_open(&t->training, &options));
    if (t->options.compress_names && tagc_fsdp_n_compressed(t->training.fsdp) == 0) {
        t->rank->is_failure_common = 1;
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--compress-names is \"%.100s\", which matches no tensor of the model;"
                         " tagc info %s --tensors lists them",
                         t->options.compress_names, t->options.model);
    }
    if (t->options.resume) {
        char *extra = NULL;
        tagc_status status =
            tagc_checkpoint_load(t->training.fsdp, t->rank->comm, checkpoint, &t->step, &extra);
        TAGC_TRY(tagc_run_folder_remedy(&t->options, status));
        free(extra);
        return tagc_loader_seek(t->loader, t->saved.position);
    }
    if (t->options.fork) {
        char *extra = NULL;
        TAGC_TRY(tagc_checkpoint_fork(t->training.fsdp, t->rank->comm, checkpoint, &t->step, &extra));
        free(extra);
        return TAGC_OK;
    }
    if (t->options.init_from)
        return tagc_engine_init_file(t->training.fsdp, &t->saved.model, t->options.init_from);
    return tagc_engine_init_random(t->training.fsdp, &t->saved.model, (uint64_t)t->options.seed);
}

static tagc_status begin_metrics(tagc_trainer *t) {
    if (!t->metrics) return TAGC_OK;
    char aside[TAGC_PATH_BYTES];
    TAGC_TRY(tagc_metrics_rewind(t->metrics, t->options.resume ? (int64_t)t->step : -1, aside));
    if (aside[0] && !t->options.resume)
        tagc_progress_say(&t->progress, "note: metrics.jsonl of the start before is now %s", aside);
    else if (aside[0])
        fprintf(stderr, "note: metrics.jsonl in %s had damaged lines, which are left out; as it was: %s\n",
                t->options.out, aside);
    json_t *run = json_object();
    json_object_set_new(run, "tagc", json_string(tagc_version()));
    json_object_set_new(run, "blas", tagc_origin_blas());
    json_object_set_new(run, "model", tagc_saved_model(&t->saved.model));
    json_object_set(run, "options", t->texts);
    json_object_set_new(run, "world_size", json_integer(t->rank->world_size));
    json_object_set_new(run, "n_params", json_integer((json_int_t)tagc_fsdp_n_params(t->training.fsdp)));
    json_object_set_new(run, "n_compressed",
                        json_integer((json_int_t)tagc_fsdp_n_compressed(t->training.fsdp)));
    json_object_set_new(run, "n_mild", json_integer((json_int_t)tagc_fsdp_n_mild(t->training.fsdp)));
    json_object_set_new(run, "from_step", json_integer((json_int_t)t->step));
    return tagc_metrics_run(t->metrics, run);
}

/* Groups of ranks must be on the hosts that they say. */
static tagc_status check_hosts(tagc_trainer *t) {
    char note[TAGC_HOSTS_NOTE_BYTES];
    if (tagc_ranks_is_local(t->options.transport)) return TAGC_OK;
    TAGC_TRY(tagc_hosts_check_groups(t->rank->comm, (int)t->options.ranks_per_host, note));
    if (*note) tagc_progress_say(&t->progress, "%s", note);
    return TAGC_OK;
}

/* Raw tokens do not say how many there are: that the model knows too few shows when one is read. */
tagc_status tagc_trainer_with_remedy(const tagc_trainer *t, tagc_status status) {
    char text[TAGC_ERROR_TEXT_BYTES];
    tagc_tokens_info info;
    tagc_tokens_get_info(t->train_tokens, &info);
    if (status != TAGC_ERR_CORRUPT || info.vocab_size > 0 || t->options.resume) return status;
    snprintf(text, sizeof text, "%s", tagc_last_error());
    return tagc_fail(status, "%s; give --vocab-size, 50257 for GPT-2's tokens", text);
}

static tagc_status next_batch(void *context, int *tokens, int *targets) {
    tagc_trainer *t = context;
    return tagc_trainer_with_remedy(t, tagc_loader_next(t->loader, tokens, targets));
}

/* What data and options say: all that can be wrong before ranks work together. Takes over what `from` holds. */
static tagc_status open_inputs(tagc_rank *rank, tagc_beginning *from, tagc_trainer *t) {
    *t = (tagc_trainer){.rank = rank,
                        .options = from->options,
                        .texts = from->texts,
                        .saved = from->saved,
                        .progress = from->progress,
                        .step = from->step};
    from->texts = NULL;
    from->saved.options = NULL;
    t->training =
        (tagc_training){.rank = rank, .options = &t->options, .next_batch = next_batch, .context = t};
    t->progress.n_steps = (uint64_t)t->options.steps;
    t->saved.world_size = rank->world_size;
    TAGC_TRY(open_trace(t));
    TAGC_TRY(open_data(t, from->is_data_given));
    TAGC_TRY(choose_model(t));
    return open_loaders(t);
}

tagc_status tagc_trainer_rehearse(tagc_rank *rank, tagc_beginning *from, tagc_gpt2_config *model) {
    tagc_trainer t;
    tagc_status status = open_inputs(rank, from, &t);
    if (status == TAGC_OK && t.options.out && tagc_path_is_dir(t.options.out)) {
        status = check_folder(&t, from);
        /* What the folder holds may be from a run that still goes on. */
        tagc_status others = status == TAGC_OK ? TAGC_OK : tagc_metrics_check_free(t.options.out);
        if (others != TAGC_OK) status = others;
    }
    *model = t.saved.model;
    tagc_trainer_close(&t);
    return status;
}

tagc_status tagc_trainer_open(tagc_rank *rank, tagc_beginning *from, tagc_trainer *t) {
    TAGC_TRY(open_inputs(rank, from, t));
    if (t->options.ranks_per_host > 1) TAGC_TRY(check_hosts(t));
    TAGC_TRY(open_out(t, from));
    TAGC_TRY(open_weights(t, from->checkpoint));
    TAGC_TRY(begin_metrics(t));
    return TAGC_OK;
}

void tagc_beginning_close(tagc_beginning *from) {
    json_decref(from->texts);
    tagc_saved_destroy(&from->saved);
    from->texts = NULL;
}

tagc_status tagc_trainer_save(tagc_trainer *t) {
    if (!t->options.out) return TAGC_OK;
    t->saved.position = tagc_loader_position(t->loader);
    char *extra = tagc_saved_write(&t->saved, t->texts);
    if (!extra) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for a checkpoint");
    tagc_status status =
        tagc_checkpoint_save(t->training.fsdp, t->rank->comm, t->options.out, t->step, extra);
    free(extra);
    TAGC_TRY(status);
    status = tagc_checkpoint_prune(t->rank->comm, t->options.out, (int)t->options.keep);
    /* The new checkpoint is saved. If an old one cannot be removed (a file still open over NFS), the run goes on. */
    if (status == TAGC_ERR_IO) tagc_progress_say(&t->progress, "note: %s", tagc_last_error());
    return status == TAGC_ERR_IO ? TAGC_OK : status;
}

void tagc_trainer_close(tagc_trainer *t) {
    tagc_metrics_close(t->metrics);
    tagc_training_close(&t->training);
    tagc_loader_destroy(t->loader);
    tagc_loader_destroy(t->evaluation.loader);
    tagc_tokens_close(t->train_tokens);
    tagc_tokens_close(t->val_tokens);
    tagc_saved_destroy(&t->saved);
    json_decref(t->texts);
}
