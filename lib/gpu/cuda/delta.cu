/* Batches of deltas: two launches for any number of rows. */
#include "gpu/cuda/delta.cuh"
#include "gpu/cuda/host.cuh"

#include <new>
#include <stdlib.h>

using namespace tagc_cuda;

struct tagc_delta_batch {
    tagc_delta_kind kind;
    cudaStream_t stream;
    size_t n_rows;
    table<delta_row> rows;
    char *image, *work;
    size_t image_bytes;
    unsigned n_blocks;
};

/* Returns the bytes of the device that the table takes. */
static size_t lay_out(tagc_delta_batch *b) {
    tagc_arena arena = {};
    arena.base = b->work;
    take_table(b->image, &arena, &b->rows, b->n_rows);
    return b->image_bytes = arena.n_bytes;
}

tagc_status tagc_cuda::cuda_delta_prepare(void) {
    TAGC_TRY(load_kernel(unpack_parcel));
    TAGC_TRY(load_kernel(clear_deltas));
    return load_kernel(run_deltas);
}

static size_t delta_work_bytes(const tagc_delta_row *rows, size_t n_rows) {
    tagc_delta_batch b = {};
    (void)rows;
    b.n_rows = n_rows;
    return lay_out(&b);
}

static tagc_status delta_point(tagc_delta_batch *b, const tagc_delta_row *rows, int *results) {
    b->n_blocks = 0;
    for (size_t i = 0; i < b->n_rows; i++) {
        delta_row *row = &b->rows.host[i];
        row->arrays = rows[i];
        row->result = &results[i];
        row->first_block = b->n_blocks;
        row->n_blocks = parts_of(rows[i].n, (size_t)WARPS * TAGC_DELTA_BLOCK);
        b->n_blocks += row->n_blocks;
    }
    return send_tables(b->work, b->image, b->image_bytes, b->stream);
}

static void delta_destroy(tagc_delta_batch *b) {
    if (!b) return;
    free(b->image);
    delete b;
}

static tagc_status delta_create(tagc_delta_kind kind, const tagc_delta_row *rows, size_t n_rows, int *results,
                                void *work, void *stream, tagc_delta_batch **out) {
    *out = nullptr;
    tagc_delta_batch *b = new (std::nothrow) tagc_delta_batch();
    if (!b) return tagc_fail(TAGC_ERR_MEMORY, "no memory for a batch of %zu deltas", n_rows);
    b->kind = kind;
    b->n_rows = n_rows;
    b->stream = static_cast<cudaStream_t>(stream);
    b->work = static_cast<char *>(work);
    const size_t n_bytes = lay_out(b);
    b->image = static_cast<char *>(calloc(n_bytes ? n_bytes : 1, 1));
    if (!b->image) {
        delete b;
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for the tables of a batch of deltas: %zu bytes",
                         n_bytes);
    }
    lay_out(b);
    tagc_status status = delta_point(b, rows, results);
    if (status == TAGC_OK)
        *out = b;
    else
        delta_destroy(b);
    return status;
}

static tagc_status delta_run(tagc_delta_batch *b) {
    const work_of<delta_row> work = work_of_table(b->rows, b->n_blocks);
    const delta_row *rows = b->rows.device;
    const unsigned n_rows = (unsigned)b->n_rows;
    const int kind = b->kind;
    TAGC_LAUNCH(clear_deltas, no_shared, parts_of(n_rows, THREADS) * (n_rows > 0), b->stream, rows, n_rows);
    TAGC_LAUNCH(run_deltas, no_shared, b->n_blocks, b->stream, work, kind);
    return check_launches();
}

const tagc_delta_maker tagc_cuda::cuda_deltas = {delta_work_bytes, delta_create, delta_point, delta_run,
                                                 delta_destroy};
