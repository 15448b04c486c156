/* Whether the loss has risen. It tells a run that goes astray; it cannot tell one that learns more slowly than it would
 * dense. */
#include "schedule/private.h"

#include <math.h>

void tagc_schedule_add_loss(tagc_schedule *s, double loss) {
    if (!isfinite(loss)) return;
    s->losses.own.sum += loss;
    s->losses.own.squares += loss * loss;
    s->losses.own.n++;
}

void tagc_schedule_take_losses(tagc_schedule *s, tagc_schedule_losses *losses) {
    *losses = s->losses.own;
    s->losses.own = (tagc_schedule_losses){0};
}

double tagc_losses_see(tagc_loss_watch *w, const tagc_schedule_losses *losses) {
    w->pooled.sum += losses->sum;
    w->pooled.squares += losses->squares;
    w->pooled.n += losses->n;
    if (!(w->pooled.n >= TAGC_LEAST_LOSSES)) return 0;
    double n = w->pooled.n, mean = w->pooled.sum / n;
    double variance = fmax(w->pooled.squares / n - mean * mean, 0) / (n - 1);
    w->pooled = (tagc_schedule_losses){0};
    if (!w->has_least || mean <= w->least) {
        w->least = mean;
        w->variance = variance;
        w->has_least = 1;
        w->has_risen = 0;
        return 0;
    }
    double least = w->least, rise = mean - least;
    int had_risen = w->has_risen;
    w->has_risen =
        rise > TAGC_MOST_RISE * fabs(least) && rise > TAGC_MOST_ERRORS * sqrt(variance + w->variance);
    if (!had_risen || !w->has_risen) return 0;
    w->least = mean; /* what comes is held against this one */
    w->variance = variance;
    w->has_risen = 0;
    return least != 0 ? rise / fabs(least) : (double)INFINITY;
}
