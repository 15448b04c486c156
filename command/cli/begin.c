/* See begin.h. */
#include "cli/begin.h"

#include "core/status.h"
#include "options/presets.h"
#include "options/saved_options.h"
#include "options/train_options.h"
#include <cblas.h>
#include <math.h>
#include <string.h>

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

tagc_status tagc_begin(tagc_rank *rank, const tagc_parsed *parsed, int quiet, tagc_beginning *from,
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
