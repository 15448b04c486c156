/* Inside of a model: options.c (what follows from options alone), layout.c (where values lie), model.c (life), parts.c (what one reducer
 * exchanges), feeds.c (what its reducers read and write), exchange.c (one exchange of a unit), residual.c (what is not sent), follow.c
 * (the schedule), state.c (checkpoints).
 *
 * A unit's tensors of one class and level are a part, which one reducer exchanges. Without hosts of several ranks (L = 1):
 *
 *   gradients -> part (W, width) -> reducer over `between` -> sums
 *
 * With them, ranks of a host first add up. Rank `place` of the host then has, of every host's owners at that place, a row:
 *
 *   gradients -> part (L, H * width) -> reducer over `within` -> (H, width) -> reducer over `between` -> sums
 *
 * Where all ranks get all sums, those of a host then send each other theirs.
 *
 * A row is the chunks of one owner, tensor by tensor, padded to the same width for every owner. Of a flat it is the owner's chunk. */
#ifndef TAGC_UNIT_UNIT_H
#define TAGC_UNIT_UNIT_H

#include "core/memory.h"
#include "exchange/reducer.h"
#include "unit/options.h"

#include <stdatomic.h>

typedef struct tagc_model_part tagc_model_part;
typedef struct tagc_model_unit tagc_model_unit;

/* What a model asks of lib/gpu where gradients and sums are in a device's memory: a queue, whose streams have the work of an exchange, and
 * a maker of batches. The caller's thread begins and ends exchanges. A thread of the queue calls tagc_unit_exchange for each, in their
 * order, when what it needs is in host memory: of a unit that stays on the device (unit->is_there) encoded bodies, else its pieces. */
typedef struct tagc_model_device {
    int (*has_kernels)(const void *queue);
    /* Once for each unit, whose parts are not made yet. _close accepts what is half-made. */
    tagc_status (*open)(void *queue, tagc_model_unit *unit);
    void (*close)(tagc_model_unit *unit);
    /* These parts of it will be made, one after the other, and stay side by side. */
    void (*expect)(tagc_model_unit *unit, const tagc_model_part *parts, uint32_t n_parts);
    /* Collective. Makes a part's reducer, whose arrays are on the device. */
    tagc_status (*make_reducer)(tagc_model_part *part, const tagc_reducer_options *options);
    /* Parts will go or change; they are other ones by now. */
    void (*let_go)(tagc_model_unit *unit);
    tagc_status (*take_up)(tagc_model_unit *unit);
    /* Of what is not sent yet of a part whose reducer is there. */
    tagc_status (*residual_square)(tagc_model_part *part, double *square);

    /* ---- an exchange, the caller's thread ---- */

    /* Sets is_zero of the unit's tensors, when the stream's work so far is done. It waits, also for the exchanges under way. */
    tagc_status (*find_zeros)(tagc_model_unit *unit, void *stream);
    /* Puts it into streams. A failure, or that of the unit so far, goes to tagc_unit_exchange. */
    void (*begin)(tagc_model_unit *unit, void *stream, int waits);
    int (*is_over)(tagc_model_unit *unit);
    void (*wait)(tagc_model_unit *unit);

    /* ---- the queue's thread, of a unit that stays there ---- */

    /* failure: of this rank, with its text in the unit, or TAGC_OK. */
    tagc_status (*begin_part)(tagc_model_part *part, tagc_status failure);
    /* Has the device add up what arrives, when all parts have begun. */
    void (*add)(tagc_model_unit *unit);
    tagc_status (*end_part)(tagc_model_part *part, tagc_reducer_stats *stats);
} tagc_model_device;

/* A tensor as the model has copied it. */
typedef struct tagc_member {
    const char *name;
    uint64_t n_elems;
    uint64_t chunk; /* elements that an owner has of it, but for the last ones; 0 in a flat and with ranges */
    const uint64_t
        *begins; /* (n_owners + 1,): each owner has the elements from here to the next; NULL without ranges */
    uint32_t unit;
    tagc_class kind;
    uint32_t apart;
    int is_scheduled;                 /* has a plan of the schedule */
    int is_followed;                  /* has levels */
    uint32_t parameter;               /* its number in the schedule, if it is scheduled */
    uint64_t n_samples, first_sample; /* in model->positions */
    tagc_schedule_plan plan;
    tagc_model_part *part;
    uint64_t offset;   /* of its chunk in a row of the part; in a flat, of its first element */
    uint64_t *offsets; /* (n_owners,) of its elements in each owner's row; NULL without ranges */
    /* Its pieces in the exchange under way, in the unit's lists. */
    size_t first_gradient, n_gradients, first_sum, n_sums;
    int is_zero; /* with options.rests: all that this place gets of its gradient is */
} tagc_member;

