/* tagc bench --only arms: iterations of the real engine under each arm, their tables, and what is recommended (advice.c). Arms take
 * turns, because a machine's speed changes within minutes. Every other round runs them in reverse, so that a slow change favours
 * none. The first arm takes a second turn, after the last one: what differs between its two turns is chance. Two engines of a
 * large model rarely fit into memory, so each turn makes its own. */
#include "bench/bench.h"

#include "core/clock.h"
#include "core/measure.h"
#include "core/status.h"
#include "launch/busy.h"
#include "launch/human.h"
#include "launch/over_ranks.h"
#include "options/saved_options.h"
#include "plan/plan.h"
#include "train/engine.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One step, mean over ranks. All members are doubles, so that one loop averages them. */
typedef struct iteration {
    double total_s, compute_s, wait_gather_s, wait_reduce_s, optimizer_s, comm_s, codec_s, exchange_s,
        gradient_s;
    double exposed_s; /* both waits */
    double phase_s[TAGC_N_PHASES];
} iteration;
enum { N_FIGURES = sizeof(iteration) / sizeof(double) };

typedef struct measured_arm {
    const tagc_arm *arm;
    iteration *iterations;      /* (rounds, steps) */
    double *round_s, *speedups; /* (rounds) medians, and those of the first arm over them */
    uint64_t n_params, n_compressed, n_mild;
    double n_sent, n_union, n_bytes[TAGC_N_LEGS]; /* of rank 0, summed over n_steps */
    double card_bytes; /* to other hosts: by the ranks of a host, mean over hosts, summed over n_steps */
    int n_steps;
    tagc_fsdp_memory memory;
    tagc_result_spread total, exposed, speedup;
    iteration median; /* member by member */
} measured_arm;

typedef struct measured_arms {
    tagc_bench *bench;
    int n, n_rounds, n_steps;
    measured_arm *arms; /* (n + 1): the last is the first again, for by how much an arm differs from itself */
    tagc_result_spread again; /* that one over the first, round by round */
    tagc_tokens *tokens;      /* NULL: synthetic */
} measured_arms;

/* ---- before the first turn: what would else end the arms after minutes of other work. Without swap a process would be killed ---- */

/* The memory of a rank, and whether --compress-names matches a tensor. */
static tagc_status check_arm(const tagc_bench *bench, const tagc_arm *arm) {
    const tagc_bench_plan *plan = bench->plan;
    tagc_setup setup = {.model = plan->model,
                        .world_size = bench->rank->world_size,
                        .n_hosts = 1,
                        .n_batch = (int)plan->options.train.batch_size,
                        .n_tokens = plan->n_tokens,
                        .union_density = -1};
    tagc_plan_volume volume;
    char what[TAGC_ARM_NAME_BYTES + 8];
    tagc_train_fsdp(&arm->options, &setup.engine);
    tagc_status status = tagc_plan_count(&setup, &volume, NULL);
    if (status != TAGC_OK) return tagc_fail_in(status, "arm %s", arm->name);
    if (arm->options.compress_names && volume.n_compressed == 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "arm %s: --compress-names is \"%.100s\", which matches no tensor",
                         arm->name, arm->options.compress_names);
    snprintf(what, sizeof what, "arm %s", arm->name);
    return tagc_plan_check_memory(what, &setup, bench->hosts.n_here);
}

static tagc_status open_tokens(const tagc_bench_plan *plan, tagc_tokens **out) {
    tagc_tokens_info info;
    *out = NULL;
    if (!plan->options.train.data) return TAGC_OK;
    TAGC_TRY(tagc_data_open(plan->options.train.data, TAGC_DATA_TRAIN, out));
    tagc_tokens_get_info(*out, &info);
    if (info.vocab_size <= (uint32_t)plan->model.vocab_size) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT,
                     "%s has tokens up to %u, the model knows %d: raise --vocab-size to %u",
                     tagc_tokens_path(*out), info.vocab_size - 1, plan->model.vocab_size, info.vocab_size);
}

tagc_status tagc_bench_arms_check(const tagc_bench *bench) {
    tagc_tokens *tokens;
    for (int i = 0; i < bench->plan->n_arms; i++) TAGC_TRY(check_arm(bench, &bench->plan->arms[i]));
    tagc_status status = open_tokens(bench->plan, &tokens);
    tagc_tokens_close(tokens);
    return status;
}

