/* tagc generate: continues a text, token by token, printing each as it comes. Tokens that are not bytes go in and out as their
 * numbers, since only their tokenizer knows their text. */
#include "cli/commands.h"
#include "cli/trained.h"
#include "core/status.h"
#include "data/data.h"
#include "train/engine.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct generate_options {
    const char *from, *model, *prompt, *config;
    int64_t n_tokens, top_k, seed, blas_threads;
    double temperature;
} generate_options;

#define AT(field) offsetof(generate_options, field)
/* clang-format off */
static const tagc_option rows[] = {
    TAGC_ROW_FROM(AT(from)),
    TAGC_ROW_MODEL(AT(model)),
    {NULL, "prompt", TAGC_OPTION_TEXT, 0, AT(prompt), 0, 0, NULL, NULL, "TEXT",
     "beginning of the text; without it the model begins a text of its own. Numbers of tokens, apart by blanks, where tokens are not bytes"},
    {NULL, "n-tokens", TAGC_OPTION_INT, 0, AT(n_tokens), 1, 1e9, NULL, "200", "N", "most tokens to add"},
    {"Sampling", "temperature", TAGC_OPTION_REAL, 0, AT(temperature), 0, 100, NULL, "0.8", "X",
     "randomness: 0 always takes the likeliest token, 1 samples with the model's probabilities"},
    {NULL, "top-k", TAGC_OPTION_INT, 0, AT(top_k), 1, 16777216, "all", "all", "N", "number of the likeliest tokens that are sampled from"},
    {NULL, "seed", TAGC_OPTION_INT, 0, AT(seed), 0, 4294967295.0, NULL, "0", "N", "the same seed gives the same text"},
    {"Machine", "blas-threads", TAGC_OPTION_INT, TAGC_ROLE_LOCAL, AT(blas_threads), 1, 256, "auto", "auto", "N",
     "threads of a matrix product"},
    TAGC_ROW_CONFIG(AT(config)),
};
/* clang-format on */

static const tagc_command command = {.name = "generate",
                                     .summary = "continue a text",
                                     .usage = "--from PATH [--prompt TEXT] [options]",
                                     .examples = "  tagc generate --from runs/first --prompt \"The file \"\n"
                                                 "  tagc generate --from gpt2 --prompt \"7454 2402 257 640\" "
                                                 "--top-k 40   # GPT-2's tokens of \"Once upon a time\"\n",
                                     .options = rows,
                                     .n_options = sizeof rows / sizeof rows[0],
                                     .needs = "from"};

typedef struct generate_state {
    tagc_trained trained;
    int has_bytes; /* tokens are bytes */
    tagc_gpt2 *model;
    int *tokens; /* (n_prompt + n_tokens) */
    size_t n_tokens;
    float *scratch; /* (vocab_size) */
} generate_state;

/* tokens (as many as prompt has bytes). */
static tagc_status read_numbers(const char *prompt, generate_state *state) {
    long most = state->trained.model.vocab_size - 1;
    for (const char *p = prompt; p[strspn(p, " \t\n")];) {
        char *end;
        long token = strtol(p, &end, 10);
        if (end == p || (*end && !strchr(" \t\n", *end)) || token < 0 || token > most) {
            state->n_tokens = 0;
            break;
        }
        state->tokens[state->n_tokens++] = (int)token;
        p = end;
    }
    if (state->n_tokens > 0) return TAGC_OK;
    return tagc_fail(
        TAGC_ERR_ARGUMENT,
        "--prompt is \"%.60s\": the model's tokens are no bytes%s%s, so numbers of tokens from 0 to %ld "
        "are needed, apart by blanks",
        prompt, *state->trained.saved.tokenizer ? " but those of " : "", state->trained.saved.tokenizer,
        most);
}

static tagc_status encode_prompt(const generate_options *options, generate_state *state) {
    const char *prompt = options->prompt ? options->prompt : "";
    size_t n_bytes = strlen(prompt);
    state->tokens = calloc(n_bytes + 1 + (size_t)options->n_tokens, sizeof *state->tokens);
    if (!state->tokens) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for the text");
    if (!state->has_bytes) return read_numbers(prompt, state);
    for (size_t i = 0; i < n_bytes; i++) state->tokens[state->n_tokens++] = (unsigned char)prompt[i];
    /* A text of its own begins where another ended. */
    if (n_bytes == 0) state->tokens[state->n_tokens++] = TAGC_BYTES_END_OF_TEXT;
    return TAGC_OK;
}

