/* What passes the network card of a host that has several ranks: as it is planned, and in other ways. */
#include "plan/rows.h"

#include <math.h>

static double card_bytes(const tagc_setup *setup) {
    tagc_plan_volume volume;
    if (tagc_plan_count(setup, &volume, NULL) != TAGC_OK) return (double)NAN;
    return tagc_plan_sum(volume.n_host_bytes);
}

/* 1: every value of gradients and parameters is sent. */
static int is_dense(const tagc_setup *s) {
    return (s->engine.policy == TAGC_POLICY_NONE || s->engine.reducer.exchange == TAGC_EXCHANGE_DENSE) &&
           s->engine.gather <= TAGC_GATHER_BF16;
}

/* Only direct adds within a host first, so dense gradients are planned as its plain values. */
static void take_direct(tagc_setup *s) {
    tagc_fsdp_options *engine = &s->engine;
    int format = engine->policy == TAGC_POLICY_NONE ? engine->dense_format : engine->reducer.format;
    tagc_reducer_options_init(&engine->reducer);
    engine->policy = TAGC_POLICY_ALL;
    engine->reducer.exchange = TAGC_EXCHANGE_DIRECT;
    engine->reducer.format = format == TAGC_FORMAT_BF16 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
    engine->reducer.sparsity = 0;
    tagc_fsdp_options_resolve(engine);
}

static double in_levels(const tagc_plan_row *row, int n_levels) {
    tagc_setup s = row->setup;
    if (is_dense(&s)) take_direct(&s);
    s.engine.two_level = n_levels == 2;
    s.engine.ranks_per_host = s.world_size / s.n_hosts;
    if (row->union_source && row->is_union_guessed)
        s.union_density = -1; /* fewer senders have a smaller union */
    return card_bytes(&s);
}

void tagc_plan_count_card(tagc_plan_row *row) {
    const tagc_setup *s = &row->setup;
    tagc_plan_card *card = &row->card;
    double n_ranks = s->world_size, n_hosts = s->n_hosts;
    *card = (tagc_plan_card){(double)NAN, (double)NAN, (double)NAN};
    if (s->n_hosts == s->world_size || s->n_hosts == 1 || s->placement == TAGC_PLACE_HYBRID) return;
    card->one_level = in_levels(row, 1);
    card->two_levels = in_levels(row, 2);
    /* Each host's first rank gets from the host before what its last one sends on. */
    if (is_dense(s)) card->ring = card->two_levels * (1 - 1 / n_ranks) / (1 - 1 / n_hosts);
}
