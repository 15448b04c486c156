/* The maker of gpu/maker.h, and its batches: lays out the memory of a batch, copies its tables to the device, and launches kernels.
 *
 * A run takes eight launches to encode fragments of code topk, two for those of code blocks, two to validate, and three or
 * four to decode, whatever the number of rows. A run allocates nothing, and the host reads nothing back. */
#include "gpu/cuda/blocks.cuh"
#include "gpu/cuda/host.cuh"
extern "C" {
#include "codec/gaps.h"
#include "codec/values.h"
}

#include <new>
#include <stdlib.h>

using namespace tagc_cuda;

struct tagc_batch {
    tagc_batch_kind kind;
    cudaStream_t stream;
    size_t n_rows, n_sparse;
    table<topk_row> topk;
    table<blocks_row> blocks;
    table<sums_row> sums;
    table<body_row> bodies;
    table<uint32_t> row_of_tile, row_of_chunk, row_of_task, row_of_run;
    table<uint32_t> index; /* (n_rows) index of this row among those of topk or of blocks */
    char *image, *work;    /* tables on the host, and all memory of the device */
    size_t image_bytes;
};

/* ---- shapes ---- */

static value_format format_of(const tagc_code_options *o) {
    tagc_value_format f = tagc_values_format(o->values, o->block, o->sparse);
    value_format format = {f.values, f.block, 0, f.sparse, f.largest_scale};
    while (1 << format.shift < f.block) format.shift++;
    return format;
}

static double margin_at_most(double expected) {
    return 4 * sqrt(LINE * (expected + 4 * LINE));
}

/* Capacity for candidates: the sample's prediction if large elements come in clusters, plus as much again for its spread. */
static void plan_sample(topk_row *row) {
    const double n_sampled = (double)N_LINES * LINE;
    row->n_room = 0;
    if (row->n < 4 * N_LINES * LINE || row->k == 0 || row->k == row->n) return;
    double expected = (double)row->k * (n_sampled / (double)row->n),
           reach = expected + margin_at_most(expected);
    double room = (reach + margin_at_most(reach)) * ((double)row->n / n_sampled);
    row->n_room = room < (double)row->n ? (uint32_t)room : row->n;
    row->n_expected = (float)expected;
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
    row.format = format_of(o);
    if (o->sparse) {
        tagc_gaps gaps;
        tagc_gaps_init(&gaps, o->n, o->k);
        row.chunk = (uint32_t)gaps.chunk;
        row.n_chunks = (uint32_t)gaps.n_chunks;
    }
    row.n_grid_chunks = parts_of(o->n, row.chunk);
    return row;
}

static const char *name_of(int format) {
    static const char *const names[] = {"fp32", "bf16", "int8", "int4", "int2", "sign"};
    return format >= 0 && format <= TAGC_FORMAT_SIGN ? names[format] : "unknown";
}

static tagc_status check_row(const tagc_batch_row *row, size_t index) {
    const tagc_code_options *o = &row->options;
    if (o->n > UINT32_MAX || o->k > o->n)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "row %zu of a batch: n is %zu and k %zu: n must be below 2^32, k at most n", index,
                         o->n, o->k);
    if (o->residual != TAGC_FORMAT_FP32 || o->gradient != TAGC_FORMAT_FP32)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "row %zu of a batch: the kernels for CUDA read residuals and gradients in fp32 "
                         "alone; the residual is "
                         "%s, the gradient %s",
                         index, name_of(o->residual), name_of(o->gradient));
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
    row->indices = take<uint32_t>(arena, row->k);
    row->values = take<float>(arena, row->k);
}

static int encodes(const tagc_batch *b) {
    return b->kind == TAGC_BATCH_ENCODE;
}

static size_t bodies_of(const tagc_batch *b, const tagc_batch_row *row) {
    return b->kind == TAGC_BATCH_VALIDATE ? 1 : (size_t)row->n_bodies;
}

static void fill_table(table<uint32_t> *t, uint32_t first, uint32_t n, uint32_t row) {
    if (!t->host) return;
    for (uint32_t i = 0; i < n; i++) t->host[first + i] = row;
}

struct totals {
    size_t tiles, chunks, tasks, runs, topk, blocks, sums, bodies;
};

