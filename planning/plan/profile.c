/* Reads results (docs/reference/results-format.md). Errors name the file and the place of what is missing. */
#include "plan/profile.h"

#include "core/status.h"
#include "disk/paths.h"
#include "exchange/options.h"
#include "files/result_file.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A result while it is read. */
typedef struct reader {
    tagc_points *points;
    const char *file;
    tagc_read_engine read_engine;
    int is_lab;           /* its hosts are namespaces of one machine */
    const json_t *shaped; /* the link of the lab's case; NULL: none, or no lab */
    long number;          /* of the lab's case */
} reader;

/* ---- numbers; `where` is the place of `object` ---- */

/* The failure for a member that is missing or not `what`. */
static tagc_status missing(const char *where, const char *name, const char *what) {
    return tagc_fail(TAGC_ERR_CORRUPT, "%s%s%s is missing or not %s", where, *where ? "." : "", name, what);
}

static tagc_status number_of(const json_t *object, const char *where, const char *name, double *out) {
    const json_t *value = json_object_get(object, name);
    *out = 0;
    if (!json_is_number(value) || !isfinite(json_number_value(value)))
        return missing(where, name, "a number");
    *out = json_number_value(value);
    return TAGC_OK;
}

static tagc_status whole_of(const json_t *object, const char *where, const char *name, int min, int max,
                            int *out) {
    double value;
    TAGC_TRY(number_of(object, where, name, &value));
    if (!(value >= min && value <= max))
        return tagc_fail(TAGC_ERR_CORRUPT, "%s%s%s is %g, allowed is %d to %d", where, *where ? "." : "",
                         name, value, min, max);
    *out = (int)value;
    return TAGC_OK;
}

static tagc_status positive_of(const json_t *object, const char *where, const char *name, double *out) {
    TAGC_TRY(number_of(object, where, name, out));
    if (*out > 0) return TAGC_OK;
    return tagc_fail(TAGC_ERR_CORRUPT, "%s.%s is %g, must be above 0", where, name, *out);
}

/* The median over iterations of the number of that name; object: the member that holds it, or NULL. */
static tagc_status median_of(const json_t *iterations, const char *object, const char *name, double *out) {
    size_t n = json_array_size(iterations);
    double *values = calloc(n + 1, sizeof *values);
    if (!values) return tagc_fail(TAGC_ERR_MEMORY, "no memory for %zu iterations", n);
    tagc_status status = n > 0 ? TAGC_OK : missing("arms", "iterations", "a list of iterations");
    for (size_t i = 0; status == TAGC_OK && i < n; i++) {
        const json_t *from = json_array_get(iterations, i);
        if (object) from = json_object_get(from, object);
        status = number_of(from, object ? "arms.iterations.phase_s" : "arms.iterations", name, &values[i]);
    }
    *out = tagc_result_spread_of(values, (int)n).median;
    free(values);
    return status;
}

/* ---- the codec ---- */

/* Sizes and files of one setting are averaged with their elements as weights. */
static tagc_status add_codec(const reader *r, const tagc_codec_cost *cost) {
    tagc_points *points = r->points;
    for (int i = 0; i < points->n_codec; i++) {
        tagc_codec_cost *c = &points->codec[i];
        if (c->exchange != cost->exchange || c->sparsity != cost->sparsity || c->ratio != cost->ratio ||
            c->format != cost->format || c->all_reduce != cost->all_reduce)
            continue;
        double share = cost->weight / (c->weight + cost->weight);
        for (int phase = 0; phase < TAGC_PHASE_WAIT; phase++)
            c->elem_s[phase] += share * (cost->elem_s[phase] - c->elem_s[phase]);
        c->union_density += share * (cost->union_density - c->union_density);
        c->weight += cost->weight;
        return TAGC_OK;
    }
    if (points->n_codec == TAGC_MAX_CODEC_COSTS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "more than %d settings of the codec", TAGC_MAX_CODEC_COSTS);
    points->codec[points->n_codec++] = *cost;
    return TAGC_OK;
}

