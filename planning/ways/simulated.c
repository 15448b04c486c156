/* Asks the planner about every way of data parallelism on every link. */
#include "ways/simulated.h"

#include "core/status.h"
#include "plan/ask.h"
#include "plan/plan.h"
#include "ways/models.h"
#include <math.h>
#include <stdio.h>

enum { SEQUENCE = 2048 }; /* tokens */

typedef struct way {
    const char *name;
    int compresses, sharding, gather, format;
    double sparsity;
} way;

#define PLAIN TAGC_GATHER_BF16, TAGC_FORMAT_BF16, 0
#define FOUR                                                                                                 \
    "tagc, 4 bits, parameters=\"delta4\"", 1, TAGC_SHARD_GRAD, TAGC_GATHER_DELTA4, TAGC_FORMAT_INT4, 0
#define FEW                                                                                                  \
    "tagc, 95 % zero, parameters=\"delta4\"", 1, TAGC_SHARD_GRAD, TAGC_GATHER_DELTA4, TAGC_FORMAT_INT2, 0.95

static const way of_one_rank[] = {{"FSDP2 in bf16", 0, TAGC_SHARD_FULL, PLAIN},
                                  {"FSDP2 in bf16, reshard_after_forward=False", 0, TAGC_SHARD_GRAD, PLAIN},
                                  {FOUR},
                                  {FEW}};
static const way of_several[] = {
    {"FSDP2 in bf16", 0, TAGC_SHARD_FULL, PLAIN},
    {"FSDP2 in bf16, sharded within a host", 0, TAGC_SHARD_HYBRID, PLAIN},
    {FOUR},
    {FEW},
    {"tagc, sharded within a host, 4 bits", 1, TAGC_SHARD_HYBRID, TAGC_GATHER_BF16, TAGC_FORMAT_INT4, 0},
    {"tagc, sharded within a host, 95 % zero", 1, TAGC_SHARD_HYBRID, TAGC_GATHER_BF16, TAGC_FORMAT_INT2,
     0.95}};

static tagc_status ask(const tagc_ways_setup *s, const way *w, int link, int n_levels,
                       tagc_plan_reply *reply) {
    int n_tokens = s->n_tokens < SEQUENCE ? s->n_tokens : SEQUENCE;
    double n_sequences = (double)s->n_tokens / n_tokens, n_batch = ceil(n_sequences);
    tagc_plan_question q = {.n_layer = s->n_layer,
                            .n_embd = s->n_embd,
                            .n_vocab = TAGC_MESH_VOCAB,
                            .n_batch = (int)n_batch,
                            .n_tokens = n_tokens,
                            .n_micro_steps = 1,
                            .world_size = s->hosts * s->ranks_per_host,
                            .ranks_per_host = s->ranks_per_host,
                            .n_levels = n_levels,
                            .sharding = w->sharding,
                            .gather = w->gather,
                            .format = w->format,
                            .sparsity = w->sparsity,
                            .link_bytes_per_s = s->links_bytes_per_s[link],
                            .latency_s = s->latency_s,
                            .host_bytes_per_s = s->host_bytes_per_s,
                            /* A part of a sequence takes that part of its time. */
                            .flops_per_s = s->flops_per_s * n_batch / n_sequences,
                            .codec_s = s->codec_s};
    return tagc_plan_ask(&q, reply);
}

/* What the planner counts as an fp32 copy of all parameters is torch's own, in bf16, or a replica of deltas: in bf16, of what one
 * rank of each host owns. */
static double memory_of(const tagc_ways_setup *s, const way *w, const tagc_plan_reply *reply) {
    uint64_t n = reply->n_params, n_bytes = reply->state_bytes + reply->residual_bytes;
    if (w->sharding == TAGC_SHARD_GRAD) {
        n_bytes -= 4 * n;
        n_bytes += 2 * n / (uint64_t)(w->gather == TAGC_GATHER_BF16 ? 1 : s->ranks_per_host);
    }
    return (double)n_bytes;
}

