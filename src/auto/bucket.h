/* --bucket-elems auto: chooses the size of units for this link and machine, before the engine is made. */
#ifndef TAGC_AUTO_BUCKET_H
#define TAGC_AUTO_BUCKET_H

#include "options/train_options.h"
#include "plan/choose.h"

typedef struct tagc_bucket_setup {
    tagc_comm *comm;
    const tagc_train_options *options;
    tagc_gpt2_config model;
    int n_tokens; /* of a sequence */
    void (*say)(void *context, const char *line);
    void *context;
} tagc_bucket_setup;

/* Collective. Measures link, codec and computing for about a second, then the cost model chooses bucket_elems: 0 if no
 * size is forecast to gain 2 %. All ranks return the same. */
tagc_status tagc_bucket_choose(const tagc_bucket_setup *setup, int64_t *bucket_elems);

#endif
