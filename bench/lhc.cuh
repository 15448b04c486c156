/* The peer "LHC": lossless homomorphic compression as it was published (Haoyu Li, Yuchen Xu, Jiayi Chen, Rohit Dwivedula, Wenfei Wu,
 * Keqiang He, Aditya Akella, Daehyeok Kim: Accelerating Distributed Deep Learning using Lossless Homomorphic Compression,
 * arXiv:2402.07529), written anew from its description. Of the bench alone: no part of the product.
 *
 * An array that is sparse already is cut into rows of 1024. Where it is not zero, an index of 4 bits per element has 1; the ranks add
 * their indexes up. Every row is then added, with a sign, to three rows of a sketch, which a hash of its number names, so
 * that elements keep their columns; each cell of the sketch has a count of its elements of the index. The
 * ranks add their sketches up. Peeling: an element that is alone in one of its cells is read there and taken out of all three, in
 * rounds, until a round finds none; the host reads after each how many it found. What is left is estimated as the median of its
 * three cells. As published, the lowest bit of a value says that the index has it. */
#ifndef BENCH_LHC_CUH
#define BENCH_LHC_CUH

#include "gpu/cuda/device.cuh"

namespace lhc {

using tagc_cuda::THREADS;
constexpr unsigned COLUMNS = 1024, CELLS = 3;

/* Bytes of an index of n elements; counters of a sketch, a byte each, in words. */
inline size_t index_bytes(size_t n) {
    return n / 2;
}
inline size_t counter_words(size_t n_sketch_rows) {
    return n_sketch_rows * COLUMNS / 4;
}

struct place {
    size_t row;
    float sign;
};

__device__ __forceinline__ place place_of(uint32_t row, unsigned which, uint32_t n_sketch_rows) {
    uint64_t z = (row + 1) * 0x9e3779b97f4a7c15u + (uint64_t)which * 0xd1b54a32d192ed03u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return {(size_t)(uint32_t)z % n_sketch_rows, z >> 63 ? -1.0f : 1.0f};
}

__device__ __forceinline__ void fence(void) {
#ifndef TAGC_CUDA_HARNESS
    __threadfence();
#endif
}

/* index (n / 2): two elements a byte. */
static __global__ void make_index(const float *x, uint8_t *index, size_t n_bytes) {
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n_bytes) index[i] = (uint8_t)((x[2 * i] != 0) + 16 * (x[2 * i + 1] != 0));
}

static __global__ void mark(float *x, const uint8_t *index, size_t n) {
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    const uint32_t is_in = (index[i / 2] >> 4 * (i % 2) & 15) != 0;
    x[i] = tagc_cuda::float_of((tagc_cuda::bits_of(x[i]) & ~1u) | is_in);
}

/* A block is a row. */
static __global__ void add_rows(const float *x, float *sketch, uint32_t *counters, uint32_t n_sketch_rows) {
    place at[CELLS];
    for (unsigned c = 0; c < CELLS; c++) at[c] = place_of(blockIdx.x, c, n_sketch_rows);
    for (unsigned column = threadIdx.x; column < COLUMNS; column += THREADS) {
        const float value = x[(size_t)blockIdx.x * COLUMNS + column];
        const uint32_t is_in = tagc_cuda::bits_of(value) & 1;
        for (unsigned c = 0; c < CELLS; c++) {
            const size_t cell = at[c].row * COLUMNS + column;
            atomicAdd(sketch + cell, at[c].sign * value);
            atomicAdd(counters + cell / 4, is_in << 8 * (cell % 4));
        }
    }
}

/* n_found: of this round. */
static __global__ void peel(float *x, float *sketch, uint32_t *counters, uint32_t n_sketch_rows,
                            uint32_t *n_found) {
    place at[CELLS];
    for (unsigned c = 0; c < CELLS; c++) at[c] = place_of(blockIdx.x, c, n_sketch_rows);
    for (unsigned column = threadIdx.x; column < COLUMNS; column += THREADS) {
        const size_t element = (size_t)blockIdx.x * COLUMNS + column;
        if (!(tagc_cuda::bits_of(x[element]) & 1)) continue;
        for (unsigned c = 0; c < CELLS; c++) {
            const size_t cell = at[c].row * COLUMNS + column;
            if ((atomicAdd(counters + cell / 4, 0u) >> 8 * (cell % 4) & 255) != 1) continue;
            fence(); /* a thread that counted down has taken its value out before */
            const float value =
                tagc_cuda::float_of(tagc_cuda::bits_of(atomicAdd(sketch + cell, 0.0f) * at[c].sign) & ~1u);
            x[element] = value;
            for (unsigned d = 0; d < CELLS; d++)
                atomicAdd(sketch + at[d].row * COLUMNS + column, -at[d].sign * value);
            fence();
            for (unsigned d = 0; d < CELLS; d++) {
                const size_t other = at[d].row * COLUMNS + column;
                atomicAdd(counters + other / 4, 0u - (1u << 8 * (other % 4)));
            }
            atomicAdd(n_found, 1u);
            break;
        }
    }
}

/* n_estimated: of all. */
static __global__ void estimate(float *x, float *sketch, uint32_t n_sketch_rows, uint32_t *n_estimated) {
    place at[CELLS];
    for (unsigned c = 0; c < CELLS; c++) at[c] = place_of(blockIdx.x, c, n_sketch_rows);
    for (unsigned column = threadIdx.x; column < COLUMNS; column += THREADS) {
        const size_t element = (size_t)blockIdx.x * COLUMNS + column;
        if (!(tagc_cuda::bits_of(x[element]) & 1)) continue;
        float v[CELLS];
        for (unsigned c = 0; c < CELLS; c++) v[c] = sketch[at[c].row * COLUMNS + column] * at[c].sign;
        const float median = tagc_cuda::larger(tagc_cuda::smaller(v[0], v[1]),
                                               tagc_cuda::smaller(tagc_cuda::larger(v[0], v[1]), v[2]));
        x[element] = tagc_cuda::float_of(tagc_cuda::bits_of(median) & ~1u);
        atomicAdd(n_estimated, 1u);
    }
}

} // namespace lhc

#endif
