/* Adds up what the units of a model take. */
#include "sizes/units.h"

#include "core/status.h"
#include "exchange/options.h"
#include "plan/bytes.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Of a pass's computing, which DDP's exchanges run beside. */
static const double backward_share = 2.0 / 3;
/* Messages one after the other: the ranks agree, bodies go, and the ranks say how that ended. */
enum { LATENCIES = 3 };

/* ---- what was measured ---- */

static double seconds_of(const tagc_timed *t, double n) {
    double slope = t->n[1] > t->n[0] ? fmax(0, (t->s[1] - t->s[0]) / (t->n[1] - t->n[0])) : 0;
    if (!(t->n[1] > 0)) return 0;
    return fmax(0, fmin(t->s[0], t->s[1]) - slope * t->n[0]) + slope * n;
}

/* Among the ranks of a host, if it has several. */
static double within_s(const tagc_units_question *q, const tagc_timed *t, double n) {
    return q->ranks_per_host > 1 ? seconds_of(t, n) : 0;
}

static double copies_s(const tagc_units_question *q, int is_bf16, double n_out, double n_back) {
    double size = is_bf16 ? 0.5 : 1; /* of an fp32 value, which is what was copied */
    if (!q->codec_on_host) return 0;
    return seconds_of(&q->times.copy_out, size * n_out) + seconds_of(&q->times.copy_back, size * n_back);
}

/* ---- units ---- */

static double trained(const tagc_units_unit *unit) {
    double n = 0;
    for (int class_ = 0; class_ < TAGC_N_CLASSES; class_++) n += unit->trained[class_];
    return n;
}

static double gathered(const tagc_units_unit *unit) {
    return unit->fp32 + unit->bf16 + unit->n_other_bytes;
}

static double gathered_bytes(const tagc_units_unit *unit, int narrows) {
    return (narrows ? 2 : 4) * unit->fp32 + 2 * unit->bf16 + unit->n_other_bytes;
}

/* Whether it is of one type that tagc can send: torch gathers several as bytes. */
static int is_one_type(const tagc_units_unit *unit) {
    return !(unit->n_other_bytes > 0) && (unit->fp32 > 0) != (unit->bf16 > 0);
}

/* Elements that torch reduces. */
static double reduced(const tagc_units_question *q, const tagc_units_unit *unit) {
    double n = trained(unit);
    return n > 0 && q->reduces_frozen ? fmax(n, gathered(unit)) : n;
}

static double size_to_join(const tagc_units_question *q, const tagc_units_unit *unit) {
    return q->is_ddp ? trained(unit) : gathered(unit);
}

static void add_unit(tagc_units_unit *to, const tagc_units_unit *from) {
    for (int class_ = 0; class_ < TAGC_N_CLASSES; class_++) to->trained[class_] += from->trained[class_];
    to->fp32 += from->fp32;
    to->bf16 += from->bf16;
    to->n_other_bytes += from->n_other_bytes;
}

/* A unit that is gathered more or less often than the one before it, such as the root module, starts a new one. units (q->n_units). */
static size_t join_units(const tagc_units_question *q, tagc_units_unit *units) {
    size_t n = 0;
    for (size_t i = 0; i < q->n_units; i++) {
        const tagc_units_unit *unit = &q->units[i], *before = n > 0 ? &units[n - 1] : NULL;
        double rest = 0; /* of those that may be joined, from this one on */
        for (size_t k = i; k < q->n_units && q->units[k].n_gathers == unit->n_gathers; k++)
            rest += size_to_join(q, &q->units[k]);
        int is_small = before && (size_to_join(q, before) < q->joined || rest < q->joined);
        if (is_small && before->n_gathers == unit->n_gathers)
            add_unit(&units[n - 1], unit);
        else
            units[n++] = *unit;
    }
    return n;
}

/* ---- gradients ---- */

