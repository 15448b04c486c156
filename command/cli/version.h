/* tagc version. */
#ifndef TAGC_CLI_VERSION_H
#define TAGC_CLI_VERSION_H

#include <stdio.h>

/* "version" prints version, commit, parts, the processor's level and the kernel of products; "--version" and "-V" the version
 * alone. Returns 0 for another word. */
int tagc_version_print(const char *word, FILE *out);

#endif
