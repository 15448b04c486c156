/* Checkpoints: a folder per step, written whole or not at all.
 *
 *   DIR/step-00001000/manifest.json   version, world size, step, tensors, files with sizes and checksums
 *   DIR/step-00001000/rank-0.bin ...  per rank: parameter shards, moments, residuals
 *
 * Everything is first written to DIR/.step-00001000.partial/, each file synced, and the folder renamed when all ranks
 * have succeeded. All ranks must see DIR (one host, or a shared file system). */
#ifndef TAGC_FSDP_CHECKPOINT_H
#define TAGC_FSDP_CHECKPOINT_H

#include "fsdp/fsdp.h"

/* Collective. `extra`: a text of the caller's (options, data position), stored in the manifest as it is. On failure,
 * on any rank, nothing of this step remains and earlier checkpoints are untouched; all ranks return the failure. */
tagc_status tagc_checkpoint_save(tagc_fsdp *fsdp, tagc_comm *comm, const char *dir, uint64_t step,
                                 const char *extra);

/* Collective. The step-* folder with the highest number under `dir`, or `dir` itself when it is one. Fails with
 * TAGC_ERR_IO when there is none. path: capacity n_bytes. */
tagc_status tagc_checkpoint_find(tagc_comm *comm, const char *dir, char *path, size_t n_bytes);

/* Local: the highest step under `dir`; *found = 0 when there is none. */
tagc_status tagc_checkpoint_newest(const char *dir, uint64_t *step, int *found);

/* Collective. Loads parameters, moments and residuals; bit-exact for the same world size. For another world size
 * parameters and moments are resharded, and residuals keep their sum over ranks (times the averaging factor).
 * *extra is malloc'ed. Nothing is changed unless every file of every rank is whole. */
tagc_status tagc_checkpoint_load(tagc_fsdp *fsdp, tagc_comm *comm, const char *path, uint64_t *step,
                                 char **extra);

/* As _load, but residuals start empty: what another run begins with, whatever it compresses. */
tagc_status tagc_checkpoint_fork(tagc_fsdp *fsdp, tagc_comm *comm, const char *path, uint64_t *step,
                                 char **extra);

/* Local: reads the manifest alone. */
tagc_status tagc_checkpoint_info(const char *path, uint64_t *step, int *world_size, char **extra);

/* Collective: removes all but the newest `n_keep` (>= 1) step folders and stale partial ones. */
tagc_status tagc_checkpoint_prune(tagc_comm *comm, const char *dir, int n_keep);

#endif
