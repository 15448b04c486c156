/* A plan of a model and a cluster that are given by size: what `tagc plan` and `python -m tagc plan` both read and print.
 *
 *   words.c       the table of options, and what the words mean
 *   cluster.c     the plan of these words; all of it as one call, which libtagc-plan.so exports for Python (ask.h)
 *   text.c        the plan as text
 *   json.c        and as JSON */
#ifndef TAGC_CLUSTER_CLUSTER_H
#define TAGC_CLUSTER_CLUSTER_H

#include "options/options.h"
#include "sizes/memory.h"
#include "sizes/rows.h"
#include <stdio.h>

/* Values of the options. */
typedef struct tagc_cluster_values {
    const char *params, *link, *latency, *host_link, *json;
    int64_t hosts, gpus_per_host, tokens, accumulate;
    double tflops, compute_s, codec_ns;
    const char *sequence_parallel, *offload, *pipeline_values, *token_values;
    int64_t n_tensor, n_context, n_pipeline, n_expert, n_stages_per_rank;
    int64_t micro_batches, micro_batch_size, sequence_length;
    int64_t experts, experts_per_token;
    int schedule, recompute, codec;
} tagc_cluster_values;

/* What was asked for, read and checked. */
typedef struct tagc_cluster {
    tagc_cluster_values values;
    int is_mesh;                        /* 1: a model by name, or an option of a mesh */
    double n_params;                    /* 0: a model by name */
    const char *name;                   /* of the model; NULL: by size */
    double links[TAGC_TIMES_MAX_LINKS]; /* (n_links) bits per second of a host's card */
    int n_links;
    double latency_s, host_link;    /* bits per second */
    tagc_mesh_question question;    /* of a mesh, without a way of data parallelism; else its model alone */
    double codec_ns;                /* on a mesh: of tokens, the mean of both ways */
    int is_measured, codec_threads; /* the codec, and on how many threads */
} tagc_cluster;

/* One of both, as the words ask. */
typedef struct tagc_cluster_plan {
    tagc_mesh_plan mesh;
    tagc_times_plan times;
    tagc_memory_row memory[TAGC_MEMORY_MAX_ROWS];
    int n_memory;
} tagc_cluster_plan;

/* Its values are the members of a tagc_cluster. */
extern const tagc_command tagc_cluster_command;

/* Reads what was parsed into parsed->values, a tagc_cluster. TAGC_ERR_ARGUMENT names option, value and what is allowed. */
tagc_status tagc_cluster_read(const tagc_parsed *parsed);

/* The payload of TCP in bytes per second of a line of bits_per_s. */
double tagc_cluster_payload(double bits_per_s);
const char *tagc_cluster_sequence_name(int sequence);

/* The calls of torch and tagc.torch that make a row which compresses, a line each. Returns how many. */
enum { TAGC_CLUSTER_MAX_CALLS = 5, TAGC_CLUSTER_CALL_CHARS = 128 };
int tagc_cluster_calls(const tagc_cluster *cluster, const tagc_times_row *row,
                       char lines[TAGC_CLUSTER_MAX_CALLS][TAGC_CLUSTER_CALL_CHARS]);

/* Measures the codec, if its time was not given. */
tagc_status tagc_cluster_make(tagc_cluster *cluster, tagc_cluster_plan *out);

void tagc_cluster_print(const tagc_cluster *cluster, const tagc_cluster_plan *plan, FILE *out);
void tagc_cluster_print_json(const tagc_cluster *cluster, const tagc_cluster_plan *plan, FILE *out);

#endif
