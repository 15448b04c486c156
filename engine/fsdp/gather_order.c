/* A unit's parameters are gathered just before their use and released after it. Its gradients are exchanged as soon as
 * all of them are complete. */
#include "fsdp/gather_order.h"

#include "core/status.h"
#include <stdlib.h>

tagc_status tagc_order_create(const tagc_order_calls *calls, void *context, const tagc_fsdp_options *options,
                              int n_units, int n_buffers, const int *backward_order, tagc_gather_order *out) {
    size_t n = (size_t)n_units;
    *out = (tagc_gather_order){.calls = calls,
                               .context = context,
                               .options = *options,
                               .n_units = n_units,
                               .n_buffers = n_buffers,
                               .backward_order = backward_order,
                               .pass = TAGC_PASS_NONE};
    out->units = calloc(n, sizeof *out->units);
    out->holders = malloc(2 * n * sizeof *out->holders);
    if (out->units == NULL || out->holders == NULL) {
        tagc_order_destroy(out);
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for the order of %d units", n_units);
    }
    out->gradient_holders = out->holders + n;
    for (size_t i = 0; i < 2 * n; i++) out->holders[i] = -1;
    return TAGC_OK;
}

void tagc_order_set_unit(tagc_gather_order *o, int unit, const tagc_layout_unit *u) {
    o->units[unit] = (tagc_order_unit){.position = {u->position[0], u->position[1]},
                                       .n_uses = u->n_uses,
                                       .n_tensors = u->n_tensors,
                                       .spans = u->spans,
                                       .buffer = u->buffer,
                                       .gradient_buffer = u->gradient_buffer};
}

void tagc_order_destroy(tagc_gather_order *o) {
    free(o->units);
    free(o->holders);
    *o = (tagc_gather_order){0};
}

int tagc_order_releases(const tagc_fsdp_options *options) {
    return options->sharding == TAGC_SHARD_FULL || options->sharding == TAGC_SHARD_HYBRID;
}

static void see(const tagc_gather_order *o, tagc_order_event event, int unit) {
    if (o->observer.see != NULL) o->observer.see(o->observer.context, event, unit);
}

/* ---- parameters ---- */

tagc_status tagc_order_begin_gather(tagc_gather_order *o, int unit) {
    tagc_order_unit *u = &o->units[unit];
    o->holders[u->buffer] = unit;
    u->residency = TAGC_COMING;
    see(o, TAGC_ORDER_BEGIN_GATHER, unit);
    return o->calls->begin_gather(o->context, unit);
}

static tagc_status end_gather(tagc_gather_order *o, int unit) {
    if (o->units[unit].residency != TAGC_COMING) return TAGC_OK;
    see(o, TAGC_ORDER_END_GATHER, unit);
    TAGC_TRY(o->calls->end_gather(o->context, unit));
    o->units[unit].residency = TAGC_PRESENT;
    return TAGC_OK;
}

tagc_status tagc_order_end_gathers(tagc_gather_order *o) {
    for (int unit = 0; unit < o->n_units; unit++) TAGC_TRY(end_gather(o, unit));
    return TAGC_OK;
}

static int unit_at(const tagc_gather_order *o, int position) {
    return o->pass == TAGC_PASS_BACKWARD ? o->backward_order[position] : position;
}

/* Backward does not read an embedding, so such units are gathered only on demand. */
static int comes_ahead(const tagc_gather_order *o, const tagc_order_unit *u) {
    return !u->stays && (o->pass == TAGC_PASS_FORWARD || u->used_backward);
}

/* Whether the unit has nothing left to do in this pass. */
static int is_finished(const tagc_gather_order *o, const tagc_order_unit *u) {
    return o->pass == TAGC_PASS_FORWARD ? u->n_done == u->n_uses : u->n_gradients_done == u->n_tensors;
}

/* Lets gathers run `prefetch` units past `position`, not counting units that need none. */
static void reach_from(tagc_gather_order *o, int position) {
    for (int n = o->options.prefetch; n > 0 && position + 1 < o->n_units;)
        n -= comes_ahead(o, &o->units[unit_at(o, ++position)]);
    if (position > o->gather_reach) o->gather_reach = position;
}

