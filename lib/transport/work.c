/* See work.h. A region holds the memory of several steps. If it becomes too small, or far too large, a new one takes its place, and
 * the old one is freed when its last step has ended. */
#include "transport/work.h"
#include "transport/comm_private.h"

struct tagc_work_group {
    uint64_t tag, n_bytes;
    int n_users;
    tagc_work_group *next;
};

struct tagc_work_region {
    char *memory;
    size_t n_bytes;
    int is_old;      /* another one has taken its place */
    tagc_work *held; /* in the order of addresses */
};

uint64_t tagc_work_capacity(int kind, uint64_t more_bytes, uint64_t most, uint64_t total) {
    int has_more = kind == TAGC_WORK_REDUCE || kind == TAGC_WORK_GATHER;
    uint64_t others = total - most, more = has_more ? more_bytes : 0;
    return most + (others < more ? others : more);
}

void tagc_work_add(tagc_work_sum *sum, int is_new_group, uint64_t n_bytes) {
    sum->group = (is_new_group ? 0 : sum->group) + n_bytes;
    sum->total += n_bytes;
    if (sum->group > sum->most) sum->most = sum->group;
}

/* ---- regions ---- */

static tagc_status make_region(const tagc_heap *heap, size_t n_bytes, tagc_work_region **out) {
    void *region, *memory;
    *out = NULL;
    if (n_bytes == 0) return TAGC_OK;
    TAGC_TRY(tagc_memory_create(sizeof **out, "work memory", &region));
    tagc_status status = heap->create(heap->context, n_bytes, "work memory", &memory);
    if (status != TAGC_OK) {
        tagc_memory_destroy(region);
        return status;
    }
    *out = region;
    **out = (tagc_work_region){.memory = memory, .n_bytes = n_bytes};
    return TAGC_OK;
}

/* Without the lock, which the comm thread needs. */
static void destroy_region(const tagc_heap *heap, tagc_work_region *region) {
    if (region) heap->destroy(heap->context, region->memory, region->n_bytes);
    tagc_memory_destroy(region);
}

/* With the lock. What is to be destroyed, if the region is not needed any more. */
static tagc_work_region *retire(tagc_work_region *region) {
    if (!region || !region->held) return region;
    region->is_old = 1;
    return NULL;
}

/* ---- who shares; with the lock ---- */

static uint64_t wanted_bytes(const tagc_comm *comm, const tagc_works *works) {
    uint64_t most = 0, total = 0;
    for (const tagc_work_group *group = works->groups; group; group = group->next) {
        if (group->n_bytes > most) most = group->n_bytes;
        total += group->n_bytes;
    }
    return tagc_work_capacity(works->kind, comm->options.more_work_bytes, most, total);
}

static int is_right(const tagc_works *works, uint64_t wanted) {
    const tagc_work_region *region = works->region;
    size_t n_bytes = region ? region->n_bytes : 0;
    int is_too_large = wanted < n_bytes - n_bytes / 4 && !region->held;
    return wanted <= n_bytes && !is_too_large;
}

static void set_bytes(tagc_work *work, size_t n_bytes) {
    work->group->n_bytes += n_bytes;
    work->group->n_bytes -= work->n_bytes;
    work->n_bytes = n_bytes;
}

static tagc_works *find_works(tagc_comm *comm, const tagc_heap *heap, int kind) {
    tagc_works *works = comm->works;
    while (works && (works->heap != heap || works->kind != kind)) works = works->next;
    return works;
}

static tagc_work_group *find_group(const tagc_works *works, uint64_t tag) {
    tagc_work_group *group = tag == TAGC_NO_TAG ? NULL : works->groups;
    while (group && group->tag != tag) group = group->next;
    return group;
}

/* With the lock: the line, the region or its gaps have changed. */
static void wake_waiting(tagc_comm *comm, const tagc_works *works) {
    if (works->n_waiting > 0) pthread_cond_broadcast(&comm->ended);
}

tagc_status tagc_work_open(tagc_comm *comm, const tagc_heap *heap, int kind, uint64_t tag, tagc_work *work) {
    void *works_memory, *group_memory;
    TAGC_TRY(tagc_memory_create(sizeof(tagc_works), "work memory", &works_memory));
    tagc_status status = tagc_memory_create(sizeof(tagc_work_group), "work memory", &group_memory);
    if (status != TAGC_OK) {
        tagc_memory_destroy(works_memory);
        return status;
    }
    pthread_mutex_lock(&comm->lock);
    tagc_works *works = find_works(comm, heap, kind);
    if (!works) {
        works = works_memory;
        works_memory = NULL;
        *works = (tagc_works){.heap = heap, .kind = kind, .line_end = &works->line, .next = comm->works};
        comm->works = works;
    }
    tagc_work_group *group = find_group(works, tag);
    if (!group) {
        group = group_memory;
        group_memory = NULL;
        *group = (tagc_work_group){.tag = tag, .next = works->groups};
        works->groups = group;
    }
    works->n_users++;
    group->n_users++;
    pthread_mutex_unlock(&comm->lock);
    *work = (tagc_work){.works = works, .group = group};
    tagc_memory_destroy(works_memory);
    tagc_memory_destroy(group_memory);
    return TAGC_OK;
}

