/* See tls.h. */
#include "transport/native/tls.h"

#define NO_TLS                                                                                               \
    "install libssl-dev (Debian, Ubuntu), openssl-devel (Fedora) or openssl (conda), OpenSSL 3 or newer, "   \
    "and "                                                                                                   \
    "build libtagc again (cmake: -DTAGC_TLS=ON)"

#if !TAGC_HAS_TLS

tagc_status tagc_native_tls_open(native_tls_context **out) {
    *out = NULL;
    return tagc_fail(TAGC_ERR_UNSUPPORTED, "this libtagc was built without TLS: " NO_TLS);
}

void tagc_native_tls_close(native_tls_context *context) {
    (void)context;
}

native_tls *tagc_native_tls_begin(native_tls_context *context, int is_caller, const unsigned char *key) {
    (void)context, (void)is_caller, (void)key;
    return NULL;
}

void tagc_native_tls_end(native_tls *tls) {
    (void)tls;
}

int tagc_native_tls_put(native_tls *tls, const void *bytes, size_t n_bytes) {
    (void)tls, (void)bytes, (void)n_bytes;
    return 0;
}

int tagc_native_tls_shake(native_tls *tls) {
    (void)tls;
    return -1;
}

int tagc_native_tls_write(native_tls *tls, const void *bytes, size_t n_bytes) {
    (void)tls, (void)bytes, (void)n_bytes;
    return 0;
}

const void *tagc_native_tls_sealed(native_tls *tls, size_t *n_bytes) {
    (void)tls;
    *n_bytes = 0;
    return NULL;
}

int tagc_native_tls_read(native_tls *tls, void *to, size_t n_bytes) {
    (void)tls, (void)to, (void)n_bytes;
    return -1;
}

const void *tagc_native_tls_alert(native_tls *tls, size_t *n_bytes) {
    return tagc_native_tls_sealed(tls, n_bytes);
}

int tagc_native_tls_has_more(const native_tls *tls) {
    (void)tls;
    return 0;
}

#else

#include <dlfcn.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_OF(value) #value
#define TEXT(value) TEXT_OF(value)
#define LIBRARY "libssl.so." TEXT(OPENSSL_SHLIB_VERSION)
#define IDENTITY "tagc" /* of the key: each connection has but one */
enum { THE_TLS = 0 /* of SSL_set_ex_data */ };

/* ---- the library, loaded once ---- */

/* clang-format off */ /* it does not come to rest here */
#define FOR_EACH_FUNCTION(_) \
    _(TLS_method) _(SSL_CTX_new) _(SSL_CTX_free) _(SSL_CTX_ctrl) _(SSL_CTX_set_ciphersuites) \
    _(SSL_CTX_set_num_tickets) _(SSL_set_verify) _(SSL_CTX_set_psk_client_callback) \
    _(SSL_CTX_set_psk_server_callback) _(SSL_new) _(SSL_free) _(SSL_set_bio) _(SSL_set_connect_state) \
    _(SSL_set_accept_state) _(SSL_set_ex_data) _(SSL_get_ex_data) _(SSL_do_handshake) \
    _(SSL_session_reused) _(SSL_read) _(SSL_write) _(SSL_key_update) _(SSL_get_error) _(SSL_pending) \
    _(ERR_clear_error) _(ERR_peek_last_error) _(BIO_new) _(BIO_free) _(BIO_s_mem) _(BIO_read) \
    _(BIO_write) _(BIO_ctrl_pending)
/* clang-format on */

#define MEMBER(name) __typeof__(&name) name;
static struct { FOR_EACH_FUNCTION(MEMBER) } call;
#undef MEMBER

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const char *missing; /* NULL: all is there */

static void load(void) {
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL), *found;
    if (!library) {
        missing = "";
        return;
    }
#define LOAD(name)                                                                                           \
    found = dlsym(library, #name);                                                                           \
    memcpy(&call.name, &found, sizeof found);                                                                \
    if (!found && !missing) missing = #name;
    FOR_EACH_FUNCTION(LOAD)
#undef LOAD
}

/* ---- what all connections of a rank share ---- */

static unsigned copy_key(SSL *ssl, unsigned char *to, unsigned n_room) {
    const native_tls *tls = call.SSL_get_ex_data(ssl, THE_TLS);
    if (n_room < TAGC_TLS_KEY_BYTES) return 0;
    memcpy(to, tls->key, TAGC_TLS_KEY_BYTES);
    return TAGC_TLS_KEY_BYTES;
}

static unsigned key_of_caller(SSL *ssl, const char *hint, char *identity, unsigned n_identity,
                              unsigned char *key, unsigned n_key) {
    (void)hint;
    if (n_identity < sizeof IDENTITY) return 0;
    memcpy(identity, IDENTITY, sizeof IDENTITY);
    return copy_key(ssl, key, n_key);
}

static unsigned key_of_called(SSL *ssl, const char *identity, unsigned char *key, unsigned n_key) {
    return strcmp(identity, IDENTITY) == 0 ? copy_key(ssl, key, n_key) : 0;
}

