/* Fits costs to measured iterations. Memory, codec, optimizer and link were measured alone and are used directly. A few
 * numbers show only in whole iterations. They are searched for, within bounds of real machines:
 *
 *   flop_s          speed of matrix products, with communication beside them
 *   codec_factor    slowdown of the codec beside computing and communication
 *   overhead_s      cost of a transfer besides latency
 *   queue_bytes     bytes in the buffers of a busy link, in front of a message
 *   link_share      share of the plain rate that transfers reach
 *   cpu_s_per_byte  processor time to move bytes, taken from computing
 *   poll_cores      and to wait for them
 *
 * The search minimises the sum of squares of log(simulated / measured) of iterations and, with less weight, of their
 * computing part. Outliers count less. Weak pulls towards the starting values hold numbers that no point determines. */
#include "core/status.h"
#include "files/result_file.h"
#include "plan/deployment.h"
#include "plan/profile.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

enum { MAX_ROUNDS = 60 };

static const double compute_weight = 0.1, pull_weight = 1e-5, outlier = 0.1;
/* Steps of a logarithm for numeric derivatives: about as large as the jumps where events change their order. One of them may
 * be caught by such a jump where another is not. */
static const double probes[] = {0.02, 0.04, 0.01};
enum { N_PROBES = sizeof probes / sizeof probes[0] };

typedef struct knob {
    size_t offset;
    double min, initial, max;
} knob;

