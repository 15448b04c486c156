/* One message, from one rank's transfer into another's: the part that the networks of tests share. */
#ifndef TAGC_TESTS_TAKE_FROM_H
#define TAGC_TESTS_TAKE_FROM_H

#include "tagc/transport.h"

#include <string.h>

typedef struct arrival {
    unsigned char *bytes;
    uint64_t n_bytes;
} arrival;

/* Copies what `from` sends to `to`. Returns 0 where `to` expects another length. *arrived, if not NULL, is where it lies
 * and how long it is: n_bytes 0 for nothing. */
static inline int take_from(const tagc_transfer *sender, const tagc_transfer *receiver, int from, int to,
                            arrival *arrived) {
    const tagc_part *sent = tagc_find_part(sender->sends, sender->n_sends, to);
    const tagc_part *wanted = tagc_find_part(receiver->receives, receiver->n_receives, from);
    uint64_t n_sent = sent ? sent->n_bytes : 0, n_wanted = wanted ? wanted->n_bytes : 0;
    if (arrived) *arrived = (arrival){0};
    if (n_sent != n_wanted) return 0;
    if (n_sent == 0) return 1;
    unsigned char *at = (unsigned char *)receiver->recv + wanted->offset;
    memcpy(at, (const unsigned char *)sender->send + sent->offset, n_sent);
    if (arrived) *arrived = (arrival){at, n_sent};
    return 1;
}

#endif
