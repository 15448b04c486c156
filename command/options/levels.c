/* The option --levels. */
#include "options/presets.h"
#include "options/train_options.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HOSTS, RANKS, N_LEVELS };
static const char *const names[N_LEVELS] = {"hosts", "ranks"};

#define FORM "allowed: hosts=N, and ranks=N of a host, as \"hosts=2,ranks=4\""

/* counts (N_LEVELS): 0 where a level is not named. */
static tagc_status read_levels(const char *text, long counts[N_LEVELS]) {
    int level = -1;
    for (const char *at = text;; at++) {
        const char *equals = strchr(at, '=');
        size_t n_name = equals ? (size_t)(equals - at) : 0;
        int named = level + 1;
        while (named < N_LEVELS && (strlen(names[named]) != n_name || strncmp(names[named], at, n_name) != 0))
            named++;
        char *end = NULL;
        long count = named < N_LEVELS ? strtol(equals + 1, &end, 10) : 0;
        if (named == N_LEVELS || equals[1] < '0' || equals[1] > '9' || (*end != ',' && *end != '\0') ||
            count < 1 || count > TAGC_TRAIN_MAX_RANKS)
            return tagc_fail(TAGC_ERR_ARGUMENT, "--levels is \"%.60s\", " FORM ", each from 1 to %d", text,
                             TAGC_TRAIN_MAX_RANKS);
        counts[level = named] = count;
        at = end;
        if (*at == '\0') break;
    }
    if (counts[HOSTS] == 0) return tagc_fail(TAGC_ERR_ARGUMENT, "--levels is \"%.60s\", " FORM, text);
    return TAGC_OK;
}

/* What the levels say, unless another option says something else. */
static tagc_status set(tagc_parsed *parsed, const char *levels, const char *name, const char *value) {
    char given[64];
    int row = tagc_options_find(parsed->command, name);
    tagc_options_get(parsed->command, parsed->values, row, given, sizeof given);
    int is_own = parsed->given[row] >= parsed->given[tagc_options_find(parsed->command, "levels")];
    if (parsed->given[row] && is_own && strcmp(given, value) != 0) /* a preset or a config file gives way */
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--%s is %s, and by --levels %.60s it is %s: leave one of them out", name, given,
                         levels, value);
    parsed->given[row] = 1;
    return tagc_options_set(parsed->command, parsed->values, row, value, "");
}

tagc_status tagc_levels_apply(const char *text, int n_ranks, tagc_parsed *parsed) {
    const tagc_train_options *options = parsed->values;
    long counts[N_LEVELS] = {0};
    char per_host[24], all[24];
    TAGC_TRY(read_levels(text, counts));
    long n_inner = counts[RANKS] ? counts[RANKS] : 1, n = counts[HOSTS] * n_inner;
    if (n_ranks > 0 && n != n_ranks)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--levels is \"%.60s\", that makes %ld ranks, but this run has %d", text, n,
                         n_ranks);
    snprintf(per_host, sizeof per_host, "%ld", n_inner);
    snprintf(all, sizeof all, "%ld", n);
    TAGC_TRY(set(parsed, text, "ranks", all));
    if (n_inner == 1) return TAGC_OK;
    TAGC_TRY(set(parsed, text, "ranks-per-host", per_host));
    if (options->sharding == TAGC_SHARD_HYBRID || options->resume) return TAGC_OK;
    return set(parsed, text, "two-level", "yes");
}
