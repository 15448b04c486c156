/* Direct: every rank's own encoded fragments go straight to their owners, who decode and add.
 *
 * Ranks are counted over hosts: rank = host * per_host + local. With one rank per host a "host" is a rank. With more,
 * the ranks of a host first add what they have for one destination (hosts.c), and only that sum is encoded:
 *
 *   rank (h, l)  <- rows for hosts' ranks of local index l <-  its host's ranks      plain values
 *   rank (h, l)  -> fragment of the host's sum             ->  ranks (h', l)         encoded
 *
 * All-reduce (results.c): the owner encodes its sums and sends them back the same way.
 *
 * Only the encoder knows how long a body is. So a fragment travels as a header with the first `eager` bytes of its body, and
 * when both sides have it, as the rest. Small fragments fit into the first message; of large ones, and where the transport
 * has no lanes, eager is 0. Fragments travel in batches, one message per batch; small ones all in one. */
#ifndef TAGC_EXCHANGE_DIRECT_DIRECT_H
#define TAGC_EXCHANGE_DIRECT_DIRECT_H

#include "codec/code.h"
#include "exchange/reducer.h"

enum {
    TAGC_ROUND_ROWS,
    TAGC_ROUND_HEADERS,
    TAGC_ROUND_BODIES,
    TAGC_ROUND_RESULTS,
    TAGC_ROUND_DIRECT_AGREEMENT
};

/* A fragment as its header tells of it. */
typedef struct tagc_fragment {
    size_t n_bytes, index_bytes; /* the first index_bytes are positions */
    size_t n_items;
    uint64_t sum; /* checksum */
    int is_void; /* it does not count: its sender failed or is not finite, or its header is not what it should be */
} tagc_fragment;

typedef struct tagc_direct_on tagc_direct_on;       /* of device.c */
typedef struct tagc_direct_slots tagc_direct_slots; /* of slots.c */

typedef struct tagc_direct {
    tagc_direct_on *on;       /* with kernels, else NULL */
    tagc_direct_slots *slots; /* where the caller carries messages, else NULL */
    int n_hosts, per_host, host, local;
    int coded; /* 0: all ranks are of one host, and nothing is encoded */
    tagc_code_options fragment, sums;
    const tagc_code *fragment_code, *sums_code;
    /* How fragments travel. All ranks must come to the same. So it follows from what they agreed on when the reducer was
     * made, and from the last step that succeeded: the k of this rank may be another since. */
    int is_small; /* one batch, of which the front of every body travels with its header */
    int batch;    /* fragments per message */
    int n_batches;
    int n_slots; /* batches under way: as many as slots_bytes hold, so that waiting for a header costs less than moving
                           what is under way meanwhile; 4 at least */
    size_t slots_bytes; /* 0: the default */
    size_t eager[2];    /* bytes of a body, and of one of sums, that travel with its header; agreed */
    int has_agreed;
    size_t stride;   /* of a row: header, and a body of any length */
    size_t capacity; /* of a body in a row */
    size_t n_rows;   /* received: hosts, or ranks where results of other local indices come, too */

    tagc_message *header_out, *body_out; /* (n_slots) */
    tagc_message *result_out;            /* (2) headers, bodies */
    tagc_message *hand_out;              /* (2, n_hosts) headers, bodies; TAGC_OUTPUT_UNIT with hosts */
    char *send;                          /* (n_slots * batch + 1, stride); the last is the own host's */
    char *recv;                          /* (n_rows, stride) */
    tagc_fragment *sent;                 /* (n_slots * batch + 1) */
    tagc_fragment *received;             /* (n_rows,) */
    tagc_body *bodies;                   /* (hosts,) to be decoded together */
    void *scratch;

    /* the step under way */
    int n_encoded, n_batches_out; /* stages; batches whose bodies are under way */
    int n_added;                  /* hosts */
    size_t *rows;                 /* (n_rows) that a message brings */
    void *discarded; /* a list of blocks with bodies too long for their rows, of a step that fails */

    /* more than one rank per host */
    int n_row_slots;       /* stages under way within the host */
    int are_rows_together; /* all of them in one message */
    tagc_message *rows_in; /* (n_row_slots) */
    char *rows_send; /* (per_host, n_row_slots, shard) bf16; or fp32 together, else rows leave the gradient */
    char *rows_recv; /* (per_host, n_row_slots, shard) bf16, or fp32 */
    float *host_sum; /* (shard) */
} tagc_direct;

static inline tagc_direct *tagc_direct_of(const tagc_reducer *r) {
    return r->state;
}
/* The host that stage s sends to, and the one it receives from; the last stage is the own host's. */
static inline int tagc_host_to(const tagc_direct *d, int s) {
    return (d->host + 1 + s) % d->n_hosts;
}
static inline int tagc_host_from(const tagc_direct *d, int s) {
    return (d->host + 2 * d->n_hosts - 1 - s) % d->n_hosts;
}
static inline int tagc_rank_of(const tagc_direct *d, int host, int local) {
    return host * d->per_host + local;
}
/* Row of the unit that the rank `local` of `host` owns. */
size_t tagc_direct_row(const tagc_reducer *r, int host, int local);
/* Where the sums of the own row stand. */
float *tagc_direct_sums(const tagc_reducer *r);

/* ---- fragments.c ---- */

void tagc_fragments_place(tagc_reducer *r, tagc_arena *arena);
/* A phase: sends all fragments and adds those that come, up to tagc_direct_added. */
tagc_status tagc_fragments_send(tagc_reducer *r);

