/* Inside of the engine, which is made of four parts: the tables of its layout (tables.h), the order of gathers and
 * exchanges (gather_order.h), the account of a step (account.h), and what the optimizer and the exchanges keep. */
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

struct tagc_fsdp {
    tagc_comm *comm;
    tagc_trace *trace; /* may be NULL */
    int rank, world_size;
    int n_owners; /* ranks that hold one copy of a flat together: W, those of a host, or 1 where all is replicated */
    tagc_fsdp_options options;
    char *names; /* copy of options.names */

    tagc_tables tables;
    tagc_gather_order order;
    tagc_account account;
    void *tables_memory, *values_memory; /* behind the tables, and behind their arrays of floats */
    double *norms;                       /* (W) */
    double *coherences;                  /* (2 + W, n_parts, 2) */
    int n_parts;                         /* of all flats: a flat has one for each stage */
    int n_gentle;                        /* flats */
    tagc_fsdp_memory memory;

    uint64_t n_updates;     /* optimizer steps taken, for the bias correction */
    uint64_t n_steps_begun; /* by this engine */
    double kept_factor;     /* what is kept of compressed flats, times this */
    tagc_status deferred;   /* of a failure in _done, which cannot return it */
    char deferred_text[TAGC_ERROR_TEXT_BYTES];
};

/* ---- options.c ---- */
#define TAGC_OPTIONS_TEXT_BYTES 2048
tagc_status tagc_fsdp_options_check(const tagc_fsdp_options *options);
/* What must agree over ranks, as "name=value" words. */
void tagc_fsdp_options_text(const tagc_fsdp *fsdp, char text[TAGC_OPTIONS_TEXT_BYTES]);

/* ---- layout.c ---- */
/* What `rank` holds of a flat of n_padded values: row rank % n_owners of (n_owners, n_owned). The rows are the same on
 * all hosts; the part that `rank` alone answers for, where every value must count once: _own_part, n_padded / W. */
void tagc_fsdp_owned(const tagc_fsdp *fsdp, uint64_t n_padded, int rank, uint64_t *first, uint64_t *n_owned);
uint64_t tagc_fsdp_own_part(uint64_t n_padded, int world_size, int n_owners, int rank);
tagc_status tagc_fsdp_layout(tagc_fsdp *fsdp, const tagc_tensor_info *tensors, int n_tensors); /* tables */
tagc_status tagc_fsdp_place(tagc_fsdp *fsdp);                                                  /* arrays */
/* How much _place would allocate, and fsdp->memory. */
tagc_status tagc_fsdp_measure(tagc_fsdp *fsdp, size_t *n_bytes);

/* ---- exchange.c ---- */
/* What a flat asks of its reducer and, where it returns 1, of its gatherer. */
int tagc_fsdp_exchange_options(const tagc_fsdp *fsdp, const tagc_flat *flat, tagc_reducer_options *reducer,
                               tagc_gatherer_options *gatherer);

tagc_status tagc_fsdp_make_exchange(tagc_fsdp *fsdp, tagc_flat *flat);
void tagc_fsdp_drop_carry(tagc_fsdp *fsdp, tagc_flat *flat);
/* What is still to come of this rank's gradients: the carry where there is one, else the reducer's residual, which is
 * zero then. */
const float *tagc_fsdp_residual(const tagc_flat *flat, uint64_t *n_elems);

/* Collective, between steps: makes the reducer anew for what `changed`, a copy of the flat with other wishes, asks of it. On
 * failure the flat is as before. */
tagc_status tagc_fsdp_change_exchange(tagc_fsdp *fsdp, int index, const tagc_flat *changed);

/* ---- gentle.c ---- */
int tagc_fsdp_can_be_gentle(const tagc_fsdp *fsdp, const tagc_flat *flat);
void tagc_fsdp_gentle_options(tagc_reducer_options *options); /* of a flat while it is */
int tagc_fsdp_n_parts(const tagc_fsdp *fsdp, const tagc_flat *flat);
tagc_status tagc_fsdp_begin_gentle(tagc_fsdp *fsdp); /* collective, before the first gather of a step */
/* Collective: a checkpoint's flat was, or was not. What is not any more does not begin again. */
tagc_status tagc_fsdp_load_gentle(tagc_fsdp *fsdp, int index, int gentle);

/* ---- kept.c ---- */
tagc_status tagc_fsdp_begin_kept(tagc_fsdp *fsdp); /* before the first gather of a step */

/* ---- pass.c ---- */
extern const tagc_order_calls tagc_fsdp_order_calls;
/* How many gathers made the replica that this flat has now; 0 where it has none, or where it is out of date. */
uint64_t tagc_fsdp_replica_gathers(const tagc_fsdp *fsdp, int flat);
/* Bytes of gathers since the last step was counted, which the next step counts. */
void tagc_fsdp_gathered(const tagc_fsdp *fsdp, uint64_t *sent, uint64_t *received);
void tagc_fsdp_set_gathered(tagc_fsdp *fsdp, uint64_t sent, uint64_t received);
/* Before masters change from outside, or where what is gathered must not depend on what was: no gather is under way,
 * and the next ones are whole. */
tagc_status tagc_fsdp_renew(tagc_fsdp *fsdp);

/* ---- optimizer ---- */
/* Of tensors in that flat. */
double tagc_fsdp_beta1(const tagc_fsdp_options *options, const tagc_flat *flat);

#endif
