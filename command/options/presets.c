/* Options of tagc train that set others: presets, and --levels. */
#include "options/presets.h"

#include "options/train_options.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name, *words, *what;
} presets[] = {
    {"fsdp", "--sharding=full --compress=none --exchange=dense", "FSDP (ZeRO-3), everything fp32"},
    {"fsdp-bf16", "--sharding=full --compress=none --exchange=dense --wire=bf16 --gather=bf16",
     "FSDP, gradients and parameters as bf16"},
    {"zero2-bf16", "--sharding=grad --compress=none --exchange=dense --wire=bf16 --gather=bf16",
     "ZeRO-2 with a bf16 wire: parameters stay after the forward pass"},
    {"bf16", "--sharding=grad --compress=none --exchange=dense --wire=bf16 --gather=bf16",
     "zero2-bf16 by a shorter name"},
    {"ddp", "--sharding=none --compress=none --exchange=dense", "replicas, gradients all-reduced in fp32"},
    {"tagc-10x", "--sharding=full --exchange=sketch --sparsity=0.9875 --ratio=10",
     "TAGC as published: 10x sketch, 1-bit index, non-attention linear layers"},
    {"tagc-10x-all", "--sharding=full --exchange=sketch --sparsity=0.9875 --ratio=10 --compress=all",
     "the same, every tensor compressed"},
    {"packed", "--sharding=full --exchange=packed --sparsity=0.9875",
     "packed values with the same index, without a sketch"},
    {"packed-bf16", "--sharding=full --exchange=packed --sparsity=0.9875 --wire=bf16 --gather=bf16",
     "packed gradients; parameters and dense gradients as bf16"},
    {"zero2-packed", "--sharding=grad --exchange=packed --sparsity=0.9875 --wire=bf16 --gather=bf16",
     "packed gradients with ZeRO-2; parameters and dense gradients as bf16"},
    {"ddp-packed", "--sharding=none --exchange=packed --sparsity=0.9875", "packed gradients with replicas"},
    {"direct", "--sharding=full --exchange=direct", "FSDP with direct gradients; the rest fp32"},
    {"direct-bf16", "--sharding=full --wire=bf16 --gather=bf16 --exchange=direct",
     "the same; parameters and dense gradients as bf16"},
    {"zero2-direct", "--sharding=grad --wire=bf16 --gather=bf16 --exchange=direct",
     "direct gradients with ZeRO-2; parameters and dense gradients as bf16"},
    {"all-legs", "--sharding=grad --wire=bf16 --gather=delta4 --exchange=direct",
     "direct gradients with ZeRO-2; parameters as 4-bit deltas once per step"},
    {"all-legs-2bit", "--sharding=grad --wire=bf16 --gather=delta2 --exchange=direct",
     "the same with 2-bit deltas"},
    {"ddp-direct", "--sharding=none --wire=bf16 --exchange=direct", "direct gradients with replicas"},
};
enum { N_PRESETS = sizeof presets / sizeof presets[0] };

const char *tagc_preset_words(const char *name, size_t n) {
    for (int i = 0; i < N_PRESETS; i++)
        if (strlen(presets[i].name) == n && strncmp(presets[i].name, name, n) == 0) return presets[i].words;
    return NULL;
}

void tagc_preset_list(char text[TAGC_PRESET_LIST_BYTES]) {
    *text = '\0';
    for (int i = 0; i < N_PRESETS; i++) {
        strcat(text, i ? ", " : "");
        strcat(text, presets[i].name);
    }
}

void tagc_preset_print(FILE *out) {
    fprintf(out, "\nArms:\n");
    for (int i = 0; i < N_PRESETS; i++) fprintf(out, "  %-14s %s\n", presets[i].name, presets[i].what);
}

/* The next "--option=value" of `words`: its row, and the value. Returns the words behind it, NULL behind the last. */
static const char *next_word(const char *words, const tagc_command *command, int *row, char value[64]) {
    char option[64];
    int n = 0;
    if (sscanf(words, " --%63[^=]=%63s%n", option, value, &n) != 2) return NULL;
    *row = tagc_options_find(command, option);
    return words + n;
}

tagc_status tagc_preset_apply(const char *name, tagc_parsed *parsed) {
    char known[TAGC_PRESET_LIST_BYTES], value[64];
    const char *words = tagc_preset_words(name, strlen(name));
    tagc_preset_list(known);
    if (!words) return tagc_fail(TAGC_ERR_ARGUMENT, "--preset is \"%.64s\", allowed: %s", name, known);
    for (int row; (words = next_word(words, parsed->command, &row, value));) {
        if (parsed->given[row]) continue;
        TAGC_TRY(tagc_options_set(parsed->command, parsed->values, row, value, "in the preset, "));
        parsed->given[row] = 1; /* as by a config file */
    }
    return TAGC_OK;
}

int tagc_preset_apply_default(const tagc_parsed *parsed, void *values) {
    static const char *const chosen[] = {"preset", "sharding", "gather", "wire", "compress", "exchange"};
    for (size_t i = 0; i < sizeof chosen / sizeof chosen[0]; i++)
        if (tagc_options_given(parsed, chosen[i])) return 0;
    char value[64];
    const char *words = tagc_preset_words(TAGC_PRESET_DEFAULT, strlen(TAGC_PRESET_DEFAULT));
    for (int row; (words = next_word(words, parsed->command, &row, value));)
        if (!parsed->given[row])
            (void)tagc_options_set(parsed->command, values, row, value, ""); /* our own table is right */
    return 1;
}

/* ---- --levels ---- */

enum { HOSTS, RANKS, N_LEVELS };
static const char *const level_names[N_LEVELS] = {"hosts", "ranks"};

#define FORM "allowed: hosts=N, and ranks=N of a host, as \"hosts=2,ranks=4\""

/* counts (N_LEVELS): 0 where a level is not named. */
static tagc_status read_levels(const char *text, long counts[N_LEVELS]) {
    int level = -1;
    for (const char *at = text;; at++) {
        const char *equals = strchr(at, '=');
        size_t n_name = equals ? (size_t)(equals - at) : 0;
        int named = level + 1;
        while (named < N_LEVELS &&
               (strlen(level_names[named]) != n_name || strncmp(level_names[named], at, n_name) != 0))
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
static tagc_status set_by_levels(tagc_parsed *parsed, const char *levels, const char *name,
                                 const char *value) {
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
    TAGC_TRY(set_by_levels(parsed, text, "ranks", all));
    if (n_inner == 1) return TAGC_OK;
    TAGC_TRY(set_by_levels(parsed, text, "ranks-per-host", per_host));
    if (options->sharding == TAGC_SHARD_HYBRID || options->resume) return TAGC_OK;
    return set_by_levels(parsed, text, "two-level", "yes");
}
