/* tagc_model: the exchange of a model's gradients, in one object.
 *
 * A program that trains over several ranks has tensors. Once per step, each rank has a gradient of every tensor. The object sums these
 * gradients over the ranks, in few bits, and gives each rank the sums that it owns. What was not sent stays behind, as a residual, and
 * is added to the next gradient. The object decides what each tensor may send, from the gradients themselves (tagc/schedule.h).
 *
 *     tagc_model_create(NULL, comm, tensors, n_tensors, &options, &model);      once
 *
 *     for each step
 *         for each unit, as soon as its gradients are there
 *             tagc_model_begin(model, unit, gradients, n, sums, m);             returns at once
 *         for each unit
 *             tagc_model_end(model, unit, NULL);                                the sums are there
 *         tagc_model_betas(model, tensor, 0.9, 0.95, &beta1, &beta2);           for the optimizer's step
 *         tagc_model_step(model, loss);                                         decides what the next step sends
 *
 * examples/train.c is such a program, with checkpoints.
 *
 * Terms
 *   tensor   A parameter of the model, with a name. Ranks know it by its number, from 0, in the list that _create got.
 *   unit     Tensors whose gradients are exchanged together, such as those of one block of a transformer. A unit whose exchange begins
 *            early overlaps with the computation of the others.
 *   class    How a tensor is exchanged (tagc/policy.h): COMPRESSED sends a small part of its values, MILD more of them, DENSE all.
 *   piece    Elements of a tensor that lie one after the other in memory.
 *   host     A machine. Inside a host bytes are nearly free, between hosts they are what costs.
 *   place    The number of a rank within its host.
 *
 * Who owns what
 *   A tensor is cut along its first dimension into as many chunks as there are owners, as torch.chunk does: each has
 *   ceil(shape[0] / owners) rows, but the last ones may have fewer or none. tagc_model_owned tells which.
 *
 *   output            owners           what a rank gets
 *   SHARD             all W ranks      chunk `rank` of every tensor (a reduce-scatter; FSDP, ZeRO)
 *   HOST_SHARD        ranks of a host  chunk `place`, the same on every host (hybrid sharding)
 *   UNIT              nobody           everything (an all-reduce; data parallel)
 *
 *   Another way to cut is tagc_cut.
 *
 * Calls are local unless their comment says "collective". One thread at a time may use a model. */
#ifndef TAGC_MODEL_H
#define TAGC_MODEL_H

#include "tagc/policy.h"
#include "tagc/schedule.h"
#include "tagc/tagc.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tagc_model tagc_model;

/* The class of a tensor is that of its name and shape. */
#define TAGC_CLASS_BY_NAME (-1)

/* Into what owners' parts are cut. */
typedef enum tagc_cut {
    /* Each tensor along its first dimension, see above. */
    TAGC_CUT_ROWS = 0,
    /* Those tensors of a unit that have one class lie end to end, in the order of their numbers, in a flat of tagc_padded_elems(n, W)
     * elements. It is cut into as many equal chunks as there are owners, who so have any run of elements of a tensor, or none. All
     * tensors of a flat are exchanged as one: at the level of the most careful of them. */
    TAGC_CUT_FLAT = 1,
    /* The same, where the caller has each flat as one array, with the padding, in fp32. _begin gets these arrays, and where each host has one
     * rank nothing is copied. */
    TAGC_CUT_FLAT_ARRAYS = 2,
    /* Each tensor where the caller says: `ranges` of the layout. Not with the output UNIT. _save and _load are TAGC_ERR_UNSUPPORTED:
     * _get_residual has what is not sent. */
    TAGC_CUT_RANGES = 3
} tagc_cut;

typedef struct tagc_tensor {
    /* Not empty, at most 1023 bytes, another one for each tensor. Saved states go by it. */
    const char *name;
    /* (n_dims,), each at least 1. n_dims is 0 for a single value. */
    const uint64_t *shape;
    size_t n_dims;
    /* From 0 on. Numbers of units must not leave one out. */
    uint32_t unit;
    /* A tagc_class, or TAGC_CLASS_BY_NAME. */
    int kind;
} tagc_tensor;

/* Elements [first, first + n_elems) of a tensor, at `values`. */
typedef struct tagc_piece {
    uint32_t tensor;
    uint64_t first, n_elems;
    void *values;
} tagc_piece;