static int comes_back(const tagc_fsdp_options *o) {
    return o->sharding == TAGC_SHARD_NONE || o->sharding == TAGC_SHARD_HYBRID;
}

/* Ranks that add their gradients before they encode. */
static int ranks_per_sender(const tagc_fsdp_options *o, const tagc_reducer_options *reducer) {
    int by_hosts = o->two_level || o->sharding == TAGC_SHARD_HYBRID;
    return by_hosts && reducer->exchange == TAGC_EXCHANGE_DIRECT ? o->ranks_per_host : 1;
}

/* The share of elements that encoding and decoding touched, as in codec costs. */
static double touched(const tagc_point *point, int is_mild, const tagc_reducer_options *reducer) {
    if (reducer->exchange != TAGC_EXCHANGE_DIRECT) return point->union_density;
    const tagc_fsdp_options *o = &point->setup.engine;
    double sent =
        !is_mild && point->setup.sent_density > 0 ? point->setup.sent_density : 1 - reducer->sparsity;
    return sent + (comes_back(o) ? 1 - tagc_result_sparsity(reducer) : 0);
}

/* For a bench that measured neither codec nor memory alone: reads the phases in the iterations of an arm. */
static tagc_status read_phases(const reader *r, const json_t *arm, double n_compressed, double n_mild,
                               tagc_point *point) {
    const tagc_reducer_options *reducers[] = {&point->setup.engine.reducer, &point->setup.engine.mild};
    double n_values[] = {n_compressed, fmax(n_mild, 0)}, n_coded = 0;
    for (int k = 0; k < 2; k++) n_coded += reducers[k]->exchange != TAGC_EXCHANGE_DENSE ? n_values[k] : 0;

    const json_t *iterations = json_object_get(arm, "iterations");
    const tagc_fsdp_options *o = &point->setup.engine;
    int n_exchanges = o->exchange_each_micro_step ? o->n_micro_steps : 1, n_ranks = point->setup.world_size;
    double phase_s[TAGC_N_PHASES] = {0}, n_params = (double)tagc_gpt2_n_params(&point->setup.model);
    for (int phase = 0; phase < TAGC_PHASE_WAIT; phase++)
        TAGC_TRY(median_of(iterations, "phase_s", tagc_phase_name(phase), &phase_s[phase]));
    /* The split between kinds of flats is unknown: assume equal times per element. */
    for (int k = 0; k < 2; k++) {
        const tagc_reducer_options *reducer = reducers[k];
        int per_host = ranks_per_sender(o, reducer);
        if (reducer->exchange == TAGC_EXCHANGE_DENSE || !(n_values[k] > 0)) continue;
        if (per_host > 1 && per_host == n_ranks) continue; /* on one host nothing is encoded */
        tagc_codec_cost cost = {.exchange = reducer->exchange,
                                .format = reducer->format,
                                .all_reduce = comes_back(o),
                                .sparsity = reducer->sparsity,
                                .ratio = o->paper.ratio,
                                .union_density = touched(point, k, reducer),
                                .weight = n_values[k]};
        for (int phase = 0; phase < TAGC_PHASE_WAIT; phase++)
            cost.elem_s[phase] = phase_s[phase] / n_coded / n_exchanges * per_host;
        TAGC_TRY(add_codec(r, &cost));
    }
    if (n_coded > 0) return TAGC_OK;
    /* Plain sums: for every element of a shard 12 bytes per rank and 12 more, as in jobs.c. */
    if (point->byte_s == 0 && o->dense_format == TAGC_FORMAT_FP32)
        point->byte_s = phase_s[TAGC_PHASE_DECODE] / n_exchanges / (n_params / n_ranks * 12 * (n_ranks + 1));
    return TAGC_OK;
}

static int find_word(const char *const *words, int n, const char *word) {
    for (int i = 0; word && i < n; i++)
        if (strcmp(words[i], word) == 0) return i;
    return -1;
}

