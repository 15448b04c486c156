/* Bytes of lib/exchange, over a link. */
#include "sizes/tokens.h"

#include "core/status.h"
#include "plan/bytes.h"
#include "tagc/blocks.h"
#include <stdio.h>

enum { OWN_LATENCIES = 2 }; /* ranks compare counts before elements travel; torch does not */

static tagc_status check(const tagc_tokens_question *q) {
    if (q->world_size < 1 || q->ranks_per_host < 1 || q->world_size % q->ranks_per_host != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "ranks_per_host is %d, which does not divide the world size of %d",
                         q->ranks_per_host, q->world_size);
    if (q->n_experts < 1 || q->n_experts % q->world_size != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "experts is %d, allowed: multiples of the %d ranks", q->n_experts,
                         q->world_size);
    if (q->n_active < 1 || q->n_active > q->n_experts)
        return tagc_fail(TAGC_ERR_ARGUMENT, "experts of a token is %d, allowed: 1 to %d", q->n_active,
                         q->n_experts);
    if (!(q->n_tokens >= 1 && q->n_tokens <= 4294967296.0))
        return tagc_fail(TAGC_ERR_ARGUMENT, "tokens is %g, allowed: 1 to 2^32", q->n_tokens);
    if (q->width < 1 || (q->element_bytes != 2 && q->element_bytes != 4))
        return tagc_fail(TAGC_ERR_ARGUMENT, "width is %d of %d bytes each, allowed: 1 or more of 2 or 4",
                         q->width, q->element_bytes);
    if (!(q->n_forward >= 0) || !(q->n_backward >= 0))
        return tagc_fail(TAGC_ERR_ARGUMENT, "calls are %g and %g, allowed: 0 or more", q->n_forward,
                         q->n_backward);
    if (!(q->latency_s >= 0) || !(q->bytes_per_s > 0))
        return tagc_fail(TAGC_ERR_ARGUMENT, "latency_s is %g and bytes_per_s %g, allowed: 0 or more, above 0",
                         q->latency_s, q->bytes_per_s);
    for (int i = 0; i < 2; i++) {
        int format = i == 0 ? q->forward : q->backward;
        if (format != TAGC_FORMAT_BF16 && format != TAGC_FORMAT_INT8 && format != TAGC_FORMAT_INT4)
            return tagc_fail(TAGC_ERR_ARGUMENT, "%s is format %d, allowed: bf16, int8, int4",
                             i == 0 ? "forward" : "backward", format);
    }
    return TAGC_OK;
}

static void answer(const tagc_tokens_question *q, tagc_tokens_reply *out) {
    int per_host = q->ranks_per_host, n_hosts = q->world_size / per_host;
    double n_values = q->n_tokens * q->n_active * q->width / q->world_size; /* for each rank */
    double n_far = n_values * (q->world_size - per_host), whole = n_far * q->element_bytes;
    double torch_rate = q->torch_bytes_per_s > 0 ? q->torch_bytes_per_s : q->bytes_per_s;
    for (int i = 0; n_hosts > 1 && i < 2; i++) {
        double n_calls = i == 0 ? q->n_forward : q->n_backward;
        double n_bytes = tagc_plan_all_to_all_bytes(i == 0 ? q->forward : q->backward, q->block,
                                                    q->element_bytes, n_values, n_hosts, per_host);
        out->host_bytes[0] += n_calls * per_host * whole;
        out->host_bytes[1] += n_calls * per_host * n_bytes;
        out->comm_s[0] += n_calls * (q->latency_s + whole / torch_rate);
        out->comm_s[1] +=
            n_calls * (OWN_LATENCIES * q->latency_s + n_bytes / q->bytes_per_s + q->codec_s[i] * n_far);
    }
    out->verdict = (int)tagc_verdict_of(q->compute_s + out->comm_s[0], q->compute_s + out->comm_s[1], 0);
}

tagc_status tagc_plan_tokens(const tagc_tokens_question *question, tagc_tokens_reply *reply) {
    if (question->struct_bytes != sizeof *question || reply->struct_bytes != sizeof *reply)
        return TAGC_ERR_MISMATCH; /* of another version */
    *reply = (tagc_tokens_reply){.struct_bytes = sizeof *reply};
    tagc_status status = check(question);
    if (status != TAGC_OK)
        snprintf(reply->why, sizeof reply->why, "%s", tagc_last_error());
    else
        answer(question, reply);
    return status;
}
