/* Encoding by byte pairs; see bpe.h for the rule. */
#include "data/bpe_table.h"

#include "core/status.h"
#include "data/permutation.h"
#include "data/split.h"
#include <stdlib.h>

#define NONE UINT32_MAX
#define MAX_TEXT_BYTES ((size_t)1 << 30)

void tagc_bpe_destroy(tagc_bpe *bpe) {
    if (!bpe) return;
    free(bpe->pieces);
    free(bpe->piece_start);
    free(bpe->piece_bytes);
    free(bpe->merges);
    free(bpe->token);
    free(bpe->next);
    free(bpe->previous);
    free(bpe->heap);
    free(bpe);
}

int tagc_bpe_vocab_size(const tagc_bpe *bpe) {
    return bpe->vocab_size;
}

int tagc_bpe_end_of_text(const tagc_bpe *bpe) {
    return bpe->end_of_text;
}

const char *tagc_bpe_piece(const tagc_bpe *bpe, int token, size_t *n_bytes) {
    *n_bytes = 0;
    if (token < 0 || token >= bpe->vocab_size || bpe->piece_bytes[token] == 0) return NULL;
    *n_bytes = bpe->piece_bytes[token];
    return bpe->pieces + bpe->piece_start[token];
}

uint32_t tagc_bpe_cell(const tagc_bpe *bpe, uint32_t left, uint32_t right) {
    uint32_t cell = (uint32_t)tagc_mix64((uint64_t)left << 32 | right) & (bpe->n_cells - 1);
    while (bpe->merges[cell].rank != NONE &&
           (bpe->merges[cell].left != left || bpe->merges[cell].right != right))
        cell = (cell + 1) & (bpe->n_cells - 1);
    return cell;
}

static int before(const tagc_bpe_pair *a, const tagc_bpe_pair *b) {
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static void heap_push(tagc_bpe_pair *heap, size_t *n, tagc_bpe_pair pair) {
    size_t i = (*n)++;
    for (; i > 0 && before(&pair, &heap[(i - 1) / 2]); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = pair;
}

static tagc_bpe_pair heap_pop(tagc_bpe_pair *heap, size_t *n) {
    tagc_bpe_pair top = heap[0], last = heap[--*n];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < *n; i = child) {
        if (child + 1 < *n && before(&heap[child + 1], &heap[child])) child++;
        if (!before(&heap[child], &last)) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return top;
}

static void push_pair(tagc_bpe *bpe, size_t *n_heap, uint32_t at) {
    if (at == NONE || bpe->next[at] == NONE) return;
    uint32_t left = bpe->token[at], right = bpe->token[bpe->next[at]];
    const tagc_bpe_merge *merge = &bpe->merges[tagc_bpe_cell(bpe, left, right)];
    if (merge->rank == NONE) return;
    heap_push(bpe->heap, n_heap, (tagc_bpe_pair){merge->rank, at, left, right, merge->joined});
}

static tagc_status reserve(tagc_bpe *bpe, size_t n_bytes) {
    if (n_bytes <= bpe->capacity) return TAGC_OK;
    size_t capacity = n_bytes < 256 ? 256 : n_bytes;
    uint32_t *token = malloc(capacity * sizeof *token), *next = malloc(capacity * sizeof *next);
    uint32_t *previous = malloc(capacity * sizeof *previous);
    tagc_bpe_pair *heap = malloc(3 * capacity * sizeof *heap);
    if (!token || !next || !previous || !heap) {
        free(token);
        free(next);
        free(previous);
        free(heap);
        return tagc_fail(TAGC_ERR_MEMORY, "no memory to encode a word of %zu bytes", n_bytes);
    }
    free(bpe->token);
    free(bpe->next);
    free(bpe->previous);
    free(bpe->heap);
    bpe->token = token;
    bpe->next = next;
    bpe->previous = previous;
    bpe->heap = heap;
    bpe->capacity = capacity;
    return TAGC_OK;
}

/* The heap never holds more than 3 n pairs: n - 1 at first, and two for each of at most n - 1 merges. */
static size_t encode_word(tagc_bpe *bpe, const uint8_t *word, uint32_t n, int *tokens) {
    size_t n_heap = 0, n_tokens = 0;
    for (uint32_t i = 0; i < n; i++) {
        bpe->token[i] = bpe->byte_token[word[i]];
        bpe->next[i] = i + 1 < n ? i + 1 : NONE;
        bpe->previous[i] = i > 0 ? i - 1 : NONE;
    }
    for (uint32_t i = 0; i + 1 < n; i++) push_pair(bpe, &n_heap, i);
    while (n_heap > 0) {
        tagc_bpe_pair pair = heap_pop(bpe->heap, &n_heap);
        uint32_t at = pair.at, gone = bpe->next[at];
        /* A pair is stale if its tokens have changed since. A place that was merged into another has no next. */
        if (gone == NONE || bpe->token[at] != pair.left || bpe->token[gone] != pair.right) continue;
        bpe->token[at] = pair.joined;
        bpe->next[at] = bpe->next[gone];
        if (bpe->next[at] != NONE) bpe->previous[bpe->next[at]] = at;
        bpe->next[gone] = NONE;
        push_pair(bpe, &n_heap, bpe->previous[at]);
        push_pair(bpe, &n_heap, at);
    }
    for (uint32_t i = 0; i != NONE; i = bpe->next[i]) tokens[n_tokens++] = (int)bpe->token[i];
    return n_tokens;
}

tagc_status tagc_bpe_encode(tagc_bpe *bpe, const uint8_t *text, size_t n_bytes, int *tokens,
                            size_t *n_tokens) {
    *n_tokens = 0;
    if (n_bytes > MAX_TEXT_BYTES)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "n_bytes is %zu, must be at most 2^30: encode a long text in parts", n_bytes);
    while (n_bytes > 0) {
        size_t n_word = tagc_split_word(text, n_bytes);
        TAGC_TRY(reserve(bpe, n_word));
        *n_tokens += encode_word(bpe, text, (uint32_t)n_word, tokens + *n_tokens);
        text += n_word;
        n_bytes -= n_word;
    }
    return TAGC_OK;
}
