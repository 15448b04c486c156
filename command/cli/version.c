/* tagc version: this build, and what it computes with here. */
#include "cli/version.h"

#include "blas/blas.h"
#include "core/cpu.h"
#include "exchange/registry.h"
#include "files/result_file.h"
#include "launch/ranks.h"
#include "tagc/tagc.h"
#include <string.h>

static void print_parts(FILE *out) {
    const char *const *part = tagc_fenced_parts;
    const char *before = " ";
    fputs("parts:", out);
    for (; *part; part++, before = ", ") fprintf(out, "%s%s", before, *part);
    if (TAGC_HAVE_MPI)
        fprintf(out, "%smpi", before);
    else if (part == tagc_fenced_parts)
        fputs(" none", out);
    fputc('\n', out);
}

int tagc_version_print(const char *word, FILE *out) {
    int is_short = strcmp(word, "-V") == 0 || strcmp(word, "--version") == 0;
    const char *commit = tagc_origin_commit();
    tagc_blas_about blas;
    if (!is_short && strcmp(word, "version") != 0) return 0;
    fprintf(out, "tagc %s", tagc_version());
    if (is_short) {
        fputc('\n', out);
        return 1;
    }
    tagc_blas_describe(&blas);
    fprintf(out, ", commit %s\n", commit ? commit : "unknown");
    print_parts(out);
    fprintf(out, "processor: %s\nproducts: %s, kernel %s\n", tagc_cpu_name(tagc_cpu_best()), blas.name,
            blas.kernel);
    return 1;
}
