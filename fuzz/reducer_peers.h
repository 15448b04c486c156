/* Steps of two reducers among ranks of which one is hostile (peers.h), for the exchanges in a table.
 *
 * Input: 1 byte (the exchange), 1 byte (what ranks do otherwise, see `act`), then edits. */
#ifndef TAGC_FUZZ_REDUCER_PEERS_H
#define TAGC_FUZZ_REDUCER_PEERS_H

#include "../tests/lengths.h"
#include "../tests/residual.h"
#include "peers.h"

#include <math.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

typedef struct exchange_case {
    int n_ranks, is_laneless;
    tagc_reducer_options options;
    int is_summed; /* what is not as it was sent is noticed: every body has a checksum */
} exchange_case;

/* The harness's. Fills *out; 0: there is no case of that number. */
static int find_case(int number, exchange_case *out);

enum { N_UNITS = 2, N_STEPS = 2, MOST_CASES = 24, MOST_ELEMS = 3200 };

/* What ranks do, beside their edits. */
enum {
    ACT_OTHER_ORDER = 1,  /* the hostile rank begins the units the other way round */
    ACT_FAIL = 2,         /* it refuses its part of the first step */
    ACT_OTHER_LENGTH = 4, /* it passes an array of another length */
    ACT_MAKE = 8,         /* all make another reducer, under edits */
    ACT_NONFINITE = 16    /* a value of it is NaN in the second step */
};

/* One rank's part of a step of a unit. */
typedef struct outcome {
    tagc_status status;
    int nonfinite;
    uint64_t n_residual;
    float output[MOST_ELEMS], before[MOST_ELEMS], after[MOST_ELEMS]; /* residuals */
} outcome;

typedef struct reducer_peers {
    peers all;
    exchange_case of;
    int act;
    tagc_reducer *reducers[MOST_PEERS][N_UNITS];
    tagc_status made[MOST_PEERS];
    outcome (*now)[N_STEPS][N_UNITS];                 /* (MOST_PEERS,) */
    float (*honest)[N_STEPS][N_UNITS][MOST_ELEMS];    /* (MOST_PEERS,) what comes of it without edits */
    float gradients[MOST_PEERS][N_UNITS][MOST_ELEMS]; /* bf16, where the case says so, in the same memory */
} reducer_peers;

static reducer_peers *of_peers(peers *all) {
    return (reducer_peers *)(void *)((char *)all - offsetof(reducer_peers, all));
}

static tagc_reducer_options options_of(const reducer_peers *p, int unit) {
    tagc_reducer_options options = p->of.options;
    options.n_elems += (uint64_t)unit * 64 * (uint64_t)p->of.n_ranks;
    options.rounding_seed = (uint64_t)unit;
    return options;
}

static void make_reducers(peers *all, int rank) {
    reducer_peers *p = of_peers(all);
    for (int u = 0; u < N_UNITS; u++) {
        tagc_reducer_options options = options_of(p, u);
        require(tagc_reducer_create(all->comms[rank], &options, &p->reducers[rank][u]) == TAGC_OK);
    }
}

/* All are as in the first run. */
static void reset(reducer_peers *p, int rank) {
    for (int u = 0; u < N_UNITS; u++) {
        tagc_reducer *r = p->reducers[rank][u];
        uint64_t n = tagc_reducer_residual_elems(r);
        static const float zeros[MOST_ELEMS];
        r->now.number = 5;
        if (n) require(tagc_reducer_set_residual(r, zeros, n) == TAGC_OK);
        require(tagc_reducer_set_steps(r, 5) == TAGC_OK);
    }
}

static void make_gradients(reducer_peers *p) {
    for (int rank = 0; rank < p->of.n_ranks; rank++)
        for (int u = 0; u < N_UNITS; u++)
            for (int i = 0; i < MOST_ELEMS; i++) {
                float x = (float)(((i + 31 * rank + 57 * u) * 7919) % 1009 - 504) / 504.0f;
                if (p->of.options.gradient == TAGC_FORMAT_BF16) {
                    uint32_t bits;
                    x = x * x * x;
                    memcpy(&bits, &x, sizeof bits);
                    ((uint16_t *)(void *)p->gradients[rank][u])[i] = (uint16_t)(bits >> 16);
                } else {
                    p->gradients[rank][u][i] = x * x * x;
                }
            }
}

static tagc_status begin_step(reducer_peers *p, int rank, int step, int unit) {
    int is_hostile = rank == p->of.n_ranks - 1;
    tagc_reducer *r = p->reducers[rank][unit];
    outcome *o = &p->now[rank][step][unit];
    o->n_residual = residual_to(r, o->before);
    if (is_hostile && (p->act & ACT_FAIL) && step == 0)
        return tagc_reducer_fail(r, TAGC_ERR_MEMORY, "of a test");
    if (is_hostile && (p->act & ACT_OTHER_LENGTH) && step == 0)
        return tagc_reducer_begin(r, p->gradients[rank][unit], r->n_given + 1, o->output,
                                  tagc_reducer_given_output(r));
    return begin_reducer(r, p->gradients[rank][unit], o->output);
}

static void run_steps(peers *all, int rank) {
    reducer_peers *p = of_peers(all);
    int is_hostile = rank == p->of.n_ranks - 1, is_turned = is_hostile && (p->act & ACT_OTHER_ORDER);
    float *first = p->gradients[rank][0], kept = *first;
    for (int step = 0; step < N_STEPS; step++) {
        tagc_status begun[N_UNITS];
        if (is_hostile && (p->act & ACT_NONFINITE) && step == 1) memset(first, 0xff, sizeof *first);
        for (int i = 0; i < N_UNITS; i++) {
            int u = is_turned ? N_UNITS - 1 - i : i;
            begun[u] = begin_step(p, rank, step, u);
        }
        for (int u = 0; u < N_UNITS; u++) {
            outcome *o = &p->now[rank][step][u];
            tagc_reducer_stats stats;
            tagc_reducer_stats_init(&stats);
            o->status = begun[u] == TAGC_OK ? tagc_reducer_end(p->reducers[rank][u], &stats) : begun[u];
            o->nonfinite = stats.nonfinite;
            residual_to(p->reducers[rank][u], o->after);
        }
    }
    *first = kept;
}

