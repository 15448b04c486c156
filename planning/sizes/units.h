/* What a step of a model that is there takes, and what its hosts send: the model by its units, the link, the codec and torch's own
 * collectives as they were measured. `tagc.advise()` asks once for each way to send. Volumes are those of the code that runs
 * exchanges.
 *
 * A step computes, and waits: gradients of a unit are exchanged one after the other, and parameters gathered before each pass. What
 * runs beside the backward pass with DDP takes no time until that is over. */
#ifndef TAGC_SIZES_UNITS_H
#define TAGC_SIZES_UNITS_H

#include "tagc/policy.h"
#include "tagc/tagc.h"

/* What two sizes took; others lie on the line through both. All zero: not measured, and takes no time. */
typedef struct tagc_timed {
    double n[2]; /* elements */
    double s[2]; /* seconds */
} tagc_timed;

typedef struct tagc_units_unit {
    double trained[TAGC_N_CLASSES];   /* elements of its gradients, by class */
    double fp32, bf16, n_other_bytes; /* that a gather sends: elements of each, and bytes of other types */
    int n_gathers;                    /* by torch, in a pass */
} tagc_units_unit;

/* Measured here. Sizes of collectives are those of a whole unit. */
typedef struct tagc_units_times {
    double latency_s, bytes_per_s;   /* a message between hosts; what a rank sends, all at once */
    tagc_timed reduce[2], gather[2]; /* by torch over all ranks: fp32, bf16 */
    tagc_timed own[2];               /* FSDP2 itself, of a unit that is gathered once in a pass, or twice */
    tagc_timed copy_out, copy_back;  /* fp32, from the device and to it */
    tagc_timed sum_within, share_within; /* among the ranks of a host: gradients, and what all of them get */
} tagc_units_times;

typedef struct tagc_units_question {
    size_t struct_bytes;
    const tagc_units_unit *units; /* (n_units) in their order */
    size_t n_units;
    double joined; /* neighbours are joined up to so many elements, as tagc.buckets() does; 0: none */
    int world_size, ranks_per_host;
    int is_ddp;         /* 1: the backward pass hides exchanges, and units are joined by what is trained */
    int is_all_reduce;  /* 1: gradients go to every rank; 0: to their owners */
    int reduces_frozen; /* 1: torch reduces all of a unit of which something is trained */
    int n_passes;       /* of a step, of which the last exchanges gradients */
    double compute_s;   /* of a step; 0: not known */
    tagc_units_times times;

    int reduce;        /* tagc_format of gradients: BF16 or FP32 */
    int narrows;       /* 1: torch gathers fp32 parameters in bf16 */
    int parameters;    /* tagc_gather_kind by which tagc gathers units of one type; -1: torch does */
    int codec_on_host; /* 1: what tagc sends is copied from the device to the host, and back */
    /* (TAGC_N_CLASSES) how tagc sends gradients, whatever their n_elems; NULL: torch reduces them. */
    const tagc_reducer_options *gradients;
    double codec_s[TAGC_N_CLASSES]; /* per element that a rank encodes, all phases */
    double gather_s, again_s;       /* per element of a gather; of one for which nothing has changed */
} tagc_units_question;

typedef struct tagc_units_reply {
    size_t struct_bytes;
    size_t n_units;                   /* of which something is trained or gathered, once they are joined */
    double gradients_s, parameters_s; /* of communication, in a step */
    double exposed_s, own_s, step_s; /* of that what nothing hides; FSDP2 itself; 0: compute_s is not known */
    double host_bytes; /* to other hosts, in each direction; of torch's own by a ring of all ranks */
    char why[256];     /* "" or why there is no answer */
} tagc_units_reply;

/* On failure reply->why names the field, its value and what is allowed. */
TAGC_API tagc_status tagc_plan_units(const tagc_units_question *question, tagc_units_reply *reply);

/* ---- steps of each site, and an exchange of one of `fragments` after every few of them ---- */

/* Returns the mean seconds of a step. exchange_s: of a fragment, which `delay` steps hide. */
TAGC_API double tagc_plan_local_s(double compute_s, double exchange_s, int every, int fragments, int delay);
/* Returns the fewest steps between exchanges at which these make no difference to a step, or the most that are offered. */
TAGC_API int tagc_plan_every(double compute_s, double exchange_s, int fragments, int delay);

#endif
