/* What things cost, and how far predictions are from what was measured: as tables. */
#include "cli/plan.h"

#include "core/status.h"
#include <stdlib.h>
#include <string.h>

tagc_status tagc_plan_find_costs(tagc_plan_request *request) {
    const tagc_plan_options *o = &request->options;
    if (o->profile) return tagc_plan_fit_costs(&request->inputs, o->fit_arms);
    if (!(o->compute_s > 0)) return TAGC_OK;
    tagc_setup setup = {
        .model = request->model, .n_batch = (int)o->train.batch_size, .n_tokens = request->n_tokens};
    setup.engine.n_micro_steps = 1;
    tagc_plan_take_costs(&request->inputs, &setup, o->compute_s, o->codec_ns, o->optimizer_ns);
    return TAGC_OK;
}

void tagc_plan_print_costs(const tagc_plan_request *request) {
    const tagc_costs *c = &request->inputs.costs;
    int n_fitted = 0;
    if (!request->options.profile) return;
    for (int i = 0; i < request->inputs.profile.n_points; i++)
        n_fitted += !request->inputs.profile.points[i].is_held_out;
    printf("Costs fitted to %d measured arms of %s, off by %.1f %% (root mean square):\n", n_fitted,
           request->inputs.profile.model, 100 * request->inputs.fit_rms);
    const char *blas = request->inputs.profile.blas;
    printf("  products %.1f Gflop/s%s%s%s, memory %.1f GB/s, update %.2f ns an element, codec %.2f times "
           "what it "
           "takes alone\n",
           1e-9 / c->flop_s, *blas ? " (" : "", blas, *blas ? ")" : "",
           c->byte_s > 0 ? 1e-9 / c->byte_s : 0.0, 1e9 * c->optimizer_s, c->codec_factor);
    printf("  transfers reach %.0f %% of the link, cost %.0f us each, wait behind %.0f kB; moving a byte "
           "takes %.2f ns"
           " of a processor, waiting %.2f of one\n",
           100 * c->link_share, 1e6 * c->overhead_s, 1e-3 * c->queue_bytes, 1e9 * c->cpu_s_per_byte,
           c->poll_cores);
    printf("  each host is taken as a machine of %.0f processors\n", c->cores);
    if (strcmp(request->inputs.profile.model, request->inputs.model_name) != 0)
        printf("  note: the profile is of another model; computing is scaled by its products\n");
}

static void print_checks(const tagc_points *points, const tagc_plan_checked *checked,
                         const tagc_plan_accuracy *accuracy) {
    printf("\n%-28s %11s %11s %9s  %s\n", "", "measured", "simulated", "error", "");
    for (int i = 0; i < points->n_points; i++) {
        const tagc_point *p = &points->points[i];
        printf("%-28s %9.3f s %9.3f s %+7.1f %%  %s%s\n", p->arm, p->total_s, checked[i].simulated_s,
               100 * checked[i].error, p->place, checked[i].is_fitted ? " (fitted)" : "");
    }
    if (accuracy->n_places > 0) {
        printf("the arm that the simulation calls fastest was the fastest in %d of %d places",
               accuracy->n_right, accuracy->n_places);
        if (accuracy->n_right < accuracy->n_places)
            printf("; in the others it took up to %.0f %% longer", 100 * accuracy->most_slower);
        printf("\n");
    }
    if (accuracy->n_held_out > 0)
        printf("held out from the fit: %d points, off by %.1f %% at most, %.1f %% on average\n",
               accuracy->n_held_out, 100 * accuracy->most_error, 100 * accuracy->mean_error);
    else
        printf("none of these points was held out from the fit\n");
}

tagc_status tagc_plan_hold_checks(const tagc_plan_request *request, json_t **out) {
    const tagc_points *points = &request->check;
    tagc_plan_accuracy accuracy;
    *out = NULL;
    if (points->n_points == 0) return TAGC_OK;
    tagc_plan_checked *checked = calloc((size_t)points->n_points, sizeof *checked);
    if (!checked) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for the points of --check");
    tagc_status status = tagc_plan_check(&request->inputs, points, checked, &accuracy);
    if (status == TAGC_OK && !request->options.train.quiet) print_checks(points, checked, &accuracy);
    if (status == TAGC_OK) *out = tagc_plan_checks_json(points, checked);
    free(checked);
    return status;
}
