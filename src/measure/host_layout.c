/* Groups of ranks against the hosts that they really are on. */
#include "measure/host_layout.h"

#include "bench/bench.h"
#include "core/status.h"

/* Ranks of the largest number of neighbouring ranks from 0 on that share a host, when all hosts have as many; else 0. */
static int real_ranks_per_host(const tagc_bench_hosts *hosts, int world_size) {
    int n = 1;
    while (n < world_size && hosts->of_rank[n] == hosts->of_rank[0]) n++;
    if (world_size % n != 0 || world_size / n != hosts->n_hosts) return 0;
    for (int rank = 0; rank < world_size; rank++)
        if (hosts->of_rank[rank] != hosts->of_rank[rank - rank % n]) return 0;
    return n;
}

static tagc_status refuse(const tagc_bench_hosts *hosts, int world_size, int ranks_per_host, int rank) {
    int first = rank - rank % ranks_per_host, real = real_ranks_per_host(hosts, world_size);
    char advice[64];
    if (real > 0)
        snprintf(advice, sizeof advice, "as started it is %d", real);
    else
        snprintf(advice, sizeof advice, "start neighbouring ranks on one host");
    return tagc_fail(
        TAGC_ERR_ARGUMENT,
        "--ranks-per-host is %d, but ranks %d and %d, which it puts together, are on the hosts %s and"
        " %s: %s",
        ranks_per_host, first, rank, hosts->names[hosts->of_rank[first]], hosts->names[hosts->of_rank[rank]],
        advice);
}

tagc_status tagc_host_layout_check(tagc_rank *rank, int is_local, int ranks_per_host,
                                   tagc_progress *progress) {
    tagc_bench_hosts hosts;
    if (is_local || rank->world_size % ranks_per_host != 0)
        return TAGC_OK; /* the engine refuses the latter */
    tagc_status status = tagc_bench_hosts_find(rank->comm, &hosts);
    for (int r = 0; status == TAGC_OK && r < rank->world_size; r++)
        if (hosts.of_rank[r] != hosts.of_rank[r - r % ranks_per_host])
            status = refuse(&hosts, rank->world_size, ranks_per_host, r);
    int most = 0;
    for (int host = 0; status == TAGC_OK && host < hosts.n_hosts; host++) {
        int n = 0;
        for (int r = 0; r < rank->world_size; r++) n += hosts.of_rank[r] == host;
        most = n > most ? n : most;
    }
    if (most > ranks_per_host)
        tagc_progress_say(
            progress,
            "note: --ranks-per-host is %d, but %d ranks share a host: between some of them gradients"
            " travel as between hosts",
            ranks_per_host, most);
    tagc_bench_hosts_destroy(&hosts);
    return status;
}
