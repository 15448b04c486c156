/* Loading a model's state. Each input is tried as it is, with a right checksum behind it, and as changes of a state that the model has
 * saved. What is refused changes nothing; what is taken can be saved and loaded, and the model still exchanges. */
#include "tagc/model.h"
#include "unit/unit.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { ROWS = 9, COLUMNS = 7, N = ROWS * COLUMNS, N_TENSORS = 3 };

static void require(int holds) {
    if (!holds) abort();
}

static tagc_model *the_model(void) {
    static tagc_model *model;
    static const uint64_t shape[] = {ROWS, COLUMNS};
    const tagc_tensor tensors[N_TENSORS] = {{"a", shape, 2, 0, TAGC_CLASS_COMPRESSED},
                                            {"b", shape, 2, 0, TAGC_CLASS_MILD},
                                            {"c", shape, 2, 0, TAGC_CLASS_DENSE}};
    tagc_local_group *group;
    tagc_comm *comm;
    if (model) return model;
    require(tagc_local_group_create(1, &group) == TAGC_OK);
    require(tagc_comm_create_local(group, 0, NULL, &comm) == TAGC_OK);
    require(tagc_model_create(NULL, comm, tensors, N_TENSORS, NULL, &model) == TAGC_OK);
    return model;
}

static void exchange(tagc_model *model) {
    static float gradients[N_TENSORS][N], sums[N_TENSORS][N];
    tagc_piece in[N_TENSORS], out[N_TENSORS];
    for (uint32_t t = 0; t < N_TENSORS; t++) {
        for (int i = 0; i < N; i++) gradients[t][i] = sinf((float)(i + (int)t));
        in[t] = (tagc_piece){t, 0, N, gradients[t]};
        out[t] = (tagc_piece){t, 0, N, sums[t]};
    }
    require(tagc_model_begin(model, 0, in, N_TENSORS, out, N_TENSORS) == TAGC_OK);
    require(tagc_model_end(model, 0, NULL) == TAGC_OK);
    require(tagc_model_step(model, 1.0) == TAGC_OK);
}

static uint8_t *saved(tagc_model *model, size_t *n_bytes) {
    require(tagc_model_save(model, NULL, 0, n_bytes) == TAGC_OK);
    uint8_t *bytes = malloc(*n_bytes);
    require(bytes && tagc_model_save(model, bytes, *n_bytes, n_bytes) == TAGC_OK);
    return bytes;
}

static void try_load(tagc_model *model, uint8_t *file, size_t n_bytes, int is_summed) {
    size_t n_before, n_after;
    if (is_summed && n_bytes >= 8) {
        uint64_t sum = tagc_checksum(file, n_bytes - 8);
        memcpy(file + n_bytes - 8, &sum, sizeof sum);
    }
    const void *files[] = {file};
    uint8_t *before = saved(model, &n_before);
    tagc_status status = tagc_model_load(model, files, &n_bytes, 1);
    uint8_t *after = saved(model, &n_after);
    if (status != TAGC_OK && status != TAGC_ERR_STATE)
        require(n_before == n_after && memcmp(before, after, n_before) == 0);
    files[0] = after;
    require(tagc_model_load(model, files, &n_after, 1) == TAGC_OK);
    free(before);
    free(after);
    exchange(model);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    tagc_model *model = the_model();
    uint8_t *file = malloc(n_bytes + 1);
    require(file != NULL);
    if (n_bytes > 0) memcpy(file, data, n_bytes);
    try_load(model, file, n_bytes, 0);
    try_load(model, file, n_bytes / 8 * 8, 1);
    free(file);
    size_t n;
    file = saved(model, &n);
    for (size_t i = 0; i + 3 <= n_bytes && i < 30; i += 3) /* two bytes say where, one what */
        file[(data[i] | (size_t)data[i + 1] << 8) % n] = data[i + 2];
    try_load(model, file, n, 1);
    free(file);
    return 0;
}
