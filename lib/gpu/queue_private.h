/* Inside of the queue. queue.c has its life and the calls of the exchanging thread, job.c the work in streams. */
#ifndef TAGC_GPU_QUEUE_PRIVATE_H
#define TAGC_GPU_QUEUE_PRIVATE_H

#include "gpu/kernels.h"
#include "gpu/runtime.h"
#include "tagc/device.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

enum { N_TICKETS = 1024, MAX_BUFFERS = 16, TEXT_BYTES = 512, LOOK_MS = 50 };

typedef struct tagc_unit tagc_unit; /* ahead_unit.h */

/* One exchange under way. */
typedef struct ticket {
    tagc_queue *queue;
    uint64_t number; /* 0: free */
    uint64_t tag;
    size_t n_bytes_out;
    tagc_unit *unit;    /* of a model; NULL: the caller exchanges it */
    uint64_t step;      /* of the unit: the number of its exchange, from which rounding derives */
    uint64_t first_add; /* of a unit with kernels: the number of its first sums in flags `add` and `added` */
    int buffer;
    int is_in_streams; /* some of its work is, behind all of the exchange that had its buffer before */
    int enqueued;      /* all work is enqueued, or as much of it as was possible */
    int input_came;    /* or never will, whatever the flag says */
    int finished;
    tagc_status status;
    char text[TEXT_BYTES];
} ticket;

/* Memory of an exchange with kernels, for one part of its unit or for what its parts share: pinned, and on the device. Both have a
 * head, which begins with a tagc_orders and is at the same place for all units, and the rest, which each unit divides. */
typedef struct gpu_side {
    char *head, *rest;
} gpu_side;
typedef struct gpu_room {
    gpu_side here, there;
} gpu_room;

/* Sizes of this memory in every buffer, and of what batches of each stream work in. */
enum { OUT_WORK, ADD_WORK, BACK_WORK, N_WORKS };
typedef struct rooms_needs {
    size_t n_rooms, head_bytes, here_bytes, there_bytes, work_bytes[N_WORKS];
} rooms_needs;

/* What the host has to say to the device. A queue that is closed makes all of it negative. */
typedef struct tagc_orders {
    int stop[2]; /* bodies of fragments, of sums: 1: they are not to be read */
    int is_void; /* 1: the step does not count */
} tagc_orders;
enum { ORDERS_BYTES = 64 }; /* what follows in a head begins there */

struct tagc_turns;                  /* store.h */
typedef struct tagc_slab tagc_slab; /* slabs.h */
typedef enum tagc_slab_use { SLAB_OF_RESIDUALS, SLAB_OF_LISTS, N_SLAB_USES } tagc_slab_use;

typedef struct buffer {
    void *in, *out;                         /* pinned */
    void *came, *copied_out, *added, *back; /* events */
    gpu_side here, there; /* heads of all rooms, and all rests; here: replaced with the lock */
} buffer;

/* In pinned memory: the last ticket whose input is there, and the last sums that were added, which the device writes; the last ticket
 * whose result is there, and the last sums whose bodies are. A line of the cache each. */
typedef struct queue_flags {
    _Alignas(64) _Atomic uint32_t in;
    _Alignas(64) _Atomic uint32_t out;
    _Alignas(64) _Atomic uint32_t add;
    _Alignas(64) _Atomic uint32_t added;
} queue_flags;

/* Memory that batches of one stream work in. */
typedef struct tagc_work_area {
    char *memory;
    uint64_t n_moves;
} tagc_work_area;

struct tagc_queue {
    tagc_device *device;
    void *out, *back; /* streams */
    buffer buffers[MAX_BUFFERS];
    int n_buffers;
    size_t n_bytes_in, n_bytes_out; /* of every buffer */
    queue_flags *flags;
    uint64_t in_there, out_there, add_there, added_there; /* their addresses on the device */

