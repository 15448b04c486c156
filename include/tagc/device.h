/* Exchanges of arrays in a device's memory.
 *
 *   device   the device and its runtime library, loaded when the process runs; libtagc is built without it
 *   queue    the exchanges of one device: its streams and its buffers of pinned host memory
 *   job      one unit of a queue
 *   kernels  the codec on the device. Reducers and gatherers with kernels need no queue.
 *
 * A queue exchanges device arrays with a reducer that computes on the processor. tagc_job_enqueue puts four pieces of
 * work into streams and returns: copy the input to the host, hand it over, wait for the result, copy the result back.
 * One thread of the caller's takes what is handed over and exchanges it:
 *
 *   while (tagc_queue_next(queue, &ticket, &tag, &input, &output), ticket) {
 *       status = input ? tagc_reducer_run(reducer[tag], input, output, NULL) : TAGC_ERR_DEVICE;
 *       tagc_queue_finish(queue, ticket, status, tagc_last_error());
 *   }
 *
 * All ranks must enqueue the same exchanges in the same order. If a rank's device fails, its thread gets the ticket
 * without an input. A tagc exchange needs all ranks, so the ranks must agree, by a message of their own before each
 * exchange, whether to run it.
 *
 * TAGC_ERR_DEVICE means that the runtime reported a failure. After the first one, the queue hands out every ticket
 * with that failure. */
#ifndef TAGC_DEVICE_H
#define TAGC_DEVICE_H

#include "tagc/tagc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- device ---- */

typedef struct tagc_device tagc_device;

/* maker: "cuda".
 * library: the name or path of its runtime library. NULL: the one that the process has loaded, or else the system's.
 * ordinal: the device, in [0, number of devices).
 * TAGC_ERR_UNSUPPORTED if the runtime is missing, too old or lacks a function. TAGC_ERR_DEVICE if it finds no device. */
TAGC_API tagc_status tagc_device_open(const char *maker, const char *library, int ordinal, tagc_device **out);

/* Returns a description such as "cuda runtime 13.0, libcudart.so.13". It is valid until _close. */
TAGC_API const char *tagc_device_text(const tagc_device *device);

/* Destroy its queues and close its kernels first. */
TAGC_API void tagc_device_close(tagc_device *device);

/* ---- queue ---- */

typedef struct tagc_queue tagc_queue;

/* n_buffers is in [1, 16]: the number of buffers, pieces of pinned memory that each hold one exchange. With 3, one exchange
 * can be copied to the host, one exchanged and one copied back at the same time. */
TAGC_API tagc_status tagc_queue_create(tagc_device *device, int n_buffers, tagc_queue **out);

/* Waits until the input of the next exchange is in host memory. Exchanges come in the order in which they were enqueued.
 * Only one thread at a time may call it.
 *
 * *ticket is the number of the exchange, or 0 if the queue is closed; then nothing else is written. *tag is the tag of
 * its job. *input and *output are its pinned memory, which this thread may use until _finish. If the device failed,
 * they are NULL and the function returns the failure; call _finish for the ticket all the same. */
TAGC_API tagc_status tagc_queue_next(tagc_queue *queue, uint64_t *ticket, uint64_t *tag, const void **input,
                                     void **output);

/* Ends the exchange of a ticket. If `status` is not TAGC_OK, the whole output becomes NaN (all bits set) and `text` is
 * the reason. Finish the tickets in order. */
TAGC_API tagc_status tagc_queue_finish(tagc_queue *queue, uint64_t ticket, tagc_status status,
                                       const char *text);

/* Blocks until all exchanges up to `ticket` are finished. Their results may still be on the way to the device. Returns
 * the first failure among the exchanges since the last call. */
TAGC_API tagc_status tagc_queue_wait(tagc_queue *queue, uint64_t ticket);

/* Returns the bytes of pinned host memory of its buffers. */
TAGC_API uint64_t tagc_queue_pinned_bytes(tagc_queue *queue);

/* Never blocks. Returns the highest ticket t such that the device no longer uses the arrays of any exchange up to t. */
TAGC_API uint64_t tagc_queue_retired(tagc_queue *queue);

