/* Encodes fragments and sends them parcel by parcel; adds those that arrive in rank order; sends sums back. */
#include "core/clock.h"
#include "exchange/direct/direct.h"

#include <string.h>

enum {
    SMALL_UNIT = 1 << 20,   /* elements; up to this size a unit's fragments are one parcel */
    PARCEL_ELEMS = 1 << 17, /* elements of a parcel of larger units, at least */
    LEAST_WINDOW = 4,
    MARGIN = 64 /* bytes by which a body may exceed any valid size, so that it can be received and refused */
};
static const size_t window_bytes = (size_t)64 << 20;

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

/* ---- shapes ---- */

static int has_lanes(const tagc_reducer *r) {
    return !r->comm || tagc_comm_has_lanes(r->comm);
}

static int fits(const tagc_reducer *r) {
    return (uint64_t)r->world_size * r->shard <= SMALL_UNIT;
}

/* From nothing that ranks may differ in. */
static void choose_parcels(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    int n_partners = r->world_size - 1;
    size_t n = (PARCEL_ELEMS + r->shard - 1) / r->shard;
    d->travel.parcel = fits(r) || !has_lanes(r) || n >= (size_t)n_partners ? n_partners : (int)n;
    d->travel.n_parcels = n_partners ? (n_partners + d->travel.parcel - 1) / d->travel.parcel : 0;
    if (!d->travel.window_bytes) d->travel.window_bytes = window_bytes;
    size_t window = d->travel.window_bytes / d->stride / (size_t)(d->travel.parcel ? d->travel.parcel : 1);
    if (window < LEAST_WINDOW) window = LEAST_WINDOW;
    d->travel.window = window < (size_t)d->travel.n_parcels ? (int)window : d->travel.n_parcels;
}

static size_t own_row_out(const tagc_direct *d) {
    return (size_t)d->travel.window * (size_t)d->travel.parcel;
}

void tagc_fragments_place(tagc_reducer *r, tagc_arena *arena) {
    tagc_direct *d = tagc_direct_of(r);
    size_t n_ranks = (size_t)r->world_size;
    d->capacity = d->fragment_code->max_bytes(&d->fragment) + MARGIN;
    if (tagc_direct_has_results(r))
        d->capacity = larger(d->capacity, d->sums_code->max_bytes(&d->sums) + MARGIN);
    d->travel.is_small = fits(r) && has_lanes(r);
    tagc_direct_guess_eager(r);
    d->stride = tagc_aligned(TAGC_WIRE_HEADER_BYTES +
                             larger(d->capacity, larger(d->travel.eager[0], d->travel.eager[1])));
    choose_parcels(r);
    tagc_room rooms[] = {{2 * d->travel.window, d->travel.parcel}, {2, r->world_size - 1}};
    tagc_messages_place(r, arena, rooms, 2);
    if (r->messages) {
        d->header_out = r->messages;
        d->body_out = d->header_out + d->travel.window;
        d->result_out = d->body_out + d->travel.window;
    }
    d->sent = tagc_arena_take(arena, own_row_out(d) + 1, sizeof *d->sent);
    d->received = tagc_arena_take(arena, n_ranks, sizeof *d->received);
    d->bodies = tagc_arena_take(arena, n_ranks, sizeof *d->bodies);
    d->step.senders = tagc_arena_take(arena, n_ranks, sizeof *d->step.senders);
}

void tagc_fragments_place_work(tagc_reducer *r, tagc_arena *arena) {
    tagc_direct *d = tagc_direct_of(r);
    d->send = tagc_arena_take(arena, own_row_out(d) + !tagc_direct_has_results(r), d->stride);
    d->recv = tagc_arena_take(arena, (size_t)r->world_size, d->stride);
}

/* ---- out ---- */

static size_t row_out_of(const tagc_reducer *r, int t) {
    size_t n = own_row_out(tagc_direct_of(r));
    return t == r->world_size - 1 ? n : (size_t)t % n;
}

char *tagc_direct_row_out(const tagc_reducer *r, int t) {
    const tagc_direct *d = tagc_direct_of(r);
    return d->send + row_out_of(r, t) * d->stride;
}

