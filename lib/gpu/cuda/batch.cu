/* The maker of gpu/maker.h, and its batches: lays out the memory of a batch, sends its tables to the device, and launches kernels.
 *
 * A run takes eight launches to encode fragments of code topk, two for those of code blocks, and two or three to decode, whatever the
 * number of rows. A run allocates nothing, and the host reads nothing back. */
#include "gpu/cuda/blocks.cuh"
#include "gpu/cuda/host.cuh"
extern "C" {
#include "codec/gaps.h"
#include "codec/values.h"
}

#include <new>
#include <stdlib.h>

using namespace tagc_cuda;

struct totals {
    size_t tiles, chunks, tasks, runs, topk, blocks, sums, bodies;
};

struct tagc_batch {
    tagc_batch_kind kind;
    cudaStream_t stream;
    size_t n_rows, n_sparse;
    table<topk_row> topk;
    table<blocks_row> blocks;
    table<sums_row> sums;
    table<body_row> bodies;
    totals n;           /* of rows, and of blocks of the grids */
    char *image, *work; /* tables on the host, and all memory of the device, where they come first */
    size_t image_bytes;
};

/* ---- shapes ---- */

static acc_arrays shape_acc(const tagc_code_options *o) {
    acc_arrays acc = {};
    acc.gradient_format = o->gradient;
    acc.residual_format = o->residual;
    acc.n = (uint32_t)o->n;
    acc.n_exponent_bytes = (uint32_t)tagc_residual_exponent_bytes(o->residual, o->n);
    if (has_exponents(o->residual)) {
        const size_t n_bytes = tagc_residual_bytes(o->residual, o->n) - acc.n_exponent_bytes;
        acc.n_padded = (uint32_t)(o->residual == TAGC_FORMAT_INT8 ? n_bytes : 2 * n_bytes);
    }
    return acc;
}

static value_format format_of(const tagc_code_options *o) {
    tagc_value_format f = tagc_values_format(o->values, o->block, o->sparse);
    value_format format = {f.values, f.block, 0, f.sparse, f.largest_scale, 0, o->is_stochastic, 0};
    while (1 << format.shift < f.block) format.shift++;
    return format;
}

static void plan_sample(topk_row *row) {
    const double n_sampled = (double)N_LINES * LINE;
    row->n_room = 0;
    if (row->n < 4 * N_LINES * LINE || row->k == 0 || row->k == row->n) return;
    row->n_room = (uint32_t)tagc_sample_room((double)row->n, (double)row->k, n_sampled);
    row->n_expected = (float)((double)row->k * (n_sampled / (double)row->n));
    row->stride = row->n / LINE / N_LINES;
}

static topk_row shape_topk(const tagc_batch_row *from) {
    const tagc_code_options *o = &from->options;
    tagc_gaps gaps;
    size_t safest_bytes;
    topk_row row = {};
    tagc_gaps_init(&gaps, o->n, o->k);
    row.safest_bits = tagc_gaps_safest_bits(&gaps, &safest_bytes);
    row.safest_bytes = safest_bytes;
    row.n = (uint32_t)o->n;
    row.k = (uint32_t)o->k;
    row.chunk = (uint32_t)gaps.chunk;
    row.n_chunks = (uint32_t)gaps.n_chunks;
    row.format = format_of(o);
    row.acc = shape_acc(o);
    row.n_grid_chunks = parts_of(o->n, gaps.chunk);
    row.n_tiles = parts_of(o->n, TILE);
    row.n_value_tasks = parts_of(o->k, task_values(&row.format));
    plan_sample(&row);
    return row;
}

static sums_row shape_sums(const tagc_batch_row *from) {
    const tagc_code_options *o = &from->options;
    sums_row row = {};
    row.is_sparse = o->sparse;
    row.n = (uint32_t)o->n;
    row.k = (uint32_t)o->k;
    row.chunk = RUN;
    row.gradient_format = o->gradient;
    row.format = format_of(o);
    if (o->sparse) {
        tagc_gaps gaps;
        tagc_gaps_init(&gaps, o->n, o->k);
        row.chunk = (uint32_t)gaps.chunk;
        row.n_chunks = (uint32_t)gaps.n_chunks;
    }
    row.n_shares = 1;
    row.n_grid_chunks = parts_of(o->n, row.chunk);
    return row;
}

