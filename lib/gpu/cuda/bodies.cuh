/* Received bodies of code topk, which the processor has validated: adds them to sums.
 *
 *   index   finds where each chunk's items and bits begin in a body
 *   add     adds the bodies of a row, one after the other, chunk by chunk */
#ifndef TAGC_GPU_CUDA_BODIES_CUH
#define TAGC_GPU_CUDA_BODIES_CUH

#include "gpu/cuda/topk.cuh"

namespace tagc_cuda {

struct index_shared {
    scan_shared<unsigned long long> items, bytes;
};

/* Bytes of the codes of chunk c. */
__device__ __forceinline__ uint32_t bytes_of_chunk(const sums_row *row, const body_row *body, int bits,
                                                   uint32_t c) {
    if (bits == 0) return (chunk_elems(row->n, row->chunk, c) + 7) / 8;
    return code_bytes(load16(body->bytes + HEADER + (size_t)ENTRY * c + 2), bits);
}

__device__ __forceinline__ unsigned long long length_of(const body_row *body) {
    return body->length ? *body->length : body->n_bytes;
}

__device__ __forceinline__ uint32_t bodies_of(const sums_row *row) {
    return row->stop && *row->stop ? 0 : row->n_bodies;
}

/* Finds the starts of chunks; returns the bytes of all positions. One block. */
__device__ __forceinline__ unsigned long long index_chunks(const sums_row *row, const body_row *body,
                                                           index_shared *s) {
    const int bits = body->bytes[4];
    const uint32_t n_chunks = row->n_chunks;
    unsigned long long at = HEADER + (unsigned long long)ENTRY * n_chunks, n_items = 0, total;
    for (uint32_t from = 0; from < n_chunks; from += THREADS) {
        const uint32_t c = from + threadIdx.x;
        const int is_here = c < n_chunks;
        const unsigned long long items = is_here ? load16(body->bytes + HEADER + (size_t)ENTRY * c) : 0;
        const unsigned long long n_bytes = is_here ? bytes_of_chunk(row, body, bits, c) : 0;
        const unsigned long long items_before = block_before(&s->items, items, &total);
        if (is_here) body->begin[c] = (uint32_t)(n_items + items_before);
        n_items += total;
        const unsigned long long bytes_before = block_before(&s->bytes, n_bytes, &total);
        if (is_here) body->offset[c] = at + bytes_before;
        at += total;
    }
    return at;
}

/* A block per body. */
static __global__ void __launch_bounds__(THREADS) index_bodies(const sums_row *rows, const body_row *bodies) {
    TAGC_SHARED(index_shared, shared);
    const body_row *body = &bodies[blockIdx.x];
    const sums_row *row = &rows[body->row];
    if (blockIdx.x - row->first_body >= bodies_of(row)) return; /* an earlier run had more bodies */
    if (body->is_plain) return;
    body_state found = {};
    if (row->is_sparse) {
        found.n_index_bytes = index_chunks(row, body, &shared);
        found.n_items = load32(body->bytes);
        found.bits = body->bytes[4];
    } else {
        found.n_items = row->n;
    }
    if (threadIdx.x == 0) *body->progress = found;
}

/* ---- codes of positions ---- */

constexpr unsigned CODES_EACH = 4; /* codes that a thread reads at a time */
constexpr unsigned MOST_VISITED = THREADS * CODES_EACH;

struct codes_shared {
    scan_shared<unsigned long long> scan;
};

/* Code j; reads only the bytes that hold it. */
__device__ __forceinline__ uint32_t code_at(const uint8_t *bytes, uint32_t j, int bits) {
    const uint32_t bit = j * (uint32_t)bits, last = (bit + (uint32_t)bits - 1) / 8;
    uint32_t word = 0;
    for (uint32_t b = bit / 8; b <= last; b++) word |= (uint32_t)bytes[b] << (b - bit / 8) * 8;
    return word >> bit % 8 & ((1u << bits) - 1);
}

/* Calls visit(position, item) for each item among n_codes codes, in any order, and now and then, in all threads, after(n) when all items
 * up to number n have been visited since it was called last, at most MOST_VISITED. One block. */
template <typename visitor, typename follower>
__device__ __forceinline__ void each_code(const uint8_t *bytes, uint32_t n_codes, int bits, codes_shared *s,
                                          visitor visit, follower after) {
    const uint32_t escape = (1u << bits) - 1;
    uint32_t item = 0, position = 0;
    for (uint32_t from = 0; from < n_codes; from += THREADS * CODES_EACH) {
        const uint32_t first = from + threadIdx.x * CODES_EACH;
        uint32_t codes[CODES_EACH];
        unsigned long long sum = 0, total; /* of steps; the upper half is the sum of items */
        for (uint32_t i = 0; i < CODES_EACH; i++) {
            codes[i] = first + i < n_codes ? code_at(bytes, first + i, bits) : escape;
            if (first + i >= n_codes) continue;
            sum += codes[i] + (codes[i] != escape) + ((unsigned long long)(codes[i] != escape) << 32);
        }
        const unsigned long long before = block_before(&s->scan, sum, &total);
        uint32_t at = position + (uint32_t)before, index = item + (uint32_t)(before >> 32);
        for (uint32_t i = 0; i < CODES_EACH && first + i < n_codes; i++) {
            at += codes[i];
            if (codes[i] == escape) continue;
            visit(at, index);
            at++, index++;
        }
        position += (uint32_t)total; /* at most 65535 codes of 15 bits: no overflow */
        item += (uint32_t)(total >> 32);
        after(item);
    }
}

/* ---- add ---- */

__device__ __forceinline__ float plain_at(const sums_row *row, const body_row *body, size_t i) {
    if (row->gradient_format == TAGC_FORMAT_BF16)
        return float_of((uint32_t) reinterpret_cast<const uint16_t *>(body->bytes)[i] << 16);
    return reinterpret_cast<const float *>(body->bytes)[i];
}

struct add_shared {
    codes_shared codes;
    scan_shared<uint32_t> scan;
    uint32_t bits[MAX_CHUNK / 32], before[MAX_CHUNK / 32]; /* a bitmap; the items in front of each word */
    uint16_t positions[MOST_VISITED];
};

/* Calls visit(position, item) for each item of a bitmap: adjacent threads for adjacent positions. One block. */
template <typename visitor>
__device__ __forceinline__ void each_bit(const uint8_t *bytes, uint32_t n, add_shared *s, visitor visit) {
    const uint32_t n_words = (n + 31) / 32, n_bytes = (n + 7) / 8;
    const words w = words_of(n_words);
    uint8_t *copy = reinterpret_cast<uint8_t *>(s->bits);
    uint32_t n_own = 0, total;
    for (uint32_t i = threadIdx.x; i < n_words * 4; i += THREADS) copy[i] = i < n_bytes ? bytes[i] : 0;
    __syncthreads();
    for (uint32_t i = w.begin; i < w.end; i++) n_own += (uint32_t)__popc(s->bits[i]);
    uint32_t before = block_before(&s->scan, n_own, &total);
    for (uint32_t i = w.begin; i < w.end; i++) {
        s->before[i] = before;
        before += (uint32_t)__popc(s->bits[i]);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        const uint32_t word = s->bits[i / 32], bit = 1u << i % 32;
        if (word & bit) visit(i, s->before[i / 32] + (uint32_t)__popc(word & (bit - 1)));
    }
}

/* *sum += scale * value; sets *nonfinite to 1 if the sum is not finite. */
__device__ __forceinline__ void add_to(float *sum, float scale, float value, int *nonfinite) {
    const float added = *sum + scale * value;
    *sum = added;
    *nonfinite |= magnitude(added) >= INF_BITS;
}

__device__ __forceinline__ void add_chunk(const sums_row *row, const body_row *body, uint32_t c,
                                          add_shared *s, int *nonfinite) {
    const body_state *p = body->progress;
    const uint8_t *bytes = body->bytes + body->offset[c], *values = body->bytes + p->n_index_bytes;
    const uint32_t first = body->begin[c], n_items = p->n_items;
    float *sums = row->sums + (size_t)c * row->chunk;
    auto add = [&](uint32_t position, uint32_t item) {
        add_to(&sums[position], row->scale, value_at(&row->format, values, (size_t)first + item, n_items),
               nonfinite);
    };
    if (p->bits == 0) {
        each_bit(bytes, chunk_elems(row->n, row->chunk, c), s, add);
        return;
    }
    /* Positions are listed first, so that adjacent threads read adjacent values. */
    uint32_t done = 0;
    auto list = [&](uint32_t position, uint32_t item) { s->positions[item - done] = (uint16_t)position; };
    auto add_listed = [&](uint32_t end_item) {
        __syncthreads();
        for (uint32_t i = done + threadIdx.x; i < end_item; i += THREADS) add(s->positions[i - done], i);
        __syncthreads();
        done = end_item;
    };
    each_code(bytes, load16(body->bytes + HEADER + (size_t)ENTRY * c + 2), p->bits, &s->codes, list,
              add_listed);
}

/* Calls what(i) for each element of the chunk. One block. */
template <typename visitor>
__device__ __forceinline__ void each_element(const sums_row *row, uint32_t c, visitor what) {
    const size_t end = smaller<size_t>(((size_t)c + 1) * row->chunk, row->n);
    for (size_t i = (size_t)c * row->chunk + threadIdx.x; i < end; i += THREADS) what(i);
}

/* A block per chunk. Its sums stay in the L2 cache after the first access; the shared memory of some devices is too small
 * for them. */
static __global__ void __launch_bounds__(THREADS, 3)
    add_topk(work_of<sums_row> work, const body_row *bodies) {
    TAGC_SHARED(add_shared, shared);
    const sums_row *row = row_at<&sums_row::first_chunk>(&work, blockIdx.x);
    const uint32_t c = blockIdx.x - row->first_chunk;
    const uint32_t n_bodies = bodies_of(row);
    int nonfinite = 0;
    if (!row->is_sparse || c >= row->n_chunks) return;
    if (!row->adds) each_element(row, c, [&](size_t i) { row->sums[i] = 0; });
    for (uint32_t b = 0; b < n_bodies; b++) {
        const body_row *body = &bodies[row->first_body + b];
        __syncthreads(); /* all threads have added the body before */
        if (body->is_plain)
            each_element(row, c, [&](size_t i) { row->sums[i] += row->scale * plain_at(row, body, i); });
        else
            add_chunk(row, body, c, &shared, &nonfinite);
    }
    if (nonfinite) atomicOr(&row->result->nonfinite, 1);
}

/* A thread per row. */
static __global__ void __launch_bounds__(THREADS) clear_results(const sums_row *rows, unsigned n_rows) {
    const unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n_rows) *rows[i].result = tagc_batch_result();
}

} // namespace tagc_cuda

#endif
