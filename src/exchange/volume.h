/* How many bytes a reducer or a gatherer of given options sends, and how much memory it takes, without making one.
 * Where the bytes depend on the gradients, the caller says what they are like. */
#ifndef TAGC_EXCHANGE_VOLUME_H
#define TAGC_EXCHANGE_VOLUME_H

#include "codec/code.h"
#include "core/status.h"
#include "tagc/tagc.h"

/* What a step of an indexed or direct exchange depends on beside its options. */
typedef struct tagc_volume_data {
    const uint64_t *n_union; /* (W,) elements of each shard's union; NULL: union_density of each */
    double union_density;    /* [0, 1]; direct: of sums that come back */
    const uint64_t *n_left;  /* (W,) items of each shard that its sketch does not give back; NULL: none */
    /* direct with positions */
    const tagc_encoded
        *bodies; /* (W,) that `rank` sends to each owner; NULL: what kept_density of every fragment takes
                                   on average where positions fall independently */
    double kept_density;      /* [0, 1] */
    const tagc_encoded *sums; /* the body of `rank`'s sums that come back; NULL: the same of union_density */
} tagc_volume_data;

typedef struct tagc_volume {
    double n_bytes[TAGC_N_LEGS];        /* sent to all other ranks together; whole where n_union is given */
    double n_within_bytes[TAGC_N_LEGS]; /* of these, to ranks of the own host: in two levels */
    uint64_t n_transfers[TAGC_N_LEGS];  /* posted, whatever the number of their messages */
    int n_batches; /* direct: messages in which fragments go out, and as many for the rest of their bodies */
    double eager_bytes; /* direct: of a body, that travel with its header */
    size_t chunk_elems; /* dense: of a shard that travel at a time; 0 for the others */
    int sketching;      /* a sketch that keeps everything sends no cells */
} tagc_volume;

/* One transfer more, to ranks anywhere or to ranks of the own host. */
void tagc_volume_add(tagc_volume *volume, tagc_leg leg, double n_bytes);
void tagc_volume_add_within(tagc_volume *volume, tagc_leg leg, double n_bytes);

/* Bytes that `rank` sends in one step without values that are not finite or near it. data may be NULL for dense.
 * TAGC_ERR_ARGUMENT or TAGC_ERR_UNSUPPORTED where tagc_reducer_create would say so. */
tagc_status tagc_reducer_volume(const tagc_reducer_options *options, int world_size, int rank,
                                const tagc_volume_data *data, tagc_volume *out);
/* Of a delta, one without checksums: neither the first nor one after a reset. */
tagc_status tagc_gatherer_volume(const tagc_gatherer_options *options, int world_size, tagc_volume *out);

/* The step's agreement on the norm: one number to every other rank. */
uint64_t tagc_norm_bytes(int world_size);

/* Bytes that one rank holds: buffers without and with what several reducers share. */
typedef struct tagc_exchange_memory {
    uint64_t buffers;
    uint64_t residual;
    uint64_t spare; /* what making this reducer adds to the spares that reducers of one residual share */
} tagc_exchange_memory;

/* n_before: reducers on the comm whose residual is as long. So the spares of several add up, see tagc_comm_n_spares. */
tagc_status tagc_reducer_memory(const tagc_reducer_options *options, int world_size, int n_before,
                                tagc_exchange_memory *out);
tagc_status tagc_gatherer_memory(const tagc_gatherer_options *options, int world_size, uint64_t *n_bytes);

#endif
