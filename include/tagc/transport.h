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

/* 2: a transfer names its peers, and a rank is no peer of its own; the callback transport has a table. */
#define TAGC_TRANSPORT_ABI 2u

/* Capability: start returns at once, and transfers of different lanes may overlap and be started in any
 * order. Without it there is one lane and start blocks. */
#define TAGC_TRANSPORT_LANES 1u

/* What a transfer moves between this rank and one peer, in one direction. */
typedef struct tagc_part {
    /* A rank in [0, W), not this rank. */
    int32_t peer;
    /* Bytes. 0: no message, as if the part were not there. */
    uint64_t n_bytes;
    /* Bytes from transfer.send or transfer.recv on. */
    uint64_t offset;
} tagc_part;

/* One personalised exchange, as this rank sees it: for each part of `sends` it sends n_bytes at send + offset to the
 * peer, and for each part of `receives` it receives n_bytes at recv + offset from the peer.
 *
 * The peers of each array ascend, so that none is there twice; peers to send to and peers to receive from may be
 * different ones. Work and memory of a transport should grow with the parts, not with W. Every rank starts the same
 * transfers of a lane in the same order, those to which it contributes no part too. What r sends to d equals what d
 * expects from r. Send regions may overlap each other, receive regions neither each other nor a send region.
 *
 * Arrays and buffers stay valid and untouched until the transfer is done. The comm checks lane and peers before it calls
 * the transport. */
typedef struct tagc_transfer {
    /* Below 8. Transfers of one lane are started in the same order on all ranks. */
    uint32_t lane;
    /* Entries of the two arrays below, each in [0, W - 1]. */
    uint32_t n_sends, n_receives;
    const tagc_part *sends;
    const tagc_part *receives;
    /* May be NULL where no part of that direction has bytes. */
    const void *send;
    void *recv;
    /* The same number on all ranks. Not 0: a round, to and from all other ranks, in which no part of any rank has more bytes
     * than this; parts without bytes may be left out. A transport may use a collective for it. 0: nothing is promised. */
    uint64_t round_bytes;
} tagc_transfer;

/* For transports: the part of that peer among n_parts, or NULL where there is none. */
TAGC_API const tagc_part *tagc_find_part(const tagc_part *parts, uint32_t n_parts, int peer);

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

/* The smallest transport: blocking functions of the caller's, without lanes. */
typedef struct tagc_callback_ops {
    /* TAGC_TRANSPORT_ABI */
    uint32_t abi;
    /* Moves what the transfer says and returns when both directions are complete. The comm calls it from one thread, in
     * the same order on all ranks. A status other than TAGC_OK breaks the comm. The comm cannot interrupt a call: its
     * time-out is the caller's. */
    tagc_status (*exchange)(void *context, const tagc_transfer *transfer);
    /* This rank gives up, or its comm broke: tell the peers why, so that their exchange fails with `reason` instead of
     * waiting, and let an exchange of this rank that is under way return. Any thread may call it, during an exchange
     * too, and more than once. NULL: peers wait for their time-out. */
    void (*abort)(void *context, const char *reason);
} tagc_callback_ops;

/* `ops` is copied. `context` stays the caller's and must outlive the comm. options may be NULL. */
TAGC_API tagc_status tagc_comm_create_callback(const tagc_callback_ops *ops, void *context, int rank,
                                               int world_size, const tagc_comm_options *options,
                                               tagc_comm **out);

#ifdef __cplusplus
}
#endif

#endif
