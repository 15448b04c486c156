/* From words to a plan, and the whole command without files and exit codes. */
#include "cluster/cluster.h"

#include "cluster/ask.h"
#include "core/status.h"
#include "sizes/codec.h"
#include "tagc/schedule.h"
#include <stdlib.h>
#include <string.h>

static tagc_status simulate(tagc_cluster *c, tagc_cluster_plan *out) {
    const tagc_cluster_values *v = &c->values;
    const tagc_mesh_model *m = &c->question.model;
    if (c->is_measured) {
        tagc_schedule_plan last;
        TAGC_TRY(tagc_schedule_plan_of_level(NULL, TAGC_CLASS_COMPRESSED, TAGC_LEVEL_LAST, &last));
        c->codec_threads = tagc_plan_threads(0, (int)v->gpus_per_host);
        TAGC_TRY(tagc_plan_codec(last.format, last.sparsity, c->codec_threads, &c->codec_ns));
    }
    tagc_times_setup setup = {.n_layer = m->n_layer,
                              .n_embd = m->n_embd,
                              .hosts = (int)v->hosts,
                              .ranks_per_host = (int)v->gpus_per_host,
                              .n_tokens = (int)v->tokens,
                              .n_micro_steps = (int)v->accumulate,
                              .n_links = c->n_links,
                              .latency_s = c->latency_s,
                              .host_bytes_per_s = c->host_link / 8,
                              .flops_per_s = 1e12 * v->tflops,
                              .compute_s = v->compute_s,
                              .codec_s = 1e-9 * c->codec_ns};
    for (int i = 0; i < c->n_links; i++) setup.links_bytes_per_s[i] = tagc_cluster_payload(c->links[i]);
    TAGC_TRY(tagc_times_make(&setup, &out->times));
    return tagc_memory_rows_make(m->n_layer, m->n_embd, setup.hosts, setup.ranks_per_host,
                                 (tagc_codec_place)v->codec, out->memory, &out->n_memory);
}

/* Seconds of the codec for tokens, forward and backward. */
static tagc_status find_codec_s(tagc_cluster *c, double codec_s[2]) {
    const int formats[] = {c->question.token_forward, c->question.token_backward};
    for (int i = 0; i < 2; i++) {
        double ns = c->codec_ns;
        if (formats[i] == TAGC_FORMAT_BF16)
            ns = 0;
        else if (c->is_measured)
            TAGC_TRY(tagc_plan_blocks_codec(formats[i], &ns));
        codec_s[i] = 1e-9 * ns;
    }
    if (c->is_measured) c->codec_ns = 1e9 * (codec_s[0] + codec_s[1]) / 2;
    return TAGC_OK;
}

static tagc_status plan_mesh(tagc_cluster *c, tagc_mesh_plan *out) {
    double codec_s[2];
    TAGC_TRY(tagc_mesh_plan_make(&c->question, 1e12 * c->values.tflops, out));
    if (c->values.compute_s > 0) out->compute_s = c->values.compute_s;
    if (!(out->any.legs[TAGC_MESH_LEG_EXPERT].between > 0)) return TAGC_OK;
    TAGC_TRY(find_codec_s(c, codec_s));
    for (int i = 0; i < c->n_links; i++)
        TAGC_TRY(tagc_mesh_plan_add_tokens(&c->question, c->latency_s, tagc_cluster_payload(c->links[i]),
                                           codec_s, out));
    return TAGC_OK;
}

tagc_status tagc_cluster_make(tagc_cluster *c, tagc_cluster_plan *out) {
    return c->is_mesh ? plan_mesh(c, &out->mesh) : simulate(c, out);
}

/* ---- for Python ---- */

/* What print() prints, as text. */
static tagc_status to_text(void (*print)(const tagc_cluster *, const tagc_cluster_plan *, FILE *),
                           const tagc_cluster *c, const tagc_cluster_plan *plan, char **out) {
    size_t n_bytes;
    FILE *file = open_memstream(out, &n_bytes);
    if (!file) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for a plan");
    print(c, plan, file);
    if (fclose(file) == 0) return TAGC_OK;
    free(*out);
    *out = NULL;
    return tagc_fail(TAGC_ERR_MEMORY, "out of memory for a plan");
}

static void print_help(const tagc_cluster *c, const tagc_cluster_plan *plan, FILE *out) {
    (void)c;
    (void)plan;
    tagc_options_explain(&tagc_cluster_command, out);
}

static tagc_status answer(tagc_cluster *c, const tagc_parsed *parsed, tagc_plan_answer_text *out) {
    tagc_cluster_plan plan = {0};
    if (parsed->help) return to_text(print_help, c, &plan, &out->text);
    TAGC_TRY(tagc_cluster_read(parsed));
    TAGC_TRY(tagc_cluster_make(c, &plan));
    TAGC_TRY(to_text(tagc_cluster_print, c, &plan, &out->text));
    out->path = c->values.json;
    return to_text(tagc_cluster_print_json, c, &plan, &out->json);
}

tagc_status tagc_plan_words(int n, char **words, tagc_plan_answer_text *out) {
    tagc_cluster c = {0};
    tagc_parsed parsed = {0};
    if (out->struct_bytes != sizeof *out) return TAGC_ERR_MISMATCH; /* of another version */
    *out = (tagc_plan_answer_text){.struct_bytes = sizeof *out};
    tagc_status status = tagc_options_parse(&tagc_cluster_command, n, words, &c, &parsed);
    if (status == TAGC_OK) status = answer(&c, &parsed, out);
    tagc_options_destroy(&parsed);
    if (status == TAGC_OK) return TAGC_OK;
    tagc_plan_words_free(out);
    snprintf(out->why, sizeof out->why, "%s", tagc_last_error());
    return status;
}

void tagc_plan_words_free(tagc_plan_answer_text *out) {
    free(out->text);
    free(out->json);
    out->text = out->json = NULL;
}
