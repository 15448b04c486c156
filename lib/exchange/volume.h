/* How many bytes a reducer or gatherer with given options sends, and how much memory it takes, without making one. If the bytes
 * depend on the gradients, the caller describes these. */
#ifndef TAGC_EXCHANGE_VOLUME_H
#define TAGC_EXCHANGE_VOLUME_H

#include "codec/code.h"
#include "core/status.h"
#include "tagc/tagc.h"

/* Properties of the gradients on which a step of an indexed or direct exchange depends. */
typedef struct tagc_volume_data {
    const uint64_t *n_union; /* (W,) elements of each shard's union; NULL: union_density of each shard */
    double union_density;    /* [0, 1] */
    /* (W,) items of each shard that cannot be recovered from its sketch; NULL: none. */
    const uint64_t *n_left;
    /* direct with positions */
    /* (W,) bytes that `rank` sends to each owner; NULL: the expected size for sent_density and independent positions. */
    const tagc_encoded *bodies;
    double sent_density;      /* [0, 1] */
    const tagc_encoded *sums; /* bytes of `rank`'s sums; NULL: the expected size of as many as may be sent */
} tagc_volume_data;

typedef struct tagc_volume {
    double n_bytes[TAGC_N_LEGS]; /* bytes to all other ranks together; a whole number if n_union is given */
    uint64_t n_transfers[TAGC_N_LEGS]; /* posted, whatever the number of their messages */
    int n_parcels;      /* direct: messages with fragments; there are as many for the rests of bodies */
    double eager_bytes; /* direct: bytes of the front */
    size_t chunk_elems; /* direct that sends whole values: elements of a chunk; else 0 */
    int n_moving;       /* of these, chunks under way at once */
    int sketching;      /* a sketch that selects everything sends no cells */
} tagc_volume;

/* Adds one transfer. */
void tagc_volume_add(tagc_volume *volume, tagc_leg leg, double n_bytes);

/* Bytes that `rank` sends in one step if all values are finite and far from overflow. data may be NULL where all values are sent. Returns
 * TAGC_ERR_ARGUMENT or TAGC_ERR_UNSUPPORTED if tagc_reducer_create would. */
tagc_status tagc_reducer_volume(const tagc_reducer_options *options, int world_size, int rank,
                                const tagc_volume_data *data, tagc_volume *out);
/* For deltas: a gather without checksums that sends a delta. */
tagc_status tagc_gatherer_volume(const tagc_gatherer_options *options, int world_size, tagc_volume *out);

/* The agreement on the gradient norm in a training step: one number to every other rank. */
uint64_t tagc_norm_bytes(int world_size);

/* Bytes that one rank holds for a reducer or a gatherer, and what a step of it takes of the memory that objects of a comm share
 * (transport/work.h). */
typedef struct tagc_exchange_memory {
    uint64_t buffers;  /* its own */
    uint64_t work;     /* of a step under way */
    uint64_t residual; /* reducers of the comm share spares of it, see tagc_comm_n_spares */
    uint64_t bodies;   /* of all ranks, as long as they can be; of direct */
} tagc_exchange_memory;

/* Whose arrays a reducer has: a caller's; or none, since it belongs to a tagc_model, between hosts or within one. */
typedef enum tagc_feeding { TAGC_FED_NOT, TAGC_FED, TAGC_FED_WITHIN } tagc_feeding;
tagc_status tagc_reducer_memory(const tagc_reducer_options *options, int world_size, tagc_feeding feeding,
                                tagc_exchange_memory *out);
tagc_status tagc_gatherer_memory(const tagc_gatherer_options *options, int world_size,
                                 tagc_exchange_memory *out);

#endif
