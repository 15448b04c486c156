/* Help and the machine-readable list of options, printed from the table that parses them. */
#include "options/options.h"
#include <string.h>

enum { HELP_COLUMN = 31, LINE_BYTES = 100 };

/* Words of `text` from column HELP_COLUMN on, broken at LINE_BYTES. `column` is the current column. */
static void print_wrapped(FILE *out, const char *text, int column) {
    if (column >= HELP_COLUMN - 1) {
        fputc('\n', out);
        column = 0;
    }
    fprintf(out, "%*s", HELP_COLUMN - column, "");
    column = HELP_COLUMN;
    while (*text) {
        int n = (int)strcspn(text, " ");
        if (column > HELP_COLUMN && column + n > LINE_BYTES) {
            fprintf(out, "\n%*s", HELP_COLUMN, "");
            column = HELP_COLUMN;
        }
        fprintf(out, "%.*s", n, text);
        text += n;
        column += n;
        if (*text == ' ') {
            text++;
            if (column + 1 + (int)strcspn(text, " ") <= LINE_BYTES) fputc(' ', out);
            column++;
        }
    }
    fputc('\n', out);
}

/* "a/b|c" without the aliases. */
static void main_words(const char *words, char *text, size_t n_bytes) {
    size_t used = 0;
    int in_alias = 0;
    for (; *words && used + 1 < n_bytes; words++) {
        if (*words == '/') in_alias = 1;
        if (*words == '|') in_alias = 0;
        if (!in_alias) text[used++] = *words;
    }
    text[used] = '\0';
}

static void range_text(const tagc_option *option, char *text, size_t n_bytes) {
    char word[TAGC_OPTION_WORD_BYTES];
    switch (option->type) {
    case TAGC_OPTION_INT:
    case TAGC_OPTION_REAL:
        tagc_option_word(option, word);
        snprintf(text, n_bytes, "%s%s%.15g to %.15g", word, *word ? " or " : "", option->min, option->max);
        break;
    case TAGC_OPTION_CHOICE:
        snprintf(text, n_bytes, "%s", option->words);
        break;
    case TAGC_OPTION_FLAG:
        snprintf(text, n_bytes, "yes|no");
        break;
    case TAGC_OPTION_TEXT:
        snprintf(text, n_bytes, "text");
        break;
    }
}

void tagc_option_text_of(const tagc_option *option, int brief, tagc_option_text *out) {
    char range[160];
    int is_number = option->type == TAGC_OPTION_INT || option->type == TAGC_OPTION_REAL;
    if (option->type == TAGC_OPTION_CHOICE)
        main_words(option->words, out->value, sizeof out->value);
    else
        snprintf(out->value, sizeof out->value, "%s", option->value ? option->value : "");
    if (option->type == TAGC_OPTION_FLAG)
        snprintf(out->usage, sizeof out->usage, "--[no-]%s", option->name);
    else if (option->type == TAGC_OPTION_TEXT && option->words)
        snprintf(out->usage, sizeof out->usage, "--%s [%s]", option->name, out->value);
    else
        snprintf(out->usage, sizeof out->usage, "--%s %s", option->name, out->value);
    range_text(option, range, sizeof range);
    is_number &= !brief;
    const char *initial = option->type == TAGC_OPTION_FLAG ? NULL : option->initial;
    if (brief)
        snprintf(out->help, sizeof out->help, "%.*s%s%s%s", (int)strcspn(option->help, ";"), option->help,
                 initial ? " (default " : "", initial ? initial : "", initial ? ")" : "");
    else
        snprintf(out->help, sizeof out->help, "%s%s%s%s%s%s%s", option->help,
                 is_number || initial ? " (" : "", is_number ? range : "", is_number && initial ? "; " : "",
                 initial ? "default " : "", initial ? initial : "", is_number || initial ? ")" : "");
}

static void print_option(FILE *out, const tagc_option *option, int brief) {
    tagc_option_text text;
    tagc_option_text_of(option, brief, &text);
    int column = fprintf(out, "  %s", text.usage);
    print_wrapped(out, text.help, column);
}

static void print_common(const tagc_command *command, FILE *out) {
    char name[64];
    fputc('\n', out);
    for (const char *at = command->common; *at; at += strspn(at, " ")) {
        size_t n = strcspn(at, " ");
        snprintf(name, sizeof name, "%.*s", (int)n, at);
        at += n;
        print_option(out, &command->options[tagc_options_find(command, name)], 1);
    }
    fprintf(out, "\ntagc %s --help-all explains all %d options and gives examples.\n", command->name,
            command->n_options);
}

void tagc_options_explain(const tagc_command *command, FILE *out) {
    for (int i = 0; i < command->n_options; i++) {
        if (command->options[i].section) fprintf(out, "\n%s\n", command->options[i].section);
        print_option(out, &command->options[i], 0);
    }
    if (command->examples) fprintf(out, "\nExamples\n%s", command->examples);
}

void tagc_options_help(const tagc_command *command, int all, FILE *out) {
    fprintf(out, "tagc %s: %s\n\nusage: tagc %s %s\n", command->name, command->summary, command->name,
            command->usage);
    if (command->common && !all) {
        print_common(command, out);
        return;
    }
    tagc_options_explain(command, out);
    if (command->print_more) command->print_more(out);
}

void tagc_options_table(const tagc_command *command, FILE *out) {
    static const char *const types[] = {"int", "real", "text", "flag", "choice"};
    for (int i = 0; i < command->n_options; i++) {
        const tagc_option *option = &command->options[i];
        char range[256];
        range_text(option, range, sizeof range);
        fprintf(out, "%s\t%s\t%s\t%s\n", option->name, types[option->type], range,
                option->initial ? option->initial : "");
    }
}
