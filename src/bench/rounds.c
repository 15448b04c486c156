/* Iterations of the real engine under each arm. Arms take turns, since a machine is never the same for minutes, and
 * every other round goes backwards, so that a slow change favours none. Two engines of a large model rarely fit into
 * memory, so each turn makes its own. */
#include "bench/bench.h"

#include "auto/auto.h"
#include "auto/bucket.h"
#include "core/clock.h"
#include "core/measure.h"
#include "core/status.h"
#include "data/data.h"
#include "exchange/volume.h"
#include "files/paths.h"
#include "launch/busy.h"
#include "launch/human.h"
#include "launch/over_ranks.h"
#include "plan/plan.h"
#include "train/engine.h"
#include "train/progress.h"
#include "train/saved.h"
#include "train/step.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One step, mean over ranks. Only doubles, so that ranks can be averaged in one go. */
typedef struct iteration {
    double total_s, compute_s, wait_gather_s, wait_reduce_s, optimizer_s, comm_s, codec_s, exchange_s,
        gradient_s;
    double phase_s[TAGC_N_PHASES];
} iteration;

typedef struct arm_bench {
    const tagc_arm *arm;
    iteration *iterations; /* (rounds, steps) */
    double *round_s;       /* (rounds) median of each */
    double *speedups;      /* (rounds) */
    int64_t bucket_elems;  /* the arm's, or what auto came to in the first turn; -1: not yet */
    uint64_t n_params, n_compressed, n_mild;
    double n_kept, n_union, n_bytes[TAGC_N_LEGS]; /* of rank 0, summed over n_steps */
    int n_steps;
    tagc_fsdp_memory memory;
    tagc_result_spread total, exposed, speedup;
    iteration median; /* member by member */
} arm_bench;

typedef struct arms_bench {
    tagc_bench *bench;
    int n, n_rounds, n_steps;
    arm_bench *arms;     /* (n) */
    tagc_tokens *tokens; /* NULL: synthetic */
    int *input, *target; /* (batch_size, n_tokens) */
} arms_bench;

/* ---- before the first turn ---- */

static uint64_t residual_of(const tagc_layout *layout, int flat) {
    tagc_exchange_memory memory = {0};
    (void)tagc_reducer_memory(&layout->flats[flat].reducer, layout->world_size, 0, &memory);
    return memory.residual;
}

/* Reducers of flats before this one with which its own shares spares. */
static int n_alike_before(const tagc_layout *layout, int flat) {
    uint64_t n_bytes = residual_of(layout, flat);
    int n = 0;
    for (int i = 0; i < flat; i++) n += residual_of(layout, i) == n_bytes;
    return n;
}

/* What the engine says of itself, and what its reducers and gatherers take beside residuals. */
static uint64_t engine_bytes(const tagc_layout *layout) {
    uint64_t sum = layout->memory.parameters + layout->memory.gradients + layout->memory.optimizer +
                   layout->memory.residuals;
    for (int i = 0; i < layout->n_flats; i++) {
        tagc_exchange_memory memory = {0};
        uint64_t n_bytes = 0;
        if (tagc_reducer_memory(&layout->flats[i].reducer, layout->world_size, n_alike_before(layout, i),
                                &memory) == TAGC_OK)
            sum += memory.buffers + memory.spare;
        if (layout->flats[i].has_gatherer &&
            tagc_gatherer_memory(&layout->flats[i].gatherer, layout->world_size, &n_bytes) == TAGC_OK)
            sum += n_bytes;
    }
    return sum;
}

/* Activations of the model, to a few per cent: what a block keeps, and the logits. */
static uint64_t activation_bytes(const tagc_bench *bench) {
    const tagc_gpt2_config *model = &bench->plan->model;
    uint64_t rows = (uint64_t)bench->plan->options.train.batch_size * (uint64_t)bench->plan->n_tokens;
    uint64_t per_row = (uint64_t)model->n_layer * 10 * (uint64_t)model->n_embd + 20 * (uint64_t)model->n_embd;
    uint64_t logits = rows * (uint64_t)model->vocab_size, most = (uint64_t)1 << 27;
    return (rows * per_row + (logits < most ? logits : most)) * sizeof(float);
}

