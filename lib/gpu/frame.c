/* Frames on a processor. */
#include "gpu/maker.h"

#include <math.h>
#include <string.h>

static size_t work_bytes(uint32_t n_frames) {
    (void)n_frames;
    return 0;
}

static void find(tagc_frames_verdict *verdict, int64_t failure, int nonfinite) {
    if (failure > verdict->failure) verdict->failure = failure;
    verdict->nonfinite |= nonfinite;
}

static tagc_status seal(const tagc_frames_form *form, uint8_t *frames, const tagc_batch_result *results,
                        tagc_frames_verdict *verdict, void *work, void *stream) {
    (void)work, (void)stream;
    int nonfinite = 0, flags;
    int64_t n_sent = 0;
    if (form->kind == TAGC_FRAME_FRAGMENT) *verdict = (tagc_frames_verdict){0};
    for (uint32_t i = 0; i < form->n_frames; i++) {
        nonfinite |= results[i].encoded.nonfinite;
        if (tagc_frame_counts(form, i)) n_sent += (int64_t)results[i].encoded.n_sent;
    }
    find(verdict, 0, nonfinite);
    if (!verdict->nonfinite) verdict->n_sent += n_sent;
    flags = (verdict->nonfinite ? TAGC_FRAME_NONFINITE : 0) | (verdict->failure ? TAGC_FRAME_FAILED : 0);
    for (uint32_t i = 0; i < form->n_frames; i++) {
        const tagc_encoded *encoded = &results[i].encoded;
        tagc_frame_header *header = tagc_frame_at(form, frames, i);
        uint64_t n_bytes = flags ? 0 : tagc_frame_summed(form, encoded->n_bytes);
        tagc_frame_write(form, encoded, flags, tagc_frame_sum((const uint8_t *)(header + 1), n_bytes),
                         header);
    }
    return TAGC_OK;
}

static tagc_status open_frames(const tagc_frames_form *form, const uint8_t *frames, uint64_t *lengths,
                               tagc_frames_verdict *verdict, void *work, void *stream) {
    (void)work, (void)stream;
    for (uint32_t i = 0; i < form->n_frames; i++) {
        const tagc_frame_header *header = tagc_frame_at(form, frames, i);
        uint64_t n_bytes = tagc_frame_summed(form, header->body_bytes);
        int fault = tagc_frame_check(form, header, i, tagc_frame_sum((const uint8_t *)(header + 1), n_bytes));
        lengths[i] = fault || header->flags ? 0 : n_bytes;
        find(verdict, tagc_frame_failure(fault, form->rank, i),
             !fault && header->flags & TAGC_FRAME_NONFINITE);
        if (lengths[i] && form->kind == TAGC_FRAME_SUMS) verdict->n_items += header->n_items;
    }
    return TAGC_OK;
}

static tagc_status judge(const tagc_frames_form *form, const tagc_batch_result *results, uint32_t n,
                         const uint64_t *lengths, tagc_frames_verdict *verdict, int *stop, void *stream) {
    (void)stream;
    for (uint32_t i = 0; i < n; i++) {
        int fault = !lengths || lengths[i] ? tagc_frame_fault_of(results[i].damage) : 0;
        find(verdict, tagc_frame_failure(fault, form->rank, i), results[i].nonfinite != 0);
    }
    *stop = verdict->failure || verdict->nonfinite;
    return TAGC_OK;
}

static tagc_status settle(const tagc_frames_verdict *agreed, const void *before, void *residual,
                          size_t residual_bytes, float *output, size_t n_output, void *stream) {
    (void)stream;
    if (!agreed->failure && !agreed->nonfinite) return TAGC_OK;
    if (residual_bytes) memcpy(residual, before, residual_bytes);
    for (size_t i = 0; i < n_output; i++) output[i] = NAN;
    return TAGC_OK;
}

const tagc_frames_maker tagc_frames_cpu = {work_bytes, seal, open_frames, judge, settle};
