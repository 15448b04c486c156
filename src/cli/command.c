/* The beginning and the end that all commands share. */
#include "cli/commands.h"
#include "launch/ranks.h"

int tagc_command_refuse(const tagc_command *command) {
    char text[TAGC_ERROR_TEXT_BYTES + 64];
    snprintf(text, sizeof text, "%s (tagc %s --help explains)", tagc_last_error(), command->name);
    tagc_ranks_complain(tagc_ranks_launcher_rank(), text);
    return TAGC_EXIT_USAGE;
}

int tagc_command_end(tagc_status status) {
    if (status == TAGC_OK) return TAGC_EXIT_OK;
    tagc_ranks_complain(tagc_ranks_launcher_rank(), tagc_last_error());
    return status == TAGC_ERR_INTERRUPTED ? TAGC_EXIT_INTERRUPTED : TAGC_EXIT_FAILURE;
}

int tagc_command_run(const tagc_command *command, int argc, char **argv, void *values,
                     int (*run)(tagc_parsed *parsed)) {
    tagc_parsed parsed;
    int code = TAGC_EXIT_OK, is_speaker = tagc_ranks_launcher_rank() == 0;
    if (tagc_options_parse(command, argc, argv, values, &parsed) != TAGC_OK)
        code = tagc_command_refuse(command);
    else if (!parsed.help)
        code = run(&parsed);
    else if (is_speaker && parsed.help == TAGC_HELP_TABLE)
        tagc_options_table(command, stdout);
    else if (is_speaker)
        tagc_options_help(command, parsed.help == TAGC_HELP_ALL, stdout);
    tagc_options_destroy(&parsed);
    return code;
}
