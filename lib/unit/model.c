/* The life of a model's object, and what it answers about itself. */
#include "core/cpu.h"
#include "unit/unit.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- options ---- */

/* What a device cannot do. */
static tagc_status check_device(const tagc_model *model) {
    const tagc_model_options *o = &model->options;
    if (o->layout.cut == TAGC_CUT_FLAT_ARRAYS)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "cut is FLAT_ARRAYS, which are in host memory: take FLAT");
    if (!model->device->has_kernels(model->queue)) return TAGC_OK;
    if (tagc_model_adds_up(model))
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "kernels do not add up within a host: the caller does (options.hosts.summed)");
    return TAGC_OK;
}

static tagc_status read_options(tagc_model *model, const tagc_model_options *from) {
    tagc_model_options *o = &model->options;
    TAGC_TRY(tagc_model_options_read(from, model->n_places, o));
    if (model->device) TAGC_TRY(check_device(model));
    tagc_schedule_options_init(&model->schedule_options);
    if (o->schedule.options)
        model->schedule_options = *o->schedule.options;
    else
        model->schedule_options.fresh = 1;
    o->schedule.options = NULL;
    if (o->name) snprintf(model->name, sizeof model->name, "%s", o->name);
    o->name = NULL;
    return TAGC_OK;
}

static tagc_status read_comms(tagc_model *model, tagc_comm *within, tagc_comm *between) {
    if (!between) return tagc_fail(TAGC_ERR_ARGUMENT, "between is NULL");
    TAGC_TRY(tagc_comm_check_open(between));
    if (within) TAGC_TRY(tagc_comm_check_open(within));
    model->between = between;
    model->within = within && tagc_comm_world_size(within) > 1 ? within : NULL;
    model->n_hosts = tagc_comm_world_size(between);
    model->host = tagc_comm_rank(between);
    model->n_places = model->within ? tagc_comm_world_size(within) : 1;
    model->place = model->within ? tagc_comm_rank(within) : 0;
    model->world_size = model->n_hosts * model->n_places;
    model->rank = model->host * model->n_places + model->place;
    return TAGC_OK;
}

/* ---- agreement: over the hosts of a place, then over the places of a host ---- */

/* is_own: it failed itself, and does not only know of a failure; is_cut_off: a comm of its is broken; word: which exchange it was. */
typedef struct verdict {
    int16_t status;
    uint8_t is_own, is_cut_off;
    uint32_t word;
} verdict;
_Static_assert(sizeof(verdict) == TAGC_VERDICT_BYTES, "what a rank sends to each other");

/* Who is cut off knows which rank is gone; who differs from the others may have failed for that; and who failed knows why. */
static int weight_of(const verdict *v) {
    if (v->status == TAGC_OK) return 0;
    return v->is_cut_off ? 4 : v->status == TAGC_ERR_MISMATCH ? 3 : v->is_own ? 2 : 1;
}

/* Whose failure is everybody's, or -1. */
static int find_failed(const verdict *all, int n) {
    int failed = 0;
    for (int rank = 1; rank < n; rank++)
        if (weight_of(&all[rank]) > weight_of(&all[failed])) failed = rank;
    return all[failed].status == TAGC_OK ? -1 : failed;
}

/* The first rank that comes with another exchange than rank 0, or 0. */
static int find_other(const verdict *all, int n) {
    for (int rank = 1; rank < n; rank++)
        if (all[rank].word != all[0].word) return rank;
    return 0;
}

