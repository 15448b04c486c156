/* Shared by slots.c, the step, and slots_batches.c, its batches and memory. */
#ifndef TAGC_GPU_SLOTS_PRIVATE_H
#define TAGC_GPU_SLOTS_PRIVATE_H

#include "exchange/direct/direct.h"
#include "gpu/kernels.h"
#include "tagc/slots.h"

/* The batches of a step, in their order. */
enum {
    TAGC_SLOTS_ENCODE,
    TAGC_SLOTS_CHECK,
    TAGC_SLOTS_ADD,
    TAGC_SLOTS_ENCODE_SUMS,
    TAGC_SLOTS_CHECK_SUMS,
    TAGC_SLOTS_DECODE_SUMS,
    TAGC_SLOTS_N_BATCHES
};

/* The last call of the step under way. */
typedef enum tagc_slots_stage {
    TAGC_SLOTS_IDLE,
    TAGC_SLOTS_ENCODED,
    TAGC_SLOTS_ADDED,
    TAGC_SLOTS_DECODED,
    TAGC_SLOTS_SETTLED
} tagc_slots_stage;

typedef struct tagc_direct_slots {
    const tagc_batch_maker *maker;
    tagc_batch *batches[TAGC_SLOTS_N_BATCHES]; /* NULL: not needed */
    uint64_t n_moves;                          /* of kernels->work when they were made */
    char *memory;
    size_t n_bytes;
    tagc_batch_result *results;
    uint64_t *lengths, *partial_sums;
    int *stop;
    void *work;           /* of batches; with kernels theirs */
    tagc_batch_row *rows; /* (W) */
    tagc_body *bodies;    /* (W) */
    void *arena;

    tagc_slots_stage stage;
    char *send, *sums; /* of the caller: what goes out */
    const char *received;
    tagc_slots_verdict *verdict;
    float *residual; /* that the step makes; the one before is in now.residual until _settle */
} tagc_direct_slots;

tagc_direct_slots *tagc_direct_slots_of(const tagc_reducer *r);
/* NULL: in host memory. */
static inline tagc_kernels *tagc_direct_slots_kernels(const tagc_reducer *r) {
    return tagc_kernels_of(r->arrays);
}
/* 1 for an all-reduce, whose sums are encoded and returned. */
int tagc_direct_slots_has_sums(const tagc_reducer *r);
/* The layout of n slots: of fragments, or of sums. */
tagc_slots_form tagc_direct_slots_form(const tagc_reducer *r, int is_sums, int n);
/* Fills slots->rows for a batch, and returns their number. */
size_t tagc_direct_slots_rows(const tagc_reducer *r, int batch);
/* Makes the batches if there are none, or if the work memory of kernels has moved. Call it between _enter and _leave. */
tagc_status tagc_direct_slots_make_batches(const tagc_reducer *r);
tagc_status tagc_direct_slots_enter(const tagc_reducer *r);
void tagc_direct_slots_leave(const tagc_reducer *r);
/* A status of the maker as this library's. */
tagc_status tagc_direct_slots_check(const tagc_reducer *r, tagc_status status);

/* Stands in for begin, end and phases of a reducer. */
extern const tagc_beside tagc_direct_slots_beside;

#endif
