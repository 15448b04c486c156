/* The port of a rank: which interface it listens on, and what other ranks need to know of it. */
#include "core/sized.h"
#include "transport/native/native.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { BACKLOG = 1024, SHOWN_BYTES = 256, OWN_FILES = 8 /* of a port and its loop */ };

static const tagc_native_options default_options = {.n_sockets = 1};
static const tagc_sized options_struct = {
    "tagc_native_options", sizeof(tagc_native_options),
    offsetof(tagc_native_options, names) + sizeof(const int32_t *), /* the last field of the first release */
    &default_options};

void tagc_native_options_init_sized(tagc_native_options *options, size_t struct_bytes) {
    tagc_sized_init(&options_struct, options, struct_bytes);
}

static tagc_status read_options(const tagc_native_options *from, tagc_native_options *options) {
    tagc_native_options_init(options);
    if (from) TAGC_TRY(tagc_sized_read(&options_struct, from, options));
    if (options->family != 0 && options->family != 4 && options->family != 6)
        return tagc_fail(TAGC_ERR_ARGUMENT, "options.family is %d, must be 0, 4 or 6", options->family);
    if (options->n_sockets < 1 || options->n_sockets > NATIVE_MOST_SOCKETS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "options.n_sockets is %d, must be in [1, %d]", options->n_sockets,
                         NATIVE_MOST_SOCKETS);
    if (options->n_threads > NATIVE_MOST_THREADS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "options.n_threads is %llu, must be in [0, %d]",
                         (unsigned long long)options->n_threads, NATIVE_MOST_THREADS);
    if (options->tls > 1)
        return tagc_fail(TAGC_ERR_ARGUMENT, "options.tls is %llu, must be 0 or 1",
                         (unsigned long long)options->tls);
    return TAGC_OK;
}

/* ---- interfaces ---- */

static int family_of(const struct sockaddr *address) {
    return address->sa_family == AF_INET ? 4 : address->sa_family == AF_INET6 ? 6 : 0;
}

/* "Any address" is every host's own; link-local ones mean something only together with an interface of the other host. */
static int is_callable(const struct sockaddr_storage *address) {
    const struct in6_addr *six = &((const struct sockaddr_in6 *)address)->sin6_addr;
    if (address->ss_family == AF_INET)
        return ((const struct sockaddr_in *)address)->sin_addr.s_addr != INADDR_ANY;
    return !IN6_IS_ADDR_UNSPECIFIED(six) && !IN6_IS_ADDR_LINKLOCAL(six);
}

static void keep(const uv_interface_address_t *found, struct sockaddr_storage *to) {
    memset(to, 0, sizeof *to);
    if (family_of((const struct sockaddr *)&found->address) == 4)
        memcpy(to, &found->address.address4, sizeof found->address.address4);
    else
        memcpy(to, &found->address.address6, sizeof found->address.address6);
}

static int is_usable(const uv_interface_address_t *found, int family) {
    struct sockaddr_storage address;
    keep(found, &address);
    return family_of((const struct sockaddr *)&address) == family && is_callable(&address);
}

/* Writes "lo (127.0.0.1), eth0 (10.0.0.1)". */
static void show(const uv_interface_address_t *all, int n, int family, char *text, size_t n_bytes) {
    size_t at = 0;
    text[0] = 0;
    for (int i = 0; i < n && at < n_bytes; i++) {
        char address[INET6_ADDRSTRLEN] = "";
        if (family ? !is_usable(&all[i], family) : !is_usable(&all[i], 4) && !is_usable(&all[i], 6)) continue;
        uv_ip_name((const struct sockaddr *)&all[i].address, address, sizeof address);
        int wrote = snprintf(text + at, n_bytes - at, "%s%s (%s)", at ? ", " : "", all[i].name, address);
        at += wrote > 0 ? (size_t)wrote : 0;
    }
    if (!text[0]) snprintf(text, n_bytes, "none");
}

static int has_name(const uv_interface_address_t *found, const char *name, size_t n_bytes) {
    return strlen(found->name) == n_bytes && strncmp(found->name, name, n_bytes) == 0;
}

/* Of the interface with that name, or without a name of any that is (not) loopback. */
static int look(const uv_interface_address_t *all, int n, int family, const char *name, size_t n_bytes,
                int is_internal, struct sockaddr_storage *to) {
    for (int i = 0; i < n; i++) {
        if (!is_usable(&all[i], family)) continue;
        if (name ? !has_name(&all[i], name, n_bytes) : all[i].is_internal != is_internal) continue;
        keep(&all[i], to);
        return 1;
    }
    return 0;
}

static int look_for(const uv_interface_address_t *all, int n, int family, const char *name, size_t n_bytes,
                    int is_internal, struct sockaddr_storage *to) {
    return (family != 6 && look(all, n, 4, name, n_bytes, is_internal, to)) ||
           (family != 4 && look(all, n, 6, name, n_bytes, is_internal, to));
}

