/* The all-to-all of tagc/all_to_all.h. A call takes one round in which ranks compare counts, then one in which elements travel.
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

enum { WORD_BYTES = sizeof(tagc_counts_word), COUNTS_BYTES = TAGC_WIRE_HEADER_BYTES + WORD_BYTES };

static const tagc_all_to_all_call call_defaults = {.element_bytes = 4};
static const tagc_sized call_struct = {"tagc_all_to_all_call", sizeof(tagc_all_to_all_call),
                                       offsetof(tagc_all_to_all_call, expected_word) + sizeof(uint64_t),
                                       &call_defaults};

void tagc_all_to_all_call_init_sized(tagc_all_to_all_call *call, size_t struct_bytes) {
    tagc_sized_init(&call_struct, call, struct_bytes);
}

/* ---- life ---- */

static void place(tagc_all_to_all *a, tagc_arena *arena) {
    size_t n_ranks = (size_t)a->world_size;
    a->said = tagc_arena_take(arena, 1, COUNTS_BYTES);
    a->heard = tagc_arena_take(arena, n_ranks, COUNTS_BYTES);
    a->from_in = tagc_arena_take(arena, n_ranks, sizeof *a->from_in);
    a->to_out = tagc_arena_take(arena, n_ranks, sizeof *a->to_out);
    a->told = tagc_arena_take(arena, n_ranks, sizeof *a->told);
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
    TAGC_TRY(tagc_all_to_all_options_check(options, &a->options));
    tagc_arena arena = {0};
    place(a, &arena);
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
    tagc_comm_count(a->comm, TAGC_HELD_BUFFERS, -(int64_t)(a->arena_bytes + a->messages_bytes));
    tagc_identity_close(a->comm, &a->identity);
    tagc_comm_let_go(a->comm);
    tagc_memory_destroy(a->arena);
    tagc_memory_destroy(a->messages);
    tagc_memory_destroy(a);
}

/* ---- what a call has ---- */

static uint64_t checksum_of(int from, int to, uint64_t count) {
    uint64_t words[3] = {(uint64_t)from, (uint64_t)to, count};
    return tagc_xxh3(words, sizeof words, 0);
}

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

/* Whether a message of n elements is not in blocks. Both ends know n. */
static int travels_whole(const tagc_all_to_all *a, uint64_t n) {
    return !a->is_coded || n == 0 || n < a->options.min_elems || n > TAGC_BLOCKS_MAX_ELEMS;
}

static uint64_t message_bytes(const tagc_all_to_all *a, uint64_t n) {
    uint64_t n_bytes = n * a->call.element_bytes;
    if (!travels_whole(a, n)) (void)tagc_blocks_bytes(&a->blocks, n, &n_bytes);
    return n_bytes;
}

uint64_t tagc_all_to_all_bytes(const tagc_all_to_all_options *options, const tagc_blocks_options *blocks,
                               uint64_t element_bytes, uint64_t n_elems) {
    tagc_all_to_all a = {.options = *options, .is_coded = blocks != NULL};
    a.call.element_bytes = element_bytes;
    if (blocks) a.blocks = *blocks;
    return COUNTS_BYTES + message_bytes(&a, n_elems);
}

/* ---- counts ---- */

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

/* Sends each other rank what this one says of itself, and hears as much from each. */
static tagc_status share_counts(tagc_all_to_all *a, const tagc_counts_said *said) {
    tagc_wire_header header = {.kind = TAGC_WIRE_COUNTS,
                               .rank = (uint32_t)a->rank,
                               .k = (uint32_t)a->rank,
                               .n_elems = (uint64_t)a->world_size,
                               .unit = a->identity.unit,
                               .n_items = WORD_BYTES / sizeof(uint64_t),
                               .status = (uint32_t)said->status,
                               .body_bytes = WORD_BYTES,
                               .step = a->n_begun};
    memcpy(a->said + TAGC_WIRE_HEADER_BYTES, &said->word, sizeof said->word);
    tagc_wire_write(&header, a->said);
    uint32_t n_peers = 0;
    for (int r = 0; r < a->world_size; r++) {
        if (r == a->rank) continue;
        a->sends[n_peers] = (tagc_part){.peer = r, .n_bytes = COUNTS_BYTES};
        a->receives[n_peers++] =
            (tagc_part){.peer = r, .n_bytes = COUNTS_BYTES, .offset = (uint64_t)r * COUNTS_BYTES};
    }
    memcpy(a->heard + (size_t)a->rank * COUNTS_BYTES, a->said, COUNTS_BYTES);
    return move(a, TAGC_LEG_CONTROL, n_peers, a->said, a->heard);
}

