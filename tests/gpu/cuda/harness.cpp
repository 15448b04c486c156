/* The scheduler behind harness.h. Built without the thread sanitizer: what happens here orders nothing that a kernel does,
 * but where order() says so. Between fibres it calls nothing that the sanitizer intercepts. */
#include "harness.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(HARNESS_THREAD_SANITIZER)
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *address);
void __tsan_release(void *address);
}
#endif
#if defined(HARNESS_ADDRESS_SANITIZER)
extern "C" {
void __sanitizer_start_switch_fiber(void **fake_stack, const void *bottom, size_t size);
void __sanitizer_finish_switch_fiber(void *fake_stack, const void **bottom, size_t *size);
}
#endif

namespace harness {
namespace {

constexpr size_t STACK_BYTES = 128 * 1024, PAGE = 4096, GUARD_BYTES = 64;
constexpr unsigned MAX_WARPS = MAX_THREADS / WARP, MAX_FIBRES = MAX_RESIDENT * MAX_THREADS, MAX_MEETINGS = 8;
constexpr uint8_t GARBAGE = 0xa5, GUARD = 0xc3;

struct block;

struct context {
#if defined(__x86_64__)
    void *stack_pointer;
#else
    ucontext_t saved;
#endif
    const void *stack; /* lowest address */
    size_t stack_bytes;
    void *fake_stack; /* of the address sanitizer */
    void *fibre;      /* of the thread sanitizer */
};

struct fibre {
    context own;
    block *home;
    unsigned thread; /* in its block */
    const char *waits_for;
    where waits_at;
};

/* Lanes that wait for each other. Two sets of values in turn: who is late reads while others are early. */
struct meeting {
    unsigned mask, arrived;
    operation op;
    where at;
    unsigned turn;
    uint64_t values[2][WARP];
};

struct block {
    unsigned index, n_done, n_at_barrier, first_fibre;
    unsigned turn; /* thread t is fibre first_fibre + (t + turn) % n_threads */
    where barrier_at;
    meeting meetings[MAX_WARPS][MAX_MEETINGS];
    uint8_t *shared;
    char barrier_order, warp_order[MAX_WARPS][MAX_MEETINGS]; /* addresses to acquire and release */
};

uint64_t state = 1, switches;
unsigned n_resident = 2;

fibre *fibres; /* (MAX_FIBRES), made when first needed */
unsigned n_fibres;
fibre *waiting[MAX_FIBRES]; /* who can go on */
unsigned n_waiting;
fibre *current;
context host;
block running[MAX_RESIDENT];

/* the launch */
const char *kernel_name;
unsigned n_blocks, n_threads, n_begun, n_ended;
size_t n_shared_bytes;
unsigned *order_of_blocks;
uint8_t **shared_of;
void (*body)(void *);
void *body_arg;
char launch_order;

uint64_t random_u64() {
    uint64_t x = state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

unsigned random_below(unsigned limit) {
    return (unsigned)((random_u64() >> 32) * limit >> 32);
}

void release(void *address) {
#if defined(HARNESS_THREAD_SANITIZER)
    __tsan_release(address);
#else
    (void)address;
#endif
}

void acquire(void *address) {
#if defined(HARNESS_THREAD_SANITIZER)
    __tsan_acquire(address);
#else
    (void)address;
#endif
}

/* ---- switching ---- */

#if defined(__x86_64__)
extern "C" void harness_switch(void **save, void *load);
__asm__(".text\n.globl harness_switch\n.type harness_switch,@function\nharness_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
        ".size harness_switch, .-harness_switch\n.section .note.GNU-stack,\"\",@progbits\n.text\n");
#endif

void after_switch(context *own, context *from) {
    (void)own, (void)from;
#if defined(HARNESS_ADDRESS_SANITIZER)
    const void *bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(own->fake_stack, &bottom, &size);
    if (from == &host) host.stack = bottom, host.stack_bytes = size;
#endif
}

context *came_from;

void switch_to(context *from, context *to) {
    switches++;
    came_from = from;
#if defined(HARNESS_ADDRESS_SANITIZER)
    __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->stack_bytes);
#endif
#if defined(HARNESS_THREAD_SANITIZER)
    __tsan_switch_to_fiber(to->fibre, 1); /* 1: without synchronisation */
#endif
#if defined(__x86_64__)
    harness_switch(&from->stack_pointer, to->stack_pointer);
#else
    swapcontext(&from->saved, &to->saved);
#endif
    after_switch(from, came_from);
}

void say(const char *format, ...) {
    char line[512];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (n > 0 && write(2, line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1) < 0) _exit(STOPPED);
}

[[noreturn]] void no_fibre_can_go_on() {
    say("harness: kernel %s: no thread can go on\n", kernel_name);
    for (unsigned i = 0, n_said = 0; i < n_fibres && n_said < 12; i++) {
        const fibre *f = &fibres[i];
        if (!f->home || !f->waits_for) continue;
        unsigned n_alike = 0, is_first = 1;
        for (unsigned j = 0; j < n_fibres; j++) {
            const fibre *g = &fibres[j];
            if (g->home != f->home || g->waits_for != f->waits_for || g->waits_at.line != f->waits_at.line)
                continue;
            if (j < i) is_first = 0;
            n_alike++;
        }
        if (!is_first) continue;
        say("  block %u: %u threads, thread %u among them, wait for %s at %s:%d\n", f->home->index, n_alike,
            f->thread, f->waits_for, f->waits_at.file, f->waits_at.line);
        n_said++;
    }
    _exit(STOPPED);
}

/* Another fibre; the present one is among those that can go on, or not. */
void next_fibre() {
    fibre *from = current;
    if (n_waiting == 0) {
        if (n_ended < n_blocks) no_fibre_can_go_on();
        current = nullptr;
        switch_to(&from->own, &host);
        return;
    }
    unsigned i = random_below(n_waiting);
    fibre *to = waiting[i];
    waiting[i] = waiting[--n_waiting];
    if (to == from) return;
    current = to;
    switch_to(&from->own, &to->own);
}

void can_go_on(fibre *f) {
    f->waits_for = nullptr;
    waiting[n_waiting++] = f;
}

fibre *fibre_of(const block *b, unsigned thread) {
    unsigned turned = thread + b->turn;
    return &fibres[b->first_fibre + (turned < n_threads ? turned : turned - n_threads)];
}

void begin_block(unsigned place) {
    block *b = &running[place];
    b->index = order_of_blocks[n_begun++];
    b->n_done = b->n_at_barrier = 0;
    b->shared = shared_of[b->index];
    for (unsigned w = 0; w < MAX_WARPS; w++)
        for (unsigned m = 0; m < MAX_MEETINGS; m++) b->meetings[w][m].mask = b->meetings[w][m].arrived = 0;
    b->first_fibre = place * n_threads;
    b->turn = random_below(n_threads); /* the sanitizer takes what one fibre does for ordered */
    for (unsigned t = 0; t < n_threads; t++) {
        fibre *f = fibre_of(b, t);
        f->home = b;
        f->thread = t;
        can_go_on(f);
    }
}

bool guards_hold(const block *b) {
#if defined(HARNESS_ADDRESS_SANITIZER)
    (void)b;
#else
    for (size_t i = 0; i < GUARD_BYTES; i++)
        if (b->shared[-1 - (ptrdiff_t)i] != GUARD || b->shared[n_shared_bytes + i] != GUARD) return false;
#endif
    return true;
}

void end_thread() {
    block *b = current->home;
    if (b->n_at_barrier)
        stop("kernel %s: thread %u of block %u ended while %u threads wait at the barrier at %s:%d",
             kernel_name, current->thread, b->index, b->n_at_barrier, b->barrier_at.file, b->barrier_at.line);
    release(&launch_order);
    if (++b->n_done < n_threads) return;
    if (!guards_hold(b))
        stop("kernel %s: block %u wrote outside of its %zu bytes of shared memory", kernel_name, b->index,
             n_shared_bytes);
    for (unsigned i = 0; i < n_threads; i++) fibres[b->first_fibre + i].home = nullptr;
    n_ended++;
    if (n_begun < n_blocks) begin_block((unsigned)(b - running));
}

[[noreturn]] void live() {
    after_switch(&current->own, came_from);
    for (;;) {
        acquire(&launch_order);
        body(body_arg);
        end_thread();
        next_fibre();
    }
}

void make_fibre(fibre *f) {
    void *memory = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, PAGE, PROT_NONE))
        stop("no memory for the stack of a thread");
    f->own.stack = static_cast<char *>(memory) + PAGE;
    f->own.stack_bytes = STACK_BYTES - PAGE;
#if defined(HARNESS_THREAD_SANITIZER)
    f->own.fibre = __tsan_create_fiber(0);
#endif
#if defined(__x86_64__)
    /* What harness_switch takes off the stack: six registers and where to go; then the stack is as after a call. */
    void **top = reinterpret_cast<void **>(static_cast<char *>(memory) + STACK_BYTES - 64);
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void *>(live);
    for (int i = 3; i <= 8; i++) top[-i] = nullptr;
    f->own.stack_pointer = top - 8;
#else
    getcontext(&f->own.saved);
    f->own.saved.uc_stack.ss_sp = static_cast<char *>(memory) + PAGE;
    f->own.saved.uc_stack.ss_size = STACK_BYTES - PAGE;
    f->own.saved.uc_link = nullptr;
    makecontext(&f->own.saved, live, 0);
#endif
}