/* Of each chunk, so that the batch's blocks fill a large device twice, if chunks alone do not. */
static uint32_t count_shares(const tagc_batch *b, const tagc_batch_row *rows) {
    constexpr size_t ENOUGH_BLOCKS = 264, MOST_SHARES = 8; /* a share has 64 positions or more */
    size_t n_chunks = 0;
    uint32_t n = 1;
    for (size_t i = 0; i < b->n_rows; i++) n_chunks += shape_sums(&rows[i]).n_grid_chunks;
    while (n < MOST_SHARES && n_chunks * n < ENOUGH_BLOCKS) n *= 2;
    return n;
}

static const char *name_of(int format) {
    static const char *const names[] = {"fp32", "bf16", "int8", "int4", "int2"};
    return format >= 0 && format <= TAGC_FORMAT_INT2 ? names[format] : "unknown";
}

static tagc_status check_row(const tagc_batch_row *row, size_t index) {
    const tagc_code_options *o = &row->options;
    if (o->n > UINT32_MAX || o->k > o->n)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "row %zu of a batch: n is %zu and k %zu: n must be below 2^32, k at most n", index,
                         o->n, o->k);
    if (!tagc_residual_is_format(o->residual))
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "row %zu of a batch: the residual is %s, must be fp32, int8 or int4", index,
                         name_of(o->residual));
    if (o->gradient != TAGC_FORMAT_FP32 && o->gradient != TAGC_FORMAT_BF16)
        return tagc_fail(TAGC_ERR_ARGUMENT, "row %zu of a batch: the gradient is %s, must be fp32 or bf16",
                         index, name_of(o->gradient));
    return TAGC_OK;
}

/* ---- layout ---- */

template <typename T> static T *take(tagc_arena *arena, size_t n) {
    return static_cast<T *>(tagc_arena_take(arena, n, sizeof(T)));
}

static void take_topk(tagc_arena *arena, topk_row *row) {
    row->progress = take<state>(arena, 1);
    row->radix = take<uint32_t>(arena, N_RADIX);
    row->spans = take<span>(arena, parts_of(row->n, SPAN));
    row->places = take<uint16_t>(arena, row->n_room);
    row->candidates = take<float>(arena, row->n_room);
    row->chunks = take<chunk_state>(arena, row->n_grid_chunks);
    row->bitmap = take<uint32_t>(arena, (size_t)row->n_grid_chunks * row->chunk / 32);
    if (has_exponents(row->acc.residual_format))
        row->misfits = take<uint32_t>(arena, (size_t)row->n_grid_chunks * MISFIT_WORDS);
    row->indices = take<uint32_t>(arena, row->k);
    row->values = take<float>(arena, row->k);
}

static int encodes(const tagc_batch *b) {
    return b->kind == TAGC_BATCH_ENCODE;
}

