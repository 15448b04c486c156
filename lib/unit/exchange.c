/* One exchange of a unit: what is packed into its parts, and where sums go.
 *
 *   caller   begin ............................................................. end
 *   worker         | pack | sum over the host | sample | select, encode ... add | unpack |
 *
 * All parts of a unit, and all units, are under way at once, as far as memory goes (transport/work.h). */
#include "codec/elements.h"
#include "core/sized.h"
#include "exchange/options.h"
#include "unit/unit.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const tagc_model_stats no_stats;
static const tagc_sized stats_struct = {"tagc_model_stats", sizeof(tagc_model_stats),
                                        offsetof(tagc_model_stats, failed_here) +
                                            sizeof(uint64_t), /* the last field of the first release */
                                        &no_stats};

void tagc_model_stats_init_sized(tagc_model_stats *stats, size_t struct_bytes) {
    tagc_sized_init(&stats_struct, stats, struct_bytes);
}

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

static tagc_status settle_rest(tagc_model_part *part, int is_taken) {
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

/* ---- a step ---- */

tagc_status tagc_unit_check_pieces(tagc_model *model, uint32_t unit, const tagc_piece *pieces, size_t n,
                                   const char *what, int is_sum) {
    for (uint32_t i = 0; i < model->units[unit].n_members; i++) {
        tagc_member *t = &model->tensors[model->units[unit].members[i]];
        *(is_sum ? &t->n_sums : &t->n_gradients) = 0;
        *(is_sum ? &t->first_sum : &t->first_gradient) = 0;
    }
    if (n > 0 && !pieces) return tagc_fail(TAGC_ERR_ARGUMENT, "%s is NULL, and has %zu pieces", what, n);
    for (size_t i = 0; i < n; i++) {
        const tagc_piece *p = &pieces[i];
        if (p->tensor >= model->n_tensors || model->tensors[p->tensor].unit != unit)
            return tagc_fail(TAGC_ERR_ARGUMENT, "%s[%zu].tensor is %u, must be a tensor of unit %u", what, i,
                             p->tensor, unit);
        tagc_member *t = &model->tensors[p->tensor];
        uint64_t first = 0, n_all = t->n_elems;
        if (is_sum) tagc_member_owned(model, model->rank, t, &first, &n_all);
        if (p->first < first || p->n_elems > n_all || p->first - first > n_all - p->n_elems)
            return tagc_fail(TAGC_ERR_ARGUMENT,
                             "%s[%zu], %s: elements [%llu, %llu + %llu) are not within [%llu, %llu)", what, i,
                             t->name, (unsigned long long)p->first, (unsigned long long)p->first,
                             (unsigned long long)p->n_elems, (unsigned long long)first,
                             (unsigned long long)(first + n_all));
        if (p->n_elems > 0 && !p->values)
            return tagc_fail(TAGC_ERR_ARGUMENT, "%s[%zu].values, %s, is NULL", what, i, t->name);
        size_t *n_before = is_sum ? &t->n_sums : &t->n_gradients;
        if (*n_before == 0) *(is_sum ? &t->first_sum : &t->first_gradient) = i;
        if (*n_before > 0 && (p[-1].tensor != p->tensor || p->first < p[-1].first + p[-1].n_elems))
            return tagc_fail(
                TAGC_ERR_ARGUMENT,
                "%s[%zu], %s: pieces of a tensor must come one after the other, in ascending order", what, i,
                t->name);
        ++*n_before;
    }
    return TAGC_OK;
}

/* Where the caller has added up within a host, others of it have the rest. */
static tagc_status check_places(const tagc_model *model, const tagc_piece *pieces, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const tagc_member *t = &model->tensors[pieces[i].tensor];
        if (!tagc_part_has(t->part, t, pieces[i].first, pieces[i].n_elems))
            return tagc_fail(TAGC_ERR_ARGUMENT,
                             "gradients[%zu], %s: elements [%llu, %llu) are not all of place %d (summed)", i,
                             t->name, (unsigned long long)pieces[i].first,
                             (unsigned long long)(pieces[i].first + pieces[i].n_elems), model->place);
    }
    return TAGC_OK;
}

