/* How an arm becomes options: the parser of the command line reads the words of its preset, so that an arm accepts all
 * options of tagc train and reports the same errors. */
#include "bench/arms.h"

#include "options/presets.h"
#include <stdlib.h>
#include <string.h>

enum { MAX_ARMS = 64, MAX_WORDS = 64 };

static tagc_status add_word(tagc_arm *arm, const char *prefix, const char *text, size_t n) {
    if (arm->n_words == MAX_WORDS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "an arm has more than %d words", MAX_WORDS);
    char *word = malloc(strlen(prefix) + n + 1);
    if (!word) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for arms");
    strcpy(word, prefix);
    strncat(word, text, n);
    arm->words[arm->n_words++] = word;
    return TAGC_OK;
}

/* The words of NAME: those of the table, or the config file to read. */
static tagc_status add_name(tagc_arm *arm, const char *name, size_t n) {
    const char *words = tagc_preset_words(name, n);
    for (const char *at = words; at && *at; at += strspn(at, " ")) {
        size_t length = strcspn(at, " ");
        TAGC_TRY(add_word(arm, "", at, length));
        at += length;
    }
    if (words) return TAGC_OK;
    if (memchr(name, '/', n) || (n > 5 && strncmp(name + n - 5, ".conf", 5) == 0))
        return add_word(arm, "--config=", name, n);
    char known[TAGC_PRESET_LIST_BYTES];
    tagc_preset_list(known);
    return tagc_fail(TAGC_ERR_ARGUMENT, "\"%.*s\" is no arm; known: %s, or a config file", (int)n, name,
                     known);
}

/* Refuses options that an arm cannot set: they would appear in its name and change nothing. */
static tagc_status check_extra(const tagc_arm *arm, const char *name, size_t n) {
    static const char *const refused[] = {"config",     "data",        "val-data",   "init-from",
                                          "ranks",      "transport",   "timeout",    "blas-threads",
                                          "out",        "resume",      "fork",       "schedule-from",
                                          "trace",      "trace-steps", "eval-every", "eval-batches",
                                          "save-every", "keep",        "quiet",      "preset"};
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        if (strlen(refused[i]) == n && strncmp(refused[i], name, n) == 0)
            return tagc_fail(
                TAGC_ERR_ARGUMENT,
                "arm %s: --%s is not an arm's own; options of an arm say how it trains and exchanges",
                arm->name, refused[i]);
    return TAGC_OK;
}

static tagc_status add_extras(tagc_arm *arm, const char *text, const char *end) {
    while (text < end) {
        text++; /* the plus */
        size_t n = strcspn(text, "+,");
        if (!memchr(text, '=', n))
            return tagc_fail(TAGC_ERR_ARGUMENT, "arm %s: \"%.*s\" is not of the form option=value", arm->name,
                             (int)n, text);
        TAGC_TRY(add_word(arm, "--", text, n));
        TAGC_TRY(check_extra(arm, text, strcspn(text, "=")));
        text += n;
    }
    return TAGC_OK;
}

/* Of a path only the last part goes into the name. */
static tagc_status set_name(tagc_arm *arm, const char *text, size_t n) {
    size_t n_base = strcspn(text, "+,");
    const char *shown = text;
    for (size_t i = 0; i < n_base; i++)
        if (text[i] == '/') shown = text + i + 1;
    size_t n_shown = n_base - (size_t)(shown - text);
    if (n_shown > 5 && strncmp(shown + n_shown - 5, ".conf", 5) == 0) n_shown -= 5;
    if (n_shown + n - n_base >= sizeof arm->name)
        return tagc_fail(TAGC_ERR_ARGUMENT, "the arm \"%.40s...\" is longer than %d characters", text,
                         TAGC_ARM_NAME_BYTES - 1);
    snprintf(arm->name, sizeof arm->name, "%.*s%.*s", (int)n_shown, shown, (int)(n - n_base), text + n_base);
    return TAGC_OK;
}

static tagc_status parse_arm(tagc_arm *arm, const char *text, size_t n, int n_base, const char *const *base) {
    size_t n_name = strcspn(text, "+,");
    if (n == 0) return tagc_fail(TAGC_ERR_ARGUMENT, "an empty name in the list of arms");
    TAGC_TRY(set_name(arm, text, n));
    arm->words = calloc(MAX_WORDS, sizeof *arm->words);
    if (!arm->words) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for arms");
    TAGC_TRY(add_name(arm, text, n_name));
    for (int i = 0; i < n_base; i++) TAGC_TRY(add_word(arm, "", base[i], strlen(base[i])));
    TAGC_TRY(add_extras(arm, text + n_name, text + n));
    tagc_status status =
        tagc_options_parse(&tagc_train_command, arm->n_words, arm->words, &arm->options, &arm->parsed);
    if (status == TAGC_OK) status = tagc_train_check(&arm->options);
    if (status == TAGC_OK) tagc_train_command.resolve(&arm->options);
    arm->options.gentle = 2; /* measure the settled run, not its gentle start */
    return status == TAGC_OK ? status : tagc_fail_in(status, "arm %s", arm->name);
}

