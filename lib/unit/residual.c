/* What a model's ranks have not sent yet, tensor by tensor: read, replaced, forgotten, and kept out of an exchange. */
#include "unit/unit.h"

static void fill_with_zero(float *values, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) values[i] = TAGC_ZERO_RESIDUAL;
}

int tagc_model_has_residual(const tagc_model *model, uint32_t tensor) {
    return model && tensor < model->n_tensors &&
           tagc_reducer_residual_elems(model->tensors[tensor].part->reducer) > 0;
}

tagc_status tagc_parts_open_residuals(const tagc_model_part *parts, uint32_t n_parts, float ***out) {
    uint64_t n_all = 0;
    void *memory;
    for (uint32_t p = 0; p < n_parts; p++) n_all += tagc_reducer_residual_elems(parts[p].reducer);
    TAGC_TRY(tagc_memory_create(n_parts * sizeof(float *) + (size_t)n_all * sizeof(float),
                                "residuals of a unit", &memory));
    float **residuals = *out = memory, *values = (float *)(void *)(residuals + n_parts);
    fill_with_zero(values, n_all);
    for (uint32_t p = 0; p < n_parts; p++) {
        uint64_t n = tagc_reducer_residual_elems(parts[p].reducer);
        residuals[p] = n > 0 ? values : NULL;
        values += n;
    }
    return TAGC_OK;
}

tagc_status tagc_parts_close_residuals(tagc_model_part *parts, uint32_t n_parts, float **residuals,
                                       tagc_status status) {
    for (uint32_t p = 0; status == TAGC_OK && p < n_parts; p++)
        if (residuals[p])
            status = tagc_reducer_set_residual(parts[p].reducer, residuals[p],
                                               tagc_reducer_residual_elems(parts[p].reducer));
    tagc_memory_destroy(residuals);
    return status;
}

/* Room for the residual of any part of a unit. */
static tagc_status make_room(const tagc_model_unit *unit, float **room) {
    uint64_t most = 0;
    void *memory;
    for (uint32_t p = 0; p < unit->n_parts; p++) {
        uint64_t n = tagc_reducer_residual_elems(unit->parts[p].reducer);
        most = n > most ? n : most;
    }
    *room = NULL;
    if (most == 0) return TAGC_OK;
    TAGC_TRY(tagc_memory_create((size_t)most * sizeof(float), "a residual", &memory));
    *room = memory;
    return TAGC_OK;
}

static tagc_status move(const tagc_model_part *part, float *room, int is_read) {
    uint64_t n = tagc_reducer_residual_elems(part->reducer);
    if (n == 0) return TAGC_OK;
    if (is_read) {
        TAGC_TRY(tagc_reducer_get_residual(part->reducer, room, n));
        tagc_part_copy_residual(part, room, 1);
        return TAGC_OK;
    }
    fill_with_zero(room, n);
    tagc_part_copy_residual(part, room, 0);
    return tagc_reducer_set_residual(part->reducer, room, n);
}

static tagc_status move_all(tagc_model *model, uint32_t number, const tagc_piece *pieces, size_t n,
                            int is_read) {
    float *room;
    TAGC_TRY(tagc_unit_check(model, number, is_read ? "get_residual" : "set_residual", 0));
    TAGC_TRY(tagc_unit_check_pieces(model, number, pieces, n, "pieces", 0));
    tagc_model_unit *unit = &model->units[number];
    TAGC_TRY(make_room(unit, &room));
    unit->gradients = tagc_pieces_of(pieces);
    tagc_status status = TAGC_OK;
    for (uint32_t p = 0; status == TAGC_OK && p < unit->n_parts; p++)
        status = move(&unit->parts[p], room, is_read);
    unit->gradients = NULL;
    tagc_memory_destroy(room);
    return status;
}

tagc_status tagc_model_get_residual(tagc_model *model, uint32_t unit, const tagc_piece *pieces, size_t n) {
    return move_all(model, unit, pieces, n, 1);
}

tagc_status tagc_model_set_residual(tagc_model *model, uint32_t unit, const tagc_piece *pieces, size_t n) {
    return move_all(model, unit, pieces, n, 0);
}

tagc_status tagc_model_forget(tagc_model *model) {
    TAGC_TRY(tagc_model_check_idle(model, "forget"));
    for (uint32_t u = 0; u < model->n_units; u++)
        for (uint32_t p = 0; p < model->units[u].n_parts; p++)
            if (tagc_reducer_residual_elems(model->units[u].parts[p].reducer) > 0)
                TAGC_TRY(tagc_reducer_scale_residual(model->units[u].parts[p].reducer, 0));
    return TAGC_OK;
}

/* ---- tensors that rest ---- */

/* resting: | kept (n) | sent (n) |. Every row has a slot of a tensor. */
static tagc_status withdraw(tagc_model_part *part) {
    const tagc_model *model = part->model;
    uint64_t n = tagc_reducer_residual_elems(part->reducer);
    float *kept = part->resting, *sent = kept + n;
    for (uint32_t i = 0; i < part->n_members; i++) {
        const tagc_member *t = &model->tensors[part->members[i]];
        if (!t->is_zero) continue;
        if (!part->rests) {
            TAGC_TRY(tagc_reducer_read_residual(part->reducer, sent));
            fill_with_zero(kept, n);
            part->rests = 1;
        }
        for (uint64_t row = 0; row < n / part->width; row++) {
            tagc_slot slot = tagc_member_slot(model, t, tagc_model_row_owner(model, row));
            for (uint64_t k = row * part->width + slot.offset, end = k + slot.room; k < end; k++) {
                kept[k] = sent[k];
                sent[k] = TAGC_ZERO_RESIDUAL;
            }
        }
    }
    return part->rests ? tagc_reducer_write_residual(part->reducer, sent) : TAGC_OK;
}

tagc_status tagc_part_rest(tagc_model_part *part) {
    tagc_model *model = part->model;
    if (!part->resting) return TAGC_OK;
    for (uint32_t i = 0; !part->is_there && i < part->n_members; i++) {
        tagc_member *t = &model->tensors[part->members[i]];
        t->is_zero = tagc_part_is_zero(part, t);
    }
    return withdraw(part);
}

tagc_status tagc_rest_begin(tagc_model *model, tagc_model_unit *unit, void *stream) {
    if (!model->options.rests) return TAGC_OK;
    for (uint32_t p = 0; p < unit->n_parts; p++) unit->parts[p].rests = 0;
    if (unit->is_there) TAGC_TRY(model->device->find_zeros(unit, stream));
    for (uint32_t p = 0; p < unit->n_parts; p++)
        if (!unit->parts[p].host_sum) TAGC_TRY(tagc_part_rest(&unit->parts[p]));
    return TAGC_OK;
}

tagc_status tagc_rest_end(tagc_model_unit *unit) {
    tagc_status status = TAGC_OK;
    for (uint32_t p = 0; p < unit->n_parts; p++) {
        tagc_model_part *part = &unit->parts[p];
        if (!part->rests) continue;
        uint64_t n = tagc_reducer_residual_elems(part->reducer);
        float *kept = part->resting, *now = kept + n;
        part->rests = 0;
        tagc_status failure = tagc_reducer_get_residual(part->reducer, now, n);
        for (uint64_t i = 0; failure == TAGC_OK && i < n; i++) kept[i] += now[i];
        if (failure == TAGC_OK) failure = tagc_reducer_set_residual(part->reducer, kept, n);
        if (status == TAGC_OK) status = failure;
    }
    return status;
}
