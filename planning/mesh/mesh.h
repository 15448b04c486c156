/* The plan of a transformer on a mesh of ranks: tensor, sequence, context, expert and pipeline parallelism beside the sharding of
 * data parallelism (fsdp.h), and what lies in the memory of the host. Closed formulas, for models that the engine does not have;
 * bytes and memory of tagc's own exchanges are those of the code that runs them.
 *
 *   mesh.c      checks, the question's answer
 *   stage.c     parameters and activations of the ranks of a stage
 *   data.c      data parallelism: gradients, parameters, and what tagc holds
 *   legs.c      bytes of every leg, of each rank and host
 *
 * Ranks are numbered as by torchtitan and Megatron: tensor is the innermost dimension, then context, data, pipeline. So the ranks of
 * a stage are neighbours, and a host holds whole tensor-parallel groups first. Experts are split over neighbours of the context and
 * data dimensions. */
#ifndef TAGC_PLAN_MESH_H
#define TAGC_PLAN_MESH_H

#include "tagc/tagc.h"

typedef enum tagc_mesh_schedule {
    TAGC_MESH_GPIPE,
    TAGC_MESH_1F1B,
    TAGC_MESH_INTERLEAVED, /* 1F1B with several stages per rank */
    TAGC_MESH_ZERO_BUBBLE /* gradients of weights fill what 1F1B leaves idle: ZB-H1, and with several stages torch's interleaved one */
} tagc_mesh_schedule;

/* What becomes of the input of a linear layer that was gathered from the sequence's parts. */
typedef enum tagc_mesh_sequence {
    TAGC_MESH_WHOLE_SEQUENCE,   /* no sequence parallelism */
    TAGC_MESH_SEQUENCE,         /* it is kept until the backward pass, as torch's DTensor does */
    TAGC_MESH_SEQUENCE_REGATHER /* it is gathered again, as Megatron-LM does */
} tagc_mesh_sequence;

typedef enum tagc_mesh_recompute {
    TAGC_MESH_KEEP,
    TAGC_MESH_RECOMPUTE_ATTENTION, /* what lies between the projections of attention */
    TAGC_MESH_RECOMPUTE_ALL        /* all of a layer but its input */
} tagc_mesh_recompute;

/* In the memory of the host. */
enum {
    TAGC_MESH_OFFLOAD_PARAMETERS = 1, /* parameters, gradients and optimizer, as FSDP2's CPUOffloadPolicy */
    TAGC_MESH_OFFLOAD_OPTIMIZER = 2,  /* gradients and optimizer, as ZeRO-Offload */
    TAGC_MESH_OFFLOAD_ACTIVATIONS = 4
};

/* A model by shape. Not split by tensor parallelism are norms, positions, routers, and biases that are added to sums. */
typedef struct tagc_mesh_model {
    int n_layer, n_embd, n_head, n_kv_head, n_ffn, n_vocab; /* embedding and head have a matrix each */
    int n_positions;                                        /* learned ones; 0: none */
    int is_gated;                                           /* 1: SwiGLU, with three matrices; 0: two */
    int has_bias;            /* 1: biases, and LayerNorm; 0: none, and RMSNorm */
    int n_experts, n_active; /* of each layer, and those that a token goes to; 1 and 1: no experts */
} tagc_mesh_model;

typedef struct tagc_mesh_question {
    size_t struct_bytes;
    tagc_mesh_model model;
    int world_size, ranks_per_host;
    int n_tensor, n_context, n_pipeline, n_expert; /* ranks of each dimension; the others are data parallel */
    int sequence;                                  /* tagc_mesh_sequence */
    int sharding;                                  /* tagc_sharding, over data and context ranks */
    int n_sequences, n_tokens, n_micro_batches; /* of a data rank: per micro-batch, of a sequence, per step */
    int schedule, n_stages_per_rank;
    int recompute;
    int keeps_scores; /* 1: attention keeps its matrix of scores; 0: it does not, as FlashAttention */
    int has_dropout;
    int offload;           /* a sum of the above */
    int codec_on_host;     /* 1: residuals, replicas and buffers of tagc are in the host's memory */
    int format;            /* tagc_format of gradients; BF16: torch's own exchange */
    double sparsity;       /* of compressed parameters; attention takes the default that goes with it */
    int gather;            /* tagc_gather_kind, from BF16 on */
    int forward, backward; /* tagc_format between stages on different hosts: BF16, INT8 or INT4 */
    int token_forward, token_backward; /* and of tokens of experts on other hosts; both BF16: torch's own */
    int block;                         /* values per scale of these */
} tagc_mesh_question;

typedef enum tagc_mesh_kind {
    TAGC_MESH_PARAMETERS, /* fp32 */
    TAGC_MESH_GRADIENTS,  /* fp32, and what accumulates whole between micro-batches */
    TAGC_MESH_OPTIMIZER,  /* two moments in fp32 */
    TAGC_MESH_RESIDUAL,
    TAGC_MESH_REPLICAS, /* copies of parameters in bf16 that stay: torch's, and those of deltas */
    TAGC_MESH_BUFFERS,  /* of units under way */
    TAGC_MESH_ACTIVATIONS,
    TAGC_MESH_N_KINDS
} tagc_mesh_kind;

typedef enum tagc_mesh_leg {
    TAGC_MESH_LEG_TENSOR,
    TAGC_MESH_LEG_CONTEXT,
    TAGC_MESH_LEG_EXPERT,
    TAGC_MESH_LEG_PIPELINE,
    TAGC_MESH_LEG_GRADIENTS,
    TAGC_MESH_LEG_PARAMETERS,
    TAGC_MESH_LEG_OFFLOAD, /* between a device and its host's memory, both ways */
    TAGC_MESH_N_LEGS
} tagc_mesh_leg;

/* Bytes sent in a step. */
typedef struct tagc_mesh_bytes {
    double rank;         /* of the rank that sends most */
    double host;         /* to other hosts, of the host that sends most */
    double all, between; /* of all ranks, and of these between hosts */
} tagc_mesh_bytes;

typedef struct tagc_mesh_reply {
    size_t struct_bytes;
    uint64_t n_params, n_active_params; /* active: of a token */
    int n_data;                         /* ranks of data parallelism, without context */
    int fullest; /* the rank of the pipeline whose device holds most; the memory below is its */
    double device[TAGC_MESH_N_KINDS], host[TAGC_MESH_N_KINDS];
    tagc_mesh_bytes legs[TAGC_MESH_N_LEGS];
    double bubble;    /* time in which a rank is idle, beside that in which it computes */
    double in_flight; /* micro-batches whose activations the fullest rank holds */
    char why[256];    /* "" or why there is no answer */
} tagc_mesh_reply;

/* On failure reply->why names the field, its value and what is allowed. */
TAGC_API tagc_status tagc_plan_mesh(const tagc_mesh_question *question, tagc_mesh_reply *reply);

/* Returns the seconds of a step of a pipeline with a stage on each rank, GPIPE or 1F1B. compute_s: of a micro-batch in a stage;
 * forward_s, backward_s: of a message to the next stage and to the one before. */
TAGC_API double tagc_plan_pipeline_s(int schedule, int n_stages, int n_micro_batches, double compute_s,
                                     double forward_s, double backward_s);

#endif
