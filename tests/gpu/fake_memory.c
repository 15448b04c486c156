/* Memory of the fake runtime: mapped twice, as the host sees it and as the device does, and the mistakes that it finds. */
#include "fake_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static char mistakes[MAX_MISTAKES][MISTAKE_BYTES];
static volatile int n_mistakes;
static struct sigaction previous; /* handler of SIGSEGV */

/* ---- mistakes ---- */

void mistake(const char *text) { /* from a signal handler, too */
    int i = __atomic_fetch_add(&n_mistakes, 1, __ATOMIC_SEQ_CST);
    if (i < MAX_MISTAKES) strncpy(mistakes[i], text, MISTAKE_BYTES - 1);
}

int fake_n_mistakes(void) {
    return n_mistakes;
}

const char *fake_mistake(int i) {
    return i >= 0 && i < n_mistakes && i < MAX_MISTAKES ? mistakes[i] : "";
}

/* ---- memory ---- */

block *block_of(const void *address) {
    for (int i = 0; i < fake.n_blocks; i++) {
        block *one = &fake.blocks[i];
        if ((const char *)address >= one->user && (const char *)address < one->user + one->n_mapped)
            return one;
    }
    return NULL;
}

block *block_seen_at(const void *alias) {
    for (int i = 0; i < fake.n_blocks; i++) {
        block *one = &fake.blocks[i];
        if ((const char *)alias >= one->alias && (const char *)alias < one->alias + one->n_mapped) return one;
    }
    return NULL;
}

static void on_fault(int number, siginfo_t *info, void *context) {
    block *one = block_of(info->si_addr);
    if (!one) {
        if (previous.sa_flags & SA_SIGINFO && previous.sa_sigaction) {
            previous.sa_sigaction(number, info, context);
        } else {
            signal(SIGSEGV, SIG_DFL); /* the instruction comes again */
        }
        return;
    }
    mistake(!one->is_pinned ? "the host touched the device's memory"
            : one->is_freed ? "pinned memory used after it was freed"
                            : "the host touched pinned memory while a copy was under way");
    mprotect(one->user, one->n_mapped, PROT_READ | PROT_WRITE);
}

block *map(size_t n_bytes, int is_pinned) {
    if (fake.n_blocks == MAX_BLOCKS || n_bytes == 0) return NULL;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), n_mapped = (n_bytes + page - 1) / page * page;
    int file = memfd_create("fake device", 0);
    if (file < 0 || ftruncate(file, (off_t)n_mapped)) abort();
    char *alias = mmap(NULL, n_mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    char *user = mmap(NULL, n_mapped, is_pinned ? PROT_READ | PROT_WRITE : PROT_NONE, MAP_SHARED, file, 0);
    close(file);
    if (alias == MAP_FAILED || user == MAP_FAILED) abort();
    memset(alias, 0xcc, n_mapped);
    block *one = &fake.blocks[fake.n_blocks];
    *one = (block){.user = user,
                   .alias = alias,
                   .n_bytes = n_bytes,
                   .n_mapped = n_mapped,
                   .is_pinned = is_pinned,
                   .n_copies = is_pinned ? calloc(n_mapped / page, sizeof(int)) : NULL,
                   .device = current_device};
    __atomic_store_n(&fake.n_blocks, fake.n_blocks + 1, __ATOMIC_SEQ_CST);
    return one;
}

/* Whether any work still has to do with it. With the lock. */
static int is_in_use(const block *one) {
    for (int s = 0; s < fake.n_streams + FAKE_MAX_DEVICES; s++) {
        const stream *in = s < fake.n_streams ? &fake.streams[s] : &fake.devices[s - fake.n_streams].standard;
        for (const op *work = in->first; work; work = work->next) {
            if (work->kind == COPY && (block_of(work->to) == one || block_of(work->from) == one)) return 1;
            if ((work->kind == WRITE_FLAG || work->kind == WAIT_FLAG) && block_seen_at(work->to) == one)
                return 1;
        }
        for (const posted *flag = in->written; flag; flag = flag->next)
            if (block_seen_at(flag->at) == one) return 1;
    }
    return 0;
}

void unmap(void *memory, int is_pinned) {
    block *one = block_of(memory);
    if (!one || one->user != memory || one->is_pinned != is_pinned)
        mistake("freed what was never allocated");
    else if (one->is_freed)
        mistake("freed twice");
    else {
        if (is_in_use(one)) mistake("freed while a copy or a flag is to come");
        one->is_freed = 1;
        mprotect(one->user, one->n_mapped, PROT_NONE);
    }
}

