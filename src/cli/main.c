/* The tagc command: looks at its first word and hands over. */
#include "cli/commands.h"
#include "core/cpu.h"
#include "launch/blas.h"
#include "launch/ranks.h"
#include "tagc/tagc.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
    {"train", tagc_command_train, "train a GPT-2 on one or more ranks, gradients compressed or not"},
    {"bench", tagc_command_bench, "what this machine and network give, and whether compression pays on them"},
    {"compare", tagc_command_compare,
     "put runs side by side: losses and their curves, where time went, bits per parameter"},
    {"plan", tagc_command_plan, "memory, bytes and time of a deployment, without running it"},
    {"report", tagc_command_report, "moved: tagc-report makes a page and pictures of runs and results"},
    {"eval", tagc_command_eval, "validation loss of a checkpoint or of published weights"},
    {"generate", tagc_command_generate, "continue a text"},
    {"data", tagc_command_data, "turn files and folders of text into tokens to train on"},
    {"export", tagc_command_export, "write a checkpoint as a folder that Hugging Face's GPT-2 opens"},
    {"info", tagc_command_info, "what a token file, checkpoint, weights file or preset holds"},
};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static void print_help(FILE *out) {
    fprintf(out, "tagc: sharded training of GPT-2 with compressed gradient exchange\n\nusage: tagc COMMAND "
                 "[options]\n\n");
    for (int i = 0; i < N_COMMANDS; i++) fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].summary);
    fprintf(out, "  %-10s %s\n", "help", "this text; tagc COMMAND --help for a command");
    fprintf(out, "  %-10s %s\n", "version", "the version of this build");
    fprintf(out, "\nA first run:\n"
                 "  tagc data --out data/books books/*.txt\n"
                 "  tagc train --data data/books --ranks 2 --steps 300 --out runs/first\n"
                 "  tagc generate --from runs/first --prompt \"Once \"\n");
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
    for (int i = 0; i < N_COMMANDS; i++)
        if (strcmp(word, commands[i].name) == 0) return commands[i].run(argc - 2, argv + 2);
    if (strcmp(word, "version") == 0 || strcmp(word, "--version") == 0) {
        printf("tagc %s%s, %s\n", tagc_version(), TAGC_HAVE_MPI ? ", with MPI" : ", without MPI",
               tagc_cpu_name(tagc_cpu_best()));
        return TAGC_EXIT_OK;
    }
    if (strcmp(word, "help") == 0 && argc > 2) {
        char help[] = "--help", *words[] = {help};
        for (int i = 0; i < N_COMMANDS; i++)
            if (strcmp(argv[2], commands[i].name) == 0) return commands[i].run(1, words);
        word = argv[2];
    } else if (strcmp(word, "help") == 0 || strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
        print_help(stdout);
        return TAGC_EXIT_OK;
    }
    if (*word)
        fprintf(stderr, "tagc: \"%.64s\" is no command; tagc help lists them\n", word);
    else
        print_help(stderr);
    return TAGC_EXIT_USAGE;
}

int main(int argc, char **argv) {
    tagc_blas_without_workers(argv);
    fill_standard_streams();
    int code = run(argc, argv);
    /* A table sent to a full disk is no success. */
    if ((fflush(stdout) != 0 || ferror(stdout)) && code == TAGC_EXIT_OK) {
        tagc_ranks_complain(tagc_ranks_launcher_rank(), "what was to be printed could not be written");
        code = TAGC_EXIT_FAILURE;
    }
    return code;
}
