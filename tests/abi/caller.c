/* A program that was compiled against a header and runs with a library of another version. CMakeLists.txt compiles it against
 * today's header, against tomorrow's, which is today's with two fields more at the end of every struct and a leg more
 * (TOMORROW is set then), and against those of tagged versions. Behind each struct lie bytes that no library may
 * touch. */
#include <tagc/blocks.h>
#include <tagc/changes.h>
#include <tagc/paper.h>
#include <tagc/tagc.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SHARD = 96, GUARD = 64, FILL = 0xa5 };

#define REQUIRE(condition) require(!!(condition), #condition, __LINE__)

static void require(int holds, const char *what, int line) {
    if (holds) return;
    fprintf(stderr, "line %d: %s (last error: %s)\n", line, what, tagc_last_error());
    exit(1);
}

/* A struct of the caller's with something of its own behind it. */
#define GUARDED(type)                                                                                        \
    struct {                                                                                                 \
        type it;                                                                                             \
        unsigned char guard[GUARD];                                                                          \
    }
#define POISON(guarded) memset(&(guarded), FILL, sizeof(guarded))
#define REQUIRE_UNTOUCHED(guarded) require_untouched((guarded).guard, __LINE__)

static void require_untouched(const unsigned char *guard, int line) {
    for (int i = 0; i < GUARD; i++)
        require(guard[i] == FILL, "nothing is written beyond the caller's struct", line);
}

static GUARDED(tagc_comm_options) comm_options;
static GUARDED(tagc_reducer_options) reducer_options;
static GUARDED(tagc_paper_options) paper_options;
static GUARDED(tagc_gatherer_options) gatherer_options;
static GUARDED(tagc_blocks_options) blocks_options;
static GUARDED(tagc_reducer_stats) stats;

static void init_all(void) {
    POISON(comm_options);
    POISON(reducer_options);
    POISON(paper_options);
    POISON(gatherer_options);
    POISON(blocks_options);
    POISON(stats);
    tagc_comm_options_init(&comm_options.it);
    tagc_reducer_options_init(&reducer_options.it);
    tagc_paper_options_init(&paper_options.it);
    tagc_gatherer_options_init(&gatherer_options.it);
    tagc_blocks_options_init(&blocks_options.it);
    tagc_reducer_stats_init(&stats.it);
    REQUIRE_UNTOUCHED(comm_options);
    REQUIRE_UNTOUCHED(reducer_options);
    REQUIRE_UNTOUCHED(paper_options);
    REQUIRE_UNTOUCHED(gatherer_options);
    REQUIRE_UNTOUCHED(blocks_options);
    REQUIRE_UNTOUCHED(stats);
    REQUIRE(comm_options.it.struct_bytes == sizeof comm_options.it && comm_options.it.timeout_s == 120);
    REQUIRE(reducer_options.it.struct_bytes == sizeof reducer_options.it);
    REQUIRE(reducer_options.it.sparsity == -1 && reducer_options.it.format == -1);
    REQUIRE(reducer_options.it.tag == UINT64_MAX && reducer_options.it.paper == NULL);
    REQUIRE(paper_options.it.struct_bytes == sizeof paper_options.it && paper_options.it.fill_union == -1);
    REQUIRE(gatherer_options.it.struct_bytes == sizeof gatherer_options.it && gatherer_options.it.delta == 0);
    REQUIRE(blocks_options.it.struct_bytes == sizeof blocks_options.it && blocks_options.it.block == 64);
    REQUIRE(stats.it.struct_bytes == sizeof stats.it && stats.it.n_sent == 0);
}