/* What tensors send, step by step. */
typedef struct tagc_model_schedule_options {
    /* What the classes COMPRESSED and MILD send in the end, and how they come there. Copied. Default NULL: the defaults of
     * tagc_schedule_options, but `fresh`. */
    const tagc_schedule_options *options;
    /* tagc_moment of every tensor, see tagc_model_set_moment. Default STAYS. SHORTENS if the optimizer is an Adam that takes the betas
     * of tagc_model_betas. */
    int moment;
    /* A schedule that the caller creates, steps, saves and destroys, after the model: so several models, such as one for each bucket
     * of a trainer that regroups tensors, decide together. See "A schedule of the caller's" below. Default NULL: the model has its
     * own. `options` must be those of this one, and `moment` does not count. */
    tagc_schedule *follows;
    /* (n_tensors,), copied: the number of each tensor in `follows`; of a DENSE one any. NULL without it. */
    const uint32_t *numbers;
} tagc_model_schedule_options;

/* Who gets which elements, and what is exchanged as one. */
typedef struct tagc_model_layout_options {
    /* tagc_output, default SHARD. */
    int output;
    /* tagc_cut, default ROWS. */
    int cut;
    /* (n_tensors, owners + 1), copied: with TAGC_CUT_RANGES, owner o has elements [ranges[t][o], ranges[t][o + 1]) of tensor t; they go
     * up from 0 to its number of elements. Owners are W ranks, or with HOST_SHARD those of a host. Default NULL. */
    const uint64_t *ranges;
    /* Matrices of fewer elements are DENSE by name. Default TAGC_CLASS_MIN_ELEMS. */
    uint64_t min_elems;
    /* (n_tensors,), copied. Tensors with different numbers are never exchanged as one, as those that tensor parallelism replicates and
     * those that it splits must not be: the former stay equal on its ranks. Default NULL: all numbers are 0. */
    const uint32_t *apart;
} tagc_model_layout_options;

/* As what values are read, sent, kept and written. */
typedef struct tagc_model_format_options {
    /* tagc_element of gradients, and of sums. Default FP32. The mean of fp16 gradients fits into fp16: what rounding and residuals put
     * beyond waits in the residual, as far as there is memory for that. */
    int gradient, sum;
    /* tagc_format of the class DENSE, FP32 (default) or BF16. Sums are made in fp32. */
    int dense;
    /* tagc_format in which residuals are stored: FP32, INT8 or INT4; or TAGC_RESIDUAL_NONE, as in tagc_reducer_options. Default -1:
     * INT8. */
    int residual;
    /* As in tagc_reducer_options, for what DIRECT exchanges; a level may ask for smaller blocks. Default 0. */
    int block;
    /* `result` of tagc_reducer_options, of the class COMPRESSED while it sends a part of its values.
     * Defaults -1. */
    int result;
    double result_sparsity;
} tagc_model_format_options;

/* What happens within a host of several ranks. */
typedef struct tagc_model_host_options {
    /* tagc_format in which ranks of a host send each other what they add up: FP32 or BF16. Default -1: FP32 if that is what hosts send,
     * else BF16. */
    int format;
    /* 1: the caller has added gradients up within each host, as where a device's own library does it. `within` then only agrees. A rank
     * gives the host's sums of what ranks of its place get (tagc_model_owned of ranks h * L + place, for each host h), and AVG divides by the
     * number of hosts. Not with UNIT, where ranks of a host would need each other's sums: take HOST_SHARD. Default 0. */
    int summed;
} tagc_model_host_options;

/* The defaults suit a model with random weights and an optimizer of which nothing is known: every value travels, in 8 bits for 60 steps
 * and in 4 bits after them. To send less, say what the optimizer's first moment is (`schedule.moment`). */
