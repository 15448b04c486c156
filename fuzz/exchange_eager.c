/* What a rank of a direct exchange does with a message that holds a header and the front of a body, and with the rest that
 * follows: all of it, from the bytes that arrive to the end of the step. The other rank of two is this program. It echoes
 * what it gets, but for one message and its rest, which are the input's.
 *
 * Input: 1 byte (bits 0 and 1: the unit; bit 2: its sums instead of its fragment, where those travel; bits 3 and 4, how the
 * bytes become a message), 2 n_items, 2 index_bytes, 1 flags, then bytes. As a message:
 *   0  as they are, header and body
 *   1  a body, behind a header with those three fields and all others right
 *   2  added to the body that was sent to the other rank, behind its header with a right checksum
 *   3  the same with the checksum of the body as it was */
#include "../tests/lengths.h"
#include "../tests/residual.h"
#include "codec/code.h"
#include "exchange/direct/direct.h"
#include "exchange/wire.h"
#include "tagc/transport.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { HEAD = 6, N_UNITS = 4, SHARD = 4000, N_ELEMS = 2 * SHARD, MOST_BYTES = 1 << 16 };

static void require(int holds) {
    if (!holds) abort();
}

/* ---- the other rank ---- */

typedef enum attack_form { AS_IT_IS, WITH_HEADER, OVER_BODY, DAMAGED } attack_form;

typedef struct peer {
    int n_before; /* transfers until the one under attack; negative: none is */
    attack_form form;
    tagc_wire_header fields; /* n_items, index_bytes and flags */
    const uint8_t *bytes;
    size_t n_bytes;
    uint8_t
        message[TAGC_WIRE_HEADER_BYTES + MOST_BYTES]; /* what the input became: a header and a whole body */
    tagc_wire_header sent;
} peer;

/* Own message `mine` (n), as the other rank would send it. */
static void echo(const uint8_t *mine, size_t n_mine, uint8_t *to, size_t n) {
    tagc_wire_header header;
    memset(to, 0, n);
    memcpy(to, mine, n_mine < n ? n_mine : n);
    if (n < TAGC_WIRE_HEADER_BYTES || tagc_wire_read(to, TAGC_WIRE_HEADER_BYTES, &header) != TAGC_OK) return;
    header.rank = 1;
    tagc_wire_write(&header, to);
}

/* Makes the message of the input; `mine` is what this rank sends in the same place. */
static void make_message(peer *p, const uint8_t *mine, size_t n_mine) {
    uint8_t *body = p->message + TAGC_WIRE_HEADER_BYTES;
    memset(p->message, 0, sizeof p->message);
    require(tagc_wire_read(mine, TAGC_WIRE_HEADER_BYTES, &p->sent) == TAGC_OK);
    p->sent.rank = 1;
    if (p->form == AS_IT_IS) {
        memcpy(p->message, p->bytes, p->n_bytes);
        return;
    }
    if (p->form == WITH_HEADER) {
        memcpy(body, p->bytes, p->n_bytes);
        p->sent.n_items = p->fields.n_items;
        p->sent.index_bytes = p->fields.index_bytes;
        p->sent.flags = p->fields.flags;
        p->sent.body_bytes = p->n_bytes;
    } else { /* of a body that is longer than the message the rest is zero */
        memcpy(body, mine + TAGC_WIRE_HEADER_BYTES, n_mine - TAGC_WIRE_HEADER_BYTES);
        for (size_t i = 0; i < p->n_bytes && i < p->sent.body_bytes; i++)
            body[i] = (uint8_t)(body[i] + p->bytes[i]);
    }
    if (p->form != DAMAGED) p->sent.body_sum = tagc_wire_sum(body, p->sent.body_bytes);
    tagc_wire_write(&p->sent, p->message);
}

static tagc_status start(void *context, const tagc_transfer *t, void **request) {
    peer *p = context;
    const uint8_t *mine = t->n_sends ? (const uint8_t *)t->send + t->sends[0].offset : NULL;
    size_t n_mine = t->n_sends ? t->sends[0].n_bytes : 0, n = t->n_receives ? t->receives[0].n_bytes : 0;
    uint8_t *to = n ? (uint8_t *)t->recv + t->receives[0].offset : NULL;
    static size_t n_front; /* bytes of the message that went before its rest */
    *request = p;
    if (p->n_before == 0) {
        require(n >= TAGC_WIRE_HEADER_BYTES && n <= sizeof p->message);
        make_message(p, mine, n_mine);
        memcpy(to, p->message, n);
        n_front = n;
    } else if (p->n_before == -1) {
        require(n <= sizeof p->message - n_front);
        if (n) memcpy(to, p->message + n_front, n);
    } else if (n) {
        echo(mine, n_mine, to, n);
    }
    p->n_before--;
    return TAGC_OK;
}

static tagc_status test(void *context, void *request, tagc_progress *progress) {
    (void)context, (void)request;
    progress->done = 1;
    return TAGC_OK;
}

static void leave(void *context, const tagc_failure *failure) {
    (void)context, (void)failure;
}

static void destroy(void *context) {
    (void)context;
}