/* The turn after the last one of parcel p. */
static int parcel_end(const tagc_reducer *r, int p) {
    int end = (p + 1) * tagc_direct_of(r)->travel.parcel;
    return end < r->world_size - 1 ? end : r->world_size - 1;
}

static tagc_message *header_of(const tagc_direct *d, int p) {
    return &d->header_out[p % d->travel.window];
}

static tagc_message *body_of(const tagc_direct *d, int p) {
    return &d->body_out[p % d->travel.window];
}

/* Writes the header of a body that is already behind it, and zeros if the body is shorter than the front. options: &d->fragment
 * or &d->sums. */
static void finish(tagc_reducer *r, const tagc_code_options *options, char *row, const tagc_encoded *encoded,
                   size_t eager, tagc_fragment *out) {
    char *body = row + TAGC_WIRE_HEADER_BYTES;
    int is_void = r->now.stats.nonfinite || r->now.failure != TAGC_OK;
    size_t n_bytes = is_void ? 0 : encoded->n_bytes;
    *out = (tagc_fragment){.n_bytes = n_bytes,
                           .index_bytes = is_void ? 0 : encoded->n_index_bytes,
                           .n_items = is_void ? 0 : encoded->n_sent,
                           .sum = tagc_wire_sum(body, n_bytes),
                           .is_void = is_void};
    tagc_wire_header header = {.kind = TAGC_WIRE_FRAGMENT,
                               .coding = options->values,
                               .flags = (r->now.stats.nonfinite ? TAGC_WIRE_FLAG_NONFINITE : 0) |
                                        (r->now.failure != TAGC_OK ? TAGC_WIRE_FLAG_FAILED : 0),
                               .rank = (uint32_t)r->rank,
                               .k = (uint32_t)options->k,
                               .n_elems = r->shard,
                               .unit = r->identity.unit,
                               .n_items = (uint32_t)out->n_items,
                               .body_sum = out->sum,
                               .index_bytes = (uint32_t)out->index_bytes,
                               .body_bytes = n_bytes,
                               .step = r->now.number};
    tagc_wire_write(&header, row);
    if (n_bytes < eager) memset(body + n_bytes, 0, eager - n_bytes);
}

/* ---- fragments that arrive: what their headers say, where the rest of a body goes, and whether it is sound ---- */

/* Its fields that the receiver knows in advance. */
static tagc_status check_header(const tagc_reducer *r, const tagc_wire_header *header, int from,
                                const tagc_code_options *options) {
    tagc_wire_header expected = {.kind = TAGC_WIRE_FRAGMENT,
                                 .coding = options->values,
                                 .rank = (uint32_t)from,
                                 .k = (uint32_t)options->k,
                                 .n_elems = r->shard,
                                 .step = r->now.number};
    TAGC_TRY(tagc_wire_expect_of(r->comm, &r->identity, from, header, &expected));
    if (!options->sparse && header->index_bytes)
        return tagc_fail(TAGC_ERR_CORRUPT, "%u bytes of positions, where all elements are sent",
                         header->index_bytes);
    if (header->n_items > options->k)
        return tagc_fail(TAGC_ERR_CORRUPT, "%u elements, at most %zu can be", header->n_items, options->k);
    if (header->body_bytes == 0 && header->flags == 0)
        return tagc_fail(TAGC_ERR_CORRUPT,
                         "no body, and no word of a failure or of a value that is not finite");
    return TAGC_OK;
}

/* The longest body that any sparsity makes, and if the unit is another one, any format. */
static size_t longest_body(const tagc_code_options *options, int is_other_unit) {
    tagc_code_options o = *options;
    if (is_other_unit) o.values = TAGC_FORMAT_FP32;
    o.k = o.n;
    o.sparse = 1;
    size_t n_bytes = tagc_code_of(&o)->max_bytes(&o);
    o.sparse = 0;
    return larger(n_bytes, tagc_code_of(&o)->max_bytes(&o));
}

/* Reads the header that `from` sent. If it is readable but wrong, notes that and ignores its body. If it is not readable, the comm
 * breaks, because the length of what follows is unknown. */
