/* tagc data: text into token files, a token a byte. */
#include "data/data.h"
#include "cli/commands.h"
#include "core/clock.h"
#include "core/status.h"
#include "disk/paths.h"
#include "launch/human.h"
#include "launch/interrupt.h"
#include "launch/ranks.h"
#include "train/progress.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct data_options {
    const char *out, *config;
    double val_share;
    int lossy, force, quiet;
} data_options;

#define AT(field) offsetof(data_options, field)
/* clang-format off */
static const tagc_option rows[] = {
    {"What", "out", TAGC_OPTION_TEXT, 0, AT(out), 0, 0, NULL, NULL, "DIR", "folder for train.bin and val.bin; tagc data makes it if it is missing"},
    {NULL, "val-share", TAGC_OPTION_REAL, 0, AT(val_share), 0, 0.5, NULL, "0.1", "X",
     "share of the text kept for validation: whole documents where there are many, else the end of each"},
    {NULL, "lossy", TAGC_OPTION_FLAG, 0, AT(lossy), 0, 0, NULL, "no", NULL,
     "keep bytes that are not UTF-8 as they are, instead of stopping at the first"},
    {NULL, "force", TAGC_OPTION_FLAG, 0, AT(force), 0, 0, NULL, "no", NULL,
     "overwrite the train.bin and val.bin that --out has already"},
    {"Other", "quiet", TAGC_OPTION_FLAG, TAGC_ROLE_LOCAL, AT(quiet), 0, 0, NULL, "no", NULL, "print nothing but failures"},
    TAGC_ROW_CONFIG(AT(config)),
};
/* clang-format on */

static const tagc_command command = {
    .name = "data",
    .summary = "turn files and folders of text, plain or .gz, into tokens to train on, a token a byte",
    .usage = "--out DIR FILE|FOLDER...",
    .examples = "  tagc data --out data/books books/\n"
                "  tagc data --out data/mixed notes.txt archive/ corpus.txt.gz --val-share 0.05\n"
                "  python -m tagc data --out data/web --tokenizer tokenizer.json crawl.jsonl.gz   # other "
                "tokens, JSON lines\n",
    .options = rows,
    .n_options = sizeof rows / sizeof rows[0],
    .needs = "out",
    .positionals = "no text is named; name files or folders"};

typedef struct data_progress {
    int is_terminal;
    double shown_s;
} data_progress;

static int show(void *context, const tagc_data_report *report) {
    data_progress *progress = context;
    char bytes[16];
    double now = tagc_clock_s();
    if (progress->is_terminal && report->file && now - progress->shown_s > 0.1) {
        progress->shown_s = now;
        printf("\r\033[K%llu of %llu files, %s  %.60s", (unsigned long long)report->n_files,
               (unsigned long long)report->n_total_files,
               tagc_human_bytes((double)report->n_text_bytes, bytes), report->file);
        fflush(stdout);
    }
    return tagc_interrupt_asked();
}

static void print_report(const data_options *options, const tagc_data_report *report) {
    char bytes[16], train[16], val[16];
    printf("%s%llu file%s, %s of text -> %s: %s training and %s validation tokens (bytes)\n",
           isatty(STDOUT_FILENO) ? "\r\033[K" : "", (unsigned long long)report->n_files,
           report->n_files == 1 ? "" : "s", tagc_human_bytes((double)report->n_text_bytes, bytes),
           options->out, tagc_human((double)report->n_train_tokens, train),
           tagc_human((double)report->n_val_tokens, val));
    if (report->n_empty > 0)
        printf("%llu empty %s left out\n", (unsigned long long)report->n_empty,
               report->n_empty == 1 ? "file was" : "files were");
    for (int i = 0; i < TAGC_N_SKIPS; i++)
        if (report->skipped[i].n > 0)
            printf("skipped %llu: %s (%s)\n", (unsigned long long)report->skipped[i].n,
                   tagc_data_skip_text(i), report->skipped[i].names);
    if (report->n_invalid_bytes > 0)
        printf("%llu bytes are not UTF-8 and were kept as they are\n",
               (unsigned long long)report->n_invalid_bytes);
}

static tagc_status build(const tagc_parsed *parsed) {
    const data_options *options = parsed->values;
    if (!options->force) /* a run that resumes would go on with other text */
        TAGC_TRY(tagc_command_keep(options->out, "train.bin", "val.bin"));
    data_progress progress = {.is_terminal = !options->quiet && isatty(STDOUT_FILENO)};
    tagc_data_options data;
    tagc_data_report report;
    tagc_data_options_init(&data);
    data.inputs = parsed->words;
    data.n_inputs = (size_t)parsed->n_words;
    data.out_dir = options->out;
    data.val_share = options->val_share;
    data.lossy = options->lossy;
    data.progress = show;
    data.progress_context = &progress;
    TAGC_TRY(tagc_data_build(&data, &report));
    if (!options->quiet) print_report(options, &report);
    return TAGC_OK;
}

static int run(tagc_parsed *parsed) {
    tagc_interrupt_watch();
    return tagc_command_end(build(parsed));
}

const tagc_entry tagc_entry_data = {&command, sizeof(data_options), run, NULL};
