/* Bytes of a direct exchange, stage by stage as direct.c sends them. */
#include "exchange/volume.h"
#include "codec/gaps.h"
#include "codec/values.h"
#include "exchange/direct/direct.h"
#include "exchange/reducer.h"

#include <math.h>

/* A body as long as it is, or as it will be on average. */
typedef struct body_bytes {
    double index, values;
} body_bytes;

static body_bytes body_of(const tagc_encoded *encoded) {
    return (body_bytes){(double)encoded->n_index_bytes, (double)(encoded->n_bytes - encoded->n_index_bytes)};
}

/* Of gaps where every element is kept with the same chance, see gaps.h; chunks end in half a byte on average. */
static double expected_gaps(const tagc_code_options *o, double density) {
    tagc_gaps gaps;
    double best = (double)o->n * 16, n_items = density * (double)o->n;
    tagc_gaps_init(&gaps, o->n, o->k);
    for (int bits = 2; bits <= 15; bits++) {
        double escape = ldexp(1, bits) - 1, per_item = bits / (1 - pow(1 - density, escape));
        double n_bytes = n_items * per_item / 8 + 0.5 * (double)gaps.n_chunks;
        if (density == 0) n_bytes = 0; /* what is behind the last item of a chunk is not written */
        if (n_bytes < best) best = n_bytes;
    }
    double bitmap = ceil((double)o->n / 8);
    return 8 + 4 * (double)gaps.n_chunks + (bitmap <= best * 9 / 8 ? bitmap : best);
}

static body_bytes expected_body(const tagc_code_options *o, double density) {
    tagc_value_format format = {
        .values = o->values, .block = o->block, .sparse = o->sparse, .rotate = o->rotate};
    if (!o->sparse) return (body_bytes){0, (double)tagc_values_bytes(&format, o->n)};
    double n_items = density * (double)o->n;
    return (body_bytes){expected_gaps(o, density),
                        (double)tagc_values_bytes(&format, (size_t)llround(n_items))};
}

static void add(tagc_volume *v, tagc_leg leg, double n_bytes, int is_within) {
    v->n_bytes[leg] += n_bytes;
    if (is_within) v->n_within_bytes[leg] += n_bytes;
    v->n_transfers[leg]++;
}

static void add_fragments(const tagc_reducer *r, const tagc_volume_data *data, tagc_volume *v) {
    const tagc_direct *d = &r->direct;
    for (int host = 0; host < d->n_hosts; host++) {
        if (host == d->host) continue;
        body_bytes body = data && data->bodies ? body_of(&data->bodies[tagc_rank_of(d, host, d->local)])
                                               : expected_body(&d->fragment, data ? data->kept_density : 1);
        add(v, TAGC_LEG_CONTROL, TAGC_WIRE_HEADER_BYTES, 0);
        if (d->fragment.sparse) add(v, TAGC_LEG_INDEX, body.index, 0);
        add(v, TAGC_LEG_VALUES, body.values, 0);
    }
}

/* Sums of other hosts, which are handed on, are taken to be as long as the own. */
static void add_results(const tagc_reducer *r, const tagc_volume_data *data, tagc_volume *v) {
    const tagc_direct *d = &r->direct;
    body_bytes body =
        data && data->sums ? body_of(data->sums) : expected_body(&d->sums, data ? data->union_density : 1);
    double n_bytes = body.index + body.values, n_hosts = d->n_hosts, n_beside = d->per_host - 1;
    add(v, TAGC_LEG_CONTROL, (n_hosts - 1) * TAGC_WIRE_HEADER_BYTES, 0);
    add(v, TAGC_LEG_RESULT, (n_hosts - 1) * n_bytes, 0);
    for (int host = 0; r->options.all_reduce == 1 && n_beside > 0 && host < d->n_hosts; host++) {
        add(v, TAGC_LEG_CONTROL, n_beside * TAGC_WIRE_HEADER_BYTES, 1);
        add(v, TAGC_LEG_RESULT, n_beside * n_bytes, 1);
    }
}

void tagc_direct_volume(const tagc_reducer *r, const tagc_volume_data *data, tagc_volume *v) {
    const tagc_direct *d = &r->direct;
    double n_beside = d->per_host - 1, n_others = r->world_size - 1;
    double row = (double)r->shard * (r->options.values == TAGC_VALUES_FP32 ? 4 : 2); /* within a host */
    for (int host = 0; n_beside > 0 && host < d->n_hosts; host++) add(v, TAGC_LEG_VALUES, n_beside * row, 1);
    if (d->coded) add_fragments(r, data, v);
    if (d->coded && r->options.all_reduce) add_results(r, data, v);
    if (!d->coded && r->options.all_reduce == 1) add(v, TAGC_LEG_RESULT, n_beside * row, 1);
    add(v, TAGC_LEG_CONTROL, n_others * TAGC_WIRE_HEADER_BYTES, 0);
    v->n_within_bytes[TAGC_LEG_CONTROL] += n_beside * TAGC_WIRE_HEADER_BYTES;
}
