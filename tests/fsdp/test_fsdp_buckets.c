/* Buckets: neighbouring layers that share a unit. What they may not change is what is trained; and parameters that the next unit needs
 * leave before gradients. Checkpoints go on with other buckets in test_fsdp_checkpoint.c. */
#include "../meeting.h"
#include "../repeats.h"
#include "toy.h"

#include "fsdp/internal.h"

enum { LAYERS = 7, N_STEPS = 3 };

/* ---- layout ---- */

static uint64_t layer_elems(const toy_model *m, int layer) {
    uint64_t n = 0;
    for (int t = 0; t < m->n_tensors; t++) n += m->tensors[t].layer == layer ? m->tensors[t].n_elems : 0;
    return n;
}

/* Units by another way: layer by layer, the embedding alone, what is left too small given to the last. unit_of
 * (n_layers); returns the number of units. */
static int expected_units(const toy_model *m, uint64_t least, int *unit_of) {
    int n_units = 1;
    uint64_t n_elems = 0; /* of the unit that is being filled */
    unit_of[0] = 0;
    for (int layer = 1; layer < m->n_layers; layer++) {
        uint64_t rest = 0;
        for (int later = layer; later < m->n_layers; later++) rest += layer_elems(m, later);
        int begins = layer == 1 || (n_elems >= least && rest >= least);
        n_units += begins;
        n_elems = (begins ? 0 : n_elems) + layer_elems(m, layer);
        unit_of[layer] = n_units - 1;
    }
    return n_units;
}

TEST(units_are_runs_of_layers) {
    int n_seen[LAYERS + 3] = {0};
    for (int tied = 0; tied < 2; tied++) {
        toy_model m;
        toy_gpt(&m, LAYERS, 12, tied);
        uint64_t block = layer_elems(&m, 1);
        for (uint64_t least = 1; least < 10 * block; least += block / 7) {
            tagc_fsdp f = {.world_size = 3};
            int unit_of[LAYERS + 2];
            tagc_fsdp_options_init(&f.options);
            f.options.bucket_elems = least;
            assert_int_equal(tagc_fsdp_layout(&f, m.tensors, m.n_tensors), TAGC_OK);
            int n_units = expected_units(&m, least, unit_of);
            assert_int_equal(f.tables.n_units, n_units);
            n_seen[n_units]++;
            for (int t = 0; t < m.n_tensors; t++)
                assert_int_equal(f.tables.places[t].unit, unit_of[m.tensors[t].layer]);
            int n_tensors = 0, n_uses = 0;
            for (int unit = 0; unit < n_units; unit++) {
                const tagc_layout_unit *u = &f.tables.units[unit];
                n_tensors += u->n_tensors;
                n_uses += u->n_uses;
                assert_int_equal(u->spans, tied && unit == 0); /* buckets go when they are done */
                if (unit > 0 && n_units > 2) assert_true(u->n_elems >= least);
                assert_int_equal(f.tables.backward_order[n_units - 1 - unit],
                                 tied ? (unit + 1) % n_units : unit);
            }
            assert_int_equal(n_tensors, m.n_tensors);
            assert_int_equal(n_uses, m.n_tensors + tied);
            tagc_memory_destroy(f.tables_memory);
        }
    }
    assert_true(n_seen[2] > 0 && n_seen[3] > 0 && n_seen[4] > 0 && n_seen[LAYERS + 1] > 0);
}

TEST(names_say_from_where_to_where) {
    toy_model m;
    toy_gpt(&m, LAYERS, 12, 0);
    tagc_fsdp f = {.world_size = 2};
    tagc_fsdp_options_init(&f.options);
    f.options.bucket_elems = 3 * layer_elems(&m, 1);
    assert_int_equal(tagc_fsdp_layout(&f, m.tensors, m.n_tensors), TAGC_OK);
    assert_int_equal(f.tables.n_units, 3);
    assert_string_equal(tagc_fsdp_unit_name(&f, 0), "wte+wpe");
    assert_string_equal(tagc_fsdp_unit_name(&f, 1), "h.0-h.2");
    assert_string_equal(tagc_fsdp_unit_name(&f, 2), "h.3-ln_f+lm_head");
    tagc_memory_destroy(f.tables_memory);
}

