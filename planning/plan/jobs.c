/* The order of work and transfers in lib/exchange: dense.c and direct/direct.c. Many small pieces are merged into a few, because the order of waits matters much more than the number of pieces. */
#include "plan/deployment.h"

#include "core/status.h"
#include "exchange/options.h"
#include "exchange/wire.h"
#include <math.h>
#include <stdlib.h>

enum { DEPTH = 3, MAX_CHUNKS = 16, MAX_PEERS = 12, HOST_DEPTH = 2 };
/* Of a job, with room to spare. The longest is direct in two levels with MAX_PEERS batches and sums that return. */
enum { MAX_OPS = 160, MAX_TRANSFERS = 80 };

/* Seconds of work of one step over a whole unit. */
typedef struct codec_work {
    double encode_s, decode_s;
} codec_work;

typedef struct builder {
    tagc_sim_job *job;
    double remote_share; /* of the transfers posted next */
} builder;

/* Every value as fp32 or bf16. */
static int is_plain(const tagc_reducer_options *o) {
    return o->exchange == TAGC_EXCHANGE_DENSE || (o->sparsity == 0 && o->format <= TAGC_FORMAT_BF16);
}

/* Selecting and encoding is one pass over what the ranks of a host have added up. */
static codec_work find_work(const tagc_reduction *r, const tagc_costs *costs) {
    int is_coded = r->n_ranks > r->options.ranks_per_host; /* else all ranks are of one host */
    if (is_plain(&r->options) || !is_coded) return (codec_work){0, 0};
    double n = (double)r->options.n_elems / r->options.ranks_per_host;
    return (codec_work){costs->encode_s * n, costs->decode_s * n};
}

/* ---- building ---- */

static void add_op(builder *b, tagc_sim_op op) {
    if (b->job->n_ops == MAX_OPS) abort(); /* only a new kind of step could */
    b->job->ops[b->job->n_ops++] = op;
}

static void work(builder *b, double s) {
    if (s > 0) add_op(b, (tagc_sim_op){.kind = TAGC_SIM_WORK, .work_s = s});
}

static void wait(builder *b, int transfer) {
    add_op(b, (tagc_sim_op){.kind = TAGC_SIM_WAIT, .transfer = transfer});
}

/* n_messages: the number of receivers. Returns the transfer's number. */
static int add_transfer(builder *b, double n_bytes, double n_messages) {
    tagc_sim_job *job = b->job;
    if (job->n_transfers == MAX_TRANSFERS) abort();
    job->transfers[job->n_transfers] = (tagc_sim_transfer){.message_bytes = n_bytes / n_messages,
                                                           .remote_bytes = n_bytes * b->remote_share,
                                                           .local_bytes = n_bytes * (1 - b->remote_share)};
    return job->n_transfers++;
}

static int post(builder *b, int lane, double n_bytes, double n_messages) {
    int transfer = add_transfer(b, n_bytes, n_messages);
    add_op(b, (tagc_sim_op){.kind = TAGC_SIM_POST, .transfer = transfer, .lane = lane});
    return transfer;
}

/* A few bytes from each rank to each other. */
static void agree(builder *b, const tagc_reduction *r, int lane, double n_bytes) {
    wait(b, post(b, lane, n_bytes, r->n_ranks - 1));
}

/* A lane is a round of an exchange, as for tagc_then in lib/exchange. */
static void dense_step(builder *b, const tagc_reduction *r) {
    enum { IN, OUT, AGREEMENT };
    const double *n_bytes = r->volume.n_bytes;
    int in[MAX_CHUNKS], out[MAX_CHUNKS];
    size_t chunk = r->volume.chunk_elems, shard = (size_t)(r->options.n_elems / (uint64_t)r->n_ranks);
    size_t n_real = chunk ? (shard + chunk - 1) / chunk : 1;
    int n = n_real < MAX_CHUNKS ? (int)n_real : MAX_CHUNKS, n_peers = r->n_ranks - 1,
        is_all = r->options.output != TAGC_OUTPUT_SHARD;
    for (int c = 0; c < n && c < DEPTH; c++) in[c] = post(b, IN, n_bytes[TAGC_LEG_VALUES] / n, n_peers);
    for (int c = 0; c < n; c++) {
        wait(b, in[c]);
        if (is_all && c >= DEPTH) wait(b, out[c - DEPTH]);
        if (is_all) out[c] = post(b, OUT, n_bytes[TAGC_LEG_RESULT] / n, n_peers);
        if (c + DEPTH < n) in[c + DEPTH] = post(b, IN, n_bytes[TAGC_LEG_VALUES] / n, n_peers);
    }
    int agreement = post(b, AGREEMENT, n_bytes[TAGC_LEG_CONTROL], n_peers); /* beside the sums */
    for (int c = n > DEPTH ? n - DEPTH : 0; is_all && c < n; c++) wait(b, out[c]);
    wait(b, agreement);
}

enum { ROWS, HEADERS, BODIES, RESULTS, RESULT_RESTS, DIRECT_AGREEMENT };

typedef struct direct_builder {
    builder *b;
    const tagc_reduction *r;
    const codec_work *w;
    int n, n_turns;     /* parcels of other hosts, merged; turns include the own host */
    double each, own;   /* shares of the unit in a turn */
    double front, rest; /* bytes of a batch: headers with the start of the bodies, and the rest */
    double peers;       /* of a batch */
    double within;      /* bytes of a turn among the ranks of a host */
    int front_out[MAX_PEERS], rest_out[MAX_PEERS], host_in[MAX_PEERS + 1];
} direct_builder;