#define AT(field) offsetof(tagc_costs, field)
static const knob knobs[] = {
    {AT(flop_s), 0, 0, 0}, /* bounds: from the points */
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

/* Beyond `outlier` it grows like the square root, so that one disturbed measurement does not distort all costs. */
static double calm(double residual) {
    double x = residual / outlier, y = outlier * sqrt(2 * (sqrt(1 + x * x) - 1));
    return residual < 0 ? -y : y;
}

/* residuals (2 n_fitted + N_KNOBS): two per point, one per pull. Returns their sum of squares, or infinity
 * with f->status set. *rms is that of the iterations alone. */
static double measure(fit *f, tagc_costs *costs, double *residuals, double *rms) {
    double sum = 0, n = f->n_fitted;
    int at = 0;
    *rms = 0;
    for (int i = 0; i < f->points->n_points; i++) {
        const tagc_point *p = &f->points->points[i];
        tagc_forecast forecast;
        if (p->is_held_out) continue;
        if (p->cores > 0) costs->cores = p->cores;
        tagc_status status = tagc_deployment_run(&f->deployments[i], costs, &p->link, &forecast);
        if (status != TAGC_OK) {
            f->status = status;
            return (double)INFINITY;
        }
        double total = log(forecast.iteration_s / p->total_s), compute = 0;
        if (p->compute_s > 0 && forecast.compute_s > 0) compute = log(forecast.compute_s / p->compute_s);
        *rms += total * total / n;
        residuals[at++] = calm(total) / sqrt(n);
        residuals[at++] = calm(compute) * sqrt(compute_weight / n);
    }
    for (int k = 0; k < N_KNOBS; k++)
        residuals[at++] = sqrt(pull_weight) * log(*value_of(costs, &f->knobs[k]) / f->knobs[k].initial);
    for (int i = 0; i < at; i++) sum += residuals[i] * residuals[i];
    *rms = sqrt(*rms);
    return sum;
}

/* The processors that a rank has to itself: at most one, for its computing thread. */
static double speed_alone(const tagc_point *p) {
    int n_machines = p->setup.n_machines > 0 ? p->setup.n_machines : p->setup.n_hosts;
    double cores = p->cores * n_machines / p->setup.world_size;
    return cores > 0 && cores < 1 ? cores : 1;
}

/* With ZeRO-2, gathers run beside the update and slow it down. If there are other points, only they give the time of an
 * update. */
static int updates_alone(const tagc_points *points, const tagc_point *p) {
    for (int i = 0; i < points->n_points && p->setup.engine.sharding == TAGC_SHARD_GRAD; i++)
        if (!points->points[i].is_held_out && points->points[i].setup.engine.sharding != TAGC_SHARD_GRAD)
            return 0;
    return 1;
}

/* Sets the costs that need no search, and the start of the search. */
static tagc_status start(fit *f, tagc_costs *costs) {
    const tagc_points *points = f->points;
    double *flop_s = calloc((size_t)points->n_points * 3, sizeof *flop_s);
    double *optimizer_s = flop_s + points->n_points, *byte_s = optimizer_s + points->n_points;
    int n = 0, n_updates = 0, n_bytes = 0;
    if (!flop_s) return tagc_fail(TAGC_ERR_MEMORY, "no memory for a fit");
    for (int i = 0; i < points->n_points; i++) {
        const tagc_point *p = &points->points[i];
        if (p->is_held_out) continue;
        double n_owned = 0, flops = tagc_setup_flops(&p->setup), alone = speed_alone(p);
        for (int k = 0; k < f->deployments[i].layout->n_flats; k++)
            n_owned += (double)f->deployments[i].flats[k].n_owned;
        flop_s[n++] = p->compute_s * alone / flops;
        if (updates_alone(points, p)) optimizer_s[n_updates++] = p->optimizer_s * alone / n_owned;
        if (p->byte_s > 0) byte_s[n_bytes++] = p->byte_s;
    }
    tagc_costs_init(costs);
    costs->optimizer_s = tagc_result_spread_of(optimizer_s, n_updates).median;
    costs->byte_s = n_bytes > 0 ? tagc_result_spread_of(byte_s, n_bytes).median : 0;
    costs->flop_s = tagc_result_spread_of(flop_s, n).median;
    costs->n_codec = points->n_codec;
    for (int i = 0; i < points->n_codec; i++) costs->codec[i] = points->codec[i];
    for (int i = 0; i < TAGC_N_GATHER_KINDS; i++) costs->gather[i] = points->gather[i];
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

/* Solves a symmetric positive definite system in place. x (N_KNOBS) is the right side, then the solution. */
static void solve(double a[N_KNOBS][N_KNOBS], double *x) {
    for (int k = 0; k < N_KNOBS; k++)
        for (int i = k + 1; i < N_KNOBS; i++) {
            double factor = a[i][k] / a[k][k];
            for (int j = k; j < N_KNOBS; j++) a[i][j] -= factor * a[k][j];
            x[i] -= factor * x[k];
        }
    for (int k = N_KNOBS - 1; k >= 0; k--) {
        for (int j = k + 1; j < N_KNOBS; j++) x[k] -= a[k][j] * x[j];
        x[k] /= a[k][k];
    }
}

static void turn(const fit *f, tagc_costs *costs, int which, double step) {
    const knob *k = &f->knobs[which];
    double *value = value_of(costs, k);
    *value = fmin(fmax(*value * exp(step), k->min), k->max);
}

/* Derivatives of the n residuals by the logarithm of each knob, one row per knob. A knob at its upper bound is decreased. */
static void slopes(fit *f, const tagc_costs *costs, double probe, const double *residuals, int n,
                   double *rows, double *scratch) {
    for (int k = 0; k < N_KNOBS; k++) {
        tagc_costs turned = *costs;
        double rms, step = *value_of(&turned, &f->knobs[k]) * 1.05 < f->knobs[k].max ? probe : -probe;
        turn(f, &turned, k, step);
        (void)measure(f, &turned, scratch, &rms);
        for (int i = 0; i < n; i++) rows[k * n + i] = (scratch[i] - residuals[i]) / step;
    }
}

/* Levenberg-Marquardt: blends Newton's step with a short step downhill. */
static tagc_status search(fit *f, tagc_costs *costs, double probe, double *rms) {
    int n = 2 * f->n_fitted + N_KNOBS;
    double *residuals = calloc((size_t)n * (N_KNOBS + 2), sizeof *residuals), damping = 10;
    if (!residuals) return tagc_fail(TAGC_ERR_MEMORY, "no memory for a fit");
    double *scratch = residuals + n, *rows = scratch + n, best = measure(f, costs, residuals, rms);
    for (int round = 0; round < MAX_ROUNDS && damping < 1e6 && f->status == TAGC_OK; round++) {
        double before = best;
        slopes(f, costs, probe, residuals, n, rows, scratch);
        while (damping < 1e6 && f->status == TAGC_OK) {
            double a[N_KNOBS][N_KNOBS], step[N_KNOBS], trial_rms;
            tagc_costs trial = *costs;
            for (int k = 0; k < N_KNOBS; k++) {
                step[k] = 0;
                for (int i = 0; i < n; i++) step[k] -= rows[k * n + i] * residuals[i];
                for (int j = 0; j < N_KNOBS; j++) {
                    a[k][j] = 0;
                    for (int i = 0; i < n; i++) a[k][j] += rows[k * n + i] * rows[j * n + i];
                }
                a[k][k] = a[k][k] * (1 + damping) + damping * pull_weight;
            }
            solve(a, step);
            for (int k = 0; k < N_KNOBS; k++) turn(f, &trial, k, fmax(-0.5, fmin(0.5, step[k])));
            double sum = measure(f, &trial, scratch, &trial_rms);
            if (sum < best) {
                best = sum;
                *costs = trial;
                *rms = trial_rms;
                for (int i = 0; i < n; i++) residuals[i] = scratch[i];
                damping /= 4;
                break;
            }
            damping *= 4;
        }
        if (best > before * (1 - 1e-4)) break;
    }
    free(residuals);
    return f->status;
}

/* Searches with each probe from the same start, and keeps the best result. */
static tagc_status search_all(fit *f, tagc_costs *costs, double *rms) {
    tagc_costs start_costs = *costs;
    for (int i = 0; i < N_PROBES; i++) {
        tagc_costs found = start_costs;
        double found_rms;
        TAGC_TRY(search(f, &found, probes[i], &found_rms));
        if (i > 0 && found_rms >= *rms) continue;
        *costs = found;
        *rms = found_rms;
    }
    return TAGC_OK;
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
    if (status == TAGC_OK) status = search_all(&f, out, rms);
    for (int i = 0; i < n_made; i++) tagc_deployment_destroy(&f.deployments[i]);
    free(f.deployments);
    return status;
}
