/* Frames: messages of a fixed size, for a transport that must know lengths before anything is encoded. A frame is a header and room
 * for the longest body that its options allow; the header has the length of the body. The processor or GPU that
 * makes the bodies also makes and checks headers: with a GPU, nothing of a step comes to the host.
 *
 *   | header (TAGC_FRAME_HEADER_BYTES) | body | what lay there before, up to the stride |
 *
 * The functions here are those of both makers of batches (gpu/maker.h): the processor's and the kernels'. docs/reference/wire-format.md
 * draws the header. */
#ifndef TAGC_GPU_FRAME_H
#define TAGC_GPU_FRAME_H

#include "codec/code.h"
#include "tagc/frames.h"

#include <string.h>

#if defined(__CUDACC__)
#define TAGC_FRAME_FN static __host__ __device__ inline
#else
#define TAGC_FRAME_FN static inline
#endif

enum {
    TAGC_FRAME_HEADER_BYTES = 64,
    TAGC_FRAME_MAGIC = 0x53474154, /* "TAGS" */
    TAGC_FRAME_VERSION = 1,
    TAGC_FRAME_PARTS = 16, /* of a body, of which kernels sum up each by itself */
};

typedef enum tagc_frame_kind {
    TAGC_FRAME_FRAGMENT = 1,
    TAGC_FRAME_SUMS = 2,
    TAGC_FRAME_BLOCKS = 3 /* a message of tagc_blocks_encode_on: of no step and no rank */
} tagc_frame_kind;

enum { TAGC_FRAME_NONFINITE = 1, TAGC_FRAME_FAILED = 2 }; /* flags: the sender's; no body */

/* As it travels, little-endian. */
typedef struct tagc_frame_header {
    uint32_t magic;
    uint8_t version, kind, coding, flags;
    uint32_t rank, k;        /* of the sender */
    uint64_t n_elems;        /* of the shard */
    uint32_t n_items, block; /* in the body; values per scale */
    uint64_t body_bytes, step;
    uint64_t body_sum, sum; /* tagc_frame_sum of the body, and of the header up to here */
} tagc_frame_header;

/* What is wrong in a step. The verdict names the largest of several. */
typedef enum tagc_frame_fault {
    TAGC_FRAME_SOUND = 0,
    TAGC_FRAME_VOID, /* its sender knows of a failure, and says which in its own verdict */
    TAGC_FRAME_BAD_VALUES,
    TAGC_FRAME_BAD_LENGTH,
    TAGC_FRAME_BAD_POSITIONS,
    TAGC_FRAME_BAD_SUM,    /* of the body */
    TAGC_FRAME_BAD_HEADER, /* its checksum, or a length that does not fit the frame */
    TAGC_FRAME_OTHER_STEP, /* a header of something else than this step of this unit */
    TAGC_FRAME_OTHER_K,    /* another sparsity */
    TAGC_FRAME_RANK_FAILED /* in the verdict of that rank alone, with its status instead of a sender */
} tagc_frame_fault;

/* What all frames of a call have in common. */
typedef struct tagc_frames_form {
    size_t stride, most_bytes; /* from frame to frame; of a body */
    uint32_t n_frames, most_items;
    uint32_t kind, coding, block;
    uint32_t has_sums; /* 1: sums follow the fragments, of which the own one is not used */
    uint32_t rank, k;  /* of this rank; its own, and what others should have */
    uint64_t n_elems, step;
} tagc_frames_form;

/* tagc_frames_verdict.failure: the fault, the rank that found it, and the rank whose frame has it. */
TAGC_FRAME_FN int64_t tagc_frame_failure(int fault, uint32_t rank, uint32_t from) {
    return fault ? (int64_t)fault << 48 | (int64_t)(rank & 0xffffff) << 24 | (int64_t)(from & 0xffffff) : 0;
}

/* 1 if what frame i sends counts. */
TAGC_FRAME_FN int tagc_frame_counts(const tagc_frames_form *form, uint32_t i) {
    return !(form->has_sums && form->kind == TAGC_FRAME_FRAGMENT && i == form->rank);
}

/* ---- checksums: a sum over words, so that threads can share the work ---- */

