/* A folder holds one run: the newest step in it is where that run goes on. Steps of two runs, or of a run and
 * of what it was before somebody went back, would make the newest one mean something else. */
#include "train/trainer.h"

#include "core/status.h"
#include "disk/paths.h"
#include "fsdp/checkpoint.h"
#include "launch/over_ranks.h"
#include <jansson.h>
#include <string.h>
#include <sys/stat.h>

/* Is `checkpoint` the folder itself, or a folder in it? */
static int is_inside(const char *checkpoint, const char *dir) {
    char above[TAGC_PATH_BYTES];
    struct stat folder, itself, parent;
    return tagc_path_join(checkpoint, "..", above) == TAGC_OK && stat(dir, &folder) == 0 &&
           stat(checkpoint, &itself) == 0 && stat(above, &parent) == 0 &&
           ((itself.st_dev == folder.st_dev && itself.st_ino == folder.st_ino) ||
            (parent.st_dev == folder.st_dev && parent.st_ino == folder.st_ino));
}

/* Whether the first start, which wrote the first record, was a fork: begun again with other weights, it would be another run. */
static int is_fork(const char *metrics_path) {
    json_t *run = json_load_file(metrics_path, JSON_DISABLE_EOF_CHECK, NULL);
    const char *fork = json_string_value(json_object_get(json_object_get(run, "options"), "fork"));
    int found = fork && *fork;
    json_decref(run);
    return found;
}

static tagc_status fail_fork(const char *dir) {
    return tagc_fail(
        TAGC_ERR_IO,
        "%s holds the metrics of a fork that saved no checkpoint: move metrics.jsonl away and give"
        " --fork again without --resume, or choose another --out",
        dir);
}

tagc_status tagc_run_folder_check(const char *dir, const char *checkpoint, uint64_t step, int is_unsaved) {
    char path[TAGC_PATH_BYTES];
    uint64_t newest = 0;
    int has_steps = 0;
    struct stat metrics;
    TAGC_TRY(tagc_path_join(dir, "metrics.jsonl", path));
    int has_metrics = stat(path, &metrics) == 0 && metrics.st_size > 0;
    TAGC_TRY(tagc_checkpoint_newest(dir, UINT64_MAX, &newest, &has_steps));
    if (checkpoint && is_inside(checkpoint, dir)) {
        if (!has_steps || newest <= step) return TAGC_OK;
        return tagc_fail(
            TAGC_ERR_IO,
            "%s holds step %llu, past step %llu which is to be gone on from: remove what is past it, or"
            " choose another --out",
            dir, (unsigned long long)newest, (unsigned long long)step);
    }
    if (has_steps && checkpoint)
        return tagc_fail(TAGC_ERR_IO, "%s holds another run already: choose another --out", dir);
    if (has_steps)
        return tagc_fail(TAGC_ERR_IO, "%s holds a run already: go on with --resume, or choose another --out",
                         dir);
    if (has_metrics && !is_unsaved && is_fork(path)) return fail_fork(dir);
    if (has_metrics && !is_unsaved)
        return tagc_fail(
            TAGC_ERR_IO,
            "%s holds the metrics of a run that saved no checkpoint: begin it again with --resume,"
            " or choose another --out",
            dir);
    return TAGC_OK;
}

tagc_status tagc_run_folder_unsaved(tagc_comm *comm, const char *dir, int *out) {
    char path[TAGC_PATH_BYTES];
    double found[2] = {0}; /* unsaved, and a fork */
    if (tagc_comm_rank(comm) == 0) {
        uint64_t newest;
        int has_steps = 1; /* what cannot be read is named when the checkpoint is looked for */
        found[0] = tagc_path_join(dir, "metrics.jsonl", path) == TAGC_OK && tagc_path_exists(path) &&
                   tagc_checkpoint_newest(dir, UINT64_MAX, &newest, &has_steps) == TAGC_OK && !has_steps;
        found[1] = found[0] > 0 && is_fork(path);
    }
    TAGC_TRY(tagc_mean_over_ranks(comm, found, 2));
    *out = found[0] > 0;
    return found[1] > 0 ? fail_fork(dir) : TAGC_OK;
}

tagc_status tagc_run_folder_remedy(const tagc_train_options *options, tagc_status status) {
    char text[TAGC_ERROR_TEXT_BYTES];
    uint64_t newest = 0, older = 0;
    int found = 0;
    snprintf(text, sizeof text, "%s", tagc_last_error());
    if (status != TAGC_ERR_CORRUPT || strcmp(options->resume, "latest") != 0) return status;
    if (tagc_checkpoint_newest(options->out, UINT64_MAX, &newest, &found) == TAGC_OK && found)
        (void)tagc_checkpoint_newest(options->out, newest, &older, &found);
    if (!found) return tagc_fail(status, "%s", text);
    return tagc_fail(status, "%s; step %llu is there, too: remove step %llu to go on from it", text,
                     (unsigned long long)older, (unsigned long long)newest);
}

tagc_status tagc_run_folder_agree(tagc_comm *comm, const char *dir) {
    char path[TAGC_PATH_BYTES];
    TAGC_TRY(tagc_comm_barrier(comm));
    TAGC_TRY(tagc_path_join(dir, "metrics.jsonl", path));
    if (tagc_path_exists(path)) return TAGC_OK;
    return tagc_fail(
        TAGC_ERR_IO,
        "rank %d does not see %s, which rank 0 has made: all ranks write their part of a checkpoint to the"
        " same folder, so --out needs a path that means the same everywhere",
        tagc_comm_rank(comm), path);
}
