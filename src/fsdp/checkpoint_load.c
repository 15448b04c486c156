/* Loading: files are mapped and proven whole by all ranks before the first value is changed.
 *
 * Values are found tensor by tensor, so that another world size, wrap, sharding or policy finds them too.
 * A residual e on one of W ranks adds e / W to the mean gradient. When W' ranks go on, rank r takes those of
 * the old ranks r, r + W', ... and multiplies by W' / W: what is still to come from it stays the same. */
#include "fsdp/checkpoint.h"
#include "fsdp/checkpoint_files.h"
#include "fsdp/internal.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct tagc_mapping {
    const char *bytes;
    size_t n_bytes;
} tagc_mapping;

typedef struct tagc_load {
    tagc_fsdp *fsdp;
    const char *path;
    int forks; /* residuals stay behind */
    tagc_manifest *manifest;
    tagc_mapping *files; /* (old W) */
} tagc_load;

/* ---- before anything changes ---- */

static tagc_status compare_tensors(const tagc_load *load) {
    const tagc_fsdp *f = load->fsdp;
    const tagc_manifest *m = load->manifest;
    if (m->n_tensors != f->n_tensors)
        return tagc_fail(TAGC_ERR_MISMATCH, "%s has %d tensors, this model has %d", load->path, m->n_tensors,
                         f->n_tensors);
    for (int i = 0; i < f->n_tensors; i++) {
        const tagc_manifest_tensor *old = &m->tensors[i];
        const tagc_tensor_info *now = &f->tensors[i];
        if (strcmp(old->name, now->name) != 0 || old->n_rows != now->n_rows || old->n_cols != now->n_cols)
            return tagc_fail(TAGC_ERR_MISMATCH,
                             "%s has tensor %s (%llu x %llu) where this model has %s (%zu x %zu)", load->path,
                             old->name, (unsigned long long)old->n_rows, (unsigned long long)old->n_cols,
                             now->name, now->n_rows, now->n_cols);
        uint64_t n_residual;
        tagc_reducer_residual(f->flats[f->places[i].flat].reducer, &n_residual);
        if (!load->forks && m->flats[old->flat].n_residual > 0 && n_residual == 0)
            return tagc_fail(TAGC_ERR_MISMATCH,
                             "%s holds a residual of %s, which is not compressed here and would lose it",
                             load->path, now->name);
    }
    return TAGC_OK;
}

static tagc_status map_file(tagc_load *load, int rank) {
    char path[TAGC_PATH_BYTES];
    TAGC_TRY(tagc_path_print(path, "%s/rank-%d.bin", load->path, rank));
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) {
        int error = errno;
        if (fd >= 0) close(fd);
        return tagc_fail(TAGC_ERR_IO, "cannot read %s: %s", path, strerror(error));
    }
    size_t n_bytes = (size_t)info.st_size;
    void *bytes = MAP_FAILED;
    tagc_status status = TAGC_OK;
    if (n_bytes < TAGC_RANK_HEADER_BYTES)
        status = tagc_fail(TAGC_ERR_CORRUPT, "%s has %zu bytes, less than a header", path, n_bytes);
    else if ((bytes = mmap(NULL, n_bytes, PROT_READ, MAP_PRIVATE, fd, 0)) == MAP_FAILED)
        status = tagc_fail(TAGC_ERR_IO, "cannot read %s: %s", path, strerror(errno));
    close(fd);
    TAGC_TRY(status);
    load->files[rank] = (tagc_mapping){bytes, n_bytes};
    int verify = rank % load->fsdp->world_size == load->fsdp->rank; /* every file by one rank */
    status = tagc_rank_file_check(load->manifest, rank, bytes, n_bytes, verify);
    return status == TAGC_OK ? TAGC_OK : tagc_fail_in(status, "%s", path);
}

static tagc_status stage(tagc_load *load) {
    if (load->fsdp->micro_step != 0)
        return tagc_fail(TAGC_ERR_STATE, "a checkpoint between a backward pass and its step");
    TAGC_TRY(tagc_manifest_read(load->path, &load->manifest));
    TAGC_TRY(compare_tensors(load));
    load->files = calloc((size_t)load->manifest->world_size, sizeof *load->files);
    if (load->files == NULL) return tagc_fail(TAGC_ERR_MEMORY, "no memory for the files of %s", load->path);
    for (int rank = 0; rank < load->manifest->world_size; rank++) TAGC_TRY(map_file(load, rank));
    return TAGC_OK;
}

/* ---- the change ---- */

static const float *section_of(const tagc_load *load, int rank, int flat, tagc_section section) {
    return (const float *)(load->files[rank].bytes +
                           tagc_rank_file_offset(load->manifest, rank, flat, section));
}