static tagc_status open_arms(measured_arms *b) {
    const tagc_bench_plan *plan = b->bench->plan;
    b->n = plan->n_arms;
    b->n_rounds = (int)plan->options.rounds;
    b->n_steps = (int)plan->options.steps_per_round;
    b->arms = calloc((size_t)b->n + 1, sizeof *b->arms);
    if (!b->arms) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %d arms", b->n);
    for (int i = 0; i <= b->n; i++) {
        measured_arm *a = &b->arms[i];
        size_t n_rounds = (size_t)b->n_rounds;
        a->arm = &plan->arms[i % b->n];
        a->iterations = calloc(n_rounds * (size_t)b->n_steps, sizeof *a->iterations);
        a->round_s = calloc(n_rounds, sizeof *a->round_s);
        a->speedups = calloc(n_rounds, sizeof *a->speedups);
        if (!a->iterations || !a->round_s || !a->speedups)
            return tagc_fail(TAGC_ERR_MEMORY, "out of memory for the figures of %d rounds", b->n_rounds);
    }
    return open_tokens(plan, &b->tokens);
}

static void close_arms(measured_arms *b) {
    for (int i = 0; b->arms && i <= b->n; i++) {
        free(b->arms[i].iterations);
        free(b->arms[i].round_s);
        free(b->arms[i].speedups);
    }
    free(b->arms);
    tagc_tokens_close(b->tokens);
}

static int name_width(const measured_arms *b) {
    size_t width = 16;
    for (int i = 0; i < b->n; i++)
        if (strlen(b->arms[i].arm->name) > width) width = strlen(b->arms[i].arm->name);
    return (int)width;
}

/* ---- a turn ---- */

typedef struct turn {
    measured_arms *b;
    measured_arm *arm;
    tagc_loader *loader; /* NULL: synthetic tokens */
    uint64_t random;
    tagc_training training;
    uint64_t step;
    double end_s, wall_s; /* the end of the last step, and its time since the end of the step before */
} turn;

/* Token k has the frequency 1 / (k + 1), as words of a language sorted by frequency do. */
static int draw_token(uint64_t *state, int vocab_size) {
    double uniform = (double)(tagc_next_random(state) >> 11) * 0x1p-53;
    int token = (int)exp(uniform * log((double)vocab_size + 1)) - 1;
    return token < 0 ? 0 : token >= vocab_size ? vocab_size - 1 : token;
}

static tagc_status next_batch(void *context, int *tokens, int *targets) {
    turn *t = context;
    const tagc_bench_plan *plan = t->b->bench->plan;
    if (t->loader) return tagc_loader_next(t->loader, tokens, targets);
    for (int64_t sequence = 0; sequence < plan->options.train.batch_size; sequence++) {
        int *input = tokens + sequence * plan->n_tokens, *target = targets + sequence * plan->n_tokens;
        for (int i = 0; i < plan->n_tokens; i++) {
            input[i] = i ? target[i - 1] : draw_token(&t->random, plan->model.vocab_size);
            target[i] = draw_token(&t->random, plan->model.vocab_size);
        }
    }
    return TAGC_OK;
}

/* Each turn starts from the same weights and data, so that step n is the same in all rounds. */
static tagc_status open_turn(turn *t) {
    const tagc_bench *bench = t->b->bench;
    const tagc_bench_plan *plan = bench->plan;
    const tagc_train_options *train = &plan->options.train;
    tagc_fsdp_options options;
    t->random = (uint64_t)train->seed * 0x9e3779b97f4a7c15u + (uint64_t)bench->rank->rank;
    if (t->b->tokens)
        TAGC_TRY(tagc_engine_loader(bench->rank, &plan->model, t->b->tokens, (int)train->batch_size,
                                    plan->n_tokens, &train->seed, &t->loader));
    t->training = (tagc_training){.rank = bench->rank,
                                  .options = &t->arm->arm->options,
                                  .model = plan->model,
                                  .n_tokens = plan->n_tokens,
                                  .next_batch = next_batch,
                                  .context = t};
    tagc_train_fsdp(t->training.options, &options);
    TAGC_TRY(tagc_training_open(&t->training, &options));
    TAGC_TRY(tagc_engine_init_random(t->training.fsdp, &plan->model, (uint64_t)train->seed));
    t->arm->n_params = tagc_fsdp_n_params(t->training.fsdp);
    t->arm->n_compressed = tagc_fsdp_n_compressed(t->training.fsdp);
    t->arm->n_mild = tagc_fsdp_n_mild(t->training.fsdp);
    tagc_fsdp_memory_used(t->training.fsdp, &t->arm->memory);
    return TAGC_OK;
}

