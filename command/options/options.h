/* Options of a command as one table: what parses them, checks them, explains them and stores them with a
 * checkpoint all reads the same rows, so that help and behaviour cannot drift apart.
 *
 * Values live in a struct of the command's; a row says where. The command line wins over the config file,
 * which wins over the table's defaults. */
#ifndef TAGC_OPTIONS_OPTIONS_H
#define TAGC_OPTIONS_OPTIONS_H

#include "core/status.h"
#include "tagc/tagc.h"
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef enum tagc_option_type {
    TAGC_OPTION_INT,   /* int64_t */
    TAGC_OPTION_REAL,  /* double */
    TAGC_OPTION_TEXT,  /* const char * */
    TAGC_OPTION_FLAG,  /* int; --name and --no-name */
    TAGC_OPTION_CHOICE /* int: the number of the word */
} tagc_option_type;

/* What a rank or a resumed run may have otherwise than the others or the run before. */
typedef enum tagc_option_role {
    TAGC_ROLE_FREE = 0,  /* the same on all ranks; may change on resume, with a note */
    TAGC_ROLE_FIXED = 1, /* the same on all ranks; what a checkpoint was made with stays */
    TAGC_ROLE_PLACE = 2, /* may differ between ranks (paths, arms); on resume the checkpoint's unless given */
    TAGC_ROLE_RUN = 3,   /* the same on all ranks; of this start of the run, never the checkpoint's */
    TAGC_ROLE_LOCAL = 4  /* of this process; neither compared nor taken from a checkpoint */
} tagc_option_role;

typedef struct tagc_option {
    const char *section; /* heading in the help; NULL: as the row above */
    const char *name;
    tagc_option_type type;
    tagc_option_role role;
    size_t offset; /* of the value in the command's struct */
    double min, max;
    /* CHOICE: "full/zero3|grad/zero2", aliases behind slashes. INT, REAL: a word for 0, or as "auto=-1" for another number.
     * TEXT: what a bare --name means. */
    const char *words;
    const char *initial; /* default; NULL: none */
    const char *value;   /* what the help calls the value */
    const char *help;
    /* NULL, or what the option needs in order to have an effect: returns NULL where it has one, else the rest of "note:
     * --NAME is for ...". facts: what the command knows when it has begun. */
    const char *(*lacks)(const void *facts);
} tagc_option;

typedef struct tagc_command {
    const char *name, *summary;
    const char *usage;    /* what follows "tagc <name>" */
    const char *examples; /* lines for the end of the help */
    const char *common;   /* NULL, or the options of the short help: names with spaces between */
    const tagc_option *options;
    int n_options;           /* at most TAGC_MAX_OPTIONS */
    const char *needs;       /* NULL, or the options that must be given: names with spaces between */
    const char *positionals; /* NULL, or it takes words that are no options: the failure if there are none */
    void (*print_more)(FILE *out); /* NULL, or: prints what follows the long help */
    /* NULL, or: replaces every "auto" by its value, which depends on the other options */
    void (*resolve)(void *values);
} tagc_command;

enum { TAGC_MAX_OPTIONS = 96, TAGC_OPTION_WORD_BYTES = 32 };

typedef enum tagc_help {
    TAGC_HELP_NONE = 0,
    TAGC_HELP_SHORT = 1, /* --help, -h */
    TAGC_HELP_ALL = 2,   /* --help-all */
    TAGC_HELP_TABLE = 3  /* --help-table */
} tagc_help;

typedef struct tagc_parsed {
    const tagc_command *command;
    void *values; /* the command's struct */
    int argc;
    char **argv;                     /* (argc) behind the command's name */
    uint8_t given[TAGC_MAX_OPTIONS]; /* 1: by the config file, 2: on the command line */
    const char **words;              /* (n_words) positionals */
    int n_words;
    char **owned; /* (n_owned) texts of the config file */
    int n_owned;
    int help; /* a tagc_help; nothing else was checked then */
} tagc_parsed;

/* argv (argc) starts behind the command's name and must outlive the result. TAGC_ERR_ARGUMENT names option,
 * value and range (and the line of a config file). _destroy after success and failure alike. */
tagc_status tagc_options_parse(const tagc_command *command, int argc, char **argv, void *values,
                               tagc_parsed *parsed);
void tagc_options_destroy(tagc_parsed *parsed);

/* Sets one option as a config file does: keeps a copy of `value`, and the option counts as given. `where` says in an error
 * where it came from. */
tagc_status tagc_options_take(tagc_parsed *parsed, const char *name, const char *value, const char *where);

/* Sets one option from a text; `where` says in an error where the text came from. */
tagc_status tagc_options_set(const tagc_command *command, void *values, int option, const char *text,
                             const char *where);
/* Of an INT or REAL with a word: the word, and the number that it means. */
double tagc_option_word(const tagc_option *option, char word[TAGC_OPTION_WORD_BYTES]);
int tagc_options_find(const tagc_command *command, const char *name); /* -1 when there is none */
int tagc_options_given(const tagc_parsed *parsed, const char *name);
/* For suggestions: 1 if `word` is like `name`, and by fewer edits than *least, which it then lowers. *least begins as -1. */
int tagc_options_is_nearer(const char *name, const char *word, int *least);

/* The value as text that _set reads back; "" for an absent text. */
void tagc_options_get(const tagc_command *command, const void *values, int option, char *text,
                      size_t n_bytes);

/* The common options, or where the command names none, or with `all`, every option and the examples. */
void tagc_options_help(const tagc_command *command, int all, FILE *out);
/* Every option, by sections, and the examples. */
void tagc_options_explain(const tagc_command *command, FILE *out);
/* What a help says of an option. */
typedef struct tagc_option_text {
    char value[160]; /* "N"; of a CHOICE "full|grad|none" */
    char usage[240]; /* "--steps N" */
    char help[1200]; /* brief: the first statement, and the default; else all, with the range */
} tagc_option_text;

void tagc_option_text_of(const tagc_option *option, int brief, tagc_option_text *out);
/* One row per option: name, type, range, default, with tabs between; for scripts and completion. */
void tagc_options_table(const tagc_command *command, FILE *out);

/* ---- ranks that were started with different options would train different models ---- */

/* Collective: the same TAGC_ERR_MISMATCH on all ranks, naming the first option that differs and both values.
 */
tagc_status tagc_agree_options(tagc_comm *comm, const tagc_command *command, const void *values);

#endif
