/* Lists what may be chosen, and converts measurements to inputs of the cost model. */
#include "auto/candidates.h"

#include "core/status.h"
#include "exchange/options.h"
#include <stdio.h>

/* ---- candidates ---- */

static void add(tagc_candidate *candidates, int *n, const char *name, const tagc_reducer_options *compressed,
                const tagc_reducer_options *mild) {
    tagc_candidate *c = &candidates[(*n)++];
    snprintf(c->name, sizeof c->name, "%s", name);
    c->compressed = *compressed;
    c->mild = *mild;
}

static void add_blocks(const tagc_fsdp_options *engine, int values, const char *name,
                       tagc_candidate *candidates, int *n) {
    tagc_reducer_options compressed = engine->reducer, mild = engine->mild;
    if (compressed.sparsity == 0 && compressed.format == values)
        return; /* the user's own setting, which comes last */
    compressed.sparsity = mild.sparsity = 0;
    compressed.format = mild.format = values;
    add(candidates, n, name, &compressed, &mild);
}

int tagc_auto_candidates(const tagc_fsdp_options *engine,
                         tagc_candidate candidates[TAGC_MACHINE_MAX_CANDIDATES]) {
    int n = 0;
    char name[48];
    tagc_reducer_options dense = engine->reducer, packed = engine->reducer;
    dense.exchange = TAGC_EXCHANGE_DENSE;
    dense.format = engine->dense_format;
    add(candidates, &n, engine->dense_format == TAGC_FORMAT_BF16 ? "dense bf16" : "dense fp32", &dense,
        &dense);
    add_blocks(engine, TAGC_FORMAT_INT8, "int8 blocks", candidates, &n);
    add_blocks(engine, TAGC_FORMAT_INT4, "int4 blocks", candidates, &n);
    /* Before direct: the same selection with unquantised values. */
    if (engine->reducer.sparsity > 0 && engine->ranks_per_host == 1 &&
        engine->sharding != TAGC_SHARD_HYBRID) {
        packed.exchange = TAGC_EXCHANGE_PACKED;
        snprintf(name, sizeof name, "packed %.4g %%", 100 * packed.sparsity);
        add(candidates, &n, name, &packed, &dense);
    }
    snprintf(name, sizeof name, "direct %.4g %% %s", 100 * engine->reducer.sparsity,
             tagc_format_names[engine->reducer.format]);
    add(candidates, &n, name, &engine->reducer, &engine->mild);
    return n;
}

/* ---- as a plan ---- */

void tagc_auto_plan(const tagc_auto_setup *setup, const tagc_machine *machine,
                    const tagc_fsdp_stats *dense_stats, tagc_setup *plan, tagc_costs *costs) {
    int world_size = tagc_comm_world_size(setup->comm), n_here = world_size / machine->n_hosts;
    *plan = (tagc_setup){.model = setup->model,
                         .world_size = world_size,
                         .n_hosts = machine->n_hosts,
                         .n_batch = setup->n_batch,
                         .n_tokens = setup->n_tokens,
                         .placement = tagc_placement_of_sharding(setup->engine.sharding),
                         .engine = setup->engine,
                         .union_density = -1};
    tagc_costs_init(costs);
    int n_owners = world_size;
    if (setup->engine.sharding == TAGC_SHARD_NONE) n_owners = 1;
    if (setup->engine.sharding == TAGC_SHARD_HYBRID) n_owners = setup->engine.ranks_per_host;
    double n_owned = (double)tagc_gpt2_n_params(&setup->model) / n_owners;
    double cores = machine->cores / n_here;
    costs->cores = machine->cores;
    /* The caller's measured time includes the cost of transfers beside it; it uses one core at most. */
    costs->flop_s = dense_stats->compute_s / tagc_setup_flops(plan) * (cores < 1 ? cores : 1);
    costs->optimizer_s = dense_stats->optimizer_s / n_owned;
    costs->byte_s = machine->byte_s;
    costs->cpu_s_per_byte = 3e-10;
    costs->poll_cores = 0.1;
    costs->overhead_s = 5e-5;
    costs->queue_bytes = 1e5;
    costs->n_codec = machine->n_codec;
    for (int i = 0; i < machine->n_codec; i++) costs->codec[i] = machine->codec[i];
}
