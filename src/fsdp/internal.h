/* Inside of the engine: one struct of tables and states that layout, pass, step and checkpoint share.
 *
 * What a rank holds, all of it in one arena made once:
 *
 *   per flat   master | first moment | second moment | gradient [| received]   (n_owned) each
 *   slots      parameters (n_padded) of the units that are gathered at present; absent for SHARD_NONE, where
 *              the master is the whole flat
 *   slots      gradients (W, shard) of the units that are in backward or under way
 *
 * A unit's slot never changes. Units of one stage share a few slots by position, so that neighbours never
 * meet; units that span several stages, and all units where nothing is released, have a slot of their own. */
#ifndef TAGC_FSDP_INTERNAL_H
#define TAGC_FSDP_INTERNAL_H

#include "core/memory.h"
#include "core/status.h"
#include "fsdp/fsdp.h"
#include "fsdp/gather_order.h"
#include "fsdp/trace.h"

/* The published runs wrapped and compressed matrices with more elements than this. */
#define TAGC_LARGE_MATRIX_ELEMS 2000000u

/* Where a tensor lies, and which part of it this rank owns: elements [first, first + n) of the tensor are
 * elements [at, at + n) of the owned part of the flat. */
typedef struct tagc_place {
    int unit, flat;
    uint64_t offset; /* in the flat */
    uint64_t first, at, n;
} tagc_place;

typedef struct tagc_flat {
    int unit, class_;            /* tagc_class */
    int first_member, n_members; /* in tagc_fsdp.members */
    uint64_t n_elems, n_padded;  /* without and with padding */
    uint64_t first_owned, n_owned;
    uint64_t unit_offset;                                    /* in the unit's slots */
    float *full, *full_gradient;                             /* (n_padded), in the slots */
    float *master, *moment1, *moment2, *gradient, *received; /* (n_owned) */
    tagc_reducer *reducer;
    tagc_gatherer *gatherer;
    tagc_reducer_options asked; /* by _set_exchange, with is_asked, in place of the engine's options */
    int is_asked, carry_sent;
    int gentle;         /* every value travels, in 4 bits, and the first moment is on: gentle.c */
    int ranks_per_host; /* that add before they select: each selects from one part in so many */
    float *carry;    /* (n_padded) or NULL: residual of a former exchange, to be added to the next gradient */
    double sparsity; /* in use, or -1: as the options say */
} tagc_flat;

typedef struct tagc_unit {
    char name[TAGC_TENSOR_NAME_BYTES];
    int first_flat, n_flats, n_tensors;
    int spans;       /* its tensors are used in more than one stage */
    int position[2]; /* in the order of the forward and of the backward pass */
    uint64_t backward_key;
    int n_uses;       /* expected in a forward pass */
    uint64_t n_elems; /* without padding */
    int slot, gradient_slot;
    uint64_t n_padded;
    int n_exchanged; /* in this step */
} tagc_unit;

typedef struct tagc_slot {
    float *values;
    uint64_t n_elems; /* of the largest unit that uses it */
} tagc_slot;

struct tagc_fsdp {
    tagc_comm *comm;
    tagc_trace *trace; /* may be NULL */
    int rank, world_size;
    int n_owners; /* ranks that hold one copy of a flat together: W, those of a host, or 1 where all is replicated */
    tagc_fsdp_options options;
    char *names; /* copy of options.names */

    int n_tensors, n_units, n_flats, n_slots, n_gradient_slots;
    tagc_tensor_info *tensors; /* (n_tensors) */
    tagc_place *places;        /* (n_tensors) */
    int *members;              /* (n_tensors) tensors, flat by flat */
    tagc_unit *units;          /* in the order of the forward pass */
    int *backward_order;       /* (n_units) */
    tagc_flat *flats;
    tagc_slot *slots, *gradient_slots;
    void *tables, *values; /* memory behind the above, and behind the arrays of floats */
    double *norms;         /* (W) */
    double *coherences;    /* (2 + W, n_parts, 2) */
    int n_parts;           /* of all flats: a flat has one for each stage */
    int n_gentle;          /* flats */
    tagc_fsdp_memory memory;

    tagc_gather_order order;
    uint64_t n_updates;     /* optimizer steps taken, for the bias correction */
    uint64_t n_steps_begun; /* by this engine */
    double kept_factor;     /* what is kept of compressed flats, times this */
    tagc_status deferred;   /* of a failure in _done, which cannot return it */
    char deferred_text[TAGC_ERROR_TEXT_BYTES];

    double step_start_s;
    int span_unit; /* of the present compute span, or -1 */
    double span_start_s;
    uint64_t sent_before[TAGC_N_LEGS],
        received_before[TAGC_N_LEGS]; /* sharding GRAD: gathers since an update */
    tagc_fsdp_stats stats;
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
/* The time since start_s was spent blocked: adds it to *total_s and to the trace. */
void tagc_fsdp_blocked(tagc_fsdp *fsdp, double start_s, double *total_s, int unit);
void tagc_fsdp_event(tagc_fsdp *fsdp, const char *name, double start_s, double end_s, uint64_t tag);
void tagc_fsdp_close_span(tagc_fsdp *fsdp, double end_s);

/* ---- adamw.c ---- */
typedef struct tagc_adamw {
    double lr, beta1, beta2, epsilon, weight_decay;
    double gradient_scale; /* clipping and the mean over micro-steps */
    uint64_t n_updates;    /* this one included */
} tagc_adamw;
/* Of tensors in that flat. */
double tagc_fsdp_beta1(const tagc_fsdp_options *options, const tagc_flat *flat);
/* With beta1 = 0 the first moment is not touched. */
void tagc_adamw_update(const tagc_adamw *adamw, float *master, float *moment1, float *moment2,
                       const float *gradient, size_t n);
double tagc_sum_of_squares(const float *x, size_t n); /* in double, order fixed */

/* ---- agree.c ---- */
/* Collective. Every rank brings its status (and its text, tagc_last_error); all return that of the lowest
 * rank that failed, with "rank r: " before its text. */
tagc_status tagc_agree(tagc_comm *comm, tagc_status status);

#endif
