/* Asks lib/exchange for the volume of one exchange. */
#include "plan/bytes.h"

#include "exchange/options.h"
#include "exchange/volume.h"
#include <math.h>

static uint64_t elems_of(double n_values, int n_hosts, int per_host) {
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
    options->n_elems = elems_of(n_values, n_hosts, per_host);
    TAGC_TRY(tagc_reducer_volume(options, n_hosts, 0, &data, &volume));
    *n_bytes = sum_of(&volume);
    return TAGC_OK;
}

tagc_status tagc_plan_gathered_bytes(int kind, double n_values, int n_hosts, int per_host, double *n_bytes) {
    tagc_gatherer_options options;
    tagc_volume volume;
    tagc_gatherer_options_init(&options);
    options.n_elems = elems_of(n_values, n_hosts, per_host);
    tagc_gatherer_options_choose(&options, kind);
    TAGC_TRY(tagc_gatherer_volume(&options, n_hosts, &volume));
    *n_bytes = sum_of(&volume);
    return TAGC_OK;
}
