/* Tables, result and recommendation of the measured arms. */
#include "bench/measured.h"

#include "core/status.h"
#include "launch/human.h"
#include "options/saved_options.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

int tagc_measured_name_width(const tagc_measured_arms *b) {
    size_t width = 16;
    for (int i = 0; i < b->n; i++)
        if (strlen(b->arms[i].arm->name) > width) width = strlen(b->arms[i].arm->name);
    return (int)width;
}

void tagc_measured_summarize(tagc_measured_arms *b) {
    int n = b->n_rounds * b->n_steps;
    for (int i = 0; i < b->n; i++) {
        tagc_measured_arm *a = &b->arms[i];
        for (int figure = 0; figure < TAGC_BENCH_N_FIGURES; figure++)
            ((double *)&a->median)[figure] =
                tagc_result_spread_every((const double *)a->iterations + figure, TAGC_BENCH_N_FIGURES, n)
                    .median;
        a->total = tagc_result_spread_every(&a->iterations->total_s, TAGC_BENCH_N_FIGURES, n);
        a->exposed = tagc_result_spread_every(&a->iterations->exposed_s, TAGC_BENCH_N_FIGURES, n);
        for (int k = 0; k < b->n_rounds; k++) a->speedups[k] = b->arms[0].round_s[k] / a->round_s[k];
        a->speedup = tagc_result_spread_of(a->speedups, b->n_rounds);
    }
    tagc_measured_arm *again = &b->arms[b->n];
    for (int k = 0; k < b->n_rounds; k++) again->speedups[k] = again->round_s[k] / b->arms[0].round_s[k];
    b->again = tagc_result_spread_of(again->speedups, b->n_rounds);
}

/* Per parameter of the whole model, before the factor (W-1)/W. */
static double bits(const tagc_measured_arms *b, const tagc_measured_arm *a, int leg) {
    int world_size = b->bench->rank->world_size;
    return 8 * a->n_bytes[leg] / a->n_steps / (double)a->n_params * world_size / (world_size - 1);
}

/* Time of the arm's bytes at the link's full rate; 0: the rate is not known. */
static double link_s(const tagc_measured_arms *b, const tagc_measured_arm *a) {
    double n_bytes = 0;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) n_bytes += a->n_bytes[leg] / a->n_steps;
    return b->bench->all_to_all_bytes_per_s > 0 ? n_bytes / b->bench->all_to_all_bytes_per_s : 0;
}

/* 1: hosts have several ranks each, so that what passes a card is not what a rank sends. */
static int has_cards(const tagc_measured_arms *b) {
    int n_hosts = b->bench->hosts.n_hosts;
    return n_hosts > 1 && n_hosts < b->bench->rank->world_size;
}

/* What an arm sends in a step: of hosts with several ranks what passes a card. */
static double n_bytes_sent(const tagc_measured_arms *b, const tagc_measured_arm *a) {
    double n_bytes = 0;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) n_bytes += a->n_bytes[leg];
    return (has_cards(b) ? a->card_bytes : n_bytes) / a->n_steps;
}

static uint64_t memory_bytes(const tagc_measured_arm *a) {
    return a->memory.parameters + a->memory.gradients + a->memory.optimizer + a->memory.residuals;
}

static void say_table(const tagc_measured_arms *b) {
    tagc_bench_say(b->bench, "\n  %-*s %10s %21s %18s %9s %9s %9s %21s %9s\n", tagc_measured_name_width(b),
                   "", "iteration", "(least to most)", "speed-up", "compute", "exposed", "codec",
                   "bits/param: gradients", "memory");
    for (int i = 0; i < b->n; i++) {
        const tagc_measured_arm *a = &b->arms[i];
        char time[24], least[24], most[24], range[56], speedup[40], memory[16];
        double gathered = bits(b, a, TAGC_LEG_GATHER), all = 0;
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) all += bits(b, a, leg);
        snprintf(range, sizeof range, "(%s to %s)", tagc_human_time(a->total.min, least),
                 tagc_human_time(a->total.max, most));
        snprintf(speedup, sizeof speedup, "%.2f (%.2f - %.2f)", a->speedup.median, a->speedup.min,
                 a->speedup.max);
        tagc_bench_say(b->bench, "  %-*s %10s %21s %18s %7.0f %% %7.0f %% %7.0f %% %8.2f of %8.2f %9s\n",
                       tagc_measured_name_width(b), a->arm->name, tagc_human_time(a->total.median, time),
                       range, speedup, 100 * a->median.compute_s / a->total.median,
                       100 * a->exposed.median / a->total.median, 100 * a->median.codec_s / a->total.median,
                       all - gathered, all, tagc_human_bytes((double)memory_bytes(a), memory));
    }
}

