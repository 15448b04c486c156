/* The beginning and the end that all commands share. */
#include "cli/commands.h"
#include "core/status.h"
#include "disk/paths.h"
#include "launch/ranks.h"
#include <stdlib.h>

int tagc_command_refuse(const tagc_command *command) {
    char text[TAGC_ERROR_TEXT_BYTES + 64];
    snprintf(text, sizeof text, "%s (tagc %s --help-all explains)", tagc_last_error(), command->name);
    tagc_ranks_complain(tagc_ranks_launcher_rank(), text);
    return TAGC_EXIT_USAGE;
}

int tagc_command_end(tagc_status status) {
    if (status == TAGC_OK) return TAGC_EXIT_OK;
    tagc_ranks_complain(tagc_ranks_launcher_rank(), tagc_last_error());
    return status == TAGC_ERR_INTERRUPTED ? TAGC_EXIT_INTERRUPTED : TAGC_EXIT_FAILURE;
}

tagc_status tagc_command_keep(const char *dir, const char *file, const char *other_file) {
    const char *const files[] = {file, other_file};
    char path[TAGC_PATH_BYTES];
    for (size_t i = 0; i < 2; i++) {
        TAGC_TRY(tagc_path_join(dir, files[i], path));
        if (tagc_path_exists(path))
            return tagc_fail(TAGC_ERR_IO,
                             "%s is there already: --force overwrites it, or choose another --out", path);
    }
    return TAGC_OK;
}

int tagc_entry_run(const tagc_entry *entry, int argc, char **argv) {
    if (entry->prepare) entry->prepare();
    tagc_parsed parsed = {0};
    void *values = calloc(1, entry->n_value_bytes);
    int code = TAGC_EXIT_OK, is_speaker = tagc_ranks_launcher_rank() == 0;
    if (!values)
        code = tagc_command_end(tagc_fail(TAGC_ERR_MEMORY, "out of memory for options"));
    else if (tagc_options_parse(entry->command, argc, argv, values, &parsed) != TAGC_OK)
        code = tagc_command_refuse(entry->command);
    else if (!parsed.help)
        code = entry->run(&parsed);
    else if (is_speaker && parsed.help == TAGC_HELP_TABLE)
        tagc_options_table(entry->command, stdout);
    else if (is_speaker)
        tagc_options_help(entry->command, parsed.help == TAGC_HELP_ALL, stdout);
    tagc_options_destroy(&parsed);
    free(values);
    return code;
}
