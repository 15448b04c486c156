/* tagc_schedule: what each parameter of a model may send at the moment, and how long its optimizer's moments are to be.
 *
 * Why there is one
 *   An exchange with error feedback sends the largest values and keeps the rest in a residual. A value that is not among
 *   the largest waits, for 20 exchanges at a sparsity of 95 %. If gradients are mostly noise, waiting costs nothing: the
 *   sum that has gathered is as large as the steps that a dense exchange would have made. If they point the same way
 *   exchange after exchange, as they do in a model that has just begun to learn, an Adam makes one step of the waiting sum
 *   in place of many, and training falls behind. So each parameter begins with every value, in few bits, and sends less
 *   when its gradient has become noise.
 *
 * Levels
 *   FRESH     every value in 8 bits, for 60 exchanges; only in a model with random weights. The rounding errors of 4 bits
 *             can make the loss of an unclipped run jump there.
 *   EVERY     every value in 4 bits, 32 values to a scale.
 *   LARGEST   the largest 8 % in 4 bits. It tolerates a long first moment and a weak direction, as the output layer has.
 *   LAST      what the user asked for, such as the largest 5 % in 2 bits.
 *   A parameter of the class mild goes from EVERY to LAST.
 *
 * The signal
 *   Over a window of 20 exchanges, let s be the sum of an element's gradients and q that of their squares. s^2 / q is 1 for
 *   noise and 20 for a gradient that does not change. Its mean over elements is the parameter's coherence. 512 elements
 *   of a parameter are looked at. All count alike, as in Adam's steps, except those with almost no gradient, such as
 *   rows of an embedding that the text never uses.
 *
 * The first moment
 *   Error feedback sums gradients over exchanges already, and an Adam's first moment delays once more what has waited. A
 *   model trains where its steps are just small enough not to oscillate, and a short moment tolerates less. If beta1
 *   falls at once, or while values begin to wait, the loss jumps. So beta1 of a parameter falls to 0.5 over ten windows
 *   (two in a trained model) once its gradient is noise, and the parameter goes on after that. Where values are selected,
 *   1 - beta2 becomes a tenth: a value that comes every 20 exchanges brings the sum of 20 gradients, and its square would
 *   make up most of the second moment at once.
 *
 * When a parameter goes on
 *   - Its window was noise (coherence below 1.3) and its first moment is short, or it has none.
 *   - Or half of the compressed parameters are further, and its direction is weak (below 2.2). It then leaves EVERY only.
 *   A parameter of the class mild has no first moment of its own here: if it is noise, it waits until those of all compressed
 *   parameters of its group are short. If one of these keeps a long one, it stays at EVERY. Where no compressed parameter of its
 *   group has a gradient, it goes on by itself, unless its own moment STAYS.
 * When it begins anew, at EVERY, and waits for twice as many windows of noise
 *   - Its gradient points one way again (above 2.6).
 *   - Its residual has outgrown its gradient, 20 times in norm at the end of two windows in a row. Of noise it is about two.
 *   - The loss has risen by 2 % and by four standard errors over its lowest window, twice in a row.
 *
 * Shares
 *   Units select apart. If each sent the same share, a value of a unit with small gradients would travel, and a larger one
 *   of another unit would wait. If the whole model selected at once, one threshold T would hold everywhere. Of noise with
 *   a mean square of v, what waits is a random walk, and reaches T after about T^2 / v exchanges. So a parameter's share is
 *   proportional to the mean square of its gradient, between 1/8 and 4 times that of its level. The mean over all
 *   parameters of a class, level and group is the level's own.
 *
 * One exchange of the model
 *     tagc_schedule_add        for each unit, with samples of this rank's gradient; names those whose window is full
 *     tagc_schedule_take       their sums on this rank: the caller adds them over all ranks that hold a piece of the parameter
 *     tagc_schedule_see        takes these sums
 *     tagc_schedule_step       at the end: decides from them
 *     tagc_schedule_get_plan   what a parameter, or parameters that are exchanged as one, may send now
 *   The schedule calls no network and reads no clock. The same calls give the same decisions, so ranks that pass the same
 *   sums decide alike. It holds about 4.2 kB per parameter. One thread at a time may use it. */