/* Reads the codes of parameters: a shard is encoded, a unit decoded. */
static tagc_status read_gather(const reader *r, const tagc_point *common, const json_t *entry, double n_elems,
                               double n_tensors) {
    const json_t *phases = json_object_get(entry, "phase_s");
    const char *word = json_string_value(json_object_get(entry, "wire"));
    int kind = TAGC_N_GATHER_KINDS - 1;
    while (kind >= 0 && !(word && strcmp(tagc_gather_choices[kind].name, word) == 0)) kind--;
    double encode_s, decode_s;
    if (kind < 0) return missing("codec", "wire", "the format of a gather");
    TAGC_TRY(number_of(phases, "codec.phase_s", "encode", &encode_s));
    TAGC_TRY(number_of(phases, "codec.phase_s", "decode", &decode_s));
    tagc_gather_cost *c = &r->points->gather[kind];
    c->weight += n_elems * n_tensors;
    double share = n_elems * n_tensors / c->weight;
    c->encode_s += share * (encode_s / (n_elems / common->setup.world_size) - c->encode_s);
    c->decode_s += share * (decode_s / n_elems - c->decode_s);
    return TAGC_OK;
}

/* The share of values that direct decodes: all without sparsity; else the sent ones, and the sums that are returned. */
static double decoded(const json_t *entry, double sparsity, double n_elems) {
    double n_sent = json_number_value(json_object_get(entry, "n_sent"));
    double n_returned = json_number_value(json_object_get(entry, "n_returned"));
    double sent = n_sent > 0 ? fmin(n_sent / n_elems, 1) : 1 - sparsity;
    tagc_reducer_options options = {.sparsity = sparsity, .result_sparsity = -1};
    double returned = n_returned > 0 ? fmin(n_returned / n_elems, 1) : 1 - tagc_result_sparsity(&options);
    return sent + (json_is_true(json_object_get(entry, "all_reduce")) ? returned : 0);
}

/* Reads the seconds per element, over all measured sizes. */
static tagc_status read_codec(const reader *r, const tagc_point *common, const json_t *entry) {
    static const char *const exchanges[] = {"dense", "sketch", "packed", "direct", "gather"};
    enum { N_EXCHANGES = sizeof exchanges / sizeof exchanges[0], N_FORMATS = TAGC_FORMAT_SIGN + 1 };
    const char *name = json_string_value(json_object_get(entry, "exchange"));
    const json_t *phases = json_object_get(entry, "phase_s");
    double n_elems, n_tensors, n_union = json_number_value(json_object_get(entry, "n_union"));
    int n_ranks = common->setup.world_size;
    tagc_codec_cost cost = {.exchange = find_word(exchanges, N_EXCHANGES, name)};
    if (cost.exchange < 0)
        return missing("codec", "exchange", "one of dense, sketch, packed, direct, gather");
    if (cost.exchange == TAGC_EXCHANGE_DENSE) return TAGC_OK;
    TAGC_TRY(number_of(entry, "codec", "sparsity", &cost.sparsity));
    TAGC_TRY(number_of(entry, "codec", "ratio", &cost.ratio));
    TAGC_TRY(positive_of(entry, "codec", "n_elems", &n_elems));
    TAGC_TRY(positive_of(entry, "codec", "n_tensors", &n_tensors));
    if (!json_is_object(phases)) return missing("codec", "phase_s", "an object");
    if (cost.exchange > TAGC_EXCHANGE_DIRECT) return read_gather(r, common, entry, n_elems, n_tensors);
    for (int phase = 0; phase < TAGC_PHASE_WAIT; phase++) {
        double s;
        TAGC_TRY(number_of(phases, "codec.phase_s", tagc_phase_name(phase), &s));
        cost.elem_s[phase] = s / n_elems;
    }
    cost.union_density = n_union > 0 ? n_union / n_elems : 1 - pow(cost.sparsity, n_ranks);
    if (cost.exchange == TAGC_EXCHANGE_DIRECT) {
        cost.format =
            find_word(tagc_format_names, N_FORMATS, json_string_value(json_object_get(entry, "values")));
        if (cost.format < 0) return missing("codec", "values", "the format of values");
        cost.union_density = decoded(entry, cost.sparsity, n_elems);
        cost.all_reduce = json_is_true(json_object_get(entry, "all_reduce"));
    }
    cost.weight = n_elems * n_tensors;
    return add_codec(r, &cost);
}

