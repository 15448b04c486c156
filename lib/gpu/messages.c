/* Messages of tagc/blocks.h in a device's memory: the same bodies, behind a header whose checksum kernels can compute. */
#include "core/status.h"
#include "exchange/blocks.h"
#include "gpu/kernels.h"

static tagc_status read_form(const tagc_blocks_options *from, uint64_t n_elems, uint64_t n_bytes,
                             tagc_message_form *form) {
    tagc_blocks_options options = {0};
    tagc_value_format format;
    TAGC_TRY(tagc_blocks_read(from, n_elems, &options, &format));
    TAGC_TRY(tagc_blocks_check_length(TAGC_ERR_ARGUMENT, &format, n_elems, n_bytes));
    *form = (tagc_message_form){.n = n_elems,
                                .values = format.values,
                                .block = format.block,
                                .element = options.element == TAGC_FORMAT_BF16 ? TAGC_ELEMENT_BF16
                                                                               : TAGC_ELEMENT_FP32,
                                .is_stochastic = format.is_stochastic,
                                .seed = format.seed,
                                .largest_scale = format.largest_scale};
    return TAGC_OK;
}

static tagc_status check(const tagc_kernels *kernels, const void *values, uint64_t n_elems,
                         const void *message, const tagc_blocks_state *state) {
    if (!kernels) return tagc_fail(TAGC_ERR_ARGUMENT, "kernels is NULL");
    if (!values && n_elems > 0) return tagc_fail(TAGC_ERR_ARGUMENT, "values is NULL");
    if (!message) return tagc_fail(TAGC_ERR_ARGUMENT, "message is NULL");
    if (!state) return tagc_fail(TAGC_ERR_ARGUMENT, "state is NULL");
    if ((uintptr_t)message % 8)
        return tagc_fail(TAGC_ERR_ARGUMENT, "message begins at %p, must be a multiple of 8", message);
    if ((uintptr_t)state % 8)
        return tagc_fail(TAGC_ERR_ARGUMENT, "state begins at %p, must be a multiple of 8",
                         (const void *)state);
    return TAGC_OK;
}

tagc_status tagc_blocks_encode_on(tagc_kernels *kernels, const tagc_blocks_options *options,
                                  const void *values, uint64_t n_elems, void *message, uint64_t n_bytes,
                                  tagc_blocks_state *state, void *stream) {
    tagc_message_form form;
    TAGC_TRY(check(kernels, values, n_elems, message, state));
    TAGC_TRY(read_form(options, n_elems, n_bytes, &form));
    TAGC_TRY(tagc_kernels_enter(kernels));
    tagc_status status =
        tagc_kernels_check(kernels, kernels->maker->messages->encode(&form, values, message, state, stream));
    tagc_kernels_leave(kernels);
    return status;
}

tagc_status tagc_blocks_decode_on(tagc_kernels *kernels, const tagc_blocks_options *options,
                                  const void *message, uint64_t n_bytes, void *values, uint64_t n_elems,
                                  uint64_t number, tagc_blocks_state *state, void *stream) {
    tagc_message_form form;
    TAGC_TRY(check(kernels, values, n_elems, message, state));
    TAGC_TRY(read_form(options, n_elems, n_bytes, &form));
    TAGC_TRY(tagc_kernels_enter(kernels));
    tagc_status status = tagc_kernels_check(
        kernels, kernels->maker->messages->decode(&form, message, values, number, state, stream));
    tagc_kernels_leave(kernels);
    return status;
}