#ifndef TAGC_SCHEDULE_H
#define TAGC_SCHEDULE_H

#include "tagc/policy.h"
#include "tagc/tagc.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tagc_schedule tagc_schedule;

typedef enum tagc_level {
    TAGC_LEVEL_FRESH = 0,
    TAGC_LEVEL_EVERY = 1,
    TAGC_LEVEL_LARGEST = 2,
    TAGC_LEVEL_LAST = 3
} tagc_level;

/* Returns "fresh", "every", "largest", "last", or "?" for another number. */
TAGC_API const char *tagc_level_name(int level);

/* What the optimizer has of a parameter. */
typedef enum tagc_moment {
    /* A long first moment, or one of unknown length: the parameter goes no further than LARGEST. */
    TAGC_MOMENT_STAYS = 0,
    /* A first moment that the caller shortens as tagc_schedule_betas says. */
    TAGC_MOMENT_SHORTENS = 1,
    /* None, or a short one. */
    TAGC_MOMENT_NONE = 2
} tagc_moment;

typedef struct tagc_schedule_options {
    /* Written by _init. */
    size_t struct_bytes;
    /* 1 (default): levels as above. 0: every parameter is at LAST from the beginning, with a short first moment. */
    int gentle;
    /* 1: the model has random weights, and begins at FRESH. 0 (default): at EVERY. */
    int fresh;
    /* LAST of a compressed parameter: the share of its values that are zero, [0, 1], default 0.95, and the format of the
     * others, default INT2. A class with a sparsity of 0 has no levels. */
    double sparsity;
    tagc_format format;
    /* The same of a mild parameter, defaults 0.85 and INT4. */
    double mild_sparsity;
    tagc_format mild_format;
    /* beta1 of a short first moment, [0, 1), default 0.5. A smaller one of the user's stays. */
    double short_beta1;
} tagc_schedule_options;

TAGC_API void tagc_schedule_options_init_sized(tagc_schedule_options *options, size_t struct_bytes);
#define tagc_schedule_options_init(options) tagc_schedule_options_init_sized((options), sizeof *(options))

/* Numbers of the rules above, for who says what they do, or plans for it. _init writes them. */
typedef struct tagc_schedule_constants {
    /* Written by _init. */
    size_t struct_bytes;
    /* Exchanges in a window, and windows at FRESH. */
    int window;
    int fresh_windows;
    /* Share of its values that a parameter sends at LARGEST, and how many times its level's share it may send among others. */
    double largest_share;
    double most_share;
    /* Values that share a scale where every value is sent in INT4. */
    int block_of_every;
} tagc_schedule_constants;

TAGC_API void tagc_schedule_constants_init_sized(tagc_schedule_constants *constants, size_t struct_bytes);
#define tagc_schedule_constants_init(constants)                                                              \
    tagc_schedule_constants_init_sized((constants), sizeof *(constants))

typedef struct tagc_schedule_parameter {
    /* Not empty, at most 1023 bytes, another one for each parameter. Saved states go by it. */
    const char *name;
    /* Of the whole parameter, not of a rank's piece. */
    uint64_t n_elems;
    /* COMPRESSED or MILD. What is sent dense is none of a schedule's. */
    tagc_class kind;
} tagc_schedule_parameter;

/* parameters: (n_parameters,), copied. Their numbers, from 0, name them in all calls below.
 * TAGC_ERR_ARGUMENT names the option or parameter. */
TAGC_API tagc_status tagc_schedule_create(const tagc_schedule_options *options,
                                          const tagc_schedule_parameter *parameters, size_t n_parameters,
                                          tagc_schedule **out);
TAGC_API void tagc_schedule_destroy(tagc_schedule *schedule);

