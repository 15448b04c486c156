/* The parts of a unit: which tensors one reducer exchanges, by class and level, and with which options. Parts are made when a model is,
 * and again when plans change; the residuals of former ones go over to them (follow.c). */
#include "core/memory.h"
#include "unit/unit.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static tagc_class kind_of(const tagc_model_part *part) {
    return part->model->tensors[part->members[0]].kind;
}

/* ---- one part ---- */

/* CRC-32 as in zlib. */
static uint32_t crc32_of(uint32_t crc, const char *bytes, size_t n) {
    crc = ~crc;
    for (size_t i = 0; i < n; i++) {
        crc ^= (uint8_t)bytes[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0xedb88320u & (0u - (crc & 1)));
    }
    return ~crc;
}

/* Of the part's first name in the alphabet, so that it does not depend on how tensors are grouped; the ranks of a host round other
 * values of the same tensors. */
static uint64_t seed_of(const tagc_model_part *part) {
    const tagc_model *model = part->model;
    const char *first = model->tensors[part->members[0]].name;
    for (uint32_t i = 1; i < part->n_members; i++) {
        const char *name = model->tensors[part->members[i]].name;
        if (strcmp(name, first) < 0) first = name;
    }
    char place[16];
    snprintf(place, sizeof place, " %d", model->place);
    return crc32_of(crc32_of(0, first, strlen(first)), place, strlen(place));
}

static tagc_exchanged exchanged(const tagc_model_part *part) {
    const tagc_model *model = part->model;
    return (tagc_exchanged){.kind = kind_of(part),
                            .is_followed = part->is_followed,
                            .plan = part->plan,
                            .n_elems = tagc_part_place_elems(part),
                            .tag = model->options.tag + tagc_unit_number(part->unit),
                            .n_hosts = model->n_hosts,
                            .n_places = model->n_places};
}

void tagc_part_options(const tagc_model_part *part, tagc_reducer_options *o) {
    const tagc_exchanged what = exchanged(part);
    tagc_options_between(&part->model->options, &what, o);
    o->rounding_seed = seed_of(part);
}

void tagc_part_host_options(const tagc_model_part *part, tagc_reducer_options *o) {
    const tagc_exchanged what = exchanged(part);
    tagc_options_within(&part->model->options, &what, o);
}

void tagc_unit_label(const tagc_model *model, uint32_t unit, uint32_t tensor, char label[TAGC_LABEL_BYTES]) {
    if (model->name[0])
        snprintf(label, TAGC_LABEL_BYTES, "%s", model->name);
    else
        snprintf(label, TAGC_LABEL_BYTES, "unit %u, %.60s", (unsigned)unit, model->tensors[tensor].name);
}

/* The part's first tensor stands for it. */
static void name_reducers(const tagc_model_part *part) {
    char label[TAGC_LABEL_BYTES];
    tagc_unit_label(part->model, tagc_unit_number(part->unit), part->members[0], label);
    tagc_reducer_set_name(part->reducer, label);
    if (part->host_sum) tagc_reducer_set_name(part->host_sum, label);
}

/* 1: values of a class travel as they are, for which there are no kernels. It has no levels then. */
static int is_whole(const tagc_model *model, tagc_class kind) {
    tagc_schedule_plan plan = tagc_class_plan(&model->schedule_options, model->options.formats.dense, kind);
    return plan.sparsity == 0 && plan.format <= TAGC_FORMAT_BF16;
}

/* A unit of such classes alone has no kernels, as it has none for what is not direct. */
static int wants_kernels(const tagc_model_unit *unit) {
    const tagc_model *model = unit->model;
    if (!model->device || !model->device->has_kernels(model->queue) ||
        model->options.exchange != TAGC_EXCHANGE_DIRECT)
        return 0;
    for (uint32_t i = 0; i < unit->n_members; i++)
        if (!is_whole(model, model->tensors[unit->members[i]].kind)) return 1;
    return 0;
}

static tagc_status make_part(tagc_model_part *part) {
    const tagc_model *model = part->model;
    tagc_reducer_options options, host;
    tagc_part_options(part, &options);
    if (tagc_model_is_plain(model)) {
        TAGC_TRY(tagc_reducer_create(model->between, &options, &part->reducer));
        name_reducers(part);
        return TAGC_OK;
    }
    if (part->is_there) {
        TAGC_TRY(model->device->make_reducer(part, &options));
    } else {
        tagc_part_set_feeds(part);
        if (tagc_model_adds_up(model)) {
            tagc_part_host_options(part, &host);
            TAGC_TRY(tagc_reducer_make(&tagc_host_arrays, NULL, &part->host_feed, model->within, &host,
                                       &part->host_sum));
        }
        TAGC_TRY(tagc_reducer_make(&tagc_host_arrays, NULL, &part->feed, model->between, &options,
                                   &part->reducer));
    }
    name_reducers(part);
    uint64_t n_resting = model->options.rests ? 2 * tagc_reducer_residual_elems(part->reducer) : 0;
    if (n_resting == 0) return TAGC_OK;
    void *memory;
    tagc_status status =
        tagc_memory_create((size_t)n_resting * sizeof(float), "residuals that are not sent", &memory);
    part->resting = memory;
    return tagc_model_agree(model, status);
}

