/* The bytes of a checkpoint: the text of the manifest and the layout of the ranks' files.
 *
 *   manifest.json   {"checksum": "<xxh3-64 of the rest, compact, keys sorted>", "content": {...}}
 *
 *   rank-R.bin      64 bytes  header, little-endian:
 *                     0 "TAGCCKPT"   8 version u32   12 world size u32   16 rank u32   20 flats u32
 *                    24 step u64    32 layout hash u64   40 bytes of the file u64   48 zero
 *                   then per flat, fp32: master (n_owned), first moment (n_owned; none if beta1 is 0), second moment
 *                   (n_owned). If parameters travel as deltas, the replica (n_owned) follows in bf16, padded with zeros to
 *                   a multiple of 4 bytes
 *                   then zeros up to a multiple of 8 bytes, and what tagc_model_save writes: this rank's residuals and
 *                   the schedule (n_model bytes of the manifest)
 *
 * Sharded: n_owned = n_padded / W. With L ranks per host (hybrid; else L = W), rank R = h * L + l holds the n_owned
 * values of every flat from l * n_padded / L + h * n_owned on.
 * Replicated: rank 0 holds everything, the others only what the model saves. */
#ifndef TAGC_FSDP_CHECKPOINT_FORMAT_H
#define TAGC_FSDP_CHECKPOINT_FORMAT_H

#include "core/status.h"
#include "disk/paths.h"
#include "fsdp/tables.h"
#include "model/tensor.h"

/* Of the manifest and of the ranks' files. Other versions are refused. */
#define TAGC_CHECKPOINT_VERSION 2
#define TAGC_RANK_HEADER_BYTES 64

typedef struct tagc_manifest_tensor {
    char name[TAGC_TENSOR_NAME_BYTES];
    uint64_t n_rows, n_cols, n_elems;
    int flat;
    uint64_t offset; /* in the flat */
} tagc_manifest_tensor;

typedef struct tagc_manifest_flat {
    uint64_t n_elems, n_padded;
    uint64_t n_gathers; /* gathers that made the replica; 0: no replica is saved */
    int has_moment1, has_residual;
} tagc_manifest_flat;

typedef struct tagc_manifest_file {
    uint64_t n_bytes, checksum;            /* xxh3-64 */
    uint64_t n_model;                      /* bytes of the model's state, a multiple of 8 */
    uint64_t gather_sent, gather_received; /* by this rank since the last step; the next step counts them */
} tagc_manifest_file;

typedef struct tagc_manifest {
    uint64_t step, n_updates;
    int world_size, sharded, n_tensors, n_flats;
    int is_followed; /* 1: a schedule says what flats send */
    int n_owners;    /* ranks that hold one copy together: the world size, less if hybrid */
    tagc_manifest_tensor *tensors;
    tagc_manifest_flat *flats;
    tagc_manifest_file *files; /* (world_size) */
    char *extra;
} tagc_manifest;

/* Zeroed tables of these sizes; world_size in [1, 65536]. */
tagc_status tagc_manifest_create(int world_size, int n_tensors, int n_flats, tagc_manifest **out);
void tagc_manifest_destroy(tagc_manifest *manifest); /* accepts NULL */

/* *text is malloc'ed. extra must be UTF-8. */
tagc_status tagc_manifest_print(const tagc_manifest *manifest, char **text);
/* Accepts only what describes files that can exist. verify = 0 skips the checksum, for fuzzers. */
tagc_status tagc_manifest_parse(const char *text, size_t n_bytes, int verify, tagc_manifest **out);

/* Reads path/manifest.json. Error texts name it. */
tagc_status tagc_manifest_read(const char *path, tagc_manifest **out);
tagc_status tagc_folder_remove(const char *path); /* with the files in it; a missing one is no error */

/* ---- rank files ---- */

typedef enum tagc_section {
    TAGC_SECTION_MASTER = 0,
    TAGC_SECTION_MOMENT1 = 1,
    TAGC_SECTION_MOMENT2 = 2,
    TAGC_SECTION_REPLICA = 3,
    TAGC_N_SECTIONS = 4
} tagc_section;

/* Where the values of `rank` begin in a flat, and how many they are. */
void tagc_manifest_owned(const tagc_manifest *manifest, int flat, int rank, uint64_t *first,
                         uint64_t *n_owned);
/* Byte offset of a section; that of the model's state if flat = n_flats. */
uint64_t tagc_rank_file_offset(const tagc_manifest *manifest, int rank, int flat, tagc_section section);
uint64_t tagc_rank_file_bytes(const tagc_manifest *manifest, int rank);
void tagc_rank_file_header(const tagc_manifest *manifest, int rank,
                           unsigned char header[TAGC_RANK_HEADER_BYTES]);
/* Checks that this is the file of `rank` that the manifest describes: header, size, and its checksum, unless that is NULL. */
tagc_status tagc_rank_file_check(const tagc_manifest *manifest, int rank,
                                 const unsigned char header[TAGC_RANK_HEADER_BYTES], size_t n_bytes,
                                 const uint64_t *checksum);

#endif
