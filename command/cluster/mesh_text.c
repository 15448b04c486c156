/* A plan on a mesh as text: what it is of, memory by kind, and what a step sends. */
#include "cluster/cluster.h"

#include <string.h>

enum { CELL = TAGC_CLUSTER_CELL };

/* "3 hosts", with commas between thousands. many: NULL: `one` with an s. */
static const char *many_text(double n, const char *one, const char *many, char text[CELL]) {
    char digits[24], grouped[32] = "";
    snprintf(digits, sizeof digits, "%.0f", n);
    for (size_t i = 0, n_digits = strlen(digits), at = 0; i < n_digits; i++) {
        if (i > 0 && (n_digits - i) % 3 == 0) grouped[at++] = ',';
        grouped[at++] = digits[i];
        grouped[at] = '\0';
    }
    snprintf(text, CELL, "%s %s%s", grouped, n == 1 || !many ? one : many, n == 1 || many ? "" : "s");
    return text;
}

static void print_head(const tagc_cluster *c, const tagc_mesh_plan *plan, FILE *out) {
    const tagc_mesh_question *q = &c->question;
    char n[CELL], hosts[CELL], gpus[CELL], micro[CELL], data[CELL], tokens[CELL], ranks[CELL];
    int has_experts = q->model.n_experts > 1;
    fprintf(out, "%s parameters", tagc_cluster_count_text((double)plan->any.n_params, n));
    if (has_experts)
        fprintf(out, ", %s of a token", tagc_cluster_count_text((double)plan->any.n_active_params, n));
    fprintf(out, "; %s with %s each: tensor %d%s, context %d, data %d, pipeline %d",
            many_text((double)c->values.hosts, "host", NULL, hosts),
            many_text((double)c->values.gpus_per_host, "GPU", NULL, gpus), q->n_tensor,
            q->sequence != TAGC_MESH_WHOLE_SEQUENCE ? " with the sequence" : "", q->n_context,
            plan->any.n_data, q->n_pipeline);
    if (has_experts)
        fprintf(out, ", %d experts over %s", q->model.n_experts, many_text(q->n_expert, "rank", NULL, ranks));
    many_text(plan->n_tokens, "token", NULL, tokens);
    fprintf(out, "\na step: %s of %d x %d tokens for each of %s, %s in all\n",
            many_text(q->n_micro_batches, "micro-batch", "micro-batches", micro), q->n_sequences, q->n_tokens,
            many_text(plan->any.n_data, "data rank", NULL, data), tokens);
}

static void print_pipeline(const tagc_cluster *c, const tagc_mesh_plan *plan, FILE *out) {
    char schedule[CELL], stages[CELL];
    int row = tagc_options_find(&tagc_cluster_command, "pipeline-schedule");
    tagc_options_get(&tagc_cluster_command, &c->values, row, schedule, sizeof schedule);
    fprintf(out,
            "%s, %s per rank: bubbles take %.1f %% of a step (%.3g of the computing time); the fullest rank "
            "holds %.3g "
            "micro-batches\n",
            schedule, many_text(c->question.n_stages_per_rank, "stage", NULL, stages),
            100 * plan->any.bubble / (1 + plan->any.bubble), plan->any.bubble, plan->any.in_flight);
}

/* ---- memory ---- */

static const double *values_of(const tagc_mesh_row *row, int is_host) {
    return is_host ? row->host : row->device;
}

static int has_kind(const tagc_mesh_plan *plan, int is_host, int kind) {
    for (int i = 0; i < plan->n_rows; i++)
        if (values_of(&plan->rows[i], is_host)[kind] != 0) return 1;
    return 0;
}

static void print_fits(const tagc_mesh_row *row, FILE *out) {
    const char *between = "  ";
    for (int i = 0; i < TAGC_N_GPU_SIZES; i++) {
        if (row->device_all > 1e9 * tagc_gpu_sizes_gb[i]) continue;
        fprintf(out, "%s%d GB", between, tagc_gpu_sizes_gb[i]);
        between = ", ";
    }
    if (strcmp(between, "  ") == 0) fprintf(out, "  none of these");
}