/* What one reducer exchanges. */
struct tagc_model_part {
    tagc_model *model;
    tagc_model_unit *unit;
    uint32_t *members; /* (n_members,) numbers of tensors, ascending */
    uint32_t n_members;
    tagc_schedule_plan plan;
    int is_followed;
    uint64_t width; /* of a row */
    tagc_reducer *reducer;
    tagc_feed feed;
    int is_there;             /* the reducer's arrays are a device's */
    tagc_reducer *host_sum;   /* over `within`, or NULL */
    tagc_model_part *heir_of; /* a former part of the same tensors, whose reducers this one gets; or NULL */
    float *set_aside; /* (n_set_aside) the residual, while other parts take the device's memory; or NULL */
    uint64_t n_set_aside;
    tagc_feed host_feed;
    /* the exchange under way */
    const float *gradient;    /* the caller's array of a flat, or of a unit on a device; NULL: pieces */
    float *sums;              /* beside it */
    atomic_int has_host_sum;  /* whether the host's sum is there, or its failure */
    const tagc_member *lacks; /* NULL, or of which a part of that sum has no place */
    tagc_status host_status;
    char host_text[TAGC_ERROR_TEXT_BYTES];
    uint32_t *full; /* (n_members,) parameters whose windows became full */
    size_t n_full;
    double square;  /* of its gradient, if n_full > 0 */
    float *resting; /* (2, residual): what is not sent, and room; NULL unless options.rests */
    int rests;      /* something is not sent in this exchange */
    float *beyond;  /* (n of _take + residual): what sums had beyond fp16, and room; NULL: nothing */
    uint64_t n_saturated;
};

struct tagc_model_unit {
    tagc_model *model;
    uint32_t *members; /* (n_members,) numbers of its tensors, ascending */
    uint32_t n_members;
    tagc_model_part *parts; /* (n_parts,) */
    uint32_t n_parts;
    int is_begun, is_blind; /* is_blind: the schedule does not look at this exchange */
    int is_over;            /* on host arrays: _end has not asked yet, see `ended` */
    uint64_t n_before;      /* exchanges that the model began before it */
    int is_asking;          /* see tagc_model_ask */
    uint64_t n_exchanges;   /* begun; rounding derives from it */
    const tagc_piece *gradients, *sums;
    size_t n_gradients, n_sums;
    uint64_t word;      /* that ranks must have alike */
    float factor;       /* of sums */
    tagc_status status; /* of _begin, kept for _end */
    char text[TAGC_ERROR_TEXT_BYTES];
    tagc_status ended; /* of an exchange that is over, for _end */
    char ended_text[TAGC_ERROR_TEXT_BYTES];
    tagc_model_stats stats;
    /* With a device. */
    void *there;           /* the device's */
    int is_there;          /* gradients stay there, and only bodies come; see wants_kernels in exchange.c */
    const float *samples;  /* of all parts, one after the other, where it stays there */
    const double *squares; /* (n_parts,) of gradients, where a window becomes full; NULL: not known */
};

struct tagc_model {
    const tagc_model_device *device; /* NULL: host arrays */
    void *queue;                     /* the device's */
    tagc_comm *within, *between;
    int n_hosts, n_places, host, place, rank, world_size;
    int n_owners; /* into how many chunks a tensor is cut */
    tagc_model_options options;
    tagc_schedule_options schedule_options;
    tagc_member *tensors;
    uint32_t n_tensors;
    tagc_model_unit *units;
    uint32_t n_units;
    void *memory;               /* of the tables above */
    tagc_schedule *schedule;    /* NULL: nothing is scheduled; or options.schedule.follows */
    uint64_t *ranges, *offsets; /* of all tensors, see tagc_member; NULL without ranges */
    uint64_t *positions;        /* of samples, in their tensors */
    float *samples;             /* of one part: (most,) */
    uint32_t *numbers, *counts; /* (n_tensors,) arguments of tagc_schedule_add */
    uint64_t *weights;          /* (n_tensors,) of tagc_schedule_get_plan */
    uint32_t *full;             /* (n_tensors,) parameters whose windows are full, at the end of a step */
    double *own, *pooled;       /* messages of a step */
    tagc_work
        spread; /* (1 + L, TAGC_SPREAD_BYTES): sums that ranks of a host send each other, of one model at a time */
    int is_blind; /* see tagc_model_set_sampling */
    char name[96];
    uint64_t n_steps, n_begun; /* n_begun: exchanges, of all units */
    uint64_t run;              /* a number of this run, the same on all ranks, in saved states */
};

