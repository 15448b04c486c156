/* tagc plan: its options, and the lists in them. */
#include "cli/plan.h"

#include "cli/commands.h"
#include "cluster/cluster.h"
#include "core/status.h"
#include "disk/new_file.h"
#include "files/result_file.h"
#include "gpt2/safetensors.h"
#include "launch/ranks.h"
#include "options/presets.h"
#include "options/quantity.h"
#include "options/saved_options.h"
#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(tagc_plan_options, field)

/* clang-format off */
#define TEXT(section, name, field, initial, value, help) \
    {section, name, TAGC_OPTION_TEXT, TAGC_ROLE_RUN, AT(field), 0, 0, NULL, initial, value, help}
#define REAL(section, name, field, max, word, initial, help) \
    {section, name, TAGC_OPTION_REAL, TAGC_ROLE_RUN, AT(field), 1e-12, max, word, initial, "X", help}
#define INT(section, name, field, help) \
    {section, name, TAGC_OPTION_INT, TAGC_ROLE_RUN, AT(field), 1, 65536, "auto", "auto", "N", help}
static const tagc_option own[] = {
    TEXT("What to plan", "arms", arms, "fsdp,fsdp-bf16,zero2-bf16,tagc-10x,packed,zero2-packed,zero2-direct,all-legs",
     "LIST",
         "ways to train: names of the table below or config files, each with options behind it, as in"
         " packed+sparsity=0.95+gather=bf16"),
    TEXT(NULL, "placement", placement, NULL, "LIST",
         "none, zero1, zero2, zero3, hybrid, instead of what the arms have: what is replicated, sharded, gathered;"
         " several make a row each"),
    TEXT(NULL, "config-json", config_json, NULL, "FILE", "the model of a GPT-2's config.json, instead of --model"),
    TEXT(NULL, "world-size", world_size, "2", "LIST", "ranks, as in 2,8,64"),
    INT(NULL, "hosts", hosts, "hosts that the ranks are on; auto: one rank per host"),
    INT(NULL, "ranks-per-host", ranks_per_host, "ranks on each host, instead of --hosts"),
    REAL(NULL, "union-density", union_density, 1, "auto", "auto",
         "share of elements that at least one rank keeps; auto: as in --profile, else as if ranks chose independently"),
    TEXT("The network", "link-rate", link_rate, NULL, "LIST",
         "rate of a host in each direction, as in 1gbit,10gbit; or up and down, as in 110mbit/500mbit: hosts send as much as"
         " they get, so the slower one counts. TCP's payload is taken as 94 % of it"),
    REAL(NULL, "bytes-per-s", bytes_per_s, 1e15, "auto", "auto", "payload of a host's link in bytes per second, instead of --link-rate"),
    TEXT(NULL, "latency", latency, NULL, "LIST",
         "latency one way, as in 50us or 1ms,10ms; without it the profile's, else 0. Each rate is planned with each of them."
         " A large message takes it as many times as the profile says, else 3: MPI asks before it sends one"),
    TEXT(NULL, "host-rate", host_rate, NULL, "RATE", "rate between ranks of one host; without it their exchange takes no time"),
    TEXT("What things cost", "profile", profile, NULL, "FILES",
         "results of tagc bench or the lab, to which costs are fitted, with commas between; FILE:2 is case 2 of a lab result."
         " Model and batch are taken from it, too, unless they are given"),
    TEXT(NULL, "fit-arms", fit_arms, NULL, "LIST", "arms of the profile to fit to; others are held out"),
    TEXT(NULL, "check", check, NULL, "FILES", "more such results, whose measured times are compared with simulated ones, point by point"),
    REAL(NULL, "compute-s", compute_s, 1e6, "auto", "auto",
         "without a profile: seconds of one forward and backward pass"),
    REAL(NULL, "codec-ns", codec_ns, 1e6, "auto", "auto",
         "without a profile: nanoseconds per element of all phases of a compressed exchange"),
    REAL(NULL, "optimizer-ns", optimizer_ns, 1e6, "none", "none", "without a profile: nanoseconds per element of the update"),
    {"Result", "json", TAGC_OPTION_TEXT, TAGC_ROLE_PLACE, AT(json), 0, 0, NULL, NULL, "FILE",
     "file for the plan, which tagc-report reads; several world sizes or rates make a list of plans; - prints nothing else"},
};
/* clang-format on */
enum { N_OWN = sizeof own / sizeof own[0] };

