/* What one step did: how long the caller computed and waited, the spans of its compute stream, and the bytes sent. */
#ifndef TAGC_FSDP_ACCOUNT_H
#define TAGC_FSDP_ACCOUNT_H

#include "fsdp/fsdp.h"
#include "fsdp/trace.h"

typedef struct tagc_account {
    tagc_trace *trace; /* may be NULL */
    double step_start_s;
    int span_unit; /* of the compute span now open, or -1 */
    double span_start_s;
    /* Sharding GRAD: by gathers since the last update. */
    uint64_t sent_before[TAGC_N_LEGS], received_before[TAGC_N_LEGS];
    tagc_fsdp_stats stats;
} tagc_account;

void tagc_account_event(tagc_account *account, const char *name, double start_s, double end_s, uint64_t tag);
/* Compute time is booked on the unit that the model asked for last, because spans of one stream must not overlap. */
void tagc_account_enter(tagc_account *account, int unit, int pass);
void tagc_account_close(tagc_account *account, double end_s, int pass);
/* Adds the time since start_s, in which the caller was blocked, to *total_s and to the trace. pass: a tagc_pass. */
void tagc_account_blocked(tagc_account *account, double start_s, double *total_s, int unit, int pass);

#endif
