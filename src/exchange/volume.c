/* Sizes follow from a reducer that is laid out but never given memory: the same code as for a real one decides on
 * chunks, cells and buffers. */
#include "exchange/volume.h"

#include "exchange/gatherer/gatherer.h"
#include "exchange/options.h"
#include "exchange/reducer.h"

#include <math.h>

/* Everything of a reducer that decides on sizes; *arena holds the bytes of its buffers. */
static tagc_status sketch_out(const tagc_reducer_options *options, int world_size, int rank, tagc_reducer *r,
                              tagc_arena *arena) {
    *r = (tagc_reducer){.world_size = world_size, .rank = rank};
    *arena = (tagc_arena){0};
    TAGC_TRY(tagc_reducer_options_check(options, world_size, &r->options));
    r->shard = (size_t)(options->n_elems / (uint64_t)world_size);
    tagc_reducer_place(r, arena);
    if (!arena->overflow) return TAGC_OK;
    return tagc_fail(TAGC_ERR_MEMORY,
                     "n_elems is %llu: the reducer's buffers do not fit into the address space",
                     (unsigned long long)options->n_elems);
}

/* An expected number need not be whole. */
static double union_of(const tagc_reducer *r, const tagc_volume_data *data, int d) {
    if (data->n_union) return (double)data->n_union[d];
    return data->union_density * (double)r->shard;
}

static double shard_bytes(tagc_reducer *r, double n_union) {
    if (!r->sketching) return n_union * sizeof(float);
    size_t n = (size_t)llround(n_union);
    uint32_t attempt = 0;
    r->n_union = &n;
    r->attempt = &attempt;
    double n_bytes = (double)tagc_sketch_shard_bytes(r, 0);
    r->n_union = NULL;
    r->attempt = NULL;
    return n_bytes;
}

static void add(tagc_volume *v, tagc_leg leg, double n_bytes) {
    v->n_bytes[leg] += n_bytes;
    v->n_transfers[leg]++;
}

static void add_leftovers(const tagc_reducer *r, int rank, const uint64_t *n_left, tagc_volume *v) {
    uint64_t n_others = (uint64_t)r->world_size - 1, sum = 0, of_others = 0;
    for (int d = 0; d < r->world_size; d++) {
        sum += n_left[d];
        of_others += d == rank ? 0 : n_left[d];
    }
    if (sum == 0 || r->options.unpeeled == TAGC_UNPEELED_ESTIMATE) return;
    uint64_t positions = n_left[rank] ? TAGC_WIRE_HEADER_BYTES + n_left[rank] * sizeof(uint32_t) : 0;
    add(v, TAGC_LEG_LEFTOVER, (double)(n_others * positions));
    if (r->options.unpeeled == TAGC_UNPEELED_PACKED)
        add(v, TAGC_LEG_LEFTOVER, (double)of_others * sizeof(uint32_t));
    add(v, TAGC_LEG_CONTROL, (double)(n_others * TAGC_WIRE_HEADER_BYTES));
}

static void indexed_volume(tagc_reducer *r, int rank, const tagc_volume_data *data, tagc_volume *v) {
    uint64_t n_others = (uint64_t)r->world_size - 1;
    uint64_t message = TAGC_WIRE_HEADER_BYTES + tagc_wire_index_bytes(r->options.index, r->shard);
    for (int d = 0; d < r->world_size; d++) {
        if (d == rank) continue;
        add(v, TAGC_LEG_INDEX, (double)message);
        add(v, TAGC_LEG_VALUES, shard_bytes(r, union_of(r, data, d)));
    }
    add(v, TAGC_LEG_INDEX, (double)(n_others * message)); /* the union of the own shard */
    add(v, TAGC_LEG_CONTROL, (double)(n_others * TAGC_WIRE_HEADER_BYTES));
    if (r->sketching) add(v, TAGC_LEG_CONTROL, (double)(n_others * TAGC_WIRE_HEADER_BYTES));
    if (r->sketching && data->n_left) add_leftovers(r, rank, data->n_left, v);
    if (r->options.all_reduce)
        add(v, TAGC_LEG_RESULT, (double)n_others * union_of(r, data, rank) * sizeof(float));
    v->sketching = r->sketching;
}

