/* Options as text: saved, compared over ranks, and those of a command line merged into saved ones. */
#include "options/saved_options.h"

#include "core/status.h"
#include "options/train_options.h"
#include <stdlib.h>
#include <string.h>

enum { VALUE_BYTES = 512 }; /* of what is no text */

/* Of any length: a text where it is, other values in `room`. */
static const char *value_of(const tagc_command *command, const void *values, int i,
                            char text_of_value[VALUE_BYTES]) {
    const tagc_option *option = &command->options[i];
    if (option->type != TAGC_OPTION_TEXT) {
        tagc_options_get(command, values, i, text_of_value, VALUE_BYTES);
        return text_of_value;
    }
    const char *held = *(const char *const *)((const char *)values + option->offset);
    return held ? held : "";
}

json_t *tagc_saved_options(const tagc_command *command, const void *values) {
    json_t *object = json_object();
    char text_of_value[VALUE_BYTES];
    for (int i = 0; i < command->n_options; i++)
        json_object_set_new(object, command->options[i].name,
                            json_string(value_of(command, values, i, text_of_value)));
    return object;
}

/* Of this start of the run. */
static int is_own(const tagc_option *option) {
    return option->role == TAGC_ROLE_RUN || option->role == TAGC_ROLE_LOCAL;
}

tagc_status tagc_saved_check_text(const tagc_command *command, const void *values) {
    char text_of_value[VALUE_BYTES];
    for (int i = 0; i < command->n_options; i++) {
        json_t *text = json_string(value_of(command, values, i, text_of_value));
        int can_be_saved = text != NULL || is_own(&command->options[i]);
        json_decref(text);
        if (!can_be_saved)
            return tagc_fail(
                TAGC_ERR_ARGUMENT,
                "--%s is no UTF-8 text, and a checkpoint cannot hold it: use another name, such as"
                " that of a link",
                command->options[i].name);
    }
    return TAGC_OK;
}

tagc_status tagc_saved_check_known(const tagc_saved *saved, const tagc_command *command) {
    const char *name;
    json_t *value;
    json_object_foreach(saved->options, name, value) {
        if (tagc_options_find(command, name) < 0)
            return tagc_fail(TAGC_ERR_UNSUPPORTED,
                             "the checkpoint has --%.40s %.100s, which this build does not know: go on with"
                             " the build that made it, or fork it",
                             name, json_string_value(value));
    }
    return TAGC_OK;
}

tagc_status tagc_saved_merge_model(const tagc_saved *saved, const tagc_parsed *parsed, void *values) {
    for (int i = 0; i < TAGC_TRAIN_N_SHAPE; i++) {
        const char *text = json_string_value(json_object_get(saved->options, tagc_train_shape[i]));
        int row = tagc_options_find(parsed->command, tagc_train_shape[i]);
        if (!text || parsed->given[row]) continue;
        TAGC_TRY(tagc_options_set(parsed->command, values, row, text, "in the checkpoint, "));
    }
    return TAGC_OK;
}

/* NULL: of this start of the run, or nothing is saved. */
static const char *text_of(const tagc_saved *saved, const tagc_option *option) {
    return is_own(option) ? NULL : json_string_value(json_object_get(saved->options, option->name));
}

tagc_status tagc_saved_merge(const tagc_saved *saved, const tagc_parsed *parsed, void *values,
                             tagc_progress *progress) {
    const tagc_command *command = parsed->command;
    char text_of_value[VALUE_BYTES];
    for (int i = 0; i < command->n_options; i++) {
        const char *text = text_of(saved, &command->options[i]);
        if (text && !parsed->given[i])
            TAGC_TRY(tagc_options_set(command, values, i, text, "in the checkpoint, "));
    }
    if (command->resolve)
        command->resolve(values); /* so that an auto that is given is compared by what it means */
    for (int i = 0; i < command->n_options; i++) {
        const tagc_option *option = &command->options[i];
        const char *then = text_of(saved, option);
        if (!then || !parsed->given[i]) continue;
        const char *now = value_of(command, values, i, text_of_value);
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

/* ---- every rank's options, gathered and compared by every rank alike ---- */

/* The beginning of a value, and a checksum of all of it. */
typedef struct value_text {
    char begin[120];
    uint64_t sum;
} value_text;

static void describe(const tagc_command *command, const void *values, int i, value_text *out) {
    char text_of_value[VALUE_BYTES];
    const char *text = value_of(command, values, i, text_of_value);
    snprintf(out->begin, sizeof out->begin, "%.119s", text);
    out->sum = tagc_checksum(text, strlen(text));
}

tagc_status tagc_agree_options(tagc_comm *comm, const tagc_command *command, const void *values) {
    size_t n = (size_t)command->n_options, world_size = (size_t)tagc_comm_world_size(comm);
    value_text *values_here = calloc(n, sizeof *values_here), *all = calloc(n * world_size, sizeof *all);
    if (!values_here || !all) {
        free(values_here);
        free(all);
        return tagc_fail(TAGC_ERR_MEMORY, "out of memory for the options of %zu ranks", world_size);
    }
    for (size_t i = 0; i < n; i++)
        if (command->options[i].role != TAGC_ROLE_PLACE && command->options[i].role != TAGC_ROLE_LOCAL)
            describe(command, values, (int)i, &values_here[i]);
    tagc_status status =
        tagc_comm_all_gather(comm, values_here, n * sizeof *values_here, all, n * world_size * sizeof *all);
    for (size_t rank = 1; status == TAGC_OK && rank < world_size; rank++)
        for (size_t i = 0; status == TAGC_OK && i < n; i++)
            if (all[rank * n + i].sum != all[i].sum ||
                memcmp(all[rank * n + i].begin, all[i].begin, sizeof all[i].begin) != 0)
                status = tagc_fail(TAGC_ERR_MISMATCH,
                                   "--%s is \"%.100s\" on rank 0 and \"%.100s\" on rank %zu;"
                                   " all ranks need the same",
                                   command->options[i].name, all[i].begin, all[rank * n + i].begin, rank);
    free(values_here);
    free(all);
    return status;
}
