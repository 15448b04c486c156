/* Ranks as MPI processes. A library of its own on top of libtagc's public functions, so that libtagc does not need MPI.
 *
 * The tag is the lane, because MPI keeps the order of messages between two ranks within a tag. Messages are cut into
 * pieces for two reasons: MPI's counts are int, and a complete piece is the only sign of movement that the comm thread
 * gets from MPI. */
#include "tagc/transport.h"
#include "transport/mpi_internal.h"

#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint64_t default_piece_bytes = (uint64_t)1 << 18, largest_piece_bytes = (uint64_t)1 << 30;

/* MPI sends messages in the order in which it got them. If it holds all of a long transfer, a short message of another
 * lane waits until that has left. So a lane hands MPI no more than leaves in about this time, beyond the time that a single
 * piece takes: on a link with latency MPI asks the receiver first, and only many pieces at once fill the link. */
static const double window_s = 5e-3;
static const int least_window = 4, largest_window = 256; /* pieces */

enum { TEXT_BYTES = 256, N_LANES = 8, FAREWELL_TAG = N_LANES, REASON_BYTES = 400 };

/* What a rank sends to its peers when its comm breaks. Once it has begun to leave, it stays in memory: MPI may not let go of it. */
typedef struct farewell {
    int32_t status, rank, name; /* rank: where the failure began, or -1; name: of the sender */
    char reason[REASON_BYTES];
} farewell;
static const double farewell_s = 1;

typedef struct piece {
    int peer, n_bytes;
    const char *from; /* of sends, as is begun_s */
    double begun_s;
} piece;

/* One transfer: its pieces, receives first. Sends that have not started have no handle yet. */
typedef struct request {
    int n_pieces, capacity;
    piece *pieces;        /* (capacity,) */
    MPI_Request *handles; /* (capacity,); MPI_REQUEST_NULL when complete */
    MPI_Status *statuses; /* (capacity,) */
    int *indices;         /* (capacity,): pieces that complete in one poll */
    int n_receives;
    int n_begun; /* receives and sends */
    int n_left;
    int lane;
    struct request *next;
    struct request *next_unsent; /* of its lane */
} request;

typedef struct lane {
    request *unsent, **unsent_end; /* requests with sends that have not started, in order */
    int n_leaving, window;         /* sends in progress, and their limit */
} lane;

typedef struct mpi_rank {
    MPI_Comm comm;
    int rank, world_size;
    int32_t *names; /* (W), or NULL */
    uint64_t split_bytes;
    int cancelled;
    request *active; /* under way */
    request *pool;   /* for reuse */
    double least_s;  /* the time that a whole piece took to leave */
    lane lanes[N_LANES];
} mpi_rank;