TAGC_FRAME_FN uint64_t tagc_frame_mix(uint64_t word, uint64_t index) {
    uint64_t x = word + (index + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Word `index` of n_bytes that begin at a multiple of eight; zeros behind the last byte. */
TAGC_FRAME_FN uint64_t tagc_frame_word(const uint8_t *bytes, uint64_t n_bytes, uint64_t index) {
    uint64_t word = 0;
    if (8 * index + 8 <= n_bytes) {
#if defined(__CUDACC__)
        return ((const uint64_t *)(const void *)bytes)[index];
#else
        memcpy(&word, bytes + 8 * index, 8);
        return word;
#endif
    }
    for (uint64_t i = 8 * index; i < n_bytes; i++) word |= (uint64_t)bytes[i] << i % 8 * 8;
    return word;
}

/* Of words [begin, end). */
TAGC_FRAME_FN uint64_t tagc_frame_sum_words(const uint8_t *bytes, uint64_t n_bytes, uint64_t begin,
                                            uint64_t end, uint64_t every) {
    uint64_t sum = 0;
    for (uint64_t i = begin; i < end; i += every)
        sum += tagc_frame_mix(tagc_frame_word(bytes, n_bytes, i), i);
    return sum;
}

TAGC_FRAME_FN uint64_t tagc_frame_sum_end(uint64_t sum, uint64_t n_bytes) {
    return tagc_frame_mix(sum, n_bytes);
}

TAGC_FRAME_FN uint64_t tagc_frame_sum(const uint8_t *bytes, uint64_t n_bytes) {
    return tagc_frame_sum_end(tagc_frame_sum_words(bytes, n_bytes, 0, (n_bytes + 7) / 8, 1), n_bytes);
}

/* ---- headers ---- */

TAGC_FRAME_FN tagc_frame_header *tagc_frame_at(const tagc_frames_form *form, const uint8_t *frames,
                                               uint32_t i) {
    return (tagc_frame_header *)(void *)(uint8_t *)(size_t)(frames + (size_t)i * form->stride);
}

TAGC_FRAME_FN uint64_t tagc_frame_header_sum(const tagc_frame_header *header) {
    return tagc_frame_sum((const uint8_t *)header, TAGC_FRAME_HEADER_BYTES - 8);
}

/* Bytes of a body whose checksum is to be taken: of what was encoded, or of what a header that may be damaged says. */
TAGC_FRAME_FN uint64_t tagc_frame_summed(const tagc_frames_form *form, uint64_t n_bytes) {
    return n_bytes <= form->most_bytes ? n_bytes : 0;
}

/* The header of frame i, in front of a body of which the checksum was taken. flags: where nothing of this step counts. */
TAGC_FRAME_FN void tagc_frame_write(const tagc_frames_form *form, const tagc_encoded *encoded, int flags,
                                    uint64_t body_sum, tagc_frame_header *header) {
    if (encoded->n_bytes > form->most_bytes) flags |= TAGC_FRAME_FAILED;
    *header = (tagc_frame_header){
        TAGC_FRAME_MAGIC,
        TAGC_FRAME_VERSION,
        (uint8_t)form->kind,
        (uint8_t)form->coding,
        (uint8_t)flags,
        form->rank,
        form->k,
        form->n_elems,
        flags ? 0 : (uint32_t)encoded->n_sent,
        form->block,
        flags ? 0 : encoded->n_bytes,
        form->step,
        flags ? 0 : body_sum,
        0,
    };
    header->sum = tagc_frame_header_sum(header);
}

/* What is wrong with a header from rank `from`, and with the checksum of its body. */
TAGC_FRAME_FN int tagc_frame_check(const tagc_frames_form *form, const tagc_frame_header *header,
                                   uint32_t from, uint64_t body_sum) {
    if (header->magic != TAGC_FRAME_MAGIC || header->version != TAGC_FRAME_VERSION ||
        header->sum != tagc_frame_header_sum(header))
        return TAGC_FRAME_BAD_HEADER;
    if (header->kind != form->kind || header->coding != form->coding || header->block != form->block ||
        header->rank != from || header->n_elems != form->n_elems || header->step != form->step)
        return TAGC_FRAME_OTHER_STEP;
    if (header->k != form->k) return TAGC_FRAME_OTHER_K;
    if (header->flags & TAGC_FRAME_FAILED) return TAGC_FRAME_VOID;
    if (header->flags) return TAGC_FRAME_SOUND;
    if (header->body_bytes == 0 || header->body_bytes > form->most_bytes ||
        header->n_items > form->most_items)
        return TAGC_FRAME_BAD_HEADER;
    return header->body_sum == body_sum ? TAGC_FRAME_SOUND : TAGC_FRAME_BAD_SUM;
}

/* Of TAGC_DAMAGE_ that validate found. */
TAGC_FRAME_FN int tagc_frame_fault_of(int damage) {
    return damage ? TAGC_FRAME_BAD_POSITIONS + 1 - damage : TAGC_FRAME_SOUND;
}

#endif
