/* Exchanges of arrays in a device's memory, through pinned host memory.
 *
 *   device   the runtime of its maker, bound when the process runs: libtagc is built without it
 *   stager   the exchanges of one device, one after the other: its streams, its pinned memory
 *   stage    one unit: how many bytes go out and come back
 *   kernels  the codec on the device, for reducers whose arrays need not come to the host at all
 *
 * tagc_stage_enqueue never waits for the device or for other ranks. It puts into streams: copy the input to the host, hand it
 * over, wait for the result, copy that back. A thread of the caller's exchanges what was handed over:
 *
 *   while (tagc_stager_next(stager, &ticket, &tag, &input, &output), ticket) {
 *       status = input ? tagc_reducer_run(reducer[tag], input, output, NULL) : TAGC_ERR_DEVICE;
 *       tagc_stager_finish(stager, ticket, status, tagc_last_error());
 *   }
 *
 * All ranks must enqueue the same exchanges in the same order. Where a rank's device fails, its thread gets the ticket
 * without an input, and must take part in whatever its peers expect: tagc's exchanges have no way to leave one out, so ranks
 * agree by a message of their own before each.
 *
 * A status of this part is TAGC_ERR_DEVICE where the runtime reports a failure. After the first one the stager does nothing
 * but hand out tickets with that failure. */
#ifndef TAGC_DEVICE_H
#define TAGC_DEVICE_H

#include "tagc/tagc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- device ---- */

typedef struct tagc_device tagc_device;

/* maker: "cuda". library: the name or path of its runtime library; NULL: the one that this process has loaded,
 * or else the system's. ordinal: [0, devices). TAGC_ERR_UNSUPPORTED where the runtime is missing, too old or
 * lacks a call; TAGC_ERR_DEVICE where it finds no device. */
TAGC_API tagc_status tagc_device_open(const char *maker, const char *library, int ordinal, tagc_device **out);

/* "cuda runtime 13.0, libcudart.so.13"; valid as long as the device. */
TAGC_API const char *tagc_device_text(const tagc_device *device);

/* After all stagers made of it. */
TAGC_API void tagc_device_close(tagc_device *device);

/* ---- stager ---- */

typedef struct tagc_stager tagc_stager;

/* n_slots: [1, 16], how many exchanges have pinned memory at a time. 3 let one be copied out, one be exchanged
 * and one be copied back. */
TAGC_API tagc_status tagc_stager_create(tagc_device *device, int n_slots, tagc_stager **out);

/* Waits for the next exchange, in the order in which they were enqueued, until its input is there. *ticket:
 * its number; 0: the stager is closed, and nothing else is written. *tag: of its stage. *input, *output:
 * pinned memory, as long as the stage says, for this thread until _finish. On failure of the device *input and
 * *output are NULL, and the failure is returned: _finish the ticket all the same. For one thread at a time. */
TAGC_API tagc_status tagc_stager_next(tagc_stager *stager, uint64_t *ticket, uint64_t *tag,
                                      const void **input, void **output);

/* The exchange is over. Where status is not TAGC_OK, its output becomes NaN (all bits set), and `text` says
 * why. Tickets are finished in their order. */
TAGC_API tagc_status tagc_stager_finish(tagc_stager *stager, uint64_t ticket, tagc_status status,
                                        const char *text);

/* Blocks until all exchanges up to `ticket` are finished; their results may still be on the way to the device.
 * Returns the first failure among those enqueued since the last wait. */
TAGC_API tagc_status tagc_stager_wait(tagc_stager *stager, uint64_t ticket);

/* Never blocks: the highest ticket such that the device is done with the arrays of all exchanges up to it. */
TAGC_API uint64_t tagc_stager_retired(tagc_stager *stager);

/* The stream in which results come back, after that of the last ticket enqueued. */
TAGC_API void *tagc_stager_stream(const tagc_stager *stager);

/* Nobody waits any more: _next gives ticket 0, exchanges not finished fail with TAGC_ERR_STATE. From any thread. */
TAGC_API void tagc_stager_close(tagc_stager *stager);

/* Closes it, and waits for the copies under way. After the thread that exchanges has ended, and after its stages. */
TAGC_API void tagc_stager_destroy(tagc_stager *stager);

/* ---- stage ---- */

typedef struct tagc_stage tagc_stage;

/* tag: the caller's name for the unit. n_bytes_in, n_bytes_out: at least 1; or both 0: nothing is copied, tagc_stager_next gives the
 * arrays of the device themselves, and where an exchange fails its output is the caller's to spoil. All stages of a stager share its
 * pinned memory, which is as large as the largest needs: when that grows, this waits for all that was
 * enqueued. Not from the thread that exchanges. */
TAGC_API tagc_status tagc_stage_create(tagc_stager *stager, uint64_t tag, size_t n_bytes_in,
                                       size_t n_bytes_out, tagc_stage **out);

/* Starts one exchange: of `input` (n_bytes_in) into `output` (n_bytes_out), both in the device's memory, after
 * what `stream` was given so far. input and output may be the same; both must be left alone until the result
 * is there, and must live until tagc_stager_retired() says so. waits: 1: what `stream` is given next waits for
 * the result.
 *
 * Returns at once, with *ticket in any case: a failure to start is the exchange's failure, and _next and _wait
 * tell it. It blocks only where 1024 exchanges are under way. TAGC_ERR_ARGUMENT, and no ticket, where an
 * argument is NULL. */
TAGC_API tagc_status tagc_stage_enqueue(tagc_stage *stage, const void *input, void *output, void *stream,
                                        int waits, uint64_t *ticket);

TAGC_API void tagc_stage_destroy(tagc_stage *stage);

/* ---- kernels ---- */

typedef struct tagc_kernels tagc_kernels;

/* The codec of the exchange direct as kernels of this device: libtagc-cuda.so (docs/architecture.md says where it is looked for).
 * Everything that could fail in the middle of an exchange is tried here. TAGC_ERR_UNSUPPORTED where the library is missing or is
 * another version's. */
TAGC_API tagc_status tagc_kernels_open(tagc_device *device, tagc_kernels **out);

/* A reducer whose arrays are in the device's memory: gradient and output of _begin, and the residual. Its kernels select, encode,
 * decode and add there; bodies alone come to the host, and travel as those of every other reducer do. So ranks with and
 * without kernels can be in one exchange, and get the same bits. Exchange direct, one rank per host; all else is
 * TAGC_ERR_UNSUPPORTED, on all ranks. Collective, as tagc_reducer_create.
 *
 * What the gradient is made of must be done when _begin is called, and when _end returns the output is there for every
 * stream. tagc_reducer_residual gives an address of the device; other functions take values in host memory. Reducers
 * must be gone before their kernels are closed. */
TAGC_API tagc_status tagc_reducer_create_on(tagc_kernels *kernels, tagc_comm *comm,
                                            const tagc_reducer_options *options, tagc_reducer **out);

/* A gatherer of deltas whose shard and full are in the device's memory, as above: bodies alone come to the host, but for whole gathers and
 * checksums, which go by way of it. All else than deltas is TAGC_ERR_UNSUPPORTED. */
TAGC_API tagc_status tagc_gatherer_create_on(tagc_kernels *kernels, tagc_comm *comm,
                                             const tagc_gatherer_options *options, tagc_gatherer **out);

/* Bytes of the device that the kernels and all reducers made of them hold now. */
TAGC_API uint64_t tagc_kernels_bytes(tagc_kernels *kernels);

TAGC_API void tagc_kernels_close(tagc_kernels *kernels);

#ifdef __cplusplus
}
#endif

#endif
