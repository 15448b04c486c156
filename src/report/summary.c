/* Words and tables of the summary. A gain that does not stand out of its own spread is told as none. */
#include "report/summary.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SENTENCES = 6, MOST_ADVICE = 2, WIDTH = 100, NAME_BYTES = 40 };

const char *const tagc_summary_heads[TAGC_SUMMARY_COLUMNS] = {
    "arm", "step", "speed-up", "least–most", "exposed", "gradient bits", "all bits", "val. loss", "gap"};

static double gradient_bits(const tagc_result *result) {
    double sum = 0;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++)
        if (leg != TAGC_LEG_GATHER) sum += result->bits[leg];
    return sum;
}

static double all_bits(const tagc_result *result) {
    return gradient_bits(result) + result->bits[TAGC_LEG_GATHER];
}

void tagc_summary_row(const tagc_set *set, int arm, char cells[TAGC_SUMMARY_COLUMNS][TAGC_CELL_BYTES]) {
    const tagc_result *r = &set->results[arm];
    char number[TAGC_NUMBER_BYTES];
    for (int i = 0; i < TAGC_SUMMARY_COLUMNS; i++) cells[i][0] = 0;
    snprintf(cells[0], TAGC_CELL_BYTES, "%.47s", r->name);
    if (r->total_s.n > 0)
        snprintf(cells[1], TAGC_CELL_BYTES, "%s", tagc_number_time(r->total_s.middle, number));
    if (r->speedup.n > 0) snprintf(cells[2], TAGC_CELL_BYTES, "%.2fx", fmin(r->speedup.middle, 9999));
    if (r->speedup.n > 1)
        snprintf(cells[3], TAGC_CELL_BYTES, "%.2f–%.2f", fmin(r->speedup.min, 9999),
                 fmin(r->speedup.max, 9999));
    if (r->exposed_s.n > 0 && r->total_s.middle > 0)
        snprintf(cells[4], TAGC_CELL_BYTES, "%s",
                 tagc_number_percent(r->exposed_s.middle / r->total_s.middle, number));
    if (isfinite(all_bits(r))) {
        snprintf(cells[5], TAGC_CELL_BYTES, "%s", tagc_number_fixed(gradient_bits(r), 2, number));
        snprintf(cells[6], TAGC_CELL_BYTES, "%s", tagc_number_fixed(all_bits(r), 2, number));
    }
    if (r->loss.n > 0)
        snprintf(cells[7], TAGC_CELL_BYTES, "%s", tagc_number_fixed(r->loss.middle, 4, number));
    if (r->gap.n > 0) snprintf(cells[8], TAGC_CELL_BYTES, "%s", tagc_number_change(r->gap.middle, number));
}

/* ---- words ---- */

int tagc_summary_best(const tagc_set *set) {
    int best = -1;
    for (int i = 0; i < set->n_results; i++)
        if (set->results[i].total_s.n > 0 &&
            (best < 0 || set->results[i].total_s.middle < set->results[best].total_s.middle))
            best = i;
    return best;
}

/* The arm other than the first that is ahead of the others; speed-ups decide where there are such. */
static int best_other(const tagc_set *set) {
    int best = -1;
    for (int i = 1; i < set->n_results; i++) {
        const tagc_result *r = &set->results[i];
        if (r->speedup.n > 0 && (best < 0 || r->speedup.middle > set->results[best].speedup.middle)) best = i;
    }
    return best;
}

/* Could chance have put this arm before the first? Rounds: some went the other way. Runs: the middle 80 % of their
 * steps overlap. */
static int is_within_spread(const tagc_set *set, const tagc_result *r) {
    const tagc_result *first = &set->results[0];
    if (r->speedup.n > 1) return r->speedup.min <= 1 && r->speedup.max >= 1;
    return first->total_s.n > 1 && r->total_s.min <= first->total_s.max &&
           r->total_s.max >= first->total_s.min;
}

