/* Checks of options, on one rank and across ranks, from one table per object. */
#include "exchange/options.h"

#include "core/memory.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef enum field_type { FIELD_INT, FIELD_U64, FIELD_DOUBLE } field_type;

typedef struct field {
    const char *name;
    size_t offset;
    field_type type;
    int shared; /* all ranks must have the same value */
    double min, max, initial;
} field;

#define MAX_UNIT_ELEMS (65536.0 * (4294967296.0 - 64.0)) /* at the largest world size */
#define MAX_U64 18446744073709551615.0

#define REDUCER(name) #name, offsetof(tagc_reducer_options, name)
static const field reducer_fields[] = {
    {REDUCER(n_elems), FIELD_U64, 1, 1, MAX_UNIT_ELEMS, 0},
    {REDUCER(tag), FIELD_U64, 0, 0, MAX_U64, MAX_U64},
    {REDUCER(exchange), FIELD_INT, 1, TAGC_EXCHANGE_DENSE, TAGC_EXCHANGE_DIRECT, TAGC_EXCHANGE_DIRECT},
    {REDUCER(index), FIELD_INT, 1, TAGC_INDEX_OR, TAGC_INDEX_SUM1, TAGC_INDEX_OR},
    {REDUCER(sparsity), FIELD_DOUBLE, 1, -1, 1, -1},
    {REDUCER(ratio), FIELD_DOUBLE, 1, 0, 1000, 0},
    {REDUCER(cells), FIELD_INT, 1, TAGC_CELLS_FP32, TAGC_CELLS_FIXED, TAGC_CELLS_FP32},
    {REDUCER(unpeeled), FIELD_INT, 1, TAGC_UNPEELED_PACKED, TAGC_UNPEELED_ESTIMATE, TAGC_UNPEELED_PACKED},
    {REDUCER(fill_union), FIELD_INT, 1, -1, 1, -1},
    {REDUCER(op), FIELD_INT, 1, TAGC_OP_AVG, TAGC_OP_SUM, TAGC_OP_AVG},
    {REDUCER(all_reduce), FIELD_INT, 1, 0, 2, 0},
    {REDUCER(values), FIELD_INT, 1, TAGC_VALUES_FP32, TAGC_VALUES_SIGN, TAGC_VALUES_DEFAULT},
    {REDUCER(block), FIELD_INT, 1, 16, 4096, 128},
    {REDUCER(rotate), FIELD_INT, 1, 0, 1, 0},
    {REDUCER(ranks_per_host), FIELD_INT, 1, 1, 65536, 1},
    {REDUCER(wire), FIELD_INT, 1, TAGC_WIRE_FP32, TAGC_WIRE_BF16, TAGC_WIRE_FP32},
    {REDUCER(n_threads), FIELD_INT, 0, 1, 256, 1},
    {REDUCER(seed), FIELD_U64, 1, 0, MAX_U64, 0},
};
#define GATHERER(name) #name, offsetof(tagc_gatherer_options, name)
static const field gatherer_fields[] = {
    {GATHERER(n_elems), FIELD_U64, 1, 1, MAX_UNIT_ELEMS, 0},
    {GATHERER(tag), FIELD_U64, 0, 0, MAX_U64, MAX_U64},
    {GATHERER(wire), FIELD_INT, 1, TAGC_GATHER_FP32, TAGC_GATHER_DELTA2, TAGC_GATHER_FP32},
    {GATHERER(ranks_per_host), FIELD_INT, 1, 0, 65536, 0},
    {GATHERER(two_level), FIELD_INT, 1, 0, 1, 0},
    {GATHERER(check_every), FIELD_INT, 1, 0, 2147483647.0, 0},
};
enum {
    N_REDUCER_FIELDS = sizeof reducer_fields / sizeof reducer_fields[0],
    N_GATHERER_FIELDS = sizeof gatherer_fields / sizeof gatherer_fields[0]
};

