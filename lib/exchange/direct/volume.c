/* Bytes of a direct exchange, message by message as it sends them over a transport with lanes. */
#include "codec/gaps.h"
#include "codec/values.h"
#include "exchange/direct/direct.h"

#include <math.h>

/* Positions, and values. */
typedef struct body_bytes {
    double index, values;
} body_bytes;

/* Size of gaps if every element is selected with the same probability, see gaps.h. Chunks end in half a byte on average. */
static double expected_gaps(const tagc_code_options *o, double density) {
    tagc_gaps gaps;
    double best = (double)o->n * 16, n_items = density * (double)o->n;
    tagc_gaps_init(&gaps, o->n, o->k);
    for (int bits = 2; bits <= 15; bits++) {
        double escape = ldexp(1, bits) - 1, per_item = bits / (1 - pow(1 - density, escape));
        double n_bytes = n_items * per_item / 8 + 0.5 * (double)gaps.n_chunks;
        if (density == 0) n_bytes = 0; /* gaps after the last item of a chunk are not written */
        if (n_bytes < best) best = n_bytes;
    }
    double bitmap = ceil((double)o->n / 8);
    return 8 + 4 * (double)gaps.n_chunks + (bitmap <= best * 9 / 8 ? bitmap : best);
}

/* The expected size of a body whose elements are selected with the same probability. */
static body_bytes expected_body(const tagc_code_options *o, double density) {
    tagc_value_format format = {.values = o->values, .block = o->block, .sparse = o->sparse};
    if (!o->sparse) return (body_bytes){0, (double)tagc_values_bytes(&format, o->n)};
    double n_items = density * (double)o->n;
    return (body_bytes){expected_gaps(o, density),
                        (double)tagc_values_bytes(&format, (size_t)llround(n_items))};
}

/* The front for bodies of n_bytes in the step before and at most `most`. A body is seldom more than a thirty-second longer than the longest of the step before. */
static size_t eager_bytes(double n_bytes, size_t most) {
    double e = n_bytes * 33 / 32 + 16;
    return e < (double)most ? (size_t)e : most;
}

static body_bytes body_of(const tagc_encoded *encoded) {
    return (body_bytes){(double)encoded->n_index_bytes, (double)(encoded->n_bytes - encoded->n_index_bytes)};
}

/* Bytes of `all` that are not in the front. */
static double rest_of(double all, double eager) {
    return all > eager ? all - eager : 0;
}

/* The length of the front (of sums if i is 1): from the first step's formula if it applies, else from the length that later steps
 * have found. */
static double eager_of(const tagc_reducer *r, int i, int is_known, body_bytes body) {
    const tagc_direct *d = tagc_direct_of(r);
    if (is_known || !d->travel.is_small) return (double)d->travel.eager[i];
    size_t most = i ? d->sums_code->max_bytes(&d->sums) : d->fragment_code->max_bytes(&d->fragment);
    return (double)eager_bytes(body.index + body.values, most);
}

static void add_fragments(const tagc_reducer *r, const tagc_volume_data *data, tagc_volume *v) {
    const tagc_direct *d = tagc_direct_of(r);
    int is_known = data && data->bodies;
    double density = data && !is_known ? data->sent_density : 1, n_partners = r->world_size - 1;
    body_bytes expected = expected_body(&d->fragment, density);
    double eager = eager_of(r, 0, is_known, expected);
    v->n_bytes[TAGC_LEG_CONTROL] += n_partners * TAGC_WIRE_HEADER_BYTES;
    v->n_bytes[TAGC_LEG_VALUES] += n_partners * eager; /* but for positions there */
    for (int owner = 0; owner < r->world_size; owner++) {
        if (owner == r->rank) continue;
        body_bytes body = is_known ? body_of(&data->bodies[owner]) : expected;
        v->n_bytes[TAGC_LEG_INDEX] += body.index;
        v->n_bytes[TAGC_LEG_VALUES] += rest_of(body.index + body.values, eager) - body.index;
    }
    v->eager_bytes = eager;
    v->n_parcels = d->travel.n_parcels;
    v->n_transfers[TAGC_LEG_CONTROL] += (uint64_t)d->travel.n_parcels;
    v->n_transfers[TAGC_LEG_VALUES] += (uint64_t)d->travel.n_parcels;
}

static void add_results(const tagc_reducer *r, const tagc_volume_data *data, tagc_volume *v) {
    const tagc_direct *d = tagc_direct_of(r);
    int is_known = data && data->sums;
    body_bytes body =
        is_known ? body_of(data->sums) : expected_body(&d->sums, (double)d->sums.k / (double)d->sums.n);
    double n_bytes = body.index + body.values, eager = eager_of(r, 1, is_known, body);
    double n_partners = r->world_size - 1;
    tagc_volume_add(v, TAGC_LEG_CONTROL, n_partners * TAGC_WIRE_HEADER_BYTES);
    tagc_volume_add(v, TAGC_LEG_RESULT, n_partners * (eager + rest_of(n_bytes, eager)));
}

static int is_share(double x) {
    return x >= 0 && x <= 1;
}

static tagc_status check_data(const tagc_reducer *r, const tagc_volume_data *data) {
    const tagc_direct *d = tagc_direct_of(r);
    if (!d->fragment.sparse) return TAGC_OK;
    if (!data || !(data->bodies || is_share(data->sent_density)))
        return tagc_fail(TAGC_ERR_ARGUMENT, "sent_density is %g, must be in [0, 1]",
                         data ? data->sent_density : -1.0);
    return TAGC_OK;
}

tagc_status tagc_direct_volume(tagc_reducer *r, const tagc_volume_data *data, tagc_volume *v) {
    TAGC_TRY(check_data(r, data));
    add_fragments(r, data, v);
    if (tagc_direct_has_results(r)) add_results(r, data, v);
    tagc_volume_add(v, TAGC_LEG_CONTROL, (r->world_size - 1.0) * TAGC_WIRE_HEADER_BYTES);
    return TAGC_OK;
}

/* The size of a body with independent positions and all elements that it may have. */
static size_t full_body(const tagc_code_options *o) {
    body_bytes body = expected_body(o, (double)o->k / (double)o->n);
    return eager_bytes(body.index + body.values, tagc_code_of(o)->max_bytes(o));
}

/* For the first step. */
void tagc_direct_guess_eager(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    if (d->travel.has_agreed) return;
    d->travel.eager[0] = d->travel.is_small ? full_body(&d->fragment) : 0;
    d->travel.eager[1] = d->travel.is_small && tagc_direct_has_results(r) ? full_body(&d->sums) : 0;
    d->travel.has_agreed = 1; /* from this k; a later change of this rank's k does not change it */
}

void tagc_direct_note_length(tagc_reducer *r, int i, size_t n_bytes) {
    if (tagc_direct_of(r)->travel.is_small && n_bytes > r->now.longest[i])
        r->now.longest[i] = (uint32_t)n_bytes;
}

/* If no body was sent, as after a value that is not finite, the lengths stay. */
void tagc_direct_choose_eager(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    const uint32_t *longest = r->now.longest;
    if (!d->travel.is_small) return;
    if (longest[0]) d->travel.eager[0] = eager_bytes(longest[0], d->fragment_code->max_bytes(&d->fragment));
    if (longest[1]) d->travel.eager[1] = eager_bytes(longest[1], d->sums_code->max_bytes(&d->sums));
}
