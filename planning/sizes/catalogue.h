/* What plans are about: models, by name or by size, and strategies of data parallelism. */
#ifndef TAGC_SIZES_CATALOGUE_H
#define TAGC_SIZES_CATALOGUE_H

#include "mesh/mesh.h"
#include "tagc/schedule.h"

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

/* ---- strategies ---- */

/* The plans that have a row of it. */
typedef enum tagc_strategy_use {
    TAGC_TIMED_ALONE = 1, /* simulated, where hosts have one rank */
    TAGC_TIMED_HOSTS = 2, /* and where they have several */
    TAGC_ON_MESH = 4
} tagc_strategy_use;

typedef struct tagc_strategy {
    const char *name;
    int uses;             /* tagc_strategy_use, combined by | */
    int sharding, gather; /* tagc_sharding, tagc_gather_kind */
    int level;            /* of the schedule, at which gradients are sent; -1: as they are, in bf16 */
} tagc_strategy;

/* Of the strategies that other rows are compared with. */
enum {
    TAGC_STRATEGY_FSDP2 = 0,
    TAGC_STRATEGY_STAYS_GATHERED = 1,
    TAGC_STRATEGY_FOUR_BITS = 4,
    TAGC_N_STRATEGIES = 9
};
extern const tagc_strategy tagc_strategies[TAGC_N_STRATEGIES];

/* Whether gradients become fewer bits than bf16 has. */
int tagc_strategy_compresses(const tagc_strategy *strategy);
/* What compressed parameters send: bf16 as it is, or what the level does. */
tagc_schedule_plan tagc_strategy_plan(const tagc_strategy *strategy);

#endif
