#include "launch/blas.h"

#include "core/status.h"
#include <cblas.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* OpenBLAS's own allocator, exported by some builds. It keeps a freed buffer for the next caller. */
extern void *blas_memory_alloc(int is_server) __attribute__((weak));
extern void blas_memory_free(void *buffer) __attribute__((weak));

enum { MAX_BUFFERS = 64, MAX_THREADS = 256 };
static const size_t buffer_bytes = (size_t)128 << 20; /* of a thread, with its bookkeeping */

static const char restarted[] =
    "TAGC_BLAS_RESTARTED"; /* set if this program, not the user, set the number of threads */

void tagc_blas_without_workers(char **argv) {
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path,
                         sizeof path - 1); /* the real path, so that ps shows the program's name */
    if (n <= 0 || getenv("OPENBLAS_NUM_THREADS")) return;
    if (setenv("OPENBLAS_NUM_THREADS", "1", 0) != 0 || setenv(restarted, "1", 1) != 0) return;
    path[n] = '\0';
    execv(path, argv);
}

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
