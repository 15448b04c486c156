/* The all-to-all of tagc/all_to_all.h on 1 to 16 ranks: each element where it belongs, bit for bit or as a plain coder rounds it; bytes
 * counted; and what one rank does wrong is an error on all. */
#include "../meeting.h"
#include "../repeats.h"
#include "blocks_oracle.h"
#include "ranks.h"
#include "tagc/all_to_all.h"
#include "transport/comm.h"

enum { MOST_COUNT = 700, MOST_ELEMS = MAX_RANKS * MOST_COUNT, MIN_ELEMS = 300, MARK = 0x5a };

typedef struct trial {
    int format, rounding; /* format: 0: whole */
    int is_bf16;
    int element_bytes;
    int n_calls;
    uint64_t seed;
} trial;

typedef struct seat_of_rank {
    rank_run *run;
    const trial *t;
    tagc_all_to_all *a;
    tagc_blocks_options blocks;
    tagc_all_to_all_call call;
    uint64_t sends[MAX_RANKS], receives[MAX_RANKS];
    uint8_t *input, *output;
} seat_of_rank;

/* Many are 0. */
static uint64_t count_of(const trial *t, int call, int from, int to) {
    uint64_t x = mix(t->seed * 1000003 + (uint64_t)(call * 65536 + from * 256 + to));
    return x % 5 < 2 ? 0 : x / 5 % 3 == 0 ? x / 15 % 7 : x / 15 % (MOST_COUNT + 1);
}

static float value_of(const trial *t, int call, int from, int to, uint64_t i) {
    float x = random_gradient(t->seed + (uint64_t)(call * 7919 + to * 31), from, i);
    uint32_t bits = bits_of(x); /* gcc 12 drops the mask where floats are chosen between by ?: */
    if (t->is_bf16) bits &= 0xffff0000u;
    return float_of(bits);
}

/* The element as it lies in memory. */
static void put_element(const trial *t, float x, uint64_t noise, uint8_t *to) {
    uint16_t half = (uint16_t)(bits_of(x) >> 16);
    if (t->format && t->is_bf16)
        memcpy(to, &half, sizeof half);
    else if (t->format)
        memcpy(to, &x, sizeof x);
    else
        for (int b = 0; b < t->element_bytes; b++)
            to[b] = (uint8_t)(mix(noise + (uint64_t)b / 8) >> b % 8 * 8);
}

static uint64_t noise_of(int call, int from, int to, uint64_t i) {
    return (uint64_t)call << 48 ^ (uint64_t)from << 40 ^ (uint64_t)to << 32 ^ i;
}

static int take_seat(rank_run *run, seat_of_rank *s, uint64_t min_elems) {
    const trial *t = run->shared;
    tagc_all_to_all_options options;
    *s = (seat_of_rank){.run = run, .t = t};
    tagc_all_to_all_options_init(&options);
    options.min_elems = min_elems;
    s->input = malloc(MOST_ELEMS * 16);
    s->output = malloc(MOST_ELEMS * 16);
    return CHECK(run, tagc_all_to_all_create(run->comm, &options, &s->a) == TAGC_OK);
}

static void leave_seat(seat_of_rank *s) {
    tagc_all_to_all_destroy(s->a);
    free(s->input);
    free(s->output);
}

static void fill_call(seat_of_rank *s, int call) {
    const trial *t = s->t;
    int rank = s->run->rank;
    tagc_all_to_all_call_init(&s->call);
    tagc_all_to_all_call *c = &s->call;
    c->element_bytes = (uint64_t)t->element_bytes;
    for (int r = 0; r < s->run->world_size; r++) {
        s->sends[r] = count_of(t, call, rank, r);
        s->receives[r] = count_of(t, call, r, rank);
        for (uint64_t i = 0; i < s->sends[r]; i++)
            put_element(t, value_of(t, call, rank, r, i), noise_of(call, rank, r, i),
                        s->input + (c->n_input + i) * c->element_bytes);
        c->n_input += s->sends[r];
        c->n_output += s->receives[r];
    }
    c->input = s->input;
    c->output = s->output;
    c->sends = s->sends;
    c->receives = s->receives;
    c->n_counts = (uint64_t)s->run->world_size;
    memset(s->output, MARK, MOST_ELEMS * 16);
    if (!t->format) return;
    tagc_blocks_options_init(&s->blocks);
    s->blocks.format = t->format;
    s->blocks.element = t->is_bf16 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
    s->blocks.rounding = t->rounding;
    s->blocks.seed = (uint64_t)call;
    c->blocks = &s->blocks;
}

