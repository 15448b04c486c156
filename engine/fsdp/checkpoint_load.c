/* Loading: all ranks map and verify the files before any of them changes a value.
 *
 * Values are looked up tensor by tensor, so that the engine may have another world size, wrap, sharding or policy.
 * A residual e on one of W ranks adds e / W to the mean gradient. A position has C copies (one per rank, or one per
 * host). The new copy c gets the sum of the old copies c, c + C, ..., times W' / W for W' new ranks. So the sum of the
 * gradients that have not been sent stays the same. */
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
        uint64_t n_residual = tagc_reducer_residual_elems(f->tables.flats[f->tables.places[i].flat].reducer);
        if (!load->forks && m->flats[old->flat].n_residual > 0 && n_residual == 0)
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

static float residual_value(const tagc_manifest_flat *flat, const void *section, uint64_t i) {
    float value;
    if (flat->is_residual_bf16)
        tagc_bf16_widen((const uint16_t *)section + i, &value, 1);
    else
        value = ((const float *)section)[i];
    return value;
}

/* Adds what this rank's share of the old copies holds of one tensor to out (n_residual), laid out as the new flat. */
static void add_residual(const tagc_load *load, int tensor, uint64_t n_residual, float *out) {
    const tagc_fsdp *f = load->fsdp;
    const tagc_manifest *m = load->manifest;
    const tagc_manifest_tensor *old = &m->tensors[tensor];
    const tagc_manifest_flat *before = &m->flats[old->flat];
    const tagc_place *place = &f->tables.places[tensor];
    float factor = (float)f->world_size / (float)m->world_size;
    for (uint64_t i = 0, n; i < old->n_elems; i += n) {
        tagc_cover to = tagc_residual_cover(f->tables.flats[place->flat].n_padded, n_residual, f->world_size,
                                            f->n_owners, f->rank, place->offset + i);
        n = old->n_elems - i < to.n_run ? old->n_elems - i : to.n_run;
        for (int rank = 0; rank < m->world_size; rank++) {
            tagc_cover from = tagc_residual_cover(before->n_padded, before->n_residual, m->world_size,
                                                  m->n_owners, rank, old->offset + i);
            n = n < from.n_run ? n : from.n_run; /* the same for all ranks */
            if (!to.covers || !from.covers || from.copy % to.n_copies != to.copy) continue;
            const void *section = section_of(load, rank, old->flat, TAGC_SECTION_RESIDUAL);
            for (uint64_t k = 0; k < n; k++) out[to.at + k] += residual_value(before, section, from.at + k);
        }
        for (uint64_t k = 0; to.covers && k < n && m->world_size != f->world_size; k++)
            out[to.at + k] *= factor;
    }
}

/* Loads the residual that this rank takes over. */
static tagc_status load_residual(const tagc_load *load, int index) {
    tagc_fsdp *f = load->fsdp;
    tagc_flat *flat = &f->tables.flats[index];
    uint64_t n_residual = tagc_reducer_residual_elems(flat->reducer);
    tagc_fsdp_drop_former(f, flat);
    int old = load->manifest->tensors[f->tables.members[flat->first_member]].flat;
    if (!load->forks) TAGC_TRY(tagc_reducer_set_steps(flat->reducer, load->manifest->flats[old].n_steps));
    if (n_residual == 0) return TAGC_OK;
    if (load->forks) return tagc_reducer_scale_residual(flat->reducer, 0);
    float *out = flat->full_gradient;                         /* unused between steps, and large enough */
    for (uint64_t i = 0; i < n_residual; i++) out[i] = -0.0f; /* adding -0 changes no bit, not even a sign */
    for (int i = flat->first_member; i < flat->first_member + flat->n_members; i++)
        if (load->manifest->flats[load->manifest->tensors[f->tables.members[i]].flat].n_residual > 0)
            add_residual(load, f->tables.members[i], n_residual, out);
    return tagc_reducer_set_residual(flat->reducer, out, n_residual);
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

/* Windows are those of one rank's gradients, which another number of ranks cannot use. */
static tagc_status load_schedule(const tagc_load *load) {
    tagc_fsdp *f = load->fsdp;
    const tagc_manifest *m = load->manifest;
    int is_same = m->world_size == f->world_size, rank = is_same ? f->rank : 0;
    if (load->forks) return tagc_fsdp_begin_anew(f);
    return tagc_fsdp_load_schedule(
        f, load->files[rank].bytes + tagc_rank_file_offset(m, rank, m->n_flats, TAGC_SECTION_MASTER),
        m->n_schedule, is_same);
}

static tagc_status load_checkpoint(tagc_fsdp *fsdp, tagc_comm *comm, const char *path, int forks,
                                   uint64_t *step, char **extra) {
    tagc_load load = {.fsdp = fsdp, .path = path, .forks = forks};
    *extra = NULL;
    tagc_status status = tagc_agree(comm, read_all(&load));
    if (status == TAGC_OK) status = tagc_fsdp_renew(fsdp);
    if (status == TAGC_OK) status = load_schedule(&load);
    if (status == TAGC_OK) {
        load_values(&load);
        for (int i = 0; status == TAGC_OK && i < fsdp->tables.n_flats; i++) status = load_residual(&load, i);
        if (status == TAGC_OK && !forks) status = load_replicas(&load);
        status = tagc_agree(comm, status); /* one rank alone may find a residual that is not finite */
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
