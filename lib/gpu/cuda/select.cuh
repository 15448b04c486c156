/* Finds the elements of a row that are selected: the k largest of acc = gradient + residual, exactly, ties by index.
 *
 *   sample   predicts two bounds around the k-th largest, from a few lines of the row
 *   stream   one sweep over memory: writes acc to the residual, but no candidates if it is stored as integers; values above the lower
 *            bound become candidates; those between the bounds are counted by their upper digit
 *   refine   counts the next digit of those that share the k-th's upper digits; launched three times, of which most return at
 *            once
 *
 * The last block of a row that finishes finds the k-th largest in the counts. If the sample was misleading, or the candidates
 * have no room, the row is dense: refine then reads all of acc. The result is the same in any case. */
#ifndef TAGC_GPU_CUDA_SELECT_CUH
#define TAGC_GPU_CUDA_SELECT_CUH

#include "gpu/cuda/residual.cuh"

namespace tagc_cuda {

/* ---- the k-th largest, digit by digit ---- */

struct digit_shared {
    scan_shared<uint32_t> scan;
    uint32_t digit, before;
    unsigned is_last;
};

/* Finds the digit of the element of this rank from the top in the counts (N_RADIX), and clears them. One block. */
__device__ __forceinline__ void find_digit(uint32_t *radix, uint32_t rank, digit_shared *s) {
    constexpr unsigned EACH = N_RADIX / THREADS;
    uint32_t counts[EACH], sum = 0, total;
    const unsigned top = N_RADIX - 1 - threadIdx.x * EACH; /* downwards */
    for (unsigned i = 0; i < EACH; i++) {
        counts[i] = radix[top - i];
        sum += counts[i];
        radix[top - i] = 0;
    }
    uint32_t before = block_before(&s->scan, sum, &total);
    if (before < rank && rank <= before + sum) {
        unsigned i = 0;
        while (before + counts[i] < rank) before += counts[i++];
        s->digit = top - i;
        s->before = before;
    }
    __syncthreads();
}

/* Narrows the search for the element of `rank` from the top to bits in [base, limit), whose distance from base has n_bits.
 * Thread 0. */
__device__ __forceinline__ void begin_search(state *p, uint32_t base, uint32_t limit, int n_bits,
                                             uint32_t rank) {
    p->base = base;
    p->limit = limit;
    p->prefix = 0;
    p->rank = rank;
    p->n_digit_bits = smaller(n_bits, (int)RADIX_BITS);
    p->shift = n_bits - p->n_digit_bits;
}

/* Fixes the current digit from its counts, and moves to the next digit. One block. */
__device__ __forceinline__ void take_digit(const topk_row *row, digit_shared *s) {
    state *p = row->progress;
    find_digit(row->radix, p->rank, s);
    if (threadIdx.x == 0) {
        p->rank -= s->before;
        p->prefix = p->prefix << p->n_digit_bits | s->digit;
        if (p->shift == 0) {
            p->threshold = p->base + p->prefix;
            p->is_done = 1;
        } else {
            p->n_digit_bits = smaller(p->shift, (int)RADIX_BITS);
            p->shift -= p->n_digit_bits;
        }
    }
}

__device__ __forceinline__ void set_threshold(state *p, uint32_t threshold) {
    p->threshold = threshold;
    p->is_done = 1;
}

/* ---- sample ---- */

struct sample_shared {
    uint32_t
        sample[N_LINES * (LINE + 1)]; /* bits of |acc|, lines apart so that threads read them side by side */
    uint32_t counts[N_RADIX];
    scan_shared<uint32_t> scan;
    scan_shared<unsigned long long> wide;
    uint32_t above, found, largest;
};

/* The place of a line in its window is random, so that the stride does not coincide with rows or columns of a matrix. */
__device__ __forceinline__ uint32_t sampled_line(uint32_t window, uint32_t stride) {
    uint32_t x = window;
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    x ^= x >> 16;
    return window * stride + (uint32_t)((uint64_t)x * stride >> 32);
}

/* Bits, cut to 15, of the sampled element of this rank from the top; 0 if there are fewer elements. One block. */
__device__ __forceinline__ uint32_t sampled_rank(sample_shared *s, float rank) {
    const uint32_t wanted = rank < 1 ? 1 : (uint32_t)rank;
    constexpr unsigned EACH = N_RADIX / THREADS;
    uint32_t top = s->largest >> 16, n_above = 0;
    if (wanted > N_LINES * LINE) return 0;
    for (
        ;
        ;) { /* one window of N_RADIX magnitudes per turn; more than one if the largest are far above the rest */
        for (unsigned i = threadIdx.x; i < N_RADIX; i += THREADS) s->counts[i] = 0;
        __syncthreads();
        for (unsigned i = threadIdx.x; i < N_LINES * LINE; i += THREADS) {
            uint32_t down = top - (s->sample[i / LINE * (LINE + 1) + i % LINE] >> 16);
            if (down < N_RADIX) atomicAdd(&s->counts[down], 1u);
        }
        if (threadIdx.x == 0) s->found = NO_BOUND;
        __syncthreads();
        uint32_t sum = 0, total;
        for (unsigned i = 0; i < EACH; i++) sum += s->counts[threadIdx.x * EACH + i];
        uint32_t before = n_above + block_before(&s->scan, sum, &total);
        if (before < wanted && wanted <= before + sum) {
            unsigned i = threadIdx.x * EACH;
            while (before + s->counts[i] < wanted) before += s->counts[i++];
            s->found = (top - i) << 16;
        }
        __syncthreads();
        const uint32_t found = s->found;
        __syncthreads();
        if (found != NO_BOUND) return found;
        n_above += total;
        if (top < N_RADIX) return 0;
        top -= N_RADIX;
    }
}

__device__ __forceinline__ float margin_of(float expected, float clump) {
    return 4 * sqrtf(clump * (expected + 4 * clump)); /* four standard deviations */
}

/* Variance of the count of large elements relative to independent elements: up to LINE. */
__device__ __forceinline__ float measure_clump(sample_shared *s, uint32_t at_least) {
    unsigned long long sums = 0; /* of counts; the upper half is the sum of their squares */
    for (unsigned line = threadIdx.x; line < N_LINES; line += THREADS) {
        unsigned n_large = 0;
        for (unsigned i = 0; i < LINE; i++) n_large += s->sample[line * (LINE + 1) + i] >= at_least;
        sums += n_large | (unsigned long long)(n_large * n_large) << 32;
    }
    sums = block_sum(&s->wide, sums);
    float sum = (float)(uint32_t)sums, squares = (float)(uint32_t)(sums >> 32);
    if (sum < 64) return LINE;
    return fminf(fmaxf(squares / sum - sum / N_LINES, 0.5f), (float)LINE);
}

__device__ __forceinline__ void clear_row(const topk_row *row) {
    state *p = row->progress;
    for (unsigned i = threadIdx.x; i < N_RADIX; i += THREADS) row->radix[i] = 0;
    if (threadIdx.x != 0) return;
    *p = state();
    p->t_lo = NO_BOUND;
    p->t_hi = NO_BOUND;
}

/* One block per row. */
static __global__ void __launch_bounds__(THREADS) sample_rows(const topk_row *rows) {
    TAGC_SHARED(sample_shared, shared);
    sample_shared *s = &shared;
    const topk_row *row = &rows[blockIdx.x];
    clear_row(row);
    if (row->n_room == 0) return;
    if (threadIdx.x == 0) s->largest = 0;
    __syncthreads();
    const acc_arrays a = row->acc;
    uint32_t most = 0;
    for (unsigned i = threadIdx.x; i < N_LINES * LINE; i += THREADS) {
        size_t at = (size_t)sampled_line(i / LINE, row->stride) * LINE + i % LINE;
        uint32_t bits = magnitude(acc_at(&a, at));
        s->sample[i / LINE * (LINE + 1) + i % LINE] = bits;
        most = larger(most, bits);
    }
    atomicMax(&s->largest, most);
    __syncthreads();
    const float expected = row->n_expected;
    const float margin = margin_of(expected, measure_clump(s, sampled_rank(s, expected)));
    uint32_t low = sampled_rank(s, expected + margin), high = NO_BOUND;
    if (expected > margin) high = sampled_rank(s, expected - margin) + 0x10000u;
    if (threadIdx.x != 0) return;
    row->progress->t_lo = larger(low, 1u);
    row->progress->t_hi = smaller(high, INF_BITS);
}

/* ---- stream ---- */

struct stream_shared {
    digit_shared digit;
};

/* For a sampled row, the digit between the bounds that is counted first. */
__device__ __forceinline__ int band_bits(const state *p) {
    return 32 - __clz((int)(p->t_hi - 1 - p->t_lo));
}

/* A warp; the span begins within the row. The formats are the row's, known when this is compiled: the sweep has few instructions to
 * spare for each value. */
template <int RESIDUAL, int GRADIENT>
__device__ __forceinline__ void stream_span(const topk_row *row, uint32_t index, uint32_t t_lo,
                                            uint32_t t_hi) {
    constexpr unsigned QUADS = SPAN / LANES / QUAD;
    state *p = row->progress;
    acc_arrays own = row->acc;
    own.residual_format = RESIDUAL;
    own.gradient_format = GRADIENT;
    const acc_arrays *a = &own;
    const size_t begin = (size_t)index * SPAN + lane_of() * QUAD;
    const int aligned = is_aligned(a);
    const int keeps_all = row->k == row->n, shift = larger(band_bits(p) - (int)RADIX_BITS, 0);
    /* An exponent is that of a block without its candidates, of which it is not known yet what they leave. */
    const uint32_t t_clear = has_exponents(RESIDUAL) ? t_lo : NO_BOUND;
    raw_quad gradient[QUADS], residual[QUADS];
    float acc[QUADS][QUAD];
    uint32_t n_own = 0, n_certain = 0, most = 0;
    TAGC_UNROLL
    for (unsigned q = 0; q < QUADS; q++) {
        gradient[q] = load_gradient(a, begin + q * LANES * QUAD, aligned);
        residual[q] = load_residual(a, begin + q * LANES * QUAD, aligned);
    }
    TAGC_UNROLL
    for (unsigned q = 0; q < QUADS; q++) {
        float left[QUAD];
        TAGC_UNROLL
        for (unsigned j = 0; j < QUAD; j++) {
            acc[q][j] = value_of(GRADIENT, &gradient[q], j) + value_of(RESIDUAL, &residual[q], j);
            uint32_t bits = magnitude(acc[q][j]);
            most = larger(most, bits);
            n_own += bits >= t_lo;
            n_certain += bits >= t_hi;
            left[j] = bits < t_clear && (bits || keeps_all) ? acc[q][j] : -0.0f;
            if (bits >= t_lo && bits < t_hi) atomicAdd(&row->radix[(bits - t_lo) >> shift], 1u);
        }
        write_residual(a, begin + q * LANES * QUAD, aligned, left);
    }
    if (__any_sync(ALL, most >= INF_BITS) && lane_of() == 0) atomicOr(&p->nonfinite, 1);
    uint32_t n_all, at = warp_before(n_own, &n_all);
    n_certain = warp_sum(n_certain);
    uint32_t first = 0;
    if (lane_of() == 0 && n_all)
        first = (uint32_t)atomicAdd(&p->n_found, n_all | (unsigned long long)n_certain << 32);
    first = __shfl_sync(ALL, first, 0);
    if (lane_of() == 0) row->spans[index] = span{first, n_all};
    if (n_all > row->n_room || first > row->n_room - n_all) {
        if (lane_of() == 0) atomicOr(&p->is_full, 1);
        return;
    }
    at += first;
    TAGC_UNROLL
    for (unsigned q = 0; q < QUADS; q++) TAGC_UNROLL
    for (unsigned j = 0; j < QUAD; j++) {
        if (magnitude(acc[q][j]) < t_lo) continue;
        row->places[at] = (uint16_t)(q * LANES * QUAD + lane_of() * QUAD + j);
        row->candidates[at++] = acc[q][j];
    }
}

template <int RESIDUAL>
__device__ __forceinline__ void stream_either(const topk_row *row, uint32_t index, uint32_t t_lo,
                                              uint32_t t_hi) {
    if (row->acc.gradient_format == TAGC_FORMAT_BF16)
        stream_span<RESIDUAL, TAGC_FORMAT_BF16>(row, index, t_lo, t_hi);
    else
        stream_span<RESIDUAL, TAGC_FORMAT_FP32>(row, index, t_lo, t_hi);
}

__device__ __forceinline__ void stream_any(const topk_row *row, uint32_t index, uint32_t t_lo,
                                           uint32_t t_hi) {
    switch (row->acc.residual_format) {
    case TAGC_FORMAT_FP32:
        stream_either<TAGC_FORMAT_FP32>(row, index, t_lo, t_hi);
        break;
    case TAGC_FORMAT_BF16:
        stream_either<TAGC_FORMAT_BF16>(row, index, t_lo, t_hi);
        break;
    case TAGC_FORMAT_INT8:
        stream_either<TAGC_FORMAT_INT8>(row, index, t_lo, t_hi);
        break;
    default:
        stream_either<TAGC_FORMAT_INT4>(row, index, t_lo, t_hi);
    }
}

/* In the row's last block: finds the range of the k-th largest, or decides to search all of acc. */
__device__ __forceinline__ void after_stream(const topk_row *row, digit_shared *s) {
    state *p = row->progress;
    const uint32_t n_candidates = (uint32_t)p->n_found, n_certain = (uint32_t)(p->n_found >> 32), k = row->k;
    if (p->nonfinite || k == 0 || k == row->n) {
        if (threadIdx.x == 0) {
            p->is_dense = 1;
            set_threshold(p, k == row->n ? 0 : INF_BITS);
        }
        return;
    }
    const int is_sampled = row->n_room > 0 && !p->is_full;
    if (!is_sampled || n_certain > k || (n_candidates < k && p->t_lo > 1)) {
        for (unsigned i = threadIdx.x; i < N_RADIX; i += THREADS) row->radix[i] = 0;
        if (threadIdx.x == 0) {
            p->is_dense = 1;
            begin_search(p, 0, NO_BOUND, 31, k);
        }
    } else if (n_candidates <= k || n_certain == k) {
        if (threadIdx.x == 0) set_threshold(p, n_candidates <= k ? p->t_lo - 1 : p->t_hi - 1);
    } else {
        if (threadIdx.x == 0) begin_search(p, p->t_lo, p->t_hi, band_bits(p), k - n_certain);
        __syncthreads();
        take_digit(row, s);
    }
}

/* A block per tile. */
static __global__ void __launch_bounds__(THREADS, 3) stream_rows(work_of<topk_row> work) {
    TAGC_SHARED(stream_shared, shared);
    const topk_row *row = row_at<&topk_row::first_tile>(&work, blockIdx.x);
    const uint32_t index = (blockIdx.x - row->first_tile) * WARPS + warp_of();
    const uint32_t t_lo = row->progress->t_lo, t_hi = row->progress->t_hi;
    if ((size_t)index * SPAN < row->n) stream_any(row, index, t_lo, t_hi);
    if (is_last_block(&row->progress->tickets[0], row->n_tiles, &shared.digit.is_last))
        after_stream(row, &shared.digit);
}

/* ---- the candidates of a chunk ---- */

struct chunk_of {
    const topk_row *row;
    uint32_t index, n; /* elements */
    size_t begin;      /* its first */
};

__device__ __forceinline__ chunk_of chunk_at(const topk_row *row, uint32_t index) {
    chunk_of c;
    c.row = row;
    c.index = index;
    c.begin = (size_t)index * row->chunk;
    c.n = c.begin < row->n ? (uint32_t)smaller<size_t>(row->n - c.begin, row->chunk) : 0;
    return c;
}

/* block: of those that work for chunks, one for each. */
__device__ __forceinline__ chunk_of chunk_of_block(const work_of<topk_row> *work, uint32_t block) {
    const topk_row *row = row_at<&topk_row::first_chunk>(work, block);
    return chunk_at(row, block - row->first_chunk);
}

/* Calls visit(position in the chunk, value) for each candidate, in any order. visit must not contain a barrier. */
template <typename visitor> __device__ __forceinline__ void each_candidate(const chunk_of *c, visitor visit) {
    const topk_row *row = c->row;
    if (row->progress->is_dense) {
        /* The sweep has left acc where it is stored as fp32, perhaps over the old residual. */
        const float *acc = row->acc.residual_format == TAGC_FORMAT_FP32
                               ? static_cast<const float *>(row->acc.residual_out) + c->begin
                               : nullptr;
        for (uint32_t i = threadIdx.x; i < c->n; i += THREADS)
            visit(i, acc ? acc[i] : acc_at(&row->acc, c->begin + i));
        return;
    }
    const uint32_t n_spans = (c->n + SPAN - 1) / SPAN;
    for (uint32_t at = warp_of(); at < n_spans; at += WARPS) {
        const span here = row->spans[c->begin / SPAN + at];
        for (uint32_t i = lane_of(); i < here.n; i += LANES)
            visit(at * SPAN + row->places[here.begin + i], row->candidates[here.begin + i]);
    }
}

/* ---- refine ---- */

struct refine_shared {
    digit_shared digit;
    uint32_t counts[N_RADIX];
};

/* A block per chunk. turn: 0, 1, 2. */
static __global__ void __launch_bounds__(THREADS) refine_rows(work_of<topk_row> work, unsigned turn) {
    TAGC_SHARED(refine_shared, shared);
    refine_shared *s = &shared;
    const chunk_of c = chunk_of_block(&work, blockIdx.x);
    const state *p = c.row->progress;
    if (p->is_done) return;
    const uint32_t base = p->base, limit = p->limit, prefix = p->prefix;
    const int shift = p->shift, n_digit_bits = p->n_digit_bits;
    for (unsigned i = threadIdx.x; i < N_RADIX; i += THREADS) s->counts[i] = 0;
    __syncthreads();
    each_candidate(&c, [&](uint32_t, float value) {
        uint32_t bits = magnitude(value);
        if (bits < base || bits >= limit) return;
        bits = (bits - base) >> shift;
        if (bits >> n_digit_bits == prefix) atomicAdd(&s->counts[bits & ((1u << n_digit_bits) - 1)], 1u);
    });
    __syncthreads();
    for (unsigned i = threadIdx.x; i < N_RADIX; i += THREADS)
        if (s->counts[i]) atomicAdd(&c.row->radix[i], s->counts[i]);
    if (is_last_block(&c.row->progress->tickets[1 + turn], c.row->n_grid_chunks, &s->digit.is_last))
        take_digit(c.row, &s->digit);
}

} // namespace tagc_cuda

#endif
