/* The simulator and the engine begin and end the same gathers and exchanges, of the same units, in the same order. The
 * engine here is a real one, over the real model, among ranks that are threads. */
#include "../repeats.h"
#include "small_gpt2.h"

#include "fsdp/internal.h"
#include "plan/deployment.h"

enum { MAX_EVENTS = 1 << 15 };

typedef struct event_log {
    int n;
    struct {
        int event, unit;
    } events[MAX_EVENTS];
} event_log;

static event_log engine_log, plan_log;

static void note(void *context, tagc_order_event event, int unit) {
    event_log *log = context;
    CHECK(log->n < MAX_EVENTS);
    log->events[log->n].event = (int)event;
    log->events[log->n++].unit = unit;
}

static void watch_engine(tagc_fsdp *f, int rank) {
    if (rank == 0) f->order.observer = (tagc_order_observer){note, &engine_log};
}

static const char *describe(const event_log *log, int at, char text[64]) {
    static const char *const names[] = {"begin gather", "end gather", "begin exchange", "end exchange",
                                        "clear gradients"};
    if (at < 0 || at >= log->n) return "nothing";
    snprintf(text, 64, "%s %d", names[log->events[at].event], log->events[at].unit);
    return text;
}

/* Two steps of the engine, the second of which knows what backward reads, against one simulated step: with sharding GRAD
 * that begins with the gathers of the update before it. */
static void compare(small_run *run, const char *what) {
    tagc_setup setup = {.model = run->config,
                        .world_size = run->world_size,
                        .n_hosts = run->options.sharding == TAGC_SHARD_HYBRID ? run->world_size / 2 : 1,
                        .n_batch = run->n_sequences / run->world_size / run->options.n_micro_steps,
                        .n_tokens = run->n_tokens,
                        .union_density = -1};
    engine_log.n = plan_log.n = 0;
    run->watch = watch_engine;
    small_train(run);
    setup.engine = run->options;
    tagc_deployment d;
    tagc_forecast forecast;
    tagc_plan_link link = {.bytes_per_s = 1e9};
    CHECK_OK(tagc_deployment_create(&setup, &d));
    d.observer = (tagc_order_observer){note, &plan_log};
    CHECK_OK(tagc_deployment_run(&d, NULL, &link, &forecast));
    tagc_deployment_destroy(&d);
    int skipped = engine_log.n - plan_log.n;
    char ours[64], theirs[64];
    if (skipped < plan_log.n / 2 || plan_log.n < 3)
        fail_msg("%s: %d events of two steps, %d simulated of one", what, engine_log.n, plan_log.n);
    for (int i = 0; i < plan_log.n; i++)
        if (memcmp(&engine_log.events[skipped + i], &plan_log.events[i], sizeof plan_log.events[i]) != 0)
            fail_msg("%s: at %d of %d the simulator does %s, the engine %s", what, i, plan_log.n,
                     describe(&plan_log, i, ours), describe(&engine_log, skipped + i, theirs));
}

/* tied: the embedding is used in the first and in the last layer. A prefetch beyond the free buffers makes way. */
TEST(engine_and_simulator_agree) {
    static const int shardings[] = {TAGC_SHARD_FULL, TAGC_SHARD_GRAD, TAGC_SHARD_NONE, TAGC_SHARD_HYBRID};
    static const int prefetches[] = {0, 1, 3};
    for (int variant = 0; variant < 4 * 3 * 3 * 2; variant += REPEATS(1, 11, 11)) {
        int sharding = variant % 4, micro = variant / 12 % 3, tied = variant / 36;
        small_run run = {.world_size = shardings[sharding] == TAGC_SHARD_HYBRID ? 4 : 2,
                         .n_sequences = 12 - 4 * (shardings[sharding] == TAGC_SHARD_HYBRID && micro == 0),
                         .n_tokens = 6,
                         .n_steps = 2,
                         .lr = 1e-3};
        char what[128];
        CHECK_OK(tagc_gpt2_preset("tiny", &run.config));
        run.config.n_layer = 4;
        run.config.tied = tied;
        tagc_fsdp_options_init(&run.options);
        run.options.sharding = shardings[sharding];
        run.options.ranks_per_host = shardings[sharding] == TAGC_SHARD_HYBRID ? 2 : 1;
        run.options.prefetch = prefetches[variant / 4 % 3];
        run.options.wrap = variant % 5 == 4 ? TAGC_WRAP_MATRIX : TAGC_WRAP_BLOCK;
        run.options.grads_in_flight = 1 + variant % 3;
        run.options.n_micro_steps = micro == 0 ? 1 : 3;
        run.options.exchange_each_micro_step = micro == 2;
        if (variant % 7 == 3 && run.options.wrap == TAGC_WRAP_BLOCK) run.options.bucket_elems = 20000;
        snprintf(what, sizeof what,
                 "sharding %d, prefetch %d, wrap %d, %d micro-steps (%d), tied %d, bucket %d",
                 run.options.sharding, run.options.prefetch, run.options.wrap, run.options.n_micro_steps,
                 run.options.exchange_each_micro_step, tied, (int)run.options.bucket_elems);
        compare(&run, what);
    }
}
