/* Saving: ranks write into a folder with a temporary name. Rank 0 renames it when every rank has written and synced its
 * part. If a rank fails, all ranks learn it and the unfinished folder is removed. */
#include "codec/bf16.h"
#include "core/xxh3.h"
#include "fsdp/checkpoint.h"
#include "fsdp/checkpoint_format.h"
#include "fsdp/internal.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct tagc_save {
    tagc_fsdp *fsdp;
    tagc_comm *comm;
    const char *dir;
    tagc_manifest *manifest;
    char partial[TAGC_PATH_BYTES], final[TAGC_PATH_BYTES], replaced[TAGC_PATH_BYTES];
} tagc_save;

static tagc_status describe(tagc_save *save, uint64_t step, const char *extra) {
    const tagc_fsdp *f = save->fsdp;
    TAGC_TRY(tagc_manifest_create(f->world_size, f->tables.n_tensors, f->tables.n_flats, &save->manifest));
    tagc_manifest *m = save->manifest;
    m->step = step;
    m->n_updates = f->n_updates;
    m->sharded = f->options.sharding != TAGC_SHARD_NONE;
    m->n_owners = m->sharded ? f->n_owners : f->world_size;
    m->is_followed = tagc_fsdp_schedule(save->fsdp) != NULL;
    m->extra = strdup(extra != NULL ? extra : "");
    if (m->extra == NULL) return tagc_fail(TAGC_ERR_MEMORY, "no memory for a manifest");
    for (int i = 0; i < f->tables.n_flats; i++) {
        m->flats[i].n_elems = f->tables.flats[i].n_elems;
        m->flats[i].n_padded = f->tables.flats[i].n_padded;
        m->flats[i].has_residual =
            tagc_reducer_residual_elems(tagc_fsdp_part(f, &f->tables.flats[i])->reducer) > 0;
        m->flats[i].n_gathers = tagc_fsdp_replica_gathers(f, i);
        m->flats[i].has_moment1 = f->tables.flats[i].moment1 != NULL;
    }
    size_t n_model;
    TAGC_TRY(tagc_model_save(f->model, NULL, 0, &n_model));
    m->files[f->rank].n_model = n_model;
    for (int i = 0; i < f->tables.n_tensors; i++) {
        tagc_manifest_tensor *t = &m->tensors[i];
        memcpy(t->name, f->tables.tensors[i].name, sizeof t->name);
        t->n_rows = f->tables.tensors[i].n_rows;
        t->n_cols = f->tables.tensors[i].n_cols;
        t->n_elems = f->tables.tensors[i].n_elems;
        t->flat = f->tables.places[i].flat;
        t->offset = f->tables.places[i].offset;
    }
    TAGC_TRY(tagc_path_print(save->partial, "%s/.step-%08llu.partial", save->dir, (unsigned long long)step));
    TAGC_TRY(tagc_path_print(save->replaced, "%s/.step-%08llu.replaced.partial", save->dir,
                             (unsigned long long)step));
    return tagc_path_print(save->final, "%s/step-%08llu", save->dir, (unsigned long long)step);
}

/* ---- this rank's file ---- */

static tagc_status write_bytes(int fd, const void *bytes, size_t n_bytes, tagc_xxh3_state *hash,
                               const char *path) {
    const char *at = bytes;
    if (hash != NULL) tagc_xxh3_add(hash, bytes, n_bytes);
    while (n_bytes > 0) {
        ssize_t n = write(fd, at, n_bytes < (size_t)1 << 30 ? n_bytes : (size_t)1 << 30);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return tagc_fail(TAGC_ERR_IO, "cannot write %s: %s", path, strerror(n == 0 ? ENOSPC : errno));
        at += n;
        n_bytes -= (size_t)n;
    }
    return TAGC_OK;
}

/* The values are exact in bf16. */
static tagc_status write_halves(int fd, const float *values, uint64_t n, tagc_xxh3_state *hash,
                                const char *path) {
    uint16_t halves[4096];
    for (uint64_t at = 0, n_now; at < n; at += n_now) {
        n_now = n - at < 4096 ? n - at : 4096;
        tagc_bf16_narrow(values + at, halves, n_now);
        if (n_now % 2 == 1) halves[n_now] = 0; /* only in the last piece: 4096 is even */
        TAGC_TRY(write_bytes(fd, halves, (n_now + n_now % 2) * sizeof *halves, hash, path));
    }
    return TAGC_OK;
}

typedef struct model_file {
    int fd;
    tagc_xxh3_state *hash;
    const char *path;
} model_file;

static tagc_status write_piece(void *context, const void *bytes, size_t n_bytes) {
    const model_file *file = context;
    return write_bytes(file->fd, bytes, n_bytes, file->hash, file->path);
}

static tagc_status write_sections(tagc_save *save, int fd, tagc_xxh3_state *hash, const char *path) {
    const tagc_fsdp *f = save->fsdp;
    unsigned char header[TAGC_RANK_HEADER_BYTES];
    tagc_rank_file_header(save->manifest, f->rank, header);
    TAGC_TRY(write_bytes(fd, header, sizeof header, hash, path));
    for (int i = 0; i < f->tables.n_flats; i++) {
        const tagc_flat *flat = &f->tables.flats[i];
        uint64_t first, n_owned;
        tagc_manifest_owned(save->manifest, i, f->rank, &first, &n_owned);
        uint64_t at = n_owned > 0 ? first - flat->first_owned : 0;
        TAGC_TRY(write_bytes(fd, flat->master + at, n_owned * sizeof(float), hash, path));
        if (flat->moment1 != NULL)
            TAGC_TRY(write_bytes(fd, flat->moment1 + at, n_owned * sizeof(float), hash, path));
        TAGC_TRY(write_bytes(fd, flat->moment2 + at, n_owned * sizeof(float), hash, path));
        if (save->manifest->flats[i].n_gathers > 0)
            TAGC_TRY(write_halves(fd, flat->full + first, n_owned, hash, path));
    }
    if (lseek(fd, 0, SEEK_CUR) % 8 != 0) TAGC_TRY(write_bytes(fd, "\0\0\0", 4, hash, path));
    model_file file = {fd, hash, path};
    return tagc_model_write(f->model, write_piece, &file);
}

