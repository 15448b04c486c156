/* Creates and destroys the engine, and reads and fills its parameters. */
#include "fsdp/internal.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static tagc_status make_order(tagc_fsdp *f) {
    TAGC_TRY(tagc_order_create(&tagc_fsdp_order_calls, f, &f->options, f->tables.n_units, f->tables.n_buffers,
                               f->tables.backward_order, &f->order));
    for (int i = 0; i < f->tables.n_units; i++) tagc_order_set_unit(&f->order, i, &f->tables.units[i]);
    return TAGC_OK;
}

/* A rank that fails in here must still reach the agreement below. */
static tagc_status prepare(tagc_fsdp *f, const tagc_tensor_info *tensors, int n_tensors,
                           const tagc_fsdp_options *options) {
    if (options == NULL) return tagc_fail(TAGC_ERR_ARGUMENT, "options is NULL");
    TAGC_TRY(tagc_fsdp_options_check(options));
    f->options = *options;
    tagc_fsdp_options_resolve(&f->options);
    if (options->names != NULL) {
        f->names = strdup(options->names);
        if (f->names == NULL) return tagc_fail(TAGC_ERR_MEMORY, "no memory for names");
        f->options.names = f->names;
    }
    TAGC_TRY(tagc_fsdp_layout(f, tensors, n_tensors));
    TAGC_TRY(make_order(f));
    return tagc_fsdp_place(f);
}

/* The error names the first option in which this rank differs from rank 0. */
static tagc_status compare_options(int world_size, char (*texts)[TAGC_OPTIONS_TEXT_BYTES]) {
    for (int rank = 1; rank < world_size; rank++) {
        const char *a = texts[0], *b = texts[rank];
        a = memchr(a, 0, TAGC_OPTIONS_TEXT_BYTES) != NULL ? a : "";
        b = memchr(b, 0, TAGC_OPTIONS_TEXT_BYTES) != NULL ? b : "";
        while (*a != 0 && *b != 0) {
            size_t n_a = strcspn(a, " "), n_b = strcspn(b, " ");
            if (n_a != n_b || memcmp(a, b, n_a) != 0)
                return tagc_fail(TAGC_ERR_MISMATCH, "rank 0 was started with %.*s, rank %d with %.*s",
                                 (int)n_a, a, rank, (int)n_b, b);
            a += n_a + (a[n_a] == ' ');
            b += n_b + (b[n_b] == ' ');
        }
    }
    return TAGC_OK;
}

static tagc_status check_agreement(tagc_fsdp *f) {
    int world_size = f->world_size;
    char(*texts)[TAGC_OPTIONS_TEXT_BYTES] = calloc((size_t)world_size + 1, sizeof *texts);
    tagc_status status = TAGC_OK;
    if (texts == NULL)
        status = tagc_fail(TAGC_ERR_MEMORY, "no memory for the options of %d ranks", world_size);
    status = tagc_levels_agree(NULL, f->comm, status);
    if (status == TAGC_OK) {
        char *own = texts[world_size];
        tagc_fsdp_options_text(f, own);
        status = tagc_comm_all_gather(f->comm, own, sizeof *texts, texts, (size_t)world_size * sizeof *texts);
    }
    if (status == TAGC_OK) status = compare_options(world_size, texts);
    free(texts);
    return status;
}

tagc_status tagc_fsdp_create(tagc_comm *comm, const tagc_tensor_info *tensors, int n_tensors,
                             const tagc_fsdp_options *options, tagc_trace *trace, tagc_fsdp **out) {
    *out = NULL;
    tagc_fsdp *f = calloc(1, sizeof *f);
    tagc_status status = TAGC_OK;
    if (f == NULL) {
        status = tagc_fail(TAGC_ERR_MEMORY, "no memory for the engine");
    } else {
        f->comm = comm;
        f->account.trace = trace;
        f->rank = tagc_comm_rank(comm);
        f->world_size = tagc_comm_world_size(comm);
        f->account.span_unit = -1;
        f->loss = NAN;
        status = prepare(f, tensors, n_tensors, options);
    }
    status = tagc_levels_agree(NULL, comm, status);
    if (status == TAGC_OK) status = check_agreement(f);
    if (status == TAGC_OK) status = tagc_fsdp_open_exchange(f);
    if (status != TAGC_OK) {
        tagc_fsdp_destroy(f);
        return status;
    }
    *out = f;
    return TAGC_OK;
}

void tagc_fsdp_destroy(tagc_fsdp *f) {
    if (f == NULL) return;
    /* Exchange objects first: destroying them waits for threads that still use the arrays. */
    tagc_fsdp_close_exchange(f);
    for (int i = 0; i < f->tables.n_flats; i++) tagc_fsdp_drop_moment(f, &f->tables.flats[i]);
    tagc_memory_destroy(f->values_memory);
    tagc_memory_destroy(f->tables_memory);
    tagc_order_destroy(&f->order);
    free(f->names);
    free(f);
}

