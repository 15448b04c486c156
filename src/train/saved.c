/* The command's part of a checkpoint, as JSON. */
#include "train/saved.h"

#include "options/train_options.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { VALUE_BYTES = 4096 };

static const struct {
    const char *name;
    size_t offset;
} model_fields[] = {
    {"n_layer", offsetof(tagc_gpt2_config, n_layer)},
    {"n_head", offsetof(tagc_gpt2_config, n_head)},
    {"n_embd", offsetof(tagc_gpt2_config, n_embd)},
    {"block_size", offsetof(tagc_gpt2_config, block_size)},
    {"vocab_size", offsetof(tagc_gpt2_config, vocab_size)},
    {"tied", offsetof(tagc_gpt2_config, tied)},
};
enum { N_MODEL_FIELDS = sizeof model_fields / sizeof model_fields[0] };

json_t *tagc_saved_model(const tagc_gpt2_config *config) {
    json_t *object = json_object();
    for (int i = 0; i < N_MODEL_FIELDS; i++)
        json_object_set_new(object, model_fields[i].name,
                            json_integer(*(const int *)((const char *)config + model_fields[i].offset)));
    return object;
}

json_t *tagc_saved_options(const tagc_command *command, const void *values) {
    json_t *object = json_object();
    char text[VALUE_BYTES];
    for (int i = 0; i < command->n_options; i++) {
        tagc_options_get(command, values, i, text, sizeof text);
        json_object_set_new(object, command->options[i].name, json_string(text));
    }
    return object;
}

/* ---- the guard ---- */

static const struct {
    const char *name;
    size_t offset;
} guard_reals[] =
    {
        {"factor", offsetof(tagc_guard, factor)},
        {"residual_norm", offsetof(tagc_guard, residual_norm)},
        {"grad_norm", offsetof(tagc_guard, grad_norm)},
        {"loss", offsetof(tagc_guard, loss)},
        {"spread", offsetof(tagc_guard, spread)},
},
  guard_counts[] = {
      {"n_seen", offsetof(tagc_guard, n_seen)},
      {"n_calm", offsetof(tagc_guard, n_calm)},
      {"n_since", offsetof(tagc_guard, n_since)},
};
enum {
    N_GUARD_REALS = sizeof guard_reals / sizeof guard_reals[0],
    N_GUARD_COUNTS = sizeof guard_counts / sizeof guard_counts[0]
};

static json_t *guard_object(const tagc_guard *guard) {
    json_t *object = json_object();
    for (int i = 0; i < N_GUARD_REALS; i++) /* JSON has no number for NaN or Inf: leave it out */
        json_object_set_new(object, guard_reals[i].name,
                            json_real(*(const double *)((const char *)guard + guard_reals[i].offset)));
    for (int i = 0; i < N_GUARD_COUNTS; i++) {
        uint64_t count = *(const uint64_t *)((const char *)guard + guard_counts[i].offset);
        json_object_set_new(object, guard_counts[i].name, json_integer((json_int_t)count));
    }
    return object;
}

static tagc_status read_count(const json_t *object, const char *name, json_int_t max, json_int_t *out) {
    const json_t *value = json_object_get(object, name);
    if (!json_is_integer(value) || json_integer_value(value) < 0 || json_integer_value(value) > max)
        return tagc_fail(TAGC_ERR_CORRUPT, "the checkpoint's \"%s\" is missing or no number from 0 to %lld",
                         name, (long long)max);
    *out = json_integer_value(value);
    return TAGC_OK;
}

/* A guard that had seen a loss that is no number starts again. */
static tagc_status read_guard(const json_t *object, tagc_guard *out) {
    tagc_guard guard = {0};
    for (int i = 0; i < N_GUARD_REALS; i++) {
        const json_t *value = json_object_get(object, guard_reals[i].name);
        if (!value) return TAGC_OK;
        if (!json_is_number(value) || json_number_value(value) < 0)
            return tagc_fail(TAGC_ERR_CORRUPT, "the checkpoint's \"%s\" of the guard is no number from 0 on",
                             guard_reals[i].name);
        *(double *)((char *)&guard + guard_reals[i].offset) = json_number_value(value);
    }
    for (int i = 0; i < N_GUARD_COUNTS; i++) {
        json_int_t count = 0;
        TAGC_TRY(read_count(object, guard_counts[i].name, (json_int_t)1 << 62, &count));
        *(uint64_t *)((char *)&guard + guard_counts[i].offset) = (uint64_t)count;
    }
    *out = guard;
    return TAGC_OK;
}

/* ---- all of it ---- */

