/* Models of a plan, by name or by size. */
#ifndef TAGC_WAYS_MODELS_H
#define TAGC_WAYS_MODELS_H

#include "mesh/mesh.h"

enum { TAGC_MESH_VOCAB = 32000 }; /* of a model by size */
/* Parameters: the embedding and the head of a smaller model are most of it. */
#define TAGC_MESH_LEAST_PARAMS 1e7
/* A layer of more is too large for a reducer of two ranks. */
#define TAGC_MESH_MOST_PARAMS 2e12

typedef struct tagc_mesh_named {
    const char *name;
    tagc_mesh_model model;
} tagc_mesh_named;

/* Ends with a name that is NULL. */
extern const tagc_mesh_named tagc_mesh_models[];

/* Whatever the case of its letters; NULL: there is no such model. */
const tagc_mesh_named *tagc_mesh_find(const char *name);
/* Layers and width of a GPT of about so many parameters, in usual proportions. 8 divides the layers, and the heads of
 * tagc_mesh_gpt(). */
TAGC_API void tagc_plan_shape(double n_params, int *n_layer, int *n_embd);
/* A GPT of about so many parameters. */
tagc_mesh_model tagc_mesh_gpt(double n_params, int n_positions);

#endif
