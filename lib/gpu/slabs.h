/* Memory of the device that stores leave to later ones of the same queue. DDP makes its buckets anew in the second backward pass: the
 * residuals of all of them are as many values as before, in other places, so they fit into what the stores of the first pass had. */
#ifndef TAGC_GPU_SLABS_H
#define TAGC_GPU_SLABS_H

#include "gpu/queue_private.h"

/* n_bytes of memory for any stream, in a slab with room or in a new one of `slab_bytes`, which must be at least n_bytes. Call
 * both while nothing is under way. */
tagc_status tagc_slab_create(tagc_queue *queue, tagc_slab_use use, size_t n_bytes, size_t slab_bytes,
                             const char *what, void **out);
void tagc_slab_destroy(tagc_queue *queue, void *memory); /* accepts NULL */
/* Frees the slabs that nobody uses, when memory gets another size. */
void tagc_slabs_trim(tagc_queue *queue);

#endif
