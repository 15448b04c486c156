/* The forward and the backward pass: parameters come just ahead of their use and go after it, gradients leave
 * as soon as a unit has all of its own. Every decision depends on the order of the model's calls alone, so
 * all ranks begin the same gathers and exchanges in the same order. */
#include "fsdp/internal.h"
#include <string.h>

#define SHORT_S 1e-6 /* spans below are not worth an event */

static const char *const pass_names[] = {"forward", "backward", "between passes"};

/* ---- the compute stream of the trace ---- */

void tagc_fsdp_event(tagc_fsdp *f, const char *name, double start_s, double end_s, uint64_t tag) {
    if (f->trace == NULL || end_s - start_s < SHORT_S) return;
    tagc_event event = {.stream = "compute", .name = name, .start_s = start_s, .end_s = end_s, .tag = tag};
    tagc_trace_add(f->trace, &event);
}

void tagc_fsdp_close_span(tagc_fsdp *f, double end_s) {
    if (f->span_unit >= 0)
        tagc_fsdp_event(f, pass_names[f->pass], f->span_start_s, end_s, (uint64_t)f->span_unit);
    f->span_unit = -1;
}

/* Compute time belongs to the unit that was asked for last: spans of one stream must not overlap. */
static void enter_span(tagc_fsdp *f, int unit) {
    if (f->trace == NULL || f->span_unit == unit) return;
    double now_s = tagc_time_s();
    tagc_fsdp_close_span(f, now_s);
    f->span_unit = unit;
    f->span_start_s = now_s;
}

void tagc_fsdp_blocked(tagc_fsdp *f, double start_s, double *total_s, int unit) {
    double end_s = tagc_time_s();
    *total_s += end_s - start_s;
    int span_unit = f->span_unit;
    tagc_fsdp_close_span(f, start_s);
    tagc_fsdp_event(f, "wait", start_s, end_s, (uint64_t)unit);
    f->span_unit = span_unit;
    f->span_start_s = end_s;
}

/* ---- parameters ---- */

tagc_status tagc_fsdp_begin_gather(tagc_fsdp *f, int unit) {
    tagc_unit *u = &f->units[unit];
    f->slots[u->slot].holder = unit;
    u->residency = TAGC_COMING;
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++)
        TAGC_TRY(tagc_gatherer_begin(f->flats[i].gatherer, f->flats[i].master, f->flats[i].full));
    return TAGC_OK;
}

static tagc_status end_gather(tagc_fsdp *f, int unit) {
    tagc_unit *u = &f->units[unit];
    if (u->residency != TAGC_COMING) return TAGC_OK;
    double start_s = tagc_time_s();
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++)
        TAGC_TRY(tagc_gatherer_end(f->flats[i].gatherer));
    u->residency = TAGC_PRESENT;
    tagc_fsdp_blocked(f, start_s, &f->stats.wait_gather_s, unit);
    return TAGC_OK;
}

tagc_status tagc_fsdp_end_gathers(tagc_fsdp *f) {
    for (int unit = 0; unit < f->n_units; unit++) TAGC_TRY(end_gather(f, unit));
    return TAGC_OK;
}

static int unit_at(const tagc_fsdp *f, int position) {
    return f->pass == TAGC_PASS_BACKWARD ? f->backward_order[position] : position;
}

/* An embedding is not read in backward: such units come on demand only. */
static int comes_ahead(const tagc_fsdp *f, const tagc_unit *u) {
    return !u->stays && (f->pass == TAGC_PASS_FORWARD || u->used_backward);
}

/* Has nothing left to do in this pass. */
static int is_finished(const tagc_fsdp *f, const tagc_unit *u) {
    return f->pass == TAGC_PASS_FORWARD ? u->n_done == u->n_uses : u->n_gradients_done == u->n_tensors;
}

/* Gathers may reach `prefetch` units past `position`, not counting those that need none. */
static void reach_from(tagc_fsdp *f, int position) {
    for (int n = f->options.prefetch; n > 0 && position + 1 < f->n_units;)
        n -= comes_ahead(f, &f->units[unit_at(f, ++position)]);
    if (position > f->gather_reach) f->gather_reach = position;
}

