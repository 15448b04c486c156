/* Gathers of a flat's parameters where a host may have several ranks: between hosts, so that each value crosses the slow link once for
 * each host, then within each host. With one level, it is a gatherer of lib/exchange.
 *
 *   rank (h, l) is rank h * L + l, and owns row h * L + l of `full`
 *
 *   between   own row           -> row h * L + l, to (h', l)           in the format that was asked for
 *   within    rows h * L + l, for each host h -> (h_own, l')           as they are: fp32, or bf16 where they have no more
 *
 * The second begins by itself when the first is over. */
#ifndef TAGC_UNIT_GATHER_H
#define TAGC_UNIT_GATHER_H

#include "core/status.h"
#include "tagc/tagc.h"

typedef struct tagc_flat_gatherer tagc_flat_gatherer;

/* Splits options, whose n_elems is that of the flat. within: of a gather of the rows of one host, of which there are n_hosts. What has
 * arrived from other hosts in bf16, or as deltas, has no more than 16 bits. */
static inline void tagc_flat_gather_split(const tagc_gatherer_options *options, int n_hosts, int n_places,
                                          tagc_gatherer_options *between, tagc_gatherer_options *within) {
    int is_half = options->delta || options->format == TAGC_FORMAT_BF16;
    *between = *options;
    between->n_elems = options->n_elems / (uint64_t)n_places;
    tagc_gatherer_options_init(within);
    within->n_elems = options->n_elems / (uint64_t)n_hosts;
    within->tag = options->tag;
    within->format = is_half ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
}

/* Collective over both comms. within, between: as in tagc_model_create; one of them may be NULL, and then the ranks of the other hold
 * the flat together. options: full_format is FP32. */
tagc_status tagc_flat_gatherer_create(tagc_comm *within, tagc_comm *between,
                                      const tagc_gatherer_options *options, tagc_flat_gatherer **out);
/* As the calls of a gatherer. `full` is (owners, shard), and has n_elems values. */
tagc_status tagc_flat_gatherer_begin(tagc_flat_gatherer *gatherer, const float *shard, float *full);
tagc_status tagc_flat_gatherer_end(tagc_flat_gatherer *gatherer);
tagc_status tagc_flat_gatherer_reset(tagc_flat_gatherer *gatherer);
/* The number of gathers that made the replica; 0 if there is none. */
uint64_t tagc_flat_gatherer_replica(const tagc_flat_gatherer *gatherer);
tagc_status tagc_flat_gatherer_set_replica(tagc_flat_gatherer *gatherer, float *full, uint64_t n_gathers);
void tagc_flat_gatherer_destroy(tagc_flat_gatherer *gatherer);

#endif
