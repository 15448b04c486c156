/* What the queue exchanges by itself: the agreement of all ranks, then the reducers of one unit, on arrays in pinned memory. It is
 * in C, so that the thread needs no lock of the caller's between an exchange's two flags (queue.c).
 *
 * The messages of the agreement are those of the PyTorch layer (Comm.agree), because one rank may exchange in C and another,
 * whose gradients stay on its device, in Python: 64 bytes of each rank; if they are not equal, or a rank has failed, what each rank is
 * about and its reason. */
#include "codec/elements.h"
#include "core/clock.h"
#include "core/memory.h"
#include "core/status.h"
#include "exchange/reducer.h"
#include "gpu/unit_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SAID_BYTES = 1024, STATUS_MASK = 0xff };
/* One rank's message where ranks are not of one mind. */
typedef struct said {
    char what[TAGC_WHAT_BYTES], text[SAID_BYTES];
} said;

/* ---- the agreement ---- */

/* The first number in a text of the form "elements 7; dtype float" that is another one in `other`, and how long it is. */
static const char *first_difference(const char *text, const char *other, int *n_chars) {
    size_t begin = 0;
    for (size_t n = 0; text[n] && text[n] == other[n]; n++)
        if (n > 0 && text[n - 1] == ';' && text[n] == ' ') begin = n + 1;
    const char *end = strstr(text + begin, "; ");
    *n_chars = (int)(end ? (size_t)(end - text) - begin : strlen(text + begin));
    return text + begin;
}

/* Returns the failure that the ranks have told each other. */
static tagc_status explain(const tagc_unit *unit, const tagc_comm *comm, const said *all) {
    int n_ranks = tagc_comm_world_size(comm), first = tagc_comm_name(comm, 0);
    const int64_t(*words)[TAGC_UNIT_WORDS] = (const int64_t(*)[TAGC_UNIT_WORDS])unit->everyone;
    for (int r = 0; r < n_ranks; r++) {
        tagc_status status = (tagc_status)(words[r][0] & STATUS_MASK);
        if (status == TAGC_OK) continue;
        char beginning[TAGC_WHAT_BYTES + 8]; /* an earlier agreement may have said already which rank it is */
        snprintf(beginning, sizeof beginning, "%.*s: rank", TAGC_WHAT_BYTES - 1, all[r].what);
        if (!strncmp(all[r].text, beginning, strlen(beginning))) return tagc_fail(status, "%s", all[r].text);
        return tagc_fail(status, "%s: rank %d: %s", all[r].what, tagc_comm_name(comm, r), all[r].text);
    }
    int odd = 1;
    while (odd < n_ranks - 1 && !memcmp(words[odd], words[0], sizeof words[0] - sizeof words[0][0])) odd++;
    if (strcmp(all[odd].what, all[0].what) != 0)
        return tagc_fail(
            TAGC_ERR_MISMATCH,
            "ranks do not agree: rank %d comes with %s, and rank %d with %s: every rank must use the same "
            "modules, in the same order",
            first, all[0].what, tagc_comm_name(comm, odd), all[odd].what);
    int n_one, n_other;
    const char *one = first_difference(all[0].text, all[odd].text, &n_one),
               *other = first_difference(all[odd].text, all[0].text, &n_other);
    return tagc_fail(TAGC_ERR_MISMATCH, "%s: ranks do not agree: rank %d has %.*s; rank %d has %.*s",
                     all[0].what, first, n_one, one, tagc_comm_name(comm, odd), n_other, other);
}

