/* Encodes fragments and sends them batch by batch; receives, checks, decodes and adds them in rank order. */
#include "core/clock.h"
#include "exchange/direct/direct.h"

#include <string.h>

enum {
    SMALL_UNIT = 1 << 20,  /* elements; up to this size a unit's fragments are one batch */
    BATCH_ELEMS = 1 << 17, /* elements of a batch of larger units, at least */
    LEAST_SLOTS = 4,
    MARGIN = 64 /* bytes by which a body may exceed any valid size, so that it can be received and refused */
};
static const size_t slots_bytes = (size_t)64 << 20;

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

/* ---- shapes ---- */

static int has_lanes(const tagc_reducer *r) {
    return !r->comm || tagc_comm_has_lanes(r->comm);
}

static int fits(const tagc_reducer *r) {
    return (uint64_t)tagc_direct_of(r)->n_hosts * r->shard <= SMALL_UNIT;
}

/* From nothing that ranks may differ in. */
static void choose_batches(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    int n_partners = d->n_hosts - 1;
    size_t n = (BATCH_ELEMS + r->shard - 1) / r->shard;
    d->batch = fits(r) || !has_lanes(r) || n >= (size_t)n_partners ? n_partners : (int)n;
    d->n_batches = n_partners ? (n_partners + d->batch - 1) / d->batch : 0;
    if (!d->slots_bytes) d->slots_bytes = slots_bytes;
    size_t n_slots = d->slots_bytes / d->stride / (size_t)(d->batch ? d->batch : 1);
    if (n_slots < LEAST_SLOTS) n_slots = LEAST_SLOTS;
    d->n_slots = n_slots < (size_t)d->n_batches ? (int)n_slots : d->n_batches;
}

static size_t own_slot(const tagc_direct *d) {
    return (size_t)d->n_slots * (size_t)d->batch;
}

void tagc_fragments_place(tagc_reducer *r, tagc_arena *arena) {
    tagc_direct *d = tagc_direct_of(r);
    int n_threads = r->options.n_threads, is_all = r->options.output != TAGC_OUTPUT_SHARD;
    const tagc_code *code = d->fragment_code, *sums_code = d->sums_code;
    int n_handed = r->options.output == TAGC_OUTPUT_UNIT && d->per_host > 1 ? 2 * d->n_hosts : 0;
    size_t scratch = code->scratch_bytes(&d->fragment, n_threads);
    d->capacity = code->max_bytes(&d->fragment) + MARGIN;
    if (is_all) {
        scratch = larger(scratch, sums_code->scratch_bytes(&d->sums, n_threads));
        d->capacity = larger(d->capacity, sums_code->max_bytes(&d->sums) + MARGIN);
    }
    d->is_small = fits(r) && has_lanes(r);
    tagc_direct_guess_eager(r);
    d->stride = tagc_aligned(TAGC_WIRE_HEADER_BYTES + larger(d->capacity, larger(d->eager[0], d->eager[1])));
    d->n_rows = (size_t)(r->options.output == TAGC_OUTPUT_UNIT ? r->world_size : d->n_hosts);
    choose_batches(r);
    tagc_room rooms[] = {{2 * d->n_slots, d->batch},
                         {2, r->world_size - 1},
                         {n_handed, d->per_host - 1},
                         {d->n_row_slots, d->per_host - 1}};
    tagc_messages_place(r, arena, rooms, 4);
    if (r->messages) {
        d->header_out = r->messages;
        d->body_out = d->header_out + d->n_slots;
        d->result_out = d->body_out + d->n_slots;
        d->hand_out = d->result_out + 2;
        d->rows_in = d->hand_out + n_handed;
    }
    if (!d->coded || tagc_reducer_is_by_caller(r)) return;
    d->scratch = tagc_arena_take(arena, r->beside ? 0 : scratch, 1);
    d->send = tagc_arena_take(arena, own_slot(d) + 1, d->stride);
    d->recv = tagc_arena_take(arena, d->n_rows, d->stride);
    d->sent = tagc_arena_take(arena, own_slot(d) + 1, sizeof *d->sent);
    d->received = tagc_arena_take(arena, d->n_rows, sizeof *d->received);
    d->bodies = tagc_arena_take(arena, (size_t)d->n_hosts, sizeof *d->bodies);
    d->rows = tagc_arena_take(arena, d->n_rows, sizeof *d->rows);
}

