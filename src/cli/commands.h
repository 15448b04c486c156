/* The commands. Each takes the words behind its name and returns the exit code. */
#ifndef TAGC_CLI_COMMANDS_H
#define TAGC_CLI_COMMANDS_H

#include "options/options.h"

/* Parses the words, calls `run` with them and returns its exit code; or prints help, or what is wrong with the words. */
int tagc_command_run(const tagc_command *command, int argc, char **argv, void *values,
                     int (*run)(tagc_parsed *parsed));

/* Prints the last failure as one of usage and returns its exit code. */
int tagc_command_refuse(const tagc_command *command);

/* The exit code of a command without ranks. Prints the last failure if `status` is one. */
int tagc_command_end(tagc_status status);

int tagc_command_train(int argc, char **argv);
int tagc_command_bench(int argc, char **argv);
int tagc_command_eval(int argc, char **argv);
int tagc_command_generate(int argc, char **argv);
int tagc_command_export(int argc, char **argv);
int tagc_command_data(int argc, char **argv);
int tagc_command_info(int argc, char **argv);
int tagc_command_compare(int argc, char **argv);
int tagc_command_report(int argc, char **argv);
int tagc_command_plan(int argc, char **argv);

#endif
