/* The decisions: who goes on, who begins anew, and what takes effect at the end of an exchange of the model. */
#include "schedule/private.h"

#include <math.h>

/* ---- shares: how much of its level's share a parameter sends, so that units select as if they were one ---- */

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

static void set_shares(tagc_scheduled *const *members, size_t n, double level_share) {
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

/* ---- levels ---- */

static int is_short(const tagc_scheduled *p) {
    return p->is_settled || p->fading == 0;
}

/* Whether it has no long first moment, and none that could come back. */
static int has_none(const tagc_scheduled *p) {
    return p->moment == TAGC_MOMENT_NONE || p->is_settled;
}

static int is_compressed(const tagc_scheduled *p, uint64_t group) {
    return p->kind == TAGC_CLASS_COMPRESSED && p->has_levels && p->is_seen && p->group == group;
}

/* Whether nothing holds a mild parameter up: no compressed one that is trained beside it ever had a long first moment, or there is
 * none, as with adapters of attention alone. Then its own moment counts, which it keeps. */
static int is_free(const tagc_schedule *s, const tagc_scheduled *mild) {
    size_t n = 0;
    for (size_t i = 0; i < s->n; i++) {
        const tagc_scheduled *p = &s->parameters[i];
        if (!is_compressed(p, mild->group)) continue;
        if (p->moment != TAGC_MOMENT_NONE) return 0;
        n++;
    }
    return n > 0 || mild->moment != TAGC_MOMENT_STAYS;
}

static int has_no_long_moment(const tagc_schedule *s, const tagc_scheduled *p) {
    return p->kind == TAGC_CLASS_MILD ? p->is_settled || is_free(s, p) : has_none(p);
}

/* Whether noise waits for a moment to become short: its own, or if it is mild, those of all that is compressed. */
static int waits(const tagc_scheduled *p) {
    return p->is_noise && (p->kind == TAGC_CLASS_MILD || p->moment == TAGC_MOMENT_SHORTENS);
}

/* Whether a weak direction is enough to leave its level: half of what is compressed is further. With a long first moment it
 * leaves EVERY only. */
static int may_follow(const tagc_schedule *s, const tagc_scheduled *p) {
    if (p->fading != TAGC_NOT_FADING || waits(p)) return 0;
    if (p->now != TAGC_LEVEL_EVERY && !has_no_long_moment(s, p)) return 0;
    size_t n = 0, n_further = 0;
    for (size_t i = 0; i < s->n; i++) {
        const tagc_scheduled *other = &s->parameters[i];
        if (!is_compressed(other, p->group)) continue;
        n++;
        n_further += other->now > p->now;
    }
    return n > 0 && 2 * n_further >= n;
}

static int may_go_on(const tagc_schedule *s, const tagc_scheduled *p) {
    if (p->now >= TAGC_LEVEL_LAST) return 0;
    return has_no_long_moment(s, p) || is_short(p) || may_follow(s, p);
}

static int next_level(const tagc_scheduled *p) {
    return p->kind == TAGC_CLASS_MILD && p->now == TAGC_LEVEL_EVERY ? TAGC_LEVEL_LAST : p->now + 1;
}

static void raise_alarm(tagc_schedule *s, tagc_alarm_kind kind, const tagc_scheduled *p, double value) {
    tagc_alarm *a = &s->alarms[kind];
    if (a->n_parameters == 0 || value > a->value) {
        a->worst = (size_t)(p - s->parameters);
        a->value = value;
    }
    a->kind = kind;
    a->n_parameters++;
}

static void stop_fading(tagc_scheduled *p) {
    if (!p->is_settled) p->fading = TAGC_NOT_FADING;
}

static void begin_anew(tagc_schedule *s, tagc_scheduled *p, tagc_alarm_kind kind, double value) {
    if (p->next != TAGC_LEVEL_EVERY) p->n_failures++;
    p->next = TAGC_LEVEL_EVERY;
    p->n_calm = 0;
    p->is_noise = 0;
    stop_fading(p);
    raise_alarm(s, kind, p, value);
}

/* Windows that a first moment's way becomes shorter by, in one. */
static int fades(const tagc_schedule *s) {
    return s->is_fresh ? 1 : TAGC_FADING / TAGC_FADING_OF_TRAINED;
}

/* coherence: NaN if a gradient was not finite. */
static void decide(tagc_schedule *s, tagc_scheduled *p, double coherence) {
    p->is_noise = coherence < TAGC_MOST_COHERENCE;
    int is_calm = p->is_noise || (coherence < TAGC_WEAK_COHERENCE && may_follow(s, p));
    p->n_calm = is_calm ? p->n_calm + 1 : 0;
    if (p->now == TAGC_LEVEL_FRESH) return;
    if (p->fading > 0) p->fading = p->fading > fades(s) ? p->fading - fades(s) : 0;
    uint32_t doublings = p->n_failures < TAGC_MOST_DOUBLINGS ? p->n_failures : TAGC_MOST_DOUBLINGS;
    if (p->n_calm >= 1u << doublings && may_go_on(s, p)) {
        p->next = next_level(p);
        p->n_calm = 0;
    } else if (coherence > TAGC_ALARM) {
        stop_fading(p);
        if (p->now > TAGC_LEVEL_EVERY) begin_anew(s, p, TAGC_ALARM_DIRECTION, coherence);
    }
}

/* The residual that was exchanged with p came to `growth` gradients. */
static void check_growth(tagc_schedule *s, tagc_scheduled *p, double growth) {
    if (!(growth > TAGC_MOST_GROWTH)) {
        p->has_grown = 0;
        return;
    }
    if (p->has_grown && p->now > TAGC_LEVEL_EVERY) begin_anew(s, p, TAGC_ALARM_RESIDUAL, growth);
    p->has_grown = !p->has_grown; /* what begins anew is given time */
}

static double growth_of(const tagc_schedule_sums *sums) {
    return sums->gradient > 0 && isfinite(sums->gradient) ? sqrt(sums->residual / sums->gradient) : 0;
}

tagc_status tagc_schedule_check(const tagc_schedule *s, const uint32_t *parameters, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (parameters[i] >= s->n)
            return tagc_fail(TAGC_ERR_ARGUMENT, "parameters[%zu] is %u, must be below %zu", i, parameters[i],
                             s->n);
    return TAGC_OK;
}

tagc_status tagc_schedule_see(tagc_schedule *s, const uint32_t *parameters, size_t n,
                              const tagc_schedule_sums *sums, uint32_t group) {
    TAGC_TRY(tagc_schedule_check(s, parameters, n));
    for (size_t i = 0; i < n; i++) {
        tagc_scheduled *p = &s->parameters[parameters[i]];
        double square = sums[i].square / fmax(1, sums[i].n_square);
        p->group = (uint64_t)group + 1;
        p->is_pending = 1;
        p->pending = sums[i];
        if (!isfinite(square) || square < 0) continue;
        p->mean_square = p->mean_square < 0 ? square : (p->mean_square + square) / 2;
        p->is_full = 1;
    }
    return TAGC_OK;
}

static int has_gradient(const tagc_scheduled *p) {
    return p->pending.weight != 0 || p->pending.signal != 0;
}

/* Decides from what was seen since the last step: in the order of parameters, whatever the order of units was. */
static void decide_pending(tagc_schedule *s) {
    for (size_t i = 0; i < s->n; i++) {
        tagc_scheduled *p = &s->parameters[i];
        if (p->is_pending && p->has_levels && has_gradient(p)) p->is_seen = 1;
    }
    for (size_t i = 0; i < s->n; i++) {
        tagc_scheduled *p = &s->parameters[i];
        if (!p->is_pending || !p->has_levels) continue;
        double signal = p->pending.signal, weight = p->pending.weight;
        p->n_windows++;
        if (p->now == TAGC_LEVEL_FRESH && p->n_windows >= TAGC_FRESH_WINDOWS) p->next = TAGC_LEVEL_EVERY;
        if (has_gradient(p)) decide(s, p, weight > 0 && isfinite(signal) ? signal / weight : (double)NAN);
        check_growth(s, p, growth_of(&p->pending));
        p->is_pending = 0;
    }
}

tagc_status tagc_schedule_see_losses(tagc_schedule *s, const tagc_schedule_losses *losses) {
    if (!isfinite(losses->sum) || !isfinite(losses->squares) || !(losses->n >= 0))
        return tagc_fail(TAGC_ERR_ARGUMENT, "sums of losses are %g, %g, %g, must be finite", losses->sum,
                         losses->squares, losses->n);
    double rise = tagc_losses_see(&s->losses, losses);
    for (size_t i = 0; rise > 0 && i < s->n; i++)
        if (s->parameters[i].has_levels && s->parameters[i].now > TAGC_LEVEL_EVERY)
            begin_anew(s, &s->parameters[i], TAGC_ALARM_LOSS, rise);
    return TAGC_OK;
}

double tagc_level_share(const tagc_schedule_options *options, tagc_class kind, int level) {
    if (level <= TAGC_LEVEL_EVERY) return 1;
    if (level == TAGC_LEVEL_LARGEST) return TAGC_LARGEST_SHARE;
    return 1 - (kind == TAGC_CLASS_MILD ? options->mild_sparsity : options->sparsity);
}

/* First moments of what is noise begin to fade. */
static void begin_fading(tagc_schedule *s) {
    for (size_t i = 0; i < s->n; i++) {
        tagc_scheduled *p = &s->parameters[i];
        if (p->is_noise && p->kind == TAGC_CLASS_COMPRESSED && p->moment == TAGC_MOMENT_SHORTENS &&
            p->fading == TAGC_NOT_FADING && p->now > TAGC_LEVEL_FRESH)
            p->fading = TAGC_FADING - fades(s);
    }
}

static int is_ripe(const tagc_schedule *s, uint64_t group) {
    int n = 0;
    for (size_t i = 0; i < s->n; i++) {
        const tagc_scheduled *p = &s->parameters[i];
        if (!is_compressed(p, group)) continue;
        if (!is_short(p) && !(p->moment == TAGC_MOMENT_NONE && p->is_noise)) return 0;
        n++;
    }
    return n > 0;
}

/* Once the first moments of all that is compressed are short, they stay so, and hold no mild parameter up. */
static void settle(tagc_schedule *s) {
    for (size_t i = 0; i < s->n; i++) {
        const tagc_scheduled *p = &s->parameters[i];
        if (!p->is_full || p->fading != 0 || p->is_settled || !is_ripe(s, p->group)) continue;
        for (size_t k = 0; k < s->n; k++) {
            tagc_scheduled *other = &s->parameters[k];
            if (other->group == p->group && (other->fading == 0 || other->kind == TAGC_CLASS_MILD))
                other->is_settled = 1;
        }
    }
}

/* Whether p shares out with q: ranks that exchange one of these exchange the other. */
static int are_alike(const tagc_scheduled *p, const tagc_scheduled *q) {
    return q->is_full && p->group == q->group && p->kind == q->kind && p->now == q->now;
}

/* Shares of those whose windows are full. Returns whether one has changed enough. */
static int share_out(tagc_schedule *s, tagc_scheduled **members) {
    int is_other = 0;
    for (size_t i = 0; i < s->n; i++) {
        tagc_scheduled *p = &s->parameters[i];
        size_t n = 0, first = s->n;
        for (size_t k = 0; p->is_full && k < s->n; k++) {
            if (!are_alike(p, &s->parameters[k])) continue;
            if (n == 0) first = k;
            members[n++] = &s->parameters[k];
        }
        if (first != i) continue;
        set_shares(members, n, tagc_level_share(&s->options, p->kind, p->now));
        for (size_t k = 0; k < n; k++)
            is_other |= fabs(members[k]->next_share / members[k]->share - 1) > TAGC_SHARE_CHANGE;
    }
    return is_other;
}

static int is_through(const tagc_schedule *s) {
    for (size_t i = 0; i < s->n; i++)
        if (s->parameters[i].is_seen && s->parameters[i].now < TAGC_LEVEL_LAST) return 0;
    return 1;
}

tagc_status tagc_schedule_step(tagc_schedule *s, int *changed, int *through) {
    int moves = 0;
    decide_pending(s);
    for (size_t i = 0; i < s->n; i++) {
        tagc_scheduled *p = &s->parameters[i];
        moves |= p->next != p->now;
        p->now = p->next;
    }
    begin_fading(s);
    int follows = share_out(s, s->members) || moves;
    settle(s);
    for (size_t i = 0; i < s->n; i++) {
        tagc_scheduled *p = &s->parameters[i];
        if (p->is_full && follows) p->share = p->next_share;
        p->is_full = 0;
    }
    if (changed) *changed = follows;
    if (through) *through = moves && is_through(s);
    return TAGC_OK;
}

tagc_status tagc_schedule_scale(tagc_schedule *s, double factor) {
    if (!(factor > 0) || !isfinite(factor))
        return tagc_fail(TAGC_ERR_ARGUMENT, "factor is %g, must be above 0 and finite", factor);
    for (size_t i = 0; i < s->n; i++) {
        tagc_scheduled *p = &s->parameters[i];
        tagc_window_scale(&p->window, factor);
        if (p->mean_square >= 0) p->mean_square *= factor * factor;
    }
    return TAGC_OK;
}
