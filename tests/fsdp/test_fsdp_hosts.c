/* Ranks in hosts, and three classes of tensors: hybrid sharding and two levels against the oracle in double, replicas
 * alike to the last bit, and the bytes of every class where they belong. */
#include "../repeats.h"
#include "toy_runs.h"

#include "fsdp/internal.h"
#include "fsdp/layout.h"

/* Masters and moments of this rank are those of the same rank of every other host. */
static void compare_replicas(tagc_comm *comm, const tagc_fsdp *f) {
    for (int i = 0; i < f->tables.n_flats; i++) {
        const tagc_flat *flat = &f->tables.flats[i];
        size_t n = (size_t)flat->n_owned;
        float *own = calloc(3 * n, sizeof *own), *all = malloc(3 * n * (size_t)f->world_size * sizeof *all);
        memcpy(own, flat->master, n * sizeof *own);
        if (flat->moment1 != NULL) memcpy(own + n, flat->moment1, n * sizeof *own);
        memcpy(own + 2 * n, flat->moment2, n * sizeof *own);
        CHECK_OK(tagc_comm_all_gather(comm, own, 3 * n * sizeof *own, all,
                                      3 * n * (size_t)f->world_size * sizeof *all));
        for (int rank = f->rank % f->n_owners; rank < f->world_size; rank += f->n_owners)
            CHECK(memcmp(own, all + (size_t)rank * 3 * n, 3 * n * sizeof *own) == 0);
        free(own);
        free(all);
    }
}

static const int worlds[][2] = {{1, 1}, {2, 1}, {2, 2}, {4, 2}, {6, 3}, {6, 2}, {8, 4}, {8, 2}};
enum {
    N_WORLDS = REPEATS(8, 4, 4),
    TRAIN_STEPS = 100,
    N_HOSTS = REPEATS(2, 1, 1),
    EACH_SHARDING = REPEATS(1, 1, 3),
    LARGEST = REPEATS(8, 4, 4)
};

/* policy none: every flat travels dense, between hosts too. Else: direct with every value in fp32. */
static void check_exact(int sharding, int two_level, int policy) {
    toy_model model;
    toy_gpt(&model, 2, 5, 1);
    toy_exact r = toy_exact_of(&model, 4);
    r.check = compare_replicas;
    r.options.sharding = sharding;
    r.options.two_level = two_level;
    r.options.policy = policy;
    r.options.clip_norm = 2.0;
    r.options.beta1_compressed = 0.9; /* as the oracle */
    r.options.mild.exchange = TAGC_NO_MILD;
    r.options.reducer.exchange = TAGC_EXCHANGE_DIRECT;
    r.options.reducer.format = TAGC_FORMAT_FP32;
    r.options.reducer.sparsity = 0;
    toy_oracle oracle = toy_exact_oracle(&r);
    for (int w = 0; w < N_WORLDS; w++)
        for (int variant = 0; variant < 3; variant++) {
            if (w != 3 && variant != w % 3) continue; /* all of them in one world */
            r.options.ranks_per_host = worlds[w][1];
            r.options.prefetch = variant;
            r.options.n_micro_steps = variant == 0 ? 1 : worlds[w][0] == 8 ? 3 : 2;
            r.options.exchange_each_micro_step = variant == 2;
            toy_exact_run(&r, worlds[w][0]);
            toy_exact_compare(&r, &oracle, worlds[w][0]);
        }
    toy_oracle_free(&oracle);
    free(r.result);
}

TEST(hybrid_is_exact) {
    check_exact(TAGC_SHARD_HYBRID, 0, TAGC_POLICY_NONE);
    check_exact(TAGC_SHARD_HYBRID, 0, TAGC_POLICY_ALL);
}

TEST(two_levels_are_exact) {
    for (int sharding = 0; sharding < 3; sharding++)
        check_exact(sharding, 1, TAGC_POLICY_NON_ATTENTION_LINEAR);
}

static void recipe(tagc_fsdp_options *o) {
    tagc_fsdp_options_init(o);
    o->reducer.exchange = TAGC_EXCHANGE_DIRECT;
    o->reducer.sparsity = 0.9;
    o->reducer.block = 16;
    o->beta1_compressed = 0;
    o->mild = o->reducer;
    o->mild.sparsity = 0.5;
    o->weight_decay = 0;
    o->clip_norm = 0;
}