static void say_cards(const tagc_measured_arms *b) {
    if (!has_cards(b)) return;
    tagc_bench_say(b->bench,
                   "\n  %-*s %20s %15s   sent to other hosts in an iteration, counted, mean over hosts\n",
                   tagc_measured_name_width(b), "", "through a host's card", "of a rank");
    for (int i = 0; i < b->n; i++) {
        const tagc_measured_arm *a = &b->arms[i];
        double n_bytes = a->card_bytes / a->n_steps;
        char card[16], rank[16];
        tagc_bench_say(
            b->bench, "  %-*s %21s %15s\n", tagc_measured_name_width(b), a->arm->name,
            tagc_human_bytes(n_bytes, card),
            tagc_human_bytes(n_bytes * b->bench->hosts.n_hosts / b->bench->rank->world_size, rank));
    }
}

/* Compares arms with the time of their bytes over the link, and phases of the codec with the time of memory: both are lower
 * bounds. */
static void say_floors(const tagc_measured_arms *b) {
    const tagc_bench *bench = b->bench;
    if (bench->all_to_all_bytes_per_s <= 0 && bench->floor_s_per_elem <= 0) return;
    tagc_bench_say(bench, "\n  %-*s %10s %11s %13s   phases, times of the memory floor of all parameters\n",
                   tagc_measured_name_width(b), "", "link floor", "of the time", "comm to floor");
    for (int i = 0; i < b->n; i++) {
        const tagc_measured_arm *a = &b->arms[i];
        double floor_s = bench->all_to_all_bytes_per_s > 0 ? link_s(b, a) : (double)NAN;
        char time[24] = "-";
        if (bench->all_to_all_bytes_per_s > 0) tagc_human_time(floor_s, time);
        tagc_bench_say(bench, "  %-*s %10s %9.0f %% %13.2f  ", tagc_measured_name_width(b), a->arm->name,
                       time, 100 * floor_s / a->total.median, a->median.comm_s / floor_s);
        for (int phase = 0; bench->floor_s_per_elem > 0 && phase < TAGC_PHASE_WAIT; phase++)
            tagc_bench_say(bench, " %s %.2f", tagc_phase_name(phase),
                           a->median.phase_s[phase] / (bench->floor_s_per_elem * (double)a->n_params));
        tagc_bench_say(bench, "\n");
    }
}

static json_t *iteration_json(const tagc_measured_arms *b, const tagc_measured_arm *a, int i) {
    const tagc_bench_iteration *iteration = &a->iterations[i];
    return json_pack(
        "{s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "round", i / b->n_steps, "total_s",
        tagc_json_real(iteration->total_s), "compute_s", tagc_json_real(iteration->compute_s),
        "wait_gather_s", tagc_json_real(iteration->wait_gather_s), "wait_reduce_s",
        tagc_json_real(iteration->wait_reduce_s), "optimizer_s", tagc_json_real(iteration->optimizer_s),
        "comm_s", tagc_json_real(iteration->comm_s), "codec_s", tagc_json_real(iteration->codec_s),
        "exchange_s", tagc_json_real(iteration->exchange_s), "gradient_s",
        tagc_json_real(iteration->gradient_s), "phase_s", tagc_json_phases(iteration->phase_s));
}

