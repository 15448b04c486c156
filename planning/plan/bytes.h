/* Bytes of one exchange of tagc's between hosts, after a sum within each: asked of the code that lays exchanges out. */
#ifndef TAGC_PLAN_BYTES_H
#define TAGC_PLAN_BYTES_H

#include "tagc/tagc.h"

/* Bytes that a rank sends to the others of its place, as if each chose independently what to send. n_values: of a part, of which
 * each of a host's ranks has as much. options: its n_elems is written. */
tagc_status tagc_plan_reduced_bytes(tagc_reducer_options *options, double n_values, int n_hosts, int per_host,
                                    double *n_bytes);
/* And of a gather of so many values, of which the ranks of a place have their part. kind: tagc_gather_kind. */
tagc_status tagc_plan_gathered_bytes(int kind, double n_values, int n_hosts, int per_host, double *n_bytes);

#endif