/* Low-bit values, mild ones beside: replicas stay alike, and the toy is learnt. */
TEST(low_bits_train_in_hosts) {
    toy_model model;
    toy_gpt(&model, 2, 12, 0);
    toy_exact r = toy_exact_of(&model, TRAIN_STEPS);
    r.check = compare_replicas;
    recipe(&r.options);
    static const int hosts[][2] = {{4, 2}, {4, 1}};
    for (int h = 0; h < N_HOSTS; h++)
        for (int sharding = 0; sharding < 4; sharding += EACH_SHARDING) {
            r.options.sharding = sharding;
            r.options.ranks_per_host = hosts[h][1];
            r.options.two_level = sharding != TAGC_SHARD_HYBRID;
            toy_exact_run(&r, hosts[h][0]);
            assert_true(toy_distance(&model, r.result) < 0.4);
        }
    r.options.dense_format = TAGC_FORMAT_BF16;
    r.options.gather = TAGC_GATHER_BF16;
    r.options.sharding = TAGC_SHARD_HYBRID;
    r.options.ranks_per_host = LARGEST / 2;
    toy_exact_run(&r, LARGEST);
    assert_true(toy_distance(&model, r.result) < 0.4);
    free(r.result);
}

/* What is sent belongs to a class, to the gathers or to control, and mild is told apart. */
TEST(classes_are_counted) {
    toy_model model;
    toy_gpt(&model, 2, 32, 0);
    toy_exact r = toy_exact_of(&model, 3);
    r.check = compare_replicas;
    recipe(&r.options);
    r.options.sharding = TAGC_SHARD_GRAD;
    uint64_t n[TAGC_N_CLASSES] = {0}, n_sent = 0, n_class = 0;
    for (int t = 0; t < model.n_tensors; t++)
        n[tagc_fsdp_class(&r.options, &model.tensors[t])] += model.tensors[t].n_elems;
    toy_exact_run(&r, 2);
    const tagc_fsdp_stats *s = &r.stats;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) n_sent += leg != TAGC_LEG_GATHER ? s->n_bytes_sent[leg] : 0;
    for (int c = 0; c < TAGC_N_CLASSES; c++) n_class += s->n_class_bytes_sent[c];
    assert_int_equal(n_sent, n_class + sizeof(double)); /* and the norm */
    assert_int_equal(s->n_compressed, n[TAGC_CLASS_COMPRESSED]);
    assert_int_equal(s->n_mild, n[TAGC_CLASS_MILD]);
    double kept = (double)s->n_sent / (double)s->n_compressed,
           mild_kept = (double)s->n_mild_sent / (double)s->n_mild;
    assert_true(kept > 0.05 && kept < 0.11);
    assert_true(mild_kept > 0.4 && mild_kept < 0.52);
    /* dense: half of each flat in fp32, headers beside; mild and compressed: far less than that */
    assert_true(s->n_class_bytes_sent[TAGC_CLASS_DENSE] >= 2 * n[TAGC_CLASS_DENSE]);
    assert_true(s->n_class_bytes_sent[TAGC_CLASS_MILD] < n[TAGC_CLASS_MILD] * 2);
    assert_true(s->n_class_bytes_sent[TAGC_CLASS_COMPRESSED] < n[TAGC_CLASS_COMPRESSED]);
    free(r.result);
}

/* Parameters stay within a host: between hosts of one rank none travel at all. */
TEST(gathers_stay_in_the_host) {
    toy_model model;
    toy_gpt(&model, 2, 8, 0);
    toy_exact r = toy_exact_of(&model, 2);
    r.check = compare_replicas;
    recipe(&r.options);
    r.options.sharding = TAGC_SHARD_HYBRID;
    uint64_t n_bytes[2];
    for (int i = 0; i < 2; i++) {
        r.options.ranks_per_host = i + 1;
        toy_exact_run(&r, 4);
        n_bytes[i] = r.stats.n_bytes_sent[TAGC_LEG_GATHER];
    }
    assert_int_equal(n_bytes[0], 0);
    /* half of every flat to one other rank, forward and backward; head and embedding stay in between */
    assert_true(n_bytes[1] >= toy_n_params(&model) * 2);
    assert_true(n_bytes[1] <= toy_n_params(&model) * 4 * 3 / 2);
    free(r.result);
}

/* In two levels parameters take another way, and no bit changes. Within a host they travel as they are: for fp32 and bf16 the number of
 * bytes stays, too. */
TEST(gathers_in_two_levels_change_no_bit) {
    toy_model model;
    toy_gpt(&model, 2, 8, 1);
    size_t n = toy_n_params(&model);
    toy_exact r = toy_exact_of(&model, 4);
    r.check = compare_replicas;
    float *one_level = malloc(n * sizeof *one_level);
    for (int variant = 0; variant < 2 * (TAGC_GATHER_DELTA2 + 1); variant++) {
        const int *world = worlds[variant % 3 == 2 ? 4 : 3]; /* 4 ranks in hosts of 2, 6 in hosts of 3 */
        int wire = variant / 2, sharding = variant % 2 ? TAGC_SHARD_GRAD : TAGC_SHARD_FULL;
        if (wire >= TAGC_GATHER_DELTA8 && sharding != TAGC_SHARD_GRAD) continue;
        tagc_fsdp_options_init(&r.options);
        r.options.policy = TAGC_POLICY_NONE;
        r.options.sharding = sharding;
        r.options.gather = wire;
        r.options.gather_check_every = wire % 2 ? 2 : 0;
        r.options.ranks_per_host = world[1];
        r.options.prefetch = variant % 4;
        r.options.n_micro_steps = 1 + variant / 2 % 2;
        toy_exact_run(&r, world[0]);
        memcpy(one_level, r.result, n * sizeof *one_level);
        tagc_fsdp_stats before = r.stats;
        r.options.two_level = 1;
        toy_exact_run(&r, world[0]);
        assert_memory_equal(one_level, r.result, n * sizeof *one_level);
        assert_true(r.stats.grad_norm == before.grad_norm);
        for (int leg = 0; leg < TAGC_N_LEGS; leg++)
            if (leg != TAGC_LEG_GATHER || wire <= TAGC_GATHER_BF16)
                assert_int_equal(r.stats.n_bytes_sent[leg], before.n_bytes_sent[leg]);
    }
    free(one_level);
    free(r.result);
}

