/* What a rank holds for a GPT of some shape under FSDP2 and DDP, with tagc and without it, but for activations. */
#ifndef TAGC_WAYS_ROOM_H
#define TAGC_WAYS_ROOM_H

#include "tagc/tagc.h"

/* Where gradients become fewer bytes: compress(codec=) of tagc.torch. */
typedef enum tagc_room_codec { TAGC_ROOM_DEVICE, TAGC_ROOM_HOST } tagc_room_codec;

/* Sizes of the memory of GPUs that a plan speaks of, in GB. */
enum { TAGC_ROOM_N_SIZES = 3 };
extern const int tagc_room_sizes_gb[TAGC_ROOM_N_SIZES];

/* Bytes of a rank for reducers. */
typedef struct tagc_room_needs {
    uint64_t residual, buffers;
    uint64_t transient; /* of the exchange under way */
} tagc_room_needs;

/* parts (n): options of the reducers; units (n): the unit of each, those of a unit one after the other. TAGC_ERR_ARGUMENT if
 * there is no such reducer. */
TAGC_API tagc_status tagc_plan_needs(const tagc_reducer_options *parts, const uint32_t *units, size_t n,
                                     int world_size, tagc_room_needs *out);

/* Bytes in which an exchange packs gradients of n_bytes per value, 2 or 4, and their sums, as Unit.reduce() of tagc.torch does:
 * the largest part stays in the gradient itself, and sums take the place of gradients. Dense parts are read as fp32, and their
 * sums lie apart. parts (n): of one unit. */
TAGC_API uint64_t tagc_plan_packed(const tagc_reducer_options *parts, size_t n, int world_size, int is_ddp,
                                   int n_bytes);

/* Bytes of a rank for reducers with their codec on the GPU. */
typedef struct tagc_room_there {
    uint64_t residual, buffers; /* on the GPU */
    uint64_t pinned;            /* in the host's memory */
} tagc_room_there;

/* n_sampled: values of which a selection takes a sample; kernels have TAGC_ROOM_SAMPLED. n_bytes: of a value of the gradient, 2
 * or 4. The rest as in tagc_plan_needs. */
enum { TAGC_ROOM_SAMPLED = 8192 };
TAGC_API tagc_status tagc_plan_there(const tagc_reducer_options *parts, const uint32_t *units, size_t n,
                                     int world_size, int n_bytes, uint32_t n_sampled, tagc_room_there *out);
/* Bytes of pinned memory with the codec on the host, of gradients and sums of n_bytes per value. */
TAGC_API uint64_t tagc_plan_pinned(const tagc_reducer_options *parts, const uint32_t *units, size_t n,
                                   int world_size, int n_bytes);

typedef struct tagc_room_row {
    const char *name;
    uint64_t parameters, gradients, adam;
    uint64_t residual, replicas, buffers, pinned; /* of tagc */
    uint64_t device, host;                        /* of these, on the GPU and in the host's memory */
} tagc_room_row;

enum { TAGC_ROOM_MAX_ROWS = 6 };

/* A row per way. */
tagc_status tagc_room_make(int n_layer, int n_embd, int hosts, int ranks_per_host, tagc_room_codec codec,
                           tagc_room_row rows[TAGC_ROOM_MAX_ROWS], int *n_rows);

#endif