/* Of flats in arrays of the caller's: one for each part. */
static tagc_status check_arrays(tagc_model *model, uint32_t unit, const tagc_piece *pieces, size_t n,
                                const char *what, int is_sum) {
    int is_chunk = is_sum && model->options.layout.output != TAGC_OUTPUT_UNIT;
    tagc_model_unit *u = &model->units[unit];
    for (uint32_t p = 0; p < u->n_parts; p++) {
        tagc_model_part *part = &u->parts[p];
        const tagc_piece *piece = NULL;
        for (size_t i = 0; pieces && i < n; i++)
            if (pieces[i].tensor == part->members[0]) piece = &pieces[i];
        uint64_t n_elems = part->width * (is_chunk ? 1 : (uint64_t)model->n_owners);
        if (!piece || n != u->n_parts || piece->first != 0 || piece->n_elems != n_elems || !piece->values)
            return tagc_fail(TAGC_ERR_ARGUMENT,
                             "%s must have %u pieces, and one for the flat of %s of [0, %llu)", what,
                             u->n_parts, model->tensors[part->members[0]].name, (unsigned long long)n_elems);
        if (is_sum)
            part->sums = piece->values;
        else
            part->gradient = piece->values;
    }
    return TAGC_OK;
}

tagc_status tagc_unit_check(const tagc_model *model, uint32_t unit, const char *what, int is_begun) {
    if (!model) return tagc_fail(TAGC_ERR_ARGUMENT, "model is NULL");
    if (unit >= model->n_units)
        return tagc_fail(TAGC_ERR_ARGUMENT, "unit is %u, must be below %u", unit, model->n_units);
    if (model->units[unit].is_begun != is_begun)
        return tagc_fail(TAGC_ERR_STATE,
                         is_begun ? "%s of unit %u, which is not under way"
                                  : "%s of unit %u, which is under way",
                         what, unit);
    return TAGC_OK;
}

static void note(tagc_model_unit *unit, tagc_status status) {
    if (status == TAGC_OK || unit->status != TAGC_OK) return;
    unit->status = status;
    snprintf(unit->text, sizeof unit->text, "%s", tagc_last_error());
}

static tagc_status begin_plain(tagc_model_part *part) {
    const tagc_model *model = part->model;
    const tagc_model_unit *unit = part->unit;
    uint64_t n_elems = part->width * (uint64_t)model->n_owners;
    if (unit->status != TAGC_OK) return tagc_reducer_fail(part->reducer, unit->status, unit->text);
    TAGC_TRY(tagc_part_sample(part));
    if (part->n_full > 0) part->square = tagc_elements_square(part->gradient, TAGC_ELEMENT_FP32, 0, n_elems);
    return tagc_reducer_begin(part->reducer, part->gradient, n_elems, part->sums,
                              model->options.layout.output == TAGC_OUTPUT_UNIT ? n_elems : part->width);
}

static tagc_status begin_there(tagc_model_part *part) {
    tagc_model_unit *unit = part->unit;
    if (unit->status == TAGC_OK) note(unit, tagc_part_sample(part));
    return part->model->device->begin_part(part, unit->status);
}

static tagc_status begin_parts(tagc_model_unit *unit) {
    for (uint32_t p = 0; p < unit->n_parts; p++) {
        tagc_model_part *part = &unit->parts[p];
        atomic_store(&part->has_host_sum, 0);
        part->lacks = NULL;
        part->n_full = 0;
        part->square = 0;
        part->n_saturated = 0;
        part->reducer->now.word = unit->word;
        if (part->host_sum) part->host_sum->now.word = unit->word;
        if (tagc_model_is_plain(part->model)) {
            note(unit, begin_plain(part)); /* and the other parts, since peers begin them */
            continue;
        }
        if (part->is_there) {
            TAGC_TRY(begin_there(part));
            continue;
        }
        if (part->host_sum) TAGC_TRY(tagc_reducer_begin_fed(part->host_sum));
        TAGC_TRY(tagc_reducer_begin_fed(part->reducer));
    }
    return TAGC_OK;
}

