/* What tells the reducers and gatherers of a comm apart on the wire.
 *
 * Ranks must begin their steps in the same order. What one rank begins first would else be added to what another begins
 * first, and nothing would show. So every message of a step names its unit: the number of the world, which rank 0 has drawn,
 * plus the serial number of the reducer or gatherer on its comm. All ranks know the number since it was made. The comm lists
 * what it has, so that an error can name both units. */
#ifndef TAGC_TRANSPORT_IDENTITY_H
#define TAGC_TRANSPORT_IDENTITY_H

#include "core/status.h"
#include "tagc/tagc.h"

enum { TAGC_UNIT_NAME_BYTES = 64, TAGC_UNIT_TEXT_BYTES = 128 };

/* Of one reducer or gatherer. */
typedef struct tagc_identity {
    uint32_t unit;   /* on the wire */
    uint32_t serial; /* from 1, in the order of making; 0: ranks have not agreed on it */
    const char *noun;
    uint64_t tag, n_elems; /* of its options */
    uint64_t
        shape; /* checksum of what decides which messages its steps have; two that are alike have the same */
    uint32_t
        alike; /* without a tag: number, from 0, among those of the comm that have as many elements and no tag either */
    char name[TAGC_UNIT_NAME_BYTES]; /* empty: noun, serial and tag are its name */
    struct tagc_identity *next;
} tagc_identity;

/* What the ranks tell each other about the next object: all take its number in the same order. */
typedef struct tagc_identity_claim {
    uint32_t world, serial;
} tagc_identity_claim;

tagc_identity_claim tagc_identity_next(tagc_comm *comm);
/* The ranks have agreed; first: the claim of rank 0. noun, tag, n_elems and shape are set. Lists it in the comm. */
void tagc_identity_open(tagc_comm *comm, tagc_identity *identity, tagc_identity_claim first);
void tagc_identity_close(tagc_comm *comm, tagc_identity *identity); /* accepts what is not open */
/* What messages call it from here on. Longer names are cut. */
void tagc_identity_set_name(tagc_comm *comm, tagc_identity *identity, const char *name);

/* TAGC_ERR_MISMATCH unless `from` is in a step of the same unit. The text names both. */
tagc_status tagc_identity_check(tagc_comm *comm, const tagc_identity *own, int from, uint32_t unit);
/* The same where `from` is in another, and breaks the comm. */
tagc_status tagc_identity_abort(tagc_comm *comm, const tagc_identity *own, int from, uint32_t unit);
/* 0: that unit is one of this comm whose steps have other messages. The two would wait for each other. */
int tagc_identity_may_be_alike(tagc_comm *comm, const tagc_identity *own, uint32_t unit);
/* As messages call it: "reducer 3, tag 7". */
void tagc_identity_text(const tagc_identity *identity, char text[TAGC_UNIT_TEXT_BYTES]);

#endif
