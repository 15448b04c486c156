/* tagc: compressed gradient exchange for sharded data parallel training.
 *
 *   comm      one rank's connection to the others: a transport, a comm thread, counters
 *   reducer   the gradient of one unit: many ranks -> the owner of each shard (or every rank)
 *   gatherer  the parameters of one unit: the owner of each shard -> every rank
 *
 * Conventions. n_elems counts fp32 values, n_bytes bytes, *_s seconds. W is the world size; a unit of
 * n_elems = W * shard values is seen as (W, shard) and rank d owns row d. "Collective" functions must be called
 * by every rank, in the same order; the others are local. Objects are not locked: one thread at a time each,
 * but different objects of one comm may be used from different threads where the transport has
 * TAGC_TRANSPORT_LANES. Every function returns a status; on failure tagc_last_error() holds, for the calling
 * thread, a text that names the argument, its value and what is allowed. On failure of a _create, *out is NULL.
 * _destroy accepts NULL.
 *
 * Structs of options and statistics begin with struct_bytes, their size in the caller's header. Their _init writes it,
 * and the default of every other field. A library that has more fields than the caller's header gives these their
 * defaults. A library that has fewer refuses a struct whose unknown fields are not zero. docs/abi.md says what may
 * change between versions. */
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
#define TAGC_VERSION_MINOR 1
#define TAGC_VERSION_PATCH 0

/* "major.minor.patch" of the library that is running. */
TAGC_API const char *tagc_version(void);

/* ---- failures ---- */

typedef enum tagc_status {
    TAGC_OK = 0,
    /* A value is out of its range. */
    TAGC_ERR_ARGUMENT = 1,
    /* A call is out of order: end without begin, begin twice. */
    TAGC_ERR_STATE = 2,
    /* An allocation failed. */
    TAGC_ERR_MEMORY = 3,
    /* Ranks disagree on options or shapes. */
    TAGC_ERR_MISMATCH = 4,
    /* A peer is gone or silent. The comm cannot be used any more. */
    TAGC_ERR_TRANSPORT = 5,
    /* Received or loaded bytes contradict themselves. */
    TAGC_ERR_CORRUPT = 6,
    /* The value or combination is known, but this build or this exchange does not have it. */
    TAGC_ERR_UNSUPPORTED = 7,
    /* A device, or its runtime, reports a failure. (8 and 9 belong to the tagc command.) */
    TAGC_ERR_DEVICE = 10
} tagc_status;

TAGC_API const char *tagc_status_name(tagc_status status);

/* Text of this thread's last failure; valid until the thread's next failing call. Never NULL. */
TAGC_API const char *tagc_last_error(void);

/* ---- number formats ---- */

/* How a value is written while it travels. Which of them an object has stands at its option. */
typedef enum tagc_format {
    TAGC_FORMAT_FP32 = 0,
    TAGC_FORMAT_BF16 = 1,
    /* The integer formats have one scale per block of values. */
    TAGC_FORMAT_INT8 = 2,
    TAGC_FORMAT_INT4 = 3,
    TAGC_FORMAT_INT2 = 4,
    /* One bit: every magnitude of a block is their mean. */
    TAGC_FORMAT_SIGN = 5
} tagc_format;

/* ---- comm: one rank's connection ---- */

typedef struct tagc_comm tagc_comm;

/* What a byte on the wire was for. Sizes below are per rank, before the factor (W-1)/W. */
typedef enum tagc_leg {
    /* Which elements are kept. */
    TAGC_LEG_INDEX = 0,
    /* Their values: sketch cells, packed values, or the dense gradient. */
    TAGC_LEG_VALUES = 1,
    /* Values that a sketch could not give back, sent plainly. */
    TAGC_LEG_LEFTOVER = 2,
    /* The sums, owner to all. Only where the output is more than the own shard. */
    TAGC_LEG_RESULT = 3,
    /* Parameters, owner to all. */
    TAGC_LEG_GATHER = 4,
    /* Agreement and headers. */
    TAGC_LEG_CONTROL = 5,
    TAGC_N_LEGS = 6
} tagc_leg;