/* Begins gathers in the order of the pass as far as they may reach, and as buffers are free. */
static tagc_status gather_ahead(tagc_gather_order *o) {
    for (; o->gather_next < o->n_units && o->gather_next <= o->gather_reach; o->gather_next++) {
        int unit = unit_at(o, o->gather_next);
        const tagc_order_unit *u = &o->units[unit];
        if (u->residency != TAGC_ABSENT || !comes_ahead(o, u) || is_finished(o, u)) continue;
        if (o->holders[u->buffer] >= 0) return TAGC_OK;
        TAGC_TRY(tagc_order_begin_gather(o, unit));
    }
    return TAGC_OK;
}

/* Releases a unit that was gathered ahead and not used yet. It is gathered again when it is needed. */
static tagc_status make_way(tagc_gather_order *o, int buffer) {
    int holder = o->holders[buffer];
    if (holder < 0 || o->units[holder].n_in_use > 0 || o->units[holder].n_done > 0) return TAGC_OK;
    TAGC_TRY(end_gather(o, holder));
    o->units[holder].residency = TAGC_ABSENT;
    o->holders[buffer] = -1;
    return TAGC_OK;
}

static tagc_status need(tagc_gather_order *o, int unit) {
    const tagc_order_unit *u = &o->units[unit];
    reach_from(o, u->position[o->pass]);
    if (u->residency == TAGC_ABSENT) {
        TAGC_TRY(make_way(o, u->buffer));
        int holder = o->holders[u->buffer];
        if (holder >= 0)
            return tagc_fail(TAGC_ERR_STATE,
                             "unit %s is used while %s is in its place: prefetch %d is too small for the "
                             "model's order of use",
                             o->calls->name(o->context, unit), o->calls->name(o->context, holder),
                             o->options.prefetch);
        TAGC_TRY(tagc_order_begin_gather(o, unit));
    }
    TAGC_TRY(gather_ahead(o));
    return end_gather(o, unit);
}

static tagc_status release(tagc_gather_order *o, int unit) {
    tagc_order_unit *u = &o->units[unit];
    if (!tagc_order_releases(&o->options) || u->residency == TAGC_ABSENT) return TAGC_OK;
    if (u->spans && o->pass == TAGC_PASS_FORWARD && o->training) return TAGC_OK;
    TAGC_TRY(end_gather(o, unit)); /* if the gather was not needed */
    u->residency = TAGC_ABSENT;
    o->holders[u->buffer] = -1;
    reach_from(o, u->position[o->pass] + 1); /* the next unit is about to be used */
    return gather_ahead(o);
}

void tagc_order_make_absent(tagc_gather_order *o) {
    for (int i = 0; o->n_buffers > 0 && i < o->n_units; i++) {
        o->units[i].residency = TAGC_ABSENT;
        o->holders[i] = -1;
    }
}

void tagc_order_make_present(tagc_gather_order *o, int unit) {
    o->units[unit].residency = TAGC_PRESENT;
    o->holders[o->units[unit].buffer] = unit;
}

/* ---- gradients ---- */

/* 1 if the gradients of this micro-step are exchanged. */
static int exchanges_now(const tagc_gather_order *o) {
    return o->options.exchange_each_micro_step || o->micro_step == o->options.n_micro_steps;
}

static tagc_status end_exchange(tagc_gather_order *o, int unit) {
    tagc_order_unit *u = &o->units[unit];
    if (!u->exchanging) return TAGC_OK;
    see(o, TAGC_ORDER_END_EXCHANGE, unit);
    TAGC_TRY(o->calls->end_exchange(o->context, unit));
    u->exchanging = 0;
    o->gradient_holders[u->gradient_buffer] = -1;
    return TAGC_OK;
}

tagc_status tagc_order_end_exchanges(tagc_gather_order *o) {
    for (int at = 0; at < o->n_units; at++) TAGC_TRY(end_exchange(o, o->backward_order[at]));
    return TAGC_OK;
}

/* Gives the unit its gradient buffer: ends the exchange that still reads it, and clears it. */
tagc_status tagc_order_grad(tagc_gather_order *o, int unit) {
    tagc_order_unit *u = &o->units[unit];
    int *holder = &o->gradient_holders[u->gradient_buffer];
    if (u->gradients_open) return TAGC_OK;
    if (*holder >= 0) TAGC_TRY(end_exchange(o, *holder));
    if (*holder >= 0 && *holder != unit)
        return tagc_fail(TAGC_ERR_STATE,
                         "gradients of unit %s are asked for while those of %s are open in its place: "
                         "grads_in_flight %d is too small for the model's order",
                         o->calls->name(o->context, unit), o->calls->name(o->context, *holder),
                         o->options.grads_in_flight);
    *holder = unit;
    u->gradients_open = 1;
    if (u->gradients_zeroed) return TAGC_OK;
    u->gradients_zeroed = 1;
    see(o, TAGC_ORDER_CLEAR_GRADIENTS, unit);
    o->calls->clear_gradients(o->context, unit);
    return TAGC_OK;
}

