/* tagc help --man, --bash and --zsh: a man page and completions, from the tables that parse the options. */
#ifndef TAGC_CLI_MANUAL_H
#define TAGC_CLI_MANUAL_H

#include "cli/commands.h"

/* Returns 0 if `word` is none of the three. */
int tagc_manual_print(const char *word, const tagc_entry *const entries[], int n_entries, FILE *out);

#endif
