/* What things cost: fitted to a profile, or given by hand; and how far predictions are from what was measured. */
#include "cli/plan.h"

#include "core/status.h"
#include "files/result_file.h"
#include "train/saved.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- points ---- */

/* Results say all options of tagc train by name; those that this version does not know are passed over. */
static tagc_status read_engine(const json_t *options, tagc_fsdp_options *out) {
    const tagc_command *command = &tagc_train_command;
    tagc_train_options values = {0};
    for (int i = 0; i < command->n_options; i++) {
        const char *name = command->options[i].name, *initial = command->options[i].initial;
        const json_t *value = json_object_get(options, name);
        const char *text = tagc_saved_text(options, name);
        char number[40];
        if (json_is_number(value) || json_is_boolean(value)) {
            if (json_is_number(value))
                snprintf(number, sizeof number, "%.17g", json_number_value(value));
            else
                snprintf(number, sizeof number, "%s", json_is_true(value) ? "yes" : "no");
            text = number;
        }
        if (json_is_object(value) || json_is_array(value))
            return tagc_fail(TAGC_ERR_CORRUPT, "options.%.40s is neither a text nor a number", name);
        if (!text) text = initial ? initial : "";
        TAGC_TRY(tagc_options_set(command, &values, i, text, "options of the result: "));
    }
    /* The names live in the result, which is closed after reading. */
    if (values.compress == TAGC_POLICY_NAMES)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "compress is names: arms of a profile need one of the other policies");
    values.compress_names = NULL;
    tagc_train_fsdp(&values, out);
    return TAGC_OK;
}

tagc_status tagc_plan_read_points(const char *list, tagc_points *out) {
    for (const char *at = list;; at++) {
        size_t n = strcspn(at, ",");
        char *path = strndup(at, n);
        if (!path) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for the names of files");
        tagc_status status =
            n > 0 ? tagc_points_read(out, path, read_engine)
                  : tagc_fail(TAGC_ERR_ARGUMENT, "an empty name in the list of files \"%.80s\"", list);
        free(path);
        TAGC_TRY(status);
        at += n;
        if (!*at) return TAGC_OK;
    }
}

static int is_in_list(const char *list, const char *name) {
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strcspn(at, ",") == strlen(name) && strncmp(at, name, strlen(name)) == 0) return 1;
    return 0;
}

/* ---- costs ---- */

static tagc_status hold_out(tagc_plan_request *request) {
    const char *list = request->options.fit_arms;
    tagc_points *points = &request->profile;
    int n_left = 0;
    for (int i = 0; i < points->n_points; i++) {
        points->points[i].is_held_out = list && !is_in_list(list, points->points[i].arm);
        n_left += !points->points[i].is_held_out;
    }
    if (n_left > 0) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT,
                     "--fit-arms is \"%.80s\"; the profile has no such arm (it begins with %s)",
                     list ? list : "", points->n_points > 0 ? points->points[0].arm : "none at all");
}

/* Costs by hand: one kind of codec, whatever it is asked to do. */
static void take_given(tagc_plan_request *request) {
    const tagc_plan_options *o = &request->options;
    tagc_setup setup = {
        .model = request->model, .n_batch = (int)o->train.batch_size, .n_tokens = request->n_tokens};
    tagc_costs *c = &request->costs;
    setup.engine.n_micro_steps = 1;
    tagc_costs_init(c);
    c->flop_s = o->compute_s / tagc_setup_flops(&setup);
    c->optimizer_s = 1e-9 * o->optimizer_ns;
    static const tagc_codec_cost kinds[] = {{.exchange = TAGC_EXCHANGE_PACKED, .sparsity = 0.9875},
                                            {.exchange = TAGC_EXCHANGE_SKETCH, .sparsity = 0.9875},
                                            {.exchange = TAGC_EXCHANGE_DIRECT, .sparsity = 0.9875},
                                            {.exchange = TAGC_EXCHANGE_DIRECT, .sparsity = 0}};
    for (size_t i = 0; o->codec_ns > 0 && i < sizeof kinds / sizeof kinds[0]; i++) {
        tagc_codec_cost *codec = &c->codec[c->n_codec++];
        *codec = kinds[i];
        for (int phase = 0; phase < TAGC_PHASE_WAIT; phase++)
            codec->elem_s[phase] = 1e-9 * o->codec_ns / TAGC_PHASE_WAIT;
    }
    request->has_costs = 1;
}