static tagc_status begin_exchange(tagc_gather_order *o, int unit) {
    o->units[unit].exchanging = 1;
    see(o, TAGC_ORDER_BEGIN_EXCHANGE, unit);
    return o->calls->begin_exchange(o->context, unit);
}

tagc_status tagc_order_finish_backward(tagc_gather_order *o) {
    if (o->pass != TAGC_PASS_BACKWARD) return TAGC_OK;
    for (int at = 0; at < o->n_units; at++) {
        int unit = o->backward_order[at];
        tagc_order_unit *u = &o->units[unit];
        if (u->n_gradients_done == u->n_tensors) continue;
        TAGC_TRY(tagc_order_grad(o, unit));
        if (exchanges_now(o)) TAGC_TRY(begin_exchange(o, unit));
        u->n_gradients_done = u->n_tensors;
    }
    for (int unit = 0; unit < o->n_units; unit++) o->units[unit].used_backward = o->units[unit].n_done > 0;
    return TAGC_OK;
}

/* ---- a pass ---- */

static tagc_status begin_pass(tagc_gather_order *o, tagc_pass pass) {
    o->pass = pass;
    o->n_open = o->n_units;
    o->gather_next = 0;
    o->gather_reach = -1;
    for (int i = 0; i < o->n_units; i++) {
        tagc_order_unit *u = &o->units[i];
        u->n_in_use = u->n_done = u->n_gradients_done = u->gradients_open = 0;
        /* In forward, the last step began the gathers that are under way. */
        u->stays = u->residency == TAGC_PRESENT || (u->residency == TAGC_COMING && pass == TAGC_PASS_FORWARD);
    }
    if (o->n_buffers == 0) return TAGC_OK;
    reach_from(o, 0);
    return gather_ahead(o);
}

tagc_status tagc_order_give_up(tagc_gather_order *o) {
    return o->options.sharding == TAGC_SHARD_GRAD ? TAGC_OK : tagc_order_end_gathers(o);
}

static void forget_zeros(tagc_gather_order *o) {
    for (int i = 0; i < o->n_units; i++) o->units[i].gradients_zeroed = 0;
}

tagc_status tagc_order_forward(tagc_gather_order *o, int training) {
    if (training && o->micro_step == 0) forget_zeros(o);
    o->training = training;
    if (tagc_order_releases(&o->options)) tagc_order_make_absent(o);
    return begin_pass(o, TAGC_PASS_FORWARD);
}

tagc_status tagc_order_backward(tagc_gather_order *o) {
    o->micro_step++;
    int accumulates = o->options.n_micro_steps > 1 && !o->options.exchange_each_micro_step;
    if (!accumulates) forget_zeros(o);
    return begin_pass(o, TAGC_PASS_BACKWARD);
}

void tagc_order_end_step(tagc_gather_order *o) {
    o->micro_step = 0;
    o->pass = TAGC_PASS_NONE;
}

/* ---- the four calls of a model ---- */

/* Frees the buffer of a unit that has nothing left to do in this pass. */
static tagc_status finish_unit(tagc_gather_order *o, int unit) {
    const tagc_order_unit *u = &o->units[unit];
    if (!is_finished(o, u) || u->n_in_use > 0) return TAGC_OK;
    if (--o->n_open == 0) o->calls->pass_done(o->context);
    return release(o, unit);
}

tagc_status tagc_order_use(tagc_gather_order *o, int unit) {
    if (o->n_buffers > 0) TAGC_TRY(need(o, unit));
    o->units[unit].n_in_use++;
    return TAGC_OK;
}

tagc_status tagc_order_done(tagc_gather_order *o, int unit) {
    o->units[unit].n_in_use--;
    o->units[unit].n_done++;
    return finish_unit(o, unit);
}

tagc_status tagc_order_grad_done(tagc_gather_order *o, int unit) {
    tagc_order_unit *u = &o->units[unit];
    u->n_gradients_done++;
    /* Begin the gathers first: the next units wait for parameters, but only the step waits for gradients. */
    TAGC_TRY(finish_unit(o, unit));
    return u->n_gradients_done == u->n_tensors && exchanges_now(o) ? begin_exchange(o, unit) : TAGC_OK;
}
