/* The table of presets. */
#include "options/presets.h"

#include <string.h>

static const struct {
    const char *name, *words, *what;
} table[] = {
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
enum { N_TABLE = sizeof table / sizeof table[0] };

const char *tagc_preset_words(const char *name, size_t n) {
    for (int i = 0; i < N_TABLE; i++)
        if (strlen(table[i].name) == n && strncmp(table[i].name, name, n) == 0) return table[i].words;
    return NULL;
}

void tagc_preset_list(char text[TAGC_PRESET_LIST_BYTES]) {
    *text = '\0';
    for (int i = 0; i < N_TABLE; i++) {
        strcat(text, i ? ", " : "");
        strcat(text, table[i].name);
    }
}

void tagc_preset_print(FILE *out) {
    fprintf(out, "\nArms:\n");
    for (int i = 0; i < N_TABLE; i++) fprintf(out, "  %-14s %s\n", table[i].name, table[i].what);
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
