/* Inside of the engine. It has four parts: the tables of its layout (tables.h), the order of gathers and exchanges
 * (gather_order.h), the account of a step (account.h), and the state of the optimizer and of the exchanges. */
#ifndef TAGC_FSDP_INTERNAL_H
#define TAGC_FSDP_INTERNAL_H

#include "core/memory.h"
#include "core/status.h"
#include "fsdp/account.h"
#include "fsdp/adamw.h"
#include "fsdp/agree.h"
#include "fsdp/gather_order.h"
#include "fsdp/tables.h"

/* The published runs wrapped and compressed matrices with more elements than this. */
#define TAGC_LARGE_MATRIX_ELEMS 2000000u

/* The schedule, and the work memory of those who follow it. */
typedef struct tagc_follow {
    tagc_schedule *schedule;            /* NULL: no flat follows it */
    void *memory;                       /* behind the arrays */
    size_t n;                           /* parameters */
    tagc_schedule_parameter *described; /* (n,) */
    uint32_t *parameters;               /* (n,) 0, 1, 2 ... */
    uint32_t *counts;                   /* (n,) samples of each */
    uint64_t *positions;                /* of all samples, in the gradient of their flat */
    float *values;                      /* samples of one flat */
    uint32_t *full; /* (n,), n_full in use: parameters whose windows became full in this step */
    size_t n_full;
    double *own, *all; /* a message of sums, and those of all ranks */
} tagc_follow;

struct tagc_fsdp {
    tagc_comm *comm;   /* the caller's */
    tagc_trace *trace; /* may be NULL */
    int rank, world_size;
    int n_owners; /* ranks that hold one copy of a flat together: W, those of a host, or 1 if replicated */
    tagc_fsdp_options options;
    char *names; /* copy of options.names */

    tagc_tables tables;
    tagc_gather_order order;
    tagc_account account;
    void *tables_memory, *values_memory; /* behind the tables, and behind their arrays of floats */
    double *norms;                       /* (W) */
    tagc_follow follow;
    tagc_fsdp_memory memory;

    uint64_t n_updates;   /* optimizer steps taken, for the bias correction */
    tagc_status deferred; /* a failure in _done, which cannot return one */
    char deferred_text[TAGC_ERROR_TEXT_BYTES];
};

/* ---- options.c ---- */
#define TAGC_OPTIONS_TEXT_BYTES 2048
tagc_status tagc_fsdp_options_check(const tagc_fsdp_options *options);
/* The options that must agree over ranks, as "name=value" words. */
void tagc_fsdp_options_text(const tagc_fsdp *fsdp, char text[TAGC_OPTIONS_TEXT_BYTES]);

/* ---- layout.c ---- */
/* The part of a flat of n_padded values that `rank` holds: row rank % n_owners of (n_owners, n_owned). All hosts hold the
 * same rows. Sums that must count each value once use _own_part, n_padded / W values that no other rank has. */
void tagc_fsdp_owned(const tagc_fsdp *fsdp, uint64_t n_padded, int rank, uint64_t *first, uint64_t *n_owned);
uint64_t tagc_fsdp_own_part(uint64_t n_padded, int world_size, int n_owners, int rank);
tagc_status tagc_fsdp_layout(tagc_fsdp *fsdp, const tagc_tensor_info *tensors, int n_tensors); /* tables */
tagc_status tagc_fsdp_place(tagc_fsdp *fsdp);                                                  /* arrays */
/* Frees a first moment whose beta1 has fallen to 0 for good. */
void tagc_fsdp_drop_moment(tagc_fsdp *fsdp, tagc_flat *flat);
/* The bytes that _place would allocate at once; sets fsdp->memory. */
tagc_status tagc_fsdp_measure(tagc_fsdp *fsdp, size_t *n_bytes);

/* ---- exchange.c ---- */
/* The options of a flat's reducer and, if it returns 1, of its gatherer. */
int tagc_fsdp_exchange_options(const tagc_fsdp *fsdp, const tagc_flat *flat, tagc_reducer_options *reducer,
                               tagc_gatherer_options *gatherer);

tagc_status tagc_fsdp_make_exchange(tagc_fsdp *fsdp, tagc_flat *flat);
void tagc_fsdp_drop_former(tagc_fsdp *fsdp, tagc_flat *flat);
/* This rank's unsent gradients: `former` if there is one (the reducer's residual is then zero), else the reducer's
 * residual. _elems: the number of values, 0 if there are none. _read copies them to values (n_elems). */
uint64_t tagc_fsdp_residual_elems(const tagc_flat *flat);
tagc_status tagc_fsdp_residual_read(const tagc_flat *flat, float *values);
/* 1: bf16 holds them without loss, as it does what is stored in every format but fp32. */
int tagc_fsdp_residual_is_bf16(const tagc_flat *flat);
/* Their sum of squares. */
tagc_status tagc_fsdp_residual_square(const tagc_flat *flat, double *square);

/* Collective, between steps: replaces the reducer by one for `changed`, a copy of the flat with other options. On failure
 * the flat is unchanged. */
tagc_status tagc_fsdp_change_exchange(tagc_fsdp *fsdp, int index, const tagc_flat *changed);

/* Collective, between steps: lets the reducer send as `wanted` says, a copy of the flat with another plan. The residual stays. On
 * failure nothing has changed on this rank. */
tagc_status tagc_fsdp_change_reducer(tagc_fsdp *fsdp, const tagc_flat *wanted);

/* ---- follow.c ---- */
/* Whether the options let the schedule decide what this flat sends. */
int tagc_fsdp_has_levels(const tagc_fsdp *fsdp, const tagc_flat *flat);
/* Changes the options of a flat's last level into those of its plan. */
void tagc_fsdp_plan_options(const tagc_schedule_plan *plan, tagc_reducer_options *options);
tagc_status tagc_fsdp_open_follow(tagc_fsdp *fsdp);
void tagc_fsdp_close_follow(tagc_fsdp *fsdp);
/* Local: call it when this rank's gradient of the flat is complete, right before it is exchanged. */
tagc_status tagc_fsdp_sample(tagc_fsdp *fsdp, tagc_flat *flat);
/* Collective: decides, when all gradients of a step have been exchanged, and takes up what has been decided. */
tagc_status tagc_fsdp_follow(tagc_fsdp *fsdp);
/* Collective: goes on from a saved state. n_bytes 0: what is loaded followed no schedule, and goes on so. */
tagc_status tagc_fsdp_load_schedule(tagc_fsdp *fsdp, const void *bytes, size_t n_bytes, int with_windows);
/* Collective: every flat that follows the schedule begins anew, as in a model that has been trained. */
tagc_status tagc_fsdp_begin_anew(tagc_fsdp *fsdp);

/* ---- pass.c ---- */
extern const tagc_order_calls tagc_fsdp_order_calls;
/* The number of gathers that made this flat's replica; 0 if it has none or it is out of date. */
uint64_t tagc_fsdp_replica_gathers(const tagc_fsdp *fsdp, int flat);
/* Bytes of gathers since the last step, which the next step will count. */
void tagc_fsdp_gathered(const tagc_fsdp *fsdp, uint64_t *sent, uint64_t *received);
void tagc_fsdp_set_gathered(tagc_fsdp *fsdp, uint64_t sent, uint64_t received);
/* Call it before masters change from outside, or if later gathers must not depend on earlier ones. It waits for gathers
 * under way; the next ones send whole values. */
tagc_status tagc_fsdp_renew(tagc_fsdp *fsdp);

#endif
