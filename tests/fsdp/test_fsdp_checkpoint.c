/* Checkpoints: exact when resumed alike, conserving when resumed otherwise, refused when not whole, and never
 * half there. */
#include "../repeats.h"
#include "folder.h"
#include "unsent.h"

#include "core/xxh3.h"
#include "fsdp/checkpoint.h"
#include "fsdp/checkpoint_format.h"
#include "fsdp/internal.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LR 0.01

/* What one run of ranks is to do, and what it found. Fields are per rank where ranks write them. */
typedef struct script {
    toy_model model;
    tagc_fsdp_options options;
    const char *dir;
    int n_steps_before, n_steps_after; /* of saving or loading */
    tagc_status expected;
    tagc_status status[TOY_MAX_RANKS];
    char text[TOY_MAX_RANKS][TAGC_ERROR_TEXT_BYTES];
    float *values[TOY_MAX_RANKS];    /* (n_params) at the end */
    double *residual[TOY_MAX_RANKS]; /* (n_params) at the end, in tensor order */
    float *owned[TOY_MAX_RANKS];     /* (3, n_params) at the end: master and moments */
    uint64_t residual_bits[TOY_MAX_RANKS],
        residual_at[TOY_MAX_RANKS];      /* checksums at the end, at the checkpoint */
    uint64_t gathered[TOY_MAX_RANKS][2]; /* bytes sent and received by the steps after */
    uint64_t
        replica_at[TOY_MAX_RANKS]; /* checksum of the parameters as the model reads them, after loading */
    int without;                   /* trains on without a checkpoint */
    int forks;                     /* of fork_rank; 0: trains and saves */
    uint64_t optimizer_bytes[TOY_MAX_RANKS]; /* at the end */
} script;

static void read_residual(const script *s, const tagc_fsdp *f, double *out) {
    for (int t = 0; t < s->model.n_tensors; t++) {
        size_t n = s->model.tensors[t].n_elems;
        memset(out, 0, n * sizeof *out);
        add_unsent(f, t, 1, out);
        out += n;
    }
}

static uint64_t hash_residual(const tagc_fsdp *f) {
    uint64_t hash = 0;
    for (int i = 0; i < f->tables.n_flats; i++) {
        uint64_t n;
        float *residual = copy_of_residual(reducer_of(f, i), &n);
        for (uint64_t j = 0; j < n; j++) { /* zero is -0 in padding, too */
            uint32_t bits;
            memcpy(&bits, &residual[j], sizeof bits);
            hash = (hash ^ bits) * 0x100000001b3u;
        }
        free(residual);
    }
    return hash;
}

/* Tensor by tensor, without padding: the same in any world. Once its gathers are through. */
static uint64_t hash_replica(tagc_fsdp *f) {
    uint64_t hash = 0;
    CHECK_OK(tagc_order_end_gathers(&f->order));
    for (int t = 0; t < f->tables.n_tensors && f->options.gather >= TAGC_GATHER_DELTA8; t++)
        hash = tagc_xxh3(f->tables.flats[f->tables.places[t].flat].full + f->tables.places[t].offset,
                         f->tables.tensors[t].n_elems * sizeof(float), hash);
    return hash;
}

/* Master and moments of a tensor on every rank, end to end: (3, n_params) with zeros where others own. */
static void read_owned(const tagc_fsdp *f, float *out) {
    size_t n_params = 0, at = 0;
    for (int t = 0; t < f->tables.n_tensors; t++) n_params += f->tables.tensors[t].n_elems;
    memset(out, 0, 3 * n_params * sizeof *out);
    for (int t = 0; t < f->tables.n_tensors; t++) {
        const tagc_place *p = &f->tables.places[t];
        const tagc_flat *flat = &f->tables.flats[p->flat];
        const float *from[] = {flat->master, flat->moment1, flat->moment2};
        for (int i = 0; i < 3 && p->n > 0; i++)
            if (from[i])
                memcpy(out + (size_t)i * n_params + at + p->first, from[i] + p->at, p->n * sizeof *out);
        at += f->tables.tensors[t].n_elems;
    }
}

/* (3, n_params) of all ranks. The caller frees it. */
static float *owned_by_all(const script *s, int world_size) {
    size_t n = 3 * toy_n_params(&s->model);
    float *all = calloc(n, sizeof *all);
    for (int rank = 0; rank < world_size; rank++)
        for (size_t i = 0; i < n; i++)
            if (s->owned[rank][i] != 0) all[i] = s->owned[rank][i];
    return all;
}

static tagc_fsdp *make(script *s, tagc_comm *comm) {
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, s->model.tensors, s->model.n_tensors, &s->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    return f;
}

