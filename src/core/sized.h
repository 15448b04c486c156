/* Public structs that begin with struct_bytes, between a caller and a library of other versions: the one that knows fewer
 * fields decides which of them there are. */
#ifndef TAGC_CORE_SIZED_H
#define TAGC_CORE_SIZED_H

#include "core/status.h"

typedef struct tagc_sized {
    const char *name;     /* of the struct, for people; its _init is called <name>_init */
    size_t n_bytes;       /* as this library has it */
    size_t least_bytes;   /* as the first version had it that callers may still have */
    const void *defaults; /* (n_bytes), without struct_bytes */
} tagc_sized;

/* Defaults for a caller whose struct has struct_bytes. Writes nothing beyond them; what this library does not know is 0. */
void tagc_sized_init(const tagc_sized *type, void *to, size_t struct_bytes);

/* The caller's struct as this library has it, with defaults for what the caller does not know. `to` (n_bytes).
 * TAGC_ERR_ARGUMENT where it is smaller than there ever was one, or not zero where this library knows no field. */
tagc_status tagc_sized_read(const tagc_sized *type, const void *from, void *to);

/* TAGC_ERR_ARGUMENT where a struct to write to is smaller than there ever was one. */
tagc_status tagc_sized_check(const tagc_sized *type, const void *to);
/* Of `from` (n_bytes) what the caller knows; the rest of the caller's struct becomes 0. Checked before. */
void tagc_sized_write(const tagc_sized *type, const void *from, void *to);

#endif