static tagc_status fail_mpi(const char *what, int code) {
    char why[MPI_MAX_ERROR_STRING] = "", text[TEXT_BYTES + MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(code, why, &length);
    snprintf(text, sizeof text, "%s failed: %s", what, why);
    return tagc_report(TAGC_ERR_TRANSPORT, text);
}

/* Other threads of the program may have ended MPI, and a call would then end the process. */
static tagc_status check_running(void) {
    int finalized = 0;
    MPI_Finalized(&finalized);
    return finalized ? tagc_report(TAGC_ERR_STATE,
                                   "MPI has been finalised while a comm exists: destroy comms before")
                     : TAGC_OK;
}

static int name_of(const mpi_rank *self, int rank) {
    return self->names ? self->names[rank] : rank;
}

/* ---- one request ---- */

static void request_clear(request *r) {
    free(r->pieces);
    free(r->handles);
    free(r->statuses);
    free(r->indices);
}

/* Makes room for n pieces and discards what a pooled request holds. */
static tagc_status request_reserve(request *r, uint64_t n) {
    if (n <= (uint64_t)r->capacity) return TAGC_OK;
    if (n > 1u << 24) return tagc_report(TAGC_ERR_ARGUMENT, "transfer needs more than 2^24 MPI messages");
    request_clear(r);
    r->pieces = malloc(n * sizeof *r->pieces);
    r->handles = malloc(n * sizeof *r->handles); /* NOLINT(bugprone-sizeof-expression): a handle */
    r->statuses = malloc(n * sizeof *r->statuses);
    r->indices = malloc(n * sizeof *r->indices);
    int complete = r->pieces && r->handles && r->statuses && r->indices;
    r->capacity = complete ? (int)n : 0;
    return complete ? TAGC_OK : tagc_report(TAGC_ERR_MEMORY, "out of memory for an MPI transfer");
}

static uint64_t count_pieces(const mpi_rank *self, const tagc_part *parts, uint32_t n_parts) {
    uint64_t n = 0;
    for (uint32_t i = 0; i < n_parts; i++)
        n += parts[i].n_bytes / self->split_bytes + (parts[i].n_bytes % self->split_bytes != 0);
    return n;
}

/* The first part of a peer above this rank. Every rank starts there and wraps around, so that not all send to rank 0
 * first. */
static uint32_t first_part(const mpi_rank *self, const tagc_part *parts, uint32_t n_parts) {
    uint32_t i = 0;
    while (i < n_parts && parts[i].peer < self->rank) i++;
    return i < n_parts ? i : 0;
}

static void add_piece(request *r, int n_bytes, int peer, const char *from) {
    r->handles[r->n_pieces] = MPI_REQUEST_NULL;
    r->pieces[r->n_pieces++] = (piece){.peer = peer, .n_bytes = n_bytes, .from = from};
}

static uint64_t piece_bytes(const mpi_rank *self, uint64_t n_bytes, uint64_t done) {
    if (done >= n_bytes) return 0;
    return n_bytes - done < self->split_bytes ? n_bytes - done : self->split_bytes;
}

static int start_receives(const mpi_rank *self, request *r, const tagc_transfer *transfer) {
    uint32_t n_parts = transfer->n_receives, first = first_part(self, transfer->receives, n_parts);
    for (uint32_t step = 1; step <= n_parts; step++) { /* from the left neighbour downwards */
        const tagc_part *part = &transfer->receives[(first + n_parts - step) % n_parts];
        char *at = (char *)transfer->recv + part->offset;
        for (uint64_t n, done = 0; (n = piece_bytes(self, part->n_bytes, done)) > 0; done += n) {
            add_piece(r, (int)n, part->peer, NULL);
            int code = MPI_Irecv(at + done, (int)n, MPI_BYTE, part->peer, r->lane, self->comm,
                                 &r->handles[r->n_pieces - 1]);
            if (code != MPI_SUCCESS) return code;
        }
    }
    return MPI_SUCCESS;
}

/* Peers take turns, piece by piece. */
static void plan_sends(const mpi_rank *self, request *r, const tagc_transfer *transfer) {
    uint32_t n_parts = transfer->n_sends, first = first_part(self, transfer->sends, n_parts);
    uint64_t most = 0;
    for (uint32_t i = 0; i < n_parts; i++)
        if (transfer->sends[i].n_bytes > most) most = transfer->sends[i].n_bytes;
    for (uint64_t done = 0; done < most; done += self->split_bytes)
        for (uint32_t step = 0; step < n_parts; step++) {
            const tagc_part *part = &transfer->sends[(first + step) % n_parts];
            uint64_t n = piece_bytes(self, part->n_bytes, done);
            if (n > 0) add_piece(r, (int)n, part->peer, (const char *)transfer->send + part->offset + done);
        }
}

/* Starts the sends for which the lane has room. MPI keeps the order of messages between two ranks within a tag, so a
 * transfer's sends start after all sends of the one before it. */
static int push(mpi_rank *self, int number) {
    lane *l = &self->lanes[number];
    for (request *r; (r = l->unsent) != NULL && l->n_leaving < l->window;) {
        int i = r->n_begun++;
        int code = MPI_Isend(r->pieces[i].from, r->pieces[i].n_bytes, MPI_BYTE, r->pieces[i].peer, number,
                             self->comm, &r->handles[i]);
        if (code != MPI_SUCCESS) return code;
        r->pieces[i].begun_s = MPI_Wtime();
        l->n_leaving++;
        if (r->n_begun < r->n_pieces) continue;
        l->unsent = r->next_unsent;
        if (!l->unsent) l->unsent_end = &l->unsent;
    }
    return MPI_SUCCESS;
}

/* The window applies if more is to be sent than it admits. MPI copies short pieces at once, so they do not count. */
static void end_send(mpi_rank *self, const request *r, int i) {
    lane *l = &self->lanes[r->lane];
    double took_s = MPI_Wtime() - r->pieces[i].begun_s;
    if ((uint64_t)r->pieces[i].n_bytes == self->split_bytes && took_s < self->least_s) self->least_s = took_s;
    l->n_leaving--;
    if (!l->unsent) return;
    int is_fast = took_s < (isfinite(self->least_s) ? self->least_s : 0) + window_s;
    if (is_fast && l->window < largest_window) l->window++;
    if (!is_fast && l->window > least_window) l->window--;
}

static tagc_status check_piece(const mpi_rank *self, const request *r, int i, const MPI_Status *status,
                               int code) {
    char text[TEXT_BYTES];
    int n_received = 0, class = MPI_SUCCESS;
    if (code != MPI_SUCCESS) MPI_Error_class(code, &class);
    if (class == MPI_ERR_TRUNCATE) {
        snprintf(text, sizeof text, "rank %d sends more than the %d bytes that rank %d expects",
                 name_of(self, r->pieces[i].peer), r->pieces[i].n_bytes, name_of(self, self->rank));
        return tagc_report_rank(TAGC_ERR_MISMATCH, r->pieces[i].peer, text);
    }
    if (code != MPI_SUCCESS) {
        snprintf(text, sizeof text, "the message %s rank %d", i < r->n_receives ? "from" : "to",
                 name_of(self, r->pieces[i].peer));
        return tagc_report_rank(fail_mpi(text, code), r->pieces[i].peer, tagc_last_error());
    }
    if (i >= r->n_receives) return TAGC_OK;
    MPI_Get_count(status, MPI_BYTE, &n_received);
    if (n_received == r->pieces[i].n_bytes) return TAGC_OK;
    snprintf(text, sizeof text, "rank %d sends %d bytes to rank %d, which expects %d",
             name_of(self, r->pieces[i].peer), n_received, name_of(self, self->rank), r->pieces[i].n_bytes);
    return tagc_report_rank(TAGC_ERR_MISMATCH, r->pieces[i].peer, text);
}

/* ---- the table ---- */

static tagc_status mpi_start(void *context, const tagc_transfer *transfer, void **handle) {
    mpi_rank *self = context;
    request *r = self->pool;
    tagc_status running = check_running();
    if (running != TAGC_OK) return running;
    if (r)
        self->pool = r->next;
    else if (!(r = calloc(1, sizeof *r)))
        return tagc_report(TAGC_ERR_MEMORY, "out of memory for an MPI transfer");
    r->n_pieces = 0;
    r->lane = (int)transfer->lane;
    r->next = self->active;
    self->active = r; /* cancel and destroy can find it from here on */
    tagc_status status = request_reserve(r, count_pieces(self, transfer->sends, transfer->n_sends) +
                                                count_pieces(self, transfer->receives, transfer->n_receives));
    if (status != TAGC_OK) return status;
    int code = start_receives(self, r, transfer);
    r->n_receives = r->n_begun = r->n_pieces;
    if (code == MPI_SUCCESS) plan_sends(self, r, transfer);
    r->n_left = r->n_pieces;
    if (code == MPI_SUCCESS && r->n_begun < r->n_pieces) {
        lane *l = &self->lanes[r->lane];
        r->next_unsent = NULL;
        *l->unsent_end = r;
        l->unsent_end = &r->next_unsent;
        code = push(self, r->lane);
    }
    if (code != MPI_SUCCESS) return fail_mpi("starting a message", code);
    *handle = r;
    return TAGC_OK;
}

static void retire(mpi_rank *self, request *r) {
    request **link = &self->active;
    while (*link != r) link = &(*link)->next;
    *link = r->next;
    r->next = self->pool;
    self->pool = r;
}

/* Fails if a peer has said why it gave up. */
static tagc_status hear_farewell(const mpi_rank *self) {
    int has_come = 0;
    MPI_Status from;
    farewell told;
    char text[TEXT_BYTES + REASON_BYTES];
    int code = MPI_Iprobe(MPI_ANY_SOURCE, FAREWELL_TAG, self->comm, &has_come, &from);
    if (code != MPI_SUCCESS || !has_come) return TAGC_OK;
    code =
        MPI_Recv(&told, sizeof told, MPI_BYTE, from.MPI_SOURCE, FAREWELL_TAG, self->comm, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS) return fail_mpi("the last message of a peer", code);
    told.reason[REASON_BYTES - 1] = 0;
    snprintf(text, sizeof text, "rank %d gave up: %s", (int)told.name, told.reason);
    return tagc_report_rank((tagc_status)told.status, told.rank, text);
}

/* Without a wait for peers that take nothing: what has not left by then has no effect. */
static void bid_farewell(mpi_rank *self, const tagc_failure *failure) {
    size_t n_peers = (size_t)self->world_size - 1;
    farewell *last = calloc(1, sizeof *last);
    MPI_Request *handles = malloc((n_peers + 1) * sizeof *handles); /* NOLINT(bugprone-sizeof-expression) */
    int n = 0, is_done = 0;
    if (!last || !handles) {
        free(last);
        free(handles);
        return;
    }
    *last = (farewell){.status = failure->status, .rank = failure->rank, .name = name_of(self, self->rank)};
    snprintf(last->reason, sizeof last->reason, "%s", failure->reason);
    for (int peer = 0; peer < self->world_size; peer++)
        if (peer != self->rank && MPI_Isend(last, sizeof *last, MPI_BYTE, peer, FAREWELL_TAG, self->comm,
                                            &handles[n]) == MPI_SUCCESS)
            n++;
    double until_s = MPI_Wtime() + farewell_s;
    while (!is_done && MPI_Wtime() < until_s)
        if (MPI_Testall(n, handles, &is_done, MPI_STATUSES_IGNORE) != MPI_SUCCESS) break;
    for (int i = 0; i < n && !is_done; i++)
        if (handles[i] != MPI_REQUEST_NULL) MPI_Request_free(&handles[i]);
    if (is_done) free(last);
    free(handles);
}

static tagc_status mpi_test(void *context, void *handle, tagc_progress *progress) {
    mpi_rank *self = context;
    request *r = handle;
    int n_completed = 0;
    tagc_status running = check_running();
    if (running != TAGC_OK) return running;
    int code =
        r->n_left ? MPI_Testsome(r->n_begun, r->handles, &n_completed, r->indices, r->statuses) : MPI_SUCCESS;
    int class = MPI_SUCCESS;
    if (code != MPI_SUCCESS) MPI_Error_class(code, &class);
    if (class != MPI_SUCCESS && class != MPI_ERR_IN_STATUS) return fail_mpi("MPI_Testsome", code);
    if (n_completed == MPI_UNDEFINED)
        n_completed = 0; /* none has started, or all started ones are complete */
    for (int i = 0; i < n_completed; i++) {
        int error = class == MPI_ERR_IN_STATUS ? r->statuses[i].MPI_ERROR : MPI_SUCCESS;
        tagc_status status = check_piece(self, r, r->indices[i], &r->statuses[i], error);
        if (status != TAGC_OK) return status;
        if (r->indices[i] >= r->n_receives) end_send(self, r, r->indices[i]);
    }
    code = push(self, r->lane);
    if (code != MPI_SUCCESS) return fail_mpi("starting a message", code);
    r->n_left -= n_completed;
    progress->moved = n_completed > 0;
    progress->done = r->n_left == 0;
    if (progress->done) {
        retire(self, r);
        return TAGC_OK;
    }
    if (!progress->moved) {
        tagc_status status = hear_farewell(self);
        if (status != TAGC_OK) return status;
    }
    for (int i = 0; i < r->n_begun; i++)
        if (r->handles[i] != MPI_REQUEST_NULL) {
            progress->waiting_for = r->pieces[i].peer;
            break;
        }
    return TAGC_OK;
}

/* Cancels the receives. MPI 4 cannot cancel a send: MPI keeps messages that a peer has not received. The job should
 * therefore end after a comm broke. */
static void mpi_cancel(void *context, const tagc_failure *failure) {
    mpi_rank *self = context;
    self->cancelled = 1;
    if (check_running() == TAGC_OK) bid_farewell(self, failure);
    while (self->active) {
        request *r = self->active;
        for (int i = 0; i < r->n_pieces; i++) { /* those that have not started have no handle */
            if (r->handles[i] == MPI_REQUEST_NULL || check_running() != TAGC_OK) continue;
            if (i < r->n_receives) MPI_Cancel(&r->handles[i]);
            MPI_Request_free(&r->handles[i]);
        }
        retire(self, r);
    }
}

static void mpi_abort(void *context, const tagc_failure *failure) {
    mpi_rank *self = context;
    const char *reason = failure->reason;
    /* If the reason is empty, the caller has printed it. */
    if (*reason) fprintf(stderr, "tagc: rank %d gave up: %s\n", name_of(self, self->rank), reason);
    fflush(stderr);
    if (check_running() == TAGC_OK) MPI_Abort(self->comm, 1);
}

/* MPI_Comm_free is collective, and after a failure the peers may not call it. */
static void mpi_destroy(void *context) {
    mpi_rank *self = context;
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!finalized && !self->cancelled) MPI_Comm_free(&self->comm);
    for (request *next, *r = self->pool; r; r = next) {
        next = r->next;
        request_clear(r);
        free(r);
    }
    free(self->names);
    free(self);
}

