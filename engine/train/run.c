/* The loop. Everything but the step itself happens between steps, where all ranks are at the same place. */
#include "core/clock.h"
#include "core/status.h"
#include "fsdp/checkpoint.h"
#include "launch/human.h"
#include "launch/interrupt.h"
#include "launch/over_ranks.h"
#include "train/trainer.h"
#include <math.h>
#include <stdlib.h>

/* Mean loss, and whether any rank was asked to stop. */
static tagc_status agree_on_step(tagc_trainer *t, double *loss, int *interrupted) {
    double means[] = {*loss, tagc_interrupt_asked()};
    TAGC_TRY(tagc_mean_over_ranks(t->rank->comm, means, 2));
    *loss = means[0];
    *interrupted = means[1] > 0;
    return TAGC_OK;
}

/* What has begun anew, and when nothing is below its last level any more. */
static void say_levels(tagc_trainer *t, const tagc_step_report *report) {
    tagc_schedule *schedule = tagc_fsdp_schedule(t->training.fsdp);
    tagc_alarm alarms[TAGC_N_ALARM_KINDS];
    size_t n_alarms = 0;
    char bytes[16], text[512];
    tagc_fsdp_memory memory;
    tagc_fsdp_memory_used(t->training.fsdp, &memory);
    if (schedule) tagc_schedule_take_alarms(schedule, alarms, &n_alarms);
    for (size_t i = 0; i < n_alarms; i++) {
        tagc_schedule_alarm_text(schedule, &alarms[i], text, sizeof text);
        tagc_progress_say(&t->progress, "step %llu  %s", (unsigned long long)t->step, text);
    }
    int n_below = tagc_fsdp_n_below_last(report->stats.n_at_level);
    if (t->n_below > 0 && n_below == 0)
        tagc_progress_say(&t->progress,
                          "step %llu  gradients are mostly noise: they go on by --sparsity; memory of the"
                          " optimizer: %s",
                          (unsigned long long)t->step, tagc_human_bytes((double)memory.optimizer, bytes));
    t->n_below = n_below;
}

static tagc_status one_step(tagc_trainer *t, tagc_step_report *report, int *interrupted) {
    double start_s = tagc_clock_s();
    uint64_t from = t->options.schedule_from == 1 ? t->saved.fork_step : 0;
    tagc_learning_rate rate = tagc_train_learning_rate(&t->options, from);
    report->lr = tagc_learning_rate_at(&rate, t->step + 1 - from);
    TAGC_TRY(tagc_training_step(&t->training, report->lr, &report->loss, &report->stats, &report->busy));
    report->step = ++t->step;
    report->world_size = t->rank->world_size;
    report->n_tokens = (uint64_t)t->rank->world_size * (uint64_t)t->options.batch_size *
                       (uint64_t)t->options.accumulate * (uint64_t)t->training.n_tokens;
    t->saved.n_tokens += report->n_tokens;
    TAGC_TRY(agree_on_step(t, &report->loss, interrupted));
    say_levels(t, report);
    report->wall_s = tagc_clock_s() - start_s;
    return TAGC_OK;
}

static tagc_status validate(tagc_trainer *t) {
    double loss;
    if (!t->evaluation.loader) return TAGC_OK;
    TAGC_TRY(tagc_trainer_with_remedy(
        t, tagc_evaluate(t->rank, t->training.fsdp, &t->training.workspace, &t->evaluation, &loss)));
    int is_best = loss < t->saved.best_val_loss;
    if (is_best) t->saved.best_val_loss = loss;
    tagc_progress_say(&t->progress, "step %*llu  validation loss %.4f%s", t->options.steps >= 10000 ? 6 : 4,
                      (unsigned long long)t->step, loss, is_best ? "  (best)" : "");
    if (!isfinite(loss))
        tagc_progress_say(
            &t->progress,
            "note: this validation loss is not finite: a weight is no number, or far too large");
    return t->metrics ? tagc_metrics_eval(t->metrics, t->step, loss, t->evaluation.n_tokens) : TAGC_OK;
}

static tagc_status write_trace(tagc_trainer *t) {
    int n_units = tagc_fsdp_n_units(t->training.fsdp);
    const char **names = calloc((size_t)n_units, sizeof *names);
    if (!names) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %d unit names", n_units);
    for (int unit = 0; unit < n_units; unit++) names[unit] = tagc_fsdp_unit_name(t->training.fsdp, unit);
    tagc_status status = tagc_trace_write(t->rank->trace, t->rank->comm, names, n_units, t->options.trace);
    free(names);
    if (status == TAGC_OK)
        tagc_progress_say(
            &t->progress, "timeline of steps %llu to %llu in %s; open it at https://ui.perfetto.dev",
            (unsigned long long)t->trace_first,
            (unsigned long long)(t->step < t->trace_last ? t->step : t->trace_last), t->options.trace);
    return status;
}

