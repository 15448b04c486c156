/* Loading a residual: what is refused leaves the residual alone, what is taken is finite. Each input is tried as it is, and
 * as the body of states that say what they like about their rows, in a world and a format that it chooses. */
#include "../tests/residual.h"
#include "codec/residual.h"
#include "exchange/reducer.h"
#include "exchange/wire.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { N_WORLDS = 7, LARGEST = 192 };
/* A residual is stored in. */
static const int formats[] = {TAGC_FORMAT_FP32, TAGC_FORMAT_INT8, TAGC_FORMAT_INT4};
enum { N_FORMATS = sizeof formats / sizeof *formats };
static const uint64_t sizes[] = {64, LARGEST}; /* n_elems */

static void require(int holds) {
    if (!holds) abort();
}

/* One for the whole run: making threads for each input would be all that is measured. Rank 0 of 1, 2, 4 ... 64. */
static tagc_reducer *reducer_of(int size, int world, int format) {
    static tagc_comm *comms[N_WORLDS];
    static tagc_reducer *reducers[2][N_WORLDS][N_FORMATS];
    tagc_reducer **reducer = &reducers[size][world][format];
    if (!comms[world]) {
        tagc_local_group *group;
        require(tagc_local_group_create(1 << world, &group) == TAGC_OK);
        require(tagc_comm_create_local(group, 0, NULL, &comms[world]) == TAGC_OK);
    }
    if (!*reducer) {
        tagc_reducer_options options;
        tagc_reducer_options_init(&options);
        options.n_elems = sizes[size];
        options.residual = formats[format];
        require(tagc_reducer_make_alone(&tagc_host_arrays, NULL, comms[world], &options, reducer) == TAGC_OK);
    }
    return *reducer;
}

static tagc_status try_load(tagc_reducer *reducer, const void *state, size_t n_bytes) {
    float before[LARGEST], residual[LARGEST];
    uint64_t n = residual_to(reducer, before);
    tagc_status status = tagc_reducer_state_load(reducer, state, n_bytes);
    require(residual_to(reducer, residual) == n);
    if (status != TAGC_OK) require(memcmp(before, residual, n * sizeof *before) == 0);
    for (uint64_t i = 0; i < n; i++) require(isfinite(residual[i]));
    return status;
}

/* What was taken is saved, and is the same in a reducer of fp32. */
static void check_again(tagc_reducer *reducer, int size, int world) {
    tagc_reducer *whole = reducer_of(size, world, 0);
    uint64_t n_bytes = tagc_reducer_state_bytes(reducer);
    float values[LARGEST], again[LARGEST];
    uint8_t *state = malloc(n_bytes);
    require(state && tagc_reducer_state_save(reducer, state, n_bytes) == TAGC_OK);
    uint64_t n = residual_to(reducer, values);
    require(n == sizes[size] && try_load(whole, state, n_bytes) == TAGC_OK);
    residual_to(whole, again);
    for (uint64_t i = 0; i < n; i++) require(values[i] == again[i]);
    free(state);
}

/* The input as n_rows rows of k values, filled up with zeros. */
static void try_rows(const uint8_t *data, size_t n_bytes, int format, uint32_t n_rows, uint32_t k, int size,
                     int world, tagc_reducer *reducer) {
    uint64_t room = n_rows * tagc_residual_bytes(format, k);
    uint8_t *state = calloc(1, TAGC_WIRE_HEADER_BYTES + room); /* an exact copy, as in standalone.c */
    require(state != NULL);
    if (n_bytes) memcpy(state + TAGC_WIRE_HEADER_BYTES, data, n_bytes < room ? n_bytes : room);
    tagc_wire_header header = {.kind = TAGC_WIRE_STATE,
                               .coding = format,
                               .output = TAGC_OUTPUT_SHARD,
                               .tag = UINT64_MAX,
                               .world_size = 1u << world,
                               .k = k,
                               .n_elems = sizes[size],
                               .n_items = n_rows,
                               .body_bytes = room};
    tagc_wire_write(&header, state);
    tagc_status status = try_load(reducer, state, TAGC_WIRE_HEADER_BYTES + room);
    if (status == TAGC_OK) check_again(reducer, size, world);
    if (status == TAGC_OK) require((uint64_t)n_rows * k == tagc_reducer_residual_elems(reducer));
    free(state);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    uint64_t choice = tagc_wire_sum(data, n_bytes);
    int size = (int)(choice & 1), to = (int)((choice >> 8) % N_WORLDS),
        from = (int)((choice >> 16) % N_WORLDS);
    tagc_reducer *reducer = reducer_of(size, to, (int)((choice >> 24) % N_FORMATS));
    try_load(reducer, data, n_bytes);
    uint32_t n_rows = 1u << from, any_rows = (uint32_t)(choice >> 32) & 255,
             any_k = (uint32_t)(choice >> 40) & 255;
    for (int format = TAGC_FORMAT_FP32; format <= TAGC_FORMAT_INT4; format++) {
        try_rows(data, n_bytes, format, n_rows, (uint32_t)(sizes[size] >> from), size, to, reducer);
        try_rows(data, n_bytes, format, n_rows, any_k, size, to, reducer);
        try_rows(data, n_bytes, format, any_rows, (uint32_t)(sizes[size] >> from), size, to, reducer);
    }
    return 0;
}
