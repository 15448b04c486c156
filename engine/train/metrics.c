/* Writing of metrics.jsonl. A line that cannot be written ends the run: figures with holes are worse than
 * none. */
#include "train/metrics.h"

#include "core/status.h"
#include "disk/paths.h"
#include "files/result_file.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

struct tagc_metrics {
    FILE *file;
    char path[TAGC_PATH_BYTES];
};

/* ---- going back to a step ---- */

typedef enum { LINE_STAYS, LINE_DAMAGED, LINE_PAST } tagc_line_kind;

/* A record that describes the run has no step, so it is never past the checkpoint. */
static tagc_line_kind kind_of(const char *line, size_t n_bytes, int64_t step) {
    json_t *object = json_loadb(line, n_bytes, 0, NULL);
    tagc_line_kind kind = !json_is_object(object) ? LINE_DAMAGED : LINE_STAYS;
    if (json_integer_value(json_object_get(object, "step")) > step) kind = LINE_PAST;
    json_decref(object);
    return kind;
}

/* What stays: the first n_prefix bytes of the file, and `rest` from behind the first damaged line. */
typedef struct kept_lines {
    long n_prefix;
    int n_damaged; /* lines that are no records, but for a torn last one */
    char *rest;    /* (n_rest) */
    size_t n_rest;
} kept_lines;

static int pick_lines(FILE *from, int64_t step, kept_lines *kept) {
    char *line = NULL;
    size_t capacity = 0;
    FILE *rest = open_memstream(&kept->rest, &kept->n_rest);
    if (!rest) return 1;
    for (ssize_t n; (n = getline(&line, &capacity, from)) > 0;) {
        tagc_line_kind kind = kind_of(line, (size_t)n, step);
        if (kind == LINE_PAST || line[n - 1] != '\n') break;
        kept->n_damaged += kind == LINE_DAMAGED;
        if (kept->n_damaged == 0)
            kept->n_prefix += n;
        else if (kind == LINE_STAYS)
            fwrite(line, 1, (size_t)n, rest);
    }
    int failed = ferror(from) != 0 || ferror(rest) != 0;
    free(line);
    return (fclose(rest) != 0) | failed;
}

static int copy_whole(FILE *from, const char *path) {
    char bytes[16384];
    FILE *to = fopen(path, "wx");
    if (!to) return 1;
    int failed = 0;
    rewind(from);
    for (size_t n; (n = fread(bytes, 1, sizeof bytes, from)) > 0;) failed |= fwrite(bytes, 1, n, to) != n;
    failed |= ferror(from) != 0 || fflush(to) != 0 || fsync(fileno(to)) != 0;
    return (fclose(to) != 0) | failed;
}

/* Copies the file to metrics.jsonl.<why>, or with a number where that is taken. */
static tagc_status set_aside(const tagc_metrics *metrics, FILE *file, const char *why,
                             char aside[TAGC_PATH_BYTES]) {
    for (int i = 1; i < 1000; i++) {
        char number[16] = "";
        if (i > 1) snprintf(number, sizeof number, ".%d", i);
        if (snprintf(aside, TAGC_PATH_BYTES, "%s.%s%s", metrics->path, why, number) >= TAGC_PATH_BYTES)
            return tagc_fail(TAGC_ERR_ARGUMENT, "%s: the path is too long", metrics->path);
        if (tagc_path_exists(aside)) continue;
        if (!copy_whole(file, aside)) return TAGC_OK;
        break;
    }
    return tagc_fail(TAGC_ERR_IO, "%s: %s", aside, strerror(errno));
}

tagc_status tagc_metrics_rewind(tagc_metrics *metrics, int64_t step, char aside[TAGC_PATH_BYTES]) {
    struct stat about;
    kept_lines kept = {0};
    aside[0] = 0;
    if (fstat(fileno(metrics->file), &about) != 0 || !S_ISREG(about.st_mode)) return TAGC_OK;
    FILE *from = fopen(metrics->path, "r");
    int failed = !from || pick_lines(from, step, &kept) != 0;
    tagc_status status = TAGC_OK;
    if (!failed && (step < 0 ? about.st_size > 0 : kept.n_damaged > 0))
        status = set_aside(metrics, from, step < 0 ? "before" : "damaged", aside);
    if (!failed && status == TAGC_OK) /* in place, so that the lock stays */
        failed = ftruncate(fileno(metrics->file), kept.n_prefix) != 0 ||
                 fwrite(kept.rest, 1, kept.n_rest, metrics->file) != kept.n_rest ||
                 fflush(metrics->file) != 0;
    if (from) fclose(from);
    free(kept.rest);
    if (failed) return tagc_fail(TAGC_ERR_IO, "%s: %s", metrics->path, strerror(errno ? errno : EIO));
    return status;
}

