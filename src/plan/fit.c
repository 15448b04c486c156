/* Costs from measured iterations. What was measured by itself (memory, codec, optimizer, link) is taken as it is; a
 * few numbers that only show in whole iterations are searched for, one after the other, each within bounds that a
 * machine can have:
 *
 *   flop_s          how fast products really are, with what goes on beside them
 *   codec_factor    the codec in the company of computing and communicating
 *   overhead_s      what each transfer costs besides latency
 *   queue_bytes     what stands in the buffers of a busy link before a message
 *   link_share      what transfers reach of the rate that plain ones got
 *   cpu_s_per_byte  processor time to move bytes, taken from those who compute
 *   poll_cores      and to wait for them
 *
 * The sum of squares of log(simulated / measured) of iterations, and with less weight of their computing part,
 * becomes least; weak pulls towards the starting values keep numbers that no point speaks about where they were. */
#include "core/status.h"
#include "plan/deployment.h"
#include "plan/profile.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

enum { MAX_ROUNDS = 60 };

static const double compute_weight = 0.1, pull_weight = 1e-4;
static const double first_step = 0.6, last_step = 0.01; /* of a logarithm */

typedef struct knob {
    size_t offset;
    double min, initial, max;
} knob;

#define AT(field) offsetof(tagc_costs, field)
static const knob knobs[] = {
    {AT(flop_s), 0, 0, 0}, /* bounds from the points */
    {AT(codec_factor), 0.3, 1, 4},
    {AT(overhead_s), 1e-6, 5e-5, 0.02},
    {AT(queue_bytes), 1e3, 1e5, 8e6},
    {AT(link_share), 0.5, 0.97, 1.1},
    {AT(cpu_s_per_byte), 1e-11, 3e-10, 5e-9},
    {AT(poll_cores), 0.01, 0.1, 1},
};
enum { N_KNOBS = sizeof knobs / sizeof knobs[0] };

typedef struct fit {
    const tagc_points *points;
    tagc_deployment *deployments; /* (n_points) */
    knob knobs[N_KNOBS];
    int n_fitted;
    tagc_status status;
} fit;

static double *value_of(tagc_costs *costs, const knob *k) {
    return (double *)((char *)costs + k->offset);
}

/* Mean over fitted points of the squared logarithms; *rms of the iterations alone. */
static double distance(fit *f, tagc_costs *costs, double *rms) {
    double sum = 0, pull = 0;
    *rms = 0;
    for (int i = 0; i < f->points->n_points; i++) {
        const tagc_point *p = &f->points->points[i];
        tagc_forecast forecast;
        double remote[TAGC_N_LEGS];
        if (p->is_held_out) continue;
        if (p->cores > 0) costs->cores = p->cores;
        tagc_status status = tagc_deployment_run(&f->deployments[i], costs, &p->link, &forecast, remote);
        if (status != TAGC_OK) {
            f->status = status;
            return (double)INFINITY;
        }
        double total = log(forecast.iteration_s / p->total_s), compute = 0;
        if (p->compute_s > 0 && forecast.compute_s > 0) compute = log(forecast.compute_s / p->compute_s);
        *rms += total * total;
        sum += total * total + compute_weight * compute * compute;
    }
    for (int k = 0; k < N_KNOBS; k++) {
        double off = log(*value_of(costs, &f->knobs[k]) / f->knobs[k].initial);
        pull += pull_weight * off * off;
    }
    *rms = sqrt(*rms / f->n_fitted);
    return sum / f->n_fitted + pull;
}

