/* What the reducers of a part read, and where their sums go: they are fed from a unit's pieces, row by row. */
#include "codec/elements.h"
#include "unit/unit.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Of the reducer over hosts. */
static uint64_t row_elems(const tagc_model_part *part) {
    return tagc_part_place_elems(part) / (uint64_t)part->model->n_hosts;
}

/* ---- means beyond fp16 ---- */

static const float largest_fp16 = 65504;

static int is_mean_in_fp16(const tagc_model_part *part) {
    const tagc_model_options *o = &part->model->options;
    return o->formats.sum == TAGC_ELEMENT_FP16 && o->op == TAGC_OP_AVG && part->unit->factor == 1;
}

/* Elements of the reducer's output. */
static uint64_t output_elems(const tagc_model_part *part) {
    uint64_t n = tagc_part_place_elems(part);
    return part->model->options.layout.output == TAGC_OUTPUT_SHARD ? n / (uint64_t)part->model->n_hosts : n;
}

/* Notes what a sum has beyond the largest fp16. This is rare, so its memory is not there before. */
static void keep_rest(tagc_model_part *part, uint64_t at, float rest) {
    void *memory;
    uint64_t n = output_elems(part), n_residual = tagc_reducer_residual_elems(part->reducer);
    part->n_saturated++;
    if (n_residual == 0) return;
    if (!part->beyond) {
        if (tagc_memory_create((size_t)(n + n_residual) * sizeof(float), "sums beyond fp16", &memory) !=
            TAGC_OK)
            return;
        part->beyond = memory;
        memset(memory, 0, (size_t)n * sizeof(float));
    }
    part->beyond[at] = rest;
}

/* at: of the first one in the reducer's output. */
static void saturate(tagc_model_part *part, uint64_t at, uint64_t n, float *sums) {
    for (uint64_t i = 0; i < n; i++) {
        float most = sums[i] < 0 ? -largest_fp16 : largest_fp16;
        if (!(fabsf(sums[i]) > largest_fp16) || isinf(sums[i])) continue;
        keep_rest(part, at + i, sums[i] - most);
        sums[i] = most;
    }
}

/* After the exchange. All ranks have the same rest of what all of them get; the owner alone has that of its row, which the next mean
 * divides. */
static tagc_status add_rest(tagc_model_part *part) {
    uint64_t n = output_elems(part), n_residual = tagc_reducer_residual_elems(part->reducer);
    int is_all = n == n_residual;
    float *residual = part->beyond + n, *own = residual + (is_all ? 0 : (uint64_t)part->model->host * n),
          weight = is_all ? 1 : (float)part->model->n_hosts;
    TAGC_TRY(tagc_reducer_get_residual(part->reducer, residual, n_residual));
    for (uint64_t i = 0; i < n; i++) own[i] = fmaf(part->beyond[i], weight, own[i]);
    return tagc_reducer_set_residual(part->reducer, residual, n_residual);
}

tagc_status tagc_part_settle_rest(tagc_model_part *part, int is_taken) {
    tagc_status status = part->beyond && is_taken ? add_rest(part) : TAGC_OK;
    tagc_memory_destroy(part->beyond);
    part->beyond = NULL;
    return status;
}

/* ---- what reducers read and write ---- */

/* The host's sums are where gradients were. */
static tagc_status start_between(void *context, const void **lent) {
    tagc_model_part *part = context;
    (void)lent;
    if (part->unit->status != TAGC_OK) return tagc_fail(part->unit->status, "%s", part->unit->text);
    if (part->host_sum && part->host_status != TAGC_OK)
        return tagc_fail(part->host_status, "%s", part->host_text);
    if (part->host_sum) TAGC_TRY(tagc_part_rest(part));
    return tagc_part_sample(part);
}

static void fill_between(void *context, size_t row, size_t first, size_t n, void *values) {
    tagc_model_part *part = context;
    tagc_class kind = part->model->tensors[part->members[0]].kind;
    int element = tagc_reads_bf16(&part->model->options, kind) ? TAGC_ELEMENT_BF16 : TAGC_ELEMENT_FP32;
    uint64_t begin = tagc_part_place_elems(part) * (uint64_t)part->model->place;
    tagc_part_read(part, begin + row * row_elems(part) + first, n, element, values);
    if (part->n_full > 0) part->square += tagc_elements_square(values, element, 0, n);
}

enum { N_CHANGED = 4096 };

