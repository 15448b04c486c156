/* Inside of the module: what the files of tagc_plan_mesh share. */
#ifndef TAGC_PLAN_MESH_PARTS_H
#define TAGC_PLAN_MESH_PARTS_H

#include "mesh/mesh.h"

/* Values that a rank holds, by how tagc sends their gradients. */
typedef struct tagc_mesh_values {
    double compressed, mild, dense;
} tagc_mesh_values;

double tagc_mesh_count(const tagc_mesh_values *values);

/* What the data-parallel ranks of a rank of the pipeline share out. Units of one kind are alike. */
typedef enum tagc_mesh_unit {                  /* kinds of units */
                              TAGC_MESH_BLOCK, /* all of a layer but its experts */
                              TAGC_MESH_EXPERTS,
                              TAGC_MESH_EMBEDDING,
                              TAGC_MESH_HEAD,
                              TAGC_MESH_N_UNITS
} tagc_mesh_unit;

typedef struct tagc_mesh_stage {
    tagc_mesh_values units[TAGC_MESH_N_UNITS]; /* of one unit */
    int n[TAGC_MESH_N_UNITS];                  /* units of a kind */
    double chunks;                             /* chunks of layers whose activations it holds at once */
    double layers_per_chunk;
} tagc_mesh_stage;

/* at: in [0, n_pipeline). */
tagc_mesh_stage tagc_mesh_stage_of(const tagc_mesh_question *q, int at);
/* All parameters of the model, and those that a token meets. */
void tagc_mesh_params(const tagc_mesh_model *m, uint64_t *n_all, uint64_t *n_active);
/* Tokens of a rank and micro-batch. */
double tagc_mesh_tokens(const tagc_mesh_question *q);
double tagc_mesh_bubble(const tagc_mesh_question *q);

typedef struct tagc_mesh_activations {
    double device, host;
    double moved; /* bytes per step that go to the host's memory and come back */
} tagc_mesh_activations;
tagc_mesh_activations tagc_mesh_activations_of(const tagc_mesh_question *q, const tagc_mesh_stage *stage,
                                               int at);

/* Ranks that share out a unit. Those of a host are neighbours in it, and equally many on each host. */
typedef struct tagc_mesh_group {
    int n_ranks, n_hosts, per_host;
} tagc_mesh_group;
tagc_mesh_group tagc_mesh_group_of(const tagc_mesh_question *q, int unit);

/* What a rank sends of a unit in a step: in a ring of its group, within its host, and to other hosts. */
typedef struct tagc_mesh_flow {
    double ring, within, between;
} tagc_mesh_flow;
tagc_status tagc_mesh_flows(const tagc_mesh_question *q, const tagc_mesh_stage *stage, int unit,
                            tagc_mesh_flow *gradients, tagc_mesh_flow *parameters);

/* Adds what data parallelism holds, to arrays (TAGC_MESH_N_KINDS). */
tagc_status tagc_mesh_data_memory(const tagc_mesh_question *q, const tagc_mesh_stage *stage, double *device,
                                  double *host);
/* Bytes per step between device and host for offloaded states. */
double tagc_mesh_state_moved(const tagc_mesh_question *q, const tagc_mesh_stage *stage);

tagc_status tagc_mesh_count_legs(const tagc_mesh_question *q, tagc_mesh_bytes legs[TAGC_MESH_N_LEGS]);

#endif