/* Of all its parts, also after a failure, because peers wait. */
static tagc_status end_parts(tagc_model_unit *unit, tagc_model_stats *out) {
    tagc_status status = TAGC_OK;
    char text[TAGC_ERROR_TEXT_BYTES] = "";
    for (uint32_t p = 0; p < unit->n_parts; p++) {
        tagc_model_part *part = &unit->parts[p];
        tagc_reducer *reducers[] = {part->reducer, part->host_sum};
        for (int i = 0; i < 2; i++) {
            tagc_reducer_stats stats;
            tagc_reducer_stats_init(&stats);
            if (!reducers[i] || !reducers[i]->now.begun) continue;
            tagc_status failure = part->is_there ? part->model->device->end_part(part, &stats)
                                                 : tagc_reducer_end(reducers[i], &stats);
            int is_echo = i == 0 && part->host_sum && part->host_status != TAGC_OK;
            out->failed_here |= (reducers[i]->now.failure != TAGC_OK && !is_echo) || part->lacks != NULL;
            if (failure != TAGC_OK && status == TAGC_OK) {
                status = failure;
                snprintf(text, sizeof text, "%s", tagc_last_error());
            }
            for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
                *(i ? &out->n_bytes_within : &out->n_bytes_sent) += stats.n_bytes_sent[leg];
                if (i == 0) out->n_bytes_received += stats.n_bytes_received[leg];
            }
            out->nonfinite |= stats.nonfinite != 0;
            if (stats.nonfinite) part->square = (double)NAN;
            if (i) continue;
            out->n_sent += stats.n_sent;
            out->n_elems += reducers[i]->options.n_elems;
            out->total_s = stats.total_s > out->total_s ? stats.total_s : out->total_s;
        }
    }
    return status == TAGC_OK ? TAGC_OK : tagc_fail(status, "%s", text);
}

tagc_status tagc_model_make_spread(tagc_model *model) {
    if (!tagc_model_adds_up(model) || model->options.layout.output != TAGC_OUTPUT_UNIT) return TAGC_OK;
    TAGC_TRY(
        tagc_work_open(model->within, &tagc_host_arrays.heap, TAGC_WORK_SPREAD, TAGC_NO_TAG, &model->spread));
    return tagc_work_set(model->within, &model->spread, (size_t)(1 + model->n_places) * TAGC_SPREAD_BYTES);
}

/* The ranks of a host send each other the sums of their places, slice by slice. */
static tagc_status spread_part(tagc_model *model, const tagc_model_part *part, tagc_model_stats *stats) {
    size_t width = tagc_element_bytes(model->options.formats.sum), most = TAGC_SPREAD_BYTES / width;
    uint64_t n_place = tagc_part_place_elems(part), own = (uint64_t)model->place * n_place;
    char *sent = model->spread.memory, *all = sent + TAGC_SPREAD_BYTES;
    for (uint64_t at = 0, n; at < n_place; at += n) {
        n = n_place - at < most ? n_place - at : most;
        tagc_part_read_sums(part, own + at, n, sent);
        TAGC_TRY(tagc_comm_all_gather_as(model->within, TAGC_LEG_RESULT, sent, n * width, all,
                                         (size_t)model->n_places * n * width));
        stats->n_bytes_within += n * width * (uint64_t)(model->n_places - 1);
        for (int place = 0; place < model->n_places; place++)
            if (place != model->place)
                tagc_part_write(part, (uint64_t)place * n_place + at, n, model->options.formats.sum,
                                all + (size_t)place * n * width);
    }
    return TAGC_OK;
}

/* Models of a comm end one after the other, as its collectives must come. */
static tagc_status spread(tagc_model_unit *unit, tagc_model_stats *stats) {
    tagc_model *model = unit->model;
    tagc_status status = TAGC_OK;
    tagc_work_line_up(model->within, &model->spread);
    tagc_work_wait(model->within, &model->spread);
    for (uint32_t p = 0; p < unit->n_parts && status == TAGC_OK; p++)
        status = spread_part(model, &unit->parts[p], stats);
    tagc_work_give(model->within, &model->spread);
    return status;
}

/* How an exchange ends in which all ranks have asked alike; and what makes its word another one than that of an exchange. */
static const tagc_status ASKED = TAGC_ERR_STATE;
static const uint64_t word_that_asks = 0x6d17a55e4b0c9f21u;

/* What ranks of a host must have alike, whoever adds up: it tells units and their words from each other. */
static uint32_t word_within(const tagc_model_unit *unit) {
    uint64_t words[] = {unit->word, tagc_unit_number(unit)};
    return (uint32_t)tagc_checksum(words, sizeof words);
}

