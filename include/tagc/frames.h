/* Steps of the exchange direct whose messages the caller sends, in frames: messages of a fixed size. A step takes one all-to-all of
 * bytes, and for an all-reduce also one all-gather. This is for fabrics that move the memory of GPUs by themselves (NCCL over
 * NVLink or RDMA): gradients, bodies, checks and the result stay on the device. The host does not read or wait in a step.
 *
 *   tagc_frames_encode   encodes the gradient into a frame for each rank
 *       all-to-all       frame q of `send` goes to rank q, which has it as frame [this rank] of `received`
 *   tagc_frames_add      checks the received frames and adds them, in rank order. All-reduce: adds the own values in place of the
 *                        frame from itself, and writes the frame of the sums
 *       all-gather       of these frames, for an all-reduce
 *   tagc_frames_decode   for an all-reduce: checks them and decodes them into the output
 *       all-reduce       the maximum of failure and of nonfinite in the verdict: two int64_t
 *   tagc_frames_settle   if all went well, the step counts on all ranks; else it changes nothing, and the output is NaN
 *   tagc_frames_end      tells the host the outcome, from a copy of the verdict
 *
 * Arrays, frames and verdict are in host memory, and a call returns when its work is done. With kernels they are on the device, and
 * the work is done in the order of tagc_kernels_stream(); put your collectives into that stream, too. Arrays must stay valid
 * until then. Sums are those of tagc_reducer_run, bit for bit.
 *
 * A call that fails changes nothing that lasts. The other ranks wait for this rank's collectives all the same: take part in
 * all of them, with frames of zeros and tagc_frames_failure() in the verdict, and call _settle and _end. */
#ifndef TAGC_FRAMES_H
#define TAGC_FRAMES_H

#include "tagc/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* 32 bytes, 8-aligned. */
typedef struct tagc_frames_verdict {
    int64_t failure;   /* 0, or what is wrong: for _end to put into words */
    int64_t nonfinite; /* 1: a gradient or a sum is NaN or Inf */
    int64_t n_sent; /* of this rank: values that it selected, of an all-reduce in its own row from the sums */
    int64_t n_items; /* of this rank: values in the sums of all, of an all-reduce */
} tagc_frames_verdict;

/* Creates a direct reducer for such steps. kernels: NULL for arrays in host memory. Its other functions are those of every reducer;
 * _begin, _run and _test return TAGC_ERR_STATE. TAGC_ERR_UNSUPPORTED for another exchange, for ranks_per_host above 1, and for
 * the output host_shard. Collective over `comm`, like tagc_reducer_create; the steps themselves do not use `comm`. */
TAGC_API tagc_status tagc_frames_create(tagc_kernels *kernels, tagc_comm *comm,
                                        const tagc_reducer_options *options, tagc_reducer **out);

/* tagc_frames_create with kernels, in a store whose reducers are all made so. Of all such reducers of a queue, one at a time may be
 * between _encode and _settle; meanwhile no other one is made or changed (TAGC_ERR_STATE). _probe_in is local: it takes the memory that
 * such a reducer will need besides its residual, for which there is tagc_store_expect. That memory stays with the queue; then destroy
 * the probe. */
TAGC_API tagc_status tagc_frames_create_in(tagc_store *store, tagc_comm *comm,
                                           const tagc_reducer_options *options, tagc_reducer **out);
TAGC_API tagc_status tagc_frames_probe_in(tagc_store *store, tagc_comm *comm,
                                          const tagc_reducer_options *options, tagc_reducer **out);

/* Returns the bytes of a frame, or if is_sums is 1, of a frame of sums: a multiple of 64. `send` and `received` have W frames and
 * are 64-aligned. The size changes with tagc_reducer_set_sparsity. 0 for any other reducer. */
TAGC_API uint64_t tagc_frames_bytes(const tagc_reducer *reducer, int is_sums);

/* gradient (n_elems) and output as in tagc_reducer_begin; neither is looked at after _settle. Writes the verdict anew. */
TAGC_API tagc_status tagc_frames_encode(tagc_reducer *reducer, const void *gradient, float *output,
                                        void *send, tagc_frames_verdict *verdict);
/* sums: one frame, of TAGC_OUTPUT_UNIT alone, else NULL. */
TAGC_API tagc_status tagc_frames_add(tagc_reducer *reducer, const void *received, void *sums);
TAGC_API tagc_status tagc_frames_decode(tagc_reducer *reducer, const void *received);
/* After the last call of the step, or sooner where it is given up: then the residual is the one from before, whatever the
 * verdict says. */
TAGC_API tagc_status tagc_frames_settle(tagc_reducer *reducer);

/* agreed: in host memory. The same status on all ranks; of this rank's own failure the text that it had. stats: may be NULL; bytes are
 * those of frames, in whole, and of the verdict as if each rank sent it to all. Another step may begin then. */
TAGC_API tagc_status tagc_frames_end(tagc_reducer *reducer, const tagc_frames_verdict *agreed,
                                     tagc_reducer_stats *stats);

/* What `failure` of the verdict of a rank is where a call of it returned that status. */
TAGC_API int64_t tagc_frames_failure(const tagc_reducer *reducer, tagc_status status);

/* The stream in which kernels work. */
TAGC_API void *tagc_kernels_stream(const tagc_kernels *kernels);

#ifdef __cplusplus
}
#endif

#endif