/* What no turn should have to find out, and what a machine without swap would be killed for. */
static tagc_status check_engines(const tagc_bench *bench) {
    for (int i = 0; i < bench->plan->n_arms; i++) {
        const tagc_arm *arm = &bench->plan->arms[i];
        tagc_layout *layout = NULL;
        char what[TAGC_ARM_NAME_BYTES + 8];
        tagc_fsdp_options options;
        tagc_train_fsdp(&arm->options, &options);
        tagc_status status =
            tagc_model_layout(&bench->plan->model, &options, bench->rank->world_size, &layout);
        uint64_t n_bytes = layout ? engine_bytes(layout) + activation_bytes(bench) : 0;
        int misses = layout && arm->options.compress_names && layout->n_compressed == 0;
        tagc_layout_destroy(layout);
        if (status != TAGC_OK) return tagc_fail_in(status, "arm %s", arm->name);
        if (misses)
            return tagc_fail(TAGC_ERR_ARGUMENT,
                             "arm %s: --compress-names is \"%.100s\", which matches no tensor", arm->name,
                             arm->options.compress_names);
        snprintf(what, sizeof what, "arm %s", arm->name);
        TAGC_TRY(tagc_check_memory(what, n_bytes, bench->hosts.n_here));
    }
    return TAGC_OK;
}

static tagc_status open_tokens(const tagc_bench_plan *plan, tagc_tokens **out) {
    char path[TAGC_PATH_BYTES];
    tagc_tokens_info info;
    *out = NULL;
    if (!plan->options.train.data) return TAGC_OK;
    TAGC_TRY(tagc_path_data(plan->options.train.data, "train.bin", path));
    TAGC_TRY(tagc_tokens_open(path, TAGC_TOKENS_AUTO, out));
    tagc_tokens_get_info(*out, &info);
    if (info.vocab_size <= (uint32_t)plan->model.vocab_size) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT,
                     "%s has tokens up to %u, the model knows %d: raise --vocab-size to %u", path,
                     info.vocab_size - 1, plan->model.vocab_size, info.vocab_size);
}

tagc_status tagc_bench_arms_check(const tagc_bench *bench) {
    tagc_tokens *tokens;
    TAGC_TRY(check_engines(bench));
    tagc_status status = open_tokens(bench->plan, &tokens);
    tagc_tokens_close(tokens);
    return status;
}

static tagc_status open_arms(arms_bench *b) {
    const tagc_bench_plan *plan = b->bench->plan;
    b->n = plan->n_arms;
    b->n_rounds = (int)plan->options.rounds;
    b->n_steps = (int)plan->options.steps_per_round;
    b->arms = calloc((size_t)b->n, sizeof *b->arms);
    if (!b->arms) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %d arms", b->n);
    for (int i = 0; i < b->n; i++) {
        arm_bench *a = &b->arms[i];
        size_t n_rounds = (size_t)b->n_rounds;
        a->arm = &plan->arms[i];
        a->bucket_elems = a->arm->options.bucket_elems;
        a->iterations = calloc(n_rounds * (size_t)b->n_steps, sizeof *a->iterations);
        a->round_s = calloc(n_rounds, sizeof *a->round_s);
        a->speedups = calloc(n_rounds, sizeof *a->speedups);
        if (!a->iterations || !a->round_s || !a->speedups)
            return tagc_fail(TAGC_ERR_MEMORY, "out of memory for the figures of %d rounds", b->n_rounds);
    }
    size_t n_tokens = (size_t)plan->options.train.batch_size * (size_t)plan->n_tokens;
    b->input = calloc(n_tokens, sizeof *b->input);
    b->target = calloc(n_tokens, sizeof *b->target);
    if (!b->input || !b->target)
        return tagc_fail(TAGC_ERR_MEMORY, "out of memory for a batch of %zu tokens", n_tokens);
    return open_tokens(plan, &b->tokens);
}

static void close_arms(arms_bench *b) {
    for (int i = 0; b->arms && i < b->n; i++) {
        free(b->arms[i].iterations);
        free(b->arms[i].round_s);
        free(b->arms[i].speedups);
    }
    free(b->arms);
    tagc_tokens_close(b->tokens);
    free(b->input);
    free(b->target);
}

/* ---- a turn ---- */

typedef struct turn {
    arms_bench *b;
    arm_bench *arm;
    tagc_loader *loader; /* NULL: synthetic tokens */
    uint64_t random;
    tagc_gpt2 *model;
    tagc_fsdp *fsdp;
    tagc_auto *chooser; /* NULL: the arm's exchange is what it says */
    uint64_t step;
    double end_s, wall_s; /* when the last step ended, and how long it took from the end of the one before */
} turn;

