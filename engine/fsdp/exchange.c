/* Gradients go through lib/unit: a model (tagc/model.h) whose units are the engine's and whose flats are cut as the engine's
 * are, in the engine's arrays. */
#include "exchange/options.h"
#include "exchange/wire.h"
#include "fsdp/internal.h"
#include "fsdp/layout.h"
#include "unit/gather.h"
#include "unit/options.h"
#include <math.h>
#include <stdlib.h>

/* ---- options ---- */

static int exchange_of_compressed(const tagc_fsdp_options *o) {
    return o->policy == TAGC_POLICY_NONE ? TAGC_EXCHANGE_DIRECT : o->reducer.exchange;
}

/* 1 if compressed flats are coded by direct. */
static int codes_compressed(const tagc_fsdp_options *o) {
    return o->policy != TAGC_POLICY_NONE && o->reducer.exchange == TAGC_EXCHANGE_DIRECT &&
           !tagc_reducer_options_are_whole(&o->reducer);
}

/* Where everything travels whole, there is nothing to encode once per host, and the paper's exchanges have one level. */
static int adds_in_hosts(const tagc_fsdp_options *o) {
    int exchange = exchange_of_compressed(o);
    int is_direct = codes_compressed(o) || o->mild.exchange == TAGC_EXCHANGE_DIRECT;
    if (o->ranks_per_host == 1) return 0;
    return o->sharding == TAGC_SHARD_HYBRID || (o->two_level && is_direct && !tagc_is_paper(exchange));
}

int tagc_fsdp_gathers_in_levels(const tagc_fsdp_options *o) {
    return o->two_level && o->ranks_per_host > 1 &&
           (o->sharding == TAGC_SHARD_FULL || o->sharding == TAGC_SHARD_GRAD);
}

static tagc_reducer_options options_of(const tagc_fsdp *f, int class_) {
    tagc_reducer_options o = class_ == TAGC_CLASS_MILD ? f->options.mild : f->options.reducer;
    tagc_reducer_options_prune(&o);
    tagc_reducer_options_resolve(&o);
    return o;
}

/* ---- the model ---- */

static void schedule_options(const tagc_fsdp *f, int fresh, tagc_schedule_options *s) {
    tagc_reducer_options compressed = options_of(f, TAGC_CLASS_COMPRESSED),
                         mild = options_of(f, TAGC_CLASS_MILD);
    tagc_schedule_options_init(s);
    s->gentle = f->options.gentle;
    s->fresh = fresh;
    s->short_beta1 = f->options.beta1_compressed;
    s->sparsity = compressed.sparsity;
    s->format = (tagc_format)compressed.format;
    if (mild.exchange != TAGC_EXCHANGE_DIRECT) return;
    s->mild_sparsity = mild.sparsity;
    s->mild_format = (tagc_format)mild.format;
}

static void model_options(const tagc_fsdp *f, tagc_model_options *m) {
    const tagc_fsdp_options *o = &f->options;
    int exchange = exchange_of_compressed(o);
    tagc_model_options_init(m);
    m->schedule.moment = o->beta1 > o->beta1_compressed ? TAGC_MOMENT_SHORTENS : TAGC_MOMENT_NONE;
    m->layout.output = o->sharding == TAGC_SHARD_HYBRID ? TAGC_OUTPUT_HOST_SHARD
                       : o->sharding == TAGC_SHARD_NONE ? TAGC_OUTPUT_UNIT
                                                        : TAGC_OUTPUT_SHARD;
    m->formats.dense = o->dense_format;
    m->formats.residual = codes_compressed(o) ? o->reducer.residual : o->mild.residual;
    m->n_threads = o->reducer.n_threads;
    m->exchange = exchange;
    if (tagc_is_paper(exchange)) {
        m->paper = &o->paper;
        m->formats.residual = -1;
    }
    m->layout.cut = TAGC_CUT_FLAT_ARRAYS;
    if (codes_compressed(o)) {
        m->formats.block = o->reducer.block > 0 ? o->reducer.block : options_of(f, TAGC_CLASS_MILD).block;
        m->formats.result_sparsity = o->reducer.result.sparsity;
        m->formats.result = o->reducer.result.format;
    } else if (o->mild.exchange == TAGC_EXCHANGE_DIRECT) {
        m->formats.block = options_of(f, TAGC_CLASS_MILD).block;
    }
}

int tagc_fsdp_has_levels(const tagc_fsdp *f, const tagc_flat *flat) {
    tagc_schedule_options schedule;
    schedule_options(f, 0, &schedule);
    return tagc_class_has_levels(&schedule, exchange_of_compressed(&f->options), (tagc_class)flat->class_);
}

