/* See refusal.h. Zeros in host memory are pages that nobody has written, which take no memory: a rank may refuse for want of it. */
#include "exchange/refusal.h"

#include <stdio.h>

static tagc_status make_zeros(const tagc_arrays *arrays, size_t n_bytes, void **out) {
    const tagc_heap *heap = &arrays->heap;
    if (arrays->is_here) return tagc_memory_create_zeros(n_bytes, "zeros", out);
    TAGC_TRY(heap->create(heap->context, n_bytes, "zeros", out));
    return arrays->fill(heap->context, *out, 0, n_bytes);
}

static void destroy_zeros(const tagc_arrays *arrays, void *zeros, size_t n_bytes) {
    if (arrays->is_here)
        tagc_memory_destroy_zeros(zeros, n_bytes);
    else
        arrays->heap.destroy(arrays->heap.context, zeros, n_bytes);
}

tagc_status tagc_refuse(const tagc_refusal *r) {
    char text[TAGC_ERROR_TEXT_BYTES];
    snprintf(text, sizeof text, "%s", tagc_last_error());
    const tagc_heap *heap = &r->arrays->heap;
    void *zeros, *room = NULL;
    tagc_status made = make_zeros(r->arrays, r->n_read, &zeros);
    if (made == TAGC_OK) made = heap->create(heap->context, r->n_written, "what nobody takes", &room);
    if (made == TAGC_OK) {
        r->take_part(r->context, r->status, text, zeros, room);
    } else {
        (void)tagc_fail(r->status, "%s", text);
        (void)tagc_comm_give_up(r->comm, r->status, tagc_comm_rank(r->comm));
    }
    destroy_zeros(r->arrays, zeros, r->n_read);
    heap->destroy(heap->context, room, r->n_written);
    return tagc_fail(r->status, "%s", text);
}
