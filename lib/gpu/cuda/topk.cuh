/* Makes bodies of code topk from the threshold of each row:
 *
 *   count    counts the sent elements of each chunk; the row's last block distributes ties, and places in the list of sent
 *            elements
 *   gather   writes a bitmap per chunk, and indices and values in order, and counts the codes of each width; the row's last
 *            block chooses the best width, as the processor does, and writes the start of the body
 *   emit     writes codes of positions, and values with their scales; the residual gets the loss
 *
 * In a residual of integers, a value that fits into the exponent of its block is one code more: candidates that were not sent get theirs
 * in `gather`, losses in `emit`, by the last of the blocks that write for their chunk. A block of the residual with a value that does not fit
 * is a misfit, and is made once more from the addends, as are all blocks of a row that is dense. Either way it is what the processor makes of
 * all its values. */
#ifndef TAGC_GPU_CUDA_TOPK_CUH
#define TAGC_GPU_CUDA_TOPK_CUH

#include "gpu/cuda/select.cuh"
#include "gpu/cuda/values.cuh"

namespace tagc_cuda {

constexpr unsigned CHUNK_WORDS = MAX_CHUNK / 32, HEADER = 8, ENTRY = 4;

/* Whether all elements, zeros too, are sent. */
__device__ __forceinline__ int keeps_all(const topk_row *row) {
    return row->k == row->n;
}

/* ---- count ---- */

struct count_shared {
    scan_shared<uint32_t> scan;
    uint32_t n_above, n_ties;
    unsigned is_last;
};

/* In the row's last block: keeps the ties with the lowest indices, so those of the first chunks. */
__device__ __forceinline__ void share_out(const topk_row *row, count_shared *s) {
    state *p = row->progress;
    uint32_t n_above = 0, n_out = 0, total, n_ties;
    for (uint32_t c = threadIdx.x; c < row->n_chunks; c += THREADS) n_above += row->chunks[c].n_above;
    n_above = block_sum(&s->scan, n_above);
    uint32_t n_left = p->threshold && n_above < row->k ? row->k - n_above : 0; /* zeros are never sent */
    for (uint32_t from = 0; from < row->n_chunks; from += THREADS) {
        const uint32_t c = from + threadIdx.x;
        chunk_state *chunk = &row->chunks[c < row->n_chunks ? c : 0];
        const uint32_t ties = c < row->n_chunks ? chunk->n_ties : 0,
                       above = c < row->n_chunks ? chunk->n_above : 0;
        const uint32_t before = block_before(&s->scan, ties, &n_ties);
        const uint32_t sent = before < n_left ? smaller(ties, n_left - before) : 0;
        const uint32_t begin = n_out + block_before(&s->scan, above + sent, &total);
        if (c < row->n_chunks) {
            chunk->n_ties_sent = sent;
            chunk->begin = begin;
        }
        n_left -= smaller(n_left, n_ties);
        n_out += total;
    }
    if (threadIdx.x == 0) p->n_sent = n_out;
}

/* A block per chunk. */
static __global__ void __launch_bounds__(THREADS) count_rows(work_of<topk_row> work) {
    TAGC_SHARED(count_shared, shared);
    count_shared *s = &shared;
    const chunk_of c = chunk_of_block(&work, blockIdx.x);
    state *p = c.row->progress;
    const uint32_t threshold = p->threshold;
    uint32_t n_above = 0, n_ties = 0;
    int nonfinite = 0;
    each_candidate(&c, [&](uint32_t, float value) {
        uint32_t bits = magnitude(value);
        n_above += bits > threshold;
        n_ties += bits == threshold;
        nonfinite |= bits >= INF_BITS;
    });
    if (nonfinite) atomicOr(&p->nonfinite, 1);
    n_above = block_sum(&s->scan, n_above);
    n_ties = block_sum(&s->scan, n_ties);
    if (threadIdx.x == 0) {
        c.row->chunks[c.index].n_above = keeps_all(c.row) ? c.n : n_above;
        c.row->chunks[c.index].n_ties = n_ties;
        c.row->chunks[c.index].ticket = 0;
        for (unsigned i = 0; i < (N_WIDTHS + 1) / 2; i++) c.row->chunks[c.index].codes[i] = 0;
    }
    if (is_last_block(&p->tickets[4], c.row->n_grid_chunks, &s->is_last)) share_out(c.row, s);
}

/* ---- gather ---- */

struct gather_shared {
    uint32_t sent[CHUNK_WORDS], ties[CHUNK_WORDS];
    uint32_t before[CHUNK_WORDS]; /* items in front of each word */
    scan_shared<uint32_t> scan;
    scan_shared<unsigned long long> wide;
    uint32_t codes[(N_WIDTHS + 1) / 2], misfits[MISFIT_WORDS];
    unsigned long long sampled[N_WIDTHS];
    int bits;
    unsigned is_last;
};

/* The adjacent words of the chunk that this thread handles. */
struct words {
    uint32_t begin, end;
};

__device__ __forceinline__ words words_of(uint32_t n_words) {
    const uint32_t each = (n_words + THREADS - 1) / THREADS;
    words w;
    w.begin = smaller(threadIdx.x * each, n_words);
    w.end = smaller(w.begin + each, n_words);
    return w;
}

/* Keeps the first n_sent of the ties. One block. */
__device__ __forceinline__ void cut_ties(gather_shared *s, words w, uint32_t n_sent) {
    uint32_t n = 0, total;
    for (uint32_t i = w.begin; i < w.end; i++) n += (uint32_t)__popc(s->ties[i]);
    uint32_t before = block_before(&s->scan, n, &total);
    for (uint32_t i = w.begin; i < w.end; i++) {
        uint32_t word = s->ties[i];
        while (word && before < n_sent) {
            s->sent[i] |= word & (0u - word);
            word &= word - 1;
            before++;
        }
    }
}

/* Counts the codes of this thread's items at each width. last: the position of the item before them, plus 1. */
__device__ __forceinline__ void count_codes(const gather_shared *s, words w, uint32_t last, uint32_t *codes) {
    for (uint32_t i = w.begin; i < w.end; i++)
        for (uint32_t word = s->sent[i]; word; word &= word - 1) {
            const uint32_t position = i * 32 + (uint32_t)__ffs((int)word) - 1, gap = position - last;
            last = position + 1;
            TAGC_UNROLL
            for (unsigned b = 0; b < N_WIDTHS; b++) codes[b / 2] += (1 + gap / ((4u << b) - 1)) << b % 2 * 16;
        }
}

__device__ __forceinline__ uint32_t codes_of(const chunk_state *chunk, int bits) {
    const unsigned b = (unsigned)bits - MIN_BITS;
    return chunk->codes[b / 2] >> b % 2 * 16 & 0xffffu;
}

__device__ __forceinline__ uint32_t code_bytes(uint32_t n_codes, int bits) {
    return (n_codes * (uint32_t)bits + 7) / 8;
}

/* As in gaps.c: starts from a guess and moves while the bytes of a sample of chunks decrease. Thread 0. */
__device__ __forceinline__ int choose_bits(const gather_shared *s, unsigned long long n_items,
                                           unsigned long long n) {
    int bits = (int)MIN_BITS;
    while (bits < (int)MAX_BITS && (n_items << bits) < 3 * n) bits++;
    unsigned long long best = s->sampled[bits - (int)MIN_BITS];
    for (int step = 1; step >= -1; step -= 2)
        for (int up; (up = bits + step) >= (int)MIN_BITS && up <= (int)MAX_BITS; bits = up) {
            unsigned long long next = s->sampled[up - (int)MIN_BITS];
            if (next >= best) break;
            best = next;
        }
    return bits;
}

__device__ __forceinline__ unsigned long long all_bytes(const topk_row *row, gather_shared *s, int bits) {
    unsigned long long n = 0;
    for (uint32_t c = threadIdx.x; c < row->n_chunks; c += THREADS)
        n += code_bytes(codes_of(&row->chunks[c], bits), bits);
    return block_sum(&s->wide, n);
}

/* Width of codes, 0 for a bitmap. One block. */
__device__ __forceinline__ int choose_form(const topk_row *row, gather_shared *s) {
    const uint32_t stride = 1 + row->n_chunks / 64;
    for (unsigned b = warp_of(); b < N_WIDTHS; b += WARPS) {
        const int bits = (int)(b + MIN_BITS);
        unsigned long long n = 0;
        for (uint32_t c = lane_of() * stride; c < row->n_chunks; c += LANES * stride)
            n += code_bytes(codes_of(&row->chunks[c], bits), bits);
        n = warp_sum(n);
        if (lane_of() == 0) s->sampled[b] = n;
    }
    __syncthreads();
    if (threadIdx.x == 0) s->bits = choose_bits(s, row->progress->n_sent, row->n);
    __syncthreads();
    int bits = s->bits;
    unsigned long long n_bytes = all_bytes(row, s, bits), bitmap = ((unsigned long long)row->n + 7) / 8;
    if (n_bytes > row->safest_bytes) { /* the sample was misleading */
        bits = row->safest_bits;
        n_bytes = all_bytes(row, s, bits);
    }
    return bitmap <= n_bytes + n_bytes / 8 ? 0 : bits;
}

__device__ __forceinline__ uint32_t chunk_elems(uint32_t n, uint32_t chunk, uint32_t c) {
    return (uint32_t)smaller<size_t>(n - (size_t)c * chunk, chunk);
}

/* The row's last block. */
__device__ __forceinline__ void write_front(const topk_row *row, gather_shared *s) {
    state *p = row->progress;
    const uint32_t n_sent = p->n_sent;
    const int bits = choose_form(row, s);
    unsigned long long at = HEADER + (unsigned long long)ENTRY * row->n_chunks, total;
    for (uint32_t from = 0; from < row->n_chunks; from += THREADS) {
        const uint32_t c = from + threadIdx.x;
        unsigned long long n_bytes = 0;
        uint32_t n_codes = 0;
        if (c < row->n_chunks) {
            if (bits) n_codes = codes_of(&row->chunks[c], bits);
            n_bytes = bits ? code_bytes(n_codes, bits) : (chunk_elems(row->n, row->chunk, c) + 7) / 8;
        }
        const unsigned long long before = block_before(&s->wide, n_bytes, &total);
        if (c < row->n_chunks) {
            row->chunks[c].offset = at + before;
            store16(row->body + HEADER + (size_t)ENTRY * c,
                    row->chunks[c].n_above + row->chunks[c].n_ties_sent);
            store16(row->body + HEADER + (size_t)ENTRY * c + 2, n_codes);
        }
        at += total;
    }
    if (threadIdx.x != 0) return;
    store32(row->body, n_sent);
    store32(row->body + 4, (uint32_t)bits);
    p->bits = bits;
    p->n_index_bytes = at;
    tagc_batch_result result = {};
    result.encoded.n_sent = n_sent;
    result.encoded.n_index_bytes = at;
    result.encoded.n_bytes = at + values_bytes(&row->format, n_sent);
    *row->result = result;
}

/* The bitmap of the chunk's sent elements, in shared memory, and the number of items before each of its words. */
__device__ __forceinline__ void make_bitmap(const chunk_of *c, gather_shared *s, words w, uint32_t n_words) {
    const topk_row *row = c->row;
    const uint32_t threshold = row->progress->threshold, n_ties_sent = row->chunks[c->index].n_ties_sent;
    const int all = keeps_all(row);
    uint32_t n = 0, total;
    for (uint32_t i = threadIdx.x; i < n_words; i += THREADS) s->sent[i] = s->ties[i] = 0;
    if (threadIdx.x < MISFIT_WORDS) s->misfits[threadIdx.x] = 0;
    __syncthreads();
    each_candidate(c, [&](uint32_t position, float value) {
        const uint32_t bits = magnitude(value), bit = 1u << position % 32;
        if (bits > threshold || all)
            atomicOr(&s->sent[position / 32], bit);
        else if (bits == threshold && n_ties_sent)
            atomicOr(&s->ties[position / 32], bit);
    });
    __syncthreads();
    if (n_ties_sent) {
        cut_ties(s, w, n_ties_sent);
        __syncthreads();
    }
    for (uint32_t i = w.begin; i < w.end; i++) n += (uint32_t)__popc(s->sent[i]);
    uint32_t before = block_before(&s->scan, n, &total);
    for (uint32_t i = w.begin; i < w.end; i++) {
        s->before[i] = before;
        before += (uint32_t)__popc(s->sent[i]);
    }
    __syncthreads();
}

/* Puts a value into a residual of integers, or notes its block as a misfit. at: the position in the chunk. */
__device__ __forceinline__ void put_or_note(const chunk_of *c, uint32_t at, float value, uint32_t *misfits) {
    const uint32_t block = at / TAGC_RESIDUAL_BLOCK;
    if (!put_code(&c->row->acc, (uint32_t)c->begin + at, value))
        atomicOr(&misfits[block / 32], 1u << block % 32);
}

/* A block per chunk. */
static __global__ void __launch_bounds__(THREADS) gather_rows(work_of<topk_row> work) {
    TAGC_SHARED(gather_shared, shared);
    gather_shared *s = &shared;
    const chunk_of c = chunk_of_block(&work, blockIdx.x);
    const topk_row *row = c.row;
    if (row->progress->nonfinite) { /* the same in all blocks of the row */
        if (c.index == 0 && threadIdx.x == 0) {
            tagc_batch_result result = {};
            result.encoded.nonfinite = 1;
            *row->result = result;
        }
        return;
    }
    const uint32_t n_words = (c.n + 31) / 32, first_item = row->chunks[c.index].begin;
    const words w = words_of(n_words);
    make_bitmap(&c, s, w, n_words);
    uint32_t *bitmap = row->bitmap + c.begin / 32;
    for (uint32_t i = threadIdx.x; i < n_words; i += THREADS) bitmap[i] = s->sent[i];
    const int puts = has_exponents(row->acc.residual_format) && !row->progress->is_dense;
    each_candidate(&c, [&](uint32_t position, float value) {
        const uint32_t word = s->sent[position / 32], bit = 1u << position % 32;
        if (!(word & bit)) {
            if (puts) put_or_note(&c, position, value, s->misfits);
            return;
        }
        const uint32_t item = first_item + s->before[position / 32] + (uint32_t)__popc(word & (bit - 1));
        row->indices[item] = (uint32_t)(c.begin + position);
        row->values[item] = value;
    });
    uint32_t codes[(N_WIDTHS + 1) / 2] = {}, last = 0;
    for (uint32_t i = w.end; i > w.begin && last == 0; i--)
        if (s->sent[i - 1]) last = i * 32 - (uint32_t)__clz((int)s->sent[i - 1]);
    if (threadIdx.x < (N_WIDTHS + 1) / 2) s->codes[threadIdx.x] = 0;
    last = block_largest_before(&s->scan, last);
    count_codes(s, w, last, codes);
    for (unsigned i = 0; i < (N_WIDTHS + 1) / 2; i++) {
        codes[i] = warp_sum(codes[i]);
        if (lane_of() == 0 && codes[i]) atomicAdd(&s->codes[i], codes[i]);
    }
    __syncthreads();
    if (puts && threadIdx.x < MISFIT_WORDS)
        row->misfits[c.index * MISFIT_WORDS + threadIdx.x] = s->misfits[threadIdx.x];
    if (threadIdx.x < (N_WIDTHS + 1) / 2) row->chunks[c.index].codes[threadIdx.x] = s->codes[threadIdx.x];
    if (is_last_block(&row->progress->tickets[5], row->n_grid_chunks, &s->is_last)) write_front(row, s);
}

/* ---- emit ---- */

constexpr unsigned WINDOW_WORDS = 2048;

struct emit_shared {
    uint32_t sent[CHUNK_WORDS];
    union {
        uint32_t window[WINDOW_WORDS];            /* bits of the body, before they are written */
        float values[WARPS][TAGC_RESIDUAL_BLOCK]; /* of a block of the residual, made again */
    };
    scan_shared<uint32_t> scan;
    uint32_t misfits[MISFIT_WORDS];
    unsigned is_last;
};

/* Sets bits [at, at + n_bits) of the stream to the lowest bits of value, but only inside the window that begins at `from`. */
__device__ __forceinline__ void put_bits(emit_shared *s, uint32_t from, uint32_t at, uint32_t value,
                                         int n_bits) {
    const uint32_t end = from + WINDOW_WORDS * 32, first = at / 32 * 32;
    const uint64_t shifted = (uint64_t)value << at % 32;
    if (first >= from && first < end && (uint32_t)shifted)
        atomicOr(&s->window[(first - from) / 32], (uint32_t)shifted);
    if (first + 32 >= from && first + 32 < end && shifted >> 32)
        atomicOr(&s->window[(first + 32 - from) / 32], (uint32_t)(shifted >> 32));
    (void)n_bits;
}

/* Writes the codes of this thread's items, from code `at` on, but only inside the window. */
__device__ __forceinline__ void put_codes(emit_shared *s, words w, uint32_t last, uint32_t at, int bits,
                                          uint32_t from) {
    const uint32_t escape = (1u << bits) - 1, end = from + WINDOW_WORDS * 32;
    for (uint32_t i = w.begin; i < w.end; i++)
        for (uint32_t word = s->sent[i]; word; word &= word - 1) {
            const uint32_t position = i * 32 + (uint32_t)__ffs((int)word) - 1, gap = position - last;
            const uint32_t n_escapes = gap / escape;
            last = position + 1;
            if ((at + n_escapes + 1) * (uint32_t)bits > from && at * (uint32_t)bits < end) {
                for (uint32_t e = 0; e < n_escapes; e++)
                    put_bits(s, from, (at + e) * (uint32_t)bits, escape, bits);
                put_bits(s, from, (at + n_escapes) * (uint32_t)bits, gap - n_escapes * escape, bits);
            }
            at += n_escapes + 1;
        }
}

/* Writes the codes of a chunk, window after window; one is usual. One block. */
__device__ __forceinline__ void write_codes(emit_shared *s, words w, int bits, uint8_t *to) {
    const uint32_t escape = (1u << bits) - 1;
    uint32_t last = 0, n_codes = 0, total;
    for (uint32_t i = w.end; i > w.begin && last == 0; i--)
        if (s->sent[i - 1]) last = i * 32 - (uint32_t)__clz((int)s->sent[i - 1]);
    last = block_largest_before(&s->scan, last);
    uint32_t next = last;
    for (uint32_t i = w.begin; i < w.end; i++)
        for (uint32_t word = s->sent[i]; word; word &= word - 1) {
            const uint32_t position = i * 32 + (uint32_t)__ffs((int)word) - 1;
            n_codes += 1 + (position - next) / escape;
            next = position + 1;
        }
    const uint32_t at = block_before(&s->scan, n_codes, &total), n_bits = total * (uint32_t)bits;
    for (uint32_t from = 0; from < n_bits; from += WINDOW_WORDS * 32) {
        const uint32_t n_here = smaller(n_bits - from, WINDOW_WORDS * 32);
        for (uint32_t i = threadIdx.x; i < (n_here + 31) / 32; i += THREADS) s->window[i] = 0;
        __syncthreads();
        put_codes(s, w, last, at, bits, from);
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < (n_here + 7) / 8; i += THREADS)
            to[from / 8 + i] = (uint8_t)(s->window[i / 4] >> i % 4 * 8);
        __syncthreads();
    }
}

