/* See counts.h. */
#include "counts.h"
#include "harness.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace counts {
namespace {

constexpr unsigned SECTOR = 32, BANKS = 32, WORD = 4;

/* What the lanes of a warp access together. */
struct group {
    uintptr_t at[harness::WARP];
    unsigned n = 0, size = 0;
    bool is_shared = false;
};

std::vector<kernel> kernels;
std::unordered_map<uint64_t, uint32_t> times; /* by instruction and thread */
std::unordered_map<uint64_t, group> groups;   /* by instruction, warp and time */
std::unordered_set<uintptr_t> sectors[2];     /* read, written */
size_t launched;                              /* of kernels */

uint64_t mixed(uint64_t a, uint64_t b) {
    uint64_t x = a * 0x9e3779b97f4a7c15u + b;
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
    return x ^ x >> 32;
}

void note_sectors(uintptr_t from, size_t n_bytes, bool is_write) {
    for (uintptr_t s = from / SECTOR; s <= (from + n_bytes - 1) / SECTOR; s++) sectors[is_write].insert(s);
}

void note(const void *instruction, const volatile void *address, size_t n_bytes, bool is_write) {
    harness::spot spot;
    if (!harness::on_begin || !harness::here(&spot)) return;
    const uintptr_t at = (uintptr_t)address, stack = (uintptr_t)spot.stack, shared = (uintptr_t)spot.shared;
    if (at >= stack && at < stack + spot.stack_bytes) return;
    const uint64_t thread = (uint64_t)spot.block << 16 | spot.thread, warp = thread / harness::WARP;
    const uint32_t time = times[mixed((uintptr_t)instruction, thread)]++;
    group &of = groups[mixed(mixed((uintptr_t)instruction, warp), time)];
    of.is_shared = at >= shared && at < shared + spot.shared_bytes;
    of.size = (unsigned)n_bytes;
    if (of.n < harness::WARP) of.at[of.n++] = at;
    if (!of.is_shared) note_sectors(at, n_bytes, is_write);
}

size_t n_distinct(std::vector<uintptr_t> &values) {
    std::sort(values.begin(), values.end());
    return (size_t)(std::unique(values.begin(), values.end()) - values.begin());
}

void add_global(const group &of, kernel *to) {
    std::vector<uintptr_t> touched, bytes;
    for (unsigned i = 0; i < of.n; i++) {
        for (uintptr_t s = of.at[i] / SECTOR; s <= (of.at[i] + of.size - 1) / SECTOR; s++)
            touched.push_back(s);
        for (unsigned b = 0; b < of.size; b++) bytes.push_back(of.at[i] + b);
    }
    to->asked += n_distinct(touched) * SECTOR;
    to->needed += (n_distinct(bytes) + SECTOR - 1) / SECTOR * SECTOR;
}

/* Lanes are served in turns of 128 bytes; in a turn each bank gives one word, to all who want it. */
void add_shared(const group &of, kernel *to) {
    const unsigned each = of.size <= WORD ? harness::WARP : harness::WARP * WORD / of.size;
    for (unsigned first = 0; first < of.n; first += each) {
        std::vector<uintptr_t> words;
        for (unsigned i = first; i < std::min(of.n, first + each); i++)
            for (uintptr_t w = of.at[i] / WORD; w <= (of.at[i] + of.size - 1) / WORD; w++) words.push_back(w);
        const size_t n = n_distinct(words);
        unsigned of_bank[BANKS] = {}, most = 1;
        for (size_t i = 0; i < n; i++) most = std::max(most, ++of_bank[words[i] % BANKS]);
        to->passes += most;
        to->least += (n + BANKS - 1) / BANKS;
    }
}

void begin_launch(const char *name) {
    for (launched = 0; launched < kernels.size() && kernels[launched].name != name; launched++) {
    }
    if (launched == kernels.size()) {
        kernels.emplace_back();
        kernels.back().name = name;
    }
}

void end_launch() {
    kernel *to = &kernels[launched];
    to->n_launches++;
    for (const auto &one : groups)
        one.second.is_shared ? add_shared(one.second, to) : add_global(one.second, to);
    to->moved += (sectors[0].size() + sectors[1].size()) * SECTOR;
    times.clear();
    groups.clear();
    sectors[0].clear();
    sectors[1].clear();
}

} // namespace

void begin() {
    kernels.clear();
    harness::on_begin = begin_launch;
    harness::on_end = end_launch;
}

std::vector<kernel> end() {
    harness::on_begin = nullptr;
    harness::on_end = nullptr;
    return kernels;
}

} // namespace counts

/* ---- what the compiler has kernels call ---- */

#define ACCESS(name, size, is_write)                                                                         \
    void __tsan_##name(void *at);                                                                            \
    void __tsan_##name(void *at) {                                                                           \
        counts::note(__builtin_return_address(0), at, size, is_write);                                       \
    }
#define ACCESSES(size)                                                                                       \
    ACCESS(read##size, size, false)                                                                          \
    ACCESS(write##size, size, true)                                                                          \
    ACCESS(unaligned_read##size, size, false)                                                                \
    ACCESS(unaligned_write##size, size, true)
#define ATOMIC(size, type, name, operation)                                                                  \
    type __tsan_atomic##size##_##name(volatile type *at, type value, int order);                             \
    type __tsan_atomic##size##_##name(volatile type *at, type value, int) {                                  \
        counts::note(__builtin_return_address(0), at, sizeof(type), true);                                   \
        return operation(at, value, __ATOMIC_SEQ_CST);                                                       \
    }
#define ATOMICS(size, type)                                                                                  \
    ATOMIC(size, type, fetch_add, __atomic_fetch_add)                                                        \
    ATOMIC(size, type, fetch_or, __atomic_fetch_or)                                                          \
    ATOMIC(size, type, exchange, __atomic_exchange_n)                                                        \
    type __tsan_atomic##size##_load(const volatile type *at, int order);                                     \
    type __tsan_atomic##size##_load(const volatile type *at, int) {                                          \
        return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                        \
    }                                                                                                        \
    bool __tsan_atomic##size##_compare_exchange_strong(volatile type *at, type *old, type value, int, int);  \
    bool __tsan_atomic##size##_compare_exchange_strong(volatile type *at, type *old, type value, int, int) { \
        counts::note(__builtin_return_address(0), at, sizeof(type), true);                                   \
        return __atomic_compare_exchange_n(at, old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);       \
    }

extern "C" {
void __tsan_init(void);
void __tsan_init(void) {
}
void __tsan_func_entry(void *);
void __tsan_func_entry(void *) {
}
void __tsan_func_exit(void *);
void __tsan_func_exit(void *) {
}
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void *at, size_t n_bytes);
void __tsan_read_range(void *at, size_t n_bytes) {
    counts::note(__builtin_return_address(0), at, n_bytes, false);
}
void __tsan_write_range(void *at, size_t n_bytes);
void __tsan_write_range(void *at, size_t n_bytes) {
    counts::note(__builtin_return_address(0), at, n_bytes, true);
}
void __tsan_vptr_update(void **, void *);
void __tsan_vptr_update(void **, void *) {
}
ATOMICS(8, unsigned char)
ATOMICS(16, unsigned short)
ATOMICS(32, unsigned)
ATOMICS(64, unsigned long)
}
