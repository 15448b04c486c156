/* The headline of a run: what is trained, how gradients travel, and which options have no say in it. */
#include "cli/greet.h"

#include "exchange/options.h"
#include "launch/human.h"
#include "options/presets.h"
#include "options/train_options.h"
#include <stdio.h>
#include <string.h>

static tagc_train_facts facts_of(const tagc_trainer *t) {
    return (tagc_train_facts){.options = &t->options, .has_mild = tagc_fsdp_n_mild(t->training.fsdp) > 0};
}

static void say_unused(tagc_trainer *t, const tagc_parsed *parsed) {
    tagc_train_facts facts = facts_of(t);
    for (int i = 0; i < parsed->command->n_options; i++) {
        const tagc_option *option = &parsed->command->options[i];
        const char *lacks = parsed->given[i] && option->lacks ? option->lacks(&facts) : NULL;
        if (lacks) tagc_progress_say(&t->progress, "note: --%s is for %s", option->name, lacks);
    }
    if (tagc_train_compresses(&t->options) && t->options.sparsity == 1)
        tagc_progress_say(&t->progress,
                          "note: --sparsity 1 never sends a compressed gradient: those weights change"
                          " by weight decay alone");
}

/* "direct int4, sparsity 95 %" and the like. */
static void print_exchange(const tagc_train_options *o, char *text, size_t n_bytes) {
    char ratio[24] = " auto";
    if (o->ratio > 0) snprintf(ratio, sizeof ratio, " %.4gx", o->ratio);
    if (o->exchange == TAGC_EXCHANGE_SKETCH || o->exchange == TAGC_EXCHANGE_PACKED)
        snprintf(text, n_bytes, "%s%s, index %s, sparsity %.4g %%", tagc_exchange_names[o->exchange],
                 o->exchange == TAGC_EXCHANGE_SKETCH ? ratio : "", tagc_train_word(o, "index"),
                 100 * o->sparsity);
    else
        snprintf(text, n_bytes, "direct %s, sparsity %.4g %%", tagc_format_names[o->values],
                 100 * o->sparsity);
}

static void say_gradients(tagc_trainer *t) {
    const tagc_train_options *o = &t->options;
    double n_params = (double)tagc_fsdp_n_params(t->training.fsdp);
    double n_compressed = (double)tagc_fsdp_n_compressed(t->training.fsdp),
           n_mild = (double)tagc_fsdp_n_mild(t->training.fsdp);
    const char *dense = o->wire == TAGC_FORMAT_BF16 ? "dense, bf16" : "dense";
    char compressed[128] = "", mild[128] = "", exchange[96];
    print_exchange(o, exchange, sizeof exchange);
    if (tagc_train_compresses(&t->options) && n_compressed == 0)
        tagc_progress_say(&t->progress, "note: --compress %s matches no tensor of this model",
                          tagc_train_word(o, "compress"));
    if (tagc_train_compresses(&t->options) && n_compressed > 0)
        snprintf(compressed, sizeof compressed, "%s, on %.1f %% of the parameters; ", exchange,
                 100 * n_compressed / n_params);
    if (n_mild > 0)
        snprintf(mild, sizeof mild, "mild %s, sparsity %.4g %%, on %.1f %%; ", tagc_format_names[o->mild],
                 100 * o->mild_sparsity, 100 * n_mild / n_params);
    if (*compressed || *mild)
        tagc_progress_say(&t->progress, "gradients: %s%sthe rest %s", compressed, mild, dense);
    else
        tagc_progress_say(&t->progress, "gradients: %s", dense);
}

/* The resolved values of defaults that depend on the exchange. */
static void say_chosen(tagc_trainer *t, const tagc_parsed *parsed, int is_default_preset) {
    static const char *const names[] = {
        "sparsity", "values", "compressed-beta1", "compressed-beta2", "mild", "mild-sparsity", "gentle"};
    int is_direct = t->options.exchange >= TAGC_EXCHANGE_DIRECT;
    char line[256] = "", text[64];
    if (!tagc_train_compresses(&t->options) || t->options.resume) return; /* resumed: the checkpoint's */
    if (is_default_preset) snprintf(line, sizeof line, " --preset %s", TAGC_PRESET_DEFAULT);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        int row = tagc_options_find(parsed->command, names[i]);
        size_t n = strlen(line);
        tagc_options_get(parsed->command, parsed->values, row, text, sizeof text);
        if (strcmp(text, "auto") != 0 || (i == 1 && !is_direct) || (i == 5 && t->options.mild == 0) ||
            (i == 6 && t->options.gentle != 1))
            continue;
        tagc_options_get(parsed->command, &t->options, row, text, sizeof text);
        if (strcmp(text, "auto") == 0) continue; /* the schedule chooses */
        snprintf(line + n, sizeof line - n, " --%s %s", names[i], text);
    }
    if (*line)
        tagc_progress_say(&t->progress, "not given:%s: %s", line,
                          is_direct ? "least loss for its bytes, docs/guide/choosing.md" : "as published");
}

