/* Memory of an object: one aligned arena, laid out once, so that a step allocates nothing.
 *
 * Call the same layout function twice: first with base == NULL to learn n_bytes, then with the memory. */
#ifndef TAGC_CORE_MEMORY_H
#define TAGC_CORE_MEMORY_H

#include "tagc/tagc.h"
#include <stddef.h>

#define TAGC_ALIGNMENT 64 /* bytes: one cache line, one AVX-512 register */

typedef struct tagc_arena {
    char *base;     /* NULL while measuring */
    size_t n_bytes; /* used so far, a multiple of TAGC_ALIGNMENT */
    int overflow;   /* a request did not fit into size_t */
} tagc_arena;

/* n_bytes rounded up to a multiple of TAGC_ALIGNMENT. */
static inline size_t tagc_aligned(size_t n_bytes) {
    return (n_bytes + TAGC_ALIGNMENT - 1) / TAGC_ALIGNMENT * TAGC_ALIGNMENT;
}

/* The next `n` items of `item_bytes` each, aligned to TAGC_ALIGNMENT, or NULL while measuring. */
void *tagc_arena_take(tagc_arena *arena, size_t n, size_t item_bytes);

/* Zeroed, TAGC_ALIGNMENT-aligned memory; *out NULL and TAGC_ERR_MEMORY (text names `what` and the bytes) on failure. */
tagc_status tagc_memory_create(size_t n_bytes, const char *what, void **out);
void tagc_memory_destroy(void *memory); /* accepts NULL */
/* Zeros that nobody may write. On Linux they take address space alone. */
tagc_status tagc_memory_create_zeros(size_t n_bytes, const char *what, void **out);
void tagc_memory_destroy_zeros(void *zeros, size_t n_bytes); /* accepts NULL */

/* Memory for large arrays: the process's, or a device's, which only its owner reads. The initial content is undefined. */
typedef struct tagc_heap {
    void *context;
    tagc_status (*create)(void *context, size_t n_bytes, const char *what, void **out);
    void (*destroy)(void *context, void *memory, size_t n_bytes); /* accepts NULL */
} tagc_heap;

/* The process's own memory as a heap. */
tagc_status tagc_heap_create(void *context, size_t n_bytes, const char *what, void **out);
void tagc_heap_destroy(void *context, void *memory, size_t n_bytes);
#define TAGC_HOST_HEAP                                                                                       \
    { .create = tagc_heap_create, .destroy = tagc_heap_destroy }

#endif
