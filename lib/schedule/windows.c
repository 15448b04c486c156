/* Windows of samples: the sums from which a parameter's coherence is computed. */
#include "schedule/private.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int ascending(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Multiples of a large odd number spread over any parameter, also one whose rows repeat. */
void tagc_schedule_positions(uint64_t n_elems, uint64_t *positions, size_t *n) {
    size_t n_all = n_elems < TAGC_SCHEDULE_SAMPLE ? (size_t)n_elems : TAGC_SCHEDULE_SAMPLE, n_unique = 0;
    for (uint64_t i = 0; i < n_all; i++)
        positions[i] = n_elems <= TAGC_SCHEDULE_SAMPLE ? i : i * 2654435761u % n_elems;
    qsort(positions, n_all, sizeof *positions, ascending);
    for (size_t i = 0; i < n_all; i++)
        if (i == 0 || positions[i] != positions[n_unique - 1]) positions[n_unique++] = positions[i];
    *n = n_unique;
}

static void clear(tagc_window *w, uint32_t n) {
    w->n_exchanges = 0;
    w->n = n;
    memset(w->sums, 0, sizeof w->sums);
    memset(w->squares, 0, sizeof w->squares);
}

static void add(tagc_window *w, uint32_t n, const float *values) {
    if (w->n != n) clear(w, n);
    for (uint32_t i = 0; i < n; i++) {
        w->sums[i] += values[i];
        w->squares[i] += values[i] * values[i];
    }
    w->n_exchanges++;
}

tagc_status tagc_schedule_add(tagc_schedule *s, const uint32_t *parameters, const uint32_t *counts, size_t n,
                              const float *values, uint32_t *full, size_t *n_full) {
    *n_full = 0;
    TAGC_TRY(tagc_schedule_check(s, parameters, n));
    for (size_t i = 0; i < n; i++)
        if (counts[i] > TAGC_SCHEDULE_SAMPLE)
            return tagc_fail(TAGC_ERR_ARGUMENT, "counts[%zu] is %u, must be at most %d", i, counts[i],
                             TAGC_SCHEDULE_SAMPLE);
    for (size_t i = 0; i < n; values += counts[i], i++) {
        tagc_scheduled *p = &s->parameters[parameters[i]];
        if (!p->has_levels) continue;
        add(&p->window, counts[i], values);
        if (p->window.n_exchanges >= TAGC_WINDOW) full[(*n_full)++] = parameters[i];
    }
    return TAGC_OK;
}

int tagc_schedule_is_due(const tagc_schedule *s, const uint32_t *parameters, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const tagc_scheduled *p = &s->parameters[parameters[i]];
        if (p->has_levels && p->window.n_exchanges + 1 >= TAGC_WINDOW) return 1;
    }
    return 0;
}

static tagc_schedule_sums sums_of(const tagc_window *w) {
    double square = 0;
    for (uint32_t i = 0; i < w->n; i++) square += (double)w->squares[i];
    tagc_schedule_sums sums = {.square = square, .n_square = (double)w->n_exchanges * w->n};
    if (!isfinite(square)) {
        sums.signal = (double)NAN;
        sums.weight = 1;
        return sums;
    }
    double least = w->n > 0 ? TAGC_FAINT * TAGC_FAINT * square / w->n : 0;
    for (uint32_t i = 0; i < w->n; i++) {
        if (!((double)w->squares[i] > least)) continue;
        sums.signal += (double)w->sums[i] * (double)w->sums[i] / (double)w->squares[i];
        sums.weight++;
    }
    return sums;
}

tagc_status tagc_schedule_take(tagc_schedule *s, const uint32_t *parameters, size_t n,
                               tagc_schedule_sums *sums) {
    TAGC_TRY(tagc_schedule_check(s, parameters, n));
    for (size_t i = 0; i < n; i++) {
        tagc_window *w = &s->parameters[parameters[i]].window;
        sums[i] = sums_of(w);
        clear(w, w->n);
    }
    return TAGC_OK;
}

void tagc_window_scale(tagc_window *w, double factor) {
    for (uint32_t i = 0; i < w->n; i++) {
        w->sums[i] = (float)(w->sums[i] * factor);
        w->squares[i] = (float)(w->squares[i] * factor * factor);
    }
}

/* ---- losses: whether they rise, which tells a run that goes astray, not one that learns more slowly than it would dense ---- */

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
