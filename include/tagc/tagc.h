/* tagc: compressed gradient exchange for sharded data parallel training.
 *
 *   comm      one rank's connection to the other ranks
 *   reducer   exchanges the gradient of one unit: every rank sends, the owner of each shard gets the sum
 *   gatherer  exchanges the parameters of one unit: the owner of each shard sends, every rank gets the unit
 *
 * Terms
 *   W          The world size: the number of ranks.
 *   unit       The values that are exchanged together, such as the parameters of one transformer block.
 *   shard      The part of a unit that one rank owns. A unit of n_elems = W * shard values is an array
 *              (W, shard). Rank d owns row d. tagc_reducer_options.n_elems says what holds for other numbers.
 *   fragment   What one rank contributes to one shard: row d of its gradient.
 *   residual   The part of the gradients that this rank has not sent yet. The reducer keeps it and adds it to
 *              the next gradient (error feedback).
 *   leg        A category of traffic, for byte counts: index, values, parameters and so on.
 *   host       A machine. Objects of this header know one level, the ranks of their comm; where hosts have several ranks, tagc/model.h
 *              exchanges over two.
 *   docs/reference/glossary.md defines all terms.
 *
 * Conventions
 *   - n_elems counts fp32 values, n_bytes counts bytes, and *_s is in seconds.
 *   - An array comes with its length, in elements where n_ and the array's name say it. It must be what the comment of the function says;
 *     otherwise TAGC_ERR_ARGUMENT names the argument, its value and what it must be. The library touches nothing beyond it.
 *   - Every rank must call a "collective" function, and all ranks must call them in the same order. Other
 *     functions are local. Some local functions are "collective in effect": they do not communicate, but
 *     every rank must make the same call between the same two steps.
 *   - Functions that return tagc_status report errors through it. After a failure, tagc_last_error() describes
 *     the argument, its value and what is allowed. It is per thread.
 *   - When a _create function fails, *out is NULL. Each _destroy function accepts NULL.
 *   - A comm, its reducers, its gatherers and its local group may be destroyed in any order. tagc_comm_destroy says what
 *     is left of a reducer whose comm is gone. The objects of tagc/device.h have an order, which that file gives.
 *   - Objects are not locked. Only one thread at a time may use an object. Different threads may use different
 *     objects of one comm if the transport has TAGC_TRANSPORT_LANES.
 *   - Structs of options and statistics start with struct_bytes, their size in the caller's header. Always call
 *     their _init first: it sets struct_bytes and gives every other field its default. If the library has
 *     fields that the caller's header lacks, they get their defaults. If the caller's header has fields
 *     that the library lacks, they must be zero; otherwise the library refuses the struct.
 *   - docs/reference/abi.md says what may change between versions. */
#ifndef TAGC_TAGC_H
#define TAGC_TAGC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define TAGC_API
#else
#define TAGC_API __attribute__((visibility("default")))
#endif

#define TAGC_VERSION_MAJOR 0
#define TAGC_VERSION_MINOR 2
#define TAGC_VERSION_PATCH 0
/* Of this header, for comparisons in the preprocessor: major * 10000 + minor * 100 + patch. */
#define TAGC_VERSION_NUMBER (TAGC_VERSION_MAJOR * 10000 + TAGC_VERSION_MINOR * 100 + TAGC_VERSION_PATCH)

/* Return the version of the loaded library, as "major.minor.patch" and as TAGC_VERSION_NUMBER. */
TAGC_API const char *tagc_version(void);
TAGC_API int tagc_version_number(void);

/* Returns a checksum of 64 bits, XXH3, which is the same on every machine. `bytes` may be NULL if n_bytes is 0. */
TAGC_API uint64_t tagc_checksum(const void *bytes, uint64_t n_bytes);

/* ---- failures ---- */

typedef enum tagc_status {
    TAGC_OK = 0,
    /* A value is out of its range. */
    TAGC_ERR_ARGUMENT = 1,
    /* The calls are in the wrong order, such as _end without _begin. */
    TAGC_ERR_STATE = 2,
    /* An allocation failed. */
    TAGC_ERR_MEMORY = 3,
    /* The ranks passed different options or shapes. If one sends another number of bytes than its peer expects, the comm breaks, too. */
    TAGC_ERR_MISMATCH = 4,
    /* A peer ended or gave up, or the connection with it broke. The comm can only be destroyed. */
    TAGC_ERR_TRANSPORT = 5,
    /* Received or loaded bytes are damaged. */
    TAGC_ERR_CORRUPT = 6,
    /* The value is valid, but this build or this exchange does not support it. */
    TAGC_ERR_UNSUPPORTED = 7,
    /* A device or its runtime reported a failure. (The tagc command uses 8 and 9.) */
    TAGC_ERR_DEVICE = 10,
    /* A peer was silent for timeout_s, or a transfer took longer than total_timeout_s. The comm can only be destroyed. */
    TAGC_ERR_TIMEOUT = 11
} tagc_status;