enum { MOST_SETTLING_STEPS = 64 };

static void say_line(void *context, const char *line) {
    tagc_bench_say(context, "    %s\n", line);
}

static tagc_status open_chooser(turn *t, const tagc_fsdp_options *options) {
    const tagc_bench *bench = t->b->bench;
    if (t->arm->arm->options.exchange != TAGC_TRAIN_EXCHANGE_AUTO) return TAGC_OK;
    tagc_auto_setup setup = {.comm = bench->rank->comm,
                             .fsdp = t->fsdp,
                             .engine = *options,
                             .model = bench->plan->model,
                             .n_batch = (int)bench->plan->options.train.batch_size,
                             .n_tokens = bench->plan->n_tokens,
                             .say = say_line,
                             .context = t->b->bench};
    return tagc_auto_create(&setup, &t->chooser);
}

/* As often as its rank in a table of words by how common they are: 1 / (k + 1). */
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

static tagc_train_options options_of(const arm_bench *a) {
    tagc_train_options options = a->arm->options;
    options.bucket_elems = a->bucket_elems;
    return options;
}

/* Once: all turns of an arm run the same. */
static tagc_status choose_bucket(turn *t) {
    const tagc_bench *bench = t->b->bench;
    if (t->arm->bucket_elems >= 0) return TAGC_OK;
    tagc_bucket_setup setup = {.comm = bench->rank->comm,
                               .options = &t->arm->arm->options,
                               .model = bench->plan->model,
                               .n_tokens = bench->plan->n_tokens,
                               .say = say_line,
                               .context = t->b->bench};
    return tagc_bucket_choose(&setup, &t->arm->bucket_elems);
}

/* The same start and the same data at each turn: a step is the same step in all rounds. */
static tagc_status open_turn(turn *t) {
    const tagc_bench *bench = t->b->bench;
    const tagc_bench_plan *plan = bench->plan;
    const tagc_train_options *train = &plan->options.train;
    tagc_fsdp_options options;
    t->random = (uint64_t)train->seed * 0x9e3779b97f4a7c15u + (uint64_t)bench->rank->rank;
    if (t->b->tokens) {
        tagc_loader_options data;
        tagc_loader_options_init(&data);
        data.n_batch = (int)train->batch_size;
        data.n_tokens = plan->n_tokens;
        data.rank = bench->rank->rank;
        data.world_size = bench->rank->world_size;
        data.vocab_size = (uint32_t)plan->model.vocab_size;
        data.seed = (uint64_t)train->seed;
        TAGC_TRY(tagc_loader_create(t->b->tokens, &data, &t->loader));
    }
    TAGC_TRY(choose_bucket(t));
    tagc_train_options asked = options_of(t->arm);
    tagc_train_fsdp(&asked, &options);
    TAGC_TRY(tagc_engine_create(bench->rank, &plan->model, &options, &t->fsdp));
    TAGC_TRY(tagc_engine_init_random(t->fsdp, &plan->model, (uint64_t)train->seed));
    TAGC_TRY(tagc_gpt2_create(&plan->model, (int)train->batch_size, plan->n_tokens, &t->model));
    t->arm->n_params = tagc_fsdp_n_params(t->fsdp);
    t->arm->n_compressed = tagc_fsdp_n_compressed(t->fsdp);
    t->arm->n_mild = tagc_fsdp_n_mild(t->fsdp);
    tagc_fsdp_memory_used(t->fsdp, &t->arm->memory);
    return open_chooser(t, &options);
}

static void close_turn(turn *t) {
    tagc_auto_destroy(t->chooser);
    tagc_gpt2_destroy(t->model);
    tagc_fsdp_destroy(t->fsdp);
    tagc_loader_destroy(t->loader);
}

static tagc_status one_step(turn *t, tagc_fsdp_stats *stats, tagc_busy_times *busy) {
    const tagc_bench_plan *plan = t->b->bench->plan;
    const tagc_train_options *options = &t->arm->arm->options;
    tagc_training training = {.fsdp = t->fsdp,
                              .model = t->model,
                              .busy = t->b->bench->rank->busy,
                              .tokens = t->b->input,
                              .targets = t->b->target,
                              .n_batch = (int)plan->options.train.batch_size,
                              .n_tokens = plan->n_tokens,
                              .n_micro_steps = plan->options.train.accumulate,
                              .next_batch = next_batch,
                              .context = t};
    tagc_learning_rate rate = tagc_train_learning_rate(options, 0);
    double loss, lr = tagc_learning_rate_at(&rate, ++t->step);
    TAGC_TRY(tagc_training_step(&training, lr, &loss, stats, busy));
    double end_s = tagc_clock_s();
    t->wall_s = t->end_s > 0 ? end_s - t->end_s : stats->total_s;
    t->end_s = end_s;
    if (t->chooser) TAGC_TRY(tagc_auto_step(t->chooser, stats, t->wall_s));
    if (stats->skipped)
        return tagc_fail(TAGC_ERR_CORRUPT, "step %llu has a gradient that is not finite",
                         (unsigned long long)t->step);
    return TAGC_OK;
}

