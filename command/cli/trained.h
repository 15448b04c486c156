/* A trained model from wherever it is kept: a checkpoint, a run's folder, a safetensors file or a folder with
 * one. */
#ifndef TAGC_CLI_TRAINED_H
#define TAGC_CLI_TRAINED_H

#include "data/data.h"
#include "disk/paths.h"
#include "fsdp/fsdp.h"
#include "launch/ranks.h"
#include "options/options.h"
#include "train/saved.h"

/* Rows of the commands that open one. */
#define TAGC_ROW_FROM(at)                                                                                    \
    {                                                                                                        \
        "What", "from", TAGC_OPTION_TEXT, 0, at, 0, 0, NULL, NULL, "PATH",                                   \
            "a run's folder (its newest checkpoint), one checkpoint, a .safetensors file or a folder with "  \
            "one"                                                                                            \
    }
#define TAGC_ROW_MODEL(at)                                                                                   \
    {                                                                                                        \
        NULL, "model", TAGC_OPTION_TEXT, 0, at, 0, 0, NULL, NULL, "PRESET",                                  \
            "shape of a .safetensors file that has no config.json beside it"                                 \
    }

typedef struct tagc_trained {
    tagc_gpt2_config model;
    char path[TAGC_PATH_BYTES]; /* what was opened in the end */
    int is_checkpoint;
    tagc_saved saved; /* of a checkpoint, as `parsed`; .tokenizer is "" for weights files */
    tagc_parsed parsed;
    tagc_fsdp *fsdp;
} tagc_trained;

/* Local. Finds out what `from` is; path and is_checkpoint are set. */
tagc_status tagc_trained_find(const char *from, tagc_trained *out);

/* Collective. Loads it. preset: the shape of a weights file without config.json, or NULL. Close after either
 * end. */
tagc_status tagc_trained_open(tagc_rank *rank, const char *from, const char *preset, tagc_trained *out);
void tagc_trained_close(tagc_trained *trained);

/* Local. The shape of a weights file: config.json beside it, else the preset. */
tagc_status tagc_trained_shape(const char *weights, const char *preset, tagc_gpt2_config *out);

/* Whether its tokens are bytes. Of one that does not know its tokenizer, the vocabulary says so. */
int tagc_trained_has_bytes(const tagc_trained *trained);

#endif
