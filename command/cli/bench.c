/* tagc bench: its options, most of them tagc train's, and its parts one after the other. */
#include "bench/bench.h"
#include "blas/blas.h"
#include "cli/commands.h"
#include "core/status.h"
#include "disk/new_file.h"
#include "launch/human.h"
#include "options/presets.h"
#include "train/progress.h"
#include "train/saved.h"
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define AT(field) offsetof(tagc_bench_options, field)

/* clang-format off */
static const tagc_option bench_rows[] = {
    {"What to measure", "arms", TAGC_OPTION_TEXT, TAGC_ROLE_RUN, AT(arms), 0, 0, NULL,
     "fsdp,fsdp-bf16,zero2-bf16,tagc-10x,packed,zero2-packed,zero2-direct,all-legs", "LIST",
     "ways to train, which are compared with the first of them: names of the table below or config files, each with"
     " options behind it, as in packed+sparsity=0.95+gather=bf16"},
    {NULL, "only", TAGC_OPTION_TEXT, TAGC_ROLE_RUN, AT(only), 0, 0, NULL, NULL, "LIST",
     "parts to measure, of link, exchanges, floor, codec, arms; without it all of them"},
    {NULL, "rounds", TAGC_OPTION_INT, TAGC_ROLE_RUN, AT(rounds), 1, 1000, NULL, "5", "N",
     "turns of each arm, every other one in the opposite order; fewer than 5 give no verdict"},
    {NULL, "warmup-steps", TAGC_OPTION_INT, TAGC_ROLE_RUN, AT(warmup_steps), 0, 1000, NULL, "1", "N",
     "steps at the beginning of a turn that are not counted: the first one touches new memory"},
    {NULL, "steps-per-round", TAGC_OPTION_INT, TAGC_ROLE_RUN, AT(steps_per_round), 1, 1000, NULL, "3", "N",
     "steps of a turn that are counted"},
    {NULL, "json", TAGC_OPTION_TEXT, TAGC_ROLE_PLACE, AT(json), 0, 0, NULL, NULL, "FILE",
     "file for the figures, which tagc plan and tagc-report read; - prints nothing else"},
};
/* clang-format on */
enum { N_BENCH_ROWS = sizeof bench_rows / sizeof bench_rows[0] };

static const char *const part_names[] = {"link", "exchanges", "floor", "codec", "arms"};
enum { N_PARTS = sizeof part_names / sizeof part_names[0], ALL_PARTS = (1 << N_PARTS) - 1 };

static const char examples[] =
    "  # On this machine alone, ranks as threads:\n"
    "  tagc bench --model demo\n"
    "\n"
    "  # On the hosts and over the network that the training will use:\n"
    "  mpirun -n 2 --host one,two tagc bench --json bench.json\n"
    "  tagc-report bench.json --out bench.html\n"
    "\n"
    "  # Is a lower sparsity worth its time?\n"
    "  mpirun -n 2 --host one,two tagc bench --only arms --arms fsdp,packed,packed+sparsity=0.95\n";

_Static_assert(N_BENCH_ROWS + TAGC_ARMS_MAX_SHARED <= TAGC_MAX_OPTIONS, "raise TAGC_MAX_OPTIONS");

/* Own rows, and those of tagc train with other defaults. */
static tagc_option rows[N_BENCH_ROWS + TAGC_ARMS_MAX_SHARED];
static tagc_command command = {.name = "bench",
                               .summary =
                                   "what this machine and network give, and whether compression pays on them",
                               .usage = "[options]",
                               .common = "arms only model batch-size ranks rounds json",
                               .examples = examples,
                               .options = rows,
                               .print_more = tagc_preset_print};

static void prepare(void) {
    command.n_options = tagc_arms_rows(bench_rows, N_BENCH_ROWS, rows);
}

/* ---- one rank ---- */

static json_t *model_json(const tagc_bench_plan *plan) {
    json_t *model = tagc_saved_model(&plan->model);
    json_object_set_new(model, "name", json_string(plan->options.train.model));
    json_object_set_new(model, "tied", json_boolean(plan->model.tied));
    json_object_set_new(model, "n_params", json_integer((json_int_t)tagc_gpt2_n_params(&plan->model)));
    return model;
}

static void begin_result(tagc_bench *bench) {
    const tagc_bench_plan *plan = bench->plan;
    if (bench->rank->rank != 0) return;
    json_t *hosts = json_array();
    for (int i = 0; i < bench->hosts.n_hosts; i++)
        json_array_append_new(hosts, json_string(bench->hosts.names[i]));
    bench->result =
        json_pack("{s:s, s:i, s:o, s:i, s:i, s:s, s:o, s:I, s:i}", "type", "bench", "format", 1, "origin",
                  tagc_origin("bench", plan->parsed->argc, plan->parsed->argv, hosts), "world_size",
                  bench->rank->world_size, "n_hosts", bench->hosts.n_hosts, "transport",
                  bench->is_mpi ? "mpi" : "local", "model", model_json(plan), "batch_size",
                  (json_int_t)plan->options.train.batch_size, "seq_len", plan->n_tokens);
    /* What --only leaves out stays null. */
    static const char *const members[] = {"link", "exchanges", "floor", "codec", "arms", "recommendation"};
    for (size_t i = 0; i < sizeof members / sizeof members[0]; i++)
        json_object_set_new(bench->result, members[i], json_null());
}

