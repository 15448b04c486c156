/* TLS 1.3 for the bytes of one connection, which go through memory: tls.c calls no socket. OpenSSL's headers are needed to build it, its
 * library to run it; that is loaded when the first one asks for it. Without the headers every function here fails, and says so.
 *
 * There are no certificates. Both ends have a key of their own for each connection, from the talk that opens it (connect.c), and TLS
 * accepts nothing else. Each connection has ephemeral keys, too, so that who learns the secret later cannot read what was recorded. */
#ifndef TAGC_TRANSPORT_NATIVE_TLS_H
#define TAGC_TRANSPORT_NATIVE_TLS_H

#include "core/status.h"

#include <stddef.h>
#include <stdint.h>

enum {
    TAGC_TLS_KEY_BYTES = 32,
    TAGC_TLS_RECORD_BYTES = 1 << 14,
    /* With AES-GCM a key may seal 2^24.5 records (RFC 8446, 5.5). */
    TAGC_TLS_RECORDS_OF_A_KEY = 1 << 22
};

typedef struct native_tls_context native_tls_context;

typedef struct native_tls {
    void *ssl, *in, *out; /* OpenSSL's; in and out: bytes as they travel */
    unsigned char key[TAGC_TLS_KEY_BYTES];
    uint64_t n_records; /* sealed with the key in use */
    unsigned char *sealed;
    size_t n_room;
    unsigned char opened[TAGC_TLS_RECORD_BYTES];
} native_tls;

/* TAGC_ERR_UNSUPPORTED without OpenSSL. */
tagc_status tagc_native_tls_open(native_tls_context **out);
void tagc_native_tls_close(native_tls_context *context); /* accepts NULL */

/* Returns NULL without memory. */
native_tls *tagc_native_tls_begin(native_tls_context *context, int is_caller, const unsigned char *key);
void tagc_native_tls_end(native_tls *tls); /* accepts NULL */

/* What has arrived. Returns 0 without memory. */
int tagc_native_tls_put(native_tls *tls, const void *bytes, size_t n_bytes);
/* Returns 1 when both ends have shown the key, 0 when more has to arrive, -1 if it will not be. */
int tagc_native_tls_shake(native_tls *tls);
/* Seals these bytes, behind what waits to be sent. Returns 0 on failure. */
int tagc_native_tls_write(native_tls *tls, const void *bytes, size_t n_bytes);
/* What is to be sent now. It stays until the next call for this connection. */
const void *tagc_native_tls_sealed(native_tls *tls, size_t *n_bytes);
/* Opens what has arrived. Returns how many bytes, 0 if more has to arrive, -1 if it was changed on the way, and -2 if the other end says so
 * of what it got. After -1, nothing can be sealed or opened any more. */
int tagc_native_tls_read(native_tls *tls, void *to, size_t n_bytes);
/* What tells the other end of it, after -1. It stays. */
const void *tagc_native_tls_alert(native_tls *tls, size_t *n_bytes);
int tagc_native_tls_has_more(const native_tls *tls); /* to be opened; accepts NULL */

#endif
