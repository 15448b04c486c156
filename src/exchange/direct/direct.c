/* The direct exchange: select and encode fragment by fragment, each sent as soon as it is done.
 *
 *   worker | encode 0 | encode 1 | encode 2 | ... own | add in rank order | agreement
 *   wire              | header 0 | header 1, body 0 | header 2, body 1 ...
 *
 * Only the encoder knows how long a body is, so a header goes first, and the body follows once both sides have it.
 * Fragment 0 is the next rank's, as in paper/index.c; the own one comes last, beside the last bodies. */
#include "exchange/direct/direct.h"
#include "core/clock.h"
#include "exchange/reducer.h"

#include <math.h>
#include <string.h>

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

/* ---- shapes ---- */

static int is_coded(const tagc_reducer_options *options, int world_size) {
    return options->ranks_per_host == 1 || options->ranks_per_host < world_size;
}

uint64_t tagc_direct_residual(const tagc_reducer_options *options, int world_size) {
    int is_exact = options->values <= TAGC_VALUES_BF16 && options->sparsity == 0; /* by choice: plain dense */
    if (!is_coded(options, world_size) || is_exact) return 0;
    return options->n_elems / (uint64_t)options->ranks_per_host;
}

uint64_t tagc_direct_output(const tagc_reducer_options *options, int world_size) {
    if (options->all_reduce == 1) return options->n_elems;
    return options->n_elems / (uint64_t)(options->all_reduce ? options->ranks_per_host : world_size);
}

size_t tagc_direct_row(const tagc_reducer *r, int host, int local) {
    const tagc_direct *d = &r->direct;
    return (size_t)(r->options.all_reduce == 2 ? local * d->n_hosts + host : tagc_rank_of(d, host, local));
}

float *tagc_direct_sums(const tagc_reducer *r) {
    const tagc_direct *d = &r->direct;
    size_t row = r->options.all_reduce == 0   ? 0
                 : r->options.all_reduce == 1 ? (size_t)r->rank
                                              : (size_t)d->host;
    return r->output + row * r->shard;
}

static void choose_codes(tagc_reducer *r) {
    tagc_direct *d = &r->direct;
    r->k = tagc_select_count(r->shard, r->options.sparsity);
    d->fragment = (tagc_code_options){.n = r->shard,
                                      .k = r->k,
                                      .sparse = r->k < r->shard,
                                      .values = r->options.values,
                                      .block = r->options.block,
                                      .rotate = r->options.rotate};
    /* Sparse, too, where all could come: in 2 bits or 1 a code of every element cannot say zero, which is what padding is. */
    uint64_t most = (uint64_t)r->k * (uint64_t)d->n_hosts;
    d->sums = d->fragment;
    d->sums.k = most < r->shard ? (size_t)most : r->shard;
    d->fragment_code = tagc_code_of(&d->fragment);
    d->sums_code = tagc_code_of(&d->sums);
}

static void place_bodies(tagc_reducer *r, tagc_arena *arena) {
    tagc_direct *d = &r->direct;
    int n_threads = r->options.n_threads, is_all = r->options.all_reduce != 0;
    size_t scratch = d->fragment_code->scratch_bytes(&d->fragment, n_threads);
    if (is_all) scratch = larger(scratch, d->sums_code->scratch_bytes(&d->sums, n_threads));
    d->row_bytes = tagc_aligned(d->fragment_code->max_bytes(&d->fragment));
    if (is_all) d->row_bytes = larger(d->row_bytes, tagc_aligned(d->sums_code->max_bytes(&d->sums)));
    d->n_rows = (size_t)(r->options.all_reduce == 1 ? r->world_size : d->n_hosts);
    r->scratch = tagc_arena_take(arena, scratch, 1);
    d->header_send = tagc_arena_take(arena, TAGC_DIRECT_DEPTH, TAGC_WIRE_HEADER_BYTES);
    d->header_recv = tagc_arena_take(arena, d->n_rows, TAGC_WIRE_HEADER_BYTES);
    d->body_send = tagc_arena_take(arena, TAGC_DIRECT_DEPTH, d->row_bytes);
    d->body_recv = tagc_arena_take(arena, d->n_rows, d->row_bytes);
    d->received = tagc_arena_take(arena, d->n_rows, sizeof *d->received);
    d->bodies = tagc_arena_take(arena, (size_t)d->n_hosts, sizeof *d->bodies);
}