tagc_status tagc_plan_find_costs(tagc_plan_request *request) {
    if (request->options.profile) {
        TAGC_TRY(hold_out(request));
        TAGC_TRY(tagc_costs_fit(&request->profile, &request->costs, &request->fit_rms));
        request->has_costs = 1;
    } else if (request->options.compute_s > 0) {
        take_given(request);
    }
    return TAGC_OK;
}

void tagc_plan_print_costs(const tagc_plan_request *request) {
    const tagc_costs *c = &request->costs;
    int n_fitted = 0;
    if (!request->options.profile) return;
    for (int i = 0; i < request->profile.n_points; i++) n_fitted += !request->profile.points[i].is_held_out;
    printf("Costs fitted to %d measured arms of %s, off by %.1f %% (root mean square):\n", n_fitted,
           request->profile.model, 100 * request->fit_rms);
    printf("  products %.1f Gflop/s, memory %.1f GB/s, update %.2f ns an element, codec %.2f times what it "
           "takes alone\n",
           1e-9 / c->flop_s, c->byte_s > 0 ? 1e-9 / c->byte_s : 0.0, 1e9 * c->optimizer_s, c->codec_factor);
    printf("  transfers reach %.0f %% of the link, cost %.0f us each, wait behind %.0f kB; moving a byte "
           "takes %.2f ns"
           " of a processor, waiting %.2f of one\n",
           100 * c->link_share, 1e6 * c->overhead_s, 1e-3 * c->queue_bytes, 1e9 * c->cpu_s_per_byte,
           c->poll_cores);
    printf("  each host is taken as a machine of %.0f processors\n", c->cores);
    if (strcmp(request->profile.model, request->model_name) != 0)
        printf("  note: the profile is of another model; computing is scaled by its products\n");
}

/* What the fit has seen: beyond it a forecast is an extrapolation. */
static void find_seen(const tagc_points *points, int world_sizes[2], double bytes_per_s[2]) {
    world_sizes[0] = world_sizes[1] = 0;
    bytes_per_s[0] = bytes_per_s[1] = 0;
    for (int i = 0, n = 0; i < points->n_points; i++) {
        const tagc_point *p = &points->points[i];
        if (p->is_held_out) continue;
        int is_first = n++ == 0;
        if (is_first || p->setup.world_size < world_sizes[0]) world_sizes[0] = p->setup.world_size;
        if (is_first || p->setup.world_size > world_sizes[1]) world_sizes[1] = p->setup.world_size;
        if (is_first || p->link.bytes_per_s < bytes_per_s[0]) bytes_per_s[0] = p->link.bytes_per_s;
        if (is_first || p->link.bytes_per_s > bytes_per_s[1]) bytes_per_s[1] = p->link.bytes_per_s;
    }
}

int tagc_plan_largest_seen(const tagc_plan_request *request) {
    int world_sizes[2];
    double bytes_per_s[2];
    find_seen(&request->profile, world_sizes, bytes_per_s);
    return world_sizes[1];
}

json_t *tagc_plan_costs_json(const tagc_plan_request *request) {
    const tagc_costs *c = &request->costs;
    if (!request->has_costs) return json_null();
    json_t *json = json_pack("{s:s, s:o, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "source",
                             request->options.profile ? request->options.profile : "given", "fit_rms",
                             request->options.profile ? tagc_json_real(request->fit_rms) : json_null(),
                             "flop_s", c->flop_s, "optimizer_s_per_elem", c->optimizer_s, "memory_s_per_byte",
                             c->byte_s, "codec_factor", c->codec_factor, "transfer_s", c->overhead_s,
                             "queue_bytes", c->queue_bytes, "link_share", c->link_share, "cpu_s_per_byte",
                             c->cpu_s_per_byte, "poll_cores", c->poll_cores);
    if (!request->options.profile) return json;
    int world_sizes[2];
    double bytes_per_s[2];
    find_seen(&request->profile, world_sizes, bytes_per_s);
    json_object_set_new(json, "cores_per_host", json_real(c->cores));
    json_object_set_new(json, "seen_world_sizes", json_pack("[i, i]", world_sizes[0], world_sizes[1]));
    json_object_set_new(json, "seen_bytes_per_s",
                        json_pack("[o, o]", tagc_json_real(bytes_per_s[0]), tagc_json_real(bytes_per_s[1])));
    return json;
}

