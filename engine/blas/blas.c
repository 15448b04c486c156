#include "blas/blas.h"

#include "core/status.h"
#include <cblas.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

/* OpenBLAS's own allocator, exported by some builds. It keeps a freed buffer for the next caller. */
extern void *blas_memory_alloc(int is_server) __attribute__((weak));
extern void blas_memory_free(void *buffer) __attribute__((weak));

enum { MAX_BUFFERS = 64, MAX_THREADS = 256 };
static const size_t buffer_bytes = (size_t)128 << 20; /* of a thread, with its bookkeeping */

/* Set if this program, not the user, set the number of threads, or the kernel. */
static const char restarted[] = "TAGC_BLAS_RESTARTED", begun[] = "TAGC_BLAS_KERNEL";

/* ---- the kernel ---- */

/* The best level of a processor for which a kernel is right. */
static const struct {
    const char *name;
    tagc_cpu level;
} kernels[] = {
    {"SkylakeX", TAGC_CPU_AVX512},  {"Cooperlake", TAGC_CPU_AVX512}, {"SapphireRapids", TAGC_CPU_AVX512},
    {"Zen", TAGC_CPU_AVX512}, /* AVX2, and on Zen 4 as fast as SkylakeX */
    {"Haswell", TAGC_CPU_AVX2},     {"Excavator", TAGC_CPU_AVX2},    {"Sandybridge", TAGC_CPU_SCALAR},
    {"Bulldozer", TAGC_CPU_SCALAR}, {"Piledriver", TAGC_CPU_SCALAR}, {"Steamroller", TAGC_CPU_SCALAR},
    {"Nehalem", TAGC_CPU_SCALAR},   {"Dunnington", TAGC_CPU_SCALAR}, {"Penryn", TAGC_CPU_SCALAR},
    {"Core2", TAGC_CPU_SCALAR},     {"Atom", TAGC_CPU_SCALAR},       {"Nano", TAGC_CPU_SCALAR},
    {"Bobcat", TAGC_CPU_SCALAR},    {"Barcelona", TAGC_CPU_SCALAR},  {"Opteron_SSE3", TAGC_CPU_SCALAR},
    {"Opteron", TAGC_CPU_SCALAR},   {"Athlon", TAGC_CPU_SCALAR},     {"Banias", TAGC_CPU_SCALAR},
    {"Northwood", TAGC_CPU_SCALAR}, {"Coppermine", TAGC_CPU_SCALAR}, {"Katmai", TAGC_CPU_SCALAR},
    {"Prescott", TAGC_CPU_SCALAR}, /* what OpenBLAS takes for a processor that it does not know */
    {"Generic", TAGC_CPU_SCALAR},
};

static int is_slow(const char *kernel, tagc_cpu cpu) {
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        if (strcasecmp(kernels[i].name, kernel) == 0) return kernels[i].level < cpu;
    return 0; /* a newer OpenBLAS, which knows newer processors */
}

tagc_blas_choice tagc_blas_choose(const tagc_blas_facts *facts, const char **better) {
    *better = facts->cpu == TAGC_CPU_AVX512 ? "SkylakeX" : facts->cpu == TAGC_CPU_AVX2 ? "Haswell" : NULL;
    if (!*better || !is_slow(facts->kernel, facts->cpu)) {
        *better = NULL;
        return TAGC_BLAS_RIGHT;
    }
    if (facts->begun) return TAGC_BLAS_STAYS_SLOW;
    return facts->asked && *facts->asked ? TAGC_BLAS_USERS_SLOW : TAGC_BLAS_AGAIN;
}

static tagc_blas_choice choose(const char **better) {
    tagc_blas_facts facts = {.kernel = openblas_get_corename(),
                             .cpu = tagc_cpu_of_processor(),
                             .asked = getenv("OPENBLAS_CORETYPE"),
                             .begun = getenv(begun)};
    return tagc_blas_choose(&facts, better);
}