/* What has begun: waits for it. What failed between hosts, ranks of another place do not know of. */
static tagc_status end_exchange_of(tagc_model_unit *unit, tagc_model_stats *stats) {
    tagc_model *model = unit->model;
    tagc_status status = end_parts(unit, stats);
    if (model->within) {
        int is_own = stats->failed_here || unit->status != TAGC_OK;
        status = tagc_model_agree_within(model, status, is_own, word_within(unit));
        stats->n_bytes_within += TAGC_VERDICT_BYTES * (uint64_t)(model->n_places - 1);
    }
    if (model->spread.n_bytes > 0 && status == TAGC_OK) status = spread(unit, stats);
    status = tagc_model_share(model, status);
    for (uint32_t p = 0; p < unit->n_parts; p++) {
        tagc_status failure = settle_rest(&unit->parts[p], status == TAGC_OK);
        stats->n_saturated += unit->parts[p].n_saturated;
        stats->failed_here |= failure != TAGC_OK;
        if (status == TAGC_OK) status = failure;
    }
    tagc_status rested = unit->is_there ? TAGC_OK : tagc_rest_end(unit);
    stats->failed_here |= rested != TAGC_OK;
    return status == TAGC_OK ? rested : status;
}

static void note_outcome(tagc_model_unit *unit, tagc_status status) {
    unit->ended = status;
    snprintf(unit->ended_text, sizeof unit->ended_text, "%s", status == TAGC_OK ? "" : tagc_last_error());
}

/* Ranks of a host agree on each unit in the order in which units began, whichever the caller ends first, or one that failed to begin. */
static void end_earlier(tagc_model_unit *unit) {
    tagc_model *model = unit->model;
    for (tagc_model_unit *first = NULL; model->within && first != unit;) {
        first = unit;
        for (uint32_t u = 0; u < model->n_units; u++) {
            tagc_model_unit *other = &model->units[u];
            if (other->is_begun && !other->is_over && other->n_before < first->n_before) first = other;
        }
        if (first == unit) return;
        tagc_model_stats_init(&first->stats);
        note_outcome(first, end_exchange_of(first, &first->stats));
        first->is_over = 1;
    }
}

/* That of an exchange which is over, or that the queue's thread runs. */
static tagc_status take_outcome(tagc_model_unit *unit, tagc_model_stats *stats) {
    if (unit->model->device) unit->model->device->wait(unit);
    *stats = unit->stats;
    tagc_status rested = unit->is_there ? tagc_rest_end(unit) : TAGC_OK;
    stats->failed_here |= rested != TAGC_OK;
    return unit->ended == TAGC_OK ? rested : tagc_fail(unit->ended, "%s", unit->ended_text);
}

static tagc_status end_of(tagc_model_unit *unit, tagc_model_stats *stats) {
    if (unit->model->device || unit->is_over) return take_outcome(unit, stats);
    end_earlier(unit);
    return end_exchange_of(unit, stats);
}

static tagc_status end_unit(tagc_model *model, uint32_t number, tagc_model_stats *stats) {
    tagc_model_unit *unit = &model->units[number];
    tagc_status status = end_of(unit, stats);
    unit->is_begun = 0;
    unit->gradients = unit->sums = NULL;
    stats->failed_here = status != TAGC_OK && (stats->failed_here || unit->status != TAGC_OK);
    if (status != TAGC_OK && !(unit->is_asking && status == ASKED)) tagc_unit_forget_windows(model, unit);
    if (status == TAGC_OK) return TAGC_OK;
    char label[TAGC_LABEL_BYTES];
    tagc_unit_label(model, number, unit->members[0], label);
    return tagc_fail_in(status, "%s", label);
}

static void mark_begun(tagc_model_unit *unit) {
    unit->is_begun = 1;
    unit->is_over = 0;
    unit->n_before = unit->model->n_begun++;
    unit->is_blind = unit->model->is_blind;
    unit->n_exchanges++;
}

/* There are none to read or write. */
static void forget_pieces(tagc_model_unit *unit) {
    uint32_t number = tagc_unit_number(unit);
    (void)tagc_unit_check_pieces(unit->model, number, NULL, 0, "gradients", 0);
    (void)tagc_unit_check_pieces(unit->model, number, NULL, 0, "sums", 1);
    unit->gradients = unit->sums = tagc_pieces_of(NULL);
    unit->n_gradients = unit->n_sums = 0;
}

/* Its failure so far is in unit->status, and the other ranks learn of it from this exchange. */
static tagc_status begin_unit(tagc_model_unit *unit) {
    if (unit->status == TAGC_OK && !unit->is_there) note(unit, tagc_rest_begin(unit->model, unit, NULL));
    return begin_parts(unit);
}

