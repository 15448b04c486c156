/* Any bytes as a --config file and as a run's metrics.jsonl: an error, or values that keep their ranges. */
#include "files/runlog.h"
#include "options/train_options.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void write_file(const char *path, const uint8_t *data, size_t n_bytes) {
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, n_bytes, file) != n_bytes || fclose(file)) abort();
}

static void read_config(char *path) {
    char *argv[] = {"--config", path};
    tagc_train_options options;
    tagc_parsed parsed;
    memset(&options, 0, sizeof options);
    if (tagc_options_parse(&tagc_train_command, 2, argv, &options, &parsed) == TAGC_OK) {
        int is_share = options.sparsity >= 0 && options.sparsity <= 1;
        if (!(is_share || options.sparsity == -1) || options.ranks < 1 || options.ranks > 1024 ||
            !isfinite(options.lr) || options.accumulate < 1)
            abort();
        tagc_train_check(&options);
    }
    tagc_options_destroy(&parsed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    char dir[64], path[96];
    snprintf(dir, sizeof dir, "/tmp/tagc-fuzz-%ld", (long)getpid());
    snprintf(path, sizeof path, "%s/metrics.jsonl", dir);
    mkdir(dir, 0700);
    write_file(path, data, n_bytes);
    read_config(path);
    tagc_runlog log;
    if (tagc_runlog_read(dir, &log) == TAGC_OK) {
        if (log.n_steps < 0 || log.n_evals < 0) abort();
        for (int i = 0; i < log.n_steps; i++)
            if (isnan(log.steps[i].step)) abort();
        tagc_runlog_destroy(&log);
    }
    unlink(path);
    rmdir(dir);
    return 0;
}