/* "index", "values", ...; "?" outside [0, TAGC_N_LEGS). */
TAGC_API const char *tagc_leg_name(int leg);

/* One piece of work on one of the two streams that tagc runs beside the caller: "comm" (a transfer) or
 * "codec" (selection, encoding, decoding). Times are from tagc_time_s. The strings live for ever. */
typedef struct tagc_event {
    /* "comm" or "codec". */
    const char *stream;
    /* The name of a leg or a phase. */
    const char *name;
    double start_s, end_s;
    /* Sent to other ranks; 0 for codec work. */
    uint64_t n_bytes;
    /* tagc_reducer_options.tag or tagc_gatherer_options.tag; UINT64_MAX when there is none. */
    uint64_t tag;
} tagc_event;

typedef void (*tagc_trace_fn)(void *context, const tagc_event *event);

typedef struct tagc_comm_options {
    /* Written by _init. */
    size_t struct_bytes;
    /* (0, 1e6], default 120. The comm breaks when a transfer is under way and no byte of any transfer of this comm has
     * moved for so long. Over the callback transport the function's own time-out holds. */
    double timeout_s;
    /* Default NULL. tagc's threads call it: it must be thread-safe and quick. */
    tagc_trace_fn trace;
    void *trace_context;
    /* [0, 1e6], default 0: none. The comm breaks when a transfer has not ended so long after it began, whether bytes
     * move or not. */
    double total_timeout_s;
} tagc_comm_options;

TAGC_API void tagc_comm_options_init_sized(tagc_comm_options *options, size_t struct_bytes);
#define tagc_comm_options_init(options) tagc_comm_options_init_sized((options), sizeof *(options))

/* Ranks as threads of one process. The group is made once, each thread then makes its own comm of it.
 * world_size in [1, 1024]. Destroy the group after its comms. */
typedef struct tagc_local_group tagc_local_group;
TAGC_API tagc_status tagc_local_group_create(int world_size, tagc_local_group **out);
TAGC_API void tagc_local_group_destroy(tagc_local_group *group);
TAGC_API tagc_status tagc_comm_create_local(tagc_local_group *group, int rank,
                                            const tagc_comm_options *options, tagc_comm **out);

/* Other transports: tagc/mpi.h (MPI), tagc/transport.h (bring your own). options may be NULL. */

TAGC_API int tagc_comm_rank(const tagc_comm *comm);
TAGC_API int tagc_comm_world_size(const tagc_comm *comm);

/* Bytes sent to and received from other ranks since the comm was made. Both arrays are (n_legs,), by tagc_leg; either
 * may be NULL. n_legs is TAGC_N_LEGS of the caller's header: the library leaves out the legs beyond it, and gives 0 for
 * legs that it does not have. */
TAGC_API void tagc_comm_bytes(const tagc_comm *comm, uint64_t *sent, uint64_t *received, int n_legs);

/* Collective, blocking: the n_bytes of every rank in rank order. recv (W, n_bytes). Counted as control. */
TAGC_API tagc_status tagc_comm_all_gather(tagc_comm *comm, const void *send, size_t n_bytes, void *recv);

/* Collective, blocking: returns when every rank has called it. */
TAGC_API tagc_status tagc_comm_barrier(tagc_comm *comm);

/* Local: tells the peers that this rank gives up, so that they fail with `reason` instead of waiting.
 * Over MPI this ends the whole job (MPI_Abort). The comm can only be destroyed afterwards. */
TAGC_API void tagc_comm_abort(tagc_comm *comm, const char *reason);

/* After all reducers and gatherers made on it. */
TAGC_API void tagc_comm_destroy(tagc_comm *comm);

/* Seconds on the monotonic clock that events and statistics use. */
TAGC_API double tagc_time_s(void);

/* ---- reducer: the gradient of one unit ---- */