void tagc_direct_place(tagc_reducer *r, tagc_arena *arena) {
    tagc_direct *d = &r->direct;
    d->per_host = r->options.ranks_per_host;
    d->n_hosts = r->world_size / d->per_host;
    d->host = r->rank / d->per_host;
    d->local = r->rank % d->per_host;
    d->coded = is_coded(&r->options, r->world_size);
    choose_codes(r);
    tagc_messages_place(r, arena, 1 + 3 * TAGC_DIRECT_DEPTH + TAGC_HOST_DEPTH, 0);
    if (r->messages) {
        r->round = r->messages;
        d->header_out = r->messages + 1;
        d->index_out = d->header_out + TAGC_DIRECT_DEPTH;
        d->value_out = d->index_out + TAGC_DIRECT_DEPTH;
        d->host_in = d->value_out + TAGC_DIRECT_DEPTH;
    }
    if (d->coded) place_bodies(r, arena);
    if (d->per_host > 1) tagc_hosts_place(r, arena);
}

/* ---- fragments out ---- */

tagc_wire_header tagc_direct_header(const tagc_reducer *r, const tagc_fragment *body) {
    return (tagc_wire_header){.kind = TAGC_WIRE_FRAGMENT,
                              .coding = r->options.values,
                              .flags = r->stats.nonfinite ? TAGC_WIRE_FLAG_NONFINITE : 0,
                              .rank = (uint32_t)r->rank,
                              .k = (uint32_t)r->k,
                              .n_elems = r->shard,
                              .n_items = (uint32_t)body->n_items,
                              .body_sum = body->sum,
                              .index_bytes = (uint32_t)body->index_bytes,
                              .body_bytes = body->n_bytes,
                              .step = r->step};
}

/* After a failure, or with something that is not finite, nothing of this step counts: empty bodies. */
static void encode(tagc_reducer *r, int s) {
    tagc_direct *d = &r->direct;
    int host = tagc_host_to(d, s), slot = s % TAGC_DIRECT_DEPTH;
    size_t row = (size_t)host * r->shard;
    uint8_t *body = (uint8_t *)d->body_send + (size_t)slot * d->row_bytes;
    const float *gradient =
        d->per_host > 1 ? d->host_sum : r->gradient + tagc_direct_row(r, host, d->local) * r->shard;
    tagc_encoded encoded = {0};
    double start_s = tagc_clock_s();
    if (r->failure == TAGC_OK && !r->stats.nonfinite) {
        d->fragment_code->encode(&d->fragment, gradient, r->residual ? r->residual + row : NULL,
                                 r->residual ? r->spare->values + row : NULL, body, r->scratch, r->pool,
                                 &encoded);
        r->stats.nonfinite |= encoded.nonfinite;
    }
    if (r->stats.nonfinite) encoded = (tagc_encoded){0};
    r->stats.n_kept += encoded.n_kept;
    start_s = tagc_phase_end(r, d->fragment.sparse ? TAGC_PHASE_SELECT : TAGC_PHASE_ENCODE, start_s);
    d->sent[slot] = (tagc_fragment){.n_bytes = encoded.n_bytes,
                                    .index_bytes = encoded.n_index_bytes,
                                    .n_items = encoded.n_kept,
                                    .sum = tagc_wire_sum(body, encoded.n_bytes)};
    tagc_wire_header header = tagc_direct_header(r, &d->sent[slot]);
    tagc_wire_write(&header, d->header_send + (size_t)slot * TAGC_WIRE_HEADER_BYTES);
    tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
}

static void post_header(tagc_reducer *r, int s) {
    tagc_direct *d = &r->direct;
    size_t slot = (size_t)s % TAGC_DIRECT_DEPTH, from = (size_t)tagc_host_from(d, s);
    tagc_message_pair(&d->header_out[slot], tagc_rank_of(d, tagc_host_to(d, s), d->local),
                      TAGC_WIRE_HEADER_BYTES, tagc_rank_of(d, (int)from, d->local), TAGC_WIRE_HEADER_BYTES);
    tagc_message_post(r, &d->header_out[slot], TAGC_LEG_CONTROL,
                      d->header_send + slot * TAGC_WIRE_HEADER_BYTES,
                      d->header_recv + from * TAGC_WIRE_HEADER_BYTES);
}

