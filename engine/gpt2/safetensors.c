/* The reader. It does not trust the file: it checks every number of the header against the file before use, and tensors
 * must fill the data part without gap or overlap. */
#include "gpt2/safetensors.h"

#include "disk/file_kind.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the file's values are little-endian and are read as they are"
#endif

enum { MAX_HEADER_BYTES = 100000000, MAX_DIMS = 8 };

typedef struct entry {
    tagc_safetensors_entry shown;
    uint64_t begin, end; /* in the file */
    int value_bytes;
} entry;

struct tagc_safetensors {
    int fd;
    char *path;
    json_t *header; /* owns the names */
    uint64_t data_begin, n_file_bytes;
    int n_entries;
    entry *entries;
};

static const struct {
    const char *name;
    int n_bytes;
} dtypes[] = {{"F32", 4},     {"F16", 2}, {"BF16", 2}, {"F64", 8}, {"I64", 8},
              {"I32", 4},     {"I16", 2}, {"I8", 1},   {"U8", 1},  {"F8_E4M3", 1},
              {"F8_E5M2", 1}, {"U64", 8}, {"U32", 4},  {"U16", 2}, {"BOOL", 1}};

/* "<path>: tensor "<name>": <text>" */
__attribute__((format(printf, 3, 4))) static tagc_status corrupt(const tagc_safetensors *file,
                                                                 const char *name, const char *format, ...) {
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return tagc_fail(TAGC_ERR_CORRUPT, "%s: tensor \"%.80s\": %s", file->path, name, text);
}

static tagc_status read_fully(const tagc_safetensors *file, void *to, uint64_t n_bytes, uint64_t at) {
    for (char *next = to; n_bytes > 0;) {
        ssize_t n_read = pread(file->fd, next, n_bytes < 1 << 30 ? n_bytes : 1 << 30, (off_t)at);
        if (n_read < 0 && errno == EINTR) continue;
        if (n_read < 0) return tagc_fail(TAGC_ERR_IO, "%s: %s", file->path, strerror(errno));
        if (n_read == 0)
            return tagc_fail(TAGC_ERR_IO, "%s: ends at byte %llu while it is read", file->path,
                             (unsigned long long)at);
        next += n_read;
        at += (uint64_t)n_read;
        n_bytes -= (uint64_t)n_read;
    }
    return TAGC_OK;
}

static tagc_status parse_dtype(const tagc_safetensors *file, const json_t *object, entry *out) {
    const char *dtype = json_string_value(json_object_get(object, "dtype"));
    if (!dtype) return corrupt(file, out->shown.name, "has no dtype");
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (strcmp(dtype, dtypes[i].name) != 0) continue;
        out->shown.dtype = dtypes[i].name;
        out->value_bytes = dtypes[i].n_bytes;
        return TAGC_OK;
    }
    return corrupt(file, out->shown.name, "dtype \"%.20s\" is not known", dtype);
}

static tagc_status parse_shape(const tagc_safetensors *file, const json_t *object, entry *out) {
    const json_t *shape = json_object_get(object, "shape");
    if (!json_is_array(shape)) return corrupt(file, out->shown.name, "has no shape");
    if (json_array_size(shape) > MAX_DIMS)
        return corrupt(file, out->shown.name, "has %zu dimensions, at most %d are allowed",
                       json_array_size(shape), MAX_DIMS);
    out->shown.n_dims = (int)json_array_size(shape);
    out->shown.n_elems = 1;
    for (int i = 0; i < out->shown.n_dims; i++) {
        const json_t *dim = json_array_get(shape, (size_t)i);
        json_int_t value = json_is_integer(dim) ? json_integer_value(dim) : -1;
        if (value < 0) return corrupt(file, out->shown.name, "dimension %d is not a number from 0 on", i);
        out->shown.dims[i] = (uint64_t)value;
        if (__builtin_mul_overflow(out->shown.n_elems, (uint64_t)value, &out->shown.n_elems))
            return corrupt(file, out->shown.name, "its shape has more than 2^64 values");
    }
    return TAGC_OK;
}

