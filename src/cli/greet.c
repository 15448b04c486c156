/* The headline of a run: what is trained, how gradients travel, and which options have no say in it. */
#include "cli/greet.h"

#include <stdio.h>

static int is_compressing(const tagc_trainer *t) {
    return t->options.exchange != TAGC_EXCHANGE_DENSE && t->options.compress != TAGC_POLICY_NONE;
}

static void say_unused(tagc_trainer *t, const tagc_parsed *parsed) {
    static const char *const of_sketch[] = {"ratio", "cells", "unpeeled"};
    static const char *const of_compression[] = {"sparsity", "index", "fill-union"};
    for (int i = 0; i < 3; i++) {
        if (!tagc_options_given(parsed, of_sketch[i])) continue;
        if (t->options.exchange != TAGC_EXCHANGE_SKETCH)
            tagc_progress_say(&t->progress, "note: --%s is for --exchange sketch and has no effect here",
                              of_sketch[i]);
        else if (!is_compressing(t))
            tagc_progress_say(&t->progress, "note: --%s has no effect with --compress none", of_sketch[i]);
    }
    for (int i = 0; i < 3; i++)
        if (tagc_options_given(parsed, of_compression[i]) && !is_compressing(t))
            tagc_progress_say(
                &t->progress, "note: --%s is for compressed gradients and has no effect with %s",
                of_compression[i],
                t->options.exchange == TAGC_EXCHANGE_DENSE ? "--exchange dense" : "--compress none");
}

static void say_gradients(tagc_trainer *t) {
    static const char *const policies[] = {"none", "non-attention-linear", "paper", "all", "names"};
    static const char *const indexes[] = {"or", "sum4", "sum1"};
    double n_params = (double)tagc_fsdp_n_params(t->fsdp);
    double n_compressed = (double)tagc_fsdp_n_compressed(t->fsdp);
    char exchange[32] = "packed";
    if (t->options.exchange == TAGC_EXCHANGE_SKETCH && t->options.ratio > 0)
        snprintf(exchange, sizeof exchange, "sketch %.4gx", t->options.ratio);
    else if (t->options.exchange == TAGC_EXCHANGE_SKETCH)
        snprintf(exchange, sizeof exchange, "sketch auto");
    if (!is_compressing(t))
        tagc_progress_say(&t->progress, "gradients: dense");
    else if (n_compressed == 0)
        tagc_progress_say(&t->progress, "gradients: %s matches no tensor of this model: all dense",
                          policies[t->options.compress]);
    else
        tagc_progress_say(&t->progress,
                          "gradients: %s, index %s, sparsity %.4g %%, on %.1f %% of the parameters; the rest"
                          " dense",
                          exchange, indexes[t->options.index], 100 * t->options.sparsity,
                          100 * n_compressed / n_params);
}

void tagc_greet(tagc_trainer *t, const tagc_parsed *parsed) {
    static const char *const shardings[] = {"fully sharded (ZeRO-3)",
                                            "gradients and optimizer sharded (ZeRO-2)", "replicated (DDP)"};
    char params[16], a[16], b[16], c[16], d[16];
    tagc_fsdp_memory memory;
    tagc_fsdp_memory_used(t->fsdp, &memory);
    say_unused(t, parsed);
    tagc_progress_say(&t->progress, "%s, %s parameters, %d rank%s, %s", t->options.model,
                      tagc_human((double)tagc_fsdp_n_params(t->fsdp), params), t->rank->world_size,
                      t->rank->world_size > 1 ? "s" : "", shardings[t->options.sharding]);
    say_gradients(t);
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
}
