/* Any bytes as an input of a report: an error, or a page whose every element is closed and that no input wrote markup
 * into. */
#include "report/page.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static size_t count(const char *text, const char *word) {
    size_t n = 0;
    for (; (text = strstr(text, word)); text++) n++;
    return n;
}

static void check_page(const tagc_report *report) {
    tagc_view view = {0};
    tagc_text page = {0}, words = {0};
    tagc_page_print(report, &view, "fuzz", &page);
    tagc_summary_print(report, &view, &words);
    if (page.failed || words.failed) abort();
    static const char *const elements[][2] = {{"<section", "</section>"},
                                              {"<table", "</table>"},
                                              {"<tr", "</tr>"},
                                              {"<svg", "</svg>"},
                                              {"<g ", "</g>"}};
    for (size_t i = 0; i < sizeof elements / sizeof elements[0]; i++)
        if (count(page.data, elements[i][0]) != count(page.data, elements[i][1])) abort();
    if (count(page.data, "<script") != 1 || strstr(page.data, "nan") || strstr(page.data, "\"inf")) abort();
    tagc_text_destroy(&page);
    tagc_text_destroy(&words);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    char path[64];
    snprintf(path, sizeof path, "/tmp/tagc-fuzz-report-%ld", (long)getpid());
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, n_bytes, file) != n_bytes || fclose(file)) abort();
    tagc_report report = {0};
    if (tagc_report_add(&report, path) == TAGC_OK && tagc_report_finish(&report) == TAGC_OK)
        check_page(&report);
    tagc_report_destroy(&report);
    unlink(path);
    return 0;
}
