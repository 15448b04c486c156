/* A toy model for the engine's tests: every element of every tensor is pulled towards a target that depends
 * on the sample, so gradients need the true parameters, and a plain loop in double is an oracle for any
 * number of ranks.
 *
 *   loss = mean over samples of sum over elements of 0.5 * stiffness * (p - target(element, sample))^2 */
#ifndef TAGC_TEST_TOY_H
#define TAGC_TEST_TOY_H

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../check.h"
#include "../residual.h"
#include "../test.h"
#include "core/status.h"
#include "fsdp/fsdp.h"

#define TOY_MAX_TENSORS 40
#define TOY_MAX_RANKS 16

/* ---- ranks as threads ---- */

typedef struct toy_ranks {
    void (*run)(tagc_comm *comm, void *arg);
    void *arg;
    tagc_local_group *group;
} toy_ranks;

typedef struct toy_rank {
    toy_ranks *ranks;
    tagc_trace *trace;
    int rank;
} toy_rank;

static inline void *toy_thread(void *arg) {
    toy_rank *r = arg;
    tagc_comm_options options;
    tagc_comm_options_init(&options);
    options.timeout_s = 60;
    if (r->trace != NULL) {
        options.trace = tagc_trace_add;
        options.trace_context = r->trace;
    }
    tagc_comm *comm;
    CHECK_OK(tagc_comm_create_local(r->ranks->group, r->rank, &options, &comm));
    r->ranks->run(comm, r->ranks->arg);
    tagc_comm_destroy(comm);
    return NULL;
}

/* traces: (world_size) or NULL. */
static inline void toy_run_traced(int world_size, void (*run)(tagc_comm *, void *), void *arg,
                                  tagc_trace **traces) {
    toy_ranks ranks = {.run = run, .arg = arg};
    toy_rank each[TOY_MAX_RANKS];
    pthread_t threads[TOY_MAX_RANKS];
    CHECK_OK(tagc_local_group_create(world_size, &ranks.group));
    for (int i = 0; i < world_size; i++) {
        each[i] = (toy_rank){&ranks, traces != NULL ? traces[i] : NULL, i};
        CHECK(pthread_create(&threads[i], NULL, toy_thread, &each[i]) == 0);
    }
    for (int i = 0; i < world_size; i++) pthread_join(threads[i], NULL);
    tagc_local_group_destroy(ranks.group);
}

static inline void toy_run(int world_size, void (*run)(tagc_comm *, void *), void *arg) {
    toy_run_traced(world_size, run, arg, NULL);
}

/* ---- the model ---- */

typedef struct toy_model {
    int n_tensors, n_layers;
    tagc_tensor_info tensors[TOY_MAX_TENSORS];
    int n_samples;  /* of the global batch of one optimizer step */
    int compute_us; /* that every use of a tensor takes at least, so that there is something to overlap with */
    int no_loss;    /* nobody looks at it, and it takes as long as the gradients */
    int poison;     /* 1 + the tensor whose gradient becomes NaN; 0 for none */
    int n_unused_rows; /* of the embedding, its last: as of tokens that no text has, which the head pushes down */
} toy_model;

static inline uint32_t toy_hash(uint64_t x) {
    x *= 0x9e3779b97f4a7c15u;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return (uint32_t)(x >> 32);
}

static inline float toy_number(uint64_t key) { /* [-1, 1), exact in fp32 */
    return (float)((int32_t)toy_hash(key) >> 8) * (1.0f / 8388608.0f);
}

/* The targets, by sample and element, of tensors that are small: a run asks for each again and again. */
enum { TOY_N_TARGETS = 256, TOY_MAX_TABLE = 1 << 13 };
typedef struct toy_table {
    size_t n;       /* elements */
    float *targets; /* (TOY_N_TARGETS, n) */
} toy_table;
static toy_table toy_tables[TOY_MAX_TENSORS];

static inline float toy_make_target(int tensor, size_t i, uint64_t sample) {
    return toy_number(((uint64_t)tensor + 77) << 40 | i << 8 | sample % TOY_N_TARGETS);
}

