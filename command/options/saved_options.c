/* Saved options, and how those of a command line are merged into them. */
#include "options/saved_options.h"

#include "core/status.h"
#include "options/train_options.h"
#include <string.h>

enum { VALUE_BYTES = 4096 };

json_t *tagc_saved_options(const tagc_command *command, const void *values) {
    json_t *object = json_object();
    char text[VALUE_BYTES];
    for (int i = 0; i < command->n_options; i++) {
        tagc_options_get(command, values, i, text, sizeof text);
        json_object_set_new(object, command->options[i].name, json_string(text));
    }
    return object;
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
    int is_own = option->role == TAGC_ROLE_RUN || option->role == TAGC_ROLE_LOCAL;
    return is_own ? NULL : json_string_value(json_object_get(saved->options, option->name));
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