/* Collective over one comm. failure: of this rank, with its text. */
static tagc_status agree_over(const tagc_unit *unit, int c, const tagc_unit_step *step, tagc_status failure,
                              const char *text) {
    tagc_comm *comm = unit->of.comms[c];
    int n_ranks = tagc_comm_world_size(comm), is_agreed = failure == TAGC_OK;
    int64_t mine[TAGC_UNIT_WORDS];
    memcpy(mine, step->words, sizeof mine);
    mine[0] = (mine[0] & ~(int64_t)STATUS_MASK) | (int64_t)failure;
    TAGC_TRY(tagc_comm_all_gather(comm, mine, sizeof mine, unit->everyone, (size_t)n_ranks * sizeof mine));
    for (int r = 0; r < n_ranks; r++) /* all but the vote */
        is_agreed &= !memcmp(unit->everyone[r], mine, sizeof mine - sizeof mine[0]);
    if (is_agreed) return TAGC_OK;
    said own = {{0}, {0}}, *all = NULL;
    snprintf(own.what, sizeof own.what, "%s", unit->what);
    snprintf(own.text, sizeof own.text, "%s", failure == TAGC_OK ? step->text : text);
    TAGC_TRY(tagc_memory_create((size_t)n_ranks * sizeof *all, "what ranks say", (void **)&all));
    tagc_status status = tagc_comm_all_gather(comm, &own, sizeof own, all, (size_t)n_ranks * sizeof *all);
    for (int r = 0; r < n_ranks; r++) all[r].what[TAGC_WHAT_BYTES - 1] = all[r].text[SAID_BYTES - 1] = 0;
    if (status == TAGC_OK) status = explain(unit, comm, all);
    tagc_memory_destroy(all);
    return status;
}

/* Over the ranks of the host, of which one may have failed, and then over those of this place in all hosts. */
static tagc_status agree(const tagc_unit *unit, const tagc_unit_step *step, tagc_status failure,
                         const char *text) {
    char own[TAGC_ERROR_TEXT_BYTES];
    snprintf(own, sizeof own, "%s", text);
    for (uint32_t c = 0; c < unit->of.n_comms; c++) {
        tagc_status status = agree_over(unit, (int)c, step, failure, own);
        if (status == TAGC_OK) continue;
        failure = status;
        snprintf(own, sizeof own, "%s", tagc_last_error());
    }
    return failure;
}

/* After an agreement that the caller has made: the others wait for this rank's messages. */
static tagc_status go_on(const tagc_unit *unit, tagc_status failure, const char *text) {
    if (failure == TAGC_OK) return TAGC_OK;
    for (uint32_t c = 0; c < unit->of.n_comms; c++) tagc_comm_abort(unit->of.comms[c], text);
    return tagc_fail(failure, "%s", text);
}

/* ---- the gradient ---- */

static tagc_status look(tagc_unit *unit, tagc_unit_step *step, const void *input) {
    const tagc_unit_options *of = &unit->of;
    size_t n_full = 0;
    step->n_full = 0;
    if (!of->n_sampled) return TAGC_OK;
    for (size_t i = 0; i < unit->n_samples; i++)
        tagc_elements_read(input, of->element, unit->places[i], 1, &unit->samples[i]);
    TAGC_TRY(tagc_schedule_add(of->schedule, unit->numbers, unit->counts, of->n_sampled, unit->samples,
                               step->full, &n_full));
    if (!n_full) return TAGC_OK;
    TAGC_TRY(tagc_schedule_take(of->schedule, step->full, n_full, step->sums));
    for (uint32_t p = 0; p < of->n_parts; p++) {
        const tagc_unit_part *one = &unit->parts[p].of;
        double *squares = &step->squares[(size_t)2 * p];
        TAGC_TRY(tagc_reducer_residual_square(one->reducer, &squares[0]));
        squares[1] = 0;
        for (uint64_t i = 0; i < one->n_packs; i++)
            squares[1] += tagc_elements_square(input, of->element, one->packs[i].from, one->packs[i].length);
    }
    step->n_full = (uint32_t)n_full;
    return TAGC_OK;
}