/* Makes a reducer under edits, and if all could, uses it. */
static void make_another(peers *all, int rank) {
    reducer_peers *p = of_peers(all);
    tagc_reducer_options options = options_of(p, 0);
    tagc_reducer *r;
    int is_everywhere = 1;
    outcome *o = &p->now[rank][0][0];
    p->made[rank] = tagc_reducer_create(all->comms[rank], &options, &r);
    pthread_barrier_wait(&all->meeting);
    for (int q = 0; q < p->of.n_ranks; q++) is_everywhere &= p->made[q] == TAGC_OK;
    if (is_everywhere) check_status(run_reducer(r, p->gradients[rank][0], o->output, NULL));
    pthread_barrier_wait(&all->meeting);
    tagc_reducer_destroy(r);
}

static void act(peers *all, int rank) {
    reducer_peers *p = of_peers(all);
    reset(p, rank);
    if (p->act & ACT_MAKE)
        make_another(all, rank);
    else
        run_steps(all, rank);
}

/* ---- what must hold ---- */

static void check_outcome(const reducer_peers *p, const outcome *o, const float *honest, uint64_t n,
                          int is_exact) {
    check_status(o->status);
    if (o->status != TAGC_OK || o->nonfinite) {
        require(memcmp(o->before, o->after, o->n_residual * sizeof *o->before) == 0);
        return;
    }
    for (uint64_t i = 0; i < o->n_residual; i++) require(isfinite(o->after[i]));
    if (is_exact) require(memcmp(o->output, honest, n * sizeof *honest) == 0);
    for (uint64_t i = 0; i < n && p->of.is_summed; i++) require(isfinite(o->output[i]));
}

static void check_steps(reducer_peers *p) {
    int n_honest = p->of.n_ranks - 1, is_same = are_edits_for_all(&p->all) && !is_broken(&p->all);
    for (int u = 0; u < N_UNITS; u++) {
        int is_exact = !p->all.is_changed || (p->of.is_summed && !p->all.is_crafted);
        for (int step = 0; step < N_STEPS; step++) {
            for (int rank = 0; rank < n_honest; rank++) {
                const outcome *o = &p->now[rank][step][u];
                uint64_t n = tagc_reducer_given_output(p->reducers[rank][u]);
                check_outcome(p, o, p->honest[rank][step][u], n, is_exact && !o->nonfinite);
                if (is_same) require(o->status == p->now[0][step][u].status);
            }
            for (int rank = 0; rank < n_honest; rank++) /* residuals are others from here on */
                is_exact &= p->now[rank][step][u].status == TAGC_OK && !p->now[rank][step][u].nonfinite;
        }
    }
}

/* ---- life ---- */

static void make(reducer_peers *p) {
    make_peers(&p->all, p->of.n_ranks, p->of.n_ranks - 1, !p->of.is_laneless);
    make_gradients(p);
    run_peers(&p->all, make_reducers);
    p->act = 0;
    run_peers(&p->all, act); /* lengths that follow from the step before settle */
    run_honest_peers(&p->all, act);
    for (int rank = 0; rank < p->of.n_ranks; rank++)
        for (int step = 0; step < N_STEPS; step++)
            for (int u = 0; u < N_UNITS; u++) {
                require(p->now[rank][step][u].status == TAGC_OK);
                memcpy(p->honest[rank][step][u], p->now[rank][step][u].output, sizeof **p->honest[rank]);
            }
}

static void unmake(reducer_peers *p) {
    for (int rank = 0; rank < p->of.n_ranks; rank++)
        for (int u = 0; u < N_UNITS; u++) tagc_reducer_destroy(p->reducers[rank][u]);
    unmake_peers(&p->all);
}

static reducer_peers *peers_of(int number) {
    static reducer_peers *cases[MOST_CASES];
    reducer_peers **p = &cases[number];
    if (!*p) {
        *p = calloc(1, sizeof **p);
        require(*p != NULL);
        (*p)->now = calloc(MOST_PEERS, sizeof *(*p)->now);
        (*p)->honest = calloc(MOST_PEERS, sizeof *(*p)->honest);
        require((*p)->now && (*p)->honest && find_case(number, &(*p)->of));
    }
    if (!(*p)->all.n_ranks) make(*p);
    return *p;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    exchange_case found;
    int n_cases = 0;
    while (find_case(n_cases, &found)) n_cases++;
    if (n_bytes < 2) return 0;
    reducer_peers *p = peers_of(data[0] % n_cases);
    p->act = data[1];
    read_edits(&p->all, data + 2, n_bytes - 2);
    run_peers(&p->all, act);
    if (p->act & ACT_MAKE)
        for (int rank = 0; rank < p->of.n_ranks - 1; rank++) check_status(p->made[rank]);
    else
        check_steps(p);
    p->all.n_edits = 0; /* honest from here on */
    if (is_broken(&p->all)) {
        unmake(p);
        return 0;
    }
    p->act = 0;
    run_peers(&p->all, act);
    check_steps(p);
    for (int u = 0; u < N_UNITS; u++) require(p->now[0][N_STEPS - 1][u].status == TAGC_OK);
    return 0;
}

#endif