static tagc_status add_gradients(const tagc_units_question *q, const tagc_units_unit *unit,
                                 tagc_units_reply *out) {
    const tagc_units_times *t = &q->times;
    int per_host = q->ranks_per_host, n_hosts = q->world_size / per_host,
        is_bf16 = q->reduce == TAGC_FORMAT_BF16;
    double n = trained(unit), n_bytes = 0, codec_s = 0, n_reduced = reduced(q, unit);
    if (!(n > 0)) return TAGC_OK;
    if (!q->gradients) {
        out->gradients_s += seconds_of(&t->reduce[is_bf16], n_reduced);
        out->host_bytes +=
            (is_bf16 ? 2 : 4) * n_reduced * (1 + q->is_all_reduce) * (q->world_size - 1) / q->world_size;
        return TAGC_OK;
    }
    for (int class_ = 0; class_ < TAGC_N_CLASSES; class_++) {
        tagc_reducer_options options = q->gradients[class_];
        double of_class;
        if (!(unit->trained[class_] > 0)) continue;
        options.output = q->is_all_reduce ? TAGC_OUTPUT_UNIT : TAGC_OUTPUT_SHARD;
        TAGC_TRY(tagc_plan_reduced_bytes(&options, unit->trained[class_], n_hosts, per_host, &of_class));
        n_bytes += of_class;
        codec_s += q->codec_s[class_] * unit->trained[class_] / per_host;
    }
    out->host_bytes += per_host * n_bytes;
    out->gradients_s +=
        LATENCIES * t->latency_s + n_bytes / t->bytes_per_s + codec_s +
        copies_s(q, is_bf16, n / per_host, n / (q->is_all_reduce ? per_host : q->world_size)) +
        within_s(q, &t->sum_within, n) + (q->is_all_reduce ? within_s(q, &t->share_within, n) : 0);
    return TAGC_OK;
}

/* ---- parameters ---- */

static double gather_by_torch(const tagc_units_question *q, const tagc_units_unit *unit) {
    const tagc_timed *lines = q->times.gather;
    if (!is_one_type(unit)) return seconds_of(&lines[0], gathered_bytes(unit, q->narrows) / 4);
    return unit->bf16 > 0 || q->narrows ? seconds_of(&lines[1], unit->bf16 + unit->fp32)
                                        : seconds_of(&lines[0], unit->fp32);
}

static tagc_status add_gathers(const tagc_units_question *q, const tagc_units_unit *unit,
                               tagc_units_reply *out) {
    const tagc_units_times *t = &q->times;
    int per_host = q->ranks_per_host, n_times = unit->n_gathers * q->n_passes;
    double n = gathered(unit), n_bytes, around = (q->world_size - 1.0) / q->world_size;
    if (n_times == 0 || !(n > 0)) return TAGC_OK;
    if (q->parameters < 0 || !is_one_type(unit)) {
        out->parameters_s += n_times * gather_by_torch(q, unit);
        out->host_bytes += n_times * around * gathered_bytes(unit, q->narrows);
        return TAGC_OK;
    }
    /* Deltas of values that have not changed send nothing. */
    int is_delta = q->parameters >= TAGC_GATHER_DELTA8, n_sent = is_delta ? trained(unit) > 0 : n_times;
    TAGC_TRY(tagc_plan_gathered_bytes(q->parameters, n, q->world_size / per_host, per_host, &n_bytes));
    double sent_s = LATENCIES * t->latency_s + n_bytes / t->bytes_per_s + q->gather_s * n / per_host;
    double unsent_s = t->latency_s + q->again_s * n / per_host;
    out->host_bytes += n_sent * per_host * n_bytes;
    out->parameters_s += n_sent * sent_s + (n_times - n_sent) * unsent_s +
                         n_times * (within_s(q, &t->share_within, n) +
                                    copies_s(q, unit->bf16 > 0, n / q->world_size, n / per_host));
    return TAGC_OK;
}

/* ---- the step ---- */

