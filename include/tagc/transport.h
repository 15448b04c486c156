/* Bring your own network.
 *
 * tagc sends everything by one operation, a transfer: a personalised all-to-all of bytes. tagc builds reduce-scatter,
 * all-gather and the rest from transfers, and fixes the order of sums there. A transport only moves bytes.
 *
 * The simplest way is tagc_comm_create_callback, with one blocking function. A full transport implements
 * tagc_transport_ops. */
#ifndef TAGC_TRANSPORT_H
#define TAGC_TRANSPORT_H

#include "tagc/tagc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the structs in this file. */
#define TAGC_TRANSPORT_ABI 1u

/* A capability. With it, `start` returns at once, and transfers of different lanes may overlap and start in any order.
 * Without it, there is one lane and `start` may block. */
#define TAGC_TRANSPORT_LANES 1u

/* What a transfer moves between this rank and one peer, in one direction. */
typedef struct tagc_part {
    /* A rank in [0, W) other than this one. */
    int32_t peer;
    /* 0 means no message. */
    uint64_t n_bytes;
    /* In bytes, from tagc_transfer.send or tagc_transfer.recv. */
    uint64_t offset;
} tagc_part;

/* One transfer, as one rank sees it. For each part of `sends`, the rank sends n_bytes at send + offset to the peer. For
 * each part of `receives`, it receives n_bytes from the peer to recv + offset.
 *
 * - The peers of each array are in ascending order, without duplicates. The two arrays may name different peers.
 * - If rank r sends n bytes to rank d, then rank d expects n bytes from rank r.
 * - Every rank starts the same transfers of a lane in the same order, including those in which it has no parts.
 * - Send regions may overlap each other. Receive regions overlap nothing.
 * - Arrays and buffers stay valid and unchanged until the transfer is complete.
 * - The comm checks lane and peers before it calls the transport.
 *
 * The time and memory that a transport takes should grow with the number of parts, not with W. */
typedef struct tagc_transfer {
    /* [0, 9). */
    uint32_t lane;
    /* Lengths of the two arrays below, [0, W - 1]. */
    uint32_t n_sends, n_receives;
    const tagc_part *sends;
    const tagc_part *receives;
    /* Either may be NULL if no part of its direction has bytes. */
    const void *send;
    void *recv;
    /* The same on all ranks. If it is not 0, every rank may exchange with every other, no part of any rank has more
     * bytes than this, and a transport may use a collective operation. 0 promises nothing. */
    uint64_t round_bytes;
} tagc_transfer;

/* For transports. Returns the part of that peer, or NULL if there is none. */
TAGC_API const tagc_part *tagc_find_part(const tagc_part *parts, uint32_t n_parts, int peer);

/* What `test` reports. The comm sets it to {0, 0, -1} before every call. */
typedef struct tagc_progress {
    /* 1: both directions are complete, and the request is no longer valid. */
    int done;
    /* 1: a part arrived or left since the last call. The comm then calls again soon. */
    int moved;
    /* A rank that this transfer still waits for, or -1 if unknown. */
    int waiting_for;
} tagc_progress;

/* Why a comm broke. */
typedef struct tagc_failure {
    tagc_status status;
    /* The rank where the failure began, in [0, W), or -1 if unknown. */
    int rank;
    const char *reason;
} tagc_failure;

/* Every member is required. The comm calls them from one thread, never two at a time. There are two exceptions: any
 * thread may call abort, and the thread that destroys the comm calls destroy. */
typedef struct tagc_transport_ops {
    /* TAGC_TRANSPORT_ABI. */
    uint32_t abi;
    /* 0 or TAGC_TRANSPORT_LANES. */
    uint32_t capabilities;
    const char *name;
    /* Starts a transfer. *request is the transport's own handle; the comm passes it to test until it is done. */
    tagc_status (*start)(void *context, const tagc_transfer *transfer, void **request);
    /* Never blocks. A failure is final. */
    tagc_status (*test)(void *context, void *request, tagc_progress *progress);
    /* The comm broke. When cancel returns, the transport must no longer use the buffers of any transfer. It should tell the peers the
     * whole failure, if it can do so without ending the process, so that theirs is the same. The comm starts no more transfers. */
    void (*cancel)(void *context, const tagc_failure *failure);
    /* This rank gives up. Tell the peers if possible. */
    void (*abort)(void *context, const tagc_failure *failure);
    void (*destroy)(void *context);
} tagc_transport_ops;

/* For transports. Records `text` as the failure of the calling thread and returns `status`. The thread that
 * waits for the transfer finds the text in tagc_last_error(). */
TAGC_API tagc_status tagc_report(tagc_status status, const char *text);
/* Like tagc_report, for a failure that began at that rank, in [0, W): tagc_comm_failed_rank names it. */
TAGC_API tagc_status tagc_report_rank(tagc_status status, int rank, const char *text);

/* world_size is in [1, 65536]. `ops` must outlive the comm. On success the comm owns `context` and destroys
 * it in the end. `options` may be NULL. */
TAGC_API tagc_status tagc_comm_create(const tagc_transport_ops *ops, void *context, int rank, int world_size,
                                      const tagc_comm_options *options, tagc_comm **out);

/* The callback transport: blocking functions of your own, without lanes. */
typedef struct tagc_callback_ops {
    /* TAGC_TRANSPORT_ABI. */
    uint32_t abi;
    /* Performs the transfer and returns when both directions are complete. The comm calls it from one thread, in the same
     * order on all ranks. If it returns anything but TAGC_OK, the comm breaks. The comm cannot interrupt a call, so the
     * function needs a time-out of its own. */
    tagc_status (*exchange)(void *context, const tagc_transfer *transfer);
    /* This rank gives up, or its comm broke. Tell the peers the whole failure, so that their `exchange` returns
     * tagc_report_rank of it instead of waiting: then all have the same status, and tagc_comm_failed_rank names the same
     * rank. Make this rank's own `exchange` return if one is in progress. Any thread may call it, also during an exchange,
     * and more than once. If it is NULL, the peers wait for their time-outs. */
    void (*abort)(void *context, const tagc_failure *failure);
} tagc_callback_ops;

/* Copies `ops`. The caller owns `context`, which must outlive the comm. `options` may be NULL. */
TAGC_API tagc_status tagc_comm_create_callback(const tagc_callback_ops *ops, void *context, int rank,
                                               int world_size, const tagc_comm_options *options,
                                               tagc_comm **out);

#ifdef __cplusplus
}
#endif

#endif
