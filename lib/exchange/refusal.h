/* What a rank does that cannot begin a step or gather while the others are in it, or will be: it takes part with arrays that nobody looks at,
 * and says its failure in the messages that all read anyway. So nobody waits for it, and all return its status. */
#ifndef TAGC_EXCHANGE_REFUSAL_H
#define TAGC_EXCHANGE_REFUSAL_H

#include "exchange/runner.h"
#include "transport/comm.h"

typedef struct tagc_refusal {
    tagc_comm *comm;
    const tagc_arrays *arrays; /* where both arrays are */
    size_t n_read, n_written;  /* bytes of what this rank gives, and of what it gets */
    tagc_status status;        /* the failure, whose text is the last one */
    /* Goes through the step with zeros and room for what comes of it, and returns when it is over. text: of the failure. */
    void (*take_part)(void *context, tagc_status status, const char *text, const void *zeros, void *room);
    void *context;
} tagc_refusal;

/* Returns the failure, with its text. Without memory even for that the comm breaks. */
tagc_status tagc_refuse(const tagc_refusal *refusal);

#endif
