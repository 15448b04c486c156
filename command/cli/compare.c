/* tagc compare: several runs in one table. */
#include "cli/commands.h"
#include "core/status.h"
#include "disk/new_file.h"
#include "disk/paths.h"
#include "files/result_file.h"
#include "files/runlog.h"
#include "launch/ranks.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RUNS = 8, NAME_COLUMN = 34, RUN_COLUMN = 18 };

typedef struct compare_options {
    const char *csv, *svg;
} compare_options;

static const tagc_option rows[] = {
    {"What", "csv", TAGC_OPTION_TEXT, 0, offsetof(compare_options, csv), 0, 0, NULL, NULL, "FILE",
     "file for the runs as CSV: a header, then one row per run and step with losses, learning rate, gradient "
     "norm, seconds and bits sent per parameter; - prints nothing else"},
    {NULL, "svg", TAGC_OPTION_TEXT, 0, offsetof(compare_options, svg), 0, 0, NULL, NULL, "FILE",
     "moved: tagc-report --svg loss=FILE RUN_DIR... draws the picture"},
};

static const tagc_command command = {
    .name = "compare",
    .summary = "put runs beside the first: losses, where time went, bits per parameter",
    .usage = "RUN_DIR...",
    .examples = "  tagc compare runs/fsdp runs/tagc\n"
                "  tagc compare runs/tagc --csv tagc.csv   # for a spreadsheet\n",
    .options = rows,
    .n_options = sizeof rows / sizeof rows[0],
    .positionals = "no run is named, allowed: 1 to 8",
};

/* A cell of the table: right-aligned, "-" for what is not known. `format` takes one double. */
static void print_cell(const char *format, double value) {
    char text[64];
    if (isfinite(value))
        snprintf(text, sizeof text, format, value);
    else
        snprintf(text, sizeof text, "-");
    printf("  %*s", RUN_COLUMN - 2, text);
}

static void print_name(const char *name) {
    printf("%-*s", NAME_COLUMN, name);
}

static void print_row(const char *name, const char *format, const double values[MAX_RUNS], int n_runs) {
    print_name(name);
    for (int i = 0; i < n_runs; i++) print_cell(format, values[i]);
    printf("\n");
}

/* --eval-batches counts batches of each rank, so runs of other shapes are validated on more text, or on less. */
static void print_tokens(const tagc_runlog *runs, int n_runs) {
    double n_tokens[MAX_RUNS];
    int differ = 0;
    for (int i = 0; i < n_runs; i++) {
        n_tokens[i] = runs[i].n_val_tokens;
        differ |= isfinite(n_tokens[0]) && isfinite(n_tokens[i]) && n_tokens[i] != n_tokens[0];
    }
    if (!differ) return;
    print_row("  over so many tokens", "%.0f", n_tokens, n_runs);
    printf("note: the last validation losses are of different text, which alone makes them differ; "
           "--eval-batches"
           " are batches of each\n      rank, so --batch-size and the number of ranks count, too\n");
}

static void print_losses(const tagc_runlog *runs, int n_runs) {
    double last[MAX_RUNS], best[MAX_RUNS], against[MAX_RUNS];
    char name[96];
    for (int i = 0; i < n_runs; i++) {
        last[i] = best[i] = (double)NAN;
        for (int k = 0; k < runs[i].n_evals; k++) {
            last[i] = runs[i].val_losses[k];
            best[i] = fmin(best[i], last[i]);
        }
        against[i] = i > 0 ? 100 * (last[i] / last[0] - 1) : (double)NAN;
    }
    snprintf(name, sizeof name, "  against %.20s", runs[0].label);
    print_row("validation loss, last", "%.4f", last, n_runs);
    print_row(name, "%+.2f %%", against, n_runs);
    print_row("validation loss, best", "%.4f", best, n_runs);
    print_tokens(runs, n_runs);
    printf("%s\n",
           n_runs > 1 ? "(one run each: how far apart the losses of two seeds are is not known)\n" : "");
}