void tagc_reducer_options_init(tagc_reducer_options *options) {
    if (!options) return;
    *options = (tagc_reducer_options){
        .struct_bytes = sizeof *options,
        .tag = UINT64_MAX,
        .exchange = TAGC_EXCHANGE_DIRECT,
        .sparsity = -1,
        .fill_union = -1,
        .values = TAGC_VALUES_DEFAULT,
        .block = 128,
        .ranks_per_host = 1,
        .n_threads = 1,
    };
}

void tagc_reducer_options_resolve(tagc_reducer_options *options) {
    if (options->sparsity == -1)
        options->sparsity = options->exchange == TAGC_EXCHANGE_DIRECT ? 0.95 : 0.9875;
}

void tagc_gatherer_options_init(tagc_gatherer_options *options) {
    if (!options) return;
    *options = (tagc_gatherer_options){.struct_bytes = sizeof *options, .tag = UINT64_MAX};
}

tagc_status tagc_reducer_option_bounds(const char *name, double *min, double *max, double *initial) {
    if (!name) return tagc_fail(TAGC_ERR_ARGUMENT, "field is NULL");
    for (int f = 0; f < N_REDUCER_FIELDS; f++) {
        if (strcmp(reducer_fields[f].name, name) != 0) continue;
        if (min) *min = reducer_fields[f].min;
        if (max) *max = reducer_fields[f].max;
        if (initial) *initial = reducer_fields[f].initial;
        return TAGC_OK;
    }
    return tagc_fail(TAGC_ERR_ARGUMENT, "field is \"%.64s\", not a numeric field of tagc_reducer_options",
                     name);
}

uint64_t tagc_padded_elems(uint64_t n, int world_size) {
    if (world_size < 1) return 0;
    uint64_t n_ranks = (uint64_t)world_size;
    uint64_t shard = n / n_ranks + (n % n_ranks != 0);
    return (shard + 15) / 16 * 16 * n_ranks;
}

/* The value of a field as 8 bytes that compare equal when the values are. */
static uint64_t raw_value(const field *f, const void *options) {
    const char *at = (const char *)options + f->offset;
    int as_int;
    uint64_t raw;
    if (f->type != FIELD_INT) {
        memcpy(&raw, at, sizeof raw);
        return raw;
    }
    memcpy(&as_int, at, sizeof as_int);
    return (uint64_t)(int64_t)as_int;
}

static double as_double(const field *f, uint64_t raw) {
    double value;
    if (f->type == FIELD_INT) return (double)(int64_t)raw;
    if (f->type == FIELD_U64) return (double)raw;
    memcpy(&value, &raw, sizeof value);
    return value;
}

static void print_value(const field *f, uint64_t raw, char *text, size_t n_bytes) {
    if (f->type == FIELD_DOUBLE)
        snprintf(text, n_bytes, "%.10g", as_double(f, raw));
    else if (f->type == FIELD_INT)
        snprintf(text, n_bytes, "%lld", (long long)raw);
    else
        snprintf(text, n_bytes, "%llu", (unsigned long long)raw);
}

static tagc_status check_ranges(const field *fields, int n_fields, const void *options) {
    for (int f = 0; f < n_fields; f++) {
        uint64_t raw = raw_value(&fields[f], options);
        double value = as_double(&fields[f], raw);
        if (value >= fields[f].min && value <= fields[f].max) continue;
        char text[32];
        print_value(&fields[f], raw, text, sizeof text);
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s is %s, must be in [%.10g, %.15g]", fields[f].name, text,
                         fields[f].min, fields[f].max);
    }
    return TAGC_OK;
}

static tagc_status check_struct(size_t struct_bytes, size_t expected, const char *init) {
    if (struct_bytes == expected) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "struct_bytes is %zu, must be %zu: call %s first", struct_bytes,
                     expected, init);
}