static int find_by_names(const uv_interface_address_t *all, int n, const tagc_native_options *options,
                         struct sockaddr_storage *to) {
    for (const char *name = options->local; *name;) {
        size_t n_bytes = strcspn(name, ",");
        if (n_bytes && look_for(all, n, options->family, name, n_bytes, 0, to)) return 1;
        name += n_bytes + (name[n_bytes] == ',');
    }
    return 0;
}

static tagc_status find_local(const tagc_native_options *options, struct sockaddr_storage *to) {
    memset(to, 0, sizeof *to);
    const char *local = options->local;
    int is_address = local && (uv_ip4_addr(local, 0, (struct sockaddr_in *)to) == 0 ||
                               uv_ip6_addr(local, 0, (struct sockaddr_in6 *)to) == 0);
    int family = is_address ? family_of((const struct sockaddr *)to) : 0;
    if (is_address && options->family && options->family != family)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "options.local is %s, an address of IPv%d, and options.family is %d", local, family,
                         options->family);
    if (is_address && !is_callable(to))
        return tagc_fail(
            TAGC_ERR_ARGUMENT,
            "options.local is %s, which other hosts cannot call: take an interface's name or address", local);
    if (is_address) return TAGC_OK;
    uv_interface_address_t *all = NULL;
    int n = 0, error = uv_interface_addresses(&all, &n);
    if (error < 0)
        return tagc_fail(TAGC_ERR_TRANSPORT, "the interfaces of this host cannot be listed: %s",
                         uv_strerror(error));
    int is_found = local ? find_by_names(all, n, options, to)
                         : look_for(all, n, options->family, NULL, 0, 0, to) ||
                               look_for(all, n, options->family, NULL, 0, 1, to);
    char shown[SHOWN_BYTES], wanted[16] = "";
    show(all, n, options->family, shown, sizeof shown);
    uv_free_interface_addresses(all, n);
    if (is_found) return TAGC_OK;
    if (options->family) snprintf(wanted, sizeof wanted, " of IPv%d", options->family);
    return tagc_fail(TAGC_ERR_ARGUMENT,
                     "no interface %s%swith an address%s is up on this host; there are: %s",
                     local ? local : "", local ? " " : "", wanted, shown);
}

/* ---- the port ---- */

int tagc_native_free_files(int most) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return most;
    int n = 0;
    for (rlim_t fd = 0; fd < limit.rlim_cur && fd <= INT_MAX && n < most; fd++)
        n += fcntl((int)fd, F_GETFD) < 0;
    return n;
}

/* Raises the soft limit by so many files, up to the hard one. */
static void raise_limit(int n_more) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
    rlim_t wanted = limit.rlim_cur + (rlim_t)n_more;
    limit.rlim_cur = wanted < limit.rlim_max ? wanted : limit.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
}

/* A rank that can open no more files hangs up on its callers, who cannot know why. */
static tagc_status check_files(int world_size, int n_sockets) {
    int n_needed = (world_size - 1) * n_sockets + OWN_FILES, n_free = tagc_native_free_files(n_needed);
    if (n_free < n_needed) {
        raise_limit(n_needed - n_free);
        n_free = tagc_native_free_files(n_needed);
    }
    if (n_free == n_needed) return TAGC_OK;
    return tagc_fail(
        TAGC_ERR_MEMORY,
        "%d connections with each of %d other ranks take %d files, and this process may open %d more "
        "(ulimit -n)",
        n_sockets, world_size - 1, n_needed, n_free);
}

static tagc_status listen_at(tagc_native *self) {
    struct sockaddr *address = (struct sockaddr *)&self->address;
    int error = uv_tcp_init(&self->loop, &self->listener);
    if (error < 0) return tagc_fail(TAGC_ERR_MEMORY, "no socket: %s", uv_strerror(error));
    self->is_listening = 1; /* there is something to close */
    self->listener.data = self;
    tagc_native_lock_sockets();
    error = uv_tcp_bind(&self->listener, address, family_of(address) == 6 ? UV_TCP_IPV6ONLY : 0);
    tagc_native_note_socket(&self->listener, &self->listener_held);
    tagc_native_unlock_sockets();
    if (error == 0) error = uv_listen((uv_stream_t *)&self->listener, BACKLOG, tagc_native_on_caller);
    int n_bytes = sizeof self->address;
    if (error == 0) error = uv_tcp_getsockname(&self->listener, address, &n_bytes);
    if (error == 0) return TAGC_OK;
    char text[INET6_ADDRSTRLEN] = "";
    uv_ip_name(address, text, sizeof text);
    return tagc_fail(error == UV_EADDRNOTAVAIL ? TAGC_ERR_ARGUMENT : TAGC_ERR_TRANSPORT,
                     "no port can be opened at %s: %s", text, uv_strerror(error));
}

static tagc_native *lay_out(tagc_arena *arena, size_t world_size) {
    tagc_native *self = tagc_arena_take(arena, 1, sizeof *self);
    native_peer *peers = tagc_arena_take(arena, world_size, sizeof *peers);
    int32_t *names = tagc_arena_take(arena, world_size, sizeof *names);
    if (!self) return NULL;
    self->peers = peers;
    self->names = names;
    return self;
}

