/* A plan on a mesh: one question for each way of data parallelism, and what they have in common. */
#ifndef TAGC_WAYS_ON_MESH_H
#define TAGC_WAYS_ON_MESH_H

#include "mesh/mesh.h"

/* One way of data parallelism. */
typedef struct tagc_mesh_row {
    const char *name;
    int compresses;
    int stage; /* the rank of the pipeline that holds most */
    double device[TAGC_MESH_N_KINDS], host[TAGC_MESH_N_KINDS];
    double device_all, host_all;
} tagc_mesh_row;

/* Bytes sent in a step, of a kind of parallelism or of a way. */
typedef struct tagc_mesh_sent {
    char name[96];
    int compresses;
    tagc_mesh_bytes bytes;
} tagc_mesh_sent;

enum { TAGC_MESH_MAX_ROWS = 8, TAGC_MESH_MAX_SENT = 4 + 1 + 2 * TAGC_MESH_MAX_ROWS + 1 };

typedef struct tagc_mesh_plan {
    tagc_mesh_reply any; /* of some way: what does not depend on it */
    double n_tokens;     /* of a step, of all ranks */
    double compute_s;    /* of a rank and step, without what is recomputed */
    tagc_mesh_row rows[TAGC_MESH_MAX_ROWS];
    int n_rows;
    tagc_mesh_sent sent[TAGC_MESH_MAX_SENT];
    int n_sent;
} tagc_mesh_plan;

/* Of a kind of memory (tagc_mesh_kind). */
const char *tagc_mesh_kind_name(int kind);

/* The ways that differ on this mesh. The question's placement, format, sparsity and gather have no meaning; its forward and
 * backward are those of compress(stage). TAGC_ERR_ARGUMENT names what is wrong with the question. */
tagc_status tagc_mesh_plan_make(const tagc_mesh_question *question, double flops_per_s, tagc_mesh_plan *out);

#endif