/* ---- a bench ---- */

/* Hosts with equal names are namespaces of one machine. */
static int is_one_machine(const json_t *bench) {
    const json_t *hosts =
        json_object_get(json_object_get(json_object_get(bench, "origin"), "machine"), "hosts");
    const char *first = json_string_value(json_array_get(hosts, 0));
    for (size_t i = 1; first && i < json_array_size(hosts); i++) {
        const char *other = json_string_value(json_array_get(hosts, i));
        if (!other || strcmp(first, other) != 0) return 0;
    }
    return first != NULL;
}

static tagc_status read_model(const reader *r, const json_t *bench, tagc_gpt2_config *out) {
    const json_t *model = json_object_get(bench, "model"), *tied = json_object_get(model, "tied");
    if (!json_is_object(model)) return missing("", "model", "an object");
    TAGC_TRY(whole_of(model, "model", "n_layer", 1, 1000, &out->n_layer));
    TAGC_TRY(whole_of(model, "model", "n_head", 1, 65536, &out->n_head));
    TAGC_TRY(whole_of(model, "model", "n_embd", 1, 65536, &out->n_embd));
    TAGC_TRY(whole_of(model, "model", "block_size", 1, 1 << 20, &out->block_size));
    TAGC_TRY(whole_of(model, "model", "vocab_size", 1, 1 << 24, &out->vocab_size));
    if (!tied) return missing("model", "tied", "true or false");
    out->tied = json_is_true(tied) || json_integer_value(tied) == 1;
    TAGC_TRY(tagc_gpt2_config_check(out));
    const char *name = json_string_value(json_object_get(model, "name"));
    if (!*r->points->model)
        snprintf(r->points->model, sizeof r->points->model, "%s", name ? name : "a model without name");
    return TAGC_OK;
}

static void read_blas(const reader *r, const json_t *machine) {
    const char *name, *kernel;
    int n_threads, is_first = r->points->n_points == 0;
    if (is_first && json_unpack((json_t *)machine, "{s:{s:s, s:s, s:i}}", "blas", "name", &name, "kernel",
                                &kernel, "n_threads", &n_threads) == 0)
        snprintf(r->points->blas, sizeof r->points->blas, "%.40s, kernel %.20s, %d thread%s", name, kernel,
                 n_threads, n_threads == 1 ? "" : "s");
}

static double largest(const json_t *list) {
    double most = 0;
    for (size_t i = 0; i < json_array_size(list); i++)
        most = fmax(most, json_number_value(json_array_get(list, i)));
    return most;
}

/* The lab's ping if it has one; else a transfer's overhead includes the latency. */
static void read_ping(const reader *r, tagc_plan_link *out) {
    const json_t *pings = json_object_get(json_object_get(r->shaped, "latency"), "ping_round_trip_s");
    double sum = 0;
    for (size_t i = 0; i < json_array_size(pings); i++) sum += json_number_value(json_array_get(pings, i));
    if (!(sum > 0) || !isfinite(sum)) return;
    out->latency_s = sum / (double)json_array_size(pings) / 2;
    out->large_latency_s = TAGC_LARGE_MESSAGE_WAYS * out->latency_s;
}

/* Other work on a machine only slows plain transfers, so the fastest shows the link best. The lab also has transfers by
 * TCP; if its bench measured no link, only these. */
