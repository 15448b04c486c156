/* The commands. Each takes the words behind its name and returns the exit code. */
#ifndef TAGC_CLI_COMMANDS_H
#define TAGC_CLI_COMMANDS_H

#include "options/options.h"

enum { TAGC_GO_ON = -1 };

/* Parses, or prints help or what is wrong. TAGC_GO_ON, or the exit code. The caller destroys `parsed`. */
int tagc_command_parse(const tagc_command *command, int argc, char **argv, void *values, tagc_parsed *parsed);

/* Prints the last failure as one of usage and returns its exit code. */
int tagc_command_refuse(const tagc_command *command);

/* Prints the last failure and returns its exit code: for commands that run without ranks. */
int tagc_command_fail(void);

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
