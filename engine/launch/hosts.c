/* Finds the ranks that share a host, and the memory that it has for them.
 *
 * A host is a network namespace of a running kernel: containers and namespaces of one machine count as hosts of their own,
 * even if they have one name. */
#include "launch/hosts.h"

#include "core/status.h"
#include "files/result_file.h"
#include "launch/human.h"
#include "transport/comm.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct identity {
    char name[TAGC_HOST_NAME_BYTES];
    char boot[40];    /* of the kernel, different for each start of a machine */
    char network[40]; /* of the namespace */
} identity;

static void read_line(const char *path, char *text, int n_bytes) {
    FILE *file = fopen(path, "r");
    if (!file || !fgets(text, n_bytes, file)) *text = '\0';
    text[strcspn(text, "\n")] = '\0';
    if (file) fclose(file);
}

static void find_identity(identity *own) {
    memset(own, 0, sizeof *own); /* compared as bytes */
    tagc_origin_host(own->name, sizeof own->name);
    read_line("/proc/sys/kernel/random/boot_id", own->boot, sizeof own->boot);
    ssize_t n = readlink("/proc/self/ns/net", own->network, sizeof own->network - 1);
    own->network[n > 0 ? n : 0] = '\0';
    memset(own->boot + strlen(own->boot), 0, sizeof own->boot - strlen(own->boot));
}

tagc_status tagc_hosts_find(tagc_comm *comm, tagc_hosts *out) {
    size_t world_size = (size_t)tagc_comm_world_size(comm);
    identity own, *all = calloc(world_size, sizeof *all);
    *out = (tagc_hosts){.of_rank = calloc(world_size, sizeof *out->of_rank),
                        .leaders = calloc(world_size, sizeof *out->leaders),
                        .names = calloc(world_size, sizeof *out->names)};
    if (!all || !out->of_rank || !out->leaders || !out->names) {
        free(all);
        return tagc_fail(TAGC_ERR_MEMORY, "out of memory for the hosts of %zu ranks", world_size);
    }
    find_identity(&own);
    tagc_status status = tagc_comm_all_gather(comm, &own, sizeof own, all, world_size * sizeof *all);
    for (size_t rank = 0; status == TAGC_OK && rank < world_size; rank++) {
        int host = 0;
        while (host < out->n_hosts && memcmp(&all[out->leaders[host]], &all[rank], sizeof own) != 0) host++;
        if (host == out->n_hosts) {
            out->leaders[out->n_hosts++] = (int)rank;
            memcpy(out->names[host], all[rank].name, sizeof all[rank].name);
            out->names[host][TAGC_HOST_NAME_BYTES - 1] = '\0';
        }
        out->of_rank[rank] = host;
    }
    for (size_t rank = 0; rank < world_size; rank++)
        out->n_here += out->of_rank[rank] == out->of_rank[tagc_comm_rank(comm)];
    free(all);
    return status;
}

void tagc_hosts_destroy(tagc_hosts *hosts) {
    free(hosts->of_rank);
    free(hosts->leaders);
    free(hosts->names);
    *hosts = (tagc_hosts){0};
}

tagc_status tagc_hosts_sent(const tagc_hosts *hosts, const tagc_comm *comm, double *n_bytes) {
    int world_size = tagc_comm_world_size(comm), own = hosts->of_rank[tagc_comm_rank(comm)];
    uint64_t *sent = calloc((size_t)world_size, sizeof *sent);
    *n_bytes = 0;
    if (!sent) return tagc_fail(TAGC_ERR_MEMORY, "no memory for the bytes sent to %d ranks", world_size);
    tagc_comm_sent_to(comm, sent);
    for (int rank = 0; rank < world_size; rank++)
        if (hosts->of_rank[rank] != own) *n_bytes += (double)sent[rank];
    free(sent);
    return TAGC_OK;
}

tagc_status tagc_ranks_here(const tagc_rank *rank, int *n_here) {
    tagc_hosts hosts;
    if (rank->job) { /* threads of one process */
        *n_here = rank->world_size;
        return TAGC_OK;
    }
    tagc_status status = tagc_hosts_find(rank->comm, &hosts);
    *n_here = hosts.n_here;
    tagc_hosts_destroy(&hosts);
    return status;
}

/* ---- groups of ranks against the hosts that they are on ---- */

