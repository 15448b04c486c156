/* Received bodies of code topk, which the processor has validated: adds them to sums.
 *
 *   index   finds where each chunk's items and bits begin in a body, and each share of a chunk
 *   add     adds the bodies of a row, one after the other, share by share
 *
 * Bodies are added in order, so that one block has to add all of them at a place. Where a batch has few chunks, as a rank's fragment has
 * among many hosts, chunks are cut into shares: positions that a block of their own adds. */
#ifndef TAGC_GPU_CUDA_BODIES_CUH
#define TAGC_GPU_CUDA_BODIES_CUH

#include "gpu/cuda/topk.cuh"

namespace tagc_cuda {

struct codes_shared {
    scan_shared<unsigned long long> scan;
};

struct index_shared {
    scan_shared<unsigned long long> items, bytes;
    scan_shared<uint32_t> bits;
    codes_shared codes;
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

/* ---- codes of positions ---- */

constexpr unsigned CODES_EACH = 4; /* codes that a thread reads at a time */
constexpr unsigned MOST_VISITED = THREADS * CODES_EACH;

/* Code j; reads only the bytes that hold it. */
__device__ __forceinline__ uint32_t code_at(const uint8_t *bytes, uint32_t j, int bits) {
    const uint32_t bit = j * (uint32_t)bits, last = (bit + (uint32_t)bits - 1) / 8;
    uint32_t word = 0;
    for (uint32_t b = bit / 8; b <= last; b++) word |= (uint32_t)bytes[b] << (b - bit / 8) * 8;
    return word >> bit % 8 & ((1u << bits) - 1);
}

/* A code, what is before it, and the position after it: that of its item is one less. */
struct code_step {
    uint32_t code, position, item, next, is_item;
};

/* Calls visit(code_step) for each code from `begin` to n_codes, in any order, and now and then, in all threads, after(n) when all items up to
 * number n have been visited since it was called last, at most MOST_VISITED. One block. */
template <typename visitor, typename follower>
__device__ __forceinline__ void each_code(const uint8_t *bytes, share_begin begin, uint32_t n_codes, int bits,
                                          codes_shared *s, visitor visit, follower after) {
    const uint32_t escape = (1u << bits) - 1;
    uint32_t item = begin.item, position = begin.position;
    for (uint32_t from = begin.code; from < n_codes; from += THREADS * CODES_EACH) {
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
            const uint32_t is_item = codes[i] != escape;
            const code_step here = {first + i, at, index, at + codes[i] + is_item, is_item};
            visit(here);
            at = here.next;
            index += is_item;
        }
        position += (uint32_t)total; /* at most 65535 codes of 15 bits: no overflow */
        item += (uint32_t)(total >> 32);
        after(item);
    }
}

/* ---- index ---- */

/* Codes move on by 1 or more. So of each boundary that is not beyond all of them, one code is the first whose item is not before it. */
__device__ __forceinline__ void index_codes(const sums_row *row, const body_row *body, int bits, uint32_t c,
                                            codes_shared *s) {
    const uint32_t n_codes = load16(body->bytes + HEADER + (size_t)ENTRY * c + 2);
    const uint32_t n_items = load16(body->bytes + HEADER + (size_t)ENTRY * c),
                   width = row->chunk / row->n_shares;
    share_begin *shares = body->shares + (size_t)c * row->n_shares;
    for (uint32_t i = threadIdx.x; i < row->n_shares; i += THREADS) {
        const share_begin start = {0, 0, 0}, end = {n_codes, row->chunk, n_items};
        shares[i] = i ? end : start;
    }
    __syncthreads();
    each_code(
        body->bytes + body->offset[c], share_begin(), n_codes, bits, s,
        [&](const code_step &p) {
            for (uint32_t i = (p.position + width - 1) / width; i < row->n_shares && i * width < p.next;
                 i++) {
                const share_begin found = {p.code, p.position, p.item};
                if (i) shares[i] = found;
            }
        },
        [](uint32_t) {});
}

__device__ __forceinline__ void index_bitmap(const sums_row *row, const body_row *body, uint32_t c,
                                             scan_shared<uint32_t> *s) {
    const uint8_t *bytes = body->bytes + body->offset[c];
    const uint32_t n_bytes = (chunk_elems(row->n, row->chunk, c) + 7) / 8,
                   width = row->chunk / row->n_shares / 8;
    uint32_t before = 0;
    for (uint32_t i = 0; i < row->n_shares; i++) {
        uint32_t n_own = 0;
        if (threadIdx.x == 0) {
            const share_begin found = {0, i * width * 8, before};
            body->shares[(size_t)c * row->n_shares + i] = found;
        }
        for (uint32_t b = i * width + threadIdx.x; b < smaller((i + 1) * width, n_bytes); b += THREADS)
            n_own += (uint32_t)__popc(bytes[b]);
        before += block_sum(s, n_own);
    }
}

/* A block per body; and a thread per row, whose result becomes empty. */
static __global__ void __launch_bounds__(THREADS)
    index_bodies(const sums_row *rows, unsigned n_rows, const body_row *bodies, unsigned n_bodies) {
    TAGC_SHARED(index_shared, shared);
    const unsigned own = blockIdx.x * THREADS + threadIdx.x;
    if (own < n_rows) *rows[own].result = tagc_batch_result();
    if (blockIdx.x >= n_bodies) return;
    const body_row *body = &bodies[blockIdx.x];
    const sums_row *row = &rows[body->row];
    if (blockIdx.x - row->first_body >= bodies_of(row)) return; /* an earlier run had more bodies */
    if (body->is_plain) return;
    body_state found = {};
    if (row->is_sparse) {
        found.n_index_bytes = index_chunks(row, body, &shared);
        found.n_items = load32(body->bytes);
        found.bits = body->bytes[4];
        __syncthreads(); /* all threads read the starts of chunks */
        for (uint32_t c = 0; c < row->n_chunks && row->n_shares > 1; c++) {
            if (found.bits)
                index_codes(row, body, found.bits, c, &shared.codes);
            else
                index_bitmap(row, body, c, &shared.bits);
            __syncthreads();
        }
    } else {
        found.n_items = row->n;
    }
    if (threadIdx.x == 0) *body->progress = found;
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

/* Calls visit(position, item) for each item of a bitmap of n, both counted from there: adjacent threads for adjacent positions. One
 * block. */
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

/* Positions of a chunk that one block adds. */
struct share {
    uint32_t chunk, number, begin, end; /* begin, end: in the chunk */
};

__device__ __forceinline__ void add_share(const sums_row *row, const body_row *body, const share *own,
                                          add_shared *s, int *nonfinite) {
    const body_state *p = body->progress;
    const uint32_t c = own->chunk;
    const uint8_t *bytes = body->bytes + body->offset[c], *values = body->bytes + p->n_index_bytes;
    const uint32_t first = body->begin[c], n_items = p->n_items;
    const share_begin *shares = row->n_shares > 1 ? body->shares + (size_t)c * row->n_shares : nullptr;
    const share_begin begin = shares ? shares[own->number] : share_begin();
    float *sums = row->sums + (size_t)c * row->chunk;
    auto add = [&](uint32_t position, uint32_t item) {
        add_to(&sums[position], row->scale, value_at(&row->format, values, (size_t)first + item, n_items),
               nonfinite);
    };
    if (p->bits == 0) {
        if (own->begin < own->end)
            each_bit(bytes + own->begin / 8, own->end - own->begin, s, [&](uint32_t position, uint32_t item) {
                add(own->begin + position, begin.item + item);
            });
        return;
    }
    const uint32_t n_codes = shares && own->number + 1 < row->n_shares
                                 ? shares[own->number + 1].code
                                 : load16(body->bytes + HEADER + (size_t)ENTRY * c + 2);
    /* Positions are listed first, so that adjacent threads read adjacent values. */
    uint32_t done = begin.item;
    auto list = [&](const code_step &here) {
        if (here.is_item) s->positions[here.item - done] = (uint16_t)(here.next - 1);
    };
    auto add_listed = [&](uint32_t end_item) {
        __syncthreads();
        for (uint32_t i = done + threadIdx.x; i < end_item; i += THREADS) add(s->positions[i - done], i);
        __syncthreads();
        done = end_item;
    };
    each_code(bytes, begin, n_codes, p->bits, &s->codes, list, add_listed);
}

/* Calls what(i) for each element of the share. One block. */
template <typename visitor>
__device__ __forceinline__ void each_element(const sums_row *row, const share *own, visitor what) {
    const size_t from = (size_t)own->chunk * row->chunk;
    for (size_t i = from + own->begin + threadIdx.x; i < from + own->end; i += THREADS) what(i);
}

/* A block per share of a chunk. Its sums stay in the L2 cache after the first access; the shared memory of some devices is too small
 * for them. */
static __global__ void __launch_bounds__(THREADS, 3)
    add_topk(work_of<sums_row> work, const body_row *bodies) {
    TAGC_SHARED(add_shared, shared);
    const sums_row *row = row_at<&sums_row::first_chunk>(&work, blockIdx.x);
    const uint32_t in_row = blockIdx.x - row->first_chunk, c = in_row / row->n_shares;
    const uint32_t n_bodies = bodies_of(row);
    int nonfinite = 0;
    if (!row->is_sparse || c >= row->n_chunks) return;
    const uint32_t number = in_row % row->n_shares, width = row->chunk / row->n_shares;
    const uint32_t n_here = chunk_elems(row->n, row->chunk, c);
    const share own = {c, number, smaller(number * width, n_here), smaller((number + 1) * width, n_here)};
    if (!row->adds) each_element(row, &own, [&](size_t i) { row->sums[i] = 0; });
    for (uint32_t b = 0; b < n_bodies; b++) {
        const body_row *body = &bodies[row->first_body + b];
        __syncthreads(); /* all threads have added the body before */
        if (body->is_plain)
            each_element(row, &own, [&](size_t i) { row->sums[i] += row->scale * plain_at(row, body, i); });
        else
            add_share(row, body, &own, &shared, &nonfinite);
    }
    if (nonfinite) atomicOr(&row->result->nonfinite, 1);
}

} // namespace tagc_cuda

#endif