/* The memory of each row and its blocks in the grids. If there is an image, fills the rows of the tables, too. */
static void lay_out_rows(tagc_batch *b, const tagc_batch_row *rows, tagc_arena *arena, totals *t) {
    const uint32_t n_shares = encodes(b) ? 1 : count_shares(b, rows);
    *t = totals();
    for (size_t i = 0; i < b->n_rows; i++) {
        if (encodes(b) && rows[i].options.sparse) {
            topk_row row = shape_topk(&rows[i]);
            row.first_tile = (uint32_t)t->tiles;
            row.first_chunk = (uint32_t)t->chunks;
            row.first_value_task = (uint32_t)t->tasks;
            take_topk(arena, &row);
            if (b->topk.host) b->topk.host[t->topk] = row;
            t->tiles += row.n_tiles;
            t->chunks += row.n_grid_chunks;
            t->tasks += row.n_value_tasks;
            t->topk++;
        } else if (encodes(b)) {
            blocks_row row = {};
            row.format = format_of(&rows[i].options);
            row.acc = shape_acc(&rows[i].options);
            row.n = (uint32_t)rows[i].options.n;
            row.n_bytes = values_bytes(&row.format, row.n);
            row.n_runs = parts_of(row.n, RUN);
            row.first_run = (uint32_t)t->runs;
            row.ticket = take<unsigned>(arena, 1);
            row.nonfinite = take<int>(arena, 1);
            if (b->blocks.host) b->blocks.host[t->blocks] = row;
            t->runs += row.n_runs;
            t->blocks++;
        } else {
            sums_row row = shape_sums(&rows[i]);
            if (row.is_sparse) {
                row.n_shares = n_shares;
                row.n_grid_chunks *= n_shares;
            }
            row.first_chunk = (uint32_t)t->chunks;
            row.first_body = (uint32_t)t->bodies;
            if (b->sums.host) b->sums.host[i] = row;
            for (size_t k = 0; k < (size_t)rows[i].n_bodies; k++, t->bodies++) {
                body_row body = {};
                body.row = (unsigned)i;
                body.progress = take<body_state>(arena, 1);
                body.begin = take<uint32_t>(arena, row.n_chunks);
                body.offset = take<unsigned long long>(arena, row.n_chunks);
                if (row.n_shares > 1)
                    body.shares = take<share_begin>(arena, (size_t)row.n_chunks * row.n_shares);
                if (b->bodies.host) b->bodies.host[t->bodies] = body;
            }
            t->chunks += row.n_grid_chunks;
            t->sums++;
        }
    }
}

/* Tables come first, then the kernels' own memory. Returns the bytes on the device. */
static size_t lay_out(tagc_batch *b, const tagc_batch_row *rows) {
    tagc_arena measure = {}, arena = {};
    lay_out_rows(b, rows, &measure, &b->n); /* without an image: only counts */
    arena.base = b->work;
    take_table(b->image, &arena, &b->topk, b->n.topk);
    take_table(b->image, &arena, &b->blocks, b->n.blocks);
    take_table(b->image, &arena, &b->sums, b->n.sums);
    take_table(b->image, &arena, &b->bodies, b->n.bodies);
    b->image_bytes = arena.n_bytes;
    b->n_sparse = 0;
    for (size_t i = 0; i < b->n_rows; i++) b->n_sparse += rows[i].options.sparse != 0;
    lay_out_rows(b, rows, &arena, &b->n);
    return arena.n_bytes;
}

/* ---- the table ---- */

static size_t cuda_work_bytes(tagc_batch_kind kind, const tagc_batch_row *rows, size_t n_rows,
                              int n_threads) {
    tagc_batch b = {};
    (void)n_threads;
    b.kind = kind;
    b.n_rows = n_rows;
    return lay_out(&b, rows);
}

/* Kernels, and tables: once where a batch is made, and once where it is pointed to its arrays. */
static size_t cuda_n_launches(tagc_batch_kind kind, const tagc_batch_row *rows, size_t n_rows) {
    tagc_batch b = {};
    b.kind = kind;
    b.n_rows = n_rows;
    lay_out(&b, rows);
    const size_t n_sparse = b.n_sparse > 0, n_full = b.n_sparse < n_rows;
    const size_t n_kernels = encodes(&b) ? 8 * n_sparse + 2 * n_full : (n_rows > 0) + n_sparse + n_full;
    return n_kernels + 2 * ((b.image_bytes + sizeof(parcel) - 1) / sizeof(parcel));
}

static void cuda_destroy(tagc_batch *b) {
    if (!b) return;
    free(b->image);
    delete b;
}