TEST(bad_sizes_are_refused) {
    tagc_fsdp_options o;
    tagc_fsdp_options_init(&o);
    o.bucket_elems = TAGC_MOST_BUCKET_ELEMS;
    assert_int_equal(tagc_fsdp_options_check(&o), TAGC_OK);
    o.bucket_elems++;
    assert_int_equal(tagc_fsdp_options_check(&o), TAGC_ERR_ARGUMENT);
    assert_non_null(strstr(tagc_last_error(), "bucket_elems is 1099511627777"));
    o.bucket_elems = 5;
    o.wrap = TAGC_WRAP_MATRIX;
    assert_int_equal(tagc_fsdp_options_check(&o), TAGC_ERR_ARGUMENT);
    assert_non_null(strstr(tagc_last_error(), "bucket_elems is 5 with wrap matrix"));
}

/* ---- training ---- */

typedef struct run {
    toy_model model;
    tagc_fsdp_options options;
    double loss[TOY_MAX_RANKS]; /* of the last step */
    float *values;              /* (n_params) of rank 0 at the end */
    int n_units;
} run;

static void train(tagc_comm *comm, void *arg) {
    run *r = arg;
    int rank = tagc_comm_rank(comm);
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, r->model.tensors, r->model.n_tensors, &r->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    for (uint64_t step = 0; step < N_STEPS; step++)
        r->loss[rank] = toy_step(&r->model, comm, f, r->options.n_micro_steps, step, 0.01, NULL);
    float *values = calloc(toy_n_params(&r->model), sizeof *values);
    toy_read(&r->model, f, values);
    if (rank == 0) r->n_units = tagc_fsdp_n_units(f);
    if (rank == 0) memcpy(r->values, values, toy_n_params(&r->model) * sizeof *values);
    free(values);
    tagc_fsdp_destroy(f);
}

static void make(run *r, int n_layer, int tied) {
    *r = (run){0};
    toy_gpt(&r->model, n_layer, 5, tied);
    r->model.n_samples = 48;
    tagc_fsdp_options_init(&r->options);
    r->options.policy = TAGC_POLICY_NONE;
    r->options.clip_norm = 0; /* the norm is summed shard by shard, in another order */
    r->values = calloc(toy_n_params(&r->model), sizeof *r->values);
}

static double most_apart(const float *a, const float *b, size_t n) {
    double most = 0;
    for (size_t i = 0; i < n; i++) most = fmax(most, fabs((double)(a[i] - b[i])));
    return most;
}

/* Without clipping every element goes its own way, so that not a bit may change: any number of ranks, every sharding. */
TEST(dense_training_is_the_same) {
    static const int worlds[] = {1, 2, 3, 4, 8, 16};
    for (int variant = 0; variant < 4 * 6; variant += REPEATS(1, 1, 5)) {
        int world_size = worlds[variant / 4], tied = variant % 3 == 0;
        run plain, r;
        make(&plain, 4, tied);
        plain.options.sharding = variant % 4;
        plain.options.ranks_per_host = world_size % 2 ? 1 : 2;
        plain.options.two_level = variant % 5 == 0;
        plain.options.prefetch = variant % 3;
        plain.options.grads_in_flight = 1 + variant % 3;
        plain.options.n_micro_steps = 1 + variant % 3 / 2;
        toy_run(world_size, train, &plain);
        assert_int_equal(plain.n_units, 6);
        for (uint64_t least = 300; least < 3000; least *= 3) {
            make(&r, 4, tied);
            r.options = plain.options;
            r.options.bucket_elems = least;
            toy_run(world_size, train, &r);
            assert_true(r.n_units < plain.n_units && r.n_units >= 2);
            assert_memory_equal(r.values, plain.values, toy_n_params(&r.model) * sizeof(float));
            assert_memory_equal(r.loss, plain.loss, sizeof r.loss);
            free(r.values);
        }
        free(plain.values);
    }
}

/* With clipping and with selection: as near as another order of sums and another fragment leave it. */
TEST(clipped_and_compressed_training_is_near) {
    for (int compressed = 0; compressed < 2; compressed++) {
        run plain, r;
        make(&plain, 5, 0);
        plain.options.clip_norm = 1;
        plain.options.policy = compressed ? TAGC_POLICY_ALL : TAGC_POLICY_NONE;
        plain.options.reducer.sparsity = 0.5;
        toy_run(4, train, &plain);
        make(&r, 5, 0);
        r.options = plain.options;
        r.options.bucket_elems = 1000;
        toy_run(4, train, &r);
        double most = most_apart(r.values, plain.values, toy_n_params(&r.model));
        assert_true(most <= (compressed ? 2 * 0.01 * N_STEPS : 1e-6)); /* no more than Adam's steps apart */
        assert_true(compressed == (most > 1e-4));
        free(plain.values);
        free(r.values);
    }
}

