/* What compressing costs on this processor: two ranks as threads exchange. */
#ifndef TAGC_SIZES_CODEC_H
#define TAGC_SIZES_CODEC_H

#include "tagc/tagc.h"

/* Nanoseconds per element of selecting, encoding and decoding on one thread, of the slower rank. Takes a tenth of a second. */
TAGC_API tagc_status tagc_plan_codec(int format, double sparsity, double *ns);

#endif
