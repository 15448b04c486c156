/* Follows the schedule (tagc/schedule.h): samples of gradients go in, sums over ranks decide, and plans come out as other parts and
 * other options of reducers. */
#include "unit/unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_LOSSES = sizeof(tagc_schedule_losses) / sizeof(double),
    N_SUMS = sizeof(tagc_schedule_sums) / sizeof(double)
};

static tagc_status describe(tagc_model *model, tagc_schedule_parameter *described) {
    const tagc_schedule_options *options = &model->schedule_options;
    uint32_t n = 0;
    uint64_t n_positions = 0;
    for (uint32_t i = 0; i < model->n_tensors; i++) {
        tagc_member *t = &model->tensors[i];
        size_t n_samples = 0;
        t->plan = tagc_class_plan(options, model->options.formats.dense, t->kind);
        t->is_scheduled = t->kind != TAGC_CLASS_DENSE;
        t->is_followed = tagc_class_has_levels(options, model->options.exchange, t->kind);
        if (!t->is_scheduled) continue;
        t->parameter = tagc_model_is_following(model) ? model->options.schedule.numbers[i] : n;
        described[n++] = (tagc_schedule_parameter){t->name, t->n_elems, t->kind};
        if (!t->is_followed) continue;
        t->first_sample = n_positions;
        tagc_schedule_positions(t->n_elems, model->positions + n_positions, &n_samples);
        t->n_samples = n_samples;
        n_positions += n_samples;
    }
    if (n == 0) return TAGC_OK;
    if (tagc_model_is_following(model)) {
        model->schedule = model->options.schedule.follows;
        model->options.schedule.numbers = NULL; /* the caller's */
        return TAGC_OK;
    }
    TAGC_TRY(tagc_schedule_create(&model->schedule_options, described, n, &model->schedule));
    for (uint32_t i = 0; i < n; i++)
        TAGC_TRY(tagc_schedule_set_moment(model->schedule, i, (tagc_moment)model->options.schedule.moment));
    return TAGC_OK;
}

