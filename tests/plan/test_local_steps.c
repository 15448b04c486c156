/* The plan of local steps against engines: what a round sends, leg by leg. */
#include "../fsdp/toy.h"

#include "plan/plan.h"

typedef struct run {
    tagc_setup setup;
    double n_bytes[TAGC_N_LEGS]; /* sums over ranks */
    pthread_mutex_t lock;
} run;

/* Nothing is computed: units that the model leaves out count as zero. */
static void take_steps(tagc_comm *comm, void *arg) {
    run *r = arg;
    tagc_tensor_info *tensors;
    tagc_fsdp *f;
    tagc_fsdp_stats stats;
    CHECK_OK(tagc_gpt2_tensors(&r->setup.model, &tensors));
    CHECK_OK(
        tagc_fsdp_create(comm, tensors, tagc_gpt2_n_tensors(&r->setup.model), &r->setup.engine, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    for (int step = 0; step < 2 * r->setup.engine.local_steps; step++) {
        CHECK_OK(tagc_fsdp_forward_begin(f, 1));
        CHECK_OK(tagc_fsdp_backward_begin(f));
        CHECK_OK(tagc_fsdp_step(f, 0, &stats));
        if (step < r->setup.engine.local_steps) continue; /* the first step compares what sites begin with */
        pthread_mutex_lock(&r->lock);
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) r->n_bytes[leg] += (double)stats.n_bytes_sent[leg];
        pthread_mutex_unlock(&r->lock);
    }
    tagc_fsdp_destroy(f);
    free(tensors);
}

/* With dense exchanges and nothing that takes time but the link. */
static run make_run(int world_size, int n_local, int format, int n_fragments, int delay) {
    run r = {.setup = {.world_size = world_size,
                       .n_hosts = world_size / n_local,
                       .n_batch = 1,
                       .n_tokens = 8,
                       .union_density = -1,
                       .placement = n_local > 1 ? TAGC_PLACE_HYBRID : TAGC_PLACE_NONE}};
    assert_int_equal(tagc_gpt2_preset("tiny", &r.setup.model), TAGC_OK);
    tagc_fsdp_options *o = &r.setup.engine;
    tagc_fsdp_options_init(o);
    o->sharding = n_local > 1 ? TAGC_SHARD_HYBRID : TAGC_SHARD_NONE;
    o->ranks_per_host = n_local;
    o->local_steps = 3;
    o->local_fragments = n_fragments;
    o->local_delay = delay;
    o->reducer.exchange = TAGC_EXCHANGE_DENSE;
    o->reducer.format = o->dense_format = format;
    return r;
}

static void check(int world_size, int n_local, int format, int n_fragments, int delay) {
    run r = make_run(world_size, n_local, format, n_fragments, delay);
    pthread_mutex_init(&r.lock, NULL);
    toy_run(world_size, take_steps, &r);
    pthread_mutex_destroy(&r.lock);
    tagc_plan_volume volume;
    tagc_plan_memory memory;
    assert_int_equal(tagc_plan_count(&r.setup, &volume, &memory), TAGC_OK);
    tagc_plan_link link = {.bytes_per_s = 1e6, .latency_s = 1e-3};
    tagc_costs costs;
    tagc_forecast forecast;
    tagc_costs_init(&costs);
    assert_int_equal(tagc_plan_simulate(&r.setup, &costs, &link, &forecast), TAGC_OK);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        if (leg == TAGC_LEG_GATHER) continue; /* no pass asked for parameters */
        assert_float_equal(volume.n_bytes[leg] * 3 * world_size, r.n_bytes[leg],
                           1e-6 * r.n_bytes[leg] + 1e-6);
        assert_float_equal(forecast.n_bytes[leg], volume.n_bytes[leg], 1e-6 * volume.n_bytes[leg] + 1e-6);
    }
    assert_true(r.n_bytes[TAGC_LEG_VALUES] > 0);
    /* all of a round's bytes cross the link */
    double n_bytes = volume.n_bytes[TAGC_LEG_VALUES] + volume.n_bytes[TAGC_LEG_RESULT];
    if (n_local == 1) assert_true(forecast.iteration_s > n_bytes / link.bytes_per_s);
    if (n_local == 1) assert_true(forecast.iteration_s < 1.1 * n_bytes / link.bytes_per_s + 20e-3);
}

static void plans_send_what_engines_send(void **state) {
    (void)state;
    check(2, 1, TAGC_FORMAT_FP32, 1, 0);
    check(3, 1, TAGC_FORMAT_BF16, 1, 0);
    check(4, 2, TAGC_FORMAT_FP32, 1, 0);
    check(2, 1, TAGC_FORMAT_FP32, 3, 0);
    check(3, 1, TAGC_FORMAT_FP32, 2, 2);
    check(4, 2, TAGC_FORMAT_BF16, 2, 1);
}

/* The formula of docs/sites.md, C + P / H max(0, E - D C), where one of P exchanges takes E; but a link that is always busy
 * takes P E in H steps. */
static void a_delay_hides_the_link(void **state) {
    (void)state;
    static const int shapes[][2] = {{1, 0}, {1, 1}, {1, 2}, {2, 1}, {3, 1}, {3, 2}};
    tagc_plan_link link = {.bytes_per_s = 1e5};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (double ratio = 0.2; ratio < 8; ratio *= 2) { /* of C and all of E */
            int n_fragments = shapes[i][0], delay = shapes[i][1], every = 3;
            run r = make_run(2, 1, TAGC_FORMAT_FP32, n_fragments, delay);
            tagc_plan_volume volume;
            tagc_costs costs;
            tagc_forecast forecast;
            assert_int_equal(tagc_plan_count(&r.setup, &volume, NULL), TAGC_OK);
            double n_bytes = volume.n_bytes[TAGC_LEG_VALUES] + volume.n_bytes[TAGC_LEG_RESULT];
            double all_s = n_bytes * every / link.bytes_per_s, compute_s = ratio * all_s / every;
            tagc_costs_init(&costs);
            costs.flop_s = compute_s / tagc_setup_flops(&r.setup);
            assert_int_equal(tagc_plan_simulate(&r.setup, &costs, &link, &forecast), TAGC_OK);
            double each_s = all_s / n_fragments, more_s = fmax(0, each_s - delay * compute_s);
            double expected_s = fmax(compute_s + n_fragments * more_s / every, delay > 0 ? all_s / every : 0);
            if (fabs(forecast.iteration_s - expected_s) > 0.05 * expected_s)
                fail_msg("%d fragments, delay %d: %g s, expected %g s", n_fragments, delay,
                         forecast.iteration_s, expected_s);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(plans_send_what_engines_send),
                                       cmocka_unit_test(a_delay_hides_the_link)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
