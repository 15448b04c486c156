/* tagc bench --only floor and codec: memory alone (the floor), and selecting, indexing, encoding and decoding, of the exchanges and
 * flats of the arms.
 *
 * The floor is the least work of error feedback: read a gradient and a residual, write the residual. The codec is timed
 * in reducers of all ranks at once; waiting for the wire is a phase of its own. Codes of parameters need no other rank: a
 * shard is encoded and a unit decoded in memory. Gradients are normal * exp(normal), whose tail is as heavy as in training,
 * and new at every step. Each turn times the floor, too, so that ratios compare measurements close in time. */
#include "bench/bench.h"

#include "codec/bf16.h"
#include "codec/delta.h"
#include "codec/exponents.h"
#include "core/clock.h"
#include "core/measure.h"
#include "core/memory.h"
#include "core/status.h"
#include "exchange/options.h"
#include "exchange/reducer.h"
#include "launch/human.h"
#include "launch/over_ranks.h"
#include "plan/plan.h"
#include <stdlib.h>
#include <string.h>

enum {
    N_TURNS = 3,
    FLOOR_LEAST = 1 << 22,
    FLOOR_MOST = 1 << 25,
    MAX_SETTINGS = 64,
    MAX_SIZES = 3,
    LEAST_ELEMS = 1 << 14
};

static const double long_s = 1.5; /* a step that takes longer is timed once */
/* Longest time on the wire of a dense step; its codec treats all values alike, so a smaller flat will do. */
static const double dense_s = 0.5;

/* ---- the floor ---- */

typedef struct memory_floor {
    tagc_pool *pool;
    float *gradient, *residual; /* (n) */
    size_t n;
} memory_floor;

static void close_floor(memory_floor *f) {
    tagc_memory_destroy(f->gradient);
    tagc_memory_destroy(f->residual);
    tagc_pool_destroy(f->pool);
}

static int n_threads(const tagc_bench *bench) {
    return (int)bench->plan->options.train.codec_threads;
}

static tagc_status open_floor(const tagc_bench *bench, memory_floor *f) {
    void *memory;
    uint64_t n = tagc_gpt2_n_params(&bench->plan->model) / 4;
    f->n = n < FLOOR_LEAST ? FLOOR_LEAST : n > FLOOR_MOST ? FLOOR_MOST : (size_t)n; /* larger than caches */
    TAGC_TRY(tagc_memory_create(f->n * sizeof(float), "gradient", &memory));
    f->gradient = memory;
    TAGC_TRY(tagc_memory_create(f->n * sizeof(float), "residual", &memory));
    f->residual = memory;
    TAGC_TRY(tagc_pool_create(n_threads(bench), &f->pool));
    tagc_time_floor(f->pool, f->gradient, f->residual, f->residual, f->n);
    return TAGC_OK;
}

/* Seconds per element, mean over ranks, which all run at once. */
static tagc_status floor_time(tagc_comm *comm, memory_floor *f, double *s_per_elem) {
    TAGC_TRY(tagc_comm_barrier(comm));
    *s_per_elem = tagc_time_floor(f->pool, f->gradient, f->residual, f->residual, f->n) / (double)f->n;
    return tagc_mean_over_ranks(comm, s_per_elem, 1);
}

static tagc_status measure_floor(tagc_bench *bench, memory_floor *f) {
    double times[2 * N_TURNS + 1];
    char n_elems[16];
    TAGC_TRY(open_floor(bench, f));
    for (int i = 0; i < 2 * N_TURNS + 1; i++) TAGC_TRY(floor_time(bench->rank->comm, f, &times[i]));
    bench->floor_s_per_elem = tagc_result_spread_of(times, 2 * N_TURNS + 1).median;
    double bytes_per_s = 12 / bench->floor_s_per_elem;
    tagc_bench_say(
        bench,
        "\nMemory floor: %.2f GB/s per rank, all ranks at once, %d thread%s each (read, read and write %s"
        " values)\n",
        1e-9 * bytes_per_s, n_threads(bench), n_threads(bench) > 1 ? "s" : "",
        tagc_human((double)f->n, n_elems));
    tagc_bench_put(bench, "floor",
                   json_pack("{s:i, s:I, s:o}", "n_threads", n_threads(bench), "n_elems", (json_int_t)f->n,
                             "bytes_per_s", tagc_json_real(bytes_per_s)));
    return TAGC_OK;
}

