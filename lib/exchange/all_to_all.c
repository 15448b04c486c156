/* The all-to-all of tagc/all_to_all.h. A call takes one round in which ranks compare counts, then one in which elements travel; with
 * several ranks on a host each of the two has one within the host before it.
 *
 * Two levels: rank l of a host gives each neighbour what is for ranks of that neighbour's local index, on all hosts. So all that goes from
 * this host to rank l of another is on rank l here, which sends it as one message; and what arrives is in the order of the
 * output. Elements wait whole, and are encoded once.
 *
 * Nobody may send before all know that every receiver expects as much: over most transports another length breaks the comm. W * W
 * counts would be too many to share. So each rank shares two sums of checksums, which are equal over all ranks where all counts agree. */
#include "exchange/all_to_all.h"
#include "core/cpu.h"
#include "core/sized.h"
#include "core/xxh3.h"
#include "exchange/blocks.h"
#include "exchange/options.h"
#include "exchange/wire.h"

#include <stdio.h>
#include <string.h>

enum { WORD_BYTES = sizeof(tagc_counts_word) };

static const tagc_all_to_all_call call_defaults = {.element_bytes = 4};
static const tagc_sized call_struct = {"tagc_all_to_all_call", sizeof(tagc_all_to_all_call),
                                       offsetof(tagc_all_to_all_call, expected_word) + sizeof(uint64_t),
                                       &call_defaults};

void tagc_all_to_all_call_init_sized(tagc_all_to_all_call *call, size_t struct_bytes) {
    tagc_sized_init(&call_struct, call, struct_bytes);
}

/* ---- life ---- */

static size_t within_bytes(const tagc_all_to_all *a) {
    return TAGC_WIRE_HEADER_BYTES + WORD_BYTES + (size_t)a->world_size * sizeof *a->local;
}

static void place(tagc_all_to_all *a, tagc_arena *arena) {
    size_t n_ranks = (size_t)a->world_size, n_hosts = (size_t)a->n_hosts, per_host = (size_t)a->per_host;
    size_t between = (n_hosts) * (TAGC_WIRE_HEADER_BYTES + WORD_BYTES), within = per_host * within_bytes(a);
    a->own = tagc_arena_take(arena, 1, within_bytes(a));
    a->heard = tagc_arena_take(arena, 1, between > within ? between : within);
    a->local = tagc_arena_take(arena, per_host * n_ranks, sizeof *a->local);
    a->from_in = tagc_arena_take(arena, n_ranks, sizeof *a->from_in);
    a->to_out = tagc_arena_take(arena, n_ranks, sizeof *a->to_out);
    a->n_to = tagc_arena_take(arena, n_hosts, sizeof *a->n_to);
    a->n_from = tagc_arena_take(arena, n_hosts, sizeof *a->n_from);
    a->told = tagc_arena_take(arena, n_ranks, sizeof *a->told);
    a->said = tagc_arena_take(arena, n_hosts > per_host ? n_hosts : per_host, sizeof *a->said);
    a->sends = tagc_arena_take(arena, n_ranks, sizeof *a->sends);
    a->receives = tagc_arena_take(arena, n_ranks, sizeof *a->receives);
}

static tagc_status make(tagc_comm *comm, const tagc_all_to_all_options *options, tagc_all_to_all **out) {
    void *memory;
    TAGC_TRY(tagc_cpu_check());
    TAGC_TRY(tagc_memory_create(sizeof(tagc_all_to_all), "all-to-all", &memory));
    tagc_all_to_all *a = *out = memory;
    a->comm = comm;
    tagc_comm_hold(comm);
    a->rank = tagc_comm_rank(comm);
    a->world_size = tagc_comm_world_size(comm);
    TAGC_TRY(tagc_all_to_all_options_check(options, a->world_size, &a->options));
    a->per_host = a->options.ranks_per_host;
    a->n_hosts = a->world_size / a->per_host;
    a->host = a->rank / a->per_host;
    a->place = a->rank % a->per_host;
    tagc_arena arena = {0};
    place(a, &arena);
    if (arena.overflow)
        return tagc_fail(TAGC_ERR_MEMORY, "ranks_per_host is %d: too many counts", a->per_host);
    TAGC_TRY(tagc_memory_create(arena.n_bytes, "counts of an all-to-all", &a->arena));
    a->arena_bytes = arena.n_bytes;
    tagc_comm_count(comm, TAGC_HELD_BUFFERS, (int64_t)a->arena_bytes);
    arena = (tagc_arena){.base = a->arena};
    place(a, &arena);
    return TAGC_OK;
}