static tagc_status parse_offsets(const tagc_safetensors *file, const json_t *object, entry *out) {
    const json_t *offsets = json_object_get(object, "data_offsets");
    const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
    uint64_t n_data_bytes = file->n_file_bytes - file->data_begin, n_bytes;
    if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end))
        return corrupt(file, out->shown.name, "data_offsets is not a pair of numbers");
    json_int_t from = json_integer_value(begin), to = json_integer_value(end);
    if (from < 0 || to < from || (uint64_t)to > n_data_bytes)
        return corrupt(file, out->shown.name, "data_offsets are %lld to %lld, allowed is 0 to %llu",
                       (long long)from, (long long)to, (unsigned long long)n_data_bytes);
    if (__builtin_mul_overflow(out->shown.n_elems, (uint64_t)out->value_bytes, &n_bytes) ||
        n_bytes != (uint64_t)(to - from))
        return corrupt(file, out->shown.name, "has %lld bytes, its shape and dtype make another number",
                       (long long)(to - from));
    out->begin = file->data_begin + (uint64_t)from;
    out->end = file->data_begin + (uint64_t)to;
    return TAGC_OK;
}

static int by_place(const void *a, const void *b) {
    const entry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

static tagc_status check_places(tagc_safetensors *file) {
    qsort(file->entries, (size_t)file->n_entries, sizeof *file->entries, by_place);
    uint64_t place = file->data_begin;
    for (int i = 0; i < file->n_entries; i++) {
        const entry *e = &file->entries[i];
        if (e->begin != place)
            return corrupt(file, e->shown.name,
                           "starts at byte %llu of the file, the one before ends at %llu",
                           (unsigned long long)e->begin, (unsigned long long)place);
        place = e->end;
    }
    if (place == file->n_file_bytes) return TAGC_OK;
    return tagc_fail(TAGC_ERR_CORRUPT, "%s: has %llu bytes, its tensors end at %llu", file->path,
                     (unsigned long long)file->n_file_bytes, (unsigned long long)place);
}

static tagc_status parse_header(tagc_safetensors *file) {
    const char *name;
    json_t *object;
    file->entries = calloc(json_object_size(file->header) + 1, sizeof *file->entries);
    if (!file->entries) return tagc_fail(TAGC_ERR_MEMORY, "%s: no memory for its header", file->path);
    json_object_foreach(file->header, name, object) {
        if (strcmp(name, "__metadata__") == 0) continue;
        entry *e = &file->entries[file->n_entries++];
        e->shown.name = name;
        TAGC_TRY(parse_dtype(file, object, e));
        TAGC_TRY(parse_shape(file, object, e));
        TAGC_TRY(parse_offsets(file, object, e));
    }
    return check_places(file);
}

static tagc_status read_header(tagc_safetensors *file) {
    struct stat info;
    uint64_t n_header_bytes;
    json_error_t error;
    if (fstat(file->fd, &info) != 0) return tagc_fail(TAGC_ERR_IO, "%s: %s", file->path, strerror(errno));
    if (!S_ISREG(info.st_mode)) return tagc_fail(TAGC_ERR_IO, "%s: is not a file", file->path);
    file->n_file_bytes = (uint64_t)info.st_size;
    if (file->n_file_bytes < 8)
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: has %llu bytes, a safetensors file has at least 8",
                         file->path, (unsigned long long)file->n_file_bytes);
    TAGC_TRY(read_fully(file, &n_header_bytes, 8, 0));
    if (n_header_bytes > file->n_file_bytes - 8 || n_header_bytes > MAX_HEADER_BYTES)
        return tagc_fail(TAGC_ERR_CORRUPT,
                         "%s: a header of %llu bytes does not fit into %llu bytes (at most %d)", file->path,
                         (unsigned long long)n_header_bytes, (unsigned long long)file->n_file_bytes,
                         MAX_HEADER_BYTES);
    file->data_begin = 8 + n_header_bytes;
    char *text = malloc(n_header_bytes + 1);
    if (!text) return tagc_fail(TAGC_ERR_MEMORY, "%s: no memory for its header", file->path);
    tagc_status status = read_fully(file, text, n_header_bytes, 8);
    if (status == TAGC_OK) {
        file->header = json_loadb(text, n_header_bytes, JSON_REJECT_DUPLICATES, &error);
        if (!json_is_object(file->header))
            status = tagc_fail(TAGC_ERR_CORRUPT, "%s: its header is not a JSON object: %.160s", file->path,
                               file->header ? "another kind of value" : error.text);
    }
    free(text);
    return status == TAGC_OK ? parse_header(file) : status;
}

