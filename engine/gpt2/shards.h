/* Tensors of one safetensors file, or of all files that an index names: Hugging Face writes large models as
 * model-00001-of-00003.safetensors and so on, with model.safetensors.index.json beside them. */
#ifndef TAGC_GPT2_SHARDS_H
#define TAGC_GPT2_SHARDS_H

#include "disk/paths.h"
#include "gpt2/safetensors.h"

typedef struct tagc_shards tagc_shards;

/* path: a safetensors file, or an index, whose name ends in .json. Every file of an index must be there and have the tensors
 * that the index says; what else it has is ignored. TAGC_ERR_IO, TAGC_ERR_CORRUPT. */
tagc_status tagc_shards_open(const char *path, tagc_shards **out);
void tagc_shards_close(tagc_shards *shards); /* accepts NULL */
int tagc_shards_n_files(const tagc_shards *shards);
int tagc_shards_n_entries(const tagc_shards *shards);
void tagc_shards_entry_at(const tagc_shards *shards, int entry, tagc_safetensors_entry *out);
/* Values [first, first + n) of an entry as fp32. */
tagc_status tagc_shards_read(tagc_shards *shards, int entry, uint64_t first, uint64_t n, float *out);

/* The weights in a folder: its model.safetensors, or else its index. TAGC_ERR_IO if there is neither, with what the
 * folder holds instead (weights of PyTorch or of llama.cpp, another model). For a file, its own path. */
tagc_status tagc_weights_find(const char *from, char path[TAGC_PATH_BYTES]);

#endif
