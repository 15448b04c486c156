/* Inside of the engine. It has four parts: the tables of its layout (tables.h), the order of gathers and exchanges
 * (gather_order.h), the account of a step (account.h), and the state of the optimizer and of the exchanges. */
#ifndef TAGC_FSDP_INTERNAL_H
#define TAGC_FSDP_INTERNAL_H

#include "core/memory.h"
#include "core/status.h"
#include "fsdp/account.h"
#include "fsdp/adamw.h"
#include "fsdp/gather_order.h"
#include "fsdp/tables.h"
#include "unit/unit.h"

/* The published runs wrapped and compressed matrices with more elements than this. */
#define TAGC_LARGE_MATRIX_ELEMS 2000000u

struct tagc_fsdp {
    tagc_comm *comm; /* the caller's */
    tagc_comm *within,
        *between; /* of this host, and of this place; NULL where nothing goes over two levels */
    tagc_model *model;
    double loss;       /* of this step, NaN: not known */
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

/* ---- exchange.c ---- */
/* Writes what a flat sends at present: reducer, n_adding, within, has_gatherer and gatherer. */
void tagc_fsdp_describe_exchange(const tagc_fsdp *fsdp, const tagc_flat *flat, tagc_layout_flat *out);
/* Whether the options let the schedule decide what this flat sends. */
int tagc_fsdp_has_levels(const tagc_fsdp *fsdp, const tagc_flat *flat);
/* Collective: the comms, the model and the gatherers. _close accepts what is half-made. */
tagc_status tagc_fsdp_open_exchange(tagc_fsdp *fsdp);
void tagc_fsdp_close_exchange(tagc_fsdp *fsdp);
/* What exchanges the flat. */
const tagc_model_part *tagc_fsdp_part(const tagc_fsdp *fsdp, const tagc_flat *flat);
/* Of all comms. */
void tagc_fsdp_count_bytes(const tagc_fsdp *fsdp, uint64_t sent[TAGC_N_LEGS], uint64_t received[TAGC_N_LEGS]);
/* Collective: decides, when all gradients of a step have been exchanged, and takes up what has been decided. */
tagc_status tagc_fsdp_follow(tagc_fsdp *fsdp);
/* Collective: goes on from what tagc_model_save wrote on all former ranks. On failure nothing has changed. */
tagc_status tagc_fsdp_load_model(tagc_fsdp *fsdp, const void *const *files, const size_t *sizes,
                                 size_t n_files);
/* Collective: every flat is exchanged by the engine's options from now on. Residuals are empty. */
tagc_status tagc_fsdp_stop_following(tagc_fsdp *fsdp);
/* Collective: residuals are empty, and every flat that follows the schedule begins anew, as in a model that has been trained. */
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
