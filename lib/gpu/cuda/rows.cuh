/* The rows of a batch as kernels see them, and the memory that they share. batch.cu fills the rows and copies them to the
 * device. Kernels compute everything else there, anew in every run. */
#ifndef TAGC_GPU_CUDA_ROWS_CUH
#define TAGC_GPU_CUDA_ROWS_CUH

#include "gpu/cuda/device.cuh"
extern "C" {
#include "codec/residual.h"
#include "exchange/device_memory.h"
#include "gpu/maker.h"
}

namespace tagc_cuda {

constexpr unsigned SPAN = 512;          /* elements that a warp streams at a time; chunks are whole spans */
constexpr unsigned TILE = WARPS * SPAN; /* elements that a block streams */
#ifndef TAGC_CUDA_LINES
#define TAGC_CUDA_LINES TAGC_SAMPLE_LINES /* tests use fewer, so that small rows are sampled, too */
#endif
constexpr unsigned LINE = TAGC_SAMPLE_LINE,
                   N_LINES = TAGC_CUDA_LINES; /* of the sample: elements per line, lines */
constexpr unsigned RADIX_BITS = 11, N_RADIX = 1u << RADIX_BITS;
constexpr unsigned MAX_CHUNK = 32768; /* elements */
constexpr unsigned MIN_BITS = 2, MAX_BITS = 15,
                   N_WIDTHS = MAX_BITS - MIN_BITS + 1;                  /* of codes of positions */
constexpr unsigned NO_BOUND = 0x80000000u;                              /* above the bits of any magnitude */
constexpr unsigned MISFIT_WORDS = MAX_CHUNK / TAGC_RESIDUAL_BLOCK / 32; /* a bit for each block of a chunk */

/* Formats of values (codec/values.h). */
struct value_format {
    int values, block, shift, sparse;   /* block: 1 << shift */
    uint32_t largest_scale;             /* bits of a bf16 */
    int marks_nonfinite, is_stochastic; /* of what has no residual */
    uint32_t seed;
};

/* The addends of acc and what becomes of it, as they are stored (codec/residual.h). */
struct acc_arrays {
    const void *gradient, *residual_in; /* code blocks: residual_in and residual_out may be NULL */
    void *residual_out;
    int gradient_format, residual_format;
    uint32_t n, seed;
    uint32_t n_exponent_bytes; /* at the start of a row of the residual; 0 where there are none */
    uint32_t n_padded;         /* codes, with the zeros that follow them */
};

/* The place of a span's candidates among those of its row. */
struct span {
    uint32_t begin, n;
};

/* The progress of the search for the k-th largest, and what the blocks of a row share. */
struct state {
    uint32_t t_lo, t_hi;    /* lower bounds: of candidates; of elements certain to be sent */
    int is_dense;           /* 1: the bounds failed, so every element of acc is a candidate */
    int is_done;            /* 1: the threshold is known */
    int nonfinite, is_full; /* is_full: the candidates exceed n_room */
    uint32_t base, limit, prefix,
        rank; /* searches bits in [base, limit); of bits - base, the digits above the
                                           current one (n_digit_bits at `shift`) are `prefix` */
    int shift, n_digit_bits;
    uint32_t threshold; /* larger bits are sent, and the first n_ties equal ones */
    uint32_t n_ties, n_sent;
    unsigned long long n_found; /* candidates; the upper half counts those of t_hi or more */
    unsigned tickets[8];
    int bits; /* width of codes of positions; 0: a bitmap */
    unsigned long long n_index_bytes;
};

struct chunk_state {
    uint32_t n_above, n_ties; /* items above the threshold, and equal to it */
    uint32_t n_ties_sent, begin;
    uint32_t codes[(N_WIDTHS + 1) / 2]; /* number of codes at each width, two per word */
    unsigned ticket;                    /* of the blocks that write for it */
    unsigned long long offset;          /* bit offset of its codes in the body */
};

/* A fragment of code topk to encode. */
struct topk_row {
    acc_arrays acc;
    uint8_t *body;
    tagc_batch_result *result;
    uint32_t n, k, chunk, n_chunks;
    uint32_t n_tiles, n_grid_chunks, n_value_tasks; /* blocks of the grids for it, at least 1 each */
    uint32_t first_tile, first_chunk, first_value_task;
    uint32_t n_room;  /* capacity for candidates; 0: the row is not sampled */
    uint32_t stride;  /* of the sample, in lines */
    float n_expected; /* expected number of sampled elements among the k largest */
    int safest_bits;
    unsigned long long safest_bytes; /* of the width that is safe for any set of positions */
    value_format format;
    state *progress;
    uint32_t *radix;     /* (N_RADIX) */
    span *spans;         /* (ceil(n / SPAN)) */
    uint16_t *places;    /* (n_room) in their span */
    float *candidates;   /* (n_room) */
    chunk_state *chunks; /* (n_grid_chunks) */
    uint32_t *bitmap;    /* (n_grid_chunks * chunk / 32) */
    uint32_t *misfits;   /* (n_grid_chunks, MISFIT_WORDS) blocks whose exponent is too small; of integers */
    uint32_t *indices;   /* (k) */
    float *values;       /* (k), then their errors where the residual is stored as integers */
};

/* A body to decode. */
struct body_state {
    uint32_t n_items;
    int bits;
    unsigned long long n_index_bytes;
};

/* Where a share of a chunk's positions begins in a body: its first code, and position and item before that. */
struct share_begin {
    uint32_t code, position, item;
};

struct body_row {
    const uint8_t *bytes;
    unsigned long long n_bytes;
    const uint64_t *length; /* if not NULL: holds n_bytes instead */
    int is_plain;           /* 1: bytes are floats, one for each element */
    unsigned row;           /* in rows */
    body_state *progress;
    uint32_t *begin;            /* (n_chunks) first item of each chunk */
    unsigned long long *offset; /* (n_chunks) first bit of each chunk */
    share_begin *shares;        /* (n_chunks, n_shares); none where n_shares is 1 */
};

/* A fragment of either code whose bodies are added. */
struct sums_row {
    int is_sparse;
    uint32_t n, k, chunk, n_chunks;      /* of topk; for blocks, a chunk is a run */
    uint32_t n_grid_chunks, first_chunk; /* blocks of the grid for it: shares of chunks */
    uint32_t n_shares;                   /* of a chunk; a power of two */
    uint32_t first_body, n_bodies;
    const int *stop;     /* NULL, or a flag: if it is not 0, no body is added */
    int adds;            /* 1: to what is in sums; 0: to zeros */
    int gradient_format; /* of plain bodies */
    float scale;
    float *sums;
    tagc_batch_result *result;
    value_format format;
};

/* A fragment of code blocks to encode. */
struct blocks_row {
    acc_arrays acc;
    uint8_t *body;
    tagc_batch_result *result;
    uint32_t n, first_run, n_runs;
    unsigned long long n_bytes;
    value_format format;
    unsigned *ticket;
    int *nonfinite;
};

/* The rows of a grid. Each has a member that says which of the grid's blocks is its first. */
template <typename row> struct work_of {
    const row *rows;
    unsigned n_rows;
    float rows_per_block;
};

/* The row that a block works for. The first guess is right where all rows have as many blocks. */
template <auto first, typename row>
__device__ __forceinline__ const row *row_at(const work_of<row> *work, uint32_t block) {
    unsigned i = (unsigned)((float)block * work->rows_per_block);
    if (i >= work->n_rows) i = work->n_rows - 1;
    while (work->rows[i].*first > block) i--;
    while (i + 1 < work->n_rows && work->rows[i + 1].*first <= block) i++;
    return &work->rows[i];
}

} // namespace tagc_cuda

#endif
