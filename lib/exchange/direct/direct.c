/* The exchange direct: sizes, and the course of a step.
 *
 *   worker | encode parcel 0 | parcel 1 | ... own | add in rank order | agreement
 *   wire                    | headers 0 | headers 1, bodies 0 | headers 2, bodies 1 ...
 *
 * Fragment 0 is the next rank's, and so on, so that no two ranks send to one owner at the same time. The own one comes last, during
 * the last transfer of bodies.
 *
 * Memory of a step: | scratch | fragments going out | coming in, one per rank or host | rows of the host |. */
#include "exchange/direct/direct.h"

#include "exchange/options.h"

#include <math.h>
#include <string.h>

static int is_coded(const tagc_reducer_options *options, int world_size) {
    return options->ranks_per_host == 1 || options->ranks_per_host < world_size;
}

uint64_t tagc_direct_residual_elems(const tagc_reducer_options *options, int world_size) {
    int is_exact = options->format <= TAGC_FORMAT_BF16 && options->sparsity == 0; /* by choice: plain dense */
    if (tagc_results_are_sent(options))
        is_exact &= tagc_result_format(options) <= TAGC_FORMAT_BF16 && tagc_result_sparsity(options) == 0;
    if (!is_coded(options, world_size) || is_exact || tagc_is_without_residual(options)) return 0;
    return options->n_elems / (uint64_t)options->ranks_per_host;
}

uint64_t tagc_direct_output_elems(const tagc_reducer_options *options, int world_size) {
    if (options->output == TAGC_OUTPUT_UNIT) return options->n_elems;
    return options->n_elems /
           (uint64_t)(options->output != TAGC_OUTPUT_SHARD ? options->ranks_per_host : world_size);
}

size_t tagc_direct_row(const tagc_reducer *r, int host, int local) {
    const tagc_direct *d = tagc_direct_of(r);
    return (size_t)(r->options.output == TAGC_OUTPUT_HOST_SHARD ? local * d->n_hosts + host
                                                                : tagc_rank_of(d, host, local));
}

void tagc_direct_fill_row(tagc_reducer *r, int host) {
    if (!r->now.row || r->now.gradient) return;
    r->feed->fill(r->feed->context, tagc_direct_row(r, host, tagc_direct_of(r)->local), 0, r->shard,
                  r->now.row);
}

float *tagc_direct_sums(const tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    if (r->now.own_sums) return r->now.own_sums;
    size_t row = r->options.output == TAGC_OUTPUT_SHARD  ? 0
                 : r->options.output == TAGC_OUTPUT_UNIT ? (size_t)r->rank
                                                         : (size_t)d->host;
    /* In the place of the gradient the own row is still to be read, and no other one. */
    if (r->options.output == TAGC_OUTPUT_UNIT && r->now.output == r->now.gradient)
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
    d->per_host = r->options.ranks_per_host;
    d->n_hosts = r->world_size / d->per_host;
    d->host = r->rank / d->per_host;
    d->local = r->rank % d->per_host;
    d->coded = is_coded(&r->options, r->world_size);
    /* Bodies of another format have another length. Ranks change it together, as they need not a sparsity. */
    if (d->fragment.values != r->options.format || d->fragment.block != r->options.block) d->has_agreed = 0;
    choose_codes(r);
    tagc_batches_place(r, arena);
    tagc_hosts_shape(r);
    tagc_fragments_place(r, arena);
}

static void place_work(tagc_reducer *r, tagc_arena *arena) {
    tagc_batches_place_work(r, arena);
    tagc_fragments_place_work(r, arena);
    if (tagc_direct_of(r)->per_host > 1) tagc_hosts_place_work(r, arena);
}

/* ---- the course of a step, from top to bottom ----
 *
 * Each action does its part as far as it can without waiting. Then it names the action that goes on, which is often the same one. */

static tagc_status post_rows(tagc_reducer *r);
static tagc_status sum_rows(tagc_reducer *r);
static tagc_status take_shared(tagc_reducer *r);
static tagc_status encode(tagc_reducer *r);
static tagc_status send_rests(tagc_reducer *r);
static tagc_status add(tagc_reducer *r);
static tagc_status go_on(tagc_reducer *r);
static tagc_status send_results(tagc_reducer *r);
static tagc_status send_result_rests(tagc_reducer *r);
static tagc_status hand_headers(tagc_reducer *r);
static tagc_status hand_bodies(tagc_reducer *r);
static tagc_status decode_results(tagc_reducer *r);
static tagc_status agree(tagc_reducer *r);

