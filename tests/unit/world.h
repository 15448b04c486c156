/* Hosts and ranks as threads, each with its two comms and a model; and gradients that every thread can compute for every rank. */
#ifndef TAGC_TESTS_UNIT_WORLD_H
#define TAGC_TESTS_UNIT_WORLD_H

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../test.h"
#include "tagc/model.h"
#include "unit/unit.h"

#define MOST_RANKS 16
#define MOST_TENSORS 24

typedef struct world world;

typedef struct member {
    world *w;
    int host, place, rank;
    tagc_comm *within, *between;
    void *own; /* the test's, for this rank */
    char failure[600];
} member;

struct world {
    int n_hosts, n_places;
    void (*body)(member *m);
    void *shared;
    member members[MOST_RANKS];
    tagc_local_group *hosts[MOST_RANKS], *places[MOST_RANKS];
};

static inline int expect(member *m, int ok, const char *what, int line) {
    if (!ok && !m->failure[0])
        snprintf(m->failure, sizeof m->failure, "line %d: %s (last error: %.400s)", line, what,
                 tagc_last_error());
    return ok;
}
#define EXPECT(m, condition) expect(m, !!(condition), #condition, __LINE__)

static inline void *member_main(void *arg) {
    member *m = arg;
    world *w = m->w;
    tagc_comm_options options;
    tagc_comm_options_init(&options);
    options.timeout_s = 300; /* no test needs it: a rank that waits in vain is what they look for */
    int ok =
        EXPECT(m, tagc_comm_create_local(w->places[m->place], m->host, &options, &m->between) == TAGC_OK);
    if (w->n_places > 1)
        ok &= EXPECT(m, tagc_comm_create_local(w->hosts[m->host], m->place, &options, &m->within) == TAGC_OK);
    if (ok) w->body(m);
    tagc_comm_destroy(m->within);
    tagc_comm_destroy(m->between);
    return NULL;
}

/* Runs body on all ranks, and asserts that none recorded a failure. */
static inline void run_world(int n_hosts, int n_places, void (*body)(member *m), void *shared) {
    pthread_t threads[MOST_RANKS];
    static world w;
    w = (world){.n_hosts = n_hosts, .n_places = n_places, .body = body, .shared = shared};
    for (int h = 0; h < n_hosts; h++)
        assert_int_equal(tagc_local_group_create(n_places, &w.hosts[h]), TAGC_OK);
    for (int l = 0; l < n_places; l++)
        assert_int_equal(tagc_local_group_create(n_hosts, &w.places[l]), TAGC_OK);
    for (int r = 0; r < n_hosts * n_places; r++) {
        w.members[r] = (member){.w = &w, .host = r / n_places, .place = r % n_places, .rank = r};
        assert_int_equal(pthread_create(&threads[r], NULL, member_main, &w.members[r]), 0);
    }
    for (int r = 0; r < n_hosts * n_places; r++) pthread_join(threads[r], NULL);
    for (int h = 0; h < n_hosts; h++) tagc_local_group_destroy(w.hosts[h]);
    for (int l = 0; l < n_places; l++) tagc_local_group_destroy(w.places[l]);
    for (int r = 0; r < n_hosts * n_places; r++)
        if (w.members[r].failure[0])
            fail_msg("%d hosts of %d, rank %d: %s", n_hosts, n_places, r, w.members[r].failure);
}

/* ---- a random number that depends on nothing but its arguments ---- */

static inline uint64_t scramble(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static inline uint64_t number_of(uint64_t seed, uint64_t a, uint64_t b, uint64_t c) {
    return scramble(scramble(scramble(seed * 0x9e3779b97f4a7c15u + a) + b) + c);
}

/* ---- a model of odd tensors ---- */

typedef struct shape_of_model {
    uint32_t n, n_units;
    tagc_tensor tensors[MOST_TENSORS];
    uint64_t shapes[MOST_TENSORS][3], n_elems[MOST_TENSORS];
    char names[MOST_TENSORS][32];
} shape_of_model;

static inline void make_shape(shape_of_model *s, uint64_t seed, uint32_t n, uint32_t n_units) {
    *s = (shape_of_model){.n = n, .n_units = n_units};
    for (uint32_t i = 0; i < n; i++) {
        uint64_t at = number_of(seed, i, 1, 0);
        size_t n_dims = at % 4;
        s->n_elems[i] = 1;
        for (size_t d = 0; d < n_dims; d++) {
            s->shapes[i][d] = 1 + number_of(seed, i, 2, d) % (n_dims == 1 ? 700 : 23);
            s->n_elems[i] *= s->shapes[i][d];
        }
        snprintf(s->names[i], sizeof s->names[i], "block.%u.tensor.%u", i % n_units, i);
        s->tensors[i] = (tagc_tensor){s->names[i], s->shapes[i], n_dims, i % n_units, (int)((at >> 8) % 3)};
    }
}

#endif
