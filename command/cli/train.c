/* tagc train: how a run begins from its words, and its ranks. */
#include "cli/commands.h"
#include "core/clock.h"
#include "core/status.h"
#include "disk/paths.h"
#include "exchange/options.h"
#include "launch/hosts.h"
#include "launch/human.h"
#include "launch/interrupt.h"
#include "launch/over_ranks.h"
#include "options/presets.h"
#include "options/saved_options.h"
#include "options/train_options.h"
#include "plan/plan.h"
#include "train/metrics.h"
#include "train/trainer.h"
#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- how it begins: with the options of its words, and from a checkpoint or none ---- */

/* A new run from another one's checkpoint: takes only the model and the step from its text. */
static tagc_status open_fork(tagc_rank *rank, const tagc_parsed *parsed, tagc_beginning *from) {
    TAGC_TRY(tagc_saved_open(rank->comm, from->options.fork, from->checkpoint, &from->saved));
    TAGC_TRY(tagc_saved_merge_model(&from->saved, parsed, &from->options));
    from->saved.fork_step = from->step = from->saved.step;
    from->saved.position = 0;
    from->saved.best_val_loss = (double)INFINITY;
    if ((uint64_t)from->options.steps < from->step)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--steps is %lld, but %s was left at step %llu: a fork goes on counting from there",
                         (long long)from->options.steps, from->checkpoint, (unsigned long long)from->step);
    return tagc_train_check(&from->options);
}

/* A run that died before its first checkpoint has nothing to go on from: it begins again, as a new run does. */
static tagc_status begin_again(const tagc_rank *rank, const tagc_parsed *parsed, tagc_beginning *from) {
    tagc_parsed again = *parsed; /* ranks that are threads share `parsed` */
    again.values = &from->options;
    from->options.resume = NULL;
    if (from->options.levels) /* without --resume, they also choose --two-level */
        TAGC_TRY(tagc_levels_apply(from->options.levels, rank->world_size, &again));
    tagc_progress_say(&from->progress, "note: %s holds no checkpoint yet: the run begins again at step 0",
                      from->options.out);
    if (from->options.init_from && !tagc_options_given(parsed, "model"))
        TAGC_TRY(tagc_train_take_shape(parsed, &from->options));
    return tagc_train_check(&from->options);
}

/* Finds the checkpoint to go on from and takes over its options. */
static tagc_status open_resume(tagc_rank *rank, const tagc_parsed *parsed, tagc_beginning *from) {
    int is_latest = strcmp(from->options.resume, "latest") == 0;
    if (is_latest && !from->options.out)
        return tagc_fail(TAGC_ERR_ARGUMENT, "--resume needs --out DIR of the run, or a path: --resume PATH");
    if (is_latest) TAGC_TRY(tagc_run_folder_unsaved(rank->comm, from->options.out, &from->is_unsaved));
    if (from->is_unsaved) return begin_again(rank, parsed, from);
    tagc_status status = tagc_saved_open(rank->comm, is_latest ? from->options.out : from->options.resume,
                                         from->checkpoint, &from->saved);
    TAGC_TRY(tagc_run_folder_remedy(&from->options, status));
    from->step = from->saved.step;
    status = tagc_saved_check_known(&from->saved, parsed->command);
    if (status != TAGC_OK) return tagc_fail_in(status, "%s", from->checkpoint);
    TAGC_TRY(tagc_saved_merge(&from->saved, parsed, &from->options, &from->progress));
    if (from->saved.world_size != rank->world_size)
        tagc_progress_say(&from->progress, "note: saved by %d rank%s, going on with %d",
                          from->saved.world_size, from->saved.world_size > 1 ? "s" : "", rank->world_size);
    if (from->saved.world_size == 1 && rank->world_size > 1 && !tagc_train_compresses(&from->options))
        tagc_progress_say(
            &from->progress,
            "note: the run stays as one rank began it, and compresses nothing; --fork %s begins one"
            " that does",
            from->checkpoint);
    return tagc_train_check(&from->options);
}

/* A new run with several ranks compresses every leg, unless its options say how ranks exchange. One rank has no peers: it is
 * dense unless an option asks for compression, which would only cost loss. */
