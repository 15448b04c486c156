/* What `make install` puts beside the command: tagc.1, and completions of bash and zsh. Nobody writes them by hand, so they list
 * what the command takes. */
#include "cli/commands.h"

#include "tagc/tagc.h"
#include <stdlib.h>
#include <string.h>

/* With all its rows. */
static const tagc_command *prepared(const tagc_entry *entry) {
    if (entry->prepare) entry->prepare();
    return entry->command;
}

/* ---- tagc.1 ---- */

/* Text as roff prints it: a hyphen is a minus that can be copied, and no line is taken for a request. */
static void put_roff(FILE *out, const char *text) {
    if (*text == '.' || *text == '\'') fputs("\\&", out);
    for (; *text; text++) {
        if (*text == '\\')
            fputs("\\e", out);
        else if (*text == '-')
            fputs("\\-", out);
        else
            fputc(*text, out);
        if (*text == '\n' && (text[1] == '.' || text[1] == '\'')) fputs("\\&", out);
    }
}

static void put_option_roff(FILE *out, const tagc_option *option) {
    tagc_option_text text;
    tagc_option_text_of(option, 0, &text);
    fputs(".TP\n\\fB", out);
    put_roff(out, text.usage);
    fputs("\\fR\n", out);
    put_roff(out, text.help);
    fputc('\n', out);
}

static void put_table_roff(FILE *out, const tagc_command *table) {
    for (int i = 0; i < table->n_options; i++) {
        if (table->options[i].section) {
            fputs(".SS ", out);
            put_roff(out, table->options[i].section);
            fputc('\n', out);
        }
        put_option_roff(out, &table->options[i]);
    }
    if (!table->examples) return;
    fputs(".SS Examples\n.nf\n", out);
    put_roff(out, table->examples);
    fputs(".fi\n", out);
}

static void put_command_roff(FILE *out, const tagc_entry *entry) {
    const tagc_command *command = prepared(entry);
    fprintf(out, ".SH TAGC ");
    for (const char *c = entry->command->name; *c; c++) fputc(*c >= 'a' && *c <= 'z' ? *c - 32 : *c, out);
    fputs("\n.nf\n\\fBtagc ", out);
    put_roff(out, entry->command->name);
    fputs("\\fR ", out);
    put_roff(out, entry->command->usage);
    fputs("\n.fi\n.PP\n", out);
    put_roff(out, entry->command->summary);
    fputs(".\n", out);
    put_table_roff(out, command);
}

static void print_man(const tagc_entry *const entries[], int n, FILE *out) {
    fprintf(out, ".TH TAGC 1 \"\" \"tagc %s\" \"User Commands\"\n", tagc_version());
    fputs(".SH NAME\ntagc \\- sharded training of GPT\\-2 with compressed gradient exchange\n"
          ".SH SYNOPSIS\n.B tagc\n.I COMMAND\n[options]\n"
          ".SH DESCRIPTION\nRanks are threads of one process with \\fB\\-\\-ranks\\fR \\fIN\\fR, or "
          "processes under"
          " mpirun.\n\\fBtagc \\fICOMMAND\\fB \\-\\-help\\fR explains a command's usual options,"
          " \\fB\\-\\-help\\-all\\fR all.\n.SH COMMANDS\n",
          out);
    for (int i = 0; i < n; i++) {
        fprintf(out, ".TP\n.B %s\n", entries[i]->command->name);
        put_roff(out, entries[i]->command->summary);
        fputc('\n', out);
    }
    for (int i = 0; i < n; i++) put_command_roff(out, entries[i]);
    fputs(".SH EXIT STATUS\n0; 1 for a failure; 2 for a mistake in the command; 130 if a signal ended it.\n"
          ".SH ENVIRONMENT\n"
          ".TP\n.B TAGC_CPU\nThe processor's level: scalar, neon, avx2 or avx512. Without it the best that "
          "the processor has.\n"
          ".TP\n.B OPENBLAS_NUM_THREADS\nThreads of a matrix product, if \\-\\-blas\\-threads is not given.\n"
          ".TP\n.B OPENBLAS_CORETYPE\nThe kernel of matrix products. Without it OpenBLAS chooses one, and "
          "tagc a better one"
          " where OpenBLAS does not know the processor.\n",
          out);
}

/* ---- completions ---- */

/* "full|grad|none" with blanks between. */
static void put_choices(FILE *out, const char *words) {
    for (; *words; words++) fputc(*words == '|' ? ' ' : *words, out);
}

