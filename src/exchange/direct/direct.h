/* Direct: every rank's own encoded fragments go straight to their owners, who decode and add.
 *
 * Ranks are counted over hosts: rank = host * per_host + local. With one rank per host a "host" is a rank. With more,
 * the ranks of a host first add what they have for one destination (hosts.c), and only that sum is encoded:
 *
 *   rank (h, l)  <- rows for hosts' ranks of local index l <-  its host's ranks      plain values
 *   rank (h, l)  -> fragment of the host's sum             ->  ranks (h', l)         encoded
 *
 * All-reduce (results.c): the owner encodes its sums and sends them back the same way. */
#ifndef TAGC_EXCHANGE_DIRECT_DIRECT_H
#define TAGC_EXCHANGE_DIRECT_DIRECT_H

#include "codec/code.h"
#include "core/memory.h"
#include "exchange/wire.h"

#define TAGC_DIRECT_DEPTH 4 /* fragments under way: what is encoded waits for the fourth before it */
#define TAGC_HOST_DEPTH 2   /* rows under way within a host: one being added, one on the wire */

struct tagc_reducer;
struct tagc_message;

/* A fragment as its header tells of it. */
typedef struct tagc_fragment {
    size_t n_bytes, index_bytes; /* the first index_bytes are positions */
    size_t n_items;
    uint64_t sum; /* checksum */
} tagc_fragment;

typedef struct tagc_direct {
    int n_hosts, per_host, host, local;
    int coded; /* 0: all ranks are of one host, and nothing is encoded */
    tagc_code_options fragment, sums;
    const tagc_code *fragment_code, *sums_code;
    size_t row_bytes; /* of one body, at most */
    size_t n_rows;    /* of body_recv: hosts, or ranks where results of other local indices come, too */
    int n_ahead;      /* fragments whose headers went out at the start of the step under way */

    struct tagc_message *header_out, *index_out, *value_out; /* (DEPTH,) */
    char *header_send;                                       /* (DEPTH, header) */
    char *body_send;                                         /* (DEPTH, row_bytes) */
    char *header_recv;                                       /* (n_rows, header) */
    char *body_recv;                                         /* (n_rows, row_bytes) */
    tagc_fragment sent[TAGC_DIRECT_DEPTH];
    tagc_fragment *received; /* (n_rows,) */
    tagc_body *bodies;       /* (hosts,) to be decoded together */

    /* more than one rank per host */
    struct tagc_message *host_in; /* (HOST_DEPTH,) */
    uint16_t *halves_send;        /* (HOST_DEPTH, per_host, shard) bf16 */
    char *host_recv;              /* (HOST_DEPTH, per_host, shard) bf16, or fp32 */
    float *host_sum;              /* (shard) */
} tagc_direct;

/* The host that stage s sends to, and the one it receives from; the last stage is the own host's. */
static inline int tagc_host_to(const tagc_direct *d, int s) {
    return (d->host + 1 + s) % d->n_hosts;
}
static inline int tagc_host_from(const tagc_direct *d, int s) {
    return (d->host + 2 * d->n_hosts - 1 - s) % d->n_hosts;
}
static inline int tagc_rank_of(const tagc_direct *d, int host, int local) {
    return host * d->per_host + local;
}
/* Row of the unit that the rank `local` of `host` owns. */
size_t tagc_direct_row(const struct tagc_reducer *r, int host, int local);

/* Values of the residual: 0 where nothing is ever left. */
uint64_t tagc_direct_residual(const tagc_reducer_options *options, int world_size);
uint64_t tagc_direct_output(const tagc_reducer_options *options, int world_size);

struct tagc_volume;
struct tagc_volume_data;
/* What the rank of a reducer that is laid out sends in a step; see volume.h. */
void tagc_direct_volume(const struct tagc_reducer *r, const struct tagc_volume_data *data,
                        struct tagc_volume *out);

void tagc_direct_place(struct tagc_reducer *r, tagc_arena *arena);
/* Posts what needs no waiting; the rest up to the begin of the agreement; its end, which posts nothing. */
void tagc_direct_start(struct tagc_reducer *r);
tagc_status tagc_direct_step(struct tagc_reducer *r);
tagc_status tagc_direct_finish(struct tagc_reducer *r);

/* ---- between direct.c, hosts.c and results.c ---- */

/* Where the sums of the own row stand. */
float *tagc_direct_sums(const struct tagc_reducer *r);
tagc_wire_header tagc_direct_header(const struct tagc_reducer *r, const tagc_fragment *body);
/* The header in row `row` as sent by `from`. After a wrong one the comm is broken. */
tagc_status tagc_direct_announced(struct tagc_reducer *r, size_t row, int from, const tagc_code *code,
                                  const tagc_code_options *options);
/* 1 when the body in row `row` can be decoded; what is wrong with it is noted. */
int tagc_direct_is_sound(struct tagc_reducer *r, size_t row, int from, const tagc_code *code,
                         const tagc_code_options *options);
/* Row `row` of what arrived, as the codes take it. */
tagc_body tagc_direct_body(const struct tagc_reducer *r, size_t row);

void tagc_hosts_place(struct tagc_reducer *r, tagc_arena *arena);
void tagc_hosts_post(struct tagc_reducer *r, int s);
/* The host's sum for stage s, in d->host_sum. Posts the stage after the next. */
tagc_status tagc_hosts_add(struct tagc_reducer *r, int s);
/* All of a step where all ranks are of one host. */
tagc_status tagc_hosts_step(struct tagc_reducer *r);

tagc_status tagc_direct_results(struct tagc_reducer *r);

#endif
