/* The options of a plan by size, and what they mean. */
#include "cluster/cluster.h"

#include "sizes/catalogue.h"
#include "tagc/blocks.h"
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define AT(field) offsetof(tagc_cluster_values, field)

/* clang-format off */
#define TEXT(section, name, field, bare, initial, value, help) \
    {section, name, TAGC_OPTION_TEXT, TAGC_ROLE_RUN, AT(field), 0, 0, bare, initial, value, help, NULL}
#define INT(name, field, least, most, word, initial, help) \
    {NULL, name, TAGC_OPTION_INT, TAGC_ROLE_RUN, AT(field), least, most, word, initial, "N", help, NULL}
#define REAL(name, field, least, most, word, initial, help) \
    {NULL, name, TAGC_OPTION_REAL, TAGC_ROLE_RUN, AT(field), least, most, word, initial, "X", help, NULL}
#define CHOICE(name, field, words, initial, help) \
    {NULL, name, TAGC_OPTION_CHOICE, TAGC_ROLE_RUN, AT(field), 0, 0, words, initial, NULL, help, NULL}
static const tagc_option rows[] = {
    TEXT("A model and a cluster by size", "params", params, NULL, "1b", "N",
         "parameters, as in 350m, 1b, 2t, or a model: gpt-3-175b, llama-3-8b, llama-3-70b, llama-3-405b, mixtral-8x7b,"
         " mixtral-8x22b"),
    TEXT(NULL, "model", params, NULL, "1b", "N", "the same as --params"),
    INT("hosts", hosts, 2, 8192, NULL, "4", "hosts"),
    INT("gpus-per-host", gpus_per_host, 1, 64, NULL, "1", "ranks on each host"),
    INT("ranks-per-host", gpus_per_host, 1, 64, NULL, "1", "the same as --gpus-per-host"),
    TEXT(NULL, "link", link, NULL, "1gbit,10gbit,25gbit", "RATES", "rates of a host's network card"),
    TEXT(NULL, "latency", latency, NULL, "50us", "TIME", "between hosts, one way; on a mesh only for --expert-parallel"),
    TEXT(NULL, "host-link", host_link, NULL, "800gbit", "RATE", "between the GPUs of a host; not on a mesh"),
    REAL("tflops", tflops, 0.001, 1e5, NULL, "150",
         "what a GPU reaches in training, often 40 % of what its data sheet says"),
    REAL("compute-s", compute_s, 1e-9, 1e6, "auto", "auto",
         "seconds that a step computes, measured, in place of --tflops and --tokens"),
    INT("tokens", tokens, 1, 1 << 24, NULL, "16384",
        "of each GPU and micro-step, in sequences of 2048; not on a mesh"),
    INT("accumulate", accumulate, 1, 65536, NULL, "1",
        "micro-steps of a step, of which the last one exchanges gradients; not on a mesh"),
    REAL("codec-ns", codec_ns, 0, 1e6, "measured=-1", "measured",
         "nanoseconds that the codec takes per element; measured: here, on the threads that compress() takes; on a mesh only for"
         " --expert-parallel, on one thread"),
    CHOICE("codec", codec, "device|host", "device", "where tagc compresses, and so has residuals and buffers: tagc.Options(codec=)"),
    TEXT(NULL, "json", json, NULL, NULL, "FILE", "file for the plan, too; - prints nothing else"),

    {"A mesh: with one of these, or a model by name, the plan is one of memory and bytes", "tensor-parallel",
     TAGC_OPTION_INT, TAGC_ROLE_RUN, AT(n_tensor), 1, 1024, NULL, "1", "N", "ranks that split each layer", NULL},
    TEXT(NULL, "sequence-parallel", sequence_parallel, "torch", "no", "HOW",
         "norms split along the sequence: torch (it keeps what it gathers for the backward pass), megatron (it gathers"
         " again), no; without a word torch"),
    INT("context-parallel", n_context, 1, 1024, NULL, "1", "ranks that split a sequence"),
    INT("pipeline-parallel", n_pipeline, 1, 1024, NULL, "1", "ranks that split the layers"),
    CHOICE("pipeline-schedule", schedule, "gpipe|1f1b|interleaved|zero-bubble", "1f1b", "of a pipeline"),
    INT("stages-per-rank", n_stages_per_rank, 1, 1024, "auto", "auto",
        "for interleaved and zero-bubble; auto: 2 with interleaved, else 1"),
    INT("micro-batches", micro_batches, 1, 65536, NULL, "1", "of a step"),
    INT("micro-batch-size", micro_batch_size, 1, 1 << 20, NULL, "1", "sequences of a micro-batch"),
    INT("sequence-length", sequence_length, 1, 1 << 26, NULL, "2048", "tokens of a sequence"),
    INT("expert-parallel", n_expert, 1, 65536, NULL, "1", "ranks that split experts"),
    INT("experts", experts, 1, 65536, "model", "model",
        "experts in place of each feed-forward, each of its size; model: the model's"),
    INT("experts-per-token", experts_per_token, 1, 65536, "model", "model", "model: the model's, or 2"),
    TEXT(NULL, "offload", offload, NULL, NULL, "LIST",
         "to the host's memory: parameters (with gradients and optimizer, as FSDP2 does), optimizer (with gradients),"
         " activations"),
    CHOICE("recompute", recompute, "none|attention|full", "none", "what the backward pass computes again"),
    TEXT(NULL, "pipeline-values", pipeline_values, NULL, "int8,int4", "F,B",
         "of compress_stage(): activations and gradients between hosts, each bf16, int8 or int4"),
    TEXT(NULL, "token-values", token_values, NULL, "int8,int8", "F,B",
         "of Collectives.tokens(): tokens of experts between hosts and their gradients, each bf16, int8 or int4"),
};
/* clang-format on */
enum { N_ROWS = sizeof rows / sizeof rows[0], MOST_RANKS = 65536 }; /* as of a tagc_comm */