static double median_of(double *values, int n) {
    for (int i = 1; i < n; i++)
        for (int k = i; k > 0 && values[k - 1] > values[k]; k--) {
            double swap = values[k];
            values[k] = values[k - 1];
            values[k - 1] = swap;
        }
    return n == 0 ? 0 : n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

/* Processors that a rank has of its own, at most one for one thread that computes. */
static double speed_alone(const tagc_point *p) {
    int n_machines = p->setup.n_machines > 0 ? p->setup.n_machines : p->setup.n_hosts;
    double cores = p->cores * n_machines / p->setup.world_size;
    return cores > 0 && cores < 1 ? cores : 1;
}

/* What needs no search, and where the search starts. */
static tagc_status start(fit *f, tagc_costs *costs) {
    const tagc_points *points = f->points;
    double *flop_s = calloc((size_t)points->n_points * 3, sizeof *flop_s);
    double *optimizer_s = flop_s + points->n_points, *byte_s = optimizer_s + points->n_points;
    int n = 0, n_bytes = 0;
    if (!flop_s) return tagc_fail(TAGC_ERR_MEMORY, "no memory for a fit");
    for (int i = 0; i < points->n_points; i++) {
        const tagc_point *p = &points->points[i];
        if (p->is_held_out) continue;
        double n_owned = 0, flops = tagc_setup_flops(&p->setup), alone = speed_alone(p);
        for (int k = 0; k < f->deployments[i].layout->n_flats; k++)
            n_owned += (double)f->deployments[i].flats[k].n_owned;
        flop_s[n] = p->compute_s * alone / flops;
        optimizer_s[n++] = p->optimizer_s * alone / n_owned;
        if (p->byte_s > 0) byte_s[n_bytes++] = p->byte_s;
    }
    tagc_costs_init(costs);
    costs->optimizer_s = median_of(optimizer_s, n);
    costs->byte_s = median_of(byte_s, n_bytes);
    costs->flop_s = median_of(flop_s, n);
    costs->n_codec = points->n_codec;
    for (int i = 0; i < points->n_codec; i++) costs->codec[i] = points->codec[i];
    free(flop_s);
    if (!(costs->flop_s > 0))
        return tagc_fail(TAGC_ERR_CORRUPT, "the iterations of the profile took no time to compute");
    for (int k = 0; k < N_KNOBS; k++) {
        f->knobs[k] = knobs[k];
        if (knobs[k].offset == AT(flop_s))
            f->knobs[k] = (knob){AT(flop_s), 0.3 * costs->flop_s, costs->flop_s, 1.5 * costs->flop_s};
        *value_of(costs, &f->knobs[k]) = f->knobs[k].initial;
    }
    return TAGC_OK;
}

/* Each knob in turn, a step up or down; steps halve where neither helps. */
static void search(fit *f, tagc_costs *costs, double *rms) {
    double steps[N_KNOBS], best = distance(f, costs, rms);
    for (int k = 0; k < N_KNOBS; k++) steps[k] = first_step;
    for (int round = 0; round < MAX_ROUNDS && f->status == TAGC_OK; round++) {
        double largest = 0;
        for (int k = 0; k < N_KNOBS; k++) {
            double *value = value_of(costs, &f->knobs[k]), before = *value, most = fabs(steps[k]);
            if (most < last_step) continue;
            int improved = 0;
            for (int turn = 0; turn < 2 && !improved; turn++) {
                double trial_rms;
                *value = fmin(fmax(before * exp(steps[k]), f->knobs[k].min), f->knobs[k].max);
                double trial = *value != before ? distance(f, costs, &trial_rms) : (double)INFINITY;
                improved = trial < best;
                if (improved) {
                    best = trial;
                    *rms = trial_rms;
                    steps[k] *= 1.3;
                } else {
                    *value = before;
                    steps[k] = -steps[k];
                }
            }
            if (!improved) steps[k] /= 2;
            largest = fabs(steps[k]) > largest ? fabs(steps[k]) : largest;
        }
        if (largest < last_step) return;
    }
}

tagc_status tagc_costs_fit(const tagc_points *points, tagc_costs *out, double *rms) {
    fit f = {.points = points, .status = TAGC_OK};
    int n = points->n_points, n_made = 0;
    for (int i = 0; i < n; i++) f.n_fitted += !points->points[i].is_held_out;
    if (f.n_fitted == 0) return tagc_fail(TAGC_ERR_ARGUMENT, "the profile has no arm to fit");
    f.deployments = calloc((size_t)n, sizeof *f.deployments);
    tagc_status status = f.deployments ? TAGC_OK : tagc_fail(TAGC_ERR_MEMORY, "no memory for %d points", n);
    for (; status == TAGC_OK && n_made < n; n_made += status == TAGC_OK)
        status = tagc_deployment_create(&points->points[n_made].setup, &f.deployments[n_made]);
    if (status == TAGC_OK) status = start(&f, out);
    if (status == TAGC_OK) {
        search(&f, out, rms);
        status = f.status;
    }
    for (int i = 0; i < n_made; i++) tagc_deployment_destroy(&f.deployments[i]);
    free(f.deployments);
    return status;
}