static tagc_status check_names(const tagc_arm *arms, int n) {
    for (int i = 0; i < n; i++)
        for (int k = 0; k < i; k++)
            if (strcmp(arms[i].name, arms[k].name) == 0)
                return tagc_fail(TAGC_ERR_ARGUMENT, "the arm %s is there twice", arms[i].name);
    return TAGC_OK;
}

tagc_status tagc_arms_parse(const char *list, int n_base, const char *const *base, tagc_arm **out,
                            int *n_out) {
    *out = NULL;
    *n_out = 0;
    tagc_arm *arms = calloc(MAX_ARMS, sizeof *arms);
    if (!arms) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for arms");
    tagc_status status = TAGC_OK;
    int n_arms = 0;
    for (const char *at = list; status == TAGC_OK;) {
        if (n_arms == MAX_ARMS) {
            status = tagc_fail(TAGC_ERR_ARGUMENT, "more than %d arms", MAX_ARMS);
            break;
        }
        size_t n = strcspn(at, ",");
        status = parse_arm(&arms[n_arms++], at, n, n_base, base);
        if (!at[n]) break;
        at += n + 1;
    }
    if (status == TAGC_OK) status = check_names(arms, n_arms);
    if (status != TAGC_OK) {
        tagc_arms_destroy(arms, n_arms);
        return status;
    }
    *out = arms;
    *n_out = n_arms;
    return TAGC_OK;
}

void tagc_arms_rows(const tagc_option *own, int n_own, const tagc_shared_row *shared, int n_shared,
                    tagc_option *rows) {
    memcpy(rows, own, (size_t)n_own * sizeof *rows);
    for (int i = 0; i < n_shared; i++) {
        tagc_option *row = &rows[n_own + i];
        *row = tagc_train_command.options[tagc_options_find(&tagc_train_command, shared[i].name)];
        row->section = shared[i].section;
        if (shared[i].initial) row->initial = shared[i].initial;
        if (shared[i].help) row->help = shared[i].help;
        if (strcmp(row->name, "seq-len") == 0) row->words = row->initial;
    }
}

static tagc_status check_model(const tagc_arm *arm, const tagc_gpt2_config *model, const char *command) {
    tagc_gpt2_config own = {0};
    TAGC_TRY(tagc_train_model(&arm->options, &own));
    if (memcmp(&own, model, sizeof own) == 0) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT,
                     "arm %s has a model of its own; all arms have that of tagc %s's options", arm->name,
                     command);
}

tagc_status tagc_arms_read(const char *list, const tagc_parsed *parsed, const tagc_shared_row *shared,
                           int n_shared, const tagc_gpt2_config *model, tagc_arm **out, int *n_out) {
    enum { WORD_BYTES = 512 };
    char texts[MAX_WORDS][WORD_BYTES];
    const char *words[MAX_WORDS];
    int n = 0;
    *out = NULL;
    *n_out = 0;
    if (!list) return tagc_fail(TAGC_ERR_ARGUMENT, "--arms is empty");
    if (n_shared > MAX_WORDS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%d shared rows, at most %d", n_shared, MAX_WORDS);
    for (int i = 0; i < n_shared; i++) {
        const char *name = shared[i].name;
        if (shared[i].to_arms == TAGC_TO_ARMS_NEVER) continue;
        if (shared[i].to_arms == TAGC_TO_ARMS_GIVEN && !tagc_options_given(parsed, name)) continue;
        int at = snprintf(texts[n], WORD_BYTES, "--%s=", name);
        tagc_options_get(parsed->command, parsed->values, tagc_options_find(parsed->command, name),
                         texts[n] + at, (size_t)(WORD_BYTES - at));
        words[n] = texts[n];
        n++;
    }
    TAGC_TRY(tagc_arms_parse(list, n, words, out, n_out));
    tagc_status status = TAGC_OK;
    for (int i = 0; status == TAGC_OK && i < *n_out; i++)
        status = check_model(&(*out)[i], model, parsed->command->name);
    if (status == TAGC_OK) return status;
    tagc_arms_destroy(*out, *n_out);
    *out = NULL;
    *n_out = 0;
    return status;
}

void tagc_arms_destroy(tagc_arm *arms, int n) {
    for (int i = 0; arms && i < n; i++) {
        tagc_options_destroy(&arms[i].parsed);
        for (int k = 0; k < arms[i].n_words; k++) free(arms[i].words[k]);
        free(arms[i].words);
    }
    free(arms);
}