static tagc_status read_link(const reader *r, const json_t *bench, int is_alone, tagc_plan_link *out) {
    const json_t *link = json_object_get(bench, "link");
    double both_ways = 0, one_way = 0,
           all = json_number_value(json_object_get(link, "all_to_all_bytes_per_s"));
    double tcp_bits_per_s = fmax(largest(json_object_get(r->shaped, "tcp_one_way_bits_per_s")),
                                 largest(json_object_get(r->shaped, "tcp_both_ways_bits_per_s")));
    out->bytes_per_s = tcp_bits_per_s / 8;
    if (!json_is_object(link) && tcp_bits_per_s > 0) {
        read_ping(r, out);
        return TAGC_OK;
    }
    if (!json_is_object(link))
        return missing("", "link", "an object (tagc bench measures it unless --only leaves it out)");
    TAGC_TRY(number_of(link, "link", "latency_s", &out->latency_s));
    if (json_is_number(json_object_get(link, "large_latency_s")))
        TAGC_TRY(number_of(link, "link", "large_latency_s", &out->large_latency_s));
    TAGC_TRY(positive_of(link, "link", "both_ways_bytes_per_s", &both_ways));
    TAGC_TRY(positive_of(link, "link", "one_way_bytes_per_s", &one_way));
    out->bytes_per_s = fmax(out->bytes_per_s, fmax(both_ways, one_way));
    if (is_alone && isfinite(all))
        out->bytes_per_s = fmax(out->bytes_per_s, all); /* sum over the ranks of a host */
    return TAGC_OK;
}

/* Reads what all arms of a bench have in common. */
static tagc_status read_common(const reader *r, const json_t *bench, tagc_point *out) {
    const json_t *floor = json_object_get(bench, "floor");
    const json_t *machine = json_object_get(json_object_get(bench, "origin"), "machine");
    tagc_setup *s = &out->setup;
    int n_cpus = 1, format = 0;
    TAGC_TRY(whole_of(bench, "", "format", 1, 1, &format));
    TAGC_TRY(whole_of(bench, "", "world_size", 1, 65536, &s->world_size));
    TAGC_TRY(whole_of(bench, "", "n_hosts", 1, s->world_size, &s->n_hosts));
    TAGC_TRY(read_model(r, bench, &s->model));
    TAGC_TRY(whole_of(bench, "", "batch_size", 1, 65536, &s->n_batch));
    TAGC_TRY(whole_of(bench, "", "seq_len", 1, s->model.block_size, &s->n_tokens));
    TAGC_TRY(whole_of(machine, "origin.machine", "n_cpus", 1, 1 << 20, &n_cpus));
    out->cores = n_cpus;
    read_blas(r, machine);
    if (s->n_hosts < 1 || s->world_size % s->n_hosts != 0)
        s->n_hosts = 1; /* unevenly spread: most pairs have no network between them */
    s->n_machines = r->is_lab || is_one_machine(bench) ? 1 : s->n_hosts;
    if (s->world_size > 1)
        TAGC_TRY(read_link(r, bench, s->world_size == s->n_hosts, &out->link));
    else
        out->link.bytes_per_s = (double)INFINITY;
    double bytes_per_s = 0;
    if (json_is_object(floor)) TAGC_TRY(positive_of(floor, "floor", "bytes_per_s", &bytes_per_s));
    out->byte_s = bytes_per_s > 0 ? 1 / bytes_per_s : 0;
    return TAGC_OK;
}

static tagc_point *grow(tagc_points *points) {
    tagc_point *more = realloc(points->points, ((size_t)points->n_points + 1) * sizeof *more);
    if (!more) return NULL;
    points->points = more;
    return &points->points[points->n_points++];
}

