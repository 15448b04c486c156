/* The beginning and the unhappy end that all commands share. */
#include "cli/commands.h"
#include "launch/ranks.h"

int tagc_command_refuse(const tagc_command *command) {
    char text[TAGC_ERROR_TEXT_BYTES + 64];
    snprintf(text, sizeof text, "%s (tagc %s --help explains)", tagc_last_error(), command->name);
    tagc_ranks_complain(tagc_ranks_launcher_rank(), text);
    return TAGC_EXIT_USAGE;
}

int tagc_command_fail(void) {
    tagc_ranks_complain(tagc_ranks_launcher_rank(), tagc_last_error());
    return TAGC_EXIT_FAILURE;
}

int tagc_command_parse(const tagc_command *command, int argc, char **argv, void *values,
                       tagc_parsed *parsed) {
    if (tagc_options_parse(command, argc, argv, values, parsed) != TAGC_OK)
        return tagc_command_refuse(command);
    int is_speaker = tagc_ranks_launcher_rank() == 0;
    int is_help = parsed->help == TAGC_HELP_SHORT || parsed->help == TAGC_HELP_ALL;
    if (is_help && is_speaker) tagc_options_help(command, parsed->help == TAGC_HELP_ALL, stdout);
    if (parsed->help == TAGC_HELP_TABLE && is_speaker) tagc_options_table(command, stdout);
    return parsed->help ? TAGC_EXIT_OK : TAGC_GO_ON;
}