enum { TAGC_SPREAD_BYTES = 1 << 18 }; /* of a rank's sums that others of its host get at a time */

/* 1: tensors lie end to end in flats. */
static inline int tagc_model_is_flat(const tagc_model *model) {
    return model->options.layout.cut == TAGC_CUT_FLAT || model->options.layout.cut == TAGC_CUT_FLAT_ARRAYS;
}
static inline uint32_t tagc_unit_number(const tagc_model_unit *unit) {
    return (uint32_t)(unit - unit->model->units);
}
/* 1: ranks of a host add up here; 0: each host has one rank, or the caller does it. */
static inline int tagc_model_adds_up(const tagc_model *model) {
    return model->within && !model->options.hosts.summed;
}
/* 1: reducers work on the caller's arrays. */
static inline int tagc_model_is_plain(const tagc_model *model) {
    return model->options.layout.cut == TAGC_CUT_FLAT_ARRAYS && !tagc_model_adds_up(model);
}

/* Elements of a tensor as it is exchanged: rows with padding. */
static inline uint64_t tagc_member_exchanged(const tagc_model *model, const tagc_member *t) {
    return t->chunk == 0 ? t->n_elems : t->chunk * (uint64_t)model->n_owners;
}

/* ---- layout.c ---- */

/* Copies tensors into tables, and numbers units. */
tagc_status tagc_model_lay_out(tagc_model *model, const tagc_tensor *tensors, size_t n_tensors);
/* Sets width and offsets of a part whose members are known. */
void tagc_part_lay_out(tagc_model_part *part);
/* What an owner's row has of a tensor: elements [first, first + n), from `offset` on, in `room` positions. */
typedef struct tagc_slot {
    uint64_t offset, first, n, room;
} tagc_slot;
tagc_slot tagc_member_slot(const tagc_model *model, const tagc_member *tensor, uint64_t owner);
/* The owner of row `row` of what this rank exchanges between hosts. */
uint64_t tagc_model_row_owner(const tagc_model *model, uint64_t row);
/* The most positions that an owner's row has of a tensor; 0 in a flat. */
uint64_t tagc_member_room(const tagc_model *model, const tagc_member *tensor);
/* Elements of one place's row of the part's array. */
uint64_t tagc_part_place_elems(const tagc_model_part *part);
/* Where the row begins that this rank owns. */
uint64_t tagc_part_own_row(const tagc_model_part *part);
/* Positions [begin, begin + n) of the part's array: reads them from the unit's gradients, as fp32 or as these are, and writes them to
 * its sums, from fp32 or from what these are. values NULL: NaN. */
void tagc_part_read(const tagc_model_part *part, uint64_t begin, uint64_t n, int element, void *values);
void tagc_part_write(const tagc_model_part *part, uint64_t begin, uint64_t n, int element,
                     const void *values);
/* Writes them to its gradients. *lacks: a tensor of which values that are not zero have no piece there, if there is one. */
void tagc_part_write_gradient(const tagc_model_part *part, uint64_t begin, uint64_t n, const float *values,
                              const tagc_member **lacks);
/* Copies between the unit's gradients, which are fp32 here, and what this place keeps of the part, in the part's order (place_elems). */
void tagc_part_copy_residual(const tagc_model_part *part, float *residual, int to_pieces);
/* 1: all that this place gets of a tensor's gradient is zero. */
int tagc_part_is_zero(const tagc_model_part *part, const tagc_member *tensor);
/* What was written there, as sums are. */
void tagc_part_read_sums(const tagc_model_part *part, uint64_t begin, uint64_t n, void *values);
/* An element of the gradient; 0 if no piece covers it. */
float tagc_member_read(const tagc_model *model, const tagc_model_unit *unit, const tagc_member *tensor,
                       uint64_t element);
/* Calls `visit` for every stretch of elements [first, first + n) of a tensor that lies in one piece of the part's array. at: there. */
typedef void (*tagc_stretch_fn)(void *context, uint64_t at, uint64_t first, uint64_t n);
void tagc_part_stretches(const tagc_model_part *part, const tagc_member *tensor, uint64_t first, uint64_t n,
                         tagc_stretch_fn visit, void *context);
