/* Expected lengths of bodies, and the length of the front that travels with the header. */
#include "codec/gaps.h"
#include "codec/values.h"
#include "exchange/direct/direct.h"

#include <math.h>

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

tagc_body_bytes tagc_expected_body(const tagc_code_options *o, double density) {
    tagc_value_format format = {.values = o->values, .block = o->block, .sparse = o->sparse};
    if (!o->sparse) return (tagc_body_bytes){0, (double)tagc_values_bytes(&format, o->n)};
    double n_items = density * (double)o->n;
    return (tagc_body_bytes){expected_gaps(o, density),
                             (double)tagc_values_bytes(&format, (size_t)llround(n_items))};
}

/* A body is seldom more than a thirty-second longer than the longest of the step before. */
size_t tagc_eager_bytes(double n_bytes, size_t most) {
    double e = n_bytes * 33 / 32 + 16;
    return e < (double)most ? (size_t)e : most;
}

/* The size of a body with independent positions and all elements that it may have. */
static size_t full_body(const tagc_code_options *o) {
    tagc_body_bytes body = tagc_expected_body(o, (double)o->k / (double)o->n);
    return tagc_eager_bytes(body.index + body.values, tagc_code_of(o)->max_bytes(o));
}

/* For the first step. */
void tagc_direct_guess_eager(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    if (d->has_agreed) return;
    d->eager[0] = d->is_small ? full_body(&d->fragment) : 0;
    d->eager[1] = d->is_small && tagc_direct_has_results(r) ? full_body(&d->sums) : 0;
    d->has_agreed = 1; /* from this k; a later change of this rank's k does not change it */
}

void tagc_direct_note_length(tagc_reducer *r, int i, size_t n_bytes) {
    if (tagc_direct_of(r)->is_small && n_bytes > r->now.longest[i]) r->now.longest[i] = (uint32_t)n_bytes;
}

/* If no body was sent, as after a value that is not finite, the lengths stay. */
void tagc_direct_choose_eager(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    const uint32_t *longest = r->now.longest;
    if (!d->is_small) return;
    if (longest[0]) d->eager[0] = tagc_eager_bytes(longest[0], d->fragment_code->max_bytes(&d->fragment));
    if (longest[1]) d->eager[1] = tagc_eager_bytes(longest[1], d->sums_code->max_bytes(&d->sums));
}