/* Returns the name of a status, such as "out of memory". */
TAGC_API const char *tagc_status_name(tagc_status status);

/* Returns the text of this thread's last failure, never NULL. It is valid until this thread's next failure. */
TAGC_API const char *tagc_last_error(void);

/* ---- number formats ---- */

/* How a value is encoded on the wire. The comment of each `format` option lists the formats that it supports. */
typedef enum tagc_format {
    TAGC_FORMAT_FP32 = 0,
    TAGC_FORMAT_BF16 = 1,
    /* INT8, INT4 and INT2 share one scale per block of values. */
    TAGC_FORMAT_INT8 = 2,
    TAGC_FORMAT_INT4 = 3,
    TAGC_FORMAT_INT2 = 4
} tagc_format;

/* How values lie in an array of the caller's. */
typedef enum tagc_element {
    TAGC_ELEMENT_FP32 = 0, /* float */
    TAGC_ELEMENT_BF16 = 1, /* uint16_t, the upper half of a float */
    TAGC_ELEMENT_FP16 = 2  /* uint16_t, IEEE binary16 */
} tagc_element;

/* How a value is rounded to one that the format has. */
typedef enum tagc_rounding {
    /* To the nearest. */
    TAGC_ROUNDING_NEAREST = 0,
    /* To one of the two next values, to the nearer with the greater probability, so that the mean error is zero. The
     * probabilities have 24 bits (INT4: 28), so the mean is right to 10^-9 of a block's largest value. */
    TAGC_ROUNDING_STOCHASTIC = 1
} tagc_rounding;

/* ---- comm: one rank's connection ---- */

typedef struct tagc_comm tagc_comm;

/* What a byte on the wire was used for. */
typedef enum tagc_leg {
    /* The positions of the elements that are sent. */
    TAGC_LEG_INDEX = 0,
    /* Their values: sketch cells, packed or encoded values, or the dense gradient. */
    TAGC_LEG_VALUES = 1,
    /* Values that could not be recovered from a sketch, sent uncompressed. */
    TAGC_LEG_LEFTOVER = 2,
    /* Sums, from their owner to other ranks. Only when the output is larger than the rank's own shard. */
    TAGC_LEG_RESULT = 3,
    /* Parameters, from their owner to other ranks. */
    TAGC_LEG_GATHER = 4,
    /* Headers, and the messages by which ranks agree on the outcome of a step. */
    TAGC_LEG_CONTROL = 5,
    TAGC_N_LEGS = 6
} tagc_leg;

/* Returns "index", "values", ..., or "?" outside [0, TAGC_N_LEGS). */
TAGC_API const char *tagc_leg_name(int leg);

/* One piece of work that a thread of tagc's did, for a timeline. */
typedef struct tagc_event {
    /* "comm" for a transfer, "codec" for selection, encoding and decoding. A static string. */
    const char *stream;
    /* The name of a leg or a phase. A static string. */
    const char *name;
    /* On the clock of tagc_time_s. */
    double start_s, end_s;
    /* Bytes sent to other ranks; 0 for codec work. */
    uint64_t n_bytes;
    /* The `tag` option of the reducer or gatherer, or UINT64_MAX if there is none. */
    uint64_t tag;
} tagc_event;

typedef void (*tagc_trace_fn)(void *context, const tagc_event *event);

typedef struct tagc_comm_options {
    /* Written by _init. */
    size_t struct_bytes;
    /* The comm breaks when a transfer is in progress and no byte of any transfer of this comm moves for this long.
     * The callback transport ignores it; the caller's function has to time out by itself. (0, 1e6], default 120. */
    double timeout_s;
    /* Called after each piece of work, from tagc's threads. It must be thread-safe and fast. Default NULL. */
    tagc_trace_fn trace;
    /* Passed to `trace`. */
    void *trace_context;
    /* The comm breaks when one transfer takes longer than this, even if bytes still move. [0, 1e6], default 0:
     * no limit. */
    double total_timeout_s;
    /* What messages call the ranks, (W): for a comm of some ranks of a job, their numbers in the job. Copied. Default NULL: their
     * numbers in the comm, or for the native transport those of its options. */
    const int32_t *names;
    /* Bytes for steps of other units beside that of the largest one, of reducers and of gatherers each, and for spare residuals of a size
     * beside one: then several units are under way at once. Fewer suit ranks that share a host's memory, and who begins a unit when the
     * one before has ended. Any number, default 2^25 (32 MB). */
    uint64_t more_work_bytes;
} tagc_comm_options;

TAGC_API void tagc_comm_options_init_sized(tagc_comm_options *options, size_t struct_bytes);
#define tagc_comm_options_init(options) tagc_comm_options_init_sized((options), sizeof *(options))

/* Ranks that are threads of one process. One thread creates the group; then each thread creates its own comm.
 * world_size is in [1, 1024]. If the group is destroyed before its comms, they go on as before. */
