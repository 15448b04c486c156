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
 * _destroy accepts NULL. */
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
    TAGC_ERR_ARGUMENT = 1,    /* a value out of its range */
    TAGC_ERR_STATE = 2,       /* a call out of order: end without begin, begin twice */
    TAGC_ERR_MEMORY = 3,      /* an allocation failed */
    TAGC_ERR_MISMATCH = 4,    /* ranks disagree on options or shapes */
    TAGC_ERR_TRANSPORT = 5,   /* a peer is gone or silent; the comm cannot be used any more */
    TAGC_ERR_CORRUPT = 6,     /* received or loaded bytes contradict themselves */
    TAGC_ERR_UNSUPPORTED = 7, /* known, but not in this build or combination */
    TAGC_ERR_IO = 8,          /* a file cannot be read or written */
    TAGC_ERR_INTERRUPTED = 9  /* the user asked to stop */
} tagc_status;

TAGC_API const char *tagc_status_name(tagc_status status);

/* Text of this thread's last failure; valid until the thread's next failing call. Never NULL. */
TAGC_API const char *tagc_last_error(void);

/* ---- comm: one rank's connection ---- */

typedef struct tagc_comm tagc_comm;

/* What a byte on the wire was for. Sizes below are per rank, before the factor (W-1)/W. */
typedef enum tagc_leg {
    TAGC_LEG_INDEX = 0,    /* which elements are kept */
    TAGC_LEG_VALUES = 1,   /* their values: sketch cells, packed values, or the dense gradient */
    TAGC_LEG_LEFTOVER = 2, /* values that a sketch could not give back, sent plainly */
    TAGC_LEG_RESULT = 3,   /* all-reduce only: the sums, owner to all */
    TAGC_LEG_GATHER = 4,   /* parameters, owner to all */
    TAGC_LEG_CONTROL = 5,  /* agreement and headers */
    TAGC_N_LEGS = 6
} tagc_leg;

TAGC_API const char *tagc_leg_name(int leg); /* "index", "values", ...; "?" outside [0, TAGC_N_LEGS) */

/* One piece of work on one of the two streams that tagc runs beside the caller: "comm" (a transfer) or
 * "codec" (selection, encoding, decoding). Times from tagc_time_s. The strings live for ever. */
typedef struct tagc_event {
    const char *stream; /* "comm" or "codec" */
    const char *name;   /* leg or phase name */
    double start_s, end_s;
    uint64_t n_bytes; /* sent to other ranks; 0 for codec work */
    uint64_t tag; /* tagc_reducer_options.tag or tagc_gatherer_options.tag; UINT64_MAX when there is none */
} tagc_event;

typedef void (*tagc_trace_fn)(void *context, const tagc_event *event);

typedef struct tagc_comm_options {
    size_t struct_bytes; /* set by _init */
    double timeout_s;    /* (0, 1e6], default 120: a transfer that is not complete by then breaks the comm */
    tagc_trace_fn trace; /* default NULL; called from tagc's threads, must be thread-safe and quick */
    void *trace_context;
} tagc_comm_options;

TAGC_API void tagc_comm_options_init(tagc_comm_options *options);

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

/* Bytes sent to and received from other ranks since the comm was made, per leg; either may be NULL. */
TAGC_API void tagc_comm_bytes(const tagc_comm *comm, uint64_t sent[TAGC_N_LEGS],
                              uint64_t received[TAGC_N_LEGS]);

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
    TAGC_EXCHANGE_DENSE = 0,  /* every value, point to point to its owner, added in rank order */
    TAGC_EXCHANGE_SKETCH = 1, /* TAGC, Algorithm 1: index, count sketch, peeling */
    TAGC_EXCHANGE_PACKED = 2, /* index, then the values at its set positions in order: nothing to peel */
    TAGC_EXCHANGE_DIRECT =
        3 /* each rank's own encoded fragments straight to their owners: no index round, and a
                                 volume that does not grow with W */
} tagc_exchange;

/* How direct writes a value. Rounding errors go to the residual. */
typedef enum tagc_values {
    TAGC_VALUES_FP32 = 0,
    TAGC_VALUES_BF16 = 1,
    TAGC_VALUES_INT8 = 2, /* the integer formats have one scale per block of values */
    TAGC_VALUES_INT4 = 3,
    TAGC_VALUES_INT2 = 4,
    TAGC_VALUES_SIGN = 5, /* one bit: every magnitude of a block is its mean */
    TAGC_VALUES_DEFAULT = TAGC_VALUES_INT2
} tagc_values;