static tagc_status announced(tagc_reducer *r, int from, const tagc_code_options *options) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_wire_header header;
    tagc_status status = tagc_wire_read(d->recv + (size_t)from * d->stride, TAGC_WIRE_HEADER_BYTES, &header);
    if (status == TAGC_OK && header.kind != TAGC_WIRE_FRAGMENT)
        status =
            tagc_fail(TAGC_ERR_CORRUPT, "message kind is %d, expected %d", header.kind, TAGC_WIRE_FRAGMENT);
    int is_other_unit = status == TAGC_OK && header.unit != r->identity.unit;
    if (is_other_unit && !tagc_identity_may_be_alike(r->comm, &r->identity, header.unit))
        return tagc_identity_abort(r->comm, &r->identity, from, header.unit);
    size_t most = larger(longest_body(options, is_other_unit), d->capacity);
    if (status == TAGC_OK && header.body_bytes > most)
        status = tagc_fail(TAGC_ERR_CORRUPT, "%llu bytes follow, at most %zu can be",
                           (unsigned long long)header.body_bytes, most);
    if (status != TAGC_OK) {
        /* Only the sender knows the length of the body that it will send, and this rank cannot stop it before. */
        status = tagc_fail_in(status, "header of the fragment from rank %d", tagc_comm_name(r->comm, from));
        return tagc_comm_give_up(r->comm, status, from);
    }
    status = check_header(r, &header, from, options);
    size_t longest = tagc_direct_code(d, options)->max_bytes(options);
    if (status == TAGC_OK && header.body_bytes > longest)
        status = tagc_fail(TAGC_ERR_CORRUPT, "%llu bytes follow, at most %zu can be",
                           (unsigned long long)header.body_bytes, longest);
    if (status != TAGC_OK)
        tagc_note_failure(
            r, tagc_fail_in(status, "header of the fragment from rank %d", tagc_comm_name(r->comm, from)));
    r->now.stats.nonfinite |= header.flags & TAGC_WIRE_FLAG_NONFINITE;
    d->received[from] = (tagc_fragment){.n_bytes = header.body_bytes,
                                        .index_bytes = header.index_bytes,
                                        .n_items = header.n_items,
                                        .sum = header.body_sum,
                                        .is_void = header.flags != 0 || status != TAGC_OK};
    return TAGC_OK;
}

/* ---- the rest of bodies ---- */

/* Bytes that follow the first message. */
static uint64_t rest_of(const tagc_fragment *fragment, size_t eager) {
    return fragment->n_bytes > eager ? fragment->n_bytes - eager : 0;
}

/* Of these, positions. */
static uint64_t rest_index(const tagc_fragment *fragment, size_t eager) {
    return fragment->index_bytes > eager ? fragment->index_bytes - eager : 0;
}

/* Where to receive the rests of announced bodies that one message brings. */
typedef struct rests_in {
    char *to;             /* `recv` of the message */
    int is_packed;        /* one after the other, in memory that is not read; else in their rows */
    uint64_t n_bytes;     /* of those added so far */
    uint64_t index_bytes; /* of these, positions */
} rests_in;

/* From `senders` (n): in their rows, unless one is too long for that, since its sender has another sparsity. The step will fail on
 * all ranks then, after everything that was sent has been received. */
static tagc_status rests_begin(tagc_reducer *r, const int *senders, int n, size_t eager, rests_in *out) {
    tagc_direct *d = tagc_direct_of(r);
    uint64_t n_bytes = sizeof(void *);
    *out = (rests_in){.to = d->recv};
    for (int i = 0; i < n; i++) {
        n_bytes += rest_of(&d->received[senders[i]], eager);
        out->is_packed |= d->received[senders[i]].n_bytes > d->capacity;
    }
    if (!out->is_packed) return TAGC_OK;
    void *block;
    tagc_status status = tagc_memory_create((size_t)n_bytes, "bodies of another sparsity", &block);
    if (status != TAGC_OK) {
        tagc_comm_abort(r->comm, tagc_last_error());
        return status;
    }
    memcpy(block, &d->step.discarded, sizeof d->step.discarded);
    d->step.discarded = block;
    out->to = (char *)block + sizeof(void *);
    return TAGC_OK;
}