void tagc_blas_begin(char **argv) {
    char path[4096];
    const char *kernel;
    ssize_t n = readlink("/proc/self/exe", path,
                         sizeof path - 1); /* the real path, so that ps shows the program's name */
    int has_workers = !getenv("OPENBLAS_NUM_THREADS"), is_wrong = choose(&kernel) == TAGC_BLAS_AGAIN;
    if (n <= 0 || (!has_workers && !is_wrong)) return;
    if (has_workers && (setenv("OPENBLAS_NUM_THREADS", "1", 0) != 0 || setenv(restarted, "1", 1) != 0))
        return;
    if (is_wrong && (setenv(begun, kernel, 1) != 0 || setenv("OPENBLAS_CORETYPE", kernel, 1) != 0)) return;
    path[n] = '\0';
    execv(path, argv);
}

void tagc_blas_warning(char text[TAGC_BLAS_TEXT_BYTES]) {
    const char *better, *kernel = openblas_get_corename();
    *text = '\0';
    switch (choose(&better)) {
    case TAGC_BLAS_USERS_SLOW:
        snprintf(
            text, TAGC_BLAS_TEXT_BYTES,
            "note: OPENBLAS_CORETYPE makes OpenBLAS use its %s kernel, and this processor could use %s, which"
            " is faster",
            kernel, better);
        break;
    case TAGC_BLAS_AGAIN: /* it could not begin again */
    case TAGC_BLAS_STAYS_SLOW:
        snprintf(
            text, TAGC_BLAS_TEXT_BYTES,
            "note: this OpenBLAS uses its %s kernel and has none for this processor (%s): another build of it"
            " would be faster",
            kernel, better);
        break;
    case TAGC_BLAS_RIGHT:
        break;
    }
}

/* ---- what products run on ---- */

void tagc_blas_describe(tagc_blas_about *out) {
    /* "OpenBLAS 0.3.21 DYNAMIC_ARCH NO_AFFINITY SkylakeX MAX_THREADS=64" */
    const char *config = openblas_get_config();
    size_t n = strcspn(config, " ");
    if (config[n]) n += 1 + strcspn(config + n + 1, " ");
    snprintf(out->name, sizeof out->name, "%.*s", (int)n, config);
    out->kernel = openblas_get_corename();
    out->n_threads = openblas_get_num_threads();
}

/* ---- buffers ---- */

static int has_room(size_t n_bytes) {
    void *room = mmap(NULL, n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return 0;
    munmap(room, n_bytes);
    return 1;
}

/* If a launcher bound the process to some processors, it has divided them already. */
static int share_of_processors(int n_ranks) {
    cpu_set_t set;
    const char *asked = getenv(restarted) ? NULL : getenv("OPENBLAS_NUM_THREADS");
    if (asked && atoi(asked) > 0) return atoi(asked) < MAX_THREADS ? atoi(asked) : MAX_THREADS;
    int n_all = (int)sysconf(_SC_NPROCESSORS_ONLN);
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : n_all;
    if (n >= n_all) n = n_all / n_ranks;
    return n < 1 ? 1 : n < MAX_THREADS ? n : MAX_THREADS;
}

tagc_status tagc_blas_prepare(int n_callers, int n_ranks, int n_threads) {
    if (n_threads == 0) n_threads = share_of_processors(n_ranks);
    void *buffers[MAX_BUFFERS];
    int n = n_callers + n_threads - 1, n_made = 0;
    if (n > MAX_BUFFERS) n = MAX_BUFFERS;
    if (blas_memory_alloc && blas_memory_free)
        while (n_made < n && has_room(buffer_bytes + buffer_bytes / 8))
            buffers[n_made++] = blas_memory_alloc(0);
    for (int i = 0; i < n_made; i++) blas_memory_free(buffers[i]);
    if (n_made < n && blas_memory_alloc && blas_memory_free)
        return tagc_fail(
            TAGC_ERR_MEMORY,
            "matrix products need %d buffers of %zu MB of address space, and there is room for %d; a limit"
            " (ulimit -v) is too low",
            n, buffer_bytes >> 20, n_made);
    openblas_set_num_threads(n_threads);
    return TAGC_OK;
}
