/* Hostile bytes in a direct exchange: whatever is damaged, all ranks fail, residuals are as before, no rank hangs. */
#include "../repeats.h"
#include "exchange/wire.h"
#include "network.h"

/* Of the messages and pairs of ranks every nth, which shares no factor with 2, 6 and 12 pairs; and so many damaged bodies. */
enum { EVERY = REPEATS(1, 5, 7), N_BODIES = REPEATS(300, 300, 90) };

static trial direct_trial(int world_size, int all_reduce) {
    trial t = make_trial(world_size, TAGC_EXCHANGE_DIRECT, TAGC_INDEX_OR);
    t.options.output = all_reduce;
    t.options.n_elems = 512 * (uint64_t)world_size;
    return t;
}

static int count(const trial *t, tagc_status status) {
    int n = 0;
    for (int r = 0; r < t->net.world_size; r++) n += t->statuses[r] == status;
    return n;
}

static void describe(const trial *t, const char *what) {
    print_error("%s: W %d, all %d, call %d from %d to %d\n", what, t->net.world_size, t->options.output,
                t->net.call - t->net.first_call, t->net.from, t->net.to);
    for (int r = 0; r < t->net.world_size; r++)
        print_error("  rank %d: %s (%s)\n", r, tagc_status_name(t->statuses[r]), t->texts[r]);
}

/* What may follow. A body, or a header that can be read: everybody says so. Another header or an agreement: whoever reads
 * it breaks the comm, and only those who were through may not notice. */
static int is_as_due(const trial *t, tagc_status due) {
    int W = t->net.world_size, n_ok = count(t, TAGC_OK), n_gone = count(t, TAGC_ERR_TRANSPORT);
    if (t->net.n_damaged == 0) return n_ok == W;
    if (due == TAGC_ERR_TRANSPORT)
        return t->statuses[t->net.to] == TAGC_ERR_CORRUPT && t->is_broken[t->net.to] &&
               n_gone + n_ok == W - 1;
    return count(t, due) == W;
}

static void check_outcome(trial *t, tagc_status due, const char *what) {
    if (is_as_due(t, due)) return;
    describe(t, what);
    fail();
}

TEST(test_every_message) {
    int n_bodies = 0, n_headers = 0, n_pairs = 0;
    for (int variant = 0; variant < 4 * 2; variant++) {
        int world_size = 2 + variant % 4;
        trial sound = direct_trial(world_size, variant / 4);
        run_trial(&sound, world_size);
        assert_int_equal(count(&sound, TAGC_OK), world_size);
        for (int call = 0; call < sound.net.n_calls; call++)
            for (int pair = 0; pair < world_size * world_size; pair++) {
                trial t = direct_trial(world_size, variant / 4);
                if (pair % world_size == pair / world_size || n_pairs++ % EVERY != 0) continue;
                t.net.from = pair % world_size;
                t.net.to = pair / world_size;
                t.net.call = sound.net.first_call + call;
                t.net.where = mix((uint64_t)(variant * 10000 + call * 100 + pair));
                t.net.damage = flip_bit;
                run_trial(&t, world_size);
                check_outcome(&t, t.net.is_message ? TAGC_ERR_TRANSPORT : TAGC_ERR_CORRUPT, "flipped bit");
                n_headers += t.net.is_message;
                n_bodies += t.net.n_damaged && !t.net.is_message;
            }
    }
    assert_true(n_headers > 100 / EVERY && n_bodies > 100 / EVERY);
}

/* ---- liars: headers whose checksum is right ---- */

typedef struct lie {
    const char *text; /* of the rank that is lied to */
    void (*tell)(tagc_wire_header *header);
    tagc_status status; /* TRANSPORT: what follows is not known */
} lie;