static void keep_counts(arm_bench *a, const tagc_fsdp_stats *stats) {
    a->n_steps++;
    a->n_kept += (double)stats->n_kept;
    a->n_union += (double)stats->n_union;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) a->n_bytes[leg] += (double)stats->n_bytes_sent[leg];
}

/* From end to end: gathers that a step leaves under way take the next one's time. What the engine does not count, as
 * making a batch, is computing. */
static void keep_times(const turn *t, const tagc_fsdp_stats *stats, const tagc_busy_times *busy,
                       iteration *out) {
    *out = (iteration){.total_s = t->wall_s,
                       .compute_s = stats->compute_s + t->wall_s - stats->total_s,
                       .wait_gather_s = stats->wait_gather_s,
                       .wait_reduce_s = stats->wait_reduce_s,
                       .optimizer_s = stats->optimizer_s,
                       .comm_s = busy->comm_s,
                       .codec_s = busy->codec_s,
                       .exchange_s = busy->exchange_s,
                       .gradient_s = busy->gradient_s};
    memcpy(out->phase_s, stats->phase_s, sizeof out->phase_s);
}

/* Until the choice is made: before that a step is one of a measurement. */
static tagc_status settle(turn *t) {
    tagc_fsdp_stats stats;
    tagc_busy_times busy;
    for (int i = 0; t->chooser && !tagc_auto_is_settled(t->chooser) && i < MOST_SETTLING_STEPS; i++)
        TAGC_TRY(one_step(t, &stats, &busy));
    if (t->chooser) tagc_fsdp_memory_used(t->fsdp, &t->arm->memory);
    return TAGC_OK;
}

static tagc_status run_steps(turn *t, int round) {
    arms_bench *b = t->b;
    TAGC_TRY(settle(t));
    int64_t n_warmup = b->bench->plan->options.warmup_steps;
    iteration *kept = &t->arm->iterations[round * b->n_steps];
    for (int64_t step = 0; step < n_warmup + b->n_steps; step++) {
        tagc_fsdp_stats stats;
        tagc_busy_times busy;
        TAGC_TRY(one_step(t, &stats, &busy));
        if (step < n_warmup) continue;
        keep_times(t, &stats, &busy, &kept[step - n_warmup]);
        keep_counts(t->arm, &stats);
    }
    /* Nothing else was sent between the steps. */
    int n_figures = (int)(sizeof *kept / sizeof(double)) * b->n_steps;
    return tagc_mean_over_ranks(b->bench->rank->comm, (double *)kept, n_figures);
}

static double round_median(const arms_bench *b, const arm_bench *a, int round, double *scratch) {
    for (int i = 0; i < b->n_steps; i++) scratch[i] = a->iterations[round * b->n_steps + i].total_s;
    return tagc_result_spread_of(scratch, b->n_steps).median;
}

static int name_width(const arms_bench *b) {
    size_t width = 16;
    for (int i = 0; i < b->n; i++)
        if (strlen(b->arms[i].arm->name) > width) width = strlen(b->arms[i].arm->name);
    return (int)width;
}

static tagc_status take_turn(arms_bench *b, arm_bench *a, int round, double *scratch) {
    turn t = {.b = b, .arm = a};
    double start_s = tagc_clock_s(), made_s = 0;
    char each[24], made[24];
    tagc_status status = open_turn(&t);
    if (status == TAGC_OK) {
        made_s = tagc_clock_s() - start_s;
        status = run_steps(&t, round);
    }
    if (status != TAGC_OK) status = tagc_fail_in(status, "arm %s", a->arm->name);
    tagc_rank_finish(b->bench->rank, status);
    close_turn(&t);
    TAGC_TRY(status);
    a->round_s[round] = round_median(b, a, round, scratch);
    tagc_bench_say(b->bench, "  round %d of %d  %-*s %10s an iteration   (engine made in %s)\n", round + 1,
                   b->n_rounds, name_width(b), a->arm->name, tagc_human_time(a->round_s[round], each),
                   tagc_human_time(made_s, made));
    return TAGC_OK;
}

