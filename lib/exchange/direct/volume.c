/* Bytes of a direct exchange, message by message as it sends them over a transport with lanes. */
#include "exchange/direct/direct.h"

static tagc_body_bytes body_of(const tagc_encoded *encoded) {
    return (tagc_body_bytes){(double)encoded->n_index_bytes,
                             (double)(encoded->n_bytes - encoded->n_index_bytes)};
}

/* Bytes of `all` that are not in the front. */
static double rest_of(double all, double eager) {
    return all > eager ? all - eager : 0;
}

/* The length of the front (of sums if i is 1): from the first step's formula if it applies, else from the length that later steps
 * have found. */
static double eager_of(const tagc_reducer *r, int i, int is_known, tagc_body_bytes body) {
    const tagc_direct *d = tagc_direct_of(r);
    if (is_known || !d->is_small) return (double)d->eager[i];
    size_t most = i ? d->sums_code->max_bytes(&d->sums) : d->fragment_code->max_bytes(&d->fragment);
    return (double)tagc_eager_bytes(body.index + body.values, most);
}

static void add_fragments(const tagc_reducer *r, const tagc_volume_data *data, tagc_volume *v) {
    const tagc_direct *d = tagc_direct_of(r);
    int is_known = data && data->bodies;
    double density = data && !is_known ? data->sent_density : 1, n_partners = d->n_hosts - 1;
    tagc_body_bytes expected = tagc_expected_body(&d->fragment, density);
    double eager = eager_of(r, 0, is_known, expected);
    v->n_bytes[TAGC_LEG_CONTROL] += n_partners * TAGC_WIRE_HEADER_BYTES;
    v->n_bytes[TAGC_LEG_VALUES] += n_partners * eager; /* but for positions there */
    for (int host = 0; host < d->n_hosts; host++) {
        if (host == d->host) continue;
        tagc_body_bytes body = is_known ? body_of(&data->bodies[tagc_rank_of(d, host, d->local)]) : expected;
        v->n_bytes[TAGC_LEG_INDEX] += body.index;
        v->n_bytes[TAGC_LEG_VALUES] += rest_of(body.index + body.values, eager) - body.index;
    }
    v->eager_bytes = eager;
    v->n_parcels = d->n_parcels;
    v->n_transfers[TAGC_LEG_CONTROL] += (uint64_t)d->n_parcels;
    v->n_transfers[TAGC_LEG_VALUES] += (uint64_t)d->n_parcels;
}

/* Relayed sums of other hosts are assumed to be as long as the own. */
static void add_results(const tagc_reducer *r, const tagc_volume_data *data, tagc_volume *v) {
    const tagc_direct *d = tagc_direct_of(r);
    int is_known = data && data->sums;
    tagc_body_bytes body =
        is_known ? body_of(data->sums) : tagc_expected_body(&d->sums, (double)d->sums.k / (double)d->sums.n);
    double n_bytes = body.index + body.values, eager = eager_of(r, 1, is_known, body);
    double n_partners = d->n_hosts - 1, n_beside = d->per_host - 1;
    tagc_volume_add(v, TAGC_LEG_CONTROL, n_partners * TAGC_WIRE_HEADER_BYTES);
    tagc_volume_add(v, TAGC_LEG_RESULT, n_partners * (eager + rest_of(n_bytes, eager)));
    for (int host = 0; r->options.output == TAGC_OUTPUT_UNIT && n_beside > 0 && host < d->n_hosts; host++) {
        tagc_volume_add_within(v, TAGC_LEG_CONTROL, n_beside * TAGC_WIRE_HEADER_BYTES);
        tagc_volume_add_within(v, TAGC_LEG_RESULT, n_beside * n_bytes);
    }
}

static int is_share(double x) {
    return x >= 0 && x <= 1;
}

static tagc_status check_data(const tagc_reducer *r, const tagc_volume_data *data) {
    const tagc_direct *d = tagc_direct_of(r);
    if (!d->coded || !d->fragment.sparse) return TAGC_OK;
    if (!data || !(data->bodies || is_share(data->sent_density)))
        return tagc_fail(TAGC_ERR_ARGUMENT, "sent_density is %g, must be in [0, 1]",
                         data ? data->sent_density : -1.0);
    return TAGC_OK;
}

tagc_status tagc_direct_volume(tagc_reducer *r, const tagc_volume_data *data, tagc_volume *v) {
    const tagc_direct *d = tagc_direct_of(r);
    TAGC_TRY(check_data(r, data));
    double n_beside = d->per_host - 1, n_others = r->world_size - 1;
    double row = (double)tagc_hosts_row_bytes(r);
    for (int host = 0; n_beside > 0 && host < d->n_hosts; host++)
        tagc_volume_add_within(v, TAGC_LEG_VALUES, n_beside * row);
    if (d->coded) add_fragments(r, data, v);
    if (d->coded && tagc_direct_has_results(r)) add_results(r, data, v);
    if (!d->coded && r->options.output == TAGC_OUTPUT_UNIT)
        tagc_volume_add(v, TAGC_LEG_RESULT, n_beside * row);
    tagc_volume_add(v, TAGC_LEG_CONTROL, n_others * TAGC_WIRE_HEADER_BYTES);
    v->n_within_bytes[TAGC_LEG_CONTROL] += n_beside * TAGC_WIRE_HEADER_BYTES;
    return TAGC_OK;
}