/* Says what the optimizer has of a parameter; of a mild one it counts only where no compressed one is trained. The default is STAYS. May be called again
 * whenever that changes. If values of the parameter are selected and its moment was short, it begins anew at EVERY with STAYS, and
 * its moment is short at once with SHORTENS. */
TAGC_API tagc_status tagc_schedule_set_moment(tagc_schedule *schedule, size_t parameter, tagc_moment moment);

/* ---- the signal ---- */

/* Elements that are looked at in a parameter of n_elems: writes their positions in ascending order to `positions`
 * (TAGC_SCHEDULE_SAMPLE,), and their number to *n. Ranks that hold a piece of a parameter pass the elements that they
 * hold. */
#define TAGC_SCHEDULE_SAMPLE 512
TAGC_API void tagc_schedule_positions(uint64_t n_elems, uint64_t *positions, size_t *n);

/* Adds one exchange to the windows of n parameters. values: samples of this rank's gradient, one parameter after the
 * other. counts (n,): samples of each, at most TAGC_SCHEDULE_SAMPLE. If another number of samples than before comes for a
 * parameter, its window begins anew. Writes the parameters whose windows are full to `full` (n,), and their number to
 * *n_full. Local. */
TAGC_API tagc_status tagc_schedule_add(tagc_schedule *schedule, const uint32_t *parameters,
                                       const uint32_t *counts, size_t n, const float *values, uint32_t *full,
                                       size_t *n_full);

/* Sums over a window. All fields add up over ranks. */
typedef struct tagc_schedule_sums {
    /* Of s^2 / q, and the number of elements that it is over. NaN if a gradient was not finite. */
    double signal, weight;
    /* Of squares of samples, and their number. */
    double square, n_square;
    /* The squared norms of what was exchanged together with this parameter: of the residual and of the gradient of this
     * exchange. _take writes 0; the caller fills them in before it adds. 0 of the gradient: not known. */
    double residual, gradient;
} tagc_schedule_sums;

/* Writes this rank's sums of n parameters (n,) and begins their windows anew. Local. */
TAGC_API tagc_status tagc_schedule_take(tagc_schedule *schedule, const uint32_t *parameters, size_t n,
                                        tagc_schedule_sums *sums);

/* Takes sums over all ranks that hold a piece of these parameters; _step decides from them. `group` is any number for that
 * set of ranks: a decision about a parameter looks only at parameters of its group, so that all its ranks know them.
 * Collective in effect, in any order of parameters. */
TAGC_API tagc_status tagc_schedule_see(tagc_schedule *schedule, const uint32_t *parameters, size_t n,
                                       const tagc_schedule_sums *sums, uint32_t group);

/* Adds one loss of this rank. One that is not finite does not count. Local. */
TAGC_API void tagc_schedule_add_loss(tagc_schedule *schedule, double loss);

/* Sums of losses. The fields add up over ranks. */
typedef struct tagc_schedule_losses {
    double sum, squares, n;
} tagc_schedule_losses;

/* Writes this rank's sums since the last call, and begins anew. Local. */
TAGC_API void tagc_schedule_take_losses(tagc_schedule *schedule, tagc_schedule_losses *losses);
/* Takes sums over all ranks: every parameter begins anew if the loss has risen. Collective in effect.
 * TAGC_ERR_ARGUMENT if they are not finite. */
TAGC_API tagc_status tagc_schedule_see_losses(tagc_schedule *schedule, const tagc_schedule_losses *losses);

/* Ends an exchange of the whole model: decides, and changes plans. Collective in effect. Writes to *changed whether a plan is another one now, and to
 * *is_through whether all parameters have just come to their last level. Either may be NULL. */
TAGC_API tagc_status tagc_schedule_step(tagc_schedule *schedule, int *changed, int *is_through);

/* Says that gradients are multiplied by `factor` from now on, as a loss scaler does. (0, inf). */
TAGC_API tagc_status tagc_schedule_scale(tagc_schedule *schedule, double factor);

/* ---- what was decided ---- */