/* Syncs and closes the file; keeps the first failure. */
static tagc_status close_file(int fd, tagc_status status, const char *path) {
    if (status == TAGC_OK && fsync(fd) != 0)
        status = tagc_fail(TAGC_ERR_IO, "cannot sync %s: %s", path, strerror(errno));
    if (close(fd) != 0 && status == TAGC_OK)
        status = tagc_fail(TAGC_ERR_IO, "cannot close %s: %s", path, strerror(errno));
    return status;
}

static tagc_status write_rank_file(tagc_save *save, tagc_manifest_file *file) {
    const tagc_fsdp *f = save->fsdp;
    char path[TAGC_PATH_BYTES];
    TAGC_TRY(tagc_path_print(path, "%s/rank-%d.bin", save->partial, f->rank));
    tagc_xxh3_state hash;
    tagc_xxh3_begin(&hash);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    tagc_status status =
        fd >= 0 ? TAGC_OK : tagc_fail(TAGC_ERR_IO, "cannot create %s: %s", path, strerror(errno));
    if (fd >= 0) status = close_file(fd, write_sections(save, fd, &hash, path), path);
    file->n_model = save->manifest->files[f->rank].n_model;
    file->n_bytes = tagc_rank_file_bytes(save->manifest, f->rank);
    file->checksum = tagc_xxh3_end(&hash);
    tagc_fsdp_gathered(f, &file->gather_sent, &file->gather_received);
    return status;
}

/* ---- rank 0's part ---- */

static tagc_status make_partial(tagc_save *save) {
    TAGC_TRY(tagc_path_make_dirs(save->dir));
    TAGC_TRY(tagc_folder_remove(save->partial));
    return tagc_path_make_dirs(save->partial);
}

static tagc_status write_manifest(tagc_save *save) {
    char path[TAGC_PATH_BYTES], *text;
    TAGC_TRY(tagc_path_print(path, "%s/manifest.json", save->partial));
    TAGC_TRY(tagc_manifest_print(save->manifest, &text));
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    tagc_status status =
        fd >= 0 ? TAGC_OK : tagc_fail(TAGC_ERR_IO, "cannot create %s: %s", path, strerror(errno));
    if (fd >= 0) status = close_file(fd, write_bytes(fd, text, strlen(text), NULL, path), path);
    free(text);
    return status;
}

static tagc_status publish(tagc_save *save) {
    TAGC_TRY(write_manifest(save));
    TAGC_TRY(tagc_path_sync_dir(save->partial));
    TAGC_TRY(tagc_folder_remove(save->replaced));
    int again = rename(save->final, save->replaced) == 0; /* an older save of this step exists */
    tagc_status status = TAGC_OK;
    if (rename(save->partial, save->final) != 0)
        status = tagc_fail(TAGC_ERR_IO, "cannot rename %s: %s", save->partial, strerror(errno));
    else if ((status = tagc_path_sync_dir(save->dir)) != TAGC_OK)
        rename(save->final, save->partial);
    if (status != TAGC_OK && again) rename(save->replaced, save->final);
    if (status == TAGC_OK && again)
        tagc_folder_remove(save->replaced); /* if this fails, prune removes it later */
    return status;
}

static tagc_status save_all(tagc_save *save) {
    const tagc_fsdp *f = save->fsdp;
    int first = f->rank == 0;
    TAGC_TRY(tagc_levels_agree(NULL, save->comm, first ? make_partial(save) : TAGC_OK));
    tagc_manifest_file file = {0};
    tagc_status status = tagc_levels_agree(NULL, save->comm, write_rank_file(save, &file));
    if (status == TAGC_OK)
        status = tagc_comm_all_gather(f->comm, &file, sizeof file, save->manifest->files,
                                      (size_t)f->world_size * sizeof file);
    if (status == TAGC_OK) status = tagc_levels_agree(NULL, save->comm, first ? publish(save) : TAGC_OK);
    if (status != TAGC_OK && first) {
        char text[TAGC_ERROR_TEXT_BYTES]; /* keep the text of the first failure */
        snprintf(text, sizeof text, "%s", tagc_last_error());
        tagc_folder_remove(save->partial);
        tagc_fail(status, "%s", text);
    }
    return status;
}

tagc_status tagc_checkpoint_save(tagc_fsdp *fsdp, tagc_comm *comm, const char *dir, uint64_t step,
                                 const char *extra) {
    tagc_save *save = calloc(1, sizeof *save);
    tagc_status status = TAGC_OK;
    if (save == NULL) {
        status = tagc_fail(TAGC_ERR_MEMORY, "no memory to save a checkpoint");
    } else if (fsdp->order.micro_step != 0) {
        status = tagc_fail(TAGC_ERR_STATE, "a checkpoint between a backward pass and its step");
    } else {
        save->fsdp = fsdp;
        save->comm = comm;
        save->dir = dir;
        status = tagc_order_end_gathers(&fsdp->order); /* a replica is saved as the gather leaves it */
        if (status == TAGC_OK) status = describe(save, step, extra);
    }
    status = tagc_levels_agree(NULL, comm, status);
    if (status == TAGC_OK) status = save_all(save);
    if (save != NULL) tagc_manifest_destroy(save->manifest);
    free(save);
    return status;
}
