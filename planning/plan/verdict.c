/* Whether compression pays by a plan's forecasts: the fastest row with it beside the fastest without, of any sharding. */
#include "plan/rows.h"

/* Whether the row compresses any leg; bf16 does not count. tagc bench draws the same line. */
static int compresses(const tagc_plan_row *row) {
    const tagc_fsdp_options *o = &row->setup.engine;
    return (row->volume.n_compressed > 0 && o->reducer.exchange != TAGC_EXCHANGE_DENSE) ||
           row->volume.n_mild > 0 || o->gather > TAGC_GATHER_BF16;
}

static const tagc_plan_row *fastest(const tagc_plan_row *rows, int n, int link, int is_compressed) {
    const tagc_plan_row *best = NULL;
    for (int i = 0; i < n; i++)
        if (compresses(&rows[i]) == is_compressed && rows[i].forecasts[link].iteration_s > 0 &&
            (!best || rows[i].forecasts[link].iteration_s < best->forecasts[link].iteration_s))
            best = &rows[i];
    return best;
}

int tagc_plan_judge(const tagc_plan_row *rows, int n, int link, tagc_plan_answer *out) {
    *out = (tagc_plan_answer){fastest(rows, n, link, 0), fastest(rows, n, link, 1), 0, TAGC_VERDICT_UNKNOWN};
    if (!out->plain || !out->packed) return 0;
    double plain_s = out->plain->forecasts[link].iteration_s,
           packed_s = out->packed->forecasts[link].iteration_s;
    out->speedup = plain_s / packed_s;
    out->verdict = tagc_verdict_of(plain_s, packed_s, 0);
    return 1;
}
