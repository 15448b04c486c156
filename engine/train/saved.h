/* What a run stores with a checkpoint beside the engine's state. */
#ifndef TAGC_TRAIN_SAVED_H
#define TAGC_TRAIN_SAVED_H

#include "disk/paths.h"
#include "fsdp/fsdp.h"
#include "gpt2/gpt2.h"
#include <jansson.h>

typedef struct tagc_saved {
    tagc_gpt2_config model;
    uint64_t position; /* of the loader */
    uint64_t n_tokens; /* seen so far */
    int world_size;
    uint64_t fork_step;                /* where this run left another one; 0: it did not */
    double best_val_loss;              /* infinity before the first evaluation */
    char tokenizer[64];                /* of the token file, "" when it does not say */
    uint64_t data_n_tokens, data_hash; /* of the training tokens */
    char cpu
        [160]; /* what computed, on which the bits of a step depend (tagc_saved_processors); "" of old files */
    json_t *options; /* {name: text}; texts of merged options live here */
    uint64_t step;   /* of the checkpoint, not in its text; set by _open */
} tagc_saved;

json_t *tagc_saved_model(const tagc_gpt2_config *config);

/* Collective: the processor levels of all ranks and this rank's BLAS, such as "3 avx512, 1 avx2; OpenBLAS 0.3.21 SkylakeX". */
tagc_status tagc_saved_processors(tagc_comm *comm, char *text, size_t n_bytes);

/* JSON text, malloc'ed; NULL when out of memory. options: {name: text}, in place of those of the struct. */
char *tagc_saved_write(const tagc_saved *saved, json_t *options);

/* TAGC_ERR_CORRUPT names what is missing or wrong. */
tagc_status tagc_saved_read(const char *text, tagc_saved *out);
/* Collective: that of the newest checkpoint at or under `from`. path: the checkpoint's. */
tagc_status tagc_saved_open(tagc_comm *comm, const char *from, char path[TAGC_PATH_BYTES], tagc_saved *out);
void tagc_saved_destroy(tagc_saved *saved);

#endif