/* How many times as fast as the first run; "in the spread" if the middle 80 % of the steps of both overlap. */
static void print_speeds(const tagc_runlog *runs, int n_runs) {
    size_t wall = offsetof(tagc_runlog_step, wall_s);
    tagc_result_spread first = tagc_runlog_middle(&runs[0], wall);
    char name[96], text[64];
    int n_in_spread = 0;
    print_name("  middle 80 % of the steps");
    for (int i = 0; i < n_runs; i++) {
        tagc_result_spread spread = tagc_runlog_middle(&runs[i], wall);
        snprintf(text, sizeof text, "-");
        if (spread.n > 1) snprintf(text, sizeof text, "%.4g to %.4g", 1000 * spread.min, 1000 * spread.max);
        printf("  %*s", RUN_COLUMN - 2, text);
    }
    printf("\n");
    if (n_runs < 2) return;
    snprintf(name, sizeof name, "  times as fast as %.15s", runs[0].label);
    print_name(name);
    for (int i = 0; i < n_runs; i++) {
        tagc_result_spread spread = tagc_runlog_middle(&runs[i], wall);
        double ratio = i > 0 ? first.median / spread.median : (double)NAN;
        int in_spread = i > 0 && spread.min <= first.max && spread.max >= first.min;
        snprintf(text, sizeof text, "-");
        if (isfinite(ratio)) snprintf(text, sizeof text, in_spread ? "%.2f?" : "%.2f", ratio);
        n_in_spread += isfinite(ratio) && in_spread;
        printf("  %*s", RUN_COLUMN - 2, text);
    }
    printf("\n");
    if (n_in_spread > 0)
        printf("  ?: within the spread, since the middle 80 %% of the steps overlap with those of %s: chance "
               "or other load\n"
               "     may be all of it\n",
               runs[0].label);
}

static void print_times(const tagc_runlog *runs, int n_runs) {
#define AT(field) offsetof(tagc_runlog_step, field)
    static const struct {
        const char *name, *format;
        size_t offset;
        double factor;
    } rows_of_times[] = {
        {"time of a step, median (ms)", "%.1f", AT(wall_s), 1000},
        {"  compute", "%.1f", AT(compute_s), 1000},
        {"  exposed: waiting for parameters", "%.1f", AT(wait_gather_s), 1000},
        {"  exposed: waiting for gradients", "%.1f", AT(wait_reduce_s), 1000},
        {"  optimizer", "%.1f", AT(optimizer_s), 1000},
        {"  between steps", "%.1f", AT(between_s), 1000},
        {"communication under way (ms)", "%.1f", AT(comm_s), 1000},
        {"exchange hidden behind compute", "%.0f %%", AT(overlap), 100},
    };
    double values[MAX_RUNS];
    for (size_t row = 0; row < sizeof rows_of_times / sizeof rows_of_times[0]; row++) {
        for (int i = 0; i < n_runs; i++) {
            values[i] = rows_of_times[row].factor * tagc_runlog_median(&runs[i], rows_of_times[row].offset);
            if (rows_of_times[row].offset == AT(overlap) && runs[i].world_size == 1) values[i] = (double)NAN;
        }
        print_row(rows_of_times[row].name, rows_of_times[row].format, values, n_runs);
        if (row == 0) print_speeds(runs, n_runs);
    }
#undef AT
    printf(
        "(times are medians; parts need not add up%s)\n\n",
        n_runs > 1
            ? "; runs were made one after the other: tagc bench, whose arms take turns, compares times better"
            : "");
}

static void print_bits(const tagc_runlog *runs, int n_runs) {
    double total[MAX_RUNS] = {0}, compressed[MAX_RUNS], mild[MAX_RUNS], most_mild = 0;
    printf("bits per parameter and step, per rank, before the factor (W-1)/W\n");
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        double bits[MAX_RUNS], largest = 0;
        char name[32];
        for (int i = 0; i < n_runs; i++) {
            bits[i] =
                tagc_runlog_mean(&runs[i], offsetof(tagc_runlog_step, bits) + (size_t)leg * sizeof(double));
            total[i] += bits[i];
            largest = fmax(largest, bits[i]);
        }
        snprintf(name, sizeof name, "  %s", tagc_leg_name(leg));
        if (largest >= 0.0005) print_row(name, "%.3f", bits, n_runs);
    }
    print_row("  total", "%.3f", total, n_runs);
    for (int i = 0; i < n_runs; i++) {
        compressed[i] = 100 * runs[i].n_compressed / runs[i].n_params;
        mild[i] = 100 * json_number_value(json_object_get(runs[i].about, "n_mild")) / runs[i].n_params;
        most_mild = fmax(most_mild, mild[i]);
    }
    print_row("parameters compressed", "%.1f %%", compressed, n_runs);
    if (most_mild > 0) print_row("  mildly", "%.1f %%", mild, n_runs);
}