void tagc_part_inherit(tagc_model_part *part) {
    tagc_model_part *former = part->heir_of;
    tagc_part_set_feeds(part);
    part->reducer = former->reducer;
    part->host_sum = former->host_sum;
    part->resting = former->resting;
    if (!part->is_there) part->reducer->feed = &part->feed;
    if (part->host_sum) part->host_sum->feed = &part->host_feed;
    former->reducer = former->host_sum = NULL;
    former->resting = NULL;
    part->heir_of = NULL;
}

/* That of these parts which has the same tensors, or NULL. */
static tagc_model_part *find_same(tagc_model_part *parts, uint32_t n_parts, const tagc_model_part *part) {
    for (uint32_t p = 0; p < n_parts; p++)
        if (parts[p].n_members == part->n_members &&
            !memcmp(parts[p].members, part->members, part->n_members * sizeof *part->members))
            return &parts[p];
    return NULL;
}

/* So that a device need not hold residuals of former and of new parts at the same time. A part that cannot do this keeps its own there. */
static void set_aside(tagc_model_part *part) {
    uint64_t n = tagc_reducer_residual_elems(part->reducer);
    void *memory;
    if (n == 0 || tagc_memory_create((size_t)n * sizeof(float), "a residual", &memory) != TAGC_OK) return;
    if (tagc_reducer_get_residual(part->reducer, memory, n) != TAGC_OK) {
        tagc_memory_destroy(memory);
        return;
    }
    part->set_aside = memory;
    part->n_set_aside = n;
    tagc_reducer_destroy_residual(part->reducer);
}

static void set_aside_all(tagc_model_part *former, uint32_t n_former, const tagc_model_part *parts,
                          uint32_t n_parts) {
    for (uint32_t f = 0; f < n_former; f++) {
        int has_heir = 0;
        for (uint32_t p = 0; p < n_parts; p++) has_heir |= parts[p].heir_of == &former[f];
        if (!has_heir && former[f].is_there) set_aside(&former[f]);
    }
}

/* It was there before, and fits again. */
void tagc_part_take_back(tagc_model_part *part) {
    if (!part->set_aside) return;
    if (tagc_reducer_make_residual(part->reducer) == TAGC_OK) {
        tagc_reducer_note_residual(part->reducer);
        (void)tagc_reducer_set_residual(part->reducer, part->set_aside, part->n_set_aside);
    }
    tagc_memory_destroy(part->set_aside);
    part->set_aside = NULL;
}

void tagc_unit_destroy_parts(tagc_model_part *parts, uint32_t n_parts) {
    for (uint32_t p = 0; parts && p < n_parts; p++) {
        tagc_reducer_destroy(parts[p].reducer);
        tagc_reducer_destroy(parts[p].host_sum);
        tagc_memory_destroy(parts[p].resting);
        tagc_memory_destroy(parts[p].beyond);
        tagc_memory_destroy(parts[p].set_aside);
    }
    tagc_memory_destroy(parts);
}

int tagc_are_one_part(const tagc_model *model, const tagc_member *a, const tagc_member *b) {
    return a->kind == b->kind && a->apart == b->apart && a->is_followed == b->is_followed &&
           (!a->is_followed || tagc_model_is_flat(model) || a->plan.level == b->plan.level);
}

static tagc_status plan_part(tagc_model_part *part) {
    const tagc_member *first = &part->model->tensors[part->members[0]];
    part->is_followed = first->is_followed;
    part->plan = first->plan;
    return part->is_followed ? tagc_part_plan(part, &part->plan) : TAGC_OK;
}

/* Groups tensors, in the order of their numbers. */
static void group(tagc_model *model, tagc_model_unit *unit, tagc_model_part *parts, uint32_t *members,
                  uint32_t *n_parts) {
    *n_parts = 0;
    for (uint32_t i = 0; i < unit->n_members; i++) {
        const tagc_member *leader = &model->tensors[unit->members[i]];
        int is_taken = 0;
        for (uint32_t p = 0; p < *n_parts; p++)
            is_taken |= tagc_are_one_part(model, leader, &model->tensors[parts[p].members[0]]);
        if (is_taken) continue;
        tagc_model_part *part = &parts[(*n_parts)++];
        *part = (tagc_model_part){.model = model, .unit = unit, .members = members};
        part->full = members + unit->n_members;
        for (uint32_t k = i; k < unit->n_members; k++)
            if (tagc_are_one_part(model, leader, &model->tensors[unit->members[k]]))
                part->members[part->n_members++] = unit->members[k];
        members += part->n_members;
    }
}

