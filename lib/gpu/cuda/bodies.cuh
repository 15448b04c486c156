/* Received bodies of code topk: checks them, and adds them to sums.
 *
 *   index   finds where each chunk's items and bits begin in a body, and checks its header and chunk table
 *   check   checks codes, scales and values
 *   add     adds the bodies of a row, one after the other, chunk by chunk
 *
 * Until check has passed, a body may hold any bytes: nothing outside of n_bytes is read. */
#ifndef TAGC_GPU_CUDA_BODIES_CUH
#define TAGC_GPU_CUDA_BODIES_CUH

#include "gpu/cuda/topk.cuh"

namespace tagc_cuda {

/* Orders damages so that atomicMax keeps the one that the processor would report first. */
__device__ __forceinline__ int damage_rank(tagc_damage damage) {
    return damage == TAGC_DAMAGE_NONE ? 0 : 4 - (int)damage;
}

struct index_shared {
    scan_shared<unsigned long long> items, bytes;
    scan_shared<int> bad;
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

/* Whether the header is that of a body of this row. */
__device__ __forceinline__ int is_header_sound(const sums_row *row, const body_row *body) {
    if (length_of(body) < HEADER + (unsigned long long)ENTRY * row->n_chunks) return 0;
    const int bits = body->bytes[4];
    if (load32(body->bytes) > row->k || bits > (int)MAX_BITS || bits == 1) return 0;
    return !(body->bytes[5] | body->bytes[6] | body->bytes[7]);
}

/* Finds the starts of chunks. Returns 1 in all threads if the table agrees with the length, else 0. One block. */
__device__ __forceinline__ int index_chunks(const sums_row *row, const body_row *body, index_shared *s,
                                            unsigned long long *n_index_bytes) {
    const int bits = body->bytes[4];
    const uint32_t n_chunks = row->n_chunks;
    unsigned long long at = HEADER + (unsigned long long)ENTRY * n_chunks, n_items = 0, total;
    int bad = 0;
    for (uint32_t from = 0; from < n_chunks; from += THREADS) {
        const uint32_t c = from + threadIdx.x;
        const int is_here = c < n_chunks;
        const uint8_t *entry = body->bytes + HEADER + (size_t)ENTRY * c;
        const unsigned long long items = is_here ? load16(entry) : 0;
        const unsigned long long n_bytes = is_here ? bytes_of_chunk(row, body, bits, c) : 0;
        if (is_here && bits == 0 && load16(entry + 2)) bad = 1;
        const unsigned long long items_before = block_before(&s->items, items, &total);
        if (is_here) body->begin[c] = (uint32_t)(n_items + items_before);
        n_items += total;
        const unsigned long long bytes_before = block_before(&s->bytes, n_bytes, &total);
        if (is_here) body->offset[c] = at + bytes_before;
        at += total;
    }
    *n_index_bytes = at;
    return block_sum(&s->bad, bad) == 0 && at <= length_of(body) && n_items == load32(body->bytes);
}

/* A block per body. checks: 0 if bodies are known to be sound. */
static __global__ void __launch_bounds__(THREADS)
    index_bodies(const sums_row *rows, const body_row *bodies, int checks) {
    TAGC_SHARED(index_shared, shared);
    const body_row *body = &bodies[blockIdx.x];
    const sums_row *row = &rows[body->row];
    if (blockIdx.x - row->first_body >= bodies_of(row)) return; /* an earlier run had more bodies */
    if (body->is_plain) return;
    body_state found = {};
    tagc_damage damage = TAGC_DAMAGE_NONE;
    if (!row->is_sparse) {
        found.n_items = row->n;
        if (checks && length_of(body) != values_bytes(&row->format, row->n)) damage = TAGC_DAMAGE_LENGTH;
    } else if (checks && !is_header_sound(row, body)) {
        damage = TAGC_DAMAGE_POSITIONS;
    } else if (!index_chunks(row, body, &shared, &found.n_index_bytes) && checks) {
        damage = TAGC_DAMAGE_POSITIONS;
    } else {
        found.n_items = load32(body->bytes);
        found.bits = body->bytes[4];
        if (checks && length_of(body) != found.n_index_bytes + values_bytes(&row->format, found.n_items))
            damage = TAGC_DAMAGE_LENGTH;
    }
    found.front_damage = found.damage = damage_rank(damage);
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
 * up to number n have been visited since it was called last, at most MOST_VISITED; returns in all threads how many items there are, and
 * where the last code ends. One block. */
template <typename visitor, typename follower>
__device__ __forceinline__ void each_code(const uint8_t *bytes, uint32_t n_codes, int bits, codes_shared *s,
                                          uint32_t *n_items, uint32_t *end, visitor visit, follower after) {
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
    *n_items = item;
    *end = position;
}

/* ---- check ---- */

/* Counts the items of a chunk's bitmap; sets *bad to 1 in threads that find bits past its end. */
__device__ __forceinline__ uint32_t count_bits(const uint8_t *bytes, uint32_t n, int *bad) {
    uint32_t n_items = 0;
    for (uint32_t i = threadIdx.x; i < (n + 7) / 8; i += THREADS) {
        n_items += (uint32_t)__popc(bytes[i]);
        if (i == n / 8) *bad |= bytes[i] >> n % 8 != 0;
    }
    return n_items;
}

struct check_shared {
    codes_shared codes;
    scan_shared<uint32_t> scan;
    unsigned is_last;
};

/* Whether the chunk's codes mark as many items as its entry in the table, all of them inside the chunk. One block. */
__device__ __forceinline__ int are_codes_sound(const sums_row *row, const body_row *body, uint32_t c,
                                               check_shared *s) {
    const uint32_t n = chunk_elems(row->n, row->chunk, c);
    const uint8_t *entry = body->bytes + HEADER + (size_t)ENTRY * c, *bytes = body->bytes + body->offset[c];
    uint32_t n_items, end = 0;
    int bad = 0;
    if (body->progress->bits == 0)
        n_items = block_sum(&s->scan, count_bits(bytes, n, &bad));
    else
        each_code(
            bytes, load16(entry + 2), body->progress->bits, &s->codes, &n_items, &end,
            [](uint32_t, uint32_t) {}, [](uint32_t) {});
    bad = (int)block_sum(&s->scan, (uint32_t)bad);
    return !bad && end <= n && n_items == load16(entry);
}

/* A block per chunk of each body; it checks a part of the values, too. Rows have one body each. */
static __global__ void __launch_bounds__(THREADS)
    check_bodies(work_of<sums_row> work, const body_row *bodies) {
    TAGC_SHARED(check_shared, shared);
    check_shared *s = &shared;
    const sums_row *row = row_at<&sums_row::first_chunk>(&work, blockIdx.x);
    const body_row *body = &bodies[row->first_body];
    const uint32_t c = blockIdx.x - row->first_chunk;
    body_state *p = body->progress;
    const int front = p->front_damage;
    int damage = 0;
    if (front < damage_rank(TAGC_DAMAGE_POSITIONS)) {
        if (row->is_sparse && c < row->n_chunks && !are_codes_sound(row, body, c, s))
            damage = damage_rank(TAGC_DAMAGE_POSITIONS);
        else if (front == 0 && values_damaged(&row->format, body->bytes + p->n_index_bytes, p->n_items, c,
                                              row->n_grid_chunks))
            damage = damage_rank(TAGC_DAMAGE_VALUES);
    }
    if (damage) atomicMax(&p->damage, damage);
    if (!is_last_block(&p->ticket, row->n_grid_chunks, &s->is_last) || threadIdx.x != 0) return;
    tagc_batch_result result = {};
    result.damage = p->damage ? 4 - p->damage : 0;
    *row->result = result;
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
    uint32_t n, end;
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
    each_code(bytes, load16(body->bytes + HEADER + (size_t)ENTRY * c + 2), p->bits, &s->codes, &n, &end, list,
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
