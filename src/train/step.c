/* A step is forward and backward per micro-step, then the engine's update. */
#include "train/step.h"

#include "core/status.h"
#include "train/engine.h"

tagc_status tagc_training_step(const tagc_training *t, double lr, double *loss, tagc_fsdp_stats *stats,
                               tagc_busy_times *busy) {
    tagc_params params = tagc_engine_params(t->fsdp);
    double sum = 0;
    tagc_busy_take(t->busy, busy); /* what was before this step */
    for (int64_t micro = 0; micro < t->n_micro_steps; micro++) {
        double micro_loss = 0;
        TAGC_TRY(t->next_batch(t->context, t->tokens, t->targets));
        TAGC_TRY(tagc_fsdp_forward_begin(t->fsdp, 1));
        TAGC_TRY(tagc_gpt2_forward(t->model, &params, t->tokens, t->targets, t->n_batch, t->n_tokens,
                                   &micro_loss));
        TAGC_TRY(tagc_fsdp_backward_begin(t->fsdp));
        TAGC_TRY(
            tagc_gpt2_backward(t->model, &params, 1.0f)); /* the engine takes the mean over micro-steps */
        sum += micro_loss;
    }
    *loss = sum / (double)t->n_micro_steps;
    TAGC_TRY(tagc_fsdp_step(t->fsdp, lr, stats));
    tagc_busy_take(t->busy, busy);
    return TAGC_OK;
}
