/* Which tensor goes where, and what that costs: policies, names, units, memory, and the refusal of nonsense.
 */
#include "toy.h"

#include "fsdp/internal.h"

/* The full table has more tensors than toy_model holds. */
typedef struct table {
    int n;
    tagc_tensor_info tensors[160];
} table;

static void add(table *t, const char *name, size_t n_rows, size_t n_cols, tagc_tensor_kind kind, int layer) {
    toy_model one = {0};
    toy_add(&one, name, n_rows, n_cols, kind, layer);
    t->tensors[t->n++] = one.tensors[0];
}

static void make_gpt2_162m(table *t) {
    t->n = 0;
    add(t, "wte.weight", 50304, 768, TAGC_TENSOR_EMBEDDING, 0);
    add(t, "wpe.weight", 1024, 768, TAGC_TENSOR_POSITION, 0);
    for (int i = 0; i < 12; i++) {
        static const struct {
            const char *name;
            size_t n_rows, n_cols;
            tagc_tensor_kind kind;
        } block[] = {
            {"ln_1.weight", 768, 1, TAGC_TENSOR_NORM},
            {"ln_1.bias", 768, 1, TAGC_TENSOR_NORM},
            {"attn.c_attn.weight", 768, 2304, TAGC_TENSOR_ATTENTION},
            {"attn.c_attn.bias", 2304, 1, TAGC_TENSOR_BIAS},
            {"attn.c_proj.weight", 768, 768, TAGC_TENSOR_ATTENTION_PROJECTION},
            {"attn.c_proj.bias", 768, 1, TAGC_TENSOR_BIAS},
            {"ln_2.weight", 768, 1, TAGC_TENSOR_NORM},
            {"ln_2.bias", 768, 1, TAGC_TENSOR_NORM},
            {"mlp.c_fc.weight", 768, 3072, TAGC_TENSOR_MLP},
            {"mlp.c_fc.bias", 3072, 1, TAGC_TENSOR_BIAS},
            {"mlp.c_proj.weight", 3072, 768, TAGC_TENSOR_MLP},
            {"mlp.c_proj.bias", 768, 1, TAGC_TENSOR_BIAS},
        };
        for (size_t j = 0; j < sizeof block / sizeof *block; j++) {
            char name[TAGC_TENSOR_NAME_BYTES];
            snprintf(name, sizeof name, "h.%d.%s", i, block[j].name);
            add(t, name, block[j].n_rows, block[j].n_cols, block[j].kind, i + 1);
        }
    }
    add(t, "ln_f.weight", 768, 1, TAGC_TENSOR_NORM, 13);
    add(t, "ln_f.bias", 768, 1, TAGC_TENSOR_NORM, 13);
    add(t, "lm_head.weight", 50304, 768, TAGC_TENSOR_HEAD, 13);
}

/* Tables only: no memory for the parameters. Free f->tables afterwards. */
static tagc_status lay_out(tagc_fsdp *f, const table *t, int rank, int world_size, int wrap, int policy,
                           const char *names) {
    memset(f, 0, sizeof *f);
    f->rank = rank;
    f->world_size = world_size;
    tagc_fsdp_options_init(&f->options);
    f->options.reducer.exchange = TAGC_EXCHANGE_PACKED;
    f->options.wrap = wrap;
    f->options.policy = policy;
    f->options.names = names;
    return tagc_fsdp_layout(f, t->tensors, t->n);
}

static uint64_t count_compressed(const table *t, int policy, const char *names) {
    tagc_fsdp f;
    assert_int_equal(lay_out(&f, t, 0, 2, TAGC_WRAP_BLOCK, policy, names), TAGC_OK);
    uint64_t n = tagc_fsdp_n_compressed(&f), sum = 0;
    for (int i = 0; i < t->n; i++)
        if (f.tables.flats[f.tables.places[i].flat].class_ == TAGC_CLASS_COMPRESSED)
            sum += t->tensors[i].n_elems;
    assert_true(sum == n);
    tagc_memory_destroy(f.tables_memory);
    return n;
}

