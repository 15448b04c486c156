/* Reads metrics.jsonl, and writes several as CSV. */
#include "files/runlog.h"

#include "core/status.h"
#include "disk/new_file.h"
#include "disk/paths.h"
#include "files/result_file.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The numbers of a step that metrics.jsonl has under the names of the struct's members. */
static const struct {
    const char *name;
    size_t offset;
} fields[] = {
#define FIELD(name)                                                                                          \
    { #name, offsetof(tagc_runlog_step, name) }
    FIELD(step),          FIELD(loss),        FIELD(lr),      FIELD(grad_norm), FIELD(skipped),
    FIELD(n_tokens),      FIELD(wall_s),      FIELD(total_s), FIELD(compute_s), FIELD(wait_gather_s),
    FIELD(wait_reduce_s), FIELD(optimizer_s), FIELD(comm_s),  FIELD(overlap),
#undef FIELD
};
enum { N_FIELDS = sizeof fields / sizeof *fields };

/* NaN for what is neither a number nor true or false. */
static double number(const json_t *object, const char *name) {
    const json_t *value = json_object_get(object, name);
    if (json_is_boolean(value)) return json_is_true(value);
    return json_is_number(value) ? json_number_value(value) : (double)NAN;
}

static void *grown(void *array, int n, size_t item_bytes) {
    if (n & (n - 1)) return array; /* the capacity is a power of two, so it is full only there */
    return realloc(array, (n ? 2 * (size_t)n : 1) * item_bytes);
}

static tagc_status add_step(tagc_runlog *log, const json_t *line) {
    tagc_runlog_step *steps = grown(log->steps, log->n_steps, sizeof *steps);
    if (!steps) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for the steps of %s", log->label);
    log->steps = steps;
    const json_t *bits = json_object_get(line, "bits_sent_per_param");
    double whole = log->world_size > 1 ? log->world_size / (log->world_size - 1.0) : 0;
    tagc_runlog_step *step = &steps[log->n_steps++];
    for (int i = 0; i < N_FIELDS; i++)
        *(double *)((char *)step + fields[i].offset) = number(line, fields[i].name);
    step->between_s = step->wall_s - step->total_s;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        step->bits_sent[leg] = number(bits, tagc_leg_name(leg));
        step->bits[leg] = whole * step->bits_sent[leg];
    }
    return TAGC_OK;
}

static tagc_status add_eval(tagc_runlog *log, double step, double val_loss) {
    double *steps = grown(log->eval_steps, log->n_evals, sizeof *steps);
    if (steps) log->eval_steps = steps;
    double *losses = grown(log->val_losses, log->n_evals, sizeof *losses);
    if (losses) log->val_losses = losses;
    if (!steps || !losses)
        return tagc_fail(TAGC_ERR_MEMORY, "out of memory for the losses of %s", log->label);
    steps[log->n_evals] = step;
    losses[log->n_evals++] = val_loss;
    return TAGC_OK;
}

static tagc_status add_line(tagc_runlog *log, json_t *line) {
    const char *type = json_string_value(json_object_get(line, "type"));
    int has_step = type && (strcmp(type, "step") == 0 || strcmp(type, "eval") == 0);
    if (has_step && !json_is_number(json_object_get(line, "step")))
        return tagc_fail(TAGC_ERR_CORRUPT, "an entry of type \"%s\" has no number as \"step\"", type);
    if (type && strcmp(type, "run") == 0) {
        double world_size = number(line, "world_size");
        log->world_size = world_size >= 1 && world_size < 1e6 ? (int)world_size : 1;
        log->n_params = number(line, "n_params");
        log->n_compressed = number(line, "n_compressed");
        if (!log->about) log->about = json_incref(line);
    } else if (type && strcmp(type, "step") == 0) {
        return add_step(log, line);
    } else if (type && strcmp(type, "eval") == 0) {
        log->n_val_tokens = number(line, "n_tokens");
        return add_eval(log, number(line, "step"), number(line, "val_loss"));
    }
    return TAGC_OK;
}

static tagc_status read_lines(tagc_runlog *log, FILE *file, const char *path) {
    tagc_status status = TAGC_OK;
    char *text = NULL;
    size_t capacity = 0;
    ssize_t n;
    for (int at = 1; status == TAGC_OK && (n = getline(&text, &capacity, file)) > 0; at++) {
        json_error_t error;
        json_t *line = json_loads(text, 0, &error);
        if (line) {
            status = add_line(log, line);
            if (status != TAGC_OK) tagc_fail_in(status, "%s line %d", path, at);
        } else if (text[n - 1] == '\n') {
            status = tagc_fail(TAGC_ERR_CORRUPT, "%s line %d is no JSON: %s", path, at, error.text);
        }
        json_decref(line);
    }
    free(text);
    return status;
}

/* The last part of a path, which usually names the run. */
static void make_label(const char *dir, char *label, size_t n_bytes) {
    size_t end = strlen(dir);
    static const char file[] = "/metrics.jsonl";
    while (end > 1 && dir[end - 1] == '/') end--;
    size_t n_file = sizeof file - 1;
    if (end > n_file && strncmp(dir + end - n_file, file, n_file) == 0) end -= n_file;
    size_t start = end;
    while (start > 0 && dir[start - 1] != '/') start--;
    snprintf(label, n_bytes, "%.*s", (int)(end - start), dir + start);
}

