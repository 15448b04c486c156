/* The native transport: TCP connections between all ranks, driven by one libuv loop on the comm thread.
 *
 *   open.c      interfaces, the port, the address for other ranks
 *   connect.c   connections to all ranks, and proofs of keys at both ends
 *   tls.c       what encrypts them, if it is to
 *   frames.c    what arrives: no socket in it, so that a fuzzer can feed it
 *   send.c      what leaves: pieces of parts, as sockets take them
 *   native.c    the table of the transport, and the life of requests
 *   threads.c   further loops, with a thread each, for fast links
 *   forks.c     forks of this process, which let go of its sockets
 *
 * docs/reference/native.md has the bytes. A part travels in frames of up to NATIVE_PIECE_BYTES, over any of the sockets of
 * its peer, so that a large part does not hold up small ones. A frame that arrives before its transfer has started here is
 * kept in memory. So that this stays little, a sender sends the first NATIVE_EAGER_BYTES of a part at once, and the rest
 * when the receiver has said that it has started.
 *
 * The lock is for abort, which any thread may call. All else is called by one thread at a time.
 *
 * Where there are further loops, `state` is held wherever more than one thread's socket has a part in it: requests, peers and their queues,
 * what broke. It is not held while the kernel copies bytes, so that this is what threads do at the same time. A request's memory stays
 * until all its bytes have been counted, or until those threads have ended, which cancel and abort see to first. */
#ifndef TAGC_TRANSPORT_NATIVE_H
#define TAGC_TRANSPORT_NATIVE_H

#include "core/memory.h"
#include "core/status.h"
#include "tagc/native.h"
#include "tagc/transport.h"
#include "transport/native/tls.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <uv.h>

enum {
    NATIVE_VERSION = 2,
    NATIVE_LANES = 8,
    NATIVE_MOST_SOCKETS = 16,
    NATIVE_MOST_THREADS = 8,
    /* What both ends say before a connection opens: call, challenge, and the proofs of the caller and of the called rank. */
    NATIVE_CALL_BYTES = 48,
    NATIVE_NONCE_BYTES = 32,
    NATIVE_PROOF_BYTES = 32,
    NATIVE_TALK_BYTES = 2 * NATIVE_CALL_BYTES + 2 * NATIVE_PROOF_BYTES,
    NATIVE_HEADER_BYTES = 32,
    NATIVE_PIECE_BYTES = 256 << 10,
    NATIVE_EAGER_BYTES = 1 << 20,
    /* What a peer may send before its transfers have started here. A step holds less, because its rank's work memory is bounded. */
    NATIVE_MOST_AHEAD = 1 << 16, /* transfers of a lane */
    NATIVE_MOST_EARLY_BYTES = 512 << 20,
    NATIVE_STAGING_BYTES = 128 << 10,
    NATIVE_REASON_BYTES = 400,
    /* After a connection ended, this rank waits so long before it says who is lost: the lost rank may not be the first, and
     * a peer may say why. A rank that gives up waits so long for peers that take nothing, and at most _FAREWELL_MS. */
    NATIVE_GRACE_MS = 1000,
    NATIVE_FAREWELL_MS = 3000
};

typedef enum native_kind {
    NATIVE_DATA = 1,  /* a piece of a part */
    NATIVE_READY = 2, /* the receiver of a large part has started its transfer */
    NATIVE_GAVE_UP =
        3, /* a rank gave up: sequence: its name, total: the status, offset: 1 + the rank where it began, or 0 */
    NATIVE_GOODBYE = 4 /* the sender's comm was destroyed */
} native_kind;

typedef struct native_frame {
    uint8_t kind, lane;
    uint32_t n_bytes; /* behind the header */
    uint64_t sequence, total, offset;
} native_frame;

typedef struct native_request native_request;
typedef struct native_peer native_peer;
typedef struct native_loop native_loop;

/* A part that leaves. */
typedef struct native_send {
    native_request *request;
    const unsigned char *data;
    uint64_t n_bytes, n_taken, n_written; /* taken by sockets; in the kernel's hands */
    int peer, is_ready, is_queued;
    struct native_send *next; /* in the peer's queue */
} native_send;

/* A part that arrives. */
typedef struct native_receive {
    native_request *request;
    uint64_t n_bytes, n_announced, n_received; /* announced: in frames whose header has arrived */
    int peer;
    struct native_receive *next; /* in the peer's queue of NATIVE_READY frames */
} native_receive;