static void choose_exchange(const tagc_rank *rank, const tagc_parsed *parsed, tagc_beginning *from,
                            int *is_default_preset) {
    static const char *const names[] = {"exchange", "compress", "compress-names", "sparsity", "mild-sparsity",
                                        "values",   "mild",     "gentle",         "preset"};
    if (from->options.resume) return;
    if (rank->world_size > 1) {
        *is_default_preset = tagc_preset_apply_default(parsed, &from->options);
        return;
    }
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (tagc_options_given(parsed, names[i])) return;
    from->options.exchange = TAGC_TRAIN_DENSE;
    tagc_progress_say(&from->progress,
                      "one rank has no peers: gradients stay dense (--exchange direct compresses them)");
}

/* Sums of matrix products are added in another order by kernels of another level. */
static void say_what_computes(tagc_beginning *from, const char *now) {
    if (from->options.resume && from->saved.cpu[0] && strcmp(from->saved.cpu, now) != 0)
        tagc_progress_say(&from->progress,
                          "note: saved with %s, going on with %s: not bit for bit what it would have been",
                          from->saved.cpu, now);
    snprintf(from->saved.cpu, sizeof from->saved.cpu, "%s", now);
}

/* Collective. The caller closes *from after success and failure alike. is_default_preset: TAGC_PRESET_DEFAULT was taken, for want of
 * options that choose. */
static tagc_status begin(tagc_rank *rank, const tagc_parsed *parsed, int quiet, tagc_beginning *from,
                         int *is_default_preset) {
    *is_default_preset = 0;
    *from = (tagc_beginning){.options = *(const tagc_train_options *)parsed->values,
                             .is_data_given = tagc_options_given(parsed, "data")};
    from->saved.best_val_loss = (double)INFINITY;
    tagc_progress_init(&from->progress, quiet, 0);
    tagc_status status = tagc_agree_options(rank->comm, &tagc_train_command, &from->options);
    rank->is_failure_common = status == TAGC_ERR_MISMATCH;
    TAGC_TRY(status);
    char cpu[sizeof from->saved.cpu];
    TAGC_TRY(tagc_saved_processors(rank->comm, cpu, sizeof cpu));
    if (from->options.resume) TAGC_TRY(open_resume(rank, parsed, from));
    if (from->options.fork) TAGC_TRY(open_fork(rank, parsed, from));
    choose_exchange(rank, parsed, from, is_default_preset);
    from->options.ranks = rank->world_size;
    from->options.blas_threads =
        openblas_get_num_threads(); /* with the ranks, what checkpoints say of this start */
    tagc_train_command.resolve(&from->options);
    if (from->options.out) TAGC_TRY(tagc_saved_check_text(&tagc_train_command, &from->options));
    from->texts = tagc_saved_options(&tagc_train_command, &from->options);
    say_what_computes(from, cpu);
    return TAGC_OK;
}

/* ---- the headline: what is trained, how gradients travel, and which options have no say in it ---- */

static tagc_train_facts facts_of(const tagc_trainer *t) {
    return (tagc_train_facts){.options = &t->options, .has_mild = tagc_fsdp_n_mild(t->training.fsdp) > 0};
}

static void say_unused(tagc_trainer *t, const tagc_parsed *parsed) {
    tagc_train_facts facts = facts_of(t);
    for (int i = 0; i < parsed->command->n_options; i++) {
        const tagc_option *option = &parsed->command->options[i];
        const char *lacks = parsed->given[i] && option->lacks ? option->lacks(&facts) : NULL;
        if (lacks) tagc_progress_say(&t->progress, "note: --%s is for %s", option->name, lacks);
    }
    if (tagc_train_compresses(&t->options) && t->options.sparsity == 1)
        tagc_progress_say(&t->progress,
                          "note: --sparsity 1 never sends a compressed gradient: those weights change"
                          " by weight decay alone");
}

/* "direct int4, sparsity 95 %" and the like. */
static void print_exchange(const tagc_train_options *o, char *text, size_t n_bytes) {
    char ratio[24] = " auto";
    if (o->ratio > 0) snprintf(ratio, sizeof ratio, " %.4gx", o->ratio);
    if (o->exchange == TAGC_EXCHANGE_SKETCH || o->exchange == TAGC_EXCHANGE_PACKED)
        snprintf(text, n_bytes, "%s%s, index %s, sparsity %.4g %%", tagc_exchange_names[o->exchange],
                 o->exchange == TAGC_EXCHANGE_SKETCH ? ratio : "", tagc_train_word(o, "index"),
                 100 * o->sparsity);
    else
        snprintf(text, n_bytes, "direct %s, sparsity %.4g %%", tagc_format_names[o->values],
                 100 * o->sparsity);
}