typedef struct tagc_reducer tagc_reducer;

typedef enum tagc_exchange {
    /* Every value goes point to point to its owner, who adds in rank order. */
    TAGC_EXCHANGE_DENSE = 0,
    /* TAGC as published, Algorithm 1: index, count sketch, peeling. Its options are in tagc/paper.h. */
    TAGC_EXCHANGE_SKETCH = 1,
    /* An index, then the values at its set positions in order: nothing to peel. Its options are in tagc/paper.h. */
    TAGC_EXCHANGE_PACKED = 2,
    /* Each rank's own encoded fragments go straight to their owners: no index round, and a volume that does not grow
     * with W. */
    TAGC_EXCHANGE_DIRECT = 3
} tagc_exchange;

typedef enum tagc_op {
    /* The sum times 1/W. */
    TAGC_OP_AVG = 0,
    TAGC_OP_SUM = 1
} tagc_op;

/* What a rank gets of the sums. */
typedef enum tagc_output {
    /* This rank's shard: a reduce-scatter. */
    TAGC_OUTPUT_SHARD = 0,
    /* The whole unit, on every rank: an all-reduce. */
    TAGC_OUTPUT_UNIT = 1,
    /* Row l of (ranks_per_host, n_elems / ranks_per_host), on the rank of local index l of every host. Only direct. */
    TAGC_OUTPUT_HOST_SHARD = 2
} tagc_output;

/* Options of sketch and packed, in tagc/paper.h. */
struct tagc_paper_options;

/* An option that means nothing for the chosen exchange must keep its default: _create refuses it by name with
 * TAGC_ERR_UNSUPPORTED. */
typedef struct tagc_reducer_options {
    /* Written by _init. */
    size_t struct_bytes;
    /* Of the whole unit: a positive multiple of W, at most W * (2^32 - 64). It has no default. */
    uint64_t n_elems;
    /* The caller's name for this unit in events; default UINT64_MAX. */
    uint64_t tag;
    /* tagc_exchange, default DIRECT. */
    int exchange;
    /* tagc_format of the values, or -1 (default): the exchange's own. direct has all formats, its own is INT2, and what
     * rounding loses goes to the residual. dense has FP32 (its own) and BF16, whose sums stay fp32. sketch and packed
     * have FP32. */
    int format;
    /* [0, 1]: at least this share of every fragment is zeroed. -1 (default): the exchange's own, 0.95 for direct,
     * 0.9875 for sketch and packed. dense has 0. direct at 0 sends every element and no positions. Below 1 at least one
     * element of a fragment travels, of however few: what is never sent never arrives. */
    double sparsity;
    /* tagc_op, default AVG. */
    int op;
    /* tagc_output, default SHARD. */
    int output;
    /* A power of two in [16, 4096]: values per scale. 0 (default): 128. direct in an integer format. */
    int block;
    /* [0, 1], default 0. 1: each block goes through a Hadamard transform before it is rounded. direct at sparsity 0 in
     * an integer format. */
    int rotate;
    /* [1, W], divides W, default 1. direct: rank h * ranks_per_host + l is rank l of host h. Ranks of one host add
     * their gradients first (bf16 on the wire and fp32 sums; fp32 on the wire where format is FP32), and only the sums
     * of hosts are encoded. The residual then holds n_elems / ranks_per_host values. */
    int ranks_per_host;
    /* [1, 256], default 1: threads of the codec. It changes no result. */
    int n_threads;
    /* NULL (default): the defaults of tagc_paper_options. sketch and packed. _create copies what it points to. */
    const struct tagc_paper_options *paper;
} tagc_reducer_options;

TAGC_API void tagc_reducer_options_init_sized(tagc_reducer_options *options, size_t struct_bytes);
#define tagc_reducer_options_init(options) tagc_reducer_options_init_sized((options), sizeof *(options))

/* Range and default of a numeric field of tagc_reducer_options or tagc_paper_options by name. TAGC_ERR_ARGUMENT when
 * there is none. */
