/* Inside of the fake runtime: one state for all files. */
#ifndef TAGC_TESTS_FAKE_PRIVATE_H
#define TAGC_TESTS_FAKE_PRIVATE_H

#include "fake_runtime.h"

#include <pthread.h>
#include <signal.h>

enum {
    OK = 0,
    INVALID_VALUE = 1,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    TO_DEVICE = 1,
    TO_HOST = 2,
    MAX_STREAMS = 64,
    MAX_EVENTS = 1024,
    MAX_BLOCKS = 1024,
    MAX_MISTAKES = 64,
    MISTAKE_BYTES = 200,
    MAX_RECORDS = 1 << 16,
    MAX_FAILURES = 8,
};
enum { KERNEL, COPY, RECORD, WAIT, HOST_FUNCTION, FREE, FILL };

typedef struct block {
    char *user, *alias; /* the same memory twice: as the host sees it, and as the device does */
    size_t n_bytes, n_mapped;
    int is_pinned, device;
    volatile int is_freed, n_copies; /* under way */
    int is_ordered;                  /* by cudaMallocAsync */
} block;

typedef struct op {
    struct op *next;
    int kind;
    void (*function)(void *);
    void *arg;
    char *to;
    const char *from;
    size_t n_bytes;
    int copy_kind, has_started, byte;
    struct event *event;
    int record; /* of that event */
} op;

typedef struct event {
    int is_live, n_records; /* asked for */
    char *is_done;          /* (MAX_RECORDS) by record */
} event;

typedef struct stream {
    int is_live, device, is_busy; /* busy: its first op is a host function under way */
    op *first, **last;
} stream;

typedef struct device {
    int number, stopping, n_demands, n_running; /* host functions */
    int broken;
    uint64_t random;
    pthread_t worker;
    int has_worker;
    stream standard; /* stream NULL */
} device;

typedef struct failure {
    char function[32]; /* "": none */
    int n, code;
} failure;

struct fake_state {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    device devices[FAKE_MAX_DEVICES];
    int n_devices, one_host_thread, host_as_device, version;
    void *capturing; /* a stream */
    fake_pace pace;
    stream streams[MAX_STREAMS];
    event events[MAX_EVENTS];
    block blocks[MAX_BLOCKS];
    volatile int n_blocks;
    int n_streams, n_events;
    failure failures[MAX_FAILURES];
    uint64_t n_allocs, n_copied;
};
extern struct fake_state fake;
extern _Thread_local int current_device, in_host_function, in_kernel;

/* ---- fake_memory.c; with the lock where nothing else is said ---- */

void mistake(const char *text); /* from a signal handler, too, and without the lock */
void forget_mistakes(void);
void catch_faults(void); /* each time: cmocka has a handler of its own for each test */
block *block_of(const void *address);
block *map(size_t n_bytes, int is_pinned);
void unmap(void *memory, int is_pinned);
void unmap_all(void);
/* Returns what the device sees at an address that copies use; NULL, and a mistake is recorded, if it sees nothing. */
char *seen(const void *address, size_t n_bytes, int is_pinned);

#endif
