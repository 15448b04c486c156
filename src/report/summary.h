/* What somebody who must decide wants to know first: which arm is fastest, by how much and how surely, at what loss,
 * with how many bits. The same words and figures for the page and for the terminal. */
#ifndef TAGC_REPORT_SUMMARY_H
#define TAGC_REPORT_SUMMARY_H

#include "report/figures.h"

enum { TAGC_SUMMARY_COLUMNS = 9, TAGC_CELL_BYTES = 48 };
extern const char *const tagc_summary_heads[TAGC_SUMMARY_COLUMNS];

/* One sentence or two per line; names are as they were read, so that they must be escaped. */
void tagc_summary_words(const tagc_report *report, const tagc_view *view, tagc_text *out);
/* The row of an arm; the first cell is its name. */
void tagc_summary_row(const tagc_set *set, int arm, char cells[TAGC_SUMMARY_COLUMNS][TAGC_CELL_BYTES]);
/* The fastest arm, -1 when times are not known. */
int tagc_summary_best(const tagc_set *set);
/* Words, tables and notes, at most 100 columns wide. */
void tagc_summary_print(const tagc_report *report, const tagc_view *view, tagc_text *out);

#endif