typedef enum tagc_index {
    TAGC_INDEX_OR = 0,   /* 1 bit per element, a true OR */
    TAGC_INDEX_SUM4 = 1, /* 4 bits per element, summed (LHC); W <= 15 */
    TAGC_INDEX_SUM1 = 2  /* 1 bit per element, summed as packed bytes as TAGC was published. LOSSY where two
                            ranks keep the same element: for reproduction only */
} tagc_index;

typedef enum tagc_cells {
    TAGC_CELLS_FP32 = 0,
    TAGC_CELLS_FIXED =
        1 /* int32 modulo 2^32, one power-of-two scale per unit and step: exact where it peels */
} tagc_cells;

typedef enum tagc_unpeeled {
    TAGC_UNPEELED_PACKED = 0,   /* their values are sent plainly: nothing is lost */
    TAGC_UNPEELED_RESIDUAL = 1, /* they go back to the residual of every rank */
    TAGC_UNPEELED_ESTIMATE = 2  /* median of three cells, as in the paper; LOSSY */
} tagc_unpeeled;

typedef enum tagc_op { TAGC_OP_AVG = 0, TAGC_OP_SUM = 1 } tagc_op;
typedef enum tagc_wire { TAGC_WIRE_FP32 = 0, TAGC_WIRE_BF16 = 1 } tagc_wire;

typedef struct tagc_reducer_options {
    size_t struct_bytes; /* set by _init */
    uint64_t n_elems; /* of the whole unit: a positive multiple of W, at most W * (2^32 - 64). No default. */
    uint64_t tag;     /* the caller's name for this unit in events; default UINT64_MAX */
    int exchange;     /* tagc_exchange, default DIRECT */
    int index;        /* tagc_index, default OR; sketch and packed */
    double
        sparsity; /* [0, 1]: at least this share of every fragment is zeroed; not for dense. direct at 0 sends every
                     element and no positions. Below 1 at least one element of a fragment travels, of however few: what is
                     never sent never arrives. -1 (default): the exchange's own, 0.95 for direct, 0.9875 for others */
    double ratio;   /* sketch: n / cells, [1, 1000], or 0 (default): sized from the union to load 0.75 */
    int cells;      /* tagc_cells, default FP32; sketch */
    int unpeeled;   /* tagc_unpeeled, default PACKED; sketch */
    int fill_union; /* 1: every rank sends what it has at every position of the union, not only what it
                            kept: free on the wire. -1 (default): yes for packed, no for sketch. Needs index OR */
    int op;         /* tagc_op, default AVG: the sum times 1/W */
    int all_reduce; /* 0 (default): output is this rank's shard; 1: output is the whole unit on every rank; 2: direct
                       with hosts: output is the host shard, row l of (ranks_per_host, n_elems / ranks_per_host),
                       on the rank of local index l of every host */
    int values; /* tagc_values, default DEFAULT; direct */
    int block;  /* [16, 4096], a power of two, default 128: values per scale; direct */
    int rotate; /* [0, 1], default 0: a Hadamard transform of each block before it is rounded; direct at sparsity 0 */
    int ranks_per_host; /* [1, W], divides W, default 1. direct: rank h * ranks_per_host + l is rank l of host h. Ranks
                           of one host add their gradients first (bf16 wire, fp32 sums; fp32 wire where values is
                           fp32), and only the sums of hosts are encoded: the residual holds
                           n_elems / ranks_per_host values */
    int wire;           /* tagc_wire, default FP32; BF16 for dense only: halves the bytes, sums stay fp32 */
    int n_threads; /* [1, 256], default 1: threads of the codec; changes no result */
    uint64_t seed; /* of the sketch's hashes, default 0 */
} tagc_reducer_options;

TAGC_API void tagc_reducer_options_init(tagc_reducer_options *options);

/* Range and default of a numeric field of tagc_reducer_options by name. TAGC_ERR_ARGUMENT when there is none. */
TAGC_API tagc_status tagc_reducer_option_bounds(const char *field, double *min, double *max, double *initial);

/* The padded n_elems of a unit of `n` values over W ranks: W * ceil(n / W) with the shard a multiple of 16. */
TAGC_API uint64_t tagc_padded_elems(uint64_t n, int world_size);

