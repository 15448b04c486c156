/* The two addends of acc = gradient + residual, each in the format in which it is stored. acc is made in fp32, piece by piece in the
 * cache, and never lies in memory as a whole. */
#ifndef TAGC_CODEC_ADDENDS_H
#define TAGC_CODEC_ADDENDS_H

#include "core/pool.h"
#include <stddef.h>
#include <stdint.h>

typedef struct tagc_addends {
    size_t n;
    int gradient_format;  /* tagc_format: FP32 or BF16 */
    int residual_format;  /* as in residual.h */
    const void *gradient; /* (n) */
    const void *residual; /* a row of n, or NULL: no residual */
} tagc_addends;

/* Gradient and residual at [first, first + n): pointers into the arrays themselves where these are fp32, else to values in
 * the rooms (n). *residual becomes NULL if there is none. */
void tagc_addends_parts(const tagc_addends *addends, size_t first, size_t n, float *gradient_room,
                        float *residual_room, const float **gradient, const float **residual);

/* Asks for the memory of the elements from `at` on. */
void tagc_addends_prefetch(const tagc_addends *addends, size_t at);

/* acc (n) = those at [first, first + n). */
void tagc_addends_read(const tagc_addends *addends, size_t first, size_t n, float *acc);

/* Writes the new residual: acc, but at indices (n_sent), ascending, errors (n_sent), or zeros if errors is NULL. residual_out is
 * a row of n that does not overlap the residual of the addends. */
void tagc_addends_settle(const tagc_addends *addends, const uint32_t *indices, const float *errors,
                         size_t n_sent, uint32_t seed, void *residual_out, tagc_pool *pool);

/* Values of a plain body (tagc_code) at [first, first + n): in the body itself, or in room (n). */
const float *tagc_plain_values(int gradient_format, const uint8_t *bytes, size_t first, size_t n,
                               float *room);

/* The number of indices (n), ascending, that are below `at`: where those from `at` on begin. */
size_t tagc_first_from(const uint32_t *indices, size_t n, size_t at);

#endif
