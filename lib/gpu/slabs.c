/* See slabs.h. */
#include "gpu/slabs.h"
#include "core/memory.h"
#include "core/status.h"

/* Where a slab is taken. */
typedef struct slab_piece {
    size_t at, n_bytes;
    struct slab_piece *next; /* by place */
} slab_piece;

struct tagc_slab {
    char *memory;
    size_t n_bytes;
    slab_piece *pieces;
    tagc_slab *next;
};

/* The link at which a piece of n_bytes fits in, and where that is; NULL: nowhere. */
static slab_piece **find_gap(tagc_slab *slab, size_t n_bytes, size_t *at) {
    slab_piece **link = &slab->pieces;
    for (*at = 0; *link && (*link)->at - *at < n_bytes; link = &(*link)->next)
        *at = (*link)->at + (*link)->n_bytes;
    return *link || slab->n_bytes - *at >= n_bytes ? link : NULL;
}

static tagc_status add_slab(tagc_queue *queue, tagc_slab_use use, size_t n_bytes, const char *what) {
    void *memory, *there;
    TAGC_TRY(tagc_memory_create(sizeof(tagc_slab), what, &memory));
    tagc_status status = tagc_there_create(queue, n_bytes, what, &there);
    if (status != TAGC_OK) {
        tagc_memory_destroy(memory);
        return status;
    }
    tagc_slab *slab = memory, **last = &queue->slabs[use];
    while (*last) last = &(*last)->next;
    *slab = (tagc_slab){.memory = there, .n_bytes = n_bytes};
    *last = slab;
    return TAGC_OK;
}

static tagc_status take(tagc_slab *slabs, size_t n_bytes, const char *what, void **out) {
    size_t at;
    void *memory;
    for (tagc_slab *slab = slabs; slab; slab = slab->next) {
        slab_piece **link = find_gap(slab, n_bytes, &at);
        if (!link) continue;
        TAGC_TRY(tagc_memory_create(sizeof(slab_piece), what, &memory));
        slab_piece *piece = memory;
        *piece = (slab_piece){.at = at, .n_bytes = n_bytes, .next = *link};
        *link = piece;
        *out = slab->memory + at;
        break;
    }
    return TAGC_OK;
}

/* What used a piece before may still be on its way, in the kernels' stream: `out` and `add` are through when an exchange is finished
 * without a failure, and after one `back` waits for `add`. Nobody uses the piece too early: a store fills the residual that it makes
 * room for, and a unit writes its lists, in that stream, and both wait for it before any other stream has work for the piece. */
tagc_status tagc_slab_create(tagc_queue *queue, tagc_slab_use use, size_t n_bytes, size_t slab_bytes,
                             const char *what, void **out) {
    *out = NULL;
    n_bytes = tagc_aligned(n_bytes ? n_bytes : 1);
    slab_bytes = tagc_aligned(slab_bytes);
    TAGC_TRY(take(queue->slabs[use], n_bytes, what, out));
    if (*out) return TAGC_OK;
    TAGC_TRY(add_slab(queue, use, slab_bytes > n_bytes ? slab_bytes : n_bytes, what));
    return take(queue->slabs[use], n_bytes, what, out);
}

/* Returns whether it was in that slab. */
static int give(tagc_slab *slab, const char *memory) {
    for (slab_piece **link = &slab->pieces, *piece; (piece = *link); link = &piece->next) {
        if (slab->memory + piece->at != memory) continue;
        *link = piece->next;
        tagc_memory_destroy(piece);
        return 1;
    }
    return 0;
}

void tagc_slab_destroy(tagc_queue *queue, void *memory) {
    for (int use = 0; memory && use < N_SLAB_USES; use++)
        for (tagc_slab *slab = queue->slabs[use]; slab; slab = slab->next)
            if (give(slab, memory)) return;
}

void tagc_slabs_trim(tagc_queue *queue) {
    for (int use = 0; use < N_SLAB_USES; use++)
        for (tagc_slab **link = &queue->slabs[use], *slab; (slab = *link);) {
            if (slab->pieces) {
                link = &slab->next;
                continue;
            }
            *link = slab->next;
            tagc_there_destroy(queue, slab->memory, slab->n_bytes);
            tagc_memory_destroy(slab);
        }
}
