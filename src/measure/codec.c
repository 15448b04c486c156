/* What memory allows, and what selecting, indexing, encoding and decoding cost beside it.
 *
 * The floor is the least that error feedback can do: read a gradient and a residual, write the residual. The codec is
 * timed where it works, in reducers of all ranks at once, on the flats that the arms' engines would have; time that it
 * waits for the wire is a phase of its own. Codes of parameters need no partner: a shard is encoded and a unit decoded in
 * memory. Gradients are normal * exp(normal), a tail as heavy as training's, and new
 * at every step. Each turn times the floor too: ratios are of neighbours in time. */
#include "bench/bench.h"
#include "exchange/options.h"

#include "train/progress.h"
#include "codec/delta.h"
#include "core/clock.h"
#include "core/measure.h"
#include "core/memory.h"
#include "core/status.h"
#include <stdlib.h>
#include <string.h>

enum {
    N_TURNS = 3,
    MAX_SETTINGS = 64,
    MAX_SIZES = 3,
    LEAST_ELEMS = 1 << 14,
    FLOOR_LEAST = 1 << 22,
    FLOOR_MOST = 1 << 25
};

static const double long_s = 1.5; /* a step of this is timed once only */
static const double dense_s =
    0.5; /* on the wire at most, for a dense step: its codec is the same for every value */

/* ---- the floor ---- */

typedef struct floor_bench {
    tagc_pool *pool;
    float *gradient, *residual; /* (n) */
    size_t n;
} floor_bench;

static void floor_close(floor_bench *f) {
    tagc_memory_destroy(f->gradient);
    tagc_memory_destroy(f->residual);
    tagc_pool_destroy(f->pool);
}

static tagc_status floor_open(const tagc_bench *bench, floor_bench *f) {
    void *memory;
    uint64_t n = tagc_gpt2_n_params(&bench->plan->model) / 4;
    f->n = n < FLOOR_LEAST  ? FLOOR_LEAST
           : n > FLOOR_MOST ? FLOOR_MOST
                            : (size_t)n; /* more than caches hold */
    TAGC_TRY(tagc_memory_create(f->n * sizeof(float), "gradient", &memory));
    f->gradient = memory;
    TAGC_TRY(tagc_memory_create(f->n * sizeof(float), "residual", &memory));
    f->residual = memory;
    TAGC_TRY(tagc_pool_create((int)bench->plan->options.train.codec_threads, &f->pool));
    tagc_time_floor(f->pool, f->gradient, f->residual, f->residual, f->n);
    return TAGC_OK;
}

/* Seconds per element, all ranks at it together, mean over ranks. */
static tagc_status floor_time(const tagc_bench *bench, floor_bench *f, double *s_per_elem) {
    TAGC_TRY(tagc_comm_barrier(bench->rank->comm));
    *s_per_elem = tagc_time_floor(f->pool, f->gradient, f->residual, f->residual, f->n) / (double)f->n;
    return tagc_bench_mean(bench->rank->comm, s_per_elem, 1);
}

static tagc_status measure_floor(tagc_bench *bench, floor_bench *f) {
    double times[2 * N_TURNS + 1];
    int n_threads = (int)bench->plan->options.train.codec_threads;
    char n_elems[16];
    TAGC_TRY(floor_open(bench, f));
    for (int i = 0; i < 2 * N_TURNS + 1; i++) TAGC_TRY(floor_time(bench, f, &times[i]));
    bench->floor_s_per_elem = tagc_result_spread_of(times, 2 * N_TURNS + 1).median;
    double bytes_per_s = 12 / bench->floor_s_per_elem;
    tagc_bench_say(
        bench,
        "\nMemory floor: %.2f GB/s per rank, all ranks at once, %d thread%s each (read, read and write %s"
        " values)\n",
        1e-9 * bytes_per_s, n_threads, n_threads > 1 ? "s" : "", tagc_human((double)f->n, n_elems));
    tagc_bench_put(bench, "floor",
                   json_pack("{s:i, s:I, s:o}", "n_threads", n_threads, "n_elems", (json_int_t)f->n,
                             "bytes_per_s", tagc_json_real(bytes_per_s)));
    return TAGC_OK;
}

