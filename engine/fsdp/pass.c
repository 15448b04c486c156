/* The forward and the backward pass: the callbacks of the order of gathers and exchanges (gather_order.h), and the calls of
 * the model. */
#include "fsdp/internal.h"
#include "unit/gather.h"
#include <string.h>

static const char *const pass_names[] = {"forward", "backward", "between passes"};

/* ---- callbacks of the order ---- */

static tagc_status begin_gather(void *context, int unit) {
    tagc_fsdp *f = context;
    const tagc_layout_unit *u = &f->tables.units[unit];
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) {
        const tagc_flat *flat = &f->tables.flats[i];
        TAGC_TRY(tagc_flat_gatherer_begin(flat->gatherer, flat->master, flat->full));
    }
    return TAGC_OK;
}

static tagc_status end_gather(void *context, int unit) {
    tagc_fsdp *f = context;
    const tagc_layout_unit *u = &f->tables.units[unit];
    double start_s = tagc_time_s();
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++)
        TAGC_TRY(tagc_flat_gatherer_end(f->tables.flats[i].gatherer));
    tagc_account_blocked(&f->account, start_s, &f->account.stats.wait_gather_s, unit, f->order.pass);
    return TAGC_OK;
}

static void add_stats(tagc_fsdp *f, const tagc_flat *flat) {
    tagc_fsdp_stats *sum = &f->account.stats;
    const tagc_model_part *part = tagc_fsdp_part(f, flat);
    const tagc_reducer_stats *s = &part->reducer->now.stats;
    for (int level = 0; level < (part->host_sum ? 2 : 1); level++) {
        const tagc_reducer_stats *each = level == 0 ? s : &part->host_sum->now.stats;
        for (int phase = 0; phase < TAGC_N_PHASES; phase++) sum->phase_s[phase] += each->time_s[phase];
        for (int leg = 0; leg < TAGC_N_LEGS; leg++)
            sum->n_class_bytes_sent[flat->class_] += each->n_bytes_sent[leg];
    }
    uint64_t n_places = (uint64_t)f->model->n_places, n_sent = s->n_sent * n_places;
    if (flat->class_ == TAGC_CLASS_MILD) {
        sum->n_mild += flat->n_elems;
        sum->n_mild_sent += n_sent;
    }
    if (flat->class_ != TAGC_CLASS_COMPRESSED) return;
    sum->n_compressed += flat->n_elems;
    sum->n_sent += n_sent;
    sum->n_union += s->n_union;
    sum->n_returned += s->n_returned * (f->model->options.layout.output == TAGC_OUTPUT_UNIT ? n_places : 1);
    sum->n_unpeeled += s->n_unpeeled;
    sum->n_lost += s->n_lost;
    if (s->load > sum->load) sum->load = s->load;
    if (s->peel_rounds > sum->peel_rounds) sum->peel_rounds = s->peel_rounds;
}

static tagc_status end_exchange(void *context, int unit) {
    tagc_fsdp *f = context;
    tagc_layout_unit *u = &f->tables.units[unit];
    double start_s = tagc_time_s();
    TAGC_TRY(tagc_model_end(f->model, (uint32_t)unit, NULL));
    tagc_account_blocked(&f->account, start_s, &f->account.stats.wait_reduce_s, unit, f->order.pass);
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) {
        tagc_flat *flat = &f->tables.flats[i];
        add_stats(f, flat);
        if (flat->received == NULL) continue;
        if (u->n_exchanged == 0) memset(flat->gradient, 0, flat->n_owned * sizeof *flat->gradient);
        for (uint64_t j = 0; j < flat->n_owned; j++) flat->gradient[j] += flat->received[j];
    }
    u->n_exchanged++;
    return TAGC_OK;
}