/* ---- out ---- */

static size_t slot_of(const tagc_direct *d, int s) {
    return s == d->n_hosts - 1 ? own_slot(d) : (size_t)s % own_slot(d);
}

char *tagc_direct_row_out(const tagc_direct *d, int s) {
    return d->send + slot_of(d, s) * d->stride;
}

int tagc_direct_batch_end(const tagc_direct *d, int b) {
    int end = (b + 1) * d->batch;
    return end < d->n_hosts - 1 ? end : d->n_hosts - 1;
}

static tagc_message *header_of(const tagc_direct *d, int b) {
    return &d->header_out[b % d->n_slots];
}

static tagc_message *body_of(const tagc_direct *d, int b) {
    return &d->body_out[b % d->n_slots];
}

void tagc_fragment_finish(tagc_reducer *r, char *row, const tagc_encoded *encoded, size_t eager,
                          tagc_fragment *out) {
    char *body = row + TAGC_WIRE_HEADER_BYTES;
    int is_void = r->now.stats.nonfinite || r->now.failure != TAGC_OK;
    size_t n_bytes = is_void ? 0 : encoded->n_bytes;
    *out = (tagc_fragment){.n_bytes = n_bytes,
                           .index_bytes = is_void ? 0 : encoded->n_index_bytes,
                           .n_items = is_void ? 0 : encoded->n_kept,
                           .sum = tagc_wire_sum(body, n_bytes),
                           .is_void = is_void};
    tagc_wire_header header = {.kind = TAGC_WIRE_FRAGMENT,
                               .coding = r->options.format,
                               .flags = (r->now.stats.nonfinite ? TAGC_WIRE_FLAG_NONFINITE : 0) |
                                        (r->now.failure != TAGC_OK ? TAGC_WIRE_FLAG_FAILED : 0),
                               .rank = (uint32_t)r->rank,
                               .k = (uint32_t)r->k,
                               .n_elems = r->shard,
                               .n_items = (uint32_t)out->n_items,
                               .body_sum = out->sum,
                               .index_bytes = (uint32_t)out->index_bytes,
                               .body_bytes = n_bytes,
                               .step = r->now.number};
    tagc_wire_write(&header, row);
    if (n_bytes < eager) memset(body + n_bytes, 0, eager - n_bytes);
}

/* After a failure, or if something is not finite, this rank sends empty bodies. */
static void encode(tagc_reducer *r, int s) {
    tagc_direct *d = tagc_direct_of(r);
    int host = tagc_host_to(d, s);
    size_t slot = slot_of(d, s), row = (size_t)host * r->shard;
    const tagc_code_options *o = &d->fragment;
    char *to = d->send + slot * d->stride;
    const float *gradient =
        d->per_host > 1 ? d->host_sum : r->now.gradient + tagc_direct_row(r, host, d->local) * r->shard;
    tagc_encoded encoded = {0};
    double start_s = tagc_clock_s();
    if (r->now.failure == TAGC_OK && !r->now.stats.nonfinite) {
        if (r->beside)
            r->beside->encode(r, s, &encoded);
        else
            d->fragment_code->encode(o, gradient, r->residual ? r->residual + row : NULL,
                                     r->residual ? r->now.residual + row : NULL,
                                     (uint8_t *)to + TAGC_WIRE_HEADER_BYTES, d->scratch, r->pool, &encoded);
        r->now.stats.nonfinite |= encoded.nonfinite;
        if (!encoded.nonfinite) r->now.stats.n_kept += encoded.n_kept;
    }
    start_s = tagc_phase_end(r, o->sparse ? TAGC_PHASE_SELECT : TAGC_PHASE_ENCODE, start_s);
    tagc_fragment_finish(r, to, &encoded, d->eager[0], &d->sent[slot]);
    if (s < d->n_hosts - 1) tagc_direct_note_length(r, 0, d->sent[slot].n_bytes);
    tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
}