static tagc_status check_shape(uint64_t n_elems, int world_size, uint64_t max_shard) {
    uint64_t n_ranks = (uint64_t)world_size;
    if (n_elems % n_ranks != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_elems is %llu, must be a multiple of the world size %d",
                         (unsigned long long)n_elems, world_size);
    unsigned long long max_elems = max_shard * n_ranks;
    if (n_elems / n_ranks > max_shard)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_elems is %llu, must be at most %llu at world size %d",
                         (unsigned long long)n_elems, max_elems, world_size);
    return TAGC_OK;
}

/* What only direct has. */
static tagc_status check_direct(const tagc_reducer_options *options, int world_size) {
    int is_direct = options->exchange == TAGC_EXCHANGE_DIRECT;
    if (options->block & (options->block - 1))
        return tagc_fail(TAGC_ERR_ARGUMENT, "block is %d, must be a power of two in [16, 4096]",
                         options->block);
    if (world_size % options->ranks_per_host != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "ranks_per_host is %d, must divide the world size %d",
                         options->ranks_per_host, world_size);
    if (options->ranks_per_host != 1 && !is_direct)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "ranks_per_host is %d, which only exchange %d (direct) has",
                         options->ranks_per_host, TAGC_EXCHANGE_DIRECT);
    if (options->all_reduce == 2 && !is_direct)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "all_reduce is 2 (host shard), which only exchange %d (direct) has",
                         TAGC_EXCHANGE_DIRECT);
    if (options->rotate && !(is_direct && options->sparsity == 0))
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "rotate is 1, which only exchange %d (direct) has, at sparsity 0: exchange is %d, "
                         "sparsity %.10g",
                         TAGC_EXCHANGE_DIRECT, options->exchange, options->sparsity);
    return TAGC_OK;
}

tagc_status tagc_reducer_options_check(const tagc_reducer_options *options, int world_size,
                                       tagc_reducer_options *out) {
    if (!options) return tagc_fail(TAGC_ERR_ARGUMENT, "options is NULL");
    TAGC_TRY(check_struct(options->struct_bytes, sizeof *options, "tagc_reducer_options_init"));
    if (options->sparsity != -1 && !(options->sparsity >= 0 && options->sparsity <= 1))
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "sparsity is %.10g, must be in [0, 1], or -1 for the exchange's own",
                         options->sparsity);
    TAGC_TRY(check_ranges(reducer_fields, N_REDUCER_FIELDS, options));
    TAGC_TRY(check_shape(options->n_elems, world_size, UINT32_MAX - 63));
    if (options->ratio > 0 && options->ratio < 1)
        return tagc_fail(TAGC_ERR_ARGUMENT, "ratio is %.10g, must be 0 (from the union) or in [1, 1000]",
                         options->ratio);
    *out = *options;
    tagc_reducer_options_resolve(out);
    TAGC_TRY(check_direct(out, world_size));
    int is_dense = options->exchange == TAGC_EXCHANGE_DENSE;
    if (options->wire != TAGC_WIRE_FP32 && !is_dense)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "wire is %d (bf16), which only exchange %d (dense) has",
                         options->wire, TAGC_EXCHANGE_DENSE);
    if (is_dense) {
        out->fill_union = 0;
        return TAGC_OK;
    }
    if (options->index == TAGC_INDEX_SUM4 && world_size > 15)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "index is %d (sum4), which counts to 15 ranks in 4 bits: the world size is %d",
                         options->index, world_size);
    if (options->fill_union == 1 && options->index != TAGC_INDEX_OR)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "fill_union is 1, which needs index %d (or): index is %d",
                         TAGC_INDEX_OR, options->index);
    if (options->fill_union == -1)
        out->fill_union = options->exchange == TAGC_EXCHANGE_PACKED && options->index == TAGC_INDEX_OR;
    return TAGC_OK;
}