tagc_status tagc_runlog_read(const char *dir, tagc_runlog *out) {
    char path[TAGC_PATH_BYTES];
    *out = (tagc_runlog){
        .world_size = 1, .n_params = (double)NAN, .n_compressed = (double)NAN, .n_val_tokens = (double)NAN};
    int is_file = tagc_path_exists(dir) && !tagc_path_is_dir(dir);
    out->dir = dir;
    make_label(dir, out->label, sizeof out->label);
    TAGC_TRY(tagc_path_print(path, "%s%s", dir, is_file ? "" : "/metrics.jsonl"));
    FILE *file = fopen(path, "r");
    if (!file)
        return tagc_fail(TAGC_ERR_IO, "%s: %s; a run's folder is made by tagc train --out", path,
                         strerror(errno));
    tagc_status status = read_lines(out, file, path);
    fclose(file);
    if (status == TAGC_OK && out->n_steps == 0)
        status = tagc_fail(TAGC_ERR_CORRUPT, "%s holds no steps", path);
    if (status != TAGC_OK) tagc_runlog_destroy(out);
    return status;
}

void tagc_runlog_destroy(tagc_runlog *log) {
    json_decref(log->about);
    free(log->steps);
    free(log->eval_steps);
    free(log->val_losses);
    *log = (tagc_runlog){0};
}

/* The first step after the warm-up. */
static int first_step(const tagc_runlog *log) {
    return log->n_steps > 4 ? 2 : 0;
}

/* The finite values of the field, malloc'ed; NULL and 0 if there is no memory. */
static double *values_of(const tagc_runlog *log, size_t offset, int *n) {
    double *values = malloc(((size_t)log->n_steps + 1) * sizeof *values);
    *n = 0;
    if (!values) return NULL;
    values[0] = (double)NAN;
    for (int i = first_step(log); i < log->n_steps; i++) {
        double value = *(const double *)((const char *)&log->steps[i] + offset);
        if (isfinite(value)) values[(*n)++] = value;
    }
    return values;
}

double tagc_runlog_median(const tagc_runlog *log, size_t offset) {
    int n;
    double *values = values_of(log, offset, &n);
    double median = tagc_result_spread_of(values, n).median;
    free(values);
    return median;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

tagc_result_spread tagc_runlog_middle(const tagc_runlog *log, size_t offset) {
    int n;
    double *values = values_of(log, offset, &n);
    tagc_result_spread spread = tagc_result_spread_of(values, n);
    if (values && n > 0) {
        qsort(values, (size_t)n, sizeof *values, by_value);
        int n_left_out = (n - 1) / 10; /* at each end */
        spread.min = values[n_left_out];
        spread.max = values[n - 1 - n_left_out];
    }
    free(values);
    return spread;
}

double tagc_runlog_mean(const tagc_runlog *log, size_t offset) {
    double sum = 0;
    int n = 0;
    for (int i = first_step(log); i < log->n_steps; i++) {
        double value = *(const double *)((const char *)&log->steps[i] + offset);
        if (!isfinite(value)) continue;
        sum += value;
        n++;
    }
    return n > 0 ? sum / n : (double)NAN;
}

/* ---- as CSV (RFC 4180, but lines end with \n), for spreadsheets and plotting tools ---- */

/* Fields in columns of their own: from lr to comm_s. Step and loss come before them, overlap is left out. */
enum { FIRST_COLUMN = 2, N_COLUMNS = N_FIELDS - 1 };

/* With as few digits as read back as the same number; empty where it is not finite. */
static void put_number(FILE *file, double value) {
    char text[32] = "";
    for (int digits = 6; isfinite(value) && digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    fprintf(file, ",%s", text);
}

/* Quoted where it has to be. */
static void put_text(FILE *file, const char *text) {
    if (!text[strcspn(text, ",\"\r\n")]) {
        fputs(text, file);
        return;
    }
    fputc('"', file);
    for (; *text; text++) fprintf(file, *text == '"' ? "\"\"" : "%c", *text);
    fputc('"', file);
}

/* step: NULL for an evaluation without a step. */
static void put_row(FILE *file, const tagc_runlog *run, double at, const tagc_runlog_step *step,
                    double val_loss) {
    const double none = (double)NAN;
    put_text(file, run->dir);
    put_number(file, at);
    put_number(file, step ? step->loss : none);
    put_number(file, val_loss);
    for (int i = FIRST_COLUMN; i < N_COLUMNS; i++)
        put_number(file, step ? *(const double *)((const char *)step + fields[i].offset) : none);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) put_number(file, step ? step->bits_sent[leg] : none);
    fputc('\n', file);
}

static void put_run(FILE *file, const tagc_runlog *run) {
    int eval = 0;
    for (int i = 0; i < run->n_steps; i++) {
        const tagc_runlog_step *step = &run->steps[i];
        for (; eval < run->n_evals && run->eval_steps[eval] < step->step; eval++)
            put_row(file, run, run->eval_steps[eval], NULL, run->val_losses[eval]);
        int has_eval = eval < run->n_evals && run->eval_steps[eval] == step->step;
        put_row(file, run, step->step, step, has_eval ? run->val_losses[eval] : (double)NAN);
        eval += has_eval;
    }
    for (; eval < run->n_evals; eval++)
        put_row(file, run, run->eval_steps[eval], NULL, run->val_losses[eval]);
}

tagc_status tagc_runlog_write_csv(const tagc_runlog *runs, int n, const char *path) {
    tagc_new_file file;
    TAGC_TRY(tagc_new_file_open(path, &file));
    fprintf(file.stream, "run,step,loss,val_loss");
    for (int i = FIRST_COLUMN; i < N_COLUMNS; i++) fprintf(file.stream, ",%s", fields[i].name);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++)
        fprintf(file.stream, ",%s_bits_sent_per_param", tagc_leg_name(leg));
    fputc('\n', file.stream);
    for (int i = 0; i < n; i++) put_run(file.stream, &runs[i]);
    tagc_status status = tagc_new_file_commit(&file);
    tagc_new_file_close(&file);
    return status;
}