static int same_steps(const tagc_runlog *runs, int n_runs) {
    int is_same = 1;
    for (int i = 1; i < n_runs; i++)
        is_same &= runs[i].steps[runs[i].n_steps - 1].step == runs[0].steps[runs[0].n_steps - 1].step;
    return is_same;
}

static void print_table(const tagc_runlog *runs, int n_runs) {
    print_name("");
    for (int i = 0; i < n_runs; i++) printf("  %*.*s", RUN_COLUMN - 2, RUN_COLUMN - 2, runs[i].label);
    printf("\n");
    print_name("steps, ranks");
    for (int i = 0; i < n_runs; i++) {
        char text[40];
        snprintf(text, sizeof text, "%.0f x %d", runs[i].steps[runs[i].n_steps - 1].step, runs[i].world_size);
        printf("  %*s", RUN_COLUMN - 2, text);
    }
    printf("\n%s\n", same_steps(runs, n_runs) ? "" : "note: the runs have different numbers of steps\n");
    print_losses(runs, n_runs);
    print_times(runs, n_runs);
    print_bits(runs, n_runs);
}

/* A folder, but no run's, as a shell pattern may name. */
static int is_other_folder(const char *dir) {
    char path[TAGC_PATH_BYTES];
    return tagc_path_is_dir(dir) && tagc_path_join(dir, "metrics.jsonl", path) == TAGC_OK &&
           !tagc_path_exists(path);
}

/* runs (MAX_RUNS). *n_runs is right after a failure, too. */
static tagc_status read_runs(const tagc_parsed *parsed, tagc_runlog *runs, int *n_runs) {
    int n_left = 0;
    for (int i = 0; i < parsed->n_words; i++) n_left += !is_other_folder(parsed->words[i]);
    if (n_left > MAX_RUNS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%d runs are named, allowed: 1 to %d", n_left, MAX_RUNS);
    for (int i = 0; i < parsed->n_words; i++) {
        if (n_left > 0 && is_other_folder(parsed->words[i])) {
            fprintf(stderr, "note: tagc compare leaves out %s, which holds no metrics.jsonl\n",
                    parsed->words[i]);
            continue;
        }
        TAGC_TRY(tagc_runlog_read(parsed->words[i], &runs[*n_runs]));
        ++*n_runs;
    }
    return TAGC_OK;
}

static tagc_status compare(const tagc_parsed *parsed, const compare_options *options) {
    tagc_runlog runs[MAX_RUNS] = {0};
    int n_runs = 0;
    tagc_status status = options->csv ? tagc_new_file_check(options->csv) : TAGC_OK;
    if (status == TAGC_OK) status = read_runs(parsed, runs, &n_runs);
    if (status == TAGC_OK && options->csv) status = tagc_runlog_write_csv(runs, n_runs, options->csv);
    int is_csv_alone = tagc_new_file_is_stdout(options->csv);
    if (status == TAGC_OK && !is_csv_alone) print_table(runs, n_runs);
    for (int i = 0; i < n_runs; i++) tagc_runlog_destroy(&runs[i]);
    return status;
}

static int run(tagc_parsed *parsed) {
    const compare_options *options = parsed->values;
    if (!options->svg) return tagc_command_end(compare(parsed, options));
    tagc_fail(TAGC_ERR_ARGUMENT,
              "--svg has moved to tagc-report (in a clone: pip install \".[report]\"): tagc-report --svg "
              "loss=%.200s RUN_DIR...",
              options->svg);
    return tagc_command_refuse(&command);
}

const tagc_entry tagc_entry_compare = {&command, sizeof(compare_options), run, NULL};