static void finish(script *s, tagc_comm *comm, tagc_fsdp *f, uint64_t step) {
    int rank = tagc_comm_rank(comm);
    for (int i = 0; i < s->n_steps_after; i++) {
        tagc_fsdp_stats stats;
        toy_step(&s->model, comm, f, s->options.n_micro_steps, step + (uint64_t)i, LR, &stats);
        s->gathered[rank][0] += stats.n_bytes_sent[TAGC_LEG_GATHER];
        s->gathered[rank][1] += stats.n_bytes_received[TAGC_LEG_GATHER];
    }
    toy_read(&s->model, f, s->values[rank]);
    read_residual(s, f, s->residual[rank]);
    read_owned(f, s->owned[rank]);
    s->residual_bits[rank] = hash_residual(f);
    tagc_fsdp_memory memory;
    tagc_fsdp_memory_used(f, &memory);
    s->optimizer_bytes[rank] = memory.optimizer;
    tagc_fsdp_destroy(f);
}

/* A rank that failed itself hears its own words; the others hear them, too, behind its name. */
static void assert_same_failure(const char *a, const char *b) {
    const char *longer = strlen(a) > strlen(b) ? a : b, *shorter = longer == a ? b : a;
    size_t n_more = strlen(longer) - strlen(shorter);
    assert_string_equal(longer + n_more, shorter);
    assert_true(n_more == 0 || n_more == strlen("rank 0: "));
}

static void save_and_go_on(tagc_comm *comm, void *arg) {
    script *s = arg;
    int rank = tagc_comm_rank(comm);
    tagc_fsdp *f = make(s, comm);
    for (int i = 0; i < s->n_steps_before; i++)
        toy_step(&s->model, comm, f, s->options.n_micro_steps, (uint64_t)i, LR, NULL);
    if (!s->without)
        s->status[rank] =
            tagc_checkpoint_save(f, comm, s->dir, (uint64_t)s->n_steps_before, "{\"position\": 17}");
    s->replica_at[rank] = hash_replica(f);
    snprintf(s->text[rank], TAGC_ERROR_TEXT_BYTES, "%s", tagc_last_error());
    CHECK(s->status[rank] == s->expected);
    s->residual_at[rank] = hash_residual(f);
    finish(s, comm, f, (uint64_t)s->n_steps_before);
}

static void load_and_go_on(tagc_comm *comm, void *arg) {
    script *s = arg;
    int rank = tagc_comm_rank(comm);
    tagc_fsdp *f = make(s, comm);
    char path[1024], *extra;
    uint64_t step = 0;
    CHECK_OK(tagc_checkpoint_find(comm, s->dir, path, sizeof path));
    s->status[rank] = tagc_checkpoint_load(f, comm, path, &step, &extra);
    snprintf(s->text[rank], TAGC_ERROR_TEXT_BYTES, "%s", tagc_last_error());
    CHECK(s->status[rank] == s->expected);
    if (s->status[rank] == TAGC_OK) CHECK(strcmp(extra, "{\"position\": 17}") == 0);
    free(extra);
    s->replica_at[rank] = hash_replica(f);
    s->residual_at[rank] = hash_residual(f);
    finish(s, comm, f, step);
}

/* A used engine with residuals of its own meets a bad checkpoint: all of it must stay. */
static void load_into_used(tagc_comm *comm, void *arg) {
    script *s = arg;
    int rank = tagc_comm_rank(comm);
    tagc_fsdp *f = make(s, comm);
    for (int i = 0; i < s->n_steps_before; i++)
        toy_step(&s->model, comm, f, s->options.n_micro_steps, (uint64_t)i + 100, LR, NULL);
    float *before = malloc(toy_n_params(&s->model) * sizeof *before);
    toy_read(&s->model, f, before);
    uint64_t residual = hash_residual(f), step, n_updates = f->n_updates;
    char *extra;
    s->status[rank] = tagc_checkpoint_load(f, comm, s->dir, &step, &extra);
    snprintf(s->text[rank], TAGC_ERROR_TEXT_BYTES, "%s", tagc_last_error());
    CHECK(s->status[rank] != TAGC_OK && extra == NULL);
    toy_read(&s->model, f, s->values[rank]);
    CHECK(memcmp(before, s->values[rank], toy_n_params(&s->model) * sizeof *before) == 0);
    CHECK(residual == hash_residual(f) && n_updates == f->n_updates);
    toy_step(&s->model, comm, f, s->options.n_micro_steps, 0, LR, NULL); /* and it still works */
    free(before);
    tagc_fsdp_destroy(f);
}