static tagc_status fail_busy(const char *dir) {
    return tagc_fail(TAGC_ERR_IO, "%s: another run is writing there now; choose another --out", dir);
}

static tagc_status open_file(tagc_metrics *metrics, const char *dir) {
    TAGC_TRY(tagc_path_make_dirs(dir));
    TAGC_TRY(tagc_path_join(dir, "metrics.jsonl", metrics->path));
    /* Checkpoints come later than the first line: whether they can be made is asked now. */
    if (access(dir, W_OK | X_OK) == 0) metrics->file = fopen(metrics->path, "a");
    if (!metrics->file) return tagc_fail(TAGC_ERR_IO, "%s: %s", metrics->path, strerror(errno));
    /* A file system without locks gives another error, and no protection. */
    if (flock(fileno(metrics->file), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return fail_busy(dir);
    return TAGC_OK;
}

tagc_status tagc_metrics_check_free(const char *dir) {
    char path[TAGC_PATH_BYTES];
    TAGC_TRY(tagc_path_join(dir, "metrics.jsonl", path));
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int is_busy = fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (fd >= 0) close(fd);
    return is_busy ? fail_busy(dir) : TAGC_OK;
}

tagc_status tagc_metrics_open(const char *dir, tagc_metrics **out) {
    *out = NULL;
    tagc_metrics *metrics = calloc(1, sizeof *metrics);
    if (!metrics) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for metrics");
    tagc_status status = open_file(metrics, dir);
    if (status == TAGC_OK)
        *out = metrics;
    else
        tagc_metrics_close(metrics);
    return status;
}

void tagc_metrics_close(tagc_metrics *metrics) {
    if (!metrics) return;
    if (metrics->file) fclose(metrics->file);
    free(metrics);
}

static tagc_status write_line(tagc_metrics *metrics, json_t *line) {
    if (!line) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for a line of %s", metrics->path);
    errno = 0;
    int failed = json_dumpf(line, metrics->file, JSON_COMPACT | JSON_REAL_PRECISION(17)) != 0;
    failed |= fputc('\n', metrics->file) == EOF;
    failed |= fflush(metrics->file) != 0;
    json_decref(line);
    if (failed) return tagc_fail(TAGC_ERR_IO, "%s: %s", metrics->path, strerror(errno ? errno : EIO));
    return TAGC_OK;
}

tagc_status tagc_metrics_run(tagc_metrics *metrics, json_t *run) {
    if (run) json_object_set_new(run, "type", json_string("run"));
    return write_line(metrics, run);
}

/* Share of the exchange (codec and comm work) during which compute went on: [0, 1]. */
static double overlap(const tagc_step_report *report) {
    double exposed = report->stats.wait_gather_s + report->stats.wait_reduce_s;
    double total = report->busy.exchange_s;
    if (total <= 0 || exposed >= total) return 0; /* NaN passes */
    return 1 - exposed / total;
}

static void add_time(json_t *line, const tagc_step_report *report) {
    const tagc_fsdp_stats *stats = &report->stats;
    json_object_set_new(line, "wall_s", tagc_json_real(report->wall_s));
    json_object_set_new(line, "total_s", tagc_json_real(stats->total_s));
    json_object_set_new(line, "compute_s", tagc_json_real(stats->compute_s));
    json_object_set_new(line, "wait_gather_s", tagc_json_real(stats->wait_gather_s));
    json_object_set_new(line, "wait_reduce_s", tagc_json_real(stats->wait_reduce_s));
    json_object_set_new(line, "optimizer_s", tagc_json_real(stats->optimizer_s));
    json_object_set_new(line, "comm_s", tagc_json_real(report->busy.comm_s));
    json_object_set_new(line, "codec_s", tagc_json_real(report->busy.codec_s));
    json_object_set_new(line, "exchange_s", tagc_json_real(report->busy.exchange_s));
    json_object_set_new(line, "gradient_s", tagc_json_real(report->busy.gradient_s));
    json_object_set_new(line, "overlap", tagc_json_real(overlap(report)));
    json_object_set_new(line, "phase_s", tagc_json_phases(stats->phase_s));
}

static void add_codec(json_t *line, const tagc_fsdp_stats *stats) {
    double n = (double)stats->n_compressed;
    /* Where everything travels, padding is counted with it. */
    json_object_set_new(line, "sparsity",
                        n > 0 ? tagc_json_real(fmax(1 - (double)stats->n_sent / n, 0)) : json_null());
    json_object_set_new(line, "union_density",
                        stats->n_union > 0 ? tagc_json_real(fmin((double)stats->n_union / n, 1))
                                           : json_null());
    json_object_set_new(line, "n_compressed", json_integer((json_int_t)stats->n_compressed));
    json_object_set_new(line, "n_sent", json_integer((json_int_t)stats->n_sent));
    json_object_set_new(line, "n_union", json_integer((json_int_t)stats->n_union));
    json_object_set_new(line, "n_returned", json_integer((json_int_t)stats->n_returned));
    json_object_set_new(line, "n_mild", json_integer((json_int_t)stats->n_mild));
    json_object_set_new(line, "n_mild_sent", json_integer((json_int_t)stats->n_mild_sent));
    json_object_set_new(line, "n_class_bytes_sent",
                        json_pack("{s:I, s:I, s:I}", "compressed",
                                  (json_int_t)stats->n_class_bytes_sent[TAGC_CLASS_COMPRESSED], "mild",
                                  (json_int_t)stats->n_class_bytes_sent[TAGC_CLASS_MILD], "dense",
                                  (json_int_t)stats->n_class_bytes_sent[TAGC_CLASS_DENSE]));
    json_object_set_new(line, "n_unpeeled", json_integer((json_int_t)stats->n_unpeeled));
    json_object_set_new(line, "n_lost", json_integer((json_int_t)stats->n_lost));
    json_object_set_new(line, "load", tagc_json_real(stats->load));
    json_object_set_new(line, "peel_rounds", json_integer(stats->peel_rounds));
}

/* Nothing, if no unit follows the schedule. */
static void add_levels(json_t *line, const int n_flats[TAGC_N_LEVELS]) {
    json_t *levels = json_object();
    int n = 0;
    for (int level = 0; level < TAGC_N_LEVELS; level++) {
        json_object_set_new(levels, tagc_level_name(level), json_integer(n_flats[level]));
        n += n_flats[level];
    }
    if (n > 0) json_object_set(line, "levels", levels);
    json_decref(levels);
}

tagc_status tagc_metrics_step(tagc_metrics *metrics, const tagc_step_report *report) {
    const tagc_fsdp_stats *stats = &report->stats;
    json_t *line = json_object();
    json_object_set_new(line, "type", json_string("step"));
    json_object_set_new(line, "step", json_integer((json_int_t)report->step));
    json_object_set_new(line, "loss", tagc_json_real(report->loss));
    json_object_set_new(line, "lr", tagc_json_real(report->lr));
    json_object_set_new(line, "grad_norm", tagc_json_real(stats->grad_norm));
    json_object_set_new(line, "skipped", json_boolean(stats->skipped));
    json_object_set_new(line, "n_tokens", json_integer((json_int_t)report->n_tokens));
    add_time(line, report);
    json_object_set_new(line, "n_bytes_sent", tagc_json_leg_bytes(stats->n_bytes_sent));
    json_object_set_new(line, "n_bytes_received", tagc_json_leg_bytes(stats->n_bytes_received));
    json_object_set_new(line, "bits_sent_per_param", tagc_json_leg_reals(stats->bits_per_param));
    add_codec(line, stats);
    add_levels(line, stats->n_at_level);
    return write_line(metrics, line);
}

tagc_status tagc_metrics_eval(tagc_metrics *metrics, uint64_t step, double val_loss, uint64_t n_tokens) {
    json_t *line = json_object();
    json_object_set_new(line, "type", json_string("eval"));
    json_object_set_new(line, "step", json_integer((json_int_t)step));
    json_object_set_new(line, "val_loss", tagc_json_real(val_loss));
    json_object_set_new(line, "n_tokens", json_integer((json_int_t)n_tokens));
    return write_line(metrics, line);
}