/* One rank, so that nothing is lost on the way: what it must get is what it gave. */
static void reduce(tagc_comm *comm) {
    static float gradient[SHARD], output[SHARD];
    tagc_reducer *reducer;
    for (int i = 0; i < SHARD; i++) gradient[i] = (float)(i - 40) / 8;
    reducer_options.it.n_elems = SHARD;
    reducer_options.it.format = TAGC_FORMAT_BF16; /* these values have few bits */
    reducer_options.it.sparsity = 0;
    reducer_options.it.op = TAGC_OP_SUM;
    REQUIRE(tagc_reducer_create(comm, &reducer_options.it, &reducer) == TAGC_OK);
    REQUIRE(tagc_reducer_run(reducer, gradient, SHARD, output, SHARD, &stats.it) == TAGC_OK);
    REQUIRE(memcmp(gradient, output, sizeof output) == 0);
    REQUIRE(stats.it.n_sent == SHARD && stats.it.sparsity == 0 && stats.it.total_s > 0 &&
            !stats.it.nonfinite);
    REQUIRE(stats.it.struct_bytes == sizeof stats.it);
    REQUIRE_UNTOUCHED(stats);
    tagc_reducer_destroy(reducer);

    /* Half of the values, by way of the paper's options. */
    reducer_options.it.exchange = TAGC_EXCHANGE_SKETCH;
    reducer_options.it.format = -1;
    reducer_options.it.sparsity = 0.5;
    reducer_options.it.paper = &paper_options.it;
    paper_options.it.cells = TAGC_CELLS_FIXED;
    paper_options.it.ratio = 1;
    paper_options.it.seed = 3;
    REQUIRE(tagc_reducer_create(comm, &reducer_options.it, &reducer) == TAGC_OK);
    REQUIRE(tagc_reducer_run(reducer, gradient, SHARD, output, SHARD, &stats.it) == TAGC_OK);
    REQUIRE(stats.it.n_sent == SHARD / 2 && stats.it.n_cells > 0 && stats.it.load > 0);
    tagc_reducer_destroy(reducer);
}

static void gather(tagc_comm *comm) {
    static float shard[SHARD], full[SHARD];
    tagc_gatherer *gatherer;
    for (int i = 0; i < SHARD; i++) shard[i] = (float)(i * i);
    gatherer_options.it.n_elems = SHARD;
    gatherer_options.it.format = TAGC_FORMAT_FP32;
    REQUIRE(tagc_gatherer_create(comm, &gatherer_options.it, &gatherer) == TAGC_OK);
    REQUIRE(tagc_gatherer_begin(gatherer, shard, SHARD, full, SHARD) == TAGC_OK);
    REQUIRE(tagc_gatherer_end(gatherer) == TAGC_OK);
    REQUIRE(memcmp(shard, full, sizeof full) == 0);
    tagc_gatherer_destroy(gatherer);
}

/* Whole numbers up to 127 in 8 bits are what they were. */
static void encode_blocks(void) {
    static float values[SHARD], back[SHARD];
    static unsigned char message[64 + 2 * 2 + SHARD];
    for (int i = 0; i < SHARD; i++) values[i] = (float)(i % 32 == 0 ? -127 : i - 40);
    REQUIRE(tagc_blocks_encode(&blocks_options.it, values, SHARD, message, sizeof message) == TAGC_OK);
    REQUIRE(tagc_blocks_decode(&blocks_options.it, message, sizeof message, back, SHARD) == TAGC_OK);
    REQUIRE(memcmp(values, back, sizeof back) == 0);
}

static void encode_changes(void) {
    static float before[SHARD], after[SHARD], back[SHARD];
    static unsigned char message[64 + 8 + sizeof after];
    uint64_t n_bytes = 0, n_changes = 0;
    tagc_changes_form form = TAGC_CHANGES_WHOLE;
    memcpy(after, before, sizeof after);
    after[3] = 1;
    REQUIRE(tagc_changes_max_bytes(4, SHARD, &n_bytes) == TAGC_OK && n_bytes == sizeof message);
    REQUIRE(tagc_changes_encode(4, before, after, SHARD, 0, message, sizeof message, &n_bytes, &n_changes) ==
            TAGC_OK);
    REQUIRE(n_changes == 1 && n_bytes < sizeof message);
    REQUIRE(tagc_changes_check(4, message, n_bytes, SHARD, &form) == TAGC_OK &&
            form == TAGC_CHANGES_BY_PLACE);
    REQUIRE(tagc_changes_apply(4, message, n_bytes, back, SHARD) == TAGC_OK);
    REQUIRE(memcmp(after, back, sizeof back) == 0);
}