tagc_status tagc_all_to_all_create(tagc_comm *comm, const tagc_all_to_all_options *options,
                                   tagc_all_to_all **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!comm) return tagc_fail(TAGC_ERR_ARGUMENT, "comm is NULL");
    TAGC_TRY(tagc_comm_check_open(comm));
    tagc_all_to_all *a = NULL;
    tagc_status status = make(comm, options, &a);
    status = tagc_all_to_all_options_agree(comm, status, status == TAGC_OK ? &a->options : NULL,
                                           a ? &a->identity : NULL);
    if (status != TAGC_OK) {
        tagc_all_to_all_destroy(a);
        return status;
    }
    *out = a;
    return TAGC_OK;
}

void tagc_all_to_all_destroy(tagc_all_to_all *a) {
    if (!a || tagc_comm_is_fork(a->comm)) return;
    if (a->begun) (void)tagc_all_to_all_end(a);
    tagc_comm_count(a->comm, TAGC_HELD_BUFFERS, -(int64_t)(a->arena_bytes + a->room_bytes));
    tagc_identity_close(a->comm, &a->identity);
    tagc_comm_let_go(a->comm);
    tagc_memory_destroy(a->arena);
    tagc_memory_destroy(a->room);
    tagc_memory_destroy(a);
}

/* ---- what a call has ---- */

static uint64_t checksum_of(int from, int to, uint64_t count) {
    uint64_t words[3] = {(uint64_t)from, (uint64_t)to, count};
    return tagc_xxh3(words, sizeof words, 0);
}

/* Of this rank. */
static tagc_counts_word own_word(const tagc_all_to_all *a) {
    const tagc_all_to_all_call *c = &a->call;
    tagc_counts_word word = {c->sent_word, c->expected_word, c->element_bytes};
    if (a->is_coded) word.alike |= (uint64_t)a->blocks.format << 8 | (uint64_t)a->blocks.block << 16;
    for (int r = 0; r < a->world_size; r++) {
        word.sent += checksum_of(a->rank, r, c->sends[r]);
        word.expected += checksum_of(r, a->rank, c->receives[r]);
    }
    return word;
}

/* Whether a message of n elements between hosts is not in blocks. Both ends know n. */
static int travels_whole(const tagc_all_to_all *a, uint64_t n) {
    return !a->is_coded || n == 0 || n < (uint64_t)a->options.min_elems || n > TAGC_BLOCKS_MAX_ELEMS;
}

static uint64_t message_bytes(const tagc_all_to_all *a, uint64_t n) {
    uint64_t n_bytes = n * a->call.element_bytes;
    if (!travels_whole(a, n)) (void)tagc_blocks_bytes(&a->blocks, n, &n_bytes);
    return n_bytes;
}

/* ---- headers ---- */

static tagc_status move(tagc_all_to_all *a, tagc_leg leg, uint32_t n_peers, const void *from, void *to) {
    tagc_ticket ticket = {.transfer = {.n_sends = n_peers,
                                       .n_receives = n_peers,
                                       .sends = a->sends,
                                       .receives = a->receives,
                                       .send = from,
                                       .recv = to},
                          .leg = leg,
                          .tag = a->options.tag,
                          .of = &a->identity};
    tagc_comm_post(a->comm, TAGC_LANE_GATHER, &ticket);
    return tagc_comm_wait(a->comm, &ticket);
}

