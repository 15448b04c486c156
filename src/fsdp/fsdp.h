/* The sharded data parallel engine: who holds which part of the parameters, when parts are gathered, when gradients
 * leave, and how the owner updates its part. It knows tensors by name, shape and kind, not what a layer computes.
 *
 *   tensor   one parameter of the model, reached through _use / _done / _grad / _grad_done
 *   unit     the tensors that are gathered and released together (a stage, a bucket of stages, or one large matrix)
 *   flat     the tensors of one class (compressed, mild, dense) of a unit end to end, padded to (W, shard)
 *
 * A step: for each micro-step { _forward_begin, model forward, _backward_begin, model backward }, then _step. */
#ifndef TAGC_FSDP_FSDP_H
#define TAGC_FSDP_FSDP_H

#include "exchange/options.h"
#include "fsdp/trace.h"
#include "model/tensor.h"
#include "tagc/tagc.h"

typedef struct tagc_fsdp tagc_fsdp;

typedef enum tagc_sharding {
    TAGC_SHARD_FULL = 0,  /* ZeRO-3: parameters gathered for forward and again for backward */
    TAGC_SHARD_GRAD = 1,  /* ZeRO-2: parameters gathered once per step, gradients and optimizer sharded */
    TAGC_SHARD_NONE = 2,  /* DDP: everything replicated, gradients all-reduced */
    TAGC_SHARD_HYBRID = 3 /* FULL inside each host, replicas across hosts (HSDP) */
} tagc_sharding;

typedef enum tagc_wrap {
    TAGC_WRAP_STAGE = 0, /* one unit per stage: embedding, each block, head */
    TAGC_WRAP_MATRIX =
        1 /* as in the paper: every matrix above 2 M elements alone, the rest in one root unit */
} tagc_wrap;

#define TAGC_MOST_BUCKET_ELEMS ((uint64_t)1 << 40)

typedef enum tagc_policy {
    TAGC_POLICY_NONE = 0,                 /* nothing is compressed */
    TAGC_POLICY_NON_ATTENTION_LINEAR = 1, /* feed-forward, embedding, head, projection after attention */
    TAGC_POLICY_PAPER = 2,                /* matrices above 2 M elements */
    TAGC_POLICY_ALL = 3,                  /* everything, norms and biases too */
    TAGC_POLICY_NAMES = 4                 /* what matches one of the name patterns */
} tagc_policy;

/* How the gradient of a tensor travels. A unit has one flat per class that its tensors have. */
typedef enum tagc_class {
    TAGC_CLASS_DENSE = 0,      /* norms, biases, and whatever no other class takes */
    TAGC_CLASS_COMPRESSED = 1, /* what the policy compresses */
    TAGC_CLASS_MILD =
        2, /* with options.mild: matrices that the policy leaves out (attention QKV, positions) */
    TAGC_N_CLASSES = 3
} tagc_class;