typedef struct tagc_local_group tagc_local_group;
TAGC_API tagc_status tagc_local_group_create(int world_size, tagc_local_group **out);
TAGC_API void tagc_local_group_destroy(tagc_local_group *group);
TAGC_API tagc_status tagc_comm_create_local(tagc_local_group *group, int rank,
                                            const tagc_comm_options *options, tagc_comm **out);

/* `options` may be NULL. Other transports: tagc/mpi.h for MPI, tagc/transport.h for your own. */

TAGC_API int tagc_comm_rank(const tagc_comm *comm);
TAGC_API int tagc_comm_world_size(const tagc_comm *comm);

/* Writes the bytes sent to and received from other ranks since the comm was created. Both arrays are (n_legs,),
 * indexed by tagc_leg. Either may be NULL. Pass TAGC_N_LEGS as n_legs. A leg that the library does not know is 0. */
TAGC_API void tagc_comm_bytes(const tagc_comm *comm, uint64_t *sent, uint64_t *received, int n_legs);

/* Returns 1 if no transfer is in progress. */
TAGC_API int tagc_comm_is_idle(const tagc_comm *comm);

/* Collective, blocking. Writes the n_bytes of every rank, in rank order, to recv (n_recv_bytes), which is (W, n_bytes). Its bytes count as
 * TAGC_LEG_CONTROL. */
TAGC_API tagc_status tagc_comm_all_gather(tagc_comm *comm, const void *send, size_t n_bytes, void *recv,
                                          size_t n_recv_bytes);

/* Collective, blocking. Returns after every rank has called it. */
TAGC_API tagc_status tagc_comm_barrier(tagc_comm *comm);

/* Tells the peers that this rank gives up, so that they fail with `reason` instead of waiting, and TAGC_ERR_TRANSPORT. Over MPI it ends
 * the whole job (MPI_Abort). Afterwards the comm can only be destroyed. */
TAGC_API void tagc_comm_abort(tagc_comm *comm, const char *reason);

/* Returns the rank, as options.names calls it, that broke the comm: it ended, gave up, was silent, or sent what it should not. -1 if
 * the comm is not broken, or nobody knows the rank. The rank that finds the failure tells the others, over transports that can. Then all
 * of them return the same status and the same rank. */
TAGC_API int tagc_comm_failed_rank(const tagc_comm *comm);

/* Waits for the steps and gathers that are in progress, then ends the threads and the connection. When it returns, the
 * transport no longer uses what the caller gave it: the context of a callback, the MPI communicator.
 *
 * Reducers and gatherers of the comm may still exist. Their _end returns the result of a step that was in progress, the residual
 * and the replica can be read, saved and loaded, and _destroy works as before. Their _begin returns TAGC_ERR_STATE. The comm itself
 * must not be used any more. In a fork of the process _destroy does nothing, and what communicates returns TAGC_ERR_STATE. */
TAGC_API void tagc_comm_destroy(tagc_comm *comm);

/* Returns the time of the monotonic clock that events and statistics use. */
TAGC_API double tagc_time_s(void);

/* ---- reducer: the gradient of one unit ---- */

typedef struct tagc_reducer tagc_reducer;

/* How the ranks exchange gradients. */
typedef enum tagc_exchange {
    /* Algorithm 1 of the TAGC paper: ranks agree on an index, then send a count sketch. tagc/paper.h has its
     * options. */
    TAGC_EXCHANGE_SKETCH = 1,
    /* Ranks agree on an index, then send the values at its positions in order. tagc/paper.h has its options. */
    TAGC_EXCHANGE_PACKED = 2,
    /* Each rank sends its own positions and values straight to their owner, which adds them in rank order. The volume does not grow
     * with W. At sparsity 0 every value is sent: in FP32 or BF16 as it is. */
    TAGC_EXCHANGE_DIRECT = 3
} tagc_exchange;

typedef enum tagc_op {
    /* The sum divided by W. */
    TAGC_OP_AVG = 0,
    TAGC_OP_SUM = 1
} tagc_op;

/* Which of the sums a rank gets. */
typedef enum tagc_output {
    /* Its own shard (a reduce-scatter). */
    TAGC_OUTPUT_SHARD = 0,
    /* The whole unit (an all-reduce). */
    TAGC_OUTPUT_UNIT = 1,
    /* What its place owns, the same on every host. Only of a tagc_model (tagc/model.h). */
    TAGC_OUTPUT_HOST_SHARD = 2
} tagc_output;

