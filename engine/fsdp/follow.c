/* Follows the schedule (tagc/schedule.h): samples of this rank's gradients go in, and its plans come out as exchanges of flats
 * and as moments of their optimizer. All ranks decide from the same sums: one message carries those of all windows that
 * became full in a step. */
#include "exchange/options.h"
#include "fsdp/internal.h"
#include <string.h>

enum {
    N_LOSSES = sizeof(tagc_schedule_losses) / sizeof(double),
    N_SUMS = sizeof(tagc_schedule_sums) / sizeof(double)
};

static tagc_reducer_options options_of(const tagc_fsdp *f, int class_) {
    tagc_reducer_options o = class_ == TAGC_CLASS_MILD ? f->options.mild : f->options.reducer;
    tagc_reducer_options_resolve(&o);
    return o;
}

static int class_has_levels(const tagc_fsdp *f, int class_) {
    if (!f->options.gentle || class_ == TAGC_CLASS_DENSE) return 0;
    tagc_reducer_options o = options_of(f, class_);
    return o.exchange == TAGC_EXCHANGE_DIRECT && o.sparsity > 0;
}

int tagc_fsdp_has_levels(const tagc_fsdp *f, const tagc_flat *flat) {
    return !flat->is_asked && class_has_levels(f, flat->class_);
}

void tagc_fsdp_plan_options(const tagc_schedule_plan *plan, tagc_reducer_options *options) {
    options->sparsity = plan->sparsity;
    options->format = plan->format;
    if (plan->sparsity == 0)
        options->result_sparsity = options->result_format = -1; /* those of selected values */
    if (plan->block > 0 && (options->block == 0 || options->block > plan->block))
        options->block = plan->block;
}

/* ---- tables ---- */

static const tagc_tensor_info *member_of(const tagc_fsdp *f, const tagc_flat *flat, int i) {
    return &f->tables.tensors[f->tables.members[flat->first_member + i]];
}

/* Numbers the members of the flats that are followed; n_samples: of the flat that has most. */
static void number(tagc_fsdp *f, uint64_t *n_samples, uint64_t *most_samples) {
    for (int i = 0; i < f->tables.n_flats; i++) {
        tagc_flat *flat = &f->tables.flats[i];
        flat->is_followed = tagc_fsdp_has_levels(f, flat);
        if (!flat->is_followed) continue;
        flat->first_parameter = f->follow.n;
        flat->first_sample = *n_samples;
        for (int k = 0; k < flat->n_members; k++) {
            uint64_t n = member_of(f, flat, k)->n_elems;
            *n_samples += n < TAGC_SCHEDULE_SAMPLE ? n : TAGC_SCHEDULE_SAMPLE;
        }
        if (*n_samples - flat->first_sample > *most_samples) *most_samples = *n_samples - flat->first_sample;
        f->follow.n += (size_t)flat->n_members;
    }
}

static void place(tagc_fsdp *f, tagc_arena *arena, uint64_t n_samples, uint64_t most_samples) {
    tagc_follow *w = &f->follow;
    size_t n_message = N_LOSSES + w->n * N_SUMS;
    w->described = tagc_arena_take(arena, w->n, sizeof *w->described);
    w->parameters = tagc_arena_take(arena, w->n, sizeof *w->parameters);
    w->counts = tagc_arena_take(arena, w->n, sizeof *w->counts);
    w->full = tagc_arena_take(arena, w->n, sizeof *w->full);
    w->positions = tagc_arena_take(arena, n_samples, sizeof *w->positions);
    w->values = tagc_arena_take(arena, most_samples, sizeof *w->values);
    w->own = tagc_arena_take(arena, n_message, sizeof *w->own);
    w->all = tagc_arena_take(arena, n_message * (size_t)f->world_size, sizeof *w->all);
}

static void describe(tagc_fsdp *f, tagc_flat *flat) {
    tagc_follow *w = &f->follow;
    uint64_t *at = w->positions + flat->first_sample;
    for (int i = 0; i < flat->n_members; i++) {
        size_t parameter = flat->first_parameter + (size_t)i, n;
        const tagc_tensor_info *t = member_of(f, flat, i);
        w->parameters[parameter] = (uint32_t)parameter;
        w->described[parameter] = (tagc_schedule_parameter){t->name, t->n_elems, (tagc_class)flat->class_};
        tagc_schedule_positions(t->n_elems, at, &n);
        for (size_t k = 0; k < n; k++)
            at[k] += f->tables.places[f->tables.members[flat->first_member + i]].offset;
        w->counts[parameter] = (uint32_t)n;
        at += n;
    }
    flat->n_samples = (uint64_t)(at - (w->positions + flat->first_sample));
}

static tagc_status get_plan(const tagc_fsdp *f, tagc_flat *flat) {
    return tagc_schedule_get_plan(f->follow.schedule, f->follow.parameters + flat->first_parameter, NULL,
                                  (size_t)flat->n_members, &flat->plan);
}

