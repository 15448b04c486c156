/* What compressing costs on this processor: two ranks as threads exchange, or one array is encoded and decoded. */
#ifndef TAGC_SIZES_CODEC_H
#define TAGC_SIZES_CODEC_H

#include "tagc/tagc.h"

/* Nanoseconds per element of selecting, encoding and decoding on n_threads, of the slower rank. Takes a tenth of a second. */
TAGC_API tagc_status tagc_plan_codec(int format, double sparsity, int n_threads, double *ns);

/* And per element of a gather of parameters, of which a rank has half: encoding what it has, and decoding all. gather: tagc_gather_kind. */
TAGC_API tagc_status tagc_plan_gather_codec(int gather, int n_threads, double *ns);

/* And per value that crosses between hosts in blocks (tagc/blocks.h), encoded and decoded on one thread. */
TAGC_API tagc_status tagc_plan_blocks_codec(int format, double *ns);

/* Threads that compress() takes on a host of n_cores with n_ranks, unless it is told: half of a rank's share, at most 8. n_cores: 0: of this
 * machine. */
TAGC_API int tagc_plan_threads(int n_cores, int n_ranks);

#endif
