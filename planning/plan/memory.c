/* The memory of ranks before they start, because without swap the system would kill them. Not in libtagc-plan.so. */
#include "plan/plan.h"

#include "core/status.h"
#include "launch/hosts.h"

/* What a rank takes beside engine and activations: its threads, their stacks and pools, tables of the comm. */
enum { RANK_BYTES = 2 << 20 };

tagc_status tagc_plan_check_memory(const char *what, const tagc_setup *setup, int n_here) {
    tagc_plan_memory memory;
    uint64_t activations = 0;
    tagc_status status = tagc_plan_memory_of(setup, &memory);
    if (status != TAGC_OK) return tagc_fail_in(status, "%s: a unit of this model", what);
    if (setup->n_batch > 0)
        TAGC_TRY(tagc_gpt2_activation_bytes(&setup->model, setup->n_batch, setup->n_tokens, &activations));
    return tagc_check_memory(what, memory.total + activations + RANK_BYTES, n_here);
}