static const char examples[] =
    "  # Does compression pay? Four hosts with one GPU each, for three networks between them.\n"
    "  tagc plan --params 1b --hosts 4 --link 1gbit,10gbit,25gbit\n"
    "\n"
    "  # Hosts with eight GPUs each, and a codec that takes no time: the most that one on the GPU could "
    "give.\n"
    "  tagc plan --params 7b --hosts 4 --gpus-per-host 8 --link 10gbit --codec-ns 0\n"
    "\n"
    "  # Tensor parallelism within hosts, a pipeline between them.\n"
    "  tagc plan --model llama-3-70b --hosts 16 --gpus-per-host 8 --tensor-parallel 8 --sequence-parallel "
    "\\\n"
    "      --pipeline-parallel 4 --micro-batches 16 --recompute attention --link 10gbit\n";

const tagc_command tagc_cluster_command = {
    .name = "plan",
    .summary = "memory, bytes and time of a model on a cluster, without running it",
    .usage = "[options]",
    .common = "params hosts gpus-per-host link accumulate codec-ns tensor-parallel "
              "pipeline-parallel json",
    .examples = examples,
    .options = rows,
    .n_options = N_ROWS};

/* ---- numbers with a unit: 10gbit, 50us, 7b ---- */

typedef struct unit {
    const char *name;
    double factor;
} unit;

/* A number and one of the units, in any case: `least` to 1e15 of the unit with factor 1. 0 if text is something else. */
static int read_number(const char *text, const unit *units, double least, double *out) {
    char *end;
    if (!*text || strlen(text) >= 32 || !strchr("0123456789.", text[0])) return 0;
    double value = strtod(text, &end);
    /* strtod takes hexadecimal numbers, too. */
    if (strspn(text, "+-.0123456789eE") < (size_t)(end - text)) return 0;
    for (; units->name; units++)
        if (strcasecmp(end, units->name) == 0) {
            *out = value * units->factor;
            return *out >= least && *out <= 1e15;
        }
    return 0;
}