static tagc_status stop(tagc_trainer *t, int is_saved) {
    if (!is_saved) TAGC_TRY(tagc_trainer_save(t));
    if (t->options.out)
        return tagc_fail(TAGC_ERR_INTERRUPTED,
                         "interrupted after step %llu of %lld, saved in %s; --resume goes on",
                         (unsigned long long)t->step, (long long)t->options.steps, t->options.out);
    return tagc_fail(TAGC_ERR_INTERRUPTED,
                     "interrupted after step %llu of %lld; nothing saved, for want of --out",
                     (unsigned long long)t->step, (long long)t->options.steps);
}

enum { MAX_SKIPPED_IN_ROW = 20 };

/* A run that moves no weight any more ends, and does not end well. */
static tagc_status count_step(tagc_trainer *t, int is_skipped) {
    t->n_done++;
    t->n_skipped += is_skipped != 0;
    t->n_skipped_in_row = is_skipped ? t->n_skipped_in_row + 1 : 0;
    int is_last = t->step == (uint64_t)t->options.steps;
    if (t->n_skipped_in_row < MAX_SKIPPED_IN_ROW && !(is_last && t->n_skipped == t->n_done)) return TAGC_OK;
    return tagc_fail(
        TAGC_ERR_STATE,
        "the gradients of the last %llu steps, %llu to %llu, were not finite: these steps changed no "
        "weight. Try a smaller --lr (%g), a longer --warmup (%lld), or an earlier checkpoint",
        (unsigned long long)t->n_skipped_in_row, (unsigned long long)(t->step - t->n_skipped_in_row + 1),
        (unsigned long long)t->step, t->options.lr, (long long)t->options.warmup);
}

static int is_due(int64_t every, uint64_t step) {
    return every > 0 && step % (uint64_t)every == 0;
}

/* Where the last step is behind a run as it begins, --out would get metrics and no checkpoint to go with them. */
static tagc_status save_if_missing(tagc_trainer *t) {
    double is_missing = 0;
    if (t->options.out && t->rank->rank == 0) {
        uint64_t newest;
        int found;
        TAGC_TRY(tagc_checkpoint_newest(t->options.out, UINT64_MAX, &newest, &found));
        is_missing = !found;
    }
    TAGC_TRY(tagc_mean_over_ranks(t->rank->comm, &is_missing, 1));
    return is_missing > 0 ? tagc_trainer_save(t) : TAGC_OK;
}

tagc_status tagc_trainer_run(tagc_trainer *t) {
    uint64_t n_steps = (uint64_t)t->options.steps;
    int interrupted = 0, is_traced = 0;
    if ((t->step == 0 && !t->options.resume) || t->options.fork) TAGC_TRY(validate(t));
    if (t->step >= n_steps && n_steps > 0)
        tagc_progress_say(&t->progress,
                          "nothing left to do: step %llu of %llu is done; raise --steps to go on",
                          (unsigned long long)t->step, (unsigned long long)n_steps);
    if (t->step >= n_steps) return save_if_missing(t);
    while (t->step < n_steps) {
        tagc_step_report report = {0};
        int trace_on = t->rank->trace && t->step + 1 >= t->trace_first && t->step + 1 <= t->trace_last;
        if (trace_on) tagc_trace_pause(t->rank->trace, 0);
        TAGC_TRY(one_step(t, &report, &interrupted));
        if (trace_on) tagc_trace_pause(t->rank->trace, 1);
        is_traced |= trace_on;
        if (t->metrics) TAGC_TRY(tagc_metrics_step(t->metrics, &report));
        tagc_progress_step(&t->progress, &report);
        TAGC_TRY(count_step(t, report.stats.skipped));
        int is_last = t->step == n_steps, is_saved = 0;
        if (is_due(t->options.eval_every, t->step) || is_last) TAGC_TRY(validate(t));
        if (is_due(t->options.save_every, t->step) || is_last) {
            TAGC_TRY(tagc_trainer_save(t));
            is_saved = 1;
        }
        if (is_traced && (t->step == t->trace_last || is_last || interrupted)) {
            TAGC_TRY(write_trace(t));
            is_traced = 0;
        }
        if (interrupted && !is_last) return stop(t, is_saved);
    }
    return TAGC_OK;
}
