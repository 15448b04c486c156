/* Asks lib/exchange for the volume of one exchange. */
#include "plan/bytes.h"

#include "exchange/all_to_all.h"
#include "exchange/options.h"
#include "exchange/volume.h"
#include <math.h>

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