/* In tagc_reducer_options.residual: no residual, and nothing carries over from one step to the next. For what is reduced
 * once, or to save its memory. Only direct has it. The sender rounds values at random (TAGC_ROUNDING_STOCHASTIC), and where
 * sums are sent back, their owner rounds these, too. So the mean of a sum over many roundings is the exact sum, and errors of
 * ranks do not add up in one direction. A rounding has a variance of at most a quarter of the square of its block's step.
 * Roundings of different ranks, steps and reducers are independent. Exceptions: a block whose largest value is below 127
 * (INT4: 7) times 2^-126 arrives as zeros, and a value within 2 % (INT4: 13 %) of the largest fp32 may arrive smaller.
 *
 * `format` and `result.format` are INT8, INT4 (default) or FP32, which is exact; the coarser formats have no zero, and BF16 is
 * not rounded at random. `sparsity` and `result.sparsity` are 0 (default): what is not sent would be lost. Anything else is
 * TAGC_ERR_UNSUPPORTED. */
#define TAGC_RESIDUAL_NONE (-2)

/* Defined in tagc/paper.h. */
struct tagc_paper_options;

/* How owners send sums back. */
typedef struct tagc_reducer_result_options {
    /* tagc_format of the sums. Default -1: INT4, or the reducer's if that is finer or if its sparsity is 0. */
    int format;
    /* The share of every shard's sums that its owner does not send back. It
     * stays in the owner's residual, so the volume does not grow with W. [0, 1]; default -1: owners send back 2.4 times
     * the share that ranks send them, so it is 0.88 at a sparsity of 0.95. Below 1, at least one sum of each shard is
     * sent. At 0 all are; if ranks select, with positions. */
    double sparsity;
} tagc_reducer_result_options;

/* If an option does not apply to the chosen exchange, it must keep its default. Otherwise _create fails with
 * TAGC_ERR_UNSUPPORTED and names the option. */
typedef struct tagc_reducer_options {
    /* Written by _init. */
    size_t struct_bytes;
    /* The size of the unit, [1, W * (2^32 - 64)]. Required. If it is no multiple of W, the library pads: a shard is n_elems / W
     * values, rounded up, and the last ranks own fewer, or none. Then a step copies its arrays, and holds a
     * row of the unit more (sketch, packed, and direct that sends whole fp32 or bf16: the unit and its sums). */
    uint64_t n_elems;
    /* Identifies this unit in events, messages and saved states; the same on all ranks, which so notice units that are made in
     * different orders. Default UINT64_MAX: none. */
    uint64_t tag;
    /* tagc_exchange, default DIRECT. */
    int exchange;
    /* tagc_format of the values. direct supports all formats and puts rounding errors into the residual; without one see
     * TAGC_RESIDUAL_NONE. It adds in fp32. sketch and packed support FP32. Default -1: FP32 for these; for direct INT8, or INT2 where it
     * leaves values out. */
    int format;
    /* The share of every fragment that is not sent. [0, 1]; default -1: 0 for direct, 0.9875 for sketch and packed. At 0, direct sends
     * every element and no positions. Below 1, at least one element of each fragment is sent, so that no residual waits forever; at 1
     * nothing is ever sent. What leaves values out from the first step on costs much loss: tagc/schedule.h says when it may. */
    double sparsity;
    /* tagc_op, default AVG. */
    int op;
    /* tagc_output, SHARD (default) or UNIT. */
    int output;
    /* Where the output is larger than the shard. For direct. */
    tagc_reducer_result_options result;
    /* Values per scale, also of sums: a power of two in [16, 4096]. Default 0: 128. For direct with an integer format. */
    int block;
    /* Threads that encode and decode. The results do not depend on it. [1, 256], default 1. */
    int n_threads;
    /* Options of sketch and packed. _create copies them. Default NULL: the defaults of tagc_paper_options. */
    const struct tagc_paper_options *paper;
    /* tagc_format in which the residual is stored between steps: FP32, INT8 or INT4, which take 4, 1 and 0.5
     * bytes per value. Rounding is stochastic: what it loses is zero on average. Nothing on the wire depends on it.
     * Or TAGC_RESIDUAL_NONE: there is none.
     * Ranks must pass the same value. sketch and packed support FP32. Default -1: INT8 for direct, FP32 for these two.
     * Kernels (tagc/device.h) store it the same way, bit for bit, so a rank with kernels and one without may take part
     * in one exchange. */
    int residual;
    /* tagc_format of the gradient that _begin reads: FP32 (default), or BF16, an array of uint16_t. For direct. */
    int gradient;
    /* A number of the reducer, from which random rounding (of a stored residual, or of values without one) derives, beside
     * the step, the rank and the row. Two reducers with the same number round alike in the same step, so give each its own, and
     * the same one in a run that goes on. Ranks may differ. Default 0. */
    uint64_t rounding_seed;
} tagc_reducer_options;

TAGC_API void tagc_reducer_options_init_sized(tagc_reducer_options *options, size_t struct_bytes);
#define tagc_reducer_options_init(options) tagc_reducer_options_init_sized((options), sizeof *(options))

/* Returns the size of a unit whose shards are all of one length, a multiple of 16, and that has room for `n` values. With it as
 * n_elems a step copies nothing, but the array must be as long, and zeros behind the values. */
