/* Sizes come from a reducer that is laid out but gets no memory, so the code that decides on chunks, cells and buffers is that
 * of real reducers. */
#include "exchange/volume.h"

#include "exchange/direct/direct.h"
#include "exchange/gatherer/gatherer.h"
#include "exchange/options.h"
#include "exchange/reducer.h"

void tagc_volume_add(tagc_volume *v, tagc_leg leg, double n_bytes) {
    v->n_bytes[leg] += n_bytes;
    v->n_transfers[leg]++;
}

/* Lays out a reducer without memory. The caller destroys r->state. *arena receives the bytes of its buffers, *work those of a step. */
static tagc_status lay_out(const tagc_reducer_options *options, int world_size, int rank,
                           const tagc_feed *feed, tagc_reducer *r, tagc_arena *arena, tagc_arena *work) {
    *r = (tagc_reducer){.rank = rank, .arrays = &tagc_host_arrays, .feed = feed};
    *arena = *work = (tagc_arena){0};
    TAGC_TRY(tagc_reducer_options_check(options, world_size, &r->options, r->own_options));
    r->world_size = world_size;
    tagc_reducer_size(r, options->n_elems);
    r->exchange = tagc_exchange_path(&r->options, 1);
    r->runner = r->exchange->runner;
    r->residual_format = tagc_stored_format(&r->options);
    tagc_status status = tagc_memory_create(r->exchange->state_bytes, "shape of a reducer", &r->state);
    if (status == TAGC_OK) {
        tagc_reducer_place(r, arena);
        tagc_reducer_place_work(r, work);
        if (!arena->overflow && !work->overflow) return TAGC_OK;
        status = tagc_fail(TAGC_ERR_MEMORY,
                           "n_elems is %llu: the reducer's buffers do not fit into the address space",
                           (unsigned long long)options->n_elems);
    }
    tagc_memory_destroy(r->state);
    return status;
}

tagc_status tagc_reducer_volume(const tagc_reducer_options *options, int world_size, int rank,
                                const tagc_volume_data *data, tagc_volume *out) {
    *out = (tagc_volume){0};
    tagc_reducer r;
    tagc_arena arena, work;
    if (rank < 0 || rank >= world_size)
        return tagc_fail(TAGC_ERR_ARGUMENT, "rank is %d, must be in [0, %d)", rank, world_size);
    TAGC_TRY(lay_out(options, world_size, rank, NULL, &r, &arena, &work));
    tagc_status status = r.exchange->volume(&r, data, out);
    tagc_memory_destroy(r.state);
    return status;
}

tagc_status tagc_gatherer_volume(const tagc_gatherer_options *options, int world_size, tagc_volume *out) {
    *out = (tagc_volume){0};
    tagc_gatherer g = {0};
    tagc_arena arena = {0}, work = {0};
    TAGC_TRY(tagc_gatherer_lay_out(&g, options, world_size, 0, &arena, &work));
    size_t n_bytes =
        tagc_gatherer_message_bytes(&g) + (tagc_gatherer_has_words(&g) ? sizeof(tagc_gather_word) : 0);
    tagc_volume_add(out, TAGC_LEG_GATHER, (world_size - 1) * (double)n_bytes);
    return TAGC_OK;
}

uint64_t tagc_norm_bytes(int world_size) {
    return ((uint64_t)world_size - 1) * sizeof(double);
}

static const tagc_feed feeds[] = {[TAGC_FED] = {0}, [TAGC_FED_WITHIN] = {.work = TAGC_WORK_HOST_SUM}};

tagc_status tagc_reducer_memory(const tagc_reducer_options *options, int world_size, tagc_feeding feeding,
                                tagc_exchange_memory *out) {
    tagc_reducer r;
    tagc_arena arena, work;
    TAGC_TRY(
        lay_out(options, world_size, 0, feeding == TAGC_FED_NOT ? NULL : &feeds[feeding], &r, &arena, &work));
    uint64_t n = r.exchange->residual_elems(&r.options);
    uint64_t bodies = 0, residual = n / r.shard * tagc_residual_bytes(r.residual_format, r.shard);
    if (r.exchange == &tagc_exchange_direct)
        bodies = (uint64_t)world_size * tagc_aligned(tagc_direct_of(&r)->capacity);
    tagc_memory_destroy(r.state);
    *out = (tagc_exchange_memory){.buffers = r.exchange->state_bytes + arena.n_bytes,
                                  .bodies = bodies,
                                  .work = work.n_bytes,
                                  .residual = residual};
    return TAGC_OK;
}

tagc_status tagc_gatherer_memory(const tagc_gatherer_options *options, int world_size,
                                 tagc_exchange_memory *out) {
    tagc_gatherer g = {0};
    tagc_arena arena = {0}, work = {0};
    TAGC_TRY(tagc_gatherer_lay_out(&g, options, world_size, 0, &arena, &work));
    *out = (tagc_exchange_memory){.buffers = arena.n_bytes, .work = work.n_bytes};
    return TAGC_OK;
}