__device__ __forceinline__ void emit_positions(const chunk_of *c, emit_shared *s) {
    const topk_row *row = c->row;
    const uint32_t n_words = (c->n + 31) / 32;
    const int bits = row->progress->bits;
    const uint32_t *bitmap = row->bitmap + c->begin / 32;
    uint8_t *to = row->body + row->chunks[c->index].offset;
    if (bits == 0) {
        for (uint32_t i = threadIdx.x; i < (c->n + 7) / 8; i += THREADS)
            to[i] = (uint8_t)(bitmap[i / 4] >> i % 4 * 8);
        return;
    }
    for (uint32_t i = threadIdx.x; i < n_words; i += THREADS) s->sent[i] = bitmap[i];
    __syncthreads();
    write_codes(s, words_of(n_words), bits, to);
}

constexpr unsigned TASK_BLOCKS = THREADS / HALF; /* blocks of values per block of threads */

/* The number of values of a task. */
__host__ __device__ __forceinline__ uint32_t task_values(const value_format *f) {
    return TASK_BLOCKS * (has_scales(f->values) ? (uint32_t)f->block : 128u);
}

__device__ __forceinline__ void leave_error(const topk_row *row, uint32_t item, float error) {
    if (has_exponents(row->acc.residual_format))
        row->values[item] = error; /* for settle_chunk */
    else
        put_plain(&row->acc, row->indices[item], error);
}