tagc_status tagc_native_open(const tagc_native_options *options, int rank, int world_size,
                             tagc_native **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    tagc_native_options checked;
    TAGC_TRY(read_options(options, &checked));
    if (world_size < 1 || world_size > 65536)
        return tagc_fail(TAGC_ERR_ARGUMENT, "world_size is %d, must be in [1, 65536]", world_size);
    if (rank < 0 || rank >= world_size)
        return tagc_fail(TAGC_ERR_ARGUMENT, "rank is %d, must be in [0, %d)", rank, world_size);
    struct sockaddr_storage address;
    TAGC_TRY(find_local(&checked, &address));
    TAGC_TRY(check_files(world_size, checked.n_sockets));
    tagc_arena arena = {0};
    lay_out(&arena, (size_t)world_size);
    void *memory;
    TAGC_TRY(tagc_memory_create(arena.n_bytes, "native transport", &memory));
    arena = (tagc_arena){.base = memory};
    tagc_native *self = lay_out(&arena, (size_t)world_size);
    self->rank = rank;
    self->world_size = world_size;
    self->n_sockets = checked.n_sockets;
    self->n_threads = (int)checked.n_threads;
    self->address = address;
    self->giver = self->failed_rank = -1;
    self->process = getpid();
    for (int r = 0; r < world_size; r++) {
        self->names[r] = checked.names ? checked.names[r] : r;
        self->peers[r].rank = r;
    }
    pthread_mutex_init(&self->lock, NULL);
    pthread_mutex_init(&self->state, NULL);
    int error = uv_loop_init(&self->loop);
    self->has_loop = error == 0;
    tagc_status status =
        error == 0 ? TAGC_OK : tagc_fail(TAGC_ERR_MEMORY, "no event loop: %s", uv_strerror(error));
    if (status == TAGC_OK && checked.tls) status = tagc_native_tls_open(&self->tls);
    if (status == TAGC_OK) status = listen_at(self);
    if (status != TAGC_OK) {
        tagc_native_destroy(self);
        return status;
    }
    *out = self;
    return TAGC_OK;
}

/* ---- its address ---- */

tagc_status tagc_native_address(const tagc_native *native, void *address) {
    if (!native) return tagc_fail(TAGC_ERR_ARGUMENT, "native is NULL");
    if (!address) return tagc_fail(TAGC_ERR_ARGUMENT, "address is NULL");
    unsigned char *to = address;
    const struct sockaddr_in *four = (const struct sockaddr_in *)&native->address;
    const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)&native->address;
    int family = family_of((const struct sockaddr *)&native->address);
    memset(to, 0, TAGC_NATIVE_ADDRESS_BYTES);
    memcpy(to, "tagc", 4);
    to[4] = NATIVE_VERSION;
    to[5] = (unsigned char)family;
    to[6] = (unsigned char)native->n_sockets;
    to[7] = native->tls != NULL;
    memcpy(to + 8, family == 4 ? (const void *)&four->sin_port : &six->sin6_port, 2);
    memcpy(to + 16, family == 4 ? (const void *)&four->sin_addr : &six->sin6_addr, family == 4 ? 4 : 16);
    return TAGC_OK;
}

tagc_status tagc_native_read_address(const tagc_native *self, int rank, const unsigned char *from,
                                     struct sockaddr_storage *to) {
    struct sockaddr_in *four = (struct sockaddr_in *)to;
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)to;
    int own = family_of((const struct sockaddr *)&self->address), name = tagc_native_name(self, rank);
    memset(to, 0, sizeof *to);
    if (memcmp(from, "tagc", 4) != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "the address of rank %d does not come from tagc_native_address",
                         name);
    if (from[4] != NATIVE_VERSION)
        return tagc_fail(TAGC_ERR_MISMATCH,
                         "rank %d speaks version %d of tagc's protocol, this rank version %d", name, from[4],
                         NATIVE_VERSION);
    if (from[6] != self->n_sockets)
        return tagc_fail(TAGC_ERR_MISMATCH, "options.n_sockets is %d on rank %d and %d on this rank", from[6],
                         name, self->n_sockets);
    if (from[7] != (self->tls != NULL))
        return tagc_fail(TAGC_ERR_MISMATCH, "options.tls is %d on rank %d and %d on this rank", from[7], name,
                         self->tls != NULL);
    if (from[5] != own)
        return tagc_fail(TAGC_ERR_MISMATCH,
                         "rank %d listens on an address of IPv%d, this rank on one of IPv%d", name, from[5],
                         own);
    if (own == 4) {
        four->sin_family = AF_INET;
        memcpy(&four->sin_port, from + 8, 2);
        memcpy(&four->sin_addr, from + 16, 4);
    } else {
        six->sin6_family = AF_INET6;
        memcpy(&six->sin6_port, from + 8, 2);
        memcpy(&six->sin6_addr, from + 16, 16);
    }
    return TAGC_OK;
}
