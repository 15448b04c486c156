/* packed: all ranks know the union, so values travel in its order, and the owner only adds them. */
#include "codec/elements.h"
#include "paper/pack.h"
#include "paper/paper.h"

#include <string.h>

static size_t max_words(const tagc_reducer *r) {
    return tagc_paper_of(r)->max_union;
}

static size_t scratch_bytes(const tagc_reducer *r) {
    (void)r;
    return 0;
}

static void place(tagc_reducer *r, tagc_arena *arena) {
    (void)r, (void)arena;
}

static uint64_t shard_bytes(const tagc_reducer *r, int d, size_t n) {
    (void)r, (void)d;
    return n * sizeof(float);
}

static void no_plan(tagc_reducer *r, const tagc_union *own) {
    (void)r, (void)own;
}

static void encode(tagc_reducer *r, int d, const tagc_union *of) {
    const tagc_paper *p = tagc_paper_of(r);
    size_t sent = (size_t)d * r->k;
    float *packed = (float *)(p->value_send + (size_t)d * p->value_bytes);
    tagc_pack(of->positions, of->n, p->sent_indices + sent, p->sent_values + sent, p->n_sent[d],
              tagc_paper_options_of(r)->fill_union ? tagc_reducer_fp32_row(r, r->now.residual, (size_t)d)
                                                   : NULL,
              packed);
}

static void add(tagc_reducer *r, int q, size_t n) {
    float *sums = tagc_paper_sums(r);
    const float *from = (const float *)tagc_contribution(r, q);
    if (q == 0)
        memcpy(sums, from, n * sizeof *sums);
    else
        tagc_sum_add(sums, from, n);
}

const tagc_coder tagc_coder_packed = {
    .max_words = max_words,
    .scratch_bytes = scratch_bytes,
    .place = place,
    .shard_bytes = shard_bytes,
    .plan_early = no_plan,
    .encode = encode,
    .plan = no_plan,
    .add = add,
    .decode = tagc_paper_sums_ready,
    .needs_positions = 1,
};
