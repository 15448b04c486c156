/* Options of tagc train that set others. Presets are named ways to shard and exchange, as words of tagc train: what --preset
 * takes, what arms of tagc bench begin with, and what a run on several ranks does unless it is asked for something else. */
#ifndef TAGC_OPTIONS_PRESETS_H
#define TAGC_OPTIONS_PRESETS_H

#include "options/options.h"

enum { TAGC_PRESET_LIST_BYTES = 512 };

/* Of several ranks: every leg compressed. */
#define TAGC_PRESET_DEFAULT "all-legs"

/* Words of tagc train with spaces between, or NULL. name: n characters. */
const char *tagc_preset_words(const char *name, size_t n);
void tagc_preset_list(char text[TAGC_PRESET_LIST_BYTES]); /* the names, with commas between */
void tagc_preset_print(FILE *out);                        /* under "Arms:" a line for each */

/* Options of tagc train that `parsed` was not given get the preset's values, and count as given. TAGC_ERR_ARGUMENT where
 * there is no such preset. */
tagc_status tagc_preset_apply(const char *name, tagc_parsed *parsed);

/* If `parsed` was given neither a preset nor --sharding, --gather, --wire, --compress or --exchange: puts the options of
 * TAGC_PRESET_DEFAULT that were not given into `values`. Returns whether it did. */
int tagc_preset_apply_default(const tagc_parsed *parsed, void *values);

/* ---- --levels: hosts and ranks by name, as the options that follow from them ---- */

/* Sets --ranks, --ranks-per-host and --two-level in `parsed`, of tagc train, where the levels say them, and counts them as given.
 * n_ranks: of the run; 0 if the levels decide. TAGC_ERR_ARGUMENT if the text is wrong, another option says something else, or
 * the counts do not give n_ranks. */
tagc_status tagc_levels_apply(const char *text, int n_ranks, tagc_parsed *parsed);

#endif