static inline void toy_add_table(int tensor, size_t n) {
    toy_table *table = &toy_tables[tensor];
    if (n <= table->n || n > TOY_MAX_TABLE) return;
    table->n = n;
    table->targets = realloc(table->targets, TOY_N_TARGETS * n * sizeof *table->targets);
    for (uint64_t sample = 0; sample < TOY_N_TARGETS; sample++)
        for (size_t i = 0; i < n; i++) table->targets[sample * n + i] = toy_make_target(tensor, i, sample);
}

static inline void toy_add(toy_model *m, const char *name, size_t n_rows, size_t n_cols,
                           tagc_tensor_kind kind, int layer) {
    tagc_tensor_info *t = &m->tensors[m->n_tensors++];
    memset(t, 0, sizeof *t);
    snprintf(t->name, sizeof t->name, "%s", name);
    t->n_rows = n_rows;
    t->n_cols = n_cols;
    t->n_elems = n_rows * n_cols;
    t->kind = kind;
    t->layer = t->last_layer = layer;
    t->decay = n_cols > 1;
    toy_add_table(m->n_tensors - 1, t->n_elems);
}

/* GPT-2's table in small, with sizes that no world divides. */
static inline void toy_gpt(toy_model *m, int n_layer, size_t width, int tied) {
    memset(m, 0, sizeof *m);
    m->n_samples = 24;
    m->n_layers = n_layer + 2;
    toy_add(m, "wte.weight", 23, width, TAGC_TENSOR_EMBEDDING, 0);
    if (tied) m->tensors[0].last_layer = n_layer + 1;
    toy_add(m, "wpe.weight", 7, width, TAGC_TENSOR_POSITION, 0);
    for (int i = 0; i < n_layer; i++) {
        char name[40];
        snprintf(name, sizeof name, "h.%d.ln_1.weight", i);
        toy_add(m, name, width, 1, TAGC_TENSOR_NORM, i + 1);
        snprintf(name, sizeof name, "h.%d.attn.c_attn.weight", i);
        toy_add(m, name, width, 3 * width, TAGC_TENSOR_ATTENTION, i + 1);
        snprintf(name, sizeof name, "h.%d.attn.c_proj.weight", i);
        toy_add(m, name, width, width, TAGC_TENSOR_ATTENTION_PROJECTION, i + 1);
        snprintf(name, sizeof name, "h.%d.mlp.c_fc.weight", i);
        toy_add(m, name, width, 4 * width, TAGC_TENSOR_MLP, i + 1);
        snprintf(name, sizeof name, "h.%d.mlp.c_fc.bias", i);
        toy_add(m, name, 4 * width, 1, TAGC_TENSOR_BIAS, i + 1);
    }
    toy_add(m, "ln_f.weight", width, 1, TAGC_TENSOR_NORM, n_layer + 1);
    if (!tied) toy_add(m, "lm_head.weight", 23, width, TAGC_TENSOR_HEAD, n_layer + 1);
}

static inline float toy_initial(int tensor, size_t i) {
    return toy_number((uint64_t)tensor << 40 | i);
}
static inline float toy_target(int tensor, size_t i, uint64_t sample) {
    const toy_table *table = &toy_tables[tensor];
    return i < table->n ? table->targets[sample % TOY_N_TARGETS * table->n + i]
                        : toy_make_target(tensor, i, sample);
}
static inline float toy_stiffness(int tensor) {
    return 0.5f + 0.25f * (float)(tensor % 5);
}

/* Unused elements, the last ones, are pulled the same way for ever, and ever more faintly. */
static inline size_t toy_n_used(const toy_model *m, int tensor) {
    const tagc_tensor_info *t = &m->tensors[tensor];
    return tensor == 0 ? t->n_elems - (size_t)m->n_unused_rows * t->n_cols : t->n_elems;
}
static inline double toy_unused_cost(double p) {
    return 0.05 * exp(2 * p);
}

static inline tagc_status toy_fill(void *context, int tensor, size_t first, size_t n, float *values) {
    (void)context;
    for (size_t i = 0; i < n; i++) values[i] = toy_initial(tensor, first + i);
    return TAGC_OK;
}