/* Copies runs of the input, and zeros between, to a part's gradient. */
static void pack(const tagc_unit *unit, const tagc_unit_part *of, const void *input, char *gradient) {
    int element = tagc_unit_reads(of);
    size_t n_bytes = tagc_element_bytes(element);
    uint64_t end = 0;
    for (uint64_t i = 0; i < of->n_packs; i++) { /* in the order of the gradient */
        const tagc_run *run = &of->packs[i];
        char *to = gradient + run->to * n_bytes;
        memset(gradient + end * n_bytes, 0, (run->to - end) * n_bytes);
        if (element == unit->of.element)
            memcpy(to, (const char *)input + run->from * n_bytes, run->length * n_bytes);
        else
            tagc_elements_read(input, unit->of.element, run->from, run->length, (float *)(void *)to);
        end = run->to + run->length;
    }
    memset(gradient + end * n_bytes, 0, (of->n_gradient - end) * n_bytes);
}

static tagc_status begin(const tagc_unit *unit, const unit_part *one, const tagc_unit_step *step,
                         const void *input, void *output) {
    float *gradient = one->at_gradient == TAGC_NOWHERE ? NULL : step->gradients + one->at_gradient;
    float *sums = one->at_output == TAGC_NOWHERE ? output : step->outputs + one->at_output;
    if (step->number) TAGC_TRY(tagc_reducer_set_steps(one->of.reducer, step->number - 1));
    if (gradient) pack(unit, &one->of, input, (char *)gradient);
    return tagc_reducer_begin(one->of.reducer, gradient ? gradient : input, one->of.n_gradient, sums,
                              one->of.n_output);
}

static void put(const tagc_unit *unit, const unit_part *one, const tagc_unit_step *step, void *output) {
    float *sums = one->at_output == TAGC_NOWHERE ? output : step->outputs + one->at_output,
          factor = unit->of.factor;
    if (factor != 1.0f)
        for (uint64_t i = 0; i < one->of.n_output; i++) sums[i] *= factor;
    if (one->at_output == TAGC_NOWHERE) return;
    for (uint64_t i = 0; i < one->of.n_unpacks; i++) {
        const tagc_run *run = &one->of.unpacks[i];
        tagc_elements_write(sums + run->from, output, unit->of.element, run->to, run->length);
    }
}

/* After a failure it still ends what has begun, because peers wait. Returns the first one. */
static tagc_status reduce(tagc_unit *unit, tagc_unit_step *step, const void *input, void *output) {
    char text[TAGC_ERROR_TEXT_BYTES];
    uint32_t n_begun = 0;
    tagc_status failure = TAGC_OK;
    while (failure == TAGC_OK && n_begun < unit->of.n_parts)
        failure = begin(unit, &unit->parts[n_begun++], step, input, output);
    if (failure != TAGC_OK) n_begun--;
    snprintf(text, sizeof text, "%s", failure == TAGC_OK ? "" : tagc_last_error());
    if (unit->of.has_gaps) memset(output, 0, unit->of.n_output * tagc_element_bytes(unit->of.element));
    for (uint32_t p = 0; p < n_begun; p++) {
        tagc_status status = tagc_reducer_end(unit->parts[p].of.reducer, &step->stats[p]);
        if (status == TAGC_OK && failure == TAGC_OK) put(unit, &unit->parts[p], step, output);
        if (status == TAGC_OK || failure != TAGC_OK) continue;
        failure = status;
        snprintf(text, sizeof text, "%s", tagc_last_error());
    }
    return failure == TAGC_OK ? TAGC_OK : tagc_fail(failure, "%s", text);
}