static const char examples[] =
    "  # Memory and bytes of every placement on 8 ranks, two per host.\n"
    "  tagc plan --world-size 8 --hosts 4 --arms fsdp,packed --placement none,zero1,zero2,zero3,hybrid\n"
    "\n"
    "  # Measured on this network, predicted for others.\n"
    "  mpirun -n 2 --host one,two tagc bench --json bench.json\n"
    "  tagc plan --profile bench.json --world-size 2,16,128 --link-rate 1gbit,10gbit,25gbit --json "
    "plan.json\n"
    "  tagc-report bench.json plan.json --out plan.html\n"
    "\n"
    "  # What does distance cost?\n"
    "  tagc plan --profile bench.json --link-rate 100mbit,1gbit --latency 1ms,10ms,50ms\n"
    "\n"
    "  # How good are the predictions? Fitted to two links, checked on the third.\n"
    "  tagc plan --profile links.json:0,links.json:2 --check links.json:1\n";

_Static_assert(N_OWN + TAGC_ARMS_MAX_SHARED <= TAGC_MAX_OPTIONS, "raise TAGC_MAX_OPTIONS");

static void print_more(FILE *out) {
    tagc_preset_print(out);
    fputs("\nIn place of the options above, for models and clusters by size, as python -m tagc plan:\n", out);
    tagc_options_explain(&tagc_cluster_command, out);
}

/* Own rows, and those of tagc train with other defaults. */
static tagc_option rows[N_OWN + TAGC_ARMS_MAX_SHARED];
static tagc_command command = {
    .name = "plan",
    .summary = "memory, bytes and time of a deployment, without running it",
    .usage = "[options]\n       tagc plan --params N|NAME [options of a model and a cluster by size], as in\n"
             "       tagc plan --params 7b --hosts 2 --gpus-per-host 8",
    .common = "arms model batch-size world-size hosts link-rate latency profile json",
    .examples = examples,
    .options = rows,
    .print_more = print_more};

static void prepare(void) {
    command.n_options = tagc_arms_rows(TAGC_ARMS_OF_PLAN, own, N_OWN, rows);
}

/* ---- lists ---- */

/* Calls read for each word between commas. */
static tagc_status read_list(const char *name, const char *list, int *n,
                             tagc_status (*read)(tagc_plan_request *, const char *, size_t),
                             tagc_plan_request *request) {
    for (const char *at = list;; at++) {
        size_t length = strcspn(at, ",");
        if (*n == TAGC_PLAN_MAX_LIST)
            return tagc_fail(TAGC_ERR_ARGUMENT, "--%s has more than %d entries", name, TAGC_PLAN_MAX_LIST);
        TAGC_TRY(read(request, at, length));
        ++*n;
        at += length;
        if (!*at) return TAGC_OK;
    }
}

static tagc_status read_world(tagc_plan_request *request, const char *text, size_t n) {
    char word[16] = "", *end = word;
    if (n > 0 && n < sizeof word) snprintf(word, sizeof word, "%.*s", (int)n, text);
    long value = word[0] >= '0' && word[0] <= '9' ? strtol(word, &end, 10) : 0;
    if (*end || value < 1 || value > 65536)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--world-size is \"%.40s\", allowed: numbers from 1 to 65536, as in 2,8,64",
                         request->options.world_size);
    request->worlds[request->n_worlds] = (int)value;
    return TAGC_OK;
}

static tagc_status read_placement(tagc_plan_request *request, const char *text, size_t n) {
    for (int i = TAGC_PLACE_NONE; i <= TAGC_PLACE_HYBRID; i++) {
        const char *name = tagc_placement_describe(i)->name;
        if (strlen(name) != n || strncmp(name, text, n) != 0) continue;
        request->placements[request->n_placements] = i;
        return TAGC_OK;
    }
    return tagc_fail(
        TAGC_ERR_ARGUMENT,
        "--placement is \"%.60s\", allowed: none, zero1, zero2, zero3, hybrid, with commas between",
        request->options.placement);
}

/* An Ethernet frame of 1538 bytes on the line carries 1448 of TCP's. */
static const double payload_share = 1448.0 / 1538.0;

/* Up and down: a host owns as large a shard as any other, so what it sends in a step is as much as what it gets. */
static tagc_status read_rate(tagc_plan_request *request, const char *text, size_t n) {
    const char *slash = memchr(text, '/', n);
    size_t n_up = slash ? (size_t)(slash - text) : n, n_down = slash ? n - n_up - 1 : 0;
    double bits_per_s, down = 0;
    if (!tagc_quantity_rate(text, n_up, &bits_per_s) ||
        (slash && !tagc_quantity_rate(slash + 1, n_down, &down)))
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--link-rate is \"%.60s\", allowed: numbers with kbit, mbit, gbit or tbit, as in"
                         " 1gbit,10gbit, or two of them, up and down, as in 110mbit/500mbit",
                         request->options.link_rate);
    if (slash && down < bits_per_s) bits_per_s = down;
    request->inputs.line_bits_per_s[request->inputs.n_links] = bits_per_s;
    request->inputs.links[request->inputs.n_links].bytes_per_s = bits_per_s / 8 * payload_share;
    return TAGC_OK;
}