static void post_headers(tagc_reducer *r, int b) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_message *message = header_of(d, b);
    size_t n_bytes = TAGC_WIRE_HEADER_BYTES + d->eager[0];
    uint64_t n_headers = (uint64_t)(tagc_direct_batch_end(d, b) - b * d->batch) * TAGC_WIRE_HEADER_BYTES;
    tagc_message_clear(message);
    if (tagc_direct_batch_end(d, b) - b * d->batch == r->world_size - 1) message->round_bytes = n_bytes;
    for (int s = b * d->batch; s < tagc_direct_batch_end(d, b); s++) {
        int to = tagc_host_to(d, s), from = tagc_host_from(d, s);
        tagc_message_to(message, tagc_rank_of(d, to, d->local), n_bytes, slot_of(d, s) * d->stride);
        tagc_message_from(message, tagc_rank_of(d, from, d->local), n_bytes, (size_t)from * d->stride);
    }
    tagc_message_post_parts(r, message, TAGC_ROUND_HEADERS, TAGC_LEG_VALUES, d->send, d->recv,
                            TAGC_LEG_CONTROL, n_headers, n_headers);
}

/* ---- headers in ---- */

/* Its fields that the receiver knows in advance. */
static tagc_status check_header(const tagc_reducer *r, const tagc_wire_header *header, int from,
                                const tagc_code_options *options) {
    tagc_wire_header expected = {.kind = TAGC_WIRE_FRAGMENT,
                                 .coding = r->options.format,
                                 .rank = (uint32_t)from,
                                 .k = (uint32_t)r->k,
                                 .n_elems = r->shard,
                                 .step = r->now.number};
    TAGC_TRY(tagc_wire_expect(header, &expected));
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

/* The longest body that any sparsity makes. */
static size_t longest_body(const tagc_code_options *options) {
    tagc_code_options o = *options;
    o.k = o.n;
    o.sparse = 1;
    size_t n_bytes = tagc_code_of(&o)->max_bytes(&o);
    o.sparse = 0;
    return larger(n_bytes, tagc_code_of(&o)->max_bytes(&o));
}

tagc_status tagc_fragment_announced(tagc_reducer *r, size_t row, int from, const tagc_code_options *options) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_wire_header header;
    tagc_status status = tagc_wire_read(d->recv + row * d->stride, TAGC_WIRE_HEADER_BYTES, &header);
    if (status == TAGC_OK && header.kind != TAGC_WIRE_FRAGMENT)
        status =
            tagc_fail(TAGC_ERR_CORRUPT, "message kind is %d, expected %d", header.kind, TAGC_WIRE_FRAGMENT);
    size_t most = larger(longest_body(options), d->capacity);
    if (status == TAGC_OK && header.body_bytes > most)
        status = tagc_fail(TAGC_ERR_CORRUPT, "%llu bytes follow, at most %zu can be",
                           (unsigned long long)header.body_bytes, most);
    if (status != TAGC_OK) {
        /* Only the sender knows the length of the body that it will send, and this rank cannot stop it before. */
        status = tagc_fail_in(TAGC_ERR_TRANSPORT, "header of the fragment from rank %d", from);
        tagc_comm_abort(r->comm, tagc_last_error());
        return status;
    }
    status = check_header(r, &header, from, options);
    size_t longest = tagc_direct_code(d, options)->max_bytes(options);
    if (status == TAGC_OK && header.body_bytes > longest)
        status = tagc_fail(TAGC_ERR_CORRUPT, "%llu bytes follow, at most %zu can be",
                           (unsigned long long)header.body_bytes, longest);
    if (status != TAGC_OK)
        tagc_note_failure(r, tagc_fail_in(status, "header of the fragment from rank %d", from));
    r->now.stats.nonfinite |= header.flags & TAGC_WIRE_FLAG_NONFINITE;
    d->received[row] = (tagc_fragment){.n_bytes = header.body_bytes,
                                       .index_bytes = header.index_bytes,
                                       .n_items = header.n_items,
                                       .sum = header.body_sum,
                                       .is_void = header.flags != 0 || status != TAGC_OK};
    return TAGC_OK;
}

/* ---- the rest of bodies ---- */

/* A body is too long if its sender has another sparsity. The step will fail on all ranks, after everything that was sent has
 * been received. */
