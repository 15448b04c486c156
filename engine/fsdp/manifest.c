/* Checkpoint bytes. Every number read from a file is checked against what files can hold before it is used. */
#include "core/status.h"
#include "core/xxh3.h"
#include "fsdp/checkpoint_format.h"
#include "fsdp/internal.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ELEMS ((uint64_t)1 << 44) /* of a flat: far above any model, far below overflow */
#define MAX_ENTRIES 1000000
#define MAX_RANKS 65536
#define MAX_FILE_BYTES (INT64_MAX / 2)
#define FORMAT "tagc checkpoint"

tagc_status tagc_manifest_create(int world_size, int n_tensors, int n_flats, tagc_manifest **out) {
    *out = NULL;
    tagc_manifest *m = calloc(1, sizeof *m);
    if (m == NULL) return tagc_fail(TAGC_ERR_MEMORY, "no memory for a manifest");
    m->world_size = m->n_owners = world_size;
    m->n_tensors = n_tensors;
    m->n_flats = n_flats;
    m->tensors = calloc((size_t)n_tensors, sizeof *m->tensors);
    m->flats = calloc((size_t)n_flats, sizeof *m->flats);
    m->files = calloc((size_t)world_size, sizeof *m->files);
    if (m->tensors == NULL || m->flats == NULL || m->files == NULL) {
        tagc_manifest_destroy(m);
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for a manifest of %d tensors", n_tensors);
    }
    *out = m;
    return TAGC_OK;
}

void tagc_manifest_destroy(tagc_manifest *m) {
    if (m == NULL) return;
    free(m->tensors);
    free(m->flats);
    free(m->files);
    free(m->extra);
    free(m);
}

/* ---- to text ---- */

static json_t *content_of(const tagc_manifest *m) {
    json_t *tensors = json_array(), *flats = json_array(), *files = json_array();
    for (int i = 0; i < m->n_tensors; i++) {
        const tagc_manifest_tensor *t = &m->tensors[i];
        json_array_append_new(tensors, json_pack("{s:s, s:I, s:I, s:i, s:I}", "name", t->name, "n_rows",
                                                 (json_int_t)t->n_rows, "n_cols", (json_int_t)t->n_cols,
                                                 "flat", t->flat, "offset", (json_int_t)t->offset));
    }
    for (int i = 0; i < m->n_flats; i++) {
        const tagc_manifest_flat *f = &m->flats[i];
        json_t *flat =
            json_pack("{s:I, s:I}", "n_elems", (json_int_t)f->n_elems, "n_padded", (json_int_t)f->n_padded);
        json_object_set_new(flat, "moment1", json_boolean(f->has_moment1));
        json_object_set_new(flat, "residual", json_boolean(f->has_residual));
        if (f->n_gathers) json_object_set_new(flat, "gathers", json_integer((json_int_t)f->n_gathers));
        json_array_append_new(flats, flat);
    }
    for (int i = 0; i < m->world_size; i++) {
        char checksum[20];
        snprintf(checksum, sizeof checksum, "%016llx", (unsigned long long)m->files[i].checksum);
        json_array_append_new(files, json_pack("{s:I, s:I, s:s, s:{s:I, s:I}}", "n_bytes",
                                               (json_int_t)m->files[i].n_bytes, "n_model",
                                               (json_int_t)m->files[i].n_model, "xxh3_64", checksum,
                                               "gathered", "sent", (json_int_t)m->files[i].gather_sent,
                                               "received", (json_int_t)m->files[i].gather_received));
    }
    json_t *content = json_pack(
        "{s:s, s:i, s:I, s:I, s:i, s:b, s:b, s:i, s:o, s:o, s:o, s:s}", "format", FORMAT, "version",
        TAGC_CHECKPOINT_VERSION, "step", (json_int_t)m->step, "n_updates", (json_int_t)m->n_updates,
        "world_size", m->world_size, "sharded", m->sharded, "gentle", m->is_followed, "owners", m->n_owners,
        "tensors", tensors, "flats", flats, "files", files, "extra", m->extra != NULL ? m->extra : "");
    return content;
}

static int hash_content(const json_t *content, char hex[20]) {
    char *text = json_dumps(content, JSON_COMPACT | JSON_SORT_KEYS);
    if (text == NULL) return 0;
    snprintf(hex, 20, "%016llx", (unsigned long long)tagc_xxh3(text, strlen(text), 0));
    free(text);
    return 1;
}