__device__ __forceinline__ void emit_values(const topk_row *row, uint32_t task) {
    const value_format *f = &row->format;
    const uint32_t n = row->progress->n_sent, each = task_values(f);
    if ((size_t)task * each >= n) return;
    uint8_t *bytes = row->body + row->progress->n_index_bytes;
    const float *values = row->values;
    const uint32_t first = task * each;
    if (!has_scales(f->values)) {
        const uint32_t end = smaller(n - first, each) + first;
        for (uint32_t i = first + threadIdx.x; i < end; i += THREADS) {
            const float x = values[i];
            if (f->values == TAGC_FORMAT_FP32) {
                store32(bytes + 4 * (size_t)i, bits_of(x));
                leave_error(row, i, -0.0f);
            } else {
                const uint32_t half = half_of(x);
                store16(bytes + 2 * (size_t)i, half);
                leave_error(row, i, lost(x, float_of(half << 16)));
            }
        }
        return;
    }
    const uint32_t block = (uint32_t)f->block, index = threadIdx.x / HALF,
                   lower = first + index / 2 * 2 * block;
    const uint32_t at = first + index * block;
    if (lower >= n) return; /* a whole warp */
    auto get = [&](unsigned i) { return values[at + i]; };
    value_block<decltype(get)> here = {at < n ? smaller(n - at, block) : 0,
                                       (smaller(n - lower, block) + HALF - 1) / HALF, get};
    encode_block(f, &here, at, bytes + 2 * ((size_t)at >> f->shift),
                 bytes + scales_bytes(f, n) + (size_t)at * (size_t)bits_per_value(f->values) / 8,
                 [&](unsigned i, float, float error) { leave_error(row, at + i, error); });
}

