/* The exchange direct: sizes, and the course of a step.
 *
 *   worker | encode batch 0 | batch 1 | ... own | add in rank order | agreement
 *   wire                    | headers 0 | headers 1, bodies 0 | headers 2, bodies 1 ...
 *
 * Fragment 0 is the next rank's, and so on, so that no two ranks send to one owner at the same time. The own one comes last, during
 * the last transfer of bodies.
 *
 * Arena: | fragments going out | coming in, one per rank or host | rows of the host | scratch |. */
#include "exchange/direct/direct.h"

#include <math.h>

static int is_coded(const tagc_reducer_options *options, int world_size) {
    return options->ranks_per_host == 1 || options->ranks_per_host < world_size;
}

static uint64_t residual_elems(const tagc_reducer_options *options, int world_size) {
    int is_exact = options->format <= TAGC_FORMAT_BF16 && options->sparsity == 0; /* by choice: plain dense */
    if (!is_coded(options, world_size) || is_exact) return 0;
    return options->n_elems / (uint64_t)options->ranks_per_host;
}

static uint64_t output_elems(const tagc_reducer_options *options, int world_size) {
    if (options->output == TAGC_OUTPUT_UNIT) return options->n_elems;
    return options->n_elems /
           (uint64_t)(options->output != TAGC_OUTPUT_SHARD ? options->ranks_per_host : world_size);
}

size_t tagc_direct_row(const tagc_reducer *r, int host, int local) {
    const tagc_direct *d = tagc_direct_of(r);
    return (size_t)(r->options.output == TAGC_OUTPUT_HOST_SHARD ? local * d->n_hosts + host
                                                                : tagc_rank_of(d, host, local));
}

float *tagc_direct_sums(const tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    size_t row = r->options.output == TAGC_OUTPUT_SHARD  ? 0
                 : r->options.output == TAGC_OUTPUT_UNIT ? (size_t)r->rank
                                                         : (size_t)d->host;
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
                                                .rotate = r->options.rotate};
    /* topk even if sums could have every element: in 2 bits or 1, `blocks` has no code for zero, which is what padding is. */
    uint64_t most = (uint64_t)r->k * (uint64_t)d->n_hosts;
    d->sums.k = most < r->shard ? (size_t)most : r->shard;
    d->fragment_code = tagc_code_of(&d->fragment);
    d->sums_code = tagc_code_of(&d->sums);
}

static void place(tagc_reducer *r, tagc_arena *arena) {
    tagc_direct *d = tagc_direct_of(r);
    d->beside = NULL; /* that of a layout before belongs to it */
    d->per_host = r->options.ranks_per_host;
    d->n_hosts = r->world_size / d->per_host;
    d->host = r->rank / d->per_host;
    d->local = r->rank % d->per_host;
    d->coded = is_coded(&r->options, r->world_size);
    choose_codes(r);
    tagc_hosts_shape(r);
    tagc_fragments_place(r, arena);
    if (d->per_host > 1) tagc_hosts_place(r, arena);
}

/* ---- a step ---- */

static tagc_status finish(tagc_reducer *r) {
    TAGC_TRY(tagc_agree_end(r, NULL, NULL));
    size_t n_output = (size_t)output_elems(&r->options, r->world_size);
    if (!r->now.stats.nonfinite) return TAGC_OK;
    if (r->arrays) return r->arrays->fill(r->arrays->heap.context, r->now.output, NAN, n_output);
    for (size_t i = 0; i < n_output; i++) r->now.output[i] = NAN;
    return TAGC_OK;
}

tagc_status tagc_direct_agree(tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    if (!d->coded || r->k == r->shard) r->now.stats.n_union = r->options.n_elems;
    tagc_agree_begin(r, TAGC_ROUND_DIRECT_AGREEMENT, 0);
    tagc_then(r, finish, r->agreement, 1, TAGC_NO_ROUND, 0);
    return TAGC_OK;
}

tagc_status tagc_direct_added(tagc_reducer *r) {
    return r->options.output != TAGC_OUTPUT_SHARD ? tagc_direct_results(r) : tagc_direct_agree(r);
}

/* With several batches, bodies of one are sent before headers of another. */
static int first_high(const tagc_direct *d) {
    return d->n_batches > 1 ? TAGC_ROUND_BODIES : TAGC_ROUND_HEADERS;
}

static tagc_status post_rows(tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    tagc_hosts_post_first(r);
    int are_all_out = d->n_row_slots == d->n_hosts;
    if (!d->coded)
        tagc_then(r, tagc_hosts_step, tagc_hosts_rows(r, 0), 1, TAGC_ROUND_RESULTS,
                  TAGC_ROUND_DIRECT_AGREEMENT);
    else
        tagc_then(r, tagc_fragments_send, tagc_hosts_rows(r, 0), 1,
                  are_all_out ? TAGC_ROUND_HEADERS : TAGC_ROUND_ROWS, first_high(d));
    return TAGC_OK;
}

static tagc_status start(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    d->n_encoded = d->n_batches_out = d->n_added = 0;
    if (d->per_host > 1)
        tagc_then(r, post_rows, NULL, 0, TAGC_ROUND_ROWS, TAGC_ROUND_ROWS);
    else
        tagc_then(r, tagc_fragments_send, NULL, 0, TAGC_ROUND_HEADERS, first_high(d));
    return TAGC_OK;
}

static void end(tagc_reducer *r, int succeeded) {
    if (succeeded) tagc_direct_choose_eager(r);
    tagc_fragments_end(r);
}

const tagc_exchange_table tagc_exchange_direct = {
    .id = TAGC_EXCHANGE_DIRECT,
    .state_bytes = sizeof(tagc_direct),
    .is_selective = 1,
    .takes_beside = 1,
    .residual_elems = residual_elems,
    .output_elems = output_elems,
    .place = place,
    .start = start,
    .end = end,
    .volume = tagc_direct_volume,
};