static void close_turn(turn *t) {
    tagc_training_close(&t->training);
    tagc_loader_destroy(t->loader);
}

static tagc_status one_step(turn *t, tagc_fsdp_stats *stats, tagc_busy_times *busy) {
    tagc_learning_rate rate = tagc_train_learning_rate(t->training.options, 0);
    double loss, lr = tagc_learning_rate_at(&rate, ++t->step);
    TAGC_TRY(tagc_training_step(&t->training, lr, &loss, stats, busy));
    double end_s = tagc_clock_s();
    t->wall_s = t->end_s > 0 ? end_s - t->end_s : stats->total_s;
    t->end_s = end_s;
    if (stats->skipped)
        return tagc_fail(TAGC_ERR_CORRUPT, "step %llu has a gradient that is not finite",
                         (unsigned long long)t->step);
    return TAGC_OK;
}

static void keep_counts(measured_arm *a, const tagc_fsdp_stats *stats) {
    a->n_steps++;
    a->n_sent += (double)stats->n_sent;
    a->n_union += (double)stats->n_union;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) a->n_bytes[leg] += (double)stats->n_bytes_sent[leg];
}

/* Steps are timed from end to end, because gathers that one leaves under way slow the next. Time that the engine does not
 * count, such as making a batch, is computing. */
static void keep_times(const turn *t, const tagc_fsdp_stats *stats, const tagc_busy_times *busy,
                       iteration *out) {
    *out = (iteration){.total_s = t->wall_s,
                       .compute_s = stats->compute_s + t->wall_s - stats->total_s,
                       .wait_gather_s = stats->wait_gather_s,
                       .wait_reduce_s = stats->wait_reduce_s,
                       .exposed_s = stats->wait_gather_s + stats->wait_reduce_s,
                       .optimizer_s = stats->optimizer_s,
                       .comm_s = busy->comm_s,
                       .codec_s = busy->codec_s,
                       .exchange_s = busy->exchange_s,
                       .gradient_s = busy->gradient_s};
    memcpy(out->phase_s, stats->phase_s, sizeof out->phase_s);
}

static tagc_status run_steps(turn *t, int round) {
    measured_arms *b = t->b;
    int64_t n_warmup = b->bench->plan->options.warmup_steps;
    iteration *kept = &t->arm->iterations[round * b->n_steps];
    tagc_fsdp_stats stats;
    tagc_busy_times busy;
    tagc_comm *comm = b->bench->rank->comm;
    double before, card;
    for (int64_t step = 0; step < n_warmup + b->n_steps; step++) {
        if (step == n_warmup) TAGC_TRY(tagc_hosts_sent(&b->bench->hosts, comm, &before));
        TAGC_TRY(one_step(t, &stats, &busy));
        if (step < n_warmup) continue;
        keep_times(t, &stats, &busy, &kept[step - n_warmup]);
        keep_counts(t->arm, &stats);
    }
    /* The sums of bytes are exact: nothing else was sent between the steps. */
    TAGC_TRY(tagc_hosts_sent(&b->bench->hosts, comm, &card));
    card -= before;
    TAGC_TRY(tagc_mean_over_ranks(comm, &card, 1));
    t->arm->card_bytes += card * b->bench->rank->world_size / b->bench->hosts.n_hosts;
    return tagc_mean_over_ranks(comm, (double *)kept, N_FIGURES * b->n_steps);
}

static tagc_status take_turn(measured_arms *b, measured_arm *a, int round) {
    turn t = {.b = b, .arm = a};
    double start_s = tagc_clock_s(), made_s = 0;
    char per_iteration[24], made[24];
    tagc_status status = open_turn(&t);
    if (status == TAGC_OK) {
        made_s = tagc_clock_s() - start_s;
        status = run_steps(&t, round);
    }
    if (status != TAGC_OK) status = tagc_fail_in(status, "arm %s", a->arm->name);
    tagc_rank_finish(b->bench->rank, status);
    close_turn(&t);
    TAGC_TRY(status);
    a->round_s[round] =
        tagc_result_spread_every(&a->iterations[round * b->n_steps].total_s, N_FIGURES, b->n_steps).median;
    tagc_bench_say(b->bench, "  round %d of %d  %-*s %10s an iteration   (engine made in %s)\n", round + 1,
                   b->n_rounds, name_width(b), a == &b->arms[b->n] ? "the first again" : a->arm->name,
                   tagc_human_time(a->round_s[round], per_iteration), tagc_human_time(made_s, made));
    return TAGC_OK;
}