/* The schedule looks at the gradient of the last micro-step alone. */
static tagc_status begin_exchange(void *context, int unit) {
    tagc_fsdp *f = context;
    const tagc_layout_unit *u = &f->tables.units[unit];
    tagc_piece gradients[TAGC_N_CLASSES], sums[TAGC_N_CLASSES];
    for (int i = 0; i < u->n_flats; i++) {
        const tagc_flat *flat = &f->tables.flats[u->first_flat + i];
        uint32_t first = (uint32_t)f->tables.members[flat->first_member];
        gradients[i] = (tagc_piece){first, 0, flat->n_padded, flat->full_gradient};
        sums[i] =
            (tagc_piece){first, 0, flat->n_owned, flat->received != NULL ? flat->received : flat->gradient};
    }
    tagc_model_set_sampling(f->model, f->order.micro_step == f->options.n_micro_steps);
    return tagc_model_begin(f->model, (uint32_t)unit, gradients, (size_t)u->n_flats, sums,
                            (size_t)u->n_flats);
}

static void clear_gradients(void *context, int unit) {
    tagc_fsdp *f = context;
    memset(f->tables.flats[f->tables.units[unit].first_flat].full_gradient, 0,
           f->tables.units[unit].n_padded * sizeof(float));
}

static void pass_done(void *context) {
    tagc_fsdp *f = context;
    tagc_account_close(&f->account, tagc_time_s(), f->order.pass);
}

static const char *unit_name(const void *context, int unit) {
    return tagc_fsdp_unit_name(context, unit);
}

const tagc_order_calls tagc_fsdp_order_calls = {.begin_gather = begin_gather,
                                                .end_gather = end_gather,
                                                .begin_exchange = begin_exchange,
                                                .end_exchange = end_exchange,
                                                .clear_gradients = clear_gradients,
                                                .pass_done = pass_done,
                                                .name = unit_name};

/* ---- replicas between passes ---- */

uint64_t tagc_fsdp_replica_gathers(const tagc_fsdp *f, int flat) {
    const tagc_flat *of = &f->tables.flats[flat];
    int is_there = of->gatherer != NULL && f->order.units[of->unit].residency == TAGC_PRESENT;
    return is_there ? tagc_flat_gatherer_replica(of->gatherer) : 0;
}

void tagc_fsdp_gathered(const tagc_fsdp *f, uint64_t *sent, uint64_t *received) {
    uint64_t n_sent[TAGC_N_LEGS], n_received[TAGC_N_LEGS];
    tagc_fsdp_count_bytes(f, n_sent, n_received);
    *sent = n_sent[TAGC_LEG_GATHER] - f->account.sent_before[TAGC_LEG_GATHER];
    *received = n_received[TAGC_LEG_GATHER] - f->account.received_before[TAGC_LEG_GATHER];
}

void tagc_fsdp_set_gathered(tagc_fsdp *f, uint64_t sent, uint64_t received) {
    uint64_t n_sent[TAGC_N_LEGS], n_received[TAGC_N_LEGS];
    tagc_fsdp_count_bytes(f, n_sent, n_received);
    f->account.sent_before[TAGC_LEG_GATHER] = n_sent[TAGC_LEG_GATHER] - sent;
    f->account.received_before[TAGC_LEG_GATHER] = n_received[TAGC_LEG_GATHER] - received;
}

tagc_status tagc_fsdp_renew(tagc_fsdp *f) {
    TAGC_TRY(tagc_order_end_gathers(&f->order));
    tagc_order_make_absent(&f->order);
    for (int i = 0; i < f->tables.n_flats; i++)
        if (f->tables.flats[i].gatherer != NULL)
            TAGC_TRY(tagc_flat_gatherer_reset(f->tables.flats[i].gatherer));
    return TAGC_OK;
}

/* ---- a pass begins ---- */

static tagc_status begin_step(tagc_fsdp *f) {
    f->account.step_start_s = tagc_time_s();
    memset(&f->account.stats, 0, sizeof f->account.stats);
    uint64_t sent = f->account.sent_before[TAGC_LEG_GATHER],
             received = f->account.received_before[TAGC_LEG_GATHER];
    tagc_fsdp_count_bytes(f, f->account.sent_before, f->account.received_before);
    if (f->options.sharding == TAGC_SHARD_GRAD) { /* the step counts its gathers from the last update on */
        f->account.sent_before[TAGC_LEG_GATHER] = sent;
        f->account.received_before[TAGC_LEG_GATHER] = received;
    }
    for (int i = 0; i < f->tables.n_units; i++) f->tables.units[i].n_exchanged = 0;
    return TAGC_OK;
}