static const tagc_transport_ops ops = {.abi = TAGC_TRANSPORT_ABI,
                                       .capabilities = TAGC_TRANSPORT_LANES,
                                       .name = "fuzz",
                                       .start = start,
                                       .test = test,
                                       .cancel = leave,
                                       .abort = leave,
                                       .destroy = destroy};

/* ---- this rank ---- */

static const struct {
    double sparsity;
    int format, output;
} units[N_UNITS] = {{0.9, TAGC_FORMAT_INT4, TAGC_OUTPUT_SHARD},
                    {0.95, TAGC_FORMAT_FP32, TAGC_OUTPUT_SHARD},
                    {0, TAGC_FORMAT_INT8, TAGC_OUTPUT_UNIT},
                    {0.9, TAGC_FORMAT_INT2, TAGC_OUTPUT_UNIT}};

static peer other = {.n_before = -2};
static tagc_comm *comm;
static tagc_reducer *reducers[N_UNITS];
static float gradient[N_ELEMS], output[N_ELEMS];

/* Kept from input to input as long as the comm lives: making threads for each would be all that is measured. */
static void make(void) {
    if (comm) return;
    require(tagc_comm_create(&ops, &other, 0, 2, NULL, &comm) == TAGC_OK);
    for (int u = 0; u < N_UNITS; u++) {
        tagc_reducer_options options;
        tagc_reducer_options_init(&options);
        options.n_elems = N_ELEMS;
        options.exchange = TAGC_EXCHANGE_DIRECT;
        options.sparsity = units[u].sparsity;
        options.format = units[u].format;
        options.output = units[u].output;
        require(tagc_reducer_create(comm, &options, &reducers[u]) == TAGC_OK);
        require(tagc_direct_of(reducers[u])->travel.eager[0] > 0);
    }
    for (int i = 0; i < N_ELEMS; i++) {
        float x = (float)((i * 7919) % 1009 - 504) / 504.0f;
        gradient[i] = x * x * x;
    }
}

static void unmake(void) {
    for (int u = 0; u < N_UNITS; u++) tagc_reducer_destroy(reducers[u]);
    tagc_comm_destroy(comm);
    comm = NULL;
}

static tagc_status step(int unit) {
    tagc_reducer_stats stats;
    tagc_reducer_stats_init(&stats);
    require(begin_reducer(reducers[unit], gradient, output) == TAGC_OK);
    return tagc_reducer_end(reducers[unit], &stats);
}

/* Whether a message of the forms that have a header is what another rank could have sent. */
static int is_sound(int unit, int is_sums) {
    const tagc_direct *d = tagc_direct_of(reducers[unit]);
    const tagc_code *code = is_sums ? d->sums_code : d->fragment_code;
    const tagc_code_options *o = is_sums ? &d->sums : &d->fragment;
    const tagc_wire_header *h = &other.sent;
    const uint8_t *body = other.message + TAGC_WIRE_HEADER_BYTES;
    return h->body_bytes > 0 && h->body_bytes <= code->max_bytes(o) && h->n_items <= o->k &&
           h->index_bytes <= h->body_bytes && (o->sparse || h->index_bytes == 0) &&
           tagc_wire_sum(body, h->body_bytes) == h->body_sum &&
           code->validate(o, body, h->body_bytes) == TAGC_OK;
}

static void check(int unit, int is_sums, tagc_status status, const float *before, uint64_t n_residual) {
    float residual[N_ELEMS];
    residual_to(reducers[unit], residual);
    uint64_t n_out = units[unit].output == TAGC_OUTPUT_UNIT ? N_ELEMS : SHARD;
    require(status == TAGC_OK || status == TAGC_ERR_CORRUPT || status == TAGC_ERR_MISMATCH ||
            status == TAGC_ERR_TRANSPORT);
    if (other.form != AS_IT_IS && other.sent.flags == 0)
        require((status == TAGC_OK) == is_sound(unit, is_sums));
    if (status != TAGC_OK) {
        require(memcmp(before, residual, n_residual * sizeof *before) == 0);
        return;
    }
    for (uint64_t i = 0; i < n_residual; i++) require(isfinite(residual[i]));
    for (uint64_t i = 0; i < n_out; i++) require(isfinite(output[i]) || isnan(output[0]));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    static float before[N_ELEMS];
    if (n_bytes < HEAD || n_bytes - HEAD > MOST_BYTES) return 0;
    make();
    int unit = data[0] % N_UNITS, is_sums = (data[0] >> 2 & 1) && units[unit].output == TAGC_OUTPUT_UNIT;
    other.n_before = is_sums ? 2 : 0; /* header and front of fragments, their rest, the same of sums */
    other.form = (attack_form)(data[0] >> 3 & 3);
    other.fields = (tagc_wire_header){
        .n_items = data[1] * 256u + data[2], .index_bytes = data[3] * 256u + data[4], .flags = data[5]};
    other.bytes = data + HEAD;
    other.n_bytes = n_bytes - HEAD;
    uint64_t n_residual = residual_to(reducers[unit], before);
    tagc_status status = step(unit);
    check(unit, is_sums, status, before, n_residual);
    other.n_before = -2;
    if (status == TAGC_ERR_TRANSPORT || tagc_comm_failed_rank(comm) >= 0)
        unmake();
    else
        require(step(unit) == TAGC_OK); /* the comm lives on, and the other rank is honest again */
    return 0;
}