/* Begins gathers in the order of the pass as far as they may reach, and as slots are free. */
static tagc_status gather_ahead(tagc_fsdp *f) {
    for (; f->gather_next < f->n_units && f->gather_next <= f->gather_reach; f->gather_next++) {
        int unit = unit_at(f, f->gather_next);
        tagc_unit *u = &f->units[unit];
        if (u->residency != TAGC_ABSENT || !comes_ahead(f, u) || is_finished(f, u)) continue;
        if (f->slots[u->slot].holder >= 0) return TAGC_OK;
        TAGC_TRY(tagc_fsdp_begin_gather(f, unit));
    }
    return TAGC_OK;
}

/* A unit that came ahead and was not used yet makes way, and comes again when it is needed. */
static tagc_status make_way(tagc_fsdp *f, int slot) {
    int holder = f->slots[slot].holder;
    if (holder < 0 || f->units[holder].n_in_use > 0 || f->units[holder].n_done > 0) return TAGC_OK;
    TAGC_TRY(end_gather(f, holder));
    f->units[holder].residency = TAGC_ABSENT;
    f->slots[slot].holder = -1;
    return TAGC_OK;
}

static tagc_status need(tagc_fsdp *f, int unit) {
    tagc_unit *u = &f->units[unit];
    reach_from(f, u->position[f->pass]);
    if (u->residency == TAGC_ABSENT) {
        TAGC_TRY(make_way(f, u->slot));
        int holder = f->slots[u->slot].holder;
        if (holder >= 0)
            return tagc_fail(TAGC_ERR_STATE,
                             "unit %s is used while %s is in its place: prefetch %d is too small for the "
                             "model's order of use",
                             u->name, f->units[holder].name, f->options.prefetch);
        TAGC_TRY(tagc_fsdp_begin_gather(f, unit));
    }
    TAGC_TRY(gather_ahead(f));
    return end_gather(f, unit);
}

int tagc_fsdp_releases(const tagc_fsdp *f) {
    return f->options.sharding == TAGC_SHARD_FULL || f->options.sharding == TAGC_SHARD_HYBRID;
}

static tagc_status release(tagc_fsdp *f, int unit) {
    tagc_unit *u = &f->units[unit];
    if (!tagc_fsdp_releases(f) || u->residency == TAGC_ABSENT) return TAGC_OK;
    if (u->spans && f->pass == TAGC_PASS_FORWARD && f->training) return TAGC_OK;
    TAGC_TRY(end_gather(f, unit)); /* when it came for nothing */
    u->residency = TAGC_ABSENT;
    f->slots[u->slot].holder = -1;
    reach_from(f, u->position[f->pass] + 1); /* the next is about to be used */
    return gather_ahead(f);
}

void tagc_fsdp_make_absent(tagc_fsdp *f) {
    if (f->options.sharding == TAGC_SHARD_NONE) return;
    for (int i = 0; i < f->n_units; i++) f->units[i].residency = TAGC_ABSENT;
    for (int i = 0; i < f->n_slots; i++) f->slots[i].holder = -1;
}

void tagc_fsdp_make_present(tagc_fsdp *f, int unit) {
    f->units[unit].residency = TAGC_PRESENT;
    f->slots[f->units[unit].slot].holder = unit;
}

uint64_t tagc_fsdp_replica_gathers(const tagc_fsdp *f, int flat) {
    uint64_t n_gathers = 0;
    if (f->flats[flat].gatherer != NULL && f->units[f->flats[flat].unit].residency == TAGC_PRESENT)
        tagc_gatherer_replica(f->flats[flat].gatherer, &n_gathers);
    return n_gathers;
}

void tagc_fsdp_gathered(const tagc_fsdp *f, uint64_t *sent, uint64_t *received) {
    uint64_t n_sent[TAGC_N_LEGS], n_received[TAGC_N_LEGS];
    tagc_comm_bytes(f->comm, n_sent, n_received, TAGC_N_LEGS);
    *sent = n_sent[TAGC_LEG_GATHER] - f->sent_before[TAGC_LEG_GATHER];
    *received = n_received[TAGC_LEG_GATHER] - f->received_before[TAGC_LEG_GATHER];
}