tagc_status tagc_unit_run(const ticket *one, tagc_status failure, const char *text) {
    if (one->unit->model) return tagc_model_run(one);
    tagc_unit *unit = one->unit;
    tagc_unit_step *step = one->step;
    const buffer *at = &unit->queue->buffers[one->buffer];
    double start = tagc_clock_s();
    tagc_status status = step->has_agreed ? go_on(unit, failure, text) : agree(unit, step, failure, text);
    double agreed = tagc_clock_s();
    step->agree_s = agreed - start;
    step->is_agreed = step->has_agreed || status == TAGC_OK;
    if (unit->queue->kernels && unit->n_adds) {
        status = tagc_unit_reduce_ahead(one, status, tagc_last_error());
    } else {
        if (status == TAGC_OK) status = look(unit, step, at->in);
        if (status == TAGC_OK) status = reduce(unit, step, at->in, at->out);
    }
    step->exchange_s = tagc_clock_s() - agreed;
    step->status = status;
    snprintf(step->why, sizeof step->why, "%s", status == TAGC_OK ? "" : tagc_last_error());
    atomic_fetch_add(&unit->n_ended, 1);
    return status;
}

/* ---- making ---- */

static int leads_out(uint64_t at, uint64_t length, uint64_t n) {
    return length > n || at > n - length;
}

static tagc_status check(const tagc_queue *queue, const tagc_unit_options *of) {
    if (!queue || !of) return tagc_fail(TAGC_ERR_ARGUMENT, "queue or options is NULL");
    if (of->struct_bytes != sizeof *of)
        return tagc_fail(TAGC_ERR_ARGUMENT, "struct_bytes is %zu, must be %zu", of->struct_bytes, sizeof *of);
    if (!tagc_element_bytes(of->element))
        return tagc_fail(TAGC_ERR_ARGUMENT, "element is %d, must be one of tagc_element", of->element);
    if (of->n_comms < 1 || of->n_comms > 2 || !of->n_parts || !of->n_input || !of->n_output)
        return tagc_fail(
            TAGC_ERR_ARGUMENT,
            "n_comms is %u, n_parts %u, n_input %llu and n_output %llu, must be 1 or 2, and at least 1",
            of->n_comms, of->n_parts, (unsigned long long)of->n_input, (unsigned long long)of->n_output);
    for (uint32_t p = 0; p < of->n_parts; p++) {
        const tagc_unit_part *one = &of->parts[p];
        uint64_t end = 0;
        tagc_status status = tagc_reducer_check_lengths(one->reducer, one->n_gradient, one->n_output);
        if (status != TAGC_OK) return tagc_fail_in(status, "part %u", p);
        if (tagc_unit_reads(one) == TAGC_ELEMENT_BF16 && of->element != TAGC_ELEMENT_BF16)
            return tagc_fail(TAGC_ERR_ARGUMENT,
                             "element is %d, must be TAGC_ELEMENT_BF16: the reducer of part %u reads bf16",
                             of->element, p);
        for (uint64_t i = 0; i < one->n_packs; i++) {
            const tagc_run *run = &one->packs[i];
            if (run->to < end || leads_out(run->to, run->length, one->n_gradient) ||
                leads_out(run->from, run->length, of->n_input))
                return tagc_fail(TAGC_ERR_ARGUMENT,
                                 "run %llu of part %u is out of order or out of its arrays",
                                 (unsigned long long)i, p);
            end = run->to + run->length;
        }
        for (uint64_t i = 0; i < one->n_unpacks; i++) {
            const tagc_run *run = &one->unpacks[i];
            if (leads_out(run->from, run->length, one->n_output) ||
                leads_out(run->to, run->length, of->n_output))
                return tagc_fail(TAGC_ERR_ARGUMENT, "run %llu of part %u leads out of its arrays",
                                 (unsigned long long)i, p);
        }
    }
    const uint64_t *place = of->places;
    for (uint32_t s = 0; s < of->n_sampled; s++)
        for (uint32_t i = 0; i < of->counts[s]; i++, place++)
            if (*place >= of->n_input && *place != TAGC_UNCOVERED)
                return tagc_fail(TAGC_ERR_ARGUMENT, "sample %u of parameter %u is out of the input", i, s);
    return TAGC_OK;
}