typedef struct tagc_fsdp_options {
    int sharding; /* tagc_sharding, default FULL */
    int wrap;     /* tagc_wrap, default STAGE */
    /* [0, 2^40], default 0 (off): neighbouring stages share a unit, a bucket, until it has at least so many values. The stage
     * of an embedding keeps its own. With WRAP_STAGE only. */
    uint64_t bucket_elems;
    int policy;        /* tagc_policy, default NON_ATTENTION_LINEAR */
    const char *names; /* POLICY_NAMES: shell patterns with commas between, e.g. "h.*.mlp.*,wte.*" */
    tagc_reducer_options
        reducer;              /* of compressed flats; n_elems, tag, op, output and paper are the engine's */
    int dense_format;         /* tagc_format of dense flats: FP32 (default) or BF16 */
    tagc_paper_options paper; /* of flats whose exchange is sketch or packed */
    /* Of mild flats. Its exchange is DENSE (there are none), DIRECT, or -1 (default): DIRECT where the reducer's is, else
     * DENSE. Its sparsity -1 (default): 0.85, or the reducer's where that is less. */
    tagc_reducer_options mild;
    int gather; /* tagc_gather_kind of parameter gathers, default FP32; deltas need sharding GRAD */
    int gather_check_every; /* tagc_gatherer_options.check_every, default 0 */
    int ranks_per_host;     /* [1, W], divides W, default 1: of hybrid sharding and of two_level */
    int two_level; /* 1: direct flats are added within a host before they are encoded, and parameters cross to
                            another host once (FULL and GRAD); default 0 */
    int prefetch;  /* [0, 64], default 1: units gathered ahead of use */
    int grads_in_flight; /* [1, 8], default 2: full gradients alive at once when exchanged at each backward */
    int n_micro_steps;   /* [1, 65536], default 1: per optimizer step */
    int exchange_each_micro_step; /* 0 (default): at the last one only; 1: as the published loop does */
    double beta1, beta2, epsilon; /* AdamW, defaults 0.9, 0.95, 1e-8 */
    /* Of compressed flats, [0, 1). -1 (default): 0 for DIRECT above sparsity 0, whose residual averages already, else beta1. */
    double beta1_compressed;
    double weight_decay; /* >= 0, default 0.1; tensors with `decay` only */
    double clip_norm;    /* >= 0, default 1.0; 0 is off */
    /* 1: flats that are selected from (DIRECT above sparsity 0) begin with every value in 4 bits and beta1 as elsewhere, and go
     * on to what the options say when their gradients are mostly noise (gentle.c). 0 (default): from the first step. Not
     * together with sparsity_warmup. */
    int gentle;
    int sparsity_warmup; /* >= 0, default 0: steps in which what compressed flats keep falls from 25 % to its target */
} tagc_fsdp_options;

/* What was measured to cost least loss for its bytes (docs/choosing-options.md). */
void tagc_fsdp_options_init(tagc_fsdp_options *options);
/* In the place of each default that depends on other options (-1): what it means. The engine does so itself; who looks at
 * options that no engine has seen asks for it first. */
void tagc_fsdp_options_resolve(tagc_fsdp_options *options);

/* The class that `options`, resolved, give this tensor. */
tagc_class tagc_fsdp_class(const tagc_fsdp_options *options, const tagc_tensor_info *tensor);

/* Collective. The tensor table and options must be the same on all ranks (checked). tensors is copied; trace may be
 * NULL, else it outlives the engine, as comm does. */
tagc_status tagc_fsdp_create(tagc_comm *comm, const tagc_tensor_info *tensors, int n_tensors,
                             const tagc_fsdp_options *options, tagc_trace *trace, tagc_fsdp **out);
void tagc_fsdp_destroy(tagc_fsdp *fsdp);

/* ---- parameters in and out ---- */

/* Local: calls fill(context, tensor, first, n, values) for each contiguous part this rank owns. */
typedef tagc_status (*tagc_fill_fn)(void *context, int tensor, size_t first, size_t n, float *values);
tagc_status tagc_fsdp_fill(tagc_fsdp *fsdp, tagc_fill_fn fill, void *context);
/* Collective: the whole fp32 master of one tensor, on every rank. values (n_elems). */
tagc_status tagc_fsdp_read_tensor(tagc_fsdp *fsdp, int tensor, float *values);

/* ---- one pass ---- */

/* Collective. training = 0: no backward will follow. */
tagc_status tagc_fsdp_forward_begin(tagc_fsdp *fsdp, int training);
tagc_status tagc_fsdp_backward_begin(tagc_fsdp *fsdp);

/* The four calls of a model (context is the tagc_fsdp). use waits for the unit's gather and starts the next ones;
 * grad gives the tensor's full gradient, to be added to; grad_done of a unit's last tensor starts its exchange. */
tagc_status tagc_fsdp_use(void *context, int tensor, const float **values);
void tagc_fsdp_done(void *context, int tensor);
tagc_status tagc_fsdp_grad(void *context, int tensor, float **gradient);
tagc_status tagc_fsdp_grad_done(void *context, int tensor);

/* ---- the update ---- */