static script *script_make(const char *dir) {
    script *s = calloc(1, sizeof *s);
    toy_gpt(&s->model, 2, 7, 0);
    tagc_fsdp_options_init(&s->options);
    s->options.reducer.exchange = TAGC_EXCHANGE_PACKED;
    s->options.reducer.sparsity = 0.8;
    s->dir = dir;
    s->n_steps_before = s->n_steps_after = 3;
    for (int i = 0; i < TOY_MAX_RANKS; i++) {
        s->values[i] = calloc(toy_n_params(&s->model), sizeof(float));
        s->residual[i] = calloc(toy_n_params(&s->model), sizeof(double));
        s->owned[i] = calloc(3 * toy_n_params(&s->model), sizeof(float));
    }
    return s;
}

/* Values and residuals, at the checkpoint and at the end. */
static void assert_alike(const script *a, const script *b, int world_size) {
    for (int rank = 0; rank < world_size; rank++) {
        assert_memory_equal(a->values[rank], b->values[rank], toy_n_params(&a->model) * sizeof(float));
        assert_true(a->residual_at[rank] == b->residual_at[rank]);
        assert_true(a->residual_bits[rank] == b->residual_bits[rank]);
    }
}

static void script_free(script *s) {
    for (int i = 0; i < TOY_MAX_RANKS; i++) {
        free(s->values[i]);
        free(s->residual[i]);
        free(s->owned[i]);
    }
    free(s);
}

TEST_BETWEEN(make_dir, remove_dir, resume_is_exact) {
    enum { PACKED = -2 };
    static const int residuals[] = {PACKED,           PACKED, PACKED,           PACKED, TAGC_FORMAT_INT8,
                                    TAGC_FORMAT_INT4, PACKED, TAGC_FORMAT_FP32, -1};
    for (int variant = 0; variant < 9; variant += REPEATS(1, 1, 2)) {
        char dir[1024];
        snprintf(dir, sizeof dir, "%s/deep/v%d", (char *)*state, variant);
        script *a = script_make(dir), *b = script_make(dir);
        a->options.sharding = variant % 3;
        a->options.policy = variant < 3   ? TAGC_POLICY_NONE
                            : variant < 6 ? TAGC_POLICY_NON_ATTENTION_LINEAR
                                          : TAGC_POLICY_ALL;
        a->options.n_micro_steps = 1 + variant / 2 % 2;
        if (residuals[variant] != PACKED) {
            a->options.reducer.exchange = TAGC_EXCHANGE_DIRECT;
            a->options.reducer.residual = residuals[variant];
        }
        b->options = a->options;
        int world_size = 1 + variant % 3;
        toy_run(world_size, save_and_go_on, a);
        toy_run(world_size, load_and_go_on, b);
        assert_alike(a, b, world_size);
        assert_true(variant < 3 || a->residual_at[0] != 0);
        script_free(a);
        script_free(b);
    }
}

/* Hosts that add first hold one residual together; replicas of hybrid sharding save every value once. */
TEST_BETWEEN(make_dir, remove_dir, resume_in_hosts_is_exact) {
    static const int hosts[][2] = {{2, 1}, {2, 2}, {4, 2}, {6, 3}};
    for (int variant = 0; variant < 16; variant += REPEATS(1, 1, 3)) {
        char dir[1024];
        snprintf(dir, sizeof dir, "%s/hosts%d", (char *)*state, variant);
        script *a = script_make(dir), *b = script_make(dir);
        int world_size = hosts[variant / 4][0];
        a->options.sharding = variant % 4;
        a->options.ranks_per_host = hosts[variant / 4][1];
        a->options.two_level = 1;
        a->options.reducer.exchange = TAGC_EXCHANGE_DIRECT;
        a->options.mild = a->options.reducer;
        a->options.mild.sparsity = 0.5;
        b->options = a->options;
        toy_run(world_size, save_and_go_on, a);
        toy_run(world_size, load_and_go_on, b);
        assert_alike(a, b, world_size);
        assert_true(world_size == a->options.ranks_per_host || a->residual_at[0] != 0);
        script_free(a);
        script_free(b);
    }
}

/* Parameters that travel as deltas: a run that saves and one that resumes go on as one that never saved, in bits and in
 * bytes; another world, wrap and code begin with the same replicas. */