static int is_whole(const tagc_run *runs, uint64_t n_runs, uint64_t n, uint64_t n_other) {
    return n_runs == 1 && runs[0].from == 0 && runs[0].to == 0 && runs[0].length == n && n == n_other;
}

static void *copy(tagc_arena *arena, const void *from, size_t n, size_t item_bytes) {
    void *to = tagc_arena_take(arena, n ? n : 1, item_bytes);
    if (to && n) memcpy(to, from, n * item_bytes);
    return to;
}

/* Called twice, like all that lays an arena out. */
static void lay_out(tagc_unit *unit, const tagc_unit_options *of, tagc_arena *arena) {
    int n_largest = 0;
    size_t n_runs = 0;
    for (uint32_t c = 0; c < of->n_comms; c++) {
        int n = tagc_comm_world_size(of->comms[c]);
        if (n > n_largest) n_largest = n;
    }
    for (uint32_t p = 0; p < of->n_parts; p++) n_runs += of->parts[p].n_packs + of->parts[p].n_unpacks;
    unit->everyone = tagc_arena_take(arena, (size_t)n_largest, sizeof *unit->everyone);
    unit->parts = tagc_arena_take(arena, of->n_parts, sizeof *unit->parts);
    unit->runs = tagc_arena_take(arena, n_runs ? n_runs : 1, sizeof *unit->runs);
    unit->n_samples = 0;
    for (uint32_t i = 0; i < of->n_sampled; i++) unit->n_samples += of->counts[i];
    unit->numbers = copy(arena, of->numbers, of->n_sampled, sizeof *unit->numbers);
    unit->counts = copy(arena, of->counts, of->n_sampled, sizeof *unit->counts);
    unit->places = copy(arena, of->places, unit->n_samples, sizeof *unit->places);
    unit->samples = tagc_arena_take(arena, unit->n_samples ? unit->n_samples : 1, sizeof *unit->samples);
    tagc_run *at = unit->runs;
    for (uint32_t p = 0; arena->base && p < of->n_parts; p++) {
        unit_part *one = &unit->parts[p];
        one->of = of->parts[p];
        if (one->of.n_packs) memcpy(at, one->of.packs, one->of.n_packs * sizeof *at);
        one->of.packs = at;
        at += one->of.n_packs;
        if (one->of.n_unpacks) memcpy(at, one->of.unpacks, one->of.n_unpacks * sizeof *at);
        one->of.unpacks = at;
        at += one->of.n_unpacks;
        one->at_gradient = one->at_output = TAGC_NOWHERE;
        if (tagc_unit_reads(&one->of) != of->element ||
            !is_whole(one->of.packs, one->of.n_packs, one->of.n_gradient, of->n_input)) {
            size_t n_bytes = one->of.n_gradient * tagc_element_bytes(tagc_unit_reads(&one->of));
            one->at_gradient = unit->n_gradients;
            unit->n_gradients += tagc_aligned(n_bytes) / sizeof(float);
        }
        if (unit->output_element != TAGC_ELEMENT_FP32 ||
            !is_whole(one->of.unpacks, one->of.n_unpacks, one->of.n_output, of->n_output)) {
            one->at_output = unit->n_outputs;
            unit->n_outputs += tagc_aligned(one->of.n_output * sizeof(float)) / sizeof(float);
        }
    }
}

tagc_status tagc_unit_create(tagc_queue *queue, const tagc_unit_options *options, tagc_unit **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    TAGC_TRY(check(queue, options));
    return tagc_unit_make(queue, NULL, options, options->element, options->n_input == options->n_output, out);
}

int tagc_unit_is_of_model(const tagc_unit *unit) {
    return unit && unit->model;
}