tagc_status tagc_bench_floor(tagc_bench *bench) {
    floor_bench f = {0};
    tagc_status status = measure_floor(bench, &f);
    tagc_rank_finish(bench->rank, status);
    floor_close(&f);
    return status;
}

/* ---- which exchanges, on which flats ---- */

typedef struct flat_size {
    uint64_t n_elems;
    int n_flats;
} flat_size;

typedef struct setting {
    tagc_reducer_options options; /* n_elems and tag mean nothing */
    tagc_paper_options paper;     /* sketch and packed */
    int n_sizes;
    flat_size sizes[MAX_SIZES]; /* those that hold the most elements together */
} setting;

typedef struct setting_list {
    int n;
    setting items[MAX_SETTINGS];
    flat_size
        gathers[TAGC_N_GATHER_KINDS]; /* the largest flat that travels so, and how many of these; 0: none */
} setting_list;

static uint64_t weight(const flat_size *size) {
    return size->n_elems * (uint64_t)size->n_flats;
}

static void add_size(setting *s, flat_size size) {
    int place = s->n_sizes, least = 0;
    for (int i = 0; i < s->n_sizes; i++) {
        if (s->sizes[i].n_elems == size.n_elems) {
            if (size.n_flats > s->sizes[i].n_flats) s->sizes[i].n_flats = size.n_flats;
            return;
        }
        if (weight(&s->sizes[i]) < weight(&s->sizes[least])) least = i;
    }
    if (place < MAX_SIZES)
        s->n_sizes++;
    else if (weight(&s->sizes[least]) >= weight(&size))
        return;
    else
        place = least;
    s->sizes[place] = size;
}

static int same_exchange(const tagc_reducer_options *a, const tagc_reducer_options *b) {
    if (a->exchange != b->exchange || a->output != b->output || a->n_threads != b->n_threads) return 0;
    if (a->exchange == TAGC_EXCHANGE_DENSE) return a->format == b->format;
    if (a->exchange == TAGC_EXCHANGE_DIRECT)
        return a->format == b->format && a->sparsity == b->sparsity && a->block == b->block &&
               a->rotate == b->rotate;
    const tagc_paper_options *p = a->paper, *q = b->paper;
    if (p->index != q->index || a->sparsity != b->sparsity || p->fill_union != q->fill_union) return 0;
    return a->exchange == TAGC_EXCHANGE_PACKED ||
           (p->ratio == q->ratio && p->cells == q->cells && p->unpeeled == q->unpeeled);
}

/* Arms that exchange in the same way are measured once; the codec of two levels is that of one. */
static setting *find_setting(setting_list *list, const tagc_reducer_options *asked) {
    tagc_reducer_options one_level = *asked, *options = &one_level;
    one_level.ranks_per_host = 1;
    if (one_level.output == TAGC_OUTPUT_HOST_SHARD) one_level.output = TAGC_OUTPUT_UNIT;
    for (int i = 0; i < list->n; i++)
        if (same_exchange(&list->items[i].options, options)) return &list->items[i];
    if (list->n == MAX_SETTINGS) return NULL;
    setting *s = &list->items[list->n++];
    s->options = *options;
    if (options->paper) { /* the layout's, which goes */
        s->paper = *options->paper;
        s->options.paper = &s->paper;
    }
    return s;
}

static tagc_status add_arm(setting_list *list, const tagc_bench *bench, const tagc_arm *arm) {
    tagc_fsdp_options options;
    tagc_layout *layout;
    tagc_train_fsdp(&arm->options, &options);
    TAGC_TRY(tagc_bench_layout(bench, &options, &layout));
    for (int i = 0; i < layout->n_flats; i++) {
        const tagc_layout_flat *flat = &layout->flats[i];
        setting *s = find_setting(list, &flat->reducer);
        flat_size size = {.n_elems = flat->n_padded};
        for (int k = 0; k < layout->n_flats; k++)
            size.n_flats +=
                layout->flats[k].n_padded == flat->n_padded && layout->flats[k].class_ == flat->class_;
        if (s) add_size(s, size);
        int kind = tagc_gatherer_options_kind(&flat->gatherer);
        if (flat->has_gatherer && size.n_elems > list->gathers[kind].n_elems) list->gathers[kind] = size;
    }
    tagc_layout_destroy(layout);
    return TAGC_OK;
}