static tagc_status make_row(const tagc_ways_setup *s, const way *w, tagc_ways_row *row) {
    *row = (tagc_ways_row){.name = w->name, .compresses = w->compresses};
    for (int link = 0; link < s->n_links; link++) {
        tagc_plan_reply reply;
        TAGC_TRY(ask(s, w, link, 2, &reply));
        row->step_s[link] = reply.step_s;
        row->exposed_s[link] = reply.exposed_s;
        if (link > 0) continue;
        row->memory_bytes = memory_of(s, w, &reply);
        row->gradient_bytes = reply.gradient_bytes;
        row->parameter_bytes = reply.gather_bytes;
        row->n_params = (double)reply.n_params;
        row->compute_s = reply.compute_s;
    }
    return TAGC_OK;
}

static void add_card(tagc_ways_plan *plan, const tagc_ways_setup *s, const char *name, const char *how,
                     double gradient_bytes, double parameter_bytes) {
    tagc_ways_card *card = &plan->card[plan->n_card++];
    snprintf(card->name, sizeof card->name, "%s%s", name, how);
    card->gradient_bytes = gradient_bytes;
    card->parameter_bytes = parameter_bytes;
    card->rank_bytes = (gradient_bytes + parameter_bytes) / s->ranks_per_host;
}

/* A ring of all ranks enters and leaves each host once. */
static tagc_status make_card(const tagc_ways_setup *s, tagc_ways_plan *plan) {
    const way *four_bits = &of_one_rank[2];
    const tagc_ways_row *dense = &plan->rows[0], *four = &plan->rows[2], *few = &plan->rows[3];
    double n_hosts = s->hosts, n_ranks = n_hosts * s->ranks_per_host;
    double ring = (n_ranks - 1) / n_ranks / ((n_hosts - 1) / n_hosts);
    tagc_plan_reply flat;
    TAGC_TRY(ask(s, four_bits, 0, 1, &flat));
    add_card(plan, s, dense->name, ", a ring of all ranks", ring * dense->gradient_bytes,
             ring * dense->parameter_bytes);
    add_card(plan, s, dense->name, ", in two levels", dense->gradient_bytes, dense->parameter_bytes);
    add_card(plan, s, four_bits->name, ", each rank by itself", flat.gradient_bytes, flat.gather_bytes);
    add_card(plan, s, four->name, ", in two levels", four->gradient_bytes, four->parameter_bytes);
    add_card(plan, s, few->name, ", in two levels", few->gradient_bytes, few->parameter_bytes);
    return TAGC_OK;
}

static tagc_ways_answer answer(const tagc_ways_plan *plan, int link) {
    const tagc_ways_row *fastest[2] = {NULL, NULL};
    for (int i = 0; i < plan->n_rows; i++) {
        const tagc_ways_row *row = &plan->rows[i], **best = &fastest[row->compresses];
        if (!*best || row->step_s[link] < (*best)->step_s[link]) *best = row;
    }
    double plain_s = fastest[0]->step_s[link], packed_s = fastest[1]->step_s[link];
    return (tagc_ways_answer){.verdict = tagc_verdict_of(plain_s, packed_s, 0),
                              .plain = fastest[0],
                              .packed = fastest[1],
                              .factor = plain_s / packed_s,
                              .communication = fastest[0]->exposed_s[link] / plain_s};
}

tagc_status tagc_ways_simulate(const tagc_ways_setup *s, tagc_ways_plan *out) {
    const way *ways = s->ranks_per_host > 1 ? of_several : of_one_rank;
    *out = (tagc_ways_plan){.n_rows = s->ranks_per_host > 1 ? 6 : 4};
    for (int i = 0; i < out->n_rows; i++) TAGC_TRY(make_row(s, &ways[i], &out->rows[i]));
    if (s->ranks_per_host > 1) TAGC_TRY(make_card(s, out));
    for (int link = 0; link < s->n_links; link++) out->answers[link] = answer(out, link);
    return TAGC_OK;
}
