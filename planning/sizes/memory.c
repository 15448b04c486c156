/* Memory by rows of a table. What tagc holds is asked of the code that lays out reducers. */
#include "sizes/memory.h"

#include "core/status.h"
#include "exchange/options.h"
#include "sizes/catalogue.h"
#include "tagc/schedule.h"
#include "transport/work.h"
#include "unit/options.h"
#include "unit/unit.h"
#include <math.h>
#include <stdlib.h>

const int tagc_gpu_sizes_gb[TAGC_N_GPU_SIZES] = {24, 40, 80};

/* ---- reducers ---- */

/* Of compress(): what units may take beside the largest one on hosts of several ranks, of which each has a part of the host's memory. */
enum { MORE_OF_HOSTS = 1 << 20 };

/* As compress() makes models: a host's ranks add up in what gradients are. Where they send each other sums, there is room for that. */
tagc_status tagc_plan_host_memory(const tagc_reducer_options *parts, const uint32_t *units, size_t n,
                                  int world_size, int n_places, int n_bytes, tagc_host_memory *out) {
    tagc_model_options model;
    tagc_model_options_init(&model);
    model.formats.gradient = n_bytes == 2 ? TAGC_ELEMENT_BF16 : TAGC_ELEMENT_FP32;
    model.hosts.format = n_bytes == 2 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
    uint64_t more = n_places > 1 ? MORE_OF_HOSTS : TAGC_MORE_WORK_BYTES;
    TAGC_TRY(tagc_plan_reducers(parts, units, n, world_size, n_places, &model, more, out));
    if (n_places > 1 && n > 0 && parts[0].output == TAGC_OUTPUT_UNIT)
        out->transient += (1 + (uint64_t)n_places) * TAGC_SPREAD_BYTES;
    return TAGC_OK;
}

/* ---- a GPT ---- */

/* Values of a unit: of a block, or under DDP of a bucket, which holds one matrix. */
typedef struct unit_values {
    uint64_t compressed, mild, dense;
} unit_values;

enum { UNITS_OF_BLOCK = 4, PARTS_OF_UNIT = 3 };

static int list_units(int n_layer, int n_embd, int is_ddp, unit_values *units) {
    uint64_t width = (uint64_t)n_embd, square = width * width;
    const unit_values whole = {9 * square, 3 * square, 13 * width};
    const unit_values buckets[UNITS_OF_BLOCK] = {
        {0, 3 * square, 0}, {square, 0, 0}, {4 * square, 0, 0}, {4 * square, 0, 0}};
    int n = 0;
    for (int layer = 0; layer < n_layer; layer++) {
        if (!is_ddp) units[n++] = whole;
        for (int i = 0; is_ddp && i < UNITS_OF_BLOCK; i++) units[n++] = buckets[i];
    }
    for (int i = 0; i < 2; i++) units[n++] = (unit_values){TAGC_MESH_VOCAB * width, 0, 0};
    return n;
}

typedef struct deployment {
    int ranks, inside; /* that exchange, and those of a host that add up before */
    int is_ddp;
} deployment;

/* The options of a unit's reducers at a level. */
static size_t list_parts(const unit_values *unit, const deployment *d, int level, uint32_t number,
                         tagc_reducer_options *parts) {
    const uint64_t values[PARTS_OF_UNIT] = {unit->compressed, unit->mild, unit->dense}; /* by tagc_class */
    uint64_t grain = 16 * (uint64_t)d->ranks * (uint64_t)d->inside;
    tagc_model_options model;
    size_t n = 0;
    tagc_model_options_init(&model);
    if (d->is_ddp) model.layout.output = TAGC_OUTPUT_UNIT;
    for (int kind = 0; kind < PARTS_OF_UNIT; kind++) {
        if (values[kind] == 0) continue;
        tagc_exchanged what = {.kind = (tagc_class)kind,
                               .is_followed = 1,
                               .n_elems = (values[kind] + grain - 1) / grain * 16 * (uint64_t)d->ranks,
                               .tag = number,
                               .n_hosts = d->ranks,
                               .n_places = d->inside};
        if (kind != TAGC_CLASS_DENSE) /* else in fp32, as it is; cannot fail: there is such a level */
            (void)tagc_schedule_plan_of_level(NULL, what.kind, level, &what.plan);
        tagc_options_between(&model, &what, &parts[n++]);
    }
    return n;
}

typedef struct work_memory {
    unit_values *units;
    tagc_reducer_options *parts;
    uint32_t *of_unit;
} work_memory;