static tagc_status read_latency(tagc_plan_request *request, const char *text, size_t n) {
    if (tagc_quantity_time(text, n, &request->latencies_s[request->n_latencies])) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT,
                     "--latency is \"%.60s\", allowed: numbers with us, ms or s, as in 50us or 1ms,10ms",
                     request->options.latency);
}

static tagc_status read_network(tagc_plan_request *request) {
    const tagc_plan_options *o = &request->options;
    const tagc_point *measured = request->inputs.profile.n_points > 0 ? request->inputs.profile.points : NULL;
    double host_bits_per_s = 0;
    if (o->link_rate && o->bytes_per_s > 0)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--link-rate and --bytes-per-s say the same thing twice; give one");
    if (o->latency) {
        TAGC_TRY(read_list("latency", o->latency, &request->n_latencies, read_latency, request));
    } else {
        request->latencies_s[0] = measured ? measured->link.latency_s : 0;
        request->n_latencies = 1;
    }
    if (o->host_rate && !tagc_quantity_rate(o->host_rate, strlen(o->host_rate), &host_bits_per_s))
        return tagc_fail(
            TAGC_ERR_ARGUMENT,
            "--host-rate is \"%.40s\", allowed: a number with kbit, mbit, gbit or tbit, as in 80gbit",
            o->host_rate);
    if (o->link_rate) {
        TAGC_TRY(read_list("link-rate", o->link_rate, &request->inputs.n_links, read_rate, request));
    } else if (o->bytes_per_s > 0 || (measured && measured->setup.world_size > 1)) {
        request->inputs.links[0].bytes_per_s =
            o->bytes_per_s > 0 ? o->bytes_per_s : measured->link.bytes_per_s;
        request->inputs.n_links = 1;
    }
    return tagc_plan_cross_links(&request->inputs, request->latencies_s, request->n_latencies,
                                 host_bits_per_s / 8);
}

/* ---- model and arms ---- */

/* The plan takes the measured options unless the command line has others. */
static tagc_status take_profile(tagc_plan_request *request, const tagc_parsed *parsed, int *took_model) {
    tagc_plan_options *o = &request->options;
    *took_model = 0;
    if (!o->profile) return TAGC_OK;
    TAGC_TRY(tagc_points_read_list(&request->inputs.profile, o->profile, tagc_saved_engine));
    if (request->inputs.profile.n_points == 0) return TAGC_OK;
    const tagc_setup *setup = &request->inputs.profile.points[0].setup;
    *took_model = !o->config_json;
    for (int i = 0; i < TAGC_TRAIN_N_SHAPE; i++)
        *took_model &= !tagc_options_given(parsed, tagc_train_shape[i]);
    if (*took_model) {
        request->model = setup->model;
        snprintf(request->inputs.model_name, sizeof request->inputs.model_name, "%.60s",
                 request->inputs.profile.model);
        tagc_train_set_shape(parsed, &request->model, &o->train);
        if (!tagc_options_given(parsed, "seq-len")) o->train.seq_len = setup->n_tokens;
    }
    if (!tagc_options_given(parsed, "batch-size")) o->train.batch_size = setup->n_batch;
    if (!tagc_options_given(parsed, "accumulate")) o->train.accumulate = setup->engine.n_micro_steps;
    return TAGC_OK;
}

static tagc_status read_model(tagc_plan_request *request, const tagc_parsed *parsed) {
    tagc_plan_options *o = &request->options;
    tagc_train_options *train = &o->train;
    int took_model;
    TAGC_TRY(take_profile(request, parsed, &took_model));
    if (!took_model && !o->config_json) {
        snprintf(request->inputs.model_name, sizeof request->inputs.model_name, "%s",
                 train->model ? train->model : "");
        TAGC_TRY(tagc_train_model(train, &request->model));
    } else if (!took_model) {
        for (int i = 0; i < TAGC_TRAIN_N_SHAPE; i++)
            if (tagc_options_given(parsed, tagc_train_shape[i]))
                return tagc_fail(TAGC_ERR_ARGUMENT,
                                 "--%s and --config-json both say what the model is; give one",
                                 tagc_train_shape[i]);
        TAGC_TRY(tagc_gpt2_config_read(o->config_json, &request->model));
        snprintf(request->inputs.model_name, sizeof request->inputs.model_name, "%.60s", o->config_json);
        tagc_train_set_shape(parsed, &request->model, train);
    }
    if (train->seq_len == 0)
        train->seq_len = request->model.block_size < 256 ? request->model.block_size : 256;
    if (train->seq_len > request->model.block_size)
        return tagc_fail(TAGC_ERR_ARGUMENT, "--seq-len is %lld, allowed: 1 to the model's block-size of %d",
                         (long long)train->seq_len, request->model.block_size);
    request->n_tokens = (int)train->seq_len;
    return TAGC_OK;
}

