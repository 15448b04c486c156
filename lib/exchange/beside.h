/* What stands in for parts of a reducer or gatherer: functions for arrays that are in a device's memory, and for messages that
 * the caller carries. lib/gpu has these tables. Without them all arrays are in the host's memory. */
#ifndef TAGC_EXCHANGE_BESIDE_H
#define TAGC_EXCHANGE_BESIDE_H

#include "codec/code.h"
#include "core/memory.h"

/* Arrays in a device's memory. Each function waits until it is done. Their context is heap.context. */
typedef struct tagc_arrays {
    tagc_heap heap;
    /* TAGC_ERR_ARGUMENT unless `array`, called `what`, is in the device's memory. */
    tagc_status (*check)(void *context, const void *array, const char *what);
    tagc_status (*read)(void *context, void *to, const void *from, size_t n_bytes);
    tagc_status (*write)(void *context, void *to, const void *from, size_t n_bytes);
    tagc_status (*fill)(void *context, float *values, float value, uint64_t n);
} tagc_arrays;

struct tagc_reducer;
struct tagc_gatherer;

/* Beside a direct reducer. A failure is noted in the step (tagc_note_failure). */
typedef struct tagc_beside {
    /* For messages: "slots". */
    const char *name;
    /* 1: the caller carries the messages. No phase runs, and nothing below _end is called. */
    int by_caller;
    /* Made when the reducer is laid out, and ended with that layout. _end accepts what is half-made. */
    tagc_status (*make)(struct tagc_reducer *r);
    void (*end)(struct tagc_reducer *r);
    /* Encodes stage s. The body is in its row; the own one stays on the device. */
    void (*encode)(struct tagc_reducer *r, int s, tagc_encoded *out);
    /* Decodes and adds all n bodies that the step has collected. */
    void (*add)(struct tagc_reducer *r, int n);
    void (*encode_sums)(struct tagc_reducer *r, uint8_t *body, tagc_encoded *out);
    /* bodies (hosts): bytes is NULL for those that are not added; the own one is ignored. */
    void (*decode_sums)(struct tagc_reducer *r, const tagc_body *bodies);
} tagc_beside;

/* Beside a gatherer. A failure is noted in its device_failure. */
typedef struct tagc_gather_beside {
    tagc_status (*make)(struct tagc_gatherer *gatherer);
    void (*end)(struct tagc_gatherer *gatherer); /* accepts what is half-made */
    int (*encode_row)(struct tagc_gatherer *gatherer, uint8_t *body);
    void (*decode_rows)(struct tagc_gatherer *gatherer, int n_rows);
    /* Of a row of the replica. */
    uint64_t (*checksum)(struct tagc_gatherer *gatherer, int row);
} tagc_gather_beside;

#endif
