/* Parsing of options: command line and config file, both through tagc_options_set. */
#include "options/options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_BYTES = 64, MOST_CONFIG_BYTES = 1 << 20 };

int tagc_options_find(const tagc_command *command, const char *name) {
    for (int i = 0; i < command->n_options; i++)
        if (strcmp(command->options[i].name, name) == 0) return i;
    return -1;
}

int tagc_options_given(const tagc_parsed *parsed, const char *name) {
    int option = tagc_options_find(parsed->command, name);
    return option >= 0 && parsed->given[option];
}

/* Edits (insert, delete, replace) between two short names. */
static int edit_distance(const char *a, const char *b) {
    int row[NAME_BYTES + 1];
    int n = (int)strlen(b);
    if (n > NAME_BYTES) return NAME_BYTES;
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int replaced = diagonal + (a[i - 1] != b[j - 1]);
            int shorter = row[j - 1] < row[j] ? row[j - 1] : row[j];
            diagonal = row[j];
            row[j] = replaced < shorter + 1 ? replaced : shorter + 1;
        }
    }
    return row[n];
}

/* What other trainers call it. */
static const struct {
    const char *theirs, *ours;
} synonyms[] = {
    {"learning-rate", "lr"},
    {"max-steps", "steps"},
    {"max-iters", "steps"},
    {"num-steps", "steps"},
    {"iterations", "steps"},
    {"warmup-steps", "warmup"},
    {"warmup-iters", "warmup"},
    {"wd", "weight-decay"},
    {"grad-clip", "clip"},
    {"max-grad-norm", "clip"},
    {"bs", "batch-size"},
    {"context-length", "block-size"},
    {"nproc-per-node", "ranks"},
    {"world-size", "ranks"},
    {"num-ranks", "ranks"},
    {"output-dir", "out"},
    {"save-dir", "out"},
    {"checkpoint", "resume"},
    {"dataset", "data"},
    {"input", "data"},
    {"num-layers", "n-layer"},
    {"num-heads", "n-head"},
    {"hidden-size", "n-embd"},
    {"checkpoint", "from"},
    {"gradient-accumulation-steps", "accumulate"},
};
enum { N_SYNONYMS = sizeof synonyms / sizeof synonyms[0] };

int tagc_options_is_nearer(const char *name, const char *word, int *least) {
    int distance = edit_distance(name, word);
    if (*least < 0) *least = (int)strlen(name) / 2 + 1;
    if (distance >= *least) return 0;
    *least = distance;
    return 1;
}

/* Another trainer's word for one of the command's options, else the nearest name; NULL: none is near. */
static const char *meant(const tagc_command *command, const char *name) {
    const char *nearest = NULL;
    int least = -1;
    for (int i = 0; i < N_SYNONYMS; i++)
        if (strcmp(name, synonyms[i].theirs) == 0 && tagc_options_find(command, synonyms[i].ours) >= 0)
            return synonyms[i].ours;
    for (int i = 0; i < command->n_options; i++)
        if (tagc_options_is_nearer(name, command->options[i].name, &least))
            nearest = command->options[i].name;
    return nearest;
}

static tagc_status unknown_option(const tagc_command *command, const char *name, const char *where) {
    const char *option = meant(command, name);
    return tagc_fail(TAGC_ERR_ARGUMENT, "%sunknown option --%.64s%s%s%s", where, name,
                     option ? "; did you mean --" : "", option ? option : "", option ? "?" : "");
}

/* A FLAG is a CHOICE of two. */
static const char *words_of(const tagc_option *option) {
    return option->type == TAGC_OPTION_FLAG ? "no/false/off/0|yes/true/on/1" : option->words;
}

/* The number of `text` among "a/b|c", -1 when it is none of them. */
static int choice_number(const char *words, const char *text) {
    int number = 0;
    for (const char *word = words; *word;) {
        size_t n = strcspn(word, "/|");
        if (n == strlen(text) && memcmp(word, text, n) == 0) return number;
        word += n;
        if (*word == '|') number++;
        if (*word) word++;
    }
    return -1;
}

/* Main word of choice `number`. */
static void choice_word(const char *words, int number, char *text, size_t n_bytes) {
    for (; number > 0 && strchr(words, '|'); number--) words = strchr(words, '|') + 1;
    snprintf(text, n_bytes, "%.*s", (int)strcspn(words, "/|"), words);
}