/* The failure of one rank, on all, but for those that failed alike. text: of this rank's. */
static tagc_status tell(tagc_comm *comm, int failed, const verdict *all, const char *text) {
    const verdict *mine = &all[tagc_comm_rank(comm)], *first = &all[failed];
    tagc_status status = tagc_status_told(first->status);
    enum { TEXT_BYTES = TAGC_ERROR_TEXT_BYTES };
    int n = tagc_comm_world_size(comm), name = tagc_comm_name(comm, failed);
    void *memory;
    if (tagc_memory_create((size_t)n * TEXT_BYTES, "failures of all ranks", &memory) != TAGC_OK) {
        tagc_comm_abort(comm, "no memory for the failures of all ranks");
        return TAGC_ERR_MEMORY;
    }
    char *texts = memory, *theirs = texts + (size_t)failed * TEXT_BYTES;
    tagc_status told = tagc_comm_all_gather(comm, text, TEXT_BYTES, texts, (size_t)n * TEXT_BYTES);
    theirs[TEXT_BYTES - 1] = 0;
    if (mine == first || (mine->is_own && mine->status == first->status))
        told = tagc_fail(status, "%s", text);
    else if (told != TAGC_OK)
        told = tagc_fail(status, "rank %d: %s", name, tagc_status_name(status));
    else
        told = tagc_fail(status, "rank %d: %.480s", name, theirs);
    tagc_memory_destroy(memory);
    return told;
}

/* is_own: whether this rank has failed itself. *is_cut_off: whether this rank is, then whether any is. word: that ranks must have alike. */
static tagc_status agree_over(tagc_comm *comm, tagc_status status, int is_own, uint32_t word,
                              int *is_cut_off) {
    int n = tagc_comm_world_size(comm);
    enum { N_FEW = 64 }; /* a step allocates nothing within a host */
    verdict mine = {(int16_t)status, is_own != 0, *is_cut_off != 0, word}, few[N_FEW], *all = few;
    char text[TAGC_ERROR_TEXT_BYTES] = "";
    void *memory = NULL;
    if (n == 1) return status;
    if (status != TAGC_OK) snprintf(text, sizeof text, "%s", tagc_last_error());
    if (n > N_FEW &&
        tagc_memory_create((size_t)n * sizeof mine, "verdicts of all ranks", &memory) != TAGC_OK) {
        tagc_comm_abort(comm, "no memory for the verdicts of all ranks");
        return TAGC_ERR_MEMORY;
    }
    if (memory) all = memory;
    tagc_status agreed = tagc_comm_all_gather(comm, &mine, sizeof mine, all, (size_t)n * sizeof *all);
    for (int rank = 0; agreed == TAGC_OK && rank < n; rank++) *is_cut_off |= all[rank].is_cut_off != 0;
    int failed = agreed == TAGC_OK ? find_failed(all, n) : -1;
    int other = agreed == TAGC_OK && !*is_cut_off ? find_other(all, n) : 0;
    if (other > 0)
        agreed =
            tagc_fail(TAGC_ERR_MISMATCH,
                      "rank %d comes with another exchange than rank %d: all ranks begin the same units, "
                      "in the same order",
                      tagc_comm_name(comm, other), tagc_comm_name(comm, 0));
    else if (failed >= 0)
        agreed = tell(comm, failed, all, text);
    tagc_memory_destroy(memory);
    return agreed;
}

static int is_cut_off(tagc_comm *within, tagc_comm *between) {
    return within && (tagc_comm_is_broken(between) || tagc_comm_is_broken(within));
}

/* Where one comm of a host is broken, its ranks cannot go on in any, and others would wait for them there. */
static tagc_status share(tagc_comm *within, tagc_comm *between, tagc_status status, int is_any_cut_off) {
    if (status == TAGC_OK || !within || !(is_any_cut_off || is_cut_off(within, between))) return status;
    if (!tagc_comm_is_broken(between)) (void)tagc_comm_give_up(between, status, -1);
    if (!tagc_comm_is_broken(within)) (void)tagc_comm_give_up(within, status, -1);
    return status;
}

tagc_status tagc_model_share(const tagc_model *model, tagc_status status) {
    return share(model->within, model->between, status, 0);
}

tagc_status tagc_levels_agree(tagc_comm *within, tagc_comm *between, tagc_status status) {
    int is_any = is_cut_off(within, between), is_own = status != TAGC_OK;
    status = agree_over(between, status, is_own, 0, &is_any);
    if (within) status = agree_over(within, status, is_own, 0, &is_any);
    return share(within, between, status, is_any);
}

tagc_status tagc_model_agree(const tagc_model *model, tagc_status status) {
    return tagc_levels_agree(model->within, model->between, status);
}

