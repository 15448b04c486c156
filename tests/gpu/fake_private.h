/* Inside of the fake runtime: one state for all files. */
#ifndef TAGC_TESTS_FAKE_PRIVATE_H
#define TAGC_TESTS_FAKE_PRIVATE_H

#include "fake_runtime.h"

#include <pthread.h>
#include <signal.h>

enum {
    OK = 0,
    INVALID_VALUE = 1,
    NO_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
    DRIVER_VERSION = 13000,
    LEAST_PRIORITY = 0,
    GREATEST_PRIORITY = -5,
    GAVE_UP = 999, /* cudaErrorUnknown: of a call that would have waited for ever */
    TO_DEVICE = 1,
    TO_HOST = 2,
    THERE = 3,
    MAPPED = 2, /* cudaHostAllocMapped */
    MAX_STREAMS = 64,
    MAX_EVENTS = 1024,
    MAX_BLOCKS = 1024,
    MAX_MISTAKES = 64,
    MISTAKE_BYTES = 200,
    MAX_RECORDS = 1 << 16,
    MAX_FAILURES = 8,
    MAX_KERNELS = 256,
    MAX_WAITS = 32,
    REPORT_BYTES = 4096,
};
enum { LIMIT_MS = 60000 }; /* of fake_limit(), before a reset, too */
enum { KERNEL, COPY, RECORD, WAIT, HOST_FUNCTION, FREE, FILL, WRITE_FLAG, WAIT_FLAG };

typedef struct block {
    char *user, *alias; /* the same memory twice: as the host sees it, and as the device does */
    size_t n_bytes, n_mapped;
    int is_pinned, is_mapped, device;
    volatile int is_freed;
    int is_ordered; /* by cudaMallocAsync */
    int *n_copies;  /* (pages) under way; of pinned memory */
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
    int record;     /* of that event */
    uint64_t order; /* among all work of the process */
    uint32_t value; /* of a flag at `to`, as the device sees it */
    int is_equal;   /* waits for the value itself, not for it or a later one */
    int n_polls;    /* that miss the flag, although it is there */
} op;

typedef struct event {
    int is_live, n_records; /* asked for */
    char *is_done;          /* (MAX_RECORDS) by record */
} event;

/* A flag that a stream has written, and that nobody sees yet. */
typedef struct posted {
    struct posted *next;
    uint32_t *at, value;
} posted;

typedef struct stream {
    int is_live, device, is_busy; /* busy: its first op is a host function under way */
    int number, n_ops, priority;
    op *first, **last;
    posted *written; /* the oldest first */
} stream;

typedef struct device {
    int number, stopping, n_demands, n_running; /* host functions */
    int broken;
    uint64_t random;
    pthread_t worker;
    int has_worker;
    int is_held; /* by a call that waits inside the driver and keeps all others out */
    pthread_t holder;
    stream standard; /* stream NULL */
} device;

/* A call that waits. */
typedef struct waiting {
    const char *function; /* NULL: none */
    const char *what;
    int device;
} waiting;

/* See fake_behave. */
typedef struct manners {
    int blocking_alloc, lazy_loading, late_flags, launch_blocking, copy_blocking;
    int n_connections, depth; /* 0: without a limit */
} manners;

typedef struct failure {
    char function[32]; /* "": none */
    int n, code;
} failure;

struct fake_state {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    device devices[FAKE_MAX_DEVICES];
    int n_devices, one_host_thread, host_as_device, version, is_driver_old;
    void *capturing; /* a stream */
    fake_pace pace;
    stream streams[MAX_STREAMS];
    event events[MAX_EVENTS];
    block blocks[MAX_BLOCKS];
    volatile int n_blocks;
    int n_streams, n_events;
    failure failures[MAX_FAILURES];
    uint64_t n_allocs, n_copied, n_pushed;
    unsigned contexts; /* a bit for each device */
    int n_retained;    /* of all contexts */
    manners manners;
    int limit_ms;
    void (*kernels[MAX_KERNELS])(void *); /* that were launched before */
    int n_kernels, n_waited;
    waiting waits[MAX_WAITS];
    char report[REPORT_BYTES];
};
extern struct fake_state fake;
extern _Thread_local int current_device, in_host_function, in_kernel;
extern _Thread_local void *current_context; /* a device; NULL: none */

/* ---- fake_work.c; with the lock ---- */

device *here(void); /* the current device, with its worker */
int is_over(const stream *one);
int is_idle(const device *on);
int is_moving(device *on); /* by itself */
uint64_t draw(device *on);
void drop(stream *one);
void stop(device *on); /* without the lock */

/* ---- fake_manners.c; with the lock ---- */

/* Takes the lock, and waits while another call keeps it out of the driver. Returns what the call must return at once, or OK. */
int enter(const char *function);
int leave(int code); /* gives the lock back; returns code */
/* Waits while work is asked for. Returns OK, or what the call must return. holds: keeps all other calls out meanwhile. */
int wait_until(device *on, const char *function, const char *what, int holds, int (*is_true)(const void *of),
               const void *of);
/* Waits until nothing is left to do, if the manners say so, and keeps all other calls out meanwhile. */
int wait_for_idle(const char *function, int if_so);
int load(void (*kernel)(void *)); /* before its launch */
int wait_for_room(const stream *in, const char *function);
/* Whether other streams of its connection let it come next. */
int is_its_turn(const stream *one);
void behave_as_told(void); /* by the environment */

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
/* Likewise for a flag. Its address is the device's. */
uint32_t *seen_flag(uint64_t address);
/* Returns the block that the device sees at that address. */
block *block_seen_at(const void *alias);

#endif
