/* The exchanges behind a fence, which a build can leave out (lib/fences.c). */
#ifndef TAGC_EXCHANGE_REGISTRY_H
#define TAGC_EXCHANGE_REGISTRY_H

#include "exchange/exchange.h"

/* Those that this build has, then NULL. */
extern const tagc_exchange_table *const tagc_fenced_exchanges[];
/* The names of what this build has of paper, gpu, native and tls, up to a NULL. */
extern const char *const tagc_fenced_parts[];

#endif
