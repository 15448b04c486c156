/* From words to a plan. */
#include "cluster/cluster.h"

#include "sizes/codec.h"

static tagc_status simulate(tagc_cluster *c, tagc_cluster_plan *out) {
    const tagc_cluster_values *v = &c->values;
    const tagc_mesh_model *m = &c->question.model;
    if (c->is_measured) TAGC_TRY(tagc_plan_codec(TAGC_FORMAT_INT2, 0.95, &c->codec_ns));
    tagc_times_setup setup = {.n_layer = m->n_layer,
                              .n_embd = m->n_embd,
                              .hosts = (int)v->hosts,
                              .ranks_per_host = (int)v->gpus_per_host,
                              .n_tokens = (int)v->tokens,
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

tagc_status tagc_cluster_make(tagc_cluster *c, tagc_cluster_plan *out) {
    if (c->is_mesh) return tagc_mesh_plan_make(&c->question, 1e12 * c->values.tflops, &out->mesh);
    return simulate(c, out);
}