/* ---- results ---- */

static void summarize(const arms_bench *b, arm_bench *a, double *scratch) {
    int n = b->n_rounds * b->n_steps;
    for (size_t member = 0; member < sizeof(iteration) / sizeof(double); member++) {
        for (int i = 0; i < n; i++) scratch[i] = ((const double *)&a->iterations[i])[member];
        ((double *)&a->median)[member] = tagc_result_spread_of(scratch, n).median;
    }
    for (int i = 0; i < n; i++) scratch[i] = a->iterations[i].total_s;
    a->total = tagc_result_spread_of(scratch, n);
    for (int i = 0; i < n; i++) scratch[i] = a->iterations[i].wait_gather_s + a->iterations[i].wait_reduce_s;
    a->exposed = tagc_result_spread_of(scratch, n);
    for (int i = 0; i < b->n_rounds; i++) a->speedups[i] = b->arms[0].round_s[i] / a->round_s[i];
    a->speedup = tagc_result_spread_of(a->speedups, b->n_rounds);
}

/* Per parameter of the whole model, before the factor (W-1)/W. */
static double bits(const arms_bench *b, const arm_bench *a, int leg) {
    int world_size = b->bench->rank->world_size;
    return 8 * a->n_bytes[leg] / a->n_steps / (double)a->n_params * world_size / (world_size - 1);
}

static uint64_t memory_bytes(const arm_bench *a) {
    return a->memory.parameters + a->memory.gradients + a->memory.optimizer + a->memory.residuals;
}

static void say_table(const arms_bench *b) {
    tagc_bench_say(b->bench, "\n  %-*s %10s %21s %18s %9s %9s %9s %21s %9s\n", name_width(b), "", "iteration",
                   "(least to most)", "speed-up", "compute", "exposed", "codec", "bits/param: gradients",
                   "memory");
    for (int i = 0; i < b->n; i++) {
        const arm_bench *a = &b->arms[i];
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

/* No arm can be faster than its bytes over the link, and no phase of the codec than memory. */
static void say_floors(const arms_bench *b) {
    const tagc_bench *bench = b->bench;
    if (bench->all_to_all_bytes_per_s <= 0 && bench->floor_s_per_elem <= 0) return;
    tagc_bench_say(bench, "\n  %-*s %10s %11s %13s   phases, times of the memory floor of all parameters\n",
                   name_width(b), "", "link floor", "of the time", "comm to floor");
    for (int i = 0; i < b->n; i++) {
        const arm_bench *a = &b->arms[i];
        double n_bytes = 0, floor_s = (double)NAN;
        char time[24] = "-";
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) n_bytes += a->n_bytes[leg] / a->n_steps;
        if (bench->all_to_all_bytes_per_s > 0)
            tagc_human_time(floor_s = n_bytes / bench->all_to_all_bytes_per_s, time);
        tagc_bench_say(bench, "  %-*s %10s %9.0f %% %13.2f  ", name_width(b), a->arm->name, time,
                       100 * floor_s / a->total.median, a->median.comm_s / floor_s);
        for (int phase = 0; bench->floor_s_per_elem > 0 && phase < TAGC_PHASE_WAIT; phase++)
            tagc_bench_say(bench, " %s %.2f", tagc_phase_name(phase),
                           a->median.phase_s[phase] / (bench->floor_s_per_elem * (double)a->n_params));
        tagc_bench_say(bench, "\n");
    }
}

static json_t *iteration_json(const arms_bench *b, const arm_bench *a, int i) {
    const iteration *it = &a->iterations[i];
    return json_pack("{s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "round", i / b->n_steps,
                     "total_s", tagc_json_real(it->total_s), "compute_s", tagc_json_real(it->compute_s),
                     "wait_gather_s", tagc_json_real(it->wait_gather_s), "wait_reduce_s",
                     tagc_json_real(it->wait_reduce_s), "optimizer_s", tagc_json_real(it->optimizer_s),
                     "comm_s", tagc_json_real(it->comm_s), "codec_s", tagc_json_real(it->codec_s),
                     "exchange_s", tagc_json_real(it->exchange_s), "gradient_s",
                     tagc_json_real(it->gradient_s), "phase_s", tagc_json_phases(it->phase_s));
}

static json_t *arm_json(const arms_bench *b, const arm_bench *a) {
    tagc_train_options options = options_of(a);
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
    return json_pack("{s:s, s:o, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "name",
                     a->arm->name, "options", tagc_saved_options(&tagc_train_command, &options), "n_params",
                     (json_int_t)a->n_params, "n_compressed", (json_int_t)a->n_compressed, "n_mild",
                     (json_int_t)a->n_mild, "n_union", (json_int_t)(a->n_union / a->n_steps + 0.5), "n_kept",
                     (json_int_t)(a->n_kept / a->n_steps + 0.5), "n_bytes_sent", tagc_json_leg_bytes(n_bytes),
                     "bits_per_param", tagc_json_leg_reals(n_bits), "iterations", iterations, "total_s",
                     tagc_json_spread(&a->total), "exposed_s", tagc_json_spread(&a->exposed), "speedup",
                     tagc_json_spread(&a->speedup), "memory_bytes", memory);
}

/* Of any leg; bf16 is no compression. */
static int compresses(const arm_bench *a) {
    const tagc_train_options *o = &a->arm->options;
    return (a->n_compressed > 0 && o->exchange != TAGC_EXCHANGE_DENSE) || a->n_mild > 0 ||
           o->gather > TAGC_GATHER_BF16;
}

static double link_s(const arms_bench *b, const arm_bench *a) {
    double n_bytes = 0;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) n_bytes += a->n_bytes[leg] / a->n_steps;
    return b->bench->all_to_all_bytes_per_s > 0 ? n_bytes / b->bench->all_to_all_bytes_per_s : 0;
}

