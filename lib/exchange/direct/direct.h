/* The exchange direct: every rank sends its encoded fragments straight to their owners, which decode and add them.
 *
 * All-reduce: the owner adds its own row unrounded, encodes the sums as it would a fragment and sends them back in
 * the same way. What it does not send stays in the residual of its own row. So the own row is encoded once, after it was added.
 *
 * Only the encoder knows the length of a body. So a fragment travels as its header with the front of the body, the first `eager`
 * bytes, and then the rest, when both sides know its length. Small fragments fit into the front. For large ones, and on
 * transports without lanes, eager is 0. Fragments travel in parcels, one message per parcel; small ones are one parcel.
 *
 * Values that travel whole take another path (whole.c), which needs none of this.
 *
 * direct.c has the course of a step. The other files each do one part of it and return; batches.c has the calls of the codec. */
#ifndef TAGC_EXCHANGE_DIRECT_DIRECT_H
#define TAGC_EXCHANGE_DIRECT_DIRECT_H

#include "codec/code.h"
#include "exchange/direct/batches.h"
#include "exchange/reducer.h"

enum {
    TAGC_ROUND_HEADERS,
    TAGC_ROUND_BODIES,
    TAGC_ROUND_RESULTS,      /* headers and fronts of sums */
    TAGC_ROUND_RESULT_RESTS, /* their rests */
    TAGC_ROUND_DIRECT_AGREEMENT
};

/* A fragment as its header describes it. */
typedef struct tagc_fragment {
    size_t n_bytes, index_bytes; /* the first index_bytes are positions */
    size_t n_items;
    uint64_t sum; /* checksum */
    int is_void;  /* not to be added: its sender failed or is not finite, or its header is wrong */
} tagc_fragment;

/* How fragments travel, the same on all ranks. So it follows from the options that they agreed on when the reducer was made, and from
 * the last step that succeeded; this rank's k may have changed since. */
typedef struct tagc_travel {
    int is_small; /* one parcel, with the front of every body beside its header */
    int parcel;   /* fragments per message */
    int n_parcels;
    /* Parcels under way at once, at least 4: as many as window_bytes hold, so that waiting for a header costs less than moving
     * the others meanwhile. */
    int window;
    size_t window_bytes; /* 0: the default */
    size_t eager[2];     /* size of the front of a body, and of a body of sums; the same on all ranks */
    int has_agreed;
} tagc_travel;

/* A step under way. */
typedef struct tagc_direct_step {
    int n_encoded, n_parcels_out; /* turns; parcels whose bodies are under way */
    int n_added;                  /* ranks */
    int *senders;                 /* (W,) of what a message brings */
    void *discarded; /* of a step that fails: a list of blocks for bodies that are too long for their rows */
} tagc_direct_step;

typedef struct tagc_direct {
    void *ahead; /* of the step under way, if that is ahead */
    tagc_code_options fragment, sums;
    const tagc_code *fragment_code, *sums_code;
    tagc_batches batches;
    tagc_travel travel;
    tagc_direct_step step;
    size_t stride;   /* size of a row: a header and the largest body */
    size_t capacity; /* of a body in a row */

    tagc_message *header_out, *body_out; /* (window) */
    tagc_message *result_out;            /* (2) headers, bodies */
    char *send;              /* (window * parcel + 1, stride); the last is the own one, if it is encoded */
    char *recv;              /* (W, stride) */
    tagc_fragment *sent;     /* (window * parcel + 1) */
    tagc_fragment *received; /* (W,) */
    tagc_body *bodies;       /* (W,) to be decoded; bytes are NULL if a body does not count */
} tagc_direct;

/* What the next action waits for, and the rounds in which it posts, as in tagc_then. */
typedef struct tagc_pause {
    int is_done; /* 1: the next action is another part of the step; 0: the same one goes on */
    tagc_message *awaited;
    int n, low, high;
} tagc_pause;

static inline tagc_direct *tagc_direct_of(const tagc_reducer *r) {
    return r->state;
}
/* 1 if the owner sends its sums back. */
static inline int tagc_direct_has_results(const tagc_reducer *r) {
    return r->options.output != TAGC_OUTPUT_SHARD;
}
/* The only round in which the action posts that has added up everything: a later one would hold up the steps behind this. */
static inline int tagc_direct_round_after_sums(const tagc_reducer *r) {
    return tagc_direct_has_results(r) ? TAGC_ROUND_RESULTS : TAGC_ROUND_DIRECT_AGREEMENT;
}
/* Of both paths. */
uint64_t tagc_direct_residual_elems(const tagc_reducer_options *options);
/* The last action: whether the step succeeded; where something is not finite, the output becomes NaN. */
tagc_status tagc_direct_finish(tagc_reducer *r);
/* The code of &d->fragment or of &d->sums. */
const tagc_code *tagc_direct_code(const tagc_direct *d, const tagc_code_options *options);
/* Where the gradient comes from a feed: asks for the row that `owner` gets. */
void tagc_direct_fill_row(tagc_reducer *r, int owner);
/* Where the sums of the own row go. */
float *tagc_direct_sums(const tagc_reducer *r);

/* The processor's runner. */
extern const tagc_runner tagc_direct_on_host;

/* ---- fragments.c ---- */

void tagc_fragments_place(tagc_reducer *r, tagc_arena *arena);
void tagc_fragments_place_work(tagc_reducer *r, tagc_arena *arena);
/* Each does what can be done without waiting: encodes fragments and sends parcels of headers; sends the rests of bodies; adds the
 * bodies that have arrived. */
tagc_status tagc_fragments_encode(tagc_reducer *r, tagc_pause *wait);
tagc_status tagc_fragments_send(tagc_reducer *r, tagc_pause *wait);
tagc_status tagc_fragments_add(tagc_reducer *r, tagc_pause *wait);

/* Call when no message of the step is in progress. */
void tagc_fragments_end(tagc_reducer *r);
/* Where the fragment of turn t is sent from. */
char *tagc_direct_row_out(const tagc_reducer *r, int t);

/* All-reduce. Encodes the sums and sends their header and front; then sends the rest. Each returns what it posted. */
tagc_message *tagc_results_send(tagc_reducer *r);
tagc_status tagc_results_send_rest(tagc_reducer *r, tagc_message **out);
void tagc_results_decode(tagc_reducer *r);

/* ---- volume.c ---- */

/* Sets travel.eager for the first step; _choose_eager sets it for later ones. */
void tagc_direct_guess_eager(tagc_reducer *r);
/* Notes the size of a body that this rank sends, or if i is 1, of its body of sums. */
void tagc_direct_note_length(tagc_reducer *r, int i, size_t n_bytes);
/* Sets travel.eager from the longest bodies of a step that succeeded. */
void tagc_direct_choose_eager(tagc_reducer *r);

tagc_status tagc_direct_volume(tagc_reducer *r, const tagc_volume_data *data, tagc_volume *out);

#endif
