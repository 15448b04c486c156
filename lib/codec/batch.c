/* Batches on a processor: row after row. */
#include "codec/batch.h"
#include "core/memory.h"

#include <string.h>

struct tagc_batch {
    tagc_batch_kind kind;
    size_t n_rows;
    tagc_batch_result *results;
    tagc_pool *pool;
    void *work;
    tagc_body *bodies; /* (most n_bodies) of one row, with lengths of this run */
    tagc_batch_row rows[];
};

static size_t cpu_work_bytes(tagc_batch_kind kind, const tagc_batch_row *rows, size_t n_rows, int n_threads) {
    size_t most = 0;
    (void)kind;
    for (size_t i = 0; i < n_rows; i++) {
        size_t n = tagc_code_of(&rows[i].options)->scratch_bytes(&rows[i].options, n_threads);
        if (n > most) most = n;
    }
    return most;
}

static tagc_status cpu_point(tagc_batch *batch, const tagc_batch_row *rows, tagc_batch_result *results) {
    batch->results = results;
    memcpy(batch->rows, rows, batch->n_rows * sizeof *rows);
    return TAGC_OK;
}

static tagc_status cpu_create(tagc_batch_kind kind, const tagc_batch_row *rows, size_t n_rows,
                              tagc_batch_result *results, void *work, tagc_pool *pool, void *stream,
                              tagc_batch **out) {
    (void)stream;
    void *memory, *bodies;
    int most = 1;
    *out = NULL;
    for (size_t i = 0; i < n_rows; i++)
        if (kind == TAGC_BATCH_DECODE && rows[i].n_bodies > most) most = rows[i].n_bodies;
    TAGC_TRY(tagc_memory_create((size_t)most * sizeof(tagc_body), "batch", &bodies));
    tagc_status status = tagc_memory_create(sizeof **out + n_rows * sizeof *rows, "batch", &memory);
    if (status != TAGC_OK) {
        tagc_memory_destroy(bodies);
        return status;
    }
    *out = memory;
    **out = (tagc_batch){.kind = kind, .n_rows = n_rows, .pool = pool, .work = work, .bodies = bodies};
    return cpu_point(*out, rows, results);
}

/* With the lengths that hold now. */
static const tagc_body *bodies_of(const tagc_batch *b, const tagc_batch_row *row, int n) {
    if (!row->lengths) return row->bodies;
    for (int i = 0; i < n; i++) {
        b->bodies[i] = row->bodies[i];
        b->bodies[i].n_bytes = (size_t)row->lengths[i];
    }
    return b->bodies;
}

static void run_row(const tagc_batch *b, const tagc_batch_row *row, tagc_batch_result *result) {
    const tagc_code_options *o = &row->options;
    const tagc_code *code = tagc_code_of(o);
    int n_bodies = row->stop && *row->stop ? 0 : row->n_bodies;
    void *work = row->work ? row->work : b->work;
    *result = (tagc_batch_result){0};
    switch (b->kind) {
    case TAGC_BATCH_ENCODE:
        code->encode(o, row->gradient, row->residual_in, row->residual_out, row->seed, row->body, work,
                     b->pool, &result->encoded);
        break;
    case TAGC_BATCH_DECODE:
        result->nonfinite = code->decode(o, bodies_of(b, row, n_bodies), n_bodies, row->adds, row->scale,
                                         row->sums, work, b->pool);
    }
}

static tagc_status cpu_run(tagc_batch *batch) {
    for (size_t i = 0; i < batch->n_rows; i++) run_row(batch, &batch->rows[i], &batch->results[i]);
    return TAGC_OK;
}

static size_t cpu_n_launches(tagc_batch_kind kind, const tagc_batch_row *rows, size_t n_rows) {
    (void)kind, (void)rows, (void)n_rows;
    return 0;
}

static void cpu_destroy(tagc_batch *batch) {
    if (batch) tagc_memory_destroy(batch->bodies);
    tagc_memory_destroy(batch);
}

const tagc_batch_maker tagc_batch_cpu = {
    .work_bytes = cpu_work_bytes,
    .create = cpu_create,
    .point = cpu_point,
    .run = cpu_run,
    .n_launches = cpu_n_launches,
    .destroy = cpu_destroy,
    .last_error = tagc_last_error,
};
