/* Runs as CSV (RFC 4180, but lines end with \n), for spreadsheets and plotting tools. */
#include "files/runlog.h"

#include "core/status.h"
#include "disk/new_file.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Fields in columns of their own: from lr to comm_s. Step and loss come before them, overlap is left out. */
enum { FIRST_COLUMN = 2, N_COLUMNS = TAGC_RUNLOG_N_FIELDS - 1 };

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
        put_number(file, step ? *(const double *)((const char *)step + tagc_runlog_fields[i].offset) : none);
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
    for (int i = FIRST_COLUMN; i < N_COLUMNS; i++) fprintf(file.stream, ",%s", tagc_runlog_fields[i].name);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++)
        fprintf(file.stream, ",%s_bits_sent_per_param", tagc_leg_name(leg));
    fputc('\n', file.stream);
    for (int i = 0; i < n; i++) put_run(file.stream, &runs[i]);
    tagc_status status = tagc_new_file_commit(&file);
    tagc_new_file_close(&file);
    return status;
}