TAGC_API tagc_status tagc_reducer_option_bounds(const char *field, double *min, double *max, double *initial);

/* The padded n_elems of a unit of `n` values over W ranks: W * ceil(n / W) with the shard a multiple of 16. */
TAGC_API uint64_t tagc_padded_elems(uint64_t n, int world_size);

/* What the codec stream did with its time. */
typedef enum tagc_phase {
    /* Accumulate, find the threshold, write the residual. direct with positions encodes in the same pass. */
    TAGC_PHASE_SELECT = 0,
    /* Make bitmaps and OR them. */
    TAGC_PHASE_INDEX = 1,
    /* Sketch or pack. direct: blocks, sums, and rows within the host. */
    TAGC_PHASE_ENCODE = 2,
    /* Add, peel or unpack. direct: checks of bodies, too. */
    TAGC_PHASE_DECODE = 3,
    /* The codec had nothing to do: it waited for the wire. */
    TAGC_PHASE_WAIT = 4,
    TAGC_N_PHASES = 5
} tagc_phase;

/* "select", "index", ...; "?" outside [0, TAGC_N_PHASES). */
TAGC_API const char *tagc_phase_name(int phase);

/* Lengths of the arrays in statistics: room for legs and phases that are still to come, whose places hold 0. */
#define TAGC_MAX_LEGS 16
#define TAGC_MAX_PHASES 16

/* Of one step. Counts "of the unit" cover all W fragments of this rank, with hosts those of its host that it encodes;
 * "of the shard" only the owned one. */
typedef struct tagc_reducer_stats {
    /* Written by _init. */
    size_t struct_bytes;
    /* To and from other ranks, by tagc_leg, as the transport counted them. */
    uint64_t n_bytes_sent[TAGC_MAX_LEGS];
    uint64_t n_bytes_received[TAGC_MAX_LEGS];
    /* By tagc_phase. */
    double time_s[TAGC_MAX_PHASES];
    /* From the start of the work to its end, on tagc's thread. */
    double total_s;
    /* Of the unit: elements this rank kept. */
    uint64_t n_kept;
    /* Of the unit: elements that any rank kept; 0 where nobody knows. direct knows them where all of the unit comes
     * back, less those that cancelled, and where every element is sent. */
    uint64_t n_union;
    /* What was reached: 1 - n_kept / n_elems, with hosts 1 - n_kept * ranks_per_host / n_elems. */
    double sparsity;
    /* sketch. Of the shard: cells of its sketch, and items per cell. */
    uint64_t n_cells;
    double load;
    /* sketch. Of the shard: items the sketch did not give back. */
    uint64_t n_unpeeled;
    /* sketch and packed. Of the unit: elements this rank kept that a lossy index dropped. */
    uint64_t n_lost;
    /* sketch. Of the shard: rounds of peeling. */
    int peel_rounds;
    /* 1: a rank had NaN or Inf, or fp32 cells, sums or what their rounding loses overflowed. The output is NaN (dense:
     * the sums as they came out), the residual as before the step. */
    int nonfinite;
} tagc_reducer_stats;

TAGC_API void tagc_reducer_stats_init_sized(tagc_reducer_stats *stats, size_t struct_bytes);
#define tagc_reducer_stats_init(stats) tagc_reducer_stats_init_sized((stats), sizeof *(stats))

/* Collective. Checks that all ranks ask for the same. The residual starts empty. */
TAGC_API tagc_status tagc_reducer_create(tagc_comm *comm, const tagc_reducer_options *options,
                                         tagc_reducer **out);

/* Collective. Starts the exchange of `gradient` (W, shard) into `output`: (shard), or as tagc_output says.
 * Both stay the caller's, must not overlap, and must be left alone until _end; gradient is not changed.
 * Returns at once. Reducers of one comm run in the order of their begins, which must be the same on all ranks. */
TAGC_API tagc_status tagc_reducer_begin(tagc_reducer *reducer, const float *gradient, float *output);

