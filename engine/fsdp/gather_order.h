/* The order in which units are gathered, used and released, and their gradients exchanged. It depends on nothing but the
 * order of the model's calls, so all ranks begin the same gathers and exchanges in the same order. Callbacks do the work:
 * those of the engine move arrays, those of the cost model advance a clock. */
#ifndef TAGC_FSDP_GATHER_ORDER_H
#define TAGC_FSDP_GATHER_ORDER_H

#include "fsdp/fsdp.h"
#include "fsdp/layout.h"

typedef enum tagc_pass { TAGC_PASS_FORWARD = 0, TAGC_PASS_BACKWARD = 1, TAGC_PASS_NONE = 2 } tagc_pass;
typedef enum tagc_residency { TAGC_ABSENT = 0, TAGC_COMING = 1, TAGC_PRESENT = 2 } tagc_residency;

typedef struct tagc_order_unit {
    /* as in the layout */
    int position[2]; /* in the order of the forward and of the backward pass */
    int n_uses;      /* expected in a forward pass */
    int n_tensors;
    int spans;                   /* its tensors are used in more than one layer */
    int buffer, gradient_buffer; /* two units of one buffer cannot be gathered, or in backward, at once */
    /* state, private to the order: */
    tagc_residency residency;
    int stays;         /* it was gathered when the pass began */
    int used_backward; /* the last backward pass read it, so gather it ahead in the next */
    int n_in_use, n_done, n_gradients_done, gradients_open; /* of the pass */
    int gradients_zeroed, exchanging;                       /* of the step */
} tagc_order_unit;

/* The callbacks. A status other than TAGC_OK ends the call of the model. */
typedef struct tagc_order_calls {
    tagc_status (*begin_gather)(void *context, int unit);
    tagc_status (*end_gather)(void *context, int unit); /* waits */
    tagc_status (*begin_exchange)(void *context, int unit);
    tagc_status (*end_exchange)(void *context, int unit); /* waits */
    void (*clear_gradients)(void *context, int unit);
    void (*pass_done)(void *context); /* all units have finished this pass */
    const char *(*name)(const void *context, int unit);
} tagc_order_calls;

typedef enum tagc_order_event {
    TAGC_ORDER_BEGIN_GATHER,
    TAGC_ORDER_END_GATHER,
    TAGC_ORDER_BEGIN_EXCHANGE,
    TAGC_ORDER_END_EXCHANGE,
    TAGC_ORDER_CLEAR_GRADIENTS
} tagc_order_event;

/* Sees each call of the first five callbacks. For tests. */
typedef struct tagc_order_observer {
    void (*see)(void *context, tagc_order_event event, int unit); /* may be NULL */
    void *context;
} tagc_order_observer;

typedef struct tagc_gather_order {
    const tagc_order_calls *calls;
    void *context;
    tagc_order_observer observer;
    tagc_fsdp_options options;
    int n_units, n_buffers;    /* n_buffers 0: every rank has all parameters */
    const int *backward_order; /* (n_units), the caller's */
    tagc_order_unit *units;
    int *holders, *gradient_holders; /* (n_units) of each buffer: a unit, or -1 */
    int pass, training;
    int micro_step;                /* backward passes begun in this step */
    int gather_next, gather_reach; /* positions: the next unit to gather, and the last that may be */
    int n_open;                    /* units that are not finished in this pass */
} tagc_gather_order;

/* The caller fills `units` before the first pass. On failure nothing stays allocated. */
tagc_status tagc_order_create(const tagc_order_calls *calls, void *context, const tagc_fsdp_options *options,
                              int n_units, int n_buffers, const int *backward_order, tagc_gather_order *out);
void tagc_order_set_unit(tagc_gather_order *order, int unit, const tagc_layout_unit *layout);
void tagc_order_destroy(tagc_gather_order *order);

/* 1 if parameters are released when their unit is done. */
int tagc_order_releases(const tagc_fsdp_options *options);

/* ---- a pass: the calls of the engine, by unit instead of by tensor ---- */

/* Waits for the gathers and exchanges that an abandoned pass left under way. */
tagc_status tagc_order_give_up(tagc_gather_order *order);
tagc_status tagc_order_forward(tagc_gather_order *order, int training);
tagc_status tagc_order_backward(tagc_gather_order *order);
tagc_status tagc_order_use(tagc_gather_order *order, int unit);
tagc_status tagc_order_done(tagc_gather_order *order, int unit);
tagc_status tagc_order_grad(tagc_gather_order *order, int unit);
tagc_status tagc_order_grad_done(tagc_gather_order *order, int unit);
/* The gradients of units that the model left out are zero. */
tagc_status tagc_order_finish_backward(tagc_gather_order *order);

/* ---- the end of a step ---- */

tagc_status tagc_order_end_exchanges(tagc_gather_order *order); /* waits for all that are under way */
tagc_status tagc_order_end_gathers(tagc_gather_order *order);   /* waits for all that are under way */
void tagc_order_make_absent(
    tagc_gather_order *order); /* gathered parameters are out of date; call it while no gather is under way */
tagc_status tagc_order_begin_gather(tagc_gather_order *order, int unit);
/* Its buffer already holds the current parameters. */
void tagc_order_make_present(tagc_gather_order *order, int unit);
void tagc_order_end_step(tagc_gather_order *order);

#endif