typedef struct tagc_model_options {
    /* Written by _init. */
    size_t struct_bytes;
    tagc_model_schedule_options schedule;
    tagc_model_layout_options layout;
    tagc_model_format_options formats;
    tagc_model_host_options hosts;
    /* tagc_exchange of the class COMPRESSED, default DIRECT. SKETCH and PACKED are the paper's; they have no levels of the schedule, and
     * FP32 residuals. */
    int exchange;
    /* tagc_op, default AVG: the sum divided by the number of ranks. */
    int op;
    /* Options of SKETCH and PACKED. Copied. Default NULL: the defaults of tagc_paper_options. */
    const struct tagc_paper_options *paper;
    /* Threads that encode and decode. Results do not depend on it. [1, 256], default 1. */
    int n_threads;
    /* 1: a tensor whose gradient is zero on this rank keeps what is not sent yet, as where sums of tensors that no rank used are
     * thrown away. With hosts of several ranks, their sum of what this place gets counts. Default 0. */
    int rests;
    /* tagc_reducer_options.tag of unit 0; those after it have the numbers after it. Models whose units are under way at different
     * times share work memory if their tags differ. Default 0. */
    uint64_t tag;
    /* What messages call the model's exchanges; at most 95 bytes, more are cut. Copied. Default NULL: they name the unit and its first
     * tensor. */
    const char *name;
} tagc_model_options;

TAGC_API void tagc_model_options_init_sized(tagc_model_options *options, size_t struct_bytes);
#define tagc_model_options_init(options) tagc_model_options_init_sized((options), sizeof *(options))

/* Collective over both comms. Makes the exchange of a model's gradients. TAGC_ERR_MISMATCH on all ranks if tensors or options differ.
 *
 * within:   the ranks of this host, by place; NULL if each host has one rank.
 * between:  the ranks of this place, one on each host, by host. Without `within`, all ranks.
 * Every host has as many ranks. Rank h * L + l is place l of host h, where a host has L ranks. Ranks of a host first add their
 * gradients up, and only the hosts' sums cross the slow link, each value once.
 * tensors:  (n_tensors,), copied. n_tensors is in [1, 2^20].
 * options:  NULL: the defaults.
 * Both comms must outlive the calls that communicate. The model holds, per value of a compressed tensor, one byte of residual divided by
 * the number of ranks of a host. */
TAGC_API tagc_status tagc_model_create(tagc_comm *within, tagc_comm *between, const tagc_tensor *tensors,
                                       size_t n_tensors, const tagc_model_options *options, tagc_model **out);

/* Accepts NULL. Waits for units that are under way. */
TAGC_API void tagc_model_destroy(tagc_model *model);

/* Writes which elements of a tensor a rank gets: [*first, *first + *n_elems). *n_elems may be 0. rank: in [0, W). */
TAGC_API tagc_status tagc_model_owned(const tagc_model *model, int rank, uint32_t tensor, uint64_t *first,
                                      uint64_t *n_elems);

/* Returns the class of a tensor, a tagc_class; -1 if there is no such tensor. */
TAGC_API int tagc_model_class(const tagc_model *model, uint32_t tensor);

/* Writes what a tensor sends at present. Of a tensor without levels, `level` is LAST. */
TAGC_API tagc_status tagc_model_plan(const tagc_model *model, uint32_t tensor, tagc_schedule_plan *plan);

/* ---- a step ---- */

/* Collective. Starts to sum the gradients of a unit's tensors over all ranks. Returns at once. All ranks begin units in the same order;
 * another order on one rank is TAGC_ERR_MISMATCH on all. Several units may be under way. A call with a unit that there is not, or that is
 * under way, begins nothing: the others wait until this rank begins theirs.
 *
 * gradients  (n_gradients,): pieces of this unit's tensors. Those of one tensor come one
 *            after the other, in ascending order, and do not overlap. Elements that no piece
 *            covers count as zero. With hosts of several ranks, the host's sums take the place
 *            of the gradients of what ranks of this place get (tagc_model_owned of ranks
 *            h * L + place, for each host h; with HOST_SHARD and UNIT chunk `place` of the host's
 *            ranks). Pieces must cover those of which another rank of the host has a gradient that
 *            is not zero.
 * sums       (n_sums,): where sums go. Each piece lies within what this rank gets (tagc_model_owned). Elements that no piece covers are
 *            dropped. They may lie in the gradients, each element at its own place.
 * Both lists and all arrays stay the caller's, and must not be touched until _end returns.
 *
 * With TAGC_CUT_FLAT_ARRAYS both lists have one piece for each flat of the unit: its first tensor, first 0, and the whole flat with its
 * padding, of which gradients are zero; of sums this rank's chunk, or with UNIT the whole flat. The arrays do not overlap. */
TAGC_API tagc_status tagc_model_begin(tagc_model *model, uint32_t unit, const tagc_piece *gradients,
                                      size_t n_gradients, const tagc_piece *sums, size_t n_sums);

