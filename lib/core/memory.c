/* Allocates all memory of the library. Large blocks ask for huge pages: the codec sweeps gradients end to end,
 * and with small pages it waits for address translation. */
#include "core/memory.h"
#include "core/status.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#define ARENA_FULL                                                                                           \
    (SIZE_MAX - SIZE_MAX % TAGC_ALIGNMENT - TAGC_ALIGNMENT) /* no allocation can satisfy it   \
                                                                            */

static size_t round_up(size_t n_bytes, size_t to) {
    return (n_bytes + to - 1) / to * to;
}

void *tagc_arena_take(tagc_arena *arena, size_t n, size_t item_bytes) {
    if (arena->overflow || (item_bytes && n > (ARENA_FULL - arena->n_bytes) / item_bytes)) {
        arena->overflow = 1;
        arena->n_bytes = ARENA_FULL;
        return NULL;
    }
    void *taken = arena->base ? arena->base + arena->n_bytes : NULL;
    arena->n_bytes += round_up(n * item_bytes, TAGC_ALIGNMENT);
    return taken;
}

tagc_status tagc_memory_create(size_t n_bytes, const char *what, void **out) {
    *out = NULL;
    size_t alignment = n_bytes >= 2 * HUGE_PAGE_BYTES ? HUGE_PAGE_BYTES : TAGC_ALIGNMENT;
    void *memory = NULL;
    if (n_bytes <= PTRDIFF_MAX) memory = aligned_alloc(alignment, round_up(n_bytes ? n_bytes : 1, alignment));
    if (!memory) return tagc_fail(TAGC_ERR_MEMORY, "no memory for %s (%zu bytes)", what, n_bytes);
#if defined(__linux__)
    if (alignment == HUGE_PAGE_BYTES) madvise(memory, round_up(n_bytes, alignment), MADV_HUGEPAGE);
#endif
    memset(memory, 0, n_bytes);
    *out = memory;
    return TAGC_OK;
}

void tagc_memory_destroy(void *memory) {
    free(memory);
}

tagc_status tagc_memory_create_zeros(size_t n_bytes, const char *what, void **out) {
#if defined(__linux__)
    void *zeros = mmap(NULL, n_bytes ? n_bytes : 1, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *out = NULL;
    if (zeros == MAP_FAILED) return tagc_fail(TAGC_ERR_MEMORY, "no memory for %s (%zu bytes)", what, n_bytes);
    *out = zeros;
    return TAGC_OK;
#else
    return tagc_memory_create(n_bytes, what, out);
#endif
}

void tagc_memory_destroy_zeros(void *zeros, size_t n_bytes) {
#if defined(__linux__)
    if (zeros) (void)munmap(zeros, n_bytes ? n_bytes : 1);
#else
    (void)n_bytes;
    tagc_memory_destroy(zeros);
#endif
}

tagc_status tagc_heap_create(void *context, size_t n_bytes, const char *what, void **out) {
    (void)context;
    return tagc_memory_create(n_bytes, what, out);
}

void tagc_heap_destroy(void *context, void *memory, size_t n_bytes) {
    (void)context, (void)n_bytes;
    tagc_memory_destroy(memory);
}