    tagc_kernels *kernels; /* NULL: none; else `back` is their stream */
    void *add;             /* stream, with kernels */
    rooms_needs rooms;     /* what there is; n_rooms and head_bytes with `lock` */
    tagc_work_area works[N_WORKS];
    struct tagc_turns *turns;      /* with `launch` */
    tagc_slab *slabs[N_SLAB_USES]; /* with `launch` */
    uint64_t n_adds;               /* numbers given out, with `launch` */

    /* Held while work is enqueued, so that streams get exchanges in the order of tickets. */
    pthread_mutex_t launch;

    pthread_mutex_t lock; /* guards what follows; never held over a call of the runtime */
    pthread_cond_t changed;
    ticket tickets[N_TICKETS]; /* number n at n mod N_TICKETS */
    uint64_t n_enqueued, n_taken, n_finished;
    int is_closed, is_dead;
    tagc_status broken; /* by the runtime; TAGC_OK: not */
    char why[TEXT_BYTES];
    tagc_status first_failure; /* since _forgive */
    char first_text[TEXT_BYTES];
};

/* Waits until the input of the next exchange is in host memory, in their order. Those of units it runs and finishes itself; for one
 * without it returns: *number is its ticket, or 0 if the queue is closed, *tag its job's; *input and *output are its pinned memory,
 * which this thread may use until _finish. If the device failed, they are NULL and the function returns the failure. */
tagc_status tagc_queue_next(tagc_queue *queue, uint64_t *number, uint64_t *tag, const void **input,
                            void **output);
/* Ends the exchange of a ticket, in their order. If `status` is not TAGC_OK, the whole output becomes NaN (all bits set) and `text` is the
 * reason. */
tagc_status tagc_queue_finish(tagc_queue *queue, uint64_t number, tagc_status status, const char *text);

typedef struct tagc_job {
    tagc_queue *queue;
    uint64_t tag;
    size_t n_bytes_in, n_bytes_out;
} tagc_job;

static inline size_t larger_of(size_t a, size_t b) {
    return a > b ? a : b;
}

static inline const tagc_runtime *runtime_of(const tagc_queue *queue) {
    return &queue->device->runtime;
}

static inline ticket *ticket_of(tagc_queue *queue, uint64_t number) {
    return &queue->tickets[number % N_TICKETS];
}

/* Whether a ticket's input is in pinned memory, or never will be. Call with the lock. */
static inline int has_come(const tagc_queue *queue, const ticket *one) {
    uint32_t in = atomic_load_explicit(&queue->flags->in, memory_order_acquire);
    return one->input_came || (int32_t)(in - (uint32_t)one->number) >= 0;
}

/* ---- queue.c ---- */

/* Call with the lock. The first notes a ticket's first failure, the second that the runtime failed. last: of the tickets whose
 * exchanges can still run; a device that is dead runs none. */
void tagc_queue_fail_ticket(ticket *one, tagc_status status, const char *text);
void tagc_queue_break_down(tagc_queue *queue, tagc_status status, const char *text, uint64_t last);
enum { NO_TICKET = 0 }; /* the device is dead */

/* Waits for a change, at most until `end` (NULL: for any time), and now and then asks the device whether it still works. Call with the
 * lock, and again until what is waited for is true. Not for the thread that exchanges, which makes no call of the runtime. */
void tagc_queue_sleep(tagc_queue *queue, const struct timespec *end);
/* Sleeps, or yields, between two looks at what another thread or the device writes. n_looks: so far. */
void tagc_queue_pause(unsigned n_looks);
/* Orders of a room, unless the queue is closed: then they stay negative. Bodies may be read; or the step counts. */
void tagc_queue_allow(tagc_queue *queue, int *stop);
void tagc_queue_settle(tagc_queue *queue, tagc_orders *orders);
/* Sets flag `add`: bodies of all sums up to this number are there, or orders that say otherwise. */
void tagc_queue_add(tagc_queue *queue, uint64_t number);
/* Waits for flag `added`. Returns why it will not come. */
tagc_status tagc_queue_wait_for_sums(tagc_queue *queue, uint64_t number);

/* ---- rooms.c: memory of exchanges with kernels ---- */

