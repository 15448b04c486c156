/* Inside of the two exchanges that send an index first: sketch (TAGC as published) and packed. See README.md.
 *
 * index.c runs the step and owns the unions; results.c ends it. The coder, packed.c or sketch.c, decides how the values travel.
 * leftovers.c handles what cannot be recovered from a sketch. */
#ifndef TAGC_PAPER_PAPER_H
#define TAGC_PAPER_PAPER_H

#include "exchange/reducer.h"
#include "paper/peel.h"
#include "tagc/paper.h"

enum { TAGC_ROUND_INDEX, TAGC_ROUND_UNION, TAGC_ROUND_AGREE, TAGC_ROUND_VALUES, TAGC_ROUND_LAST };

/* What any rank sent of a shard. */
typedef struct tagc_union {
    size_t n;
    const uint32_t *positions; /* (n) ascending */
} tagc_union;

typedef struct tagc_coder {
    /* From the options and k: the most 4-byte words of a shard's values, and scratch. */
    size_t (*max_words)(const tagc_reducer *r);
    size_t (*scratch_bytes)(const tagc_reducer *r);
    void (*place)(tagc_reducer *r, tagc_arena *arena);
    /* Bytes of the values of shard d, whose union has n elements. */
    uint64_t (*shard_bytes)(const tagc_reducer *r, int d, size_t n);
    /* Called when the union of the own shard is known, before it is sent. */
    void (*plan_early)(tagc_reducer *r, const tagc_union *own);
    /* Encodes the values of the union of shard d into row d of value_send, and updates the new residual. */
    void (*encode)(tagc_reducer *r, int d, const tagc_union *of);
    /* What can be done while values travel. */
    void (*plan)(tagc_reducer *r, const tagc_union *own);
    /* Adds the contribution of rank q for a union of n elements; called in rank order. */
    void (*add)(tagc_reducer *r, int q, size_t n);
    /* Decodes what was added to tagc_paper_sums. An action; its last one is tagc_paper_sums_ready. */
    tagc_action_fn decode;
    int posts;           /* 1: decode posts in TAGC_ROUND_LAST */
    int needs_positions; /* 1: of every union, to encode */
} tagc_coder;

extern const tagc_coder tagc_coder_packed, tagc_coder_sketch;

/* Of the sketch alone. */
typedef struct tagc_sketching {
    size_t max_cells;
    void *plan_memory;
    int32_t *fixed;    /* (max_union) fixed-point cells only */
    uint32_t *n_left;  /* (W,) leftovers of each shard */
    uint32_t *attempt; /* (W,) added to the seed; sent with the unions */
    int exponent;      /* of fixed-point cells */
    int is_planned;
    tagc_peeling plan; /* of the own shard */
} tagc_sketching;

typedef struct tagc_paper {
    const tagc_coder *coder;
    size_t max_union;   /* elements of a shard's union at most */
    size_t index_bytes; /* header and body */
    size_t value_bytes; /* of one row of the value buffers */
    int batch;          /* partners whose indices, and whose values, travel in one message */
    int n_batches;
    tagc_message *all_to_all; /* an exchange of all with all: unions, leftovers, results */
    tagc_message *index_out;  /* (n_batches) */
    tagc_message *value_out;  /* (n_batches) */
    char *index_send; /* (W, index_bytes): row d goes to d; row `rank` becomes the union of the own shard */
    char *index_recv; /* (W, index_bytes): indices from each rank, then the unions from each rank */
    char *value_send; /* (W, value_bytes): row d goes to d; row `rank` is the own contribution */
    /* (W, value_bytes): row r comes from r; row `rank` holds the sums in the order of the union. */
    char *value_recv;
    uint32_t *sent_indices;    /* (W, k) */
    float *sent_values;        /* (W, k) */
    uint32_t *own_positions;   /* (max_union) of the own union */
    uint32_t *other_positions; /* (max_union) of another, valid until the next */
    uint8_t *bits;             /* (bitmap of a shard) for an index that is not a bitmap */
    void *scratch;             /* of selection, then of planning */
    size_t *n_sent, *n_union;  /* (W,) */
    tagc_sketching sketch;

    /* the step under way */
    int n_done;        /* batches combined, then ranks added */
    float max_abs;     /* over ranks and, once the unions are here, over shards */
    float own_max_abs; /* over ranks, of the own shard */
} tagc_paper;

static inline tagc_paper *tagc_paper_of(const tagc_reducer *r) {
    return r->state;
}
static inline const tagc_paper_options *tagc_paper_options_of(const tagc_reducer *r) {
    return (const tagc_paper_options *)(const void *)r->own_options;
}
static inline char *tagc_contribution(const tagc_reducer *r, int from) {
    const tagc_paper *p = tagc_paper_of(r);
    return (from == r->rank ? p->value_send : p->value_recv) + (size_t)from * p->value_bytes;
}
/* The sums of the own shard in the order of its union. */
static inline float *tagc_paper_sums(const tagc_reducer *r) {
    const tagc_paper *p = tagc_paper_of(r);
    return (float *)(p->value_recv + (size_t)r->rank * p->value_bytes);
}

/* Partners of batch b: [begin, end). */
static inline int tagc_batch_begin(const tagc_paper *p, int b) {
    return b * p->batch;
}
static inline int tagc_batch_end(const tagc_reducer *r, int b) {
    int end = (b + 1) * tagc_paper_of(r)->batch;
    return end < r->world_size - 1 ? end : r->world_size - 1;
}

/* ---- index.c ---- */

/* Bytes of an index or a union: header and body. */
uint64_t tagc_index_bytes(const tagc_reducer *r);
/* The union of shard d in ascending order. The own union has a place of its own; the others share one. */
tagc_union tagc_union_of(tagc_reducer *r, int d);

/* The union of shard d as a bitmap. For a shard of another rank it is valid until the next call. */
const uint8_t *tagc_union_bits(tagc_reducer *r, int d);
/* The union of the own shard, from its making to the end of the step. */
tagc_union tagc_own_union(const tagc_reducer *r);

/* ---- index.c: what lib/fences.c lists ---- */

extern const tagc_exchange_table tagc_exchange_sketch, tagc_exchange_packed;

/* ---- options.c ---- */

extern const tagc_own_options tagc_paper_own_options;

/* ---- results.c, volume.c ---- */

/* Finite values can overflow when added, even if cells were exact. All ranks know whether that is possible. */
int tagc_paper_can_overflow(const tagc_reducer *r);
/* The last action of a coder's decode: ranks agree if sums may be non-finite, and finish. */
tagc_status tagc_paper_sums_ready(tagc_reducer *r);
/* Writes the sums, or NaN if something was not finite, to the output. */
tagc_status tagc_paper_finish(tagc_reducer *r);
tagc_status tagc_paper_volume(tagc_reducer *r, const tagc_volume_data *data, tagc_volume *out);

/* ---- leftovers.c ---- */

/* All ranks know n_left of each shard, and one is not 0. An action; its last one is tagc_sketch_to_values. */
tagc_status tagc_settle_leftovers(tagc_reducer *r);
/* Sums of fixed-point cells become values. */
tagc_status tagc_sketch_to_values(tagc_reducer *r);
/* Bytes of leftovers; n_left (W,). */
void tagc_leftovers_volume(const tagc_reducer *r, const uint64_t *n_left, tagc_volume *out);

#endif