static void add_times(const tagc_set *set, tagc_text *out) {
    const tagc_result *first = &set->results[0];
    int other = best_other(set);
    char time[TAGC_NUMBER_BYTES];
    if (set->n_results == 1 && first->total_s.n > 0)
        tagc_text_printf(out, "%s: a step of %.*s takes %s; there is no other arm to hold it against.",
                         set->title, NAME_BYTES, first->name, tagc_number_time(first->total_s.middle, time));
    if (other < 0) return;
    const tagc_result *r = &set->results[other];
    char range[64] = "";
    if (r->speedup.n > 1)
        snprintf(range, sizeof range, " (%.2f to %.2f over %d rounds)", r->speedup.min, r->speedup.max,
                 r->speedup.n);
    tagc_text_printf(out, "%s: ", set->title);
    if (set->kind == TAGC_SET_PLAN)
        tagc_text_printf(out, "%.*s is predicted to be %s, %.2f times as fast as %.*s.", NAME_BYTES, r->name,
                         r->speedup.middle > 1 ? "the fastest" : "the nearest", r->speedup.middle, NAME_BYTES,
                         first->name);
    else if (is_within_spread(set, r))
        tagc_text_printf(out,
                         "no arm is told apart from %.*s: %.*s is %.2f times as fast, within the spread%s.",
                         NAME_BYTES, first->name, NAME_BYTES, r->name, r->speedup.middle, range);
    else if (r->speedup.middle > 1)
        tagc_text_printf(out, "%.*s is the fastest of %d arms, %.2f times as fast as %.*s%s.", NAME_BYTES,
                         r->name, set->n_results, r->speedup.middle, NAME_BYTES, first->name, range);
    else
        tagc_text_printf(out, "no arm is faster than %.*s; %.*s comes nearest, %.2f times as fast%s.",
                         NAME_BYTES, first->name, NAME_BYTES, r->name, r->speedup.middle, range);
    if (all_bits(r) > 0 && all_bits(first) > 0)
        tagc_text_printf(out, " It sends %.3g bits per parameter and step, %.*s %.3g.", all_bits(r),
                         NAME_BYTES, first->name, all_bits(first));
    if (set->kind == TAGC_SET_BENCH && r->speedup.n == 1)
        tagc_text_add(out, " That was one round: its spread is not known.");
    if (set->kind == TAGC_SET_RUNS)
        tagc_text_add(
            out,
            " Runs were made one after the other: only a bench, whose arms take turns, compares times well.");
}

static void add_losses(const tagc_report *report, const tagc_set *set, tagc_text *out) {
    const tagc_result *first = &set->results[0];
    int n = 0;
    char number[TAGC_NUMBER_BYTES], low[TAGC_NUMBER_BYTES], high[TAGC_NUMBER_BYTES];
    double own = first->loss.n > 1 ? (first->loss.max - first->loss.min) / 2 / fabs(first->loss.middle) : 0;
    for (int i = 1; i < set->n_results; i++) {
        const tagc_result *r = &set->results[i];
        if (r->gap.n == 0) continue;
        if (n++ == 4) tagc_text_add(out, ", others below");
        if (n > 4) continue;
        int is_within = first->loss.n > 1 && fabs(r->gap.middle) <= own;
        tagc_text_printf(out, "%s%.*s %s", n == 1 ? "Validation loss at the last common step: " : ", ",
                         NAME_BYTES, r->name, tagc_number_change(r->gap.middle, number));
        if (n == 1) tagc_text_printf(out, " against %.*s", NAME_BYTES, first->name);
        if (r->gap.n > 1)
            tagc_text_printf(out, " (%s to %s over %d seeds)", tagc_number_change(r->gap.min, low),
                             tagc_number_change(r->gap.max, high), r->gap.n);
        if (is_within) tagc_text_printf(out, ", within the spread");
    }
    if (n == 0) return;
    if (first->loss.n > 1)
        tagc_text_printf(out, ". Seeds of %.*s alone differ by ±%.2g %%.", NAME_BYTES, first->name,
                         100 * own);
    else
        tagc_text_add(out, ". One seed: how far another one would lie is not known.");
    (void)report;
    tagc_text_add(out, "\n");
}

static void add_shares(const tagc_report *report, const tagc_view *view, tagc_text *out) {
    int n = 0;
    for (int t = 0; t < report->n_traces && n < 3; t++) {
        char units[TAGC_UNITS_BYTES];
        const char *of = tagc_view_units(view, &report->traces[t], units);
        tagc_shares shares = tagc_trace_shares(&report->traces[t], of);
        if (shares.n == 0) continue;
        if (n++ == 0)
            tagc_text_printf(
                out, "Backward pass of %.60s: %.40s computes %.1f %% of the time and communicates %.1f %%",
                of, report->traces[t].label, 100 * shares.computing, 100 * shares.communicating);
        else
            tagc_text_printf(out, ", %.40s %.1f %% and %.1f %%", report->traces[t].label,
                             100 * shares.computing, 100 * shares.communicating);
    }
    if (n > 0) tagc_text_add(out, ".\n");
}

