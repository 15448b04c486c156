/* How an arm becomes options: through the parser of the command line, so that an arm accepts all options of tagc train and
 * reports the same errors. */
#include "bench/arms.h"

#include "options/presets.h"
#include <stdlib.h>
#include <string.h>

enum { MAX_ARMS = 64, VALUE_BYTES = 512 };

/* Whether arms get the value that tagc bench has. */
typedef enum share { NEVER, GIVEN, ALWAYS } share;

/* clang-format off */
static const struct {
    const char *section, *name;
    const char *initial, *help; /* NULL: as in tagc train */
    share share;
} shared[] = {
    {"Model and batch", "model", "gpt2-162m", NULL, ALWAYS},
    {NULL, "n-layer", NULL, NULL, GIVEN},
    {NULL, "n-head", NULL, NULL, GIVEN},
    {NULL, "n-embd", NULL, NULL, GIVEN},
    {NULL, "block-size", NULL, NULL, GIVEN},
    {NULL, "vocab-size", NULL, NULL, GIVEN},
    {NULL, "tied", NULL, NULL, GIVEN},
    {NULL, "batch-size", "1", NULL, ALWAYS},
    {NULL, "seq-len", "auto", "tokens per sequence; auto: 256, or the model's block-size when that is less",
     ALWAYS},
    {NULL, "accumulate", NULL, NULL, ALWAYS},
    {NULL, "seed", NULL, NULL, ALWAYS},
    {NULL, "data", NULL, "tokens to train on, as for tagc train; without it they are drawn at random",
     NEVER},
    {"For all arms", "wrap", NULL, NULL, GIVEN},
    {NULL, "bucket-elems", NULL, NULL, GIVEN},
    {NULL, "prefetch", NULL, NULL, GIVEN},
    {NULL, "grads-in-flight", NULL, NULL, GIVEN},
    {NULL, "exchange-each-micro-step", NULL, NULL, GIVEN},
    {"Ranks and machine", "ranks", "2",
     "ranks as threads of this process; under mpirun every process is a rank and this is not needed",
     NEVER},
    {NULL, "transport", NULL, NULL, NEVER},
    {NULL, "timeout", NULL, NULL, GIVEN},
    {NULL, "codec-threads", NULL, NULL, GIVEN},
    {NULL, "blas-threads", NULL, NULL, GIVEN},
    {NULL, "quiet", NULL, NULL, NEVER},
};
/* clang-format on */
enum { N_SHARED = sizeof shared / sizeof shared[0] };
_Static_assert((int)N_SHARED <= (int)TAGC_ARMS_MAX_SHARED, "raise TAGC_ARMS_MAX_SHARED");

int tagc_arms_rows(const tagc_option *bench_rows, int n_bench_rows, tagc_option *rows) {
    int n = n_bench_rows;
    memcpy(rows, bench_rows, (size_t)n_bench_rows * sizeof *rows);
    for (int i = 0; i < N_SHARED; i++) {
        tagc_option *row = &rows[n++];
        *row = tagc_train_command.options[tagc_options_find(&tagc_train_command, shared[i].name)];
        row->section = shared[i].section;
        if (shared[i].initial) row->initial = shared[i].initial;
        if (shared[i].help) row->help = shared[i].help;
        if (strcmp(row->name, "seq-len") == 0) row->words = row->initial;
    }
    return n;
}

