/* Planning and replaying the peeling of a sketch.
 *
 * Each cell keeps one 64-bit word: how many items it holds, above the XOR of their numbers. With one item
 * left the XOR is that item. `order` doubles as the queue: items enter it when first seen alone in a cell and
 * leave the cells in the order of entering, so that it ends as the order of peeling, in rounds. First-in
 * first-out matters beyond taste: an item's value carries the rounding of all it was freed by, and
 * depth-first order makes those chains long enough to drown fp32 values. */
#include "codec/sketch_locate.h"

#define ONE_ITEM ((uint64_t)1 << 32)

static size_t align64(size_t n_bytes) {
    return (n_bytes + 63) / 64 * 64;
}

size_t tagc_plan_bytes(size_t n_items) {
    return 2 * align64(n_items * sizeof(uint32_t)) + align64(TAGC_PLAN_MAX_ROUNDS * sizeof(uint32_t));
}

void tagc_plan_place(tagc_plan *plan, void *memory, size_t n_items) {
    char *bytes = memory;
    size_t stride = align64(n_items * sizeof(uint32_t));
    *plan = (tagc_plan){.order = (uint32_t *)bytes,
                        .cell = (uint32_t *)(bytes + stride),
                        .round_end = (uint32_t *)(bytes + 2 * stride)};
}

size_t tagc_plan_scratch_bytes(const tagc_sketch *sketch, size_t n_items) {
    return align64(sketch->n_cells * sizeof(uint64_t)) + align64((n_items + 63) / 64 * sizeof(uint64_t));
}

/* The state of planning: words (n_cells), queued (n_items bits), and the end of the queue. */
typedef struct planner {
    tagc_plan *plan;
    uint64_t *words, *queued;
    size_t n_queued;
} planner;

static size_t chunk_at(size_t begin, size_t end) {
    return end - begin < TAGC_LOCATE_CHUNK ? end - begin : TAGC_LOCATE_CHUNK;
}

static void enqueue_if_alone(planner *p, uint32_t cell) {
    uint64_t word = p->words[cell];
    if (word >> 32 != 1) return;
    uint32_t item = (uint32_t)word;
    uint64_t bit = (uint64_t)1 << (item % 64);
    if (p->queued[item / 64] & bit) return;
    p->queued[item / 64] |= bit;
    p->plan->order[p->n_queued] = item;
    p->plan->cell[p->n_queued++] = cell;
}

/* Takes the items order[begin..end) out of their cells; those they free enter the queue. */
static void take_round(planner *p, const tagc_locator *locator, const uint32_t *indices, size_t begin,
                       size_t end) {
    tagc_located at;
    uint32_t positions[TAGC_LOCATE_CHUNK];
    for (size_t n; begin < end; begin += n) {
        n = chunk_at(begin, end);
        const uint32_t *items = p->plan->order + begin;
        for (size_t k = 0; k < n; k++) positions[k] = indices[items[k]];
        tagc_locate(locator, positions, n, &at);
        for (size_t k = 0; k < n; k++)
            for (int t = 0; t < 3; t++) {
                uint32_t cell = at.cell[t][k];
                p->words[cell] = (p->words[cell] - ONE_ITEM) ^ items[k];
                enqueue_if_alone(p, cell);
            }
    }
}

void tagc_plan_make(tagc_plan *plan, const tagc_sketch *sketch, const uint32_t *indices, size_t n_items,
                    void *scratch) {
    planner p = {.plan = plan, .words = scratch};
    p.queued = (uint64_t *)((char *)scratch + align64(sketch->n_cells * sizeof(uint64_t)));
    memset(scratch, 0, tagc_plan_scratch_bytes(sketch, n_items));
    tagc_locator locator;
    tagc_located at;
    tagc_locator_init(&locator, sketch);
    for (size_t begin = 0, n; begin < n_items; begin += n) {
        n = chunk_at(begin, n_items);
        tagc_locate(&locator, indices + begin, n, &at);
        for (size_t k = 0; k < n; k++)
            for (int t = 0; t < 3; t++) {
                uint64_t *word = &p.words[at.cell[t][k]];
                *word = (*word + ONE_ITEM) ^ (begin + k);
            }
    }
    for (size_t c = 0; c < sketch->n_cells; c++) enqueue_if_alone(&p, (uint32_t)c);

    plan->n_items = n_items;
    plan->n_rounds = 0;
    plan->n_peeled = 0;
    while (plan->n_peeled < p.n_queued && plan->n_rounds < TAGC_PLAN_MAX_ROUNDS) {
        size_t begin = plan->n_peeled;
        plan->n_peeled = p.n_queued;
        plan->round_end[plan->n_rounds++] = (uint32_t)plan->n_peeled;
        take_round(&p, &locator, indices, begin, plan->n_peeled);
    }
    for (size_t q = plan->n_peeled; q < p.n_queued; q++) /* freed, but out of rounds */
        p.queued[plan->order[q] / 64] &= ~((uint64_t)1 << (plan->order[q] % 64));
    size_t end = plan->n_peeled;
    for (size_t j = 0; end < n_items && j < n_items; j++)
        if (!(p.queued[j / 64] >> (j % 64) & 1)) plan->order[end++] = (uint32_t)j;
}