TAGC_API uint64_t tagc_padded_elems(uint64_t n, int world_size);

/* How tagc's codec thread spent its time. */
typedef enum tagc_phase {
    /* Add the residual, select elements, write the new residual. Above sparsity 0, direct also encodes here. */
    TAGC_PHASE_SELECT = 0,
    /* Make and combine the index. */
    TAGC_PHASE_INDEX = 1,
    /* Encode values. direct: encode at sparsity 0, encode sums, and add rows of the ranks of a host. */
    TAGC_PHASE_ENCODE = 2,
    /* Check, decode and add what other ranks sent. */
    TAGC_PHASE_DECODE = 3,
    /* Wait for the network. */
    TAGC_PHASE_WAIT = 4,
    TAGC_N_PHASES = 5
} tagc_phase;

/* Returns "select", "index", ..., or "?" outside [0, TAGC_N_PHASES). */
TAGC_API const char *tagc_phase_name(int phase);

/* Lengths of the arrays in statistics. Unused entries are 0; later versions may use them for more legs or phases. */
#define TAGC_MAX_LEGS 16
#define TAGC_MAX_PHASES 16

/* Statistics of one step. "In the unit" counts all fragments that this rank encoded. "In the shard" counts the shard that this rank
 * owns. */
typedef struct tagc_reducer_stats {
    /* Written by _init. */
    size_t struct_bytes;
    /* Bytes sent to and received from other ranks, counted by the transport, indexed by tagc_leg. */
    uint64_t n_bytes_sent[TAGC_MAX_LEGS];
    uint64_t n_bytes_received[TAGC_MAX_LEGS];
    /* Indexed by tagc_phase. */
    double time_s[TAGC_MAX_PHASES];
    /* Time from the start of the step on tagc's thread to its end. */
    double total_s;
    /* Elements in the unit that this rank selected. If direct sends sums back, an owner selects in its own row from the
     * sum over all ranks. */
    uint64_t n_sent;
    /* Elements in the unit that at least one rank selected, or 0 if unknown. direct knows it only at sparsity 0. */
    uint64_t n_union;
    /* direct, where the output is larger than the shard: elements of the output whose sums were sent back. The others
     * are 0. */
    uint64_t n_returned;
    /* The sparsity that was reached: 1 - n_sent / n_elems. */
    double sparsity;
    /* sketch: the number of cells in the shard's sketch, and the items per cell. */
    uint64_t n_cells;
    double load;
    /* sketch: items in the shard that could not be recovered from the sketch. */
    uint64_t n_unpeeled;
    /* sketch and packed: elements in the unit that this rank selected and a lossy index dropped. */
    uint64_t n_lost;
    /* sketch: passes over the shard's sketch until nothing more could be recovered. */
    int peel_rounds;
    /* 1: some rank's gradient had NaN or Inf, or a sum, an fp32 cell or a rounding error overflowed. The output is
     * NaN, and the residual is as before the step. */
    int nonfinite;
} tagc_reducer_stats;

TAGC_API void tagc_reducer_stats_init_sized(tagc_reducer_stats *stats, size_t struct_bytes);
#define tagc_reducer_stats_init(stats) tagc_reducer_stats_init_sized((stats), sizeof *(stats))

/* Collective. TAGC_ERR_MISMATCH on all ranks if their options differ. The residual starts empty. */
TAGC_API tagc_status tagc_reducer_create(tagc_comm *comm, const tagc_reducer_options *options,
                                         tagc_reducer **out);

/* Collective. Starts to reduce `gradient` (n_gradient), fp32 or what options.gradient says, into `output` (n_output), which is the own
 * shard or the shape that tagc_output describes. n_gradient is n_elems. n_output is the number of values of the unit that this rank
 * gets: n_elems / W, or what tagc_output says. Returns at once. The caller owns both arrays, and must not touch them until _end
 * returns. The gradient is not changed. The reducers of a comm run in the order of their _begin calls.
 *
 * That order is the same on all ranks. Each message names its reducer, so where one rank begins another one, the steps of both
 * fail on all ranks with TAGC_ERR_MISMATCH, whose text names both. If the two send messages of the same lengths, the comm stays
 * usable. If not, it breaks: some ranks may return TAGC_ERR_TRANSPORT.
 *
 * The arrays must not overlap, except in direct's steps in host memory: there `output` may lie anywhere
 * in `gradient` if it is the shard, but only in place of a whole row of an fp32 gradient at sparsity 0 in FP32 or BF16. With
 * TAGC_OUTPUT_UNIT, an fp32 gradient and several ranks it may be `gradient` itself. What it takes the place of is lost, also if the
 * step fails.
 *
 * An argument that is wrong on one rank fails the step on all: that rank takes part with zeros, and its _begin returns when the step is
 * over; the _end of all others returns the same status. Residuals are as before, and the next step can follow. */
TAGC_API tagc_status tagc_reducer_begin(tagc_reducer *reducer, const void *gradient, uint64_t n_gradient,
                                        float *output, uint64_t n_output);

