/* Loading: ranks verify the files before any of them changes a value, each some of them, and then read what they need. A read that fails
 * is an error, where in a mapped file it would end the process.
 *
 * Values are looked up tensor by tensor, so that the engine may have another world size, wrap, sharding or policy.
 * A residual e on one of W ranks adds e / W to the mean gradient. A position has C copies (one per rank, or one per
 * host). The new copy c gets the sum of the old copies c, c + C, ..., times W' / W for W' new ranks. So the sum of the
 * gradients that have not been sent stays the same. */
#include "codec/bf16.h"
#include "core/xxh3.h"
#include "fsdp/checkpoint.h"
#include "fsdp/checkpoint_files.h"
#include "fsdp/internal.h"
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
    char *schedule; /* (n_schedule of the manifest) */
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

/* Windows are those of one rank's gradients, which another number of ranks cannot use. */
static tagc_status read_schedule(tagc_load *load) {
    const tagc_manifest *m = load->manifest;
    int rank = m->world_size == load->fsdp->world_size ? load->fsdp->rank : 0;
    load->schedule = malloc(m->n_schedule > 0 ? (size_t)m->n_schedule : 1);
    if (load->schedule == NULL)
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for %llu bytes of the schedule",
                         (unsigned long long)m->n_schedule);
    return read_bytes(load, rank, tagc_rank_file_offset(m, rank, m->n_flats, TAGC_SECTION_MASTER),
                      load->schedule, (size_t)m->n_schedule);
}

static tagc_status read_all(tagc_load *load) {
    if (load->fsdp->order.micro_step != 0)
        return tagc_fail(TAGC_ERR_STATE, "a checkpoint between a backward pass and its step");
    TAGC_TRY(tagc_manifest_read(load->path, &load->manifest));
    TAGC_TRY(compare_tensors(load));
    for (int rank = 0; rank < load->manifest->world_size; rank++) TAGC_TRY(check_file(load, rank));
    return load->forks ? TAGC_OK : read_schedule(load);
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

/* Adds what this rank's share of the old copies holds of one tensor to out (n_residual), laid out as the new flat. */
static tagc_status add_residual(tagc_load *load, int tensor, uint64_t n_residual, float *out) {
    const tagc_fsdp *f = load->fsdp;
    const tagc_manifest *m = load->manifest;
    const tagc_manifest_tensor *old = &m->tensors[tensor];
    const tagc_manifest_flat *before = &m->flats[old->flat];
    const tagc_place *place = &f->tables.places[tensor];
    float factor = (float)f->world_size / (float)m->world_size, values[PIECE_ELEMS];
    for (uint64_t i = 0, n; i < old->n_elems; i += n) {
        tagc_cover to = tagc_residual_cover(f->tables.flats[place->flat].n_padded, n_residual, f->world_size,
                                            f->n_owners, f->rank, place->offset + i);
        n = old->n_elems - i < to.n_run ? old->n_elems - i : to.n_run;
        n = n < PIECE_ELEMS ? n : PIECE_ELEMS;
        for (int rank = 0; rank < m->world_size; rank++) {
            tagc_cover from = tagc_residual_cover(before->n_padded, before->n_residual, m->world_size,
                                                  m->n_owners, rank, old->offset + i);
            n = n < from.n_run ? n : from.n_run; /* the same for all ranks */
            if (!to.covers || !from.covers || from.copy % to.n_copies != to.copy) continue;
            TAGC_TRY(read_values(load, rank, old->flat, TAGC_SECTION_RESIDUAL, before->is_residual_bf16,
                                 from.at, n, values));
            for (uint64_t k = 0; k < n; k++) out[to.at + k] += values[k];
        }
        for (uint64_t k = 0; to.covers && k < n && m->world_size != f->world_size; k++)
            out[to.at + k] *= factor;
    }
    return TAGC_OK;
}

/* Loads the residual that this rank takes over. */
static tagc_status load_residual(tagc_load *load, int index) {
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
            TAGC_TRY(add_residual(load, f->tables.members[i], n_residual, out));
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
        TAGC_TRY(tagc_gatherer_set_replica(flat->gatherer, flat->full, flat->n_padded, n_gathers));
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

static tagc_status load_schedule(const tagc_load *load) {
    tagc_fsdp *f = load->fsdp;
    if (load->forks) return tagc_fsdp_begin_anew(f);
    return tagc_fsdp_load_schedule(f, load->schedule, (size_t)load->manifest->n_schedule,
                                   load->manifest->world_size == f->world_size);
}

static tagc_status load_checkpoint(tagc_fsdp *fsdp, tagc_comm *comm, const char *path, int forks,
                                   uint64_t *step, char **extra) {
    tagc_load load = {.fsdp = fsdp, .path = path, .forks = forks};
    for (int i = 0; i < N_OPEN; i++) load.open[i] = -1;
    *extra = NULL;
    tagc_status status = tagc_agree(comm, read_all(&load));
    if (status == TAGC_OK) status = tagc_fsdp_renew(fsdp);
    if (status == TAGC_OK) status = load_schedule(&load);
    if (status == TAGC_OK) {
        status = load_values(&load);
        for (int i = 0; status == TAGC_OK && i < fsdp->tables.n_flats; i++) status = load_residual(&load, i);
        if (status == TAGC_OK && !forks) status = load_replicas(&load);
        status = tagc_agree(comm, status); /* one rank alone may fail to read, or find what is not finite */
    }
    if (status == TAGC_OK) {
        *step = load.manifest->step;
        *extra = load.manifest->extra;
        load.manifest->extra = NULL;
    }
    close_files(&load);
    free(load.schedule);
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