double tagc_option_word(const tagc_option *option, char word[TAGC_OPTION_WORD_BYTES]) {
    size_t n = option->words ? strcspn(option->words, "=") : 0;
    snprintf(word, TAGC_OPTION_WORD_BYTES, "%.*s", (int)n, n ? option->words : "");
    return n && option->words[n] ? strtod(option->words + n + 1, NULL) : 0;
}

static tagc_status set_number(const tagc_option *option, void *value, const char *text, const char *where) {
    int is_int = option->type == TAGC_OPTION_INT;
    char *end = (char *)text, word[TAGC_OPTION_WORD_BYTES];
    double real = tagc_option_word(option, word);
    int is_word = *word && strcmp(word, text) == 0;
    long long integer = (long long)real;
    errno = 0;
    if (is_int && !is_word) real = (double)(integer = strtoll(text, &end, 10));
    if (!is_int && !is_word) real = strtod(text, &end);
    /* strtod takes more than people mean: spaces, hexadecimal numbers. */
    int is_bad = end == text || *end || text[strspn(text, "+-.0123456789eE")] || errno == ERANGE ||
                 !isfinite(real) || real < option->min || real > option->max;
    if (is_bad && !is_word)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s--%s is \"%.80s\", allowed: %s from %.15g to %.15g%s%s", where,
                         option->name, text, is_int ? "a whole number" : "a number", option->min, option->max,
                         *word ? " or " : "", word);
    if (is_int)
        *(int64_t *)value = integer;
    else
        *(double *)value = real;
    return TAGC_OK;
}

tagc_status tagc_options_set(const tagc_command *command, void *values, int index, const char *text,
                             const char *where) {
    const tagc_option *option = &command->options[index];
    void *value = (char *)values + option->offset;
    int number;
    switch (option->type) {
    case TAGC_OPTION_INT:
    case TAGC_OPTION_REAL:
        return set_number(option, value, text, where);
    case TAGC_OPTION_TEXT:
        *(const char **)value = *text ? text : NULL;
        return TAGC_OK;
    case TAGC_OPTION_FLAG:
    case TAGC_OPTION_CHOICE:
        number = choice_number(words_of(option), text);
        if (number < 0)
            return tagc_fail(TAGC_ERR_ARGUMENT, "%s--%s is \"%.80s\", allowed: %s", where, option->name, text,
                             option->type == TAGC_OPTION_FLAG ? "yes or no" : option->words);
        *(int *)value = number;
        return TAGC_OK;
    }
    return tagc_fail(TAGC_ERR_ARGUMENT, "--%s has no type", option->name);
}

/* The fewest digits that read back as the same number. */
static void shortest_real(double real, char *text, size_t n_bytes) {
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, n_bytes, "%.*g", digits, real);
        if (strtod(text, NULL) == real) return;
    }
}

void tagc_options_get(const tagc_command *command, const void *values, int index, char *text,
                      size_t n_bytes) {
    const tagc_option *option = &command->options[index];
    const void *value = (const char *)values + option->offset;
    switch (option->type) {
    case TAGC_OPTION_INT:
    case TAGC_OPTION_REAL: {
        double real =
            option->type == TAGC_OPTION_INT ? (double)*(const int64_t *)value : *(const double *)value;
        char word[TAGC_OPTION_WORD_BYTES];
        if (real == tagc_option_word(option, word) && *word)
            snprintf(text, n_bytes, "%s", word);
        else if (option->type == TAGC_OPTION_INT)
            snprintf(text, n_bytes, "%lld", (long long)*(const int64_t *)value);
        else
            shortest_real(real, text, n_bytes);
        break;
    }
    case TAGC_OPTION_TEXT: {
        const char *held = *(const char *const *)value;
        snprintf(text, n_bytes, "%s", held ? held : "");
        break;
    }
    case TAGC_OPTION_FLAG:
    case TAGC_OPTION_CHOICE:
        choice_word(words_of(option), *(const int *)value, text, n_bytes);
        break;
    }
}

static char *trim(char *text) {
    while (isspace((unsigned char)*text)) text++;
    size_t n = strlen(text);
    while (n > 0 && isspace((unsigned char)text[n - 1])) text[--n] = '\0';
    return text;
}