void tagc_summary_words(const tagc_report *report, const tagc_view *view, tagc_text *out) {
    int n_said = 0, n_left = 0, n_advice = 0;
    for (int plans = 0; plans < 2; plans++) { /* what was measured first */
        for (int s = 0; s < report->n_sets; s++) {
            const tagc_set *set = &report->sets[s];
            if ((set->kind == TAGC_SET_PLAN) != plans || set->n_results == 0) continue;
            if (n_said >= MOST_SENTENCES - 2 * plans) {
                n_left++;
                continue;
            }
            size_t before = out->n_bytes;
            add_times(set, out);
            if (out->n_bytes > before) {
                tagc_text_add(out, "\n");
                n_said++;
            }
            add_losses(report, set, out);
            const json_t *advice = json_object_get(set->bench, "recommendation");
            const char *reason = json_string_value(json_object_get(advice, "reason"));

            if (reason && n_advice++ < MOST_ADVICE)
                tagc_text_printf(out, "tagc bench recommends: %s.\n", reason);
        }
    }
    if (out->n_bytes == 0 && report->n_sets > 0)
        tagc_text_add(out, "No arm was timed; what is known of codec and link is on the page (--out).\n");
    if (n_left > 0) tagc_text_printf(out, "The tables below have %d more.\n", n_left);
    add_shares(report, view, out);
}

/* ---- the terminal ---- */

/* Lines of at most WIDTH characters, broken at blanks. */
static void add_wrapped(const char *line, size_t n_bytes, tagc_text *out) {
    size_t column = 0, at = 0;
    while (at < n_bytes) {
        size_t n_word = 0;
        while (at + n_word < n_bytes && line[at + n_word] != ' ') n_word++;
        char word[512];
        snprintf(word, sizeof word, "%.*s", (int)(n_word < 500 ? n_word : 500), line + at);
        size_t length = tagc_text_length(word);
        if (column > 0 && column + 1 + length > WIDTH) {
            tagc_text_add(out, "\n");
            column = 0;
        }
        if (column > 0) tagc_text_add(out, " ");
        tagc_text_plain(out, word);
        column += length + (column > 0);
        at += n_word + 1;
    }
    tagc_text_add(out, "\n");
}

static void add_cell(const char *words, int width, int is_left, tagc_text *out) {
    char cut[TAGC_CELL_BYTES * 2];
    size_t n = 0, n_characters = 0;
    int is_long = tagc_text_length(words) > (size_t)width;
    while (words[n] && n_characters + (size_t)is_long < (size_t)width && n + 8 < sizeof cut) {
        int is_valid;
        n += tagc_text_character(words + n, &is_valid);
        n_characters++;
    }
    snprintf(cut, sizeof cut, "%.*s%s", (int)n, words, is_long ? "…" : "");
    n_characters += (size_t)is_long;
    int room = width - (int)n_characters;
    if (!is_left) tagc_text_printf(out, "%*s", room, "");
    tagc_text_plain(out, cut);
    if (is_left) tagc_text_printf(out, "%*s", room, "");
}

static void add_table(const tagc_set *set, tagc_text *out) {
    static const int widths[TAGC_SUMMARY_COLUMNS] = {22, 9, 9, 11, 8, 9, 8, 9, 9};
    static const char *const heads[2][TAGC_SUMMARY_COLUMNS] = {
        {"", "", "speed-", "least to", "exposed", "gradient", "all", "val.", ""},
        {"arm", "step", "up", "most", "comm.", "bits", "bits", "loss", "gap"}};
    char cells[TAGC_SUMMARY_COLUMNS][TAGC_CELL_BYTES];
    add_wrapped(set->title, strlen(set->title), out);
    for (int row = -2; row < set->n_results; row++) {
        if (row >= 0) tagc_summary_row(set, row, cells);
        for (int i = 0; i < TAGC_SUMMARY_COLUMNS; i++)
            add_cell(row < 0 ? heads[row + 2][i] : *cells[i] ? cells[i] : "-", widths[i], i == 0, out);
        tagc_text_add(out, "\n");
    }
    tagc_text_add(out, "\n");
}

void tagc_summary_print(const tagc_report *report, const tagc_view *view, tagc_text *out) {
    tagc_text words = {0};
    tagc_summary_words(report, view, &words);
    for (const char *line = words.data; line && *line;) {
        size_t n = strcspn(line, "\n");
        add_wrapped(line, n, out);
        line += n + (line[n] == '\n');
    }
    out->failed |= words.failed;
    tagc_text_destroy(&words);
    tagc_text_add(out, "\n");
    for (int s = 0; s < report->n_sets; s++)
        if (report->sets[s].n_results > 0) add_table(&report->sets[s], out);
    for (int i = 0; i < report->n_notes; i++) {
        char note[1100];
        snprintf(note, sizeof note, "note: %.1000s", report->notes[i]);
        add_wrapped(note, strlen(note), out);
    }
}
