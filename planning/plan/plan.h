/* Planning: the memory, bytes and time of a deployment, without running it.
 *
 *   setup      a model, ranks and hosts, a batch, options of the engine
 *   volume     bytes per leg and optimizer step, and memory: exact, from the code that lays out real engines
 *   costs      the time of a machine for a product and an element
 *   forecast   a simulated optimizer step with these costs */
#ifndef TAGC_PLAN_PLAN_H
#define TAGC_PLAN_PLAN_H

#include "exchange/options.h"
#include "fsdp/layout.h"
#include "gpt2/gpt2.h"

/* ---- setup ---- */

typedef struct tagc_setup {
    tagc_gpt2_config model;
    int world_size, n_hosts; /* n_hosts divides world_size */
    int n_batch, n_tokens;   /* of a rank and micro-step */
    tagc_fsdp_options engine;
    /* packed and sketch: density of the union of what ranks keep, in flats with the engine's sparsity; < 0: as if each rank
     * sent 1 - sparsity, independently of the others. */
    double union_density;
    double sent_density; /* of what direct keeps in the same flats; 0: 1 - sparsity */
} tagc_setup;

/* Floating point operations of the products of all micro-steps of a rank. */
double tagc_setup_flops(const tagc_setup *setup);
/* The layout of an engine for this model. */
tagc_status tagc_model_layout(const tagc_gpt2_config *model, const tagc_fsdp_options *engine, int world_size,
                              tagc_layout **out);

/* ---- volume and memory ---- */

typedef struct tagc_plan_volume {
    double n_bytes[TAGC_N_LEGS];      /* sent by one rank in an optimizer step, mean over ranks */
    double n_host_bytes[TAGC_N_LEGS]; /* sent by all ranks of one host to other hosts */
    double n_bytes_compressed;        /* index, values, leftovers and results of compressed flats */
    uint64_t n_params, n_compressed;
} tagc_plan_volume;

typedef struct tagc_plan_memory {
    tagc_fsdp_memory engine; /* as tagc_fsdp_memory_used reports */
    uint64_t buffers;        /* of reducers and gatherers, without MPI's own */
    uint64_t total;          /* without activations */
    uint64_t state;          /* part of total: parameters, gradients and moments that outlive a pass */
} tagc_plan_memory;

tagc_status tagc_plan_memory_of(const tagc_setup *setup, tagc_plan_memory *out);
/* Local. TAGC_ERR_MEMORY with the figures if this host has not the memory for n_here ranks of the setup; `what` begins the
 * text. n_batch 0: an engine that computes nothing. TAGC_ERR_ARGUMENT if no such batch can be computed. */
tagc_status tagc_plan_check_memory(const char *what, const tagc_setup *setup, int n_here);
tagc_status tagc_plan_count(const tagc_setup *setup, tagc_plan_volume *volume, tagc_plan_memory *memory);

/* ---- costs ---- */

/* Seconds. A dense exchange and values in fp32 or bf16 take none besides those of the link. */
typedef struct tagc_costs {
    double flop_s;             /* of a matrix product */
    double optimizer_s;        /* per element owned */
    double encode_s, decode_s; /* direct: per element of a unit */
    double gather_encode_s;    /* of codes of parameters: per element of the owner's shard */
    double gather_decode_s;    /* and of the whole unit */
} tagc_costs;

/* ---- forecast ---- */

typedef struct tagc_plan_link {
    double latency_s, bytes_per_s; /* of a host, each direction, measured with plain transfers */
    double host_bytes_per_s;       /* between ranks of one host; 0: takes no time */
} tagc_plan_link;

/* All members are doubles, so that one loop extends them. */
typedef struct tagc_forecast {
    double iteration_s; /* one optimizer step */
    double compute_s, wait_gather_s, wait_reduce_s, optimizer_s;
    double comm_s, codec_s;      /* time with transfers under way, and time in which the codec worked */
    double n_bytes[TAGC_N_LEGS]; /* sent by the simulated engine: equal to tagc_plan_count's */
    double n_remote_bytes[TAGC_N_LEGS]; /* of these, to other hosts */
} tagc_forecast;

/* TAGC_ERR_UNSUPPORTED for the exchanges of lib/paper. */
tagc_status tagc_plan_simulate(const tagc_setup *setup, const tagc_costs *costs, const tagc_plan_link *link,
                               tagc_forecast *out);

#endif