static void say_blas(const tagc_bench *bench) {
    tagc_blas_about blas;
    tagc_blas_describe(&blas);
    tagc_bench_say(bench, "products: %s, kernel %s, %d thread%s\n", blas.name, blas.kernel, blas.n_threads,
                   blas.n_threads > 1 ? "s" : "");
}

/* By default mpirun binds a rank to one core; three threads of a rank then share it. */
static void say_binding(const tagc_bench *bench) {
    cpu_set_t allowed;
    long n_online = sysconf(_SC_NPROCESSORS_ONLN);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) >= n_online) return;
    tagc_bench_say(
        bench,
        "note: rank 0 may use %d of %ld processors; its computing, compressing and communicating share"
        " them (mpirun --bind-to none lifts this)\n",
        CPU_COUNT(&allowed), n_online);
}

static void say_headline(const tagc_bench *bench) {
    const tagc_bench_plan *plan = bench->plan;
    char params[16], names[200] = "";
    tagc_human((double)tagc_gpt2_n_params(&plan->model), params);
    for (int i = 0; i < bench->hosts.n_hosts && strlen(names) + TAGC_HOST_NAME_BYTES + 8 < sizeof names; i++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? ", " : "",
                 bench->hosts.names[i]);
    tagc_bench_say(bench,
                   "%s, %s parameters, %d x %d tokens per rank and micro-step; %d ranks on %d host%s (%s)\n",
                   plan->options.train.model, params, (int)plan->options.train.batch_size, plan->n_tokens,
                   bench->rank->world_size, bench->hosts.n_hosts, bench->hosts.n_hosts > 1 ? "s" : "", names);
    if (!bench->is_mpi)
        tagc_bench_say(bench, "ranks are threads of one process: memory takes the place of a network\n");
    else if (bench->hosts.n_hosts == 1)
        tagc_bench_say(bench, "all ranks are on one host: its memory takes the place of a network\n");
    say_blas(bench);
    say_binding(bench);
}

static tagc_status measure(tagc_bench *bench) {
    int parts = bench->plan->parts;
    if (parts & TAGC_BENCH_LINK) TAGC_TRY(tagc_bench_link(bench));
    if (parts & TAGC_BENCH_EXCHANGES) TAGC_TRY(tagc_bench_exchanges(bench));
    if (parts & (TAGC_BENCH_FLOOR | TAGC_BENCH_CODEC)) TAGC_TRY(tagc_bench_floor(bench));
    if (parts & TAGC_BENCH_CODEC) TAGC_TRY(tagc_bench_codec(bench));
    if (parts & TAGC_BENCH_ARMS) TAGC_TRY(tagc_bench_arms(bench));
    return TAGC_OK;
}

/* An arm's hosts must be real ones: else it measures what is not there. */
static tagc_status check_hosts(const tagc_bench *bench) {
    char note[TAGC_HOSTS_NOTE_BYTES];
    for (int i = 0; i < bench->plan->n_arms; i++) {
        const tagc_arm *arm = &bench->plan->arms[i];
        if (arm->options.ranks_per_host < 2 || !bench->is_mpi) continue;
        tagc_status status =
            tagc_hosts_check_groups(bench->rank->comm, (int)arm->options.ranks_per_host, note);
        if (*note) tagc_bench_say(bench, "%s\n", note);
        if (status != TAGC_OK) return tagc_fail_in(status, "arm %s", arm->name);
    }
    return TAGC_OK;
}

static tagc_status open_rank(tagc_bench *bench) {
    const tagc_bench_plan *plan = bench->plan;
    tagc_rank *rank = bench->rank;
    TAGC_TRY(tagc_agree_options(rank->comm, &command, &plan->options));
    char mpirun[TAGC_MPIRUN_BYTES];
    tagc_ranks_mpirun(2, mpirun);
    if (rank->world_size < 2)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "tagc bench needs at least 2 ranks to exchange anything, and this is 1:"
                         " %s, or --ranks 2",
                         mpirun);
    if (rank->rank == 0 && plan->options.json) TAGC_TRY(tagc_new_file_check(plan->options.json));
    TAGC_TRY(tagc_hosts_find(rank->comm, &bench->hosts));
    if (plan->parts & TAGC_BENCH_ARMS) TAGC_TRY(tagc_bench_arms_check(bench));
    if (plan->parts & TAGC_BENCH_ARMS) TAGC_TRY(check_hosts(bench));
    begin_result(bench);
    say_headline(bench);
    return TAGC_OK;
}