FAKE_API int cudaMalloc(void **out, size_t n_bytes) {
    int code = enter("Malloc");
    if (!code) code = wait_for_idle("Malloc", fake.manners.blocking_alloc);
    block *one = code ? NULL : map(n_bytes, 0);
    *out = one ? one->user : NULL;
    return leave(code ? code : one ? OK : INVALID_VALUE);
}

FAKE_API int cudaFree(void *memory) {
    int code = enter("Free");
    if (!code) code = wait_for_idle("Free", fake.manners.blocking_alloc);
    if (memory) unmap(memory, 0);
    return leave(code);
}

FAKE_API int cudaHostAlloc(void **out, size_t n_bytes, unsigned flags) {
    int code = enter("HostAlloc");
    if (!code) code = wait_for_idle("HostAlloc", fake.manners.blocking_alloc);
    block *one = code ? NULL : map(n_bytes, 1);
    if (one) {
        one->is_mapped = (flags & MAPPED) != 0;
        *out = one->user;
    }
    fake.n_allocs += one != NULL;
    return leave(code ? code : one ? OK : INVALID_VALUE);
}

FAKE_API int cudaFreeHost(void *memory) {
    int code = enter("FreeHost");
    if (!code) code = wait_for_idle("FreeHost", fake.manners.blocking_alloc);
    unmap(memory, 1);
    return leave(code);
}

/* Another address than the host's, so that who mixes them up is found. */
int cudaHostGetDevicePointer(void **out, void *host, unsigned flags) {
    int code = enter("HostGetDevicePointer");
    const block *one = block_of(host);
    *out = NULL;
    if (!code && (!one || !one->is_pinned || !one->is_mapped || one->is_freed || flags)) code = INVALID_VALUE;
    if (!code) *out = one->alias + ((char *)host - one->user);
    return leave(code);
}

void *fake_alloc(size_t n_bytes) {
    void *memory;
    return cudaMalloc(&memory, n_bytes) ? NULL : memory;
}

void fake_free(void *memory) {
    cudaFree(memory);
}

void *fake_view(void *memory) {
    block *one = block_of(memory);
    if (!in_kernel) mistake("the device's memory looked at outside of a kernel");
    if (!one || one->is_pinned) return memory;
    if (one->is_freed) mistake("the device's memory used after it was freed");
    return one->alias + ((char *)memory - one->user);
}

void fake_take_host_as_device(void) {
    fake.host_as_device = 1;
}

char *seen(const void *address, size_t n_bytes, int is_pinned) {
    block *one = block_of(address);
    if (!one && fake.host_as_device && !is_pinned) return (char *)address;
    if (!one || one->is_pinned != is_pinned)
        mistake(is_pinned ? "a copy's host side is not pinned memory"
                          : "a copy's device side is not the device's memory");
    else if (one->is_freed)
        mistake("a copy from or to memory that was freed");
    else if ((const char *)address + n_bytes > one->user + one->n_bytes)
        mistake("a copy beyond the end of its memory");
    else
        return one->alias + ((const char *)address - one->user);
    return NULL;
}

uint32_t *seen_flag(uint64_t address) {
    char *at = (char *)(uintptr_t)address;
    block *one = block_seen_at(at);
    if (!one && (one = block_of(at)) != NULL) {
        if (one->is_pinned) {
            mistake("a flag at the host's address: cudaHostGetDevicePointer has the device's");
            return NULL;
        }
        at = one->alias + (at - one->user);
    }
    if (!one)
        mistake("a flag outside of the device's and the pinned memory");
    else if (one->is_freed)
        mistake("a flag in memory that was freed");
    else if (address % sizeof(uint32_t))
        mistake("a flag at an address that is no multiple of 4");
    else
        return (uint32_t *)(void *)at;
    return NULL;
}

void unmap_all(void) {
    for (int i = 0; i < fake.n_blocks; i++) {
        munmap(fake.blocks[i].user, fake.blocks[i].n_mapped);
        munmap(fake.blocks[i].alias, fake.blocks[i].n_mapped);
        free(fake.blocks[i].n_copies);
    }
    fake.n_blocks = 0;
}

void forget_mistakes(void) {
    n_mistakes = 0;
    memset(mistakes, 0, sizeof mistakes);
}

void catch_faults(void) {
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER}, old;
    sigaction(SIGSEGV, &action, &old);
    if (!(old.sa_flags & SA_SIGINFO) || old.sa_sigaction != on_fault) previous = old;
}
