/* The two derived figures of a step, in one place so that progress and metrics agree. */
#include "train/step_report.h"

double tagc_step_report_bits(const tagc_step_report *report, int first_leg, int last_leg) {
    double bits = 0;
    for (int leg = first_leg; leg <= last_leg; leg++) bits += report->stats.bits_per_param[leg];
    return report->world_size > 1 ? bits * report->world_size / (report->world_size - 1) : 0;
}

double tagc_step_report_overlap(const tagc_step_report *report) {
    double exposed = report->stats.wait_gather_s + report->stats.wait_reduce_s;
    double total = report->busy.exchange_s;
    if (total <= 0 || exposed >= total) return 0; /* NaN passes */
    return 1 - exposed / total;
}
