/* The layout of an engine, without the engine. */
#include "exchange/volume.h"
#include "fsdp/internal.h"
#include "fsdp/layout.h"
#include <stdlib.h>
#include <string.h>

static tagc_status copy(const tagc_fsdp *f, tagc_layout *out) {
    size_t n_tensors = (size_t)f->tables.n_tensors, n_units = (size_t)f->tables.n_units,
           n_flats = (size_t)f->tables.n_flats;
    *out = (tagc_layout){.world_size = f->world_size,
                         .n_tensors = f->tables.n_tensors,
                         .n_units = f->tables.n_units,
                         .n_flats = f->tables.n_flats,
                         .n_buffers = f->tables.n_buffers,
                         .n_gradient_buffers = f->tables.n_gradient_buffers,
                         .n_params = tagc_fsdp_n_params(f),
                         .n_compressed = tagc_fsdp_n_compressed(f),
                         .n_mild = tagc_fsdp_n_mild(f),
                         .memory = f->memory};
    out->unit_of_tensor = calloc(n_tensors, sizeof *out->unit_of_tensor);
    out->backward_order = calloc(n_units, sizeof *out->backward_order);
    out->units = calloc(n_units, sizeof *out->units);
    out->flats = calloc(n_flats, sizeof *out->flats);
    if (!out->unit_of_tensor || !out->backward_order || !out->units || !out->flats)
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for a layout of %d tensors", f->tables.n_tensors);
    for (int i = 0; i < f->tables.n_tensors; i++) out->unit_of_tensor[i] = f->tables.places[i].unit;
    memcpy(out->backward_order, f->tables.backward_order, n_units * sizeof *out->backward_order);
    memcpy(out->units, f->tables.units, n_units * sizeof *out->units);
    out->paper = f->options.paper;
    for (int i = 0; i < f->tables.n_flats; i++) {
        tagc_layout_flat *to = &out->flats[i];
        TAGC_TRY(tagc_fsdp_flat_info(f, i, to));
        if (to->reducer.paper) to->reducer.paper = &out->paper;
        tagc_exchange_memory memory;
        TAGC_TRY(tagc_reducer_memory(&to->reducer, f->world_size / to->n_adding, 0, &memory));
        out->memory.residuals += memory.residual;
        out->n_owned += f->tables.flats[i].n_owned;
    }
    return TAGC_OK;
}

tagc_status tagc_layout_create(const tagc_tensor_info *tensors, int n_tensors,
                               const tagc_fsdp_options *options, int world_size, tagc_layout **out) {
    *out = NULL;
    if (world_size < 1 || world_size > 65536)
        return tagc_fail(TAGC_ERR_ARGUMENT, "world_size is %d, allowed is 1 to 65536", world_size);
    TAGC_TRY(tagc_fsdp_options_check(options));
    tagc_fsdp *f = calloc(1, sizeof *f);
    tagc_layout *layout = calloc(1, sizeof *layout);
    size_t n_bytes = 0;
    tagc_status status = TAGC_OK;
    if (!f || !layout) status = tagc_fail(TAGC_ERR_MEMORY, "no memory for a layout");
    if (status == TAGC_OK) {
        f->world_size = world_size;
        f->options = *options;
        tagc_fsdp_options_resolve(&f->options);
        status = tagc_fsdp_layout(f, tensors, n_tensors);
    }
    if (status == TAGC_OK) status = tagc_fsdp_measure(f, &n_bytes);
    if (status == TAGC_OK) status = copy(f, layout);
    if (f) tagc_memory_destroy(f->tables_memory);
    free(f);
    if (status != TAGC_OK) {
        tagc_layout_destroy(layout);
        return status;
    }
    *out = layout;
    return TAGC_OK;
}

void tagc_layout_destroy(tagc_layout *layout) {
    if (!layout) return;
    free(layout->unit_of_tensor);
    free(layout->backward_order);
    free(layout->units);
    free(layout->flats);
    free(layout);
}
