/* The tables that bpe_load.c makes and bpe.c uses. */
#ifndef TAGC_DATA_BPE_TABLE_H
#define TAGC_DATA_BPE_TABLE_H

#include "data/bpe.h"

typedef struct tagc_bpe_merge {
    uint32_t left, right; /* tokens */
    uint32_t rank;        /* place in merges.txt; UINT32_MAX: this cell of the table is free */
    uint32_t joined;      /* token */
} tagc_bpe_merge;

typedef struct tagc_bpe_pair {
    uint32_t rank, at;            /* ordered by these */
    uint32_t left, right, joined; /* as they were when the pair was found */
} tagc_bpe_pair;

struct tagc_bpe {
    int vocab_size, end_of_text;
    char *pieces;          /* all pieces, one after the other */
    uint32_t *piece_start; /* (vocab_size) in pieces */
    uint32_t *piece_bytes; /* (vocab_size), 0: no such token */
    uint32_t byte_token[256];
    tagc_bpe_merge *merges; /* (n_cells) hash table, open addressing */
    uint32_t n_cells;       /* a power of two */

    /* Scratch for words of up to `capacity` bytes: a list of tokens by place, and the heap of pairs. */
    size_t capacity;
    uint32_t *token, *next, *previous; /* (capacity) */
    tagc_bpe_pair *heap;               /* (3 * capacity) */
};

/* Of the pair, or the free one for it. */
uint32_t tagc_bpe_cell(const tagc_bpe *bpe, uint32_t left, uint32_t right);

#endif
