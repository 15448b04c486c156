/* Bytes of one exchange of tagc's between hosts, after a sum within each: asked of the code that lays exchanges out. */
#ifndef TAGC_PLAN_BYTES_H
#define TAGC_PLAN_BYTES_H

#include "tagc/tagc.h"

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

#endif
