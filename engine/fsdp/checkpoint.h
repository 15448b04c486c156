/* Checkpoints: one folder per step, which appears complete or not at all.
 *
 *   DIR/step-00001000/manifest.json   version, world size, step, tensors, files with sizes and checksums
 *   DIR/step-00001000/rank-0.bin ...  per rank: parameter shards, moments, residuals
 *
 * Ranks first write to DIR/.step-00001000.partial/ and sync each file. When all ranks have succeeded, rank 0 renames the
 * folder. All ranks must see DIR (one host, or a shared file system). */
#ifndef TAGC_FSDP_CHECKPOINT_H
#define TAGC_FSDP_CHECKPOINT_H

#include "fsdp/fsdp.h"

/* Collective. The manifest stores `extra`, a text of the caller's (options, data position), unchanged. If any rank fails,
 * nothing of this step remains, earlier checkpoints are unchanged, and all ranks return the failure. */
tagc_status tagc_checkpoint_save(tagc_fsdp *fsdp, tagc_comm *comm, const char *dir, uint64_t step,
                                 const char *extra);

/* Collective. Finds the step-* folder with the highest number under `dir`, or `dir` itself if it is one. TAGC_ERR_IO if
 * there is none. path (n_bytes). */
tagc_status tagc_checkpoint_find(tagc_comm *comm, const char *dir, char *path, size_t n_bytes);

/* Local: the highest step below `before` under `dir`. *found is 0 if there is none. */
tagc_status tagc_checkpoint_newest(const char *dir, uint64_t before, uint64_t *step, int *found);

/* Collective. Loads parameters, moments, residuals and the schedule, bit-exact for the same world size. For another world
 * size it reshards parameters and moments, keeps the sum of the residuals over ranks (times the averaging factor), and begins
 * the schedule's windows anew. An engine goes on without a schedule if the checkpoint has none.
 * *extra is malloc'ed. It changes nothing unless every file of every rank is intact; TAGC_ERR_IO on all ranks if one that was cannot be read
 * any more. */
tagc_status tagc_checkpoint_load(tagc_fsdp *fsdp, tagc_comm *comm, const char *path, uint64_t *step,
                                 char **extra);

/* As _load, but residuals start at zero, so that a new run may compress other tensors, and the schedule begins as in a model
 * that has been trained. */
tagc_status tagc_checkpoint_fork(tagc_fsdp *fsdp, tagc_comm *comm, const char *path, uint64_t *step,
                                 char **extra);

/* Local: reads only the manifest. world_size: of all ranks that saved. */
tagc_status tagc_checkpoint_info(const char *path, uint64_t *step, int *world_size, char **extra);

/* Collective: removes stale partial folders, and all step folders but the newest `n_keep` (>= 1). */
tagc_status tagc_checkpoint_prune(tagc_comm *comm, const char *dir, int n_keep);

#endif
