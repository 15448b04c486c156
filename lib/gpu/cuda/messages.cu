/* Messages of arrays in few bits (gpu/maker.h): two launches to encode, two to decode.
 *
 *   encode  writes a body; a block of threads takes a run of 4096 values, a whole number of blocks
 *   sum     computes a body's checksum, and in front of a decode looks at its scales; the last block writes the header, or judges it
 *   decode  writes the values, or NaN where the message is not sound */
#include "gpu/cuda/host.cuh"
#include "gpu/cuda/values.cuh"
extern "C" {
#include "codec/elements.h"
}

using namespace tagc_cuda;

namespace {

constexpr unsigned WORDS_EACH = 16 * THREADS,
                   MOST_SUMMERS = 1024; /* words of a block if there are few; blocks */

/* Where value i lies in shared memory: two blocks, which a warp takes side by side, in other banks. Those of 16 are, without a gap. */
__device__ __forceinline__ uint32_t place_of(uint32_t i, int shift) {
    return shift == 4 ? i : i + ((i >> shift) + 1) / 2 * HALF;
}

struct encode_shared {
    float values[RUN + RUN / 64 * HALF + HALF];
};

__device__ __forceinline__ value_format format_of(const tagc_message_form *form) {
    return {form->values,        form->block, __ffs(form->block) - 1, 0,
            form->largest_scale, 1,           form->is_stochastic,    form->seed};
}

__global__ void __launch_bounds__(THREADS)
    encode_message(tagc_message_form form, const void *values, uint8_t *body) {
    TAGC_SHARED(encode_shared, shared);
    encode_shared *s = &shared;
    const value_format f = format_of(&form);
    const size_t first = (size_t)blockIdx.x * RUN;
    const uint32_t n = (uint32_t)smaller<size_t>(form.n - first, RUN), block = (uint32_t)form.block;
    const uint32_t n_blocks = (n + block - 1) / block;
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        s->values[place_of(i, f.shift)] = tagc_element_read(values, form.element, first + i);
    __syncthreads();
    uint8_t *packed = body + scales_bytes(&f, form.n);
    for (uint32_t pair = warp_of(); pair * 2 < n_blocks; pair += WARPS) {
        const uint32_t lower = pair * 2 * block, begin = (pair * 2 + lane_of() / HALF) * block;
        const uint32_t n_here = begin < n ? smaller(n - begin, block) : 0;
        const uint32_t n_rounds = (smaller(n - lower, block) + HALF - 1) / HALF;
        auto get = [&](unsigned i) { return s->values[place_of(begin + i, f.shift)]; };
        value_block<decltype(get)> here = {n_here, n_rounds, get};
        const size_t at = first + begin;
        encode_block(&f, &here, at, body + 2 * (at >> f.shift),
                     packed + at * (size_t)bits_per_value(f.values) / 8, [](unsigned, float, float) {});
    }
}

/* ---- headers ---- */

__device__ __forceinline__ tagc_message_header header_of(const tagc_message_form *form, uint64_t n_bytes,
                                                         uint64_t body_sum) {
    tagc_message_header header = {};
    header.magic = TAGC_MESSAGE_MAGIC;
    header.version = TAGC_MESSAGE_VERSION;
    header.kind = TAGC_MESSAGE_BLOCKS;
    header.coding = (uint8_t)form->values;
    header.n_elems = form->n;
    header.block = (uint32_t)form->block;
    header.body_bytes = n_bytes;
    header.body_sum = body_sum;
    header.sum = tagc_message_header_sum(&header);
    return header;
}

/* What is wrong with a header, as tagc_blocks_decode says it. */
__device__ __forceinline__ int status_of(const tagc_message_header *found,
                                         const tagc_message_header *wanted) {
    if (found->magic != wanted->magic || found->version != wanted->version ||
        found->sum != tagc_message_header_sum(found) || found->kind != wanted->kind)
        return TAGC_ERR_CORRUPT;
    if (found->coding != wanted->coding || found->n_elems != wanted->n_elems || found->block != wanted->block)
        return TAGC_ERR_MISMATCH;
    return found->sum == wanted->sum ? TAGC_OK : TAGC_ERR_CORRUPT;
}

/* Scales that no encoder writes, and bits behind the last value. 1 in threads that find one. */
__device__ __forceinline__ int is_damaged(const tagc_message_form *form, const uint8_t *body) {
    const value_format f = format_of(form);
    const size_t n_scales = scales_bytes(&f, form->n) / 2,
                 n_bits = form->n * (size_t)bits_per_value(f.values);
    const size_t first = (size_t)blockIdx.x * THREADS + threadIdx.x, every = (size_t)gridDim.x * THREADS;
    int bad = 0;
    for (size_t i = first; i < n_scales; i += every) {
        const uint32_t scale = load16(body + 2 * i);
        bad |= scale != TAGC_BF16_NAN && (scale > f.largest_scale || (scale > 0 && scale < 0x80u));
    }
    if (first == 0 && n_bits % 8) bad |= body[2 * n_scales + n_bits / 8] >> n_bits % 8 != 0;
    return bad;
}

struct sum_message_shared {
    scan_shared<unsigned long long> scan;
    unsigned is_last;
};

/* written: the header, to write; NULL: it is there, to be judged. */
__global__ void __launch_bounds__(THREADS)
    sum_message(tagc_message_form form, const uint8_t *message, tagc_message_header *written, uint64_t number,
                tagc_blocks_state *state) {
    TAGC_SHARED(sum_message_shared, shared);
    const value_format f = format_of(&form);
    const uint8_t *body = message + TAGC_MESSAGE_HEADER_BYTES;
    const uint64_t n_bytes = values_bytes(&f, form.n), n_words = (n_bytes + 7) / 8;
    const uint64_t each = (n_words + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * each;
    const unsigned long long own =
        tagc_message_sum_words(body, n_bytes, begin + threadIdx.x, smaller(begin + each, n_words), THREADS);
    const unsigned long long sum = block_sum(&shared.scan, own);
    unsigned long long *total = reinterpret_cast<unsigned long long *>(&state->sum);
    if (threadIdx.x == 0) atomicAdd(total, sum);
    if (!written && is_damaged(&form, body)) atomicOr(&state->is_damaged, 1u);
    if (!is_last_block(&state->ticket, gridDim.x, &shared.is_last) || threadIdx.x != 0) return;
    const uint64_t body_sum = tagc_message_sum_end(atomicAdd(total, 0ull), n_bytes);
    const tagc_message_header header = header_of(&form, n_bytes, body_sum);
    state->verdict = TAGC_OK;
    if (written) {
        *written = header;
    } else {
        const int status = status_of(reinterpret_cast<const tagc_message_header *>(message), &header);
        state->verdict = status == TAGC_OK && atomicOr(&state->is_damaged, 0u) ? TAGC_ERR_CORRUPT : status;
    }
    if (state->verdict != TAGC_OK && state->status == TAGC_OK) {
        state->status = state->verdict;
        state->number = number;
    }
    state->sum = 0;
    state->ticket = state->is_damaged = 0;
}

__global__ void __launch_bounds__(THREADS) decode_message(tagc_message_form form, const uint8_t *body,
                                                          void *values, const tagc_blocks_state *state) {
    const value_format f = format_of(&form);
    const size_t first = (size_t)blockIdx.x * RUN, end = smaller<size_t>(first + RUN, form.n);
    const int is_sound = state->verdict == TAGC_OK;
    for (size_t i = first + threadIdx.x; i < end; i += THREADS) {
        float x = float_of(TAGC_BF16_WIDE(TAGC_BF16_NAN));
        if (is_sound && load16(body + 2 * (i >> f.shift)) != TAGC_BF16_NAN) x = value_at(&f, body, i, form.n);
        tagc_element_write(x, values, form.element, i);
    }
}

/* ---- the host's side ---- */

unsigned n_summers(const tagc_message_form *form) {
    size_t words = form->n * (size_t)bits_per_value(form->values) / 64;
    return smaller(parts_of(words, WORDS_EACH), MOST_SUMMERS);
}

tagc_status encode(const tagc_message_form *form, const void *values, uint8_t *message,
                   tagc_blocks_state *state, void *stream) {
    cudaStream_t in = static_cast<cudaStream_t>(stream);
    tagc_message_header *header = reinterpret_cast<tagc_message_header *>(message);
    const uint64_t number = 0;
    if (form->n)
        TAGC_LAUNCH(encode_message, encode_shared, parts_of(form->n, RUN), in, *form, values,
                    message + TAGC_MESSAGE_HEADER_BYTES);
    TAGC_LAUNCH(sum_message, sum_message_shared, n_summers(form), in, *form, message, header, number, state);
    return check_launches();
}

tagc_status decode(const tagc_message_form *form, const uint8_t *message, void *values, uint64_t number,
                   tagc_blocks_state *state, void *stream) {
    cudaStream_t in = static_cast<cudaStream_t>(stream);
    tagc_message_header *none = nullptr;
    TAGC_LAUNCH(sum_message, sum_message_shared, n_summers(form), in, *form, message, none, number, state);
    if (form->n)
        TAGC_LAUNCH(decode_message, no_shared, parts_of(form->n, RUN), in, *form,
                    message + TAGC_MESSAGE_HEADER_BYTES, values, state);
    return check_launches();
}

} // namespace

const tagc_messages_maker tagc_cuda::cuda_messages = {encode, decode};

tagc_status tagc_cuda::cuda_messages_prepare(void) {
    TAGC_TRY(load_kernel(encode_message));
    TAGC_TRY(load_kernel(sum_message));
    return load_kernel(decode_message);
}