static tagc_status make_schedule(tagc_fsdp *f, int fresh) {
    const tagc_fsdp_options *o = &f->options;
    tagc_schedule_options options;
    tagc_schedule_options_init(&options);
    options.fresh = fresh;
    options.short_beta1 = o->beta1_compressed;
    if (class_has_levels(f, TAGC_CLASS_COMPRESSED)) {
        tagc_reducer_options last = options_of(f, TAGC_CLASS_COMPRESSED);
        options.sparsity = last.sparsity;
        options.format = last.format;
    }
    if (class_has_levels(f, TAGC_CLASS_MILD)) {
        tagc_reducer_options last = options_of(f, TAGC_CLASS_MILD);
        options.mild_sparsity = last.sparsity;
        options.mild_format = last.format;
    }
    TAGC_TRY(tagc_schedule_create(&options, f->follow.described, f->follow.n, &f->follow.schedule));
    tagc_moment moment = o->beta1 > o->beta1_compressed ? TAGC_MOMENT_SHORTENS : TAGC_MOMENT_NONE;
    for (size_t i = 0; i < f->follow.n; i++) /* of a mild one it has no effect */
        TAGC_TRY(tagc_schedule_set_moment(f->follow.schedule, i, moment));
    return TAGC_OK;
}

tagc_status tagc_fsdp_open_follow(tagc_fsdp *f) {
    uint64_t n_samples = 0, most_samples = 0;
    number(f, &n_samples, &most_samples);
    if (f->follow.n == 0) return TAGC_OK;
    tagc_arena arena = {0};
    place(f, &arena, n_samples, most_samples);
    TAGC_TRY(tagc_memory_create(arena.n_bytes, "samples of gradients", &f->follow.memory));
    arena = (tagc_arena){.base = f->follow.memory};
    place(f, &arena, n_samples, most_samples);
    for (int i = 0; i < f->tables.n_flats; i++)
        if (f->tables.flats[i].is_followed) describe(f, &f->tables.flats[i]);
    TAGC_TRY(make_schedule(f, f->options.fresh));
    for (int i = 0; i < f->tables.n_flats; i++)
        if (f->tables.flats[i].is_followed) TAGC_TRY(get_plan(f, &f->tables.flats[i]));
    return TAGC_OK;
}

void tagc_fsdp_close_follow(tagc_fsdp *f) {
    tagc_schedule_destroy(f->follow.schedule);
    tagc_memory_destroy(f->follow.memory);
    f->follow = (tagc_follow){0};
}

/* ---- the signal ---- */

tagc_status tagc_fsdp_sample(tagc_fsdp *f, tagc_flat *flat) {
    tagc_follow *w = &f->follow;
    flat->n_full = 0;
    if (!flat->is_followed || f->order.micro_step != f->options.n_micro_steps) return TAGC_OK;
    const uint64_t *at = w->positions + flat->first_sample;
    for (uint64_t i = 0; i < flat->n_samples; i++) w->values[i] = flat->full_gradient[at[i]];
    flat->first_full = w->n_full;
    TAGC_TRY(tagc_schedule_add(w->schedule, w->parameters + flat->first_parameter,
                               w->counts + flat->first_parameter, (size_t)flat->n_members, w->values,
                               w->full + w->n_full, &flat->n_full));
    w->n_full += flat->n_full;
    if (flat->n_full > 0) flat->squares = tagc_sum_of_squares(flat->full_gradient, flat->n_elems);
    return TAGC_OK;
}

/* This rank's sums of all windows that are full. */
static tagc_status take(tagc_fsdp *f, tagc_schedule_sums *sums) {
    tagc_follow *w = &f->follow;
    TAGC_TRY(tagc_schedule_take(w->schedule, w->full, w->n_full, sums));
    for (int i = 0; i < f->tables.n_flats; i++) {
        const tagc_flat *flat = &f->tables.flats[i];
        if (!flat->is_followed || flat->n_full == 0) continue;
        double square;
        TAGC_TRY(tagc_fsdp_residual_square(flat, &square));
        /* Each rank of a host holds a part of the residual of the host's sum. */
        double residual = square / flat->ranks_per_host;
        for (size_t k = flat->first_full; k < flat->first_full + flat->n_full; k++) {
            sums[k].residual = residual;
            sums[k].gradient = flat->squares;
        }
    }
    return TAGC_OK;
}

