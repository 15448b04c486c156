/* Slots on a processor. */
#include "gpu/maker.h"

#include <math.h>
#include <string.h>

static size_t work_bytes(uint32_t n_slots) {
    (void)n_slots;
    return 0;
}

static void find(tagc_slots_verdict *verdict, int64_t failure, int nonfinite) {
    if (failure > verdict->failure) verdict->failure = failure;
    verdict->nonfinite |= nonfinite;
}

static tagc_status seal(const tagc_slots_form *form, uint8_t *slots, const tagc_batch_result *results,
                        tagc_slots_verdict *verdict, void *work, void *stream) {
    (void)work, (void)stream;
    int nonfinite = 0, flags;
    int64_t n_kept = 0;
    if (form->kind == TAGC_SLOT_FRAGMENT) *verdict = (tagc_slots_verdict){0};
    for (uint32_t i = 0; i < form->n_slots; i++) {
        nonfinite |= results[i].encoded.nonfinite;
        n_kept += (int64_t)results[i].encoded.n_kept;
    }
    find(verdict, 0, nonfinite);
    if (form->kind == TAGC_SLOT_FRAGMENT && !nonfinite) verdict->n_kept = n_kept;
    flags = (verdict->nonfinite ? TAGC_SLOT_NONFINITE : 0) | (verdict->failure ? TAGC_SLOT_FAILED : 0);
    for (uint32_t i = 0; i < form->n_slots; i++) {
        const tagc_encoded *encoded = &results[i].encoded;
        tagc_slot_header *header = tagc_slot_at(form, slots, i);
        uint64_t n_bytes = flags ? 0 : tagc_slot_summed(form, encoded->n_bytes);
        tagc_slot_write(form, encoded, flags, tagc_slot_sum((const uint8_t *)(header + 1), n_bytes), header);
    }
    return TAGC_OK;
}

static tagc_status open_slots(const tagc_slots_form *form, const uint8_t *slots, uint64_t *lengths,
                              tagc_slots_verdict *verdict, void *work, void *stream) {
    (void)work, (void)stream;
    for (uint32_t i = 0; i < form->n_slots; i++) {
        const tagc_slot_header *header = tagc_slot_at(form, slots, i);
        uint64_t n_bytes = tagc_slot_summed(form, header->body_bytes);
        int fault = tagc_slot_check(form, header, i, tagc_slot_sum((const uint8_t *)(header + 1), n_bytes));
        lengths[i] = fault || header->flags ? 0 : n_bytes;
        find(verdict, tagc_slot_failure(fault, form->rank, i), !fault && header->flags & TAGC_SLOT_NONFINITE);
        if (lengths[i] && form->kind == TAGC_SLOT_SUMS) verdict->n_items += header->n_items;
    }
    return TAGC_OK;
}

static tagc_status judge(const tagc_slots_form *form, const tagc_batch_result *results, uint32_t n,
                         const uint64_t *lengths, tagc_slots_verdict *verdict, int *stop, void *stream) {
    (void)stream;
    for (uint32_t i = 0; i < n; i++) {
        int fault = !lengths || lengths[i] ? tagc_slot_fault_of(results[i].damage) : 0;
        find(verdict, tagc_slot_failure(fault, form->rank, i), results[i].nonfinite != 0);
    }
    *stop = verdict->failure || verdict->nonfinite;
    return TAGC_OK;
}

static tagc_status settle(const tagc_slots_verdict *agreed, const float *before, float *residual,
                          size_t n_residual, float *output, size_t n_output, void *stream) {
    (void)stream;
    if (!agreed->failure && !agreed->nonfinite) return TAGC_OK;
    if (n_residual) memcpy(residual, before, n_residual * sizeof *residual);
    for (size_t i = 0; i < n_output; i++) output[i] = NAN;
    return TAGC_OK;
}

const tagc_slots_maker tagc_slots_cpu = {work_bytes, seal, open_slots, judge, settle};