static tagc_status check_hosts(const tagc_plan_request *request) {
    const tagc_plan_options *o = &request->options;
    if (o->hosts > 0 && o->ranks_per_host > 0)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--hosts and --ranks-per-host say the same thing twice; give one");
    for (int i = 0; i < request->n_worlds; i++) {
        int64_t n_ranks = request->worlds[i], n = o->hosts > 0 ? o->hosts : o->ranks_per_host;
        if (n > 0 && n_ranks % n != 0)
            return tagc_fail(TAGC_ERR_ARGUMENT, "--%s is %lld, which does not divide the world size of %lld",
                             o->hosts > 0 ? "hosts" : "ranks-per-host", (long long)n, (long long)n_ranks);
    }
    return TAGC_OK;
}

static tagc_status make_request(tagc_plan_request *request, const tagc_parsed *parsed) {
    const tagc_plan_options *o = &request->options;
    TAGC_TRY(read_model(request, parsed));
    TAGC_TRY(tagc_arms_read(o->arms, TAGC_ARMS_OF_PLAN, parsed, &request->model, &request->arms,
                            &request->n_arms));
    if (!o->world_size) return tagc_fail(TAGC_ERR_ARGUMENT, "--world-size is empty");
    TAGC_TRY(read_list("world-size", o->world_size, &request->n_worlds, read_world, request));
    TAGC_TRY(check_hosts(request));
    if (o->placement)
        TAGC_TRY(read_list("placement", o->placement, &request->n_placements, read_placement, request));
    if (o->profile && (o->compute_s > 0 || o->codec_ns > 0 || o->optimizer_ns > 0))
        return tagc_fail(TAGC_ERR_ARGUMENT, "--profile fits all costs; --compute-s, --codec-ns and "
                                            "--optimizer-ns are for when there is none");
    if (o->check && !o->profile)
        return tagc_fail(TAGC_ERR_ARGUMENT, "--check needs --profile: costs that were fitted to something");
    if (o->fit_arms && !o->profile)
        return tagc_fail(TAGC_ERR_ARGUMENT, "--fit-arms needs --profile, whose arms they are");
    if (o->check) TAGC_TRY(tagc_points_read_list(&request->check, o->check, tagc_saved_engine));
    request->inputs.profile_name = o->profile;
    request->inputs.union_density = o->union_density;
    request->inputs.has_host_rate = o->host_rate != NULL;
    return read_network(request);
}

static tagc_status make_plans(tagc_plan_request *request) {
    json_t *checks = NULL, *results = json_array();
    const char *path = request->options.json;
    tagc_status status = path ? tagc_new_file_check(path) : TAGC_OK;
    request->options.train.quiet |= tagc_new_file_is_stdout(path);
    if (status == TAGC_OK) status = tagc_plan_find_costs(request);
    if (status == TAGC_OK && !request->options.train.quiet) tagc_plan_print_costs(request);
    if (status == TAGC_OK) status = tagc_plan_hold_checks(request, &checks);
    for (int i = 0; status == TAGC_OK && i < request->n_worlds; i++)
        status = tagc_plan_world(request, i, results);
    if (checks) json_object_set_new(json_array_get(results, 0), "checks", checks);
    if (status == TAGC_OK && path)
        status =
            tagc_result_write(json_array_size(results) == 1 ? json_array_get(results, 0) : results, path);
    json_decref(results);
    return status;
}

static int run(tagc_parsed *parsed) {
    tagc_plan_request *request = parsed->values;
    request->parsed = parsed;
    tagc_status status = make_request(request, parsed);
    int is_usage = status == TAGC_ERR_ARGUMENT; /* a bad file is not a usage error */
    if (status == TAGC_OK) status = make_plans(request);
    tagc_points_destroy(&request->inputs.profile);
    tagc_points_destroy(&request->check);
    tagc_arms_destroy(request->arms, request->n_arms);
    return is_usage ? tagc_command_refuse(parsed->command) : tagc_command_end(status);
}

static tagc_status choose(int argc, char **argv, const tagc_entry **entry) {
    return tagc_plan_choose(&command, argc, argv, entry);
}

const tagc_entry tagc_entry_plan = {&command, sizeof(tagc_plan_request), run, prepare, choose};