/* Adds the rest from a rank to the message. */
static void rests_add(const tagc_reducer *r, rests_in *rests, tagc_message *message, int from, size_t eager) {
    const tagc_direct *d = tagc_direct_of(r);
    const tagc_fragment *in = &d->received[from];
    uint64_t n_bytes = rest_of(in, eager);
    tagc_message_from(message, from, n_bytes,
                      rests->is_packed ? rests->n_bytes
                                       : (size_t)from * d->stride + TAGC_WIRE_HEADER_BYTES + eager);
    rests->n_bytes += n_bytes;
    rests->index_bytes += rest_index(in, eager);
}

/* The body that `from` sent, or if it cannot be decoded one without bytes; notes what is wrong with it. */
static tagc_body sound_body(tagc_reducer *r, int from, const tagc_code_options *options) {
    const tagc_direct *d = tagc_direct_of(r);
    const tagc_fragment *f = &d->received[from];
    tagc_body body = {.bytes = (const uint8_t *)d->recv + (size_t)from * d->stride + TAGC_WIRE_HEADER_BYTES,
                      .n_bytes = f->n_bytes};
    if (r->now.failure != TAGC_OK || r->now.stats.nonfinite || f->is_void) return (tagc_body){0};
    tagc_status status = TAGC_OK;
    if (tagc_wire_sum(body.bytes, body.n_bytes) != f->sum)
        status = tagc_fail(TAGC_ERR_CORRUPT, "the checksum is wrong");
    if (status == TAGC_OK) status = tagc_direct_code(d, options)->validate(options, body.bytes, body.n_bytes);
    if (status == TAGC_OK) return body;
    tagc_note_failure(r, tagc_fail_in(status, "fragment from rank %d", tagc_comm_name(r->comm, from)));
    return (tagc_body){0};
}

/* ---- the course of fragments ---- */

/* After a failure, or if something is not finite, this rank sends empty bodies. */
static void encode(tagc_reducer *r, int t) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_fragment *sent = &d->sent[row_out_of(r, t)];
    tagc_encoded encoded = {0};
    double start_s = tagc_clock_s();
    if (r->now.failure == TAGC_OK && !r->now.stats.nonfinite) {
        r->runner->encode(r, t, &encoded);
        r->now.stats.nonfinite |= encoded.nonfinite;
        if (!encoded.nonfinite) r->now.stats.n_sent += encoded.n_sent;
    }
    start_s = tagc_phase_end(r, d->fragment.sparse ? TAGC_PHASE_SELECT : TAGC_PHASE_ENCODE, start_s);
    finish(r, &d->fragment, tagc_direct_row_out(r, t), &encoded, d->travel.eager[0], sent);
    if (t < r->world_size - 1) tagc_direct_note_length(r, 0, sent->n_bytes);
    tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
}

static void post_headers(tagc_reducer *r, int p) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_message *message = header_of(d, p);
    size_t n_bytes = TAGC_WIRE_HEADER_BYTES + d->travel.eager[0];
    uint64_t n_headers = (uint64_t)(parcel_end(r, p) - p * d->travel.parcel) * TAGC_WIRE_HEADER_BYTES;
    tagc_message_clear(message);
    if (parcel_end(r, p) - p * d->travel.parcel == r->world_size - 1) message->round_bytes = n_bytes;
    for (int t = p * d->travel.parcel; t < parcel_end(r, p); t++) {
        int from = tagc_partner_from(r, t);
        tagc_message_to(message, tagc_partner_to(r, t), n_bytes, row_out_of(r, t) * d->stride);
        tagc_message_from(message, from, n_bytes, (size_t)from * d->stride);
    }
    tagc_message_post_parts(r, message, TAGC_ROUND_HEADERS, TAGC_LEG_VALUES, d->send, d->recv,
                            TAGC_LEG_CONTROL, n_headers, n_headers);
}