static void other_kind(tagc_wire_header *header) {
    header->kind = TAGC_WIRE_AGREE;
    header->body_bytes = header->coding = 0;
}
static void other_format(tagc_wire_header *header) {
    header->coding = TAGC_FORMAT_FP32;
}
static void other_rank(tagc_wire_header *header) {
    header->rank++;
}
static void other_sparsity(tagc_wire_header *header) {
    header->k++;
}
static void other_shard(tagc_wire_header *header) {
    header->n_elems--;
}
static void other_step(tagc_wire_header *header) {
    header->step++;
}
static void too_many_items(tagc_wire_header *header) {
    header->n_items = header->k + 1;
}
static void too_many_bytes(tagc_wire_header *header) {
    header->body_bytes = UINT64_MAX / 2;
}
static void too_many_positions(tagc_wire_header *header) {
    header->index_bytes = (uint32_t)header->body_bytes + 1;
}
static void nothing_finite(tagc_wire_header *header) {
    header->flags = TAGC_WIRE_FLAG_NONFINITE;
}

static const lie lies[] = {
    {"message kind is 3, expected 6", other_kind, TAGC_ERR_TRANSPORT},
    {"coding is 0, expected", other_format, TAGC_ERR_CORRUPT},
    {"rank is", other_rank, TAGC_ERR_CORRUPT},
    {"elements are sent from there", other_sparsity, TAGC_ERR_MISMATCH},
    {"n_elems is 511, expected 512", other_shard, TAGC_ERR_CORRUPT},
    {"step is", other_step, TAGC_ERR_CORRUPT},
    {"elements, at most", too_many_items, TAGC_ERR_CORRUPT},
    {"bytes follow, at most", too_many_bytes, TAGC_ERR_TRANSPORT},
    {"bytes are positions", too_many_positions, TAGC_ERR_TRANSPORT},
    {"bytes follow of what does not count", nothing_finite, TAGC_ERR_TRANSPORT},
};

static void tell_lie(uint8_t *bytes, uint64_t n_bytes, uint64_t which) {
    tagc_wire_header header;
    if (tagc_wire_read(bytes, n_bytes, &header) != TAGC_OK) return;
    lies[which].tell(&header);
    tagc_wire_write(&header, bytes);
}

TEST(test_lying_headers) {
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++)
        for (int of_sums = 0; of_sums < 2; of_sums++) {
            trial t = direct_trial(2, 1);
            run_trial(&t, 2);
            int call = t.net.first_call + (of_sums ? t.net.n_calls - 3 : 0);
            t = direct_trial(2, 1);
            t.net.call = call;
            t.net.from = 1;
            t.net.damage = tell_lie;
            t.net.where = i;
            run_trial(&t, 2);
            check_outcome(&t, lies[i].status, lies[i].text);
            if (!strstr(t.texts[0], lies[i].text))
                fail_msg("\"%s\" does not contain \"%s\"", t.texts[0], lies[i].text);
            assert_non_null(strstr(t.texts[0], "header of the fragment from rank 11"));
            if (lies[i].tell == other_format) /* int2, and sums int4 */
                assert_non_null(strstr(t.texts[0], of_sums ? "expected 3" : "expected 4"));
        }
}

static void claim_positions(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    tagc_wire_header header;
    (void)where;
    if (tagc_wire_read(bytes, n_bytes, &header) != TAGC_OK) return;
    header.index_bytes = 8;
    tagc_wire_write(&header, bytes);
}

/* Where all is sent there are no positions: nothing would come for the front of the body. */
TEST(test_positions_of_blocks) {
    trial t = direct_trial(2, 0);
    t.options.sparsity = 0;
    run_trial(&t, 2);
    int call = t.net.first_call;
    t = direct_trial(2, 0);
    t.options.sparsity = 0;
    t.net.call = call;
    t.net.from = 1;
    t.net.damage = claim_positions;
    run_trial(&t, 2);
    check_outcome(&t, TAGC_ERR_CORRUPT, "positions of blocks");
    assert_non_null(strstr(t.texts[0], "8 bytes of positions, where"));
}

/* A checksum that belongs to another body: the body is refused, and the next step may go on. */
static void other_body(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    tagc_wire_header header;
    if (tagc_wire_read(bytes, n_bytes, &header) != TAGC_OK) return;
    header.body_sum ^= (uint64_t)1 << where % 64;
    tagc_wire_write(&header, bytes);
}