/* Writes sums where they go, times a factor, piece by piece. is_host_sum: over gradients. */
static void take(tagc_model_part *part, int is_host_sum, uint64_t at, size_t n, const float *sums) {
    float changed[N_CHANGED], factor = is_host_sum || !part->host_sum ? part->unit->factor : 1;
    int is_mean = !is_host_sum && is_mean_in_fp16(part), changes = sums && (factor != 1 || is_mean);
    for (size_t done = 0, n_here; done < n; done += n_here) {
        const float *from = changes ? changed : sums ? sums + done : NULL;
        n_here = changes && n - done > N_CHANGED ? N_CHANGED : n - done;
        for (size_t i = 0; changes && i < n_here; i++) changed[i] = sums[done + i] * factor;
        if (changes && is_mean) saturate(part, at + done - tagc_part_own_row(part), n_here, changed);
        if (is_host_sum)
            tagc_part_write_gradient(part, at + done, n_here, from, &part->lacks);
        else
            tagc_part_write(part, at + done, n_here, TAGC_ELEMENT_FP32, from);
    }
}

/* The rank's own row, or of what all ranks of a place get, row by row. */
static void take_sums(void *context, size_t row, size_t first, size_t n, const float *sums) {
    tagc_model_part *part = context;
    take(part, 0, tagc_part_own_row(part) + row * row_elems(part) + first, n, sums);
}

static void end_between(void *context, tagc_status status) {
    (void)context, (void)status;
}

static tagc_status start_host_sum(void *context, const void **lent) {
    const tagc_model_part *part = context;
    (void)lent;
    return part->unit->status == TAGC_OK ? TAGC_OK : tagc_fail(part->unit->status, "%s", part->unit->text);
}

static void fill_host_sum(void *context, size_t row, size_t first, size_t n, void *values) {
    const tagc_model_part *part = context;
    int is_bf16 = part->model->options.formats.gradient == TAGC_ELEMENT_BF16;
    tagc_part_read(part, row * tagc_part_place_elems(part) + first, n,
                   is_bf16 ? TAGC_ELEMENT_BF16 : TAGC_ELEMENT_FP32, values);
}

/* They take the place of gradients, which this rank has sent, so that nothing is as large as a unit. In 16 bits they are rounded, after
 * the factor, since a sum without it may be beyond fp16. */
static void take_host_sum(void *context, size_t row, size_t first, size_t n, const float *sums) {
    tagc_model_part *part = context;
    (void)row;
    take(part, 1, (uint64_t)part->model->place * tagc_part_place_elems(part) + first, n, sums);
}

static void end_host_sum(void *context, tagc_status status) {
    tagc_model_part *part = context;
    if (status == TAGC_OK && part->lacks)
        status = tagc_fail(
            TAGC_ERR_ARGUMENT,
            "gradients have no piece of elements of %s of which other ranks of this host have: give "
            "zeros, since the host's sums take their place",
            part->lacks->name);
    part->host_status = status;
    if (status != TAGC_OK) snprintf(part->host_text, sizeof part->host_text, "%s", tagc_last_error());
    atomic_store(&part->has_host_sum, 1);
    tagc_comm_look_again(part->model->between);
}

static int has_host_sum(void *context) {
    tagc_model_part *part = context;
    return atomic_load(&part->has_host_sum);
}

/* The own row may be asked for after _start has failed and lent nothing. */
static void fill_nothing(void *context, size_t row, size_t first, size_t n, void *values) {
    (void)context, (void)row, (void)first;
    memset(values, 0, n * sizeof(float));
}

/* A part without kernels, of a unit that stays on a device: what it reads was packed there, and what it writes is unpacked there. */
static tagc_status lend_pinned(void *context, const void **lent) {
    const tagc_model_part *part = context;
    if (part->unit->status != TAGC_OK) return tagc_fail(part->unit->status, "%s", part->unit->text);
    *lent = part->gradient;
    return TAGC_OK;
}

static void take_pinned(void *context, size_t row, size_t first, size_t n, const float *sums) {
    const tagc_model_part *part = context;
    float *to = part->sums + row * (size_t)row_elems(part) + first;
    if (sums) memcpy(to, sums, n * sizeof *to);
    for (size_t i = 0; !sums && i < n; i++) to[i] = NAN;
}

void tagc_part_set_feeds(tagc_model_part *part) {
    int adds_up = tagc_model_adds_up(part->model);
    part->feed = (tagc_feed){.context = part,
                             .is_ready = adds_up ? has_host_sum : NULL,
                             .start = start_between,
                             .fill = fill_between,
                             .take = take_sums,
                             .end = end_between,
                             .work = adds_up ? TAGC_WORK_PLACE : TAGC_WORK_REDUCE};
    part->host_feed = (tagc_feed){.context = part,
                                  .start = start_host_sum,
                                  .fill = fill_host_sum,
                                  .take = take_host_sum,
                                  .end = end_host_sum,
                                  .work = TAGC_WORK_HOST_SUM};
    if (!part->unit->is_there) return;
    part->feed.start = lend_pinned;
    part->feed.fill = fill_nothing;
    part->feed.take = take_pinned;
    part->feed.lends = 1;
}
