/* A CUDA runtime of no device, for tests: a shared library with the functions that lib/gpu/cuda.c binds, over queues,
 * threads and memory of its own.
 *
 * What it does to find mistakes:
 *   order     work of different streams runs in a random order (seeded), whatever waits and events allow. A copy takes time:
 *             other work runs between its start and its end. FAKE_LATE: nothing runs before somebody waits for the device.
 *   memory    of the device lies behind pages that the host cannot touch; kernels see it through fake_view(). Pinned memory
 *             cannot be touched while a copy from or to it is under way, nor after it was freed.
 *   calls     arguments, lives of streams, events and memory, calls of the runtime from a host function.
 *   threads   one thread of a device calls the host functions of all its streams, as a driver may; or one per stream.
 *   flags     a flag that a stream writes is seen late, after other work and other streams' flags; a stream that waits for one looks now
 *             and then. Its address must be the device's, which is another than the host's.
 *   manners   fake_behave(): what else a driver may do. A call that would wait for ever gives up after fake_limit(), prints who waits for
 *             whom, and is a mistake.
 * A mistake is recorded, with a text, and the program goes on. */
#ifndef TAGC_TESTS_FAKE_RUNTIME_H
#define TAGC_TESTS_FAKE_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#define FAKE_API __attribute__((visibility("default")))

enum { FAKE_MAX_DEVICES = 4 };

typedef enum fake_pace {
    FAKE_LATE = 0,  /* work runs while somebody waits: in a synchronize, or in fake_settle() */
    FAKE_EAGER = 1, /* work runs by itself, at random times */
} fake_pace;

/* Forgets all streams, memory and mistakes. Nothing of before may be in use. */
FAKE_API void fake_reset(uint64_t seed, int n_devices, fake_pace pace, int one_host_thread);

/* Bad manners, by words with commas between them; "": none.
 *   blocking-alloc  cudaMalloc, cudaFree, cudaHostAlloc and cudaFreeHost wait until the device is idle, and keep all other calls out
 *   lazy-loading    so does the first launch of each kernel
 *   late-flags      flags are seen after most other work, and waiting streams look seldom
 *   launch-blocking  the launch of a kernel returns when it has run, and keeps all other calls out meanwhile
 *   copy-blocking    so does each copy, and each fill
 *   connections=N   the streams of a device share N queues. What comes first in a queue holds up what was enqueued after it.
 *   depth=N         a call that finds N pieces of work in its queue waits for room, and keeps all other calls out
 *   all             all of them but the two before, with connections=1 and depth=8
 * A reset takes them from the variables FAKE_MANNERS, CUDA_LAUNCH_BLOCKING and CUDA_DEVICE_MAX_CONNECTIONS. Other words end the program. */
FAKE_API void fake_behave(const char *words);
/* How long a call may wait for a device that cannot go on by itself; a reset makes it 60,000. */
FAKE_API void fake_limit(int ms);
/* Calls that wait now, and those since the reset that had to wait until the device was idle. */
FAKE_API int fake_n_waiting(void);
FAKE_API int fake_n_waited(void);
/* Streams with work that could go on if no other stream of its connection waited for a flag. */
FAKE_API int fake_n_held_up(void);
/* Returns who waited for whom when a call gave up first; "": none did. */
FAKE_API const char *fake_report(void);

/* ---- memory of the current device: cudaMalloc, cudaFree ---- */
FAKE_API void *fake_alloc(size_t n_bytes);
FAKE_API void fake_free(void *memory);
/* Returns what a kernel sees of it. A call outside of kernels is a mistake. */
FAKE_API void *fake_view(void *memory);
/* Takes addresses that were never allocated for memory of device 0 from now on: for tests with tensors in host memory. */
FAKE_API void fake_take_host_as_device(void);

/* ---- work ---- */
FAKE_API int fake_stream(void **stream);   /* of the current device, of the least priority, which is 0 */
FAKE_API int fake_n_streams(int priority); /* that exist; the greatest priority is -5 */
FAKE_API int
fake_load(void (*kernel)(void *arg)); /* cudaFuncGetAttributes: what else its first launch does */
FAKE_API int fake_launch(void *stream, void (*kernel)(void *arg), void *arg);
/* The same as calls of the driver, which fail, and are a mistake, in a thread in which no context is current. */
FAKE_API int fake_load_by_driver(void (*kernel)(void *arg));
FAKE_API int fake_launch_by_driver(void *stream, void (*kernel)(void *arg), void *arg);

/* Lets everything of the current device run that can, until only host functions that sleep and flags hold it up:
 * n_sleeping() must come to the number of host functions under way. NULL: there are none. */
FAKE_API void fake_settle(int (*n_sleeping)(void *context), void *context);

/* Returns 1 if nothing of that device can run, and counts the host functions under way. */
FAKE_API int fake_is_idle(int device, int *n_host_functions);

/* ---- calls of CUDA beyond those that libtagc binds ---- */
FAKE_API int cudaEventQuery(void *event);
FAKE_API int cudaLaunchHostFunc(void *stream, void (*function)(void *arg), void *arg);
FAKE_API int cudaHostGetDevicePointer(void **address, void *memory, unsigned flags);
/* Those of the driver: flags and contexts. Their names are not exported, since a process may have a driver of its own. A version that the fake driver, one of 13.0, does not know is an invalid value. */
FAKE_API int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                              unsigned long long flags, int *status);

/* ---- failures ---- */

/* Lets the n-th call (from 1) of that function from now on return `code` and do nothing. */
FAKE_API void fake_fail(const char *function, int n, int code);
/* Breaks the device, as a kernel's bad access does: it does nothing any more, and every call returns `code`. */
FAKE_API void fake_break(int device, int code);
FAKE_API void fake_set_version(int version);
/* Has the driver lack stream memory operations until the next reset. */
FAKE_API void fake_set_driver_old(void);
/* Has the stream captured into a graph from now on; NULL: none. What is put into it then is a mistake. */
FAKE_API void fake_capture(void *stream);

/* ---- what was found ---- */
FAKE_API int fake_n_mistakes(void);
FAKE_API const char *fake_mistake(int i);
FAKE_API uint64_t fake_n_allocs(void);        /* calls of cudaHostAlloc and cudaMallocAsync since the reset */
FAKE_API uint64_t fake_n_copied(void);        /* bytes between host and device since the reset */
FAKE_API uint64_t fake_n_device_blocks(void); /* of cudaMallocAsync, that exist */
FAKE_API unsigned fake_contexts(void);        /* a bit for each device that has one since the reset */
FAKE_API uint64_t
fake_n_live(void); /* pinned blocks, streams and events that exist, and contexts that are retained */

#endif
