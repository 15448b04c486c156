/* Executes CUDA C on a processor: a .cu file is compiled as C++ with this header in place of the CUDA runtime's.
 *
 * Each CUDA thread is a fibre with a stack of its own. Several blocks are resident at once. A seeded scheduler picks the next
 * fibre wherever a device could: when a thread waits at a barrier or for its warp, and before some of the atomics. Two
 * seeds give two orders; one seed gives the same order again.
 *
 * The harness ends the process, and says where, when threads of a block wait at different barriers, when a thread ends
 * while others wait for it, when the lanes of a warp operation disagree, and when no thread can go on. Shared memory is
 * filled with garbage before a block begins, and guarded on both sides.
 *
 * Built with a sanitizer it shows more. The thread sanitizer sees fibres as threads that nothing orders but
 * __syncthreads, __syncwarp, and the functions below that acquire or release; so it names races between threads, warps and
 * blocks. Shuffles, votes and plain atomics order nothing. The address sanitizer sees each block's shared memory as an
 * allocation of its own.
 *
 * It cannot see: speed, loads that are not aligned (unless the undefined behaviour sanitizer runs), and orders of
 * memory operations weaker than what the thread sanitizer models. */
#ifndef TAGC_TESTS_CUDA_HARNESS_H
#define TAGC_TESTS_CUDA_HARNESS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif

namespace harness {

constexpr unsigned WARP = 32, MAX_THREADS = 1024;
constexpr size_t MAX_SHARED_BYTES = 48 * 1024; /* what every device gives a block without asking */

/* Of the launches from here on. n_resident: blocks that run at the same time, at most MAX_RESIDENT. */
constexpr unsigned MAX_RESIDENT = 8;
void configure(uint64_t seed, unsigned n_resident);

struct where {
    const char *file;
    int line;
};
#define HARNESS_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

struct index {
    unsigned x;
};
index thread_index(), block_index(), block_size(), grid_size();

/* Runs body(arg) by each of n_blocks x n_threads threads, and returns when all have. */
void run(const char *name, unsigned n_blocks, unsigned n_threads, size_t shared_bytes, void (*body)(void *),
         void *arg);
unsigned long long count_launches(); /* so far */
/* The block's shared memory, which must be of so many bytes. */
void *shared(size_t n_bytes);

void barrier(where at);
unsigned lane();
/* Waits for the lanes of mask, each of which brings a value. Returns what all brought, (WARP), valid until this lane's
 * next warp operation but one. */
enum operation { SYNCWARP, SHUFFLE, VOTE, MATCH };
const uint64_t *meet(operation op, unsigned mask, uint64_t value, where at);
void before_atomic(); /* another thread may go first */

/* For counts.cpp: where the running thread is, and its memory; 0 outside of kernels. */
struct spot {
    unsigned block, thread;
    const void *shared, *stack;
    size_t shared_bytes, stack_bytes;
};
bool here(spot *out);
extern void (*on_begin)(const char *kernel); /* of a launch; NULL: nobody wants to know */
extern void (*on_end)();
uint64_t n_switches(); /* since the program began */

/* Prints and ends the process: what a kernel did that a device would not survive, or not forgive. */
[[noreturn]] void stop(const char *format, ...) __attribute__((format(printf, 1, 2)));
constexpr int STOPPED = 70; /* exit status */

} // namespace harness

/* ---- the language ---- */

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict

#define threadIdx (harness::thread_index())
#define blockIdx (harness::block_index())
#define blockDim (harness::block_size())
#define gridDim (harness::grid_size())

typedef void *cudaStream_t;

struct alignas(16) float4 {
    float x, y, z, w;
#ifdef HARNESS_COUNTS /* in one access, as on a device */
    typedef float all __attribute__((vector_size(16), may_alias));
    float4() = default;
    float4(const float4 &from) {
        *this = from;
    }
    float4 &operator=(const float4 &from) {
        *reinterpret_cast<all *>(this) = *reinterpret_cast<const all *>(&from);
        return *this;
    }
#endif
};

/* ---- barriers and warps ---- */

inline void __syncthreads(HARNESS_CALLER) {
    harness::barrier({file, line});
}

inline void __syncwarp(unsigned mask = 0xffffffffu, HARNESS_CALLER) {
    harness::meet(harness::SYNCWARP, mask, 0, {file, line});
}