/* Writes the header of a body that stands behind it, and zeros where the message ends before `eager` bytes of it. */
void tagc_fragment_finish(tagc_reducer *r, char *row, const tagc_encoded *encoded, size_t eager,
                          tagc_fragment *out);
/* The header in row `row` as sent by `from`. One that can be read but is not what it should be is noted, and its body void;
 * after another the comm is broken, since nobody knows what follows. */
tagc_status tagc_fragment_announced(tagc_reducer *r, size_t row, int from, const tagc_code *code,
                                    const tagc_code_options *options);
/* Bytes that follow the first message. */
static inline uint64_t tagc_fragment_rest(const tagc_fragment *fragment, size_t eager) {
    return fragment->n_bytes > eager ? fragment->n_bytes - eager : 0;
}
/* Where the rests of announced bodies go that one message brings. */
typedef struct tagc_rests {
    char *to;         /* `recv` of the message */
    int is_packed;    /* one after the other, in memory of their own that nobody reads; else in their rows */
    uint64_t n_bytes; /* of those added so far */
    uint64_t index_bytes; /* of these, positions */
} tagc_rests;
/* For `rows` (n): in their place, unless one is too long for that. */
tagc_status tagc_rests_begin(tagc_reducer *r, const size_t *rows, int n, size_t eager, tagc_rests *out);
/* The rest of row `row` comes from `rank` in the message. */
void tagc_rests_add(const tagc_reducer *r, tagc_rests *rests, tagc_message *message, int rank, size_t row,
                    size_t eager);
/* Of the rest of a fragment, positions. */
static inline uint64_t tagc_rest_index(const tagc_fragment *fragment, size_t eager) {
    return fragment->index_bytes > eager ? fragment->index_bytes - eager : 0;
}
/* Nothing of the step is under way any more. */
void tagc_fragments_end(tagc_reducer *r);
/* 1 when the body in row `row` can be decoded; what is wrong with it is noted. */
int tagc_fragment_is_sound(tagc_reducer *r, size_t row, int from, const tagc_code *code,
                           const tagc_code_options *options);
/* Row `row` of what arrived, as the codes take it. */
tagc_body tagc_fragment_body(const tagc_reducer *r, size_t row);

/* Where the fragment of stage s leaves from, and the stage after the last one of batch b. */
char *tagc_direct_row_out(const tagc_direct *d, int s);
int tagc_direct_batch_end(const tagc_direct *d, int b);

/* ---- device.c: what codes do where r->kernels are; failures are noted ---- */

tagc_status tagc_direct_make_on(tagc_reducer *r);
void tagc_direct_end_on(tagc_reducer *r);
/* Of stage s; the body stands in its row, unless it is the own one, which stays on the device. */
void tagc_on_encode(tagc_reducer *r, int s, tagc_encoded *out);
/* The first n of d->bodies, which are all there are. */
void tagc_on_add(tagc_reducer *r, int n);
void tagc_on_encode_sums(tagc_reducer *r, uint8_t *body, tagc_encoded *out);
/* bodies (hosts): bytes NULL where nothing counts; the own one is not looked at. */
void tagc_on_decode_sums(tagc_reducer *r, const tagc_body *bodies);

/* ---- slots.c: what tagc/slots.h needs of a reducer ---- */

tagc_status tagc_direct_make_slots(tagc_reducer *r);
void tagc_direct_end_slots(tagc_reducer *r);

/* ---- lengths.c ---- */

/* Bytes of a body whose elements are kept with one chance each, on average: positions, and values. */
typedef struct tagc_body_bytes {
    double index, values;
} tagc_body_bytes;
tagc_body_bytes tagc_expected_body(const tagc_code_options *options, double density);

/* Of bodies that took n_bytes in the step before, and can take `most`. */
size_t tagc_eager_bytes(double n_bytes, size_t most);
/* d->eager for the first step; later ones go by what _choose_eager found. */
void tagc_direct_guess_eager(tagc_reducer *r);
/* This rank sends a body, or where i is 1 one of sums, of so many bytes. */
void tagc_direct_note_length(tagc_reducer *r, int i, size_t n_bytes);
/* d->eager, from the longest bodies of a step that succeeded. */
void tagc_direct_choose_eager(tagc_reducer *r);

/* ---- hosts.c ---- */

void tagc_hosts_shape(tagc_reducer *r);
void tagc_hosts_place(tagc_reducer *r, tagc_arena *arena);
/* Rows of the first stages. */
void tagc_hosts_post_first(tagc_reducer *r);
/* Of stage s: what its rows come in. */
tagc_message *tagc_hosts_rows(const tagc_reducer *r, int s);
/* The host's sum for stage s, whose rows are here, in host_sum. Posts a stage after it. */
tagc_status tagc_hosts_add(tagc_reducer *r, int s);
/* A phase: all of a step where all ranks are of one host and rows are here, up to tagc_direct_agree. */
tagc_status tagc_hosts_step(tagc_reducer *r);

/* ---- direct.c, results.c, volume.c ---- */

/* Sums stand in the output: results where they are asked for, then the agreement. */
tagc_status tagc_direct_added(tagc_reducer *r);
tagc_status tagc_direct_agree(tagc_reducer *r);
/* A phase: sums to all who want them, and theirs back, up to tagc_direct_agree. */
tagc_status tagc_direct_results(tagc_reducer *r);
tagc_status tagc_direct_volume(tagc_reducer *r, const tagc_volume_data *data, tagc_volume *out);

#endif
