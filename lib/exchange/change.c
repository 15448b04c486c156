/* Changes what a reducer sends, between two steps. The residual stays where it is; buffers and work memory are laid out anew. */
#include "exchange/options.h"
#include "exchange/reducer.h"

static tagc_status check_idle(const tagc_reducer *r, const char *what) {
    if (!r) return tagc_fail(TAGC_ERR_ARGUMENT, "reducer is NULL");
    if (r->now.begun) return tagc_fail(TAGC_ERR_STATE, "%s between begin and end: end the step first", what);
    return TAGC_OK;
}

/* options: with defaults resolved. */
static tagc_status take_up(tagc_reducer *r, const tagc_reducer_options *options) {
    tagc_reducer fresh = *r;
    fresh.options = *options;
    if (!r->residual)
        TAGC_TRY(tagc_reducer_make_residual(&fresh)); /* where all was sent, something now stays */
    tagc_reducer_choose_path(&fresh);
    tagc_status status = tagc_reducer_lay_out(&fresh);
    if (status != TAGC_OK) {
        tagc_reducer_destroy_state(&fresh);
        if (!r->residual) tagc_reducer_destroy_residual(&fresh);
        return status;
    }
    tagc_reducer_destroy_state(r);
    *r = fresh;
    tagc_reducer_note_residual(r);
    return TAGC_OK;
}

tagc_status tagc_reducer_change(tagc_reducer *r, const tagc_reducer_options *options) {
    tagc_reducer_options checked;
    _Alignas(8) char own[TAGC_OWN_MAX_BYTES];
    TAGC_TRY(check_idle(r, "change"));
    if (r->options.exchange != TAGC_EXCHANGE_DIRECT)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "exchange is %s, but only a reducer of direct can change",
                         tagc_exchange_names[r->options.exchange]);
    TAGC_TRY(tagc_reducer_options_check(options, r->world_size, &checked, own));
    tagc_reducer_options now = r->options, wanted = checked;
    now.n_elems = r->n_given;
    wanted.n_elems = options->n_elems;
    TAGC_TRY(tagc_reducer_options_check_change(&now, &wanted));
    int is_same = checked.format == r->options.format && checked.sparsity == r->options.sparsity &&
                  checked.block == r->options.block && checked.result_format == r->options.result_format &&
                  checked.result_sparsity == r->options.result_sparsity;
    return is_same ? TAGC_OK : take_up(r, &checked);
}

tagc_status tagc_reducer_set_sparsity(tagc_reducer *r, double sparsity) {
    TAGC_TRY(check_idle(r, "set_sparsity"));
    if (!(sparsity >= 0 && sparsity <= 1))
        return tagc_fail(TAGC_ERR_ARGUMENT, "sparsity is %.10g, must be in [0, 1]", sparsity);
    if (sparsity == r->options.sparsity) return TAGC_OK;
    tagc_reducer_options options = r->options;
    options.sparsity = sparsity;
    TAGC_TRY(tagc_reducer_options_check_once(&options));
    return take_up(r, &options);
}