/* ---- losses in a residual of integers ---- */

/* The first of the items [first, end) whose index is `at` or more; end if there is none. */
__device__ __forceinline__ uint32_t item_from(const uint32_t *indices, uint32_t first, uint32_t end,
                                              size_t at) {
    while (first < end) {
        const uint32_t middle = first + (end - first) / 2;
        if (indices[middle] < at)
            first = middle + 1;
        else
            end = middle;
    }
    return first;
}

/* Writes a whole block of the residual, of which `at` is the first value. room: (TAGC_RESIDUAL_BLOCK) of this warp alone. */
__device__ __forceinline__ void make_again(const topk_row *row, size_t at, uint32_t first, uint32_t end,
                                           float *room) {
    const acc_arrays *a = &row->acc;
    const int aligned = is_aligned(a);
    const unsigned own = lane_of() * QUAD;
    const raw_quad gradient = load_gradient(a, at + own, aligned),
                   residual = load_residual(a, at + own, aligned);
    for (unsigned j = 0; j < QUAD; j++)
        room[own + j] =
            value_of(a->gradient_format, &gradient, j) + value_of(a->residual_format, &residual, j);
    __syncwarp();
    for (uint32_t i = item_from(row->indices, first, end, at) + lane_of();
         i < end && row->indices[i] < at + TAGC_RESIDUAL_BLOCK; i += LANES)
        room[row->indices[i] - at] = row->values[i];
    __syncwarp();
    write_residual(a, at + own, aligned, room + own);
    __syncwarp();
}