/* Refuses options that an arm cannot set: they would appear in its name and change nothing. */
static tagc_status check_extra(const char *name) {
    static const char *const refused[] = {
        "config",  "data",         "val-data",   "init-from",    "ranks",      "transport",
        "timeout", "blas-threads", "out",        "resume",       "fork",       "schedule-from",
        "trace",   "trace-steps",  "eval-every", "eval-batches", "save-every", "keep",
        "quiet",   "preset",       "levels"};
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        if (strcmp(refused[i], name) == 0)
            return tagc_fail(TAGC_ERR_ARGUMENT,
                             "--%s is not an arm's own; options of an arm say how it trains and exchanges",
                             name);
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

/* Preset words are separated by spaces, options behind an arm by pluses: "--a=1 --b=2", "a=1+b=2". */
static tagc_status take_pairs(tagc_arm *arm, const char *text, size_t n, const char *separators) {
    char pair[VALUE_BYTES];
    for (const char *end = text + n; text <= end; text += strcspn(text, separators) + 1) {
        snprintf(pair, sizeof pair, "%.*s", (int)strcspn(text, separators), text);
        char *name = strncmp(pair, "--", 2) == 0 ? pair + 2 : pair, *value = strchr(pair, '=');
        if (!value) return tagc_fail(TAGC_ERR_ARGUMENT, "\"%s\" is not of the form option=value", pair);
        *value = '\0';
        if (*separators == '+') TAGC_TRY(check_extra(name));
        TAGC_TRY(tagc_options_take(&arm->parsed, name, value + 1, ""));
    }
    return TAGC_OK;
}

static tagc_status take_shared(tagc_arm *arm, const tagc_parsed *from) {
    char value[VALUE_BYTES];
    for (int i = 0; from && i < N_SHARED; i++) {
        share how = shared[i].share;
        if (how != ALWAYS && !(how == GIVEN && tagc_options_given(from, shared[i].name))) continue;
        int row = tagc_options_find(from->command, shared[i].name);
        tagc_options_get(from->command, from->values, row, value, sizeof value);
        TAGC_TRY(tagc_options_take(&arm->parsed, shared[i].name, value, ""));
    }
    return TAGC_OK;
}

/* text (n): of the arm; n_name: of its NAME. preset NULL: the name is that of a config file. */
static tagc_status take_options(tagc_arm *arm, const char *preset, const char *text, size_t n_name, size_t n,
                                const tagc_parsed *from) {
    char option[] = "--config", *argv[] = {option, arm->config};
    TAGC_TRY(tagc_options_parse(&tagc_train_command, preset ? 0 : 2, argv, &arm->options, &arm->parsed));
    if (preset) TAGC_TRY(take_pairs(arm, preset, strlen(preset), " "));
    TAGC_TRY(take_shared(arm, from));
    if (n > n_name) TAGC_TRY(take_pairs(arm, text + n_name + 1, n - n_name - 1, "+,"));
    TAGC_TRY(tagc_train_check(&arm->options));
    tagc_train_command.resolve(&arm->options);
    arm->options.gentle = 2; /* measure the settled run, not its gentle start */
    return TAGC_OK;
}

static tagc_status parse_arm(tagc_arm *arm, const char *text, size_t n, const tagc_parsed *from) {
    size_t n_name = strcspn(text, "+,");
    const char *preset = tagc_preset_words(text, n_name);
    if (n == 0) return tagc_fail(TAGC_ERR_ARGUMENT, "an empty name in the list of arms");
    TAGC_TRY(set_name(arm, text, n));
    int is_file = memchr(text, '/', n_name) || (n_name > 5 && strncmp(text + n_name - 5, ".conf", 5) == 0);
    if (!preset && !is_file) {
        char known[TAGC_PRESET_LIST_BYTES];
        tagc_preset_list(known);
        return tagc_fail(TAGC_ERR_ARGUMENT, "\"%.*s\" is no arm; known: %s, or a config file", (int)n_name,
                         text, known);
    }
    arm->config = strndup(text, n_name);
    if (!arm->config) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for arms");
    tagc_status status = take_options(arm, preset, text, n_name, n, from);
    return status == TAGC_OK ? status : tagc_fail_in(status, "arm %s", arm->name);
}

static tagc_status check_names(const tagc_arm *arms, int n) {
    for (int i = 0; i < n; i++)
        for (int k = 0; k < i; k++)
            if (strcmp(arms[i].name, arms[k].name) == 0)
                return tagc_fail(TAGC_ERR_ARGUMENT, "the arm %s is there twice", arms[i].name);
    return TAGC_OK;
}

static tagc_status check_model(const tagc_arm *arm, const tagc_gpt2_config *model, const char *command) {
    tagc_gpt2_config model_of_arm = {0};
    TAGC_TRY(tagc_train_model(&arm->options, &model_of_arm));
    if (memcmp(&model_of_arm, model, sizeof model_of_arm) == 0) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT,
                     "arm %s has a model of its own; all arms have that of tagc %s's options", arm->name,
                     command);
}

static tagc_status parse_all(const char *list, const tagc_parsed *parsed, tagc_arm *arms, int *n_arms) {
    for (const char *at = list;; at++) {
        if (*n_arms == MAX_ARMS) return tagc_fail(TAGC_ERR_ARGUMENT, "more than %d arms", MAX_ARMS);
        size_t n = strcspn(at, ",");
        TAGC_TRY(parse_arm(&arms[(*n_arms)++], at, n, parsed));
        at += n;
        if (!*at) return check_names(arms, *n_arms);
    }
}

tagc_status tagc_arms_read(const char *list, const tagc_parsed *parsed, const tagc_gpt2_config *model,
                           tagc_arm **out, int *n_out) {
    *out = NULL;
    *n_out = 0;
    if (!list) return tagc_fail(TAGC_ERR_ARGUMENT, "--arms is empty");
    tagc_arm *arms = calloc(MAX_ARMS, sizeof *arms);
    if (!arms) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for arms");
    int n = 0;
    tagc_status status = parse_all(list, parsed, arms, &n);
    for (int i = 0; model && status == TAGC_OK && i < n; i++)
        status = check_model(&arms[i], model, parsed->command->name);
    if (status != TAGC_OK) {
        tagc_arms_destroy(arms, n);
        return status;
    }
    *out = arms;
    *n_out = n;
    return TAGC_OK;
}

void tagc_arms_destroy(tagc_arm *arms, int n) {
    for (int i = 0; arms && i < n; i++) {
        tagc_options_destroy(&arms[i].parsed);
        free(arms[i].config);
    }
    free(arms);
}