/* The headers of parcel p are here. */
static tagc_status post_bodies(tagc_reducer *r, int p) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_message *message = body_of(d, p);
    size_t eager = d->travel.eager[0];
    int n = 0;
    TAGC_TRY(tagc_message_wait(r, header_of(d, p)));
    for (int t = p * d->travel.parcel; t < parcel_end(r, p); t++) {
        int from = tagc_partner_from(r, t);
        d->step.senders[n++] = from;
        TAGC_TRY(announced(r, from, &d->fragment));
    }
    rests_in rests;
    uint64_t index_sent = 0, front_sent = 0, front_received = 0; /* positions */
    TAGC_TRY(rests_begin(r, d->step.senders, n, eager, &rests));
    tagc_message_clear(message);
    for (int t = p * d->travel.parcel; t < parcel_end(r, p); t++) {
        const tagc_fragment *out = &d->sent[row_out_of(r, t)];
        int from = tagc_partner_from(r, t);
        tagc_message_to(message, tagc_partner_to(r, t), rest_of(out, eager),
                        row_out_of(r, t) * d->stride + TAGC_WIRE_HEADER_BYTES + eager);
        rests_add(r, &rests, message, from, eager);
        index_sent += rest_index(out, eager);
        front_sent += out->index_bytes - rest_index(out, eager);
        front_received += d->received[from].index_bytes - rest_index(&d->received[from], eager);
    }
    tagc_messages_recount(r, TAGC_LEG_VALUES, TAGC_LEG_INDEX, front_sent, front_received);
    tagc_message_post_parts(r, message, TAGC_ROUND_BODIES, TAGC_LEG_VALUES, d->send, rests.to, TAGC_LEG_INDEX,
                            index_sent, rests.index_bytes);
    d->step.n_parcels_out = p + 1;
    return TAGC_OK;
}

/* ---- the course: encode, send, add ---- */

/* The message that turn t has to wait for before it is encoded: of an older parcel whose memory it takes. NULL: none. */
static tagc_message *needed(const tagc_reducer *r, int t) {
    const tagc_direct *d = tagc_direct_of(r);
    /* No rank waits for the own fragment, so long bodies are sent first. */
    if (t == r->world_size - 1 && !d->travel.is_small && d->step.n_parcels_out < d->travel.n_parcels)
        return header_of(d, d->step.n_parcels_out);
    int is_first = t < r->world_size - 1 && t % d->travel.parcel == 0,
        older = is_first ? t / d->travel.parcel - d->travel.window : -1;
    if (older < 0) return NULL;
    /* Its bodies are sent after the wait for its header, even if that has arrived by now. */
    if (d->step.n_parcels_out <= older) return header_of(d, d->step.n_parcels_out);
    tagc_message *message = body_of(d, older);
    return tagc_message_done(r, message) ? NULL : message;
}

/* Sends the bodies that can be sent, and so frees memory for turn t. */
static tagc_status make_room(tagc_reducer *r, int t) {
    tagc_direct *d = tagc_direct_of(r);
    int is_own = t == r->world_size - 1, n_out = is_own                    ? d->travel.n_parcels
                                                 : d->travel.n_parcels > 1 ? t / d->travel.parcel
                                                                           : 0;
    if (d->travel.is_small) return TAGC_OK;
    while (d->step.n_parcels_out < n_out && tagc_message_done(r, header_of(d, d->step.n_parcels_out)))
        TAGC_TRY(post_bodies(r, d->step.n_parcels_out));
    return TAGC_OK;
}

/* The next turn may post headers and, if bodies are long, those of earlier turns. */
static tagc_pause wait_to_encode(const tagc_reducer *r, tagc_message *awaited) {
    const tagc_direct *d = tagc_direct_of(r);
    int is_own = d->step.n_encoded == r->world_size - 1;
    int posts_bodies = d->travel.n_parcels > 1 || (is_own && !d->travel.is_small);
    return (tagc_pause){0, awaited, awaited != NULL,
                        is_own && posts_bodies ? TAGC_ROUND_BODIES : TAGC_ROUND_HEADERS,
                        posts_bodies ? TAGC_ROUND_BODIES : TAGC_ROUND_HEADERS};
}