/* ---- figures of all turns ---- */

static void summarize(measured_arms *b) {
    int n = b->n_rounds * b->n_steps;
    for (int i = 0; i < b->n; i++) {
        measured_arm *a = &b->arms[i];
        for (int figure = 0; figure < N_FIGURES; figure++)
            ((double *)&a->median)[figure] =
                tagc_result_spread_every((const double *)a->iterations + figure, N_FIGURES, n).median;
        a->total = tagc_result_spread_every(&a->iterations->total_s, N_FIGURES, n);
        a->exposed = tagc_result_spread_every(&a->iterations->exposed_s, N_FIGURES, n);
        for (int k = 0; k < b->n_rounds; k++) a->speedups[k] = b->arms[0].round_s[k] / a->round_s[k];
        a->speedup = tagc_result_spread_of(a->speedups, b->n_rounds);
    }
    measured_arm *again = &b->arms[b->n];
    for (int k = 0; k < b->n_rounds; k++) again->speedups[k] = again->round_s[k] / b->arms[0].round_s[k];
    b->again = tagc_result_spread_of(again->speedups, b->n_rounds);
}

/* Per parameter of the whole model, before the factor (W-1)/W. */
static double bits(const measured_arms *b, const measured_arm *a, int leg) {
    int world_size = b->bench->rank->world_size;
    return 8 * a->n_bytes[leg] / a->n_steps / (double)a->n_params * world_size / (world_size - 1);
}

/* Time of the arm's bytes at the link's full rate; 0: the rate is not known. */
static double link_s(const measured_arms *b, const measured_arm *a) {
    double n_bytes = 0;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) n_bytes += a->n_bytes[leg] / a->n_steps;
    return b->bench->all_to_all_bytes_per_s > 0 ? n_bytes / b->bench->all_to_all_bytes_per_s : 0;
}

/* 1: hosts have several ranks each, so that what passes a card is not what a rank sends. */
static int has_cards(const measured_arms *b) {
    int n_hosts = b->bench->hosts.n_hosts;
    return n_hosts > 1 && n_hosts < b->bench->rank->world_size;
}

/* What an arm sends in a step: of hosts with several ranks what passes a card. */
static double n_bytes_sent(const measured_arms *b, const measured_arm *a) {
    double n_bytes = 0;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) n_bytes += a->n_bytes[leg];
    return (has_cards(b) ? a->card_bytes : n_bytes) / a->n_steps;
}

static uint64_t memory_bytes(const measured_arm *a) {
    return a->memory.parameters + a->memory.gradients + a->memory.optimizer + a->memory.residuals;
}

static void say_table(const measured_arms *b) {
    tagc_bench_say(b->bench, "\n  %-*s %10s %21s %18s %9s %9s %9s %21s %9s\n", name_width(b), "", "iteration",
                   "(least to most)", "speed-up", "compute", "exposed", "codec", "bits/param: gradients",
                   "memory");
    for (int i = 0; i < b->n; i++) {
        const measured_arm *a = &b->arms[i];
        char time[24], least[24], most[24], range[56], speedup[40], memory[16];
        double gathered = bits(b, a, TAGC_LEG_GATHER), all = 0;
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) all += bits(b, a, leg);
        snprintf(range, sizeof range, "(%s to %s)", tagc_human_time(a->total.min, least),
                 tagc_human_time(a->total.max, most));
        snprintf(speedup, sizeof speedup, "%.2f (%.2f - %.2f)", a->speedup.median, a->speedup.min,
                 a->speedup.max);
        tagc_bench_say(b->bench, "  %-*s %10s %21s %18s %7.0f %% %7.0f %% %7.0f %% %8.2f of %8.2f %9s\n",
                       name_width(b), a->arm->name, tagc_human_time(a->total.median, time), range, speedup,
                       100 * a->median.compute_s / a->total.median, 100 * a->exposed.median / a->total.median,
                       100 * a->median.codec_s / a->total.median, all - gathered, all,
                       tagc_human_bytes((double)memory_bytes(a), memory));
    }
}

static void say_cards(const measured_arms *b) {
    if (!has_cards(b)) return;
    tagc_bench_say(b->bench,
                   "\n  %-*s %20s %15s   sent to other hosts in an iteration, counted, mean over hosts\n",
                   name_width(b), "", "through a host's card", "of a rank");
    for (int i = 0; i < b->n; i++) {
        const measured_arm *a = &b->arms[i];
        double n_bytes = a->card_bytes / a->n_steps;
        char card[16], rank[16];
        tagc_bench_say(
            b->bench, "  %-*s %21s %15s\n", name_width(b), a->arm->name, tagc_human_bytes(n_bytes, card),
            tagc_human_bytes(n_bytes * b->bench->hosts.n_hosts / b->bench->rank->world_size, rank));
    }
}