TEST_BETWEEN(make_dir, remove_dir, deltas_resume_exactly) {
    static const int worlds[][4] = {/* ranks, per host, ranks and per host of another world */
                                    {1, 1, 2, 1},
                                    {2, 1, 3, 1},
                                    {3, 1, 1, 1},
                                    {4, 2, 4, 1},
                                    {6, 3, 4, 2}};
    for (int variant = 0; variant < 15; variant += REPEATS(1, 1, 7)) {
        const int *world = worlds[variant % 5];
        char dir[1024];
        snprintf(dir, sizeof dir, "%s/deltas%d", (char *)*state, variant);
        script *runs[4]; /* without a checkpoint, saving, resumed, resumed in another world */
        for (int i = 0; i < 4; i++) {
            script *s = runs[i] = script_make(dir);
            s->without = i == 0;
            s->options.sharding = TAGC_SHARD_GRAD;
            s->options.gather = TAGC_GATHER_DELTA8 + (variant + (i == 3)) % 3;
            s->options.gather_check_every = 5; /* the first gather after the checkpoint is one */
            s->options.n_micro_steps = 1 + variant % 2;
            s->options.ranks_per_host = world[i < 3 ? 1 : 3];
            s->options.two_level = 1;
            s->options.reducer.exchange = TAGC_EXCHANGE_DIRECT;
            s->options.wrap = i == 3;
            toy_run(world[i < 3 ? 0 : 2], i < 2 ? save_and_go_on : load_and_go_on, s);
        }
        for (int rank = 0; rank < world[0]; rank++)
            for (int i = 1; i < 3; i++) {
                assert_memory_equal(runs[0]->values[rank], runs[i]->values[rank],
                                    toy_n_params(&runs[0]->model) * sizeof(float));
                assert_true(runs[0]->residual_bits[rank] == runs[i]->residual_bits[rank]);
                assert_true(runs[0]->replica_at[rank] == runs[i]->replica_at[rank]);
                for (int k = 0; k < 2; k++)
                    assert_true(runs[0]->gathered[rank][k] == runs[i]->gathered[rank][k]);
            }
        assert_true(world[0] == 1 || runs[0]->gathered[0][0] > 0);
        for (int rank = 0; rank < world[2]; rank++)
            assert_true(runs[3]->replica_at[rank] == runs[0]->replica_at[0]);
        for (int i = 0; i < 4; i++) script_free(runs[i]);
    }
}

/* Returns the bytes of all ranks' files together. */
static uint64_t bytes_of(const char *path, int world_size) {
    uint64_t n_bytes = 0;
    tagc_manifest *m;
    assert_int_equal(tagc_manifest_read(path, &m), TAGC_OK);
    for (int rank = 0; rank < world_size; rank++) n_bytes += m->files[rank].n_bytes;
    tagc_manifest_destroy(m);
    return n_bytes;
}

/* Compressed tensors without a first moment: neither the engine nor its checkpoint holds one. */
TEST_BETWEEN(make_dir, remove_dir, no_first_moment_where_beta1_is_zero) {
    for (int sharding = 0; sharding < 3; sharding++) {
        char dir[1024], path[1100];
        snprintf(dir, sizeof dir, "%s/moments%d", (char *)*state, sharding);
        snprintf(path, sizeof path, "%s/step-00000003", dir);
        script *runs[3]; /* with the moment; saved without, loaded without */
        for (int i = 0; i < 3; i++) {
            runs[i] = script_make(dir);
            runs[i]->options.sharding = sharding;
            runs[i]->options.beta1_compressed = i == 0 ? 0.9 : 0;
        }
        toy_run(2, save_and_go_on, runs[0]);
        uint64_t n_bytes_with = bytes_of(path, 2);
        toy_run(2, save_and_go_on, runs[1]);
        uint64_t n_less = 0;
        for (int rank = 0; rank < 2; rank++) {
            assert_true(runs[1]->optimizer_bytes[rank] < runs[0]->optimizer_bytes[rank]);
            n_less += (runs[0]->optimizer_bytes[rank] - runs[1]->optimizer_bytes[rank]) / sizeof(float);
        }
        toy_run(2, load_and_go_on, runs[2]);
        uint64_t n_missing = (n_bytes_with - bytes_of(path, 2)) / sizeof(float);
        /* An array takes whole cache lines; rank 0 saves what all ranks hold. */
        uint64_t n_saved = sharding == TAGC_SHARD_NONE ? 2 * n_missing : n_missing;
        assert_true(n_missing > 0 && n_less >= n_saved && n_less < n_saved + 16 * 2 * 8);
        for (int rank = 0; rank < 2; rank++) {
            assert_memory_equal(runs[1]->values[rank], runs[2]->values[rank],
                                toy_n_params(&runs[1]->model) * sizeof(float));
            assert_true(runs[1]->residual_bits[rank] == runs[2]->residual_bits[rank]);
        }
        assert_true(memcmp(runs[0]->values[0], runs[1]->values[0],
                           toy_n_params(&runs[1]->model) * sizeof(float)) != 0);
        for (int i = 0; i < 3; i++) script_free(runs[i]);
    }
}