/* ---- checks ---- */

static int was_fitted(const tagc_plan_request *request, const tagc_point *point) {
    for (int i = 0; i < request->profile.n_points; i++) {
        const tagc_point *other = &request->profile.points[i];
        if (!other->is_held_out && strcmp(other->arm, point->arm) == 0 &&
            strcmp(other->place, point->place) == 0)
            return 1;
    }
    return 0;
}

/* Whom the simulation would choose in each place, and whom the measurement. Points of a place are neighbours. */
typedef struct choice {
    const char *place;
    double simulated_s, chosen_s,
        measured_s; /* the least simulated, what that arm took, the least measured */
    int n_arms, n_places, n_right;
    double most; /* that the chosen arm took above the fastest, as a share */
} choice;

static void end_place(choice *c) {
    if (c->n_arms > 1) {
        double more = c->chosen_s / c->measured_s - 1;
        c->n_places++;
        c->n_right += more <= 0;
        c->most = fmax(c->most, more);
    }
    c->n_arms = 0;
}

static void compare_in_place(choice *c, const tagc_point *p, double simulated_s) {
    if (c->place && strcmp(c->place, p->place) != 0) end_place(c);
    c->place = p->place;
    if (c->n_arms == 0 || simulated_s < c->simulated_s) {
        c->simulated_s = simulated_s;
        c->chosen_s = p->total_s;
    }
    if (c->n_arms == 0 || p->total_s < c->measured_s) c->measured_s = p->total_s;
    c->n_arms++;
}

static void say_choices(choice *c) {
    end_place(c);
    if (c->n_places == 0) return;
    printf("the arm that is simulated to be fastest was the fastest in %d of %d places", c->n_right,
           c->n_places);
    if (c->n_right < c->n_places) printf("; in the others it took up to %.0f %% longer", 100 * c->most);
    printf("\n");
}

tagc_status tagc_plan_check(const tagc_plan_request *request, json_t **out) {
    const tagc_points *points = &request->check;
    double most = 0, sum = 0;
    int n_held_out = 0, quiet = request->options.train.quiet;
    choice best = {0};
    *out = NULL;
    if (points->n_points == 0) return TAGC_OK;
    json_t *list = json_array();
    if (!quiet) printf("\n%-28s %11s %11s %9s  %s\n", "", "measured", "simulated", "error", "");
    for (int i = 0; i < points->n_points; i++) {
        const tagc_point *p = &points->points[i];
        tagc_costs costs = request->costs;
        tagc_forecast f;
        int fitted = was_fitted(request, p);
        if (p->cores > 0) costs.cores = p->cores;
        tagc_status status = tagc_plan_simulate(&p->setup, &costs, &p->link, &f);
        if (status != TAGC_OK) {
            json_decref(list);
            return tagc_fail_in(status, "arm %s, %s", p->arm, p->place);
        }
        double error = f.iteration_s / p->total_s - 1;
        compare_in_place(&best, p, f.iteration_s);
        if (!fitted) {
            most = fmax(most, fabs(error));
            sum += fabs(error);
            n_held_out++;
        }
        if (!quiet)
            printf("%-28s %9.3f s %9.3f s %+7.1f %%  %s%s\n", p->arm, p->total_s, f.iteration_s, 100 * error,
                   p->place, fitted ? " (fitted)" : "");
        json_array_append_new(
            list, json_pack("{s:s, s:s, s:i, s:f, s:f, s:f, s:f, s:f, s:b}", "arm", p->arm, "place", p->place,
                            "world_size", p->setup.world_size, "link_bytes_per_s",
                            isfinite(p->link.bytes_per_s) ? p->link.bytes_per_s : 0.0, "latency_s",
                            p->link.latency_s, "measured_s", p->total_s, "simulated_s", f.iteration_s,
                            "error", error, "is_held_out", !fitted));
    }
    if (!quiet) say_choices(&best);
    if (!quiet && n_held_out > 0)
        printf("held out from the fit: %d points, off by %.1f %% at most, %.1f %% on average\n", n_held_out,
               100 * most, 100 * sum / n_held_out);
    if (!quiet && n_held_out == 0) printf("none of these points was held out from the fit\n");
    *out = list;
    return TAGC_OK;
}
