/* --exchange auto while training runs: windows of steps, and the switch from one setting to another. measure/machine.c
 * measures before the first step. */
#include "auto/auto.h"

#include "auto/candidates.h"
#include "core/status.h"
#include "files/result_file.h"
#include "launch/over_ranks.h"
#include "plan/choose.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    SKIPPED_STEPS = 2, /* after a switch, because they touch new buffers for the first time */
    MEASURED_STEPS = 3,
    MOST_TURNS = 3,     /* of dense and choice, if their times are too close to decide */
    WATCHED_STEPS = 20, /* per window of a settled run */
    CHANGED_LOOKS = 3   /* windows that must agree before the search starts again */
};

static const double tolerance = 0.02; /* a milder exchange may be so much slower than the fastest */
static const double least_gain = 0.01;
static const double clear_gain = 0.05; /* if the gain is larger, one turn decides */
static const double changed = 0.15;

typedef enum phase { PHASE_DENSE, PHASE_CHOICE, PHASE_SETTLED } phase;

struct tagc_auto {
    tagc_auto_setup setup;
    tagc_machine machine;
    tagc_candidate candidates[TAGC_MACHINE_MAX_CANDIDATES];
    int n_candidates, n_flats;
    tagc_reducer_options *dense, *chosen; /* (n_flats) */
    uint8_t *is_chosen;                   /* (n_flats) 1 if the choice differs from dense */
    tagc_choice choice;
    phase phase;
    int turn, n_seen, n_changed;
    double total_s[WATCHED_STEPS];         /* of each step of this window */
    tagc_fsdp_stats stats[MEASURED_STEPS]; /* of these steps */
    tagc_fsdp_stats dense_stats;           /* of its median dense step */
    double dense_s, chosen_s;              /* sums of medians over turns */
    double settled_s;
};

__attribute__((format(printf, 2, 3))) static void say(const tagc_auto *a, const char *format, ...) {
    char line[512];
    va_list args;
    if (tagc_comm_rank(a->setup.comm) != 0 || !a->setup.say) return;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    a->setup.say(a->setup.context, line);
}

/* ---- switching ---- */

static tagc_status switch_to(tagc_auto *a, const tagc_reducer_options *flats, phase next) {
    for (int i = 0; i < a->n_flats; i++)
        if (a->is_chosen[i]) TAGC_TRY(tagc_fsdp_set_exchange(a->setup.fsdp, i, &flats[i]));
    a->phase = next;
    a->n_seen = 0;
    return TAGC_OK;
}

static void settle(tagc_auto *a, double settled_s) {
    a->phase = PHASE_SETTLED;
    a->settled_s = settled_s;
    a->n_seen = a->n_changed = 0;
}

/* ---- choosing ---- */

static void explain(const tagc_auto *a) {
    const tagc_choice *c = &a->choice;
    say(a, "auto: link %.3g Gbit/s, %.0f us; a dense step takes %.3g s, of which %.3g s waiting",
        a->machine.link.bytes_per_s * 8e-9, a->machine.link.latency_s * 1e6, a->dense_s / a->turn,
        a->dense_stats.wait_gather_s + a->dense_stats.wait_reduce_s);
    if (c->n_flats == 0)
        say(a, "auto: dense stays: there is nothing that could be compressed");
    else if (c->fastest == 0)
        say(a, "auto: dense stays: nothing is forecast to be faster than its %.3g s", c->dense_s);
    else if (c->candidate == 0 || c->n_kept == 0)
        say(a, "auto: dense stays: the fastest, %s, is forecast to take %.3g s against %.3g s",
            a->candidates[c->fastest].name, c->fastest_s, c->dense_s);
    else
        say(a, "auto: %s for %d of %d flats, forecast %.3g s against %.3g s dense%s%s; trying it",
            a->candidates[c->candidate].name, c->n_kept, c->n_flats, c->chosen_s, c->dense_s,
            c->fastest != c->candidate ? "; no faster than that by more than 2 %: " : "",
            c->fastest != c->candidate ? a->candidates[c->fastest].name : "");
}

static tagc_status choose(tagc_auto *a) {
    tagc_setup setup;
    tagc_costs costs;
    tagc_auto_plan(&a->setup, &a->machine, &a->dense_stats, &setup, &costs);
    tagc_status status = tagc_plan_choose(&setup, &costs, &a->machine.link, a->candidates, a->n_candidates,
                                          tolerance, a->chosen, &a->choice);
    TAGC_TRY(tagc_abort_unless_ok(a->setup.comm, status));
    TAGC_TRY(tagc_take_from_rank_0(a->setup.comm, &a->choice, sizeof a->choice));
    TAGC_TRY(tagc_take_from_rank_0(a->setup.comm, a->chosen, (size_t)a->n_flats * sizeof *a->chosen));
    explain(a);
    if (a->choice.candidate == 0 || a->choice.n_kept == 0) {
        settle(a, a->dense_s / a->turn);
        return TAGC_OK;
    }
    for (int i = 0; i < a->n_flats; i++) a->is_chosen[i] = a->chosen[i].exchange != a->dense[i].exchange;
    return switch_to(a, a->chosen, PHASE_CHOICE);
}

/* ---- windows ---- */

static tagc_status end_dense(tagc_auto *a, double median_s) {
    a->dense_s += median_s;
    a->turn++;
    return a->turn == 1 ? choose(a) : switch_to(a, a->chosen, PHASE_CHOICE);
}