/* Instead of _begin and _end, on a rank that cannot begin, such as for want of memory: all ranks return `status` from the step, which none
 * then waits for. Returns it, too, when the step is over. `reason` is this rank's text; it may be NULL. */
TAGC_API tagc_status tagc_reducer_fail(tagc_reducer *reducer, tagc_status status, const char *reason);

/* Never blocks. Sets *done to 1 if _end would return at once, because the step finished or failed, else to 0. Ranks
 * may see 1 at different times. Call _end in any case. */
TAGC_API tagc_status tagc_reducer_test(tagc_reducer *reducer, int *done);

/* Waits for the step that _begin started. All ranks return the same status, unless the comm broke before all had agreed. After a
 * failure, the output is undefined and the residual is as before the step. `stats` may be NULL. If it is not
 * initialised, _end returns TAGC_ERR_ARGUMENT at once: initialise it and call _end again.
 *
 * A gradient that is not finite is no failure: _end returns TAGC_OK on all ranks, with stats.nonfinite 1. Look at it there before you use
 * the output. */
TAGC_API tagc_status tagc_reducer_end(tagc_reducer *reducer, tagc_reducer_stats *stats);

/* Collective, blocking. _begin and _end in one call. */
TAGC_API tagc_status tagc_reducer_run(tagc_reducer *reducer, const void *gradient, uint64_t n_gradient,
                                      float *output, uint64_t n_output, tagc_reducer_stats *stats);

/* Collective in effect. Sets the sparsity, [0, 1], of the following steps. Do not call it between _begin and _end. It
 * allocates new buffers if the sparsity changes. After a failure nothing has changed. If ranks set different values,
 * the next step fails on all ranks with TAGC_ERR_MISMATCH and the comm stays usable. (One rank that
 * leaves sparsity 0 alone in FP32 or BF16 breaks it.) */
TAGC_API tagc_status tagc_reducer_set_sparsity(tagc_reducer *reducer, double sparsity);

/* Collective in effect. The following steps take format, sparsity, block and result from `options`,
 * as a new reducer would; all other fields must be those with which this one was made. The residual stays, in place. For direct. As with
 * tagc_reducer_set_sparsity, do not call it between _begin and _end, and after a failure nothing has changed. If ranks
 * set different values, the next step fails on all ranks, with TAGC_ERR_MISMATCH, and may break the comm. */
TAGC_API tagc_status tagc_reducer_change(tagc_reducer *reducer, const tagc_reducer_options *options);

/* Returns the number of values of the residual, W shards. Returns 0 if there is no residual: for TAGC_RESIDUAL_NONE, and for direct with
 * FP32 or BF16 and a sparsity that was always 0. */
TAGC_API uint64_t tagc_reducer_residual_elems(const tagc_reducer *reducer);

/* Copies the residual to `values`, also from a device. n_elems must be what _residual_elems returns. An empty residual is
 * -0.0f, because adding -0.0f changes no value. Do not call it between _begin and _end. */
TAGC_API tagc_status tagc_reducer_get_residual(const tagc_reducer *reducer, float *values, uint64_t n_elems);

/* Sets *square to the sum of the squares of the residual, 0 if there is none. Do not call it between _begin and _end. */
TAGC_API tagc_status tagc_reducer_residual_square(const tagc_reducer *reducer, double *square);

/* Multiplies the residual by `factor`, which is finite and at least 0. Use it when the loss scale changes. A power of
 * two changes no stored value otherwise; another factor rounds each anew, unless the residual is stored as FP32. */
TAGC_API tagc_status tagc_reducer_scale_residual(tagc_reducer *reducer, double factor);

/* Replaces the residual by `values`, which must be finite. n_elems must be what _residual_elems returns. Values that
 * _get_residual gave are stored without loss; others are rounded as options.residual says. Do not call it between _begin
 * and _end. */
TAGC_API tagc_status tagc_reducer_set_residual(tagc_reducer *reducer, const float *values, uint64_t n_elems);

/* The number of steps that have begun. Random rounding depends on it, so that a step rounds otherwise than the one before.
 * A run that goes on from values of _get_residual rounds as it would have without the interruption if _set_steps gets what
 * _steps returned. Do not call _set_steps between _begin and _end. */
TAGC_API uint64_t tagc_reducer_steps(const tagc_reducer *reducer);
TAGC_API tagc_status tagc_reducer_set_steps(tagc_reducer *reducer, uint64_t n_steps);

/* Save and load this rank's residual, as it is stored, and the number of steps, as bytes with a header and a checksum
 * (docs/reference/wire-format.md). Do not call them between _begin and _end. Every rank saves its own, and loads it. _load accepts what
 * _save wrote on the same rank of as many, for the same n_elems, tag and output. Otherwise TAGC_ERR_MISMATCH says what
 * differs, and the residual stays. So ranks notice it if all of them get the bytes of one. Without a tag, units of one size are told apart by
 * the order in which the comm's reducers of that size and without a tag were made; to depend on no order, give each a tag (below
 * UINT64_MAX - 65536). If options.residual was another one, values are stored anew, as by _set_residual.
 *
 * For other ranks than before, add up what _get_residual gives, and spread it with _set_residual. */