/* ---- one of them ---- */

typedef struct codec_result {
    uint64_t n_elems, n_union; /* the union of the last step; 0 where nobody knows it */
    double n_kept;             /* in it, by one rank, mean over ranks */
    double phase_s[TAGC_N_PHASES], to_floor[TAGC_N_PHASES], total_to_floor;
} codec_result;

typedef struct codec_bench {
    tagc_bench *bench;
    floor_bench floor;
    float *gradient, *output; /* (n_max) */
    uint64_t n_max, seed;
    json_t *list;
} codec_bench;

typedef struct step_times {
    double phase_s[TAGC_N_PHASES]; /* mean over ranks */
    double wall_s;                 /* of the slowest rank */
    uint64_t n_union;
    double n_kept; /* mean over ranks */
} step_times;

static tagc_status time_step(codec_bench *c, tagc_reducer *reducer, uint64_t n_elems, step_times *out) {
    tagc_reducer_stats stats;
    tagc_comm *comm = c->bench->rank->comm;
    tagc_fill_gradient(c->gradient, n_elems, &c->seed);
    tagc_reducer_stats_init(&stats);
    TAGC_TRY(tagc_comm_barrier(comm));
    TAGC_TRY(tagc_reducer_run(reducer, c->gradient, c->output, &stats));
    memcpy(out->phase_s, stats.time_s, sizeof out->phase_s);
    out->wall_s = stats.total_s;
    out->n_union = stats.n_union;
    out->n_kept = (double)stats.n_kept;
    TAGC_TRY(tagc_bench_mean(comm, &out->n_kept, 1));
    TAGC_TRY(tagc_bench_mean(comm, out->phase_s, TAGC_N_PHASES));
    return tagc_bench_max(comm, &out->wall_s, 1);
}

static tagc_status time_reducer(codec_bench *c, tagc_reducer *reducer, codec_result *result) {
    double phases[TAGC_N_PHASES][N_TURNS], ratios[TAGC_N_PHASES + 1][N_TURNS];
    step_times step;
    TAGC_TRY(time_step(c, reducer, result->n_elems, &step)); /* the residual is empty here */
    int n_turns = step.wall_s > long_s ? 1 : N_TURNS;
    for (int turn = 0; turn < n_turns; turn++) {
        double floor_s, total = 0;
        TAGC_TRY(floor_time(c->bench, &c->floor, &floor_s));
        TAGC_TRY(time_step(c, reducer, result->n_elems, &step));
        for (int phase = 0; phase < TAGC_N_PHASES; phase++) {
            phases[phase][turn] = step.phase_s[phase];
            ratios[phase][turn] = step.phase_s[phase] / (floor_s * (double)result->n_elems);
            if (phase != TAGC_PHASE_WAIT) total += ratios[phase][turn];
        }
        ratios[TAGC_N_PHASES][turn] = total;
    }
    for (int phase = 0; phase < TAGC_N_PHASES; phase++) {
        result->phase_s[phase] = tagc_result_spread_of(phases[phase], n_turns).median;
        result->to_floor[phase] = tagc_result_spread_of(ratios[phase], n_turns).median;
    }
    result->total_to_floor = tagc_result_spread_of(ratios[TAGC_N_PHASES], n_turns).median;
    result->n_union = step.n_union;
    result->n_kept = step.n_kept;
    return TAGC_OK;
}

static const char *const indexes[] = {"or", "sum4", "sum1"};