/* Integers are read and written in words. The old residual is read again where the sample was misleading. */
static tagc_status check_residual(const tagc_batch_row *row, size_t index) {
    const int format = row->options.residual;
    if (format == TAGC_FORMAT_FP32 || !row->residual_in) return TAGC_OK;
    if (has_exponents(format) &&
        ((uintptr_t)row->residual_in | (uintptr_t)row->residual_out) % TAGC_ALIGNMENT)
        return tagc_fail(
            TAGC_ERR_ARGUMENT,
            "row %zu of a batch: its residuals are at %p and %p, must be at multiples of %d bytes", index,
            row->residual_in, row->residual_out, TAGC_ALIGNMENT);
    if (row->residual_in == row->residual_out)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "row %zu of a batch: its residual is %s, must not be written in place", index,
                         name_of(format));
    return TAGC_OK;
}

template <class Row>
static void point_encoding(Row *row, const tagc_batch_row *from, tagc_batch_result *result) {
    row->acc.gradient = from->gradient;
    row->acc.residual_in = from->residual_in;
    row->acc.residual_out = from->residual_out;
    row->acc.seed = row->format.seed = from->seed;
    row->body = from->body;
    row->result = result;
}

static tagc_status cuda_point(tagc_batch *b, const tagc_batch_row *rows, tagc_batch_result *results) {
    size_t n_topk = 0, n_blocks = 0;
    for (size_t i = 0; i < b->n_rows; i++) {
        const tagc_batch_row *from = &rows[i];
        if (encodes(b)) TAGC_TRY(check_residual(from, i));
        if (encodes(b) && from->options.sparse) {
            point_encoding(&b->topk.host[n_topk++], from, &results[i]);
        } else if (encodes(b)) {
            point_encoding(&b->blocks.host[n_blocks++], from, &results[i]);
        } else {
            sums_row *row = &b->sums.host[i];
            row->n_bodies = (uint32_t)from->n_bodies;
            row->result = &results[i];
            row->stop = from->stop;
            row->adds = from->adds;
            row->scale = from->scale;
            row->sums = from->sums;
            const size_t room =
                (i + 1 < b->n_rows ? b->sums.host[i + 1].first_body : b->bodies.n) - row->first_body;
            if (row->n_bodies > room)
                return tagc_fail(TAGC_ERR_ARGUMENT, "row %zu of a batch: %u bodies, it was made for %zu", i,
                                 row->n_bodies, room);
            for (size_t k = 0; k < row->n_bodies; k++) {
                body_row *body = &b->bodies.host[row->first_body + k];
                body->bytes = from->bodies[k].bytes;
                body->n_bytes = from->bodies[k].n_bytes;
                body->is_plain = from->bodies[k].is_plain;
                body->length = from->lengths ? from->lengths + k : nullptr;
            }
        }
    }
    return send_tables(b->work, b->image, b->image_bytes, b->stream);
}

static tagc_status cuda_create(tagc_batch_kind kind, const tagc_batch_row *rows, size_t n_rows,
                               tagc_batch_result *results, void *work, tagc_pool *pool, void *stream,
                               tagc_batch **out) {
    (void)pool;
    *out = nullptr;
    for (size_t i = 0; i < n_rows; i++) TAGC_TRY(check_row(&rows[i], i));
    tagc_batch *b = new (std::nothrow) tagc_batch();
    if (!b) return tagc_fail(TAGC_ERR_MEMORY, "no memory for a batch of %zu rows", n_rows);
    b->kind = kind;
    b->n_rows = n_rows;
    b->work = static_cast<char *>(work);
    b->stream = static_cast<cudaStream_t>(stream);
    lay_out(b, rows); /* to find the size of the image */
    b->image = static_cast<char *>(calloc(b->image_bytes ? b->image_bytes : 1, 1));
    if (!b->image) {
        size_t n_bytes = b->image_bytes;
        delete b;
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for the tables of a batch: %zu bytes", n_bytes);
    }
    lay_out(b, rows);
    tagc_status status = cuda_point(b, rows, results);
    if (status == TAGC_OK)
        *out = b;
    else
        cuda_destroy(b);
    return status;
}

