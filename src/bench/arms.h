/* Arms: named ways to train the same model, which a bench compares.
 *
 *   ARM = NAME[+option=value]...     NAME is a preset (options/presets.h), or a config file of tagc train (it has a slash or ends
 *                                    in .conf)
 *
 * Example: "fsdp,packed,packed+sparsity=0.9,configs/mine.conf". `option` is any option of tagc train. */
#ifndef TAGC_BENCH_ARMS_H
#define TAGC_BENCH_ARMS_H

#include "options/train_options.h"

enum { TAGC_ARM_NAME_BYTES = 96 };

typedef struct tagc_arm {
    char name[TAGC_ARM_NAME_BYTES]; /* as in the list; of a config file without folder and ending */
    tagc_train_options options;     /* its texts live as long as the arm */
    tagc_parsed parsed;             /* private */
    char **words;                   /* private */
    int n_words;
} tagc_arm;

/* list: ARMs, separated by commas. base (n_base): words of tagc train's command line, such as "--model=tiny", for every
 * arm. They override its NAME but not its +options. Two arms of one name are refused. On failure *out is NULL. */
tagc_status tagc_arms_parse(const char *list, int n_base, const char *const *base, tagc_arm **out,
                            int *n_out);
void tagc_arms_destroy(tagc_arm *arms, int n);

/* A row of tagc train in the table of another command, whose options begin with a tagc_train_options, and whether the arms
 * get its value. */
typedef enum tagc_to_arms {
    TAGC_TO_ARMS_GIVEN = 0,
    TAGC_TO_ARMS_ALWAYS = 1,
    TAGC_TO_ARMS_NEVER = 2
} tagc_to_arms;
typedef struct tagc_shared_row {
    const char *section, *name;
    const char *initial, *help; /* NULL: as in tagc train */
    tagc_to_arms to_arms;
} tagc_shared_row;

/* rows (n_own + n_shared): own rows first. */
void tagc_arms_rows(const tagc_option *own, int n_own, const tagc_shared_row *shared, int n_shared,
                    tagc_option *rows);

/* tagc_arms_parse with the base that the shared rows of `parsed` give. It refuses an arm that sets a model other than
 * `model`. */
tagc_status tagc_arms_read(const char *list, const tagc_parsed *parsed, const tagc_shared_row *shared,
                           int n_shared, const tagc_gpt2_config *model, tagc_arm **out, int *n_out);

#endif