static void count_bytes(tagc_comm *comm) {
    static struct { uint64_t sent[TAGC_N_LEGS], guard; } bytes;
    memset(&bytes, FILL, sizeof bytes);
    uint64_t untouched = bytes.guard;
    tagc_comm_bytes(comm, bytes.sent, NULL, TAGC_N_LEGS);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++)
        REQUIRE(bytes.sent[leg] == 0); /* one rank has no other to send to */
    REQUIRE(bytes.guard == untouched);
}

#ifdef TOMORROW
/* What today's library knows nothing of is refused where it is not zero, by the struct's name. */
static void require_refusal(tagc_status status, void *const *object, const char *struct_name) {
    REQUIRE(*object == NULL);
    require(status == TAGC_ERR_ARGUMENT && strstr(tagc_last_error(), struct_name) &&
                strstr(tagc_last_error(), "compiled for a newer libtagc"),
            struct_name, __LINE__);
}

static void refuse_tomorrow(tagc_comm *comm) {
    tagc_local_group *group;
    void *none = comm;
    init_all();
    comm_options.it.tomorrow = 1;
    REQUIRE(tagc_local_group_create(1, &group) == TAGC_OK);
    require_refusal(tagc_comm_create_local(group, 0, &comm_options.it, (tagc_comm **)&none), &none,
                    "tagc_comm_options");
    tagc_local_group_destroy(group);
    reducer_options.it.n_elems = gatherer_options.it.n_elems = SHARD;
    reducer_options.it.and_after = 1 << 24; /* the last of its bytes */
    require_refusal(tagc_reducer_create(comm, &reducer_options.it, (tagc_reducer **)&none), &none,
                    "tagc_reducer_options");
    reducer_options.it.and_after = 0;
    reducer_options.it.exchange = TAGC_EXCHANGE_PACKED;
    reducer_options.it.paper = &paper_options.it;
    paper_options.it.tomorrow = 5;
    require_refusal(tagc_reducer_create(comm, &reducer_options.it, (tagc_reducer **)&none), &none,
                    "tagc_paper_options");
    gatherer_options.it.tomorrow = -1;
    require_refusal(tagc_gatherer_create(comm, &gatherer_options.it, (tagc_gatherer **)&none), &none,
                    "tagc_gatherer_options");

    /* Of statistics, what the library does not know is 0. */
    static float gradient[SHARD], output[SHARD];
    tagc_reducer *reducer;
    paper_options.it.tomorrow = 0;
    for (int i = 0; i < SHARD; i++) gradient[i] = (float)(i + 1);
    stats.it.tomorrow = stats.it.and_after = 7;
    REQUIRE(tagc_reducer_create(comm, &reducer_options.it, &reducer) == TAGC_OK);
    REQUIRE(tagc_reducer_run(reducer, gradient, SHARD, output, SHARD, &stats.it) == TAGC_OK);
    REQUIRE(stats.it.tomorrow == 0 && stats.it.and_after == 0 && stats.it.n_sent > 0);
    REQUIRE_UNTOUCHED(stats);
    tagc_reducer_destroy(reducer);

    uint64_t n_bytes;
    none = NULL;
    blocks_options.it.tomorrow = 1;
    require_refusal(tagc_blocks_bytes(&blocks_options.it, SHARD, &n_bytes), &none, "tagc_blocks_options");
}
#endif

int main(void) {
    tagc_local_group *group;
    tagc_comm *comm;
    init_all();
    REQUIRE(tagc_local_group_create(1, &group) == TAGC_OK);
    comm_options.it.timeout_s = 0;
    REQUIRE(tagc_comm_create_local(group, 0, &comm_options.it, &comm) == TAGC_ERR_ARGUMENT);
    REQUIRE(strstr(tagc_last_error(), "timeout_s is 0"));
    comm_options.it.timeout_s = 60;
    REQUIRE(tagc_comm_create_local(group, 0, &comm_options.it, &comm) == TAGC_OK);
    reduce(comm);
    gather(comm);
    encode_blocks();
    encode_changes();
    count_bytes(comm);
#ifdef TOMORROW
    refuse_tomorrow(comm);
#endif
    tagc_comm_destroy(comm);
    tagc_local_group_destroy(group);
    return 0;
}