/* Returns the stream that copies results back. Work that you add to it runs after the last enqueued exchange. */
TAGC_API void *tagc_queue_stream(const tagc_queue *queue);

/* Ends all waiting: tagc_queue_next returns ticket 0, and unfinished exchanges fail with TAGC_ERR_STATE. Any thread may
 * call it. */
TAGC_API void tagc_queue_close(tagc_queue *queue);

/* Closes the queue and waits for its copies. First destroy its jobs and end the thread that exchanges. */
TAGC_API void tagc_queue_destroy(tagc_queue *queue);

/* ---- job ---- */

typedef struct tagc_job tagc_job;

/* tag: identifies the unit in tagc_queue_next.
 * n_bytes_in, n_bytes_out: sizes of input and output. If both are 0, nothing is copied: tagc_queue_next returns the
 * device arrays themselves, and the caller marks the output of a failed exchange.
 *
 * The jobs of a queue share its buffers, which are as large as the largest job needs. If they have to grow, the call
 * waits for all enqueued exchanges. Do not call it from the thread that exchanges. */
TAGC_API tagc_status tagc_job_create(tagc_queue *queue, uint64_t tag, size_t n_bytes_in, size_t n_bytes_out,
                                     tagc_job **out);

/* Enqueues the exchange of `input` (n_bytes_in) into `output` (n_bytes_out). Both are in the device's memory and may be
 * the same array. The exchange starts after the work that `stream` has so far. The arrays must stay valid and unchanged
 * until tagc_queue_retired() returns the ticket. If `waits` is 1, later work of `stream` waits for the result.
 *
 * Returns at once, except that it blocks while 1024 exchanges are in progress. If the exchange cannot be started, there
 * is a ticket all the same, and _next and _wait return the failure. TAGC_ERR_ARGUMENT, without a ticket, if an argument
 * is NULL. */
TAGC_API tagc_status tagc_job_enqueue(tagc_job *job, const void *input, void *output, void *stream, int waits,
                                      uint64_t *ticket);

TAGC_API void tagc_job_destroy(tagc_job *job);

/* ---- kernels ---- */

typedef struct tagc_kernels tagc_kernels;

/* Loads libtagc-cuda.so, the codec of `direct` and of deltas as CUDA kernels. lib/gpu/README.md says where it is
 * looked for. _open also tests everything that could otherwise fail during an exchange. TAGC_ERR_UNSUPPORTED if the
 * library is missing or belongs to another version. */
TAGC_API tagc_status tagc_kernels_open(tagc_device *device, tagc_kernels **out);

/* Collective, like tagc_reducer_create. The gradient and the output of _begin and the residual are in the device's
 * memory. The device selects, encodes, decodes and adds; only encoded bodies go through the host. Messages and results
 * are bit for bit those of other reducers, so ranks with and without kernels can take part in one exchange.
 * TAGC_ERR_UNSUPPORTED on all ranks unless the exchange is direct with one rank per host.
 *
 * When you call _begin, the device must have finished the work that produces the gradient. When _end returns, any
 * stream may use the output. Other functions take host memory. Destroy the reducers before you close their kernels. */
TAGC_API tagc_status tagc_reducer_create_on(tagc_kernels *kernels, tagc_comm *comm,
                                            const tagc_reducer_options *options, tagc_reducer **out);

/* Collective. A gatherer of deltas whose `shard` and `full` are in the device's memory. Whole parameters and checksums go
 * through the host; for deltas only encoded bodies do. TAGC_ERR_UNSUPPORTED on all ranks unless `delta` is 1 and `full_format`
 * BF16. */
TAGC_API tagc_status tagc_gatherer_create_on(tagc_kernels *kernels, tagc_comm *comm,
                                             const tagc_gatherer_options *options, tagc_gatherer **out);

/* Returns the bytes of device memory that the kernels and their reducers and gatherers hold. */
TAGC_API uint64_t tagc_kernels_bytes(tagc_kernels *kernels);
/* And of pinned host memory. */
TAGC_API uint64_t tagc_kernels_pinned_bytes(tagc_kernels *kernels);

/* Destroy its reducers and gatherers first. */
TAGC_API void tagc_kernels_close(tagc_kernels *kernels);

#ifdef __cplusplus
}
#endif

#endif