tagc_status tagc_unit_make_bare(tagc_queue *queue, tagc_model_place *model, size_t n_bytes_in,
                                size_t n_bytes_out, tagc_unit **out) {
    tagc_unit *unit;
    *out = NULL;
    TAGC_TRY(tagc_memory_create(sizeof *unit, "a unit", (void **)&unit));
    unit->queue = queue;
    unit->model = model;
    tagc_status status =
        tagc_job_create(queue, 0, larger_of(n_bytes_in, 1), larger_of(n_bytes_out, 1), &unit->job);
    if (status == TAGC_OK)
        *out = unit;
    else
        tagc_memory_destroy(unit);
    return status;
}

tagc_status tagc_unit_make(tagc_queue *queue, tagc_model_place *model, const tagc_unit_options *options,
                           int output_element, int may_overlap, tagc_unit **out) {
    tagc_unit probe = {0}, *unit;
    tagc_arena arena = {0};
    *out = NULL;
    lay_out(&probe, options, &arena);
    TAGC_TRY(tagc_memory_create(tagc_aligned(sizeof *unit) + arena.n_bytes, "a unit", (void **)&unit));
    unit->queue = queue;
    unit->of = *options;
    unit->model = model;
    unit->output_element = output_element;
    unit->may_overlap = may_overlap;
    arena = (tagc_arena){.base = (char *)unit + tagc_aligned(sizeof *unit)};
    lay_out(unit, options, &arena);
    size_t n_bytes = tagc_element_bytes(options->element);
    snprintf(unit->what, sizeof unit->what, "%s", options->what);
    unit->of.what = unit->what;
    int is_ahead = tagc_unit_wants_kernels(options); /* then its arrays do not come to the host */
    tagc_status status = is_ahead ? tagc_unit_make_ahead(unit) : TAGC_OK;
    if (status == TAGC_OK)
        status = tagc_job_create(queue, 0, is_ahead ? 1 : options->n_input * n_bytes,
                                 is_ahead ? 1 : options->n_output * n_bytes, &unit->job);
    if (status != TAGC_OK) {
        char text[TAGC_ERROR_TEXT_BYTES];
        snprintf(text, sizeof text, "%s", tagc_last_error());
        tagc_unit_destroy(unit);
        return tagc_fail(status, "%s", text);
    }
    *out = unit;
    return TAGC_OK;
}

static tagc_status check_length(const char *name, uint64_t n, uint64_t must) {
    if (n == must) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "%s is %llu, must be %llu: that of the unit", name,
                     (unsigned long long)n, (unsigned long long)must);
}

static tagc_status check_work(const char *name, const float *work, uint64_t n, uint64_t least) {
    if (n >= least && (work || !least)) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "step.n_%s is %llu%s, must be at least %llu (tagc_unit_work)", name,
                     (unsigned long long)n, work ? "" : ", of NULL", (unsigned long long)least);
}

tagc_status tagc_unit_enqueue(tagc_unit *unit, tagc_unit_step *step, const void *input, uint64_t n_input,
                              void *output, uint64_t n_output, void *stream, int waits, uint64_t *number) {
    if (!unit || !step) return tagc_fail(TAGC_ERR_ARGUMENT, "unit or step is NULL");
    TAGC_TRY(check_length("n_input", n_input, unit->of.n_input));
    TAGC_TRY(check_length("n_output", n_output, unit->of.n_output));
    TAGC_TRY(check_work("gradients", step->gradients, step->n_gradients, unit->n_gradients));
    TAGC_TRY(check_work("outputs", step->outputs, step->n_outputs, unit->n_outputs));
    atomic_fetch_add(&unit->n_enqueued, 1);
    return tagc_job_put(unit->job, unit, step, input, output, stream, waits, number);
}

void tagc_unit_work(const tagc_unit *unit, uint64_t *n_gradients, uint64_t *n_outputs) {
    *n_gradients = unit->n_gradients;
    *n_outputs = unit->n_outputs;
}

void tagc_unit_destroy(tagc_unit *unit) {
    if (!unit) return;
    tagc_unit_end_ahead(unit);
    tagc_job_destroy(unit->job);
    tagc_memory_destroy(unit);
}