/* Sends what `own` has to n ranks, `first` and each step-th behind it, and hears as much from each. The i-th is this rank. */
static tagc_status hear(tagc_all_to_all *a, const tagc_counts_said *own, size_t n_bytes, int first, int step,
                        int n, int i) {
    tagc_wire_header header = {.kind = TAGC_WIRE_COUNTS,
                               .rank = (uint32_t)a->rank,
                               .k = (uint32_t)own->rank,
                               .n_elems = (uint64_t)a->world_size,
                               .unit = a->identity.unit,
                               .n_items = (uint32_t)((n_bytes - TAGC_WIRE_HEADER_BYTES) / sizeof(uint64_t)),
                               .status = (uint32_t)own->status,
                               .body_bytes = n_bytes - TAGC_WIRE_HEADER_BYTES,
                               .step = a->n_begun};
    memcpy(a->own + TAGC_WIRE_HEADER_BYTES, &own->word, sizeof own->word);
    tagc_wire_write(&header, a->own);
    uint32_t n_peers = 0;
    for (int p = 0; p < n; p++) {
        if (p == i) continue;
        a->sends[n_peers] = (tagc_part){.peer = first + p * step, .n_bytes = n_bytes};
        a->receives[n_peers++] =
            (tagc_part){.peer = first + p * step, .n_bytes = n_bytes, .offset = (uint64_t)p * n_bytes};
    }
    memcpy(a->heard + (size_t)i * n_bytes, a->own, n_bytes);
    return move(a, TAGC_LEG_CONTROL, n_peers, a->own, a->heard);
}

/* Reads what a rank said. After damage, or where that rank is in a call of another object, nobody knows what the others do next: they may
 * have heard something else. */
static tagc_status read_said(tagc_all_to_all *a, const uint8_t *message, size_t n_bytes, int from,
                             tagc_counts_said *said) {
    tagc_wire_header header = {0}, expected = {.kind = TAGC_WIRE_COUNTS,
                                               .rank = (uint32_t)from,
                                               .n_elems = (uint64_t)a->world_size,
                                               .step = a->n_begun};
    tagc_status status = tagc_wire_read(message, n_bytes, &header);
    if (status == TAGC_OK && header.kind == TAGC_WIRE_COUNTS && header.unit != a->identity.unit)
        return tagc_identity_abort(a->comm, &a->identity, from, header.unit);
    expected.k = header.k;
    if (status == TAGC_OK) status = tagc_wire_expect(&header, &expected);
    if (status == TAGC_OK && header.k >= (uint32_t)a->world_size)
        status = tagc_fail(TAGC_ERR_CORRUPT, "rank %u of %d failed", header.k, a->world_size);
    if (status != TAGC_OK) {
        status = tagc_fail_in(status, "counts from rank %d arrived damaged", tagc_comm_name(a->comm, from));
        return tagc_comm_give_up(a->comm, status, from);
    }
    *said = (tagc_counts_said){.status = (tagc_status)header.status, .rank = (int)header.k};
    memcpy(&said->word, message + TAGC_WIRE_HEADER_BYTES, sizeof said->word);
    return TAGC_OK;
}

/* What n ranks or hosts say together: the first failure, or that they are in other calls, and the sums. */
static tagc_counts_said together(const tagc_counts_said *said, int n) {
    tagc_counts_said all = said[0];
    for (int i = 1; i < n; i++) {
        if (all.status == TAGC_OK) {
            all.status = said[i].status;
            all.rank = said[i].rank;
        }
        all.word.sent += said[i].word.sent;
        all.word.expected += said[i].word.expected;
    }
    for (int i = 1; i < n && all.status == TAGC_OK; i++)
        if (said[i].word.alike != said[0].word.alike) {
            all.status = TAGC_ERR_MISMATCH;
            all.rank = said[i].rank;
        }
    return all;
}