namespace harness {

template <typename T> uint64_t to_word(T value) {
    static_assert(sizeof(T) <= 8, "a register at most");
    uint64_t word = 0;
    __builtin_memcpy(&word, &value, sizeof value);
    return word;
}

template <typename T> T from_word(uint64_t word) {
    T value;
    __builtin_memcpy(&value, &word, sizeof value);
    return value;
}

/* Value of lane `from` where that is in the lane's own part of `width` lanes, else the own. */
template <typename T> T shuffle(unsigned mask, T value, int from, bool inside, unsigned width, where at) {
    if (width == 0 || width > WARP || (width & (width - 1)))
        stop("%s:%d: a shuffle of %u lanes: must be a power of two up to 32", at.file, at.line, width);
    const uint64_t *all = meet(SHUFFLE, mask, to_word(value), at);
    unsigned source = inside ? (unsigned)from : lane();
    if (!(mask >> source & 1))
        stop("%s:%d: lane %u reads lane %u, which is not in the mask %08x", at.file, at.line, lane(), source,
             mask);
    return from_word<T>(all[source]);
}

} // namespace harness

template <typename T> T __shfl_sync(unsigned mask, T value, int from, int width = 32, HARNESS_CALLER) {
    unsigned w = (unsigned)width, base = harness::lane() / w * w;
    return harness::shuffle(mask, value, (int)(base + ((unsigned)from & (w - 1))), true, w, {file, line});
}

template <typename T> T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, HARNESS_CALLER) {
    unsigned w = (unsigned)width, own = harness::lane();
    return harness::shuffle(mask, value, (int)own - (int)by, own % w >= by, w, {file, line});
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, HARNESS_CALLER) {
    unsigned w = (unsigned)width, own = harness::lane();
    return harness::shuffle(mask, value, (int)(own + by), own % w + by < w, w, {file, line});
}

template <typename T> T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32, HARNESS_CALLER) {
    unsigned w = (unsigned)width, own = harness::lane(), from = own ^ (unsigned)with;
    return harness::shuffle(mask, value, (int)from, from / w <= own / w, w, {file, line});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, HARNESS_CALLER) {
    const uint64_t *all = harness::meet(harness::VOTE, mask, predicate != 0, {file, line});
    unsigned votes = 0;
    for (unsigned i = 0; i < harness::WARP; i++)
        if (mask >> i & 1) votes |= (unsigned)all[i] << i;
    return votes;
}

inline int __any_sync(unsigned mask, int predicate, HARNESS_CALLER) {
    return __ballot_sync(mask, predicate, file, line) != 0;
}

inline int __all_sync(unsigned mask, int predicate, HARNESS_CALLER) {
    return __ballot_sync(mask, predicate, file, line) == mask;
}

template <typename T> unsigned __match_any_sync(unsigned mask, T value, HARNESS_CALLER) {
    const uint64_t own = harness::to_word(value),
                   *all = harness::meet(harness::MATCH, mask, own, {file, line});
    unsigned same = 0;
    for (unsigned i = 0; i < harness::WARP; i++)
        if ((mask >> i & 1) && all[i] == own) same |= 1u << i;
    return same;
}

/* ---- atomics: relaxed, as on a device ---- */

template <typename T> T atomicAdd(T *to, T value) {
    harness::before_atomic();
    return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}

template <typename T> T atomicOr(T *to, T value) {
    harness::before_atomic();
    return __atomic_fetch_or(to, value, __ATOMIC_RELAXED);
}

template <typename T> T atomicExch(T *to, T value) {
    harness::before_atomic();
    return __atomic_exchange_n(to, value, __ATOMIC_RELAXED);
}

template <typename T> T atomicMax(T *to, T value) {
    harness::before_atomic();
    T old = __atomic_load_n(to, __ATOMIC_RELAXED);
    while (old < value &&
           !__atomic_compare_exchange_n(to, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}

/* What kernels write as a fence, an atomicAdd and a fence: the sanitizer knows orders of atomics, and no fences. */
inline unsigned harness_add_ordered(unsigned *to, unsigned value) {
    harness::before_atomic();
    return __atomic_fetch_add(to, value, __ATOMIC_ACQ_REL);
}

/* ---- numbers ---- */

inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
inline int __clz(int x) {
    return x ? __builtin_clz((unsigned)x) : 32;
}
inline int __ffs(int x) {
    return __builtin_ffs(x);
}
inline unsigned __float_as_uint(float x) {
    return (unsigned)harness::to_word(x);
}
inline float __uint_as_float(unsigned x) {
    return harness::from_word<float>(x);
}

/* ---- launches ---- */

/* The arguments are copied, as a launch does. */
#define HARNESS_LAUNCH(kernel, n_blocks, n_threads, shared_bytes, ...)                                       \
    do {                                                                                                     \
        auto harness_call = [=] { kernel(__VA_ARGS__); };                                                    \
        harness::run(                                                                                        \
            #kernel, n_blocks, n_threads, shared_bytes,                                                      \
            [](void *call) { (*static_cast<decltype(harness_call) *>(call))(); }, &harness_call);            \
    } while (0)

#endif
