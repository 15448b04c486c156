/* Fragments that arrive: what their headers say, where the rest of a body goes, and whether it is sound. */
#include "exchange/direct/direct.h"

#include <string.h>

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

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

tagc_status tagc_fragment_announced(tagc_reducer *r, size_t row, int from, const tagc_code_options *options) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_wire_header header;
    tagc_status status = tagc_wire_read(d->recv + row * d->stride, TAGC_WIRE_HEADER_BYTES, &header);
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

/* ---- whole bodies ---- */

tagc_body tagc_fragment_body(tagc_reducer *r, size_t row, int from, const tagc_code_options *options) {
    const tagc_direct *d = tagc_direct_of(r);
    const tagc_fragment *f = &d->received[row];
    tagc_body body = {.bytes = (const uint8_t *)d->recv + row * d->stride + TAGC_WIRE_HEADER_BYTES,
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