typedef struct tagc_schedule_plan {
    int level; /* a tagc_level */
    /* Options of a reducer of TAGC_EXCHANGE_DIRECT. block: values that share a scale, 0: the reducer's default. */
    tagc_format format;
    int block;
    double sparsity;
    /* For tagc_schedule_betas: how much of the user's first moment is left, 1: all, 0: it is short. */
    double moment;
    /* Updates whose values were selected, or 0 if they are not: 20, 40, 80 and so on. */
    uint64_t n_selected;
} tagc_schedule_plan;

/* Writes the plan of n parameters that are exchanged as one. It is that of the most careful one, with the mean share.
 * weights (n,): elements of each in this exchange; NULL: whole parameters. n is at least 1. */
TAGC_API tagc_status tagc_schedule_get_plan(const tagc_schedule *schedule, const uint32_t *parameters,
                                            const uint64_t *weights, size_t n, tagc_schedule_plan *plan);

/* Writes what a parameter of that class sends at a tagc_level, with the level's own share: for plans of bytes and memory. options:
 * NULL for the defaults. What has no such level has the plan of the one before it, and what has no levels that of LAST. */
TAGC_API tagc_status tagc_schedule_plan_of_level(const tagc_schedule_options *options, tagc_class kind,
                                                 int level, tagc_schedule_plan *plan);

/* Turns the user's betas of an Adam into those of a parameter. moment: of its plan. n_selected: of its plan, or fewer if
 * its optimizer has made fewer updates; 0: beta2 stays. schedule: NULL for the default options. */
TAGC_API void tagc_schedule_betas(const tagc_schedule *schedule, double moment, uint64_t n_selected,
                                  double beta1, double beta2, double *own_beta1, double *own_beta2);

typedef enum tagc_alarm_kind {
    TAGC_ALARM_DIRECTION = 0,
    TAGC_ALARM_RESIDUAL = 1,
    TAGC_ALARM_LOSS = 2
} tagc_alarm_kind;
#define TAGC_N_ALARM_KINDS 3

/* Parameters that have begun anew for one reason. */
typedef struct tagc_alarm {
    tagc_alarm_kind kind;
    /* How many, and the worst of them. */
    size_t n_parameters;
    size_t worst;
    /* Its coherence, its residual's norm in gradients' norms, or the rise of the loss in its lowest mean. */
    double value;
} tagc_alarm;

/* Writes the alarms since the last call to `alarms` (TAGC_N_ALARM_KINDS,) and their number to *n. */
TAGC_API void tagc_schedule_take_alarms(tagc_schedule *schedule, tagc_alarm *alarms, size_t *n);
/* Writes the alarm as a sentence to text (n_bytes,), cut to fit, with a final 0. */
TAGC_API void tagc_schedule_alarm_text(const tagc_schedule *schedule, const tagc_alarm *alarm, char *text,
                                       size_t n_bytes);

/* ---- checkpoints ---- */

/* Writes the state to `bytes` (n_bytes,); NULL: only its size to *n_written. with_windows: 0 leaves out windows under way and
 * this rank's losses, which another number of ranks cannot use. TAGC_ERR_ARGUMENT if n_bytes is too few.
 * docs/reference/wire-format.md describes the bytes. */
TAGC_API tagc_status tagc_schedule_save(const tagc_schedule *schedule, int with_windows, void *bytes,
                                        size_t n_bytes, size_t *n_written);

/* Takes over a saved state. Parameters go by name; what the state lacks begins at LAST, since it was not followed then; what
 * this schedule lacks is dropped. Call _set_moment before: parameters whose first moment was short then, and STAYS now, begin
 * anew at EVERY, with all mild ones. with_windows: 0 if another number of ranks saved it. *n_unknown (NULL allowed) is their number without these, *unknown the first of them.
 * TAGC_ERR_CORRUPT changes nothing. */
TAGC_API tagc_status tagc_schedule_load(tagc_schedule *schedule, const void *bytes, size_t n_bytes,
                                        int with_windows, size_t *n_unknown, size_t *unknown);

#ifdef __cplusplus
}
#endif

#endif
