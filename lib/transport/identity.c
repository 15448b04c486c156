/* See identity.h. */
#include "transport/identity.h"
#include "transport/comm_private.h"

#include <stdio.h>
#include <string.h>

tagc_identity_claim tagc_identity_next(tagc_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    tagc_identity_claim claim = {comm->world, ++comm->n_made};
    pthread_mutex_unlock(&comm->lock);
    return claim;
}

/* With the lock: the least number that no other has, so that objects may come and go. */
static uint32_t count_alike(const tagc_comm *comm, const tagc_identity *own) {
    uint32_t number = 0;
    for (const tagc_identity *other = comm->identities; other && own->tag == UINT64_MAX;) {
        int is_taken = other->tag == own->tag && other->n_elems == own->n_elems && other->alike == number &&
                       strcmp(other->noun, own->noun) == 0;
        number += (uint32_t)is_taken;
        other = is_taken ? comm->identities : other->next;
    }
    return number;
}

void tagc_identity_open(tagc_comm *comm, tagc_identity *identity, tagc_identity_claim first) {
    identity->serial = first.serial;
    identity->unit = first.world + first.serial;
    pthread_mutex_lock(&comm->lock);
    identity->alike = count_alike(comm, identity);
    identity->next = comm->identities;
    comm->identities = identity;
    pthread_mutex_unlock(&comm->lock);
}

void tagc_identity_close(tagc_comm *comm, tagc_identity *identity) {
    pthread_mutex_lock(&comm->lock);
    tagc_identity **link = &comm->identities;
    while (*link && *link != identity) link = &(*link)->next;
    if (*link) *link = identity->next;
    pthread_mutex_unlock(&comm->lock);
}

void tagc_identity_set_name(tagc_comm *comm, tagc_identity *identity, const char *name) {
    pthread_mutex_lock(&comm->lock);
    snprintf(identity->name, sizeof identity->name, "%s", name);
    pthread_mutex_unlock(&comm->lock);
}

void tagc_identity_text(const tagc_identity *identity, char text[TAGC_UNIT_TEXT_BYTES]) {
    char tag[32] = "";
    if (identity->tag != UINT64_MAX)
        snprintf(tag, sizeof tag, ", tag %llu", (unsigned long long)identity->tag);
    if (identity->name[0])
        snprintf(text, TAGC_UNIT_TEXT_BYTES, "\"%s\"", identity->name);
    else
        snprintf(text, TAGC_UNIT_TEXT_BYTES, "\"%s %u%s\"", identity->noun, identity->serial, tag);
}

/* With the lock. */
static const tagc_identity *find(const tagc_comm *comm, uint32_t unit) {
    const tagc_identity *identity = comm->identities;
    while (identity && identity->unit != unit) identity = identity->next;
    return identity;
}

/* Names both, and their sizes if these differ. self: what the text calls this rank. */
static tagc_status fail(tagc_comm *comm, const tagc_identity *own, int from, uint32_t unit,
                        const char *self) {
    char here[TAGC_UNIT_TEXT_BYTES], there[TAGC_UNIT_TEXT_BYTES] = "a unit that this rank does not have",
                                     size_here[48] = "", size_there[48] = "";
    tagc_identity_text(own, here);
    pthread_mutex_lock(&comm->lock);
    const tagc_identity *other = find(comm, unit);
    if (other) tagc_identity_text(other, there);
    if (other && other->n_elems != own->n_elems) {
        snprintf(size_here, sizeof size_here, " of %llu elements", (unsigned long long)own->n_elems);
        snprintf(size_there, sizeof size_there, " of %llu elements", (unsigned long long)other->n_elems);
    }
    pthread_mutex_unlock(&comm->lock);
    return tagc_fail(TAGC_ERR_MISMATCH,
                     "rank %d exchanges %s%s, %s %s%s: begin units in the same order on all ranks",
                     tagc_comm_name(comm, from), there, size_there, self, here, size_here);
}

tagc_status tagc_identity_check(tagc_comm *comm, const tagc_identity *own, int from, uint32_t unit) {
    return unit == own->unit ? TAGC_OK : fail(comm, own, from, unit, "this rank");
}

tagc_status tagc_identity_abort(tagc_comm *comm, const tagc_identity *own, int from, uint32_t unit) {
    char self[32];
    snprintf(self, sizeof self, "rank %d", tagc_comm_name(comm, comm->rank));
    (void)tagc_comm_give_up(comm, fail(comm, own, from, unit, self), from);
    return fail(comm, own, from, unit, "this rank");
}

int tagc_identity_may_be_alike(tagc_comm *comm, const tagc_identity *own, uint32_t unit) {
    pthread_mutex_lock(&comm->lock);
    const tagc_identity *other = find(comm, unit);
    int may_be = !other || other->shape == own->shape;
    pthread_mutex_unlock(&comm->lock);
    return may_be;
}