TEST(policies_compress_what_they_say) {
    table t;
    make_gpt2_162m(&t);
    uint64_t n = 0;
    for (int i = 0; i < t.n; i++) n += t.tensors[i].n_elems;
    assert_int_equal(n, 2 * 50304ull * 768 + 1024 * 768 + 12 * (12 * 768ull * 768 + 13 * 768) + 2 * 768);
    uint64_t embeddings = 2 * 50304ull * 768, mlp = 12 * 2 * 768ull * 3072, projection = 12 * 768ull * 768;
    assert_int_equal(count_compressed(&t, TAGC_POLICY_NONE, NULL), 0);
    assert_int_equal(count_compressed(&t, TAGC_POLICY_ALL, NULL), n);
    assert_int_equal(count_compressed(&t, TAGC_POLICY_PAPER, NULL), embeddings + mlp);
    assert_int_equal(count_compressed(&t, TAGC_POLICY_NON_ATTENTION_LINEAR, NULL),
                     embeddings + mlp + projection);
    assert_int_equal(count_compressed(&t, TAGC_POLICY_NAMES, "h.*.mlp.c_*.weight"), mlp);
    assert_int_equal(count_compressed(&t, TAGC_POLICY_NAMES, ",wte.*,lm_head.weight,"), embeddings);
    assert_int_equal(count_compressed(&t, TAGC_POLICY_NAMES, "nothing,w?e"), 0);
    double paper = (double)(embeddings + mlp) / (double)n,
           linear = (double)(embeddings + mlp + projection) / (double)n;
    print_message("compressed of GPT-2 162M: paper %.2f %%, non-attention linear %.2f %%\n", 100 * paper,
                  100 * linear);
    assert_true(paper > 0.815 && paper < 0.825);
}

/* With a mild exchange every matrix leaves the dense class, and nothing else moves. */
TEST(mild_takes_the_other_matrices) {
    table t;
    make_gpt2_162m(&t);
    uint64_t n_mild[] = {0, 12 * 3 * 768ull * 768 + 1024 * 768, 0, 0, 0}, n_vectors = 12 * 13 * 768 + 2 * 768;
    n_mild[TAGC_POLICY_PAPER] = n_mild[TAGC_POLICY_NON_ATTENTION_LINEAR] + 12 * 768ull * 768;
    n_mild[TAGC_POLICY_NONE] =
        n_mild[TAGC_POLICY_PAPER] + count_compressed(&t, TAGC_POLICY_PAPER, NULL); /* all */
    for (int policy = TAGC_POLICY_NONE; policy <= TAGC_POLICY_ALL; policy++) {
        tagc_fsdp f = {.world_size = 2};
        tagc_fsdp_options_init(&f.options);
        f.options.policy = policy;
        f.options.reducer.exchange = TAGC_EXCHANGE_PACKED;
        f.options.mild.exchange = TAGC_EXCHANGE_DIRECT;
        f.options.mild.sparsity = 0.8;
        assert_int_equal(tagc_fsdp_layout(&f, t.tensors, t.n), TAGC_OK);
        assert_int_equal(tagc_fsdp_n_compressed(&f), count_compressed(&t, policy, NULL));
        assert_int_equal(tagc_fsdp_n_mild(&f), n_mild[policy]);
        uint64_t n_dense = tagc_fsdp_n_params(&f) - tagc_fsdp_n_mild(&f) - tagc_fsdp_n_compressed(&f);
        assert_int_equal(n_dense, policy == TAGC_POLICY_ALL ? 0 : n_vectors);
        for (int i = 0; i < f.tables.n_flats; i++) {
            tagc_layout_flat flat;
            assert_int_equal(tagc_fsdp_flat_info(&f, i, &flat), TAGC_OK);
            const tagc_tensor_info *first = &t.tensors[f.tables.members[f.tables.flats[i].first_member]];
            assert_int_equal(flat.class_, tagc_fsdp_class(&f.options, first));
            int is_packed = flat.class_ == TAGC_CLASS_COMPRESSED;
            assert_int_equal(flat.reducer.exchange, is_packed ? TAGC_EXCHANGE_PACKED : TAGC_EXCHANGE_DIRECT);
            assert_int_equal(tagc_reducer_options_are_whole(&flat.reducer), flat.class_ == TAGC_CLASS_DENSE);
            if (flat.class_ == TAGC_CLASS_MILD) assert_true(flat.reducer.sparsity == 0.8);
        }
        int n_classes = policy == TAGC_POLICY_ALL ? 1 : policy == TAGC_POLICY_NONE ? 2 : 3;
        assert_int_equal(f.tables.units[3].n_flats, n_classes); /* a block */
        tagc_memory_destroy(f.tables_memory);
    }
}

