/* Reads JSON lines. A line is in memory as a whole, so its length is bounded. */
#include "data/jsonl.h"

#include "core/status.h"
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

struct tagc_jsonl {
    tagc_source *source;
    const char *path, *field;
    json_t *object; /* of the last line; holds the text */
    unsigned long line;
    int at_end; /* of the source */
    /* bytes[begin, end) were read and are not parsed yet. */
    char *bytes;
    size_t begin, end, capacity;
};

static const char byte_order_mark[] = "\xef\xbb\xbf";

tagc_status tagc_jsonl_open(tagc_source *source, const char *path, const char *field, tagc_jsonl **out) {
    *out = NULL;
    tagc_jsonl *lines = calloc(1, sizeof *lines);
    if (!lines) return tagc_fail(TAGC_ERR_MEMORY, "%s: no memory to read it", path);
    lines->source = source;
    lines->path = path;
    lines->field = field;
    *out = lines;
    return TAGC_OK;
}

void tagc_jsonl_close(tagc_jsonl *lines) {
    if (!lines) return;
    json_decref(lines->object);
    free(lines->bytes);
    free(lines);
}

unsigned long tagc_jsonl_line(const tagc_jsonl *lines) {
    return lines->line;
}

/* Reads more behind bytes[begin, end), which moves to the front. */
static tagc_status read_more(tagc_jsonl *l) {
    size_t n = l->end - l->begin, n_read;
    if (n > 0) memmove(l->bytes, l->bytes + l->begin, n);
    l->begin = 0;
    l->end = n;
    if (n == l->capacity) {
        size_t capacity = l->capacity ? 2 * l->capacity : (size_t)1 << 16;
        if (n >= TAGC_JSONL_MOST_BYTES)
            return tagc_fail(TAGC_ERR_UNSUPPORTED,
                             "%s line %lu: longer than %zu MB, the most that a line may have", l->path,
                             l->line + 1, TAGC_JSONL_MOST_BYTES >> 20);
        char *larger = realloc(l->bytes, capacity);
        if (!larger)
            return tagc_fail(TAGC_ERR_MEMORY, "%s line %lu: no memory for %zu bytes of it", l->path,
                             l->line + 1, capacity);
        l->bytes = larger;
        l->capacity = capacity;
    }
    TAGC_TRY(tagc_source_read(l->source, (uint8_t *)l->bytes + n, l->capacity - n, &n_read));
    l->at_end = n_read < l->capacity - n;
    l->end += n_read;
    return TAGC_OK;
}

/* *line NULL at the end. */
static tagc_status next_line(tagc_jsonl *l, const char **line, size_t *n_bytes) {
    const char *stop;
    size_t n_seen = 0;
    *line = NULL;
    *n_bytes = 0;
    for (;;) {
        size_t n = l->end - l->begin;
        stop = n > n_seen ? memchr(l->bytes + l->begin + n_seen, '\n', n - n_seen) : NULL;
        if (stop || l->at_end) break;
        n_seen = n;
        TAGC_TRY(read_more(l));
    }
    if (!stop && l->begin == l->end) return TAGC_OK;
    *line = l->bytes + l->begin;
    *n_bytes = stop ? (size_t)(stop - *line) : l->end - l->begin;
    l->begin += *n_bytes + (stop != NULL);
    l->line++;
    size_t n_mark = sizeof byte_order_mark - 1;
    if (l->line == 1 && *n_bytes >= n_mark && memcmp(*line, byte_order_mark, n_mark) == 0) {
        *line += n_mark;
        *n_bytes -= n_mark;
    }
    return TAGC_OK;
}

static int is_blank(const char *line, size_t n_bytes) {
    for (size_t i = 0; i < n_bytes; i++)
        if (line[i] != ' ' && line[i] != '\t' && line[i] != '\r') return 0;
    return 1;
}

/* The names of an object's fields, the first few of them. */
static void print_fields(const json_t *object, char *text, size_t n_bytes) {
    const char *name;
    json_t *value;
    size_t n = 0;
    int n_shown = 0;
    snprintf(text, n_bytes, "no field");
    json_object_foreach((json_t *)object, name, value) {
        if (n + 40 >= n_bytes || n_shown == 6) {
            snprintf(text + n, n_bytes - n, ", ...");
            return;
        }
        n += (size_t)snprintf(text + n, n_bytes - n, "%s\"%.24s\"", n_shown++ ? ", " : "", name);
    }
}

static tagc_status check_field(const tagc_jsonl *l, const json_t *value) {
    char fields[240];
    if (json_is_string(value) || json_is_null(value)) return TAGC_OK;
    if (!value) {
        print_fields(l->object, fields, sizeof fields);
        return tagc_fail(TAGC_ERR_CORRUPT,
                         "%s line %lu: no field \"%.64s\"; it has %s. --text-field NAME takes another, and "
                         "--text-field none keeps the file as plain text",
                         l->path, l->line, l->field, fields);
    }
    return tagc_fail(TAGC_ERR_CORRUPT, "%s line %lu: field \"%.64s\" is %s, must be a string", l->path,
                     l->line, l->field,
                     json_is_object(value)   ? "an object"
                     : json_is_array(value)  ? "an array"
                     : json_is_number(value) ? "a number"
                                             : "true or false");
}

tagc_status tagc_jsonl_next(tagc_jsonl *l, const char **text, size_t *n_bytes) {
    const char *line;
    size_t n_line;
    json_error_t error;
    *text = NULL;
    *n_bytes = 0;
    do TAGC_TRY(next_line(l, &line, &n_line));
    while (line && is_blank(line, n_line));
    json_decref(l->object);
    l->object = NULL;
    if (!line) return TAGC_OK;
    l->object = json_loadb(line, n_line, JSON_ALLOW_NUL, &error);
    if (!l->object)
        return tagc_fail(TAGC_ERR_CORRUPT,
                         "%s line %lu: not a JSON object: %.160s (--text-field none keeps the "
                         "file as plain text)",
                         l->path, l->line, error.text);
    if (!json_is_object(l->object))
        return tagc_fail(TAGC_ERR_CORRUPT, "%s line %lu: must be a JSON object with a field \"%.64s\"",
                         l->path, l->line, l->field);
    const json_t *value = json_object_get(l->object, l->field);
    TAGC_TRY(check_field(l, value));
    *text = json_is_string(value) ? json_string_value(value) : "";
    *n_bytes = json_is_string(value) ? json_string_length(value) : 0;
    return TAGC_OK;
}

int tagc_jsonl_looks_like(const uint8_t *text, size_t n_bytes, const char *field) {
    size_t n_mark = sizeof byte_order_mark - 1;
    if (n_bytes >= n_mark && memcmp(text, byte_order_mark, n_mark) == 0) {
        text += n_mark;
        n_bytes -= n_mark;
    }
    const uint8_t *stop = memchr(text, '\n', n_bytes);
    if (n_bytes == 0 || text[0] != '{') return 0;
    json_t *object =
        json_loadb((const char *)text, stop ? (size_t)(stop - text) : n_bytes, JSON_ALLOW_NUL, NULL);
    int is_one = json_is_string(json_object_get(object, field));
    json_decref(object);
    return is_one;
}