static void print_memory(const tagc_mesh_plan *plan, int is_host, FILE *out) {
    int wide = 0;
    char text[CELL];
    for (int i = 0; i < plan->n_rows; i++)
        if ((int)strlen(plan->rows[i].name) > wide) wide = (int)strlen(plan->rows[i].name);
    fprintf(out, "%*s", wide, "");
    for (int kind = 0; kind < TAGC_MESH_N_KINDS; kind++)
        if (has_kind(plan, is_host, kind)) fprintf(out, " %11s", tagc_mesh_kind_name(kind));
    fprintf(out, " %11s%s\n", "all", is_host ? "" : "  fits in");
    for (int i = 0; i < plan->n_rows; i++) {
        const tagc_mesh_row *row = &plan->rows[i];
        fprintf(out, "%-*s", wide, row->name);
        for (int kind = 0; kind < TAGC_MESH_N_KINDS; kind++)
            if (has_kind(plan, is_host, kind))
                fprintf(out, " %11s", tagc_cluster_bytes_text(values_of(row, is_host)[kind], text));
        fprintf(out, " %11s", tagc_cluster_bytes_text(is_host ? row->host_all : row->device_all, text));
        if (!is_host) print_fits(row, out);
        fprintf(out, "\n");
    }
}

static void print_memories(const tagc_mesh_plan *plan, FILE *out) {
    double in_host = 0;
    fprintf(out, "\nmemory of a GPU, of the rank of the pipeline that holds most (of ");
    for (int i = 0; i < TAGC_N_GPU_SIZES; i++)
        fprintf(out, "%s%d GB", i > 0 ? ", " : "", tagc_gpu_sizes_gb[i]);
    fprintf(out, ")\n");
    print_memory(plan, 0, out);
    for (int i = 0; i < plan->n_rows; i++) in_host += plan->rows[i].host_all;
    if (!(in_host > 0)) return;
    fprintf(out, "\nmemory of the host, for the same rank\n");
    print_memory(plan, 1, out);
}

/* ---- bytes ---- */

static void print_sent(const tagc_cluster *c, const tagc_mesh_plan *plan, FILE *out) {
    int wide = 0;
    char text[CELL], cell[CELL];
    for (int i = 0; i < plan->n_sent; i++)
        if ((int)strlen(plan->sent[i].name) > wide) wide = (int)strlen(plan->sent[i].name);
    fprintf(
        out,
        "\nsent in a step, by the rank and by the host that send most; seconds are those of a host's card\n"
        "%*s %9s %9s %9s",
        wide, "", "a rank", "in hosts", "a card");
    for (int i = 0; i < c->n_links; i++) {
        snprintf(cell, sizeof cell, "at %.40s", tagc_cluster_rate_text(c->links[i], text));
        fprintf(out, " %12s", cell);
    }
    for (int k = 0; k < plan->n_sent; k++) {
        const tagc_mesh_bytes *sent = &plan->sent[k].bytes;
        fprintf(out, "\n%-*s %9s", wide, plan->sent[k].name, tagc_cluster_bytes_text(sent->rank, text));
        fprintf(out, " %7.0f %% %9s", 100 * (1 - sent->between / sent->all),
                tagc_cluster_bytes_text(sent->host, text));
        for (int i = 0; i < c->n_links; i++) {
            tagc_cluster_seconds_text(sent->host / tagc_cluster_payload(c->links[i]), cell);
            fprintf(out, " %12s", sent->host > 0 ? cell : "-");
        }
    }
    fprintf(out, "\n");
}

void tagc_cluster_print_mesh(const tagc_cluster *c, const tagc_mesh_plan *plan, FILE *out) {
    char seconds[CELL];
    print_head(c, plan, out);
    if (c->question.n_pipeline > 1) print_pipeline(c, plan, out);
    fprintf(out, "computing takes %s of each GPU, without what is recomputed\n",
            tagc_cluster_seconds_text(plan->compute_s, seconds));
    print_memories(plan, out);
    print_sent(c, plan, out);
    fprintf(out,
            "\ncounted by formulas, not simulated: no leg is overlapped with computing or another one\n");
}
