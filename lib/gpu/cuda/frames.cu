/* Frames (gpu/frame.h): two launches to seal, two to open, one to judge and one to settle any number of frames.
 *
 *   sum     computes checksums of bodies, TAGC_FRAME_PARTS blocks per body
 *   seal    writes headers; one block, which sees for all rows whether a value is not finite
 *   open    reads lengths, and checks headers and checksums; one block
 *   judge   adds damage in bodies and non-finite sums to the verdict; one block
 *   settle  undoes the step if it does not count; else returns at once */
#include "gpu/cuda/host.cuh"

using namespace tagc_cuda;

namespace {

/* The bytes of a body: of the encoder's result if there is one, else of the received header, which may hold anything. */
__device__ __forceinline__ uint64_t summed_bytes(const tagc_frames_form *form, const uint8_t *frames,
                                                 const tagc_batch_result *results, uint32_t i) {
    if (!results) return tagc_frame_summed(form, tagc_frame_at(form, frames, i)->body_bytes);
    return results[i].encoded.nonfinite ? 0 : tagc_frame_summed(form, results[i].encoded.n_bytes);
}

struct sum_shared {
    scan_shared<unsigned long long> scan;
};

__global__ void __launch_bounds__(THREADS)
    sum_frames(tagc_frames_form form, const uint8_t *frames, const tagc_batch_result *results,
               unsigned long long *sums) {
    TAGC_SHARED(sum_shared, shared);
    const uint32_t i = blockIdx.x / TAGC_FRAME_PARTS, part = blockIdx.x % TAGC_FRAME_PARTS;
    const uint8_t *body = frames + (size_t)i * form.stride + TAGC_FRAME_HEADER_BYTES;
    const uint64_t n_bytes = summed_bytes(&form, frames, results, i), n_words = (n_bytes + 7) / 8;
    const uint64_t each = (n_words + TAGC_FRAME_PARTS - 1) / TAGC_FRAME_PARTS, begin = part * each;
    const unsigned long long own =
        tagc_frame_sum_words(body, n_bytes, begin + threadIdx.x, smaller(begin + each, n_words), THREADS);
    const unsigned long long sum = block_sum(&shared.scan, own);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__device__ __forceinline__ uint64_t sum_of(const unsigned long long *sums, uint32_t i, uint64_t n_bytes) {
    uint64_t sum = 0;
    for (uint32_t part = 0; part < TAGC_FRAME_PARTS; part++) sum += sums[i * TAGC_FRAME_PARTS + part];
    return tagc_frame_sum_end(sum, n_bytes);
}

struct verdict_shared {
    scan_shared<int> flags;
    scan_shared<unsigned long long> count;
    int64_t failures[THREADS];
};

/* Combines what the threads found with the verdict, and returns it to all of them. One block. */
__device__ __forceinline__ tagc_frames_verdict join(verdict_shared *s, tagc_frames_verdict *verdict,
                                                    int64_t failure, int nonfinite,
                                                    unsigned long long n_items) {
    tagc_frames_verdict all = *verdict;
    s->failures[threadIdx.x] = failure;
    nonfinite =
        block_sum(&s->flags, nonfinite); /* its barrier orders the writes of the list before the reads */
    all.n_items += (int64_t)block_sum(&s->count, n_items);
    for (unsigned t = 0; t < THREADS; t++) all.failure = larger(all.failure, s->failures[t]);
    all.nonfinite |= nonfinite != 0;
    __syncthreads();
    if (threadIdx.x == 0) *verdict = all;
    return all;
}

__global__ void __launch_bounds__(THREADS)
    seal_frames(tagc_frames_form form, uint8_t *frames, const tagc_batch_result *results,
                const unsigned long long *sums, tagc_frames_verdict *verdict) {
    TAGC_SHARED(verdict_shared, shared);
    int nonfinite = 0;
    unsigned long long n_sent = 0;
    if (form.kind == TAGC_FRAME_FRAGMENT && threadIdx.x == 0) *verdict = tagc_frames_verdict();
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < form.n_frames; i += THREADS) {
        nonfinite |= results[i].encoded.nonfinite;
        if (tagc_frame_counts(&form, i)) n_sent += results[i].encoded.n_sent;
    }
    n_sent = block_sum(&shared.count, n_sent);
    const tagc_frames_verdict all = join(&shared, verdict, 0, nonfinite, 0);
    if (!all.nonfinite && threadIdx.x == 0) verdict->n_sent += (int64_t)n_sent;
    const int flags = (all.nonfinite ? TAGC_FRAME_NONFINITE : 0) | (all.failure ? TAGC_FRAME_FAILED : 0);
    for (uint32_t i = threadIdx.x; i < form.n_frames; i += THREADS)
        tagc_frame_write(&form, &results[i].encoded, flags,
                         sum_of(sums, i, summed_bytes(&form, frames, results, i)),
                         tagc_frame_at(&form, frames, i));
}

__global__ void __launch_bounds__(THREADS)
    open_frames(tagc_frames_form form, const uint8_t *frames, const unsigned long long *sums,
                uint64_t *lengths, tagc_frames_verdict *verdict) {
    TAGC_SHARED(verdict_shared, shared);
    int64_t failure = 0;
    int nonfinite = 0;
    unsigned long long n_items = 0;
    for (uint32_t i = threadIdx.x; i < form.n_frames; i += THREADS) {
        const tagc_frame_header *header = tagc_frame_at(&form, frames, i);
        const uint64_t n_bytes = summed_bytes(&form, frames, nullptr, i);
        const int fault = tagc_frame_check(&form, header, i, sum_of(sums, i, n_bytes));
        lengths[i] = fault || header->flags ? 0 : n_bytes;
        failure = larger(failure, tagc_frame_failure(fault, form.rank, i));
        nonfinite |= !fault && header->flags & TAGC_FRAME_NONFINITE;
        if (lengths[i] && form.kind == TAGC_FRAME_SUMS) n_items += header->n_items;
    }
    join(&shared, verdict, failure, nonfinite, n_items);
}

__global__ void __launch_bounds__(THREADS)
    judge_frames(tagc_frames_form form, const tagc_batch_result *results, uint32_t n, const uint64_t *lengths,
                 tagc_frames_verdict *verdict, int *stop) {
    TAGC_SHARED(verdict_shared, shared);
    int64_t failure = 0;
    int nonfinite = 0;
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        const int fault = !lengths || lengths[i] ? tagc_frame_fault_of(results[i].damage) : 0;
        failure = larger(failure, tagc_frame_failure(fault, form.rank, i));
        nonfinite |= results[i].nonfinite;
    }
    const tagc_frames_verdict all = join(&shared, verdict, failure, nonfinite, 0);
    if (threadIdx.x == 0) *stop = all.failure || all.nonfinite;
}