static const tagc_transport_ops mpi_ops = {
    .abi = TAGC_TRANSPORT_ABI,
    .capabilities = TAGC_TRANSPORT_LANES,
    .name = "mpi",
    .start = mpi_start,
    .test = mpi_test,
    .cancel = mpi_cancel,
    .abort = mpi_abort,
    .destroy = mpi_destroy,
};

/* ---- before MPI starts ---- */

/* With Open MPI's put protocol over TCP, requests for data share a stream with the other direction's data. The directions
 * then take turns, which halves the rate. Plain sends use both directions at once. */
void tagc_mpi_prepare(void) {
    (void)setenv("OMPI_MCA_btl_tcp_flags", "send,inplace", 0);
}

/* ---- create ---- */

static tagc_status check_environment(MPI_Comm mpi_comm) {
    int initialized = 0, finalized = 0, level = MPI_THREAD_SINGLE, is_inter = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (!initialized || finalized)
        return tagc_report(TAGC_ERR_STATE, initialized
                                               ? "MPI has been finalised already"
                                               : "MPI is not initialised: call MPI_Init_thread first");
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_SERIALIZED)
        return tagc_report(TAGC_ERR_UNSUPPORTED, level == MPI_THREAD_FUNNELED
                                                     ? "MPI runs at MPI_THREAD_FUNNELED, tagc needs at least "
                                                       "MPI_THREAD_SERIALIZED from MPI_Init_thread"
                                                     : "MPI runs at MPI_THREAD_SINGLE, tagc needs at least "
                                                       "MPI_THREAD_SERIALIZED from MPI_Init_thread");
    if (mpi_comm == MPI_COMM_NULL) return tagc_report(TAGC_ERR_ARGUMENT, "mpi_comm is MPI_COMM_NULL");
    int code = MPI_Comm_test_inter(mpi_comm, &is_inter);
    if (code != MPI_SUCCESS) return fail_mpi("MPI_Comm_test_inter", code);
    if (is_inter) return tagc_report(TAGC_ERR_ARGUMENT, "mpi_comm is an intercommunicator");
    return TAGC_OK;
}