const char *const OPERATIONS[] = {"__syncwarp", "a shuffle", "a vote", "a match"};

/* Of these lanes. Others of the same lanes may wait elsewhere, as long as they come in the end. */
meeting *meeting_of(block *b, unsigned warp, unsigned mask) {
    for (unsigned i = 0; i < MAX_MEETINGS; i++) {
        meeting *m = &b->meetings[warp][i];
        if (m->mask != 0 && m->mask != mask) continue;
        m->mask = mask;
        return m;
    }
    stop("kernel %s: more than %u different masks in a warp", kernel_name, MAX_MEETINGS);
}

} // namespace

void stop(const char *format, ...) {
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    say("harness: %s\n", text);
    _exit(STOPPED);
}

void configure(uint64_t seed, unsigned resident) {
    if (resident < 1 || resident > MAX_RESIDENT)
        stop("%u resident blocks: must be from 1 to %u", resident, MAX_RESIDENT);
    state = seed;
    n_resident = resident;
}

uint64_t n_switches() {
    return switches;
}

index thread_index() {
    return {current->thread};
}
index block_index() {
    return {current->home->index};
}
index block_size() {
    return {n_threads};
}
index grid_size() {
    return {n_blocks};
}
unsigned lane() {
    return current->thread % WARP;
}

