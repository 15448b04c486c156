/* A plan as JSON, which libtagc-plan.so has to write without a library for it. */
#include "cluster/cluster.h"

/* A member of an object with a comma before it, unless it is the first. NULL: the next element of a list. */
static void key(FILE *out, const char *name, int is_first) {
    if (!is_first) fputs(", ", out);
    if (name) fprintf(out, "\"%s\": ", name);
}

/* Names have printable ASCII alone. */
static void text(FILE *out, const char *name, int is_first, const char *value) {
    key(out, name, is_first);
    if (!value) {
        fputs("null", out);
        return;
    }
    fputc('"', out);
    for (; *value; value++) {
        if (*value == '"' || *value == '\\') fputc('\\', out);
        fputc(*value, out);
    }
    fputc('"', out);
}

static void number(FILE *out, const char *name, int is_first, double value) {
    key(out, name, is_first);
    fprintf(out, "%.17g", value);
}

static void yes_or_no(FILE *out, const char *name, int is_first, int value) {
    key(out, name, is_first);
    fputs(value ? "true" : "false", out);
}

static const char *option_text(const tagc_cluster *c, const char *name, char value[32]) {
    tagc_options_get(&tagc_cluster_command, &c->values, tagc_options_find(&tagc_cluster_command, name), value,
                     32);
    return value;
}

static void print_mesh(const tagc_cluster *c, const tagc_mesh_plan *plan, FILE *out) {
    const tagc_mesh_question *q = &c->question;
    static const char *const offloads[] = {"parameters", "optimizer", "activations"};
    const struct {
        const char *name;
        int value;
    } numbers[] = {{"context", q->n_context},
                   {"data", plan->any.n_data},
                   {"pipeline", q->n_pipeline},
                   {"expert", q->n_expert},
                   {"experts", q->model.n_experts},
                   {"stages_per_rank", q->n_stages_per_rank},
                   {"micro_batches", q->n_micro_batches},
                   {"micro_batch_size", q->n_sequences},
                   {"sequence_length", q->n_tokens}};
    char value[32];
    number(out, "tensor", 1, q->n_tensor);
    text(out, "sequence", 0, tagc_cluster_sequence_name(q->sequence));
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        number(out, numbers[i].name, 0, numbers[i].value);
    text(out, "schedule", 0, option_text(c, "pipeline-schedule", value));
    text(out, "recompute", 0, option_text(c, "recompute", value));
    key(out, "offload", 0);
    fputc('[', out);
    for (int i = 0, n = 0; i < 3; i++)
        if (q->offload & 1 << i) text(out, NULL, n++ == 0, offloads[i]);
    fputc(']', out);
}

static void print_kinds(FILE *out, const char *name, const double values[TAGC_MESH_N_KINDS]) {
    key(out, name, 0);
    fputc('{', out);
    for (int kind = 0; kind < TAGC_MESH_N_KINDS; kind++)
        number(out, tagc_mesh_kind_name(kind), kind == 0, values[kind]);
    fputc('}', out);
}

static void print_fits(FILE *out, double n_bytes) {
    key(out, "fits", 0);
    fputc('[', out);
    for (int i = 0, n = 0; i < TAGC_N_GPU_SIZES; i++)
        if (n_bytes <= 1e9 * tagc_gpu_sizes_gb[i]) number(out, NULL, n++ == 0, tagc_gpu_sizes_gb[i]);
    fputc(']', out);
}

static void print_mesh_row(const tagc_mesh_row *row, FILE *out) {
    text(out, "name", 1, row->name);
    yes_or_no(out, "compresses", 0, row->compresses);
    print_kinds(out, "device", row->device);
    number(out, "device_all", 0, row->device_all);
    print_kinds(out, "host", row->host);
    number(out, "host_all", 0, row->host_all);
    number(out, "stage", 0, row->stage);
    print_fits(out, row->device_all);
}

static void print_sent(const tagc_mesh_sent *sent, FILE *out) {
    text(out, "name", 1, sent->name);
    yes_or_no(out, "compresses", 0, sent->compresses);
    number(out, "rank", 0, sent->bytes.rank);
    number(out, "host", 0, sent->bytes.host);
    number(out, "all", 0, sent->bytes.all);
    number(out, "between", 0, sent->bytes.between);
}

/* Elements of a list, each on a line of its own. */
static void open_list(FILE *out, const char *name) {
    fprintf(out, ",\n \"%s\": [", name);
}
static void open_element(FILE *out, int i) {
    fprintf(out, "%s\n  {", i > 0 ? "," : "");
}

static void print_mesh_plan(const tagc_cluster *c, const tagc_mesh_plan *plan, FILE *out) {
    text(out, "model", 0, c->name);
    number(out, "n_params", 0, (double)plan->any.n_params);
    number(out, "n_active_params", 0, (double)plan->any.n_active_params);
    fprintf(out, ",\n \"mesh\": {");
    print_mesh(c, plan, out);
    fputc('}', out);
    number(out, "tokens", 0, plan->n_tokens);
    number(out, "compute_s", 0, plan->compute_s);
    number(out, "bubble", 0, plan->any.bubble);
    number(out, "in_flight", 0, plan->any.in_flight);
    key(out, "links", 0);
    fputc('[', out);
    for (int i = 0; i < c->n_links; i++) number(out, NULL, i == 0, c->links[i]);
    fputc(']', out);
    open_list(out, "rows");
    for (int i = 0; i < plan->n_rows; i++) {
        open_element(out, i);
        print_mesh_row(&plan->rows[i], out);
        fputc('}', out);
    }
    fputc(']', out);
    open_list(out, "legs");
    for (int i = 0; i < plan->n_sent; i++) {
        open_element(out, i);
        print_sent(&plan->sent[i], out);
        fputc('}', out);
    }
    fputc(']', out);
    open_list(out, "token_links");
    for (int i = 0; i < plan->n_token_links; i++) {
        const tagc_tokens_reply *reply = &plan->tokens[i];
        open_element(out, i);
        number(out, "bits_per_s", 1, c->links[i]);
        text(out, "choice", 0, reply->verdict == TAGC_VERDICT_PAYS ? "compress" : "off");
        text(out, "verdict", 0, tagc_verdict_name(reply->verdict));
        number(out, "plain_s", 0, reply->comm_s[0]);
        number(out, "packed_s", 0, reply->comm_s[1]);
        number(out, "codec_ns", 0, c->codec_ns);
        fputc('}', out);
    }
    fputc(']', out);
}