/* One block. */
__device__ __forceinline__ void settle_chunk(const chunk_of *c, uint32_t n_items, emit_shared *s) {
    const topk_row *row = c->row;
    const int is_dense = row->progress->is_dense;
    const uint32_t first = row->chunks[c->index].begin, end = first + n_items;
    if (threadIdx.x < MISFIT_WORDS)
        s->misfits[threadIdx.x] = is_dense ? ALL : row->misfits[c->index * MISFIT_WORDS + threadIdx.x];
    __syncthreads();
    for (uint32_t i = first + threadIdx.x; i < end && !is_dense; i += THREADS)
        put_or_note(c, row->indices[i] - (uint32_t)c->begin, row->values[i], s->misfits);
    __syncthreads();
    for (uint32_t b = warp_of(); b * TAGC_RESIDUAL_BLOCK < c->n; b += WARPS)
        if (s->misfits[b / 32] >> b % 32 & 1)
            make_again(row, c->begin + (size_t)b * TAGC_RESIDUAL_BLOCK, first, end, s->values[warp_of()]);
}

/* Called by each block that writes for the chunk: its own, and those of tasks that have values of it. */
__device__ __forceinline__ void settle_if_last(const chunk_of *c, emit_shared *s) {
    chunk_state *chunk = &c->row->chunks[c->index];
    const uint32_t first = chunk->begin, n_items = chunk->n_above + chunk->n_ties_sent;
    const uint32_t each = task_values(&c->row->format);
    const unsigned n_tasks = n_items ? (first + n_items - 1) / each - first / each + 1 : 0;
    if (is_last_block(&chunk->ticket, 1 + n_tasks, &s->is_last)) settle_chunk(c, n_items, s);
}