tagc_status tagc_unit_make_parts(tagc_model *model, tagc_model_unit *unit, tagc_model_part **parts,
                                 uint32_t *n_parts) {
    void *memory;
    tagc_model_part *former = unit->parts; /* before the caller gets the new ones, which may be here */
    uint32_t n_former = unit->n_parts;
    *parts = NULL;
    *n_parts = 0;
    /* One block: at most as many parts as tensors, their lists of members, and those of full windows. */
    size_t parts_bytes = tagc_aligned(unit->n_members * sizeof **parts);
    tagc_status status =
        tagc_memory_create(parts_bytes + 2 * unit->n_members * sizeof(uint32_t), "parts of a unit", &memory);
    status = tagc_model_agree(model, status);
    if (status != TAGC_OK) { /* perhaps another rank's */
        tagc_memory_destroy(memory);
        return status;
    }
    group(model, unit, memory, (uint32_t *)(void *)((char *)memory + parts_bytes), n_parts);
    *parts = memory;
    unit->is_there = wants_kernels(unit);
    for (uint32_t p = 0; status == TAGC_OK && p < *n_parts; p++) {
        tagc_model_part *part = &(*parts)[p];
        tagc_part_lay_out(part);
        status = plan_part(part);
        part->heir_of = find_same(former, n_former, part);
        part->is_there = unit->is_there && !is_whole(model, kind_of(part));
    }
    if (status == TAGC_OK && unit->is_there) {
        set_aside_all(former, n_former, *parts, *n_parts);
        model->device->expect(unit, *parts, *n_parts);
    }
    for (uint32_t p = 0; status == TAGC_OK && p < *n_parts; p++) {
        if ((*parts)[p].heir_of) continue;
        status = make_part(&(*parts)[p]);
        if (status == TAGC_OK) status = tagc_reducer_set_steps((*parts)[p].reducer, unit->n_exchanges);
    }
    if (status == TAGC_OK) return TAGC_OK;
    tagc_unit_destroy_parts(*parts, *n_parts);
    *parts = NULL; /* a failure of making a reducer is the same on all ranks */
    *n_parts = 0;
    return status;
}

/* ---- parts that it can come to have ---- */

static tagc_status take_level(tagc_model_part *part, int level, double share) {
    const tagc_model *model = part->model;
    TAGC_TRY(tagc_schedule_plan_of_level(&model->schedule_options, kind_of(part), level, &part->plan));
    part->plan.sparsity = fmax(0, 1 - share * (1 - part->plan.sparsity));
    return TAGC_OK;
}

tagc_status tagc_unit_try_parts(tagc_model_unit *unit, int level, double share, int is_apart,
                                tagc_parts_fn visit, void *context) {
    tagc_model *model = unit->model;
    tagc_model_part *parts, *own = unit->parts;
    uint32_t n_parts, n_own = unit->n_parts;
    size_t parts_bytes = tagc_aligned(unit->n_members * sizeof *parts);
    size_t members_bytes = tagc_aligned(2 * unit->n_members * sizeof(uint32_t));
    void *memory;
    TAGC_TRY(tagc_memory_create(parts_bytes + members_bytes + unit->n_members * sizeof(int),
                                "parts of a unit", &memory));
    parts = memory;
    int *levels = (int *)(void *)((char *)memory + parts_bytes + members_bytes);
    for (uint32_t i = 0; i < unit->n_members; i++) {
        tagc_member *t = &model->tensors[unit->members[i]];
        levels[i] = t->plan.level;
        if (t->is_followed) t->plan.level = is_apart ? (int)i : level;
    }
    group(model, unit, parts, (uint32_t *)(void *)((char *)memory + parts_bytes), &n_parts);
    tagc_status status = TAGC_OK;
    for (uint32_t p = 0; p < n_parts && status == TAGC_OK; p++) {
        const tagc_member *first = &model->tensors[parts[p].members[0]];
        tagc_part_lay_out(&parts[p]);
        parts[p].is_there = unit->is_there && !is_whole(model, kind_of(&parts[p]));
        parts[p].is_followed = first->is_followed;
        parts[p].plan = first->plan;
        if (first->is_followed) status = take_level(&parts[p], level, share);
    }
    unit->parts = parts;
    unit->n_parts = n_parts;
    if (status == TAGC_OK) status = visit(context, unit);
    unit->parts = own;
    unit->n_parts = n_own;
    for (uint32_t i = 0; i < unit->n_members; i++) model->tensors[unit->members[i]].plan.level = levels[i];
    for (uint32_t p = 0; p < n_own; p++) tagc_part_lay_out(&own[p]);
    tagc_memory_destroy(memory);
    return status;
}