tagc_status tagc_manifest_print(const tagc_manifest *m, char **text) {
    *text = NULL;
    char hex[20];
    json_t *content = content_of(m), *root = NULL;
    if (content != NULL && hash_content(content, hex))
        root = json_pack("{s:s, s:O}", "checksum", hex, "content", content);
    if (root != NULL) *text = json_dumps(root, JSON_INDENT(1));
    json_decref(root);
    json_decref(content);
    if (*text == NULL)
        return tagc_fail(TAGC_ERR_ARGUMENT, "the manifest cannot be written: names or extra are not UTF-8");
    return TAGC_OK;
}

/* ---- from text ---- */

static tagc_status corrupt(const char *what) {
    return tagc_fail(TAGC_ERR_CORRUPT, "manifest: %s", what);
}

/* Reads a whole number in [0, max]; anything else is corrupt. */
static tagc_status get_number(const json_t *object, const char *key, uint64_t max, uint64_t *out) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_integer(value) || json_integer_value(value) < 0 || (uint64_t)json_integer_value(value) > max)
        return tagc_fail(TAGC_ERR_CORRUPT, "manifest: %s is missing or out of range", key);
    *out = (uint64_t)json_integer_value(value);
    return TAGC_OK;
}

static tagc_status parse_flat(const json_t *json, const tagc_manifest *m, tagc_manifest_flat *f) {
    TAGC_TRY(get_number(json, "n_elems", MAX_ELEMS, &f->n_elems));
    TAGC_TRY(get_number(json, "n_padded", MAX_ELEMS, &f->n_padded));
    const json_t *moment1 = json_object_get(json, "moment1");
    if (!json_is_boolean(moment1)) return corrupt("a flat's moment1 is neither true nor false");
    f->has_moment1 = json_is_true(moment1);
    const json_t *residual = json_object_get(json, "residual");
    if (!json_is_boolean(residual)) return corrupt("a flat's residual is neither true nor false");
    f->has_residual = json_is_true(residual);
    if (json_object_get(json, "gathers")) TAGC_TRY(get_number(json, "gathers", INT64_MAX, &f->n_gathers));
    if (f->n_elems == 0 || f->n_padded < f->n_elems || f->n_padded % (uint64_t)m->world_size != 0)
        return corrupt("the sizes of a flat contradict each other");
    return TAGC_OK;
}

static tagc_status parse_tensor(const json_t *json, const tagc_manifest *m, tagc_manifest_tensor *t) {
    const char *name = json_string_value(json_object_get(json, "name"));
    if (name == NULL || name[0] == 0 || strlen(name) >= sizeof t->name)
        return corrupt("a tensor's name is not one");
    memcpy(t->name, name, strlen(name) + 1);
    uint64_t flat = 0;
    TAGC_TRY(get_number(json, "n_rows", MAX_ELEMS, &t->n_rows));
    TAGC_TRY(get_number(json, "n_cols", MAX_ELEMS, &t->n_cols));
    TAGC_TRY(get_number(json, "flat", (uint64_t)m->n_flats - 1, &flat));
    TAGC_TRY(get_number(json, "offset", MAX_ELEMS, &t->offset));
    t->flat = (int)flat;
    if (__builtin_mul_overflow(t->n_rows, t->n_cols, &t->n_elems) || t->n_elems == 0 ||
        t->n_elems > MAX_ELEMS || t->offset + t->n_elems > m->flats[flat].n_elems)
        return corrupt("a tensor lies outside of its flat");
    return TAGC_OK;
}

static int get_hash(const json_t *object, const char *key, uint64_t *out) {
    const char *hex = json_string_value(json_object_get(object, key));
    if (hex == NULL || strlen(hex) != 16 || strspn(hex, "0123456789abcdef") != 16) return 0;
    *out = strtoull(hex, NULL, 16);
    return 1;
}

static tagc_status parse_file(const json_t *json, tagc_manifest_file *f) {
    const json_t *gathered = json_object_get(json, "gathered");
    TAGC_TRY(get_number(gathered, "sent", INT64_MAX, &f->gather_sent));
    TAGC_TRY(get_number(gathered, "received", INT64_MAX, &f->gather_received));
    TAGC_TRY(get_number(json, "n_bytes", INT64_MAX, &f->n_bytes));
    TAGC_TRY(get_number(json, "n_model", MAX_FILE_BYTES, &f->n_model));
    return get_hash(json, "xxh3_64", &f->checksum) ? TAGC_OK : corrupt("a file's checksum is not one");
}