/* Notes where the arrays are, and in unit->status what is wrong with them. */
static void take_pieces(tagc_model *model, uint32_t number, const tagc_piece *gradients, size_t n_gradients,
                        const tagc_piece *sums, size_t n_sums) {
    tagc_model_unit *unit = &model->units[number];
    unit->status = TAGC_OK;
    if (model->options.layout.cut == TAGC_CUT_FLAT_ARRAYS) {
        note(unit, check_arrays(model, number, gradients, n_gradients, "gradients", 0));
        note(unit, check_arrays(model, number, sums, n_sums, "sums", 1));
        gradients = sums = NULL;
        n_gradients = n_sums = 0;
    }
    /* Both, also after a failure: their counts are those of this exchange from here on. */
    note(unit, tagc_unit_check_pieces(model, number, gradients, n_gradients, "gradients", 0));
    note(unit, tagc_unit_check_pieces(model, number, sums, n_sums, "sums", 1));
    if (unit->status == TAGC_OK && model->within && model->options.hosts.summed)
        note(unit, check_places(model, gradients, n_gradients));
    unit->gradients = tagc_pieces_of(gradients);
    unit->n_gradients = n_gradients;
    unit->sums = tagc_pieces_of(sums);
    unit->n_sums = n_sums;
}

tagc_status tagc_model_begin(tagc_model *model, uint32_t number, const tagc_piece *gradients,
                             size_t n_gradients, const tagc_piece *sums, size_t n_sums) {
    TAGC_TRY(tagc_unit_check(model, number, "begin", 0));
    TAGC_TRY(tagc_comm_check_open(model->between));
    if (model->device)
        return tagc_fail(TAGC_ERR_STATE, "begin: the model's arrays are a device's (tagc_model_begin_on)");
    tagc_model_unit *unit = &model->units[number];
    take_pieces(model, number, gradients, n_gradients, sums, n_sums);
    mark_begun(unit);
    tagc_status status = begin_unit(unit);
    if (status == TAGC_OK && unit->status == TAGC_OK) return TAGC_OK;
    /* The other ranks have begun, too. */
    tagc_model_stats stats;
    tagc_model_stats_init(&stats);
    tagc_status ended = end_unit(model, number, &stats);
    if (unit->status != TAGC_OK) return tagc_fail(unit->status, "%s", unit->text);
    return status != TAGC_OK ? status : ended;
}

tagc_status tagc_model_begin_there(tagc_model *model, uint32_t number, const tagc_piece *gradients,
                                   size_t n_gradients, const tagc_piece *sums, size_t n_sums, void *stream,
                                   int waits) {
    TAGC_TRY(tagc_unit_check(model, number, "begin_on", 0));
    TAGC_TRY(tagc_comm_check_open(model->between));
    if (!model->device)
        return tagc_fail(TAGC_ERR_STATE,
                         "begin_on: the model's arrays are in host memory (tagc_model_begin)");
    tagc_model_unit *unit = &model->units[number];
    take_pieces(model, number, gradients, n_gradients, sums, n_sums);
    mark_begun(unit);
    if (unit->status == TAGC_OK && unit->is_there) note(unit, tagc_rest_begin(model, unit, stream));
    model->device->begin(unit, stream, waits);
    return TAGC_OK;
}

tagc_status tagc_unit_exchange(tagc_model_unit *unit, tagc_status failure, const char *text) {
    tagc_model_stats_init(&unit->stats);
    if (failure != TAGC_OK) note(unit, tagc_fail(failure, "%s", text));
    if (unit->status != TAGC_OK) forget_pieces(unit);
    tagc_status status = begin_unit(unit);
    if (status != TAGC_OK) note(unit, status);
    if (unit->is_there) unit->model->device->add(unit);
    status = end_exchange_of(unit, &unit->stats);
    if (status == TAGC_OK && unit->status != TAGC_OK) status = tagc_fail(unit->status, "%s", unit->text);
    note_outcome(unit, status); /* of all ranks: that of another word comes before the own failure */
    return status;
}

tagc_status tagc_model_begin_failed(tagc_model *model, uint32_t number, tagc_status failure,
                                    const char *text) {
    TAGC_TRY(tagc_unit_check(model, number, "begin_failed", 0));
    if (failure <= TAGC_OK || failure > TAGC_LAST_STATUS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "failure is %d, must be in [1, %d]", (int)failure,
                         TAGC_LAST_STATUS);
    TAGC_TRY(tagc_comm_check_open(model->between));
    tagc_model_unit *unit = &model->units[number];
    forget_pieces(unit);
    unit->status = failure;
    snprintf(unit->text, sizeof unit->text, "%s", text ? text : "");
    mark_begun(unit);
    if (model->device) {
        model->device->begin(unit, NULL, 0);
        return TAGC_OK;
    }
    tagc_status status = begin_unit(unit);
    if (status == TAGC_OK) return TAGC_OK;
    tagc_model_stats stats;
    tagc_model_stats_init(&stats);
    (void)end_unit(model, number, &stats);
    return status;
}

