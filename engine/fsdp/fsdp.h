/* The sharded data parallel engine. It decides which rank owns which part of the parameters, when parts are gathered,
 * when gradients are exchanged, and how the owner updates its part. It knows names, shapes and kinds of tensors, not
 * what a layer computes.
 *
 *   tensor   one parameter of the model, reached through _use / _done / _grad / _grad_done
 *   unit     the tensors that are gathered and released together (a layer, a bucket of layers, or one large matrix)
 *   flat     the tensors of one class (compressed, mild, dense) of a unit, end to end, padded to (W, shard)
 *
 * A step: for each micro-step { _forward_begin, model forward, _backward_begin, model backward }, then _step. */
#ifndef TAGC_FSDP_FSDP_H
#define TAGC_FSDP_FSDP_H

#include "exchange/options.h"
#include "fsdp/trace.h"
#include "model/tensor.h"
#include "tagc/paper.h"
#include "tagc/policy.h"
#include "tagc/schedule.h"

typedef struct tagc_fsdp tagc_fsdp;

typedef enum tagc_sharding {
    TAGC_SHARD_FULL = 0,  /* ZeRO-3: parameters gathered for forward and again for backward */
    TAGC_SHARD_GRAD = 1,  /* ZeRO-2: parameters gathered once per step, gradients and optimizer sharded */
    TAGC_SHARD_NONE = 2,  /* DDP: everything replicated, gradients all-reduced */
    TAGC_SHARD_HYBRID = 3 /* FULL inside each host, replicas across hosts (HSDP) */
} tagc_sharding;

typedef enum tagc_wrap {
    TAGC_WRAP_BLOCK = 0, /* one unit per layer: embedding, each block, head */
    TAGC_WRAP_MATRIX = 1 /* as in the paper: each matrix above 2 M elements is a unit, the rest is one */
} tagc_wrap;

#define TAGC_MOST_BUCKET_ELEMS ((uint64_t)1 << 40)
#define TAGC_N_LEVELS (TAGC_LEVEL_LAST + 1)

typedef enum tagc_policy {
    TAGC_POLICY_NONE = 0,                 /* nothing is compressed */
    TAGC_POLICY_NON_ATTENTION_LINEAR = 1, /* feed-forward, embedding, head, projection after attention */
    TAGC_POLICY_PAPER = 2,                /* matrices above 2 M elements */
    TAGC_POLICY_ALL = 3,                  /* everything, including norms and biases */
    TAGC_POLICY_NAMES = 4                 /* tensors that match a name pattern */
} tagc_policy;

enum { TAGC_NO_MILD = 0 }; /* as mild.exchange: no flat is mild */