tagc_status tagc_fsdp_forward_begin(tagc_fsdp *f, int training) {
    if (f->deferred != TAGC_OK) return tagc_fail(f->deferred, "%s", f->deferred_text);
    TAGC_TRY(tagc_order_finish_backward(&f->order));
    tagc_account_close(&f->account, tagc_time_s(), f->order.pass);
    TAGC_TRY(tagc_order_give_up(&f->order));
    if (training && f->order.micro_step == 0) TAGC_TRY(begin_step(f));
    return tagc_order_forward(&f->order, training);
}

tagc_status tagc_fsdp_backward_begin(tagc_fsdp *f) {
    if (f->deferred != TAGC_OK) return tagc_fail(f->deferred, "%s", f->deferred_text);
    if (f->order.pass != TAGC_PASS_FORWARD || !f->order.training)
        return tagc_fail(TAGC_ERR_STATE, "a backward pass without a training forward pass before it");
    if (f->order.micro_step == f->options.n_micro_steps)
        return tagc_fail(TAGC_ERR_STATE, "backward pass %d of a step of %d micro-steps",
                         f->order.micro_step + 1, f->options.n_micro_steps);
    tagc_account_close(&f->account, tagc_time_s(), f->order.pass);
    return tagc_order_backward(&f->order);
}

/* ---- the four calls of a model ---- */

static tagc_status check_call(tagc_fsdp *f, int tensor, int pass) {
    if (f->deferred != TAGC_OK) return tagc_fail(f->deferred, "%s", f->deferred_text);
    if (tensor < 0 || tensor >= f->tables.n_tensors)
        return tagc_fail(TAGC_ERR_ARGUMENT, "tensor is %d, allowed is 0 to %d", tensor,
                         f->tables.n_tensors - 1);
    if (f->order.pass == TAGC_PASS_NONE || (pass == TAGC_PASS_BACKWARD && f->order.pass != pass))
        return tagc_fail(TAGC_ERR_STATE, "%s is asked for %s", f->tables.tensors[tensor].name,
                         pass_names[f->order.pass]);
    return TAGC_OK;
}

tagc_status tagc_fsdp_use(void *context, int tensor, const float **values) {
    tagc_fsdp *f = context;
    TAGC_TRY(check_call(f, tensor, TAGC_PASS_FORWARD));
    int unit = f->tables.places[tensor].unit;
    TAGC_TRY(tagc_order_use(&f->order, unit));
    tagc_account_enter(&f->account, unit, f->order.pass);
    *values = f->tables.flats[f->tables.places[tensor].flat].full + f->tables.places[tensor].offset;
    return TAGC_OK;
}

void tagc_fsdp_done(void *context, int tensor) {
    tagc_fsdp *f = context;
    if (f->deferred != TAGC_OK || tensor < 0 || tensor >= f->tables.n_tensors) return;
    f->deferred = tagc_order_done(&f->order, f->tables.places[tensor].unit);
    if (f->deferred != TAGC_OK) strncpy(f->deferred_text, tagc_last_error(), sizeof f->deferred_text - 1);
}

tagc_status tagc_fsdp_grad(void *context, int tensor, float **gradient) {
    tagc_fsdp *f = context;
    TAGC_TRY(check_call(f, tensor, TAGC_PASS_BACKWARD));
    int unit = f->tables.places[tensor].unit;
    TAGC_TRY(tagc_order_grad(&f->order, unit));
    tagc_account_enter(&f->account, unit, f->order.pass);
    *gradient =
        f->tables.flats[f->tables.places[tensor].flat].full_gradient + f->tables.places[tensor].offset;
    return TAGC_OK;
}

tagc_status tagc_fsdp_grad_done(void *context, int tensor) {
    tagc_fsdp *f = context;
    TAGC_TRY(check_call(f, tensor, TAGC_PASS_BACKWARD));
    int unit = f->tables.places[tensor].unit;
    const tagc_order_unit *u = &f->order.units[unit];
    if (!u->gradients_open || u->n_gradients_done == u->n_tensors)
        return tagc_fail(TAGC_ERR_STATE, "gradient of %s is done without having been asked for",
                         f->tables.tensors[tensor].name);
    return tagc_order_grad_done(&f->order, unit);
}