tagc_status tagc_options_take(tagc_parsed *parsed, const char *name, const char *value, const char *where) {
    int option = tagc_options_find(parsed->command, name);
    if (option < 0) return unknown_option(parsed->command, name, where);
    char **grown = realloc(parsed->owned, ((size_t)parsed->n_owned + 1) * sizeof *grown);
    if (grown) parsed->owned = grown;
    char *copy = grown ? strdup(value) : NULL;
    if (!copy) return tagc_fail(TAGC_ERR_MEMORY, "out of memory while reading options");
    parsed->owned[parsed->n_owned++] = copy;
    parsed->given[option] = 1;
    return tagc_options_set(parsed->command, parsed->values, option, copy, where);
}

static tagc_status parse_config_line(tagc_parsed *parsed, char *line, const char *where) {
    /* A '#' inside a value stays: only one at the start of the line or behind a space opens a comment. */
    for (char *c = line; *c; c++)
        if (*c == '#' && (c == line || isspace((unsigned char)c[-1]))) {
            *c = '\0';
            break;
        }
    line = trim(line);
    if (!*line) return TAGC_OK;
    char *equals = strchr(line, '=');
    if (!equals)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s\"%.80s\" is not of the form name = value", where, line);
    *equals = '\0';
    char *name = trim(line);
    if (strcmp(name, "config") == 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%sa config file cannot name another one", where);
    return tagc_options_take(parsed, name, trim(equals + 1), where);
}

/* text (n_bytes) has room for one byte more. */
static tagc_status parse_config_text(tagc_parsed *parsed, const char *path, char *text, size_t n_bytes) {
    char where[512], *line = text, *end = text + n_bytes;
    if (n_bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0)
        line += 3; /* what some editors begin UTF-8 with */
    for (int number = 1; line < end; number++) {
        char *line_end = memchr(line, '\n', (size_t)(end - line));
        if (!line_end) line_end = end;
        snprintf(where, sizeof where, "%.400s line %d: ", path, number);
        if (memchr(line, '\0', (size_t)(line_end - line)))
            return tagc_fail(TAGC_ERR_ARGUMENT, "%sa zero byte; this is not a text file", where);
        *line_end = '\0';
        TAGC_TRY(parse_config_line(parsed, line, where));
        line = line_end + 1;
    }
    return TAGC_OK;
}

/* It may be a pipe. */
static tagc_status parse_config(tagc_parsed *parsed, const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) return tagc_fail(TAGC_ERR_ARGUMENT, "--config %s: %s", path, strerror(errno));
    char *text = malloc(MOST_CONFIG_BYTES + 1);
    errno = 0;
    size_t n_bytes = text ? fread(text, 1, MOST_CONFIG_BYTES + 1, file) : 0;
    tagc_status status;
    if (!text)
        status = tagc_fail(TAGC_ERR_MEMORY, "--config %s: no memory to read it", path);
    else if (ferror(file))
        status = tagc_fail(TAGC_ERR_ARGUMENT, "--config %s: %s", path, strerror(errno));
    else if (n_bytes > MOST_CONFIG_BYTES)
        status = tagc_fail(TAGC_ERR_ARGUMENT, "--config %s: more than %d bytes; this is not a config file",
                           path, MOST_CONFIG_BYTES);
    else
        status = parse_config_text(parsed, path, text, n_bytes);
    free(text);
    fclose(file);
    return status;
}

/* One "--..." of the command line; *i skips a value that follows it. */
static tagc_status parse_option(tagc_parsed *parsed, int argc, char **argv, int *i) {
    const tagc_command *command = parsed->command;
    char name[NAME_BYTES];
    const char *word = argv[*i] + 2, *value = NULL;
    size_t n = strcspn(word, "=");
    if (n >= sizeof name) return tagc_fail(TAGC_ERR_ARGUMENT, "unknown option %.80s", argv[*i]);
    memcpy(name, word, n);
    name[n] = '\0';
    if (word[n] == '=') value = word + n + 1;
    int option = tagc_options_find(command, name);
    if (option < 0 && strncmp(name, "no-", 3) == 0) {
        option = tagc_options_find(command, name + 3);
        if (option >= 0 && (command->options[option].type != TAGC_OPTION_FLAG || value)) option = -1;
        value = "no";
    }
    if (option < 0) return unknown_option(command, name, "");
    const tagc_option *row = &command->options[option];
    /* What the name alone means; NULL: it needs a value. */
    const char *bare = row->type == TAGC_OPTION_FLAG   ? "yes"
                       : row->type == TAGC_OPTION_TEXT ? row->words
                                                       : NULL;
    int takes_next = row->type != TAGC_OPTION_FLAG && *i + 1 < argc && !(bare && argv[*i + 1][0] == '-');
    if (!value) value = takes_next ? argv[++*i] : bare;
    if (!value)
        return tagc_fail(TAGC_ERR_ARGUMENT, "--%s needs a value: --%s %s", name, name,
                         row->value ? row->value : "VALUE");
    parsed->given[option] = 2;
    return tagc_options_set(command, parsed->values, option, value, "");
}

