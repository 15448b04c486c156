/* Inside of the queue. queue.c has its life and the calls of the exchanging thread, job.c the work in streams. */
#ifndef TAGC_GPU_QUEUE_PRIVATE_H
#define TAGC_GPU_QUEUE_PRIVATE_H

#include "gpu/runtime.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

enum { N_TICKETS = 1024, MAX_BUFFERS = 16, TEXT_BYTES = 512, LOOK_MS = 50 };

/* One exchange under way. */
typedef struct ticket {
    tagc_queue *queue;
    uint64_t number; /* 0: free */
    uint64_t tag;
    size_t n_bytes_out;
    tagc_unit *unit; /* NULL: the caller exchanges it */
    tagc_unit_step *step;
    int buffer;
    int enqueued;   /* all work is enqueued, or as much of it as was possible */
    int input_came; /* or never will, whatever the flag says */
    int finished;
    tagc_status status;
    char text[TEXT_BYTES];
} ticket;

typedef struct buffer {
    void *in, *out;                 /* pinned */
    void *came, *copied_out, *back; /* events */
} buffer;

/* In pinned memory: the last ticket whose input is there, which the device writes, and the last one whose result is. A line of the
 * cache each. */
typedef struct flag_pair {
    _Alignas(64) _Atomic uint32_t in;
    _Alignas(64) _Atomic uint32_t out;
} flag_pair;

struct tagc_queue {
    tagc_device *device;
    void *out, *back; /* streams */
    buffer buffers[MAX_BUFFERS];
    int n_buffers;
    size_t n_bytes_in, n_bytes_out; /* of every buffer */
    flag_pair *flags;
    uint64_t in_there, out_there; /* their addresses on the device */

    /* Held while work is enqueued, so that streams get exchanges in the order of tickets. */
    pthread_mutex_t launch;

    pthread_mutex_t lock; /* guards what follows; never held over a call of the runtime */
    pthread_cond_t changed;
    ticket tickets[N_TICKETS]; /* number n at n mod N_TICKETS */
    uint64_t n_enqueued, n_taken, n_finished;
    int is_closed;
    tagc_status broken; /* by the runtime; TAGC_OK: not */
    char why[TEXT_BYTES];
    tagc_status first_failure; /* since _forgive */
    char first_text[TEXT_BYTES];
};

struct tagc_job {
    tagc_queue *queue;
    uint64_t tag;
    size_t n_bytes_in, n_bytes_out;
};

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

/* Call with the lock. The first notes a ticket's first failure, the second that the runtime failed. */
void tagc_queue_fail_ticket(ticket *one, tagc_status status, const char *text);
void tagc_queue_break_down(tagc_queue *queue, tagc_status status, const char *text);

/* ---- job.c ---- */

/* tagc_job_enqueue, for a unit or without one. */
tagc_status tagc_job_put(tagc_job *job, tagc_unit *unit, tagc_unit_step *step, const void *input,
                         void *output, void *stream, int waits, uint64_t *number);

/* ---- unit.c ---- */

/* Exchanges. failure: of this rank, which it only reports; text: its reason. */
tagc_status tagc_unit_run(tagc_unit *unit, tagc_unit_step *step, const void *input, void *output,
                          tagc_status failure, const char *text);

#endif
