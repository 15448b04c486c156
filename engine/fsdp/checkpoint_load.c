/* Loading: ranks verify the files before any of them changes a value, each some of them, and then read what they need. A read that fails
 * is an error, where in a mapped file it would end the process.
 *
 * Values are looked up tensor by tensor, so that the engine may have another world size, wrap, sharding or policy. Residuals and
 * the schedule go by name, too, see tagc_model_load. */
#include "codec/bf16.h"
#include "core/xxh3.h"
#include "fsdp/checkpoint.h"
#include "fsdp/checkpoint_format.h"
#include "fsdp/internal.h"
#include "unit/gather.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { N_OPEN = 64, PIECE_BYTES = 1 << 16, PIECE_ELEMS = 4096 };

typedef struct tagc_load {
    tagc_fsdp *fsdp;
    const char *path;
    int forks; /* residuals are not loaded */
    tagc_manifest *manifest;
    const void **models; /* (n_models) states of tagc_model that this rank takes, and their sizes */
    size_t *sizes, n_models;
    /* Files that are open, of ranks that are apart by multiples of N_OPEN: file of rank R at R % N_OPEN, or -1. */
    int open[N_OPEN], rank_of[N_OPEN];
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

static tagc_status cannot_read(const tagc_load *load, int rank, const char *why) {
    return tagc_fail(TAGC_ERR_IO, "cannot read %s/rank-%d.bin: %s", load->path, rank, why);
}

static tagc_status open_file(tagc_load *load, int rank, int *fd) {
    int *own = &load->open[rank % N_OPEN];
    if (*own >= 0 && load->rank_of[rank % N_OPEN] != rank) {
        close(*own);
        *own = -1;
    }
    if (*own < 0) {
        char path[TAGC_PATH_BYTES];
        TAGC_TRY(tagc_path_print(path, "%s/rank-%d.bin", load->path, rank));
        *own = open(path, O_RDONLY | O_CLOEXEC);
        if (*own < 0) return cannot_read(load, rank, strerror(errno));
        load->rank_of[rank % N_OPEN] = rank;
    }
    *fd = *own;
    return TAGC_OK;
}

static void close_files(tagc_load *load) {
    for (int i = 0; i < N_OPEN; i++)
        if (load->open[i] >= 0) close(load->open[i]);
}

static tagc_status read_bytes(tagc_load *load, int rank, uint64_t offset, void *to, size_t n_bytes) {
    int fd;
    TAGC_TRY(open_file(load, rank, &fd));
    char *at = to;
    while (n_bytes > 0) {
        ssize_t n = pread(fd, at, n_bytes < (size_t)1 << 30 ? n_bytes : (size_t)1 << 30, (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return cannot_read(load, rank, n == 0 ? "it has become shorter" : strerror(errno));
        at += n;
        offset += (uint64_t)n;
        n_bytes -= (size_t)n;
    }
    return TAGC_OK;
}

static tagc_status hash_file(tagc_load *load, int rank, uint64_t n_bytes, uint64_t *hash) {
    char piece[PIECE_BYTES];
    tagc_xxh3_state state;
    tagc_xxh3_begin(&state);
    for (uint64_t at = 0, n; at < n_bytes; at += n) {
        n = n_bytes - at < sizeof piece ? n_bytes - at : sizeof piece;
        TAGC_TRY(read_bytes(load, rank, at, piece, (size_t)n));
        tagc_xxh3_add(&state, piece, (size_t)n);
    }
    *hash = tagc_xxh3_end(&state);
    return TAGC_OK;
}

static tagc_status check_file(tagc_load *load, int rank) {
    int fd, verifies = rank % load->fsdp->world_size == load->fsdp->rank; /* one rank verifies each file */
    struct stat info;
    unsigned char header[TAGC_RANK_HEADER_BYTES];
    uint64_t hash = 0;
    TAGC_TRY(open_file(load, rank, &fd));
    if (fstat(fd, &info) != 0) return cannot_read(load, rank, strerror(errno));
    tagc_status status = TAGC_OK;
    if (info.st_size < TAGC_RANK_HEADER_BYTES)
        status =
            tagc_fail(TAGC_ERR_CORRUPT, "it has %lld bytes, less than a header", (long long)info.st_size);
    if (status == TAGC_OK) TAGC_TRY(read_bytes(load, rank, 0, header, sizeof header));
    if (status == TAGC_OK && verifies) TAGC_TRY(hash_file(load, rank, (uint64_t)info.st_size, &hash));
    if (status == TAGC_OK)
        status =
            tagc_rank_file_check(load->manifest, rank, header, (size_t)info.st_size, verifies ? &hash : NULL);
    return status == TAGC_OK ? TAGC_OK : tagc_fail_in(status, "%s/rank-%d.bin", load->path, rank);
}

/* Residuals and schedules that tagc_model_load may take on this rank: its own, or those of other ranks by their hosts. */
static int may_take(const tagc_load *load, int rank) {
    const tagc_model *model = load->fsdp->model;
    return rank == model->rank || rank % model->n_hosts == model->host;
}

static tagc_status read_models(tagc_load *load) {
    const tagc_manifest *m = load->manifest;
    int n = 0;
    size_t n_bytes = 0;
    for (int rank = 0; rank < m->world_size; rank++)
        if (may_take(load, rank)) n++, n_bytes += tagc_aligned(m->files[rank].n_model);
    size_t lists = (size_t)n * (sizeof(void *) + sizeof(size_t));
    void *memory;
    TAGC_TRY(tagc_memory_create(tagc_aligned(lists) + n_bytes, "states of the ranks before", &memory));
    load->models = memory;
    load->n_models = (size_t)n;
    load->sizes = (size_t *)(void *)(load->models + n);
    char *to = (char *)memory + tagc_aligned(lists);
    for (int rank = 0, i = 0; rank < m->world_size; rank++) {
        if (!may_take(load, rank)) continue;
        load->models[i] = to;
        load->sizes[i] = m->files[rank].n_model;
        TAGC_TRY(read_bytes(load, rank, tagc_rank_file_offset(m, rank, m->n_flats, TAGC_SECTION_MASTER), to,
                            load->sizes[i]));
        to += tagc_aligned(load->sizes[i++]);
    }
    return TAGC_OK;
}

static tagc_status read_all(tagc_load *load) {
    if (load->fsdp->order.micro_step != 0)
        return tagc_fail(TAGC_ERR_STATE, "a checkpoint between a backward pass and its step");
    TAGC_TRY(tagc_manifest_read(load->path, &load->manifest));
    TAGC_TRY(compare_tensors(load));
    for (int rank = 0; rank < load->manifest->world_size; rank++) TAGC_TRY(check_file(load, rank));
    return load->forks ? TAGC_OK : read_models(load);
}

/* ---- the change ---- */

/* Reads values [first, first + n) of a section, which are fp32, or bf16 if is_bf16. */
static tagc_status read_values(tagc_load *load, int rank, int flat, tagc_section section, int is_bf16,
                               uint64_t first, uint64_t n, float *out) {
    uint64_t offset = tagc_rank_file_offset(load->manifest, rank, flat, section);
    if (!is_bf16) return read_bytes(load, rank, offset + first * sizeof *out, out, (size_t)n * sizeof *out);
    uint16_t halves[PIECE_ELEMS];
    for (uint64_t at = 0, n_now; at < n; at += n_now) {
        n_now = n - at < PIECE_ELEMS ? n - at : PIECE_ELEMS;
        TAGC_TRY(read_bytes(load, rank, offset + (first + at) * sizeof *halves, halves,
                            (size_t)n_now * sizeof *halves));
        tagc_bf16_widen(halves, out + at, n_now);
    }
    return TAGC_OK;
}

/* Copies values [begin, begin + n) of an old flat, from the ranks that owned them. */
static tagc_status copy_values(tagc_load *load, int flat, uint64_t begin, uint64_t n, tagc_section section,
                               float *out) {
    for (int rank = 0; rank < load->manifest->world_size; rank++) {
        uint64_t first, n_owned;
        tagc_manifest_owned(load->manifest, flat, rank, &first, &n_owned);
        uint64_t from = begin > first ? begin : first,
                 to = begin + n < first + n_owned ? begin + n : first + n_owned;
        if (from >= to) continue;
        TAGC_TRY(read_values(load, rank, flat, section, section == TAGC_SECTION_REPLICA, from - first,
                             to - from, out + (from - begin)));
    }
    return TAGC_OK;
}

static tagc_status load_values(tagc_load *load) {
    tagc_fsdp *f = load->fsdp;
    for (int i = 0; i < f->tables.n_tensors; i++) {
        const tagc_place *p = &f->tables.places[i];
        const tagc_flat *flat = &f->tables.flats[p->flat];
        const tagc_manifest_tensor *old = &load->manifest->tensors[i];
        uint64_t begin = old->offset + p->first;
        TAGC_TRY(copy_values(load, old->flat, begin, p->n, TAGC_SECTION_MASTER, flat->master + p->at));
        if (flat->moment1 != NULL && load->manifest->flats[old->flat].has_moment1)
            TAGC_TRY(copy_values(load, old->flat, begin, p->n, TAGC_SECTION_MOMENT1, flat->moment1 + p->at));
        else if (flat->moment1 != NULL)
            memset(flat->moment1 + p->at, 0, p->n * sizeof *flat->moment1);
        TAGC_TRY(copy_values(load, old->flat, begin, p->n, TAGC_SECTION_MOMENT2, flat->moment2 + p->at));
    }
    f->n_updates = load->manifest->n_updates;
    return TAGC_OK;
}

/* ---- replicas ---- */

static int had_replica(const tagc_load *load, const tagc_flat *flat) {
    const tagc_fsdp *f = load->fsdp;
    for (int i = flat->first_member; i < flat->first_member + flat->n_members; i++)
        if (!load->manifest->flats[load->manifest->tensors[f->tables.members[i]].flat].n_gathers) return 0;
    return flat->gatherer != NULL && f->options.gather >= TAGC_GATHER_DELTA8;
}

/* Deltas continue from the saved replica. If a unit has none, its next gather sends whole values. */
static tagc_status load_replica(tagc_load *load, int unit, int *n_loaded) {
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
            TAGC_TRY(copy_values(load, old->flat, old->offset, old->n_elems, TAGC_SECTION_REPLICA,
                                 flat->full + f->tables.places[f->tables.members[k]].offset));
            n_gathers = load->manifest->flats[old->flat].n_gathers;
        }
        TAGC_TRY(tagc_flat_gatherer_set_replica(flat->gatherer, flat->full, n_gathers));
    }
    tagc_order_make_present(&f->order, unit);
    (*n_loaded)++;
    return TAGC_OK;
}

static tagc_status load_replicas(tagc_load *load) {
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
    for (int i = 0; i < N_OPEN; i++) load.open[i] = -1;
    *extra = NULL;
    tagc_status status = tagc_levels_agree(NULL, comm, read_all(&load));
    if (status == TAGC_OK) status = tagc_fsdp_renew(fsdp);
    if (status == TAGC_OK && !forks && !load.manifest->is_followed) status = tagc_fsdp_stop_following(fsdp);
    if (status == TAGC_OK)
        status = forks ? tagc_fsdp_begin_anew(fsdp)
                       : tagc_fsdp_load_model(fsdp, load.models, load.sizes, load.n_models);
    if (status == TAGC_OK) {
        status = load_values(&load);
        if (status == TAGC_OK && !forks) status = load_replicas(&load);
        status = tagc_levels_agree(NULL, comm, status); /* one rank alone may fail to read */
    }
    if (status == TAGC_OK) {
        *step = load.manifest->step;
        *extra = load.manifest->extra;
        load.manifest->extra = NULL;
    }
    close_files(&load);
    tagc_memory_destroy(load.models);
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
