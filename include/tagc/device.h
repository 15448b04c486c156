/* Exchanges of arrays in a device's memory. A model (tagc/model.h) is the whole of it for gradients:
 *
 *   tagc_device_open("cuda", NULL, 0, &device);
 *   tagc_kernels_open(device, &kernels);                                          or none: then the processor computes
 *   tagc_queue_create(device, kernels, 2, &queue);                                and a thread calls tagc_queue_run(queue)
 *   tagc_model_create_on(queue, NULL, comm, tensors, n_tensors, &options, &model);
 *   tagc_model_begin_on(model, unit, gradients, n, sums, m, stream, TAGC_WAITS_FOR_RESULT);
 *   tagc_model_end(model, unit, NULL);
 *
 *   device   the device and its runtime library, loaded when the process runs; libtagc is built without it
 *   queue    the exchanges of one device: its streams and its buffers of pinned host memory
 *   kernels  the codec on the device. Gatherers with kernels need no queue.
 *
 * An exchange is four pieces of work in streams: copy or encode the input, write a flag, wait for another flag, copy or decode the
 * result. A stream writes and waits for flags by itself (cuStreamWriteValue32, cuStreamWaitValue32). The thread in tagc_queue_run sees the
 * first flag, exchanges, and writes the second. It calls nothing of CUDA, so no call of the driver can hold it up. All ranks must
 * begin the same exchanges in the same order. If a rank's device fails, its thread tells the others in the place of the exchange.
 *
 * TAGC_ERR_DEVICE means that the runtime reported a failure. After the first one, the queue ends every exchange
 * with that failure. */
#ifndef TAGC_DEVICE_H
#define TAGC_DEVICE_H

#include "tagc/blocks.h"
#include "tagc/model.h"
#include "tagc/schedule.h"
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
typedef struct tagc_kernels tagc_kernels;

/* kernels: those of the queue's models, on that device; destroy the queue before you close them. NULL: they have none.
 * n_buffers is in [1, 16]: the number of buffers, pieces of pinned memory that each hold one exchange. With 3, one exchange
 * can be copied to the host, one exchanged and one copied back at the same time. */
TAGC_API tagc_status tagc_queue_create(tagc_device *device, tagc_kernels *kernels, int n_buffers,
                                       tagc_queue **out);

/* Runs the exchanges of models, each when its input is in host memory, in the order in which they began, and returns when the queue is
 * closed. Only one thread may call it; it calls nothing of the device's. */
TAGC_API tagc_status tagc_queue_run(tagc_queue *queue);

/* Blocks until all exchanges up to `ticket` are finished, or for timeout_ms; 0: without a limit. Their results may still be
 * on the way to the device. It also notices that the device has failed, for which it asks the device now and then. *is_over
 * is 1 if they are finished, or the queue is closed. The function then returns the first failure among the exchanges since
 * the last tagc_queue_forgive. */
TAGC_API tagc_status tagc_queue_wait(tagc_queue *queue, uint64_t ticket, uint32_t timeout_ms, int *is_over);

/* Forgets the first failure. */
TAGC_API void tagc_queue_forgive(tagc_queue *queue);

/* Returns the bytes of pinned host memory of its buffers. */
TAGC_API uint64_t tagc_queue_pinned_bytes(tagc_queue *queue);

/* Returns the stream that copies results back. Work that you add to it runs after the last enqueued exchange. */
TAGC_API void *tagc_queue_stream(const tagc_queue *queue);

/* Ends all waiting: tagc_queue_run returns, and unfinished exchanges fail with TAGC_ERR_STATE. Any thread may
 * call it. */
TAGC_API void tagc_queue_close(tagc_queue *queue);

/* Closes the queue and waits for its copies. First destroy its models and end the thread that exchanges. */
TAGC_API void tagc_queue_destroy(tagc_queue *queue);

/* For what later work of the caller's stream waits. The input is read when it is copied to the host, or encoded. */
typedef enum tagc_waits {
    TAGC_WAITS_FOR_NOTHING = 0,
    TAGC_WAITS_FOR_RESULT = 1,
    TAGC_WAITS_FOR_INPUT =
        2, /* until the input is read; the result comes in the order of tagc_queue_stream() */
} tagc_waits;

/* ---- model ---- */

/* Collective. tagc_model_create for gradients and sums in the device's memory. tagc_queue_run exchanges its units, in the order
 * in which they begin, and other ranks of the same model may have host arrays. The queue outlives the model.
 *
 * If the queue has kernels, gradients of the classes COMPRESSED and MILD stay on the device, with what is not sent of them; else, and for
 * exchanges other than DIRECT, all pieces are copied to pinned memory and back. With kernels, means beyond fp16 become Inf, and `within`
 * adds nothing up: see tagc_model_options.hosts.summed. TAGC_ERR_UNSUPPORTED for what the device cannot do. */