typedef enum tagc_phase {
    TAGC_PHASE_SELECT =
        0, /* accumulate, threshold, residual; direct with positions: encode, too, which is one with it */
    TAGC_PHASE_INDEX = 1,  /* make and OR bitmaps */
    TAGC_PHASE_ENCODE = 2, /* sketch or pack; direct: blocks, sums, and rows within the host */
    TAGC_PHASE_DECODE = 3, /* add, peel or unpack; direct: checks of bodies, too */
    TAGC_PHASE_WAIT = 4,   /* the codec had nothing to do: waiting for the wire */
    TAGC_N_PHASES = 5
} tagc_phase;

TAGC_API const char *tagc_phase_name(int phase);

/* Of one step. Counts "of the unit" cover all W fragments of this rank, with hosts those of its host that it encodes;
 * "of the shard" only the owned one. */
typedef struct tagc_reducer_stats {
    size_t struct_bytes;                    /* set by the caller or by tagc_reducer_stats_init */
    uint64_t n_bytes_sent[TAGC_N_LEGS];     /* to other ranks, as the transport counted them */
    uint64_t n_bytes_received[TAGC_N_LEGS]; /* from other ranks */
    double time_s[TAGC_N_PHASES];
    double total_s;  /* from the start of the work to its end, on tagc's thread */
    uint64_t n_kept; /* of the unit: elements this rank kept */
    uint64_t
        n_union; /* of the unit: elements that any rank kept; 0 where nobody knows. direct knows them of an all-reduce,
                    less those that cancelled, and where all are sent */
    double
        sparsity; /* what was reached: 1 - n_kept / n_elems, with hosts 1 - n_kept * ranks_per_host / n_elems */
    uint64_t n_cells;    /* of the shard: cells of its sketch */
    double load;         /* of the shard: items per cell */
    int peel_rounds;     /* of the shard */
    uint64_t n_unpeeled; /* of the shard: items the sketch did not give back */
    uint64_t n_lost;     /* of the unit: elements this rank kept that a lossy index dropped */
    int nonfinite; /* a rank had NaN or Inf, or fp32 cells, sums or what their rounding loses overflowed: the output
                      is NaN (dense: the sums as they came out), the residual as before the step */
} tagc_reducer_stats;

TAGC_API void tagc_reducer_stats_init(tagc_reducer_stats *stats);

/* Collective. Checks that all ranks ask for the same. The residual starts empty. */
TAGC_API tagc_status tagc_reducer_create(tagc_comm *comm, const tagc_reducer_options *options,
                                         tagc_reducer **out);

/* Collective. Starts the exchange of `gradient` (W, shard) into `output` (shard), or as all_reduce says.
 * Both stay the caller's, must not overlap, and must be left alone until _end; gradient is not changed.
 * Returns at once. Reducers of one comm run in the order of their begins, which must be the same on all ranks. */
TAGC_API tagc_status tagc_reducer_begin(tagc_reducer *reducer, const float *gradient, float *output);

/* Waits for what _begin started. All ranks return the same status, except TAGC_ERR_TRANSPORT. On failure the
 * output is undefined and the residual is as before the step. `stats` may be NULL. */
TAGC_API tagc_status tagc_reducer_end(tagc_reducer *reducer, tagc_reducer_stats *stats);

/* begin and end in one. */
TAGC_API tagc_status tagc_reducer_run(tagc_reducer *reducer, const float *gradient, float *output,
                                      tagc_reducer_stats *stats);

/* Changes θ, [0, 1], for the steps that follow; not between begin and end. Makes new buffers where θ is another; on
 * failure nothing has changed. Collective in effect: every rank must set the same. Where they do not, the next step fails
 * on all ranks: TAGC_ERR_MISMATCH, or TAGC_ERR_TRANSPORT where ranks of direct that exchange fragments differ (bodies no
 * longer fit). TAGC_ERR_UNSUPPORTED for θ > 0 with rotate. */
TAGC_API tagc_status tagc_reducer_set_sparsity(tagc_reducer *reducer, double sparsity);

/* The residual in use, (n_elems,), with hosts (n_elems / ranks_per_host,), or NULL and 0 for dense and where direct has
 * nothing to carry over (sparsity 0 since it was made and values in fp32 or bf16; one host): a view that the next begin
 * invalidates. With hosts it belongs to the sums of a host, row h to the rank of the same local index on host h. Its zero
 * is -0.0f, the one value that changes nothing it is added to. */
TAGC_API const float *tagc_reducer_residual(const tagc_reducer *reducer, uint64_t *n_elems);

