/* Loading: all ranks map and verify the files before any of them changes a value.
 *
 * Values are looked up tensor by tensor, so that the engine may have another world size, wrap, sharding or policy. Residuals and
 * the schedule go by name, too, see tagc_model_load. */
#include "codec/bf16.h"
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
    int forks; /* residuals are not loaded */
    tagc_manifest *manifest;
    tagc_mapping *files; /* (old W) */
} tagc_load;

/* ---- before anything changes ---- */

static tagc_status compare_tensors(const tagc_load *load) {
    const tagc_fsdp *f = load->fsdp;
    const tagc_manifest *m = load->manifest;
    if (m->n_tensors != f->tables.n_tensors)
        return tagc_fail(TAGC_ERR_MISMATCH, "%s has %d tensors, this model has %d", load->path, m->n_tensors,
                         f->tables.n_tensors);
    for (int i = 0; i < f->tables.n_tensors; i++) {
        const tagc_manifest_tensor *old = &m->tensors[i];
        const tagc_tensor_info *now = &f->tables.tensors[i];
        if (strcmp(old->name, now->name) != 0 || old->n_rows != now->n_rows || old->n_cols != now->n_cols)
            return tagc_fail(TAGC_ERR_MISMATCH,
                             "%s has tensor %s (%llu x %llu) where this model has %s (%zu x %zu)", load->path,
                             old->name, (unsigned long long)old->n_rows, (unsigned long long)old->n_cols,
                             now->name, now->n_rows, now->n_cols);
        const tagc_flat *flat = &f->tables.flats[f->tables.places[i].flat];
        uint64_t n_residual = tagc_reducer_residual_elems(tagc_fsdp_part(f, flat)->reducer);
        if (!load->forks && m->flats[old->flat].has_residual && n_residual == 0)
            return tagc_fail(
                TAGC_ERR_MISMATCH,
                "%s holds a residual of %s, which would be lost: this run does not compress it, or all ranks "
                "are "
                "of"
                " one host. Go on with what it was compressed by, or fork it, which leaves residuals behind",
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
    int verify = rank % load->fsdp->world_size == load->fsdp->rank; /* one rank verifies each file */
    status = tagc_rank_file_check(load->manifest, rank, bytes, n_bytes, verify);
    return status == TAGC_OK ? TAGC_OK : tagc_fail_in(status, "%s", path);
}

static tagc_status read_all(tagc_load *load) {
    if (load->fsdp->order.micro_step != 0)
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

/* Copies values [begin, begin + n) of an old flat, from the ranks that owned them. */
static void copy_values(const tagc_load *load, int flat, uint64_t begin, uint64_t n, tagc_section section,
                        float *out) {
    for (int rank = 0; rank < load->manifest->world_size; rank++) {
        uint64_t first, n_owned;
        tagc_manifest_owned(load->manifest, flat, rank, &first, &n_owned);
        uint64_t from = begin > first ? begin : first,
                 to = begin + n < first + n_owned ? begin + n : first + n_owned;
        if (from >= to) continue;
        const float *values = section_of(load, rank, flat, section);
        if (section == TAGC_SECTION_REPLICA)
            tagc_bf16_widen((const uint16_t *)(const void *)values + (from - first), out + (from - begin),
                            to - from);
        else
            memcpy(out + (from - begin), values + (from - first), (to - from) * sizeof *out);
    }
}

static void load_values(tagc_load *load) {
    tagc_fsdp *f = load->fsdp;
    for (int i = 0; i < f->tables.n_tensors; i++) {
        const tagc_place *p = &f->tables.places[i];
        const tagc_flat *flat = &f->tables.flats[p->flat];
        const tagc_manifest_tensor *old = &load->manifest->tensors[i];
        uint64_t begin = old->offset + p->first;
        copy_values(load, old->flat, begin, p->n, TAGC_SECTION_MASTER, flat->master + p->at);
        if (flat->moment1 != NULL && load->manifest->flats[old->flat].has_moment1)
            copy_values(load, old->flat, begin, p->n, TAGC_SECTION_MOMENT1, flat->moment1 + p->at);
        else if (flat->moment1 != NULL)
            memset(flat->moment1 + p->at, 0, p->n * sizeof *flat->moment1);
        copy_values(load, old->flat, begin, p->n, TAGC_SECTION_MOMENT2, flat->moment2 + p->at);
    }
    f->n_updates = load->manifest->n_updates;
}

static tagc_status load_model(const tagc_load *load) {
    const tagc_manifest *m = load->manifest;
    size_t n = (size_t)m->world_size;
    void *memory;
    TAGC_TRY(tagc_agree(load->fsdp->comm, tagc_memory_create(n * (sizeof(void *) + sizeof(size_t)),
                                                             "states of all ranks", &memory)));
    const void **states = memory;
    size_t *sizes = (size_t *)(void *)(states + n);
    for (int rank = 0; rank < m->world_size; rank++) {
        states[rank] =
            load->files[rank].bytes + tagc_rank_file_offset(m, rank, m->n_flats, TAGC_SECTION_MASTER);
        sizes[rank] = m->files[rank].n_model;
    }
    tagc_status status = tagc_fsdp_load_model(load->fsdp, states, sizes, n);
    tagc_memory_destroy(memory);
    return status;
}

/* ---- replicas ---- */

static int had_replica(const tagc_load *load, const tagc_flat *flat) {
    const tagc_fsdp *f = load->fsdp;
    for (int i = flat->first_member; i < flat->first_member + flat->n_members; i++)
        if (!load->manifest->flats[load->manifest->tensors[f->tables.members[i]].flat].n_gathers) return 0;
    return flat->gatherer != NULL && f->options.gather >= TAGC_GATHER_DELTA8;
}

/* Deltas continue from the saved replica. If a unit has none, its next gather sends whole values. */
static tagc_status load_replica(const tagc_load *load, int unit, int *n_loaded) {
    tagc_fsdp *f = load->fsdp;
    const tagc_layout_unit *u = &f->tables.units[unit];
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++)
        if (!had_replica(load, &f->tables.flats[i])) return TAGC_OK;
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) {
        tagc_flat *flat = &f->tables.flats[i];
        uint64_t n_gathers = 0;
        memset(flat->full, 0, flat->n_padded * sizeof *flat->full);
        for (int k = flat->first_member; k < flat->first_member + flat->n_members; k++) {
            const tagc_manifest_tensor *old = &load->manifest->tensors[f->tables.members[k]];
            copy_values(load, old->flat, old->offset, old->n_elems, TAGC_SECTION_REPLICA,
                        flat->full + f->tables.places[f->tables.members[k]].offset);
            n_gathers = load->manifest->flats[old->flat].n_gathers;
        }
        TAGC_TRY(tagc_gatherer_set_replica(flat->gatherer, flat->full, n_gathers));
    }
    tagc_order_make_present(&f->order, unit);
    (*n_loaded)++;
    return TAGC_OK;
}

static tagc_status load_replicas(const tagc_load *load) {
    tagc_fsdp *f = load->fsdp;
    int n_loaded = 0;
    for (int unit = 0; unit < f->tables.n_units; unit++) TAGC_TRY(load_replica(load, unit, &n_loaded));
    if (n_loaded > 0 &&
        load->manifest->world_size == f->world_size) /* else all is gathered anew and counted then */
        tagc_fsdp_set_gathered(f, load->manifest->files[f->rank].gather_sent,
                               load->manifest->files[f->rank].gather_received);
    return TAGC_OK;
}

static tagc_status load_checkpoint(tagc_fsdp *fsdp, tagc_comm *comm, const char *path, int forks,
                                   uint64_t *step, char **extra) {
    tagc_load load = {.fsdp = fsdp, .path = path, .forks = forks};
    *extra = NULL;
    tagc_status status = tagc_agree(comm, read_all(&load));
    if (status == TAGC_OK) status = tagc_fsdp_renew(fsdp);
    if (status == TAGC_OK && !forks && !load.manifest->is_followed) status = tagc_fsdp_stop_following(fsdp);
    if (status == TAGC_OK) status = forks ? tagc_fsdp_begin_anew(fsdp) : load_model(&load);
    if (status == TAGC_OK) {
        load_values(&load);
        if (!forks) status = tagc_agree(comm, load_replicas(&load));
    }
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