typedef struct tagc_fsdp_stats {
    double total_s;       /* from the step's first _forward_begin to the end of _step */
    double compute_s;     /* total less the exposed waits and the optimizer */
    double wait_gather_s; /* exposed: compute stood still for parameters */
    double wait_reduce_s; /* exposed: ... for gradients */
    double optimizer_s;
    double phase_s[TAGC_N_PHASES]; /* of all reducers, on the codec stream */
    /* By this rank in this step, counted by the transport. With sharding GRAD a step's gathers are those of the
     * parameters that it used: begun by the update before it, or in front of the first step. */
    uint64_t n_bytes_sent[TAGC_N_LEGS];
    uint64_t n_bytes_received[TAGC_N_LEGS];
    double bits_per_param[TAGC_N_LEGS]; /* n_bytes_sent * 8 / n_params */
    double grad_norm;                   /* of the averaged gradient, before clipping */
    int skipped; /* a non-finite gradient: parameters and moments are as before, and the residuals of the
                                flats that held it (others were sent before it was known) */
    /* Over the compressed flats. Where the ranks of a host add first, n_kept is as if each had kept as many as this
     * one did of its part. */
    uint64_t n_kept, n_union, n_unpeeled, n_lost, n_compressed;
    uint64_t n_mild, n_mild_kept;                /* over the mild flats */
    uint64_t n_class_bytes_sent[TAGC_N_CLASSES]; /* of gradients, all legs */
    int n_gentle;                                /* flats that are still in their gentle beginning */
    double load;                                 /* largest of any sketch */
    int peel_rounds;                             /* largest */
} tagc_fsdp_stats;

/* Collective. Waits for the exchanges, clips, updates the owned shards with learning rate `lr`.
 * The model adds gradients of its mean loss; the engine makes the mean over ranks and over micro-steps. */
tagc_status tagc_fsdp_step(tagc_fsdp *fsdp, double lr, tagc_fsdp_stats *stats);

/* ---- backing off ---- */

/* Collective: root of the mean over ranks of the squared norm of a rank's residuals; where the ranks of a host hold one
 * together, over hosts, of it divided by their number. */
tagc_status tagc_fsdp_residual_norm(tagc_fsdp *fsdp, double *norm);
/* From the next step on compressed flats keep this times their share, at most all; collective in effect. */
void tagc_fsdp_set_kept_factor(tagc_fsdp *fsdp, double factor);
/* For a run that goes on: of sparsity_warmup so many steps are over; collective in effect. */
void tagc_fsdp_set_steps_begun(tagc_fsdp *fsdp, uint64_t n_steps);

/* ---- what it looks like ---- */

uint64_t tagc_fsdp_n_params(const tagc_fsdp *fsdp);     /* of the whole model, without padding */
uint64_t tagc_fsdp_n_compressed(const tagc_fsdp *fsdp); /* of these, in compressed flats */
uint64_t tagc_fsdp_n_mild(const tagc_fsdp *fsdp);       /* of these, in mild flats */
int tagc_fsdp_n_units(const tagc_fsdp *fsdp);
const char *tagc_fsdp_unit_name(const tagc_fsdp *fsdp, int unit);

/* A flat: the tensors of one class of one unit. */
typedef struct tagc_fsdp_flat {
    int unit, class_;             /* tagc_class */
    uint64_t n_elems, n_padded;   /* without and with padding */
    tagc_reducer_options reducer; /* in use */
} tagc_fsdp_flat;
int tagc_fsdp_n_flats(const tagc_fsdp *fsdp);
tagc_status tagc_fsdp_flat_info(const tagc_fsdp *fsdp, int flat, tagc_fsdp_flat *out);
/* Collective, between steps: from the next step on this flat's gradient is exchanged by `options` (n_elems, tag, op,
 * output, paper, ranks_per_host and n_threads are the engine's). Nothing of the residual is lost: it goes over to the new
 * exchange, or, where that has none, into the next gradient. On failure the flat is as before. */
tagc_status tagc_fsdp_set_exchange(tagc_fsdp *fsdp, int flat, const tagc_reducer_options *options);

/* Bytes this rank holds, by purpose. */
typedef struct tagc_fsdp_memory {
    uint64_t parameters, gradients, optimizer, residuals;
} tagc_fsdp_memory;
void tagc_fsdp_memory_used(const tagc_fsdp *fsdp, tagc_fsdp_memory *out);

#endif