TAGC_API uint64_t tagc_reducer_state_bytes(const tagc_reducer *reducer);
TAGC_API tagc_status tagc_reducer_state_save(const tagc_reducer *reducer, void *buffer, uint64_t n_bytes);
TAGC_API tagc_status tagc_reducer_state_load(tagc_reducer *reducer, const void *buffer, uint64_t n_bytes);

/* If a step is in progress, waits for it first. */
TAGC_API void tagc_reducer_destroy(tagc_reducer *reducer);

/* ---- gatherer: the parameters of one unit ---- */

typedef struct tagc_gatherer tagc_gatherer;

/* A gather sends whole parameters (in FP32, BF16 or INT8) or deltas. Every rank, including the owner, gets the same
 * bits.
 *
 * A delta is the difference between the owner's fp32 shard and the replica: the bf16 copy of the unit that every rank
 * keeps in `full` from one gather to the next. Rounding errors are part of the next difference. The first gather
 * and the one after _reset send whole parameters in bf16.
 *
 * `full` is an array of float or, with full_format BF16, of uint16_t. */
typedef struct tagc_gatherer_options {
    /* Written by _init. */
    size_t struct_bytes;
    /* The size of the unit: a positive multiple of W, at most W * (2^32 - 64). Required. */
    uint64_t n_elems;
    /* As in tagc_reducer_options. */
    uint64_t tag;
    /* tagc_format. Whole parameters: FP32 (default), BF16 or INT8. Deltas: INT8, INT4 or INT2. The integer formats use
     * one scale per 256 values. */
    int format;
    /* 1: send deltas. Default 0. */
    int delta;
    /* For deltas: compare checksums of the replicas at every check_every-th gather. If they differ, all ranks return
     * TAGC_ERR_CORRUPT. [0, 2^31), default 0: never. */
    uint64_t check_every;
    /* Threads that encode and decode. The results do not depend on it. [1, 256], default 1. */
    uint64_t n_threads;
    /* tagc_format of `full`. FP32 (default), to compute with it. BF16: the same values in half of the memory, for deltas and
     * for whole parameters in BF16. */
    uint64_t full_format;
    /* tagc_rounding of INT8, default NEAREST. STOCHASTIC is for whole parameters in host memory: the mean of many gathers of one
     * value is that value. */
    uint64_t rounding;
    /* What the random numbers of STOCHASTIC derive from, beside the number of the gather and the rank. Two gatherers with the
     * same number round alike, so give each its own. Ranks may differ. Default 0. */
    uint64_t rounding_seed;
    /* 1: whole parameters in BF16 travel in fewer bits, about 11 of 16 for weights, and arrive as without it, bit for bit: exponents
     * in codes, signs and mantissas as they are. How many bits follows from the values. Default 0. */
    uint64_t lossless;
} tagc_gatherer_options;

TAGC_API void tagc_gatherer_options_init_sized(tagc_gatherer_options *options, size_t struct_bytes);
#define tagc_gatherer_options_init(options) tagc_gatherer_options_init_sized((options), sizeof *(options))

/* Collective. TAGC_ERR_MISMATCH on all ranks if their options differ. */
TAGC_API tagc_status tagc_gatherer_create(tagc_comm *comm, const tagc_gatherer_options *options,
                                          tagc_gatherer **out);

/* Collective. Starts to gather every rank's `shard` (n_shard) into `full` (n_full), which is (W, shard). n_full is n_elems, and
 * n_shard n_elems / W. Returns at once. The caller must
 * not touch the arrays until _end returns. Gathers of a comm run in the order of their _begin calls, and overlap with
 * each other and with reducers. That order is the same on all ranks. Where it is not, the gathers fail as the steps of
 * reducers do; `full` is then undefined, and the next gather of deltas sends whole parameters.
 *
 * Whole parameters: `shard` may be this rank's row of a `full` of FP32. NaN and Inf are sent as they are; INT8 sends the block
 * as NaN.
 * Otherwise `shard` and `full` must not overlap.
 * Deltas: Pass the same `full` every time, with the values that the last gather
 * left there. If an owner's shard has NaN or Inf, its whole row becomes NaN on all ranks. The first gather after it
 * that is finite again sends whole parameters.
 *
 * An argument that is wrong on one rank fails the gather on all, as with tagc_reducer_begin. The next gather of deltas sends whole
 * parameters. */
TAGC_API tagc_status tagc_gatherer_begin(tagc_gatherer *gatherer, const float *shard, uint64_t n_shard,
                                         void *full, uint64_t n_full);