/* A file that is no safetensors file may be weights of another kind. Replaces the text of that failure. */
static tagc_status refuse_kind(const char *path, tagc_status status) {
    const tagc_file_kind *kind = status == TAGC_ERR_CORRUPT ? tagc_file_kind_at(path) : NULL;
    if (!kind || kind->group == TAGC_FILE_ENCODED || kind->group == TAGC_FILE_TABLE) return status;
    int is_torch = kind->group == TAGC_FILE_PICKLE || strcmp(kind->what, "a zip archive") == 0;
    return tagc_fail(TAGC_ERR_UNSUPPORTED, "%s is %s, and tagc reads safetensors%s", path, kind->what,
                     is_torch
                         ? ": in Python, safetensors.torch.save_file(torch.load(FILE), NEW) converts what "
                           "torch.save has written"
                         : "");
}

tagc_status tagc_safetensors_open(const char *path, tagc_safetensors **out) {
    *out = NULL;
    tagc_safetensors *file = calloc(1, sizeof *file);
    if (!file) return tagc_fail(TAGC_ERR_MEMORY, "%s: no memory to open it", path);
    file->path = strdup(path);
    file->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe would wait for who writes */
    tagc_status status;
    if (!file->path)
        status = tagc_fail(TAGC_ERR_MEMORY, "%s: no memory to open it", path);
    else if (file->fd < 0)
        status = tagc_fail(TAGC_ERR_IO, "%s: %s", path, strerror(errno));
    else
        status = refuse_kind(path, read_header(file));
    if (status == TAGC_OK)
        *out = file;
    else
        tagc_safetensors_close(file);
    return status;
}

void tagc_safetensors_close(tagc_safetensors *file) {
    if (!file) return;
    if (file->fd >= 0) close(file->fd);
    json_decref(file->header);
    free(file->entries);
    free(file->path);
    free(file);
}

int tagc_safetensors_n_entries(const tagc_safetensors *file) {
    return file->n_entries;
}

void tagc_safetensors_entry_at(const tagc_safetensors *file, int index, tagc_safetensors_entry *out) {
    *out = file->entries[index].shown;
}

int tagc_safetensors_find(const tagc_safetensors *file, const char *name) {
    for (int i = 0; i < file->n_entries; i++)
        if (strcmp(file->entries[i].shown.name, name) == 0) return i;
    return -1;
}

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 1023;
    if (exponent == 31) return from_bits(sign | 0x7f800000 | fraction << 13);
    if (exponent > 0) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
    float value = (float)fraction * 0x1p-24f; /* zero or subnormal */
    return sign ? -value : value;
}

static tagc_status read_doubles(tagc_safetensors *file, const entry *e, uint64_t first, uint64_t n,
                                float *out) {
    double values[1024] = {0};
    const uint64_t n_values = sizeof values / sizeof values[0];
    for (uint64_t i = 0; i < n; i += n_values) {
        uint64_t n_now = n - i < n_values ? n - i : n_values;
        TAGC_TRY(read_fully(file, values, n_now * 8, e->begin + (first + i) * 8));
        for (uint64_t j = 0; j < n_now; j++) out[i + j] = (float)values[j];
    }
    return TAGC_OK;
}

tagc_status tagc_safetensors_read(tagc_safetensors *file, int index, uint64_t first, uint64_t n, float *out) {
    if (index < 0 || index >= file->n_entries)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s: entry is %d, allowed is 0 to %d", file->path, index,
                         file->n_entries - 1);
    const entry *e = &file->entries[index];
    if (first > e->shown.n_elems || n > e->shown.n_elems - first)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "%s: tensor \"%.80s\": values %llu + %llu are asked for, it has %llu", file->path,
                         e->shown.name, (unsigned long long)first, (unsigned long long)n,
                         (unsigned long long)e->shown.n_elems);
    if (strcmp(e->shown.dtype, "F32") == 0) return read_fully(file, out, n * 4, e->begin + first * 4);
    if (strcmp(e->shown.dtype, "F64") == 0) return read_doubles(file, e, first, n, out);
    int is_half = strcmp(e->shown.dtype, "F16") == 0;
    if (!is_half && strcmp(e->shown.dtype, "BF16") != 0)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "%s: tensor \"%.80s\": dtype is %s, F64, F32, F16 and BF16 can be read", file->path,
                         e->shown.name, e->shown.dtype);
    uint16_t halves[4096] = {0};
    const uint64_t n_halves = sizeof halves / sizeof halves[0];
    for (uint64_t i = 0; i < n; i += n_halves) {
        uint64_t n_now = n - i < n_halves ? n - i : n_halves;
        TAGC_TRY(read_fully(file, halves, n_now * 2, e->begin + (first + i) * 2));
        for (uint64_t j = 0; j < n_now; j++)
            out[i + j] = is_half ? from_half(halves[j]) : from_bits((uint32_t)halves[j] << 16);
    }
    return TAGC_OK;
}