tagc_status tagc_model_agree_within(const tagc_model *model, tagc_status status, int is_own, uint32_t word) {
    int is_any = is_cut_off(model->within, model->between);
    if (model->within) status = agree_over(model->within, status, is_own, word, &is_any);
    return share(model->within, model->between, status, is_any);
}

/* Ranks compare a checksum, so that the message is small; the first tensor that differs is not known then, but its rank is. */
typedef struct rank_about {
    uint64_t sum, run;
} rank_about;

/* *run: becomes rank 0's. */
static tagc_status compare_over(tagc_comm *comm, uint64_t sum, uint64_t *run, const char *what) {
    int n = tagc_comm_world_size(comm);
    void *memory;
    rank_about own = {sum, *run};
    if (n == 1) return TAGC_OK;
    TAGC_TRY(tagc_memory_create((size_t)n * sizeof own, "checksums of all ranks", &memory));
    const rank_about *all = memory;
    tagc_status status = tagc_comm_all_gather(comm, &own, sizeof own, memory, (size_t)n * sizeof own);
    *run = all[0].run;
    for (int rank = 0; status == TAGC_OK && rank < n; rank++)
        if (all[rank].sum != all[0].sum)
            status = tagc_fail(TAGC_ERR_MISMATCH, "rank %d differs from rank %d in %s the same on all ranks",
                               tagc_comm_name(comm, rank), tagc_comm_name(comm, 0), what);
    tagc_memory_destroy(memory);
    return status;
}

tagc_status tagc_model_compare(tagc_model *model, uint64_t sum, const char *what) {
    tagc_status status = compare_over(model->between, sum, &model->run, what);
    if (model->within) { /* after a failure, too: the ranks of the host may not know of it */
        tagc_status other = compare_over(model->within, sum, &model->run, what);
        if (status == TAGC_OK) status = other;
    }
    return tagc_model_agree(model, status);
}

static uint64_t mix(uint64_t sum, const void *bytes, size_t n_bytes) {
    uint64_t pair[2] = {sum, tagc_checksum(bytes, n_bytes)};
    return tagc_checksum(pair, sizeof pair);
}

static tagc_status compare(tagc_model *model) {
    const tagc_model_options *o = &model->options;
    const tagc_schedule_options *s = &model->schedule_options;
    int choices[] = {
        o->schedule.moment, o->layout.output,    o->op,          o->formats.dense, o->formats.residual,
        o->exchange,        s->gentle,           s->fresh,       o->rests,         (int)s->format,
        o->formats.result,  (int)s->mild_format, model->n_hosts, model->n_places,  o->layout.cut,
        o->formats.block,   o->hosts.summed,     o->hosts.format};
    double numbers[] = {s->sparsity, s->mild_sparsity, s->short_beta1, o->formats.result_sparsity};
    uint64_t sum = mix(0, choices, sizeof choices);
    sum = mix(sum, numbers, sizeof numbers);
    for (uint32_t i = 0; i < model->n_tensors; i++) {
        const tagc_member *t = &model->tensors[i];
        uint64_t about[] = {t->n_elems, t->chunk, t->unit, (uint64_t)t->kind, t->apart};
        sum = mix(sum, t->name, strlen(t->name));
        sum = mix(sum, about, sizeof about);
        if (t->begins) sum = mix(sum, t->begins, ((size_t)model->n_owners + 1) * sizeof *t->begins);
    }
    return tagc_model_compare(model, sum,
                              "its tensors or options: names, lengths, units, classes and options must be");
}

/* ---- life ---- */

static tagc_status open_units(tagc_model *model) {
    for (uint32_t u = 0; model->device && u < model->n_units; u++)
        TAGC_TRY(model->device->open(model->queue, &model->units[u]));
    return TAGC_OK;
}

