/* The smallest transport: a blocking function of the caller's. No lanes: the comm thread stands in it until
 * the exchange is over, and by then there is nothing left to test. */
#include "core/memory.h"
#include "core/status.h"
#include "tagc/transport.h"

typedef struct callback {
    tagc_exchange_fn exchange;
    void *context; /* the caller's */
} callback;

static tagc_status callback_start(void *context, const tagc_transfer *transfer, void **request) {
    callback *self = context;
    *request = self;
    return self->exchange(self->context, transfer);
}

static tagc_status callback_test(void *context, void *request, tagc_progress *progress) {
    (void)context, (void)request;
    progress->done = 1;
    return TAGC_OK;
}

/* Nothing is ever under way outside the function, and the function is the only way to the peers. */
static void callback_give_up(void *context, const char *reason) {
    (void)context, (void)reason;
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

tagc_status tagc_comm_create_callback(tagc_exchange_fn exchange, void *context, int rank, int world_size,
                                      const tagc_comm_options *options, tagc_comm **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!exchange) return tagc_fail(TAGC_ERR_ARGUMENT, "exchange is NULL");
    void *memory;
    TAGC_TRY(tagc_memory_create(sizeof(callback), "callback transport", &memory));
    *(callback *)memory = (callback){exchange, context};
    tagc_status status = tagc_comm_create(&callback_ops, memory, rank, world_size, options, out);
    if (status != TAGC_OK) tagc_memory_destroy(memory);
    return status;
}