static inline int toy_uses(const toy_model *m, int tensor, int layer) {
    return m->tensors[tensor].layer == layer || m->tensors[tensor].last_layer == layer;
}

/* Runs the samples [first, first + n) on one rank, and returns their loss. A shared tensor pulls half in each of its two
 * layers. */
static inline double toy_forward(const toy_model *m, tagc_fsdp *f, int training, uint64_t first, int n) {
    double loss = 0;
    CHECK_OK(tagc_fsdp_forward_begin(f, training));
    for (int layer = 0; layer < m->n_layers; layer++)
        for (int pass = 0; pass < 2; pass++) /* the shared tensor comes last in its last layer */
            for (int t = 0; t < m->n_tensors; t++) {
                const tagc_tensor_info *info = &m->tensors[t];
                int late = info->last_layer != info->layer && info->last_layer == layer;
                if (!toy_uses(m, t, layer) || late != pass) continue;
                const float *p;
                CHECK_OK(tagc_fsdp_use(f, t, &p));
                if (m->compute_us) usleep((useconds_t)m->compute_us);
                double share = info->last_layer != info->layer ? 0.5 : 1.0, sum = 0;
                size_t n_used = toy_n_used(m, t);
                for (size_t i = 0; i < n_used && !m->no_loss; i++)
                    for (int s = 0; s < n; s++) {
                        double d = (double)p[i] - (double)toy_target(t, i, first + (uint64_t)s);
                        sum += 0.5 * d * d;
                    }
                for (size_t i = n_used; i < info->n_elems; i++) sum += n * toy_unused_cost((double)p[i]);
                loss += sum * share * (double)toy_stiffness(t) / n;
                tagc_fsdp_done(f, t);
            }
    return loss;
}

static inline void toy_pull(const toy_model *m, tagc_fsdp *f, int t, uint64_t first, int n) {
    const tagc_tensor_info *info = &m->tensors[t];
    const float *p;
    float *g;
    CHECK_OK(tagc_fsdp_use(f, t, &p));
    CHECK_OK(tagc_fsdp_grad(f, t, &g));
    if (m->compute_us) usleep((useconds_t)m->compute_us);
    float share = info->last_layer != info->layer ? 0.5f : 1.0f;
    size_t n_used = toy_n_used(m, t);
    for (size_t i = 0; i < n_used; i++) {
        float sum = 0;
        for (int s = 0; s < n; s++) sum += p[i] - toy_target(t, i, first + (uint64_t)s);
        g[i] += share * toy_stiffness(t) * sum / (float)n;
    }
    for (size_t i = n_used; i < info->n_elems; i++) g[i] += share * toy_stiffness(t) * 0.1f * expf(2 * p[i]);
    if (m->poison == t + 1) g[info->n_elems - 1] = NAN;
    tagc_fsdp_done(f, t);
}

static inline void toy_backward(const toy_model *m, tagc_fsdp *f, uint64_t first, int n) {
    CHECK_OK(tagc_fsdp_backward_begin(f));
    for (int layer = m->n_layers - 1; layer >= 0; layer--)
        for (int pass = 1; pass >= 0; pass--)
            for (int t = m->n_tensors - 1; t >= 0; t--) {
                const tagc_tensor_info *info = &m->tensors[t];
                int late = info->last_layer != info->layer && info->last_layer == layer;
                if (!toy_uses(m, t, layer) || late != pass) continue;
                toy_pull(m, f, t, first, n);
                if (layer == info->layer) CHECK_OK(tagc_fsdp_grad_done(f, t));
            }
}

/* Takes one optimizer step over the global batch: micro-step by micro-step, rank by rank. */
static inline double toy_step(const toy_model *m, tagc_comm *comm, tagc_fsdp *f, int n_micro, uint64_t step,
                              double lr, tagc_fsdp_stats *stats) {
    int world_size = tagc_comm_world_size(comm), n = m->n_samples / (world_size * n_micro);
    double loss = 0;
    for (int micro = 0; micro < n_micro; micro++) {
        uint64_t first =
            step * (uint64_t)m->n_samples + (uint64_t)((micro * world_size + tagc_comm_rank(comm)) * n);
        loss += toy_forward(m, f, 1, first, n) / n_micro;
        toy_backward(m, f, first, n);
    }
    CHECK_OK(tagc_fsdp_step(f, lr, stats));
    return loss;
}

