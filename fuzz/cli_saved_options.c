/* What a run stores with a checkpoint, from anywhere, and a start that goes on from it with any words beside: an error, or options that a
 * run could have been given.
 *
 * Input: words of the command line, each up to a line's end, an empty line, then the JSON of the checkpoint. */
#include "options/saved_options.h"
#include "options/train_options.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { MOST_WORDS = 16 };

static void require(int holds) {
    if (!holds) abort();
}

static void merge(const tagc_saved *saved, int argc, char **argv) {
    tagc_train_options options = {0};
    tagc_parsed parsed = {0};
    tagc_progress silent = {.quiet = 1};
    if (tagc_options_parse(&tagc_train_command, argc, argv, &options, &parsed) == TAGC_OK && !parsed.help) {
        tagc_status known = tagc_saved_check_known(saved, &tagc_train_command);
        if (known == TAGC_OK && tagc_saved_merge(saved, &parsed, &options, &silent) == TAGC_OK) {
            require((options.sparsity >= 0 && options.sparsity <= 1) || options.sparsity == -1);
            require(isfinite(options.lr) && options.accumulate >= 1);
            (void)tagc_train_check(&options);
        }
        tagc_train_options forked = options;
        (void)tagc_saved_merge_model(saved, &parsed, &forked);
    }
    tagc_options_destroy(&parsed);
}

/* What was read can be written, and read again. */
static void check_again(const tagc_saved *saved) {
    tagc_saved again;
    char *text = tagc_saved_write(saved, saved->options);
    require(text != NULL && tagc_saved_read(text, &again) == TAGC_OK);
    require(again.n_tokens == saved->n_tokens && again.world_size == saved->world_size &&
            json_equal(again.options, saved->options));
    tagc_saved_destroy(&again);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    char *words[MOST_WORDS];
    int n_words = 0;
    char *text = malloc(n_bytes + 1);
    require(text != NULL);
    if (n_bytes) memcpy(text, data, n_bytes);
    text[n_bytes] = 0;
    char *at = text, *end;
    while (*at && *at != '\n' && n_words < MOST_WORDS && (end = strchr(at, '\n'))) {
        *end = 0;
        if (strstr(at, "config")) *at = 0; /* no file is read */
        words[n_words++] = at;
        at = end + 1;
    }
    tagc_saved saved;
    if (tagc_saved_read(at, &saved) == TAGC_OK) {
        check_again(&saved);
        merge(&saved, n_words, words);
        tagc_saved_destroy(&saved);
    }
    free(text);
    return 0;
}