/* Learns what neighbours have for each rank, and how they are. */
static tagc_status hear_host(tagc_all_to_all *a, tagc_counts_said *host) {
    size_t n_bytes = within_bytes(a), n_counts = (size_t)a->world_size * sizeof *a->local;
    tagc_counts_said own = *host;
    uint8_t *body = a->own + TAGC_WIRE_HEADER_BYTES + WORD_BYTES;
    if (own.status == TAGC_OK)
        memcpy(body, a->call.sends, n_counts);
    else
        memset(body, 0, n_counts);
    int first = a->host * a->per_host;
    TAGC_TRY(hear(a, &own, n_bytes, first, 1, a->per_host, a->place));
    for (int l = 0; l < a->per_host; l++) {
        const uint8_t *message = a->heard + (size_t)l * n_bytes;
        uint64_t *counts = a->local + (size_t)l * (size_t)a->world_size;
        TAGC_TRY(read_said(a, message, n_bytes, first + l, &a->said[l]));
        memcpy(counts, message + TAGC_WIRE_HEADER_BYTES + WORD_BYTES, n_counts);
        for (int r = 0; r < a->world_size; r++)
            if (counts[r] > TAGC_MAX_COUNT)
                return tagc_comm_give_up(
                    a->comm,
                    tagc_fail(TAGC_ERR_CORRUPT, "rank %d says that it sends %llu elements",
                              tagc_comm_name(a->comm, first + l), (unsigned long long)counts[r]),
                    first + l);
    }
    *host = together(a->said, a->per_host);
    return TAGC_OK;
}

/* All ranks know that some count differs: each learns what the others have for it, and the one that it differs on can say so. */
static tagc_status name_mismatch(tagc_all_to_all *a) {
    uint32_t n_peers = 0;
    for (int r = 0; r < a->world_size; r++) {
        uint64_t at = (uint64_t)r * sizeof *a->told;
        if (r == a->rank) continue;
        a->sends[n_peers] = (tagc_part){.peer = r, .n_bytes = sizeof *a->told, .offset = at};
        a->receives[n_peers] = a->sends[n_peers];
        n_peers++;
    }
    TAGC_TRY(move(a, TAGC_LEG_CONTROL, n_peers, a->call.sends, a->told));
    for (int r = 0; r < a->world_size; r++)
        if (r != a->rank && a->told[r] != a->call.receives[r])
            return tagc_fail(TAGC_ERR_MISMATCH, "receives[%d] is %llu, and rank %d sends %llu elements", r,
                             (unsigned long long)a->call.receives[r], tagc_comm_name(a->comm, r),
                             (unsigned long long)a->told[r]);
    return tagc_fail(TAGC_ERR_MISMATCH, "what some rank sends is not what another rank expects of it");
}

static tagc_status fail_as(const tagc_all_to_all *a, const tagc_counts_said *all) {
    int name = tagc_comm_name(a->comm, all->rank);
    if (a->failure == all->status) return tagc_fail(all->status, "%s", a->failure_text);
    if (tagc_status_check_own(all->status) != TAGC_OK)
        return tagc_fail(TAGC_ERR_CORRUPT, "rank %d says that it has status %d", name, (int)all->status);
    if (all->status == TAGC_ERR_CORRUPT)
        return tagc_fail(all->status, "rank %d got damaged elements in the call before this one", name);
    if (all->status == TAGC_ERR_MISMATCH)
        return tagc_fail(all->status, "rank %d comes with another format, block or element_bytes", name);
    return tagc_fail(all->status, "rank %d failed in this call: %s", name, tagc_status_name(all->status));
}

/* Returns the same on all ranks: whether elements may travel. */
static tagc_status agree(tagc_all_to_all *a, const tagc_counts_said *host) {
    size_t n_bytes = TAGC_WIRE_HEADER_BYTES + WORD_BYTES;
    TAGC_TRY(hear(a, host, n_bytes, a->place, a->per_host, a->n_hosts, a->host));
    for (int h = 0; h < a->n_hosts; h++)
        TAGC_TRY(
            read_said(a, a->heard + (size_t)h * n_bytes, n_bytes, h * a->per_host + a->place, &a->said[h]));
    tagc_counts_said all = together(a->said, a->n_hosts);
    if (all.status != TAGC_OK) return fail_as(a, &all);
    return all.word.sent == all.word.expected ? TAGC_OK : name_mismatch(a);
}

/* ---- elements ---- */

/* How many elements rank l of this host has for a rank. */
static uint64_t count_of(const tagc_all_to_all *a, int l, int to) {
    return a->per_host == 1 ? a->call.sends[to] : a->local[(size_t)l * (size_t)a->world_size + (size_t)to];
}

