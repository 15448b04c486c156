/* The origin of a result, part of every result file (docs/results-format.md): version and commit of this build, the command
 * line, the machine. */
#ifndef TAGC_FILES_ORIGIN_H
#define TAGC_FILES_ORIGIN_H

#include <jansson.h>

/* The command line is "tagc <command> <argv>...". hosts: an array of names, of which it takes ownership; NULL: this host
 * alone. Returns NULL if out of memory. */
json_t *tagc_origin(const char *command, int argc, char *const *argv, json_t *hosts);

/* This host's name, never empty. */
void tagc_origin_host(char *name, int n_bytes);

#endif