void tagc_fsdp_set_gathered(tagc_fsdp *f, uint64_t sent, uint64_t received) {
    uint64_t n_sent[TAGC_N_LEGS], n_received[TAGC_N_LEGS];
    tagc_comm_bytes(f->comm, n_sent, n_received, TAGC_N_LEGS);
    f->sent_before[TAGC_LEG_GATHER] = n_sent[TAGC_LEG_GATHER] - sent;
    f->received_before[TAGC_LEG_GATHER] = n_received[TAGC_LEG_GATHER] - received;
}

tagc_status tagc_fsdp_renew(tagc_fsdp *f) {
    TAGC_TRY(tagc_fsdp_end_gathers(f));
    tagc_fsdp_make_absent(f);
    for (int i = 0; i < f->n_flats; i++)
        if (f->flats[i].gatherer != NULL) TAGC_TRY(tagc_gatherer_reset(f->flats[i].gatherer));
    return TAGC_OK;
}

/* ---- gradients ---- */

static int exchanges_now(const tagc_fsdp *f) {
    return f->options.exchange_each_micro_step || f->micro_step == f->options.n_micro_steps;
}

static void add_stats(tagc_fsdp *f, const tagc_flat *flat, const tagc_reducer_stats *s) {
    tagc_fsdp_stats *sum = &f->stats;
    for (int phase = 0; phase < TAGC_N_PHASES; phase++) sum->phase_s[phase] += s->time_s[phase];
    uint64_t n_kept = s->n_kept * (uint64_t)flat->ranks_per_host;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) sum->n_class_bytes_sent[flat->class_] += s->n_bytes_sent[leg];
    if (flat->class_ == TAGC_CLASS_MILD) {
        sum->n_mild += flat->n_elems;
        sum->n_mild_kept += n_kept;
    }
    if (flat->class_ != TAGC_CLASS_COMPRESSED) return;
    sum->n_compressed += flat->n_elems;
    sum->n_kept += n_kept;
    sum->n_union += s->n_union;
    sum->n_unpeeled += s->n_unpeeled;
    sum->n_lost += s->n_lost;
    if (s->load > sum->load) sum->load = s->load;
    if (s->peel_rounds > sum->peel_rounds) sum->peel_rounds = s->peel_rounds;
}

static float *output_of(const tagc_flat *flat) {
    return flat->received != NULL ? flat->received : flat->gradient;
}

tagc_status tagc_fsdp_end_exchange(tagc_fsdp *f, int unit) {
    tagc_unit *u = &f->units[unit];
    if (!u->exchanging) return TAGC_OK;
    double start_s = tagc_time_s();
    tagc_reducer_stats stats;
    tagc_reducer_stats_init(&stats);
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) {
        TAGC_TRY(tagc_reducer_end(f->flats[i].reducer, &stats));
        add_stats(f, &f->flats[i], &stats);
        if (f->flats[i].carry_sent && !stats.nonfinite) tagc_fsdp_drop_carry(f, &f->flats[i]);
        f->flats[i].carry_sent = 0;
    }
    u->exchanging = 0;
    f->gradient_slots[u->gradient_slot].holder = -1;
    tagc_fsdp_blocked(f, start_s, &f->stats.wait_reduce_s, unit);
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) {
        tagc_flat *flat = &f->flats[i];
        if (flat->received == NULL) continue;
        if (u->n_exchanged == 0) memset(flat->gradient, 0, flat->n_owned * sizeof *flat->gradient);
        for (uint64_t j = 0; j < flat->n_owned; j++) flat->gradient[j] += flat->received[j];
    }
    u->n_exchanged++;
    return TAGC_OK;
}

/* Makes the unit's gradient buffer its own: ends what is still being sent from there, clears it. */
static tagc_status open_gradients(tagc_fsdp *f, int unit) {
    tagc_unit *u = &f->units[unit];
    tagc_slot *slot = &f->gradient_slots[u->gradient_slot];
    if (slot->holder >= 0) TAGC_TRY(tagc_fsdp_end_exchange(f, slot->holder));
    if (slot->holder >= 0 && slot->holder != unit)
        return tagc_fail(TAGC_ERR_STATE,
                         "gradients of unit %s are asked for while those of %s are open in its place: "
                         "grads_in_flight %d is too small for the model's order",
                         u->name, f->units[slot->holder].name, f->options.grads_in_flight);
    slot->holder = unit;
    u->gradients_open = 1;
    if (!u->gradients_zeroed) memset(f->flats[u->first_flat].full_gradient, 0, u->n_padded * sizeof(float));
    u->gradients_zeroed = 1;
    return TAGC_OK;
}

