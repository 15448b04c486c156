/* tagc data: text into token files. */
#include "cli/commands.h"
#include "cli/trained.h"
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
    const char *out, *text_field, *vocab, *merges, *config;
    double val_share;
    int lossy, force, quiet;
} data_options;

#define AT(field) offsetof(data_options, field)
/* clang-format off */
static const tagc_option rows[] = {
    {"What", "out", TAGC_OPTION_TEXT, 0, AT(out), 0, 0, NULL, NULL, "DIR", "folder for train.bin and val.bin; tagc data makes it if it is missing"},
    {NULL, "val-share", TAGC_OPTION_REAL, 0, AT(val_share), 0, 0.5, NULL, "0.1", "X",
     "share of the text kept for validation: whole documents where there are many, else the end of each"},
    {NULL, "text-field", TAGC_OPTION_TEXT, 0, AT(text_field), 0, 0, NULL, "text", "NAME",
     "field of each line of .jsonl and .ndjson files, and of .json files with an object on each line, that holds the text; none: such"
     " files are plain text"},
    {NULL, "lossy", TAGC_OPTION_FLAG, 0, AT(lossy), 0, 0, NULL, "no", NULL,
     "keep bytes that are not UTF-8 as they are, instead of stopping at the first"},
    {NULL, "force", TAGC_OPTION_FLAG, 0, AT(force), 0, 0, NULL, "no", NULL,
     "overwrite the train.bin and val.bin that --out has already"},
    {"Tokens", "vocab", TAGC_OPTION_TEXT, 0, AT(vocab), 0, 0, NULL, NULL, "FILE",
     "vocab.json of GPT-2's byte pair encoding; without it each byte is a token"},
    {NULL, "merges", TAGC_OPTION_TEXT, 0, AT(merges), 0, 0, NULL, NULL, "FILE", "merges.txt that goes with it"},
    {"Other", "quiet", TAGC_OPTION_FLAG, TAGC_ROLE_LOCAL, AT(quiet), 0, 0, NULL, "no", NULL, "print nothing but failures"},
    TAGC_ROW_CONFIG(AT(config)),
};
/* clang-format on */

static const tagc_command command = {
    .name = "data",
    .summary = "turn files and folders of text or JSON lines, plain or .gz, into tokens to train on",
    .usage = "--out DIR FILE|FOLDER...",
    .examples = "  tagc data --out data/books books/\n"
                "  tagc data --out data/mixed notes.txt archive/ corpus.txt.gz --val-share 0.05\n"
                "  tagc data --out data/web --text-field content crawl.jsonl.gz\n"
                "  tagc data --out data/bpe --vocab vocab.json --merges merges.txt books/\n",
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

static void print_report(const data_options *options, const tagc_data_report *report, const char *tokenizer) {
    char bytes[16], train[16], val[16], documents[48] = "";
    if (report->n_documents + report->n_empty > report->n_files)
        snprintf(documents, sizeof documents, ", %llu documents", (unsigned long long)report->n_documents);
    printf("%s%llu file%s%s, %s of text -> %s: %s training and %s validation tokens (%s)\n",
           isatty(STDOUT_FILENO) ? "\r\033[K" : "", (unsigned long long)report->n_files,
           report->n_files == 1 ? "" : "s", documents, tagc_human_bytes((double)report->n_text_bytes, bytes),
           options->out, tagc_human((double)report->n_train_tokens, train),
           tagc_human((double)report->n_val_tokens, val), tokenizer);
    if (report->n_empty > 0)
        printf("%llu empty %s left out\n", (unsigned long long)report->n_empty,
               report->n_empty == 1 ? "document was" : "documents were");
    if (*report->json_like)
        printf("note: %s has JSON lines and was taken as plain text; if its name ended in .jsonl, the field "
               "\"%s\" of "
               "each line would be taken\n",
               report->json_like, options->text_field);
    if (report->n_invalid_bytes > 0)
        printf("%llu bytes are not UTF-8 and were kept as they are\n",
               (unsigned long long)report->n_invalid_bytes);
}

static tagc_status build(const tagc_parsed *parsed) {
    const data_options *options = parsed->values;
    if (!options->force) /* a run that resumes would go on with other text */
        TAGC_TRY(tagc_command_keep(options->out, "train.bin", "val.bin"));
    tagc_tokenizer *tokenizer = NULL;
    TAGC_TRY(tagc_trained_tokenizer(options->vocab, options->merges, "", &tokenizer));
    data_progress progress = {.is_terminal = !options->quiet && isatty(STDOUT_FILENO)};
    tagc_data_options data;
    tagc_data_report report;
    tagc_data_options_init(&data);
    data.inputs = parsed->words;
    data.n_inputs = (size_t)parsed->n_words;
    data.out_dir = options->out;
    data.tokenizer = tokenizer;
    data.val_share = options->val_share;
    data.lossy = options->lossy;
    data.text_field =
        options->text_field && strcmp(options->text_field, "none") != 0 ? options->text_field : NULL;
    data.progress = show;
    data.progress_context = &progress;
    tagc_status status = tagc_data_build(&data, &report);
    if (status == TAGC_OK && !options->quiet) print_report(options, &report, tagc_tokenizer_name(tokenizer));
    tagc_tokenizer_destroy(tokenizer);
    return status;
}

static int run(tagc_parsed *parsed) {
    tagc_interrupt_watch();
    return tagc_command_end(build(parsed));
}

const tagc_entry tagc_entry_data = {&command, sizeof(data_options), run, NULL};