void tagc_plan_peel(const tagc_plan *plan, const tagc_sketch *sketch, const uint32_t *indices, float *cells,
                    float *values) {
    tagc_locator locator;
    tagc_located at;
    uint32_t positions[TAGC_LOCATE_CHUNK];
    tagc_locator_init(&locator, sketch);
    for (size_t begin = 0, n; begin < plan->n_peeled; begin += n) {
        n = chunk_at(begin, plan->n_peeled);
        const uint32_t *items = plan->order + begin, *alone = plan->cell + begin;
        for (size_t k = 0; k < n; k++) positions[k] = indices[items[k]];
        tagc_locate(&locator, positions, n, &at);
        for (size_t k = 0; k < n; k++) {
            int table = (alone[k] >= locator.table_cells) + (alone[k] >= 2 * locator.table_cells);
            float value = tagc_signed(cells[alone[k]], at.signs[k], table);
            for (int t = 0; t < 3; t++) cells[at.cell[t][k]] -= tagc_signed(value, at.signs[k], t);
            values[items[k]] = value;
        }
    }
    for (size_t q = plan->n_peeled; q < plan->n_items; q++) values[plan->order[q]] = 0;
}

void tagc_plan_peel_fixed(const tagc_plan *plan, const tagc_sketch *sketch, const uint32_t *indices,
                          int32_t *cells, int32_t *values) {
    tagc_locator locator;
    tagc_located at;
    uint32_t positions[TAGC_LOCATE_CHUNK];
    uint32_t *sums = (uint32_t *)cells;
    tagc_locator_init(&locator, sketch);
    for (size_t begin = 0, n; begin < plan->n_peeled; begin += n) {
        n = chunk_at(begin, plan->n_peeled);
        const uint32_t *items = plan->order + begin, *alone = plan->cell + begin;
        for (size_t k = 0; k < n; k++) positions[k] = indices[items[k]];
        tagc_locate(&locator, positions, n, &at);
        for (size_t k = 0; k < n; k++) {
            int table = (alone[k] >= locator.table_cells) + (alone[k] >= 2 * locator.table_cells);
            uint32_t value = tagc_signed_fixed(sums[alone[k]], at.signs[k], table);
            for (int t = 0; t < 3; t++) sums[at.cell[t][k]] -= tagc_signed_fixed(value, at.signs[k], t);
            values[items[k]] = (int32_t)value;
        }
    }
    for (size_t q = plan->n_peeled; q < plan->n_items; q++) values[plan->order[q]] = 0;
}

void tagc_plan_estimate(const tagc_plan *plan, const tagc_sketch *sketch, const uint32_t *indices,
                        const float *cells, float *values) {
    tagc_locator locator;
    tagc_located at;
    tagc_locator_init(&locator, sketch);
    for (size_t q = plan->n_peeled; q < plan->n_items; q++) {
        uint32_t item = plan->order[q];
        tagc_locate(&locator, indices + item, 1, &at);
        float v[3];
        for (int t = 0; t < 3; t++) v[t] = tagc_signed(cells[at.cell[t][0]], at.signs[0], t);
        float low = v[0] < v[1] ? v[0] : v[1], high = v[0] < v[1] ? v[1] : v[0];
        values[item] = v[2] < low ? low : v[2] > high ? high : v[2];
    }
}

void tagc_plan_estimate_fixed(const tagc_plan *plan, const tagc_sketch *sketch, const uint32_t *indices,
                              const int32_t *cells, int32_t *values) {
    tagc_locator locator;
    tagc_located at;
    tagc_locator_init(&locator, sketch);
    for (size_t q = plan->n_peeled; q < plan->n_items; q++) {
        uint32_t item = plan->order[q];
        tagc_locate(&locator, indices + item, 1, &at);
        int32_t v[3];
        for (int t = 0; t < 3; t++)
            v[t] = (int32_t)tagc_signed_fixed((uint32_t)cells[at.cell[t][0]], at.signs[0], t);
        int32_t low = v[0] < v[1] ? v[0] : v[1], high = v[0] < v[1] ? v[1] : v[0];
        values[item] = v[2] < low ? low : v[2] > high ? high : v[2];
    }
}
