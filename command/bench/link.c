/* tagc bench --only link: chooses the pairs of ranks to measure, and prints the table. */
#include "bench/bench.h"

#include "core/status.h"
#include "launch/human.h"
#include "measure/link.h"

enum { MAX_PAIRS = 3 };

static json_t *direction_json(int from, int to, double one_way_bytes_per_s, const tagc_pair *pair) {
    return json_pack("{s:i, s:i, s:o, s:o, s:o}", "from", from, "to", to, "latency_s",
                     tagc_json_real(pair->latency_s), "one_way_bytes_per_s",
                     tagc_json_real(one_way_bytes_per_s), "both_ways_bytes_per_s",
                     tagc_json_real(pair->both_bytes_per_s));
}

static json_t *link_json(const tagc_bench *bench, const tagc_pair *pairs, int n_pairs) {
    json_t *list = json_array();
    for (int i = 0; i < n_pairs; i++) {
        const tagc_pair *p = &pairs[i];
        json_array_append_new(list, direction_json(p->a, p->b, p->there_bytes_per_s, p));
        json_array_append_new(list, direction_json(p->b, p->a, p->back_bytes_per_s, p));
    }
    return json_pack("{s:o, s:o, s:i, s:o, s:o, s:o, s:o}", "latency_s", tagc_json_real(pairs[0].latency_s),
                     "large_latency_s", tagc_json_real(pairs[0].large_latency_s), "large_bytes",
                     TAGC_LINK_LARGE_BYTES, "one_way_bytes_per_s", tagc_json_real(pairs[0].there_bytes_per_s),
                     "both_ways_bytes_per_s", tagc_json_real(pairs[0].both_bytes_per_s),
                     "all_to_all_bytes_per_s", tagc_json_real(bench->all_to_all_bytes_per_s), "pairs", list);
}

static void say_pair(const tagc_bench *bench, const tagc_pair *p) {
    char latency[24], large[24], there[24], back[24], both[24];
    tagc_bench_say(bench,
                   "  rank %d (%s), rank %d (%s): latency %s, of %d kB %s, one way %s there, %s back, both "
                   "ways at once %s each\n",
                   p->a, bench->hosts.names[bench->hosts.of_rank[p->a]], p->b,
                   bench->hosts.names[bench->hosts.of_rank[p->b]], tagc_human_time(p->latency_s, latency),
                   TAGC_LINK_LARGE_BYTES >> 10, tagc_human_time(p->large_latency_s, large),
                   tagc_human_rate(p->there_bytes_per_s, there), tagc_human_rate(p->back_bytes_per_s, back),
                   tagc_human_rate(p->both_bytes_per_s, both));
}

/* One rank represents each host. A single host has two. */
static int choose_pairs(const tagc_bench *bench, tagc_pair pairs[MAX_PAIRS], int *n_all) {
    const tagc_hosts *hosts = &bench->hosts;
    int n = 0;
    *n_all = hosts->n_hosts > 1 ? hosts->n_hosts * (hosts->n_hosts - 1) / 2 : 1;
    if (hosts->n_hosts == 1) {
        pairs[0] = (tagc_pair){.a = 0, .b = 1};
        return 1;
    }
    for (int i = 0; i < hosts->n_hosts; i++)
        for (int k = i + 1; k < hosts->n_hosts && n < MAX_PAIRS; k++)
            pairs[n++] = (tagc_pair){.a = hosts->leaders[i], .b = hosts->leaders[k]};
    return n;
}

/* Between two ranks, all to all is both ways at once, which was measured: a second figure for it would only differ. */
static tagc_status measure_all(tagc_bench *bench, tagc_wire *wire, const tagc_pair *pair) {
    char rate[24];
    if (bench->rank->world_size == 2) {
        bench->all_to_all_bytes_per_s = pair->both_bytes_per_s;
        return TAGC_OK;
    }
    TAGC_TRY(tagc_measure_all_to_all(wire, pair->latency_s, &bench->all_to_all_bytes_per_s));
    tagc_bench_say(bench, "  all ranks to all: %s sent by each\n",
                   tagc_human_rate(bench->all_to_all_bytes_per_s, rate));
    return TAGC_OK;
}

static tagc_status measure_link(tagc_bench *bench, tagc_wire *wire) {
    tagc_pair pairs[MAX_PAIRS] = {{0}};
    int n_all, n_pairs = choose_pairs(bench, pairs, &n_all);
    tagc_bench_say(bench, "\nLink, %s\n",
                   bench->is_mpi ? "plain MPI messages" : "messages of the local transport");
    for (int i = 0; i < n_pairs; i++) {
        TAGC_TRY(tagc_measure_pair(wire, &pairs[i]));
        say_pair(bench, &pairs[i]);
    }
    if (n_pairs < n_all) tagc_bench_say(bench, "  (%d of %d pairs of hosts)\n", n_pairs, n_all);
    TAGC_TRY(measure_all(bench, wire, &pairs[0]));
    tagc_bench_put(bench, "link", link_json(bench, pairs, n_pairs));
    return TAGC_OK;
}

tagc_status tagc_bench_link(tagc_bench *bench) {
    tagc_wire wire;
    tagc_status status =
        tagc_wire_create(bench->rank->comm, bench->is_mpi, bench->plan->options.train.timeout, 0, &wire);
    if (status == TAGC_OK) status = measure_link(bench, &wire);
    tagc_rank_finish(bench->rank, status);
    tagc_wire_destroy(&wire);
    return status;
}
