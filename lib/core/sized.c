/* Every struct here starts with its size: `size_t struct_bytes`. */
#include "core/sized.h"

#include <string.h>

enum { MOST_BYTES = 4096 }; /* above the size of any version; an uninitialised field is seldom below it */

static size_t bytes_of(const void *sized) {
    size_t n_bytes;
    memcpy(&n_bytes, sized, sizeof n_bytes);
    return n_bytes;
}

/* All of `to` (n_bytes) except its struct_bytes. */
static void fill(const tagc_sized *type, const void *from, void *to, size_t n_bytes) {
    const size_t head = sizeof(size_t);
    size_t n_known = n_bytes < type->n_bytes ? n_bytes : type->n_bytes;
    memcpy((char *)to + head, (const char *)from + head, n_known - head);
    memset((char *)to + n_known, 0, n_bytes - n_known);
}

void tagc_sized_init(const tagc_sized *type, void *to, size_t struct_bytes) {
    if (!to || struct_bytes < sizeof struct_bytes) return;
    memcpy(to, &struct_bytes, sizeof struct_bytes);
    fill(type, type->defaults, to, struct_bytes);
}

tagc_status tagc_sized_check(const tagc_sized *type, const void *to) {
    size_t n_bytes = bytes_of(to);
    if (n_bytes >= type->least_bytes && n_bytes <= MOST_BYTES) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "struct_bytes of %s is %zu, must be in [%zu, %d]: call %s_init first",
                     type->name, n_bytes, type->least_bytes, MOST_BYTES, type->name);
}

tagc_status tagc_sized_read(const tagc_sized *type, const void *from, void *to) {
    TAGC_TRY(tagc_sized_check(type, from));
    size_t n_bytes = bytes_of(from);
    for (size_t i = type->n_bytes; i < n_bytes; i++)
        if (((const char *)from)[i] != 0)
            return tagc_fail(TAGC_ERR_ARGUMENT,
                             "%s has %zu bytes and is not zero at byte %zu, but libtagc %s knows only %zu "
                             "bytes of it: the "
                             "caller was compiled for a newer libtagc, or did not call %s_init",
                             type->name, n_bytes, i, tagc_version(), type->n_bytes, type->name);
    memcpy(to, type->defaults, type->n_bytes);
    fill(type, from, to, n_bytes < type->n_bytes ? n_bytes : type->n_bytes);
    memcpy(to, &type->n_bytes, sizeof type->n_bytes);
    return TAGC_OK;
}

void tagc_sized_write(const tagc_sized *type, const void *from, void *to) {
    fill(type, from, to, bytes_of(to));
}