static uint64_t larger(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

/* Raises what tagc takes to that of a level. */
static tagc_status add_level(const work_memory *m, int n_units, const deployment *d, int level,
                             tagc_codec_place codec, tagc_memory_row *row) {
    size_t n = 0;
    for (int i = 0; i < n_units; i++) {
        size_t n_parts = list_parts(&m->units[i], d, level, (uint32_t)i, m->parts + n);
        for (size_t k = 0; k < n_parts; k++) m->of_unit[n++] = (uint32_t)i;
    }
    if (codec == TAGC_CODEC_ON_DEVICE) {
        tagc_device_memory held;
        TAGC_TRY(tagc_plan_device_memory(m->parts, m->of_unit, n, d->ranks, 4,
                                         TAGC_SAMPLE_LINES * TAGC_SAMPLE_LINE, &held));
        row->residual = larger(row->residual, held.residual);
        row->buffers = larger(row->buffers, held.buffers);
        row->pinned = larger(row->pinned, held.pinned);
    } else {
        tagc_host_memory needs;
        TAGC_TRY(tagc_plan_host_memory(m->parts, m->of_unit, n, d->ranks, d->inside, 4, &needs));
        row->residual = larger(row->residual, needs.residual);
        row->buffers = larger(row->buffers, needs.buffers + needs.transient);
        row->pinned = larger(row->pinned, tagc_plan_pinned(m->parts, m->of_unit, n, d->ranks, 4));
    }
    return TAGC_OK;
}

typedef struct memory_row {
    const char *alone,
        *near; /* its name where a host has one rank, and where it has several; NULL: there is none */
    int is_ddp, n_levels; /* 0: without tagc; 1: each rank by itself; 2: sums within hosts first */
    int has_deltas;
} memory_row;

static const memory_row memory_rows[TAGC_MEMORY_MAX_ROWS] = {
    {"FSDP2", "FSDP2", 0, 0, 0},
    {"FSDP2, tagc, each rank by itself", "FSDP2, tagc, each rank by itself", 0, 1, 0},
    {NULL, "FSDP2, tagc, in two levels", 0, 2, 0},
    {"FSDP2, tagc, parameters=\"delta4\"", "FSDP2, tagc, in two levels, parameters=\"delta4\"", 0, 2, 1},
    {"DDP", "DDP", 1, 0, 0},
    {"DDP, tagc", "DDP, tagc, in two levels", 1, 2, 0},
};

static tagc_status make_row(const memory_row *w, int n_layer, int n_embd, int hosts, int per_host,
                            tagc_codec_place codec, const work_memory *m, tagc_memory_row *row) {
    int n_units = list_units(n_layer, n_embd, w->is_ddp, m->units), inside = w->n_levels == 2 ? per_host : 1;
    uint64_t n = 0, split = w->is_ddp ? 1 : (uint64_t)hosts * (uint64_t)per_host;
    for (int i = 0; i < n_units; i++) n += m->units[i].compressed + m->units[i].mild + m->units[i].dense;
    *row = (tagc_memory_row){.name = per_host > 1 ? w->near : w->alone,
                             .parameters = 4 * n / split,
                             .gradients = 4 * n / split,
                             .adam = 8 * n / split};
    const deployment d = {hosts * per_host / inside, inside, w->is_ddp};
    for (int level = TAGC_LEVEL_FRESH; w->n_levels > 0 && level <= TAGC_LEVEL_LAST; level++)
        TAGC_TRY(add_level(m, n_units, &d, level, codec, row));
    if (w->has_deltas) row->replicas = 2 * n / (uint64_t)inside;
    uint64_t tagc_bytes = row->residual + row->replicas + row->buffers, is_here = codec == TAGC_CODEC_ON_HOST;
    row->device = row->parameters + row->gradients + row->adam + (is_here ? 0 : tagc_bytes);
    row->host = row->pinned + (is_here ? tagc_bytes : 0);
    return TAGC_OK;
}

tagc_status tagc_memory_rows_make(int n_layer, int n_embd, int hosts, int per_host, tagc_codec_place codec,
                                  tagc_memory_row rows[TAGC_MEMORY_MAX_ROWS], int *n_rows) {
    size_t n_units = (size_t)n_layer * UNITS_OF_BLOCK + 2, n_parts = n_units * PARTS_OF_UNIT;
    work_memory m = {calloc(n_units, sizeof *m.units), calloc(n_parts, sizeof *m.parts),
                     calloc(n_parts, sizeof *m.of_unit)};
    tagc_status status = m.units && m.parts && m.of_unit
                             ? TAGC_OK
                             : tagc_fail(TAGC_ERR_MEMORY, "out of memory for a plan of %d layers", n_layer);
    *n_rows = 0;
    for (int i = 0; status == TAGC_OK && i < TAGC_MEMORY_MAX_ROWS; i++)
        if (per_host > 1 ? memory_rows[i].near != NULL : memory_rows[i].alone != NULL)
            status =
                make_row(&memory_rows[i], n_layer, n_embd, hosts, per_host, codec, &m, &rows[(*n_rows)++]);
    free(m.units);
    free(m.parts);
    free(m.of_unit);
    return status;
}
