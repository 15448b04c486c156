/* A plan as text. Of data parallelism: the answer for each link first, then what it rests on. On a mesh: what it is of, memory by
 * kind, and what a step sends. */
#include "cluster/cluster.h"

#include "plan/plan.h"
#include "tagc/schedule.h"
#include <string.h>

enum { CELL = 48 };
static const double ROUNDED = 0.9995; /* what three digits print as 1, and 1000 times as much as 1e+03 */

/* "1.2 GB" */
static const char *bytes_text(double n_bytes, char text[CELL]) {
    static const struct {
        const char *unit;
        double scale;
    } units[] = {{"PB", 1e15}, {"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}};
    for (int i = 0; i < 5; i++)
        if (n_bytes >= ROUNDED * units[i].scale) {
            snprintf(text, CELL, "%.3g %s", n_bytes / units[i].scale, units[i].unit);
            return text;
        }
    snprintf(text, CELL, "%.0f B", n_bytes);
    return text;
}

/* "10 Gbit/s" */
static const char *rate_text(double bits_per_s, char text[CELL]) {
    int is_fast = bits_per_s >= 1e9;
    snprintf(text, CELL, "%g %s", bits_per_s / (is_fast ? 1e9 : 1e6), is_fast ? "Gbit/s" : "Mbit/s");
    return text;
}

/* "7 B", "1.2 T" */
static const char *count_text(double n, char text[CELL]) {
    int is_large = n >= ROUNDED * 1e12;
    snprintf(text, CELL, "%.3g %s", n / (is_large ? 1e12 : 1e9), is_large ? "T" : "B");
    return text;
}

/* "1.2 ms" */
static const char *seconds_text(double seconds, char text[CELL]) {
    if (seconds < ROUNDED)
        snprintf(text, CELL, "%.3g ms", 1e3 * seconds);
    else
        snprintf(text, CELL, seconds < 1e3 * ROUNDED ? "%.3g s" : "%.0f s", seconds);
    return text;
}

int tagc_cluster_calls(const tagc_cluster *c, const tagc_times_row *row,
                       char lines[TAGC_CLUSTER_MAX_CALLS][TAGC_CLUSTER_CALL_CHARS]) {
    const tagc_strategy *s = row->strategy;
    int n = 0, is_near = s->sharding == TAGC_SHARD_HYBRID, selects = s->level == TAGC_LEVEL_LAST;
    const size_t most = TAGC_CLUSTER_CALL_CHARS;
    snprintf(lines[n++], most, "import tagc.torch as tagc");
    if (is_near)
        snprintf(lines[n++], most,
                 "mesh = init_device_mesh(\"cuda\", (%d, %d), mesh_dim_names=(\"host\", \"gpu\"))",
                 (int)c->values.hosts, (int)c->values.gpus_per_host);
    snprintf(lines[n++], most, "fully_shard(model%s)", is_near ? ", mesh=mesh" : "");
    if (selects) snprintf(lines[n++], most, "optimizer = torch.optim.AdamW(model.parameters())");
    snprintf(lines[n++], most, "handle = tagc.compress(model%s%s%s)", selects ? ", optimizer" : "",
             s->gather == TAGC_GATHER_DELTA4 ? ", parameters=\"delta4\"" : "",
             c->values.codec == TAGC_CODEC_ON_HOST ? ", options=tagc.Options(codec=\"host\")" : "");
    return n;
}

static void print_calls(const tagc_cluster *c, const tagc_times_row *row, FILE *out) {
    char lines[TAGC_CLUSTER_MAX_CALLS][TAGC_CLUSTER_CALL_CHARS];
    int n = tagc_cluster_calls(c, row, lines);
    for (int i = 0; i < n; i++) fprintf(out, "    %s\n", lines[i]);
}

static void print_answers(const tagc_cluster *c, const tagc_times_plan *plan, FILE *out) {
    const tagc_times_row *last = NULL; /* whose calls stand above */
    char rate[CELL];
    for (int i = 0; i < c->n_links; i++) {
        const tagc_times_answer *a = &plan->answers[i];
        fprintf(out,
                "%s: %s. %s is %.2f times as fast as %s, which waits for the network in %.0f %% of a step\n",
                rate_text(c->links[i], rate), a->verdict == TAGC_VERDICT_PAYS ? "compress" : "off",
                a->packed->name, a->factor, a->plain->name, 100 * a->communication);
        if (a->verdict != TAGC_VERDICT_PAYS || a->packed == last) continue;
        print_calls(c, a->packed, out);
        last = a->packed;
    }
}

static void print_rows(const tagc_cluster *c, const tagc_times_plan *plan, FILE *out) {
    char text[CELL], cell[CELL];
    fprintf(out, "\n%42s %16s %13s", "", "memory of a rank", "a host sends");
    for (int i = 0; i < c->n_links; i++) {
        snprintf(cell, sizeof cell, "at %.40s", rate_text(c->links[i], text));
        fprintf(out, " %14s", cell);
    }
    for (int k = 0; k < plan->n_rows; k++) {
        const tagc_times_row *row = &plan->rows[k];
        fprintf(out, "\n%-42s %16s", row->name, bytes_text(row->memory_bytes, text));
        fprintf(out, " %13s", bytes_text(row->gradient_bytes + row->parameter_bytes, text));
        for (int i = 0; i < c->n_links; i++) fprintf(out, " %14s", seconds_text(row->step_s[i], text));
    }
    fprintf(out, "\n");
}

static void print_card(const tagc_times_plan *plan, FILE *out) {
    int wide = 0;
    char text[CELL];
    if (plan->n_card == 0) return;
    for (int i = 0; i < plan->n_card; i++)
        if ((int)strlen(plan->card[i].name) > wide) wide = (int)strlen(plan->card[i].name);
    fprintf(out, "\nthrough the card of a host in a step, in each direction\n%*s %10s %10s %10s %10s\n", wide,
            "", "gradients", "parameters", "all", "of a rank");
    for (int i = 0; i < plan->n_card; i++) {
        const tagc_times_card *card = &plan->card[i];
        const double cells[] = {card->gradient_bytes, card->parameter_bytes,
                                card->gradient_bytes + card->parameter_bytes, card->rank_bytes};
        fprintf(out, "%-*s", wide, card->name);
        for (int k = 0; k < 4; k++) fprintf(out, " %10s", bytes_text(cells[k], text));
        fprintf(out, "\n");
    }
}

static void print_fits(const tagc_memory_row *row, FILE *out) {
    int n = 0;
    fprintf(out, "  ");
    for (int i = 0; i < TAGC_N_GPU_SIZES; i++)
        if ((double)row->device <= 1e9 * tagc_gpu_sizes_gb[i])
            fprintf(out, "%s%d GB", n++ > 0 ? ", " : "", tagc_gpu_sizes_gb[i]);
    for (int i = 0; n == 0 && i < TAGC_N_GPU_SIZES; i++)
        fprintf(out, "%s%d GB", i > 0 ? ", " : "none of ", tagc_gpu_sizes_gb[i]);
    fprintf(out, "\n");
}

static void print_held(const tagc_cluster *c, const tagc_cluster_plan *plan, FILE *out) {
    static const char *const columns[] = {"parameters", "gradients", "adam",       "residual",   "replicas",
                                          "buffers",    "pinned",    "on the GPU", "on the host"};
    int wide = 0, is_here = c->values.codec == TAGC_CODEC_ON_HOST;
    char text[CELL];
    for (int i = 0; i < plan->n_memory; i++)
        if ((int)strlen(plan->memory[i].name) > wide) wide = (int)strlen(plan->memory[i].name);
    fprintf(out, "\nmemory of a rank, without activations and torch's buffers; codec=\"%s\": %s\n%*s",
            is_here ? "host" : "device",
            is_here ? "residual, replicas and buffers are in the host's memory"
                    : "residual, replicas and buffers are on the GPU",
            wide, "");
    for (int k = 0; k < 9; k++) fprintf(out, " %11s", columns[k]);
    fprintf(out, "  fits in\n");
    for (int i = 0; i < plan->n_memory; i++) {
        const tagc_memory_row *row = &plan->memory[i];
        const uint64_t cells[] = {row->parameters, row->gradients, row->adam,   row->residual, row->replicas,
                                  row->buffers,    row->pinned,    row->device, row->host};
        fprintf(out, "%-*s", wide, row->name);
        for (int k = 0; k < 9; k++) fprintf(out, " %11s", bytes_text((double)cells[k], text));
        print_fits(row, out);
    }
}

/* ---- on a mesh ---- */

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
    fprintf(out, "%s parameters", count_text((double)plan->any.n_params, n));
    if (has_experts) fprintf(out, ", %s of a token", count_text((double)plan->any.n_active_params, n));
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

static void print_mesh_fits(const tagc_mesh_row *row, FILE *out) {
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
                fprintf(out, " %11s", bytes_text(values_of(row, is_host)[kind], text));
        fprintf(out, " %11s", bytes_text(is_host ? row->host_all : row->device_all, text));
        if (!is_host) print_mesh_fits(row, out);
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
        snprintf(cell, sizeof cell, "at %.40s", rate_text(c->links[i], text));
        fprintf(out, " %12s", cell);
    }
    for (int k = 0; k < plan->n_sent; k++) {
        const tagc_mesh_bytes *sent = &plan->sent[k].bytes;
        fprintf(out, "\n%-*s %9s", wide, plan->sent[k].name, bytes_text(sent->rank, text));
        fprintf(out, " %7.0f %% %9s", 100 * (1 - sent->between / sent->all), bytes_text(sent->host, text));
        for (int i = 0; i < c->n_links; i++) {
            seconds_text(sent->host / tagc_cluster_payload(c->links[i]), cell);
            fprintf(out, " %12s", sent->host > 0 ? cell : "-");
        }
    }
    fprintf(out, "\n");
}

static void print_tokens(const tagc_cluster *c, const tagc_mesh_plan *plan, FILE *out) {
    char rate[CELL], cells[2][CELL];
    if (plan->n_token_links == 0) return;
    fprintf(out, "\ntokens of experts, %.3g ns of the codec per value, %s\n", c->codec_ns,
            c->is_measured ? "measured here on 1 thread" : "as given");
    for (int i = 0; i < plan->n_token_links; i++) {
        const tagc_tokens_reply *reply = &plan->tokens[i];
        for (int k = 0; k < 2; k++) seconds_text(reply->comm_s[k], cells[k]);
        fprintf(out, "%s: %s. Collectives.tokens() takes %s of a step, torch's own all-to-all %s\n",
                rate_text(c->links[i], rate), reply->verdict == TAGC_VERDICT_PAYS ? "compress" : "off",
                cells[1], cells[0]);
    }
}

static void print_mesh(const tagc_cluster *c, const tagc_mesh_plan *plan, FILE *out) {
    char seconds[CELL];
    print_head(c, plan, out);
    if (c->question.n_pipeline > 1) print_pipeline(c, plan, out);
    fprintf(out, "computing takes %s of each GPU, without what is recomputed\n",
            seconds_text(plan->compute_s, seconds));
    print_memories(plan, out);
    print_sent(c, plan, out);
    print_tokens(c, plan, out);
    fprintf(out,
            "\ncounted by formulas, not simulated: no leg is overlapped with computing or another one\n");
}

/* ---- either ---- */

void tagc_cluster_print(const tagc_cluster *c, const tagc_cluster_plan *plan, FILE *out) {
    if (c->is_mesh) {
        print_mesh(c, &plan->mesh, out);
        return;
    }
    print_answers(c, &plan->times, out);
    char n_params[CELL];
    fprintf(out, "\n%s parameters, %d hosts with %d GPU%s each; times are simulated\n",
            count_text(plan->times.rows[0].n_params, n_params), (int)c->values.hosts,
            (int)c->values.gpus_per_host, c->values.gpus_per_host > 1 ? "s" : "");
    char how[64] = "as given";
    if (c->is_measured)
        snprintf(how, sizeof how, "measured here on %d thread%s", c->codec_threads,
                 c->codec_threads > 1 ? "s" : "");
    fprintf(out, "codec: %.3g ns per element, %s; the codec has not been measured on a GPU\n", c->codec_ns,
            how);
    print_rows(c, &plan->times, out);
    print_card(&plan->times, out);
    print_held(c, plan, out);
    fprintf(out,
            "\nmemory of a rank in the table of times: parameters, gradients and Adam's moments in fp32,\n"
            "copies of parameters that stay, and residuals.%s\n",
            c->values.accumulate > 1
                ? " Gradients that FSDP2 keeps whole between micro-steps are not counted."
                : "");
}
