/* tagc eval: the validation loss of a model that is already there. */
#include "cli/commands.h"
#include "cli/trained.h"
#include "core/status.h"
#include "launch/hosts.h"
#include "train/engine.h"
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>

typedef struct eval_options {
    const char *from, *model, *data, *config;
    int64_t batch_size, seq_len, n_batches, ranks, blas_threads;
    int transport, json;
    double timeout;
} eval_options;

#define AT(field) offsetof(eval_options, field)
/* clang-format off */
static const tagc_option rows[] = {
    TAGC_ROW_FROM(AT(from)),
    TAGC_ROW_MODEL(AT(model)),
    {NULL, "data", TAGC_OPTION_TEXT, TAGC_ROLE_PLACE, AT(data), 0, 0, NULL, NULL, "DIR|FILE",
     "tokens: a folder with val.bin, or one file"},
    {"How", "batches", TAGC_OPTION_INT, 0, AT(n_batches), 1, 1e9, "all", "all", "N",
     "batches per rank; all reads the file once, less what does not fill a batch"},
    {NULL, "batch-size", TAGC_OPTION_INT, 0, AT(batch_size), 1, 65536, NULL, "8", "N", "sequences per rank and batch"},
    {NULL, "seq-len", TAGC_OPTION_INT, 0, AT(seq_len), 1, 1048576, "block-size", "block-size", "N",
     "tokens per sequence"},
    {NULL, "json", TAGC_OPTION_FLAG, 0, AT(json), 0, 0, NULL, "no", NULL, "print one JSON object instead of a sentence"},
    {"Ranks and machine", "ranks", TAGC_OPTION_INT, TAGC_ROLE_LOCAL, AT(ranks), 1, 1024, NULL, "1", "N",
     "ranks as threads of this process"},
    {NULL, "transport", TAGC_OPTION_CHOICE, TAGC_ROLE_LOCAL, AT(transport), 0, 0, "auto|local|mpi", "auto", NULL,
     "auto: mpi when started by mpirun, else local"},
    {NULL, "timeout", TAGC_OPTION_REAL, 0, AT(timeout), 0.001, 1e6, NULL, "120", "X",
     "seconds after which a silent peer counts as dead"},
    {NULL, "blas-threads", TAGC_OPTION_INT, TAGC_ROLE_LOCAL, AT(blas_threads), 1, 256, "auto", "auto", "N",
     "threads of a matrix product, per process"},
    TAGC_ROW_CONFIG(AT(config)),
};
/* clang-format on */

static const tagc_command command = {
    .name = "eval",
    .summary = "validation loss of a checkpoint or of published weights",
    .usage = "--from PATH --data DIR [options]",
    .examples =
        "  tagc eval --from runs/first --data data/books\n"
        "  tagc eval --from gpt2/model.safetensors --data openwebtext/val.bin --batch-size 1 --batches 100\n",
    .options = rows,
    .n_options = sizeof rows / sizeof rows[0],
    .needs = "from data"};

typedef struct eval_state {
    tagc_trained trained;
    tagc_tokens *tokens;
    tagc_evaluation evaluation;
    tagc_workspace workspace;
} eval_state;

static tagc_status open_tokens(tagc_rank *rank, const eval_options *options, int n_tokens,
                               eval_state *state) {
    TAGC_TRY(tagc_data_open(options->data, TAGC_DATA_VAL, &state->tokens));
    TAGC_TRY(tagc_engine_check_tokens(state->trained.saved.tokenizer, state->tokens));
    uint64_t n_batches = options->n_batches ? (uint64_t)options->n_batches : UINT64_MAX;
    return tagc_evaluation_open(rank, &state->trained.model, state->tokens, (int)options->batch_size,
                                n_tokens, n_batches, &state->evaluation);
}

