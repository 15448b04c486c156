/* Sums go batch by batch and then rank by rank, so that a validation loss is the same number every time. */
#include "train/evaluate.h"

#include "core/status.h"
#include "launch/over_ranks.h"
#include "train/engine.h"

int tagc_evaluate_batch(const tagc_tokens *tokens, int n_batch, int n_tokens, int world_size) {
    uint64_t most = (tagc_tokens_n(tokens) - 1) / (uint64_t)n_tokens / (uint64_t)world_size;
    if (most == 0) most = 1;
    return (uint64_t)n_batch < most ? n_batch : (int)most;
}

uint64_t tagc_evaluate_batches(const tagc_loader *loader, int n_batch, int world_size, uint64_t wanted) {
    uint64_t whole = tagc_loader_n_windows(loader) / ((uint64_t)n_batch * (uint64_t)world_size);
    if (whole == 0) whole = 1;
    return wanted < whole ? wanted : whole;
}

tagc_status tagc_evaluate(const tagc_evaluation *e, double *loss) {
    tagc_params params = tagc_engine_params(e->fsdp);
    double sum = 0;
    TAGC_TRY(tagc_loader_seek(e->loader, 0));
    for (uint64_t batch = 0; batch < e->n_batches; batch++) {
        double batch_loss = 0;
        TAGC_TRY(tagc_loader_next(e->loader, e->tokens, e->targets));
        TAGC_TRY(tagc_fsdp_forward_begin(e->fsdp, 0));
        TAGC_TRY(tagc_gpt2_forward(e->model, &params, e->tokens, e->targets, e->n_batch, e->n_tokens,
                                   &batch_loss));
        sum += batch_loss;
    }
    *loss = sum / (double)e->n_batches;
    return tagc_mean_over_ranks(e->rank->comm, loss, 1);
}
