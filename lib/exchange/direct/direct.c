/* The exchange direct: sizes, and the course of a step.
 *
 *   worker | encode parcel 0 | parcel 1 | ... own | add in rank order | agreement
 *   wire                    | headers 0 | headers 1, bodies 0 | headers 2, bodies 1 ...
 *
 * Fragment 0 is the next rank's, and so on, so that no two ranks send to one owner at the same time. The own one comes last, during
 * the last transfer of bodies.
 *
 * Memory of a step: | scratch | fragments going out | coming in, one per rank |. */
#include "exchange/direct/direct.h"

#include "exchange/options.h"

#include <math.h>
#include <string.h>

uint64_t tagc_direct_residual_elems(const tagc_reducer_options *options) {
    int is_exact = options->format <= TAGC_FORMAT_BF16 && options->sparsity == 0; /* by choice: plain dense */
    if (tagc_results_are_sent(options))
        is_exact &= tagc_result_format(options) <= TAGC_FORMAT_BF16 && tagc_result_sparsity(options) == 0;
    return is_exact || tagc_is_without_residual(options) ? 0 : options->n_elems;
}

void tagc_direct_fill_row(tagc_reducer *r, int owner) {
    if (r->now.row && !r->now.gradient)
        r->feed->fill(r->feed->context, (size_t)owner, 0, r->shard, r->now.row);
}

float *tagc_direct_sums(const tagc_reducer *r) {
    if (r->now.own_sums) return r->now.own_sums;
    size_t row = tagc_direct_has_results(r) ? (size_t)r->rank : 0;
    /* In the place of the gradient the own row is still to be read, and no other one. */
    if (tagc_direct_has_results(r) && r->now.output == r->now.gradient)
        row = (row + 1) % (size_t)r->world_size;
    return r->now.output + row * r->shard;
}

const tagc_code *tagc_direct_code(const tagc_direct *d, const tagc_code_options *options) {
    return options == &d->sums ? d->sums_code : d->fragment_code;
}

static void choose_codes(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    r->k = tagc_select_count(r->shard, r->options.sparsity);
    d->fragment = d->sums = (tagc_code_options){.n = r->shard,
                                                .k = r->k,
                                                .sparse = r->k < r->shard,
                                                .values = r->options.format,
                                                .block = r->options.block,
                                                .is_stochastic = tagc_is_without_residual(&r->options),
                                                .residual = r->residual_format,
                                                .gradient = r->options.gradient};
    d->sums.k = tagc_select_count(r->shard, tagc_result_sparsity(&r->options));
    d->sums.values = tagc_result_format(&r->options);
    d->sums.gradient = TAGC_FORMAT_FP32; /* sums are, whatever the gradient is */
    /* topk even if every sum is sent: in 2 bits or 1, `blocks` has no code for zero, which is what padding is. */
    d->sums.sparse |= d->sums.k < r->shard;
    d->fragment_code = tagc_code_of(&d->fragment);
    d->sums_code = tagc_code_of(&d->sums);
}

static void place(tagc_reducer *r, tagc_arena *arena) {
    tagc_direct *d = tagc_direct_of(r);
    /* Bodies of another format have another length. Ranks change it together, as they need not a sparsity. */
    if (d->fragment.values != r->options.format || d->fragment.block != r->options.block)
        d->travel.has_agreed = 0;
    choose_codes(r);
    tagc_batches_place(r, arena);
    tagc_fragments_place(r, arena);
}

static void place_work(tagc_reducer *r, tagc_arena *arena) {
    tagc_batches_place_work(r, arena);
    tagc_fragments_place_work(r, arena);
}

/* ---- the course of a step, from top to bottom ----
 *
 * Each action does its part as far as it can without waiting. Then it names the action that goes on, which is often the same one. */

static tagc_status encode(tagc_reducer *r);
static tagc_status send_rests(tagc_reducer *r);
static tagc_status add(tagc_reducer *r);
static tagc_status go_on(tagc_reducer *r);
static tagc_status send_results(tagc_reducer *r);
static tagc_status send_result_rests(tagc_reducer *r);
static tagc_status decode_results(tagc_reducer *r);
static tagc_status agree(tagc_reducer *r);

