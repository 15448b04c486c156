/* A frame never wraps round the end of the ring, so that one read and one write move it. What is left at the end is
 * skipped: a header whose n_bytes is SKIP says so, and where not even that has room, the offset does. */
#include "delay_line.h"

#include <stdlib.h>

static const uint64_t SKIP = UINT64_MAX;

static size_t padded(size_t n_bytes) {
    return sizeof(delay_frame) + (n_bytes + 7) / 8 * 8;
}

static delay_frame *at(const delay_line *line, size_t offset) {
    return (delay_frame *)(void *)(line->ring + offset); /* offsets are multiples of 8 */
}

int delay_line_create(delay_line *line, size_t n_bytes, size_t n_longest) {
    /* Headers of short frames weigh as much as they do, and up to one longest frame is skipped at the end. */
    *line = (delay_line){.capacity = padded(n_bytes) + 2 * padded(n_longest)};
    line->ring = malloc(line->capacity);
    return line->ring ? 0 : -1;
}

void delay_line_destroy(delay_line *line) {
    free(line->ring);
    *line = (delay_line){0};
}

/* Takes the line past the unused end of the ring. */
static void skip_end(delay_line *line) {
    size_t n_left = line->capacity - line->free;
    if (n_left >= sizeof(delay_frame)) at(line, line->free)->n_bytes = SKIP;
    line->n_used += n_left;
    line->free = 0;
}

/* A frame begins where the longest would fit before the end, so an end that is skipped never holds one. */
void *delay_line_reserve(delay_line *line, size_t n_longest) {
    size_t n_needed = padded(n_longest);
    if (line->n_frames == 0) line->first = line->free = line->n_used = 0;
    if (line->free >= line->first && line->capacity - line->free < n_needed) skip_end(line);
    if (line->capacity - line->n_used < n_needed) return NULL;
    return at(line, line->free)->bytes;
}

void delay_line_commit(delay_line *line, size_t n_bytes, uint64_t due_ns) {
    delay_frame *frame = at(line, line->free);
    frame->due_ns = due_ns;
    frame->n_bytes = n_bytes;
    line->free += padded(n_bytes);
    line->n_used += padded(n_bytes);
    line->n_frames++;
    if (line->n_used > line->n_most_used) line->n_most_used = line->n_used;
}

const delay_frame *delay_line_front(const delay_line *line) {
    return line->n_frames > 0 ? at(line, line->first) : NULL;
}

void delay_line_pop(delay_line *line) {
    size_t n_bytes = padded((size_t)at(line, line->first)->n_bytes);
    line->first += n_bytes;
    line->n_used -= n_bytes;
    line->n_frames--;
    if (line->n_frames == 0) return;
    size_t n_left = line->capacity - line->first;
    if (n_left >= sizeof(delay_frame) && at(line, line->first)->n_bytes != SKIP) return;
    line->n_used -= n_left;
    line->first = 0;
}