static tagc_status parse_words(tagc_parsed *parsed, int argc, char **argv) {
    int only_words = 0;
    for (int i = 0; i < argc; i++) {
        if (!only_words && strcmp(argv[i], "--") == 0) {
            only_words = 1;
        } else if (!only_words && strncmp(argv[i], "--", 2) == 0) {
            TAGC_TRY(parse_option(parsed, argc, argv, &i));
        } else if (!only_words && argv[i][0] == '-' && argv[i][1]) {
            return tagc_fail(TAGC_ERR_ARGUMENT, "unknown option %.64s; options start with two dashes",
                             argv[i]);
        } else if (!parsed->command->positionals) {
            return tagc_fail(TAGC_ERR_ARGUMENT, "\"%.80s\" is not an option; tagc %s takes options only",
                             argv[i], parsed->command->name);
        } else {
            parsed->words[parsed->n_words++] = argv[i];
        }
    }
    return TAGC_OK;
}

/* The last --config of the command line, read first so that the command line wins. */
static const char *config_path(const tagc_parsed *parsed, int argc, char **argv) {
    const char *path = NULL;
    if (tagc_options_find(parsed->command, "config") < 0) return NULL;
    for (int i = 0; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strncmp(argv[i], "--config=", 9) == 0) path = argv[i] + 9;
        if (strcmp(argv[i], "--config") == 0 && i + 1 < argc) path = argv[i + 1];
    }
    return path;
}

static tagc_status check_needs(const tagc_parsed *parsed) {
    const tagc_command *command = parsed->command;
    char name[NAME_BYTES], text[2];
    int n = 0;
    for (const char *at = command->needs; at && sscanf(at, " %63s%n", name, &n) == 1; at += n) {
        int row = tagc_options_find(command, name);
        tagc_options_get(command, parsed->values, row, text, sizeof text);
        if (!*text)
            return tagc_fail(TAGC_ERR_ARGUMENT, "--%s %s is needed", name, command->options[row].value);
    }
    if (command->positionals && parsed->n_words == 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s", command->positionals);
    return TAGC_OK;
}

tagc_status tagc_options_parse(const tagc_command *command, int argc, char **argv, void *values,
                               tagc_parsed *parsed) {
    *parsed = (tagc_parsed){.command = command, .values = values, .argc = argc, .argv = argv};
    for (int i = 0; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) parsed->help = TAGC_HELP_SHORT;
        if (strcmp(argv[i], "--help-all") == 0) parsed->help = TAGC_HELP_ALL;
        if (strcmp(argv[i], "--help-table") == 0) parsed->help = TAGC_HELP_TABLE;
    }
    if (parsed->help) return TAGC_OK;
    for (int i = 0; i < command->n_options; i++) {
        const char *initial = command->options[i].initial;
        TAGC_TRY(tagc_options_set(command, values, i, initial ? initial : "", "default of "));
    }
    parsed->words = calloc((size_t)argc + 1, sizeof *parsed->words);
    if (!parsed->words) return tagc_fail(TAGC_ERR_MEMORY, "out of memory while reading options");
    const char *config = config_path(parsed, argc, argv);
    if (config) TAGC_TRY(parse_config(parsed, config));
    TAGC_TRY(parse_words(parsed, argc, argv));
    return check_needs(parsed);
}

void tagc_options_destroy(tagc_parsed *parsed) {
    for (int i = 0; i < parsed->n_owned; i++) free(parsed->owned[i]);
    free(parsed->owned);
    free(parsed->words);
    *parsed = (tagc_parsed){0};
}