/* Elements that rank `from` of this host has for ranks of local index `place`, on all hosts. */
static uint64_t count_for_place(const tagc_all_to_all *a, int from, int place) {
    uint64_t n = 0;
    for (int h = 0; h < a->n_hosts; h++) n += count_of(a, from, h * a->per_host + place);
    return n;
}

static void find_counts(tagc_all_to_all *a) {
    const tagc_all_to_all_call *c = &a->call;
    uint64_t in = 0, out = 0;
    for (int r = 0; r < a->world_size; in += c->sends[r], out += c->receives[r], r++) {
        a->from_in[r] = in;
        a->to_out[r] = out;
    }
    for (int h = 0; h < a->n_hosts; h++) {
        a->n_to[h] = a->n_from[h] = 0;
        for (int l = 0; l < a->per_host; l++) {
            a->n_to[h] += count_of(a, l, h * a->per_host + a->place);
            a->n_from[h] += c->receives[h * a->per_host + l];
        }
    }
}

static void place_room(tagc_all_to_all *a, tagc_arena *room) {
    uint64_t n_packed = 0, n_came = 0, n_staged = 0, n_to = 0, n_from = 0;
    for (int l = 0; l < a->per_host; l++) {
        if (l == a->place) continue;
        n_packed += count_for_place(a, a->place, l);
        n_came += count_for_place(a, l, a->place);
    }
    for (int h = 0; h < a->n_hosts; h++) {
        if (h == a->host) continue;
        n_staged += a->per_host > 1 ? a->n_to[h] : 0;
        n_to += tagc_aligned((size_t)message_bytes(a, a->n_to[h]));
        n_from += tagc_aligned((size_t)message_bytes(a, a->n_from[h]));
    }
    size_t element = (size_t)a->call.element_bytes;
    a->packed = tagc_arena_take(room, (size_t)n_packed, element);
    a->came = tagc_arena_take(room, (size_t)n_came, element);
    a->staged = tagc_arena_take(room, (size_t)n_staged, element);
    a->to_hosts = tagc_arena_take(room, (size_t)n_to, 1);
    a->from_hosts = tagc_arena_take(room, (size_t)n_from, 1);
}

static tagc_status make_room(tagc_all_to_all *a) {
    tagc_arena room = {0};
    find_counts(a);
    place_room(a, &room);
    if (room.overflow) return tagc_fail(TAGC_ERR_MEMORY, "messages do not fit into the address space");
    if (!a->room || room.n_bytes > a->room_bytes) {
        tagc_comm_count(a->comm, TAGC_HELD_BUFFERS, -(int64_t)a->room_bytes);
        tagc_memory_destroy(a->room);
        a->room_bytes = 0;
        a->room = NULL;
        /* a little more, since the next call has other counts */
        size_t n_bytes = room.n_bytes + room.n_bytes / 4;
        TAGC_TRY(tagc_memory_create(n_bytes, "messages of an all-to-all", &a->room));
        a->room_bytes = n_bytes;
        tagc_comm_count(a->comm, TAGC_HELD_BUFFERS, (int64_t)n_bytes);
    }
    room = (tagc_arena){.base = a->room};
    place_room(a, &room);
    return TAGC_OK;
}

static const uint8_t *input_of(const tagc_all_to_all *a, int rank) {
    const uint8_t *input = a->call.input;
    return input ? input + a->from_in[rank] * a->call.element_bytes : NULL;
}

static uint8_t *output_of(const tagc_all_to_all *a, int rank) {
    uint8_t *output = a->call.output;
    return output ? output + a->to_out[rank] * a->call.element_bytes : NULL;
}

static uint8_t *copy(uint8_t *to, const uint8_t *from, uint64_t n_bytes) {
    if (!n_bytes) return to; /* both may be NULL */
    memcpy(to, from, (size_t)n_bytes);
    return to + n_bytes;
}

