/* Decides when the guard doubles the share that is sent, and when it halves it again. */
#include "fsdp/guard.h"
#include <math.h>

#define NORM_MEMORY 0.9    /* weight of earlier steps in smoothed norms */
#define LOSS_MEMORY 0.95   /* the same, of the loss */
#define LOSS_JUMP 6.0      /* alarm at so many spreads above the mean */
#define LEAST_SPREAD 0.005 /* of the mean */
enum {
    LEARN_STEPS = 20, /* the spread of the loss is unreliable before */
    ACT_STEPS = 5,    /* a change gets so many to take effect */
    CALM_STEPS = 100  /* without an alarm before the factor is halved */
};

void tagc_guard_init(tagc_guard *guard, double max_ratio, double kept) {
    *guard = (tagc_guard){.max_ratio = max_ratio, .max_factor = 1, .factor = 1};
    while (guard->max_factor * kept < 1 && guard->max_factor < 1048576) guard->max_factor *= 2;
}

void tagc_guard_resume(tagc_guard *guard, const tagc_guard *before) {
    double max_ratio = guard->max_ratio, max_factor = guard->max_factor;
    *guard = *before;
    guard->max_ratio = max_ratio;
    guard->max_factor = max_factor;
    guard->factor = fmin(fmax(before->factor, 1), max_factor);
}

static double mix(double memory, double past, double now, uint64_t n_seen) {
    return n_seen == 0 ? now : memory * past + (1 - memory) * now;
}

/* Updates mean and spread of the loss. A jump is cut at the limit first, so that it does not become normal at once. */
static int loss_jumps(tagc_guard *g, double loss) {
    double most = g->loss + LOSS_JUMP * fmax(g->spread, LEAST_SPREAD * g->loss);
    int jumps = g->n_seen >= LEARN_STEPS && !(loss <= most);
    if (jumps) loss = most;
    double distance = g->n_seen == 0 ? 0 : fabs(loss - g->loss);
    g->loss = mix(LOSS_MEMORY, g->loss, loss, g->n_seen);
    g->spread = mix(LOSS_MEMORY, g->spread, distance, g->n_seen);
    return jumps;
}

tagc_guard_change tagc_guard_update(tagc_guard *g, double loss, double grad_norm, double residual_norm) {
    if (!isfinite(grad_norm) || !isfinite(residual_norm)) return TAGC_GUARD_SAME; /* the step was skipped */
    g->residual_norm = mix(NORM_MEMORY, g->residual_norm, residual_norm, g->n_seen);
    g->grad_norm = mix(NORM_MEMORY, g->grad_norm, grad_norm, g->n_seen);
    int jumps = loss_jumps(g, loss), outgrown = g->residual_norm > g->max_ratio * g->grad_norm;
    g->n_seen++;
    g->n_since++;
    g->n_calm = jumps || outgrown ? 0 : g->n_calm + 1;
    if ((jumps || outgrown) && g->n_since >= ACT_STEPS && g->factor < g->max_factor) {
        g->factor *= 2;
        g->n_since = 0;
        return jumps ? TAGC_GUARD_LOSS : TAGC_GUARD_RESIDUAL;
    }
    if (g->factor > 1 && g->n_calm >= CALM_STEPS) {
        g->factor /= 2;
        g->n_calm = g->n_since = 0;
        return TAGC_GUARD_CALM;
    }
    return TAGC_GUARD_SAME;
}