static void set_densities(double n_compressed, double n_union, double n_sent, tagc_point *point) {
    const tagc_fsdp_options *o = &point->setup.engine;
    int n_exchanges = o->exchange_each_micro_step ? o->n_micro_steps : 1;
    int is_direct = o->reducer.exchange == TAGC_EXCHANGE_DIRECT;
    double n = n_compressed * n_exchanges, sent = n > 0 && is_direct ? n_sent / n : 0;
    int per_host = o->two_level || o->sharding == TAGC_SHARD_HYBRID ? o->ranks_per_host : 1;
    double n_senders = (double)point->setup.world_size / per_host,
           returned = 1 - tagc_result_sparsity(&o->reducer);
    if (comes_back(o) && sent > 0 && n_senders > 1) /* without what owners send back of their own row */
        sent = fmax(sent - returned / n_senders, 0) / (1 - 1 / n_senders);
    if (per_host > 1 && per_host == point->setup.world_size) sent = 0; /* on one host nothing is encoded */
    point->setup.sent_density = fmin(sent, 1);
    point->union_density = -1;
    if (n > 0 && !is_direct && o->reducer.exchange != TAGC_EXCHANGE_DENSE)
        point->union_density = fmin(n_union / n, 1);
    point->setup.union_density = point->union_density;
}

static tagc_status read_arm(const reader *r, const tagc_point *common, int has_codec, const json_t *arm) {
    const json_t *options = json_object_get(arm, "options"), *iterations = json_object_get(arm, "iterations");
    const char *name = json_string_value(json_object_get(arm, "name"));
    double n_compressed = 0, n_mild = 0, n_union = 0, n_sent = 0;
    if (!name) return missing("arms", "name", "a text");
    if (!json_is_object(options)) return missing("arms", "options", "an object");
    tagc_point point = *common;
    TAGC_TRY(median_of(iterations, NULL, "total_s", &point.total_s));
    TAGC_TRY(median_of(iterations, NULL, "compute_s", &point.compute_s));
    TAGC_TRY(median_of(iterations, NULL, "optimizer_s", &point.optimizer_s));
    TAGC_TRY(number_of(arm, "arms", "n_compressed", &n_compressed));
    TAGC_TRY(number_of(arm, "arms", "n_mild", &n_mild));
    TAGC_TRY(number_of(arm, "arms", "n_union", &n_union));
    TAGC_TRY(number_of(arm, "arms", "n_sent", &n_sent));
    if (!(point.total_s > 0))
        return tagc_fail(TAGC_ERR_CORRUPT, "arm %.60s: total_s is %g, must be above 0", name, point.total_s);
    snprintf(point.arm, sizeof point.arm, "%s", name);
    tagc_status status = r->read_engine(options, &point.setup.engine);
    if (status != TAGC_OK) return tagc_fail_in(status, "arm %.60s", name);
    point.setup.placement = tagc_placement_of_sharding(point.setup.engine.sharding);
    set_densities(n_compressed, n_union, n_sent, &point);
    if (!has_codec) TAGC_TRY(read_phases(r, arm, n_compressed, n_mild, &point));
    tagc_point *to = grow(r->points);
    if (!to) return tagc_fail(TAGC_ERR_MEMORY, "no memory for points");
    *to = point;
    return TAGC_OK;
}

static tagc_status read_bench(const reader *r, const json_t *bench) {
    const json_t *arms = json_object_get(bench, "arms"), *codec = json_object_get(bench, "codec");
    tagc_point common = {0};
    TAGC_TRY(read_common(r, bench, &common));
    if (json_array_size(arms) == 0)
        return missing("", "arms", "a list with something in it (tagc bench without --only has it)");
    char number[24] = "", latency[24] = "";
    if (r->is_lab) snprintf(number, sizeof number, ":%ld", r->number);
    if (common.link.latency_s >= 5e-4)
        snprintf(latency, sizeof latency, ", %.3g ms", 1e3 * common.link.latency_s);
    snprintf(common.place, sizeof common.place, "%d ranks, %d hosts, %.3g Gbit/s%s, %.80s%s",
             common.setup.world_size, common.setup.n_hosts, 8e-9 * common.link.bytes_per_s, latency, r->file,
             number);
    for (size_t i = 0; i < json_array_size(codec); i++)
        TAGC_TRY(read_codec(r, &common, json_array_get(codec, i)));
    for (size_t i = 0; i < json_array_size(arms); i++)
        TAGC_TRY(read_arm(r, &common, json_is_array(codec), json_array_get(arms, i)));
    return TAGC_OK;
}

