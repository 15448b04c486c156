/* The harness against kernels with a bug each. What it must find, it must find in every run of this program; and the kernel
 * without a bug must come through with the same sums in all orders. */
#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum mode { PLAIN, ADDRESS, THREAD };
#if defined(HARNESS_THREAD_SANITIZER)
#define MODE THREAD
#elif defined(HARNESS_ADDRESS_SANITIZER)
#define MODE ADDRESS
#else
#define MODE PLAIN
#endif

extern "C" const char *__tsan_default_options();
extern "C" const char *__tsan_default_options() {
    return "exitcode=66:halt_on_error=1:atexit_sleep_ms=0";
}
extern "C" const char *__asan_default_options();
extern "C" const char *__asan_default_options() {
    return "exitcode=67:detect_leaks=0:abort_on_error=0";
}

enum bug {
    NONE,
    NO_BARRIER,
    NO_BARRIER_BEFORE_REUSE,
    BARRIER_IN_BRANCH,
    BARRIER_LEFT_OUT,
    BALLOT_IN_BRANCH,
    LANE_OUTSIDE_MASK,
    NO_SYNCWARP,
    PLAIN_ADD,
    RELAXED_TICKET,
    PREVIOUS_BLOCK,
    PAST_SHARED,
    NOT_ZEROED,
    SHARED_TOO_LARGE,
    SHARED_OTHER_SIZE,
    N_BUGS
};

constexpr unsigned THREADS = 64, BLOCKS = 6, FULL = 0xffffffffu;
constexpr int N_SEEDS = MODE == PLAIN ? 12 : MODE == ADDRESS ? 4 : 2;

struct summary_shared {
    unsigned values[THREADS], swapped[THREADS], of_warp[THREADS / 32], is_last, n_odd;
};

struct summary {
    unsigned sums[BLOCKS], n_odd, ticket, total, swaps[BLOCKS * THREADS];
};

/* Sum, count of odd numbers, and neighbours swapped, in (BLOCKS * THREADS). */
template <int BUG> __global__ void summarize(const unsigned *in, summary *out) {
    summary_shared *s = static_cast<summary_shared *>(
        harness::shared(sizeof(summary_shared) + (BUG == SHARED_OTHER_SIZE ? 4 : 0)));
    const unsigned t = threadIdx.x, lane = t % 32, at = blockIdx.x * THREADS + t;
    s->values[t] = in[at];
    if (BUG == PAST_SHARED && t == 5 && blockIdx.x == 1)
        const_cast<volatile unsigned *>(s->values)[sizeof(summary_shared) / 4 + t % 2] = 1;
    if (BUG != NOT_ZEROED && t == 0) s->n_odd = 0;
    if (BUG == BARRIER_LEFT_OUT && t >= 32) return;
    if (BUG == BARRIER_IN_BRANCH && t % 2)
        __syncthreads();
    else if (BUG != NO_BARRIER)
        __syncthreads();
    unsigned mirrored = s->values[THREADS - 1 - t];
    if (mirrored & 1) atomicAdd(&s->n_odd, 1u);
    if (BUG != NO_BARRIER_BEFORE_REUSE) __syncthreads();
    s->values[t] = mirrored;
    if (BUG != NO_SYNCWARP) __syncwarp();
    s->swapped[t] = s->values[t ^ 1];
    out->swaps[at] = s->swapped[t];

    unsigned n_above = 0;
    if (BUG == BALLOT_IN_BRANCH) {
        if (lane < 16) n_above = (unsigned)__popc(__ballot_sync(FULL, mirrored > 100));
    } else {
        n_above = (unsigned)__popc(__ballot_sync(FULL, mirrored > 100));
    }
    if (BUG == LANE_OUTSIDE_MASK && lane < 16) mirrored += 0 * __shfl_sync(0xffffu, mirrored, 20);
    unsigned sum = mirrored + 0 * n_above;
    for (int by = 16; by; by /= 2) sum += __shfl_xor_sync(FULL, sum, by);
    if (lane == 0) s->of_warp[t / 32] = sum;
    __syncthreads();
    if (t == 0) {
        unsigned before = BUG == PREVIOUS_BLOCK && blockIdx.x ? out->sums[blockIdx.x - 1] : 0;
        out->sums[blockIdx.x] = s->of_warp[0] + s->of_warp[1] + before;
        if (BUG == PLAIN_ADD)
            out->n_odd += s->n_odd;
        else
            atomicAdd(&out->n_odd, s->n_odd);
        s->is_last = (BUG == RELAXED_TICKET ? atomicAdd(&out->ticket, 1u)
                                            : harness_add_ordered(&out->ticket, 1)) == BLOCKS - 1;
    }
    __syncthreads();
    if (!s->is_last || t != 0) return;
    unsigned total = 0;
    if (BUG == PREVIOUS_BLOCK)
        total = out->sums[BLOCKS - 1];
    else
        for (unsigned b = 0; b < BLOCKS; b++) total += out->sums[b];
    out->total = total;
}

