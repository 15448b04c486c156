/* Compares uniform settings first. Then, flat by flat, the smallest first, it makes a flat dense if the forecast does not
 * get slower. */
#include "plan/choose.h"

#include "core/status.h"

#include <stdlib.h>

static const double shows = 0.002; /* of an iteration; smaller differences are within a forecast's error */

typedef struct chooser {
    tagc_setup setup;
    const tagc_costs *costs;
    const tagc_plan_link *link;
    const tagc_layout *layout;
    tagc_reducer_options *flats; /* (n_flats) */
} chooser;

static tagc_status forecast(const chooser *c, double *iteration_s) {
    tagc_forecast f;
    TAGC_TRY(tagc_plan_simulate(&c->setup, c->costs, c->link, &f));
    *iteration_s = f.iteration_s;
    return TAGC_OK;
}

static void fill(chooser *c, const tagc_candidate *candidate) {
    for (int i = 0; i < c->layout->n_flats; i++) {
        int class_ = c->layout->flats[i].class_;
        if (class_ == TAGC_CLASS_DENSE) continue;
        c->flats[i] = class_ == TAGC_CLASS_COMPRESSED ? candidate->compressed : candidate->mild;
    }
}

/* The next larger flat than `before`; n_flats at the end. Flats of equal size are in order of their numbers. */
static int next_larger(const tagc_layout *layout, int before) {
    int best = layout->n_flats;
    for (int i = 0; i < layout->n_flats; i++) {
        uint64_t n = layout->flats[i].n_padded;
        if (layout->flats[i].class_ == TAGC_CLASS_DENSE) continue;
        if (before < layout->n_flats) {
            uint64_t last = layout->flats[before].n_padded;
            if (n < last || (n == last && i <= before)) continue;
        }
        if (best == layout->n_flats || n < layout->flats[best].n_padded) best = i;
    }
    return best;
}

/* Reducer steps share the worker, the link and latency. So a flat that became dense may allow another one to, and all are
 * tried again until none does. */
static tagc_status thin_out(chooser *c, const tagc_candidate *dense, tagc_choice *out) {
    double limit_s = out->chosen_s * (1 + shows), now_s;
    int n = c->layout->n_flats, n_thinned = 1;
    while (n_thinned > 0) {
        n_thinned = out->n_kept = 0;
        for (int i = next_larger(c->layout, n); i < n; i = next_larger(c->layout, i)) {
            tagc_reducer_options compressed = c->flats[i];
            if (compressed.exchange == dense->compressed.exchange) continue;
            c->flats[i] =
                c->layout->flats[i].class_ == TAGC_CLASS_COMPRESSED ? dense->compressed : dense->mild;
            TAGC_TRY(forecast(c, &now_s));
            if (now_s <= limit_s) {
                n_thinned++;
                continue;
            }
            c->flats[i] = compressed;
            out->n_kept++;
        }
    }
    return forecast(c, &out->chosen_s);
}

static tagc_status choose(chooser *c, const tagc_candidate *candidates, int n, double tolerance,
                          tagc_choice *out) {
    double *iteration_s = calloc((size_t)n, sizeof *iteration_s);
    if (!iteration_s) return tagc_fail(TAGC_ERR_MEMORY, "no memory for %d forecasts", n);
    tagc_status status = TAGC_OK;
    for (int i = 0; status == TAGC_OK && i < n; i++) {
        fill(c, &candidates[i]);
        status = forecast(c, &iteration_s[i]);
        if (i == 0 || iteration_s[i] < iteration_s[out->fastest]) out->fastest = i;
    }
    if (status == TAGC_OK) {
        out->dense_s = iteration_s[0];
        out->fastest_s = iteration_s[out->fastest];
        while (iteration_s[out->candidate] > out->fastest_s * (1 + tolerance)) out->candidate++;
        out->chosen_s = iteration_s[out->candidate];
        fill(c, &candidates[out->candidate]);
        for (int i = 0; i < c->layout->n_flats; i++)
            out->n_flats += c->layout->flats[i].class_ != TAGC_CLASS_DENSE;
        if (out->candidate > 0) status = thin_out(c, &candidates[0], out);
    }
    free(iteration_s);
    return status;
}

tagc_status tagc_plan_choose(const tagc_setup *setup, const tagc_costs *costs, const tagc_plan_link *link,
                             const tagc_candidate *candidates, int n, double tolerance,
                             tagc_reducer_options *flats, tagc_choice *out) {
    *out = (tagc_choice){0};
    if (n < 1) return tagc_fail(TAGC_ERR_ARGUMENT, "n is %d, must be 1 or more candidates", n);
    tagc_layout *layout;
    TAGC_TRY(tagc_setup_layout(setup, &layout));
    for (int i = 0; i < layout->n_flats; i++) flats[i] = layout->flats[i].reducer;
    chooser c = {.setup = *setup, .costs = costs, .link = link, .layout = layout, .flats = flats};
    c.setup.flat_reducers = flats;
    tagc_status status = choose(&c, candidates, n, tolerance, out);
    tagc_layout_destroy(layout);
    return status;
}

/* ---- buckets ---- */

enum { MOST_SIZES = 42 }; /* none, and the powers of two up to TAGC_MOST_BUCKET_ELEMS */

static tagc_status count_units(const tagc_setup *setup, int *n_units) {
    tagc_layout *layout;
    TAGC_TRY(tagc_setup_layout(setup, &layout));
    *n_units = layout->n_units;
    tagc_layout_destroy(layout);
    return TAGC_OK;
}

/* A size that gives the same units as the size before is skipped. */
tagc_status tagc_plan_choose_bucket(const tagc_setup *setup, const tagc_costs *costs,
                                    const tagc_plan_link *link, double tolerance, tagc_bucket_choice *out) {
    tagc_bucket_choice tried[MOST_SIZES];
    tagc_setup s = *setup;
    int n = 0;
    double fastest_s = 0;
    s.flat_reducers = NULL;
    for (s.engine.bucket_elems = 0; s.engine.bucket_elems <= TAGC_MOST_BUCKET_ELEMS;
         s.engine.bucket_elems = s.engine.bucket_elems ? 2 * s.engine.bucket_elems : 1) {
        tagc_bucket_choice *c = &tried[n];
        tagc_forecast f;
        *c = (tagc_bucket_choice){.bucket_elems = s.engine.bucket_elems};
        TAGC_TRY(count_units(&s, &c->n_units));
        if (n > 0 && c->n_units == tried[n - 1].n_units) continue;
        TAGC_TRY(tagc_plan_simulate(&s, costs, link, &f));
        c->chosen_s = f.iteration_s;
        c->without_s = tried[0].chosen_s;
        if (n == 0 || c->chosen_s < fastest_s) fastest_s = c->chosen_s;
        n++;
        if (setup->engine.wrap != TAGC_WRAP_STAGE) break;
    }
    *out = tried[0];
    for (int i = 1; i < n && out->chosen_s > fastest_s * (1 + tolerance); i++) *out = tried[i];
    return TAGC_OK;
}