static tagc_status make_locally(tagc_model *model, const tagc_tensor *tensors, size_t n_tensors,
                                const tagc_model_options *options) {
    TAGC_TRY(tagc_cpu_check());
    TAGC_TRY(read_options(model, options));
    model->n_owners = model->options.layout.output == TAGC_OUTPUT_SHARD
                          ? model->world_size
                          : model->n_places; /* that exchange it */
    TAGC_TRY(tagc_model_lay_out(model, tensors, n_tensors));
    TAGC_TRY(tagc_model_make_spread(model));
    TAGC_TRY(tagc_model_open_schedule(model));
    return open_units(model);
}

static tagc_status take_units_up(tagc_model *model) {
    for (uint32_t u = 0; model->device && u < model->n_units; u++)
        TAGC_TRY(model->device->take_up(&model->units[u]));
    return TAGC_OK;
}

static tagc_status make_together(tagc_model *model, tagc_status local) {
    TAGC_TRY(tagc_model_agree(model, local));
    TAGC_TRY(compare(model));
    for (uint32_t u = 0; u < model->n_units; u++) {
        tagc_model_unit *unit = &model->units[u];
        TAGC_TRY(tagc_unit_make_parts(model, unit, &unit->parts, &unit->n_parts));
    }
    /* Ranks with and without a device may be in one world. */
    TAGC_TRY(tagc_model_agree(model, take_units_up(model)));
    return model->schedule ? tagc_model_take_plans(model) : TAGC_OK;
}

tagc_status tagc_model_create(tagc_comm *within, tagc_comm *between, const tagc_tensor *tensors,
                              size_t n_tensors, const tagc_model_options *options, tagc_model **out) {
    return tagc_model_make(NULL, NULL, within, between, tensors, n_tensors, options, out);
}

tagc_status tagc_model_make(const tagc_model_device *device, void *queue, tagc_comm *within,
                            tagc_comm *between, const tagc_tensor *tensors, size_t n_tensors,
                            const tagc_model_options *options, tagc_model **out) {
    void *memory;
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    TAGC_TRY(tagc_memory_create(sizeof(tagc_model), "model", &memory));
    tagc_model *model = memory;
    model->device = device;
    model->queue = queue;
    double clock = tagc_time_s();
    model->run = tagc_checksum(&clock, sizeof clock) ^ (uint64_t)(uintptr_t)memory ^ (uint64_t)getpid() << 32;
    tagc_status status = read_comms(model, within, between);
    if (status != TAGC_OK) {
        tagc_memory_destroy(model);
        return status;
    }
    tagc_comm_hold(between);
    if (model->within) tagc_comm_hold(within);
    status = make_together(model, make_locally(model, tensors, n_tensors, options));
    if (status != TAGC_OK)
        tagc_model_destroy(model);
    else
        *out = model;
    return status;
}

void tagc_model_destroy(tagc_model *model) {
    if (!model || tagc_comm_is_fork(model->between)) return;
    for (uint32_t u = 0; model->units && u < model->n_units; u++) {
        tagc_model_unit *unit = &model->units[u];
        if (model->device && unit->is_begun) model->device->wait(unit);
        if (model->device) model->device->let_go(unit);
        tagc_unit_destroy_parts(unit->parts, unit->n_parts);
        if (model->device) model->device->close(unit);
    }
    if (!tagc_model_is_following(model)) tagc_schedule_destroy(model->schedule);
    tagc_memory_destroy(model->own);
    if (model->within) tagc_work_close(model->within, &model->spread);
    tagc_memory_destroy(model->memory);
    if (model->within) tagc_comm_let_go(model->within);
    tagc_comm_let_go(model->between);
    tagc_memory_destroy(model);
}

/* ---- what it answers ---- */

static tagc_status check_tensor(const tagc_model *model, uint32_t tensor) {
    if (!model) return tagc_fail(TAGC_ERR_ARGUMENT, "model is NULL");
    if (tensor < model->n_tensors) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "tensor is %u, must be below %u", tensor, model->n_tensors);
}

tagc_status tagc_model_check_idle(const tagc_model *model, const char *what) {
    if (!model) return tagc_fail(TAGC_ERR_ARGUMENT, "model is NULL");
    for (uint32_t u = 0; u < model->n_units; u++)
        if (model->units[u].is_begun)
            return tagc_fail(TAGC_ERR_STATE, "%s while unit %u is under way: end it first", what, u);
    return TAGC_OK;
}