/* Every element has one owner, in every world. */
static void check_ownership(const table *t, int world_size, int wrap, int policy) {
    for (int tensor = 0; tensor < t->n; tensor += 13) {
        uint64_t next = 0;
        for (int rank = 0; rank < world_size; rank++) {
            tagc_fsdp f;
            assert_int_equal(lay_out(&f, t, rank, world_size, wrap, policy, NULL), TAGC_OK);
            const tagc_place *p = &f.tables.places[tensor];
            const tagc_flat *flat = &f.tables.flats[p->flat];
            if (p->n > 0) {
                assert_true(p->first == next && p->at + p->n <= flat->n_owned);
                assert_true(p->offset + p->first == flat->first_owned + p->at);
                next += p->n;
            }
            tagc_memory_destroy(f.tables_memory);
        }
        assert_true(next == t->tensors[tensor].n_elems);
    }
}

TEST(units_cover_the_model) {
    table t;
    make_gpt2_162m(&t);
    tagc_fsdp f;
    assert_int_equal(lay_out(&f, &t, 0, 3, TAGC_WRAP_BLOCK, TAGC_POLICY_PAPER, NULL), TAGC_OK);
    assert_int_equal(f.tables.n_units, 14);
    assert_string_equal(tagc_fsdp_unit_name(&f, 0), "wte+wpe");
    assert_string_equal(tagc_fsdp_unit_name(&f, 4), "h.3");
    assert_string_equal(tagc_fsdp_unit_name(&f, 13), "ln_f+lm_head");
    for (int i = 0; i < 14; i++) assert_int_equal(f.tables.backward_order[i], 13 - i);
    assert_int_equal(f.tables.n_buffers, 2); /* prefetch 1 */
    for (int i = 1; i < 14; i++) assert_int_not_equal(f.tables.units[i].buffer, f.tables.units[i - 1].buffer);
    tagc_memory_destroy(f.tables_memory);

    assert_int_equal(lay_out(&f, &t, 0, 3, TAGC_WRAP_MATRIX, TAGC_POLICY_PAPER, NULL), TAGC_OK);
    assert_int_equal(f.tables.n_units, 1 + 2 + 24);
    assert_string_equal(tagc_fsdp_unit_name(&f, 0), "wte.weight");
    assert_string_equal(tagc_fsdp_unit_name(&f, 1), "root");
    assert_true(f.tables.units[1].spans && !f.tables.units[2].spans);
    assert_int_equal(f.tables.n_buffers, 3); /* and the root's own */
    tagc_memory_destroy(f.tables_memory);

    t.tensors[0].last_layer = 13; /* shared with the head */
    t.n--;
    assert_int_equal(lay_out(&f, &t, 0, 3, TAGC_WRAP_BLOCK, TAGC_POLICY_PAPER, NULL), TAGC_OK);
    assert_true(f.tables.units[0].spans);
    assert_int_equal(f.tables.backward_order[0], 0);
    assert_int_equal(f.tables.backward_order[1], 13);
    tagc_memory_destroy(f.tables_memory);
    for (int world_size = 1; world_size <= 5; world_size++)
        check_ownership(&t, world_size, world_size % 2, world_size % 3 + 1);
}

