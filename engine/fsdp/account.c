/* Spans of the compute stream, and waits. */
#include "fsdp/account.h"

#define SHORT_S 1e-6 /* shorter spans get no event */

static const char *const pass_names[] = {"forward", "backward", "between passes"};

void tagc_account_event(tagc_account *a, const char *name, double start_s, double end_s, uint64_t tag) {
    if (a->trace == NULL || end_s - start_s < SHORT_S) return;
    tagc_event event = {.stream = "compute", .name = name, .start_s = start_s, .end_s = end_s, .tag = tag};
    tagc_trace_add(a->trace, &event);
}

void tagc_account_close(tagc_account *a, double end_s, int pass) {
    if (a->span_unit >= 0)
        tagc_account_event(a, pass_names[pass], a->span_start_s, end_s, (uint64_t)a->span_unit);
    a->span_unit = -1;
}

void tagc_account_enter(tagc_account *a, int unit, int pass) {
    if (a->trace == NULL || a->span_unit == unit) return;
    double now_s = tagc_time_s();
    tagc_account_close(a, now_s, pass);
    a->span_unit = unit;
    a->span_start_s = now_s;
}

void tagc_account_blocked(tagc_account *a, double start_s, double *total_s, int unit, int pass) {
    double end_s = tagc_time_s();
    *total_s += end_s - start_s;
    int span_unit = a->span_unit;
    tagc_account_close(a, start_s, pass);
    tagc_account_event(a, "wait", start_s, end_s, (uint64_t)unit);
    a->span_unit = span_unit;
    a->span_start_s = end_s;
}