static const unit rate_units[] = {{"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}, {"tbit", 1e12}, {NULL, 0}};
static const unit time_units[] = {{"us", 1e-6}, {"ms", 1e-3}, {"s", 1}, {NULL, 0}};

static const unit size_units[] = {{"", 1},    {"k", 1e3},  {"m", 1e6}, {"b", 1e9},
                                  {"g", 1e9}, {"t", 1e12}, {NULL, 0}};

/* An Ethernet frame of 1538 bytes on the line carries 1448 of TCP's. */
double tagc_cluster_payload(double bits_per_s) {
    return bits_per_s / 8 * (1448.0 / 1538.0);
}

const char *tagc_cluster_sequence_name(int sequence) {
    static const char *const names[] = {"no", "torch", "megatron"};
    return names[sequence];
}

/* ---- lists ---- */

/* Copies the word at *at up to a comma, and moves *at behind that. Returns 0 behind the last word. */
static int next_word(const char **at, char word[48]) {
    if (!*at) return 0;
    size_t n = strcspn(*at, ",");
    snprintf(word, 48, "%.*s", (int)n, *at);
    *at = (*at)[n] ? *at + n + 1 : NULL;
    return 1;
}

static tagc_status read_links(tagc_cluster *c) {
    const char *text = c->values.link ? c->values.link : ""; /* options have no empty text */
    char word[48];
    for (const char *at = text; next_word(&at, word); c->n_links++) {
        if (c->n_links == TAGC_TIMES_MAX_LINKS)
            return tagc_fail(TAGC_ERR_ARGUMENT, "--link has more than %d rates", TAGC_TIMES_MAX_LINKS);
        if (!read_number(word, rate_units, 1, &c->links[c->n_links]))
            return tagc_fail(
                TAGC_ERR_ARGUMENT,
                "--link is \"%.60s\", allowed: rates with kbit, mbit, gbit or tbit, as in 1gbit,10gbit",
                text);
    }
    return TAGC_OK;
}

static tagc_status read_offload(const char *text, int *out) {
    static const char *const names[] = {"parameters", "optimizer", "activations"};
    static const int bits[] = {TAGC_MESH_OFFLOAD_PARAMETERS, TAGC_MESH_OFFLOAD_OPTIMIZER,
                               TAGC_MESH_OFFLOAD_ACTIVATIONS};
    char word[48];
    for (const char *at = text; next_word(&at, word);) {
        int bit = 0;
        for (int i = 0; i < 3; i++)
            if (strcmp(word, names[i]) == 0) bit = bits[i];
        if (!bit)
            return tagc_fail(
                TAGC_ERR_ARGUMENT,
                "--offload is \"%.60s\", allowed: parameters, optimizer, activations, with commas between",
                text);
        *out |= bit;
    }
    return TAGC_OK;
}

static tagc_status read_values(const char *option, const char *text, int *forward, int *backward) {
    static const char *const names[] = {"bf16", "int8", "int4"};
    static const int formats[] = {TAGC_FORMAT_BF16, TAGC_FORMAT_INT8, TAGC_FORMAT_INT4};
    int *const out[] = {forward, backward};
    char word[48];
    int n = 0, is_right = 1;
    for (const char *at = text; next_word(&at, word); n++) {
        int format = -1;
        for (int i = 0; i < 3; i++)
            if (strcmp(word, names[i]) == 0) format = formats[i];
        is_right &= format >= 0 && n < 2;
        if (n < 2) *out[n] = format;
    }
    if (is_right && n == 2) return TAGC_OK;
    return tagc_fail(
        TAGC_ERR_ARGUMENT,
        "--%s is \"%.40s\", allowed: two of bf16, int8 and int4, forward and backward, as in int8,int4",
        option, text ? text : "");
}

static tagc_status read_sequence(const char *text, int *out) {
    for (int i = TAGC_MESH_WHOLE_SEQUENCE; i <= TAGC_MESH_SEQUENCE_REGATHER; i++)
        if (text && strcmp(text, tagc_cluster_sequence_name(i)) == 0) {
            *out = i;
            return TAGC_OK;
        }
    return tagc_fail(TAGC_ERR_ARGUMENT, "--sequence-parallel is \"%.40s\", allowed: no, torch, megatron",
                     text ? text : "");
}

/* ---- the model ---- */

static tagc_status refuse_model(const char *option, const char *text) {
    char names[256] = "";
    const char *nearest = NULL;
    int least = -1;
    for (const tagc_mesh_named *at = tagc_mesh_models; at->name; at++) {
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", at->name);
        if (tagc_options_is_nearer(text, at->name, &least)) nearest = at->name;
    }
    return tagc_fail(TAGC_ERR_ARGUMENT,
                     "--%s is \"%.40s\", allowed: %g to %g, as in 350m, 1b or 7e9, or one of %s%s%s%s",
                     option, text, TAGC_MESH_LEAST_PARAMS, TAGC_MESH_MOST_PARAMS, names,
                     nearest ? "; did you mean \"" : "", nearest ? nearest : "", nearest ? "\"?" : "");
}

/* Two names of one option. */
static tagc_status check_twice(const tagc_parsed *parsed, const char *one, const char *other) {
    if (!tagc_options_given(parsed, one) || !tagc_options_given(parsed, other)) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "--%s and --%s say the same thing twice; give one", one, other);
}

static tagc_status read_model(const tagc_parsed *parsed, tagc_cluster *c) {
    const char *option = tagc_options_given(parsed, "model") ? "model" : "params";
    const char *text = c->values.params ? c->values.params : "";
    TAGC_TRY(check_twice(parsed, "params", "model"));
    TAGC_TRY(check_twice(parsed, "gpus-per-host", "ranks-per-host"));
    const tagc_mesh_named *named = tagc_mesh_find(text);
    if (named) {
        c->name = named->name;
        c->question.model = named->model;
        return TAGC_OK;
    }
    int is_size = read_number(text, size_units, 1e-300, &c->n_params);
    if (!is_size || c->n_params < TAGC_MESH_LEAST_PARAMS || c->n_params > TAGC_MESH_MOST_PARAMS)
        return refuse_model(option, text);
    c->question.model = tagc_mesh_gpt(c->n_params, (int)c->values.sequence_length);
    return TAGC_OK;
}

/* Experts in place of the feed-forwards of the model. */
static tagc_status read_experts(const tagc_cluster_values *v, tagc_mesh_model *m) {
    if (v->experts > 0) {
        int n_active = m->n_experts > 1 ? m->n_active : 2;
        m->n_experts = (int)v->experts;
        m->n_active = n_active < m->n_experts ? n_active : m->n_experts;
    }
    if (v->experts_per_token > 0 && m->n_experts == 1)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--experts-per-token is given, but the model has no experts: give --experts, too");
    if (v->experts_per_token > 0) m->n_active = (int)v->experts_per_token;
    return TAGC_OK;
}

/* ---- the mesh ---- */

static tagc_status read_mesh(const tagc_parsed *parsed, tagc_cluster *c) {
    static const char *const of_batch[] = {"tokens", "accumulate"};
    static const char *const of_times[] = {"host-link", "latency", "codec-ns"};
    static const char *const of_pipeline[] = {"pipeline-schedule", "stages-per-rank", "pipeline-values"};
    const tagc_cluster_values *v = &c->values;
    tagc_mesh_question *q = &c->question;
    for (size_t i = 0; i < sizeof of_batch / sizeof of_batch[0]; i++)
        if (tagc_options_given(parsed, of_batch[i]))
            return tagc_fail(
                TAGC_ERR_ARGUMENT,
                "--%s is not for a mesh, where a step has --micro-batches of --micro-batch-size sequences of "
                "--sequence-length",
                of_batch[i]);
    for (size_t i = 0; i < (v->n_expert > 1 ? 1 : 3); i++) /* tokens of experts have the last two */
        if (tagc_options_given(parsed, of_times[i]))
            return tagc_fail(TAGC_ERR_ARGUMENT, "--%s is not for a mesh, of which nothing is simulated",
                             of_times[i]);
    for (size_t i = 0; i < sizeof of_pipeline / sizeof of_pipeline[0]; i++)
        if (v->n_pipeline == 1 && tagc_options_given(parsed, of_pipeline[i]))
            return tagc_fail(TAGC_ERR_ARGUMENT, "--%s is given, but --pipeline-parallel is 1",
                             of_pipeline[i]);
    TAGC_TRY(read_experts(v, &q->model));
    TAGC_TRY(read_sequence(v->sequence_parallel, &q->sequence));
    TAGC_TRY(read_offload(v->offload, &q->offload));
    q->codec_on_host = v->codec == TAGC_CODEC_ON_HOST;
    if (v->n_expert == 1 && tagc_options_given(parsed, "token-values"))
        return tagc_fail(TAGC_ERR_ARGUMENT, "--token-values is given, but --expert-parallel is 1");
    TAGC_TRY(read_values("pipeline-values", v->pipeline_values, &q->forward, &q->backward));
    TAGC_TRY(read_values("token-values", v->token_values, &q->token_forward, &q->token_backward));
    q->world_size = (int)(v->hosts * v->gpus_per_host);
    q->ranks_per_host = (int)v->gpus_per_host;
    q->n_tensor = (int)v->n_tensor;
    q->n_context = (int)v->n_context;
    q->n_pipeline = (int)v->n_pipeline;
    q->n_expert = (int)v->n_expert;
    q->n_sequences = (int)v->micro_batch_size;
    q->n_tokens = (int)v->sequence_length;
    q->n_micro_batches = (int)v->micro_batches;
    q->schedule = v->schedule;
    q->n_stages_per_rank = v->n_stages_per_rank > 0               ? (int)v->n_stages_per_rank
                           : v->schedule == TAGC_MESH_INTERLEAVED ? 2
                                                                  : 1;
    q->recompute = v->recompute;
    tagc_blocks_options blocks; /* as compress_stage() has them by default */
    tagc_blocks_options_init(&blocks);
    q->block = blocks.block;
    return TAGC_OK;
}

tagc_status tagc_cluster_read(const tagc_parsed *parsed) {
    tagc_cluster *c = parsed->values;
    const tagc_cluster_values *v = &c->values;
    TAGC_TRY(read_model(parsed, c));
    TAGC_TRY(read_links(c));
    if (v->hosts * v->gpus_per_host > MOST_RANKS)
        return tagc_fail(
            TAGC_ERR_ARGUMENT, "--hosts %d with --gpus-per-host %d are %d ranks, allowed: at most %d",
            (int)v->hosts, (int)v->gpus_per_host, (int)(v->hosts * v->gpus_per_host), MOST_RANKS);
    if (!v->latency || !read_number(v->latency, time_units, 0, &c->latency_s))
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--latency is \"%.40s\", allowed: a number with us, ms or s, as in 50us",
                         v->latency ? v->latency : "");
    if (!v->host_link || !read_number(v->host_link, rate_units, 1, &c->host_link))
        return tagc_fail(
            TAGC_ERR_ARGUMENT,
            "--host-link is \"%.40s\", allowed: a number with kbit, mbit, gbit or tbit, as in 80gbit",
            v->host_link ? v->host_link : "");
    if (tagc_options_given(parsed, "json") && !v->json)
        return tagc_fail(TAGC_ERR_ARGUMENT, "--json is \"\", allowed: a file, or -");
    c->is_mesh = c->name != NULL;
    int first_of_mesh = tagc_options_find(parsed->command, "tensor-parallel");
    for (int i = first_of_mesh; i < N_ROWS; i++) c->is_mesh |= parsed->given[i] != 0;
    c->is_measured = v->codec_ns < 0;
    c->codec_ns = v->codec_ns;
    return c->is_mesh ? read_mesh(parsed, c) : TAGC_OK;
}