tagc_status tagc_bench_floor(tagc_bench *bench) {
    memory_floor f = {0};
    tagc_status status = measure_floor(bench, &f);
    tagc_rank_finish(bench->rank, status);
    close_floor(&f);
    return status;
}

/* ---- one reducer ---- */

typedef struct codec_time {
    uint64_t n_elems, n_union,
        n_returned; /* the last two: of the last step; 0 if the exchange does not count it */
    double n_sent;  /* by one rank in that step, mean over ranks */
    double phase_s[TAGC_N_PHASES], to_floor[TAGC_N_PHASES], total_to_floor;
} codec_time;

typedef struct codec_bench {
    tagc_bench *bench;
    json_t *list; /* of the result */
    memory_floor floor;
    float *gradient, *output; /* (n_most) */
    uint8_t *body;            /* of a gather of n_most_gathered elements */
    uint64_t seed;
    uint64_t n_most, n_most_gathered;
} codec_bench;

/* One step with a new gradient. Phases and values sent are means over ranks; total_s: of the slowest. */
static tagc_status time_step(codec_bench *c, tagc_reducer *reducer, uint64_t n_elems,
                             tagc_reducer_stats *stats, double *n_sent) {
    tagc_comm *comm = c->bench->rank->comm;
    tagc_fill_gradient(c->gradient, n_elems, &c->seed);
    tagc_reducer_stats_init(stats);
    TAGC_TRY(tagc_comm_barrier(comm));
    TAGC_TRY(tagc_reducer_run(reducer, c->gradient, reducer->n_given, c->output,
                              tagc_reducer_given_output(reducer), stats));
    *n_sent = (double)stats->n_sent;
    TAGC_TRY(tagc_mean_over_ranks(comm, n_sent, 1));
    TAGC_TRY(tagc_mean_over_ranks(comm, stats->time_s, TAGC_N_PHASES));
    return tagc_max_over_ranks(comm, &stats->total_s, 1);
}