static void say_gradients(tagc_trainer *t) {
    const tagc_train_options *o = &t->options;
    double n_params = (double)tagc_fsdp_n_params(t->training.fsdp);
    double n_compressed = (double)tagc_fsdp_n_compressed(t->training.fsdp),
           n_mild = (double)tagc_fsdp_n_mild(t->training.fsdp);
    const char *dense = o->wire == TAGC_FORMAT_BF16 ? "dense, bf16" : "dense";
    char compressed[128] = "", mild[128] = "", exchange[96];
    print_exchange(o, exchange, sizeof exchange);
    if (tagc_train_compresses(&t->options) && n_compressed == 0)
        tagc_progress_say(&t->progress, "note: --compress %s matches no tensor of this model",
                          tagc_train_word(o, "compress"));
    if (tagc_train_compresses(&t->options) && n_compressed > 0)
        snprintf(compressed, sizeof compressed, "%s, on %.1f %% of the parameters; ", exchange,
                 100 * n_compressed / n_params);
    if (n_mild > 0)
        snprintf(mild, sizeof mild, "mild %s, sparsity %.4g %%, on %.1f %%; ", tagc_format_names[o->mild],
                 100 * o->mild_sparsity, 100 * n_mild / n_params);
    if (*compressed || *mild)
        tagc_progress_say(&t->progress, "gradients: %s%sthe rest %s", compressed, mild, dense);
    else
        tagc_progress_say(&t->progress, "gradients: %s", dense);
}

/* The resolved values of defaults that depend on the exchange. */
static void say_chosen(tagc_trainer *t, const tagc_parsed *parsed, int is_default_preset) {
    static const char *const names[] = {
        "sparsity", "values", "compressed-beta1", "compressed-beta2", "mild", "mild-sparsity", "gentle"};
    int is_direct = t->options.exchange >= TAGC_EXCHANGE_DIRECT;
    char line[256] = "", text[64];
    if (!tagc_train_compresses(&t->options) || t->options.resume) return; /* resumed: the checkpoint's */
    if (is_default_preset) snprintf(line, sizeof line, " --preset %s", TAGC_PRESET_DEFAULT);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        int row = tagc_options_find(parsed->command, names[i]);
        size_t n = strlen(line);
        tagc_options_get(parsed->command, parsed->values, row, text, sizeof text);
        if (strcmp(text, "auto") != 0 || (i == 1 && !is_direct) || (i == 5 && t->options.mild == 0) ||
            (i == 6 && t->options.gentle != 1))
            continue;
        tagc_options_get(parsed->command, &t->options, row, text, sizeof text);
        if (strcmp(text, "auto") == 0) continue; /* the schedule chooses */
        snprintf(line + n, sizeof line - n, " --%s %s", names[i], text);
    }
    if (*line)
        tagc_progress_say(&t->progress, "not given:%s: %s", line,
                          is_direct ? "least loss for its bytes, docs/guide/choosing.md" : "as published");
}

static void say_beginning(tagc_trainer *t) {
    int n_flats[TAGC_N_LEVELS];
    tagc_fsdp_levels(t->training.fsdp, n_flats);
    if (t->options.resume || tagc_fsdp_n_below_last(n_flats) == 0) return;
    tagc_progress_say(&t->progress, "at first: every value in %s until gradients are mostly noise",
                      n_flats[TAGC_LEVEL_FRESH] > 0 ? "8 bits, then in 4 bits" : "4 bits");
}

