/* Steps of the exchange direct whose messages the caller carries, in slots of a fixed size: one all-to-all of bytes, and for an
 * all-reduce one all-gather. For fabrics that move the memory of GPUs by themselves (NCCL over NVLink or RDMA): gradients,
 * bodies, checks and the result stay on the device, and the host neither reads nor waits in the middle of a step.
 *
 *   tagc_slots_encode    gradient -> a slot for each rank
 *       all-to-all       slot q of `send` goes to rank q, which has it as slot [this rank] of `received`
 *   tagc_slots_add       checks and adds them, in rank order -> sums; for an all-reduce: -> the slot of the own sums
 *       all-gather       of these, for an all-reduce
 *   tagc_slots_decode    for an all-reduce: checks and decodes them -> output
 *       all-reduce       the maximum of failure and of nonfinite in the verdict: two int64_t
 *   tagc_slots_settle    where all went well the step counts on all ranks; else it changes nothing, and the output is NaN
 *   tagc_slots_end       says so to the host, from a copy of the verdict
 *
 * The arrays, slots and verdict are where the reducer's are: in host memory, and all is done when a call returns; or with kernels on
 * their device, and all is done in the order of tagc_kernels_stream(), in which the caller puts its collectives as well. The
 * caller's arrays live until then. Sums are those of tagc_reducer_run, bit for bit.
 *
 * A call that fails has changed nothing that lasts. Peers wait for this rank's collectives nonetheless: it takes part in all
 * of them, with slots of zeros and tagc_slots_failure() in the verdict, and calls _settle and _end. */
#ifndef TAGC_SLOTS_H
#define TAGC_SLOTS_H

#include "tagc/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* 32 bytes, 8-aligned. */
typedef struct tagc_slots_verdict {
    int64_t failure;   /* 0, or what is wrong: for _end to put into words */
    int64_t nonfinite; /* 1: a gradient or a sum is NaN or Inf */
    int64_t n_kept;    /* of this rank: values that it sent */
    int64_t n_items;   /* of this rank: values in the sums of all, of an all-reduce */
} tagc_slots_verdict;

/* A direct reducer for such steps; kernels: NULL: in host memory. Its other functions are those of every reducer, but for _begin, _run and
 * _test, which are TAGC_ERR_STATE. TAGC_ERR_UNSUPPORTED for another exchange, ranks_per_host above 1, and the output
 * "host shard". Collective over `comm`, which carries nothing else: as tagc_reducer_create. */
TAGC_API tagc_status tagc_slots_create(tagc_kernels *kernels, tagc_comm *comm,
                                       const tagc_reducer_options *options, tagc_reducer **out);

/* Of one slot, and where is_sums is 1 of one with sums; a multiple of 64. `send`, `received`: (W, this), 64-aligned. Changes with
 * tagc_reducer_set_sparsity. 0 for any other reducer. */
TAGC_API uint64_t tagc_slots_bytes(const tagc_reducer *reducer, int is_sums);

/* gradient (n_elems) and output as in tagc_reducer_begin; neither is looked at after _settle. Writes the verdict anew. */
TAGC_API tagc_status tagc_slots_encode(tagc_reducer *reducer, const float *gradient, float *output,
                                       void *send, tagc_slots_verdict *verdict);
/* sums: one slot, of TAGC_OUTPUT_UNIT alone, else NULL. */
TAGC_API tagc_status tagc_slots_add(tagc_reducer *reducer, const void *received, void *sums);
TAGC_API tagc_status tagc_slots_decode(tagc_reducer *reducer, const void *received);
/* After the last call of the step, or sooner where it is given up: then the residual is the one from before, whatever the
 * verdict says. */
TAGC_API tagc_status tagc_slots_settle(tagc_reducer *reducer);

/* agreed: in host memory. The same status on all ranks; of this rank's own failure the text that it had. stats: may be NULL; bytes are
 * those of slots, in whole, and of the verdict as if each rank sent it to all. Another step may begin then. */
TAGC_API tagc_status tagc_slots_end(tagc_reducer *reducer, const tagc_slots_verdict *agreed,
                                    tagc_reducer_stats *stats);

/* What `failure` of the verdict of a rank is where a call of it returned that status. */
TAGC_API int64_t tagc_slots_failure(const tagc_reducer *reducer, tagc_status status);

/* The stream in which kernels work. */
TAGC_API void *tagc_kernels_stream(const tagc_kernels *kernels);

#ifdef __cplusplus
}
#endif

#endif