/* Memory of the device for any stream. It comes in the order of the kernels' stream, which _create waits for. */
tagc_status tagc_there_create(const tagc_queue *queue, size_t n_bytes, const char *what, void **out);
void tagc_there_destroy(const tagc_queue *queue, void *memory, size_t n_bytes); /* accepts NULL */
/* Makes rooms of every buffer and work memory at least that large. It waits for all exchanges if something has to grow. */
tagc_status tagc_rooms_reserve(tagc_queue *queue, const rooms_needs *needs);
/* Room i of a ticket, whose rests begin there. */
gpu_room tagc_room_of(const ticket *one, uint32_t i, size_t at_here, size_t at_there);
/* Makes the orders of exchanges that have not finished negative. */
void tagc_rooms_stop(tagc_queue *queue);
/* When all streams are through. */
void tagc_rooms_destroy(tagc_queue *queue);

/* ---- job.c ---- */

/* Enqueues a copy of any number of bytes in a stream of the queue's. */
tagc_status tagc_queue_copy(const tagc_queue *queue, void *to, const void *from, size_t n_bytes,
                            tagc_copy kind, void *stream);
/* Waits until nothing is in progress. Call with the launch lock. */
tagc_status tagc_queue_wait_for_all(tagc_queue *queue);

/* ---- job.c: one size of arrays in a queue. Those without a unit are for tests, whose thread exchanges them ---- */

/* tag: what tagc_queue_next tells of it. n_bytes_in, n_bytes_out: sizes of input and output, at least 1.
 * The jobs of a queue share its buffers, which are as large as the largest job needs. If they have to grow, the call waits for all
 * enqueued exchanges, as tagc_queue_wait does. Not for the thread that exchanges. */
tagc_status tagc_job_create(tagc_queue *queue, uint64_t tag, size_t n_bytes_in, size_t n_bytes_out,
                            tagc_job **out);
/* Enqueues the exchange of `input` (n_bytes_in) into `output` (n_bytes_out), of the job's sizes; they may be the same array. As
 * tagc_model_begin_on. If the exchange cannot be started, there is a ticket all the same, and _next and _wait return the failure;
 * TAGC_ERR_ARGUMENT, without a ticket, if an argument is NULL or a size another one. */
tagc_status tagc_job_enqueue(tagc_job *job, const void *input, size_t n_bytes_in, void *output,
                             size_t n_bytes_out, void *stream, int waits, uint64_t *ticket);
void tagc_job_destroy(tagc_job *job);
/* tagc_job_enqueue, for a unit or without one. */
tagc_status tagc_job_put(tagc_job *job, tagc_unit *unit, uint64_t step, const void *input, void *output,
                         void *stream, int waits, uint64_t *number);
/* Issues a ticket that has failed, with the text of the last failure, and puts nothing into streams. */
void tagc_job_put_failed(tagc_job *job, tagc_unit *unit, uint64_t step, tagc_status status, uint64_t *number);
/* Blocks until an exchange is finished, or never will be. */
void tagc_queue_wait_for_ticket(tagc_queue *queue, uint64_t number);
int tagc_queue_has_finished(tagc_queue *queue, uint64_t number);

/* ---- model.c ---- */

/* The exchange of a unit of a tagc_model. */
tagc_status tagc_model_run(const ticket *one);
/* Its copies between pieces and pinned memory, where it has no kernels. */
tagc_status tagc_model_copy_in(const ticket *one);
tagc_status tagc_model_copy_out(const ticket *one);

/* ---- ahead_unit.c: what a unit with kernels puts into each stream; with the launch lock ---- */

int tagc_unit_has_kernels(const tagc_unit *unit); /* accepts NULL */
uint32_t tagc_unit_n_adds(const tagc_unit *unit); /* numbers that an exchange takes */
tagc_status tagc_unit_put_out(const ticket *one, const void *input, void *output);
tagc_status tagc_unit_put_add(const ticket *one);
tagc_status tagc_unit_put_back(const ticket *one, void *output);
/* After one of these, or a call between them, has failed. Returns 1 if the device goes on with earlier exchanges. */
int tagc_unit_withdraw(const ticket *one);

#endif