tagc_status tagc_fragments_encode(tagc_reducer *r, tagc_pause *wait) {
    tagc_direct *d = tagc_direct_of(r);
    while (d->step.n_encoded < r->world_size) {
        int t = d->step.n_encoded, p = t < r->world_size - 1 ? t / d->travel.parcel : d->travel.n_parcels;
        TAGC_TRY(make_room(r, t));
        tagc_message *message = needed(r, t);
        if (message) {
            *wait = wait_to_encode(r, message);
            return TAGC_OK;
        }
        if (p < d->travel.n_parcels && p >= d->travel.window)
            TAGC_TRY(tagc_message_wait(r, body_of(d, p))); /* it is done */
        if (t < r->world_size - 1 || !tagc_direct_has_results(r)) encode(r, t);
        d->step.n_encoded++;
        if (p == d->travel.n_parcels || d->step.n_encoded < parcel_end(r, p)) continue;
        post_headers(r, p);
        if (d->travel.is_small) continue;
        *wait = wait_to_encode(r, NULL); /* older steps may have something to do */
        return TAGC_OK;
    }
    int is_waiting = d->step.n_parcels_out < d->travel.n_parcels;
    *wait = (tagc_pause){1, is_waiting ? header_of(d, d->step.n_parcels_out) : NULL, is_waiting,
                         TAGC_ROUND_BODIES, TAGC_ROUND_BODIES};
    return TAGC_OK;
}

/* The message that completes the body from a rank. NULL if it came before its memory was used again, and for the own one. */
static tagc_message *message_from(const tagc_reducer *r, int from) {
    const tagc_direct *d = tagc_direct_of(r);
    if (from == r->rank) return NULL;
    int p = tagc_partner_step(r, from) / d->travel.parcel;
    return p + d->travel.window < d->travel.n_parcels ? NULL : body_of(d, p);
}

/* The body from a rank; without bytes if it does not count. */
static tagc_body body_from(tagc_reducer *r, int from) {
    const tagc_direct *d = tagc_direct_of(r);
    if (from != r->rank) return sound_body(r, from, &d->fragment);
    if (tagc_direct_has_results(r)) {
        tagc_direct_fill_row(r, from);
        return tagc_own_body(r);
    }
    const tagc_fragment *own = &d->sent[own_row_out(d)];
    if (own->is_void) return (tagc_body){0};
    const char *row = tagc_direct_row_out(r, r->world_size - 1);
    return (tagc_body){.bytes = (const uint8_t *)row + TAGC_WIRE_HEADER_BYTES, .n_bytes = own->n_bytes};
}

static tagc_pause wait_to_add(const tagc_reducer *r, int is_done, tagc_message *awaited) {
    int round = tagc_direct_round_after_sums(r);
    return (tagc_pause){is_done, awaited, awaited != NULL, round, round};
}

/* Of the bodies to be added next, the first that is not here: of one, or where a call costs much, of all. */
static tagc_message *first_missing(const tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    int end = r->runner->is_ahead ? r->world_size : d->step.n_added + 1;
    for (int from = d->step.n_added; from < end; from++) {
        tagc_message *message = message_from(r, from);
        if (message && !tagc_message_done(r, message)) return message;
    }
    return NULL;
}

/* In the order of ranks, whatever the order of arrival, as many at once as have arrived. The own fragment is decoded, too; with
 * results, it is plain. */
tagc_status tagc_fragments_add(tagc_reducer *r, tagc_pause *wait) {
    tagc_direct *d = tagc_direct_of(r);
    while (d->step.n_added < r->world_size) {
        tagc_message *missing = first_missing(r);
        if (missing) {
            *wait = wait_to_add(r, 0, missing);
            return TAGC_OK;
        }
        int first = d->step.n_added;
        double start_s = tagc_clock_s();
        for (; d->step.n_added < r->world_size; d->step.n_added++) {
            tagc_message *message = message_from(r, d->step.n_added);
            if (message && !tagc_message_done(r, message)) break;
            if (message) TAGC_TRY(tagc_message_wait(r, message));
            d->bodies[d->step.n_added] = body_from(r, d->step.n_added);
        }
        r->runner->add(r, first, d->step.n_added);
        tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    }
    wait->is_done = 1;
    return TAGC_OK;
}

