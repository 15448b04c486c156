/* Iterations of the real engine under each arm. Arms take turns, because a machine's speed changes within minutes. Every
 * other round runs them in reverse, so that a slow change favours none. The first arm takes a second turn, after the last
 * one: what differs between its two turns is chance. Two engines of a large model rarely fit into memory, so each turn
 * makes its own. */
#include "bench/measured.h"

#include "core/clock.h"
#include "core/measure.h"
#include "core/status.h"
#include "launch/busy.h"
#include "launch/human.h"
#include "launch/over_ranks.h"
#include "train/engine.h"
#include "train/progress.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static tagc_status open_arms(tagc_measured_arms *b) {
    const tagc_bench_plan *plan = b->bench->plan;
    b->n = plan->n_arms;
    b->n_rounds = (int)plan->options.rounds;
    b->n_steps = (int)plan->options.steps_per_round;
    b->arms = calloc((size_t)b->n + 1, sizeof *b->arms);
    if (!b->arms) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %d arms", b->n);
    for (int i = 0; i <= b->n; i++) {
        tagc_measured_arm *a = &b->arms[i];
        size_t n_rounds = (size_t)b->n_rounds;
        a->arm = &plan->arms[i % b->n];
        a->iterations = calloc(n_rounds * (size_t)b->n_steps, sizeof *a->iterations);
        a->round_s = calloc(n_rounds, sizeof *a->round_s);
        a->speedups = calloc(n_rounds, sizeof *a->speedups);
        if (!a->iterations || !a->round_s || !a->speedups)
            return tagc_fail(TAGC_ERR_MEMORY, "out of memory for the figures of %d rounds", b->n_rounds);
    }
    return tagc_bench_open_tokens(plan, &b->tokens);
}

static void close_arms(tagc_measured_arms *b) {
    for (int i = 0; b->arms && i <= b->n; i++) {
        free(b->arms[i].iterations);
        free(b->arms[i].round_s);
        free(b->arms[i].speedups);
    }
    free(b->arms);
    tagc_tokens_close(b->tokens);
}

/* ---- a turn ---- */

typedef struct turn {
    tagc_measured_arms *b;
    tagc_measured_arm *arm;
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

static void keep_counts(tagc_measured_arm *a, const tagc_fsdp_stats *stats) {
    a->n_steps++;
    a->n_sent += (double)stats->n_sent;
    a->n_union += (double)stats->n_union;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) a->n_bytes[leg] += (double)stats->n_bytes_sent[leg];
}

/* Steps are timed from end to end, because gathers that one leaves under way slow the next. Time that the engine does not
 * count, such as making a batch, is computing. */
static void keep_times(const turn *t, const tagc_fsdp_stats *stats, const tagc_busy_times *busy,
                       tagc_bench_iteration *out) {
    *out = (tagc_bench_iteration){.total_s = t->wall_s,
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
    tagc_measured_arms *b = t->b;
    int64_t n_warmup = b->bench->plan->options.warmup_steps;
    tagc_bench_iteration *kept = &t->arm->iterations[round * b->n_steps];
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
    return tagc_mean_over_ranks(comm, (double *)kept, TAGC_BENCH_N_FIGURES * b->n_steps);
}

static tagc_status take_turn(tagc_measured_arms *b, tagc_measured_arm *a, int round) {
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
        tagc_result_spread_every(&a->iterations[round * b->n_steps].total_s, TAGC_BENCH_N_FIGURES, b->n_steps)
            .median;
    tagc_bench_say(b->bench, "  round %d of %d  %-*s %10s an iteration   (engine made in %s)\n", round + 1,
                   b->n_rounds, tagc_measured_name_width(b),
                   a == &b->arms[b->n] ? "the first again" : a->arm->name,
                   tagc_human_time(a->round_s[round], per_iteration), tagc_human_time(made_s, made));
    return TAGC_OK;
}

static tagc_status measure_arms(tagc_measured_arms *b) {
    TAGC_TRY(open_arms(b));
    tagc_bench_say(b->bench, "\nTraining, %s\n",
                   b->tokens ? b->bench->plan->options.train.data : "synthetic tokens");
    tagc_status status = TAGC_OK;
    for (int round = 0; status == TAGC_OK && round < b->n_rounds; round++)
        for (int i = 0; status == TAGC_OK && i <= b->n; i++)
            status = take_turn(b, &b->arms[round % 2 ? b->n - i : i], round);
    TAGC_TRY(status);
    tagc_measured_summarize(b);
    return tagc_measured_report(b);
}

tagc_status tagc_bench_arms(tagc_bench *bench) {
    tagc_measured_arms b = {.bench = bench};
    tagc_status status = measure_arms(&b);
    tagc_rank_finish(bench->rank, status);
    close_arms(&b);
    return status;
}
