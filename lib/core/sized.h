/* Public structs that start with struct_bytes, passed between a caller and a library of different versions. The side that
 * knows fewer fields decides which exist. */
#ifndef TAGC_CORE_SIZED_H
#define TAGC_CORE_SIZED_H

#include "core/status.h"

typedef struct tagc_sized {
    const char *name;     /* the struct's name, for errors; its _init is called <name>_init */
    size_t n_bytes;       /* as this library has it */
    size_t least_bytes;   /* size in the oldest version that callers may have */
    const void *defaults; /* (n_bytes), without struct_bytes */
} tagc_sized;

/* Writes the defaults to a caller's struct of struct_bytes and nothing beyond it. Fields that this library does not know
 * become 0. */
void tagc_sized_init(const tagc_sized *type, void *to, size_t struct_bytes);

/* Copies the caller's struct to `to` (n_bytes), with defaults for fields that the caller does not know.
 * TAGC_ERR_ARGUMENT if the struct is smaller than in any version, or if a field that this library does not know is not
 * zero. */
tagc_status tagc_sized_read(const tagc_sized *type, const void *from, void *to);

/* TAGC_ERR_ARGUMENT if a struct to write to is smaller than in any version. */
tagc_status tagc_sized_check(const tagc_sized *type, const void *to);
/* Copies to the caller's struct the fields of `from` (n_bytes) that the caller knows; the rest of it becomes 0. Call the
 * check above first. */
void tagc_sized_write(const tagc_sized *type, const void *from, void *to);

#endif