static void describe(const tagc_reducer_options *o, char what[48]) {
    const char *name = tagc_exchange_names[o->exchange], *all = o->output != TAGC_OUTPUT_SHARD ? ", all" : "";
    if (o->exchange == TAGC_EXCHANGE_DENSE)
        snprintf(what, 48, "dense %s%s", tagc_format_names[o->format], all);
    else if (o->exchange == TAGC_EXCHANGE_DIRECT)
        snprintf(what, 48, "direct %s%s%s", tagc_format_names[o->format], o->rotate ? " rotated" : "", all);
    else if (o->exchange == TAGC_EXCHANGE_SKETCH && o->paper->ratio > 0)
        snprintf(what, 48, "sketch %.4gx %s%s", o->paper->ratio, indexes[o->paper->index], all);
    else
        snprintf(what, 48, "%s %s%s", name, indexes[o->paper->index], all);
}

/* One line, and the members that all entries have. */
static json_t *say_entry(codec_bench *c, const char *what, const char *sparsity, int n_flats,
                         const codec_result *r) {
    char n_elems[16];
    double total_s = 0;
    tagc_bench_say(c->bench, "  %-18s %8s %8s x %-4d", what, sparsity,
                   tagc_human((double)r->n_elems, n_elems), n_flats);
    for (int phase = 0; phase < TAGC_PHASE_WAIT; phase++) {
        total_s += r->phase_s[phase];
        tagc_bench_say(c->bench, " %7.2f", r->to_floor[phase]);
    }
    tagc_bench_say(c->bench, " %7.2f %9.2f ms\n", r->total_to_floor, 1e3 * total_s);
    return json_pack("{s:I, s:i, s:o, s:o, s:o}", "n_elems", (json_int_t)r->n_elems, "n_tensors", n_flats,
                     "phase_s", tagc_json_phases(r->phase_s), "to_floor", tagc_json_phases(r->to_floor),
                     "total_to_floor", tagc_json_real(r->total_to_floor));
}

static void report(codec_bench *c, const setting *s, int n_flats, const codec_result *r) {
    const tagc_reducer_options *o = &s->options;
    char what[48], sparsity[16] = "-";
    int is_dense = o->exchange == TAGC_EXCHANGE_DENSE, is_direct = o->exchange == TAGC_EXCHANGE_DIRECT;
    describe(o, what);
    if (!is_dense && !(is_direct && o->sparsity == 0))
        snprintf(sparsity, sizeof sparsity, "%.4g %%", 100 * o->sparsity);
    json_t *about = json_pack(
        "{s:s, s:s, s:s, s:b, s:f, s:f, s:o, s:o, s:o, s:o}", "exchange", tagc_exchange_names[o->exchange],
        "wire", is_dense ? tagc_format_names[o->format] : "fp32", "index",
        o->paper ? indexes[o->paper->index] : "none", "all_reduce", o->output != TAGC_OUTPUT_SHARD,
        "sparsity", is_dense ? 0.0 : o->sparsity, "ratio", o->paper ? o->paper->ratio : 0.0, "values",
        is_direct ? json_string(tagc_format_names[o->format]) : json_null(), "block",
        is_direct && o->format > TAGC_FORMAT_BF16 ? json_integer(o->block) : json_null(), "n_kept",
        json_integer((json_int_t)(r->n_kept + 0.5)), "n_union",
        r->n_union > 0 ? json_integer((json_int_t)r->n_union) : json_null());
    json_t *figures = say_entry(c, what, sparsity, n_flats, r);
    json_object_update(about, figures);
    json_decref(figures);
    json_array_append_new(c->list, about);
}

/* Dense flats become no larger than a slow link carries in time, and those that are alike then are one. */
static void shorten(const tagc_bench *bench, setting *s) {
    const tagc_reducer_options *o = &s->options;
    double n_bytes = (o->format == TAGC_FORMAT_BF16 ? 2 : 4) * (o->output != TAGC_OUTPUT_SHARD ? 2 : 1);
    double most = bench->all_to_all_bytes_per_s * dense_s / n_bytes;
    int n = 0;
    if (o->exchange != TAGC_EXCHANGE_DENSE || most <= 0) return;
    uint64_t limit =
        tagc_padded_elems(most < LEAST_ELEMS ? LEAST_ELEMS : (uint64_t)most, bench->rank->world_size);
    for (int i = 0; i < s->n_sizes; i++) {
        flat_size size = s->sizes[i];
        int k = 0;
        if (size.n_elems > limit) size.n_elems = limit;
        while (k < n && s->sizes[k].n_elems != size.n_elems) k++;
        if (k < n)
            s->sizes[k].n_flats += size.n_flats;
        else
            s->sizes[n++] = size;
    }
    s->n_sizes = n;
}