tagc_status tagc_rests_begin(tagc_reducer *r, const size_t *rows, int n, size_t eager, tagc_rests *out) {
    tagc_direct *d = tagc_direct_of(r);
    uint64_t n_bytes = sizeof(void *);
    *out = (tagc_rests){.to = d->recv};
    for (int i = 0; i < n; i++) {
        n_bytes += tagc_fragment_rest(&d->received[rows[i]], eager);
        out->is_packed |= d->received[rows[i]].n_bytes > d->capacity;
    }
    if (!out->is_packed) return TAGC_OK;
    void *block;
    tagc_status status = tagc_memory_create((size_t)n_bytes, "bodies of another sparsity", &block);
    if (status != TAGC_OK) {
        tagc_comm_abort(r->comm, tagc_last_error());
        return status;
    }
    memcpy(block, &d->discarded, sizeof d->discarded);
    d->discarded = block;
    out->to = (char *)block + sizeof(void *);
    return TAGC_OK;
}

void tagc_rests_add(const tagc_reducer *r, tagc_rests *rests, tagc_message *message, int rank, size_t row,
                    size_t eager) {
    const tagc_direct *d = tagc_direct_of(r);
    const tagc_fragment *in = &d->received[row];
    uint64_t n_bytes = tagc_fragment_rest(in, eager);
    tagc_message_from(message, rank, n_bytes,
                      rests->is_packed ? rests->n_bytes : row * d->stride + TAGC_WIRE_HEADER_BYTES + eager);
    rests->n_bytes += n_bytes;
    rests->index_bytes += tagc_rest_index(in, eager);
}

void tagc_fragments_end(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    for (void *next; d->discarded; d->discarded = next) {
        memcpy(&next, d->discarded, sizeof next);
        tagc_memory_destroy(d->discarded);
    }
}

/* The headers of batch b are here. */
static tagc_status post_bodies(tagc_reducer *r, int b) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_message *message = body_of(d, b);
    size_t eager = d->eager[0];
    int n = 0;
    TAGC_TRY(tagc_message_wait(r, header_of(d, b)));
    for (int s = b * d->batch; s < tagc_direct_batch_end(d, b); s++) {
        int from = tagc_host_from(d, s);
        d->rows[n++] = (size_t)from;
        TAGC_TRY(tagc_fragment_announced(r, (size_t)from, tagc_rank_of(d, from, d->local), &d->fragment));
    }
    tagc_rests rests;
    uint64_t index_sent = 0, front_sent = 0, front_received = 0; /* positions */
    TAGC_TRY(tagc_rests_begin(r, d->rows, n, eager, &rests));
    tagc_message_clear(message);
    for (int s = b * d->batch; s < tagc_direct_batch_end(d, b); s++) {
        const tagc_fragment *out = &d->sent[slot_of(d, s)];
        size_t from = (size_t)tagc_host_from(d, s);
        tagc_message_to(message, tagc_rank_of(d, tagc_host_to(d, s), d->local),
                        tagc_fragment_rest(out, eager),
                        slot_of(d, s) * d->stride + TAGC_WIRE_HEADER_BYTES + eager);
        tagc_rests_add(r, &rests, message, tagc_rank_of(d, (int)from, d->local), from, eager);
        index_sent += tagc_rest_index(out, eager);
        front_sent += out->index_bytes - tagc_rest_index(out, eager);
        front_received += d->received[from].index_bytes - tagc_rest_index(&d->received[from], eager);
    }
    tagc_messages_recount(r, TAGC_LEG_VALUES, TAGC_LEG_INDEX, front_sent, front_received);
    tagc_message_post_parts(r, message, TAGC_ROUND_BODIES, TAGC_LEG_VALUES, d->send, rests.to, TAGC_LEG_INDEX,
                            index_sent, rests.index_bytes);
    d->n_batches_out = b + 1;
    return TAGC_OK;
}

/* ---- fragments in ---- */

tagc_body tagc_fragment_body(const tagc_reducer *r, size_t row) {
    const tagc_direct *d = tagc_direct_of(r);
    return (tagc_body){(const uint8_t *)d->recv + row * d->stride + TAGC_WIRE_HEADER_BYTES,
                       d->received[row].n_bytes};
}