/* Less than the sender sends: the transport notices, as lengths differ. */
static void shorter(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    (void)where;
    tagc_wire_header header;
    if (tagc_wire_read(bytes, n_bytes, &header) != TAGC_OK) return;
    header.body_bytes--;
    tagc_wire_write(&header, bytes);
}

TEST(test_wrong_lengths_and_sums) {
    for (int variant = 0; variant < 12; variant++) {
        int world_size = 2 + variant % 4;
        trial t = direct_trial(world_size, 0);
        run_trial(&t, world_size);
        int call = t.net.first_call;
        t = direct_trial(world_size, 0);
        t.net.call = call;
        t.net.to = variant % world_size;
        t.net.from = (t.net.to + world_size - 1) % world_size;
        t.net.where = mix((uint64_t)variant);
        t.net.damage = variant / 3 % 2 ? shorter : other_body;
        run_trial(&t, world_size);
        assert_int_equal(t.net.n_damaged, 1);
        assert_int_equal(count(&t, variant / 3 % 2 ? TAGC_ERR_TRANSPORT : TAGC_ERR_CORRUPT), world_size);
    }
}

/* ---- a liar with a body to match ---- */

enum { MAX_BODY = 4096 };
static struct {
    size_t n_bytes, n_index;
    uint8_t body[MAX_BODY];
} liar;

/* First the body of a sound step is looked at, then the same body, spoiled in one place, comes with the right checksum:
 * validation is all that is left. */
static void look(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    tagc_wire_header header;
    (void)where;
    if (tagc_wire_read(bytes, n_bytes, &header) == TAGC_OK) {
        liar.n_index = header.index_bytes;
        return;
    }
    assert_true(n_bytes <= MAX_BODY);
    memcpy(liar.body, bytes, n_bytes);
    liar.n_bytes = n_bytes;
}

/* Of two calls (header, body) each as it should look. */
static void send_spoiled(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    tagc_wire_header header;
    (void)where;
    if (tagc_wire_read(bytes, n_bytes, &header) == TAGC_OK) {
        header.body_sum = tagc_wire_sum(liar.body, liar.n_bytes);
        tagc_wire_write(&header, bytes);
    } else {
        memcpy(bytes, liar.body, n_bytes);
    }
}

static trial liars_trial(int call, damage_fn damage) {
    trial t = direct_trial(2, 0);
    t.net.call = call;
    t.net.n_more = 1;
    t.net.from = 1;
    t.net.damage = damage;
    run_trial(&t, 2);
    assert_int_equal(t.net.n_damaged, 2);
    return t;
}

TEST(test_lying_bodies) {
    trial t = direct_trial(2, 0);
    run_trial(&t, 2);
    int call = t.net.first_call, n_refused = 0;
    t = liars_trial(call, look);
    assert_int_equal(count(&t, TAGC_OK), 2);
    assert_true(liar.n_index > 8 && liar.n_bytes > liar.n_index + 2);
    for (uint64_t i = 0; i < N_BODIES; i++) {
        size_t at = mix(i) % (i % 3 ? liar.n_index : liar.n_bytes);
        uint8_t before = liar.body[at], spoiled = (uint8_t)mix(i + 1000);
        if (before == spoiled) continue;
        liar.body[at] = spoiled;
        t = liars_trial(call, send_spoiled);
        liar.body[at] = before;
        assert_true(count(&t, TAGC_OK) == 2 || count(&t, TAGC_ERR_CORRUPT) == 2);
        if (t.statuses[0] == TAGC_ERR_CORRUPT) assert_non_null(strstr(t.texts[0], "fragment from rank 11"));
        n_refused += t.statuses[0] == TAGC_ERR_CORRUPT;
    }
    assert_true(n_refused > N_BODIES / 6 &&
                n_refused < N_BODIES); /* another value or position may be as good as the right one */
}