static tagc_status check(const tagc_units_question *q) {
    if (q->struct_bytes != sizeof *q)
        return tagc_fail(TAGC_ERR_ARGUMENT, "struct_bytes is %zu, must be %zu", q->struct_bytes, sizeof *q);
    if (q->world_size < 1 || q->ranks_per_host < 1 || q->world_size % q->ranks_per_host != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "ranks_per_host is %d, which does not divide the world size of %d",
                         q->ranks_per_host, q->world_size);
    if (q->n_passes < 1)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_passes is %d, allowed: 1 or more", q->n_passes);
    if (q->reduce != TAGC_FORMAT_FP32 && q->reduce != TAGC_FORMAT_BF16)
        return tagc_fail(TAGC_ERR_ARGUMENT, "reduce is %d, allowed: 0 (fp32) and 1 (bf16)", q->reduce);
    if (q->parameters < -1 || q->parameters >= TAGC_N_GATHER_KINDS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "parameters is %d, allowed: -1 to %d", q->parameters,
                         TAGC_N_GATHER_KINDS - 1);
    if ((q->gradients || q->parameters >= 0) && !(q->times.bytes_per_s > 0))
        return tagc_fail(TAGC_ERR_ARGUMENT, "bytes_per_s is %g, allowed: above 0", q->times.bytes_per_s);
    return TAGC_OK;
}

static tagc_status add_up(const tagc_units_question *q, const tagc_units_unit *units, size_t n,
                          tagc_units_reply *out) {
    for (size_t i = 0; i < n; i++) {
        const tagc_units_unit *unit = &units[i];
        int n_gathers = unit->n_gathers < 2 ? unit->n_gathers : 2;
        TAGC_TRY(add_gradients(q, unit, out));
        TAGC_TRY(add_gathers(q, unit, out));
        if (n_gathers > 0)
            out->own_s += q->n_passes * seconds_of(&q->times.own[n_gathers - 1], gathered(unit));
    }
    out->exposed_s = out->gradients_s + out->parameters_s;
    if (!(q->compute_s > 0)) return TAGC_OK;
    if (q->is_ddp) out->exposed_s = fmax(0, out->exposed_s - backward_share * q->compute_s / q->n_passes);
    out->step_s = q->compute_s + out->exposed_s + out->own_s;
    return TAGC_OK;
}

static tagc_status answer(const tagc_units_question *q, tagc_units_reply *out) {
    TAGC_TRY(check(q));
    out->n_units = q->n_units;
    if (!(q->joined > 0)) return add_up(q, q->units, q->n_units, out);
    tagc_units_unit *units = calloc(q->n_units + 1, sizeof *units);
    if (!units) return tagc_fail(TAGC_ERR_MEMORY, "no memory to join %zu units", q->n_units);
    out->n_units = join_units(q, units);
    tagc_status status = add_up(q, units, out->n_units, out);
    free(units);
    return status;
}

tagc_status tagc_plan_units(const tagc_units_question *question, tagc_units_reply *reply) {
    if (!question || !reply || reply->struct_bytes != sizeof *reply)
        return tagc_fail(TAGC_ERR_ARGUMENT, "no question, or a reply of another version");
    *reply = (tagc_units_reply){.struct_bytes = sizeof *reply};
    tagc_status status = answer(question, reply);
    if (status != TAGC_OK) snprintf(reply->why, sizeof reply->why, "%s", tagc_last_error());
    return status;
}

/* ---- local steps ---- */

double tagc_plan_local_s(double compute_s, double exchange_s, int every, int fragments, int delay) {
    return compute_s + (double)fragments / every * fmax(0, exchange_s - delay * compute_s);
}

int tagc_plan_every(double compute_s, double exchange_s, int fragments, int delay) {
    static const int offered[] = {5, 10, 20, 30, 50, 100, 200, 300, 500};
    int every = fragments > delay + 1 ? fragments : delay + 1, n = sizeof offered / sizeof *offered;
    for (int i = 0; i < n; i++) {
        if (offered[i] < every && i < n - 1) continue;
        int is_last = i == n - 1, tried = offered[i] < every ? every : offered[i];
        double step_s = tagc_plan_local_s(compute_s, exchange_s, tried, fragments, delay);
        if (is_last || tagc_verdict_of(compute_s, step_s, 0) != TAGC_VERDICT_COSTS) return tried;
    }
    return every;
}