static void say_beginning(tagc_trainer *t) {
    int n_flats[TAGC_N_LEVELS];
    tagc_fsdp_levels(t->training.fsdp, n_flats);
    if (t->options.resume || tagc_fsdp_n_below_last(n_flats) == 0) return;
    tagc_progress_say(&t->progress, "at first: every value in %s until gradients are mostly noise",
                      n_flats[TAGC_LEVEL_FRESH] > 0 ? "8 bits, then in 4 bits" : "4 bits");
}

static void say_parameters(tagc_trainer *t) {
    static const char *const gathers[TAGC_N_GATHER_KINDS] = {"fp32",
                                                             "bf16",
                                                             "bf16, without loss in about 11 bits",
                                                             "int8 blocks",
                                                             "bf16, then 8-bit deltas",
                                                             "bf16, then 4-bit deltas",
                                                             "bf16, then 2-bit deltas"};
    const tagc_train_options *o = &t->options;
    if (o->sharding == TAGC_SHARD_NONE || t->rank->world_size == 1) return;
    int by_hosts = o->two_level && o->sharding != TAGC_SHARD_HYBRID && o->ranks_per_host > 1;
    tagc_progress_say(&t->progress, "parameters: gathered as %s%s%s", gathers[o->gather],
                      o->sharding == TAGC_SHARD_GRAD ? ", once per step" : "",
                      by_hosts ? ", to each host once" : "");
}

static void say_buckets(tagc_trainer *t) {
    char size[16];
    if (t->options.bucket_elems <= 0) return;
    tagc_progress_say(&t->progress,
                      "buckets: neighbouring blocks share units of at least %s values, %d units in all",
                      tagc_human((double)t->options.bucket_elems, size), tagc_fsdp_n_units(t->training.fsdp));
}

static void print_sharding(const tagc_trainer *t, char *text, size_t n_bytes) {
    tagc_train_facts facts = facts_of(t);
    static const char *const shardings[] = {"fully sharded (ZeRO-3)",
                                            "gradients and optimizer sharded (ZeRO-2)", "replicated (DDP)"};
    int n = (int)t->options.ranks_per_host;
    if (t->rank->world_size == 1)
        snprintf(text, n_bytes, "not sharded");
    else if (t->options.sharding == TAGC_SHARD_HYBRID)
        snprintf(text, n_bytes, "sharded over the %d ranks of a host, %d replica%s (HSDP)", n,
                 t->rank->world_size / n, t->rank->world_size > n ? "s" : "");
    else
        snprintf(text, n_bytes, "%s%s", shardings[t->options.sharding],
                 t->options.two_level && n > 1 && tagc_train_is_coded(&facts) ? ", hosts add first" : "");
}

void tagc_greet(tagc_trainer *t, const tagc_parsed *parsed, int is_default_preset) {
    char sharding[96], params[16], a[16], b[16], c[16], d[16];
    tagc_fsdp_memory memory;
    tagc_fsdp_memory_used(t->training.fsdp, &memory);
    print_sharding(t, sharding, sizeof sharding);
    say_unused(t, parsed);
    int is_own_shape = t->options.init_from && !tagc_options_given(parsed, "model");
    tagc_progress_say(&t->progress, "%s, %s parameters, %d rank%s, %s",
                      is_own_shape ? t->options.init_from : t->options.model,
                      tagc_human((double)tagc_fsdp_n_params(t->training.fsdp), params), t->rank->world_size,
                      t->rank->world_size > 1 ? "s" : "", sharding);
    say_gradients(t);
    say_chosen(t, parsed, is_default_preset);
    say_beginning(t);
    say_parameters(t);
    say_buckets(t);
    tagc_progress_say(
        &t->progress, "memory per rank: parameters %s, gradients %s, optimizer %s, residuals %s",
        tagc_human_bytes((double)memory.parameters, a), tagc_human_bytes((double)memory.gradients, b),
        tagc_human_bytes((double)memory.optimizer, c), tagc_human_bytes((double)memory.residuals, d));
    if (t->options.fork)
        tagc_progress_say(&t->progress, "begins at step %llu of %s", (unsigned long long)t->step,
                          t->options.fork);
    else if (t->step > 0)
        tagc_progress_say(&t->progress, "goes on after step %llu of %lld", (unsigned long long)t->step,
                          (long long)t->options.steps);
    if (!t->options.out && t->step < (uint64_t)t->options.steps)
        tagc_progress_say(&t->progress,
                          "note: nothing of this run is kept: --out DIR would get metrics and checkpoints");
}