static tagc_status time_size(codec_bench *c, const setting *s, const flat_size *size) {
    tagc_reducer_options options = s->options;
    tagc_reducer *reducer = NULL;
    codec_result result = {.n_elems = size->n_elems};
    options.n_elems = result.n_elems;
    options.tag = UINT64_MAX;
    TAGC_TRY(tagc_reducer_create(c->bench->rank->comm, &options, &reducer));
    tagc_status status = time_reducer(c, reducer, &result);
    tagc_rank_finish(c->bench->rank, status);
    tagc_reducer_destroy(reducer);
    if (status == TAGC_OK) report(c, s, size->n_flats, &result);
    return status;
}

/* ---- codes of parameters ---- */

static double time_gather(int kind, const float *values, float *replica, uint8_t *body, size_t n,
                          int decodes) {
    static const int bits[TAGC_N_GATHER_KINDS] = {0, 0, 8, 8, 4, 2};
    int is_delta = kind >= TAGC_GATHER_DELTA8;
    double start_s = tagc_clock_s();
    if (!decodes)
        (void)tagc_delta_encode(bits[kind], values, is_delta ? replica : NULL, n, body);
    else if (is_delta)
        tagc_delta_apply(bits[kind], body, replica, n);
    else
        tagc_delta_decode(bits[kind], body, replica, n);
    return tagc_clock_s() - start_s;
}

/* A shard encoded, all of the unit decoded; time is the mean over ranks, all at it together. */
static tagc_status measure_gather(codec_bench *c, int kind, const flat_size *size, uint8_t *body) {
    double times[2][N_TURNS], ratios[2][N_TURNS], total[N_TURNS];
    size_t n_unit = (size_t)size->n_elems, n_shard = n_unit / (size_t)c->bench->rank->world_size;
    codec_result r = {.n_elems = size->n_elems, .n_kept = (double)size->n_elems};
    static const int phases[] = {TAGC_PHASE_ENCODE, TAGC_PHASE_DECODE};
    tagc_fill_gradient(c->gradient, size->n_elems, &c->seed);
    memset(c->output, 0, n_unit * sizeof *c->output);
    for (int turn = -1; turn < N_TURNS; turn++) {
        double floor_s, spent_s[2];
        TAGC_TRY(floor_time(c->bench, &c->floor, &floor_s));
        (void)time_gather(kind, c->gradient, c->output, body, n_unit, 0); /* what there is to decode */
        TAGC_TRY(tagc_comm_barrier(c->bench->rank->comm));
        spent_s[1] = time_gather(kind, NULL, c->output, body, n_unit, 1);
        spent_s[0] = time_gather(kind, c->gradient, c->output, body, n_shard, 0);
        TAGC_TRY(tagc_bench_mean(c->bench->rank->comm, spent_s, 2));
        if (turn < 0) continue;
        total[turn] = 0;
        for (int k = 0; k < 2; k++) {
            times[k][turn] = spent_s[k];
            ratios[k][turn] = spent_s[k] / (floor_s * (double)n_unit);
            total[turn] += ratios[k][turn];
        }
    }
    for (int k = 0; k < 2; k++) {
        r.phase_s[phases[k]] = tagc_result_spread_of(times[k], N_TURNS).median;
        r.to_floor[phases[k]] = tagc_result_spread_of(ratios[k], N_TURNS).median;
    }
    r.total_to_floor = tagc_result_spread_of(total, N_TURNS).median;
    char what[48];
    snprintf(what, sizeof what, "gather %s", tagc_gather_choices[kind].name);
    json_t *about =
        json_pack("{s:s, s:s, s:s, s:b, s:f, s:f, s:n, s:n, s:I, s:n}", "exchange", "gather", "wire",
                  tagc_gather_choices[kind].name, "index", "none", "all_reduce", 0, "sparsity", 0.0, "ratio",
                  0.0, "values", "block", "n_kept", (json_int_t)size->n_elems, "n_union");
    json_t *figures = say_entry(c, what, "-", size->n_flats, &r);
    json_object_update(about, figures);
    json_decref(figures);
    json_array_append_new(c->list, about);
    return TAGC_OK;
}