tagc_status tagc_model_ask(tagc_model *model, uint32_t number, uint64_t word) {
    tagc_model_stats stats;
    tagc_model_stats_init(&stats);
    TAGC_TRY(tagc_unit_check(model, number, "ask", 0));
    tagc_model_unit *unit = &model->units[number];
    uint64_t former = unit->word, n_exchanges = unit->n_exchanges;
    unit->word = word ^ word_that_asks;
    unit->is_asking = 1;
    tagc_status status = tagc_model_begin_failed(model, number, ASKED, "another rank asks");
    if (status == TAGC_OK) status = end_unit(model, number, &stats);
    unit->is_asking = 0;
    unit->word = former;
    unit->n_exchanges = n_exchanges;
    for (uint32_t p = 0; p < unit->n_parts; p++)
        TAGC_TRY(tagc_reducer_set_steps(unit->parts[p].reducer, n_exchanges));
    return status == ASKED ? TAGC_OK : status;
}

tagc_status tagc_model_set_word(tagc_model *model, uint32_t number, uint64_t word) {
    TAGC_TRY(tagc_unit_check(model, number, "set_word", 0));
    model->units[number].word = word;
    return TAGC_OK;
}

tagc_status tagc_model_set_factor(tagc_model *model, uint32_t number, double factor) {
    TAGC_TRY(tagc_unit_check(model, number, "set_factor", 0));
    if (!isfinite((float)factor)) /* by which fp32 is multiplied */
        return tagc_fail(TAGC_ERR_ARGUMENT, "factor is %g, must be finite in fp32", factor);
    if (factor != 1 && model->options.layout.cut == TAGC_CUT_FLAT_ARRAYS)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "set_factor: cut is FLAT_ARRAYS");
    model->units[number].factor = (float)factor;
    return TAGC_OK;
}

tagc_status tagc_model_test(tagc_model *model, uint32_t number, int *done) {
    if (!done) return tagc_fail(TAGC_ERR_ARGUMENT, "done is NULL");
    *done = 0;
    TAGC_TRY(tagc_unit_check(model, number, "test", 1));
    const tagc_model_unit *unit = &model->units[number];
    *done = 1;
    if (model->device) {
        *done = model->device->is_over(&model->units[number]);
        return TAGC_OK;
    }
    for (uint32_t p = 0; p < unit->n_parts && !unit->is_over && *done; p++)
        TAGC_TRY(tagc_reducer_test(unit->parts[p].reducer, done));
    return TAGC_OK;
}

tagc_status tagc_model_end(tagc_model *model, uint32_t number, tagc_model_stats *out) {
    tagc_model_stats stats;
    tagc_model_stats_init(&stats);
    TAGC_TRY(tagc_unit_check(model, number, "end", 1));
    if (out) TAGC_TRY(tagc_sized_check(&stats_struct, out)); /* while the exchange can still be ended */
    tagc_status status = end_unit(model, number, &stats);
    if (status != TAGC_OK) stats = (tagc_model_stats){.failed_here = stats.failed_here};
    if (out) tagc_sized_write(&stats_struct, &stats, out);
    return status;
}

uint32_t tagc_model_n_parts(const tagc_model *model, uint32_t unit) {
    return model && unit < model->n_units ? model->units[unit].n_parts : 0;
}

tagc_status tagc_model_part_stats(const tagc_model *model, uint32_t number, uint32_t part, uint32_t *tensor,
                                  uint64_t *n_elems, tagc_reducer_stats *stats) {
    TAGC_TRY(tagc_unit_check(model, number, "part", 0));
    const tagc_model_unit *unit = &model->units[number];
    if (part >= unit->n_parts)
        return tagc_fail(TAGC_ERR_ARGUMENT, "part is %u, must be below %u", part, unit->n_parts);
    const tagc_model_part *of = &unit->parts[part];
    TAGC_TRY(tagc_reducer_check_stats(stats));
    if (tensor) *tensor = of->members[0];
    if (n_elems) *n_elems = 0;
    for (uint32_t i = 0; n_elems && i < of->n_members; i++)
        *n_elems += tagc_member_exchanged(model, &model->tensors[of->members[i]]);
    tagc_reducer_write_stats(of->reducer, stats);
    return TAGC_OK;
}