/* Another world, sharding, wrap or buckets: the same parameters and moments, and every residual still worth what it was. */
TEST_BETWEEN(make_dir, remove_dir, resume_in_another_world) {
    static const struct {
        int old, now, old_per_host, now_per_host;
    } worlds[] = {{4, 2, 1, 1}, {2, 3, 1, 1}, {3, 1, 1, 1}, {1, 4, 1, 1}, {2, 2, 1, 1},
                  {4, 4, 2, 1}, {4, 4, 1, 2}, {4, 8, 2, 2}, {6, 4, 3, 2}, {8, 2, 2, 1},
                  {4, 6, 2, 2}, {8, 4, 4, 2}, {2, 8, 1, 4}, {6, 6, 2, 3}, {4, 4, 2, 2}};
    static const uint64_t buckets[] = {0, 900, 2000, 500, 100000};
    for (size_t v = 0; v < sizeof worlds / sizeof *worlds; v += REPEATS(1, 1, 2)) {
        char dir[1024];
        snprintf(dir, sizeof dir, "%s/w%zu", (char *)*state, v);
        int old = worlds[v].old, now = worlds[v].now;
        script *a = script_make(dir), *b = script_make(dir);
        a->options.policy = TAGC_POLICY_NON_ATTENTION_LINEAR;
        b->options.policy = v == 4 ? TAGC_POLICY_ALL : TAGC_POLICY_NON_ATTENTION_LINEAR;
        a->options.sharding = (int)v % (v < 5 ? 3 : 4);
        b->options.sharding = (int)(v + 1) % (v < 5 ? 3 : 4);
        a->options.ranks_per_host = worlds[v].old_per_host;
        b->options.ranks_per_host = worlds[v].now_per_host;
        a->options.two_level = b->options.two_level = 1;
        if (v >= 5) a->options.reducer.exchange = b->options.reducer.exchange = TAGC_EXCHANGE_DIRECT;
        int residual = v < 5 || v % 2 ? TAGC_FORMAT_FP32 : TAGC_FORMAT_INT8;
        a->options.reducer.residual = b->options.reducer.residual = residual;
        a->options.mild.residual = b->options.mild.residual = residual;
        b->options.wrap = (int)v % 2;
        a->options.bucket_elems = buckets[v % 5];
        b->options.bucket_elems = v % 2 ? 0 : buckets[v / 2 % 5]; /* those of blocks */
        a->n_steps_after = b->n_steps_after = 0;
        toy_run(old, save_and_go_on, a);
        toy_run(now, load_and_go_on, b);
        size_t n = toy_n_params(&a->model);
        double largest = 0, most = 0, missing = 0, squares = 0;
        float *before_of_all = owned_by_all(a, old), *after_of_all = owned_by_all(b, now);
        assert_memory_equal(before_of_all, after_of_all, 3 * n * sizeof(float));
        free(before_of_all);
        free(after_of_all);
        for (int rank = 0; rank < now; rank++) {
            assert_memory_equal(a->values[0], b->values[rank], n * sizeof(float));
            for (size_t i = 0; i < n; i++) most = fmax(most, fabs(b->residual[rank][i]));
        }
        /* Each new rank rounds to a code of its own, which is at most 1/63 of the largest value near. */
        double rounding = residual == TAGC_FORMAT_FP32 ? 0 : most / 63;
        for (size_t i = 0; i < n; i++) {
            double before = 0, after = 0, scale = 1e-3; /* parts may cancel */
            for (int rank = 0; rank < old; rank++) before += a->residual[rank][i] / old;
            for (int rank = 0; rank < old; rank++) scale += fabs(a->residual[rank][i]) / old;
            for (int rank = 0; rank < now; rank++) after += b->residual[rank][i] / now;
            assert_true(fabs(before - after) <= 1e-6 * scale + rounding);
            largest = fmax(largest, fabs(before));
            missing += before - after;
            squares += (before - after) * (before - after);
        }
        /* It loses in both directions. */
        assert_true(rounding == 0 || fabs(missing) <= 5 * sqrt(squares));
        assert_true(largest > 0);
        script_free(a);
        script_free(b);
    }
}

