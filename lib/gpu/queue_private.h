/* Inside of the queue. queue.c has its life and the calls of the exchanging thread, job.c the work in streams. */
#ifndef TAGC_GPU_QUEUE_PRIVATE_H
#define TAGC_GPU_QUEUE_PRIVATE_H

#include "gpu/runtime.h"

#include <pthread.h>

enum { N_TICKETS = 1024, MAX_BUFFERS = 16, TEXT_BYTES = 256, LOOK_MS = 50 };

/* One exchange under way. */
typedef struct ticket {
    tagc_queue *queue;
    uint64_t number; /* 0: free */
    uint64_t tag;
    const void *input;  /* of a job without copies: the arrays of the device */
    void *output;       /* likewise; else NULL */
    size_t n_bytes_out; /* 0: nothing is copied */
    int buffer;
    int enqueued;   /* all work is enqueued, or as much of it as was possible */
    int input_came; /* or never will */
    int is_awaited; /* wait_for_result was enqueued */
    int finished;
    int is_slept_for; /* wait_for_result sleeps until it is finished */
    int left;         /* and has returned */
    tagc_status status;
    char text[TEXT_BYTES];
} ticket;

typedef struct buffer {
    void *in, *out;                 /* pinned */
    void *came, *copied_out, *back; /* events */
    uint64_t last;                  /* ticket that recorded `back` last; 0: none */
} buffer;

struct tagc_queue {
    tagc_device *device;
    void *out, *back; /* streams */
    buffer buffers[MAX_BUFFERS];
    int n_buffers;
    size_t n_bytes_in, n_bytes_out; /* of every buffer */

    /* Held while work is enqueued, so that streams get exchanges in the order of tickets. */
    pthread_mutex_t launch;
    uint64_t retired; /* with `launch` */

    pthread_mutex_t lock; /* guards what follows; never held over a call of the runtime */
    pthread_cond_t changed;
    ticket tickets[N_TICKETS]; /* number n at n mod N_TICKETS */
    uint64_t n_enqueued, n_taken, n_finished;
    int is_closed;
    tagc_status broken; /* by the runtime; TAGC_OK: not */
    char why[TEXT_BYTES];
    tagc_status first_failure; /* since the last wait */
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

/* ---- queue.c ---- */

/* Host functions of an exchange. The first notes that its input is in pinned memory, the second sleeps until it is
 * finished. arg: its ticket. */
void tagc_queue_input_came(void *arg);
void tagc_queue_wait_for_result(void *arg);
/* Call with the lock. The first notes a ticket's first failure, the second that the runtime failed. */
void tagc_queue_fail_ticket(ticket *one, tagc_status status, const char *text);
void tagc_queue_break_down(tagc_queue *queue, tagc_status status, const char *text);

#endif