/* Where an element of a tensor lies in this place's row of the part's array; UINT64_MAX: in another place's. */
uint64_t tagc_part_find(const tagc_model_part *part, const tagc_member *tensor, uint64_t element);
/* 1: all of these elements are in this place's row. */
int tagc_part_has(const tagc_model_part *part, const tagc_member *tensor, uint64_t first, uint64_t n);
/* Calls `visit` for each stretch of the unit's gradients, or sums, that belongs to the part. at: of this place's row, or of its reducer's
 * output; values: there. */
typedef void (*tagc_run_fn)(void *context, char *values, uint64_t at, uint64_t n);
void tagc_part_runs(const tagc_model_part *part, int is_sums, tagc_run_fn visit, void *context);
/* Where the gradient of an element is; NULL: no piece covers it. */
const void *tagc_member_at(const tagc_model *model, const tagc_model_unit *unit, const tagc_member *tensor,
                           uint64_t element);
/* The most elements that a unit's gradients, or its sums, cover. */
uint64_t tagc_unit_elems(const tagc_model_unit *unit, int is_sums);
/* What a rank gets of a tensor. */
void tagc_member_owned(const tagc_model *model, int rank, const tagc_member *tensor, uint64_t *first,
                       uint64_t *n);

/* ---- parts.c ---- */

/* Makes the parts of a unit from the plans of its tensors. Collective. On failure *parts is NULL. */
tagc_status tagc_unit_make_parts(tagc_model *model, tagc_model_unit *unit, tagc_model_part **parts,
                                 uint32_t *n_parts);
/* Gives the unit, for one call of `visit`, parts that it can come to have, without reducers: of tensors at one level, with `share` of the
 * level's own share of values; is_apart: each as a part of its own. */
typedef tagc_status (*tagc_parts_fn)(void *context, tagc_model_unit *unit);
tagc_status tagc_unit_try_parts(tagc_model_unit *unit, int level, double share, int is_apart,
                                tagc_parts_fn visit, void *context);
/* A part gets back what was set aside, since it stays. */
void tagc_part_take_back(tagc_model_part *part);
/* Gives a part the reducers of the one that it is the heir of. */
void tagc_part_inherit(tagc_model_part *part);
/* 1: tensors of one unit that are exchanged as one, since their class and level are the same. */
int tagc_are_one_part(const tagc_model *model, const tagc_member *a, const tagc_member *b);
void tagc_unit_destroy_parts(tagc_model_part *parts, uint32_t n_parts);
/* Options of the reducer of a part, and of that which adds up within a host. */
void tagc_part_options(const tagc_model_part *part, tagc_reducer_options *options);
void tagc_part_host_options(const tagc_model_part *part, tagc_reducer_options *options);
/* What messages call an exchange of a unit. tensor: of it, a number. */
enum { TAGC_LABEL_BYTES = 96 };
void tagc_unit_label(const tagc_model *model, uint32_t unit, uint32_t tensor, char label[TAGC_LABEL_BYTES]);

/* ---- model.c ---- */

/* tagc_model_create, on a device. */
tagc_status tagc_model_make(const tagc_model_device *device, void *queue, tagc_comm *within,
                            tagc_comm *between, const tagc_tensor *tensors, size_t n_tensors,
                            const tagc_model_options *options, tagc_model **out);

/* ---- feeds.c ---- */

/* What the part's reducers read and write. */
void tagc_part_set_feeds(tagc_model_part *part);
/* After an exchange: what its sums had beyond fp16 goes into the residual, or where that was not taken, nowhere. */
tagc_status tagc_part_settle_rest(tagc_model_part *part, int is_taken);

/* ---- exchange.c ---- */

/* Makes room for sums that ranks of a host send each other. */
tagc_status tagc_model_make_spread(tagc_model *model);
/* tagc_model_begin, on a device. */
tagc_status tagc_model_begin_there(tagc_model *model, uint32_t unit, const tagc_piece *gradients,
                                   size_t n_gradients, const tagc_piece *sums, size_t n_sums, void *stream,
                                   int waits);
/* One exchange, from the queue's thread. failure: of this rank, which it tells the others; text: its reason. */
tagc_status tagc_unit_exchange(tagc_model_unit *unit, tagc_status failure, const char *text);

/* A list of pieces that may be empty, as one that pointers into it can be made of. */
static inline const tagc_piece *tagc_pieces_of(const tagc_piece *pieces) {
    static const tagc_piece none;
    return pieces ? pieces : &none;
}
/* Checks a list of pieces, and notes where in it each tensor's are. */
tagc_status tagc_unit_check_pieces(tagc_model *model, uint32_t unit, const tagc_piece *pieces, size_t n,
                                   const char *what, int is_sum);
