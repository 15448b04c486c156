/* What the engine knows of a model: a table of tensors in a fixed order, and a way to be asked for them.
 *
 * The model above reaches every parameter and gradient through tagc_params only, so that the engine may
 * gather parameters just in time and exchange a gradient as soon as it is complete. */
#ifndef TAGC_MODEL_TENSOR_H
#define TAGC_MODEL_TENSOR_H

#include "tagc/tagc.h"

#define TAGC_TENSOR_NAME_BYTES 48

/* What a tensor is for: the compression policy goes by this. */
typedef enum tagc_tensor_kind {
    TAGC_TENSOR_EMBEDDING,            /* token embedding */
    TAGC_TENSOR_POSITION,             /* position embedding */
    TAGC_TENSOR_NORM,                 /* weight and bias of a layer norm */
    TAGC_TENSOR_BIAS,                 /* bias of a linear layer */
    TAGC_TENSOR_ATTENTION,            /* query, key and value matrix */
    TAGC_TENSOR_ATTENTION_PROJECTION, /* matrix after attention */
    TAGC_TENSOR_MLP,                  /* the two matrices of a feed-forward layer */
    TAGC_TENSOR_HEAD                  /* matrix to the vocabulary, when it is not the token embedding */
} tagc_tensor_kind;

typedef struct tagc_tensor_info {
    char name[TAGC_TENSOR_NAME_BYTES]; /* as Hugging Face names it, without "transformer." */
    size_t n_rows, n_cols;             /* n_cols is 1 for vectors */
    size_t n_elems;                    /* n_rows * n_cols */
    tagc_tensor_kind kind;
    int layer; /* 0 embedding, 1 .. n_layer blocks, n_layer + 1 head */
    int last_layer; /* last layer that uses it: n_layer + 1 for a token embedding shared with the head, else layer */
    int decay; /* 1: weight decay applies (matrices) */
} tagc_tensor_info;

/* The owner of the parameters fills it. Every call comes from the thread that runs the pass, and a status
 * other than TAGC_OK ends the pass with that status at once. `done` is then not called for units in use.
 *
 *   use        the full tensor, to be left unchanged and valid until its done; uses may nest
 *   done       the values will not be read again under this use
 *   grad       the tensor's full gradient (n_elems), to which backward adds; valid until its grad_done
 *   grad_done  nothing more will be added in this backward pass
 *
 * Forward uses tensors in ascending order, backward in descending order. Where the head shares the token
 * embedding, that tensor is used in the first and in the last layer, its grad is asked for in both, and its
 * grad_done comes once, at the very end. */
typedef struct tagc_params {
    void *context;
    tagc_status (*use)(void *context, int tensor, const float **out);
    void (*done)(void *context, int tensor);
    tagc_status (*grad)(void *context, int tensor, float **out);
    tagc_status (*grad_done)(void *context, int tensor);
} tagc_params;

#endif
