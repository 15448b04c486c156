/* Reads and writes .safetensors files tensor by tensor, so that no rank needs memory for a whole model.
 *
 *   8 bytes   n, little-endian: length of the header
 *   n bytes   JSON: {"name": {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}, ...}
 *   the rest  the tensors' bytes; offsets count from here */
#ifndef TAGC_GPT2_SAFETENSORS_H
#define TAGC_GPT2_SAFETENSORS_H

#include "core/status.h"
#include "gpt2/gpt2.h"

/* ---- any file ---- */

typedef struct tagc_safetensors tagc_safetensors;

typedef struct tagc_safetensors_entry {
    const char *name; /* belongs to the reader */
    int n_dims;       /* 0 .. 8 */
    uint64_t dims[8];
    uint64_t n_elems;
    const char *dtype; /* "F64", "F32", "F16", "BF16" can be read; others are listed only */
} tagc_safetensors_entry;

/* Checks the whole header: every size, offset and shape, no overlap, no gap. TAGC_ERR_IO or TAGC_ERR_CORRUPT.
 */
tagc_status tagc_safetensors_open(const char *path, tagc_safetensors **out);
void tagc_safetensors_close(tagc_safetensors *file); /* accepts NULL */
int tagc_safetensors_n_entries(const tagc_safetensors *file);
void tagc_safetensors_entry_at(const tagc_safetensors *file, int entry, tagc_safetensors_entry *out);
int tagc_safetensors_find(const tagc_safetensors *file, const char *name); /* -1 when there is none */

/* Values [first, first + n) of an entry as fp32. */
tagc_status tagc_safetensors_read(tagc_safetensors *file, int entry, uint64_t first, uint64_t n, float *out);

/* ---- GPT-2 checkpoints ---- */

/* Safetensors as the tensors of one config. path: a file, an index of several (gpt2/shards.h), or a folder with either. Names
 * may start with "transformer.", and may have what DDP, FSDP, torch.compile and checkpointing put into them ("module.",
 * "_orig_mod."). Attention mask buffers are ignored, and shapes are checked. If there is no lm_head.weight, wte.weight
 * replaces it. */
typedef struct tagc_gpt2_weights tagc_gpt2_weights;
tagc_status tagc_gpt2_weights_open(const char *path, const tagc_gpt2_config *config, tagc_gpt2_weights **out);
void tagc_gpt2_weights_close(tagc_gpt2_weights *weights); /* accepts NULL */
tagc_status tagc_gpt2_weights_read(tagc_gpt2_weights *weights, int tensor, size_t first, size_t n,
                                   float *out);

/* Writes <path> with every tensor of `config` in order: _create, then _append with the values of tensor 0, 1, ... (in pieces
 * of any size), then _commit, which makes the file durable and moves it into place. _destroy before a successful _commit
 * removes the temporary file and leaves an older file at `path` as it was. */
typedef struct tagc_gpt2_writer tagc_gpt2_writer;
tagc_status tagc_gpt2_writer_create(const char *path, const tagc_gpt2_config *config, tagc_gpt2_writer **out);
tagc_status tagc_gpt2_writer_append(tagc_gpt2_writer *writer, const float *values, size_t n);
tagc_status tagc_gpt2_writer_commit(tagc_gpt2_writer *writer);
void tagc_gpt2_writer_destroy(tagc_gpt2_writer *writer); /* accepts NULL */

/* config.json as Hugging Face's GPT2Config, so that a folder with it and model.safetensors opens there. */
tagc_status tagc_gpt2_config_write(const char *path, const tagc_gpt2_config *config);
tagc_status tagc_gpt2_config_read(const char *path, tagc_gpt2_config *out);

#endif