static tagc_status bench_rank(tagc_rank *rank, void *context) {
    tagc_bench bench = {.rank = rank, .plan = context};
    const char *path = bench.plan->options.json;
    bench.is_mpi = !tagc_ranks_is_local(bench.plan->options.train.transport);
    tagc_status status = open_rank(&bench);
    if (status == TAGC_OK) status = measure(&bench);
    if (status == TAGC_OK && bench.result && path) {
        status = tagc_result_write(bench.result, path);
        if (status == TAGC_OK) tagc_bench_say(&bench, "\nfigures in %s\n", path);
    }
    tagc_rank_finish(rank, status);
    json_decref(bench.result);
    tagc_hosts_destroy(&bench.hosts);
    return status;
}

/* ---- before the ranks start ---- */

static tagc_status read_parts(const char *list, int *parts) {
    *parts = list ? 0 : ALL_PARTS;
    for (const char *at = list; at;) {
        size_t n = strcspn(at, ",");
        int part = 0;
        while (part < N_PARTS && (strlen(part_names[part]) != n || strncmp(part_names[part], at, n) != 0))
            part++;
        if (part == N_PARTS)
            return tagc_fail(TAGC_ERR_ARGUMENT,
                             "--only has \"%.*s\", allowed: link, exchanges, floor, codec, arms"
                             " with commas between",
                             (int)n, at);
        *parts |= 1 << part;
        at = at[n] ? at + n + 1 : NULL;
    }
    return TAGC_OK;
}

/* An arm that sees other data cannot be compared by its time. */
static tagc_status check_arm(const tagc_bench_plan *plan, const tagc_arm *arm) {
    static const char *const same[] = {"batch-size", "seq-len", "accumulate", "seed"};
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++) {
        char theirs[32], ours[32];
        tagc_options_get(&tagc_train_command, &arm->options, tagc_options_find(&tagc_train_command, same[i]),
                         theirs, sizeof theirs);
        tagc_options_get(&command, &plan->options, tagc_options_find(&command, same[i]), ours, sizeof ours);
        if (strcmp(theirs, ours) != 0)
            return tagc_fail(
                TAGC_ERR_ARGUMENT,
                "arm %s has --%s %s, tagc bench %s; times compare only where it is the same, so give"
                " it to tagc bench, for all arms",
                arm->name, same[i], theirs, ours);
    }
    return TAGC_OK;
}

static tagc_status make_plan(tagc_bench_plan *plan, tagc_parsed *parsed) {
    tagc_bench_options *options = &plan->options;
    TAGC_TRY(read_parts(options->only, &plan->parts));
    options->train.quiet |= tagc_new_file_is_stdout(options->json);
    TAGC_TRY(tagc_train_model(&options->train, &plan->model));
    if (options->train.seq_len == 0)
        options->train.seq_len = plan->model.block_size < 256 ? plan->model.block_size : 256;
    if (options->train.seq_len > plan->model.block_size)
        return tagc_fail(TAGC_ERR_ARGUMENT, "--seq-len is %lld, allowed: 1 to the model's block-size of %d",
                         (long long)options->train.seq_len, plan->model.block_size);
    plan->n_tokens = (int)options->train.seq_len;
    TAGC_TRY(tagc_arms_read(options->arms, parsed, &plan->model, &plan->arms, &plan->n_arms));
    for (int i = 0; i < plan->n_arms; i++) TAGC_TRY(check_arm(plan, &plan->arms[i]));
    return TAGC_OK;
}

/* Ranks as threads are all on this host, so that arms too large for it are refused before there are threads. */
static tagc_status check_threads(const tagc_bench_plan *plan, const tagc_launch *launch) {
    int n_ranks = launch->n_ranks ? launch->n_ranks : launch->n_local_ranks;
    if (!(plan->parts & TAGC_BENCH_ARMS) || !tagc_ranks_is_local(launch->transport)) return TAGC_OK;
    tagc_rank rank = {.world_size = n_ranks};
    tagc_bench bench = {.plan = plan, .rank = &rank, .hosts = {.n_here = n_ranks}};
    return tagc_bench_arms_check(&bench);
}

static int run(tagc_parsed *parsed) {
    tagc_bench_plan *plan = parsed->values;
    const tagc_train_options *options = &plan->options.train;
    plan->parsed = parsed;
    tagc_launch launch = {.n_ranks = tagc_options_given(parsed, "ranks") ? (int)options->ranks : 0,
                          .n_local_ranks = 2,
                          .transport = options->transport,
                          .timeout_s = options->timeout,
                          .blas_threads = (int)options->blas_threads};
    /* bench writes nothing before its end, so a signal may end it at any point. */
    int code;
    int is_made = make_plan(plan, parsed) == TAGC_OK;
    for (int i = 0; is_made && i < plan->n_arms; i++)
        launch.has_levels |= plan->arms[i].options.ranks_per_host > 1;
    if (!is_made)
        code = tagc_command_refuse(&command);
    else if ((code = tagc_command_end(check_threads(plan, &launch))) == TAGC_EXIT_OK)
        code = tagc_ranks_run(&launch, bench_rank, plan);
    tagc_arms_destroy(plan->arms, plan->n_arms);
    return code;
}

const tagc_entry tagc_entry_bench = {&command, sizeof(tagc_bench_plan), run, prepare};