/* For the texts that this transport writes. */
static tagc_status keep_names(mpi_rank *self, const tagc_comm_options *options) {
    size_t end = offsetof(tagc_comm_options, names) + sizeof options->names, n = (size_t)self->world_size;
    if (!options || options->struct_bytes < end || !options->names) return TAGC_OK;
    self->names = malloc(n * sizeof *self->names);
    if (!self->names) return tagc_report(TAGC_ERR_MEMORY, "out of memory for the MPI transport");
    memcpy(self->names, options->names, n * sizeof *self->names);
    return TAGC_OK;
}

/* If a rank failed, all do: they would wait for it later. The lowest such rank's status is the others'. */
static tagc_status agree(const mpi_rank *self, tagc_status status) {
    char text[TEXT_BYTES];
    int mine = status == TAGC_OK ? INT_MAX : self->rank << 8 | (int)status, first = mine;
    int code = MPI_Allreduce(&mine, &first, 1, MPI_INT, MPI_MIN, self->comm);
    if (status != TAGC_OK) return status;
    if (code != MPI_SUCCESS) return fail_mpi("MPI_Allreduce", code);
    if (first == INT_MAX) return TAGC_OK;
    status = (tagc_status)(first & 255);
    snprintf(text, sizeof text, "rank %d failed to create its comm: %s", name_of(self, first >> 8),
             tagc_status_name(status));
    return tagc_report(status, text);
}