static void run_encode(const tagc_batch *b) {
    cudaStream_t stream = b->stream;
    const work_of<topk_row> tiles = work_of_table(b->topk, b->n.tiles);
    const work_of<topk_row> chunks = work_of_table(b->topk, b->n.chunks);
    const work_of<topk_row> tasks = work_of_table(b->topk, b->n.tasks);
    const work_of<blocks_row> runs = work_of_table(b->blocks, b->n.runs);
    const topk_row *rows = b->topk.device;
    const blocks_row *blocks = b->blocks.device;
    const unsigned n_chunks = (unsigned)b->n.chunks, n_tasks = (unsigned)b->n.tasks,
                   n_blocks = (unsigned)b->blocks.n;
    TAGC_LAUNCH(sample_rows, sample_shared, b->topk.n, stream, rows);
    TAGC_LAUNCH(stream_rows, stream_shared, b->n.tiles, stream, tiles);
    for (unsigned turn = 0; turn < 3; turn++)
        TAGC_LAUNCH(refine_rows, refine_shared, n_chunks, stream, chunks, turn);
    TAGC_LAUNCH(count_rows, count_shared, n_chunks, stream, chunks);
    TAGC_LAUNCH(gather_rows, gather_shared, n_chunks, stream, chunks);
    TAGC_LAUNCH(emit_rows, emit_shared, n_tasks + n_chunks, stream, tasks, n_tasks, chunks);
    TAGC_LAUNCH(clear_blocks, no_shared, parts_of(n_blocks, THREADS) * (n_blocks > 0), stream, blocks,
                n_blocks);
    TAGC_LAUNCH(encode_blocks, run_shared, b->n.runs, stream, runs);
}

static void run_bodies(const tagc_batch *b) {
    cudaStream_t stream = b->stream;
    const work_of<sums_row> work = work_of_table(b->sums, b->n.chunks);
    const sums_row *rows = b->sums.device;
    const body_row *bodies = b->bodies.device;
    const unsigned n_rows = (unsigned)b->n_rows, n_bodies = (unsigned)b->bodies.n;
    const unsigned n_blocks = larger(n_bodies, (unsigned)parts_of(n_rows, THREADS));
    TAGC_LAUNCH(index_bodies, index_shared, n_blocks * (n_rows > 0), stream, rows, n_rows, bodies, n_bodies);
    if (b->n_sparse) TAGC_LAUNCH(add_topk, add_shared, b->n.chunks, stream, work, bodies);
    if (b->n_sparse < b->n_rows) TAGC_LAUNCH(add_blocks, no_shared, b->n.chunks, stream, work, bodies);
}

static tagc_status cuda_run(tagc_batch *b) {
    if (encodes(b))
        run_encode(b);
    else
        run_bodies(b);
    return check_launches();
}

static tagc_status cuda_prepare(void) {
    TAGC_TRY(load_kernel(unpack_parcel));
    TAGC_TRY(load_kernel(sample_rows));
    TAGC_TRY(load_kernel(stream_rows));
    TAGC_TRY(load_kernel(refine_rows));
    TAGC_TRY(load_kernel(count_rows));
    TAGC_TRY(load_kernel(gather_rows));
    TAGC_TRY(load_kernel(emit_rows));
    TAGC_TRY(load_kernel(clear_blocks));
    TAGC_TRY(load_kernel(encode_blocks));
    TAGC_TRY(load_kernel(index_bodies));
    TAGC_TRY(load_kernel(add_topk));
    TAGC_TRY(load_kernel(add_blocks));
    TAGC_TRY(cuda_runs_prepare());
    TAGC_TRY(cuda_messages_prepare());
    return cuda_delta_prepare();
}

static const tagc_batch_maker batches = {cuda_work_bytes, cuda_create,  cuda_point,     cuda_run,
                                         cuda_n_launches, cuda_destroy, tagc_last_error};

static const tagc_maker maker = {TAGC_MAKER_ABI, cuda_prepare, &batches,
                                 &cuda_deltas,   &cuda_runs,   &cuda_messages};

extern "C" TAGC_API const tagc_maker *tagc_cuda_maker(void);
const tagc_maker *tagc_cuda_maker(void) {
    return &maker;
}
