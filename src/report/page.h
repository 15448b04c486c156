/* The page: one HTML file that needs nothing else. */
#ifndef TAGC_REPORT_PAGE_H
#define TAGC_REPORT_PAGE_H

#include "report/summary.h"

/* title: NULL for one made of what there is. */
void tagc_page_print(const tagc_report *report, const tagc_view *view, const char *title, tagc_text *out);

/* ---- its tables ---- */
void tagc_page_cell(tagc_text *out, const char *classes, const char *words); /* <td>, words escaped */
void tagc_page_swatch(tagc_text *out, int color);
void tagc_table_summary(const tagc_set *set, tagc_text *out);
void tagc_table_shares(const tagc_report *report, const tagc_view *view, tagc_text *out);
void tagc_table_link(const tagc_report *report, tagc_text *out);
void tagc_table_lab(const tagc_report *report, tagc_text *out);
void tagc_table_pairs(const tagc_report *report, tagc_text *out);
void tagc_table_checks(const tagc_report *report, tagc_text *out);
void tagc_table_plan(const tagc_report *report, tagc_text *out);
void tagc_table_options(const tagc_report *report, tagc_text *out);
void tagc_table_sources(const tagc_report *report, tagc_text *out);

/* Median time of the first arm over that of the second, one sample per round. */
tagc_spread tagc_pair_ratio(const json_t *bench, const char *first, const char *second);

#endif
