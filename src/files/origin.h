/* Where a result comes from: version and commit of this build, the command line, the machine. Part of every result
 * file (docs/results-format.md). */
#ifndef TAGC_FILES_ORIGIN_H
#define TAGC_FILES_ORIGIN_H

#include <jansson.h>

/* "tagc <command> <argv>...". hosts: an array of names, taken over; NULL: this host alone. NULL when out of memory. */
json_t *tagc_origin(const char *command, int argc, char *const *argv, json_t *hosts);

/* This host's name, never empty. */
void tagc_origin_host(char *name, int n_bytes);

#endif
