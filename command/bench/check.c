/* Checks before the first turn: options and tokens of the arms, and memory, since without swap a process would be killed. */
#include "bench/measured.h"

#include "core/status.h"
#include "disk/paths.h"
#include "measure/memory.h"
#include "train/engine.h"
#include <stdio.h>

/* The memory of a rank, and whether --compress-names matches a tensor. */
static tagc_status check_arm(const tagc_bench *bench, const tagc_arm *arm) {
    const tagc_bench_plan *plan = bench->plan;
    tagc_setup setup = {.model = plan->model,
                        .world_size = bench->rank->world_size,
                        .n_hosts = 1,
                        .n_batch = (int)plan->options.train.batch_size,
                        .n_tokens = plan->n_tokens,
                        .union_density = -1};
    tagc_plan_volume volume;
    char what[TAGC_ARM_NAME_BYTES + 8];
    tagc_train_fsdp(&arm->options, &setup.engine);
    setup.placement = tagc_placement_of_sharding(setup.engine.sharding);
    tagc_status status = tagc_plan_count(&setup, &volume, NULL);
    if (status != TAGC_OK) return tagc_fail_in(status, "arm %s", arm->name);
    if (arm->options.compress_names && volume.n_compressed == 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "arm %s: --compress-names is \"%.100s\", which matches no tensor",
                         arm->name, arm->options.compress_names);
    snprintf(what, sizeof what, "arm %s", arm->name);
    return tagc_memory_check_setup(what, &setup, bench->hosts.n_here);
}

tagc_status tagc_bench_open_tokens(const tagc_bench_plan *plan, tagc_tokens **out) {
    tagc_tokens_info info;
    *out = NULL;
    if (!plan->options.train.data) return TAGC_OK;
    TAGC_TRY(tagc_data_open(plan->options.train.data, TAGC_DATA_TRAIN, out));
    tagc_tokens_get_info(*out, &info);
    if (info.vocab_size <= (uint32_t)plan->model.vocab_size) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT,
                     "%s has tokens up to %u, the model knows %d: raise --vocab-size to %u",
                     tagc_tokens_path(*out), info.vocab_size - 1, plan->model.vocab_size, info.vocab_size);
}

tagc_status tagc_bench_arms_check(const tagc_bench *bench) {
    tagc_tokens *tokens;
    for (int i = 0; i < bench->plan->n_arms; i++) TAGC_TRY(check_arm(bench, &bench->plan->arms[i]));
    tagc_status status = tagc_bench_open_tokens(bench->plan, &tokens);
    tagc_tokens_close(tokens);
    return status;
}