void tagc_fsdp_describe_exchange(const tagc_fsdp *f, const tagc_flat *flat, tagc_layout_flat *out) {
    tagc_gatherer_options *g = &out->gatherer;
    tagc_schedule_options schedule;
    tagc_model_options model;
    tagc_class kind = (tagc_class)flat->class_;
    out->n_adding = adds_in_hosts(&f->options) ? f->options.ranks_per_host : 1;
    schedule_options(f, 0, &schedule);
    model_options(f, &model);
    const tagc_exchanged what = {
        .kind = kind,
        .is_followed = flat->is_followed,
        .plan = flat->is_followed ? flat->plan : tagc_class_plan(&schedule, model.formats.dense, kind),
        .n_elems = flat->n_padded / (uint64_t)out->n_adding,
        .tag = (uint64_t)flat->unit,
        .n_hosts = f->world_size / out->n_adding,
        .n_places = out->n_adding};
    tagc_options_between(&model, &what, &out->reducer);
    tagc_reducer_options_prune(&out->reducer);
    tagc_reducer_options_resolve(&out->reducer);
    tagc_options_within(&model, &what, &out->within);
    tagc_gatherer_options_init(g);
    g->n_elems = flat->n_padded;
    g->tag = (uint64_t)flat->unit;
    g->n_threads = (uint64_t)f->options.reducer.n_threads;
    tagc_gatherer_options_choose(g, f->options.gather);
    g->check_every = g->delta ? (uint64_t)f->options.gather_check_every : 0;
    out->has_gatherer = f->options.sharding != TAGC_SHARD_NONE;
}

/* (n_tensors,) and behind them their shapes. */
static tagc_status describe(const tagc_fsdp *f, tagc_tensor **out) {
    size_t n = (size_t)f->tables.n_tensors;
    void *memory;
    TAGC_TRY(tagc_memory_create(n * (sizeof **out + 2 * sizeof(uint64_t)), "tensors of a model", &memory));
    tagc_tensor *tensors = *out = memory;
    uint64_t *shapes = (uint64_t *)(void *)(tensors + n);
    for (size_t i = 0; i < n; i++, shapes += 2) {
        const tagc_tensor_info *t = &f->tables.tensors[i];
        shapes[0] = t->n_rows;
        shapes[1] = t->n_cols;
        tensors[i] = (tagc_tensor){.name = t->name,
                                   .shape = shapes,
                                   .n_dims = 2,
                                   .unit = (uint32_t)f->tables.places[i].unit,
                                   .kind = f->tables.flats[f->tables.places[i].flat].class_};
    }
    return TAGC_OK;
}

static tagc_status make_model(const tagc_fsdp *f, int fresh, tagc_model **out) {
    tagc_tensor *tensors = NULL;
    tagc_schedule_options schedule;
    tagc_model_options options;
    *out = NULL;
    tagc_status status = tagc_levels_agree(NULL, f->comm, describe(f, &tensors));
    if (status == TAGC_OK) {
        schedule_options(f, fresh, &schedule);
        model_options(f, &options);
        options.schedule.options = &schedule;
        int adds = adds_in_hosts(&f->options);
        status = tagc_model_create(adds ? f->within : NULL, adds ? f->between : f->comm, tensors,
                                   (size_t)f->tables.n_tensors, &options, out);
    }
    tagc_memory_destroy(tensors);
    if (status == TAGC_OK) tagc_model_set_run(*out, 0); /* the manifest ties files together */
    return status;
}

/* Ranks of a host, and of a place, get comms of their own. */
static tagc_status make_comms(tagc_fsdp *f) {
    const tagc_fsdp_options *o = &f->options;
    int is_hybrid = o->sharding == TAGC_SHARD_HYBRID;
    if (!is_hybrid && !adds_in_hosts(o) && !tagc_fsdp_gathers_in_levels(o)) return TAGC_OK;
    TAGC_TRY(tagc_comm_split(f->comm, f->rank / o->ranks_per_host, &f->within));
    return tagc_comm_split(f->comm, f->rank % o->ranks_per_host, &f->between);
}

static tagc_status make_gatherer(const tagc_fsdp *f, const tagc_gatherer_options *g,
                                 tagc_flat_gatherer **out) {
    if (f->options.sharding == TAGC_SHARD_HYBRID) return tagc_flat_gatherer_create(f->within, NULL, g, out);
    if (tagc_fsdp_gathers_in_levels(&f->options))
        return tagc_flat_gatherer_create(f->within, f->between, g, out);
    return tagc_flat_gatherer_create(NULL, f->comm, g, out);
}