/* Moments come along: a dense run that changes its world in the middle ends where one that does not ends. */
TEST_BETWEEN(make_dir, remove_dir, moments_move_too) {
    char dir[1024];
    snprintf(dir, sizeof dir, "%s/moments", (char *)*state);
    script *a = script_make(dir), *b = script_make(dir);
    a->options.policy = b->options.policy = TAGC_POLICY_NONE;
    toy_run(4, save_and_go_on, a);
    toy_run(3, load_and_go_on, b);
    for (size_t i = 0; i < toy_n_params(&a->model); i++)
        assert_true(fabsf(a->values[0][i] - b->values[0][i]) < 1e-5f);
    script_free(a);
    script_free(b);
}

/* ---- forks ---- */

static void fork_rank(tagc_comm *comm, void *arg) {
    script *s = arg;
    tagc_fsdp *f = make(s, comm);
    uint64_t step = 0, n;
    char *extra = NULL, path[1024];
    /* A fork into a used engine, too: its own residuals must go. */
    for (int i = 0; i < 3; i++) toy_step(&s->model, comm, f, s->options.n_micro_steps, (uint64_t)i, LR, NULL);
    if (!s->forks) {
        CHECK_OK(tagc_checkpoint_save(f, comm, s->dir, 3, "x"));
    } else {
        CHECK_OK(tagc_checkpoint_find(comm, s->dir, path, sizeof path));
        CHECK_OK(tagc_checkpoint_fork(f, comm, path, &step, &extra));
        CHECK(step == 3 && f->n_updates == 3);
        for (int i = 0; i < f->tables.n_flats; i++) {
            float *residual = copy_of_residual(reducer_of(f, i), &n);
            for (uint64_t j = 0; j < n; j++) CHECK(residual[j] == 0);
            free(residual);
        }
        free(extra);
    }
    read_owned(f, s->owned[tagc_comm_rank(comm)]);
    tagc_fsdp_destroy(f);
}

/* Every element of weights and moments is owned by somebody, and has the bits it had. */
TEST_BETWEEN(make_dir, remove_dir, forks_keep_weights_and_moments) {
    char dir[1024];
    snprintf(dir, sizeof dir, "%s/fork", (char *)*state);
    struct {
        int world_size, sharding, policy, wrap;
    } variants[] = {{2, TAGC_SHARD_FULL, TAGC_POLICY_NON_ATTENTION_LINEAR, TAGC_WRAP_BLOCK},
                    {4, TAGC_SHARD_FULL, TAGC_POLICY_NON_ATTENTION_LINEAR, TAGC_WRAP_BLOCK},
                    {2, TAGC_SHARD_GRAD, TAGC_POLICY_NON_ATTENTION_LINEAR, TAGC_WRAP_BLOCK},
                    {3, TAGC_SHARD_GRAD, TAGC_POLICY_NONE, TAGC_WRAP_MATRIX},
                    {1, TAGC_SHARD_NONE, TAGC_POLICY_ALL, TAGC_WRAP_BLOCK},
                    {2, TAGC_SHARD_NONE, TAGC_POLICY_NON_ATTENTION_LINEAR, TAGC_WRAP_MATRIX}};
    float *before = NULL;
    size_t n = 0;
    for (size_t v = 0; v < sizeof variants / sizeof *variants; v++) {
        script *s = script_make(dir);
        s->forks = v > 0;
        s->options.sharding = variants[v].sharding;
        s->options.policy = variants[v].policy;
        s->options.wrap = variants[v].wrap;
        n = 3 * toy_n_params(&s->model);
        toy_run(variants[v].world_size, fork_rank, s);
        float *now = owned_by_all(s, variants[v].world_size);
        if (v == 0)
            before = now;
        else
            assert_memory_equal(before, now, n * sizeof *now);
        if (v > 0) free(now);
        script_free(s);
    }
    size_t n_set = 0;
    for (size_t i = 0; i < n; i++) n_set += before[i] != 0;
    assert_true(n_set > n * 3 / 4);
    free(before);
}

/* ---- damage ---- */

static void change_byte(const char *path, long at) { /* at < 0: from the end */
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    fseek(file, at, at < 0 ? SEEK_END : SEEK_SET);
    int c = fgetc(file);
    fseek(file, -1, SEEK_CUR);
    fputc(c ^ 1, file);
    fclose(file);
}

