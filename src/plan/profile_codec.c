/* Costs of the codec from results: its own measurements, or phases of iterations. */
#include "plan/profile_reader.h"

#include "core/status.h"
#include "exchange/options.h"
#include <math.h>
#include <string.h>

/* Sizes and files of one setting are averaged with their elements as weights. */
static tagc_status add_codec(const tagc_profile_reader *r, const tagc_codec_cost *cost) {
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
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s: more than %d settings of the codec", r->file,
                         TAGC_MAX_CODEC_COSTS);
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
    double kept =
        !is_mild && point->setup.kept_density > 0 ? point->setup.kept_density : 1 - reducer->sparsity;
    int n_senders = point->setup.world_size / ranks_per_sender(o, reducer);
    return kept + (comes_back(o) ? 1 - pow(1 - kept, n_senders) : 0);
}

/* For a bench that measured neither codec nor memory alone: reads the phases in the iterations of an arm. */
tagc_status tagc_profile_phases(const tagc_profile_reader *r, const json_t *arm, double n_compressed,
                                tagc_point *point) {
    const tagc_reducer_options *reducers[] = {&point->setup.engine.reducer, &point->setup.engine.mild};
    double n_values[] = {n_compressed, fmax(json_number_value(json_object_get(arm, "n_mild")), 0)},
           n_coded = 0;
    for (int k = 0; k < 2; k++) n_coded += reducers[k]->exchange != TAGC_EXCHANGE_DENSE ? n_values[k] : 0;

    const json_t *iterations = json_object_get(arm, "iterations");
    const tagc_fsdp_options *o = &point->setup.engine;
    int n_exchanges = o->exchange_each_micro_step ? o->n_micro_steps : 1, n_ranks = point->setup.world_size;
    double phase_s[TAGC_N_PHASES] = {0}, n_params = (double)tagc_gpt2_n_params(&point->setup.model);
    for (int phase = 0; phase < TAGC_PHASE_WAIT; phase++)
        TAGC_TRY(tagc_profile_median(r, iterations, "phase_s", tagc_phase_name(phase), &phase_s[phase]));
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
static tagc_status read_gather(const tagc_profile_reader *r, const tagc_point *common, const json_t *entry,
                               double n_elems, double n_tensors) {
    const json_t *phases = json_object_get(entry, "phase_s");
    const char *word = json_string_value(json_object_get(entry, "wire"));
    int kind = TAGC_N_GATHER_KINDS - 1;
    while (kind >= 0 && !(word && strcmp(tagc_gather_choices[kind].name, word) == 0)) kind--;
    double encode_s, decode_s;
    if (kind < 0) return tagc_profile_missing(r, "codec", "wire", "the format of a gather");
    TAGC_TRY(tagc_profile_number(r, phases, "codec.phase_s", "encode", &encode_s));
    TAGC_TRY(tagc_profile_number(r, phases, "codec.phase_s", "decode", &decode_s));
    tagc_gather_cost *c = &r->points->gather[kind];
    c->weight += n_elems * n_tensors;
    double share = n_elems * n_tensors / c->weight;
    c->encode_s += share * (encode_s / (n_elems / common->setup.world_size) - c->encode_s);
    c->decode_s += share * (decode_s / n_elems - c->decode_s);
    return TAGC_OK;
}

/* The share of values that direct decodes: all without sparsity; else the kept ones, and the sums that are returned. */
static double decoded(const json_t *entry, double sparsity, double n_elems, int n_ranks) {
    double n_kept = json_number_value(json_object_get(entry, "n_kept"));
    double kept = n_kept > 0 ? fmin(n_kept / n_elems, 1) : 1 - sparsity;
    return kept + (json_is_true(json_object_get(entry, "all_reduce")) ? 1 - pow(1 - kept, n_ranks) : 0);
}

/* Reads the seconds per element, over all measured sizes. */
tagc_status tagc_profile_codec(const tagc_profile_reader *r, const tagc_point *common, const json_t *entry) {
    static const char *const exchanges[] = {"dense", "sketch", "packed", "direct", "gather"};
    enum { N_EXCHANGES = sizeof exchanges / sizeof exchanges[0], N_FORMATS = TAGC_FORMAT_SIGN + 1 };
    const char *name = json_string_value(json_object_get(entry, "exchange"));
    const json_t *phases = json_object_get(entry, "phase_s");
    double n_elems, n_tensors, n_union = json_number_value(json_object_get(entry, "n_union"));
    int n_ranks = common->setup.world_size;
    tagc_codec_cost cost = {.exchange = find_word(exchanges, N_EXCHANGES, name)};
    if (cost.exchange < 0)
        return tagc_profile_missing(r, "codec", "exchange", "one of dense, sketch, packed, direct, gather");
    if (cost.exchange == TAGC_EXCHANGE_DENSE) return TAGC_OK;
    TAGC_TRY(tagc_profile_number(r, entry, "codec", "sparsity", &cost.sparsity));
    TAGC_TRY(tagc_profile_number(r, entry, "codec", "ratio", &cost.ratio));
    TAGC_TRY(tagc_profile_above(r, entry, "codec", "n_elems", &n_elems));
    TAGC_TRY(tagc_profile_above(r, entry, "codec", "n_tensors", &n_tensors));
    if (!json_is_object(phases)) return tagc_profile_missing(r, "codec", "phase_s", "an object");
    if (cost.exchange > TAGC_EXCHANGE_DIRECT) return read_gather(r, common, entry, n_elems, n_tensors);
    for (int phase = 0; phase < TAGC_PHASE_WAIT; phase++) {
        double s;
        TAGC_TRY(tagc_profile_number(r, phases, "codec.phase_s", tagc_phase_name(phase), &s));
        cost.elem_s[phase] = s / n_elems;
    }
    cost.union_density = n_union > 0 ? n_union / n_elems : 1 - pow(cost.sparsity, n_ranks);
    if (cost.exchange == TAGC_EXCHANGE_DIRECT) {
        cost.format =
            find_word(tagc_format_names, N_FORMATS, json_string_value(json_object_get(entry, "values")));
        if (cost.format < 0) return tagc_profile_missing(r, "codec", "values", "the format of values");
        cost.union_density = decoded(entry, cost.sparsity, n_elems, n_ranks);
        cost.all_reduce = json_is_true(json_object_get(entry, "all_reduce"));
    }
    cost.weight = n_elems * n_tensors;
    return add_codec(r, &cost);
}
