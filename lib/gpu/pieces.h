/* A unit of a tagc_model on a device: where its pieces lie. pieces.c makes lists of that, and model.c has its exchanges. */
#ifndef TAGC_GPU_PIECES_H
#define TAGC_GPU_PIECES_H

#include "gpu/ahead_unit.h"
#include "unit/unit.h"

/* Bytes between the device and a buffer of the queue. */
typedef struct piece_copy {
    char *there;
    size_t at, n_bytes; /* at: in the buffer */
    uint32_t piece;
} piece_copy;

struct tagc_model_place {
    tagc_queue *queue;
    tagc_model_unit *unit;
    tagc_store *store; /* of its reducers with kernels, or NULL */
    tagc_unit *bare;   /* without kernels */
    tagc_unit *ahead;  /* with kernels, for the pieces that are known; or NULL */
    uint64_t ticket;   /* of the last exchange */
    uint64_t step;     /* and its number */
    const ticket *now; /* the queue's thread: what it exchanges */
    double *squares;   /* (n_members) of parts */
    /* Gradients, then sums, of the last exchange: as the caller had them. */
    tagc_piece *pieces; /* (capacity) */
    size_t n_gradients, n_sums, capacity;
    /* Without kernels: the same in a buffer of the queue, and what is copied. */
    tagc_piece *here;   /* (capacity) */
    size_t *at;         /* (capacity) */
    piece_copy *copies; /* (capacity): in, then out */
    size_t n_in, n_out;
};

/* From the first to the last byte of all pieces. */
typedef struct arrays {
    char *input, *output;
    size_t in_bytes, out_bytes;
} arrays;

arrays tagc_arrays_of(const tagc_model_place *place, const tagc_piece *gradients, size_t n_gradients,
                      const tagc_piece *sums, size_t n_sums);
/* Whether the unit's pieces lie as the known ones do. */
int tagc_pieces_are_known(const tagc_model_place *place, const arrays *both);
/* The unit's pieces become the known ones. */
tagc_status tagc_pieces_remember(tagc_model_place *place);
/* With kernels: makes a tagc_unit for the unit's pieces and parts. */
tagc_status tagc_pieces_make_unit(tagc_model_place *place, tagc_unit **out);
/* Without them: the unit's pieces become the known ones, with places in a buffer of the queue. */
tagc_status tagc_pieces_make_copies(tagc_model_place *place);
/* The unit's pieces are those in the ticket's buffer. */
void tagc_pieces_take_from_buffer(const tagc_model_place *place, const ticket *one);

#endif