/* TAGC_ERR_ARGUMENT or _STATE unless there is that unit, and it is under way or not. */
tagc_status tagc_unit_check(const tagc_model *model, uint32_t unit, const char *what, int is_begun);

/* ---- residual.c ---- */

/* *residuals (n_parts,): a new residual of each part, of zeros; NULL where it has none. _close gives them to the parts, if status is
 * TAGC_OK, and frees them. */
tagc_status tagc_parts_open_residuals(const tagc_model_part *parts, uint32_t n_parts, float ***residuals);
tagc_status tagc_parts_close_residuals(tagc_model_part *parts, uint32_t n_parts, float **residuals,
                                       tagc_status status);
/* Takes what tensors with a zero gradient keep out of the reducers, and puts it back. Both do nothing without options.rests. Of a unit that
 * stays on a device the caller's thread does it, before and after the exchange. stream: the device's, where gradients come.
 *
 * What is not sent yet is the host's, and goes out with the host's sum, so that sum decides: _rest_begin leaves parts to _part_rest whose
 * ranks add up here, until they have. */
tagc_status tagc_rest_begin(tagc_model *model, tagc_model_unit *unit, void *stream);
tagc_status tagc_part_rest(tagc_model_part *part);
tagc_status tagc_rest_end(tagc_model_unit *unit);

/* ---- follow.c ---- */

static inline int tagc_model_is_following(const tagc_model *model) {
    return model->options.schedule.follows != NULL;
}
/* TAGC_ERR_STATE if the schedule is the caller's. */
tagc_status tagc_model_check_own_schedule(const tagc_model *model, const char *what);

tagc_status tagc_model_open_schedule(tagc_model *model);
/* The plan of all tensors of a part together. */
tagc_status tagc_part_plan(const tagc_model_part *part, tagc_schedule_plan *plan);
/* Gives every tensor its plan, in a flat that of the flat. */
tagc_status tagc_model_take_plans(tagc_model *model);
/* Sample k of a tensor: an element. UINT64_MAX: the gradient of another place has it. */
uint64_t tagc_part_sampled(const tagc_model_part *part, const tagc_member *tensor, uint64_t k);
/* Hands samples of a part's gradient, or of what ranks of the host have added up there, to the schedule. From the worker. */
tagc_status tagc_part_sample(tagc_model_part *part);
/* 0: units that begin from now on are exchanged without a look of the schedule's, as the first of several exchanges in a step are. All
 * ranks say the same. */
void tagc_model_set_sampling(tagc_model *model, int is_sampled);
/* tagc_model_save into a file, piece by piece: residuals are not copied. */
typedef tagc_status (*tagc_write_fn)(void *context, const void *bytes, size_t n_bytes);
tagc_status tagc_model_write(const tagc_model *model, tagc_write_fn write, void *context);
/* The number of its run in saved states, for a caller who tells runs apart otherwise. All ranks say the same. */
void tagc_model_set_run(tagc_model *model, uint64_t run);
/* Forgets the windows of a unit whose exchange failed, as all ranks do. */
void tagc_unit_forget_windows(tagc_model *model, tagc_model_unit *unit);
/* Brings every unit's parts in line with the plans. Collective. */
tagc_status tagc_model_take_up(tagc_model *model);

/* TAGC_ERR_STATE if a unit is under way. */
tagc_status tagc_model_check_idle(const tagc_model *model, const char *what);
/* Every rank passes its status; all return the same failure. Over both comms; `within` may be NULL. */
tagc_status tagc_levels_agree(tagc_comm *within, tagc_comm *between, tagc_status status);
tagc_status tagc_model_agree(const tagc_model *model, tagc_status status);
/* TAGC_ERR_MISMATCH on all ranks unless all pass the same checksum; what: a sentence's end, see model.c. Collective. */
tagc_status tagc_model_compare(tagc_model *model, uint64_t sum, const char *what);
/* The same over the ranks of a host alone. is_own: whether this rank has failed itself. word: that they must have alike. */
tagc_status tagc_model_agree_within(const tagc_model *model, tagc_status status, int is_own, uint32_t word);
/* After a call over one of the two comms: if that broke, those who wait in the other learn of it now. Returns the status. */
tagc_status tagc_model_share(const tagc_model *model, tagc_status status);
/* What it sends to each other rank. */
#define TAGC_VERDICT_BYTES 8

#endif