char *tagc_saved_write(const tagc_saved *saved, const tagc_command *command, const void *values) {
    json_t *root = json_object();
    json_object_set_new(root, "tagc", json_string(tagc_version()));
    json_object_set_new(root, "model", tagc_saved_model(&saved->model));
    json_object_set_new(root, "options", tagc_saved_options(command, values));
    json_object_set_new(root, "world_size", json_integer(saved->world_size));
    json_object_set_new(root, "position", json_integer((json_int_t)saved->position));
    json_object_set_new(root, "n_tokens", json_integer((json_int_t)saved->n_tokens));
    if (saved->fork_step > 0)
        json_object_set_new(root, "fork_step", json_integer((json_int_t)saved->fork_step));
    if (saved->guard.n_seen > 0) json_object_set_new(root, "guard", guard_object(&saved->guard));
    json_object_set_new(root, "best_val_loss",
                        isfinite(saved->best_val_loss) ? json_real(saved->best_val_loss) : json_null());
    json_object_set_new(root, "tokenizer", json_string(saved->tokenizer));
    char hash[17];
    snprintf(hash, sizeof hash, "%016" PRIx64, saved->data_hash);
    json_object_set_new(root, "data_n_tokens", json_integer((json_int_t)saved->data_n_tokens));
    json_object_set_new(root, "data_hash", json_string(hash));
    char *text = json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(17));
    json_decref(root);
    return text;
}

static tagc_status read_fields(const json_t *root, tagc_saved *out) {
    const json_t *model = json_object_get(root, "model"), *best = json_object_get(root, "best_val_loss");
    json_int_t value = 0;
    for (int i = 0; i < N_MODEL_FIELDS; i++) {
        TAGC_TRY(read_count(model, model_fields[i].name, 1 << 30, &value));
        *(int *)((char *)&out->model + model_fields[i].offset) = (int)value;
    }
    TAGC_TRY(tagc_gpt2_config_check(&out->model));
    TAGC_TRY(read_count(root, "world_size", 1 << 20, &value));
    out->world_size = (int)value;
    TAGC_TRY(read_count(root, "position", (json_int_t)1 << 62, &value));
    out->position = (uint64_t)value;
    TAGC_TRY(read_count(root, "n_tokens", (json_int_t)1 << 62, &value));
    out->n_tokens = (uint64_t)value;
    if (json_object_get(root, "fork_step")) {
        TAGC_TRY(read_count(root, "fork_step", (json_int_t)1 << 62, &value));
        out->fork_step = (uint64_t)value;
    }
    TAGC_TRY(read_guard(json_object_get(root, "guard"), &out->guard));
    out->best_val_loss = json_is_real(best) ? json_real_value(best) : (double)INFINITY;
    const char *tokenizer = json_string_value(json_object_get(root, "tokenizer"));
    snprintf(out->tokenizer, sizeof out->tokenizer, "%s", tokenizer ? tokenizer : "");
    const char *hash = json_string_value(json_object_get(root, "data_hash"));
    if (hash) {
        TAGC_TRY(read_count(root, "data_n_tokens", (json_int_t)1 << 62, &value));
        out->data_n_tokens = (uint64_t)value;
        out->data_hash = strtoull(hash, NULL, 16);
    }
    json_t *options = json_object_get(root, "options"), *option;
    const char *name;
    if (!json_is_object(options))
        return tagc_fail(TAGC_ERR_CORRUPT, "the checkpoint's \"options\" are missing");
    json_object_foreach(options, name, option) {
        if (!json_is_string(option))
            return tagc_fail(TAGC_ERR_CORRUPT, "the checkpoint's option \"%.40s\" is no text", name);
    }
    out->options = json_incref(options);
    return TAGC_OK;
}

tagc_status tagc_saved_read(const char *text, tagc_saved *out) {
    *out = (tagc_saved){0};
    json_error_t error;
    json_t *root = json_loads(text, 0, &error);
    if (!root) return tagc_fail(TAGC_ERR_CORRUPT, "the checkpoint's options are no JSON: %s", error.text);
    tagc_status status = read_fields(root, out);
    json_decref(root);
    return status;
}

void tagc_saved_destroy(tagc_saved *saved) {
    json_decref(saved->options);
    saved->options = NULL;
}

/* ---- options of other builds ---- */

/* What earlier builds had and saved, with what it says where it was off. */
static const struct {
    const char *name, *off;
} gone[] = {{"residual-decay", "1"}, {"local-momentum", "0"}, {"low-rank", "0"}, {"residual-bf16", "no"}};
enum { N_GONE = sizeof gone / sizeof gone[0] };

static const char *off_value(const char *name) {
    for (int i = 0; i < N_GONE; i++)
        if (strcmp(gone[i].name, name) == 0) return gone[i].off;
    return NULL;
}

/* Where builds before a default's change were silent, or said what no longer can be said. */
static const struct {
    const char *name, *text;
} before[] = {{"exchange", "packed"}, {"sparsity", "0.9875"},     {"values", "int4"}, {"mild", "dense"},
              {"mild-sparsity", "0"}, {"compressed-beta1", "-1"}, {"gentle", "no"}};
enum { N_BEFORE = sizeof before / sizeof before[0] };

static int says(const json_t *options, const char *name, const char *text) {
    const char *saved = json_string_value(json_object_get(options, name));
    return saved && strcmp(saved, text) == 0;
}

