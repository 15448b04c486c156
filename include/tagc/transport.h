/* Bring your own network: everything tagc sends goes through one operation, a personalised all-to-all of
 * bytes.
 *
 * Reduce-scatter, OR, all-gather and broadcast are made of it above the transport, where the order of sums is
 * fixed and bytes are counted. A transport only moves bytes. */
#ifndef TAGC_TRANSPORT_H
#define TAGC_TRANSPORT_H

#include "tagc/tagc.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TAGC_TRANSPORT_ABI 1u

/* Capability: start returns at once, and transfers of different lanes may overlap and be started in any
 * order. Without it there is one lane and start blocks. */
#define TAGC_TRANSPORT_LANES 1u

/* Rank r sends send_bytes[d] bytes at send + send_offset[d] to every d, and receives recv_bytes[s] bytes from
 * every s at recv + recv_offset[s]. All arrays are (W,), in bytes. What r sends to d equals what d expects
 * from r. Zero bytes means no message between the two. Send regions may overlap each other, receive regions
 * not. The part to itself is a plain copy (nothing when both places are the same). Arrays and buffers stay
 * valid and untouched until the transfer is done. */
typedef struct tagc_transfer {
    uint32_t lane; /* below 8; transfers of one lane are started in the same order on all ranks */
    const void *send;
    const uint64_t *send_bytes, *send_offset;
    void *recv;
    const uint64_t *recv_bytes, *recv_offset;
} tagc_transfer;

/* What test finds out. The comm sets it to {0, 0, -1} before every call. */
typedef struct tagc_progress {
    int done;        /* 1: both directions are complete, and the request is gone */
    int moved;       /* 1: a part has arrived or left since the last call, so it pays to ask again soon */
    int waiting_for; /* a rank that has not answered yet; -1 when that is not known */
} tagc_progress;

/* Every member is required. All are called from the comm thread of one rank, never two at a time; abort may
 * come from any thread, and destroy comes from the thread that destroys the comm. */
typedef struct tagc_transport_ops {
    uint32_t abi; /* TAGC_TRANSPORT_ABI */
    uint32_t capabilities;
    const char *name;
    /* Starts a transfer; *request is the transport's own handle, passed to test until done. */
    tagc_status (*start)(void *context, const tagc_transfer *transfer, void **request);
    /* Never blocks. A failure is final. */
    tagc_status (*test)(void *context, void *request, tagc_progress *progress);
    /* The comm is broken, here is why: when this returns, the buffers of all transfers under way are the
     * caller's again. Peers are told if that is possible without ending the process. Nothing is started
     * afterwards. */
    void (*cancel)(void *context, const char *reason);
    /* This rank gives up: let peers know if there is a way. */
    void (*abort)(void *context, const char *reason);
    void (*destroy)(void *context);
} tagc_transport_ops;

/* For transports: records the text of a failure for the calling thread, so that whoever waits for the
 * transfer finds it in tagc_last_error(), and returns `status`. */
TAGC_API tagc_status tagc_report(tagc_status status, const char *text);

/* world_size in [1, 65536]. `ops` must outlive the comm, which owns `context` from success on. options may be
 * NULL. */
TAGC_API tagc_status tagc_comm_create(const tagc_transport_ops *ops, void *context, int rank, int world_size,
                                      const tagc_comm_options *options, tagc_comm **out);

/* The smallest transport: one blocking function of the caller's. It is called from one thread of tagc's, in
 * the same order on all ranks. A status other than TAGC_OK breaks the comm; a call cannot be interrupted, so
 * its time-out is the caller's. The transfer's part to itself is the function's to copy, too. */
typedef tagc_status (*tagc_exchange_fn)(void *context, const tagc_transfer *transfer);
TAGC_API tagc_status tagc_comm_create_callback(tagc_exchange_fn exchange, void *context, int rank,
                                               int world_size, const tagc_comm_options *options,
                                               tagc_comm **out);

#ifdef __cplusplus
}
#endif

#endif