/* ---- files ---- */

static tagc_status read_lab(reader *r, const json_t *lab, long only) {
    const json_t *cases = json_object_get(lab, "cases");
    long n_cases = (long)json_array_size(cases), n_read = 0;
    r->is_lab = 1;
    if (!json_is_array(cases)) return missing("", "cases", "a list");
    if (only >= n_cases)
        return tagc_fail(TAGC_ERR_ARGUMENT, "there is no case %ld, allowed is 0 to %ld", only, n_cases - 1);
    for (long i = 0; i < n_cases; i++) {
        const json_t *here = json_array_get(cases, (size_t)i), *bench = json_object_get(here, "bench");
        r->shaped = json_object_get(here, "link");
        r->number = i;
        if ((only >= 0 && i != only) || !json_is_object(bench)) continue;
        TAGC_TRY(read_bench(r, bench));
        n_read++;
    }
    return n_read > 0 ? TAGC_OK : tagc_fail(TAGC_ERR_CORRUPT, "holds no bench result");
}

static tagc_status read_json(reader *r, const json_t *root, long only) {
    const char *type = json_string_value(json_object_get(root, "type"));
    if (!json_is_object(root))
        return tagc_fail(TAGC_ERR_CORRUPT,
                         "is no object but a list, wanted is a result of type \"bench\" or \"lab\"");
    if (type && strcmp(type, "lab") == 0) return read_lab(r, root, only);
    if (type && strcmp(type, "bench") == 0 && only < 0) return read_bench(r, root);
    if (type && strcmp(type, "bench") == 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "a bench result has no cases; :%ld is for lab results", only);
    return tagc_fail(TAGC_ERR_CORRUPT, "type is %s%.40s%s, wanted is \"bench\" or \"lab\"", type ? "\"" : "",
                     type ? type : "missing", type ? "\"" : "");
}

tagc_status tagc_points_read(tagc_points *points, const char *path, tagc_read_engine read_engine) {
    char *file = strdup(path), *colon = file ? strrchr(file, ':') : NULL, *end = NULL;
    long only = -1;
    if (!file) return tagc_fail(TAGC_ERR_MEMORY, "no memory for a path");
    if (colon && colon[1] >= '0' && colon[1] <= '9') {
        only = strtol(colon + 1, &end, 10);
        if (*end)
            only = -1;
        else
            *colon = 0;
    }
    reader r = {.points = points, .file = file, .read_engine = read_engine};
    FILE *stream = fopen(file, "rbe");
    json_error_t error;
    json_t *root = NULL;
    tagc_status status;
    if (!stream || tagc_path_is_dir(file))
        status = tagc_fail(TAGC_ERR_IO, "%s", strerror(stream ? EISDIR : errno));
    else if (!(root = json_loadf(stream, JSON_REJECT_DUPLICATES, &error)))
        status = tagc_fail(TAGC_ERR_CORRUPT, "line %d: %.160s", error.line, error.text);
    else
        status = read_json(&r, root, only);
    if (status != TAGC_OK) tagc_fail_in(status, "%s", file);
    if (stream) fclose(stream);
    json_decref(root);
    free(file);
    return status;
}

tagc_status tagc_points_read_list(tagc_points *points, const char *list, tagc_read_engine read_engine) {
    for (const char *at = list;; at++) {
        size_t n = strcspn(at, ",");
        char *path = strndup(at, n);
        if (!path) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for the names of files");
        tagc_status status =
            n > 0 ? tagc_points_read(points, path, read_engine)
                  : tagc_fail(TAGC_ERR_ARGUMENT, "an empty name in the list of files \"%.80s\"", list);
        free(path);
        TAGC_TRY(status);
        at += n;
        if (!*at) return TAGC_OK;
    }
}

void tagc_points_destroy(tagc_points *points) {
    free(points->points);
    *points = (tagc_points){0};
}
