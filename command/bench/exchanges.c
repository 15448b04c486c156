/* tagc bench --only exchanges: the share of the link that each exchange fills. */
#include "bench/bench.h"

#include "core/status.h"
#include "launch/human.h"
#include "measure/exchanges.h"
#include "plan/plan.h"

static tagc_status largest_unit(const tagc_bench *bench, uint64_t *out) {
    tagc_fsdp_options options;
    tagc_layout *layout;
    tagc_fsdp_options_init(&options);
    options.wrap = bench->plan->options.train.wrap;
    options.policy = TAGC_POLICY_NONE;
    TAGC_TRY(tagc_model_layout(&bench->plan->model, &options, bench->rank->world_size, &layout));
    *out = 0;
    for (int i = 0; i < layout->n_flats; i++)
        if (layout->flats[i].n_padded > *out) *out = layout->flats[i].n_padded;
    tagc_layout_destroy(layout);
    return TAGC_OK;
}

static double rate_of(const tagc_exchange_time *time) {
    return time->n_bytes / time->total_s.median;
}

static json_t *exchanges_json(const tagc_exchange_times *times) {
    json_t *list = json_array();
    for (int i = 1; i < times->n; i++) {
        const tagc_exchange_time *time = &times->items[i];
        json_array_append_new(list, json_pack("{s:s, s:I, s:I, s:o, s:o, s:o}", "name", time->name, "n_elems",
                                              (json_int_t)times->n_elems, "n_bytes_sent",
                                              (json_int_t)(time->n_bytes + 0.5), "total_s",
                                              tagc_json_spread(&time->total_s), "bytes_per_s",
                                              tagc_json_real(rate_of(time)), "share",
                                              tagc_json_real(rate_of(time) / times->link_bytes_per_s)));
    }
    return list;
}

static void say_table(const tagc_bench *bench, const tagc_exchange_times *times) {
    char n_elems[16], n_bytes[16], seconds[24], rate[24];
    tagc_bench_say(bench, "\nExchanges by themselves, %s values\n  %-28s %9s %10s %14s %7s\n",
                   tagc_human((double)times->n_elems, n_elems), "", "sent", "time", "rate", "of link");
    for (int i = 0; i < times->n; i++) {
        const tagc_exchange_time *time = &times->items[i];
        tagc_bench_say(bench, "  %-28s %9s %10s %14s %7.2f\n", time->name,
                       tagc_human_bytes(time->n_bytes, n_bytes),
                       tagc_human_time(time->total_s.median, seconds), tagc_human_rate(rate_of(time), rate),
                       rate_of(time) / times->link_bytes_per_s);
    }
    if (times->to_mpi > 0)
        tagc_bench_say(bench, "  tagc's point-to-point reduce-scatter took %.2f times as long as MPI's own\n",
                       times->to_mpi);
}

/* The link is measured twice: by messages that grow until they can be timed, and here by messages as large as the exchanges'. */
static void say_which_rate(const tagc_bench *bench, double before_bytes_per_s, double now_bytes_per_s) {
    const double alike = 1.25;
    char before[24], now[24];
    double ratio = now_bytes_per_s / before_bytes_per_s;
    if (ratio < alike && ratio > 1 / alike) return;
    tagc_bench_say(
        bench,
        "  note: plain messages of this size go at %s, and those of the link's own measurement went at %s;"
        " below, %s counts%s\n",
        tagc_human_rate(now_bytes_per_s, now), tagc_human_rate(before_bytes_per_s, before), now,
        bench->hosts.n_hosts == 1
            ? ". All ranks are on one host: both are rates of its memory, not of a network"
            : "");
}

tagc_status tagc_bench_exchanges(tagc_bench *bench) {
    const tagc_train_options *options = &bench->plan->options.train;
    tagc_exchange_times times;
    tagc_exchanges_setup setup = {.rank = bench->rank,
                                  .is_mpi = bench->is_mpi,
                                  .timeout_s = options->timeout,
                                  .n_threads = (int)options->codec_threads,
                                  .n_here = bench->hosts.n_here};
    if (bench->all_to_all_bytes_per_s <= 0) TAGC_TRY(tagc_bench_link(bench));
    setup.link_bytes_per_s = bench->all_to_all_bytes_per_s;
    TAGC_TRY(largest_unit(bench, &setup.most_elems));
    TAGC_TRY(tagc_measure_exchanges(&setup, &times));
    bench->all_to_all_bytes_per_s = times.link_bytes_per_s;
    if (bench->result)
        json_object_set_new(json_object_get(bench->result, "link"), "all_to_all_bytes_per_s",
                            tagc_json_real(bench->all_to_all_bytes_per_s));
    say_table(bench, &times);
    say_which_rate(bench, setup.link_bytes_per_s, times.link_bytes_per_s);
    tagc_bench_put(bench, "exchanges", exchanges_json(&times));
    return TAGC_OK;
}
