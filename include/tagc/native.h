/* tagc over TCP, without MPI and without callbacks. libtagc has it if it was built with libuv (cmake -DTAGC_NATIVE=ON).
 *
 *   1. Every rank opens a port:                      tagc_native_open
 *   2. Ranks tell each other their addresses:        tagc_native_address, and whatever the job has, such as a store
 *   3. Every rank connects to all others:            tagc_native_connect
 *   4. The connections become a comm:                tagc_comm_create_native
 *
 * A connection opens only if both ends prove that they have the right key, which they do not show (docs/reference/native.md). The
 * bytes that follow are neither encrypted nor authenticated, unless options.tls is 1. */
#ifndef TAGC_NATIVE_H
#define TAGC_NATIVE_H

#include "tagc/tagc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What tagc_native_address writes, and the length of a key. */
#define TAGC_NATIVE_ADDRESS_BYTES 32
#define TAGC_NATIVE_KEY_BYTES 32

typedef struct tagc_native tagc_native;

typedef struct tagc_native_options {
    /* Written by _init. */
    size_t struct_bytes;
    /* Where this rank listens: an address in numbers, but not 0.0.0.0, :: or fe80::; or names of interfaces separated by
     * commas, of which the first that is up and has an address counts. Default NULL: the first interface other than
     * loopback, else loopback. */
    const char *local;
    /* 4 (IPv4), 6 (IPv6), or 0 (default): what `local` has, IPv4 if it has both. */
    int family;
    /* Connections with each peer; a large message travels over all of them. The same on all ranks. [1, 16], default 1. */
    int n_sockets;
    /* The numbers by which texts of errors name the ranks, (W); copied. Default NULL: 0 to W - 1. */
    const int32_t *names;
    /* 1: connections are encrypted and authenticated by TLS 1.3, from the keys of _connect alone. The same on all ranks. Then _open is
     * TAGC_ERR_UNSUPPORTED where libtagc was built without OpenSSL's headers, or this process cannot load libssl. Default 0. */
    uint64_t tls;
    /* Threads that send and receive: the comm's own, and others that take some of the connections with each peer, so that at most
     * n_sockets of them have work. Ranks may differ. [0, 8]; default 0: by the rate of this rank's interface, as far as the system tells
     * it, one for each 15 Gbit/s that the ranks of this host have each, at most 4, and half of this rank's share of the cores. */
    uint64_t n_threads;
} tagc_native_options;

TAGC_API void tagc_native_options_init_sized(tagc_native_options *options, size_t struct_bytes);
#define tagc_native_options_init(options) tagc_native_options_init_sized((options), sizeof *(options))

/* Opens a port for this rank. `options` may be NULL. world_size is in [1, 65536]. TAGC_ERR_UNSUPPORTED if this libtagc
 * was built without it. */
TAGC_API tagc_status tagc_native_open(const tagc_native_options *options, int rank, int world_size,
                                      tagc_native **out);

/* Writes TAGC_NATIVE_ADDRESS_BYTES bytes, for the other ranks. */
TAGC_API tagc_status tagc_native_address(const tagc_native *native, void *address);

/* Collective. Connects to all other ranks, and closes the port. `addresses` is (W, TAGC_NATIVE_ADDRESS_BYTES) in rank
 * order. `keys` is (W, 2, TAGC_NATIVE_KEY_BYTES): with keys[r][0] this rank proves itself to rank r, and with keys[r][1]
 * rank r to this one. Derive them from a secret of the job and a name of this comm, such as by HMAC-SHA-256, so that
 * nobody else can guess them. timeout_s is in (0, 1e6]. */
TAGC_API tagc_status tagc_native_connect(tagc_native *native, const void *addresses, const void *keys,
                                         double timeout_s);

/* Returns how many connections did not prove in time that they have the right key, and were refused. */
TAGC_API uint64_t tagc_native_refused(const tagc_native *native);

/* On success the comm owns `native`. After tagc_native_connect, and once: TAGC_ERR_STATE otherwise. `options` may be NULL. */
TAGC_API tagc_status tagc_comm_create_native(tagc_native *native, const tagc_comm_options *options,
                                             tagc_comm **out);

/* Accepts NULL. Not after tagc_comm_create_native has succeeded. */
TAGC_API void tagc_native_destroy(tagc_native *native);

#ifdef __cplusplus
}
#endif

#endif