static tagc_status time_reducer(codec_bench *c, tagc_reducer *reducer, codec_time *result) {
    double phases[TAGC_N_PHASES][N_TURNS], ratios[TAGC_N_PHASES + 1][N_TURNS];
    tagc_reducer_stats step;
    TAGC_TRY(time_step(c, reducer, result->n_elems, &step, &result->n_sent)); /* the residual is empty here */
    int n_turns = step.total_s > long_s ? 1 : N_TURNS;
    for (int turn = 0; turn < n_turns; turn++) {
        double floor_s, total = 0;
        TAGC_TRY(floor_time(c->bench->rank->comm, &c->floor, &floor_s));
        TAGC_TRY(time_step(c, reducer, result->n_elems, &step, &result->n_sent));
        for (int phase = 0; phase < TAGC_N_PHASES; phase++) {
            phases[phase][turn] = step.time_s[phase];
            ratios[phase][turn] = step.time_s[phase] / (floor_s * (double)result->n_elems);
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
    result->n_returned = step.n_returned;
    return TAGC_OK;
}

static tagc_status measure_reducer(codec_bench *c, const tagc_reducer_options *options, codec_time *out) {
    tagc_rank *rank = c->bench->rank;
    tagc_reducer *reducer = NULL;
    *out = (codec_time){.n_elems = options->n_elems};
    TAGC_TRY(tagc_reducer_create(rank->comm, options, &reducer));
    tagc_status status = time_reducer(c, reducer, out);
    tagc_rank_finish(rank, status);
    tagc_reducer_destroy(reducer);
    return status;
}

/* ---- codes of parameters ---- */

enum { CHUNK = TAGC_EXPONENTS_CHUNK };

static size_t lossless_bytes(size_t n) {
    return (n + CHUNK - 1) / CHUNK * (tagc_exponents_max_bytes(CHUNK) + sizeof(uint32_t));
}

/* Chunks, each behind its length, as the gatherer has them. */
static void encode_lossless(const float *values, uint8_t *body, size_t n) {
    uint16_t halves[CHUNK];
    for (size_t at = 0; at < n; at += CHUNK) {
        size_t n_now = n - at < CHUNK ? n - at : CHUNK;
        tagc_bf16_narrow(values + at, halves, n_now);
        uint32_t n_bytes = (uint32_t)tagc_exponents_encode(halves, n_now, body + sizeof n_bytes);
        memcpy(body, &n_bytes, sizeof n_bytes);
        body += sizeof n_bytes + n_bytes;
    }
}

static void decode_lossless(const uint8_t *body, float *values, size_t n) {
    uint16_t halves[CHUNK];
    for (size_t at = 0; at < n; at += CHUNK) {
        size_t n_now = n - at < CHUNK ? n - at : CHUNK;
        uint32_t n_bytes;
        memcpy(&n_bytes, body, sizeof n_bytes);
        (void)tagc_exponents_decode(body + sizeof n_bytes, n_bytes, halves, n_now); /* made here */
        tagc_bf16_widen(halves, values + at, n_now);
        body += sizeof n_bytes + n_bytes;
    }
}

/* The engine's replica is fp32: it computes with it. */
static double time_code(int kind, const float *values, float *replica, uint8_t *body, size_t n, int decodes) {
    static const int bits_of[TAGC_N_GATHER_KINDS] = {
        [TAGC_GATHER_INT8] = 8, [TAGC_GATHER_DELTA8] = 8, [TAGC_GATHER_DELTA4] = 4, [TAGC_GATHER_DELTA2] = 2};
    int is_delta = kind >= TAGC_GATHER_DELTA8, bits = bits_of[kind];
    double start_s = tagc_clock_s();
    if (kind == TAGC_GATHER_LOSSLESS && decodes)
        decode_lossless(body, replica, n);
    else if (kind == TAGC_GATHER_LOSSLESS)
        encode_lossless(values, body, n);
    else if (!decodes)
        (void)tagc_delta_encode_part(bits, values, is_delta ? replica : NULL, sizeof *replica, n, 0, n, body);
    else if (is_delta)
        tagc_delta_apply_part(bits, body, replica, sizeof *replica, n, 0, n);
    else
        tagc_delta_decode(bits, body, replica, n);
    return tagc_clock_s() - start_s;
}

/* The time is the mean over ranks, which all run at once. */
static tagc_status measure_gather(codec_bench *c, int kind, uint64_t n_elems, codec_time *out) {
    tagc_comm *comm = c->bench->rank->comm;
    double times[2][N_TURNS], ratios[2][N_TURNS], total[N_TURNS];
    size_t n_unit = (size_t)n_elems, n_shard = n_unit / (size_t)c->bench->rank->world_size;
    *out = (codec_time){.n_elems = n_elems, .n_sent = (double)n_elems};
    static const int phases[] = {TAGC_PHASE_ENCODE, TAGC_PHASE_DECODE};
    tagc_fill_gradient(c->gradient, n_elems, &c->seed);
    memset(c->output, 0, n_unit * sizeof *c->output);
    for (int turn = -1; turn < N_TURNS; turn++) {
        double floor_s, spent_s[2];
        TAGC_TRY(floor_time(comm, &c->floor, &floor_s));
        (void)time_code(kind, c->gradient, c->output, c->body, n_unit, 0); /* makes the bodies to decode */
        TAGC_TRY(tagc_comm_barrier(comm));
        spent_s[1] = time_code(kind, NULL, c->output, c->body, n_unit, 1);
        spent_s[0] = time_code(kind, c->gradient, c->output, c->body, n_shard, 0);
        TAGC_TRY(tagc_mean_over_ranks(comm, spent_s, 2));
        if (turn < 0) continue;
        total[turn] = 0;
        for (int k = 0; k < 2; k++) {
            times[k][turn] = spent_s[k];
            ratios[k][turn] = spent_s[k] / (floor_s * (double)n_unit);
            total[turn] += ratios[k][turn];
        }
    }
    for (int k = 0; k < 2; k++) {
        out->phase_s[phases[k]] = tagc_result_spread_of(times[k], N_TURNS).median;
        out->to_floor[phases[k]] = tagc_result_spread_of(ratios[k], N_TURNS).median;
    }
    out->total_to_floor = tagc_result_spread_of(total, N_TURNS).median;
    return TAGC_OK;
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
    flat_size sizes[MAX_SIZES]; /* the sizes that hold the most elements in total */
} setting;

typedef struct setting_list {
    int n;
    setting items[MAX_SETTINGS];
    /* The largest flat gathered so, and the number of such flats; 0: none. */
    flat_size gathers[TAGC_N_GATHER_KINDS];
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
    if (a->exchange == TAGC_EXCHANGE_DIRECT)
        return a->format == b->format && a->sparsity == b->sparsity && a->block == b->block;
    const tagc_paper_options *p = a->paper, *q = b->paper;
    if (p->index != q->index || a->sparsity != b->sparsity || p->fill_union != q->fill_union) return 0;
    return a->exchange == TAGC_EXCHANGE_PACKED ||
           (p->ratio == q->ratio && p->cells == q->cells && p->unpeeled == q->unpeeled);
}

/* Arms with the same exchange are measured once. */
static setting *find_setting(setting_list *list, const tagc_reducer_options *options) {
    for (int i = 0; i < list->n; i++)
        if (same_exchange(&list->items[i].options, options)) return &list->items[i];
    if (list->n == MAX_SETTINGS) return NULL;
    setting *s = &list->items[list->n++];
    s->options = *options;
    if (options->paper) { /* points into the layout, which is destroyed */
        s->paper = *options->paper;
        s->options.paper = &s->paper;
    }
    return s;
}

static tagc_status add_arm(setting_list *list, const tagc_bench *bench, const tagc_arm *arm) {
    tagc_fsdp_options options;
    tagc_layout *layout;
    tagc_train_fsdp(&arm->options, &options);
    TAGC_TRY(tagc_model_layout(&bench->plan->model, &options, bench->rank->world_size, &layout));
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

/* ---- the table ---- */

static const char *const indexes[] = {"or", "sum4", "sum1"};

static void describe(const tagc_reducer_options *o, char what[48]) {
    const char *name = tagc_exchange_names[o->exchange], *all = o->output != TAGC_OUTPUT_SHARD ? ", all" : "";
    if (tagc_reducer_options_are_whole(o))
        snprintf(what, 48, "dense %s%s", tagc_format_names[o->format], all);
    else if (o->exchange == TAGC_EXCHANGE_DIRECT)
        snprintf(what, 48, "direct %s%s", tagc_format_names[o->format], all);
    else if (o->exchange == TAGC_EXCHANGE_SKETCH && o->paper->ratio > 0)
        snprintf(what, 48, "sketch %.4gx %s%s", o->paper->ratio, indexes[o->paper->index], all);
    else
        snprintf(what, 48, "%s %s%s", name, indexes[o->paper->index], all);
}

/* Prints one line, and adds what all entries have to the members of `about`. */
static void add_entry(codec_bench *c, const char *what, const char *sparsity, int n_flats,
                      const codec_time *r, json_t *about) {
    char n_elems[16];
    double total_s = 0;
    tagc_bench_say(c->bench, "  %-18s %8s %8s x %-4d", what, sparsity,
                   tagc_human((double)r->n_elems, n_elems), n_flats);
    for (int phase = 0; phase < TAGC_PHASE_WAIT; phase++) {
        total_s += r->phase_s[phase];
        tagc_bench_say(c->bench, " %7.2f", r->to_floor[phase]);
    }
    tagc_bench_say(c->bench, " %7.2f %9.2f ms\n", r->total_to_floor, 1e3 * total_s);
    json_object_set_new(about, "n_elems", json_integer((json_int_t)r->n_elems));
    json_object_set_new(about, "n_tensors", json_integer(n_flats));
    json_object_set_new(about, "phase_s", tagc_json_phases(r->phase_s));
    json_object_set_new(about, "to_floor", tagc_json_phases(r->to_floor));
    json_object_set_new(about, "total_to_floor", tagc_json_real(r->total_to_floor));
    json_array_append_new(c->list, about);
}

static void report(codec_bench *c, const setting *s, int n_flats, const codec_time *r) {
    const tagc_reducer_options *o = &s->options;
    char what[48], sparsity[16] = "-";
    int is_dense = tagc_reducer_options_are_whole(o),
        is_direct = !is_dense && o->exchange == TAGC_EXCHANGE_DIRECT;
    describe(o, what);
    if (!is_dense && !(is_direct && o->sparsity == 0))
        snprintf(sparsity, sizeof sparsity, "%.4g %%", 100 * o->sparsity);
    json_t *about =
        json_pack("{s:s, s:s, s:s, s:b, s:f, s:f, s:o, s:o, s:o, s:o, s:o}", "exchange",
                  is_dense ? "dense" : tagc_exchange_names[o->exchange], "wire",
                  is_dense ? tagc_format_names[o->format] : "fp32", "index",
                  o->paper ? indexes[o->paper->index] : "none", "all_reduce", o->output != TAGC_OUTPUT_SHARD,
                  "sparsity", is_dense ? 0.0 : o->sparsity, "ratio", o->paper ? o->paper->ratio : 0.0,
                  "values", is_direct ? json_string(tagc_format_names[o->format]) : json_null(), "block",
                  is_direct && o->format > TAGC_FORMAT_BF16 ? json_integer(o->block) : json_null(), "n_sent",
                  json_integer((json_int_t)(r->n_sent + 0.5)), "n_union",
                  r->n_union > 0 ? json_integer((json_int_t)r->n_union) : json_null(), "n_returned",
                  is_direct && r->n_returned > 0 ? json_integer((json_int_t)r->n_returned) : json_null());
    add_entry(c, what, sparsity, n_flats, r, about);
}

/* Cuts dense flats to what a slow link carries in time, and merges those that become equal. */
static void shorten(const tagc_bench *bench, setting *s) {
    const tagc_reducer_options *o = &s->options;
    double n_bytes = (o->format == TAGC_FORMAT_BF16 ? 2 : 4) * (o->output != TAGC_OUTPUT_SHARD ? 2 : 1);
    double most = bench->all_to_all_bytes_per_s * dense_s / n_bytes;
    int n = 0;
    if (!tagc_reducer_options_are_whole(o) || most <= 0) return;
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
    codec_time time;
    options.n_elems = size->n_elems;
    options.tag = UINT64_MAX;
    TAGC_TRY(measure_reducer(c, &options, &time));
    report(c, s, size->n_flats, &time);
    return TAGC_OK;
}

static tagc_status time_gather(codec_bench *c, int kind, const flat_size *size) {
    codec_time time;
    TAGC_TRY(measure_gather(c, kind, size->n_elems, &time));
    char what[48];
    snprintf(what, sizeof what, "gather %s", tagc_gather_choices[kind].name);
    json_t *about =
        json_pack("{s:s, s:s, s:s, s:b, s:f, s:f, s:n, s:n, s:I, s:n, s:n}", "exchange", "gather", "wire",
                  tagc_gather_choices[kind].name, "index", "none", "all_reduce", 0, "sparsity", 0.0, "ratio",
                  0.0, "values", "block", "n_sent", (json_int_t)size->n_elems, "n_union", "n_returned");
    add_entry(c, what, "-", size->n_flats, &time, about);
    return TAGC_OK;
}

/* ---- the part ---- */

static tagc_status find_settings(codec_bench *c, setting_list *list) {
    const tagc_bench *bench = c->bench;
    for (int i = 0; i < bench->plan->n_arms; i++) {
        const tagc_arm *arm = &bench->plan->arms[i];
        tagc_status status = add_arm(list, bench, arm);
        if (status != TAGC_OK) return tagc_fail_in(status, "arm %s", arm->name);
    }
    for (int kind = TAGC_GATHER_LOSSLESS; kind < TAGC_N_GATHER_KINDS; kind++)
        if (list->gathers[kind].n_elems > c->n_most_gathered)
            c->n_most_gathered = list->gathers[kind].n_elems;
    c->n_most = c->n_most_gathered;
    for (int i = 0; i < list->n; i++) {
        shorten(bench, &list->items[i]);
        for (int k = 0; k < list->items[i].n_sizes; k++)
            if (list->items[i].sizes[k].n_elems > c->n_most) c->n_most = list->items[i].sizes[k].n_elems;
    }
    return TAGC_OK;
}

static tagc_status open_codec(codec_bench *c) {
    void *memory = NULL;
    c->seed = (uint64_t)c->bench->rank->rank + 1;
    TAGC_TRY(tagc_check_memory("measuring the codec", 6 * c->n_most * sizeof(float), c->bench->hosts.n_here));
    TAGC_TRY(tagc_memory_create(c->n_most * sizeof(float), "gradient", &memory));
    c->gradient = memory;
    TAGC_TRY(tagc_memory_create(c->n_most * sizeof(float), "output", &memory));
    c->output = memory;
    if (c->n_most_gathered > 0) {
        size_t n_bytes = lossless_bytes(c->n_most_gathered); /* the longest of all */
        TAGC_TRY(tagc_memory_create(n_bytes, "a body", &memory));
        c->body = memory;
    }
    return open_floor(c->bench, &c->floor);
}

static tagc_status measure_codec(codec_bench *c, setting_list *list) {
    TAGC_TRY(find_settings(c, list));
    TAGC_TRY(open_codec(c));
    tagc_bench_say(
        c->bench,
        "\nCodec, times of the floor for as many values\n  %-18s %8s %15s %7s %7s %7s %7s %7s %12s\n", "",
        "sparsity", "values", "select", "index", "encode", "decode", "all", "");
    for (int i = 0; i < list->n; i++)
        for (int k = 0; k < list->items[i].n_sizes; k++)
            TAGC_TRY(time_size(c, &list->items[i], &list->items[i].sizes[k]));
    for (int kind = TAGC_GATHER_LOSSLESS; kind < TAGC_N_GATHER_KINDS; kind++)
        if (list->gathers[kind].n_elems > 0) TAGC_TRY(time_gather(c, kind, &list->gathers[kind]));
    return TAGC_OK;
}

tagc_status tagc_bench_codec(tagc_bench *bench) {
    codec_bench c = {.bench = bench, .list = json_array()};
    setting_list *list = calloc(1, sizeof *list);
    tagc_status status =
        list ? measure_codec(&c, list) : tagc_fail(TAGC_ERR_MEMORY, "out of memory for a list of exchanges");
    tagc_rank_finish(bench->rank, status);
    close_floor(&c.floor);
    tagc_memory_destroy(c.gradient);
    tagc_memory_destroy(c.output);
    tagc_memory_destroy(c.body);
    free(list);
    if (status == TAGC_OK)
        tagc_bench_put(bench, "codec", c.list);
    else
        json_decref(c.list);
    return status;
}