/* Once per step: with the gradient that the optimizer will see. */
static void add_carry(const tagc_fsdp *f, tagc_flat *flat) {
    if (flat->carry == NULL || f->micro_step != f->options.n_micro_steps) return;
    for (uint64_t i = 0; i < flat->n_padded; i++) flat->full_gradient[i] += flat->carry[i];
    flat->carry_sent = 1;
}

static tagc_status begin_exchange(tagc_fsdp *f, int unit) {
    tagc_unit *u = &f->units[unit];
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) add_carry(f, &f->flats[i]);
    u->exchanging = 1;
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) {
        tagc_flat *flat = &f->flats[i];
        TAGC_TRY(tagc_reducer_begin(flat->reducer, flat->full_gradient, output_of(flat)));
    }
    return TAGC_OK;
}

tagc_status tagc_fsdp_finish_backward(tagc_fsdp *f) {
    if (f->pass != TAGC_PASS_BACKWARD) return TAGC_OK;
    for (int at = 0; at < f->n_units; at++) {
        int unit = f->backward_order[at];
        tagc_unit *u = &f->units[unit];
        if (u->n_gradients_done == u->n_tensors) continue;
        if (!u->gradients_open) TAGC_TRY(open_gradients(f, unit));
        if (exchanges_now(f)) TAGC_TRY(begin_exchange(f, unit));
        u->n_gradients_done = u->n_tensors;
    }
    for (int unit = 0; unit < f->n_units; unit++) f->units[unit].used_backward = f->units[unit].n_done > 0;
    return TAGC_OK;
}

/* ---- a pass begins ---- */

static tagc_status begin_pass(tagc_fsdp *f, int pass) {
    f->pass = pass;
    f->n_open = f->n_units;
    f->gather_next = 0;
    f->gather_reach = -1;
    for (int i = 0; i < f->n_units; i++) {
        tagc_unit *u = &f->units[i];
        u->n_in_use = u->n_done = u->n_gradients_done = u->gradients_open = 0;
        /* In forward what is coming was begun by the last step. */
        u->stays = u->residency == TAGC_PRESENT || (u->residency == TAGC_COMING && pass == TAGC_PASS_FORWARD);
    }
    reach_from(f, 0);
    return gather_ahead(f);
}

static tagc_status begin_step(tagc_fsdp *f) {
    f->step_start_s = tagc_time_s();
    memset(&f->stats, 0, sizeof f->stats);
    uint64_t sent = f->sent_before[TAGC_LEG_GATHER], received = f->received_before[TAGC_LEG_GATHER];
    tagc_comm_bytes(f->comm, f->sent_before, f->received_before, TAGC_N_LEGS);
    if (f->options.sharding == TAGC_SHARD_GRAD) { /* its gathers are counted from the last update on */
        f->sent_before[TAGC_LEG_GATHER] = sent;
        f->received_before[TAGC_LEG_GATHER] = received;
    }
    for (int i = 0; i < f->n_units; i++) f->units[i].gradients_zeroed = f->units[i].n_exchanged = 0;
    return tagc_fsdp_begin_kept(f);
}

tagc_status tagc_fsdp_forward_begin(tagc_fsdp *f, int training) {
    if (f->deferred != TAGC_OK) return tagc_fail(f->deferred, "%s", f->deferred_text);
    TAGC_TRY(tagc_fsdp_finish_backward(f));
    tagc_fsdp_close_span(f, tagc_time_s());
    if (f->options.sharding != TAGC_SHARD_GRAD) TAGC_TRY(tagc_fsdp_end_gathers(f)); /* a pass was given up */
    if (training && f->micro_step == 0) TAGC_TRY(begin_step(f));
    f->training = training;
    if (tagc_fsdp_releases(f)) tagc_fsdp_make_absent(f);
    return begin_pass(f, TAGC_PASS_FORWARD);
}