static void say_parameters(tagc_trainer *t) {
    static const char *const gathers[TAGC_N_GATHER_KINDS] = {"fp32",
                                                             "bf16",
                                                             "bf16, without loss in about 11 bits",
                                                             "int8 blocks",
                                                             "bf16, then 8-bit deltas",
                                                             "bf16, then 4-bit deltas",
                                                             "bf16, then 2-bit deltas"};
    const tagc_train_options *o = &t->options;
    if (o->sharding == TAGC_SHARD_NONE || t->rank->world_size == 1) return;
    int by_hosts = o->two_level && o->sharding != TAGC_SHARD_HYBRID && o->ranks_per_host > 1;
    tagc_progress_say(&t->progress, "parameters: gathered as %s%s%s", gathers[o->gather],
                      o->sharding == TAGC_SHARD_GRAD ? ", once per step" : "",
                      by_hosts ? ", to each host once" : "");
}

static void say_buckets(tagc_trainer *t) {
    char size[16];
    if (t->options.bucket_elems <= 0) return;
    tagc_progress_say(&t->progress,
                      "buckets: neighbouring blocks share units of at least %s values, %d units in all",
                      tagc_human((double)t->options.bucket_elems, size), tagc_fsdp_n_units(t->training.fsdp));
}

static void print_sharding(const tagc_trainer *t, char *text, size_t n_bytes) {
    tagc_train_facts facts = facts_of(t);
    static const char *const shardings[] = {"fully sharded (ZeRO-3)",
                                            "gradients and optimizer sharded (ZeRO-2)", "replicated (DDP)"};
    int n = (int)t->options.ranks_per_host;
    if (t->rank->world_size == 1)
        snprintf(text, n_bytes, "not sharded");
    else if (t->options.sharding == TAGC_SHARD_HYBRID)
        snprintf(text, n_bytes, "sharded over the %d ranks of a host, %d replica%s (HSDP)", n,
                 t->rank->world_size / n, t->rank->world_size > n ? "s" : "");
    else
        snprintf(text, n_bytes, "%s%s", shardings[t->options.sharding],
                 t->options.two_level && n > 1 && tagc_train_is_coded(&facts) ? ", hosts add first" : "");
}

static void greet(tagc_trainer *t, const tagc_parsed *parsed, int is_default_preset) {
    char sharding[96], params[16], a[16], b[16], c[16], d[16];
    tagc_fsdp_memory memory;
    tagc_fsdp_memory_used(t->training.fsdp, &memory);
    print_sharding(t, sharding, sizeof sharding);
    say_unused(t, parsed);
    int is_own_shape = t->options.init_from && !tagc_options_given(parsed, "model");
    tagc_progress_say(&t->progress, "%s, %s parameters, %d rank%s, %s",
                      is_own_shape ? t->options.init_from : t->options.model,
                      tagc_human((double)tagc_fsdp_n_params(t->training.fsdp), params), t->rank->world_size,
                      t->rank->world_size > 1 ? "s" : "", sharding);
    say_gradients(t);
    say_chosen(t, parsed, is_default_preset);
    say_beginning(t);
    say_parameters(t);
    say_buckets(t);
    tagc_progress_say(
        &t->progress, "memory per rank: parameters %s, gradients %s, optimizer %s, residuals %s",
        tagc_human_bytes((double)memory.parameters, a), tagc_human_bytes((double)memory.gradients, b),
        tagc_human_bytes((double)memory.optimizer, c), tagc_human_bytes((double)memory.residuals, d));
    if (t->options.fork)
        tagc_progress_say(&t->progress, "begins at step %llu of %s", (unsigned long long)t->step,
                          t->options.fork);
    else if (t->step > 0)
        tagc_progress_say(&t->progress, "goes on after step %llu of %lld", (unsigned long long)t->step,
                          (long long)t->options.steps);
    if (!t->options.out && t->step < (uint64_t)t->options.steps)
        tagc_progress_say(&t->progress,
                          "note: nothing of this run is kept: --out DIR would get metrics and checkpoints");
}

/* ---- the run ---- */

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
    return tagc_plan_check_memory("this run", &setup, n_here);
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
    tagc_status status = begin(rank, parsed, options->quiet || rank->rank != 0, &from, &is_default_preset);
    if (status == TAGC_OK) status = check_host(rank, job, &from);
    if (status == TAGC_OK) status = tagc_trainer_open(rank, &from, &trainer);
    if (status == TAGC_OK) greet(&trainer, parsed, is_default_preset);
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
        if (status == TAGC_OK) status = begin(&rank, job->parsed, 1, &from, &is_default_preset);
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
