/* The progress line. Its figures are means since it was last shown, so that a slow terminal hides no step. */
#include "train/progress.h"

#include "core/clock.h"
#include "launch/human.h"
#include "launch/ranks.h"
#include <stdarg.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define TERMINAL_EVERY_S 0.25
#define PLAIN_EVERY_S 10.0

void tagc_progress_init(tagc_progress *progress, int quiet, uint64_t n_steps) {
    *progress = (tagc_progress){.quiet = quiet, .is_terminal = tagc_ranks_on_terminal(), .n_steps = n_steps};
    progress->shown_s = -1e9;
}

/* Columns of the terminal; a line that is wider could not be rewritten. */
static int n_columns(const tagc_progress *progress) {
    struct winsize size;
    if (!progress->is_terminal || ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col < 20)
        return 1000;
    return size.ws_col - 1;
}

static void show(tagc_progress *progress, const tagc_step_report *last) {
    char line[256], rate[16], left[24] = "";
    double n = (double)progress->n_reports, total = progress->wall_s;
    double share = total > 0 ? 100 / total : 0;
    int left_s = (int)(total / n * (double)(progress->n_steps - last->step));
    if (last->step < progress->n_steps)
        snprintf(left, sizeof left, "  %d:%02d left", left_s / 60, left_s % 60);
    snprintf(line, sizeof line,
             "step %*llu/%llu  loss %.4f  lr %.2e  grad norm %.3g%s  %s tok/s  compute %2.0f %%  exposed "
             "gather %2.0f %%, reduce %2.0f %%"
             "  optimizer %2.0f %%  %.2f bits/param%s",
             progress->n_steps >= 10000 ? 6 : 4, (unsigned long long)last->step,
             (unsigned long long)progress->n_steps, last->loss, last->lr, last->stats.grad_norm, left,
             tagc_human(total > 0 ? (double)progress->n_tokens / total : 0, rate),
             progress->compute_s * share, progress->gather_s * share, progress->reduce_s * share,
             progress->optimizer_s * share, progress->bits / n,
             last->stats.skipped ? "  SKIPPED: gradient not finite" : "");
    if (progress->is_terminal)
        printf("\r\033[K%.*s", n_columns(progress), line);
    else
        printf("%s\n", line);
    fflush(stdout);
    progress->n_reports = progress->n_tokens = 0;
    progress->wall_s = progress->compute_s = progress->gather_s = 0;
    progress->reduce_s = progress->optimizer_s = progress->bits = 0;
}

/* Per parameter, before the factor (W-1)/W; 0 for one rank. */
static double bits_of(const tagc_step_report *report) {
    double bits = 0, n_ranks = report->world_size;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) bits += report->stats.bits_per_param[leg];
    return n_ranks > 1 ? bits * n_ranks / (n_ranks - 1) : 0;
}

void tagc_progress_step(tagc_progress *progress, const tagc_step_report *report) {
    if (progress->quiet) return;
    progress->n_reports++;
    progress->n_tokens += report->n_tokens;
    progress->wall_s += report->wall_s;
    progress->compute_s += report->stats.compute_s;
    progress->gather_s += report->stats.wait_gather_s;
    progress->reduce_s += report->stats.wait_reduce_s;
    progress->optimizer_s += report->stats.optimizer_s;
    progress->bits += bits_of(report);
    double now = tagc_clock_s();
    if (now - progress->shown_s < (progress->is_terminal ? TERMINAL_EVERY_S : PLAIN_EVERY_S) &&
        report->step < progress->n_steps && !report->stats.skipped)
        return;
    progress->shown_s = now;
    show(progress, report);
}

void tagc_progress_say(tagc_progress *progress, const char *format, ...) {
    if (progress->quiet) return;
    va_list arguments;
    va_start(arguments, format);
    if (progress->is_terminal) printf("\r\033[K");
    vprintf(format, arguments);
    putchar('\n');
    fflush(stdout);
    va_end(arguments);
}