const tagc_model_part *tagc_fsdp_part(const tagc_fsdp *f, const tagc_flat *flat) {
    return f->model->tensors[f->tables.members[flat->first_member]].part;
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

static tagc_status take_plans(tagc_fsdp *f) {
    for (int i = 0; i < f->tables.n_flats; i++) {
        tagc_flat *flat = &f->tables.flats[i];
        flat->is_followed = tagc_fsdp_has_levels(f, flat);
        if (flat->is_followed)
            TAGC_TRY(tagc_model_plan(f->model, (uint32_t)f->tables.members[flat->first_member], &flat->plan));
    }
    return TAGC_OK;
}

tagc_status tagc_fsdp_open_exchange(tagc_fsdp *f) {
    TAGC_TRY(make_comms(f));
    TAGC_TRY(make_model(f, f->options.fresh, &f->model));
    for (int i = 0; i < f->tables.n_flats; i++) {
        tagc_flat *flat = &f->tables.flats[i];
        tagc_layout_flat about = {0};
        tagc_fsdp_describe_exchange(f, flat, &about);
        if (about.has_gatherer) TAGC_TRY(make_gatherer(f, &about.gatherer, &flat->gatherer));
    }
    return take_plans(f);
}

void tagc_fsdp_close_exchange(tagc_fsdp *f) {
    tagc_model_destroy(f->model);
    for (int i = 0; i < f->tables.n_flats; i++) tagc_flat_gatherer_destroy(f->tables.flats[i].gatherer);
    tagc_comm_destroy(f->between);
    tagc_comm_destroy(f->within);
}

tagc_status tagc_fsdp_begin_anew(tagc_fsdp *f) {
    tagc_model *model;
    TAGC_TRY(make_model(f, 0, &model));
    tagc_model_destroy(f->model);
    f->model = model;
    return take_plans(f);
}

tagc_status tagc_fsdp_stop_following(tagc_fsdp *f) {
    if (!f->options.gentle) return TAGC_OK;
    f->options.gentle = 0;
    for (int i = 0; i < f->tables.n_flats; i++) tagc_fsdp_drop_moment(f, &f->tables.flats[i]);
    return tagc_fsdp_begin_anew(f);
}

void tagc_fsdp_count_bytes(const tagc_fsdp *f, uint64_t sent[TAGC_N_LEGS], uint64_t received[TAGC_N_LEGS]) {
    const tagc_comm *others[] = {f->within, f->between};
    tagc_comm_bytes(f->comm, sent, received, TAGC_N_LEGS);
    for (int i = 0; i < 2; i++) {
        uint64_t more_sent[TAGC_N_LEGS], more_received[TAGC_N_LEGS];
        if (others[i] == NULL) continue;
        tagc_comm_bytes(others[i], more_sent, more_received, TAGC_N_LEGS);
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
            sent[leg] += more_sent[leg];
            received[leg] += more_received[leg];
        }
    }
}

/* ---- the schedule ---- */

void tagc_fsdp_watch_loss(tagc_fsdp *f, double loss) {
    f->loss = loss;
}

tagc_schedule *tagc_fsdp_schedule(tagc_fsdp *f) {
    for (int i = 0; i < f->tables.n_flats; i++)
        if (f->tables.flats[i].is_followed) return f->model->schedule;
    return NULL;
}

void tagc_fsdp_levels(const tagc_fsdp *f, int n_flats[TAGC_N_LEVELS]) {
    for (int level = 0; level < TAGC_N_LEVELS; level++) n_flats[level] = 0;
    for (int i = 0; i < f->tables.n_flats; i++)
        if (f->tables.flats[i].is_followed) n_flats[f->tables.flats[i].plan.level]++;
}

int tagc_fsdp_n_below_last(const int n_flats[TAGC_N_LEVELS]) {
    int n = 0;
    for (int level = 0; level < TAGC_LEVEL_LAST; level++) n += n_flats[level];
    return n;
}

tagc_status tagc_fsdp_follow(tagc_fsdp *f) {
    double start_s = tagc_time_s();
    TAGC_TRY(tagc_model_step(f->model, f->loss));
    tagc_account_blocked(&f->account, start_s, &f->account.stats.wait_reduce_s, -1, f->order.pass);
    f->loss = NAN;
    TAGC_TRY(take_plans(f));
    drop_moments(f);
    return TAGC_OK;
}

tagc_status tagc_fsdp_load_model(tagc_fsdp *f, const void *const *files, const size_t *sizes,
                                 size_t n_files) {
    TAGC_TRY(tagc_model_load(f->model, files, sizes, n_files));
    TAGC_TRY(take_plans(f));
    drop_moments(f);
    return TAGC_OK;
}

/* ---- memory ---- */

void tagc_fsdp_memory_used(const tagc_fsdp *f, tagc_fsdp_memory *out) {
    *out = f->memory;
    for (int i = 0; i < f->tables.n_flats; i++)
        out->residuals += tagc_reducer_state_bytes(tagc_fsdp_part(f, &f->tables.flats[i])->reducer) -
                          TAGC_WIRE_HEADER_BYTES;
}
