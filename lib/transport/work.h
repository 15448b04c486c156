/* Memory that only a step under way needs: rows that are sent and received, and scratch. The objects of a comm share it.
 *
 * Each object says how much its steps take. Objects with one tag, as the reducers of one unit, can all be under way at once: the
 * memory has room for the largest of these groups, and more_work_bytes of the comm's options for others at the same time, so that steps
 * of small units share their waits; but for no others where the model adds up within hosts, whose ranks share memory. It is allocated
 * when objects are made or change, never in a step.
 *
 * A step takes its memory when the steps before it have theirs, in the order of their _begin calls, which is the same on all ranks.
 * So the oldest unfinished step has its memory on every rank, and no rank waits for a step that waits for memory elsewhere. */
#ifndef TAGC_TRANSPORT_WORK_H
#define TAGC_TRANSPORT_WORK_H

#include "core/memory.h"
#include "core/status.h"

#define TAGC_MORE_WORK_BYTES ((uint64_t)32 << 20) /* the default */
#define TAGC_NO_TAG UINT64_MAX                    /* a group of its own */

/* Who shares: steps of one kind have one order. */
enum {
    TAGC_WORK_REDUCE,
    TAGC_WORK_GATHER,
    TAGC_WORK_HOST_SUM, /* within a host, of ranks that then reduce as TAGC_WORK_PLACE */
    TAGC_WORK_PLACE,
    TAGC_WORK_SPREAD
};

typedef struct tagc_works tagc_works;             /* of one comm, heap and kind */
typedef struct tagc_work_group tagc_work_group;   /* objects with one tag */
typedef struct tagc_work_region tagc_work_region; /* a block of memory */

/* What one object has of it. Zeroed before _open. */
typedef struct tagc_work {
    tagc_works *works; /* NULL: not open */
    tagc_work_group *group;
    size_t n_bytes; /* that a step takes */
    char *memory;   /* (n_bytes) from _take to _give */
    tagc_work_region *region;
    struct tagc_work *next_in_line, *next_held;
} tagc_work;

/* With n_bytes of 0. */
tagc_status tagc_work_open(tagc_comm *comm, const tagc_heap *heap, int kind, uint64_t tag, tagc_work *work);
/* While no step of this object is under way. A smaller number never fails; after a failure nothing has changed. */
tagc_status tagc_work_set(tagc_comm *comm, tagc_work *work, size_t n_bytes);
void tagc_work_close(tagc_comm *comm, tagc_work *work); /* accepts what is not open */

/* In the order of _begin: a step is in line. */
void tagc_work_line_up(tagc_comm *comm, tagc_work *work);
/* Whether the step has its memory now. */
int tagc_work_take(tagc_comm *comm, tagc_work *work);
/* Blocks until it has: for a caller's thread, whose steps of one kind come one after the other. */
void tagc_work_wait(tagc_comm *comm, tagc_work *work);
void tagc_work_give(tagc_comm *comm, tagc_work *work); /* accepts one that has nothing */

/* Bytes for groups of a kind of which the largest takes `most`, and all together `total`, with that many more_work_bytes. */
uint64_t tagc_work_capacity(int kind, uint64_t more_bytes, uint64_t most, uint64_t total);
/* The same without a comm, for objects that are asked one after the other: what those of the group so far take, of the group that takes most, and
 * all. */
typedef struct tagc_work_sum {
    uint64_t group, most, total;
} tagc_work_sum;
void tagc_work_add(tagc_work_sum *sum, int is_new_group, uint64_t n_bytes);
/* Bytes of all such memory of this comm, or of its part in one heap. */
uint64_t tagc_works_bytes(tagc_comm *comm, const tagc_heap *heap);

/* With the comm's lock. */
struct tagc_works {
    const tagc_heap *heap;
    int kind, n_users, n_waiting;
    tagc_work_group *groups;
    tagc_work_region *region;
    tagc_work *line, **line_end; /* steps that wait for their memory */
    struct tagc_works *next;
};

#endif
