/* The tagc command: looks at its first word and hands over. */
#include "blas/blas.h"
#include "cli/commands.h"
#include "core/cpu.h"
#include "exchange/registry.h"
#include "files/result_file.h"
#include "launch/ranks.h"
#include "tagc/tagc.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const tagc_entry *const entries[] = {&tagc_entry_train, &tagc_entry_bench,  &tagc_entry_compare,
                                            &tagc_entry_plan,  &tagc_entry_eval,   &tagc_entry_generate,
                                            &tagc_entry_data,  &tagc_entry_export, &tagc_entry_info};
enum { N_ENTRIES = sizeof entries / sizeof entries[0] };

static const tagc_entry *find_entry(const char *name) {
    for (int i = 0; i < N_ENTRIES; i++)
        if (strcmp(entries[i]->command->name, name) == 0) return entries[i];
    return NULL;
}

/* What other programs call it. */
static const struct {
    const char *theirs, *ours;
} synonyms[] = {{"benchmark", "bench"}, {"measure", "bench"},   {"evaluate", "eval"}, {"validate", "eval"},
                {"test", "eval"},       {"sample", "generate"}, {"prepare", "data"},  {"tokenize", "data"},
                {"convert", "export"},  {"diff", "compare"},    {"resume", "train"},  {"finetune", "train"},
                {"inspect", "info"},    {"show", "info"},       {"advise", "bench"},  {"forecast", "plan"}};
enum { N_SYNONYMS = sizeof synonyms / sizeof synonyms[0] };

/* Another program's word for a command, else the nearest name; NULL: none is near. */
static const char *meant(const char *word) {
    static const char *const others[] = {"help", "version"};
    const char *nearest = NULL;
    int least = -1;
    for (int i = 0; i < N_SYNONYMS; i++)
        if (strcmp(word, synonyms[i].theirs) == 0) return synonyms[i].ours;
    for (int i = 0; i < N_ENTRIES; i++)
        if (tagc_options_is_nearer(word, entries[i]->command->name, &least))
            nearest = entries[i]->command->name;
    for (int i = 0; i < 2; i++)
        if (tagc_options_is_nearer(word, others[i], &least)) nearest = others[i];
    return nearest;
}

/* A word that is no command. */
static void refuse(const char *word) {
    const char *command = meant(word + strspn(word, "-"));
    if (command)
        fprintf(stderr, "tagc: \"%.64s\" is no command; did you mean tagc %s? tagc help lists all\n", word,
                command);
    else
        fprintf(stderr, "tagc: \"%.64s\" is no command; tagc help lists them\n", word);
}

static void print_help(FILE *out) {
    fprintf(out, "tagc: sharded training of GPT-2 with compressed gradient exchange\n\nusage: tagc COMMAND "
                 "[options]\n\n");
    for (int i = 0; i < N_ENTRIES; i++)
        fprintf(out, "  %-10s %s\n", entries[i]->command->name, entries[i]->command->summary);
    fprintf(out, "  %-10s %s\n", "report",
            "moved: tagc-report makes a page and pictures of runs and results");
    fprintf(out, "  %-10s %s\n", "help",
            "this text; tagc COMMAND --help for a command; --man, --bash and --zsh: a man page, completions");
    fprintf(out, "  %-10s %s\n", "version", "this build, its parts, and the kernels that it uses here");
    fprintf(out, "\nA first run:\n"
                 "  tagc data --out data/books books/*.txt\n"
                 "  tagc train --data data/books --ranks 2 --steps 300 --out runs/first\n"
                 "  tagc generate --from runs/first --prompt \"Once \"\n");
}

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

/* This build, and what it computes with here. 0: word is not of it. */
static int print_version(const char *word, FILE *out) {
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

/* Where a standard stream is closed, the next file opened would take its place, and what is printed would
 * land in that file. */
static void fill_standard_streams(void) {
    int fd;
    do fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd < 0) abort(); /* nothing can be said, and nothing is safe */
    close(fd);
}

static int run(int argc, char **argv) {
    const char *word = argc > 1 ? argv[1] : "";
    if (tagc_cpu_check() != TAGC_OK) {
        fprintf(stderr, "tagc: %s\n", tagc_last_error());
        return TAGC_EXIT_USAGE;
    }
    int is_help = strcmp(word, "help") == 0 && argc > 2;
    if (is_help && tagc_manual_print(argv[2], entries, N_ENTRIES, stdout)) return TAGC_EXIT_OK;
    if (is_help) word = argv[2];
    const tagc_entry *entry = find_entry(word);
    if (entry && is_help) {
        char help[] = "--help", *words[] = {help};
        return tagc_entry_run(entry, 1, words);
    }
    if (entry) return tagc_entry_run(entry, argc - 2, argv + 2);
    if (strcmp(word, "report") == 0) {
        tagc_ranks_complain(
            tagc_ranks_launcher_rank(),
            "report has become a command of its own with the same options: in a clone, pip install "
            "\".[report]\", then tagc-report PATH... --out report.html");
        return TAGC_EXIT_USAGE;
    }
    if (print_version(word, stdout)) return TAGC_EXIT_OK;
    if (strcmp(word, "help") == 0 || strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
        print_help(stdout);
        return TAGC_EXIT_OK;
    }
    if (*word)
        refuse(word);
    else
        print_help(stderr);
    return TAGC_EXIT_USAGE;
}

int main(int argc, char **argv) {
    tagc_blas_begin(argv);
    fill_standard_streams();
    int code = run(argc, argv);
    /* A table sent to a full disk is no success. */
    if ((fflush(stdout) != 0 || ferror(stdout)) && code == TAGC_EXIT_OK) {
        tagc_ranks_complain(tagc_ranks_launcher_rank(), "tagc could not write its output");
        code = TAGC_EXIT_FAILURE;
    }
    return code;
}