/* Multiplies the residual by `factor` (finite, >= 0): when a loss scale changes, or to let it decay. */
TAGC_API tagc_status tagc_reducer_scale_residual(tagc_reducer *reducer, double factor);

/* Puts `values` (n_elems as _residual tells, all finite) in place of the residual. Not between begin and end. */
TAGC_API tagc_status tagc_reducer_set_residual(tagc_reducer *reducer, const float *values, uint64_t n_elems);

/* The residual as bytes with header and checksum (docs/wire-format.md). Per rank; not between begin and end.
 * _load refuses what _save of the same n_elems and ranks_per_host did not write, and leaves the residual alone
 * then. With hosts the rows are others at another world size, and with all_reduce 2: that is not in the bytes. */
TAGC_API uint64_t tagc_reducer_state_bytes(const tagc_reducer *reducer);
TAGC_API tagc_status tagc_reducer_state_save(const tagc_reducer *reducer, void *buffer, uint64_t n_bytes);
TAGC_API tagc_status tagc_reducer_state_load(tagc_reducer *reducer, const void *buffer, uint64_t n_bytes);

/* Waits for a step that was begun and not ended. */
TAGC_API void tagc_reducer_destroy(tagc_reducer *reducer);

/* ---- gatherer: the parameters of one unit ---- */

typedef struct tagc_gatherer tagc_gatherer;

/* How parameters travel. The first two are those of tagc_wire. Every rank, the owner too, gets the same bits. */
typedef enum tagc_gather {
    TAGC_GATHER_FP32 = 0,
    TAGC_GATHER_BF16 = 1,
    TAGC_GATHER_INT8 = 2, /* blocks of 256 with a scale */
    TAGC_GATHER_DELTA8 =
        3, /* what changed since the last gather, in low-bit blocks of 256 with a scale: `full` must
                               hold that gather's result. It is a bf16 replica; what a delta could not say stays in
                               the next one. The first gather, and the one after _reset, is whole: bf16 */
    TAGC_GATHER_DELTA4 = 4,
    TAGC_GATHER_DELTA2 = 5
} tagc_gather;

typedef struct tagc_gatherer_options {
    size_t struct_bytes; /* set by _init */
    uint64_t n_elems;    /* of the whole unit: a positive multiple of the number of rows, at most that times
                            (2^32 - 64). No default. */
    uint64_t tag;        /* as in tagc_reducer_options */
    int wire;            /* tagc_gather, default FP32 */
    int ranks_per_host; /* [0, W], divides W; 0 (default): W. Only ranks of one host exchange: shard is row l of full
                           (ranks_per_host, shard), shard = n_elems / ranks_per_host */
    int two_level; /* [0, 1], default 0. 1: all ranks exchange, shard is row `rank` of full (W, shard), and each row
                           crosses to another host once: to the rank of the same local index, which passes it on within
                           the host. The same bits as without, and as many bytes sent, most of them within hosts */
    int check_every; /* [0, 2^31), default 0 (never): the ranks compare checksums of their replicas with every
                        so many gathers; TAGC_ERR_CORRUPT on all where they differ. Deltas */
} tagc_gatherer_options;

TAGC_API void tagc_gatherer_options_init(tagc_gatherer_options *options);
TAGC_API tagc_status tagc_gatherer_create(tagc_comm *comm, const tagc_gatherer_options *options,
                                          tagc_gatherer **out); /* collective */

/* Collective. Starts the gather of every rank's `shard` (shard) into `full` (rows, shard). shard may be the own
 * row of full, but for deltas must lie apart, and full must be the array of the last gather with the values it left there.
 * Both must be left alone until _end. Gathers may overlap reducers and each other, and are ordered among themselves.
 * NaN and Inf travel, of int8 as a block of NaN; with deltas the whole row of an owner who has one is NaN on all ranks,
 * until a gather of finite values, which is whole. */
TAGC_API tagc_status tagc_gatherer_begin(tagc_gatherer *gatherer, const float *shard, float *full);
/* Waits for what _begin started. Deltas: a rank that got a damaged message returns TAGC_ERR_CORRUPT, all others do so from
 * the next gather, and the one after that is whole. */
TAGC_API tagc_status tagc_gatherer_end(tagc_gatherer *gatherer);
/* The next gather is whole; collective in effect. For when `full` or the shard was changed from outside. */
TAGC_API tagc_status tagc_gatherer_reset(tagc_gatherer *gatherer);
TAGC_API void tagc_gatherer_destroy(tagc_gatherer *gatherer);

#ifdef __cplusplus
}
#endif

#endif