TAGC_API tagc_status tagc_model_create_on(tagc_queue *queue, tagc_comm *within, tagc_comm *between,
                                          const tagc_tensor *tensors, size_t n_tensors,
                                          const tagc_model_options *options, tagc_model **out);

/* Local. Says where pieces of a unit will lie, so that exchanges with that allocate nothing, whatever the schedule decides: their lists and
 * distances count, and nothing is read. It may wait for all enqueued exchanges. */
TAGC_API tagc_status tagc_model_prepare_on(tagc_model *model, uint32_t unit, const tagc_piece *gradients,
                                           size_t n_gradients, const tagc_piece *sums, size_t n_sums);

/* tagc_model_begin, for work in streams: the exchange starts after the work that `stream` has so far. waits: tagc_waits. With
 * _FOR_RESULT, in the order of that stream the arrays may be freed or used again after the call; with _FOR_INPUT the gradients may,
 * unless whole sums come back to another array. Else they must stay valid and unchanged until tagc_queue_stream() has done its work.
 * The lists need not stay.
 *
 * Returns at once, unless 1024 exchanges are in progress, or pieces have not the distances that they had before: then it waits for all
 * exchanges. With kernels and options.rests it waits for them, too, and for the work of `stream`. Failures are told by _end, which waits for the exchange and not for the device. If it fails, sums become NaN, but for those
 * of wrong arguments. */
TAGC_API tagc_status tagc_model_begin_on(tagc_model *model, uint32_t unit, const tagc_piece *gradients,
                                         size_t n_gradients, const tagc_piece *sums, size_t n_sums,
                                         void *stream, int waits);

/* ---- kernels ---- */

/* Loads libtagc-cuda.so, the codec of `direct` and of deltas as CUDA kernels. lib/gpu/README.md says where it is
 * looked for. _open also tests everything that could otherwise fail during an exchange. TAGC_ERR_UNSUPPORTED if the
 * library is missing or belongs to another version. */
TAGC_API tagc_status tagc_kernels_open(tagc_device *device, tagc_kernels **out);

/* Collective. A gatherer of deltas whose `shard` and `full` are in the device's memory. Whole parameters and checksums go
 * through the host; for deltas only encoded bodies do. TAGC_ERR_UNSUPPORTED on all ranks unless `delta` is 1 and `full_format`
 * BF16. */
TAGC_API tagc_status tagc_gatherer_create_on(tagc_kernels *kernels, tagc_comm *comm,
                                             const tagc_gatherer_options *options, tagc_gatherer **out);

/* Returns the bytes of device memory that the kernels and their models and gatherers hold. */
TAGC_API uint64_t tagc_kernels_bytes(tagc_kernels *kernels);
/* And of pinned host memory. */
TAGC_API uint64_t tagc_kernels_pinned_bytes(tagc_kernels *kernels);

/* ---- messages of arrays ---- */

/* For messages in one stream: 40 bytes of the device's memory, 8-aligned, zeros before the first one. */
typedef struct tagc_blocks_state {
    /* Of the kernels. */
    uint64_t sum;
    uint32_t ticket, is_damaged;
    int32_t verdict, unused;
    /* tagc_status of the first message that was not sound, CORRUPT or MISMATCH, and its number; 0 as long as there is none. */
    int64_t status;
    uint64_t number;
} tagc_blocks_state;

/* tagc_blocks_encode and _decode of arrays in the device's memory, in the order of `stream`: they return at once. Messages have the same
 * length and body, and a header of their own (docs/reference/wire-format.md): both ends must use kernels. `message` is 8-aligned.
 * What is wrong with a message is in the state, with the number that _decode gave it, and its values become NaN. The
 * device's arrays must stay valid until the stream is through. */
TAGC_API tagc_status tagc_blocks_encode_on(tagc_kernels *kernels, const tagc_blocks_options *options,
                                           const void *values, uint64_t n_elems, void *message,
                                           uint64_t n_bytes, tagc_blocks_state *state, void *stream);
TAGC_API tagc_status tagc_blocks_decode_on(tagc_kernels *kernels, const tagc_blocks_options *options,
                                           const void *message, uint64_t n_bytes, void *values,
                                           uint64_t n_elems, uint64_t number, tagc_blocks_state *state,
                                           void *stream);

/* Destroy its models and gatherers first. */
TAGC_API void tagc_kernels_close(tagc_kernels *kernels);

#ifdef __cplusplus
}
#endif

#endif
