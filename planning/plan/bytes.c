/* Asks lib/exchange for the volume of one exchange, and for what reducers hold. */
#include "plan/bytes.h"

#include "exchange/all_to_all.h"
#include "exchange/options.h"
#include "exchange/volume.h"
#include "transport/comm.h"
#include "transport/work.h"
#include "unit/options.h"
#include <math.h>
#include <stdlib.h>

uint64_t tagc_plan_own_elems(double n_values, int n_hosts, int per_host) {
    return tagc_padded_elems((uint64_t)ceil(n_values / per_host), n_hosts);
}

static double sum_of(const tagc_volume *volume) {
    double n_bytes = 0;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) n_bytes += volume->n_bytes[leg];
    return n_bytes;
}

tagc_status tagc_plan_reduced_bytes(tagc_reducer_options *options, double n_values, int n_hosts, int per_host,
                                    double *n_bytes) {
    double sent = 1 - options->sparsity;
    tagc_volume volume;
    tagc_volume_data data = {.sent_density = sent, .union_density = 1 - pow(1 - sent, n_hosts)};
    options->n_elems = tagc_plan_own_elems(n_values, n_hosts, per_host);
    TAGC_TRY(tagc_reducer_volume(options, n_hosts, 0, &data, &volume));
    *n_bytes = sum_of(&volume);
    return TAGC_OK;
}

tagc_status tagc_plan_gathered_bytes(int kind, double n_values, int n_hosts, int per_host, double *n_bytes) {
    tagc_gatherer_options options;
    tagc_volume volume;
    tagc_gatherer_options_init(&options);
    options.n_elems = tagc_plan_own_elems(n_values, n_hosts, per_host);
    tagc_gatherer_options_choose(&options, kind);
    TAGC_TRY(tagc_gatherer_volume(&options, n_hosts, &volume));
    *n_bytes = sum_of(&volume);
    return TAGC_OK;
}

double tagc_plan_all_to_all_bytes(int format, int block, int element_bytes, double n_values, int n_hosts,
                                  int per_host) {
    tagc_all_to_all_options options;
    tagc_blocks_options blocks;
    tagc_all_to_all_options_init(&options);
    tagc_blocks_options_init(&blocks);
    blocks.format = format;
    blocks.block = block;
    uint64_t n = (uint64_t)ceil(n_values * per_host), element = (uint64_t)element_bytes;
    int is_whole = format == TAGC_FORMAT_BF16;
    return (n_hosts - 1) * (double)tagc_all_to_all_bytes(&options, is_whole ? NULL : &blocks, element, n);
}

/* ---- what reducers hold ---- */

typedef struct alike {
    uint64_t residual;
    int n;
} alike;

/* Counts a reducer with a residual of so many bytes. */
static void count_alike(alike *sizes, size_t *n_sizes, uint64_t residual) {
    size_t i = 0;
    while (i < *n_sizes && sizes[i].residual != residual) i++;
    if (i == *n_sizes) sizes[(*n_sizes)++] = (alike){residual, 0};
    sizes[i].n++;
}

/* The reducer that adds a part up within a host. */
static void within_host(const tagc_reducer_options *part, int n_places, const tagc_model_options *hosts,
                        tagc_reducer_options *host) {
    const tagc_exchanged what = {
        .plan = {.format = (tagc_format)part->format}, .n_elems = part->n_elems, .n_places = n_places};
    tagc_options_within(hosts, &what, host);
}

static tagc_status add_needs(const tagc_reducer_options *parts, const uint32_t *units, size_t n,
                             int world_size, int n_places, const tagc_model_options *hosts, uint64_t more,
                             alike *sizes, tagc_host_memory *out) {
    tagc_feeding feeding = n_places == 0 ? TAGC_FED_NOT : TAGC_FED;
    tagc_work_sum between = {0}, within = {0};
    uint64_t spares = 0;
    size_t n_sizes = 0;
    for (size_t i = 0; i < n; i++) {
        tagc_exchange_memory memory;
        int is_new_unit = i == 0 || units[i] != units[i - 1];
        TAGC_TRY(tagc_reducer_memory(&parts[i], world_size, feeding, &memory));
        if (memory.residual > 0) count_alike(sizes, &n_sizes, memory.residual);
        out->residual += memory.residual;
        out->buffers += memory.buffers;
        tagc_work_add(&between, is_new_unit, memory.work);
        if (n_places < 2) continue;
        tagc_reducer_options host;
        within_host(&parts[i], n_places, hosts, &host);
        TAGC_TRY(tagc_reducer_memory(&host, n_places, TAGC_FED_WITHIN, &memory));
        out->buffers += memory.buffers;
        tagc_work_add(&within, is_new_unit, memory.work);
    }
    int kind = n_places < 2 ? TAGC_WORK_REDUCE : TAGC_WORK_PLACE;
    for (size_t i = 0; i < n_sizes; i++)
        spares += (uint64_t)tagc_comm_n_spares(more, sizes[i].residual, sizes[i].n) * sizes[i].residual;
    out->transient = spares + tagc_work_capacity(kind, more, between.most, between.total) +
                     tagc_work_capacity(TAGC_WORK_HOST_SUM, more, within.most, within.total);
    return TAGC_OK;
}

tagc_status tagc_plan_reducers(const tagc_reducer_options *parts, const uint32_t *units, size_t n,
                               int world_size, int n_places, const tagc_model_options *hosts, uint64_t more,
                               tagc_host_memory *out) {
    *out = (tagc_host_memory){0};
    alike *sizes = calloc(n + 1, sizeof *sizes);
    if (!sizes) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for a plan of %zu reducers", n);
    tagc_status status = add_needs(parts, units, n, world_size, n_places, hosts, more, sizes, out);
    free(sizes);
    return status;
}

/* Of compress(): buffers of pinned memory for exchanges under way, with the codec on the host (one is copied out, one exchanged, one
 * copied back) and on the GPU. */
enum { N_BUFFERS_OF_HOST = 3, N_BUFFERS_OF_DEVICE = 2 };

tagc_status tagc_plan_device_memory(const tagc_reducer_options *parts, const uint32_t *units, size_t n,
                                    int world_size, int n_bytes, uint32_t n_sampled,
                                    tagc_device_memory *out) {
    return tagc_device_memory_of(parts, units, n, world_size, n_bytes, n_sampled, N_BUFFERS_OF_DEVICE, out);
}

uint64_t tagc_plan_pinned(const tagc_reducer_options *parts, const uint32_t *units, size_t n, int world_size,
                          int n_bytes) {
    double in = 0, out = 0;
    for (size_t i = 0; i < n;) {
        double values = 0, is_all_reduce = parts[i].output == TAGC_OUTPUT_UNIT;
        uint32_t unit = units[i];
        for (; i < n && units[i] == unit; i++) values += (double)parts[i].n_elems;
        in = fmax(in, n_bytes * values);
        out = fmax(out, n_bytes * values / (is_all_reduce ? 1 : world_size));
    }
    return (uint64_t)(N_BUFFERS_OF_HOST * (in + out));
}