tagc_status tagc_comm_create_mpi_split(MPI_Comm mpi_comm, const tagc_comm_options *options,
                                       uint64_t split_bytes, tagc_comm **out) {
    if (!out) return tagc_report(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (split_bytes < 1 || split_bytes > largest_piece_bytes)
        return tagc_report(TAGC_ERR_ARGUMENT, "split_bytes must be in [1, 2^30]");
    tagc_status status = check_environment(mpi_comm);
    if (status != TAGC_OK) return status;
    mpi_rank *self = calloc(1, sizeof *self);
    if (!self) return tagc_report(TAGC_ERR_MEMORY, "out of memory for the MPI transport");
    self->split_bytes = split_bytes;
    self->least_s = (double)INFINITY;
    for (int i = 0; i < N_LANES; i++)
        self->lanes[i] = (lane){.unsent_end = &self->lanes[i].unsent, .window = least_window};
    int code = MPI_Comm_dup(mpi_comm, &self->comm);
    if (code != MPI_SUCCESS) {
        free(self);
        return fail_mpi("MPI_Comm_dup", code);
    }
    MPI_Comm_set_errhandler(self->comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(self->comm, &self->rank);
    MPI_Comm_size(self->comm, &self->world_size);
    status = keep_names(self, options);
    if (status == TAGC_OK)
        status = tagc_comm_create(&mpi_ops, self, self->rank, self->world_size, options, out);
    status = agree(self, status);
    if (status != TAGC_OK) {
        if (!*out) mpi_destroy(self);
        tagc_comm_destroy(*out);
        *out = NULL;
    }
    return status;
}

tagc_status tagc_comm_create_mpi(MPI_Comm mpi_comm, const tagc_comm_options *options, tagc_comm **out) {
    return tagc_comm_create_mpi_split(mpi_comm, options, default_piece_bytes, out);
}