/* Instead of _begin and _end, on a rank that cannot begin: as tagc_reducer_fail. */
TAGC_API tagc_status tagc_gatherer_fail(tagc_gatherer *gatherer, tagc_status status, const char *reason);

/* Never blocks. Sets *done to 1 if _end would return at once, because the gather finished or failed, else to 0. */
TAGC_API tagc_status tagc_gatherer_test(tagc_gatherer *gatherer, int *done);

/* Waits for the gather that _begin started. If a rank receives a damaged delta, it returns TAGC_ERR_CORRUPT. The other
 * ranks return it from their next gather, and the gather after that sends whole parameters. With `lossless`, too, the others
 * return it from their next gather; where it is the length that is damaged, the comm breaks. */
TAGC_API tagc_status tagc_gatherer_end(tagc_gatherer *gatherer);

/* Collective in effect. Makes the next gather send whole parameters. Call it if anything but a gather changed
 * `full`, or if the values of `shard` were replaced. */
TAGC_API tagc_status tagc_gatherer_reset(tagc_gatherer *gatherer);

/* Returns the replica, for a checkpoint: the `full` (W, shard) of the last gather. The caller still owns it.
 * Sets *n_gathers to the number of gathers begun. Returns NULL without deltas, if the next gather sends whole
 * parameters, and while a gather is in progress. */
TAGC_API const void *tagc_gatherer_replica(const tagc_gatherer *gatherer, uint64_t *n_gathers);

/* Collective in effect. Restores a replica from a checkpoint, so that the next gather sends the delta that would have
 * come next. `full` (n_full), of n_elems values, holds them, and n_gathers (at least 1) is the number that _replica returned. They must be
 * the same bits on all ranks. Do not call it between _begin and _end. */
TAGC_API tagc_status tagc_gatherer_set_replica(tagc_gatherer *gatherer, void *full, uint64_t n_full,
                                               uint64_t n_gathers);

/* If a gather is in progress, waits for it first. */
TAGC_API void tagc_gatherer_destroy(tagc_gatherer *gatherer);

/* ---- memory ---- */

/* Bytes that this process holds, as it has allocated them. */
typedef struct tagc_memory {
    /* Written by _init. */
    size_t struct_bytes;
    /* In host memory: residuals of reducers. */
    uint64_t residual_bytes;
    /* Spare residuals, which reducers of one size share. A step writes the new residual into one. */
    uint64_t spare_bytes;
    /* What steps under way take: rows, bodies and scratch. All reducers of a comm share it, and all its gatherers. */
    uint64_t work_bytes;
    /* What else reducers and gatherers hold. */
    uint64_t buffer_bytes;
    /* On devices: residuals, and spare ones. tagc_kernels_bytes tells all that is there. */
    uint64_t device_residual_bytes;
    uint64_t device_spare_bytes;
} tagc_memory;

TAGC_API void tagc_memory_init_sized(tagc_memory *memory, size_t struct_bytes);
#define tagc_memory_init(memory) tagc_memory_init_sized((memory), sizeof *(memory))

/* Writes what all reducers and gatherers of a comm hold now, without the caller's arrays. It grows when they are made or
 * change, and not in a step. */
TAGC_API tagc_status tagc_comm_memory(tagc_comm *comm, tagc_memory *memory);

/* ---- does it pay ---- */

/* What compression does to the time of a step. `tagc bench`, `tagc plan` and tagc.torch.advise() all ask
 * tagc_verdict_of. It is about time alone: only training shows what compression costs in loss. */
typedef enum tagc_verdict {
    /* A time is not a finite number above 0, or the spread is not a finite number of 0 or more. */
    TAGC_VERDICT_UNKNOWN = 0,
    /* The compressed step is shorter, by more than the margin and by more than the spread. */
    TAGC_VERDICT_PAYS = 1,
    /* Neither step is shorter by more than that. */
    TAGC_VERDICT_NO_DIFFERENCE = 2,
    /* The compressed step is longer, by more than the margin and by more than the spread. */
    TAGC_VERDICT_COSTS = 3
} tagc_verdict;

/* If the longer step takes at most this share more time than the shorter, they count as alike. Repeated measurements
 * of one set-up differ by as much: of the rounds of `tagc bench` behind lab/docs/results.md, half are within 4 % of the
 * median of their arm. A gain that a second measurement may not find again is none. */
#define TAGC_VERDICT_MARGIN 0.05

/* Compares the seconds of a step without compression and with it. spread_s: by how much repeated measurements of the
 * difference of both are away from it, at most. Where both were measured apart, that is the sum of what each is away
 * from its own median; where the two were forecast, or measured once, it is 0. */
TAGC_API tagc_verdict tagc_verdict_of(double baseline_s, double compressed_s, double spread_s);

/* Returns "unknown", "pays", "makes no difference" or "costs"; "?" for other numbers. */
TAGC_API const char *tagc_verdict_name(int verdict);

#ifdef __cplusplus
}
#endif

#endif
