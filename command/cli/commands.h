/* The commands. */
#ifndef TAGC_CLI_COMMANDS_H
#define TAGC_CLI_COMMANDS_H

#include "options/options.h"

typedef struct tagc_entry {
    const tagc_command *command;
    size_t n_value_bytes;            /* of the struct of its values, which begins as zeros */
    int (*run)(tagc_parsed *parsed); /* returns the exit code */
    void (*prepare)(void);           /* NULL, or: completes the rows of the command */
} tagc_entry;

extern const tagc_entry tagc_entry_train, tagc_entry_bench, tagc_entry_compare, tagc_entry_plan,
    tagc_entry_eval, tagc_entry_generate, tagc_entry_data, tagc_entry_export, tagc_entry_info;

/* A row that several commands have. */
#define TAGC_ROW_CONFIG(at)                                                                                  \
    {                                                                                                        \
        NULL, "config", TAGC_OPTION_TEXT, TAGC_ROLE_LOCAL, at, 0, 0, NULL, NULL, "FILE",                     \
            "lines of name = value, # before comments; the command line wins"                                \
    }

/* Parses the words, calls the command's `run` and returns its exit code; or prints help, or what is wrong with the words. */
int tagc_entry_run(const tagc_entry *entry, int argc, char **argv);

/* tagc help --man, --bash and --zsh: a man page and completions, from the tables that parse the options. Returns 0 if `word` is none
 * of the three. */
int tagc_manual_print(const char *word, const tagc_entry *const entries[], int n_entries, FILE *out);

/* Prints the last failure as one of usage and returns its exit code. */
int tagc_command_refuse(const tagc_command *command);

/* The exit code of a command without ranks. Prints the last failure if `status` is one. */
int tagc_command_end(tagc_status status);

/* Fails if the folder has one of these files already; the remedy that it names is --force. */
tagc_status tagc_command_keep(const char *dir, const char *file, const char *other_file);

#endif
