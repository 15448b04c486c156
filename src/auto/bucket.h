/* --bucket-elems auto: chooses the size of units for this link and machine, before the engine is made. */
#ifndef TAGC_AUTO_BUCKET_H
#define TAGC_AUTO_BUCKET_H

#include "auto/auto.h"

/* Collective. Measures link, codec and computing for about a second, then the cost model chooses bucket_elems: 0 if no
 * size is forecast to gain 2 %. chooses_exchange: 1 if --exchange is auto, too. All ranks return the same. */
tagc_status tagc_bucket_choose(const tagc_auto_setup *setup, int chooses_exchange, int64_t *bucket_elems);

#endif