template <int BUG> int is_right(uint64_t seed) {
    unsigned in[BLOCKS * THREADS], total = 0, n_odd = 0;
    static summary out;
    memset(&out, 0, sizeof out);
    for (unsigned i = 0; i < BLOCKS * THREADS; i++) {
        in[i] = (unsigned)(i * 2654435761u * (seed + 3)) >> 22;
        total += in[i];
        n_odd += in[i] & 1;
    }
    summary *to = &out;
    const unsigned *from = in;
    HARNESS_LAUNCH(summarize<BUG>, BLOCKS, THREADS, BUG == SHARED_TOO_LARGE ? 49153 : sizeof(summary_shared),
                   from, to);
    for (unsigned i = 0; i < BLOCKS * THREADS; i++)
        if (out.swaps[i] != in[i / THREADS * THREADS + (THREADS - 1 - (i % THREADS ^ 1))]) return 0;
    return out.total == total && out.n_odd == n_odd;
}

typedef int (*program)(uint64_t seed);
template <int BUG> void fill_programs(program *all) {
    all[BUG] = is_right<BUG>;
    if constexpr (BUG + 1 < N_BUGS) fill_programs<BUG + 1>(all);
}

enum { RIGHT = 0, WRONG = 1, RACE = 66, BAD_ADDRESS = 67 };

/* How a run of it ends. MAYBE_WRONG: with at least one of the seeds a wrong result; else with each seed so. */
enum { MAYBE_WRONG = 1000, UNSEEN = 1001 };
struct expectation {
    const char *name;
    int of_mode[3]; /* exit status */
    const char *says;
};
const expectation expected[N_BUGS] = {
    {"no bug", {RIGHT, RIGHT, RIGHT}, ""},
    {"a barrier is missing", {MAYBE_WRONG, MAYBE_WRONG, RACE}, ""},
    {"a barrier is missing before memory is used again", {MAYBE_WRONG, MAYBE_WRONG, RACE}, ""},
    {"a barrier in each branch", {harness::STOPPED, harness::STOPPED, harness::STOPPED}, "divergent barrier"},
    {"threads end before a barrier", {harness::STOPPED, harness::STOPPED, harness::STOPPED}, "barrier"},
    {"a vote of all lanes in a branch",
     {harness::STOPPED, harness::STOPPED, harness::STOPPED},
     "lanes disagree"},
    {"a shuffle from outside the mask",
     {harness::STOPPED, harness::STOPPED, harness::STOPPED},
     "not in the mask"},
    {"__syncwarp is missing", {MAYBE_WRONG, MAYBE_WRONG, RACE}, ""},
    {"a global sum without an atomic", {UNSEEN, UNSEEN, RACE}, ""},
    {"a ticket that orders nothing", {UNSEEN, UNSEEN, RACE}, ""},
    {"a block takes another for done", {MAYBE_WRONG, MAYBE_WRONG, RACE}, ""},
    {"a write past shared memory", {harness::STOPPED, BAD_ADDRESS, harness::STOPPED}, ""},
    {"shared memory taken for zeros", {WRONG, WRONG, WRONG}, ""},
    {"more shared memory than there is",
     {harness::STOPPED, harness::STOPPED, harness::STOPPED},
     "at most 49152"},
    {"another size than launched with",
     {harness::STOPPED, harness::STOPPED, harness::STOPPED},
     "its launch gives"},
};

/* Exit status of one run in a process of its own, and what it wrote to stderr. */
static int run_apart(program p, uint64_t seed, unsigned n_resident, char *text, size_t capacity) {
    fflush(stdout);
    FILE *log = tmpfile();
    pid_t child = log ? fork() : -1;
    if (child < 0) {
        perror("test_cuda_harness");
        exit(1);
    }
    if (child == 0) {
        dup2(fileno(log), 2);
        alarm(240);
        harness::configure(seed, n_resident);
        _exit(p(seed) ? RIGHT : WRONG);
    }
    int status;
    waitpid(child, &status, 0);
    rewind(log);
    text[fread(text, 1, capacity - 1, log)] = 0;
    fclose(log);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int main() {
    program programs[N_BUGS];
    fill_programs<0>(programs);
    int n_failed = 0;
    for (int bug = 0; bug < N_BUGS; bug++) {
        const expectation *e = &expected[bug];
        const int wanted = e->of_mode[MODE];
        int n_wrong = 0, n_other = 0;
        if (wanted == UNSEEN) {
            printf("not to be seen without the thread sanitizer: %s\n", e->name);
            continue;
        }
        for (int seed = 1; seed <= N_SEEDS; seed++) {
            char text[16384];
            int status = run_apart(programs[bug], (uint64_t)seed, 1 + (unsigned)seed % 4, text, sizeof text);
            n_wrong += status == WRONG;
            int as_wanted = wanted == MAYBE_WRONG ? status == WRONG || status == RIGHT : status == wanted;
            if (!as_wanted || !strstr(text, e->says)) {
                printf("FAILED: %s, seed %d: exit status %d, expected %d and \"%s\"\n%s", e->name, seed,
                       status, wanted, e->says, text);
                n_other++;
            }
        }
        if (wanted == MAYBE_WRONG && n_wrong == 0) {
            printf("FAILED: %s: right with each of %d seeds\n", e->name, N_SEEDS);
            n_other++;
        }
        if (!n_other) printf("%s: %s\n", bug ? "found" : "passed", e->name);
        n_failed += n_other != 0;
    }
    return n_failed != 0;
}