/* ---- order ---- */

enum { MOST_EVENTS = 400 };

typedef struct event {
    int is_gather, unit;
} event;

typedef struct order {
    toy_model model;
    tagc_fsdp_options options;
    meeting meeting;
    int n_units, n_events; /* of rank 0, one backward pass */
    _Atomic int is_on;     /* read by the comm thread */
    event events[MOST_EVENTS];
} order;

static void record(void *context, const tagc_event *e) {
    order *o = context;
    if (!o->is_on || strcmp(e->stream, "comm") != 0 || e->tag == UINT64_MAX || o->n_events == MOST_EVENTS)
        return;
    o->events[o->n_events++] = (event){strcmp(e->name, tagc_leg_name(TAGC_LEG_GATHER)) == 0, (int)e->tag};
}

/* Over a transport without lanes, where transfers end in the order in which they were asked for. */
static void backward_order(tagc_comm *comm, void *arg) {
    order *o = arg;
    seat self = {&o->meeting, tagc_comm_rank(comm), 2};
    tagc_comm_options options;
    tagc_comm *other;
    tagc_fsdp *f;
    tagc_comm_options_init(&options);
    if (self.rank == 0) {
        options.trace = record;
        options.trace_context = o;
    }
    CHECK_OK(tagc_comm_create_callback(&meeting_ops, &self, self.rank, 2, &options, &other));
    CHECK_OK(tagc_fsdp_create(other, o->model.tensors, o->model.n_tensors, &o->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    toy_step(&o->model, other, f, 1, 0, 0.01, NULL); /* learns what backward reads */
    (void)toy_forward(&o->model, f, 1, 0, 1);
    CHECK_OK(tagc_comm_barrier(other)); /* behind all that forward asked for */
    if (self.rank == 0) o->is_on = 1;
    toy_backward(&o->model, f, 0, 1);
    CHECK_OK(tagc_fsdp_step(f, 0.01, NULL));
    if (self.rank == 0) o->is_on = 0;
    if (self.rank == 0) o->n_units = tagc_fsdp_n_units(f);
    tagc_fsdp_destroy(f);
    tagc_comm_destroy(other);
}

static int find(const order *o, int is_gather, int unit) {
    for (int i = 0; i < o->n_events; i++)
        if (o->events[i].is_gather == is_gather && o->events[i].unit == unit) return i;
    return -1;
}

/* When a unit's gradients are complete its place is free for the parameters of a unit further down, which leave first:
 * computing waits for those, and for gradients only at the end of the step. */
TEST(parameters_leave_before_gradients) {
    for (int variant = 0; variant < 6; variant++) {
        order o = {.options.wrap = 0};
        int prefetch = variant % 3;
        toy_gpt(&o.model, LAYERS, 6, 0);
        o.model.n_samples = 2;
        tagc_fsdp_options_init(&o.options);
        o.options.policy = TAGC_POLICY_NONE;
        o.options.prefetch = prefetch;
        o.options.grads_in_flight = 8;
        o.options.bucket_elems = variant / 3 ? 400 : 0;
        pthread_barrier_init(&o.meeting.barrier, NULL, 2);
        toy_run(2, backward_order, &o);
        pthread_barrier_destroy(&o.meeting.barrier);
        assert_int_equal(o.n_units, variant / 3 ? 5 : LAYERS + 2);
        int n_checked = 0, n_before = -1;
        for (int unit = o.n_units - 1; unit >= 0; unit--) { /* in the order of use */
            int gather = find(&o, 1, unit), values = find(&o, 0, unit), next = unit - prefetch - 1;
            assert_true(values >= 0);
            if (gather >= 0) assert_true(gather > n_before && gather < values);
            if (gather >= 0) n_before = gather;
            if (next < 0) continue;
            int ahead = find(&o, 1, next);
            assert_true(ahead >= 0 && ahead < values);
            n_checked++;
        }
        assert_true(n_checked >= o.n_units - 1 - prefetch);
    }
}