tagc_status tagc_fsdp_fill(tagc_fsdp *f, tagc_fill_fn fill, void *context) {
    TAGC_TRY(tagc_fsdp_renew(f));
    for (int i = 0; i < f->tables.n_tensors; i++) {
        const tagc_place *p = &f->tables.places[i];
        if (p->n == 0) continue;
        TAGC_TRY(fill(context, i, p->first, p->n, f->tables.flats[p->flat].master + p->at));
    }
    return TAGC_OK;
}

/* The part of [begin, begin + n) of a flat that `rank` owns, relative to begin. */
static uint64_t part_of(const tagc_fsdp *f, const tagc_flat *flat, const tagc_place *p, uint64_t n, int rank,
                        uint64_t *first) {
    uint64_t begin, n_owned;
    tagc_fsdp_owned(f, flat->n_padded, rank, &begin, &n_owned);
    uint64_t end = begin + n_owned;
    begin = begin < p->offset ? p->offset : begin;
    end = end > p->offset + n ? p->offset + n : end;
    *first = begin - p->offset;
    return begin < end ? end - begin : 0;
}

tagc_status tagc_fsdp_read_tensor(tagc_fsdp *f, int tensor, float *values) {
    if (tensor < 0 || tensor >= f->tables.n_tensors)
        return tagc_fail(TAGC_ERR_ARGUMENT, "tensor is %d, allowed is 0 to %d", tensor,
                         f->tables.n_tensors - 1);
    const tagc_place *p = &f->tables.places[tensor];
    const tagc_flat *flat = &f->tables.flats[p->flat];
    uint64_t n = f->tables.tensors[tensor].n_elems, n_part = flat->n_owned;
    if (f->options.sharding == TAGC_SHARD_NONE) {
        memcpy(values, flat->master + p->at, n * sizeof *values);
        return TAGC_OK;
    }
    n_part = n < n_part ? n : n_part;
    float *parts = malloc(((size_t)f->world_size + 1) * n_part * sizeof *parts); /* (W + 1, n_part) */
    tagc_status status = TAGC_OK;
    if (parts == NULL)
        status = tagc_fail(TAGC_ERR_MEMORY, "no memory to read %s", f->tables.tensors[tensor].name);
    status = tagc_levels_agree(NULL, f->comm, status);
    if (status == TAGC_OK) {
        float *own = parts + (uint64_t)f->world_size * n_part;
        memset(own, 0, n_part * sizeof *own);
        if (p->n > 0) memcpy(own, flat->master + p->at, p->n * sizeof *own);
        status = tagc_comm_all_gather(f->comm, own, n_part * sizeof *own, parts,
                                      (size_t)f->world_size * n_part * sizeof *parts);
    }
    for (int rank = 0; status == TAGC_OK && rank < f->n_owners; rank++) {
        uint64_t first, n_owned = part_of(f, flat, p, n, rank, &first);
        if (n_owned > 0) memcpy(values + first, parts + (uint64_t)rank * n_part, n_owned * sizeof *values);
    }
    free(parts);
    return status;
}

uint64_t tagc_fsdp_n_params(const tagc_fsdp *f) {
    uint64_t n = 0;
    for (int i = 0; i < f->tables.n_flats; i++) n += f->tables.flats[i].n_elems;
    return n;
}

static uint64_t n_of_class(const tagc_fsdp *f, tagc_class class_) {
    uint64_t n = 0;
    for (int i = 0; i < f->tables.n_flats; i++)
        n += f->tables.flats[i].class_ == (int)class_ ? f->tables.flats[i].n_elems : 0;
    return n;
}

uint64_t tagc_fsdp_n_compressed(const tagc_fsdp *f) {
    return n_of_class(f, TAGC_CLASS_COMPRESSED);
}

uint64_t tagc_fsdp_n_mild(const tagc_fsdp *f) {
    return n_of_class(f, TAGC_CLASS_MILD);
}

int tagc_fsdp_n_units(const tagc_fsdp *f) {
    return f->tables.n_units;
}

const char *tagc_fsdp_unit_name(const tagc_fsdp *f, int unit) {
    return unit >= 0 && unit < f->tables.n_units ? f->tables.units[unit].name : "?";
}

tagc_status tagc_fsdp_flat_info(const tagc_fsdp *f, int flat, tagc_layout_flat *out) {
    if (flat < 0 || flat >= f->tables.n_flats)
        return tagc_fail(TAGC_ERR_ARGUMENT, "flat is %d, allowed is 0 to %d", flat, f->tables.n_flats - 1);
    const tagc_flat *from = &f->tables.flats[flat];
    *out = (tagc_layout_flat){
        .unit = from->unit, .class_ = from->class_, .n_elems = from->n_elems, .n_padded = from->n_padded};
    tagc_fsdp_describe_exchange(f, from, out);
    return TAGC_OK;
}