tagc_status tagc_fsdp_backward_begin(tagc_fsdp *f) {
    if (f->deferred != TAGC_OK) return tagc_fail(f->deferred, "%s", f->deferred_text);
    if (f->pass != TAGC_PASS_FORWARD || !f->training)
        return tagc_fail(TAGC_ERR_STATE, "a backward pass without a training forward pass before it");
    if (f->micro_step == f->options.n_micro_steps)
        return tagc_fail(TAGC_ERR_STATE, "backward pass %d of a step of %d micro-steps", f->micro_step + 1,
                         f->options.n_micro_steps);
    tagc_fsdp_close_span(f, tagc_time_s());
    f->micro_step++;
    int accumulates = f->options.n_micro_steps > 1 && !f->options.exchange_each_micro_step;
    if (!accumulates)
        for (int i = 0; i < f->n_units; i++) f->units[i].gradients_zeroed = 0;
    return begin_pass(f, TAGC_PASS_BACKWARD);
}

/* ---- the four calls of a model ---- */

static tagc_status check_call(tagc_fsdp *f, int tensor, int pass) {
    if (f->deferred != TAGC_OK) return tagc_fail(f->deferred, "%s", f->deferred_text);
    if (tensor < 0 || tensor >= f->n_tensors)
        return tagc_fail(TAGC_ERR_ARGUMENT, "tensor is %d, allowed is 0 to %d", tensor, f->n_tensors - 1);
    if (f->pass == TAGC_PASS_NONE || (pass == TAGC_PASS_BACKWARD && f->pass != pass))
        return tagc_fail(TAGC_ERR_STATE, "%s is asked for %s", f->tensors[tensor].name, pass_names[f->pass]);
    return TAGC_OK;
}

/* Once a unit has nothing left to do in this pass, its place is free. */
static tagc_status finish_unit(tagc_fsdp *f, int unit) {
    tagc_unit *u = &f->units[unit];
    if (!is_finished(f, u) || u->n_in_use > 0) return TAGC_OK;
    if (--f->n_open == 0) tagc_fsdp_close_span(f, tagc_time_s());
    return release(f, unit);
}

tagc_status tagc_fsdp_use(void *context, int tensor, const float **values) {
    tagc_fsdp *f = context;
    TAGC_TRY(check_call(f, tensor, TAGC_PASS_FORWARD));
    int unit = f->places[tensor].unit;
    if (f->n_slots > 0) TAGC_TRY(need(f, unit));
    enter_span(f, unit);
    f->units[unit].n_in_use++;
    *values = f->flats[f->places[tensor].flat].full + f->places[tensor].offset;
    return TAGC_OK;
}

void tagc_fsdp_done(void *context, int tensor) {
    tagc_fsdp *f = context;
    if (f->deferred != TAGC_OK || tensor < 0 || tensor >= f->n_tensors) return;
    tagc_unit *u = &f->units[f->places[tensor].unit];
    u->n_in_use--;
    u->n_done++;
    f->deferred = finish_unit(f, f->places[tensor].unit);
    if (f->deferred != TAGC_OK) strncpy(f->deferred_text, tagc_last_error(), sizeof f->deferred_text - 1);
}

tagc_status tagc_fsdp_grad(void *context, int tensor, float **gradient) {
    tagc_fsdp *f = context;
    TAGC_TRY(check_call(f, tensor, TAGC_PASS_BACKWARD));
    int unit = f->places[tensor].unit;
    if (!f->units[unit].gradients_open) TAGC_TRY(open_gradients(f, unit));
    enter_span(f, unit);
    *gradient = f->flats[f->places[tensor].flat].full_gradient + f->places[tensor].offset;
    return TAGC_OK;
}

tagc_status tagc_fsdp_grad_done(void *context, int tensor) {
    tagc_fsdp *f = context;
    TAGC_TRY(check_call(f, tensor, TAGC_PASS_BACKWARD));
    int unit = f->places[tensor].unit;
    tagc_unit *u = &f->units[unit];
    if (!u->gradients_open || u->n_gradients_done == u->n_tensors)
        return tagc_fail(TAGC_ERR_STATE, "gradient of %s is done without having been asked for",
                         f->tensors[tensor].name);
    u->n_gradients_done++;
    /* Parameters that the next units need leave before gradients, which nobody needs before the step. */
    TAGC_TRY(finish_unit(f, unit));
    return u->n_gradients_done == u->n_tensors && exchanges_now(f) ? begin_exchange(f, unit) : TAGC_OK;
}