/* Another thread may change what is wanted while this one allocates. */
tagc_status tagc_work_set(tagc_comm *comm, tagc_work *work, size_t n_bytes) {
    tagc_works *works = work->works;
    size_t before = work->n_bytes;
    tagc_status status = TAGC_OK;
    pthread_mutex_lock(&comm->lock);
    set_bytes(work, n_bytes);
    for (uint64_t wanted; status == TAGC_OK && !is_right(works, wanted = wanted_bytes(comm, works));) {
        tagc_work_region *fresh;
        pthread_mutex_unlock(&comm->lock);
        status = wanted <= SIZE_MAX
                     ? make_region(works->heap, (size_t)wanted, &fresh)
                     : tagc_fail(TAGC_ERR_MEMORY, "work memory of %llu bytes", (unsigned long long)wanted);
        pthread_mutex_lock(&comm->lock);
        if (status != TAGC_OK) break;
        tagc_work_region *unused = fresh;
        if (wanted_bytes(comm, works) == wanted && !is_right(works, wanted)) {
            unused = retire(works->region);
            works->region = fresh;
            wake_waiting(comm, works);
        }
        pthread_mutex_unlock(&comm->lock);
        destroy_region(works->heap, unused);
        pthread_mutex_lock(&comm->lock);
    }
    if (status != TAGC_OK && works->region && wanted_bytes(comm, works) <= works->region->n_bytes)
        status = TAGC_OK; /* the larger one will do */
    if (status != TAGC_OK) set_bytes(work, before);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

void tagc_work_close(tagc_comm *comm, tagc_work *work) {
    tagc_works *works = work->works;
    tagc_work_group *group = work->group, *unused_group = NULL;
    tagc_work_region *unused = NULL;
    if (!works) return;
    (void)tagc_work_set(comm, work, 0);
    pthread_mutex_lock(&comm->lock);
    if (--group->n_users == 0) {
        tagc_work_group **link = &works->groups;
        while (*link != group) link = &(*link)->next;
        *link = group->next;
        unused_group = group;
    }
    int is_unused = --works->n_users == 0;
    if (is_unused) {
        tagc_works **link = &comm->works;
        while (*link != works) link = &(*link)->next;
        *link = works->next;
        unused = retire(works->region);
    }
    pthread_mutex_unlock(&comm->lock);
    destroy_region(works->heap, unused);
    tagc_memory_destroy(unused_group);
    if (is_unused) tagc_memory_destroy(works);
    *work = (tagc_work){0};
}

/* ---- a step ---- */

void tagc_work_line_up(tagc_comm *comm, tagc_work *work) {
    if (work->n_bytes == 0) return;
    pthread_mutex_lock(&comm->lock);
    work->next_in_line = NULL;
    *work->works->line_end = work;
    work->works->line_end = &work->next_in_line;
    pthread_mutex_unlock(&comm->lock);
}

/* The link to the first step behind a gap of n_bytes, and where the gap begins; NULL if there is none. */
static tagc_work **find_gap(tagc_work_region *region, size_t n_bytes, size_t *begin) {
    tagc_work **link = &region->held;
    *begin = 0;
    for (; *link; link = &(*link)->next_held) {
        size_t at = (size_t)((*link)->memory - region->memory);
        if (at - *begin >= n_bytes) return link;
        *begin = at + (*link)->n_bytes;
    }
    return region->n_bytes - *begin >= n_bytes ? link : NULL;
}

/* With the lock. */
static int take(tagc_comm *comm, tagc_work *work) {
    tagc_works *works = work->works;
    size_t begin;
    tagc_work **link = works->line == work ? find_gap(works->region, work->n_bytes, &begin) : NULL;
    if (!link) return 0;
    works->line = work->next_in_line;
    if (!works->line) works->line_end = &works->line;
    work->next_held = *link;
    *link = work;
    work->region = works->region;
    work->memory = works->region->memory + begin;
    wake_waiting(comm, works);
    return 1;
}

int tagc_work_take(tagc_comm *comm, tagc_work *work) {
    if (work->n_bytes == 0 || work->memory) return 1;
    pthread_mutex_lock(&comm->lock);
    int has_memory = take(comm, work);
    pthread_mutex_unlock(&comm->lock);
    return has_memory;
}

void tagc_work_wait(tagc_comm *comm, tagc_work *work) {
    if (work->n_bytes == 0 || work->memory) return;
    pthread_mutex_lock(&comm->lock);
    work->works->n_waiting++;
    while (!take(comm, work)) pthread_cond_wait(&comm->ended, &comm->lock);
    work->works->n_waiting--;
    pthread_mutex_unlock(&comm->lock);
}

void tagc_work_give(tagc_comm *comm, tagc_work *work) {
    tagc_work_region *region = work->region;
    if (!work->memory) return;
    pthread_mutex_lock(&comm->lock);
    tagc_work **link = &region->held;
    while (*link != work) link = &(*link)->next_held;
    *link = work->next_held;
    work->memory = NULL;
    work->region = NULL;
    wake_waiting(comm, work->works);
    int is_unused = region->is_old && !region->held;
    pthread_mutex_unlock(&comm->lock);
    if (is_unused) destroy_region(work->works->heap, region);
}

uint64_t tagc_works_bytes(tagc_comm *comm, const tagc_heap *heap) {
    uint64_t n_bytes = 0;
    pthread_mutex_lock(&comm->lock);
    for (const tagc_works *works = comm->works; works; works = works->next)
        if ((!heap || works->heap == heap) && works->region) n_bytes += works->region->n_bytes;
    pthread_mutex_unlock(&comm->lock);
    return n_bytes;
}