typedef struct tagc_fsdp_options {
    int sharding; /* tagc_sharding, default FULL */
    int wrap;     /* tagc_wrap, default BLOCK */
    /* [0, 2^40], default 0 (off): neighbouring layers are joined into one unit, a bucket, until it has at least so many
     * values. An embedding keeps a unit of its own. Only with WRAP_BLOCK. */
    uint64_t bucket_elems;
    int policy;        /* tagc_policy, default NON_ATTENTION_LINEAR */
    const char *names; /* POLICY_NAMES: shell patterns, separated by commas, e.g. "h.*.mlp.*,wte.*" */
    /* Of compressed flats; the engine sets n_elems, tag, op, output and paper. */
    tagc_reducer_options reducer;
    int dense_format;         /* tagc_format of dense flats: FP32 (default) or BF16 */
    tagc_paper_options paper; /* of flats that use sketch or packed */
    /* Of mild flats. exchange: TAGC_NO_MILD, DIRECT, or -1 (default): DIRECT if the reducer's is, else TAGC_NO_MILD.
     * sparsity: -1 (default) means the smaller of 0.85 and the reducer's. block, residual: the reducer's, if that is DIRECT. */
    tagc_reducer_options mild;
    int gather; /* tagc_gather_kind of parameter gathers, default FP32; deltas need sharding GRAD */
    int gather_check_every; /* tagc_gatherer_options.check_every, default 0 */
    int ranks_per_host;     /* [1, W], divides W, default 1: used by hybrid sharding and two_level */
    /* 1: the ranks of a host add gradients before they are encoded, if any flat is one of direct, and parameters are sent once to each
     * other host (FULL and GRAD). Default 0. */
    int two_level;
    int prefetch;        /* [0, 64], default 1: units gathered ahead of use */
    int grads_in_flight; /* [1, 8], default 2: full gradients in memory at once if each backward exchanges */
    int n_micro_steps;   /* [1, 65536], default 1: per optimizer step */
    int exchange_each_micro_step; /* 0 (default): only the last one; 1: each, as the published loop does */
    double beta1, beta2, epsilon; /* AdamW, defaults 0.9, 0.95, 1e-8 */
    /* Of compressed flats, [0, 1). -1 (default): the smaller of 0.5 and beta1 for DIRECT above sparsity 0, because its
     * residual averages already; else beta1. With `gentle` beta1 falls to it as tagc/schedule.h says. */
    double beta1_compressed;
    /* Of compressed flats, and of mild ones above sparsity 0, [0, 1). -1 (default): as tagc_schedule_betas says for DIRECT
     * above sparsity 0, because values come seldom; else beta2. A value above beta2 is reached when values have been selected
     * in 3 / (1 - value) updates. */
    double beta2_compressed;
    double weight_decay; /* >= 0, default 0.1; only for tensors with `decay` */
    double clip_norm;    /* >= 0, default 1.0; 0 is off */
    /* 1: flats of DIRECT above sparsity 0 follow the schedule (tagc/schedule.h): they first send every value, and come to the
     * options above when their gradients are noise. 0 (default): the options hold from the first step. */
    int gentle;
    /* 1: the weights that _fill gets are random, and the schedule begins at TAGC_LEVEL_FRESH. 0 (default): they have been
     * trained. If a checkpoint is loaded, it says where its run was. */
    int fresh;
} tagc_fsdp_options;

/* The defaults are those that lost least for their bytes when measured (docs/guide/choosing.md). */
void tagc_fsdp_options_init(tagc_fsdp_options *options);
/* Replaces each -1 (a default that depends on other options) by its value. The engine resolves its own copy; call this to
 * read options without an engine. */
void tagc_fsdp_options_resolve(tagc_fsdp_options *options);

/* The class of this tensor under resolved `options`: compressed by `policy`; else mild with options.mild, if it is a matrix;
 * else dense. A unit has one flat for each class among its tensors. */
tagc_class tagc_fsdp_class(const tagc_fsdp_options *options, const tagc_tensor_info *tensor);

/* Collective. All ranks must pass the same tensor table and options (checked). tensors is copied. trace may be NULL; it
 * and comm must outlive the engine. */
tagc_status tagc_fsdp_create(tagc_comm *comm, const tagc_tensor_info *tensors, int n_tensors,
                             const tagc_fsdp_options *options, tagc_trace *trace, tagc_fsdp **out);
void tagc_fsdp_destroy(tagc_fsdp *fsdp);

/* ---- parameters in and out ---- */

/* Local: calls fill(context, tensor, first, n, values) for each contiguous part this rank owns. */
typedef tagc_status (*tagc_fill_fn)(void *context, int tensor, size_t first, size_t n, float *values);
tagc_status tagc_fsdp_fill(tagc_fsdp *fsdp, tagc_fill_fn fill, void *context);
/* Collective: copies the whole fp32 master of one tensor to values (n_elems) on every rank. */
tagc_status tagc_fsdp_read_tensor(tagc_fsdp *fsdp, int tensor, float *values);

/* ---- one pass ---- */

/* Collective. training = 0: no backward will follow. */
tagc_status tagc_fsdp_forward_begin(tagc_fsdp *fsdp, int training);
tagc_status tagc_fsdp_backward_begin(tagc_fsdp *fsdp);

/* The four calls of a model (context is the tagc_fsdp). _use waits for the unit's gather and starts the next ones.
 * _grad returns the tensor's full gradient, to which the model adds. _grad_done of a unit's last tensor starts the
 * exchange of the unit. */
tagc_status tagc_fsdp_use(void *context, int tensor, const float **values);
void tagc_fsdp_done(void *context, int tensor);
tagc_status tagc_fsdp_grad(void *context, int tensor, float **gradient);
tagc_status tagc_fsdp_grad_done(void *context, int tensor);

/* ---- the update ---- */