/* Gives each neighbour what is for ranks of its local index, whole, and gets as much for ranks of the own. */
static tagc_status spread_within(tagc_all_to_all *a) {
    uint64_t element = a->call.element_bytes, at_sent = 0, at_came = 0;
    uint8_t *to = a->packed;
    uint32_t n_peers = 0;
    for (int l = 0; l < a->per_host; l++) {
        if (l == a->place) continue;
        int peer = a->host * a->per_host + l;
        uint64_t n_sent = count_for_place(a, a->place, l) * element;
        uint64_t n_came = count_for_place(a, l, a->place) * element;
        for (int h = 0; h < a->n_hosts; h++) {
            int r = h * a->per_host + l;
            to = copy(to, input_of(a, r), a->call.sends[r] * element);
        }
        a->sends[n_peers] = (tagc_part){peer, n_sent, at_sent};
        a->receives[n_peers++] = (tagc_part){peer, n_came, at_came};
        at_sent += n_sent;
        at_came += n_came;
    }
    return move(a, TAGC_LEG_VALUES, n_peers, a->packed, a->came);
}

/* Lays what came from neighbours, and what this rank has itself, out by host: of the own host in the output, of others in `staged`, one
 * behind the other and by rank of the sender. */
static tagc_status lay_out_by_host(tagc_all_to_all *a) {
    uint64_t element = a->call.element_bytes;
    uint8_t *staged = a->staged;
    for (int h = 0; h < a->n_hosts; h++) {
        const uint8_t *came = a->came;
        int to = h * a->per_host + a->place;
        for (int l = 0; l < a->per_host; l++) {
            const uint8_t *from = input_of(a, to);
            uint64_t n = count_of(a, l, to);
            if (l != a->place) {
                from = came;
                for (int before = 0; before < h; before++)
                    from += count_of(a, l, before * a->per_host + a->place) * element;
                came += count_for_place(a, l, a->place) * element;
            }
            int sender = a->host * a->per_host + l;
            if (h != a->host) {
                if (a->per_host > 1) staged = copy(staged, from, n * element); /* else it is in one piece */
            } else if (n == a->call.receives[sender]) {
                copy(output_of(a, sender), from, n * element);
            } else { /* the sums were equal, so that a rank has lied */
                return tagc_fail(TAGC_ERR_MISMATCH, "receives[%d] is %llu, and %llu elements came", sender,
                                 (unsigned long long)a->call.receives[sender], (unsigned long long)n);
            }
        }
    }
    return TAGC_OK;
}

static tagc_status encode(const tagc_all_to_all *a, const uint8_t *values, uint64_t n, int to,
                          uint8_t *message, uint64_t n_bytes) {
    if (travels_whole(a, n)) {
        copy(message, values, n_bytes);
        return TAGC_OK;
    }
    tagc_blocks_options blocks = a->blocks;
    uint64_t seeds[3] = {blocks.seed, (uint64_t)a->rank, (uint64_t)to};
    blocks.seed = tagc_xxh3(seeds, sizeof seeds, 0); /* no two messages of a call round alike */
    return tagc_blocks_encode(&blocks, values, n, message, n_bytes);
}

static tagc_status exchange_hosts(tagc_all_to_all *a) {
    const uint8_t *staged = a->staged;
    uint64_t at_sent = 0, at_came = 0;
    uint32_t n_peers = 0;
    for (int h = 0; h < a->n_hosts; h++) {
        if (h == a->host) continue;
        int peer = h * a->per_host + a->place;
        uint64_t n_sent = message_bytes(a, a->n_to[h]), n_came = message_bytes(a, a->n_from[h]);
        const uint8_t *values = a->per_host > 1 ? staged : input_of(a, peer);
        staged += a->per_host > 1 ? a->n_to[h] * a->call.element_bytes : 0;
        TAGC_TRY(encode(a, values, a->n_to[h], peer, a->to_hosts + at_sent, n_sent));
        a->sends[n_peers] = (tagc_part){peer, n_sent, at_sent};
        a->receives[n_peers++] = (tagc_part){peer, n_came, at_came};
        at_sent += tagc_aligned((size_t)n_sent);
        at_came += tagc_aligned((size_t)n_came);
    }
    return move(a, TAGC_LEG_VALUES, n_peers, a->to_hosts, a->from_hosts);
}