constexpr unsigned MOST_SETTLERS = 2048,
                   SETTLED_EACH = 8192; /* blocks at most; elements per block if there are few */

__global__ void __launch_bounds__(THREADS)
    settle_frames(const tagc_frames_verdict *agreed, const uint16_t *before, uint16_t *residual,
                  size_t n_residual, float *output, size_t n_output) {
    if (!agreed->failure && !agreed->nonfinite) return;
    const size_t first = (size_t)blockIdx.x * THREADS + threadIdx.x, every = (size_t)gridDim.x * THREADS;
    for (size_t i = first; i < n_residual; i += every) residual[i] = before[i];
    for (size_t i = first; i < n_output; i += every) output[i] = float_of(0x7fc00000u);
}

size_t work_bytes(uint32_t n_frames) {
    return (size_t)n_frames * TAGC_FRAME_PARTS * sizeof(unsigned long long);
}

tagc_status seal(const tagc_frames_form *form, uint8_t *frames, const tagc_batch_result *results,
                 tagc_frames_verdict *verdict, void *work, void *stream) {
    cudaStream_t in = static_cast<cudaStream_t>(stream);
    unsigned long long *sums = static_cast<unsigned long long *>(work);
    TAGC_LAUNCH(sum_frames, sum_shared, form->n_frames * TAGC_FRAME_PARTS, in, *form, frames, results, sums);
    TAGC_LAUNCH(seal_frames, verdict_shared, 1, in, *form, frames, results, sums, verdict);
    return check_launches();
}

tagc_status open(const tagc_frames_form *form, const uint8_t *frames, uint64_t *lengths,
                 tagc_frames_verdict *verdict, void *work, void *stream) {
    cudaStream_t in = static_cast<cudaStream_t>(stream);
    unsigned long long *sums = static_cast<unsigned long long *>(work);
    const tagc_batch_result *none = nullptr;
    TAGC_LAUNCH(sum_frames, sum_shared, form->n_frames * TAGC_FRAME_PARTS, in, *form, frames, none, sums);
    TAGC_LAUNCH(open_frames, verdict_shared, 1, in, *form, frames, sums, lengths, verdict);
    return check_launches();
}

tagc_status judge(const tagc_frames_form *form, const tagc_batch_result *results, uint32_t n,
                  const uint64_t *lengths, tagc_frames_verdict *verdict, int *stop, void *stream) {
    cudaStream_t in = static_cast<cudaStream_t>(stream);
    TAGC_LAUNCH(judge_frames, verdict_shared, 1, in, *form, results, n, lengths, verdict, stop);
    return check_launches();
}

/* Every format of a residual has a whole number of halves. */
tagc_status settle(const tagc_frames_verdict *agreed, const void *before, void *residual,
                   size_t residual_bytes, float *output, size_t n_output, void *stream) {
    cudaStream_t in = static_cast<cudaStream_t>(stream);
    const size_t n_residual = residual_bytes / sizeof(uint16_t);
    const unsigned n_blocks = smaller(parts_of(larger(n_residual, n_output), SETTLED_EACH), MOST_SETTLERS);
    TAGC_LAUNCH(settle_frames, no_shared, n_blocks, in, agreed, static_cast<const uint16_t *>(before),
                static_cast<uint16_t *>(residual), n_residual, output, n_output);
    return check_launches();
}

} // namespace

const tagc_frames_maker tagc_cuda::cuda_frames = {work_bytes, seal, open, judge, settle};

tagc_status tagc_cuda::cuda_frames_prepare(void) {
    TAGC_TRY(load_kernel(sum_frames));
    TAGC_TRY(load_kernel(seal_frames));
    TAGC_TRY(load_kernel(open_frames));
    TAGC_TRY(load_kernel(judge_frames));
    return load_kernel(settle_frames);
}