/* The number of ranks on each host, if all hosts have as many and their ranks are neighbours; else 0. */
static int real_ranks_per_host(const tagc_hosts *hosts, int world_size) {
    int n = 1;
    while (n < world_size && hosts->of_rank[n] == hosts->of_rank[0]) n++;
    if (world_size % n != 0 || world_size / n != hosts->n_hosts) return 0;
    for (int rank = 0; rank < world_size; rank++)
        if (hosts->of_rank[rank] != hosts->of_rank[rank - rank % n]) return 0;
    return n;
}

static tagc_status refuse(const tagc_hosts *hosts, int world_size, int ranks_per_host, int rank) {
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

tagc_status tagc_hosts_check_groups(tagc_comm *comm, int ranks_per_host, char note[TAGC_HOSTS_NOTE_BYTES]) {
    tagc_hosts hosts;
    int world_size = tagc_comm_world_size(comm);
    *note = '\0';
    if (world_size % ranks_per_host != 0) return TAGC_OK; /* the engine refuses that */
    tagc_status status = tagc_hosts_find(comm, &hosts);
    for (int r = 0; status == TAGC_OK && r < world_size; r++)
        if (hosts.of_rank[r] != hosts.of_rank[r - r % ranks_per_host])
            status = refuse(&hosts, world_size, ranks_per_host, r);
    int most = 0;
    for (int host = 0; status == TAGC_OK && host < hosts.n_hosts; host++) {
        int n = 0;
        for (int r = 0; r < world_size; r++) n += hosts.of_rank[r] == host;
        most = n > most ? n : most;
    }
    if (most > ranks_per_host)
        snprintf(note, TAGC_HOSTS_NOTE_BYTES,
                 "note: --ranks-per-host is %d, but %d ranks share a host: between some of them gradients"
                 " travel as between hosts",
                 ranks_per_host, most);
    tagc_hosts_destroy(&hosts);
    return status;
}

/* ---- memory ---- */

/* The number after `name` in a file of lines "name number"; if name is NULL, the file's only number. -1: none. */
static double number_in(const char *path, const char *name) {
    char line[160], *end;
    double found = -1;
    FILE *file = fopen(path, "r");
    while (file && found < 0 && fgets(line, sizeof line, file)) {
        size_t n = name ? strlen(name) : 0;
        if (name && strncmp(line, name, n) != 0) continue;
        double value = strtod(line + n, &end);
        if (end != line + n) found = value;
    }
    if (file) fclose(file);
    return found;
}

/* Memory that is free without swapping: the machine's, or a container's limit if that is less. -1: not known. */
static double free_bytes(void) {
    double free_kib = number_in("/proc/meminfo", "MemAvailable:"),
           least = free_kib < 0 ? -1 : 1024 * free_kib;
    static const struct {
        const char *max, *used, *stat, *given_back;
    } groups[] = {{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat",
                   "inactive_file "},
                  {"/sys/fs/cgroup/memory/memory.limit_in_bytes",
                   "/sys/fs/cgroup/memory/memory.usage_in_bytes", "/sys/fs/cgroup/memory/memory.stat",
                   "total_inactive_file "}}; /* of version 2, and of 1 */
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++) {
        double max = number_in(groups[i].max, NULL), used = number_in(groups[i].used, NULL);
        double given_back = number_in(groups[i].stat, groups[i].given_back);
        double left = max - used + (given_back > 0 ? given_back : 0);
        if (max > 0 && used >= 0 && (least < 0 || left < least)) least = left;
    }
    return least;
}

tagc_status tagc_check_memory(const char *what, uint64_t n_bytes, int n_here) {
    double available = free_bytes(), needed = (double)n_bytes * n_here;
    if (available < 0 || needed <= available) return TAGC_OK;
    char each[16], all[16], has[16], host[TAGC_HOST_NAME_BYTES];
    tagc_origin_host(host, sizeof host);
    tagc_human_bytes((double)n_bytes, each);
    tagc_human_bytes(needed, all);
    tagc_human_bytes(available, has);
    if (n_here == 1)
        return tagc_fail(
            TAGC_ERR_MEMORY,
            "%s needs about %s, and host %s has %s free: take a smaller model, a smaller --batch-size "
            "or a shorter --seq-len",
            what, all, host, has);
    return tagc_fail(TAGC_ERR_MEMORY,
                     "%s needs about %s per rank, %s for the %d ranks of host %s, which has %s free: take "
                     "fewer ranks per host,"
                     " a smaller model, a smaller --batch-size or a shorter --seq-len",
                     what, each, all, n_here, host, has);
}