/* Returns the first failure, and decodes the rest. */
static tagc_status decode(const tagc_all_to_all *a) {
    tagc_status failure = TAGC_OK;
    char text[TAGC_ERROR_TEXT_BYTES] = "";
    const uint8_t *message = a->from_hosts;
    for (int h = 0; h < a->n_hosts; h++) {
        if (h == a->host) continue;
        uint64_t n = a->n_from[h], n_bytes = message_bytes(a, n);
        uint8_t *to = output_of(a, h * a->per_host);
        if (travels_whole(a, n)) {
            copy(to, message, n_bytes);
        } else if (tagc_blocks_decode(&a->blocks, message, n_bytes, to, n) != TAGC_OK && failure == TAGC_OK) {
            failure = TAGC_ERR_CORRUPT; /* whatever it is: format, block and length have been compared */
            snprintf(text, sizeof text, "%s", tagc_last_error());
            (void)tagc_fail(failure, "elements from rank %d: %.400s",
                            tagc_comm_name(a->comm, h * a->per_host + a->place), text);
        }
        message += tagc_aligned((size_t)n_bytes);
    }
    return failure;
}

/* ---- a call ---- */

static void note(tagc_all_to_all *a, tagc_status failure) {
    a->failure = failure;
    if (failure != TAGC_OK) snprintf(a->failure_text, sizeof a->failure_text, "%s", tagc_last_error());
}

static tagc_status run(void *arg) {
    tagc_all_to_all *a = arg;
    tagc_counts_said host = {.status = a->failure, .rank = a->rank};
    if (host.status == TAGC_OK) host.word = own_word(a);
    if (a->per_host > 1) TAGC_TRY(hear_host(a, &host));
    if (host.status == TAGC_OK) {
        tagc_status status = make_room(a);
        if (status != TAGC_OK && a->per_host > 1) /* neighbours do not hear of it any more */
            return tagc_comm_give_up(a->comm, status, a->rank);
        note(a, status);
        host.status = status;
    }
    tagc_status status = agree(a, &host);
    a->failure = TAGC_OK; /* all have heard of it */
    TAGC_TRY(status);
    if (a->per_host > 1) TAGC_TRY(spread_within(a));
    status = lay_out_by_host(a);
    if (status != TAGC_OK) return tagc_comm_give_up(a->comm, status, a->rank);
    TAGC_TRY(exchange_hosts(a));
    status = decode(a);
    note(a, status);
    return status;
}

static tagc_status check_counts(const tagc_all_to_all *a, const uint64_t *counts, uint64_t n_elems,
                                const char *name, const char *of) {
    uint64_t sum = 0;
    if (!counts) return tagc_fail(TAGC_ERR_ARGUMENT, "%s is NULL", name);
    for (int r = 0; r < a->world_size; r++) {
        if (counts[r] > TAGC_MAX_COUNT)
            return tagc_fail(TAGC_ERR_ARGUMENT, "%s[%d] is %llu, must be in [0, 2^40]", name, r,
                             (unsigned long long)counts[r]);
        sum += counts[r];
    }
    if (sum == n_elems) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "%s is %llu, must be %llu, the sum of %s", of,
                     (unsigned long long)n_elems, (unsigned long long)sum, name);
}

static tagc_status check_arrays(const tagc_all_to_all *a, const tagc_all_to_all_call *c) {
    if (c->n_counts != (uint64_t)a->world_size)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_counts is %llu, must be %d, the number of ranks",
                         (unsigned long long)c->n_counts, a->world_size);
    TAGC_TRY(check_counts(a, c->sends, c->n_input, "sends", "n_input"));
    TAGC_TRY(check_counts(a, c->receives, c->n_output, "receives", "n_output"));
    if (c->sends[a->rank] != c->receives[a->rank])
        return tagc_fail(TAGC_ERR_ARGUMENT, "sends[%d] is %llu and receives[%d] is %llu, of this rank itself",
                         a->rank, (unsigned long long)c->sends[a->rank], a->rank,
                         (unsigned long long)c->receives[a->rank]);
    if (!c->input && c->n_input) return tagc_fail(TAGC_ERR_ARGUMENT, "input is NULL");
    if (!c->output && c->n_output) return tagc_fail(TAGC_ERR_ARGUMENT, "output is NULL");
    uintptr_t from = (uintptr_t)c->input, to = (uintptr_t)c->output;
    if (c->n_input && c->n_output && from < to + c->n_output * c->element_bytes &&
        to < from + c->n_input * c->element_bytes)
        return tagc_fail(TAGC_ERR_ARGUMENT, "input and output overlap");
    return TAGC_OK;
}