static uint16_t narrow(float x) {
    uint32_t bits = bits_of(x);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Whether `found` is what the element x (n of them in the message, this the i-th) may become. */
static int is_coded_so(const trial *t, const float *x, uint64_t n, uint64_t i, const uint8_t *found) {
    uint64_t first = i / 64 * 64, n_block = n - first < 64 ? n - first : 64;
    int is_random = t->rounding == TAGC_ROUNDING_STOCHASTIC;
    float scale = oracle_wide(oracle_scale(t->format, is_random, x + first, n_block));
    int lowest = oracle_integer(t->format, NULL, scale, x[i]), highest = lowest;
    if (scale == 0) lowest = highest = 0;
    if (is_random && scale > 0) {
        lowest = (int)floorf(x[i] * (1 / scale));
        highest = lowest + 1;
    }
    for (int k = lowest; k <= highest; k++) {
        uint16_t half = narrow(scale * (float)k);
        float wide = scale * (float)k, came;
        memcpy(&came, found, sizeof came);
        if (t->is_bf16 ? memcmp(found, &half, sizeof half) == 0 : came == wide) return 1;
    }
    return 0;
}

/* What came from one rank, which was one message if it is another. */
static int is_part_right(const seat_of_rank *s, int call, int from, const uint8_t *part) {
    const trial *t = s->t;
    int rank = s->run->rank, is_right = 1;
    static _Thread_local float values[MOST_COUNT];
    uint64_t n = s->receives[from], element = (uint64_t)t->element_bytes;
    for (uint64_t i = 0; i < n; i++) values[i] = value_of(t, call, from, rank, i);
    for (uint64_t i = 0; i < n; i++) {
        uint8_t exact[16];
        put_element(t, values[i], noise_of(call, from, rank, i), exact);
        if (!t->format || from == rank || n < MIN_ELEMS)
            is_right &= memcmp(part + i * element, exact, element) == 0;
        else
            is_right &= is_coded_so(t, values, n, i, part + i * element);
    }
    return is_right;
}

static int is_output_right(const seat_of_rank *s, int call) {
    int is_right = 1;
    const uint8_t *part = s->output;
    for (int r = 0; r < s->run->world_size; r++) {
        is_right &= is_part_right(s, call, r, part);
        part += s->receives[r] * (uint64_t)s->t->element_bytes;
    }
    return is_right && *part == MARK;
}

static uint64_t message_bytes(const trial *t, uint64_t n) {
    if (!t->format || n < MIN_ELEMS) return n * (uint64_t)t->element_bytes;
    return 64 + 2 * ((n + 63) / 64) + (t->format == TAGC_FORMAT_INT8 ? n : (n + 1) / 2);
}

static uint64_t bytes_sent(const seat_of_rank *s) {
    uint64_t sent[MAX_RANKS], sum = 0;
    tagc_comm_sent_to(s->run->comm, sent);
    for (int r = 0; r < s->run->world_size; r++) sum += sent[r];
    return sum;
}

/* Counts of 88 bytes and a message to each other rank. */
static uint64_t bytes_due(const seat_of_rank *s) {
    uint64_t sum = 0;
    for (int r = 0; r < s->run->world_size; r++)
        sum += r == s->run->rank ? 0 : 88 + message_bytes(s->t, s->sends[r]);
    return sum;
}

static void exchange_body(rank_run *run) {
    seat_of_rank s;
    if (!take_seat(run, &s, MIN_ELEMS)) return;
    for (int call = 0; call < s.t->n_calls; call++) {
        fill_call(&s, call);
        uint64_t before = bytes_sent(&s);
        if (!CHECK(run, tagc_all_to_all_run(s.a, &s.call) == TAGC_OK)) break;
        CHECK(run, is_output_right(&s, call));
        CHECK(run, bytes_sent(&s) - before == bytes_due(&s));
    }
    leave_seat(&s);
}

static const int worlds[] = {1, 2, 3, 4, 7, 9, 16};
enum { N_WORLDS = sizeof worlds / sizeof *worlds };

TEST(elements_arrive) {
    static const struct {
        int format, rounding, is_bf16, element_bytes;
    } kinds[] = {{TAGC_FORMAT_INT8, TAGC_ROUNDING_NEAREST, 0, 4},
                 {TAGC_FORMAT_INT8, TAGC_ROUNDING_NEAREST, 1, 2},
                 {TAGC_FORMAT_INT4, TAGC_ROUNDING_STOCHASTIC, 0, 4},
                 {TAGC_FORMAT_INT8, TAGC_ROUNDING_STOCHASTIC, 1, 2},
                 {0, 0, 0, 1},
                 {0, 0, 0, 8},
                 {0, 0, 0, 16}};
    for (int k = 0; k < (int)(sizeof kinds / sizeof *kinds); k++)
        for (int w = 0; w < N_WORLDS; w++) {
            trial t = {.format = kinds[k].format,
                       .rounding = kinds[k].rounding,
                       .is_bf16 = kinds[k].is_bf16,
                       .element_bytes = kinds[k].element_bytes,
                       .n_calls = 3,
                       .seed = (uint64_t)(k * 100 + w)};
            run_ranks(worlds[w], exchange_body, &t);
        }
}

/* ---- what one rank does otherwise ---- */

typedef enum fault {
    MORE,    /* rank 1 has an element more for rank 0 than that expects */
    SHIFTED, /* and one less for the last */
    EXPECTS, /* rank 1 expects an element more of rank 2 */
    WORD,    /* rank 1's own words differ */
    FORMAT,  /* rank 1 encodes otherwise */
    WIDTH,   /* rank 1 has other elements */
    LENGTH,  /* rank 1's n_input is no sum */
    NO_INPUT,
    OVERLAP,
    NO_COUNTS,
    OWN_COUNT,
    BLOCK,
    FAILED,
    N_FAULTS
} fault;

static tagc_status run_wrong(seat_of_rank *s, fault what) {
    tagc_all_to_all_call *c = &s->call;
    int is_odd = s->run->rank == 1, last = s->run->world_size - 1;
    if (is_odd && (what == MORE || what == SHIFTED)) s->sends[0]++;
    if (is_odd && what == SHIFTED) s->sends[last]--;
    if (is_odd && what == EXPECTS) s->receives[2]++;
    c->n_input = c->n_output = 0;
    for (int r = 0; r <= last; r++) {
        c->n_input += s->sends[r];
        c->n_output += s->receives[r];
    }
    if (!is_odd) return tagc_all_to_all_run(s->a, c);
    if (what == WORD) c->sent_word = 7;
    if (what == FORMAT) s->blocks.format = TAGC_FORMAT_INT4;
    if (what == WIDTH) s->blocks.element = TAGC_FORMAT_BF16, c->element_bytes = 2;
    if (what == LENGTH) c->n_input++;
    if (what == NO_INPUT) c->input = NULL;
    if (what == OVERLAP) c->output = s->input + 4;
    if (what == NO_COUNTS) c->sends = NULL;
    if (what == OWN_COUNT) s->receives[1]++, c->n_output++;
    if (what == BLOCK) s->blocks.block = 65;
    if (what == FAILED) return tagc_all_to_all_fail(s->a, TAGC_ERR_MEMORY, "no memory for it");
    return tagc_all_to_all_run(s->a, c);
}

static void fault_body(rank_run *run) {
    seat_of_rank s;
    if (!take_seat(run, &s, MIN_ELEMS)) return;
    static const char *const own[N_FAULTS] = {"what some rank sends",
                                              "what some rank sends",
                                              "receives[2] is 5, and rank 12 sends 4",
                                              "what some rank sends",
                                              "comes with another format",
                                              "comes with another format",
                                              "n_input is",
                                              "input is NULL",
                                              "overlap",
                                              "sends is NULL",
                                              "of this rank itself",
                                              "block is 65",
                                              "no memory for it"};
    for (int what = 0; what < N_FAULTS; what++) {
        tagc_status expected = what <= WIDTH   ? TAGC_ERR_MISMATCH
                               : what < FAILED ? TAGC_ERR_ARGUMENT
                                               : TAGC_ERR_MEMORY;
        fill_call(&s, 0);
        for (int r = 0; r < run->world_size; r++) s.sends[r] = s.receives[r] = 4;
        memset(s.output, MARK, MOST_ELEMS * 16);
        tagc_status status = run_wrong(&s, (fault)what);
        char text[512];
        snprintf(text, sizeof text, "fault %d: %.400s", what, tagc_last_error());
        int is_unchanged = 1;
        for (int i = 0; i < 64; i++) is_unchanged &= what == OVERLAP || s.output[i] == MARK;
        CHECK(run, status == expected && is_unchanged);
        if (run->rank == 1 && !CHECK(run, strstr(text, own[what]) != NULL)) break;
        if (run->rank == 0 && what <= SHIFTED)
            CHECK(run, strstr(text, "receives[1] is 4, and rank 11 sends 5") != NULL);
        if (run->rank == 0 && what >= LENGTH) CHECK(run, strstr(text, "rank 11 failed in this call") != NULL);
        if (run->failure[0]) break;
        fill_call(&s, 1); /* and on it goes */
        if (!CHECK(run, tagc_all_to_all_run(s.a, &s.call) == TAGC_OK)) break;
        CHECK(run, is_output_right(&s, 1));
    }
    leave_seat(&s);
}

TEST(faults_are_of_all_ranks) {
    for (int world_size = 3; world_size <= 8; world_size++) {
        trial t = {.format = TAGC_FORMAT_INT8, .element_bytes = 4, .seed = 77};
        run_ranks(world_size, fault_body, &t);
    }
}

/* Two of one shape, of which the last rank begins the second one first. */
static void order_body(rank_run *run) {
    seat_of_rank s, other;
    if (!take_seat(run, &s, MIN_ELEMS) || !take_seat(run, &other, MIN_ELEMS)) return;
    fill_call(&s, 0);
    fill_call(&other, 0);
    int is_odd = run->rank == run->world_size - 1;
    CHECK(run, tagc_all_to_all_run(is_odd ? other.a : s.a, &s.call) == TAGC_ERR_MISMATCH);
    CHECK(run, strstr(tagc_last_error(), "in the same order on all ranks") != NULL);
    CHECK(run, tagc_all_to_all_run(is_odd ? s.a : other.a, &other.call) == TAGC_ERR_MISMATCH);
    leave_seat(&s);
    leave_seat(&other);
}

static void options_body(rank_run *run) {
    tagc_all_to_all_options options;
    tagc_all_to_all *a = (tagc_all_to_all *)(void *)run;
    tagc_all_to_all_options_init(&options);
    options.min_elems = run->rank == 1 ? 17 : 16;
    CHECK(run, tagc_all_to_all_create(run->comm, &options, &a) == TAGC_ERR_MISMATCH && !a);
    CHECK(run, strstr(tagc_last_error(), "min_elems: rank 11 has 17, rank 10 has 16") != NULL);
    options.min_elems = UINT64_C(1) << 31;
    CHECK(run, tagc_all_to_all_create(run->comm, &options, &a) == TAGC_ERR_ARGUMENT && !a);
    options.min_elems = 16;
    tagc_gatherer *gatherer = NULL;
    tagc_gatherer_options of_gatherer;
    tagc_gatherer_options_init(&of_gatherer);
    of_gatherer.n_elems = 3;
    tagc_status status = run->rank ? tagc_all_to_all_create(run->comm, &options, &a)
                                   : tagc_gatherer_create(run->comm, &of_gatherer, &gatherer);
    CHECK(run, status == TAGC_ERR_MISMATCH);
    CHECK(run,
          strstr(tagc_last_error(), "rank 11 makes an all-to-all where rank 10 makes a gatherer") != NULL);
    CHECK(run, tagc_all_to_all_create(NULL, &options, &a) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_all_to_all_begin(NULL, NULL) == TAGC_ERR_ARGUMENT &&
                   tagc_all_to_all_end(NULL) == TAGC_ERR_ARGUMENT);
    tagc_all_to_all_destroy(NULL);
}

TEST(other_orders_and_options_are_refused) {
    trial t = {.format = TAGC_FORMAT_INT8, .element_bytes = 4, .seed = 5};
    run_ranks(3, order_body, &t);
    run_ranks(4, order_body, &t);
    run_ranks(3, options_body, &t);
}

/* ---- damage ---- */

typedef struct damaged_seat {
    seat seat;
    int damages; /* the next messages of more than counts */
} damaged_seat;

static tagc_status exchange_and_damage(void *context, const tagc_transfer *transfer) {
    damaged_seat *self = context;
    tagc_status status = exchange_all(&self->seat, transfer);
    for (uint32_t i = 0; i < transfer->n_receives && self->damages; i++)
        if (transfer->receives[i].n_bytes > 300)
            ((uint8_t *)transfer->recv)[transfer->receives[i].offset + 80] ^= 4;
    return status;
}

static const tagc_callback_ops damaging_ops = {.abi = TAGC_TRANSPORT_ABI, .exchange = exchange_and_damage};

typedef struct damage_trial {
    trial trial;
    meeting meeting;
} damage_trial;

static void damage_body(rank_run *run) {
    damage_trial *all = run->shared;
    damaged_seat self = {{&all->meeting, run->rank, run->world_size}, 0};
    tagc_comm *own = run->comm;
    seat_of_rank s;
    CHECK(run, tagc_comm_create_callback(&damaging_ops, &self, run->rank, run->world_size, named_ranks(),
                                         &run->comm) == TAGC_OK);
    run->shared = &all->trial;
    if (!take_seat(run, &s, MIN_ELEMS)) return;
    for (int call = 0; call < 4; call++) {
        fill_call(&s, 0);
        for (int r = 0; r < run->world_size; r++) s.sends[r] = s.receives[r] = 500;
        s.call.n_input = s.call.n_output = 500 * (uint64_t)run->world_size;
        memset(s.input, 0, s.call.n_input * 4);
        self.damages = call == 1 && run->rank == 1;
        tagc_status status = tagc_all_to_all_run(s.a, &s.call);
        int is_corrupt = call == 2 || (call == 1 && run->rank == 1);
        CHECK(run, status == (is_corrupt ? TAGC_ERR_CORRUPT : TAGC_OK));
        if (call == 2 && run->rank != 1)
            CHECK(run, strstr(tagc_last_error(), "rank 11 got damaged elements in the call before") != NULL);
    }
    leave_seat(&s);
    tagc_comm_destroy(run->comm);
    run->comm = own;
}

TEST(damage_is_told) {
    damage_trial all = {.trial = {.format = TAGC_FORMAT_INT8, .element_bytes = 4, .seed = 3}};
    pthread_barrier_init(&all.meeting.barrier, NULL, 4);
    run_ranks(4, damage_body, &all);
    pthread_barrier_destroy(&all.meeting.barrier);
}

/* ---- rounding ---- */

enum { N_MEANS = 400, N_VALUES = 512 };

/* Rank 0 sends the same values to both others, whose roundings are independent; the mean of many is the value; a seed says all. */
static void mean_body(rank_run *run) {
    seat_of_rank s;
    if (!take_seat(run, &s, 0)) return;
    static float exact[N_VALUES];
    double sums[N_VALUES] = {0};
    float *first = (float *)(void *)s.output;
    if (run->rank == 0)
        for (int i = 0; i < N_VALUES; i++) exact[i] = random_gradient(9, 0, (uint64_t)i);
    CHECK(run, tagc_comm_barrier(run->comm) == TAGC_OK);
    uint64_t sum_of_first = 0;
    for (int call = 0; call <= N_MEANS; call++) {
        fill_call(&s, call % N_MEANS);
        for (int r = 0; r < run->world_size; r++) {
            s.sends[r] = run->rank == 0 && r ? N_VALUES : 0;
            s.receives[r] = run->rank && !r ? N_VALUES : 0;
            if (run->rank == 0 && r) memcpy(s.input + (r - 1) * (int)sizeof exact, exact, sizeof exact);
        }
        s.call.n_input = run->rank ? 0 : 2 * N_VALUES;
        s.call.n_output = run->rank ? N_VALUES : 0;
        if (!CHECK(run, tagc_all_to_all_run(s.a, &s.call) == TAGC_OK)) return;
        uint64_t sum = run->rank ? tagc_checksum(first, sizeof exact) : 0, both[3];
        CHECK(run, tagc_comm_all_gather(run->comm, &sum, sizeof sum, both, sizeof both) == TAGC_OK);
        CHECK(run, both[1] != both[2]); /* other ranks, other numbers */
        if (call == 0) sum_of_first = sum;
        CHECK(run, (sum == sum_of_first) == (run->rank == 0 || call % N_MEANS == 0));
        for (int i = 0; i < N_VALUES && run->rank && call < N_MEANS; i++) sums[i] += (double)first[i];
    }
    for (int b = 0; b < N_VALUES / 64 && run->rank; b++) {
        float scale = oracle_wide(oracle_scale(s.t->format, 1, exact + b * 64, 64));
        for (int i = b * 64; i < b * 64 + 64; i++) /* 6 standard deviations, of at most half a step */
            CHECK(run, fabs(sums[i] / N_MEANS - (double)exact[i]) <= 6 * 0.5 / 20 * (double)scale);
    }
    leave_seat(&s);
}

TEST(rounding_is_right_in_the_mean) {
    for (int format = TAGC_FORMAT_INT8; format <= TAGC_FORMAT_INT4; format++) {
        trial t = {.format = format, .rounding = TAGC_ROUNDING_STOCHASTIC, .element_bytes = 4};
        run_ranks(3, mean_body, &t);
    }
}