static tagc_status print_result(const eval_options *options, const eval_state *state, double loss,
                                uint64_t n_tokens) {
    if (options->json) {
        json_t *result = json_object();
        /* JSON has no NaN: what is none becomes null. */
        json_object_set_new(result, "val_loss", isfinite(loss) ? json_real(loss) : json_null());
        json_object_set_new(result, "perplexity", isfinite(exp(loss)) ? json_real(exp(loss)) : json_null());
        json_object_set_new(result, "n_tokens", json_integer((json_int_t)n_tokens));
        json_object_set_new(result, "from", json_string(state->trained.path));
        json_dumpf(result, stdout, JSON_REAL_PRECISION(17));
        json_decref(result);
        putchar('\n');
    } else {
        printf("%s: validation loss %.4f (perplexity %.2f) over %" PRIu64 " tokens\n", state->trained.path,
               loss, exp(loss), n_tokens);
    }
    if (fflush(stdout) != 0 || ferror(stdout))
        return tagc_fail(TAGC_ERR_IO, "the result could not be written");
    return TAGC_OK;
}

static tagc_status evaluate(tagc_rank *rank, const eval_options *options, eval_state *state) {
    TAGC_TRY(tagc_trained_open(rank, options->from, options->model, &state->trained));
    int n_tokens = options->seq_len ? (int)options->seq_len : state->trained.model.block_size;
    if (n_tokens > state->trained.model.block_size)
        return tagc_fail(TAGC_ERR_ARGUMENT, "--seq-len is %d, allowed: 1 to the model's block-size of %d",
                         n_tokens, state->trained.model.block_size);
    TAGC_TRY(open_tokens(rank, options, n_tokens, state));
    const tagc_evaluation *e = &state->evaluation;
    uint64_t n_bytes;
    int n_here;
    TAGC_TRY(tagc_gpt2_activation_bytes(&state->trained.model, e->n_batch, n_tokens, &n_bytes));
    TAGC_TRY(tagc_ranks_here(rank, &n_here));
    TAGC_TRY(tagc_check_memory("a batch", n_bytes, n_here));
    TAGC_TRY(tagc_workspace_open(&state->trained.model, e->n_batch, n_tokens, &state->workspace));
    double loss = 0;
    TAGC_TRY(tagc_evaluate(rank, state->trained.fsdp, &state->workspace, e, &loss));
    if (rank->rank != 0) return TAGC_OK;
    return print_result(options, state, loss, e->n_tokens);
}

static tagc_status eval_rank(tagc_rank *rank, void *context) {
    eval_state state = {0};
    tagc_status status = tagc_rank_finish(rank, evaluate(rank, context, &state));
    tagc_workspace_close(&state.workspace);
    tagc_trained_close(&state.trained);
    tagc_loader_destroy(state.evaluation.loader);
    tagc_tokens_close(state.tokens);
    return status;
}

/* Before MPI starts, so that what is missing for all ranks ends each of them by itself. */
static tagc_status find_inputs(const eval_options *options) {
    tagc_trained trained = {0};
    tagc_tokens *tokens = NULL;
    TAGC_TRY(tagc_trained_find(options->from, &trained));
    TAGC_TRY(tagc_data_open(options->data, TAGC_DATA_VAL, &tokens));
    tagc_tokens_close(tokens);
    return TAGC_OK;
}

static int run(tagc_parsed *parsed) {
    const eval_options *options = parsed->values;
    if (!tagc_ranks_is_local(options->transport)) {
        tagc_status status = find_inputs(options);
        if (status != TAGC_OK) return tagc_command_end(status);
    }
    tagc_launch launch = {.n_ranks = tagc_options_given(parsed, "ranks") ? (int)options->ranks : 0,
                          .transport = options->transport,
                          .timeout_s = options->timeout,
                          .blas_threads = (int)options->blas_threads};
    return tagc_ranks_run(&launch, eval_rank, parsed->values);
}

const tagc_entry tagc_entry_eval = {&command, sizeof(eval_options), run, NULL};