TEST(bad_tables_are_refused) {
    table t;
    tagc_fsdp f;
    for (int kind = 0; kind < 6; kind++) {
        make_gpt2_162m(&t);
        switch (kind) {
        case 0:
            t.tensors[3].n_elems++;
            break;
        case 1:
            t.tensors[3].n_rows = 0;
            break;
        case 2:
            memset(t.tensors[3].name, 'x', sizeof t.tensors[3].name);
            break;
        case 3:
            t.tensors[3].name[0] = 0;
            break;
        case 4:
            t.tensors[3].layer = -1;
            break;
        default:
            t.n = 0;
            break;
        }
        assert_int_equal(lay_out(&f, &t, 0, 2, 0, 0, NULL), TAGC_ERR_ARGUMENT);
        tagc_memory_destroy(f.tables_memory);
    }
}

TEST(bad_options_are_refused) {
    static const struct {
        size_t at;
        int value;
    } bad[] = {
        {offsetof(tagc_fsdp_options, sharding), 4},
        {offsetof(tagc_fsdp_options, mild.exchange), TAGC_EXCHANGE_PACKED},
        {offsetof(tagc_fsdp_options, wrap), -1},
        {offsetof(tagc_fsdp_options, policy), 5},
        {offsetof(tagc_fsdp_options, policy), TAGC_POLICY_NAMES},
        {offsetof(tagc_fsdp_options, dense_format), 2},
        {offsetof(tagc_fsdp_options, gather), -1},
        {offsetof(tagc_fsdp_options, prefetch), 65},
        {offsetof(tagc_fsdp_options, grads_in_flight), 0},
        {offsetof(tagc_fsdp_options, n_micro_steps), 0},
        {offsetof(tagc_fsdp_options, exchange_each_micro_step), 2},
    };
    tagc_fsdp_options o;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        tagc_fsdp_options_init(&o);
        assert_int_equal(tagc_fsdp_options_check(&o), TAGC_OK);
        memcpy((char *)&o + bad[i].at, &bad[i].value, sizeof(int));
        assert_int_equal(tagc_fsdp_options_check(&o), TAGC_ERR_ARGUMENT);
    }
    static const struct {
        size_t at;
        double value;
    } bad_reals[] = {
        {offsetof(tagc_fsdp_options, beta1), 1},
        {offsetof(tagc_fsdp_options, beta2), -0.1},
        {offsetof(tagc_fsdp_options, epsilon), 0},
        {offsetof(tagc_fsdp_options, weight_decay), -1},
        {offsetof(tagc_fsdp_options, clip_norm), NAN},
        {offsetof(tagc_fsdp_options, beta1_compressed), -0.5},
        {offsetof(tagc_fsdp_options, beta1_compressed), 1},
        {offsetof(tagc_fsdp_options, beta2_compressed), -0.5},
        {offsetof(tagc_fsdp_options, beta2_compressed), 1},
    };
    for (size_t i = 0; i < sizeof bad_reals / sizeof *bad_reals; i++) {
        tagc_fsdp_options_init(&o);
        memcpy((char *)&o + bad_reals[i].at, &bad_reals[i].value, sizeof(double));
        assert_int_equal(tagc_fsdp_options_check(&o), TAGC_ERR_ARGUMENT);
    }
}

/* ---- with ranks ---- */

typedef struct memory_run {
    toy_model model;
    tagc_fsdp_options options;
    tagc_fsdp_memory memory;
} memory_run;

static void measure(tagc_comm *comm, void *arg) {
    memory_run *r = arg;
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, r->model.tensors, r->model.n_tensors, &r->options, NULL, &f));
    if (tagc_comm_rank(comm) == 0) tagc_fsdp_memory_used(f, &r->memory);
    tagc_fsdp_destroy(f);
}

