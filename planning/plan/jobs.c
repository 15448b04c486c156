/* The order of work and transfers in lib/exchange: dense.c, paper/index.c and direct/direct.c. Many small pieces are merged
 * into a few, because the order of waits matters much more than the number of pieces. */
#include "plan/deployment.h"

#include "core/status.h"
#include "exchange/wire.h"
#include <math.h>
#include <stdlib.h>

enum { DEPTH = 3, MAX_CHUNKS = 16, MAX_PEERS = 12, HOST_DEPTH = 2 };
/* Of a job, with room to spare. The longest is direct in two levels with MAX_PEERS batches and sums that return. */
enum { MAX_OPS = 160, MAX_TRANSFERS = 80 };

/* Seconds of work of one step over a whole unit. */
typedef struct phase_work {
    double phase_s[TAGC_N_PHASES];
    double send_within_s, add_within_s; /* two levels: before that, among the ranks of a host */
} phase_work;

typedef struct builder {
    tagc_sim_job *job;
    double remote_share; /* of the transfers posted next */
} builder;

/* ---- work ---- */

/* The work of a dense step is memory traffic. */
static void dense_work(const tagc_reduction *r, double byte_s, phase_work *out) {
    int per_host = r->options.ranks_per_host, n_senders = r->n_ranks / per_host;
    double n_unit = (double)r->options.n_elems / per_host, n_shard = n_unit / n_senders;
    int is_bf16 = r->options.format == TAGC_FORMAT_BF16;
    double add = (is_bf16 ? 6 : 0) + 12; /* bytes to widen an element, then to read two and write one */
    if (is_bf16) out->phase_s[TAGC_PHASE_ENCODE] = n_unit * 6 * byte_s;
    out->phase_s[TAGC_PHASE_DECODE] =
        n_shard * (n_senders * add + 12) * byte_s; /* 12: scale, and look for NaN */
    if (is_bf16 && r->options.output != TAGC_OUTPUT_SHARD)
        out->phase_s[TAGC_PHASE_DECODE] += n_unit * 6 * byte_s;
}

/* Codes without positions differ in cost from those with positions. */
static int is_blocks(int exchange, double sparsity) {
    return exchange == TAGC_EXCHANGE_DIRECT && sparsity == 0;
}

/* Every value as fp32 or bf16. */
static int is_plain(const tagc_reducer_options *o) {
    return is_blocks(o->exchange, o->sparsity) && o->format <= TAGC_FORMAT_BF16;
}

/* The nearest measured setting: the same exchange, then the closest sparsity, then format or ratio. */
static const tagc_codec_cost *find_cost(const tagc_reduction *r, const tagc_costs *costs) {
    const tagc_codec_cost *best = NULL;
    double least = (double)INFINITY, ratio = r->options.paper ? r->options.paper->ratio : 0;
    for (int i = 0; i < costs->n_codec; i++) {
        const tagc_codec_cost *c = &costs->codec[i];
        if (c->exchange != r->options.exchange ||
            is_blocks(c->exchange, c->sparsity) != is_blocks(r->options.exchange, r->options.sparsity))
            continue;
        double density = fmax(1 - r->options.sparsity, 1e-6), measured = fmax(1 - c->sparsity, 1e-6);
        double off = 4 * fabs(log(density / measured)) + fabs(log((ratio + 1) / (c->ratio + 1)));
        if (c->exchange == TAGC_EXCHANGE_DIRECT)
            off += (c->format != r->options.format) +
                   2 * (c->all_reduce != (r->options.output != TAGC_OUTPUT_SHARD));
        if (off >= least) continue;
        least = off;
        best = c;
    }
    return best;
}

static const char *exchange_name(int exchange) {
    return exchange == TAGC_EXCHANGE_SKETCH   ? "sketch"
           : exchange == TAGC_EXCHANGE_PACKED ? "packed"
                                              : "direct";
}

/* Selecting and indexing read the whole unit; encoding and decoding only what is sent. In direct, encoding is one pass over
 * the unit; if hosts add their gradients first, only their sums are encoded. */
static tagc_status codec_work(const tagc_reduction *r, const tagc_costs *costs, phase_work *out) {
    const tagc_codec_cost *cost = find_cost(r, costs);
    int is_direct = r->options.exchange == TAGC_EXCHANGE_DIRECT;
    if (!cost && is_plain(&r->options)) { /* only memory traffic, as in a dense step */
        dense_work(r, costs->byte_s, out);
        return TAGC_OK;
    }
    if (!cost)
        return tagc_fail(
            TAGC_ERR_UNSUPPORTED,
            "no profile with such an arm, nor --codec-ns, says what exchange %s%s takes to compute",
            exchange_name(r->options.exchange),
            is_blocks(r->options.exchange, r->options.sparsity) ? " at sparsity 0" : "");
    double n = (double)r->options.n_elems / (is_direct ? r->options.ranks_per_host : 1);
    double touched = is_direct ? tagc_reduction_decoded(r) : r->union_density;
    double scale = cost->union_density > 0 ? touched / cost->union_density : 1;
    for (int phase = 0; phase < TAGC_PHASE_WAIT; phase++) {
        int is_scaled = phase == TAGC_PHASE_DECODE || (phase == TAGC_PHASE_ENCODE && !is_direct);
        out->phase_s[phase] = cost->elem_s[phase] * n * (is_scaled ? scale : 1);
    }
    return TAGC_OK;
}