/* Local, never blocks: *done is 1 when _end would not wait, because the step is over or has failed, else 0. Ranks may see
 * it at different times. The step stays under way until _end. */
TAGC_API tagc_status tagc_reducer_test(tagc_reducer *reducer, int *done);

/* Waits for what _begin started. All ranks return the same status, except TAGC_ERR_TRANSPORT. On failure the
 * output is undefined and the residual is as before the step. `stats` may be NULL. A stats struct that is not
 * initialised gives TAGC_ERR_ARGUMENT and leaves the step under way: call _end again. */
TAGC_API tagc_status tagc_reducer_end(tagc_reducer *reducer, tagc_reducer_stats *stats);

/* begin and end in one. */
TAGC_API tagc_status tagc_reducer_run(tagc_reducer *reducer, const float *gradient, float *output,
                                      tagc_reducer_stats *stats);

/* Changes the sparsity, [0, 1], of the steps that follow; not between begin and end. Makes new buffers where it is
 * another; on failure nothing has changed. Collective in effect: every rank must set the same. Where they do not, the
 * next step fails on all ranks with TAGC_ERR_MISMATCH, and the comm lives on. (TAGC_ERR_TRANSPORT where sums of an
 * all-reduce with hosts no longer fit.) TAGC_ERR_UNSUPPORTED above 0 for dense and with rotate. */
TAGC_API tagc_status tagc_reducer_set_sparsity(tagc_reducer *reducer, double sparsity);

/* The residual in use, (n_elems,), with hosts (n_elems / ranks_per_host,), or NULL and 0 for dense and where direct has
 * nothing to carry over (sparsity 0 since it was made and a format of FP32 or BF16; one host): a view that the next
 * begin invalidates. With hosts it belongs to the sums of a host, row h to the rank of the same local index on host h.
 * Its zero is -0.0f, the one value that changes nothing it is added to. */
TAGC_API const float *tagc_reducer_residual(const tagc_reducer *reducer, uint64_t *n_elems);

/* Copies the residual into `values` (n_elems as _residual tells), wherever it is. Not between begin and end. */
TAGC_API tagc_status tagc_reducer_get_residual(const tagc_reducer *reducer, float *values, uint64_t n_elems);

/* Multiplies the residual by `factor` (finite, >= 0): when a loss scale changes, or to let it decay. */
TAGC_API tagc_status tagc_reducer_scale_residual(tagc_reducer *reducer, double factor);

/* Puts `values` (n_elems as _residual tells, all finite) in place of the residual. Not between begin and end. */
TAGC_API tagc_status tagc_reducer_set_residual(tagc_reducer *reducer, const float *values, uint64_t n_elems);

/* The residual as bytes with header and checksum (docs/wire-format.md). Per rank; not between begin and end.
 * _load refuses what _save of the same n_elems and ranks_per_host did not write, and leaves the residual alone
 * then. With hosts the rows are others at another world size, and with TAGC_OUTPUT_HOST_SHARD; the bytes do not say
 * so. */
TAGC_API uint64_t tagc_reducer_state_bytes(const tagc_reducer *reducer);
TAGC_API tagc_status tagc_reducer_state_save(const tagc_reducer *reducer, void *buffer, uint64_t n_bytes);
TAGC_API tagc_status tagc_reducer_state_load(tagc_reducer *reducer, const void *buffer, uint64_t n_bytes);

/* Waits for a step that was begun and not ended. */
TAGC_API void tagc_reducer_destroy(tagc_reducer *reducer);

/* ---- gatherer: the parameters of one unit ---- */

typedef struct tagc_gatherer tagc_gatherer;

/* A gather is whole, in FP32, BF16 or INT8, or sends deltas. Every rank, the owner too, gets the same bits.
 *
 * With deltas only what changed since the last gather travels, and `full` must hold that gather's result. It is a bf16
 * replica; what a delta could not say stays in the next one. The first gather, and the one after _reset, is whole, in
 * bf16. */
