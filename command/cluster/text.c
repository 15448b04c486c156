/* A plan of data parallelism as text: the answer for each link first, then what it rests on. */
#include "cluster/cluster.h"

#include <string.h>

enum { CELL = TAGC_CLUSTER_CELL };
static const double ROUNDED = 0.9995; /* what three digits print as 1, and 1000 times as much as 1e+03 */

const char *tagc_cluster_bytes_text(double n_bytes, char text[CELL]) {
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

const char *tagc_cluster_rate_text(double bits_per_s, char text[CELL]) {
    int is_fast = bits_per_s >= 1e9;
    snprintf(text, CELL, "%g %s", bits_per_s / (is_fast ? 1e9 : 1e6), is_fast ? "Gbit/s" : "Mbit/s");
    return text;
}

const char *tagc_cluster_count_text(double n, char text[CELL]) {
    int is_large = n >= ROUNDED * 1e12;
    snprintf(text, CELL, "%.3g %s", n / (is_large ? 1e12 : 1e9), is_large ? "T" : "B");
    return text;
}

const char *tagc_cluster_seconds_text(double seconds, char text[CELL]) {
    if (seconds < ROUNDED)
        snprintf(text, CELL, "%.3g ms", 1e3 * seconds);
    else
        snprintf(text, CELL, seconds < 1e3 * ROUNDED ? "%.3g s" : "%.0f s", seconds);
    return text;
}

static void print_answers(const tagc_cluster *c, const tagc_times_plan *plan, FILE *out) {
    char rate[CELL];
    for (int i = 0; i < c->n_links; i++) {
        const tagc_times_answer *a = &plan->answers[i];
        fprintf(
            out, "%s: %s. %s is %.2f times as fast as %s, which waits for the network in %.0f %% of a step\n",
            tagc_cluster_rate_text(c->links[i], rate), a->verdict == TAGC_VERDICT_PAYS ? "compress" : "off",
            a->packed->name, a->factor, a->plain->name, 100 * a->communication);
    }
}

static void print_rows(const tagc_cluster *c, const tagc_times_plan *plan, FILE *out) {
    char text[CELL], cell[CELL];
    fprintf(out, "\n%42s %16s %13s", "", "memory of a rank", "a host sends");
    for (int i = 0; i < c->n_links; i++) {
        snprintf(cell, sizeof cell, "at %.40s", tagc_cluster_rate_text(c->links[i], text));
        fprintf(out, " %14s", cell);
    }
    for (int k = 0; k < plan->n_rows; k++) {
        const tagc_times_row *row = &plan->rows[k];
        fprintf(out, "\n%-42s %16s", row->name, tagc_cluster_bytes_text(row->memory_bytes, text));
        fprintf(out, " %13s", tagc_cluster_bytes_text(row->gradient_bytes + row->parameter_bytes, text));
        for (int i = 0; i < c->n_links; i++)
            fprintf(out, " %14s", tagc_cluster_seconds_text(row->step_s[i], text));
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
        for (int k = 0; k < 4; k++) fprintf(out, " %10s", tagc_cluster_bytes_text(cells[k], text));
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
        for (int k = 0; k < 9; k++) fprintf(out, " %11s", tagc_cluster_bytes_text((double)cells[k], text));
        print_fits(row, out);
    }
}

void tagc_cluster_print(const tagc_cluster *c, const tagc_cluster_plan *plan, FILE *out) {
    if (c->is_mesh) {
        tagc_cluster_print_mesh(c, &plan->mesh, out);
        return;
    }
    print_answers(c, &plan->times, out);
    char n_params[CELL];
    fprintf(out, "\n%s parameters, %d hosts with %d GPU%s each; times are simulated\n",
            tagc_cluster_count_text(plan->times.rows[0].n_params, n_params), (int)c->values.hosts,
            (int)c->values.gpus_per_host, c->values.gpus_per_host > 1 ? "s" : "");
    fprintf(out, "codec: %.3g ns per element, %s; the codec has not been measured on a GPU\n", c->codec_ns,
            c->is_measured ? "measured here on one thread" : "as given");
    print_rows(c, &plan->times, out);
    print_card(&plan->times, out);
    print_held(c, plan, out);
    fprintf(out,
            "\nmemory of a rank in the table of times: parameters, gradients and Adam's moments in fp32,\n"
            "copies of parameters that stay, and residuals.\n");
}