static tagc_status recommend(const arms_bench *b) {
    tagc_bench_candidate *candidates = calloc((size_t)b->n, sizeof *candidates);
    tagc_bench_advice advice;
    if (!candidates) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %d arms", b->n);
    for (int i = 0; i < b->n; i++) {
        const arm_bench *a = &b->arms[i];
        candidates[i] = (tagc_bench_candidate){.name = a->arm->name,
                                               .sharding = a->arm->options.sharding,
                                               .is_compressed = compresses(a),
                                               .round_s = a->round_s,
                                               .total_s = a->total.median,
                                               .exposed_s = a->exposed.median,
                                               .compute_s = a->median.compute_s + a->median.optimizer_s,
                                               .link_s = link_s(b, a),
                                               .codec_s = a->median.codec_s,
                                               .comm_s = a->median.comm_s,
                                               .memory_bytes = memory_bytes(a)};
    }
    tagc_bench_advise(candidates, b->n, b->n_rounds, &advice);
    free(candidates);
    tagc_bench_say(b->bench, "\nRecommendation: %s\n", advice.reason);
    tagc_bench_put(b->bench, "recommendation",
                   json_pack("{s:s, s:s, s:o}", "arm",
                             advice.arm < 0 ? "none" : b->arms[advice.arm].arm->name, "reason", advice.reason,
                             "speedup", tagc_json_real(advice.speedup)));
    return TAGC_OK;
}

static tagc_status measure_arms(arms_bench *b) {
    TAGC_TRY(open_arms(b));
    size_t n = (size_t)b->n_rounds * (size_t)b->n_steps;
    double *scratch = calloc(n, sizeof *scratch);
    if (!scratch) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %zu times", n);
    tagc_bench_say(b->bench, "\nTraining, %s\n",
                   b->tokens ? b->bench->plan->options.train.data : "synthetic tokens");
    tagc_status status = TAGC_OK;
    for (int round = 0; status == TAGC_OK && round < b->n_rounds; round++)
        for (int i = 0; status == TAGC_OK && i < b->n; i++)
            status = take_turn(b, &b->arms[round % 2 ? b->n - 1 - i : i], round, scratch);
    for (int i = 0; status == TAGC_OK && i < b->n; i++) summarize(b, &b->arms[i], scratch);
    free(scratch);
    TAGC_TRY(status);
    say_table(b);
    say_floors(b);
    json_t *list = json_array();
    for (int i = 0; i < b->n; i++) json_array_append_new(list, arm_json(b, &b->arms[i]));
    tagc_bench_put(b->bench, "arms", list);
    return recommend(b);
}

tagc_status tagc_bench_arms(tagc_bench *bench) {
    arms_bench b = {.bench = bench};
    tagc_status status = measure_arms(&b);
    tagc_rank_finish(bench->rank, status);
    close_arms(&b);
    return status;
}