/* Prints text for people. A model that has learnt little makes control characters at random; a terminal gets only newlines and
 * tabs of them. *last is the byte before, 0 at the start. */
static void print_text(const char *text, size_t n_bytes, int to_terminal, unsigned char *last) {
    for (size_t i = 0; i < n_bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        int is_control = (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f;
        is_control |= *last == 0xc2 && c >= 0x80 && c < 0xa0; /* U+0080 to U+009F in UTF-8 */
        putchar(to_terminal && is_control ? '?' : c);
        *last = c;
    }
}

static tagc_status continue_text(const generate_options *options, generate_state *state) {
    tagc_params params = tagc_engine_params(state->trained.fsdp);
    size_t block = (size_t)state->trained.model.block_size;
    int vocab_size = state->trained.model.vocab_size, top_k = (int)options->top_k;
    uint64_t rng = (uint64_t)options->seed;
    int to_terminal = isatty(STDOUT_FILENO);
    unsigned char last = 0;
    if (state->has_bytes && options->prompt)
        print_text(options->prompt, strlen(options->prompt), to_terminal, &last);
    for (size_t i = 0; !state->has_bytes && i < state->n_tokens; i++) printf("%d ", state->tokens[i]);
    if (state->has_bytes && vocab_size > TAGC_BYTES_VOCAB_SIZE) vocab_size = TAGC_BYTES_VOCAB_SIZE;
    if (top_k > vocab_size) top_k = vocab_size;
    for (int64_t i = 0; i < options->n_tokens; i++) {
        size_t n = state->n_tokens < block ? state->n_tokens : block;
        TAGC_TRY(tagc_fsdp_forward_begin(state->trained.fsdp, 0));
        TAGC_TRY(tagc_gpt2_forward(state->model, &params, state->tokens + state->n_tokens - n, NULL, 1,
                                   (int)n, NULL));
        int token = tagc_gpt2_sample(tagc_gpt2_logits(state->model), vocab_size, options->temperature, top_k,
                                     &rng, state->scratch);
        if (state->has_bytes && token == TAGC_BYTES_END_OF_TEXT) break;
        state->tokens[state->n_tokens++] = token;
        const char byte = (char)token;
        if (state->has_bytes)
            print_text(&byte, 1, to_terminal, &last);
        else
            printf("%d ", token);
        fflush(stdout);
    }
    putchar('\n');
    if (fflush(stdout) != 0 || ferror(stdout)) return tagc_fail(TAGC_ERR_IO, "the text could not be written");
    return TAGC_OK;
}

static tagc_status generate(tagc_rank *rank, const generate_options *options, generate_state *state) {
    TAGC_TRY(tagc_trained_open(rank, options->from, options->model, &state->trained));
    state->has_bytes = tagc_trained_has_bytes(&state->trained);
    TAGC_TRY(encode_prompt(options, state));
    TAGC_TRY(tagc_gpt2_create(&state->trained.model, 1, state->trained.model.block_size, &state->model));
    state->scratch = calloc((size_t)state->trained.model.vocab_size, sizeof *state->scratch);
    if (!state->scratch) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for sampling");
    return continue_text(options, state);
}

static tagc_status generate_rank(tagc_rank *rank, void *context) {
    generate_state state = {0};
    tagc_status status = tagc_rank_finish(rank, generate(rank, context, &state));
    tagc_gpt2_destroy(state.model);
    tagc_trained_close(&state.trained);
    free(state.tokens);
    free(state.scratch);
    return status;
}

static int run(tagc_parsed *parsed) {
    const generate_options *options = parsed->values;
    tagc_launch launch = {.n_ranks = 1,
                          .transport = TAGC_LAUNCH_LOCAL,
                          .timeout_s = 120,
                          .blas_threads = (int)options->blas_threads};
    return tagc_ranks_run(&launch, generate_rank, parsed->values);
}

const tagc_entry tagc_entry_generate = {&command, sizeof(generate_options), run, NULL};