const char *tagc_saved_text(const json_t *options, const char *name) {
    const char *text = json_string_value(json_object_get(options, name));
    int is_before = json_object_get(options, gone[0].name) != NULL;
    for (int i = 0; !text && i < N_BEFORE; i++)
        if (strcmp(before[i].name, name) == 0) text = before[i].text;
    if (text && strcmp(name, "compressed-beta1") == 0 && strcmp(text, "-1") == 0) {
        text = json_string_value(json_object_get(options, "beta1"));
        return text ? text : "0.9";
    }
    if (is_before && strcmp(name, "mild") == 0 && says(options, "exchange", "auto") &&
        says(options, name, "dense"))
        return "int4";
    return text;
}

tagc_status tagc_saved_engine(const json_t *options, tagc_fsdp_options *out) {
    const tagc_command *command = &tagc_train_command;
    tagc_train_options values = {0};
    for (int i = 0; i < command->n_options; i++) {
        const char *name = command->options[i].name, *initial = command->options[i].initial;
        const json_t *value = json_object_get(options, name);
        const char *text = tagc_saved_text(options, name);
        char number[40];
        if (json_is_number(value) || json_is_boolean(value)) {
            if (json_is_number(value))
                snprintf(number, sizeof number, "%.17g", json_number_value(value));
            else
                snprintf(number, sizeof number, "%s", json_is_true(value) ? "yes" : "no");
            text = number;
        }
        if (json_is_object(value) || json_is_array(value))
            return tagc_fail(TAGC_ERR_CORRUPT, "options.%.40s is neither a text nor a number", name);
        if (!text) text = initial ? initial : "";
        TAGC_TRY(tagc_options_set(command, &values, i, text, "options of the result: "));
    }
    /* The names live in the result, which is closed after reading. */
    if (values.compress == TAGC_POLICY_NAMES)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "compress is names: arms of a profile need one of the other policies");
    values.compress_names = NULL;
    tagc_train_fsdp(&values, out);
    return TAGC_OK;
}

tagc_status tagc_saved_check_known(const tagc_saved *saved, const tagc_command *command,
                                   tagc_progress *progress) {
    const char *name;
    json_t *value;
    json_object_foreach(saved->options, name, value) {
        const char *text = json_string_value(value), *off = off_value(name);
        if (!text || tagc_options_find(command, name) >= 0 || (off && strcmp(text, off) == 0)) continue;
        if (off)
            return tagc_fail(TAGC_ERR_UNSUPPORTED,
                             "the checkpoint was made with --%s %.100s, which this build no longer has: go on"
                             " with the build that made it, or without that by --fork",
                             name, text);
        tagc_progress_say(progress, "note: the checkpoint has --%.40s %.100s, which this build does not know",
                          name, text);
    }
    return TAGC_OK;
}

tagc_status tagc_saved_merge_model(const tagc_saved *saved, const tagc_parsed *parsed, void *values) {
    static const char *const names[] = {"model",      "n-layer",    "n-head", "n-embd",
                                        "block-size", "vocab-size", "tied"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char *text = json_string_value(json_object_get(saved->options, names[i]));
        int row = tagc_options_find(parsed->command, names[i]);
        if (!text || parsed->given[row]) continue;
        TAGC_TRY(tagc_options_set(parsed->command, values, row, text, "in the checkpoint, "));
    }
    return TAGC_OK;
}

/* NULL: of this start of the run, or nothing is saved. */
static const char *text_of(const tagc_saved *saved, const tagc_option *option) {
    int is_own = option->role == TAGC_ROLE_RUN || option->role == TAGC_ROLE_LOCAL;
    return is_own ? NULL : tagc_saved_text(saved->options, option->name);
}

tagc_status tagc_saved_merge(const tagc_saved *saved, const tagc_parsed *parsed, void *values,
                             tagc_progress *progress) {
    const tagc_command *command = parsed->command;
    char now[VALUE_BYTES], then[VALUE_BYTES];
    for (int i = 0; i < command->n_options; i++) {
        const char *text = text_of(saved, &command->options[i]);
        if (text && !parsed->given[i])
            TAGC_TRY(tagc_options_set(command, values, i, text, "in the checkpoint, "));
    }
    if (command->resolve)
        command->resolve(values); /* so that an auto that is given is compared by what it means */
    for (int i = 0; i < command->n_options; i++) {
        const tagc_option *option = &command->options[i];
        const char *text = text_of(saved, option);
        if (!text || !parsed->given[i]) continue;
        tagc_options_get(command, values, i, now, sizeof now);
        snprintf(then, sizeof then, "%s", text);
        if (strcmp(now, then) != 0 && option->role == TAGC_ROLE_FIXED) {
            return tagc_fail(
                TAGC_ERR_MISMATCH,
                "--%s is \"%.100s\", but the checkpoint was made with \"%.100s\" and cannot go on"
                " otherwise",
                option->name, now, then);
        } else if (strcmp(now, then) != 0 && option->role == TAGC_ROLE_FREE) {
            tagc_progress_say(progress, "note: --%s %s, where the checkpoint had %s", option->name, now,
                              then);
        }
    }
    return TAGC_OK;
}