static void damage(int kind, const char *path) {
    char a[1200], b[1200], c[1200];
    snprintf(a, sizeof a, "%s/rank-0.bin", path);
    snprintf(b, sizeof b, "%s/rank-1.bin", path);
    snprintf(c, sizeof c, "%s/manifest.json", path);
    struct stat info;
    assert_int_equal(stat(b, &info), 0);
    switch (kind) {
    case 0:
        assert_int_equal(truncate(b, info.st_size - 4), 0);
        break;
    case 1:
        assert_int_equal(truncate(b, 10), 0);
        break;
    case 2:
        change_byte(b, info.st_size / 2);
        break;
    case 3:
        change_byte(b, -1);
        break;
    case 4:
        assert_int_equal(unlink(b), 0);
        break;
    case 5:
        assert_int_equal(rename(b, a), 0);
        break;
    case 6:
        change_byte(b, 3);
        break;
    case 7:
        assert_int_equal(unlink(c), 0);
        break;
    case 8:
        assert_int_equal(truncate(c, 200), 0);
        break;
    default:
        change_byte(c, 60 + 37 * (kind - 9));
        break;
    }
}

TEST_BETWEEN(make_dir, remove_dir, damaged_files_are_refused) {
    enum { KINDS = 20 };
    char dir[1024], path[1100], command[4000];
    snprintf(dir, sizeof dir, "%s/damage", (char *)*state);
    script *s = script_make(dir);
    s->n_steps_after = 0;
    toy_run(2, save_and_go_on, s);
    snprintf(path, sizeof path, "%s/copy", dir);
    for (int kind = 0; kind < KINDS; kind += REPEATS(1, 1, 4)) {
        snprintf(command, sizeof command, "rm -rf %s; cp -r %s/step-00000003 %s", path, dir, path);
        assert_int_equal(system(command), 0);
        damage(kind, path);
        s->dir = path;
        toy_run(2, load_into_used, s);
        assert_int_equal(s->status[0], s->status[1]);
        assert_same_failure(s->text[0], s->text[1]);
        assert_true(s->status[0] == TAGC_ERR_CORRUPT || s->status[0] == TAGC_ERR_IO);
        assert_non_null(strstr(s->text[0], path)); /* says which file */
    }
    script_free(s);
}

/* ---- a disk that fails ---- */

static atomic_int n_reads_left; /* until the one that fails; negative: none does */

/* In place of the C library's, in all of this program, whose ranks read at the same time. */
ssize_t pread(int fd, void *to, size_t n_bytes, off_t offset) {
    int n = atomic_load(&n_reads_left);
    while (n > 0 && !atomic_compare_exchange_weak(&n_reads_left, &n, n - 1)) continue;
    if (n == 1) {
        errno = EIO;
        return -1;
    }
    return syscall(SYS_pread64, fd, to, n_bytes, offset);
}

static void load_or_fail(tagc_comm *comm, void *arg) {
    script *s = arg;
    int rank = tagc_comm_rank(comm);
    tagc_fsdp *f = make(s, comm);
    uint64_t step;
    char *extra;
    s->status[rank] = tagc_checkpoint_load(f, comm, s->dir, &step, &extra);
    snprintf(s->text[rank], TAGC_ERROR_TEXT_BYTES, "%s", tagc_last_error());
    free(extra);
    tagc_fsdp_destroy(f);
}

/* Whichever read fails, on whichever rank: all ranks say which file it was, and go on. */
TEST_BETWEEN(make_dir, remove_dir, failing_reads_are_errors) {
    char dir[1024], path[1100];
    snprintf(dir, sizeof dir, "%s/reads", (char *)*state);
    script *s = script_make(dir);
    s->n_steps_after = 0;
    toy_run(2, save_and_go_on, s);
    snprintf(path, sizeof path, "%s/step-00000003", dir);
    s->dir = path;
    int n_failed = 0;
    for (int n = 1, before = 1, next;; n = next) {
        atomic_store(&n_reads_left, n);
        toy_run(2, load_or_fail, s);
        int has_failed = atomic_exchange(&n_reads_left, -1) == 0;
        assert_int_equal(s->status[0], has_failed ? TAGC_ERR_IO : TAGC_OK);
        assert_int_equal(s->status[0], s->status[1]);
        if (!has_failed) break;
        assert_same_failure(s->text[0], s->text[1]);
        assert_non_null(strstr(s->text[0], "/rank-"));
        assert_non_null(strstr(s->text[0], ".bin: Input/output error"));
        n_failed++;
        next = n + before;
        before = n;
    }
    assert_true(n_failed > 5);
    script_free(s);
}