/* Reads what a rank said. After damage, or where that rank is in a call of another object, nobody knows what the others do next: they may
 * have heard something else. */
static tagc_status read_counts(tagc_all_to_all *a, int from, tagc_counts_said *said) {
    const uint8_t *message = a->heard + (size_t)from * COUNTS_BYTES;
    tagc_wire_header header = {0}, expected = {.kind = TAGC_WIRE_COUNTS,
                                               .rank = (uint32_t)from,
                                               .k = (uint32_t)from,
                                               .n_elems = (uint64_t)a->world_size,
                                               .step = a->n_begun};
    tagc_status status = tagc_wire_read(message, COUNTS_BYTES, &header);
    if (status == TAGC_OK && header.kind == TAGC_WIRE_COUNTS && header.unit != a->identity.unit)
        return tagc_identity_abort(a->comm, &a->identity, from, header.unit);
    if (status == TAGC_OK) status = tagc_wire_expect(&header, &expected);
    if (status != TAGC_OK) {
        status = tagc_fail_in(status, "counts from rank %d arrived damaged", tagc_comm_name(a->comm, from));
        return tagc_comm_give_up(a->comm, status, from);
    }
    said->status = (tagc_status)header.status;
    memcpy(&said->word, message + TAGC_WIRE_HEADER_BYTES, sizeof said->word);
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

/* The same on all ranks. rank: that failed, or that is in another call than rank 0. */
static tagc_status fail_as(const tagc_all_to_all *a, tagc_status failure, int rank) {
    int name = tagc_comm_name(a->comm, rank);
    if (a->failure == failure) return tagc_fail(failure, "%s", a->failure_text);
    if (tagc_status_check_own(failure) != TAGC_OK)
        return tagc_fail(TAGC_ERR_CORRUPT, "rank %d says that it has status %d", name, (int)failure);
    if (failure == TAGC_ERR_CORRUPT)
        return tagc_fail(failure, "rank %d got damaged elements in the call before this one", name);
    if (failure == TAGC_ERR_MISMATCH)
        return tagc_fail(failure, "rank %d comes with another format, block or element_bytes", name);
    return tagc_fail(failure, "rank %d failed in this call: %s", name, tagc_status_name(failure));
}

/* Returns the same on all ranks: whether elements may travel. */
static tagc_status agree(tagc_all_to_all *a, const tagc_counts_said *said) {
    tagc_status failure = TAGC_OK;
    tagc_counts_word sum = {0};
    int failed = 0, odd = 0; /* the first rank that failed, and that has other options than rank 0 */
    TAGC_TRY(share_counts(a, said));
    for (int r = 0; r < a->world_size; r++) {
        tagc_counts_said heard;
        TAGC_TRY(read_counts(a, r, &heard));
        if (failure == TAGC_OK && heard.status != TAGC_OK) failure = heard.status, failed = r;
        if (r == 0) sum.alike = heard.word.alike;
        if (!odd && heard.word.alike != sum.alike) odd = r;
        sum.sent += heard.word.sent;
        sum.expected += heard.word.expected;
    }
    if (failure != TAGC_OK) return fail_as(a, failure, failed);
    if (odd) return fail_as(a, TAGC_ERR_MISMATCH, odd);
    return sum.sent == sum.expected ? TAGC_OK : name_mismatch(a);
}

/* ---- elements ---- */

static void find_offsets(tagc_all_to_all *a) {
    uint64_t in = 0, out = 0;
    for (int r = 0; r < a->world_size; in += a->call.sends[r], out += a->call.receives[r], r++) {
        a->from_in[r] = in;
        a->to_out[r] = out;
    }
}

static void place_messages(tagc_all_to_all *a, tagc_arena *arena) {
    uint64_t n_sent = 0, n_received = 0;
    for (int r = 0; r < a->world_size; r++) {
        if (r == a->rank) continue;
        n_sent += tagc_aligned((size_t)message_bytes(a, a->call.sends[r]));
        n_received += tagc_aligned((size_t)message_bytes(a, a->call.receives[r]));
    }
    a->sent = tagc_arena_take(arena, (size_t)n_sent, 1);
    a->received = tagc_arena_take(arena, (size_t)n_received, 1);
}

static tagc_status make_messages(tagc_all_to_all *a) {
    tagc_arena arena = {0};
    find_offsets(a);
    place_messages(a, &arena);
    if (arena.overflow) return tagc_fail(TAGC_ERR_MEMORY, "messages do not fit into the address space");
    if (!a->messages || arena.n_bytes > a->messages_bytes) {
        tagc_comm_count(a->comm, TAGC_HELD_BUFFERS, -(int64_t)a->messages_bytes);
        tagc_memory_destroy(a->messages);
        a->messages_bytes = 0;
        a->messages = NULL;
        /* a little more, since the next call has other counts */
        size_t n_bytes = arena.n_bytes + arena.n_bytes / 4;
        TAGC_TRY(tagc_memory_create(n_bytes, "messages of an all-to-all", &a->messages));
        a->messages_bytes = n_bytes;
        tagc_comm_count(a->comm, TAGC_HELD_BUFFERS, (int64_t)n_bytes);
    }
    arena = (tagc_arena){.base = a->messages};
    place_messages(a, &arena);
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

static void copy(uint8_t *to, const uint8_t *from, uint64_t n_bytes) {
    if (n_bytes) memcpy(to, from, (size_t)n_bytes); /* else both may be NULL */
}

static tagc_status encode(const tagc_all_to_all *a, int to, uint8_t *message, uint64_t n_bytes) {
    uint64_t n = a->call.sends[to];
    if (travels_whole(a, n)) {
        copy(message, input_of(a, to), n_bytes);
        return TAGC_OK;
    }
    tagc_blocks_options blocks = a->blocks;
    uint64_t seeds[3] = {blocks.seed, (uint64_t)a->rank, (uint64_t)to};
    blocks.seed = tagc_xxh3(seeds, sizeof seeds, 0); /* no two messages of a call round alike */
    return tagc_blocks_encode(&blocks, input_of(a, to), n, message, n_bytes);
}

static tagc_status exchange_elements(tagc_all_to_all *a) {
    uint64_t at_sent = 0, at_received = 0;
    uint32_t n_peers = 0;
    for (int r = 0; r < a->world_size; r++) {
        if (r == a->rank) continue;
        uint64_t n_sent = message_bytes(a, a->call.sends[r]);
        uint64_t n_received = message_bytes(a, a->call.receives[r]);
        TAGC_TRY(encode(a, r, a->sent + at_sent, n_sent));
        a->sends[n_peers] = (tagc_part){r, n_sent, at_sent};
        a->receives[n_peers++] = (tagc_part){r, n_received, at_received};
        at_sent += tagc_aligned((size_t)n_sent);
        at_received += tagc_aligned((size_t)n_received);
    }
    return move(a, TAGC_LEG_VALUES, n_peers, a->sent, a->received);
}

/* Returns the first failure, and decodes the rest. */
static tagc_status decode(const tagc_all_to_all *a) {
    char why[TAGC_ERROR_TEXT_BYTES] = "";
    int damaged = -1; /* the first rank whose message was */
    const uint8_t *message = a->received;
    for (int r = 0; r < a->world_size; r++) {
        if (r == a->rank) continue;
        uint64_t n = a->call.receives[r], n_bytes = message_bytes(a, n);
        uint8_t *to = output_of(a, r);
        if (travels_whole(a, n)) {
            copy(to, message, n_bytes);
        } else if (tagc_blocks_decode(&a->blocks, message, n_bytes, to, n) != TAGC_OK && damaged < 0) {
            damaged = r;
            snprintf(why, sizeof why, "%s", tagc_last_error());
        }
        message += tagc_aligned((size_t)n_bytes);
    }
    if (damaged < 0) return TAGC_OK;
    /* whatever it is: format, block and length have been compared */
    return tagc_fail(TAGC_ERR_CORRUPT, "elements from rank %d: %.400s", tagc_comm_name(a->comm, damaged),
                     why);
}

/* ---- a call ---- */

static void note(tagc_all_to_all *a, tagc_status failure) {
    a->failure = failure;
    if (failure != TAGC_OK) snprintf(a->failure_text, sizeof a->failure_text, "%s", tagc_last_error());
}

static tagc_status run(void *arg) {
    tagc_all_to_all *a = arg;
    tagc_counts_said said = {.status = a->failure};
    if (said.status == TAGC_OK) {
        said.word = own_word(a);
        note(a, make_messages(a));
        said.status = a->failure;
    }
    tagc_status status = agree(a, &said);
    a->failure = TAGC_OK; /* all have heard of it */
    TAGC_TRY(status);
    copy(output_of(a, a->rank), input_of(a, a->rank), a->call.sends[a->rank] * a->call.element_bytes);
    TAGC_TRY(exchange_elements(a));
    note(a, decode(a));
    return a->failure;
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