int tagc_fragment_is_sound(tagc_reducer *r, size_t row, int from, const tagc_code_options *options) {
    const tagc_direct *d = tagc_direct_of(r);
    const tagc_fragment *f = &d->received[row];
    if (r->now.failure != TAGC_OK || r->now.stats.nonfinite || f->is_void) return 0;
    tagc_body body = tagc_fragment_body(r, row);
    tagc_status status = TAGC_OK;
    if (tagc_wire_sum(body.bytes, body.n_bytes) != f->sum)
        status = tagc_fail(TAGC_ERR_CORRUPT, "the checksum is wrong");
    if (status == TAGC_OK) status = tagc_direct_code(d, options)->validate(options, body.bytes, body.n_bytes);
    if (status != TAGC_OK) tagc_note_failure(r, tagc_fail_in(status, "fragment from rank %d", from));
    return status == TAGC_OK;
}

/* The message that completes the body from `host`. NULL if it came before its slot was reused, and for the own host. */
static tagc_message *message_from(const tagc_direct *d, int host) {
    if (host == d->host) return NULL;
    int b = (d->host + d->n_hosts - 1 - host) % d->n_hosts /
            d->batch; /* of the stage with tagc_host_from == host */
    return b + d->n_slots < d->n_batches ? NULL : body_of(d, b);
}

/* Appends the body from `host` to the n bodies to decode; returns the new number. */
static int take_body(tagc_reducer *r, int host, int n) {
    tagc_direct *d = tagc_direct_of(r);
    if (host == d->host) {
        const tagc_fragment *own = &d->sent[own_slot(d)];
        const char *row = d->send + own_slot(d) * d->stride;
        d->bodies[n] = (tagc_body){(const uint8_t *)row + TAGC_WIRE_HEADER_BYTES, own->n_bytes};
        return own->is_void ? n : n + 1;
    }
    if (!tagc_fragment_is_sound(r, (size_t)host, tagc_rank_of(d, host, d->local), &d->fragment)) return n;
    d->bodies[n] = tagc_fragment_body(r, (size_t)host);
    return n + 1;
}

static int round_after_bodies(const tagc_reducer *r) {
    return r->options.output != TAGC_OUTPUT_SHARD ? TAGC_ROUND_RESULTS : TAGC_ROUND_DIRECT_AGREEMENT;
}

/* The messages still to come. On a device all bodies are added at once, which is cheaper there than one call per body. */
static tagc_message *first_missing(const tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    for (int host = d->n_added; host < d->n_hosts; host++) {
        tagc_message *message = message_from(d, host);
        if (message && !tagc_message_done(r, message)) return message;
    }
    return NULL;
}

/* Adds in the order of hosts, whatever the order of arrival, as many at once as have arrived. The own fragment is decoded, too. */
static tagc_status add_fragments(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    while (d->n_added < d->n_hosts) {
        int n = 0, is_more = d->n_added > 0;
        double start_s = tagc_clock_s();
        tagc_message *missing = r->beside ? first_missing(r) : NULL;
        if (missing) {
            tagc_then(r, add_fragments, missing, 1, round_after_bodies(r), TAGC_ROUND_DIRECT_AGREEMENT);
            return TAGC_OK;
        }
        for (; d->n_added < d->n_hosts; d->n_added++) {
            tagc_message *message = message_from(d, d->n_added);
            if (message && !tagc_message_done(r, message)) break;
            if (message) TAGC_TRY(tagc_message_wait(r, message));
            n = take_body(r, d->n_added, n);
        }
        if (r->beside)
            r->beside->add(r, n);
        else
            r->now.stats.nonfinite |= d->fragment_code->decode(&d->fragment, d->bodies, n, is_more, r->scale,
                                                               tagc_direct_sums(r), d->scratch, r->pool);
        tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
        if (d->n_added == d->n_hosts) break;
        tagc_message *message = message_from(d, d->n_added);
        if (tagc_message_done(r, message)) continue;
        tagc_then(r, add_fragments, message, 1, round_after_bodies(r), TAGC_ROUND_DIRECT_AGREEMENT);
        return TAGC_OK;
    }
    return tagc_direct_added(r);
}