/* Values [begin, begin + n) of an old flat, from whichever ranks owned them. */
static void copy_values(const tagc_load *load, int flat, uint64_t begin, uint64_t n, tagc_section section,
                        float *out) {
    for (int rank = 0; rank < load->manifest->world_size; rank++) {
        uint64_t first, n_owned;
        tagc_manifest_owned(load->manifest, flat, rank, &first, &n_owned);
        uint64_t from = begin > first ? begin : first,
                 to = begin + n < first + n_owned ? begin + n : first + n_owned;
        if (from >= to) continue;
        memcpy(out + (from - begin), section_of(load, rank, flat, section) + (from - first),
               (to - from) * sizeof *out);
    }
}

static void load_values(tagc_load *load) {
    tagc_fsdp *f = load->fsdp;
    for (int i = 0; i < f->n_tensors; i++) {
        const tagc_place *p = &f->places[i];
        const tagc_flat *flat = &f->flats[p->flat];
        const tagc_manifest_tensor *old = &load->manifest->tensors[i];
        uint64_t begin = old->offset + p->first;
        copy_values(load, old->flat, begin, p->n, TAGC_SECTION_MASTER, flat->master + p->at);
        copy_values(load, old->flat, begin, p->n, TAGC_SECTION_MOMENT1, flat->moment1 + p->at);
        copy_values(load, old->flat, begin, p->n, TAGC_SECTION_MOMENT2, flat->moment2 + p->at);
    }
    f->n_updates = load->manifest->n_updates;
}

/* What this rank takes over, laid out as the flat is now. out (n_padded). */
static void collect_residual(const tagc_load *load, int index, float *out) {
    const tagc_fsdp *f = load->fsdp;
    const tagc_flat *flat = &f->flats[index];
    const tagc_manifest *m = load->manifest;
    for (uint64_t i = 0; i < flat->n_padded; i++) out[i] = -0.0f; /* what adds nothing, not even a sign */
    for (int i = flat->first_member; i < flat->first_member + flat->n_members; i++) {
        int tensor = f->members[i];
        const tagc_manifest_tensor *old = &m->tensors[tensor];
        if (m->flats[old->flat].n_residual == 0) continue;
        float *to = out + f->places[tensor].offset;
        for (int rank = f->rank; rank < m->world_size; rank += f->world_size) {
            const float *from = section_of(load, rank, old->flat, TAGC_SECTION_RESIDUAL) + old->offset;
            for (uint64_t j = 0; j < old->n_elems; j++) to[j] += from[j];
        }
        if (m->world_size == f->world_size) continue;
        float factor = (float)f->world_size / (float)m->world_size;
        for (uint64_t j = 0; j < old->n_elems; j++) to[j] *= factor;
    }
}

/* A step that keeps nothing moves its whole gradient into the residual: that is how one is put in place. */
static tagc_status load_residual(const tagc_load *load, int index) {
    tagc_fsdp *f = load->fsdp;
    tagc_flat *flat = &f->flats[index];
    uint64_t n_residual;
    tagc_reducer_residual(flat->reducer, &n_residual);
    if (n_residual == 0) return TAGC_OK;
    if (load->forks) return tagc_reducer_scale_residual(flat->reducer, 0);
    collect_residual(load, index, flat->full_gradient);
    TAGC_TRY(tagc_reducer_scale_residual(flat->reducer, 0));
    TAGC_TRY(tagc_reducer_set_sparsity(flat->reducer, 1));
    TAGC_TRY(tagc_reducer_run(flat->reducer, flat->full_gradient, flat->gradient, NULL));
    return tagc_reducer_set_sparsity(flat->reducer, f->options.reducer.sparsity);
}

static tagc_status load_checkpoint(tagc_fsdp *fsdp, tagc_comm *comm, const char *path, int forks,
                                   uint64_t *step, char **extra) {
    tagc_load load = {.fsdp = fsdp, .path = path, .forks = forks};
    *extra = NULL;
    tagc_status status = tagc_agree(comm, stage(&load));
    if (status == TAGC_OK) status = tagc_fsdp_renew(fsdp);
    if (status == TAGC_OK) load_values(&load);
    for (int i = 0; status == TAGC_OK && i < fsdp->n_flats; i++) status = load_residual(&load, i);
    if (status == TAGC_OK) {
        *step = load.manifest->step;
        *extra = load.manifest->extra;
        load.manifest->extra = NULL;
    }
    for (int rank = 0; load.files != NULL && rank < load.manifest->world_size; rank++)
        if (load.files[rank].bytes != NULL) munmap((void *)load.files[rank].bytes, load.files[rank].n_bytes);
    free(load.files);
    tagc_manifest_destroy(load.manifest);
    return status;
}

tagc_status tagc_checkpoint_load(tagc_fsdp *fsdp, tagc_comm *comm, const char *path, uint64_t *step,
                                 char **extra) {
    return load_checkpoint(fsdp, comm, path, 0, step, extra);
}

tagc_status tagc_checkpoint_fork(tagc_fsdp *fsdp, tagc_comm *comm, const char *path, uint64_t *step,
                                 char **extra) {
    return load_checkpoint(fsdp, comm, path, 1, step, extra);
}
