/* Loading a residual: what is refused leaves the residual alone, what is taken is finite. Each input is tried
 * as it is, and once more as the body of a well-formed state. */
#include "../tests/residual.h"
#include "exchange/wire.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { N_ELEMS = 64, STATE_BYTES = TAGC_WIRE_HEADER_BYTES + N_ELEMS * 4 };
/* Bytes of a row by tagc_format; the integers have 64 bytes of exponents. */
static const uint64_t row_bytes[] = {N_ELEMS * 4, N_ELEMS * 2, 64 + N_ELEMS, 64 + 64};

static void require(int holds) {
    if (!holds) abort();
}

static void try_load(tagc_reducer *reducer, const void *state, size_t n_bytes) {
    float before[N_ELEMS], residual[N_ELEMS];
    require(residual_to(reducer, before) == N_ELEMS);
    tagc_status status = tagc_reducer_state_load(reducer, state, n_bytes);
    residual_to(reducer, residual);
    if (status != TAGC_OK) {
        require(memcmp(before, residual, sizeof before) == 0);
        return;
    }
    require(n_bytes <= STATE_BYTES);
    for (int i = 0; i < N_ELEMS; i++) require(isfinite(residual[i]));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    /* One for the whole run: making threads for each input would be all that is measured. */
    static tagc_local_group *group;
    static tagc_comm *comm;
    static tagc_reducer *reducer;
    if (!reducer) {
        tagc_reducer_options options;
        tagc_reducer_options_init(&options);
        options.n_elems = N_ELEMS;
        require(tagc_local_group_create(1, &group) == TAGC_OK);
        require(tagc_comm_create_local(group, 0, NULL, &comm) == TAGC_OK);
        require(tagc_reducer_create(comm, &options, &reducer) == TAGC_OK);
    }
    try_load(reducer, data, n_bytes);
    for (int format = TAGC_FORMAT_FP32; format <= TAGC_FORMAT_INT4; format++) {
        uint8_t state[STATE_BYTES] = {0};
        uint64_t room = row_bytes[format];
        if (n_bytes) memcpy(state + TAGC_WIRE_HEADER_BYTES, data, n_bytes < room ? n_bytes : room);
        tagc_wire_header header = {
            .kind = TAGC_WIRE_STATE, .coding = format, .n_elems = N_ELEMS, .n_items = 1, .body_bytes = room};
        tagc_wire_write(&header, state);
        try_load(reducer, state, TAGC_WIRE_HEADER_BYTES + room);
    }
    return 0;
}