/* ---- of data parallelism ---- */

static void print_calls(const tagc_cluster *c, const tagc_times_row *row, FILE *out) {
    char lines[TAGC_CLUSTER_MAX_CALLS][TAGC_CLUSTER_CALL_CHARS];
    int n = tagc_cluster_calls(c, row, lines);
    key(out, "code", 0);
    fputc('[', out);
    for (int i = 0; i < n; i++) text(out, NULL, i == 0, lines[i]);
    fputc(']', out);
}

static void print_answers(const tagc_cluster *c, const tagc_times_plan *plan, FILE *out) {
    open_list(out, "links");
    for (int i = 0; i < c->n_links; i++) {
        const tagc_times_answer *a = &plan->answers[i];
        open_element(out, i);
        number(out, "bits_per_s", 1, c->links[i]);
        text(out, "choice", 0, a->verdict == TAGC_VERDICT_PAYS ? "compress" : "off");
        text(out, "verdict", 0, tagc_verdict_name((int)a->verdict));
        text(out, "packed", 0, a->packed->name);
        text(out, "plain", 0, a->plain->name);
        number(out, "factor", 0, a->factor);
        number(out, "communication", 0, a->communication);
        print_calls(c, a->packed, out);
        fputc('}', out);
    }
    fputc(']', out);
}

static void print_seconds(FILE *out, const char *name, const double *seconds, int n) {
    key(out, name, 0);
    fputc('[', out);
    for (int i = 0; i < n; i++) number(out, NULL, i == 0, seconds[i]);
    fputc(']', out);
}

static void print_rows(const tagc_cluster *c, const tagc_times_plan *plan, FILE *out) {
    open_list(out, "rows");
    for (int i = 0; i < plan->n_rows; i++) {
        const tagc_times_row *row = &plan->rows[i];
        open_element(out, i);
        text(out, "name", 1, row->name);
        yes_or_no(out, "compresses", 0, row->compresses);
        number(out, "memory_bytes", 0, row->memory_bytes);
        number(out, "gradient_bytes", 0, row->gradient_bytes);
        number(out, "parameter_bytes", 0, row->parameter_bytes);
        print_seconds(out, "step_s", row->step_s, c->n_links);
        print_seconds(out, "exposed_s", row->exposed_s, c->n_links);
        number(out, "n_params", 0, row->n_params);
        number(out, "compute_s", 0, row->compute_s);
        fputc('}', out);
    }
    fputc(']', out);
    open_list(out, "card");
    for (int i = 0; i < plan->n_card; i++) {
        open_element(out, i);
        text(out, "name", 1, plan->card[i].name);
        number(out, "gradient_bytes", 0, plan->card[i].gradient_bytes);
        number(out, "parameter_bytes", 0, plan->card[i].parameter_bytes);
        number(out, "bytes_of_a_rank", 0, plan->card[i].rank_bytes);
        fputc('}', out);
    }
    fputc(']', out);
}

static void print_held(const tagc_cluster_plan *plan, FILE *out) {
    open_list(out, "memory");
    for (int i = 0; i < plan->n_memory; i++) {
        const tagc_memory_row *row = &plan->memory[i];
        open_element(out, i);
        text(out, "name", 1, row->name);
        number(out, "parameters", 0, (double)row->parameters);
        number(out, "gradients", 0, (double)row->gradients);
        number(out, "adam", 0, (double)row->adam);
        number(out, "residual", 0, (double)row->residual);
        number(out, "replicas", 0, (double)row->replicas);
        number(out, "buffers", 0, (double)row->buffers);
        number(out, "pinned", 0, (double)row->pinned);
        number(out, "device", 0, (double)row->device);
        number(out, "host", 0, (double)row->host);
        print_fits(out, (double)row->device);
        fputc('}', out);
    }
    fputc(']', out);
}

void tagc_cluster_print_json(const tagc_cluster *c, const tagc_cluster_plan *plan, FILE *out) {
    fprintf(out, "{\"type\": \"tagc plan\", \"format\": 1");
    yes_or_no(out, "simulated", 0, !c->is_mesh);
    number(out, "hosts", 0, (double)c->values.hosts);
    number(out, "gpus_per_host", 0, (double)c->values.gpus_per_host);
    if (c->is_mesh) {
        print_mesh_plan(c, &plan->mesh, out);
    } else {
        number(out, "n_params", 0, plan->times.rows[0].n_params);
        number(out, "codec_ns", 0, c->codec_ns);
        print_answers(c, &plan->times, out);
        print_rows(c, &plan->times, out);
        print_held(plan, out);
    }
    fprintf(out, "}\n");
}
