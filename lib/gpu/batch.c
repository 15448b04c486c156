/* Batches on a processor, row after row, and how another maker is found. */
#include "gpu/batch.h"
#include "codec/delta.h"
#include "codec/gaps.h"
#include "codec/values.h"
#include "core/memory.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
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

static tagc_status cpu_prepare(void) {
    return TAGC_OK;
}

static size_t cpu_work_bytes(tagc_batch_kind kind, const tagc_batch_row *rows, size_t n_rows, int n_threads) {
    size_t most = 0;
    for (size_t i = 0; i < n_rows && kind != TAGC_BATCH_VALIDATE; i++) {
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

static tagc_damage damage_of(const tagc_code_options *o, const tagc_body *body) {
    tagc_value_format format = tagc_values_format(o->values, o->block, o->sparse, !o->sparse && o->rotate);
    size_t n_items = o->n, n_index_bytes = 0;
    if (o->sparse) {
        tagc_gaps gaps;
        tagc_gaps_init(&gaps, o->n, o->k);
        n_index_bytes = tagc_gaps_validate(&gaps, body->bytes, body->n_bytes, &n_items);
        if (n_index_bytes == 0) return TAGC_DAMAGE_POSITIONS;
    }
    if (body->n_bytes != n_index_bytes + tagc_values_bytes(&format, n_items)) return TAGC_DAMAGE_LENGTH;
    return tagc_values_valid(&format, body->bytes + n_index_bytes, n_items) ? TAGC_DAMAGE_NONE
                                                                            : TAGC_DAMAGE_VALUES;
}

/* With the lengths that hold now. */
static const tagc_body *bodies_of(const tagc_batch *b, const tagc_batch_row *row, int n) {
    if (!row->lengths) return row->bodies;
    for (int i = 0; i < n; i++) b->bodies[i] = (tagc_body){row->bodies[i].bytes, (size_t)row->lengths[i]};
    return b->bodies;
}

static void run_row(const tagc_batch *b, const tagc_batch_row *row, tagc_batch_result *result) {
    const tagc_code_options *o = &row->options;
    const tagc_code *code = tagc_code_of(o);
    int n_bodies = row->stop && *row->stop ? 0 : row->n_bodies;
    *result = (tagc_batch_result){0};
    switch (b->kind) {
    case TAGC_BATCH_ENCODE:
        code->encode(o, row->gradient, row->residual_in, row->residual_out, row->body, b->work, b->pool,
                     &result->encoded);
        break;
    case TAGC_BATCH_ENCODE_SUMS:
        code->encode_sums(o, row->sums, row->error, row->scale, row->body, b->work, b->pool,
                          &result->encoded);
        break;
    case TAGC_BATCH_VALIDATE:
        result->damage = damage_of(o, bodies_of(b, row, 1));
        break;
    case TAGC_BATCH_DECODE:
        result->nonfinite = code->decode(o, bodies_of(b, row, n_bodies), n_bodies, row->add, row->scale,
                                         row->sums, b->work, b->pool);
    }
}

static tagc_status cpu_run(tagc_batch *batch) {
    for (size_t i = 0; i < batch->n_rows; i++) run_row(batch, &batch->rows[i], &batch->results[i]);
    return TAGC_OK;
}

static void cpu_destroy(tagc_batch *batch) {
    if (batch) tagc_memory_destroy(batch->bodies);
    tagc_memory_destroy(batch);
}

/* ---- deltas ---- */

struct tagc_delta_batch {
    tagc_delta_kind kind;
    size_t n_rows;
    int *results;
    tagc_delta_row rows[];
};

static size_t cpu_delta_work_bytes(const tagc_delta_row *rows, size_t n_rows) {
    (void)rows, (void)n_rows;
    return 0;
}

static tagc_status cpu_delta_point(tagc_delta_batch *batch, const tagc_delta_row *rows, int *results) {
    batch->results = results;
    memcpy(batch->rows, rows, batch->n_rows * sizeof *rows);
    return TAGC_OK;
}

static tagc_status cpu_delta_create(tagc_delta_kind kind, const tagc_delta_row *rows, size_t n_rows,
                                    int *results, void *work, void *stream, tagc_delta_batch **out) {
    (void)work, (void)stream;
    void *memory;
    *out = NULL;
    TAGC_TRY(tagc_memory_create(sizeof **out + n_rows * sizeof *rows, "batch of deltas", &memory));
    *out = memory;
    **out = (tagc_delta_batch){.kind = kind, .n_rows = n_rows};
    return cpu_delta_point(*out, rows, results);
}

static tagc_status cpu_delta_run(tagc_delta_batch *batch) {
    for (size_t i = 0; i < batch->n_rows; i++) {
        const tagc_delta_row *row = &batch->rows[i];
        batch->results[i] = 0;
        if (batch->kind == TAGC_DELTA_ENCODE)
            batch->results[i] = tagc_delta_encode(row->bits, row->values, row->base, row->n, row->body);
        else
            tagc_delta_apply(row->bits, row->body, row->out, row->n);
    }
    return TAGC_OK;
}

static void cpu_delta_destroy(tagc_delta_batch *batch) {
    tagc_memory_destroy(batch);
}

const tagc_batch_maker tagc_batch_cpu = {
    .abi = TAGC_BATCH_ABI,
    .name = "cpu",
    .prepare = cpu_prepare,
    .work_bytes = cpu_work_bytes,
    .create = cpu_create,
    .point = cpu_point,
    .run = cpu_run,
    .destroy = cpu_destroy,
    .last_error = tagc_last_error,
    .delta_work_bytes = cpu_delta_work_bytes,
    .delta_create = cpu_delta_create,
    .delta_point = cpu_delta_point,
    .delta_run = cpu_delta_run,
    .delta_destroy = cpu_delta_destroy,
    .slots = &tagc_slots_cpu,
};

/* ---- makers in libraries of their own ---- */

#define CUDA_LIBRARY "libtagc-cuda.so"

/* In the folder of the file that this function is in. */
static void *open_beside(const char *name) {
    Dl_info here;
    char path[4096];
    const char *slash;
    if (!dladdr((void *)(size_t)tagc_batch_maker_of, &here) || !here.dli_fname) return NULL;
    slash = strrchr(here.dli_fname, '/');
    if (!slash) return NULL;
    int n = snprintf(path, sizeof path, "%.*s/%s", (int)(slash - here.dli_fname), here.dli_fname, name);
    return n > 0 && (size_t)n < sizeof path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
}

static tagc_status load_cuda(const tagc_batch_maker **out) {
    const char *asked = getenv("TAGC_CUDA_LIBRARY");
    if (asked && !*asked) asked = NULL;
    void *library = asked ? NULL : open_beside(CUDA_LIBRARY);
    if (!library) library = dlopen(asked ? asked : CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "kernels for CUDA are missing: %s (TAGC_CUDA_LIBRARY may name the file)", dlerror());
    const tagc_batch_maker *(*make)(void) = NULL;
    *(void **)&make = dlsym(library, "tagc_cuda_batch_maker");
    const tagc_batch_maker *maker = make ? make() : NULL;
    if (!maker || maker->abi != TAGC_BATCH_ABI) {
        unsigned abi = maker ? maker->abi : 0;
        dlclose(library);
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "%s has batches of version %u, this libtagc needs version %u",
                         asked ? asked : CUDA_LIBRARY, abi, TAGC_BATCH_ABI);
    }
    *out = maker; /* the library stays open as long as the process lives */
    return TAGC_OK;
}

tagc_status tagc_batch_maker_of(const char *name, const tagc_batch_maker **out) {
    *out = NULL;
    if (strcmp(name, "cpu") == 0) {
        *out = &tagc_batch_cpu;
        return TAGC_OK;
    }
    if (strcmp(name, "cuda") == 0) return load_cuda(out);
    return tagc_fail(TAGC_ERR_ARGUMENT, "no maker of batches is called \"%s\": cpu or cuda", name);
}