tagc_status tagc_native_tls_open(native_tls_context **out) {
    *out = NULL;
    pthread_once(&once, load);
    if (missing)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "TLS needs %s, which %s%s: " NO_TLS, LIBRARY,
                         missing[0] ? "does not have " : "does not load", missing);
    SSL_CTX *made = call.SSL_CTX_new(call.TLS_method());
    int is_right =
        made && call.SSL_CTX_ctrl(made, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, NULL) == 1 &&
        call.SSL_CTX_set_ciphersuites(made, "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256") == 1 &&
        call.SSL_CTX_set_num_tickets(made, 0) == 1;
    if (!is_right) {
        call.SSL_CTX_free(made);
        call.ERR_clear_error();
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "%s of this host does not allow TLS 1.3 with AES-128-GCM",
                         LIBRARY);
    }
    call.SSL_CTX_set_psk_client_callback(made, key_of_caller);
    call.SSL_CTX_set_psk_server_callback(made, key_of_called);
    *out = (native_tls_context *)made;
    return TAGC_OK;
}

void tagc_native_tls_close(native_tls_context *context) {
    if (context) call.SSL_CTX_free((SSL_CTX *)context);
}

/* ---- a connection ---- */

native_tls *tagc_native_tls_begin(native_tls_context *context, int is_caller, const unsigned char *key) {
    native_tls *tls = calloc(1, sizeof *tls);
    if (!tls) return NULL;
    memcpy(tls->key, key, sizeof tls->key);
    SSL *ssl = tls->ssl = call.SSL_new((SSL_CTX *)context);
    BIO *in = call.BIO_new(call.BIO_s_mem()), *out = call.BIO_new(call.BIO_s_mem());
    if (!ssl || !in || !out || call.SSL_set_ex_data(ssl, THE_TLS, tls) != 1) {
        if (in) call.BIO_free(in);
        if (out) call.BIO_free(out);
        tagc_native_tls_end(tls);
        return NULL;
    }
    tls->in = in;
    tls->out = out;
    call.SSL_set_bio(ssl, in, out); /* they are its own now */
    if (is_caller) {
        call.SSL_set_verify(ssl, SSL_VERIFY_PEER, NULL); /* a certificate would not do: none is trusted */
        call.SSL_set_connect_state(ssl);
    } else {
        call.SSL_set_accept_state(ssl);
    }
    return tls;
}

void tagc_native_tls_end(native_tls *tls) {
    if (!tls) return;
    if (tls->ssl) call.SSL_free(tls->ssl);
    free(tls->sealed);
    memset(tls->key, 0, sizeof tls->key);
    free(tls);
}

int tagc_native_tls_put(native_tls *tls, const void *bytes, size_t n_bytes) {
    return call.BIO_write(tls->in, bytes, (int)n_bytes) == (int)n_bytes;
}

/* Of a call that returned n. */
static int wants_more(const native_tls *tls, int n) {
    int error = call.SSL_get_error(tls->ssl, n);
    call.ERR_clear_error();
    return error == SSL_ERROR_WANT_READ;
}

/* Reused: by the key, and not by a certificate. */
int tagc_native_tls_shake(native_tls *tls) {
    call.ERR_clear_error();
    int n = call.SSL_do_handshake(tls->ssl);
    if (n == 1) return call.SSL_session_reused(tls->ssl) ? 1 : -1;
    return wants_more(tls, n) ? 0 : -1;
}

int tagc_native_tls_write(native_tls *tls, const void *bytes, size_t n_bytes) {
    if (n_bytes == 0) return 1;
    tls->n_records += (n_bytes + TAGC_TLS_RECORD_BYTES - 1) / TAGC_TLS_RECORD_BYTES;
    call.ERR_clear_error();
    if (tls->n_records > TAGC_TLS_RECORDS_OF_A_KEY) { /* the other end follows */
        if (call.SSL_key_update(tls->ssl, SSL_KEY_UPDATE_NOT_REQUESTED) != 1) return 0;
        tls->n_records = 0;
    }
    int n = call.SSL_write(tls->ssl, bytes, (int)n_bytes);
    if (n != (int)n_bytes) call.ERR_clear_error();
    return n == (int)n_bytes;
}

const void *tagc_native_tls_sealed(native_tls *tls, size_t *n_bytes) {
    size_t n = call.BIO_ctrl_pending(tls->out);
    *n_bytes = 0;
    if (n > tls->n_room) {
        unsigned char *more = realloc(tls->sealed, n);
        if (!more) return NULL;
        tls->sealed = more;
        tls->n_room = n;
    }
    if (n > 0 && call.BIO_read(tls->out, tls->sealed, (int)n) == (int)n) *n_bytes = n;
    return tls->sealed;
}

int tagc_native_tls_read(native_tls *tls, void *to, size_t n_bytes) {
    call.ERR_clear_error();
    int n = call.SSL_read(tls->ssl, to, n_bytes > INT32_MAX ? INT32_MAX : (int)n_bytes);
    if (n > 0) return n;
    int is_alert = ERR_GET_REASON(call.ERR_peek_last_error()) > SSL_AD_REASON_OFFSET;
    return wants_more(tls, n) ? 0 : is_alert ? -2 : -1;
}

/* Not into `sealed`, which may be on its way. */
const void *tagc_native_tls_alert(native_tls *tls, size_t *n_bytes) {
    int n = call.BIO_read(tls->out, tls->opened, sizeof tls->opened);
    *n_bytes = n > 0 ? (size_t)n : 0;
    return tls->opened;
}

int tagc_native_tls_has_more(const native_tls *tls) {
    return tls && (call.BIO_ctrl_pending(tls->in) > 0 || call.SSL_pending(tls->ssl) > 0);
}

#endif