void (*on_begin)(const char *kernel);
void (*on_end)();

bool here(spot *out) {
    if (!current) return false;
    const block *b = current->home;
    *out = {b->index,           current->thread, b->shared,
            current->own.stack, n_shared_bytes,  current->own.stack_bytes};
    return true;
}

void *shared(size_t n_bytes) {
    if (n_bytes != n_shared_bytes)
        stop("kernel %s uses %zu bytes of shared memory, its launch gives %zu", kernel_name, n_bytes,
             n_shared_bytes);
    return current->home->shared;
}

void barrier(where at) {
    block *b = current->home;
    if (b->n_at_barrier && (b->barrier_at.line != at.line || b->barrier_at.file != at.file))
        stop("kernel %s: divergent barrier: thread %u of block %u is at %s:%d, %u threads wait at %s:%d",
             kernel_name, current->thread, b->index, at.file, at.line, b->n_at_barrier, b->barrier_at.file,
             b->barrier_at.line);
    if (b->n_done)
        stop("kernel %s: thread %u of block %u is at the barrier at %s:%d, which %u threads left out",
             kernel_name, current->thread, b->index, at.file, at.line, b->n_done);
    b->barrier_at = at;
    release(&b->barrier_order);
    if (++b->n_at_barrier == n_threads) {
        b->n_at_barrier = 0;
        for (unsigned i = 0; i < n_threads; i++) can_go_on(&fibres[b->first_fibre + i]);
    } else {
        current->waits_for = "__syncthreads";
        current->waits_at = at;
    }
    next_fibre();
    acquire(&b->barrier_order);
}