/* The last chunk whose items begin at `item` or before. */
__device__ __forceinline__ uint32_t chunk_of_item(const topk_row *row, uint32_t item) {
    uint32_t low = 0, high = row->n_chunks; /* low begins at or before it, high does not */
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        if (row->chunks[middle].begin <= item)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Of the chunks that a task has values of. */
__device__ __forceinline__ void settle_task(const topk_row *row, uint32_t task, emit_shared *s) {
    const uint32_t n = row->progress->n_sent, each = task_values(&row->format);
    if ((size_t)task * each >= n) return;
    const uint32_t first = task * each, end = first + smaller(n - first, each);
    for (uint32_t i = chunk_of_item(row, first); i < row->n_chunks && row->chunks[i].begin < end; i++) {
        const chunk_of c = chunk_at(row, i);
        if (row->chunks[i].n_above + row->chunks[i].n_ties_sent > 0) settle_if_last(&c, s);
    }
}

/* A block per task of values, then one per chunk: these are the last that write for their chunks, as a rule, and there is one for each.
 * The bounds allow 64 registers: with fewer, as it likes for some devices, ptxas spills. */
static __global__ void __launch_bounds__(THREADS, 4)
    emit_rows(work_of<topk_row> tasks, unsigned n_tasks, work_of<topk_row> chunks) {
    TAGC_SHARED(emit_shared, shared);
    emit_shared *s = &shared;
    if (blockIdx.x < n_tasks) {
        const topk_row *row = row_at<&topk_row::first_value_task>(&tasks, blockIdx.x);
        const uint32_t task = blockIdx.x - row->first_value_task;
        if (row->progress->nonfinite) return;
        emit_values(row, task);
        if (has_exponents(row->acc.residual_format)) settle_task(row, task, s);
        return;
    }
    const chunk_of c = chunk_of_block(&chunks, blockIdx.x - n_tasks);
    if (c.row->progress->nonfinite || c.n == 0) return;
    emit_positions(&c, s);
    if (has_exponents(c.row->acc.residual_format)) settle_if_last(&c, s);
}

} // namespace tagc_cuda

#endif