TEST(sharding_saves_memory) {
    memory_run full, grad, none;
    toy_gpt(&full.model, 6, 32, 0);
    tagc_fsdp_options_init(&full.options);
    full.options.reducer.exchange = TAGC_EXCHANGE_PACKED;
    grad = none = full;
    grad.options.sharding = TAGC_SHARD_GRAD;
    none.options.sharding = TAGC_SHARD_NONE;
    toy_run(4, measure, &full);
    toy_run(4, measure, &grad);
    toy_run(4, measure, &none);
    double n_bytes = 4.0 * (double)toy_n_params(&full.model);
    assert_true((double)none.memory.optimizer >= 2 * n_bytes &&
                (double)none.memory.optimizer < 2.1 * n_bytes);
    assert_true((double)full.memory.optimizer < 0.28 * (double)none.memory.optimizer);
    assert_true(full.memory.optimizer == grad.memory.optimizer);
    /* a quarter and two of eight units, against all */
    assert_true((double)full.memory.parameters < 0.25 * n_bytes + 2.1 * n_bytes / 6);
    assert_true((double)none.memory.parameters >= n_bytes && (double)none.memory.parameters < 1.1 * n_bytes);
    assert_true((double)grad.memory.parameters >= 1.25 * n_bytes &&
                (double)grad.memory.parameters < 1.4 * n_bytes);
    assert_true(full.memory.residuals > 0 && full.memory.residuals == none.memory.residuals);
}

typedef struct disagreement {
    toy_model model;
    int kind;
    tagc_status status[2];
    char text[2][TAGC_ERROR_TEXT_BYTES];
} disagreement;

static void disagree(tagc_comm *comm, void *arg) {
    disagreement *d = arg;
    int rank = tagc_comm_rank(comm);
    toy_model model = d->model;
    tagc_fsdp_options options;
    tagc_fsdp_options_init(&options);
    options.mild.exchange = TAGC_EXCHANGE_DIRECT;
    if (rank == 1) {
        switch (d->kind) {
        case 0:
            options.wrap = TAGC_WRAP_MATRIX;
            break;
        case 1:
            options.beta2 = 0.99;
            break;
        case 2:
            options.prefetch = 99;
            break;
        case 3:
            model.tensors[2].n_rows = model.tensors[2].n_elems = 99;
            break;
        case 4:
            model.n_tensors--;
            break;
        case 5:
            options.mild.exchange = TAGC_NO_MILD;
            break;
        case 6:
            options.beta1_compressed = 0.25;
            break;
        case 7:
            model.tensors[model.n_tensors - 1].layer--;
            break;
        case 8:
            model.tensors[0].last_layer++;
            break;
        case 9:
            model.tensors[2].decay = !model.tensors[2].decay;
            break;
        case 10:
            options.fresh = 1;
            break;
        case 11:
            options.bucket_elems = 1; /* the same units, but the ranks compare the sizes */
            break;
        default:
            options.reducer.exchange = TAGC_EXCHANGE_PACKED;
            break;
        }
    }
    tagc_fsdp *f;
    d->status[rank] = tagc_fsdp_create(comm, model.tensors, model.n_tensors, &options, NULL, &f);
    snprintf(d->text[rank], TAGC_ERROR_TEXT_BYTES, "%s", tagc_last_error());
    CHECK(f == NULL);
}

TEST(ranks_must_agree) {
    static const char *const texts[] = {"wrap=1",
                                        "beta2=0.98999999999999999",
                                        "prefetch is 99, allowed is 0 to 64",
                                        "rank 1 with tensors=",
                                        "rank 0 was started with n_tensors=14",
                                        "mild=3, rank 1 with mild=0",
                                        "beta1_compressed=0.5, rank 1 with beta1_compressed=0.25",
                                        "rank 1 with tensors=",
                                        "rank 1 with tensors=",
                                        "rank 1 with tensors=",
                                        "fresh=0, rank 1 with fresh=1",
                                        "bucket_elems=0, rank 1 with bucket_elems=1",
                                        "exchange=2"};
    for (int kind = 0; kind < 13; kind++) {
        disagreement d = {.kind = kind};
        toy_gpt(&d.model, 2, 4, 0);
        toy_run(2, disagree, &d);
        assert_int_equal(d.status[0], kind == 2 ? TAGC_ERR_ARGUMENT : TAGC_ERR_MISMATCH);
        assert_int_equal(d.status[1], d.status[0]);
        assert_non_null(strstr(d.text[0], texts[kind]));
        if (kind == 2) /* the rank itself hears its own words */
            assert_string_equal(strstr(d.text[0], "rank 1: ") + strlen("rank 1: "), d.text[1]);
        else
            assert_string_equal(d.text[0], d.text[1]);
    }
}