/* ---- the oracle: AdamW in double over the whole batch ---- */

typedef struct toy_oracle {
    size_t n;
    double *p, *m, *v, *g, norm;
    int n_updates;
} toy_oracle;

static inline void toy_oracle_init(toy_oracle *o, const toy_model *m) {
    o->n = 0;
    o->n_updates = 0;
    for (int t = 0; t < m->n_tensors; t++) o->n += m->tensors[t].n_elems;
    o->p = calloc(4 * o->n, sizeof *o->p);
    o->m = o->p + o->n;
    o->v = o->m + o->n;
    o->g = o->v + o->n;
    size_t at = 0;
    for (int t = 0; t < m->n_tensors; t++)
        for (size_t i = 0; i < m->tensors[t].n_elems; i++) o->p[at++] = (double)toy_initial(t, i);
}

static inline void toy_oracle_free(toy_oracle *o) {
    free(o->p);
}

static inline void toy_oracle_step(toy_oracle *o, const toy_model *m, const tagc_fsdp_options *options,
                                   uint64_t step, double lr) {
    size_t at = 0;
    double squares = 0;
    for (int t = 0; t < m->n_tensors; t++)
        for (size_t i = 0; i < m->tensors[t].n_elems; i++, at++) {
            double sum = 0;
            for (int s = 0; s < m->n_samples; s++)
                sum += o->p[at] - (double)toy_target(t, i, step * (uint64_t)m->n_samples + (uint64_t)s);
            o->g[at] = (double)toy_stiffness(t) * sum / m->n_samples;
            squares += o->g[at] * o->g[at];
        }
    o->norm = sqrt(squares);
    double clip = options->clip_norm > 0 ? fmin(1.0, options->clip_norm / (o->norm + 1e-6)) : 1.0;
    o->n_updates++;
    at = 0;
    for (int t = 0; t < m->n_tensors; t++) {
        tagc_class class_ = tagc_fsdp_class(options, &m->tensors[t]);
        int is_own = options->beta1_compressed >= 0 && class_ == TAGC_CLASS_COMPRESSED;
        double beta1 = is_own ? options->beta1_compressed : options->beta1,
               correction1 = 1 - pow(beta1, o->n_updates), beta2 = options->beta2;
        int is_mild = class_ == TAGC_CLASS_MILD && options->mild.sparsity > 0;
        if (options->beta2_compressed >= 0 && (is_mild || class_ == TAGC_CLASS_COMPRESSED)) {
            beta2 = options->beta2_compressed;
            if (beta2 > options->beta2 && 3 / (1 - beta2) > o->n_updates) /* not reached yet */
                beta2 = fmax(options->beta2, (o->n_updates - 3.0) / o->n_updates);
        }
        double correction2 = 1 - pow(beta2, o->n_updates);
        for (size_t i = 0; i < m->tensors[t].n_elems; i++, at++) {
            double g = o->g[at] * clip;
            if (m->tensors[t].decay) o->p[at] *= 1 - lr * options->weight_decay;
            o->m[at] = beta1 * o->m[at] + (1 - beta1) * g;
            o->v[at] = beta2 * o->v[at] + (1 - beta2) * g * g;
            o->p[at] -= lr * (o->m[at] / correction1) / (sqrt(o->v[at] / correction2) + options->epsilon);
        }
    }
}

/* Writes all tensors end to end to values (oracle n). Collective. */
static inline void toy_read(const toy_model *m, tagc_fsdp *f, float *values) {
    for (int t = 0; t < m->n_tensors; t++) {
        CHECK_OK(tagc_fsdp_read_tensor(f, t, values));
        values += m->tensors[t].n_elems;
    }
}

static inline size_t toy_n_params(const toy_model *m) {
    size_t n = 0;
    for (int t = 0; t < m->n_tensors; t++) n += m->tensors[t].n_elems;
    return n;
}

#endif