tagc_status tagc_direct_announced(tagc_reducer *r, size_t row, int from, const tagc_code *code,
                                  const tagc_code_options *options) {
    tagc_direct *d = &r->direct;
    tagc_fragment nothing = {0};
    tagc_wire_header header, expected = tagc_direct_header(r, &nothing);
    expected.rank = (uint32_t)from;
    tagc_status status =
        tagc_wire_read(d->header_recv + row * TAGC_WIRE_HEADER_BYTES, TAGC_WIRE_HEADER_BYTES, &header);
    if (status == TAGC_OK) status = tagc_wire_expect(&header, &expected);
    if (status == TAGC_OK && header.body_bytes > code->max_bytes(options))
        status = tagc_fail(TAGC_ERR_CORRUPT, "%llu bytes follow, at most %zu can be",
                           (unsigned long long)header.body_bytes, code->max_bytes(options));
    if (status == TAGC_OK && !options->sparse && header.index_bytes)
        status = tagc_fail(TAGC_ERR_CORRUPT, "%u bytes of positions, where all elements are sent",
                           header.index_bytes);
    if (status == TAGC_OK && header.n_items > options->k)
        status = tagc_fail(TAGC_ERR_CORRUPT, "%u elements, at most %zu can be", header.n_items, options->k);
    if (status != TAGC_OK) {
        /* Its sender sends a body of a length that only it knows, and nothing can be said to it before. */
        status = tagc_fail_in(TAGC_ERR_TRANSPORT, "header of the fragment from rank %d", from);
        tagc_comm_abort(r->comm, tagc_last_error());
        return status;
    }
    r->stats.nonfinite |= header.flags & TAGC_WIRE_FLAG_NONFINITE;
    d->received[row] = (tagc_fragment){.n_bytes = header.body_bytes,
                                       .index_bytes = header.index_bytes,
                                       .n_items = header.n_items,
                                       .sum = header.body_sum};
    return TAGC_OK;
}

/* Positions and values apart, so that they are counted apart. */
static tagc_status post_body(tagc_reducer *r, int s) {
    tagc_direct *d = &r->direct;
    size_t slot = (size_t)s % TAGC_DIRECT_DEPTH, row = (size_t)tagc_host_from(d, s);
    int to = tagc_rank_of(d, tagc_host_to(d, s), d->local), from = tagc_rank_of(d, (int)row, d->local);
    TAGC_TRY(tagc_message_wait(r, &d->header_out[slot]));
    TAGC_TRY(tagc_direct_announced(r, row, from, d->fragment_code, &d->fragment));
    const tagc_fragment *out = &d->sent[slot], *in = &d->received[row];
    char *send = d->body_send + slot * d->row_bytes, *recv = d->body_recv + row * d->row_bytes;
    if (d->fragment.sparse) {
        tagc_message_pair(&d->index_out[slot], to, out->index_bytes, from, in->index_bytes);
        tagc_message_post(r, &d->index_out[slot], TAGC_LEG_INDEX, send, recv);
    }
    tagc_message_pair(&d->value_out[slot], to, out->n_bytes - out->index_bytes, from,
                      in->n_bytes - in->index_bytes);
    tagc_message_post(r, &d->value_out[slot], TAGC_LEG_VALUES, send + out->index_bytes,
                      recv + in->index_bytes);
    return TAGC_OK;
}

static tagc_status wait_body(tagc_reducer *r, int s) {
    tagc_direct *d = &r->direct;
    int slot = s % TAGC_DIRECT_DEPTH;
    TAGC_TRY(tagc_message_wait(r, &d->index_out[slot]));
    return tagc_message_wait(r, &d->value_out[slot]);
}

static tagc_status send_fragments(tagc_reducer *r) {
    tagc_direct *d = &r->direct;
    int last = d->n_hosts - 2; /* that is sent */
    for (int s = 0; s < d->n_hosts; s++) {
        if (d->per_host > 1) TAGC_TRY(tagc_hosts_add(r, s));
        TAGC_TRY(wait_body(r, s)); /* whatever was in this slot */
        if (s >= d->n_ahead) encode(r, s);
        if (s > last) break;
        if (s >= d->n_ahead) post_header(r, s);
        if (s > 0) TAGC_TRY(post_body(r, s - 1));
        if (s == last) TAGC_TRY(post_body(r, s));
    }
    return TAGC_OK;
}

/* ---- fragments in ---- */

tagc_body tagc_direct_body(const tagc_reducer *r, size_t row) {
    const tagc_direct *d = &r->direct;
    return (tagc_body){(const uint8_t *)d->body_recv + row * d->row_bytes, d->received[row].n_bytes};
}