typedef struct tagc_gatherer_options {
    /* Written by _init. */
    size_t struct_bytes;
    /* Of the whole unit: a positive multiple of the number of rows, at most that times (2^32 - 64). It has no
     * default. */
    uint64_t n_elems;
    /* As in tagc_reducer_options. */
    uint64_t tag;
    /* tagc_format, default FP32. Whole gathers have FP32, BF16 and INT8; deltas have INT8, INT4 and INT2. The integer
     * formats have blocks of 256 values with one scale. */
    int format;
    /* [0, 1], default 0. 1: deltas, which are no number format: they say against what the numbers count. */
    int delta;
    /* [0, W], divides W; 0 (default): W. Only ranks of one host exchange: shard is row l of full
     * (ranks_per_host, shard), shard = n_elems / ranks_per_host. */
    int ranks_per_host;
    /* [0, 1], default 0. 1: all ranks exchange, shard is row `rank` of full (W, shard), and each row crosses to another
     * host once: to the rank of the same local index, which passes it on within the host. The same bits as without, and
     * as many bytes sent, most of them within hosts. */
    int two_level;
    /* [0, 2^31), default 0 (never): with every so many gathers the ranks compare checksums of their replicas.
     * TAGC_ERR_CORRUPT on all where they differ. Deltas. */
    uint64_t check_every;
    /* [1, 256], default 1: threads that encode and decode, beside the caller's. Changes no result. */
    uint64_t n_threads;
} tagc_gatherer_options;

TAGC_API void tagc_gatherer_options_init_sized(tagc_gatherer_options *options, size_t struct_bytes);
#define tagc_gatherer_options_init(options) tagc_gatherer_options_init_sized((options), sizeof *(options))

TAGC_API tagc_status tagc_gatherer_create(tagc_comm *comm, const tagc_gatherer_options *options,
                                          tagc_gatherer **out); /* collective */

/* Collective. Starts the gather of every rank's `shard` (shard) into `full` (rows, shard). shard may be the own
 * row of full, but for deltas must lie apart, and full must be the array of the last gather with the values it left
 * there. Both must be left alone until _end. Gathers may overlap reducers and each other, and are ordered among
 * themselves.
 * NaN and Inf travel, of int8 as a block of NaN; with deltas the whole row of an owner who has one is NaN on all ranks,
 * until a gather of finite values, which is whole. */
TAGC_API tagc_status tagc_gatherer_begin(tagc_gatherer *gatherer, const float *shard, float *full);
/* Local, never blocks: *done is 1 when _end would not wait, or the gather has failed, else 0. */
TAGC_API tagc_status tagc_gatherer_test(tagc_gatherer *gatherer, int *done);
/* Waits for what _begin started. Deltas: a rank that got a damaged message returns TAGC_ERR_CORRUPT, all others do so
 * from the next gather, and the one after that is whole. */
TAGC_API tagc_status tagc_gatherer_end(tagc_gatherer *gatherer);
/* The next gather is whole; collective in effect. For when `full` or the shard was changed from outside. */
TAGC_API tagc_status tagc_gatherer_reset(tagc_gatherer *gatherer);
/* Deltas: the array of the last gather (rows, shard), from which the next one counts, for a checkpoint. NULL where the
 * next gather is whole, and while one is under way. *n_gathers: how many have begun. Local; the array stays the caller's. */
TAGC_API const float *tagc_gatherer_replica(const tagc_gatherer *gatherer, uint64_t *n_gathers);
/* Collective in effect, between gathers. Deltas: `full` holds what _replica gave, the same bits on all ranks, so that the
 * next gather is the delta that would have come next. n_gathers: as _replica said, at least 1. */
TAGC_API tagc_status tagc_gatherer_set_replica(tagc_gatherer *gatherer, float *full, uint64_t n_gathers);
TAGC_API void tagc_gatherer_destroy(tagc_gatherer *gatherer);

#ifdef __cplusplus
}
#endif

#endif
