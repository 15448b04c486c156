/* tagc train: options and ranks. */
#include "cli/begin.h"
#include "cli/commands.h"
#include "cli/greet.h"
#include "core/clock.h"
#include "core/status.h"
#include "disk/paths.h"
#include "launch/hosts.h"
#include "launch/human.h"
#include "launch/interrupt.h"
#include "launch/over_ranks.h"
#include "measure/memory.h"
#include "options/presets.h"
#include "options/train_options.h"
#include "train/metrics.h"
#include <stdlib.h>
#include <string.h>

typedef struct train_job {
    const tagc_parsed *parsed;
    tagc_gpt2_config model; /* as the rehearsal found it */
} train_job;

static tagc_status check_memory(const tagc_train_options *options, const tagc_gpt2_config *model,
                                int world_size, int n_here) {
    tagc_setup setup = {.model = *model,
                        .world_size = world_size,
                        .n_hosts = 1,
                        .n_batch = (int)options->batch_size,
                        .n_tokens = options->seq_len ? (int)options->seq_len : model->block_size,
                        .union_density = -1};
    tagc_train_fsdp(options, &setup.engine);
    setup.placement = tagc_placement_of_sharding(setup.engine.sharding);
    return tagc_memory_check_setup("this run", &setup, n_here);
}

/* Ranks as threads have been checked before they started. */
static tagc_status check_host(tagc_rank *rank, const train_job *job, const tagc_beginning *from) {
    int n_here;
    if (tagc_ranks_is_local(from->options.transport)) return TAGC_OK;
    TAGC_TRY(tagc_ranks_here(rank, &n_here));
    return check_memory(&from->options, &job->model, rank->world_size, n_here);
}

static tagc_status train_rank(tagc_rank *rank, void *context) {
    const train_job *job = context;
    const tagc_parsed *parsed = job->parsed;
    const tagc_train_options *options = parsed->values;
    tagc_trainer trainer = {0};
    tagc_beginning from;
    int is_default_preset;
    double start_s = tagc_clock_s();
    tagc_status status =
        tagc_begin(rank, parsed, options->quiet || rank->rank != 0, &from, &is_default_preset);
    if (status == TAGC_OK) status = check_host(rank, job, &from);
    if (status == TAGC_OK) status = tagc_trainer_open(rank, &from, &trainer);
    if (status == TAGC_OK) tagc_greet(&trainer, parsed, is_default_preset);
    if (status == TAGC_OK) status = tagc_trainer_run(&trainer);
    if (status == TAGC_OK) {
        double seconds = tagc_clock_s() - start_s;
        char tokens[16], skipped[64] = "";
        if (trainer.n_skipped > 0)
            snprintf(skipped, sizeof skipped, " (%llu skipped: gradient not finite)",
                     (unsigned long long)trainer.n_skipped);
        tagc_progress_say(&trainer.progress, "done: %llu steps%s, %s tokens, %d:%02d min%s%s",
                          (unsigned long long)trainer.step, skipped,
                          tagc_human((double)trainer.saved.n_tokens, tokens), (int)seconds / 60,
                          (int)seconds % 60, trainer.options.out ? "; metrics and checkpoint in " : "",
                          trainer.options.out ? trainer.options.out : "");
    }
    tagc_rank_finish(rank, status);
    tagc_trainer_close(&trainer);
    tagc_beginning_close(&from);
    return status;
}

/* Before ranks start, so that an error that every rank finds ends the process, or each process by itself. n_local: ranks as
 * threads; 0: over MPI. */
static tagc_status rehearse(train_job *job, int n_local) {
    tagc_alone alone;
    tagc_status status = tagc_alone_open(&alone);
    if (status == TAGC_OK) {
        tagc_rank rank = {.rank = n_local ? 0 : tagc_ranks_launcher_rank(),
                          .world_size = n_local ? n_local : tagc_ranks_launcher_size(),
                          .comm = alone.comm};
        tagc_beginning from = {0};
        int is_default_preset;
        const tagc_train_options *options = job->parsed->values;
        /* A run that still goes on removes checkpoints: it is named before they are read. */
        status = options->resume && options->out ? tagc_metrics_check_free(options->out) : TAGC_OK;
        if (status == TAGC_OK) status = tagc_begin(&rank, job->parsed, 1, &from, &is_default_preset);
        if (status == TAGC_OK) status = tagc_trainer_rehearse(&rank, &from, &job->model);
        if (status == TAGC_OK && n_local) status = check_memory(&from.options, &job->model, n_local, n_local);
        tagc_beginning_close(&from);
    }
    tagc_alone_close(&alone);
    return status;
}

/* How many ranks wrote the checkpoint to go on from; 0 without one that can be read, which the run itself
 * will say. */
static int saved_ranks(const tagc_train_options *options) {
    const char *from = options->resume;
    if (from && strcmp(from, "latest") == 0) from = options->out;
    char path[TAGC_PATH_BYTES];
    tagc_alone alone;
    tagc_saved saved;
    int n_ranks = 0;
    if (from && tagc_alone_open(&alone) == TAGC_OK &&
        tagc_saved_open(alone.comm, from, path, &saved) == TAGC_OK) {
        n_ranks = saved.world_size;
        tagc_saved_destroy(&saved);
    }
    if (from) tagc_alone_close(&alone);
    return n_ranks <= TAGC_TRAIN_MAX_RANKS ? n_ranks : 0;
}

/* Options that other options set: those of the preset and of the levels, and the model's shape if the weights have one. */
static tagc_status complete(tagc_parsed *parsed, tagc_train_options *options) {
    int is_local = tagc_ranks_is_local(options->transport),
        n_given = tagc_options_given(parsed, "ranks") ? (int)options->ranks : 0;
    if (options->preset) TAGC_TRY(tagc_preset_apply(options->preset, parsed));
    if (options->levels)
        TAGC_TRY(tagc_levels_apply(options->levels, is_local ? n_given : tagc_ranks_launcher_size(), parsed));
    if (!options->init_from || options->resume || tagc_options_given(parsed, "model")) return TAGC_OK;
    return tagc_train_take_shape(parsed, options);
}

static int run(tagc_parsed *parsed) {
    tagc_train_options *options = parsed->values;
    int is_local = tagc_ranks_is_local(options->transport);
    tagc_interrupt_watch(); /* before anything that takes time */
    tagc_status completed = complete(parsed, options);
    if (completed != TAGC_OK && completed != TAGC_ERR_ARGUMENT) return tagc_command_end(completed);
    if (completed != TAGC_OK || tagc_train_check(options) != TAGC_OK)
        return tagc_command_refuse(&tagc_train_command);
    tagc_launch launch = {.n_ranks = tagc_options_given(parsed, "ranks") ? (int)options->ranks : 0,
                          .n_local_ranks = is_local ? saved_ranks(options) : 0,
                          .transport = options->transport,
                          .timeout_s = options->timeout,
                          .blas_threads = (int)options->blas_threads,
                          .trace = options->trace != NULL,
                          .has_levels = options->ranks_per_host > 1};
    int n_ranks = launch.n_ranks ? launch.n_ranks : launch.n_local_ranks ? launch.n_local_ranks : 1;
    train_job job = {.parsed = parsed};
    tagc_status status = rehearse(&job, is_local ? n_ranks : 0);
    return status == TAGC_OK ? tagc_ranks_run(&launch, train_rank, &job) : tagc_command_end(status);
}

const tagc_entry tagc_entry_train = {&tagc_train_command, sizeof(tagc_train_options), run, NULL};