int tagc_direct_is_sound(tagc_reducer *r, size_t row, int from, const tagc_code *code,
                         const tagc_code_options *options) {
    tagc_body body = tagc_direct_body(r, row);
    tagc_status status = TAGC_OK;
    if (r->failure != TAGC_OK || r->stats.nonfinite || body.n_bytes == 0) return 0;
    if (tagc_wire_sum(body.bytes, body.n_bytes) != r->direct.received[row].sum)
        status = tagc_fail(TAGC_ERR_CORRUPT, "the checksum is wrong");
    if (status == TAGC_OK) status = code->validate(options, body.bytes, body.n_bytes);
    if (status != TAGC_OK) tagc_note_failure(r, tagc_fail_in(status, "fragment from rank %d", from));
    return status == TAGC_OK;
}

/* The stage in which `host` sends to this one: tagc_host_from(d, s) == host. */
static int stage_from(const tagc_direct *d, int host) {
    return (d->host + d->n_hosts - 1 - host) % d->n_hosts;
}

/* A slot that was used again was waited for then. */
static int is_slot_of(const tagc_direct *d, int s) {
    return s + TAGC_DIRECT_DEPTH > d->n_hosts - 2;
}

static int has_arrived(const tagc_reducer *r, int host) {
    const tagc_direct *d = &r->direct;
    int s = stage_from(d, host), slot = s % TAGC_DIRECT_DEPTH;
    if (host == d->host || !is_slot_of(d, s)) return 1;
    return tagc_message_done(r, &d->index_out[slot]) && tagc_message_done(r, &d->value_out[slot]);
}

static tagc_status wait_from(tagc_reducer *r, int host) {
    int s = stage_from(&r->direct, host);
    return host != r->direct.host && is_slot_of(&r->direct, s) ? wait_body(r, s) : TAGC_OK;
}

/* Puts what `host` sent behind the n bodies that are to be decoded; returns their number. */
static int take_body(tagc_reducer *r, int host, int n) {
    tagc_direct *d = &r->direct;
    size_t own = (size_t)(d->n_hosts - 1) % TAGC_DIRECT_DEPTH;
    if (host == d->host)
        d->bodies[n] = (tagc_body){(const uint8_t *)d->body_send + own * d->row_bytes, d->sent[own].n_bytes};
    else if (tagc_direct_is_sound(r, (size_t)host, tagc_rank_of(d, host, d->local), d->fragment_code,
                                  &d->fragment))
        d->bodies[n] = tagc_direct_body(r, (size_t)host);
    else
        return n;
    return d->bodies[n].n_bytes ? n + 1 : n;
}

/* In the order of hosts, whatever the order of arrivals; as many at once as are there. The own one goes through the
 * code, too. */
static tagc_status add_fragments(tagc_reducer *r) {
    tagc_direct *d = &r->direct;
    float *sums = tagc_direct_sums(r);
    for (int host = 0, first = 0; first < d->n_hosts; first = host) {
        int n = 0;
        do {
            TAGC_TRY(wait_from(r, host));
            double start_s = tagc_clock_s();
            n = take_body(r, host++, n);
            tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
        } while (host < d->n_hosts && has_arrived(r, host));
        double start_s = tagc_clock_s();
        r->stats.nonfinite |= d->fragment_code->decode(&d->fragment, d->bodies, n, first > 0, r->scale, sums,
                                                       r->scratch, r->pool);
        tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    }
    return TAGC_OK;
}

/* ---- a step ---- */

/* The first fragment needs nobody else's, but a place for what stays of it. */
void tagc_direct_start(tagc_reducer *r) {
    tagc_direct *d = &r->direct;
    for (int s = 0; d->per_host > 1 && s < TAGC_HOST_DEPTH && s < d->n_hosts; s++) tagc_hosts_post(r, s);
    d->n_ahead = d->per_host == 1 && d->n_hosts > 1 && !(r->spare && r->spare->in_use);
    if (!d->n_ahead) return;
    if (r->spare) r->spare->in_use = 1;
    encode(r, 0);
    post_header(r, 0);
}

tagc_status tagc_direct_step(tagc_reducer *r) {
    if (r->direct.coded) {
        TAGC_TRY(send_fragments(r));
        TAGC_TRY(add_fragments(r));
        if (r->options.all_reduce) TAGC_TRY(tagc_direct_results(r));
        if (!r->direct.fragment.sparse) r->stats.n_union = r->options.n_elems;
    } else {
        TAGC_TRY(tagc_hosts_step(r));
    }
    tagc_agree_begin(r, 0);
    return TAGC_OK;
}

tagc_status tagc_direct_finish(tagc_reducer *r) {
    TAGC_TRY(tagc_agree_end(r));
    size_t n = r->stats.nonfinite ? (size_t)tagc_direct_output(&r->options, r->world_size) : 0;
    for (size_t i = 0; i < n; i++) r->output[i] = NAN;
    return TAGC_OK;
}