/* Two tensors of one name would share a residual in a saved state. */
static int by_name(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static tagc_status check_names(const tagc_model *model, const char **names) {
    for (uint32_t i = 0; i < model->n_tensors; i++) names[i] = model->tensors[i].name;
    qsort(names, model->n_tensors, sizeof *names, by_name);
    for (uint32_t i = 1; i < model->n_tensors; i++)
        if (strcmp(names[i], names[i - 1]) == 0)
            return tagc_fail(TAGC_ERR_ARGUMENT, "two tensors are called %s", names[i]);
    return TAGC_OK;
}

tagc_status tagc_model_open_schedule(tagc_model *model) {
    void *memory;
    size_t n = model->n_tensors, n_message = N_LOSSES + n * N_SUMS;
    size_t n_most = (size_t)(model->n_hosts > model->n_places ? model->n_hosts : model->n_places);
    TAGC_TRY(tagc_memory_create(n * (sizeof(tagc_schedule_parameter) + sizeof(char *)), "names of tensors",
                                &memory));
    tagc_schedule_parameter *described = memory;
    tagc_status status = check_names(model, (const char **)(void *)(described + n));
    if (status == TAGC_OK) status = describe(model, described);
    tagc_memory_destroy(memory);
    if (status != TAGC_OK || tagc_model_is_following(model))
        return status == TAGC_OK ? tagc_model_take_plans(model) : status;
    TAGC_TRY(
        tagc_memory_create(n_message * (1 + n_most) * sizeof *model->own, "sums of the schedule", &memory));
    model->own = memory;
    model->pooled = model->own + n_message;
    return tagc_model_take_plans(model);
}

tagc_status tagc_part_plan(const tagc_model_part *part, tagc_schedule_plan *plan) {
    const tagc_model *model = part->model;
    for (uint32_t i = 0; i < part->n_members; i++) {
        const tagc_member *t = &model->tensors[part->members[i]];
        model->numbers[i] = t->parameter;
        model->weights[i] = tagc_member_exchanged(model, t);
    }
    return tagc_schedule_get_plan(model->schedule, model->numbers, model->weights, part->n_members, plan);
}

tagc_status tagc_model_take_plans(tagc_model *model) {
    for (uint32_t i = 0; i < model->n_tensors; i++) {
        tagc_member *t = &model->tensors[i];
        tagc_schedule_plan plan;
        if (!t->is_scheduled) continue;
        TAGC_TRY(tagc_schedule_get_plan(model->schedule, &t->parameter, NULL, 1, &plan));
        if (t->is_followed) {
            t->plan = plan;
            if (t->part && tagc_model_is_flat(model)) TAGC_TRY(tagc_part_plan(t->part, &t->plan));
        } else { /* its moments alone are the schedule's */
            t->plan.moment = plan.moment;
            t->plan.n_selected = plan.n_selected;
        }
    }
    return TAGC_OK;
}

tagc_status tagc_model_set_moment(tagc_model *model, uint32_t tensor, tagc_moment moment) {
    TAGC_TRY(tagc_model_check_idle(model, "set_moment"));
    TAGC_TRY(tagc_model_check_own_schedule(model, "set_moment"));
    if (tensor >= model->n_tensors)
        return tagc_fail(TAGC_ERR_ARGUMENT, "tensor is %u, must be below %u", tensor, model->n_tensors);
    const tagc_member *t = &model->tensors[tensor];
    if (!t->is_scheduled) return TAGC_OK;
    return tagc_schedule_set_moment(model->schedule, t->parameter, moment);
}

/* ---- the signal ---- */

uint64_t tagc_part_sampled(const tagc_model_part *part, const tagc_member *t, uint64_t k) {
    const tagc_model *model = part->model;
    uint64_t element = model->positions[t->first_sample + k];
    return model->within && tagc_part_find(part, t, element) == UINT64_MAX ? UINT64_MAX : element;
}

static tagc_status add_samples(tagc_model_part *part, const float *samples) {
    tagc_model *model = part->model;
    return tagc_schedule_add(model->schedule, model->numbers, model->counts, part->n_members, samples,
                             part->full, &part->n_full);
}

/* Of a unit that stays on a device. A window that is full without squares stays so, and the next exchange is due. */
static tagc_status take_samples(tagc_model_part *part) {
    tagc_model *model = part->model;
    tagc_model_unit *unit = part->unit;
    const float *samples = unit->samples;
    for (uint32_t i = 0; i < part->n_members; i++) {
        const tagc_member *t = &model->tensors[part->members[i]];
        model->numbers[i] = t->parameter;
        model->counts[i] = 0;
        for (uint64_t k = 0; k < t->n_samples; k++)
            model->counts[i] += tagc_part_sampled(part, t, k) != UINT64_MAX;
        unit->samples += model->counts[i];
    }
    if (unit->is_blind) return TAGC_OK;
    TAGC_TRY(add_samples(part, samples));
    if (!unit->squares) part->n_full = 0;
    if (part->n_full > 0) part->square = unit->squares[part - unit->parts];
    return TAGC_OK;
}

tagc_status tagc_part_sample(tagc_model_part *part) {
    tagc_model *model = part->model;
    size_t n_values = 0;
    if (!part->is_followed) return TAGC_OK;
    if (part->is_there) return take_samples(part);
    if (part->unit->is_blind) return TAGC_OK;
    for (uint32_t i = 0; i < part->n_members; i++) {
        const tagc_member *t = &model->tensors[part->members[i]];
        size_t n_before = n_values;
        for (uint64_t k = 0; k < t->n_samples; k++) {
            uint64_t element = tagc_part_sampled(part, t, k);
            if (element == UINT64_MAX) continue;
            model->samples[n_values++] = tagc_member_read(model, part->unit, t, element);
        }
        model->numbers[i] = t->parameter;
        model->counts[i] = (uint32_t)(n_values - n_before);
    }
    return add_samples(part, model->samples);
}

void tagc_model_set_sampling(tagc_model *model, int is_sampled) {
    model->is_blind = !is_sampled;
}

void tagc_unit_forget_windows(tagc_model *model, tagc_model_unit *unit) {
    for (uint32_t i = 0; i < unit->n_members; i++) {
        const tagc_member *t = &model->tensors[unit->members[i]];
        tagc_schedule_sums unused;
        if (t->is_followed) (void)tagc_schedule_take(model->schedule, &t->parameter, 1, &unused);
    }
    for (uint32_t p = 0; p < unit->n_parts; p++) unit->parts[p].n_full = 0;
}

static tagc_status take_part(tagc_model *model, tagc_model_part *part, uint32_t *numbers,
                             tagc_schedule_sums *sums) {
    double square;
    TAGC_TRY(tagc_schedule_take(model->schedule, part->full, part->n_full, sums));
    TAGC_TRY(part->is_there ? model->device->residual_square(part, &square)
                            : tagc_reducer_residual_square(part->reducer, &square));
    for (size_t k = 0; k < part->n_full; k++) {
        numbers[k] = part->full[k];
        sums[k].residual = square;
        sums[k].gradient = part->square;
    }
    return TAGC_OK;
}

/* This rank's sums of all windows that are full, part by part, since ranks may have packed parts in another order. */
static tagc_status take(tagc_model *model, tagc_schedule_sums *sums, size_t *n_full) {
    *n_full = 0;
    for (uint32_t u = 0; u < model->n_units; u++)
        for (uint32_t p = 0; p < model->units[u].n_parts; p++) {
            tagc_model_part *part = &model->units[u].parts[p];
            if (part->n_full == 0) continue;
            TAGC_TRY(take_part(model, part, model->full + *n_full, sums + *n_full));
            *n_full += part->n_full;
            part->n_full = 0;
        }
    return TAGC_OK;
}

tagc_status tagc_model_take_full(tagc_model *model, uint32_t number, uint32_t *numbers,
                                 tagc_schedule_sums *sums, size_t *n) {
    if (!numbers || !sums || !n) return tagc_fail(TAGC_ERR_ARGUMENT, "numbers, sums or n is NULL");
    *n = 0;
    TAGC_TRY(tagc_unit_check(model, number, "take_full", 0));
    if (!tagc_model_is_following(model))
        return tagc_fail(TAGC_ERR_STATE, "take_full: the model has a schedule of its own");
    for (uint32_t p = 0; p < model->units[number].n_parts; p++) {
        tagc_model_part *part = &model->units[number].parts[p];
        if (part->n_full == 0) continue;
        TAGC_TRY(take_part(model, part, numbers + *n, sums + *n));
        *n += part->n_full;
        part->n_full = 0;
    }
    return TAGC_OK;
}

/* Adds up in the order of ranks, so that all get the same bits. */
static tagc_status add_over(tagc_comm *comm, double *own, double *pooled, size_t n) {
    size_t n_ranks = (size_t)tagc_comm_world_size(comm);
    if (n_ranks == 1) return TAGC_OK;
    TAGC_TRY(tagc_comm_all_gather(comm, own, n * sizeof *own, pooled, n_ranks * n * sizeof *pooled));
    for (size_t i = 0; i < n; i++) {
        own[i] = 0;
        for (size_t rank = 0; rank < n_ranks; rank++) own[i] += pooled[rank * n + i];
    }
    return TAGC_OK;
}

static tagc_status see(tagc_model *model) {
    tagc_schedule_losses losses;
    tagc_schedule_sums *sums = (tagc_schedule_sums *)(void *)(model->own + N_LOSSES);
    size_t n_full;
    TAGC_TRY(take(model, sums, &n_full));
    if (n_full == 0) return TAGC_OK;
    size_t n = N_LOSSES + n_full * N_SUMS;
    tagc_schedule_take_losses(model->schedule, &losses);
    memcpy(model->own, &losses, sizeof losses);
    TAGC_TRY(add_over(model->between, model->own, model->pooled, n));
    if (model->within) TAGC_TRY(add_over(model->within, model->own, model->pooled, n));
    TAGC_TRY(tagc_schedule_see(model->schedule, model->full, n_full, sums, 0));
    memcpy(&losses, model->own, sizeof losses);
    return tagc_schedule_see_losses(model->schedule, &losses);
}

/* ---- what was decided ---- */

/* Whether the parts are those that the plans ask for, but for options that a reducer can change. */
static int has_parts(const tagc_model *model, const tagc_model_unit *unit) {
    for (uint32_t i = 0; i < unit->n_members; i++)
        for (uint32_t k = 0; k < i; k++) {
            const tagc_member *a = &model->tensors[unit->members[i]], *b = &model->tensors[unit->members[k]];
            if (tagc_are_one_part(model, a, b) != (a->part == b->part)) return 0;
        }
    return 1;
}

/* before: what it has sent so far. */
static tagc_status change_part(const tagc_model_part *part, const tagc_schedule_plan *before) {
    tagc_reducer_options options;
    if (before->format == part->plan.format && before->block == part->plan.block &&
        before->sparsity == part->plan.sparsity)
        return TAGC_OK;
    tagc_part_options(part, &options);
    if (part->model->device) part->model->device->let_go(part->unit);
    TAGC_TRY(tagc_reducer_change(part->reducer, &options));
    if (!part->host_sum) return TAGC_OK;
    tagc_part_host_options(part, &options);
    return tagc_reducer_change(part->host_sum, &options);
}

static tagc_status change_parts(tagc_model_unit *unit) {
    for (uint32_t p = 0; p < unit->n_parts; p++) {
        tagc_model_part *part = &unit->parts[p];
        tagc_schedule_plan before = part->plan;
        if (!part->is_followed) continue;
        TAGC_TRY(tagc_part_plan(part, &part->plan));
        TAGC_TRY(change_part(part, &before));
    }
    return TAGC_OK;
}

/* Hands the residual of one part to those where its tensors are now. to (n,): their new residuals. */
static tagc_status hand_over(const tagc_model_part *from, const tagc_model_part *parts, float *const *to) {
    const tagc_model *model = from->model;
    uint64_t n = from->set_aside ? from->n_set_aside : tagc_reducer_residual_elems(from->reducer);
    void *memory = NULL;
    tagc_status status = TAGC_OK;
    if (n == 0) return TAGC_OK;
    if (!from->set_aside) {
        TAGC_TRY(tagc_memory_create((size_t)n * sizeof(float), "a residual", &memory));
        status = tagc_reducer_get_residual(from->reducer, memory, n);
    }
    const float *residual = from->set_aside ? from->set_aside : memory;
    for (uint64_t row = 0; status == TAGC_OK && row < n / from->width; row++) {
        uint64_t at = row * from->width; /* in the former part, whose tensors had other offsets */
        for (uint32_t i = 0; i < from->n_members; i++) {
            const tagc_member *t = &model->tensors[from->members[i]];
            tagc_slot slot = tagc_member_slot(model, t, tagc_model_row_owner(model, row));
            float *values = to[t->part - parts];
            if (values)
                memcpy(values + row * t->part->width + slot.offset, residual + at,
                       slot.room * sizeof *values);
            at += slot.room;
        }
    }
    tagc_memory_destroy(memory);
    return status;
}

/* Local. parts (n_parts,): the unit's new ones, in which its tensors are laid out already. */
static tagc_status move_residuals(const tagc_model_unit *unit, tagc_model_part *parts, uint32_t n_parts) {
    float **residuals;
    TAGC_TRY(tagc_parts_open_residuals(parts, n_parts, &residuals));
    tagc_status status = TAGC_OK;
    for (uint32_t p = 0; status == TAGC_OK && p < unit->n_parts; p++)
        status = hand_over(&unit->parts[p], parts, residuals);
    return tagc_parts_close_residuals(parts, n_parts, residuals, status);
}

/* New parts are made before old ones go, so that a failure of that changes nothing. Those of the same tensors as before get the reducers of these,
 * whose residuals so stay what they are. */
static tagc_status regroup(tagc_model *model, tagc_model_unit *unit) {
    tagc_model_part *parts;
    uint32_t n_parts;
    if (model->device) model->device->let_go(unit);
    tagc_status status = tagc_unit_make_parts(model, unit, &parts, &n_parts);
    if (status == TAGC_OK) status = tagc_model_agree(model, move_residuals(unit, parts, n_parts));
    if (status != TAGC_OK) {
        char text[TAGC_ERROR_TEXT_BYTES];
        snprintf(text, sizeof text, "%s", tagc_last_error());
        tagc_unit_destroy_parts(parts, n_parts);
        for (uint32_t p = 0; p < unit->n_parts; p++) tagc_part_lay_out(&unit->parts[p]);
        for (uint32_t p = 0; p < unit->n_parts; p++) tagc_part_take_back(&unit->parts[p]);
        return tagc_fail(status, "%s", text);
    }
    for (uint32_t p = 0; p < n_parts; p++) {
        if (!parts[p].heir_of) continue;
        tagc_schedule_plan before = parts[p].heir_of->plan;
        tagc_part_inherit(&parts[p]);
        tagc_status failure = change_part(&parts[p], &before);
        if (status == TAGC_OK) status = failure;
    }
    tagc_unit_destroy_parts(unit->parts, unit->n_parts);
    unit->parts = parts;
    unit->n_parts = n_parts;
    return tagc_model_agree(model, status);
}

tagc_status tagc_model_take_up(tagc_model *model) {
    tagc_status local = TAGC_OK;
    char text[TAGC_ERROR_TEXT_BYTES] = "";
    TAGC_TRY(tagc_model_take_plans(model));
    for (uint32_t u = 0; u < model->n_units; u++) {
        tagc_model_unit *unit = &model->units[u];
        tagc_status status = TAGC_OK;
        if (!has_parts(model, unit))
            TAGC_TRY(regroup(model, unit));
        else
            status = change_parts(unit);
        if (status == TAGC_OK && model->device) status = model->device->take_up(unit);
        if (status == TAGC_OK || local != TAGC_OK) continue;
        local = status; /* memory: the others go on, and learn of it below */
        snprintf(text, sizeof text, "%s", tagc_last_error());
    }
    return tagc_model_agree(model, local == TAGC_OK ? TAGC_OK : tagc_fail(local, "%s", text));
}

tagc_status tagc_model_check_own_schedule(const tagc_model *model, const char *what) {
    if (!tagc_model_is_following(model)) return TAGC_OK;
    return tagc_fail(TAGC_ERR_STATE, "%s: the schedule is the caller's (options.schedule.follows)", what);
}

tagc_status tagc_model_follow(tagc_model *model) {
    TAGC_TRY(tagc_model_check_idle(model, "follow"));
    if (!tagc_model_is_following(model))
        return tagc_fail(TAGC_ERR_STATE, "follow: the model has a schedule of its own");
    return model->schedule ? tagc_model_take_up(model) : TAGC_OK;
}

tagc_status tagc_model_step(tagc_model *model, double loss) {
    int has_changed = 0;
    TAGC_TRY(tagc_model_check_idle(model, "step"));
    TAGC_TRY(tagc_model_check_own_schedule(model, "step"));
    model->n_steps++;
    if (!model->schedule) return TAGC_OK;
    tagc_schedule_add_loss(model->schedule, loss);
    TAGC_TRY(tagc_model_share(model, see(model)));
    TAGC_TRY(tagc_schedule_step(model->schedule, &has_changed, NULL));
    return has_changed ? tagc_model_take_up(model) : tagc_model_take_plans(model);
}