/* Bodies follow their headers. */
tagc_status tagc_fragments_send(tagc_reducer *r, tagc_pause *wait) {
    tagc_direct *d = tagc_direct_of(r);
    while (d->step.n_parcels_out < d->travel.n_parcels) {
        tagc_message *header = header_of(d, d->step.n_parcels_out);
        if (!tagc_message_done(r, header)) {
            *wait = (tagc_pause){0, header, 1, TAGC_ROUND_BODIES, TAGC_ROUND_BODIES};
            return TAGC_OK;
        }
        TAGC_TRY(post_bodies(r, d->step.n_parcels_out));
    }
    *wait = wait_to_add(r, 1, message_from(r, 0));
    return TAGC_OK;
}

void tagc_fragments_end(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    for (void *next; d->step.discarded; d->step.discarded = next) {
        memcpy(&next, d->step.discarded, sizeof next);
        tagc_memory_destroy(d->step.discarded);
    }
}

/* ---- all-reduce: owners encode their sums, and all ranks decode the same bodies, including the owner ----
 *
 * The sums are those of all ranks and of the owner's residual, not divided by W yet. So an owner encodes them exactly as every
 * rank encodes a fragment, and the residual of its own row takes what is not sent. */

/* Into the own row of the received ones. */
static void encode_sums(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    size_t own = (size_t)r->rank;
    char *row = d->recv + own * d->stride;
    tagc_encoded encoded = {0};
    double start_s = tagc_clock_s();
    if (r->now.failure == TAGC_OK && !r->now.stats.nonfinite) {
        r->runner->encode_sums(r, (uint8_t *)row + TAGC_WIRE_HEADER_BYTES, &encoded);
        r->now.stats.nonfinite |= encoded.nonfinite;
        if (!encoded.nonfinite) r->now.stats.n_sent += encoded.n_sent;
    }
    finish(r, &d->sums, row, &encoded, d->travel.eager[1], &d->received[own]);
    tagc_direct_note_length(r, 1, d->received[own].n_bytes);
    tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
}

void tagc_results_decode(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    double start_s = tagc_clock_s();
    for (int from = 0; from < r->world_size; from++) {
        r->now.stats.n_returned += d->received[from].n_items;
        d->bodies[from] = sound_body(r, from, &d->sums);
    }
    r->runner->decode_sums(r);
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
}

/* Sends the own header and front to all others. */
tagc_message *tagc_results_send(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_message *message = &d->result_out[0];
    encode_sums(r);
    size_t n_bytes = TAGC_WIRE_HEADER_BYTES + d->travel.eager[1];
    uint64_t n_headers = (uint64_t)(r->world_size - 1) * TAGC_WIRE_HEADER_BYTES;
    tagc_message_clear(message);
    for (int peer = 0; peer < r->world_size; peer++) {
        if (peer == r->rank) continue;
        tagc_message_to(message, peer, n_bytes, (size_t)r->rank * d->stride);
        tagc_message_from(message, peer, n_bytes, (size_t)peer * d->stride);
    }
    tagc_message_post_parts(r, message, TAGC_ROUND_RESULTS, TAGC_LEG_RESULT, d->recv, d->recv,
                            TAGC_LEG_CONTROL, n_headers, n_headers);
    return message;
}

/* Receives the rest of every body whose front is here. */
tagc_status tagc_results_send_rest(tagc_reducer *r, tagc_message **out) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_message *message = *out = &d->result_out[1];
    size_t own = (size_t)r->rank, eager = d->travel.eager[1];
    uint64_t rest = rest_of(&d->received[own], eager);
    int n = 0;
    rests_in rests;
    for (int peer = 0; peer < r->world_size; peer++) {
        if (peer == r->rank) continue;
        d->step.senders[n++] = peer;
        TAGC_TRY(announced(r, peer, &d->sums));
    }
    TAGC_TRY(rests_begin(r, d->step.senders, n, eager, &rests));
    tagc_message_clear(message);
    for (int peer = 0; peer < r->world_size; peer++) {
        if (peer == r->rank) continue;
        tagc_message_to(message, peer, rest, own * d->stride + TAGC_WIRE_HEADER_BYTES + eager);
        rests_add(r, &rests, message, peer, eager);
    }
    tagc_message_post(r, message, TAGC_ROUND_RESULT_RESTS, TAGC_LEG_RESULT, d->recv, rests.to);
    return TAGC_OK;
}
