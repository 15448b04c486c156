/* Any words behind `tagc COMMAND`: an error, or values that keep their ranges, and that come back from the texts that stand for them.
 * Nothing is run.
 *
 * Input: 1 byte (the command), then words, each up to a line's end. */
#include "cli/commands.h"
#include "options/presets.h"
#include "options/saved_options.h"
#include "options/train_options.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { MOST_WORDS = 64, TEXT_BYTES = 8192 };

static const tagc_entry *const entries[] = {&tagc_entry_train, &tagc_entry_bench,  &tagc_entry_compare,
                                            &tagc_entry_plan,  &tagc_entry_eval,   &tagc_entry_generate,
                                            &tagc_entry_data,  &tagc_entry_export, &tagc_entry_info};
enum { N_ENTRIES = sizeof entries / sizeof *entries };

static void require(int holds) {
    if (!holds) abort();
}

static void check_row(const tagc_command *command, const void *values, int i) {
    const tagc_option *row = &command->options[i];
    const char *at = (const char *)values + row->offset;
    int64_t whole;
    double real;
    if (row->type == TAGC_OPTION_INT) {
        memcpy(&whole, at, sizeof whole);
        require(((double)whole >= row->min && (double)whole <= row->max) || row->words);
    }
    if (row->type == TAGC_OPTION_REAL) {
        memcpy(&real, at, sizeof real);
        require((real >= row->min && real <= row->max) || row->words);
    }
}

/* A value's text gives the value again. */
static void check_text(const tagc_entry *entry, const void *values, int i) {
    char text[TEXT_BYTES], again[TEXT_BYTES];
    tagc_options_get(entry->command, values, i, text, sizeof text);
    if (!text[0] || strlen(text) + 1 == sizeof text) return;
    void *others = calloc(1, entry->n_value_bytes);
    require(others != NULL);
    require(tagc_options_set(entry->command, others, i, text, "a text") == TAGC_OK);
    tagc_options_get(entry->command, others, i, again, sizeof again);
    require(strcmp(text, again) == 0);
    free(others);
}

static void complete_training(tagc_parsed *parsed) {
    tagc_train_options *options = parsed->values;
    int n_ranks = tagc_options_given(parsed, "ranks") ? (int)options->ranks : 0;
    if (options->preset && tagc_preset_apply(options->preset, parsed) != TAGC_OK) return;
    if (options->levels && tagc_levels_apply(options->levels, n_ranks, parsed) != TAGC_OK) return;
    if (tagc_train_check(options) != TAGC_OK) return;
    json_t *texts = tagc_saved_options(&tagc_train_command, options);
    require(texts || tagc_saved_check_text(&tagc_train_command, options) != TAGC_OK);
    json_decref(texts);
}

static void parse(const tagc_entry *entry, int argc, char **argv) {
    tagc_parsed parsed = {0};
    void *values = calloc(1, entry->n_value_bytes);
    require(values != NULL);
    if (tagc_options_parse(entry->command, argc, argv, values, &parsed) == TAGC_OK && !parsed.help) {
        for (int i = 0; i < entry->command->n_options; i++) {
            check_row(entry->command, values, i);
            check_text(entry, values, i);
        }
        if (entry == &tagc_entry_train) complete_training(&parsed);
    }
    tagc_options_destroy(&parsed);
    free(values);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    char *words[MOST_WORDS];
    int n_words = 0;
    if (n_bytes < 1) return 0;
    const tagc_entry *entry = entries[data[0] % N_ENTRIES];
    char *text = malloc(n_bytes);
    require(text != NULL);
    memcpy(text, data + 1, n_bytes - 1);
    text[n_bytes - 1] = 0;
    for (char *at = text; at && *at && n_words < MOST_WORDS;) {
        char *end = strchr(at, '\n');
        if (end) *end = 0;
        if (strstr(at, "config")) *at = 0; /* no file is read */
        words[n_words++] = at;
        at = end ? end + 1 : NULL;
    }
    if (entry->prepare) entry->prepare();
    parse(entry, n_words, words);
    free(text);
    return 0;
}
