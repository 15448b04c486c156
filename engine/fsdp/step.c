/* The end of a step: waits for the exchanges, agrees on the norm over all ranks, and updates the owned parts. */
#include "fsdp/internal.h"
#include <math.h>
#include <string.h>

/* Of equal replicas one adds its values. Padding is left out. */
static double own_squares(const tagc_fsdp *f, const tagc_flat *flat) {
    uint64_t n = flat->n_padded / (uint64_t)f->world_size,
             begin = tagc_fsdp_own_part(flat->n_padded, f->world_size, f->n_owners, f->rank);
    if (begin >= flat->n_elems) return 0;
    if (n > flat->n_elems - begin) n = flat->n_elems - begin;
    return tagc_sum_of_squares(flat->gradient + (begin - flat->first_owned), n);
}

/* Adds in rank order, so that all ranks get the same bits and agree on non-finite gradients. */
static tagc_status global_norm(tagc_fsdp *f, double *norm) {
    double sum = 0, begin_s = tagc_time_s();
    for (int i = 0; i < f->tables.n_flats; i++) sum += own_squares(f, &f->tables.flats[i]);
    double start_s = tagc_time_s();
    tagc_account_event(&f->account, "optimizer", begin_s, start_s, UINT64_MAX);
    TAGC_TRY(
        tagc_comm_all_gather(f->comm, &sum, sizeof sum, f->norms, (size_t)f->world_size * sizeof *f->norms));
    tagc_account_blocked(&f->account, start_s, &f->account.stats.wait_reduce_s, -1, f->order.pass);
    sum = 0;
    for (int rank = 0; rank < f->world_size; rank++) sum += f->norms[rank];
    *norm = sqrt(sum) / f->options.n_micro_steps;
    return TAGC_OK;
}

/* Updates so far whose values were selected, for flats that come seldom; else 0. The sparsity of compressed flats has chosen
 * beta2_compressed; mild ones have their own. */
static uint64_t n_selected(const tagc_fsdp *f, const tagc_flat *flat) {
    int selects = flat->class_ == TAGC_CLASS_COMPRESSED || f->options.mild.sparsity > 0;
    if (flat->class_ == TAGC_CLASS_DENSE) return 0;
    /* All updates, those before a fork as well: moments come with it. The plan counts from the fork. */
    if (flat->is_followed) return flat->plan.n_selected > 0 ? f->n_updates : 0;
    return selects ? f->n_updates : 0;
}

/* beta1 is short where nothing makes it so step by step. beta2 is the schedule's, or reaches one that was asked for as
 * slowly as that would. */
static void choose_betas(tagc_fsdp *f, const tagc_flat *flat, tagc_adamw *adamw) {
    const tagc_fsdp_options *o = &f->options;
    uint64_t n = n_selected(f, flat);
    double asked = o->beta2_compressed, shortest = o->beta1_compressed;
    tagc_schedule_betas(tagc_fsdp_schedule(f), flat->is_followed ? flat->plan.moment : 1, n, o->beta1,
                        o->beta2, &adamw->beta1, &adamw->beta2);
    if (flat->class_ == TAGC_CLASS_COMPRESSED && (!flat->is_followed || shortest >= o->beta1))
        adamw->beta1 = shortest;
    if (flat->moment1 == NULL) adamw->beta1 = 0;
    if (n > 0 && asked >= 0)
        adamw->beta2 = asked <= o->beta2 ? asked : fmax(o->beta2, fmin(asked, 1 - 3.0 / (double)n));
}

/* Unit by unit in the order of the forward pass. With sharding GRAD a unit's gather begins as soon as its owners have
 * updated it, and overlaps with the rest of the update and the next forward pass. */