/* Bodies follow their headers. */
static tagc_status send_bodies(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    while (d->n_batches_out < d->n_batches) {
        tagc_message *header = header_of(d, d->n_batches_out);
        if (!tagc_message_done(r, header)) {
            tagc_then(r, send_bodies, header, 1, TAGC_ROUND_BODIES, TAGC_ROUND_BODIES);
            return TAGC_OK;
        }
        TAGC_TRY(post_bodies(r, d->n_batches_out));
    }
    tagc_message *first = message_from(d, 0);
    tagc_then(r, add_fragments, first, first != NULL, round_after_bodies(r), TAGC_ROUND_DIRECT_AGREEMENT);
    return TAGC_OK;
}

/* The message that stage s has to wait for before it is encoded: the rows of this host, or a slot that an older batch uses. NULL:
 * none. */
static tagc_message *needed(const tagc_reducer *r, int s) {
    const tagc_direct *d = tagc_direct_of(r);
    tagc_message *message = d->per_host > 1 ? tagc_hosts_rows(r, s) : NULL;
    if (message && !tagc_message_done(r, message)) return message;
    /* No rank waits for the own fragment, so long bodies are sent first. */
    if (s == d->n_hosts - 1 && !d->is_small && d->n_batches_out < d->n_batches)
        return header_of(d, d->n_batches_out);
    int is_first = s < d->n_hosts - 1 && s % d->batch == 0, older = is_first ? s / d->batch - d->n_slots : -1;
    if (older < 0) return NULL;
    /* Its bodies are sent after the wait for its header, even if that has arrived by now. */
    if (d->n_batches_out <= older) return header_of(d, d->n_batches_out);
    message = body_of(d, older);
    return tagc_message_done(r, message) ? NULL : message;
}

/* Sends the bodies that can be sent, and frees a slot for stage s. */
static tagc_status make_room(tagc_reducer *r, int s) {
    tagc_direct *d = tagc_direct_of(r);
    int is_own = s == d->n_hosts - 1, n_out = is_own ? d->n_batches : d->n_batches > 1 ? s / d->batch : 0;
    if (d->is_small) return TAGC_OK;
    while (d->n_batches_out < n_out && tagc_message_done(r, header_of(d, d->n_batches_out)))
        TAGC_TRY(post_bodies(r, d->n_batches_out));
    return TAGC_OK;
}

/* Runs the next stage when the message has arrived. It may post rows, headers and, if bodies are long, those of earlier
 * stages. */
static void then_encode(tagc_reducer *r, tagc_message *awaited) {
    const tagc_direct *d = tagc_direct_of(r);
    int s = d->n_encoded, is_own = s == d->n_hosts - 1;
    int has_rows = d->per_host > 1 && s + d->n_row_slots < d->n_hosts;
    int posts_bodies = d->n_batches > 1 || (is_own && !d->is_small);
    int low = has_rows ? TAGC_ROUND_ROWS : is_own && posts_bodies ? TAGC_ROUND_BODIES : TAGC_ROUND_HEADERS;
    tagc_then(r, tagc_fragments_send, awaited, awaited != NULL, low,
              posts_bodies ? TAGC_ROUND_BODIES : TAGC_ROUND_HEADERS);
}

tagc_status tagc_fragments_send(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    while (d->n_encoded < d->n_hosts) {
        int s = d->n_encoded, b = s < d->n_hosts - 1 ? s / d->batch : d->n_batches;
        TAGC_TRY(make_room(r, s));
        tagc_message *message = needed(r, s);
        if (message) {
            then_encode(r, message);
            return TAGC_OK;
        }
        if (b < d->n_batches && b >= d->n_slots)
            TAGC_TRY(tagc_message_wait(r, body_of(d, b))); /* it is done */
        if (d->per_host > 1) TAGC_TRY(tagc_hosts_add(r, s));
        encode(r, s);
        d->n_encoded++;
        if (b == d->n_batches || d->n_encoded < tagc_direct_batch_end(d, b)) continue;
        post_headers(r, b);
        if (d->is_small) continue;
        then_encode(r, NULL); /* older steps may have something to do */
        return TAGC_OK;
    }
    int is_waiting = d->n_batches_out < d->n_batches;
    tagc_then(r, send_bodies, is_waiting ? header_of(d, d->n_batches_out) : NULL, is_waiting,
              TAGC_ROUND_BODIES, TAGC_ROUND_BODIES);
    return TAGC_OK;
}