static tagc_status then(tagc_reducer *r, tagc_action_fn next, const tagc_pause *wait) {
    tagc_then(r, next, wait->awaited, wait->n, wait->low, wait->high);
    return TAGC_OK;
}

static tagc_status then_in(tagc_reducer *r, tagc_action_fn next, tagc_message *awaited, int n, int round) {
    tagc_then(r, next, awaited, n, round, round);
    return TAGC_OK;
}

static tagc_status start(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    d->step.n_encoded = d->step.n_parcels_out = d->step.n_added = 0;
    /* With several parcels, bodies of one are sent before headers of another. */
    tagc_then(r, encode, NULL, 0, TAGC_ROUND_HEADERS,
              d->travel.n_parcels > 1 ? TAGC_ROUND_BODIES : TAGC_ROUND_HEADERS);
    return TAGC_OK;
}

/* Encodes the fragments, and sends parcels of headers with fronts, and bodies meanwhile. */
static tagc_status encode(tagc_reducer *r) {
    tagc_pause wait;
    TAGC_TRY(tagc_fragments_encode(r, &wait));
    return then(r, wait.is_done ? send_rests : encode, &wait);
}

static tagc_status send_rests(tagc_reducer *r) {
    tagc_pause wait;
    TAGC_TRY(tagc_fragments_send(r, &wait));
    return then(r, wait.is_done ? add : send_rests, &wait);
}

/* Adds fragments in the order of ranks. */
static tagc_status add(tagc_reducer *r) {
    tagc_pause wait;
    TAGC_TRY(tagc_fragments_add(r, &wait));
    if (!wait.is_done) return then(r, add, &wait);
    if (!r->now.is_ahead) return go_on(r);
    int round = tagc_direct_round_after_sums(r);
    tagc_then(r, go_on, NULL, 0, round, round);
    atomic_store(&r->now.hold, TAGC_HELD);
    return TAGC_OK;
}

/* Whether all sums are finite is known. */
static tagc_status go_on(tagc_reducer *r) {
    return r->options.output == TAGC_OUTPUT_SHARD ? agree(r) : send_results(r);
}

/* All-reduce: owners send their sums to all. */
static tagc_status send_results(tagc_reducer *r) {
    return then_in(r, send_result_rests, tagc_results_send(r), 1, TAGC_ROUND_RESULT_RESTS);
}

static tagc_status send_result_rests(tagc_reducer *r) {
    tagc_message *rests;
    TAGC_TRY(tagc_results_send_rest(r, &rests));
    return then_in(r, decode_results, rests, 1, TAGC_ROUND_DIRECT_AGREEMENT);
}

static tagc_status decode_results(tagc_reducer *r) {
    tagc_results_decode(r);
    return agree(r);
}

/* All ranks learn whether the step succeeded. */
static tagc_status agree(tagc_reducer *r) {
    if (r->k == r->shard) r->now.stats.n_union = r->options.n_elems;
    tagc_agree_begin(r, TAGC_ROUND_DIRECT_AGREEMENT, 0);
    tagc_then(r, tagc_direct_finish, r->agreement, 1, TAGC_NO_ROUND, 0);
    return TAGC_OK;
}

tagc_status tagc_direct_finish(tagc_reducer *r) {
    TAGC_TRY(tagc_agree_end(r, NULL, NULL));
    const float value = NAN;
    uint32_t word;
    if (!r->now.stats.nonfinite || r->now.is_ahead || r->feed) return TAGC_OK;
    memcpy(&word, &value, sizeof word);
    return r->arrays->fill(r->arrays->heap.context, r->now.output, word,
                           tagc_output_elems(&r->options, r->world_size) * sizeof(float));
}

static void end(tagc_reducer *r, int succeeded) {
    if (succeeded) tagc_direct_choose_eager(r);
    tagc_fragments_end(r);
}

const tagc_exchange_table tagc_exchange_direct = {
    .id = TAGC_EXCHANGE_DIRECT,
    .state_bytes = sizeof(tagc_direct),
    .overlap = TAGC_OVERLAP_ANYWHERE,
    .runner = &tagc_direct_on_host,
    .residual_elems = tagc_direct_residual_elems,
    .place = place,
    .place_work = place_work,
    .start = start,
    .end = end,
    .volume = tagc_direct_volume,
};