static tagc_status update(tagc_fsdp *f, double lr, double clip) {
    const tagc_fsdp_options *o = &f->options;
    tagc_adamw adamw = {.lr = lr,
                        .epsilon = o->epsilon,
                        .gradient_scale = clip / o->n_micro_steps,
                        .n_updates = ++f->n_updates};
    tagc_order_make_absent(&f->order);
    for (int unit = 0; unit < f->tables.n_units; unit++) {
        const tagc_layout_unit *u = &f->tables.units[unit];
        for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) {
            const tagc_flat *flat = &f->tables.flats[i];
            choose_betas(f, flat, &adamw);
            for (int member = flat->first_member; member < flat->first_member + flat->n_members; member++) {
                int tensor = f->tables.members[member];
                const tagc_place *p = &f->tables.places[tensor];
                adamw.weight_decay = f->tables.tensors[tensor].decay ? o->weight_decay : 0;
                float *moment1 = flat->moment1 != NULL ? flat->moment1 + p->at : NULL;
                tagc_adamw_update(&adamw, flat->master + p->at, moment1, flat->moment2 + p->at,
                                  flat->gradient + p->at, p->n);
            }
        }
        if (o->sharding == TAGC_SHARD_GRAD) TAGC_TRY(tagc_order_begin_gather(&f->order, unit));
    }
    return TAGC_OK;
}

/* Call it when all of this step has been sent and nothing of the next. */
static void count_bytes(tagc_fsdp *f) {
    tagc_fsdp_stats *s = &f->account.stats;
    tagc_fsdp_count_bytes(f, s->n_bytes_sent, s->n_bytes_received);
    uint64_t sent = s->n_bytes_sent[TAGC_LEG_GATHER], received = s->n_bytes_received[TAGC_LEG_GATHER];
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        s->n_bytes_sent[leg] -= f->account.sent_before[leg];
        s->n_bytes_received[leg] -= f->account.received_before[leg];
        s->bits_per_param[leg] = (double)s->n_bytes_sent[leg] * 8 / (double)tagc_fsdp_n_params(f);
    }
    f->account.sent_before[TAGC_LEG_GATHER] = sent;
    f->account.received_before[TAGC_LEG_GATHER] = received;
}

tagc_status tagc_fsdp_step(tagc_fsdp *f, double lr, tagc_fsdp_stats *stats) {
    if (f->deferred != TAGC_OK) return tagc_fail(f->deferred, "%s", f->deferred_text);
    if (!isfinite(lr) || lr < 0) return tagc_fail(TAGC_ERR_ARGUMENT, "lr is %g, allowed is 0 or more", lr);
    if (f->order.pass != TAGC_PASS_BACKWARD || f->order.micro_step != f->options.n_micro_steps)
        return tagc_fail(TAGC_ERR_STATE, "a step after %d of %d backward passes", f->order.micro_step,
                         f->options.n_micro_steps);
    TAGC_TRY(tagc_order_finish_backward(&f->order));
    tagc_account_close(&f->account, tagc_time_s(), f->order.pass);
    TAGC_TRY(tagc_order_end_exchanges(&f->order));
    TAGC_TRY(tagc_order_end_gathers(&f->order)); /* of units that no pass has used */
    double norm;
    double start_s = tagc_time_s(), waited_s = f->account.stats.wait_reduce_s;
    TAGC_TRY(global_norm(f, &norm));
    tagc_fsdp_levels(f, f->account.stats.n_at_level);
    TAGC_TRY(tagc_fsdp_follow(f));
    double update_s = tagc_time_s();
    f->account.stats.grad_norm = norm;
    f->account.stats.skipped = !isfinite(norm);
    double clip_norm = f->options.clip_norm;
    double clip = clip_norm > 0 && clip_norm < norm + 1e-6 ? clip_norm / (norm + 1e-6) : 1.0;
    count_bytes(f);
    if (!f->account.stats.skipped) TAGC_TRY(update(f, lr, clip));
    double end_s = tagc_time_s();
    tagc_account_event(&f->account, "optimizer", update_s, end_s, UINT64_MAX);
    f->account.stats.optimizer_s = end_s - start_s - (f->account.stats.wait_reduce_s - waited_s);
    f->account.stats.total_s = end_s - f->account.step_start_s;
    f->account.stats.compute_s = f->account.stats.total_s - f->account.stats.wait_gather_s -
                                 f->account.stats.wait_reduce_s - f->account.stats.optimizer_s;
    tagc_order_end_step(&f->order);
    if (stats != NULL) *stats = f->account.stats;
    return TAGC_OK;
}