static tagc_status parse_tables(const json_t *content, tagc_manifest *m) {
    const json_t *tensors = json_object_get(content, "tensors"), *flats = json_object_get(content, "flats");
    const json_t *files = json_object_get(content, "files");
    for (int i = 0; i < m->n_flats; i++)
        TAGC_TRY(parse_flat(json_array_get(flats, (size_t)i), m, &m->flats[i]));
    for (int i = 0; i < m->n_tensors; i++)
        TAGC_TRY(parse_tensor(json_array_get(tensors, (size_t)i), m, &m->tensors[i]));
    uint64_t n_bytes = TAGC_RANK_HEADER_BYTES; /* largest possible file: no offset below can overflow */
    for (int i = 0; i < m->n_flats; i++)
        if (__builtin_add_overflow(n_bytes, m->flats[i].n_padded * 20, &n_bytes) || n_bytes > MAX_FILE_BYTES)
            return corrupt("the flats are larger than any file");
    for (int i = 0; i < m->world_size; i++) {
        TAGC_TRY(parse_file(json_array_get(files, (size_t)i), &m->files[i]));
        if (m->files[i].n_bytes != tagc_rank_file_bytes(m, i))
            return corrupt("the size of a file contradicts what it holds");
    }
    return TAGC_OK;
}

static tagc_status parse_content(const json_t *content, tagc_manifest **out) {
    uint64_t version = 0, world_size = 0, n_owners = 0, step = 0, n_updates = 0;
    const char *format = json_string_value(json_object_get(content, "format"));
    if (format == NULL || strcmp(format, FORMAT) != 0) return corrupt("its format is not \"" FORMAT "\"");
    TAGC_TRY(get_number(content, "version", UINT32_MAX, &version));
    if (version != TAGC_CHECKPOINT_VERSION)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "checkpoint of version %llu, this program reads version %d",
                         (unsigned long long)version, TAGC_CHECKPOINT_VERSION);
    TAGC_TRY(get_number(content, "world_size", MAX_RANKS, &world_size));
    TAGC_TRY(get_number(content, "owners", MAX_RANKS, &n_owners));
    TAGC_TRY(get_number(content, "step", INT64_MAX, &step));
    TAGC_TRY(get_number(content, "n_updates", INT64_MAX, &n_updates));
    size_t n_tensors = json_array_size(json_object_get(content, "tensors"));
    size_t n_flats = json_array_size(json_object_get(content, "flats"));
    const json_t *sharded = json_object_get(content, "sharded"), *extra = json_object_get(content, "extra");
    const json_t *gentle = json_object_get(content, "gentle");
    if (world_size == 0 || n_owners == 0 || world_size % n_owners != 0 || n_tensors == 0 ||
        n_tensors > MAX_ENTRIES || n_flats == 0 || n_flats > n_tensors ||
        json_array_size(json_object_get(content, "files")) != world_size || !json_is_boolean(sharded) ||
        !json_is_boolean(gentle) || !json_is_string(extra))
        return corrupt("its tables are missing or of the wrong size");
    tagc_manifest *m;
    TAGC_TRY(tagc_manifest_create((int)world_size, (int)n_tensors, (int)n_flats, &m));
    m->step = step;
    m->n_updates = n_updates;
    m->n_owners = (int)n_owners;
    m->sharded = json_is_true(sharded);
    m->is_followed = json_is_true(gentle);
    m->extra = strdup(json_string_value(extra));
    tagc_status status = m->extra != NULL ? TAGC_OK : tagc_fail(TAGC_ERR_MEMORY, "no memory for extra");
    if (status == TAGC_OK) status = parse_tables(content, m);
    if (status != TAGC_OK) {
        tagc_manifest_destroy(m);
        return status;
    }
    *out = m;
    return TAGC_OK;
}

tagc_status tagc_manifest_parse(const char *text, size_t n_bytes, int verify, tagc_manifest **out) {
    *out = NULL;
    json_error_t error;
    json_t *root = json_loadb(text, n_bytes, JSON_REJECT_DUPLICATES, &error);
    if (root == NULL) return tagc_fail(TAGC_ERR_CORRUPT, "manifest: line %d: %s", error.line, error.text);
    const json_t *content = json_object_get(root, "content");
    const char *checksum = json_string_value(json_object_get(root, "checksum"));
    char hex[20];
    tagc_status status;
    if (!json_is_object(content))
        status = corrupt("it has no content");
    else if (verify && (checksum == NULL || !hash_content(content, hex) || strcmp(checksum, hex) != 0))
        status = corrupt("it does not match its checksum");
    else
        status = parse_content(content, out);
    json_decref(root);
    return status;
}

/* ---- rank files ---- */

void tagc_manifest_owned(const tagc_manifest *m, int flat, int rank, uint64_t *first, uint64_t *n_owned) {
    uint64_t n_padded = m->flats[flat].n_padded, shard = n_padded / (uint64_t)m->world_size;
    *first = m->sharded ? tagc_fsdp_own_part(n_padded, m->world_size, m->n_owners, rank) : 0;
    *n_owned = m->sharded ? shard : rank == 0 ? n_padded : 0;
}

