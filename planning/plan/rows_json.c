/* A plan as JSON; docs/reference/results-format.md describes it. */
#include "plan/rows.h"

#include "files/result_file.h"
#include <math.h>

static json_t *memory_json(const tagc_plan_memory *m) {
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "parameters", (json_int_t)m->engine.parameters,
                     "gradients", (json_int_t)m->engine.gradients, "optimizer",
                     (json_int_t)m->engine.optimizer, "residuals", (json_int_t)m->engine.residuals, "buffers",
                     (json_int_t)m->buffers, "total", (json_int_t)m->total, "state", (json_int_t)m->state);
}

static json_t *placement_json(const tagc_setup *setup) {
    const tagc_placement_info *p = tagc_placement_describe(setup->placement);
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:b}", "name", p->name, "parameters", p->parameters,
                     "gradients", p->gradients, "optimizer", p->optimizer, "residuals", p->residuals,
                     "is_run", p->is_run && !tagc_setup_keeps_replicas(setup));
}

/* null unless it is above 0. */
static json_t *positive(double value) {
    return value > 0 ? tagc_json_real(value) : json_null();
}

static json_t *card_json(const tagc_plan_row *row) {
    const tagc_plan_card *c = &row->card;
    return json_pack("{s:o, s:o, s:o}", "ring", tagc_json_real(c->ring), "one_level",
                     tagc_json_real(c->one_level), "two_levels", tagc_json_real(c->two_levels));
}

static json_t *row_json(const tagc_plan_row *row, int link) {
    const tagc_plan_volume *v = &row->volume;
    const tagc_forecast *f = &row->forecasts[link >= 0 ? link : 0];          /* zeros without a link */
    double n_bits[TAGC_N_LEGS], seen = f->iteration_s > 0 ? 0 : (double)NAN; /* NaN: no times */
    for (int leg = 0; leg < TAGC_N_LEGS; leg++)
        n_bits[leg] = tagc_plan_bits(row, v->n_bytes[leg], v->n_params);
    return json_pack(
        "{s:s, s:o, s:o, s:o, s:o, s:o, s:I, s:o, s:o, s:s?, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, "
        "s:o, s:o, s:s?, s:o}",
        "arm", row->arm, "placement", placement_json(&row->setup), "memory_bytes", memory_json(&row->memory),
        "n_bytes_sent", tagc_json_leg_reals(v->n_bytes), "n_host_bytes_sent",
        tagc_json_leg_reals(v->n_host_bytes), "bits_per_param", tagc_json_leg_reals(n_bits), "n_compressed",
        (json_int_t)v->n_compressed, "compressed_bits_per_param",
        tagc_json_real(tagc_plan_bits(row, v->n_bytes_compressed, v->n_compressed)), "union_density",
        row->union_source ? tagc_json_real(row->setup.union_density) : json_null(), "union_source",
        row->union_source, "bucket_elems", (json_int_t)row->setup.engine.bucket_elems, "n_mild",
        (json_int_t)v->n_mild, "sent_density", positive(row->setup.sent_density), "load", positive(v->load),
        "unpeeled", v->load > 0 ? tagc_json_real(v->unpeeled) : json_null(), "iteration_s",
        tagc_json_real(seen + f->iteration_s), "exposed_s",
        tagc_json_real(seen + f->wait_gather_s + f->wait_reduce_s), "compute_s",
        tagc_json_real(seen + f->compute_s), "wait_gather_s", tagc_json_real(seen + f->wait_gather_s),
        "wait_reduce_s", tagc_json_real(seen + f->wait_reduce_s), "optimizer_s",
        tagc_json_real(seen + f->optimizer_s), "note", row->note[0] ? row->note : NULL, "card_bytes",
        card_json(row));
}

static json_t *costs_json(const tagc_plan_inputs *inputs) {
    const tagc_costs *c = &inputs->costs;
    if (!inputs->has_costs) return json_null();
    json_t *json =
        json_pack("{s:s, s:o, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "source",
                  inputs->profile_name ? inputs->profile_name : "given", "fit_rms",
                  inputs->profile_name ? tagc_json_real(inputs->fit_rms) : json_null(), "flop_s", c->flop_s,
                  "optimizer_s_per_elem", c->optimizer_s, "memory_s_per_byte", c->byte_s, "codec_factor",
                  c->codec_factor, "transfer_s", c->overhead_s, "queue_bytes", c->queue_bytes, "link_share",
                  c->link_share, "cpu_s_per_byte", c->cpu_s_per_byte, "poll_cores", c->poll_cores);
    if (!inputs->profile_name) return json;
    int world_sizes[2];
    double bytes_per_s[2];
    tagc_points_seen(&inputs->profile, world_sizes, bytes_per_s);
    json_object_set_new(json, "cores_per_host", json_real(c->cores));
    json_object_set_new(json, "seen_world_sizes", json_pack("[i, i]", world_sizes[0], world_sizes[1]));
    json_object_set_new(json, "seen_bytes_per_s",
                        json_pack("[o, o]", tagc_json_real(bytes_per_s[0]), tagc_json_real(bytes_per_s[1])));
    return json;
}

static json_t *verdict_json(const tagc_plan_row *rows, int n, int link) {
    tagc_plan_answer answer;
    if (link < 0 || !tagc_plan_judge(rows, n, link, &answer)) return json_null();
    return json_pack("{s:s, s:s, s:s, s:f}", "verdict", tagc_verdict_name((int)answer.verdict), "arm",
                     answer.packed->arm, "baseline", answer.plain->arm, "speedup", answer.speedup);
}

json_t *tagc_plan_json(const tagc_plan_inputs *inputs, const tagc_plan_row *rows, int n, int link,
                       json_t *origin) {
    const tagc_setup *s = &rows[0].setup;
    const tagc_gpt2_config *c = &s->model;
    json_t *list = json_array(), *about_link = json_null();
    for (int i = 0; i < n; i++) json_array_append_new(list, row_json(&rows[i], link));
    if (link >= 0) {
        const tagc_plan_link *l = &inputs->links[link];
        about_link = json_pack("{s:f, s:f, s:f, s:o, s:o}", "latency_s", l->latency_s, "large_latency_s",
                               fmax(l->large_latency_s, l->latency_s), "bytes_per_s", l->bytes_per_s,
                               "line_bits_per_s", positive(inputs->line_bits_per_s[link]), "host_bytes_per_s",
                               positive(l->host_bytes_per_s));
    }
    json_t *model = json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:b, s:I}", "name", inputs->model_name,
                              "n_layer", c->n_layer, "n_head", c->n_head, "n_embd", c->n_embd, "block_size",
                              c->block_size, "vocab_size", c->vocab_size, "tied", c->tied, "n_params",
                              (json_int_t)rows[0].volume.n_params);
    return json_pack("{s:s, s:i, s:o, s:o, s:i, s:i, s:i, s:i, s:b, s:o, s:o, s:o, s:o}", "type", "plan",
                     "format", 1, "origin", origin, "model", model, "world_size", s->world_size, "n_hosts",
                     s->n_hosts, "batch_size", s->n_batch, "seq_len", s->n_tokens, "simulated", 1, "link",
                     about_link, "costs", costs_json(inputs), "rows", list, "verdict",
                     verdict_json(rows, n, link));
}