/* A dense step among the ranks of a host, in bf16 unless values are fp32; with all_reduce the sums are returned. */
static void within_work(const tagc_reduction *r, double byte_s, phase_work *out) {
    double n_unit = (double)r->options.n_elems, n_ranks = r->options.ranks_per_host;
    int is_bf16 = r->options.format != TAGC_FORMAT_FP32;
    out->send_within_s = is_bf16 ? n_unit * 6 * byte_s : 0;
    out->add_within_s = n_unit / n_ranks * n_ranks * ((is_bf16 ? 6 : 0) + 12) * byte_s;
}

static tagc_status find_work(const tagc_reduction *r, const tagc_costs *costs, phase_work *out) {
    *out = (phase_work){0};
    if (!costs) return TAGC_OK;
    if (r->options.exchange == TAGC_EXCHANGE_DENSE) {
        dense_work(r, costs->byte_s, out);
    } else {
        int is_coded = r->n_ranks > r->options.ranks_per_host; /* else all ranks are of one host */
        if (is_coded) TAGC_TRY(codec_work(r, costs, out));
        if (r->options.ranks_per_host > 1) within_work(r, costs->byte_s, out);
    }
    for (int phase = 0; phase < TAGC_N_PHASES; phase++) out->phase_s[phase] *= costs->codec_factor;
    out->send_within_s *= costs->codec_factor;
    out->add_within_s *= costs->codec_factor;
    return TAGC_OK;
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
static void dense_step(builder *b, const tagc_reduction *r, const double *phase_s) {
    enum { IN, OUT, AGREEMENT };
    const double *n_bytes = r->volume.n_bytes;
    int in[MAX_CHUNKS], out[MAX_CHUNKS];
    size_t chunk = r->volume.chunk_elems, shard = (size_t)(r->options.n_elems / (uint64_t)r->n_ranks);
    size_t n_real = chunk ? (shard + chunk - 1) / chunk : 1;
    int n = n_real < MAX_CHUNKS ? (int)n_real : MAX_CHUNKS, n_peers = r->n_ranks - 1,
        is_all = r->options.output != TAGC_OUTPUT_SHARD;
    double encode_s = phase_s[TAGC_PHASE_ENCODE] / n, decode_s = phase_s[TAGC_PHASE_DECODE] / n;
    for (int c = 0; c < n && c < DEPTH; c++) {
        work(b, encode_s);
        in[c] = post(b, IN, n_bytes[TAGC_LEG_VALUES] / n, n_peers);
    }
    for (int c = 0; c < n; c++) {
        wait(b, in[c]);
        if (is_all && c >= DEPTH) wait(b, out[c - DEPTH]);
        work(b, decode_s);
        if (is_all) out[c] = post(b, OUT, n_bytes[TAGC_LEG_RESULT] / n, n_peers);
        if (c + DEPTH >= n) continue;
        work(b, encode_s);
        in[c + DEPTH] = post(b, IN, n_bytes[TAGC_LEG_VALUES] / n, n_peers);
    }
    int agreement = post(b, AGREEMENT, n_bytes[TAGC_LEG_CONTROL], n_peers); /* beside the sums */
    for (int c = n > DEPTH ? n - DEPTH : 0; is_all && c < n; c++) wait(b, out[c]);
    wait(b, agreement);
}

/* Merges peers into at most MAX_PEERS. The rank's own shard is one more piece of work. */
static void indexed_step(builder *b, const tagc_reduction *r, const double *phase_s) {
    enum { INDEX, UNION, AGREEMENT, VALUES, LAST };
    const double *n_bytes = r->volume.n_bytes;
    int n_others = r->n_ranks - 1, n = n_others < MAX_PEERS ? n_others : MAX_PEERS, moving[MAX_PEERS];
    double own = 1.0 / r->n_ranks, each = n > 0 ? (1 - own) / n : 0,
           of_each = (double)n_others / n;            /* peers */
    double index_bytes = n_bytes[TAGC_LEG_INDEX] / 2; /* to the owners; the unions that return are as large */
    double agree_bytes = n_bytes[TAGC_LEG_CONTROL] / (double)r->volume.n_transfers[TAGC_LEG_CONTROL];
    int n_left = (int)r->volume.n_transfers[TAGC_LEG_LEFTOVER]; /* rounds: positions, then values */
    for (int s = 0; s < n; s++) {
        work(b, each * (phase_s[TAGC_PHASE_SELECT] + phase_s[TAGC_PHASE_INDEX] / 3));
        moving[s] = post(b, INDEX, index_bytes / n, of_each);
    }
    work(b, own * (phase_s[TAGC_PHASE_SELECT] + phase_s[TAGC_PHASE_INDEX] / 3));
    for (int s = 0; s < n; s++) wait(b, moving[s]);
    work(b, phase_s[TAGC_PHASE_INDEX] / 3);
    wait(b, post(b, UNION, index_bytes, n_others));
    work(b, phase_s[TAGC_PHASE_INDEX] / 3);
    int agreement = post(b, AGREEMENT, agree_bytes, n_others);
    for (int s = 0; s < n; s++) {
        work(b, each * phase_s[TAGC_PHASE_ENCODE]);
        if (s == 0) wait(b, agreement);
        moving[s] = post(b, VALUES, n_bytes[TAGC_LEG_VALUES] / n, of_each);
    }
    work(b, own * phase_s[TAGC_PHASE_ENCODE]);
    /* The worker prepares peeling while the cells are sent. */
    double ahead = r->volume.sketching ? 0.5 : 0;
    work(b, ahead * phase_s[TAGC_PHASE_DECODE]);
    for (int s = 0; s < n; s++) wait(b, moving[s]);
    work(b, (1 - ahead) * phase_s[TAGC_PHASE_DECODE]);
    if (r->volume.sketching) agree(b, r, LAST, agree_bytes);
    for (int round = 0; round < n_left; round++)
        wait(b, post(b, LAST, n_bytes[TAGC_LEG_LEFTOVER] / n_left, n_others));
    if (n_left > 0) agree(b, r, LAST, agree_bytes);
    if (r->options.output != TAGC_OUTPUT_SHARD) wait(b, post(b, LAST, n_bytes[TAGC_LEG_RESULT], n_others));
}

enum { ROWS, HEADERS, BODIES, RESULTS, RESULT_RESTS, DIRECT_AGREEMENT };

typedef struct direct_builder {
    builder *b;
    const tagc_reduction *r;
    const phase_work *w;
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
    work(d->b, (s < d->n ? d->each : d->own) * d->w->send_within_s);
    d->host_in[s] = post(d->b, ROWS, d->within, d->r->options.ranks_per_host - 1);
    d->b->remote_share = d->r->remote_share;
}

/* The rank encodes its own fragment last, while others are on the wire. Of several batches, the rest of one is posted as
 * soon as its headers have arrived, between two pieces of work. */
static void send_fragments(direct_builder *d) {
    const double *phase_s = d->w->phase_s;
    tagc_sim_transfer *transfers = d->b->job->transfers;
    double encode_s = phase_s[TAGC_PHASE_SELECT] + phase_s[TAGC_PHASE_INDEX] + phase_s[TAGC_PHASE_ENCODE];
    for (int s = 0; s < d->n_turns; s++) {
        if (d->within > 0) {
            wait(d->b, d->host_in[s]);
            work(d->b, (s < d->n ? d->each : d->own) * d->w->add_within_s);
            post_host_rows(d, s + HOST_DEPTH);
        }
        work(d->b, (s < d->n ? d->each : d->own) * encode_s);
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
static void direct_step(builder *b, const tagc_reduction *r, const phase_work *w) {
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
    double decode_s = w->phase_s[TAGC_PHASE_DECODE], first = r->sent_density / tagc_reduction_decoded(r);
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
    phase_work work;
    *out = (tagc_sim_job){0};
    builder b = {.job = out, .remote_share = r->remote_share};
    int exchange = r->options.exchange;
    if (r->n_ranks == 1) return TAGC_OK; /* a single rank sends nothing, and its work is negligible */
    TAGC_TRY(find_work(r, costs, &work));
    out->ops = malloc(MAX_OPS * sizeof *out->ops);
    out->transfers = malloc(MAX_TRANSFERS * sizeof *out->transfers);
    if (!out->ops || !out->transfers) {
        tagc_job_destroy(out);
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for the steps of a reducer");
    }
    if (exchange == TAGC_EXCHANGE_DENSE)
        dense_step(&b, r, work.phase_s);
    else if (exchange == TAGC_EXCHANGE_DIRECT)
        direct_step(&b, r, &work);
    else
        indexed_step(&b, r, work.phase_s);
    return TAGC_OK;
}

void tagc_job_destroy(tagc_sim_job *job) {
    free(job->ops);
    free(job->transfers);
    *job = (tagc_sim_job){0};
}
