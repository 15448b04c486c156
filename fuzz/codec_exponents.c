/* Coded exponents that arrive, whatever they hold: taken or refused, and nothing beside the values is touched. What is
 * taken comes back from the encoder. */
#include "codec/exponents.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void require(int condition) {
    if (!condition) abort();
}

/* The first bytes say how many values there are, the others are the body. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    if (n_bytes < 2) return 0;
    size_t n = 1 + (data[0] | (size_t)data[1] << 8) % 9000, n_body = n_bytes - 2;
    uint8_t *body = malloc(n_body ? n_body : 1); /* exact, so that a sanitizer sees the first byte too many */
    uint8_t *again = malloc(tagc_exponents_max_bytes(n));
    uint16_t *values = calloc(n, sizeof *values), *back = calloc(n, sizeof *back);
    require(body && again && values && back);
    memcpy(body, data + 2, n_body);
    if (tagc_exponents_decode(body, n_body, values, n)) {
        size_t n_again = tagc_exponents_encode(values, n, again);
        require(n_again <= tagc_exponents_max_bytes(n));
        require(tagc_exponents_decode(again, n_again, back, n) &&
                memcmp(values, back, n * sizeof *values) == 0);
    }
    free(body);
    free(again);
    free(values);
    free(back);
    return 0;
}