static tagc_status then(tagc_reducer *r, tagc_action_fn next, const tagc_pause *wait) {
    tagc_then(r, next, wait->awaited, wait->n, wait->low, wait->high);
    return TAGC_OK;
}

/* In results' round, or if nothing is sent any more in the agreement's. */
static tagc_status then_in(tagc_reducer *r, tagc_action_fn next, tagc_message *awaited, int n, int round) {
    tagc_then(r, next, awaited, n, round, round);
    return TAGC_OK;
}

/* With several parcels, bodies of one are sent before headers of another. */
static int first_high(const tagc_direct *d) {
    return d->n_parcels > 1 ? TAGC_ROUND_BODIES : TAGC_ROUND_HEADERS;
}

static tagc_status start(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    d->n_encoded = d->n_parcels_out = d->n_added = 0;
    if (d->per_host > 1) return then_in(r, post_rows, NULL, 0, TAGC_ROUND_ROWS);
    tagc_then(r, encode, NULL, 0, TAGC_ROUND_HEADERS, first_high(d));
    return TAGC_OK;
}

/* The ranks of a host send each other their rows. */
static tagc_status post_rows(tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    int are_all_out = d->row_window == d->n_hosts;
    tagc_hosts_post_first(r);
    if (d->coded)
        tagc_then(r, encode, tagc_hosts_rows(r, 0), 1, are_all_out ? TAGC_ROUND_HEADERS : TAGC_ROUND_ROWS,
                  first_high(d));
    else
        return then_in(r, sum_rows, tagc_hosts_rows(r, 0), 1,
                       r->options.output == TAGC_OUTPUT_UNIT ? TAGC_ROUND_RESULTS
                                                             : TAGC_ROUND_DIRECT_AGREEMENT);
    return TAGC_OK;
}

/* One host: a dense reduce-scatter, and for the whole unit an all-gather. */
static tagc_status sum_rows(tagc_reducer *r) {
    TAGC_TRY(tagc_hosts_sum(r));
    if (r->options.output != TAGC_OUTPUT_UNIT) return agree(r);
    return then_in(r, take_shared, tagc_hosts_share(r), 1, TAGC_ROUND_DIRECT_AGREEMENT);
}

static tagc_status take_shared(tagc_reducer *r) {
    tagc_hosts_take(r);
    return agree(r);
}

/* Several hosts: encodes the fragments, and sends parcels of headers with fronts, and bodies meanwhile. */
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

/* Adds fragments in the order of hosts. */
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
    return tagc_results_are_handed_on(r) ? then_in(r, hand_headers, rests, 1, TAGC_ROUND_RESULT_RESTS)
                                         : then_in(r, decode_results, rests, 1, TAGC_ROUND_DIRECT_AGREEMENT);
}

static tagc_status hand_headers(tagc_reducer *r) {
    tagc_message *headers;
    TAGC_TRY(tagc_results_hand_headers(r, &headers));
    return then_in(r, hand_bodies, headers, tagc_direct_of(r)->n_hosts, TAGC_ROUND_RESULT_RESTS);
}

static tagc_status hand_bodies(tagc_reducer *r) {
    tagc_message *bodies;
    TAGC_TRY(tagc_results_hand_bodies(r, &bodies));
    return then_in(r, decode_results, bodies, tagc_direct_of(r)->n_hosts, TAGC_ROUND_DIRECT_AGREEMENT);
}

static tagc_status decode_results(tagc_reducer *r) {
    tagc_results_decode(r);
    return agree(r);
}

/* All ranks learn whether the step succeeded. */
static tagc_status agree(tagc_reducer *r) {
    int is_coded = tagc_direct_of(r)->coded;
    if (!is_coded || r->k == r->shard) r->now.stats.n_union = r->options.n_elems;
    if (!is_coded && tagc_direct_has_results(r))
        r->now.stats.n_returned = tagc_direct_output_elems(&r->options, r->world_size);
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
                           tagc_direct_output_elems(&r->options, r->world_size) * sizeof(float));
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
    .output_elems = tagc_direct_output_elems,
    .place = place,
    .place_work = place_work,
    .start = start,
    .end = end,
    .volume = tagc_direct_volume,
};