/* The memory of each row and its blocks in the grids. If there is an image, fills the rows of the tables, too. */
static void lay_out_rows(tagc_batch *b, const tagc_batch_row *rows, tagc_arena *arena, totals *t) {
    *t = totals();
    for (size_t i = 0; i < b->n_rows; i++) {
        if (encodes(b) && rows[i].options.sparse) {
            topk_row row = shape_topk(&rows[i]);
            row.first_tile = (uint32_t)t->tiles;
            row.first_chunk = (uint32_t)t->chunks;
            row.first_value_task = (uint32_t)t->tasks;
            take_topk(arena, &row);
            fill_table(&b->row_of_tile, row.first_tile, row.n_tiles, (uint32_t)t->topk);
            fill_table(&b->row_of_chunk, row.first_chunk, row.n_grid_chunks, (uint32_t)t->topk);
            fill_table(&b->row_of_task, row.first_value_task, row.n_value_tasks, (uint32_t)t->topk);
            if (b->index.host) b->index.host[i] = (uint32_t)t->topk;
            if (b->topk.host) b->topk.host[t->topk] = row;
            t->tiles += row.n_tiles;
            t->chunks += row.n_grid_chunks;
            t->tasks += row.n_value_tasks;
            t->topk++;
        } else if (encodes(b)) {
            blocks_row row = {};
            row.format = format_of(&rows[i].options);
            row.n = (uint32_t)rows[i].options.n;
            row.n_bytes = values_bytes(&row.format, row.n);
            row.n_runs = parts_of(row.n, RUN);
            row.first_run = (uint32_t)t->runs;
            row.ticket = take<unsigned>(arena, 1);
            row.nonfinite = take<int>(arena, 1);
            fill_table(&b->row_of_run, row.first_run, row.n_runs, (uint32_t)t->blocks);
            if (b->index.host) b->index.host[i] = (uint32_t)t->blocks;
            if (b->blocks.host) b->blocks.host[t->blocks] = row;
            t->runs += row.n_runs;
            t->blocks++;
        } else {
            sums_row row = shape_sums(&rows[i]);
            row.first_chunk = (uint32_t)t->chunks;
            row.first_body = (uint32_t)t->bodies;
            fill_table(&b->row_of_chunk, row.first_chunk, row.n_grid_chunks, (uint32_t)i);
            if (b->sums.host) b->sums.host[i] = row;
            for (size_t k = 0; k < bodies_of(b, &rows[i]); k++, t->bodies++) {
                body_row body = {};
                body.row = (unsigned)i;
                body.progress = take<body_state>(arena, 1);
                body.begin = take<uint32_t>(arena, row.n_chunks);
                body.offset = take<unsigned long long>(arena, row.n_chunks);
                if (b->bodies.host) b->bodies.host[t->bodies] = body;
            }
            t->chunks += row.n_grid_chunks;
            t->sums++;
        }
    }
}