/* A layout without ranks knows what engines of hosts hold, and statistics how much their ranks kept together. */
typedef struct held {
    toy_model model;
    tagc_fsdp_options options;
} held;

static void hold(tagc_comm *comm, void *arg) {
    held *h = arg;
    tagc_fsdp *f;
    tagc_layout *layout;
    tagc_fsdp_memory memory;
    tagc_fsdp_stats stats;
    CHECK_OK(tagc_fsdp_create(comm, h->model.tensors, h->model.n_tensors, &h->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    CHECK_OK(tagc_layout_create(h->model.tensors, h->model.n_tensors, &h->options, f->world_size, &layout));
    tagc_fsdp_memory_used(f, &memory);
    CHECK(memory.parameters == layout->memory.parameters && memory.gradients == layout->memory.gradients);
    CHECK(memory.optimizer == layout->memory.optimizer && memory.residuals == layout->memory.residuals);
    CHECK(layout->n_mild == tagc_fsdp_n_mild(f) && layout->n_mild > 0);
    toy_step(&h->model, comm, f, 1, 0, 0.01, &stats);
    double share = (double)stats.n_sent / (double)stats.n_compressed;
    /* A tenth; of two hosts' own rows 2.4 times as much. */
    if (f->world_size > h->options.ranks_per_host) CHECK(share > 0.09 && share < 0.18);
    tagc_layout_destroy(layout);
    tagc_fsdp_destroy(f);
}

TEST(layouts_know_hosts) {
    held h;
    toy_gpt(&h.model, 2, 24, 0);
    recipe(&h.options);
    h.options.two_level = 1;
    for (int w = 0; w < N_WORLDS; w++)
        for (int sharding = 0; sharding < 4; sharding++) {
            h.options.sharding = sharding;
            h.options.ranks_per_host = worlds[w][1];
            toy_run(worlds[w][0], hold, &h);
        }
}

/* ---- refusals ---- */

typedef struct refusal {
    toy_model model;
    tagc_fsdp_options options;
    tagc_status status;
    char text[TAGC_ERROR_TEXT_BYTES];
} refusal;

static void refuse(tagc_comm *comm, void *arg) {
    refusal *r = arg;
    tagc_fsdp *f;
    tagc_status status = tagc_fsdp_create(comm, r->model.tensors, r->model.n_tensors, &r->options, NULL, &f);
    CHECK(f == NULL);
    if (tagc_comm_rank(comm) != 0) return;
    r->status = status;
    snprintf(r->text, sizeof r->text, "%s", tagc_last_error());
}

TEST(nonsense_is_refused) {
    static const struct {
        int world_size, sharding, per_host, exchange;
        tagc_status status;
        const char *text;
    } cases[] = {
        {4, TAGC_SHARD_HYBRID, 3, TAGC_EXCHANGE_DIRECT, TAGC_ERR_ARGUMENT, "ranks_per_host is 3"},
        {2, TAGC_SHARD_FULL, 4, TAGC_EXCHANGE_DIRECT, TAGC_ERR_ARGUMENT, "ranks_per_host is 4"},
        {2, TAGC_SHARD_FULL, 0, TAGC_EXCHANGE_DIRECT, TAGC_ERR_ARGUMENT, "ranks_per_host is 0"},
        {4, TAGC_SHARD_HYBRID, 2, TAGC_EXCHANGE_PACKED, TAGC_ERR_UNSUPPORTED,
         "exchange is packed, but hybrid sharding supports only direct"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        refusal r = {0};
        toy_gpt(&r.model, 1, 4, 0);
        tagc_fsdp_options_init(&r.options);
        r.options.sharding = cases[i].sharding;
        r.options.ranks_per_host = cases[i].per_host;
        r.options.reducer.exchange = cases[i].exchange;
        toy_run(cases[i].world_size, refuse, &r);
        assert_int_equal(r.status, cases[i].status);
        assert_non_null(strstr(r.text, cases[i].text));
    }
}