static tagc_status measure_gathers(codec_bench *c, const setting_list *list) {
    void *body;
    size_t n_most = 0;
    for (int kind = TAGC_GATHER_INT8; kind < TAGC_N_GATHER_KINDS; kind++)
        if (list->gathers[kind].n_elems > n_most) n_most = (size_t)list->gathers[kind].n_elems;
    if (n_most == 0) return TAGC_OK;
    TAGC_TRY(tagc_memory_create(tagc_delta_bytes(8, n_most), "a body", &body));
    tagc_status status = TAGC_OK;
    for (int kind = TAGC_GATHER_INT8; status == TAGC_OK && kind < TAGC_N_GATHER_KINDS; kind++)
        if (list->gathers[kind].n_elems > 0) status = measure_gather(c, kind, &list->gathers[kind], body);
    tagc_memory_destroy(body);
    return status;
}

static tagc_status measure_codec(codec_bench *c, setting_list *list) {
    tagc_bench *bench = c->bench;
    void *memory;
    for (int i = 0; i < bench->plan->n_arms; i++) {
        const tagc_arm *arm = &bench->plan->arms[i];
        tagc_status status = add_arm(list, bench, arm);
        if (status != TAGC_OK) return tagc_fail_in(status, "arm %s", arm->name);
    }
    for (int i = 0; i < list->n; i++) {
        shorten(bench, &list->items[i]);
        for (int k = 0; k < list->items[i].n_sizes; k++)
            if (list->items[i].sizes[k].n_elems > c->n_max) c->n_max = list->items[i].sizes[k].n_elems;
    }
    for (int kind = TAGC_GATHER_INT8; kind < TAGC_N_GATHER_KINDS; kind++)
        if (list->gathers[kind].n_elems > c->n_max) c->n_max = list->gathers[kind].n_elems;
    TAGC_TRY(tagc_bench_check_memory(bench, "measuring the codec", 6 * c->n_max * sizeof(float)));
    TAGC_TRY(tagc_memory_create(c->n_max * sizeof(float), "gradient", &memory));
    c->gradient = memory;
    TAGC_TRY(tagc_memory_create(c->n_max * sizeof(float), "output", &memory));
    c->output = memory;
    TAGC_TRY(floor_open(bench, &c->floor));
    tagc_bench_say(
        bench, "\nCodec, times of the floor for as many values\n  %-18s %8s %15s %7s %7s %7s %7s %7s %12s\n",
        "", "sparsity", "values", "select", "index", "encode", "decode", "all", "");
    for (int i = 0; i < list->n; i++)
        for (int k = 0; k < list->items[i].n_sizes; k++)
            TAGC_TRY(time_size(c, &list->items[i], &list->items[i].sizes[k]));
    return measure_gathers(c, list);
}

tagc_status tagc_bench_codec(tagc_bench *bench) {
    codec_bench c = {.bench = bench, .seed = (uint64_t)bench->rank->rank + 1, .list = json_array()};
    setting_list *list = calloc(1, sizeof *list);
    tagc_status status =
        list ? measure_codec(&c, list) : tagc_fail(TAGC_ERR_MEMORY, "out of memory for a list of exchanges");
    tagc_rank_finish(bench->rank, status);
    floor_close(&c.floor);
    tagc_memory_destroy(c.gradient);
    tagc_memory_destroy(c.output);
    free(list);
    if (status == TAGC_OK)
        tagc_bench_put(bench, "codec", c.list);
    else
        json_decref(c.list);
    return status;
}
