/* Batches of a reducer (exchange/direct/batches.h) whose maker is a device's. All reducers of one tagc_kernels share the memory that
 * batches work in. If it had to grow for another reducer, they are made anew. */
#include "exchange/direct/direct.h"
#include "gpu/kernels.h"

/* Having entered. */
static tagc_status make(tagc_reducer *r) {
    tagc_batches *b = &tagc_direct_of(r)->batches;
    const tagc_kernels *k = tagc_kernels_of(r->arrays);
    if (b->n_moves == k->n_moves) return TAGC_OK;
    tagc_batches_end(r);
    b->n_moves = 0; /* half-made so far */
    b->work = k->work;
    b->stream = k->stream;
    TAGC_TRY(tagc_batches_make(r));
    b->n_moves = k->n_moves;
    return TAGC_OK;
}

tagc_status tagc_kernels_enter_for(tagc_reducer *r) {
    tagc_kernels *k = tagc_kernels_of(r->arrays);
    TAGC_TRY(tagc_kernels_enter(k));
    tagc_status status = make(r);
    if (status != TAGC_OK) tagc_kernels_leave(k);
    return status;
}

tagc_status tagc_kernels_make_batches(tagc_reducer *r, size_t pinned_bytes) {
    tagc_kernels *k = tagc_kernels_of(r->arrays);
    size_t work_bytes = 0;
    for (int which = 0; which < TAGC_N_BATCHES; which++) {
        size_t n_bytes = tagc_batches_work_bytes(r, which);
        if (n_bytes > work_bytes) work_bytes = n_bytes;
    }
    TAGC_TRY(tagc_kernels_enter(k));
    tagc_status status = tagc_kernels_reserve(k, work_bytes, pinned_bytes);
    if (status == TAGC_OK) status = make(r);
    if (status == TAGC_OK) status = tagc_kernels_wait(k);
    tagc_kernels_leave(k);
    return status;
}
