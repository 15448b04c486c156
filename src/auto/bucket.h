/* --bucket-elems auto: how large units should be on this link with this machine, measured before there is an engine. */
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

/* Collective. Measures the link, the codec and what computing takes, for about a second, and lets the cost model choose
 * bucket_elems; 0 where no size is forecast to gain 2 %. All ranks return the same. */
tagc_status tagc_bucket_choose(const tagc_bucket_setup *setup, int64_t *bucket_elems);

#endif