tagc_status tagc_model_owned(const tagc_model *model, int rank, uint32_t tensor, uint64_t *first,
                             uint64_t *n_elems) {
    if (!first || !n_elems) return tagc_fail(TAGC_ERR_ARGUMENT, "%s is NULL", first ? "n_elems" : "first");
    TAGC_TRY(check_tensor(model, tensor));
    if (rank < 0 || rank >= model->world_size)
        return tagc_fail(TAGC_ERR_ARGUMENT, "rank is %d, must be in [0, %d)", rank, model->world_size);
    tagc_member_owned(model, rank, &model->tensors[tensor], first, n_elems);
    return TAGC_OK;
}

int tagc_model_class(const tagc_model *model, uint32_t tensor) {
    return model && tensor < model->n_tensors ? (int)model->tensors[tensor].kind : -1;
}

tagc_status tagc_model_plan(const tagc_model *model, uint32_t tensor, tagc_schedule_plan *plan) {
    if (!plan) return tagc_fail(TAGC_ERR_ARGUMENT, "plan is NULL");
    TAGC_TRY(check_tensor(model, tensor));
    *plan = model->tensors[tensor].plan;
    return TAGC_OK;
}

tagc_status tagc_model_betas(const tagc_model *model, uint32_t tensor, double beta1, double beta2,
                             double *own_beta1, double *own_beta2) {
    if (!own_beta1 || !own_beta2)
        return tagc_fail(TAGC_ERR_ARGUMENT, "own_beta%d is NULL", own_beta1 ? 2 : 1);
    TAGC_TRY(check_tensor(model, tensor));
    const tagc_member *t = &model->tensors[tensor];
    *own_beta1 = beta1;
    *own_beta2 = beta2;
    if (t->is_scheduled)
        tagc_schedule_betas(model->schedule, t->plan.moment, t->plan.n_selected, beta1, beta2, own_beta1,
                            own_beta2);
    return TAGC_OK;
}

tagc_status tagc_model_set_exchanges(tagc_model *model, uint64_t n_exchanges) {
    TAGC_TRY(tagc_model_check_idle(model, "set_exchanges"));
    for (uint32_t u = 0; u < model->n_units; u++) {
        model->units[u].n_exchanges = n_exchanges;
        for (uint32_t p = 0; p < model->units[u].n_parts; p++)
            TAGC_TRY(tagc_reducer_set_steps(model->units[u].parts[p].reducer, n_exchanges));
    }
    return TAGC_OK;
}

tagc_status tagc_model_memory(const tagc_model *model, tagc_memory *memory) {
    tagc_memory within;
    if (!model) return tagc_fail(TAGC_ERR_ARGUMENT, "model is NULL");
    TAGC_TRY(tagc_comm_memory(model->between, memory));
    if (!model->within) return TAGC_OK;
    tagc_memory_init(&within);
    TAGC_TRY(tagc_comm_memory(model->within, &within));
    memory->residual_bytes += within.residual_bytes;
    memory->spare_bytes += within.spare_bytes;
    memory->work_bytes += within.work_bytes;
    memory->buffer_bytes += within.buffer_bytes;
    return TAGC_OK;
}

tagc_status tagc_model_scale(tagc_model *model, double factor) {
    TAGC_TRY(tagc_model_check_idle(model, "scale"));
    if (!(factor > 0) || isinf(factor))
        return tagc_fail(TAGC_ERR_ARGUMENT, "factor is %g, must be finite and above 0", factor);
    for (uint32_t u = 0; u < model->n_units; u++)
        for (uint32_t p = 0; p < model->units[u].n_parts; p++) {
            tagc_reducer *reducer = model->units[u].parts[p].reducer;
            if (tagc_reducer_residual_elems(reducer) > 0)
                TAGC_TRY(tagc_reducer_scale_residual(reducer, factor));
        }
    if (!model->schedule || tagc_model_is_following(model)) return TAGC_OK;
    return tagc_schedule_scale(model->schedule, factor);
}