static tagc_status read_call(tagc_all_to_all *a, const tagc_all_to_all_call *call) {
    tagc_all_to_all_call *c = &a->call;
    a->is_coded = 0;
    if (!call) return tagc_fail(TAGC_ERR_ARGUMENT, "call is NULL");
    TAGC_TRY(tagc_sized_read(&call_struct, call, c));
    if (c->element_bytes < 1 || c->element_bytes > 16)
        return tagc_fail(TAGC_ERR_ARGUMENT, "element_bytes is %llu, must be in [1, 16]",
                         (unsigned long long)c->element_bytes);
    TAGC_TRY(check_arrays(a, c));
    if (!c->blocks) return TAGC_OK;
    tagc_value_format format;
    TAGC_TRY(tagc_blocks_read(c->blocks, 0, &a->blocks, &format));
    uint64_t element = a->blocks.element == TAGC_FORMAT_BF16 ? 2 : 4;
    if (c->element_bytes != element)
        return tagc_fail(TAGC_ERR_ARGUMENT, "element_bytes is %llu, must be %llu: blocks->element is %s",
                         (unsigned long long)c->element_bytes, (unsigned long long)element,
                         element == 2 ? "BF16" : "FP32");
    a->is_coded = 1;
    return TAGC_OK;
}

static tagc_status check_begins(const tagc_all_to_all *a) {
    if (!a) return tagc_fail(TAGC_ERR_ARGUMENT, "all_to_all is NULL");
    if (a->begun) return tagc_fail(TAGC_ERR_STATE, "begin after begin: a call is under way, end it first");
    return tagc_comm_check_open(a->comm);
}

static void begin(tagc_all_to_all *a) {
    a->begun = 1;
    a->n_begun++;
    a->task = (tagc_task){.run = run, .arg = a};
    tagc_comm_submit_gather(a->comm, &a->task);
}

/* The last failure is this rank's own. Returns it when all have heard of it. */
static tagc_status refuse(tagc_all_to_all *a, tagc_status status) {
    note(a, status);
    char text[TAGC_ERROR_TEXT_BYTES];
    snprintf(text, sizeof text, "%s", a->failure_text);
    begin(a);
    (void)tagc_all_to_all_end(a);
    return tagc_fail(status, "%s", text);
}

tagc_status tagc_all_to_all_begin(tagc_all_to_all *a, const tagc_all_to_all_call *call) {
    TAGC_TRY(check_begins(a));
    tagc_status status = read_call(a, call);
    if (status != TAGC_OK) return refuse(a, status);
    begin(a);
    return TAGC_OK;
}

tagc_status tagc_all_to_all_fail(tagc_all_to_all *a, tagc_status status, const char *reason) {
    TAGC_TRY(check_begins(a));
    TAGC_TRY(tagc_status_check_own(status));
    return refuse(a, tagc_fail(status, "%s", reason ? reason : "no reason given"));
}

tagc_status tagc_all_to_all_end(tagc_all_to_all *a) {
    if (!a) return tagc_fail(TAGC_ERR_ARGUMENT, "all_to_all is NULL");
    if (!a->begun) return tagc_fail(TAGC_ERR_STATE, "end without begin: no call is under way");
    a->begun = 0;
    return tagc_comm_join(a->comm, &a->task);
}

tagc_status tagc_all_to_all_run(tagc_all_to_all *a, const tagc_all_to_all_call *call) {
    TAGC_TRY(tagc_all_to_all_begin(a, call));
    return tagc_all_to_all_end(a);
}
