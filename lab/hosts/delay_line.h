/* Frames on their way: a ring of bytes with each frame and the time at which it is due, oldest first.
 *
 *   reserve -> the caller reads a frame into the space -> commit        front -> the caller sends it -> pop
 *
 * Not thread-safe. */
#ifndef TAGC_LAB_DELAY_LINE_H
#define TAGC_LAB_DELAY_LINE_H

#include <stddef.h>
#include <stdint.h>

typedef struct delay_frame {
    uint64_t due_ns;
    uint64_t n_bytes;
    unsigned char bytes[];
} delay_frame;

typedef struct delay_line {
    unsigned char *ring;
    size_t capacity;    /* bytes; a multiple of 8 */
    size_t first, free; /* offsets of the oldest frame, and of where the next one goes */
    size_t n_used;      /* bytes between them, headers and skipped space included */
    size_t n_most_used; /* since the line was made */
    uint64_t n_frames;  /* now in the line */
} delay_line;

/* Memory for frames of n_bytes in total, the longest of n_longest. Returns 0, or -1 if memory is short. */
int delay_line_create(delay_line *line, size_t n_bytes, size_t n_longest);
void delay_line_destroy(delay_line *line); /* accepts a zeroed line */

/* Space for a frame of up to n_longest bytes, valid until commit; NULL if the line is full. */
void *delay_line_reserve(delay_line *line, size_t n_longest);
/* The frame that was read into the last reserved space has n_bytes. due_ns must not be below that of the frame before. */
void delay_line_commit(delay_line *line, size_t n_bytes, uint64_t due_ns);

const delay_frame *delay_line_front(const delay_line *line); /* NULL if the line is empty */
void delay_line_pop(delay_line *line);

#endif
