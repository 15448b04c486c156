/* Runs the batches of a direct exchange on the processor: one row at a time, so that a fragment is on the wire while the next one is
 * encoded. Bodies are written to and read from the rows of messages. */
#include "exchange/direct/direct.h"

/* Runs a batch of one row. */
static const tagc_batch_result *run(tagc_reducer *r, int which, tagc_batch_row row) {
    tagc_batches *b = &tagc_direct_of(r)->batches;
    b->rows[0] = row;
    tagc_note_failure(r, tagc_batches_run(r, which));
    return &b->results[0];
}

static void encode(tagc_reducer *r, int t, tagc_encoded *out) {
    int owner = tagc_partner_to(r, t);
    uint8_t *body = (uint8_t *)tagc_direct_row_out(r, t) + TAGC_WIRE_HEADER_BYTES;
    tagc_direct_fill_row(r, owner);
    *out = run(r, TAGC_ENCODE, tagc_encode_row(r, owner, body))->encoded;
}

static void add(tagc_reducer *r, int first, int end) {
    const tagc_direct *d = tagc_direct_of(r);
    int n = 0;
    for (int from = first; from < end; from++)
        if (d->bodies[from].bytes) d->batches.bodies[n++] = d->bodies[from];
    r->now.stats.nonfinite |= run(r, TAGC_ADD, tagc_add_row(r, d->batches.bodies, n, first > 0))->nonfinite;
}

static void encode_sums(tagc_reducer *r, uint8_t *body, tagc_encoded *out) {
    *out = run(r, TAGC_ENCODE_SUMS, tagc_encode_sums_row(r, body))->encoded;
}

static void decode_sums(tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    for (size_t row = 0; row < (size_t)r->world_size; row++) {
        run(r, TAGC_DECODE_SUMS, tagc_decode_sums_row(r, row, &d->bodies[row]));
        if (r->now.row) r->feed->take(r->feed->context, row, r->now.row);
    }
}

const tagc_runner tagc_direct_on_host = {.name = "the processor",
                                         .make = tagc_batches_make,
                                         .end = tagc_batches_end,
                                         .encode = encode,
                                         .add = add,
                                         .encode_sums = encode_sums,
                                         .decode_sums = decode_sums};