/* Collective, in the place of _begin, on a rank that has no gradients to give: its _end returns this failure, which is not
 * TAGC_OK, and that of the others one which names this rank. text: why. */
TAGC_API tagc_status tagc_model_begin_failed(tagc_model *model, uint32_t unit, tagc_status failure,
                                             const char *text);

/* Collective in effect. Sets a number that all ranks must have alike in the next exchanges of a unit, such as a checksum of what else
 * they must agree on: if they have not, _end is TAGC_ERR_MISMATCH on all, also where a rank has failed. It travels in a message that is sent anyway.
 * Default 0. */
TAGC_API tagc_status tagc_model_set_word(tagc_model *model, uint32_t unit, uint64_t word);

/* Collective, in the place of _begin and _end. Returns TAGC_OK if all ranks ask with the same word, as where all of them are about to change
 * what they exchange; else TAGC_ERR_MISMATCH on all, also on those that have begun an exchange. Nothing is exchanged, and nothing
 * changes. */
TAGC_API tagc_status tagc_model_ask(tagc_model *model, uint32_t unit, uint64_t word);

/* Collective in effect. Sets by what the next sums of a unit are multiplied. Finite in fp32. Default 1, which it stays with
 * TAGC_CUT_FLAT_ARRAYS. */
TAGC_API tagc_status tagc_model_set_factor(tagc_model *model, uint32_t unit, double factor);

/* Never blocks. Sets *done to 1 if _end would return at once, else to 0. */
TAGC_API tagc_status tagc_model_test(tagc_model *model, uint32_t unit, int *done);

/* Statistics of one exchange of a unit, over all its parts. */
typedef struct tagc_model_stats {
    /* Written by _init. */
    size_t struct_bytes;
    /* Bytes sent to and received from ranks of other hosts, and of this host. */
    uint64_t n_bytes_sent, n_bytes_received, n_bytes_within;
    /* Values that this rank selected, of how many. */
    uint64_t n_sent, n_elems;
    /* From the start on tagc's thread to the end. */
    double total_s;
    /* 1: some rank's gradient had NaN or Inf, or a sum overflowed. Sums are NaN, and residuals as before. */
    uint64_t nonfinite;
    /* Sums of this rank's that were beyond fp16 (`formats.sum` in the options). */
    uint64_t n_saturated;
    /* 1: this rank failed in the exchange, perhaps beside others; 0: it did not, or the exchange did not fail. */
    uint64_t failed_here;
} tagc_model_stats;

TAGC_API void tagc_model_stats_init_sized(tagc_model_stats *stats, size_t struct_bytes);
#define tagc_model_stats_init(stats) tagc_model_stats_init_sized((stats), sizeof *(stats))

/* Waits for the exchange that _begin started. All ranks return the same status, unless a comm broke. After a failure the sums are
 * undefined, and residuals as before. But where the failure is in one part of the unit, or in one place of a host, as by a damaged message,
 * the other parts and places have exchanged theirs: what these sent is lost, and what they did not send is in their residuals; tagc_model_forget
 * drops it. With hosts of several ranks it communicates within the host, and ends exchanges that began earlier, too. stats: NULL, or
 * initialised; after a failure only failed_here is written. */
TAGC_API tagc_status tagc_model_end(tagc_model *model, uint32_t unit, tagc_model_stats *stats);

/* Returns the number of a unit's parts: tensors of one class and level, which are exchanged as one. 0 if there is no such unit. */
TAGC_API uint32_t tagc_model_n_parts(const tagc_model *model, uint32_t unit);

/* Writes the statistics of a part in the exchange of its unit that ended last, without the bytes within a host; one of its tensors,
 * whose class and plan are the part's; and the elements of all its tensors as they are exchanged, with the padding of owners' chunks.
 * tensor, n_elems, stats: NULL, or where to. */
TAGC_API tagc_status tagc_model_part_stats(const tagc_model *model, uint32_t unit, uint32_t part,
                                           uint32_t *tensor, uint64_t *n_elems, tagc_reducer_stats *stats);

/* Collective. Ends a step of the whole model, when no unit is under way: adds up over ranks what the schedule has seen, and decides
 * what the next step sends. Once in 20 steps it communicates and waits; otherwise it does not. loss: of this rank's batch, NaN if
 * unknown. */
