/* Shares: how much of its level's share each parameter sends, so that units select as if they were one. */
#include "schedule/private.h"

#include <math.h>

enum { HALVINGS = 60, MOST_DOUBLINGS = 100 };

static double share_of(double relative, double factor, double most) {
    return fmin(most, fmax(TAGC_LEAST_SHARE, factor * relative));
}

/* Whether all elements together send at least what their level does. */
static int is_enough(tagc_scheduled *const *members, size_t n, double mean, double factor, double most) {
    double sent = 0, total = 0;
    for (size_t i = 0; i < n; i++) {
        sent += share_of(members[i]->mean_square / mean, factor, most) * (double)members[i]->n_elems;
        total += (double)members[i]->n_elems;
    }
    return sent >= total;
}

void tagc_share_out(tagc_scheduled *const *members, size_t n, double level_share) {
    double sum = 0, total = 0;
    for (size_t i = 0; i < n; i++) {
        members[i]->next_share = 1;
        sum += members[i]->mean_square * (double)members[i]->n_elems;
        total += (double)members[i]->n_elems;
    }
    if (level_share >= 1 || !(sum > 0)) return;
    double most = level_share > 0 ? fmin(TAGC_MOST_SHARE, 1 / level_share) : TAGC_MOST_SHARE;
    double mean = sum / total, low = 0, high = 1;
    /* Where a mean square is 0, no factor may be enough. */
    for (int i = 0; i < MOST_DOUBLINGS && !is_enough(members, n, mean, high, most); i++) high *= 2;
    for (int i = 0; i < HALVINGS; i++) {
        double middle = (low + high) / 2;
        if (is_enough(members, n, mean, middle, most))
            high = middle;
        else
            low = middle;
    }
    for (size_t i = 0; i < n; i++)
        members[i]->next_share = share_of(members[i]->mean_square / mean, high, most);
}
