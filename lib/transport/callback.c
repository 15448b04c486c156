/* The callback transport: a blocking function of the caller's, without lanes. The comm thread blocks in it until the
 * transfer is complete, so test has nothing to do. */
#include "core/memory.h"
#include "transport/comm_private.h"

typedef struct callback {
    tagc_callback_ops ops;
    void *context; /* the caller's */
} callback;

static tagc_status callback_start(void *context, const tagc_transfer *transfer, void **request) {
    callback *self = context;
    *request = self;
    return self->ops.exchange(self->context, transfer);
}

static tagc_status callback_test(void *context, void *request, tagc_progress *progress) {
    (void)context, (void)request;
    progress->done = 1;
    return TAGC_OK;
}

/* No transfer outlives the function, so there is nothing to cancel. But peers may wait in theirs. */
static void callback_give_up(void *context, const tagc_failure *failure) {
    callback *self = context;
    if (self->ops.abort) self->ops.abort(self->context, failure);
}

static void callback_destroy(void *context) {
    tagc_memory_destroy(context);
}

static const tagc_transport_ops callback_ops = {
    .abi = TAGC_TRANSPORT_ABI,
    .capabilities = 0,
    .name = "callback",
    .start = callback_start,
    .test = callback_test,
    .cancel = callback_give_up,
    .abort = callback_give_up,
    .destroy = callback_destroy,
};

tagc_status tagc_comm_create_callback(const tagc_callback_ops *ops, void *context, int rank, int world_size,
                                      const tagc_comm_options *options, tagc_comm **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!ops) return tagc_fail(TAGC_ERR_ARGUMENT, "ops is NULL");
    TAGC_TRY(tagc_transport_check_abi(ops->abi));
    if (!ops->exchange) return tagc_fail(TAGC_ERR_ARGUMENT, "ops.exchange is NULL, it is required");
    void *memory;
    TAGC_TRY(tagc_memory_create(sizeof(callback), "callback transport", &memory));
    *(callback *)memory = (callback){*ops, context};
    tagc_status status = tagc_comm_create(&callback_ops, memory, rank, world_size, options, out);
    if (status != TAGC_OK) tagc_memory_destroy(memory);
    return status;
}
