/* Arms: named ways to train the same model, which a bench compares.
 *
 *   ARM = NAME[+option=value]...     NAME is a preset (options/presets.h), or a config file of tagc train (it has a slash or ends
 *                                    in .conf)
 *
 * Example: "fsdp,packed,packed+sparsity=0.9,mine.conf". `option` is any option of tagc train. */
#ifndef TAGC_BENCH_ARMS_H
#define TAGC_BENCH_ARMS_H

#include "options/train_options.h"

enum { TAGC_ARM_NAME_BYTES = 96, TAGC_ARMS_MAX_SHARED = 32 };

typedef struct tagc_arm {
    char name[TAGC_ARM_NAME_BYTES]; /* as in the list; of a config file without folder and ending */
    tagc_train_options options;     /* its texts live as long as the arm */
    tagc_parsed parsed;             /* private */
    char *config;                   /* private */
} tagc_arm;

/* Writes bench_rows (n_bench_rows), then those that tagc bench shares with tagc train, at most TAGC_ARMS_MAX_SHARED, to rows. Returns their
 * number. */
int tagc_arms_rows(const tagc_option *bench_rows, int n_bench_rows, tagc_option *rows);

/* list: ARMs, separated by commas. Shared rows of `parsed` override an arm's NAME but not its +options; NULL: none. Two arms
 * of one name are refused, and an arm that sets a model other than `model`, unless that is NULL. On failure *out is NULL. */
tagc_status tagc_arms_read(const char *list, const tagc_parsed *parsed, const tagc_gpt2_config *model,
                           tagc_arm **out, int *n_out);
void tagc_arms_destroy(tagc_arm *arms, int n);

#endif