/* The offset of a section in its flat, or of the end of the flat, in values of 4 bytes. */
static uint64_t before_section(const tagc_manifest_flat *f, uint64_t n_owned, int section) {
    const uint64_t n_of[TAGC_N_SECTIONS] = {[TAGC_SECTION_MASTER] = n_owned,
                                            [TAGC_SECTION_MOMENT1] = f->has_moment1 ? n_owned : 0,
                                            [TAGC_SECTION_MOMENT2] = n_owned,
                                            [TAGC_SECTION_REPLICA] =
                                                f->n_gathers > 0 ? (n_owned + 1) / 2 : 0};
    uint64_t n = 0;
    for (int i = 0; i < section; i++) n += n_of[i];
    return n;
}

uint64_t tagc_rank_file_offset(const tagc_manifest *m, int rank, int flat, tagc_section section) {
    uint64_t n_elems = 0, first, n_owned;
    for (int i = 0; i < flat; i++) {
        tagc_manifest_owned(m, i, rank, &first, &n_owned);
        n_elems += before_section(&m->flats[i], n_owned, TAGC_N_SECTIONS);
    }
    if (flat < m->n_flats) {
        tagc_manifest_owned(m, flat, rank, &first, &n_owned);
        n_elems += before_section(&m->flats[flat], n_owned, (int)section);
    } else {
        n_elems += n_elems % 2;
    }
    return TAGC_RANK_HEADER_BYTES + n_elems * sizeof(float);
}

uint64_t tagc_rank_file_bytes(const tagc_manifest *m, int rank) {
    return tagc_rank_file_offset(m, rank, m->n_flats, TAGC_SECTION_MASTER) + m->files[rank].n_model;
}

/* A hash that ties a rank's file to the tables of its layout. */
static uint64_t layout_hash(const tagc_manifest *m) {
    uint64_t sharding[] = {(uint64_t)m->sharded, (uint64_t)m->n_owners};
    uint64_t hash = tagc_xxh3(sharding, sizeof sharding, 0);
    for (int i = 0; i < m->n_flats; i++) {
        const tagc_manifest_flat *f = &m->flats[i];
        uint64_t numbers[] = {f->n_elems, f->n_padded, f->n_gathers > 0,
                              (uint64_t)(f->has_moment1 | f->has_residual << 1)};
        hash = tagc_xxh3(numbers, sizeof numbers, hash);
    }
    for (int i = 0; i < m->n_tensors; i++) {
        const tagc_manifest_tensor *t = &m->tensors[i];
        uint64_t numbers[] = {tagc_xxh3(t->name, strlen(t->name), 0), t->n_rows, t->n_cols, (uint64_t)t->flat,
                              t->offset};
        hash = tagc_xxh3(numbers, sizeof numbers, hash);
    }
    return hash;
}

static void put(unsigned char *at, uint64_t value, int n_bytes) {
    for (int i = 0; i < n_bytes; i++) at[i] = (unsigned char)(value >> 8 * i);
}

void tagc_rank_file_header(const tagc_manifest *m, int rank, unsigned char header[TAGC_RANK_HEADER_BYTES]) {
    memset(header, 0, TAGC_RANK_HEADER_BYTES);
    memcpy(header, "TAGCCKPT", 8);
    put(header + 8, TAGC_CHECKPOINT_VERSION, 4);
    put(header + 12, (uint64_t)m->world_size, 4);
    put(header + 16, (uint64_t)rank, 4);
    put(header + 20, (uint64_t)m->n_flats, 4);
    put(header + 24, m->step, 8);
    put(header + 32, layout_hash(m), 8);
    put(header + 40, tagc_rank_file_bytes(m, rank), 8);
}

tagc_status tagc_rank_file_check(const tagc_manifest *m, int rank,
                                 const unsigned char found[TAGC_RANK_HEADER_BYTES], size_t n_bytes,
                                 const uint64_t *checksum) {
    if (n_bytes != m->files[rank].n_bytes)
        return tagc_fail(TAGC_ERR_CORRUPT, "it has %zu bytes, its manifest says %llu", n_bytes,
                         (unsigned long long)m->files[rank].n_bytes);
    unsigned char header[TAGC_RANK_HEADER_BYTES];
    tagc_rank_file_header(m, rank, header);
    if (memcmp(found, header, sizeof header) != 0)
        return tagc_fail(TAGC_ERR_CORRUPT, "its header is not that of rank %d in step %llu of this manifest",
                         rank, (unsigned long long)m->step);
    if (checksum != NULL && *checksum != m->files[rank].checksum)
        return tagc_fail(TAGC_ERR_CORRUPT, "it does not match its checksum");
    return TAGC_OK;
}