TAGC_API tagc_status tagc_model_step(tagc_model *model, double loss);

/* Writes the betas of an Adam for a tensor in this step, from the user's own. See "The first moment" in tagc/schedule.h. */
TAGC_API tagc_status tagc_model_betas(const tagc_model *model, uint32_t tensor, double beta1, double beta2,
                                      double *own_beta1, double *own_beta2);

/* Collective in effect. Says what the optimizer has of a tensor's first moment, in place of options.schedule.moment. */
TAGC_API tagc_status tagc_model_set_moment(tagc_model *model, uint32_t tensor, tagc_moment moment);

/* Collective in effect. Says that gradients are multiplied by `factor` from now on, as a loss scaler does: residuals follow. (0, inf). */
TAGC_API tagc_status tagc_model_scale(tagc_model *model, double factor);

/* Collective in effect. Sets the number of exchanges of every unit so far, from which the rounding of residuals derives, so that a run
 * whose checkpoints are not those of _save goes on bit for bit. */
TAGC_API tagc_status tagc_model_set_exchanges(tagc_model *model, uint64_t n_exchanges);

/* Writes what all objects of both comms hold now. */
TAGC_API tagc_status tagc_model_memory(const tagc_model *model, tagc_memory *memory);

/* ---- a schedule of the caller's ----
 *
 * With options.schedule.follows, _step, _set_moment, _save and _load are TAGC_ERR_STATE. At the end of a step, the caller takes the full windows
 * of all units, adds their sums up over ranks, and gives them to the schedule. Where that changes plans, the models follow. */

/* Takes windows that became full in the exchange of a unit that ended last: numbers, as in options.schedule.numbers, and this rank's sums of
 * each, both (tensors of the unit,); and how many to *n. Local. */
TAGC_API tagc_status tagc_model_take_full(tagc_model *model, uint32_t unit, uint32_t *numbers,
                                          tagc_schedule_sums *sums, size_t *n);

/* Collective. Takes up the plans that the schedule has now. No unit may be under way. */
TAGC_API tagc_status tagc_model_follow(tagc_model *model);

/* ---- residuals ---- */

/* Returns 1 if this rank keeps what is not sent of a tensor, else 0. */
TAGC_API int tagc_model_has_residual(const tagc_model *model, uint32_t tensor);

/* Copies what this rank keeps of a unit's tensors to fp32 pieces, which are as gradients' in _begin. Elements of which it keeps nothing
 * are left alone. Local; the unit must not be under way. */
TAGC_API tagc_status tagc_model_get_residual(tagc_model *model, uint32_t unit, const tagc_piece *pieces,
                                             size_t n);

/* Replaces what this rank keeps of a unit's tensors. What no piece covers becomes zero. Values must be finite. */
TAGC_API tagc_status tagc_model_set_residual(tagc_model *model, uint32_t unit, const tagc_piece *pieces,
                                             size_t n);

/* Makes all residuals zero. Local. */
TAGC_API tagc_status tagc_model_forget(tagc_model *model);

/* ---- checkpoints ---- */

/* Writes this rank's residuals, the schedule and the number of steps to `bytes` (n_bytes,), and the size to *n_written; with `bytes`
 * NULL the size alone. No unit may be under way. Keep what every rank writes. docs/reference/wire-format.md describes the bytes. */
TAGC_API tagc_status tagc_model_save(const tagc_model *model, void *bytes, size_t n_bytes, size_t *n_written);

/* Collective. Takes over what _save wrote on all ranks of a run, which may have had other numbers of ranks and hosts. Tensors go by
 * name; what the files lack begins anew. With the same ranks, training goes on bit for bit; otherwise the sums of residuals over ranks
 * stay what they were.
 *
 * files (n_files,), sizes (n_files,): what this rank can read. Rank r takes those of the former ranks r, r + W and so on, and looks at
 * nothing but the header of the others: it is enough to pass the ones it takes. TAGC_ERR_STATE on all ranks if one is missing or came
 * twice; TAGC_ERR_CORRUPT if one is damaged, TAGC_ERR_MISMATCH if it is of another run or model. Then nothing has changed. */
TAGC_API tagc_status tagc_model_load(tagc_model *model, const void *const *files, const size_t *sizes,
                                     size_t n_files);

#ifdef __cplusplus
}
#endif

#endif