/* Compares arms with the time of their bytes over the link, and phases of the codec with the time of memory: both are lower
 * bounds. */
static void say_floors(const measured_arms *b) {
    const tagc_bench *bench = b->bench;
    if (bench->all_to_all_bytes_per_s <= 0 && bench->floor_s_per_elem <= 0) return;
    tagc_bench_say(bench, "\n  %-*s %10s %11s %13s   phases, times of the memory floor of all parameters\n",
                   name_width(b), "", "link floor", "of the time", "comm to floor");
    for (int i = 0; i < b->n; i++) {
        const measured_arm *a = &b->arms[i];
        double floor_s = bench->all_to_all_bytes_per_s > 0 ? link_s(b, a) : (double)NAN;
        char time[24] = "-";
        if (bench->all_to_all_bytes_per_s > 0) tagc_human_time(floor_s, time);
        tagc_bench_say(bench, "  %-*s %10s %9.0f %% %13.2f  ", name_width(b), a->arm->name, time,
                       100 * floor_s / a->total.median, a->median.comm_s / floor_s);
        for (int phase = 0; bench->floor_s_per_elem > 0 && phase < TAGC_PHASE_WAIT; phase++)
            tagc_bench_say(bench, " %s %.2f", tagc_phase_name(phase),
                           a->median.phase_s[phase] / (bench->floor_s_per_elem * (double)a->n_params));
        tagc_bench_say(bench, "\n");
    }
}

static json_t *iteration_json(const measured_arms *b, const measured_arm *a, int i) {
    const iteration *figures = &a->iterations[i];
    return json_pack(
        "{s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "round", i / b->n_steps, "total_s",
        tagc_json_real(figures->total_s), "compute_s", tagc_json_real(figures->compute_s), "wait_gather_s",
        tagc_json_real(figures->wait_gather_s), "wait_reduce_s", tagc_json_real(figures->wait_reduce_s),
        "optimizer_s", tagc_json_real(figures->optimizer_s), "comm_s", tagc_json_real(figures->comm_s),
        "codec_s", tagc_json_real(figures->codec_s), "exchange_s", tagc_json_real(figures->exchange_s),
        "gradient_s", tagc_json_real(figures->gradient_s), "phase_s", tagc_json_phases(figures->phase_s));
}

static json_t *arm_json(const measured_arms *b, const measured_arm *a) {
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
static int compresses(const measured_arm *a) {
    const tagc_train_options *o = &a->arm->options;
    return (a->n_compressed > 0 && o->exchange != TAGC_TRAIN_DENSE) || a->n_mild > 0 ||
           o->gather > TAGC_GATHER_BF16;
}

static tagc_status recommend(const measured_arms *b) {
    tagc_bench_candidate *candidates = calloc((size_t)b->n, sizeof *candidates);
    tagc_bench_advice advice;
    if (!candidates) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %d arms", b->n);
    int n = 0;
    for (int i = 0; i < b->n; i++) {
        const measured_arm *a = &b->arms[i];
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

static tagc_status report(const measured_arms *b) {
    say_table(b);
    say_cards(b);
    say_floors(b);
    json_t *list = json_array();
    for (int i = 0; i < b->n; i++) json_array_append_new(list, arm_json(b, &b->arms[i]));
    tagc_bench_put(b->bench, "arms", list);
    return recommend(b);
}

/* ---- the part ---- */

static tagc_status measure_arms(measured_arms *b) {
    TAGC_TRY(open_arms(b));
    tagc_bench_say(b->bench, "\nTraining, %s\n",
                   b->tokens ? b->bench->plan->options.train.data : "synthetic tokens");
    tagc_status status = TAGC_OK;
    for (int round = 0; status == TAGC_OK && round < b->n_rounds; round++)
        for (int i = 0; status == TAGC_OK && i <= b->n; i++)
            status = take_turn(b, &b->arms[round % 2 ? b->n - i : i], round);
    TAGC_TRY(status);
    summarize(b);
    return report(b);
}

tagc_status tagc_bench_arms(tagc_bench *bench) {
    measured_arms b = {.bench = bench};
    tagc_status status = measure_arms(&b);
    tagc_rank_finish(bench->rank, status);
    close_arms(&b);
    return status;
}