struct native_request {
    tagc_transfer transfer;
    uint64_t sequence; /* of its lane */
    uint32_t n_left;   /* parts that are not complete */
    uint32_t first_open;
    uint32_t n_sends, n_receives; /* room in the two arrays */
    int moved;
    native_send *sends;
    native_receive *receives;
    native_request *next;
};

/* A frame that arrived before its transfer started here. */
typedef struct native_early {
    native_frame frame;
    struct native_early *next;
    unsigned char data[];
} native_early;

/* A socket's place in the list of forks.c. */
typedef struct native_held {
    int fd, is_noted;
    struct native_held *next, *before;
} native_held;

/* One connection. */
typedef struct native_socket {
    uv_tcp_t tcp;
    native_held held;
    tagc_native *self;
    native_peer *peer; /* NULL: it has not proved who it is */
    native_loop *loop; /* NULL: that of the comm's thread */
    native_tls *tls;   /* NULL: bytes travel as they are */
    uv_write_t alert;  /* that what arrived was changed: its last words */
    int is_alerted;
    int index, is_open, is_closing, is_writing, cannot_write;

    /* while it connects: */
    uv_connect_t connecting;
    int is_caller;
    uint64_t deadline_ms; /* of the loop */
    struct native_socket *next;
    unsigned char talk[NATIVE_TALK_BYTES];
    uint32_t n_talk, n_awaited; /* said and heard so far; what is to be heard next ends here */

    /* what it writes: */
    uv_write_t write;
    unsigned char out_header[NATIVE_HEADER_BYTES];
    native_send *out; /* NULL: a frame without a body */
    const unsigned char *out_data;
    uint32_t out_bytes;

    /* what it reads: a header, then in_left bytes */
    unsigned char in_header[NATIVE_HEADER_BYTES];
    uint32_t n_in_header;
    native_frame in;
    uint32_t in_left;
    unsigned char *in_target;
    native_receive *in_receive; /* NULL: it goes to in_early or in_reason */
    native_early *in_early;
} native_socket;

struct native_peer {
    int rank, n_open;
    native_socket *sockets[NATIVE_MOST_SOCKETS];
    native_send *first, *last;                /* parts of which a piece may leave */
    native_receive *first_ready, *last_ready; /* frames to send */
    native_early *early;
    uint64_t n_early_bytes;
    int has_left;                                     /* said goodbye */
    int is_told;                                      /* why this rank gave up */
    uint64_t ended, ended_ms;                         /* its number among peers that ended; 0: it has not */
    int last_error;                                   /* of libuv */
    uint64_t retry_ms[NATIVE_MOST_SOCKETS], pause_ms; /* before it is called again */
};

/* One beside that of the comm's thread. */
struct native_loop {
    tagc_native *self;
    uv_loop_t uv;
    uv_async_t wake; /* there is something to send, or to end */
    pthread_t thread;
    int has_thread;
    atomic_int ends;
    unsigned char staging[NATIVE_STAGING_BYTES];
};

struct tagc_native {
    pthread_mutex_t lock, state; /* in this order */
    uv_loop_t loop;
    int has_loop;
    pid_t process; /* that opened it; a fork has no part in it */
    int rank, world_size, n_sockets, is_connected, has_comm;
    int n_threads;      /* wanted; 0: by the link */
    int n_more, n_here; /* further loops; ranks with this one's address */
    native_loop *more[NATIVE_MOST_THREADS - 1];
    native_tls_context *tls; /* NULL: no connection is encrypted */
    int32_t *names;
    native_peer *peers; /* (W) */
    struct sockaddr_storage address;

    /* while it connects: */
    uv_tcp_t listener;
    native_held listener_held;
    int is_listening;
    uint64_t n_forks; /* before the loop ran */
    uv_timer_t timer;
    uint64_t n_ticks;
    native_socket *pending; /* accepted connections that have not proved who they are, the newest first */
    int n_pending;
    uint64_t n_refused;
    const unsigned char *addresses, *keys;

    uint64_t n_started[NATIVE_LANES];
    native_request *active[NATIVE_LANES];
    native_request *pool;
    native_request *poller; /* whose test runs the loop: once for all active requests */
    int moved;              /* bytes of no request that has started */
    uint64_t n_early;       /* frames in all peers' lists */
    uint64_t n_ended;       /* peers of which a connection ended */
    int has_answers;        /* NATIVE_READY frames have arrived */
    int has_given_up;       /* its sockets are closed */
    tagc_status broken;     /* not TAGC_OK: for good, by `reason` */
    int giver;              /* name of the rank that gave up, or -1 */
    int failed_rank;        /* where the failure began, or -1 */
    char reason[NATIVE_REASON_BYTES];
    unsigned char staging[NATIVE_STAGING_BYTES];
    char in_reason[NATIVE_REASON_BYTES];
};

