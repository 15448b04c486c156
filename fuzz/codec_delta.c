/* Low-bit blocks that arrive, whatever they hold: taken or refused, and nothing beside the values is touched. */
#include "codec/bf16.h"
#include "codec/delta.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void require(int condition) {
    if (!condition) abort();
}

/* The first bytes say how many values there are, the others are the body, as far as they go. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    if (n_bytes < 3) return 0;
    int bits = 2 << data[0] % 3;
    size_t n = 1 + (data[1] | (size_t)data[2] << 8) % 2000, n_body = tagc_delta_bytes(bits, n);
    uint8_t *body = calloc(n_body, 1); /* exact, so that a sanitizer sees the first byte too many */
    float *values = calloc(n, sizeof *values);
    uint16_t *halves = calloc(n, sizeof *halves);
    require(body && values && halves);
    memcpy(body, data + 3, n_bytes - 3 < n_body ? n_bytes - 3 : n_body);
    int valid = tagc_delta_validate(bits, body, n) == TAGC_OK;
    tagc_delta_decode(bits, body, values, n);
    for (size_t i = 0; i < n && valid; i++) require(!isnan(values[i]));
    for (size_t i = 0; i < n; i++) values[i] = (float)i;
    tagc_bf16_narrow(values, halves, n);
    tagc_delta_apply_part(bits, body, halves, sizeof *halves, n, 0, n);
    tagc_bf16_widen(halves, values, n);
    for (size_t i = 0; i < n && valid; i++) require(!isnan(values[i]));
    free(body);
    free(values);
    free(halves);
    return 0;
}