const uint64_t *meet(operation op, unsigned mask, uint64_t value, where at) {
    block *b = current->home;
    const unsigned own = lane(), warp = current->thread / WARP, first = warp * WARP;
    const unsigned n_lanes = n_threads - first < WARP ? n_threads - first : WARP;
    if (!(mask >> own & 1) || (n_lanes < WARP && mask >> n_lanes))
        stop("%s:%d: mask %08x of lane %u, which must be in it, of %u lanes", at.file, at.line, mask, own,
             n_lanes);
    meeting *m = meeting_of(b, warp, mask);
    if (m->arrived && (m->op != op || m->at.line != at.line || m->at.file != at.file))
        stop("kernel %s: lanes disagree: thread %u of block %u is at %s at %s:%d, others of its mask %08x "
             "wait at %s at "
             "%s:%d",
             kernel_name, current->thread, b->index, OPERATIONS[op], at.file, at.line, mask,
             OPERATIONS[m->op], m->at.file, m->at.line);
    m->op = op;
    m->at = at;
    const uint64_t *values = m->values[m->turn];
    m->values[m->turn][own] = value;
    m->arrived |= 1u << own;
    char *order = &b->warp_order[warp][m - b->meetings[warp]];
    if (op == SYNCWARP) release(order);
    if (m->arrived == mask) {
        m->arrived = 0;
        m->turn ^= 1;
        for (unsigned i = 0; i < n_lanes; i++)
            if (mask >> i & 1) can_go_on(fibre_of(b, first + i));
    } else {
        current->waits_for = OPERATIONS[op];
        current->waits_at = at;
    }
    next_fibre();
    if (op == SYNCWARP) acquire(order);
    return values;
}

void before_atomic() {
    if (random_below(4)) return;
    can_go_on(current);
    next_fibre();
}

static unsigned long long n_launches;

unsigned long long count_launches(void) {
    return n_launches;
}

void run(const char *name, unsigned blocks, unsigned threads, size_t shared_bytes, void (*function)(void *),
         void *arg) {
    if (current) stop("kernel %s: launched by a kernel", name);
    n_launches++;
    if (blocks == 0 || threads == 0 || threads > MAX_THREADS)
        stop("kernel %s: %u blocks of %u threads: must be at least 1, threads at most %u", name, blocks,
             threads, MAX_THREADS);
    if (shared_bytes > MAX_SHARED_BYTES)
        stop("kernel %s: %zu bytes of shared memory: must be at most %zu", name, shared_bytes,
             MAX_SHARED_BYTES);
    kernel_name = name;
    n_blocks = blocks;
    n_threads = threads;
    n_shared_bytes = shared_bytes;
    body = function;
    body_arg = arg;
    n_begun = n_ended = n_waiting = 0;
    order_of_blocks = static_cast<unsigned *>(malloc(blocks * sizeof *order_of_blocks));
    shared_of = static_cast<uint8_t **>(malloc(blocks * sizeof *shared_of));
    if (!fibres) fibres = static_cast<fibre *>(calloc(MAX_FIBRES, sizeof *fibres));
    if (!fibres || !order_of_blocks || !shared_of) stop("no memory for a launch of %u blocks", blocks);
    for (unsigned i = 0; i < blocks; i++) {
        order_of_blocks[i] = i;
#if defined(HARNESS_ADDRESS_SANITIZER)
        shared_of[i] = static_cast<uint8_t *>(malloc(shared_bytes ? shared_bytes : 1));
#else
        shared_of[i] = static_cast<uint8_t *>(malloc(shared_bytes + 2 * GUARD_BYTES)) + GUARD_BYTES;
        memset(shared_of[i] - GUARD_BYTES, GUARD, GUARD_BYTES);
        memset(shared_of[i] + shared_bytes, GUARD, GUARD_BYTES);
#endif
        memset(shared_of[i], GARBAGE, shared_bytes);
    }
    for (unsigned i = blocks; i > 1;
         i--) { /* mostly in order, as a device begins them, but not by any rule */
        unsigned j = random_below(4) ? i - 1 : random_below(i), swapped = order_of_blocks[j];
        order_of_blocks[j] = order_of_blocks[i - 1];
        order_of_blocks[i - 1] = swapped;
    }
    unsigned n_here = blocks < n_resident ? blocks : n_resident;
    for (; n_fibres < n_here * threads; n_fibres++) make_fibre(&fibres[n_fibres]);
    for (unsigned s = 0; s < n_here; s++) begin_block(s);
    release(&launch_order);
#if defined(HARNESS_THREAD_SANITIZER)
    host.fibre = __tsan_get_current_fiber();
#endif
    if (on_begin) on_begin(name);
    unsigned i = random_below(n_waiting);
    current = waiting[i];
    waiting[i] = waiting[--n_waiting];
    switch_to(&host, &current->own);
    acquire(&launch_order);
    if (on_end) on_end();
    for (unsigned b = 0; b < blocks; b++)
#if defined(HARNESS_ADDRESS_SANITIZER)
        free(shared_of[b]);
#else
        free(shared_of[b] - GUARD_BYTES);
#endif
    free(order_of_blocks);
    free(shared_of);
}

} // namespace harness
