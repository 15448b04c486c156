/* A step is forward and backward per micro-step, then the engine's update. */
#include "train/step.h"

#include "core/status.h"
#include "train/engine.h"

tagc_status tagc_training_micro_step(tagc_fsdp *fsdp, tagc_gpt2 *model, const tagc_params *params,
                                     const int *tokens, const int *targets, int n_batch, int n_tokens,
                                     double *loss) {
    if (fsdp) TAGC_TRY(tagc_fsdp_forward_begin(fsdp, 1));
    TAGC_TRY(tagc_gpt2_forward(model, params, tokens, targets, n_batch, n_tokens, loss));
    if (fsdp) TAGC_TRY(tagc_fsdp_backward_begin(fsdp));
    /* The engine takes the mean over micro-steps. */
    return tagc_gpt2_backward(model, params, 1.0f);
}

tagc_status tagc_training_step(const tagc_training *t, double lr, double *loss, tagc_fsdp_stats *stats,
                               tagc_busy_times *busy) {
    tagc_params params = tagc_engine_params(t->fsdp);
    double sum = 0;
    tagc_busy_take(t->busy, busy); /* what was before this step */
    for (int64_t micro = 0; micro < t->n_micro_steps; micro++) {
        double micro_loss = 0;
        TAGC_TRY(t->next_batch(t->context, t->tokens, t->targets));
        TAGC_TRY(tagc_training_micro_step(t->fsdp, t->model, &params, t->tokens, t->targets, t->n_batch,
                                          t->n_tokens, &micro_loss));
        sum += micro_loss;
    }
    *loss = sum / (double)t->n_micro_steps;
    TAGC_TRY(tagc_fsdp_step(t->fsdp, lr, stats));
    tagc_busy_take(t->busy, busy);
    return TAGC_OK;
}