static void dense_volume(const tagc_reducer *r, tagc_volume *v) {
    uint64_t n_others = (uint64_t)r->world_size - 1;
    size_t width = r->options.wire == TAGC_WIRE_BF16 ? sizeof(uint16_t) : sizeof(float);
    v->chunk_elems = r->chunk;
    for (size_t at = 0; at < r->shard; at += r->chunk) {
        size_t n = r->shard - at < r->chunk ? r->shard - at : r->chunk;
        add(v, TAGC_LEG_VALUES, (double)(n_others * n * width));
        if (r->options.all_reduce) add(v, TAGC_LEG_RESULT, (double)(n_others * n * width));
    }
    add(v, TAGC_LEG_CONTROL, (double)(n_others * TAGC_WIRE_HEADER_BYTES));
}

static int is_share(double x) {
    return x >= 0 && x <= 1;
}

static tagc_status check_direct(const tagc_reducer *r, const tagc_volume_data *data) {
    if (!r->direct.coded || !r->direct.fragment.sparse) return TAGC_OK;
    if (!data || !(data->bodies || is_share(data->kept_density)))
        return tagc_fail(TAGC_ERR_ARGUMENT, "kept_density is %g, must be in [0, 1]",
                         data ? data->kept_density : -1.0);
    if (r->options.all_reduce && !data->sums && !is_share(data->union_density))
        return tagc_fail(TAGC_ERR_ARGUMENT, "union_density is %g, must be in [0, 1]", data->union_density);
    return TAGC_OK;
}

tagc_status tagc_reducer_volume(const tagc_reducer_options *options, int world_size, int rank,
                                const tagc_volume_data *data, tagc_volume *out) {
    *out = (tagc_volume){0};
    tagc_reducer r;
    tagc_arena arena;
    if (rank < 0 || rank >= world_size)
        return tagc_fail(TAGC_ERR_ARGUMENT, "rank is %d, must be in [0, %d)", rank, world_size);
    TAGC_TRY(sketch_out(options, world_size, rank, &r, &arena));
    if (options->exchange == TAGC_EXCHANGE_DENSE) {
        dense_volume(&r, out);
        return TAGC_OK;
    }
    if (options->exchange == TAGC_EXCHANGE_DIRECT) {
        TAGC_TRY(check_direct(&r, data));
        tagc_direct_volume(&r, data, out);
        return TAGC_OK;
    }
    if (!data || !(data->n_union || (data->union_density >= 0 && data->union_density <= 1)))
        return tagc_fail(TAGC_ERR_ARGUMENT, "union_density is %g, must be in [0, 1]",
                         data ? data->union_density : -1.0);
    indexed_volume(&r, rank, data, out);
    return TAGC_OK;
}

tagc_status tagc_gatherer_volume(const tagc_gatherer_options *options, int world_size, tagc_volume *out) {
    *out = (tagc_volume){0};
    tagc_gatherer g = {0};
    tagc_arena arena = {0};
    TAGC_TRY(tagc_gatherer_lay_out(&g, options, world_size, 0, &arena));
    int n_hosts = g.n_rows / g.per_host;
    double n_bytes = (double)tagc_gatherer_message_bytes(&g), n_beside = g.per_host - 1,
           n_across = n_hosts - 1;
    add(out, TAGC_LEG_GATHER, (n_across + n_beside) * n_bytes);
    for (int i = 0; i < g.n_relays; i++) add(out, TAGC_LEG_GATHER, n_beside * n_bytes);
    if (g.options.two_level) out->n_within_bytes[TAGC_LEG_GATHER] = (n_across + 1) * n_beside * n_bytes;
    return TAGC_OK;
}

uint64_t tagc_norm_bytes(int world_size) {
    return ((uint64_t)world_size - 1) * sizeof(double);
}

tagc_status tagc_reducer_memory(const tagc_reducer_options *options, int world_size,
                                tagc_exchange_memory *out) {
    tagc_reducer r;
    tagc_arena arena;
    TAGC_TRY(sketch_out(options, world_size, 0, &r, &arena));
    uint64_t residual = tagc_residual_elems(&r.options, world_size) * (uint64_t)sizeof(float);
    *out = (tagc_exchange_memory){.buffers = arena.n_bytes, .residual = residual, .spare = residual};
    return TAGC_OK;
}

tagc_status tagc_gatherer_memory(const tagc_gatherer_options *options, int world_size, uint64_t *n_bytes) {
    tagc_gatherer g = {0};
    tagc_arena arena = {0};
    TAGC_TRY(tagc_gatherer_lay_out(&g, options, world_size, 0, &arena));
    *n_bytes = arena.n_bytes;
    return TAGC_OK;
}