static void print_bash_command(const tagc_entry *entry, FILE *out) {
    const tagc_command *command = prepared(entry);
    fprintf(out, "    %s)\n        case $before in\n", entry->command->name);
    for (int i = 0; i < command->n_options; i++) {
        const tagc_option *option = &command->options[i];
        tagc_option_text text;
        if (option->type == TAGC_OPTION_FLAG) continue;
        tagc_option_text_of(option, 1, &text);
        fprintf(out, "        --%s) words='", option->name);
        if (option->type == TAGC_OPTION_CHOICE) put_choices(out, text.value);
        fputs("' ;;\n", out);
    }
    fputs("        *) words='--help --help-all", out);
    for (int i = 0; i < command->n_options; i++) {
        const char *name = command->options[i].name;
        fprintf(out, " --%s", name);
        if (command->options[i].type == TAGC_OPTION_FLAG) fprintf(out, " --no-%s", name);
    }
    fputs("' ;;\n        esac\n        ;;\n", out);
}

/* Where no word fits, -o default completes names of files. */
static void print_bash(const tagc_entry *const entries[], int n, FILE *out) {
    fputs("# Completion of tagc for bash, made by `tagc help --bash`.\n"
          "_tagc() {\n"
          "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} "
          "command=${COMP_WORDS[1]} words=\n"
          "    [ \"$COMP_CWORD\" -gt 1 ] || command=\n"
          "    case $command in\n"
          "    '' | help) words='",
          out);
    for (int i = 0; i < n; i++) fprintf(out, "%s ", entries[i]->command->name);
    fputs("help version' ;;\n", out);
    for (int i = 0; i < n; i++) print_bash_command(entries[i], out);
    fputs("    esac\n"
          "    COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
          "}\n"
          "complete -o default -F _tagc tagc\n",
          out);
}

/* Text within '...' of a description of zsh's _arguments or _describe. */
static void put_zsh(FILE *out, const char *text) {
    for (; *text; text++) {
        if (*text == '\'')
            fputs("'\\''", out);
        else if (strchr("[]:\\", *text))
            fprintf(out, "\\%c", *text);
        else
            fputc(*text, out);
    }
}

static void print_zsh_option(FILE *out, const tagc_option *option) {
    tagc_option_text text;
    tagc_option_text_of(option, 1, &text);
    int is_flag = option->type == TAGC_OPTION_FLAG;
    for (int is_no = 0; is_no <= is_flag; is_no++) {
        fprintf(out, " \\\n            '--%s%s[", is_no ? "no-" : "", option->name);
        put_zsh(out, text.help);
        fputc(']', out);
        if (option->type == TAGC_OPTION_CHOICE) {
            fputs(":word:(", out);
            put_choices(out, text.value);
            fputc(')', out);
        } else if (!is_flag) {
            fputc(':', out);
            put_zsh(out, text.value);
            fputs(option->type == TAGC_OPTION_TEXT ? ":_files" : ": ", out);
        }
        fputc('\'', out);
    }
}

static void print_zsh(const tagc_entry *const entries[], int n, FILE *out) {
    fputs("#compdef tagc\n# Completion of tagc for zsh, made by `tagc help --zsh`.\n"
          "local -a commands=(",
          out);
    for (int i = 0; i < n; i++) {
        fprintf(out, "\n    '%s:", entries[i]->command->name);
        put_zsh(out, entries[i]->command->summary);
        fputc('\'', out);
    }
    fputs("\n    'help:explains a command'\n    'version:this build'\n)\n"
          "if ((CURRENT == 2)) || [[ $words[2] == help ]]; then\n"
          "    _describe command commands\n"
          "    return\n"
          "fi\n"
          "local command=$words[2]\n"
          "shift words\n"
          "((CURRENT--))\n"
          "case $command in\n",
          out);
    for (int i = 0; i < n; i++) {
        const tagc_command *command = prepared(entries[i]);
        fprintf(out, "%s)\n    _arguments '--help[usual options]' '--help-all[all options]'",
                entries[i]->command->name);
        for (int k = 0; k < command->n_options; k++) print_zsh_option(out, &command->options[k]);
        if (entries[i]->command->positionals) fputs(" '*:file:_files'", out);
        fputs("\n    ;;\n", out);
    }
    fputs("esac\n", out);
}

int tagc_manual_print(const char *word, const tagc_entry *const entries[], int n_entries, FILE *out) {
    if (strcmp(word, "--man") == 0)
        print_man(entries, n_entries, out);
    else if (strcmp(word, "--bash") == 0)
        print_bash(entries, n_entries, out);
    else if (strcmp(word, "--zsh") == 0)
        print_zsh(entries, n_entries, out);
    else
        return 0;
    return 1;
}