static void post_host_rows(direct_builder *d, int s) {
    if (d->within == 0 || s >= d->n_turns) return;
    d->b->remote_share = d->r->within_share;
    d->host_in[s] = post(d->b, ROWS, d->within, d->r->options.ranks_per_host - 1);
    d->b->remote_share = d->r->remote_share;
}

/* The rank encodes its own fragment last, while others are on the wire. Of several batches, the rest of one is posted as
 * soon as its headers have arrived, between two pieces of work. */
static void send_fragments(direct_builder *d) {
    tagc_sim_transfer *transfers = d->b->job->transfers;
    for (int s = 0; s < d->n_turns; s++) {
        if (d->within > 0) {
            wait(d->b, d->host_in[s]);
            post_host_rows(d, s + HOST_DEPTH);
        }
        work(d->b, (s < d->n ? d->each : d->own) * d->w->encode_s);
        if (s < d->n) d->front_out[s] = post(d->b, HEADERS, d->front, d->peers);
        if (s >= d->n || d->n == 1) continue;
        d->rest_out[s] = add_transfer(d->b, d->rest, d->peers);
        transfers[d->front_out[s]].then = &transfers[d->rest_out[s]];
    }
    for (int s = 0; s < d->n; s++) {
        wait(d->b, d->front_out[s]);
        if (d->n == 1) d->rest_out[s] = post(d->b, BODIES, d->rest, d->peers);
    }
}

/* The sums that return. Those of small units are in one message with their headers. */
static void return_results(builder *b, const tagc_reduction *r, double headers, double results) {
    int n_peers = r->n_ranks / r->options.ranks_per_host - 1;
    if (n_peers == 0) n_peers = r->n_ranks - 1; /* within the host, no headers */
    if (r->volume.eager_bytes > 0 || headers == 0) {
        wait(b, post(b, RESULTS, headers + results, n_peers));
        return;
    }
    wait(b, post(b, RESULTS, headers, n_peers));
    wait(b, post(b, RESULT_RESTS, results, n_peers));
}

/* In two levels a turn begins with the sum over the ranks of the host. */
static void direct_step(builder *b, const tagc_reduction *r, const codec_work *w) {
    const double *n_bytes = r->volume.n_bytes, *n_within = r->volume.n_within_bytes;
    int n_hosts = r->n_ranks / r->options.ranks_per_host, n_others = n_hosts - 1;
    int n = r->volume.n_parcels < MAX_PEERS ? r->volume.n_parcels : MAX_PEERS;
    double agreement = (double)(r->n_ranks - 1) * TAGC_WIRE_HEADER_BYTES;
    double headers = (double)n_others * TAGC_WIRE_HEADER_BYTES, within = n_within[TAGC_LEG_VALUES];
    direct_builder d = {.b = b, .r = r, .w = w, .n = n, .n_turns = n + 1, .own = 1.0 / n_hosts};
    d.within = within / d.n_turns;
    if (n > 0) {
        double eager = n_others * r->volume.eager_bytes;
        d.each = (1 - d.own) / n;
        d.front = (headers + eager) / n;
        double rest = n_bytes[TAGC_LEG_INDEX] + n_bytes[TAGC_LEG_VALUES] - within - eager;
        d.rest = rest < 1 ? 0 : rest / n; /* less than a byte is rounding */
        d.peers = (double)n_others / n;
    }
    b->remote_share = r->remote_share;
    for (int s = 0; s < HOST_DEPTH; s++) post_host_rows(&d, s);
    send_fragments(&d);
    double results = n_bytes[TAGC_LEG_RESULT], others = n_bytes[TAGC_LEG_CONTROL] - agreement - headers;
    double decode_s = w->decode_s, first = r->sent_density / tagc_reduction_decoded(r);
    for (int s = 0; s < n; s++) {
        wait(b, d.rest_out[s]);
        work(b, first * decode_s * d.each);
    }
    work(b, first * decode_s * d.own);
    if (results > 0) {
        return_results(b, r, others, results);
        work(b, (1 - first) * decode_s);
    }
    agree(b, r, DIRECT_AGREEMENT, agreement);
}

tagc_status tagc_job_create(const tagc_reduction *r, const tagc_costs *costs, tagc_sim_job *out) {
    *out = (tagc_sim_job){0};
    builder b = {.job = out, .remote_share = r->remote_share};
    int exchange = r->options.exchange;
    if (r->n_ranks == 1 || !costs)
        return TAGC_OK; /* a single rank sends nothing, and its work is negligible */
    if (exchange != TAGC_EXCHANGE_DENSE && exchange != TAGC_EXCHANGE_DIRECT)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "exchange is %s, allowed in a forecast: dense and direct",
                         tagc_exchange_names[exchange]);
    codec_work work = find_work(r, costs);
    out->ops = malloc(MAX_OPS * sizeof *out->ops);
    out->transfers = malloc(MAX_TRANSFERS * sizeof *out->transfers);
    if (!out->ops || !out->transfers) {
        tagc_job_destroy(out);
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for the steps of a reducer");
    }
    if (exchange == TAGC_EXCHANGE_DENSE)
        dense_step(&b, r);
    else
        direct_step(&b, r, &work);
    return TAGC_OK;
}

void tagc_job_destroy(tagc_sim_job *job) {
    free(job->ops);
    free(job->transfers);
    *job = (tagc_sim_job){0};
}