/* Adds up in rank order, so that all ranks get the same bits. */
static tagc_status see(tagc_fsdp *f) {
    tagc_follow *w = &f->follow;
    size_t n = N_LOSSES + w->n_full * N_SUMS;
    tagc_schedule_losses losses;
    tagc_schedule_sums *sums = (tagc_schedule_sums *)(void *)(w->own + N_LOSSES);
    tagc_schedule_take_losses(w->schedule, &losses);
    memcpy(w->own, &losses, sizeof losses);
    TAGC_TRY(take(f, sums));
    double start_s = tagc_time_s();
    TAGC_TRY(tagc_comm_all_gather(f->comm, w->own, n * sizeof *w->own, w->all));
    tagc_account_blocked(&f->account, start_s, &f->account.stats.wait_reduce_s, -1, f->order.pass);
    for (size_t i = 0; i < n; i++) {
        w->own[i] = 0;
        for (size_t rank = 0; rank < (size_t)f->world_size; rank++) w->own[i] += w->all[rank * n + i];
    }
    TAGC_TRY(tagc_schedule_see(w->schedule, w->full, w->n_full, sums, 0));
    memcpy(&losses, w->own, sizeof losses);
    return tagc_schedule_see_losses(w->schedule, &losses);
}

void tagc_fsdp_watch_loss(tagc_fsdp *f, double loss) {
    if (f->follow.schedule != NULL) tagc_schedule_add_loss(f->follow.schedule, loss);
}

tagc_schedule *tagc_fsdp_schedule(tagc_fsdp *f) {
    return f->follow.schedule;
}

void tagc_fsdp_levels(const tagc_fsdp *f, int n_flats[TAGC_N_LEVELS]) {
    memset(n_flats, 0, TAGC_N_LEVELS * sizeof *n_flats);
    for (int i = 0; i < f->tables.n_flats; i++)
        if (f->tables.flats[i].is_followed) n_flats[f->tables.flats[i].plan.level]++;
}

int tagc_fsdp_n_below_last(const int n_flats[TAGC_N_LEVELS]) {
    int n = 0;
    for (int level = 0; level < TAGC_LEVEL_LAST; level++) n += n_flats[level];
    return n;
}

/* ---- what was decided ---- */

static tagc_status take_up(tagc_fsdp *f, int index) {
    tagc_flat *flat = &f->tables.flats[index], changed = *flat;
    TAGC_TRY(get_plan(f, &changed));
    if (changed.plan.format != flat->plan.format || changed.plan.block != flat->plan.block ||
        changed.plan.sparsity != flat->plan.sparsity)
        TAGC_TRY(tagc_fsdp_change_reducer(f, &changed));
    flat->plan = changed.plan;
    return TAGC_OK;
}

/* Once the first moments of all that is compressed are short, they stay so (tagc/schedule.h). Those of beta1 0 are not
 * needed any more. */
static void drop_moments(tagc_fsdp *f) {
    double longest = 0;
    if (f->options.beta1_compressed > 0) return;
    for (int i = 0; i < f->tables.n_flats; i++) {
        const tagc_flat *flat = &f->tables.flats[i];
        if (flat->is_followed && flat->class_ == TAGC_CLASS_COMPRESSED && flat->plan.moment > longest)
            longest = flat->plan.moment;
    }
    for (int i = 0; longest == 0 && i < f->tables.n_flats; i++)
        if (f->tables.flats[i].is_followed) tagc_fsdp_drop_moment(f, &f->tables.flats[i]);
}

static tagc_status take_up_all(tagc_fsdp *f) {
    for (int i = 0; i < f->tables.n_flats; i++)
        if (f->tables.flats[i].is_followed) TAGC_TRY(take_up(f, i));
    drop_moments(f);
    return TAGC_OK;
}

tagc_status tagc_fsdp_follow(tagc_fsdp *f) {
    if (f->follow.schedule == NULL) return TAGC_OK;
    if (f->follow.n_full > 0) TAGC_TRY(see(f));
    f->follow.n_full = 0;
    TAGC_TRY(tagc_schedule_step(f->follow.schedule, NULL, NULL));
    return take_up_all(f);
}

/* ---- checkpoints ---- */

/* Every flat is exchanged by the engine's options from now on. */
static tagc_status stop_following(tagc_fsdp *f) {
    for (int i = 0; i < f->tables.n_flats; i++) {
        tagc_flat changed = f->tables.flats[i];
        if (!changed.is_followed) continue;
        changed.is_followed = 0;
        TAGC_TRY(tagc_fsdp_change_exchange(f, i, &changed));
    }
    tagc_schedule_destroy(f->follow.schedule);
    f->follow.schedule = NULL;
    return TAGC_OK;
}

tagc_status tagc_fsdp_load_schedule(tagc_fsdp *f, const void *bytes, size_t n_bytes, int with_windows) {
    if (f->follow.schedule == NULL) return TAGC_OK;
    if (n_bytes == 0) return stop_following(f);
    TAGC_TRY(tagc_agree(f->comm,
                        tagc_schedule_load(f->follow.schedule, bytes, n_bytes, with_windows, NULL, NULL)));
    return take_up_all(f);
}

tagc_status tagc_fsdp_begin_anew(tagc_fsdp *f) {
    if (f->follow.schedule == NULL) return TAGC_OK;
    tagc_schedule_destroy(f->follow.schedule);
    f->follow.schedule = NULL;
    TAGC_TRY(tagc_agree(f->comm, make_schedule(f, 0)));
    return take_up_all(f);
}