TEST_BETWEEN(make_dir, remove_dir, other_models_are_refused) {
    char dir[1024], path[1100];
    snprintf(dir, sizeof dir, "%s/models", (char *)*state);
    script *a = script_make(dir), *b = script_make(dir), *c = script_make(dir);
    toy_run(2, save_and_go_on, a);
    snprintf(path, sizeof path, "%s/step-00000003", dir);
    b->dir = c->dir = path;
    toy_gpt(&b->model, 2, 6, 0);
    toy_run(2, load_into_used, b);
    assert_int_equal(b->status[0], TAGC_ERR_MISMATCH);
    assert_non_null(strstr(b->text[1], "wte.weight (23 x 7) where this model has wte.weight (23 x 6)"));
    c->options.policy = TAGC_POLICY_NONE; /* would drop the residuals */
    toy_run(2, load_into_used, c);
    assert_int_equal(c->status[0], TAGC_ERR_MISMATCH);
    assert_non_null(strstr(c->text[1], "residual of wte.weight"));
    script_free(a);
    script_free(b);
    script_free(c);
}

/* ---- disk full, finding, pruning ---- */

static int count_entries(const char *dir) {
    int n = -2; /* . and .. */
    DIR *folder = opendir(dir);
    assert_non_null(folder);
    while (readdir(folder) != NULL) n++;
    closedir(folder);
    return n;
}

/* A limit on file sizes stands for a full disk. Replicated, rank 0's file is the large one: it alone fails.
 */
TEST_BETWEEN(make_dir, remove_dir, disk_full_leaves_the_old) {
    char dir[1024];
    snprintf(dir, sizeof dir, "%s/full", (char *)*state);
    script *a = script_make(dir);
    a->options.sharding = TAGC_SHARD_NONE;
    a->options.policy = TAGC_POLICY_NONE;
    a->n_steps_after = 0;
    toy_run(2, save_and_go_on, a);
    assert_int_equal(count_entries(dir), 1);

    struct rlimit old, limit;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    limit = old;
    limit.rlim_cur = 4096;
    script *b = script_make(dir);
    b->options = a->options;
    b->n_steps_before = 4;
    b->expected = TAGC_ERR_IO;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    toy_run(2, save_and_go_on, b);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, handler);
    assert_same_failure(b->text[0], b->text[1]);
    assert_non_null(strstr(b->text[1], "rank 0: cannot write"));
    assert_non_null(strstr(b->text[1], "rank-0.bin: File too large"));
    assert_int_equal(count_entries(dir), 1);

    script *c = script_make(dir);
    c->options = a->options;
    c->n_steps_after = 0;
    toy_run(2, load_and_go_on, c);
    assert_memory_equal(a->values[0], c->values[0], toy_n_params(&a->model) * sizeof(float));
    script_free(a);
    script_free(b);
    script_free(c);
}

static void prune_two(tagc_comm *comm, void *arg) {
    CHECK(tagc_checkpoint_prune(comm, arg, 0) == TAGC_ERR_ARGUMENT);
    CHECK_OK(tagc_checkpoint_prune(comm, arg, 2));
    char path[1200], small[10];
    CHECK_OK(tagc_checkpoint_find(comm, arg, path, sizeof path));
    CHECK(strstr(path, "/step-00000012") != NULL);
    CHECK(tagc_checkpoint_find(comm, arg, small, sizeof small) == TAGC_ERR_ARGUMENT);
    CHECK_OK(tagc_checkpoint_find(comm, path, path, sizeof path)); /* the folder itself */
    CHECK(strstr(path, "/step-00000012") != NULL);
    CHECK(tagc_checkpoint_find(comm, "/nowhere", path, sizeof path) == TAGC_ERR_IO);
}

TEST_BETWEEN(make_dir, remove_dir, the_newest_stay) {
    char dir[1024], path[1100];
    snprintf(dir, sizeof dir, "%s/prune", (char *)*state);
    script *s = script_make(dir);
    static const int steps[] = {9, 12, 1, 10, 9}; /* 9 twice: replaced */
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        s->n_steps_before = steps[i];
        s->n_steps_after = 0;
        toy_run(2, save_and_go_on, s);
    }
    snprintf(path, sizeof path, "%s/.step-00000013.partial", dir);
    assert_int_equal(mkdir(path, 0777), 0);
    assert_int_equal(count_entries(dir), 5);
    toy_run(2, prune_two, dir);
    assert_int_equal(count_entries(dir), 2);
    snprintf(path, sizeof path, "%s/step-00000010", dir);
    uint64_t step;
    int world_size;
    char *extra;
    assert_int_equal(tagc_checkpoint_info(path, &step, &world_size, &extra), TAGC_OK);
    assert_int_equal(step, 10);
    assert_int_equal(world_size, 2);
    assert_string_equal(extra, "{\"position\": 17}");
    free(extra);
    assert_int_equal(tagc_checkpoint_info(dir, &step, &world_size, &extra), TAGC_ERR_IO);
    script_free(s);
}
