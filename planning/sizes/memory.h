/* What a rank holds for a GPT of some shape under FSDP2 and DDP, with tagc and without it, but for activations. */
#ifndef TAGC_SIZES_MEMORY_H
#define TAGC_SIZES_MEMORY_H

#include "plan/bytes.h"

/* Where gradients become fewer bytes: Options(codec=) of tagc.torch. */
typedef enum tagc_codec_place { TAGC_CODEC_ON_DEVICE, TAGC_CODEC_ON_HOST } tagc_codec_place;

/* Sizes of the memory of GPUs that a plan speaks of, in GB. */
enum { TAGC_N_GPU_SIZES = 3 };
extern const int tagc_gpu_sizes_gb[TAGC_N_GPU_SIZES];

/* parts (n): options of the reducers, between hosts; units (n): the unit of each, those of a unit one after the other. n_places: ranks of
 * each host, if they are those of a tagc_model; else 0. n_bytes: of a value of the gradient, 2 or 4. TAGC_ERR_ARGUMENT if there is no such
 * reducer. */
TAGC_API tagc_status tagc_plan_host_memory(const tagc_reducer_options *parts, const uint32_t *units, size_t n,
                                           int world_size, int n_places, int n_bytes, tagc_host_memory *out);

typedef struct tagc_memory_row {
    const char *name;
    uint64_t parameters, gradients, adam;
    uint64_t residual, replicas, buffers, pinned; /* of tagc */
    uint64_t device, host;                        /* of these, on the GPU and in the host's memory */
} tagc_memory_row;

enum { TAGC_MEMORY_MAX_ROWS = 6 };

/* A row per way. */
tagc_status tagc_memory_rows_make(int n_layer, int n_embd, int hosts, int ranks_per_host,
                                  tagc_codec_place codec, tagc_memory_row rows[TAGC_MEMORY_MAX_ROWS],
                                  int *n_rows);

#endif