/* Tables come first, then the kernels' own memory. Returns the bytes on the device. */
static size_t lay_out(tagc_batch *b, const tagc_batch_row *rows) {
    totals t, again;
    tagc_arena measure = {}, arena = {};
    lay_out_rows(b, rows, &measure, &t); /* without an image: only counts */
    arena.base = b->work;
    take_table(b->image, &arena, &b->topk, t.topk);
    take_table(b->image, &arena, &b->blocks, t.blocks);
    take_table(b->image, &arena, &b->sums, t.sums);
    take_table(b->image, &arena, &b->bodies, t.bodies);
    take_table(b->image, &arena, &b->row_of_tile, t.tiles);
    take_table(b->image, &arena, &b->row_of_chunk, t.chunks);
    take_table(b->image, &arena, &b->row_of_task, t.tasks);
    take_table(b->image, &arena, &b->row_of_run, t.runs);
    take_table(b->image, &arena, &b->index, b->n_rows);
    b->image_bytes = arena.n_bytes;
    b->n_sparse = 0;
    for (size_t i = 0; i < b->n_rows; i++) b->n_sparse += rows[i].options.sparse != 0;
    lay_out_rows(b, rows, &arena, &again);
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

static void cuda_destroy(tagc_batch *b) {
    if (!b) return;
    free(b->image);
    delete b;
}

template <class Row>
static void point_encoding(Row *row, const tagc_batch_row *from, tagc_batch_result *result) {
    row->gradient = static_cast<const float *>(from->gradient);
    row->residual_in = static_cast<const float *>(from->residual_in);
    row->residual_out = static_cast<float *>(from->residual_out);
    row->body = from->body;
    row->result = result;
}

static tagc_status cuda_point(tagc_batch *b, const tagc_batch_row *rows, tagc_batch_result *results) {
    for (size_t i = 0; i < b->n_rows; i++) {
        const tagc_batch_row *from = &rows[i];
        if (encodes(b) && from->options.sparse) {
            point_encoding(&b->topk.host[b->index.host[i]], from, &results[i]);
        } else if (encodes(b)) {
            point_encoding(&b->blocks.host[b->index.host[i]], from, &results[i]);
        } else {
            sums_row *row = &b->sums.host[i];
            row->n_bodies = (uint32_t)bodies_of(b, from);
            row->result = &results[i];
            row->stop = b->kind == TAGC_BATCH_DECODE ? from->stop : nullptr;
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
    return copy_to_device(b->work, b->image, b->image_bytes, b->stream);
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
    const work_of<topk_row> tiles = {b->topk.device, b->row_of_tile.device};
    const work_of<topk_row> chunks = {b->topk.device, b->row_of_chunk.device};
    const work_of<blocks_row> runs = {b->blocks.device, b->row_of_run.device};
    const topk_row *rows = b->topk.device;
    const blocks_row *blocks = b->blocks.device;
    const unsigned n_chunks = (unsigned)b->row_of_chunk.n, n_blocks = (unsigned)b->blocks.n;
    const uint32_t *row_of_task = b->row_of_task.device;
    TAGC_LAUNCH(sample_rows, sample_shared, b->topk.n, stream, rows);
    TAGC_LAUNCH(stream_rows, stream_shared, b->row_of_tile.n, stream, tiles);
    for (unsigned turn = 0; turn < 3; turn++)
        TAGC_LAUNCH(refine_rows, refine_shared, n_chunks, stream, chunks, turn);
    TAGC_LAUNCH(count_rows, count_shared, n_chunks, stream, chunks);
    TAGC_LAUNCH(gather_rows, gather_shared, n_chunks, stream, chunks);
    TAGC_LAUNCH(emit_rows, emit_shared, n_chunks + b->row_of_task.n, stream, chunks, n_chunks, row_of_task);
    TAGC_LAUNCH(clear_blocks, no_shared, parts_of(n_blocks, THREADS) * (n_blocks > 0), stream, blocks,
                n_blocks);
    TAGC_LAUNCH(encode_blocks, run_shared, b->row_of_run.n, stream, runs);
}

static void run_bodies(const tagc_batch *b) {
    cudaStream_t stream = b->stream;
    const work_of<sums_row> work = {b->sums.device, b->row_of_chunk.device};
    const sums_row *rows = b->sums.device;
    const body_row *bodies = b->bodies.device;
    const int checks = b->kind == TAGC_BATCH_VALIDATE;
    const unsigned n_rows = (unsigned)b->n_rows;
    TAGC_LAUNCH(index_bodies, index_shared, b->bodies.n, stream, rows, bodies, checks);
    if (checks) {
        TAGC_LAUNCH(check_bodies, check_shared, b->row_of_chunk.n, stream, work, bodies);
        return;
    }
    TAGC_LAUNCH(clear_results, no_shared, parts_of(n_rows, THREADS) * (n_rows > 0), stream, rows, n_rows);
    if (b->n_sparse) TAGC_LAUNCH(add_topk, add_shared, b->row_of_chunk.n, stream, work, bodies);
    if (b->n_sparse < b->n_rows) TAGC_LAUNCH(add_blocks, no_shared, b->row_of_chunk.n, stream, work, bodies);
}

static tagc_status cuda_run(tagc_batch *b) {
    if (encodes(b))
        run_encode(b);
    else
        run_bodies(b);
    return check_launches();
}

static tagc_status cuda_prepare(void) {
    TAGC_TRY(load_kernel(sample_rows));
    TAGC_TRY(load_kernel(stream_rows));
    TAGC_TRY(load_kernel(refine_rows));
    TAGC_TRY(load_kernel(count_rows));
    TAGC_TRY(load_kernel(gather_rows));
    TAGC_TRY(load_kernel(emit_rows));
    TAGC_TRY(load_kernel(clear_blocks));
    TAGC_TRY(load_kernel(encode_blocks));
    TAGC_TRY(load_kernel(index_bodies));
    TAGC_TRY(load_kernel(check_bodies));
    TAGC_TRY(load_kernel(clear_results));
    TAGC_TRY(load_kernel(add_topk));
    TAGC_TRY(load_kernel(add_blocks));
    TAGC_TRY(cuda_frames_prepare());
    return cuda_delta_prepare();
}

static const tagc_batch_maker batches = {cuda_work_bytes, cuda_create,  cuda_point,
                                         cuda_run,        cuda_destroy, tagc_last_error};

static const tagc_maker maker = {TAGC_MAKER_ABI, cuda_prepare, &batches, &cuda_deltas, &cuda_frames};

extern "C" TAGC_API const tagc_maker *tagc_cuda_maker(void);
const tagc_maker *tagc_cuda_maker(void) {
    return &maker;
}
