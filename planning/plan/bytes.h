/* Bytes of one exchange of tagc's between hosts, after a sum within each, and what its reducers hold: asked of the code that lays
 * exchanges out. */
#ifndef TAGC_PLAN_BYTES_H
#define TAGC_PLAN_BYTES_H

#include "exchange/device_memory.h"
#include "tagc/model.h"

/* Values that a rank exchanges of so many: each of a host's ranks has its part. */
uint64_t tagc_plan_own_elems(double n_values, int n_hosts, int per_host);

/* Bytes that a rank sends to the others of its place, as if each chose independently what to send. n_values: of a part, of which
 * each of a host's ranks has as much. options: its n_elems is written. */
tagc_status tagc_plan_reduced_bytes(tagc_reducer_options *options, double n_values, int n_hosts, int per_host,
                                    double *n_bytes);
/* And of a gather of so many values, of which the ranks of a place have their part. kind: tagc_gather_kind. */
tagc_status tagc_plan_gathered_bytes(int kind, double n_values, int n_hosts, int per_host, double *n_bytes);

/* And of an all-to-all that spreads tokens evenly over the ranks. format: BF16: whole. n_values: that each rank has for each other one.
 * Whatever the number of ranks on a host, those of one place are an all-to-all, with one message for each other host. */
double tagc_plan_all_to_all_bytes(int format, int block, int element_bytes, double n_values, int n_hosts,
                                  int per_host);

/* Bytes of a rank for reducers. */
typedef struct tagc_host_memory {
    uint64_t residual, buffers;
    uint64_t transient; /* of the exchange under way */
} tagc_host_memory;

/* As tagc_plan_host_memory (sizes/memory.h), without what ranks of a host send each other afterwards. hosts: the formats in which the model
 * reads gradients, and adds them up within a host. more: more_work_bytes of the comms. */
tagc_status tagc_plan_reducers(const tagc_reducer_options *parts, const uint32_t *units, size_t n,
                               int world_size, int n_places, const tagc_model_options *hosts, uint64_t more,
                               tagc_host_memory *out);

/* Bytes of a rank for reducers with their codec on the GPU. n_bytes: of a value of the gradient, 2 or 4. n_sampled: values of which a
 * selection takes a sample; kernels have TAGC_SAMPLE_LINES * TAGC_SAMPLE_LINE. The rest as in tagc_plan_reducers. */
TAGC_API tagc_status tagc_plan_device_memory(const tagc_reducer_options *parts, const uint32_t *units,
                                             size_t n, int world_size, int n_bytes, uint32_t n_sampled,
                                             tagc_device_memory *out);
/* Bytes of pinned memory with the codec on the host, of gradients and sums of n_bytes per value. */
TAGC_API uint64_t tagc_plan_pinned(const tagc_reducer_options *parts, const uint32_t *units, size_t n,
                                   int world_size, int n_bytes);

#endif