typedef struct tagc_fsdp_stats {
    double total_s;       /* from the step's first _forward_begin to the end of _step */
    double compute_s;     /* total minus the exposed waits and the optimizer */
    double wait_gather_s; /* exposed: the caller waited for parameters */
    double wait_reduce_s; /* exposed: the caller waited for gradients */
    double optimizer_s;
    double phase_s[TAGC_N_PHASES]; /* of all reducers, on the codec stream */
    /* By this rank in this step, counted by the transport. With sharding GRAD they include the gathers of the parameters
     * that the step used, which the previous update began (or, for the first step, the forward pass). */
    uint64_t n_bytes_sent[TAGC_N_LEGS];
    uint64_t n_bytes_received[TAGC_N_LEGS];
    double bits_per_param[TAGC_N_LEGS]; /* n_bytes_sent * 8 / n_params */
    double grad_norm;                   /* of the averaged gradient, before clipping */
    /* 1: a gradient was not finite. Parameters, moments, and the residuals of the flats that held it are as before; other
     * flats were already sent. */
    int skipped;
    /* Over the compressed flats. If the ranks of a host add first, n_sent extrapolates from this rank's part to all. */
    uint64_t n_sent, n_union, n_returned, n_unpeeled, n_lost, n_compressed;
    uint64_t n_mild, n_mild_sent;                /* over the mild flats */
    uint64_t n_class_bytes_sent[TAGC_N_CLASSES]; /* of gradients, over all legs */
    int n_at_level[TAGC_N_LEVELS];               /* flats that follow the schedule, by their level */
    double load;                                 /* largest of any sketch */
    int peel_rounds;                             /* largest */
} tagc_fsdp_stats;

/* Collective. Waits for the exchanges, clips, and updates the owned shards with learning rate `lr`.
 * The model adds gradients of its mean loss; the engine takes the mean over ranks and micro-steps. */
tagc_status tagc_fsdp_step(tagc_fsdp *fsdp, double lr, tagc_fsdp_stats *stats);

/* ---- the schedule ---- */

/* Local: hands over a loss of this rank, once per step, before _step. */
void tagc_fsdp_watch_loss(tagc_fsdp *fsdp, double loss);
/* Flats that follow the schedule, by their level. */
void tagc_fsdp_levels(const tagc_fsdp *fsdp, int n_flats[TAGC_N_LEVELS]);
/* How many of these are below TAGC_LEVEL_LAST. */
int tagc_fsdp_n_below_last(const int n_flats[TAGC_N_LEVELS]);
/* For plans and alarms; NULL: no flat follows one. */
tagc_schedule *tagc_fsdp_schedule(tagc_fsdp *fsdp);

/* ---- the layout ---- */

uint64_t tagc_fsdp_n_params(const tagc_fsdp *fsdp);     /* of the whole model, without padding */
uint64_t tagc_fsdp_n_compressed(const tagc_fsdp *fsdp); /* of these, in compressed flats */
uint64_t tagc_fsdp_n_mild(const tagc_fsdp *fsdp);       /* of these, in mild flats */
int tagc_fsdp_n_units(const tagc_fsdp *fsdp);
const char *tagc_fsdp_unit_name(const tagc_fsdp *fsdp, int unit);

/* A flat: the tensors of one class of one unit. */
typedef struct tagc_layout_flat {
    int unit, class_;             /* tagc_class */
    uint64_t n_elems, n_padded;   /* without and with padding */
    tagc_reducer_options reducer; /* of what is sent between hosts; n_elems: of a place */
    int n_adding;                 /* ranks of a host that add up before that; 1: each rank sends by itself */
    tagc_reducer_options within;  /* of what these send each other */
    int has_gatherer;             /* 0 where parameters are replicated */
    tagc_gatherer_options gatherer;
} tagc_layout_flat;
tagc_status tagc_fsdp_flat_info(const tagc_fsdp *fsdp, int flat, tagc_layout_flat *out);
/* Bytes this rank holds, by purpose. */
typedef struct tagc_fsdp_memory {
    uint64_t parameters, gradients, optimizer, residuals;
} tagc_fsdp_memory;
void tagc_fsdp_memory_used(const tagc_fsdp *fsdp, tagc_fsdp_memory *out);

#endif