static tagc_status end_choice(tagc_auto *a, double median_s) {
    const char *name = a->candidates[a->choice.candidate].name;
    a->chosen_s += median_s;
    double gain = 1 - a->chosen_s / a->dense_s;
    if (fabs(gain) < clear_gain && a->turn < MOST_TURNS) return switch_to(a, a->dense, PHASE_DENSE);
    if (gain >= least_gain) {
        say(a, "auto: %s stays: %.3g s per step against %.3g s dense, %.2fx", name, a->chosen_s / a->turn,
            a->dense_s / a->turn, a->dense_s / a->chosen_s);
        settle(a, median_s);
        return TAGC_OK;
    }
    say(a, "auto: dense stays: %s took %.3g s per step, dense %.3g s", name, a->chosen_s / a->turn,
        a->dense_s / a->turn);
    TAGC_TRY(switch_to(a, a->dense, PHASE_DENSE));
    settle(a, a->dense_s / a->turn);
    return TAGC_OK;
}

static tagc_status begin(tagc_auto *a) {
    a->turn = 0;
    a->dense_s = a->chosen_s = 0;
    return switch_to(a, a->dense, PHASE_DENSE);
}

static tagc_status look(tagc_auto *a, double median_s) {
    a->n_seen = 0;
    a->n_changed = fabs(median_s / a->settled_s - 1) > changed ? a->n_changed + 1 : 0;
    if (a->n_changed < CHANGED_LOOKS) return TAGC_OK;
    say(a, "auto: a step takes %.3g s where it took %.3g s: measuring again", median_s, a->settled_s);
    TAGC_TRY(tagc_machine_measure_link(a->setup.comm, &a->machine));
    return begin(a);
}

/* The number of steps is odd, so one of them is the median. */
static void keep_median(tagc_auto *a, double median_s) {
    for (int i = 0; i < MEASURED_STEPS; i++)
        if (a->total_s[i] == median_s) a->dense_stats = a->stats[i];
}

tagc_status tagc_auto_step(tagc_auto *a, const tagc_fsdp_stats *stats, double wall_s) {
    int n_skipped = a->phase == PHASE_SETTLED ? 0 : SKIPPED_STEPS;
    int n_measured = a->phase == PHASE_SETTLED ? WATCHED_STEPS : MEASURED_STEPS;
    if (tagc_comm_world_size(a->setup.comm) == 1) return TAGC_OK;
    int at = a->n_seen++ - n_skipped;
    if (at >= 0) a->total_s[at] = wall_s;
    if (at >= 0 && a->phase != PHASE_SETTLED) a->stats[at] = *stats;
    if (at + 1 < n_measured) return TAGC_OK;
    double median_s = tagc_result_spread_of(a->total_s, n_measured).median;
    if (a->phase == PHASE_DENSE) keep_median(a, median_s);
    TAGC_TRY(tagc_max_over_ranks(a->setup.comm, &median_s, 1)); /* all wait for the slowest rank */
    if (a->phase == PHASE_SETTLED) return look(a, median_s);
    return a->phase == PHASE_DENSE ? end_dense(a, median_s) : end_choice(a, median_s);
}

int tagc_auto_is_settled(const tagc_auto *a) {
    return a->phase == PHASE_SETTLED;
}

/* ---- life ---- */

static tagc_status make(tagc_auto *a) {
    size_t n = (size_t)tagc_fsdp_n_flats(a->setup.fsdp);
    a->n_flats = (int)n;
    a->dense = calloc(n, sizeof *a->dense);
    a->chosen = calloc(n, sizeof *a->chosen);
    a->is_chosen = calloc(n, sizeof *a->is_chosen);
    if (!a->dense || !a->chosen || !a->is_chosen)
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for the choices of %d flats", a->n_flats);
    a->n_candidates = tagc_auto_candidates(&a->setup.engine, a->candidates);
    for (int i = 0; i < a->n_flats; i++) {
        tagc_layout_flat flat;
        TAGC_TRY(tagc_fsdp_flat_info(a->setup.fsdp, i, &flat));
        a->dense[i] = flat.reducer;
        if (flat.class_ == TAGC_CLASS_DENSE) continue;
        a->dense[i] =
            flat.class_ == TAGC_CLASS_COMPRESSED ? a->candidates[0].compressed : a->candidates[0].mild;
        a->is_chosen[i] = 1;
    }
    if (tagc_comm_world_size(a->setup.comm) == 1) return TAGC_OK;
    TAGC_TRY(tagc_machine_measure_codec(&a->setup.engine, a->candidates, a->n_candidates, &a->machine));
    return tagc_machine_find_hosts(a->setup.comm, &a->machine);
}

tagc_status tagc_auto_create(const tagc_auto_setup *setup, tagc_auto **out) {
    *out = NULL;
    tagc_auto *a = calloc(1, sizeof *a);
    tagc_status status = TAGC_OK;
    if (!a) status = tagc_fail(TAGC_ERR_MEMORY, "no memory for --exchange auto");
    if (status == TAGC_OK) {
        a->setup = *setup;
        status = make(a);
    }
    status = tagc_abort_unless_ok(setup->comm, status);
    if (status == TAGC_OK) status = tagc_machine_measure_link(setup->comm, &a->machine);
    if (status == TAGC_OK) status = begin(a);
    if (status == TAGC_OK && tagc_comm_world_size(setup->comm) == 1) {
        say(a, "auto: dense stays: of one rank nothing travels");
        settle(a, 0);
    }
    if (status != TAGC_OK) {
        tagc_auto_destroy(a);
        return status;
    }
    *out = a;
    return TAGC_OK;
}

void tagc_auto_destroy(tagc_auto *a) {
    if (!a) return;
    free(a->dense);
    free(a->chosen);
    free(a->is_chosen);
    free(a);
}