tagc_status tagc_gatherer_options_check(const tagc_gatherer_options *options, int world_size,
                                        tagc_gatherer_options *out) {
    if (!options) return tagc_fail(TAGC_ERR_ARGUMENT, "options is NULL");
    TAGC_TRY(check_struct(options->struct_bytes, sizeof *options, "tagc_gatherer_options_init"));
    TAGC_TRY(check_ranges(gatherer_fields, N_GATHERER_FIELDS, options));
    *out = *options;
    if (out->ranks_per_host == 0) out->ranks_per_host = world_size;
    if (world_size % out->ranks_per_host != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "ranks_per_host is %d, must divide the world size %d",
                         options->ranks_per_host, world_size);
    return check_shape(options->n_elems, out->two_level ? world_size : out->ranks_per_host, UINT32_MAX - 63);
}

/* ---- across ranks ---- */

/* What one rank tells the others when it makes an object. */
typedef struct report {
    uint32_t status;
    uint32_t n_fields; /* also tells a reducer from a gatherer */
    uint64_t values[N_REDUCER_FIELDS];
    char text[256];
} report;

static tagc_status compare_reports(const field *fields, int n_fields, const report *reports, int world_size) {
    for (int r = 0; r < world_size; r++) {
        if (reports[r].status == TAGC_OK) continue;
        char text[sizeof reports[r].text];
        memcpy(text, reports[r].text, sizeof text);
        text[sizeof text - 1] = 0;
        tagc_status status =
            reports[r].status <= TAGC_ERR_INTERRUPTED ? (tagc_status)reports[r].status : TAGC_ERR_CORRUPT;
        return tagc_fail(status, "rank %d: %s", r, text);
    }
    for (int r = 1; r < world_size; r++) {
        if (reports[r].n_fields != reports[0].n_fields)
            return tagc_fail(TAGC_ERR_MISMATCH, "rank %d makes a %s where rank 0 makes a %s", r,
                             reports[r].n_fields == N_REDUCER_FIELDS ? "reducer" : "gatherer",
                             reports[0].n_fields == N_REDUCER_FIELDS ? "reducer" : "gatherer");
        for (int f = 0; f < n_fields; f++) {
            if (!fields[f].shared || reports[r].values[f] == reports[0].values[f]) continue;
            char here[32], there[32];
            print_value(&fields[f], reports[r].values[f], here, sizeof here);
            print_value(&fields[f], reports[0].values[f], there, sizeof there);
            return tagc_fail(TAGC_ERR_MISMATCH, "%s: rank %d has %s, rank 0 has %s", fields[f].name, r, here,
                             there);
        }
    }
    return TAGC_OK;
}

static tagc_status agree(tagc_comm *comm, tagc_status local, const field *fields, int n_fields,
                         const void *options) {
    int world_size = tagc_comm_world_size(comm);
    report own = {.status = (uint32_t)local, .n_fields = (uint32_t)n_fields};
    if (local != TAGC_OK)
        snprintf(own.text, sizeof own.text, "%.*s", (int)sizeof own.text - 1, tagc_last_error());
    for (int f = 0; f < n_fields && local == TAGC_OK; f++) own.values[f] = raw_value(&fields[f], options);
    void *reports;
    tagc_status status =
        tagc_memory_create((size_t)world_size * sizeof own, "options of all ranks", &reports);
    if (status != TAGC_OK) { /* not even room to answer: the others must not wait for it */
        tagc_comm_abort(comm, "no memory for the options of all ranks");
        return status;
    }
    status = tagc_comm_all_gather(comm, &own, sizeof own, reports);
    if (status == TAGC_OK) status = compare_reports(fields, n_fields, reports, world_size);
    tagc_memory_destroy(reports);
    return status;
}

tagc_status tagc_reducer_options_agree(tagc_comm *comm, tagc_status local,
                                       const tagc_reducer_options *options) {
    return agree(comm, local, reducer_fields, N_REDUCER_FIELDS, options);
}

tagc_status tagc_gatherer_options_agree(tagc_comm *comm, tagc_status local,
                                        const tagc_gatherer_options *options) {
    return agree(comm, local, gatherer_fields, N_GATHERER_FIELDS, options);
}
