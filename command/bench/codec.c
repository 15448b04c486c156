/* tagc bench --only floor and codec: chooses the exchanges and flats to measure, and prints the table. */
#include "bench/bench.h"

#include "core/status.h"
#include "exchange/options.h"
#include "launch/human.h"
#include "measure/codec.h"
#include "plan/plan.h"
#include <stdlib.h>

enum { MAX_SETTINGS = 64, MAX_SIZES = 3, LEAST_ELEMS = 1 << 14 };

static const double dense_s =
    0.5; /* longest time on the wire of a dense step; its codec treats all values alike, so a smaller flat will do */

/* ---- the floor ---- */

static tagc_status measure_floor(tagc_bench *bench, tagc_floor *f) {
    int n_threads = (int)bench->plan->options.train.codec_threads;
    char n_elems[16];
    TAGC_TRY(tagc_floor_open(bench->rank->comm, tagc_gpt2_n_params(&bench->plan->model), n_threads, f));
    TAGC_TRY(tagc_floor_measure(f, &bench->floor_s_per_elem));
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
    tagc_floor f = {0};
    tagc_status status = measure_floor(bench, &f);
    tagc_rank_finish(bench->rank, status);
    tagc_floor_close(&f);
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
    flat_size sizes[MAX_SIZES]; /* the sizes that hold the most elements in total */
} setting;

typedef struct setting_list {
    int n;
    setting items[MAX_SETTINGS];
    flat_size gathers
        [TAGC_N_GATHER_KINDS]; /* the largest flat gathered so, and the number of such flats; 0: none */
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

typedef struct codec_table {
    tagc_bench *bench;
    tagc_codec_bench codec;
    json_t *list;
} codec_table;

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
static void add_entry(codec_table *c, const char *what, const char *sparsity, int n_flats,
                      const tagc_codec_time *r, json_t *about) {
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

static void report(codec_table *c, const setting *s, int n_flats, const tagc_codec_time *r) {
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

static tagc_status time_size(codec_table *c, const setting *s, const flat_size *size) {
    tagc_reducer_options options = s->options;
    tagc_codec_time time;
    options.n_elems = size->n_elems;
    TAGC_TRY(tagc_measure_reducer(&c->codec, &options, &time));
    report(c, s, size->n_flats, &time);
    return TAGC_OK;
}

static tagc_status time_gather(codec_table *c, int kind, const flat_size *size) {
    tagc_codec_time time;
    TAGC_TRY(tagc_measure_gather(&c->codec, kind, size->n_elems, &time));
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

static tagc_status find_settings(const tagc_bench *bench, setting_list *list, tagc_codec_setup *setup) {
    for (int i = 0; i < bench->plan->n_arms; i++) {
        const tagc_arm *arm = &bench->plan->arms[i];
        tagc_status status = add_arm(list, bench, arm);
        if (status != TAGC_OK) return tagc_fail_in(status, "arm %s", arm->name);
    }
    for (int kind = TAGC_GATHER_LOSSLESS; kind < TAGC_N_GATHER_KINDS; kind++)
        if (list->gathers[kind].n_elems > setup->n_most_gathered)
            setup->n_most_gathered = list->gathers[kind].n_elems;
    setup->n_most = setup->n_most_gathered;
    for (int i = 0; i < list->n; i++) {
        shorten(bench, &list->items[i]);
        for (int k = 0; k < list->items[i].n_sizes; k++)
            if (list->items[i].sizes[k].n_elems > setup->n_most)
                setup->n_most = list->items[i].sizes[k].n_elems;
    }
    return TAGC_OK;
}

static tagc_status measure_codec(codec_table *c, setting_list *list) {
    tagc_bench *bench = c->bench;
    tagc_codec_setup setup = {.n_params = tagc_gpt2_n_params(&bench->plan->model),
                              .n_threads = (int)bench->plan->options.train.codec_threads,
                              .n_here = bench->hosts.n_here};
    TAGC_TRY(find_settings(bench, list, &setup));
    TAGC_TRY(tagc_codec_bench_open(bench->rank, &setup, &c->codec));
    tagc_bench_say(
        bench, "\nCodec, times of the floor for as many values\n  %-18s %8s %15s %7s %7s %7s %7s %7s %12s\n",
        "", "sparsity", "values", "select", "index", "encode", "decode", "all", "");
    for (int i = 0; i < list->n; i++)
        for (int k = 0; k < list->items[i].n_sizes; k++)
            TAGC_TRY(time_size(c, &list->items[i], &list->items[i].sizes[k]));
    for (int kind = TAGC_GATHER_LOSSLESS; kind < TAGC_N_GATHER_KINDS; kind++)
        if (list->gathers[kind].n_elems > 0) TAGC_TRY(time_gather(c, kind, &list->gathers[kind]));
    return TAGC_OK;
}

tagc_status tagc_bench_codec(tagc_bench *bench) {
    codec_table c = {.bench = bench, .list = json_array()};
    setting_list *list = calloc(1, sizeof *list);
    tagc_status status =
        list ? measure_codec(&c, list) : tagc_fail(TAGC_ERR_MEMORY, "out of memory for a list of exchanges");
    tagc_rank_finish(bench->rank, status);
    tagc_codec_bench_close(&c.codec);
    free(list);
    if (status == TAGC_OK)
        tagc_bench_put(bench, "codec", c.list);
    else
        json_decref(c.list);
    return status;
}