static json_t *arm_json(const tagc_measured_arms *b, const tagc_measured_arm *a) {
    uint64_t n_bytes[TAGC_N_LEGS];
    double n_bits[TAGC_N_LEGS];
    json_t *iterations = json_array();
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        n_bytes[leg] = (uint64_t)(a->n_bytes[leg] / a->n_steps + 0.5);
        n_bits[leg] = bits(b, a, leg);
    }
    for (int i = 0; i < b->n_rounds * b->n_steps; i++)
        json_array_append_new(iterations, iteration_json(b, a, i));
    json_t *memory = json_pack("{s:I, s:I, s:I, s:I}", "parameters", (json_int_t)a->memory.parameters,
                               "gradients", (json_int_t)a->memory.gradients, "optimizer",
                               (json_int_t)a->memory.optimizer, "residuals", (json_int_t)a->memory.residuals);
    return json_pack("{s:s, s:o, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "name",
                     a->arm->name, "options", tagc_saved_options(&tagc_train_command, &a->arm->options),
                     "n_params", (json_int_t)a->n_params, "n_compressed", (json_int_t)a->n_compressed,
                     "n_mild", (json_int_t)a->n_mild, "n_union", (json_int_t)(a->n_union / a->n_steps + 0.5),
                     "n_sent", (json_int_t)(a->n_sent / a->n_steps + 0.5), "n_bytes_sent",
                     tagc_json_leg_bytes(n_bytes), "bits_per_param", tagc_json_leg_reals(n_bits),
                     "iterations", iterations, "total_s", tagc_json_spread(&a->total), "exposed_s",
                     tagc_json_spread(&a->exposed), "speedup", tagc_json_spread(&a->speedup), "memory_bytes",
                     memory, "card_bytes",
                     has_cards(b) ? tagc_json_real(a->card_bytes / a->n_steps) : json_null());
}

/* Whether the arm compresses any leg; bf16 does not count. */
static int compresses(const tagc_measured_arm *a) {
    const tagc_train_options *o = &a->arm->options;
    return (a->n_compressed > 0 && o->exchange != TAGC_TRAIN_DENSE) || a->n_mild > 0 ||
           o->gather > TAGC_GATHER_BF16;
}

static tagc_status recommend(const tagc_measured_arms *b) {
    tagc_bench_candidate *candidates = calloc((size_t)b->n, sizeof *candidates);
    tagc_bench_advice advice;
    if (!candidates) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %d arms", b->n);
    int n = 0;
    for (int i = 0; i < b->n; i++) {
        const tagc_measured_arm *a = &b->arms[i];
        candidates[n++] = (tagc_bench_candidate){.name = a->arm->name,
                                                 .sharding = a->arm->options.sharding,
                                                 .is_compressed = compresses(a),
                                                 .round_s = a->round_s,
                                                 .total_s = a->total.median,
                                                 .exposed_s = a->exposed.median,
                                                 .compute_s = a->median.compute_s + a->median.optimizer_s,
                                                 .link_s = link_s(b, a),
                                                 .codec_s = a->median.codec_s,
                                                 .comm_s = a->median.comm_s,
                                                 .n_bytes = n_bytes_sent(b, a)};
    }
    tagc_bench_advise(candidates, n, b->n_rounds, b->again, &advice);
    const char *name = advice.arm < 0 ? "none" : candidates[advice.arm].name;
    tagc_bench_say(b->bench, "\nRecommendation: %s\n", advice.reason);
    tagc_bench_put(b->bench, "recommendation",
                   json_pack("{s:s, s:s, s:s, s:o, s:o}", "arm", name, "verdict",
                             tagc_verdict_name((int)advice.verdict), "reason", advice.reason, "speedup",
                             tagc_json_real(advice.speedup), "again", tagc_json_spread(&b->again)));
    free(candidates);
    return TAGC_OK;
}

tagc_status tagc_measured_report(const tagc_measured_arms *b) {
    say_table(b);
    say_cards(b);
    say_floors(b);
    json_t *list = json_array();
    for (int i = 0; i < b->n; i++) json_array_append_new(list, arm_json(b, &b->arms[i]));
    tagc_bench_put(b->bench, "arms", list);
    return recommend(b);
}