static inline void tagc_native_take_state(tagc_native *self) {
    if (self->n_more) pthread_mutex_lock(&self->state);
}

static inline void tagc_native_leave_state(tagc_native *self) {
    if (self->n_more) pthread_mutex_unlock(&self->state);
}

/* Of all loops' threads, unlike uv_now. */
static inline uint64_t tagc_native_now_ms(void) {
    return uv_hrtime() / 1000000;
}

static inline int tagc_native_name(const tagc_native *self, int rank) {
    return self->names[rank];
}

/* frames.c */
void tagc_native_write_header(const native_frame *frame, unsigned char *header);
/* Takes what a socket read. On failure the peer has broken the protocol. */
tagc_status tagc_native_feed(native_socket *socket, const unsigned char *data, size_t n_bytes);
/* Where the next bytes of a socket may be read to, without a copy; NULL: nowhere. They count by _feed_direct. */
unsigned char *tagc_native_direct_target(native_socket *socket, size_t *n_bytes);
tagc_status tagc_native_feed_direct(native_socket *socket, size_t n_bytes);
/* Takes what has arrived for a request that starts now. */
tagc_status tagc_native_take_early(tagc_native *self, native_request *request);
void tagc_native_drop_early(tagc_native *self);
/* Breaks for good; the first reason stays. giver: name of the rank that gave up, or -1. */
void tagc_native_break(tagc_native *self, const tagc_failure *failure, int giver);

/* threads.c; without `state` */
/* Gives sockets to further loops; they do not read yet. What cannot be given stays. */
void tagc_native_share(tagc_native *self);
void tagc_native_start_threads(tagc_native *self);
/* Ends them; their loops are the caller's then. */
void tagc_native_end_threads(tagc_native *self);

/* send.c; with `state` */
void tagc_native_queue_send(native_peer *peer, native_send *send);
void tagc_native_queue_ready(native_peer *peer, native_receive *receive);
void tagc_native_push(native_peer *peer);
void tagc_native_write_pieces(native_socket *socket); /* in its loop's thread */
/* Sends a last frame to all peers that have not had one, where no frame is half sent. Returns to how many it could not. */
int tagc_native_tell(tagc_native *self, const native_frame *frame, const char *text);
/* Returns how many bytes have not arrived at peers' hosts. */
uint64_t tagc_native_on_the_way(const tagc_native *self);

/* open.c */
tagc_status tagc_native_read_address(const tagc_native *self, int rank, const unsigned char *from,
                                     struct sockaddr_storage *to);
/* Returns how many more files this process may open, at most `most`. */
int tagc_native_free_files(int most);

/* forks.c: hold the lock where a socket is made, until it is noted. n_forks: of this process, before libuv may have accepted the
 * caller; it is hung up on if there were more since. */
void tagc_native_lock_sockets(void);
void tagc_native_unlock_sockets(void);
void tagc_native_note_socket(const uv_tcp_t *tcp, native_held *held);
uint64_t tagc_native_forks(void);
int tagc_native_accept(uv_stream_t *listener, uv_tcp_t *tcp, native_held *held, uint64_t n_forks);
void tagc_native_close_tcp(uv_tcp_t *tcp, native_held *held, uv_close_cb on_closed);
/* The same connection in another loop, as `to`. Returns 0 and closes `from`; or an error of libuv, and closes `to`. */
int tagc_native_move_tcp(uv_tcp_t *from, native_held *from_held, uv_loop_t *loop, uv_tcp_t *to,
                         native_held *to_held, uv_close_cb on_closed);

/* connect.c */
void tagc_native_on_caller(uv_stream_t *listener, int status);
void tagc_native_close_socket(native_socket *socket);
/* Closes all handles, and returns when libuv has let go of them and of all buffers. */
void tagc_native_close_all(tagc_native *self);

/* A write to a connection that the peer has closed raises SIGPIPE, which must not end the caller's process. */
typedef struct native_guard {
    sigset_t before;
    int had_pipe;
} native_guard;
void tagc_native_enter(tagc_native *self, native_guard *guard); /* locks, too */
void tagc_native_leave(tagc_native *self, native_guard *guard);

#endif
